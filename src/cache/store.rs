//! The versioned store of one partition: what a primary and its replicas hold. Sans-IO: the time comes in, nothing
//! goes out, and equal inputs give equal stores.
//!
//! # What decides
//! Every write has a [`Version`]. The store keeps, for each key, what the highest versions say, deletes included (as
//! tombstones); a write that comes late changes nothing that a later one decided. So any order of the same writes,
//! each any number of times, gives the same contents. That is what lets a snapshot be taken in pieces while writes go
//! on ([`Store::chunk`]), and two sides of a split be merged ([`Store::plan_merge`]).
//!
//! On top of this the stream from primary to replica is guarded: [`Store::apply`] takes only the next write of the
//! epoch that is open, says which write is missing otherwise, and takes one twice without harm. Numbers go on from
//! epoch to epoch, and an epoch opens ([`Store::open_epoch`]) only on a store that holds just its base.
//!
//! ```text
//!            open_epoch(e, base = applied)            apply(w, e:applied + 1)
//!  epoch d ───────────────────────────────▶ epoch e ──────────────────────────▶ epoch e, applied + 1
//!     │ applied < base: Behind, fetch the rest   │ e:lower = Duplicate, e:higher = Gap
//!     │ applied > base: Ahead, discard this copy │ older epoch = StaleEpoch, newer = UnknownEpoch
//! ```
//!
//! # Deletes
//! A delete leaves a tombstone until all owners have it and `tombstone_ttl` is over ([`Store::purge`]). From then on
//! [`Store::purged_through`] tells: whoever was last in sync before it may still hold what was deleted, and is
//! discarded, never merged. A delete of everything is one version, the floor: what is at or below it dies on arrival.
//!
//! # The four kinds of tables
//! * `Set`, `OrderedSet`: one record a key; the higher version stays. (Both give records in the order of keys; only
//!   the latter promises it.)
//! * `Bag`: different records a key; putting an identical one again raises its version.
//! * `DuplicateBag`: each put is a record of its own, named by its version.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::config::{CacheConfig, Table};
use super::error::CacheError;
use super::pattern::{PatternError, RecordPattern};
use super::term::{Record, Term};
use super::version::{Epoch, Lineage, Version};

mod exchange;
mod ledger;
mod slot;
#[cfg(test)]
mod tests;

pub use exchange::{Chunk, Cursor, Loser, MergePlan, SnapshotHeader};
pub use ledger::Digest;
use ledger::Ledger;
use slot::{Change, Slot};

/// One statement about the contents of a partition. A store is the sum of such statements, in any order.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Entry {
    /// This record was put.
    Put {
        /// The record.
        record: Record,
        /// By which write.
        version: Version,
    },
    /// All records of this key up to this version are gone.
    DeletedKey {
        /// The key.
        key: Term,
        /// By which write.
        version: Version,
    },
    /// All copies of this record up to this version are gone (bags only).
    DeletedRecord {
        /// The record.
        record: Record,
        /// By which write.
        version: Version,
    },
    /// Everything up to this version is gone.
    DeletedAll {
        /// By which write.
        version: Version,
    },
}

impl Entry {
    /// The write that it comes from.
    pub fn version(&self) -> &Version {
        match self {
            Entry::Put { version, .. }
            | Entry::DeletedKey { version, .. }
            | Entry::DeletedRecord { version, .. }
            | Entry::DeletedAll { version } => version,
        }
    }
}

/// What the stream of a partition carries: effects, never conditions or patterns, so that every owner does the same.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Write {
    /// Puts one record. A batch is one write for each of its records.
    Put(Record),
    /// Removes all records of these keys.
    DeleteKeys(Vec<Term>),
    /// Removes all copies of these records (bags); in a set, the keys of these records.
    DeleteRecords(Vec<Record>),
    /// Removes everything.
    DeleteAll,
    /// Takes over what another side of a split held; the entries keep their versions.
    Merge(Vec<Entry>),
    /// Changes nothing; it has a version all the same, and proves that an epoch can write.
    Nothing,
}

/// What a write did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// It was the next one and is applied.
    Applied {
        /// How many records went.
        removed: u64,
    },
    /// It was applied before.
    Duplicate,
}

