//! Takeover: who may begin an epoch when the primary is gone, and when a partition is born.
//!
//! ```text
//!  candidate ── Inquire(attempt) ──▶ all live members
//!            ◀── Promise(report) ──   nothing older than the attempt is accepted there any more
//!            ◀── Refuse(config) ───   something newer is known there: learn it, and think again
//!  all have answered:
//!    nobody knows a config          birth: an empty copy, at the wanted owners
//!    a quorum of every set of owners that may have acknowledged writes has a whole copy:
//!        my copy goes furthest      begin the epoch (NewConfig to all of them)
//!        another one does           Nominate it
//!    fewer                          Stalled, until members change or the operator accepts the loss
//! ```
//!
//! * **All live members are asked, and all have to answer.** A quorum of the owners that the candidate knows is not
//!   enough: with two owners the quorum is one, and the other one may have made others owners in the meantime. Who
//!   does not answer is a matter for the failure detector, whose view this waits for.
//! * **A quorum of every set that may have acknowledged what the others lack.** A write was acknowledged by a majority of
//!   the owners of its config. While a config is not known to be in force, its base may be with the owners before it
//!   only. Whoever begins a config has ended the one before it first, so all that was ever acknowledged there is up to
//!   the base: once a copy with the base is found, the owners before need not be asked any more. And if the primary of
//!   the config answers itself that it has never been in force, it never will be: then only those before it count.
//! * **Only whole copies count, and only those in line are adopted**: a copy that goes on from an epoch which this
//!   config has overtaken may end with a higher version, and lacks what was acknowledged here. (It is merged later.)
//! * **It is the turn of the first living owner of the newest config**; whoever knows that config tells it, for it may
//!   have died with its primary before all owners had heard of it.
//! * **The copy that goes furthest is not fetched; its node is asked to take over.** It starts an inquiry of its own,
//!   so that no promise is ever stretched to another epoch; the ring's first owner gets the partition back later.
//! * **A promise is for one attempt.** [`Config`]s come with the epoch whose authority they use (`since`): an owner
//!   takes it only if it has promised nothing above that, so that a live primary may go from epoch to epoch without
//!   asking, and yet never overtakes a takeover that it has not heard of.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::history::{is_prefix, quorum};
use super::message::{Config, ReplicaMessage, Report, next_counter};
use super::{CacheEvent, Context, Known, Mutation, Replica, Role};
use crate::cache::version::{Epoch, Version};
use crate::ring::key_hash;
use crate::transport::Lane;
use crate::types::Peer;

/// How long a candidate that was refused waits, doubled each time, and as much again at random.
pub(super) const BACK_OFF: Duration = Duration::from_millis(50);
/// How long a candidate waits for the node that it has nominated.
const NOMINEE_TIME: Duration = Duration::from_secs(1);
/// How long a promise may come to nothing before the primary that is followed hears of it.
const PROMISE_TIME: Duration = Duration::from_secs(1);
/// How long a nomination is good for.
const NOMINATION_TIME: Duration = Duration::from_secs(3);

/// An attempt to begin an epoch.
#[derive(Debug)]
pub(super) struct Inquiry {
    attempt: Epoch,
    asked: BTreeSet<Peer>,
    answers: BTreeMap<Peer, Report>,
}

impl Inquiry {
    pub(super) fn peers(&self) -> impl Iterator<Item = &Peer> {
        self.asked.iter()
    }

    pub(super) fn forget_peer(&mut self, peer: &Peer) {
        self.asked.remove(peer);
        self.answers.remove(peer);
    }

    /// The sets of owners of which a quorum has to be found: every one that may have acknowledged what the others lack.
    fn sets_to_ask(&self, known: &Known) -> Vec<Vec<Peer>> {
        let config = &known.config;
        if known.effective {
            return vec![config.owners.clone()];
        }
        let of_config = |report: &&Report| report.config.as_ref().is_some_and(|of| of.epoch == config.epoch);
        if self.answers.get(&config.epoch.primary).as_ref().is_some_and(of_config) {
            return config.before.clone();
        }
        let whole = |owner: &Peer| self.answers.get(owner).filter(|report| report.whole);
        let ends: Vec<&Report> = config.owners.iter().filter_map(whole).collect();
        let mut sets = vec![config.owners.clone()];
        if ends.len() < quorum(config.owners.len()) || !ends.iter().any(|report| has_base(report, config)) {
            sets.extend(config.before.iter().filter(|set| **set != config.owners).cloned());
        }
        sets
    }
}

