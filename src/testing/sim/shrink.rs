//! Makes a failing schedule short: cut at the failure, then drop what is not needed.

use super::{Cluster, Failure, Options, Setup, Step, caught, converge};
use crate::testing::oracle::Violation;

/// How many schedules are tried.
const TRIES: usize = 5_000;

pub(super) fn failure(
    options: &Options,
    setup: &Setup,
    violation: Violation,
    log: Vec<Step>,
    steps: u64,
) -> Failure {
    let (schedule, shortened, stand) = match options.shorten {
        true => shorten(options, setup, &violation, log),
        false => (log, violation.clone(), String::new()),
    };
    Failure { options: options.clone(), violation, nodes: setup.nodes, steps, schedule, shortened, stand }
}

/// What a schedule breaks, how far it came, and how the nodes stood then.
fn replay(options: &Options, setup: &Setup, schedule: &[Step]) -> Option<(usize, Violation, Cluster)> {
    let mut cluster = setup.build().ok()?;
    for (index, step) in schedule.iter().enumerate() {
        if let Err(violation) = caught(|| cluster.apply(*step)) {
            return Some((index + 1, violation, cluster));
        }
    }
    match caught(|| converge::converge(&mut cluster, options.seed)) {
        Ok(_) => None,
        Err(violation) => Some((schedule.len(), violation, cluster)),
    }
}

fn shorten(
    options: &Options,
    setup: &Setup,
    violation: &Violation,
    log: Vec<Step>,
) -> (Vec<Step>, Violation, String) {
    let mut tries = 0;
    let mut best = log;
    let mut found = (violation.clone(), String::new());
    let mut attempt = |schedule: &[Step], found: &mut (Violation, String)| -> Option<usize> {
        tries += 1;
        if tries > TRIES {
            return None;
        }
        let (used, broken, cluster) = replay(options, setup, schedule)?;
        if broken.promise != violation.promise {
            return None;
        }
        *found = (broken, cluster.describe());
        Some(used)
    };
    if let Some(used) = attempt(&best, &mut found) {
        best.truncate(used);
    }
    // waits add up: two steps of time are one
    let mut merged: Vec<Step> = Vec::with_capacity(best.len());
    for step in &best {
        match (merged.last_mut(), *step) {
            (Some(Step::Time(sum)), Step::Time(more)) => *sum += more,
            _ => merged.push(*step),
        }
    }
    if let Some(used) = attempt(&merged, &mut found) {
        best = merged;
        best.truncate(used);
    }
    let mut size = best.len().div_ceil(2).max(1);
    loop {
        let mut dropped = false;
        // from the end: what comes late depends on what came early
        let mut end = best.len();
        while end > 0 {
            let start = end.saturating_sub(size);
            let mut shorter: Vec<Step> = best[..start].to_vec();
            for step in &best[end..] {
                match (shorter.last_mut(), *step) {
                    (Some(Step::Time(sum)), Step::Time(more)) => *sum += more,
                    _ => shorter.push(*step),
                }
            }
            if let Some(used) = attempt(&shorter, &mut found) {
                best = shorter;
                best.truncate(used);
                dropped = true;
            }
            end = start.min(best.len());
        }
        if size == 1 && !dropped {
            break;
        }
        if !dropped || size > 1 {
            size = (size / 2).max(1);
        }
        if best.is_empty() {
            break;
        }
    }
    (best, found.0, found.1)
}
