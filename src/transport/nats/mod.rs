//! Over a NATS cluster that is there already: no open ports between the servers.
//!
//! ```no_run
//! use muster_router::{Muster, transport::nats::NatsTransport};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let transport = NatsTransport::builder("chat-1")
//!     .servers("nats://nats-1:4222,nats://nats-2:4222")
//!     .options(NatsTransport::connect_options().user_and_password("chat".into(), "secret".into()))
//!     .build()?;
//! let muster = Muster::builder("rooms").transport(transport).start().await?;
//! # drop(muster);
//! # Ok(())
//! # }
//! ```
//!
//! NATS has subjects and no connections, delivers at most once, and drops what a subscriber does not take in time.
//! So a **raw connection** is made of messages: each end draws a random number for it, each message has a number
//! in it, and a message that is missing, late or twice closes it. The link layer ([`super::link`]) then goes on
//! with its session on the next raw connection and sends again what was not acknowledged. In the same way it
//! survives a server that restarts: within `reconnect_grace` nothing is lost and nobody is reported down; after
//! it, peers are down, and up again when NATS is.
//!
//! Subjects, under `<prefix>.<scope>`: `presence` (every node says there, about every second, that it is alive),
//! `name.<node>` (held by the one live node of that name), `node.<node>.<life>.<lane>` (what is for this node).
//! An account that may publish and subscribe to `<prefix>.>` is enough; a start with less is refused. JetStream is
//! not used.
//!
//! Each node has one task. It reports to its [`Inbound`]; `try_send` only queues. Needs a tokio runtime with time
//! and I/O enabled, of either flavour.

mod builder;
mod directory;
mod end;
mod envelope;
mod join;
mod seat;
mod subject;
mod traffic;
mod wire;

use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use async_nats::{ConnectOptions, Subscriber};
use async_trait::async_trait;
use parking_lot::Mutex;
use tokio::sync::Notify;

pub use async_nats;
pub use builder::{NatsBuilder, NatsConfigError, NatsLimits};
pub use end::NatsStats;

use super::{Frame, Inbound, SendError, Transport, TransportError};
use crate::types::{NodeId, Peer};
use builder::Settings;
use end::{End, Progress};

/// One node's end of a scope over NATS. Cloning gives the same end. See the [module](self) for an example.
///
/// A second start while it runs is [`TransportError::AlreadyStarted`]; a start while another node of the same name
/// runs is [`TransportError::Superseded`]. A holder of the name that does not answer, as it is frozen or cut off, is
/// superseded by the newcomer: when it comes back it reports every peer down and ends.
///
/// When the last clone is dropped the node leaves by itself.
#[derive(Clone)]
pub struct NatsTransport(Arc<Inner>);

struct Inner {
    settings: Settings,
    running: Mutex<Running>,
    last_incarnation: AtomicU64,
}

#[derive(Default)]
struct Running {
    /// Ends a start that is under way.
    starting: Option<Arc<Notify>>,
    end: Option<Arc<End>>,
}

impl Drop for Inner {
    fn drop(&mut self) {
        if let Some(end) = &self.running.get_mut().end {
            end.stop();
        }
    }
}

impl fmt::Debug for NatsTransport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NatsTransport").field("node", self.node()).finish_non_exhaustive()
    }
}

impl NatsTransport {
    /// Begins a transport for the node of this name.
    pub fn builder(node: impl Into<String>) -> NatsBuilder {
        NatsBuilder::new(node.into())
    }

    /// The client's options as they suit links: it finds a dead server within seconds, and tries to come back at
    /// least every 250 ms, since links wait for `reconnect_grace` only. Add credentials and TLS to them.
    pub fn connect_options() -> ConnectOptions {
        ConnectOptions::new()
            .ping_interval(Duration::from_secs(2))
            .connection_timeout(Duration::from_secs(2))
            .reconnect_delay_callback(|attempts| match attempts {
                0 | 1 => Duration::ZERO,
                n => Duration::from_millis((2_u64 << n.min(8)).min(250)),
            })
    }

