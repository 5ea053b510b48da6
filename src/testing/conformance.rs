//! The suite that every [`Transport`] must pass, for those who bring their own.
//!
//! A [`Harness`] says how to make a network and the transports on it, and which faults it can cause;
//! [`transport_conformance!`](crate::transport_conformance) turns it into one test per rule, once on a
//! runtime of one thread and once on several.
//!
//! ```
//! use std::sync::Arc;
//! use async_trait::async_trait;
//! use muster_router::testing::conformance::{Harness, Unsupported};
//! use muster_router::transport::{Transport, memory::Network};
//!
//! struct Mine(Network);
//!
//! #[async_trait]
//! impl Harness for Mine {
//!     async fn new() -> Self {
//!         Mine(Network::new())
//!     }
//!     async fn transport(&self, node: &str) -> Arc<dyn Transport> {
//!         Arc::new(self.0.node(node))
//!     }
//!     // optional: what cannot be caused is said to be unsupported, and the rules that need it are skipped
//!     async fn crash(&self, node: &str) -> Result<(), Unsupported> {
//!         self.0.crash(node);
//!         Ok(())
//!     }
//! }
//!
//! muster_router::transport_conformance!(Mine);
//! # fn main() {}
//! ```
//!
//! It needs the feature `testing` of this crate, and `tokio` with `macros`, `rt-multi-thread` and `time`
//! among the dev-dependencies. `MUSTER_PEERS=1000` makes the rule on many peers a large one.
//!
//! The rules are plain functions, so that one can be run alone, and so that a transport which is broken on
//! purpose can be shown to fail. Besides what a rule is about, each also checks what must hold at all times:
//! see [`Recorder`].

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use bytes::Bytes;
use parking_lot::{Condvar, Mutex};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::timeout;

use crate::transport::link::LinkConfig;
use crate::transport::{Frame, Inbound, Lane, Receiver, SendError, Terms, Transport, TransportError};
use crate::types::{Incarnation, NodeId, Peer};

#[doc(inline)]
pub use crate::transport_conformance;

/// `Ok` if the rule holds or was skipped; otherwise what was seen instead.
pub type Verdict = Result<(), String>;

/// The harness cannot cause this fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the harness cannot do this")]
pub struct Unsupported;

/// Times of links under which only what a rule does takes a link down, however busy the machine is. For a
/// [`Harness`]; in a server they would hide a peer that hangs.
pub fn patient_links() -> LinkConfig {
    let patience = Duration::from_secs(60);
    LinkConfig {
        ping_interval: Some(patience / 4),
        ping_timeout: patience,
        stall_timeout: patience,
        handshake_timeout: patience,
        ..LinkConfig::default()
    }
}

/// A network to test transports on.
#[async_trait]
pub trait Harness: Send + Sync + 'static {
    /// A fresh network, apart from all others: tests run at the same time.
    async fn new() -> Self
    where
        Self: Sized;

    /// A transport that has not been started. The same name may be asked for again: that is another life of
    /// the same node, or a rival for its name.
    async fn transport(&self, node: &str) -> Arc<dyn Transport>;

    /// How long a rule waits for what must happen. Passing never takes that long.
    fn patience(&self) -> Duration {
        Duration::from_secs(30)
    }

    /// How many nodes the rule on many peers starts, if `MUSTER_PEERS` does not say. Each is linked to each.
    fn peers(&self) -> usize {
        60
    }

    /// Whether a second start under a live name is an error at once. Say no where it can be told only later.
    fn refuses_duplicates(&self) -> bool {
        true
    }

    /// Called when a rule, or a part of one, is not checked.
    fn skipped(&self, rule: &str, why: &str) {
        eprintln!("conformance: {rule} is skipped: {why}");
    }

    /// Breaks the connection between two nodes for less than the grace: nothing may be lost.
    async fn blip(&self, _a: &str, _b: &str) -> Result<(), Unsupported> {
        Err(Unsupported)
    }

    /// Keeps two nodes apart until [`Harness::heal`]; both must report the other down meanwhile.
    async fn cut(&self, _a: &str, _b: &str) -> Result<(), Unsupported> {
        Err(Unsupported)
    }

    /// Ends a [`Harness::cut`] and a [`Harness::cut_seen_by`].
    async fn heal(&self, _a: &str, _b: &str) -> Result<(), Unsupported> {
        Err(Unsupported)
    }

    /// The same, but only `a` is told at once; an idle `b` need not notice. Then `a` gives `b` up, and `b` finds out
    /// by the next connection: one session replaces another in one step.
    async fn cut_seen_by(&self, _a: &str, _b: &str) -> Result<(), Unsupported> {
        Err(Unsupported)
    }

    /// Ends a node without a goodbye, as `kill -9` would. When this returns, the name may be started again
    /// on another transport value.
    async fn crash(&self, _node: &str) -> Result<(), Unsupported> {
        Err(Unsupported)
    }

    /// Stops a node in its tracks, with its links open, until [`Harness::thaw`]. Without it, the rule on
    /// back-pressure blocks the receiver, which it can do on several threads only.
    async fn freeze(&self, _node: &str) -> Result<(), Unsupported> {
        Err(Unsupported)
    }

    /// Ends a [`Harness::freeze`].
    async fn thaw(&self, _node: &str) -> Result<(), Unsupported> {
        Err(Unsupported)
    }
}

/// Makes one test per rule of [`testing::conformance`](crate::testing::conformance) for a
/// [`Harness`](crate::testing::conformance::Harness): `transport_conformance!(MyHarness);` at the top of a
/// test file or in a module of its own.
#[macro_export]
macro_rules! transport_conformance {
    ($harness:ty) => {
        mod on_one_thread {
            #[allow(unused_imports)]
            use super::*;
            $crate::transport_conformance!(@rules one $harness);
        }
        mod on_many_threads {
            #[allow(unused_imports)]
            use super::*;
            $crate::transport_conformance!(@rules many $harness);
        }
    };
    (@rules $threads:ident $harness:ty) => {
        $crate::transport_conformance!(@each $threads $harness:
            order_per_lane
            up_before_the_first_frame
            down_after_the_last_frame
            crash_is_down_for_the_others
            cut_is_down_for_both
            nothing_of_a_closed_session_in_the_next
            nothing_for_an_earlier_life_reaches_the_next
            no_link_while_down_is_reported
            sessions_that_replace_one_another_share_no_frame
            large_and_empty_frames
            back_pressure
            unknown_peers
            earlier_incarnations
            blip_loses_nothing
            duplicate_identity
            restart_on_the_same_value
            double_start
            shutdown_while_sending
            discovery_settles_once
            many_peers
            other_terms_are_refused
        );
    };
    (@each $threads:ident $harness:ty: $($rule:ident)*) => {
        $( $crate::transport_conformance!(@$threads $harness, $rule); )*
    };
    (@one $harness:ty, $rule:ident) => {
        #[tokio::test(flavor = "current_thread")]
        async fn $rule() {
            $crate::transport_conformance!(@run $harness, $rule);
        }
    };
    (@many $harness:ty, $rule:ident) => {
        #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
        async fn $rule() {
            $crate::transport_conformance!(@run $harness, $rule);
        }
    };
    (@run $harness:ty, $rule:ident) => {
        let harness = <$harness as $crate::testing::conformance::Harness>::new().await;
        if let Err(why) = $crate::testing::conformance::$rule(&harness).await {
            panic!("the rule {} is broken: {why}", stringify!($rule));
        }
    };
}

