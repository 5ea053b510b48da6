//! Operations of this node that have not ended.
//!
//! ```text
//!             ┌────────────── refused (wrong owner, not active): after a pause ──────────────┐
//!             ▼                                                                              │
//!  start ─▶ Waiting ──▶ AtReplica   (this node serves the partition)  ──▶ Done               │
//!             │  ▲ ──▶ Sent{to}     (forwarded, once)  ───────────────▶ Done or refused ─────┤
//!             │  │ ──▶ Quorum       (a copy of each owner)  ──────────▶ Done or refused ─────┘
//!             │  └──── the peer is gone: a write is in doubt from here on
//!             └─ deadline: Done
//! ```
//! A write whose primary stepped down before enough owners had it goes back to Waiting too, under a new number, if it
//! may be made twice: whoever serves next is asked, and the caller hears of it only at its deadline.
//!
//! In doubt, a write is sent to the same life of the same peer again, which knows whether it has had it. To anybody else
//! it is sent only if a second time does no harm (and never where the mode is strong).

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use crate::cache::error::CacheError;
use crate::cache::operation::{Operation, Options};
use crate::cache::partition::PartitionId;
use crate::cache::version::Epoch;
use crate::types::Peer;

use super::quorum::Quorum;

/// Where an operation is.
#[derive(Debug)]
pub(super) enum State {
    /// Nowhere: it is tried again when its partition changes or its pause is over.
    Waiting,
    /// With the replica of this node.
    AtReplica,
    /// With another node.
    Sent { to: Peer, life: u32, epoch: Option<Epoch> },
    /// With the owners.
    Quorum(Box<Quorum>),
}

/// A write was sent, and whether it arrived is not known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Doubt {
    pub(super) peer: Peer,
    pub(super) life: u32,
    /// The epoch in which it was believed to serve.
    pub(super) epoch: Option<Epoch>,
}

/// One operation.
#[derive(Debug)]
pub(super) struct Pending {
    pub(super) ticket: u64,
    pub(super) partition: PartitionId,
    pub(super) operation: Operation,
    pub(super) options: Options,
    pub(super) state: State,
    /// How often it was tried.
    pub(super) attempts: u32,
    /// How often it was sent.
    pub(super) sendings: u32,
    /// Who serves, as the last node that was asked wrongly said.
    pub(super) hint: Option<(Peer, Option<Epoch>)>,
    /// The highest epoch in which somebody was said to serve.
    pub(super) followed: Option<Epoch>,
    pub(super) doubt: Option<Doubt>,
    /// Too few owners had confirmed it when its primary stepped down: it may or may not be in the next epoch.
    pub(super) unconfirmed: Option<CacheError>,
    /// Somebody else may have had it as well, before: nobody can take that doubt away any more.
    pub(super) unsure: bool,
    /// It may have been carried out twice: its counts are of the second time.
    pub(super) repeated: bool,
    /// Until when the node that it was sent to tries, at the latest: an answer that comes later may be of its deadline.
    pub(super) patience: Duration,
    /// Why it waits.
    pub(super) last: Option<CacheError>,
    wake: Duration,
}

impl Pending {
    pub(super) fn new(ticket: u64, partition: PartitionId, operation: Operation, options: Options) -> Self {
        let wake = options.deadline;
        Self {
            ticket,
            partition,
            operation,
            options,
            state: State::Waiting,
            attempts: 0,
            sendings: 0,
            hint: None,
            followed: None,
            doubt: None,
            unconfirmed: None,
            patience: Duration::ZERO,
            unsure: false,
            repeated: false,
            last: None,
            wake,
        }
    }

    pub(super) fn is_write(&self) -> bool {
        self.operation.is_write()
    }
}

/// All of them, by the number under which they are sent and known to replicas.
#[derive(Debug, Default)]
pub(super) struct PendingTable {
    all: BTreeMap<u64, Pending>,
    by_ticket: BTreeMap<u64, u64>,
    wakes: BTreeSet<(Duration, u64)>,
    waiting: BTreeMap<PartitionId, BTreeSet<u64>>,
    sent: BTreeMap<Peer, BTreeSet<u64>>,
}

impl PendingTable {
    pub(super) fn len(&self) -> usize {
        self.all.len()
    }

    pub(super) fn get(&self, id: u64) -> Option<&Pending> {
        self.all.get(&id)
    }

    pub(super) fn get_mut(&mut self, id: u64) -> Option<&mut Pending> {
        self.all.get_mut(&id)
    }

    pub(super) fn id_of(&self, ticket: u64) -> Option<u64> {
        self.by_ticket.get(&ticket).copied()
    }

    /// A new one: it waits, with its deadline as its alarm.
    pub(super) fn insert(&mut self, id: u64, pending: Pending) {
        self.by_ticket.insert(pending.ticket, id);
        self.wakes.insert((pending.wake, id));
        self.waiting.entry(pending.partition).or_default().insert(id);
        self.all.insert(id, pending);
    }

