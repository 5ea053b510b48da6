//! Changes by a live primary: owners that join, die or drain; handing over; and forgetting deletes.
//!
//! * **Nobody is dropped for somebody empty.** Who is wanted by the ring and keeps nothing is a *learner*: it gets the
//!   snapshot and the stream, counts for nothing, and becomes an owner when it has everything but for what is on its
//!   way. Live owners that the ring no longer wants go only when all wanted ones are owners.
//! * **The dead are dropped at once**, if a quorum of the owners is left to agree. Else the primary cannot know that it
//!   is not the smaller side of a split; it says so ([`CacheEvent::Stalled`](super::CacheEvent::Stalled)) and goes on as it is.
//! * **Handing over**: nothing new is accepted, the next primary gets all that there is, every write that waits is
//!   answered; only then it is told to begin. From that message on this node is a mere owner, whether it arrives or not:
//!   if nothing comes of it, this node takes over again, by asking like everybody else.

use std::collections::BTreeSet;
use std::time::Duration;

use super::history::quorum;
use super::message::ReplicaMessage;
use super::primary::Handing;
use super::stream::Stream;
use super::{Context, Mutation, Replica, Role};
use crate::cache::store::Store;
use crate::cache::version::{Epoch, Version};
use crate::transport::Lane;
use crate::types::Peer;

/// How long operations wait for a hand-over at most.
const HAND_OVER_TIME: Duration = Duration::from_secs(1);
/// How long after a hand-over that came to nothing the next one is tried.
const HAND_OVER_PAUSE: Duration = Duration::from_secs(2);
/// How long this node waits for the next primary to begin.
const SUCCESSOR_TIME: Duration = Duration::from_secs(2);
/// How many deletes are forgotten in one step.
const FORGOTTEN: usize = 4096;
/// How many more rounds the owners are told what they may forget when the primary has forgotten all: theirs may be
/// younger by as long as a delete is remembered, and a round is a quarter of that.
pub(super) const ROUNDS: u32 = 6;
/// How often a primary looks what may be forgotten.
const LOOK: (Duration, Duration) = (Duration::from_millis(250), Duration::from_secs(30));

impl Replica {
    /// Begins a config with other owners, if there should be one.
    pub(super) fn change_owners(&mut self, ctx: Context<'_>) -> bool {
        let end = self.store.applied();
        let Role::Leading(leading) = &mut self.role else { return false };
        leading.settled = false;
        if !leading.effective || leading.handing.is_some() {
            return false;
        }
        let owners = &leading.config.owners;
        let stream = |peer: &Peer| leading.streams.get(peer);
        let ready = |peer: &Peer| match stream(peer) {
            _ if peer == ctx.me => true,
            Some(stream) if owners.contains(peer) => stream.counts(),
            Some(stream) => stream.is_close(end),
            None => false,
        };
        let live = |peer: &&Peer| ctx.members.live.contains(*peer);
        let all_ready = ctx.members.complete && !self.wanted.is_empty() && self.wanted.iter().all(ready);
        let wanted = self.wanted.iter().filter(|peer| ready(peer));
        let early = ctx.rules.breaks(Mutation::OwnersDroppedEarly);
        let kept = owners.iter().filter(live).filter(|_| !all_ready && !early);
        let mut target = vec![ctx.me.clone()];
        for peer in kept.chain(wanted) {
            if !target.contains(peer) {
                target.push(peer.clone());
            }
        }
        let set = |peers: &[Peer]| peers.iter().cloned().collect::<BTreeSet<Peer>>();
        if set(&target) == set(owners) && !leading.renew {
            let settled = all_ready && self.wanted.contains(ctx.me) && owners.iter().all(ready);
            self.changed |= settled;
            leading.settled = settled;
            self.stalled = None;
            return false;
        }
        // those that can agree now
        let agree = |peer: &&Peer| *peer == ctx.me || stream(peer).is_some_and(|stream| stream.adopted);
        let (got, need) = (owners.iter().filter(live).filter(agree).count(), quorum(owners.len()));
        if got < need && !leading.accept_loss {
            let living = owners.iter().filter(live).count();
            if living < need {
                self.stall(living, need);
            }
            return false;
        }
        let before = if leading.accept_loss { Vec::new() } else { vec![owners.clone()] };
        self.stalled = None;
        self.begin_next(target, before);
        true
    }

