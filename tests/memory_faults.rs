//! The faults of the memory network, and what the link layer makes of them. On a paused clock: waits cost nothing
//! and nothing depends on the machine.

// helpers of tests are no test functions to the lint
#![allow(clippy::panic, clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use muster_router::transport::link::LinkConfig;
use muster_router::transport::memory::{Fault, MemoryTransport, Network};
use muster_router::transport::{Frame, Inbound, Lane, Receiver, SendError, Terms, Transport, TransportError};
use muster_router::{NodeId, Peer};
use parking_lot::Mutex;
use tokio::sync::Notify;

const MS: Duration = Duration::from_millis(1);
const SEC: Duration = Duration::from_secs(1);

#[derive(Clone, Debug, PartialEq, Eq)]
enum Told {
    Up(Peer),
    Suspect(Peer),
    Resumed(Peer),
    Down(Peer),
    Settled,
    Frame(Peer, Lane, u64),
}

#[derive(Default)]
struct Log {
    told: Mutex<Vec<Told>>,
    changed: Notify,
}

impl Log {
    fn say(&self, told: Told) {
        self.told.lock().push(told);
        self.changed.notify_one();
    }

    fn told(&self) -> Vec<Told> {
        self.told.lock().clone()
    }

    fn links(&self) -> Vec<Told> {
        self.told().into_iter().filter(|t| matches!(t, Told::Up(_) | Told::Down(_))).collect()
    }

    fn frames(&self, from: &Peer, lane: Lane) -> Vec<u64> {
        self.told()
            .into_iter()
            .filter_map(|told| match told {
                Told::Frame(peer, l, value) if peer == *from && l == lane => Some(value),
                _ => None,
            })
            .collect()
    }

    /// Waits for a condition, with a deadline that only a fault reaches.
    async fn until(&self, what: &str, condition: impl Fn(&[Told]) -> bool) {
        let waiting = async {
            while !condition(&self.told.lock()) {
                self.changed.notified().await;
            }
        };
        if tokio::time::timeout(Duration::from_secs(600), waiting).await.is_err() {
            panic!("waited in vain for {what}: {:?}", self.told());
        }
    }
}

impl Receiver for Log {
    fn peer_up(&self, peer: Peer) {
        self.say(Told::Up(peer));
    }
    fn peer_suspect(&self, peer: &Peer) {
        self.say(Told::Suspect(peer.clone()));
    }
    fn peer_resumed(&self, peer: &Peer) {
        self.say(Told::Resumed(peer.clone()));
    }
    fn peer_down(&self, peer: &Peer) {
        self.say(Told::Down(peer.clone()));
    }
    fn discovery_settled(&self) {
        self.say(Told::Settled);
    }
    fn frame(&self, peer: &Peer, frame: Frame) {
        let value = u64::from_le_bytes(frame.body[..8].try_into().unwrap());
        self.say(Told::Frame(peer.clone(), frame.lane, value));
    }
}

struct Node {
    transport: MemoryTransport,
    log: Arc<Log>,
    me: Peer,
}

impl Node {
    async fn start(network: &Network, name: &str) -> Self {
        let transport = network.node(name);
        Self::with(transport, "s").await.unwrap()
    }

    async fn with(transport: MemoryTransport, scope: &str) -> Result<Self, TransportError> {
        let log = Arc::new(Log::default());
        let receiver: Arc<dyn Receiver> = log.clone();
        let terms = Terms { scope: scope.into(), vnodes: 128, protocol: 1 };
        let me = transport.start(Inbound::new(Arc::downgrade(&receiver), terms)).await?;
        Ok(Self { transport, log, me })
    }

    fn try_send(&self, to: &Node, lane: Lane, value: u64) -> Result<(), SendError> {
        let frame = Frame::new(lane, "head", value.to_le_bytes().to_vec());
        self.transport.try_send(&to.me, frame)
    }
}

/// Waits until `log` has as many frames of that lane.
async fn frames(node: &Node, from: &Node, lane: Lane, count: u64) {
    let of = |told: &[Told]| {
        told.iter().filter(|t| matches!(t, Told::Frame(p, l, _) if *p == from.me && *l == lane)).count()
    };
    node.log.until("frames", |told| of(told) as u64 >= count).await;
    assert_eq!(node.log.frames(&from.me, lane), (0..count).collect::<Vec<_>>());
}

