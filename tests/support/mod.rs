//! What the tests of the public handle share.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use muster_router::transport::memory::{MemoryTransport, Network};
use muster_router::transport::{Frame, Inbound, Lane, Receiver, SendError, Transport, TransportError};
use muster_router::*;
use tokio::sync::watch;

/// Far longer than anything may take; virtual in tests with paused time.
pub const PATIENCE: Duration = Duration::from_secs(60);

pub async fn start(network: &Network, name: &str) -> Muster {
    Muster::builder("rooms").transport(network.node(name)).start().await.expect("starts")
}

/// Nodes of these names, all ready with the same view.
pub async fn cluster<const N: usize>(network: &Network, names: [&str; N]) -> [Muster; N] {
    let mut all = Vec::new();
    for name in names {
        all.push(start(network, name).await);
    }
    settle(&all).await;
    all.try_into().expect("as many as names")
}

/// Waits until all of these are ready with one view of just these.
pub async fn settle(all: &[Muster]) {
    for muster in all {
        muster
            .until(PATIENCE, |s| s.status == Status::Ready && s.view.len() == all.len())
            .await
            .unwrap_or_else(|error| panic!("{error}\n{}", muster.dump()));
    }
    let hashes: BTreeSet<ViewHash> = all.iter().map(Muster::view_hash).collect();
    assert_eq!(hashes.len(), 1);
}

/// Looks until the condition holds; fails when it does not for longer than anything may take.
pub async fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let start = tokio::time::Instant::now();
    while !holds() {
        assert!(start.elapsed() < PATIENCE, "never: {what}");
        // not a mere yield: paused time goes on only while everybody waits
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// Lets virtual time pass. Only for tests with paused time.
pub async fn pass(time: Duration) {
    tokio::time::sleep(time).await;
}

/// A group whose router is `node`, among those that start with `prefix`.
pub fn group_routed_by(muster: &Muster, node: &str, prefix: &str) -> String {
    let ring = muster.ring();
    (0..10_000)
        .map(|i| format!("{prefix}{i}"))
        .find(|group| ring.router_for(group).is_some_and(|router| router.as_str() == node))
        .expect("every node routes something")
}

/// Everything that waits, as text.
pub fn waiting(inbox: &mut Subscription) -> Vec<String> {
    std::iter::from_fn(|| inbox.try_recv())
        .map(|m| String::from_utf8_lossy(m.payload()).into_owned())
        .collect()
}

/// The next message as text.
pub async fn next(inbox: &mut Subscription) -> String {
    let message = tokio::time::timeout(PATIENCE, inbox.recv()).await.expect("in time").expect("open");
    String::from_utf8_lossy(message.payload()).into_owned()
}

/// Counts what it gets, and whether it still lives.
#[derive(Clone, Default)]
pub struct Counter {
    pub got: Arc<AtomicUsize>,
    alive: Arc<()>,
}

impl Counter {
    pub fn got(&self) -> usize {
        self.got.load(Ordering::SeqCst)
    }

    /// How many clones there are beside this one.
    pub fn others(&self) -> usize {
        Arc::strong_count(&self.alive) - 1
    }
}

impl Subscriber for Counter {
    fn deliver(&self, _message: &Message) -> Delivered {
        self.got.fetch_add(1, Ordering::SeqCst);
        Delivered::Accepted
    }
}

/// Which lanes to which nodes are shut.
#[derive(Clone)]
pub struct Valves(Arc<watch::Sender<BTreeSet<(String, usize)>>>);

impl Valves {
    pub fn shut(&self, node: &str, lane: Lane) {
        self.0.send_modify(|shut| {
            shut.insert((node.into(), lane.index()));
        });
    }

    pub fn open(&self, node: &str, lane: Lane) {
        self.0.send_modify(|shut| {
            shut.remove(&(node.into(), lane.index()));
        });
    }

    fn is_shut(&self, to: &Peer, lane: Lane) -> bool {
        self.0.borrow().contains(&(to.node.as_str().to_owned(), lane.index()))
    }
}

/// A memory transport whose lanes can be shut: they are full then. It may also keep to itself that discovery is
/// over.
pub struct Valved {
    inner: MemoryTransport,
    valves: Valves,
    quiet: bool,
    filter: Mutex<Option<Arc<Filter>>>,
}

impl Valved {
    pub fn new(network: &Network, name: &str) -> (Self, Valves) {
        let valves = Valves(Arc::new(watch::Sender::new(BTreeSet::new())));
        let this = Self {
            inner: network.node(name),
            valves: valves.clone(),
            quiet: false,
            filter: Mutex::new(None),
        };
        (this, valves)
    }

    /// Never says that discovery is over.
    pub fn quiet(mut self) -> Self {
        self.quiet = true;
        self
    }
}

struct Filter(Inbound);

impl Receiver for Filter {
    fn peer_up(&self, peer: Peer) {
        self.0.peer_up(peer);
    }
    fn peer_suspect(&self, peer: &Peer) {
        self.0.peer_suspect(peer);
    }
    fn peer_resumed(&self, peer: &Peer) {
        self.0.peer_resumed(peer);
    }
    fn peer_down(&self, peer: &Peer) {
        self.0.peer_down(peer);
    }
    fn discovery_settled(&self) {}
    fn frame(&self, peer: &Peer, frame: Frame) {
        self.0.frame(peer, frame);
    }
}

#[async_trait]
impl Transport for Valved {
    fn node(&self) -> &NodeId {
        self.inner.node()
    }

    async fn start(&self, inbound: Inbound) -> Result<Peer, TransportError> {
        if !self.quiet {
            return self.inner.start(inbound).await;
        }
        let filter = Arc::new(Filter(inbound.clone()));
        let receiver: Arc<dyn Receiver> = filter.clone();
        *self.filter.lock().unwrap() = Some(filter);
        self.inner.start(Inbound::new(Arc::downgrade(&receiver), inbound.terms().clone())).await
    }

    async fn send(&self, to: &Peer, frame: Frame) -> Result<(), SendError> {
        let mut changes = self.valves.0.subscribe();
        while self.valves.is_shut(to, frame.lane) {
            changes.changed().await.expect("the sender is ours");
        }
        self.inner.send(to, frame).await
    }

    fn try_send(&self, to: &Peer, frame: Frame) -> Result<(), SendError> {
        if self.valves.is_shut(to, frame.lane) {
            return Err(SendError::Busy(frame));
        }
        self.inner.try_send(to, frame)
    }

    fn max_frame(&self) -> usize {
        self.inner.max_frame()
    }
    async fn shutdown(&self) {
        self.inner.shutdown().await;
    }
}
