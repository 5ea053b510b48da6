//! What a cluster costs as it grows: the shipped cores, driven by hand in virtual time, with every message counted
//! as it would be on the wire, and each count held against the formula in the guide (`guide::growth`).
//!
//! `cargo test --release --test growth -- --nocapture` prints the table, up to 1000 nodes, and a million groups.
//! `GROWTH="50x20000"` (nodes x groups) looks at one size.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test")]

use std::collections::BTreeMap;
use std::time::Duration;

use bytes::Bytes;
use muster_router::node::message::{Cast, DataMessage, Message};
use muster_router::node::relay::{Audience, Begun, NewCast, Sent, Wire};
use muster_router::node::{Effect, JoinStart, Node, Settings, Status, Ticket};
use muster_router::testing::{control_head, data_head};
use muster_router::*;

/// How long a message is on its way.
const HOP: Duration = Duration::from_micros(500);
/// What a frame costs on a TCP connection beside its head and body: lengths, lane and number.
const ON_TCP: u64 = 19;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Cost {
    messages: u64,
    bytes: u64,
}

type Counts = BTreeMap<&'static str, Cost>;

enum What {
    Control(Message),
    Data(DataMessage, Bytes),
}

fn kind(what: &What) -> &'static str {
    match what {
        What::Data(DataMessage::Route { .. }, _) => "Route",
        What::Data(DataMessage::Deliver { .. }, _) => "Deliver",
        What::Control(message) => match message {
            Message::Leaving { .. } => "Leaving",
            Message::LeavingAck { .. } => "LeavingAck",
            Message::Announce { .. } => "Announce",
            Message::Heartbeat { .. } => "Heartbeat",
            Message::Draining => "Draining",
            Message::Data { .. } => "Data",
            Message::DataAck { .. } => "DataAck",
            Message::Claims { .. } => "Claims",
            Message::ClaimsAck { .. } => "ClaimsAck",
            Message::Retract { .. } => "Retract",
            Message::RetractAck { .. } => "RetractAck",
            Message::NotHeld { .. } => "NotHeld",
            Message::RepairRequest { .. } => "RepairRequest",
            Message::Members { .. } => "Members",
            Message::Superseded { .. } => "Superseded",
            Message::Progress(_) => "Progress",
        },
    }
}

#[derive(Default)]
struct Out(Vec<(usize, What)>);

impl Wire for Out {
    fn try_send(&mut self, to: &Peer, message: DataMessage<&Cast>, body: &Bytes) -> Sent {
        self.0.push((place_of(to), What::Data(message.cloned(), body.clone())));
        Sent::Accepted
    }
}

fn peer(place: usize) -> Peer {
    Peer::new(NodeId::new(format!("node-{place:05}")).unwrap(), Incarnation::MIN)
}

fn place_of(peer: &Peer) -> usize {
    place_of_node(&peer.node)
}

struct Cluster {
    nodes: Vec<Option<Node<()>>>,
    peers: Vec<Peer>,
    out: Vec<Out>,
    settings: Settings,
    now: Duration,
    on_the_way: Vec<(usize, usize, What)>,
    counts: Counts,
    joined: usize,
    settled: Vec<usize>,
    delivered: usize,
}

impl Cluster {
    /// `count` nodes that meet all at once, and a place for one more.
    fn new(count: usize, vnodes: u32) -> Self {
        let settings = Settings::from(&Config::default().vnodes(vnodes));
        let now = Duration::from_millis(1);
        let peers: Vec<Peer> = (0..=count).map(peer).collect();
        let mut cluster = Self {
            nodes: peers[..count].iter().map(|p| Some(Node::new(p.clone(), settings.clone(), now))).collect(),
            out: peers.iter().map(|_| Out::default()).collect(),
            peers,
            settings,
            now,
            on_the_way: Vec::new(),
            counts: Counts::new(),
            joined: 0,
            settled: Vec::new(),
            delivered: 0,
        };
        cluster.nodes.push(None);
        for a in 0..count {
            for b in (0..count).filter(|b| *b != a) {
                cluster.up(a, b);
            }
            cluster.node(a).handle_discovery_settled(now);
        }
        cluster
    }

    fn node(&self, at: usize) -> &Node<()> {
        self.nodes[at].as_ref().unwrap()
    }

