//! One life of a node on the mesh: the links under their lock, and the one rule about threads.
//!
//! Any task may bring input. Whoever brings it carries out what follows, if nobody is doing so; otherwise the
//! one who does takes it along. So reports have an order and never overlap, no frame waits for another task, and
//! the lock is free while the router is told. While reports are being made nothing is written: a packet that
//! says "my router knows" must not leave before the router knows.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use bytes::Bytes;
use parking_lot::{Mutex, MutexGuard};
use smallvec::SmallVec;
use tokio::sync::{Notify, watch};
use tokio::time::Instant;

use super::auth::RefusalCause;
use super::builder::Settings;
use super::connection::Connection;
use super::discovery::MemberInfo;
use super::record::Batch;
use super::stats::Counted;
use crate::transport::link::{Effect, Links, Output, Packet, RawId, Refusal, Time};
use crate::transport::rooms::Rooms;
use crate::transport::{Frame, Inbound, SendError, TransportError};
use crate::types::{Incarnation, NodeId, Peer};

/// How much is taken from the links at once for one connection, in bytes: what comes after it waits no longer
/// than this takes to write.
const OUTPUT_BYTES: usize = 128 << 10;
/// And in frames.
const OUTPUT_PACKETS: usize = 1024;
/// How many messages of the mesh may wait for its task; more are dropped and counted.
const MAX_MESSAGES: usize = 1024;

/// How far a life has come. Its sender is gone when all tasks have ended.
#[derive(Clone, Debug)]
pub(super) enum Phase {
    Starting,
    Running,
    /// Another live node holds the name.
    Superseded(Incarnation),
}

/// Held by every task of a life.
pub(super) type Alive = Arc<watch::Sender<Phase>>;

/// Something for the task of the mesh.
#[derive(Debug)]
pub(super) enum Event {
    /// The node may have got or lost its connection.
    Check(NodeId),
    Message(NodeId, Bytes),
    /// The incarnation is higher than before.
    Reborn,
}

pub(super) struct State {
    pub(super) links: Links,
    pub(super) connections: BTreeMap<RawId, Arc<Connection>>,
    pub(super) events: Vec<Event>,
    messages: usize,
    /// Somebody carries out effects. If nobody does, there are none.
    running: bool,
    /// Connections that wanted to write while effects were carried out.
    hungry: BTreeSet<RawId>,
    last_raw: u64,
    /// When the task of the mesh wakes by itself.
    pub(super) alarm: Option<Time>,
    /// The name is lost: everybody is reported down, then this life ends.
    expelled: Option<Incarnation>,
}

/// See the module.
pub(super) struct Mesh {
    pub(super) settings: Arc<Settings>,
    pub(super) inbound: Inbound,
    pub(super) counted: Arc<Counted>,
    pub(super) state: Mutex<State>,
    /// Wakes the task of the mesh.
    pub(super) wake: Notify,
    /// Who is known, as discovery has it.
    pub(super) members: Mutex<Arc<[MemberInfo]>>,
    /// Told when reports have come to an end.
    quiet: Notify,
    pub(super) stop: watch::Sender<bool>,
    pub(super) phase: watch::Receiver<Phase>,
    pub(super) local: OnceLock<SocketAddr>,
    pub(super) rooms: Rooms,
    /// A report has panicked.
    broken: AtomicBool,
    epoch: Instant,
}

impl Mesh {
    pub(super) fn new(
        settings: Arc<Settings>,
        counted: Arc<Counted>,
        inbound: Inbound,
        incarnation: Incarnation,
    ) -> (Arc<Self>, Alive) {
        let me = Peer::new(settings.node.clone(), incarnation);
        let links = Links::new(me, inbound.terms().clone(), settings.link.clone());
        let (alive, phase) = watch::channel(Phase::Starting);
        let state = State {
            links,
            connections: BTreeMap::new(),
            events: Vec::new(),
            messages: 0,
            running: false,
            hungry: BTreeSet::new(),
            last_raw: 0,
            alarm: None,
            expelled: None,
        };
        let mesh = Self {
            settings,
            inbound,
            counted,
            state: Mutex::new(state),
            wake: Notify::new(),
            members: Mutex::new(Arc::from([])),
            quiet: Notify::new(),
            stop: watch::Sender::new(false),
            phase,
            local: OnceLock::new(),
            rooms: Rooms::default(),
            broken: AtomicBool::new(false),
            epoch: Instant::now(),
        };
        (Arc::new(mesh), Arc::new(alive))
    }

