//! As the primary: streams to the owners and to those who shall become owners, writes under way, and the config.

use super::data::{OVERHEAD, write_len};
use super::{
    BTreeMap, BTreeSet, CopyEffect, CopyMessage, Duration, Epoch, Peer, StrongContext, StrongCopy, VecDeque,
    Version, WriteOp,
};
use crate::cache::error::{Applied, CacheError};
use crate::cache::operation::Reply;
use crate::cache::replica::{CacheEvent, Mutation, Slot, entry_len};
use crate::cache::store::{Cursor, Write};
use crate::transport::Lane;
use std::sync::Arc;

/// How many bytes of writes may be logged and not committed; more wait.
const WINDOW: usize = 1 << 20;
/// About how many bytes of entries one message has.
const MESSAGE: usize = 256 << 10;
/// How many writes may wait.
const QUEUE: usize = 4096;
/// And how many bytes of them, those that are logged included: none is taken in once so many wait.
const QUEUE_BYTES: usize = 16 << 20;

#[derive(Debug)]
struct Queued {
    ticket: Option<u64>,
    op: WriteOp,
    deadline: Duration,
    bytes: usize,
}

/// The writes that are not begun.
#[derive(Debug, Default)]
struct Queue {
    writes: VecDeque<Queued>,
    bytes: usize,
}

impl Queue {
    fn push(&mut self, write: Queued) {
        self.bytes += write.bytes;
        self.writes.push_back(write);
    }

    fn pop(&mut self) -> Option<Queued> {
        let write = self.writes.pop_front()?;
        self.bytes -= write.bytes;
        Some(write)
    }

    fn retain(&mut self, mut kept: impl FnMut(&Queued) -> bool) {
        let bytes = &mut self.bytes;
        self.writes.retain(|write| {
            let kept = kept(write);
            *bytes -= if kept { 0 } else { write.bytes };
            kept
        });
    }
}

#[derive(Debug)]
struct Running {
    ticket: Option<u64>,
    op: WriteOp,
    deadline: Duration,
    last: u64,
    removed: u64,
}

#[derive(Debug)]
enum Phase {
    /// It was asked where its copy is.
    Asked,
    /// It takes in a snapshot.
    Filling { cursor: Option<Cursor>, under_way: bool, done: bool, slot: Option<Slot> },
    /// It has a whole copy.
    Whole,
}

/// The stream to one peer.
#[derive(Debug)]
pub(super) struct Stream {
    number: u64,
    phase: Phase,
    sent: u64,
    logged: u64,
    told_commit: Option<u64>,
}

/// What a primary knows beside the data.
#[derive(Debug)]
pub(super) struct Lead {
    /// The number of the first entry of this primary: it serves when that is committed.
    opening: u64,
    effective: bool,
    pub(super) streams: BTreeMap<Peer, Stream>,
    queue: Queue,
    running: VecDeque<Running>,
    /// Those who may be owners already, for all this node knows.
    maybe_owners: BTreeSet<Peer>,
    /// It hands over: nothing new is begun.
    pausing: bool,
    /// Somebody else may be the primary already.
    given_up: bool,
}

impl Lead {
    pub(super) fn is_serving(&self) -> bool {
        self.effective && !self.given_up
    }

    pub(super) fn maybe_owners(&self) -> impl Iterator<Item = &Peer> {
        self.maybe_owners.iter()
    }

    pub(super) fn check(&self) -> Result<(), String> {
        let rises = self.running.iter().zip(self.running.iter().skip(1)).all(|(a, b)| a.last < b.last);
        let known = self
            .streams
            .values()
            .all(|stream| stream.logged <= stream.sent || matches!(stream.phase, Phase::Asked));
        let bytes: usize = self.queue.writes.iter().map(|write| write.bytes).sum();
        if bytes != self.queue.bytes {
            return Err("the bytes that wait are miscounted".into());
        }
        if rises && known { Ok(()) } else { Err("writes or streams of a primary are out of order".into()) }
    }

