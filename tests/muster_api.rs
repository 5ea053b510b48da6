//! The public handle, as users see it.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use futures_util::{FutureExt, StreamExt};
use muster_router::transport::Lane;
use muster_router::transport::memory::Network;
use muster_router::*;
use support::*;

#[tokio::test(start_paused = true)]
async fn a_broadcast_reaches_every_member_on_every_node_once() {
    let network = Network::new();
    let nodes = cluster(&network, ["a", "b", "c"]).await;
    let mut inboxes = Vec::new();
    for node in &nodes {
        inboxes.push(node.subscribe("room").await.expect("joined"));
        inboxes.push(node.subscribe("room").await.expect("joined"));
    }
    for (i, node) in nodes.iter().enumerate() {
        let receipt = node.broadcast("room", format!("from {i}")).await.expect("sent");
        assert_eq!(receipt.decision, Decision::Targeted);
        assert_eq!(receipt.nodes, Some(3));
        assert_eq!(receipt.id.origin, *node.peer());
    }
    for inbox in &mut inboxes {
        assert_eq!(waiting(inbox), ["from 0", "from 1", "from 2"]);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 3)]
async fn it_works_on_a_multi_thread_runtime() {
    let network = Network::new();
    let [a, b] = cluster(&network, ["a", "b"]).await;
    let mut inbox = b.subscribe_with("room", MailboxOptions::default().capacity(2000)).await.unwrap();
    let mut tasks = Vec::new();
    for task in 0..10 {
        let a = a.clone();
        tasks.push(tokio::spawn(async move {
            for i in 0..100 {
                a.broadcast("room", format!("{task}/{i}")).await.unwrap();
            }
        }));
    }
    for task in tasks {
        task.await.unwrap();
    }
    let mut got: BTreeMap<String, Vec<usize>> = BTreeMap::new();
    for _ in 0..1000 {
        let text = next(&mut inbox).await;
        let (task, i) = text.split_once('/').unwrap();
        got.entry(task.into()).or_default().push(i.parse().unwrap());
    }
    assert_eq!(got.len(), 10);
    for (task, order) in got {
        assert_eq!(order, (0..100).collect::<Vec<_>>(), "task {task}: in order, each once");
    }
    assert_eq!(inbox.try_recv(), None);
}

// ---- counting members

#[tokio::test(start_paused = true)]
async fn members_are_counted_on_all_nodes_whoever_asks_and_whoever_routes() {
    let network = Network::new();
    let nodes = cluster(&network, ["a", "b", "c"]).await;
    for router in ["a", "b", "c"] {
        let group = group_routed_by(&nodes[0], router, "g");
        let mut inboxes = vec![nodes[1].subscribe(&group).await.unwrap()];
        for _ in 0..2 {
            inboxes.push(nodes[2].subscribe(&group).await.unwrap());
        }
        for node in &nodes {
            let counted = node.member_count(&group).await.unwrap();
            assert_eq!((counted.count, counted.missing), (3, vec![]), "routed by {router}");
        }
        drop(inboxes);
        assert_eq!(nodes[0].member_count(&group).await.unwrap().count, 0);
    }
    assert_eq!(nodes[0].member_count("nobody's").await.unwrap().count, 0);
    let error = nodes[0].member_count("").await.unwrap_err();
    assert!(matches!(error, CountError::Name(_)), "{error}");
    nodes[0].shutdown().await;
    assert_eq!(nodes[0].member_count("g").await, Err(CountError::Stopped));
}

/// No node can be sure of the holders: all are asked.
#[tokio::test(start_paused = true)]
async fn members_are_counted_while_the_cluster_changes() {
    let network = Network::new();
    let [a, b, c] = cluster(&network, ["a", "b", "c"]).await;
    let _inboxes = [b.subscribe("g").await.unwrap(), c.subscribe("g").await.unwrap()];
    // b and c do not reach each other: neither is ready, a is not either
    network.cut("b", "c");
    a.until(PATIENCE, |s| s.status != Status::Ready).await.unwrap();
    eventually("b has lost c", || b.connected().len() == 1).await;
    let counted = a.member_count("g").await.unwrap();
    assert_eq!((counted.count, counted.missing), (2, vec![]));
}

#[tokio::test(start_paused = true)]
async fn bc_25_nodes_that_are_gone_cost_their_part_of_the_answer_and_no_more() {
    let network = Network::new();
    let nodes = cluster(&network, ["a", "b", "c", "d", "e"]).await;
    let group = group_routed_by(&nodes[0], "a", "g");
    let mut inboxes = Vec::new();
    for node in &nodes {
        inboxes.push(node.subscribe(&group).await.unwrap());
    }
    for gone in ["c", "d", "e"] {
        network.freeze(gone);
    }
    let start = tokio::time::Instant::now();
    let counted = nodes[0].member_count(&group).await.unwrap();
    assert_eq!(counted.count, 2);
    assert_eq!(counted.missing, ["c", "d", "e"].map(|name| NodeId::new(name).unwrap()));
    assert!(start.elapsed() <= Config::default().rpc_timeout, "took {:?}", start.elapsed());
    // once they are known to be down nobody waits for them
    settle(&nodes[..2]).await;
    let start = tokio::time::Instant::now();
    let counted = nodes[0].member_count(&group).await.unwrap();
    assert_eq!((counted.count, counted.missing), (2, vec![]));
    assert!(start.elapsed() < Duration::from_millis(100), "took {:?}", start.elapsed());
}

// ---- broadcasts and their options

