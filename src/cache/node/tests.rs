//! Several nodes, a pump between them that carries bytes, lanes that overtake one another, and links that break.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::*;
use crate::cache::config::Table;
use crate::cache::error::Applied;
use crate::cache::operation::{Outcome, WriteOp};
use crate::cache::term::{Record, Term};
use crate::record;
use crate::types::Incarnation;

mod calls;
mod clocks;
mod corpus;
mod membership;
mod replication;

pub(super) const SECOND: Duration = Duration::from_secs(1);

pub(super) fn peer(name: &str) -> Peer {
    Peer::new(NodeId::new(name).unwrap(), Incarnation::MIN)
}

pub(super) fn config() -> CacheConfig {
    CacheConfig::new("c").partitions(8)
}

type Answer = Result<Reply, CacheError>;
type Held = Box<dyn Fn(&Peer, &Peer, &CacheMessage) -> bool>;

/// Nodes and what is under way between them. Time goes on only in [`Net::run_for`].
pub(super) struct Net {
    pub(super) now: Duration,
    nodes: BTreeMap<Peer, CacheNode>,
    /// Nodes that live and have no cache open.
    bare: BTreeSet<Peer>,
    view: Vec<Peer>,
    links: BTreeSet<(Peer, Peer)>,
    wires: BTreeMap<(Peer, Peer, usize), VecDeque<Vec<u8>>>,
    done: BTreeMap<u64, Vec<Answer>>,
    pub(super) events: Vec<(Peer, CacheEvent)>,
    /// What was delivered, by kind.
    pub(super) delivered: Vec<(Peer, Peer, String)>,
    /// What is not delivered for now.
    pub(super) hold: Option<Held>,
    /// What gets lost on its way, though its link stays.
    pub(super) lose: Option<Held>,
    /// How far the clocks of nodes are ahead of [`Net::now`].
    ahead: BTreeMap<Peer, Duration>,
    /// All that is delivered, if it is gathered.
    pub(super) heard: Option<Vec<(Peer, Peer, CacheMessage)>>,
    last_ticket: u64,
    seed: u64,
    step: u64,
    /// All that a hears, if it is gathered.
    to_a: Option<Vec<(Peer, Vec<u8>, String)>>,
}

impl Net {
    pub(super) fn new(seed: u64) -> Self {
        Self {
            now: SECOND,
            nodes: BTreeMap::new(),
            bare: BTreeSet::new(),
            view: Vec::new(),
            links: BTreeSet::new(),
            wires: BTreeMap::new(),
            done: BTreeMap::new(),
            events: Vec::new(),
            delivered: Vec::new(),
            hold: None,
            lose: None,
            ahead: BTreeMap::new(),
            heard: None,
            last_ticket: 0,
            seed,
            step: 0,
            to_a: None,
        }
    }

    /// These nodes, open, linked, in one view, and quiet.
    pub(super) fn of(seed: u64, names: &[&str], config: &CacheConfig) -> Self {
        let mut net = Self::new(seed);
        names.iter().for_each(|name| net.open(name, config));
        net.see(names);
        net.run_for(SECOND * 5);
        net
    }

    pub(super) fn open(&mut self, name: &str, config: &CacheConfig) {
        let me = peer(name);
        config.validate().unwrap();
        let seed = self.seed;
        let now = self.clock(&me);
        let mut node = CacheNode::new(me.clone(), Arc::new(config.clone()), Shard::ALL, seed, now);
        self.bare.remove(&me);
        if self.view.contains(&me) {
            node.handle_view(&self.view, true, now);
        }
        for (a, b) in self.links.clone() {
            if a == me {
                node.handle_peer_up(&b, now);
            } else if b == me {
                node.handle_peer_up(&a, now);
            }
        }
        self.nodes.insert(me.clone(), node);
        self.follow(&me);
    }

    /// The clock of this node is ahead of the others'; before it is opened.
    pub(super) fn ahead(&mut self, name: &str, by: Duration) {
        self.ahead.insert(peer(name), by);
    }

    fn clock(&self, me: &Peer) -> Duration {
        self.now + self.ahead.get(me).copied().unwrap_or_default()
    }

    /// A node that lives and does not open the cache.
    pub(super) fn bare(&mut self, name: &str) {
        self.bare.insert(peer(name));
    }

