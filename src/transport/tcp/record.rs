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

use crate::transport::link::Packet;

const LENGTH: usize = 4;
const PACKET: u8 = 0;
const MESSAGE: u8 = 1;
/// Kind and head length.
const PACKET_PREFIX: usize = 5;
/// The longest message of the mesh, in bytes.
pub(super) const MAX_MESSAGE: usize = 64 << 10;
/// A part this long is written from where it lies; a shorter one is cheaper to copy than to point at.
const COPY_BELOW: usize = 4 << 10;
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

/// Takes the next record off the buffer, without copying it; `None` if it has not all come.
///
/// `max_frame`: the longest frame, head and body, in bytes.
pub(super) fn decode(buffer: &mut BytesMut, max_frame: usize) -> Result<Option<Record>, Malformed> {
    let Some((length, rest)) = buffer.split_first_chunk::<LENGTH>() else { return Ok(None) };
    let length = u32::from_le_bytes(*length) as usize;
    let Some(&kind) = rest.first() else {
        return if length == 0 { Err(Malformed) } else { Ok(None) };
    };
    let longest = match kind {
        PACKET => max_frame.saturating_add(PACKET_PREFIX + LINK_PREFIX),
        _ => MAX_MESSAGE,
    };
    if length == 0 || length > longest {
        return Err(Malformed);
    }
    if rest.len() < length {
        return Ok(None);
    }
    buffer.advance(LENGTH);
    let mut record = buffer.split_to(length).freeze();
    record.advance(1);
    match kind {
        PACKET => {
            if record.len() < LENGTH {
                return Err(Malformed);
            }
            let head = record.get_u32_le() as usize;
            if head > record.len() {
                return Err(Malformed);
            }
            let head = record.split_to(head);
            Ok(Some(Record::Packet(Packet { head, body: record })))
        }
        MESSAGE => Ok(Some(Record::Message(record))),
        _ => Ok(Some(Record::Unknown)),
    }
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
        let Packet { head, body } = packet;
        let (Ok(length), Ok(head_length)) =
            (u32::try_from(PACKET_PREFIX + head.len() + body.len()), u32::try_from(head.len()))
        else {
            // the builder does not allow frames of 4 GiB
            return;
        };
        self.room(LENGTH + PACKET_PREFIX);
        self.tail.put_u32_le(length);
        self.tail.put_u8(PACKET);
        self.tail.put_u32_le(head_length);
        self.part(head);
        self.part(body);
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
        self.part(message);
    }

    fn room(&mut self, bytes: usize) {
        if self.tail.capacity() - self.tail.len() < bytes {
            self.tail.reserve(bytes.max(16 << 10));
        }
    }

    fn part(&mut self, part: Bytes) {
        if part.len() < COPY_BELOW {
            self.room(part.len());
            self.tail.extend_from_slice(&part);
            return;
        }
        self.seal();
        self.parts.push_back(part);
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
