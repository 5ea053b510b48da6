//! The checks are checked: the protocol with one rule broken is found out, for every rule.
//!
//! Most are found by the simulator at random; the seed that found one first is kept, and tried first. Others
//! need so exact an order of events, or so early a look, that a schedule by hand finds them. One shows only
//! between threads, so loom finds it, in a build of its own (`tests/loom.rs`): it is named here and not counted.
//! `MUTATION=Name` tries one and prints its shortened schedule, `MUTATION_RUNS` says how many runs it may survive.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "helpers of tests")]

#[cfg(feature = "cache")]
#[path = "mutations/cache.rs"]
mod cache;
#[cfg(feature = "consensus")]
#[path = "mutations/strong.rs"]
mod strong;

use std::time::{Duration, Instant};

use muster_router::node::message::Message;
use muster_router::node::{Mutation, Rules, Settings};
use muster_router::testing::oracle::Violation;
use muster_router::testing::sim::{CastKind, Cluster, Options, Place, Step, run};
use muster_router::transport::Lane;
use muster_router::transport::link::{LinkMutation, LinkRules};
use muster_router::{Config, Ring};

/// How many runs of the simulator a mutation may survive; few in debug builds, which are slow.
const RUNS: u64 = if cfg!(debug_assertions) { 40 } else { 3_000 };

/// The seeds that found a mutation.
const FOUND: &[(Mutation, u64)] = &[
    (Mutation::NoPrepareGrow, 82),
    (Mutation::NoPrepareShrink, 89),
    (Mutation::UnreadySenderTrusted, 221),
    (Mutation::AnnounceOwed, 29),
    (Mutation::NoWatermark, 36),
    (Mutation::ForgetLost, 5),
    (Mutation::QuietCancel, 107),
    (Mutation::OmitClaiming, 8),
    (Mutation::GatherCut, 3),
    (Mutation::DeltaAlways, 5),
    (Mutation::AckWithoutMark, 251),
    (Mutation::NoHashCheck, 15),
    (Mutation::UnreadyRouterDecides, 3),
    (Mutation::SelfLeftOut, 1),
    (Mutation::AnswerBeforeAck, 3),
    (Mutation::StaleRetractAck, 15),
    (Mutation::ForgetCooldown, 4),
    (Mutation::NotHeldWhileHeld, 4),
    (Mutation::NoFloodOnDeadRouter, 5),
    (Mutation::NoDedupe, 4),
    (Mutation::FailedNotResent, 5),
    (Mutation::FloorRunsAhead, 3),
    (Mutation::DeltaRemoves, 3),
];

/// The same for the link layer, whose mutations only the runs with link layers can show.
const FOUND_IN_LINKS: &[(LinkMutation, u64)] = &[
    (LinkMutation::TakesUnreported, 2),
    (LinkMutation::WritesUntold, 1),
    (LinkMutation::WritesNothingAgain, 1),
    (LinkMutation::WrittenIsReceived, 1),
    (LinkMutation::CountsOneMore, 1),
    (LinkMutation::GivesTwice, 2),
    (LinkMutation::TakesBehindGap, 6),
    (LinkMutation::ReplacesInSilence, 1),
    (LinkMutation::QueueOutlives, 2),
];

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