async fn pair(network: &Network) -> (Node, Node) {
    let a = Node::start(network, "a").await;
    let b = Node::start(network, "b").await;
    (a, b)
}

#[tokio::test(start_paused = true)]
async fn a_start_returns_when_all_are_linked() {
    let (a, b) = pair(&Network::new()).await;
    assert_eq!(a.log.told(), [Told::Settled, Told::Up(b.me.clone())]);
    assert_eq!(b.log.told(), [Told::Up(a.me.clone()), Told::Settled]);
}

#[tokio::test(start_paused = true)]
async fn names_that_are_none_and_names_that_are_taken() {
    let network = Network::new();
    for bad in [String::new(), "x".repeat(256)] {
        let refused = Node::with(network.node(bad), "s").await.err().unwrap();
        assert!(matches!(refused, TransportError::Name(_)), "{refused}");
    }
    let a = Node::start(&network, "a").await;
    let again = Node::with(a.transport.clone(), "s").await.err().unwrap();
    assert!(matches!(again, TransportError::AlreadyStarted { .. }), "{again}");
    let second = Node::with(network.node("a"), "s").await.err().unwrap();
    assert!(
        matches!(second, TransportError::Superseded { live, .. } if live == a.me.incarnation),
        "{second}"
    );
}

#[tokio::test(start_paused = true)]
async fn a_transport_that_is_dropped_leaves_the_network() {
    let network = Network::new();
    let (a, b) = pair(&network).await;
    let gone = b.me.clone();
    drop(b);
    a.log.until("down", |told| told.last() == Some(&Told::Down(gone.clone()))).await;
    let b = Node::start(&network, "b").await;
    assert!(b.me.incarnation > gone.incarnation);
}

#[test]
fn a_runtime_that_ends_takes_its_nodes_off_the_network() {
    let network = Network::new();
    let runtime = || tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    let first = runtime();
    let a = first.block_on(Node::start(&network, "a"));
    drop(first);
    assert!(network.nodes().is_empty());
    assert!(matches!(a.try_send(&a, Lane::Data, 1), Err(SendError::NoLink(_))));
    let again = runtime().block_on(Node::with(a.transport.clone(), "s")).unwrap();
    assert!(again.me.incarnation > a.me.incarnation);
}

#[tokio::test(start_paused = true)]
async fn another_scope_is_refused_and_does_not_disturb() {
    let network = Network::new();
    let a = Node::start(&network, "a").await;
    let b = Node::with(network.node("b"), "other").await.unwrap();
    assert_eq!(b.log.told(), [Told::Settled], "tried, and refused");
    let c = Node::start(&network, "c").await;
    assert_eq!(c.log.links(), [Told::Up(a.me.clone())]);
    assert_eq!(network.link_stats("a").unwrap().malformed, 0);
}

#[tokio::test(start_paused = true)]
async fn delay_keeps_the_order_and_reorder_only_within_a_lane() {
    let network = Network::with_seed(5);
    let (a, b) = pair(&network).await;
    network.delay("a", "b", 1 * MS..20 * MS);
    for value in 0..100 {
        a.try_send(&b, Lane::ALL[value as usize % 3], value).unwrap();
        // each in a packet burst of its own
        tokio::time::sleep(MS / 10).await;
    }
    let all = |told: &[Told]| told.iter().filter(|t| matches!(t, Told::Frame(..))).count() == 100;
    b.log.until("all frames", all).await;
    let values = |log: &Log| -> Vec<u64> {
        log.told().iter().filter_map(|t| if let Told::Frame(_, _, v) = t { Some(*v) } else { None }).collect()
    };
    assert_eq!(values(&b.log), (0..100).collect::<Vec<_>>(), "late, in order across lanes");
    network.delay("a", "b", Duration::ZERO..Duration::ZERO);
    b.log.told.lock().clear();
    let rule = network.rule("*", "b", Fault::Reorder(1 * MS..20 * MS));
    for value in 0..300 {
        a.try_send(&b, Lane::ALL[value as usize % 3], value).unwrap();
    }
    let all = |told: &[Told]| told.iter().filter(|t| matches!(t, Told::Frame(..))).count() == 300;
    b.log.until("all frames", all).await;
    assert_ne!(values(&b.log), (0..300).collect::<Vec<_>>(), "lanes pass each other");
    for (index, lane) in Lane::ALL.into_iter().enumerate() {
        let sent: Vec<u64> = (0..300).filter(|v| *v as usize % 3 == index).collect();
        assert_eq!(b.log.frames(&a.me, lane), sent, "never within a lane");
    }
    network.remove_rule(rule);
    assert_eq!(network.link_stats("b").unwrap().gaps, 0);
}

