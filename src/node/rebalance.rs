//! What a commit sends to whom, and what arrives: gathering, transfers, sweeping and repairs, in bounded
//! steps.

use crate::types::{Group, Peer};
use crate::view::ViewHash;

use super::agreement::{Agreement, Incoming, Transfer};
use super::chores::{RepairScan, Scan, Walk};
use super::claims::Asked;
use super::digest::bucket_of;
use super::message::DataKind;
use super::occupancy::{Row, Verdict};
use super::published::Published;
use super::rules::Mutation;
use super::{Node, Time};

/// A chunk of a source's data, as it arrives.
pub(super) struct Chunk {
    pub(super) round: u64,
    pub(super) kind: DataKind,
    pub(super) index: u32,
    pub(super) last: Option<ViewHash>,
    pub(super) groups: Vec<Group>,
}

/// What the sweep must know of a connection.
struct Source {
    slot: u32,
    /// Rows up to this version were said in the view that we have, too.
    watermark: Option<u64>,
    /// Whether no data of an earlier round can still arrive.
    steady: bool,
}

// Receiving.
impl<M: Clone> Node<M> {
    pub(super) fn handle_data(&self, from: &Peer, chunk: Chunk, now: Time) {
        let Some(slot) = self.slot_of(from) else { return };
        let repair = matches!(chunk.kind, DataKind::Repair(_));
        let accepted =
            if repair { self.accept_repair(from, &chunk) } else { self.accept_round(from, &chunk, now) };
        if !accepted {
            return;
        }
        for group in &chunk.groups {
            self.write_row(group, slot, chunk.round, true, now);
        }
        let rules = self.settings.rules;
        if chunk.last.is_some() {
            match &chunk.kind {
                DataKind::Snapshot if rules.breaks(Mutation::SnapshotKeepsOlder) => {}
                DataKind::Delta if !rules.breaks(Mutation::DeltaRemoves) => {}
                DataKind::Snapshot | DataKind::Delta => self.bury_older(slot, chunk.round, now, |_| true),
                DataKind::Repair(buckets) => {
                    self.bury_older(slot, chunk.round, now, |group| buckets.contains(&bucket_of(group).0));
                }
            }
        }
        if !repair {
            self.finish_chunk(from, &chunk, now);
        }
    }

    /// Whether this is the chunk that is due. One that was applied before is acknowledged again.
    fn accept_round(&self, from: &Peer, chunk: &Chunk, now: Time) -> bool {
        let careless = self.settings.rules.breaks(Mutation::OldRoundApplied);
        self.step(now, |coordinator, step| {
            let Some(record) = coordinator.record(from) else { return false };
            let under_way = record.incoming.filter(|incoming| incoming.round == chunk.round);
            if record.applied == chunk.round {
                record.data_ack = Some((chunk.round, chunk.index.saturating_add(1), true));
                step.effects.transmit(from);
                return false;
            }
            let newest = record.incoming.map_or(0, |incoming| incoming.round).max(record.applied);
            if chunk.round < newest && !careless {
                return false;
            }
            let due = under_way.map_or(0, |incoming| incoming.chunks);
            if chunk.index != due {
                if due > 0 {
                    record.data_ack = Some((chunk.round, due, false));
                    step.effects.transmit(from);
                }
                return false;
            }
            true
        })
    }

    /// A repair counts only between rounds: a round that is under way says more.
    fn accept_repair(&self, from: &Peer, chunk: &Chunk) -> bool {
        self.coordinator.with(|coordinator| {
            let Some(record) = coordinator.record(from) else { return false };
            if chunk.round < record.applied || record.incoming.is_some() {
                return false;
            }
            let under_way = record.repairing.filter(|repair| repair.round == chunk.round);
            if chunk.index != under_way.map_or(0, |repair| repair.chunks) {
                return false;
            }
            let next = Incoming { round: chunk.round, chunks: chunk.index.saturating_add(1) };
            record.repairing = chunk.last.is_none().then_some(next);
            true
        })
    }

    /// The rows are in the table: only now may the source count as agreeing.
    fn finish_chunk(&self, from: &Peer, chunk: &Chunk, now: Time) {
        self.step(now, |coordinator, step| {
            let Some(record) = coordinator.record(from) else { return };
            let chunks = chunk.index.saturating_add(1);
            // digests of a table that was still being filled say nothing
            record.seen_digests = [None, None];
            record.data_ack = Some((chunk.round, chunks, chunk.last.is_some()));
            step.effects.transmit(from);
            let Some(hash) = chunk.last else {
                record.incoming = Some(Incoming { round: chunk.round, chunks });
                return;
            };
            record.incoming = None;
            record.applied = chunk.round;
            coordinator.handle_agreement(from, hash, chunk.round, step);
        });
    }