    pub(super) fn now(&self) -> Time {
        Instant::now().saturating_duration_since(self.epoch)
    }

    pub(super) fn instant(&self, at: Time) -> Instant {
        self.epoch + at
    }

    /// Asks all tasks to end, with a goodbye.
    pub(super) fn stop(&self) {
        self.stop.send_replace(true);
    }

    pub(super) fn is_stopping(&self) -> bool {
        *self.stop.borrow()
    }

    /// Whether all tasks have ended.
    pub(super) fn has_ended(&self) -> bool {
        self.phase.has_changed().is_err()
    }

    /// Returns when this life was asked to end.
    pub(super) async fn stopped(&self) {
        let mut stop = self.stop.subscribe();
        // the sender is in `self`
        let _ = stop.wait_for(|stop| *stop).await;
    }
}

// Inputs, and what follows.
impl Mesh {
    /// Gives input to the links and carries out what follows, unless somebody else is doing so already: then
    /// they do. Must not be called by who was called by the router.
    pub(super) fn input<T>(&self, give: impl FnOnce(&mut State, Time) -> T) -> T {
        let mut state = self.state.lock();
        let given = give(&mut state, self.now());
        self.carry_out(state);
        given
    }

    /// The same, and returns when all that follows has been reported, so that the one who reads waits for the
    /// router and what has been read does not pile up.
    pub(super) async fn input_and_wait(&self, give: impl FnOnce(&mut State, Time)) {
        let quiet = {
            let mut state = self.state.lock();
            give(&mut state, self.now());
            if !state.running {
                self.carry_out(state);
                return;
            }
            // under the lock, so that the end of the reports is not missed
            self.quiet.notified()
        };
        quiet.await;
    }

    fn carry_out(&self, mut state: MutexGuard<'_, State>) {
        if state.running {
            return;
        }
        state.running = true;
        let _ended = Ended(self);
        loop {
            let effects = state.links.take_effects();
            if effects.is_empty() {
                break;
            }
            MutexGuard::unlocked(&mut state, || self.effects(effects));
        }
        state.running = false;
        let mut writers = dirty(&mut state);
        let hungry = std::mem::take(&mut state.hungry);
        writers.extend(hungry.iter().filter_map(|raw| state.connections.get(raw).cloned()));
        let alarm = is_early(&state) || !state.events.is_empty();
        drop(state);
        self.quiet.notify_waiters();
        for writer in writers {
            writer.wake.notify_one();
        }
        if alarm {
            self.wake.notify_one();
        }
    }

    /// In order; frames that one peer sent in a row are reported together.
    fn effects(&self, effects: VecDeque<Effect>) {
        let mut effects = effects.into_iter().peekable();
        while let Some(effect) = effects.next() {
            let Effect::Frame(peer, mut frame) = effect else {
                self.effect(effect);
                continue;
            };
            let mut frames = Vec::new();
            while let Some(Effect::Frame(_, next)) =
                effects.next_if(|next| matches!(next, Effect::Frame(from, _) if *from == peer))
            {
                if frames.is_empty() {
                    frames.reserve(effects.len() + 2);
                }
                frames.push(std::mem::replace(&mut frame, next));
            }
            if frames.is_empty() {
                self.inbound.frame(&peer, frame);
            } else {
                frames.push(frame);
                self.inbound.frames(&peer, frames);
            }
        }
    }

    fn effect(&self, effect: Effect) {
        match effect {
            Effect::Frame(peer, frame) => self.inbound.frame(&peer, frame),
            Effect::Up(peer) => {
                let node = peer.node.clone();
                self.inbound.peer_up(peer);
                self.event(Event::Check(node));
            }
            Effect::Suspect(peer) => {
                self.inbound.peer_suspect(&peer);
                self.event(Event::Check(peer.node));
            }
            Effect::Resumed(peer) => {
                self.inbound.peer_resumed(&peer);
                self.event(Event::Check(peer.node));
            }
            Effect::Down(peer, reason) => {
                tracing::debug!(me = %self.settings.node, %peer, %reason, "peer down");
                self.inbound.peer_down(&peer);
                self.rooms.forget(&peer);
                self.event(Event::Check(peer.node));
            }
            Effect::Room(peer) => self.rooms.wake(&peer),
            Effect::Refused { node, refusal, .. } => self.refused(node.as_ref(), &refusal),
            Effect::Superseded { live } => self.superseded(live),
            Effect::Reborn => self.event(Event::Reborn),
        }
    }

