//! The task of one life: gives what arrives to the link layer, carries out what it wants, and writes.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::{OwnedSemaphorePermit, watch};
use tokio::time::Instant;

use super::life::{Arrival, Life, Progress, Stop};
use super::wire::Wire;
use crate::transport::link::{Effect, LinkConfig, Links, Output, Packet, RawId, Refusal, Time};
use crate::types::{Incarnation, NodeId, Peer};

/// How many arrivals are taken before their effects are carried out.
const BATCH: usize = 512;
/// How long a goodbye may take.
const GOODBYE: Duration = Duration::from_secs(1);
/// How many refusals are remembered as logged, and how many of those who were not dialled are logged at all.
const NEWS: usize = 1024;
const NEWS_OF_STRANGERS: usize = 64;
/// A timer that is later than this means that nobody has run, so nobody has read either.
const LATE: Duration = Duration::from_millis(50);

pub(super) struct Seat {
    life: Arc<Life>,
    wires: BTreeMap<RawId, Arc<Wire>>,
    /// Who has said hello on which connection.
    names: BTreeMap<RawId, NodeId>,
    /// Whom we have dialled on which connection.
    dialled: BTreeMap<RawId, NodeId>,
    news: News,
    /// Connections that are gone. Their names are kept until the effects have been carried out.
    closed: Vec<RawId>,
    /// Connections with frames to write, and no room.
    blocked: BTreeSet<RawId>,
    arrived: VecDeque<Arrival>,
    /// Room that is given back when the effects have been carried out.
    handled: Vec<OwnedSemaphorePermit>,
    /// Nodes that were there at the start and have not been tried to the end; `None` until they are known.
    untried: Option<BTreeSet<NodeId>>,
    tried_until: Instant,
    tell: watch::Sender<Progress>,
}

impl Drop for Seat {
    /// Also when the runtime ends the task, or a report panics.
    fn drop(&mut self) {
        drop(self.life.leave());
    }
}

impl Seat {
    pub(super) fn new(life: Arc<Life>, config: &LinkConfig, tell: watch::Sender<Progress>) -> Self {
        Self {
            life,
            wires: BTreeMap::new(),
            names: BTreeMap::new(),
            dialled: BTreeMap::new(),
            news: News::default(),
            closed: Vec::new(),
            blocked: BTreeSet::new(),
            arrived: VecDeque::new(),
            handled: Vec::new(),
            untried: None,
            tried_until: Instant::now() + config.handshake_timeout.min(Duration::from_secs(3600)),
            tell,
        }
    }

    pub(super) async fn run(mut self) {
        loop {
            match self.life.stopping() {
                Some(Stop::Abort) => break,
                Some(Stop::Goodbye) => {
                    self.goodbye().await;
                    break;
                }
                None => {}
            }
            let more = self.read();
            self.carry_out();
            self.handled.clear();
            self.settle();
            self.write();
            if more {
                // the others have to run as well
                tokio::task::yield_now().await;
                continue;
            }
            self.rest().await;
        }
        if let Some(mut tasks) = self.life.leave() {
            tasks.shutdown().await;
        }
    }

    /// Waits for something to do.
    async fn rest(&self) {
        let timeout = self.life.links.lock().poll_timeout().map(|at| self.life.instant(at));
        let tried = (*self.tell.borrow() == Progress::Starting).then_some(self.tried_until);
        let Some(at) = [timeout, tried].into_iter().flatten().min() else {
            self.life.wake.notified().await;
            return;
        };
        tokio::select! {
            biased;
            () = self.life.wake.notified() => {}
            () = tokio::time::sleep_until(at) => {}
        }
        if Instant::now() >= at + LATE {
            // those who read have been kept waiting too; what they find now was not late
            for _ in 0..3 {
                tokio::task::yield_now().await;
            }
        }
    }
}

/// Which refusals were logged: of each node that we dial one for each cause; of those who came by themselves a few, since
/// they may claim one name after the other.
#[derive(Default)]
struct News {
    dialled: BTreeSet<(NodeId, String)>,
    strangers: BTreeSet<String>,
}

impl News {
    fn is_news(&mut self, dialled: Option<&NodeId>, claimed: Option<&NodeId>, refusal: &Refusal) -> bool {
        if let Some(node) = dialled {
            if self.dialled.len() >= NEWS {
                self.dialled.clear();
            }
            return self.dialled.insert((node.clone(), refusal.to_string()));
        }
        self.strangers.len() < NEWS_OF_STRANGERS && self.strangers.insert(format!("{claimed:?}: {refusal}"))
    }
}

