//! The canonical encoding of terms: the one input of their hash, and what goes over the wire.

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;
use serde::de::{self, SeqAccess};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use smallvec::SmallVec;
use xxhash_rust::xxh3::xxh3_64;

use super::{MAX_TERM_DEPTH, Record, Term, TermError, canonical};

const NIL: u8 = 0;
const FALSE: u8 = 1;
const TRUE: u8 = 2;
const INT: u8 = 3;
const FLOAT: u8 = 4;
const STR: u8 = 5;
const BYTES: u8 = 6;
const LIST: u8 = 7;
const TUPLE: u8 = 8;
const MAP: u8 = 9;

/// The name under which terms pass through serde as their encoding.
pub(super) const TOKEN: &str = "$muster_router::Term";

/// Where an encoding goes.
pub(crate) trait Sink {
    fn put(&mut self, bytes: &[u8]);
}

impl Sink for Vec<u8> {
    fn put(&mut self, bytes: &[u8]) {
        self.extend_from_slice(bytes);
    }
}

impl Sink for SmallVec<[u8; 128]> {
    fn put(&mut self, bytes: &[u8]) {
        self.extend_from_slice(bytes);
    }
}

/// Counts only.
pub(crate) struct Count(pub(crate) usize);

impl Sink for Count {
    fn put(&mut self, bytes: &[u8]) {
        self.0 = self.0.saturating_add(bytes.len());
    }
}

/// The hash of what is written; the one-shot hasher is several times as fast as the streaming one on short input.
pub(super) fn hash(write: impl FnOnce(&mut SmallVec<[u8; 128]>)) -> u64 {
    let mut bytes = SmallVec::new();
    write(&mut bytes);
    xxh3_64(&bytes)
}

pub(crate) fn write_varint(mut value: u64, out: &mut impl Sink) {
    while value >= 0x80 {
        out.put(&[value as u8 | 0x80]);
        value >>= 7;
    }
    out.put(&[value as u8]);
}

fn write_slice(tag: u8, bytes: &[u8], out: &mut impl Sink) {
    out.put(&[tag]);
    write_varint(bytes.len() as u64, out);
    out.put(bytes);
}

fn write_items(tag: u8, items: &[Term], out: &mut impl Sink) {
    out.put(&[tag]);
    write_varint(items.len() as u64, out);
    items.iter().for_each(|item| write_term(item, out));
}

pub(crate) fn write_tuple(fields: &[Term], out: &mut impl Sink) {
    write_items(TUPLE, fields, out);
}

/// Writes any term, also one that must not be kept: who hands it on has checked it.
pub(crate) fn write_term(term: &Term, out: &mut impl Sink) {
    match term {
        Term::Nil => out.put(&[NIL]),
        Term::Bool(false) => out.put(&[FALSE]),
        Term::Bool(true) => out.put(&[TRUE]),
        Term::Int(int) => {
            out.put(&[INT]);
            write_varint(((int << 1) ^ (int >> 63)) as u64, out);
        }
        Term::Float(float) => {
            out.put(&[FLOAT]);
            out.put(&canonical(*float).to_bits().to_be_bytes());
        }
        Term::Str(text) => write_slice(STR, text.as_bytes(), out),
        Term::Bytes(bytes) => write_slice(BYTES, bytes, out),
        Term::List(items) => write_items(LIST, items, out),
        Term::Tuple(items) => write_items(TUPLE, items, out),
        Term::Map(map) => {
            out.put(&[MAP]);
            write_varint(map.len() as u64, out);
            for (key, value) in map {
                write_term(key, out);
                write_term(value, out);
            }
        }
    }
}

