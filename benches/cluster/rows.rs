//! Joins, broadcasts and a change of the cluster, with everybody alive.

use std::time::Duration;

use super::bare::Bare;
use super::lab::{Lab, let_run, one};
use super::many;
use super::words::*;
use crate::support::report::{Report, Row, Target, Unit};
use crate::support::{Round, median, wanted};

const SIZE: usize = 100;
const NODES: [&str; 3] = ["a", "b", "c"];

fn rounds() -> usize {
    many(5, 1)
}

fn took(answer: &Answer) -> (u64, Nanos) {
    match answer {
        Answer::Took { count, nanos } => (*count, *nanos),
        other => panic!("{other:?}"),
    }
}

/// Members of groups that nobody held, on a node that does not route them.
pub(crate) fn joins(report: &mut Report, bare: &Bare) {
    if !wanted("joins") {
        return;
    }
    const CALLERS: usize = 64;
    let mut lab = Lab::of(&["a", "b"]);
    let count = many(40_000, 500);
    let (mut done, mut spent) = (Vec::new(), Vec::new());
    for round in 0..rounds() {
        let groups = Groups { prefix: format!("join{round}:"), count, router: Some("b".into()) };
        let (before, busy) = (lab.bytes("a"), lab.busy());
        let act = Act::Join { groups, members: 1, callers: CALLERS, kind: Kind::Counts };
        let (joined, nanos) = took(&lab.ask("a", act));
        let (after, busy) = (lab.bytes("a"), lab.busy() - busy);
        let each = |after: u64, before: u64| ((after - before) / joined) as usize;
        let (answer, request) = (each(after.0, before.0), each(after.1, before.1));
        let floor = bare.ping_pongs(CALLERS, request, answer, Duration::from_nanos(nanos));
        done.push(Round { ours: joined as f64 / seconds(nanos), floor });
        spent.push(seconds(busy) / joined as f64);
    }
    report.row(Row::paired(
        "first joins, remote router, TCP, 64 callers",
        Unit::PerSecond,
        &done,
        "ping-pong of as many bytes by as many callers",
        Target::AtLeast(150e3),
    ));
    let what = "one first join, processor time of both processes";
    report.row(Row::alone(what, Unit::Seconds, median(spent), "none", Target::Shown));
}

/// Broadcasts that are acknowledged, from all nodes at once, as many as they take.
fn saturate(
    lab: &mut Lab,
    groups: &Groups,
    members: u64,
    callers: usize,
    millis: u64,
) -> (u64, Nanos, Nanos) {
    let before: u64 = lab.counted(&NODES, 0).iter().map(|(count, _)| count).sum();
    let began = now();
    let act = Act::Saturate { groups: groups.clone(), callers, size: SIZE, millis };
    let done: Vec<_> = lab.ask_all(&NODES, &act).iter().map(took).collect();
    let sent: u64 = done.iter().map(|(count, _)| count).sum();
    let longest = done.iter().map(|(_, nanos)| *nanos).max().expect("somebody");
    let expected = before + sent * members * NODES.len() as u64;
    let counted = lab.counted(&NODES, expected);
    let all: u64 = counted.iter().map(|(count, _)| count).sum();
    assert_eq!(all, expected, "every broadcast reaches every member once");
    let last = counted.iter().map(|(_, at)| *at).max().expect("somebody");
    (sent, longest, last - began)
}

fn shown(groups: usize) -> String {
    if groups == 1 { "those to one group".into() } else { format!("those to {groups}") }
}

