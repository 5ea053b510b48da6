//! The rules of write mode `Strong`, broken one at a time: a history that nothing explains shows each. That a lease is
//! counted from its question is checked in src/cache/consensus/lease.rs: chance seldom makes that difference.
//!
//! `MUTATION=Name` tries one, `MUTATION_RUNS` says how many runs it may survive, `SIM_SEED` is the first of them.

use std::time::Instant;

use muster_router::cache::replica::{Mutation, Rules};

#[path = "../cache_linearizable/mod.rs"]
#[allow(dead_code, reason = "tests/cache_linearizable.rs uses the rest")]
mod linear;

use super::number;
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

#[test]
fn every_broken_rule_of_strong_is_caught() {
    let only = std::env::var("MUTATION").ok();
    let runs = number("MUTATION_RUNS").unwrap_or(RUNS);
    let asked = |mutation: &&Mutation| only.as_ref().is_none_or(|only| *only == format!("{mutation:?}"));
    let all: Vec<Mutation> = Mutation::STRONG.iter().filter(asked).copied().collect();
    let mut survivors = Vec::new();
    for mutation in &all {
        let name = format!("{mutation:?}");
        match by_seed(*mutation, runs) {
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
        let what = what_is_wrong(seed, mutation, &mut operations)?;
        // the same run under the whole protocol: what is found is the mutation's
        let whole = execute(&strong(seed, OPERATIONS, Rules::all()));
        assert!(
            whole.histories.iter().all(|history| is_linearizable(history)),
            "seed {seed}, nothing broken"
        );
        Some(format!("seed {seed}, {operations} operations, {:.1?}: {what}", began.elapsed()))
    })
}

fn what_is_wrong(seed: u64, mutation: Mutation, operations: &mut usize) -> Option<String> {
    // in a debug build a node looks at its own state after every input, and may find it first
    let run = std::panic::catch_unwind(|| execute(&strong(seed, OPERATIONS, Rules::broken(mutation))));
    match run {
        Ok(report) => {
            *operations += report.operations();
            let history = report.histories.iter().find(|history| !is_linearizable(history))?;
            Some(format!("{} of a key have no order", history.len()))
        }
        Err(panic) => Some(format!("a node says: {}", panic.downcast_ref::<String>()?)),
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

/// Who serves is looked at at each step, so that two at once are seen whatever they answer.
#[test]
fn two_that_serve_a_partition_in_one_epoch_are_noticed() {
    let rivals = (0..10).find_map(|seed| {
        let run = || execute(&strong(seed, OPERATIONS, Rules::broken(Mutation::DecideAlone)));
        let report = std::panic::catch_unwind(run).ok()?;
        report.rivals.first().map(|rivals| format!("seed {seed}: {rivals}"))
    });
    println!("strong DecideAlone, by who serves: {rivals:?}");
    assert!(rivals.is_some());
}
