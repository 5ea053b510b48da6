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
use app::hop::{Hop, REMEMBERED, Seen};
use app::node::{Counts, Node};
use app::wide::Wide;
use bytes::Bytes;
use muster_router::testing::conformance::patient_links;
use muster_router::transport::link::LinkConfig;
use muster_router::transport::memory::Network;
use muster_router::{Incarnation, Message, Muster, NodeId, Peer, Status};
use parking_lot::Mutex;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::time::sleep;

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

const PATIENCE: Duration = Duration::from_secs(60);

async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < deadline, "{what}");
        sleep(Duration::from_millis(2)).await;
    }
}

/// One broadcast from abroad waits in a link of x and v that is cut, and is closed by its receipt; the next reaches v by
/// another node. What a member on v has when the link has resumed.
async fn cut_between_two_hops(broken: Broken) -> Vec<Bytes> {
    let id = |name: &str| NodeId::new(name).unwrap();
    let link = LinkConfig { reconnect_grace: PATIENCE, ..patient_links() };
    let (eu, us) = (Network::new(), Network::builder().link(link).build());
    let (wide, counts) = (Wide::default(), Arc::new(Counts::default()));
    let start = async |network: &Network, scope: &str, name: &str, seed: NodeId| {
        let muster = Muster::builder(scope).transport(network.node(name)).start().await.unwrap();
        Node::start(muster, wide.clone(), vec![seed], counts.clone(), broken).await.unwrap()
    };
    let mut nodes = Vec::new();
    for name in ["us-1", "us-2", "us-3"] {
        nodes.push(start(&us, "us", name, id("eu-1")).await);
    }
    for node in &nodes {
        node.muster.until(PATIENCE, |s| s.status == Status::Ready && s.view.len() == 3).await.unwrap();
    }
    // x routes the first group and what is flooded to the doors, another than v the second
    let ring = nodes[0].muster.ring();
    let router = |group: &str| ring.router_for(group.as_bytes()).unwrap().clone();
    let x = router("\0door");
    let rest: Vec<&Arc<Node>> = nodes.iter().filter(|node| *node.muster.node() != x).collect();
    let (y, v) = (rest[0].muster.node(), rest[1]);
    let by = |node: &NodeId| (0..).map(|n| format!("room:{n}")).find(|group| router(group) == *node).unwrap();
    let (first, second) = (by(&x), by(y));
    let origin = start(&eu, "eu", "eu-1", x.clone()).await;
    let got: Arc<Mutex<Vec<Bytes>>> = Arc::default();
    let mut members = Vec::new();
    for group in [&first, &second] {
        let mine = got.clone();
        let hear = move |message: &Message| mine.lock().push(message.payload().clone());
        members.push(v.muster.join_fn(group.clone(), hear).await.unwrap());
    }
    let here = nodes.iter().find(|node| *node.muster.node() == x).unwrap();
    let apart = |from: &Node, to: &Node| from.muster.summary().suspect.contains(to.muster.peer());
    us.cut(x.as_str(), v.muster.node().as_str());
    until("suspect", || apart(here, v) && apart(v, here)).await;
    // the origin asks x, the only node that it knows, with no view: x floods, and a flood does not wait for v
    origin.broadcast(&first, "kept back".into()).await.unwrap();
    origin.broadcast(&second, "by another".into()).await.unwrap();
    until("by another node", || got.lock().contains(&Bytes::from("by another"))).await;
    assert!(!got.lock().contains(&Bytes::from("kept back")));
    us.heal(x.as_str(), v.muster.node().as_str());
    until("resumed", || !apart(here, v)).await;
    // goes after what waited, and is waited for
    here.muster.send_to_node(v.muster.node().as_str(), "\0after", Bytes::new()).await.unwrap();
    let all = got.lock().clone();
    for node in nodes.iter().chain([&origin]) {
        node.stop().await;
        node.muster.shutdown().await;
    }
    all
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn what_a_cut_link_kept_back_is_delivered_though_later_numbers_came_by_other_nodes() {
    let got = cut_between_two_hops(Broken::Nothing).await;
    assert_eq!(got, ["by another", "kept back"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_door_that_takes_receipts_for_arrivals_loses_what_a_cut_link_kept_back() {
    let got = cut_between_two_hops(Broken::TakesReceiptsForArrivals).await;
    assert_eq!(got, ["by another"]);
}

fn hop(number: u64, oldest: u64) -> Hop {
    let origin = Peer::new(NodeId::new("eu-1").unwrap(), Incarnation::MIN);
    Hop { origin, number, oldest, group: Bytes::new(), payload: Bytes::new() }
}

#[test]
fn a_copy_that_a_suspect_link_kept_is_new_though_its_origin_has_closed_it() {
    // 2 comes by another node, after 1 was answered for and while its copy for this node still waits in a link
    let mut seen = Seen::new(Broken::Nothing);
    let had = [hop(2, 2), hop(1, 1), hop(1, 1), hop(2, 2)].map(|hop| seen.first(&hop));
    assert_eq!(had, [true, true, false, false]);
    let mut seen = Seen::new(Broken::TakesReceiptsForArrivals);
    assert_eq!([hop(2, 2), hop(1, 1)].map(|hop| seen.first(&hop)), [true, false]);
}

#[test]
fn what_is_remembered_of_an_origin_is_bounded() {
    let mut seen = Seen::new(Broken::Nothing);
    let last = 2 * REMEMBERED;
    assert!(seen.first(&hop(last, 1)));
    let had = [last - REMEMBERED, last - REMEMBERED - 1].map(|number| seen.first(&hop(number, 1)));
    assert_eq!(had, [true, false]);
}
