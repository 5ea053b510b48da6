//! Ways to break the cache's protocol on purpose, so that the checks can be checked.
//!
//! A rule can be broken only in a build with the `testing` feature; elsewhere [`Rules`] is empty and every question to
//! it is the constant `false`.

/// One broken rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Mutation {
    /// A node carries out what is forwarded to it, whether it serves the partition or not.
    BlindExecution,
    /// A snapshot has the records only: no tombstones, no floor.
    PutsOnly,
    /// A replica does not look whether a write before the one that came is missing.
    OutOfOrder,
    /// A takeover counts owners that have not answered.
    QuorumCountsSilence,
    /// An owner takes writes of an epoch that is over.
    NoEpochCheck,
    /// A delete is forgotten at once.
    TombstoneDroppedEarly,
    /// A node serves before its copy is active: before it has all that was acknowledged.
    ServeBeforeActive,
    /// A `Sync` write is answered before the majority has it.
    AckBeforeMajority,
    /// A partition is born without asking all members for copies.
    BirthUnasked,
    /// A `Strong` primary reads its copy whether the other owners have granted it a lease or not.
    ReadWithoutLease,
    /// A `Strong` write is committed as soon as the primary has it.
    CommitBeforeAll,
    /// An owner takes over while the lease that it has granted to the primary still runs.
    TakeoverUnderLease,
    /// A lease is used by one who has not heard what its giver had heard.
    LeaseUnheard,
    /// A new `Strong` primary serves before all other owners have its log.
    ServeBeforeAll,
    /// A node that sees no leader takes what it wishes for decided.
    DecideAlone,
    /// A copy that parted from its primary's is dropped without offering what it alone has.
    CopyNotOffered,
    /// A read by quorum is decided by its first answer.
    OneCopyIsQuorum,
    /// A copy answers a session whatever it has to have reached.
    TokenIgnored,
    /// A primary hands over before the next one has everything.
    HandOverUnflushed,
    /// An operation that is sent again, because its answer was lost, is carried out again.
    AnswersForgotten,
    /// An owner that the ring no longer wants goes before the new ones are there.
    OwnersDroppedEarly,
    /// `min_copies` is asked for when a write begins, and not when it is answered.
    MinCopiesForgotten,
    /// `expected_nodes` is not looked at.
    ExpectedIgnored,
}

impl Mutation {
    /// Those of write mode `Strong`.
    pub const STRONG: &[Mutation] = &[
        Mutation::ReadWithoutLease,
        Mutation::CommitBeforeAll,
        Mutation::TakeoverUnderLease,
        Mutation::LeaseUnheard,
        Mutation::ServeBeforeAll,
        Mutation::DecideAlone,
    ];

    /// Those of the other write modes whose effect a run of a whole cluster does not show: a schedule by hand does.
    pub const BY_HAND: &[Mutation] = &[Mutation::NoEpochCheck];

    /// All others of the other write modes: the simulator of whole clusters finds each.
    pub const ALL: &[Mutation] = &[
        Mutation::BlindExecution,
        Mutation::PutsOnly,
        Mutation::OutOfOrder,
        Mutation::QuorumCountsSilence,
        Mutation::TombstoneDroppedEarly,
        Mutation::ServeBeforeActive,
        Mutation::AckBeforeMajority,
        Mutation::BirthUnasked,
        Mutation::CopyNotOffered,
        Mutation::OneCopyIsQuorum,
        Mutation::TokenIgnored,
        Mutation::HandOverUnflushed,
        Mutation::AnswersForgotten,
        Mutation::OwnersDroppedEarly,
        Mutation::MinCopiesForgotten,
        Mutation::ExpectedIgnored,
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
