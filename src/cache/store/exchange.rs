//! What a store exchanges with other copies: snapshots in pieces, merges; and what it may forget.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::slot::Slot;
use super::{Entry, Store, Write};
use crate::cache::config::CacheConfig;
use crate::cache::error::CacheError;
use crate::cache::term::{Record, Term, TermError};
use crate::cache::version::{Lineage, Version};

/// What a version and the framing of an entry cost in a piece, at most.
const ENTRY_OVERHEAD: usize = 300;

/// Where a copy is: sent before the pieces of its snapshot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SnapshotHeader {
    /// The epochs that made the copy.
    pub lineage: Lineage,
    /// The last write in it. Pieces that are taken later may hold more; the stream from here on gives the rest.
    pub applied: Option<Version>,
    /// What it has forgotten deletes of.
    pub purged_through: Option<Version>,
    /// How many records it has, to show progress.
    pub records: u64,
    /// How many bytes they have.
    pub bytes: u64,
}

/// The place after a piece of a snapshot: all up to this key, record and version has been given.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cursor {
    key: Term,
    record: Option<Record>,
    version: Option<Version>,
}

/// A piece of a snapshot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Chunk {
    /// What is in it.
    pub entries: Vec<Entry>,
    /// Where the next piece begins; `None` after the last.
    pub next: Option<Cursor>,
}

/// How two copies that went their own ways come together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MergePlan {
    /// Each entry by its version. What lies after the last common write on both sides is in conflict.
    Merge {
        /// The last write that both hold, if any.
        common: Option<Version>,
    },
    /// The other copy was last in sync before deletes that are forgotten here: it is discarded.
    KeepOurs {
        /// The last write that both hold, if any.
        common: Option<Version>,
    },
    /// This copy was last in sync before deletes that are forgotten there: it is discarded, and their snapshot taken.
    KeepTheirs {
        /// The last write that both hold, if any.
        common: Option<Version>,
    },
}

/// A write that was accepted on one side of a split and lost in the merge.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Loser {
    /// Its key; `None` for a delete of everything.
    pub key: Option<Term>,
    /// Its record; `None` for a delete.
    pub record: Option<Record>,
    /// The write.
    pub version: Version,
    /// The write that won.
    pub by: Version,
}

/// What becomes of an entry.
#[derive(Debug, PartialEq, Eq)]
enum Fate {
    /// It says nothing new.
    Same,
    /// A later write has decided.
    Beaten(Version),
    /// It decides, and these writes lose.
    Wins(Vec<Lost>),
}

fn entry_len(entry: &Entry) -> usize {
    ENTRY_OVERHEAD
        + match entry {
            Entry::Put { record, .. } | Entry::DeletedRecord { record, .. } => record.encoded_len(),
            Entry::DeletedKey { key, .. } => key.encoded_len(),
            Entry::DeletedAll { .. } => 0,
        }
}

impl Store {
    // ---- snapshots

    /// Where this copy is.
    pub fn snapshot_header(&self) -> SnapshotHeader {
        SnapshotHeader {
            lineage: self.lineage.clone(),
            applied: self.applied.clone(),
            purged_through: self.purged_through.clone(),
            records: self.ledger.records,
            bytes: self.bytes(),
        }
    }

    /// The piece of the snapshot after `after` (`None`: the first), of about `max_bytes`; a larger entry is a piece
    /// alone. The store may change between pieces: what changes behind the cursor is in the stream after the header's
    /// `applied`, which the receiver applies as well.
    pub fn chunk(&self, after: Option<&Cursor>, max_bytes: usize) -> Chunk {
        let mut entries = Vec::new();
        let mut bytes = 0;
        let mut last: Option<Cursor> = None;
        if let (None, Some(version)) = (after, &self.floor) {
            entries.push(Entry::DeletedAll { version: version.clone() });
            bytes += ENTRY_OVERHEAD;
        }
        let start = after.map_or(std::ops::Bound::Unbounded, |cursor| std::ops::Bound::Included(&cursor.key));
        for (key, slot) in self.slots.range::<Term, _>((start, std::ops::Bound::Unbounded)) {
            let resumed = after.filter(|cursor| cursor.key == *key);
            let given = resumed.map(|cursor| (cursor.record.as_ref(), cursor.version.as_ref()));
            let from = resumed.and_then(|cursor| cursor.record.as_ref());
            for (record, version, entry) in slot.entries(key, from) {
                if given.is_some_and(|given| (record, version) <= given) {
                    continue;
                }
                let length = entry_len(&entry);
                if bytes + length > max_bytes && last.is_some() {
                    return Chunk { entries, next: last };
                }
                bytes += length;
                entries.push(entry);
                last = Some(Cursor { key: key.clone(), record: record.cloned(), version: version.cloned() });
            }
        }
        Chunk { entries, next: None }
    }

