//! The caches of a scope, driven: who is open, which peers they hear of, and what arrives for them.
//!
//! ```text
//!  Cache ──begin──▶ Hosted ─┬─ shard 0: lock, CacheNode ──effects──▶ After ─┬─▶ Outbound of a peer ─▶ transport
//!  frames, peers, view ──▶  ├─ shard 1                     (under no lock) ├─▶ whoever waits for an answer
//!  timer ─────────────────▶ └─ ...                                         └─▶ events
//! ```
//!
//! Locks, in this order: the list of open caches, one shard, the queue to one peer. None is held while frames are
//! made or sent, while answers wake their waiters, and while a user's code runs.

mod events;
mod outbound;
mod shards;
mod stats;

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;
use parking_lot::{Mutex, RwLock};

use super::{Driver, random_seed};
use crate::cache::{CacheConfig, CacheError};
use crate::config::at_most;
use crate::transport::Lane;
use crate::transport::wire::{CacheHead, WireError};
use crate::types::Peer;

pub use events::CacheEvents;
pub(crate) use events::report;
pub(super) use outbound::Outbound;
pub(crate) use shards::{Answer, Hosted};
pub use stats::CacheStats;

/// The caches of one scope on this node.
#[derive(Default)]
pub(crate) struct Caches {
    /// Held while a cache is opened, and while it is written down that a peer has come or gone: so a new cache hears of
    /// each peer that is up from its opener or by its arrival, never twice and never not at all.
    life: Mutex<Life>,
    open: RwLock<BTreeMap<String, Arc<Hosted>>>,
}

#[derive(Default)]
struct Life {
    up: BTreeMap<Peer, Arc<Outbound>>,
    /// Names of caches that were closed on this node in this life.
    closed: Vec<String>,
    stopped: bool,
}

/// How many bytes of a batch go to one partition at a time.
pub(crate) const BATCH_BYTES: usize = 512 << 10;
/// How many caches may be opened in one life of a scope.
const MAX_CACHES: usize = 1024;

/// How many bytes one message of a cache may have with this transport, if it can carry all that the options allow.
fn largest_message(config: &CacheConfig, max_frame: usize) -> Result<usize, CacheError> {
    let frame = ("max_frame of the transport", max_frame);
    let room = max_frame.saturating_sub(outbound::FRAME_REST);
    let why = "a frame has to carry it, with 256 KiB of others that travel with it";
    at_most(("max_record_len + 256 KiB", config.max_record_len + outbound::FRAME_REST), frame, why)?;
    // names of nodes may be longer than the data
    let chunks = config.chunk_bytes.saturating_mul(2);
    at_most(("2 * chunk_bytes + 256 KiB", chunks + outbound::FRAME_REST), frame, why)?;
    let pieces = ("the least that a cache needs", BATCH_BYTES + outbound::FRAME_REST);
    at_most(pieces, frame, "batches travel in pieces of 512 KiB")?;
    Ok(room)
}

/// The peers to whom something is to be said when a burst of frames has been taken in: so what follows from all of them
/// travels together.
#[derive(Default)]
pub(super) struct Late(Vec<(Peer, Arc<Outbound>)>);

impl Late {
    fn add(&mut self, sends: Vec<(Peer, Arc<Outbound>)>) {
        for (peer, link) in sends {
            if !self.0.iter().any(|(_, known)| Arc::ptr_eq(known, &link)) {
                self.0.push((peer, link));
            }
        }
    }

    pub(super) fn carry_out(self, driver: &Driver) {
        self.0.iter().for_each(|(peer, link)| link.flush(driver, peer));
    }
}

impl Caches {
    fn all(&self) -> Vec<Arc<Hosted>> {
        self.open.read().values().cloned().collect()
    }

    /// The cache of this name.
    pub(crate) fn get(&self, name: &str) -> Option<Arc<Hosted>> {
        self.open.read().get(name).cloned()
    }
}

