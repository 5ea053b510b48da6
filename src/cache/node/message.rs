//! What the nodes of a cache say to one another.

use serde::{Deserialize, Serialize};

use crate::cache::config::{CacheTerms, ReadMode, WriteMode};
use crate::cache::error::CacheError;
use crate::cache::operation::{Operation, Outcome, Reply};
use crate::cache::partition::PartitionId;
use crate::cache::replica::ReplicaMessage;
use crate::cache::version::{Epoch, Version};
use crate::types::Peer;

/// One message between the shards of one number on two nodes. It is understood on any lane.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum CacheMessage {
    /// The sender has this cache open.
    Hello {
        /// The options that have to be equal.
        terms: CacheTerms,
        /// Into how many shards it cuts the cache: has to be equal as well.
        shards: u32,
        /// Which opening of the cache this is in this life of the node: never the same twice.
        life: u32,
        /// It hands its partitions over.
        draining: bool,
        /// It has heard the receiver's Hello on this link.
        heard: bool,
    },
    /// The sender has no cache of this name open. The driver answers a Hello with it where there is no
    /// [`CacheNode`](super::CacheNode) to ask, and nothing else.
    NotOpen,
    /// The sender closes the cache; it serves nothing from here on.
    Bye,
    /// Between the copies of a partition.
    Replica {
        /// Which.
        partition: PartitionId,
        /// The lives of the cache on both sides, added: what was said to or by another life is not heard.
        session: u32,
        /// What.
        message: ReplicaMessage,
    },
    /// An operation for the receiver to carry out itself: it is never forwarded a second time.
    Forward {
        /// The sender's number of the operation: a second Forward with it is the same operation.
        request: u64,
        /// The partition.
        partition: PartitionId,
        /// What to do.
        operation: Operation,
        /// How.
        options: ForwardOptions,
        /// The epoch in which the sender believes the receiver to serve.
        epoch: Option<Epoch>,
    },
    /// The end of a forwarded operation.
    Answer {
        /// The number.
        request: u64,
        /// To which sending of it.
        attempt: u32,
        /// How it ended.
        #[serde(with = "super::codec::answered")]
        result: Result<Reply, CacheError>,
    },
    /// What an owner's copy says, for a quorum.
    Copy {
        /// The number.
        request: u64,
        /// The epoch that the owner is in.
        epoch: Option<Epoch>,
        /// The owners of that epoch, as it knows them.
        owners: Vec<Peer>,
        /// Whether it knows of the write that was asked for: yes, no because it was lost (false), or not yet (none).
        covers: Option<bool>,
        /// How far its copy is.
        end: Option<Version>,
        /// What it says; an error if its copy is not active, or what it holds does not go with the question.
        #[serde(with = "super::codec::answered")]
        result: Result<Reply, CacheError>,
    },
    /// A reader has seen that this owner's copy is behind: the primary brings it forward.
    Nudge {
        /// The partition.
        partition: PartitionId,
        /// Whose copy.
        owner: Peer,
    },
    /// Between the shards of a `strong` cache. It stays last: only nodes with the feature know it.
    #[cfg(feature = "consensus")]
    Strong {
        /// Between which lives of the cache on both nodes.
        session: u32,
        /// What.
        message: super::strong::StrongMessage,
    },
}

impl CacheMessage {
    /// About how many bytes of records it carries between a caller and an owner. What copies send one another counts
    /// nothing: their windows bound it.
    pub(crate) fn weight(&self) -> usize {
        match self {
            CacheMessage::Forward { operation, .. } => operation.wire_len(),
            CacheMessage::Answer { result: Ok(reply), .. } | CacheMessage::Copy { result: Ok(reply), .. } => {
                reply.outcome.wire_len()
            }
            _ => 0,
        }
    }

    /// For a peer that takes nothing just now: a read is refused as busy. A write has been carried out, so its answer,
    /// which is short, is given all the same.
    pub(crate) fn shorten(&mut self) {
        if let CacheMessage::Answer { result, .. } | CacheMessage::Copy { result, .. } = self
            && let Ok(Reply { outcome: Outcome::Records(_) | Outcome::Bindings(_), .. }) = result
        {
            *result = Err(CacheError::Busy);
        }
    }
}

/// How a forwarded operation is carried out.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ForwardOptions {
    /// When a write is answered.
    pub write_mode: WriteMode,
    /// Who may answer a read.
    pub read_mode: ReadMode,
    /// What the copy that is read has to know of.
    pub at_least: Vec<Version>,
    /// How long the caller still waits, in milliseconds.
    pub patience_ms: u32,
    /// It was sent before, and whether it arrived is not known.
    pub again: bool,
    /// Which sending of the operation this is. A refusal of an earlier one says nothing of a later one, which may have
    /// arrived after it.
    pub attempt: u32,
}
