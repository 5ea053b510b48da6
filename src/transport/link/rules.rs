//! Ways to break the link layer on purpose, so that the checks can be checked.
//!
//! A rule can be broken only in a build with the `testing` feature; elsewhere [`LinkRules`] is empty and every
//! question to it is the constant `false`.

/// One broken rule of the link layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum LinkMutation {
    /// A session takes frames before its router is told that the peer is up.
    TakesUnreported,
    /// Frames are written before the other end's router was told.
    WritesUntold,
    /// A session that goes on writes nothing again.
    WritesNothingAgain,
    /// What was written counts as received when the session goes on.
    WrittenIsReceived,
    /// An acknowledgement counts for one frame more than it names, sent or not.
    CountsOneMore,
    /// A frame that comes again is given out again.
    GivesTwice,
    /// Frames behind a gap are taken.
    TakesBehindGap,
    /// A session is replaced by the next one and nobody is told that it is down.
    ReplacesInSilence,
    /// What a session had not sent goes into the next one.
    QueueOutlives,
}

impl LinkMutation {
    /// All of them.
    pub const ALL: &[LinkMutation] = &[
        LinkMutation::TakesUnreported,
        LinkMutation::WritesUntold,
        LinkMutation::WritesNothingAgain,
        LinkMutation::WrittenIsReceived,
        LinkMutation::CountsOneMore,
        LinkMutation::GivesTwice,
        LinkMutation::TakesBehindGap,
        LinkMutation::ReplacesInSilence,
        LinkMutation::QueueOutlives,
    ];
}

/// The rules of the link layer in force: all of them, or all but one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct LinkRules {
    #[cfg(feature = "testing")]
    broken: Option<LinkMutation>,
}

impl LinkRules {
    /// The link layer as written.
    pub fn all() -> Self {
        Self::default()
    }

    /// The link layer with one rule broken.
    #[cfg(feature = "testing")]
    pub fn broken(mutation: LinkMutation) -> Self {
        Self { broken: Some(mutation) }
    }

    /// Whether this rule is broken.
    #[inline]
    pub fn breaks(self, mutation: LinkMutation) -> bool {
        #[cfg(feature = "testing")]
        return self.broken == Some(mutation);
        #[cfg(not(feature = "testing"))]
        {
            let _ = mutation;
            false
        }
    }
}