/// What another node, or the operator, has asked this one to do.
#[derive(Clone, Debug)]
pub(super) struct Nomination {
    accept_loss: bool,
    replace: bool,
    until: Duration,
}

impl Nomination {
    pub(super) fn new(accept_loss: bool, replace: bool, ctx: Context<'_>) -> Self {
        Self { accept_loss, replace, until: ctx.now.saturating_add(NOMINATION_TIME) }
    }
}

impl Replica {
    /// Not primary: whether to become it, and how far that is.
    pub(super) fn stand(&mut self, ctx: Context<'_>) {
        if self.nominated.as_ref().is_some_and(|nominated| nominated.until <= ctx.now) {
            self.nominated = None;
        }
        if let Some((_, until)) = self.handed {
            if ctx.now < until {
                return self.wake_at(until);
            }
            self.handed = None;
        }
        if !self.is_candidate(ctx) {
            return self.stand_back(ctx);
        }
        if let Some(nominated) = &self.nominated {
            self.wake_at(nominated.until);
        }
        if self.inquiry.is_none() {
            if ctx.now < self.retry_at {
                return self.wake_at(self.retry_at);
            }
            self.inquire(ctx);
        }
        self.ask(ctx);
        self.decide(ctx);
        if let Role::Leading(_) = self.role {
            self.lead(ctx);
        }
    }

    /// Somebody else is to serve. What this node has promised to itself stands: the primary whose stream it follows has
    /// to hear of it now, and not from the first write that is refused.
    fn stand_back(&mut self, ctx: Context<'_>) {
        self.remind(ctx);
        if self.inquiry.take().is_none() {
            return;
        }
        let Role::Following(following) = &self.role else { return };
        let epoch = following.epoch.clone();
        if self.promised.as_ref() > Some(&epoch) && ctx.members.reach(&epoch.primary) {
            self.reject(&epoch.primary.clone(), epoch);
        }
    }

    /// A takeover for which this node has made a promise may come to nothing, and the primary that is followed lives on:
    /// it has to hear of the promise, and not from the first write that is refused.
    pub(super) fn mind_promise(&mut self, ctx: Context<'_>) {
        let (Role::Following(following), Some(promised)) = (&self.role, &self.promised) else {
            self.overdue = None;
            return;
        };
        let epoch = following.epoch.clone();
        if *promised <= epoch || !ctx.members.reach(&epoch.primary) {
            self.overdue = None;
            return;
        }
        match &self.overdue {
            Some((of, until)) if of == promised && *until == Duration::MAX => {}
            Some((of, until)) if of == promised && *until <= ctx.now => {
                self.overdue = Some((promised.clone(), Duration::MAX));
                self.reject(&epoch.primary.clone(), epoch);
            }
            Some((of, until)) if of == promised => self.wake_at(*until),
            _ => {
                let until = ctx.now.saturating_add(PROMISE_TIME);
                self.overdue = Some((promised.clone(), until));
                self.wake_at(until);
            }
        }
    }

    /// The first living owner of the newest config is to take over, and may know of an older one only, by which it is
    /// somebody else's turn.
    fn remind(&mut self, ctx: Context<'_>) {
        let Some(known) = &self.known else { return };
        let Known { config, effective } = &**known;
        let Some(first) = config.owners.iter().find(|owner| ctx.members.live.contains(*owner)) else {
            return;
        };
        let reminded = (first.clone(), config.epoch.clone());
        if *first == config.epoch.primary || first == ctx.me || !ctx.members.reach(first) {
            return;
        }
        if self.reminded.as_ref() == Some(&reminded) {
            return;
        }
        let message = ReplicaMessage::Known { config: config.clone(), effective: *effective };
        let to = first.clone();
        self.reminded = Some(reminded);
        self.send(&to, Lane::Control, message);
    }

    /// The first owner that lives; the ring's first owner if none does. Nobody promises anything to itself before it can
    /// come to a decision: the promise would only keep it from following others.
    fn is_candidate(&self, ctx: Context<'_>) -> bool {
        let live = &ctx.members.live;
        let hasty =
            ctx.rules.breaks(Mutation::BirthUnasked) || ctx.rules.breaks(Mutation::QuorumCountsSilence);
        if !live.contains(ctx.me) || !(ctx.members.complete || hasty) {
            return false;
        }
        let owners = self.config().map_or(&[][..], |config| &config.owners);
        let early = ctx.rules.breaks(Mutation::ServeBeforeActive);
        let first = owners.iter().find(|owner| live.contains(*owner) && !early).or(self.wanted.first());
        self.nominated.is_some() || first == Some(ctx.me)
    }

