//! An endpoint and strangers: what comes in over connections that nobody has authenticated.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test that cannot go on says so by panicking"
)]

use std::convert::Infallible;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use bytes::Bytes;
use futures_util::{sink, stream};
use muster_router::transport::endpoint::{Endpoint, Running};
use muster_router::transport::link::{LinkConfig, Links, Output, Packet, RawId};
use muster_router::transport::{Frame, Inbound, Lane, Receiver, SendError, Terms};
use muster_router::{Incarnation, NodeId, Peer};
use parking_lot::Mutex;
use tokio::sync::mpsc;

const PATIENCE: Duration = Duration::from_secs(60);

#[derive(Clone, Debug, PartialEq, Eq)]
enum Told {
    Up(Peer),
    Down(Peer),
}

/// Keeps what it hears; tries to send while a peer is reported down.
struct Log {
    told: Mutex<Vec<Told>>,
    sent_in_down: Mutex<Vec<bool>>,
    endpoint: OnceLock<std::sync::Weak<Endpoint>>,
}

impl Receiver for Log {
    fn peer_up(&self, peer: Peer) {
        self.told.lock().push(Told::Up(peer));
    }
    fn peer_suspect(&self, _: &Peer) {}
    fn peer_resumed(&self, _: &Peer) {}
    fn peer_down(&self, peer: &Peer) {
        if let Some(endpoint) = self.endpoint.get().and_then(std::sync::Weak::upgrade) {
            let sent = endpoint.try_send(peer, Frame::new(Lane::Data, "late", ""));
            self.sent_in_down.lock().push(!matches!(sent, Err(SendError::NoLink(_))));
        }
        self.told.lock().push(Told::Down(peer.clone()));
    }
    fn discovery_settled(&self) {}
    fn frame(&self, _: &Peer, _: Frame) {}
}

struct Node {
    endpoint: Arc<Endpoint>,
    running: Running,
    log: Arc<Log>,
    me: Peer,
}

fn id(name: &str) -> NodeId {
    NodeId::new(name).unwrap()
}

fn peer(name: &str, incarnation: u64) -> Peer {
    Peer::new(id(name), Incarnation::new(incarnation).unwrap())
}

fn terms(scope: &str) -> Terms {
    Terms { scope: scope.into(), vnodes: 128, protocol: 1 }
}

async fn start(name: &str, connections: usize) -> Node {
    let log =
        Arc::new(Log { told: Mutex::default(), sent_in_down: Mutex::default(), endpoint: OnceLock::new() });
    let receiver: Arc<dyn Receiver> = log.clone();
    // what a stranger does is not cut short
    let link = LinkConfig { handshake_timeout: PATIENCE, ..LinkConfig::default() };
    let endpoint = Arc::new(Endpoint::new(id(name), link).max_connections(connections));
    log.endpoint.set(Arc::downgrade(&endpoint)).unwrap();
    let mut running = None;
    let inbound = Inbound::new(Arc::downgrade(&receiver), terms("s"));
    let nobody = |r| {
        running = Some(r);
        Ok(Vec::<NodeId>::new())
    };
    let me = endpoint.start(inbound, nobody).await.unwrap();
    Node { endpoint, running: running.unwrap(), log, me }
}

/// A connection that came in: what to write to the node and what it writes.
fn connect(node: &Node) -> (mpsc::Sender<Bytes>, mpsc::Receiver<Bytes>) {
    let ((to_node, mut from), (to, from_node)) = (mpsc::channel::<Bytes>(64), mpsc::channel::<Bytes>(64));
    let running = node.running.clone();
    node.running.spawn(async move {
        let stream =
            stream::poll_fn(move |context| from.poll_recv(context).map(|b| b.map(Ok::<_, Infallible>)));
        let sink = sink::unfold(to, |to, bytes| async move { to.send(bytes).await.map(|()| to) });
        running.accepted(None, stream, Box::pin(sink)).await;
    });
    (to_node, from_node)
}

fn links(of: &Peer, scope: &str) -> Links {
    let mut links = Links::new(of.clone(), terms(scope), LinkConfig::default());
    links.settle();
    links.handle_opened(RawId(1), Duration::ZERO);
    links
}

fn hello(of: &Peer, scope: &str) -> Bytes {
    match links(of, scope).poll_output(RawId(1), true) {
        Output::Packet(packet) => packet.to_bytes(),
        other => panic!("{other:?}"),
    }
}

/// Until the node closes the connection.
async fn closed(from: &mut mpsc::Receiver<Bytes>) {
    tokio::time::timeout(PATIENCE, async { while from.recv().await.is_some() {} })
        .await
        .expect("it is closed");
}

