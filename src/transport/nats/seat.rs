//! The task of one node: gives what comes from NATS to the link layer, carries out what it wants, and writes.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll};
use std::time::Duration;

use async_nats::connection::State;
use async_nats::message::OutboundMessage;
use async_nats::{Client, Message, Subject, Subscriber};
use futures_core::Stream;
use futures_sink::Sink;
use tokio::sync::watch;
use tokio::time::Instant;

use super::directory::Directory;
use super::end::{End, Progress, count};
use super::envelope::{Envelope, Key, Word};
use super::subject::{LifeId, Subjects};
use super::wire::Wire;
use super::{Ears, NatsLimits, within};
use crate::transport::link::{Effect, Packet, RawId, Refusal, Time};
use crate::types::{Incarnation, Peer};

/// How many messages are taken from a subscription at a time.
const BATCH: usize = 64;
/// How often the state of the client is looked at, in case that it does not report.
const LOOK: Duration = Duration::from_millis(50);
/// What the link layer puts in front of a frame, and what its own words take at most.
const PACKET_EXTRA: usize = 4096;

pub(super) struct Connection {
    pub(super) wire: Wire,
    /// Of the other end, by lane.
    pub(super) subjects: [Subject; 3],
    /// Where the server answers if the other end does not listen.
    pub(super) nobody: Subject,
}

pub(super) struct Seat {
    pub(super) end: Arc<End>,
    pub(super) client: Client,
    pub(super) subjects: Subjects,
    pub(super) directory: Directory,
    /// Where this node is told that a peer is not there.
    pub(super) nobody: String,
    pub(super) ears: Ears,
    pub(super) arrived: VecDeque<Message>,
    /// A subscription has ended: the client is closed.
    pub(super) deaf: bool,
    pub(super) limits: NatsLimits,
    pub(super) longest_packet: usize,
    pub(super) progress: watch::Sender<Progress>,
    pub(super) online: bool,
    pub(super) connects: u64,
    pub(super) last_raw: u64,
    pub(super) connections: BTreeMap<RawId, Connection>,
    pub(super) keys: BTreeMap<Key, RawId>,
    pub(super) lives: BTreeMap<LifeId, RawId>,
    pub(super) graves: BTreeMap<Key, (Subject, Time)>,
    /// How much may be on the way to a life at first, where more was too much.
    pub(super) slow: BTreeMap<LifeId, u32>,
    /// Connections with something to write, and no room.
    pub(super) blocked: BTreeSet<RawId>,
    /// Connections of which something was taken.
    pub(super) touched: BTreeSet<RawId>,
    /// Connections that are no link yet, and when their other ends are asked next.
    pub(super) unlinked: BTreeSet<(Time, RawId)>,
    pub(super) packets: Vec<Packet>,
    pub(super) outbox: VecDeque<OutboundMessage>,
    pub(super) outbox_bytes: usize,
    pub(super) greeted: bool,
    pub(super) leaving: bool,
    pub(super) superseded: Option<Incarnation>,
}

impl Drop for Seat {
    /// Also when the runtime ends the task, or a report panics.
    fn drop(&mut self) {
        self.end.leave();
    }
}

// The loop.
impl Seat {
    pub(super) fn new(
        end: Arc<End>,
        client: Client,
        subjects: Subjects,
        (directory, life): (Directory, LifeId),
        ears: Ears,
        limits: &NatsLimits,
        progress: watch::Sender<Progress>,
    ) -> Self {
        let nobody = subjects.nobody(&end.links.lock().me().node, life);
        Self {
            end,
            client,
            subjects,
            directory,
            nobody,
            ears,
            arrived: VecDeque::new(),
            deaf: false,
            limits: limits.clone(),
            longest_packet: usize::MAX,
            progress,
            online: true,
            connects: 0,
            last_raw: 0,
            connections: BTreeMap::new(),
            keys: BTreeMap::new(),
            lives: BTreeMap::new(),
            graves: BTreeMap::new(),
            slow: BTreeMap::new(),
            blocked: BTreeSet::new(),
            touched: BTreeSet::new(),
            unlinked: BTreeSet::new(),
            packets: Vec::new(),
            outbox: VecDeque::new(),
            outbox_bytes: 0,
            greeted: false,
            leaving: false,
            superseded: None,
        }
    }

    pub(super) fn longest_packet(mut self, max_frame: usize) -> Self {
        self.longest_packet = max_frame.saturating_add(PACKET_EXTRA);
        self
    }

    pub(super) async fn run(mut self) {
        self.connects = self.client.statistics().connects.load(Ordering::Relaxed);
        self.look();
        loop {
            if self.end.crashed.load(Ordering::Acquire) {
                return;
            }
            if self.end.stopping.load(Ordering::Acquire) {
                self.goodbye().await;
                return;
            }
            let more = self.read();
            self.look();
            self.carry_out();
            if let Some(live) = self.superseded {
                self.give_up(live).await;
                return;
            }
            if let Some(reason) = self.hopeless() {
                self.progress.send_replace(Progress::Failed(reason));
                return;
            }
            self.attend();
            self.write();
            if more {
                // the others have to run as well
                tokio::task::yield_now().await;
                continue;
            }
            self.wait(self.deadline()).await;
        }
    }