    fn inquire(&mut self, ctx: Context<'_>) {
        let promised = self.promised.as_ref().map_or(0, |promised| promised.counter);
        let Some(counter) = next_counter(self.seen.max(promised)) else { return };
        let attempt = Epoch::new(counter, ctx.me.clone());
        self.seen = counter;
        self.promised = Some(attempt.clone());
        let answers = BTreeMap::from([(ctx.me.clone(), self.report())]);
        self.inquiry = Some(Box::new(Inquiry { attempt, asked: BTreeSet::new(), answers }));
    }

    fn report(&self) -> Report {
        Report {
            whole: self.whole,
            end: self.end().cloned(),
            config: self.config().cloned(),
            effective: self.known.as_ref().is_some_and(|known| known.effective),
        }
    }

    fn ask(&mut self, ctx: Context<'_>) {
        let known = self.config().map(|config| config.epoch.clone());
        let Some(inquiry) = &mut self.inquiry else { return };
        let others = ctx.members.live.iter().filter(|peer| *peer != ctx.me && ctx.members.reach(peer));
        let new: Vec<Peer> = others.filter(|peer| inquiry.asked.insert((*peer).clone())).cloned().collect();
        let attempt = inquiry.attempt.clone();
        for peer in new {
            let message = ReplicaMessage::Inquire { attempt: attempt.clone(), known: known.clone() };
            self.send(&peer, Lane::Control, message);
        }
    }

    fn back_off(&mut self, ctx: Context<'_>) {
        self.inquiry = None;
        let step = BACK_OFF * (1 << self.attempts.min(5));
        self.attempts = self.attempts.saturating_add(1);
        // the same in every run, different on every node
        let mut seed = ctx.me.node.as_bytes().to_vec();
        seed.extend_from_slice(&self.id.get().to_le_bytes());
        seed.extend_from_slice(&self.attempts.to_le_bytes());
        let share = u32::try_from(key_hash(&seed) % 1024).unwrap_or(0);
        self.retry_at = ctx.now.saturating_add(step + step * share / 1024);
    }

    // ---- the other side

    pub(super) fn on_inquire(&mut self, from: &Peer, attempt: Epoch, known: Option<Epoch>, ctx: Context<'_>) {
        if attempt.primary != *from {
            return;
        }
        let newest = self.config().map(|config| &config.epoch);
        // a primary in force does not make way for somebody who takes it for dead or has not heard of it
        let in_force =
            matches!(&self.role, Role::Leading(leading) if leading.effective) && newest >= known.as_ref();
        if newest > known.as_ref() || in_force || self.promised.as_ref() > Some(&attempt) {
            let (config, effective) = self.known_config();
            let promised = self.promised.clone();
            let message = ReplicaMessage::Refuse { attempt, promised, config, effective };
            return self.send(from, Lane::Control, message);
        }
        if self.promised.as_ref() < Some(&attempt) {
            self.seen = self.seen.max(attempt.counter);
            self.promised = Some(attempt.clone());
            self.step_down(ctx);
            if self.inquiry.is_some() {
                self.back_off(ctx);
            }
        }
        let report = self.report();
        self.send(from, Lane::Control, ReplicaMessage::Promise { attempt, report });
    }

    pub(super) fn known_config(&self) -> (Option<Config>, bool) {
        match &self.known {
            Some(known) => (Some(known.config.clone()), known.effective),
            None => (None, false),
        }
    }

    pub(super) fn on_promise(&mut self, from: &Peer, attempt: &Epoch, report: Report, ctx: Context<'_>) {
        if report.config.as_ref().is_some_and(|config| !config.is_sound()) {
            return;
        }
        let Some(inquiry) = self.inquiry.as_mut().filter(|inquiry| inquiry.attempt == *attempt) else {
            return;
        };
        if !inquiry.asked.contains(from) {
            return;
        }
        inquiry.answers.insert(from.clone(), report.clone());
        if let Some(config) = report.config {
            if Some(&config.epoch) == self.config().map(|config| &config.epoch) {
                self.learn(config, report.effective);
            }
        }
        let _ = ctx;
    }

    pub(super) fn on_refuse(
        &mut self,
        from: &Peer,
        attempt: &Epoch,
        promised: Option<Epoch>,
        config: Option<Config>,
        effective: bool,
        ctx: Context<'_>,
    ) {
        self.seen = self.seen.max(promised.as_ref().map_or(0, |promised| promised.counter));
        let ours = self.inquiry.as_ref().is_some_and(|inquiry| inquiry.attempt == *attempt);
        let leads =
            |config: &Config| config.epoch.primary == *from && promised.as_ref() == Some(&config.epoch);
        if ours {
            // nobody has to take over from a primary in force, whoever has asked for it
            if effective && config.as_ref().is_some_and(leads) {
                self.nominated = None;
            }
            self.back_off(ctx);
        }
        // news takes the waiting away
        self.hear(config, effective, ctx);
    }

