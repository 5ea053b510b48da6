//! A full mesh over TCP, with TLS or a shared secret: one connection for each pair of nodes.
//!
//! ```text
//!   try_send ─▶ links ─▶ writer ─▶ ┌───────────────┐ ─▶ reader ─▶ links ─▶ router
//!               queues,  one task, │ TLS, if any   │    one task, each once,
//!               acks,    many      │ TCP, no delay │    bytes are in order,
//!               resume   frames a  └───────────────┘    not      acknowledged
//!                        write                          copied
//!
//!   listener ─▶ gate ─▶ preamble, proof ─┐       one task for timers, dials and discovery:
//!               bounded handshakes       ├─▶ connection   book: seeds, DNS, what peers tell, gossip
//!   dial ────────────▶ preamble, proof ──┘
//! ```
//!
//! * **A short break loses nothing.** [`link`](crate::transport::link) numbers frames and writes them again on the next
//!   connection. Two that dial each other at once keep one of their connections, and an old one that is half open
//!   does not block a new one.
//! * **Urgent first.** Control goes before data, data before bulk. A frame of more than 64 KiB travels in pieces, so
//!   that nothing waits for all of it, and many short frames are one write.
//! * **Dead or slow.** A peer that acknowledges nothing is suspect, then down: [`LinkConfig`](super::link::LinkConfig)
//!   has the times. The queues to it are bounded, so whoever sends is told or waits.
//! * **Dialled for ever.** Whoever lost everybody finds them again: see the guide
//!   [on discovery](crate::guide::discovery).
//! * **Strangers are bounded** in bytes, time and number, counted by cause, and told no more than they may know: see
//!   the guide [on security](crate::guide::security). A loopback address needs neither TLS nor a secret; others do.
//!
//! ```
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use std::sync::Arc;
//! use muster_router::{Muster, transport::tcp::TcpTransport};
//!
//! let a = Arc::new(TcpTransport::builder("a").listen("127.0.0.1:0").build()?);
//! let rooms_at_a = Muster::builder("rooms").transport(a.clone()).start().await?;
//! let seed = a.local_addr().ok_or("it has not started")?;
//!
//! let b = TcpTransport::builder("b").listen("127.0.0.1:0").seed(seed.to_string()).build()?;
//! let rooms_at_b = Muster::builder("rooms").transport(b).start().await?;
//!
//! let mut inbox = rooms_at_b.subscribe("lobby").await?;
//! rooms_at_a.broadcast("lobby", "hello").await?;
//! assert_eq!(inbox.recv().await.ok_or("closed")?.payload(), "hello");
//! assert_eq!(a.stats().connections, 1);
//! # Ok(())
//! # }
//! ```

pub(crate) mod auth;
mod builder;
mod connection;
mod discovery;
mod driver;
mod listener;
mod mesh;
pub(crate) mod preamble;
mod record;
mod resolver;
mod stats;
pub(crate) mod tls;

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use arc_swap::ArcSwapOption;
use async_trait::async_trait;
use parking_lot::Mutex;
use tokio::net::TcpListener;

use crate::transport::{Frame, Inbound, SendError, Transport, TransportError};
use crate::types::{Incarnation, NodeId, Peer};
use builder::{HostPort, Settings};
use discovery::Book;
use driver::Driver;
use mesh::{Alive, Mesh, Phase};
use preamble::Preamble;
use stats::Counted;

pub use auth::{RefusalCause, Secret, SecretError};
pub use builder::{TcpBuilder, TcpConfigError, TcpLimits};
#[cfg(feature = "gossip")]
pub use discovery::GossipOptions;
pub use discovery::{DiscoveryOptions, DiscoveryStats, MemberInfo, MemberState};
pub use stats::TcpStats;
pub use tls::{TlsError, TlsOptions};

