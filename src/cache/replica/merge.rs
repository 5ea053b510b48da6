//! What a copy alone has, when two sides of a split meet: offered to the primary that stays, before the copy goes.
//!
//! ```text
//!  copy ── Position ──▶ primary      the copy ends with a write that is not in the primary's history
//!       ◀── Want(history) ──
//!       ── Offer 0 ──▶               entries that the history does not contain
//!       ◀── OfferAck 0 ──            when a majority has what of it was new; losers are reported
//!       ── Offer 1, last ──▶ ...
//!  the copy goes, and is filled again if the node is an owner
//! ```
//!
//! * The higher epoch stays. What comes from the other side keeps its versions, so that a second copy of that side,
//!   which offers the same, changes nothing.
//! * An offer is acknowledged when a majority has it: the copy that goes may be the last that had it.
//! * Deletes that the copy has missed may be forgotten here: then nothing of it is taken, and all of it reported. If it
//!   is the other way round, the other side's copy replaces this one: its node is asked to take over.
//! * While copies are merged, nothing is forgotten here.

use std::collections::BTreeSet;

use super::message::ReplicaMessage;
use super::primary::Waiter;
use super::{CacheEvent, Context, Mutation, Replica, Role};
use crate::cache::store::{Cursor, Entry, Loser, MergePlan, SnapshotHeader, Write};
use crate::cache::term::{Record, Term};
use crate::cache::version::{Epoch, Lineage, Version};
use crate::transport::Lane;
use crate::types::Peer;

/// How many pieces without anything to offer are passed over at once.
const PASSED_OVER: usize = 64;
/// How many losers are remembered as reported; one beyond them may be reported once more.
const REPORTED: usize = 1 << 16;

/// A copy that is being merged, at the primary.
#[derive(Debug)]
pub(super) struct Merging {
    header: SnapshotHeader,
    plan: Option<MergePlan>,
    expecting: u64,
    /// The piece that waits for a majority, and whether it is the last.
    pending: Option<(u64, bool)>,
}

impl Merging {
    pub(super) fn new(header: SnapshotHeader) -> Self {
        Self { header, plan: None, expecting: 0, pending: None }
    }
}

/// What this node offers.
#[derive(Debug)]
pub(super) struct Offer {
    pub(super) to: Peer,
    pub(super) epoch: Epoch,
    lineage: Lineage,
    end: Option<Version>,
    cursor: Option<Cursor>,
    number: u64,
    last: bool,
}

/// Whether this loser has not been reported yet: each copy of the side that lost offers all of it.
fn first_time(reported: &mut BTreeSet<(Version, u64)>, loser: &Loser) -> bool {
    let key = loser.key.as_ref().map_or(0, Term::stable_hash);
    let record = loser.record.as_ref().map_or(1, Record::stable_hash);
    let write = (loser.version.clone(), key.rotate_left(1) ^ record);
    if reported.len() >= REPORTED { !reported.contains(&write) } else { reported.insert(write) }
}

/// A piece as it arrives.
pub(super) struct Offered {
    pub(super) number: u64,
    pub(super) entries: Vec<Entry>,
    pub(super) last: bool,
}

impl Replica {
    // ---- the primary

    /// Asks the copies that have something of their own for it.
    pub(super) fn want_offers(&mut self, ctx: Context<'_>) {
        let Role::Leading(leading) = &mut self.role else { return };
        if !leading.effective || leading.handing.is_some() {
            return;
        }
        let mut wanted = Vec::new();
        let mut discarded = Vec::new();
        let mut replaced_by = None;
        for (peer, merging) in leading.merges.iter_mut().filter(|(_, merging)| merging.plan.is_none()) {
            let plan = self.store.merge_plan(&merging.header);
            match &plan {
                MergePlan::Merge { .. } => {}
                MergePlan::KeepOurs { common } => discarded.push((peer.clone(), common.clone())),
                MergePlan::KeepTheirs { .. } => {
                    replaced_by = Some(peer.clone());
                    break;
                }
            }
            merging.plan = Some(plan);
            wanted.push(peer.clone());
        }
        if let Some(peer) = replaced_by {
            self.step_down(ctx);
            return self.nominate(&peer, true, ctx);
        }
        if wanted.is_empty() {
            return;
        }
        let (epoch, lineage) = (leading.config.epoch.clone(), leading.history(&self.store));
        for (owner, common) in discarded {
            self.tell(CacheEvent::Discarded { partition: self.id, owner, common });
        }
        for peer in wanted {
            let (epoch, lineage, end) = (epoch.clone(), lineage.clone(), self.end().cloned());
            self.send(&peer, Lane::Control, ReplicaMessage::Want { epoch, lineage, end });
        }
    }