    /// Why a start cannot come to its end, if that is so.
    fn hopeless(&self) -> Option<&'static str> {
        if *self.progress.borrow() != Progress::Starting {
            return None;
        }
        if self.deaf {
            return Some("the NATS client was closed while the node started");
        }
        let stranded = self.directory.stranded(self.end.now());
        stranded.then_some(
            "the connection to NATS was lost while the node started, and did not come back in time",
        )
    }

    fn deadline(&self) -> Instant {
        let timeout = self.end.links.lock().poll_timeout();
        let due = [timeout, self.directory.timeout()].into_iter().flatten().min();
        let look = Instant::now() + LOOK;
        due.map_or(look, |at| self.end.instant(at).min(look))
    }

    /// Until something comes, is to be written, or is due.
    async fn wait(&mut self, until: Instant) {
        let end = self.end.clone();
        tokio::select! {
            biased;
            () = end.signals.wake.notified() => {}
            () = std::future::poll_fn(|context| self.poll_network(context)) => {}
            () = tokio::time::sleep_until(until) => {}
        }
    }

    /// Takes what has come, and hands the client what it takes.
    fn poll_network(&mut self, context: &mut Context<'_>) -> Poll<()> {
        let sent = self.push(context);
        let mut heard = false;
        if !self.deaf {
            for ear in [&mut self.ears.inbox, &mut self.ears.name, &mut self.ears.presence] {
                heard |= listen(ear, context, &mut self.arrived, &mut self.deaf);
            }
        }
        if sent || heard { Poll::Ready(()) } else { Poll::Pending }
    }

    /// Hands messages to the client until it is full; whether any.
    fn push(&mut self, context: &mut Context<'_>) -> bool {
        let mut any = false;
        while !self.outbox.is_empty() {
            match Pin::new(&mut self.client).poll_ready(context) {
                Poll::Pending => return any,
                Poll::Ready(Err(_)) => {
                    // closed for good
                    self.outbox.clear();
                    self.outbox_bytes = 0;
                    return true;
                }
                Poll::Ready(Ok(())) => {}
            }
            let Some(message) = self.outbox.pop_front() else { return any };
            let len = message.payload.len();
            self.outbox_bytes -= len;
            any = true;
            let counters = &self.end.signals.counters;
            match Pin::new(&mut self.client).start_send(message) {
                Ok(()) => {
                    count(&counters.messages_out, 1);
                    count(&counters.bytes_out, len);
                }
                // the server has become smaller: the other end finds a gap
                Err(_) => count(&counters.errors, 1),
            }
        }
        any
    }
}

fn listen(
    ear: &mut Subscriber,
    context: &mut Context<'_>,
    into: &mut VecDeque<Message>,
    deaf: &mut bool,
) -> bool {
    let mut heard = false;
    for _ in 0..BATCH {
        match Pin::new(&mut *ear).poll_next(context) {
            Poll::Ready(Some(message)) => {
                into.push_back(message);
                heard = true;
            }
            Poll::Ready(None) => {
                tracing::error!("the NATS client was closed: this node is alone from now on");
                *deaf = true;
                return true;
            }
            Poll::Pending => return heard,
        }
    }
    heard
}

// What follows from what has come.
impl Seat {
    /// Looks whether NATS is there.
    fn look(&mut self) {
        let connected = self.client.connection_state() == State::Connected && !self.deaf;
        let connects = self.client.statistics().connects.load(Ordering::Relaxed);
        if self.online && (!connected || connects != self.connects) {
            self.online = false;
            count(&self.end.signals.counters.disconnects, 1);
            tracing::warn!(node = %self.end.links.lock().me(), "the connection to NATS was lost");
            // what is on its way may come, or not
            for raw in self.connections.keys().copied().collect::<Vec<_>>() {
                self.close(raw, false);
            }
            self.directory.lost(self.end.now());
            self.outbox.clear();
            self.outbox_bytes = 0;
        }
        if !self.online && connected {
            self.online = true;
            self.connects = connects;
            self.directory.back(self.end.now());
            if self.greeted {
                self.announce(Word::Back);
            }
        }
        self.end.signals.counters.connected.store(self.online, Ordering::Relaxed);
    }

    /// Says to all that this node is there, or that it is not.
    pub(super) fn announce(&mut self, word: Word) {
        let presence = self.directory.presence(word, self.linked());
        self.publish(self.subjects.presence(), Envelope::Presence(presence).encode());
    }

    pub(super) fn linked(&self) -> usize {
        self.end.links.lock().peers().count()
    }

