//! Snapshots: a whole copy for an owner that the log cannot help.
//!
//! Pieces are taken while writes go on, and the stream from the snapshot's beginning runs between them; every record
//! has its version, so the order does not matter. But the copy is *whole* only when it has the last piece **and** every
//! write up to the one that was the last when that piece was taken: before, it may hold a write without the one before
//! it, and a takeover with it would keep what was never in any history.
//!
//! The copy that was there before stays until the new one is whole.

use super::budget::Slot;
use super::log::{Log, entry_len};
use super::message::ReplicaMessage;
use super::{Context, Mutation, Replica, Role};
use crate::cache::store::{Cursor, Entry, SnapshotHeader, Store};
use crate::cache::version::{Epoch, Version};
use crate::transport::Lane;
use crate::types::Peer;

/// A snapshot on its way out.
#[derive(Debug)]
pub(super) struct Sending {
    /// The epoch in which it began: acknowledgements of an older one are of another snapshot.
    began: Epoch,
    begun: bool,
    cursor: Option<Cursor>,
    in_flight: Option<u64>,
    /// When the next piece may go.
    slot: Option<Slot>,
    /// The last piece is on its way.
    finished: bool,
}

impl Sending {
    pub(super) fn new(began: Epoch) -> Self {
        Self { began, begun: false, cursor: None, in_flight: None, slot: None, finished: false }
    }
}

/// A snapshot on its way in.
#[derive(Debug)]
pub(super) struct Incoming {
    pub(super) store: Store,
    next: Option<u64>,
    /// All pieces are in; the copy is whole with this write.
    through: Option<Option<Version>>,
}

/// A piece as it arrives.
pub(super) struct Piece {
    pub(super) number: u64,
    pub(super) entries: Vec<Entry>,
    pub(super) last: bool,
    pub(super) through: Option<Version>,
}

impl Replica {
    /// Sends the next piece, if it is time.
    pub(super) fn send_snapshot(&mut self, peer: &Peer, ctx: Context<'_>) {
        let Role::Leading(leading) = &mut self.role else { return };
        let epoch = leading.config.epoch.clone();
        let Some(stream) = leading.streams.get_mut(peer) else { return };
        let Some(sending) = &mut stream.snapshot else { return };
        let mut messages = Vec::new();
        if !sending.begun {
            sending.begun = true;
            stream.next = self.store.applied().cloned();
            let header = self.store.snapshot_header();
            messages.push(ReplicaMessage::SnapshotBegin { epoch: epoch.clone(), header });
        }
        let mut wait = None;
        if sending.in_flight.is_none() && !sending.finished {
            let rate = ctx.config.transfer_rate;
            let slot = sending.slot.take().unwrap_or_else(|| {
                let left = usize::try_from(self.store.bytes()).unwrap_or(usize::MAX);
                ctx.budget.reserve(ctx.now, left.min(ctx.config.chunk_bytes), rate)
            });
            if slot.at > ctx.now {
                wait = Some(slot.at);
                sending.slot = Some(slot);
            } else {
                let chunk = self.store.chunk(sending.cursor.as_ref(), ctx.config.chunk_bytes);
                let bytes = chunk.entries.iter().map(entry_len).sum();
                slot.spend(bytes, rate);
                let mut entries = chunk.entries;
                if ctx.rules.breaks(Mutation::PutsOnly) {
                    entries.retain(|entry| matches!(entry, Entry::Put { .. }));
                }
                let (number, last) = (stream.pieces, chunk.next.is_none());
                stream.pieces += 1;
                sending.in_flight = Some(number);
                sending.finished = last;
                sending.cursor = chunk.next;
                let through = self.store.applied().cloned();
                messages.push(ReplicaMessage::SnapshotChunk { epoch, number, entries, last, through });
            }
        }
        for message in messages {
            self.send(peer, Lane::Bulk, message);
        }
        if let Some(at) = wait {
            self.wake_at(at);
        }
    }

    pub(super) fn on_snapshot_ack(&mut self, from: &Peer, epoch: &Epoch, number: u64) {
        let Role::Leading(leading) = &mut self.role else { return };
        let Some(stream) = leading.streams.get_mut(from) else { return leading.tell_again(from) };
        let Some(sending) = &mut stream.snapshot else { return };
        if *epoch < sending.began || sending.in_flight != Some(number) {
            return;
        }
        sending.in_flight = None;
        if sending.finished {
            stream.snapshot = None;
        }
    }

    // ---- the receiver

    pub(super) fn on_snapshot_begin(
        &mut self,
        from: &Peer,
        epoch: &Epoch,
        header: SnapshotHeader,
        ctx: Context<'_>,
    ) {
        if !self.accepts_from(from, epoch, ctx) {
            return;
        }
        let Ok(store) = Store::from_header(ctx.config, header) else { return };
        let Role::Following(following) = &mut self.role else { return };
        following.asked = false;
        following.incoming = Some(Incoming { store, next: None, through: None });
    }

    pub(super) fn on_snapshot_chunk(&mut self, from: &Peer, epoch: &Epoch, piece: Piece, ctx: Context<'_>) {
        if !self.accepts_from(from, epoch, ctx) {
            return;
        }
        let Role::Following(following) = &mut self.role else { return };
        let Some(incoming) = &mut following.incoming else { return };
        let expected = incoming.next.unwrap_or(piece.number);
        if piece.number != expected || incoming.through.is_some() {
            return;
        }
        if incoming.store.install(&piece.entries, ctx.now).is_err() {
            return;
        }
        incoming.next = Some(piece.number.saturating_add(1));
        if piece.last {
            incoming.through = Some(piece.through);
        }
        let epoch = following.epoch.clone();
        self.send(from, Lane::Control, ReplicaMessage::SnapshotAck { epoch, number: piece.number });
        if self.finish_snapshot() {
            self.acknowledge(from);
        }
    }

    /// Puts the new copy in the place of the old one when it is whole.
    pub(super) fn finish_snapshot(&mut self) -> bool {
        let Role::Following(following) = &mut self.role else { return false };
        let done = following.incoming.as_ref().is_some_and(|incoming| {
            incoming.through.as_ref().is_some_and(|through| incoming.store.applied() >= through.as_ref())
        });
        if !done {
            return false;
        }
        let Some(incoming) = following.incoming.take() else { return false };
        self.store = incoming.store;
        self.log = Log::from(self.store.applied().cloned());
        self.whole = true;
        self.changed = true;
        true
    }
}
