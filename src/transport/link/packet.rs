//! What travels on a raw connection, and how it looks in bytes.
//!
//! ```text
//! frame:    | 0xf0 | lane: u8 | number: u64, little-endian | head of the frame |  + body, untouched
//! piece:    | 0xf1 | the same: a part of a frame, more of which follows     |  + body, untouched
//! control:  | kind: u8 | fields, in postcard |                                    + empty body
//! hello:    | 0x00 | "MSTR" | version of the link layer: u8 | fields, in postcard |
//! ```
//!
//! A [`Packet`] is two byte strings; how they are told apart on a byte stream (two lengths in front of them) is a
//! matter of the raw connection. Decoding never panics and never allocates more than the packet's own length.

use bytes::{Buf, BufMut, Bytes, BytesMut};
use serde::{Deserialize, Serialize};

use super::Refusal;
use super::pieces::Piece;
use crate::transport::{Frame, Lane, Terms};
use crate::types::{NodeId, Peer};

/// The version of the link layer; ends of different ones refuse each other.
pub(crate) const LINK_VERSION: u8 = 1;

const MAGIC: [u8; 4] = *b"MSTR";
const HELLO: u8 = 0;
const ACK: u8 = 6;
const CONTROL_KINDS: u8 = 11;
const FRAME: u8 = 0xf0;
/// As a frame, but others of the same lane follow that belong to it.
const PIECE: u8 = 0xf1;
/// Kind, lane and number.
pub(crate) const FRAME_PREFIX: usize = 10;

/// The unit of a raw connection: delivered whole and in order, or not at all once the connection breaks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Packet {
    /// What the link layer and the router say.
    pub head: Bytes,
    /// The payload, passed on without a copy; empty but for frames.
    pub body: Bytes,
}

impl Packet {
    /// Both parts together, in bytes.
    pub fn len(&self) -> usize {
        self.head.len() + self.body.len()
    }

    /// Whether both parts are empty (no valid packet is).
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The lane, if this carries a frame of the router and not a word of the link layer.
    pub fn lane(&self) -> Option<Lane> {
        match self.head.get(..2) {
            Some(&[FRAME | PIECE, lane]) => Lane::ALL.get(usize::from(lane)).copied(),
            _ => None,
        }
    }

    /// One message, for networks that carry messages: `| length of the head: u32, little-endian | head | body |`.
    pub fn to_bytes(&self) -> Bytes {
        let mut bytes = BytesMut::with_capacity(4 + self.len());
        bytes.put_u32_le(u32::try_from(self.head.len()).unwrap_or(u32::MAX));
        bytes.extend_from_slice(&self.head);
        bytes.extend_from_slice(&self.body);
        bytes.freeze()
    }

    /// What [`Packet::to_bytes`] made, without a copy; `None` for what it cannot have made.
    pub fn from_bytes(bytes: Bytes) -> Option<Self> {
        let (length, rest) = bytes.split_first_chunk::<4>()?;
        let length = usize::try_from(u32::from_le_bytes(*length)).ok()?;
        let body = 4_usize.checked_add(length).filter(|_| length <= rest.len())?;
        Some(Self { head: bytes.slice(4..body), body: bytes.slice(body..) })
    }

    /// Who says hello in this, if it is a hello that is understood here.
    pub(crate) fn greets_from(&self) -> Option<NodeId> {
        if self.head.first() != Some(&HELLO) {
            return None;
        }
        match decode_hello(&self.head) {
            Ok(Heard::Word(Word::Hello(hello))) => Some(hello.peer.node),
            Ok(_) | Err(_) => None,
        }
    }

    /// Whether this is a plain acknowledgement; losing one only costs time.
    pub(crate) fn is_acknowledgement(&self) -> bool {
        self.head.first() == Some(&ACK)
    }
}

/// Who is at the other end.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Hello {
    pub(crate) terms: Terms,
    pub(crate) peer: Peer,
    /// Whether that incarnation can no longer change: somebody has been told of it.
    pub(crate) settled: bool,
    /// The longest frame that it sends and takes.
    pub(crate) max_frame: u64,
}

/// A number for each lane, in the order of [`Lane::ALL`].
pub(crate) type PerLane = [u64; 3];

/// A word of the link layer. The order is the kind on the wire.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Word {
    /// Said first, by both ends.
    Hello(Hello),
    /// Leader to follower: this connection shall be ours; which session do you have?
    Ask,
    /// Follower to leader: the session it holds, if any, and what it has received of each lane.
    Propose { session: Option<u64>, received: PerLane },
    /// Leader to follower: go on with that session; what the leader has received.
    Resume { received: PerLane },
    /// Leader to follower: every older session is over, this is the new one.
    Fresh { session: u64 },
    /// The sender has told its router that the peer is up.
    Up { session: u64 },
    /// Everything up to here has been given to the router.
    Ack { received: PerLane },
    /// Answer this. Also says what has been sent, so that a loss at the end of a burst is found.
    Ping { token: u64, sent: PerLane },
    /// The answer.
    Pong { token: u64 },
    /// The session is over: report the peer down.
    Down,
    /// No link, and why.
    Refused(Refusal),
}