    fn alive(&self) -> impl Iterator<Item = usize> + use<> {
        let alive: Vec<usize> = (0..self.nodes.len()).filter(|at| self.nodes[*at].is_some()).collect();
        alive.into_iter()
    }

    fn up(&mut self, at: usize, other: usize) {
        let (node, out) = (self.nodes[at].as_ref().unwrap(), &mut self.out[at]);
        node.handle_peer_up(self.peers[other].clone(), out, self.now);
    }

    fn start(&mut self, at: usize) {
        self.nodes[at] = Some(Node::new(self.peers[at].clone(), self.settings.clone(), self.now));
        for other in self.alive().filter(|other| *other != at) {
            self.up(at, other);
            self.up(other, at);
        }
        self.node(at).handle_discovery_settled(self.now);
    }

    fn end(&mut self, at: usize) {
        self.nodes[at] = None;
        for other in self.alive() {
            let (node, out) = (self.nodes[other].as_ref().unwrap(), &mut self.out[other]);
            node.handle_peer_down(&self.peers[at], out, self.now);
        }
    }

    /// Does all that a node can do now; what it says is on its way.
    fn step(&mut self, at: usize) {
        loop {
            let node = self.nodes[at].as_ref().unwrap();
            while node.work(self.now) {}
            let mut idle = true;
            while let Some(effect) = node.poll_effect() {
                idle = false;
                match effect {
                    Effect::Transmit(to) => {
                        let there = place_of(&to);
                        while let Some(outgoing) = node.poll_transmit(&to, self.now) {
                            self.out[at].0.push((there, What::Control(outgoing.message)));
                        }
                    }
                    Effect::Joined { result, .. } => {
                        assert_eq!(result, Ok(()));
                        self.joined += 1;
                    }
                    Effect::Settled(settled) => self.settled.push(settled.nodes),
                    _ => {}
                }
            }
            for (to, what) in self.out[at].0.drain(..) {
                let cost = self.counts.entry(kind(&what)).or_default();
                cost.messages += 1;
                cost.bytes += ON_TCP
                    + match &what {
                        What::Control(message) => control_head(message).unwrap().len(),
                        What::Data(message, body) => data_head(message).unwrap().len() + body.len(),
                    } as u64;
                self.on_the_way.push((at, to, what));
            }
            if idle {
                return;
            }
        }
    }

    /// Carries messages, all of a round at once, until nobody has anything to say. Says after how many rounds all
    /// nodes were `Ready`, and at the latest at the end they are.
    fn run(&mut self) -> Option<u32> {
        self.alive().for_each(|at| self.step(at));
        let (mut rounds, mut ready) = (0, self.is_ready().then_some(0));
        while !self.on_the_way.is_empty() {
            rounds += 1;
            self.now += HOP;
            for (from, to, what) in std::mem::take(&mut self.on_the_way) {
                let (Some(node), from) = (&self.nodes[to], &self.peers[from]) else { continue };
                let out = &mut self.out[to];
                match what {
                    What::Control(message) => node.handle_message(from, message, out, self.now),
                    What::Data(message, body) => {
                        if let Some(delivery) = node.handle_data_frame(from, message, body, out, self.now) {
                            self.delivered += node.local_members(delivery.group.as_bytes()).len();
                            node.delivered(from, delivery.hop);
                        }
                    }
                }
            }
            self.alive().for_each(|at| self.step(at));
            ready = if self.is_ready() { ready.or(Some(rounds)) } else { None };
        }
        assert!(ready.is_some(), "not all are Ready");
        ready
    }

    fn is_ready(&self) -> bool {
        self.alive().all(|at| self.node(at).with_published(|p| p.status) == Status::Ready)
    }

    /// Lets time go by in one step.
    fn pass(&mut self, time: Duration) {
        self.now += time;
        for at in self.alive() {
            let (node, out) = (self.nodes[at].as_ref().unwrap(), &mut self.out[at]);
            node.handle_timeout(out, self.now);
        }
        self.run();
    }

    fn take(&mut self) -> Counts {
        std::mem::take(&mut self.counts)
    }

    fn ring(&self) -> Ring {
        self.node(0).with_published(|p| p.ring.clone())
    }