    pub(super) fn next_timeout(&self) -> Option<Duration> {
        let queued = self.queue.writes.iter().filter(|op| op.ticket.is_some()).map(|op| op.deadline);
        let running = self.running.iter().filter(|op| op.ticket.is_some()).map(|op| op.deadline);
        let pieces = self.streams.values().filter_map(|stream| match &stream.phase {
            Phase::Filling { slot: Some(slot), .. } => Some(slot.at),
            Phase::Filling { .. } | Phase::Asked | Phase::Whole => None,
        });
        queued.chain(running).chain(pieces).min()
    }
}

/// About how many bytes an operation has that waits.
fn op_len(op: &WriteOp) -> usize {
    let each = |len: usize| OVERHEAD + len;
    match op {
        WriteOp::Put(records) => records.iter().map(|record| each(record.encoded_len())).sum(),
        WriteOp::DeleteKeys(keys) => OVERHEAD + keys.iter().map(|key| key.encoded_len()).sum::<usize>(),
        WriteOp::DeleteMatch(pattern) => each(pattern.wire_len()),
        WriteOp::DeleteAll => OVERHEAD,
    }
}

// Beginning and end.
impl StrongCopy {
    pub(super) fn begin_to_lead(&mut self, ctx: StrongContext<'_>) {
        let (Some(config), Some(data)) = (&self.config, &mut self.data) else { return };
        let opening = data.end() + 1;
        data.log(Version::new(config.epoch.clone(), opening), Arc::new(Write::Nothing));
        self.lead = Some(Box::new(Lead {
            opening,
            effective: ctx.base.rules.breaks(Mutation::ServeBeforeAll),
            streams: BTreeMap::new(),
            queue: Queue::default(),
            running: VecDeque::new(),
            maybe_owners: BTreeSet::new(),
            pausing: false,
            given_up: false,
        }));
        self.open_streams(ctx);
        self.advance(ctx);
    }

    /// A new config, and this node is still the primary: all that it has wished is decided or void.
    pub(super) fn go_on_leading(&mut self) {
        if let Some(lead) = &mut self.lead {
            lead.maybe_owners.clear();
            (lead.pausing, lead.given_up) = (false, false);
        }
    }

    pub(super) fn stop_leading(&mut self) {
        let Some(lead) = self.lead.take() else { return };
        let need = self.config.as_ref().map_or(1, |config| config.owners.len());
        for ticket in lead.running.into_iter().filter_map(|op| op.ticket) {
            // the next primary may have it
            let result = Err(CacheError::NotEnoughAcks { got: 1, need });
            self.effects.push_back(CopyEffect::Written { ticket, result });
        }
        for ticket in lead.queue.writes.into_iter().filter_map(|op| op.ticket) {
            let result = Err(CacheError::NotActive { partition: self.id });
            self.effects.push_back(CopyEffect::Written { ticket, result });
        }
    }
}

