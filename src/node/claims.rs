//! What this node tells the routers of its groups: the state machine of one shard.
//!
//! ```text
//!                    join, router elsewhere              acknowledged
//!        Vacant ────────────────────────────▶ Claiming ───────────────▶ Held
//!          │  ▲                                │   ▲                    │  ▲
//!          │  │ acknowledged          timed out │   │ join     last leave│  │ join
//!          │  └───────── Flushing ◀──┐          ▼   │                    ▼  │
//!          │                │        └────── Retracting ◀──────────── Cooldown
//!          │                └── commit, no answer ──▲        cooldown over
//!          └─ join, router is this node: straight to Held; its last leave goes straight to Vacant
//! ```
//!
//! A commit walks all groups once (the *gather*): what moved to another router, or to one that must be told
//! everything, goes into that router's transfer; a claim in flight is also made again under a new version.
//! A join to a group that the walk has not reached yet walks that group first, so that no claim can slip
//! between the old ring and the new one.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use indexmap::IndexMap;

use crate::sync::Counter;
use crate::types::{Group, Peer};

use super::effect::{JoinRefused, NodeEvent, Ticket};
use super::hashing::{SeededState, make_room};
use super::members::{LocalMembers, Members};
use super::outbox::within;
use super::published::Published;
use super::rules::Mutation;
use super::{Settings, Time};

/// Retractions that travel in one message.
const RETRACT_BATCH: usize = 500;

/// The claim state of one group. `Vacant` is not stored: it is the absence of an entry.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum State<M> {
    Claiming(Box<Claiming<M>>),
    Held,
    Cooldown { until: Time },
    Retracting,
    Flushing { version: u64 },
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Claiming<M> {
    version: u64,
    router: Peer,
    deadline: Time,
    waiters: Vec<Waiter<M>>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Waiter<M> {
    ticket: Ticket,
    number: u64,
    handle: M,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Entry<M> {
    state: State<M>,
    /// The gather that last saw it.
    epoch: u32,
    /// Whether it waits in `cooling`.
    cooling: bool,
    /// Not empty exactly in `Held`.
    members: Members<M>,
}

/// What a commit wants from every shard.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct GatherPlan {
    pub(crate) old: Arc<Published>,
    pub(crate) new: Arc<Published>,
    /// By the new ring's order of nodes: whether this router must be told everything.
    pub(crate) full: Vec<bool>,
}

/// A retraction on its way.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Batch {
    router: Peer,
    groups: Vec<Group>,
    sent: Time,
}

/// What a step of the shard needs to know.
pub(crate) struct Context<'a> {
    pub(crate) published: &'a Published,
    pub(crate) versions: &'a Counter,
    pub(crate) settings: &'a Settings,
    pub(crate) now: Time,
}

/// What a step of the shard asks for, carried out when its lock is free.
#[derive(Debug, Default)]
pub(crate) struct Asked {
    /// Claims to send.
    pub(crate) claims: Vec<(Peer, Group, u64)>,
    /// Retraction batches to send.
    pub(crate) retracts: Vec<(Peer, u64, Vec<Group>)>,
    /// Joins that are answered.
    pub(crate) joined: Vec<(Ticket, Result<(), JoinRefused>)>,
    /// Events.
    pub(crate) events: Vec<NodeEvent>,
}

/// How a join left the shard.
pub(crate) enum Admission {
    Joined,
    AlreadyMember,
    Waiting,
}

/// The claims and the members of the groups that hash to this shard.
#[derive(Clone, Debug)]
pub(crate) struct ClaimShard<M> {
    entries: IndexMap<Group, Entry<M>, SeededState>,
    epoch: u32,
    plan: Option<Arc<GatherPlan>>,
    /// Entries at and above this place are gathered.
    cursor: usize,
    /// Gathered groups, with their router's place in the new ring's nodes.
    gathered: Vec<(usize, Group)>,
    cooling: VecDeque<(Time, Group)>,
    retracting: BTreeSet<Group>,
    batches: BTreeMap<u64, Batch>,
    deadlines: VecDeque<(Time, Group)>,
    members: usize,
}

