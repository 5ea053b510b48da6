//! The cache's rules, broken one at a time: the simulator of cache nodes finds each, or a schedule by hand does.
//!
//! `MUTATION=Name`, `MUTATION_RUNS` and `SIM_SEED` as for the router's; `MUTATION_PROMISE=lost` looks for a run that
//! breaks just this promise.

use std::time::Instant;

use muster_router::cache::replica::{Mutation, Rules};
use muster_router::testing::cache::{Options, run, written_behind_a_promise};

use super::number;

/// How many runs a mutation may survive; few in debug builds, which are slow.
const RUNS: u64 = if cfg!(debug_assertions) { 40 } else { 2_000 };

/// The seeds that found a mutation.
const FOUND: &[(Mutation, u64)] = &[
    (Mutation::BlindExecution, 16),
    (Mutation::PutsOnly, 1),
    (Mutation::OutOfOrder, 24),
    (Mutation::QuorumCountsSilence, 632),
    (Mutation::TombstoneDroppedEarly, 1),
    (Mutation::ServeBeforeActive, 3),
    (Mutation::AckBeforeMajority, 10),
    (Mutation::BirthUnasked, 3),
    (Mutation::CopyNotOffered, 4),
    (Mutation::OneCopyIsQuorum, 160),
    (Mutation::TokenIgnored, 1),
    (Mutation::HandOverUnflushed, 124),
    (Mutation::AnswersForgotten, 61),
    (Mutation::OwnersDroppedEarly, 3),
    (Mutation::MinCopiesForgotten, 19),
    (Mutation::ExpectedIgnored, 7),
];

#[test]
fn every_broken_rule_of_the_cache_is_caught() {
    let only = std::env::var("MUTATION").ok();
    let runs = number("MUTATION_RUNS").unwrap_or(RUNS);
    let hook = std::panic::take_hook();
    if only.is_none() {
        std::panic::set_hook(Box::new(|_| {}));
    }
    let asked = |mutation: &&Mutation| only.as_ref().is_none_or(|only| *only == format!("{mutation:?}"));
    let all: Vec<Mutation> = Mutation::ALL.iter().chain(Mutation::BY_HAND).filter(asked).copied().collect();
    let mut survivors = Vec::new();
    for mutation in &all {
        let name = format!("{mutation:?}");
        match by_hand(*mutation).or_else(|| by_seed(*mutation, runs, only.is_some())) {
            Some(how) => println!("cache {name:26} {how}"),
            None => {
                println!("cache {name:26} survived");
                survivors.push(*mutation);
            }
        }
    }
    std::panic::set_hook(hook);
    println!("{} of {} caught, of the cache's", all.len() - survivors.len(), all.len());
    assert!(survivors.is_empty(), "{survivors:?} survived: a hole in the checks");
}

/// What a schedule by hand shows, which shows nothing under the whole protocol.
fn by_hand(mutation: Mutation) -> Option<String> {
    let script = match mutation {
        Mutation::NoEpochCheck => written_behind_a_promise,
        _ => return None,
    };
    script(Rules::all()).expect("the whole protocol keeps its promises");
    let violation = script(Rules::broken(mutation)).err()?;
    // not one of the schedule itself, which did not come that far
    assert_eq!(violation.promise, "fencing", "{violation}");
    Some(format!("schedule by hand: {violation}").chars().take(110).collect())
}

/// The seed and the steps that caught it.
fn by_seed(mutation: Mutation, runs: u64, print: bool) -> Option<String> {
    let began = Instant::now();
    let mut steps = 0;
    let known = FOUND.iter().filter(|(m, _)| *m == mutation).map(|(_, seed)| *seed);
    let first = number("SIM_SEED").unwrap_or(1);
    let promise = std::env::var("MUTATION_PROMISE").ok();
    known.chain(first..first + runs).find_map(|seed| {
        let options = Options::of_seed(seed).rules(Rules::broken(mutation));
        let options = if print { options } else { options.unshortened() };
        match run(&options) {
            Ok(report) => {
                steps += report.steps;
                None
            }
            Err(failure) if promise.as_ref().is_some_and(|only| *only != failure.violation.promise) => None,
            Err(failure) => {
                // the same run under the whole protocol: what is found is the mutation's
                run(&Options::of_seed(seed).unshortened()).expect("the whole protocol keeps its promises");
                if print {
                    println!("{failure}");
                }
                steps += failure.steps;
                let what: String = failure.violation.to_string().chars().take(90).collect();
                Some(format!("simulator, seed {seed}, {steps} steps, {:.1?}: {what}", began.elapsed()))
            }
        }
    })
}