#[tokio::test(start_paused = true)]
async fn the_options_of_a_broadcast_do_what_they_say() {
    let network = Network::new();
    let [a, b] = cluster(&network, ["a", "b"]).await;
    let mut here = a.subscribe("room").await.unwrap();
    let mut there = b.subscribe("room").await.unwrap();

    let options = BroadcastOptions::default().except(here.id().clone()).header("k", "v");
    a.broadcast_with("room", "1", options).await.unwrap();
    let options = BroadcastOptions::default().except(there.id().clone());
    a.try_broadcast_with("room", "2", options).unwrap();
    let options = BroadcastOptions::default().delivery(Delivery::AtMostOnce);
    let receipt = a.broadcast_with("room", "3", options).await.unwrap();
    assert_eq!((receipt.decision, receipt.nodes), (Decision::Unknown, None));
    // a later acknowledged broadcast of the same caller is behind it
    a.broadcast("room", "4").await.unwrap();

    let first = there.recv().await.unwrap();
    assert_eq!(first.payload(), "1");
    assert_eq!(first.header("k").unwrap(), "v");
    assert_eq!(first.header("none"), None);
    assert_eq!((first.origin(), first.group().as_bytes()), (a.node(), b"room".as_slice()));
    assert_eq!(waiting(&mut there), ["3", "4"]);
    assert_eq!(waiting(&mut here), ["2", "3", "4"]);
}

#[tokio::test(start_paused = true)]
async fn local_broadcasts_and_sends_to_a_node_go_there_only() {
    let network = Network::new();
    let [a, b, c] = cluster(&network, ["a", "b", "c"]).await;
    let mut inboxes = Vec::new();
    for node in [&a, &b, &c] {
        inboxes.push(node.subscribe("room").await.unwrap());
    }
    assert_eq!(a.broadcast_local("room", "local"), 1);
    a.send_to_node("b", "room", "to b").await.unwrap();
    a.send_to_node(a.node().clone(), "room", "to a").await.unwrap();
    let got: Vec<Vec<String>> = inboxes.iter_mut().map(waiting).collect();
    assert_eq!(got, [vec!["local", "to a"], vec!["to b"], vec![]]);
    let error = a.send_to_node("nobody", "room", "x").await.unwrap_err();
    assert_eq!(error, BroadcastError::NoSuchNode { node: NodeId::new("nobody").unwrap() });
}

#[tokio::test(start_paused = true)]
async fn the_three_hops_can_be_wired_by_hand() {
    let network = Network::new();
    let [a, b, c] = cluster(&network, ["a", "b", "c"]).await;
    let group = group_routed_by(&a, "b", "g");
    let counter = Counter::default();
    let member = c.join(&group, counter.clone()).await.unwrap();

    assert_eq!(a.router(&group), Route::Router(b.node().clone()));
    let targets = b.targets(&group, a.sender_hash()).expect("ready and of one view");
    assert_eq!(targets.as_slice(), [c.node().clone()]);
    assert_eq!(b.occupancy(&group), [c.node().clone()]);
    assert!(b.can_decide(a.sender_hash()) && !b.can_decide(ViewHash::UNSETTLED));
    assert_eq!(b.targets(&group, ViewHash::UNSETTLED), Err(Flood));
    assert_eq!(a.targets(&group, a.sender_hash()), Err(Flood), "not its router");

    let members = c.local_members(&group);
    let message = Message::new(&group, "by hand", BroadcastId::new(a.peer().clone(), 1), Vec::new());
    for found in members.iter() {
        assert_eq!(found.handle.id(), member.id());
        assert_eq!(found.handle.deliver(&message), Delivered::Accepted);
    }
    assert_eq!(counter.got(), 1);
    assert_eq!((members.len(), c.local_member_count(&group)), (1, 1));
    assert!(c.is_local_member(&group, member.id()));
    assert!(!a.is_local_member(&group, member.id()), "it lives on c");
}

#[tokio::test(start_paused = true)]
async fn a_broadcast_dropped_before_its_id_sends_nothing_and_later_is_finished() {
    let network = Network::new();
    let (transport, valves) = Valved::new(&network, "a");
    let a = Muster::builder("rooms").transport(transport).start().await.unwrap();
    let b = start(&network, "b").await;
    settle(&[a.clone(), b.clone()]).await;
    let group = group_routed_by(&a, "b", "g");
    let mut inbox = b.subscribe(&group).await.unwrap();

    valves.shut("b", Lane::Data);
    assert!(a.broadcast(&group, "never").now_or_never().is_none(), "no room: it waits");
    assert_eq!(a.try_broadcast(&group, "never"), Err(TryBroadcastError::Busy));
    valves.open("b", Lane::Data);
    assert!(a.broadcast(&group, "begun").now_or_never().is_none(), "it waits for its receipt");
    a.broadcast(&group, "last").await.unwrap();
    assert_eq!(waiting(&mut inbox), ["begun", "last"]);
    assert_eq!(a.summary().broadcasts_open, 0);
}

// ---- membership