impl<M: PartialEq> PartialEq for ClaimShard<M> {
    fn eq(&self, other: &Self) -> bool {
        self.entries == other.entries
            && self.epoch == other.epoch
            && self.plan == other.plan
            && self.cursor == other.cursor
            && self.gathered == other.gathered
            && self.cooling == other.cooling
            && self.retracting == other.retracting
            && self.batches == other.batches
            && self.deadlines == other.deadlines
    }
}

impl<M: Eq> Eq for ClaimShard<M> {}

impl<M: Hash> Hash for ClaimShard<M> {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.entries.len().hash(state);
        let mut sorted: Vec<_> = self.entries.iter().collect();
        sorted.sort_by(|a, b| a.0.cmp(b.0));
        sorted.hash(state);
        self.epoch.hash(state);
        self.plan.hash(state);
        self.cursor.hash(state);
        self.gathered.hash(state);
        self.cooling.hash(state);
        self.retracting.hash(state);
        self.batches.hash(state);
        self.deadlines.hash(state);
    }
}

// Getters.
impl<M: Clone> ClaimShard<M> {
    pub(crate) fn new(hasher: SeededState) -> Self {
        Self {
            entries: IndexMap::with_hasher(hasher),
            epoch: 0,
            plan: None,
            cursor: 0,
            gathered: Vec::new(),
            cooling: VecDeque::new(),
            retracting: BTreeSet::new(),
            batches: BTreeMap::new(),
            deadlines: VecDeque::new(),
            members: 0,
        }
    }

    pub(crate) fn local_members(&self, group: &[u8]) -> LocalMembers<M> {
        match self.entries.get(group) {
            Some(entry) => LocalMembers::new(entry.members.clone()),
            None => LocalMembers::none(),
        }
    }

    pub(crate) fn holds(&self, group: &[u8]) -> bool {
        self.entries.get(group).is_some_and(|entry| !entry.members.is_empty())
    }

    pub(crate) fn contains(&self, group: &[u8], number: u64) -> bool {
        self.entries.get(group).is_some_and(|entry| entry.members.contains(number))
    }

    /// Groups with members, entries in all, members.
    pub(crate) fn counts(&self) -> (usize, usize, usize) {
        let held = self.entries.values().filter(|e| !e.members.is_empty()).count();
        (held, self.entries.len(), self.members)
    }

    /// The sizes of everything that must not grow without bound.
    pub(crate) fn footprint(&self) -> usize {
        self.entries.len()
            + self.cooling.len()
            + self.retracting.len()
            + self.batches.len()
            + self.deadlines.len()
            + self.gathered.len()
    }

    /// Every group with the name of its state and its number of members.
    pub(crate) fn list(&self) -> Vec<(Group, &'static str, usize)> {
        self.entries.iter().map(|(group, e)| (group.clone(), e.state.name(), e.members.len())).collect()
    }

    /// Whether the gather has seen every group.
    pub(crate) fn gathered_all(&self) -> bool {
        self.plan.is_none() || self.cursor == 0
    }

    /// Visits up to `limit` groups below place `from` that a router should have a row for; the place to go on.
    pub(crate) fn visit_claimed(&self, from: usize, limit: usize, mut visit: impl FnMut(&Group)) -> usize {
        let from = from.min(self.entries.len());
        let to = from.saturating_sub(limit);
        for (group, entry) in self.entries.get_range(to..from).into_iter().flatten() {
            if entry.state.claimed() {
                visit(group);
            }
        }
        to
    }

    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    /// What must hold after every step.
    pub(crate) fn check(&self, published: &Published) -> Result<(), String> {
        for (group, entry) in &self.entries {
            let held = matches!(entry.state, State::Held);
            if held == entry.members.is_empty() {
                return Err(format!("{group}: {} with {} members", entry.state.name(), entry.members.len()));
            }
            if entry.epoch > self.epoch {
                return Err(format!("{group}: gathered in epoch {} before {}", entry.epoch, self.epoch));
            }
            if matches!(entry.state, State::Retracting) && !self.retracting.contains(group) {
                return Err(format!("{group}: Retracting but in no queue"));
            }
            if matches!(entry.state, State::Cooldown { .. }) && !entry.cooling {
                return Err(format!("{group}: Cooldown but in no queue"));
            }
            if let State::Flushing { version } = entry.state
                && !self.batches.contains_key(&version)
            {
                return Err(format!("{group}: Flushing in no batch"));
            }
            let own = *published.router(group.as_bytes()) == published.me;
            if own && self.plan.is_none() && matches!(entry.state, State::Claiming(_)) {
                return Err(format!("{group}: claimed from {} but routed here", published.me));
            }
        }
        Ok(())
    }
}