/// One node of a mesh over TCP. See the [module](self).
pub struct TcpTransport {
    settings: Arc<Settings>,
    counted: Arc<Counted>,
    /// The present life, or one that has ended. Written under the lock of `last`, read without: by every frame.
    mesh: ArcSwapOption<Mesh>,
    /// The highest incarnation so far.
    last: Mutex<u64>,
}

impl TcpTransport {
    /// A transport for the node of this name, which is checked in [`TcpBuilder::build`] with everything else.
    pub fn builder(node: impl Into<String>) -> TcpBuilder {
        TcpBuilder::new(node.into())
    }

    fn new(settings: Settings) -> Self {
        let settings = Arc::new(settings);
        Self { settings, counted: Arc::default(), mesh: ArcSwapOption::empty(), last: Mutex::default() }
    }

    /// Where it takes connections; `None` while it is not started.
    pub fn local_addr(&self) -> Option<SocketAddr> {
        self.mesh()?.local.get().copied()
    }

    /// Everybody else whom this node knows of, ordered by name, and how they are as seen from here; empty while it
    /// is not started. What is said of those that are not linked is the word of others, and may be late.
    pub fn members(&self) -> Vec<MemberInfo> {
        self.mesh().map_or_else(Vec::new, |mesh| mesh.members.lock().to_vec())
    }

    /// What happened so far.
    pub fn stats(&self) -> TcpStats {
        let mut stats = self.counted.stats();
        if let Some(mesh) = self.mesh() {
            let state = mesh.state.lock();
            stats.link = state.links.stats();
            stats.connections = state.connections.len();
        }
        stats
    }

    /// The life that has not ended.
    fn mesh(&self) -> Option<Arc<Mesh>> {
        self.mesh.load_full().filter(|mesh| !mesh.has_ended())
    }

    fn begin(&self, inbound: Inbound) -> Result<(Arc<Mesh>, Alive), TransportError> {
        let mut last = self.last.lock();
        if self.mesh().is_some() {
            return Err(TransportError::AlreadyStarted { node: self.settings.node.clone() });
        }
        let clock = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_micros();
        let clock = u64::try_from(clock).unwrap_or(u64::MAX);
        let clock = self.settings.incarnation.map_or(clock, Incarnation::get);
        // above every earlier life of this value, also when the clock went back
        *last = clock.max(last.saturating_add(1));
        let incarnation = Incarnation::new(*last).unwrap_or(Incarnation::MIN);
        let (mesh, alive) = Mesh::new(self.settings.clone(), self.counted.clone(), inbound, incarnation);
        self.mesh.store(Some(mesh.clone()));
        Ok((mesh, alive))
    }
}

impl fmt::Debug for TcpTransport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TcpTransport")
            .field("node", &self.settings.node)
            .field("listen", &self.settings.listen)
            .finish_non_exhaustive()
    }
}

impl Drop for TcpTransport {
    fn drop(&mut self) {
        if let Some(mesh) = &*self.mesh.load() {
            mesh.stop();
        }
    }
}

/// A start that was given up, by an error or by whoever waited for it.
struct Unstarted(Option<Arc<Mesh>>);

impl Drop for Unstarted {
    fn drop(&mut self) {
        if let Some(mesh) = self.0.take() {
            mesh.stop();
        }
    }
}

#[async_trait]
impl Transport for TcpTransport {
    fn node(&self) -> &NodeId {
        &self.settings.node
    }

    fn max_frame(&self) -> usize {
        self.settings.link.max_frame
    }

