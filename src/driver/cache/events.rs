//! What a cache tells those who watch it on this node.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::broadcast::error::{RecvError, TryRecvError};
use tokio::sync::{Notify, broadcast, mpsc};

use super::stats::Stats;
use crate::cache::PartitionId;
use crate::cache::replica::CacheEvent;
use crate::cache::store::Loser;

/// How many events wait for a reader; beyond, the oldest are dropped and counted.
const CAPACITY: usize = 1024;
/// How many conflicts wait for a callback; beyond, the newest are dropped and counted.
const CONFLICTS: usize = 1 << 16;

/// The events of a cache on this node, from now on. Bounded: 1024 wait at most, a reader that is slower misses the
/// oldest and is told how many. It ends when the cache does.
#[derive(Debug)]
pub struct CacheEvents {
    receiver: broadcast::Receiver<CacheEvent>,
    missed: u64,
}

impl CacheEvents {
    /// The next event; `None` after the cache was closed and everything was read. Cancel-safe.
    pub async fn recv(&mut self) -> Option<CacheEvent> {
        loop {
            match self.receiver.recv().await {
                Ok(event) => return Some(event),
                Err(RecvError::Lagged(missed)) => self.missed += missed,
                Err(RecvError::Closed) => return None,
            }
        }
    }

    /// The next event if one waits.
    pub fn try_recv(&mut self) -> Option<CacheEvent> {
        loop {
            match self.receiver.try_recv() {
                Ok(event) => return Some(event),
                Err(TryRecvError::Lagged(missed)) => self.missed += missed,
                Err(TryRecvError::Empty | TryRecvError::Closed) => return None,
            }
        }
    }

    /// How many events this reader has missed so far because it was too slow.
    pub fn missed(&self) -> u64 {
        self.missed
    }
}

/// A write that lost when two sides came together, and where.
type Conflict = (PartitionId, Loser);

/// The readers of one cache.
#[derive(Default)]
pub(crate) struct CacheHub {
    readers: Mutex<Readers>,
    /// Wakes those who wait for status or readiness to change.
    pub(crate) changed: Notify,
}

#[derive(Default)]
struct Readers {
    events: Option<broadcast::Sender<CacheEvent>>,
    callbacks: Vec<mpsc::Sender<Conflict>>,
    closed: bool,
}

impl CacheHub {
    pub(crate) fn subscribe(&self) -> CacheEvents {
        let mut readers = self.readers.lock();
        let receiver = if readers.closed {
            // whose sender is gone at once
            broadcast::channel(1).1
        } else {
            readers.events.get_or_insert_with(|| broadcast::channel(CAPACITY).0).subscribe()
        };
        CacheEvents { receiver, missed: 0 }
    }

    /// Conflicts from now on, for a callback; ends when the cache does.
    pub(crate) fn conflicts(&self) -> mpsc::Receiver<Conflict> {
        let (sender, receiver) = mpsc::channel(CONFLICTS);
        let mut readers = self.readers.lock();
        if !readers.closed {
            readers.callbacks.push(sender);
        }
        receiver
    }

    pub(super) fn publish(&self, stats: &Stats, event: CacheEvent) {
        if let CacheEvent::Disagrees { error } = &event {
            // it may be said before anybody can have asked for events, and it is for an operator
            tracing::error!(%error, "a node keeps a cache of this name apart");
        }
        let (events, callbacks) = {
            let mut readers = self.readers.lock();
            readers.callbacks.retain(|callback| !callback.is_closed());
            (readers.events.clone(), readers.callbacks.clone())
        };
        if let CacheEvent::Conflict { partition, loser } = &event {
            stats.conflicts.add(1);
            for callback in callbacks {
                if callback.try_send((*partition, loser.clone())).is_err() {
                    stats.events_missed.add(1);
                }
            }
        }
        if let Some(events) = events {
            // an error says that nobody reads now
            let _ = events.send(event);
        }
    }

    pub(super) fn close(&self) {
        let readers = {
            let mut readers = self.readers.lock();
            readers.closed = true;
            (readers.events.take(), std::mem::take(&mut readers.callbacks))
        };
        drop(readers);
        self.changed.notify_waiters();
    }
}

/// Calls `callback` with each conflict. What it panics with is caught and counted.
pub(crate) async fn report(
    mut conflicts: mpsc::Receiver<Conflict>,
    hosted: Arc<super::Hosted>,
    callback: impl Fn(PartitionId, &Loser) + Send + Sync + 'static,
) {
    while let Some((partition, loser)) = conflicts.recv().await {
        if catch_unwind(AssertUnwindSafe(|| callback(partition, &loser))).is_err() {
            hosted.stats.panics.add(1);
        }
    }
}
