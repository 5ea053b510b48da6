//! What a scope tells those who watch it.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, Waker};

use futures_core::Stream;
use parking_lot::Mutex;

use crate::node::{NodeEvent, Status};
use crate::types::{Group, MemberId, NodeId, Peer};
use crate::view::ViewHash;

/// How many events wait for a reader; beyond, the oldest are dropped and counted.
const CAPACITY: usize = 1024;

/// Something that happened to a scope on this node.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event {
    /// A node is connected.
    NodeUp(Peer),
    /// A node is gone.
    NodeDown(Peer),
    /// A node's link makes no progress; broadcasts do not rely on it now.
    NodeSuspect(Peer),
    /// A suspect node's link is back; nothing was lost.
    NodeResumed(Peer),
    /// The status or the view has changed.
    Status {
        /// How sure this node is of its routing table.
        status: Status,
        /// Its committed view.
        view_hash: ViewHash,
    },
    /// This node has its first member of the group.
    Occupied(Group),
    /// This node has lost its last member of the group.
    Vacant(Group),
    /// A subscriber took no more or panicked; the member was removed.
    MemberEnded {
        /// The member.
        member: MemberId,
        /// The group that it was a member of.
        group: Group,
    },
    /// A later life of this node's name is in the cluster; this one takes no part any more.
    Superseded {
        /// The later life.
        by: Peer,
    },
    /// `peer` counts on a node to which this one has no link. While that lasts, every broadcast floods: see to it
    /// that all nodes can connect.
    Partitioned {
        /// Who counts on it.
        peer: NodeId,
        /// The node that cannot be reached from here.
        missing: NodeId,
    },
    /// This reader was too slow and has missed so many events.
    Lagged(u64),
    /// The scope is stopped; the last event.
    Stopped,
}

impl From<NodeEvent> for Event {
    fn from(event: NodeEvent) -> Self {
        match event {
            NodeEvent::PeerUp(peer) => Event::NodeUp(peer),
            NodeEvent::PeerDown(peer) => Event::NodeDown(peer),
            NodeEvent::PeerSuspect(peer) => Event::NodeSuspect(peer),
            NodeEvent::PeerResumed(peer) => Event::NodeResumed(peer),
            NodeEvent::Occupied(group) => Event::Occupied(group),
            NodeEvent::Vacant(group) => Event::Vacant(group),
            NodeEvent::Superseded { by } => Event::Superseded { by },
            NodeEvent::Partitioned { peer, missing } => Event::Partitioned { peer, missing },
        }
    }
}

/// The events of a scope from now on: a [`Stream`], bounded (1024 wait at most; a reader that is slower gets
/// [`Event::Lagged`] in their place). It ends after [`Event::Stopped`].
pub struct Events(Arc<Queue>);

#[derive(Default)]
struct Queue(Mutex<Waits>);

#[derive(Default)]
struct Waits {
    events: VecDeque<Event>,
    lagged: u64,
    closed: bool,
    reader: Option<Waker>,
}

impl Queue {
    fn push(&self, event: Event) -> Option<Waker> {
        let mut waits = self.0.lock();
        if waits.events.len() >= CAPACITY {
            waits.events.pop_front();
            waits.lagged += 1;
        }
        waits.events.push_back(event);
        waits.reader.take()
    }

    fn poll(&self, context: &mut Context<'_>) -> Poll<Option<Event>> {
        let mut waits = self.0.lock();
        if let Some(event) = waits.take() {
            return Poll::Ready(Some(event));
        }
        if waits.closed {
            return Poll::Ready(None);
        }
        let earlier = waits.reader.replace(context.waker().clone());
        drop(waits);
        drop(earlier);
        Poll::Pending
    }
}

impl Waits {
    fn take(&mut self) -> Option<Event> {
        match std::mem::take(&mut self.lagged) {
            0 => self.events.pop_front(),
            missed => Some(Event::Lagged(missed)),
        }
    }
}

impl Events {
    /// The next event; `None` after the scope has stopped and everything was read. Cancel-safe.
    pub async fn recv(&mut self) -> Option<Event> {
        poll_fn(|context| self.0.poll(context)).await
    }

    /// The next event if one waits.
    pub fn try_recv(&mut self) -> Option<Event> {
        self.0.0.lock().take()
    }
}

impl Stream for Events {
    type Item = Event;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Event>> {
        self.0.poll(context)
    }
}

impl std::fmt::Debug for Events {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Events").field("waiting", &self.0.0.lock().events.len()).finish()
    }
}

/// The readers of one scope.
#[derive(Default)]
pub(crate) struct EventHub(Mutex<Hub>);

#[derive(Default)]
struct Hub {
    readers: Vec<Weak<Queue>>,
    status: Option<(Status, ViewHash)>,
    closed: bool,
}

impl EventHub {
    pub(crate) fn subscribe(&self) -> Events {
        let queue = Arc::new(Queue::default());
        let mut hub = self.0.lock();
        if hub.closed {
            queue.0.lock().closed = true;
        } else {
            hub.readers.retain(|reader| reader.strong_count() > 0);
            hub.readers.push(Arc::downgrade(&queue));
        }
        Events(queue)
    }

    pub(crate) fn publish(&self, event: Event) {
        let woken = self.0.lock().push(&event);
        woken.into_iter().for_each(Waker::wake);
    }

    /// Tells the status if it is another than last told. Read under the lock, so that two changes are told in
    /// the order in which they were made.
    pub(crate) fn publish_status(&self, read: impl FnOnce() -> (Status, ViewHash)) {
        let woken = {
            let mut hub = self.0.lock();
            let now = read();
            if hub.closed || hub.status.replace(now) == Some(now) {
                return;
            }
            let (status, view_hash) = now;
            hub.push(&Event::Status { status, view_hash })
        };
        woken.into_iter().for_each(Waker::wake);
    }

    pub(crate) fn close(&self) {
        let (mut woken, readers) = {
            let mut hub = self.0.lock();
            hub.closed = true;
            (hub.push(&Event::Stopped), std::mem::take(&mut hub.readers))
        };
        for reader in readers.iter().filter_map(Weak::upgrade) {
            let mut waits = reader.0.lock();
            waits.closed = true;
            woken.extend(waits.reader.take());
        }
        woken.into_iter().for_each(Waker::wake);
    }
}

impl Hub {
    fn push(&mut self, event: &Event) -> Vec<Waker> {
        self.readers
            .iter()
            .filter_map(Weak::upgrade)
            .filter_map(|reader| reader.push(event.clone()))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slow_reader_is_told_how_much_it_missed_and_goes_on() {
        let hub = EventHub::default();
        let mut events = hub.subscribe();
        for i in 0..CAPACITY + 3 {
            hub.publish(Event::Vacant(Group::from(format!("g{i}"))));
        }
        assert_eq!(events.try_recv(), Some(Event::Lagged(3)));
        assert_eq!(events.try_recv(), Some(Event::Vacant(Group::from("g3"))));
        assert_eq!(std::iter::from_fn(|| events.try_recv()).count(), CAPACITY - 1);
    }

    #[test]
    fn the_same_status_is_told_once() {
        let hub = EventHub::default();
        let mut events = hub.subscribe();
        for status in [Status::Converging, Status::Converging, Status::Ready] {
            hub.publish_status(|| (status, ViewHash::UNSETTLED));
        }
        assert_eq!(std::iter::from_fn(|| events.try_recv()).count(), 2);
        hub.close();
        assert_eq!(events.try_recv(), Some(Event::Stopped));
        assert_eq!(hub.subscribe().try_recv(), None);
    }
}