#[tokio::test(start_paused = true)]
async fn bc_01_join_twice_leave_once() {
    let network = Network::new();
    let [a, b] = cluster(&network, ["a", "b"]).await;
    let counter = Counter::default();
    let id = b.new_member();
    let first = b.join_as("g", id.clone(), counter.clone()).await.unwrap();
    let second = b.join_as("g", id.clone(), counter.clone()).await.unwrap();
    assert_eq!((first.id(), second.id()), (&id, &id));
    assert_eq!(counter.others(), 1, "the second subscriber was not kept");

    a.broadcast("g", "1").await.unwrap();
    assert_eq!((counter.got(), b.local_member_count("g")), (1, 1), "one membership, one delivery");
    second.leave();
    a.broadcast("g", "2").await.unwrap();
    assert_eq!((counter.got(), b.local_member_count("g")), (2, 1), "the other guard still holds it");
    first.leave();
    a.broadcast("g", "3").await.unwrap();
    assert_eq!((counter.got(), b.local_member_count("g")), (2, 0));
    assert_eq!(counter.others(), 0, "the subscriber is free");

    // an old guard of a member that has ended does not touch its next membership
    let (sender, receiver) = tokio::sync::mpsc::channel(1);
    let stale = b.join_as("g", id.clone(), sender).await.unwrap();
    drop(receiver);
    a.broadcast("g", "4").await.unwrap();
    assert_eq!(b.local_member_count("g"), 0);
    let fresh = b.join_as("g", id.clone(), counter.clone()).await.unwrap();
    stale.leave();
    assert_eq!(b.local_member_count("g"), 1);
    drop(fresh);
    assert_eq!(b.local_member_count("g"), 0);
    assert_eq!(b.summary().memberships, 0);
}

#[tokio::test(start_paused = true)]
async fn joins_of_one_member_at_the_same_time_are_one_membership() {
    let network = Network::new();
    let [a, b] = cluster(&network, ["a", "b"]).await;
    let group = group_routed_by(&b, "a", "g");
    let counter = Counter::default();
    let id = b.new_member();
    let joins = (0..50).map(|_| b.join_as(&group, id.clone(), counter.clone()));
    let guards: Vec<Membership> =
        futures_util::future::join_all(joins).await.into_iter().map(Result::unwrap).collect();
    a.broadcast(&group, "x").await.unwrap();
    assert_eq!((counter.got(), b.local_member_count(&group), counter.others()), (1, 1, 1));
    drop(guards);
    assert_eq!(b.local_member_count(&group), 0);
}

#[tokio::test(start_paused = true)]
async fn one_member_in_many_groups_is_left_out_by_one_id() {
    let network = Network::new();
    let [a, b] = cluster(&network, ["a", "b"]).await;
    let counter = Counter::default();
    let first = b.join("g", counter.clone()).await.unwrap();
    let _second = b.join_as("h", first.id().clone(), counter.clone()).await.unwrap();
    for group in ["g", "h"] {
        let options = BroadcastOptions::default().except(first.id().clone());
        a.broadcast_with(group, "not for it", options).await.unwrap();
        a.broadcast(group, "for it").await.unwrap();
    }
    assert_eq!(counter.got(), 2);
}

#[tokio::test(start_paused = true)]
async fn bc_06_a_dead_member_is_addressed_once_and_then_gone() {
    let network = Network::new();
    let [a, b] = cluster(&network, ["a", "b"]).await;
    let mut events = b.events();
    let (sender, receiver) = tokio::sync::mpsc::channel(200);
    let membership = b.join("g", sender).await.unwrap();
    let (unbounded, unbounded_receiver) = tokio::sync::mpsc::unbounded_channel();
    let _other = b.join("g", unbounded).await.unwrap();
    drop((receiver, unbounded_receiver));
    for i in 0..100 {
        a.broadcast("g", format!("{i}")).await.unwrap();
        assert_eq!(b.local_member_count("g"), 0, "after broadcast {i}");
    }
    assert_eq!(b.summary().counters.closed_members, 2);
    let ended = std::iter::from_fn(|| events.try_recv()).filter(|e| matches!(e, Event::MemberEnded { .. }));
    assert_eq!(ended.count(), 2);
    membership.leave();
    assert_eq!(b.summary().holds.members, 0);
}

#[tokio::test(start_paused = true)]
async fn a_full_channel_drops_and_counts_and_stays_a_member() {
    let network = Network::new();
    let [a] = cluster(&network, ["a"]).await;
    let (sender, mut receiver) = tokio::sync::mpsc::channel(2);
    let _member = a.join("g", sender).await.unwrap();
    let (watchers, mut watcher) = tokio::sync::broadcast::channel(16);
    let _second = a.join("g", watchers).await.unwrap();
    for i in 0..5 {
        a.broadcast("g", format!("{i}")).await.unwrap();
    }
    assert_eq!(receiver.recv().await.unwrap().payload(), "0");
    assert_eq!(a.local_member_count("g"), 2);
    assert_eq!(a.summary().counters.dropped, 3);
    assert_eq!(watcher.try_recv().unwrap().payload(), "0");
}

#[tokio::test(start_paused = true)]
async fn hazard_17_leave_and_join_again_around_the_cooldown() {
    let network = Network::new();
    let [a, b, c] = cluster(&network, ["a", "b", "c"]).await;
    let config = Config::default();
    let (cooldown, flush) = (config.vacancy_cooldown, config.flush_interval);
    let ms = Duration::from_millis;
    let mut offsets = vec![ms(0), ms(1), cooldown / 2, cooldown - ms(250), cooldown - ms(1), cooldown];
    offsets.extend((0..40).map(|step| cooldown + flush * step / 20));
    for (i, offset) in offsets.into_iter().enumerate() {
        let group = group_routed_by(&a, "b", &format!("{i}/"));
        let first = c.subscribe(&group).await.unwrap();
        drop(first);
        pass(offset).await;
        let mut inbox = c.subscribe(&group).await.unwrap();
        let receipt = a.broadcast(&group, "hello").await.unwrap();
        assert_eq!(receipt.decision, Decision::Targeted);
        assert_eq!(waiting(&mut inbox), ["hello"], "joined again {offset:?} after the leave");
        // and what was still on its way when it joined does no harm later
        pass(cooldown + 2 * flush).await;
        a.broadcast(&group, "later").await.unwrap();
        assert_eq!(waiting(&mut inbox), ["later"], "joined again {offset:?} after the leave");
        assert_eq!(b.occupancy(&group), [c.node().clone()]);
    }
    // everything left behind is given back
    pass(cooldown + 2 * flush).await;
    let receipt = a.broadcast(group_routed_by(&a, "b", "0/"), "x").await.unwrap();
    assert_eq!(receipt.nodes, Some(0));
}

