//! The group's log and what is decided by it, in memory: the storage of the Raft library.
//!
//! Nothing is kept on disk, so a node that has restarted has neither its log nor its vote. It comes back as another
//! peer with another number in the group, and the old number is never used again: a vote is never given twice.

use std::collections::VecDeque;

use raft::eraftpb::{ConfState, Entry, HardState, Snapshot};
use raft::{Error, GetEntriesContext, RaftState, Result, Storage, StorageError};

use super::message::State as Encoded;
use super::state::State;

/// How many entries are kept for those that are a little behind; others get a snapshot.
const KEPT: u64 = 512;

#[derive(Debug, Default)]
pub(super) struct Log {
    hard: HardState,
    conf: ConfState,
    /// The entry before the first one that is kept.
    before: (u64, u64),
    entries: VecDeque<Entry>,
    /// The last entry that `state` has, and its term.
    pub(super) applied: (u64, u64),
    pub(super) state: State,
}

impl Log {
    /// The log of a group that begins with one voter.
    pub(super) fn born(id: u64, state: State) -> Self {
        let mut log = Self { before: (1, 1), applied: (1, 1), state, ..Self::default() };
        // index 1 stands for this beginning, so that whoever has nothing gets it as a snapshot
        log.hard.term = 1;
        log.hard.commit = 1;
        log.conf.set_voters(vec![id]);
        log
    }

    pub(super) fn conf(&self) -> &ConfState {
        &self.conf
    }

    pub(super) fn set_conf(&mut self, conf: ConfState) {
        self.conf = conf;
    }

    pub(super) fn set_hard(&mut self, hard: HardState) {
        self.hard = hard;
    }

    pub(super) fn set_commit(&mut self, commit: u64) {
        self.hard.commit = commit;
    }

    fn last(&self) -> u64 {
        self.before.0 + self.entries.len() as u64
    }

    pub(super) fn append(&mut self, entries: &[Entry]) {
        for entry in entries {
            // what does not follow replaces what was there
            let keep = entry.index.saturating_sub(self.before.0 + 1);
            self.entries.truncate(usize::try_from(keep).unwrap_or(usize::MAX));
            self.entries.push_back(entry.clone());
        }
    }

    /// Takes in a snapshot: everything before it is forgotten.
    pub(super) fn restore(&mut self, snapshot: &Snapshot, state: State) {
        let meta = snapshot.get_metadata();
        self.before = (meta.index, meta.term);
        self.applied = self.before;
        self.entries.clear();
        self.conf = meta.get_conf_state().clone();
        self.hard.commit = self.hard.commit.max(meta.index);
        self.hard.term = self.hard.term.max(meta.term);
        self.state = state;
    }

    pub(super) fn compact(&mut self) {
        while self.applied.0.saturating_sub(self.before.0) > KEPT {
            let Some(entry) = self.entries.pop_front() else { break };
            self.before = (entry.index, entry.term);
        }
    }

    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }
}

fn bound(index: u64) -> usize {
    usize::try_from(index).unwrap_or(usize::MAX)
}

impl Storage for Log {
    fn initial_state(&self) -> Result<RaftState> {
        Ok(RaftState::new(self.hard.clone(), self.conf.clone()))
    }

    fn entries(
        &self,
        low: u64,
        high: u64,
        max_size: impl Into<Option<u64>>,
        _: GetEntriesContext,
    ) -> Result<Vec<Entry>> {
        if low <= self.before.0 {
            return Err(Error::Store(StorageError::Compacted));
        }
        if high > self.last() + 1 {
            return Err(Error::Store(StorageError::Unavailable));
        }
        let (first, count) = (bound(low - self.before.0 - 1), bound(high.saturating_sub(low)));
        let mut entries: Vec<_> = self.entries.iter().skip(first).take(count).cloned().collect();
        raft::util::limit_size(&mut entries, max_size.into());
        Ok(entries)
    }

    fn term(&self, index: u64) -> Result<u64> {
        if index == self.before.0 {
            return Ok(self.before.1);
        }
        if index < self.before.0 {
            return Err(Error::Store(StorageError::Compacted));
        }
        let entry = self.entries.get(bound(index - self.before.0 - 1));
        entry.map(|entry| entry.term).ok_or(Error::Store(StorageError::Unavailable))
    }

    fn first_index(&self) -> Result<u64> {
        Ok(self.before.0 + 1)
    }

    fn last_index(&self) -> Result<u64> {
        Ok(self.last())
    }

    /// Made when it is asked for, as of now: a snapshot from before a node was added would not have the node in it,
    /// and the library has the node refuse such a one.
    fn snapshot(&self, request_index: u64, _: u64) -> Result<Snapshot> {
        if self.applied.0 < request_index || self.applied.0 == 0 {
            return Err(Error::Store(StorageError::SnapshotTemporarilyUnavailable));
        }
        let mut snapshot = Snapshot::default();
        let meta = snapshot.mut_metadata();
        (meta.index, meta.term) = self.applied;
        meta.set_conf_state(self.conf.clone());
        snapshot.set_data(Encoded::encode(&self.state).into());
        Ok(snapshot)
    }
}
