//! Histories of operations on single keys, with crashes, restarts, partitions of the network, processes that stand still
//! and clocks that go at different speeds.
//!
//! * `Strong`: every history is linearizable, whatever happens. Judged by stateright's checker, one key at a time.
//! * `Sync` with reads by quorum: without a split, a read that begins after a write was acknowledged sees this write or a
//!   later one. It is not linearizable: two reads at once may see a write that is under way in either order, and in a
//!   split both sides may go on (`expected_nodes` forbids it to the smaller one).

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout, reason = "a test")]

#[path = "cache_linearizable/cluster.rs"]
mod cluster;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use cluster::{Cluster, Random};
use muster_router::cache::replica::{Mutation, Rules};
use muster_router::cache::{
    Applied, CacheConfig, Operation, Outcome, ReadMode, ReadOp, Record, Term, WriteMode, WriteOp,
};
use stateright::semantics::{ConsistencyTester, LinearizabilityTester, SequentialSpec};

/// How many clients there are, and how many keys they use at a time.
const CLIENTS: u64 = 6;
const KEYS: u64 = 4;
/// A key is used for so many operations, and for fewer if so many of them are in doubt.
const LENGTH: usize = 18;
const DOUBTS: usize = 3;

#[derive(Clone, Debug, PartialEq)]
enum Op {
    Put(i64),
    Delete,
    Get,
}

#[derive(Clone, Debug, PartialEq)]
enum Ret {
    Put,
    Deleted(bool),
    Got(Option<i64>),
}

/// What a key should be: a register that can be emptied.
#[derive(Clone, Debug, Default)]
struct Slot(Option<i64>);

impl SequentialSpec for Slot {
    type Op = Op;
    type Ret = Ret;

    fn invoke(&mut self, op: &Op) -> Ret {
        match op {
            Op::Put(value) => {
                self.0 = Some(*value);
                Ret::Put
            }
            Op::Delete => Ret::Deleted(self.0.take().is_some()),
            Op::Get => Ret::Got(self.0),
        }
    }
}

/// One operation in a history; the numbers order what was asked and answered.
#[derive(Clone, Debug)]
struct Call {
    asked: u64,
    /// `None`: nobody knows whether it has had an effect, or may have it yet.
    answered: Option<(u64, Ret)>,
    op: Op,
}

/// Whether one order of the operations explains all answers.
fn is_linearizable(history: &[Call]) -> bool {
    let mut moments: Vec<(u64, usize, bool)> = Vec::new();
    for (index, call) in history.iter().enumerate() {
        moments.push((call.asked, index, true));
        moments.extend(call.answered.as_ref().map(|(at, _)| (*at, index, false)));
    }
    moments.sort_unstable();
    let mut tester = LinearizabilityTester::new(Slot::default());
    // each operation that is under way needs a thread of its own
    let (mut free, mut threads, mut last): (Vec<usize>, BTreeMap<usize, usize>, usize) = Default::default();
    for (_, index, asked) in moments {
        if asked {
            let thread = free.pop().unwrap_or_else(|| {
                last += 1;
                last
            });
            threads.insert(index, thread);
            tester.on_invoke(thread, history[index].op.clone()).unwrap();
        } else if let (Some(thread), Some((_, ret))) = (threads.get(&index), &history[index].answered) {
            tester.on_return(*thread, ret.clone()).unwrap();
            free.push(*thread);
        }
    }
    tester.is_consistent()
}

/// Whether no read returned what an acknowledged write had surely replaced before the read began.
fn is_recent(history: &[Call]) -> bool {
    let writes = || history.iter().filter(|call| call.op != Op::Get);
    let acked_before =
        |moment: u64| writes().filter(move |w| w.answered.as_ref().is_some_and(|(at, _)| *at < moment));
    history.iter().all(|read| {
        let Some((_, Ret::Got(value))) = &read.answered else { return true };
        // every write that may have left this behind, and what was there in the beginning
        let beginning = value.is_none().then_some(Some(0));
        let sources = writes().filter(|write| match (&write.op, value) {
            (Op::Put(put), Some(value)) => put == value,
            (Op::Delete, None) => true,
            _ => false,
        });
        let ends = sources.map(|write| write.answered.as_ref().map(|(at, _)| *at));
        ends.chain(beginning).any(|end| match end {
            None => true,
            Some(end) => !acked_before(read.asked).any(|later| later.asked > end),
        })
    })
}

