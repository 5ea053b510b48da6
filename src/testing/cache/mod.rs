//! Cache nodes in one thread and in virtual time: the shipped nodes, a faulty network and an oracle.
//!
//! [`run`] draws a schedule from a seed: first faults, with what is promised checked at every answer, then an end to
//! all faults, after which every partition has to have its full number of equal copies. There are three kinds of runs,
//! because what is promised depends on the faults ([`Kind`]).
//!
//! | what holds | in which runs |
//! |---|---|
//! | no acknowledged `Sync` write is lost, no deleted record comes back; reads at the primary and by quorum that begin after the acknowledgement see it or later; `Async` writes as long as nobody has crashed | without splits, at most floor(replicas / 2) crashes until all copies are whole again |
//! | one serving primary a partition; whoever begins to serve has all that was acknowledged; a delete counts what went | without splits |
//! | an acknowledged write that is gone was overwritten or reported | splits without crashes |
//! | an epoch has one primary, a version names one write, an epoch has one base | all |
//! | a copy that counts as whole has everything that its history tells of, and what is absent was deleted | all |
//! | an acknowledged `Sync` write has a majority and `min_copies`, among more than half of `expected_nodes` | all |
//! | a session sees its own writes or is told that they are lost | all |
//! | an operation is answered once, by its deadline; what was answered "nothing has changed" is seen nowhere | all |
//! | what was forwarded is not forwarded again, nothing runs in circles, queues are bounded | all |
//! | in the end all copies are equal, each partition has its full number on the nodes of the ring, nobody else keeps any, every operation works from every node, tombstones are gone | all |
//!
//! ```
//! use muster_router::testing::cache::{Options, run};
//! let report = run(&Options::of_seed(7).steps(200)).map_err(|failure| failure.to_string())?;
//! assert_eq!(report.tally.lost, 0);
//! # Ok::<(), String>(())
//! ```

mod cluster;
mod converge;
mod fencing;
mod links;
mod oracle;
mod schedule;
mod shrink;
mod step;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::cache::replica::Rules;
use crate::cache::{CacheConfig, Table};
use crate::testing::oracle::Violation;
use crate::testing::sim::Random;

pub use fencing::written_behind_a_promise;
pub use oracle::{Kind, Tally};
pub use step::{Place, ReadKind, Step, WriteKind};

use cluster::{Cluster, Setup};
use schedule::{Scheduler, Temper};

/// What a run is made of. Everything that is not given is drawn from the seed.
#[derive(Clone, Debug)]
pub struct Options {
    /// The seed: one seed, one run.
    pub seed: u64,
    /// How many places the cluster has; drawn from 2 to 6 if not given.
    pub nodes: Option<usize>,
    /// Which faults it has; drawn if not given.
    pub kind: Option<Kind>,
    /// How many steps the phase with faults has.
    pub steps: usize,
    /// The rules in force.
    pub rules: Rules,
    /// Whether a failing schedule is made short, which takes a while.
    pub shorten: bool,
}

impl Options {
    /// The run of a seed.
    pub fn of_seed(seed: u64) -> Self {
        Self { seed, nodes: None, kind: None, steps: 1_000, rules: Rules::all(), shorten: true }
    }

    /// With so many steps in the phase with faults.
    #[must_use]
    pub fn steps(mut self, steps: usize) -> Self {
        self.steps = steps;
        self
    }

    /// With these faults.
    #[must_use]
    pub fn kind(mut self, kind: Kind) -> Self {
        self.kind = Some(kind);
        self
    }

    /// With a failing schedule as it is.
    #[must_use]
    pub fn unshortened(mut self) -> Self {
        self.shorten = false;
        self
    }

    /// Under these rules.
    #[must_use]
    pub fn rules(mut self, rules: Rules) -> Self {
        self.rules = rules;
        self
    }
}

/// What a run came to.
#[derive(Clone, Debug)]
pub struct Report {
    /// Which faults it had.
    pub kind: Kind,
    /// Inputs that nodes took.
    pub steps: u64,
    /// What the oracle saw.
    pub tally: Tally,
    /// From the end of the faults until every partition had its full number of active owners.
    pub heal_to_whole: Duration,
    /// A hash over all that happened.
    pub trace: u64,
}

/// A promise was broken: which, in which run, and the shortest schedule that was found to break it.
#[derive(Clone, Debug)]
pub struct Failure {
    /// The run.
    pub options: Options,
    /// What was broken.
    pub violation: Violation,
    /// Inputs that nodes had taken until then.
    pub steps: u64,
    /// What the cluster began with, in words.
    pub setup: String,
    /// The shortened schedule; the faults end after it and the cluster is to converge.
    pub schedule: Vec<Step>,
    /// What the shortened schedule breaks.
    pub shortened: Violation,
    /// What happened in it, message by message.
    pub log: Vec<String>,
    /// How the nodes stood when it was broken.
    pub stand: String,
}

