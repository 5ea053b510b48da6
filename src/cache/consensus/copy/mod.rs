//! One partition's copy on one node in write mode `strong`: primary-backup on the ground of the group's decisions.
//!
//! # Three phases
//! ```text
//!  primary                                             each owner
//!  prepare  Append{entries}            ─────────────▶  logs them: visible to nobody
//!                                      ◀─────────────  Logged{end}
//!  decide   all owners have it: committed, applied, answered
//!  commit   Append{commit}             ─────────────▶  applies them
//! ```
//! The primary answers only what **all** owners of the config have logged. So whatever was acknowledged is in the log of
//! every owner, and any one of them can go on alone: `replicas - 1` may crash at a time.
//!
//! # Who may do what
//! * The group decides one [`Decided`] config after the other; each names the one before. Nobody acts on a config that is
//!   not decided.
//! * Only the **primary** takes an owner in: it fills it by a snapshot and the stream, counts it among those who must have
//!   logged a write from *before* it wishes it to be an owner, and so whoever is decided to be an owner has everything
//!   that was ever acknowledged. It leaves owners out that have gone, and hands over to the ring's first owner when nothing
//!   is under way.
//! * An **owner** with a whole copy makes itself primary if the primary has gone from the view and the lease that it has
//!   granted to it is over ([`lease`](super::lease)); it leaves out who else has gone, and takes nobody in.
//! * A **new primary** has everything that was acknowledged, and possibly writes that were only logged. It logs one entry of
//!   its own epoch after them, brings every other owner to just this log (what differs there was never acknowledged and
//!   goes), and serves when all have it: then all of it is committed. An old primary cannot commit anything any more, since
//!   the new one is among its owners and logs nothing from it.
//! * It **reads** what is applied, only at a primary that serves, and only while the leases of all other owners hold.
//! * A partition **begins** empty at one owner only, the one who has wished it, and only in the life in which it did: no
//!   owner ever takes its own lack of data for an empty partition.
//!
//! Nothing is merged, since no two primaries can accept: a side without what it needs accepts nothing.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use super::lease::Leases;
use super::{Change, Consensus, Decided};
use crate::cache::error::CacheError;
use crate::cache::operation::{Reply, WriteOp};
use crate::cache::partition::PartitionId;
use crate::cache::replica::{CacheEvent, Config, Context, Coverage, Mutation, OwnerState, contains};
use crate::cache::store::Store;
use crate::cache::version::{Epoch, Version};
use crate::transport::Lane;
use crate::types::Peer;

mod data;
mod follow;
mod lead;
mod message;
#[cfg(test)]
mod tests;

use data::Data;
use follow::Follow;
use lead::Lead;
pub use message::CopyMessage;

/// How long until what could not be done is tried again.
const AGAIN: Duration = Duration::from_millis(250);
/// How long each owner before this one gets to take over.
const TURN: Duration = Duration::from_millis(1000);

/// What a copy needs to know at each input.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StrongContext<'a> {
    pub(crate) base: Context<'a>,
    pub(crate) consensus: &'a Consensus,
    pub(crate) leases: &'a Leases,
}

/// What the caller has to do, in this order.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum CopyEffect {
    /// Send a message.
    Send { to: Peer, lane: Lane, message: CopyMessage },
    /// Wish this of the group.
    Propose(Change),
    /// Do not wish it any more.
    Withdraw(Change),
    /// A write has ended.
    Written { ticket: u64, result: Result<Reply, CacheError> },
    /// Something to tell.
    Event(CacheEvent),
    /// Who serves, who owns, or what this node has has changed.
    Changed,
}

