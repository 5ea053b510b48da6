//! How one call differs from what the cache does by itself, and which partitions it is about.

use std::time::Duration;

use crate::cache::{CacheConfig, CacheError, PartitionId, ReadMode, Term, WriteMode};
use crate::config::{ConfigError, within};

/// What calls of a handle do otherwise than the cache's options say; see [`Cache::with`](super::Cache::with).
///
/// ```
/// # use muster_router::{Muster, transport::memory::Network};
/// use std::time::Duration;
/// use muster_router::cache::{CacheConfig, CallOptions, ReadMode, WriteMode};
/// use muster_router::record;
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let muster = Muster::builder("shop").transport(Network::new().node("a")).start().await?;
/// let cache = muster.cache(CacheConfig::new("users")).await?;
/// let fast = cache.with(CallOptions::new().write_mode(WriteMode::Async).read_mode(ReadMode::Local));
/// fast.put(record!["ada", 36]).await?;
/// let patient = cache.with(CallOptions::new().timeout(Duration::from_secs(60)));
/// assert_eq!(patient.get_key("ada").await?.len(), 1);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CallOptions {
    write_mode: Option<WriteMode>,
    read_mode: Option<ReadMode>,
    timeout: Option<Duration>,
}

impl CallOptions {
    /// As the cache's options say.
    pub fn new() -> Self {
        Self::default()
    }

    /// When a write is answered. `Strong` is a property of a whole cache: a cache of another mode does not give it to
    /// one call, and one of that mode gives no call less.
    #[must_use]
    pub fn write_mode(mut self, mode: WriteMode) -> Self {
        self.write_mode = Some(mode);
        self
    }

    /// Who answers a read.
    #[must_use]
    pub fn read_mode(mut self, mode: ReadMode) -> Self {
        self.read_mode = Some(mode);
        self
    }

    /// How long an operation may take, forwards and retries included, 1 ms to 10 min.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }

    /// With what `later` says otherwise.
    pub(super) fn and(self, later: Self) -> Self {
        Self {
            write_mode: later.write_mode.or(self.write_mode),
            read_mode: later.read_mode.or(self.read_mode),
            timeout: later.timeout.or(self.timeout),
        }
    }

    /// What holds for a call of a cache.
    pub(super) fn resolve(
        &self,
        config: &CacheConfig,
    ) -> Result<(WriteMode, ReadMode, Duration), CacheError> {
        let write_mode = self.write_mode.unwrap_or(config.write_mode);
        let strong = [write_mode, config.write_mode].map(|mode| mode == WriteMode::Strong);
        if strong[0] != strong[1] {
            return Err(CacheError::Config(ConfigError::OutOfRange {
                option: "write_mode",
                given: format!("{write_mode} for one call"),
                allowed: if strong[1] { "strong, as the cache is" } else { "async, sync" }.into(),
            }));
        }
        let read_mode = self.read_mode.unwrap_or(config.read_mode);
        if let Some(timeout) = self.timeout {
            within("timeout", timeout, Duration::from_millis(1)..=Duration::from_secs(600))?;
        }
        Ok((write_mode, read_mode, self.timeout.unwrap_or(config.operation_timeout)))
    }
}

/// Which partitions an operation by pattern is about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Partition {
    /// The one that holds the records whose partition field is this term, with whatever else lies in it.
    Of(Term),
    /// All of them. If one does not answer, the operation fails with [`CacheError::Partial`], which has what the
    /// others found.
    All,
}

impl Partition {
    /// The one that holds the records whose partition field is this term.
    ///
    /// ```
    /// use muster_router::cache::{Partition, Term};
    /// assert_eq!(Partition::of("London"), Partition::Of(Term::from("London")));
    /// ```
    pub fn of(term: impl Into<Term>) -> Self {
        Self::Of(term.into())
    }

    /// Those that can hold a record whose partition field is `exact`, if that is given.
    pub(super) fn places(
        &self,
        config: &CacheConfig,
        exact: Option<&Term>,
    ) -> Result<Vec<PartitionId>, CacheError> {
        let exact = exact.map(|term| config.partition_of(term));
        match self {
            Partition::Of(term) => {
                term.check()?;
                let place = config.partition_of(term);
                Ok(if exact.is_none_or(|exact| exact == place) { vec![place] } else { Vec::new() })
            }
            Partition::All => Ok(match exact {
                Some(exact) => vec![exact],
                None => PartitionId::all(config.partitions).collect(),
            }),
        }
    }
}