    /// Takes note of a config that was told by somebody else than its primary.
    pub(super) fn hear(&mut self, config: Option<Config>, effective: bool, ctx: Context<'_>) {
        let Some(config) = config.filter(Config::is_sound) else { return };
        let overtaken = self.config().is_none_or(|known| known.epoch < config.epoch);
        let epoch = config.epoch.clone();
        if self.learn(config, effective) && overtaken {
            // to follow an older one is of no use any more; but the primary's own stream gets there in order
            if !self.follows(&epoch.primary) {
                self.promised = self.promised.take().max(Some(epoch));
            }
            self.nominated = None;
            self.inquiry = None;
            self.step_down(ctx);
        }
    }

    pub(super) fn on_nominate(
        &mut self,
        seen: &Epoch,
        config: Option<Config>,
        effective: bool,
        nomination: Nomination,
        ctx: Context<'_>,
    ) {
        if let Role::Leading(_) = self.role {
            return;
        }
        self.hear(config, effective, ctx);
        self.seen = self.seen.max(seen.counter);
        self.inquiry = None;
        self.retry_at = Duration::ZERO;
        self.nominated = Some(Box::new(nomination));
    }

    /// The operator's word is for the node that is to act: the first living owner. Where somebody else knows of a newer
    /// config, or of fewer that live, it is passed on with what is known here, so always to a newer config or nearer to
    /// its first owner. A node that is not the first must not keep it: it would take over from a primary that is well.
    pub(super) fn on_accept_loss(&mut self, ctx: Context<'_>) {
        let (config, effective) = self.known_config();
        let owners = config.as_ref().map_or(&[][..], |config| &config.owners);
        let first = owners.iter().find(|owner| ctx.members.live.contains(*owner));
        let first = first.filter(|first| *first != ctx.me && ctx.members.reach(first)).cloned();
        let (Some(first), Some(config)) = (first, config) else { return self.accept_loss_here(ctx) };
        self.send(&first, Lane::Control, ReplicaMessage::Known { config, effective });
        self.send(&first, Lane::Control, ReplicaMessage::AcceptLoss);
    }

    /// Goes on with what there is, as the operator says.
    fn accept_loss_here(&mut self, ctx: Context<'_>) {
        self.stalled = None;
        if let Role::Leading(leading) = &mut self.role {
            leading.accept_loss = true;
            return;
        }
        let replace = self.nominated.as_ref().is_some_and(|nominated| nominated.replace);
        self.nominated = Some(Box::new(Nomination::new(true, replace, ctx)));
        self.retry_at = Duration::ZERO;
    }

    // ---- the decision

    fn decide(&mut self, ctx: Context<'_>) {
        let Some(inquiry) = &self.inquiry else { return };
        let all = ctx.members.live.iter().all(|peer| inquiry.answers.contains_key(peer));
        let hasty = match &self.known {
            None => ctx.rules.breaks(Mutation::BirthUnasked),
            Some(_) => ctx.rules.breaks(Mutation::QuorumCountsSilence),
        };
        let everybody = all && ctx.members.complete;
        if !everybody && !hasty {
            return;
        }
        match self.known.clone() {
            None => self.give_birth(ctx),
            Some(known) => self.succeed(&known, ctx),
        }
    }

    /// Nobody has anything.
    fn give_birth(&mut self, ctx: Context<'_>) {
        let Some(inquiry) = &self.inquiry else { return };
        let (got, expected) = (inquiry.answers.len(), ctx.config.expected_nodes.unwrap_or(0));
        let ignored = ctx.rules.breaks(Mutation::ExpectedIgnored);
        let forced = ignored || self.nominated.as_ref().is_some_and(|nominated| nominated.accept_loss);
        if got * 2 <= expected && !forced {
            return self.stall(got, expected / 2 + 1);
        }
        let others = self.wanted.iter().filter(|peer| *peer != ctx.me && inquiry.answers.contains_key(*peer));
        let owners = std::iter::once(ctx.me).chain(others).take(ctx.config.replicas).cloned().collect();
        let attempt = inquiry.attempt.clone();
        self.drop_copy(ctx);
        self.whole = true;
        self.begin(attempt.clone(), attempt, owners, Vec::new());
    }

