//! One partition's copy on one node, and who serves it. Sans-IO: members, messages and time come in, effects go out.
//!
//! ```text
//!            inquiry, promises of a quorum           in force
//!   Idle ─────────────────────────────▶ Leading ───────────────▶ Leading, serving ──┐ other owners: next epoch
//!    ▲ ◀──────────────────────────────────┴─ a later epoch, or hopeless ─┘   ▲───────┘
//!    │ released                                                              │ hand-over
//!    └─────────────── Following ◀── NewConfig of a primary, not below what was promised
//! ```
//!
//! What it promises: a `Sync` write that was confirmed survives floor(replicas / 2) crashes at a time, with copies made
//! whole between, and without a split; what was deleted does not come back within `tombstone_ttl` of a split; an epoch
//! has one primary; what loses in a merge is reported. Each file says its part of why: `takeover` (who begins an
//! epoch), `primary` (when it serves and what is confirmed), `stream` and `snapshot` (how owners follow), `follower`
//! (what they accept), `change` (owners that come and go, hand-over, forgetting), `merge` (after a split).

use std::collections::{BTreeSet, VecDeque};
use std::time::Duration;

use super::config::{CacheConfig, WriteMode};
use super::error::CacheError;
use super::operation::WriteOp;
use super::partition::PartitionId;
use super::store::Store;
use super::version::{Epoch, Version};
use crate::transport::Lane;
use crate::types::Peer;

mod budget;
mod change;
mod effect;
mod follower;
mod history;
mod log;
mod merge;
mod message;
mod primary;
mod rules;
mod snapshot;
mod stream;
mod takeover;
#[cfg(test)]
mod tests;

pub use budget::Budget;
#[cfg(feature = "consensus")]
pub(crate) use budget::Slot;
pub use effect::{CacheEvent, OwnerState};
pub(crate) use effect::{Coverage, ReplicaEffect};
use follower::Following;
pub(crate) use history::contains;
use history::is_prefix;
use log::Log;
#[cfg(feature = "consensus")]
pub(crate) use log::entry_len;
use merge::Offer;
pub use message::{Config, ReplicaMessage, Report};
use primary::Leading;
pub use rules::{Mutation, Rules};
use takeover::{Inquiry, Nomination};

/// Nodes begin to count below this: clocks in nanoseconds are, for a hundred years.
const FIRST_COUNTERS: u64 = 1 << 62;

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

impl Members {
    /// Whether a message to this node has a chance, and this node counts.
    fn reach(&self, peer: &Peer) -> bool {
        self.live.contains(peer) && self.up.contains(peer)
    }

    /// Whether this node is known to be dead, and not only out of sight: it has come back in a later life.
    fn has_died(&self, peer: &Peer) -> bool {
        self.live.iter().any(|live| live.node == peer.node && live.incarnation > peer.incarnation)
    }
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
    /// What may be spent on filling copies.
    pub(crate) budget: &'a Budget,
}

/// The newest config that a node knows.
#[derive(Clone, Debug)]
struct Known {
    config: Config,
    /// Whether it is known to be in force.
    effective: bool,
}

/// What a node does for a partition.
#[derive(Debug)]
enum Role {
    /// Nothing, or it waits for a primary.
    Idle,
    /// It follows a primary's stream.
    Following(Box<Following>),
    /// It is the primary of an epoch.
    Leading(Box<Leading>),
}

/// One partition on one node; see the [module](self). Methods are grouped: getters, inputs, commands, outputs.
#[derive(Debug)]
pub(crate) struct Replica {
    id: PartitionId,
    /// The owners by the ring.
    wanted: Vec<Peer>,
    /// The copy; an empty one if there is none.
    store: Store,
    /// Whether the copy is whole: everything of its history up to its last write.
    whole: bool,
    log: Log,
    /// Nothing of an older epoch is accepted.
    promised: Option<Epoch>,
    known: Option<Box<Known>>,
    role: Role,
    inquiry: Option<Box<Inquiry>>,
    nominated: Option<Box<Nomination>>,
    /// What this node's copy alone has, on its way to the primary.
    offer: Option<Box<Offer>>,
    /// To whom this node has just handed over, and until when it waits for that node to begin.
    handed: Option<(Peer, Duration)>,
    /// Who was told of which config, because it is to take over.
    reminded: Option<(Peer, Epoch)>,
    /// A promise that goes beyond the primary that is followed, and until when it is given to come to something.
    overdue: Option<(Epoch, Duration)>,
    /// How many streams this node has begun as a primary.
    streams: u64,
    /// The highest counter of an epoch that was heard of.
    seen: u64,
    /// When the next inquiry may begin.
    retry_at: Duration,
    attempts: u32,
    /// What was last said about missing copies.
    stalled: Option<(usize, usize)>,
    state: OwnerState,
    wake: Option<Duration>,
    changed: bool,
    effects: VecDeque<ReplicaEffect>,
}

