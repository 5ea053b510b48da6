//! A raw connection between two nodes of the network, and the ends that it joins.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use parking_lot::Mutex;
use tokio::sync::{Notify, watch};
use tokio::time::Instant;

use crate::transport::link::{Links, Packet, RawId, Time};
use crate::transport::rooms::Rooms;
use crate::transport::{Frame, SendError};
use crate::transport::{Inbound, Lane};
use crate::types::{NodeId, Peer};

/// How much may be under way in one direction of a connection: a frame counts 1 and 1 for each KiB.
const WINDOW: usize = 4096;

/// One life of a node on the network.
pub(super) struct End {
    pub(super) peer: Peer,
    pub(super) links: Mutex<Links>,
    pub(super) inbound: Inbound,
    /// Wakes the end's task.
    pub(super) wake: Notify,
    pub(super) frozen: AtomicBool,
    /// Takes no frames.
    pub(super) slow: AtomicBool,
    /// Asked to shut down.
    pub(super) stopping: AtomicBool,
    /// No longer on the network.
    pub(super) gone: AtomicBool,
    /// True once discovery has settled; its sender is gone when the task has ended.
    pub(super) settled: watch::Receiver<bool>,
    epoch: Instant,
    inbox: Mutex<VecDeque<Arrival>>,
    pub(super) rooms: Rooms,
}

/// Something for an end's task.
pub(super) struct Arrival {
    /// Not before; `None`: at once.
    pub(super) due: Option<Instant>,
    pub(super) item: Item,
}

pub(super) enum Item {
    Opened(Arc<Connection>),
    Packet(RawId, Packet),
    Closed(RawId),
}

impl Item {
    pub(super) fn lane(&self) -> Option<Lane> {
        match self {
            Item::Packet(_, packet) => packet.lane(),
            Item::Opened(_) | Item::Closed(_) => None,
        }
    }

    pub(super) fn is_acknowledgement(&self) -> bool {
        matches!(self, Item::Packet(_, packet) if packet.is_acknowledgement())
    }
}

impl End {
    pub(super) fn new(peer: Peer, links: Links, inbound: Inbound, settled: watch::Receiver<bool>) -> Self {
        Self {
            peer,
            links: Mutex::new(links),
            inbound,
            wake: Notify::new(),
            frozen: AtomicBool::new(false),
            slow: AtomicBool::new(false),
            stopping: AtomicBool::new(false),
            gone: AtomicBool::new(false),
            settled,
            epoch: Instant::now(),
            inbox: Mutex::default(),
            rooms: Rooms::default(),
        }
    }

    pub(super) fn now(&self) -> Time {
        Instant::now().saturating_duration_since(self.epoch)
    }

    pub(super) fn instant(&self, at: Time) -> Instant {
        self.epoch + at
    }

    /// Asks the task to shut down.
    pub(super) fn stop(&self) {
        self.stopping.store(true, Ordering::Release);
        self.wake.notify_one();
    }

    pub(super) fn is_gone(&self) -> bool {
        self.gone.load(Ordering::Acquire)
    }

    pub(super) fn try_send(&self, to: &Peer, frame: Frame) -> Result<(), SendError> {
        if self.is_gone() {
            return Err(SendError::NoLink(frame));
        }
        self.links.lock().try_send(to, frame, self.now())?;
        self.wake.notify_one();
        Ok(())
    }

    pub(super) fn push(&self, arrivals: impl IntoIterator<Item = Arrival>) {
        {
            let mut inbox = self.inbox.lock();
            if self.is_gone() {
                return;
            }
            inbox.extend(arrivals);
        }
        self.wake.notify_one();
    }

    pub(super) fn push_now(&self, item: Item) {
        self.push([Arrival { due: None, item }]);
    }

    /// Takes what has come, if `into` is empty.
    pub(super) fn take(&self, into: &mut VecDeque<Arrival>) {
        if into.is_empty() {
            std::mem::swap(&mut *self.inbox.lock(), into);
        }
    }

