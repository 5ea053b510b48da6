//! The task of one end: gives what arrives to the link layer, carries out what it wants, and writes.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;

use super::Shared;
use super::connection::{Arrival, Connection, End, Item};
use crate::transport::link::{Effect, Output, RawId, Refusal, Time};
use crate::types::NodeId;

/// How many arrivals are taken before their effects are carried out.
const BATCH: usize = 512;
/// The first wait before a connection that has not led to a link is tried again; doubled up to a second.
/// How late timers may be while packets keep coming.
const LATE: Duration = Duration::from_millis(50);
const REDIAL: Duration = Duration::from_millis(5);
const REDIAL_MAX: Duration = Duration::from_secs(1);

pub(super) struct Seat {
    network: Arc<Shared>,
    end: Arc<End>,
    connections: BTreeMap<RawId, Arc<Connection>>,
    /// Connections with frames to write, and no room.
    blocked: BTreeSet<RawId>,
    arrived: VecDeque<Arrival>,
    late: BTreeMap<(Instant, u64), Item>,
    last_late: u64,
    /// Who is tried again when.
    redial: BTreeMap<NodeId, Instant>,
    attempts: BTreeMap<NodeId, u32>,
    /// Who has said no, or was told so.
    refused: BTreeSet<NodeId>,
    /// Nodes that were there at the start and have not been tried to the end.
    untried: BTreeSet<NodeId>,
    tried_until: Instant,
    settled: watch::Sender<bool>,
}

impl Drop for Seat {
    /// Also when the runtime ends the task, or a report panics.
    fn drop(&mut self) {
        self.network.remove(&self.end);
    }
}

impl Seat {
    pub(super) fn new(
        network: Arc<Shared>,
        end: Arc<End>,
        untried: BTreeSet<NodeId>,
        settled: watch::Sender<bool>,
    ) -> Self {
        let tried_until = Instant::now() + network.config.suspect_after;
        Self {
            network,
            end,
            connections: BTreeMap::new(),
            blocked: BTreeSet::new(),
            arrived: VecDeque::new(),
            late: BTreeMap::new(),
            last_late: 0,
            redial: BTreeMap::new(),
            attempts: BTreeMap::new(),
            refused: BTreeSet::new(),
            untried,
            tried_until,
            settled,
        }
    }

    pub(super) async fn run(mut self) {
        loop {
            if self.end.is_gone() {
                return;
            }
            if self.end.stopping.load(Ordering::Acquire) {
                self.goodbye();
                return;
            }
            if self.end.frozen.load(Ordering::Acquire) {
                self.end.wake.notified().await;
                continue;
            }
            let more = self.read();
            self.carry_out();
            self.settle();
            self.redial_due();
            self.write();
            if more {
                // the others have to run as well
                tokio::task::yield_now().await;
                continue;
            }
            let end = self.end.clone();
            match self.deadline() {
                Some(at) => {
                    tokio::select! {
                        biased;
                        () = end.wake.notified() => {}
                        () = tokio::time::sleep_until(at) => {}
                    }
                }
                None => end.wake.notified().await,
            }
        }
    }

    fn deadline(&self) -> Option<Instant> {
        let timeout = self.end.links.lock().poll_timeout().map(|at| self.end.instant(at));
        let late = self.late.keys().next().map(|(at, _)| *at);
        let redial = self.redial.values().min().copied();
        let tried = (!*self.settled.borrow()).then_some(self.tried_until);
        [timeout, late, redial, tried].into_iter().flatten().min()
    }

    /// Gives a batch to the link layer; whether there may be more.
    fn read(&mut self) -> bool {
        let end = self.end.clone();
        let mut links = end.links.lock();
        let (now, instant) = (end.now(), Instant::now());
        for _ in 0..BATCH {
            let ripe = self.late.first_entry().filter(|entry| entry.key().0 <= instant);
            if let Some(entry) = ripe {
                let item = entry.remove();
                self.take(&mut links, item, now);
                continue;
            }
            end.take(&mut self.arrived);
            let Some(arrival) = self.arrived.pop_front() else { break };
            match arrival.due {
                Some(due) => {
                    self.last_late += 1;
                    self.late.insert((due, self.last_late), arrival.item);
                }
                None => self.take(&mut links, arrival.item, now),
            }
        }
        // after the input: what has arrived while nobody looked counts as heard; but not so late that peers that never
        // pause put off everybody's timers
        let more = !self.arrived.is_empty();
        if !more || links.poll_timeout().is_some_and(|due| due + LATE < now) {
            links.handle_timeout(now);
        }
        more
    }

    fn take(&mut self, links: &mut crate::transport::link::Links, item: Item, now: Time) {
        match item {
            Item::Opened(connection) => {
                let raw = connection.raw;
                self.redial.remove(&self.other(&connection).peer.node);
                self.connections.insert(raw, connection);
                links.handle_opened(raw, now);
            }
            Item::Packet(raw, packet) => {
                if packet.lane().is_some()
                    && let Some(connection) = self.connections.get(&raw)
                {
                    connection.taken(1 - connection.side(&self.end.peer.node), &packet);
                }
                links.handle_packet(raw, packet, now);
            }
            Item::Closed(raw) => {
                links.handle_closed(raw, now);
                self.lost(raw);
            }
        }
    }

