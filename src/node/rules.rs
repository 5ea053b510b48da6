//! Ways to break the protocol on purpose, so that the checks can be checked.
//!
//! A rule can be broken only in a build with the `testing` feature; elsewhere [`Rules`] is empty and every
//! question to it is the constant `false`.

/// One broken rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Mutation {
    /// A view that grows is committed without being prepared.
    NoPrepareGrow,
    /// A view that only shrinks is committed without being prepared.
    NoPrepareShrink,
    /// A caller that is not `Ready` asks the router all the same, with its view's hash.
    UnreadySenderTrusted,
    /// The view hash covers names, not incarnations.
    NamesOnlyHash,
    /// A member that is still owed data gets an announcement.
    AnnounceOwed,
    /// The sweep judges rows that their source has not yet agreed to.
    NoWatermark,
    /// A link that broke and came back within a round is not remembered as lost.
    ForgetLost,
    /// A cancelled round is not announced again.
    QuietCancel,
    /// A snapshot leaves out the groups that are being claimed, and does not claim them again.
    OmitClaiming,
    /// A gather that was cut short by the next commit is forgotten.
    GatherCut,
    /// Every router gets a delta, also one that is new to us.
    DeltaAlways,
    /// A retraction deletes the row instead of leaving a tombstone.
    DeleteInsteadOfTombstone,
    /// An older claim beats a newer tombstone.
    ClaimAlwaysWins,
    /// A Leaving is acknowledged without marking the peer as in transition.
    AckWithoutMark,
    /// A router decides without comparing the caller's view with its own.
    NoHashCheck,
    /// A router decides while it is not `Ready`.
    UnreadyRouterDecides,
    /// A router leaves its own members out of its targets.
    SelfLeftOut,
    /// A join is answered before the router has the claim.
    AnswerBeforeAck,
    /// The retraction of a batch that was overtaken by a new claim still empties the group.
    StaleRetractAck,
    /// A group in cooldown is not told to a new router.
    ForgetCooldown,
    /// An older round is applied after a newer one.
    OldRoundApplied,
    /// A group that is held is said to be not held.
    NotHeldWhileHeld,
    /// Broadcasts that wait for a dead or suspect router are not flooded.
    NoFloodOnDeadRouter,
    /// Receivers do not drop second copies.
    NoDedupe,
    /// The origin does not send to the targets that its router could not serve.
    FailedNotResent,
    /// The origin says that all its broadcasts are settled while some are open.
    FloorRunsAhead,
    /// An acknowledgement of a round that was given up counts for the next one.
    StaleLeavingAck,
    /// A round is committed when the first member has acknowledged it.
    CommitOnFirstAck,
    /// A snapshot leaves its source's older rows as they are.
    SnapshotKeepsOlder,
    /// A delta removes the source's older rows, as only a snapshot may.
    DeltaRemoves,
    /// A request for a repair is not answered.
    RepairsIgnored,
    /// The view hash leaves out who drains.
    DrainOutsideHash,
    /// A claim that timed out is forgotten instead of taken back.
    LateClaimForgotten,
    /// The acknowledgement of an earlier claim answers a later one.
    StaleClaimAck,
    /// A tombstone is dropped while an earlier round of its source is still arriving.
    TombstoneDroppedEarly,
    /// A claim beats a tombstone of its own version.
    ClaimWinsEqual,
    /// A router does not look again, after its read, whether the view is still the same. Only threads can show
    /// it: the checker of their orders does.
    NoSecondLook,
}

impl Mutation {
    /// All of them.
    pub const ALL: &[Mutation] = &[
        Mutation::NoPrepareGrow,
        Mutation::NoPrepareShrink,
        Mutation::UnreadySenderTrusted,
        Mutation::NamesOnlyHash,
        Mutation::AnnounceOwed,
        Mutation::NoWatermark,
        Mutation::ForgetLost,
        Mutation::QuietCancel,
        Mutation::OmitClaiming,
        Mutation::GatherCut,
        Mutation::DeltaAlways,
        Mutation::DeleteInsteadOfTombstone,
        Mutation::ClaimAlwaysWins,
        Mutation::AckWithoutMark,
        Mutation::NoHashCheck,
        Mutation::UnreadyRouterDecides,
        Mutation::SelfLeftOut,
        Mutation::AnswerBeforeAck,
        Mutation::StaleRetractAck,
        Mutation::ForgetCooldown,
        Mutation::OldRoundApplied,
        Mutation::NotHeldWhileHeld,
        Mutation::NoFloodOnDeadRouter,
        Mutation::NoDedupe,
        Mutation::FailedNotResent,
        Mutation::FloorRunsAhead,
        Mutation::StaleLeavingAck,
        Mutation::CommitOnFirstAck,
        Mutation::SnapshotKeepsOlder,
        Mutation::DeltaRemoves,
        Mutation::RepairsIgnored,
        Mutation::DrainOutsideHash,
        Mutation::LateClaimForgotten,
        Mutation::StaleClaimAck,
        Mutation::TombstoneDroppedEarly,
        Mutation::ClaimWinsEqual,
        Mutation::NoSecondLook,
    ];
}

/// The rules in force: all of them, or all but one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Rules {
    #[cfg(feature = "testing")]
    broken: Option<Mutation>,
}

impl Rules {
    /// The protocol as written.
    pub fn all() -> Self {
        Self::default()
    }

    /// The protocol with one rule broken.
    #[cfg(feature = "testing")]
    pub fn broken(mutation: Mutation) -> Self {
        Self { broken: Some(mutation) }
    }

    /// Whether this rule is broken.
    #[inline]
    pub fn breaks(self, mutation: Mutation) -> bool {
        #[cfg(feature = "testing")]
        return self.broken == Some(mutation);
        #[cfg(not(feature = "testing"))]
        {
            let _ = mutation;
            false
        }
    }
}