/// What a transport has reported.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Seen {
    /// [`Receiver::peer_up`].
    Up(Peer),
    /// [`Receiver::peer_suspect`].
    Suspect(Peer),
    /// [`Receiver::peer_resumed`].
    Resumed(Peer),
    /// [`Receiver::peer_down`].
    Down(Peer),
    /// [`Receiver::discovery_settled`].
    Settled,
    /// [`Receiver::frame`].
    Frame(Peer, Frame),
}

/// Everything that one life of a node has heard.
#[derive(Debug, Default)]
pub struct Log {
    /// What was reported, in order, each with a number from the clock that all recorders of a test share.
    pub events: Vec<(u64, Seen)>,
    /// Who is up now.
    pub up: BTreeMap<NodeId, Peer>,
    /// How often each peer was reported up.
    pub ups: BTreeMap<Peer, usize>,
    /// How often each peer was reported down.
    pub downs: BTreeMap<Peer, usize>,
    /// How many frames each peer has sent.
    pub frames: BTreeMap<Peer, usize>,
    /// How often discovery has settled.
    pub settled: usize,
    /// What must never happen and did.
    pub violations: Vec<String>,
    inside: BTreeSet<Peer>,
    latest: BTreeMap<NodeId, Incarnation>,
    ended: Option<Ended>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ended {
    /// Nothing may be reported any more.
    Shutdown,
    /// What a killed process would have said counts for nothing.
    Crash,
}

impl Log {
    /// How many frames this peer has sent.
    pub fn frames_from(&self, peer: &Peer) -> usize {
        self.frames.get(peer).copied().unwrap_or(0)
    }

    /// How often this peer was reported up.
    pub fn ups_of(&self, peer: &Peer) -> usize {
        self.ups.get(peer).copied().unwrap_or(0)
    }

    /// How often this peer was reported down.
    pub fn downs_of(&self, peer: &Peer) -> usize {
        self.downs.get(peer).copied().unwrap_or(0)
    }

    /// Whether exactly this peer is up.
    pub fn is_up(&self, peer: &Peer) -> bool {
        self.up.get(&peer.node) == Some(peer)
    }

    fn violation(&mut self, what: String) {
        // the first ones say it; a broken transport may say it a million times
        if self.violations.len() < 8 {
            self.violations.push(what);
        }
    }

    fn record(&mut self, stamp: u64, seen: Seen) {
        match &seen {
            Seen::Up(peer) => {
                if let Some(old) = self.up.insert(peer.node.clone(), peer.clone()) {
                    self.violation(format!("{peer} was reported up while {old} was up"));
                }
                let latest = self.latest.insert(peer.node.clone(), peer.incarnation);
                if latest.is_some_and(|latest| latest > peer.incarnation) {
                    self.violation(format!("{peer} was reported up after a later life of it"));
                }
                *self.ups.entry(peer.clone()).or_default() += 1;
            }
            Seen::Down(peer) => {
                if !self.is_up(peer) {
                    self.violation(format!("{peer} was reported down and was not up"));
                }
                self.up.remove(&peer.node);
                *self.downs.entry(peer.clone()).or_default() += 1;
            }
            Seen::Suspect(peer) | Seen::Resumed(peer) => {
                if !self.is_up(peer) {
                    self.violation(format!("{seen:?} and it was not up"));
                }
            }
            Seen::Settled => {
                self.settled += 1;
                if self.settled > 1 {
                    self.violation("discovery settled more than once".to_owned());
                }
            }
            Seen::Frame(peer, _) => {
                if !self.is_up(peer) {
                    self.violation(format!("a frame of {peer} came while it was not up"));
                }
                *self.frames.entry(peer.clone()).or_default() += 1;
            }
        }
        self.events.push((stamp, seen));
    }

    fn summary(&self) -> String {
        let tail: Vec<String> = self
            .events
            .iter()
            .filter(|(_, seen)| !matches!(seen, Seen::Frame(..)))
            .rev()
            .take(12)
            .map(|(_, seen)| format!("{seen:?}"))
            .collect();
        format!("frames {:?}; what else, the latest first: {tail:?}", self.frames)
    }
}

thread_local! {
    /// This thread is inside a `send` or `try_send` of a rule.
    static SENDING: Cell<bool> = const { Cell::new(false) };
}

struct Sending;

impl Sending {
    fn here() -> Self {
        SENDING.set(true);
        Self
    }
}

impl Drop for Sending {
    fn drop(&mut self) {
        SENDING.set(false);
    }
}

/// A [`Receiver`] that keeps what it hears, lets a test wait for a condition, and notes at once what no
/// transport may do: frames of, or news about, a peer that is not up; a peer up twice, or an earlier life after
/// a later one; two reports of one peer at a time; a report from inside a send; anything after `shutdown`
/// has returned.
pub struct Recorder {
    log: Mutex<Log>,
    changed: watch::Sender<u64>,
    clock: Arc<AtomicU64>,
    me: OnceLock<Peer>,
    patience: Duration,
    closed: Mutex<bool>,
    opened: Condvar,
    probe: OnceLock<Probe>,
}

/// Looks at every `Up` and `Down` while it is being reported; says what is wrong.
type Probe = Box<dyn Fn(&Seen) -> Verdict + Send + Sync>;

impl Recorder {
    /// A recorder that waits at most `patience` for anything. `clock` numbers the events of all recorders of
    /// a test.
    pub fn new(clock: Arc<AtomicU64>, patience: Duration) -> Arc<Self> {
        Arc::new(Self {
            log: Mutex::default(),
            changed: watch::Sender::new(0),
            clock,
            me: OnceLock::new(),
            patience,
            closed: Mutex::new(false),
            opened: Condvar::new(),
            probe: OnceLock::new(),
        })
    }

    /// Looks at the log.
    pub fn with<T>(&self, look: impl FnOnce(&Log) -> T) -> T {
        look(&self.log.lock())
    }

    /// Waits until the log fulfils a condition. Cancel-safe.
    ///
    /// # Errors
    /// What was awaited and what was seen instead, when the patience has run out or a violation was noted.
    pub async fn until(&self, what: &str, fulfilled: impl Fn(&Log) -> bool) -> Verdict {
        let mut changes = self.changed.subscribe();
        let wait = async {
            loop {
                changes.borrow_and_update();
                {
                    let log = self.log.lock();
                    if let Some(violation) = log.violations.first() {
                        return Err(format!("{}: {violation}", self.name()));
                    }
                    if fulfilled(&log) {
                        return Ok(());
                    }
                }
                if changes.changed().await.is_err() {
                    return Err(format!("{}: nothing more can come", self.name()));
                }
            }
        };
        timeout(self.patience, wait).await.unwrap_or_else(|_| {
            let seen = self.with(Log::summary);
            Err(format!("{}: {what} did not happen within {:?}; seen: {seen}", self.name(), self.patience))
        })
    }

    /// While shut, [`Receiver::frame`] does not return (for twice the patience at most).
    pub fn shut_gate(&self, shut: bool) {
        *self.closed.lock() = shut;
        self.opened.notify_all();
    }

    fn name(&self) -> String {
        self.me.get().map_or_else(|| "a node that is starting".to_owned(), ToString::to_string)
    }

    fn end(&self, how: Ended) {
        self.log.lock().ended = Some(how);
    }

    fn check(&self) -> Verdict {
        self.with(|log| match log.violations.first() {
            Some(violation) => Err(format!("{}: {violation}", self.name())),
            None => Ok(()),
        })
    }