// Commands.
impl<M: Clone> ClaimShard<M> {
    /// `ticket` is asked for one only if the join has to wait.
    pub(crate) fn join(
        &mut self,
        group: Group,
        number: u64,
        handle: M,
        ticket: impl FnOnce() -> Ticket,
        ctx: &Context<'_>,
        asked: &mut Asked,
    ) -> Admission {
        self.gather_first(&group, ctx, asked);
        let deadline = ctx.now.saturating_add(ctx.settings.join_timeout);
        let epoch = self.epoch;
        let Some(entry) = self.entries.get_mut(&group) else {
            make_room(&mut self.entries);
            let router = ctx.published.router(group.as_bytes());
            let own = *router == ctx.published.me;
            let mut entry = Entry { state: State::Held, epoch, cooling: false, members: Members::None };
            if own || ctx.settings.rules.breaks(Mutation::AnswerBeforeAck) {
                entry.members.insert(number, handle);
                self.members += 1;
                asked.events.push(NodeEvent::Occupied(group.clone()));
                if !own {
                    asked.claims.push((router.clone(), group.clone(), ctx.versions.next()));
                }
                self.entries.insert(group, entry);
                return Admission::Joined;
            }
            let waiters = vec![Waiter { ticket: ticket(), number, handle }];
            entry.state = claim(&group, router, deadline, waiters, ctx, asked);
            self.deadlines.push_back((deadline, group.clone()));
            self.entries.insert(group, entry);
            self.trim_queues();
            return Admission::Waiting;
        };
        match &mut entry.state {
            State::Held => {
                if !entry.members.insert(number, handle) {
                    return Admission::AlreadyMember;
                }
                self.members += 1;
                Admission::Joined
            }
            State::Claiming(claiming) => {
                claiming.waiters.push(Waiter { ticket: ticket(), number, handle });
                Admission::Waiting
            }
            // the router still has our row: nobody need be told
            State::Cooldown { .. } => {
                entry.state = State::Held;
                entry.members.insert(number, handle);
                self.members += 1;
                asked.events.push(NodeEvent::Occupied(group));
                Admission::Joined
            }
            State::Retracting | State::Flushing { .. } => {
                self.retracting.remove(&group);
                let router = ctx.published.router(group.as_bytes());
                if *router == ctx.published.me {
                    entry.state = State::Held;
                    entry.members.insert(number, handle);
                    self.members += 1;
                    asked.events.push(NodeEvent::Occupied(group));
                    return Admission::Joined;
                }
                // a retraction may be on its way: the claim is newer, so it wins in either order of arrival
                let waiters = vec![Waiter { ticket: ticket(), number, handle }];
                entry.state = claim(&group, router, deadline, waiters, ctx, asked);
                self.deadlines.push_back((deadline, group));
                self.trim_queues();
                Admission::Waiting
            }
        }
    }

    /// Forgets a waiting join; the handle comes back if it was still waiting.
    pub(crate) fn cancel(&mut self, group: &[u8], ticket: Ticket) -> Option<M> {
        let entry = self.entries.get_mut(group)?;
        let State::Claiming(claiming) = &mut entry.state else { return None };
        let at = claiming.waiters.iter().position(|w| w.ticket == ticket)?;
        Some(claiming.waiters.remove(at).handle)
    }

    pub(crate) fn leave(
        &mut self,
        group: &[u8],
        number: u64,
        ctx: &Context<'_>,
        asked: &mut Asked,
    ) -> Option<M> {
        let (index, key, entry) = self.entries.get_full_mut(group)?;
        let handle = entry.members.remove(number)?;
        self.members -= 1;
        if entry.members.is_empty() {
            asked.events.push(NodeEvent::Vacant(key.clone()));
            let group = key.clone();
            if *ctx.published.router(group.as_bytes()) == ctx.published.me {
                self.remove_at(index);
            } else {
                self.cool(&group, ctx);
            }
        }
        Some(handle)
    }
}

