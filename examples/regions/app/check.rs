//! Both clusters change while everybody talks; then every delivery is counted.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use muster_router::NodeId;
use tokio::time::{Instant, sleep};

use super::ledger::{Ledger, Totals};
use super::node::Counts;
use super::site::{Site, World};
use super::wide::Wide;
use super::{Broken, Failure};

/// The scenario.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    /// How often each cluster changes.
    pub(crate) rounds: u64,
    /// How many broadcasts there are between two changes.
    pub(crate) between: u64,
    pub(crate) groups: u64,
    /// Members on each node, besides one that comes and goes.
    pub(crate) members: u64,
    /// One answer between the regions in so many is lost.
    pub(crate) lose_one_in: u64,
    pub(crate) broken: Broken,
    /// Print what happens.
    pub(crate) tell: bool,
}

impl Default for Plan {
    fn default() -> Self {
        Self {
            rounds: 18,
            between: 300,
            groups: 24,
            members: 8,
            lose_one_in: 20,
            broken: Broken::Nothing,
            tell: false,
        }
    }
}

/// What came of it.
#[derive(Debug)]
pub(crate) struct Report {
    pub(crate) totals: Totals,
    changes: u64,
    gateways_killed: u64,
    cuts: u64,
    targeted: u64,
    flooded: u64,
    again: u64,
    copies: u64,
}

impl Report {
    /// Nothing was missed or came twice; and there was something to miss, and something to come twice.
    pub(crate) fn passed(&self) -> bool {
        self.totals.missed == 0 && self.totals.duplicated == 0 && self.proves_something()
    }

    fn proves_something(&self) -> bool {
        self.totals.abroad > 0 && self.targeted > 0 && self.flooded > 0 && self.copies > 0
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { totals, changes, gateways_killed, cuts, targeted, flooded, again, copies } = self;
        writeln!(
            f,
            "{changes} changes of the clusters, {gateways_killed} gateways killed, {cuts} links cut and healed"
        )?;
        writeln!(
            f,
            "between regions: {targeted} by the router's table, {flooded} flooded, {again} handed over again, {copies} second copies dropped"
        )?;
        let verdict = match (self.passed(), self.proves_something()) {
            (true, _) => "check passed",
            (false, true) => "check FAILED",
            (false, false) => "check FAILED (it proves nothing)",
        };
        write!(f, "{verdict}: {totals}")
    }
}

/// Longer than anything takes.
const PATIENCE: Duration = Duration::from_secs(120);

pub(crate) async fn run(plan: &Plan) -> Result<Report, Failure> {
    let wide = Wide::default();
    wide.lose_one_answer_in(plan.lose_one_in);
    let world = World {
        ledger: Arc::new(Ledger::default()),
        wide,
        counts: Arc::new(Counts::default()),
        broken: plan.broken,
        groups: plan.groups,
        members: plan.members,
        quiet: Arc::default(),
    };
    let (eu, us) = (names("eu")?, names("us")?);
    let mut sites = [
        Site::new(0, "eu", us[..3].to_vec(), world.clone()),
        Site::new(1, "us", eu[..3].to_vec(), world.clone()),
    ];
    for (site, names) in sites.iter_mut().zip([&eu, &us]) {
        for name in &names[..3] {
            site.start(name).await?;
        }
    }
    let (mut changes, mut gateways_killed, mut cuts) = (0, 0, 0);
    for round in 0..plan.rounds {
        until_sent(&world, plan.between).await?;
        let [here, there] = &mut sites;
        let (one, other) = (Change::of(round), Change::of(round + 2 + round / 5));
        if plan.tell {
            println!("round {round}: eu: {one}, us: {other}; {}", world.ledger.count());
        }
        tokio::try_join!(one.make(here, &eu[3]), other.make(there, &us[3]))?;
        changes += 2;
        let both = |change| u64::from(one == change) + u64::from(other == change);
        gateways_killed += both(Change::KillGateway);
        cuts += both(Change::Cut);
    }
    until_sent(&world, plan.between).await?;
    world.quiet.store(true, Ordering::Relaxed);
    for site in &mut sites {
        site.quiet().await;
    }
    // a receipt does not wait for a node whose link makes no progress at the moment
    let patience = Instant::now() + Duration::from_secs(if plan.broken == Broken::Nothing { 10 } else { 1 });
    while world.ledger.count().missed > 0 && Instant::now() < patience {
        sleep(Duration::from_millis(20)).await;
    }
    let totals = world.ledger.count();
    for site in &mut sites {
        site.end().await;
    }
    let count = |count: &std::sync::atomic::AtomicU64| count.load(Ordering::Relaxed);
    let Counts { targeted, flooded, again, copies } = &*world.counts;
    let (targeted, flooded, again, copies) = (count(targeted), count(flooded), count(again), count(copies));
    Ok(Report { totals, changes, gateways_killed, cuts, targeted, flooded, again, copies })
}

fn names(region: &str) -> Result<Vec<NodeId>, Failure> {
    Ok((1..=4).map(|number| NodeId::new(format!("{region}-{number}"))).collect::<Result<_, _>>()?)
}

/// Waits for so many broadcasts more.
async fn until_sent(world: &World, more: u64) -> Result<(), Failure> {
    let (wanted, deadline) = (world.ledger.sent() + more, Instant::now() + PATIENCE);
    while world.ledger.sent() < wanted {
        if Instant::now() > deadline {
            return Err(
                format!("{more} broadcasts take longer than {PATIENCE:?}: {}", world.ledger.count()).into()
            );
        }
        sleep(Duration::from_millis(5)).await;
    }
    Ok(())
}

/// One change of a cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Change {
    /// The fourth node joins, or leaves.
    Grow,
    /// The gateway is killed, and started again once the others talk without it.
    KillGateway,
    /// A node leaves in order and comes back.
    Roll,
    /// A node is killed and started again at once.
    Restart,
    /// The link of two nodes breaks for a moment; both live on.
    Cut,
}

impl Change {
    fn of(number: u64) -> Self {
        match number % 5 {
            0 => Change::Grow,
            1 => Change::KillGateway,
            2 => Change::Roll,
            3 => Change::Restart,
            _ => Change::Cut,
        }
    }

    async fn make(self, site: &mut Site, fourth: &NodeId) -> Result<(), Failure> {
        let nodes = site.nodes();
        let gateway = site.gateway();
        let other = nodes.iter().find(|node| Some(*node) != gateway.as_ref()).cloned();
        match (self, gateway, other) {
            (Change::Grow, ..) if nodes.contains(fourth) => site.leave(fourth).await,
            (Change::Grow, ..) => site.start(fourth).await,
            (Change::KillGateway, Some(gateway), _) => {
                site.crash(&gateway).await;
                site.settled_without(&gateway).await?;
                site.start(&gateway).await
            }
            (Change::Roll, _, Some(other)) => {
                site.leave(&other).await?;
                site.start(&other).await
            }
            (Change::Restart, _, Some(other)) => {
                site.crash(&other).await;
                site.start(&other).await
            }
            (Change::Cut, Some(gateway), Some(other)) => site.cut(&gateway, &other).await,
            _ => Err("a region without nodes".into()),
        }
    }
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Change::Grow => "the fourth node joins or leaves",
            Change::KillGateway => "the gateway is killed, later started again",
            Change::Roll => "a node leaves in order and comes back",
            Change::Restart => "a node is killed and started again at once",
            Change::Cut => "the link of two nodes is cut and healed",
        })
    }
}
