//! Start, end, and start again.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use futures_util::FutureExt;
use muster_router::transport::Lane;
use muster_router::transport::link::LinkConfig;
use muster_router::transport::memory::Network;
use muster_router::*;
use support::*;

fn tasks() -> usize {
    tokio::runtime::Handle::current().metrics().num_alive_tasks()
}

#[tokio::test(start_paused = true)]
async fn shutdown_ends_every_task() {
    let network = Network::new();
    let before = tasks();
    for round in 0..3 {
        let nodes = cluster(&network, ["a", "b", "c"]).await;
        let mut inbox = nodes[1].subscribe("g").await.unwrap();
        nodes[0].broadcast("g", "x").await.unwrap();
        assert!(tasks() > before && nodes[0].summary().tasks > 0);
        for node in &nodes {
            node.shutdown().await;
            assert_eq!(node.summary().tasks, 0);
        }
        eventually("no task is left", || tasks() == before).await;
        assert_eq!(inbox.recv().await.unwrap().payload(), "x", "round {round}");
        assert_eq!(inbox.recv().await, None);
        assert_eq!(inbox.closed_reason(), Some(ClosedReason::Stopped));
    }
}

#[tokio::test(start_paused = true)]
async fn the_last_clone_dropped_stops_the_scope() {
    let network = Network::new();
    let before = tasks();
    let [a, b] = cluster(&network, ["a", "b"]).await;
    let second = a.clone();
    let membership = a.join("g", Counter::default()).await.unwrap();
    let inbox = a.subscribe("g").await.unwrap();
    let mut events = a.events();
    drop(a);
    assert_eq!(b.broadcast("g", "x").await.unwrap().nodes, Some(1), "a clone is left");
    // guards, subscriptions and event readers do not keep it alive
    drop(second);
    settle(std::slice::from_ref(&b)).await;
    while let Some(event) = events.recv().await {
        if event == Event::Stopped {
            break;
        }
    }
    assert_eq!(events.recv().await, None);
    assert_eq!(inbox.closed_reason(), Some(ClosedReason::Stopped));
    drop((membership, inbox));
    b.shutdown().await;
    eventually("no task is left", || tasks() == before).await;
}

#[test]
fn handles_and_guards_may_be_dropped_outside_the_runtime() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let network = Network::new();
    let (a, guard, inbox) = runtime.block_on(async {
        let a = start(&network, "a").await;
        a.until_ready(PATIENCE).await.unwrap();
        let guard = a.join("g", Counter::default()).await.unwrap();
        let inbox = a.subscribe("g").await.unwrap();
        (a, guard, inbox)
    });
    // reads, sends and leaves work on any thread
    a.try_broadcast("g", "x").unwrap();
    assert_eq!(a.local_member_count("g"), 2);
    drop(guard);
    assert_eq!(a.local_member_count("g"), 1);
    drop(inbox);
    assert_eq!(a.local_member_count("g"), 0);
    let mut changes = a.changes();
    drop(a);
    runtime.block_on(async {
        tokio::time::timeout(PATIENCE, changes.wait_for(|s| s.stopped)).await.unwrap().unwrap();
    });
    drop(runtime);
}

#[test]
fn a_runtime_that_is_dropped_first_leaves_nobody_waiting() {
    let network = Network::new();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let (a, guard) = runtime.block_on(async {
        let a = start(&network, "a").await;
        let guard = a.join("g", Counter::default()).await.unwrap();
        (a, guard)
    });
    drop(runtime);
    let other = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    other.block_on(async {
        tokio::time::timeout(PATIENCE, a.shutdown()).await.expect("it is over");
        assert_eq!(a.broadcast("g", "x").await, Err(BroadcastError::Stopped));
    });
    drop(guard);
    drop(a);
}