// Inputs.
impl<M: Clone> ClaimShard<M> {
    /// The router `from` has the claim of this version in its table.
    pub(crate) fn claim_acknowledged(
        &mut self,
        group: &Group,
        version: u64,
        from: &Peer,
        ctx: &Context<'_>,
        asked: &mut Asked,
    ) {
        let Some(entry) = self.entries.get_mut(group) else { return };
        let State::Claiming(claiming) = &mut entry.state else { return };
        // an answer to an earlier claim, or from an earlier router, says nothing about this one
        let other = claiming.version != version && !ctx.settings.rules.breaks(Mutation::StaleClaimAck);
        if other || claiming.router != *from {
            return;
        }
        let waiters = std::mem::take(&mut claiming.waiters);
        self.admit(group, waiters, ctx, asked);
    }

    /// The router has the tombstones of this batch.
    pub(crate) fn retract_acknowledged(&mut self, version: u64, ctx: &Context<'_>) {
        let Some(batch) = self.batches.remove(&version) else { return };
        for group in batch.groups {
            let Some((index, _, entry)) = self.entries.get_full(&group) else { continue };
            let done = matches!(entry.state, State::Flushing { version: v } if v == version);
            let careless = ctx.settings.rules.breaks(Mutation::StaleRetractAck);
            if done {
                self.remove_at(index);
            } else if careless && matches!(entry.state, State::Held) {
                self.members -= entry.members.len();
                self.remove_at(index);
            }
        }
    }

    /// Starts a gather. The new ring is published already: every later step of this shard sees it.
    pub(crate) fn begin_gather(&mut self, plan: Arc<GatherPlan>) {
        self.epoch = self.epoch.wrapping_add(1);
        self.plan = Some(plan);
        self.cursor = self.entries.len();
        self.gathered.clear();
        // a retraction on its way went to the router of the old ring; it is made again to the new one
        for (_, batch) in std::mem::take(&mut self.batches) {
            self.back_to_retracting(batch);
        }
    }

    /// Gathers up to `limit` groups; what goes to whom comes back.
    pub(crate) fn gather(
        &mut self,
        limit: usize,
        ctx: &Context<'_>,
        asked: &mut Asked,
    ) -> Vec<(usize, Group)> {
        // from the end down: a removal swaps a group that was seen already into the hole
        for _ in 0..limit {
            if self.plan.is_none() || self.cursor == 0 {
                break;
            }
            self.cursor -= 1;
            if let Some((group, _)) = self.entries.get_index(self.cursor) {
                let group = group.clone();
                self.gather_first(&group, ctx, asked);
            }
        }
        std::mem::take(&mut self.gathered)
    }

    pub(crate) fn end_gather(&mut self) {
        self.plan = None;
    }

    /// Fails claims whose time is over, ends cooldowns, gives up on retractions without an answer.
    pub(crate) fn handle_timeout(&mut self, ctx: &Context<'_>, asked: &mut Asked) {
        while self.deadlines.front().is_some_and(|(at, _)| *at <= ctx.now) {
            let Some((_, group)) = self.deadlines.pop_front() else { break };
            self.time_out_claim(&group, ctx, asked);
        }
        while self.cooling.front().is_some_and(|(at, _)| *at <= ctx.now) {
            let Some((_, group)) = self.cooling.pop_front() else { break };
            self.end_cooldown(group, ctx);
        }
        let patience = ctx.settings.rpc_timeout;
        let silent: Vec<u64> = self
            .batches
            .iter()
            .filter(|(_, b)| b.sent.saturating_add(patience) <= ctx.now && ctx.now > b.sent)
            .map(|(version, _)| *version)
            .collect();
        for version in silent {
            if let Some(batch) = self.batches.remove(&version) {
                self.back_to_retracting(batch);
            }
        }
    }

