//! Patterns over records: exact terms, wildcards and numbered variables, nested as records are.
//!
//! A pattern names one [`Pattern`] per field and fits records of as many fields. Matching gives the **bindings**:
//! the values of the variables, each variable once, in the numeric order of the variables (not in the order in which
//! they stand). A variable that stands twice fits only where both places hold equal terms; 1 and 1.0 are not equal.
//! A list or tuple fits one of the same kind and length, a map fits a map that holds at least the named keys.
//!
//! ```
//! use muster_router::{cache::{RecordPattern, Term, var}, pattern, record};
//! let pattern = RecordPattern::new(pattern![var(2), _, ("age", var(1))])?;
//! let found = pattern.bindings(&record!["Ada", true, ("age", 36)]);
//! assert_eq!(found, Some(vec![Term::from(36), Term::from("Ada")]));
//! assert_eq!(pattern.bindings(&record!["Ada", true, ("size", 36)]), None);
//! # Ok::<(), muster_router::cache::PatternError>(())
//! ```

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

use bytes::Bytes;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::term::{
    self, MAX_TERM_DEPTH, Reader, Record, Sink, Term, TermError, deeper, write_term, write_varint,
};

/// How many parts a pattern may have: places, and exact terms inside it each count one.
pub const MAX_PATTERN_PARTS: usize = 1024;
/// How many different variables a pattern may have.
pub const MAX_PATTERN_VARIABLES: usize = 256;

/// What one place of a record has to hold.
///
/// Numbers, text, bytes and [`Term`]s convert into the pattern that fits just them; tuples and vectors of patterns
/// into tuples and lists.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Pattern {
    /// Anything.
    Any,
    /// Anything, bound to the variable of this number; equal terms wherever it stands.
    Var(u16),
    /// This term.
    Exact(Term),
    /// A list of just these.
    List(Vec<Pattern>),
    /// A tuple of just these.
    Tuple(Vec<Pattern>),
    /// A map that holds at least these keys.
    Map(BTreeMap<Term, Pattern>),
}

/// A variable of a pattern.
pub fn var(number: u16) -> Pattern {
    Pattern::Var(number)
}

/// The fields of a [`RecordPattern`](crate::cache::RecordPattern): `_` fits anything, every other expression is a
/// [`Pattern`](crate::cache::Pattern) or converts into one.
///
/// ```
/// use muster_router::{cache::{Pattern, var}, pattern};
/// assert_eq!(pattern![_, var(1), "x"], [Pattern::Any, Pattern::Var(1), Pattern::from("x")]);
/// ```
#[macro_export]
macro_rules! pattern {
    (@fields [$($done:expr,)*]) => { ::std::vec::Vec::<$crate::cache::Pattern>::from([$($done),*]) };
    (@fields [$($done:expr,)*] _) => { $crate::pattern!(@fields [$($done,)* $crate::cache::Pattern::Any,]) };
    (@fields [$($done:expr,)*] _, $($rest:tt)*) => {
        $crate::pattern!(@fields [$($done,)* $crate::cache::Pattern::Any,] $($rest)*)
    };
    (@fields [$($done:expr,)*] $next:expr) => {
        $crate::pattern!(@fields [$($done,)* $crate::cache::Pattern::from($next),])
    };
    (@fields [$($done:expr,)*] $next:expr, $($rest:tt)*) => {
        $crate::pattern!(@fields [$($done,)* $crate::cache::Pattern::from($next),] $($rest)*)
    };
    ($($fields:tt)*) => { $crate::pattern!(@fields [] $($fields)*) };
}

