//! Bad input: each gets the error or the policy that the documentation names, and nobody else notices.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use bytes::Bytes;
use futures_util::FutureExt;
use muster_router::transport::link::LinkConfig;
use muster_router::transport::memory::Network;
use muster_router::transport::{Frame, Lane, Transport, TransportError};
use muster_router::*;
use support::*;

// ---- starting

#[tokio::test(start_paused = true)]
async fn every_option_out_of_range_is_named_and_nothing_is_started() {
    let network = Network::new();
    let builder = || Muster::builder("rooms").transport(network.node("a"));
    let day = Duration::from_secs(24 * 60 * 60);
    let zero = Duration::ZERO;
    let cases: Vec<(&str, MusterBuilder)> = vec![
        ("vnodes", builder().vnodes(0)),
        ("vnodes", builder().vnodes(u32::MAX)),
        ("shards", builder().shards(0)),
        ("vacancy_cooldown", builder().vacancy_cooldown(2 * day)),
        ("flush_interval", builder().flush_interval(zero)),
        ("heartbeat_interval", builder().heartbeat_interval(zero)),
        ("singleton_timeout", builder().singleton_timeout(zero)),
        ("rpc_timeout", builder().rpc_timeout(zero)),
        ("join_timeout", builder().join_timeout(zero)),
        ("tombstone_ttl", builder().tombstone_ttl(Duration::from_secs(1))),
        ("sweep_interval", builder().sweep_interval(zero)),
        ("max_group_len", builder().max_group_len(0)),
        ("max_payload_len", builder().max_payload_len(0)),
        ("max_unacknowledged", builder().max_unacknowledged(0)),
        ("dedupe_window", builder().dedupe_window(1)),
        // allowed alone, contradictory together
        ("singleton_timeout", builder().singleton_timeout(Duration::from_secs(40))),
        ("rpc_timeout", builder().rpc_timeout(Duration::from_secs(60))),
        ("max_payload_len", builder().max_payload_len(128 << 20)),
    ];
    for (option, builder) in cases {
        let error = builder.start().await.expect_err(option);
        assert!(!error.is_retryable());
        let StartError::Config(error) = error else { panic!("{option}: {error}") };
        assert_eq!(error.option(), option, "{error}");
        assert!(error.to_string().contains(option));
    }
    // the transport was not touched
    builder().start().await.expect("starts");
}

// caught by: a limit of the transport that nobody compares with the options (a broadcast above it was confirmed and
// gone, and a snapshot above it kept the cluster flooding)
#[tokio::test(start_paused = true)]
async fn a_transport_that_cannot_carry_what_the_options_allow_is_refused_with_both_values() {
    let link = LinkConfig { max_frame: 100_000, ..LinkConfig::default() };
    let network = Network::builder().link(link).build();
    let builder = |payload| {
        Muster::builder("rooms").transport(network.node("a")).max_payload_len(payload).max_group_len(1000)
    };
    let rest = 64 << 10;
    let error = builder(100_000 - 1000 - rest + 1).start().await.expect_err("one byte too long");
    assert!(!error.is_retryable());
    let text = error.to_string();
    assert!(
        text.contains("100000 bytes, and 100001 are needed") && text.contains("max_payload_len 33465"),
        "{text}"
    );
    let a = builder(100_000 - 1000 - rest).start().await.expect("it fits");

    // and what the node says by itself fits as well: many long names in one snapshot and one retraction
    let b = Muster::builder("rooms").transport(network.node("b")).max_payload_len(1000).max_group_len(1000);
    let mut held = Vec::new();
    for number in 0..300 {
        held.push(a.subscribe(format!("{number:0900}")).await.unwrap());
    }
    let b = b.start().await.unwrap();
    settle(&[a.clone(), b.clone()]).await;
    assert_eq!(a.broadcast(format!("{:0900}", 7), vec![7u8; 33_000]).await.unwrap().nodes, Some(1));
    held.clear();
    pass(Duration::from_secs(60)).await;
    assert_eq!(a.summary().counters.frames_too_large + b.summary().counters.frames_too_large, 0);
    settle(&[a, b]).await;
}

