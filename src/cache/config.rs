//! Every option of a cache: what it means, what is allowed, how to choose.

use std::fmt::{self, Debug};
use std::ops::RangeInclusive;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::error::CacheError;
use super::partition::PartitionId;
use super::pattern::{PatternError, RecordPattern};
use super::term::{Record, Term};
use crate::config::{ConfigError, at_most, within};
use crate::types::Peer;

/// How many records a key may have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Table {
    /// One record a key within a partition: a put replaces it.
    #[default]
    Set,
    /// As `Set`, and everything is given in the order of keys.
    OrderedSet,
    /// Any number of different records a key; identical ones once.
    Bag,
    /// Any number of records a key; identical ones are kept, as often as they were put.
    DuplicateBag,
}

impl Table {
    /// Whether a put replaces the record of its key.
    pub fn is_set(self) -> bool {
        match self {
            Table::Set | Table::OrderedSet => true,
            Table::Bag | Table::DuplicateBag => false,
        }
    }
}

/// When a write is answered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WriteMode {
    /// When the primary has applied it; a crash of the primary may lose it.
    Async,
    /// When a majority of the owners, the primary included, has it.
    #[default]
    Sync,
    /// When all owners have it, on the ground of a consensus (feature `consensus`): linearizable per key, splits
    /// included. For a whole cache only, and it needs `expected_nodes`.
    Strong,
}

/// Who answers a read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ReadMode {
    /// This node if it is an active owner, else one of the active owners, always the same for a node.
    Local,
    /// The primary; an error if it cannot be reached.
    #[default]
    Primary,
    /// A majority of the owners; the highest version wins.
    Quorum,
}

macro_rules! names {
    ($type:ident, $option:literal: $($variant:ident = $name:literal),*) => {
        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(match self {
                    $($type::$variant => $name),*
                })
            }
        }

        impl FromStr for $type {
            type Err = ConfigError;
            fn from_str(name: &str) -> Result<Self, ConfigError> {
                match name {
                    $($name => Ok($type::$variant),)*
                    _ => Err(one_of($option, name, &[$($name),*].join(", "))),
                }
            }
        }
    };
}

names! { Table, "table": Set = "set", OrderedSet = "ordered_set", Bag = "bag", DuplicateBag = "duplicate_bag" }
names! { WriteMode, "write_mode": Async = "async", Sync = "sync", Strong = "strong" }
names! { ReadMode, "read_mode": Local = "local", Primary = "primary", Quorum = "quorum" }

