//! From any value that serde can write to a term.

use std::collections::BTreeMap;
use std::fmt::Display;

use bytes::Bytes;
use serde::ser::{self, Serialize};

use super::{MAX_TERM_DEPTH, Term, TermError, canonical, codec};

/// How many levels of a value are followed, options and newtypes included, which add no level to the term.
pub(super) const MAX_VALUE_DEPTH: usize = 2 * MAX_TERM_DEPTH;

/// The term of a value; see the [module](super) for the table.
///
/// # Errors
/// [`TermError::IntOutOfRange`], [`TermError::NotANumber`], [`TermError::TooDeep`], [`TermError::DuplicateKey`], and
/// [`TermError::Custom`] with what the type itself says.
///
/// ```
/// use muster_router::cache::{Term, from_term, to_term};
/// #[derive(serde::Serialize, serde::Deserialize, PartialEq, Debug)]
/// enum Light { Off, Dim(u8) }
/// let term = to_term(&Light::Dim(3))?;
/// assert_eq!(term, Term::from(("Dim", 3)));
/// assert_eq!(from_term::<Light>(&term)?, Light::Dim(3));
/// assert!(to_term(&u64::MAX).is_err() && to_term(&f64::NAN).is_err());
/// # Ok::<(), muster_router::cache::TermError>(())
/// ```
pub fn to_term<T: Serialize + ?Sized>(value: &T) -> Result<Term, TermError> {
    let term = value.serialize(Serializer(MAX_VALUE_DEPTH))?;
    // options of options may have added levels
    term.check()?;
    Ok(term)
}

/// The term of `Some`: a term that could be taken for `None`, or for such a wrapping, is wrapped once more.
pub(super) fn some(term: Term) -> Term {
    if is_wrapped_nil(&term) { Term::Tuple(vec![term]) } else { term }
}

pub(super) fn is_wrapped_nil(mut term: &Term) -> bool {
    while let Term::Tuple(items) = term {
        let [inner] = items.as_slice() else { return false };
        term = inner;
    }
    term.is_nil()
}

impl ser::Error for TermError {
    fn custom<T: Display>(message: T) -> Self {
        TermError::Custom(message.to_string())
    }
}

/// What is left of the depth.
#[derive(Clone, Copy)]
struct Serializer(usize);

impl Serializer {
    fn deeper(self) -> Result<Self, TermError> {
        self.0.checked_sub(1).map(Self).ok_or(TermError::TooDeep { max: MAX_TERM_DEPTH })
    }

    fn items(self, name: Option<&str>) -> Result<Items, TermError> {
        Ok(Items { items: name.map(Term::from).into_iter().collect(), tuple: true, inner: self.deeper()? })
    }

    fn fields(self, name: Option<&'static str>) -> Result<Fields, TermError> {
        Ok(Fields { map: BTreeMap::new(), key: None, variant: name, inner: self.deeper()? })
    }
}

fn int<T: TryInto<i64> + Display + Copy>(value: T) -> Result<Term, TermError> {
    value.try_into().map(Term::Int).map_err(|_| TermError::IntOutOfRange { given: value.to_string() })
}

macro_rules! ints {
    ($($name:ident: $type:ty),*) => {
        $(fn $name(self, value: $type) -> Result<Term, TermError> {
            int(value)
        })*
    };
}

impl ser::Serializer for Serializer {
    type Ok = Term;
    type Error = TermError;
    type SerializeSeq = Items;
    type SerializeTuple = Items;
    type SerializeTupleStruct = Items;
    type SerializeTupleVariant = Items;
    type SerializeMap = Fields;
    type SerializeStruct = Fields;
    type SerializeStructVariant = Fields;

    ints! {
        serialize_i8: i8, serialize_i16: i16, serialize_i32: i32, serialize_i64: i64, serialize_i128: i128,
        serialize_u8: u8, serialize_u16: u16, serialize_u32: u32, serialize_u64: u64, serialize_u128: u128
    }

    fn serialize_bool(self, value: bool) -> Result<Term, TermError> {
        Ok(Term::Bool(value))
    }

    fn serialize_f32(self, value: f32) -> Result<Term, TermError> {
        self.serialize_f64(value.into())
    }

    fn serialize_f64(self, value: f64) -> Result<Term, TermError> {
        if value.is_nan() { Err(TermError::NotANumber) } else { Ok(Term::Float(canonical(value))) }
    }

    fn serialize_char(self, value: char) -> Result<Term, TermError> {
        Ok(value.into())
    }

    fn serialize_str(self, value: &str) -> Result<Term, TermError> {
        Ok(value.into())
    }

    fn serialize_bytes(self, value: &[u8]) -> Result<Term, TermError> {
        Ok(Term::Bytes(Bytes::copy_from_slice(value)))
    }

    fn serialize_none(self) -> Result<Term, TermError> {
        Ok(Term::Nil)
    }

    fn serialize_some<T: Serialize + ?Sized>(self, value: &T) -> Result<Term, TermError> {
        value.serialize(self.deeper()?).map(some)
    }