/// Why a pattern was refused. Nothing was looked for.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
#[non_exhaustive]
pub enum PatternError {
    /// The records have another number of fields.
    #[error("the pattern has {given} fields; the records have {}", numbers(.held))]
    Arity {
        /// How many fields the pattern has.
        given: usize,
        /// How many fields the records have, rising; at most 8 are named.
        held: Vec<usize>,
    },
    /// The pattern ends before a field that every record has.
    #[error("the pattern has {given} fields; it must reach field {field}, the {option}, counted from 0")]
    TooShort {
        /// How many fields it has.
        given: usize,
        /// The field that it has to reach.
        field: usize,
        /// Which option names this field: "key_field" or "partition_field".
        option: String,
    },
    /// Too many parts.
    #[error("the pattern has more than {max} parts")]
    TooLarge {
        /// How many are allowed.
        max: usize,
    },
    /// Too many different variables.
    #[error("the pattern has {given} variables; at most {max} are allowed")]
    TooManyVariables {
        /// How many it has.
        given: usize,
        /// How many are allowed.
        max: usize,
    },
    /// A term in it is none, or it is nested too deeply, or its bytes are malformed.
    #[error("the pattern is not allowed: {0}")]
    Term(#[from] TermError),
}

fn numbers(numbers: &[usize]) -> String {
    numbers.iter().map(usize::to_string).collect::<Vec<_>>().join(" or ")
}

impl Pattern {
    /// Whether the term fits; binds variables on the way. After `false` the bindings mean nothing.
    fn fits<'t>(&self, term: &'t Term, bound: &mut BTreeMap<u16, &'t Term>) -> bool {
        match (self, term) {
            (Pattern::Any, _) => true,
            (Pattern::Var(number), _) => *bound.entry(*number).or_insert(term) == term,
            (Pattern::Exact(exact), _) => exact == term,
            (Pattern::List(patterns), Term::List(items)) | (Pattern::Tuple(patterns), Term::Tuple(items)) => {
                all_fit(patterns, items, bound)
            }
            (Pattern::Map(patterns), Term::Map(map)) => patterns
                .iter()
                .all(|(key, pattern)| map.get(key).is_some_and(|value| pattern.fits(value, bound))),
            (Pattern::List(_) | Pattern::Tuple(_) | Pattern::Map(_), _) => false,
        }
    }

    /// Counts the parts and gathers the variables.
    fn survey(&self, levels: usize, survey: &mut Survey) -> Result<(), PatternError> {
        survey.parts += 1;
        if survey.parts > MAX_PATTERN_PARTS {
            return Err(PatternError::TooLarge { max: MAX_PATTERN_PARTS });
        }
        match self {
            Pattern::Any => {}
            Pattern::Var(number) => {
                survey.variables.insert(*number);
            }
            Pattern::Exact(term) => term.check_within(levels)?,
            Pattern::List(inner) | Pattern::Tuple(inner) => {
                let levels = deeper(levels)?;
                inner.iter().try_for_each(|pattern| pattern.survey(levels, survey))?;
            }
            Pattern::Map(inner) => {
                let levels = deeper(levels)?;
                for (key, pattern) in inner {
                    key.check_within(levels)?;
                    pattern.survey(levels, survey)?;
                }
            }
        }
        Ok(())
    }

    /// The term that this fits alone, if it has neither variables nor wildcards and no map.
    fn exact(&self) -> Option<Term> {
        match self {
            Pattern::Exact(term) => Some(term.clone()),
            Pattern::List(items) => items.iter().map(Pattern::exact).collect::<Option<_>>().map(Term::List),
            Pattern::Tuple(items) => items.iter().map(Pattern::exact).collect::<Option<_>>().map(Term::Tuple),
            Pattern::Any | Pattern::Var(_) | Pattern::Map(_) => None,
        }
    }

    fn write(&self, out: &mut impl Sink) {
        match self {
            Pattern::Exact(term) => write_term(term, out),
            Pattern::Any => out.put(&[ANY]),
            Pattern::Var(number) => {
                out.put(&[VAR]);
                write_varint((*number).into(), out);
            }
            Pattern::List(inner) => write_all(LIST, inner, out),
            Pattern::Tuple(inner) => write_all(TUPLE, inner, out),
            Pattern::Map(inner) => {
                out.put(&[MAP]);
                write_varint(inner.len() as u64, out);
                for (key, pattern) in inner {
                    write_term(key, out);
                    pattern.write(out);
                }
            }
        }
    }

