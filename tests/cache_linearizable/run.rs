//! Clients of a cluster with faults: what they did becomes histories.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use muster_router::cache::replica::Rules;
use muster_router::cache::{
    Applied, CacheConfig, Operation, Outcome, ReadMode, ReadOp, Record, Term, WriteMode, WriteOp,
};

use super::cluster::{Cluster, Random};
use super::history::{Call, Op, Ret};

/// How many clients there are, and how many keys they use at a time.
const CLIENTS: u64 = 6;
const KEYS: u64 = 4;
/// A key is used for so many operations, and for fewer if so many of them are in doubt.
const LENGTH: usize = 18;
const DOUBTS: usize = 3;

/// Which faults a run has.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Faults {
    /// Crashes, cuts, standstills.
    All,
    /// One crash at a time, and the next one when all copies are whole again.
    Crashes,
}

#[derive(Debug)]
pub(crate) struct Run {
    pub(crate) nodes: usize,
    pub(crate) config: CacheConfig,
    pub(crate) faults: Faults,
    pub(crate) seed: u64,
    pub(crate) operations: usize,
    pub(crate) rules: Rules,
}

#[derive(Debug, Default)]
pub(crate) struct Report {
    pub(crate) histories: Vec<Vec<Call>>,
    pub(crate) acknowledged: usize,
    pub(crate) read: usize,
    pub(crate) doubts: usize,
    pub(crate) refused: usize,
    pub(crate) crashes: usize,
    pub(crate) cuts: usize,
    pub(crate) freezes: usize,
    pub(crate) messages: u64,
    /// Copies that were compared with their primary's in the end.
    pub(crate) copies: usize,
    /// Two nodes that have served one partition in one epoch.
    pub(crate) rivals: Vec<String>,
}

impl Report {
    /// Adds up the counts.
    pub(crate) fn add(&mut self, other: &Self) {
        self.acknowledged += other.acknowledged;
        self.read += other.read;
        self.doubts += other.doubts;
        self.refused += other.refused;
        self.crashes += other.crashes;
        self.cuts += other.cuts;
        self.freezes += other.freezes;
        self.messages += other.messages;
        self.copies += other.copies;
    }

    pub(crate) fn operations(&self) -> usize {
        self.histories.iter().map(Vec::len).sum()
    }
}

struct Client {
    /// What it waits for: ticket, key, and the place in its history.
    waits: Option<(u64, i64, usize)>,
    at: usize,
    next: Duration,
}

/// Which keys are used now, and their histories.
#[derive(Default)]
struct Keys {
    histories: BTreeMap<i64, Vec<Call>>,
    open: Vec<i64>,
    last: i64,
}

impl Keys {
    fn pick(&mut self, random: &mut Random) -> i64 {
        let histories = &self.histories;
        self.open.retain(|key| {
            let history = &histories[key];
            let doubts = history.iter().filter(|call| call.answered.is_none() && call.op != Op::Get).count();
            history.len() < LENGTH && doubts < DOUBTS + CLIENTS as usize
        });
        while self.open.len() < KEYS as usize {
            self.last += 1;
            self.open.push(self.last);
            self.histories.insert(self.last, Vec::new());
        }
        self.open[random.below(KEYS) as usize]
    }
}

fn operation(op: &Op, key: i64) -> Operation {
    match op {
        Op::Put(value) => {
            let record = Record::new(vec![Term::from(key), Term::from(*value)]);
            Operation::Write(WriteOp::Put(vec![record]))
        }
        Op::Delete => Operation::Write(WriteOp::DeleteKeys(vec![key.into()])),
        Op::Get => Operation::Read(ReadOp::Get(key.into())),
    }
}

fn ret(outcome: &Outcome) -> Ret {
    match outcome {
        Outcome::Written(_) => Ret::Put,
        Outcome::Removed(count) => Ret::Deleted(*count > 0),
        Outcome::Records(records) => Ret::Got(records.first().and_then(|record| match record.get(1) {
            Some(Term::Int(value)) => Some(*value),
            _ => None,
        })),
        Outcome::Bindings(_) => panic!("nobody has asked for bindings"),
    }
}

