//! Sessions: whoever writes through one reads what it has written, on any node.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

use parking_lot::Mutex;

use super::{Cache, CallOptions, SessionToken};
use crate::cache::{CacheError, PartitionId, Version};

/// The last write of a session to each partition that it has written to.
#[derive(Debug, Default)]
pub(super) struct Remembered(Mutex<BTreeMap<PartitionId, Version>>);

impl Remembered {
    pub(super) fn get(&self, partition: PartitionId) -> Option<Version> {
        self.0.lock().get(&partition).cloned()
    }

    /// The highest stays: writes that were under way together may be answered in any order.
    pub(super) fn remember(&self, partition: PartitionId, version: &Version) {
        let mut versions = self.0.lock();
        match versions.get_mut(&partition) {
            Some(last) if *last >= *version => {}
            Some(last) => last.clone_from(version),
            None => drop(versions.insert(partition, version.clone())),
        }
    }
}

/// Operations on a cache that read their own writes.
///
/// It has all operations of [`Cache`]. A write through it is remembered by the version of its partition; a read through
/// it is answered only by a copy that has that write, the primary's if need be, in every read mode. Writes of others
/// are seen as without a session. Cloning gives the same session; it may be used by many tasks.
///
/// It remembers one write for each partition that it has written to, the last, and so at most as many as the cache has
/// partitions. It forgets none by itself, not even one that all owners have: a node that was cut off before may still
/// have an older copy and take itself for an owner, and the session is what tells it that it is behind.
///
/// [`Session::token`] carries it to another node: the next request of the same user reads its own writes there, too.
///
/// If a write of the session was lost (its primary died, and it was not on enough owners), reads of that partition fail
/// with [`CacheError::WriteLost`] until [`Session::forget`]: never silently. A write that failed is not remembered, unless it is known to be applied
/// ([`CacheError::Uncounted`]).
///
/// ```
/// # use muster_router::{Muster, transport::memory::Network};
/// use muster_router::{cache::{CacheConfig, CallOptions, ReadMode, SessionToken}, record};
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let network = Network::new();
/// # let a = Muster::builder("shop").transport(network.node("a")).start().await?;
/// # let b = Muster::builder("shop").transport(network.node("b")).start().await?;
/// let (here, there) = (a.cache(CacheConfig::new("users")).await?, b.cache(CacheConfig::new("users")).await?);
/// let session = here.session();
/// session.put(record!["ada", 36]).await?;
/// let cookie = session.token().to_string();
///
/// // the next request comes to the other node
/// let session = there.session_from(&cookie.parse::<SessionToken>()?)?;
/// let nearest = session.with(CallOptions::new().read_mode(ReadMode::Local));
/// assert_eq!(nearest.get_key("ada").await?, [record!["ada", 36]]);
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Session {
    cache: Cache,
    remembered: Arc<Remembered>,
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Session")
            .field("cache", &self.cache)
            .field("writes", &self.remembered.0.lock())
            .finish()
    }
}

/// The operations are the cache's.
impl Deref for Session {
    type Target = Cache;
    fn deref(&self) -> &Cache {
        &self.cache
    }
}

impl Cache {
    /// A session that has written nothing yet.
    pub fn session(&self) -> Session {
        let remembered = Arc::<Remembered>::default();
        Session { cache: Self { session: Some(remembered.clone()), ..self.clone() }, remembered }
    }

    /// The session that the token is of, continued on this node.
    ///
    /// # Errors
    /// [`CacheError::Token`] if the token is of another cache, or names partitions that this one has not.
    pub fn session_from(&self, token: &SessionToken) -> Result<Session, CacheError> {
        let refused = |reason| Err(CacheError::Token { reason });
        if token.cache() != self.name() {
            return refused(format!("it is of cache {:?}, and this is {:?}", token.cache(), self.name()));
        }
        let partitions = self.config().partitions;
        if let Some(last) = token.versions().keys().next_back().filter(|last| last.get() >= partitions) {
            return refused(format!("it names partition {last}, and there are {partitions}"));
        }
        let session = self.session();
        *session.remembered.0.lock() = token.versions().clone();
        Ok(session)
    }
}

impl Session {
    /// What another node needs to continue this session: small, and safe to give to a user's browser as far as it
    /// shows the names of nodes and nothing of the data. It grows by about ten bytes with each partition that the
    /// session has written to.
    pub fn token(&self) -> SessionToken {
        SessionToken::new(self.name(), self.remembered.0.lock().clone())
    }

    /// The same session, whose calls do otherwise than the cache's options say.
    #[must_use]
    pub fn with(&self, options: CallOptions) -> Self {
        Self { cache: self.cache.with(options), remembered: self.remembered.clone() }
    }

    pub(super) fn into_cache(self) -> Cache {
        self.cache
    }

    /// Forgets what was written to a partition: after [`CacheError::WriteLost`], when the user has been told.
    pub fn forget(&self, partition: PartitionId) {
        let forgotten = self.remembered.0.lock().remove(&partition);
        drop(forgotten);
    }

    /// The last write to a partition that the session remembers.
    pub fn last_write(&self, partition: PartitionId) -> Option<Version> {
        self.remembered.get(partition)
    }
}