/// See the [module](self). Methods are grouped: getters, inputs, commands, outputs.
#[derive(Debug)]
pub(crate) struct StrongCopy {
    id: PartitionId,
    empty: Store,
    wanted: Vec<Peer>,
    config: Option<Decided>,
    /// The same, as others show it.
    shown: Option<Config>,
    data: Option<Box<Data>>,
    /// Since which birth of the partition the data is.
    data_born: u64,
    lead: Option<Box<Lead>>,
    follow: Option<Follow>,
    /// What this node has wished the partition to begin with.
    birth: Option<Decided>,
    /// The primary has gone since then.
    gone_since: Option<Duration>,
    review_at: Option<Duration>,
    last_stream: u64,
    told: OwnerState,
    stalled: Option<u64>,
    effects: VecDeque<CopyEffect>,
}

// Getters.
impl StrongCopy {
    pub(crate) fn new(id: PartitionId, ctx: Context<'_>) -> Self {
        Self {
            id,
            empty: Store::new(ctx.config),
            wanted: Vec::new(),
            config: None,
            shown: None,
            data: None,
            data_born: 0,
            lead: None,
            follow: None,
            birth: None,
            gone_since: None,
            review_at: None,
            last_stream: 0,
            told: OwnerState::Absent,
            stalled: None,
            effects: VecDeque::new(),
        }
    }

    /// The epoch in which this node is the primary and takes writes.
    pub(crate) fn serving(&self) -> Option<&Epoch> {
        let config =
            self.config.as_ref().filter(|_| self.lead.as_ref().is_some_and(|lead| lead.is_serving()))?;
        Some(&config.epoch)
    }

    /// Whether this node is the primary and may read its copy at this moment.
    pub(crate) fn may_read(&self, ctx: StrongContext<'_>) -> bool {
        let (Some(config), Some(lead)) = (&self.config, &self.lead) else { return false };
        let unleased = ctx.base.rules.breaks(Mutation::ReadWithoutLease);
        let heard = ctx.consensus.heard();
        // who may be an owner already may already take over
        let mut others =
            config.owners.iter().chain(lead.maybe_owners()).filter(|owner| *owner != ctx.base.me);
        lead.is_serving() && (unleased || others.all(|owner| ctx.leases.holds(owner, heard, ctx.base.now)))
    }

    pub(crate) fn is_active(&self) -> bool {
        self.state() == OwnerState::Active
    }

    pub(crate) fn state(&self) -> OwnerState {
        self.told
    }

    pub(crate) fn config(&self) -> Option<&Config> {
        self.shown.as_ref()
    }

    /// What is committed (an empty copy if there is none).
    pub(crate) fn store(&self) -> &Store {
        self.data.as_ref().map_or(&self.empty, |data| &data.store)
    }

    pub(crate) fn end(&self) -> Option<&Version> {
        self.store().applied()
    }

    /// Whether the copy has this write. What was written before an operator accepted the loss is gone for good.
    pub(crate) fn covers(&self, at_least: &Version) -> Coverage {
        if self.data.is_some() && at_least.epoch.counter < self.data_born {
            return Coverage::Lost;
        }
        contains(self.store().lineage(), self.end(), at_least)
    }

    /// Whether this node has every write that anybody was told of, so that one that it does not know of is lost: as long as
    /// the leases hold nobody has taken over. Only an operator's word overrides leases, and a node that the deciding
    /// side cannot reach hears of it late; so none of that side may be there, and somebody has to lead the group.
    pub(crate) fn would_know(&self, write: &Version, ctx: StrongContext<'_>) -> bool {
        let alive = ctx.base.members.live.contains(&write.epoch.primary);
        !alive && ctx.consensus.can_decide() && self.may_read(ctx)
    }

    pub(crate) fn check_invariants(&self) -> Result<(), String> {
        if let Some(data) = &self.data {
            data.check()?;
        }
        if let Some(lead) = &self.lead {
            if self.data.as_ref().is_none_or(|data| !data.whole) {
                return Err("it leads without a whole copy".into());
            }
            lead.check()?;
        }
        if self.lead.is_some() && self.follow.is_some() {
            return Err("it leads and follows".into());
        }
        Ok(())
    }
}