    pub(super) fn on_offer(&mut self, from: &Peer, epoch: &Epoch, offered: Offered, ctx: Context<'_>) {
        let Role::Leading(leading) = &mut self.role else { return };
        if leading.config.epoch != *epoch || !leading.effective {
            return;
        }
        let Some(merging) = leading.merges.get_mut(from) else { return };
        let Some(plan) = merging.plan.as_ref().filter(|_| merging.pending.is_none()) else { return };
        if merging.expecting != offered.number {
            return;
        }
        let Ok((write, losers)) = self.store.plan_merge(plan, &offered.entries) else { return };
        merging.pending = Some((offered.number, offered.last));
        // what that side has done one after the other is no conflict, though it comes in pieces
        let there = |write: &Version| {
            let header = &merging.header;
            header.lineage.surely_contains(header.applied.as_ref(), write)
        };
        let conflicts = losers.into_iter().filter(|loser| !(there(&loser.version) && there(&loser.by)));
        let reported = &mut leading.reported;
        let news = conflicts.filter(|loser| first_time(reported, loser)).collect::<Vec<_>>();
        for loser in news {
            self.tell(CacheEvent::Conflict { partition: self.id, loser });
        }
        let news = !matches!(&write, Write::Merge(entries) if entries.is_empty());
        if news && self.append(write, ctx).is_err() {
            return;
        }
        let version = self.end().cloned().filter(|_| news);
        match (&mut self.role, version) {
            (Role::Leading(leading), Some(version)) => {
                let (peer, number) = (from.clone(), offered.number);
                leading.waiting.push(version, Waiter::Merge { peer, number });
            }
            _ => self.acknowledge_offer(from, offered.number),
        }
    }

    /// A piece is safe.
    pub(super) fn acknowledge_offer(&mut self, peer: &Peer, number: u64) {
        let Role::Leading(leading) = &mut self.role else { return };
        let epoch = leading.config.epoch.clone();
        let Some(merging) = leading.merges.get_mut(peer) else { return };
        let Some((_, last)) = merging.pending.take_if(|(of, _)| *of == number) else { return };
        merging.expecting += 1;
        if last {
            leading.merges.remove(peer);
        }
        self.send(peer, Lane::Control, ReplicaMessage::OfferAck { epoch, number });
    }

    // ---- the copy

    pub(super) fn on_want(
        &mut self,
        from: &Peer,
        epoch: Epoch,
        lineage: Lineage,
        end: Option<Version>,
        ctx: Context<'_>,
    ) {
        let ours = self.config().is_some_and(|config| config.epoch == epoch && epoch.primary == *from);
        if !ours || !lineage.is_sound() || matches!(self.role, Role::Leading(_)) {
            return;
        }
        if !self.whole {
            return self.tell_position(from);
        }
        if ctx.rules.breaks(Mutation::CopyNotOffered) {
            return self.resync(from, ctx);
        }
        let to = from.clone();
        let offer = Offer { to, epoch, lineage, end, cursor: None, number: 0, last: false };
        self.offer = Some(Box::new(offer));
        self.offer_next(ctx);
    }

    fn offer_next(&mut self, ctx: Context<'_>) {
        let Some(offer) = &mut self.offer else { return };
        let mut entries = Vec::new();
        for _ in 0..PASSED_OVER {
            let chunk = self.store.chunk(offer.cursor.as_ref(), ctx.config.chunk_bytes);
            let own = |entry: &Entry| !offer.lineage.surely_contains(offer.end.as_ref(), entry.version());
            entries.extend(chunk.entries.into_iter().filter(own));
            offer.last = chunk.next.is_none();
            offer.cursor = chunk.next;
            if offer.last || !entries.is_empty() {
                break;
            }
        }
        let (to, epoch, number, last) = (offer.to.clone(), offer.epoch.clone(), offer.number, offer.last);
        self.send(&to, Lane::Bulk, ReplicaMessage::Offer { epoch, number, entries, last });
    }

    pub(super) fn on_offer_ack(&mut self, from: &Peer, epoch: &Epoch, number: u64, ctx: Context<'_>) {
        let Some(offer) = &mut self.offer else { return };
        if offer.to != *from || offer.epoch != *epoch || offer.number != number {
            return;
        }
        if !offer.last {
            offer.number += 1;
            return self.offer_next(ctx);
        }
        self.offer = None;
        self.resync(from, ctx);
    }

    /// The copy goes, and is filled again.
    fn resync(&mut self, from: &Peer, ctx: Context<'_>) {
        self.drop_copy(ctx);
        if let Role::Following(following) = &mut self.role {
            following.asked = true;
            self.tell_position(from);
        }
    }
}
