//! One partition's copy on one node, and who serves it.

use serde::{Deserialize, Serialize};

use super::error::CacheError;
use super::partition::PartitionId;
use super::store::Loser;
use super::version::Epoch;

/// What a node has of a partition.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum OwnerState {
    /// Nothing.
    #[default]
    Absent,
    /// It is being filled.
    Syncing,
    /// All of it.
    Active,
}

/// Something that an operator or an application may want to know.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum CacheEvent {
    /// A write that was accepted on one side of a split lost in the merge.
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
    /// A partition has another primary.
    Primary {
        /// The partition.
        partition: PartitionId,
        /// Its epoch.
        epoch: Epoch,
    },
}

/// What copies of one partition say to each other.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum ReplicaMessage {
    /// Nothing yet.
    Nothing,
}

/// The rules in force.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Rules {}