// Inputs.
impl StrongCopy {
    pub(crate) fn handle_members(&mut self, wanted: &[Peer], ctx: StrongContext<'_>) {
        self.wanted = wanted.to_vec();
        self.review(ctx);
    }

    pub(crate) fn handle_peer_up(&mut self, peer: &Peer, ctx: StrongContext<'_>) {
        let _ = peer;
        self.review(ctx);
    }

    pub(crate) fn handle_peer_down(&mut self, peer: &Peer, ctx: StrongContext<'_>) {
        if let Some(lead) = &mut self.lead {
            lead.streams.remove(peer);
        }
        if self.follow.as_ref().is_some_and(|follow| follow.primary == *peer) {
            self.follow = None;
        }
        self.review(ctx);
    }

    /// The group has decided something about the partition.
    pub(crate) fn handle_decided(&mut self, ctx: StrongContext<'_>) {
        if let Some(config) = ctx.consensus.config(self.id) {
            let config = config.clone();
            self.adopt(config, ctx);
        }
        self.review(ctx);
    }

    pub(crate) fn handle_message(&mut self, from: &Peer, message: CopyMessage, ctx: StrongContext<'_>) {
        if !message.is_sound() {
            return;
        }
        match message {
            CopyMessage::Opened { stream, whole, applied, tail } => {
                self.handle_opened(from, stream, whole, applied.as_ref(), &tail, ctx);
            }
            CopyMessage::Logged { stream, end } => self.handle_logged(from, stream, end, ctx),
            CopyMessage::PieceIn { stream } => self.handle_piece_in(from, stream, ctx),
            CopyMessage::Open { stream, config } => self.handle_open(from, stream, config, ctx),
            CopyMessage::Snapshot { stream, header } => self.handle_snapshot(from, stream, header, ctx),
            CopyMessage::Piece { stream, entries, last } => {
                self.handle_piece(from, stream, &entries, last, ctx)
            }
            CopyMessage::Append { stream, after, entries, commit } => {
                self.handle_append(from, stream, after, entries, commit, ctx);
            }
            CopyMessage::Drop { stream } => {
                if self.follows(from, stream) {
                    self.follow = None;
                    self.review(ctx);
                }
            }
        }
    }

    pub(crate) fn handle_timeout(&mut self, ctx: StrongContext<'_>) {
        self.expire(ctx.base.now);
        if let Some(data) = &mut self.data {
            data.purge(ctx.base.config, ctx.base.now);
        }
        self.pump(ctx);
        if self.review_at.is_some_and(|at| at <= ctx.base.now) {
            self.review(ctx);
        }
    }

    /// A config that is decided.
    fn adopt(&mut self, config: Decided, ctx: StrongContext<'_>) {
        let newer = self.config.as_ref().is_none_or(|known| known.epoch.counter < config.epoch.counter);
        if !newer {
            return;
        }
        if self.data_born != config.born && self.data.is_some() {
            // what was lost with the operator's consent stays lost
            self.stop_leading();
            (self.data, self.follow) = (None, None);
        }
        if self.birth.take().is_some_and(|birth| birth == config) {
            self.data = Some(Box::new(Data::born(ctx.base.config)));
            self.data_born = config.born;
        }
        let primary = config.epoch.primary.clone();
        self.shown = Some(Config {
            epoch: config.epoch.clone(),
            base: None,
            owners: config.owners.clone(),
            before: Vec::new(),
        });
        self.config = Some(config);
        self.gone_since = None;
        if self.follow.as_ref().is_some_and(|follow| follow.primary != primary) {
            self.follow = None;
        }
        if primary != *ctx.base.me {
            self.stop_leading();
        } else if self.lead.is_some() {
            self.go_on_leading();
        } else if self.data.as_ref().is_some_and(|data| data.whole) {
            self.follow = None;
            self.begin_to_lead(ctx);
        }
        self.effects.push_back(CopyEffect::Changed);
    }

