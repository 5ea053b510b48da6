//! What a node holds of a partition: the copy as it is applied, and the writes after it that are only logged.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use crate::cache::config::CacheConfig;
use crate::cache::error::CacheError;
use crate::cache::store::{Entry, SnapshotHeader, Step, Store, Write};
use crate::cache::version::{Epoch, Version};

/// How many tombstones are looked at when a write is applied.
const PURGE: usize = 8;
/// How many by timer at a time, and how long until the next time: if there were more, at least, at most.
const PURGE_LATER: usize = 4096;
const LOOK: (Duration, Duration) = (Duration::from_millis(250), Duration::from_secs(30));

#[derive(Clone, Debug)]
pub(super) struct Pending {
    pub(super) version: Version,
    pub(super) write: Arc<Write>,
    pub(super) bytes: usize,
}

#[derive(Debug)]
pub(super) struct Data {
    /// What is committed: visible.
    pub(super) store: Store,
    /// What is logged after it: visible to nobody.
    tail: VecDeque<Pending>,
    bytes: usize,
    /// When to look which tombstones are old enough, as long as there are any.
    purge_at: Option<Duration>,
    /// Nothing of it is missing.
    pub(super) whole: bool,
}

/// About how many bytes a write has beside what is written; as the store counts a record or a delete.
pub(super) const OVERHEAD: usize = 128;

/// About how many bytes a write has.
pub(super) fn write_len(write: &Write) -> usize {
    OVERHEAD
        + match write {
            Write::Put(record) => record.encoded_len(),
            Write::DeleteKeys(keys) => keys.iter().map(|key| key.encoded_len()).sum(),
            Write::DeleteRecords(records) => records.iter().map(|record| record.encoded_len()).sum(),
            Write::DeleteAll | Write::Nothing | Write::Merge(_) => 0,
        }
}

impl Data {
    /// An empty copy of which nothing is missing.
    pub(super) fn born(config: &CacheConfig) -> Self {
        Self { store: Store::new(config), tail: VecDeque::new(), bytes: 0, purge_at: None, whole: true }
    }

    /// A copy that is being filled.
    pub(super) fn filling(config: &CacheConfig, header: SnapshotHeader) -> Result<Self, CacheError> {
        let store = Store::from_header(config, header)?;
        Ok(Self { store, tail: VecDeque::new(), bytes: 0, purge_at: None, whole: false })
    }

    pub(super) fn applied(&self) -> u64 {
        self.store.applied().map_or(0, |version| version.seq)
    }

    /// The last write that is logged.
    pub(super) fn end(&self) -> u64 {
        self.applied() + self.tail.len() as u64
    }

    pub(super) fn tail_bytes(&self) -> usize {
        self.bytes
    }

    pub(super) fn tail_len(&self) -> usize {
        self.tail.len()
    }

    pub(super) fn after(&self, seq: u64) -> impl Iterator<Item = &Pending> {
        let skip = usize::try_from(seq.saturating_sub(self.applied())).unwrap_or(usize::MAX);
        self.tail.iter().skip(skip)
    }

    /// The counter of the epoch of the last write that is logged here.
    pub(super) fn newest(&self) -> Option<u64> {
        let last = self.tail.back().map(|pending| &pending.version).or(self.store.applied());
        last.map(|version| version.epoch.counter)
    }

    /// The epochs of the tail, each with its last number.
    pub(super) fn runs(&self) -> Vec<(Epoch, u64)> {
        let mut runs: Vec<(Epoch, u64)> = Vec::new();
        for Pending { version, .. } in &self.tail {
            match runs.last_mut() {
                Some((epoch, last)) if *epoch == version.epoch => *last = version.seq,
                _ => runs.push((version.epoch.clone(), version.seq)),
            }
        }
        runs
    }

    /// The last write that a copy which is there has in common with this one, where this one can go on from; `None` if it
    /// needs a snapshot. Two logs that have one write in common have all before it in common.
    pub(super) fn common(&self, applied: Option<&Version>, tail: &[(Epoch, u64)]) -> Option<u64> {
        let first = applied.map_or(0, |version| version.seq);
        let theirs = |seq: u64| {
            if seq <= first {
                return applied.filter(|version| version.seq == seq).map(|version| &version.epoch);
            }
            tail.iter().find(|(_, last)| seq <= *last).map(|(epoch, _)| epoch)
        };
        let ours = self.tail.iter().rev().map(|pending| &pending.version).chain(self.store.applied());
        for version in ours {
            if theirs(version.seq) == Some(&version.epoch) {
                return Some(version.seq);
            }
        }
        // both from the very beginning
        (self.applied() == 0 && first == 0).then_some(0)
    }