impl Replica {
    /// A node that has nothing and knows nothing of the partition.
    pub(crate) fn new(id: PartitionId, ctx: Context<'_>) -> Self {
        Self {
            id,
            wanted: Vec::new(),
            store: Store::new(ctx.config),
            whole: false,
            log: Log::default(),
            promised: None,
            known: None,
            role: Role::Idle,
            inquiry: None,
            nominated: None,
            offer: None,
            handed: None,
            reminded: None,
            overdue: None,
            streams: 0,
            // A cache that is closed and opened again is the same peer, and must not begin an epoch twice. And where
            // incarnations tell the time, what is born after the loss of all copies comes after what was lost.
            seen: born_after(ctx),
            retry_at: Duration::ZERO,
            attempts: 0,
            stalled: None,
            state: OwnerState::Absent,
            wake: None,
            changed: false,
            effects: VecDeque::new(),
        }
    }

    // ---- getters

    /// The epoch in which this node is the primary and accepts operations; `None` also while it hands over.
    pub(crate) fn serving(&self) -> Option<&Epoch> {
        match &self.role {
            Role::Leading(leading) if leading.accepts() => Some(&leading.config.epoch),
            Role::Leading(_) | Role::Idle | Role::Following(_) => None,
        }
    }

    /// Whether this node is an owner with a whole copy.
    pub(crate) fn is_active(&self) -> bool {
        self.state == OwnerState::Active
    }

    /// What this node has.
    pub(crate) fn state(&self) -> OwnerState {
        self.state
    }

    /// The newest config that this node knows.
    pub(crate) fn config(&self) -> Option<&Config> {
        self.known.as_ref().map(|known| &known.config)
    }

    /// The copy (an empty one if there is none).
    pub(crate) fn store(&self) -> &Store {
        &self.store
    }

    /// The last write that the copy has.
    pub(crate) fn end(&self) -> Option<&Version> {
        self.store.applied()
    }

    /// Whether all wanted owners are active, as far as this node is the primary and knows.
    #[cfg(test)]
    pub(crate) fn is_settled(&self) -> bool {
        match &self.role {
            Role::Leading(leading) => leading.settled,
            Role::Idle | Role::Following(_) => false,
        }
    }

    /// Whether the copy has this write.
    pub(crate) fn covers(&self, at_least: &Version) -> Coverage {
        if !self.whole {
            return Coverage::NotYet;
        }
        match contains(self.store.lineage(), self.end(), at_least) {
            // epochs without a write are not in the copy's own lineage
            Coverage::NotYet => match self.history() {
                Some(history) if contains(&history, self.end(), at_least) == Coverage::Lost => Coverage::Lost,
                _ => Coverage::NotYet,
            },
            known => known,
        }
    }

    /// What must always hold, in words if it does not.
    pub(crate) fn check_invariants(&self) -> Result<(), String> {
        self.store.check_invariants()?;
        if self.whole {
            self.log.check(self.end())?;
        }
        let promised = self.promised.as_ref();
        match &self.role {
            Role::Idle => Ok(()),
            Role::Following(following) if Some(&following.epoch) > promised => {
                Err(format!("epoch {} is followed and was not promised", following.epoch))
            }
            Role::Following(_) => Ok(()),
            Role::Leading(leading) => {
                if promised != Some(&leading.config.epoch) {
                    return Err(format!("{} leads, and {promised:?} is promised", leading.config.epoch));
                }
                if self.config() != Some(&leading.config) || !self.whole {
                    return Err(format!("{} leads without its config or a copy", leading.config.epoch));
                }
                leading.check(self.end())
            }
        }
    }

    // ---- inputs

    /// The members or the ring of participants changed. `wanted` are the partition's owners by the ring, without the
    /// draining nodes.
    pub(crate) fn handle_members(&mut self, wanted: &[Peer], ctx: Context<'_>) {
        if self.wanted != wanted {
            self.wanted = wanted.to_vec();
        }
        self.forget_unreachable(ctx);
        self.settle(ctx);
    }

    /// A link came up. `ctx.members.up` has it already.
    pub(crate) fn handle_peer_up(&mut self, peer: &Peer, ctx: Context<'_>) {
        // whatever was in flight before is lost, also if nobody has said that the link was down
        self.forget_peer(peer, ctx);
        self.settle(ctx);
    }

    /// A link went down; everything in flight on it is lost. `ctx.members.up` has it no more.
    pub(crate) fn handle_peer_down(&mut self, peer: &Peer, ctx: Context<'_>) {
        self.forget_peer(peer, ctx);
        self.settle(ctx);
    }

