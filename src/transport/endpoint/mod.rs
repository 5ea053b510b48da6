//! Everything of a transport but the network: for a transport of your own.
//!
//! An [`Endpoint`] is one node's end of the network. It has the queues, the tasks and the timers, drives the link
//! layer ([`super::link`]) and reports to the router; so the [`Transport`](super::Transport) contract is kept by it
//! and not by you. What is left for a network is to open connections that carry messages (`Bytes`, whole and in
//! order): a `Stream` and a `Sink` each, and to say who may be there.
//!
//! ```text
//!   your transport                         Endpoint                                  router
//!   ──────────────                         ────────                                  ──────
//!   start ───────────────▶ Endpoint::start(inbound, |running| …)
//!   a connection came in ▶ Running::accepted(stream, sink) ─┐
//!   whom to dial? ───────▶ Running::attempt(node) ──▶ dial  ├──▶ Links ──▶ peer_up, frame, peer_down, …
//!                          Attempt::carry(stream, sink) ────┘
//!   try_send, send, shutdown: handed through
//! ```
//!
//! The guide [`own_transport`](crate::guide::own_transport) goes through it step by step;
//! `examples/custom_transport.rs` is a complete transport over WebSockets.

mod dials;
mod life;
mod seat;
mod wire;

use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use futures_core::Stream;
use futures_sink::Sink;
use parking_lot::Mutex;

use super::link::{LinkConfig, LinkStats, Links};
use super::{Frame, Inbound, SendError, TransportError};
use crate::types::{Incarnation, NodeId, Peer};
use life::{Arrival, Life, Progress, Stop};

/// One node's end of a network. See the [module](self).
///
/// A transport holds one and hands its calls through. Dropped while it runs, it says goodbye in the background.
/// Needs a tokio runtime with time enabled.
pub struct Endpoint {
    node: NodeId,
    config: LinkConfig,
    max_connections: usize,
    current: Mutex<Current>,
}

#[derive(Default)]
struct Current {
    life: Option<Arc<Life>>,
    last: Option<Incarnation>,
}

impl Endpoint {
    /// The end of this node. Choose [`LinkConfig::max_frame`] so that your network carries messages of that size
    /// and [`MESSAGE_OVERHEAD`], and in clearly less than [`LinkConfig::ping_timeout`]. A scope whose
    /// [`Config`](crate::Config) allows longer frames than that does not start.
    pub fn new(node: NodeId, config: LinkConfig) -> Self {
        Self { node, config, max_connections: MAX_CONNECTIONS, current: Mutex::default() }
    }

    /// How many connections may be carried at a time, those that came in and those that were dialled ([`MAX_CONNECTIONS`]
    /// unless said otherwise; at least 1). One too many is dropped and counted ([`Endpoint::turned_away`]). A node needs
    /// one for each peer, for a moment two.
    #[must_use]
    pub fn max_connections(mut self, connections: usize) -> Self {
        self.max_connections = connections.max(1);
        self
    }

    /// For [`Transport::node`](super::Transport::node).
    pub fn node(&self) -> &NodeId {
        &self.node
    }

    /// For [`Transport::max_frame`](super::Transport::max_frame).
    pub fn max_frame(&self) -> usize {
        self.config.max_frame
    }

