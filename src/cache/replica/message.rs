//! What the copies of one partition say to each other.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::cache::store::{Entry, SnapshotHeader, Write};
use crate::cache::version::{Epoch, Lineage, Version};
use crate::types::Peer;

/// The most owners, old sets of owners, and entries of one message that are taken in.
pub(super) const MAX_OWNERS: usize = 1024;
pub(super) const MAX_SETS: usize = 64;
/// The highest counter of an epoch, and number of a write, that is taken in or begun. One number of a peer that is broken
/// must not keep others from counting on. Those that come about by mistake, near a power of two, are either above it
/// and ignored, or so far below it that nobody ever counts from there to here; and so is every clock, in nanoseconds too.
pub(super) const MAX_NUMBER: u64 = 3 << 61;

/// The counter of the epoch after this one; `None` if nobody would take it in.
pub(super) fn next_counter(counter: u64) -> Option<u64> {
    counter.checked_add(1).filter(|next| *next <= MAX_NUMBER)
}

fn in_range(epoch: &Epoch) -> bool {
    epoch.counter <= MAX_NUMBER
}

fn is_bounded(version: &Version) -> bool {
    in_range(&version.epoch) && version.seq <= MAX_NUMBER
}

fn are_bounded(lineage: &Lineage) -> bool {
    lineage.entries().iter().all(|(epoch, base)| in_range(epoch) && base.iter().all(is_bounded))
}

fn write_in_range(write: &Write) -> bool {
    match write {
        Write::Merge(entries) => entries.iter().all(|entry| is_bounded(entry.version())),
        _ => true,
    }
}

fn header_in_range(header: &SnapshotHeader) -> bool {
    are_bounded(&header.lineage) && header.applied.iter().chain(&header.purged_through).all(is_bounded)
}

/// Who keeps a partition in one epoch.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Config {
    /// The epoch; its primary is the first of the owners.
    pub epoch: Epoch,
    /// The last write before it.
    pub base: Option<Version>,
    /// Who keeps the partition, the primary first.
    pub owners: Vec<Peer>,
    /// The owners before, as long as this config may not be in force: a takeover has to ask a quorum of each of these
    /// sets too, and this config comes into force only by a quorum of each.
    pub before: Vec<Vec<Peer>>,
}

impl Config {
    fn is_bounded(&self) -> bool {
        in_range(&self.epoch) && self.base.iter().all(is_bounded)
    }

    /// Whether what came over the wire can be one.
    pub(super) fn is_sound(&self) -> bool {
        let sets = || self.before.iter().chain(std::iter::once(&self.owners));
        self.owners.first() == Some(&self.epoch.primary)
            && self.before.len() <= MAX_SETS
            && sets().all(|owners| !owners.is_empty() && owners.len() <= MAX_OWNERS)
            && self.base.as_ref().is_none_or(|base| base.epoch < self.epoch)
    }
}

/// What a node answers to an inquiry.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    /// Whether it has a whole copy.
    pub whole: bool,
    /// How far the copy is.
    pub end: Option<Version>,
    /// The newest config that it knows.
    pub config: Option<Config>,
    /// Whether it knows that this config is in force.
    pub effective: bool,
}