/// Why a write was not applied. Nothing has changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ApplyError {
    /// Writes between the last one and this one are missing.
    #[error("write {expected} is missing before write {given}")]
    Gap {
        /// The number that has to come next.
        expected: u64,
        /// The number that came.
        given: u64,
    },
    /// The write is of an epoch that is over.
    #[error("the write is of epoch {given}, and {current} is open")]
    StaleEpoch {
        /// The epoch of the write.
        given: Epoch,
        /// The epoch that is open.
        current: Epoch,
    },
    /// The write is of an epoch that has not been opened here.
    #[error("the write is of epoch {given}, which is not open here")]
    UnknownEpoch {
        /// The epoch of the write.
        given: Epoch,
    },
    /// A record in it does not fit the table.
    #[error(transparent)]
    Malformed(#[from] CacheError),
}

/// Why an epoch was not opened. Nothing has changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EpochError {
    /// The same or a later epoch is open, or the base is not before the epoch.
    #[error("epoch {current} is open already")]
    Stale {
        /// The epoch that is open.
        current: Epoch,
    },
    /// The base is a write of the epoch itself or of a later one.
    #[error("an epoch cannot begin from {base}")]
    Unsound {
        /// The base that was given.
        base: Version,
    },
    /// The store lacks writes up to the base: fetch them first.
    #[error("writes are missing up to the base of the epoch")]
    Behind,
    /// The store holds writes that the epoch does not begin from: discard it and take a snapshot.
    #[error("the store holds writes that are lost in this epoch")]
    Ahead,
}

/// All records of a key, as one owner knows them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Read {
    /// The records; none if there are none.
    pub records: Vec<Record>,
    /// The last write that decided this; what is absent has a version too, where it is known. Between two owners
    /// the higher one is right.
    pub version: Option<Version>,
}

/// What a match would delete.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Removal {
    /// The write that does it, here and on every replica.
    pub write: Write,
    /// The keys of the records that fit, each with the version that its record has now.
    pub removed: Vec<(Term, Version)>,
}

/// A tombstone in the order of arrival.
#[derive(Clone, Debug)]
struct Grave {
    since: Duration,
    /// The write of the stream with which it came: owners that have applied it have the tombstone.
    arrived: Version,
    version: Version,
    key: Term,
    record: Option<Record>,
}

/// One partition's records; see the [module](self). Methods are grouped: reads, writes, then the exchange with other
/// copies.
#[derive(Clone, Debug)]
pub struct Store {
    table: Table,
    key_field: usize,
    slots: BTreeMap<Term, Slot>,
    ledger: Ledger,
    lineage: Lineage,
    applied: Option<Version>,
    floor: Option<Version>,
    purged_through: Option<Version>,
    graves: VecDeque<Grave>,
}

impl Store {
    /// An empty store that has never been in an epoch.
    pub fn new(config: &CacheConfig) -> Self {
        Self {
            table: config.table,
            key_field: config.key_field,
            slots: BTreeMap::new(),
            ledger: Ledger::default(),
            lineage: Lineage::default(),
            applied: None,
            floor: None,
            purged_through: None,
            graves: VecDeque::new(),
        }
    }

    // ---- reads

    /// The last write that was applied.
    pub fn applied(&self) -> Option<&Version> {
        self.applied.as_ref()
    }

    /// The epoch that is open.
    pub fn epoch(&self) -> Option<&Epoch> {
        self.lineage.epoch()
    }

    /// The epochs that made this store.
    pub fn lineage(&self) -> &Lineage {
        &self.lineage
    }

    /// Everything at or below this version was deleted by a delete of everything.
    pub fn floor(&self) -> Option<&Version> {
        self.floor.as_ref()
    }

    /// Deletes up to here may be forgotten: a copy that was last in sync before this is discarded, never merged.
    pub fn purged_through(&self) -> Option<&Version> {
        self.purged_through.as_ref()
    }

    /// The number of records.
    pub fn len(&self) -> u64 {
        self.ledger.records
    }

    /// Whether there is no record.
    pub fn is_empty(&self) -> bool {
        self.ledger.records == 0
    }

