//! The public face of the cache.

mod calls;
mod deletes;
mod keyvalue;
mod options;
mod puts;
mod reads;
mod session;
mod token;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, timeout_at};

use super::{FOREVER, Muster};
use crate::cache::node::{PartitionStatus, Readiness};
use crate::cache::store::Loser;
use crate::cache::{CacheConfig, CacheError, PartitionId, Record, Term};
use crate::driver::Driver;
use crate::driver::cache::{CacheEvents, CacheStats, Hosted, report};
use crate::error::DrainTimeout;
use crate::types::Peer;

pub use keyvalue::KeyValue;
pub use options::{CallOptions, Partition};
pub use reads::LocalScan;
use session::Remembered;
pub use session::Session;
pub use token::SessionToken;

/// A partitioned, replicated in-memory cache on a scope, as this node sees it. Cheap to clone; [`Muster::cache`]
/// opens it, and every node that opens a cache of one name shares its data.
///
/// Operations can be called on any node: they go to the primary of their partition, or are answered here when this
/// node may. What each mode promises stands in the first table of the [guide](crate::guide::cache). "Not found" is
/// never an error, and no error means "not found". An operation ends after `operation_timeout` at the latest.
///
/// All operations are cancel-safe in this sense: dropped before it returns, a read has done nothing, and a write may
/// be applied or not.
///
/// The cache runs until its scope stops or [`Cache::close`] is called, whether or not a handle is kept.
///
/// ```
/// # use muster_router::{Muster, transport::memory::Network};
/// use muster_router::{cache::{CacheConfig, Partition, var}, pattern, record};
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let muster = Muster::builder("shop").transport(Network::new().node("a")).start().await?;
/// let users = muster.cache(CacheConfig::new("users")).await?;
/// users.put(record!["ada", "London", 36]).await?;
/// assert_eq!(users.get_key("ada").await?, [record!["ada", "London", 36]]);
/// let ages = users.get_by_match(Partition::All, pattern![_, "London", var(1)]).await?;
/// assert_eq!(ages, [[36.into()]]);
/// assert_eq!(users.delete_key("ada").await?, 1);
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Cache {
    driver: Arc<Driver>,
    hosted: Arc<Hosted>,
    options: CallOptions,
    session: Option<Arc<Remembered>>,
}

impl fmt::Debug for Cache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cache")
            .field("name", &self.name())
            .field("node", self.driver.node.me())
            .field("options", &self.options)
            .field("session", &self.session.is_some())
            .finish_non_exhaustive()
    }
}

/// A cache did not become ready in time.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not ready after {waited:?}: {} of {} partitions have all their owners{}{}", .readiness.complete, .readiness.partitions, who(.readiness), if *.closed { ", and the cache is closed" } else { "" })]
#[non_exhaustive]
pub struct CacheNotReady {
    /// How far it was.
    pub readiness: Readiness,
    /// Whether the cache is closed: it will never be ready.
    pub closed: bool,
    /// How long was waited.
    pub waited: Duration,
}

/// The nodes for which it waits, or from which it differs.
fn who(readiness: &Readiness) -> String {
    let named = |what: &str, peers: &[Peer]| match peers {
        [] => String::new(),
        [first] => format!(", {what} {first}"),
        [first, rest @ ..] => format!(", {what} {first} and {} more", rest.len()),
    };
    named("nothing was heard from", &readiness.unknown)
        + &named("the options differ from those of", &readiness.differs)
}

impl CacheNotReady {
    /// Whether the same call may succeed later.
    pub fn is_retryable(&self) -> bool {
        !self.closed
    }
}

