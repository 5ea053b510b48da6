//! Drives a node on tokio: the only place that spawns, sleeps or reads a clock.
//!
//! ```text
//!   transport ──▶ Port (Receiver) ──▶ Driver ──▶ Node ──▶ effects ──▶ pump ─┬─▶ senders: one task a peer and lane
//!                                       ▲                                   ├─▶ work task, watchers, events
//!   Muster ─────────────────────────────┘   timer task ──▶ handle_timeout   └─▶ joins that wait
//! ```
//!
//! Whoever brings an input (a transport's thread, a caller, the timer) also carries out what follows from it
//! ([`Driver::pump`]), so an input has taken effect when the call returns. Only what has to wait for room goes
//! to a task. No lock is held across an await or while a user's code runs.

#[cfg(feature = "cache")]
pub(crate) mod cache;
pub(crate) mod calls;
pub(crate) mod casts;
pub(crate) mod counting;
pub(crate) mod events;
pub(crate) mod mailbox;
pub(crate) mod member;
pub(crate) mod message;
mod nesting;
mod port;
pub(crate) mod registry;
pub(crate) mod stats;
mod tasks;
mod waiting;

use std::collections::HashMap;
use std::hash::{BuildHasher, Hasher};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;
use tokio::sync::{Notify, watch};
use tokio::task::JoinHandle;
use tokio::time::Instant;

use crate::config::Config;
use crate::error::StartError;
use crate::node::{
    Effect, JoinRefused, LocalMembers, Node, NodeEvent, Published, Settings, Status, Ticket, Time,
};
use crate::transport::{Inbound, Terms, Transport, TransportError, wire};
use crate::types::{Group, Peer};
use crate::view::{View, ViewHash};

#[cfg(feature = "cache")]
use cache::Late;
use calls::Calls;
use casts::Casts;
use events::{Event, EventHub};
use member::{Member, Target};
use message::Message;
use port::Port;
use registry::Registry;
use stats::Stats;
use tasks::Link;
use waiting::Waiting;

/// Status and view of a scope at one moment; what [`Muster::changes`](crate::Muster::changes) gives.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ScopeState {
    /// How sure this node is of its routing table.
    pub status: Status,
    /// The committed view.
    pub view: View,
    /// Its hash.
    pub view_hash: ViewHash,
    /// Whether the node has found out, after its start, if it has peers; joins wait for it.
    pub settled: bool,
    /// Whether this node drains.
    pub draining: bool,
    /// Whether a later life of this node's name has taken its place.
    pub superseded: bool,
    /// Whether the scope is stopped.
    pub stopped: bool,
}

impl ScopeState {
    fn of(published: &Published) -> Self {
        Self {
            status: published.status,
            view: published.view.clone(),
            view_hash: published.hash,
            settled: published.settled,
            draining: published.draining,
            superseded: published.superseded,
            stopped: false,
        }
    }
}

/// A start that is given up while its transport starts takes the transport down again.
struct Unfinished {
    transport: Option<Arc<dyn Transport>>,
    runtime: tokio::runtime::Handle,
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        if let Some(transport) = self.transport.take() {
            drop(self.runtime.spawn(async move { transport.shutdown().await }));
        }
    }
}

/// How far the end of a scope has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    Running,
    Stopping,
    Stopped,
}

/// One scope on one node, running.
pub(crate) struct Driver {
    pub(crate) node: Node<Member>,
    pub(crate) config: Config,
    pub(crate) scope: String,
    pub(crate) stats: Stats,
    pub(crate) events: EventHub,
    pub(crate) state: watch::Sender<ScopeState>,
    pub(crate) registry: Registry,
    pub(crate) joins: Waiting<Ticket, Result<(), JoinRefused>>,
    pub(crate) casts: Casts,
    pub(crate) calls: Calls,
    #[cfg(feature = "cache")]
    pub(crate) caches: cache::Caches,
    pub(crate) transport: Arc<dyn Transport>,
    runtime: tokio::runtime::Handle,
    start: Instant,
    links: Mutex<HashMap<Peer, Link>>,
    tasks: Mutex<Vec<JoinHandle<()>>>,
    tickets: AtomicU64,
    work: Notify,
    /// Wakes those who wait for the node's state to change (a drain).
    pub(crate) pulse: Notify,
    stopped: AtomicBool,
    phase: watch::Sender<Phase>,
    superseded_by: OnceLock<Peer>,
    /// Reasons for which a frame was ignored and that are logged already.
    logged: Mutex<Vec<wire::WireError>>,
}

