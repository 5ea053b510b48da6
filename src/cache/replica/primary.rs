//! The primary of an epoch: it orders the writes, counts who has them, and answers.
//!
//! * **Serving** begins when the config is *in force*: a quorum of every set of owners before it follows it or is known
//!   to be dead (so no older primary can reach a majority there any more), and a majority of its owners holds everything up to its base
//!   (so every later takeover finds that, by asking a quorum). A primary that goes on from its own epoch serves all
//!   along, for nobody else can begin in between; but it confirms nothing until the new config is in force.
//! * **Confirmed** is what a majority of the owners has, whole copies only, the primary included. The number that
//!   confirms is counted from acknowledgements of this very epoch.
//! * **Stepping down** is at once, on the first sign of a later epoch. Writes that wait are answered as unknown: they
//!   are in this copy, and may or may not be in the next epoch.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use super::history::{majority, quorum, with_epoch};
use super::log::write_len;
use super::merge::Merging;
use super::message::{Config, ReplicaMessage, next_counter};
use super::stream::Stream;
use super::takeover::BACK_OFF;
use super::{CacheEvent, Context, Mutation, Replica, ReplicaEffect, Role, Rules};
use crate::cache::config::WriteMode;
use crate::cache::error::CacheError;
use crate::cache::operation::{Outcome, Reply, WriteOp};
use crate::cache::store::{Step, Store, Write};
use crate::cache::version::{Epoch, Lineage, Version};
use crate::transport::Lane;
use crate::types::Peer;

/// Who waits for a write to be confirmed.
#[derive(Debug)]
pub(super) enum Waiter {
    Caller {
        ticket: u64,
        outcome: Outcome,
        deadline: Duration,
    },
    /// A copy whose writes were merged.
    Merge {
        peer: Peer,
        number: u64,
    },
}

/// The writes that wait for a majority, by number.
#[derive(Debug, Default)]
pub(super) struct Waiting {
    by_seq: BTreeMap<u64, (Version, Waiter)>,
    by_deadline: BTreeSet<(Duration, u64)>,
    by_ticket: BTreeMap<u64, u64>,
}

impl Waiting {
    pub(super) fn is_empty(&self) -> bool {
        self.by_seq.is_empty()
    }

    pub(super) fn deadline(&self) -> Option<Duration> {
        self.by_deadline.first().map(|(deadline, _)| *deadline)
    }

    pub(super) fn push(&mut self, version: Version, waiter: Waiter) {
        if let Waiter::Caller { ticket, deadline, .. } = &waiter {
            self.by_deadline.insert((*deadline, version.seq));
            self.by_ticket.insert(*ticket, version.seq);
        }
        self.by_seq.insert(version.seq, (version, waiter));
    }

    fn remove(&mut self, seq: u64) -> Option<(Version, Waiter)> {
        let (version, waiter) = self.by_seq.remove(&seq)?;
        if let Waiter::Caller { ticket, deadline, .. } = &waiter {
            self.by_deadline.remove(&(*deadline, seq));
            self.by_ticket.remove(ticket);
        }
        Some((version, waiter))
    }

    pub(super) fn forget(&mut self, ticket: u64) {
        if let Some(seq) = self.by_ticket.get(&ticket).copied() {
            self.remove(seq);
        }
    }

    /// The next of the callers up to one number and of the merges up to another, which is not smaller.
    fn pop_through(&mut self, callers: u64, merges: u64) -> Option<(Version, Waiter)> {
        let first = *self.by_seq.first_key_value()?.0;
        if first <= callers {
            return self.remove(first);
        }
        let mut beyond = self.by_seq.range(..=merges);
        let merge = beyond.find(|(_, (_, waiter))| matches!(waiter, Waiter::Merge { .. }));
        let seq = merge.map(|(seq, _)| *seq)?;
        self.remove(seq)
    }

    fn pop_expired(&mut self, now: Duration) -> Option<(Version, Waiter)> {
        let (deadline, seq) = *self.by_deadline.first()?;
        if deadline <= now { self.remove(seq) } else { None }
    }

    fn pop(&mut self) -> Option<(Version, Waiter)> {
        let first = *self.by_seq.first_key_value()?.0;
        self.remove(first)
    }

    /// Merges of this peer are begun anew when it comes back.
    pub(super) fn forget_merges_of(&mut self, of: &Peer) {
        self.by_seq.retain(|_, (_, waiter)| !matches!(waiter, Waiter::Merge { peer, .. } if peer == of));
    }
}