    /// The bytes of all records and tombstones: their encodings and a fixed overhead for each.
    pub fn bytes(&self) -> u64 {
        self.ledger.bytes + self.ledger.tombstone_bytes
    }

    /// The number of tombstones.
    pub fn tombstones(&self) -> u64 {
        self.ledger.tombstones
    }

    /// The digest of all records with their versions: equal on copies with equal records, whatever their tombstones
    /// and the order of their writes. It is kept up to date; asking costs nothing.
    pub fn digest(&self) -> Digest {
        self.ledger.digest()
    }

    /// The records of a key with their versions.
    pub fn get(&self, key: &Term) -> impl Iterator<Item = (&Record, &Version)> {
        self.slots.get(key).into_iter().flat_map(Slot::live)
    }

    /// The records of a key and the version of this answer: for quorums and sessions.
    pub fn read(&self, key: &Term) -> Read {
        let records = self.get(key).map(|(record, _)| record.clone()).collect();
        let decided = self.slots.get(key).and_then(Slot::version);
        // what has left no trace was deleted at or before these, or has never been
        let version = decided.max(self.floor.as_ref()).max(match decided {
            Some(_) => None,
            None => self.purged_through.as_ref(),
        });
        Read { records, version: version.cloned() }
    }

    /// All records with their versions, in the order of keys.
    pub fn records(&self) -> impl Iterator<Item = (&Record, &Version)> {
        self.slots.values().flat_map(Slot::live)
    }

    /// Folds all records, in the order of keys.
    pub fn fold<A>(&self, start: A, mut f: impl FnMut(A, &Record) -> A) -> A {
        self.records().fold(start, |folded, (record, _)| f(folded, record))
    }

    /// The bindings of a pattern's variables, one list for each record that fits, in the order of keys.
    ///
    /// # Errors
    /// [`PatternError::Arity`] if there are records and none has as many fields; [`PatternError::TooShort`].
    pub fn get_by_match(&self, pattern: &RecordPattern) -> Result<Vec<Vec<Term>>, PatternError> {
        Ok(self.candidates(pattern)?.filter_map(|(record, _)| pattern.bindings(record)).collect())
    }

    /// The records that fit a pattern, in the order of keys.
    ///
    /// # Errors
    /// As [`Store::get_by_match`].
    pub fn match_object(&self, pattern: &RecordPattern) -> Result<Vec<Record>, PatternError> {
        let fitting = self.candidates(pattern)?.filter(|(record, _)| pattern.fits(record));
        Ok(fitting.map(|(record, _)| record.clone()).collect())
    }

