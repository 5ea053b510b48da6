//! What is kept and allocated, by a counting allocator: of the whole handle, as a server uses it. The exact bounds of
//! the routing core alone are asserted in `tests/footprint.rs`.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs, reason = "a bench")]

#[path = "support/mod.rs"]
mod support;

use std::collections::HashMap;
use std::time::Duration;

use allocation_counter::{AllocationInfo, measure};
use muster_router::node::{JoinStart, Node, Settings, Ticket};
use muster_router::transport::memory::Network;
use muster_router::{Config, Group, Incarnation, Membership, Muster, NodeId, Peer, Route, Status};
use tokio::runtime::Runtime;

use support::Round;
use support::report::{Report, Row, Target, Unit};

const PATIENCE: Duration = Duration::from_secs(60);

/// Tables grow by doubling: several sizes, of which the middle one counts.
fn sizes() -> Vec<usize> {
    let largest = if support::smoke() { 2_000 } else { 100_000 };
    (4..=8).map(|eighths| largest * eighths / 8).collect()
}

/// Two nodes on one thread, where every allocation is counted.
struct Pair {
    runtime: Runtime,
    nodes: [Muster; 2],
}

impl Pair {
    fn new() -> Self {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let nodes = runtime.block_on(async {
            let network = Network::new();
            let start = |name: &str| Muster::builder("bench").transport(network.node(name)).start();
            let nodes = [start("a").await.unwrap(), start("b").await.unwrap()];
            for node in &nodes {
                let whole = node.until(PATIENCE, |s| s.status == Status::Ready && s.view.len() == 2);
                whole.await.unwrap();
            }
            nodes
        });
        Self { runtime, nodes }
    }

    /// So many groups that this node routes.
    fn routed_by(&self, node: usize, count: usize) -> Vec<Group> {
        let wanted = self.nodes[node].node();
        let routed =
            |group: &Group| matches!(self.nodes[0].router(group), Route::Router(by) if by == *wanted);
        (0u64..).map(|i| Group::from(format!("room:{i:010}"))).filter(routed).take(count).collect()
    }

    /// What is kept after a member of the first node has joined each of these, guards aside: in bytes for each.
    fn kept(&self, groups: &[Group]) -> f64 {
        let mut members: Vec<Membership> = Vec::with_capacity(groups.len());
        let info = measure(|| {
            self.runtime.block_on(async {
                for group in groups {
                    members.push(self.nodes[0].join_fn(group.clone(), |_| ()).await.unwrap());
                }
            });
        });
        info.bytes_current as f64 / groups.len() as f64
    }
}

/// The routing core alone: what it keeps for a group with one member.
fn core_kept(groups: &[Group]) -> f64 {
    let me = Peer::new(NodeId::new("a").unwrap(), Incarnation::MIN);
    let node: Node<u64> = Node::new(me, Settings::from(&Config::default()), Duration::ZERO);
    let now = Duration::from_millis(1);
    node.handle_discovery_settled(now);
    let info = measure(|| {
        for group in groups {
            let number = node.next_member_number();
            let joined = node.join(group.clone(), number, number, Ticket(number), now);
            assert!(matches!(joined, JoinStart::Joined));
            while node.poll_effect().is_some() {}
        }
    });
    info.bytes_current as f64 / groups.len() as f64
}

fn name_kept(count: usize) -> f64 {
    let names: Vec<String> = (0..count).map(|i| format!("room:{i:010}")).collect();
    let mut groups: Vec<Group> = Vec::with_capacity(count);
    measure(|| groups.extend(names.iter().map(|name| Group::from(name.as_str())))).bytes_current as f64
        / count as f64
}

fn map_kept<K: std::hash::Hash + Eq + Clone>(keys: &[K]) -> f64 {
    let mut map: HashMap<K, u64> = HashMap::new();
    let info = measure(|| map.extend(keys.iter().map(|key| (key.clone(), 1))));
    info.bytes_current as f64 / keys.len() as f64
}

fn memory(report: &mut Report) {
    let mut rows: [Vec<Round>; 4] = Default::default();
    for size in sizes() {
        let pair = Pair::new();
        let (own, others) = (pair.routed_by(0, size), pair.routed_by(1, size));
        let numbers: Vec<u64> = (0..size as u64).collect();
        let of_map = map_kept(&own);
        let group = pair.kept(&own);
        // the router's row is what is kept in addition when another node routes, but for its own copy of the name
        let row = Pair::new().kept(&others) - group - name_kept(size);
        let member = Pair::new().kept(&vec![own[0].clone(); size]);
        rows[0].push(Round { ours: row, floor: of_map });
        rows[1].push(Round { ours: core_kept(&own), floor: of_map });
        rows[2].push(Round { ours: group, floor: of_map });
        rows[3].push(Round { ours: member, floor: map_kept(&numbers) });
    }
    let of_map = "`HashMap<Group, u64>`, an entry";
    let shown = [
        ("memory: a row at the router, whole handle", of_map, Target::AtMost(120.0)),
        ("memory: a held group with one member, routing core", of_map, Target::AtMost(250.0)),
        ("memory: a held group with one member, whole handle", of_map, Target::AtMost(250.0)),
        ("memory: a further member of a group, whole handle", "`HashMap<u64, u64>`, an entry", Target::Shown),
    ];
    for (rounds, (what, against, target)) in rows.iter().zip(shown) {
        report.row(Row::paired(what, Unit::Bytes, rounds, against, target));
    }
}

/// Of one call, after enough of them.
fn allocations(mut call: impl FnMut()) -> f64 {
    const CALLS: u64 = 1000;
    (0..CALLS).for_each(|_| call());
    let info: AllocationInfo = measure(|| (0..CALLS).for_each(|_| call()));
    info.count_total as f64 / CALLS as f64
}

fn counts(report: &mut Report) {
    let pair = Pair::new();
    let (own, others) = (pair.routed_by(0, 1).remove(0), pair.routed_by(1, 1).remove(0));
    let mut members = Vec::new();
    for group in [&own, &others] {
        for node in &pair.nodes {
            members.push(pair.runtime.block_on(node.join_fn(group.clone(), |_| ())).unwrap());
        }
    }
    let [a, _] = &pair.nodes;
    let sender = a.sender_hash();
    let payload = bytes::Bytes::from(vec![7; 100]);
    let cast = |group: &Group| {
        let receipt = pair.runtime.block_on(a.broadcast(group.clone(), payload.clone()));
        assert_eq!(receipt.unwrap().nodes, Some(2));
    };
    for (what, counted, target) in [
        ("allocations: `router(group)`", allocations(|| drop(a.router(&own))), Target::AtMost(0.0)),
        (
            "allocations: `targets(group)`",
            allocations(|| drop(a.targets(&own, sender).unwrap())),
            Target::AtMost(1.0),
        ),
        (
            "allocations: `local_members(group)`",
            allocations(|| drop(a.local_members(&own))),
            Target::AtMost(0.0),
        ),
        ("allocations: broadcast to 2 nodes, the caller routes", allocations(|| cast(&own)), Target::Shown),
        ("allocations: broadcast to 2 nodes, the other routes", allocations(|| cast(&others)), Target::Shown),
    ] {
        report.row(Row::alone(what, Unit::Count, counted, "none; counted on all nodes and tasks", target));
    }
    drop(members);
}

fn main() {
    let mut report = Report::new("memory");
    if support::wanted("memory") {
        memory(&mut report);
    }
    if support::wanted("allocations") {
        counts(&mut report);
    }
    report.finish();
}