    fn event(&self, event: Event) {
        self.state.lock().events.push(event);
    }

    fn refused(&self, node: Option<&NodeId>, refusal: &Refusal) {
        self.counted.refused(RefusalCause::Link);
        let node = node.map_or("?", NodeId::as_str);
        if self.counted.is_news(node, refusal) {
            tracing::warn!(me = %self.settings.node, node, %refusal, "link refused");
        }
    }

    fn superseded(&self, live: Incarnation) {
        let mut state = self.state.lock();
        if state.expelled.replace(live).is_some() {
            return;
        }
        let now = self.now();
        let peers: Vec<Peer> = state.links.peers().cloned().collect();
        for peer in peers {
            // reported after this one
            state.links.disconnect(&peer, now);
        }
        let me = state.links.me().node.clone();
        drop(state);
        // the router takes no further part, instead of believing that it is alone
        self.inbound.peer_up(Peer::new(me, live));
        tracing::error!(me = %self.settings.node, %live, "a live node of this name is on the network: leaving");
        self.wake.notify_one();
    }

    /// To whom this life has lost its name.
    pub(super) fn expelled(&self) -> Option<Incarnation> {
        self.state.lock().expelled
    }
}

/// On the way out of a report, also when the router has panicked in it.
struct Ended<'a>(&'a Mesh);

impl Drop for Ended<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            // this life cannot tell what was reported: it ends
            self.0.broken.store(true, Ordering::Release);
            self.0.stop();
        }
    }
}

/// The connections with something to write whose writers are to be woken: those that are not awake for it already.
fn dirty(state: &mut State) -> SmallVec<[Arc<Connection>; 4]> {
    let mut dirty = SmallVec::new();
    while let Some(raw) = state.links.poll_dirty() {
        if let Some(connection) = state.connections.get(&raw) {
            if state.links.is_closing(raw) {
                connection.end_soon();
            }
            if !connection.woken.load(Ordering::Relaxed) {
                connection.woken.store(true, Ordering::Relaxed);
                dirty.push(connection.clone());
            }
        }
    }
    dirty
}

/// Whether the task of the mesh would sleep too long.
fn is_early(state: &State) -> bool {
    match (state.links.poll_timeout(), state.alarm) {
        (Some(due), Some(alarm)) => due < alarm,
        (Some(_), None) => true,
        (None, _) => false,
    }
}

// Connections.
impl Mesh {
    /// From now on the incarnation stays; who this node is.
    pub(super) fn settle(&self) -> Peer {
        let mut state = self.state.lock();
        state.links.settle();
        state.links.me().clone()
    }

    /// A connection whose other end has proved to be `node`; `None` if there may be no more of them.
    pub(super) fn open(&self, node: NodeId, advertise: SocketAddr) -> Option<Arc<Connection>> {
        self.input(|state, now| {
            if state.connections.len() >= self.settings.limits.connections {
                return None;
            }
            state.last_raw += 1;
            let raw = RawId(state.last_raw);
            let connection = Arc::new(Connection::new(raw, node.clone(), advertise));
            state.connections.insert(raw, connection.clone());
            state.links.handle_opened_as(raw, node, now);
            Some(connection)
        })
    }

    /// It is gone.
    pub(super) fn closed(&self, connection: &Connection) {
        self.input(|state, now| {
            state.links.handle_closed(connection.raw, now);
            state.connections.remove(&connection.raw);
            state.events.push(Event::Check(connection.node.clone()));
        });
        connection.end_now();
    }