    /// Logs a write: what was logged in its place, and after it, was never committed and goes.
    pub(super) fn log(&mut self, version: Version, write: Arc<Write>) {
        if version.seq <= self.applied() {
            return;
        }
        let place = usize::try_from(version.seq - self.applied() - 1).unwrap_or(usize::MAX);
        if self.tail.get(place).is_some_and(|pending| pending.version == version) {
            return;
        }
        while self.tail.len() > place {
            self.bytes -= self.tail.pop_back().map_or(0, |pending| pending.bytes);
        }
        let bytes = write_len(&write);
        self.bytes += bytes;
        self.tail.push_back(Pending { version, write, bytes });
    }

    /// Makes the next logged write visible; how many records went by it.
    pub(super) fn apply_next(&mut self, config: &CacheConfig, now: Duration) -> Option<(Version, u64)> {
        let Pending { version, write, bytes } = self.tail.pop_front()?;
        self.bytes -= bytes;
        if self.store.epoch() != Some(&version.epoch) {
            let base = self.store.applied().cloned();
            // cannot fail: epochs of a log rise, and all before is applied
            let _ = self.store.open_epoch(&version.epoch, base.as_ref());
        }
        let removed = match self.store.apply(&write, &version, now) {
            Ok(Step::Applied { removed }) => removed,
            Ok(Step::Duplicate) => 0,
            // what does not fit the table changes nothing, on every owner alike; its number is used up
            Err(_) => match self.store.apply(&Write::Nothing, &version, now) {
                Ok(_) | Err(_) => 0,
            },
        };
        // all owners have logged what is applied, so that nobody who lacks a delete can come to serve
        self.store.purge(now, config.tombstone_ttl, &version, PURGE);
        self.plan_purge(config, now);
        Some((version, removed))
    }

    pub(super) fn install(
        &mut self,
        entries: &[Entry],
        config: &CacheConfig,
        now: Duration,
    ) -> Result<(), CacheError> {
        self.store.install(entries, now)?;
        self.plan_purge(config, now);
        Ok(())
    }

    fn plan_purge(&mut self, config: &CacheConfig, now: Duration) {
        if self.purge_at.is_none() && self.store.tombstones() > 0 {
            let wait = (config.tombstone_ttl / 4).clamp(LOOK.0, LOOK.1);
            self.purge_at = Some(now.saturating_add(wait));
        }
    }

    /// When [`Self::purge`] wants to be called.
    pub(super) fn purge_at(&self) -> Option<Duration> {
        self.purge_at
    }

    /// Forgets by time what is forgotten with each write else: in a partition that is full of tombstones, or that nobody
    /// writes to, there is none.
    pub(super) fn purge(&mut self, config: &CacheConfig, now: Duration) {
        if self.purge_at.take_if(|at| *at <= now).is_none() {
            return;
        }
        let all_have = self.store.applied().filter(|_| self.whole).cloned();
        let forgotten =
            all_have.map_or(0, |all| self.store.purge(now, config.tombstone_ttl, &all, PURGE_LATER));
        if forgotten >= PURGE_LATER {
            self.purge_at = Some(now.saturating_add(LOOK.0));
        }
        self.plan_purge(config, now);
    }

    pub(super) fn check(&self) -> Result<(), String> {
        let follows =
            self.tail.iter().zip(self.applied() + 1..).all(|(pending, seq)| pending.version.seq == seq);
        let epochs = self.tail.iter().map(|pending| &pending.version.epoch);
        let rises = epochs.clone().zip(epochs.skip(1)).all(|(a, b)| a <= b);
        let bytes: usize = self.tail.iter().map(|pending| pending.bytes).sum();
        if !follows || !rises {
            return Err("the log has a gap".into());
        }
        if bytes != self.bytes {
            return Err("the bytes of the log are miscounted".into());
        }
        self.store.check_invariants()
    }
}