// What comes in.
impl Seat {
    /// Gives a batch to the link layer; whether there may be more.
    fn read(&mut self) -> bool {
        let life = self.life.clone();
        let mut links = life.links.lock();
        let now = life.now();
        for _ in 0..BATCH {
            life.take(&mut self.arrived);
            let Some(arrival) = self.arrived.pop_front() else { break };
            self.take(&mut links, arrival, now);
        }
        // after the input: what has arrived while nobody looked counts as heard; but not so late that peers that never
        // pause put off everybody's timers
        let more = !self.arrived.is_empty();
        if !more || links.poll_timeout().is_some_and(|due| due + LATE < now) {
            links.handle_timeout(now);
        }
        more
    }

    fn take(&mut self, links: &mut Links, arrival: Arrival, now: Time) {
        match arrival {
            Arrival::Opened(wire) => {
                links.handle_opened(wire.raw, now);
                if let Some(node) = wire.expected.as_ref().filter(|_| wire.dialled) {
                    self.dialled.insert(wire.raw, node.clone());
                }
                self.wires.insert(wire.raw, wire);
            }
            Arrival::Packet(raw, packet, room) => {
                self.handled.push(room);
                if !self.names.contains_key(&raw) && !self.greeted(raw, &packet) {
                    self.break_off(links, raw, now);
                    return;
                }
                links.handle_packet(raw, packet, now);
            }
            Arrival::Malformed(raw) => {
                // counts it, and closes the connection
                let nothing = Packet { head: Bytes::new(), body: Bytes::new() };
                links.handle_packet(raw, nothing, now);
            }
            Arrival::Closed(raw) => {
                links.handle_closed(raw, now);
                self.forget(raw);
            }
            Arrival::Tried(node) => {
                // another connection to it may be on its way up
                if let Some(untried) = &mut self.untried
                    && !links.has_connection(&node)
                {
                    untried.remove(&node);
                }
            }
            Arrival::Expect(nodes) => self.untried = Some(nodes),
            Arrival::Break(node) => {
                for (raw, _) in self.names.iter().filter(|(_, name)| **name == node) {
                    if let Some(wire) = self.wires.get(raw) {
                        wire.break_off();
                    }
                }
            }
        }
    }

    /// Whether the first packet may come from who it says.
    fn greeted(&mut self, raw: RawId, packet: &Packet) -> bool {
        let Some(wire) = self.wires.get(&raw) else { return true };
        // what is no hello is for the link layer to judge
        let Some(node) = packet.greets_from() else { return true };
        if let Some(expected) = wire.expected.as_ref().filter(|expected| **expected != node) {
            tracing::warn!(me = %self.life.node, %expected, %node, "another node answers than was expected");
            return false;
        }
        self.names.insert(raw, node);
        true
    }

    fn break_off(&mut self, links: &mut Links, raw: RawId, now: Time) {
        links.handle_closed(raw, now);
        if let Some(wire) = self.wires.get(&raw) {
            wire.break_off();
        }
        self.forget(raw);
    }

    fn forget(&mut self, raw: RawId) {
        self.blocked.remove(&raw);
        self.wires.remove(&raw);
        self.closed.push(raw);
    }
}

// What goes out.
impl Seat {
    fn carry_out(&mut self) {
        loop {
            let effects = self.life.links.lock().take_effects();
            if effects.is_empty() {
                break;
            }
            for effect in effects {
                self.effect(effect);
            }
        }
        for raw in self.closed.drain(..) {
            self.names.remove(&raw);
            self.dialled.remove(&raw);
        }
    }

    fn effect(&mut self, effect: Effect) {
        let (life, inbound) = (&self.life, &self.life.inbound);
        match effect {
            Effect::Frame(peer, frame) => inbound.frame(&peer, frame),
            Effect::Up(peer) => {
                life.dials.lock().linked(&peer.node);
                inbound.peer_up(peer);
            }
            Effect::Suspect(peer) => inbound.peer_suspect(&peer),
            Effect::Resumed(peer) => {
                life.dials.lock().linked(&peer.node);
                inbound.peer_resumed(&peer);
            }
            Effect::Down(peer, reason) => {
                tracing::debug!(me = %life.node, %peer, %reason, "peer down");
                inbound.peer_down(&peer);
                life.rooms.forget(&peer);
            }
            Effect::Room(peer) => life.rooms.wake(&peer),
            Effect::Refused { raw, node, refusal } => {
                let node = node.or_else(|| self.names.get(&raw).cloned());
                let dialled = self.dialled.get(&raw);
                if self.news.is_news(dialled, node.as_ref(), &refusal) {
                    tracing::warn!(me = %life.node, ?node, %refusal, "link refused");
                }
                // a name that was known is taken again, higher
                if matches!(refusal, Refusal::Known { .. }) {
                    return;
                }
                // who came by itself may be anybody: only our own attempts say whom not to dial
                if let Some(node) = dialled {
                    life.dials.lock().refused(node, life.now());
                }
                // but it may also be the one of the two ends that dials: the start does not wait for it
                if let (Some(untried), Some(node)) = (&mut self.untried, node) {
                    untried.remove(&node);
                }
            }
            Effect::Superseded { live } => self.superseded(live),
            // the incarnation was settled at once
            Effect::Reborn => {}
        }
    }

