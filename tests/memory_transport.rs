//! The conformance suite on the memory network, and proof that its rules can fail.

// helpers of tests are no test functions to the lint
#![allow(clippy::panic)]

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use muster_router::testing::conformance::{self, Harness, Unsupported, Verdict};
use muster_router::transport::link::LinkConfig;
use muster_router::transport::memory::Network;
use muster_router::transport::{Frame, Inbound, Lane, Receiver, SendError, Terms, Transport, TransportError};
use muster_router::{NodeId, Peer};
use parking_lot::Mutex;

/// Takes everything at once.
#[derive(Default)]
struct Sink(Mutex<Option<Peer>>, AtomicUsize);

impl Receiver for Sink {
    fn peer_up(&self, peer: Peer) {
        *self.0.lock() = Some(peer);
    }
    fn peer_suspect(&self, _: &Peer) {}
    fn peer_resumed(&self, _: &Peer) {}
    fn peer_down(&self, _: &Peer) {}
    fn discovery_settled(&self) {}
    fn frame(&self, _: &Peer, _: Frame) {
        self.1.fetch_add(1, Ordering::SeqCst);
    }
}

/// A sender that found the bell just before it rang was left waiting for ever: with many senders on a queue of four
/// frames that happened in most runs.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn senders_that_wait_for_room_are_all_woken() {
    let (senders, each) = (16, 2000);
    let link = LinkConfig { queue_frames: 4, ..LinkConfig::default() };
    let network = Network::builder().link(link).build();
    let terms = Terms { scope: "rooms".into(), vnodes: 128, protocol: 1 };
    let sinks = [Arc::new(Sink::default()), Arc::new(Sink::default())];
    let ends = ["a", "b"].map(|name| Arc::new(network.node(name)));
    for (end, sink) in ends.iter().zip(&sinks) {
        let receiver: Arc<dyn Receiver> = sink.clone();
        end.start(Inbound::new(Arc::downgrade(&receiver), terms.clone())).await.expect("starts");
    }
    let to = loop {
        let up = sinks[0].0.lock().clone();
        match up {
            Some(peer) => break peer,
            None => tokio::task::yield_now().await,
        }
    };
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..senders {
        let (end, to) = (ends[0].clone(), to.clone());
        tasks.spawn(async move {
            for _ in 0..each {
                end.send(&to, Frame::new(Lane::Data, "", "payload")).await.expect("sent");
            }
        });
    }
    let sent = async { while tasks.join_next().await.is_some() {} };
    tokio::time::timeout(Duration::from_secs(60), sent).await.expect("a sender was never woken");
    let all = async {
        while sinks[1].1.load(Ordering::SeqCst) < senders * each {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), all).await.expect("all of it comes");
}

struct Memory(Network);

impl Memory {
    /// On a machine that is busy with other tests, a node may get no time for seconds: only a fault that a
    /// rule causes may take a link down.
    fn patient() -> Network {
        let patience = Duration::from_secs(60);
        let link = LinkConfig {
            ping_interval: None,
            ping_timeout: patience,
            stall_timeout: patience,
            ..LinkConfig::default()
        };
        Network::builder().link(link).build()
    }
}

#[async_trait]
impl Harness for Memory {
    async fn new() -> Self {
        Memory(Self::patient())
    }
    async fn transport(&self, node: &str) -> Arc<dyn Transport> {
        Arc::new(self.0.node(node))
    }
    fn skipped(&self, rule: &str, why: &str) {
        panic!("every rule applies here, but {rule} was skipped: {why}");
    }
    async fn blip(&self, a: &str, b: &str) -> Result<(), Unsupported> {
        self.0.blip(a, b);
        Ok(())
    }
    async fn cut(&self, a: &str, b: &str) -> Result<(), Unsupported> {
        self.0.cut(a, b);
        Ok(())
    }
    async fn cut_seen_by(&self, a: &str, b: &str) -> Result<(), Unsupported> {
        self.0.cut_seen_by(a, b);
        Ok(())
    }
    async fn heal(&self, a: &str, b: &str) -> Result<(), Unsupported> {
        self.0.heal(a, b);
        Ok(())
    }
    async fn crash(&self, node: &str) -> Result<(), Unsupported> {
        self.0.crash(node);
        Ok(())
    }
    async fn freeze(&self, node: &str) -> Result<(), Unsupported> {
        self.0.freeze(node);
        Ok(())
    }
    async fn thaw(&self, node: &str) -> Result<(), Unsupported> {
        self.0.thaw(node);
        Ok(())
    }
}