    /// Somebody served before.
    fn succeed(&mut self, known: &Known, ctx: Context<'_>) {
        let Some(inquiry) = &self.inquiry else { return };
        let config = &known.config;
        let sets = inquiry.sets_to_ask(known);
        let early = ctx.rules.breaks(Mutation::ServeBeforeActive);
        let nominated = self.nominated.clone();
        let forced = nominated.as_ref().is_some_and(|nominated| nominated.accept_loss);
        let replace = nominated.as_ref().is_some_and(|nominated| nominated.replace) && self.whole;
        let has_whole = |peer: &&Peer| inquiry.answers.get(*peer).is_some_and(|report| report.whole);
        let short = sets.iter().map(|set| (set.iter().filter(has_whole).count(), quorum(set.len())));
        let short = short.filter(|(got, need)| got < need).min();
        if let Some((got, need)) =
            short.filter(|_| !forced && !early && !ctx.rules.breaks(Mutation::QuorumCountsSilence))
        {
            return self.stall(got, need);
        }
        let sides = || std::iter::once(&config.owners).chain(&config.before).flatten();
        let in_sets = |peer: &Peer| sides().any(|owner| owner == peer);
        let may_lead = |(peer, report): &(&Peer, &Report)| {
            report.whole && (forced || (in_sets(peer) && in_line(report.end.as_ref(), config)))
        };
        // of equal copies this node's, then the first owner's
        let rank = |peer: &Peer| config.owners.iter().position(|owner| owner == peer).unwrap_or(usize::MAX);
        let best = inquiry.answers.iter().filter(may_lead).max_by_key(|(peer, report)| {
            (report.end.clone(), *peer == ctx.me, std::cmp::Reverse(rank(peer)))
        });
        let Some((best, end)) = best
            .map(|(peer, report)| (peer.clone(), report.end.clone()))
            .or_else(|| early.then(|| (ctx.me.clone(), None)))
        else {
            return if forced { self.give_birth(ctx) } else { self.stall(0, 1) };
        };
        let lacking = known.effective && end.as_ref() < config.base.as_ref();
        if lacking && !forced && !early && !ctx.rules.breaks(Mutation::QuorumCountsSilence) {
            return self.stall(0, 1);
        }
        if best != *ctx.me && !replace && !early {
            return self.nominate(&best, false, ctx);
        }
        let (lineage, mine) = (self.store.lineage(), self.end());
        let goes_along = |peer: &&Peer| {
            let report = inquiry.answers.get(*peer);
            *peer != ctx.me && report.is_some_and(|r| r.whole && is_prefix(lineage, mine, r.end.as_ref()))
        };
        let mut owners = vec![ctx.me.clone()];
        for peer in sides().filter(goes_along) {
            if !owners.contains(peer) {
                owners.push(peer.clone());
            }
        }
        let attempt = inquiry.attempt.clone();
        let before = if forced { Vec::new() } else { sets };
        if early && !self.whole {
            self.drop_copy(ctx);
            self.whole = true;
        }
        self.begin(attempt.clone(), attempt, owners, before);
    }

    /// Asks another node to take over.
    pub(super) fn nominate(&mut self, peer: &Peer, replace: bool, ctx: Context<'_>) {
        let seen = self.promised.clone().unwrap_or_else(|| Epoch::new(self.seen, ctx.me.clone()));
        let accept_loss = self.nominated.as_ref().is_some_and(|nominated| nominated.accept_loss);
        let (config, effective) = self.known_config();
        let message = ReplicaMessage::Nominate { seen, config, effective, accept_loss, replace };
        self.send(peer, Lane::Control, message);
        self.inquiry = None;
        self.nominated = None;
        self.retry_at = ctx.now.saturating_add(NOMINEE_TIME);
        self.wake_at(self.retry_at);
    }

    /// Too few copies: it waits, and says so once.
    pub(super) fn stall(&mut self, got: usize, need: usize) {
        if self.stalled != Some((got, need)) {
            self.stalled = Some((got, need));
            self.changed = true;
            self.tell(CacheEvent::Stalled { partition: self.id, got, need });
        }
    }
}

/// Whether a copy that ends there can be one of this config: it has writes of its epoch, or none after its base.
fn in_line(end: Option<&Version>, config: &Config) -> bool {
    end.is_none_or(|end| end.epoch >= config.epoch) || end <= config.base.as_ref()
}

/// Whether a copy in line has all that was written before this config.
fn has_base(report: &Report, config: &Config) -> bool {
    report.end == config.base || report.end.as_ref().is_some_and(|end| end.epoch >= config.epoch)
}
