//! A cluster in one thread and in virtual time: the shipped nodes, a faulty network and an oracle.
//!
//! Two ways to use it. [`run`] draws a schedule from a seed: first faults, with safety checked at every step,
//! then an end to all faults, after which the cluster has to converge. [`Cluster`] is moved by hand: a test
//! decides which frame arrives next and which is held back.
//!
//! ```
//! use muster_router::testing::sim::{Options, run};
//! let report = run(&Options::of_seed(7).steps(2_000)).map_err(|failure| failure.to_string())?;
//! assert_eq!(report.tally.missed, 0);
//! # Ok::<(), String>(())
//! ```

mod cluster;
mod converge;
mod links;
mod network;
mod pipes;
mod random;
mod schedule;
mod shrink;
mod step;
mod wires;

use std::fmt;

use crate::config::Config;
use crate::node::{Rules, Settings, Time};
use crate::testing::oracle::{Tally, Violation};
use crate::transport::link::{LinkConfig, LinkRules};

pub use cluster::Cluster;
pub use links::LinkTally;
pub use random::Random;
pub use step::{CastKind, LinkStep, Place, Seen, Step};

use schedule::{Scheduler, Temper};

/// What a run is made of. Everything that is not given is drawn from the seed.
#[derive(Clone, Debug)]
pub struct Options {
    /// The seed: one seed, one run.
    pub seed: u64,
    /// How many places the cluster has; drawn from 3 to 7 if not given.
    pub nodes: Option<usize>,
    /// How many steps the phase with faults has.
    pub steps: usize,
    /// The rules in force.
    pub rules: Rules,
    /// Whether a failing schedule is made short, which takes a while.
    pub shorten: bool,
    /// Whether the nodes have their link layers, above raw connections that fail; and the rules in force there.
    pub links: Option<LinkRules>,
}

impl Options {
    /// The run of a seed.
    pub fn of_seed(seed: u64) -> Self {
        Self { seed, nodes: None, steps: 6_000, rules: Rules::all(), shorten: true, links: None }
    }

    /// With so many places.
    #[must_use]
    pub fn nodes(mut self, nodes: usize) -> Self {
        self.nodes = Some(nodes);
        self
    }

    /// With so many steps in the phase with faults.
    #[must_use]
    pub fn steps(mut self, steps: usize) -> Self {
        self.steps = steps;
        self
    }

    /// With a failing schedule as it is.
    #[must_use]
    pub fn unshortened(mut self) -> Self {
        self.shorten = false;
        self
    }

    /// With the nodes' link layers above raw connections that fail, under these rules of theirs.
    #[must_use]
    pub fn links(mut self, rules: LinkRules) -> Self {
        self.links = Some(rules);
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
    /// Inputs that nodes took.
    pub steps: u64,
    /// What the oracle saw.
    pub tally: Tally,
    /// From the end of the faults until every node was `Ready`.
    pub heal_to_ready: Time,
    /// The same in heartbeats.
    pub heal_beats: f64,
    /// The longest that any join waited.
    pub longest_join: Time,
    /// A hash over all that happened.
    pub trace: u64,
    /// What the link layers came to, if the nodes had them.
    pub links: LinkTally,
}

/// A promise was broken: which, in which run, and the shortest schedule that was found to break it.
#[derive(Clone, Debug)]
pub struct Failure {
    /// The run.
    pub options: Options,
    /// What was broken.
    pub violation: Violation,
    /// How many places the cluster has.
    pub nodes: usize,
    /// Inputs that nodes had taken until then.
    pub steps: u64,
    /// The shortened schedule; the faults end after it and the cluster is to converge.
    pub schedule: Vec<Step>,
    /// What the shortened schedule breaks.
    pub shortened: Violation,
    /// How the nodes stood when it was broken.
    pub stand: String,
}

impl Failure {
    /// The line that replays it.
    pub fn replay(&self) -> String {
        let Options { seed, nodes, steps, .. } = &self.options;
        let nodes = nodes.map(|nodes| format!(" SIM_NODES={nodes}")).unwrap_or_default();
        let links = if self.options.links.is_some() { " SIM_LINKS=1" } else { "" };
        format!(
            "SIM_SEED={seed}{nodes}{links} SIM_STEPS={steps} cargo test --test simulation replay -- --nocapture --ignored"
        )
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{} (after {} node steps of {} nodes)", self.violation, self.steps, self.nodes)?;
        writeln!(f, "replay with: {}", self.replay())?;
        writeln!(f, "shortened to {} steps, which break {}:", self.schedule.len(), self.shortened)?;
        for (index, step) in self.schedule.iter().enumerate() {
            writeln!(f, "  {index:3} {step}")?;
        }
        write!(f, "{}", self.stand)
    }
}

impl std::error::Error for Failure {}

/// The frame of a run: what it begins with.
#[derive(Clone, Debug)]
struct Setup {
    nodes: usize,
    groups: usize,
    settings: Settings,
    /// How many nodes begin connected and `Ready`.
    ready: usize,
    temper: Temper,
    /// How many frames a data lane holds.
    room: usize,
    /// The link layers, and how many frames a connection holds.
    links: Option<(LinkConfig, LinkRules, usize)>,
}

impl Setup {
    fn draw(options: &Options, random: &mut Random) -> Self {
        let most = [3, 4, 7][random.below(3)];
        let nodes = options.nodes.unwrap_or(random.between(3, most)).max(1);
        let few = [2, 4, 12, 40, 150][random.below(5)];
        // a tenth of the runs has many, told by the seed so that the others stay what they were
        let groups = if options.seed % 10 == 7 { 600 } else { few };
        let mut settings = settings(random);
        settings.rules = options.rules;
        let ready = if random.one_in(3) { 0 } else { random.between(nodes / 2, nodes) };
        let temper = Temper::draw(random, groups);
        let room = [1, 4, 1000, 1000][random.below(4)];
        let links = options.links.map(|rules| {
            let (config, width) = link_config(random, room);
            (config, rules, width)
        });
        Self { nodes, groups, settings, ready, temper, room, links }
    }

