//! A raw connection: a byte stream in each direction, cut into numbered messages. Sans-IO.
//!
//! Packets are written behind each other, each with its two lengths in front. A message takes as much of the stream
//! as it holds, so that small packets share one and a large packet takes several. The receiver tells how much it
//! has taken; no more than a window is on its way, since NATS would drop what a slow subscriber does not take.

use std::collections::VecDeque;
use std::time::Duration;

use bytes::{Buf, BufMut, Bytes, BytesMut};

use super::envelope::{Envelope, Key, encode_data};
use super::subject::LifeId;
use crate::transport::Lane;
use crate::transport::link::{Packet, RawId, Time};
use crate::types::NodeId;

/// What stands in front of a packet: the lengths of head and body.
const PREFIX: usize = 8;
/// What a message counts at least, so that a window bounds their number too.
const LEAST_COST: u64 = 4096;
/// A server that takes less in one message is of no use.
pub(super) const LEAST_MESSAGE: usize = 512;

/// How long nothing is taken, or there is no link, before the other end is asked.
pub(super) const PROBE: Duration = Duration::from_millis(200);

/// What came does not continue the stream, or makes no sense.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Broken {
    /// Something is missing, or came twice or in another order.
    Gap,
    /// No packet looks like this.
    Malformed,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Wire {
    pub(super) raw: RawId,
    pub(super) key: Key,
    pub(super) node: NodeId,
    pub(super) life: LifeId,
    /// The epoch of the other end when this was opened.
    pub(super) epoch: u64,
    out: Outgoing,
    number: u64,
    assembler: Assembler,
    /// What was taken, and what the other end was told of that.
    taken: u64,
    told: u64,
    their_window: u64,
    /// The other end waits to be told.
    asked: bool,
}

#[derive(Debug, Default)]
struct Outgoing {
    pending: VecDeque<Bytes>,
    bytes: usize,
    /// Of the first pending packet: its lane names the subject.
    lane: Option<Lane>,
    /// A frame is pending, not words alone.
    frames: bool,
    number: u64,
    sent: u64,
    acknowledged: u64,
    window: u64,
    most: u64,
    /// What was taken since the window has last grown.
    grown: u64,
    /// Since when, or since the last probe, it is full with more to come.
    stuck: Option<Time>,
}

impl Wire {
    pub(super) fn new(raw: RawId, key: Key, (node, life): (NodeId, LifeId), epoch: u64, max: usize) -> Self {
        Self {
            raw,
            key,
            node,
            life,
            epoch,
            out: Outgoing::default(),
            number: 0,
            assembler: Assembler { partial: BytesMut::new(), max },
            taken: 0,
            told: 0,
            their_window: 1,
            asked: false,
        }
    }

    /// How much each end lets be on its way to the other: ours grows up to `most`, as it is taken.
    pub(super) fn windows(&mut self, ours: u32, most: u32, theirs: u32) {
        (self.out.window, self.out.most) = (u64::from(ours), u64::from(most));
        self.their_window = u64::from(theirs).max(1);
    }

    /// What to begin the next connection with if this one has lost something: as much again would be lost again.
    pub(super) fn less(&self) -> u32 {
        u32::try_from((self.out.window / 4).max(LEAST_COST)).unwrap_or(u32::MAX)
    }

    /// Whether a frame may be added: there is room on the way, and nothing of an earlier one waits here.
    pub(super) fn has_room(&self, message: usize) -> bool {
        self.out.bytes < message && !self.out.is_full()
    }

    pub(super) fn pending(&self) -> usize {
        self.out.bytes
    }

    pub(super) fn push(&mut self, packet: Packet) {
        let out = &mut self.out;
        let mut head = BytesMut::with_capacity(PREFIX + packet.head.len());
        head.put_u32_le(u32::try_from(packet.head.len()).unwrap_or(u32::MAX));
        head.put_u32_le(u32::try_from(packet.body.len()).unwrap_or(u32::MAX));
        head.extend_from_slice(&packet.head);
        out.frames |= packet.lane().is_some();
        out.lane.get_or_insert(packet.lane().unwrap_or(Lane::Control));
        out.bytes += head.len() + packet.body.len();
        out.pending.push_back(head.freeze());
        if !packet.body.is_empty() {
            out.pending.push_back(packet.body);
        }
    }

