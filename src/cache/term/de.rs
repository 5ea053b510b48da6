//! From a term to any value that serde can read.

use std::collections::btree_map;
use std::fmt::Display;
use std::slice;

use serde::de::value::SeqDeserializer;
use serde::de::{
    self, Deserialize, DeserializeSeed, EnumAccess, IntoDeserializer, MapAccess, SeqAccess, VariantAccess,
    Visitor,
};
use serde::forward_to_deserialize_any;

use super::ser::{MAX_VALUE_DEPTH, is_wrapped_nil};
use super::{MAX_TERM_DEPTH, Term, TermError, codec};

/// The value that a term stands for; see the [module](super) for the table. Text and bytes may be borrowed.
///
/// # Errors
/// [`TermError::Custom`] if the term is none of this type, [`TermError::TooDeep`] if the type nests without end.
///
/// ```
/// use muster_router::cache::{from_term, Term};
/// let (name, age): (&str, Option<u8>) = from_term(&Term::from(("Ada", 36)))?;
/// # Ok::<(), muster_router::cache::TermError>(())
/// ```
pub fn from_term<'de, T: Deserialize<'de>>(term: &'de Term) -> Result<T, TermError> {
    T::deserialize(Reader { term, left: MAX_VALUE_DEPTH })
}

impl de::Error for TermError {
    fn custom<T: Display>(message: T) -> Self {
        TermError::Custom(message.to_string())
    }
}

/// A term and what is left of the depth: options and newtypes of a recursive type would read one term for ever.
#[derive(Clone, Copy)]
struct Reader<'de> {
    term: &'de Term,
    left: usize,
}

impl<'de> Reader<'de> {
    fn deeper(self) -> Result<Self, TermError> {
        let left = self.left.checked_sub(1).ok_or(TermError::TooDeep { max: MAX_TERM_DEPTH })?;
        Ok(Self { left, ..self })
    }

    fn items(self, items: &'de [Term]) -> Result<Items<'de>, TermError> {
        Ok(Items { items: items.iter(), left: self.deeper()?.left })
    }

    fn mismatch<T>(self, wanted: &str) -> Result<T, TermError> {
        Err(TermError::Custom(format!("a {} was found where {wanted} was wanted", self.term.kind())))
    }
}

impl<'de> de::Deserializer<'de> for Reader<'de> {
    type Error = TermError;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, TermError> {
        match self.term {
            Term::Nil => visitor.visit_unit(),
            Term::Bool(value) => visitor.visit_bool(*value),
            Term::Int(int) => visitor.visit_i64(*int),
            Term::Float(float) => visitor.visit_f64(*float),
            Term::Str(text) => visitor.visit_borrowed_str(text),
            Term::Bytes(bytes) => visitor.visit_borrowed_bytes(bytes),
            Term::List(items) | Term::Tuple(items) => {
                let mut items = self.items(items)?;
                let value = visitor.visit_seq(&mut items)?;
                items.end().map(|()| value)
            }
            Term::Map(map) => {
                let mut pairs = Pairs { pairs: map.iter(), value: None, left: self.deeper()?.left };
                let value = visitor.visit_map(&mut pairs)?;
                match pairs.pairs.len() {
                    0 => Ok(value),
                    more => Err(TermError::Custom(format!("{more} entries of a map were not read"))),
                }
            }
        }
    }

