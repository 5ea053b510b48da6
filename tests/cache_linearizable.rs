//! Histories of operations on single keys, with crashes, restarts, partitions of the network, processes that stand still
//! and clocks that go at different speeds, all in virtual time.
//!
//! * `Strong`: every history is linearizable, whatever happens. Judged by stateright's checker, one key at a time.
//!   At no time have two nodes served a partition in one epoch.
//! * Both: when the faults are over, every owner's copy is equal to its primary's.
//! * `Sync` with reads by quorum: without a split, a read that begins after a write was acknowledged sees this write or a
//!   later one. It is not linearizable: two reads at once may see a write that is under way in either order, and in a
//!   split both sides may go on (`expected_nodes` forbids it to the smaller one).
//!
//! `MUSTER_LINEAR_SEED` runs one seed again, `MUSTER_LINEAR_FROM` is the first of as many fresh ones as there are otherwise
//! fixed ones. That broken rules are found is shown by tests/mutations/strong.rs.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout, reason = "a test")]

#[path = "cache_linearizable/mod.rs"]
mod linear;

use std::time::Instant;

use linear::history::{Call, is_linearizable, is_recent};
use linear::run::{Faults, Report, Run, execute, strong};
use linear::survive::survive;
use muster_router::cache::replica::Rules;
use muster_router::cache::{CacheConfig, ReadMode, WriteMode};

/// Fewer in a debug build, which is slow.
const STRONG: (u64, usize) = if cfg!(debug_assertions) { (5, 600) } else { (100, 2200) };
const SYNC: (u64, usize) = if cfg!(debug_assertions) { (3, 600) } else { (20, 2000) };
const SURVIVE: (u64, usize) = if cfg!(debug_assertions) { (1, 6) } else { (6, 20) };

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|number| number.parse().expect("a number"))
}

fn command(name: &str, seed: u64) -> String {
    let profile = if cfg!(debug_assertions) { "" } else { "--release " };
    format!(
        "MUSTER_LINEAR_SEED={seed} cargo test {profile}--features consensus --test cache_linearizable {name} \
         -- --nocapture"
    )
}

/// The seeds to run, and whether they are all.
fn seeds(count: u64) -> Vec<u64> {
    if let Some(seed) = number("MUSTER_LINEAR_SEED") {
        return vec![seed];
    }
    let first = number("MUSTER_LINEAR_FROM").unwrap_or(0);
    (first..first + count).collect()
}

/// Runs all seeds; every history has to pass the judge.
fn judge(
    name: &str,
    what: &str,
    (runs, operations): (u64, usize),
    prepare: impl Fn(u64, usize) -> Run,
    judge: impl Fn(&[Call]) -> bool,
) -> (Report, usize) {
    let began = Instant::now();
    let seeds = seeds(runs);
    let (first, last) = (seeds[0], seeds[seeds.len() - 1]);
    println!("{what}: seeds {first} to {last}; one of them again with {}", command(name, first));
    let (mut total, mut histories, mut count, mut violations) = (Report::default(), 0, 0, Vec::new());
    for seed in seeds {
        let report = execute(&prepare(seed, operations));
        for history in report.histories.iter().filter(|history| !judge(history)) {
            violations.push(format!("{}\n{history:#?}", command(name, seed)));
        }
        histories += report.histories.len();
        count += report.operations();
        total.add(&report);
    }
    let Report { acknowledged, read, doubts, refused, crashes, cuts, freezes, copies, .. } = total;
    println!(
        "{what}: {histories} histories, {count} operations, violations ({}); {acknowledged} writes acknowledged, {read} \
         reads, {doubts} in doubt, {refused} refused; {crashes} crashes, {cuts} cuts, {freezes} standstills; {copies} copies \
         equal to their primary's in the end; {:.1?}",
        violations.len(),
        began.elapsed()
    );
    assert!(violations.is_empty(), "{}", violations[0]);
    assert!(copies > 0, "no copy was compared");
    (total, count)
}

/// Whether all seeds are run, so that what they come to can be asked for.
fn is_whole_run() -> bool {
    number("MUSTER_LINEAR_SEED").is_none()
}

#[test]
fn strong_histories_are_linearizable_per_key() {
    let prepare = |seed, operations| strong(seed, operations, Rules::all());
    let name = "strong_histories_are_linearizable_per_key";
    let (total, count) = judge(name, "strong", STRONG, prepare, is_linearizable);
    if is_whole_run() {
        let enough = cfg!(debug_assertions) || count >= 100_000;
        assert!(
            enough && total.acknowledged > count / 6 && total.read > count / 4,
            "too little was answered"
        );
        assert!(total.crashes > 0 && total.cuts > 0 && total.freezes > 0 && total.doubts > 0);
    }
}

#[test]
fn a_quorum_read_sees_every_sync_write_that_was_acknowledged_before_it_began() {
    let prepare = |seed: u64, operations| {
        let config = CacheConfig::new("recent")
            .partitions(3)
            .replicas(3)
            .write_mode(WriteMode::Sync)
            .read_mode(ReadMode::Quorum);
        let nodes = 3 + (seed % 3) as usize;
        Run { nodes, config, faults: Faults::Crashes, seed, operations, rules: Rules::all() }
    };
    println!(
        "sync writes, quorum reads: without a split, a read that begins after a write was acknowledged sees it or a later \
         one; reads at the same time as a write may see it or not, in any order"
    );
    let name = "a_quorum_read_sees_every_sync_write_that_was_acknowledged_before_it_began";
    let (total, count) = judge(name, "sync and quorum", SYNC, prepare, is_recent);
    if is_whole_run() {
        assert!(total.acknowledged > count / 6 && total.read > count / 4 && total.crashes > 0);
    }
}

#[test]
fn strong_writes_survive_replicas_minus_1_crashes_at_a_time_with_re_replication_in_between() {
    let (runs, rounds) = SURVIVE;
    for (nodes, replicas) in [(4, 2), (7, 3)] {
        let began = Instant::now();
        let (mut acknowledged, mut read, mut crashes, mut lost) = (0, 0, 0, Vec::new());
        let mut fewest = nodes;
        for seed in seeds(runs) {
            let survival = survive(seed, nodes, replicas, rounds, Rules::all());
            acknowledged += survival.acknowledged;
            read += survival.read;
            crashes += survival.crashes;
            fewest = fewest.min(survival.deaths.len());
            lost.extend(survival.lost.iter().map(|lost| format!("seed {seed}: {lost}")));
        }
        println!(
            "{nodes} nodes, replicas {replicas}: {acknowledged} writes acknowledged, {crashes} crashes, {} at a time, {read} \
             reads after them, lost ({}); at least {fewest} different nodes in each of {} runs; {:.1?}",
            replicas - 1,
            lost.len(),
            seeds(runs).len(),
            began.elapsed()
        );
        assert!(lost.is_empty(), "{lost:#?}");
        assert!(acknowledged > 0 && crashes >= rounds * (replicas - 1));
        // more than there are copies: nothing is left where it was in the beginning
        assert!(fewest > replicas, "too few nodes have died");
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
