//! The ordered stream from the primary to one owner or learner.
//!
//! ```text
//!  NewConfig ─▶ Position ─▶ the log has what is missing:  Append, Append, ..        ◀─ Ack, Ack
//!                           it has not:                   SnapshotBegin, Chunk ..,  with Append between
//!                           the copy has what was lost:   Want, Offer .., OfferAck, then Position again
//! ```
//!
//! A stream begins with a question, whatever was sent to that peer before: everything in flight is lost when a link
//! breaks. What is unacknowledged is bounded by a window, and of a snapshot one piece is on its way.

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;

use super::history::is_prefix;
use super::log::Log;
use super::merge::Merging;
use super::message::ReplicaMessage;
use super::primary::enough_nodes;
use super::snapshot::Sending;
use super::{Context, Mutation, Replica, Role};
use crate::cache::store::{SnapshotHeader, Write};
use crate::cache::version::{Epoch, Lineage, Version};
use crate::transport::Lane;
use crate::types::Peer;

/// How many bytes of writes may be unacknowledged.
const WINDOW: usize = 1 << 20;
/// A copy that is begun anew and larger than this is filled by a snapshot, within the transfer rate, though the log may
/// have all of it.
const SMALL_COPY: u64 = 64 << 10;

/// How far a stream is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// It waits for the position of the other side.
    Asked,
    /// Writes flow.
    Open,
    /// The other side has writes that were lost here: they are merged first.
    Diverged,
}

/// One stream.
#[derive(Debug)]
pub(super) struct Stream {
    number: u64,
    /// Whether the other side follows this epoch.
    pub(super) adopted: bool,
    /// Whether the config of this epoch was sent.
    told: bool,
    pub(super) phase: Phase,
    /// Something is said though no write is: an empty copy that it is whole, an owner what it may forget.
    greet: bool,
    /// Up to where all owners have everything, as was last said.
    told_have: Option<Version>,
    /// The last write that was sent.
    pub(super) next: Option<Version>,
    /// The last write that the other side has.
    acked: Option<Version>,
    /// Whether its copy is whole.
    pub(super) whole: bool,
    in_flight: VecDeque<(u64, usize)>,
    bytes: usize,
    pub(super) snapshot: Option<Sending>,
    /// The number of the next piece of a snapshot; it goes on from one snapshot to the next.
    pub(super) pieces: u64,
}

impl Stream {
    fn new(number: u64) -> Self {
        Self {
            number,
            adopted: false,
            told: false,
            phase: Phase::Asked,
            greet: false,
            told_have: None,
            next: None,
            acked: None,
            whole: false,
            in_flight: VecDeque::new(),
            bytes: 0,
            snapshot: None,
            pieces: 0,
        }
    }

    /// Whether what it has acknowledged counts.
    pub(super) fn counts(&self) -> bool {
        self.adopted && self.whole
    }

    pub(super) fn acked_seq(&self) -> u64 {
        self.acked.as_ref().map_or(0, |acked| acked.seq)
    }

    /// Whether the other side has all that has been written.
    pub(super) fn has_all(&self, end: Option<&Version>) -> bool {
        self.counts() && self.phase == Phase::Open && self.acked.as_ref() == end
    }

    /// Whether the other side has everything but for what is on its way.
    pub(super) fn is_close(&self, end: Option<&Version>) -> bool {
        self.counts() && self.phase == Phase::Open && self.snapshot.is_none() && self.next.as_ref() == end
    }

    pub(super) fn next_epoch(&mut self) {
        self.adopted = false;
        self.told = false;
        if self.phase != Phase::Open {
            self.phase = Phase::Asked;
        }
    }

    pub(super) fn forget_in_flight(&mut self) {
        self.in_flight.clear();
        self.bytes = 0;
    }

    fn restart(&mut self) {
        self.forget_in_flight();
        self.snapshot = None;
        self.greet = false;
        self.told_have = None;
    }