/// A hand-over that is under way: nothing new is accepted until the other has everything.
#[derive(Debug)]
pub(super) struct Handing {
    pub(super) to: Peer,
    pub(super) until: Duration,
}

/// What the primary of an epoch knows.
#[derive(Debug)]
pub(super) struct Leading {
    pub(super) config: Config,
    /// By whose authority the config stands.
    pub(super) since: Epoch,
    /// Whether it is in force.
    pub(super) effective: bool,
    /// Whether this node served before as well.
    pub(super) serving: bool,
    /// Whether all wanted owners are active.
    pub(super) settled: bool,
    pub(super) streams: BTreeMap<Peer, Stream>,
    pub(super) announced: BTreeMap<Peer, bool>,
    pub(super) waiting: Waiting,
    pub(super) commit: Option<Version>,
    pub(super) handing: Option<Handing>,
    pub(super) next_hand_over: Duration,
    pub(super) merges: BTreeMap<Peer, Merging>,
    /// The writes that were reported as losers: a second copy of their side offers them again.
    pub(super) reported: BTreeSet<(Version, u64)>,
    pub(super) accept_loss: bool,
    /// Somebody has promised an epoch that this one has no authority over; the next one will have.
    pub(super) renew: bool,
    pub(super) purge_at: Option<Duration>,
}

impl Leading {
    fn new(config: Config, since: Epoch) -> Self {
        Self {
            config,
            since,
            effective: false,
            serving: false,
            settled: false,
            streams: BTreeMap::new(),
            announced: BTreeMap::new(),
            waiting: Waiting::default(),
            commit: None,
            handing: None,
            next_hand_over: Duration::ZERO,
            merges: BTreeMap::new(),
            reported: BTreeSet::new(),
            accept_loss: false,
            renew: false,
            purge_at: None,
        }
    }

    /// Whether operations are accepted now.
    pub(super) fn accepts(&self) -> bool {
        self.serving && self.handing.is_none()
    }

    pub(super) fn peers(&self) -> impl Iterator<Item = &Peer> {
        self.streams.keys().chain(self.announced.keys()).chain(self.merges.keys())
    }

    /// A node acknowledges what came late, of a stream that has ended: it was told who keeps the partition when it had
    /// nothing, and would keep what it has now.
    pub(super) fn tell_again(&mut self, peer: &Peer) {
        self.announced.remove(peer);
    }

    pub(super) fn forget_peer(&mut self, peer: &Peer, rules: Rules) {
        if rules.breaks(Mutation::OutOfOrder) {
            // as if everything that was sent had arrived
            if let Some(stream) = self.streams.get_mut(peer) {
                stream.forget_in_flight();
            }
        } else {
            self.streams.remove(peer);
        }
        self.announced.remove(peer);
        self.merges.remove(peer);
        self.waiting.forget_merges_of(peer);
        if self.handing.as_ref().is_some_and(|handing| handing.to == *peer) {
            self.handing = None;
        }
    }

    /// The epochs of the copy with the one that is led.
    pub(super) fn history(&self, store: &Store) -> Lineage {
        with_epoch(store.lineage(), &self.config.epoch, self.config.base.as_ref())
    }

    /// How far an owner's whole copy is: `None` if it does not count.
    fn has(&self, owner: &Peer, me: &Peer, end: u64) -> Option<u64> {
        if owner == me {
            return Some(end);
        }
        self.streams.get(owner).filter(|stream| stream.counts()).map(Stream::acked_seq)
    }

    /// How many owners have a write.
    pub(super) fn count(&self, seq: u64, me: &Peer, end: u64) -> usize {
        self.config.owners.iter().filter(|owner| self.has(owner, me, end) >= Some(seq)).count()
    }

    pub(super) fn check(&self, end: Option<&Version>) -> Result<(), String> {
        for (peer, stream) in &self.streams {
            stream.check(end).map_err(|what| format!("stream to {peer}: {what}"))?;
        }
        if !self.config.is_sound() {
            return Err(format!("a config that contradicts itself: {:?}", self.config));
        }
        Ok(())
    }
}

fn seq_of(version: Option<&Version>) -> u64 {
    version.map_or(0, |version| version.seq)
}

