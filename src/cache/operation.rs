//! What a cache is asked and what it answers, as data: no closure crosses the wire, so that every node can check what
//! it is asked and every owner does the same.
//!
//! A [`ReadOp`] or [`WriteOp`] is about one partition. What is about several (a batch, a match in all partitions) is
//! several of them, made and put together by the caller's side.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::config::{CacheConfig, ReadMode, WriteMode};
use super::error::CacheError;
use super::partition::PartitionId;
use super::pattern::RecordPattern;
use super::store::{Store, Write};
use super::term::{Record, Term};
use super::version::Version;

/// About how many bytes one entry of the stream may have: a delete of many keys is cut into several.
const ENTRY_BYTES: usize = 256 << 10;
/// What a row of an answer has on the wire besides its terms: its length.
const ROW: usize = 4;

/// A change of one partition.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum WriteOp {
    /// Puts these records, in this order; each is a write of its own.
    Put(Vec<Record>),
    /// Removes all records of these keys.
    DeleteKeys(Vec<Term>),
    /// Removes all records that fit. The primary decides which, and only those are removed on the replicas.
    DeleteMatch(RecordPattern),
    /// Removes everything.
    DeleteAll,
}

/// A question to one partition.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ReadOp {
    /// The records of a key.
    Get(Term),
    /// The bindings of a pattern's variables, one list for each record that fits.
    Match(RecordPattern),
    /// The records that fit.
    MatchObject(RecordPattern),
}

/// What a partition can be asked to do.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Operation {
    /// A question.
    Read(ReadOp),
    /// A change.
    Write(WriteOp),
}

/// What an operation found or did.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Outcome {
    /// How many records were put.
    Written(u64),
    /// How many records went.
    Removed(u64),
    /// The records; none if there are none.
    Records(Vec<Record>),
    /// The values of a pattern's variables in their numeric order, one list for each record that fits.
    Bindings(Vec<Vec<Term>>),
}

/// How one operation is carried out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// When a write is answered; reads do not look at it.
    pub write_mode: WriteMode,
    /// Who answers a read; writes do not look at it.
    pub read_mode: ReadMode,
    /// The writes that the answer has to know of: the session's last of this partition, or its last of each side of a
    /// split.
    pub at_least: Vec<Version>,
    /// When the operation is given up, since the node's start.
    pub deadline: Duration,
}

impl Options {
    /// As the cache's options say, with a deadline counted from `now`.
    pub fn of(config: &CacheConfig, now: Duration) -> Self {
        Self {
            write_mode: config.write_mode,
            read_mode: config.read_mode,
            at_least: Vec::new(),
            deadline: now.saturating_add(config.operation_timeout),
        }
    }
}

/// A good answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reply {
    /// What was found or done.
    pub outcome: Outcome,
    /// Of a write: its version, the last one if it was several entries. Of a read: how far the copy was that was
    /// read. A session remembers it.
    pub version: Option<Version>,
}

impl WriteOp {
    /// The effects that this has on a store as it is now, one entry of the stream each; at least one, so that also a
    /// delete that finds nothing is confirmed by the owners and not only by a primary that may be outdated.
    ///
    /// # Errors
    /// [`CacheError::Pattern`] for a pattern that no record can fit.
    pub(crate) fn plan(&self, store: &Store) -> Result<Vec<Write>, CacheError> {
        let mut writes = match self {
            WriteOp::Put(records) => records.iter().cloned().map(Write::Put).collect(),
            WriteOp::DeleteKeys(keys) => pieces(keys, Term::encoded_len, Write::DeleteKeys),
            WriteOp::DeleteMatch(pattern) => match store.plan_delete_match(pattern)?.write {
                Write::DeleteKeys(keys) => pieces(&keys, Term::encoded_len, Write::DeleteKeys),
                Write::DeleteRecords(records) => pieces(&records, Record::encoded_len, Write::DeleteRecords),
                other => vec![other],
            },
            WriteOp::DeleteAll => vec![Write::DeleteAll],
        };
        if writes.is_empty() {
            writes.push(Write::Nothing);
        }
        Ok(writes)
    }

    /// The answer once every entry is in, and so many records went by them.
    pub(crate) fn outcome(&self, removed: u64) -> Outcome {
        match self {
            WriteOp::Put(records) => Outcome::Written(records.len() as u64),
            WriteOp::DeleteKeys(_) | WriteOp::DeleteMatch(_) | WriteOp::DeleteAll => {
                Outcome::Removed(removed)
            }
        }
    }
}

/// Cuts a list into entries of bounded size.
fn pieces<T: Clone>(items: &[T], len: impl Fn(&T) -> usize, write: impl Fn(Vec<T>) -> Write) -> Vec<Write> {
    let (mut writes, mut piece, mut bytes) = (Vec::new(), Vec::new(), 0);
    for item in items {
        let length = len(item);
        if bytes + length > ENTRY_BYTES && !piece.is_empty() {
            writes.push(write(std::mem::take(&mut piece)));
            bytes = 0;
        }
        bytes += length;
        piece.push(item.clone());
    }
    if !piece.is_empty() {
        writes.push(write(piece));
    }
    writes
}