    fn read(reader: &mut Reader<'_>, levels: usize, left: &mut usize) -> Result<Self, PatternError> {
        *left = left.checked_sub(1).ok_or(PatternError::TooLarge { max: MAX_PATTERN_PARTS })?;
        let Some(tag) = reader.peek() else { return Err(TermError::Truncated.into()) };
        if tag < ANY {
            return Ok(Pattern::Exact(reader.term(levels)?));
        }
        reader.byte()?;
        Ok(match tag {
            ANY => Pattern::Any,
            VAR => {
                let number = u16::try_from(reader.varint()?);
                Pattern::Var(number.map_err(|_| TermError::malformed("a variable above 65535"))?)
            }
            LIST => Pattern::List(read_all(reader, deeper(levels)?, left)?),
            TUPLE => Pattern::Tuple(read_all(reader, deeper(levels)?, left)?),
            MAP => {
                let levels = deeper(levels)?;
                let mut inner = BTreeMap::new();
                for _ in 0..reader.count(2)? {
                    let key = reader.term(levels)?;
                    if inner.last_key_value().is_some_and(|(last, _)| *last >= key) {
                        return Err(TermError::malformed("the keys of a map do not rise").into());
                    }
                    inner.insert(key, Pattern::read(reader, levels, left)?);
                }
                Pattern::Map(inner)
            }
            _ => return Err(TermError::malformed("unknown kind of pattern").into()),
        })
    }
}

// above every tag of a term
const ANY: u8 = 0x10;
const VAR: u8 = 0x11;
const LIST: u8 = 0x12;
const TUPLE: u8 = 0x13;
const MAP: u8 = 0x14;

fn write_all(tag: u8, patterns: &[Pattern], out: &mut impl Sink) {
    out.put(&[tag]);
    write_varint(patterns.len() as u64, out);
    patterns.iter().for_each(|pattern| pattern.write(out));
}

fn read_all(reader: &mut Reader<'_>, levels: usize, left: &mut usize) -> Result<Vec<Pattern>, PatternError> {
    let count = reader.count(1)?;
    let mut patterns = Vec::with_capacity(count.min(8));
    for _ in 0..count {
        patterns.push(Pattern::read(reader, levels, left)?);
    }
    Ok(patterns)
}

fn all_fit<'t>(patterns: &[Pattern], terms: &'t [Term], bound: &mut BTreeMap<u16, &'t Term>) -> bool {
    patterns.len() == terms.len()
        && patterns.iter().zip(terms).all(|(pattern, term)| pattern.fits(term, bound))
}

macro_rules! from_exact {
    ($($type:ty),*) => {
        $(impl From<$type> for Pattern {
            fn from(term: $type) -> Self {
                Pattern::Exact(term.into())
            }
        })*
    };
}

from_exact! {
    Term, (), bool, i8, i16, i32, i64, u8, u16, u32, f32, f64, char, &str, String, Arc<str>, Bytes, &[u8]
}

impl<T: Into<Pattern>> From<Vec<T>> for Pattern {
    fn from(items: Vec<T>) -> Self {
        Pattern::List(items.into_iter().map(Into::into).collect())
    }
}

impl<T: Into<Pattern>, const N: usize> From<[T; N]> for Pattern {
    fn from(items: [T; N]) -> Self {
        Pattern::List(items.into_iter().map(Into::into).collect())
    }
}