pub(crate) fn broadcasts(report: &mut Report, bare: &Bare) {
    if !wanted("broadcasts") {
        return;
    }
    let mut lab = Lab::of(&NODES);
    let against = "frames a second of a bare pair that fills its buffers";
    for (what, prefix, count) in [
        ("broadcasts, 3 processes, 100 B, 1 member a node, one group", "hot", 1),
        ("broadcasts, the same over 96 groups", "wide", 96),
    ] {
        let groups = Groups { prefix: prefix.into(), count, router: None };
        lab.join(&NODES, &groups, 1, Kind::Counts);
        let (mut done, mut spent) = (Vec::new(), Vec::new());
        for _ in 0..rounds() {
            let before = lab.busy();
            let (sent, nanos, _) = saturate(&mut lab, &groups, 1, 512, many(700, 50) as u64);
            let busy = seconds(lab.busy() - before) / sent as f64;
            let (floor, busy_floor) = bare.frames(SIZE, Duration::from_millis(many(300, 20) as u64));
            done.push(Round { ours: sent as f64 / seconds(nanos), floor });
            spent.push(Round { ours: busy, floor: busy_floor });
        }
        report.row(Row::paired(what, Unit::PerSecond, &done, against, Target::AtLeast(450e3)));
        let what = format!("one broadcast of {}, processor time of all processes", shown(count));
        report.row(Row::paired(&what, Unit::Seconds, &spent, "that of a bare frame", Target::Shown));
    }
}

/// From a caller by another router to a third node that has the only member.
pub(crate) fn latency(report: &mut Report, bare: &Bare) {
    if !wanted("latency") {
        return;
    }
    let mut lab = Lab::of(&NODES);
    let groups = one("far", "b");
    lab.join(&["c"], &groups, 1, Kind::Notes);
    let (mut half, mut most) = (Vec::new(), Vec::new());
    let millis = many(1500, 100) as u64;
    for _ in 0..rounds() {
        lab.ask("a", Act::Pace { groups: groups.clone(), a_second: 1000, size: SIZE, exactly: true });
        let_run(millis);
        let (sent, failed) = lab.rest("a");
        let noted = lab.noted("c", false);
        assert_eq!((noted.count, failed), (sent, 0), "every broadcast arrives once");
        let (p50, p99) = bare.round_trips(1000, SIZE, Duration::from_millis(millis));
        half.push(Round { ours: seconds(noted.p50), floor: seconds(p50) });
        most.push(Round { ours: seconds(noted.p99), floor: seconds(p99) });
    }
    let against = "a bare round trip at the same pace";
    let row = |quantile, rounds, target| {
        let what = format!("broadcast to a third node, 1000/s, {quantile}");
        Row::paired(&what, Unit::Seconds, rounds, &format!("{quantile} of {against}"), target)
    };
    report.row(row("p50", &half, Target::RatioAtMost(2.5)));
    report.row(row("p99", &most, Target::Shown));
}

/// A hundred tasks with channels on each node.
pub(crate) fn fan_out(report: &mut Report, bare: &Bare) {
    if !wanted("fan_out_cluster") {
        return;
    }
    const MEMBERS: u64 = 100;
    let mut lab = Lab::of(&NODES);
    let groups = one("crowd", "b");
    lab.join(&NODES, &groups, MEMBERS as usize, Kind::Reads);
    let mut done = Vec::new();
    let mut casts = Vec::new();
    for _ in 0..rounds() {
        let (sent, _, nanos) = saturate(&mut lab, &groups, MEMBERS, 32, many(700, 50) as u64);
        let floor = bare.fan_out(SIZE, Duration::from_millis(many(300, 20) as u64));
        let deliveries = sent * MEMBERS * NODES.len() as u64;
        done.push(Round { ours: deliveries as f64 / seconds(nanos), floor });
        casts.push(sent as f64 / seconds(nanos));
    }
    let what = format!(
        "deliveries, 100 reading tasks on each of 3 nodes ({:.1} k broadcasts/s)",
        median(casts) / 1000.0
    );
    let against = "a bare connection into 100 channels that tasks read, one process";
    report.row(Row::paired(&what, Unit::PerSecond, &done, against, Target::Shown));
}

