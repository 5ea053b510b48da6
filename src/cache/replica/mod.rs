//! One partition's copy on one node, and who serves it.
#![allow(dead_code, unused_variables, unused_imports, reason = "the shape first")]

use std::collections::BTreeSet;
use std::time::Duration;

use super::config::{CacheConfig, WriteMode};
use super::error::CacheError;
use super::operation::WriteOp;
use super::partition::PartitionId;
use super::store::Store;
use super::version::{Epoch, Version};
use crate::types::Peer;

mod effect;
mod message;
mod rules;

pub use effect::{CacheEvent, OwnerState};
pub(crate) use effect::{Coverage, ReplicaEffect};
pub use message::{Config, ReplicaMessage, Report};
pub use rules::{Mutation, Rules};

/// The nodes that take part in a cache, as one node sees them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Members {
    /// Those of the committed view that take part; this node included, draining ones included.
    pub(crate) live: BTreeSet<Peer>,
    /// Those whose link is up.
    pub(crate) up: BTreeSet<Peer>,
    /// Those that hand their partitions over.
    pub(crate) draining: BTreeSet<Peer>,
    /// Everybody in the view has said whether it takes part, and the view is settled.
    pub(crate) complete: bool,
}

/// What a replica needs to know at each input.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Context<'a> {
    /// This node.
    pub(crate) me: &'a Peer,
    /// The cache's options.
    pub(crate) config: &'a CacheConfig,
    /// The time since the node's start.
    pub(crate) now: Duration,
    /// Who takes part.
    pub(crate) members: &'a Members,
    /// The rules in force.
    pub(crate) rules: Rules,
}

/// One partition on one node; see the [module](self). Methods are grouped: getters, inputs, commands, outputs.
#[derive(Debug)]
pub(crate) struct Replica {
    id: PartitionId,
    store: Store,
}

impl Replica {
    /// A node that has nothing and knows nothing of the partition.
    pub(crate) fn new(id: PartitionId, ctx: Context<'_>) -> Self {
        Self { id, store: Store::new(ctx.config) }
    }

    // ---- getters

    /// The epoch in which this node is the primary and accepts operations; `None` also while it hands over.
    pub(crate) fn serving(&self) -> Option<&Epoch> {
        None
    }

    /// Whether this node is an owner with a whole copy.
    pub(crate) fn is_active(&self) -> bool {
        self.state() == OwnerState::Active
    }

    /// What this node has.
    pub(crate) fn state(&self) -> OwnerState {
        OwnerState::Absent
    }

    /// The newest config that this node knows.
    pub(crate) fn config(&self) -> Option<&Config> {
        None
    }

    /// The copy (an empty one if there is none).
    pub(crate) fn store(&self) -> &Store {
        &self.store
    }

    /// The last write that the copy has.
    pub(crate) fn end(&self) -> Option<&Version> {
        self.store.applied()
    }

    /// Whether the copy has this write.
    pub(crate) fn covers(&self, at_least: &Version) -> Coverage {
        Coverage::NotYet
    }

    /// What must always hold, in words if it does not.
    pub(crate) fn check_invariants(&self) -> Result<(), String> {
        Ok(())
    }

    // ---- inputs

    /// The members or the ring of participants changed. `wanted` are the partition's owners by the ring, without the
    /// draining nodes.
    pub(crate) fn handle_members(&mut self, wanted: &[Peer], ctx: Context<'_>) {}

    /// A link came up. `ctx.members.up` has it already.
    pub(crate) fn handle_peer_up(&mut self, peer: &Peer, ctx: Context<'_>) {}

    /// A link went down; everything in flight on it is lost. `ctx.members.up` has it no more.
    pub(crate) fn handle_peer_down(&mut self, peer: &Peer, ctx: Context<'_>) {}

    /// A message arrived.
    pub(crate) fn handle_message(&mut self, from: &Peer, message: ReplicaMessage, ctx: Context<'_>) {}

    /// Time went by.
    pub(crate) fn handle_timeout(&mut self, ctx: Context<'_>) {}

    // ---- commands

    /// Carries out a write, if this node serves the partition. How it ended comes as [`ReplicaEffect::Written`], at
    /// the deadline at the latest.
    ///
    /// # Errors
    /// Nothing has changed then: [`CacheError::NotActive`], [`CacheError::NoQuorum`], [`CacheError::TooLarge`], and
    /// those of [`WriteOp::plan`].
    pub(crate) fn write(
        &mut self,
        ticket: u64,
        op: &WriteOp,
        mode: WriteMode,
        deadline: Duration,
        ctx: Context<'_>,
    ) -> Result<(), CacheError> {
        Err(CacheError::NotActive { partition: self.id })
    }

    /// Whoever waited for this write has gone; the write goes on.
    pub(crate) fn forget(&mut self, ticket: u64) {}

    /// The operator accepts that acknowledged writes of this partition may be lost: it goes on with the copies that
    /// can be reached.
    pub(crate) fn accept_loss(&mut self, ctx: Context<'_>) {}

    // ---- outputs

    /// What is to be done next.
    pub(crate) fn poll_effect(&mut self) -> Option<ReplicaEffect> {
        None
    }

    /// When [`Replica::handle_timeout`] wants to be called.
    pub(crate) fn poll_timeout(&self) -> Option<Duration> {
        None
    }
}
