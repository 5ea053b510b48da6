//! A session that replaces another one of the same peer in one step, seen from the public handle: nothing that was
//! meant for one of them gets into the other.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test that cannot go on says so by panicking"
)]

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use muster_router::transport::link::LinkConfig;
use muster_router::transport::memory::{MemoryTransport, Network};
use muster_router::transport::{Frame, Inbound, Receiver, SendError, Transport, TransportError};
use muster_router::{Incarnation, Muster, NodeId, Peer, Status};
use parking_lot::{Condvar, Mutex};

const PATIENCE: Duration = Duration::from_secs(60);

/// Passes everything on; calls `hook` before a `peer_down` is.
struct Spy {
    inbound: Inbound,
    hook: Box<dyn Fn() + Send + Sync>,
}

impl Receiver for Spy {
    fn peer_up(&self, peer: Peer) {
        self.inbound.peer_up(peer);
    }
    fn peer_suspect(&self, peer: &Peer) {
        self.inbound.peer_suspect(peer);
    }
    fn peer_resumed(&self, peer: &Peer) {
        self.inbound.peer_resumed(peer);
    }
    fn peer_down(&self, peer: &Peer) {
        (self.hook)();
        self.inbound.peer_down(peer);
    }
    fn discovery_settled(&self) {
        self.inbound.discovery_settled();
    }
    fn frame(&self, peer: &Peer, frame: Frame) {
        self.inbound.frame(peer, frame);
    }
}

struct Spied {
    inner: MemoryTransport,
    spy: Mutex<Option<Arc<Spy>>>,
    hook: Mutex<Option<Box<dyn Fn() + Send + Sync>>>,
}

#[async_trait]
impl Transport for Spied {
    fn node(&self) -> &NodeId {
        self.inner.node()
    }
    fn max_frame(&self) -> usize {
        self.inner.max_frame()
    }
    async fn start(&self, inbound: Inbound) -> Result<Peer, TransportError> {
        let terms = inbound.terms().clone();
        let hook = self.hook.lock().take().expect("started once");
        let spy = Arc::new(Spy { inbound, hook });
        *self.spy.lock() = Some(spy.clone());
        let receiver: Arc<dyn Receiver> = spy;
        self.inner.start(Inbound::new(Arc::downgrade(&receiver), terms)).await
    }
    async fn send(&self, to: &Peer, frame: Frame) -> Result<(), SendError> {
        self.inner.send(to, frame).await
    }
    fn try_send(&self, to: &Peer, frame: Frame) -> Result<(), SendError> {
        self.inner.try_send(to, frame)
    }
    async fn shutdown(&self) {
        self.inner.shutdown().await;
    }
}

async fn until(what: &str, holds: impl Fn() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < deadline, "{what}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

/// b has given z up and z has not noticed: when they connect again, z's session is replaced in one step. A broadcast
/// that z makes before it has heard of that took the first number of the old session into the new one; the next one
/// was then taken for a second copy, confirmed to nobody, and open for ever.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_broadcast_while_its_link_is_replaced_costs_no_later_one() {
    let network = Network::builder()
        .link(LinkConfig {
            ping_interval: None,
            reconnect_grace: Duration::from_millis(100),
            ..LinkConfig::default()
        })
        .build();
    let b = Muster::builder("s").transport(network.node("b")).start().await.unwrap();
    let cell: Arc<OnceLock<Muster>> = Arc::default();
    let armed = Arc::new(AtomicBool::new(false));
    let hook = {
        let (cell, armed) = (cell.clone(), armed.clone());
        move || {
            if armed.swap(false, Ordering::SeqCst) {
                let z = cell.get().unwrap().clone();
                // on another thread, as any caller is
                std::thread::spawn(move || drop(z.try_broadcast("g", "in the gap"))).join().unwrap();
            }
        }
    };
    let spied =
        Spied { inner: network.node("z"), spy: Mutex::default(), hook: Mutex::new(Some(Box::new(hook))) };
    let z = Muster::builder("s").transport(spied).start().await.unwrap();
    assert!(cell.set(z.clone()).is_ok());
    let ready = |m: &Muster| m.status() == Status::Ready && m.members().len() == 2;
    until("ready", || ready(&b) && ready(&z)).await;
    let mut inbox = b.subscribe("g").await.unwrap();
    until("ready", || ready(&b) && ready(&z)).await;
    network.cut_seen_by("b", "z");
    until("b gives z up", || b.summary().connected.is_empty()).await;
    armed.store(true, Ordering::SeqCst);
    network.heal("b", "z");
    until("the gap", || !armed.load(Ordering::SeqCst)).await;
    until("ready again", || ready(&b) && ready(&z)).await;
    for text in ["one", "two", "three"] {
        let receipt = tokio::time::timeout(PATIENCE, z.broadcast("g", text)).await.expect("an answer");
        assert!(receipt.is_ok(), "{receipt:?}");
        let got = tokio::time::timeout(PATIENCE, inbox.recv()).await.expect("it comes").unwrap();
        assert_eq!(got.payload(), text.as_bytes());
    }
    assert_eq!((z.summary().broadcasts_open, b.summary().violations), (0, 0));
}

/// Accepts everything; the first `send` stays inside its first poll until it is let go.
struct Slow {
    node: NodeId,
    inbound: Mutex<Option<Inbound>>,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    inside: bool,
    left: bool,
    /// `peer_down` has returned while a message of that session was being handed over.
    down_meanwhile: bool,
}

#[async_trait]
impl Transport for Slow {
    fn node(&self) -> &NodeId {
        &self.node
    }
    fn max_frame(&self) -> usize {
        usize::MAX
    }
    async fn start(&self, inbound: Inbound) -> Result<Peer, TransportError> {
        *self.inbound.lock() = Some(inbound);
        Ok(Peer::new(self.node.clone(), Incarnation::MIN))
    }
    async fn send(&self, _: &Peer, _: Frame) -> Result<(), SendError> {
        let mut state = self.state.lock();
        if !state.inside {
            state.inside = true;
            self.changed.notify_all();
            // long enough for a peer_down that does not wait
            self.changed.wait_for(&mut state, Duration::from_millis(300));
            state.left = true;
        }
        Ok(())
    }
    fn try_send(&self, _: &Peer, _: Frame) -> Result<(), SendError> {
        Ok(())
    }
    async fn shutdown(&self) {}
}

/// What a sender has taken from the node before a peer went down is not handed over after that: the transport may
/// have the next session of that peer by then.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_message_of_a_session_is_handed_over_before_its_end_or_not_at_all() {
    let slow = Arc::new(Slow {
        node: NodeId::new("a").unwrap(),
        inbound: Mutex::default(),
        state: Mutex::default(),
        changed: Condvar::new(),
    });
    let a = Muster::builder("s").transport(slow.clone()).start().await.unwrap();
    let inbound = slow.inbound.lock().clone().unwrap();
    let b = Peer::new(NodeId::new("b").unwrap(), Incarnation::MIN);
    // the node has something to say to it at once
    inbound.peer_up(b.clone());
    until("a message is handed over", || slow.state.lock().inside).await;
    let reports = tokio::task::spawn_blocking({
        let slow = slow.clone();
        move || {
            inbound.peer_down(&b);
            let mut state = slow.state.lock();
            state.down_meanwhile = !state.left;
            slow.changed.notify_all();
        }
    });
    tokio::time::timeout(PATIENCE, reports).await.expect("peer_down returns").unwrap();
    assert!(!slow.state.lock().down_meanwhile, "peer_down has returned, and its message is still on its way");
    a.shutdown().await;
}
