//! A small network of replicas of one partition: links that deliver in order, nodes that crash, split and come back.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::*;
use crate::cache::operation::Reply;
use crate::cache::store::Loser;
use crate::cache::term::{Record, Term};
use crate::record;
use crate::types::{Incarnation, NodeId};

mod deletes;
mod expected;
mod fencing;
mod late;
mod loss;
mod numbers;

/// The same numbers for the same seed.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((mixed ^ (mixed >> 31)) % sides.max(1) as u64) as usize
    }
}

struct Node {
    replica: Replica,
    members: Members,
    wanted: Vec<Peer>,
    served: Option<Epoch>,
}

/// What a node is told of the view, some time later.
#[derive(Clone)]
struct Told {
    live: BTreeSet<Peer>,
    wanted: Vec<Peer>,
    complete: bool,
}

struct Net {
    config: CacheConfig,
    rules: Rules,
    dice: Dice,
    now: Duration,
    nodes: BTreeMap<Peer, Node>,
    links: BTreeSet<(Peer, Peer)>,
    queues: BTreeMap<(Peer, Peer, Lane), VecDeque<ReplicaMessage>>,
    views: BTreeMap<Peer, VecDeque<Told>>,
    draining: BTreeSet<Peer>,
    /// What was asked: the key, and whether it was put or deleted.
    asked: BTreeMap<u64, (i64, bool)>,
    answers: BTreeMap<u64, Result<Reply, CacheError>>,
    budget: Budget,
    losers: Vec<Loser>,
    discarded: usize,
    stalled: usize,
    /// Who served in which epoch.
    primaries: BTreeMap<Epoch, Peer>,
    tickets: u64,
}

fn peer(name: &str, life: u64) -> Peer {
    Peer::new(NodeId::new(name).unwrap(), Incarnation::new(life).unwrap())
}

impl Net {
    fn new(seed: u64, names: &[&str], config: CacheConfig) -> Self {
        let mut net = Self {
            config,
            rules: Rules::all(),
            dice: Dice(seed),
            now: Duration::ZERO,
            nodes: BTreeMap::new(),
            links: BTreeSet::new(),
            queues: BTreeMap::new(),
            views: BTreeMap::new(),
            draining: BTreeSet::new(),
            asked: BTreeMap::new(),
            answers: BTreeMap::new(),
            budget: Budget::default(),
            losers: Vec::new(),
            discarded: 0,
            stalled: 0,
            primaries: BTreeMap::new(),
            tickets: 0,
        };
        names.iter().for_each(|name| net.start(peer(name, 1)));
        net.heal();
        net
    }

    fn start(&mut self, me: Peer) {
        let members = Members { live: BTreeSet::from([me.clone()]), ..Members::default() };
        let (config, now, rules, budget) = (&self.config, self.now, self.rules, &self.budget);
        let ctx = Context { me: &me, config, now, members: &members, rules, budget };
        let replica = Replica::new(PartitionId::new(7), ctx);
        let node = Node { replica, members, wanted: Vec::new(), served: None };
        self.nodes.insert(me, node);
    }

    fn peers(&self) -> Vec<Peer> {
        self.nodes.keys().cloned().collect()
    }

