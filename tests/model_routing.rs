//! Every interleaving of small clusters, over the nodes that ship.
//!
//! The state is the `Node` values themselves, the frames on their way and what the test knows to be true.
//! Frames of one lane of one link arrive in the order in which they were sent, frames of different lanes and of
//! different links in any order: that is what the contract of `Transport` promises, and no more. A link is seen
//! up and down by one end first.
//!
//! Two looks at every state in which nothing moves and all nodes are connected: as it is (all `Ready` in one
//! view, no row missing, none too many but those that only time takes away), and after heartbeats, sweeps and
//! tombstones have had their time (every table is exactly the truth).
//!
//! A check that never sees the interesting transition proves nothing, so each configuration names what has to
//! occur in it ([`Sight`]). `cargo test --release --test model_routing -- --nocapture` prints how many states
//! each configuration has and what occurred; `MODEL_DEPTH=n` adds larger ones, for n seconds each.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test may fail")]

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::hash::{Hash, Hasher};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use muster_router::node::message::{Cast, DataKind, DataMessage, Message, RoutedOutcome};
use muster_router::node::relay::{Audience, Begun, NewCast, Sent, Wire};
use muster_router::node::{Effect, JoinStart, Mutation, Node, Rules, Settings, Status, Ticket, Time};
use muster_router::transport::Lane;
use muster_router::{Config, Group, Incarnation, NodeId, Peer, Ring, RingConfig};
use stateright::{Checker, Model, Property};

use Sight::*;

/// The length of every timer that is not to go off by itself.
const NEVER: Time = Time::from_secs(1 << 20);

/// How much may happen in one run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct Budget {
    /// Nodes that die, and dead nodes that come back under their name.
    crashes: u8,
    restarts: u8,
    cuts: u8,
    connects: u8,
    joins: u8,
    leaves: u8,
    /// Broadcasts that somebody else must get, and broadcasts that nobody else must.
    casts: u8,
    idle_casts: u8,
    timeouts: u8,
    suspects: u8,
    drains: u8,
}

/// What has to occur somewhere, or the check has not looked where it matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Sight {
    /// A join was answered by its router.
    JoinAnswered,
    /// A claim timed out: its join failed.
    JoinFailed,
    /// A claim reached its router when its join had failed already.
    LateClaim,
    /// A group was taken back.
    Retraction,
    Crash,
    Restart,
    Drain,
    /// One end had a link for down while the other had it for up.
    OneEndFirst,
    /// A prepared view was given up, for the one before it.
    CancelledRound,
    /// A gather was cut short by the next commit.
    CutGather,
    /// A full table was sent, or only the groups that had moved.
    Snapshot,
    Delta,
    /// A payload was sent to whoever is connected, or to those who hold the group.
    Flood,
    Targeted,
    /// The router could not serve a target and named it.
    FailedNamed,
    /// A broadcast to a group that nobody holds, and to one that only the caller holds.
    CastToNobody,
    CastToOwn,
    /// A node was told that it sent to a group which is not held.
    NotHeld,
    /// The quiet cluster had a row that was left to time.
    RowLeftToTime,
    /// A quiet cluster was looked at, after all time that it may need.
    Rested,
}

impl Sight {
    const ALL: [Sight; 20] = [
        Sight::JoinAnswered,
        Sight::JoinFailed,
        Sight::LateClaim,
        Sight::Retraction,
        Sight::Crash,
        Sight::Restart,
        Sight::Drain,
        Sight::OneEndFirst,
        Sight::CancelledRound,
        Sight::CutGather,
        Sight::Snapshot,
        Sight::Delta,
        Sight::Flood,
        Sight::Targeted,
        Sight::FailedNamed,
        Sight::CastToNobody,
        Sight::CastToOwn,
        Sight::NotHeld,
        Sight::RowLeftToTime,
        Sight::Rested,
    ];
}

/// How often each has occurred.
#[derive(Debug, Default)]
struct Seen {
    counts: [AtomicU64; Sight::ALL.len()],
    /// Clusters that were found to come to rest, by the hash of their nodes.
    rested: Mutex<BTreeSet<u64>>,
}

