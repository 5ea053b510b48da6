//! The envelope of every frame's head: three bytes, then the message in postcard.
//!
//! ```text
//! | major: u8 | minor: u8 | family: u8 | message, in postcard: its kind (one byte), its fields |
//! ```
//!
//! The handshake of a link has compared the major version already (`Terms::protocol`); it is repeated in each
//! frame so that a frame can be understood alone. A payload is never in the head: it is the frame's body and is
//! passed on without a copy.
//!
//! A frame of a newer minor version or of an unknown kind is an answer of its own, not a mistake: a newer node may
//! say more than we understand. Decoding never panics, and never holds more than a small multiple of the head's
//! own length: lengths inside are checked against what is left before anything is allocated.

mod data;

use std::borrow::Borrow;
use std::cell::RefCell;

use bytes::{Bytes, BytesMut};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::calls::CallMessage;
use super::{Frame, Lane};
use crate::node::message::{Cast, DataMessage, Message};

/// The major version of the protocol; nodes of different ones refuse each other.
pub(crate) const MAJOR: u8 = 1;
/// The minor version: raised when a kind is added.
pub(crate) const MINOR: u8 = 0;

const FAMILY_CONTROL: u8 = 0;
const FAMILY_DATA: u8 = 1;
const FAMILY_CALL: u8 = 2;
const FAMILY_CACHE: u8 = 3;
const CONTROL_KINDS: u8 = 16;
const DATA_KINDS: u8 = 2;
const CALL_KINDS: u8 = 4;
const CACHE_KINDS: u8 = 2;
const PREFIX: usize = 3;

/// What a frame says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Heard {
    /// On the control or the bulk lane.
    Control(Message),
    /// On the data lane; the payload is the frame's body.
    Data(DataMessage),
    /// A request, or word of one, on the control or the bulk lane; what it says is the frame's body.
    Call(CallMessage),
    /// Of a cache, on the control or the bulk lane; its messages are the frame's body.
    Cache(CacheHead),
}

/// The head of a cache's frame. It names the cache, because nodes open their caches in different orders.
///
/// Built without the feature `cache`, a node still reads it, to say that it has no such cache: the others could not
/// tell otherwise whether it holds data that they lack.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum CacheHead {
    /// The body has messages of this cache.
    Messages {
        /// Its name.
        cache: String,
    },
    /// No such cache is open here. Never answered.
    NotOpen {
        /// Its name.
        cache: String,
    },
}

/// Why a frame was not understood. It is counted, logged once for each kind of reason, and ignored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum WireError {
    /// The head ends before its message does.
    #[error("a frame ends too early")]
    Truncated,
    /// Another major version.
    #[error("a frame has protocol version {0}; {MAJOR} is spoken here")]
    OtherMajor(u8),
    /// A newer minor version.
    #[error("a frame has protocol version {MAJOR}.{0}; up to {MAJOR}.{MINOR} is understood here")]
    NewerMinor(u8),
    /// A kind of message that this version does not have.
    #[error("a frame has kind {family}.{kind}, which is unknown here")]
    UnknownKind {
        /// Control, data, call or cache.
        family: u8,
        /// Which of them.
        kind: u8,
    },
    /// A message that must not travel on the lane on which it came.
    #[error("a frame of family {family} came on the {lane:?} lane")]
    WrongLane {
        /// Control, data, call or cache.
        family: u8,
        /// The lane.
        lane: Lane,
    },
    /// The fields make no sense.
    #[error("a frame is malformed")]
    Malformed,
}

/// The head of a control or bulk frame; `None` if the message cannot be encoded, which no message of ours is.
pub(crate) fn encode_control(message: &Message) -> Option<Bytes> {
    encode(FAMILY_CONTROL, |head| postcard::to_extend(message, head).ok())
}

/// The head of a data frame; `None` as above.
pub(crate) fn encode_data(message: &DataMessage<impl Borrow<Cast>>) -> Option<Bytes> {
    encode(FAMILY_DATA, |mut head| {
        data::write(message, &mut head);
        Some(head)
    })
}

/// The head of a call's frame; `None` as above.
pub(crate) fn encode_call(message: &CallMessage) -> Option<Bytes> {
    encode(FAMILY_CALL, |head| postcard::to_extend(message, head).ok())
}