    fn other<'a>(&self, connection: &'a Connection) -> &'a Arc<End> {
        connection.other(connection.side(&self.end.peer.node))
    }

    /// A connection is gone; its peer is tried again, soon at first.
    fn lost(&mut self, raw: RawId) {
        self.blocked.remove(&raw);
        let Some(connection) = self.connections.remove(&raw) else { return };
        let node = self.other(&connection).peer.node.clone();
        if self.refused.contains(&node) {
            return;
        }
        let attempts = self.attempts.entry(node.clone()).or_default();
        let wait = match *attempts {
            0 => Duration::ZERO,
            n => REDIAL_MAX.min(REDIAL * (1 << n.min(10))),
        };
        *attempts += 1;
        self.redial.insert(node, Instant::now() + wait);
    }

    fn redial_due(&mut self) {
        if self.redial.is_empty() {
            return;
        }
        let now = Instant::now();
        let due: Vec<NodeId> =
            self.redial.iter().filter(|(_, at)| **at <= now).map(|(node, _)| node.clone()).collect();
        for node in due {
            self.redial.remove(&node);
            // a cut pair is connected by the network when it heals
            if !self.network.connect(&self.end, &node) {
                self.attempts.remove(&node);
            }
        }
    }

    fn carry_out(&mut self) {
        loop {
            let effects = self.end.links.lock().take_effects();
            if effects.is_empty() {
                return;
            }
            for effect in effects {
                if self.end.is_gone() {
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
                self.attempts.remove(&peer.node);
                self.refused.remove(&peer.node);
                inbound.peer_up(peer);
            }
            Effect::Suspect(peer) => inbound.peer_suspect(&peer),
            Effect::Resumed(peer) => {
                self.attempts.remove(&peer.node);
                inbound.peer_resumed(&peer);
            }
            Effect::Down(peer, reason) => {
                tracing::debug!(me = %self.end.peer, %peer, %reason, "peer down");
                inbound.peer_down(&peer);
                self.end.rooms.forget(&peer);
            }
            Effect::Room(peer) => self.end.rooms.wake(&peer),
            Effect::Refused { node: Some(node), refusal, .. } => {
                tracing::warn!(me = %self.end.peer, %node, %refusal, "link refused");
                self.untried.remove(&node);
                if !matches!(refusal, Refusal::Known { .. }) {
                    self.redial.remove(&node);
                    self.refused.insert(node);
                }
            }
            Effect::Refused { raw, node: None, refusal } => {
                tracing::warn!(me = %self.end.peer, %refusal, "link refused");
                if let Some(connection) = self.connections.get(&raw) {
                    let node = self.other(connection).peer.node.clone();
                    self.untried.remove(&node);
                    self.refused.insert(node);
                }
            }
            // the network gives each name once, and its incarnations only rise
            Effect::Superseded { .. } | Effect::Reborn => {}
        }
    }

    /// Reports that all nodes which were there at the start have been tried.
    fn settle(&mut self) {
        if *self.settled.borrow() {
            return;
        }
        if !self.untried.is_empty() {
            let links = self.end.links.lock();
            self.untried.retain(|node| !links.is_linked(node));
        }
        if self.untried.is_empty() || Instant::now() >= self.tried_until {
            self.end.inbound.discovery_settled();
            self.settled.send_replace(true);
        }
    }

    fn write(&mut self) {
        for raw in std::mem::take(&mut self.blocked) {
            self.write_one(raw);
        }
        loop {
            let Some(raw) = self.end.links.lock().poll_dirty() else { return };
            self.write_one(raw);
        }
    }

    fn write_one(&mut self, raw: RawId) {
        let Some(connection) = self.connections.get(&raw).cloned() else { return };
        let side = connection.side(&self.end.peer.node);
        let mut items = Vec::new();
        let mut closed = false;
        {
            let mut links = self.end.links.lock();
            loop {
                let room = connection.has_room(side);
                match links.poll_output(raw, room) {
                    Output::Packet(packet) => {
                        if packet.lane().is_some() {
                            connection.sent(side, &packet);
                        }
                        items.push(Item::Packet(raw, packet));
                    }
                    Output::Close => {
                        items.push(Item::Closed(raw));
                        closed = true;
                        break;
                    }
                    Output::Idle => {
                        if !room {
                            self.blocked.insert(raw);
                        }
                        break;
                    }
                }
            }
        }
        self.network.carry(&connection, side, items);
        if closed {
            self.network.closed(&connection);
            self.lost(raw);
        }
    }

    /// Leaves in an orderly way: what is queued is still written.
    fn goodbye(&mut self) {
        let now = self.end.now();
        self.end.links.lock().shutdown(now);
        self.write();
        self.network.remove(&self.end);
    }
}
