//! A cluster of nodes, its network and its oracle, moved one step at a time.

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::links::Linked;
use super::network::{End, Frame, Network, Out};
use super::step::{CastKind, LinkStep, Place, Step};
use crate::node::message::{DataMessage, Message};
use crate::node::relay::{Audience, Begun, NewCast, Settled};
use crate::node::{Effect, JoinStart, Node, NodeEvent, Published, Settings, Status, Ticket, Time};
use crate::testing::oracle::{self, CastId, Joined, Life, Oracle, Tally, Violation};
use crate::transport::link::{LinkConfig, LinkRules};
use crate::transport::{self, Lane};
use crate::types::{Group, Incarnation, MemberId, NodeId, Peer};
use crate::view::ViewHash;

/// How long a frame may be under way before a transport gives the link up.
pub(super) const MAX_UNDER_WAY: Time = Time::from_millis(4000);

/// A join that waits for its router.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Waiting {
    ticket: Ticket,
    group: usize,
    number: u64,
    since: Time,
}

/// One place: a name, and the node that lives there now.
#[derive(Clone, Debug)]
pub(super) struct Spot {
    id: NodeId,
    life: u64,
    pub(super) node: Option<Node<u64>>,
    work: bool,
    settled: bool,
    status: Status,
    hash: ViewHash,
    waiting: Vec<Waiting>,
    superseded: bool,
    drained: bool,
}

/// Nodes that have the settings of one cluster, in a network of the caller's whims.
///
/// Every step returns the first promise that it broke. Time stands still except in [`Step::Time`].
#[derive(Clone, Debug)]
pub struct Cluster {
    settings: Settings,
    pub(super) spots: Vec<Spot>,
    pub(super) names: Arc<BTreeMap<NodeId, usize>>,
    groups: Vec<Group>,
    group_index: BTreeMap<Group, usize>,
    pub(super) net: Network,
    /// The nodes' link layers, if they have them.
    pub(super) linked: Option<Box<Linked>>,
    oracle: Oracle,
    pub(super) now: Time,
    next_ticket: u64,
    steps: u64,
    trace: u64,
    pub(super) stale: bool,
    calm: bool,
    /// Frames that a data lane holds.
    room: usize,
    /// Broadcasts whose receipt is awaited.
    receipts: BTreeMap<Ticket, CastId>,
    /// Broadcasts that were refused because a queue was full.
    refused: u64,
    /// At which step any node's view last changed.
    view_changed: u64,
    /// At which step a node last had to do with a group: a join or a leave.
    touched: BTreeMap<(usize, Life), u64>,
    /// The longest that a join waited for its answer.
    longest_join: Time,
}

// Making one.
impl Cluster {
    /// `nodes` places `n0`, `n1`, … with nobody running, and the groups `g0`, `g1`, ….
    pub fn new(nodes: usize, groups: usize, settings: Settings) -> Self {
        let names: Vec<String> = (0..nodes).map(|place| format!("n{place}")).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let mut cluster = Self::named(&names, settings);
        (0..groups).for_each(|group| {
            cluster.group(&format!("g{group}"));
        });
        cluster
    }

    /// Places with these names; a name that no node may have is left out.
    pub fn named(names: &[&str], settings: Settings) -> Self {
        let ids: Vec<NodeId> = names.iter().filter_map(|name| NodeId::new(name).ok()).collect();
        let index = ids.iter().cloned().enumerate().map(|(place, id)| (id, place)).collect();
        let spot = |id: NodeId| Spot {
            id,
            life: 0,
            node: None,
            work: false,
            settled: false,
            status: Status::Converging,
            hash: ViewHash::UNSETTLED,
            waiting: Vec::new(),
            superseded: false,
            drained: false,
        };
        Self {
            settings,
            net: Network::new(ids.len()),
            linked: None,
            spots: ids.into_iter().map(spot).collect(),
            names: Arc::new(index),
            groups: Vec::new(),
            group_index: BTreeMap::new(),
            oracle: Oracle::new(),
            now: Time::ZERO,
            next_ticket: 0,
            steps: 0,
            trace: 0,
            stale: true,
            calm: false,
            room: usize::MAX,
            receipts: BTreeMap::new(),
            refused: 0,
            view_changed: 0,
            touched: BTreeMap::new(),
            longest_join: Time::ZERO,
        }
    }

    /// Gives every node that starts from now on a link layer, above raw connections.
    pub(super) fn link_layers(&mut self, config: LinkConfig, rules: LinkRules, width: usize) {
        self.linked = Some(Box::new(Linked::new(self.spots.len(), config, rules, width)));
    }

    /// The number of a group; it gets one when it is first named.
    pub fn group(&mut self, name: &str) -> usize {
        let group = Group::from(name);
        if let Some(index) = self.group_index.get(&group) {
            return *index;
        }
        self.groups.push(group.clone());
        self.group_index.insert(group, self.groups.len() - 1);
        self.groups.len() - 1
    }
}

// Getters.
impl Cluster {
    /// How many places there are.
    pub fn len(&self) -> usize {
        self.spots.len()
    }

    /// Whether there is no place.
    pub fn is_empty(&self) -> bool {
        self.spots.is_empty()
    }

    /// How many groups have been named.
    pub fn groups(&self) -> usize {
        self.groups.len()
    }

    /// The name of a group.
    pub fn group_name(&self, group: usize) -> &Group {
        &self.groups[group]
    }

    /// The node that runs at this place.
    pub fn node(&self, place: usize) -> Option<&Node<u64>> {
        self.spots.get(place).and_then(|spot| spot.node.as_ref())
    }

    /// Who lives at this place, or lived there last.
    pub fn peer(&self, place: usize) -> Peer {
        let spot = &self.spots[place];
        Peer::new(spot.id.clone(), Incarnation::new(spot.life).unwrap_or(Incarnation::MIN))
    }

    /// This life of a place.
    pub(super) fn peer_of(&self, place: usize, life: u64) -> Peer {
        Peer::new(self.spots[place].id.clone(), Incarnation::new(life).unwrap_or(Incarnation::MIN))
    }

    /// The places where a node runs.
    pub fn running(&self) -> impl Iterator<Item = usize> {
        (0..self.spots.len()).filter(|place| self.spots[*place].node.is_some())
    }

    /// The life at this place.
    pub fn life(&self, place: usize) -> Life {
        Life { place, life: self.spots[place].life }
    }

    /// The time since the beginning.
    pub fn now(&self) -> Time {
        self.now
    }

    /// The settings of every node.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Inputs that nodes have taken so far.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// A hash over all that has happened: equal traces, equal runs.
    pub fn trace(&self) -> u64 {
        self.trace
    }

    /// Who knows what must hold.
    pub fn oracle(&self) -> &Oracle {
        &self.oracle
    }

    /// What the oracle has seen.
    pub fn tally(&self) -> Tally {
        self.oracle.tally()
    }