/// Sends faults, each in its time.
struct Chaos {
    next: Duration,
    down: Vec<usize>,
    random: Random,
}

impl Chaos {
    fn step(&mut self, cluster: &mut Cluster, run: &Run, report: &mut Report) {
        if cluster.now < self.next {
            return;
        }
        self.next = cluster.now + Duration::from_millis(200) + self.random.millis(2500);
        let count = cluster.count();
        let pick = self.random.below(count as u64) as usize;
        match (self.random.below(if run.faults == Faults::All { 6 } else { 2 }), self.down.is_empty()) {
            (0, true) if cluster.cut.is_empty() && cluster.is_whole() => {
                // as many at once as the mode bears
                let most = match run.config.write_mode {
                    WriteMode::Strong => run.config.replicas - 1,
                    WriteMode::Sync | WriteMode::Async => run.config.replicas / 2,
                };
                for next in 0..1 + self.random.below(most as u64) as usize {
                    let at = (pick + next) % count;
                    cluster.crash(at);
                    self.down.push(at);
                    report.crashes += 1;
                }
            }
            (0 | 1, false) => {
                if let Some(at) = self.down.pop() {
                    cluster.start(at);
                }
            }
            (2, _) => {
                let side: Vec<_> = (0..count).filter(|_| self.random.one_in(2)).collect();
                let apart = |a: usize, b: usize| side.contains(&a) != side.contains(&b);
                let pairs = (0..count).flat_map(|a| (a + 1..count).map(move |b| (a, b)));
                cluster.set_cut(pairs.filter(|(a, b)| apart(*a, *b)).collect());
                report.cuts += 1;
            }
            (3, _) => {
                // one link: its ends still have others in common
                let other = (pick + 1 + self.random.below(count as u64 - 1) as usize) % count;
                cluster.set_cut(BTreeSet::from([(pick.min(other), pick.max(other))]));
                report.cuts += 1;
            }
            (4, _) => {
                cluster.freeze(pick, self.random.millis(4000));
                report.freezes += 1;
            }
            _ => cluster.set_cut(BTreeSet::new()),
        }
    }
}

/// An end to all faults: everything has to be whole again.
fn recover(cluster: &mut Cluster, run: &Run, down: Vec<usize>) {
    down.into_iter().for_each(|at| cluster.start(at));
    cluster.set_cut(BTreeSet::new());
    let mut whole = 0;
    let until = cluster.now + Duration::from_secs(120);
    // for two seconds on end: views may still change
    while whole < 40 {
        let next = cluster.now + Duration::from_millis(50);
        cluster.run_until(next);
        drop(cluster.take_ended());
        whole = if cluster.is_whole() && !cluster.has_frozen() { whole + 1 } else { 0 };
        let (seed, late) = (run.seed, cluster.now >= until);
        assert!(!late, "seed {seed}: not whole two minutes after the last fault\n{}", cluster.describe());
    }
}

/// What was acknowledged is still there, or a history has no explanation.
fn read_again(
    cluster: &mut Cluster,
    run: &Run,
    keys: &mut Keys,
    random: &mut Random,
    mut moment: u64,
    mut ticket: u64,
) {
    for (key, history) in keys.histories.iter_mut().rev().take(40) {
        ticket += 1;
        let asked = moment + 1;
        let at = random.below(run.nodes as u64) as usize;
        assert!(cluster.operate(at, ticket, *key, operation(&Op::Get, *key), Duration::from_secs(10)));
        let until = cluster.now + Duration::from_secs(11);
        cluster.run_until(until);
        let ended = cluster.take_ended().into_iter().find(|ended| ended.ticket == ticket).unwrap();
        let reply =
            ended.result.unwrap_or_else(|error| panic!("seed {}: a read without faults: {error}", run.seed));
        moment = asked + 1;
        history.push(Call { asked, answered: Some((moment, ret(&reply.outcome))), op: Op::Get });
    }
}