    /// Looks, then gives a transport that does not wait for the report the chance to be caught.
    fn look(&self, seen: &Seen) {
        let verdict = self.probe.get().map_or(Ok(()), |probe| probe(seen));
        if let Err(violation) = verdict {
            self.log.lock().violation(violation);
        }
        std::thread::yield_now();
    }

    /// Notes a report; `during` is what takes place before it returns.
    fn hear(&self, seen: Seen, during: impl FnOnce()) {
        let peer = match &seen {
            Seen::Up(peer) | Seen::Suspect(peer) | Seen::Resumed(peer) | Seen::Down(peer) => {
                Some(peer.clone())
            }
            Seen::Frame(peer, _) => Some(peer.clone()),
            Seen::Settled => None,
        };
        {
            let mut log = self.log.lock();
            match log.ended {
                Some(Ended::Crash) => return,
                Some(Ended::Shutdown) => {
                    log.violation(format!("reported after shutdown had returned: {}", kind(&seen)));
                }
                None => {}
            }
            if SENDING.get() {
                log.violation(format!("reported from inside a send: {}", kind(&seen)));
            }
            if let Some(peer) = &peer {
                if !log.inside.insert(peer.clone()) {
                    log.violation(format!("two reports of {peer} at the same time"));
                }
            }
            let stamp = self.clock.fetch_add(1, Ordering::SeqCst);
            log.record(stamp, seen);
        }
        during();
        if let Some(peer) = &peer {
            self.log.lock().inside.remove(peer);
        }
        self.changed.send_modify(|count| *count = count.wrapping_add(1));
    }
}

fn kind(seen: &Seen) -> String {
    match seen {
        Seen::Frame(peer, frame) => format!("a frame of {peer} of {} bytes", frame.len()),
        other => format!("{other:?}"),
    }
}

impl Receiver for Recorder {
    fn peer_up(&self, peer: Peer) {
        let up = Seen::Up(peer);
        self.hear(up.clone(), || self.look(&up));
    }
    fn peer_suspect(&self, peer: &Peer) {
        self.hear(Seen::Suspect(peer.clone()), || {});
    }
    fn peer_resumed(&self, peer: &Peer) {
        self.hear(Seen::Resumed(peer.clone()), || {});
    }
    fn peer_down(&self, peer: &Peer) {
        let down = Seen::Down(peer.clone());
        self.hear(down.clone(), || self.look(&down));
    }
    fn discovery_settled(&self) {
        self.hear(Seen::Settled, || {});
    }
    fn frame(&self, peer: &Peer, frame: Frame) {
        self.hear(Seen::Frame(peer.clone(), frame), || {
            let mut closed = self.closed.lock();
            if *closed {
                let _ = self.opened.wait_while_for(&mut closed, |closed| *closed, self.patience * 2);
            }
        });
    }
}

/// The terms that the rules start transports with.
fn terms() -> Terms {
    Terms { scope: "conformance".to_owned(), vnodes: 64, protocol: 1 }
}

/// One life of a node.
#[derive(Clone)]
struct Node {
    transport: Arc<dyn Transport>,
    recorder: Arc<Recorder>,
    me: Peer,
}

impl Node {
    fn try_send(&self, to: &Peer, frame: Frame) -> Result<(), SendError> {
        let _sending = Sending::here();
        self.transport.try_send(to, frame)
    }

    /// Sends, waiting for room; notes reports from inside the send.
    async fn send(&self, to: &Peer, frame: Frame) -> Result<(), SendError> {
        let mut sent = pin!(self.transport.send(to, frame));
        let patience = self.recorder.patience;
        let sent = poll_fn(|context| {
            let _sending = Sending::here();
            sent.as_mut().poll(context)
        });
        match timeout(patience, sent).await {
            Ok(result) => result,
            Err(_) => {
                let mut log = self.recorder.log.lock();
                log.violation(format!("a send of {} to {to} waited longer than {patience:?}", self.me));
                Err(SendError::NoLink(Frame::new(Lane::Control, Bytes::new(), Bytes::new())))
            }
        }
    }

    async fn must_send(&self, to: &Peer, frame: Frame) -> Verdict {
        self.send(to, frame)
            .await
            .map_err(|error| format!("{}: a send to {to}, which is up, failed with {error:?}", self.me))
    }

    async fn shutdown(&self) -> Verdict {
        timeout(self.recorder.patience, self.transport.shutdown())
            .await
            .map_err(|_| format!("{}: shutdown did not return", self.me))?;
        self.recorder.end(Ended::Shutdown);
        Ok(())
    }
}

/// The nodes of one rule.
struct Nodes<'h> {
    harness: &'h dyn Harness,
    clock: Arc<AtomicU64>,
    started: Mutex<Vec<Node>>,
}

impl<'h> Nodes<'h> {
    fn new(harness: &'h dyn Harness) -> Self {
        Self { harness, clock: Arc::new(AtomicU64::new(1)), started: Mutex::default() }
    }

    async fn start(&self, name: &str) -> Result<Node, String> {
        let transport = self.harness.transport(name).await;
        self.start_on(transport, terms()).await
    }

    async fn start_on(&self, transport: Arc<dyn Transport>, terms: Terms) -> Result<Node, String> {
        let recorder = Recorder::new(self.clock.clone(), self.harness.patience());
        let receiver: Arc<dyn Receiver> = recorder.clone();
        let inbound = Inbound::new(Arc::downgrade(&receiver), terms);
        let me = timeout(self.harness.patience(), transport.start(inbound))
            .await
            .map_err(|_| format!("the start of {} did not return", transport.node()))?
            .map_err(|error| format!("{} did not start: {error}", transport.node()))?;
        let _ = recorder.me.set(me.clone());
        if me.node != *transport.node() {
            return Err(format!("{} started as {me}", transport.node()));
        }
        let node = Node { transport, recorder, me };
        self.started.lock().push(node.clone());
        Ok(node)
    }

    /// Two nodes that see one another.
    async fn pair(&self) -> Result<(Node, Node), String> {
        let a = self.start("a").await?;
        let b = self.start("b").await?;
        linked(&a, &b).await?;
        Ok((a, b))
    }

    async fn crash(&self, node: &Node) -> Result<(), Unsupported> {
        self.harness.crash(node.me.node.as_str()).await?;
        node.recorder.end(Ended::Crash);
        Ok(())
    }

    /// Ends all nodes and checks what must always hold, between any two of them, too.
    async fn finish(self) -> Verdict {
        let nodes = std::mem::take(&mut *self.started.lock());
        for node in &nodes {
            if node.recorder.with(|log| log.ended.is_none()) {
                node.shutdown().await?;
            }
        }
        for node in &nodes {
            node.recorder.check()?;
        }
        check_pairs(&nodes)
    }
}

/// What one end of a link has said about the other, by the shared clock; 0 is never.
#[derive(Clone, Copy, Default)]
struct End {
    up: bool,
    last_up: u64,
    last_down: u64,
}

