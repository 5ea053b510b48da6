//! What the callers of a transport share with its task.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use async_nats::{Event, ServerError};
use parking_lot::Mutex;
use tokio::sync::{Notify, watch};
use tokio::time::Instant;

use super::builder::OnEvent;
use crate::transport::Inbound;
use crate::transport::link::{LinkStats, Links, Time};
use crate::transport::rooms::Rooms;
use crate::transport::{Frame, SendError};
use crate::types::{Incarnation, Peer};

/// How often something happened in one life of a [`NatsTransport`](super::NatsTransport).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct NatsStats {
    /// Whether the client is connected to a server now.
    pub connected: bool,
    /// How many peers are up.
    pub peers: usize,
    /// NATS messages that came.
    pub messages_in: u64,
    /// NATS messages that were sent.
    pub messages_out: u64,
    /// Packets of the link layer that were sent; more than `messages_out` where small ones shared a message.
    pub packets_out: u64,
    /// Payload bytes of the messages that came.
    pub bytes_in: u64,
    /// Payload bytes of the messages that were sent.
    pub bytes_out: u64,
    /// Messages that could not be decoded, or had no place: dropped.
    pub malformed: u64,
    /// Messages missing from a raw connection: it was closed, and what was missing came on the next one.
    pub gaps: u64,
    /// Raw connections that were opened, by either end.
    pub opened: u64,
    /// Wishes for a raw connection that this node has sent.
    pub dials: u64,
    /// Connections that were refused for their terms or their name, by either end.
    pub refused: u64,
    /// Lives of nodes that were ignored, since too many were known ([`NatsLimits::peers`](super::NatsLimits)).
    pub too_many: u64,
    /// How often the client said that it had dropped a message, since its task was too slow.
    pub slow_consumers: u64,
    /// Errors that the server or the client has reported.
    pub errors: u64,
    /// How often the connection to NATS was lost.
    pub disconnects: u64,
    /// What the links have been through.
    pub link: LinkStats,
}

#[derive(Debug, Default)]
pub(super) struct Counters {
    pub(super) connected: AtomicBool,
    pub(super) messages_in: AtomicU64,
    pub(super) messages_out: AtomicU64,
    pub(super) packets_out: AtomicU64,
    pub(super) bytes_in: AtomicU64,
    pub(super) bytes_out: AtomicU64,
    pub(super) malformed: AtomicU64,
    pub(super) gaps: AtomicU64,
    pub(super) opened: AtomicU64,
    pub(super) dials: AtomicU64,
    pub(super) refused: AtomicU64,
    pub(super) too_many: AtomicU64,
    pub(super) slow_consumers: AtomicU64,
    pub(super) errors: AtomicU64,
    pub(super) disconnects: AtomicU64,
}

pub(super) fn count(counter: &AtomicU64, by: usize) {
    counter.fetch_add(by as u64, Ordering::Relaxed);
}

/// Where the client's own tasks report to.
#[derive(Default)]
pub(super) struct Signals {
    /// Wakes the transport's task.
    pub(super) wake: Notify,
    pub(super) counters: Counters,
    pub(super) on_event: Option<OnEvent>,
    /// What the server has first refused to this account.
    pub(super) denial: Mutex<Option<String>>,
    pub(super) denied: Notify,
}

/// How many errors of the server are logged as warnings; a refused subject gives one for each message.
const WARNINGS: u64 = 16;

impl Signals {
    pub(super) fn hear(&self, event: &Event) {
        match event {
            Event::SlowConsumer(_) => count(&self.counters.slow_consumers, 1),
            Event::ServerError(error) => self.hear_error(error),
            Event::ClientError(_) => count(&self.counters.errors, 1),
            Event::Connected
            | Event::Disconnected
            | Event::LameDuckMode
            | Event::Draining
            | Event::Closed => {}
        }
        // a reconnect is acted upon at once
        self.wake.notify_one();
        if let Some(hear) = &self.on_event {
            hear(event);
        }
    }

    fn hear_error(&self, error: &ServerError) {
        if self.counters.errors.fetch_add(1, Ordering::Relaxed) < WARNINGS {
            tracing::warn!(%error, "the NATS server reports an error; more than a few are only counted");
        }
        if let ServerError::Other(text) = error
            && text.to_ascii_lowercase().contains("permissions violation")
        {
            self.denial.lock().get_or_insert_with(|| error.to_string());
            self.denied.notify_one();
        }
    }

