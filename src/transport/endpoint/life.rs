//! What the tasks and the callers of one life share.

use std::collections::{BTreeSet, VecDeque};
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, AtomicUsize, Ordering};

use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::sync::{Notify, OwnedSemaphorePermit, watch};
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::dials::Dials;
use super::wire::Wire;
use crate::transport::link::{Links, Packet, RawId, Time};
use crate::transport::rooms::Rooms;
use crate::transport::{Frame, Inbound, SendError};
use crate::types::{Incarnation, NodeId, Peer};

/// How far a start has come. Its sender is gone when the life is over.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Progress {
    Starting,
    Settled(Peer),
    /// A live node has our name.
    Superseded(Incarnation),
}

/// How a life ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stop {
    Goodbye = 1,
    Abort = 2,
}

/// Something for the life's seat.
pub(super) enum Arrival {
    Opened(Arc<Wire>),
    /// The permit is room for more from the same connection.
    Packet(RawId, Packet, OwnedSemaphorePermit),
    Malformed(RawId),
    Closed(RawId),
    /// An attempt to reach this node is over.
    Tried(NodeId),
    /// Who is known to be there.
    Expect(BTreeSet<NodeId>),
    Break(NodeId),
}

pub(super) struct Life {
    pub(super) node: NodeId,
    pub(super) links: Mutex<Links>,
    pub(super) inbound: Inbound,
    /// Wakes the seat.
    pub(super) wake: Notify,
    /// How many connections are carried.
    pub(super) carried: AtomicUsize,
    /// How many may be.
    max_carried: usize,
    /// How many were turned away.
    pub(super) turned_away: AtomicU64,
    /// Set when everything has to end at once.
    pub(super) over: watch::Sender<bool>,
    pub(super) dials: Mutex<Dials>,
    progress: watch::Receiver<Progress>,
    stop: AtomicU8,
    gone: AtomicBool,
    last_raw: AtomicU64,
    epoch: Instant,
    seed: u64,
    runtime: Handle,
    inbox: Mutex<VecDeque<Arrival>>,
    pub(super) rooms: Rooms,
    /// None once the life is over.
    tasks: Mutex<Option<JoinSet<()>>>,
}

impl Life {
    pub(super) fn new(
        links: Links,
        inbound: Inbound,
        runtime: Handle,
        progress: watch::Receiver<Progress>,
        max_carried: usize,
    ) -> Self {
        Self {
            node: links.me().node.clone(),
            seed: links.me().incarnation.get(),
            links: Mutex::new(links),
            inbound,
            wake: Notify::new(),
            carried: AtomicUsize::new(0),
            max_carried,
            turned_away: AtomicU64::new(0),
            over: watch::Sender::new(false),
            dials: Mutex::default(),
            progress,
            stop: AtomicU8::new(0),
            gone: AtomicBool::new(false),
            last_raw: AtomicU64::new(0),
            epoch: Instant::now(),
            runtime,
            inbox: Mutex::default(),
            rooms: Rooms::default(),
            tasks: Mutex::new(Some(JoinSet::new())),
        }
    }

    pub(super) fn now(&self) -> Time {
        Instant::now().saturating_duration_since(self.epoch)
    }

    pub(super) fn instant(&self, at: Time) -> Instant {
        self.epoch + at
    }

    pub(super) fn next_raw(&self) -> RawId {
        RawId(self.last_raw.fetch_add(1, Ordering::Relaxed) + 1)
    }

    /// Whether there is room for one more connection; it is counted then.
    pub(super) fn may_carry(&self) -> bool {
        let one_more = |carried| (carried < self.max_carried).then_some(carried + 1);
        let room = self.carried.fetch_update(Ordering::AcqRel, Ordering::Acquire, one_more).is_ok();
        if !room {
            self.turned_away.fetch_add(1, Ordering::Relaxed);
        }
        room
    }

    /// An abort is not taken back by a goodbye.
    pub(super) fn stop(&self, how: Stop) {
        self.stop.fetch_max(how as u8, Ordering::AcqRel);
        self.wake.notify_one();
    }

    pub(super) fn stopping(&self) -> Option<Stop> {
        match self.stop.load(Ordering::Acquire) {
            0 => None,
            1 => Some(Stop::Goodbye),
            _ => Some(Stop::Abort),
        }
    }

    pub(super) fn is_gone(&self) -> bool {
        self.gone.load(Ordering::Acquire)
    }

    /// Waits for the seat's end.
    pub(super) async fn ended(&self) {
        let mut progress = self.progress.clone();
        while progress.changed().await.is_ok() {}
    }

    pub(super) fn push(&self, arrival: Arrival) {
        {
            let mut inbox = self.inbox.lock();
            if self.is_gone() {
                return;
            }
            inbox.push_back(arrival);
        }
        self.wake.notify_one();
    }

    /// Takes what has come, if `into` is empty.
    pub(super) fn take(&self, into: &mut VecDeque<Arrival>) {
        if into.is_empty() {
            std::mem::swap(&mut *self.inbox.lock(), into);
        }
    }

    pub(super) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        if let Some(tasks) = &mut *self.tasks.lock() {
            while tasks.try_join_next().is_some() {}
            tasks.spawn_on(task, &self.runtime);
        }
    }

    /// Nothing is carried and nobody waits any more; the tasks that are left.
    pub(super) fn leave(&self) -> Option<JoinSet<()>> {
        let rest = {
            let mut inbox = self.inbox.lock();
            self.gone.store(true, Ordering::Release);
            std::mem::take(&mut *inbox)
        };
        drop(rest);
        self.over.send_replace(true);
        self.rooms.close();
        self.tasks.lock().take()
    }
}

// Sending.
impl Life {
    pub(super) fn try_send(&self, to: &Peer, frame: Frame) -> Result<(), SendError> {
        if self.is_gone() || self.stopping().is_some() {
            return Err(SendError::NoLink(frame));
        }
        self.links.lock().try_send(to, frame, self.now())?;
        self.wake.notify_one();
        Ok(())
    }

    pub(super) async fn send(&self, to: &Peer, frame: Frame) -> Result<(), SendError> {
        self.rooms.send(to, frame, |to, frame| self.try_send(to, frame)).await
    }
}

// Dialling.
impl Life {
    pub(super) fn attempt(&self, node: &NodeId) -> bool {
        let free = *node != self.node
            && !self.is_gone()
            && self.stopping().is_none()
            && !self.links.lock().has_connection(node);
        free && self.dials.lock().begin(node, self.now())
    }

    pub(super) fn attempted(&self, node: &NodeId) {
        self.dials.lock().end(node, self.now(), self.seed);
        self.push(Arrival::Tried(node.clone()));
    }
}