/// Both ends are up before a frame is delivered at either; neither is up again before both were down.
fn check_pairs(nodes: &[Node]) -> Verdict {
    let mut events: Vec<(u64, Peer, Seen)> = Vec::new();
    let mut owners = BTreeSet::new();
    for node in nodes {
        owners.insert(node.me.clone());
        let seen = node.recorder.with(|log| log.events.clone());
        events.extend(seen.into_iter().map(|(stamp, seen)| (stamp, node.me.clone(), seen)));
    }
    events.sort_by_key(|(stamp, ..)| *stamp);
    let mut ends: BTreeMap<(Peer, Peer), End> = BTreeMap::new();
    for (stamp, me, seen) in events {
        match seen {
            Seen::Up(peer) => {
                let theirs = ends.get(&(peer.clone(), me.clone())).copied().unwrap_or_default();
                let mine = ends.entry((me.clone(), peer.clone())).or_default();
                if mine.last_down > 0 && theirs.up && theirs.last_up < mine.last_down {
                    return Err(format!(
                        "{me} reported {peer} down and up again, and {peer} never saw {me} down"
                    ));
                }
                (mine.up, mine.last_up) = (true, stamp);
            }
            Seen::Down(peer) => {
                let mine = ends.entry((me, peer)).or_default();
                (mine.up, mine.last_down) = (false, stamp);
            }
            Seen::Frame(peer, _) if owners.contains(&peer) => {
                let mine = ends.get(&(me.clone(), peer.clone())).copied().unwrap_or_default();
                let theirs = ends.get(&(peer.clone(), me.clone())).copied().unwrap_or_default();
                if theirs.last_up == 0 || theirs.last_up < mine.last_down {
                    return Err(format!("{me} got a frame of {peer} before {peer} had reported {me} up"));
                }
            }
            Seen::Frame(..) | Seen::Suspect(_) | Seen::Resumed(_) | Seen::Settled => {}
        }
    }
    Ok(())
}

async fn linked(a: &Node, b: &Node) -> Verdict {
    a.recorder.until(&format!("{} up", b.me), |log| log.is_up(&b.me)).await?;
    b.recorder.until(&format!("{} up", a.me), |log| log.is_up(&a.me)).await
}

/// A frame that says whose it is and which.
fn numbered(lane: Lane, tag: u8, number: u64) -> Frame {
    let mut head = vec![tag];
    head.extend_from_slice(&number.to_le_bytes());
    // bodies of many lengths, the empty one among them
    let body = vec![number as u8; (number % 7) as usize * 3];
    Frame::new(lane, head, body)
}

fn read_number(frame: &Frame) -> Option<(u8, u64)> {
    let (tag, number) = frame.head.split_first()?;
    let number = number.get(..8)?.try_into().ok()?;
    Some((*tag, u64::from_le_bytes(number)))
}

/// The numbers that came from `peer` with this tag on this lane, in the order of arrival.
fn numbers(log: &Log, peer: &Peer, lane: Lane, tag: u8) -> Vec<u64> {
    let read = log.events.iter().filter_map(|(_, seen)| match seen {
        Seen::Frame(from, frame) if from == peer && frame.lane == lane => read_number(frame),
        _ => None,
    });
    read.filter(|(theirs, _)| *theirs == tag).map(|(_, number)| number).collect()
}

/// Exactly 0, 1, … came, unchanged.
fn in_order(at: &Node, from: &Peer, lane: Lane, tag: u8, count: u64) -> Verdict {
    let got = at.recorder.with(|log| numbers(log, from, lane, tag));
    for (place, number) in (0_u64..).zip(&got) {
        if place != *number {
            return Err(format!("{}: {lane:?} of {from}, task {tag}: {number} came in place {place}", at.me));
        }
    }
    if got.len() as u64 != count {
        return Err(format!("{}: {lane:?} of {from}, task {tag}: {} of {count} came", at.me, got.len()));
    }
    at.recorder.with(|log| {
        for (_, seen) in &log.events {
            let Seen::Frame(_, frame) = seen else { continue };
            if let Some((tag, number)) = read_number(frame) {
                if *frame != numbered(frame.lane, tag, number) {
                    return Err(format!("{}: frame {number} of task {tag} came changed", at.me));
                }
            }
        }
        Ok(())
    })
}

/// Sends `count` numbered frames, every other one without waiting if there is room.
fn spawn_numbered(from: &Node, to: &Peer, lane: Lane, tag: u8, count: u64) -> JoinHandle<Verdict> {
    let (from, to) = (from.clone(), to.clone());
    tokio::spawn(async move {
        for number in 0..count {
            let mut frame = numbered(lane, tag, number);
            if number % 2 == 0 {
                match from.try_send(&to, frame) {
                    Ok(()) => continue,
                    Err(SendError::Busy(back)) => frame = back,
                    Err(error) => return Err(format!("{}: try_send to {to} failed: {error:?}", from.me)),
                }
            }
            from.must_send(&to, frame).await?;
            if number % 64 == 63 {
                tokio::task::yield_now().await;
            }
        }
        Ok(())
    })
}

async fn join(task: JoinHandle<Verdict>) -> Verdict {
    task.await.unwrap_or_else(|error| Err(format!("a sending task ended badly: {error}")))
}

/// The lanes and tasks of a flood in one direction.
const FLOOD: [(Lane, u8); 4] = [(Lane::Control, 1), (Lane::Data, 2), (Lane::Data, 3), (Lane::Bulk, 4)];

fn spawn_flood(from: &Node, to: &Peer, count: u64) -> Vec<JoinHandle<Verdict>> {
    FLOOD.iter().map(|(lane, tag)| spawn_numbered(from, to, *lane, *tag, count)).collect()
}

async fn flood_arrived(at: &Node, from: &Peer, count: u64) -> Verdict {
    let total = FLOOD.len() * usize::try_from(count).unwrap_or(usize::MAX);
    at.recorder.until(&format!("{total} frames of {from}"), |log| log.frames_from(from) >= total).await?;
    for (lane, tag) in FLOOD {
        in_order(at, from, lane, tag, count)?;
    }
    Ok(())
}

/// A short exchange both ways, to show that a link works.
async fn exchange(a: &Node, b: &Node, tag: u8) -> Verdict {
    for (from, to) in [(a, b), (b, a)] {
        for lane in Lane::ALL {
            from.must_send(&to.me, numbered(lane, tag, 0)).await?;
        }
    }
    for (from, to) in [(a, b), (b, a)] {
        to.recorder
            .until(&format!("the exchange {tag} with {}", from.me), |log| {
                Lane::ALL.into_iter().all(|lane| numbers(log, &from.me, lane, tag) == [0])
            })
            .await?;
    }
    Ok(())
}

/// Frames of one lane arrive in order, each once, from several tasks, on all lanes, both ways.
pub async fn order_per_lane(harness: &dyn Harness) -> Verdict {
    let nodes = Nodes::new(harness);
    let (a, b) = nodes.pair().await?;
    let count = 1500;
    let mut tasks = spawn_flood(&a, &b.me, count);
    tasks.extend(spawn_flood(&b, &a.me, count));
    for task in tasks {
        join(task).await?;
    }
    flood_arrived(&b, &a.me, count).await?;
    flood_arrived(&a, &b.me, count).await?;
    nodes.finish().await
}

/// Whoever sends as soon as it has reported a peer up is heard after that peer has reported it up.
pub async fn up_before_the_first_frame(harness: &dyn Harness) -> Verdict {
    let nodes = Nodes::new(harness);
    let hub = nodes.start("hub").await?;
    for round in 0..10_u8 {
        let name = format!("n{round}");
        let node = nodes.start(&name).await?;
        let first = async {
            node.recorder.until("the hub up", |log| log.is_up(&hub.me)).await?;
            node.must_send(&hub.me, numbered(Lane::Control, round, 0)).await
        };
        let second = async {
            hub.recorder.until("the new node up", |log| log.is_up(&node.me)).await?;
            hub.must_send(&node.me, numbered(Lane::Control, round, 0)).await
        };
        let (first, second) = tokio::join!(first, second);
        first.and(second)?;
        node.recorder.until("a frame of the hub", |log| log.frames_from(&hub.me) == 1).await?;
        hub.recorder.until("a frame of the new node", |log| log.frames_from(&node.me) == 1).await?;
    }
    nodes.finish().await
}