#[tokio::test(start_paused = true)]
async fn a_join_within_the_cooldown_costs_no_message() {
    let network = Network::new();
    let [a, b] = cluster(&network, ["a", "b"]).await;
    let group = group_routed_by(&a, "b", "g");
    for _ in 0..5 {
        drop(a.subscribe(&group).await.unwrap());
        // less than the cooldown, five times over more than it
        pass(Duration::from_secs(20)).await;
        let frames = b.summary().counters.frames_in;
        let joined = a.subscribe(&group).now_or_never().expect("without waiting");
        assert!(joined.is_ok());
        tokio::task::yield_now().await;
        assert_eq!(b.summary().counters.frames_in, frames);
    }
}

#[tokio::test(start_paused = true)]
async fn hazard_18_a_subscriber_that_is_dropped_while_its_join_waits() {
    let network = Network::new();
    let (transport, valves) = Valved::new(&network, "a");
    let a = Muster::builder("rooms").transport(transport).start().await.unwrap();
    let b = start(&network, "b").await;
    settle(&[a.clone(), b.clone()]).await;
    let group = group_routed_by(&a, "b", "g");
    let counter = Counter::default();

    valves.shut("b", Lane::Control);
    let (sender, receiver) = tokio::sync::mpsc::channel(8);
    let mut dead = Box::pin(a.join(&group, sender));
    assert!((&mut dead).now_or_never().is_none(), "the claim cannot leave");
    let mut dropped = Box::pin(a.join(&group, counter.clone()));
    assert!((&mut dropped).now_or_never().is_none());
    assert_eq!(a.summary().joins_waiting, 2);
    assert_eq!(counter.others(), 1);
    // one gives up the join, of the other the receiver goes
    drop(dropped);
    drop(receiver);
    assert_eq!(counter.others(), 0, "given up: nothing of it is kept");
    assert_eq!(a.local_member_count(&group), 0);

    valves.open("b", Lane::Control);
    let membership = dead.await.expect("the join itself succeeds");
    assert_eq!(a.local_member_count(&group), 1);
    b.broadcast(&group, "x").await.unwrap();
    assert_eq!(a.local_member_count(&group), 0, "found dead at the first delivery");
    drop(membership);

    // all waiters give up: the claim is given back in time, and the group can be joined again
    valves.shut("b", Lane::Control);
    let other = group_routed_by(&a, "b", "other");
    let mut inbox = Box::pin(a.subscribe(&other));
    assert!((&mut inbox).now_or_never().is_none());
    drop(inbox);
    valves.open("b", Lane::Control);
    pass(Duration::from_secs(60)).await;
    assert_eq!(b.occupancy(&other), []);
    let mut inbox = a.subscribe(&other).await.unwrap();
    b.broadcast(&other, "hello").await.unwrap();
    assert_eq!(waiting(&mut inbox), ["hello"]);
    assert_eq!(a.summary().joins_waiting, 0);
}

#[tokio::test(start_paused = true)]
async fn hazard_25_a_join_before_the_node_has_met_its_peers_waits_for_them() {
    let network = Network::new();
    // nothing tells this node that it is alone
    let (transport, _) = Valved::new(&network, "a");
    let a = Muster::builder("rooms").transport(transport.quiet()).start().await.unwrap();
    let mut join = Box::pin(a.subscribe("g"));
    assert!((&mut join).now_or_never().is_none(), "who knows what the others broadcast");
    let b = start(&network, "b").await;
    let mut inbox = join.await.expect("joined when they have met");
    b.broadcast("g", "hello").await.unwrap();
    assert_eq!(next(&mut inbox).await, "hello");

    // alone, it believes so after a while
    let network = Network::new();
    let (transport, _) = Valved::new(&network, "a");
    let a = Muster::builder("rooms").transport(transport.quiet()).start().await.unwrap();
    let start = tokio::time::Instant::now();
    a.subscribe("g").await.expect("joined");
    let waited = start.elapsed();
    let expected = Config::default().singleton_timeout;
    assert!(waited >= expected && waited < expected + Duration::from_secs(1), "{waited:?}");
}

#[tokio::test(start_paused = true)]
async fn hazard_25_many_joins_in_the_first_moments_are_all_known() {
    let network = Network::new();
    let a = start(&network, "a").await;
    let mut inboxes = Vec::new();
    let mut others = Vec::new();
    for i in 0..5 {
        let node = start(&network, &format!("n{i}")).await;
        inboxes.push(node.subscribe("g").await.unwrap());
        a.broadcast("g", format!("after {i}")).await.unwrap();
        others.push(node);
    }
    for (i, inbox) in inboxes.iter_mut().enumerate() {
        let mut got = Vec::new();
        for _ in i..5 {
            got.push(next(inbox).await);
        }
        assert_eq!(got, (i..5).map(|i| format!("after {i}")).collect::<Vec<_>>());
    }
}

