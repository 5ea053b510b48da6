//! Terms: the values of the cache, with one order and one hash on every platform and in every release.
//!
//! # The rule of order and hash
//! * Terms of different kinds are ordered by kind: nil, bool, int, float, string, bytes, list, tuple, map. So 1 and
//!   1.0 are different, and every int is below every float.
//! * Within a kind: false below true; numbers by size; strings and bytes by their bytes; lists and tuples item by
//!   item, the shorter first if it begins the longer; maps as their lists of (key, value) in the order of keys.
//! * -0.0 is 0.0: equal, and written as 0.0. NaN is refused by [`to_term`], [`Term::check`], [`Term::encode`] and
//!   [`Term::decode`]; a NaN that a program puts into [`Term::Float`] by hand equals itself and is above every other
//!   float, so that the order stays total until the term is refused.
//! * The hash is xxh3 (64 bits, no seed) of the encoding below. Each term has exactly one encoding, so equal terms
//!   have equal hashes.
//!
//! # The encoding
//! ```text
//! nil 00 | false 01 | true 02 | int 03 zigzag-varint | float 04 8 bytes, big-endian
//! string 05 length bytes | bytes 06 length bytes | list 07 count items | tuple 08 count items
//! map 09 count (key value)*, keys strictly rising
//! ```
//! Lengths and counts are varints (LEB128, shortest form). The decoder refuses every other form, never panics, reads
//! at most [`MAX_TERM_DEPTH`] levels and holds at most about 100 bytes for a byte of input.
//!
//! # From Rust values
//! [`to_term`] and [`from_term`] carry the whole data model of serde:
//!
//! | Rust | term |
//! |---|---|
//! | `bool`, integers within i64, floats | bool, int, float; an integer outside i64 and NaN are errors |
//! | `char`, `str`, bytes | string, string, bytes (`Vec<u8>` is a sequence for serde: a list) |
//! | `()`, unit struct, `None` | nil |
//! | `Some(x)` | x itself; if x is nil, or nil in one-tuples, then x in one more one-tuple, so that `Some(None)` is not `None` |
//! | sequence | list |
//! | tuple, tuple struct | tuple |
//! | map | map; the same key twice is an error |
//! | struct | map from the names of its fields; read from a tuple or list as well, by position |
//! | newtype struct | what is inside |
//! | enum | tuple of the variant's name and its fields: `("Off",)`, `("Dim", 3)`, `("Rgb", 1, 2, 3)`; named fields are one map: `("Hsv", {"h": 1})` |
//!
//! Types that ask the format what it holds (`untagged`, internally tagged, `flatten`) can be read back as long as no
//! enum is inside.

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use bytes::Bytes;
use serde::{Deserialize, Serialize};

mod codec;
mod de;
mod ser;
#[cfg(test)]
pub(in crate::cache) mod tests;

pub use de::from_term;
pub use ser::to_term;

pub(in crate::cache) use codec::{
    Reader, Sink, deeper, deserialize, serialize, write_term, write_tuple, write_varint,
};

/// How deeply lists, tuples and maps may be nested: a term that holds no other has depth 0.
pub const MAX_TERM_DEPTH: usize = 64;

/// One value of the cache. See the [module](self) for its order, its hash and its encoding.
///
/// ```
/// use muster_router::cache::Term;
/// assert!(Term::from(2) < Term::from(1.0), "kinds first");
/// assert_eq!(Term::from(-0.0), Term::from(0.0));
/// assert_eq!(Term::decode(&Term::from("a").encode()?)?, Term::from("a"));
/// # Ok::<(), muster_router::cache::TermError>(())
/// ```
#[derive(Clone, Default)]
pub enum Term {
    /// Nothing.
    #[default]
    Nil,
    /// True or false.
    Bool(bool),
    /// A whole number.
    Int(i64),
    /// A number with a fraction; not NaN, see [`Term::check`].
    Float(f64),
    /// Text.
    Str(Arc<str>),
    /// Bytes.
    Bytes(Bytes),
    /// Any number of terms of one meaning.
    List(Vec<Term>),
    /// A fixed number of terms, each with its own meaning.
    Tuple(Vec<Term>),
    /// Terms by key.
    Map(BTreeMap<Term, Term>),
}