    /// Sends the retractions that wait, to the routers of now.
    pub(crate) fn flush(&mut self, ctx: &Context<'_>, asked: &mut Asked) {
        let mut by_router: BTreeMap<Peer, Vec<Group>> = BTreeMap::new();
        for group in &self.retracting {
            by_router.entry(ctx.published.router(group.as_bytes()).clone()).or_default().push(group.clone());
        }
        for (router, groups) in by_router {
            if router == ctx.published.me {
                for group in groups {
                    self.retracting.remove(&group);
                    if let Some(index) = self.entries.get_index_of(&group) {
                        self.remove_at(index);
                    }
                }
            } else if ctx.published.connection(&router).is_some() {
                let mut rest = &groups[..];
                while !rest.is_empty() {
                    let count = within(rest.iter(), RETRACT_BATCH, ctx.settings.chunk_bytes);
                    let (part, after) = rest.split_at(count.min(rest.len()));
                    self.flush_batch(&router, part, ctx, asked);
                    rest = after;
                }
            }
        }
    }

    /// The version at which this group is not held here, if it is not.
    pub(crate) fn not_held(&self, group: &[u8], ctx: &Context<'_>) -> Option<u64> {
        let vacant = !self.entries.contains_key(group);
        (vacant || ctx.settings.rules.breaks(Mutation::NotHeldWhileHeld)).then(|| ctx.versions.next())
    }
}

// Steps.
impl<M: Clone> ClaimShard<M> {
    fn flush_batch(&mut self, router: &Peer, groups: &[Group], ctx: &Context<'_>, asked: &mut Asked) {
        let version = ctx.versions.next();
        for group in groups {
            self.retracting.remove(group);
            if let Some(entry) = self.entries.get_mut(group) {
                entry.state = State::Flushing { version };
            }
        }
        let batch = Batch { router: router.clone(), groups: groups.to_vec(), sent: ctx.now };
        asked.retracts.push((router.clone(), version, batch.groups.clone()));
        self.batches.insert(version, batch);
    }

    fn back_to_retracting(&mut self, batch: Batch) {
        for group in batch.groups {
            if let Some(entry) = self.entries.get_mut(&group)
                && matches!(entry.state, State::Flushing { .. })
            {
                entry.state = State::Retracting;
                self.retracting.insert(group);
            }
        }
    }

    fn cool(&mut self, group: &Group, ctx: &Context<'_>) {
        let until = ctx.now.saturating_add(ctx.settings.vacancy_cooldown);
        let Some(entry) = self.entries.get_mut(group) else { return };
        entry.state = State::Cooldown { until };
        if !std::mem::replace(&mut entry.cooling, true) {
            self.cooling.push_back((until, group.clone()));
        }
    }

    fn end_cooldown(&mut self, group: Group, ctx: &Context<'_>) {
        let Some(entry) = self.entries.get_mut(&group) else { return };
        entry.cooling = false;
        let State::Cooldown { until } = entry.state else { return };
        if until <= ctx.now {
            entry.state = State::Retracting;
            self.retracting.insert(group);
        } else {
            // it was held again in between, and has been empty for less than the cooldown
            entry.cooling = true;
            self.cooling.push_back((until, group));
        }
    }

    fn time_out_claim(&mut self, group: &Group, ctx: &Context<'_>, asked: &mut Asked) {
        let Some(entry) = self.entries.get_mut(group) else { return };
        let State::Claiming(claiming) = &mut entry.state else { return };
        if claiming.deadline > ctx.now {
            return;
        }
        for waiter in std::mem::take(&mut claiming.waiters) {
            let router = claiming.router.node.clone();
            asked.joined.push((waiter.ticket, Err(JoinRefused::RouterUnreachable { router })));
        }
        if ctx.settings.rules.breaks(Mutation::LateClaimForgotten) {
            return self.forget(group);
        }
        // the claim may have landed all the same
        entry.state = State::Retracting;
        self.retracting.insert(group.clone());
    }

    /// What no rule allows: see [`Mutation::LateClaimForgotten`].
    fn forget(&mut self, group: &Group) {
        if let Some(index) = self.entries.get_index_of(group) {
            self.remove_at(index);
        }
    }