    fn serialize_unit(self) -> Result<Term, TermError> {
        Ok(Term::Nil)
    }

    fn serialize_unit_struct(self, _: &'static str) -> Result<Term, TermError> {
        Ok(Term::Nil)
    }

    fn serialize_unit_variant(
        self,
        _: &'static str,
        _: u32,
        variant: &'static str,
    ) -> Result<Term, TermError> {
        Ok(Term::Tuple(vec![variant.into()]))
    }

    fn serialize_newtype_struct<T: Serialize + ?Sized>(
        self,
        name: &'static str,
        value: &T,
    ) -> Result<Term, TermError> {
        let term = value.serialize(self.deeper()?)?;
        match &term {
            // a term inside a value is itself
            Term::Bytes(encoding) if name == codec::TOKEN => Term::decode(encoding),
            _ => Ok(term),
        }
    }

    fn serialize_newtype_variant<T: Serialize + ?Sized>(
        self,
        _: &'static str,
        _: u32,
        variant: &'static str,
        value: &T,
    ) -> Result<Term, TermError> {
        let value = value.serialize(self.deeper()?)?;
        Ok(Term::Tuple(vec![variant.into(), value]))
    }

    fn serialize_seq(self, _: Option<usize>) -> Result<Items, TermError> {
        Ok(Items { tuple: false, ..self.items(None)? })
    }

    fn serialize_tuple(self, _: usize) -> Result<Items, TermError> {
        self.items(None)
    }

    fn serialize_tuple_struct(self, _: &'static str, _: usize) -> Result<Items, TermError> {
        self.items(None)
    }

    fn serialize_tuple_variant(
        self,
        _: &'static str,
        _: u32,
        variant: &'static str,
        _: usize,
    ) -> Result<Items, TermError> {
        self.items(Some(variant))
    }

    fn serialize_map(self, _: Option<usize>) -> Result<Fields, TermError> {
        self.fields(None)
    }

    fn serialize_struct(self, _: &'static str, _: usize) -> Result<Fields, TermError> {
        self.fields(None)
    }

    fn serialize_struct_variant(
        self,
        _: &'static str,
        _: u32,
        variant: &'static str,
        _: usize,
    ) -> Result<Fields, TermError> {
        self.fields(Some(variant))
    }
}

/// A list or a tuple on its way.
struct Items {
    items: Vec<Term>,
    tuple: bool,
    inner: Serializer,
}

impl Items {
    fn push<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), TermError> {
        self.items.push(value.serialize(self.inner)?);
        Ok(())
    }

    fn finish(self) -> Result<Term, TermError> {
        Ok(if self.tuple { Term::Tuple(self.items) } else { Term::List(self.items) })
    }
}

macro_rules! items {
    ($($name:ident: $push:ident),*) => {
        $(impl ser::$name for Items {
            type Ok = Term;
            type Error = TermError;
            fn $push<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), TermError> {
                self.push(value)
            }
            fn end(self) -> Result<Term, TermError> {
                self.finish()
            }
        })*
    };
}

items! {
    SerializeSeq: serialize_element,
    SerializeTuple: serialize_element,
    SerializeTupleStruct: serialize_field,
    SerializeTupleVariant: serialize_field
}

/// A map on its way.
struct Fields {
    map: BTreeMap<Term, Term>,
    key: Option<Term>,
    variant: Option<&'static str>,
    inner: Serializer,
}

impl Fields {
    fn insert(&mut self, key: Term, value: Term) -> Result<(), TermError> {
        if self.map.contains_key(&key) {
            return Err(TermError::DuplicateKey { key: key.to_string() });
        }
        self.map.insert(key, value);
        Ok(())
    }

    fn finish(self) -> Result<Term, TermError> {
        let map = Term::Map(self.map);
        Ok(match self.variant {
            Some(variant) => Term::Tuple(vec![variant.into(), map]),
            None => map,
        })
    }
}

impl ser::SerializeMap for Fields {
    type Ok = Term;
    type Error = TermError;

    fn serialize_key<T: Serialize + ?Sized>(&mut self, key: &T) -> Result<(), TermError> {
        self.key = Some(key.serialize(self.inner)?);
        Ok(())
    }

    fn serialize_value<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), TermError> {
        let Some(key) = self.key.take() else {
            return Err(TermError::Custom("a map gave a value without a key".into()));
        };
        let value = value.serialize(self.inner)?;
        self.insert(key, value)
    }

    fn end(self) -> Result<Term, TermError> {
        self.finish()
    }
}

macro_rules! fields {
    ($($name:ident),*) => {
        $(impl ser::$name for Fields {
            type Ok = Term;
            type Error = TermError;
            fn serialize_field<T: Serialize + ?Sized>(
                &mut self,
                key: &'static str,
                value: &T,
            ) -> Result<(), TermError> {
                let value = value.serialize(self.inner)?;
                self.insert(key.into(), value)
            }
            fn end(self) -> Result<Term, TermError> {
                self.finish()
            }
        })*
    };
}

fields! { SerializeStruct, SerializeStructVariant }
