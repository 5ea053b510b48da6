//! The data family by hand: the bytes that postcard makes of a [`DataMessage`], without its steps for each field. Two of
//! these are written and read for every broadcast, and that was a fifth of all it costs. The tests hold it against
//! postcard, byte for byte and error for error.

use std::borrow::Borrow;
use std::cell::RefCell;

use bytes::Bytes;

use super::WireError;
use crate::node::message::{Cast, DataMessage};
use crate::ring::key_hash;
use crate::types::{BroadcastId, Group, Incarnation, MemberId, NodeId, Peer};
use crate::view::ViewHash;

/// Kinds, in the order of the variants.
const ROUTE: u8 = 0;
const DELIVER: u8 = 1;

/// Appends the message.
pub(super) fn write(message: &DataMessage<impl Borrow<Cast>>, to: &mut Vec<u8>) {
    match message {
        DataMessage::Route { cast, hash } => {
            to.push(ROUTE);
            write_cast(cast.borrow(), to);
            write_number(hash.get(), to);
        }
        DataMessage::Deliver { cast, targeted } => {
            to.push(DELIVER);
            write_cast(cast.borrow(), to);
            to.push(u8::from(*targeted));
        }
    }
}

fn write_cast(cast: &Cast, to: &mut Vec<u8>) {
    let Cast { hop, id, floor, group, except, at_most_once, headers } = cast;
    write_number(*hop, to);
    write_peer(&id.origin, to);
    write_number(id.seq, to);
    write_number(*floor, to);
    write_bytes(group.as_bytes(), to);
    match except {
        None => to.push(0),
        Some(member) => {
            to.push(1);
            write_peer(&member.peer, to);
            write_number(member.number, to);
        }
    }
    to.push(u8::from(*at_most_once));
    write_number(headers.len() as u64, to);
    for (name, value) in headers {
        write_bytes(name.as_bytes(), to);
        write_bytes(value, to);
    }
}

fn write_peer(peer: &Peer, to: &mut Vec<u8>) {
    write_bytes(peer.node.as_bytes(), to);
    write_number(peer.incarnation.get(), to);
}

fn write_bytes(bytes: &[u8], to: &mut Vec<u8>) {
    write_number(bytes.len() as u64, to);
    to.extend_from_slice(bytes);
}

const LONGEST_NUMBER: usize = 10;

/// Seven bits a byte, the lowest first; the highest bit says that more follow.
fn write_number(mut number: u64, to: &mut Vec<u8>) {
    if number < 0x80 {
        return to.push(number as u8);
    }
    // put together here, because a vector asks for room with every byte
    let (mut bytes, mut length) = ([0; LONGEST_NUMBER], 0);
    for byte in &mut bytes {
        length += 1;
        *byte = number as u8 | 0x80;
        number >>= 7;
        if number == 0 {
            *byte &= 0x7f;
            break;
        }
    }
    to.extend_from_slice(bytes.get(..length).unwrap_or_default());
}

/// The message, which is all that there is.
pub(super) fn read(message: &[u8]) -> Result<DataMessage, WireError> {
    let mut rest = message;
    let kind = read_byte(&mut rest)?;
    let cast = match kind {
        ROUTE | DELIVER => read_cast(&mut rest)?,
        _ => return Err(WireError::Malformed),
    };
    let message = match kind {
        ROUTE => DataMessage::Route { cast, hash: ViewHash::from_raw(read_number(&mut rest)?) },
        _ => DataMessage::Deliver { cast, targeted: read_bool(&mut rest)? },
    };
    if rest.is_empty() { Ok(message) } else { Err(WireError::Malformed) }
}

fn read_cast(rest: &mut &[u8]) -> Result<Cast, WireError> {
    Ok(Cast {
        hop: read_number(rest)?,
        id: {
            let origin = read_peer(rest)?;
            BroadcastId::new(origin, read_number(rest)?)
        },
        floor: read_number(rest)?,
        group: Group::from(read_bytes(rest)?),
        except: match read_bool(rest)? {
            false => None,
            true => {
                let peer = read_peer(rest)?;
                Some(MemberId::new(peer, read_number(rest)?))
            }
        },
        at_most_once: read_bool(rest)?,
        headers: read_headers(rest)?,
    })
}

fn read_headers(rest: &mut &[u8]) -> Result<Vec<(String, Bytes)>, WireError> {
    let mut headers = Vec::new();
    // no room is made for what is only said to come
    for _ in 0..read_number(rest)? {
        let name = read_text(rest)?.to_owned();
        headers.push((name, Bytes::copy_from_slice(read_bytes(rest)?)));
    }
    Ok(headers)
}

fn read_peer(rest: &mut &[u8]) -> Result<Peer, WireError> {
    let node = node_of(read_text(rest)?)?;
    let incarnation = Incarnation::new(read_number(rest)?).ok_or(WireError::Malformed)?;
    Ok(Peer::new(node, incarnation))
}

fn read_text<'a>(rest: &mut &'a [u8]) -> Result<&'a str, WireError> {
    std::str::from_utf8(read_bytes(rest)?).map_err(|_| WireError::Malformed)
}

fn read_bytes<'a>(rest: &mut &'a [u8]) -> Result<&'a [u8], WireError> {
    let length = usize::try_from(read_number(rest)?).map_err(|_| WireError::Truncated)?;
    let (bytes, behind) = rest.split_at_checked(length).ok_or(WireError::Truncated)?;
    *rest = behind;
    Ok(bytes)
}

