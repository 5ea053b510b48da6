//! The copy of one partition on this node, of either kind: who serves it is found out by the owners themselves, or
//! decided by a consensus (write mode `strong`, feature `consensus`).

use std::time::Duration;

use crate::cache::config::WriteMode;
#[cfg(feature = "consensus")]
use crate::cache::consensus::{Change, CopyEffect, CopyMessage, StrongContext, StrongCopy};
use crate::cache::error::CacheError;
use crate::cache::operation::{Reply, WriteOp};
use crate::cache::partition::PartitionId;
use crate::cache::replica::{
    self, CacheEvent, Config, Context, Coverage, OwnerState, ReplicaEffect, ReplicaMessage,
};
use crate::cache::store::Store;
use crate::cache::version::{Epoch, Version};
use crate::transport::Lane;
use crate::types::Peer;

/// What a copy is given at each input.
#[derive(Clone, Copy, Debug)]
pub(super) struct Given<'a> {
    pub(super) base: Context<'a>,
    #[cfg(feature = "consensus")]
    pub(super) strong: Option<&'a super::strong::Strong>,
}

/// What a copy has to say to another one.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Said {
    Plain(ReplicaMessage),
    #[cfg(feature = "consensus")]
    Strong(CopyMessage),
}

/// As [`ReplicaEffect`], of either kind of copy.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Wanted {
    Send {
        to: Peer,
        lane: Lane,
        said: Said,
    },
    #[cfg(feature = "consensus")]
    Propose(Change),
    #[cfg(feature = "consensus")]
    Withdraw(Change),
    Written {
        ticket: u64,
        result: Result<Reply, CacheError>,
    },
    Event(CacheEvent),
    Changed,
}

/// See the [module](self).
#[derive(Debug)]
#[allow(clippy::large_enum_variant, reason = "all copies of a cache are of one kind")]
pub(super) enum Replica {
    Plain(replica::Replica),
    #[cfg(feature = "consensus")]
    Strong(Box<StrongCopy>),
}

#[cfg(feature = "consensus")]
impl<'a> Given<'a> {
    fn strong(self) -> Option<StrongContext<'a>> {
        let strong = self.strong?;
        Some(StrongContext { base: self.base, consensus: strong.consensus(), leases: strong.leases() })
    }
}

/// The same call on either kind.
macro_rules! either {
    ($self:ident, $copy:ident => $call:expr) => {
        match $self {
            Replica::Plain($copy) => $call,
            #[cfg(feature = "consensus")]
            Replica::Strong($copy) => $call,
        }
    };
}

/// The same input to either kind.
macro_rules! input {
    ($self:ident, $given:ident, $copy:ident, $ctx:ident => $call:expr) => {
        match $self {
            Replica::Plain($copy) => {
                let $ctx = $given.base;
                $call
            }
            #[cfg(feature = "consensus")]
            Replica::Strong($copy) => {
                if let Some($ctx) = $given.strong() {
                    $call
                }
            }
        }
    };
}

// Getters.
impl Replica {
    pub(super) fn new(id: PartitionId, ctx: Context<'_>) -> Self {
        match ctx.config.write_mode {
            #[cfg(feature = "consensus")]
            WriteMode::Strong => Self::Strong(Box::new(StrongCopy::new(id, ctx))),
            _ => Self::Plain(replica::Replica::new(id, ctx)),
        }
    }

    pub(super) fn serving(&self) -> Option<&Epoch> {
        either!(self, copy => copy.serving())
    }

    /// Whether this copy, which serves, may be read at this moment.
    pub(super) fn may_read(&self, given: Given<'_>) -> bool {
        #[cfg(not(feature = "consensus"))]
        let _ = given;
        match self {
            Replica::Plain(copy) => copy.serving().is_some(),
            #[cfg(feature = "consensus")]
            Replica::Strong(copy) => given.strong().is_some_and(|ctx| copy.may_read(ctx)),
        }
    }

    /// Whether reads of a primary need more than that it serves.
    pub(super) fn is_strong(&self) -> bool {
        match self {
            Replica::Plain(_) => false,
            #[cfg(feature = "consensus")]
            Replica::Strong(_) => true,
        }
    }

    pub(super) fn is_active(&self) -> bool {
        either!(self, copy => copy.is_active())
    }

    pub(super) fn state(&self) -> OwnerState {
        either!(self, copy => copy.state())
    }

    pub(super) fn config(&self) -> Option<&Config> {
        either!(self, copy => copy.config())
    }

    pub(super) fn store(&self) -> &Store {
        either!(self, copy => copy.store())
    }

    pub(super) fn end(&self) -> Option<&Version> {
        either!(self, copy => copy.end())
    }

    pub(super) fn behind(&self) -> Option<Vec<(Peer, u64)>> {
        either!(self, copy => copy.behind())
    }

    pub(super) fn covers(&self, at_least: &Version) -> Coverage {
        either!(self, copy => copy.covers(at_least))
    }