impl Muster {
    /// Opens the cache of this name on this node, which takes its part of the data from then on. Nodes that open it
    /// with other values of options that have to be equal take no part in each other's data; an event names the option.
    /// Opened again with the same options it is the same cache.
    ///
    /// Returns at once: until the partitions have moved, operations are forwarded to those who have the data. Wait for
    /// [`Cache::until_ready`] before you take another node away.
    ///
    /// # Errors
    /// [`CacheError::Config`] for an option that is not allowed, or that the scope's transport cannot carry; [`CacheError::AlreadyOpen`] with other options;
    /// [`CacheError::Closed`] if it was closed in this life of the scope; [`CacheError::Busy`] beyond 1024 caches;
    /// [`CacheError::Draining`], [`CacheError::Stopped`].
    ///
    /// ```
    /// # use muster_router::{Muster, transport::memory::Network};
    /// use muster_router::cache::{CacheConfig, CacheError};
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let muster = Muster::builder("shop").transport(Network::new().node("a")).start().await?;
    /// let config = CacheConfig::new("baskets").replicas(3);
    /// let baskets = muster.cache(config.clone()).await?;
    /// assert!(muster.cache(config.clone()).await.is_ok(), "the same one");
    /// let other = muster.cache(config.replicas(2)).await;
    /// assert!(matches!(other, Err(CacheError::AlreadyOpen { .. })));
    /// # drop(baskets);
    /// # Ok(())
    /// # }
    /// ```
    pub async fn cache(&self, config: CacheConfig) -> Result<Cache, CacheError> {
        config.validate()?;
        let driver = self.driver().clone();
        let hosted = driver.open_cache(config)?;
        Ok(Cache { driver, hosted, options: CallOptions::default(), session: None })
    }
}

// Its state.
impl Cache {
    /// Its name.
    pub fn name(&self) -> &str {
        &self.hosted.config.name
    }

    /// The options that it was opened with.
    pub fn config(&self) -> &CacheConfig {
        &self.hosted.config
    }

    /// This node, in this life.
    pub fn peer(&self) -> &Peer {
        self.driver.node.me()
    }

    /// The partition of a term of the partition field.
    pub fn partition_of(&self, term: impl Into<Term>) -> PartitionId {
        self.hosted.config.partition_of(&term.into())
    }

    /// Whether every partition has its full number of active owners, as this node knows it: the answer to a readiness
    /// probe. Visits every partition; ask every second, not for every request.
    ///
    /// ```
    /// # use muster_router::{Muster, cache::CacheConfig, transport::memory::Network};
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let muster = Muster::builder("shop").transport(Network::new().node("a")).start().await?;
    /// let cache = muster.cache(CacheConfig::new("users")).await?;
    /// cache.until_ready(std::time::Duration::from_secs(10)).await?;
    /// assert!(cache.readiness().is_ready());
    /// # Ok(())
    /// # }
    /// ```
    pub fn readiness(&self) -> Readiness {
        let shards = self.hosted.look_at_all(|node| node.readiness());
        shards.into_iter().fold(Readiness::default(), Readiness::and)
    }

    /// Waits until every partition has its full number of active owners. Cancel-safe.
    ///
    /// # Errors
    /// [`CacheNotReady`] if that takes longer than `timeout`, or the cache is closed.
    pub async fn until_ready(&self, timeout: Duration) -> Result<(), CacheNotReady> {
        self.until(timeout, Readiness::is_ready).await
    }

    /// Waits for a readiness of your choice. Cancel-safe.
    ///
    /// # Errors
    /// [`CacheNotReady`] if that takes longer than `timeout`, or the cache is closed.
    pub async fn until(
        &self,
        timeout: Duration,
        mut wanted: impl FnMut(&Readiness) -> bool,
    ) -> Result<(), CacheNotReady> {
        let deadline = Instant::now() + timeout.min(FOREVER);
        loop {
            let changed = self.hosted.events.changed.notified();
            tokio::pin!(changed);
            // from here on no change is missed
            changed.as_mut().enable();
            let readiness = self.readiness();
            let closed = self.is_closed();
            if !closed && wanted(&readiness) {
                return Ok(());
            }
            if closed || timeout_at(deadline, changed).await.is_err() {
                return Err(CacheNotReady { readiness, closed, waited: timeout });
            }
        }
    }

    /// One partition, as this node sees it. `None` if the cache has no such partition.
    pub fn status(&self, partition: PartitionId) -> Option<PartitionStatus> {
        (partition.get() < self.config().partitions)
            .then(|| self.hosted.look(partition, |node| node.status(partition)))
    }

    /// What it has done on this node.
    pub fn stats(&self) -> CacheStats {
        self.hosted.stats.read(self.hosted.pending())
    }

    /// Whether it is closed here, or its scope stopped.
    pub fn is_closed(&self) -> bool {
        self.hosted.is_closed() || self.driver.is_stopped()
    }

    /// What happens to it on this node, from now on: conflicts after a split, partitions that change their primary or
    /// their state here, peers with other options.
    pub fn events(&self) -> CacheEvents {
        self.hosted.events.subscribe()
    }