    /// Returns when the server has refused something to this account, with its words. Cancel safe.
    pub(super) async fn denied(&self) -> String {
        loop {
            if let Some(denial) = self.denial.lock().take() {
                return denial;
            }
            self.denied.notified().await;
        }
    }
}

/// How a start has gone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Progress {
    Starting,
    Started,
    /// Another node holds the name, in this life.
    Superseded(Incarnation),
    /// Nothing will come of it.
    Failed(&'static str),
}

/// One life of a node on NATS.
pub(super) struct End {
    pub(super) links: Mutex<Links>,
    pub(super) inbound: Inbound,
    pub(super) signals: Arc<Signals>,
    /// Asked to shut down.
    pub(super) stopping: AtomicBool,
    /// Asked to vanish.
    pub(super) crashed: AtomicBool,
    /// The task has ended.
    gone: AtomicBool,
    /// Its sender is gone when the task has ended.
    pub(super) progress: watch::Receiver<Progress>,
    epoch: Instant,
    pub(super) rooms: Rooms,
}

impl End {
    pub(super) fn new(
        links: Links,
        inbound: Inbound,
        signals: Arc<Signals>,
        progress: watch::Receiver<Progress>,
    ) -> Self {
        Self {
            links: Mutex::new(links),
            inbound,
            signals,
            stopping: AtomicBool::new(false),
            crashed: AtomicBool::new(false),
            gone: AtomicBool::new(false),
            progress,
            epoch: Instant::now(),
            rooms: Rooms::default(),
        }
    }

    pub(super) fn now(&self) -> Time {
        Instant::now().saturating_duration_since(self.epoch)
    }

    pub(super) fn instant(&self, at: Time) -> Instant {
        self.epoch + at
    }

    pub(super) fn stop(&self) {
        self.stopping.store(true, Ordering::Release);
        self.signals.wake.notify_one();
    }

    pub(super) fn crash(&self) {
        self.crashed.store(true, Ordering::Release);
        self.signals.wake.notify_one();
    }

    /// What it sends vanishes.
    pub(super) fn has_crashed(&self) -> bool {
        self.crashed.load(Ordering::Acquire) && !self.stopping.load(Ordering::Acquire)
    }

    /// What a crashed node sends vanishes; after any other end there is no link.
    pub(super) fn try_send(&self, to: &Peer, frame: Frame) -> Result<(), SendError> {
        if self.has_crashed() {
            return Ok(());
        }
        if self.is_gone() {
            return Err(SendError::NoLink(frame));
        }
        self.links.lock().try_send(to, frame, self.now())?;
        self.signals.wake.notify_one();
        Ok(())
    }

    pub(super) fn is_gone(&self) -> bool {
        self.gone.load(Ordering::Acquire)
    }

    /// The task has ended: nobody waits for room any more.
    pub(super) fn leave(&self) {
        self.gone.store(true, Ordering::Release);
        self.signals.counters.connected.store(false, Ordering::Relaxed);
        self.rooms.close();
    }

    /// Returns when the task has ended.
    pub(super) async fn ended(&self) {
        let mut progress = self.progress.clone();
        while progress.changed().await.is_ok() {}
    }

    pub(super) fn stats(&self) -> NatsStats {
        let (link, peers) = {
            let links = self.links.lock();
            (links.stats(), links.peers().count())
        };
        let counters = &self.signals.counters;
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        NatsStats {
            connected: counters.connected.load(Ordering::Relaxed),
            peers,
            messages_in: of(&counters.messages_in),
            messages_out: of(&counters.messages_out),
            packets_out: of(&counters.packets_out),
            bytes_in: of(&counters.bytes_in),
            bytes_out: of(&counters.bytes_out),
            malformed: of(&counters.malformed),
            gaps: of(&counters.gaps),
            opened: of(&counters.opened),
            dials: of(&counters.dials),
            refused: of(&counters.refused),
            too_many: of(&counters.too_many),
            slow_consumers: of(&counters.slow_consumers),
            errors: of(&counters.errors),
            disconnects: of(&counters.disconnects),
            link,
        }
    }
}
