//! What one NATS message of ours says, and how it looks in bytes.
//!
//! ```text
//! all:      | version: u8 | kind: u8 | ...
//! presence, claim, taken, open, accept:  fields, in postcard
//! data:     | dialer: u64 | acceptor: u64 | number: u64 | taken: u64 | a piece of the connection's byte stream
//! credit:   | dialer: u64 | acceptor: u64 | taken: u64 |
//! close:    | dialer: u64 | acceptor: u64 |
//! ```
//!
//! Numbers are little-endian. Decoding never panics and copies nothing.

use bytes::{Buf, BufMut, Bytes, BytesMut};
use serde::{Deserialize, Serialize};

use super::subject::LifeId;
use crate::types::{Incarnation, NodeId};

const VERSION: u8 = 1;
const PRESENCE: u8 = 1;
const CLAIM: u8 = 2;
const TAKEN: u8 = 3;
const OPEN: u8 = 4;
const ACCEPT: u8 = 5;
const DATA: u8 = 6;
const CREDIT: u8 = 7;
const CLOSE: u8 = 8;

/// The longest message whose fields are in postcard: a node's name has at most 255 bytes.
const MAX_FIELDS: usize = 1024;
/// What stands in front of a piece of the byte stream.
pub(super) const DATA_PREFIX: usize = 34;

/// Names a raw connection by a number of each end, both drawn at random: nothing of an earlier one can be taken
/// for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) struct Key {
    pub(super) dialer: u64,
    pub(super) acceptor: u64,
}

/// Why a node says that it is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Word {
    /// It has just started: everyone answers.
    Hello,
    /// It has a connection to NATS again, and has given up every raw connection that it had before.
    Back,
    /// It is still there.
    Beat,
    /// To one node: so am I.
    Answer,
    /// It leaves.
    Leaving,
}

/// A node says that it is there.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Presence {
    pub(super) node: NodeId,
    pub(super) life: LifeId,
    pub(super) incarnation: Incarnation,
    /// How often it has been back: raw connections do not outlive this.
    pub(super) epoch: u64,
    pub(super) word: Word,
    /// After how many milliseconds it says so again.
    pub(super) every_ms: u32,
    /// How many nodes it is linked with, and itself.
    pub(super) nodes: u32,
}

/// One NATS message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Envelope {
    Presence(Presence),
    /// Is this name free? Answered with `Taken` by the one that holds it.
    Claim(Presence),
    Taken(Presence),
    /// A raw connection is wanted.
    Open {
        from: Presence,
        dialer: u64,
        /// How much may be on its way to `from`'s peer, in bytes: it must be told of room before that is used up.
        window: u32,
    },
    Accept {
        key: Key,
        window: u32,
    },
    Data {
        key: Key,
        /// From 0, without a gap.
        number: u64,
        /// What the sender of this has taken, in the other direction.
        taken: u64,
        piece: Bytes,
    },
    Credit {
        key: Key,
        taken: u64,
    },
    Close {
        key: Key,
    },
}

/// Why a message was not understood.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum EnvelopeError {
    #[error("a message is malformed")]
    Malformed,
    #[error("a message has version {0}, which is unknown here")]
    OtherVersion(u8),
    #[error("a message has kind {0}, which is unknown here")]
    UnknownKind(u8),
}

impl Envelope {
    pub(super) fn encode(&self) -> Bytes {
        let mut out = BytesMut::with_capacity(64);
        out.put_u8(VERSION);
        match self {
            Envelope::Presence(presence) => fields(&mut out, PRESENCE, presence),
            Envelope::Claim(presence) => fields(&mut out, CLAIM, presence),
            Envelope::Taken(presence) => fields(&mut out, TAKEN, presence),
            Envelope::Open { from, dialer, window } => fields(&mut out, OPEN, &(from, dialer, window)),
            Envelope::Accept { key, window } => fields(&mut out, ACCEPT, &(key, window)),
            Envelope::Data { key, number, taken, piece } => {
                put_key(&mut out, DATA, *key);
                out.put_u64_le(*number);
                out.put_u64_le(*taken);
                out.extend_from_slice(piece);
            }
            Envelope::Credit { key, taken } => {
                put_key(&mut out, CREDIT, *key);
                out.put_u64_le(*taken);
            }
            Envelope::Close { key } => put_key(&mut out, CLOSE, *key),
        }
        out.freeze()
    }

    pub(super) fn decode(mut bytes: Bytes) -> Result<Self, EnvelopeError> {
        let version = bytes.try_get_u8().map_err(|_| EnvelopeError::Malformed)?;
        let kind = bytes.try_get_u8().map_err(|_| EnvelopeError::Malformed)?;
        if version != VERSION {
            return Err(EnvelopeError::OtherVersion(version));
        }
        match kind {
            PRESENCE => read(&bytes).map(Envelope::Presence),
            CLAIM => read(&bytes).map(Envelope::Claim),
            TAKEN => read(&bytes).map(Envelope::Taken),
            OPEN => read(&bytes).map(|(from, dialer, window)| Envelope::Open { from, dialer, window }),
            ACCEPT => read(&bytes).map(|(key, window)| Envelope::Accept { key, window }),
            DATA => {
                let (key, number, taken) = (key(&mut bytes)?, number(&mut bytes)?, number(&mut bytes)?);
                Ok(Envelope::Data { key, number, taken, piece: bytes })
            }
            CREDIT => {
                let (key, taken) = (key(&mut bytes)?, number(&mut bytes)?);
                whole(&bytes).map(|()| Envelope::Credit { key, taken })
            }
            CLOSE => {
                let key = key(&mut bytes)?;
                whole(&bytes).map(|()| Envelope::Close { key })
            }
            kind => Err(EnvelopeError::UnknownKind(kind)),
        }
    }
}