    /// Gives the partition to the ring's first owner.
    pub(super) fn hand_over(&mut self, ctx: Context<'_>) {
        let end = self.store.applied();
        let Role::Leading(leading) = &mut self.role else { return };
        let wish =
            self.wanted.first().filter(|first| *first != ctx.me && ctx.members.complete && leading.effective);
        if let Some(handing) = &leading.handing {
            if wish != Some(&handing.to) || handing.until <= ctx.now {
                leading.handing = None;
                leading.next_hand_over = ctx.now.saturating_add(HAND_OVER_PAUSE);
                self.changed = true;
            }
        }
        let Some(to) = wish else { return };
        if leading.handing.is_none() {
            let counts =
                |peer: &Peer| peer == ctx.me || leading.streams.get(peer).is_some_and(Stream::counts);
            let are_owners =
                self.wanted.iter().all(|peer| leading.config.owners.contains(peer) && counts(peer));
            let close = leading.streams.get(to).is_some_and(|stream| stream.is_close(end));
            if !are_owners || !close || !leading.merges.is_empty() {
                return;
            }
            if ctx.now < leading.next_hand_over {
                let at = leading.next_hand_over;
                return self.wake_at(at);
            }
            let until = ctx.now.saturating_add(HAND_OVER_TIME);
            leading.handing = Some(Handing { to: to.clone(), until });
            self.changed = true;
        }
        let Some(until) = leading.handing.as_ref().map(|handing| handing.until) else { return };
        let has_all = leading.streams.get(to).is_some_and(|stream| stream.has_all(end));
        let hasty = ctx.rules.breaks(Mutation::HandOverUnflushed);
        let flushed = has_all && leading.waiting.is_empty();
        if !flushed && !hasty {
            return self.wake_at(until);
        }
        let to = to.clone();
        let from = leading.config.epoch.clone();
        let epoch = Epoch::new(from.counter.saturating_add(1), to.clone());
        self.seen = self.seen.max(epoch.counter);
        self.promised = Some(epoch.clone());
        self.step_down(ctx);
        self.send(&to, Lane::Bulk, ReplicaMessage::HandOver { from, epoch });
        let until = ctx.now.saturating_add(SUCCESSOR_TIME);
        self.handed = Some((to, until));
        self.wake_at(until);
    }

    // ---- forgetting

    /// When to look next what may be forgotten.
    pub(super) fn plan_purge(&mut self, ctx: Context<'_>) {
        let tombstones = self.store.tombstones();
        let Role::Leading(leading) = &mut self.role else { return };
        if tombstones > 0 {
            leading.purge_rounds = ROUNDS;
        }
        if leading.purge_rounds == 0 {
            return;
        }
        let after = (ctx.config.tombstone_ttl / 4).clamp(LOOK.0, LOOK.1);
        let at = *leading.purge_at.get_or_insert_with(|| ctx.now.saturating_add(after));
        self.wake_at(at);
    }

    /// Forgets what all owners have and is old enough, and lets the owners do the same.
    pub(super) fn purge(&mut self, ctx: Context<'_>) {
        let Role::Leading(leading) = &mut self.role else { return };
        if leading.purge_at.is_none_or(|at| at > ctx.now) {
            return;
        }
        leading.purge_at = None;
        leading.purge_rounds = leading.purge_rounds.saturating_sub(1);
        let all_have = self.all_have(ctx);
        let early = self.end().cloned().filter(|_| ctx.rules.breaks(Mutation::TombstoneDroppedEarly));
        if let Some(all_have) = early.or(all_have) {
            self.purge_through(&all_have, ctx);
        }
        self.greet_owners();
    }

    pub(super) fn purge_through(&mut self, all_have: &Version, ctx: Context<'_>) {
        let early = ctx.rules.breaks(Mutation::TombstoneDroppedEarly);
        let ttl = if early { Duration::ZERO } else { ctx.config.tombstone_ttl };
        let forgotten = self.store.purge(ctx.now, ttl, all_have, FORGOTTEN);
        if early && forgotten > 0 {
            // and what was forgotten is not remembered either
            let mut header = self.store.snapshot_header();
            header.purged_through = None;
            let Ok(mut store) = Store::from_header(ctx.config, header) else { return };
            let _ = store.install(&self.store.chunk(None, usize::MAX).entries, ctx.now);
            self.store = store;
        }
    }
}
