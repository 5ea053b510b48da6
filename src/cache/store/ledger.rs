//! What a store counts of its contents while they change.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64;

use crate::cache::pattern::PatternError;
use crate::cache::term::{Record, Term, write_tuple};
use crate::cache::version::Version;

/// What a record or a tombstone costs beside its encoding: its version, its places in the maps.
const OVERHEAD: u64 = 128;

/// How many records there are, and the sum of the hashes of each with its version. Equal digests mean equal records,
/// but for one chance in 2^64.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Digest {
    /// The number of records.
    pub records: u64,
    /// The sum, wrapping.
    pub hash: u64,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Ledger {
    pub(super) records: u64,
    pub(super) bytes: u64,
    pub(super) tombstones: u64,
    pub(super) tombstone_bytes: u64,
    hash: u64,
    arities: BTreeMap<usize, u64>,
}

/// The bytes and the hash of a record with its version.
fn weigh(record: &Record, version: &Version) -> (u64, u64) {
    let mut encoding = Vec::with_capacity(128);
    write_tuple(record.fields(), &mut encoding);
    let length = encoding.len() as u64;
    version.write(&mut encoding);
    (length + OVERHEAD, xxh3_64(&encoding))
}

impl Ledger {
    pub(super) fn born(&mut self, record: &Record, version: &Version) {
        let (bytes, hash) = weigh(record, version);
        self.records += 1;
        self.bytes += bytes;
        self.hash = self.hash.wrapping_add(hash);
        *self.arities.entry(record.len()).or_default() += 1;
    }

    pub(super) fn died(&mut self, record: &Record, version: &Version) {
        let (bytes, hash) = weigh(record, version);
        self.records = self.records.saturating_sub(1);
        self.bytes = self.bytes.saturating_sub(bytes);
        self.hash = self.hash.wrapping_sub(hash);
        if let Some(count) = self.arities.get_mut(&record.len()) {
            *count = count.saturating_sub(1);
            if *count == 0 {
                self.arities.remove(&record.len());
            }
        }
    }

    pub(super) fn buried_key(&mut self, key: &Term) {
        self.tombstones += 1;
        self.tombstone_bytes += key.encoded_len() as u64 + OVERHEAD;
    }

    pub(super) fn forgot_key(&mut self, key: &Term) {
        self.tombstones = self.tombstones.saturating_sub(1);
        self.tombstone_bytes = self.tombstone_bytes.saturating_sub(key.encoded_len() as u64 + OVERHEAD);
    }

    pub(super) fn buried_record(&mut self, record: &Record) {
        self.tombstones += 1;
        self.tombstone_bytes += record.encoded_len() as u64 + OVERHEAD;
    }

    pub(super) fn forgot_record(&mut self, record: &Record) {
        self.tombstones = self.tombstones.saturating_sub(1);
        self.tombstone_bytes = self.tombstone_bytes.saturating_sub(record.encoded_len() as u64 + OVERHEAD);
    }

    pub(super) fn digest(&self) -> Digest {
        Digest { records: self.records, hash: self.hash }
    }

    /// A pattern of an arity that no record has is a mistake, not an empty answer.
    pub(super) fn check_arity(&self, given: usize) -> Result<(), PatternError> {
        if self.arities.is_empty() || self.arities.contains_key(&given) {
            return Ok(());
        }
        Err(PatternError::Arity { given, held: self.arities.keys().copied().take(8).collect() })
    }
}
