//! What a store knows of one key: the records, and what is gone.

use std::collections::BTreeMap;

use super::ledger::Ledger;
use super::{Entry, Grave};
use crate::cache::config::Table;
use crate::cache::term::{Record, Term};
use crate::cache::version::Version;

/// What an input did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Change {
    pub(super) changed: bool,
    /// How many records went, not counting those that were replaced.
    pub(super) removed: u64,
}

impl Change {
    pub(super) const NONE: Self = Self { changed: false, removed: 0 };
    const DONE: Self = Self { changed: true, removed: 0 };
}

#[derive(Clone, Debug)]
pub(super) enum Slot {
    /// Nothing yet.
    Empty,
    /// A set's key: its record, or a tombstone.
    One { version: Version, record: Option<Record> },
    /// A bag's key.
    Many(Many),
}

#[derive(Clone, Debug, Default)]
pub(super) struct Many {
    /// Everything of this key up to here is gone.
    floor: Option<Version>,
    records: BTreeMap<Record, Copies>,
}

#[derive(Clone, Debug, Default)]
pub(super) struct Copies {
    /// All copies up to here are gone.
    floor: Option<Version>,
    /// Rising; one at most in a bag without duplicates.
    live: Vec<Version>,
}

impl Copies {
    /// Takes away the copies up to the version.
    fn cut(&mut self, record: &Record, version: &Version, ledger: &mut Ledger) -> u64 {
        let dead = self.live.partition_point(|copy| copy <= version);
        self.live.drain(..dead).for_each(|copy| ledger.died(record, &copy));
        dead as u64
    }

    fn forget_floor(&mut self, record: &Record, ledger: &mut Ledger) {
        if self.floor.take().is_some() {
            ledger.forgot_record(record);
        }
    }

    fn is_empty(&self) -> bool {
        self.floor.is_none() && self.live.is_empty()
    }
}

impl Many {
    fn cut(&mut self, version: &Version, ledger: &mut Ledger) -> u64 {
        let mut removed = 0;
        self.records.retain(|record, copies| {
            removed += copies.cut(record, version, ledger);
            if copies.floor.as_ref() <= Some(version) {
                copies.forget_floor(record, ledger);
            }
            !copies.is_empty()
        });
        removed
    }

    fn put(&mut self, record: &Record, version: &Version, table: Table, ledger: &mut Ledger) -> Change {
        if self.floor.as_ref() >= Some(version) {
            return Change::NONE;
        }
        if self.records.get(record).is_some_and(|copies| copies.floor.as_ref() >= Some(version)) {
            return Change::NONE;
        }
        let copies = self.records.entry(record.clone()).or_default();
        if table == Table::DuplicateBag {
            let Err(place) = copies.live.binary_search(version) else { return Change::NONE };
            copies.live.insert(place, version.clone());
        } else {
            if copies.live.last() >= Some(version) {
                return Change::NONE;
            }
            copies.cut(record, version, ledger);
            // the copy that lives is above the floor: it says as much
            copies.forget_floor(record, ledger);
            copies.live.push(version.clone());
        }
        ledger.born(record, version);
        Change::DONE
    }

    fn outcome(&self, entry: &Entry, table: Table) -> Option<Option<&Version>> {
        let given = entry.version();
        let floor = self.floor.as_ref().filter(|floor| *floor >= given);
        match entry {
            Entry::DeletedAll { .. } => None,
            Entry::DeletedKey { .. } => floor.map(|_| None),
            Entry::Put { record, .. } | Entry::DeletedRecord { record, .. } => {
                let copies = self.records.get(record);
                let gone = copies.and_then(|copies| copies.floor.as_ref()).filter(|gone| *gone >= given);
                let live = copies.and_then(|copies| match table {
                    Table::DuplicateBag => copies.live.iter().find(|copy| *copy == given),
                    _ => copies.live.last().filter(|copy| *copy >= given),
                });
                match entry {
                    Entry::Put { .. } => match floor.max(gone) {
                        Some(by) => Some(Some(by)),
                        None => live.map(|_| None),
                    },
                    // the record lives on by a later put
                    _ if table != Table::DuplicateBag && live.is_some_and(|copy| copy > given) => Some(live),
                    _ => floor.or(gone).map(|_| None),
                }
            }
        }
    }

    fn delete_record(
        &mut self,
        record: &Record,
        version: &Version,
        table: Table,
        ledger: &mut Ledger,
    ) -> Change {
        if self.floor.as_ref() >= Some(version) {
            return Change::NONE;
        }
        if let Some(copies) = self.records.get(record) {
            let later = table != Table::DuplicateBag && copies.live.last() > Some(version);
            if later || copies.floor.as_ref() >= Some(version) {
                return Change::NONE;
            }
        }
        let copies = self.records.entry(record.clone()).or_default();
        let removed = copies.cut(record, version, ledger);
        if copies.floor.replace(version.clone()).is_none() {
            ledger.buried_record(record);
        }
        Change { changed: true, removed }
    }
}

