//! Every interleaving of small clusters, over the nodes that ship.
//!
//! The state is the `Node` values themselves, the frames on their way and what the test knows to be true.
//! Frames of one lane of one link arrive in order, everything else in any order; a link is seen up and down
//! by one end first. `cargo test --release --test model_routing -- --nocapture` prints how many states each
//! configuration has; `MODEL_DEPTH=n` adds larger ones, for n seconds each.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test may fail")]

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::hash::{Hash, Hasher};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use muster_router::node::message::{DataMessage, Message};
use muster_router::node::relay::{Audience, Begun, NewCast, Sent, Wire};
use muster_router::node::{Effect, JoinStart, Mutation, Node, Rules, Settings, Status, Ticket, Time};
use muster_router::transport::Lane;
use muster_router::{Config, Group, Incarnation, NodeId, Peer, Ring, RingConfig};
use stateright::{Checker, Model, Property};

/// How much may happen in one run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct Budget {
    restarts: u8,
    cuts: u8,
    connects: u8,
    joins: u8,
    leaves: u8,
    casts: u8,
    timeouts: u8,
    suspects: u8,
    drains: u8,
}

/// One configuration.
#[derive(Clone, Debug)]
struct Cluster {
    nodes: usize,
    /// The first so many begin connected and `Ready`.
    start: usize,
    /// For each group: the order in which the nodes route it (the first that lives does).
    groups: Vec<Group>,
    budget: Budget,
    mutation: Option<Mutation>,
    /// Acknowledgements of broadcasts arrive at once, which leaves fewer interleavings.
    prompt: bool,
    /// Gathers are steps of their own.
    slow: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Packet {
    Message(Message),
    Data(DataMessage),
}

#[derive(Clone, Debug)]
struct Host {
    incarnation: u64,
    node: Option<Arc<Node<u8>>>,
    /// The hash of the node: worked out when it changes, not at every look.
    print: u64,
    /// The peers that this end has been told are up.
    up: BTreeSet<Peer>,
    suspects: BTreeSet<Peer>,
    /// Groups with a member whose join was answered.
    joined: BTreeSet<usize>,
    joining: BTreeMap<u64, usize>,
}

impl PartialEq for Host {
    fn eq(&self, other: &Self) -> bool {
        self.print == other.print
            && (self.incarnation, &self.up, &self.suspects, &self.joined, &self.joining)
                == (other.incarnation, &other.up, &other.suspects, &other.joined, &other.joining)
    }
}

impl Eq for Host {}

impl Hash for Host {
    fn hash<H: Hasher>(&self, state: &mut H) {
        (self.incarnation, self.print, &self.up, &self.suspects, &self.joined, &self.joining).hash(state);
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Broadcast {
    origin: usize,
    group: usize,
    /// Who must get it, for as long as nothing excuses it.
    must: BTreeSet<Peer>,
    got: BTreeMap<Peer, u8>,
    /// It began in a `Ready` cluster and nothing has changed since: the payload goes to holders only.
    precise: bool,
    /// Who held the group when it began, in whatever state.
    held: BTreeSet<Peer>,
    /// How often the payload came to each node.
    frames: BTreeMap<Peer, u8>,
    settled: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct State {
    hosts: Vec<Host>,
    net: BTreeMap<(Peer, Peer, u8), VecDeque<Packet>>,
    half: BTreeSet<(usize, usize)>,
    casts: BTreeMap<u64, Broadcast>,
    budget: Budget,
    now: u8,
    ticket: u64,
    broken: Option<String>,
}

impl Hash for State {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.hosts.hash(state);
        self.net.hash(state);
        self.half.hash(state);
        self.casts.hash(state);
        self.budget.hash(state);
        self.now.hash(state);
        self.broken.hash(state);
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Act {
    HalfUp(usize, usize),
    FullUp(usize, usize),
    Down(usize, Peer),
    Suspect(usize, Peer),
    Resume(usize, Peer),
    Crash(usize),
    Restart(usize),
    Settle(usize),
    Join(usize, usize),
    Leave(usize, usize),
    Tick(usize),
    ClaimTimeout(usize),
    Work(usize),
    Cast(usize, usize),
    Drain(usize),
    Deliver(Peer, Peer, u8),
}

/// Sends into the state's network.
struct Out<'a> {
    me: Peer,
    up: &'a BTreeSet<Peer>,
    net: &'a mut BTreeMap<(Peer, Peer, u8), VecDeque<Packet>>,
}

impl Wire for Out<'_> {
    fn try_send(&mut self, to: &Peer, message: DataMessage, _body: &Bytes) -> Sent {
        if !self.up.contains(to) {
            return Sent::NoLink;
        }
        let key = (self.me.clone(), to.clone(), Lane::Data.index() as u8);
        self.net.entry(key).or_default().push_back(Packet::Data(message));
        Sent::Accepted
    }
}

fn name(index: usize) -> NodeId {
    NodeId::new(["a", "b", "c", "d"][index]).unwrap()
}

fn index(peer: &Peer) -> usize {
    (peer.node.as_bytes()[0] - b'a') as usize
}

/// A group that the ring of all nodes gives to these, in this order.
fn group_routed_by(order: &[usize], nodes: usize) -> Group {
    let ring = Ring::of((0..nodes).map(name), RingConfig::default());
    let wanted: Vec<NodeId> = order.iter().map(|i| name(*i)).collect();
    (0..)
        .map(|i| format!("g{i}"))
        .find(|g| ring.owners(g, nodes).into_iter().cloned().collect::<Vec<_>>() == wanted)
        .map(Group::from)
        .unwrap()
}

impl Cluster {
    fn new(nodes: usize, start: usize, orders: &[&[usize]], budget: Budget) -> Self {
        Self {
            nodes,
            start,
            groups: orders.iter().map(|order| group_routed_by(order, nodes)).collect(),
            budget,
            mutation: None,
            prompt: true,
            slow: false,
        }
    }

    fn settings(&self) -> Settings {
        let never = Time::from_secs(1 << 40);
        let mut settings = Settings::from(&Config::default());
        settings.shards = 1;
        settings.vacancy_cooldown = Time::ZERO;
        settings.flush_interval = Time::ZERO;
        settings.join_timeout = Time::from_secs(1);
        for long in [
            &mut settings.heartbeat_interval,
            &mut settings.sweep_interval,
            &mut settings.singleton_timeout,
            &mut settings.rpc_timeout,
            &mut settings.tombstone_ttl,
        ] {
            *long = never;
        }
        settings.rules = self.mutation.map_or(Rules::all(), Rules::broken);
        settings
    }

    fn peer(&self, s: &State, i: usize) -> Peer {
        Peer::new(name(i), Incarnation::new(s.hosts[i].incarnation).unwrap())
    }

    fn now(&self, s: &State) -> Time {
        Time::from_secs(u64::from(s.now))
    }

    /// Runs an input at a node and carries out what follows from it.
    fn at<R>(
        &self,
        s: &mut State,
        i: usize,
        act: impl FnOnce(&Node<u8>, &mut Out<'_>, Time) -> R,
    ) -> Option<R> {
        let (me, now) = (self.peer(s, i), self.now(s));
        let shared = s.hosts[i].node.take()?;
        let node = Arc::try_unwrap(shared).unwrap_or_else(|shared| (*shared).clone());
        let host = &s.hosts[i];
        let result = act(&node, &mut Out { me, up: &host.up, net: &mut s.net }, now);
        self.settle(s, i, &node);
        self.put(s, i, Some(node));
        Some(result)
    }

    fn put(&self, s: &mut State, i: usize, node: Option<Node<u8>>) {
        let mut hasher = std::hash::DefaultHasher::new();
        node.hash(&mut hasher);
        s.hosts[i].print = hasher.finish();
        s.hosts[i].node = node.map(Arc::new);
    }

    fn settle(&self, s: &mut State, i: usize, node: &Node<u8>) {
        let (me, now) = (self.peer(s, i), self.now(s));
        loop {
            if !self.slow {
                while node.work(now) {}
            }
            let Some(effect) = node.poll_effect() else { break };
            match effect {
                Effect::Transmit(to) => {
                    while let Some(out) = node.poll_transmit(&to, now) {
                        if s.hosts[i].up.contains(&to) {
                            let key = (me.clone(), to.clone(), out.lane.index() as u8);
                            s.net.entry(key).or_default().push_back(Packet::Message(out.message));
                        }
                    }
                }
                Effect::Joined { ticket, result } => {
                    if let Some(group) = s.hosts[i].joining.remove(&ticket.0) {
                        if result.is_ok() {
                            s.hosts[i].joined.insert(group);
                        }
                    }
                }
                Effect::Settled(settled) => self.check_receipt(s, settled.ticket.0),
                Effect::Work | Effect::Changed | Effect::Room | Effect::Event(_) => {}
            }
        }
        if let Err(broken) = node.check_invariants() {
            s.broken.get_or_insert(broken);
        }
    }

    fn check_receipt(&self, s: &mut State, ticket: u64) {
        let Some(cast) = s.casts.get_mut(&ticket) else { return };
        cast.settled = true;
        let suspects = &s.hosts[cast.origin].suspects;
        if let Some(missed) = cast.must.iter().find(|p| !cast.got.contains_key(*p) && !suspects.contains(*p))
        {
            s.broken.get_or_insert(format!("P1: {missed} missed broadcast {ticket} though it is settled"));
        }
    }

    /// A member that left, a node that crashed and a link that broke excuse a miss.
    fn excuse(s: &mut State, a: &Peer, b: Option<&Peer>) {
        for cast in s.casts.values_mut() {
            let origin =
                Peer::new(name(cast.origin), Incarnation::new(s.hosts[cast.origin].incarnation).unwrap());
            match b {
                None if origin == *a => cast.must.clear(),
                None => {
                    cast.must.remove(a);
                }
                Some(b) if origin == *a => {
                    cast.must.remove(b);
                }
                Some(b) if origin == *b => {
                    cast.must.remove(a);
                }
                Some(_) => {}
            }
        }
    }

    fn deliver(&self, s: &mut State, from: &Peer, to: &Peer, lane: u8) {
        let key = (from.clone(), to.clone(), lane);
        let Some(queue) = s.net.get_mut(&key) else { return };
        let Some(packet) = queue.pop_front() else { return };
        if queue.is_empty() {
            s.net.remove(&key);
        }
        let i = index(to);
        match packet {
            Packet::Message(message) => {
                self.at(s, i, |node, out, now| node.handle_message(from, message, out, now));
            }
            Packet::Data(message) => {
                self.check_precision(s, to, &message);
                let delivery = self
                    .at(s, i, |node, out, now| node.handle_data_frame(from, message, Bytes::new(), out, now));
                let Some(Some(delivery)) = delivery else { return };
                let held = s.hosts[i].node.as_ref().is_some_and(|n| n.holds(delivery.group.as_bytes()));
                if held {
                    let ticket = self.ticket_of(s, &delivery.id.origin, delivery.id.seq);
                    if let Some(cast) = s.casts.get_mut(&ticket) {
                        let times = cast.got.entry(to.clone()).or_default();
                        *times += 1;
                        if *times > 1 {
                            s.broken.get_or_insert(format!("P2: {to} got broadcast {ticket} twice"));
                        }
                    }
                }
                self.at(s, i, |node, _, now| {
                    if !held && delivery.targeted {
                        node.tell_not_held(from, &delivery.group, now);
                    }
                    node.delivered(from, delivery.hop);
                });
            }
        }
    }

    /// P4: at most once to the router and once to each holder, to nobody else.
    fn check_precision(&self, s: &mut State, to: &Peer, message: &DataMessage) {
        let (DataMessage::Route { cast, .. } | DataMessage::Deliver { cast, .. }) = message;
        let ticket = self.ticket_of(s, &cast.id.origin, cast.id.seq);
        let holder = s.hosts[index(to)].node.as_ref().is_some_and(|node| {
            node.claims().iter().any(|(group, ..)| *group == cast.group)
                || node.with_published(|p| *p.router(cast.group.as_bytes()) == *to)
        });
        let Some(cast) = s.casts.get_mut(&ticket).filter(|cast| cast.precise) else { return };
        let holder = holder || cast.held.contains(to);
        let times = cast.frames.entry(to.clone()).or_default();
        *times += 1;
        if *times > 1 || !holder {
            s.broken.get_or_insert(format!(
                "P4: broadcast {ticket} came to {to}, time {times}, holder: {holder}"
            ));
        }
    }

    fn all_ready(&self, s: &State) -> bool {
        let hashes: BTreeSet<_> = s.hosts.iter().flat_map(|h| &h.node).map(|n| n.published().hash).collect();
        let ready = s.hosts.iter().flat_map(|h| &h.node).all(|n| n.published().status == Status::Ready);
        ready && hashes.len() == 1 && s.half.is_empty() && self.meshed(s)
    }

    /// Tickets are given in the order of an origin's broadcasts, so the id names the ticket.
    fn ticket_of(&self, s: &State, origin: &Peer, seq: u64) -> u64 {
        let own: Vec<u64> =
            s.casts.iter().filter(|(_, c)| c.origin == index(origin)).map(|(t, _)| *t).collect();
        own.get(seq as usize - 1).copied().unwrap_or(0)
    }

    fn down(&self, s: &mut State, i: usize, peer: &Peer) {
        let me = self.peer(s, i);
        Self::excuse(s, &me, Some(peer));
        s.hosts[i].up.remove(peer);
        s.hosts[i].suspects.remove(peer);
        s.net.retain(|(from, to, _), _| !(*from == *peer && *to == me));
        let other = &s.hosts[index(peer)];
        let gone = other.node.is_none() || self.peer(s, index(peer)) != *peer || !other.up.contains(&me);
        if gone {
            s.net.retain(|(from, to, _), _| !(*from == me && *to == *peer));
        }
        let peer = peer.clone();
        self.at(s, i, move |node, out, now| node.handle_peer_down(&peer, out, now));
    }

    fn up(&self, s: &mut State, i: usize, peer: Peer) {
        let earlier: Vec<Peer> = s.hosts[i].up.iter().filter(|p| p.node == peer.node).cloned().collect();
        earlier.iter().for_each(|earlier| self.down(s, i, earlier));
        s.hosts[i].up.insert(peer.clone());
        self.at(s, i, move |node, out, now| node.handle_peer_up(peer, out, now));
    }

    /// Neither end of the two knows of the other, in whatever life.
    fn apart(&self, s: &State, i: usize, j: usize) -> bool {
        let knows = |a: usize, b: usize| s.hosts[a].up.iter().any(|p| index(p) == b);
        !knows(i, j) && !knows(j, i) && !s.half.contains(&(i, j)) && !s.half.contains(&(j, i))
    }

    fn must(&self, s: &State, origin: usize, group: usize) -> BTreeSet<Peer> {
        let me = self.peer(s, origin);
        (0..self.nodes)
            .filter(|i| *i != origin && s.hosts[*i].joined.contains(&group))
            .map(|i| self.peer(s, i))
            .filter(|p| s.hosts[origin].up.contains(p) && s.hosts[index(p)].up.contains(&me))
            .collect()
    }

    fn fresh(&self, s: &mut State, i: usize) {
        let node = Node::new(self.peer(s, i), self.settings(), self.now(s));
        self.put(s, i, Some(node));
    }

    /// Delivers, in a fixed order, what `pick` chooses, until there is no more of it.
    fn run(&self, s: &mut State, pick: impl Fn(&Packet) -> bool) {
        loop {
            let next = s.net.iter().find(|((from, to, _), queue)| {
                queue.front().is_some_and(&pick)
                    && s.hosts[index(to)].up.contains(from)
                    && self.peer(s, index(to)) == *to
            });
            let Some((from, to, lane)) = next.map(|(key, _)| key.clone()) else { return };
            self.deliver(s, &from, &to, lane);
        }
    }

    fn meshed(&self, s: &State) -> bool {
        let alive: BTreeSet<Peer> =
            (0..self.nodes).filter(|i| s.hosts[*i].node.is_some()).map(|i| self.peer(s, i)).collect();
        alive.iter().all(|p| {
            let mut known = s.hosts[index(p)].up.clone();
            known.insert(p.clone());
            known == alive && s.hosts[index(p)].suspects.is_empty()
        })
    }

    fn check_quiet(&self, s: &State) -> Result<(), String> {
        let working = self.slow
            && s.hosts
                .iter()
                .flat_map(|h| &h.node)
                .any(|n| n.with_published(|p| p.status == Status::Rebalancing));
        if !s.net.is_empty() || !s.half.is_empty() || working || !self.meshed(s) {
            return Ok(());
        }
        let nodes: Vec<&Node<u8>> = s.hosts.iter().filter_map(|h| h.node.as_deref()).collect();
        if let [only] = nodes.as_slice() {
            if !only.with_published(|p| p.settled) {
                return Ok(());
            }
        }
        let first = nodes.first().map(|n| n.published().hash);
        for node in &nodes {
            let published = node.published();
            if published.status != Status::Ready || Some(published.hash) != first {
                return Err(format!("P5: quiet, but {} is {}", node.me(), published.status));
            }
            if node.in_flight() != (0, 0) {
                return Err(format!("P6: quiet, but {} has broadcasts in flight", node.me()));
            }
        }
        for host in &s.hosts {
            let Some(node) = host.node.as_deref() else { continue };
            for group in &host.joined {
                let name = &self.groups[*group];
                let router = node.with_published(|p| p.router(name.as_bytes()).clone());
                let table = nodes.iter().find(|n| *n.me() == router).map(|n| n.occupancy(name.as_bytes()));
                if !table.is_some_and(|table| table.contains(&node.me().node)) {
                    return Err(format!("P5: {router} misses the row of {} for {name}", node.me()));
                }
            }
            if !host.joining.is_empty() {
                return Err(format!("P6: quiet, but a join waits at {}", node.me()));
            }
        }
        for cast in s.casts.values() {
            if let Some(missed) = cast.must.iter().find(|p| !cast.got.contains_key(*p)) {
                return Err(format!("P1: {missed} never got a broadcast of {}", name(cast.origin)));
            }
        }
        Ok(())
    }
}

impl Model for Cluster {
    type State = State;
    type Action = Act;

    fn init_states(&self) -> Vec<State> {
        let host = Host {
            incarnation: 1,
            node: None,
            print: 0,
            up: BTreeSet::new(),
            suspects: BTreeSet::new(),
            joined: BTreeSet::new(),
            joining: BTreeMap::new(),
        };
        let mut s = State {
            hosts: vec![host; self.nodes],
            net: BTreeMap::new(),
            half: BTreeSet::new(),
            casts: BTreeMap::new(),
            budget: self.budget,
            now: 0,
            ticket: 0,
            broken: None,
        };
        for i in 0..self.nodes {
            self.fresh(&mut s, i);
        }
        for i in 0..self.start {
            for j in 0..i {
                let (pi, pj) = (self.peer(&s, i), self.peer(&s, j));
                self.up(&mut s, j, pi);
                self.up(&mut s, i, pj);
            }
            self.at(&mut s, i, |node, _, now| node.handle_discovery_settled(now));
        }
        if self.slow {
            // the start is not what is being checked
            let fast = Cluster { slow: false, ..self.clone() };
            loop {
                fast.run(&mut s, |_| true);
                for i in 0..self.nodes {
                    fast.at(&mut s, i, |_, _, _| ());
                }
                if s.net.is_empty() {
                    break;
                }
            }
        } else {
            self.run(&mut s, |_| true);
        }
        vec![s]
    }

    fn actions(&self, s: &State, out: &mut Vec<Act>) {
        if s.broken.is_some() {
            return;
        }
        for (key, _) in s.net.iter() {
            let (from, to, lane) = key;
            let host = &s.hosts[index(to)];
            if host.node.is_some() && self.peer(s, index(to)) == *to && host.up.contains(from) {
                out.push(Act::Deliver(from.clone(), to.clone(), *lane));
            }
        }
        for i in 0..self.nodes {
            let host = &s.hosts[i];
            let Some(node) = host.node.as_deref() else {
                if s.budget.restarts > 0 {
                    out.push(Act::Restart(i));
                }
                continue;
            };
            let me = self.peer(s, i);
            for j in 0..self.nodes {
                if i < j && s.hosts[j].node.is_some() && s.budget.connects > 0 && self.apart(s, i, j) {
                    out.push(Act::HalfUp(i, j));
                    if self.nodes < 4 {
                        out.push(Act::HalfUp(j, i));
                    }
                }
                if s.half.contains(&(i, j)) {
                    out.push(Act::FullUp(i, j));
                }
            }
            for peer in &host.up {
                let other = &s.hosts[index(peer)];
                let dead = other.node.is_none() || self.peer(s, index(peer)) != *peer;
                let half = s.half.iter().any(|(x, y)| (*x, *y) == (index(peer), i));
                let closed = !dead && !other.up.contains(&me) && !half;
                if dead || closed || s.budget.cuts > 0 {
                    out.push(Act::Down(i, peer.clone()));
                }
                if host.suspects.contains(peer) {
                    out.push(Act::Resume(i, peer.clone()));
                } else if s.budget.suspects > 0 {
                    out.push(Act::Suspect(i, peer.clone()));
                }
            }
            if s.budget.restarts > 0 {
                out.push(Act::Crash(i));
            }
            let (settled, rebalancing) =
                node.with_published(|p| (p.settled, p.status == Status::Rebalancing));
            if !settled {
                out.push(Act::Settle(i));
            }
            if self.slow && rebalancing {
                out.push(Act::Work(i));
            }
            if s.budget.drains > 0 {
                out.push(Act::Drain(i));
            }
            let claims = node.claims();
            if claims.iter().any(|(_, state, _)| matches!(*state, "Cooldown" | "Retracting")) {
                out.push(Act::Tick(i));
            }
            if s.budget.timeouts > 0 && claims.iter().any(|(_, state, _)| *state == "Claiming") {
                out.push(Act::ClaimTimeout(i));
            }
            for g in 0..self.groups.len() {
                let joined = host.joined.contains(&g);
                if settled && s.budget.joins > 0 && !joined && !host.joining.values().any(|x| *x == g) {
                    out.push(Act::Join(i, g));
                }
                if joined && s.budget.leaves > 0 {
                    out.push(Act::Leave(i, g));
                }
                if s.budget.casts > 0 && !self.must(s, i, g).is_empty() {
                    out.push(Act::Cast(i, g));
                }
            }
        }
    }

    fn next_state(&self, last: &State, act: Act) -> Option<State> {
        let mut s = last.clone();
        let changes =
            !matches!(act, Act::Deliver(..) | Act::Join(..) | Act::Tick(_) | Act::Work(_) | Act::Cast(..));
        if changes {
            s.casts.values_mut().for_each(|cast| cast.precise = false);
        }
        match act {
            Act::Deliver(from, to, lane) => self.deliver(&mut s, &from, &to, lane),
            Act::HalfUp(i, j) => {
                // the accepting end is told first, the dialling end after it
                s.budget.connects -= 1;
                let pi = self.peer(&s, i);
                s.half.insert((i, j));
                self.up(&mut s, j, pi);
            }
            Act::FullUp(i, j) => {
                s.half.remove(&(i, j));
                let pj = self.peer(&s, j);
                self.up(&mut s, i, pj);
            }
            Act::Down(i, peer) => {
                let other = &s.hosts[index(&peer)];
                let dead = other.node.is_none() || self.peer(&s, index(&peer)) != peer;
                if !dead && other.up.contains(&self.peer(&s, i)) {
                    s.budget.cuts -= 1;
                } else if !dead && s.half.contains(&(index(&peer), i)) {
                    s.budget.cuts = s.budget.cuts.checked_sub(1)?;
                }
                s.half.remove(&(index(&peer), i));
                s.half.remove(&(i, index(&peer)));
                self.down(&mut s, i, &peer);
            }
            Act::Suspect(i, peer) => {
                s.budget.suspects -= 1;
                s.hosts[i].suspects.insert(peer.clone());
                self.at(&mut s, i, |node, out, now| node.handle_peer_suspect(&peer, out, now));
            }
            Act::Resume(i, peer) => {
                s.hosts[i].suspects.remove(&peer);
                self.at(&mut s, i, |node, out, now| node.handle_peer_resumed(&peer, out, now));
            }
            Act::Crash(i) => {
                let me = self.peer(&s, i);
                Self::excuse(&mut s, &me, None);
                s.net.retain(|(_, to, _), _| *to != me);
                s.half.retain(|(x, y)| *x != i && *y != i);
                self.put(&mut s, i, None);
                let host = &mut s.hosts[i];
                host.up.clear();
                host.suspects.clear();
                host.joined.clear();
                host.joining.clear();
            }
            Act::Restart(i) => {
                s.budget.restarts -= 1;
                s.hosts[i].incarnation += 1;
                s.casts.retain(|_, cast| cast.origin != i);
                self.fresh(&mut s, i);
            }
            Act::Settle(i) => {
                self.at(&mut s, i, |node, _, now| node.handle_discovery_settled(now));
            }
            Act::Join(i, g) => {
                s.budget.joins -= 1;
                s.ticket += 1;
                let (ticket, group) = (s.ticket, self.groups[g].clone());
                s.hosts[i].joining.insert(ticket, g);
                let start = self.at(&mut s, i, |node, _, now| node.join(group, 1, 0, Ticket(ticket), now));
                match start {
                    Some(JoinStart::Waiting) => {}
                    Some(JoinStart::Joined) => {
                        s.hosts[i].joining.remove(&ticket);
                        s.hosts[i].joined.insert(g);
                    }
                    _ => return None,
                }
            }
            Act::Leave(i, g) => {
                s.budget.leaves -= 1;
                s.hosts[i].joined.remove(&g);
                let me = self.peer(&s, i);
                for cast in s.casts.values_mut().filter(|cast| cast.group == g) {
                    cast.must.remove(&me);
                }
                let group = self.groups[g].clone();
                self.at(&mut s, i, |node, _, now| node.leave(group.as_bytes(), 1, now));
            }
            Act::Tick(i) => {
                self.at(&mut s, i, |node, out, now| node.handle_timeout(out, now));
            }
            Act::ClaimTimeout(i) => {
                s.budget.timeouts -= 1;
                s.now += 1;
                self.at(&mut s, i, |node, out, now| node.handle_timeout(out, now));
            }
            Act::Work(i) => {
                self.at(&mut s, i, |node, _, now| node.work(now));
            }
            Act::Drain(i) => {
                s.budget.drains -= 1;
                self.at(&mut s, i, |node, _, now| node.drain(now));
            }
            Act::Cast(i, g) => {
                s.budget.casts -= 1;
                s.ticket += 1;
                let ticket = s.ticket;
                let must = self.must(&s, i, g);
                let precise = self.all_ready(&s);
                let claimed = |host: &&Host| {
                    host.node.iter().any(|n| n.claims().iter().any(|(group, ..)| *group == self.groups[g]))
                };
                let held: BTreeSet<Peer> =
                    s.hosts.iter().filter(claimed).flat_map(|h| &h.node).map(|n| n.me().clone()).collect();
                let (got, frames) = (BTreeMap::new(), BTreeMap::new());
                s.casts.insert(
                    ticket,
                    Broadcast { origin: i, group: g, must, got, precise, held, frames, settled: false },
                );
                let cast = NewCast {
                    group: self.groups[g].clone(),
                    body: Bytes::new(),
                    except: None,
                    headers: Vec::new(),
                    at_most_once: false,
                    audience: Audience::Group,
                    ticket: Some(Ticket(ticket)),
                };
                match self.at(&mut s, i, |node, out, _| node.broadcast(cast, out)) {
                    Some(Begun::Sent { .. }) => {}
                    _ => return None,
                }
            }
        }
        if self.prompt {
            self.run(&mut s, |packet| matches!(packet, Packet::Message(Message::Progress(_))));
        }
        if s.broken.is_none() {
            s.broken = self.check_quiet(&s).err();
        }
        (s != *last).then_some(s)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always("what the protocol promises", |_, s: &State| s.broken.is_none()),
            Property::sometimes("a broadcast is settled", |m: &Cluster, s: &State| {
                m.budget.casts == 0 || s.casts.values().any(|cast| cast.settled)
            }),
        ]
    }
}

/// Checks a configuration; the violation and its shortest run, if there is one.
fn check(what: &str, cluster: Cluster, limit: Option<Duration>) -> Result<usize, String> {
    let start = std::time::Instant::now();
    let mut builder = cluster.clone().checker().threads(2);
    if let Some(limit) = limit {
        builder = builder.timeout(limit);
    }
    let checker = builder.spawn_bfs().join();
    let exhausted =
        if checker.is_done() && limit.is_none_or(|l| start.elapsed() < l) { "exhausted" } else { "cut off" };
    println!(
        "{what}: {} states, depth {}, {exhausted}, {:.1} s",
        checker.unique_state_count(),
        checker.max_depth(),
        start.elapsed().as_secs_f64()
    );
    match checker.discovery("what the protocol promises") {
        None if exhausted == "exhausted" && checker.discovery("a broadcast is settled").is_none() => {
            Err(format!("{what}: no broadcast was ever settled, so nothing was checked"))
        }
        None => Ok(checker.unique_state_count()),
        Some(path) => {
            let broken = path.last_state().broken.clone().unwrap_or_default();
            let steps: Vec<String> = path.into_actions().iter().map(|act| format!("  {act:?}")).collect();
            Err(format!("{what}: {broken}, after\n{}", steps.join("\n")))
        }
    }
}

fn holds(what: &str, cluster: Cluster) {
    if let Err(broken) = check(what, cluster, None) {
        panic!("{broken}");
    }
}

/// A large configuration: whole in a release build, for a few seconds in a debug build.
fn holds_large(what: &str, cluster: Cluster) {
    let limit = cfg!(debug_assertions).then(|| Duration::from_secs(5));
    if let Err(broken) = check(what, cluster, limit) {
        panic!("{broken}");
    }
}

const A_CUT: Budget = Budget {
    restarts: 0,
    cuts: 1,
    connects: 1,
    joins: 1,
    leaves: 0,
    casts: 1,
    timeouts: 0,
    suspects: 0,
    drains: 0,
};

#[test]
fn two_nodes_meet() {
    holds("two nodes meet", Cluster::new(2, 0, &[&[1, 0]], Budget { cuts: 0, ..A_CUT }));
}

#[test]
fn two_nodes_part_and_meet() {
    holds("two nodes part and meet", Cluster::new(2, 2, &[&[1, 0]], A_CUT));
}

#[test]
fn two_nodes_with_late_acknowledgements() {
    let cluster = Cluster { prompt: false, ..Cluster::new(2, 2, &[&[1, 0]], A_CUT) };
    holds("two nodes, late acknowledgements", cluster);
}

#[test]
fn two_nodes_leave_and_join_again() {
    let budget = Budget { joins: 2, leaves: 2, cuts: 0, connects: 0, timeouts: 1, ..A_CUT };
    holds("two nodes, leaves and timeouts", Cluster::new(2, 2, &[&[1, 0]], budget));
}

#[test]
fn three_nodes_lose_a_link() {
    holds("three nodes, a cut", Cluster::new(3, 3, &[&[0, 1, 2]], Budget { connects: 0, ..A_CUT }));
}

#[test]
fn three_nodes_one_arrives() {
    let budget = Budget { cuts: 0, connects: 2, ..A_CUT };
    holds_large("three nodes, one arrives", Cluster::new(3, 2, &[&[2, 0, 1]], budget));
}

#[test]
fn three_nodes_one_drains() {
    let budget = Budget { cuts: 0, connects: 0, drains: 1, ..A_CUT };
    holds_large("three nodes, one drains", Cluster::new(3, 3, &[&[0, 1, 2]], budget));
}

#[test]
fn three_nodes_the_router_falls_silent() {
    let budget = Budget { cuts: 0, connects: 0, suspects: 1, ..A_CUT };
    let cluster = Cluster { prompt: false, ..Cluster::new(3, 3, &[&[0, 1, 2]], budget) };
    holds("three nodes, a suspect", cluster);
}

#[test]
fn two_nodes_and_a_restart_under_the_same_name() {
    let budget = Budget { cuts: 0, restarts: 1, connects: 1, ..A_CUT };
    holds("two nodes, a restart", Cluster::new(2, 2, &[&[1, 0]], budget));
}

#[test]
fn two_nodes_with_gathers_cut_short() {
    let cluster = Cluster { slow: true, ..Cluster::new(2, 2, &[&[1, 0]], Budget { connects: 2, ..A_CUT }) };
    holds("two nodes, gathers as steps", cluster);
}

#[test]
fn three_nodes_and_two_groups_lose_a_link() {
    let cluster = Cluster::new(3, 3, &[&[0, 1, 2], &[1, 2, 0]], Budget { connects: 0, ..A_CUT });
    holds("three nodes, two groups, a cut", cluster);
}

#[test]
fn a_claim_that_times_out_lands_later() {
    let budget = Budget { cuts: 0, connects: 0, joins: 2, leaves: 1, timeouts: 2, ..A_CUT };
    holds("two nodes, claims that land late", Cluster::new(2, 2, &[&[1, 0]], budget));
}

#[test]
fn three_nodes_and_a_round_that_is_cancelled() {
    let budget = Budget { joins: 0, casts: 0, connects: 1, ..A_CUT };
    holds_large("three nodes, one comes and goes", Cluster::new(3, 2, &[&[2, 0, 1]], budget));
}

#[test]
fn four_nodes_and_a_router_that_falls_silent() {
    let budget = Budget { cuts: 0, connects: 0, suspects: 1, ..A_CUT };
    holds("four nodes, a suspect", Cluster::new(4, 4, &[&[3, 2, 1, 0]], budget));
}

#[test]
fn three_nodes_talk_while_members_come_and_go() {
    let budget = Budget { cuts: 0, connects: 0, joins: 2, leaves: 1, casts: 2, ..A_CUT };
    holds_large("three nodes, members come and go", Cluster::new(3, 3, &[&[0, 1, 2], &[1, 2, 0]], budget));
}

/// The model can fail: it finds rules that are broken on purpose, in the runs that break them.
#[test]
fn broken_rules_are_found() {
    let broken = [
        (Mutation::NoPrepareShrink, 3, Budget { connects: 0, ..A_CUT }),
        (Mutation::UnreadySenderTrusted, 3, Budget { connects: 0, ..A_CUT }),
        (Mutation::NoFloodOnDeadRouter, 3, Budget { cuts: 0, connects: 0, suspects: 1, ..A_CUT }),
    ];
    for (mutation, start, budget) in broken {
        let cluster = Cluster { mutation: Some(mutation), ..Cluster::new(3, start, &[&[0, 1, 2]], budget) };
        let limit = Some(Duration::from_secs(20));
        match check(&format!("{mutation:?}"), cluster, limit) {
            Ok(states) => panic!("{mutation:?} survived {states} states"),
            Err(run) => println!("{run}"),
        }
    }
}

/// Larger ones, for `MODEL_DEPTH` seconds each.
#[test]
fn larger_clusters_for_as_long_as_asked() {
    let Some(seconds) = std::env::var("MODEL_DEPTH").ok().and_then(|depth| depth.parse().ok()) else {
        println!("skipped: MODEL_DEPTH=n looks at the larger clusters for n seconds each");
        return;
    };
    let limit = Some(Duration::from_secs(seconds));
    let configurations = [
        ("three nodes, a cut and a new link", Cluster::new(3, 3, &[&[0, 1, 2]], A_CUT)),
        (
            "three nodes, two groups, one arrives",
            Cluster::new(3, 2, &[&[2, 0, 1], &[0, 1, 2]], Budget { cuts: 0, connects: 2, ..A_CUT }),
        ),
        (
            "three nodes, a restart",
            Cluster::new(3, 3, &[&[2, 1, 0]], Budget { cuts: 0, restarts: 1, connects: 2, ..A_CUT }),
        ),
        ("four nodes, a cut", Cluster::new(4, 4, &[&[3, 2, 1, 0]], Budget { connects: 0, ..A_CUT })),
        (
            "three nodes, a drain and a cut",
            Cluster::new(3, 3, &[&[0, 1, 2]], Budget { connects: 0, drains: 1, ..A_CUT }),
        ),
    ];
    for (what, cluster) in configurations {
        if let Err(broken) = check(what, cluster, limit) {
            panic!("{broken}");
        }
    }
}
