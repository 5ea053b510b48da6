//! A network inside one process.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use async_trait::async_trait;
use parking_lot::Mutex;
use tokio::sync::{Notify, mpsc};

use super::{Frame, Inbound, SendError, Transport, TransportError};
use crate::types::{Incarnation, NameError, NodeId, Peer};

/// Frames that may wait for one node from one peer.
const QUEUE: usize = 8192;

/// An in-process network. Cloning gives the same network.
#[derive(Clone, Default)]
pub struct Network(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    last: u64,
    nodes: BTreeMap<NodeId, Live>,
}

struct Live {
    peer: Peer,
    inbound: Inbound,
    queue: mpsc::UnboundedSender<Item>,
    links: BTreeMap<Peer, Arc<Link>>,
}

enum Item {
    Frame(Peer, Arc<Link>, Frame),
    Down(Peer),
    Stop,
}

#[derive(Default)]
struct Link {
    waiting: AtomicUsize,
    room: Notify,
}

impl Network {
    /// An empty network.
    pub fn new() -> Self {
        Self::default()
    }

    /// A transport for the node of this name.
    pub fn node(&self, name: impl AsRef<str>) -> MemoryTransport {
        let node = NodeId::new(name.as_ref());
        MemoryTransport { network: self.clone(), node, task: Arc::new(Mutex::new(None)) }
    }

    /// Takes a node off the network at once, as a crash would.
    pub fn crash(&self, name: &str) {
        self.remove(name);
    }

    fn remove(&self, name: &str) {
        let mut state = self.0.lock();
        let Some(live) = state.nodes.remove(name) else { return };
        let _ = live.queue.send(Item::Stop);
        for other in state.nodes.values_mut() {
            if let Some(link) = other.links.remove(&live.peer) {
                link.room.notify_waiters();
                let _ = other.queue.send(Item::Down(live.peer.clone()));
            }
        }
    }
}

/// One node's end of a [`Network`].
#[derive(Clone)]
pub struct MemoryTransport {
    network: Network,
    node: Result<NodeId, NameError>,
    task: Arc<Mutex<Option<(Peer, tokio::task::JoinHandle<()>)>>>,
}

#[async_trait]
impl Transport for MemoryTransport {
    fn node(&self) -> &NodeId {
        static NOBODY: std::sync::OnceLock<NodeId> = std::sync::OnceLock::new();
        match &self.node {
            Ok(node) => node,
            #[allow(clippy::unwrap_used)]
            Err(_) => NOBODY.get_or_init(|| NodeId::new("?").unwrap()),
        }
    }

    async fn start(&self, inbound: Inbound) -> Result<Peer, TransportError> {
        let node = self.node.clone().map_err(|e| TransportError::Failed { reason: e.to_string() })?;
        let mut state = self.network.0.lock();
        if state.nodes.contains_key(&node) {
            return Err(TransportError::AlreadyStarted { node });
        }
        state.last += 1;
        let peer = Peer::new(node.clone(), Incarnation::new(state.last).unwrap_or(Incarnation::MIN));
        let (queue, mut items) = mpsc::unbounded_channel();
        let mut links = BTreeMap::new();
        for other in state.nodes.values_mut() {
            let link = Arc::new(Link::default());
            other.inbound.peer_up(peer.clone());
            inbound.peer_up(other.peer.clone());
            other.links.insert(peer.clone(), Arc::new(Link::default()));
            links.insert(other.peer.clone(), link);
        }
        state.nodes.insert(node, Live { peer: peer.clone(), inbound: inbound.clone(), queue, links });
        drop(state);
        let handle = tokio::spawn({
            let inbound = inbound.clone();
            async move {
                while let Some(item) = items.recv().await {
                    match item {
                        Item::Frame(from, link, frame) => {
                            link.waiting.fetch_sub(1, Ordering::SeqCst);
                            link.room.notify_waiters();
                            inbound.frame(&from, frame);
                        }
                        Item::Down(peer) => inbound.peer_down(&peer),
                        Item::Stop => return,
                    }
                    tokio::task::consume_budget().await;
                }
            }
        });
        *self.task.lock() = Some((peer.clone(), handle));
        inbound.discovery_settled();
        Ok(peer)
    }

    async fn send(&self, to: &Peer, frame: Frame) -> Result<(), SendError> {
        let mut frame = frame;
        loop {
            let link = self.link(to);
            let room = link.as_ref().map(|link| link.room.notified());
            match (self.try_send(to, frame), room) {
                (Err(SendError::Busy(back)), Some(room)) => {
                    frame = back;
                    let _ = tokio::time::timeout(std::time::Duration::from_millis(20), room).await;
                }
                (result, _) => return result,
            }
        }
    }

    fn try_send(&self, to: &Peer, frame: Frame) -> Result<(), SendError> {
        let state = self.network.0.lock();
        let Some((live, link)) = self
            .node
            .as_ref()
            .ok()
            .and_then(|me| state.nodes.get(me))
            .and_then(|live| Some((live, live.links.get(to)?.clone())))
        else {
            return Err(SendError::NoLink(frame));
        };
        let Some(other) = state.nodes.get(&to.node) else { return Err(SendError::NoLink(frame)) };
        if link.waiting.fetch_add(1, Ordering::SeqCst) >= QUEUE {
            link.waiting.fetch_sub(1, Ordering::SeqCst);
            return Err(SendError::Busy(frame));
        }
        let _ = other.queue.send(Item::Frame(live.peer.clone(), link, frame));
        Ok(())
    }

    async fn shutdown(&self) {
        let task = self.task.lock().take();
        if let Some((peer, handle)) = task {
            self.network.remove(peer.node.as_str());
            let _ = handle.await;
        }
    }
}

impl MemoryTransport {
    fn link(&self, to: &Peer) -> Option<Arc<Link>> {
        let state = self.network.0.lock();
        state.nodes.get(self.node.as_ref().ok()?)?.links.get(to).cloned()
    }
}
