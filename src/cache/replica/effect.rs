//! What a [`Replica`](super::Replica) wants done, and what it says about itself.

use serde::{Deserialize, Serialize};

use super::message::ReplicaMessage;
use crate::cache::error::CacheError;
use crate::cache::operation::Reply;
use crate::cache::partition::PartitionId;
use crate::cache::store::Loser;
use crate::cache::version::{Epoch, Version};
use crate::transport::Lane;
use crate::types::Peer;

/// What a node has of a partition.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum OwnerState {
    /// Nothing.
    #[default]
    Absent,
    /// It is being filled, or waits to hear whether it is still needed.
    Syncing,
    /// All of it, and it is one of the owners.
    Active,
}

/// Whether a copy knows of a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Coverage {
    /// It has it.
    Yes,
    /// It does not have it yet.
    NotYet,
    /// The write was lost: the history that is served does not contain it.
    Lost,
}

/// Something that an operator or an application may want to know.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum CacheEvent {
    /// A write that was accepted on one side of a split lost in the merge. Said at least once for each, by the node
    /// that is primary at the time of the merge. What a side had taken over in an earlier merge, and was overwritten
    /// in the usual way since, may be named as well: nobody can tell it any more from what lost.
    Conflict {
        /// The partition.
        partition: PartitionId,
        /// The write.
        loser: Loser,
    },
    /// A node has opened the cache with another value of an option that has to be equal: it takes no part, and
    /// operations go on with the others.
    Disagrees {
        /// The option and both values, as [`CacheError::ConfigMismatch`].
        error: CacheError,
    },
    /// This node serves a partition in a new epoch.
    Primary {
        /// The partition.
        partition: PartitionId,
        /// Its epoch.
        epoch: Epoch,
    },
    /// What this node has of a partition has changed.
    State {
        /// The partition.
        partition: PartitionId,
        /// What it has now.
        state: OwnerState,
    },
    /// Too few copies of a partition can be reached to go on without the risk of losing what was acknowledged. It is
    /// tried again at each change of the members; an operator can accept the loss, which goes on with what is
    /// there.
    Stalled {
        /// The partition.
        partition: PartitionId,
        /// How many owners have answered with a whole copy.
        got: usize,
        /// How many are needed.
        need: usize,
    },
    /// A copy was discarded instead of merged: deletes that it has missed are forgotten. What it alone held is
    /// reported as [`CacheEvent::Conflict`]. Deletes that it alone made, and has forgotten itself since, are undone and
    /// named nowhere else.
    Discarded {
        /// The partition.
        partition: PartitionId,
        /// Whose copy.
        owner: Peer,
        /// The last write that it held in common with the one that stays.
        common: Option<Version>,
    },
}

/// What the caller of a replica has to do, in this order.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum ReplicaEffect {
    /// Send a message.
    Send {
        /// To whom.
        to: Peer,
        /// Messages on one lane stay in order.
        lane: Lane,
        /// What.
        message: ReplicaMessage,
    },
    /// A write has ended; exactly once for each [`write`](super::Replica::write) that returned `Ok` and was not
    /// forgotten.
    Written {
        /// Which.
        ticket: u64,
        /// How.
        result: Result<Reply, CacheError>,
    },
    /// Something to tell.
    Event(CacheEvent),
    /// Who serves, who owns, or what this node has has changed.
    Changed,
}
