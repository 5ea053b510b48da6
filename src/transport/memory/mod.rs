//! A network inside one process, with faults on demand.
//!
//! [`Network::node`] gives a transport; all transports of one network find each other. Frames go through the same
//! link layer ([`super::link`]), and the same encoding and decoding, as on a wire. The bodies are shared, not copied.
//!
//! ```
//! use muster_router::transport::memory::{Fault, Network};
//! use std::time::Duration;
//!
//! let network = Network::with_seed(7);
//! let (a, b) = (network.node("a"), network.node("b"));       // not started yet
//! let late = network.rule("a", "b", Fault::Delay(Duration::ZERO..Duration::from_millis(5)));
//! network.cut("a", "b");                                     // both see the link break; nothing reconnects
//! network.heal("a", "b");                                    // within the grace: nothing was lost
//! network.remove_rule(late);
//! # drop((a, b));
//! ```
//!
//! Each node has one task. It reports to its [`Inbound`]; `try_send` only queues. Needs a tokio runtime with time
//! enabled, of either flavour; a paused clock works.

mod connection;
mod faults;
mod seat;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use async_trait::async_trait;
use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::time::Instant;

use super::link::{LinkConfig, LinkStats, Links, RawId};
use super::{Frame, Inbound, SendError, Transport, TransportError};
use crate::types::{Incarnation, NameError, NodeId, Peer};
use connection::{Arrival, Connection, End, Item};
use faults::Faults;
pub use faults::{Fault, RuleId};

/// An in-process network. Cloning gives the same network.
///
/// Names of nodes that do not exist are ignored by all faults, except that a cut of two names stays until it is
/// healed, whoever comes and goes.
#[derive(Clone)]
pub struct Network(Arc<Shared>);

/// Makes a [`Network`] that differs from the default.
#[derive(Clone, Debug)]
pub struct NetworkBuilder {
    link: LinkConfig,
    seed: u64,
}

struct Shared {
    config: LinkConfig,
    state: Mutex<State>,
    faults: Mutex<Faults>,
    /// Some rule exists or existed: packets may be late.
    faulty: AtomicBool,
}

#[derive(Default)]
struct State {
    last_incarnation: u64,
    last_raw: u64,
    nodes: BTreeMap<NodeId, Arc<End>>,
    /// The connection of each pair, the lower name first.
    connections: BTreeMap<(NodeId, NodeId), Arc<Connection>>,
    /// From and to.
    cuts: BTreeSet<(NodeId, NodeId)>,
}

impl NetworkBuilder {
    /// The times and bounds of its links.
    #[must_use]
    pub fn link(mut self, config: LinkConfig) -> Self {
        self.link = config;
        self
    }

    /// What drives its faults.
    #[must_use]
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    /// An empty network.
    pub fn build(self) -> Network {
        Network(Arc::new(Shared {
            config: self.link,
            state: Mutex::default(),
            faults: Mutex::new(Faults::new(self.seed)),
            faulty: AtomicBool::new(false),
        }))
    }
}

// Nodes.
impl Network {
    /// An empty network.
    pub fn new() -> Self {
        Self::builder().build()
    }

    /// An empty network whose faults follow this seed.
    pub fn with_seed(seed: u64) -> Self {
        Self::builder().seed(seed).build()
    }

    /// Sets more than [`Network::new`] does. A connection that breaks is always reported here, so idle links are
    /// not pinged unless [`NetworkBuilder::link`] says so.
    pub fn builder() -> NetworkBuilder {
        NetworkBuilder { link: LinkConfig { ping_interval: None, ..LinkConfig::default() }, seed: 1 }
    }

    /// A transport for the node of this name. A name that is no [`NodeId`] is an error when it starts.
    pub fn node(&self, name: impl AsRef<str>) -> MemoryTransport {
        let node = NodeId::new(name.as_ref());
        MemoryTransport(Arc::new(Inner { network: self.clone(), node, running: Mutex::new(None) }))
    }

    /// The nodes that run now.
    pub fn nodes(&self) -> Vec<Peer> {
        self.0.state.lock().nodes.values().map(|end| end.peer.clone()).collect()
    }

    /// What the links of a node have been through; `None` if it does not run.
    pub fn link_stats(&self, node: &str) -> Option<LinkStats> {
        let end = self.0.state.lock().nodes.get(node).cloned()?;
        let stats = end.links.lock().stats();
        Some(stats)
    }
}

// Faults.
impl Network {
    /// Everything from one node to another takes this long, drawn by the seed, and stays in order. Replaces the
    /// last delay of this direction; an empty range takes it away. For more, see [`Network::rule`].
    pub fn delay(&self, from: &str, to: &str, range: Range<Duration>) {
        let (Ok(from), Ok(to)) = (NodeId::new(from), NodeId::new(to)) else { return };
        self.0.faulty.store(true, Ordering::Release);
        self.0.faults.lock().set_delay(from, to, range);
    }

