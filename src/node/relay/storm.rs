//! Relays alone in a storm: a toy network with full queues, dead links, silent links and crashes, and tables
//! that may send an origin to a flood at any time. Counted is who got what: nobody twice (P2), and everybody
//! once who had to (P1). When all is quiet nothing is left but the windows (P7).

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::*;
use crate::config::Config;
use crate::node::published::Status;
use crate::ring::{Ring, RingConfig};
use crate::types::{Incarnation, NodeId};
use crate::view::View;

const WINDOW: u64 = 16;
const BYTES: usize = 64;
const GROUPS: usize = 3;

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
    fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }
    fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }
}

/// One direction of a pair: from its first node to its second.
#[derive(Default)]
struct Way {
    /// The first node has been told that the second is up.
    told: bool,
    /// The transport of the first node knows that the link is dead; the node is about to be told.
    dying: bool,
    suspect: bool,
    blocked: bool,
    data: VecDeque<(DataMessage, Bytes)>,
    control: VecDeque<Progress>,
}

struct Net {
    ways: Vec<Vec<Way>>,
    lives: Vec<u64>,
    room: usize,
}

struct Out<'a>(&'a mut Net, usize);

fn name(place: usize) -> NodeId {
    NodeId::new(format!("n{place}")).unwrap()
}

impl Net {
    fn peer(&self, place: usize) -> Peer {
        Peer::new(name(place), Incarnation::new(self.lives[place]).unwrap())
    }
}

fn place(peer: &Peer) -> usize {
    peer.node.as_str()[1..].parse().unwrap()
}

impl Wire for Out<'_> {
    fn try_send(&mut self, to: &Peer, message: DataMessage<&Cast>, body: &Bytes) -> Sent {
        let to_place = place(to);
        let current = self.0.peer(to_place) == *to;
        let room = self.0.room;
        let way = &mut self.0.ways[self.1][to_place];
        if !current || !way.told || way.dying {
            return Sent::NoLink;
        }
        if way.data.len() >= room {
            return Sent::Busy;
        }
        way.data.push_back((message.cloned(), body.clone()));
        Sent::Accepted
    }
}

/// What one relay sees of the rest of its node, for one step.
struct Here {
    published: Arc<Published>,
    targets: Result<Vec<Peer>, Flood>,
}

impl World for Here {
    fn published(&self) -> Arc<Published> {
        self.published.clone()
    }
    fn target_peers(&self, _group: &[u8], _sender: ViewHash) -> Result<Vec<Peer>, Flood> {
        self.targets.clone()
    }
}

struct Made {
    origin: usize,
    group: usize,
    once: bool,
    /// Who must get it: place and life.
    owed: BTreeSet<(usize, u64)>,
}

struct Storm {
    seed: u64,
    random: Random,
    net: Net,
    relays: Vec<Option<Relay>>,
    holds: Vec<[bool; GROUPS]>,
    casts: BTreeMap<(Peer, u64), Made>,
    got: BTreeMap<(Peer, u64), BTreeMap<(usize, u64), u32>>,
    /// The receipts that are awaited, by place.
    tickets: BTreeMap<u64, usize>,
    next_ticket: u64,
    now: Time,
    begun: u64,
    rules: Rules,
    rings: Vec<Ring>,
}

impl Storm {
    fn new(seed: u64, nodes: usize, rules: Rules) -> Self {
        let mut random = Random(seed);
        let room = 1 + random.below(6);
        let net = Net {
            ways: (0..nodes).map(|_| (0..nodes).map(|_| Way::default()).collect()).collect(),
            lives: vec![1; nodes],
            room,
        };
        let holds = (0..nodes).map(|_| std::array::from_fn(|_| random.one_in(2))).collect();
        let mut storm = Self {
            seed,
            random,
            net,
            relays: (0..nodes).map(|_| None).collect(),
            holds,
            casts: BTreeMap::new(),
            got: BTreeMap::new(),
            tickets: BTreeMap::new(),
            next_ticket: 1,
            now: Time::ZERO,
            begun: 0,
            rules,
            rings: (0..nodes).map(|n| Ring::of([name(n)], RingConfig::default())).collect(),
        };
        (0..nodes).for_each(|n| storm.start(n));
        for a in 0..nodes {
            for b in 0..nodes {
                if a != b {
                    storm.up(a, b);
                }
            }
        }
        storm
    }