#[tokio::test(start_paused = true)]
async fn after_shutdown_results_say_stopped_and_the_rest_is_empty() {
    let network = Network::new();
    let [a, b] = cluster(&network, ["a", "b"]).await;
    let member = a.new_member();
    let guard = a.join("g", Counter::default()).await.unwrap();
    let other = a.new_member();
    a.shutdown().await;
    a.shutdown().await;

    assert_eq!(a.join("g", Counter::default()).await.unwrap_err(), JoinError::Stopped);
    assert_eq!(a.join_fn("g", |_: &Message| ()).await.unwrap_err(), JoinError::Stopped);
    assert_eq!(a.join_as("g", member, Counter::default()).await.unwrap_err(), JoinError::Stopped);
    assert_eq!(a.subscribe("g").await.unwrap_err(), JoinError::Stopped);
    assert_eq!(a.broadcast("g", "x").await.unwrap_err(), BroadcastError::Stopped);
    let options = BroadcastOptions::default().delivery(Delivery::AtMostOnce);
    assert_eq!(a.broadcast_with("g", "x", options).await.unwrap_err(), BroadcastError::Stopped);
    assert_eq!(a.try_broadcast("g", "x"), Err(TryBroadcastError::Stopped));
    assert_eq!(a.send_to_node("b", "g", "x").await.unwrap_err(), BroadcastError::Stopped);
    assert_eq!(a.broadcast_local("g", "x"), 0);
    assert_eq!(a.router("g"), Route::Flood(Arc::new([])));
    assert_eq!(a.targets("g", b.view_hash()), Err(Flood));
    assert!(!a.can_decide(b.view_hash()));
    assert_eq!(a.occupancy("g"), []);
    assert_eq!((a.local_members("g").len(), a.local_member_count("g")), (0, 0));
    assert!(!a.is_local_member("g", guard.id()) && !a.is_local_member("g", &other));
    assert!(a.members().is_empty() && a.connected().is_empty() && a.ring().is_empty());
    assert_eq!((a.status(), a.view_hash()), (Status::Converging, ViewHash::UNSETTLED));
    assert_eq!(a.sender_hash(), ViewHash::UNSETTLED);
    let error = a.until_ready(PATIENCE).await.unwrap_err();
    assert!(error.stopped && !error.is_retryable());
    assert!(a.changes().borrow().stopped);
    assert_eq!(a.events().recv().await, None);
    a.drain(PATIENCE).await.expect("nothing to drain");
    let summary = a.summary();
    assert!(summary.stopped && summary.tasks == 0 && summary.holds.members == 0 && summary.memberships == 0);
    assert!(a.dump().to_string().contains("stopped"));
    drop(guard);
    settle(&[b]).await;
}