    /// A message arrived.
    pub(crate) fn handle_message(&mut self, from: &Peer, message: ReplicaMessage, ctx: Context<'_>) {
        use ReplicaMessage as M;
        if !message.is_bounded() {
            return;
        }
        match message {
            M::Inquire { attempt, known } => self.on_inquire(from, attempt, known, ctx),
            M::Promise { attempt, report } => self.on_promise(from, &attempt, report, ctx),
            M::Refuse { attempt, promised, config, effective } => {
                self.on_refuse(from, &attempt, promised, config, effective, ctx);
            }
            M::Nominate { seen, config, effective, accept_loss, replace } => {
                self.on_nominate(&seen, config, effective, Nomination::new(accept_loss, replace, ctx), ctx);
            }
            M::AcceptLoss => self.on_accept_loss(ctx),
            M::NewConfig { config, lineage, since, effective, goes_on, stream } => {
                self.on_new_config(
                    from,
                    follower::Beginning { config, lineage, since, effective, goes_on, stream },
                    ctx,
                );
            }
            M::Append { epoch, prev, entries, commit: _, all_have } => {
                self.on_append(from, &epoch, prev.as_ref(), entries, all_have, ctx);
            }
            M::SnapshotBegin { epoch, header } => self.on_snapshot_begin(from, &epoch, header, ctx),
            M::SnapshotChunk { epoch, number, entries, last, through } => {
                self.on_snapshot_chunk(from, &epoch, snapshot::Piece { number, entries, last, through }, ctx);
            }
            M::Position { epoch, header, whole, follows, stream } => {
                self.on_position(from, &epoch, stream::Place { header, whole, follows, stream }, ctx);
            }
            M::Ack { epoch, end, whole } => self.on_ack(from, &epoch, end, whole),
            M::SnapshotAck { epoch, number } => self.on_snapshot_ack(from, &epoch, number),
            M::Reject { epoch, promised, config, effective } => {
                self.on_reject(&epoch, &promised, config, effective, ctx);
            }
            M::Announce { config, settled } => self.on_announce(from, config, settled, ctx),
            M::Release { epoch } => self.on_release(from, &epoch, ctx),
            M::Want { epoch, lineage, end } => self.on_want(from, epoch, lineage, end, ctx),
            M::Offer { epoch, number, entries, last } => {
                self.on_offer(from, &epoch, merge::Offered { number, entries, last }, ctx);
            }
            M::OfferAck { epoch, number } => self.on_offer_ack(from, &epoch, number, ctx),
            M::Known { config, effective } => self.hear(Some(config), effective, ctx),
            M::HandOver { from: ended, epoch } => self.on_hand_over(from, &ended, epoch, ctx),
        }
        self.settle(ctx);
    }