/// A node that shuts down is down for the others after the last frame it has sent, and nothing is lost.
pub async fn down_after_the_last_frame(harness: &dyn Harness) -> Verdict {
    let nodes = Nodes::new(harness);
    let (a, b) = nodes.pair().await?;
    let count = 300;
    for task in spawn_flood(&b, &a.me, count) {
        join(task).await?;
    }
    flood_arrived(&a, &b.me, count).await?;
    // these are accepted and then the node leaves: some may be lost with it, none may come after its end
    for number in 0..100 {
        b.must_send(&a.me, numbered(Lane::Data, 9, number)).await?;
    }
    b.shutdown().await?;
    a.recorder.until(&format!("{} down", b.me), |log| log.downs_of(&b.me) == 1).await?;
    let late = a.recorder.with(|log| numbers(log, &b.me, Lane::Data, 9));
    in_order(&a, &b.me, Lane::Data, 9, late.len() as u64)?;
    match a.try_send(&b.me, numbered(Lane::Data, 0, 0)) {
        Err(SendError::NoLink(_)) => {}
        other => return Err(format!("a send to a peer that is down gave {other:?}")),
    }
    // a frame that comes now would be noted: the other links still work
    let c = nodes.start("c").await?;
    linked(&a, &c).await?;
    exchange(&a, &c, 10).await?;
    nodes.finish().await
}

/// A node that crashes is reported down by the others.
pub async fn crash_is_down_for_the_others(harness: &dyn Harness) -> Verdict {
    let nodes = Nodes::new(harness);
    let (a, b) = nodes.pair().await?;
    let c = nodes.start("c").await?;
    linked(&a, &c).await?;
    linked(&b, &c).await?;
    exchange(&a, &b, 1).await?;
    if nodes.crash(&b).await.is_err() {
        harness.skipped("crash_is_down_for_the_others", "no crash");
        return nodes.finish().await;
    }
    for other in [&a, &c] {
        other.recorder.until(&format!("{} down", b.me), |log| log.downs_of(&b.me) == 1).await?;
    }
    exchange(&a, &c, 2).await?;
    nodes.finish().await
}

/// Two nodes that are kept apart report one another down, both; then up again, and the link works.
pub async fn cut_is_down_for_both(harness: &dyn Harness) -> Verdict {
    let nodes = Nodes::new(harness);
    let (a, b) = nodes.pair().await?;
    exchange(&a, &b, 1).await?;
    if harness.cut("a", "b").await.is_err() {
        harness.skipped("cut_is_down_for_both", "no cut");
        return nodes.finish().await;
    }
    a.recorder.until(&format!("{} down", b.me), |log| log.downs_of(&b.me) == 1).await?;
    b.recorder.until(&format!("{} down", a.me), |log| log.downs_of(&a.me) == 1).await?;
    if harness.heal("a", "b").await.is_err() {
        harness.skipped("cut_is_down_for_both", "no heal");
        return nodes.finish().await;
    }
    a.recorder.until(&format!("{} up again", b.me), |log| log.ups_of(&b.me) == 2).await?;
    b.recorder.until(&format!("{} up again", a.me), |log| log.ups_of(&a.me) == 2).await?;
    exchange(&a, &b, 2).await?;
    nodes.finish().await
}

/// What was accepted before a link went down does not arrive on the next one.
pub async fn nothing_of_a_closed_session_in_the_next(harness: &dyn Harness) -> Verdict {
    let nodes = Nodes::new(harness);
    let (a, b) = nodes.pair().await?;
    if harness.cut("a", "b").await.is_err() {
        harness.skipped("nothing_of_a_closed_session_in_the_next", "no cut");
        return nodes.finish().await;
    }
    for (from, to) in [(&a, &b), (&b, &a)] {
        for number in 0..200 {
            for lane in Lane::ALL {
                // kept for the case that the link comes back in time; it will not
                let _ = from.try_send(&to.me, numbered(lane, 1, number));
            }
        }
    }
    a.recorder.until(&format!("{} down", b.me), |log| log.downs_of(&b.me) == 1).await?;
    b.recorder.until(&format!("{} down", a.me), |log| log.downs_of(&a.me) == 1).await?;
    if harness.heal("a", "b").await.is_err() {
        harness.skipped("nothing_of_a_closed_session_in_the_next", "no heal");
        return nodes.finish().await;
    }
    a.recorder.until(&format!("{} up again", b.me), |log| log.ups_of(&b.me) == 2).await?;
    b.recorder.until(&format!("{} up again", a.me), |log| log.ups_of(&a.me) == 2).await?;
    exchange(&a, &b, 2).await?;
    for (at, from) in [(&a, &b), (&b, &a)] {
        at.recorder.with(|log| {
            let mut ups = 0;
            for (_, seen) in &log.events {
                match seen {
                    Seen::Up(peer) if *peer == from.me => ups += 1,
                    Seen::Frame(peer, frame)
                        if *peer == from.me
                            && ups > 1
                            && read_number(frame).is_some_and(|(tag, _)| tag == 1) =>
                    {
                        return Err(format!("{}: a frame of the closed session with {peer} came", at.me));
                    }
                    _ => {}
                }
            }
            Ok(())
        })?;
    }
    nodes.finish().await
}

/// What was sent to one life of a node does not reach the next life, even in the middle of a flood.
pub async fn nothing_for_an_earlier_life_reaches_the_next(harness: &dyn Harness) -> Verdict {
    let nodes = Nodes::new(harness);
    let (a, b) = nodes.pair().await?;
    let flood = {
        let (a, old) = (a.clone(), b.me.clone());
        tokio::spawn(async move {
            for number in 0_u64.. {
                match a.send(&old, numbered(Lane::Data, 1, number)).await {
                    Ok(()) => {}
                    Err(SendError::NoLink(_)) => break,
                    Err(error) => return Err(format!("a send to {old} failed with {error:?}")),
                }
                tokio::task::yield_now().await;
            }
            Ok(())
        })
    };
    b.recorder.until("the flood", |log| log.frames_from(&a.me) > 100).await?;
    if nodes.crash(&b).await.is_err() {
        b.shutdown().await?;
    }
    let reborn = nodes.start("b").await?;
    linked(&a, &reborn).await?;
    join(flood).await?;
    exchange(&a, &reborn, 2).await?;
    let strays = reborn.recorder.with(|log| numbers(log, &a.me, Lane::Data, 1));
    if !strays.is_empty() {
        return Err(format!("{} got {} frames that were sent to {}", reborn.me, strays.len(), b.me));
    }
    if reborn.me.incarnation <= b.me.incarnation {
        return Err(format!("{} was reborn as {}", b.me, reborn.me));
    }
    nodes.finish().await
}

