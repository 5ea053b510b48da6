//! How packets lie on a byte stream, and how many of them become one write.
//!
//! ```text
//!   | len: u32, little-endian | kind: u8 | ...          len counts from the kind on
//!   kind 0: | head length: u32, little-endian | head | body     a packet of the link layer
//!   kind 1: | bytes                                             a message of the mesh itself
//! ```
//!
//! An unknown kind is skipped and counted, so that a later version may say more.

use std::collections::VecDeque;
use std::io::IoSlice;

use bytes::{Buf, BufMut, Bytes, BytesMut};

use crate::transport::Frame;
use crate::transport::link::Packet;
use crate::transport::link::packet::{FRAME_PREFIX, piece_prefix};
use crate::transport::link::pieces::Piece;

const LENGTH: usize = 4;
const PACKET: u8 = 0;
const MESSAGE: u8 = 1;
/// Kind and head length.
const PACKET_PREFIX: usize = 5;
/// The longest message of the mesh, in bytes.
pub(super) const MAX_MESSAGE: usize = 64 << 10;
/// A part this long is written from where it lies; a shorter one is cheaper to copy than to point at.
const COPY_BELOW: usize = 4 << 10;
/// Short parts are copied into blocks of this size.
const BLOCK: usize = 32 << 10;
/// How many parts one write may have.
const MAX_SLICES: usize = 64;
/// What a link packet may need besides head and body of its frame.
const LINK_PREFIX: usize = 64;

#[derive(Debug, PartialEq, Eq)]
pub(super) enum Record {
    Packet(Packet),
    Message(Bytes),
    /// A kind that this version does not have.
    Unknown,
}

/// The bytes make no sense, or announce more than is allowed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a record is malformed or too long")]
pub(super) struct Malformed;

/// Takes the records that are whole off the buffer, without copying them.
///
/// `max_frame`: the longest frame, head and body, in bytes.
pub(super) fn split_whole(buffer: &mut BytesMut, max_frame: usize) -> Result<Bytes, Malformed> {
    let mut end = 0;
    while let Some((length, rest)) = buffer.get(end..).and_then(|rest| rest.split_first_chunk::<LENGTH>()) {
        let length = u32::from_le_bytes(*length) as usize;
        if length == 0 {
            return Err(Malformed);
        }
        let Some(&kind) = rest.first() else { break };
        let longest = match kind {
            PACKET => max_frame.saturating_add(PACKET_PREFIX + LINK_PREFIX),
            _ => MAX_MESSAGE,
        };
        if length > longest {
            return Err(Malformed);
        }
        if rest.len() < length {
            break;
        }
        end += LENGTH + length;
    }
    Ok(buffer.split_to(end).freeze())
}

/// Takes the next record off those that are whole; `None` after the last.
pub(super) fn decode(whole: &mut Bytes) -> Result<Option<Record>, Malformed> {
    let Some((length, rest)) = whole.split_first_chunk::<LENGTH>() else { return Ok(None) };
    let length = u32::from_le_bytes(*length) as usize;
    let kind = match rest.first() {
        Some(kind) if length <= rest.len() && length > 0 => *kind,
        _ => return Err(Malformed),
    };
    if kind != PACKET {
        whole.advance(LENGTH + 1);
        let message = whole.split_to(length - 1);
        return Ok(Some(if kind == MESSAGE { Record::Message(message) } else { Record::Unknown }));
    }
    let head = match rest.split_first_chunk::<PACKET_PREFIX>() {
        Some((&[_, a, b, c, d], _)) if length >= PACKET_PREFIX => u32::from_le_bytes([a, b, c, d]) as usize,
        _ => return Err(Malformed),
    };
    if head > length - PACKET_PREFIX {
        return Err(Malformed);
    }
    whole.advance(LENGTH + PACKET_PREFIX);
    let body = length - PACKET_PREFIX - head;
    let packet = Packet { head: whole.split_to(head), body: whole.split_to(body) };
    Ok(Some(Record::Packet(packet)))
}

/// How many bytes are missing until the next record is whole, as far as can be told.
pub(super) fn missing(buffer: &BytesMut) -> usize {
    match buffer.split_first_chunk::<LENGTH>() {
        Some((length, rest)) => (u32::from_le_bytes(*length) as usize).saturating_sub(rest.len()),
        None => LENGTH,
    }
}