    /// Calls `callback` for each write that lost when two sides of a split came together, on the node that serves its
    /// partition. It runs in a task of the scope and must not block; a panic in it is counted
    /// ([`CacheStats::panics`]) and harms nothing. 65,536 conflicts wait for it at most; beyond, the newest are
    /// dropped and counted ([`CacheStats::events_missed`]).
    ///
    /// ```
    /// # use muster_router::{Muster, cache::CacheConfig, transport::memory::Network};
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let muster = Muster::builder("shop").transport(Network::new().node("a")).start().await?;
    /// let cache = muster.cache(CacheConfig::new("users")).await?;
    /// cache.on_conflict(|partition, loser| eprintln!("lost in {partition}: {:?}", loser.record));
    /// # Ok(())
    /// # }
    /// ```
    pub fn on_conflict(&self, callback: impl Fn(PartitionId, &Loser) + Send + Sync + 'static) {
        let conflicts = self.hosted.events.conflicts();
        self.driver.spawn_reply(report(conflicts, self.hosted.clone(), callback));
    }

    /// An operator's decision: what only dead nodes may have had of this partition is given up, and it goes on with
    /// what is there, if need be with nothing. For a partition that an event or [`Cache::status`] shows as stalled,
    /// when its other owners will not come back.
    ///
    /// # Errors
    /// [`CacheError::TooLarge`] if the cache has no such partition; [`CacheError::NoQuorum`] in write mode `Strong` if the
    /// group of this node cannot decide it now, so that nothing will come of it; [`CacheError::Stopped`].
    pub fn accept_loss(&self, partition: PartitionId) -> Result<(), CacheError> {
        self.check_open()?;
        self.check_partition(partition)?;
        self.hosted.accept_loss(&self.driver, partition)
    }

    /// Hands the partitions of this node over to others, and waits until they have them. This node accepts operations
    /// all the while, and forwards them. It cannot be taken back; follow it by [`Cache::close`]. [`Muster::drain`]
    /// does it for all caches. Cancel-safe: it goes on whether or not it is waited for.
    ///
    /// # Errors
    /// [`DrainTimeout`] if that takes longer than `timeout`, or at once if no other node stays that has it open, or if the
    /// scope is stopped or the cache closed before it is over ([`DrainTimeout::stopped`]). So `Ok` always means that
    /// others have everything.
    pub async fn drain(&self, timeout: Duration) -> Result<(), DrainTimeout> {
        self.hosted.drain(&self.driver);
        let deadline = Instant::now() + timeout.min(FOREVER);
        loop {
            let pulse = self.driver.pulse.notified();
            tokio::pin!(pulse);
            pulse.as_mut().enable();
            if self.hosted.is_handed_over() {
                return Ok(());
            }
            let name = vec![self.name().to_owned()];
            if self.is_closed() {
                return Err(DrainTimeout::new(Vec::new()).with_caches(name).with_stopped());
            }
            let alone = self.hosted.has_no_taker();
            if alone || timeout_at(deadline, pulse).await.is_err() {
                let timeout = DrainTimeout::new(Vec::new()).with_caches(name.clone());
                return Err(if alone { timeout.with_nobody_for(name) } else { timeout });
            }
        }
    }

    /// Closes the cache on this node: it serves nothing any more, the others take its partitions over as if it had
    /// died, and operations here end with [`CacheError::Stopped`] (writes that were under way with
    /// [`CacheError::Interrupted`]). To lose no write that only this node has, [`Cache::drain`] first. A cache of
    /// this name can be opened here again when the scope has been started anew: until then the others would take a new
    /// copy, which has forgotten what it promised, for the old one.
    pub fn close(&self) {
        self.driver.close_cache(&self.hosted);
    }

    fn check_open(&self) -> Result<(), CacheError> {
        if self.is_closed() { Err(CacheError::Stopped) } else { Ok(()) }
    }

    fn check_partition(&self, partition: PartitionId) -> Result<(), CacheError> {
        let (given, partitions) = (u64::from(partition.get()), u64::from(self.config().partitions));
        if given < partitions {
            return Ok(());
        }
        let (what, option) = ("the partition".into(), "partitions".into());
        Err(CacheError::TooLarge { what, given, max: partitions - 1, option })
    }
}

/// A record of just the fields that decide where it is: for lookups.
fn key_and_partition<'a>(
    config: &CacheConfig,
    record: &'a Record,
) -> Result<(&'a Term, PartitionId), CacheError> {
    let (key, partition) = config.key_and_partition(record)?;
    key.check()?;
    if let Some(term) = record.get(config.partition_field) {
        term.check()?;
    }
    Ok((key, partition))
}