    /// Whether the other side has still to hear up to where all owners have everything.
    pub(super) fn is_untold(&self, all_have: &Option<Version>) -> bool {
        self.counts() && self.phase == Phase::Open && self.told_have != *all_have
    }

    pub(super) fn check(&self, end: Option<&Version>) -> Result<(), String> {
        let bytes: usize = self.in_flight.iter().map(|(_, bytes)| bytes).sum();
        if bytes != self.bytes {
            return Err(format!("it counts {} of {bytes} bytes in flight", self.bytes));
        }
        let largest = self.in_flight.iter().map(|(_, bytes)| *bytes).max().unwrap_or(0);
        if bytes > WINDOW + largest {
            return Err(format!("{bytes} bytes are in flight"));
        }
        if self.phase == Phase::Open && self.next.as_ref() > end {
            return Err(format!("{:?} was sent, and the copy ends with {end:?}", self.next));
        }
        Ok(())
    }
}

/// Where a copy is, as its node says.
pub(super) struct Place {
    pub(super) header: SnapshotHeader,
    pub(super) whole: bool,
    pub(super) follows: bool,
    pub(super) stream: u64,
}

impl Replica {
    /// Opens a stream to everybody who needs one, and closes the others.
    pub(super) fn keep_streams(&mut self, ctx: Context<'_>) {
        let Role::Leading(leading) = &mut self.role else { return };
        let old = leading.config.before.iter().flatten().filter(|_| !leading.effective);
        let peers = leading.config.owners.iter().chain(old).chain(&self.wanted);
        let peers: BTreeSet<&Peer> =
            peers.filter(|peer| *peer != ctx.me && ctx.members.reach(peer)).collect();
        let lives = |peer: &Peer| ctx.members.live.contains(peer) && ctx.rules.breaks(Mutation::OutOfOrder);
        let announced = &mut leading.announced;
        leading.streams.retain(|peer, _| {
            let kept = peers.contains(peer) || lives(peer);
            if !kept {
                // it has a copy, and may have been told before it had one
                announced.insert(peer.clone(), false);
            }
            kept
        });
        let new: Vec<Peer> =
            peers.into_iter().filter(|peer| !leading.streams.contains_key(*peer)).cloned().collect();
        for peer in new {
            self.streams += 1;
            leading.streams.insert(peer, Stream::new(self.streams));
        }
        let untold: Vec<(Peer, bool, u64)> = leading
            .streams
            .iter_mut()
            .filter(|(_, stream)| !stream.told)
            .map(|(peer, stream)| {
                stream.told = true;
                (peer.clone(), stream.phase == Phase::Open, stream.number)
            })
            .collect();
        if untold.is_empty() {
            return;
        }
        let (config, since, effective) = (leading.config.clone(), leading.since.clone(), leading.effective);
        let lineage = leading.history(&self.store);
        for (peer, goes_on, stream) in untold {
            let (config, since, lineage) = (config.clone(), since.clone(), lineage.clone());
            let message = ReplicaMessage::NewConfig { config, lineage, since, effective, goes_on, stream };
            self.send(&peer, Lane::Bulk, message);
        }
    }