impl Slot {
    pub(super) fn empty(table: Table) -> Self {
        if table.is_set() { Slot::Empty } else { Slot::Many(Many::default()) }
    }

    pub(super) fn is_empty(&self) -> bool {
        match self {
            Slot::Empty => true,
            Slot::One { .. } => false,
            Slot::Many(many) => many.floor.is_none() && many.records.is_empty(),
        }
    }

    pub(super) fn live(&self) -> impl Iterator<Item = (&Record, &Version)> {
        let (one, many) = match self {
            Slot::Empty => (None, None),
            Slot::One { version, record } => (record.as_ref().map(|record| (record, version)), None),
            Slot::Many(many) => (None, Some(&many.records)),
        };
        let many = many.into_iter().flatten();
        one.into_iter().chain(many.flat_map(|(record, copies)| copies.live.iter().map(move |v| (record, v))))
    }

    /// The deletes that hold for a record of a bag: of its key, and of itself.
    pub(super) fn deletes_of(&self, record: &Record) -> impl Iterator<Item = &Version> {
        let many = match self {
            Slot::Empty | Slot::One { .. } => None,
            Slot::Many(many) => Some(many),
        };
        let copies = many.and_then(|many| many.records.get(record));
        many.and_then(|many| many.floor.as_ref()).into_iter().chain(copies.and_then(|c| c.floor.as_ref()))
    }

    /// The highest version that decided anything here.
    pub(super) fn version(&self) -> Option<&Version> {
        match self {
            Slot::Empty => None,
            Slot::One { version, .. } => Some(version),
            Slot::Many(many) => {
                let copies =
                    many.records.values().map(|copies| copies.live.last().max(copies.floor.as_ref()));
                copies.max().flatten().max(many.floor.as_ref())
            }
        }
    }

    /// The lowest version that is held.
    pub(super) fn lowest(&self) -> Option<&Version> {
        match self {
            Slot::Empty => None,
            Slot::One { version, .. } => Some(version),
            Slot::Many(many) => {
                let copies = many
                    .records
                    .values()
                    .flat_map(|copies| copies.live.first().into_iter().chain(&copies.floor));
                copies.chain(&many.floor).min()
            }
        }
    }

    pub(super) fn put(
        &mut self,
        key: &Term,
        record: &Record,
        version: &Version,
        table: Table,
        ledger: &mut Ledger,
    ) -> Change {
        match self {
            Slot::One { version: held, .. } if *held >= *version => return Change::NONE,
            Slot::One { version: held, record: Some(old) } => ledger.died(old, held),
            Slot::One { record: None, .. } => ledger.forgot_key(key),
            Slot::Empty => {}
            Slot::Many(many) => return many.put(record, version, table, ledger),
        }
        ledger.born(record, version);
        *self = Slot::One { version: version.clone(), record: Some(record.clone()) };
        Change::DONE
    }

    pub(super) fn delete_key(&mut self, key: &Term, version: &Version, ledger: &mut Ledger) -> Change {
        let mut removed = 0;
        match self {
            Slot::One { version: held, .. } if *held >= *version => return Change::NONE,
            Slot::One { version: held, record } => {
                if let Some(old) = record {
                    ledger.died(old, held);
                    ledger.buried_key(key);
                    removed = 1;
                }
                *held = version.clone();
                *record = None;
            }
            Slot::Empty => {
                ledger.buried_key(key);
                *self = Slot::One { version: version.clone(), record: None };
            }
            Slot::Many(many) => {
                if many.floor.as_ref() >= Some(version) {
                    return Change::NONE;
                }
                removed = many.cut(version, ledger);
                if many.floor.replace(version.clone()).is_none() {
                    ledger.buried_key(key);
                }
            }
        }
        Change { changed: true, removed }
    }

    pub(super) fn delete_record(
        &mut self,
        record: &Record,
        version: &Version,
        table: Table,
        ledger: &mut Ledger,
    ) -> Change {
        match self {
            Slot::Many(many) => many.delete_record(record, version, table, ledger),
            // sets are asked by key
            Slot::Empty | Slot::One { .. } => Change::NONE,
        }
    }

    /// Takes away everything up to the version, tombstones included: the floor of the store says as much.
    pub(super) fn cut(&mut self, key: &Term, version: &Version, ledger: &mut Ledger) -> u64 {
        match self {
            Slot::Empty => 0,
            Slot::One { version: held, .. } if *held > *version => 0,
            Slot::One { version: held, record } => {
                let removed = match record {
                    Some(old) => {
                        ledger.died(old, held);
                        1
                    }
                    None => {
                        ledger.forgot_key(key);
                        0
                    }
                };
                *self = Slot::Empty;
                removed
            }
            Slot::Many(many) => {
                let removed = many.cut(version, ledger);
                if many.floor.as_ref() <= Some(version) && many.floor.take().is_some() {
                    ledger.forgot_key(key);
                }
                removed
            }
        }
    }