    /// Adds a rule for what `from` sends to `to`; `"*"` is everybody. Rules of one direction add up.
    pub fn rule(&self, from: &str, to: &str, fault: Fault) -> RuleId {
        let name = |name: &str| if name == "*" { None } else { NodeId::new(name).ok() };
        self.0.faulty.store(true, Ordering::Release);
        self.0.faults.lock().add(name(from), name(to), fault)
    }

    /// Takes a rule away. What is late already stays late.
    pub fn remove_rule(&self, rule: RuleId) {
        self.0.faults.lock().remove(rule);
    }

    /// Takes all rules away.
    pub fn clear_rules(&self) {
        self.0.faults.lock().clear();
    }

    /// Breaks the connection of two nodes, seen by both at once; none is made until it is healed.
    pub fn cut(&self, a: &str, b: &str) {
        self.0.cut(a, b, [true, true]);
    }

    /// The same, but only `a` sees it: `b` finds out when it hears nothing.
    pub fn cut_seen_by(&self, a: &str, b: &str) {
        self.0.cut(a, b, [true, false]);
    }

    /// What `from` sends to `to` is lost from now on, and nobody is told.
    pub fn cut_one_way(&self, from: &str, to: &str) {
        let (Ok(from), Ok(to)) = (NodeId::new(from), NodeId::new(to)) else { return };
        let mut state = self.0.state.lock();
        if let Some(connection) = state.connections.get(&pair(&from, &to)) {
            connection.deaf[connection.side(&from)].store(true, Ordering::SeqCst);
        }
        state.cuts.insert((from, to));
    }

    /// Ends every cut of two nodes; they connect again.
    pub fn heal(&self, a: &str, b: &str) {
        self.0.heal(|from, to| {
            (from.as_str() == a && to.as_str() == b) || (from.as_str() == b && to.as_str() == a)
        });
    }

    /// Ends every cut.
    pub fn heal_all(&self) {
        self.0.heal(|_, _| true);
    }

    /// Breaks the connection of two nodes once; they connect again at once.
    pub fn blip(&self, a: &str, b: &str) {
        let (Ok(a), Ok(b)) = (NodeId::new(a), NodeId::new(b)) else { return };
        let mut state = self.0.state.lock();
        if let Some(connection) = state.connections.remove(&pair(&a, &b)) {
            break_connection(&connection, [true, true]);
        }
    }

    /// The node does nothing any more, and its connections stay open, as under `SIGSTOP`.
    pub fn freeze(&self, node: &str) {
        if let Some(end) = self.0.state.lock().nodes.get(node) {
            end.frozen.store(true, Ordering::Release);
        }
    }

    /// It goes on.
    pub fn thaw(&self, node: &str) {
        if let Some(end) = self.0.state.lock().nodes.get(node) {
            end.frozen.store(false, Ordering::Release);
            end.wake.notify_one();
        }
    }

    /// Whether the node takes no frames, though it is alive and talks: a reader that never drains.
    pub fn slow(&self, node: &str, slow: bool) {
        let state = self.0.state.lock();
        let Some(end) = state.nodes.get(node) else { return };
        end.slow.store(slow, Ordering::SeqCst);
        if !slow {
            for other in state.nodes.keys() {
                if let Some(connection) = state.connections.get(&pair(&end.peer.node, other)) {
                    connection.unblock(connection.side(other));
                }
            }
        }
    }

    /// Takes a node off the network at once, without a goodbye. Its transport may be started again.
    pub fn crash(&self, node: &str) {
        let end = self.0.state.lock().nodes.get(node).cloned();
        if let Some(end) = end {
            self.0.remove(&end);
        }
    }
}

impl Default for Network {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for Network {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Network").field("nodes", &self.nodes()).finish_non_exhaustive()
    }
}

fn pair(a: &NodeId, b: &NodeId) -> (NodeId, NodeId) {
    if a < b { (a.clone(), b.clone()) } else { (b.clone(), a.clone()) }
}

/// `seen`: by which sides.
fn break_connection(connection: &Connection, seen: [bool; 2]) {
    connection.open.store(false, Ordering::SeqCst);
    for (end, seen) in connection.ends.iter().zip(seen) {
        if seen {
            end.push_now(Item::Closed(connection.raw));
        }
    }
}

impl State {
    /// Connects two nodes, unless they are connected or cut.
    fn connect(&mut self, a: &Arc<End>, b: &Arc<End>) {
        let key = pair(&a.peer.node, &b.peer.node);
        let cut = self.cuts.contains(&key) || self.cuts.contains(&(key.1.clone(), key.0.clone()));
        // a node has no connection with itself, whatever was cut and healed
        if cut || key.0 == key.1 || self.connections.contains_key(&key) {
            return;
        }
        self.last_raw += 1;
        let raw = RawId(self.last_raw);
        let connection = Arc::new(Connection::new(raw, [a.clone(), b.clone()]));
        self.connections.insert(key, connection.clone());
        connection.announce();
    }
}