/// While a peer is reported down there is no link to it, though its next session may exist already.
pub async fn no_link_while_down_is_reported(harness: &dyn Harness) -> Verdict {
    let nodes = Nodes::new(harness);
    let (a, b) = nodes.pair().await?;
    let transport = Arc::downgrade(&b.transport);
    let probe = move |seen: &Seen| {
        let (Seen::Down(peer), Some(transport)) = (seen, transport.upgrade()) else { return Ok(()) };
        match transport.try_send(peer, numbered(Lane::Data, 7, 0)) {
            Err(SendError::NoLink(_)) => Ok(()),
            other => Err(format!("a send to {peer} from inside its peer_down gave {other:?}")),
        }
    };
    let _ = b.recorder.probe.set(Box::new(probe));
    exchange(&a, &b, 1).await?;
    if harness.cut_seen_by("a", "b").await.is_err() {
        harness.skipped("no_link_while_down_is_reported", "no cut that one end sees; a shutdown instead");
        a.shutdown().await?;
        b.recorder.until(&format!("{} down", a.me), |log| log.downs_of(&a.me) == 1).await?;
        return nodes.finish().await;
    }
    a.recorder.until(&format!("{} down", b.me), |log| log.downs_of(&b.me) == 1).await?;
    harness.heal("a", "b").await.map_err(|_| "a harness that cuts must heal".to_owned())?;
    b.recorder.until(&format!("{} up again", a.me), |log| log.ups_of(&a.me) == 2).await?;
    a.recorder.until(&format!("{} up again", b.me), |log| log.ups_of(&b.me) == 2).await?;
    exchange(&a, &b, 2).await?;
    let strays = a.recorder.with(|log| numbers(log, &b.me, Lane::Data, 7).len());
    if strays > 0 {
        return Err(format!("{strays} frames came that were sent while {} was reported down", a.me));
    }
    nodes.finish().await
}

/// How many sessions `sessions_that_replace_one_another_share_no_frame` has at most, and for how long.
const REPLACED: u64 = 40;
const REPLACING: Duration = Duration::from_secs(4);

/// Whoever numbers the frames of each session, from its `peer_up` until its `peer_down`, is never found to have sent
/// one of them into another session, however quickly one replaces the other.
pub async fn sessions_that_replace_one_another_share_no_frame(harness: &dyn Harness) -> Verdict {
    let nodes = Nodes::new(harness);
    // the end with the higher name finds out by the next connection
    let (a, b) = nodes.pair().await?;
    // the session that b believes in, its last frame, and whether it is up; a transport holds no lock in a report
    let link = Arc::new(Mutex::new((1_u64, 0_u64, true)));
    let probe = {
        let link = link.clone();
        move |seen: &Seen| {
            let mut link = link.lock();
            match seen {
                Seen::Up(_) => *link = (link.0 + 1, 0, true),
                _ => link.2 = false,
            }
            Ok(())
        }
    };
    let _ = b.recorder.probe.set(Box::new(probe));
    let (done, stop) = watch::channel(false);
    let sender = std::thread::spawn({
        let (b, to, link) = (b.clone(), a.me.clone(), link.clone());
        move || {
            while !*stop.borrow() {
                {
                    let mut link = link.lock();
                    let mut frame = numbered(Lane::Data, 1, link.1 + 1);
                    frame.body = link.0.to_le_bytes().to_vec().into();
                    if link.2 && b.try_send(&to, frame).is_ok() {
                        link.1 += 1;
                    }
                }
                std::thread::yield_now();
            }
        }
    });
    let mut verdict = Ok(true);
    let began = Instant::now();
    for round in 1..=REPLACED {
        if began.elapsed() > REPLACING {
            break;
        }
        verdict = replace_session(harness, &a, &b, round).await;
        if verdict != Ok(true) {
            break;
        }
    }
    done.send_replace(true);
    let _ = sender.join();
    if !verdict? {
        harness.skipped("sessions_that_replace_one_another_share_no_frame", "no cut that one end sees");
        return nodes.finish().await;
    }
    sessions_apart(&a, &b.me)?;
    nodes.finish().await
}

/// One end gives the other up, and they meet again; `false` if the harness cannot do that.
async fn replace_session(harness: &dyn Harness, a: &Node, b: &Node, round: u64) -> Result<bool, String> {
    let downs = usize::try_from(round).unwrap_or(usize::MAX);
    let heard = a.recorder.with(|log| log.frames_from(&b.me));
    a.recorder.until("a frame of this session", |log| log.frames_from(&b.me) > heard).await?;
    if harness.cut_seen_by("a", "b").await.is_err() {
        return Ok(false);
    }
    a.recorder.until(&format!("{} down", b.me), |log| log.downs_of(&b.me) == downs).await?;
    harness.heal("a", "b").await.map_err(|_| "a harness that cuts must heal".to_owned())?;
    linked(a, b).await?;
    b.recorder.until(&format!("{} up again", a.me), |log| log.ups_of(&a.me) == downs + 1).await?;
    Ok(true)
}

/// In each session that `at` has seen, the frames of `from` are 1, 2, … of one session of `from`.
fn sessions_apart(at: &Node, from: &Peer) -> Verdict {
    let mut expected = (0_u64, 1_u64);
    at.recorder.with(|log| {
        for (_, seen) in &log.events {
            match seen {
                Seen::Up(peer) if peer == from => expected = (expected.0 + 1, 1),
                Seen::Frame(peer, frame) if peer == from => {
                    let session = frame.body.get(..8).and_then(|bytes| bytes.try_into().ok());
                    let got = (session.map(u64::from_le_bytes), read_number(frame).map(|(_, number)| number));
                    if got != (Some(expected.0), Some(expected.1)) {
                        return Err(format!("{}: {got:?} came where {expected:?} was due", at.me));
                    }
                    expected.1 += 1;
                }
                _ => {}
            }
        }
        Ok(())
    })
}

/// Frames of more than 1 MiB and frames with nothing in them arrive as they were sent.
pub async fn large_and_empty_frames(harness: &dyn Harness) -> Verdict {
    let nodes = Nodes::new(harness);
    let (a, b) = nodes.pair().await?;
    let pattern = |len: usize, seed: usize| -> Vec<u8> {
        (0..len).map(|place| (place.wrapping_mul(31) ^ (place >> 8) ^ seed) as u8).collect()
    };
    for lane in Lane::ALL {
        let sent = [
            Frame::new(lane, pattern(40_000, 1), pattern((1 << 20) + 17, 2)),
            Frame::new(lane, Bytes::new(), Bytes::new()),
            Frame::new(lane, pattern(9, 3), Bytes::new()),
            Frame::new(lane, Bytes::new(), pattern(9, 4)),
            Frame::new(lane, pattern(1, 5), pattern(2 << 20, 6)),
        ];
        for (from, to) in [(&a, &b), (&b, &a)] {
            for frame in &sent {
                from.must_send(&to.me, frame.clone()).await?;
            }
        }
        for (from, to) in [(&a, &b), (&b, &a)] {
            let wanted = sent.len() * (lane.index() + 1);
            let what = format!("{wanted} frames of {}", from.me);
            to.recorder.until(&what, |log| log.frames_from(&from.me) >= wanted).await?;
            let got: Vec<Frame> = to.recorder.with(|log| {
                let frames = log.events.iter().filter_map(|(_, seen)| match seen {
                    Seen::Frame(peer, frame) if *peer == from.me && frame.lane == lane => Some(frame.clone()),
                    _ => None,
                });
                frames.collect()
            });
            if got != sent {
                let lengths: Vec<(usize, usize)> = got.iter().map(|f| (f.head.len(), f.body.len())).collect();
                return Err(format!("{}: {lane:?} frames came changed; heads and bodies {lengths:?}", to.me));
            }
        }
    }
    nodes.finish().await
}

/// The bytes after which a transport that never says `Busy` has no bound: 320 MB.
const UNBOUNDED: u64 = 20_000;

