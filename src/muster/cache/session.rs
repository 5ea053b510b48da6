//! Sessions: whoever writes through one reads what it has written, on any node.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

use parking_lot::Mutex;

use super::{Cache, CallOptions, SessionToken};
use crate::cache::{CacheError, PartitionId, Version};

/// The last writes of a session to each partition that it has written to, one of each epoch: the epochs of two sides of a
/// split may not know of each other, and the higher one need not be the one that stays.
#[derive(Debug, Default)]
pub(super) struct Remembered(Mutex<BTreeMap<PartitionId, Vec<Version>>>);

impl Remembered {
    /// So many epochs are remembered of one partition; of more, the lowest is forgotten.
    pub(super) const EPOCHS: usize = 4;

    pub(super) fn get(&self, partition: PartitionId) -> Vec<Version> {
        self.0.lock().get(&partition).cloned().unwrap_or_default()
    }

    /// In one epoch the highest stays: writes that were under way together may be answered in any order.
    pub(super) fn remember(&self, partition: PartitionId, version: &Version) {
        let mut all = self.0.lock();
        let versions = all.entry(partition).or_default();
        match versions.binary_search_by(|known| known.epoch.cmp(&version.epoch)) {
            Ok(place) => {
                if let Some(last) = versions.get_mut(place).filter(|last| **last < *version) {
                    last.clone_from(version);
                }
            }
            Err(place) => versions.insert(place, version.clone()),
        }
        if versions.len() > Self::EPOCHS {
            versions.remove(0);
        }
    }

    /// One copy knew of all of these: then the last of them is in a history with the others, and stands for them.
    pub(super) fn seen_together(&self, partition: PartitionId, seen: &[Version]) {
        if seen.len() < 2 {
            return;
        }
        let mut all = self.0.lock();
        if let Some(versions) = all.get_mut(&partition).filter(|versions| **versions == *seen) {
            versions.drain(..versions.len() - 1);
        }
    }
}

/// Operations on a cache that read their own writes.
///
/// It has all operations of [`Cache`]. A write through it is remembered by the version of its partition; a read through
/// it is answered only by a copy that has that write, the primary's if need be, in every read mode. Writes of others
/// are seen as without a session. Cloning gives the same session; it may be used by many tasks.
///
/// It remembers the last write to each partition that it has written to: one, until the next read one for each of the
/// epochs in which it wrote, at most four. It forgets none by itself, not even one that all owners have: a node that was cut off before may still
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
/// let any_owner = session.with(CallOptions::new().read_mode(ReadMode::Local));
/// assert_eq!(any_owner.get_key("ada").await?, [record!["ada", 36]]);
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
    /// session has written to (up to four times that where the primary was replaced in between).
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

    /// Ends the session, on this handle. The cache stays open: [`Cache::close`] is the cache's own.
    pub fn close(self) {}

    /// Forgets what was written to a partition: after [`CacheError::WriteLost`], when the user has been told.
    pub fn forget(&self, partition: PartitionId) {
        let forgotten = self.remembered.0.lock().remove(&partition);
        drop(forgotten);
    }

    /// The last write to a partition that the session remembers, by its version.
    pub fn last_write(&self, partition: PartitionId) -> Option<Version> {
        self.remembered.get(partition).pop()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::Epoch;
    use crate::types::{Incarnation, NodeId, Peer};

    fn version(counter: u64, node: &str, seq: u64) -> Version {
        Version::new(Epoch::new(counter, Peer::new(NodeId::new(node).unwrap(), Incarnation::MIN)), seq)
    }

    #[test]
    fn one_write_of_each_epoch_is_remembered_until_a_copy_has_all() {
        let (all, partition) = (Remembered::default(), PartitionId::new(3));
        for write in [version(7, "b", 5), version(6, "a", 100), version(7, "b", 4), version(6, "a", 101)] {
            all.remember(partition, &write);
        }
        let both = [version(6, "a", 101), version(7, "b", 5)];
        assert_eq!(all.get(partition), both);
        all.remember(partition, &version(7, "b", 6));
        all.seen_together(partition, &both);
        assert_eq!(all.get(partition).len(), 2, "it has written since that read began");
        all.seen_together(partition, &[version(6, "a", 101), version(7, "b", 6)]);
        assert_eq!(all.get(partition), [version(7, "b", 6)]);
        (8..20).for_each(|counter| all.remember(partition, &version(counter, "a", 1)));
        assert_eq!(all.get(partition).len(), Remembered::EPOCHS);
        assert_eq!(all.get(partition).pop(), Some(version(19, "a", 1)));
        assert_eq!(all.get(PartitionId::new(4)), []);
    }
}