    /// A store that takes in a snapshot: the header, then [`Store::install`] for each piece, and [`Store::apply`] for
    /// the stream after the header's `applied`, in any mixture. It is whole when the last piece is in.
    ///
    /// # Errors
    /// [`CacheError::Term`] if the header contradicts itself.
    pub fn from_header(config: &CacheConfig, header: SnapshotHeader) -> Result<Self, CacheError> {
        let epoch = header.lineage.epoch();
        let reached = header.applied.as_ref().is_none_or(|applied| Some(&applied.epoch) <= epoch)
            && header.lineage.base() <= header.applied.as_ref();
        if !header.lineage.is_sound() || !reached {
            return Err(TermError::malformed("the header of a snapshot contradicts itself").into());
        }
        let mut store = Self::new(config);
        store.lineage = header.lineage;
        store.applied = header.applied;
        store.purged_through = header.purged_through;
        Ok(store)
    }

    /// Takes in a piece of the snapshot that this store was begun for, from its own source.
    ///
    /// # Errors
    /// [`CacheError::RecordTooShort`]; nothing of the piece is taken then.
    pub fn install(&mut self, entries: &[Entry], now: Duration) -> Result<(), CacheError> {
        self.check_entries(entries)?;
        for entry in entries {
            let arrived = self.applied.clone().unwrap_or_else(|| entry.version().clone());
            self.absorb(entry, &arrived, now);
        }
        Ok(())
    }

    // ---- merges

    /// How this copy and another one come together.
    pub fn merge_plan(&self, theirs: &SnapshotHeader) -> MergePlan {
        let (ours, there) = (self.applied.as_ref(), theirs.applied.as_ref());
        let common = self.lineage.common(ours, &theirs.lineage, there);
        let they_missed = self.purged_through.as_ref() > common.as_ref();
        let we_missed = theirs.purged_through.as_ref() > common.as_ref();
        match (they_missed, we_missed) {
            (false, false) => MergePlan::Merge { common },
            (true, false) => MergePlan::KeepOurs { common },
            (false, true) => MergePlan::KeepTheirs { common },
            // one has to go: the one whose writes would lose
            (true, true) if ours >= there => MergePlan::KeepOurs { common },
            (true, true) => MergePlan::KeepTheirs { common },
        }
    }

