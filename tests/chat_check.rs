//! The chat example's own check, small enough for every test run, and its command line.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[allow(dead_code)]
#[path = "../examples/chat/app/mod.rs"]
mod app;

use std::io::Write;

use app::check::{self, Plan};
use app::cli::{self, Task};
use app::cluster::{Cluster, Ports};
#[cfg(feature = "nats")]
use app::stage::Place;
use app::{replay, trace};

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_lost_while_a_node_stops_crashes_and_returns() {
    let plan = Plan { messages: 240, rooms: 12, clients_per_node: 4, rooms_per_client: 5, ..Plan::default() };
    let report = check::run(&plan).await.unwrap();
    assert!(report.passed(), "{report}");
    assert_eq!(report.sent, 240);
    let last = report.to_string().lines().last().unwrap().to_owned();
    let due = report.total.should;
    assert_eq!(last, format!("check passed: 240 sent, {due} of {due} deliveries, 0 missed, 0 duplicated"));
}

/// A node ends without a goodbye, and the server that they share is killed and started again, in the middle.
#[cfg(feature = "nats")]
#[tokio::test(flavor = "multi_thread")]
async fn nobody_misses_anything_over_nats() {
    if !app::nats::is_installed("the check over NATS") {
        return;
    }
    let place = Place::Nats { url: None };
    let plan =
        Plan { messages: 600, rooms: 20, clients_per_node: 3, rooms_per_client: 6, place, ..Plan::default() };
    let report = check::run(&plan).await.unwrap();
    assert!(report.passed(), "{report}");
    assert_eq!(report.sent, 600);
}

const TRACE: &str = "minute\troom\tevent\tuser\tbytes
0\tr0\tjoin\tr0u0\t0
0\tr1\tjoin\tr1u0\t0
0\tr0\tjoin\tr0u1\t0
0\tr0\tmsg\tr0u0\t12
0\tr1\tmsg\tr1u0\t0
1\tr0\tjoin\tr0u2\t0
1\tr0\tmsg\tr0u2\t300
2\tr0\tleave\tr0u1\t0
2\tr0\tmsg\tr0u0\t5
";

#[tokio::test(flavor = "multi_thread")]
async fn a_trace_is_replayed_and_counted() {
    let path = std::env::temp_dir().join(format!("muster-chat-trace-{}.tsv", std::process::id()));
    std::fs::File::create(&path).unwrap().write_all(TRACE.as_bytes()).unwrap();
    let report = replay::run(&path, Cluster::start(3, Ports::Any).await.unwrap()).await;
    std::fs::remove_file(&path).unwrap();
    let report = report.unwrap();
    // 2 + 1 + 3 + 2: each message to those who are there, its sender among them.
    assert!(report.passed(), "{report}");
    assert_eq!((report.sent, report.total.should, report.total.did), (4, 8, 8));
}

#[test]
fn a_broken_trace_says_where() {
    let error = |text: &str| trace::parse(text).unwrap_err();
    assert!(error("room\n").contains("the first line"));
    let line = |fields: &str| format!("minute\troom\tevent\tuser\tbytes\n{fields}\n");
    assert!(error(&line("0\tr0\tjoin\tu0")).starts_with("line 2: 4 fields instead of 5"));
    assert!(error(&line("x\tr0\tjoin\tu0\t0")).starts_with("line 2: no minute"));
    assert!(error(&line("0\tr0\tkick\tu0\t0")).contains("join, msg or leave"));
    assert!(error(&line("0\tr0\tmsg\tu0\t-1")).contains("bytes"));
}

#[test]
fn options_are_read_and_bad_ones_named() {
    let parse = |line: &str| cli::parse(line.split_whitespace().map(str::to_owned));
    let options = parse("").unwrap();
    assert_eq!((options.nodes, options.ports), (3, Ports::From(8101)));
    assert_eq!(options.task, Task::Serve { replay: None });
    let options = parse("--nodes=5 --port 9000 --replay t.tsv --speed 2.5").unwrap();
    assert_eq!((options.nodes, options.ports), (5, Ports::From(9000)));
    assert_eq!(options.task, Task::Serve { replay: Some(("t.tsv".into(), 2.5)) });
    assert_eq!(parse("--check").unwrap().task, Task::Check);
    assert_eq!(parse("--check --replay t.tsv").unwrap().task, Task::CheckReplay { file: "t.tsv".into() });
    assert_eq!(parse("--help").unwrap().task, Task::Help);
    for (line, says) in [
        ("--nods 3", "unknown option \"--nods\""),
        ("--nodes", "--nodes needs a value"),
        ("--nodes 0", "--nodes \"0\": a whole number from 1 to 16"),
        ("--nodes 17", "from 1 to 16"),
        ("--nodes three", "\"three\""),
        ("--nodes 3 --nodes 4", "given twice"),
        ("--port 65536", "from 1 to 65535"),
        ("--check=yes", "takes no value"),
        ("--check --nodes 1", "2 to 16"),
        ("--check --port 8101", "any free ports"),
        ("--speed 2", "no --replay"),
        ("--replay t.tsv --speed 0", "above 0"),
        ("--check --replay t.tsv --speed 2", "as fast as it can"),
        ("--transport carrier-pigeon", "memory, tcp or nats"),
        ("--nats nats://127.0.0.1", "is for --transport nats"),
        ("chat.tsv", "unknown option \"chat.tsv\""),
    ] {
        let error = parse(line).unwrap_err();
        assert!(error.contains(says), "{line}: {error}");
    }
}
