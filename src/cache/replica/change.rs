//! Changes by a live primary: owners that join, die or drain; handing over; and forgetting deletes.
//!
//! * **Nobody is dropped for somebody empty.** Who is wanted by the ring and keeps nothing is a *learner*: it gets the
//!   snapshot and the stream, counts for nothing, and becomes an owner when it has everything but for what is on its
//!   way. Live owners that the ring no longer wants go only when all wanted ones are owners.
//! * **The dead are dropped at once**, if a quorum of the owners is left to agree, those included that have come back in
//!   a later life: they are dead for certain. Else the primary cannot know that it is not the smaller side of a split; it
//!   says so ([`CacheEvent::Stalled`](super::CacheEvent::Stalled)) and goes on as it is.
//! * **Handing over**: nothing new is accepted, the next primary gets all that there is, every write that waits is
//!   answered; only then it is told to begin. From that message on this node is a mere owner, whether it arrives or not:
//!   if nothing comes of it, this node takes over again, by asking like everybody else.

use std::collections::BTreeSet;
use std::time::Duration;

use super::history::quorum;
use super::message::{ReplicaMessage, next_counter};
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
/// How often it is looked what may be forgotten.
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
            // nothing stands still: what an operator accepts is not kept for the next time
            leading.accept_loss = false;
            self.stalled = None;
            return false;
        }
        // those that can agree now, or have nothing to say any more
        let dead = |peer: &&Peer| ctx.members.has_died(peer);
        let agree = |peer: &&Peer| *peer == ctx.me || stream(peer).is_some_and(|stream| stream.adopted);
        let (got, need) = (
            owners.iter().filter(|peer| dead(peer) || (live(peer) && agree(peer))).count(),
            quorum(owners.len()),
        );
        let forced = got < need;
        if forced {
            let living = owners.iter().filter(|peer| dead(peer) || live(peer)).count();
            if living >= need {
                return false;
            }
            if !leading.accept_loss {
                self.stall(living, need);
                return false;
            }
        }
        let before = if forced { Vec::new() } else { vec![owners.clone()] };
        self.stalled = None;
        self.begin_next(target, before)
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
        let hasty = ctx.rules.breaks(Mutation::HandOverUnflushed);
        if leading.handing.is_none() {
            let counts = |peer: &Peer| {
                peer == ctx.me || leading.streams.get(peer).is_some_and(Stream::counts) || hasty
            };
            let are_owners =
                self.wanted.iter().all(|peer| leading.config.owners.contains(peer) && counts(peer));
            let close = leading.streams.get(to).is_some_and(|stream| stream.is_close(end)) || hasty;
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
        let flushed = has_all && leading.waiting.is_empty();
        if !flushed && !hasty {
            return self.wake_at(until);
        }
        let to = to.clone();
        let from = leading.config.epoch.clone();
        let Some(counter) = next_counter(from.counter) else { return };
        let epoch = Epoch::new(counter, to.clone());
        self.seen = self.seen.max(epoch.counter);
        self.promised = Some(epoch.clone());
        self.step_down(ctx);
        self.send(&to, Lane::Bulk, ReplicaMessage::HandOver { from, epoch });
        let until = ctx.now.saturating_add(SUCCESSOR_TIME);
        self.handed = Some((to, until));
        self.wake_at(until);
    }

    // ---- forgetting

    /// When to look next what may be forgotten: as long as there are deletes, or an owner has not been told.
    pub(super) fn plan_purge(&mut self, ctx: Context<'_>) {
        let all_have = self.all_have(ctx);
        let tombstones = self.store.tombstones() > 0;
        let now = ctx.now.saturating_add((ctx.config.tombstone_ttl / 4).clamp(LOOK.0, LOOK.1));
        let purge_at = match &mut self.role {
            Role::Leading(leading) => {
                let untold = all_have.is_some() && leading.streams.values().any(|s| s.is_untold(&all_have));
                (tombstones || untold).then_some(&mut leading.purge_at)
            }
            Role::Following(following) => {
                (tombstones && following.all_have.is_some()).then_some(&mut following.purge_at)
            }
            Role::Idle => None,
        };
        let Some(purge_at) = purge_at else { return };
        let at = *purge_at.get_or_insert(now);
        self.wake_at(at);
    }

    /// Forgets what all owners have and is old enough. The primary tells the owners up to where that is, and they do
    /// the same by their own clocks.
    pub(super) fn purge(&mut self, ctx: Context<'_>) {
        let purge_at = match &mut self.role {
            Role::Leading(leading) => &mut leading.purge_at,
            Role::Following(following) => &mut following.purge_at,
            Role::Idle => return,
        };
        if purge_at.take_if(|at| *at <= ctx.now).is_none() {
            return;
        }
        let all_have = match &self.role {
            Role::Following(following) if following.incoming.is_none() => following.all_have.clone(),
            Role::Following(_) | Role::Idle => None,
            Role::Leading(_) => {
                let all_have = self.all_have(ctx);
                self.greet_owners(&all_have);
                let early = ctx.rules.breaks(Mutation::TombstoneDroppedEarly);
                self.end().cloned().filter(|_| early).or(all_have)
            }
        };
        if let Some(all_have) = all_have {
            self.purge_through(&all_have, ctx);
        }
    }

    pub(super) fn purge_through(&mut self, all_have: &Version, ctx: Context<'_>) {
        let early = ctx.rules.breaks(Mutation::TombstoneDroppedEarly);
        let ttl = if early { Duration::ZERO } else { ctx.config.tombstone_ttl };
        let forgotten = self.store.purge(ctx.now, ttl, all_have, FORGOTTEN);
        if forgotten >= FORGOTTEN {
            // there are more: at one step a look, many deletes would pile up
            let soon = ctx.now.saturating_add(LOOK.0);
            match &mut self.role {
                Role::Leading(leading) => leading.purge_at = Some(soon),
                Role::Following(following) => following.purge_at = Some(soon),
                Role::Idle => {}
            }
            self.wake_at(soon);
        }
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