    /// What a piece of the other copy's snapshot changes here, as the write that does it on every owner, and who
    /// loses. Nothing has changed yet: the primary applies the write as its next one. With
    /// [`MergePlan::KeepOurs`] nothing is taken and all of theirs since the common write loses; with
    /// [`MergePlan::KeepTheirs`] nothing is taken and nothing reported: ask the other side.
    ///
    /// # Errors
    /// [`CacheError::RecordTooShort`].
    pub fn plan_merge(&self, plan: &MergePlan, entries: &[Entry]) -> Result<(Write, Vec<Loser>), CacheError> {
        self.check_entries(entries)?;
        let (take, common) = match plan {
            MergePlan::Merge { common } => (true, common.as_ref()),
            MergePlan::KeepOurs { common } => (false, common.as_ref()),
            MergePlan::KeepTheirs { .. } => return Ok((Write::Merge(Vec::new()), Vec::new())),
        };
        // What either side took over from a third one keeps its version, which may be lower than the common write, and
        // nobody can tell any more whether it came before the sides parted: it is reported as well.
        let news = |version: &Version| {
            Some(version) > common || !self.lineage.surely_contains(self.applied.as_ref(), version)
        };
        let (mut taken, mut losers) = (Vec::new(), Vec::new());
        for entry in entries {
            match self.fate(entry) {
                Fate::Same => {}
                Fate::Beaten(by) if news(entry.version()) => losers.push(self.loser(entry, by)),
                Fate::Beaten(_) => {}
                Fate::Wins(_) if !take => {
                    let by = self.applied.clone().filter(|_| news(entry.version()));
                    losers.extend(by.map(|by| self.loser(entry, by)));
                }
                Fate::Wins(lost) => {
                    losers.extend(self.outlived(entry).filter(|loser| news(&loser.version)));
                    let since = lost.into_iter().filter(|(_, _, version)| news(version));
                    let by = entry.version();
                    losers.extend(since.map(|(key, record, version)| Loser {
                        key,
                        record,
                        version,
                        by: by.clone(),
                    }));
                    taken.push(entry.clone());
                }
            }
        }
        Ok((Write::Merge(taken), losers))
    }

    fn loser(&self, entry: &Entry, by: Version) -> Loser {
        let (key, record) = match entry {
            Entry::Put { record, .. } => (record.get(self.key_field), Some(record)),
            Entry::DeletedKey { key, .. } => (Some(key), None),
            Entry::DeletedRecord { record, .. } => (record.get(self.key_field), None),
            Entry::DeletedAll { .. } => (None, None),
        };
        Loser { key: key.cloned(), record: record.cloned(), version: entry.version().clone(), by }
    }

    /// The deletes that hold, and are outlived by puts that have not seen them: the other side's delete by a put that is
    /// held here, or one of this side by the other's put. In a set only one of the two is kept, and this has nothing
    /// to say but of a delete of everything.
    fn outlived<'a>(&'a self, entry: &'a Entry) -> impl Iterator<Item = Loser> + 'a {
        let version = entry.version();
        let slot_of = |key: Option<&Term>| key.and_then(|key| self.slots.get(key));
        let by = match entry {
            Entry::Put { .. } => None,
            Entry::DeletedKey { key, .. } => slot_of(Some(key)).and_then(|slot| latest(slot, None)),
            Entry::DeletedRecord { record, .. } => {
                slot_of(record.get(self.key_field)).and_then(|slot| latest(slot, Some(record)))
            }
            Entry::DeletedAll { .. } => self.slots.values().filter_map(|slot| latest(slot, None)).max(),
        };
        let theirs = by.filter(|by| *by > version).map(|by| self.loser(entry, by.clone()));
        let put = match entry {
            Entry::Put { record, .. } => record.get(self.key_field).map(|key| (key, record)),
            _ => None,
        };
        let ours = put.into_iter().flat_map(move |(key, record)| {
            let slot = self.slots.get(key).into_iter().flat_map(move |slot| slot.deletes_of(record));
            let here = slot.map(move |gone| (Some(key), gone));
            let all = self.floor.iter().map(|gone| (None, gone)).chain(here);
            let before = all.filter(move |(_, gone)| *gone < version);
            before.map(move |(key, gone)| Loser {
                key: key.cloned(),
                record: None,
                version: gone.clone(),
                by: version.clone(),
            })
        });
        theirs.into_iter().chain(ours)
    }