// Who owns.
impl StrongCopy {
    /// Does the next thing that the partition needs; whether something is left to do.
    pub(super) fn tend(&mut self, ctx: StrongContext<'_>) -> bool {
        self.open_streams(ctx);
        self.advance(ctx);
        let (me, live) = (ctx.base.me, &ctx.base.members.live);
        let (Some(config), Some(lead), Some(data)) = (&self.config, &mut self.lead, &self.data) else {
            return false;
        };
        let can_decide = ctx.consensus.can_decide();
        let living: Vec<_> =
            config.owners.iter().filter(|o| *o == me || live.contains(*o)).cloned().collect();
        if living.len() < config.owners.len() {
            if let Some(next) = self.next(me, living).filter(|_| can_decide) {
                self.propose(next, ctx);
            }
            return true;
        }
        if !lead.effective {
            return true;
        }
        let missing: Vec<_> = self.wanted.iter().filter(|peer| !config.has(peer)).cloned().collect();
        if !missing.is_empty() {
            lead.pausing = false;
            let ready = missing.into_iter().find(|peer| {
                lead.streams
                    .get(peer)
                    .is_some_and(|s| matches!(s.phase, Phase::Whole) && s.logged >= data.applied())
            });
            if let Some(new) = ready.filter(|_| can_decide && !lead.given_up) {
                // from here on nothing is committed without it
                lead.maybe_owners.insert(new.clone());
                let mut owners = config.owners.clone();
                owners.push(new);
                if let Some(next) = self.next(me, owners) {
                    self.propose(next, ctx);
                }
            }
            return true;
        }
        let first = self.wanted.first().cloned();
        if let Some(heir) = first.filter(|first| first != me && config.has(first)) {
            lead.pausing = true;
            let idle = data.tail_len() == 0 && lead.running.is_empty();
            if idle && can_decide && (lead.given_up || lead.maybe_owners.is_empty()) {
                lead.given_up = true;
                let mut owners = vec![heir.clone()];
                owners.extend(config.owners.iter().filter(|owner| **owner != heir).cloned());
                if let Some(next) = self.next(&heir, owners) {
                    self.propose(next, ctx);
                }
                self.effects.push_back(CopyEffect::Changed);
            }
            return true;
        }
        lead.pausing = false;
        let extra = self.wanted.contains(me) && config.owners.len() > self.wanted.len();
        if extra && can_decide && !lead.given_up {
            let mut owners = vec![me.clone()];
            owners.extend(self.wanted.iter().filter(|peer| *peer != me).cloned());
            if let Some(next) = self.next(me, owners) {
                self.propose(next, ctx);
            }
        }
        // until what was given up is decided, one way or the other
        extra || lead_is_waiting(self.lead.as_deref())
    }

    /// Streams to everybody who is or shall be an owner, and to nobody else.
    fn open_streams(&mut self, ctx: StrongContext<'_>) {
        let (Some(config), Some(lead)) = (&self.config, &mut self.lead) else { return };
        let up = &ctx.base.members.up;
        let shall = self.wanted.iter().filter(|_| lead.effective);
        let desired: BTreeSet<&Peer> = config
            .owners
            .iter()
            .chain(&lead.maybe_owners)
            .chain(shall)
            .filter(|peer| *peer != ctx.base.me)
            .collect();
        let unneeded: Vec<_> = lead.streams.keys().filter(|peer| !desired.contains(peer)).cloned().collect();
        for peer in unneeded {
            let Some(stream) = lead.streams.remove(&peer) else { continue };
            let message = CopyMessage::Drop { stream: stream.number };
            self.effects.push_back(CopyEffect::Send { to: peer, lane: Lane::Bulk, message });
        }
        let missing: Vec<_> =
            desired.into_iter().filter(|p| up.contains(*p) && !lead.streams.contains_key(*p)).collect();
        for peer in missing {
            self.last_stream += 1;
            let number = self.last_stream;
            let stream = Stream { number, phase: Phase::Asked, sent: 0, logged: 0, told_commit: None };
            lead.streams.insert(peer.clone(), stream);
            let message = CopyMessage::Open { stream: number, config: config.clone() };
            self.effects.push_back(CopyEffect::Send { to: peer.clone(), lane: Lane::Bulk, message });
        }
    }
}

fn lead_is_waiting(lead: Option<&Lead>) -> bool {
    lead.is_some_and(|lead| lead.given_up || !lead.maybe_owners.is_empty())
}

// Streams.
impl StrongCopy {
    fn stream(&mut self, peer: &Peer, number: u64) -> Option<&mut Stream> {
        self.lead.as_mut()?.streams.get_mut(peer).filter(|stream| stream.number == number)
    }

    pub(super) fn handle_opened(
        &mut self,
        from: &Peer,
        number: u64,
        whole: bool,
        applied: Option<&Version>,
        tail: &[(Epoch, u64)],
        ctx: StrongContext<'_>,
    ) {
        let Some(data) = &self.data else { return };
        let common = data.common(applied, tail).filter(|_| whole);
        let (header, base) = (data.store.snapshot_header(), data.applied());
        let Some(stream) = self.stream(from, number).filter(|stream| matches!(stream.phase, Phase::Asked))
        else {
            return;
        };
        if let Some(common) = common {
            (stream.sent, stream.logged, stream.phase) = (common, common, Phase::Whole);
        } else {
            stream.phase = Phase::Filling { cursor: None, under_way: false, done: false, slot: None };
            (stream.sent, stream.logged) = (base, base);
            let message = CopyMessage::Snapshot { stream: number, header };
            self.effects.push_back(CopyEffect::Send { to: from.clone(), lane: Lane::Bulk, message });
        }
        self.advance(ctx);
        self.review(ctx);
    }