#[tokio::test(start_paused = true)]
async fn a_scope_needs_a_name_and_a_transport() {
    let network = Network::new();
    for (name, given) in [(String::new(), 0), ("x".repeat(256), 256)] {
        let error = Muster::builder(name).transport(network.node("a")).start().await.unwrap_err();
        assert!(matches!(error, StartError::ScopeLength { given: g, max: 255 } if g == given), "{error}");
    }
    let error = Muster::builder("rooms").start().await.unwrap_err();
    assert!(matches!(&error, StartError::MissingTransport { scope } if scope == "rooms"), "{error}");
    Muster::builder("x".repeat(255)).transport(network.node("a")).start().await.expect("starts");
}

#[tokio::test(start_paused = true)]
async fn a_second_scope_on_a_running_transport_is_refused() {
    let network = Network::new();
    let transport = Arc::new(network.node("a"));
    let first = Muster::builder("rooms").transport(transport.clone()).start().await.unwrap();
    first.until_ready(PATIENCE).await.unwrap();
    let error = Muster::builder("rooms").transport(transport).start().await.unwrap_err();
    assert!(matches!(&error, StartError::AlreadyJoined { node, .. } if node == first.node()), "{error}");
    let error = Muster::builder("rooms").transport(network.node("a")).start().await.unwrap_err();
    let live = first.peer().incarnation;
    assert!(
        matches!(&error, StartError::Transport(TransportError::Superseded { live: l, .. }) if *l == live),
        "a second node of the name: {error}"
    );
    // the first does not notice
    let mut inbox = first.subscribe("g").await.unwrap();
    first.broadcast("g", "x").await.unwrap();
    assert_eq!(waiting(&mut inbox), ["x"]);
}

#[test]
fn without_a_runtime_the_start_is_refused_and_not_a_panic() {
    let network = Network::new();
    let start = Muster::builder("rooms").transport(network.node("a")).start();
    let error = futures_util::future::FutureExt::now_or_never(start).expect("at once").unwrap_err();
    assert!(matches!(error, StartError::Transport(_)), "{error}");
}

// ---- names and sizes

#[tokio::test(start_paused = true)]
async fn hazard_21_group_names_at_the_limits() {
    let network = Network::new();
    let mut nodes = Vec::new();
    for name in ["a", "b"] {
        let builder = Muster::builder("rooms").transport(network.node(name)).max_group_len(16);
        nodes.push(builder.start().await.unwrap());
    }
    settle(&nodes).await;
    let (a, b) = (&nodes[0], &nodes[1]);
    for good in [vec![0u8], vec![0xff; 16], b"a\0b".to_vec(), vec![0xc3, 0x28], vec![b' ']] {
        let mut inbox = b.subscribe(good.clone()).await.unwrap();
        a.broadcast(good.clone(), "x").await.unwrap();
        assert_eq!(waiting(&mut inbox), ["x"], "{good:?}");
    }
    for bad in [vec![], vec![1; 17]] {
        let refused = NameError::GroupLength { given: bad.len(), max: 16 };
        let member = a.new_member();
        let errors = [
            a.subscribe(bad.clone()).await.unwrap_err(),
            a.join(bad.clone(), Counter::default()).await.unwrap_err(),
            a.join_as(bad.clone(), member, Counter::default()).await.unwrap_err(),
            a.join_fn(bad.clone(), |_: &Message| ()).await.unwrap_err(),
        ];
        for error in errors {
            assert_eq!(error, JoinError::Name(refused.clone()));
            assert!(!error.is_retryable());
        }
        let options = BroadcastOptions::default();
        let error = a.broadcast_with(bad.clone(), "x", options.clone()).await.unwrap_err();
        assert_eq!(error, BroadcastError::Name(refused.clone()));
        let error = a.try_broadcast_with(bad.clone(), "x", options).unwrap_err();
        assert_eq!(error, TryBroadcastError::Name(refused));
        assert!(a.local_members(&bad).is_empty());
    }
}