macro_rules! from_tuple {
    ($($name:ident)+) => {
        impl<$($name: Into<Pattern>),+> From<($($name,)+)> for Pattern {
            #[allow(non_snake_case, reason = "one name for the type and the value")]
            fn from(($($name,)+): ($($name,)+)) -> Self {
                Pattern::Tuple(vec![$($name.into()),+])
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

#[derive(Default)]
struct Survey {
    parts: usize,
    variables: BTreeSet<u16>,
}

/// A pattern for whole records, checked and ready.
#[derive(Clone, PartialEq, Eq)]
pub struct RecordPattern {
    fields: Vec<Pattern>,
    variables: Vec<u16>,
}

impl RecordPattern {
    /// How many bytes it has on the wire.
    pub(crate) fn wire_len(&self) -> usize {
        // one that cannot be written is refused as too large
        postcard::experimental::serialized_size(self).unwrap_or(usize::MAX)
    }

    /// A pattern of one [`Pattern`] per field; [`pattern!`](crate::pattern) writes them.
    ///
    /// # Errors
    /// [`PatternError::TooLarge`], [`PatternError::TooManyVariables`], and [`PatternError::Term`] for NaN and for
    /// what is nested too deeply.
    pub fn new(fields: impl IntoIterator<Item = Pattern>) -> Result<Self, PatternError> {
        let fields: Vec<Pattern> = fields.into_iter().collect();
        let mut survey = Survey::default();
        fields.iter().try_for_each(|field| field.survey(MAX_TERM_DEPTH - 1, &mut survey))?;
        let given = survey.variables.len();
        if given > MAX_PATTERN_VARIABLES {
            return Err(PatternError::TooManyVariables { given, max: MAX_PATTERN_VARIABLES });
        }
        Ok(Self { fields, variables: survey.variables.into_iter().collect() })
    }

    /// The number of fields; only records of as many fit.
    pub fn arity(&self) -> usize {
        self.fields.len()
    }

    /// The patterns of the fields.
    pub fn fields(&self) -> &[Pattern] {
        &self.fields
    }

    /// The variables, rising: which variable each binding is of.
    pub fn variables(&self) -> &[u16] {
        &self.variables
    }

    /// The only term that this field may hold, if the pattern leaves no choice.
    pub fn exact(&self, field: usize) -> Option<Term> {
        self.fields.get(field)?.exact()
    }

    /// Whether the record fits.
    pub fn fits(&self, record: &Record) -> bool {
        all_fit(&self.fields, record.fields(), &mut BTreeMap::new())
    }

    /// The values of the variables in their numeric order, or `None` if the record does not fit.
    pub fn bindings(&self, record: &Record) -> Option<Vec<Term>> {
        let mut bound = BTreeMap::new();
        all_fit(&self.fields, record.fields(), &mut bound).then(|| bound.into_values().cloned().collect())
    }

    /// Refuses a pattern that ends before a field that every record has.
    ///
    /// # Errors
    /// [`PatternError::TooShort`].
    pub fn reaches(&self, field: usize, option: &str) -> Result<(), PatternError> {
        let given = self.arity();
        if field < given {
            Ok(())
        } else {
            Err(PatternError::TooShort { given, field, option: option.into() })
        }
    }

    /// The encoding: that of terms, and five more kinds. It goes over the wire.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(64);
        write_all(TUPLE, &self.fields, &mut out);
        out
    }

    /// Reads an encoding, all of `bytes`; never panics, and holds no more than a small multiple of their length.
    ///
    /// # Errors
    /// Those of [`RecordPattern::new`], and [`PatternError::Term`] for malformed bytes.
    pub fn decode(bytes: &[u8]) -> Result<Self, PatternError> {
        let mut reader = Reader::new(bytes);
        // the record itself is one part
        let mut left = MAX_PATTERN_PARTS + 1;
        let Pattern::Tuple(fields) = Pattern::read(&mut reader, MAX_TERM_DEPTH, &mut left)? else {
            return Err(TermError::malformed("a pattern is a tuple of patterns").into());
        };
        reader.end()?;
        Self::new(fields)
    }
}

impl TryFrom<Vec<Pattern>> for RecordPattern {
    type Error = PatternError;
    fn try_from(fields: Vec<Pattern>) -> Result<Self, PatternError> {
        Self::new(fields)
    }
}

impl From<&RecordPattern> for RecordPattern {
    fn from(pattern: &RecordPattern) -> Self {
        pattern.clone()
    }
}

impl fmt::Debug for RecordPattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("RecordPattern").field(&self.fields).finish()
    }
}

const NAME: &str = "$muster_router::RecordPattern";

impl Serialize for RecordPattern {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        term::serialize(Ok::<_, PatternError>(self.encode()), NAME, serializer)
    }
}

impl<'de> Deserialize<'de> for RecordPattern {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        term::deserialize(RecordPattern::decode, NAME, deserializer)
    }
}

#[cfg(test)]
#[path = "pattern_tests.rs"]
mod tests;