    fn carry_out(&mut self) {
        loop {
            let effects = self.end.links.lock().take_effects();
            if effects.is_empty() {
                return;
            }
            for effect in effects {
                if self.end.crashed.load(Ordering::Acquire) {
                    return;
                }
                self.effect(effect);
            }
        }
    }

    fn effect(&mut self, effect: Effect) {
        let inbound = &self.end.inbound;
        match effect {
            Effect::Frame(peer, frame) => inbound.frame(&peer, frame),
            Effect::Up(peer) => {
                self.directory.linked(&peer.node);
                inbound.peer_up(peer);
            }
            Effect::Suspect(peer) => inbound.peer_suspect(&peer),
            Effect::Resumed(peer) => {
                self.directory.linked(&peer.node);
                inbound.peer_resumed(&peer);
            }
            Effect::Down(peer, reason) => {
                tracing::debug!(%peer, %reason, "peer down");
                inbound.peer_down(&peer);
                self.end.rooms.forget(&peer);
            }
            Effect::Room(peer) => self.end.rooms.wake(&peer),
            Effect::Refused { raw, refusal, .. } => self.on_refused(raw, &refusal),
            Effect::Superseded { live } => self.superseded = Some(live),
            Effect::Reborn => {
                let me = self.end.links.lock().me().clone();
                tracing::info!(%me, "this name was known in a later life: it has taken a higher incarnation");
                self.directory.reborn(me);
            }
        }
    }

    fn on_refused(&mut self, raw: RawId, refusal: &Refusal) {
        count(&self.end.signals.counters.refused, 1);
        let Some(connection) = self.connections.get(&raw) else { return };
        tracing::warn!(node = %connection.wire.node, %refusal, "link refused");
        // after that one it comes back under a higher incarnation
        if !matches!(refusal, Refusal::Known { .. }) {
            self.directory.refused(connection.wire.life);
        }
    }

    /// What time has made necessary.
    fn attend(&mut self) {
        let now = self.end.now();
        if !self.online {
            return;
        }
        if !std::mem::replace(&mut self.greeted, true) {
            self.announce(Word::Hello);
        }
        while let Some((node, life, dialer)) = self.directory.due(now) {
            count(&self.end.signals.counters.dials, 1);
            let from = self.directory.presence(Word::Beat, self.linked());
            let (window, _) = self.window(life);
            let [to, ..] = self.subjects.lanes(&node, life);
            self.publish(to, Envelope::Open { from, dialer, window }.encode());
        }
        self.ask_unlinked(now);
        if self.directory.beat(now) {
            self.announce(Word::Beat);
        }
        if self.directory.settled(now) {
            // from now on others know it in this life
            self.end.links.lock().settle();
            self.end.inbound.discovery_settled();
            self.progress.send_replace(Progress::Started);
        }
    }

    /// Another node has the name: nothing of this one is left, as far as the others are concerned.
    async fn give_up(&mut self, live: Incarnation) {
        if *self.progress.borrow() == Progress::Starting {
            self.progress.send_replace(Progress::Superseded(live));
        } else {
            tracing::error!(incarnation = %live, "another node has taken the name of this one, which ends");
        }
        let (me, peers) = {
            let mut links = self.end.links.lock();
            let peers = links.peers().cloned().collect::<Vec<Peer>>();
            // from here on nothing is taken any more; the goodbyes are written below
            links.shutdown(self.end.now());
            (links.me().node.clone(), peers)
        };
        // before the goodbye, which may take long
        if *self.progress.borrow() == Progress::Started {
            // the router takes no further part, instead of believing that it is alone
            self.end.inbound.peer_up(Peer::new(me, live));
        }
        for peer in peers {
            self.end.inbound.peer_down(&peer);
            self.end.rooms.forget(&peer);
        }
        self.goodbye().await;
    }

    /// Leaves in an orderly way: what is queued is still written, as long as the others take it.
    async fn goodbye(&mut self) {
        self.leaving = true;
        self.end.links.lock().shutdown(self.end.now());
        let until = Instant::now() + self.limits.shutdown_timeout;
        loop {
            self.read();
            self.look();
            self.write();
            let written = self.connections.is_empty() && self.outbox.is_empty();
            if written || !self.online || self.deaf || Instant::now() >= until {
                break;
            }
            self.wait(until.min(Instant::now() + LOOK)).await;
        }
        if !self.online || self.deaf {
            return;
        }
        self.announce(Word::Leaving);
        let said = within(self.limits.shutdown_timeout, async {
            std::future::poll_fn(|context| {
                self.push(context);
                if self.outbox.is_empty() { Poll::Ready(()) } else { Poll::Pending }
            })
            .await;
            // the name is free before anyone can ask for it
            let ears = [&mut self.ears.name, &mut self.ears.inbox, &mut self.ears.presence];
            for ear in ears {
                ear.unsubscribe().await.ok();
            }
            self.client.flush().await.ok();
        });
        if said.await.is_none() {
            tracing::warn!("NATS did not take the goodbye in time");
        }
    }
}
