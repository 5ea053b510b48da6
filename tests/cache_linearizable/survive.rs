//! As many owners of a partition die at the same moment as write mode `Strong` bears, right after a write was acknowledged
//! and with others under way; when all copies are whole again, the next ones die; and so on.

use std::collections::BTreeMap;
use std::time::Duration;

use muster_router::cache::replica::Rules;
use muster_router::cache::{
    Applied, CacheConfig, CacheError, Operation, Outcome, ReadOp, Record, Reply, Term, WriteMode, WriteOp,
};

use super::cluster::{Cluster, Random};

/// How many keys there are, and to how many of them writes are under way when the owners die.
const KEYS: i64 = 16;
const UNDER_WAY: i64 = 4;
/// How long an operation may take.
const PATIENCE: Duration = Duration::from_secs(20);

#[derive(Debug, Default)]
pub(crate) struct Survival {
    pub(crate) acknowledged: usize,
    pub(crate) read: usize,
    pub(crate) crashes: usize,
    /// How many lives ended with each node.
    pub(crate) deaths: BTreeMap<usize, usize>,
    pub(crate) lost: Vec<String>,
}

/// What a key may be.
#[derive(Clone, Debug, Default)]
struct Expected {
    acknowledged: Option<i64>,
    /// Of later writes nobody knows the end.
    in_doubt: Vec<i64>,
}

struct Scene {
    cluster: Cluster,
    random: Random,
    tickets: u64,
    keys: BTreeMap<i64, Expected>,
    survival: Survival,
}

/// Rounds of crashes; what an unbroken protocol never lets happen is in [`Survival::lost`].
pub(crate) fn survive(seed: u64, nodes: usize, replicas: usize, rounds: usize, rules: Rules) -> Survival {
    let voters = 2 * replicas - 1;
    let config = CacheConfig::new("survive")
        .partitions(4)
        .replicas(replicas)
        .expected_nodes(Some(voters))
        .write_mode(WriteMode::Strong);
    let mut scene = Scene {
        cluster: Cluster::new(nodes, config, rules, seed),
        random: Random::new(seed.wrapping_mul(53)),
        tickets: 0,
        keys: BTreeMap::new(),
        survival: Survival::default(),
    };
    scene.become_whole(seed);
    for _ in 0..rounds {
        if scene.living().len() < voters {
            let dead = (0..nodes).filter(|at| !scene.cluster.is_alive(*at));
            dead.collect::<Vec<_>>().into_iter().for_each(|at| scene.cluster.start(at));
        }
        scene.become_whole(seed);
        // what was under way has ended
        scene.pass(PATIENCE);
        scene.round(replicas - 1);
    }
    scene.survival
}

impl Scene {
    fn living(&self) -> Vec<usize> {
        (0..self.cluster.count()).filter(|at| self.cluster.is_alive(*at)).collect()
    }

    fn pass(&mut self, time: Duration) {
        let until = self.cluster.now + time;
        while self.cluster.now < until {
            self.cluster.run_until(until);
            drop(self.cluster.take_ended());
        }
    }

    fn become_whole(&mut self, seed: u64) {
        let (mut whole, until) = (0, self.cluster.now + Duration::from_secs(120));
        // for two seconds on end: views may still change
        while whole < 40 {
            self.pass(Duration::from_millis(50));
            whole = if self.cluster.is_whole() { whole + 1 } else { 0 };
            let late = self.cluster.now >= until;
            assert!(!late, "seed {seed}: not whole within two minutes\n{}", self.cluster.describe());
        }
    }

    fn begin(&mut self, key: i64, operation: Operation) -> u64 {
        let living = self.living();
        let at = living[self.random.below(living.len() as u64) as usize];
        self.tickets += 1;
        assert!(self.cluster.operate(at, self.tickets, key, operation, PATIENCE));
        self.tickets
    }

    fn ask(&mut self, key: i64, operation: Operation) -> Result<Reply, CacheError> {
        let ticket = self.begin(key, operation);
        loop {
            let until = self.cluster.now + 2 * PATIENCE;
            self.cluster.run_until(until);
            let ended = self.cluster.take_ended();
            assert!(!ended.is_empty(), "an operation has not ended");
            if let Some(ended) = ended.into_iter().find(|ended| ended.ticket == ticket) {
                return ended.result;
            }
        }
    }

    fn put(&mut self, key: i64) -> Operation {
        self.tickets += 1;
        let value = self.tickets as i64;
        self.keys.entry(key).or_default().in_doubt.push(value);
        Operation::Write(WriteOp::Put(vec![Record::new(vec![Term::from(key), Term::from(value)])]))
    }

    fn write(&mut self, key: i64) {
        let operation = self.put(key);
        let result = self.ask(key, operation);
        let expected = self.keys.entry(key).or_default();
        match result {
            Ok(_) => {
                expected.acknowledged = expected.in_doubt.pop();
                expected.in_doubt.clear();
                self.survival.acknowledged += 1;
            }
            Err(error) if error.applied() == Applied::No => drop(expected.in_doubt.pop()),
            Err(_) => {}
        }
    }

    fn round(&mut self, crashes: usize) {
        for key in 0..KEYS - UNDER_WAY {
            self.write(key);
        }
        for key in KEYS - UNDER_WAY..KEYS {
            let operation = self.put(key);
            self.begin(key, operation);
        }
        // the last one to be acknowledged before some of its owners die
        let last = self.random.below((KEYS - UNDER_WAY) as u64) as i64;
        self.write(last);
        let mut dying = self.cluster.owners(last);
        // one is spared; the primary seldom
        let spared = self.random.below(dying.len() as u64 * 2).min(dying.len() as u64 - 1) as usize;
        dying.remove(spared);
        dying.truncate(crashes);
        for at in dying {
            self.cluster.crash(at);
            self.survival.crashes += 1;
            *self.survival.deaths.entry(at).or_default() += 1;
        }
        for key in 0..KEYS {
            self.read(key);
        }
    }

    fn read(&mut self, key: i64) {
        let result = self.ask(key, Operation::Read(ReadOp::Get(key.into())));
        let expected = self.keys.entry(key).or_default();
        let found = match result {
            Ok(Reply { outcome: Outcome::Records(records), .. }) => {
                records.first().and_then(|record| match record.get(1) {
                    Some(Term::Int(value)) => Some(*value),
                    _ => None,
                })
            }
            other => {
                self.survival.lost.push(format!("key {key} cannot be read: {other:?}"));
                return;
            }
        };
        let doubtful = found.is_some_and(|found| expected.in_doubt.contains(&found));
        if found != expected.acknowledged && !doubtful {
            self.survival.lost.push(format!("key {key} is {found:?} and should be {expected:?}"));
        }
        self.survival.read += 1;
        if doubtful {
            // what was seen once stays
            expected.acknowledged = found;
            expected.in_doubt.retain(|value| Some(*value) > found);
        }
    }
}