    /// The next message of at most `message` bytes of the stream, with its lane. Words alone do not wait for
    /// room: they are few. `all`: nothing does, it is the end.
    pub(super) fn cut(&mut self, message: usize, all: bool) -> Option<(Lane, Bytes)> {
        let out = &mut self.out;
        if out.bytes == 0 || (out.frames && out.is_full() && !all) {
            return None;
        }
        let len = out.bytes.min(message);
        let bytes = encode_data(self.key, out.number, self.taken, len, |to| out.take(len, to));
        self.told = self.taken;
        out.number += 1;
        out.sent += cost(len);
        let lane = out.lane.unwrap_or(Lane::Control);
        if out.bytes == 0 {
            (out.lane, out.frames) = (None, false);
        }
        Some((lane, bytes))
    }

    /// A message with nothing in it, when nothing was taken for long: if one before it was dropped, the other end
    /// finds the gap, and if what it told was dropped, it tells again. Everything else waits for room, so without
    /// this both would wait for ever.
    pub(super) fn probe(&mut self, now: Time) -> Option<Bytes> {
        let out = &mut self.out;
        if out.bytes == 0 || !out.is_full() {
            out.stuck = None;
            return None;
        }
        let since = *out.stuck.get_or_insert(now);
        if now < since + PROBE {
            return None;
        }
        out.stuck = Some(now);
        Some(self.ask())
    }

    /// A message with nothing in it: the other end finds out whether it has missed one before, and tells what it has.
    pub(super) fn ask(&mut self) -> Bytes {
        let out = &mut self.out;
        let bytes = encode_data(self.key, out.number, self.taken, 0, |_| {});
        out.number += 1;
        out.sent += cost(0);
        bytes
    }

    /// What the other end has to be told, if it may be waiting for it.
    pub(super) fn credit(&mut self) -> Option<Envelope> {
        let asked = std::mem::take(&mut self.asked);
        if !asked && self.taken - self.told < (self.their_window / 4).max(1) {
            return None;
        }
        self.told = self.taken;
        Some(Envelope::Credit { key: self.key, taken: self.taken })
    }

    /// The other end has taken so much in all; what is older than known, or impossible, is ignored.
    pub(super) fn acknowledged(&mut self, taken: u64) {
        let out = &mut self.out;
        if taken <= out.acknowledged || taken > out.sent {
            return;
        }
        out.stuck = None;
        out.grown += taken - out.acknowledged;
        out.acknowledged = taken;
        if out.grown >= out.window {
            out.grown = 0;
            out.window = (out.window + (out.window / 4).max(LEAST_COST)).min(out.most).max(out.window);
        }
    }

    /// A message came; its packets.
    pub(super) fn receive(
        &mut self,
        number: u64,
        piece: Bytes,
        into: &mut Vec<Packet>,
    ) -> Result<(), Broken> {
        if number != self.number {
            return Err(Broken::Gap);
        }
        self.number += 1;
        self.taken += cost(piece.len());
        self.asked |= piece.is_empty();
        self.assembler.feed(piece, into)
    }
}

fn cost(len: usize) -> u64 {
    (len as u64).max(LEAST_COST)
}

impl Outgoing {
    fn is_full(&self) -> bool {
        self.sent - self.acknowledged >= self.window
    }

    fn take(&mut self, mut len: usize, to: &mut BytesMut) {
        self.bytes -= len;
        while len > 0 {
            let Some(first) = self.pending.front_mut() else { return };
            let part = first.len().min(len);
            to.extend_from_slice(&first[..part]);
            first.advance(part);
            len -= part;
            if first.is_empty() {
                self.pending.pop_front();
            }
        }
    }
}

/// Finds the packets in the stream. A packet that lies in one message is not copied.
#[derive(Debug)]
struct Assembler {
    partial: BytesMut,
    /// The longest packet.
    max: usize,
}

impl Assembler {
    fn feed(&mut self, mut piece: Bytes, into: &mut Vec<Packet>) -> Result<(), Broken> {
        while !piece.is_empty() {
            if self.partial.is_empty() {
                if let Some((head, body)) = self.lengths(&piece)?
                    && piece.len() >= PREFIX + head + body
                {
                    let mut packet = piece.split_to(PREFIX + head + body);
                    packet.advance(PREFIX);
                    into.push(Packet { head: packet.split_to(head), body: packet });
                    continue;
                }
                self.partial.extend_from_slice(&piece);
                return Ok(());
            }
            let missing = PREFIX.saturating_sub(self.partial.len());
            if missing > 0 {
                self.partial.extend_from_slice(&piece.split_to(missing.min(piece.len())));
                continue;
            }
            self.go_on(&mut piece, into)?;
        }
        // lengths that cannot be are found at once, and a packet that ends with its message is complete
        self.go_on(&mut piece, into)
    }

