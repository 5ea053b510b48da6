//! The typed face: keys and values of one's own.

use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::{Cache, CallOptions, Partition, Session};
use crate::cache::{
    CacheError, Found, Operation, Pattern, PatternError, ReadOp, Record, Term, TermError, from_term, to_term,
};
use crate::config::ConfigError;

/// Values by key, with types of your own that serde can write and read.
///
/// Several namespaces live in one cache and are kept apart: a key is the pair of the namespace and your key. Make one
/// with [`Cache::keyvalue`], or [`KeyValue::within`] a session. Cheap to clone.
///
/// How values become terms, [`term`](crate::cache::term) says. A type may change as serde allows it (a new field with a
/// default); a value that cannot be read as `V` is an error, not a missing one.
///
/// ```
/// # use muster_router::{Muster, transport::memory::Network};
/// use muster_router::cache::{CacheConfig, KeyValue};
/// #[derive(serde::Serialize, serde::Deserialize, PartialEq, Debug)]
/// struct User { name: String, age: u8 }
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let muster = Muster::builder("shop").transport(Network::new().node("a")).start().await?;
/// let cache = muster.cache(CacheConfig::new("shop")).await?;
/// let users: KeyValue<u32, User> = cache.keyvalue("users")?;
/// users.put(&7, &User { name: "Ada".into(), age: 36 }).await?;
/// assert_eq!(users.get(&7).await?.map(|user| user.age), Some(36));
/// assert_eq!(cache.keyvalue::<u32, User>("guests")?.get(&7).await?, None, "another namespace");
/// assert!(users.remove(&7).await?);
/// # Ok(())
/// # }
/// ```
pub struct KeyValue<K, V> {
    cache: Cache,
    namespace: Arc<str>,
    types: PhantomData<fn(K) -> V>,
}

/// A cache that has records of other lengths only has no pairs yet.
fn unless_strangers<T: Default>(result: Result<T, CacheError>) -> Result<T, CacheError> {
    match result {
        Err(CacheError::Pattern(PatternError::Arity { .. })) => Ok(T::default()),
        result => result,
    }
}

impl<K, V> Clone for KeyValue<K, V> {
    fn clone(&self) -> Self {
        self.of(self.cache.clone())
    }
}

impl<K, V> fmt::Debug for KeyValue<K, V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KeyValue").field("namespace", &self.namespace).field("cache", &self.cache).finish()
    }
}

impl Cache {
    /// Values by key under a name of your choice in this cache.
    ///
    /// # Errors
    /// [`CacheError::Config`] unless the cache is a set of pairs: `table` is `set` or `ordered_set`, `key_field` and
    /// `partition_field` are 0, and `arity` is 2 or none.
    pub fn keyvalue<K, V>(&self, namespace: impl Into<Arc<str>>) -> Result<KeyValue<K, V>, CacheError>
    where
        K: Serialize + DeserializeOwned,
        V: Serialize + DeserializeOwned,
    {
        let config = self.config();
        let refuse = |option, given: String, allowed: &str| {
            Err(CacheError::Config(ConfigError::OutOfRange { option, given, allowed: allowed.into() }))
        };
        if !config.table.is_set() {
            return refuse("table", config.table.to_string(), "set, ordered_set (for values by key)");
        }
        if config.key_field != 0 {
            return refuse("key_field", config.key_field.to_string(), "0 (for values by key)");
        }
        if config.partition_field != 0 {
            return refuse("partition_field", config.partition_field.to_string(), "0 (for values by key)");
        }
        if let Some(arity) = config.arity.filter(|arity| *arity != 2) {
            return refuse("arity", arity.to_string(), "2 or none (for values by key)");
        }
        Ok(KeyValue { cache: self.clone(), namespace: namespace.into(), types: PhantomData })
    }
}

// Handles.
impl<K, V> KeyValue<K, V> {
    fn of(&self, cache: Cache) -> Self {
        Self { cache, namespace: self.namespace.clone(), types: PhantomData }
    }

    /// The name of the namespace.
    pub fn namespace(&self) -> &str {
        &self.namespace
    }

    /// The cache that it is in.
    pub fn cache(&self) -> &Cache {
        &self.cache
    }

    /// The same values, by calls that do otherwise than the cache's options say.
    #[must_use]
    pub fn with(&self, options: CallOptions) -> Self {
        self.of(self.cache.with(options))
    }

    /// The same values, by calls of a session, which read its own writes.
    ///
    /// # Errors
    /// [`CacheError::Token`] if the session is of another cache.
    pub fn within(&self, session: &Session) -> Result<Self, CacheError> {
        if session.name() == self.cache.name() {
            Ok(self.of(session.with(self.cache.options).into_cache()))
        } else {
            let reason =
                format!("the session is of cache {:?}, and this is {:?}", session.name(), self.cache.name());
            Err(CacheError::Token { reason })
        }
    }
}