    /// Where a copy is that follows this epoch, or one that is no owner's any more.
    pub(super) fn on_position(&mut self, from: &Peer, epoch: &Epoch, place: Place, ctx: Context<'_>) {
        let Role::Leading(leading) = &mut self.role else { return };
        let Place { header, whole, follows, stream: number } = place;
        if leading.config.epoch != *epoch || !header.lineage.is_sound() || from == ctx.me {
            return;
        }
        let history = leading.history(&self.store);
        let diverged = whole && !is_prefix(&history, self.store.applied(), header.applied.as_ref());
        leading.merges.remove(from);
        leading.waiting.forget_merges_of(from);
        let follows = follows && leading.streams.get(from).is_none_or(|stream| stream.number == number);
        match leading.streams.get_mut(from) {
            // it hears of the stream in a moment, and answers once more
            Some(stream) if !follows && stream.phase == Phase::Asked => {}
            Some(stream) if !follows => {
                stream.restart();
                stream.whole = false;
                stream.phase = Phase::Asked;
                stream.told = false;
            }
            Some(stream) => {
                stream.adopted = true;
                stream.restart();
                stream.whole = whole && !diverged;
                if diverged {
                    stream.phase = Phase::Diverged;
                    leading.merges.insert(from.clone(), Merging::new(header));
                } else {
                    let applied = header.applied.filter(|_| whole);
                    stream.phase = Phase::Open;
                    stream.acked = applied.clone();
                    let by_log = applied.is_some() || self.store.bytes() <= SMALL_COPY;
                    stream.place(applied, by_log, &self.log, &history, self.store.applied());
                }
            }
            None if diverged => {
                leading.merges.insert(from.clone(), Merging::new(header));
            }
            // all wanted owners are active: nobody needs it
            None if leading.settled => {
                let epoch = epoch.clone();
                // in order with a stream that may begin after it
                self.send(from, Lane::Bulk, ReplicaMessage::Release { epoch });
            }
            None => {
                // told again when they are
                leading.announced.insert(from.clone(), false);
            }
        }
    }

    pub(super) fn on_ack(&mut self, from: &Peer, epoch: &Epoch, end: Option<Version>, whole: bool) {
        let Role::Leading(leading) = &mut self.role else { return };
        let Some(stream) = leading.streams.get_mut(from) else { return leading.tell_again(from) };
        if leading.config.epoch != *epoch {
            return;
        }
        stream.adopted = true;
        if stream.phase != Phase::Open || end > stream.next {
            return;
        }
        stream.whole = whole;
        let seq = end.as_ref().map_or(0, |end| end.seq);
        while let Some((first, bytes)) = stream.in_flight.front().copied().filter(|(first, _)| *first <= seq)
        {
            stream.in_flight.pop_front();
            stream.bytes -= bytes;
            let _ = first;
        }
        stream.acked = end;
        if !whole && stream.snapshot.is_none() && stream.in_flight.is_empty() {
            // all that was sent has arrived, and its copy is not whole: it is asked anew what it has
            stream.restart();
            stream.phase = Phase::Asked;
            stream.told = false;
        }
    }

    /// Sends what the windows allow.
    pub(super) fn pump(&mut self, ctx: Context<'_>) {
        let Role::Leading(leading) = &self.role else { return };
        let open = leading.streams.iter().filter(|(_, stream)| stream.phase == Phase::Open);
        let peers: Vec<Peer> = open.map(|(peer, _)| peer.clone()).collect();
        let all_have = if peers.is_empty() { None } else { self.all_have(ctx) };
        for peer in peers {
            self.pump_one(&peer, all_have.as_ref(), ctx);
            self.send_snapshot(&peer, ctx);
        }
    }

    fn pump_one(&mut self, peer: &Peer, all_have: Option<&Version>, ctx: Context<'_>) {
        let window = WINDOW.min(ctx.config.max_log_bytes);
        loop {
            let Role::Leading(leading) = &mut self.role else { return };
            let (epoch, commit) = (leading.config.epoch.clone(), leading.commit.clone());
            let history = leading.config.epoch.clone();
            let Some(stream) = leading.streams.get_mut(peer) else { return };
            if stream.next.as_ref() == self.store.applied() && !stream.greet {
                return;
            }
            let Some(after) = self.log.after(stream.next.as_ref()) else {
                // it fell behind more than the log keeps
                stream.restart();
                stream.next = self.store.applied().cloned();
                stream.snapshot = Some(Sending::new(history));
                return;
            };
            let prev = stream.next.clone();
            let mut entries: Vec<(Version, Arc<Write>)> = Vec::new();
            let mut bytes = 0;
            for logged in after {
                let room = stream.bytes == 0 || stream.bytes + logged.bytes <= window;
                if !room || (bytes > 0 && bytes + logged.bytes > ctx.config.chunk_bytes) {
                    break;
                }
                bytes += logged.bytes;
                stream.bytes += logged.bytes;
                stream.in_flight.push_back((logged.version.seq, logged.bytes));
                stream.next = Some(logged.version.clone());
                entries.push((logged.version.clone(), logged.write.clone()));
            }
            if entries.is_empty() && !stream.greet {
                return;
            }
            stream.greet = false;
            let all_have = all_have.cloned();
            stream.told_have.clone_from(&all_have);
            self.send(peer, Lane::Bulk, ReplicaMessage::Append { epoch, prev, entries, commit, all_have });
        }
    }