/// Why a value is no term, or bytes are none. Nothing has changed when this is returned.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
#[non_exhaustive]
pub enum TermError {
    /// Nested too deeply.
    #[error("the term is nested more than {max} levels deep")]
    TooDeep {
        /// How many levels are allowed.
        max: usize,
    },
    /// NaN has no place in an order.
    #[error("NaN is no term; use nil for a number that is missing")]
    NotANumber,
    /// A whole number outside i64.
    #[error("the number {given} is no term; {} to {} are", i64::MIN, i64::MAX)]
    IntOutOfRange {
        /// The number.
        given: String,
    },
    /// A map named a key twice.
    #[error("a map has the key {key} twice")]
    DuplicateKey {
        /// The key, as text.
        key: String,
    },
    /// A record was wanted.
    #[error("a record is a tuple; {given} was given")]
    NotARecord {
        /// The kind of the term.
        given: String,
    },
    /// What a type said about its own values.
    #[error("{0}")]
    Custom(String),
    /// The bytes end before the term does.
    #[error("the bytes end before the term does")]
    Truncated,
    /// Bytes that no term is written as.
    #[error("the bytes are no term: {what}")]
    Malformed {
        /// What is wrong with them.
        what: String,
    },
}

impl TermError {
    pub(crate) fn malformed(what: &str) -> Self {
        Self::Malformed { what: what.into() }
    }
}

impl Term {
    /// The name of the kind: "nil", "bool", "int", "float", "string", "bytes", "list", "tuple" or "map".
    pub fn kind(&self) -> &'static str {
        match self {
            Term::Nil => "nil",
            Term::Bool(_) => "bool",
            Term::Int(_) => "int",
            Term::Float(_) => "float",
            Term::Str(_) => "string",
            Term::Bytes(_) => "bytes",
            Term::List(_) => "list",
            Term::Tuple(_) => "tuple",
            Term::Map(_) => "map",
        }
    }

    fn rank(&self) -> u8 {
        match self {
            Term::Nil => 0,
            Term::Bool(_) => 1,
            Term::Int(_) => 2,
            Term::Float(_) => 3,
            Term::Str(_) => 4,
            Term::Bytes(_) => 5,
            Term::List(_) => 6,
            Term::Tuple(_) => 7,
            Term::Map(_) => 8,
        }
    }

    /// Whether it is nil.
    pub fn is_nil(&self) -> bool {
        matches!(self, Term::Nil)
    }

    /// The whole number, if it is one.
    pub fn as_int(&self) -> Option<i64> {
        if let Term::Int(int) = self { Some(*int) } else { None }
    }

    /// The text, if it is text.
    pub fn as_str(&self) -> Option<&str> {
        if let Term::Str(text) = self { Some(text) } else { None }
    }

    /// The items of a list or a tuple.
    pub fn items(&self) -> Option<&[Term]> {
        if let Term::List(items) | Term::Tuple(items) = self { Some(items) } else { None }
    }

    /// Whether this may be kept: no NaN, not nested too deeply.
    ///
    /// # Errors
    /// [`TermError::NotANumber`], [`TermError::TooDeep`].
    pub fn check(&self) -> Result<(), TermError> {
        self.check_within(MAX_TERM_DEPTH)
    }

    pub(in crate::cache) fn check_within(&self, levels: usize) -> Result<(), TermError> {
        let inner = || levels.checked_sub(1).ok_or(TermError::TooDeep { max: MAX_TERM_DEPTH });
        match self {
            Term::Float(float) if float.is_nan() => Err(TermError::NotANumber),
            Term::Nil | Term::Bool(_) | Term::Int(_) | Term::Float(_) | Term::Str(_) | Term::Bytes(_) => {
                Ok(())
            }
            Term::List(items) | Term::Tuple(items) => {
                let inner = inner()?;
                items.iter().try_for_each(|item| item.check_within(inner))
            }
            Term::Map(map) => {
                let inner = inner()?;
                map.iter().try_for_each(|(key, value)| {
                    key.check_within(inner)?;
                    value.check_within(inner)
                })
            }
        }
    }

    /// The one encoding of this term.
    ///
    /// # Errors
    /// Those of [`Term::check`].
    pub fn encode(&self) -> Result<Vec<u8>, TermError> {
        self.check()?;
        let mut out = Vec::with_capacity(32);
        write_term(self, &mut out);
        Ok(out)
    }

    /// Reads the encoding of one term, all of `bytes`.
    ///
    /// # Errors
    /// [`TermError::Truncated`], [`TermError::Malformed`], [`TermError::NotANumber`], [`TermError::TooDeep`]. What
    /// it holds meanwhile is bounded by a small multiple of the length of `bytes`.
    pub fn decode(bytes: &[u8]) -> Result<Self, TermError> {
        let mut reader = Reader::new(bytes);
        let term = reader.term(MAX_TERM_DEPTH)?;
        reader.end()?;
        Ok(term)
    }

    /// The length of the encoding in bytes.
    pub fn encoded_len(&self) -> usize {
        let mut count = codec::Count(0);
        write_term(self, &mut count);
        count.0
    }

    /// The stable hash: the same on every platform and in every release.
    pub fn stable_hash(&self) -> u64 {
        codec::hash(|sink| write_term(self, sink))
    }
}