    pub(super) fn handle_piece_in(&mut self, from: &Peer, number: u64, ctx: StrongContext<'_>) {
        let Some(stream) = self.stream(from, number) else { return };
        let Phase::Filling { under_way, done, .. } = &mut stream.phase else { return };
        if !std::mem::take(under_way) {
            return;
        }
        if *done {
            stream.phase = Phase::Whole;
            self.advance(ctx);
            self.review(ctx);
        } else {
            self.pump(ctx);
        }
    }

    pub(super) fn handle_logged(&mut self, from: &Peer, number: u64, end: u64, ctx: StrongContext<'_>) {
        let Some(stream) = self.stream(from, number) else { return };
        if end > stream.sent {
            return;
        }
        stream.logged = stream.logged.max(end);
        let waited = self.lead.as_ref().is_some_and(|lead| lead.pausing || !lead.effective);
        self.advance(ctx);
        if waited
            || self.wanted.iter().any(|peer| peer == from)
                && !self.config.as_ref().is_some_and(|c| c.has(from))
        {
            self.review(ctx);
        }
    }

    /// Commits what all owners have, begins what has room now, and sends.
    fn advance(&mut self, ctx: StrongContext<'_>) {
        loop {
            self.begin_queued(ctx);
            if !self.commit(ctx) {
                break;
            }
        }
        self.pump(ctx);
    }

    /// The owners that have not confirmed all writes, and how many they lack, if this node is the primary.
    pub(crate) fn behind(&self) -> Option<Vec<(Peer, u64)>> {
        let (config, lead, data) = (self.config.as_ref()?, self.lead.as_ref()?, self.data.as_ref()?);
        let primary = &config.epoch.primary;
        let logged = |owner: &Peer| match lead.streams.get(owner) {
            Some(Stream { phase: Phase::Whole, logged, .. }) => *logged,
            Some(_) | None => 0,
        };
        let others = config.owners.iter().filter(|owner| *owner != primary);
        let lacks = others.map(|owner| (owner.clone(), data.end().saturating_sub(logged(owner))));
        Some(lacks.filter(|(_, writes)| *writes > 0).collect())
    }

    /// Whether anything was committed.
    fn commit(&mut self, ctx: StrongContext<'_>) -> bool {
        // what is committed leaves the log: whoever is still being filled has to have been sent it before
        self.pump(ctx);
        let (Some(config), Some(lead), Some(data)) = (&self.config, &mut self.lead, &mut self.data) else {
            return false;
        };
        let others = config.owners.iter().chain(&lead.maybe_owners).filter(|owner| *owner != ctx.base.me);
        let logged = |peer: &Peer| match lead.streams.get(peer) {
            Some(Stream { phase: Phase::Whole, logged, .. }) => *logged,
            // a copy with holes does not count
            Some(_) | None => 0,
        };
        let mut ends: Vec<u64> = others.map(logged).collect();
        ends.sort_unstable();
        let mut all = ends.first().copied().unwrap_or(u64::MAX).min(data.end());
        if ctx.base.rules.breaks(Mutation::CommitBeforeAll) {
            all = data.end();
        }
        // an owner that has gone since a write was begun has taken its copy along: whoever counts on `min_copies` of them is
        // not told that they are there
        let (got, need) = (config.owners.len(), ctx.base.config.min_copies);
        let before = data.applied();
        while data.applied() < all {
            let Some((version, removed)) = data.apply_next(ctx.base.config, ctx.base.now) else { break };
            let Some(running) = lead.running.front_mut().filter(|running| version.seq <= running.last) else {
                continue;
            };
            running.removed += removed;
            if running.last == version.seq {
                let Some(done) = lead.running.pop_front() else { continue };
                let result = match got < need {
                    true => Err(CacheError::NotEnoughAcks { got, need }),
                    false => Ok(Reply { outcome: done.op.outcome(done.removed), version: Some(version) }),
                };
                self.effects.extend(done.ticket.map(|ticket| CopyEffect::Written { ticket, result }));
            }
        }
        if !lead.effective && data.applied() >= lead.opening {
            lead.effective = true;
            let (partition, epoch) = (self.id, config.epoch.clone());
            self.effects.push_back(CopyEffect::Event(CacheEvent::Primary { partition, epoch }));
            self.effects.push_back(CopyEffect::Changed);
            // now those who shall become owners
            self.review_at = Some(ctx.base.now);
        }
        data.applied() > before
    }