    /// What becomes of an entry if it is taken in, and which records lose by it.
    fn fate(&self, entry: &Entry) -> Fate {
        let version = entry.version();
        if let Some(floor) = self.floor.as_ref().filter(|floor| *floor >= version) {
            return match entry {
                Entry::Put { .. } => Fate::Beaten(floor.clone()),
                _ => Fate::Same,
            };
        }
        match entry {
            Entry::DeletedAll { .. } => {
                Fate::Wins(self.slots.iter().flat_map(|(k, s)| dead(k, s, version)).collect())
            }
            Entry::DeletedRecord { record, .. } if !self.table.is_set() => {
                let slot = record.get(self.key_field).and_then(|key| self.slots.get_key_value(key));
                let probe = self.probe(entry);
                let copies = slot.into_iter().flat_map(|(key, slot)| dead(key, slot, version));
                probe.unwrap_or_else(|| {
                    Fate::Wins(copies.filter(|(_, r, _)| r.as_ref() == Some(record)).collect())
                })
            }
            Entry::DeletedRecord { record, .. } => match record.get(self.key_field) {
                Some(key) => self.fate(&Entry::DeletedKey { key: key.clone(), version: version.clone() }),
                None => Fate::Same,
            },
            Entry::DeletedKey { key, .. } => {
                let slot = self.slots.get_key_value(key);
                let lost = slot.into_iter().flat_map(|(key, slot)| dead(key, slot, version));
                self.probe(entry).unwrap_or_else(|| Fate::Wins(lost.collect()))
            }
            Entry::Put { record, .. } => self.probe(entry).unwrap_or_else(|| {
                let slot = record.get(self.key_field).and_then(|key| self.slots.get_key_value(key));
                Fate::Wins(slot.and_then(|(key, slot)| replaced(key, slot, record)).into_iter().collect())
            }),
        }
    }

    /// `None` if the entry would change what is held of its key.
    fn probe(&self, entry: &Entry) -> Option<Fate> {
        let key = match entry {
            Entry::Put { record, .. } | Entry::DeletedRecord { record, .. } => record.get(self.key_field)?,
            Entry::DeletedKey { key, .. } => key,
            Entry::DeletedAll { .. } => return None,
        };
        Some(
            self.slots
                .get(key)?
                .outcome(entry, self.table)?
                .map_or(Fate::Same, |by| Fate::Beaten(by.clone())),
        )
    }

    // ---- forgetting

    /// Forgets tombstones that are at least `ttl` old and that all owners have, who have all applied `all_have`; at
    /// most `max` steps, so that no call takes long. How many are forgotten.
    pub fn purge(&mut self, now: Duration, ttl: Duration, all_have: &Version, max: usize) -> usize {
        let mut forgotten = 0;
        for _ in 0..max {
            let Some(grave) = self.graves.front() else { break };
            let held = self.slots.get(&grave.key).is_some_and(|slot| slot.holds(grave));
            let due = now.saturating_sub(grave.since) >= ttl && grave.arrived <= *all_have;
            if held && !due {
                break;
            }
            let Some(grave) = self.graves.pop_front() else { break };
            if !held {
                continue;
            }
            if let Some(slot) = self.slots.get_mut(&grave.key) {
                slot.forget(&grave, &mut self.ledger);
                if slot.is_empty() {
                    self.slots.remove(&grave.key);
                }
            }
            let through = grave.version.max(grave.arrived);
            self.purged_through = self.purged_through.take().max(Some(through));
            forgotten += 1;
        }
        forgotten
    }
}

type Lost = (Option<Term>, Option<Record>, Version);

/// The records of a slot up to a version.
fn dead<'a>(key: &'a Term, slot: &'a Slot, version: &'a Version) -> impl Iterator<Item = Lost> + 'a {
    let up_to = slot.live().filter(move |(_, held)| *held <= version);
    up_to.map(move |(record, held)| (Some(key.clone()), Some(record.clone()), held.clone()))
}

/// The last put of a slot that lives, of one record or of any.
fn latest<'a>(slot: &'a Slot, of: Option<&Record>) -> Option<&'a Version> {
    slot.live().filter(|(record, _)| of.is_none_or(|of| of == *record)).map(|(_, version)| version).max()
}

/// What a put replaces in a set: nothing is lost if it is the same record.
fn replaced(key: &Term, slot: &Slot, by: &Record) -> Option<Lost> {
    match slot {
        Slot::One { record: Some(record), .. } if record == by => None,
        Slot::One { version, record } => Some((Some(key.clone()), record.clone(), version.clone())),
        Slot::Empty | Slot::Many(_) => None,
    }
}