/// -0.0 is 0.0 and there is one NaN, above everything.
fn canonical(float: f64) -> f64 {
    if float.is_nan() {
        f64::NAN.copysign(1.0)
    } else if float == 0.0 {
        0.0
    } else {
        float
    }
}

impl Ord for Term {
    fn cmp(&self, other: &Self) -> Ordering {
        match (self, other) {
            (Term::Bool(a), Term::Bool(b)) => a.cmp(b),
            (Term::Int(a), Term::Int(b)) => a.cmp(b),
            (Term::Float(a), Term::Float(b)) => canonical(*a).total_cmp(&canonical(*b)),
            (Term::Str(a), Term::Str(b)) => a.as_bytes().cmp(b.as_bytes()),
            (Term::Bytes(a), Term::Bytes(b)) => a.cmp(b),
            (Term::List(a), Term::List(b)) | (Term::Tuple(a), Term::Tuple(b)) => a.cmp(b),
            (Term::Map(a), Term::Map(b)) => a.cmp(b),
            _ => self.rank().cmp(&other.rank()),
        }
    }
}

impl PartialOrd for Term {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Term {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Term {}

impl Hash for Term {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(self.stable_hash());
    }
}

impl fmt::Debug for Term {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Term::Nil => f.write_str("nil"),
            Term::Bool(value) => write!(f, "{value}"),
            Term::Int(int) => write!(f, "{int}"),
            Term::Float(float) => write!(f, "{float:?}"),
            Term::Str(text) => write!(f, "{text:?}"),
            Term::Bytes(bytes) => write!(f, "b\"{}\"", bytes.escape_ascii()),
            Term::List(items) => f.debug_list().entries(items).finish(),
            Term::Tuple(items) => tuple(items, f),
            Term::Map(map) => f.debug_map().entries(map).finish(),
        }
    }
}

fn tuple(items: &[Term], f: &mut fmt::Formatter<'_>) -> fmt::Result {
    let mut tuple = f.debug_tuple("");
    items.iter().for_each(|item| {
        tuple.field(item);
    });
    if items.is_empty() { f.write_str("()") } else { tuple.finish() }
}

impl fmt::Display for Term {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

/// What the cache keeps: a tuple of terms. Cloning copies no terms.
///
/// ```
/// use muster_router::{cache::{Record, Term}, record};
/// let user: Record = record!["user", 7, ("Ada", true)];
/// assert_eq!(user.get(1), Some(&Term::Int(7)));
/// assert_eq!(user.len(), 3);
/// ```
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Record(Arc<[Term]>);

impl Record {
    /// A record of these fields.
    pub fn new(fields: impl IntoIterator<Item = Term>) -> Self {
        Self(fields.into_iter().collect())
    }

    /// A field, from 0.
    pub fn get(&self, field: usize) -> Option<&Term> {
        self.0.get(field)
    }

    /// All fields.
    pub fn fields(&self) -> &[Term] {
        &self.0
    }

    /// The number of fields (the arity).
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether it has no fields.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The same as a tuple.
    pub fn to_term(&self) -> Term {
        Term::Tuple(self.0.to_vec())
    }

    /// Whether this may be kept, as [`Term::check`] says of its tuple.
    ///
    /// # Errors
    /// [`TermError::NotANumber`], [`TermError::TooDeep`].
    pub fn check(&self) -> Result<(), TermError> {
        self.0.iter().try_for_each(|field| field.check_within(MAX_TERM_DEPTH - 1))
    }

    /// The encoding: that of the tuple.
    ///
    /// # Errors
    /// Those of [`Record::check`].
    pub fn encode(&self) -> Result<Vec<u8>, TermError> {
        self.check()?;
        let mut out = Vec::with_capacity(64);
        write_tuple(&self.0, &mut out);
        Ok(out)
    }

    /// Reads the encoding of one tuple.
    ///
    /// # Errors
    /// Those of [`Term::decode`], and [`TermError::NotARecord`] if it is no tuple.
    pub fn decode(bytes: &[u8]) -> Result<Self, TermError> {
        Term::decode(bytes)?.try_into()
    }