/// A third node comes and goes while the first one holds many groups, and the second one works.
pub(crate) fn rebalance(report: &mut Report, bare: &Bare, count: usize) {
    if !wanted("rebalance") {
        return;
    }
    let (shown, ready_target) = if count > 100_000 { ("1 M", 1.5) } else { ("100 k", 0.1) };
    let mut lab = Lab::of(&["a", "b"]);
    let groups = Groups { prefix: "held".into(), count: many(count, 2_000), router: None };
    lab.join(&["a"], &groups, 1, Kind::Counts);
    let (mut joining, mut leaving, mut join_stall, mut cast_stall) = (vec![], vec![], vec![], vec![]);
    let (mut failed, mut calls) = (0, 0);
    for round in 0..many(3, 1) {
        let process = super::process::Process::spawn("node", "c");
        let rest = many(400, 50) as u64;
        // the same probes while nothing happens
        lab.ask("b", Act::Probe { prefix: format!("calm{round}:") });
        let_run(rest);
        let calm = lab.probed("b");
        lab.ask("b", Act::Probe { prefix: format!("busy{round}:") });
        let_run(rest / 4);
        let began = lab.start("c", process);
        let ready = lab.ready();
        let (bytes_in, bytes_out) = lab.bytes("c");
        let_run(rest / 4);
        let left = now();
        let mut gone = lab.remove("c");
        gone.ask(&Act::Drain);
        gone.ask(&Act::Shutdown);
        let without = lab.ready();
        let_run(rest / 4);
        let busy = lab.probed("b");
        drop(gone);
        let floor = bare.transfer((bytes_in + bytes_out) as usize).as_secs_f64();
        joining.push(Round { ours: seconds(ready - began), floor });
        leaving.push(Round { ours: seconds(without.saturating_sub(left)), floor });
        join_stall.push(Round { ours: seconds(busy.slowest_join), floor: seconds(calm.slowest_join) });
        cast_stall.push(Round { ours: seconds(busy.slowest_cast), floor: seconds(calm.slowest_cast) });
        failed += busy.failed;
        calls += busy.joins + busy.casts;
    }
    let sent = "the same bytes over one connection";
    let calm = "the slowest of as many while nothing happens";
    let mut row = |what: &str, rounds: &[Round], against: &str, target| {
        let what = format!("{shown} groups held, {what}");
        report.row(Row::paired(&what, Unit::Seconds, rounds, against, target));
    };
    row("a node joins: all Ready", &joining, sent, Target::AtMost(ready_target));
    row("it drains and leaves: all Ready", &leaving, sent, Target::AtMost(ready_target));
    row("slowest join meanwhile", &join_stall, calm, Target::AtMost(0.02));
    row("slowest broadcast meanwhile", &cast_stall, calm, Target::AtMost(0.02));
    let what = format!("{shown} groups held, calls that failed meanwhile, of {calls}");
    report.row(Row::alone(&what, Unit::Count, failed as f64, "none", Target::AtMost(0.0)));
}

/// Whole rooms, whose users live on three nodes.
pub(crate) fn trace(report: &mut Report, bare: &Bare) {
    if !wanted("trace") {
        return;
    }
    const CALLERS: usize = 64;
    let (mut done, mut heard, mut failed) = (Vec::new(), Vec::new(), 0);
    for _ in 0..many(2, 1) {
        let mut lab = Lab::of(&NODES);
        for (index, name) in NODES.iter().enumerate() {
            lab.node(name).tell(&Act::Replay { nodes: NODES.len(), index, callers: CALLERS });
        }
        let mut all = Replayed::default();
        for name in NODES {
            let Answer::Replayed(one) = lab.node(name).hear() else { panic!("no end") };
            all.events += one.events;
            all.says += one.says;
            all.bytes += one.bytes;
            all.failed += one.failed;
            all.nanos = all.nanos.max(one.nanos);
        }
        let deliveries: u64 = lab.counted(&NODES, 0).iter().map(|(count, _)| count).sum();
        failed += all.failed;
        let mean = (all.bytes / all.says.max(1)) as usize;
        let floor = bare.ping_pongs(CALLERS * NODES.len(), mean + 30, 10, Duration::from_millis(500));
        done.push(Round { ours: all.events as f64 / seconds(all.nanos), floor });
        heard.push(deliveries as f64 / seconds(all.nanos));
    }
    let kind = if std::env::var_os("MUSTER_BENCH_TRACE").is_some() { "recorded" } else { "made up" };
    let what = format!(
        "chat trace ({kind}), 3 nodes: events, {:.1} M deliveries/s, {failed} failed",
        median(heard) / 1e6
    );
    let against = "ping-pong of as many bytes by as many callers";
    report.row(Row::paired(&what, Unit::PerSecond, &done, against, Target::Shown));
}