/// What came.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Heard {
    Word(Word),
    Piece { number: u64, piece: Piece },
}

/// Why a packet was not understood.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum PacketError {
    /// Ends early, or its fields make no sense.
    #[error("a packet is malformed")]
    Malformed,
    /// Larger than may be sent.
    #[error("a packet is larger than the limit")]
    TooLarge,
    /// A kind that this version does not have.
    #[error("a packet has kind {0}, which is unknown here")]
    UnknownKind(u8),
    /// Another version of the link layer.
    #[error("the other end speaks version {0} of the link layer")]
    OtherVersion(u8),
}

pub(crate) fn encode_word(word: &Word) -> Packet {
    let bytes = postcard::to_allocvec(word).unwrap_or_default();
    let mut head = Vec::with_capacity(bytes.len() + MAGIC.len() + 1);
    let (kind, fields) = bytes.split_at(bytes.len().min(1));
    head.extend_from_slice(kind);
    if kind == [HELLO] {
        head.extend_from_slice(&MAGIC);
        head.push(LINK_VERSION);
    }
    head.extend_from_slice(fields);
    Packet { head: head.into(), body: Bytes::new() }
}

/// What stands before the head of a frame, or of a piece of one.
pub(crate) fn piece_prefix(number: u64, piece: &Piece) -> [u8; FRAME_PREFIX] {
    let kind = if piece.more { PIECE } else { FRAME };
    let [a, b, c, d, e, f, g, h] = number.to_le_bytes();
    [kind, piece.part.lane.index() as u8, a, b, c, d, e, f, g, h]
}

/// `scratch` gives the room for the head, so that many frames share one allocation.
pub(crate) fn encode_piece(number: u64, piece: &Piece, scratch: &mut BytesMut) -> Packet {
    let frame = &piece.part;
    let needed = FRAME_PREFIX + frame.head.len();
    if scratch.capacity() < needed {
        scratch.reserve(needed.max(16 << 10));
    }
    scratch.extend_from_slice(&piece_prefix(number, piece));
    scratch.extend_from_slice(&frame.head);
    Packet { head: scratch.split().freeze(), body: frame.body.clone() }
}

/// `max_frame`: the longest frame, head and body, in bytes.
pub(crate) fn decode(packet: Packet, max_frame: usize) -> Result<Heard, PacketError> {
    let Some(&kind) = packet.head.first() else { return Err(PacketError::Malformed) };
    if packet.len() > max_frame.saturating_add(FRAME_PREFIX) {
        return Err(PacketError::TooLarge);
    }
    match kind {
        FRAME | PIECE => decode_piece(packet, kind == PIECE),
        HELLO => decode_hello(&packet.head),
        kind if kind < CONTROL_KINDS => fields(&packet.head).map(Heard::Word),
        kind => Err(PacketError::UnknownKind(kind)),
    }
}

fn decode_piece(mut packet: Packet, more: bool) -> Result<Heard, PacketError> {
    let Some((&[_, lane, number @ ..], _)) = packet.head.split_first_chunk::<FRAME_PREFIX>() else {
        return Err(PacketError::Malformed);
    };
    let Some(&lane) = Lane::ALL.get(usize::from(lane)) else { return Err(PacketError::Malformed) };
    packet.head.advance(FRAME_PREFIX);
    let part = Frame { lane, head: packet.head, body: packet.body };
    Ok(Heard::Piece { number: u64::from_le_bytes(number), piece: Piece { part, more } })
}

fn decode_hello(head: &[u8]) -> Result<Heard, PacketError> {
    let rest = head.get(1..).and_then(|rest| rest.strip_prefix(&MAGIC)).ok_or(PacketError::Malformed)?;
    match rest.split_first() {
        Some((&LINK_VERSION, rest)) => fields(rest).map(|hello| Heard::Word(Word::Hello(hello))),
        Some((&other, _)) => Err(PacketError::OtherVersion(other)),
        None => Err(PacketError::Malformed),
    }
}