muster_router::transport_conformance!(Memory);

/// Gives up quickly, so that many sessions replace one another in a short time.
struct Quick(Network);

#[async_trait]
impl Harness for Quick {
    async fn new() -> Self {
        let link = LinkConfig {
            ping_interval: None,
            reconnect_grace: Duration::from_millis(30),
            ..LinkConfig::default()
        };
        Quick(Network::builder().link(link).build())
    }
    async fn transport(&self, node: &str) -> Arc<dyn Transport> {
        Arc::new(self.0.node(node))
    }
    async fn cut_seen_by(&self, a: &str, b: &str) -> Result<(), Unsupported> {
        self.0.cut_seen_by(a, b);
        Ok(())
    }
    async fn heal(&self, a: &str, b: &str) -> Result<(), Unsupported> {
        self.0.heal(a, b);
        Ok(())
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn forty_sessions_that_replace_one_another_share_no_frame() {
    let network = Quick::new().await;
    conformance::sessions_that_replace_one_another_share_no_frame(&network).await.unwrap();
}

/// What a transport that is broken on purpose does wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    SwapsTwoFrames,
    LosesAFrame,
    RepeatsAFrame,
    DropsDown,
    DeliversBeforeUp,
    SettlesTwice,
    ReportsAfterShutdown,
    ReportsFromInsideTrySend,
    NeverBusy,
}

/// A memory network whose transports have one fault.
struct Broken(Network, Fault);

#[async_trait]
impl Harness for Broken {
    async fn new() -> Self {
        unreachable!("made by hand, with a fault")
    }
    async fn transport(&self, node: &str) -> Arc<dyn Transport> {
        Arc::new(BrokenTransport {
            inner: Arc::new(self.0.node(node)),
            fault: self.1,
            tamper: Mutex::new(None),
        })
    }
    fn patience(&self) -> Duration {
        // what a broken transport never does is waited for this long; the rest comes at once
        Duration::from_secs(5)
    }
    async fn freeze(&self, node: &str) -> Result<(), Unsupported> {
        self.0.freeze(node);
        Ok(())
    }
    async fn thaw(&self, node: &str) -> Result<(), Unsupported> {
        self.0.thaw(node);
        Ok(())
    }
}

struct BrokenTransport {
    inner: Arc<dyn Transport>,
    fault: Fault,
    tamper: Mutex<Option<Arc<Tamper>>>,
}

#[async_trait]
impl Transport for BrokenTransport {
    fn node(&self) -> &NodeId {
        self.inner.node()
    }
    async fn start(&self, inbound: Inbound) -> Result<Peer, TransportError> {
        let terms = inbound.terms().clone();
        let tamper = Arc::new(Tamper {
            inbound,
            fault: self.fault,
            frames: AtomicUsize::new(0),
            held: Mutex::new(None),
            last: Mutex::new(None),
        });
        let receiver: Arc<dyn Receiver> = tamper.clone();
        let started = self.inner.start(Inbound::new(Arc::downgrade(&receiver), terms)).await?;
        *self.tamper.lock() = Some(tamper);
        Ok(started)
    }
    async fn send(&self, to: &Peer, frame: Frame) -> Result<(), SendError> {
        self.inner.send(to, frame).await
    }
    fn try_send(&self, to: &Peer, frame: Frame) -> Result<(), SendError> {
        if self.fault == Fault::ReportsFromInsideTrySend {
            if let Some(tamper) = &*self.tamper.lock() {
                tamper.inbound.peer_suspect(to);
            }
        }
        match self.inner.try_send(to, frame) {
            Err(SendError::Busy(_)) if self.fault == Fault::NeverBusy => Ok(()),
            other => other,
        }
    }
    fn max_frame(&self) -> usize {
        self.inner.max_frame()
    }
    async fn shutdown(&self) {
        self.inner.shutdown().await;
        if self.fault == Fault::ReportsAfterShutdown {
            let tamper = self.tamper.lock().clone();
            let peer = tamper.as_ref().and_then(|tamper| tamper.last.lock().clone());
            if let (Some(tamper), Some(peer)) = (tamper, peer) {
                tokio::spawn(async move { tamper.inbound.peer_suspect(&peer) });
            }
        }
    }
}

/// Stands between a transport and its receiver.
struct Tamper {
    inbound: Inbound,
    fault: Fault,
    frames: AtomicUsize,
    held: Mutex<Option<Frame>>,
    last: Mutex<Option<Peer>>,
}

impl Receiver for Tamper {
    fn peer_up(&self, peer: Peer) {
        *self.last.lock() = Some(peer.clone());
        if self.fault == Fault::DeliversBeforeUp {
            self.inbound.frame(&peer, Frame::new(Lane::Data, "early", ""));
        }
        self.inbound.peer_up(peer);
    }
    fn peer_suspect(&self, peer: &Peer) {
        self.inbound.peer_suspect(peer);
    }
    fn peer_resumed(&self, peer: &Peer) {
        self.inbound.peer_resumed(peer);
    }
    fn peer_down(&self, peer: &Peer) {
        if self.fault != Fault::DropsDown {
            self.inbound.peer_down(peer);
        }
    }
    fn discovery_settled(&self) {
        self.inbound.discovery_settled();
        if self.fault == Fault::SettlesTwice {
            self.inbound.discovery_settled();
        }
    }
    fn frame(&self, peer: &Peer, frame: Frame) {
        // one lane, on which one task sends in the rule on order
        let number = match frame.lane {
            Lane::Control => self.frames.fetch_add(1, Ordering::Relaxed),
            Lane::Data | Lane::Bulk => usize::MAX,
        };
        match (self.fault, number) {
            (Fault::SwapsTwoFrames, 100) => *self.held.lock() = Some(frame),
            (Fault::SwapsTwoFrames, 101) => {
                self.inbound.frame(peer, frame);
                if let Some(held) = self.held.lock().take() {
                    self.inbound.frame(peer, held);
                }
            }
            (Fault::LosesAFrame, 100) => {}
            (Fault::RepeatsAFrame, 100) => {
                self.inbound.frame(peer, frame.clone());
                self.inbound.frame(peer, frame);
            }
            _ => self.inbound.frame(peer, frame),
        }
    }
}

fn broken(fault: Fault) -> Broken {
    Broken(Memory::patient(), fault)
}

/// The rule must fail, and for the reason that was built in.
#[track_caller]
fn assert_fails(verdict: Verdict, because: &str) {
    match verdict {
        Ok(()) => panic!("a broken transport passed"),
        Err(why) => assert!(why.contains(because), "it failed for another reason: {why}"),
    }
}

#[tokio::test]
async fn two_swapped_frames_are_noticed() {
    assert_fails(conformance::order_per_lane(&broken(Fault::SwapsTwoFrames)).await, "101 came in place 100");
}

#[tokio::test]
async fn a_repeated_frame_is_noticed() {
    assert_fails(conformance::order_per_lane(&broken(Fault::RepeatsAFrame)).await, "100 came in place 101");
}

#[tokio::test]
async fn a_lost_frame_is_noticed() {
    assert_fails(conformance::order_per_lane(&broken(Fault::LosesAFrame)).await, "6000 frames of");
}

#[tokio::test]
async fn a_down_that_is_not_reported_is_noticed() {
    assert_fails(
        conformance::down_after_the_last_frame(&broken(Fault::DropsDown)).await,
        "down did not happen",
    );
}

#[tokio::test]
async fn a_frame_before_up_is_noticed() {
    let verdict = conformance::up_before_the_first_frame(&broken(Fault::DeliversBeforeUp)).await;
    assert_fails(verdict, "came while it was not up");
}

#[tokio::test]
async fn settling_twice_is_noticed() {
    assert_fails(conformance::discovery_settles_once(&broken(Fault::SettlesTwice)).await, "more than once");
}

#[tokio::test]
async fn a_report_after_shutdown_is_noticed() {
    let verdict = conformance::shutdown_while_sending(&broken(Fault::ReportsAfterShutdown)).await;
    assert_fails(verdict, "after shutdown had returned");
}

#[tokio::test]
async fn a_report_from_inside_try_send_is_noticed() {
    let verdict = conformance::order_per_lane(&broken(Fault::ReportsFromInsideTrySend)).await;
    assert_fails(verdict, "from inside a send");
}

#[tokio::test]
async fn a_queue_without_a_bound_is_noticed() {
    assert_fails(conformance::back_pressure(&broken(Fault::NeverBusy)).await, "none was taken");
}
