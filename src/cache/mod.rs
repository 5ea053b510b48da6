//! A partitioned, replicated in-memory cache on the ring that routes broadcasts.
//!
//! # For users
//! * [`Cache`] is what [`Muster::cache`](crate::Muster::cache) opens: all operations. [`KeyValue`] is its typed face,
//!   [`Session`] reads its own writes, [`CallOptions`] change one call. The [guide](crate::guide::cache) says what each
//!   mode promises.
//! * [`Term`] and [`Record`] are what is kept; [`to_term`], [`from_term`] and [`record!`](crate::record) make them.
//! * [`RecordPattern`] finds records and binds their parts; [`pattern!`](crate::pattern) and [`var`] write it.
//! * [`CacheConfig`] has every option; [`CacheError`] says what went wrong and whether anything has changed.
//! * [`PartitionId`] is where a record belongs; [`Epoch`] and [`Version`] order the writes of a partition.
//! * [`Store`] holds the records of one partition: what a [`Write`] of the stream does, and how copies compare.

pub mod config;
#[cfg(feature = "consensus")]
pub mod consensus;
pub mod error;
pub mod node;
pub mod operation;
pub mod partition;
pub mod pattern;
pub mod replica;
pub mod store;
pub mod term;
pub mod version;

pub use crate::driver::cache::{CacheEvents, CacheStats};
pub use crate::muster::cache::{
    Cache, CacheNotReady, CallOptions, KeyValue, LocalScan, Partition, Session, SessionToken,
};
pub use config::{CacheConfig, CacheTerms, ReadMode, Table, WriteMode};
pub use error::{Applied, CacheError, Found};
pub use node::{PartitionStatus, Readiness};
pub use operation::{Operation, Options, Outcome, ReadOp, Reply, WriteOp};
pub use partition::PartitionId;
pub use pattern::{Pattern, PatternError, RecordPattern, var};
pub use replica::{CacheEvent, OwnerState};
pub use store::{Entry, Loser, Store, Write};
pub use term::{MAX_TERM_DEPTH, Record, Term, TermError, from_term, to_term};
pub use version::{Epoch, Lineage, MAX_LINEAGE, Version};