pub(crate) fn execute(run: &Run) -> Report {
    let mut cluster = Cluster::new(run.nodes, run.config.clone(), run.rules, run.seed);
    let mut report = Report::default();
    let mut random = Random::new(run.seed.wrapping_mul(31));
    let mut chaos = Chaos {
        next: Duration::from_secs(8),
        down: Vec::new(),
        random: Random::new(run.seed.wrapping_mul(77)),
    };
    let mut keys = Keys::default();
    let mut clients: Vec<_> =
        (0..CLIENTS).map(|_| Client { waits: None, at: 0, next: Duration::from_secs(6) }).collect();
    let (mut ticket, mut moment, mut begun) = (0, 0, 0);
    while begun < run.operations || clients.iter().any(|client| client.waits.is_some()) {
        if begun < run.operations {
            chaos.step(&mut cluster, run, &mut report);
        }
        for client in &mut clients {
            // the node may have died with the operation
            if client.waits.is_some() && !cluster.is_alive(client.at) {
                client.waits = None;
                report.doubts += 1;
            }
            if client.waits.is_some() || client.next > cluster.now || begun >= run.operations {
                continue;
            }
            client.next = cluster.now + Duration::from_millis(1) + random.millis(120);
            client.at = random.below(run.nodes as u64) as usize;
            let key = keys.pick(&mut random);
            ticket += 1;
            let op = match random.below(10) {
                0..5 => Op::Get,
                5..9 => Op::Put(ticket as i64),
                _ => Op::Delete,
            };
            moment += 1;
            let history = keys.histories.get_mut(&key).unwrap();
            history.push(Call { asked: moment, answered: None, op: op.clone() });
            client.waits = Some((ticket, key, history.len() - 1));
            let patience = Duration::from_millis(200) + random.millis(3000);
            if cluster.operate(client.at, ticket, key, operation(&op, key), patience) {
                begun += 1;
            } else {
                keys.histories.get_mut(&key).unwrap().pop();
                client.waits = None;
            }
        }
        let until = cluster.now + Duration::from_millis(5);
        cluster.run_until(until);
        for ended in cluster.take_ended() {
            let Some(client) =
                clients.iter_mut().find(|c| c.waits.is_some_and(|(waits, ..)| waits == ended.ticket))
            else {
                continue;
            };
            let Some((_, key, index)) = client.waits.take() else { continue };
            let call = &mut keys.histories.get_mut(&key).unwrap()[index];
            moment += 1;
            match &ended.result {
                Ok(reply) => {
                    call.answered = Some((moment, ret(&reply.outcome)));
                    if call.op == Op::Get { report.read += 1 } else { report.acknowledged += 1 }
                }
                Err(error) if error.applied() == Applied::No => {
                    // it had no effect, and will have none: as if nobody had asked
                    report.refused += 1;
                    call.op = Op::Get;
                }
                Err(_) => report.doubts += 1,
            }
        }
    }
    if run.rules == Rules::all() {
        recover(&mut cluster, run, chaos.down);
        report.copies = cluster.check_copies().unwrap_or_else(|what| panic!("seed {}: {what}", run.seed));
        read_again(&mut cluster, run, &mut keys, &mut random, moment, ticket);
        cluster.check().unwrap_or_else(|what| panic!("seed {}: {what}", run.seed));
    }
    report.rivals = std::mem::take(&mut cluster.rivals);
    report.messages = cluster.messages;
    report.histories = keys.histories.into_values().collect();
    for history in &mut report.histories {
        // a read without an answer says nothing
        history.retain(|call| call.answered.is_some() || call.op != Op::Get);
    }
    report
}

pub(crate) fn strong(seed: u64, operations: usize, rules: Rules) -> Run {
    let (nodes, replicas) = if seed.is_multiple_of(3) { (5, 3) } else { (3 + (seed % 2) as usize, 2) };
    let config = CacheConfig::new("linear")
        .partitions(3)
        .replicas(replicas)
        .expected_nodes(Some(nodes.min(2 * replicas - 1)))
        .write_mode(WriteMode::Strong)
        .read_mode(if seed.is_multiple_of(2) { ReadMode::Primary } else { ReadMode::Quorum });
    Run { nodes, config, faults: Faults::All, seed, operations, rules }
}