impl Replica {
    /// Becomes primary of an epoch, by the authority of `since`. The copy is whole.
    pub(super) fn begin(&mut self, epoch: Epoch, since: Epoch, owners: Vec<Peer>, before: Vec<Vec<Peer>>) {
        let config = Config { epoch: epoch.clone(), base: self.end().cloned(), owners, before };
        if !self.log.ends_with(self.end()) {
            self.log = super::Log::from(self.end().cloned());
        }
        self.promised = Some(epoch);
        self.inquiry = None;
        self.nominated = None;
        self.handed = None;
        self.offer = None;
        self.learn(config.clone(), false);
        self.stalled = None;
        self.role = Role::Leading(Box::new(Leading::new(config, since)));
        self.changed = true;
    }

    /// Begins the next epoch of the same primary, with other owners; whether there is one.
    pub(super) fn begin_next(&mut self, owners: Vec<Peer>, before: Vec<Vec<Peer>>) -> bool {
        let base = self.end().cloned();
        let Role::Leading(leading) = &mut self.role else { return false };
        let since = leading.config.epoch.clone();
        let Some(counter) = next_counter(since.counter) else { return false };
        let epoch = Epoch::new(counter, since.primary.clone());
        let config = Config { epoch: epoch.clone(), base, owners, before };
        leading.config = config.clone();
        leading.since = since;
        leading.effective = false;
        leading.settled = false;
        leading.renew = false;
        leading.announced.clear();
        // whoever offered did so to the epoch that ends, and begins anew
        leading.merges.clear();
        leading.streams.values_mut().for_each(Stream::next_epoch);
        self.promised = Some(epoch);
        self.learn(config, false);
        self.changed = true;
        true
    }

    /// What a primary has to do now.
    pub(super) fn lead(&mut self, ctx: Context<'_>) {
        // a change of the owners begins all over, and none follows at once
        for _ in 0..4 {
            self.check_effective(ctx);
            if let Role::Idle | Role::Following(_) = self.role {
                return self.stand(ctx);
            }
            self.keep_streams(ctx);
            if !self.change_owners(ctx) {
                break;
            }
        }
        self.pump(ctx);
        self.confirm(ctx);
        self.announce(ctx);
        self.want_offers(ctx);
        if let Role::Leading(_) = self.role {
            self.hand_over(ctx);
        }
    }

    fn check_effective(&mut self, ctx: Context<'_>) {
        let end = seq_of(self.store.applied());
        let Role::Leading(leading) = &mut self.role else { return };
        if leading.effective {
            return;
        }
        let follows =
            |peer: &&Peer| *peer == ctx.me || leading.streams.get(*peer).is_some_and(|stream| stream.adopted);
        // who follows this epoch or is dead confirms nothing of an older one
        let fenced = |peer: &&Peer| follows(peer) || ctx.members.has_died(peer);
        let before = &leading.config.before;
        let old = before.iter().all(|set| set.iter().filter(fenced).count() >= quorum(set.len()));
        let base = seq_of(leading.config.base.as_ref());
        let new = leading.count(base, ctx.me, end) >= majority(leading.config.owners.len());
        if !(old && new) {
            // owners have died meanwhile: it has to be asked again who is left
            let lives = |peer: &&Peer| ctx.members.live.contains(*peer);
            let known = |peer: &&Peer| lives(peer) || ctx.members.has_died(peer);
            let owners = &leading.config.owners;
            let hopeless = owners.iter().filter(lives).count() < majority(owners.len())
                || before.iter().any(|set| set.iter().filter(known).count() < quorum(set.len()));
            if hopeless {
                // and not at once: whoever decides anew might begin the same
                self.retry_at = ctx.now.saturating_add(BACK_OFF);
                self.step_down(ctx);
            }
            return;
        }
        let news = !leading.serving;
        leading.effective = true;
        leading.serving = true;
        leading.accept_loss = false;
        let epoch = leading.config.epoch.clone();
        if let Some(known) = &mut self.known {
            known.effective = true;
        }
        self.changed = true;
        if news {
            self.tell(CacheEvent::Primary { partition: self.id, epoch });
        }
    }

    /// Tells all members who serves.
    fn announce(&mut self, ctx: Context<'_>) {
        let Role::Leading(leading) = &mut self.role else { return };
        if !leading.effective {
            return;
        }
        let (config, settled) = (leading.config.clone(), leading.settled);
        let mut to = Vec::new();
        for peer in ctx.members.live.iter().filter(|peer| *peer != ctx.me && ctx.members.reach(peer)) {
            let told = leading.announced.get(peer);
            if told.is_none() || (settled && told == Some(&false)) {
                leading.announced.insert(peer.clone(), settled);
                to.push(peer.clone());
            }
        }
        for peer in to {
            self.send(&peer, Lane::Control, ReplicaMessage::Announce { config: config.clone(), settled });
        }
    }