    /// Lets a data lane hold so many frames.
    pub fn set_room(&mut self, frames: usize) {
        self.room = frames;
    }

    /// Broadcasts that were refused because a queue was full.
    pub fn refused(&self) -> u64 {
        self.refused
    }

    /// Broadcasts whose receipt is still awaited.
    pub fn awaited_receipts(&self) -> usize {
        self.receipts.len()
    }

    /// How many joins wait.
    pub fn waiting_joins(&self) -> usize {
        self.spots.iter().map(|spot| spot.waiting.len()).sum()
    }

    /// The longest that any join has waited for its answer.
    pub fn longest_join(&self) -> Time {
        self.longest_join
    }

    /// What is on its way on a lane, the next to arrive first; messages only.
    pub fn on_the_way(&self, from: usize, to: usize, lane: Lane) -> Vec<Message> {
        let (link, side) = self.net.link(from, to);
        link.lanes[side][lane.index()].iter().filter_map(|f| postcard::from_bytes(&f.head).ok()).collect()
    }

    /// The data frames on their way, the next to arrive first.
    pub fn data_on_the_way(&self, from: usize, to: usize) -> Vec<DataMessage> {
        let (link, side) = self.net.link(from, to);
        link.lanes[side][Lane::Data.index()]
            .iter()
            .filter_map(|f| postcard::from_bytes(&f.head).ok())
            .collect()
    }

    /// Whether both ends of the link have been told of it and neither of its end.
    pub fn connected(&self, a: usize, b: usize) -> bool {
        a != b && self.net.link(a, b).0.connected() && self.stands(a, b)
    }

    /// Whether every running node is `Ready` with the same view, which is all of them.
    pub fn is_ready(&self) -> bool {
        let mut hash: Option<ViewHash> = None;
        self.running().all(|place| {
            let Some(node) = self.node(place) else { return false };
            node.with_published(|published| {
                let same = hash.is_none_or(|hash| hash == published.hash);
                hash = Some(published.hash);
                same && published.status == Status::Ready
            })
        })
    }

    pub(super) fn net(&self) -> &Network {
        &self.net
    }

    pub(super) fn has_work(&self, place: usize) -> bool {
        self.spots[place].work
    }

    pub(super) fn is_settled(&self, place: usize) -> bool {
        self.spots[place].settled
    }

    pub(super) fn is_drained(&self, place: usize) -> bool {
        self.spots[place].drained
    }

    /// Whether this node is not where it was in the beginning of its life: its groups' truth.
    fn up(&self, a: usize, b: usize) -> bool {
        let (link, side) = self.net.link(a, b);
        link.ends[side] == End::Up
    }
}

pub(super) type Outcome = Result<(), Violation>;

// Steps.
impl Cluster {
    /// Does one step, or nothing if it cannot be done now.
    ///
    /// # Errors
    /// The first promise that it broke.
    pub fn apply(&mut self, step: Step) -> Outcome {
        self.mix(&step);
        let at = usize::from;
        match step {
            Step::Start(n) => self.start(at(n)),
            Step::Settle(n) => self.settle(at(n)),
            Step::Crash(n) => self.crash(at(n)),
            Step::Drain(n) => self.drain(at(n)),
            Step::Up(a, b) => self.tell_up(at(a), at(b)),
            Step::Down { at: a, of, lose } => self.tell_down(at(a), at(of), lose),
            Step::Suspect { at: a, of, blocked } => self.tell_suspect(at(a), at(of), blocked),
            Step::Resume { at: a, of } => self.tell_resumed(at(a), at(of)),
            Step::Block(a, b) => self.set_blocked(at(a), at(b), true),
            Step::Unblock(a, b) => self.set_blocked(at(a), at(b), false),
            Step::Send(a, b) => self.send(at(a), at(b)),
            Step::Deliver(a, b, lane) => self.deliver(at(a), at(b), lane),
            Step::Room(a, b) => self.tell_room(at(a), at(b)),
            Step::Work(n) => self.work(at(n)),
            Step::Timeout(n) => self.timers(at(n)),
            Step::Quiet => self.check_quiet(),
            Step::Time(ms) => self.pass(Time::from_millis(u64::from(ms))),
            Step::Join(n, g) => self.join(at(n), usize::from(g)).map(|_| ()),
            Step::Leave(n, g, which) => self.leave_nth(at(n), usize::from(g), usize::from(which)),
            Step::Cancel(n, which) => self.cancel_nth(at(n), usize::from(which)),
            Step::Cast(n, g, kind) => self.cast(at(n), usize::from(g), kind).map(|_| ()),
            Step::Link(step) => self.apply_link(step),
        }
    }

    fn mix(&mut self, step: &Step) {
        // the step's text would do; its parts are cheaper
        let parts = match *step {
            Step::Start(n) => [1, n, 0, 0],
            Step::Settle(n) => [2, n, 0, 0],
            Step::Crash(n) => [3, n, 0, 0],
            Step::Drain(n) => [4, n, 0, 0],
            Step::Up(a, b) => [5, a, b, 0],
            Step::Down { at, of, lose } => [6, at, of, u8::from(lose)],
            Step::Suspect { at, of, blocked } => [7, at, of, u8::from(blocked)],
            Step::Resume { at, of } => [8, at, of, 0],
            Step::Block(a, b) => [9, a, b, 0],
            Step::Unblock(a, b) => [10, a, b, 0],
            Step::Send(a, b) => [11, a, b, 0],
            Step::Deliver(a, b, lane) => [12, a, b, lane.index() as u8],
            Step::Work(n) => [13, n, 0, 0],
            Step::Timeout(n) => [14, n, 0, 0],
            Step::Quiet => [21, 0, 0, 0],
            Step::Time(ms) => [15, ms as u8, (ms >> 8) as u8, (ms >> 16) as u8],
            Step::Join(n, g) => [16, n, g as u8, (g >> 8) as u8],
            Step::Leave(n, g, which) => [17, n, g as u8, which],
            Step::Cancel(n, which) => [18, n, which, 0],
            Step::Room(a, b) => [20, a, b, 0],
            Step::Cast(n, g, kind) => [19, n, g as u8, kind as u8],
            Step::Link(step) => {
                self.mix_bytes(format!("{step:?}").as_bytes());
                return;
            }
        };
        self.mix_bytes(&parts);
    }

    fn mix_bytes(&mut self, bytes: &[u8]) {
        self.trace = xxh3_64_with_seed(bytes, self.trace);
    }

    /// A node starts here, in the next life, if none runs.
    ///
    /// # Errors
    /// As [`Cluster::apply`].
    pub fn start(&mut self, place: usize) -> Outcome {
        self.start_with(place, self.settings.clone())
    }