// ---- mailboxes

#[tokio::test(start_paused = true)]
async fn bc_10_a_slow_consumer_holds_up_nobody() {
    let network = Network::new();
    let [a, b] = cluster(&network, ["a", "b"]).await;
    let options = |overflow| MailboxOptions::default().capacity(8).overflow(overflow);
    let mut newest = b.subscribe_with("g", options(Overflow::DropNewest)).await.unwrap();
    let mut oldest = b.subscribe_with("g", options(Overflow::DropOldest)).await.unwrap();
    let mut cut = b.subscribe_with("g", options(Overflow::Disconnect)).await.unwrap();
    let mut fast = b.subscribe_with("g", MailboxOptions::default().capacity(10_000)).await.unwrap();
    let mut other = b.subscribe("h").await.unwrap();
    let start = tokio::time::Instant::now();
    for i in 0..10_000 {
        a.broadcast("g", format!("{i}")).await.unwrap();
    }
    a.broadcast("h", "x").await.unwrap();
    assert!(start.elapsed() < Duration::from_secs(1), "nobody waited: {:?}", start.elapsed());
    assert_eq!(waiting(&mut other), ["x"]);
    assert_eq!(waiting(&mut fast).len(), 10_000);
    assert_eq!((newest.len(), newest.missed()), (8, 9_992));
    assert_eq!((oldest.len(), oldest.missed()), (8, 9_992));
    assert_eq!((cut.len(), cut.closed_reason()), (8, Some(ClosedReason::Overflow)));
    assert_eq!(b.local_member_count("g"), 3, "the disconnected one has left");
    assert_eq!(waiting(&mut newest)[0], "0");
    assert_eq!(waiting(&mut oldest)[0], "9992");
    // what waited can still be read, then it ends
    assert_eq!(waiting(&mut cut).len(), 8);
    assert_eq!(cut.recv().await, None);
}

#[tokio::test(start_paused = true)]
async fn bc_11_lag_is_a_notice_and_not_an_end() {
    let network = Network::new();
    let [a, b] = cluster(&network, ["a", "b"]).await;
    for overflow in [Overflow::DropNewest, Overflow::DropOldest] {
        let options = MailboxOptions::default().capacity(4).overflow(overflow);
        let mut inbox = b.subscribe_with("g", options).await.unwrap();
        for i in 0..100 {
            a.broadcast("g", format!("{i}")).await.unwrap();
        }
        let mut got: Vec<(String, u64)> = Vec::new();
        let mut read = |inbox: &mut Subscription| {
            while let Some(m) = inbox.try_recv() {
                got.push((String::from_utf8_lossy(m.payload()).into_owned(), m.missed()));
            }
        };
        read(&mut inbox);
        for i in 100..105 {
            a.broadcast("g", format!("{i}")).await.unwrap();
            read(&mut inbox);
        }
        let notices: Vec<u64> = got.iter().map(|(_, missed)| *missed).filter(|missed| *missed > 0).collect();
        assert_eq!(notices, [96], "one notice with the number missed");
        let last: Vec<&str> = got.iter().rev().take(5).rev().map(|(text, _)| text.as_str()).collect();
        assert_eq!(last, ["100", "101", "102", "103", "104"]);
        assert_eq!((inbox.closed_reason(), b.local_member_count("g")), (None, 1));
    }
}

#[tokio::test(start_paused = true)]
async fn hazard_20_a_subscriber_that_never_reads_costs_its_mailbox_and_no_more() {
    let network = Network::new();
    let [a, b] = cluster(&network, ["a", "b"]).await;
    let never_read = b.subscribe_with("g", MailboxOptions::default().capacity(4)).await.unwrap();
    let payload = Bytes::from(vec![7u8; 1 << 20]);
    // far more than every queue together could hold
    for _ in 0..400 {
        a.broadcast("g", payload.clone()).await.unwrap();
    }
    assert_eq!((never_read.len(), never_read.missed()), (4, 396));
    assert_eq!(a.summary().broadcasts_open, 0);
}

#[tokio::test(start_paused = true)]
async fn hazard_20_a_peer_that_never_drains_is_bounded_and_catches_up() {
    let network = Network::new();
    let (transport, valves) = Valved::new(&network, "a");
    let a = Muster::builder("rooms").transport(transport).dedupe_window(64).start().await.unwrap();
    let b = start(&network, "b").await;
    let c = start(&network, "c").await;
    settle(&[a.clone(), b.clone(), c.clone()]).await;
    let group = group_routed_by(&a, "a", "g");
    let mut stuck = b.subscribe(&group).await.unwrap();
    let mut well = c.subscribe(&group).await.unwrap();

    valves.shut("b", Lane::Data);
    let mut sent = 0;
    while a.try_broadcast(&group, format!("{sent}")).is_ok() {
        sent += 1;
        assert!(sent <= 64, "bounded");
    }
    assert_eq!(sent, 32, "half a dedupe window is open at most");
    for i in 0..sent {
        assert_eq!(next(&mut well).await, format!("{i}"), "c is not held up");
    }
    let mut waits = Box::pin(a.broadcast(&group, format!("{sent}")));
    assert!((&mut waits).now_or_never().is_none());
    valves.open("b", Lane::Data);
    let receipt = waits.await.expect("room again");
    assert_eq!(receipt.nodes, Some(2));
    assert_eq!(waiting(&mut stuck), (0..=sent).map(|i| i.to_string()).collect::<Vec<_>>());
}