/// The same as [`Envelope::Data`] for pieces that are gathered: `fill` appends them.
pub(super) fn encode_data(
    key: Key,
    number: u64,
    taken: u64,
    len: usize,
    fill: impl FnOnce(&mut BytesMut),
) -> Bytes {
    let mut out = BytesMut::with_capacity(DATA_PREFIX + len);
    out.put_u8(VERSION);
    put_key(&mut out, DATA, key);
    out.put_u64_le(number);
    out.put_u64_le(taken);
    fill(&mut out);
    out.freeze()
}

fn fields(out: &mut BytesMut, kind: u8, value: &impl Serialize) {
    out.put_u8(kind);
    out.extend_from_slice(&postcard::to_allocvec(value).unwrap_or_default());
}

fn put_key(out: &mut BytesMut, kind: u8, key: Key) {
    out.put_u8(kind);
    out.put_u64_le(key.dialer);
    out.put_u64_le(key.acceptor);
}

fn read<'a, T: Deserialize<'a>>(bytes: &'a Bytes) -> Result<T, EnvelopeError> {
    if bytes.len() > MAX_FIELDS {
        return Err(EnvelopeError::Malformed);
    }
    match postcard::take_from_bytes(bytes) {
        Ok((value, [])) => Ok(value),
        Ok(_) | Err(_) => Err(EnvelopeError::Malformed),
    }
}

fn number(bytes: &mut Bytes) -> Result<u64, EnvelopeError> {
    bytes.try_get_u64_le().map_err(|_| EnvelopeError::Malformed)
}

fn key(bytes: &mut Bytes) -> Result<Key, EnvelopeError> {
    Ok(Key { dialer: number(bytes)?, acceptor: number(bytes)? })
}

fn whole(bytes: &Bytes) -> Result<(), EnvelopeError> {
    if bytes.is_empty() { Ok(()) } else { Err(EnvelopeError::Malformed) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn presence() -> Presence {
        Presence {
            node: NodeId::new("a").unwrap(),
            life: LifeId(300),
            incarnation: Incarnation::new(5).unwrap(),
            epoch: 2,
            word: Word::Back,
            every_ms: 1000,
            nodes: 3,
        }
    }

    fn all() -> Vec<Envelope> {
        let key = Key { dialer: 1, acceptor: 258 };
        vec![
            Envelope::Presence(presence()),
            Envelope::Claim(presence()),
            Envelope::Taken(presence()),
            Envelope::Open { from: presence(), dialer: 7, window: 65_536 },
            Envelope::Accept { key, window: 65_536 },
            Envelope::Data { key, number: 9, taken: 10, piece: Bytes::from_static(b"piece") },
            Envelope::Credit { key, taken: 11 },
            Envelope::Close { key },
        ]
    }

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|b| format!("{b:02x}")).collect()
    }

    /// A change here is a change of the wire: nodes of two releases would not understand each other.
    #[test]
    fn golden_bytes_of_every_kind() {
        let golden = [
            "01010161ac02050201e80703",
            "01020161ac02050201e80703",
            "01030161ac02050201e80703",
            "01040161ac02050201e8070307808004",
            "0105018202808004",
            "010601000000000000000201000000000000 09000000000000000a000000000000007069656365",
            "010701000000000000000201000000000000 0b00000000000000",
            "010801000000000000000201000000000000",
        ];
        for (envelope, golden) in all().iter().zip(golden) {
            let bytes = envelope.encode();
            assert_eq!(hex(&bytes), golden.replace(' ', ""), "{envelope:?}");
            assert_eq!(Envelope::decode(bytes).as_ref(), Ok(envelope));
        }
        let Envelope::Data { key, number, taken, piece } = all().remove(5) else { unreachable!() };
        let gathered = encode_data(key, number, taken, piece.len(), |out| out.extend_from_slice(&piece));
        assert_eq!(gathered, all()[5].encode());
        assert_eq!(gathered.len(), DATA_PREFIX + piece.len());
    }

    #[test]
    fn hazard_22_cut_long_and_unknown_messages() {
        for envelope in all() {
            let whole = envelope.encode();
            let data = matches!(envelope, Envelope::Data { .. });
            let shortest = if data { DATA_PREFIX } else { whole.len() };
            for end in 0..shortest {
                let cut = Envelope::decode(whole.slice(..end));
                assert_eq!(cut, Err(EnvelopeError::Malformed), "{envelope:?} cut at {end}");
            }
            if !data {
                let mut long = whole.to_vec();
                long.push(0);
                assert_eq!(Envelope::decode(long.into()), Err(EnvelopeError::Malformed), "{envelope:?}");
            }
        }
        assert_eq!(Envelope::decode(Bytes::from_static(&[1, 9])), Err(EnvelopeError::UnknownKind(9)));
        assert_eq!(Envelope::decode(Bytes::from_static(&[2, 1])), Err(EnvelopeError::OtherVersion(2)));
        assert_eq!(
            Envelope::decode(vec![1; 4000].into()),
            Err(EnvelopeError::Malformed),
            "too long for fields"
        );
    }

    proptest! {
        #[test]
        fn hazard_22_random_messages_never_panic(mut bytes in prop::collection::vec(any::<u8>(), 0..80), kind in 0u8..10) {
            let _ = Envelope::decode(bytes.clone().into());
            if let Some(first) = bytes.get_mut(0) { *first = VERSION; }
            if let Some(second) = bytes.get_mut(1) { *second = kind; }
            let _ = Envelope::decode(bytes.into());
        }
    }
}