    /// Whether a write that this copy does not know of is lost, and not only late.
    pub(super) fn would_know(&self, write: &Version, given: Given<'_>) -> bool {
        #[cfg(not(feature = "consensus"))]
        let _ = (write, given);
        match self {
            Replica::Plain(_) => false,
            #[cfg(feature = "consensus")]
            Replica::Strong(copy) => given.strong().is_some_and(|ctx| copy.would_know(write, ctx)),
        }
    }

    pub(super) fn check_invariants(&self) -> Result<(), String> {
        either!(self, copy => copy.check_invariants())
    }

    pub(super) fn poll_timeout(&self) -> Option<Duration> {
        either!(self, copy => copy.poll_timeout())
    }
}

// Inputs.
impl Replica {
    pub(super) fn handle_members(&mut self, wanted: &[Peer], given: Given<'_>) {
        input!(self, given, copy, ctx => copy.handle_members(wanted, ctx));
    }

    pub(super) fn handle_peer_up(&mut self, peer: &Peer, given: Given<'_>) {
        input!(self, given, copy, ctx => copy.handle_peer_up(peer, ctx));
    }

    pub(super) fn handle_peer_down(&mut self, peer: &Peer, given: Given<'_>) {
        input!(self, given, copy, ctx => copy.handle_peer_down(peer, ctx));
    }

    pub(super) fn handle_message(&mut self, from: &Peer, said: Said, given: Given<'_>) {
        match (self, said) {
            (Replica::Plain(copy), Said::Plain(message)) => copy.handle_message(from, message, given.base),
            #[cfg(feature = "consensus")]
            (Replica::Strong(copy), Said::Strong(message)) => {
                if let Some(ctx) = given.strong() {
                    copy.handle_message(from, message, ctx);
                }
            }
            // peers whose caches are of other kinds take no part in each other's
            #[cfg(feature = "consensus")]
            (Replica::Plain(_), Said::Strong(_)) | (Replica::Strong(_), Said::Plain(_)) => {}
        }
    }

    pub(super) fn handle_timeout(&mut self, given: Given<'_>) {
        input!(self, given, copy, ctx => copy.handle_timeout(ctx));
    }

    /// A reader has seen that this owner is behind.
    pub(super) fn handle_nudge(&mut self, owner: &Peer, given: Given<'_>) {
        match self {
            Replica::Plain(copy) => copy.handle_nudge(owner, given.base),
            // nobody reads a strong cache by quorum
            #[cfg(feature = "consensus")]
            Replica::Strong(_) => {}
        }
    }

    /// The consensus has decided something about the partition.
    #[cfg(feature = "consensus")]
    pub(super) fn handle_decided(&mut self, given: Given<'_>) {
        if let (Replica::Strong(copy), Some(ctx)) = (self, given.strong()) {
            copy.handle_decided(ctx);
        }
    }

    pub(super) fn write(
        &mut self,
        ticket: u64,
        op: &WriteOp,
        mode: WriteMode,
        deadline: Duration,
        given: Given<'_>,
    ) -> Result<(), CacheError> {
        match self {
            Replica::Plain(copy) => copy.write(ticket, op, mode, deadline, given.base),
            #[cfg(feature = "consensus")]
            Replica::Strong(copy) => match given.strong() {
                Some(ctx) => copy.write(ticket, op, deadline, ctx),
                None => Err(CacheError::Stopped),
            },
        }
    }

    pub(super) fn forget(&mut self, ticket: u64) {
        either!(self, copy => copy.forget(ticket));
    }

    pub(super) fn accept_loss(&mut self, given: Given<'_>) -> Result<(), CacheError> {
        match self {
            Replica::Plain(copy) => copy.accept_loss(given.base),
            #[cfg(feature = "consensus")]
            Replica::Strong(copy) => return given.strong().map_or(Ok(()), |ctx| copy.accept_loss(ctx)),
        }
        Ok(())
    }

    pub(super) fn poll_effect(&mut self) -> Option<Wanted> {
        match self {
            Replica::Plain(copy) => copy.poll_effect().map(|effect| match effect {
                ReplicaEffect::Send { to, lane, message } => {
                    Wanted::Send { to, lane, said: Said::Plain(message) }
                }
                ReplicaEffect::Written { ticket, result } => Wanted::Written { ticket, result },
                ReplicaEffect::Event(event) => Wanted::Event(event),
                ReplicaEffect::Changed => Wanted::Changed,
            }),
            #[cfg(feature = "consensus")]
            Replica::Strong(copy) => copy.poll_effect().map(|effect| match effect {
                CopyEffect::Send { to, lane, message } => {
                    Wanted::Send { to, lane, said: Said::Strong(message) }
                }
                CopyEffect::Propose(change) => Wanted::Propose(change),
                CopyEffect::Withdraw(change) => Wanted::Withdraw(change),
                CopyEffect::Written { ticket, result } => Wanted::Written { ticket, result },
                CopyEffect::Event(event) => Wanted::Event(event),
                CopyEffect::Changed => Wanted::Changed,
            }),
        }
    }
}
