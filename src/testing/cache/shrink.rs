//! Makes a failing schedule short: cut at the failure, then drop what is not needed.

use super::cluster::{Cluster, Setup};
use super::{Failure, Options, Step, caught, converge};
use crate::testing::oracle::Violation;

/// How many schedules are tried.
const TRIES: usize = 3_000;

pub(super) fn failure(
    options: &Options,
    setup: &Setup,
    violation: Violation,
    schedule: Vec<Step>,
    steps: u64,
) -> Failure {
    let schedule = match options.shorten {
        true => shorten(options, setup, &violation, schedule),
        false => schedule,
    };
    let again = if options.shorten { replay(options, setup, &schedule, true) } else { None };
    let (shortened, log, stand) = match again {
        Some((_, violation, cluster)) => (violation, cluster.log().to_vec(), cluster.describe()),
        None => (violation.clone(), Vec::new(), String::new()),
    };
    Failure {
        options: options.clone(),
        violation,
        steps,
        setup: format!("{setup:?}"),
        schedule,
        shortened,
        log,
        stand,
    }
}

/// What a schedule breaks, how far it came, and how the nodes stood then.
fn replay(
    options: &Options,
    setup: &Setup,
    schedule: &[Step],
    log: bool,
) -> Option<(usize, Violation, Cluster)> {
    let mut cluster = Cluster::new(setup.clone());
    if log {
        cluster.keep_log();
    }
    if let Err(violation) = caught(|| cluster.boot()) {
        return Some((0, violation, cluster));
    }
    for (index, step) in schedule.iter().enumerate() {
        if let Err(violation) = caught(|| cluster.apply(*step)) {
            return Some((index + 1, violation, cluster));
        }
        if let Err(violation) = caught(|| super::look(&mut cluster, index)) {
            return Some((index + 1, violation, cluster));
        }
    }
    match caught(|| converge::converge(&mut cluster, options.seed)) {
        Ok(_) => None,
        Err(violation) => Some((schedule.len(), violation, cluster)),
    }
}

/// The steps with those of a range left out; waits add up.
fn without(steps: &[Step], start: usize, end: usize) -> Vec<Step> {
    let mut left: Vec<Step> = Vec::with_capacity(steps.len());
    for step in steps[..start].iter().chain(&steps[end..]) {
        match (left.last_mut(), *step) {
            (Some(Step::Time(sum)), Step::Time(more)) if *sum < 20_000 => *sum += more,
            _ => left.push(*step),
        }
    }
    left
}

fn shorten(options: &Options, setup: &Setup, violation: &Violation, steps: Vec<Step>) -> Vec<Step> {
    let mut tries = 0;
    let mut attempt = |schedule: &[Step]| -> Option<usize> {
        tries += 1;
        if tries > TRIES {
            return None;
        }
        let (used, broken, _) = replay(options, setup, schedule, false)?;
        (broken.promise == violation.promise).then_some(used)
    };
    let mut best = steps;
    if let Some(used) = attempt(&best) {
        best.truncate(used);
    }
    let mut size = best.len().div_ceil(2).max(1);
    loop {
        let mut dropped = false;
        // from the end: what comes late depends on what came early
        let mut end = best.len();
        while end > 0 {
            let start = end.saturating_sub(size);
            let shorter = without(&best, start, end);
            if let Some(used) = attempt(&shorter) {
                best = shorter;
                best.truncate(used);
                dropped = true;
            }
            end = start.min(best.len());
        }
        if best.is_empty() || (size == 1 && !dropped) {
            return best;
        }
        size = (size / 2).max(1);
    }
}