#[tokio::test(start_paused = true)]
async fn a_subscription_is_a_stream_that_ends() {
    let network = Network::new();
    let [a] = cluster(&network, ["a"]).await;
    let mut inbox = a.subscribe("g").await.unwrap();
    a.broadcast("g", "1").await.unwrap();
    a.broadcast("g", "2").await.unwrap();
    inbox.close();
    assert_eq!(a.local_member_count("g"), 0);
    a.broadcast("g", "3").await.unwrap();
    assert_eq!(inbox.closed_reason(), Some(ClosedReason::Left));
    let texts: Vec<Bytes> = inbox.map(|m| m.payload().clone()).collect().await;
    assert_eq!(texts, ["1", "2"]);
}

#[tokio::test(start_paused = true)]
async fn a_waiting_reader_is_woken() {
    let network = Network::new();
    let [a] = cluster(&network, ["a"]).await;
    let mut inbox = a.subscribe("g").await.unwrap();
    let reader = tokio::spawn(async move { inbox.recv().await });
    tokio::task::yield_now().await;
    a.broadcast("g", "hello").await.unwrap();
    assert_eq!(reader.await.unwrap().unwrap().payload(), "hello");
}

// ---- routing under change, names, order

#[tokio::test(start_paused = true)]
async fn bc_15_random_joins_leaves_and_broadcasts_equal_a_naive_model() {
    let network = Network::new();
    let nodes = cluster(&network, ["a", "b"]).await;
    let mut seed = 0x9e37_79b9_7f4a_7c15_u64;
    let mut draw = move |below: u64| {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        seed % below
    };
    let got: Arc<Mutex<BTreeMap<u64, Vec<u64>>>> = Arc::default();
    let mut members: BTreeMap<u64, (u64, Membership)> = BTreeMap::new();
    let mut expected: BTreeMap<u64, Vec<u64>> = BTreeMap::new();
    for step in 0..10_000u64 {
        let group = draw(20);
        let node = &nodes[draw(2) as usize];
        match draw(3) {
            0 => {
                let got = got.clone();
                let deliver = move |m: &Message| {
                    let sent = String::from_utf8_lossy(m.payload()).parse().unwrap();
                    got.lock().unwrap().entry(step).or_default().push(sent);
                };
                let guard = node.join_fn(format!("group {group}"), deliver).await.unwrap();
                members.insert(step, (group, guard));
            }
            1 if !members.is_empty() => {
                let which = *members.keys().nth(draw(members.len() as u64) as usize).unwrap();
                members.remove(&which);
            }
            _ => {
                let receipt = node.broadcast(format!("group {group}"), step.to_string()).await.unwrap();
                assert_eq!(receipt.decision, Decision::Targeted);
                for (member, _) in members.iter().filter(|(_, (g, _))| *g == group) {
                    expected.entry(*member).or_default().push(step);
                }
            }
        }
        if members.len() > 60 {
            members.pop_first();
        }
    }
    assert_eq!(*got.lock().unwrap(), expected);
}

fn odd_names() -> Vec<Vec<u8>> {
    vec![
        b"\0".to_vec(),
        b"a\0b".to_vec(),
        b"a\0c".to_vec(),
        vec![0xff, 0xfe],
        b"__muster/internal".to_vec(),
        b"room ".to_vec(),
        b"room".to_vec(),
        "\u{e9}".as_bytes().to_vec(),
        "e\u{301}".as_bytes().to_vec(),
        vec![b'x'; 1024],
    ]
}

#[tokio::test(start_paused = true)]
async fn bc_16_odd_group_names_are_opaque_or_refused() {
    let network = Network::new();
    let [a, b] = cluster(&network, ["a", "b"]).await;
    let mut inboxes = Vec::new();
    for name in odd_names() {
        let local = a.subscribe(name.clone()).await.unwrap();
        let remote = b.subscribe(name.clone()).await.unwrap();
        inboxes.push((name, local, remote));
    }
    for name in odd_names() {
        a.broadcast(name.clone(), Bytes::from(name.clone())).await.unwrap();
        b.broadcast(name.clone(), Bytes::from(name)).await.unwrap();
    }
    for (name, local, remote) in &mut inboxes {
        for inbox in [local, remote] {
            for _ in 0..2 {
                let message = inbox.try_recv().expect("both broadcasts");
                assert_eq!(message.payload(), name.as_slice());
                assert_eq!(message.group().as_bytes(), name.as_slice(), "byte for byte");
            }
            assert_eq!(inbox.try_recv(), None, "and none of another name");
        }
    }
    drop(inboxes);
    let before = (a.summary().holds, b.summary().holds, a.summary().counters, b.summary().counters);
    for name in [Vec::new(), vec![0; 1025], vec![0; 1 << 20], vec![0; 16 << 20]] {
        let refused = NameError::GroupLength { given: name.len(), max: 1024 };
        assert_eq!(a.subscribe(name.clone()).await.unwrap_err(), JoinError::Name(refused.clone()));
        assert_eq!(a.broadcast(name.clone(), "x").await.unwrap_err(), BroadcastError::Name(refused.clone()));
        assert_eq!(a.try_broadcast(name.clone(), "x"), Err(TryBroadcastError::Name(refused.clone())));
        let to_node = a.send_to_node("b", name.clone(), "x").await.unwrap_err();
        assert_eq!(to_node, BroadcastError::Name(refused));
        // the others: a group without members
        assert_eq!(a.broadcast_local(name.clone(), "x"), 0);
        assert_eq!(a.local_member_count(&name), 0);
        assert_eq!(a.occupancy(&name), []);
        a.router(&name);
    }
    let after = (a.summary().holds, b.summary().holds, a.summary().counters, b.summary().counters);
    assert_eq!(before, after, "nothing has changed and nothing was sent");
}