impl Shared {
    /// Adds a life of this node, and connects it with all others; who they are.
    fn add(
        &self,
        node: &NodeId,
        inbound: Inbound,
        settled: watch::Receiver<bool>,
    ) -> Result<(Arc<End>, BTreeSet<NodeId>), TransportError> {
        let mut state = self.state.lock();
        if let Some(live) = state.nodes.get(node) {
            return Err(TransportError::Superseded { node: node.clone(), live: live.peer.incarnation });
        }
        let clock = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_micros();
        // above every earlier life on this network, also when the clock went back
        state.last_incarnation =
            u64::try_from(clock).unwrap_or(u64::MAX).max(state.last_incarnation.saturating_add(1));
        let incarnation = Incarnation::new(state.last_incarnation).unwrap_or(Incarnation::MIN);
        let peer = Peer::new(node.clone(), incarnation);
        let mut links = Links::new(peer.clone(), inbound.terms().clone(), self.config.clone());
        links.settle();
        let end = Arc::new(End::new(peer, links, inbound, settled));
        let others: Vec<Arc<End>> = state.nodes.values().cloned().collect();
        for other in &others {
            state.connect(&end, other);
        }
        state.nodes.insert(node.clone(), end.clone());
        let cut = |other: &NodeId| {
            state.cuts.contains(&(node.clone(), other.clone()))
                || state.cuts.contains(&(other.clone(), node.clone()))
        };
        let untried =
            others.iter().map(|other| other.peer.node.clone()).filter(|other| !cut(other)).collect();
        Ok((end, untried))
    }

    fn remove(&self, end: &Arc<End>) {
        let mut state = self.state.lock();
        let here = state.nodes.get(&end.peer.node).is_some_and(|there| Arc::ptr_eq(there, end));
        if here {
            state.nodes.remove(&end.peer.node);
            let others: Vec<NodeId> = state.nodes.keys().cloned().collect();
            for other in others {
                if let Some(connection) = state.connections.remove(&pair(&end.peer.node, &other)) {
                    break_connection(&connection, [true, true]);
                }
            }
        }
        drop(state);
        end.leave();
    }

    /// Whether there is such a node.
    fn connect(&self, end: &Arc<End>, node: &NodeId) -> bool {
        let mut state = self.state.lock();
        let Some(other) = state.nodes.get(node).cloned() else { return false };
        if !end.is_gone() {
            state.connect(end, &other);
        }
        true
    }

    /// One end has closed the connection.
    fn closed(&self, connection: &Arc<Connection>) {
        connection.open.store(false, Ordering::SeqCst);
        let mut state = self.state.lock();
        let key = pair(&connection.ends[0].peer.node, &connection.ends[1].peer.node);
        if state.connections.get(&key).is_some_and(|there| Arc::ptr_eq(there, connection)) {
            state.connections.remove(&key);
        }
    }

    fn cut(&self, a: &str, b: &str, seen: [bool; 2]) {
        let (Ok(a), Ok(b)) = (NodeId::new(a), NodeId::new(b)) else { return };
        let mut state = self.state.lock();
        if let Some(connection) = state.connections.remove(&pair(&a, &b)) {
            let turned = connection.side(&a) == 1;
            break_connection(&connection, if turned { [seen[1], seen[0]] } else { seen });
        }
        state.cuts.insert((a.clone(), b.clone()));
        state.cuts.insert((b, a));
    }

    fn heal(&self, which: impl Fn(&NodeId, &NodeId) -> bool) {
        let mut state = self.state.lock();
        let healed: Vec<(NodeId, NodeId)> =
            state.cuts.iter().filter(|(from, to)| which(from, to)).cloned().collect();
        for cut in healed {
            state.cuts.remove(&cut);
            let (from, to) = &cut;
            if let Some(connection) = state.connections.get(&pair(from, to)) {
                connection.deaf[connection.side(from)].store(false, Ordering::SeqCst);
            }
            if let (Some(a), Some(b)) = (state.nodes.get(from).cloned(), state.nodes.get(to).cloned()) {
                state.connect(&a, &b);
            }
        }
    }