/// Records on their way into one vectored write.
#[derive(Debug, Default)]
pub(super) struct Batch {
    parts: VecDeque<Bytes>,
    tail: BytesMut,
}

impl Batch {
    pub(super) fn packet(&mut self, packet: Packet) {
        if self.packet_prefix(packet.head.len(), packet.body.len()) {
            self.part(&packet.head);
            self.part(&packet.body);
        }
    }

    /// The packet that this would be.
    pub(super) fn piece(&mut self, number: u64, piece: &Piece) {
        let Frame { head, body, .. } = &piece.part;
        if self.packet_prefix(FRAME_PREFIX + head.len(), body.len()) {
            self.room(FRAME_PREFIX);
            self.tail.extend_from_slice(&piece_prefix(number, piece));
            self.part(head);
            self.part(body);
        }
    }

    /// Whether it may be written at all.
    fn packet_prefix(&mut self, head: usize, body: usize) -> bool {
        let (Ok(length), Ok(head)) = (u32::try_from(PACKET_PREFIX + head + body), u32::try_from(head)) else {
            // the builder does not allow frames of 4 GiB
            return false;
        };
        self.room(LENGTH + PACKET_PREFIX);
        let ([a, b, c, d], [e, f, g, h]) = (length.to_le_bytes(), head.to_le_bytes());
        self.tail.extend_from_slice(&[a, b, c, d, PACKET, e, f, g, h]);
        true
    }

    /// A message that is too long is left out.
    pub(super) fn message(&mut self, message: Bytes) {
        let Some(length) = u32::try_from(message.len() + 1).ok().filter(|n| *n as usize <= MAX_MESSAGE)
        else {
            return;
        };
        self.room(LENGTH + 1);
        self.tail.put_u32_le(length);
        self.tail.put_u8(MESSAGE);
        self.part(&message);
    }

    fn room(&mut self, bytes: usize) {
        if self.tail.capacity() - self.tail.len() < bytes {
            // another block, because a larger one would have to be filled again
            self.seal();
            self.tail.reserve(bytes.max(BLOCK));
        }
    }

    fn part(&mut self, part: &Bytes) {
        if part.len() < COPY_BELOW {
            self.room(part.len());
            self.tail.extend_from_slice(part);
            return;
        }
        self.seal();
        self.parts.push_back(part.clone());
    }

    fn seal(&mut self) {
        if !self.tail.is_empty() {
            self.parts.push_back(self.tail.split().freeze());
        }
    }