    /// Binds the address and returns when every seed has been tried once, or after
    /// [`DiscoveryOptions::settle_within`].
    async fn start(&self, inbound: Inbound) -> Result<Peer, TransportError> {
        let failed = |reason: String| TransportError::Failed { reason };
        tokio::runtime::Handle::try_current().map_err(|error| failed(error.to_string()))?;
        let (mesh, alive) = self.begin(inbound)?;
        let mut unstarted = Unstarted(Some(mesh.clone()));
        let listener = bind(&self.settings).await.map_err(failed)?;
        let local = listener.local_addr().map_err(|error| failed(error.to_string()))?;
        let advertise = match &self.settings.advertise {
            Some(address) => resolve("advertise", address).await.map_err(failed)?.remove(0),
            None => local,
        };
        let _ = mesh.local.set(local);
        launch(&mesh, alive, listener, advertise).map_err(failed)?;
        let mut phase = mesh.phase.clone();
        let started = phase.wait_for(|phase| !matches!(phase, Phase::Starting)).await;
        if !started.is_ok_and(|phase| matches!(*phase, Phase::Running)) {
            return Err(mesh.failure());
        }
        unstarted.0 = None;
        let me = mesh.settle();
        let mut last = self.last.lock();
        *last = (*last).max(me.incarnation.get());
        Ok(me)
    }

    async fn send(&self, to: &Peer, frame: Frame) -> Result<(), SendError> {
        let Some(mesh) = self.mesh() else { return Err(SendError::NoLink(frame)) };
        mesh.rooms.send(to, frame, |to, frame| mesh.try_send(to, frame)).await
    }

    fn try_send(&self, to: &Peer, frame: Frame) -> Result<(), SendError> {
        match &*self.mesh.load() {
            Some(mesh) if !mesh.has_ended() => mesh.try_send(to, frame),
            Some(_) | None => Err(SendError::NoLink(frame)),
        }
    }

    async fn shutdown(&self) {
        let Some(mesh) = self.mesh.load_full() else { return };
        mesh.stop();
        // the last sender is dropped when the last task has ended
        let mut phase = mesh.phase.clone();
        while phase.changed().await.is_ok() {}
        let _last = self.last.lock();
        if self.mesh.load().as_ref().is_some_and(|there| Arc::ptr_eq(there, &mesh)) {
            self.mesh.store(None);
        }
    }
}

async fn resolve(option: &str, address: &HostPort) -> Result<Vec<SocketAddr>, String> {
    let text = address.as_str();
    let found: Vec<SocketAddr> = match tokio::net::lookup_host(text).await {
        Ok(found) => found.collect(),
        Err(error) => return Err(format!("{option} {text} was not resolved: {error}")),
    };
    if found.is_empty() { Err(format!("{option} {text} has no address")) } else { Ok(found) }
}

async fn bind(settings: &Settings) -> Result<TcpListener, String> {
    let addresses = resolve("listen", &settings.listen).await?;
    if let Some(open) = addresses.iter().find(|address| !address.ip().is_loopback() && !settings.exposed) {
        return Err(format!(
            "listen {:?} stands for {open}, which others can reach, with neither TLS nor a secret",
            settings.listen
        ));
    }
    TcpListener::bind(addresses.as_slice())
        .await
        .map_err(|error| format!("could not listen on {:?}: {error}", settings.listen))
}

/// Starts the tasks of a life.
fn launch(
    mesh: &Arc<Mesh>,
    alive: Alive,
    listener: TcpListener,
    advertise: SocketAddr,
) -> Result<(), String> {
    let random = || getrandom::u64().map_err(|error| format!("no random numbers: {error}"));
    let settings = &mesh.settings;
    let ours = Preamble {
        node: settings.node.clone(),
        scope: mesh.inbound.terms().scope.clone(),
        advertise: advertise.to_string(),
        instance: random()?,
    };
    let me = mesh.state.lock().links.me().clone();
    let config = discovery::Config {
        me,
        advertise,
        seeds: settings.seeds.clone(),
        dns: settings.dns.clone(),
        options: settings.discovery.clone(),
        gossip: settings.gossip.clone(),
    };
    let book = Book::new(config, random()?);
    tokio::spawn(listener::listen(mesh.clone(), alive.clone(), ours.clone(), listener));
    tokio::spawn(Driver::new(mesh.clone(), alive, ours, book).run());
    Ok(())
}
