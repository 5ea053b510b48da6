//! The router of a busy group dies, hangs or drains: what is lost, and when the last of it comes.

use std::collections::HashMap;

use super::bare::Bare;
use super::lab::{Lab, let_run, one};
use super::many;
use super::words::*;
use crate::support::report::{Report, Row, Target, Unit};
use crate::support::{Round, wanted};

const A_SECOND: u64 = 5000;
const SIZE: usize = 100;
const SUSPECT_AFTER: f64 = 0.5;

/// Caller a, router b, members on a and c.
fn lab() -> (Lab, Groups) {
    let mut lab = Lab::of(&["a", "b", "c"]);
    let groups = one("busy", "b");
    lab.join(&["a", "c"], &groups, 1, Kind::Notes);
    (lab, groups)
}

#[derive(Default)]
struct Books {
    sent: u64,
    lost: u64,
    twice: u64,
    failed: u64,
}

impl Books {
    fn show(&self) -> String {
        format!("of {} deliveries; {} came twice, {} were refused", self.sent * 2, self.twice, self.failed)
    }
}

fn begin(lab: &mut Lab, groups: &Groups) {
    lab.ask("a", Act::Pace { groups: groups.clone(), a_second: A_SECOND, size: SIZE, exactly: false });
    let_run(many(500, 100) as u64);
}

/// Ends the load and closes the books; how long after the fault, or after its own moment if that was later, the
/// latest broadcast came that was due before the fault or in the second after it.
fn end(lab: &mut Lab, fault: Nanos, books: &mut Books) -> Nanos {
    let (sent, failed) = lab.rest("a");
    books.sent += sent;
    books.failed += failed;
    let mut latest = 0;
    for name in ["a", "c"] {
        let mut met: HashMap<u64, u64> = HashMap::new();
        // what a suspect node is kept waiting for comes when its link resumes
        for _ in 0..100 {
            for (number, due, at) in lab.noted(name, true).all {
                *met.entry(number).or_default() += 1;
                if due < fault + 1_000_000_000 {
                    latest = latest.max(at.saturating_sub(fault.max(due)));
                }
            }
            if met.len() as u64 >= sent {
                break;
            }
            let_run(20);
        }
        books.lost += (0..sent).filter(|number| !met.contains_key(number)).count() as u64;
        books.twice += met.values().filter(|count| **count > 1).count() as u64;
    }
    latest
}

fn lost(what: &str, books: &Books) -> Row {
    let target = Target::AtMost(0.0);
    Row::alone(what, Unit::Count, books.lost as f64, &books.show(), target)
}

pub(crate) fn kill(report: &mut Report, bare: &Bare) {
    if !wanted("kill") {
        return;
    }
    let (mut lab, groups) = lab();
    let (mut done, mut books) = (Vec::new(), Books::default());
    for round in 0..many(5, 1) {
        if round > 0 {
            lab.restart("b");
        }
        begin(&mut lab, &groups);
        let mut router = lab.remove("b");
        let fault = now();
        router.kill();
        lab.ready();
        let_run(many(500, 100) as u64);
        let latest = end(&mut lab, fault, &mut books);
        done.push(Round { ours: seconds(latest), floor: bare.close().as_secs_f64() });
    }
    let what = "`kill -9` of the router at 5000 broadcasts/s: the latest delivery";
    let against = "until the socket of a killed process says so";
    report.row(Row::paired(what, Unit::Seconds, &done, against, Target::AtMost(0.025)));
    report.row(lost("`kill -9` of the router: lost", &books));
}

pub(crate) fn freeze(report: &mut Report) {
    if !wanted("freeze") {
        return;
    }
    let (mut lab, groups) = lab();
    let (mut done, mut books) = (Vec::new(), Books::default());
    for _ in 0..many(3, 1) {
        begin(&mut lab, &groups);
        let fault = now();
        lab.node("b").signal("-STOP");
        let_run(1200);
        lab.node("b").signal("-CONT");
        lab.ready();
        let_run(100);
        let latest = end(&mut lab, fault, &mut books);
        done.push(Round { ours: seconds(latest), floor: SUSPECT_AFTER });
    }
    let what = "`SIGSTOP` of the router at 5000 broadcasts/s: the latest delivery";
    report.row(Row::paired(what, Unit::Seconds, &done, "`suspect_after`", Target::AtMost(0.6)));
    report.row(lost("`SIGSTOP` of the router: lost", &books));
}

pub(crate) fn drain(report: &mut Report, bare: &Bare) {
    if !wanted("drain") {
        return;
    }
    let (mut lab, groups) = lab();
    let (mut took, mut late, mut books) = (Vec::new(), Vec::new(), Books::default());
    for round in 0..many(3, 1) {
        if round > 0 {
            lab.restart("b");
        }
        begin(&mut lab, &groups);
        let fault = now();
        let Answer::Took { nanos, .. } = lab.ask("b", Act::Drain) else { panic!("no end") };
        let mut router = lab.remove("b");
        router.ask(&Act::Shutdown);
        lab.ready();
        let_run(many(200, 50) as u64);
        let latest = end(&mut lab, fault, &mut books);
        let floor = seconds(bare.round_trips(1000, SIZE, std::time::Duration::from_millis(200)).0);
        took.push(Round { ours: seconds(nanos), floor });
        late.push(Round { ours: seconds(latest), floor });
    }
    let against = "a bare round trip";
    let row = |what: &str, rounds: &[Round]| Row::paired(what, Unit::Seconds, rounds, against, Target::Shown);
    report.row(row("drain of the router at 5000 broadcasts/s", &took));
    report.row(row("drain of the router: the slowest delivery", &late));
    report.row(lost("drain of the router: lost", &books));
}