    /// For [`Transport::start`](super::Transport::start): begins a life under a higher incarnation than the last.
    ///
    /// `join` gets the [`Running`] end, spawns what accepts and dials connections ([`Running::spawn`]), and returns
    /// the nodes that are known to be there (without connecting to them first). This waits until each of those is
    /// linked, has refused us or could not be reached, for `handshake_timeout` at most; then discovery has settled.
    ///
    /// Cancel-safe: dropped before it returns, the life ends and its tasks with it.
    ///
    /// # Errors
    /// [`TransportError::AlreadyStarted`], [`TransportError::Superseded`] if a live node of this name refused us
    /// while we started, and what `join` gives; nothing runs then.
    pub async fn start<J, N>(&self, inbound: Inbound, join: J) -> Result<Peer, TransportError>
    where
        J: FnOnce(Running) -> Result<N, TransportError>,
        N: IntoIterator<Item = NodeId>,
    {
        let failed = |reason: String| TransportError::Failed { reason };
        let runtime = tokio::runtime::Handle::try_current().map_err(|error| failed(error.to_string()))?;
        let (life, mut progress) = {
            let mut current = self.current.lock();
            if current.life.as_ref().is_some_and(|life| !life.is_gone()) {
                return Err(TransportError::AlreadyStarted { node: self.node.clone() });
            }
            let incarnation = next_incarnation(current.last);
            current.last = Some(incarnation);
            let peer = Peer::new(self.node.clone(), incarnation);
            let mut links = Links::new(peer, inbound.terms().clone(), self.config.clone());
            // both ends may dial, and two connections of one life that can still change look like two lives
            links.settle();
            let (tell, progress) = tokio::sync::watch::channel(Progress::Starting);
            let life =
                Arc::new(Life::new(links, inbound, runtime.clone(), progress.clone(), self.max_connections));
            runtime.spawn(seat::Seat::new(life.clone(), &self.config, tell).run());
            current.life = Some(life.clone());
            (life, progress)
        };
        let mut unstarted = Unstarted(Some(life.clone()));
        let others = match join(Running(life.clone())) {
            Ok(others) => others.into_iter().filter(|node| *node != self.node).collect(),
            Err(error) => {
                self.abort().await;
                return Err(error);
            }
        };
        life.push(Arrival::Expect(others));
        let reached = match progress.wait_for(|progress| *progress != Progress::Starting).await {
            Ok(reached) => reached.clone(),
            Err(_) => return Err(failed("the node was stopped while it started".into())),
        };
        match reached {
            Progress::Settled(peer) => {
                unstarted.0 = None;
                Ok(peer)
            }
            Progress::Superseded(live) => {
                self.shutdown().await;
                Err(TransportError::Superseded { node: self.node.clone(), live })
            }
            Progress::Starting => Err(failed("the node was stopped while it started".into())),
        }
    }

    /// For [`Transport::try_send`](super::Transport::try_send).
    ///
    /// # Errors
    /// [`SendError`], which gives the frame back.
    pub fn try_send(&self, to: &Peer, frame: Frame) -> Result<(), SendError> {
        match self.life() {
            Some(life) => life.try_send(to, frame),
            None => Err(SendError::NoLink(frame)),
        }
    }

    /// For [`Transport::send`](super::Transport::send). Cancel-safe: dropped before it returns, the frame was not
    /// accepted.
    ///
    /// # Errors
    /// [`SendError::NoLink`] or [`SendError::TooLarge`], which give the frame back.
    pub async fn send(&self, to: &Peer, frame: Frame) -> Result<(), SendError> {
        match self.life() {
            Some(life) => life.send(to, frame).await,
            None => Err(SendError::NoLink(frame)),
        }
    }

    /// For [`Transport::shutdown`](super::Transport::shutdown): says goodbye to everybody, after what is queued (for
    /// a second at most), and ends all tasks. Cancel-safe: once begun it goes on.
    pub async fn shutdown(&self) {
        self.end(Stop::Goodbye).await;
    }

    /// Ends without a goodbye, as a killed process does: for tests.
    pub async fn abort(&self) {
        self.end(Stop::Abort).await;
    }

    /// Breaks the connection to this node, as a network does now and then: for tests. It may be dialled again at
    /// once.
    pub fn break_connection(&self, node: &NodeId) {
        if let Some(life) = self.life() {
            life.push(Arrival::Break(node.clone()));
        }
    }

    /// What went wrong on the links of this life so far; all zero while nothing runs.
    pub fn stats(&self) -> LinkStats {
        self.life().map(|life| life.links.lock().stats()).unwrap_or_default()
    }

    /// How many connections were dropped at once in this life, since there were [too many](Endpoint::max_connections);
    /// 0 while nothing runs.
    pub fn turned_away(&self) -> u64 {
        self.life().map_or(0, |life| life.turned_away.load(std::sync::atomic::Ordering::Relaxed))
    }

    fn life(&self) -> Option<Arc<Life>> {
        self.current.lock().life.as_ref().filter(|life| !life.is_gone()).cloned()
    }