    fn deserialize_seq<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, TermError> {
        match self.term {
            Term::Bytes(bytes) => visitor.visit_seq(SeqDeserializer::new(bytes.iter().copied())),
            _ => self.deserialize_any(visitor),
        }
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, TermError> {
        match self.term {
            Term::Nil => visitor.visit_none(),
            Term::Tuple(items) if is_wrapped_nil(self.term) => match items.first() {
                Some(term) => visitor.visit_some(Reader { term, ..self.deeper()? }),
                None => visitor.visit_none(),
            },
            _ => visitor.visit_some(self.deeper()?),
        }
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        name: &'static str,
        visitor: V,
    ) -> Result<V::Value, TermError> {
        if name == codec::TOKEN {
            let encoding = self.term.encode()?;
            return visitor.visit_newtype_struct(encoding.as_slice().into_deserializer());
        }
        visitor.visit_newtype_struct(self.deeper()?)
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _: &'static str,
        _: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, TermError> {
        let wanted = "a tuple of a variant's name and its fields";
        let Term::Tuple(items) = self.term else { return self.mismatch(wanted) };
        let Some((name, fields)) = items.split_first() else { return self.mismatch(wanted) };
        visitor.visit_enum(Variant { name, fields, whole: self })
    }

    fn deserialize_ignored_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, TermError> {
        visitor.visit_unit()
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf unit unit_struct
        tuple tuple_struct map struct identifier
    }
}

/// The items of a list or a tuple.
struct Items<'de> {
    items: slice::Iter<'de, Term>,
    left: usize,
}

impl Items<'_> {
    fn end(&self) -> Result<(), TermError> {
        match self.items.len() {
            0 => Ok(()),
            more => Err(TermError::Custom(format!("{more} items more than wanted"))),
        }
    }
}

impl<'de> SeqAccess<'de> for &mut Items<'de> {
    type Error = TermError;

    fn next_element_seed<T: DeserializeSeed<'de>>(&mut self, seed: T) -> Result<Option<T::Value>, TermError> {
        let left = self.left;
        self.items.next().map(|term| seed.deserialize(Reader { term, left })).transpose()
    }

    fn size_hint(&self) -> Option<usize> {
        Some(self.items.len())
    }
}

/// The entries of a map.
struct Pairs<'de> {
    pairs: btree_map::Iter<'de, Term, Term>,
    value: Option<&'de Term>,
    left: usize,
}

impl<'de> MapAccess<'de> for &mut Pairs<'de> {
    type Error = TermError;

    fn next_key_seed<K: DeserializeSeed<'de>>(&mut self, seed: K) -> Result<Option<K::Value>, TermError> {
        let Some((key, value)) = self.pairs.next() else { return Ok(None) };
        self.value = Some(value);
        seed.deserialize(Reader { term: key, left: self.left }).map(Some)
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(&mut self, seed: V) -> Result<V::Value, TermError> {
        let Some(term) = self.value.take() else {
            return Err(TermError::Custom("a value was wanted before its key".into()));
        };
        seed.deserialize(Reader { term, left: self.left })
    }

    fn size_hint(&self) -> Option<usize> {
        Some(self.pairs.len())
    }
}

/// A variant's name and its fields.
struct Variant<'de> {
    name: &'de Term,
    fields: &'de [Term],
    whole: Reader<'de>,
}

impl<'de> Variant<'de> {
    fn one(&self) -> Result<Reader<'de>, TermError> {
        let [term] = self.fields else {
            return Err(TermError::Custom(format!("a variant of one field has {}", self.fields.len())));
        };
        Ok(Reader { term, ..self.whole.deeper()? })
    }
}

impl<'de> EnumAccess<'de> for Variant<'de> {
    type Error = TermError;
    type Variant = Self;

    fn variant_seed<V: DeserializeSeed<'de>>(self, seed: V) -> Result<(V::Value, Self), TermError> {
        let name = seed.deserialize(Reader { term: self.name, ..self.whole.deeper()? })?;
        Ok((name, self))
    }
}

impl<'de> VariantAccess<'de> for Variant<'de> {
    type Error = TermError;

    fn unit_variant(self) -> Result<(), TermError> {
        match self.fields.len() {
            0 => Ok(()),
            given => Err(TermError::Custom(format!("a variant without fields has {given}"))),
        }
    }

    fn newtype_variant_seed<T: DeserializeSeed<'de>>(self, seed: T) -> Result<T::Value, TermError> {
        seed.deserialize(self.one()?)
    }

    fn tuple_variant<V: Visitor<'de>>(self, _: usize, visitor: V) -> Result<V::Value, TermError> {
        let mut items = self.whole.items(self.fields)?;
        let value = visitor.visit_seq(&mut items)?;
        items.end().map(|()| value)
    }

    fn struct_variant<V: Visitor<'de>>(
        self,
        _: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, TermError> {
        de::Deserializer::deserialize_any(self.one()?, visitor)
    }
}