    /// Whether an entry changes nothing here, and the write that beats it if it would have said something else.
    pub(super) fn outcome(&self, entry: &Entry, table: Table) -> Option<Option<&Version>> {
        let given = entry.version();
        match self {
            Slot::Empty => None,
            Slot::One { version, .. } if version < given => None,
            Slot::One { version, record } => {
                let same = match entry {
                    Entry::Put { record: put, .. } => record.as_ref() == Some(put),
                    _ => record.is_none(),
                };
                Some((!same && version != given).then_some(version))
            }
            Slot::Many(many) => many.outcome(entry, table),
        }
    }

    /// Whether the tombstone of this grave is still here.
    pub(super) fn holds(&self, grave: &Grave) -> bool {
        let version = match (self, &grave.record) {
            (Slot::One { version, record: None }, None) => Some(version),
            (Slot::Many(many), None) => many.floor.as_ref(),
            (Slot::Many(many), Some(record)) => {
                many.records.get(record).and_then(|copies| copies.floor.as_ref())
            }
            _ => None,
        };
        version == Some(&grave.version)
    }

    /// Forgets the tombstone of a grave that it [holds](Self::holds).
    pub(super) fn forget(&mut self, grave: &Grave, ledger: &mut Ledger) {
        match (&mut *self, &grave.record) {
            (Slot::One { .. }, _) => {
                ledger.forgot_key(&grave.key);
                *self = Slot::Empty;
            }
            (Slot::Many(many), None) => {
                many.floor = None;
                ledger.forgot_key(&grave.key);
            }
            (Slot::Many(many), Some(record)) => {
                if let Some(copies) = many.records.get_mut(record) {
                    copies.forget_floor(record, ledger);
                    if copies.is_empty() {
                        many.records.remove(record);
                    }
                }
            }
            (Slot::Empty, _) => {}
        }
    }

    /// What is held, as statements in a fixed order, those of records below `from` left out.
    pub(super) fn entries<'a>(
        &'a self,
        key: &'a Term,
        from: Option<&'a Record>,
    ) -> impl Iterator<Item = (Option<&'a Record>, Option<&'a Version>, Entry)> {
        let (one, many) = match self {
            Slot::Empty => (None, None),
            Slot::One { version, record } => (Some((version, record.as_ref())), None),
            Slot::Many(many) => (None, Some(many)),
        };
        let one = one.map(|(version, record)| match record {
            Some(record) => Entry::Put { record: record.clone(), version: version.clone() },
            None => Entry::DeletedKey { key: key.clone(), version: version.clone() },
        });
        let floor = many.and_then(|many| many.floor.clone());
        let floor = floor.map(|version| Entry::DeletedKey { key: key.clone(), version });
        let start = from.map_or(std::ops::Bound::Unbounded, std::ops::Bound::Included);
        let range = many.map(|many| many.records.range::<Record, _>((start, std::ops::Bound::Unbounded)));
        let records = range.into_iter().flatten().flat_map(|(record, copies)| {
            let gone = copies.floor.clone();
            let gone = gone.map(|version| Entry::DeletedRecord { record: record.clone(), version });
            let live = copies.live.iter().map(move |version| {
                let entry = Entry::Put { record: record.clone(), version: version.clone() };
                (Some(record), Some(version), entry)
            });
            gone.map(|entry| (Some(record), None, entry)).into_iter().chain(live)
        });
        one.into_iter().chain(floor).map(|entry| (None, None, entry)).chain(records)
    }

    /// Counts what is held, from nothing.
    pub(super) fn count(&self, key: &Term, ledger: &mut Ledger) {
        self.live().for_each(|(record, version)| ledger.born(record, version));
        match self {
            Slot::Empty | Slot::One { record: Some(_), .. } => {}
            Slot::One { record: None, .. } => ledger.buried_key(key),
            Slot::Many(many) => {
                many.floor.iter().for_each(|_| ledger.buried_key(key));
                let gone = many.records.iter().filter(|(_, copies)| copies.floor.is_some());
                gone.for_each(|(record, _)| ledger.buried_record(record));
            }
        }
    }

    pub(super) fn check(&self, key: &Term, key_field: usize, table: Table) -> Result<(), String> {
        if let Some((record, _)) = self.live().find(|(record, _)| record.get(key_field) != Some(key)) {
            return Err(format!("record {record} is under key {key}"));
        }
        let Slot::Many(many) = self else { return Ok(()) };
        for (record, copies) in &many.records {
            if copies.live.iter().zip(copies.live.iter().skip(1)).any(|(a, b)| a >= b) {
                return Err(format!("the copies of {record} do not rise"));
            }
            if table == Table::Bag && copies.live.len() > 1 {
                return Err(format!("{record} is twice in a bag"));
            }
            let floor = copies.floor.as_ref().max(many.floor.as_ref());
            if floor.is_some() && copies.live.first().is_some_and(|version| Some(version) <= floor) {
                return Err(format!("a copy of {record} is below its floor"));
            }
        }
        Ok(())
    }
}