impl ReadOp {
    /// What a store says now.
    ///
    /// # Errors
    /// [`CacheError::Pattern`] for a pattern that no record can fit.
    pub(crate) fn read(&self, store: &Store) -> Result<Outcome, CacheError> {
        Ok(match self {
            ReadOp::Get(key) => Outcome::Records(store.get(key).map(|(record, _)| record.clone()).collect()),
            ReadOp::Match(pattern) => Outcome::Bindings(store.get_by_match(pattern)?),
            ReadOp::MatchObject(pattern) => Outcome::Records(store.match_object(pattern)?),
        })
    }
}

impl Operation {
    /// Refuses what this cache does not allow, and records that belong to another partition. Both the caller's node and
    /// the one that executes it ask: what came over the wire is never trusted.
    ///
    /// # Errors
    /// Those of [`CacheConfig::check_record`] and [`CacheConfig::check_pattern`]; [`CacheError::TooLarge`] for more
    /// than `max_batch_records`; [`CacheError::WrongOwner`] without a hint for what belongs to another partition.
    pub(crate) fn check(&self, config: &CacheConfig, partition: PartitionId) -> Result<(), CacheError> {
        let belongs = |place: PartitionId| {
            let there = CacheError::WrongOwner { partition: place, primary: None, epoch: None };
            if place == partition { Ok(()) } else { Err(there) }
        };
        let key_belongs = |key: &Term| match config.partition_of_key(key) {
            Ok(place) => belongs(place),
            // the caller names the partition, and the key does not tell
            Err(_) => Ok(()),
        };
        let pattern_fits = |pattern: &RecordPattern| {
            config.check_pattern(pattern)?;
            pattern.exact(config.partition_field).map_or(Ok(()), |term| belongs(config.partition_of(&term)))
        };
        match self {
            Operation::Read(ReadOp::Get(key)) => {
                key.check()?;
                key_belongs(key)
            }
            Operation::Read(ReadOp::Match(pattern) | ReadOp::MatchObject(pattern))
            | Operation::Write(WriteOp::DeleteMatch(pattern)) => pattern_fits(pattern),
            Operation::Write(WriteOp::Put(records)) => {
                few_enough(records.len(), config)?;
                records.iter().try_for_each(|record| {
                    config.check_record(record)?;
                    belongs(config.key_and_partition(record)?.1)
                })
            }
            Operation::Write(WriteOp::DeleteKeys(keys)) => {
                few_enough(keys.len(), config)?;
                keys.iter().try_for_each(|key| {
                    key.check()?;
                    key_belongs(key)
                })
            }
            Operation::Write(WriteOp::DeleteAll) => Ok(()),
        }
    }

    /// Whether it changes something.
    pub(crate) fn is_write(&self) -> bool {
        match self {
            Operation::Write(_) => true,
            Operation::Read(_) => false,
        }
    }

    /// Whether carrying it out a second time leaves the same records as once: the second put of a record into a
    /// `DuplicateBag` would be a second record.
    pub(crate) fn is_idempotent(&self, config: &CacheConfig) -> bool {
        use super::config::Table;
        match self {
            Operation::Read(_) => true,
            Operation::Write(WriteOp::Put(_)) => config.table != Table::DuplicateBag,
            Operation::Write(WriteOp::DeleteKeys(_) | WriteOp::DeleteMatch(_) | WriteOp::DeleteAll) => true,
        }
    }

    /// About how many bytes it has on the wire.
    pub(crate) fn wire_len(&self) -> usize {
        match self {
            Operation::Write(WriteOp::Put(records)) => records.iter().map(Record::encoded_len).sum(),
            Operation::Write(WriteOp::DeleteKeys(keys)) => keys.iter().map(Term::encoded_len).sum(),
            Operation::Read(ReadOp::Get(key)) => key.encoded_len(),
            Operation::Read(ReadOp::Match(pattern) | ReadOp::MatchObject(pattern))
            | Operation::Write(WriteOp::DeleteMatch(pattern)) => pattern.wire_len(),
            Operation::Write(WriteOp::DeleteAll) => 8,
        }
    }
}

impl Outcome {
    /// About how many bytes it has on the wire.
    pub(crate) fn wire_len(&self) -> usize {
        match self {
            Outcome::Written(_) | Outcome::Removed(_) => 8,
            Outcome::Records(records) => records.iter().map(|record| ROW + record.encoded_len()).sum(),
            Outcome::Bindings(rows) => rows.iter().map(|row| ROW + terms_len(row)).sum(),
        }
    }
}

fn terms_len(row: &[Term]) -> usize {
    row.iter().map(Term::encoded_len).sum()
}

fn few_enough(count: usize, config: &CacheConfig) -> Result<(), CacheError> {
    let (given, max) = (count as u64, config.max_batch_records as u64);
    if given <= max {
        return Ok(());
    }
    let (what, option) = ("the number of records in a batch".into(), "max_batch_records".into());
    Err(CacheError::TooLarge { what, given, max, option })
}

#[cfg(test)]
#[path = "operation_tests.rs"]
mod tests;