// Values.
impl<K, V> KeyValue<K, V>
where
    K: Serialize + DeserializeOwned,
    V: Serialize + DeserializeOwned,
{
    fn key(&self, key: &K) -> Result<Term, TermError> {
        Ok(Term::Tuple(vec![Term::Str(self.namespace.clone()), to_term(key)?]))
    }

    fn record(&self, key: &K, value: &V) -> Result<Record, TermError> {
        Ok(Record::new([self.key(key)?, to_term(value)?]))
    }

    fn value(record: &Record) -> Result<V, CacheError> {
        let missing = || TermError::Custom("the record has no value".into());
        Ok(from_term(record.get(1).ok_or_else(missing)?)?)
    }

    /// The value of a key, if it has one.
    ///
    /// # Errors
    /// Those of [`Cache::get`], and [`CacheError::Term`] for a key that is no term and a value that is no `V`.
    pub async fn get(&self, key: &K) -> Result<Option<V>, CacheError> {
        let records = self.cache.get_key(self.key(key)?).await?;
        records.first().map(Self::value).transpose()
    }

    /// The values of many keys, asked for at once, in their order.
    ///
    /// # Errors
    /// [`CacheError::Partial`] if partitions did not answer, with the records (key and value) of those that did;
    /// [`CacheError::Term`] as for [`KeyValue::get`]; [`CacheError::TooLarge`] for more than `max_batch_records` keys.
    pub async fn get_many<'a>(
        &self,
        keys: impl IntoIterator<Item = &'a K>,
    ) -> Result<Vec<Option<V>>, CacheError>
    where
        K: 'a,
    {
        let mut operations = Vec::new();
        let max = self.cache.config().max_batch_records;
        for key in keys {
            if operations.len() == max {
                return Err(self.cache.too_many("the keys"));
            }
            let key = self.key(key)?;
            key.check()?;
            let partition = self.cache.config().partition_of(&key);
            operations.push((partition, Operation::Read(ReadOp::Get(key))));
        }
        let mut found = Vec::with_capacity(operations.len());
        let mut missing = BTreeMap::new();
        for (partition, answer) in self.cache.call_all(operations).await {
            match answer {
                Ok(reply) => found.push(self.cache.records(reply)?.into_iter().next()),
                Err(error) => drop(missing.entry(partition).or_insert(error)),
            }
        }
        if !missing.is_empty() {
            let found = Found::Records(found.into_iter().flatten().collect());
            return Err(CacheError::Partial { found, missing: missing.into_iter().collect() });
        }
        found.iter().map(|record| record.as_ref().map(Self::value).transpose()).collect()
    }

    /// Whether a key has a value.
    ///
    /// # Errors
    /// Those of [`Cache::get`].
    pub async fn contains(&self, key: &K) -> Result<bool, CacheError> {
        Ok(!self.cache.get_key(self.key(key)?).await?.is_empty())
    }

    /// Gives a key a value, in place of the one that it had.
    ///
    /// # Errors
    /// Those of [`Cache::put`], and [`CacheError::Term`] for a key or a value that is no term.
    pub async fn put(&self, key: &K, value: &V) -> Result<(), CacheError> {
        self.cache.put(self.record(key, value)?).await
    }

    /// Gives many keys their values, all partitions at once; how many were put.
    ///
    /// # Errors
    /// Those of [`Cache::put_batch`]. A key or a value that is no term is among the refused ones.
    pub async fn put_many<'a>(
        &self,
        pairs: impl IntoIterator<Item = (&'a K, &'a V)>,
    ) -> Result<u64, CacheError>
    where
        K: 'a,
        V: 'a,
    {
        let mut records = Vec::new();
        let max = self.cache.config().max_batch_records;
        // the places of those that are sent, among all
        let (mut places, mut refused) = (Vec::new(), Vec::new());
        for (index, (key, value)) in (0u64..).zip(pairs) {
            if records.len() + refused.len() == max {
                return Err(self.cache.too_many("the batch in records"));
            }
            match self.record(key, value) {
                Ok(record) => {
                    records.push(record);
                    places.push(index);
                }
                Err(error) => refused.push((index, error.into())),
            }
        }
        let place = |index: u64| {
            let place = usize::try_from(index).ok().and_then(|index| places.get(index));
            place.copied().unwrap_or(index)
        };
        let (applied, failed) = match self.cache.put_batch(records).await {
            Ok(applied) => (applied, Vec::new()),
            Err(CacheError::Batch { applied, refused: more, failed }) => {
                refused.extend(more.into_iter().map(|(index, error)| (place(index), error)));
                (applied, failed)
            }
            Err(error) => return Err(error),
        };
        if refused.is_empty() && failed.is_empty() {
            return Ok(applied);
        }
        refused.sort_by_key(|(index, _)| *index);
        Err(CacheError::Batch { applied, refused, failed })
    }

    /// Takes a key's value away; whether it had one.
    ///
    /// # Errors
    /// Those of [`Cache::delete`], and [`CacheError::Term`] for a key that is no term. After
    /// [`CacheError::Uncounted`] the key has no value, and nobody knows whether it had one.
    pub async fn remove(&self, key: &K) -> Result<bool, CacheError> {
        Ok(self.cache.delete_key(self.key(key)?).await? > 0)
    }

    /// Takes all values of this namespace away, and of no other; how many there were.
    ///
    /// # Errors
    /// Those of [`Cache::delete_match`].
    pub async fn clear(&self) -> Result<u64, CacheError> {
        unless_strangers(self.cache.delete_match(Partition::All, self.pattern()).await)
    }

    /// All pairs of this namespace, asked of every partition.
    ///
    /// # Errors
    /// Those of [`Cache::get_by_match_object`], and [`CacheError::Term`] for a key that is no `K` or a value that is no
    /// `V`.
    pub async fn entries(&self) -> Result<Vec<(K, V)>, CacheError> {
        let records = unless_strangers(self.cache.get_by_match_object(Partition::All, self.pattern()).await)?;
        let pair = |record: &Record| {
            let key = record.get(0).and_then(Term::items).and_then(|items| items.get(1));
            let none = || TermError::Custom("the record has no key".into());
            Ok((from_term(key.ok_or_else(none)?)?, Self::value(record)?))
        };
        records.iter().map(pair).collect()
    }

    fn pattern(&self) -> Vec<Pattern> {
        let namespace = Pattern::Exact(Term::Str(self.namespace.clone()));
        vec![Pattern::Tuple(vec![namespace, Pattern::Any]), Pattern::Any]
    }
}