#[tokio::test(start_paused = true)]
async fn bc_18_the_number_of_shards_is_private() {
    let network = Network::new();
    let mut nodes = Vec::new();
    for (name, shards) in [("a", 4), ("b", 16), ("c", 1)] {
        let builder = Muster::builder("rooms").transport(network.node(name)).shards(shards);
        nodes.push(builder.start().await.unwrap());
    }
    settle(&nodes).await;
    let counter = Counter::default();
    let mut guards = Vec::new();
    for node in &nodes {
        for i in 0..1000 {
            guards.push(node.join(format!("g{i}"), counter.clone()).await.unwrap());
        }
    }
    for (n, node) in nodes.iter().enumerate() {
        for i in 0..1000 {
            let receipt = node.broadcast(format!("g{i}"), "x").await.unwrap();
            assert_eq!(receipt.nodes, Some(3));
        }
        assert_eq!(counter.got(), (n + 1) * 3000, "each once");
    }
}

#[tokio::test(start_paused = true)]
async fn tr_07_order_holds_while_the_cluster_is_quiet_and_nothing_is_lost_while_it_changes() {
    let network = Network::new();
    let nodes = cluster(&network, ["a", "b", "c"]).await;
    // receivers with the sender, on the router, and on a third node
    let group = group_routed_by(&nodes[0], "b", "g");
    let mut inboxes = Vec::new();
    for node in &nodes {
        let options = MailboxOptions::default().capacity(10_000);
        inboxes.push(node.subscribe_with(&group, options).await.unwrap());
    }
    for i in 1..=10_000 {
        nodes[0].broadcast(&group, i.to_string()).await.unwrap();
    }
    for inbox in &mut inboxes {
        let got: Vec<u32> = waiting(inbox).iter().map(|text| text.parse().unwrap()).collect();
        assert!(got.iter().copied().eq(1..=10_000), "in order, each once");
    }

    // while a node comes and goes: the order may break, nothing is lost, nothing comes twice
    let sender = {
        let (a, group) = (nodes[0].clone(), group.clone());
        tokio::spawn(async move {
            let mut flooded = 0;
            for i in 1..=2_000 {
                let receipt = a.broadcast(&group, i.to_string()).await.unwrap();
                flooded += usize::from(receipt.decision == Decision::Flooded);
            }
            flooded
        })
    };
    for round in 0..20 {
        let guest = start(&network, &format!("guest{round}")).await;
        let _stays = guest.subscribe(&group).await.unwrap();
        guest.shutdown().await;
    }
    let flooded = sender.await.unwrap();
    assert!(flooded > 0, "the changes were seen");
    for inbox in &mut inboxes {
        let got: Vec<u32> = waiting(inbox).iter().map(|text| text.parse().unwrap()).collect();
        let set: BTreeSet<u32> = got.iter().copied().collect();
        assert_eq!((got.len(), set.len()), (2_000, 2_000), "each once");
    }
}