/// One message of the protocol; the module's documentation draws who says what when.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum ReplicaMessage {
    /// A candidate asks for a promise: nothing older than `attempt` is accepted any more.
    Inquire {
        /// The epoch that it would begin.
        attempt: Epoch,
        /// The newest config that it knows: whoever knows a newer one says so instead.
        known: Option<Epoch>,
    },
    /// The promise, and what the node has.
    Promise {
        /// Which attempt.
        attempt: Epoch,
        /// What it has.
        report: Report,
    },
    /// No promise.
    Refuse {
        /// Which attempt.
        attempt: Epoch,
        /// What was promised before.
        promised: Option<Epoch>,
        /// The newest config that the node knows.
        config: Option<Config>,
        /// Whether it knows that this config is in force.
        effective: bool,
    },
    /// A candidate asks another node, whose copy goes further, to take over.
    Nominate {
        /// The highest epoch that was promised; the takeover has to go above it.
        seen: Epoch,
        /// The config that has to be replaced.
        config: Option<Config>,
        /// Whether that config is in force.
        effective: bool,
        /// The operator accepts that acknowledged writes may be lost.
        accept_loss: bool,
        /// The copy of the one that is asked replaces the others even if theirs go further: deletes that theirs have
        /// missed are forgotten in it.
        replace: bool,
    },
    /// The operator accepts that acknowledged writes may be lost: to the node that is to act.
    AcceptLoss,
    /// A stream begins, or goes on in a new epoch.
    NewConfig {
        /// The config; from its primary only.
        config: Config,
        /// The epochs that made the primary's copy, this one last.
        lineage: Lineage,
        /// The epoch by whose authority this one begins: an owner that has promised anything above it refuses. After
        /// a takeover it is the config's own epoch, which the owners have promised.
        since: Epoch,
        /// Whether the config is in force.
        effective: bool,
        /// The stream goes on with the next write; else the primary waits for a [`ReplicaMessage::Position`].
        goes_on: bool,
        /// Which stream to this node, of all that the primary has begun.
        stream: u64,
    },
    /// Where the sender's copy is.
    Position {
        /// The epoch of the config that it follows.
        epoch: Epoch,
        /// Its lineage and last write.
        header: SnapshotHeader,
        /// Whether it is a whole copy.
        whole: bool,
        /// Whether the sender follows the primary's stream; else it only keeps a copy.
        follows: bool,
        /// Which one: what was said of an earlier stream may be true no more, for the copy is let go between two.
        stream: u64,
    },
    /// The next writes.
    Append {
        /// The primary's epoch.
        epoch: Epoch,
        /// The write before the first of them.
        prev: Option<Version>,
        /// The writes, in order.
        entries: Vec<(Version, Arc<Write>)>,
        /// All up to here is acknowledged by enough owners.
        commit: Option<Version>,
        /// All owners have all up to here: what was deleted up to here may be forgotten after a while.
        all_have: Option<Version>,
    },
    /// How far the sender's copy is now.
    Ack {
        /// The epoch that it follows.
        epoch: Epoch,
        /// Its last write.
        end: Option<Version>,
        /// Whether the copy is whole: only then it counts.
        whole: bool,
    },
    /// The sender follows a later epoch.
    Reject {
        /// The epoch that was refused.
        epoch: Epoch,
        /// What it follows or has promised.
        promised: Epoch,
        /// The newest config that it knows.
        config: Option<Config>,
        /// Whether it knows that this config is in force.
        effective: bool,
    },
    /// A snapshot begins; what was being received before is dropped.
    SnapshotBegin {
        /// The primary's epoch.
        epoch: Epoch,
        /// Where the copy is that is sent.
        header: SnapshotHeader,
    },
    /// A piece of the snapshot.
    SnapshotChunk {
        /// The primary's epoch.
        epoch: Epoch,
        /// Which piece, from 0.
        number: u64,
        /// What is in it.
        entries: Vec<Entry>,
        /// Whether it is the last.
        last: bool,
        /// The primary's last write when the piece was taken: the copy is whole once it has all pieces and this.
        through: Option<Version>,
    },
    /// The piece is in, and the next may come.
    SnapshotAck {
        /// The epoch that the sender follows.
        epoch: Epoch,
        /// Which piece.
        number: u64,
    },
    /// From a primary whose config is in force, to all members.
    Announce {
        /// Who keeps the partition.
        config: Config,
        /// All wanted owners are active: other copies can be dropped.
        settled: bool,
    },
    /// The sender of a [`ReplicaMessage::Position`] is no owner: its copy may go.
    Release {
        /// The primary's epoch.
        epoch: Epoch,
    },
    /// The primary wants the writes that only the receiver's copy has.
    Want {
        /// The primary's epoch.
        epoch: Epoch,
        /// The epochs that made the primary's copy.
        lineage: Lineage,
        /// The primary's last write.
        end: Option<Version>,
    },
    /// Some of these.
    Offer {
        /// The primary's epoch.
        epoch: Epoch,
        /// Which piece, from 0.
        number: u64,
        /// What is in it.
        entries: Vec<Entry>,
        /// Whether it is the last.
        last: bool,
    },
    /// They are safe with the primary. After the last piece the sender's copy may go.
    OfferAck {
        /// The primary's epoch.
        epoch: Epoch,
        /// Which piece.
        number: u64,
    },
    /// The primary hands over: the receiver has all writes and begins its own epoch.
    HandOver {
        /// The epoch that ends.
        from: Epoch,
        /// The epoch that begins; its primary is the receiver.
        epoch: Epoch,
    },
    /// To the node that is to take over, which may not have heard of it: the newest config whose primary is gone.
    Known {
        /// The config.
        config: Config,
        /// Whether it is known to be in force.
        effective: bool,
    },
}

impl ReplicaMessage {
    /// Whether its numbers are some that can be counted to, and on from.
    pub(super) fn is_bounded(&self) -> bool {
        use ReplicaMessage as M;
        let of = |config: &Option<Config>| config.iter().all(Config::is_bounded);
        match self {
            M::Inquire { attempt, known } => in_range(attempt) && known.iter().all(in_range),
            M::Promise { attempt, report } => {
                in_range(attempt) && report.end.iter().all(is_bounded) && of(&report.config)
            }
            M::Refuse { attempt, promised, config, .. } => {
                in_range(attempt) && promised.iter().all(in_range) && of(config)
            }
            M::Nominate { seen, config, .. } => in_range(seen) && of(config),
            M::AcceptLoss => true,
            M::NewConfig { config, lineage, since, .. } => {
                config.is_bounded() && are_bounded(lineage) && in_range(since)
            }
            M::Position { epoch, header, .. } | M::SnapshotBegin { epoch, header } => {
                in_range(epoch) && header_in_range(header)
            }
            M::Append { epoch, prev, entries, commit, all_have } => {
                let ends = prev.iter().chain(commit).chain(all_have);
                let write =
                    |(version, write): &(Version, Arc<Write>)| is_bounded(version) && write_in_range(write);
                in_range(epoch) && ends.into_iter().all(is_bounded) && entries.iter().all(write)
            }
            M::Ack { epoch, end, .. } => in_range(epoch) && end.iter().all(is_bounded),
            M::Reject { epoch, promised, config, .. } => in_range(epoch) && in_range(promised) && of(config),
            M::SnapshotChunk { epoch, entries, through, .. } => {
                let entries = entries.iter().map(Entry::version);
                in_range(epoch) && entries.chain(through).all(is_bounded)
            }
            M::Offer { epoch, entries, .. } => {
                in_range(epoch) && entries.iter().map(Entry::version).all(is_bounded)
            }
            M::Announce { config, .. } | M::Known { config, .. } => config.is_bounded(),
            M::Want { epoch, lineage, end } => {
                in_range(epoch) && are_bounded(lineage) && end.iter().all(is_bounded)
            }
            M::HandOver { from, epoch } => in_range(from) && in_range(epoch),
            M::SnapshotAck { epoch, .. } | M::Release { epoch } | M::OfferAck { epoch, .. } => {
                in_range(epoch)
            }
        }
    }
}