/// The head of a cache's frame; `None` as above.
pub(crate) fn encode_cache(message: &CacheHead) -> Option<Bytes> {
    encode(FAMILY_CACHE, |head| postcard::to_extend(message, head).ok())
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// Where heads are put together. Short ones share a block: an allocation each, and another one for the copy that a
/// link keeps until it is acknowledged, would be most of what a broadcast allocates.
#[derive(Default)]
struct Scratch {
    head: Vec<u8>,
    block: BytesMut,
}

/// The size of a block. Small, because a head that is kept for long keeps its whole block.
const BLOCK: usize = 4 << 10;
/// A longer head has a place of its own.
const SHORT: usize = 512;

fn encode(family: u8, write: impl FnOnce(Vec<u8>) -> Option<Vec<u8>>) -> Option<Bytes> {
    let mut write = Some(write);
    let mut put_together = |scratch: &mut Scratch| {
        let Scratch { head: room, block } = scratch;
        let mut head = std::mem::take(room);
        head.extend_from_slice(&[MAJOR, MINOR, family]);
        let mut head = write.take()?(head)?;
        if head.len() > SHORT {
            return Some(Bytes::from(head));
        }
        if block.capacity() < head.len() {
            *block = BytesMut::with_capacity(BLOCK);
        }
        block.extend_from_slice(&head);
        head.clear();
        *room = head;
        Some(block.split().freeze())
    };
    let shared =
        SCRATCH.try_with(|scratch| scratch.try_borrow_mut().ok().map(|mut it| put_together(&mut it)));
    // a thread that ends has no room any more
    shared.ok().flatten().unwrap_or_else(|| put_together(&mut Scratch::default()))
}

/// What the frame says.
pub(crate) fn decode(frame: &Frame) -> Result<Heard, WireError> {
    let head: &[u8] = &frame.head;
    let Some((&[major, minor, family], message)) = head.split_first_chunk::<PREFIX>() else {
        return Err(WireError::Truncated);
    };
    if major != MAJOR {
        return Err(WireError::OtherMajor(major));
    }
    if minor > MINOR {
        return Err(WireError::NewerMinor(minor));
    }
    let Some(&kind) = message.first() else { return Err(WireError::Truncated) };
    let (known, on_data) = match family {
        FAMILY_CONTROL => (CONTROL_KINDS, false),
        FAMILY_DATA => (DATA_KINDS, true),
        FAMILY_CALL => (CALL_KINDS, false),
        FAMILY_CACHE => (CACHE_KINDS, false),
        _ => return Err(WireError::UnknownKind { family, kind }),
    };
    if kind >= known {
        return Err(WireError::UnknownKind { family, kind });
    }
    if on_data != (frame.lane == Lane::Data) {
        return Err(WireError::WrongLane { family, lane: frame.lane });
    }
    match family {
        FAMILY_DATA => data::read(message).map(Heard::Data),
        FAMILY_CALL => fields(message).map(Heard::Call),
        FAMILY_CACHE => fields(message).map(Heard::Cache),
        _ => fields(message).map(Heard::Control),
    }
}

fn fields<T: DeserializeOwned>(message: &[u8]) -> Result<T, WireError> {
    match postcard::take_from_bytes(message) {
        Ok((message, [])) => Ok(message),
        Ok(_) => Err(WireError::Malformed),
        Err(postcard::Error::DeserializeUnexpectedEnd) => Err(WireError::Truncated),
        Err(_) => Err(WireError::Malformed),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node::message::{Bucket, DataKind, Progress, Routed, RoutedOutcome};
    use crate::transport::calls::Declined;
    use crate::types::{BroadcastId, Group, Incarnation, MemberId, NodeId, Peer};
    use crate::view::{Standing, View, ViewHash};
    use proptest::prelude::*;

    fn peer(name: &str, incarnation: u64) -> Peer {
        Peer::new(NodeId::new(name).unwrap(), Incarnation::new(incarnation).unwrap())
    }

    fn control_messages() -> Vec<Message> {
        let hash = ViewHash::from_raw(0x0102_0304_0506_0708);
        let group = || Group::from("room:1");
        vec![
            Message::Leaving { round: 300 },
            Message::LeavingAck { round: 301 },
            Message::Announce { version: 7, hash },
            Message::Heartbeat {
                version: 8,
                hash,
                draining: true,
                digest: vec![Bucket { index: 255, count: 2, xor: 9 }],
            },
            Message::Draining,
            Message::Data {
                round: 9,
                kind: DataKind::Repair(vec![1, 2]),
                index: 3,
                last: Some(hash),
                groups: vec![group(), Group::from([0u8, 0xff].as_slice())],
            },
            Message::DataAck { round: 9, chunks: 4, complete: true },
            Message::Claims { call: 5, claims: vec![(group(), 10)] },
            Message::ClaimsAck { calls: vec![5, 6] },
            Message::Retract { version: 11, groups: vec![group()] },
            Message::RetractAck { versions: vec![11] },
            Message::NotHeld { groups: vec![(group(), 12)] },
            Message::RepairRequest { hash, buckets: vec![0, 255] },
            Message::Members {
                view: View::new([(peer("a", 1), Standing::Active), (peer("b", 2), Standing::Draining)]),
            },
            Message::Superseded { by: peer("a", 3) },
            Message::Progress(Progress {
                hop: 128,
                routed: vec![
                    Routed {
                        seq: 1,
                        outcome: RoutedOutcome::Targeted { nodes: 2, failed: vec![peer("c", 4)] },
                    },
                    Routed { seq: 2, outcome: RoutedOutcome::Flooded { covered: vec![peer("c", 4)] } },
                ],
            }),
        ]
    }

    fn data_messages() -> Vec<DataMessage> {
        let cast = Cast {
            hop: 1,
            id: BroadcastId::new(peer("a", 5), 6),
            floor: 4,
            group: Group::from("room:1"),
            except: Some(MemberId::new(peer("a", 5), 2)),
            at_most_once: false,
            headers: vec![("k".into(), Bytes::from_static(b"v"))],
        };
        vec![
            DataMessage::Route { cast: cast.clone(), hash: ViewHash::UNSETTLED },
            DataMessage::Deliver { cast, targeted: true },
        ]
    }

    fn call_messages() -> Vec<CallMessage> {
        vec![
            CallMessage::Request { call: 300, service: 0 },
            CallMessage::Answer { call: 300 },
            CallMessage::Working { call: 1 },
            CallMessage::Declined { call: 2, why: Declined::Unknown },
        ]
    }

    fn cache_heads() -> Vec<CacheHead> {
        vec![CacheHead::Messages { cache: "c".into() }, CacheHead::NotOpen { cache: "c".into() }]
    }

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|b| format!("{b:02x}")).collect()
    }

    /// A change here is a change of the wire: nodes of two releases would not understand each other.
    const GOLDEN: [&str; 24] = [
        "01000000ac02",
        "01000001ad02",
        "0100000207888e98a8c0e0808101",
        "0100000308888e98a8c0e08081010101ff0209",
        "01000004",
        "0100000509020201020301888e98a8c0e08081010206726f6f6d3a310200ff",
        "01000006090401",
        "01000007050106726f6f6d3a310a",
        "01000008020506",
        "010000090b0106726f6f6d3a31",
        "0100000a010b",
        "0100000b0106726f6f6d3a310c",
        "0100000c888e98a8c0e08081010200ff",
        "0100000d020161010001620201",
        "0100000e016103",
        "0100000f80010201000201016304020101016304",
        "0100010001016105060406726f6f6d3a3101016105020001016b017600",
        "0100010101016105060406726f6f6d3a3101016105020001016b017601",
        "01000200ac0200",
        "01000201ac02",
        "0100020201",
        "010002030201",
        "010003000163",
        "010003010163",
    ];

    fn frames() -> Vec<Frame> {
        let control = control_messages().into_iter().map(|m| {
            let lane = if matches!(m, Message::Data { .. }) { Lane::Bulk } else { Lane::Control };
            Frame::new(lane, encode_control(&m).unwrap(), Bytes::new())
        });
        let data =
            data_messages().into_iter().map(|m| Frame::new(Lane::Data, encode_data(&m).unwrap(), "body"));
        let calls = call_messages()
            .into_iter()
            .map(|m| Frame::new(Lane::Control, encode_call(&m).unwrap(), Bytes::new()));
        let caches = cache_heads()
            .into_iter()
            .map(|m| Frame::new(Lane::Bulk, encode_cache(&m).unwrap(), Bytes::new()));
        control.chain(data).chain(calls).chain(caches).collect()
    }

    #[test]
    fn golden_bytes_of_every_kind() {
        let heads: Vec<String> = frames().iter().map(|f| hex(&f.head)).collect();
        assert_eq!(heads, GOLDEN);
        let kinds: std::collections::BTreeSet<(u8, u8)> =
            frames().iter().map(|f| (f.head[2], f.head[3])).collect();
        assert_eq!(
            kinds.len(),
            usize::from(CONTROL_KINDS + DATA_KINDS + CALL_KINDS + CACHE_KINDS),
            "one sample of every kind"
        );
    }

    #[test]
    fn every_kind_comes_back() {
        let mut heard = frames().into_iter().map(|f| decode(&f).expect("understood"));
        for message in control_messages() {
            assert_eq!(heard.next(), Some(Heard::Control(message)));
        }
        for message in data_messages() {
            assert_eq!(heard.next(), Some(Heard::Data(message)));
        }
        for message in call_messages() {
            assert_eq!(heard.next(), Some(Heard::Call(message)));
        }
        for head in cache_heads() {
            assert_eq!(heard.next(), Some(Heard::Cache(head)));
        }
    }

    #[test]
    fn hazard_22_truncated_anywhere_is_refused() {
        for frame in frames() {
            for end in 0..frame.head.len() {
                let cut = Frame::new(frame.lane, frame.head.slice(..end), Bytes::new());
                let error = decode(&cut).expect_err("a cut frame");
                assert!(matches!(error, WireError::Truncated | WireError::Malformed), "{error:?} at {end}");
            }
            let mut longer = frame.head.to_vec();
            longer.push(0);
            let longer = Frame::new(frame.lane, longer, Bytes::new());
            assert_eq!(decode(&longer), Err(WireError::Malformed));
        }
    }

    #[test]
    fn hazard_22_newer_versions_and_unknown_kinds_are_told_apart() {
        let with = |lane, head: &[u8]| decode(&Frame::new(lane, head.to_vec(), Bytes::new()));
        assert_eq!(with(Lane::Control, &[2, 0, 0, 4]), Err(WireError::OtherMajor(2)));
        assert_eq!(with(Lane::Control, &[1, 1, 0, 4]), Err(WireError::NewerMinor(1)));
        let unknown = |family, kind| Err(WireError::UnknownKind { family, kind });
        assert_eq!(with(Lane::Control, &[1, 0, 0, 16]), unknown(0, 16));
        assert_eq!(with(Lane::Data, &[1, 0, 1, 2]), unknown(1, 2));
        assert_eq!(with(Lane::Control, &[1, 0, 2, 4]), unknown(2, 4));
        assert_eq!(with(Lane::Control, &[1, 0, 3, 2]), unknown(3, 2));
        assert_eq!(with(Lane::Control, &[1, 0, 9, 0]), unknown(9, 0));
        assert_eq!(
            with(Lane::Data, &[1, 0, 2, 1, 1]),
            Err(WireError::WrongLane { family: 2, lane: Lane::Data })
        );
        assert_eq!(
            with(Lane::Data, &[1, 0, 0, 4]),
            Err(WireError::WrongLane { family: 0, lane: Lane::Data })
        );
        assert_eq!(with(Lane::Control, &[1, 0, 0, 4]), Ok(Heard::Control(Message::Draining)));
    }

    #[test]
    fn hazard_22_a_length_beyond_the_frame_allocates_nothing() {
        // Retract { version: 1, groups: 2^63 of them }
        let mut head = vec![MAJOR, MINOR, FAMILY_CONTROL, 9, 1];
        head.extend_from_slice(&[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x7f]);
        assert!(decode(&Frame::new(Lane::Control, head, Bytes::new())).is_err());
    }

    proptest! {
        #[test]
        fn hazard_22_random_bytes_never_panic(mut head in prop::collection::vec(any::<u8>(), 0..200), own in any::<bool>(), lane in 0usize..3) {
            if own {
                for (at, byte) in [MAJOR, MINOR].into_iter().enumerate() {
                    if let Some(place) = head.get_mut(at) { *place = byte; }
                }
                if let Some(family) = head.get_mut(2) { *family %= 4; }
                if let Some(kind) = head.get_mut(3) { *kind %= 17; }
            }
            let _ = decode(&Frame::new(Lane::ALL[lane], head, Bytes::new()));
        }

        #[test]
        fn hazard_22_a_flipped_bit_never_panics(which in 0usize..24, at in any::<prop::sample::Index>(), bit in 0u8..8) {
            let frame = frames().swap_remove(which);
            let mut head = frame.head.to_vec();
            let at = at.index(head.len());
            head[at] ^= 1 << bit;
            let _ = decode(&Frame::new(frame.lane, head, Bytes::new()));
        }
    }
}