    pub(super) fn close(&mut self, name: &str) {
        let me = peer(name);
        self.with(name, |node, now| node.close(now));
        self.nodes.remove(&me);
        self.bare.insert(me);
    }

    /// Links all of these and commits their view; what is gone from the view loses its links.
    pub(super) fn see(&mut self, names: &[&str]) {
        let view: Vec<Peer> = names.iter().map(|name| peer(name)).collect();
        let gone: Vec<(Peer, Peer)> = self
            .links
            .iter()
            .filter(|(a, b)| self.view.contains(a) && self.view.contains(b))
            .filter(|(a, b)| !view.contains(a) || !view.contains(b))
            .cloned()
            .collect();
        gone.iter().for_each(|(a, b)| self.cut(a.node.as_str(), b.node.as_str()));
        self.view = view.clone();
        for (index, a) in view.iter().enumerate() {
            view.iter().skip(index + 1).for_each(|b| self.link(a.node.as_str(), b.node.as_str()));
        }
        self.commit(names);
    }

    /// These commit a view of themselves; links stay as they are.
    pub(super) fn commit(&mut self, names: &[&str]) {
        self.view = names.iter().map(|name| peer(name)).collect();
        for peer in self.view.clone() {
            let view = self.view.clone();
            if self.nodes.contains_key(&peer) {
                self.with(peer.node.as_str(), |node, now| node.handle_view(&view, true, now));
            }
        }
    }

    pub(super) fn link(&mut self, a: &str, b: &str) {
        let pair = ordered(peer(a), peer(b));
        if a == b || !self.links.insert(pair) {
            return;
        }
        for (me, other) in [(a, b), (b, a)] {
            if self.nodes.contains_key(&peer(me)) {
                self.with(me, |node, now| node.handle_peer_up(&peer(other), now));
            }
        }
    }

    pub(super) fn cut(&mut self, a: &str, b: &str) {
        if !self.links.remove(&ordered(peer(a), peer(b))) {
            return;
        }
        let (pa, pb) = (peer(a), peer(b));
        self.wires.retain(|(from, to, _), _| !((*from == pa && *to == pb) || (*from == pb && *to == pa)));
        for (me, other) in [(a, b), (b, a)] {
            if self.nodes.contains_key(&peer(me)) {
                self.with(me, |node, now| node.handle_peer_down(&peer(other), now));
            }
        }
    }

    /// The node is no more; the others commit a view without it.
    pub(super) fn kill(&mut self, name: &str) {
        let dead = peer(name);
        self.nodes.remove(&dead);
        self.bare.remove(&dead);
        let others: Vec<Peer> = self.view.iter().filter(|other| **other != dead).cloned().collect();
        others.iter().for_each(|other| self.cut(name, other.node.as_str()));
        let names: Vec<&str> = others.iter().map(|peer| peer.node.as_str()).collect();
        self.commit(&names);
    }

    pub(super) fn node(&self, name: &str) -> &CacheNode {
        &self.nodes[&peer(name)]
    }

    pub(super) fn names(&self) -> Vec<String> {
        self.nodes.keys().map(|peer| peer.node.to_string()).collect()
    }

    pub(super) fn with<R>(&mut self, name: &str, f: impl FnOnce(&mut CacheNode, Duration) -> R) -> R {
        let me = peer(name);
        let now = self.clock(&me);
        let result = f(self.nodes.get_mut(&me).unwrap(), now);
        self.follow(&me);
        result
    }

    fn follow(&mut self, me: &Peer) {
        let node = self.nodes.get_mut(me).unwrap();
        while let Some(effect) = node.poll_effect() {
            match effect {
                CacheEffect::Send { to, lane, message } => {
                    if self.links.contains(&ordered(me.clone(), to.clone())) {
                        let mut bytes = Vec::new();
                        codec::encode(&message, &mut bytes).unwrap();
                        let wire = (me.clone(), to, lane.index());
                        self.wires.entry(wire).or_default().push_back(bytes);
                    }
                }
                CacheEffect::Done { ticket, result } => self.done.entry(ticket).or_default().push(result),
                CacheEffect::Event(event) => self.events.push((me.clone(), event)),
                CacheEffect::Changed => {}
            }
        }
    }