// Start and end.
impl Driver {
    /// Opens a cache, or gives the one that is open with the same options.
    pub(crate) fn open_cache(self: &Arc<Self>, config: CacheConfig) -> Result<Arc<Hosted>, CacheError> {
        let life = self.caches.life.lock();
        if life.stopped || self.is_stopped() {
            return Err(CacheError::Stopped);
        }
        if let Some(open) = self.caches.get(&config.name) {
            return if *open.config == config {
                Ok(open)
            } else {
                Err(CacheError::AlreadyOpen { name: config.name })
            };
        }
        if life.closed.contains(&config.name) {
            return Err(CacheError::Closed { name: config.name });
        }
        if self.node.with_published(|published| published.draining) {
            return Err(CacheError::Draining);
        }
        let opened = self.caches.open.read().len() + life.closed.len();
        if opened >= MAX_CACHES {
            return Err(CacheError::Busy);
        }
        let max_message = largest_message(&config, self.transport.max_frame())?;
        let config = Arc::new(config);
        let hosted = Arc::new(Hosted::new(config, max_message, self.node.me(), random_seed(), self.now()));
        let first_words = hosted.open(self, &life.up);
        self.caches.open.write().insert(hosted.config.name.clone(), hosted.clone());
        drop(life);
        self.spawn_reply(hosted.clone().keep_time(self.clone()));
        first_words.carry_out(self, &hosted);
        Ok(hosted)
    }

    /// Closes one cache: its partitions here are not served any more. Its name is not opened again in this life: the
    /// others would take the new copy, which has forgotten what it promised, for the old one.
    pub(crate) fn close_cache(&self, hosted: &Hosted) {
        let mut life = self.caches.life.lock();
        let removed = self.caches.open.write().remove(&hosted.config.name);
        if removed.is_some() {
            life.closed.push(hosted.config.name.clone());
        }
        drop(life);
        hosted.close(self);
    }

    /// The end of the scope.
    pub(super) fn close_caches(&self) {
        let mut life = self.caches.life.lock();
        life.stopped = true;
        let all = std::mem::take(&mut *self.caches.open.write());
        drop(life);
        for hosted in all.into_values() {
            hosted.close(self);
        }
    }

    /// Begins to hand everything over.
    pub(crate) fn drain_caches(&self) {
        for hosted in self.caches.all() {
            hosted.drain(self);
        }
    }

    /// The caches that have not handed over everything, and those of them that nobody will take over.
    pub(crate) fn caches_to_drain(&self) -> (Vec<String>, Vec<String>) {
        let mut caches = self.caches.all();
        caches.retain(|hosted| !hosted.is_drained());
        let name = |hosted: &Arc<Hosted>| hosted.config.name.clone();
        let alone = caches.iter().filter(|hosted| hosted.has_no_taker());
        (caches.iter().map(name).collect(), alone.map(name).collect())
    }
}

// Inputs.
impl Driver {
    pub(super) fn caches_peer_up(&self, peer: &Peer, link: Arc<Outbound>) {
        let mut life = self.caches.life.lock();
        life.up.insert(peer.clone(), link.clone());
        let caches = self.caches.all();
        drop(life);
        caches.iter().for_each(|hosted| hosted.peer_up(self, peer, &link));
    }

    pub(super) fn caches_peer_down(&self, peer: &Peer) {
        let mut life = self.caches.life.lock();
        life.up.remove(peer);
        let caches = self.caches.all();
        drop(life);
        caches.iter().for_each(|hosted| hosted.peer_down(self, peer));
    }

    /// The committed view has changed.
    pub(super) fn caches_view(&self) {
        let life = self.caches.life.lock();
        let caches = self.caches.all();
        drop(life);
        caches.iter().for_each(|hosted| hosted.view(self));
    }

    /// What is to be sent for it is the caller's to send, with what follows from other frames.
    pub(super) fn cache_frame(&self, from: &Peer, head: &CacheHead, body: &Bytes, late: &mut Late) {
        let (CacheHead::Messages { cache: name } | CacheHead::NotOpen { cache: name }) = head;
        let Some(hosted) = self.caches.get(name).or_else(|| self.cache_is_not_open(from, head)) else {
            return;
        };
        hosted.stats.frames_in.add(1);
        match head {
            CacheHead::NotOpen { .. } => hosted.not_open(self, from, late),
            CacheHead::Messages { .. } => match outbound::decode(body) {
                Some(messages) => hosted.messages(self, from, messages, late),
                None => {
                    hosted.stats.frames_ignored.add(1);
                    self.ignore(from, WireError::Malformed);
                }
            },
        }
    }

    /// Says so, unless the cache has been opened meanwhile: then its own first words are on the way, and this one
    /// must not come after them. On the control lane, as those are.
    fn cache_is_not_open(&self, from: &Peer, head: &CacheHead) -> Option<Arc<Hosted>> {
        // an answer to it would be answered
        let CacheHead::Messages { cache } = head else { return None };
        let life = self.caches.life.lock();
        if let Some(open) = self.caches.get(cache) {
            return Some(open);
        }
        let link = life.up.get(from).cloned()?;
        link.push(Lane::Control, outbound::Item::NotOpen { cache: cache.clone() });
        drop(life);
        link.flush(self, from);
        None
    }
}