    /// What to write next. Call it until it is empty, each time followed by [`Batch::written`].
    pub(super) fn slices<'a>(&'a mut self, slices: &mut Vec<IoSlice<'a>>) {
        self.seal();
        slices.extend(self.parts.iter().take(MAX_SLICES).map(|part| IoSlice::new(part)));
    }

    pub(super) fn written(&mut self, mut bytes: usize) {
        while let Some(first) = self.parts.front_mut() {
            if bytes < first.len() {
                first.advance(bytes);
                return;
            }
            bytes -= first.len();
            self.parts.pop_front();
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.parts.is_empty() && self.tail.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transport::Lane;
    use crate::transport::link::packet::encode_piece;
    use proptest::prelude::*;

    const MAX: usize = 1 << 20;

    fn packet(head: usize, body: usize) -> Packet {
        Packet { head: vec![1; head].into(), body: vec![2; body].into() }
    }

    fn decode(buffer: &mut BytesMut, max_frame: usize) -> Result<Option<Record>, Malformed> {
        let mut whole = split_whole(buffer, max_frame)?;
        let first = super::decode(&mut whole)?;
        // what is left is put back
        let rest = std::mem::replace(buffer, BytesMut::from(&whole[..]));
        buffer.extend_from_slice(&rest);
        Ok(first)
    }

    /// Writes everything, so much at a time.
    fn written(batch: &mut Batch, at_once: usize) -> Vec<u8> {
        let mut bytes = Vec::new();
        while !batch.is_empty() {
            let mut slices = Vec::new();
            batch.slices(&mut slices);
            let now: Vec<u8> = slices.iter().flat_map(|slice| slice.iter().copied()).take(at_once).collect();
            batch.written(now.len());
            bytes.extend(now);
        }
        bytes
    }

    /// A change here is a change of the wire.
    #[test]
    fn golden_bytes() {
        let mut batch = Batch::default();
        batch.packet(Packet { head: "ab".into(), body: "c".into() });
        batch.message("m".into());
        assert_eq!(
            written(&mut batch, 100),
            [8, 0, 0, 0, 0, 2, 0, 0, 0, b'a', b'b', b'c', 2, 0, 0, 0, 1, b'm']
        );
    }

    #[test]
    fn a_piece_is_written_as_its_packet() {
        for (more, body) in [(false, 3), (true, 3), (false, COPY_BELOW)] {
            let piece = Piece { part: Frame::new(Lane::Data, "head", vec![7; body]), more };
            let (mut direct, mut packed) = (Batch::default(), Batch::default());
            direct.piece(300, &piece);
            packed.packet(encode_piece(300, &piece, &mut BytesMut::new()));
            assert_eq!(written(&mut direct, usize::MAX), written(&mut packed, usize::MAX));
        }
    }

    #[test]
    fn many_short_records_are_one_slice_and_a_long_part_is_not_copied() {
        let mut batch = Batch::default();
        for _ in 0..500 {
            batch.packet(packet(20, 100));
        }
        let long = packet(20, 100_000);
        batch.packet(long.clone());
        batch.packet(packet(20, 100));
        let mut slices = Vec::new();
        batch.slices(&mut slices);
        assert!(slices.len() <= 8, "{} slices for 502 records", slices.len());
        assert!(
            slices.iter().any(|slice| slice.as_ptr() == long.body.as_ptr()),
            "the body lies where it lay"
        );
    }

    #[test]
    fn what_is_read_is_not_copied() {
        let mut batch = Batch::default();
        batch.packet(packet(3, 2000));
        let mut buffer = BytesMut::from(&written(&mut batch, usize::MAX)[..]);
        let there = buffer.as_ptr() as usize..buffer.as_ptr() as usize + buffer.len();
        let Ok(Some(Record::Packet(packet))) = decode(&mut buffer, MAX) else { panic!("a packet") };
        assert!(there.contains(&(packet.body.as_ptr() as usize)));
    }

    #[test]
    fn hazard_22_lengths_that_cannot_be() {
        let refused = |bytes: &[u8]| assert_eq!(decode(&mut BytesMut::from(bytes), MAX), Err(Malformed));
        refused(&[0, 0, 0, 0]);
        refused(&[0xff, 0xff, 0xff, 0xff, PACKET]);
        refused(&[0, 0, 2, 0, MESSAGE]);
        refused(&[2, 0, 0, 0, PACKET, 0]);
        refused(&[6, 0, 0, 0, PACKET, 9, 0, 0, 0, 0]);
        let later = decode(&mut BytesMut::from(&[3, 0, 0, 0, 77, 1, 2][..]), MAX);
        assert_eq!(later, Ok(Some(Record::Unknown)), "a kind of a later version is left out");
        let mut cut = BytesMut::from(&[9, 0, 0, 0, PACKET][..]);
        assert_eq!((decode(&mut cut, MAX), missing(&cut)), (Ok(None), 8));
    }

    proptest! {
        #[test]
        fn what_is_written_is_read_however_it_is_cut(
            sizes in prop::collection::vec((0usize..40, 0usize..9000, any::<bool>()), 1..20),
            at_once in 1usize..9000, chunk in 1usize..9000,
        ) {
            let mut batch = Batch::default();
            let mut wanted = Vec::new();
            for (head, body, message) in sizes {
                if message {
                    let message = Bytes::from(vec![3; body]);
                    batch.message(message.clone());
                    wanted.push(Record::Message(message));
                } else {
                    batch.packet(packet(head, body));
                    wanted.push(Record::Packet(packet(head, body)));
                }
            }
            let mut got = Vec::new();
            let mut buffer = BytesMut::new();
            for bytes in written(&mut batch, at_once).chunks(chunk) {
                buffer.extend_from_slice(bytes);
                while let Some(record) = decode(&mut buffer, MAX).expect("well formed") {
                    got.push(record);
                }
            }
            prop_assert_eq!(got, wanted);
            prop_assert!(buffer.is_empty());
        }

        #[test]
        fn hazard_22_random_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..60), kind in 0u8..3) {
            let _ = decode(&mut BytesMut::from(&bytes[..]), MAX);
            let framed = [&(bytes.len() as u32 + 1).to_le_bytes()[..], &[kind], &bytes].concat();
            let _ = decode(&mut BytesMut::from(&framed[..]), MAX);
        }
    }
}