    /// Everything that follows from what is known now.
    fn review(&mut self, ctx: StrongContext<'_>) {
        let waits = self.reconsider_loss(ctx);
        let unsettled = match &self.config {
            None => self.consider_birth(ctx),
            Some(config) if config.epoch.primary == *ctx.base.me && self.lead.is_some() => self.tend(ctx),
            Some(config) if config.epoch.primary == *ctx.base.me => self.yield_to_another(ctx),
            Some(_) => self.consider_takeover(ctx),
        };
        self.drop_what_nobody_needs(ctx);
        self.tell_state(ctx);
        self.review_at = (unsettled || waits).then(|| ctx.base.now + AGAIN);
    }

    /// Withdraws an operator's word that is not carried out yet, if an owner is back, or if the group cannot decide: when it
    /// can again, after a split, the owners may be there too. Whether one waits still.
    fn reconsider_loss(&mut self, ctx: StrongContext<'_>) -> bool {
        let is_loss = |wish: &&Change| wish.expect.is_some() && wish.config.born == wish.config.epoch.counter;
        let Some(wish) = ctx.consensus.wish(self.id).filter(is_loss) else { return false };
        if ctx.consensus.can_decide() && !self.owner_is_there(ctx) {
            return true;
        }
        self.effects.push_back(CopyEffect::Withdraw(wish.clone()));
        false
    }

    /// Whether somebody who has all of it is there, for all this node knows.
    fn owner_is_there(&self, ctx: StrongContext<'_>) -> bool {
        let mut owners = self.config.iter().flat_map(|config| &config.owners);
        owners.any(|owner| match owner == ctx.base.me {
            true => self.data.as_ref().is_some_and(|data| data.whole),
            false => ctx.base.members.live.contains(owner),
        })
    }

    fn propose(&mut self, config: Decided, ctx: StrongContext<'_>) {
        let expect = self.config.as_ref().map(|config| config.epoch.clone());
        let change = Change { partition: self.id, expect, by: ctx.base.me.clone(), config };
        if ctx.consensus.wish(self.id) != Some(&change) {
            self.effects.push_back(CopyEffect::Propose(change));
        }
    }

    /// The next config, in which these are the owners.
    fn next(&self, primary: &Peer, owners: Vec<Peer>) -> Option<Decided> {
        let current = self.config.as_ref()?;
        let epoch = Epoch::new(current.epoch.counter.saturating_add(1), primary.clone());
        Some(Decided { epoch, owners, born: current.born })
    }

    /// Nobody has ever had it: the ring's first owner begins it.
    fn consider_birth(&mut self, ctx: StrongContext<'_>) -> bool {
        if self.wanted.first() != Some(ctx.base.me) {
            return false;
        }
        if ctx.consensus.can_decide() && self.birth.is_none() {
            let epoch = Epoch::new(1, ctx.base.me.clone());
            let birth = Decided { epoch, owners: vec![ctx.base.me.clone()], born: 1 };
            self.birth = Some(birth.clone());
            self.propose(birth, ctx);
        }
        true
    }

    /// This node is decided to be the primary and has no whole copy (its cache was closed and opened again): somebody else
    /// has to go on.
    fn yield_to_another(&mut self, ctx: StrongContext<'_>) -> bool {
        let Some(config) = &self.config else { return false };
        let others: Vec<_> = config
            .owners
            .iter()
            .filter(|o| *o != ctx.base.me && ctx.base.members.live.contains(*o))
            .cloned()
            .collect();
        let Some(next) = others.first().cloned() else {
            self.stall();
            return true;
        };
        if let Some(config) = self.next(&next, others).filter(|_| ctx.consensus.can_decide()) {
            self.propose(config, ctx);
        }
        true
    }