#[tokio::test(start_paused = true)]
async fn the_same_transport_value_starts_again() {
    let network = Network::new();
    let transport = Arc::new(network.node("a"));
    let b = start(&network, "b").await;
    let mut last = None;
    for round in 0..5 {
        let a = Muster::builder("rooms").transport(transport.clone()).start().await.unwrap();
        settle(&[a.clone(), b.clone()]).await;
        let mut inbox = a.subscribe("g").await.unwrap();
        b.broadcast("g", round.to_string()).await.unwrap();
        assert_eq!(waiting(&mut inbox), [round.to_string()]);
        assert!(last < Some(a.peer().incarnation), "a new life");
        last = Some(a.peer().incarnation);
        a.shutdown().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn hazard_30_stopped_while_many_tasks_call_and_started_again() {
    let network = Network::new();
    let transport = Arc::new(network.node("a"));
    let b = start(&network, "b").await;
    for _ in 0..8 {
        let a = Muster::builder("rooms").transport(transport.clone()).start().await.unwrap();
        settle(&[a.clone(), b.clone()]).await;
        let begun = Arc::new(AtomicUsize::new(0));
        let counter = Counter::default();
        let callers: Vec<_> = (0..12)
            .map(|task| {
                let (a, begun, counter) = (a.clone(), begun.clone(), counter.clone());
                tokio::spawn(async move {
                    let mut guards = Vec::new();
                    for i in 0.. {
                        let group = format!("{}", (task + i) % 5);
                        begun.fetch_add(1, Ordering::SeqCst);
                        let stopped = match task % 6 {
                            0 => a.broadcast(&group, "x").await.is_err(),
                            1 => match a.join(&group, counter.clone()).await {
                                Ok(guard) => {
                                    guards.push(guard);
                                    false
                                }
                                Err(_) => true,
                            },
                            2 => a.subscribe(&group).await.is_err(),
                            3 => a.try_broadcast(&group, "x") == Err(TryBroadcastError::Stopped),
                            4 => a.send_to_node("b", &group, "x").await == Err(BroadcastError::Stopped),
                            _ => {
                                drop((a.router(&group), a.occupancy(&group), a.summary(), a.members()));
                                a.summary().stopped
                            }
                        };
                        if stopped {
                            break;
                        }
                        tokio::task::yield_now().await;
                    }
                    drop(guards);
                })
            })
            .collect();
        eventually("they are at it", || begun.load(Ordering::SeqCst) > 300).await;
        a.shutdown().await;
        for caller in callers {
            tokio::time::timeout(PATIENCE, caller).await.expect("nobody waits for ever").expect("no panic");
        }
        assert_eq!(counter.others(), 0, "no subscriber is kept");
        let summary = a.summary();
        assert_eq!((summary.tasks, summary.memberships, summary.joins_waiting), (0, 0, 0));
    }
    settle(&[b]).await;
}

#[tokio::test(start_paused = true)]
async fn calls_that_wait_are_ended_by_the_shutdown() {
    let network = Network::new();
    let (transport, valves) = Valved::new(&network, "a");
    let a = Muster::builder("rooms").transport(transport).start().await.unwrap();
    let b = start(&network, "b").await;
    settle(&[a.clone(), b.clone()]).await;
    let group = group_routed_by(&a, "b", "g");
    valves.shut("b", Lane::Control);
    let join = tokio::spawn({
        let (a, group) = (a.clone(), group.clone());
        async move { a.subscribe(&group).await.map(drop) }
    });
    // the acknowledgement of this one cannot come
    let (b_transport_is_plain, _) = (&b, ());
    let _inbox = b_transport_is_plain.subscribe(&group).await.unwrap();
    valves.shut("b", Lane::Data);
    let no_room = tokio::spawn({
        let (a, group) = (a.clone(), group.clone());
        async move { a.broadcast(&group, "x").await }
    });
    let stopped = Arc::new(AtomicBool::new(false));
    let ready = tokio::spawn({
        let (a, stopped) = (a.clone(), stopped.clone());
        async move {
            let result = a.until(Duration::from_secs(1_000_000), |s| s.view.len() > 7).await;
            stopped.store(result.is_err_and(|e| e.stopped), Ordering::SeqCst);
        }
    });
    tokio::task::yield_now().await;
    assert_eq!(a.summary().joins_waiting, 1);
    a.shutdown().await;
    assert_eq!(join.await.unwrap(), Err(JoinError::Stopped));
    assert_eq!(no_room.await.unwrap(), Err(BroadcastError::Stopped));
    ready.await.unwrap();
    assert!(stopped.load(Ordering::SeqCst));
}

#[tokio::test(start_paused = true)]
async fn a_broadcast_that_waits_for_its_receipt_is_interrupted_by_the_shutdown() {
    let network = Network::new();
    let (transport, valves) = Valved::new(&network, "b");
    let a = start(&network, "a").await;
    let b = Muster::builder("rooms").transport(transport).start().await.unwrap();
    settle(&[a.clone(), b.clone()]).await;
    let group = group_routed_by(&a, "b", "g");
    // the router has it and cannot answer
    valves.shut("a", Lane::Control);
    let mut broadcast = Box::pin(a.broadcast(&group, "x"));
    assert!((&mut broadcast).now_or_never().is_none());
    a.shutdown().await;
    assert_eq!(broadcast.await, Err(BroadcastError::Interrupted));
}

#[tokio::test(start_paused = true)]
async fn a_crash_of_the_router_loses_no_broadcast() {
    let network = Network::new();
    let [a, b, c] = cluster(&network, ["a", "b", "c"]).await;
    let group = group_routed_by(&a, "b", "g");
    let mut inbox = c.subscribe(&group).await.unwrap();
    let casts: Vec<_> = (0..100)
        .map(|i| {
            let (a, group) = (a.clone(), group.clone());
            tokio::spawn(async move { a.broadcast(&group, i.to_string()).await.map(drop) })
        })
        .collect();
    tokio::task::yield_now().await;
    network.crash("b");
    for cast in casts {
        cast.await.unwrap().expect("goes another way");
    }
    let mut got = waiting(&mut inbox);
    got.sort_by_key(|text| text.parse::<u32>().unwrap());
    assert_eq!(got, (0..100).map(|i| i.to_string()).collect::<Vec<_>>());
    settle(&[a.clone(), c.clone()]).await;
    assert_eq!(a.broadcast(&group, "after").await.unwrap().decision, Decision::Targeted);
    drop(b);
}

#[tokio::test(start_paused = true)]
async fn a_node_that_goes_away_before_it_acknowledges_is_told() {
    let network = Network::new();
    let (transport, valves) = Valved::new(&network, "b");
    let a = start(&network, "a").await;
    let b = Muster::builder("rooms").transport(transport).start().await.unwrap();
    settle(&[a.clone(), b.clone()]).await;
    valves.shut("a", Lane::Control);
    let mut send = Box::pin(a.send_to_node("b", "g", "x"));
    assert!((&mut send).now_or_never().is_none());
    network.crash("b");
    let error = send.await.unwrap_err();
    assert_eq!(error, BroadcastError::NodeLost { node: b.node().clone() });
    assert!(error.is_retryable());
}

#[tokio::test(start_paused = true)]
async fn drain_hands_the_routing_over_and_names_who_has_not_taken_it() {
    let network = Network::new();
    let (transport, valves) = Valved::new(&network, "b");
    let a = start(&network, "a").await;
    let b = Muster::builder("rooms").transport(transport).start().await.unwrap();
    settle(&[a.clone(), b.clone()]).await;
    valves.shut("a", Lane::Control);
    let error = a.drain(Duration::from_secs(2)).await.unwrap_err();
    assert_eq!(error.waiting_for, [b.node().clone()]);
    assert!(error.is_retryable());
    valves.open("a", Lane::Control);
    a.drain(PATIENCE).await.expect("now it has");
    settle(&[a.clone(), b.clone()]).await;
    assert_eq!(a.ring().nodes(), [b.node().clone()]);
    a.drain(PATIENCE).await.expect("a second time does no harm");
    a.shutdown().await;
    settle(&[b]).await;
}

#[tokio::test(start_paused = true)]
async fn the_last_node_can_drain() {
    let network = Network::new();
    let [a] = cluster(&network, ["a"]).await;
    let mut inbox = a.subscribe("g").await.unwrap();
    a.drain(PATIENCE).await.unwrap();
    a.until_ready(PATIENCE).await.unwrap();
    a.broadcast("g", "x").await.unwrap();
    assert_eq!(waiting(&mut inbox), ["x"]);
}

/// P1 and P2 on real threads: whoever has joined before a broadcast begins gets it, once, while nodes come and go.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn p1_p2_hold_on_many_threads_while_nodes_come_and_go() {
    let network = Network::new();
    let nodes = cluster(&network, ["a", "b", "c"]).await;
    let done = Arc::new(AtomicBool::new(false));
    let callers: Vec<_> = (0..9usize)
        .map(|task| {
            let (here, there) = (nodes[task % 3].clone(), nodes[(task / 3) % 3].clone());
            let done = done.clone();
            tokio::spawn(async move {
                let mut rounds = 0;
                let mut flooded = 0;
                while !done.load(Ordering::SeqCst) {
                    let group = format!("{task}/{}", rounds % 4);
                    let mut inbox = there.subscribe(&group).await.expect("joined");
                    for i in 0..3 {
                        let receipt = here.broadcast(&group, format!("{rounds}.{i}")).await.expect("sent");
                        flooded += usize::from(receipt.decision == Decision::Flooded);
                    }
                    // a receipt does not wait for a node that is suspect just now, so neither does this
                    let mut got = Vec::new();
                    for _ in 0..3 {
                        got.push(next(&mut inbox).await);
                    }
                    got.extend(waiting(&mut inbox));
                    got.sort();
                    let expected: Vec<String> = (0..3).map(|i| format!("{rounds}.{i}")).collect();
                    assert_eq!(got, expected, "each once");
                    rounds += 1;
                }
                (rounds, flooded)
            })
        })
        .collect();
    for round in 0..8 {
        let guest = start(&network, &format!("guest{}", round % 3)).await;
        let size = 4;
        guest.until(PATIENCE, |s| s.status == Status::Ready && s.view.len() == size).await.unwrap();
        let _inbox = guest.subscribe("0/0").await.unwrap();
        if round % 2 == 0 {
            guest.shutdown().await
        } else {
            network.crash(guest.node().as_str())
        }
        settle(&nodes).await;
    }
    done.store(true, Ordering::SeqCst);
    let (mut rounds, mut flooded) = (0, 0);
    for caller in callers {
        let (r, f) = caller.await.expect("no missed and no second delivery");
        rounds += r;
        flooded += f;
    }
    assert!(rounds > 100 && flooded > 0, "{rounds} rounds, {flooded} flooded");
}

// caught by: queued broadcasts that run only if the member's own scope still does
#[tokio::test(start_paused = true)]
async fn what_a_member_of_a_scope_that_is_gone_sends_into_another_one_is_sent() {
    let network = Network::new();
    let live = start(&network, "l").await;
    let mut inbox = live.subscribe("g").await.unwrap();
    let other = Muster::builder("gone").transport(Network::new().node("g")).start().await.unwrap();
    let speaker = live.clone();
    let membership = other
        .join_fn("x", move |_| speaker.try_broadcast("g", "from inside").expect("there is room"))
        .await
        .unwrap();
    let member = other.local_members("x").iter().next().cloned().unwrap();
    let origin = other.peer().clone();
    drop(membership);
    other.shutdown().await;
    drop(other);
    member.handle.deliver(&Message::new("x", "m", BroadcastId::new(origin, 1), Vec::new()));
    assert_eq!(next(&mut inbox).await, "from inside");
}

// caught by: a receipt for one node that looks whether the peer is connected, and not whether it still is
#[tokio::test(start_paused = true)]
async fn a_node_that_lost_its_link_and_has_another_one_does_not_count_as_having_the_message() {
    let link =
        LinkConfig { ping_interval: None, reconnect_grace: Duration::from_secs(1), ..LinkConfig::default() };
    let network = Network::builder().link(link).build();
    let [b, z] = cluster(&network, ["b", "z"]).await;
    let mut inbox = b.subscribe("g").await.unwrap();
    settle(&[b.clone(), z.clone()]).await;
    // b has given z up when z, which still waits for the old link, hears of the new one
    network.cut_seen_by("b", "z");
    let sender = z.clone();
    let sending = tokio::spawn(async move { sender.send_to_node("b", "g", "x").await });
    eventually("b gives z up", || b.summary().connected.is_empty()).await;
    network.heal("b", "z");
    let result = sending.await.unwrap();
    pass(Duration::from_secs(2)).await;
    let got = !waiting(&mut inbox).is_empty();
    assert!(got || result.is_err(), "{result:?}, and it is lost");
}