    /// A live node has our name. Found out after the start, it ends this life.
    fn superseded(&mut self, live: Incarnation) {
        let life = &self.life;
        let starting = self.tell.send_if_modified(|progress| {
            let starting = *progress == Progress::Starting;
            if starting {
                *progress = Progress::Superseded(live);
            }
            starting
        });
        if starting || !matches!(*self.tell.borrow(), Progress::Settled(_)) || life.stopping().is_some() {
            return;
        }
        tracing::error!(me = %life.node, %live, "a live node of this name is on the network: leaving");
        {
            let mut links = life.links.lock();
            let peers: Vec<Peer> = links.peers().cloned().collect();
            for peer in peers {
                // reported after this one
                links.disconnect(&peer, life.now());
            }
        }
        // the router takes no further part, instead of believing that it is alone
        life.inbound.peer_up(Peer::new(life.node.clone(), live));
        life.stop(Stop::Goodbye);
    }

    /// Reports that all nodes which were there at the start have been tried.
    fn settle(&mut self) {
        if *self.tell.borrow() != Progress::Starting {
            return;
        }
        let Some(untried) = &mut self.untried else { return };
        let links = self.life.links.lock();
        untried.retain(|node| !links.is_linked(node));
        if untried.is_empty() || Instant::now() >= self.tried_until {
            let me = links.me().clone();
            drop(links);
            self.life.inbound.discovery_settled();
            self.tell.send_replace(Progress::Settled(me));
        }
    }

    fn write(&mut self) {
        for raw in std::mem::take(&mut self.blocked) {
            self.write_one(raw);
        }
        loop {
            let Some(raw) = self.life.links.lock().poll_dirty() else { return };
            self.write_one(raw);
        }
    }

    fn write_one(&mut self, raw: RawId) {
        let Some(wire) = self.wires.get(&raw).cloned() else { return };
        let stopping = self.life.stopping().is_some();
        let mut links = self.life.links.lock();
        loop {
            let room = stopping || wire.has_room();
            if !room && wire.is_stuffed() {
                self.blocked.insert(raw);
                return;
            }
            match links.poll_output(raw, room) {
                Output::Packet(packet) => wire.write(packet),
                Output::Close => {
                    drop(links);
                    wire.close();
                    self.forget(raw);
                    return;
                }
                Output::Idle => {
                    if !room {
                        self.blocked.insert(raw);
                    }
                    return;
                }
            }
        }
    }

    /// Leaves in an orderly way: what is queued is still written.
    async fn goodbye(&mut self) {
        let now = self.life.now();
        self.life.links.lock().shutdown(now);
        self.write();
        let written = async {
            while self.life.carried.load(Ordering::Acquire) > 0 {
                self.life.wake.notified().await;
                // connections that opened meanwhile
                self.life.take(&mut self.arrived);
                for arrival in self.arrived.drain(..) {
                    if let Arrival::Opened(wire) = arrival {
                        wire.close();
                    }
                }
                if self.life.stopping() == Some(Stop::Abort) {
                    return;
                }
            }
        };
        let _ = tokio::time::timeout(GOODBYE, written).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_is_news_once_and_strangers_soon_no_more() {
        let mut news = News::default();
        let node = |name: &str| NodeId::new(name).unwrap();
        let refusal = |theirs| Refusal::Vnodes { theirs, ours: 1 };
        assert!(news.is_news(Some(&node("b")), Some(&node("b")), &refusal(2)));
        assert!(!news.is_news(Some(&node("b")), Some(&node("b")), &refusal(2)));
        assert!(news.is_news(Some(&node("b")), None, &refusal(3)), "another cause");
        let logged = (0..10_000)
            .filter(|number| news.is_news(None, Some(&node(&format!("n{number}"))), &refusal(2)))
            .count();
        assert_eq!(logged, NEWS_OF_STRANGERS);
        for number in 0..2 * NEWS {
            assert!(news.is_news(Some(&node(&format!("n{number}"))), None, &refusal(2)), "a node of ours");
        }
        assert!(news.dialled.len() <= NEWS);
    }
}
