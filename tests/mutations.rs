//! The checks are checked: the protocol with one rule broken is found out, for every rule.
//!
//! Most are found by the simulator at random; the seed that found one first is kept, and tried first. Four
//! need so exact an order of events that a schedule by hand finds them. `MUTATION=Name` tries one and prints
//! its shortened schedule, `MUTATION_RUNS` says how many runs it may survive.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "helpers of tests")]

use std::time::{Duration, Instant};

use muster_router::node::message::Message;
use muster_router::node::{Mutation, Rules, Settings};
use muster_router::testing::oracle::Violation;
use muster_router::testing::sim::{CastKind, Cluster, Options, run};
use muster_router::transport::Lane;
use muster_router::{Config, Ring};

/// How many runs of the simulator a mutation may survive; few in debug builds, which are slow.
const RUNS: u64 = if cfg!(debug_assertions) { 40 } else { 3_000 };

/// The seeds that found a mutation.
const FOUND: &[(Mutation, u64)] = &[
    (Mutation::NoPrepareGrow, 82),
    (Mutation::NoPrepareShrink, 89),
    (Mutation::UnreadySenderTrusted, 61),
    (Mutation::AnnounceOwed, 29),
    (Mutation::NoWatermark, 43),
    (Mutation::ForgetLost, 5),
    (Mutation::QuietCancel, 22),
    (Mutation::OmitClaiming, 8),
    (Mutation::GatherCut, 3),
    (Mutation::DeltaAlways, 5),
    (Mutation::AckWithoutMark, 251),
    (Mutation::NoHashCheck, 20),
    (Mutation::UnreadyRouterDecides, 3),
    (Mutation::SelfLeftOut, 1),
    (Mutation::AnswerBeforeAck, 3),
    (Mutation::StaleRetractAck, 15),
    (Mutation::ForgetCooldown, 4),
    (Mutation::NotHeldWhileHeld, 4),
    (Mutation::NoFloodOnDeadRouter, 4),
    (Mutation::NoDedupe, 4),
    (Mutation::FailedNotResent, 5),
    (Mutation::FloorRunsAhead, 3),
];

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

#[test]
fn every_broken_rule_is_caught() {
    let only = std::env::var("MUTATION").ok();
    let runs = number("MUTATION_RUNS").unwrap_or(RUNS);
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| {}));
    let mut survivors = Vec::new();
    let mut all = 0;
    for mutation in Mutation::ALL {
        let name = format!("{mutation:?}");
        if only.as_ref().is_some_and(|only| *only != name) {
            continue;
        }
        all += 1;
        match by_hand(*mutation).or_else(|| by_seed(*mutation, runs, only.is_some())) {
            Some(how) => println!("{name:26} {how}"),
            None => {
                println!("{name:26} survived");
                survivors.push(*mutation);
            }
        }
    }
    std::panic::set_hook(hook);
    assert!(all > 0, "MUTATION names no broken rule: {only:?}");
    println!("{} of {all} caught", all - survivors.len());
    assert!(survivors.is_empty(), "{survivors:?} survived: a hole in the checks");
}

/// The layer, the seed and the steps that caught it.
fn by_seed(mutation: Mutation, runs: u64, print: bool) -> Option<String> {
    let began = Instant::now();
    let mut steps = 0;
    let known = FOUND.iter().filter(|(m, _)| *m == mutation).map(|(_, seed)| *seed);
    let first = number("SIM_SEED").unwrap_or(1);
    known.chain(first..first + runs).find_map(|seed| {
        let options = Options::of_seed(seed).rules(Rules::broken(mutation));
        let options = if print { options } else { options.unshortened() };
        match run(&options) {
            Ok(report) => {
                steps += report.steps;
                None
            }
            Err(failure) => {
                // the same run under the whole protocol: what is found is the mutation's
                run(&Options::of_seed(seed).unshortened()).expect("the whole protocol keeps its promises");
                steps += failure.steps;
                if print {
                    println!("{failure}");
                }
                let what: String = failure.violation.to_string().chars().take(90).collect();
                Some(format!("simulator, seed {seed}, {steps} steps, {:.1?}: {what}", began.elapsed()))
            }
        }
    })
}