#[tokio::test(start_paused = true)]
async fn one_seed_gives_one_run() {
    let run = || async {
        let network = Network::with_seed(11);
        let (a, b) = pair(&network).await;
        network.rule("*", "*", Fault::Reorder(Duration::ZERO..9 * MS));
        network.rule("*", "*", Fault::Duplicate { percent: 10 });
        network.rule("*", "*", Fault::Lose { percent: 1 });
        for value in 0..500 {
            a.try_send(&b, Lane::ALL[value as usize % 3], value).unwrap();
        }
        let all = |told: &[Told]| told.iter().filter(|t| matches!(t, Told::Frame(..))).count() == 500;
        b.log.until("all frames", all).await;
        let values: Vec<(Lane, u64)> = b
            .log
            .told()
            .iter()
            .filter_map(|t| if let Told::Frame(_, lane, v) = t { Some((*lane, *v)) } else { None })
            .collect();
        values
    };
    assert_eq!(run().await, run().await);
}

#[tokio::test(start_paused = true)]
async fn what_is_lost_or_comes_twice_is_mended() {
    let network = Network::with_seed(3);
    let (a, b) = pair(&network).await;
    network.rule("*", "*", Fault::Duplicate { percent: 20 });
    network.rule("*", "*", Fault::Lose { percent: 2 });
    for value in 0..2000 {
        a.transport.send(&b.me, Frame::new(Lane::Data, "", u64::to_le_bytes(value).to_vec())).await.unwrap();
        if value % 50 == 0 {
            tokio::time::sleep(MS).await;
        }
    }
    frames(&b, &a, Lane::Data, 2000).await;
    let stats = network.link_stats("b").unwrap();
    assert!(stats.duplicates > 0 && stats.gaps > 0 && stats.resumed > 0, "{stats:?}");
    assert!(!b.log.links().contains(&Told::Down(a.me.clone())), "one session all the time");
}

#[tokio::test(start_paused = true)]
async fn hazard_14_a_cut_shorter_than_the_grace_loses_nothing() {
    let network = Network::new();
    let (a, b) = pair(&network).await;
    for round in 0..20 {
        let kind = round % 4;
        match kind {
            0 => network.cut("a", "b"),
            1 => network.cut_seen_by("a", "b"),
            2 => network.cut_seen_by("b", "a"),
            _ => network.cut_one_way("a", "b"),
        }
        for value in round * 50..(round + 1) * 50 {
            a.try_send(&b, Lane::Data, value).unwrap();
            b.try_send(&a, Lane::Bulk, value).unwrap();
        }
        tokio::time::sleep(1500 * MS).await;
        network.heal("a", "b");
        frames(&b, &a, Lane::Data, (round + 1) * 50).await;
        frames(&a, &b, Lane::Bulk, (round + 1) * 50).await;
    }
    assert_eq!(a.log.links(), [Told::Up(b.me.clone())]);
    assert_eq!(b.log.links(), [Told::Up(a.me.clone())]);
    let suspect = a.log.told().iter().filter(|t| matches!(t, Told::Suspect(_))).count();
    let resumed = a.log.told().iter().filter(|t| matches!(t, Told::Resumed(_))).count();
    assert!(suspect >= 10 && suspect == resumed, "{suspect} {resumed}");
}