    fn bury_older(&self, slot: u32, round: u64, now: Time, matches: impl Fn(&Group) -> bool) {
        for shard in &self.occupancy {
            shard.with(|shard| shard.bury_older(slot, round, now, &matches));
        }
    }

    pub(super) fn handle_repair_request(&self, from: &Peer, hash: ViewHash, mut buckets: Vec<u8>) {
        let wanted = self.coordinator.with(|coordinator| {
            let ours = coordinator.is_quiet() && coordinator.hash() == hash;
            coordinator.record(from).is_some_and(|r| ours && !r.is_owed() && r.repair.is_none())
        });
        if !wanted || self.settings.rules.breaks(Mutation::RepairsIgnored) {
            return;
        }
        buckets.truncate(256);
        // taken before the first shard is read: what a shard says later is newer
        let version = self.versions.next();
        self.chores.with(|chores| {
            chores.repairs.entry(from.node.clone()).or_insert(RepairScan {
                to: from.clone(),
                hash,
                version,
                buckets,
                walk: Walk::START,
                groups: Vec::new(),
            });
        });
        self.effects.with(super::Effects::work);
    }
}

// Background work.
impl<M: Clone> Node<M> {
    /// One bounded step of background work: the gather first, it is what others wait for. Says whether there
    /// is more.
    pub fn work(&self, now: Time) -> bool {
        if self.gather_step(now) {
            return true;
        }
        // a chore is taken out while its step runs: a second caller finds another one, or none
        if let Some(mut walk) = self.chores.with(|chores| chores.sweep.take()) {
            if self.sweep_step(&mut walk, now) {
                // unless a new sweep was asked for meanwhile
                self.chores.with(|chores| chores.sweep.get_or_insert(walk).at);
            }
        } else if let Some((node, mut repair)) = self.chores.with(|chores| chores.repairs.pop_first()) {
            if self.repair_step(&mut repair, now) {
                self.chores.with(|chores| chores.repairs.insert(node, repair));
            }
        } else if let Some(mut scan) = self.chores.with(|chores| chores.scan.take())
            && self.scan_step(&mut scan, now)
        {
            self.chores.with(|chores| chores.scan = Some(scan));
        }
        let more = self.chores.with(|chores| !chores.idle());
        self.debug_check();
        more
    }

    /// Gathers some groups of one shard. Says whether a gather was under way.
    fn gather_step(&self, now: Time) -> bool {
        let mut asked = Asked::default();
        let published = self.published.load();
        let gathering = self.step(now, |coordinator, step| {
            let Some(mut gather) = coordinator.gather.take() else { return false };
            let limit = self.settings.work_step;
            let Some(shard) = self.claims.get(gather.shard) else {
                coordinator.end_gather(step);
                return true;
            };
            let (gathered, done) = shard.with(|shard| {
                let gathered = shard.gather(limit, &self.context(&published, now), &mut asked);
                let done = shard.gathered_all();
                if done {
                    shard.end_gather();
                }
                (gathered, done)
            });
            let nodes = gather.plan.new.ring.nodes();
            for (place, group) in gathered {
                let record = nodes.get(place).and_then(|node| coordinator.peers.get_mut(node));
                if let Some((transfer, peer)) = record.and_then(|r| Some((r.transfer.as_mut()?, &r.peer))) {
                    transfer.groups.push(group);
                    if transfer.can_send(self.settings.chunk_groups) {
                        step.effects.transmit(peer);
                    }
                }
            }
            gather.shard += usize::from(done);
            coordinator.gather = Some(gather);
            true
        });
        self.carry_out(asked);
        gathering
    }

    /// Judges some groups of the table; says whether there is more.
    fn sweep_step(&self, walk: &mut Walk, now: Time) -> bool {
        let Some(shard) = self.occupancy.get(walk.shard) else { return false };
        let published = self.published.load();
        let sources = self.sources();
        let at = shard.with(|shard| {
            shard.sweep(walk.at, self.settings.work_step, now, |group, row| {
                self.judge(group, row, &published, &sources, now)
            })
        });
        walk.advance(at);
        walk.shard < self.occupancy.len()
    }