    /// Time went by.
    pub(crate) fn handle_timeout(&mut self, ctx: Context<'_>) {
        self.expire(ctx);
        self.settle(ctx);
    }

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
        self.carry_out(ticket, op, mode, deadline, ctx)
    }

    /// Whoever waited for this write has gone; the write goes on.
    pub(crate) fn forget(&mut self, ticket: u64) {
        if let Role::Leading(leading) = &mut self.role {
            leading.waiting.forget(ticket);
        }
        self.effects
            .retain(|effect| !matches!(effect, ReplicaEffect::Written { ticket: of, .. } if *of == ticket));
    }

    /// The operator accepts that acknowledged writes of this partition may be lost: it goes on with the copies that
    /// can be reached. It may be said to any node.
    pub(crate) fn accept_loss(&mut self, ctx: Context<'_>) {
        self.on_accept_loss(ctx);
        self.settle(ctx);
    }

    // ---- outputs

    /// What is to be done next.
    pub(crate) fn poll_effect(&mut self) -> Option<ReplicaEffect> {
        let effect = self.effects.pop_front();
        if effect.is_none() && std::mem::take(&mut self.changed) {
            return Some(ReplicaEffect::Changed);
        }
        effect
    }

    /// When [`Replica::handle_timeout`] wants to be called.
    pub(crate) fn poll_timeout(&self) -> Option<Duration> {
        let waiting = match &self.role {
            Role::Leading(leading) => leading.waiting.deadline(),
            Role::Idle | Role::Following(_) => None,
        };
        earliest(self.wake, waiting)
    }

    // ---- inside

    fn send(&mut self, to: &Peer, lane: Lane, message: ReplicaMessage) {
        self.effects.push_back(ReplicaEffect::Send { to: to.clone(), lane, message });
    }

    fn tell(&mut self, event: CacheEvent) {
        self.effects.push_back(ReplicaEffect::Event(event));
    }

    /// What there is to do now; after every input.
    fn settle(&mut self, ctx: Context<'_>) {
        self.wake = None;
        match self.role {
            Role::Leading(_) => self.lead(ctx),
            Role::Idle | Role::Following(_) => self.stand(ctx),
        }
        self.mind_promise(ctx);
        self.plan_purge(ctx);
        let state = self.find_state(ctx);
        if state != self.state {
            self.state = state;
            self.changed = true;
            self.tell(CacheEvent::State { partition: self.id, state });
        }
    }

    fn wake_at(&mut self, at: Duration) {
        self.wake = earliest(self.wake, Some(at));
    }

    fn find_state(&self, ctx: Context<'_>) -> OwnerState {
        let owner = self.config().is_some_and(|config| config.owners.contains(ctx.me));
        let (active, filling) = match &self.role {
            Role::Leading(leading) => (leading.effective, true),
            Role::Following(following) => (self.is_in_line(following), following.incoming.is_some()),
            Role::Idle => (false, false),
        };
        if owner && self.whole && active {
            OwnerState::Active
        } else if owner || self.whole || filling || self.wanted.contains(ctx.me) {
            OwnerState::Syncing
        } else {
            OwnerState::Absent
        }
    }

    /// Whether the copy is one that the followed config can count on: it has the base, and nothing that was lost.
    fn is_in_line(&self, following: &Following) -> bool {
        let Some(config) = self.config() else { return false };
        let (lineage, end) = (self.store.lineage(), self.end());
        let base = config.base.as_ref();
        following.epoch == config.epoch
            && base.is_none_or(|base| contains(lineage, end, base) == Coverage::Yes)
            && end.is_none_or(|end| {
                end.epoch == following.epoch || is_prefix(&following.lineage, Some(end), Some(end))
            })
    }

    /// Drops what this node waits for from peers that cannot be reached.
    fn forget_unreachable(&mut self, ctx: Context<'_>) {
        let mut gone: BTreeSet<Peer> = BTreeSet::new();
        let mut look = |peer: &Peer| {
            if !ctx.members.reach(peer) && peer != ctx.me {
                gone.insert(peer.clone());
            }
        };
        if let Role::Leading(leading) = &self.role {
            leading.peers().for_each(&mut look);
        }
        if let Some(inquiry) = &self.inquiry {
            inquiry.peers().for_each(&mut look);
        }
        if let Some((to, _)) = &self.handed {
            look(to);
        }
        if let Some((of, _)) = &self.reminded {
            look(of);
        }
        gone.iter().for_each(|peer| self.forget_peer(peer, ctx));
    }

    fn forget_peer(&mut self, peer: &Peer, ctx: Context<'_>) {
        match &mut self.role {
            Role::Leading(leading) => leading.forget_peer(peer, ctx.rules),
            Role::Idle | Role::Following(_) => {}
        }
        if let Some(inquiry) = &mut self.inquiry {
            inquiry.forget_peer(peer);
        }
        if self.handed.as_ref().is_some_and(|(to, _)| to == peer) {
            self.handed = None;
        }
        if self.offer.as_ref().is_some_and(|offer| offer.to == *peer) {
            self.offer = None;
        }
        if self.reminded.as_ref().is_some_and(|(of, _)| of == peer) {
            self.reminded = None;
        }
    }

    /// Takes note of a config; whether it was news.
    fn learn(&mut self, config: Config, effective: bool) -> bool {
        self.seen = self.seen.max(config.epoch.counter);
        match &mut self.known {
            Some(known) if known.config.epoch > config.epoch => false,
            Some(known) if known.config.epoch == config.epoch => {
                let news = effective && !known.effective;
                known.effective |= effective;
                self.changed |= news;
                news
            }
            _ => {
                self.known = Some(Box::new(Known { config, effective }));
                self.attempts = 0;
                self.retry_at = Duration::ZERO;
                self.stalled = None;
                self.changed = true;
                true
            }
        }
    }

    /// The epochs of the history that this node follows or leads, the current one last.
    fn history(&self) -> Option<super::version::Lineage> {
        match &self.role {
            Role::Idle => None,
            Role::Following(following) => Some(following.lineage.clone()),
            Role::Leading(leading) => Some(leading.history(&self.store)),
        }
    }

    /// Gives the copy up.
    fn drop_copy(&mut self, ctx: Context<'_>) {
        self.store = Store::new(ctx.config);
        self.log = Log::default();
        self.whole = false;
        self.changed = true;
    }
}

/// The counter that a node begins to count from. Incarnations that are no time may be any number, and others take in what
/// is in range only.
fn born_after(ctx: Context<'_>) -> u64 {
    (ctx.me.incarnation.get() % FIRST_COUNTERS)
        .saturating_add(u64::try_from(ctx.now.as_micros()).unwrap_or(0).min(FIRST_COUNTERS / 4))
}

/// The earlier of two times, if there is any.
fn earliest(a: Option<Duration>, b: Option<Duration>) -> Option<Duration> {
    match (a, b) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (a, b) => a.or(b),
    }
}