#[tokio::test(start_paused = true)]
async fn hazard_14_a_long_cut_is_down_at_both_ends_then_up_again() {
    let network = Network::new();
    let (a, b) = pair(&network).await;
    let c = Node::start(&network, "c").await;
    for seen in 0..4 {
        match seen {
            0 => network.cut("a", "b"),
            1 => network.cut_seen_by("a", "b"),
            2 => network.cut_seen_by("b", "a"),
            _ => network.cut_one_way("b", "a"),
        }
        // the side that was told nothing finds out by itself, for it waits for an answer
        a.try_send(&b, Lane::Data, 1000).unwrap();
        b.try_send(&a, Lane::Data, 1000).unwrap();
        let (to_b, to_a) = (Told::Down(b.me.clone()), Told::Down(a.me.clone()));
        let count = |told: &[Told], what: &Told| told.iter().filter(|t| *t == what).count();
        if seen < 3 {
            a.log.until("down at a", |told| count(told, &to_b) == seen + 1).await;
            b.log.until("down at b", |told| count(told, &to_a) == seen + 1).await;
        } else {
            tokio::time::sleep(8 * SEC).await;
        }
        network.heal("a", "b");
        let (up_b, up_a) = (Told::Up(b.me.clone()), Told::Up(a.me.clone()));
        a.log.until("up at a", |told| count(told, &up_b) == seen + 2).await;
        b.log.until("up at b", |told| count(told, &up_a) == seen + 2).await;
        let value = seen as u64;
        a.log.told.lock().retain(|t| !matches!(t, Told::Frame(..)));
        b.log.told.lock().retain(|t| !matches!(t, Told::Frame(..)));
        a.try_send(&b, Lane::Data, value).unwrap();
        b.log.until("a frame", |told| told.iter().any(|t| matches!(t, Told::Frame(..)))).await;
        assert_eq!(b.log.frames(&a.me, Lane::Data), [value], "none of the closed session");
    }
    assert_eq!(c.log.links().len(), 2, "the third saw both all the time");
}

#[tokio::test(start_paused = true)]
async fn hazard_10_reborn_under_the_same_name() {
    let network = Network::new();
    let (a, mut b) = pair(&network).await;
    for round in 0..6u64 {
        let old = b.me.clone();
        a.try_send(&b, Lane::Data, round).unwrap();
        match round % 3 {
            // before anybody noticed: the old life's connections stay open
            0 => {
                network.cut_seen_by("b", "a");
                network.crash("b");
                network.heal("a", "b");
            }
            // while others notice
            1 => network.crash("b"),
            // after
            _ => {
                network.crash("b");
                a.log.until("down", |told| told.contains(&Told::Down(old.clone()))).await;
            }
        }
        b = Node::with(b.transport.clone(), "s").await.unwrap();
        assert!(b.me.incarnation > old.incarnation);
        let up = Told::Up(b.me.clone());
        a.log.until("the next life", |told| told.contains(&up)).await;
        assert!(matches!(
            a.try_send(&Node { me: old.clone(), ..clone(&b) }, Lane::Data, 9),
            Err(SendError::NoLink(_))
        ));
        let links = a.log.links();
        assert_eq!(links[links.len() - 2..], [Told::Down(old), up], "the old one first");
    }
    assert_eq!(a.log.links().len(), 13);
}

fn clone(node: &Node) -> Node {
    Node { transport: node.transport.clone(), log: node.log.clone(), me: node.me.clone() }
}

#[tokio::test(start_paused = true)]
async fn a_frozen_node_is_suspect_then_down_and_comes_back() {
    let network = Network::new();
    let (a, b) = pair(&network).await;
    network.freeze("b");
    let start = tokio::time::Instant::now();
    a.try_send(&b, Lane::Data, 0).unwrap();
    a.log.until("suspect", |told| told.last() == Some(&Told::Suspect(b.me.clone()))).await;
    assert_eq!(start.elapsed(), 500 * MS);
    network.thaw("b");
    frames(&b, &a, Lane::Data, 1).await;
    a.log.until("resumed", |told| told.last() == Some(&Told::Resumed(b.me.clone()))).await;
    network.freeze("b");
    a.try_send(&b, Lane::Data, 1).unwrap();
    a.log.until("down", |told| told.last() == Some(&Told::Down(b.me.clone()))).await;
    network.thaw("b");
    b.log
        .until("down, then up again", |told| {
            told.ends_with(&[Told::Down(a.me.clone()), Told::Up(a.me.clone())])
        })
        .await;
}