fn fields<'a, T: Deserialize<'a>>(bytes: &'a [u8]) -> Result<T, PacketError> {
    match postcard::take_from_bytes(bytes) {
        Ok((value, [])) => Ok(value),
        Ok(_) | Err(_) => Err(PacketError::Malformed),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::{Incarnation, NodeId};
    use proptest::prelude::*;

    fn words() -> Vec<Word> {
        let terms = Terms { scope: "s".into(), vnodes: 128, protocol: 1 };
        let peer = Peer::new(NodeId::new("a").unwrap(), Incarnation::new(300).unwrap());
        vec![
            Word::Hello(Hello { terms, peer, settled: true, max_frame: 200 }),
            Word::Ask,
            Word::Propose { session: Some(5), received: [1, 2, 300] },
            Word::Resume { received: [1, 2, 300] },
            Word::Fresh { session: 6 },
            Word::Up { session: 6 },
            Word::Ack { received: [4, 5, 6] },
            Word::Ping { token: 7, sent: [8, 9, 10] },
            Word::Pong { token: 7 },
            Word::Down,
            Word::Refused(Refusal::Vnodes { theirs: 64, ours: 128 }),
        ]
    }

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|b| format!("{b:02x}")).collect()
    }

    /// A change here is a change of the wire: nodes of two releases would not understand each other.
    #[test]
    fn golden_bytes_of_every_kind() {
        let golden = [
            "004d53545201017380010101 61ac0201c801",
            "01",
            "0201050102ac02",
            "030102ac02",
            "0406",
            "0506",
            "06040506",
            "070708090a",
            "0807",
            "09",
            "0a014080 01",
        ];
        for (kind, (word, golden)) in words().iter().zip(golden).enumerate() {
            let packet = encode_word(word);
            assert_eq!(hex(&packet.head), golden.replace(' ', ""), "{word:?}");
            assert_eq!(packet.head[0], kind as u8);
            assert_eq!(decode(packet, 100), Ok(Heard::Word(word.clone())));
        }
        assert_eq!(words().len(), usize::from(CONTROL_KINDS));
        let frame = Frame::new(Lane::Bulk, "head", "body");
        for (more, kind) in [(false, "f0"), (true, "f1")] {
            let piece = Piece { part: frame.clone(), more };
            let packet = encode_piece(258, &piece, &mut BytesMut::new());
            assert_eq!(hex(&packet.head), format!("{kind}02020100000000000068656164"));
            assert_eq!(packet.lane(), Some(Lane::Bulk));
            assert_eq!(decode(packet, 100), Ok(Heard::Piece { number: 258, piece }));
        }
    }

    #[test]
    fn hazard_22_truncated_oversized_unknown() {
        for word in words() {
            let whole = encode_word(&word).head;
            for end in 0..whole.len() {
                let cut = Packet { head: whole.slice(..end), body: Bytes::new() };
                assert_eq!(decode(cut, 100), Err(PacketError::Malformed), "{word:?} cut at {end}");
            }
        }
        let head = |bytes: &[u8]| Packet { head: Bytes::copy_from_slice(bytes), body: Bytes::new() };
        assert_eq!(decode(head(&[11]), 100), Err(PacketError::UnknownKind(11)));
        assert_eq!(decode(head(&[0, b'M', b'S', b'T', b'R', 2]), 100), Err(PacketError::OtherVersion(2)));
        assert_eq!(decode(head(&[0, b'H', b'T', b'T', b'P', 1]), 100), Err(PacketError::Malformed));
        assert_eq!(decode(head(&[FRAME, 3, 0, 0, 0, 0, 0, 0, 0, 0]), 100), Err(PacketError::Malformed));
        let part = Frame::new(Lane::Data, vec![0; 50], vec![0; 51]);
        let large = encode_piece(1, &Piece { part, more: false }, &mut BytesMut::new());
        assert_eq!(decode(large.clone(), 100), Err(PacketError::TooLarge));
        assert!(decode(large, 101).is_ok());
    }

    #[test]
    fn a_packet_is_one_message_and_back() {
        for frame in [Frame::new(Lane::Data, "head", "body"), Frame::new(Lane::Control, "", "")] {
            let packet = encode_piece(1, &Piece { part: frame, more: false }, &mut BytesMut::new());
            let bytes = packet.to_bytes();
            assert_eq!(Packet::from_bytes(bytes.clone()), Some(packet.clone()));
            for end in 0..4 + packet.head.len() {
                assert_eq!(Packet::from_bytes(bytes.slice(..end)), None, "cut at {end}");
            }
        }
        assert_eq!(Packet::from_bytes(Bytes::from_static(&[0xff; 12])), None);
    }

    proptest! {
        #[test]
        fn hazard_22_random_bytes_never_panic(mut head in prop::collection::vec(any::<u8>(), 0..80), kind in 0u8..12) {
            let _ = decode(Packet { head: head.clone().into(), body: Bytes::new() }, 60);
            if let Some(first) = head.first_mut() { *first = kind; }
            let _ = decode(Packet { head: head.into(), body: Bytes::new() }, 60);
        }
    }
}
