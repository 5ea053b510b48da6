//! The second phase: no more faults, and everything has to come to rest as it should be.

use std::time::Duration;

use super::cluster::Cluster;
use super::oracle::{Fate, Kind};
use super::step::{Place, ReadKind, Step, WriteKind};
use crate::cache::{ReadMode, WriteMode};
use crate::testing::oracle::Violation;
use crate::testing::sim::Random;

/// How long a cluster without faults may take until all copies are whole.
const PATIENCE: Duration = Duration::from_secs(40);
/// When the operator gives up what only dead nodes had.
const LOSS: Duration = Duration::from_secs(10);

/// From the end of the faults until all copies were whole.
pub(super) fn converge(cluster: &mut Cluster, seed: u64) -> Result<Duration, Violation> {
    let mut random = Random::new(seed ^ 0x5eed);
    cluster.healing = true;
    cluster.apply(Step::HealAll)?;
    let all = cluster.setup().config.expected_nodes.is_some();
    for place in 0..cluster.len() {
        // most of the dead come back
        if !cluster.is_running(place) && (all || !random.one_in(4)) {
            cluster.apply(Step::Start(place as Place))?;
        }
        cluster.apply(Step::Open(place as Place))?;
    }
    let open = |cluster: &Cluster, place: usize| cluster.is_open(place) && !cluster.is_draining(place);
    if !(0..cluster.len()).any(|place| open(cluster, place)) {
        // who drains does not come back in this life
        (0..cluster.len()).try_for_each(|place| {
            cluster.apply(Step::Crash(place as Place))?;
            cluster.apply(Step::Start(place as Place))
        })?;
    }
    let healed = cluster.now();
    while !cluster.is_whole() {
        let since = cluster.now() - healed;
        if since > PATIENCE {
            return Err(Violation::new(
                "convergence",
                format!("{:?} after the last fault: {}", since, cluster.unwhole()),
            ));
        }
        if since > LOSS && cluster.setup().kind == Kind::Wild {
            for partition in cluster.stuck() {
                cluster.accept_loss(partition)?;
            }
        }
        cluster.apply(Step::Time(50))?;
        // who was draining when everything was mended has gone, and may be one of those that a birth waits for
        for place in (0..cluster.len()).filter(|_| all) {
            if !cluster.is_running(place) {
                cluster.apply(Step::Start(place as Place))?;
                cluster.apply(Step::Open(place as Place))?;
            }
        }
    }
    let took = cluster.now() - healed;

    // merges, and what waits still
    let patience = cluster.setup().patience;
    cluster.apply(Step::Time(3000 + patience as u16))?;
    cluster.judge_rest()?;
    cluster.account()?;
    probe(cluster, &mut random)?;
    cluster.judge_rest()?;

    // tombstones go when everybody has had them
    let ttl = cluster.setup().config.tombstone_ttl;
    if ttl < Duration::from_secs(30) {
        cluster.run_for(2 * ttl + Duration::from_secs(10))?;
        cluster.judge_rest()?;
        let (tombstones, kept) = cluster.leftovers();
        // a side of too few nodes forgets nothing
        if tombstones > 0 && cluster.may_write() {
            return Err(Violation::new("leftovers", format!("{tombstones} tombstones stay for ever")));
        }
        if kept > 20_000 {
            return Err(Violation::new("leftovers", format!("{kept} entries are kept by a node at rest")));
        }
    }
    Ok(took)
}

/// Everything works from everywhere.
fn probe(cluster: &mut Cluster, random: &mut Random) -> Result<(), Violation> {
    cluster.forget_tokens();
    if !cluster.may_write() {
        return Ok(());
    }
    let places: Vec<usize> = (0..cluster.len()).filter(|place| cluster.is_open(*place)).collect();
    let keys = cluster.setup().keys;
    for place in places {
        let key = random.below(keys.into()) as u8;
        let (place, session) = (place as Place, random.below(cluster.setup().sessions.into()) as u8);
        let mut steps = vec![Step::Write(place, session, WriteKind::Put(key), WriteMode::Sync)];
        for mode in [ReadMode::Local, ReadMode::Primary, ReadMode::Quorum] {
            steps.push(Step::Read(place, session, ReadKind::Get(key), mode, true));
        }
        steps.push(Step::Write(place, session, WriteKind::Delete(key), WriteMode::Sync));
        steps.push(Step::Read(place, session, ReadKind::All(key), ReadMode::Local, true));
        steps.push(Step::Read(place, session, ReadKind::All(key), ReadMode::Primary, false));
        for step in steps {
            let before = cluster.oracle().count();
            cluster.apply(step)?;
            cluster.apply(Step::Time(1000))?;
            let fine =
                cluster.oracle().count() == before + 1 && cluster.oracle().op(before).fate == Fate::Done;
            if !fine {
                return Err(Violation::new("service", format!("{step} does not work in a cluster at rest")));
            }
        }
    }
    Ok(())
}