#[tokio::test(start_paused = true)]
async fn a_node_that_was_frozen_does_not_blame_the_others() {
    let network = Network::builder().link(LinkConfig::default()).build();
    let (a, b) = pair(&network).await;
    network.freeze("b");
    tokio::time::sleep(2500 * MS).await;
    network.thaw("b");
    a.try_send(&b, Lane::Data, 0).unwrap();
    frames(&b, &a, Lane::Data, 1).await;
    tokio::time::sleep(10 * SEC).await;
    assert_eq!(b.log.links(), [Told::Up(a.me.clone())], "its pings of the time before were heard first");
}

#[tokio::test(start_paused = true)]
async fn hazard_20_a_peer_that_drains_nothing() {
    let network = Network::builder().link(LinkConfig { queue_frames: 100, ..LinkConfig::default() }).build();
    let (a, b) = pair(&network).await;
    let c = Node::start(&network, "c").await;
    network.slow("b", true);
    let start = tokio::time::Instant::now();
    let mut sent = 0;
    let busy = loop {
        match a.try_send(&b, Lane::Data, sent) {
            Ok(()) => sent += 1,
            Err(error) => break error,
        }
    };
    assert!(busy.is_retryable() && sent == 100, "{busy:?} after {sent}");
    a.try_send(&b, Lane::Control, 0).expect("another lane has room");
    // nobody else is held up
    for value in 0..100 {
        a.try_send(&c, Lane::Data, value).unwrap();
    }
    frames(&c, &a, Lane::Data, 100).await;
    assert_eq!(start.elapsed(), Duration::ZERO);
    let waiting = tokio::spawn({
        let (transport, to) = (a.transport.clone(), b.me.clone());
        async move { transport.send(&to, Frame::new(Lane::Data, "", vec![0; 8])).await }
    });
    a.log.until("down", |told| told.contains(&Told::Down(b.me.clone()))).await;
    assert_eq!(start.elapsed(), 10 * SEC, "stall_timeout");
    assert!(matches!(waiting.await.unwrap(), Err(SendError::NoLink(_))));
    assert_eq!(network.link_stats("a").unwrap().stalled, 1);
    network.slow("b", false);
}

#[tokio::test(start_paused = true)]
async fn a_slow_peer_that_recovers_gets_everything_and_wakes_who_waits() {
    let network = Network::builder().link(LinkConfig { queue_frames: 100, ..LinkConfig::default() }).build();
    let (a, b) = pair(&network).await;
    network.slow("b", true);
    let sender = tokio::spawn({
        let a = clone(&a);
        let to = b.me.clone();
        async move {
            for value in 0..1000u64 {
                a.transport
                    .send(&to, Frame::new(Lane::Bulk, "", value.to_le_bytes().to_vec()))
                    .await
                    .unwrap();
            }
        }
    });
    tokio::time::sleep(2 * SEC).await;
    network.slow("b", false);
    frames(&b, &a, Lane::Bulk, 1000).await;
    sender.await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn idle_links_cost_no_timer() {
    let network = Network::new();
    let (a, b) = pair(&network).await;
    tokio::time::sleep(Duration::from_secs(86_400)).await;
    assert_eq!((a.log.links().len(), b.log.links().len()), (1, 1));
    a.try_send(&b, Lane::Data, 0).unwrap();
    frames(&b, &a, Lane::Data, 1).await;
    assert!(!a.log.told().iter().any(|t| matches!(t, Told::Suspect(_))));
}

/// One end was told of a new connection before the other, and what it wrote at once was lost: every twentieth heal
/// or so ended in a peer that was given up.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_heal_brings_the_link_back() {
    let network = Network::new();
    let (a, b) = pair(&network).await;
    for round in 1..=300 {
        let times = |told: &[Told], what: &Told| told.iter().filter(|t| *t == what).count();
        network.cut("a", "b");
        for (end, peer) in [(&a, &b), (&b, &a)] {
            end.log.until("suspect", |told| times(told, &Told::Suspect(peer.me.clone())) == round).await;
        }
        network.heal("a", "b");
        for (end, peer) in [(&a, &b), (&b, &a)] {
            end.log.until("resumed", |told| times(told, &Told::Resumed(peer.me.clone())) == round).await;
        }
    }
    assert_eq!((a.log.links().len(), b.log.links().len()), (1, 1), "up, and never down");
}