/// Reads what was written; every length is checked against what is left before anything is held.
pub(crate) struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    pub(crate) fn end(&self) -> Result<(), TermError> {
        if self.0.is_empty() { Ok(()) } else { Err(TermError::malformed("bytes follow it")) }
    }

    pub(crate) fn peek(&self) -> Option<u8> {
        self.0.first().copied()
    }

    pub(crate) fn byte(&mut self) -> Result<u8, TermError> {
        let (first, rest) = self.0.split_first().ok_or(TermError::Truncated)?;
        self.0 = rest;
        Ok(*first)
    }

    fn take(&mut self, length: u64) -> Result<&'a [u8], TermError> {
        let length = usize::try_from(length).map_err(|_| TermError::Truncated)?;
        let (taken, rest) = self.0.split_at_checked(length).ok_or(TermError::Truncated)?;
        self.0 = rest;
        Ok(taken)
    }

    pub(crate) fn varint(&mut self) -> Result<u64, TermError> {
        let mut value = 0u64;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            if shift == 63 && byte > 1 {
                return Err(TermError::malformed("a number is too long"));
            }
            value |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                // one number, one form
                let shortest = byte != 0 || shift == 0;
                return if shortest { Ok(value) } else { Err(TermError::malformed("a number is padded")) };
            }
        }
        Err(TermError::malformed("a number is too long"))
    }

    /// A count of items of at least so many bytes each.
    pub(crate) fn count(&mut self, bytes_each: usize) -> Result<usize, TermError> {
        let count = usize::try_from(self.varint()?).map_err(|_| TermError::Truncated)?;
        if count > self.0.len() / bytes_each { Err(TermError::Truncated) } else { Ok(count) }
    }

    pub(crate) fn term(&mut self, levels: usize) -> Result<Term, TermError> {
        Ok(match self.byte()? {
            NIL => Term::Nil,
            FALSE => Term::Bool(false),
            TRUE => Term::Bool(true),
            INT => {
                let zigzag = self.varint()?;
                Term::Int((zigzag >> 1) as i64 ^ -((zigzag & 1) as i64))
            }
            FLOAT => Term::Float(self.float()?),
            STR => {
                let length = self.varint()?;
                let text = std::str::from_utf8(self.take(length)?);
                Term::Str(Arc::from(text.map_err(|_| TermError::malformed("a string is no UTF-8"))?))
            }
            BYTES => {
                let length = self.varint()?;
                Term::Bytes(Bytes::copy_from_slice(self.take(length)?))
            }
            LIST => Term::List(self.items(levels)?),
            TUPLE => Term::Tuple(self.items(levels)?),
            MAP => Term::Map(self.map(levels)?),
            _ => return Err(TermError::malformed("unknown kind")),
        })
    }

    fn float(&mut self) -> Result<f64, TermError> {
        let (bits, rest) = self.0.split_first_chunk::<8>().ok_or(TermError::Truncated)?;
        self.0 = rest;
        let float = f64::from_bits(u64::from_be_bytes(*bits));
        if float.is_nan() {
            Err(TermError::NotANumber)
        } else if float == 0.0 && float.is_sign_negative() {
            Err(TermError::malformed("-0.0 is written as 0.0"))
        } else {
            Ok(float)
        }
    }

    fn items(&mut self, levels: usize) -> Result<Vec<Term>, TermError> {
        let inner = deeper(levels)?;
        let count = self.count(1)?;
        // not the whole count at once: each level of a nest could claim all that is left
        let mut items = Vec::with_capacity(count.min(8));
        for _ in 0..count {
            items.push(self.term(inner)?);
        }
        Ok(items)
    }

    fn map(&mut self, levels: usize) -> Result<BTreeMap<Term, Term>, TermError> {
        let inner = deeper(levels)?;
        let mut map = BTreeMap::new();
        for _ in 0..self.count(2)? {
            let key = self.term(inner)?;
            if map.last_key_value().is_some_and(|(last, _)| *last >= key) {
                return Err(TermError::malformed("the keys of a map do not rise"));
            }
            let value = self.term(inner)?;
            map.insert(key, value);
        }
        Ok(map)
    }
}

pub(crate) fn deeper(levels: usize) -> Result<usize, TermError> {
    levels.checked_sub(1).ok_or(TermError::TooDeep { max: MAX_TERM_DEPTH })
}

/// Bytes, whatever the format makes of them.
pub(crate) struct Encoded(pub(crate) Vec<u8>);

impl Serialize for Encoded {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_bytes(&self.0)
    }
}

/// Reads bytes and hands them to a decoder.
struct Decoded<T, E>(fn(&[u8]) -> Result<T, E>, bool);

impl<'de, T, E: std::fmt::Display> de::Visitor<'de> for Decoded<T, E> {
    type Value = T;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("the bytes of an encoding")
    }

    fn visit_newtype_struct<D: Deserializer<'de>>(self, deserializer: D) -> Result<T, D::Error> {
        // once: a format that nests without end must not lead us
        if self.1 {
            return Err(de::Error::custom("an encoding inside an encoding"));
        }
        deserializer.deserialize_bytes(Decoded(self.0, true))
    }

    fn visit_bytes<X: de::Error>(self, bytes: &[u8]) -> Result<T, X> {
        (self.0)(bytes).map_err(X::custom)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<T, A::Error> {
        let mut bytes = Vec::new();
        while let Some(byte) = seq.next_element::<u8>()? {
            bytes.push(byte);
        }
        self.visit_bytes(&bytes)
    }
}

/// Serialises an encoding under a name that [`super::to_term`] knows.
pub(crate) fn serialize<S: Serializer, E: std::fmt::Display>(
    encoding: Result<Vec<u8>, E>,
    name: &'static str,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    let encoded = Encoded(encoding.map_err(serde::ser::Error::custom)?);
    serializer.serialize_newtype_struct(name, &encoded)
}

pub(crate) fn deserialize<'de, D: Deserializer<'de>, T, E: std::fmt::Display>(
    decode: fn(&[u8]) -> Result<T, E>,
    name: &'static str,
    deserializer: D,
) -> Result<T, D::Error> {
    deserializer.deserialize_newtype_struct(name, Decoded(decode, false))
}

impl Serialize for Term {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serialize(self.encode(), TOKEN, serializer)
    }
}

impl<'de> Deserialize<'de> for Term {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserialize(Term::decode, TOKEN, deserializer)
    }
}

impl Serialize for Record {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serialize(self.encode(), TOKEN, serializer)
    }
}

impl<'de> Deserialize<'de> for Record {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserialize(Record::decode, TOKEN, deserializer)
    }
}