    /// Adds to the packet that has begun.
    fn go_on(&mut self, piece: &mut Bytes, into: &mut Vec<Packet>) -> Result<(), Broken> {
        let Some((head, body)) = self.lengths(&self.partial)? else { return Ok(()) };
        let missing = (PREFIX + head + body).saturating_sub(self.partial.len());
        self.partial.extend_from_slice(&piece.split_to(missing.min(piece.len())));
        if self.partial.len() == PREFIX + head + body {
            let mut packet = std::mem::take(&mut self.partial).freeze();
            packet.advance(PREFIX);
            into.push(Packet { head: packet.split_to(head), body: packet });
        }
        Ok(())
    }

    /// The lengths of the packet that begins here, once they can be read.
    fn lengths(&self, mut bytes: &[u8]) -> Result<Option<(usize, usize)>, Broken> {
        let (Ok(head), Ok(body)) = (bytes.try_get_u32_le(), bytes.try_get_u32_le()) else { return Ok(None) };
        let (head, body) = (head as usize, body as usize);
        // a packet says at least its kind
        if head == 0 || head.saturating_add(body) > self.max {
            return Err(Broken::Malformed);
        }
        Ok(Some((head, body)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MAX: usize = 10_000;

    fn wire(window: u32) -> Wire {
        let to = (NodeId::new("b").unwrap(), LifeId(1));
        let mut wire = Wire::new(RawId(1), Key { dialer: 1, acceptor: 2 }, to, 0, MAX);
        wire.windows(window, window, window);
        wire
    }

    fn packet(head: &[u8], body: Vec<u8>) -> Packet {
        Packet { head: Bytes::copy_from_slice(head), body: body.into() }
    }

    fn frame(len: usize) -> Packet {
        packet(&[0xf0, 1, 0, 0, 0, 0, 0, 0, 0, 0], vec![7; len])
    }

    fn piece(message: Bytes) -> (u64, u64, Bytes) {
        match Envelope::decode(message) {
            Ok(Envelope::Data { number, taken, piece, .. }) => (number, taken, piece),
            other => unreachable!("{other:?}"),
        }
    }

    #[test]
    fn a_lost_word_is_found_by_the_question_behind_it() {
        let (mut a, mut b) = (wire(1 << 20), wire(1 << 20));
        let mut packets = Vec::new();
        let (number, _, empty) = piece(a.ask());
        assert_eq!(b.receive(number, empty, &mut packets), Ok(()), "nothing is missing");
        assert!(matches!(b.credit(), Some(Envelope::Credit { .. })), "and it is answered");
        a.push(packet(&[6], vec![]));
        assert!(a.cut(1000, false).is_some(), "which is lost");
        let (number, _, empty) = piece(a.ask());
        assert_eq!(b.receive(number, empty, &mut packets), Err(Broken::Gap));
        assert_eq!(packets, []);
    }

    #[test]
    fn small_packets_share_a_message_and_name_its_lane() {
        let (mut a, mut b) = (wire(1 << 20), wire(1 << 20));
        let sent = [frame(10), packet(&[6], vec![]), frame(0)];
        for packet in &sent {
            a.push(packet.clone());
        }
        let (lane, message) = a.cut(1000, false).unwrap();
        assert_eq!(lane, Lane::Data);
        assert_eq!(a.cut(1000, false), None);
        let (number, _, bytes) = piece(message);
        let mut got = Vec::new();
        b.receive(number, bytes, &mut got).unwrap();
        assert_eq!(got, sent);
    }

    #[test]
    fn frames_wait_for_room_and_words_do_not() {
        let (mut a, mut b) = (wire(8192), wire(8192));
        let mut got = Vec::new();
        for _ in 0..2 {
            assert!(a.has_room(1000));
            a.push(frame(10));
            let (number, _, bytes) = piece(a.cut(1000, false).unwrap().1);
            b.receive(number, bytes, &mut got).unwrap();
        }
        assert!(!a.has_room(1000), "two messages count 4 KiB each");
        a.push(packet(&[6], vec![]));
        let (number, _, bytes) = piece(a.cut(1000, false).expect("a word").1);
        b.receive(number, bytes, &mut got).unwrap();
        a.push(frame(10));
        assert_eq!(a.cut(1000, false), None);
        assert_eq!(a.pending(), 28);
        let Some(Envelope::Credit { taken, .. }) = b.credit() else { panic!("a quarter was taken") };
        assert_eq!(b.credit(), None, "told once");
        a.acknowledged(u64::MAX);
        assert_eq!(a.cut(1000, false), None, "more than was sent cannot be taken");
        a.acknowledged(taken);
        let (number, _, bytes) = piece(a.cut(1000, false).expect("room again").1);
        b.receive(number, bytes, &mut got).unwrap();
        assert_eq!(got.len(), 4);
    }

    #[test]
    fn a_full_window_is_asked_about() {
        let (mut a, mut b, mut got) = (wire(4096), wire(4096), Vec::new());
        a.push(frame(10));
        assert_eq!(a.probe(Time::ZERO), None, "there is room");
        let lost = a.cut(1000, false).expect("room for one");
        a.push(frame(10));
        assert_eq!(a.cut(1000, false), None);
        assert_eq!(a.probe(Time::ZERO), None, "not at once");
        let (number, _, bytes) = piece(a.probe(PROBE).expect("stuck"));
        assert_eq!(a.probe(PROBE), None, "not again at once");
        assert_eq!(
            b.receive(number, bytes.clone(), &mut got),
            Err(Broken::Gap),
            "the one before was dropped"
        );

        let (first, _, frame) = piece(lost.1);
        b = wire(1 << 20);
        assert_eq!(b.receive(first, frame, &mut got), Ok(()));
        assert_eq!(b.credit(), None, "little was taken");
        assert_eq!(b.receive(number, bytes, &mut got), Ok(()));
        let Some(Envelope::Credit { taken, .. }) = b.credit() else { panic!("it was asked") };
        a.acknowledged(taken);
        assert!(a.cut(1000, false).is_some());
    }

    #[test]
    fn a_window_shrinks_with_a_loss_and_grows_with_what_is_taken() {
        let mut a = wire(1 << 20);
        assert_eq!(a.less(), 1 << 18);
        a.windows(a.less(), 1 << 20, 1 << 20);
        assert_eq!(a.less(), 1 << 16);
        a.windows(LEAST_COST as u32, 20_000, 1 << 20);
        assert_eq!(u64::from(a.less()), LEAST_COST, "one message is always allowed");
        for _ in 0..20 {
            while a.has_room(1000) {
                a.push(frame(10));
                a.cut(1000, false).expect("there is room");
            }
            a.acknowledged(a.out.sent);
        }
        assert_eq!(a.out.window, 20_000);
    }

    #[test]
    fn what_is_missing_or_comes_twice_is_a_gap() {
        let mut b = wire(1 << 20);
        let mut got = Vec::new();
        assert_eq!(b.receive(1, Bytes::new(), &mut got), Err(Broken::Gap));
        assert_eq!(b.receive(0, Bytes::new(), &mut got), Ok(()));
        assert_eq!(b.receive(0, Bytes::new(), &mut got), Err(Broken::Gap));
    }

    #[test]
    fn hazard_22_lengths_that_cannot_be() {
        for bytes in
            [[0, 0, 0, 0, 1, 0, 0, 0], [255, 255, 255, 255, 255, 255, 255, 255], [1, 0, 0, 0, 16, 39, 0, 0]]
        {
            for cut in 0..8 {
                let (mut b, mut got) = (wire(1 << 20), Vec::new());
                let first = b.receive(0, Bytes::copy_from_slice(&bytes[..cut]), &mut got);
                assert_eq!(first, Ok(()));
                let second = b.receive(1, Bytes::copy_from_slice(&bytes[cut..]), &mut got);
                assert_eq!(second, Err(Broken::Malformed), "{bytes:?} cut at {cut}");
            }
        }
    }

    proptest! {
        #[test]
        fn every_cut_gives_the_same_packets(
            packets in prop::collection::vec((1usize..40, 0usize..2000), 1..20), message in 1usize..3000,
        ) {
            let (mut a, mut b) = (wire(u32::MAX), wire(u32::MAX));
            let sent: Vec<Packet> = packets
                .iter()
                .enumerate()
                .map(|(i, (head, body))| packet(&vec![i as u8; *head], (0..*body).map(|b| b as u8).collect()))
                .collect();
            for packet in &sent { a.push(packet.clone()); }
            let mut got = Vec::new();
            while let Some((_, bytes)) = a.cut(message, false) {
                let (number, _, bytes) = piece(bytes);
                prop_assert!(bytes.len() <= message);
                prop_assert_eq!(b.receive(number, bytes, &mut got), Ok(()));
            }
            prop_assert_eq!(a.pending(), 0);
            prop_assert_eq!(got, sent);
        }

        #[test]
        fn hazard_22_random_streams_never_panic(pieces in prop::collection::vec(prop::collection::vec(0u8..4, 0..30), 0..10)) {
            let (mut b, mut got) = (wire(1 << 20), Vec::new());
            for (number, piece) in pieces.into_iter().enumerate() {
                if b.receive(number as u64, piece.into(), &mut got).is_err() { break; }
            }
        }
    }
}