/// 100 nodes by default; `MUSTER_PEERS=1000` takes about a minute.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_peers_all_linked() {
    let count: usize = std::env::var("MUSTER_PEERS").ok().and_then(|n| n.parse().ok()).unwrap_or(100);
    let network = Network::new();
    let mut nodes = Vec::new();
    for index in 0..count {
        nodes.push(Node::start(&network, &format!("n{index:04}")).await);
    }
    for node in &nodes {
        let ups = |told: &[Told]| told.iter().filter(|t| matches!(t, Told::Up(_))).count() == count - 1;
        node.log.until("all peers", ups).await;
    }
    let (first, last) = (&nodes[0], &nodes[count - 1]);
    for node in &nodes[1..] {
        first.try_send(node, Lane::Data, 7).unwrap();
    }
    for node in &nodes[1..] {
        node.log
            .until("a frame", |told| told.last() == Some(&Told::Frame(first.me.clone(), Lane::Data, 7)))
            .await;
    }
    first.transport.shutdown().await;
    last.log.until("down", |told| told.last() == Some(&Told::Down(first.me.clone()))).await;
    assert!(nodes.iter().skip(1).all(|n| !n.log.told().iter().any(|t| matches!(t, Told::Suspect(_)))));
}

/// `cargo test --release --test memory_faults -- --ignored --nocapture` prints how many frames a second.
#[ignore = "a measurement"]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn throughput() {
    struct Count(std::sync::atomic::AtomicU64, Notify);
    impl Receiver for Count {
        fn peer_up(&self, _: Peer) {}
        fn peer_suspect(&self, _: &Peer) {}
        fn peer_resumed(&self, _: &Peer) {}
        fn peer_down(&self, _: &Peer) {}
        fn discovery_settled(&self) {}
        fn frame(&self, _: &Peer, _: Frame) {
            if self.0.fetch_add(1, std::sync::atomic::Ordering::Relaxed) + 1 == 1_000_000 {
                self.1.notify_one();
            }
        }
    }
    let network = Network::new();
    let a = Node::start(&network, "a").await;
    let count = Arc::new(Count(0.into(), Notify::new()));
    let receiver: Arc<dyn Receiver> = count.clone();
    let b = network.node("b");
    let terms = Terms { scope: "s".into(), vnodes: 128, protocol: 1 };
    let to = b.start(Inbound::new(Arc::downgrade(&receiver), terms)).await.unwrap();
    let frame = Frame::new(Lane::Data, vec![1; 60], vec![2; 200]);
    let start = std::time::Instant::now();
    for _ in 0..1_000_000 {
        if let Err(busy) = a.transport.try_send(&to, frame.clone()) {
            a.transport.send(&to, busy.into_frame()).await.unwrap();
        }
    }
    count.1.notified().await;
    println!("{:.0} frames a second", 1e6 / start.elapsed().as_secs_f64());
}

/// Every rule and every fault at once, on several nodes, from one seed; then quiet. What was accepted in a session
/// that did not end arrives, in order, once.
#[tokio::test(start_paused = true)]
async fn random_faults_keep_the_contract() {
    let seeds: u64 = std::env::var("LINK_SEEDS").ok().and_then(|n| n.parse().ok()).unwrap_or(25);
    let first: u64 = std::env::var("LINK_SEED").ok().and_then(|n| n.parse().ok()).unwrap_or(0);
    for seed in first..first + seeds {
        random_faults(seed).await;
    }
}