    /// Sends everybody what they have not got: pieces of the snapshot, entries, how far all is committed.
    pub(super) fn pump(&mut self, ctx: StrongContext<'_>) {
        let (Some(lead), Some(data)) = (&mut self.lead, &self.data) else { return };
        let (end, commit, now) = (data.end(), data.applied(), ctx.base.now);
        for (peer, stream) in &mut lead.streams {
            let mut send = |message| {
                self.effects.push_back(CopyEffect::Send { to: peer.clone(), lane: Lane::Bulk, message })
            };
            match &mut stream.phase {
                Phase::Asked => continue,
                Phase::Whole => {}
                Phase::Filling { cursor, under_way, done, slot } => {
                    if !*under_way && !*done {
                        let (chunk, rate) = (ctx.base.config.chunk_bytes, ctx.base.config.transfer_rate);
                        let turn = slot.take().unwrap_or_else(|| {
                            let left = usize::try_from(data.store.bytes()).unwrap_or(usize::MAX);
                            ctx.base.budget.reserve(now, left.min(chunk), rate)
                        });
                        if turn.at > now {
                            *slot = Some(turn);
                        } else {
                            let piece = data.store.chunk(cursor.as_ref(), chunk);
                            turn.spend(piece.entries.iter().map(entry_len).sum(), rate);
                            (*done, *under_way) = (piece.next.is_none(), true);
                            *cursor = piece.next;
                            send(CopyMessage::Piece {
                                stream: stream.number,
                                entries: piece.entries,
                                last: *done,
                            });
                        }
                    }
                }
            }
            debug_assert!(stream.sent >= commit, "what was committed was not sent");
            while (commit..end).contains(&stream.sent) || stream.told_commit != Some(commit) {
                let (mut bytes, after) = (0, stream.sent);
                let fits = |pending: &&super::data::Pending| {
                    let first = bytes == 0;
                    bytes += pending.bytes;
                    first || bytes <= MESSAGE
                };
                let entries: Vec<_> = data
                    .after(after)
                    .take_while(fits)
                    .map(|pending| (pending.version.clone(), (*pending.write).clone()))
                    .collect();
                stream.sent += entries.len() as u64;
                stream.told_commit = Some(commit);
                send(CopyMessage::Append { stream: stream.number, after, entries, commit });
            }
        }
    }
}

// Writes.
impl StrongCopy {
    /// Begins a write, if this node serves; how it ended comes as [`CopyEffect::Written`].
    ///
    /// # Errors
    /// Nothing has changed then: [`CacheError::NotActive`], [`CacheError::NoQuorum`]; [`CacheError::TooLarge`] for a put
    /// that does not fit with what is there; [`CacheError::Busy`] if too much waits, or if it may not fit with what waits,
    /// of which nobody knows yet what it replaces.
    pub(crate) fn write(
        &mut self,
        ticket: u64,
        op: &WriteOp,
        deadline: Duration,
        ctx: StrongContext<'_>,
    ) -> Result<(), CacheError> {
        let partition = self.id;
        let (Some(config), Some(lead), Some(data)) = (&self.config, &mut self.lead, &self.data) else {
            return Err(CacheError::NotActive { partition });
        };
        if !lead.is_serving() {
            return Err(CacheError::NotActive { partition });
        }
        let (got, need) = (config.owners.len(), ctx.base.config.min_copies);
        if got < need {
            return Err(CacheError::NoQuorum { got, need });
        }
        let (waits, bytes) = (data.tail_bytes() + lead.queue.bytes, op_len(op));
        if let WriteOp::Put(_) = op {
            let (given, max) = (data.store.bytes() + bytes as u64, ctx.base.config.max_partition_bytes);
            if given > max {
                let (what, option) = ("the partition in bytes".into(), "max_partition_bytes".into());
                return Err(CacheError::TooLarge { what, given, max, option });
            }
            if waits > 0 && given.saturating_add(waits as u64) > max {
                return Err(CacheError::Busy);
            }
        }
        if lead.queue.writes.len() >= QUEUE || waits >= QUEUE_BYTES {
            return Err(CacheError::Busy);
        }
        lead.queue.push(Queued { ticket: Some(ticket), op: op.clone(), deadline, bytes });
        self.advance(ctx);
        Ok(())
    }

