//! What a [`CacheNode`](super::CacheNode) wants done, and what it says about itself.

use serde::Serialize;

use crate::cache::error::CacheError;
use crate::cache::operation::Reply;
use crate::cache::partition::PartitionId;
use crate::cache::replica::{CacheEvent, OwnerState};
use crate::cache::version::Epoch;
use crate::transport::Lane;
use crate::types::Peer;

use super::message::CacheMessage;

/// Which partitions of a cache a [`CacheNode`](super::CacheNode) has: those whose number leaves `index` when divided
/// by `of`. All nodes must cut a cache into as many.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Shard {
    /// From 0 to `of` - 1.
    pub index: u32,
    /// How many there are; 0 counts as 1.
    pub of: u32,
}

impl Shard {
    /// The whole cache.
    pub const ALL: Self = Self { index: 0, of: 1 };

    /// The shard that has this partition.
    pub fn holding(partition: PartitionId, of: u32) -> Self {
        Self { index: partition.get() % of.max(1), of }
    }

    /// Whether the partition is in it.
    pub fn holds(self, partition: PartitionId) -> bool {
        partition.get() % self.of.max(1) == self.index
    }

    /// Its partitions, rising.
    pub(super) fn partitions(self, of_cache: u32) -> impl Iterator<Item = PartitionId> {
        (self.index..of_cache.max(1)).step_by(self.of.max(1) as usize).map(PartitionId::new)
    }

    /// The place of one of its partitions among them.
    pub(super) fn place(self, partition: PartitionId) -> usize {
        (partition.get() / self.of.max(1)) as usize
    }
}

/// What the driver has to do, in this order.
#[derive(Clone, Debug, PartialEq)]
pub enum CacheEffect {
    /// Hand a message to the transport. Messages to one peer on one lane stay in order; the driver puts as many into
    /// one frame as fit (see [`codec`](super::codec)).
    Send {
        /// To whom.
        to: Peer,
        /// On which lane.
        lane: Lane,
        /// What.
        message: CacheMessage,
    },
    /// An operation has ended: exactly once for each [`CacheNode::operate`](super::CacheNode::operate) that was not
    /// cancelled.
    Done {
        /// Which.
        ticket: u64,
        /// How.
        result: Result<Reply, CacheError>,
    },
    /// Something that an operator or an application may want to know.
    Event(CacheEvent),
    /// Status or readiness may have changed; said once for any number of changes since it was last taken.
    Changed,
}

/// One partition, as this node sees it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct PartitionStatus {
    /// Which.
    pub partition: PartitionId,
    /// What this node has of it.
    pub state: OwnerState,
    /// Whether this node is its primary and accepts operations.
    pub serving: bool,
    /// The epoch it is in, as far as this node knows.
    pub epoch: Option<Epoch>,
    /// Who serves it, as far as this node knows.
    pub primary: Option<Peer>,
    /// Who keeps it, the primary first, as far as this node knows.
    pub owners: Vec<Peer>,
    /// Who should keep it by the ring, the first to be primary.
    pub wanted: Vec<Peer>,
    /// How many records this node has of it.
    pub records: u64,
    /// How many bytes of records and tombstones this node has of it.
    pub bytes: u64,
    /// How many writes the owner that is furthest behind has not confirmed; only the primary knows, and elsewhere it is
    /// `None`. An owner that is being filled lacks all of them.
    pub lag: Option<u64>,
    /// The owners that have not confirmed all writes; only the primary knows, and elsewhere it is empty.
    pub behind: Vec<Peer>,
}

/// Whether every partition of a shard has its full number of active owners. Those of all shards are added up with
/// [`Readiness::and`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Readiness {
    /// How many partitions there are.
    pub partitions: u32,
    /// How many of them are served by a primary that can be reached.
    pub served: u32,
    /// How many of them have all their owners.
    pub complete: u32,
    /// The partitions that have not, rising; at most [`Readiness::NAMED`] of them.
    pub missing: Vec<PartitionId>,
    /// Nodes of the view that have not said whether they take part.
    pub unknown: Vec<Peer>,
    /// Nodes of the view whose options are others than this node's ([`CacheEvent::Disagrees`] says which): they keep a
    /// cache apart.
    ///
    /// [`CacheEvent::Disagrees`]: crate::cache::CacheEvent::Disagrees
    pub differs: Vec<Peer>,
    /// How many nodes take part, this one among them.
    pub nodes: u32,
}

impl Readiness {
    /// How many partitions are named at most.
    pub const NAMED: usize = 64;

    /// Whether nothing is missing. A node that is not in the majority of those that have the cache open is never ready: its
    /// options are others than those of the rest, and what it has is not what they have. So one that was started with
    /// another option than the others stops a rolling restart, and not the others.
    pub fn is_ready(&self) -> bool {
        let outnumbered = !self.differs.is_empty() && self.differs.len() >= self.nodes as usize;
        self.complete == self.partitions && self.unknown.is_empty() && !outnumbered
    }

    /// Both shards together.
    #[must_use]
    pub fn and(mut self, other: Self) -> Self {
        self.partitions += other.partitions;
        self.served += other.served;
        self.complete += other.complete;
        self.missing.extend(other.missing);
        self.missing.sort_unstable();
        self.missing.truncate(Self::NAMED);
        self.unknown.extend(other.unknown);
        self.unknown.sort_unstable();
        self.unknown.dedup();
        self.differs.extend(other.differs);
        self.differs.sort_unstable();
        self.differs.dedup();
        self.nodes = self.nodes.max(other.nodes);
        self
    }
}