    /// Off the network: nothing comes in and nobody waits for room any more.
    pub(super) fn leave(&self) {
        let rest = {
            let mut inbox = self.inbox.lock();
            self.gone.store(true, Ordering::Release);
            std::mem::take(&mut *inbox)
        };
        drop(rest);
        self.wake.notify_one();
        self.rooms.close();
    }
}

/// See the module. A side is 0 or 1; a direction is named by the side that sends.
pub(super) struct Connection {
    pub(super) raw: RawId,
    pub(super) ends: [Arc<End>; 2],
    /// Not open: what is written is lost.
    pub(super) open: AtomicBool,
    /// What this side writes is lost, and nobody is told.
    pub(super) deaf: [AtomicBool; 2],
    under_way: [AtomicUsize; 2],
    /// This side waits for the other to take something.
    blocked: [AtomicBool; 2],
    pub(super) late: Mutex<[Late; 2]>,
}

impl Connection {
    /// Tells both ends that it is there, in one step: an end that was told first could write at once, and the other
    /// would drop what comes on a connection that it has never heard of.
    pub(super) fn announce(self: &Arc<Self>) {
        let [one, other] = &self.ends;
        {
            let mut inboxes = [one.inbox.lock(), other.inbox.lock()];
            for (end, inbox) in self.ends.iter().zip(&mut inboxes) {
                if !end.is_gone() {
                    inbox.push_back(Arrival { due: None, item: Item::Opened(self.clone()) });
                }
            }
        }
        one.wake.notify_one();
        other.wake.notify_one();
    }

    pub(super) fn new(raw: RawId, ends: [Arc<End>; 2]) -> Self {
        Self {
            raw,
            ends,
            open: AtomicBool::new(true),
            deaf: Default::default(),
            under_way: Default::default(),
            blocked: Default::default(),
            late: Mutex::default(),
        }
    }

    /// The side of this node.
    pub(super) fn side(&self, node: &NodeId) -> usize {
        usize::from(self.ends[0].peer.node != *node)
    }

    pub(super) fn other(&self, side: usize) -> &Arc<End> {
        &self.ends[1 - side]
    }

    /// Whether a frame may be put on the way by this side. If not, its task is woken when that has changed.
    pub(super) fn has_room(&self, side: usize) -> bool {
        let room = || {
            self.under_way[side].load(Ordering::SeqCst) < WINDOW
                && !self.other(side).slow.load(Ordering::SeqCst)
        };
        if room() {
            return true;
        }
        self.blocked[side].store(true, Ordering::SeqCst);
        // it may have changed just before
        room()
    }

    pub(super) fn sent(&self, side: usize, packet: &Packet) {
        self.under_way[side].fetch_add(weight(packet), Ordering::SeqCst);
    }

    /// The other side has taken a frame that `side` sent.
    pub(super) fn taken(&self, side: usize, packet: &Packet) {
        let weight = weight(packet);
        let before = self.under_way[side].fetch_sub(weight, Ordering::SeqCst);
        if before.saturating_sub(weight) < WINDOW / 2 {
            self.unblock(side);
        }
    }

    pub(super) fn unblock(&self, side: usize) {
        if self.blocked[side].load(Ordering::SeqCst) && self.blocked[side].swap(false, Ordering::SeqCst) {
            self.ends[side].wake.notify_one();
        }
    }
}

fn weight(packet: &Packet) -> usize {
    1 + packet.len() / 1024
}

/// Until when the packets of one direction are late, so that none passes another that it must not pass.
#[derive(Debug, Default)]
pub(super) struct Late {
    lanes: [Option<Instant>; 3],
}

impl Late {
    /// When something that would arrive at `at` does. With a lane it keeps its order within that lane only.
    pub(super) fn due(&mut self, at: Instant, lane: Option<Lane>) -> Option<Instant> {
        let due = match lane {
            Some(lane) => {
                let last = &mut self.lanes[lane.index()];
                let due = last.map_or(at, |last| last.max(at));
                *last = Some(due);
                due
            }
            None => {
                let due = self.lanes.iter().flatten().copied().fold(at, Instant::max);
                self.lanes = [Some(due); 3];
                due
            }
        };
        Some(due)
    }
}