    /// The length of the encoding in bytes.
    pub fn encoded_len(&self) -> usize {
        let mut count = codec::Count(0);
        write_tuple(&self.0, &mut count);
        count.0
    }

    /// The stable hash of the tuple.
    pub fn stable_hash(&self) -> u64 {
        codec::hash(|sink| write_tuple(&self.0, sink))
    }
}

impl Hash for Record {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(self.stable_hash());
    }
}

impl fmt::Debug for Record {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        tuple(&self.0, f)
    }
}

impl fmt::Display for Record {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        tuple(&self.0, f)
    }
}

impl TryFrom<Term> for Record {
    type Error = TermError;
    fn try_from(term: Term) -> Result<Self, TermError> {
        match term {
            Term::Tuple(fields) => Ok(Self(fields.into())),
            other => Err(TermError::NotARecord { given: other.kind().into() }),
        }
    }
}

impl From<Record> for Term {
    fn from(record: Record) -> Self {
        record.to_term()
    }
}

/// A [`Record`](crate::cache::Record) of values that convert into [`Term`](crate::cache::Term)s: numbers, text,
/// bytes, options, vectors (lists), tuples, maps. A `u64` does not; see [`to_term`](crate::cache::to_term). Bytes are
/// a `&[u8]` or [`Bytes`](bytes::Bytes); a `Vec<u8>` is a list of numbers like other vectors, which takes more room and
/// time.
///
/// ```
/// use muster_router::{cache::Term, record};
/// assert_eq!(record!["a", 1, Term::Nil].len(), 3);
/// let picture: Vec<u8> = vec![0x89, 0x50];
/// assert_eq!(record![&picture[..]], record![bytes::Bytes::from(picture)]);
/// ```
#[macro_export]
macro_rules! record {
    ($($field:expr),* $(,)?) => {
        $crate::cache::Record::new([$($crate::cache::Term::from($field)),*])
    };
}

macro_rules! from {
    ($($type:ty => |$value:ident| $term:expr;)*) => {
        $(impl From<$type> for Term {
            fn from($value: $type) -> Self {
                $term
            }
        })*
    };
}

from! {
    () => |_unit| Term::Nil;
    bool => |value| Term::Bool(value);
    i8 => |int| Term::Int(int.into());
    i16 => |int| Term::Int(int.into());
    i32 => |int| Term::Int(int.into());
    i64 => |int| Term::Int(int);
    u8 => |int| Term::Int(int.into());
    u16 => |int| Term::Int(int.into());
    u32 => |int| Term::Int(int.into());
    f32 => |float| Term::Float(canonical(float.into()));
    f64 => |float| Term::Float(canonical(float));
    char => |char| Term::Str(char.encode_utf8(&mut [0; 4]).to_owned().into());
    &str => |text| Term::Str(text.into());
    String => |text| Term::Str(text.into());
    Arc<str> => |text| Term::Str(text);
    Bytes => |bytes| Term::Bytes(bytes);
    &[u8] => |bytes| Term::Bytes(Bytes::copy_from_slice(bytes));
}

impl<T: Into<Term>> From<Option<T>> for Term {
    fn from(option: Option<T>) -> Self {
        option.map_or(Term::Nil, |value| ser::some(value.into()))
    }
}

impl<T: Into<Term>> From<Vec<T>> for Term {
    fn from(items: Vec<T>) -> Self {
        Term::List(items.into_iter().map(Into::into).collect())
    }
}

impl<T: Into<Term>, const N: usize> From<[T; N]> for Term {
    fn from(items: [T; N]) -> Self {
        Term::List(items.into_iter().map(Into::into).collect())
    }
}

impl<K: Into<Term>, V: Into<Term>> From<BTreeMap<K, V>> for Term {
    fn from(map: BTreeMap<K, V>) -> Self {
        Term::Map(map.into_iter().map(|(key, value)| (key.into(), value.into())).collect())
    }
}

macro_rules! from_tuple {
    ($($name:ident)+) => {
        impl<$($name: Into<Term>),+> From<($($name,)+)> for Term {
            #[allow(non_snake_case, reason = "one name for the type and the value")]
            fn from(($($name,)+): ($($name,)+)) -> Self {
                Term::Tuple(vec![$($name.into()),+])
            }
        }
    };
}

from_tuple! { A }
from_tuple! { A B }
from_tuple! { A B C }
from_tuple! { A B C D }
from_tuple! { A B C D E }
from_tuple! { A B C D E F }
