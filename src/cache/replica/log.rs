//! The last writes of a copy, bounded: what an owner that was away for a moment is brought forward with.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::cache::store::{Entry, Write};
use crate::cache::version::Version;

/// What a write costs in memory and on the wire besides its records, about.
const OVERHEAD: usize = 128;

/// A write of the log.
#[derive(Clone, Debug)]
pub(super) struct Logged {
    pub(super) version: Version,
    pub(super) write: Arc<Write>,
    pub(super) bytes: usize,
}

/// The writes after `start`, without a gap.
#[derive(Clone, Debug, Default)]
pub(super) struct Log {
    start: Option<Version>,
    entries: VecDeque<Logged>,
    bytes: usize,
}

/// About how many bytes a write has on the wire.
pub(super) fn write_len(write: &Write) -> usize {
    OVERHEAD
        + match write {
            Write::Put(record) => record.encoded_len(),
            Write::DeleteKeys(keys) => keys.iter().map(|key| key.encoded_len()).sum(),
            Write::DeleteRecords(records) => records.iter().map(|record| record.encoded_len()).sum(),
            Write::Merge(entries) => entries.iter().map(entry_len).sum(),
            Write::DeleteAll | Write::Nothing => 0,
        }
}

/// About how many bytes an entry has on the wire.
pub(crate) fn entry_len(entry: &Entry) -> usize {
    OVERHEAD
        + match entry {
            Entry::Put { record, .. } | Entry::DeletedRecord { record, .. } => record.encoded_len(),
            Entry::DeletedKey { key, .. } => key.encoded_len(),
            Entry::DeletedAll { .. } => 0,
        }
}

impl Log {
    /// An empty log of a copy that ends with `start`.
    pub(super) fn from(start: Option<Version>) -> Self {
        Self { start, ..Self::default() }
    }

    /// The last write that it tells of.
    pub(super) fn end(&self) -> Option<&Version> {
        self.entries.back().map(|entry| &entry.version).or(self.start.as_ref())
    }

    pub(super) fn ends_with(&self, end: Option<&Version>) -> bool {
        self.end() == end
    }

    /// Appends the next write, and forgets the oldest beyond `max_bytes`.
    pub(super) fn push(&mut self, version: Version, write: Arc<Write>, max_bytes: usize) {
        let bytes = write_len(&write);
        self.bytes += bytes;
        self.entries.push_back(Logged { version, write, bytes });
        while self.bytes > max_bytes && self.entries.len() > 1 {
            let Some(oldest) = self.entries.pop_front() else { break };
            self.bytes -= oldest.bytes;
            self.start = Some(oldest.version);
        }
    }

    /// The writes after this one; `None` if some of them are forgotten or it is not in this history.
    pub(super) fn after<'a>(
        &'a self,
        version: Option<&Version>,
    ) -> Option<impl Iterator<Item = &'a Logged> + use<'a>> {
        let from = if version == self.start.as_ref() {
            0
        } else {
            let (version, first) = (version?, self.entries.front()?);
            let index = usize::try_from(version.seq.checked_sub(first.version.seq)?).ok()?;
            if self.entries.get(index)?.version != *version {
                return None;
            }
            index + 1
        };
        Some(self.entries.range(from..))
    }

    /// What must always hold.
    pub(super) fn check(&self, end: Option<&Version>) -> Result<(), String> {
        if self.end() != end {
            return Err(format!("the log ends with {:?} and the copy with {end:?}", self.end()));
        }
        let mut seq = self.start.as_ref().map_or(0, |start| start.seq);
        for entry in &self.entries {
            seq += 1;
            if entry.version.seq != seq {
                return Err(format!("the log has {} where {seq} should be", entry.version));
            }
        }
        let bytes: usize = self.entries.iter().map(|entry| entry.bytes).sum();
        if bytes == self.bytes {
            Ok(())
        } else {
            Err(format!("the log counts {} of {bytes} bytes", self.bytes))
        }
    }
}