    fn consider_takeover(&mut self, ctx: StrongContext<'_>) -> bool {
        let (me, live, now) = (ctx.base.me, &ctx.base.members.live, ctx.base.now);
        let Some(config) = &self.config else { return false };
        let primary = &config.epoch.primary;
        if live.contains(primary) {
            self.gone_since = None;
            return false;
        }
        let since = *self.gone_since.get_or_insert(now);
        let living: Vec<_> = config.owners.iter().filter(|owner| live.contains(*owner)).collect();
        if living.is_empty() {
            self.stall();
            return false;
        }
        let Some(rank) = living.iter().position(|owner| *owner == me) else { return false };
        let whole = self.data.as_ref().is_some_and(|data| data.whole);
        let unbound = ctx.base.rules.breaks(Mutation::TakeoverUnderLease);
        let bound = !unbound && ctx.leases.bound_until(primary).is_some_and(|until| now <= until);
        let turn = now >= since + TURN * u32::try_from(rank).unwrap_or(u32::MAX);
        if whole && !bound && turn && ctx.consensus.can_decide() {
            let mut owners = vec![me.clone()];
            owners.extend(living.into_iter().filter(|owner| *owner != me).cloned());
            if let Some(config) = self.next(me, owners) {
                self.propose(config, ctx);
            }
        }
        whole
    }

    /// Nobody who has all of it is there.
    fn stall(&mut self) {
        let counter = self.config.as_ref().map(|config| config.epoch.counter);
        if self.stalled != counter {
            self.stalled = counter;
            self.effects.push_back(CopyEffect::Event(CacheEvent::Stalled {
                partition: self.id,
                got: 0,
                need: 1,
            }));
        }
    }

    /// A copy that is neither an owner's, nor being filled, nor soon to be, goes.
    fn drop_what_nobody_needs(&mut self, ctx: StrongContext<'_>) {
        let owner = self.config.as_ref().is_some_and(|config| config.has(ctx.base.me));
        if !owner && self.follow.is_none() && !self.wanted.contains(ctx.base.me) {
            self.data = None;
        }
    }

    fn tell_state(&mut self, ctx: StrongContext<'_>) {
        let owner = self.config.as_ref().is_some_and(|config| config.has(ctx.base.me));
        let state = match &self.data {
            None => OwnerState::Absent,
            Some(data) if data.whole && owner => OwnerState::Active,
            Some(_) => OwnerState::Syncing,
        };
        if state != self.told {
            self.told = state;
            self.effects.push_back(CopyEffect::Event(CacheEvent::State { partition: self.id, state }));
            self.effects.push_back(CopyEffect::Changed);
        }
    }
}

// Commands.
impl StrongCopy {
    /// The operator accepts the loss: if none of the owners is there, it begins again, empty. Refused if the group cannot
    /// decide that now: decided later, it might be about owners that are back.
    pub(crate) fn accept_loss(&mut self, ctx: StrongContext<'_>) -> Result<(), CacheError> {
        if !ctx.consensus.can_decide() {
            let (got, need) = ctx.consensus.quorum();
            return Err(CacheError::NoQuorum { got, need });
        }
        let Some(config) = self.config.as_ref().filter(|_| !self.owner_is_there(ctx)) else { return Ok(()) };
        let counter = config.epoch.counter.saturating_add(1);
        let epoch = Epoch::new(counter, ctx.base.me.clone());
        let birth = Decided { epoch, owners: vec![ctx.base.me.clone()], born: counter };
        self.birth = Some(birth.clone());
        self.propose(birth, ctx);
        self.review_at = Some(ctx.base.now + AGAIN);
        Ok(())
    }
}

// Outputs.
impl StrongCopy {
    pub(crate) fn poll_effect(&mut self) -> Option<CopyEffect> {
        self.effects.pop_front()
    }

    pub(crate) fn poll_timeout(&self) -> Option<Duration> {
        let lead = self.lead.as_ref().and_then(|lead| lead.next_timeout());
        let purge = self.data.as_ref().and_then(|data| data.purge_at());
        self.review_at.into_iter().chain(lead).chain(purge).min()
    }
}