impl Failure {
    /// The line that replays it.
    pub fn replay(&self) -> String {
        let Options { seed, nodes, steps, .. } = &self.options;
        let nodes = nodes.map(|nodes| format!(" SIM_NODES={nodes}")).unwrap_or_default();
        format!(
            "SIM_SEED={seed}{nodes} SIM_STEPS={steps} cargo test --features cache --test cache_simulation replay \
             -- --nocapture --ignored"
        )
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.violation)?;
        writeln!(f, "replay with: {}", self.replay())?;
        writeln!(f, "{}", self.setup)?;
        writeln!(f, "shortened to {} steps, which break {}:", self.schedule.len(), self.shortened)?;
        for (index, step) in self.schedule.iter().enumerate() {
            writeln!(f, "  {index:3} {step}")?;
        }
        write!(f, "{}", self.stand)
    }
}

impl std::error::Error for Failure {}

fn setup(options: &Options, random: &mut Random) -> Setup {
    let kind = options.kind.unwrap_or([Kind::Whole, Kind::Whole, Kind::Split, Kind::Wild][random.below(4)]);
    let most = [3, 4, 6][random.below(3)];
    let places = options.nodes.unwrap_or(random.between(2, most)).clamp(1, 8);
    let replicas = [1, 2, 2, 2, 3, 3, 3][random.below(7)];
    let partitions = [1, 2, 3, 6][random.below(4)];
    let shards = random.between(1, 3.min(partitions)) as u32;
    let table = [Table::Set, Table::Set, Table::OrderedSet, Table::Bag, Table::DuplicateBag][random.below(5)];
    let padding = [0, 40, 300][random.below(3)];
    let mut config = CacheConfig::new("sim")
        .table(table)
        .partitions(partitions as u32)
        .replicas(replicas)
        .max_record_len(400)
        .max_log_bytes([400, 1500, 1 << 20][random.below(3)])
        .chunk_bytes([1 << 10, 1 << 16][random.below(2)])
        .transfer_rate([64 << 10, 64 << 20][random.below(2)])
        .tombstone_ttl(Duration::from_secs([1, 4, 600][random.below(3)]))
        .min_copies([1, 1, 1, replicas.min(2)][random.below(4)]);
    if random.one_in(6) {
        config = config.expected_nodes(Some(places.max(replicas)));
    }
    Setup {
        kind,
        places,
        first: random.between(1, places).max(places.min(2)),
        keys: [3, 8, 24][random.below(3)],
        sessions: [2, 4, 10][random.below(3)],
        shards,
        config: Arc::new(config),
        patience: [400, 1500, 4000][random.below(3)],
        padding,
        delay: [2, 10, 40][random.below(3)],
        view_delay: [10, 100, 500][random.below(3)],
        rules: options.rules,
        seed: random.next(),
    }
}

/// Runs one seed: faults first, then convergence.
///
/// # Errors
/// The promise that was broken, with a schedule made short.
pub fn run(options: &Options) -> Result<Report, Box<Failure>> {
    let mut random = Random::new(options.seed);
    let setup = setup(options, &mut random);
    let mut schedule = Vec::with_capacity(options.steps);
    let mut steps = 0;
    let outcome = caught(|| attempt(options, &setup, &mut random, &mut schedule, &mut steps));
    outcome.map_err(|violation| Box::new(shrink::failure(options, &setup, violation, schedule, steps)))
}

/// A panic in a node is a broken promise as well.
fn caught<T>(act: impl FnOnce() -> Result<T, Violation>) -> Result<T, Violation> {
    // what `act` leaves behind is only looked at for the report
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(act)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
        Err(Violation::new("panic", text.unwrap_or("a panic without a text")))
    })
}

/// After every so many steps all copies are looked at.
fn look(cluster: &mut Cluster, index: usize) -> Result<(), Violation> {
    if index % 20 == 19 { cluster.judge_copies() } else { Ok(()) }
}

fn attempt(
    options: &Options,
    setup: &Setup,
    random: &mut Random,
    schedule: &mut Vec<Step>,
    steps: &mut u64,
) -> Result<Report, Violation> {
    let mut cluster = Cluster::new(setup.clone());
    cluster.boot()?;
    let temper = Temper::draw(random);
    let mut scheduler = Scheduler::new(random.clone(), temper);
    for index in 0..options.steps {
        let step = scheduler.next(&cluster);
        schedule.push(step);
        let outcome = cluster.apply(step);
        *steps = cluster.inputs();
        outcome?;
        look(&mut cluster, index)?;
    }
    let outcome = converge::converge(&mut cluster, options.seed);
    *steps = cluster.inputs();
    let heal_to_whole = outcome?;
    Ok(Report {
        kind: setup.kind,
        steps: cluster.inputs(),
        tally: cluster.tally(),
        heal_to_whole,
        trace: cluster.trace(),
    })
}
