//! The end of all faults: what must be true some time after it.

use super::cluster::Cluster;
use super::random::Random;
use super::schedule::{Scheduler, Temper};
use super::step::{CastKind, Place, Step};
use crate::node::Time;
use crate::testing::oracle::Violation;

/// Ends the faults and requires what must follow. Says how long it took until every node was `Ready`.
pub(super) fn converge(cluster: &mut Cluster, seed: u64) -> Result<Time, Violation> {
    let mut random = Random::new(seed ^ 0x6865_616c);
    let temper = Temper::draw(&mut random, cluster.groups());
    let mut scheduler = Scheduler::new(random, Temper { lag: 0, ..temper });
    for place in 0..cluster.len() {
        // most of the dead come back
        if cluster.node(place).is_none() && !scheduler.random.one_in(4) {
            cluster.apply(Step::Start(place as Place))?;
        }
    }
    if cluster.running().next().is_none() {
        cluster.apply(Step::Start(0))?;
    }
    cluster.heal()?;
    let healed = cluster.now();
    let beat = cluster.settings().heartbeat_interval;
    while !cluster.is_ready() {
        if cluster.now() > healed + 2 * beat {
            let what = format!("not Ready two heartbeats after the last fault\n{}", cluster.describe());
            return Err(Violation::new("P5", what));
        }
        go_on(cluster, &mut scheduler, Time::from_millis(1))?;
    }
    let took = cluster.now() - healed;

    // cooldowns, retractions, tombstones, sweeps and two digests
    let settings = cluster.settings();
    let turns = cluster.len().saturating_sub(1).div_ceil(settings.beat_peers).max(1) as u32;
    let slack = (2 + 2 * turns) * beat + 2 * settings.tick();
    let tables = settings.vacancy_cooldown + settings.flush_interval + settings.rpc_timeout + slack;
    let joins = settings.join_timeout + slack;
    let graves = settings.tombstone_ttl + 2 * settings.sweep_interval + slack;
    go_on(cluster, &mut scheduler, tables.max(joins))?;
    if cluster.waiting_joins() > 0 {
        return Err(Violation::new("P6", format!("{} joins wait for ever", cluster.waiting_joins())));
    }
    if !cluster.is_ready() {
        return Err(Violation::new("P5", format!("Ready, but not for long\n{}", cluster.describe())));
    }
    cluster.judge()?;
    cluster.check_tables()?;
    cluster.check_drained()?;
    cluster.check_settled()?;
    precision(cluster, &mut scheduler)?;

    cluster.leave_all()?;
    go_on(cluster, &mut scheduler, tables + graves)?;
    cluster.judge()?;
    cluster.check_tables()?;
    cluster.check_settled()?;
    cluster.check_empty()?;
    Ok(took)
}

/// Broadcasts in a healed cluster: each payload goes where it is needed, once.
fn precision(cluster: &mut Cluster, scheduler: &mut Scheduler) -> Result<(), Violation> {
    cluster.set_room(usize::MAX);
    let places: Vec<usize> = cluster.running().collect();
    for _ in 0..6 {
        let place = places[scheduler.random.below(places.len())];
        let group = scheduler.random.below(cluster.groups());
        let Some(cast) = cluster.cast(place, group, CastKind::All)? else {
            return Err(Violation::new("busy", format!("n{place} is busy in a healed cluster")));
        };
        while let Some(step) = scheduler.movement(cluster) {
            cluster.apply(step)?;
        }
        cluster.check_precision(cast, place, group)?;
    }
    cluster.judge()
}

/// Lets time go by with everything that is due in random order, until nothing moves and the time is over.
fn go_on(cluster: &mut Cluster, scheduler: &mut Scheduler, time: Time) -> Result<(), Violation> {
    let tick = cluster.settings().tick();
    let end = cluster.now() + time;
    let mut rounds = 0u32;
    loop {
        let mut moved = 0;
        while moved < 12 * cluster.len() {
            let Some(step) = scheduler.movement(cluster) else { break };
            cluster.apply(step)?;
            moved += 1;
        }
        let idle = moved == 0;
        if cluster.now() >= end && (idle || time <= Time::from_millis(1)) {
            return Ok(());
        }
        let before = cluster.now();
        let next = if idle { tick } else { Time::from_millis(1) };
        cluster.apply(Step::Time(next.as_millis() as u32))?;
        if before.as_nanos() / tick.as_nanos() != cluster.now().as_nanos() / tick.as_nanos() {
            for place in 0..cluster.len() {
                cluster.apply(Step::Timeout(place as Place))?;
            }
        }
        rounds += 1;
        if rounds > 200_000 {
            return Err(Violation::new("P6", "the cluster does not come to rest"));
        }
    }
}