    /// Carries everything there is, in an order that the seed draws; time stands still.
    pub(super) fn run(&mut self) {
        for _ in 0..200_000 {
            let ready: Vec<_> = self.wires.keys().filter(|wire| self.may_carry(wire)).cloned().collect();
            if ready.is_empty() {
                return;
            }
            self.step += 1;
            let draw = xxh3_64_with_seed(&self.step.to_le_bytes(), self.seed) as usize;
            self.carry(&ready[draw % ready.len()]);
        }
        panic!("it does not come to rest");
    }

    fn may_carry(&self, wire: &(Peer, Peer, usize)) -> bool {
        let Some(bytes) = self.wires[wire].front() else { return false };
        let Some(hold) = &self.hold else { return true };
        codec::decode(bytes).unwrap().iter().all(|message| !hold(&wire.0, &wire.1, message))
    }

    fn carry(&mut self, wire: &(Peer, Peer, usize)) {
        let queue = self.wires.get_mut(wire).unwrap();
        let bytes = queue.pop_front().unwrap();
        if queue.is_empty() {
            self.wires.remove(wire);
        }
        let (from, to, _) = wire;
        for message in codec::decode(&bytes).unwrap() {
            if self.lose.as_ref().is_some_and(|lose| lose(from, to, &message)) {
                continue;
            }
            if let Some(heard) = &mut self.heard {
                heard.push((from.clone(), to.clone(), message.clone()));
            }
            let kind = format!("{message:?}");
            if let (Some(heard), "a") = (&mut self.to_a, to.node.as_str()) {
                let kind = match &message {
                    CacheMessage::Replica { message, .. } => format!("{message:?}"),
                    #[cfg(feature = "consensus")]
                    CacheMessage::Strong { message, .. } => strong_kind(message),
                    other => format!("{other:?}"),
                };
                let kind = kind.split([' ', '(', '{']).next().unwrap().to_lowercase();
                heard.push((from.clone(), bytes.clone(), kind));
            }
            let kind = kind.split([' ', '(']).next().unwrap().to_string();
            self.delivered.push((from.clone(), to.clone(), kind));
            if self.nodes.contains_key(to) {
                self.with(to.node.as_str(), |node, now| node.handle_message(from, message, now));
            } else if self.bare.contains(to) && matches!(message, CacheMessage::Hello { .. }) {
                let mut bytes = Vec::new();
                codec::encode(&CacheMessage::NotOpen, &mut bytes).unwrap();
                self.wires.entry((to.clone(), from.clone(), 0)).or_default().push_back(bytes);
            }
        }
    }

    /// Lets time pass, alarm by alarm.
    pub(super) fn run_for(&mut self, time: Duration) {
        let end = self.now + time;
        self.run();
        for _ in 0..200_000 {
            let due = |(me, node): (&Peer, &CacheNode)| {
                Some(node.poll_timeout()?.saturating_sub(self.ahead.get(me).copied().unwrap_or_default()))
            };
            let next = self.nodes.iter().filter_map(due).min();
            match next {
                Some(next) if next <= end => self.now = self.now.max(next),
                _ => {
                    self.now = end;
                    return;
                }
            }
            for me in self.nodes.keys().cloned().collect::<Vec<_>>() {
                if self.nodes[&me].poll_timeout().is_some_and(|at| at <= self.clock(&me)) {
                    self.with(me.node.as_str(), |node, now| node.handle_timeout(now));
                }
            }
            self.run();
        }
        panic!("it asks for time again and again at {:?}", self.now);
    }

    /// Begins an operation; its answer is found under the ticket.
    pub(super) fn begin(
        &mut self,
        name: &str,
        partition: PartitionId,
        operation: Operation,
        change: impl FnOnce(&mut Options),
    ) -> u64 {
        self.last_ticket += 1;
        let ticket = self.last_ticket;
        let mut options = Options::of(self.node(name).config(), self.clock(&peer(name)));
        change(&mut options);
        self.with(name, |node, now| node.operate(ticket, partition, operation, options, now));
        ticket
    }