    // ---- writes

    pub(super) fn carry_out(
        &mut self,
        ticket: u64,
        op: &WriteOp,
        mode: WriteMode,
        deadline: Duration,
        ctx: Context<'_>,
    ) -> Result<(), CacheError> {
        self.check_write(mode, ctx)?;
        let writes = op.plan(&self.store)?;
        let puts = |write: &Write| match write {
            Write::Put(_) => write_len(write) as u64,
            _ => 0,
        };
        let (given, max) =
            (self.store.bytes() + writes.iter().map(puts).sum::<u64>(), ctx.config.max_partition_bytes);
        if given > max && writes.iter().any(|write| matches!(write, Write::Put(_))) {
            let (what, option) = ("the partition in bytes".into(), "max_partition_bytes".into());
            return Err(CacheError::TooLarge { what, given, max, option });
        }
        let mut removed = 0;
        for write in writes {
            removed += self.append(write, ctx)?;
        }
        let (outcome, version) = (op.outcome(removed), self.end().cloned());
        let at_once = mode == WriteMode::Async || ctx.rules.breaks(Mutation::AckBeforeMajority);
        match (&mut self.role, version) {
            (Role::Leading(leading), Some(version)) if !at_once => {
                leading.waiting.push(version, Waiter::Caller { ticket, outcome, deadline });
            }
            (_, version) => {
                let result = Ok(Reply { outcome, version });
                self.effects.push_back(ReplicaEffect::Written { ticket, result });
            }
        }
        self.pump(ctx);
        self.confirm(ctx);
        self.plan_purge(ctx);
        Ok(())
    }

    fn check_write(&self, mode: WriteMode, ctx: Context<'_>) -> Result<(), CacheError> {
        let leading = match &self.role {
            Role::Leading(leading) if leading.accepts() => leading,
            Role::Leading(_) | Role::Idle | Role::Following(_) => {
                return Err(CacheError::NotActive { partition: self.id });
            }
        };
        let counts =
            |owner: &&Peer| *owner == ctx.me || leading.streams.get(*owner).is_some_and(Stream::counts);
        let (got, need) = (leading.config.owners.iter().filter(counts).count(), ctx.config.min_copies);
        if got < need {
            return Err(CacheError::NoQuorum { got, need });
        }
        match enough_nodes(ctx) {
            Err(error) if mode != WriteMode::Async => Err(error),
            _ => Ok(()),
        }
    }

    /// Applies the next write of the epoch; how many records went.
    pub(super) fn append(&mut self, write: Write, ctx: Context<'_>) -> Result<u64, CacheError> {
        let Role::Leading(leading) = &self.role else {
            return Err(CacheError::NotActive { partition: self.id });
        };
        let (epoch, base) = (&leading.config.epoch, leading.config.base.as_ref());
        if self.store.epoch() != Some(epoch) {
            // with the first write, not before: see `with_epoch`
            if self.store.open_epoch(epoch, base).is_err() {
                return Err(CacheError::NotActive { partition: self.id });
            }
        }
        let Some(version) = self.store.next_version() else {
            return Err(CacheError::NotActive { partition: self.id });
        };
        let removed = match self.store.apply(&write, &version, ctx.now) {
            Ok(Step::Applied { removed }) => removed,
            Ok(Step::Duplicate) => 0,
            Err(super::super::store::ApplyError::Malformed(error)) => return Err(error),
            Err(_) => return Err(CacheError::NotActive { partition: self.id }),
        };
        self.log.push(version, Arc::new(write), ctx.config.max_log_bytes);
        Ok(removed)
    }