// Start and end.
impl Driver {
    /// Starts the transport and everything that runs.
    pub(crate) async fn start(
        scope: String,
        config: Config,
        transport: Arc<dyn Transport>,
    ) -> Result<Arc<Self>, StartError> {
        let runtime = tokio::runtime::Handle::try_current().map_err(|error| {
            StartError::Transport(TransportError::Failed { reason: format!("no tokio runtime: {error}") })
        })?;
        let chunk_bytes = check_frames(&config, transport.max_frame())?;
        let port = Arc::new(Port::new());
        let terms = Terms { scope: scope.clone(), vnodes: config.vnodes, protocol: u16::from(wire::MAJOR) };
        let receiver: Arc<dyn crate::transport::Receiver> = port.clone();
        let inbound = Inbound::new(Arc::downgrade(&receiver), terms);
        let mut unfinished = Unfinished { transport: Some(transport.clone()), runtime: runtime.clone() };
        let started = transport.start(inbound).await;
        unfinished.transport = None;
        let me = match started {
            Ok(me) => me,
            Err(TransportError::AlreadyStarted { node }) => {
                return Err(StartError::AlreadyJoined { scope, node });
            }
            Err(error) => return Err(error.into()),
        };
        let mut settings = Settings::from(&config);
        settings.hash_seed = random_seed();
        settings.chunk_bytes = settings.chunk_bytes.min(chunk_bytes);
        let start = Instant::now();
        let node = Node::new(me, settings, Time::ZERO);
        let state = watch::Sender::new(ScopeState::of(&node.published()));
        let driver = Arc::new(Self {
            node,
            config,
            scope,
            stats: Stats::default(),
            events: EventHub::default(),
            state,
            registry: Registry::new(),
            joins: Waiting::new(),
            casts: Casts::new(),
            calls: Calls::new(),
            #[cfg(feature = "cache")]
            caches: cache::Caches::default(),
            transport,
            runtime,
            start,
            links: Mutex::default(),
            tasks: Mutex::default(),
            tickets: AtomicU64::new(1),
            work: Notify::new(),
            pulse: Notify::new(),
            stopped: AtomicBool::new(false),
            phase: watch::Sender::new(Phase::Running),
            superseded_by: OnceLock::new(),
            logged: Mutex::default(),
        });
        driver.spawn_tasks(port.clone());
        // what the transport has reported meanwhile
        port.open(&driver);
        Ok(driver)
    }

    /// Begins the end. The rest is done by a task that runs already, so this may be called from a drop.
    pub(crate) fn begin_stop(&self) {
        self.stopped.store(true, Ordering::Release);
        self.phase.send_if_modified(|phase| {
            let running = *phase == Phase::Running;
            if running {
                *phase = Phase::Stopping;
            }
            running
        });
    }

    /// Waits for the end to be complete.
    pub(crate) async fn stopped(&self) {
        // the sender is ours: it cannot be gone
        let _ = self.phase.subscribe().wait_for(|phase| *phase == Phase::Stopped).await;
    }

    pub(crate) fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Acquire)
    }

    /// Takes everybody out; the transport is down already.
    fn close(&self) {
        self.joins.close();
        self.casts.close();
        self.calls.close();
        let members = self.registry.close();
        let now = self.now();
        for member in &members {
            if let Some(Target::Mailbox(mailbox)) = member.target() {
                mailbox.close(mailbox::ClosedReason::Stopped);
            }
            // the node's handle is never the last one here: ours is dropped below, under no lock
            drop(self.node.leave(member.group().as_bytes(), member.id().number, now));
        }
        drop(members);
        self.events.close();
        self.state.send_modify(|state| state.stopped = true);
        self.pulse.notify_waiters();
    }
}

// Time.
impl Driver {
    /// Time since the start, on tokio's clock (which tests may pause).
    pub(crate) fn now(&self) -> Time {
        self.since(Instant::now())
    }

    /// The same for a reading of the clock.
    pub(crate) fn since(&self, instant: Instant) -> Time {
        instant.saturating_duration_since(self.start)
    }

    /// Waits until so long after the start.
    #[cfg(feature = "cache")]
    pub(crate) fn sleep_until(&self, time: Time) -> tokio::time::Sleep {
        tokio::time::sleep_until(self.start + time.min(FOREVER))
    }

    pub(crate) fn next_ticket(&self) -> Ticket {
        Ticket(self.tickets.fetch_add(1, Ordering::Relaxed))
    }

    /// The life that has taken over this node's name, if it is known.
    pub(crate) fn superseded_by(&self) -> Option<&Peer> {
        self.superseded_by.get()
    }
}

// Effects.
impl Driver {
    /// Carries out what the node asks for. Called after every input, by whoever brought it.
    pub(crate) fn pump(&self) {
        let mut effects = Vec::new();
        while self.node.poll_effects(&mut effects) {
            effects.drain(..).for_each(|effect| self.carry_out(effect));
        }
    }