    fn join(&mut self, at: usize, group: &Group) -> JoinStart<()> {
        let number = self.node(at).next_member_number();
        self.node(at).join(group.clone(), number, (), Ticket(number), self.now)
    }
}

/// Counts held against what they should be; kinds that are not named must not occur.
#[track_caller]
fn exactly(counts: &Counts, expected: &[(&str, usize)]) {
    for (kind, messages) in expected {
        let counted = counts.get(kind).copied().unwrap_or_default().messages;
        assert_eq!(counted, *messages as u64, "{kind}: {counts:?}");
    }
    let unexpected = counts.keys().find(|kind| !expected.iter().any(|(k, _)| k == *kind));
    assert_eq!(unexpected, None, "{counts:?}");
}

/// A row of the table. Cost per node, or per whatever the row is about.
fn row(what: &str, counts: &Counts, hops: Option<u32>, per: usize) {
    let (messages, bytes) = counts.values().fold((0, 0), |(m, b), cost| (m + cost.messages, b + cost.bytes));
    let kinds: Vec<String> = counts.iter().map(|(kind, cost)| format!("{} {kind}", cost.messages)).collect();
    let each = |total: u64| total as f64 / per as f64;
    let ready = hops.map_or(String::new(), |hops| format!("{hops} hops"));
    println!(
        "| {what} | {messages} | {:.1} | {:.1} kB | {ready} | {} |",
        each(messages),
        each(bytes) / 1e3,
        kinds.join(", ")
    );
}

fn resident() -> String {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kilobytes = line.and_then(|line| line.trim_end_matches("kB").trim().parse::<u64>().ok());
    kilobytes.map_or("unknown".into(), |kb| format!("{:.1} GB", kb as f64 / 1e6))
}

/// How many groups each node holds for each router, by the ring and without the nodes' help: `[source][router]`.
struct Held(Vec<Vec<u32>>);

impl Held {
    /// Group `n` has one member, on node `n % sources`. With `moved_from`: only groups that had another router there.
    fn count(names: &[Group], sources: usize, ring: &Ring, moved_from: Option<&Ring>) -> Self {
        let places: Vec<usize> = ring.nodes().iter().map(place_of_node).collect();
        let mut held = vec![vec![0; places.iter().max().unwrap() + 1]; sources];
        for (number, name) in names.iter().enumerate() {
            let (source, router) = (number % sources, places[ring.router_index(name).unwrap()]);
            let moved = moved_from.is_none_or(|old| old.router_for(name) != ring.router_for(name));
            if moved && router != source {
                held[source][router] += 1;
            }
        }
        Self(held)
    }

    /// Summed over the pairs of nodes, with something rounded up: messages that take so many groups each.
    fn batches(&self, size: usize) -> usize {
        self.0.iter().flatten().map(|count| (*count as usize).div_ceil(size)).sum()
    }

    /// Pairs of a source and a router that it has something for.
    fn pairs(&self) -> usize {
        self.0.iter().flatten().filter(|count| **count > 0).count()
    }

    /// Until all are `Ready`: three, and a round trip for every further 16 pieces of the largest transfer, which
    /// wait for the acknowledgement of the first.
    fn hops(&self) -> u32 {
        let largest = self.0.iter().flatten().map(|count| count.div_ceil(16 * 1000)).max().unwrap_or(0);
        3 + 2 * largest.saturating_sub(1)
    }

    fn groups(&self) -> usize {
        self.0.iter().flatten().map(|count| *count as usize).sum()
    }
}

fn place_of_node(node: &NodeId) -> usize {
    node.as_str()[5..].parse().unwrap()
}

/// Every group is in the table of its router, under its one source, and nothing else is in any table.
fn assert_tables(c: &Cluster, names: &[Group], sources: usize) {
    let ring = c.ring();
    let rows: usize = c.alive().map(|at| c.node(at).counts().rows).sum();
    assert_eq!(rows, Held::count(names, sources, &ring, None).groups());
    for (number, name) in names.iter().enumerate().step_by(names.len().div_ceil(500)) {
        let router = c.node(place_of_node(ring.router_for(name).unwrap()));
        let hash = router.with_published(|p| p.sender_hash());
        let targets = router.targets(name.as_bytes(), hash).unwrap();
        assert_eq!(targets.as_slice(), [c.peers[number % sources].node.clone()], "{name}");
    }
}

