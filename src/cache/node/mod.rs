//! One shard of a cache on one node: the copies of its partitions, who takes part, and operations in flight. Sans-IO.
//!
//! A [`CacheNode`] takes inputs (the view changed, a peer came, a message arrived, time went by, somebody asks) with
//! the time since the node's start, and says through [`CacheNode::poll_effect`] what is to be done.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use super::config::CacheConfig;
use super::error::CacheError;
use super::operation::{Operation, Options, ReadOp, Reply};
use super::partition::PartitionId;
use super::replica::{OwnerState, Rules};
use crate::types::Peer;

pub mod codec;
mod effect;
pub mod message;

pub use codec::CodecError;
pub use effect::{CacheEffect, PartitionStatus, Readiness, Shard};
pub use message::CacheMessage;

/// One shard of a cache on one node; see the [module](self). Methods are grouped: getters, inputs, commands, outputs.
#[derive(Debug)]
pub struct CacheNode {
    me: Peer,
    config: Arc<CacheConfig>,
    shard: Shard,
    rules: Rules,
    effects: VecDeque<CacheEffect>,
}

// Getters.
impl CacheNode {
    /// A shard that knows nobody: give it the view and the peers that are up. `config` is valid. `seed` spreads retries
    /// of several nodes in time, and equal seeds give equal runs.
    pub fn new(me: Peer, config: Arc<CacheConfig>, shard: Shard, seed: u64, now: Duration) -> Self {
        let _ = (seed, now);
        Self { me, config, shard, rules: Rules::default(), effects: VecDeque::new() }
    }

    /// The same with a rule broken, to see whether it is noticed.
    #[cfg(feature = "testing")]
    #[must_use]
    pub fn with_rules(mut self, rules: Rules) -> Self {
        self.rules = rules;
        self
    }

    /// Who this node is.
    pub fn me(&self) -> &Peer {
        &self.me
    }

    /// The options of the cache.
    pub fn config(&self) -> &Arc<CacheConfig> {
        &self.config
    }

    /// Which partitions it has.
    pub fn shard(&self) -> Shard {
        self.shard
    }

    /// One partition, as this node sees it; all of it `Absent` for one of another shard.
    pub fn status(&self, partition: PartitionId) -> PartitionStatus {
        PartitionStatus {
            partition,
            state: OwnerState::Absent,
            serving: false,
            epoch: None,
            primary: None,
            owners: Vec::new(),
            wanted: Vec::new(),
            records: 0,
            bytes: 0,
            lag: None,
        }
    }

    /// Whether every partition has its full number of active owners. Visits all partitions of the shard.
    pub fn readiness(&self) -> Readiness {
        Readiness::default()
    }

    /// The records that this node holds of a partition, in the order of keys, and whether its copy is active; `None` if
    /// it holds none.
    pub fn store(&self, partition: PartitionId) -> Option<(&super::store::Store, bool)> {
        let _ = partition;
        None
    }

    /// Whether nothing is left to hand over after [`CacheNode::drain`], or there is nobody to take it.
    pub fn is_drained(&self) -> bool {
        true
    }

    /// How many entries all queues, maps and tables have together, records apart: must not grow without bound.
    pub fn footprint(&self) -> usize {
        self.effects.len()
    }

    /// The answer of a read, if this node may give it at once: it serves the partition, or holds an active copy and the
    /// read allows it. It allocates nothing but the answer. `None`: ask with [`CacheNode::operate`].
    pub fn try_read(
        &self,
        partition: PartitionId,
        read: &ReadOp,
        options: &Options,
    ) -> Option<Result<Reply, CacheError>> {
        let _ = (partition, read, options);
        None
    }

    /// Checks all parts; meant for tests, it visits every partition.
    ///
    /// # Errors
    /// What does not hold.
    pub fn check_invariants(&self) -> Result<(), String> {
        Ok(())
    }
}

// Inputs.
impl CacheNode {
    /// The scope's committed view, this node included, and whether the scope has found out who is there (a node that
    /// has just started has not, and begins nothing from nothing).
    pub fn handle_view(&mut self, members: &[Peer], settled: bool, now: Duration) {
        let _ = (members, settled, now);
    }

    /// A link to this peer is up: messages can be sent and come. Also said for every link that is up when the cache is
    /// opened.
    pub fn handle_peer_up(&mut self, peer: &Peer, now: Duration) {
        let _ = (peer, now);
    }

    /// The link is down: everything that was under way in either direction is lost.
    pub fn handle_peer_down(&mut self, peer: &Peer, now: Duration) {
        let _ = (peer, now);
    }

    /// A peer whose link is up has sent this.
    pub fn handle_message(&mut self, from: &Peer, message: CacheMessage, now: Duration) {
        let _ = (from, message, now);
    }

    /// [`CacheNode::poll_timeout`] is reached.
    pub fn handle_timeout(&mut self, now: Duration) {
        let _ = now;
    }
}

// Commands.
impl CacheNode {
    /// Carries out an operation on one partition. Its end is said by exactly one [`CacheEffect::Done`] with this
    /// ticket, at the deadline at the latest. The driver's tickets are unique.
    pub fn operate(
        &mut self,
        ticket: u64,
        partition: PartitionId,
        operation: Operation,
        options: Options,
        now: Duration,
    ) {
        let _ = (operation, options, now);
        let result = Err(CacheError::NotActive { partition });
        self.effects.push_back(CacheEffect::Done { ticket, result });
    }

    /// Whoever waited for this operation has gone: no `Done` follows. What was begun may still be applied.
    pub fn cancel(&mut self, ticket: u64) {
        let _ = ticket;
    }

    /// The operator gives up what dead owners alone may have had of this partition: it goes on with what is there, if
    /// need be with nothing.
    pub fn accept_loss(&mut self, partition: PartitionId, now: Duration) {
        let _ = (partition, now);
    }

    /// Begins to hand over everything; this node keeps serving meanwhile. See [`CacheNode::is_drained`].
    pub fn drain(&mut self, now: Duration) {
        let _ = now;
    }

    /// Ends it: says Bye to everybody, and ends all operations. Everything later is ignored. What this node alone had is
    /// gone; drain first to keep it.
    pub fn close(&mut self, now: Duration) {
        let _ = now;
    }
}

// Outputs.
impl CacheNode {
    /// What to do next; `None` when there is nothing left. Ask after every input and command.
    pub fn poll_effect(&mut self) -> Option<CacheEffect> {
        self.effects.pop_front()
    }

    /// When [`CacheNode::handle_timeout`] wants to be called next, since the node's start; `None` if not at all.
    pub fn poll_timeout(&self) -> Option<Duration> {
        None
    }
}