    pub(super) fn remove(&mut self, id: u64) -> Option<Pending> {
        self.leave(id);
        let pending = self.all.remove(&id)?;
        self.by_ticket.remove(&pending.ticket);
        self.wakes.remove(&(pending.wake, id));
        Some(pending)
    }

    /// Takes it out of the indexes of its state.
    fn leave(&mut self, id: u64) {
        let Some(pending) = self.all.get(&id) else { return };
        match &pending.state {
            State::Waiting => {
                if let Some(ids) = self.waiting.get_mut(&pending.partition) {
                    ids.remove(&id);
                    if ids.is_empty() {
                        self.waiting.remove(&pending.partition);
                    }
                }
            }
            State::AtReplica => {}
            State::Sent { to, .. } => {
                let to = to.clone();
                self.unlist(&to, id);
            }
            State::Quorum(quorum) => {
                let asked: Vec<Peer> = quorum.asked().cloned().collect();
                asked.iter().for_each(|peer| self.unlist(peer, id));
            }
        }
    }

    fn unlist(&mut self, peer: &Peer, id: u64) {
        if let Some(ids) = self.sent.get_mut(peer) {
            ids.remove(&id);
            if ids.is_empty() {
                self.sent.remove(peer);
            }
        }
    }

    /// Puts it into a state; `wake` is when it is looked at again, its deadline at the latest.
    pub(super) fn enter(&mut self, id: u64, state: State, wake: Option<Duration>) {
        self.leave(id);
        let Some(pending) = self.all.get_mut(&id) else { return };
        match &state {
            State::Waiting => {
                self.waiting.entry(pending.partition).or_default().insert(id);
            }
            State::AtReplica => {}
            State::Sent { to, .. } => {
                self.sent.entry(to.clone()).or_default().insert(id);
            }
            State::Quorum(quorum) => {
                for peer in quorum.asked() {
                    self.sent.entry(peer.clone()).or_default().insert(id);
                }
            }
        }
        pending.state = state;
        let wake = wake.unwrap_or(pending.options.deadline).min(pending.options.deadline);
        if wake != pending.wake {
            self.wakes.remove(&(pending.wake, id));
            self.wakes.insert((wake, id));
            pending.wake = wake;
        }
    }

    /// Changes whom a read by quorum has asked or heard; nothing for what is in another state.
    pub(super) fn change_quorum(&mut self, id: u64, change: impl FnOnce(&mut Quorum)) {
        let Some(State::Quorum(quorum)) = self.all.get_mut(&id).map(|pending| &mut pending.state) else {
            return;
        };
        let before: Vec<Peer> = quorum.asked().cloned().collect();
        change(quorum);
        let after: Vec<Peer> = quorum.asked().cloned().collect();
        before.iter().for_each(|peer| self.unlist(peer, id));
        after.into_iter().for_each(|peer| {
            self.sent.entry(peer).or_default().insert(id);
        });
    }

    /// Those that wait for something to change in this partition.
    pub(super) fn waiting_for(&self, partition: PartitionId) -> impl Iterator<Item = u64> {
        self.waiting.get(&partition).into_iter().flatten().copied()
    }

    /// All that wait.
    pub(super) fn waiting(&self) -> impl Iterator<Item = u64> {
        self.waiting.values().flatten().copied()
    }

    /// Those of which this peer has something.
    pub(super) fn sent_to(&self, peer: &Peer) -> Vec<u64> {
        self.sent.get(peer).into_iter().flatten().copied().collect()
    }

    /// All peers that have something.
    pub(super) fn asked_peers(&self) -> Vec<Peer> {
        self.sent.keys().cloned().collect()
    }

    pub(super) fn next_wake(&self) -> Option<Duration> {
        self.wakes.first().map(|(wake, _)| *wake)
    }

    /// Those whose time has come.
    pub(super) fn due(&self, now: Duration) -> Vec<u64> {
        self.wakes.range(..=(now, u64::MAX)).map(|(_, id)| *id).collect()
    }

    pub(super) fn ids(&self) -> Vec<u64> {
        self.all.keys().copied().collect()
    }

    pub(super) fn check(&self) -> Result<(), String> {
        if self.wakes.len() != self.all.len() || self.by_ticket.len() > self.all.len() {
            return Err(format!("{} operations and {} alarms", self.all.len(), self.wakes.len()));
        }
        let indexed = self.waiting.values().chain(self.sent.values());
        if let Some(id) = indexed.flatten().find(|id| !self.all.contains_key(id)) {
            return Err(format!("operation {id} has ended and is still listed"));
        }
        let waits = self.all.values().filter(|pending| matches!(pending.state, State::Waiting)).count();
        let listed: usize = self.waiting.values().map(BTreeSet::len).sum();
        if waits == listed { Ok(()) } else { Err(format!("{waits} operations wait and {listed} are listed")) }
    }
}