    fn carry_out(&self, effect: Effect) {
        match effect {
            Effect::Transmit(peer) => self.wake_senders(&peer),
            Effect::Work => self.work.notify_one(),
            Effect::Joined { ticket, result } => self.joins.answer(&ticket, result),
            Effect::Changed => self.publish_change(),
            Effect::Event(event) => self.publish_event(event),
            Effect::Settled(receipt) => self.settle(receipt),
            Effect::Room => self.casts.room.notify_waiters(),
        }
    }

    fn wake_senders(&self, peer: &Peer) {
        if let Some(link) = self.links.lock().get(peer) {
            link.wake();
        }
    }

    /// Read under the watch's own lock, so that a slower thread cannot put an older state over a newer one.
    fn publish_change(&self) {
        self.state.send_if_modified(|state| {
            let now = ScopeState { stopped: state.stopped, ..ScopeState::of(&self.node.published()) };
            let changed = *state != now;
            *state = now;
            changed
        });
        self.events.publish_status(|| self.node.with_published(|p| (p.status, p.hash)));
        #[cfg(feature = "cache")]
        self.caches_view();
        self.pulse.notify_waiters();
        self.casts.room.notify_waiters();
    }

    fn publish_event(&self, event: NodeEvent) {
        if let NodeEvent::Superseded { by } = &event {
            let _ = self.superseded_by.set(by.clone());
        }
        if let NodeEvent::Partitioned { peer, missing } = &event {
            tracing::warn!(%peer, %missing, "a node that others count on cannot be reached; broadcasts flood");
        }
        self.events.publish(event.into());
    }
}

// Members.
impl Driver {
    /// Gives a message to the members of its group on this node; how many have been addressed.
    pub(crate) fn deliver_local(self: &Arc<Self>, message: &Message, except: Option<u64>) -> usize {
        let members = self.node.local_members(message.group().as_bytes());
        self.deliver_to(&members, message, except)
    }

    /// The same to these.
    pub(crate) fn deliver_to(
        self: &Arc<Self>,
        members: &LocalMembers<Member>,
        message: &Message,
        except: Option<u64>,
    ) -> usize {
        let mut closed: Vec<Member> = Vec::new();
        let (mut accepted, mut dropped, mut addressed) = (0, 0, 0);
        nesting::inside(|| {
            let mut last = None;
            for member in members.iter().filter(|member| Some(member.number) != except) {
                addressed += 1;
                match member.handle.give(message, &mut last) {
                    message::Delivered::Accepted => accepted += 1,
                    message::Delivered::Dropped => dropped += 1,
                    message::Delivered::Closed => closed.push(member.handle.clone()),
                }
            }
        });
        self.stats.delivered.add(accepted);
        self.stats.dropped.add(dropped);
        for member in closed {
            self.end_member(&member);
        }
        addressed
    }

    /// Removes a member that takes no more.
    pub(crate) fn end_member(&self, member: &Member) {
        let leave = || self.node.leave(member.group().as_bytes(), member.id().number, self.now());
        if self.registry.end(member, leave) {
            self.stats.closed_members.add(1);
            self.events
                .publish(Event::MemberEnded { member: member.id().clone(), group: member.group().clone() });
            self.pump();
        }
    }

    /// Gives up one guard of a membership; the last one leaves. Never waits, never spawns.
    pub(crate) fn release(&self, group: &Group, number: u64, generation: u64) {
        let leave = || self.node.leave(group.as_bytes(), number, self.now());
        self.registry.release(group, number, generation, leave);
        self.pump();
    }

    /// Runs the broadcasts that deliveries on this thread have queued.
    pub(crate) fn run_queued(&self) {
        nesting::run_queued();
    }
}

/// What a frame has besides a payload and a name: headers, numbers, the names of nodes.
const FRAME_REST: usize = 64 << 10;

/// Whether a transport can carry all that the options allow. How many bytes of names one frame may have then.
fn check_frames(config: &Config, max_frame: usize) -> Result<usize, StartError> {
    let (max_payload_len, max_group_len) = (config.max_payload_len, config.max_group_len);
    let needed = max_payload_len.saturating_add(max_group_len).saturating_add(FRAME_REST);
    if max_frame < needed {
        return Err(StartError::FrameLimit { max_frame, needed, max_payload_len, max_group_len });
    }
    Ok(max_frame - FRAME_REST)
}

/// Longer than any process; adding it to a clock does not overflow.
#[cfg(feature = "cache")]
const FOREVER: Time = Time::from_secs(100 * 365 * 24 * 60 * 60);

/// Without caches nothing is left to do after a burst of frames.
#[cfg(not(feature = "cache"))]
#[derive(Default)]
struct Late(());

#[cfg(not(feature = "cache"))]
impl Late {
    fn carry_out(self, _driver: &Driver) {}
}

/// A seed that differs in every process, so that nobody can choose group names that all meet in one bucket.
fn random_seed() -> u64 {
    std::collections::hash_map::RandomState::new().build_hasher().finish()
}