/// The options of a cache.
///
/// Start from [`CacheConfig::new`], change what you need by the setter of the same name, and let the start of the
/// cache check it ([`CacheConfig::validate`]). From a file, durations are written as in `"30s"`, missing fields take
/// their defaults and unknown ones are refused. Options marked **the same on every node** are compared when peers
/// meet; nodes that differ do not exchange data, and the error names both values.
///
/// ```
/// use muster_router::cache::{CacheConfig, Table};
/// let config = CacheConfig::new("sessions").table(Table::OrderedSet).replicas(3).min_copies(2);
/// config.validate()?;
/// # Ok::<(), muster_router::ConfigError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[non_exhaustive]
pub struct CacheConfig {
    /// The name of the cache on its scope, 1 to 255 bytes without a zero byte (default "cache"). Nodes that open a
    /// cache of one name share its data.
    pub name: String,
    /// Which field of a record is its key, from 0 to 1023 (default 0). **The same on every node.**
    pub key_field: usize,
    /// Which field decides the partition, from 0 to 1023 (default 0). **The same on every node.** Choose another
    /// than the key to keep records that are read together on one node; then a key is unique within its partition
    /// only.
    pub partition_field: usize,
    /// How many fields every record has, above `key_field` and `partition_field`, to 1024; or none: records may
    /// differ (default none). **The same on every node.**
    pub arity: Option<usize>,
    /// How many records a key may have (default `set`). **The same on every node.**
    pub table: Table,
    /// Into how many parts the data is divided, 1 to 65,536 (default 256). **The same on every node**, and never
    /// changed while data is held. Choose at least ten for each node of the largest cluster: a part is what moves
    /// when a node comes, and what one lock guards.
    pub partitions: u32,
    /// How many nodes keep each partition, 1 to 16 (default 2). **The same on every node.** 2 survive one crash,
    /// and 3 give quorums that survive one.
    pub replicas: usize,
    /// When a write is answered (default `sync`). One call may choose otherwise, but for `strong`, which is **the same
    /// on every node** and in every call.
    pub write_mode: WriteMode,
    /// Who answers a read (default `primary`). One call may choose otherwise.
    pub read_mode: ReadMode,
    /// How many owners must be reachable for a write to begin, 1 to `replicas` (default 1).
    pub min_copies: usize,
    /// How many nodes the cluster is meant to have, 1 to 1024, at least `replicas`; or none (default none). With
    /// it, a side of a split with no more than half of them refuses `sync` writes, and no partition starts empty
    /// unless most of them hold no copy. Set it wherever the number is fixed. `strong` needs it, at least `2 * replicas -
    /// 1`: nothing is served before so many nodes have met, and there must never be twice as many. **The same on every
    /// node.**
    pub expected_nodes: Option<usize>,
    /// How long a delete is remembered at least, 1 s to 7 days (default 10 min); a delete is also kept until all
    /// owners have it. A copy that was away longer is discarded, not merged. Choose it longer than the longest
    /// split that should be merged.
    #[serde(with = "humantime_serde")]
    pub tombstone_ttl: Duration,
    /// How many bytes a second a node sends to fill the copies of others when owners change, all partitions together,
    /// 64 KiB to 1 TiB (default 64 MiB). Choose a quarter of the network: service goes on meanwhile.
    pub transfer_rate: u64,
    /// How long an operation may take, forwards and retries included, 1 ms to 10 min (default 5 s).
    #[serde(with = "humantime_serde")]
    pub operation_timeout: Duration,
    /// The largest record in bytes of its encoding, 16 bytes to 64 MiB (default 1 MiB). **The same on every node.**
    pub max_record_len: usize,
    /// How many records one batch may have, 1 to 1,048,576 (default 65,536).
    pub max_batch_records: usize,
    /// How many bytes of records and tombstones one partition may hold, from `max_record_len` to 1 TiB (default 1
    /// GiB). A put beyond it is refused; in write mode `Strong` also (`Busy`) as long as writes under way may fill it.
    pub max_partition_bytes: u64,
    /// How many bytes of writes a primary keeps of a partition for replicas that are behind, from `max_record_len`
    /// to 1 GiB (default 4 MiB); beyond it they get a snapshot. Choose the bytes written in a short break of a link.
    pub max_log_bytes: usize,
    /// How many bytes one piece of a snapshot has, 1 KiB to 16 MiB (default 256 KiB); a larger record is a piece
    /// alone.
    pub chunk_bytes: usize,
    /// How many operations of this node may wait at once, 1 to 1,048,576 (default 65,536); more are refused
    /// (`Busy`).
    pub max_pending: usize,
}

impl Default for CacheConfig {
    fn default() -> Self {
        Self {
            name: "cache".into(),
            key_field: 0,
            partition_field: 0,
            arity: None,
            table: Table::Set,
            partitions: 256,
            replicas: 2,
            write_mode: WriteMode::Sync,
            read_mode: ReadMode::Primary,
            min_copies: 1,
            expected_nodes: None,
            tombstone_ttl: Duration::from_secs(600),
            transfer_rate: 64 << 20,
            operation_timeout: Duration::from_secs(5),
            max_record_len: 1 << 20,
            max_batch_records: 1 << 16,
            max_partition_bytes: 1 << 30,
            max_log_bytes: 4 << 20,
            chunk_bytes: 256 << 10,
            max_pending: 1 << 16,
        }
    }
}

const NAME_LEN: RangeInclusive<usize> = 1..=255;
const FIELD: RangeInclusive<usize> = 0..=1023;
const ARITY: RangeInclusive<usize> = 1..=1024;
const PARTITIONS: RangeInclusive<u32> = 1..=65_536;
const REPLICAS: RangeInclusive<usize> = 1..=16;
const NODES: RangeInclusive<usize> = 1..=1024;
const RECORD_LEN: RangeInclusive<usize> = 16..=64 << 20;
const LOG_BYTES: RangeInclusive<usize> = 16..=1 << 30;
const MANY: RangeInclusive<usize> = 1..=1 << 20;
const TEBIBYTE: u64 = 1 << 40;

macro_rules! setters {
    ($($field:ident: $type:ty),* $(,)?) => {
        impl CacheConfig {
            $(
                #[doc = concat!("Sets [`CacheConfig::", stringify!($field), "`](CacheConfig#structfield.", stringify!($field), ").")]
                #[must_use]
                pub fn $field(mut self, $field: $type) -> Self {
                    self.$field = $field;
                    self
                }
            )*
        }
    };
}

setters! {
    key_field: usize,
    partition_field: usize,
    arity: Option<usize>,
    table: Table,
    partitions: u32,
    replicas: usize,
    write_mode: WriteMode,
    read_mode: ReadMode,
    min_copies: usize,
    expected_nodes: Option<usize>,
    tombstone_ttl: Duration,
    transfer_rate: u64,
    operation_timeout: Duration,
    max_record_len: usize,
    max_batch_records: usize,
    max_partition_bytes: u64,
    max_log_bytes: usize,
    chunk_bytes: usize,
    max_pending: usize,
}