#[tokio::test(start_paused = true)]
async fn tr_01_a_payload_over_the_limit_is_refused_where_it_is_sent() {
    let network = Network::new();
    let [a, b] = cluster(&network, ["a", "b"]).await;
    let mut inbox = b.subscribe("g").await.unwrap();
    let large = Bytes::from(vec![0u8; 2 << 20]);
    let (given, max) = (2 << 20, 1 << 20);
    assert_eq!(
        a.broadcast("g", large.clone()).await.unwrap_err(),
        BroadcastError::PayloadTooLarge { given, max }
    );
    assert_eq!(a.try_broadcast("g", large.clone()), Err(TryBroadcastError::PayloadTooLarge { given, max }));
    let error = a.send_to_node("b", "g", large.clone()).await.unwrap_err();
    assert_eq!(error, BroadcastError::PayloadTooLarge { given, max });
    assert_eq!(a.broadcast_local("g", large.clone()), 0);
    // the largest that is allowed goes through, and the link is up
    a.broadcast("g", large.slice(..max)).await.unwrap();
    assert_eq!(inbox.recv().await.unwrap().payload().len(), max);
    assert_eq!(a.connected(), [b.peer().clone()]);
    assert_eq!(a.summary().counters.broadcasts, 1);

    let huge = "v".repeat(MAX_HEADERS_LEN);
    let options = BroadcastOptions::default().header("n", huge);
    let too_large = BroadcastError::HeadersTooLarge { given: MAX_HEADERS_LEN + 1, max: MAX_HEADERS_LEN };
    assert_eq!(a.broadcast_with("g", "x", options).await.unwrap_err(), too_large);
    let options = BroadcastOptions::default().header("n", "v".repeat(MAX_HEADERS_LEN - 1));
    a.broadcast_with("g", "x", options).await.unwrap();
    assert_eq!(inbox.recv().await.unwrap().headers().len(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_member_of_another_node_cannot_join_here() {
    let network = Network::new();
    let [a, b] = cluster(&network, ["a", "b"]).await;
    let member = b.new_member();
    let error = a.join_as("g", member.clone(), Counter::default()).await.unwrap_err();
    assert_eq!(error, JoinError::ForeignMember { member, here: a.peer().clone() });
}

#[tokio::test(start_paused = true)]
async fn a_number_of_ones_own_making_does_not_meet_another_member() {
    let network = Network::new();
    let [a] = cluster(&network, ["a"]).await;
    let next = a.new_member().number + 1;
    let mut own = Vec::new();
    for number in next..next + 5 {
        let id = MemberId::new(a.peer().clone(), number);
        own.push(a.join_as("g", id, Counter::default()).await.unwrap());
    }
    let fresh = a.subscribe("g").await.unwrap();
    assert!(own.iter().all(|guard| guard.id() != fresh.id()));
    assert_eq!(a.local_member_count("g"), 6);
    drop(own);
    assert_eq!(a.local_member_count("g"), 1);
}

#[tokio::test(start_paused = true)]
async fn a_mailbox_of_no_capacity_holds_one() {
    let network = Network::new();
    let [a] = cluster(&network, ["a"]).await;
    let mut inbox = a.subscribe_with("g", MailboxOptions::default().capacity(0)).await.unwrap();
    a.broadcast("g", "1").await.unwrap();
    a.broadcast("g", "2").await.unwrap();
    assert_eq!(waiting(&mut inbox), ["1"]);
}

// ---- joins that cannot be

#[tokio::test(start_paused = true)]
async fn joins_while_draining_are_refused_and_members_stay() {
    let network = Network::new();
    let [a, b] = cluster(&network, ["a", "b"]).await;
    let mut inbox = a.subscribe("g").await.unwrap();
    a.drain(PATIENCE).await.unwrap();
    let error = a.subscribe("h").await.unwrap_err();
    assert_eq!(error, JoinError::Draining);
    assert!(!error.is_retryable());
    assert!(a.summary().draining);
    settle(&[a.clone(), b.clone()]).await;
    b.broadcast("g", "still here").await.unwrap();
    assert_eq!(waiting(&mut inbox), ["still here"]);
    a.broadcast("g", "and speaking").await.unwrap();
    assert_eq!(waiting(&mut inbox), ["and speaking"]);
    assert_eq!(b.ring().nodes(), [b.node().clone()]);
}

#[tokio::test(start_paused = true)]
async fn a_join_whose_router_does_not_answer_ends_in_time() {
    let network = Network::new();
    let (transport, valves) = Valved::new(&network, "a");
    let a = Muster::builder("rooms").transport(transport).start().await.unwrap();
    let b = start(&network, "b").await;
    settle(&[a.clone(), b.clone()]).await;
    let group = group_routed_by(&a, "b", "g");
    valves.shut("b", Lane::Control);
    let start = tokio::time::Instant::now();
    let counter = Counter::default();
    let error = a.join(&group, counter.clone()).await.unwrap_err();
    let router = b.node().clone();
    assert_eq!(error, JoinError::RouterUnreachable { group: Group::from(&group), router });
    assert!(error.is_retryable());
    let limit = Config::default().join_timeout + Duration::from_secs(1);
    assert!(start.elapsed() <= limit, "{:?}", start.elapsed());
    assert_eq!((a.local_member_count(&group), a.summary().memberships, counter.others()), (0, 0, 0));
    valves.open("b", Lane::Control);
    a.join(&group, counter).await.expect("now it can").leave();
}

#[tokio::test(start_paused = true)]
async fn a_join_on_a_node_that_does_not_settle_in_time_says_so() {
    let network = Network::new();
    let (transport, _) = Valved::new(&network, "a");
    let ms = Duration::from_millis;
    // the node looks at its clock less often than every millisecond, so the join is over first
    let builder = Muster::builder("rooms").transport(transport.quiet());
    let a = builder.singleton_timeout(ms(5_100)).join_timeout(ms(5_101)).start().await.unwrap();
    let error = a.subscribe("g").await.unwrap_err();
    assert_eq!(error, JoinError::NotSettled { group: Group::from("g"), waited: ms(5_101) });
    assert!(error.is_retryable());
    a.subscribe("g").await.expect("settled by now");
}

// ---- subscribers that misbehave

/// Calls back with the handle that it is given.
struct Calls<F>(Arc<OnceLock<Muster>>, F);

impl<F: Fn(&Muster, &Message) -> Delivered + Send + Sync + 'static> Subscriber for Calls<F> {
    fn deliver(&self, message: &Message) -> Delivered {
        self.0.get().map_or(Delivered::Accepted, |muster| (self.1)(muster, message))
    }
}

#[tokio::test(start_paused = true)]
async fn a_subscriber_that_panics_is_ended_and_nobody_else_notices() {
    let network = Network::new();
    let [a, b] = cluster(&network, ["a", "b"]).await;
    let mut events = b.events();
    let mut before = b.subscribe("g").await.unwrap();
    let guard = b.join_fn("g", |_: &Message| -> Delivered { panic!("in deliver") }).await.unwrap();
    let mut after = b.subscribe("g").await.unwrap();
    for i in 0..3 {
        a.broadcast("g", i.to_string()).await.unwrap();
    }
    assert_eq!(waiting(&mut before), ["0", "1", "2"]);
    assert_eq!(waiting(&mut after), ["0", "1", "2"]);
    let counters = b.summary().counters;
    assert_eq!((counters.panics, counters.closed_members, b.local_member_count("g")), (1, 1, 2));
    let id = guard.id().clone();
    let ended = Event::MemberEnded { member: id, group: Group::from("g") };
    assert!(std::iter::from_fn(|| events.try_recv()).any(|event| event == ended));
    drop(guard);
    assert_eq!(b.local_member_count("g"), 2);
}

/// A panic that panics again when it is dropped.
struct Bomb;
impl Drop for Bomb {
    fn drop(&mut self) {
        panic!("in the drop of a panic");
    }
}

#[tokio::test(start_paused = true)]
async fn a_panic_with_a_payload_that_panics_is_survived() {
    let network = Network::new();
    let [a] = cluster(&network, ["a"]).await;
    let _guard = a.join_fn("g", |_: &Message| -> Delivered { std::panic::panic_any(Bomb) }).await.unwrap();
    a.broadcast("g", "x").await.unwrap();
    assert_eq!((a.local_member_count("g"), a.summary().counters.panics), (0, 1));
}

/// A subscriber whose drop panics, or calls the library.
struct BadDrop(Arc<OnceLock<Muster>>, bool);

impl Subscriber for BadDrop {
    fn deliver(&self, _: &Message) -> Delivered {
        if self.1 { Delivered::Closed } else { Delivered::Accepted }
    }
}

impl Drop for BadDrop {
    fn drop(&mut self) {
        if let Some(muster) = self.0.get() {
            // every kind of lock would be taken by these
            muster.try_broadcast("last words", "bye").unwrap();
            assert!(muster.local_member_count("g") < 100);
            drop(muster.summary());
            drop(muster.dump());
        }
        panic!("in drop");
    }
}

#[tokio::test(start_paused = true)]
async fn a_subscriber_whose_drop_panics_and_calls_the_library_hurts_nobody() {
    let network = Network::new();
    let [a, b] = cluster(&network, ["a", "b"]).await;
    let mut words = b.subscribe_with("last words", MailboxOptions::default()).await.unwrap();
    let mut other = a.subscribe("g").await.unwrap();
    let handle = Arc::new(OnceLock::new());
    assert!(handle.set(a.clone()).is_ok());
    // by its guard, by its own answer, by a join that is given up, by one that is refused
    a.join("g", BadDrop(handle.clone(), false)).await.unwrap().leave();
    let guard = a.join("g", BadDrop(handle.clone(), true)).await.unwrap();
    b.broadcast("g", "1").await.unwrap();
    drop(guard);
    let remote = group_routed_by(&a, "b", "remote");
    let mut join = Box::pin(a.join(&remote, BadDrop(handle.clone(), false)));
    assert!((&mut join).now_or_never().is_none());
    drop(join);
    let shared = a.new_member();
    let first = a.join_as("h", shared.clone(), Counter::default()).await.unwrap();
    let second = a.join_as("h", shared, BadDrop(handle.clone(), false)).await.unwrap();
    drop((first, second));
    assert_eq!(a.summary().counters.panics, 4);
    assert_eq!(a.summary().memberships, 1);
    b.broadcast("g", "2").await.unwrap();
    assert_eq!(waiting(&mut other), ["1", "2"]);
    for _ in 0..4 {
        assert_eq!(next(&mut words).await, "bye");
    }
    // and at the end of the scope
    let _stays = a.join("g", BadDrop(Arc::default(), false)).await.unwrap();
    a.shutdown().await;
    assert_eq!(a.summary().counters.panics, 5);
}

#[tokio::test(start_paused = true)]
async fn a_broadcast_from_inside_deliver_runs_after_it_and_does_not_recurse() {
    let network = Network::new();
    let [a, b] = cluster(&network, ["a", "b"]).await;
    let handle = Arc::new(OnceLock::new());
    assert!(handle.set(a.clone()).is_ok());
    let depth = Arc::new(AtomicUsize::new(0));
    let deepest = Arc::new(AtomicUsize::new(0));
    let count = Arc::new(AtomicUsize::new(0));
    let echo = {
        let (depth, deepest, count) = (depth.clone(), deepest.clone(), count.clone());
        Calls(handle, move |muster: &Muster, _: &Message| {
            deepest.fetch_max(depth.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
            let so_far = count.fetch_add(1, Ordering::SeqCst);
            if so_far < 10_000 {
                muster.try_broadcast("echo", "again").unwrap();
                assert_eq!(count.load(Ordering::SeqCst), so_far + 1, "not before this one is over");
            }
            depth.fetch_sub(1, Ordering::SeqCst);
            Delivered::Accepted
        })
    };
    let _guard = a.join("echo", echo).await.unwrap();
    let other = Counter::default();
    let _other = b.join("echo", other.clone()).await.unwrap();
    a.broadcast("echo", "go").await.unwrap();
    // others are not held up by it
    a.broadcast("else", "x").await.unwrap();
    eventually("all echoes", || other.got() == 10_001).await;
    assert_eq!((deepest.load(Ordering::SeqCst), count.load(Ordering::SeqCst)), (1, 10_001));
}

#[tokio::test(start_paused = true)]
async fn broadcasts_from_inside_deliver_are_bounded() {
    let network = Network::new();
    let [a] = cluster(&network, ["a"]).await;
    let handle = Arc::new(OnceLock::new());
    assert!(handle.set(a.clone()).is_ok());
    let accepted = Arc::new(AtomicUsize::new(0));
    let storm = {
        let accepted = accepted.clone();
        Calls(handle, move |muster: &Muster, _: &Message| {
            let sent = (0..100_000).take_while(|_| muster.try_broadcast("out", "x").is_ok()).count();
            assert_eq!(muster.try_broadcast("out", "x"), Err(TryBroadcastError::Busy));
            accepted.store(sent, Ordering::SeqCst);
            Delivered::Accepted
        })
    };
    let _guard = a.join("in", storm).await.unwrap();
    let out = Counter::default();
    let _out = a.join("out", out.clone()).await.unwrap();
    a.broadcast("in", "go").await.unwrap();
    assert_eq!(accepted.load(Ordering::SeqCst), 1024);
    eventually("what was accepted is sent", || out.got() == 1024).await;
    // and there is room again
    a.broadcast("in", "go").await.unwrap();
    eventually("again", || out.got() == 2048).await;
}

#[tokio::test(start_paused = true)]
async fn broadcasts_from_inside_deliver_keep_their_order() {
    let network = Network::new();
    let [a, b] = cluster(&network, ["a", "b"]).await;
    let handle = Arc::new(OnceLock::new());
    assert!(handle.set(a.clone()).is_ok());
    let split = Calls(handle, |muster: &Muster, _: &Message| {
        for i in 0..300 {
            muster.try_broadcast("out", i.to_string()).unwrap();
        }
        Delivered::Accepted
    });
    let _guard = a.join("in", split).await.unwrap();
    let mut out = b.subscribe("out").await.unwrap();
    b.broadcast("in", "go").await.unwrap();
    for i in 0..300 {
        assert_eq!(next(&mut out).await, i.to_string());
    }
}

#[tokio::test(start_paused = true)]
async fn a_receipt_can_be_had_for_a_broadcast_from_inside_deliver() {
    let network = Network::new();
    let [a, b] = cluster(&network, ["a", "b"]).await;
    let handle = Arc::new(OnceLock::new());
    assert!(handle.set(a.clone()).is_ok());
    let receipts = Arc::new(Mutex::new(Vec::new()));
    let ask = {
        let receipts = receipts.clone();
        Calls(handle, move |muster: &Muster, _: &Message| {
            let muster = muster.clone();
            let mut broadcast = Box::pin(async move { muster.broadcast("out", "x").await });
            // polled in here: it is queued
            assert!((&mut broadcast).now_or_never().is_none());
            let receipts = receipts.clone();
            tokio::spawn(async move {
                let receipt = broadcast.await.unwrap();
                receipts.lock().unwrap().push(receipt);
            });
            Delivered::Accepted
        })
    };
    let _guard = a.join("in", ask).await.unwrap();
    let mut out = b.subscribe("out").await.unwrap();
    b.broadcast("in", "go").await.unwrap();
    assert_eq!(next(&mut out).await, "x");
    eventually("the receipt", || !receipts.lock().unwrap().is_empty()).await;
    assert_eq!(receipts.lock().unwrap()[0].nodes, Some(1));
}

#[tokio::test(start_paused = true)]
async fn a_subscriber_may_leave_and_read_and_drop_itself_inside_deliver() {
    let network = Network::new();
    let [a, b] = cluster(&network, ["a", "b"]).await;
    let handle = Arc::new(OnceLock::new());
    assert!(handle.set(a.clone()).is_ok());
    let own: Arc<Mutex<Option<Membership>>> = Arc::default();
    let alive = Arc::new(());
    let suicide = {
        let (own, _alive) = (own.clone(), alive.clone());
        Calls(handle, move |muster: &Muster, message: &Message| {
            let _keep = &_alive;
            assert_eq!(muster.local_member_count(message.group()), 2);
            drop(own.lock().unwrap().take());
            assert_eq!(muster.local_member_count(message.group()), 1, "at once");
            assert_eq!(muster.broadcast_local("h", "x"), 0);
            drop((muster.summary(), muster.dump(), muster.events(), muster.changes()));
            Delivered::Accepted
        })
    };
    *own.lock().unwrap() = Some(a.join("g", suicide).await.unwrap());
    let mut other = a.subscribe("g").await.unwrap();
    b.broadcast("g", "1").await.unwrap();
    b.broadcast("g", "2").await.unwrap();
    assert_eq!(waiting(&mut other), ["1", "2"]);
    assert_eq!(Arc::strong_count(&alive), 1, "nothing of it is kept");
}

#[tokio::test(start_paused = true)]
async fn a_subscriber_may_stop_the_scope_inside_deliver() {
    let network = Network::new();
    let [a, b] = cluster(&network, ["a", "b"]).await;
    let handle: Arc<Mutex<Option<Muster>>> = Arc::new(Mutex::new(Some(a.clone())));
    let _guard = a
        .join_fn("g", move |_: &Message| {
            // the last clone but one that the test holds
            handle.lock().unwrap().take();
        })
        .await
        .unwrap();
    let mut changes = a.changes();
    drop(a);
    let _receipt = b.broadcast("g", "x").await.unwrap();
    tokio::time::timeout(PATIENCE, changes.wait_for(|s| s.stopped)).await.unwrap().unwrap();
    settle(&[b]).await;
}

#[tokio::test(start_paused = true)]
async fn a_local_broadcast_from_inside_deliver_is_queued_too() {
    let network = Network::new();
    let [a] = cluster(&network, ["a"]).await;
    let handle = Arc::new(OnceLock::new());
    assert!(handle.set(a.clone()).is_ok());
    let done = Arc::new(AtomicBool::new(false));
    let speak = {
        let done = done.clone();
        Calls(handle, move |muster: &Muster, message: &Message| {
            if message.payload() == "go" {
                assert_eq!(muster.broadcast_local("g", "more"), 1);
                assert!(!done.load(Ordering::SeqCst));
            } else {
                done.store(true, Ordering::SeqCst);
            }
            Delivered::Accepted
        })
    };
    let _guard = a.join("g", speak).await.unwrap();
    assert_eq!(a.broadcast_local("g", "go"), 1);
    assert!(done.load(Ordering::SeqCst), "run by the outermost call");
}

#[tokio::test]
async fn a_slow_subscriber_is_counted() {
    let network = Network::new();
    let [a] = cluster(&network, ["a"]).await;
    let _quick = a.join("g", Counter::default()).await.unwrap();
    let _slow = a
        .join_fn("g", |_: &Message| {
            let start = std::time::Instant::now();
            while start.elapsed() < Duration::from_millis(12) {
                std::hint::spin_loop();
            }
        })
        .await
        .unwrap();
    a.broadcast("g", "x").await.unwrap();
    assert!(a.summary().counters.slow_deliveries >= 1);
}

// ---- peers that misbehave

/// Hears everything and says nothing.
struct Deaf;

impl muster_router::transport::Receiver for Deaf {
    fn peer_up(&self, _: Peer) {}
    fn peer_suspect(&self, _: &Peer) {}
    fn peer_resumed(&self, _: &Peer) {}
    fn peer_down(&self, _: &Peer) {}
    fn discovery_settled(&self) {}
    fn frame(&self, _: &Peer, _: Frame) {}
}

/// A node of the network that speaks no protocol, connected to `to`. The second part keeps it hearing.
async fn rogue(network: &Network, to: &Muster) -> (impl Transport, Arc<Deaf>) {
    let deaf = Arc::new(Deaf);
    let receiver: Arc<dyn muster_router::transport::Receiver> = deaf.clone();
    let terms = muster_router::transport::Terms { scope: "rooms".into(), vnodes: 128, protocol: 1 };
    let rogue = network.node("rogue");
    let inbound = muster_router::transport::Inbound::new(Arc::downgrade(&receiver), terms);
    rogue.start(inbound).await.unwrap();
    eventually("it is connected", || !to.connected().is_empty()).await;
    (rogue, deaf)
}

#[tokio::test(start_paused = true)]
async fn hazard_11_a_node_whose_name_lives_elsewhere_stops_taking_part() {
    let network = Network::new();
    let [a] = cluster(&network, ["a"]).await;
    let mut events = a.events();
    let (rogue, _deaf) = rogue(&network, &a).await;
    // "I know a later life of your name": a, incarnation 2^64 - 1
    let mut head = b"\x01\x00\x00\x0e\x01a".to_vec();
    head.extend([0xff; 9]);
    head.push(1);
    rogue.send(a.peer(), Frame::new(Lane::Control, head, Bytes::new())).await.unwrap();
    let (node, live) = (a.node().clone(), Incarnation::new(u64::MAX).unwrap());
    let by = Peer::new(node.clone(), live);
    eventually("it is told", || events.try_recv() == Some(Event::Superseded { by: by.clone() })).await;
    let error = a.subscribe("g").await.unwrap_err();
    assert_eq!(error, JoinError::Superseded { node: node.clone(), live });
    assert!(!error.is_retryable());
    let error = a.broadcast("g", "x").await.unwrap_err();
    assert_eq!(error, BroadcastError::Superseded { node: node.clone(), live });
    assert_eq!(a.try_broadcast("g", "x"), Err(TryBroadcastError::Superseded { node, live }));
    assert!(a.summary().superseded && a.changes().borrow().superseded);
}

#[tokio::test(start_paused = true)]
async fn hazard_22_frames_of_nonsense_are_counted_and_ignored() {
    let network = Network::new();
    let [a] = cluster(&network, ["a"]).await;
    let (rogue, _deaf) = rogue(&network, &a).await;
    let heads: [&[u8]; 6] =
        [b"", b"\x01", b"\x01\x00\x00\xff", b"\x01\x09\x00\x04", b"\x02\x00\x00\x04", b"nonsense"];
    for lane in Lane::ALL {
        for head in heads {
            rogue.send(a.peer(), Frame::new(lane, head.to_vec(), Bytes::new())).await.unwrap();
        }
    }
    eventually("all are ignored", || a.summary().counters.frames_ignored == 18).await;
    let mut inbox = Vec::new();
    rogue.shutdown().await;
    settle(std::slice::from_ref(&a)).await;
    inbox.push(a.subscribe("g").await.unwrap());
    a.broadcast("g", "well").await.unwrap();
    assert_eq!(waiting(&mut inbox[0]), ["well"]);
}