#[tokio::test(start_paused = true)]
async fn p3_try_broadcasts_of_one_caller_arrive_in_order() {
    let network = Network::new();
    let nodes = cluster(&network, ["a", "b", "c"]).await;
    for router in ["a", "b", "c"] {
        let group = group_routed_by(&nodes[0], router, "g");
        let mut inboxes = Vec::new();
        for node in &nodes {
            inboxes.push(node.subscribe(&group).await.unwrap());
        }
        for i in 0..1000 {
            nodes[0].try_broadcast(&group, i.to_string()).unwrap();
        }
        for inbox in &mut inboxes {
            let mut last = 0;
            for i in 0..1000 {
                let message = inbox.recv().await.unwrap();
                assert_eq!(message.payload(), i.to_string().as_str());
                assert!(message.id().seq > last, "the numbers rise");
                last = message.id().seq;
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn tr_03_no_guard_is_held_across_an_await() {
    let network = Network::new();
    let [a, b] = cluster(&network, ["a", "b"]).await;
    let tasks = (0..30u32).map(|task| {
        let (a, b) = (a.clone(), b.clone());
        async move {
            for i in 0..20 {
                let group = format!("key {}", (task + i) % 7);
                let known = a.occupancy(&group).len();
                tokio::task::yield_now().await;
                let mut inbox = b.subscribe(&group).await.unwrap();
                a.broadcast(&group, format!("{known}")).await.unwrap();
                inbox.recv().await.unwrap();
                let _second = a.join_fn(&group, |_: &Message| ()).await.unwrap();
            }
        }
    });
    let all = futures_util::future::join_all(tasks);
    tokio::time::timeout(Duration::from_secs(5), all).await.expect("nobody is stuck");
}

#[tokio::test(start_paused = true)]
async fn hazard_24_nobody_to_send_to() {
    let network = Network::new();
    // not yet settled: a flood to nobody
    let (transport, _) = Valved::new(&network, "a");
    let a = Muster::builder("rooms").transport(transport.quiet()).start().await.unwrap();
    assert_ne!(a.status(), Status::Ready);
    let receipt = a.broadcast("g", "x").await.unwrap();
    assert_eq!((receipt.decision, receipt.nodes), (Decision::Flooded, Some(1)));
    let b = start(&network, "b").await;
    settle(&[a.clone(), b.clone()]).await;
    let (own, other) = (group_routed_by(&a, "a", "g"), group_routed_by(&a, "b", "g"));
    // no member anywhere
    for group in [&own, &other] {
        let receipt = a.broadcast(group, "x").await.unwrap();
        assert_eq!((receipt.decision, receipt.nodes), (Decision::Targeted, Some(0)));
    }
    // the caller is the router and the only source
    let mut inbox = a.subscribe(&own).await.unwrap();
    let receipt = a.broadcast(&own, "hello").await.unwrap();
    assert_eq!((receipt.decision, receipt.nodes), (Decision::Targeted, Some(1)));
    assert_eq!(waiting(&mut inbox), ["hello"]);
    let frames = b.summary().counters.frames_in;
    a.broadcast(&own, "again").await.unwrap();
    assert_eq!(b.summary().counters.frames_in, frames, "nobody else is bothered");
}

#[tokio::test(start_paused = true)]
async fn hazard_29_a_group_is_its_bytes_however_they_are_given() {
    let network = Network::new();
    let [a, b] = cluster(&network, ["a", "b"]).await;
    let mut inbox = b.subscribe("room:\u{fc}").await.unwrap();
    let bytes = "room:\u{fc}".as_bytes();
    a.broadcast("room:\u{fc}", "str").await.unwrap();
    a.broadcast(String::from("room:\u{fc}"), "string").await.unwrap();
    a.broadcast(bytes, "slice").await.unwrap();
    a.broadcast(bytes.to_vec(), "vec").await.unwrap();
    a.broadcast(Bytes::copy_from_slice(bytes), "bytes").await.unwrap();
    a.broadcast(Group::from(bytes), "group").await.unwrap();
    // the same letter in another form is another name
    a.broadcast("room:u\u{308}", "never").await.unwrap();
    assert_eq!(waiting(&mut inbox), ["str", "string", "slice", "vec", "bytes", "group"]);
    assert_eq!(b.local_member_count(bytes), 1);
    assert_eq!(b.local_member_count(String::from("room:\u{fc}")), 1);
    assert_eq!(a.router(bytes), a.router("room:\u{fc}"));
}

// ---- watching

#[tokio::test(start_paused = true)]
async fn events_and_changes_tell_what_happens() {
    let network = Network::new();
    let [a] = cluster(&network, ["a"]).await;
    let mut events = a.events();
    let mut changes = a.changes();
    let b = start(&network, "b").await;
    settle(&[a.clone(), b.clone()]).await;
    let inbox = a.subscribe("g").await.unwrap();
    drop(inbox);
    b.shutdown().await;
    settle(std::slice::from_ref(&a)).await;
    let seen: Vec<Event> = std::iter::from_fn(|| events.try_recv()).collect();
    let place = |wanted: &dyn Fn(&Event) -> bool| {
        seen.iter().position(wanted).unwrap_or_else(|| panic!("not among {seen:?}"))
    };
    let order = [
        place(&|e| *e == Event::NodeUp(b.peer().clone())),
        place(&|e| matches!(e, Event::Status { status: Status::Ready, .. })),
        place(&|e| *e == Event::Occupied(Group::from("g"))),
        place(&|e| *e == Event::Vacant(Group::from("g"))),
        place(&|e| *e == Event::NodeDown(b.peer().clone())),
    ];
    assert!(order.is_sorted(), "{seen:?}");
    assert!(changes.has_changed().unwrap());
    let state = changes.borrow_and_update().clone();
    assert_eq!((state.status, state.view, state.view_hash), (a.status(), a.members(), a.view_hash()));
}

#[tokio::test(start_paused = true)]
async fn the_summary_and_the_dump_tell_what_is_there() {
    let network = Network::new();
    let [a, b] = cluster(&network, ["a", "b"]).await;
    let group = group_routed_by(&a, "b", "g");
    let _inbox = a.subscribe(&group).await.unwrap();
    a.broadcast(&group, "x").await.unwrap();
    let summary = a.summary();
    assert_eq!((summary.holds.groups, summary.holds.members, summary.memberships), (1, 1, 1));
    assert_eq!(summary.connected, [b.peer().clone()]);
    assert_eq!(
        (summary.counters.broadcasts, summary.counters.targeted, summary.counters.delivered),
        (1, 1, 1)
    );
    assert_eq!(b.summary().holds.rows, 1);
    let json = serde_json::to_value(&summary).unwrap();
    assert_eq!(json["status"], "Ready");
    assert_eq!(json["holds"]["members"], 1);
    let dump = b.dump().to_string();
    assert!(dump.contains(&format!("{group}: {} present", a.peer())), "{dump}");
    assert!(a.dump().to_string().contains(&format!("{group}: Held, 1 members")));
}

#[tokio::test(start_paused = true)]
async fn until_ready_says_when_it_is_not() {
    let network = Network::new();
    let (transport, _) = Valved::new(&network, "a");
    let a = Muster::builder("rooms").transport(transport.quiet()).start().await.unwrap();
    let short = Duration::from_millis(100);
    let error = a.until_ready(short).await.unwrap_err();
    assert_eq!((error.status, error.stopped, error.waited), (Status::Converging, false, short));
    assert!(error.is_retryable());
    a.until_ready(PATIENCE).await.expect("alone, after a while");
}