/// A receiver that takes nothing makes `try_send` say `Busy` and give the frame back, on that lane alone; then
/// room returns, and nothing is lost or out of order.
pub async fn back_pressure(harness: &dyn Harness) -> Verdict {
    let nodes = Nodes::new(harness);
    let (a, b) = nodes.pair().await?;
    exchange(&a, &b, 1).await?;
    let frozen = harness.freeze("b").await.is_ok();
    if !frozen {
        let flavor = tokio::runtime::Handle::current().runtime_flavor();
        if flavor == tokio::runtime::RuntimeFlavor::CurrentThread {
            harness.skipped("back_pressure", "no freeze, and one thread only");
            return nodes.finish().await;
        }
        b.recorder.shut_gate(true);
    }
    let body = Bytes::from(vec![7; 16 << 10]);
    let frame = |number: u64| {
        let head = numbered(Lane::Data, 2, number).head;
        Frame::new(Lane::Data, head, body.clone())
    };
    let mut accepted = 0;
    let filled = loop {
        match a.try_send(&b.me, frame(accepted)) {
            Ok(()) => accepted += 1,
            Err(SendError::Busy(back)) if back == frame(accepted) => break Ok(()),
            Err(other) => break Err(format!("a full queue gave {other:?} for frame {accepted}")),
        }
        if accepted == UNBOUNDED {
            break Err(format!("{accepted} frames of 16 KiB were accepted and none was taken"));
        }
        if accepted % 64 == 0 {
            tokio::task::yield_now().await;
        }
    };
    let control = a.try_send(&b.me, numbered(Lane::Control, 2, 0));
    if frozen {
        harness.thaw("b").await.map_err(|_| "a harness that freezes must thaw".to_owned())?;
    } else {
        b.recorder.shut_gate(false);
    }
    filled?;
    control.map_err(|error| format!("control is stuck behind data: {error:?}"))?;
    let total = accepted + 500;
    for number in accepted..total {
        a.must_send(&b.me, frame(number)).await?;
    }
    b.recorder
        .until(&format!("{total} frames"), |log| log.frames_from(&a.me) as u64 == total + 1 + 3)
        .await?;
    let got = b.recorder.with(|log| numbers(log, &a.me, Lane::Data, 2));
    if !got.iter().copied().eq(0..total) {
        return Err(format!("of {total} frames, {} came, or not in order", got.len()));
    }
    // all of it was acknowledged or is about to be: room for one must return
    a.must_send(&b.me, frame(total)).await?;
    exchange(&b, &a, 3).await?;
    nodes.finish().await
}

/// Whom there is no link to is `NoLink`, with the frame given back; also before the start and after the end.
pub async fn unknown_peers(harness: &dyn Harness) -> Verdict {
    let nodes = Nodes::new(harness);
    let idle = harness.transport("idle").await;
    let (a, b) = nodes.pair().await?;
    let nobody = NodeId::new("nobody").map_err(|error| error.to_string())?;
    let nobody = Peer::new(nobody, Incarnation::MIN);
    let imposter = Peer::new(b.me.node.clone(), b.me.incarnation.next());
    let frame = numbered(Lane::Data, 1, 5);
    for to in [&nobody, &imposter, &a.me] {
        no_link(a.try_send(to, frame.clone()), &frame, to)?;
        no_link(a.send(to, frame.clone()).await, &frame, to)?;
    }
    no_link(idle.try_send(&b.me, frame.clone()), &frame, &b.me)?;
    no_link(idle.send(&b.me, frame.clone()).await, &frame, &b.me)?;
    exchange(&a, &b, 2).await?;
    a.shutdown().await?;
    no_link(a.try_send(&b.me, frame.clone()), &frame, &b.me)?;
    no_link(a.send(&b.me, frame.clone()).await, &frame, &b.me)?;
    nodes.finish().await
}

fn no_link(result: Result<(), SendError>, frame: &Frame, to: &Peer) -> Verdict {
    match result {
        Err(SendError::NoLink(back)) if back == *frame => Ok(()),
        other => Err(format!("a send to {to} gave {other:?} where NoLink and the frame are due")),
    }
}

/// A frame is for one life of a node: to an earlier one there is no link.
pub async fn earlier_incarnations(harness: &dyn Harness) -> Verdict {
    let nodes = Nodes::new(harness);
    let (a, b) = nodes.pair().await?;
    b.shutdown().await?;
    let reborn = nodes.start("b").await?;
    linked(&a, &reborn).await?;
    let frame = numbered(Lane::Data, 1, 5);
    no_link(a.try_send(&b.me, frame.clone()), &frame, &b.me)?;
    no_link(a.send(&b.me, frame.clone()).await, &frame, &b.me)?;
    exchange(&a, &reborn, 2).await?;
    if reborn.recorder.with(|log| !numbers(log, &a.me, Lane::Data, 1).is_empty()) {
        return Err(format!("{} got a frame that was sent to {}", reborn.me, b.me));
    }
    nodes.finish().await
}

/// Connections that break for a moment in the middle of a flood lose nothing, and nobody is reported down.
pub async fn blip_loses_nothing(harness: &dyn Harness) -> Verdict {
    let nodes = Nodes::new(harness);
    let (a, b) = nodes.pair().await?;
    let count = 1000;
    let mut tasks = spawn_flood(&a, &b.me, count);
    tasks.extend(spawn_flood(&b, &a.me, count));
    for wanted in [1, 700, 1900] {
        b.recorder.until(&format!("{wanted} frames"), |log| log.frames_from(&a.me) >= wanted).await?;
        if harness.blip("a", "b").await.is_err() {
            harness.skipped("blip_loses_nothing", "no blip");
            break;
        }
    }
    for task in tasks {
        join(task).await?;
    }
    flood_arrived(&b, &a.me, count).await?;
    flood_arrived(&a, &b.me, count).await?;
    for (at, from) in [(&a, &b), (&b, &a)] {
        if at.recorder.with(|log| log.downs_of(&from.me)) > 0 {
            return Err(format!("{} reported {} down for a blip", at.me, from.me));
        }
    }
    nodes.finish().await
}

/// A second node of a live name does not start, and the first one does not notice.
pub async fn duplicate_identity(harness: &dyn Harness) -> Verdict {
    let nodes = Nodes::new(harness);
    if !harness.refuses_duplicates() {
        harness.skipped("duplicate_identity", "duplicates are not refused at once");
        return Ok(());
    }
    let (a, b) = nodes.pair().await?;
    let rival = harness.transport("a").await;
    let recorder = Recorder::new(nodes.clock.clone(), harness.patience());
    let receiver: Arc<dyn Receiver> = recorder.clone();
    let started = timeout(harness.patience(), rival.start(Inbound::new(Arc::downgrade(&receiver), terms())));
    match started.await {
        Ok(Err(_)) => {}
        Ok(Ok(peer)) => return Err(format!("{peer} started while {} was live", a.me)),
        Err(_) => return Err("the second start did not return".to_owned()),
    }
    recorder.end(Ended::Shutdown);
    exchange(&a, &b, 1).await?;
    if b.recorder.with(|log| log.downs_of(&a.me)) > 0 {
        return Err(format!("{} was reported down because of a rival that did not start", a.me));
    }
    recorder.with(|log| match log.events.len() {
        0 => Ok(()),
        more => Err(format!("a rival that did not start was told {more} things")),
    })?;
    // the name is free again once its holder has gone
    a.shutdown().await?;
    let next = nodes.start_on(rival, terms()).await?;
    linked(&next, &b).await?;
    exchange(&next, &b, 2).await?;
    nodes.finish().await
}