/// Which faults a run has.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Faults {
    /// Crashes, cuts, standstills.
    All,
    /// One crash at a time, and the next one when all copies are whole again.
    Crashes,
}

#[derive(Debug)]
struct Run {
    nodes: usize,
    config: CacheConfig,
    faults: Faults,
    seed: u64,
    operations: usize,
    rules: Rules,
}

#[derive(Debug, Default)]
struct Report {
    histories: Vec<Vec<Call>>,
    acknowledged: usize,
    read: usize,
    doubts: usize,
    refused: usize,
    crashes: usize,
    cuts: usize,
    freezes: usize,
    messages: u64,
}

impl Report {
    fn operations(&self) -> usize {
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
        whole = if cluster.is_whole() { whole + 1 } else { 0 };
        let (seed, late) = (run.seed, cluster.now >= until);
        assert!(!late, "seed {seed}: not whole two minutes after the last fault\n{}", cluster.describe());
    }
}

fn execute(run: &Run) -> Report {
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
    recover(&mut cluster, run, chaos.down);
    // what was acknowledged is still there, or a history has no explanation
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
    cluster.check().unwrap();
    report.messages = cluster.messages;
    report.histories = keys.histories.into_values().collect();
    for history in &mut report.histories {
        // a read without an answer says nothing
        history.retain(|call| call.answered.is_some() || call.op != Op::Get);
    }
    report
}

fn strong(seed: u64, operations: usize, rules: Rules) -> Run {
    let (nodes, replicas) = if seed.is_multiple_of(3) { (5, 3) } else { (3 + (seed % 2) as usize, 2) };
    let config = CacheConfig::new("linear")
        .partitions(3)
        .replicas(replicas)
        .expected_nodes(Some(nodes.min(2 * replicas - 1)))
        .write_mode(WriteMode::Strong)
        .read_mode(if seed.is_multiple_of(2) { ReadMode::Primary } else { ReadMode::Quorum });
    Run { nodes, config, faults: Faults::All, seed, operations, rules }
}

fn command(name: &str, seed: u64) -> String {
    format!(
        "MUSTER_LINEAR_SEED={seed} cargo test --release --features consensus --test cache_linearizable {name}"
    )
}

/// One seed to run again, if it was asked for.
fn seeds(count: u64) -> Vec<u64> {
    match std::env::var("MUSTER_LINEAR_SEED") {
        Ok(seed) => vec![seed.parse().unwrap()],
        Err(_) => (0..count).collect(),
    }
}

#[test]
fn strong_histories_are_linearizable_per_key() {
    // in a debug build a small part of it
    let (runs, operations) = if cfg!(debug_assertions) { (6, 800) } else { (60, 2200) };
    let mut total = Report::default();
    let (mut histories, mut count) = (0, 0);
    for seed in seeds(runs) {
        let report = execute(&strong(seed, operations, Rules::all()));
        for history in &report.histories {
            assert!(
                is_linearizable(history),
                "not linearizable: {}\n{history:#?}",
                command("strong_histories_are_linearizable_per_key", seed)
            );
        }
        histories += report.histories.len();
        count += report.operations();
        total.acknowledged += report.acknowledged;
        total.read += report.read;
        total.doubts += report.doubts;
        total.refused += report.refused;
        total.crashes += report.crashes;
        total.cuts += report.cuts;
        total.freezes += report.freezes;
    }
    let Report { acknowledged, read, doubts, refused, crashes, cuts, freezes, .. } = total;
    println!(
        "strong: {histories} histories, {count} operations, violations (0); {acknowledged} writes acknowledged, {read} reads, \
         {doubts} in doubt, {refused} refused; {crashes} crashes, {cuts} cuts, {freezes} standstills"
    );
    if std::env::var("MUSTER_LINEAR_SEED").is_err() {
        assert!(acknowledged > count / 6 && read > count / 4, "too little was answered to prove anything");
        assert!(crashes > 0 && cuts > 0 && freezes > 0 && doubts > 0);
    }
}

