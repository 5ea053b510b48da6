//! The rules of write mode `Strong`, broken one at a time: a history that nothing explains shows each.
//!
//! `MUTATION=Name` tries one, `MUTATION_RUNS` says how many runs it may survive, `SIM_SEED` is the first of them.

use std::time::{Duration, Instant};

use muster_router::cache::replica::{Mutation, Rules};
use muster_router::cache::{
    CacheConfig, Operation, Outcome, ReadOp, Record, Reply, Term, WriteMode, WriteOp,
};

#[path = "../cache_linearizable/mod.rs"]
#[allow(dead_code, reason = "tests/cache_linearizable.rs uses the rest")]
mod linear;

use super::number;
use linear::cluster::Cluster;
use linear::history::is_linearizable;
use linear::run::{execute, strong};
use linear::survive::survive;

/// How many runs a mutation may survive; few in debug builds, which are slow.
const RUNS: u64 = if cfg!(debug_assertions) { 10 } else { 300 };
const OPERATIONS: usize = 1500;

/// The seeds that found a mutation.
const FOUND: &[(Mutation, u64)] = &[
    (Mutation::ReadWithoutLease, 1),
    (Mutation::CommitBeforeAll, 2),
    (Mutation::TakeoverUnderLease, 2),
    (Mutation::LeaseUnheard, 31),
    (Mutation::ServeBeforeAll, 111),
    (Mutation::DecideAlone, 2),
];

/// When the primary of [`is_stale_after_a_standstill`] has to stand still, in milliseconds.
const GRANT_AT_THE_DOOR: u64 = 0;

#[test]
fn every_broken_rule_of_strong_is_caught() {
    let only = std::env::var("MUTATION").ok();
    let runs = number("MUTATION_RUNS").unwrap_or(RUNS);
    let asked = |mutation: &&Mutation| only.as_ref().is_none_or(|only| *only == format!("{mutation:?}"));
    let all: Vec<Mutation> = Mutation::STRONG.iter().filter(asked).copied().collect();
    let mut survivors = Vec::new();
    for mutation in &all {
        let name = format!("{mutation:?}");
        match by_hand(*mutation).or_else(|| by_seed(*mutation, runs)) {
            Some(how) => println!("strong {name:25} {how}"),
            None => {
                println!("strong {name:25} survived");
                survivors.push(*mutation);
            }
        }
    }
    println!("{} of {} caught, of those of strong", all.len() - survivors.len(), all.len());
    assert!(survivors.is_empty(), "{survivors:?} survived: a hole in the checks");
}

/// The seed that caught it, and how.
fn by_seed(mutation: Mutation, runs: u64) -> Option<String> {
    let began = Instant::now();
    let known = FOUND.iter().filter(|(m, _)| *m == mutation).map(|(_, seed)| *seed);
    let first = number("SIM_SEED").unwrap_or(0);
    let mut operations = 0;
    known.chain(first..first + runs).find_map(|seed| {
        let report = execute(&strong(seed, OPERATIONS, Rules::broken(mutation)));
        operations += report.operations();
        let history = report.histories.iter().find(|history| !is_linearizable(history))?;
        // the same run under the whole protocol: what is found is the mutation's
        let whole = execute(&strong(seed, OPERATIONS, Rules::all()));
        assert!(
            whole.histories.iter().all(|history| is_linearizable(history)),
            "seed {seed}, nothing broken"
        );
        let (length, time) = (history.len(), began.elapsed());
        Some(format!("seed {seed}, {operations} operations, {time:.1?}: {length} of a key have no order"))
    })
}

/// Schedules that chance seldom finds.
fn by_hand(mutation: Mutation) -> Option<String> {
    let began = Instant::now();
    if mutation != Mutation::LeaseFromAnswer {
        return None;
    }
    // the moment between the primary's question and the answer: some milliseconds in every 400
    let known = Some(Duration::from_millis(GRANT_AT_THE_DOOR)).into_iter();
    let mut moments = known.chain((0..400).step_by(4).map(Duration::from_millis));
    let moment = moments.find(|moment| is_stale_after_a_standstill(*moment, Rules::broken(mutation)))?;
    assert!(!is_stale_after_a_standstill(moment, Rules::all()), "nothing is broken");
    Some(format!(
        "by hand, {:.1?}: a primary that stood still from {moment:?} on reads what was replaced meanwhile",
        began.elapsed()
    ))
}

/// A primary stands still with the answer of its last question at the door, until others have taken over and written.
fn is_stale_after_a_standstill(moment: Duration, rules: Rules) -> bool {
    const KEY: i64 = 1;
    let config =
        CacheConfig::new("still").partitions(1).expected_nodes(Some(3)).write_mode(WriteMode::Strong);
    let mut cluster = Cluster::new(3, config, rules, 7);
    let mut ended = Vec::new();
    let mut pass = |cluster: &mut Cluster, time| {
        let until = cluster.now + time;
        while cluster.now < until {
            cluster.run_until(until);
            ended.extend(cluster.take_ended());
        }
    };
    let put = |value: i64| {
        Operation::Write(WriteOp::Put(vec![Record::new(vec![Term::from(KEY), Term::from(value)])]))
    };
    pass(&mut cluster, Duration::from_secs(10));
    assert!(cluster.is_whole(), "{}", cluster.describe());
    let patience = Duration::from_secs(12);
    cluster.operate(0, 1, KEY, put(1), patience);
    pass(&mut cluster, Duration::from_secs(1) + moment);
    let primary = cluster.owners(KEY)[0];
    let others: Vec<_> = (0..3).filter(|at| *at != primary).collect();
    cluster.freeze(primary, Duration::from_secs(12));
    pass(&mut cluster, Duration::from_millis(50));
    cluster.set_cut(others.iter().map(|at| (primary.min(*at), primary.max(*at))).collect());
    // all links are known to be down
    pass(&mut cluster, Duration::from_secs(4));
    cluster.operate(others[0], 2, KEY, put(2), patience);
    // the primary goes on 50 ms before the end of this
    pass(&mut cluster, Duration::from_secs(8));
    cluster.operate(primary, 3, KEY, Operation::Read(ReadOp::Get(KEY.into())), Duration::from_millis(300));
    pass(&mut cluster, Duration::from_secs(1));
    let result = |ticket| ended.iter().find(|ended| ended.ticket == ticket).map(|ended| &ended.result);
    let value = |records: &[Record]| records.first().and_then(|record| record.get(1).cloned());
    assert!(matches!(result(1), Some(Ok(_))) && matches!(result(2), Some(Ok(_))), "{ended:?}");
    match result(3) {
        Some(Ok(Reply { outcome: Outcome::Records(records), .. })) => value(records) == Some(Term::from(1)),
        _ => false,
    }
}

/// The test of crashes notices what it is for.
#[test]
fn a_strong_write_that_not_all_owners_have_is_missed_after_crashes() {
    let lost = (0..10).find_map(|seed| {
        let survival = survive(seed, 4, 2, 6, Rules::broken(Mutation::CommitBeforeAll));
        survival.lost.first().map(|lost| format!("seed {seed}: {lost}"))
    });
    println!("strong CommitBeforeAll, by crashes of all owners but one: {lost:?}");
    assert!(lost.is_some());
}