    /// Up to where all owners have everything: deletes up to there may be forgotten after a while. Nothing, while a
    /// copy is under way that may have missed them.
    pub(super) fn all_have(&self, ctx: Context<'_>) -> Option<Version> {
        let Role::Leading(leading) = &self.role else { return None };
        let busy = leading.streams.values().any(|stream| stream.snapshot.is_some());
        // a side that may accept no writes must not become the one that the others are behind
        if !leading.effective || busy || !leading.merges.is_empty() || enough_nodes(ctx).is_err() {
            return None;
        }
        let mut all = self.store.applied()?.clone();
        for owner in leading.config.owners.iter().filter(|owner| *owner != ctx.me) {
            let stream = leading.streams.get(owner).filter(|stream| stream.counts())?;
            all = all.min(stream.acked.clone()?);
        }
        Some(all)
    }

    /// Tells the owners what they may forget, though nothing is written.
    pub(super) fn greet_owners(&mut self, all_have: &Option<Version>) {
        let Role::Leading(leading) = &mut self.role else { return };
        if all_have.is_none() {
            return;
        }
        leading.streams.values_mut().filter(|s| s.is_untold(all_have)).for_each(|s| s.greet = true);
    }
}

// What readers see, and see to.
impl Replica {
    /// A reader has seen that this owner is behind. Mostly what it lacks is on its way. It is told where the stream is in
    /// any case, in the order of the stream: if something got lost on the way it says so, and is brought forward.
    pub(crate) fn handle_nudge(&mut self, owner: &Peer, ctx: Context<'_>) {
        let Role::Leading(leading) = &mut self.role else { return };
        let stream = leading.streams.get_mut(owner).filter(|stream| stream.phase == Phase::Open);
        let Some(stream) = stream.filter(|stream| stream.counts()) else { return };
        stream.greet = true;
        self.settle(ctx);
    }

    /// The owners that have not confirmed all writes, and how many they lack, if this node is the primary.
    pub(crate) fn behind(&self) -> Option<Vec<(Peer, u64)>> {
        let Role::Leading(leading) = &self.role else { return None };
        let end = self.store.applied().map_or(0, |end| end.seq);
        let others = leading.config.owners.iter().filter(|owner| **owner != leading.config.epoch.primary);
        let has =
            |owner: &Peer| leading.streams.get(owner).filter(|s| s.counts()).map_or(0, Stream::acked_seq);
        let lacks = others.map(|owner| (owner.clone(), end.saturating_sub(has(owner))));
        Some(lacks.filter(|(_, writes)| *writes > 0).collect())
    }
}

impl Stream {
    /// From where to go on: the log, or a snapshot.
    fn place(
        &mut self,
        at: Option<Version>,
        by_log: bool,
        log: &Log,
        history: &Lineage,
        end: Option<&Version>,
    ) {
        // the receiver opens epochs as the history says, and the history is bounded
        let known = |epoch: &Epoch| history.entries().iter().any(|(of, _)| of == epoch);
        let from_log = by_log
            && log
                .after(at.as_ref())
                .is_some_and(|mut after| after.next().is_none_or(|first| known(&first.version.epoch)));
        if from_log {
            self.greet = !self.whole;
            self.next = at;
        } else {
            self.next = end.cloned();
            let began = history.epoch().cloned();
            self.snapshot = began.map(Sending::new);
        }
    }
}