fn one_of(option: &'static str, given: &str, allowed: &str) -> ConfigError {
    ConfigError::OutOfRange { option, given: format!("{given:?}"), allowed: format!("one of {allowed}") }
}

impl CacheConfig {
    /// The defaults, under this name.
    pub fn new(name: impl Into<String>) -> Self {
        Self { name: name.into(), ..Self::default() }
    }

    /// Checks every option, then what options ask of one another. Nothing is started or changed.
    ///
    /// # Errors
    /// [`ConfigError`] for the first option that is not allowed: its name, its value, and what is allowed.
    pub fn validate(&self) -> Result<(), ConfigError> {
        self.validate_name()?;
        within("key_field", self.key_field, FIELD)?;
        within("partition_field", self.partition_field, FIELD)?;
        self.arity.map_or(Ok(()), |arity| within("arity", arity, ARITY))?;
        within("partitions", self.partitions, PARTITIONS)?;
        within("replicas", self.replicas, REPLICAS)?;
        if self.write_mode == WriteMode::Strong && !cfg!(feature = "consensus") {
            return Err(one_of("write_mode", "strong", "async, sync; strong needs the feature `consensus`"));
        }
        within("min_copies", self.min_copies, REPLICAS)?;
        self.expected_nodes.map_or(Ok(()), |nodes| within("expected_nodes", nodes, NODES))?;
        within(
            "tombstone_ttl",
            self.tombstone_ttl,
            Duration::from_secs(1)..=Duration::from_secs(7 * 86_400),
        )?;
        within("transfer_rate", self.transfer_rate, 64 << 10..=TEBIBYTE)?;
        within(
            "operation_timeout",
            self.operation_timeout,
            Duration::from_millis(1)..=Duration::from_secs(600),
        )?;
        within("max_record_len", self.max_record_len, RECORD_LEN)?;
        within("max_batch_records", self.max_batch_records, MANY)?;
        within("max_partition_bytes", self.max_partition_bytes, 16..=TEBIBYTE)?;
        within("max_log_bytes", self.max_log_bytes, LOG_BYTES)?;
        within("chunk_bytes", self.chunk_bytes, 1 << 10..=16 << 20)?;
        within("max_pending", self.max_pending, MANY)?;
        self.validate_pairs()
    }

    fn validate_name(&self) -> Result<(), ConfigError> {
        let (length, option) = (self.name.len(), "name");
        if !NAME_LEN.contains(&length) {
            let (given, allowed) = (format!("{length} bytes long"), "1 to 255 bytes".into());
            return Err(ConfigError::OutOfRange { option, given, allowed });
        }
        if self.name.contains('\0') {
            let (given, allowed) = (format!("{:?}", self.name), "text without a zero byte".into());
            return Err(ConfigError::OutOfRange { option, given, allowed });
        }
        Ok(())
    }

    fn validate_pairs(&self) -> Result<(), ConfigError> {
        if let Some(arity) = self.arity {
            // the last field has the number arity - 1
            let last = ("arity - 1", arity.saturating_sub(1));
            at_most(("key_field", self.key_field), last, "every record has a key")?;
            at_most(("partition_field", self.partition_field), last, "every record has a partition")?;
        }
        let replicas = ("replicas", self.replicas);
        at_most(("min_copies", self.min_copies), replicas, "no write could ever begin")?;
        if self.write_mode == WriteMode::Strong {
            // the consensus has to bear as many crashes as the data, and without a disk nobody can tell a cluster that
            // begins from one side of a split unless it knows how many nodes there should be
            let voters = self.replicas.saturating_mul(2).saturating_sub(1);
            let Some(nodes) = self.expected_nodes else {
                let (given, allowed) = ("none".into(), format!("{voters} to 1024 with write_mode strong"));
                return Err(ConfigError::OutOfRange { option: "expected_nodes", given, allowed });
            };
            let voters = ("2 * replicas - 1", voters);
            at_most(
                voters,
                ("expected_nodes", nodes),
                "strong writes need a majority after replicas - 1 crashes",
            )?;
        }
        if let Some(nodes) = self.expected_nodes {
            at_most(replicas, ("expected_nodes", nodes), "each copy needs a node of its own")?;
        }
        let fits = "a record of the allowed size would never fit";
        at_most(("max_record_len", self.max_record_len), ("max_log_bytes", self.max_log_bytes), fits)?;
        let record = ("max_record_len", self.max_record_len as u64);
        at_most(record, ("max_partition_bytes", self.max_partition_bytes), fits)
    }

    /// How many owners are a majority of all replicas.
    pub fn majority(&self) -> usize {
        self.replicas / 2 + 1
    }