    fn begin_queued(&mut self, ctx: StrongContext<'_>) {
        loop {
            let (Some(config), Some(lead), Some(data)) = (&self.config, &mut self.lead, &mut self.data)
            else {
                return;
            };
            let slowest = lead.streams.values().filter(|stream| !matches!(stream.phase, Phase::Asked));
            let behind = slowest.map(|stream| data.end().saturating_sub(stream.logged)).max().unwrap_or(0);
            let room = data.tail_bytes() < WINDOW && behind < QUEUE as u64;
            // what a pattern finds depends on all writes before it
            let alone = matches!(lead.queue.writes.front(), Some(Queued { op: WriteOp::DeleteMatch(_), .. }));
            if lead.pausing || lead.given_up || !room || (alone && data.tail_len() > 0) {
                return;
            }
            let Some(Queued { ticket, op, deadline, .. }) = lead.queue.pop() else { return };
            // owners may have gone while it waited
            let (got, need) = (config.owners.len(), ctx.base.config.min_copies);
            let plan = match got < need {
                true => Err(CacheError::NoQuorum { got, need }),
                false => op.plan(&data.store),
            };
            let writes = match plan {
                Ok(writes) => writes,
                Err(error) => {
                    let written = ticket.map(|ticket| CopyEffect::Written { ticket, result: Err(error) });
                    self.effects.extend(written);
                    continue;
                }
            };
            for write in writes {
                debug_assert!(write_len(&write) > 0);
                let version = Version::new(config.epoch.clone(), data.end() + 1);
                data.log(version, Arc::new(write));
            }
            lead.running.push_back(Running { ticket, op, deadline, last: data.end(), removed: 0 });
            // a sole owner is done with it at once
            if config.owners.len() == 1 && lead.maybe_owners.is_empty() {
                self.commit(ctx);
            }
        }
    }

    /// Whoever waited has gone; the write goes on.
    pub(crate) fn forget(&mut self, ticket: u64) {
        let Some(lead) = &mut self.lead else { return };
        lead.queue.retain(|op| op.ticket != Some(ticket));
        lead.running.iter_mut().filter(|op| op.ticket == Some(ticket)).for_each(|op| op.ticket = None);
    }

    /// Ends what has waited too long.
    pub(super) fn expire(&mut self, now: Duration) {
        let (Some(config), Some(lead)) = (&self.config, &mut self.lead) else { return };
        let mut ended = Vec::new();
        lead.queue.retain(|op| {
            let over = op.deadline <= now;
            if let Some(ticket) = op.ticket.filter(|_| over) {
                ended.push((ticket, CacheError::Timeout { applied: Applied::No }));
            }
            !over
        });
        let need = config.owners.len();
        for op in lead.running.iter_mut().filter(|op| op.deadline <= now) {
            let has = |owner: &&Peer| lead.streams.get(*owner).is_some_and(|stream| stream.logged >= op.last);
            let got = 1 + config.owners.iter().filter(has).count();
            // it stays logged, and may be committed yet
            ended.extend(op.ticket.take().map(|ticket| (ticket, CacheError::NotEnoughAcks { got, need })));
        }
        self.effects.extend(
            ended.into_iter().map(|(ticket, error)| CopyEffect::Written { ticket, result: Err(error) }),
        );
    }
}