    async fn end(&self, how: Stop) {
        let life = self.current.lock().life.clone();
        let Some(life) = life else { return };
        life.stop(how);
        life.ended().await;
        let mut current = self.current.lock();
        if current.life.as_ref().is_some_and(|there| Arc::ptr_eq(there, &life)) {
            current.life = None;
        }
    }
}

/// How many connections an [`Endpoint`] carries at a time, unless [`Endpoint::max_connections`] says otherwise.
pub const MAX_CONNECTIONS: usize = 4096;

/// What a message is longer than the frame in it, in bytes: at most.
pub const MESSAGE_OVERHEAD: usize = 64;

/// Above every earlier life of this value, also when the clock went back.
fn next_incarnation(last: Option<Incarnation>) -> Incarnation {
    let clock = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_micros();
    let clock = Incarnation::new(u64::try_from(clock).unwrap_or(u64::MAX)).unwrap_or(Incarnation::MIN);
    last.map_or(clock, |last| clock.max(last.next()))
}

/// Ends the life if its start is given up.
struct Unstarted(Option<Arc<Life>>);

impl Drop for Unstarted {
    fn drop(&mut self) {
        if let Some(life) = self.0.take() {
            life.stop(Stop::Abort);
        }
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        if let Some(life) = self.current.get_mut().life.take() {
            life.stop(Stop::Goodbye);
        }
    }
}

impl fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Endpoint").field("node", &self.node).finish_non_exhaustive()
    }
}

/// One life of an [`Endpoint`], for the tasks of a transport. Cheap to clone; outlives nothing: when the life is
/// over, all of it does nothing.
#[derive(Clone)]
pub struct Running(Arc<Life>);

impl Running {
    /// This node.
    pub fn node(&self) -> &NodeId {
        &self.0.node
    }

    /// Runs a task of the transport. It is dropped, at its next `await`, when the life ends; by then the goodbyes
    /// have been written.
    pub fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        self.0.spawn(task);
    }

    /// Whether to dial this node now: `None` while there is a connection to it or an attempt under way, and for a
    /// while after one that failed (5 ms doubling to a second, with jitter) or was refused (10 s). Ask again now and
    /// then, for every node that your discovery knows; one's own name is never wanted.
    pub fn attempt(&self, node: &NodeId) -> Option<Attempt> {
        self.0.attempt(node).then(|| Attempt { life: self.0.clone(), node: node.clone() })
    }

    /// Carries a connection that came in, until it breaks or is no longer wanted; then both halves are dropped.
    /// `who` is the node at its other end if your network has authenticated it: under another name it gets no link.
    /// With `None` it is believed.
    ///
    /// Returns at once if [too many](Endpoint::max_connections) connections are carried.
    ///
    /// The two halves work at the same time. What the stream gives is what the other end's sink was given.
    pub async fn accepted<R, W, E>(&self, who: Option<NodeId>, stream: R, sink: W)
    where
        R: Stream<Item = Result<Bytes, E>>,
        W: Sink<Bytes>,
    {
        wire::carry(&self.0, who, false, stream, sink).await;
    }
}

impl fmt::Debug for Running {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Running").field(&self.0.node).finish()
    }
}

/// The right to dial one node once. Dropped without [`Attempt::carry`], the node counts as tried and not reached.
#[must_use = "dropped, it counts as a dial that failed"]
pub struct Attempt {
    life: Arc<Life>,
    node: NodeId,
}

impl Attempt {
    /// Whom to dial.
    pub fn node(&self) -> &NodeId {
        &self.node
    }

    /// Carries the connection, until it breaks or is no longer wanted; then both halves are dropped. If another node
    /// than the one that was dialled answers, it gets no link.
    pub async fn carry<R, W, E>(self, stream: R, sink: W)
    where
        R: Stream<Item = Result<Bytes, E>>,
        W: Sink<Bytes>,
    {
        wire::carry(&self.life, Some(self.node.clone()), true, stream, sink).await;
    }
}

impl Drop for Attempt {
    fn drop(&mut self) {
        self.life.attempted(&self.node);
    }
}

impl fmt::Debug for Attempt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Attempt").field(&self.node).finish()
    }
}
