//! Which partition a record belongs to: the same on every node, platform and release.
//!
//! `partition = stable hash of the partition field modulo partitions`.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::error::CacheError;
use super::term::{Record, Term};

/// A partition of a cache, from 0 to `partitions` - 1.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct PartitionId(u32);

impl PartitionId {
    /// The partition of this number. Whether a cache has so many is for the cache to say.
    pub fn new(number: u32) -> Self {
        Self(number)
    }

    /// The number.
    pub fn get(self) -> u32 {
        self.0
    }

    /// The partition of a term, among so many partitions (0 counts as 1).
    ///
    /// ```
    /// use muster_router::cache::{PartitionId, Term};
    /// assert_eq!(PartitionId::of(&Term::from("user:1"), 64), PartitionId::of(&Term::from("user:1"), 64));
    /// ```
    pub fn of(term: &Term, partitions: u32) -> Self {
        let within = term.stable_hash() % u64::from(partitions.max(1));
        // below `partitions`, so that it fits
        Self(u32::try_from(within).unwrap_or(0))
    }

    /// The partition of a record whose partition field is `field`.
    ///
    /// # Errors
    /// [`CacheError::RecordTooShort`] if it has no such field.
    pub fn of_record(record: &Record, field: usize, partitions: u32) -> Result<Self, CacheError> {
        match record.get(field) {
            Some(term) => Ok(Self::of(term, partitions)),
            None => {
                let option = "partition_field".into();
                Err(CacheError::RecordTooShort { given: record.len(), field, option })
            }
        }
    }

    /// All partitions, if there are so many.
    pub fn all(partitions: u32) -> impl ExactSizeIterator<Item = Self> + Clone {
        (0..partitions.max(1) as usize).map(|number| Self(number as u32))
    }

    /// The key under which the ring places this partition of a cache: the cache's name, a zero byte, the number in
    /// four bytes, little-endian. Names hold no zero byte, so no two keys are equal.
    pub fn ring_key(self, cache: &str) -> Vec<u8> {
        let mut key = Vec::with_capacity(cache.len() + 5);
        key.extend_from_slice(cache.as_bytes());
        key.push(0);
        key.extend_from_slice(&self.0.to_le_bytes());
        key
    }
}

impl fmt::Display for PartitionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

impl fmt::Debug for PartitionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record;

    /// A change here moves data: never change a line.
    #[test]
    fn golden_partitions() {
        let of = |term: Term| [1, 3, 64, 1000, u32::MAX].map(|n| PartitionId::of(&term, n).get());
        let found = [Term::Nil, 1.into(), 1.0.into(), "user:1".into(), ("user", 1).into()].map(of);
        assert_eq!(
            found,
            [
                [0, 0, 27, 883, 3_415_919_823],
                [0, 0, 50, 642, 3_694_670_622],
                [0, 0, 45, 597, 2_704_817_412],
                [0, 0, 9, 65, 2_831_999_925],
                [0, 1, 54, 822, 2_571_535_342],
            ]
        );
    }

    #[test]
    fn a_record_goes_where_its_field_goes() {
        let record = record!["k", "p"];
        assert_eq!(PartitionId::of_record(&record, 1, 64), Ok(PartitionId::of(&"p".into(), 64)));
        let short = PartitionId::of_record(&record, 2, 64).unwrap_err();
        assert_eq!(
            short.to_string(),
            "nothing has changed: the record has 2 fields, and field 2 is its partition_field"
        );
        assert_eq!(PartitionId::of(&"p".into(), 0), PartitionId::new(0), "no partitions are one");
    }

    #[test]
    fn keys_spread_over_all_partitions() {
        let mut counts = vec![0u32; 100];
        (0..10_000).for_each(|key: i32| counts[PartitionId::of(&key.into(), 100).get() as usize] += 1);
        assert!(counts.iter().all(|count| (50..170).contains(count)), "{counts:?}");
        assert_eq!(PartitionId::all(100).count(), 100);
    }

    #[test]
    fn keys_on_the_ring_differ() {
        assert_eq!(PartitionId::new(258).ring_key("c"), [b'c', 0, 2, 1, 0, 0]);
    }
}