    fn with<T>(&mut self, me: &Peer, act: impl FnOnce(&mut Replica, Context<'_>) -> T) -> Option<T> {
        let node = self.nodes.get_mut(me)?;
        let (config, now, rules, budget) = (&self.config, self.now, self.rules, &self.budget);
        let ctx = Context { me, config, now, members: &node.members, rules, budget };
        let result = act(&mut node.replica, ctx);
        self.collect(me);
        Some(result)
    }

    fn collect(&mut self, me: &Peer) {
        let Some(node) = self.nodes.get_mut(me) else { return };
        if self.rules == Rules::all() {
            node.replica.check_invariants().unwrap_or_else(|what| panic!("{me}: {what}"));
        }
        let mut effects = Vec::new();
        while let Some(effect) = node.replica.poll_effect() {
            effects.push(effect);
        }
        let serving = node.replica.serving().cloned();
        if let Some(epoch) = serving.clone().filter(|_| serving != node.served) {
            let before = self.primaries.insert(epoch.clone(), me.clone());
            assert!(before.is_none_or(|before| before == *me), "two primaries in {epoch}");
            assert_eq!(epoch.primary, *me);
        }
        node.served = serving;
        for effect in effects {
            match effect {
                ReplicaEffect::Send { to, lane, message } => {
                    let bytes = postcard::to_stdvec(&message).unwrap();
                    let message = postcard::from_bytes(&bytes).unwrap();
                    if self.links.contains(&(me.clone(), to.clone())) {
                        self.queues.entry((me.clone(), to, lane)).or_default().push_back(message);
                    }
                }
                ReplicaEffect::Written { ticket, result } => {
                    assert!(self.answers.insert(ticket, result).is_none(), "answered twice");
                }
                ReplicaEffect::Event(CacheEvent::Conflict { loser, .. }) => self.losers.push(loser),
                ReplicaEffect::Event(CacheEvent::Discarded { .. }) => self.discarded += 1,
                ReplicaEffect::Event(CacheEvent::Stalled { .. }) => self.stalled += 1,
                ReplicaEffect::Event(_) | ReplicaEffect::Changed => {}
            }
        }
    }

    fn wanted(&self, live: &BTreeSet<Peer>) -> Vec<Peer> {
        let mut ring: Vec<Peer> =
            live.iter().filter(|peer| !self.draining.contains(*peer)).cloned().collect();
        ring.sort_by_key(|peer| crate::key_hash(peer.node.as_bytes()));
        ring.truncate(self.config.replicas);
        ring
    }

    /// These nodes see each other, and nobody else.
    fn group(&mut self, peers: &[Peer]) {
        let live: BTreeSet<Peer> = peers.iter().cloned().collect();
        let wanted = self.wanted(&live);
        for a in peers {
            for b in self.peers() {
                let up = live.contains(&b);
                self.link(a, &b, up);
            }
        }
        for me in peers {
            let told = |complete| Told { live: live.clone(), wanted: wanted.clone(), complete };
            self.views.insert(me.clone(), VecDeque::from([told(false), told(true)]));
        }
    }

    fn heal(&mut self) {
        self.group(&self.peers());
    }

    fn link(&mut self, a: &Peer, b: &Peer, up: bool) {
        if a == b || self.links.contains(&(a.clone(), b.clone())) == up {
            return;
        }
        self.queues.retain(|(from, to, _), _| !((from == a && to == b) || (from == b && to == a)));
        for link in [(a.clone(), b.clone()), (b.clone(), a.clone())] {
            if up {
                self.links.insert(link)
            } else {
                self.links.remove(&link)
            };
        }
        for (a, b) in [(a, b), (b, a)] {
            if let Some(node) = self.nodes.get_mut(a) {
                if up {
                    node.members.up.insert(b.clone())
                } else {
                    node.members.up.remove(b)
                };
                self.with(a, |replica, ctx| {
                    if up { replica.handle_peer_up(b, ctx) } else { replica.handle_peer_down(b, ctx) }
                });
            }
        }
    }

    fn crash(&mut self, me: &Peer) {
        self.nodes.remove(me);
        self.views.remove(me);
        self.draining.remove(me);
        for other in self.peers() {
            self.link(&other, me, false);
        }
        self.queues.retain(|(from, to, _), _| from != me && to != me);
        self.links.retain(|(from, to)| from != me && to != me);
    }

    fn restart(&mut self, me: &Peer) -> Peer {
        let next = Peer::new(me.node.clone(), me.incarnation.next());
        self.start(next.clone());
        next
    }

    /// Delivers one thing; whether there was any.
    fn step(&mut self) -> bool {
        let views: Vec<Peer> =
            self.views.iter().filter(|(_, told)| !told.is_empty()).map(|(p, _)| p.clone()).collect();
        let queues: Vec<_> =
            self.queues.iter().filter(|(_, queue)| !queue.is_empty()).map(|(k, _)| k.clone()).collect();
        let choices = views.len() + queues.len();
        if choices == 0 {
            return self.wait();
        }
        if self.dice.roll(200) == 0 {
            self.now += Duration::from_millis(1 + self.dice.roll(20) as u64);
        }
        let choice = self.dice.roll(choices);
        if let Some(me) = views.get(choice).cloned() {
            self.view(&me);
        } else if let Some(key) = queues.get(choice - views.len()).cloned() {
            let message = self.queues.get_mut(&key).unwrap().pop_front().unwrap();
            self.with(&key.1, |replica, ctx| replica.handle_message(&key.0, message, ctx));
        }
        true
    }

    fn view(&mut self, me: &Peer) {
        let first = self.views.get(me).and_then(VecDeque::front).unwrap();
        // settled only when all have the view
        let unsettled = |peer: &Peer| self.views.get(peer).is_some_and(|told| told.len() == 2);
        if first.complete && first.live.iter().any(unsettled) {
            return;
        }
        let told = self.views.get_mut(me).unwrap().pop_front().unwrap();
        let node = self.nodes.get_mut(me).unwrap();
        node.members.live = told.live;
        node.members.complete = told.complete;
        node.wanted = told.wanted.clone();
        self.with(me, |replica, ctx| replica.handle_members(&told.wanted, ctx));
    }

    /// Time goes by until somebody's timer.
    fn wait(&mut self) -> bool {
        let timers =
            self.nodes.iter().filter_map(|(me, node)| Some((node.replica.poll_timeout()?, me.clone())));
        let Some((at, me)) = timers.min() else { return false };
        self.now = self.now.max(at);
        self.with(&me, |replica, ctx| replica.handle_timeout(ctx));
        true
    }

    /// So many deliveries, and not much time: no delete is forgotten meanwhile.
    fn run(&mut self, steps: usize) {
        let until = self.now + Duration::from_secs(3);
        for _ in 0..steps {
            if self.now > until || !self.step() {
                break;
            }
        }
    }

    /// Until all owners are what they should be, and nothing is on its way.
    fn settle(&mut self) {
        for _ in 0..200_000 {
            let idle =
                self.queues.values().all(VecDeque::is_empty) && self.views.values().all(VecDeque::is_empty);
            if idle && self.is_settled() {
                return;
            }
            assert!(self.step(), "nothing happens any more:\n{}", self.dump());
        }
        panic!("it does not settle:\n{}", self.dump());
    }

    fn dump(&self) -> String {
        let mut text = format!("{:?}\n", self.now);
        for (me, node) in &self.nodes {
            let r = &node.replica;
            text.push_str(&format!(
                "{me}: {:?} serving {:?} end {:?} whole {} promised {:?} known {:?} wanted {:?} live {:?} complete {} role {:?} inquiry {:?}\n\n",
                r.state, r.serving(), r.end(), r.whole, r.promised, r.known, node.wanted, node.members.live,
                node.members.complete, r.role, r.inquiry
            ));
        }
        text
    }

    fn primary(&self) -> Option<Peer> {
        let mut serving: Vec<(&Epoch, &Peer)> =
            self.nodes.iter().filter_map(|(me, node)| Some((node.replica.serving()?, me))).collect();
        serving.sort();
        serving.last().map(|(_, me)| (*me).clone())
    }

    fn is_settled(&self) -> bool {
        let Some(primary) = self.primary() else { return false };
        let node = &self.nodes[&primary];
        let digest = node.replica.store().digest();
        node.replica.is_settled()
            && node.wanted.first() == Some(&primary)
            && self.nodes.iter().all(|(me, other)| {
                let owner = node.wanted.contains(me);
                let active = other.replica.is_active() && other.replica.store().digest() == digest;
                let absent = other.replica.state() == OwnerState::Absent && other.replica.store().is_empty();
                (me == &primary || other.replica.serving().is_none()) && if owner { active } else { absent }
            })
    }

    fn ask(&mut self, key: i64, put: bool, mode: WriteMode) -> Option<u64> {
        let serving: Vec<Peer> = self
            .nodes
            .iter()
            .filter(|(_, node)| node.replica.serving().is_some())
            .map(|(me, _)| me.clone())
            .collect();
        let at = serving.get(self.dice.roll(serving.len()))?.clone();
        self.ask_at(&at, key, put, mode).ok()
    }

    fn ask_at(&mut self, at: &Peer, key: i64, put: bool, mode: WriteMode) -> Result<u64, CacheError> {
        self.tickets += 1;
        let ticket = self.tickets;
        let op = if put {
            WriteOp::Put(vec![record![key, ticket as i64]])
        } else {
            WriteOp::DeleteKeys(vec![key.into()])
        };
        let deadline = self.now + Duration::from_secs(5);
        self.with(at, |replica, ctx| replica.write(ticket, &op, mode, deadline, ctx)).unwrap()?;
        self.asked.insert(ticket, (key, put));
        Ok(ticket)
    }

    fn confirmed(&self, ticket: u64) -> bool {
        matches!(self.answers.get(&ticket), Some(Ok(_)))
    }

    fn held(&self, key: i64) -> Option<Record> {
        let primary = self.primary().unwrap();
        self.nodes[&primary].replica.store().get(&Term::from(key)).next().map(|(record, _)| record.clone())
    }

    /// Nothing that was confirmed is lost: keys are put once, and deleted once at most.
    fn check(&self) {
        let asked_delete: BTreeSet<i64> =
            self.asked.values().filter(|(_, put)| !put).map(|(key, _)| *key).collect();
        for (ticket, (key, put)) in &self.asked {
            let lost = self.losers.iter().any(|loser| loser.key == Some(Term::from(*key)));
            if !self.confirmed(*ticket) || lost {
                continue;
            }
            let held = self.held(*key).is_some();
            if *put && !asked_delete.contains(key) {
                assert!(held, "key {key} was put and is lost\n{}", self.dump());
            }
            if !put {
                assert!(!held, "key {key} was deleted and is back\n{}", self.dump());
            }
        }
    }

    fn write_some(&mut self, keys: &mut i64, count: usize, mode: WriteMode) {
        for _ in 0..count {
            if *keys > 1 && self.dice.roll(4) == 0 {
                let key = 1 + self.dice.roll(*keys as usize) as i64;
                if !self.asked.values().any(|(of, put)| *of == key && !put) {
                    self.ask(key, false, mode);
                }
            } else if self.ask(*keys + 1, true, mode).is_some() {
                *keys += 1;
            }
            let steps = self.dice.roll(30);
            self.run(steps);
        }
    }
}

fn config(replicas: usize) -> CacheConfig {
    CacheConfig::new("test").replicas(replicas).chunk_bytes(1024)
}

const NAMES: [&str; 6] = ["a", "b", "c", "d", "e", "f"];

#[test]
fn a_partition_is_born_once_and_served_by_the_rings_first() {
    for seed in 0..20 {
        let mut net = Net::new(seed, &NAMES[..3], config(3));
        net.settle();
        assert_eq!(net.primaries.len(), 1);
        let ticket = net.ask(1, true, WriteMode::Sync).unwrap();
        net.settle();
        assert!(net.confirmed(ticket));
        net.check();
    }
}

#[test]
fn a_write_is_confirmed_by_a_majority_and_not_before() {
    let mut net = Net::new(1, &NAMES[..3], config(3));
    net.settle();
    let primary = net.primary().unwrap();
    let ticket = net.ask_at(&primary, 1, true, WriteMode::Sync).unwrap();
    assert_eq!(net.answers.get(&ticket), None, "nobody else has it yet");
    let at_once = net.ask_at(&primary, 2, true, WriteMode::Async).unwrap();
    assert!(net.confirmed(at_once));
    net.settle();
    assert!(net.confirmed(ticket));
}

fn crashes(seed: u64, replicas: usize, nodes: usize, rules: Rules) -> Net {
    let mut net = Net::new(seed, &NAMES[..nodes], config(replicas));
    net.rules = rules;
    net.settle();
    let mut keys = 0;
    for _ in 0..6 {
        net.write_some(&mut keys, 12, WriteMode::Sync);
        net.settle();
        net.check();
        let many = 1 + net.dice.roll((replicas / 2).max(1));
        let mut down = Vec::new();
        for _ in 0..many {
            net.write_some(&mut keys, 3, WriteMode::Sync);
            let peers = net.peers();
            let victim = peers[net.dice.roll(peers.len())].clone();
            net.crash(&victim);
            down.push(victim);
            net.heal();
            let steps = net.dice.roll(40);
            net.run(steps);
        }
        net.write_some(&mut keys, 6, WriteMode::Sync);
        if net.dice.roll(2) == 0 {
            net.settle();
            net.check();
        }
        down.iter().for_each(|victim| drop(net.restart(victim)));
        net.heal();
    }
    net.settle();
    net.check();
    net
}

#[test]
fn no_confirmed_write_is_lost_by_as_many_crashes_as_promised() {
    for seed in 0..60 {
        for (replicas, nodes) in [(2, 3), (3, 3), (3, 5), (4, 5), (5, 5)] {
            let net = crashes(seed * 31 + replicas as u64, replicas, nodes, Rules::all());
            assert_eq!(net.losers, [], "seed {seed}: without a split nothing loses");
        }
    }
}

#[test]
fn sides_of_a_split_come_together_and_keep_what_both_wrote() {
    for seed in 0..80 {
        for (replicas, nodes) in [(2, 2), (2, 4), (3, 5), (4, 4)] {
            let mut net = Net::new(seed, &NAMES[..nodes], config(replicas));
            net.settle();
            let mut keys = 0;
            for _ in 0..3 {
                net.write_some(&mut keys, 10, WriteMode::Sync);
                let (mut left, mut right) = (Vec::new(), Vec::new());
                for peer in net.peers() {
                    if net.dice.roll(2) == 0 { left.push(peer) } else { right.push(peer) }
                }
                net.group(&left);
                net.group(&right);
                let steps = net.dice.roll(600);
                net.run(steps);
                net.write_some(&mut keys, 10, WriteMode::Sync);
                net.heal();
                let steps = net.dice.roll(300);
                net.run(steps);
            }
            net.settle();
            net.check();
        }
    }
}

#[test]
fn joins_and_drains_move_the_partition_without_a_loss() {
    for seed in 0..60 {
        let mut net = Net::new(seed, &NAMES[..2], config(2));
        net.settle();
        let mut keys = 0;
        for name in &NAMES[2..] {
            net.write_some(&mut keys, 10, WriteMode::Sync);
            net.start(peer(name, 1));
            net.heal();
            net.write_some(&mut keys, 10, WriteMode::Sync);
        }
        net.settle();
        net.check();
        while net.nodes.len() - net.draining.len() > 2 {
            let stay: Vec<Peer> =
                net.peers().into_iter().filter(|peer| !net.draining.contains(peer)).collect();
            let goes = stay[net.dice.roll(stay.len())].clone();
            net.draining.insert(goes.clone());
            net.heal();
            net.write_some(&mut keys, 10, WriteMode::Sync);
            net.settle();
            net.check();
            assert_eq!(net.nodes[&goes].replica.state(), OwnerState::Absent);
            net.crash(&goes);
            net.heal();
        }
        net.settle();
        net.check();
        assert_eq!(net.losers, []);
    }
}

// caught by: a write that waits is confirmed by a majority of whoever is left
#[test]
fn cache_06_owners_that_go_do_not_make_a_write_need_fewer_copies() {
    let mut net = Net::new(1, &NAMES[..2], config(2).min_copies(2));
    net.settle();
    let primary = net.primary().unwrap();
    let other = net.peers().into_iter().find(|peer| *peer != primary).unwrap();
    let ticket = net.ask_at(&primary, 1, true, WriteMode::Sync).unwrap();
    net.crash(&other);
    net.heal();
    while !net.answers.contains_key(&ticket) {
        assert!(net.step(), "it is never answered:\n{}", net.dump());
    }
    assert_eq!(net.nodes[&primary].replica.config().unwrap().owners, [primary], "it goes on alone");
    let answer = &net.answers[&ticket];
    assert!(matches!(answer, Err(CacheError::NotEnoughAcks { got: 1, need: 2 })), "{answer:?}");
}