    fn nodes(&self) -> usize {
        self.relays.len()
    }

    fn start(&mut self, n: usize) {
        let settings = Settings {
            dedupe_window: WINDOW,
            max_unacknowledged: BYTES,
            rules: self.rules,
            ..Settings::from(&Config::default())
        };
        self.relays[n] = Some(Relay::new(self.net.peer(n), &settings));
    }

    /// One input to one relay, and what follows from it at once.
    fn step<R>(&mut self, n: usize, act: impl FnOnce(&mut Relay, &mut Out<'_>) -> R) -> Option<R> {
        let relay = self.relays[n].as_mut()?;
        let result = act(relay, &mut Out(&mut self.net, n));
        if let Err(broken) = relay.check_invariants() {
            panic!("seed {}: n{n}: {broken}", self.seed);
        }
        while let Some(peer) = relay.poll_wake() {
            let to = place(&peer);
            while let Some(progress) = relay.poll_progress(&peer) {
                if self.net.ways[n][to].told && !self.net.ways[n][to].dying {
                    self.net.ways[n][to].control.push_back(progress);
                }
            }
        }
        while let Some(settled) = relay.poll_settled() {
            let by = self.tickets.remove(&settled.ticket.0);
            assert_eq!(by, Some(n), "seed {}: a receipt that nobody awaits: {settled:?}", self.seed);
        }
        Some(result)
    }

    fn world(&mut self, n: usize, group: usize) -> Here {
        let router = self.random.below(self.nodes());
        let me = self.net.peer(n);
        let ready = !self.random.one_in(6);
        let published = Published {
            me: me.clone(),
            status: if ready { Status::Ready } else { Status::Rebalancing },
            view: View::alone(me.clone()),
            hash: ViewHash::from_raw(7),
            ring: self.rings[router].clone(),
            routers: Arc::new([self.net.peer(router)]),
            connected: Arc::new([]),
            slots: Arc::new([]),
            settled: true,
            draining: false,
            superseded: false,
        };
        // a router that decides knows every holder, in the life that runs, though it may have lost its link
        let holders: Vec<Peer> = (0..self.nodes())
            .filter(|h| self.relays[*h].is_some() && self.holds[*h][group])
            .map(|h| self.net.peer(h))
            .collect();
        let targets = if self.random.one_in(4) { Err(Flood) } else { Ok(holders) };
        Here { published: Arc::new(published), targets }
    }

    fn broadcast(&mut self, n: usize) {
        if self.relays[n].is_none() {
            return;
        }
        let group = self.random.below(GROUPS);
        let once = self.random.one_in(8);
        let body = Bytes::from(vec![0; self.random.below(20)]);
        let ticket = self.next_ticket;
        self.next_ticket += 1;
        if !once {
            self.tickets.insert(ticket, n);
        }
        let cast = NewCast {
            group: Group::from(&[group as u8]),
            body,
            except: None,
            headers: Vec::new(),
            at_most_once: once,
            audience: Audience::Group,
            ticket: (!once).then_some(Ticket(ticket)),
        };
        let owed = (0..self.nodes())
            .filter(|s| *s != n && self.relays[*s].is_some() && self.holds[*s][group])
            .filter(|s| self.linked(n, *s))
            .map(|s| (s, self.net.lives[s]))
            .collect();
        let world = self.world(n, group);
        // known before it is sent: the receipt may come with it
        match self.step(n, |relay, out| relay.broadcast(cast, &world, out)) {
            Some(Begun::Sent { id, deliver_here }) => {
                assert!(deliver_here);
                self.begun += 1;
                if self.random.one_in(10) && self.tickets.contains_key(&ticket) {
                    self.tickets.remove(&ticket);
                    self.step(n, |relay, _| relay.abandon(id.seq));
                }
                let key = (id.origin, id.seq);
                self.casts.insert(key, Made { origin: n, group, once, owed });
            }
            _ => {
                self.tickets.remove(&ticket);
            }
        }
    }

    fn linked(&self, a: usize, b: usize) -> bool {
        let (out, back) = (&self.net.ways[a][b], &self.net.ways[b][a]);
        out.told && back.told && !out.dying && !back.dying
    }

    /// Nothing that was owed over this link is owed any more.
    fn excuse(&mut self, a: usize, b: usize) {
        for cast in self.casts.values_mut() {
            if cast.origin == a {
                cast.owed.retain(|(s, _)| *s != b);
            } else if cast.origin == b {
                cast.owed.retain(|(s, _)| *s != a);
            }
        }
    }

    fn up(&mut self, a: usize, b: usize) {
        let back = &self.net.ways[b][a];
        let fresh = self.net.ways[a][b].data.is_empty() && back.data.is_empty() && back.control.is_empty();
        if a == b || self.relays[a].is_none() || self.relays[b].is_none() || self.net.ways[a][b].told {
            return;
        }
        // a session begins only when both have been told of the end of the last; the second end follows it
        if back.dying || (!back.told && !fresh) {
            return;
        }
        self.net.ways[a][b] = Way { told: true, ..Way::default() };
        let peer = self.net.peer(b);
        self.step(a, |relay, out| relay.handle_peer_up(&peer, out));
        // both before anything is sent in the new session, as the handshake has it
        if !self.net.ways[b][a].told {
            self.up(b, a);
        }
    }

    /// `a` is told that `b` is down. What it has sent may still arrive, until `b` is told.
    fn down(&mut self, a: usize, b: usize) {
        if !self.net.ways[a][b].told {
            return;
        }
        self.excuse(a, b);
        let lose = self.random.one_in(2);
        self.net.ways[a][b].told = false;
        self.net.ways[a][b].suspect = false;
        self.net.ways[a][b].blocked = false;
        if lose {
            self.net.ways[a][b].data.clear();
            self.net.ways[a][b].control.clear();
        }
        self.net.ways[b][a].data.clear();
        self.net.ways[b][a].control.clear();
        // its transport learns it soon
        if self.net.ways[b][a].told {
            self.net.ways[b][a].dying = true;
        } else {
            for (x, y) in [(a, b), (b, a)] {
                self.net.ways[x][y] = Way::default();
            }
        }
        let peer = self.net.peer(b);
        self.step(a, |relay, out| relay.handle_peer_down(&peer, out));
    }

    fn crash(&mut self, n: usize) {
        if self.relays[n].is_none() {
            return;
        }
        self.relays[n] = None;
        self.tickets.retain(|_, by| *by != n);
        for cast in self.casts.values_mut() {
            cast.owed.retain(|(s, _)| *s != n);
            if cast.origin == n {
                cast.owed.clear();
            }
        }
        for other in 0..self.nodes() {
            if other == n {
                continue;
            }
            // what it had sent may still arrive, until the other is told
            if self.net.ways[other][n].told {
                self.net.ways[other][n].dying = self.random.one_in(2);
                self.net.ways[n][other].told = false;
                self.net.ways[other][n].data.clear();
                self.net.ways[other][n].control.clear();
            } else {
                self.net.ways[n][other] = Way::default();
                self.net.ways[other][n] = Way::default();
            }
        }
    }

    fn restart(&mut self, n: usize) {
        // others are told of the death of the old life first, some with delay
        let met = (0..self.nodes()).any(|o| o != n && self.net.ways[o][n].told);
        if self.relays[n].is_some() || met {
            return;
        }
        self.net.lives[n] += 1;
        self.start(n);
    }

    fn deliver(&mut self, from: usize, to: usize) {
        let way = &self.net.ways[from][to];
        if way.blocked || !self.net.ways[to][from].told || self.relays[to].is_none() {
            return;
        }
        let control = !way.control.is_empty() && (way.data.is_empty() || self.random.one_in(2));
        let peer = self.net.peer(from);
        if control {
            let Some(progress) = self.net.ways[from][to].control.pop_front() else { return };
            self.step(to, |relay, out| relay.handle_progress(&peer, progress, out));
            return;
        }
        let Some((message, body)) = self.net.ways[from][to].data.pop_front() else { return };
        let group = match &message {
            DataMessage::Route { cast, .. } | DataMessage::Deliver { cast, .. } => cast.group.as_bytes()[0],
        };
        let world = self.world(to, group as usize);
        let now = self.now;
        let delivery =
            self.step(to, |relay, out| relay.handle_data(&peer, message, body, &world, out, now)).flatten();
        if let Some(delivery) = delivery {
            let me = (to, self.net.lives[to]);
            let count = self
                .got
                .entry((delivery.id.origin.clone(), delivery.id.seq))
                .or_default()
                .entry(me)
                .or_default();
            *count += 1;
            assert!(*count == 1, "seed {}: P2: n{to} got {} again", self.seed, delivery.id);
            let hop = delivery.hop;
            self.step(to, |relay, _| relay.delivered(&peer, hop));
        }
        if self.random.one_in(2) {
            // room at the sender
            let peer = self.net.peer(to);
            self.step(from, |relay, out| relay.handle_room(&peer, out));
        }
    }

    fn random_step(&mut self) {
        self.now += Time::from_millis(1);
        let (a, b) = (self.random.below(self.nodes()), self.random.below(self.nodes()));
        let faulty = a != b;
        match self.random.below(100) {
            0..30 => self.broadcast(a),
            30..85 if faulty => self.deliver(a, b),
            85 if faulty && self.random.one_in(2) => self.down(a, b),
            // the link breaks for the transport before the node is told
            86 if faulty && self.net.ways[a][b].told && self.random.one_in(2) => {
                self.excuse(a, b);
                self.net.ways[a][b].dying = true;
            }
            87 if faulty && self.net.ways[a][b].dying => self.down(a, b),
            88 | 89 => self.up(a, b),
            90 | 91 if faulty && self.net.ways[a][b].told && !self.net.ways[a][b].suspect => {
                self.net.ways[a][b].suspect = true;
                self.net.ways[a][b].blocked = self.random.one_in(2);
                self.net.ways[b][a].blocked = self.net.ways[b][a].told && self.random.one_in(2);
                let peer = self.net.peer(b);
                self.step(a, |relay, out| relay.handle_peer_suspect(&peer, out));
            }
            92..95 if faulty => self.resume(a, b),
            95 if faulty => self.net.ways[a][b].blocked = self.net.ways[a][b].told && self.random.one_in(3),
            96 if self.random.one_in(4) => self.crash(a),
            97 => self.restart(a),
            98 => {
                let now = self.now;
                self.step(a, |relay, out| relay.handle_timeout(out, now));
            }
            _ if faulty => {
                let peer = self.net.peer(b);
                self.step(a, |relay, out| relay.handle_room(&peer, out));
            }
            _ => {}
        }
        for relay in self.relays.iter().flatten() {
            assert!(relay.open() as u64 <= WINDOW / 2, "seed {}: P7", self.seed);
            assert!(relay.open_bytes <= BYTES.max(21), "seed {}: P7", self.seed);
        }
    }

    fn resume(&mut self, a: usize, b: usize) {
        self.net.ways[a][b].blocked = false;
        self.net.ways[b][a].blocked = false;
        if self.net.ways[a][b].suspect {
            self.net.ways[a][b].suspect = false;
            let peer = self.net.peer(b);
            self.step(a, |relay, out| relay.handle_peer_resumed(&peer, out));
        }
    }

    fn quiet(&mut self) {
        let pairs: Vec<(usize, usize)> = (0..self.nodes())
            .flat_map(|a| (0..self.nodes()).map(move |b| (a, b)))
            .filter(|(a, b)| a != b)
            .collect();
        for &(a, b) in &pairs {
            // ends that have not heard yet
            if self.net.ways[a][b].told && (self.net.ways[a][b].dying || !self.net.ways[b][a].told) {
                self.down(a, b);
            }
        }
        for &(a, b) in &pairs {
            if self.net.ways[a][b].told && (self.net.ways[a][b].dying || !self.net.ways[b][a].told) {
                self.down(a, b);
            }
            self.resume(a, b);
        }
        for round in 0.. {
            assert!(round < 5_000, "seed {}: never quiet", self.seed);
            let busy = |way: &Way| way.told && !(way.data.is_empty() && way.control.is_empty());
            if !self.net.ways.iter().flatten().any(busy) {
                let before = self.net.ways.iter().flatten().map(|way| way.data.len()).sum::<usize>();
                for &(a, b) in &pairs {
                    let peer = self.net.peer(b);
                    self.step(a, |relay, out| relay.handle_room(&peer, out));
                }
                let after = self.net.ways.iter().flatten().map(|way| way.data.len()).sum::<usize>();
                if after == before {
                    break;
                }
            }
            for &(a, b) in &pairs {
                self.deliver(a, b);
            }
        }
        let seed = self.seed;
        for ((origin, seq), cast) in &self.casts {
            if cast.once {
                continue;
            }
            for (s, life) in &cast.owed {
                let got =
                    self.got.get(&(origin.clone(), *seq)).is_some_and(|by| by.contains_key(&(*s, *life)));
                assert!(got, "seed {seed}: P1: n{s}#{life} missed {origin}:{seq} of group {}", cast.group);
            }
        }
        for (n, relay) in self.relays.iter().enumerate() {
            let Some(relay) = relay else { continue };
            assert_eq!((relay.open(), relay.serving()), (0, 0), "seed {seed}: n{n}: {relay:?}");
            for link in relay.links.iter() {
                assert_eq!(link.in_flight() + link.unsent.len() + link.answers.len(), 0, "seed {seed}: n{n}");
                assert_eq!(link.serving.len(), 0, "seed {seed}: n{n}");
            }
            assert!(relay.windows.values().all(|w| w.len() as u64 <= WINDOW), "seed {seed}");
            assert_eq!(relay.violations(), 0, "seed {seed}: n{n}");
        }
        assert!(self.tickets.is_empty(), "seed {seed}: P6: receipts never given: {:?}", self.tickets);
    }
}

fn run(seed: u64, rules: Rules) -> u64 {
    let nodes = 2 + (seed % 4) as usize;
    let mut storm = Storm::new(seed, nodes, rules);
    for _ in 0..3 {
        (0..500).for_each(|_| storm.random_step());
        storm.quiet();
    }
    // long after, the windows of those who are gone are gone
    let gone: Vec<(usize, usize)> = (0..nodes).flat_map(|a| (0..nodes).map(move |b| (a, b))).collect();
    for (a, b) in gone {
        if a != b {
            storm.down(a, b);
        }
    }
    for n in 0..nodes {
        storm.step(n, |relay, out| relay.handle_timeout(out, Time::from_secs(86_400)));
        if let Some(relay) = &storm.relays[n] {
            assert_eq!(relay.footprint(), 0, "seed {seed}");
        }
    }
    storm.begun
}

#[test]
fn a_storm_loses_nothing_doubles_nothing_and_leaves_nothing() {
    let seeds = std::env::var("STORM_SEEDS").ok().and_then(|n| n.parse().ok()).unwrap_or(300);
    let from = std::env::var("STORM_FROM").ok().and_then(|n| n.parse().ok()).unwrap_or(0);
    let begun: u64 = (from..from + seeds).map(|seed| run(seed, Rules::all())).sum();
    assert!(begun > seeds * 100, "the storm must leave room for broadcasts: {begun}");
    println!("{begun} broadcasts in {seeds} storms");
}

/// The storm is worth something only if it notices a broken rule, and for the right reason.
#[cfg(feature = "testing")]
#[test]
fn the_storm_finds_each_broken_rule_of_the_relay() {
    let missed = "P1";
    for (mutation, expected) in [
        (Mutation::NoFloodOnDeadRouter, missed),
        (Mutation::NoDedupe, "P2"),
        (Mutation::FailedNotResent, missed),
        // it lifts the bound on open broadcasts as well: most runs end by that
        (Mutation::FloorRunsAhead, missed),
    ] {
        let found = (0..300).any(|seed| {
            let Err(why) = std::panic::catch_unwind(|| run(seed, Rules::broken(mutation))) else {
                return false;
            };
            why.downcast_ref::<String>().is_some_and(|why| why.contains(&format!(": {expected}: ")))
        });
        assert!(found, "{mutation:?} did not break {expected} in 300 storms");
    }
}