    /// Answers what a majority has, and `min_copies` owners have: owners may have gone since the write began, and with
    /// them the majority has become smaller. A merge waits for the majority only: the copy that it is from becomes an
    /// owner after it.
    pub(super) fn confirm(&mut self, ctx: Context<'_>) {
        let end = seq_of(self.store.applied());
        let Role::Leading(leading) = &mut self.role else { return };
        if !leading.effective {
            return;
        }
        let has = |owner: &Peer| leading.has(owner, ctx.me, end).unwrap_or(0);
        let mut ends: Vec<u64> = leading.config.owners.iter().map(has).collect();
        ends.sort_unstable_by(|a, b| b.cmp(a));
        let of = |copies: usize| ends.get(copies.saturating_sub(1)).copied().unwrap_or(0);
        let merges = of(majority(ends.len()));
        let confirmed = if enough_nodes(ctx).is_ok() { of(need(&leading.config, ctx)) } else { 0 };
        let (mut callers, mut merged) = (Vec::new(), Vec::new());
        while let Some((version, waiter)) = leading.waiting.pop_through(confirmed, merges) {
            leading.commit = leading.commit.take().max(Some(version.clone()));
            match waiter {
                Waiter::Caller { ticket, outcome, .. } => callers.push((ticket, outcome, version)),
                Waiter::Merge { peer, number } => merged.push((peer, number)),
            }
        }
        for (ticket, outcome, version) in callers {
            let result = Ok(Reply { outcome, version: Some(version) });
            self.effects.push_back(ReplicaEffect::Written { ticket, result });
        }
        for (peer, number) in merged {
            self.acknowledge_offer(&peer, number);
        }
    }

    /// Deadlines, and what a hand-over or a throttle waited for.
    pub(super) fn expire(&mut self, ctx: Context<'_>) {
        let end = seq_of(self.store.applied());
        self.purge(ctx);
        let Role::Leading(leading) = &mut self.role else { return };
        let mut late = Vec::new();
        while let Some((version, waiter)) = leading.waiting.pop_expired(ctx.now) {
            if let Waiter::Caller { ticket, .. } = waiter {
                late.push((ticket, leading.not_enough(&version, ctx, end)));
            }
        }
        for (ticket, error) in late {
            self.effects.push_back(ReplicaEffect::Written { ticket, result: Err(error) });
        }
    }

    /// No longer primary. Writes that wait may have been applied or not.
    pub(super) fn step_down(&mut self, ctx: Context<'_>) {
        let end = seq_of(self.store.applied());
        let Role::Leading(leading) = &mut self.role else { return };
        let mut lost = Vec::new();
        while let Some((version, waiter)) = leading.waiting.pop() {
            if let Waiter::Caller { ticket, .. } = waiter {
                lost.push((ticket, leading.not_enough(&version, ctx, end)));
            }
        }
        for (ticket, error) in lost {
            self.effects.push_back(ReplicaEffect::Written { ticket, result: Err(error) });
        }
        self.role = Role::Idle;
        self.changed = true;
    }

    /// Somebody does not follow: it has promised an epoch that the config's authority does not reach.
    pub(super) fn on_reject(
        &mut self,
        epoch: &Epoch,
        promised: &Epoch,
        config: Option<Config>,
        effective: bool,
        ctx: Context<'_>,
    ) {
        self.seen = self.seen.max(promised.counter);
        if let Role::Leading(leading) = &mut self.role {
            if leading.config.epoch < *promised && *epoch <= leading.config.epoch {
                self.step_down(ctx);
            } else if leading.config.epoch == *epoch {
                // a config in force may be followed by the next at once; another one has to be asked for again
                leading.renew = true;
                if !leading.effective {
                    self.step_down(ctx);
                }
            }
        }
        self.hear(config, effective, ctx);
    }
}

impl Leading {
    fn not_enough(&self, version: &Version, ctx: Context<'_>, end: u64) -> CacheError {
        let (got, need) = (self.count(version.seq, ctx.me, end), need(&self.config, ctx));
        match enough_nodes(ctx) {
            // what is not begun says the same
            Err(CacheError::NoQuorum { got: here, need: expected }) if got >= need => {
                CacheError::NotEnoughAcks { got: here, need: expected }
            }
            // an epoch that is not in force confirms nothing, whoever has it: one that agrees is missing at least
            _ => CacheError::NotEnoughAcks { got: got.min(need.saturating_sub(1)), need },
        }
    }
}

/// How many owners have to have a `Sync` write before it is answered.
fn need(config: &Config, ctx: Context<'_>) -> usize {
    let least = if ctx.rules.breaks(Mutation::MinCopiesForgotten) { 0 } else { ctx.config.min_copies };
    majority(config.owners.len()).max(least)
}

/// Whether more than half of the nodes that are expected are here.
pub(super) fn enough_nodes(ctx: Context<'_>) -> Result<(), CacheError> {
    let (got, expected) = (ctx.members.live.len(), ctx.config.expected_nodes.unwrap_or(0));
    if got * 2 <= expected && expected > 0 && !ctx.rules.breaks(Mutation::ExpectedIgnored) {
        return Err(CacheError::NoQuorum { got, need: expected / 2 + 1 });
    }
    Ok(())
}