    /// A node with settings of its own starts here, if none runs.
    ///
    /// # Errors
    /// As [`Cluster::apply`].
    pub fn start_with(&mut self, place: usize, settings: Settings) -> Outcome {
        let Some(spot) = self.spots.get_mut(place).filter(|spot| spot.node.is_none()) else { return Ok(()) };
        spot.life += 1;
        spot.settled = false;
        spot.superseded = false;
        spot.drained = false;
        let me = self.peer(place);
        if let Some(linked) = self.linked.as_mut() {
            linked.start(me.clone(), place);
        }
        let node = Node::new(me, settings, self.now);
        self.spots[place].node = Some(node);
        self.collect(place)
    }

    /// The node's discovery has settled.
    ///
    /// # Errors
    /// As [`Cluster::apply`].
    pub fn settle(&mut self, place: usize) -> Outcome {
        let now = self.now;
        self.input(place, |node, _| node.handle_discovery_settled(now))?;
        self.spots[place].settled = self.spots[place].node.is_some();
        Ok(())
    }

    /// The node dies. The others find out one by one; what it sent still arrives until then.
    ///
    /// # Errors
    /// As [`Cluster::apply`].
    pub fn crash(&mut self, place: usize) -> Outcome {
        self.die(place, false)
    }

    /// The same; if it `vanished`, its connections do not break either.
    pub(super) fn die(&mut self, place: usize, vanished: bool) -> Outcome {
        if self.spots[place].node.take().is_none() {
            return Ok(());
        }
        if let Some(linked) = self.linked.as_mut() {
            linked.end(place, vanished);
        }
        self.oracle.died(self.life(place));
        let dead = self.life(place);
        self.receipts.retain(|_, cast| self.oracle.origin(*cast) != Some(dead));
        let spot = &mut self.spots[place];
        spot.waiting.clear();
        spot.work = false;
        for other in 0..self.spots.len() {
            if other == place {
                continue;
            }
            let (link, side) = self.net.link_mut(place, other);
            link.old[side] = None;
            if link.ends[side] != End::Gone {
                link.end(side, false);
            }
        }
        self.stale = true;
        self.refresh_calm();
        Ok(())
    }

    /// The node begins to drain.
    ///
    /// # Errors
    /// As [`Cluster::apply`].
    pub fn drain(&mut self, place: usize) -> Outcome {
        let now = self.now;
        self.spots[place].drained = self.spots[place].node.is_some();
        self.input(place, |node, _| node.drain(now))
    }

    /// One end is told that the other is up. The first call of a pair opens a session.
    ///
    /// # Errors
    /// As [`Cluster::apply`].
    pub fn tell_up(&mut self, at: usize, of: usize) -> Outcome {
        if at == of || self.node(at).is_none() || self.node(of).is_none() || self.linked.is_some() {
            return Ok(());
        }
        let lives = [self.spots[at.min(of)].life, self.spots[at.max(of)].life];
        let (link, side) = self.net.link_mut(at, of);
        let reborn = link.ends[side] == End::Gone && link.lives[side] != lives[side];
        if link.closed() {
            link.begin(lives);
        } else if reborn && link.ends[1 - side] == End::Up {
            // the reborn one has met the other, who has not noticed yet that the earlier life is over
            link.old[1 - side] = Some(link.lives[side]);
            link.begin(lives);
        }
        if link.ends[side] != End::Waiting || link.lives != lives {
            return Ok(());
        }
        if link.old[side].is_some() {
            self.tell_down(at, of, true)?;
        }
        let (link, side) = self.net.link_mut(at, of);
        link.ends[side] = End::Up;
        link.open = link.ends[1 - side] == End::Up;
        self.stale = true;
        let (peer, now) = (self.peer(of), self.now);
        self.input(at, |node, wire| node.handle_peer_up(peer, wire, now))
    }

    /// One end is told that the other is down; `lose` what it had sent, or let it arrive until the other is
    /// told as well.
    ///
    /// # Errors
    /// As [`Cluster::apply`].
    pub fn tell_down(&mut self, at: usize, of: usize, lose: bool) -> Outcome {
        if at == of || self.node(at).is_none() || self.linked.is_some() {
            return Ok(());
        }
        let (link, side) = self.net.link_mut(at, of);
        let life = match link.old[side].take() {
            Some(old) => old,
            None if link.ends[side] == End::Up => {
                link.end(side, lose);
                link.lives[1 - side]
            }
            None => return Ok(()),
        };
        self.stale = true;
        let peer = Peer::new(self.spots[of].id.clone(), Incarnation::new(life).unwrap_or(Incarnation::MIN));
        let now = self.now;
        self.input(at, |node, wire| node.handle_peer_down(&peer, wire, now))
    }

    /// One end is told that the other is suspect; `blocked` if the link stands still in fact.
    ///
    /// # Errors
    /// As [`Cluster::apply`].
    pub fn tell_suspect(&mut self, at: usize, of: usize, blocked: bool) -> Outcome {
        if at == of || self.node(at).is_none() || !self.up(at, of) || self.linked.is_some() {
            return Ok(());
        }
        let (link, side) = self.net.link_mut(at, of);
        if !link.open || link.suspect[side] {
            return Ok(());
        }
        link.suspect[side] = true;
        if blocked {
            link.blocked = [true; 2];
        }
        let life = link.lives[1 - side];
        self.stale = true;
        let peer = Peer::new(self.spots[of].id.clone(), Incarnation::new(life).unwrap_or(Incarnation::MIN));
        let now = self.now;
        self.input(at, |node, wire| node.handle_peer_suspect(&peer, wire, now))
    }

    /// One end is told that a suspect is back.
    ///
    /// # Errors
    /// As [`Cluster::apply`].
    pub fn tell_resumed(&mut self, at: usize, of: usize) -> Outcome {
        if at == of || self.node(at).is_none() || !self.up(at, of) || self.linked.is_some() {
            return Ok(());
        }
        let (link, side) = self.net.link_mut(at, of);
        if !std::mem::take(&mut link.suspect[side]) {
            return Ok(());
        }
        if link.suspect == [false; 2] {
            link.blocked = [false; 2];
        }
        let life = link.lives[1 - side];
        self.stale = true;
        let peer = Peer::new(self.spots[of].id.clone(), Incarnation::new(life).unwrap_or(Incarnation::MIN));
        let now = self.now;
        self.input(at, |node, wire| node.handle_peer_resumed(&peer, wire, now))
    }

    fn set_blocked(&mut self, from: usize, to: usize, blocked: bool) -> Outcome {
        if from != to && self.linked.is_none() {
            let (link, side) = self.net.link_mut(from, to);
            if link.open && !link.closed() {
                link.blocked[side] = blocked;
                self.stale = true;
                self.refresh_calm();
            }
        }
        Ok(())
    }

    /// Holds a lane back from one to the other, or lets it go: for schedules by hand.
    pub fn hold(&mut self, from: usize, to: usize, lane: Lane, held: bool) {
        let (link, side) = self.net.link_mut(from, to);
        link.held[side][lane.index()] = held;
    }