    /// What a connection has brought. The messages of the mesh come after what the packets have led to: the first
    /// ones of a link are often read together with the packet that makes it one.
    pub(super) async fn received(&self, connection: &Connection, read: &mut Read) {
        if !read.packets.is_empty() {
            self.input_and_wait(|state, now| {
                for packet in read.packets.drain(..) {
                    state.links.handle_packet(connection.raw, packet, now);
                }
            })
            .await;
        }
        if read.messages.is_empty() {
            return;
        }
        let mut state = self.state.lock();
        for message in read.messages.drain(..) {
            if state.messages >= MAX_MESSAGES {
                self.counted.dropped_message();
                continue;
            }
            state.messages += 1;
            state.events.push(Event::Message(connection.node.clone(), message));
        }
        drop(state);
        self.wake.notify_one();
    }

    /// Takes what is to be written. It comes in the order of urgency, and not too much at once.
    pub(super) fn output(&self, connection: &Connection, into: &mut Batch) -> Polled {
        let mut state = self.state.lock();
        connection.woken.store(false, Ordering::Relaxed);
        if state.running {
            state.hungry.insert(connection.raw);
            return Polled::Later;
        }
        // the link's own words are few, and come before the frames
        loop {
            match state.links.poll_output(connection.raw, false) {
                Output::Packet(packet) => into.packet(packet),
                Output::Close => {
                    state.connections.remove(&connection.raw);
                    state.events.push(Event::Check(connection.node.clone()));
                    drop(state);
                    connection.end_soon();
                    self.wake.notify_one();
                    return Polled::Closed;
                }
                Output::Idle => break,
            }
        }
        let (mut bytes, mut count) = (0, 0);
        state.links.poll_pieces(connection.raw, |number, piece| {
            into.piece(number, piece);
            bytes += piece.part.len();
            count += 1;
            bytes < OUTPUT_BYTES && count < OUTPUT_PACKETS
        });
        if into.is_empty() { Polled::Idle } else { Polled::More }
    }

    /// Says goodbye to everybody: what is queued is still written, within bounds of time.
    pub(super) fn goodbye(&self) {
        if self.broken.load(Ordering::Acquire) {
            let mut state = self.state.lock();
            state.running = false;
            for connection in state.connections.values() {
                connection.end_now();
            }
            drop(state);
            self.quiet.notify_waiters();
        }
        self.input(|state, now| state.links.shutdown(now));
        self.rooms.close();
    }

    /// Gives a message of the mesh to the connection of a node; lost if there is none.
    pub(super) fn tell(&self, node: &NodeId, message: Bytes) {
        let connection = {
            let state = self.state.lock();
            state.links.connection(node).and_then(|raw| state.connections.get(&raw).cloned())
        };
        if connection.is_some_and(|connection| !connection.tell(message)) {
            self.counted.dropped_message();
        }
    }

    pub(super) fn take_events(&self) -> Vec<Event> {
        let mut state = self.state.lock();
        state.messages = 0;
        std::mem::take(&mut state.events)
    }
}

/// What one look at a connection has brought.
#[derive(Debug, Default)]
pub(super) struct Read {
    pub(super) packets: Vec<Packet>,
    pub(super) messages: VecDeque<Bytes>,
}

/// What [`Mesh::output`] has to say besides packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Polled {
    /// Write, then ask again.
    More,
    /// Nothing; the connection is woken when there is.
    Idle,
    /// Reports are being made; the connection is woken when they are done.
    Later,
    /// Write what is there, then close.
    Closed,
}

// Sending.
impl Mesh {
    pub(super) fn try_send(&self, to: &Peer, frame: Frame) -> Result<(), SendError> {
        let mut state = self.state.lock();
        state.links.try_send_at(to, frame, || self.now())?;
        if state.running {
            // whoever carries out effects lets it be written afterwards
            return Ok(());
        }
        let writers = dirty(&mut state);
        let alarm = is_early(&state);
        drop(state);
        for writer in writers {
            writer.wake.notify_one();
        }
        if alarm {
            self.wake.notify_one();
        }
        Ok(())
    }

    /// The failure of a start, in words.
    pub(super) fn failure(&self) -> TransportError {
        let node = self.settings.node.clone();
        match self.phase.borrow().clone() {
            Phase::Superseded(live) => TransportError::Superseded { node, live },
            Phase::Starting | Phase::Running => {
                TransportError::Failed { reason: "it was shut down while it started".to_owned() }
            }
        }
    }
}