#[test]
fn one_seed_is_one_run() {
    let run = || {
        let report = execute(&strong(4, 300, Rules::all()));
        (report.messages, format!("{:?}", report.histories))
    };
    assert_eq!(run(), run());
}

/// The checks find what they are for.
#[test]
fn strong_rules_that_are_broken_are_found() {
    for mutation in Mutation::STRONG {
        let found = (0..40).find(|seed| {
            let report = execute(&strong(*seed, 1500, Rules::broken(*mutation)));
            report.histories.iter().any(|history| !is_linearizable(history))
        });
        println!("{mutation:?}: found by run {found:?} (of at most 40)");
        assert!(found.is_some(), "{mutation:?} was not found");
    }
}

#[test]
fn a_quorum_read_sees_every_sync_write_that_was_acknowledged_before_it_began() {
    let (runs, operations) = if cfg!(debug_assertions) { (4, 800) } else { (20, 2000) };
    let (mut histories, mut count, mut acknowledged, mut read, mut crashes) = (0, 0, 0, 0, 0);
    for seed in seeds(runs) {
        let config = CacheConfig::new("recent")
            .partitions(3)
            .replicas(3)
            .write_mode(WriteMode::Sync)
            .read_mode(ReadMode::Quorum);
        let nodes = 3 + (seed % 3) as usize;
        let run = Run { nodes, config, faults: Faults::Crashes, seed, operations, rules: Rules::all() };
        let report = execute(&run);
        for history in &report.histories {
            assert!(
                is_recent(history),
                "a read saw what was replaced: {}\n{history:#?}",
                command("a_quorum_read_sees_every_sync_write_that_was_acknowledged_before_it_began", seed)
            );
        }
        histories += report.histories.len();
        count += report.operations();
        acknowledged += report.acknowledged;
        read += report.read;
        crashes += report.crashes;
    }
    println!(
        "sync and quorum: {histories} histories, {count} operations, violations (0); {acknowledged} writes acknowledged, \
         {read} reads, {crashes} crashes"
    );
    if std::env::var("MUSTER_LINEAR_SEED").is_err() {
        assert!(acknowledged > count / 6 && read > count / 4 && crashes > 0);
    }
}

/// The judges themselves.
#[test]
fn a_stale_read_is_seen() {
    let call = |asked, answered, op, ret| Call { asked, answered: Some((answered, ret)), op };
    let put = |asked, answered, value| call(asked, answered, Op::Put(value), Ret::Put);
    let got = |asked, answered, value| call(asked, answered, Op::Get, Ret::Got(value));
    let good = [put(1, 2, 7), put(3, 6, 8), got(4, 5, Some(7)), got(7, 8, Some(8))];
    assert!(is_linearizable(&good) && is_recent(&good));
    let stale = [put(1, 2, 7), put(3, 4, 8), got(5, 6, Some(7))];
    assert!(!is_linearizable(&stale) && !is_recent(&stale));
    // back in time while the write is under way: allowed to quorum reads, not to strong ones
    let back = [put(1, 2, 7), put(3, 10, 8), got(4, 5, Some(8)), got(6, 7, Some(7))];
    assert!(!is_linearizable(&back) && is_recent(&back));
    let doubtful = [put(1, 2, 7), Call { asked: 3, answered: None, op: Op::Put(8) }, got(4, 5, Some(8))];
    assert!(is_linearizable(&doubtful) && is_recent(&doubtful));
    let lost = [put(1, 2, 7), got(3, 4, None)];
    assert!(!is_linearizable(&lost) && !is_recent(&lost));
}
