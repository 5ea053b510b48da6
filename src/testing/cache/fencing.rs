//! A schedule by hand for the rule whose breaking no run at random shows: an owner that has promised a later epoch confirms
//! nothing of an older one. Only an old primary that lives on, on the other side of a link that broke, asks for it; and the
//! merge after a split takes its writes in or reports them.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use crate::cache::node::{CacheEffect, CacheMessage, CacheNode, Shard};
use crate::cache::replica::Rules;
use crate::cache::{CacheConfig, Operation, Options, PartitionId, Record, Term, WriteMode, WriteOp};
use crate::testing::oracle::Violation;
use crate::transport::Lane;
use crate::types::{Incarnation, NodeId, Peer};

/// Three nodes; what they send waits until it is carried.
struct Trio {
    config: Arc<CacheConfig>,
    nodes: BTreeMap<Peer, CacheNode>,
    queues: BTreeMap<(Peer, Peer, Lane), VecDeque<CacheMessage>>,
    cut: BTreeSet<(Peer, Peer)>,
    confirmed: BTreeSet<u64>,
    now: Duration,
}

fn amiss(what: impl Into<String>) -> Violation {
    Violation::new("schedule", what)
}

impl Trio {
    fn new(rules: Rules) -> Result<Self, Violation> {
        let config = CacheConfig::new("fencing").partitions(1).replicas(3).write_mode(WriteMode::Sync);
        let config = Arc::new(config);
        let mut peers = BTreeSet::new();
        for name in ["a", "b", "c"] {
            let node = NodeId::new(name).map_err(|error| amiss(error.to_string()))?;
            peers.insert(Peer::new(node, Incarnation::MIN));
        }
        let now = Duration::from_secs(1);
        let node = |(peer, seed): (&Peer, u64)| {
            let node = CacheNode::new(peer.clone(), config.clone(), Shard::ALL, seed, now).with_rules(rules);
            (peer.clone(), node)
        };
        let nodes = peers.iter().zip(1..).map(node).collect();
        let (queues, cut, confirmed) = (BTreeMap::new(), BTreeSet::new(), BTreeSet::new());
        let mut trio = Self { config, nodes, queues, cut, confirmed, now };
        for me in &peers {
            let others: Vec<_> = peers.iter().filter(|peer| *peer != me).collect();
            trio.with(me, |node, now| others.iter().for_each(|peer| node.handle_peer_up(peer, now)));
        }
        let all: Vec<_> = peers.iter().collect();
        peers.iter().for_each(|me| trio.see(me, &all));
        trio.settle()?;
        Ok(trio)
    }

    fn with(&mut self, me: &Peer, act: impl FnOnce(&mut CacheNode, Duration)) {
        let Some(node) = self.nodes.get_mut(me) else { return };
        act(node, self.now);
        while let Some(effect) = node.poll_effect() {
            match effect {
                CacheEffect::Send { to, lane, message } => {
                    if !self.cut.contains(&(me.clone(), to.clone())) {
                        self.queues.entry((me.clone(), to, lane)).or_default().push_back(message);
                    }
                }
                CacheEffect::Done { ticket, result } => {
                    if result.is_ok() {
                        self.confirmed.insert(ticket);
                    }
                }
                CacheEffect::Event(_) | CacheEffect::Changed => {}
            }
        }
    }

    fn see(&mut self, me: &Peer, view: &[&Peer]) {
        let view: Vec<Peer> = view.iter().copied().cloned().collect();
        self.with(me, |node, now| node.handle_view(&view, true, now));
    }

    fn cut(&mut self, a: &Peer, b: &Peer) {
        for (me, other) in [(a, b), (b, a)] {
            self.cut.insert((me.clone(), other.clone()));
            self.queues.retain(|(from, to, _), _| (from, to) != (me, other));
            self.with(me, |node, now| node.handle_peer_down(other, now));
        }
    }

    /// All that is on its way from one node to another, and nothing that this leads to.
    fn carry(&mut self, from: &Peer, to: &Peer) {
        let queues = self.queues.iter_mut().filter(|((a, b, _), _)| (a, b) == (from, to));
        let messages: Vec<CacheMessage> = queues.flat_map(|(_, queue)| queue.drain(..)).collect();
        for message in messages {
            self.with(to, |node, now| node.handle_message(from, message, now));
        }
    }

    /// Everything is carried, and time goes by, until the partition has its three owners and nothing is under way.
    fn settle(&mut self) -> Result<(), Violation> {
        for _ in 0..10_000 {
            let busy = self.queues.iter().find(|(_, queue)| !queue.is_empty()).map(|(key, _)| key.clone());
            if let Some((from, to, _)) = busy {
                self.carry(&from, &to);
                continue;
            }
            if self.nodes.values().all(|node| node.readiness().is_ready()) {
                return Ok(());
            }
            let next =
                self.nodes.iter().filter_map(|(me, node)| Some((node.poll_timeout()?, me.clone()))).min();
            let Some((at, me)) = next else { break };
            self.now = self.now.max(at);
            self.with(&me, CacheNode::handle_timeout);
        }
        Err(amiss("three nodes without faults do not come to rest"))
    }
}

/// The old primary and the next one do not see each other, and the third owner sees both. It promises the next one its
/// epoch, and says how far its copy is; then the old primary sends it a write.
///
/// # Errors
/// The write is confirmed: the next primary goes on by an answer that does not tell of it.
pub fn written_behind_a_promise(rules: Rules) -> Result<(), Violation> {
    let (mut trio, partition) = (Trio::new(rules)?, PartitionId::new(0));
    let owners = trio.nodes.values().next().map(|node| node.status(partition).owners).unwrap_or_default();
    let [old, next, third] = &owners[..] else { return Err(amiss(format!("not three owners: {owners:?}"))) };
    trio.cut(old, next);
    trio.see(next, &[next, third]);
    trio.carry(next, third);
    let write = WriteOp::Put(vec![Record::new(vec![Term::from(1), Term::from("late")])]);
    let options = Options::of(&trio.config, trio.now);
    trio.with(old, |node, now| node.operate(1, partition, Operation::Write(write), options, now));
    trio.carry(old, third);
    trio.carry(third, old);
    if trio.confirmed.contains(&1) {
        let what = format!("{third} has confirmed a write of {old} behind its promise to {next}");
        return Err(Violation::new("fencing", what));
    }
    // it goes on by what the third has told it, which was before the write
    for _ in 0..4 {
        trio.carry(third, next);
        trio.carry(next, third);
    }
    let status = trio.nodes.get(next).map(|node| node.status(partition));
    match status.is_some_and(|status| status.serving && status.records == 0) {
        true => Ok(()),
        false => Err(amiss("the next primary does not serve without the write")),
    }
}