async fn random_faults(seed: u64) {
    let names = ["a", "b", "c"];
    let network = Network::with_seed(seed);
    let mut nodes = Vec::new();
    for name in names {
        nodes.push(Node::start(&network, name).await);
    }
    network.rule("*", "*", Fault::Reorder(Duration::ZERO..3 * MS));
    network.rule("*", "*", Fault::Duplicate { percent: 5 });
    let mut chance = seed;
    let mut draw = |below: u64| {
        chance = chance.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (chance >> 33) % below
    };
    let mut value = 0;
    for _ in 0..300 {
        let (x, y) = (draw(3) as usize, draw(3) as usize);
        let (from, to) = (names[x], names[y]);
        match draw(40) {
            0 => network.cut(from, to),
            1 => network.cut_seen_by(from, to),
            2 => network.cut_one_way(from, to),
            3..=5 => network.heal(from, to),
            6 => network.blip(from, to),
            7 => network.freeze(from),
            8..=10 => network.thaw(from),
            11 => network.slow(from, draw(2) == 0),
            12 => {
                network.thaw(from);
                network.crash(from);
                nodes[x] = Node::with(nodes[x].transport.clone(), "s").await.unwrap();
            }
            13 => {
                let rule = network.rule(from, to, Fault::Lose { percent: 3 });
                tokio::time::sleep(Duration::from_millis(draw(100))).await;
                network.remove_rule(rule);
            }
            14..=19 => tokio::time::sleep(Duration::from_millis(draw(900))).await,
            _ if x != y => {
                for _ in 0..draw(20) {
                    value += 1;
                    let _ = nodes[x].try_send(&nodes[y], Lane::ALL[draw(3) as usize], value);
                }
                tokio::time::sleep(Duration::from_micros(draw(500))).await;
            }
            _ => {}
        }
    }
    names.iter().for_each(|name| {
        network.thaw(name);
        network.slow(name, false);
    });
    network.heal_all();
    network.clear_rules();
    tokio::time::sleep(30 * SEC).await;
    let mut sent = BTreeMap::new();
    for x in 0..3 {
        for y in (0..3).filter(|y| *y != x) {
            let up = Told::Up(nodes[y].me.clone());
            nodes[x].log.until(&format!("seed {seed}: {x} to have {y}"), |told| told.contains(&up)).await;
            for lane in Lane::ALL {
                value += 1;
                nodes[x].try_send(&nodes[y], lane, value).unwrap();
                sent.insert((x, y, lane), value);
            }
        }
    }
    for ((x, y, lane), value) in sent {
        let frame = Told::Frame(nodes[x].me.clone(), lane, value);
        nodes[y].log.until(&format!("seed {seed}: the last frame"), |told| told.contains(&frame)).await;
    }
    for node in &nodes {
        verify(&node.log.told(), seed);
    }
}

/// Up and down in turn, frames inside, each lane's numbers rising.
fn verify(told: &[Told], seed: u64) {
    let mut up: BTreeMap<Peer, bool> = BTreeMap::new();
    let mut highest: BTreeMap<(Peer, Lane), u64> = BTreeMap::new();
    let mut names: BTreeMap<NodeId, Peer> = BTreeMap::new();
    for one in told {
        match one {
            Told::Up(peer) => {
                assert!(up.insert(peer.clone(), false).is_none(), "seed {seed}: up twice: {peer}");
                let before = names.insert(peer.node.clone(), peer.clone());
                assert!(before.is_none(), "seed {seed}: {peer} before the end of {before:?}");
            }
            Told::Down(peer) => {
                assert!(up.remove(peer).is_some(), "seed {seed}: down without up: {peer}");
                names.remove(&peer.node);
            }
            Told::Suspect(peer) => assert_eq!(up.insert(peer.clone(), true), Some(false), "seed {seed}"),
            Told::Resumed(peer) => assert_eq!(up.insert(peer.clone(), false), Some(true), "seed {seed}"),
            Told::Settled => {}
            Told::Frame(peer, lane, value) => {
                assert!(up.contains_key(peer), "seed {seed}: a frame of {peer}, which is not up");
                let last = highest.insert((peer.clone(), *lane), *value).unwrap_or(0);
                assert!(last < *value, "seed {seed}: {value} after {last}");
            }
        }
    }
    assert!(up.values().all(|suspect| !suspect), "seed {seed}: suspect in the end: {up:?}");
}