/// After `shutdown`, the same value starts again under a higher incarnation.
pub async fn restart_on_the_same_value(harness: &dyn Harness) -> Verdict {
    let nodes = Nodes::new(harness);
    let (mut a, b) = nodes.pair().await?;
    for round in 0..5 {
        exchange(&a, &b, round).await?;
        a.shutdown().await?;
        let next = nodes.start_on(a.transport.clone(), terms()).await?;
        if next.me.incarnation <= a.me.incarnation {
            return Err(format!("{} restarted as {}", a.me, next.me));
        }
        linked(&next, &b).await?;
        if b.recorder.with(|log| (log.ups_of(&a.me), log.downs_of(&a.me)) != (1, 1)) {
            return Err(format!("{} was not up once and down once before {}", a.me, next.me));
        }
        a = next;
    }
    exchange(&a, &b, 9).await?;
    nodes.finish().await
}

/// A transport that runs does not start a second time, and goes on running.
pub async fn double_start(harness: &dyn Harness) -> Verdict {
    let nodes = Nodes::new(harness);
    let (a, b) = nodes.pair().await?;
    let recorder = Recorder::new(nodes.clock.clone(), harness.patience());
    let receiver: Arc<dyn Receiver> = recorder.clone();
    match a.transport.start(Inbound::new(Arc::downgrade(&receiver), terms())).await {
        Err(TransportError::AlreadyStarted { node }) if node == a.me.node => {}
        other => return Err(format!("a second start gave {other:?} where AlreadyStarted is due")),
    }
    exchange(&a, &b, 1).await?;
    if b.recorder.with(|log| log.downs_of(&a.me)) > 0 || recorder.with(|log| !log.events.is_empty()) {
        return Err("a second start that was refused had an effect".to_owned());
    }
    nodes.finish().await
}

/// Sends until there is no link any more.
fn spawn_endless(from: &Node, to: &Peer, lane: Lane) -> JoinHandle<Verdict> {
    let (from, to) = (from.clone(), to.clone());
    tokio::spawn(async move {
        for number in 0_u64.. {
            match from.send(&to, numbered(lane, 1, number)).await {
                Ok(()) => {}
                Err(SendError::NoLink(_)) => break,
                Err(error) => return Err(format!("{}: a send to {to} failed with {error:?}", from.me)),
            }
            tokio::task::yield_now().await;
        }
        Ok(())
    })
}

/// A node may shut down while it and others send: nothing is reported to it afterwards, and all senders get
/// `NoLink` in the end.
pub async fn shutdown_while_sending(harness: &dyn Harness) -> Verdict {
    let nodes = Nodes::new(harness);
    let (a, b) = nodes.pair().await?;
    let c = nodes.start("c").await?;
    linked(&a, &c).await?;
    linked(&b, &c).await?;
    let mut tasks = Vec::new();
    for (from, to) in [(&a, &b), (&b, &a), (&c, &a)] {
        for lane in Lane::ALL {
            tasks.push(spawn_endless(from, &to.me, lane));
        }
    }
    for (at, from) in [(&a, &b), (&b, &a), (&a, &c)] {
        at.recorder.until("the flood", |log| log.frames_from(&from.me) > 200).await?;
    }
    a.shutdown().await?;
    for other in [&b, &c] {
        other.recorder.until(&format!("{} down", a.me), |log| log.downs_of(&a.me) == 1).await?;
    }
    for task in tasks {
        timeout(harness.patience(), join(task))
            .await
            .map_err(|_| format!("a sender never heard that {} has gone", a.me))??;
    }
    exchange(&b, &c, 2).await?;
    nodes.finish().await
}

/// Every start reports once that discovery has settled, alone or not; with the peers that were there, up.
pub async fn discovery_settles_once(harness: &dyn Harness) -> Verdict {
    let nodes = Nodes::new(harness);
    let a = nodes.start("a").await?;
    a.recorder.until("discovery settled", |log| log.settled == 1).await?;
    let b = nodes.start("b").await?;
    b.recorder.until("discovery settled", |log| log.settled == 1).await?;
    if !b.recorder.with(|log| log.ups_of(&a.me) == 1) {
        return Err(format!("{} settled before it reported {}, which was there", b.me, a.me));
    }
    a.recorder.until(&format!("{} up", b.me), |log| log.is_up(&b.me)).await?;
    b.shutdown().await?;
    let again = nodes.start_on(b.transport.clone(), terms()).await?;
    again.recorder.until("discovery settled after a restart", |log| log.settled == 1).await?;
    linked(&a, &again).await?;
    exchange(&a, &again, 1).await?;
    nodes.finish().await
}

/// A full mesh in which everyone hears everyone, of [`Harness::peers`] nodes or as many as `MUSTER_PEERS` says.
pub async fn many_peers(harness: &dyn Harness) -> Verdict {
    let given = std::env::var("MUSTER_PEERS").ok().and_then(|n| n.parse().ok());
    let count = given.unwrap_or_else(|| harness.peers()).max(2);
    let nodes = Nodes::new(harness);
    let mut mesh = Vec::new();
    for number in 0..count {
        mesh.push(nodes.start(&format!("n{number:04}")).await?);
    }
    for node in &mesh {
        node.recorder.until("everyone up", |log| log.up.len() == count - 1).await?;
    }
    for from in &mesh {
        for to in mesh.iter().filter(|to| to.me != from.me) {
            from.must_send(&to.me, numbered(Lane::Data, 1, 0)).await?;
        }
    }
    for node in &mesh {
        node.recorder.until("a frame of everyone", |log| log.frames.len() == count - 1).await?;
        if let Some(peer) =
            node.recorder.with(|log| log.frames.iter().find(|(_, n)| **n != 1).map(|(p, _)| p.clone()))
        {
            return Err(format!("{} got more than one frame of {peer}", node.me));
        }
    }
    nodes.finish().await
}

/// Nodes of other terms are not linked; those of the same terms are, on the same network.
pub async fn other_terms_are_refused(harness: &dyn Harness) -> Verdict {
    let nodes = Nodes::new(harness);
    let others = [
        Terms { scope: "another".to_owned(), ..terms() },
        Terms { vnodes: 65, ..terms() },
        Terms { protocol: 2, ..terms() },
    ];
    let a = nodes.start("a").await?;
    for (number, other) in others.into_iter().enumerate() {
        let stranger = harness.transport(&format!("x{number}")).await;
        let stranger = nodes.start_on(stranger, other.clone()).await?;
        let friend = harness.transport(&format!("y{number}")).await;
        let friend = nodes.start_on(friend, other).await?;
        linked(&stranger, &friend).await?;
        exchange(&stranger, &friend, 1).await?;
        no_link(
            a.try_send(&stranger.me, numbered(Lane::Data, 1, 0)),
            &numbered(Lane::Data, 1, 0),
            &stranger.me,
        )?;
    }
    let b = nodes.start("b").await?;
    linked(&a, &b).await?;
    exchange(&a, &b, 1).await?;
    for (node, peer) in [(&a, &b), (&b, &a)] {
        let strangers: Vec<Peer> =
            node.recorder.with(|log| log.ups.keys().filter(|up| **up != peer.me).cloned().collect());
        if !strangers.is_empty() {
            return Err(format!("{} was linked to {strangers:?}, whose terms differ", node.me));
        }
    }
    nodes.finish().await
}