async fn until(what: &str, holds: impl Fn() -> bool) {
    let holding = async {
        while !holds() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    tokio::time::timeout(PATIENCE, holding).await.expect(what);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stranger_that_is_refused_does_not_keep_us_from_dialling() {
    let node = start("a", 16).await;
    let (to, mut from) = connect(&node);
    to.send(hello(&peer("b", 5), "another scope")).await.unwrap();
    closed(&mut from).await;
    assert!(node.running.attempt(&id("b")).is_some(), "b is not dialled");
}

/// The strangers' answers used to pile up without an end.
#[tokio::test(flavor = "multi_thread")]
async fn one_who_pings_and_reads_nothing_is_owed_little() {
    let node = start("a", 16).await;
    let (to, mut from) = connect(&node);
    // below a, so a follows and waits
    to.send(hello(&peer("0", 5), "s")).await.unwrap();
    let ping = Packet { head: Bytes::from_static(&[7, 1, 0, 0, 0]), body: Bytes::new() }.to_bytes();
    let pings = 30_000;
    for _ in 0..pings {
        to.send(ping.clone()).await.unwrap();
    }
    // its hello, then answers, until none has come for a while
    let mut answers = 0;
    while let Ok(Some(_)) = tokio::time::timeout(Duration::from_millis(500), from.recv()).await {
        answers += 1;
    }
    assert!((1..5000).contains(&answers), "{answers} answers were kept for {pings} pings");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_name_that_is_lost_after_the_start_is_reported() {
    let node = start("a", 16).await;
    let (to, mut from) = connect(&node);
    let later = Peer::new(id("a"), node.me.incarnation.next());
    to.send(hello(&later, "s")).await.unwrap();
    closed(&mut from).await;
    until("the router hears of it", || node.log.told.lock().contains(&Told::Up(later.clone()))).await;
    node.endpoint.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_beyond_the_bound_are_dropped_and_counted() {
    let node = start("a", 4).await;
    let mut kept = Vec::new();
    for _ in 0..4 {
        let (to, mut from) = connect(&node);
        // its hello says that it is carried
        tokio::time::timeout(PATIENCE, from.recv()).await.unwrap().expect("a hello");
        kept.push((to, from));
    }
    for _ in 0..10 {
        let (_to, mut from) = connect(&node);
        closed(&mut from).await;
    }
    assert_eq!(node.endpoint.turned_away(), 10);
    kept.pop();
    let deadline = tokio::time::Instant::now() + PATIENCE;
    loop {
        let (_to, mut from) = connect(&node);
        if tokio::time::timeout(PATIENCE, from.recv()).await.unwrap().is_some() {
            break;
        }
        assert!(tokio::time::Instant::now() < deadline, "there is no room again");
    }
}

/// Carries until the peer is linked there; what the node wrote after that stays.
async fn link(lead: &mut Links, to: &mpsc::Sender<Bytes>, from: &mut mpsc::Receiver<Bytes>) {
    let carried = async {
        loop {
            while lead.poll_effect().is_some() {}
            while let Output::Packet(packet) = lead.poll_output(RawId(1), true) {
                to.send(packet.to_bytes()).await.unwrap();
            }
            if lead.is_linked(&id("z")) {
                return;
            }
            let bytes = from.recv().await.expect("the node goes on");
            lead.handle_packet(RawId(1), Packet::from_bytes(bytes).unwrap(), Duration::ZERO);
        }
    };
    tokio::time::timeout(PATIENCE, carried).await.expect("linked");
}

/// The leader comes back and has no session any more: the node replaces its own in one step.
#[tokio::test(flavor = "multi_thread")]
async fn there_is_no_link_while_a_session_that_was_replaced_is_reported_down() {
    let node = start("z", 16).await;
    let b = peer("b", 5);
    let (to, mut from) = connect(&node);
    let mut lead = links(&b, "s");
    link(&mut lead, &to, &mut from).await;
    let (to_again, mut from_again) = connect(&node);
    let mut lead = links(&b, "s");
    link(&mut lead, &to_again, &mut from_again).await;
    let told = [Told::Up(b.clone()), Told::Down(b.clone()), Told::Up(b.clone())];
    until("replaced", || node.log.told.lock().len() >= 3).await;
    assert_eq!(*node.log.told.lock(), told);
    assert_eq!(*node.log.sent_in_down.lock(), [false], "a frame was taken for the next session");
    assert!(node.endpoint.try_send(&b, Frame::new(Lane::Data, "head", "")).is_ok());
}

/// The guide's own sink is one whose close does nothing: that it is gone has to say that the connection is.
#[tokio::test(start_paused = true)]
async fn a_goodbye_does_not_wait_for_a_sink_that_only_ends_when_it_is_dropped() {
    let node = start("a", 16).await;
    let (to, mut from) = connect(&node);
    tokio::time::timeout(PATIENCE, from.recv()).await.unwrap().expect("a hello");
    let other = tokio::spawn(async move {
        while from.recv().await.is_some() {}
        drop(to);
    });
    let began = tokio::time::Instant::now();
    node.endpoint.shutdown().await;
    assert!(began.elapsed() < Duration::from_millis(500), "it took {:?}", began.elapsed());
    other.await.unwrap();
}