    /// Checks a record before it is put: no NaN, not too deep, long enough, of the right arity, not too large.
    ///
    /// # Errors
    /// [`CacheError::Term`], [`CacheError::RecordTooShort`], [`CacheError::Arity`], [`CacheError::TooLarge`].
    pub fn check_record(&self, record: &Record) -> Result<(), CacheError> {
        self.key_and_partition(record)?;
        if let Some(allowed) = self.arity.filter(|arity| *arity != record.len()) {
            return Err(CacheError::Arity { given: record.len(), allowed });
        }
        record.check()?;
        let given = record.encoded_len() as u64;
        let max = self.max_record_len as u64;
        if given > max {
            let (what, option) = ("the record in bytes".into(), "max_record_len".into());
            return Err(CacheError::TooLarge { what, given, max, option });
        }
        Ok(())
    }

    /// The key of a record and its partition. Only these two fields are looked at.
    ///
    /// # Errors
    /// [`CacheError::RecordTooShort`].
    pub fn key_and_partition<'a>(&self, record: &'a Record) -> Result<(&'a Term, PartitionId), CacheError> {
        let partition = PartitionId::of_record(record, self.partition_field, self.partitions)?;
        match record.get(self.key_field) {
            Some(key) => Ok((key, partition)),
            None => {
                let (given, field, option) = (record.len(), self.key_field, "key_field".into());
                Err(CacheError::RecordTooShort { given, field, option })
            }
        }
    }

    /// The partition of a term of the partition field.
    pub fn partition_of(&self, term: &Term) -> PartitionId {
        PartitionId::of(term, self.partitions)
    }

    /// The partition of a key, where the key is the partition field.
    ///
    /// # Errors
    /// [`CacheError::KeyIsNotPartition`] where it is not.
    pub fn partition_of_key(&self, key: &Term) -> Result<PartitionId, CacheError> {
        let (key_field, partition_field) = (self.key_field, self.partition_field);
        if key_field == partition_field {
            Ok(self.partition_of(key))
        } else {
            Err(CacheError::KeyIsNotPartition { key_field, partition_field })
        }
    }

    /// Checks a pattern before it is used: it reaches the key and the partition field, and has the table's arity.
    ///
    /// # Errors
    /// [`PatternError::TooShort`], [`PatternError::Arity`].
    pub fn check_pattern(&self, pattern: &RecordPattern) -> Result<(), PatternError> {
        pattern.reaches(self.key_field, "key_field")?;
        pattern.reaches(self.partition_field, "partition_field")?;
        match self.arity {
            Some(arity) if arity != pattern.arity() => {
                Err(PatternError::Arity { given: pattern.arity(), held: vec![arity] })
            }
            _ => Ok(()),
        }
    }

    /// The options that have to be equal on all nodes; peers send them to each other when they meet.
    pub fn terms(&self) -> CacheTerms {
        let text = |value: &dyn fmt::Display| value.to_string();
        let number = |value: Option<usize>| value.map_or("none".into(), |value| value.to_string());
        CacheTerms(vec![
            ("key_field".into(), text(&self.key_field)),
            ("partition_field".into(), text(&self.partition_field)),
            ("arity".into(), number(self.arity)),
            ("table".into(), text(&self.table)),
            ("partitions".into(), text(&self.partitions)),
            ("replicas".into(), text(&self.replicas)),
            ("expected_nodes".into(), number(self.expected_nodes)),
            ("strong".into(), text(&(self.write_mode == WriteMode::Strong))),
            ("max_record_len".into(), text(&self.max_record_len)),
        ])
    }

    /// Compares with the options of a peer.
    ///
    /// # Errors
    /// [`CacheError::ConfigMismatch`] for the first option that differs, with both values.
    pub fn agrees_with(&self, theirs: &CacheTerms, peer: &Peer) -> Result<(), CacheError> {
        let ours = self.terms();
        let missing = (String::new(), "unknown".to_string());
        for index in 0..ours.0.len().max(theirs.0.len()) {
            let here = ours.0.get(index).unwrap_or(&missing);
            let there = theirs.0.get(index).unwrap_or(&missing);
            if here != there {
                let option = if here.0.is_empty() { &there.0 } else { &here.0 };
                return Err(CacheError::ConfigMismatch {
                    name: self.name.clone(),
                    option: option.clone(),
                    here: here.1.clone(),
                    there: if there.0 == here.0 || here.0.is_empty() { there.1.clone() } else { missing.1 },
                    peer: peer.clone(),
                });
            }
        }
        Ok(())
    }
}

/// The options of a cache that have to be equal on all nodes, by name, as text.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct CacheTerms(Vec<(String, String)>);

#[cfg(test)]
#[path = "config_tests.rs"]
mod tests;
