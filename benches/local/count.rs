//! Instructions of one call, counted by callgrind: figures that no busy machine changes. This program is started again
//! under it, once for so many calls of a case and once for twice as many.

use std::collections::HashMap;
use std::hint::black_box;
use std::process::Command;

use bytes::Bytes;
use dashmap::DashMap;
use futures_util::FutureExt;
use hashring::HashRing;
use muster_router::{BroadcastId, Group, Message, NodeId, Route};
use parking_lot::Mutex;
use xxhash_rust::xxh3::Xxh3DefaultBuilder;

use crate::support::report::{Report, Row, Target, Unit};
use crate::support::{Round, wanted};

const ASKED: &str = "MUSTER_BENCH_COUNT";
/// Tells that this machine must have callgrind.
const REQUIRED: &str = "MUSTER_REQUIRE_ALL";
const CALLS: u64 = 2000;
const NODES: usize = 4;
const MAILBOXES: usize = 100;
/// Messages that wait for a member before they are taken out.
const WAITING: u64 = 100;

/// If this process is one that is counted: does what it is for. `false` if it is not.
pub(crate) fn counted() -> bool {
    let Ok(asked) = std::env::var(ASKED) else { return false };
    let (case, calls) = asked.split_once(' ').expect("a case and a number");
    run(case, calls.parse().expect("a number"));
    true
}

pub(crate) fn rows(report: &mut Report) {
    if !wanted("instructions") {
        return;
    }
    if Command::new("valgrind").arg("--version").output().is_err() {
        assert!(std::env::var_os(REQUIRED).is_none(), "callgrind is not installed");
        println!("instructions are not counted: there is no valgrind here");
        return;
    }
    for (case, what, against) in [
        ("router", "instructions: `router(group)`, 4 nodes", "`HashRing::get` of as many entries"),
        ("targets", "instructions: `targets(group)`, 3 holders", "a read of a `DashMap`"),
        ("join", "instructions: join of a held group and leave", "a mutex, an insert and a removal"),
        ("fan_out", "instructions: broadcast to a mailbox, read", "mpsc `try_send` and `try_recv`"),
    ] {
        if crate::support::smoke() && case != "join" {
            continue;
        }
        let round = Round { ours: instructions(case), floor: instructions(&format!("bare_{case}")) };
        report.row(Row::paired(what, Unit::Count, &[round], against, Target::Shown));
    }
}

fn instructions(case: &str) -> f64 {
    let calls = if crate::support::smoke() { CALLS / 10 } else { CALLS };
    let [once, twice] = [calls, 2 * calls].map(|calls| collected(case, calls));
    (twice - once) / calls as f64
}

fn collected(case: &str, calls: u64) -> f64 {
    let mut valgrind = Command::new("valgrind");
    valgrind.args(["--tool=callgrind", "--callgrind-out-file=/dev/null"]);
    valgrind.arg(std::env::current_exe().unwrap()).env(ASKED, format!("{case} {calls}"));
    let said = String::from_utf8(valgrind.output().unwrap().stderr).unwrap();
    let collected = said.lines().find_map(|line| line.split_once("Collected : "));
    let (_, count) = collected.unwrap_or_else(|| panic!("{said}"));
    count.trim().parse().unwrap()
}

fn run(case: &str, calls: u64) {
    let groups = super::names(64);
    let at = |call: u64| &groups[call as usize % groups.len()];
    match case {
        "router" => {
            let runtime = super::runtime();
            let nodes = super::cluster(&runtime, NODES);
            (0..calls).for_each(|call| drop(black_box(nodes[0].router(at(call)))));
        }
        "bare_router" => {
            let mut ring: HashRing<(usize, u32), Xxh3DefaultBuilder> =
                HashRing::with_hasher(Xxh3DefaultBuilder);
            ring.batch_add((0..NODES).flat_map(|node| (0..128).map(move |vnode| (node, vnode))).collect());
            for call in 0..calls {
                black_box(ring.get(&at(call).as_bytes()).copied());
            }
        }
        "targets" => targets(calls),
        "bare_targets" => {
            let held: DashMap<Group, Vec<NodeId>, Xxh3DefaultBuilder> =
                DashMap::with_hasher(Xxh3DefaultBuilder);
            groups.iter().for_each(|group| drop(held.insert(group.clone(), Vec::new())));
            (0..calls).for_each(|call| {
                black_box(held.get(at(call).as_bytes()).map(|row| row.len()));
            });
        }
        "join" => {
            let runtime = super::runtime();
            let node = super::cluster(&runtime, 1).remove(0);
            let join = |group: &Group| node.join_fn(group.clone(), |_| ()).now_or_never().unwrap().unwrap();
            let held: Vec<_> = groups
                .iter()
                .map(|group| runtime.block_on(node.join_fn(group.clone(), |_| ())).unwrap())
                .collect();
            (0..calls).for_each(|call| join(at(call)).leave());
            drop(held);
        }
        "bare_join" => {
            let map: Mutex<HashMap<u64, u64>> = Mutex::default();
            (0..calls).for_each(|call| {
                black_box(map.lock().insert(call, call));
                black_box(map.lock().remove(&call));
            });
        }
        "fan_out" | "bare_fan_out" => fan_out(case == "fan_out", calls),
        other => panic!("no case {other}"),
    }
}

fn targets(calls: u64) {
    let runtime = super::runtime();
    let nodes = super::cluster(&runtime, NODES);
    let me = nodes[0].node().clone();
    let routed = |group: &Group| matches!(nodes[0].router(group), Route::Router(node) if node == me);
    let group = super::names(1000).into_iter().find(routed).unwrap();
    let join = |node: &muster_router::Muster| runtime.block_on(node.join_fn(group.clone(), |_| ())).unwrap();
    let members: Vec<_> = nodes[1..].iter().map(join).collect();
    let sender = nodes[0].sender_hash();
    (0..calls).for_each(|_| drop(black_box(nodes[0].targets(&group, sender).unwrap())));
    drop(members);
}

/// One call is one mailbox.
fn fan_out(ours: bool, calls: u64) {
    let runtime = super::runtime();
    let node = super::cluster(&runtime, 1).remove(0);
    let payload = Bytes::from(vec![7; 100]);
    let casts = calls / MAILBOXES as u64;
    let mut inboxes: Vec<_> =
        (0..MAILBOXES).map(|_| runtime.block_on(node.subscribe("hall")).unwrap()).collect();
    let (senders, mut receivers) = super::bare_senders();
    let id = BroadcastId::new(node.peer().clone(), 0);
    for cast in 0..casts {
        if ours {
            assert_eq!(node.broadcast_local("hall", payload.clone()), MAILBOXES);
        } else {
            let message = Message::new("hall", payload.clone(), id.clone(), Vec::new());
            senders.iter().take(MAILBOXES).for_each(|sender| sender.try_send(message.clone()).unwrap());
        }
        if cast % WAITING == WAITING - 1 || cast == casts - 1 {
            for _ in 0..=cast % WAITING {
                if ours {
                    inboxes.iter_mut().for_each(|inbox| drop(inbox.try_recv().unwrap()));
                } else {
                    receivers.iter_mut().take(MAILBOXES).for_each(|inbox| drop(inbox.try_recv().unwrap()));
                }
            }
        }
    }
}