    fn candidates<'a>(
        &'a self,
        pattern: &RecordPattern,
    ) -> Result<impl Iterator<Item = (&'a Record, &'a Version)> + use<'a>, PatternError> {
        pattern.reaches(self.key_field, "key_field")?;
        self.ledger.check_arity(pattern.arity())?;
        let key = pattern.exact(self.key_field);
        let (one, all) = match &key {
            Some(key) => (self.slots.get(key), None),
            None => (None, Some(&self.slots)),
        };
        Ok(one.into_iter().chain(all.into_iter().flat_map(BTreeMap::values)).flat_map(Slot::live))
    }

    /// What a delete by pattern removes now: the primary applies the write, and replicas get just that.
    ///
    /// # Errors
    /// As [`Store::get_by_match`].
    pub fn plan_delete_match(&self, pattern: &RecordPattern) -> Result<Removal, PatternError> {
        let mut removed = Vec::new();
        let mut records = Vec::new();
        for (record, version) in self.candidates(pattern)?.filter(|(record, _)| pattern.fits(record)) {
            let Some(key) = record.get(self.key_field) else { continue };
            removed.push((key.clone(), version.clone()));
            if records.last() != Some(record) {
                records.push(record.clone());
            }
        }
        let write = if self.table.is_set() {
            Write::DeleteKeys(removed.iter().map(|(key, _)| key.clone()).collect())
        } else {
            Write::DeleteRecords(records)
        };
        Ok(Removal { write, removed })
    }

    // ---- writes

    /// Opens an epoch that begins from `base`, the last write before it. The same epoch again changes nothing.
    ///
    /// # Errors
    /// [`EpochError`]; nothing has changed then.
    pub fn open_epoch(&mut self, epoch: &Epoch, base: Option<&Version>) -> Result<(), EpochError> {
        if let Some(current) = self.epoch() {
            if current == epoch && self.lineage.base() == base {
                return Ok(());
            }
            if epoch <= current {
                return Err(EpochError::Stale { current: current.clone() });
            }
        }
        if let Some(base) = base.filter(|base| base.epoch >= *epoch) {
            return Err(EpochError::Unsound { base: base.clone() });
        }
        match self.applied.as_ref().cmp(&base) {
            std::cmp::Ordering::Less => Err(EpochError::Behind),
            std::cmp::Ordering::Greater => Err(EpochError::Ahead),
            std::cmp::Ordering::Equal => {
                self.lineage.push(epoch.clone(), base.cloned());
                Ok(())
            }
        }
    }

    /// The version of the next write of the open epoch.
    pub fn next_version(&self) -> Option<Version> {
        let epoch = self.epoch()?.clone();
        Some(Version { epoch, seq: self.next_seq() })
    }

    fn next_seq(&self) -> u64 {
        self.applied.as_ref().map_or(0, |applied| applied.seq).saturating_add(1)
    }

    /// Applies the next write of the open epoch. `now` is when its tombstones begin to age.
    ///
    /// # Errors
    /// [`ApplyError`]; nothing has changed then.
    pub fn apply(&mut self, write: &Write, version: &Version, now: Duration) -> Result<Step, ApplyError> {
        match self.epoch() {
            Some(current) if version.epoch < *current => {
                let (given, current) = (version.epoch.clone(), current.clone());
                return Err(ApplyError::StaleEpoch { given, current });
            }
            Some(current) if version.epoch == *current => {}
            _ => return Err(ApplyError::UnknownEpoch { given: version.epoch.clone() }),
        }
        let expected = self.next_seq();
        if version.seq < expected {
            return Ok(Step::Duplicate);
        }
        if version.seq > expected {
            return Err(ApplyError::Gap { expected, given: version.seq });
        }
        self.check(write)?;
        self.applied = Some(version.clone());
        let removed = self.carry_out(write, version, now);
        Ok(Step::Applied { removed })
    }

    /// Refuses a write with a record that has no key, before anything changes.
    fn check(&self, write: &Write) -> Result<(), CacheError> {
        match write {
            Write::Put(record) => self.key_of(record).map(drop),
            Write::DeleteRecords(records) => records.iter().try_for_each(|r| self.key_of(r).map(drop)),
            Write::Merge(entries) => self.check_entries(entries),
            Write::DeleteKeys(_) | Write::DeleteAll | Write::Nothing => Ok(()),
        }
    }

    fn check_entries(&self, entries: &[Entry]) -> Result<(), CacheError> {
        entries.iter().try_for_each(|entry| match entry {
            Entry::Put { record, .. } | Entry::DeletedRecord { record, .. } => self.key_of(record).map(drop),
            Entry::DeletedKey { .. } | Entry::DeletedAll { .. } => Ok(()),
        })
    }

    fn key_of<'a>(&self, record: &'a Record) -> Result<&'a Term, CacheError> {
        let (given, field) = (record.len(), self.key_field);
        let short = || CacheError::RecordTooShort { given, field, option: "key_field".into() };
        record.get(field).ok_or_else(short)
    }

    fn carry_out(&mut self, write: &Write, version: &Version, now: Duration) -> u64 {
        match write {
            Write::Put(record) => self.put(record, version).removed,
            Write::DeleteKeys(keys) => {
                keys.iter().map(|key| self.delete_key(key, version, version, now).removed).sum()
            }
            Write::DeleteRecords(records) => {
                records.iter().map(|record| self.delete_record(record, version, version, now).removed).sum()
            }
            Write::DeleteAll => self.delete_all(version).removed,
            Write::Merge(entries) => {
                entries.iter().map(|entry| self.absorb(entry, version, now).removed).sum()
            }
            Write::Nothing => 0,
        }
    }

    /// Takes one statement in; whatever a higher version has decided stays.
    fn absorb(&mut self, entry: &Entry, arrived: &Version, now: Duration) -> Change {
        match entry {
            Entry::Put { record, version } => self.put(record, version),
            Entry::DeletedKey { key, version } => self.delete_key(key, version, arrived, now),
            Entry::DeletedRecord { record, version } => self.delete_record(record, version, arrived, now),
            Entry::DeletedAll { version } => self.delete_all(version),
        }
    }

    fn is_below_floor(&self, version: &Version) -> bool {
        self.floor.as_ref() >= Some(version)
    }

    fn put(&mut self, record: &Record, version: &Version) -> Change {
        let Some(key) = record.get(self.key_field) else { return Change::NONE };
        if self.is_below_floor(version) {
            return Change::NONE;
        }
        if let Some(slot) = self.slots.get_mut(key) {
            return slot.put(key, record, version, self.table, &mut self.ledger);
        }
        let mut slot = Slot::empty(self.table);
        let change = slot.put(key, record, version, self.table, &mut self.ledger);
        self.slots.insert(key.clone(), slot);
        change
    }

    fn delete_key(&mut self, key: &Term, version: &Version, arrived: &Version, now: Duration) -> Change {
        if self.is_below_floor(version) {
            return Change::NONE;
        }
        let slot = self.slots.entry(key.clone()).or_insert_with(|| Slot::empty(self.table));
        let change = slot.delete_key(key, version, &mut self.ledger);
        if change.changed {
            self.bury(key.clone(), None, version, arrived, now);
        }
        change
    }

    fn delete_record(
        &mut self,
        record: &Record,
        version: &Version,
        arrived: &Version,
        now: Duration,
    ) -> Change {
        let Some(key) = record.get(self.key_field) else { return Change::NONE };
        if self.table.is_set() {
            return self.delete_key(key, version, arrived, now);
        }
        if self.is_below_floor(version) {
            return Change::NONE;
        }
        let slot = self.slots.entry(key.clone()).or_insert_with(|| Slot::empty(self.table));
        let change = slot.delete_record(record, version, self.table, &mut self.ledger);
        if change.changed {
            self.bury(key.clone(), Some(record.clone()), version, arrived, now);
        }
        change
    }

    fn delete_all(&mut self, version: &Version) -> Change {
        if self.is_below_floor(version) {
            return Change::NONE;
        }
        self.floor = Some(version.clone());
        let mut removed = 0;
        let ledger = &mut self.ledger;
        self.slots.retain(|key, slot| {
            removed += slot.cut(key, version, ledger);
            !slot.is_empty()
        });
        Change { changed: true, removed }
    }

    fn bury(
        &mut self,
        key: Term,
        record: Option<Record>,
        version: &Version,
        arrived: &Version,
        now: Duration,
    ) {
        let (version, arrived) = (version.clone(), arrived.clone());
        self.graves.push_back(Grave { since: now, arrived, version, key, record });
        // a key that is put and deleted in turn leaves graves without a tombstone
        if self.graves.len() as u64 > 2 * self.ledger.tombstones + 1024 {
            let slots = &self.slots;
            self.graves.retain(|grave| slots.get(&grave.key).is_some_and(|slot| slot.holds(grave)));
        }
    }

    /// What must always hold, in words if it does not: every count is what the records give, and every key is in its
    /// place.
    ///
    /// # Errors
    /// What does not hold.
    pub fn check_invariants(&self) -> Result<(), String> {
        let mut ledger = Ledger::default();
        for (key, slot) in &self.slots {
            slot.count(key, &mut ledger);
            slot.check(key, self.key_field, self.table)?;
            if slot.is_empty() {
                return Err(format!("nothing is left of key {key}, and it has a slot"));
            }
            if self.floor.is_some() && slot.lowest() <= self.floor.as_ref() {
                return Err(format!("key {key} holds what is below the floor"));
            }
        }
        if ledger != self.ledger {
            return Err(format!("counted {ledger:?}, kept {:?}", self.ledger));
        }
        if !self.lineage.is_sound() {
            return Err(format!("the lineage does not rise: {:?}", self.lineage));
        }
        Ok(())
    }
}