    /// How it ended, if it has. More than one end is a failure.
    pub(super) fn answer(&self, ticket: u64) -> Option<Answer> {
        let answers = self.done.get(&ticket)?;
        assert_eq!(answers.len(), 1, "one end: {answers:?}");
        answers.first().cloned()
    }

    /// The whole operation, within its time.
    pub(super) fn operate(
        &mut self,
        name: &str,
        partition: PartitionId,
        operation: Operation,
        change: impl FnOnce(&mut Options),
    ) -> Answer {
        let ticket = self.begin(name, partition, operation, change);
        self.run();
        for _ in 0..700 {
            if let Some(answer) = self.answer(ticket) {
                return answer;
            }
            self.run_for(SECOND / 10);
        }
        panic!("operation {ticket} of {name} has no end");
    }

    pub(super) fn put(&mut self, name: &str, key: &str, value: i64) -> Answer {
        let (partition, put) = put_of(self.node(name).config(), key, value);
        self.operate(name, partition, put, |_| {})
    }

    pub(super) fn get(&mut self, name: &str, key: &str) -> Option<i64> {
        let partition = self.node(name).config().partition_of(&key.into());
        let answer = self.operate(name, partition, get_of(key), |_| {});
        value(answer.unwrap_or_else(|error| panic!("get of {key} on {name}: {error}")))
    }

    /// Who serves this partition.
    pub(super) fn primary(&self, partition: PartitionId) -> Option<String> {
        let serving: Vec<_> = self
            .nodes
            .iter()
            .filter(|(_, node)| node.status(partition).serving)
            .map(|(peer, _)| peer)
            .collect();
        assert!(serving.len() < 2, "{serving:?} all serve {partition}");
        serving.first().map(|peer| peer.node.to_string())
    }

    pub(super) fn delivered(&self, kind: &str) -> usize {
        self.delivered.iter().filter(|(_, _, other)| other == kind).count()
    }
}

#[cfg(feature = "consensus")]
fn strong_kind(message: &super::strong::StrongMessage) -> String {
    use super::strong::StrongMessage;
    match message {
        StrongMessage::Consensus(message) => match format!("{message:?}").split_once("kind: ") {
            Some((_, kind)) => format!("raft{}", kind.split(',').next().unwrap()),
            None => format!("{message:?}"),
        },
        StrongMessage::Copy { message, .. } => format!("copy{message:?}"),
        message => format!("{message:?}"),
    }
}

fn ordered(a: Peer, b: Peer) -> (Peer, Peer) {
    if a < b { (a, b) } else { (b, a) }
}

pub(super) fn put_of(config: &CacheConfig, key: &str, value: i64) -> (PartitionId, Operation) {
    let record = record![key, value];
    (config.partition_of(&key.into()), Operation::Write(WriteOp::Put(vec![record])))
}

pub(super) fn get_of(key: &str) -> Operation {
    Operation::Read(ReadOp::Get(key.into()))
}

pub(super) fn delete_of(key: &str) -> Operation {
    Operation::Write(WriteOp::DeleteKeys(vec![key.into()]))
}

pub(super) fn value(reply: Reply) -> Option<i64> {
    let Outcome::Records(records) = reply.outcome else { panic!("{reply:?}") };
    assert!(records.len() < 2, "{records:?}");
    records.first().and_then(|record| record.get(1)).and_then(Term::as_int)
}

pub(super) fn records(answer: Answer) -> Vec<Record> {
    match answer.unwrap().outcome {
        Outcome::Records(records) => records,
        other => panic!("{other:?}"),
    }
}

/// A key of this partition.
pub(super) fn key_of(config: &CacheConfig, partition: PartitionId) -> String {
    (0..).map(|n| format!("k{n}")).find(|key| config.partition_of(&key.as_str().into()) == partition).unwrap()
}

/// A key that this node serves.
pub(super) fn key_at(net: &Net, name: &str) -> String {
    let config = net.node(name).config().clone();
    let partition = PartitionId::all(config.partitions)
        .find(|partition| net.primary(*partition).as_deref() == Some(name))
        .unwrap_or_else(|| panic!("{name} serves nothing"));
    key_of(&config, partition)
}

/// Each order in which things may arrive is another one with another seed.
pub(super) fn each_seed(test: impl Fn(u64)) {
    (1..=4).for_each(test);
}