    fn build(&self) -> Result<Cluster, Violation> {
        let mut cluster = Cluster::new(self.nodes, self.groups, self.settings.clone());
        if let Some((config, rules, width)) = self.links.clone() {
            cluster.link_layers(config, rules, width);
        }
        cluster.start_all(0..self.ready)?;
        cluster.run()?;
        cluster.set_room(self.room);
        Ok(cluster)
    }
}

/// Short times and small steps, so that much happens within few steps.
fn settings(random: &mut Random) -> Settings {
    let ms = Time::from_millis;
    let mut settings = Settings::from(&Config::default());
    settings.ring.vnodes = [1, 4, 16][random.below(3)];
    settings.shards = random.between(1, 3);
    settings.vacancy_cooldown = ms([0, 200, 1000][random.below(3)]);
    settings.flush_interval = ms([50, 300][random.below(2)]);
    settings.heartbeat_interval = ms(2000);
    settings.singleton_timeout = ms(1000);
    settings.rpc_timeout = ms(1500);
    settings.join_timeout = ms([2000, 6000][random.below(2)]);
    settings.tombstone_ttl = ms(9000);
    settings.sweep_interval = ms([500, 5000][random.below(2)]);
    settings.work_step = [1, 3, 50][random.below(3)];
    settings.chunk_groups = [1, 3, 50][random.below(3)];
    settings.dedupe_window = [8, 64, 1 << 20][random.below(3)];
    settings.max_unacknowledged = [16, 100, 1 << 20][random.below(3)];
    settings.hash_seed = random.next();
    // not drawn of its own, so that older seeds stay the runs that they were
    settings.beat_peers = [64, 2, 1][(settings.hash_seed % 3) as usize];
    settings
}

/// The times of links, as short as those of the nodes; how many frames a connection holds.
fn link_config(random: &mut Random, room: usize) -> (LinkConfig, usize) {
    let ms = Time::from_millis;
    let config = LinkConfig {
        suspect_after: ms([150, 400][random.below(2)]),
        ping_interval: [Some(ms(400)), Some(ms(800)), None][random.below(3)],
        ping_timeout: ms([1000, 1500][random.below(2)]),
        reconnect_grace: ms([100, 400, 1000][random.below(3)]),
        stall_timeout: ms([1500, 2500][random.below(2)]),
        handshake_timeout: ms([500, 1500][random.below(2)]),
        queue_frames: room,
        queue_bytes: [400, 1 << 20][random.below(2)],
        piece_bytes: [usize::MAX, usize::MAX, 16, 64][random.below(4)],
        ..LinkConfig::default()
    };
    (config, [1, 8, usize::MAX, usize::MAX][random.below(4)])
}

/// Runs one seed: faults first, then convergence.
///
/// # Errors
/// The promise that was broken, with a schedule made short.
pub fn run(options: &Options) -> Result<Report, Box<Failure>> {
    let mut random = Random::new(options.seed);
    let setup = Setup::draw(options, &mut random);
    let mut log = Vec::with_capacity(options.steps);
    let mut steps = 0;
    let outcome = caught(|| attempt(options, &setup, &mut random, &mut log, &mut steps));
    match outcome {
        Ok(report) => Ok(report),
        Err(violation) => Err(Box::new(shrink::failure(options, &setup, violation, log, steps))),
    }
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

fn attempt(
    options: &Options,
    setup: &Setup,
    random: &mut Random,
    log: &mut Vec<Step>,
    steps: &mut u64,
) -> Result<Report, Violation> {
    let mut cluster = setup.build()?;
    let mut scheduler = Scheduler::new(random.clone(), setup.temper.clone());
    for _ in 0..options.steps {
        let step = scheduler.next(&cluster);
        log.push(step);
        let outcome = cluster.apply(step);
        *steps = cluster.steps();
        outcome?;
    }
    let heal_to_ready =
        converge::converge(&mut cluster, options.seed).inspect_err(|_| *steps = cluster.steps())?;
    *steps = cluster.steps();
    Ok(Report {
        steps: cluster.steps(),
        tally: cluster.tally(),
        heal_to_ready,
        heal_beats: heal_to_ready.as_secs_f64() / setup.settings.heartbeat_interval.as_secs_f64(),
        longest_join: cluster.longest_join(),
        trace: cluster.trace(),
        links: cluster.link_tally(),
    })
}
