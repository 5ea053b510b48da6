//! The example of two regions: its own check in a short form, and that the check can fail.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test that cannot go on says so by panicking"
)]

#[path = "../examples/regions/app/mod.rs"]
mod app;

use app::Broken;
use app::check::{self, Plan, Report};

async fn run(broken: Broken, rounds: u64) -> Report {
    // many members on each node: when one joins, some of them are in groups that now route to itself
    let plan = Plan { rounds, between: 80, groups: 24, members: 16, lose_one_in: 10, broken, tell: false };
    check::run(&plan).await.unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_member_in_either_region_gets_every_broadcast_once_while_both_clusters_change() {
    let report = run(Broken::Nothing, 5).await;
    assert!(report.passed(), "{report}");
    let last = report.to_string().lines().last().unwrap().to_owned();
    let (sent, due, abroad) = (report.totals.sent, report.totals.due, report.totals.abroad);
    let expected = format!(
        "check passed: {sent} sent, {due} of {due} deliveries ({abroad} between regions), 0 missed, 0 duplicated"
    );
    assert_eq!(last, expected);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_gateway_that_trusts_an_old_ring_is_found_by_what_is_missing() {
    let report = run(Broken::TrustsAnOldRing, 2).await;
    assert!(!report.passed(), "{report}");
    assert!(report.totals.missed > 0 && report.totals.duplicated == 0, "{report}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_door_that_forgets_what_it_had_is_found_by_second_copies() {
    let report = run(Broken::ForgetsWhatItHad, 2).await;
    assert!(!report.passed(), "{report}");
    assert!(report.totals.duplicated > 0 && report.totals.missed == 0, "{report}");
}