    fn sources(&self) -> Vec<Source> {
        let mut sources: Vec<Source> = self.coordinator.with(|coordinator| {
            let hash = coordinator.hash();
            let careless = self.settings.rules.breaks(Mutation::NoWatermark);
            let source = |record: &super::agreement::PeerRecord| {
                let (agreed, version) = match record.agreement {
                    Agreement::With { hash: theirs, version } => (Some(theirs), version),
                    Agreement::Unknown | Agreement::InTransition { .. } => (None, 0),
                };
                let watermark =
                    if careless { Some(u64::MAX) } else { (agreed == Some(hash)).then_some(version) };
                Source {
                    slot: record.slot,
                    watermark,
                    steady: agreed.is_some() && record.incoming.is_none() && record.repairing.is_none(),
                }
            };
            coordinator.peers.values().map(source).collect()
        });
        sources.sort_unstable_by_key(|source| source.slot);
        sources
    }

    fn judge(
        &self,
        group: &Group,
        row: Row,
        published: &Published,
        sources: &[Source],
        now: Time,
    ) -> Verdict {
        let source = sources.binary_search_by_key(&row.slot, |source| source.slot).ok();
        let Some(source) = source.and_then(|place| sources.get(place)) else { return Verdict::Drop };
        if !row.present() {
            let old = row.written().saturating_add(self.settings.tombstone_ttl) <= now;
            let careless = self.settings.rules.breaks(Mutation::TombstoneDroppedEarly);
            return if old && (source.steady || careless) { Verdict::Drop } else { Verdict::Keep };
        }
        let elsewhere = *published.router(group.as_bytes()) != self.me;
        // a row above the watermark was said in a view that we do not know yet, and may be right there
        if elsewhere && source.watermark.is_some_and(|watermark| row.version() <= watermark) {
            Verdict::Bury
        } else {
            Verdict::Keep
        }
    }

    /// Collects some groups of one shard for a repair; says whether there is more.
    fn repair_step(&self, repair: &mut RepairScan, now: Time) -> bool {
        if let Some(shard) = self.claims.get(repair.walk.shard) {
            let published = self.published.load();
            let mut groups = std::mem::take(&mut repair.groups);
            let at = shard.with(|shard| {
                shard.visit_claimed(repair.walk.at, 4 * self.settings.work_step, |group| {
                    if repair.wants(group) && *published.router(group.as_bytes()) == repair.to {
                        groups.push(group.clone());
                    }
                })
            });
            repair.groups = groups;
            repair.walk.advance(at);
            return true;
        }
        self.step(now, |coordinator, step| {
            let current = coordinator.is_quiet() && coordinator.hash() == repair.hash;
            let Some(record) = coordinator.record(&repair.to).filter(|r| current && !r.is_owed()) else {
                return;
            };
            let kind = DataKind::Repair(std::mem::take(&mut repair.buckets));
            let mut transfer = Transfer::new(repair.version, kind, false, now);
            transfer.groups = std::mem::take(&mut repair.groups);
            transfer.complete = true;
            record.repair = Some(Box::new(transfer));
            step.effects.transmit(&repair.to);
        });
        false
    }

    /// Adds some groups to the digests; at the end, beats. Says whether there is more.
    fn scan_step(&self, scan: &mut Scan, now: Time) -> bool {
        let limit = 4 * self.settings.work_step;
        if let Some(shard) = self.claims.get(scan.held_walk.shard) {
            let published = self.published.load();
            let held = &mut scan.held;
            let at = shard.with(|shard| {
                shard.visit_claimed(scan.held_walk.at, limit, |group| {
                    let router = published.router(group.as_bytes());
                    if *router != self.me {
                        held.entry(router.node.clone()).or_default().add(group);
                    }
                })
            });
            scan.held_walk.advance(at);
            return true;
        }
        if let Some(shard) = self.occupancy.get(scan.seen_walk.shard) {
            let published = self.published.load();
            let seen = &mut scan.seen;
            let at = shard.with(|shard| {
                shard.visit(scan.seen_walk.at, limit, |group, row| {
                    // rows of groups that are routed elsewhere are the sweep's
                    if row.present() && *published.router(group.as_bytes()) == self.me {
                        seen.entry(row.slot).or_default().add(group);
                    }
                })
            });
            scan.seen_walk.advance(at);
            return true;
        }
        self.step(now, |coordinator, step| coordinator.beat(&scan.held, &scan.seen, step));
        false
    }
}