    /// The claim is with the router: the waiters become members.
    fn admit(&mut self, group: &Group, waiters: Vec<Waiter<M>>, ctx: &Context<'_>, asked: &mut Asked) {
        let Some((index, _, entry)) = self.entries.get_full_mut(group) else { return };
        for waiter in waiters {
            if entry.members.insert(waiter.number, waiter.handle) {
                self.members += 1;
            }
            asked.joined.push((waiter.ticket, Ok(())));
        }
        if !entry.members.is_empty() {
            entry.state = State::Held;
            asked.events.push(NodeEvent::Occupied(group.clone()));
        } else if *ctx.published.router(group.as_bytes()) == ctx.published.me {
            self.remove_at(index);
        } else {
            // everyone who waited has gone: as after the last leave
            self.cool(group, ctx);
        }
    }

    /// Gathers this group if a gather is under way that has not seen it.
    fn gather_first(&mut self, group: &Group, ctx: &Context<'_>, asked: &mut Asked) {
        let Some(plan) = self.plan.clone() else { return };
        let epoch = self.epoch;
        let Some((index, _, entry)) = self.entries.get_full_mut(group) else { return };
        if std::mem::replace(&mut entry.epoch, epoch) == epoch {
            return;
        }
        let router = plan.new.router(group.as_bytes());
        let own = *router == plan.new.me;
        match &mut entry.state {
            State::Retracting | State::Flushing { .. } => {
                if own {
                    self.retracting.remove(group);
                    self.remove_at(index);
                }
            }
            State::Cooldown { .. } if own => self.remove_at(index),
            State::Claiming(claiming) if own => {
                let waiters = std::mem::take(&mut claiming.waiters);
                self.admit(group, waiters, ctx, asked);
            }
            State::Held if own => {}
            State::Held | State::Cooldown { .. } | State::Claiming(_) => {
                let Some(place) = plan.new.ring.router_index(group.as_bytes()) else { return };
                let moved = plan.old.router(group.as_bytes()) != router;
                let full = plan.full.get(place).copied().unwrap_or(true);
                let claiming = matches!(entry.state, State::Claiming(_));
                let rules = ctx.settings.rules;
                if claiming && !moved && rules.breaks(Mutation::OmitClaiming) {
                    return;
                }
                if matches!(entry.state, State::Cooldown { .. }) && rules.breaks(Mutation::ForgetCooldown) {
                    return;
                }
                if full || moved {
                    self.gathered.push((place, group.clone()));
                }
                if let State::Claiming(claiming) = &mut entry.state {
                    // the earlier claim may have gone to a router that does not count any more
                    claiming.version = ctx.versions.next();
                    claiming.router = router.clone();
                    asked.claims.push((router.clone(), group.clone(), claiming.version));
                }
            }
        }
    }

    /// Removes an entry; the last one takes its place, so the cursor of a gather that has not come so far
    /// still sees every group (from the end down, the last one was seen).
    fn remove_at(&mut self, index: usize) {
        let last = self.entries.len().saturating_sub(1);
        self.entries.swap_remove_index(index);
        if self.cursor > last {
            self.cursor = last;
        }
    }

    /// Stale tokens leave the queues when they outnumber the groups.
    fn trim_queues(&mut self) {
        if self.deadlines.len() > 64 + 2 * self.entries.len() {
            let entries = &self.entries;
            self.deadlines.retain(|(at, group)| {
                entries
                    .get(group)
                    .is_some_and(|e| matches!(&e.state, State::Claiming(c) if c.deadline == *at))
            });
        }
    }
}

fn claim<M>(
    group: &Group,
    router: &Peer,
    deadline: Time,
    waiters: Vec<Waiter<M>>,
    ctx: &Context<'_>,
    asked: &mut Asked,
) -> State<M> {
    let version = ctx.versions.next();
    asked.claims.push((router.clone(), group.clone(), version));
    State::Claiming(Box::new(Claiming { version, router: router.clone(), deadline, waiters }))
}

impl<M> State<M> {
    fn name(&self) -> &'static str {
        match self {
            State::Claiming(_) => "Claiming",
            State::Held => "Held",
            State::Cooldown { .. } => "Cooldown",
            State::Retracting => "Retracting",
            State::Flushing { .. } => "Flushing",
        }
    }

    /// Whether the router has, or is being given, a row for it.
    fn claimed(&self) -> bool {
        matches!(self, State::Claiming(_) | State::Held | State::Cooldown { .. })
    }
}