fn read_bool(rest: &mut &[u8]) -> Result<bool, WireError> {
    match read_byte(rest)? {
        0 => Ok(false),
        1 => Ok(true),
        _ => Err(WireError::Malformed),
    }
}

fn read_byte(rest: &mut &[u8]) -> Result<u8, WireError> {
    let (byte, behind) = rest.split_first().ok_or(WireError::Truncated)?;
    *rest = behind;
    Ok(*byte)
}

fn read_number(rest: &mut &[u8]) -> Result<u64, WireError> {
    let (mut number, mut shift) = (0, 0);
    let mut bytes = rest.iter();
    while shift < u64::BITS {
        let Some(&byte) = bytes.next() else { return Err(WireError::Truncated) };
        number |= u64::from(byte & 0x7f) << shift;
        if byte < 0x80 {
            *rest = bytes.as_slice();
            // of the tenth byte only one bit has a place
            return if shift < 63 || byte <= 1 { Ok(number) } else { Err(WireError::Malformed) };
        }
        shift += 7;
    }
    Err(WireError::Malformed)
}

/// The same few names come again and again: so many are kept by each thread, each at the place that its hash names.
const NAMES: usize = 64;

thread_local! {
    static KNOWN: RefCell<[Option<NodeId>; NAMES]> = const { RefCell::new([const { None }; NAMES]) };
}

fn node_of(name: &str) -> Result<NodeId, WireError> {
    let new = || NodeId::new(name).map_err(|_| WireError::Malformed);
    let known = KNOWN.try_with(|known| {
        let Ok(mut known) = known.try_borrow_mut() else { return new() };
        let place = key_hash(name.as_bytes()) as usize % NAMES;
        let Some(place) = known.get_mut(place) else { return new() };
        match place {
            Some(node) if node.as_str() == name => Ok(node.clone()),
            _ => Ok(place.insert(new()?).clone()),
        }
    });
    // a thread that ends keeps none any more
    known.unwrap_or_else(|_| new())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn peers() -> impl Strategy<Value = Peer> {
        ("[a-zé]{1,200}", 1..=u64::MAX).prop_map(|(name, life)| {
            let name = NodeId::new(name.chars().take(80).collect::<String>()).unwrap();
            Peer::new(name, Incarnation::new(life).unwrap())
        })
    }

    fn messages() -> impl Strategy<Value = DataMessage> {
        let bytes = || prop::collection::vec(any::<u8>(), 0..300);
        let header = (".{0,20}", bytes()).prop_map(|(name, value)| (name, Bytes::from(value)));
        let id = (peers(), any::<u64>()).prop_map(|(origin, seq)| BroadcastId::new(origin, seq));
        let except = prop::option::of((peers(), any::<u64>()));
        let parts = (any::<u64>(), id, 0u64..70_000, bytes(), except, any::<bool>());
        let cast = (parts, prop::collection::vec(header, 0..4)).prop_map(|(parts, headers)| {
            let (hop, id, floor, group, except, at_most_once) = parts;
            let except = except.map(|(peer, number)| MemberId::new(peer, number));
            Cast { hop, id, floor, group: Group::from(group), except, at_most_once, headers }
        });
        (cast, any::<u64>(), any::<bool>(), any::<bool>()).prop_map(|(cast, hash, targeted, route)| {
            match route {
                true => DataMessage::Route { cast, hash: ViewHash::from_raw(hash) },
                false => DataMessage::Deliver { cast, targeted },
            }
        })
    }

    fn written(message: &DataMessage) -> Vec<u8> {
        let mut bytes = Vec::new();
        write(message, &mut bytes);
        bytes
    }

    proptest! {
        #[test]
        fn it_is_what_postcard_says(message in messages(), end in any::<prop::sample::Index>(), bit in 0u8..8) {
            let bytes = written(&message);
            prop_assert_eq!(&bytes, &postcard::to_allocvec(&message).unwrap());
            prop_assert_eq!(read(&bytes), Ok(message));
            // also of what is cut or bent
            let at = end.index(bytes.len());
            let mut bent = bytes.clone();
            bent[at] ^= 1 << bit;
            let longer = [&bytes[..], &[0]].concat();
            for hostile in [&bytes[..at], &bent, &longer] {
                prop_assert_eq!(read(hostile), super::super::fields(hostile), "{:02x?}", hostile);
            }
        }

        #[test]
        fn hazard_22_random_bytes_are_what_postcard_says(mut bytes in prop::collection::vec(any::<u8>(), 0..60), kind in 0u8..3, small in any::<bool>()) {
            if let Some(first) = bytes.first_mut() { *first = kind; }
            if small { bytes.iter_mut().for_each(|byte| *byte %= 4); }
            prop_assert_eq!(read(&bytes), super::super::fields(&bytes));
        }
    }

    #[test]
    fn names_that_meet_at_one_place_do_not_mix() {
        let names: Vec<String> = (0..NAMES * 4).map(|number| format!("node-{number}")).collect();
        for name in names.iter().chain(names.iter().rev()) {
            assert_eq!(node_of(name).unwrap().as_str(), name);
        }
        assert_eq!(node_of(""), Err(WireError::Malformed));
        assert_eq!(node_of(&"n".repeat(256)), Err(WireError::Malformed));
    }
}