    /// Carries what one side of a connection has written to the other.
    fn carry(&self, connection: &Connection, side: usize, items: Vec<Item>) {
        let lost = !connection.open.load(Ordering::SeqCst) || connection.deaf[side].load(Ordering::SeqCst);
        if items.is_empty() || lost {
            return;
        }
        let other = connection.other(side);
        if !self.faulty.load(Ordering::Acquire) {
            other.push(items.into_iter().map(|item| Arrival { due: None, item }));
            return;
        }
        let names = (&connection.ends[side].peer.node, &other.peer.node);
        let now = Instant::now();
        let mut faults = self.faults.lock();
        let mut late = connection.late.lock();
        let mut arrivals = Vec::with_capacity(items.len());
        for item in items {
            let lane = item.lane();
            let fate = faults.fate(names, lane, item.is_acknowledgement(), &mut late[side], now);
            let Item::Packet(raw, packet) = item else {
                arrivals.push(Arrival { due: fate.due, item });
                continue;
            };
            if fate.copies == 0 && lane.is_some() {
                connection.taken(side, &packet);
            }
            for copy in 0..fate.copies {
                if copy > 0 {
                    connection.sent(side, &packet);
                }
                arrivals.push(Arrival { due: fate.due, item: Item::Packet(raw, packet.clone()) });
            }
        }
        drop((faults, late));
        other.push(arrivals);
    }
}

/// One node's end of a [`Network`]. Cloning gives the same end.
///
/// A second start while it runs is [`TransportError::AlreadyStarted`]; a start while another transport runs under
/// the same name is [`TransportError::Superseded`].
///
/// When the last clone is dropped the node leaves the network by itself.
#[derive(Clone)]
pub struct MemoryTransport(Arc<Inner>);

struct Inner {
    network: Network,
    node: Result<NodeId, NameError>,
    running: Mutex<Option<Arc<End>>>,
}

impl Drop for Inner {
    fn drop(&mut self) {
        if let Some(end) = self.running.get_mut() {
            end.stop();
        }
    }
}

impl fmt::Debug for MemoryTransport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryTransport").field("node", self.node()).finish_non_exhaustive()
    }
}

/// Takes the node off the network if its start is given up.
struct Unstarted<'a>(&'a Shared, Option<Arc<End>>);

impl Drop for Unstarted<'_> {
    fn drop(&mut self) {
        if let Some(end) = self.1.take() {
            self.0.remove(&end);
        }
    }
}

#[async_trait]
impl Transport for MemoryTransport {
    /// The name; `"?"` if the given one is none.
    fn node(&self) -> &NodeId {
        static NOBODY: std::sync::OnceLock<NodeId> = std::sync::OnceLock::new();
        match &self.0.node {
            Ok(node) => node,
            Err(_) => NOBODY.get_or_init(NodeId::unnamed),
        }
    }

    fn max_frame(&self) -> usize {
        self.0.network.0.config.max_frame
    }

    /// Returns when every node that runs has been linked, or has been tried for `suspect_after`.
    async fn start(&self, inbound: Inbound) -> Result<Peer, TransportError> {
        let failed = |reason: String| TransportError::Failed { reason };
        let node = self.0.node.clone()?;
        let runtime = tokio::runtime::Handle::try_current().map_err(|error| failed(error.to_string()))?;
        let shared = &self.0.network.0;
        let (settle, mut settled) = watch::channel(false);
        let end = {
            let mut running = self.0.running.lock();
            if running.as_ref().is_some_and(|end| !end.is_gone()) {
                return Err(TransportError::AlreadyStarted { node });
            }
            let (end, untried) = shared.add(&node, inbound, settled.clone())?;
            *running = Some(end.clone());
            runtime.spawn(seat::Seat::new(shared.clone(), end.clone(), untried, settle).run());
            end
        };
        let mut unstarted = Unstarted(shared, Some(end.clone()));
        let tried = settled.wait_for(|settled| *settled).await.is_ok();
        if !tried {
            return Err(failed("the node was taken off the network while it started".into()));
        }
        unstarted.1 = None;
        Ok(end.peer.clone())
    }

    async fn send(&self, to: &Peer, frame: Frame) -> Result<(), SendError> {
        let Some(end) = self.end() else { return Err(SendError::NoLink(frame)) };
        // of this life only: the bells of the next one are others
        end.rooms.send(to, frame, |to, frame| end.try_send(to, frame)).await
    }

    fn try_send(&self, to: &Peer, frame: Frame) -> Result<(), SendError> {
        match self.end() {
            Some(end) => end.try_send(to, frame),
            None => Err(SendError::NoLink(frame)),
        }
    }

    async fn shutdown(&self) {
        let end = self.0.running.lock().clone();
        let Some(end) = end else { return };
        end.stop();
        // the sender is dropped when the task has ended
        let mut ended = end.settled.clone();
        while ended.changed().await.is_ok() {}
        self.0.network.0.remove(&end);
        let mut running = self.0.running.lock();
        if running.as_ref().is_some_and(|there| Arc::ptr_eq(there, &end)) {
            *running = None;
        }
    }
}

impl MemoryTransport {
    /// The life that is on the network.
    fn end(&self) -> Option<Arc<End>> {
        self.0.running.lock().as_ref().filter(|end| !end.is_gone()).cloned()
    }
}