impl Seen {
    fn mark(&self, sight: Sight) {
        self.counts[sight as usize].fetch_add(1, Ordering::Relaxed);
    }

    fn count(&self, sight: Sight) -> u64 {
        self.counts[sight as usize].load(Ordering::Relaxed)
    }
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
    /// All acknowledgements arrive at once: those of view changes, claims and data, too.
    eager: bool,
    /// Gathers are steps of their own.
    slow: bool,
    /// Who joins, who broadcasts and who dies; anybody, if it is not said.
    roles: Option<[usize; 3]>,
    /// What has to occur.
    expected: &'static [Sight],
    seen: Arc<Seen>,
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
    /// In seconds.
    now: u64,
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
    seen: &'a Seen,
    net: &'a mut BTreeMap<(Peer, Peer, u8), VecDeque<Packet>>,
}

impl Wire for Out<'_> {
    fn try_send(&mut self, to: &Peer, message: DataMessage<&Cast>, _body: &Bytes) -> Sent {
        if !self.up.contains(to) {
            return Sent::NoLink;
        }
        if let DataMessage::Deliver { targeted, .. } = message {
            self.seen.mark(if targeted { Sight::Targeted } else { Sight::Flood });
        }
        let key = (self.me.clone(), to.clone(), Lane::Data.index() as u8);
        self.net.entry(key).or_default().push_back(Packet::Data(message.cloned()));
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
            eager: false,
            slow: false,
            roles: None,
            expected: &[],
            seen: Arc::default(),
        }
    }

    fn sees(self, expected: &'static [Sight]) -> Self {
        Self { expected, ..self }
    }

    fn settings(&self) -> Settings {
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
            *long = NEVER;
        }
        settings.rules = self.mutation.map_or(Rules::all(), Rules::broken);
        settings
    }

    fn peer(&self, s: &State, i: usize) -> Peer {
        Peer::new(name(i), Incarnation::new(s.hosts[i].incarnation).unwrap())
    }

    fn now(&self, s: &State) -> Time {
        Time::from_secs(s.now)
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
        let stand = |node: &Node<u8>| node.with_published(|p| (p.status == Status::Rebalancing, p.hash));
        let (changing, hash) = stand(&node);
        let gathers = self.slow && changing && format!("{node:?}").contains("gather: Some");
        let result = act(&node, &mut Out { me, up: &host.up, seen: &self.seen, net: &mut s.net }, now);
        if changing && stand(&node) == (false, hash) && !self.slow {
            self.seen.mark(Sight::CancelledRound);
        }
        if gathers && stand(&node).1 != hash {
            self.seen.mark(Sight::CutGather);
        }
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
                            self.mark_message(&out.message);
                            let key = (me.clone(), to.clone(), out.lane.index() as u8);
                            s.net.entry(key).or_default().push_back(Packet::Message(out.message));
                        }
                    }
                }
                Effect::Joined { ticket, result } => {
                    if let Some(group) = s.hosts[i].joining.remove(&ticket.0) {
                        self.seen.mark(if result.is_ok() { Sight::JoinAnswered } else { Sight::JoinFailed });
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

    fn mark_message(&self, message: &Message) {
        match message {
            Message::Data { kind: DataKind::Snapshot, .. } => self.seen.mark(Sight::Snapshot),
            Message::Data { kind: DataKind::Delta, .. } => self.seen.mark(Sight::Delta),
            Message::Retract { .. } => self.seen.mark(Sight::Retraction),
            Message::NotHeld { .. } => self.seen.mark(Sight::NotHeld),
            Message::Progress(progress) => {
                let named = |outcome: &RoutedOutcome| matches!(outcome, RoutedOutcome::Targeted { failed, .. } if !failed.is_empty());
                if progress.routed.iter().any(|routed| named(&routed.outcome)) {
                    self.seen.mark(Sight::FailedNamed);
                }
            }
            _ => {}
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
                if let Message::Claims { claims, .. } = &message {
                    let source = &s.hosts[index(from)];
                    let waits = |group: &Group| {
                        let known = |g: &usize| self.groups[*g] == *group;
                        source.joining.values().any(known) || source.joined.iter().any(known)
                    };
                    if source.node.is_some() && claims.iter().any(|(group, _)| !waits(group)) {
                        self.seen.mark(Sight::LateClaim);
                    }
                }
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
        if other.node.is_some() && other.up.contains(&me) {
            self.seen.mark(Sight::OneEndFirst);
        }
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
        if let Some(host) = s.hosts.iter().find(|host| !host.joining.is_empty()) {
            return Err(format!("P6: quiet, but a join waits: {:?}", host.joining));
        }
        self.check_tables(s, true)?;
        for cast in s.casts.values() {
            if let Some(missed) = cast.must.iter().find(|p| !cast.got.contains_key(*p)) {
                return Err(format!("P1: {missed} never got a broadcast of {}", name(cast.origin)));
            }
        }
        self.check_rest(s)
    }

    /// P5: every row that the members need is there, and no other. Before `time` has done its part, a row may
    /// stay if its source is about to take it back, or if it is older than the source's view: the group's
    /// router went elsewhere and back while nobody held it, and the sweep and the digests will mend that.
    fn check_tables(&self, s: &State, before_time: bool) -> Result<(), String> {
        let nodes: Vec<&Node<u8>> = s.hosts.iter().filter_map(|h| h.node.as_deref()).collect();
        let mut truth = BTreeSet::new();
        for host in &s.hosts {
            let Some(node) = host.node.as_deref() else { continue };
            for group in host.joined.iter().map(|group| self.groups[*group].clone()) {
                if !node.holds(group.as_bytes()) {
                    return Err(format!("P5: {} has forgotten its member of {group}", node.me()));
                }
                let router = node.with_published(|p| p.router(group.as_bytes()).clone());
                if router != *node.me() {
                    truth.insert((router, group, node.me().clone()));
                }
            }
        }
        let mut seen = BTreeSet::new();
        for node in &nodes {
            for (group, source, version, present) in node.rows() {
                let router = node.with_published(|p| p.router(group.as_bytes()).clone());
                if !present || (before_time && router != *node.me()) {
                    continue;
                }
                let row = (node.me().clone(), group.clone(), source.clone());
                if before_time && !truth.contains(&row) {
                    let Some(at) = nodes.iter().find(|n| *n.me() == source) else {
                        return Err(format!("P5: quiet, but {} has a row of {source}", node.me()));
                    };
                    if version < at.announced() || at.claims().iter().any(|(g, ..)| *g == group) {
                        self.seen.mark(Sight::RowLeftToTime);
                        continue;
                    }
                }
                seen.insert(row);
            }
        }
        if let Some((router, group, source)) = truth.difference(&seen).next() {
            return Err(format!("P5: {router} misses the row of {source} for {group}"));
        }
        if let Some((router, group, source)) = seen.difference(&truth).next() {
            return Err(format!("P5: {router} believes that {source} holds {group}"));
        }
        Ok(())
    }

    /// Lets all timers go by, some times over: then every table is the truth and no group is on its way.
    fn check_rest(&self, s: &State) -> Result<(), String> {
        let mut hasher = std::hash::DefaultHasher::new();
        s.hosts.iter().for_each(|host| (host.print, &host.joined).hash(&mut hasher));
        let print = hasher.finish();
        if self.seen.rested.lock().unwrap().contains(&print) {
            return Ok(());
        }
        let fast = Cluster { slow: false, seen: Arc::default(), ..self.clone() };
        let mut s = s.clone();
        // a claim's end, then two digests, a repair and the ends of tombstones
        for _ in 0..5 {
            s.now += NEVER.as_secs();
            for i in 0..fast.nodes {
                fast.at(&mut s, i, |node, out, now| node.handle_timeout(out, now));
            }
            fast.run(&mut s, |_| true);
        }
        if let Some(broken) = s.broken {
            return Err(broken);
        }
        for node in s.hosts.iter().flat_map(|host| &host.node) {
            let status = node.published().status;
            if status != Status::Ready || node.in_flight() != (0, 0) {
                return Err(format!("P5: at rest, but {} is {status}: {:?}", node.me(), node.in_flight()));
            }
            if let Some((group, state, _)) = node.claims().iter().find(|(_, state, _)| *state != "Held") {
                return Err(format!("P5: at rest, but {group} is {state} at {}", node.me()));
            }
        }
        fast.check_tables(&s, false).map_err(|broken| format!("{broken}, after all time"))?;
        self.seen.mark(Sight::Rested);
        self.seen.rested.lock().unwrap().insert(print);
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
            let [may_join, may_cast, may_die] = self.roles.map_or([true; 3], |roles| roles.map(|at| at == i));
            if s.budget.crashes > 0 && may_die {
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
                if may_join
                    && settled
                    && s.budget.joins > 0
                    && !joined
                    && !host.joining.values().any(|x| *x == g)
                {
                    out.push(Act::Join(i, g));
                }
                if joined && s.budget.leaves > 0 {
                    out.push(Act::Leave(i, g));
                }
                let idle = self.must(s, i, g).is_empty();
                if (if idle { s.budget.idle_casts } else { s.budget.casts }) > 0 && may_cast {
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
                s.budget.crashes -= 1;
                self.seen.mark(Sight::Crash);
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
                self.seen.mark(Sight::Restart);
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
                self.seen.mark(Sight::Drain);
                self.at(&mut s, i, |node, _, now| node.drain(now));
            }
            Act::Cast(i, g) => {
                s.ticket += 1;
                let ticket = s.ticket;
                let must = self.must(&s, i, g);
                let own = s.hosts[i].joined.contains(&g);
                if must.is_empty() {
                    s.budget.idle_casts -= 1;
                    let nobody = s.hosts.iter().all(|host| !host.joined.contains(&g));
                    if nobody || own {
                        self.seen.mark(if own { Sight::CastToOwn } else { Sight::CastToNobody });
                    }
                } else {
                    s.budget.casts -= 1;
                }
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
                    Some(Begun::Sent { deliver_here, .. }) if own && !deliver_here => {
                        s.broken = Some(format!("P1: the members at {} miss their own broadcast", name(i)));
                    }
                    Some(Begun::Sent { .. }) => {}
                    _ => return None,
                }
            }
        }
        if self.eager {
            self.run(&mut s, |packet| {
                matches!(
                    packet,
                    Packet::Message(
                        Message::Progress(_)
                            | Message::LeavingAck { .. }
                            | Message::DataAck { .. }
                            | Message::ClaimsAck { .. }
                            | Message::RetractAck { .. }
                    )
                )
            });
        } else if self.prompt {
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

/// What occurred, how often.
fn told(seen: &Seen) -> String {
    let all = Sight::ALL.iter().map(|sight| (sight, seen.count(*sight))).filter(|(_, count)| *count > 0);
    all.map(|(sight, count)| format!("{sight:?} {count}")).collect::<Vec<_>>().join(", ")
}

/// Checks a configuration; the violation and its shortest run, if there is one.
fn check(what: &str, cluster: Cluster, limit: Option<Duration>) -> Result<usize, String> {
    let start = std::time::Instant::now();
    let mut builder = cluster.clone().checker().threads(2);
    if let Some(limit) = limit {
        builder = builder.timeout(limit);
    }
    let checker = builder.spawn_bfs().join();
    let broken = checker.discovery("what the protocol promises");
    let whole = checker.is_done() && limit.is_none_or(|l| start.elapsed() < l);
    let exhausted = match (&broken, whole) {
        (Some(_), _) => "violated",
        (None, true) => "exhausted",
        (None, false) => "cut off",
    };
    println!(
        "{what}: {} states, depth {}, {exhausted}, {:.1} s",
        checker.unique_state_count(),
        checker.max_depth(),
        start.elapsed().as_secs_f64()
    );
    println!("    {}", told(&cluster.seen));
    let unseen: Vec<_> = cluster.expected.iter().filter(|sight| cluster.seen.count(**sight) == 0).collect();
    match broken {
        None if exhausted == "exhausted" && checker.discovery("a broadcast is settled").is_none() => {
            Err(format!("{what}: no broadcast was ever settled, so nothing was checked"))
        }
        None if exhausted == "exhausted" && !unseen.is_empty() => {
            Err(format!("{what}: never seen, so not checked: {unseen:?}"))
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

const NOTHING: Budget = Budget {
    crashes: 0,
    restarts: 0,
    cuts: 0,
    connects: 0,
    joins: 0,
    leaves: 0,
    casts: 0,
    idle_casts: 0,
    timeouts: 0,
    suspects: 0,
    drains: 0,
};

const A_CUT: Budget = Budget { cuts: 1, connects: 1, joins: 1, casts: 1, ..NOTHING };

#[test]
fn two_nodes_meet() {
    let budget = Budget { connects: 1, joins: 1, casts: 1, idle_casts: 1, ..NOTHING };
    let cluster = Cluster::new(2, 0, &[&[1, 0]], budget);
    let expected = &[JoinAnswered, Snapshot, Flood, CastToNobody, CastToOwn, Rested];
    holds("two nodes meet", cluster.sees(expected));
}

#[test]
fn two_nodes_meet_while_a_member_leaves() {
    let cluster = Cluster::new(2, 0, &[&[1, 0]], Budget { connects: 1, joins: 2, leaves: 2, ..NOTHING });
    holds("two nodes meet, a member leaves", cluster.sees(&[JoinAnswered, Snapshot, Retraction, Rested]));
}

#[test]
fn two_nodes_part_and_meet() {
    let cluster = Cluster::new(2, 2, &[&[1, 0]], A_CUT);
    holds("two nodes part and meet", cluster.sees(&[JoinAnswered, OneEndFirst, Snapshot, Flood, Targeted]));
}

#[test]
fn two_nodes_with_late_acknowledgements() {
    let cluster = Cluster { prompt: false, ..Cluster::new(2, 2, &[&[1, 0]], A_CUT) };
    holds("two nodes, late acknowledgements", cluster.sees(&[JoinAnswered, OneEndFirst, Flood, Targeted]));
}

#[test]
fn two_nodes_leave_and_join_again() {
    let budget = Budget { joins: 2, leaves: 2, casts: 1, timeouts: 1, ..NOTHING };
    let cluster = Cluster::new(2, 2, &[&[1, 0]], budget);
    holds("two nodes, leaves and timeouts", cluster.sees(&[JoinFailed, LateClaim, Retraction, NotHeld]));
}

#[test]
fn two_nodes_talk_where_nobody_listens() {
    let budget = Budget { joins: 1, leaves: 1, casts: 1, idle_casts: 1, ..NOTHING };
    let cluster = Cluster::new(2, 2, &[&[1, 0], &[0, 1]], budget);
    holds("two nodes, groups that nobody else holds", cluster.sees(&[CastToNobody, CastToOwn, Targeted]));
}

#[test]
fn three_nodes_lose_a_link() {
    let cluster = Cluster::new(3, 3, &[&[0, 1, 2]], Budget { connects: 0, ..A_CUT });
    holds("three nodes, a cut", cluster.sees(&[JoinAnswered, OneEndFirst, Flood, Targeted]));
}

#[test]
fn three_nodes_one_arrives() {
    let cluster = Cluster::new(3, 2, &[&[2, 0, 1]], Budget { cuts: 0, connects: 2, ..A_CUT });
    holds_large("three nodes, one arrives", cluster.sees(&[JoinAnswered, Snapshot, Flood, Targeted, Rested]));
}

#[test]
fn three_nodes_one_drains() {
    let budget = Budget { joins: 1, casts: 1, drains: 1, ..NOTHING };
    let cluster = Cluster::new(3, 3, &[&[0, 1, 2]], budget);
    holds_large("three nodes, one drains", cluster.sees(&[Drain, Delta, Flood, Targeted, Rested]));
}

#[test]
fn three_nodes_the_router_falls_silent() {
    let budget = Budget { joins: 1, casts: 1, suspects: 1, ..NOTHING };
    let cluster = Cluster { prompt: false, ..Cluster::new(3, 3, &[&[0, 1, 2]], budget) };
    holds("three nodes, a suspect", cluster.sees(&[Flood, Targeted, FailedNamed]));
}

#[test]
fn two_nodes_and_a_restart_under_the_same_name() {
    let budget = Budget { crashes: 2, restarts: 1, connects: 1, joins: 1, casts: 1, ..NOTHING };
    let cluster = Cluster::new(2, 2, &[&[1, 0]], budget);
    holds("two nodes, a restart", cluster.sees(&[Crash, Restart, Snapshot, Flood]));
}

#[test]
fn two_nodes_with_gathers_cut_short() {
    let cluster = Cluster { slow: true, ..Cluster::new(2, 2, &[&[1, 0]], Budget { connects: 2, ..A_CUT }) };
    holds("two nodes, gathers as steps", cluster.sees(&[CutGather, Snapshot]));
}

#[test]
fn three_nodes_and_two_groups_lose_a_link() {
    let cluster = Cluster::new(3, 3, &[&[0, 1, 2], &[1, 2, 0]], Budget { connects: 0, ..A_CUT });
    holds(
        "three nodes, two groups, a cut",
        cluster.sees(&[JoinAnswered, OneEndFirst, Delta, Flood, Targeted]),
    );
}

#[test]
fn a_claim_that_times_out_lands_later() {
    let budget = Budget { joins: 2, leaves: 1, casts: 1, timeouts: 2, ..NOTHING };
    let cluster = Cluster::new(2, 2, &[&[1, 0]], budget);
    holds("two nodes, claims that land late", cluster.sees(&[JoinFailed, LateClaim, Retraction]));
}

#[test]
fn three_nodes_and_a_round_that_is_cancelled() {
    let budget = Budget { cuts: 1, connects: 1, ..NOTHING };
    let cluster = Cluster::new(3, 2, &[&[2, 0, 1]], budget);
    holds_large("three nodes, one comes and goes", cluster.sees(&[CancelledRound, OneEndFirst]));
}

#[test]
fn four_nodes_and_a_router_that_falls_silent() {
    let budget = Budget { joins: 1, casts: 1, suspects: 1, ..NOTHING };
    let cluster = Cluster::new(4, 4, &[&[3, 2, 1, 0]], budget);
    holds("four nodes, a suspect", cluster.sees(&[JoinAnswered, Flood, Targeted, Rested]));
}

#[test]
fn four_nodes_and_two_groups_talk() {
    let budget = Budget { joins: 2, leaves: 1, casts: 1, ..NOTHING };
    let cluster = Cluster::new(4, 4, &[&[0, 1, 2, 3], &[3, 2, 1, 0]], budget);
    holds_large("four nodes, two groups", cluster.sees(&[JoinAnswered, Targeted, Retraction]));
}

#[test]
fn four_nodes_and_a_router_that_dies() {
    let budget = Budget { crashes: 1, joins: 1, casts: 1, ..NOTHING };
    // the router dies, the next one in the ring looks on
    let roles = Some([0, 1, 3]);
    let cluster = Cluster { eager: true, roles, ..Cluster::new(4, 4, &[&[3, 2, 1, 0]], budget) };
    holds_large(
        "four nodes, the router dies",
        cluster.sees(&[Crash, JoinAnswered, Delta, Flood, Targeted, Rested]),
    );
}

#[test]
fn three_nodes_talk_while_members_come_and_go() {
    let budget = Budget { joins: 2, leaves: 1, casts: 2, ..NOTHING };
    let cluster = Cluster::new(3, 3, &[&[0, 1, 2], &[1, 2, 0]], budget);
    holds_large(
        "three nodes, members come and go",
        cluster.sees(&[JoinAnswered, Targeted, Retraction, Rested]),
    );
}

/// The model can fail: it finds rules that are broken on purpose, in the runs that break them.
#[test]
fn broken_rules_are_found() {
    let cut = Budget { connects: 0, ..A_CUT };
    let silence = Budget { joins: 1, casts: 1, suspects: 1, ..NOTHING };
    let come_and_go = Budget { joins: 2, leaves: 2, casts: 1, ..NOTHING };
    let meet = Budget { connects: 1, joins: 1, leaves: 1, ..NOTHING };
    let broken = [
        (Mutation::NoPrepareShrink, 3, 3, cut),
        (Mutation::UnreadySenderTrusted, 3, 3, cut),
        (Mutation::NoFloodOnDeadRouter, 3, 3, silence),
        (Mutation::AnnounceOwed, 2, 2, A_CUT),
        (Mutation::AnswerBeforeAck, 2, 2, come_and_go),
        (Mutation::NotHeldWhileHeld, 2, 2, come_and_go),
        // a snapshot on its lane is overtaken by the retraction on another one
        (Mutation::DeleteInsteadOfTombstone, 2, 0, meet),
        (Mutation::ClaimAlwaysWins, 2, 0, meet),
    ];
    for (mutation, nodes, start, budget) in broken {
        let orders: &[&[usize]] = if nodes == 3 { &[&[0, 1, 2]] } else { &[&[1, 0]] };
        let cluster = Cluster { mutation: Some(mutation), ..Cluster::new(nodes, start, orders, budget) };
        let limit = Some(Duration::from_secs(20));
        match check(&format!("{mutation:?}"), cluster, limit) {
            Ok(states) => panic!("{mutation:?} survived {states} states"),
            Err(run) => println!("{run}"),
        }
    }
}

/// So can the looks at a quiet cluster's tables.
#[test]
fn a_missing_row_a_row_too_many_and_a_lost_member_are_found() {
    let cluster = Cluster::new(2, 2, &[&[1, 0]], NOTHING);
    let [whole] = cluster.init_states().try_into().unwrap();
    assert_eq!(cluster.check_quiet(&whole), Ok(()));

    let mut lost = whole.clone();
    lost.hosts[0].joined.insert(0);
    assert!(cluster.check_tables(&lost, true).unwrap_err().contains("forgotten"));
    assert!(cluster.check_rest(&lost).unwrap_err().contains("after all time"));

    let mut phantom = whole;
    let source = cluster.peer(&phantom, 0);
    let version = phantom.hosts[0].node.as_ref().unwrap().announced() + 1;
    let claims = Message::Claims { call: 1, claims: vec![(cluster.groups[0].clone(), version)] };
    cluster.at(&mut phantom, 1, |node, out, now| node.handle_message(&source, claims, out, now));
    cluster.run(&mut phantom, |_| true);
    assert!(cluster.check_quiet(&phantom).unwrap_err().contains("b#1 believes that a#1 holds"));
    assert!(cluster.check_tables(&phantom, false).unwrap_err().contains("b#1 believes that a#1 holds"));
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
            Cluster::new(
                3,
                3,
                &[&[2, 1, 0]],
                Budget { cuts: 0, crashes: 1, restarts: 1, connects: 2, ..A_CUT },
            ),
        ),
        ("four nodes, a cut", Cluster::new(4, 4, &[&[3, 2, 1, 0]], Budget { connects: 0, ..A_CUT })),
        (
            "four nodes, one dies",
            Cluster::new(4, 4, &[&[3, 2, 1, 0]], Budget { crashes: 1, joins: 1, casts: 1, ..NOTHING }),
        ),
        (
            "four nodes, two groups and their members",
            Cluster::new(
                4,
                4,
                &[&[0, 1, 2, 3], &[3, 2, 1, 0]],
                Budget { joins: 2, leaves: 1, casts: 1, idle_casts: 1, ..NOTHING },
            ),
        ),
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