    /// What this life has been through; of the last one when it does not run.
    pub fn stats(&self) -> NatsStats {
        let end = self.0.running.lock().end.clone();
        end.map(|end| end.stats()).unwrap_or_default()
    }

    /// Ends at once, without a goodbye, as `kill -9` would: for tests of what your servers do then. Nothing is
    /// reported any more once this has returned, and what is sent until [`Transport::shutdown`] vanishes: nobody
    /// above may conclude from a missing link that a frame had no receiver. May be started again after a shutdown.
    pub async fn crash(&self) {
        let end = self.0.running.lock().end.clone();
        let Some(end) = end else { return };
        end.crash();
        end.ended().await;
    }

    fn new(settings: Settings) -> Self {
        Self(Arc::new(Inner { settings, running: Mutex::default(), last_incarnation: AtomicU64::new(0) }))
    }
}

/// Gives up a start that does not get to its end.
struct Unstarted<'a>(&'a Inner, Option<Arc<End>>);

impl Drop for Unstarted<'_> {
    fn drop(&mut self) {
        self.0.running.lock().starting = None;
        if let Some(end) = &self.1 {
            end.stop();
        }
    }
}

#[async_trait]
impl Transport for NatsTransport {
    fn node(&self) -> &NodeId {
        &self.0.settings.node
    }

    fn max_frame(&self) -> usize {
        self.0.settings.link.max_frame
    }

    /// Returns when every node that answers has been linked, or has been tried for `handshake_timeout`.
    async fn start(&self, inbound: Inbound) -> Result<Peer, TransportError> {
        let cancelled = Arc::new(Notify::new());
        {
            let mut running = self.0.running.lock();
            if running.starting.is_some() || running.end.as_ref().is_some_and(|end| !end.is_gone()) {
                return Err(TransportError::AlreadyStarted { node: self.node().clone() });
            }
            running.starting = Some(cancelled.clone());
        }
        let mut unstarted = Unstarted(&self.0, None);
        let stopped = || TransportError::Failed { reason: "it was shut down while it started".to_owned() };
        let end = tokio::select! {
            joined = self.0.join(inbound) => joined?,
            () = cancelled.notified() => return Err(stopped()),
        };
        unstarted.1 = Some(end.clone());
        let mut progress = end.progress.clone();
        let result = match progress.wait_for(|progress| *progress != Progress::Starting).await.as_deref() {
            Ok(Progress::Started) => Ok(end.links.lock().me().clone()),
            Ok(Progress::Superseded(live)) => {
                Err(TransportError::Superseded { node: self.node().clone(), live: *live })
            }
            Ok(Progress::Failed(reason)) => Err(failed(reason)),
            Ok(Progress::Starting) | Err(_) => Err(stopped()),
        };
        if result.is_ok() {
            unstarted.1 = None;
        } else {
            end.ended().await;
        }
        result
    }

    async fn send(&self, to: &Peer, frame: Frame) -> Result<(), SendError> {
        let end = self.0.running.lock().end.clone();
        let Some(end) = end else { return Err(SendError::NoLink(frame)) };
        // of this life only: the bells of the next one are others
        end.rooms.send(to, frame, |to, frame| end.try_send(to, frame)).await
    }

    fn try_send(&self, to: &Peer, frame: Frame) -> Result<(), SendError> {
        let end = self.0.running.lock().end.clone();
        match end {
            Some(end) => end.try_send(to, frame),
            None => Err(SendError::NoLink(frame)),
        }
    }

    async fn shutdown(&self) {
        let end = {
            let running = self.0.running.lock();
            if let Some(starting) = &running.starting {
                starting.notify_one();
            }
            running.end.clone()
        };
        if let Some(end) = end {
            end.stop();
            end.ended().await;
        }
    }
}

fn failed(error: impl fmt::Display) -> TransportError {
    TransportError::Failed { reason: error.to_string() }
}

/// What a node hears.
struct Ears {
    inbox: Subscriber,
    presence: Subscriber,
    name: Subscriber,
}

async fn within<T>(time: Duration, what: impl Future<Output = T>) -> Option<T> {
    tokio::time::timeout(time, what).await.ok()
}