/// Schedules by hand, each with the same result under the whole protocol: nothing is broken.
fn by_hand(mutation: Mutation) -> Option<String> {
    type Script = fn(&mut Cluster) -> Result<(), Violation>;
    let (script, places, running): (Script, _, _) = match mutation {
        Mutation::NamesOnlyHash => (reborn_under_its_name, 3, 3),
        Mutation::OldRoundApplied => (late_snapshot, 4, 2),
        Mutation::DeleteInsteadOfTombstone | Mutation::ClaimAlwaysWins => (late_claim, 2, 2),
        _ => return None,
    };
    let play = |rules| {
        let mut cluster = cluster(places, running, rules).expect("a whole cluster starts");
        (script(&mut cluster), cluster.steps())
    };
    play(Rules::all()).0.expect("the whole protocol keeps its promises");
    let (outcome, steps) = play(Rules::broken(mutation));
    let what: String = outcome.err()?.to_string().chars().take(90).collect();
    Some(format!("schedule by hand, {steps} steps: {what}"))
}

fn cluster(places: usize, running: usize, rules: Rules) -> Result<Cluster, Violation> {
    let mut settings = Settings::from(&Config::default());
    (settings.shards, settings.ring.vnodes, settings.rules) = (1, 16, rules);
    let mut cluster = Cluster::new(places, 0, settings);
    cluster.start_all(0..running)?;
    cluster.run()?;
    Ok(cluster)
}

/// A group that `from` routes among the places `before`, and `to` among the places `after`.
fn routed(c: &mut Cluster, before: (&[usize], usize), after: (&[usize], usize)) -> usize {
    let ring = |places: &[usize]| Ring::of(places.iter().map(|p| c.peer(*p).node), c.settings().ring);
    let (old, new) = (ring(before.0), ring(after.0));
    let (from, to) = (c.peer(before.1).node, c.peer(after.1).node);
    let moves = |name: &String| {
        old.router_for(name.as_bytes()) == Some(&from) && new.router_for(name.as_bytes()) == Some(&to)
    };
    let name = (0..).map(|i| format!("g{i}")).find(moves).unwrap();
    c.group(&name)
}

/// 2 dies and comes back; 0 meets the new life, 1 still takes the old one for alive and decides for it.
fn reborn_under_its_name(c: &mut Cluster) -> Result<(), Violation> {
    let g = routed(c, (&[0, 1, 2], 1), (&[0, 1, 2], 1));
    c.crash(2)?;
    c.start(2)?;
    c.settle(2)?;
    c.join(2, g)?;
    c.tell_up(2, 0)?;
    c.tell_up(0, 2)?;
    c.tell_up(2, 1)?;
    c.run()?;
    c.cast(0, g, CastKind::All)?;
    c.run()?;
    c.judge()?;
    c.heal()?;
    c.run()?;
    c.check_quiet()
}

/// A snapshot arrives again when a later round and the group's end have long been known.
fn late_snapshot(c: &mut Cluster) -> Result<(), Violation> {
    let g = routed(c, (&[0, 1], 0), (&[0, 1, 2, 3], 2));
    let member = c.join(1, g)?.unwrap();
    c.run()?;
    c.start(2)?;
    c.connect(0, 2)?;
    c.connect(1, 2)?;
    c.settle(2)?;
    c.hold(1, 2, Lane::Bulk, true);
    c.run()?;
    let first = c.on_the_way(1, 2, Lane::Bulk);
    assert!(!first.is_empty());
    c.hold(1, 2, Lane::Bulk, false);
    c.start_all([3])?;
    c.run()?;
    c.leave(1, g, member)?;
    c.pass_time(Duration::from_secs(120))?;
    let source = c.peer(1);
    for message in first {
        c.inject(&source, 2, message)?;
    }
    c.run()?;
    c.check_quiet()?;
    c.check_tables()
}

/// A claim arrives again when the group was given back long ago.
fn late_claim(c: &mut Cluster) -> Result<(), Violation> {
    let g = routed(c, (&[0, 1], 0), (&[0, 1], 0));
    c.hold(1, 0, Lane::Control, true);
    let member = c.join(1, g)?.unwrap();
    c.run()?;
    let claim = c.on_the_way(1, 0, Lane::Control).into_iter().find(|m| matches!(m, Message::Claims { .. }));
    c.hold(1, 0, Lane::Control, false);
    c.run()?;
    c.leave(1, g, member)?;
    c.pass_time(Duration::from_secs(40))?;
    let source = c.peer(1);
    c.inject(&source, 0, claim.unwrap())?;
    c.run()?;
    c.check_tables()
}