    /// Time goes by; less than asked for if a frame would be under way for longer than a link allows.
    ///
    /// # Errors
    /// As [`Cluster::apply`], where a link is given up.
    pub fn pass(&mut self, time: Time) -> Outcome {
        if self.linked.is_some() {
            return self.pass_linked(time);
        }
        let end = self.now.saturating_add(time);
        let limit = self.net.oldest().map_or(end, |sent| sent.saturating_add(MAX_UNDER_WAY).max(self.now));
        self.now = end.min(limit);
        Ok(())
    }

    /// The node looks at its timers.
    ///
    /// # Errors
    /// As [`Cluster::apply`].
    pub fn timers(&mut self, place: usize) -> Outcome {
        let now = self.now;
        self.input(place, |node, wire| node.handle_timeout(wire, now))
    }

    /// One step of background work.
    ///
    /// # Errors
    /// As [`Cluster::apply`].
    pub fn work(&mut self, place: usize) -> Outcome {
        let now = self.now;
        let mut more = false;
        self.spots[place].work = false;
        self.input(place, |node, _| more = node.work(now))?;
        self.spots[place].work |= more;
        Ok(())
    }

    /// Gives an input to the node and carries out what it asks for.
    pub(super) fn input(&mut self, place: usize, act: impl FnOnce(&Node<u64>, &mut Out<'_>)) -> Outcome {
        let sent = self.act(place, act);
        self.count_payload(sent)?;
        self.collect(place)
    }

    /// Gives an input to the node; what payload it sent.
    fn act(&mut self, place: usize, act: impl FnOnce(&Node<u64>, &mut Out<'_>)) -> Vec<(Peer, u64, usize)> {
        // a link that has just become suspect excuses what the node does about it
        self.refresh_calm();
        let Some(node) = self.spots.get(place).and_then(|spot| spot.node.as_ref()) else {
            return Vec::new();
        };
        self.steps += 1;
        let mut out = Out {
            net: &mut self.net,
            names: &self.names,
            from: place,
            room: self.room,
            now: self.now,
            sent: Vec::new(),
            busy: false,
            links: self.linked.as_mut().and_then(|linked| linked.at(place)),
            untold: None,
        };
        act(node, &mut out);
        let Out { sent, busy, untold, .. } = out;
        if let (Some(to), Some(linked)) = (untold, self.linked.as_mut()) {
            let what = format!("n{place}'s link takes a frame to n{to}, of which it has not been told");
            linked.broken.get_or_insert_with(|| Violation::new("contract", what));
        }
        if busy {
            self.stale = true;
            self.refresh_calm();
        }
        sent
    }

    fn count_payload(&mut self, sent: Vec<(Peer, u64, usize)>) -> Outcome {
        for (origin, seq, to) in sent {
            let Some(place) = self.names.get(&origin.node).copied() else { continue };
            let origin = Life { place, life: origin.incarnation.get() };
            self.oracle.payload_sent(origin, seq, to)?;
        }
        Ok(())
    }

    /// A sender is told that its queue has room again.
    fn tell_room(&mut self, from: usize, to: usize) -> Outcome {
        if from == to {
            return Ok(());
        }
        let (link, side) = self.net.link_mut(from, to);
        if !std::mem::take(&mut link.room[side]) {
            return Ok(());
        }
        self.stale = true;
        let life = link.lives[1 - side];
        let peer = self.peer_of(to, life);
        self.input(from, |node, wire| node.handle_room(&peer, wire))
    }

    pub(super) fn collect(&mut self, place: usize) -> Outcome {
        let mut outcome = Ok(());
        let mut changed = false;
        while let Some(effect) = self.spots[place].node.as_ref().and_then(Node::poll_effect) {
            match effect {
                Effect::Transmit(peer) => {
                    if let Some(to) = self.names.get(&peer.node).copied() {
                        let (link, side) = self.net.link_mut(place, to);
                        link.wake[side] = link.ends[side] == End::Up;
                    }
                }
                Effect::Work => self.spots[place].work = true,
                Effect::Joined { ticket, result } => {
                    let answered = self.answered(place, ticket, result.is_ok());
                    outcome = outcome.and(answered);
                }
                Effect::Changed => changed = true,
                Effect::Settled(settled) => {
                    let judged = self.settled(place, &settled);
                    outcome = outcome.and(judged);
                }
                Effect::Room => {}
                Effect::Event(NodeEvent::Superseded { .. }) => self.spots[place].superseded = true,
                Effect::Event(_) => {}
            }
        }
        if changed {
            let now = self.node(place).map(|node| node.with_published(|p| (p.status, p.hash)));
            let spot = &mut self.spots[place];
            let (status, hash) = now.unwrap_or((Status::Converging, ViewHash::UNSETTLED));
            spot.status = status;
            if std::mem::replace(&mut spot.hash, hash) != hash {
                self.view_changed = self.steps;
            }
            self.stale = true;
        }
        self.refresh_calm();
        if self.steps.is_multiple_of(512)
            && let Some(node) = self.node(place)
        {
            node.check_invariants().map_err(|broken| Violation::new("invariant", broken))?;
        }
        outcome.and_then(|()| self.flush(place))
    }

    fn refresh_calm(&mut self) {
        if std::mem::take(&mut self.stale) {
            self.calm = !self.net.disturbed() && self.is_decided() && self.is_ready();
            self.oracle.set_calm(self.calm);
        }
    }

    fn answered(&mut self, place: usize, ticket: Ticket, ok: bool) -> Outcome {
        let life = self.life(place);
        let now = self.now;
        let spot = &mut self.spots[place];
        let Some(at) = spot.waiting.iter().position(|waiting| waiting.ticket == ticket) else {
            return Err(Violation::new("join", format!("{life}: {ticket:?} was answered but does not wait")));
        };
        let waiting = spot.waiting.swap_remove(at);
        self.longest_join = self.longest_join.max(now.saturating_sub(waiting.since));
        if ok {
            self.oracle.joined(waiting.group, Joined { at: life, number: waiting.number });
        }
        Ok(())
    }
}

// Members.
impl Cluster {
    /// A new member joins; its number, whether or not it is answered yet.
    ///
    /// # Errors
    /// As [`Cluster::apply`].
    pub fn join(&mut self, place: usize, group: usize) -> Result<Option<u64>, Violation> {
        let Some(number) = self.node(place).map(Node::next_member_number) else { return Ok(None) };
        self.join_as(place, group, number).map(|_| Some(number))
    }

    /// The member of this number joins (again).
    ///
    /// # Errors
    /// As [`Cluster::apply`].
    pub fn join_as(
        &mut self,
        place: usize,
        group: usize,
        number: u64,
    ) -> Result<Option<JoinStart<u64>>, Violation> {
        let Some(name) = self.groups.get(group).cloned() else { return Ok(None) };
        self.next_ticket += 1;
        let ticket = Ticket(self.next_ticket);
        let (life, now) = (self.life(place), self.now);
        let Some(node) = &self.spots[place].node else { return Ok(None) };
        self.steps += 1;
        self.touched.insert((group, life), self.steps);
        let start = node.join(name, number, number, ticket, now);
        match &start {
            JoinStart::Joined => self.oracle.joined(group, Joined { at: life, number }),
            JoinStart::Waiting => {
                self.spots[place].waiting.push(Waiting { ticket, group, number, since: now });
            }
            JoinStart::AlreadyMember | JoinStart::Unsettled(_) | JoinStart::Refused(_) => {}
        }
        self.collect(place)?;
        Ok(Some(start))
    }

    /// A message arrives outside the order of its lane: a late one, or one more time.
    ///
    /// # Errors
    /// As [`Cluster::apply`].
    pub fn inject(&mut self, from: &Peer, to: usize, message: Message) -> Outcome {
        let now = self.now;
        self.input(to, |node, wire| node.handle_message(from, message, wire, now))
    }

    /// A member leaves.
    ///
    /// # Errors
    /// As [`Cluster::apply`].
    pub fn leave(&mut self, place: usize, group: usize, number: u64) -> Outcome {
        let Some(name) = self.groups.get(group).cloned() else { return Ok(()) };
        self.oracle.left(group, Joined { at: self.life(place), number });
        self.touched.insert((group, self.life(place)), self.steps + 1);
        let now = self.now;
        let mut gone = None;
        self.input(place, |node, _| gone = node.leave(name.as_bytes(), number, now))
    }

    fn leave_nth(&mut self, place: usize, group: usize, which: usize) -> Outcome {
        let life = self.life(place);
        let here: Vec<u64> =
            self.oracle.members(group).iter().filter(|m| m.at == life).map(|m| m.number).collect();
        match here.get(which % here.len().max(1)) {
            Some(number) => self.leave(place, group, *number),
            None => Ok(()),
        }
    }

    fn cancel_nth(&mut self, place: usize, which: usize) -> Outcome {
        let waiting = &self.spots[place].waiting;
        let Some(waiting) = waiting.get(which % waiting.len().max(1)).cloned() else { return Ok(()) };
        let Some(name) = self.groups.get(waiting.group).cloned() else { return Ok(()) };
        let mut given_up = false;
        self.input(place, |node, _| given_up = node.cancel_join(name.as_bytes(), waiting.ticket).is_some())?;
        if given_up {
            self.spots[place].waiting.retain(|other| other.ticket != waiting.ticket);
        }
        Ok(())
    }
}

// Frames.
impl Cluster {
    fn send(&mut self, from: usize, to: usize) -> Outcome {
        if from != to && self.linked.is_some() {
            return self.send_linked(from, to);
        }
        if from == to || !self.net.link(from, to).0.connected() {
            return Ok(());
        }
        let (peer, now) = (self.peer(to), self.now);
        let Some(node) = &self.spots[from].node else { return Ok(()) };
        let (link, side) = self.net.link_mut(from, to);
        link.wake[side] = false;
        while let Some(out) = node.poll_transmit(&peer, now) {
            let Ok(head) = postcard::to_allocvec(&out.message) else {
                return Err(Violation::new("wire", format!("{:?} cannot be encoded", out.message)));
            };
            let frame = Frame { sent: now, head: head.into(), body: Bytes::new() };
            link.lanes[side][out.lane.index()].push_back(frame);
        }
        self.collect(from)
    }

    /// The next frame of a lane arrives.
    ///
    /// # Errors
    /// As [`Cluster::apply`].
    pub fn deliver(&mut self, from: usize, to: usize, lane: Lane) -> Outcome {
        if from == to {
            return Ok(());
        }
        let (link, side) = self.net.link_mut(from, to);
        if !link.may_deliver(side, lane) {
            return Ok(());
        }
        let life = link.lives[side];
        let Some(frame) = link.lanes[side][lane.index()].pop_front() else { return Ok(()) };
        if lane == Lane::Data {
            let full = std::mem::take(&mut link.full[side]);
            link.room[side] |= full;
            self.stale |= full;
        }
        let peer = self.peer_of(from, life);
        self.hand_over(from, to, &peer, transport::Frame { lane, head: frame.head, body: frame.body })
    }

    /// A frame has arrived and is given to the node.
    pub(super) fn hand_over(
        &mut self,
        from: usize,
        to: usize,
        peer: &Peer,
        frame: transport::Frame,
    ) -> Outcome {
        self.mix_bytes(&frame.head);
        if frame.lane == Lane::Data {
            let message = postcard::from_bytes(&frame.head)
                .map_err(|error| Violation::new("wire", format!("a data frame does not decode: {error}")))?;
            return self.deliver_data(from, to, peer, message, frame.body);
        }
        let message: Message = postcard::from_bytes(&frame.head)
            .map_err(|error| Violation::new("wire", format!("a frame does not decode: {error}")))?;
        let now = self.now;
        self.input(to, |node, wire| node.handle_message(peer, message, wire, now))
    }

    /// A broadcast begins; `None` if nobody runs here or a queue is full.
    ///
    /// # Errors
    /// As [`Cluster::apply`].
    pub fn cast(&mut self, place: usize, group: usize, kind: CastKind) -> Result<Option<CastId>, Violation> {
        let Some(name) = self.groups.get(group).cloned() else { return Ok(None) };
        if self.node(place).is_none() {
            return Ok(None);
        }
        self.ask(place, group)?;
        let origin = self.life(place);
        let members = self.oracle.members(group);
        let except = match kind {
            CastKind::ExceptOwn => members.iter().find(|m| m.at == origin).copied(),
            CastKind::ExceptOther => members.iter().find(|m| m.at != origin).copied(),
            CastKind::All | CastKind::AtMostOnce | CastKind::OneNode => None,
        };
        let only = match kind {
            CastKind::OneNode => members.iter().map(|m| m.at).find(|at| *at != origin),
            _ => None,
        };
        self.next_ticket += 1;
        let ticket = Ticket(self.next_ticket);
        let at_most_once = kind == CastKind::AtMostOnce;
        let new = NewCast {
            group: name.clone(),
            body: Bytes::copy_from_slice(&(self.oracle.tally().broadcasts).to_le_bytes()),
            except: except.map(|m| MemberId::new(self.peer(m.at.place), m.number)),
            headers: Vec::new(),
            at_most_once,
            audience: only.map_or(Audience::Group, |only| Audience::Node(self.peer(only.place))),
            ticket: (!at_most_once).then_some(ticket),
        };
        let mut begun = None;
        let sent = self.act(place, |node, wire| begun = Some(node.broadcast(new, wire)));
        let Some(Begun::Sent { id, deliver_here }) = begun else {
            self.refused += 1;
            self.collect(place)?;
            return Ok(None);
        };
        let new = oracle::NewCast { origin, seq: id.seq, group, except, only, at_most_once };
        let mut oracle = std::mem::take(&mut self.oracle);
        let cast = oracle.began(new, |life| {
            if life == origin {
                return Some(0);
            }
            let (link, side) = self.net.link(place, life.place);
            (self.connected(place, life.place) && link.lives[1 - side] == life.life).then_some(link.session)
        });
        self.oracle = oracle;
        if !at_most_once {
            self.receipts.insert(ticket, cast);
        }
        self.count_payload(sent)?;
        if deliver_here {
            self.deliver_here(place, origin, id.seq, group)?;
        }
        self.collect(place)?;
        Ok(Some(cast))
    }

    /// A caller that wires its own hops asks the router, and a hop takes no time: a decision must name everybody.
    fn ask(&self, place: usize, group: usize) -> Outcome {
        let Some(node) = self.node(place) else { return Ok(()) };
        let name = self.groups[group].as_bytes();
        let (router, hash) = node.with_published(|p| (p.router(name).clone(), p.sender_hash()));
        let Some(at) = self.names.get(&router.node).copied() else { return Ok(()) };
        if at != place && !(self.connected(place, at) && self.peer(at) == router) {
            return Ok(());
        }
        let Some(Ok(targets)) = self.node(at).map(|node| node.target_peers(name, hash)) else {
            return Ok(());
        };
        for member in self.oracle.members(group) {
            let connected = member.at.place == place || self.connected(place, member.at.place);
            if connected && !targets.contains(&self.peer(member.at.place)) {
                let what = format!(
                    "n{place} asks n{at}, which names {targets:?} for group {group}; member {} on {} is missing",
                    member.number, member.at
                );
                return Err(Violation::new("P1", what));
            }
        }
        Ok(())
    }

    /// Gives a broadcast to the members of this node.
    fn deliver_here(
        &mut self,
        place: usize,
        origin: Life,
        seq: u64,
        group: usize,
    ) -> Result<bool, Violation> {
        let Some(node) = &self.spots[place].node else { return Ok(false) };
        let members = node.local_members(self.groups[group].as_bytes());
        let at = self.life(place);
        let except = self.oracle.find(origin, seq).and_then(|cast| self.oracle.except(cast));
        for member in members.iter() {
            let joined = Joined { at, number: member.number };
            if except != Some(joined) {
                self.oracle.delivered(origin, seq, group, joined)?;
            }
        }
        Ok(!members.is_empty())
    }

    fn deliver_data(
        &mut self,
        from: usize,
        to: usize,
        peer: &Peer,
        message: DataMessage,
        body: Bytes,
    ) -> Outcome {
        if let DataMessage::Route { cast, hash } = &message {
            // the origin floods when its router goes: what is lost then is not the decision's fault
            if self.up(from, to) {
                let origin = Life { place: from, life: cast.id.origin.incarnation.get() };
                let group = self.group_index.get(&cast.group).copied();
                if let (Some(id), Some(group)) = (self.oracle.find(origin, cast.id.seq), group) {
                    self.check_decision(to, group, *hash, id)?;
                }
            }
        }
        let now = self.now;
        let mut delivery = None;
        self.input(to, |node, wire| delivery = node.handle_data_frame(peer, message, body, wire, now))?;
        let Some(delivery) = delivery else { return Ok(()) };
        let origin = self.names.get(&delivery.id.origin.node).copied();
        let (Some(place), Some(group)) = (origin, self.group_index.get(&delivery.group).copied()) else {
            return Err(Violation::new("unknown", format!("{delivery:?} came from nowhere")));
        };
        let origin = Life { place, life: delivery.id.origin.incarnation.get() };
        let number = self.oracle.find(origin, delivery.id.seq).map_or(u64::MAX, |cast| cast.0 as u64);
        if *delivery.body != number.to_le_bytes() {
            return Err(Violation::new("payload", format!("{} came with another's payload", delivery.id)));
        }
        let some = self.deliver_here(to, origin, delivery.id.seq, group)?;
        if let Some(node) = &self.spots[to].node {
            if !some && delivery.targeted {
                node.tell_not_held(peer, &delivery.group, now);
            }
            node.delivered(peer, delivery.hop);
        }
        self.collect(to)
    }

    /// The origin takes a broadcast for settled: everybody reachable must have it.
    fn settled(&mut self, place: usize, settled: &Settled) -> Outcome {
        let Some(cast) = self.receipts.remove(&settled.ticket) else {
            return Err(Violation::new("receipt", format!("n{place}: {settled:?} was awaited by nobody")));
        };
        let mut oracle = std::mem::take(&mut self.oracle);
        let outcome = oracle.settled(cast, |origin, at, session| {
            // a suspect gets it when it resumes
            self.kept_between(origin, at, session)
                && (origin == at || {
                    let (link, side) = self.net.link(origin.place, at.place);
                    !link.suspect[side]
                })
        });
        self.oracle = oracle;
        outcome
    }

    /// What the router decides must name everybody who must get the broadcast.
    fn check_decision(&self, router: usize, group: usize, hash: ViewHash, id: CastId) -> Outcome {
        let Some(node) = self.node(router) else { return Ok(()) };
        let Ok(targets) = node.target_peers(self.groups[group].as_bytes(), hash) else { return Ok(()) };
        for (member, session) in self.oracle.waiting(id) {
            let peer = self.peer(member.at.place);
            if !targets.contains(&peer) && self.kept(id, member, session) {
                return Err(Violation::new(
                    "P1",
                    format!(
                        "router n{router} decides {targets:?} for group {group}; member {} on {} is missing",
                        member.number, member.at
                    ),
                ));
            }
        }
        Ok(())
    }

    fn kept(&self, id: CastId, member: Joined, session: u32) -> bool {
        let Some(origin) = self.oracle.origin(id) else { return false };
        self.kept_between(origin, member.at, session)
    }

    fn kept_between(&self, origin: Life, at: Life, session: u32) -> bool {
        if self.life(origin.place) != origin || self.node(origin.place).is_none() {
            return false;
        }
        if origin == at {
            return true;
        }
        self.connected(origin.place, at.place) && self.net.link(origin.place, at.place).0.session == session
    }

    /// Judges all broadcasts: nothing is on its way.
    ///
    /// # Errors
    /// P1.
    pub fn judge(&mut self) -> Outcome {
        let mut oracle = std::mem::take(&mut self.oracle);
        let outcome = oracle.judge(|origin, at, session| self.kept_between(origin, at, session));
        self.oracle = oracle;
        outcome
    }
}

// Whole-cluster moves, for schedules by hand and for healing.
impl Cluster {
    /// Carries out everything that is due, in a fixed order, until nothing moves; held lanes stay.
    ///
    /// # Errors
    /// As [`Cluster::apply`]; P6 if it does not come to rest.
    pub fn run(&mut self) -> Outcome {
        for _ in 0..1_000_000 {
            if !self.run_once()? {
                return Ok(());
            }
        }
        Err(Violation::new("P6", "the cluster does not come to rest"))
    }

    fn run_once(&mut self) -> Result<bool, Violation> {
        if self.linked.is_some() {
            return self.run_once_linked();
        }
        let mut moved = false;
        for a in 0..self.spots.len() {
            while self.spots[a].work {
                moved = true;
                self.apply(Step::Work(a as Place))?;
            }
            for b in 0..self.spots.len() {
                if a == b {
                    continue;
                }
                let (link, side) = self.net.link(a, b);
                if link.room[side] {
                    moved = true;
                    self.apply(Step::Room(a as Place, b as Place))?;
                }
                let (link, side) = self.net.link(a, b);
                if link.wake[side] && link.connected() {
                    moved = true;
                    self.apply(Step::Send(a as Place, b as Place))?;
                }
                for lane in Lane::ALL {
                    let (link, side) = self.net.link(a, b);
                    if link.may_deliver(side, lane) {
                        moved = true;
                        self.apply(Step::Deliver(a as Place, b as Place, lane))?;
                    }
                }
            }
        }
        Ok(moved)
    }

    /// Time goes by in ticks; everything due is carried out after each.
    ///
    /// # Errors
    /// As [`Cluster::run`].
    pub fn pass_time(&mut self, time: Time) -> Outcome {
        let tick = self.settings.tick();
        let end = self.now.saturating_add(time);
        while self.now < end {
            let before = self.now;
            self.apply(Step::Time(tick.min(end - self.now).as_millis() as u32))?;
            if self.now == before {
                self.now = end.min(before + tick);
            }
            for place in 0..self.spots.len() {
                self.apply(Step::Timeout(place as Place))?;
            }
            self.run()?;
        }
        Ok(())
    }

    /// Links two running nodes, the second one told first.
    ///
    /// # Errors
    /// As [`Cluster::apply`].
    pub fn connect(&mut self, a: usize, b: usize) -> Outcome {
        if self.linked.is_some() {
            return self.apply(Step::Link(LinkStep::Dial(a as Place, b as Place)));
        }
        self.tell_up(b, a)?;
        self.tell_up(a, b)
    }

    /// Cuts a link: both ends are told, what was on its way is lost.
    ///
    /// # Errors
    /// As [`Cluster::apply`].
    pub fn cut(&mut self, a: usize, b: usize) -> Outcome {
        self.tell_down(a, b, true)?;
        self.tell_down(b, a, true)
    }

    /// A node dies and everybody finds out at once.
    ///
    /// # Errors
    /// As [`Cluster::apply`].
    pub fn kill(&mut self, place: usize) -> Outcome {
        self.crash(place)?;
        for other in 0..self.spots.len() {
            self.tell_down(other, place, true)?;
        }
        Ok(())
    }

    /// Starts these places and links all that run.
    ///
    /// # Errors
    /// As [`Cluster::apply`].
    pub fn start_all(&mut self, places: impl IntoIterator<Item = usize>) -> Outcome {
        for place in places {
            self.start(place)?;
            let others: Vec<usize> = self.running().filter(|other| *other != place).collect();
            for other in others {
                self.connect(place, other)?;
            }
            if self.linked.is_some() {
                self.run()?;
            }
            self.settle(place)?;
        }
        Ok(())
    }

    /// Ends every fault: links are whole and nothing is blocked, held or suspect.
    ///
    /// # Errors
    /// As [`Cluster::apply`].
    pub fn heal(&mut self) -> Outcome {
        self.heal_linked()?;
        for (a, b) in self.net.pairs().collect::<Vec<_>>() {
            let (link, _) = self.net.link_mut(a, b);
            link.blocked = [false; 2];
            link.held = [[false; 3]; 2];
            self.stale = true;
            for (x, y) in [(a, b), (b, a)] {
                let (link, side) = self.net.link(x, y);
                let dead = link.old[side].is_some()
                    || link.ends[side] == End::Up
                        && (link.ends[1 - side] == End::Gone || (self.node(y).is_none()));
                if dead {
                    self.apply(Step::Down { at: x as Place, of: y as Place, lose: true })?;
                } else {
                    self.apply(Step::Resume { at: x as Place, of: y as Place })?;
                }
            }
            self.apply(Step::Up(a as Place, b as Place))?;
            self.apply(Step::Up(b as Place, a as Place))?;
        }
        for place in 0..self.spots.len() {
            if !self.spots[place].settled {
                self.apply(Step::Settle(place as Place))?;
            }
        }
        Ok(())
    }

    /// Compares every table with the truth: each claimed group has its row at its router, and there is no
    /// other row.
    ///
    /// # Errors
    /// P5, with the first difference.
    pub fn check_tables(&self) -> Outcome {
        let mut truth = Vec::new();
        let mut seen = Vec::new();
        for place in self.running() {
            let Some(node) = self.node(place) else { continue };
            node.check_invariants().map_err(|broken| Violation::new("invariant", broken))?;
            let me = node.me().clone();
            let published = node.published();
            for (group, state, members) in node.claims() {
                let index = self.group_index.get(&group).copied().unwrap_or(usize::MAX);
                let ours = self.oracle.members(index).iter().filter(|m| m.at == self.life(place)).count();
                if ours != members {
                    let what = format!("{me} has {members} members of {group}, the truth is {ours}");
                    return Err(Violation::new("members", what));
                }
                let router = published.router(group.as_bytes()).clone();
                if router != me && matches!(state, "Held" | "Cooldown") {
                    truth.push((router, group, me.clone()));
                }
            }
            for group in 0..self.oracle.groups() {
                let members = self.oracle.members(group).iter().filter(|m| m.at == self.life(place)).count();
                if members > 0 && !node.holds(self.groups[group].as_bytes()) {
                    let what = format!("{me} holds no {} but has {members} members", self.groups[group]);
                    return Err(Violation::new("members", what));
                }
            }
            let rows = node.rows().into_iter().filter(|(.., present)| *present);
            seen.extend(rows.map(|(group, source, ..)| (me.clone(), group, source)));
        }
        truth.sort();
        seen.sort();
        if let Some((router, group, source)) = truth.iter().find(|row| seen.binary_search(row).is_err()) {
            return Err(Violation::new(
                "P5",
                format!("missing row: {router} does not know that {source} holds {group}"),
            ));
        }
        if let Some((router, group, source)) = seen.iter().find(|row| truth.binary_search(row).is_err()) {
            return Err(Violation::new(
                "P5",
                format!("phantom row: {router} believes that {source} holds {group}"),
            ));
        }
        Ok(())
    }

    /// If nothing is on its way and every pair of running nodes is connected: every node is `Ready`, every held
    /// group has its row at its router, and a router has no row, younger than the view, of a group that its
    /// source knows nothing of.
    /// Unlike [`Cluster::check_tables`] this leaves no time for repairs.
    ///
    /// # Errors
    /// P5, with the first difference.
    pub fn check_quiet(&self) -> Outcome {
        let told = self.linked.as_ref().is_none_or(|linked| !linked.is_any_pending());
        let moving = !told || self.net.disturbed() || self.net.in_flight() > 0 || self.net.woken();
        let running: Vec<usize> = self.running().collect();
        let meshed = running.iter().all(|a| running.iter().all(|b| a == b || self.connected(*a, *b)));
        let alone = running.len() < 2;
        if moving || !meshed || alone || running.iter().any(|place| self.spots[*place].work) {
            return Ok(());
        }
        if !self.is_ready() {
            return Err(Violation::new(
                "P5",
                format!("quiet and connected, but not Ready\n{}", self.describe()),
            ));
        }
        let mut rows = Vec::new();
        let mut claims = Vec::new();
        for place in running {
            let Some(node) = self.node(place) else { continue };
            let me = node.me().clone();
            let published = node.published();
            let routed_here = |group: &Group| *published.router(group.as_bytes()) == me;
            let present = node.rows().into_iter().filter(|(group, _, _, there)| *there && routed_here(group));
            rows.extend(present.map(|(group, source, ..)| (group, source)));
            claims.extend(node.claims().into_iter().map(|(group, state, _)| {
                let router = published.router(group.as_bytes()) == &me;
                (group, me.clone(), matches!(state, "Held" | "Cooldown") && !router)
            }));
        }
        rows.sort();
        claims.sort();
        let row = |group: &Group, source: &Peer| rows.binary_search(&(group.clone(), source.clone())).is_ok();
        if let Some((group, source, _)) = claims.iter().find(|(g, s, needed)| *needed && !row(g, s)) {
            return Err(Violation::new("P5", format!("quiet, but no row says that {source} holds {group}")));
        }
        // a row that is older than the view may have been left behind when the group's router went there and
        // back: that is the sweep's and the digests' to mend
        let known = |group: &Group, source: &Peer| {
            let place = self.names.get(&source.node).copied().unwrap_or(usize::MAX);
            let index = self.group_index.get(group).copied().unwrap_or(usize::MAX);
            let life = Life { place, life: source.incarnation.get() };
            let touched = self.touched.get(&(index, life)).copied().unwrap_or(0);
            touched <= self.view_changed || claims.iter().any(|(g, s, _)| g == group && s == source)
        };
        if let Some((group, source)) = rows.iter().find(|(g, s)| !known(g, s)) {
            return Err(Violation::new("P5", format!("quiet, but a row says that {source} holds {group}")));
        }
        Ok(())
    }

    /// Nobody keeps a draining node waiting.
    ///
    /// # Errors
    /// P6.
    pub fn check_drained(&self) -> Outcome {
        for place in self.running().filter(|place| self.spots[*place].drained) {
            let waits = self.node(place).map(Node::drain_waiting_for).unwrap_or_default();
            if !waits.is_empty() {
                return Err(Violation::new("P6", format!("n{place} drains and waits for {waits:?}")));
            }
        }
        Ok(())
    }

    /// No broadcast is in flight anywhere, every receipt was given, and no node has seen the network break
    /// its contract.
    ///
    /// # Errors
    /// P6 or "contract".
    pub fn check_settled(&self) -> Outcome {
        if let Some((_, cast)) = self.receipts.iter().next() {
            let origin = self.oracle.origin(*cast);
            return Err(Violation::new("P6", format!("a receipt of {origin:?} is never given")));
        }
        for place in self.running() {
            let Some(node) = self.node(place) else { continue };
            if node.in_flight() != (0, 0) {
                let what = format!("{} has {:?} broadcasts in flight for ever", node.me(), node.in_flight());
                return Err(Violation::new("P6", what));
            }
            if node.violations() > 0 {
                let what = format!("{} counts {} violations", node.me(), node.violations());
                return Err(Violation::new("contract", what));
            }
        }
        Ok(())
    }

    /// Nothing is left of groups that are gone.
    ///
    /// # Errors
    /// P7, with what is left.
    pub fn check_empty(&self) -> Outcome {
        for place in self.running() {
            let Some(node) = self.node(place) else { continue };
            let counts = node.counts();
            // of each connected origin the latest broadcasts are remembered
            let windows = self.spots.len() as u64 * self.settings.dedupe_window;
            if counts != crate::node::Counts::default()
                || node.footprint() as u64 > windows
                || self.net.in_flight() > 0
            {
                let what = format!(
                    "{} keeps {} entries for nothing: {counts:?} {:?} {:?}",
                    node.me(),
                    node.footprint(),
                    node.claims(),
                    node.rows()
                );
                return Err(Violation::new("P7", what));
            }
        }
        Ok(())
    }

    /// In a cluster where nothing is disturbed, a broadcast carries its payload once to the router and once to
    /// each holder.
    ///
    /// # Errors
    /// P4; "calm" if something is disturbed.
    pub fn check_precision(&self, cast: CastId, place: usize, group: usize) -> Outcome {
        if !self.oracle.is_calm_since(cast) {
            return Err(Violation::new("calm", "something is disturbed in a healed cluster"));
        }
        let name = &self.groups[group];
        let Some(node) = self.node(place) else { return Ok(()) };
        let router = node.with_published(|p| p.router(name.as_bytes()).clone());
        let holds = |place: usize| {
            let claims = self.node(place).map(Node::claims).unwrap_or_default();
            claims.iter().any(|(group, state, _)| group == name && matches!(*state, "Held" | "Cooldown"))
        };
        let mut expected: Vec<usize> =
            self.running().filter(|other| holds(*other) || self.peer(*other) == router).collect();
        expected.retain(|other| *other != place);
        let mut sent = self.oracle.sent_to(cast).to_vec();
        sent.sort_unstable();
        if sent != expected {
            let what =
                format!("n{place} to group {group} via {router}: sent to {sent:?}, needed by {expected:?}");
            return Err(Violation::new("P4", what));
        }
        Ok(())
    }

    /// Every member leaves, every waiting join is given up.
    ///
    /// # Errors
    /// As [`Cluster::apply`].
    pub fn leave_all(&mut self) -> Outcome {
        for group in 0..self.oracle.groups() {
            for member in self.oracle.members(group).to_vec() {
                self.leave(member.at.place, group, member.number)?;
            }
        }
        for place in 0..self.spots.len() {
            while !self.spots[place].waiting.is_empty() {
                self.cancel_nth(place, 0)?;
            }
        }
        Ok(())
    }

    /// How everything stands, for a failure's report.
    pub fn describe(&self) -> String {
        let mut text = String::new();
        for place in self.running() {
            let Some(node) = self.node(place) else { continue };
            node.with_published(|p: &Published| {
                text.push_str(&format!(
                    "{}: {} view {} ({}) connected {:?}\n",
                    p.me, p.status, p.view, p.hash, p.connected
                ));
            });
        }
        text
    }
}