#[test]
fn messages_and_bytes_grow_as_the_guide_says() {
    let full = if cfg!(debug_assertions) { "3x30,8x150" } else { "10x1000000,100x200000,1000x100000" };
    let sizes = std::env::var("GROWTH").unwrap_or(full.into());
    for size in sizes.split(',') {
        let (nodes, groups) = size.split_once('x').expect("nodes x groups");
        grow(nodes.parse().unwrap(), groups.parse().unwrap());
    }
}

fn grow(n: usize, groups: usize) {
    let begin = std::time::Instant::now();
    // each simulated node has a ring of its own, and 1000 of the usual size would fill the memory
    let vnodes = if n > 100 { 16 } else { 128 };
    println!("\n{n} nodes, {groups} groups with one member each, {vnodes} tokens a node\n");
    println!("| what | messages | per node or piece | bytes per node or piece | all `Ready` after | |");
    println!("|---|---|---|---|---|---|");

    let mut c = Cluster::new(n, vnodes);
    let ready = c.run();
    let counts = c.take();
    row("all nodes meet at once", &counts, ready, n);
    exactly(&counts, &[("Leaving", n), ("LeavingAck", n), ("Announce", n * (n - 1))]);
    assert_eq!(ready, Some(3));

    let names: Vec<Group> = (0..groups).map(|number| Group::from(format!("g{number:07}"))).collect();
    first_joins(&mut c, n, &names);
    one_group(&mut c, n);
    heartbeats(&mut c, n);
    changes(&mut c, n, &names);
    println!("\n{n} nodes: {:.0} s, {} resident", begin.elapsed().as_secs_f64(), resident());
}

fn first_joins(c: &mut Cluster, n: usize, names: &[Group]) {
    let (mut claims, mut acknowledgements, mut waited) = (0, 0, 0);
    // a join that waits takes memory: not all of them at the same moment
    for part in names.chunks(n * (2_500_000 / n).max(1)) {
        for (number, name) in part.iter().enumerate() {
            c.join(number % n, name);
        }
        c.run();
        let held = Held::count(part, n, &c.ring(), None);
        claims += held.batches(256);
        acknowledgements += held.batches(32 * 256);
        waited += held.groups();
    }
    let counts = c.take();
    row("first joins, many at once, a group", &counts, None, names.len());
    exactly(&counts, &[("Claims", claims), ("ClaimsAck", acknowledgements)]);
    assert_eq!(c.joined, waited, "all others are routed by their own node");
    assert_tables(c, names, n);
}

/// The life of a group with three holders, from its first join to its retraction.
fn one_group(c: &mut Cluster, n: usize) {
    let ring = c.ring();
    let (router, caller) = (1, 0);
    let mut names = (0..).map(|number| Group::from(format!("one{number}")));
    let name = names.find(|name| ring.router_for(name) == Some(&c.peers[router].node)).unwrap();
    let holders: Vec<usize> = (2..n).take(3).collect();
    for (nth, holder) in holders.iter().enumerate() {
        assert!(matches!(c.join(*holder, &name), JoinStart::Waiting));
        c.run();
        let counts = c.take();
        if nth == 0 {
            row("a first join", &counts, None, 1);
        }
        exactly(&counts, &[("Claims", 1), ("ClaimsAck", 1)]);
    }
    assert!(matches!(c.join(holders[0], &name), JoinStart::Joined));
    c.run();
    exactly(&c.take(), &[]);

    broadcast(c, caller, &name, holders.len());

    let members: Vec<u64> =
        c.node(holders[0]).local_members(name.as_bytes()).iter().map(|m| m.number).collect();
    for member in members {
        c.node(holders[0]).leave(name.as_bytes(), member, c.now);
        c.run();
        exactly(&c.take(), &[]);
    }
    c.pass(c.settings.vacancy_cooldown);
    c.pass(c.settings.flush_interval);
    let mut counts = c.take();
    counts.remove("Heartbeat");
    row("a last leave, after the cooldown", &counts, None, 1);
    exactly(&counts, &[("Retract", 1), ("RetractAck", 1)]);
    for holder in &holders[1..] {
        let member = c.node(*holder).local_members(name.as_bytes()).iter().next().unwrap().number;
        c.node(*holder).leave(name.as_bytes(), member, c.now);
    }
    c.pass(c.settings.vacancy_cooldown);
    c.pass(c.settings.flush_interval);
    c.take();
}