#[test]
fn every_broken_rule_is_caught() {
    let only = std::env::var("MUTATION").ok();
    let runs = number("MUTATION_RUNS").unwrap_or(RUNS);
    let hook = std::panic::take_hook();
    if only.is_none() {
        std::panic::set_hook(Box::new(|_| {}));
    }
    let mut survivors = Vec::new();
    let mut all = 0;
    for mutation in Mutation::ALL {
        let name = format!("{mutation:?}");
        if only.as_ref().is_some_and(|only| *only != name) {
            continue;
        }
        if *mutation == Mutation::NoSecondLook {
            println!("{name:26} not counted: loom, the_second_look_of_a_decision_is_needed in tests/loom.rs");
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
    let named = |name: &String| LinkMutation::ALL.iter().any(|mutation| format!("{mutation:?}") == *name);
    assert!(all > 0 || only.as_ref().is_some_and(named), "MUTATION names no broken rule: {only:?}");
    println!("{} of {all} caught", all - survivors.len());
    assert!(survivors.is_empty(), "{survivors:?} survived: a hole in the checks");
}

#[test]
fn every_broken_rule_of_the_link_layer_is_caught() {
    let only = std::env::var("MUTATION").ok();
    let runs = number("MUTATION_RUNS").unwrap_or(RUNS);
    let hook = std::panic::take_hook();
    if only.is_none() {
        std::panic::set_hook(Box::new(|_| {}));
    }
    let mut survivors = Vec::new();
    let mut all = 0;
    for mutation in LinkMutation::ALL {
        let name = format!("{mutation:?}");
        if only.as_ref().is_some_and(|only| *only != name) {
            continue;
        }
        all += 1;
        match in_links_by_seed(*mutation, runs, only.is_some()) {
            Some(how) => println!("{name:26} {how}"),
            None => {
                println!("{name:26} survived");
                survivors.push(*mutation);
            }
        }
    }
    std::panic::set_hook(hook);
    println!("{} of {all} caught", all - survivors.len());
    assert!(survivors.is_empty(), "{survivors:?} survived: a hole in the checks");
}

/// As [`by_seed`], with link layers.
fn in_links_by_seed(mutation: LinkMutation, runs: u64, print: bool) -> Option<String> {
    let began = Instant::now();
    let known = FOUND_IN_LINKS.iter().filter(|(m, _)| *m == mutation).map(|(_, seed)| *seed);
    let first = number("SIM_SEED").unwrap_or(1);
    known.chain(first..first + runs).find_map(|seed| {
        let options = Options::of_seed(seed).links(LinkRules::broken(mutation));
        let options = if print { options } else { options.unshortened() };
        let failure = run(&options).err()?;
        let whole = Options::of_seed(seed).links(LinkRules::all()).unshortened();
        run(&whole).expect("the whole link layer keeps its promises");
        if print {
            println!("{failure}");
        }
        let what: String = failure.violation.to_string().chars().take(90).collect();
        Some(format!("simulator, seed {seed}, {} steps, {:.1?}: {what}", failure.steps, began.elapsed()))
    })
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
        Mutation::StaleLeavingAck => (late_leaving_ack, 3, 2),
        Mutation::CommitOnFirstAck => (second_ack_missing, 4, 3),
        Mutation::DrainOutsideHash => (one_has_not_moved_its_groups, 3, 3),
        Mutation::SnapshotKeepsOlder => (row_older_than_a_snapshot, 4, 3),
        Mutation::RepairsIgnored => (lost_row, 2, 2),
        Mutation::LateClaimForgotten => (claim_lands_after_its_time, 2, 2),
        Mutation::StaleClaimAck => (late_claim_ack, 2, 2),
        Mutation::TombstoneDroppedEarly => (long_snapshot, 3, 2),
        Mutation::ClaimWinsEqual => (claim_comes_twice, 3, 2),
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
    (settings.vacancy_cooldown, settings.join_timeout) = (Duration::ZERO, 2 * SECOND);
    settings.flush_interval = SECOND;
    (settings.tombstone_ttl, settings.sweep_interval, settings.chunk_groups) = (9 * SECOND, 5 * SECOND, 1);
    let mut cluster = Cluster::new(places, 0, settings);
    cluster.start_all(0..running)?;
    cluster.run()?;
    Ok(cluster)
}

const SECOND: Duration = Duration::from_secs(1);

/// A group that `from` routes among the places `before`, and `to` among the places `after`.
fn routed(c: &mut Cluster, before: (&[usize], usize), after: (&[usize], usize)) -> usize {
    routed_all(c, before, after, 1)[0]
}

/// So many of them.
fn routed_all(
    c: &mut Cluster,
    before: (&[usize], usize),
    after: (&[usize], usize),
    count: usize,
) -> Vec<usize> {
    let ring = |places: &[usize]| Ring::of(places.iter().map(|p| c.peer(*p).node), c.settings().ring);
    let (old, new) = (ring(before.0), ring(after.0));
    let (from, to) = (c.peer(before.1).node, c.peer(after.1).node);
    let moves = |name: &String| {
        old.router_for(name.as_bytes()) == Some(&from) && new.router_for(name.as_bytes()) == Some(&to)
    };
    let names: Vec<String> = (0..).map(|i| format!("g{i}")).filter(moves).take(count).collect();
    names.iter().map(|name| c.group(name)).collect()
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
    c.pass_time(4 * SECOND)?;
    let source = c.peer(1);
    c.inject(&source, 0, claim.unwrap())?;
    c.run()?;
    c.check_tables()
}

/// 0 begins a round, gives it up and begins another; 1, `Ready` again since, hears nothing of the second one
/// when its acknowledgement of the first one arrives.
fn late_leaving_ack(c: &mut Cluster) -> Result<(), Violation> {
    let g = routed(c, (&[0, 1], 1), (&[0, 1, 2], 2));
    c.start(2)?;
    c.settle(2)?;
    c.tell_up(0, 2)?;
    c.apply(Step::Send(0, 1))?;
    c.deliver(0, 1, Lane::Control)?;
    c.apply(Step::Send(1, 0))?;
    assert!(matches!(c.on_the_way(1, 0, Lane::Control)[..], [Message::LeavingAck { .. }]));
    c.tell_down(0, 2, true)?;
    c.apply(Step::Send(0, 1))?;
    assert!(matches!(c.on_the_way(0, 1, Lane::Control)[..], [Message::Announce { .. }]));
    c.deliver(0, 1, Lane::Control)?;
    c.connect(0, 2)?;
    c.deliver(1, 0, Lane::Control)?;
    c.join(0, g)?;
    between(c, 0, 2)?;
    c.cast(1, g, CastKind::All)?;
    c.run()?;
    c.judge()?;
    c.connect(1, 2)?;
    c.run()?;
    c.check_quiet()
}

/// All that two nodes have to say to each other, and to nobody else.
fn between(c: &mut Cluster, a: usize, b: usize) -> Result<(), Violation> {
    let (x, y) = (a as Place, b as Place);
    for _ in 0..20 {
        for step in [Step::Work(x), Step::Work(y), Step::Send(x, y), Step::Send(y, x)] {
            c.apply(step)?;
        }
        for lane in Lane::ALL {
            c.deliver(a, b, lane)?;
            c.deliver(b, a, lane)?;
        }
    }
    Ok(())
}

/// 0 meets 3; of the two others only 2 has heard that 0 leaves the view, and a member joins at 0.
fn second_ack_missing(c: &mut Cluster) -> Result<(), Violation> {
    let g = routed(c, (&[0, 1, 2], 1), (&[0, 1, 2, 3], 3));
    c.start(3)?;
    c.settle(3)?;
    c.connect(0, 3)?;
    between(c, 0, 2)?;
    c.join(0, g)?;
    between(c, 0, 3)?;
    c.cast(1, g, CastKind::All)?;
    c.run()?;
    c.judge()?;
    c.heal()?;
    c.run()?;
    c.check_quiet()
}

/// 0 drains. 0 and 1 have committed to that; 2, which holds a group that goes from 0 to 1, has not, and what it
/// says of its round comes late.
fn one_has_not_moved_its_groups(c: &mut Cluster) -> Result<(), Violation> {
    let g = routed(c, (&[0, 1, 2], 0), (&[1, 2], 1));
    c.join(2, g)?;
    c.run()?;
    c.drain(0)?;
    c.apply(Step::Send(0, 1))?;
    c.deliver(0, 1, Lane::Control)?;
    c.deliver(0, 1, Lane::Control)?;
    c.apply(Step::Send(1, 2))?;
    c.deliver(1, 2, Lane::Control)?;
    c.apply(Step::Send(2, 1))?;
    c.deliver(2, 1, Lane::Control)?;
    c.apply(Step::Send(0, 2))?;
    c.deliver(0, 2, Lane::Control)?;
    c.deliver(0, 2, Lane::Control)?;
    c.apply(Step::Send(2, 0))?;
    assert!(matches!(
        c.on_the_way(2, 0, Lane::Control)[..],
        [Message::LeavingAck { .. }, Message::Leaving { .. }]
    ));
    c.deliver(2, 0, Lane::Control)?;
    c.hold(2, 0, Lane::Control, true);
    between(c, 0, 1)?;
    c.cast(0, g, CastKind::All)?;
    c.hold(2, 0, Lane::Control, false);
    c.run()?;
    c.judge()?;
    c.check_quiet()
}

/// 1 owes 0 data when `g` goes from 0 to 3, ends and comes back: only a snapshot says that the row is over. No
/// heartbeat has come by then.
fn row_older_than_a_snapshot(c: &mut Cluster) -> Result<(), Violation> {
    let owed = routed(c, (&[0, 1, 2], 2), (&[0, 1], 0));
    let g = routed(c, (&[0, 1], 0), (&[0, 1, 3], 3));
    c.join(1, owed)?;
    c.run()?;
    c.kill(2)?;
    c.hold(1, 0, Lane::Bulk, true);
    c.run()?;
    assert!(!c.on_the_way(1, 0, Lane::Bulk).is_empty());
    let member = c.join(1, g)?.unwrap();
    c.run()?;
    c.start_all([3])?;
    c.run()?;
    c.leave(1, g, member)?;
    c.pass_time(3 * SECOND)?;
    c.kill(3)?;
    c.run()?;
    c.hold(1, 0, Lane::Bulk, false);
    c.run()?;
    c.check_quiet()?;
    c.check_tables()
}

/// A row goes missing, as no fault that we know makes it: the digests find it.
fn lost_row(c: &mut Cluster) -> Result<(), Violation> {
    let g = routed(c, (&[0, 1], 0), (&[0, 1], 0));
    c.join(1, g)?;
    c.run()?;
    let (group, source, version, _) = c.node(0).unwrap().rows().remove(0);
    c.inject(&source, 0, Message::Retract { version, groups: vec![group] })?;
    assert!(c.check_tables().is_err(), "it is missing");
    c.pass_time(60 * SECOND)?;
    c.check_tables()
}

/// A claim lands and its answer takes too long; no heartbeat has come by then.
fn claim_lands_after_its_time(c: &mut Cluster) -> Result<(), Violation> {
    let g = routed(c, (&[0, 1], 0), (&[0, 1], 0));
    c.hold(0, 1, Lane::Control, true);
    c.join(1, g)?;
    c.pass_time(4 * SECOND)?;
    assert_eq!(c.waiting_joins(), 0);
    c.hold(0, 1, Lane::Control, false);
    c.run()?;
    c.check_tables()
}

/// The answer to a claim that timed out and was taken back arrives while the next claim is on its way.
fn late_claim_ack(c: &mut Cluster) -> Result<(), Violation> {
    let g = routed(c, (&[0, 1], 0), (&[0, 1], 0));
    c.hold(0, 1, Lane::Control, true);
    c.join(1, g)?;
    c.pass_time(4 * SECOND)?;
    assert_eq!(c.node(0).unwrap().counts().tombstones, 1, "taken back");
    c.hold(1, 0, Lane::Control, true);
    c.join(1, g)?;
    c.hold(0, 1, Lane::Control, false);
    c.run()?;
    c.cast(0, g, CastKind::All)?;
    c.run()?;
    c.judge()?;
    c.hold(1, 0, Lane::Control, false);
    c.run()?;
    c.check_tables()
}

/// A snapshot in many chunks, one every two seconds, as a slow link carries it; the group of its last chunk is
/// taken back when the first one has arrived.
fn long_snapshot(c: &mut Cluster) -> Result<(), Violation> {
    let groups = routed_all(c, (&[0, 1], 0), (&[0, 1, 2], 2), 24);
    let mut last = None;
    for group in &groups {
        let member = c.join(1, *group)?.unwrap();
        last.get_or_insert((*group, member));
    }
    c.run()?;
    c.start_all([2])?;
    c.hold(1, 2, Lane::Bulk, true);
    c.run()?;
    for nth in 0..12 {
        c.hold(1, 2, Lane::Bulk, false);
        c.deliver(1, 2, Lane::Bulk)?;
        c.hold(1, 2, Lane::Bulk, true);
        if let (0, Some((group, member))) = (nth, last) {
            c.leave(1, group, member)?;
        }
        c.pass_time(2 * SECOND)?;
    }
    c.hold(1, 2, Lane::Bulk, false);
    c.run()?;
    c.check_quiet()?;
    c.check_tables()
}

/// A claim comes again when its group has gone to another router and the row was swept; then the group ends and
/// its router dies.
fn claim_comes_twice(c: &mut Cluster) -> Result<(), Violation> {
    let g = routed(c, (&[0, 1], 0), (&[0, 1, 2], 2));
    c.hold(1, 0, Lane::Control, true);
    let member = c.join(1, g)?.unwrap();
    c.run()?;
    let claim = c.on_the_way(1, 0, Lane::Control).into_iter().find(|m| matches!(m, Message::Claims { .. }));
    c.hold(1, 0, Lane::Control, false);
    c.run()?;
    c.start_all([2])?;
    c.run()?;
    assert_eq!(c.node(0).unwrap().counts().tombstones, 1, "swept");
    c.leave(1, g, member)?;
    c.pass_time(SECOND)?;
    let source = c.peer(1);
    c.inject(&source, 0, claim.unwrap())?;
    c.kill(2)?;
    c.run()?;
    c.check_tables()
}