/// By a caller that is neither router nor holder.
fn broadcast(c: &mut Cluster, caller: usize, name: &Group, holders: usize) {
    let cast = NewCast {
        group: name.clone(),
        body: Bytes::from(vec![7; 100]),
        except: None,
        headers: Vec::new(),
        at_most_once: false,
        audience: Audience::Group,
        ticket: Some(Ticket(u64::MAX)),
    };
    let (node, out) = (c.nodes[caller].as_ref().unwrap(), &mut c.out[caller]);
    assert!(matches!(node.broadcast(cast, out), Begun::Sent { .. }));
    (c.delivered, c.settled) = (0, Vec::new());
    c.run();
    let counts = c.take();
    row(&format!("a broadcast of 100 B to {holders} holders, alone"), &counts, None, 1);
    // the first one of them has two members
    assert_eq!((c.delivered, c.settled.as_slice()), (holders + 1, &[holders][..]));
    exactly(&counts, &[("Route", 1), ("Deliver", holders), ("Progress", holders + 2)]);
}

fn heartbeats(c: &mut Cluster, n: usize) {
    for _ in 0..2 {
        c.pass(c.settings.heartbeat_interval);
        let counts = c.take();
        exactly(&counts, &[("Heartbeat", n * (n - 1).min(c.settings.beat_peers))]);
    }
    c.pass(c.settings.heartbeat_interval);
    row("a heartbeat", &c.take(), None, n);
}

/// A node joins, drains, ends; another one dies.
fn changes(c: &mut Cluster, n: usize, names: &[Group]) {
    let before = c.ring();
    c.start(n);
    let ready = c.run();
    let counts = c.take();
    let moved = Held::count(names, n, &c.ring(), Some(&before));
    row("a node joins", &counts, ready, n);
    assert_eq!(ready, Some(moved.hops()));
    exactly(
        &counts,
        &[
            ("Leaving", n * (n - 1) + 1),
            ("LeavingAck", n * (n - 1) + 1),
            ("Data", moved.batches(1000)),
            ("DataAck", moved.batches(16 * 1000)),
            ("Announce", (n + 1) * n - moved.pairs()),
        ],
    );
    assert_tables(c, names, n);

    let before = c.ring();
    c.node(n).drain(c.now);
    let ready = c.run();
    let counts = c.take();
    let moved = Held::count(names, n, &c.ring(), Some(&before));
    row("it drains", &counts, ready, n);
    exactly(
        &counts,
        &[
            ("Draining", n),
            ("Leaving", (n + 1) * n),
            ("LeavingAck", (n + 1) * n),
            ("Data", moved.batches(1000)),
            ("DataAck", moved.batches(16 * 1000)),
            ("Announce", (n + 1) * n - moved.pairs()),
        ],
    );
    assert_tables(c, names, n);

    c.end(n);
    let ready = c.run();
    let counts = c.take();
    row("and ends", &counts, ready, n);
    assert_eq!(ready, Some(3));
    exactly(&counts, &[("Leaving", n * (n - 1)), ("LeavingAck", n * (n - 1)), ("Announce", n * (n - 1))]);

    // one that holds groups itself: they are gone with it
    let (before, last) = (c.ring(), n - 1);
    c.end(last);
    let ready = c.run();
    let counts = c.take();
    let kept: Vec<Group> = names
        .iter()
        .enumerate()
        .filter(|(number, _)| number % n != last)
        .map(|(_, name)| name.clone())
        .collect();
    let moved = Held::count(&kept, last, &c.ring(), Some(&before));
    row("a node dies", &counts, ready, last);
    assert_eq!(ready, Some(moved.hops()));
    exactly(
        &counts,
        &[
            ("Leaving", last * (last - 1)),
            ("LeavingAck", last * (last - 1)),
            ("Data", moved.batches(1000)),
            ("DataAck", moved.batches(16 * 1000)),
            ("Announce", last * (last - 1) - moved.pairs()),
        ],
    );
    assert_tables(c, &kept, last);
}
