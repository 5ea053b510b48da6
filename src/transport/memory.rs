//! A network inside one process: the embedded default, and the place where tests break things.
//!
//! Frames go through the same encoding, numbering and acknowledgement as on a wire ([`super::link`]). A raw
//! connection between two nodes breaks when it is cut, or when an end crashes or is frozen for too long; the
//! end with the lower name opens the next one as soon as nothing stands in the way.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use async_trait::async_trait;
use bytes::Bytes;
use parking_lot::Mutex;
use tokio::sync::{Notify, mpsc};
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::link::{Endpoint, LinkConfig, LinkEvent, RawId};
use super::{Frame, Inbound, SendError, Transport, TransportError};
use crate::types::{Incarnation, NameError, NodeId, Peer};

/// Packets that a node takes in, and writes, before it looks at the other direction again.
const BURST: usize = 256;
/// How soon a node that was refused, or could not reach another, tries again.
const REDIAL: Duration = Duration::from_millis(20);

/// An in-process network. Cloning gives the same network.
///
/// ```
/// use muster_router::transport::memory::Network;
/// let network = Network::new();
/// let (a, b) = (network.node("a"), network.node("b"));
/// # let _ = (a, b);
/// ```
#[derive(Clone)]
pub struct Network(Arc<Shared>);

struct Shared {
    link: LinkConfig,
    next_raw: AtomicU64,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    last_incarnation: u64,
    random: u64,
    nodes: BTreeMap<NodeId, Live>,
    /// From, to: nothing gets through.
    cuts: BTreeSet<(NodeId, NodeId)>,
    delays: BTreeMap<(NodeId, NodeId), Range<Duration>>,
    /// Raw connections and their two ends, and the same the other way round.
    raws: BTreeMap<RawId, (NodeId, NodeId)>,
    dialled: BTreeSet<(NodeId, NodeId)>,
}

/// A node that is on the network.
struct Live {
    peer: Peer,
    post: mpsc::UnboundedSender<Post>,
    frozen: bool,
    thaw: Arc<Notify>,
}

/// What reaches a node's task.
enum Post {
    Accepted(RawId),
    Closed(RawId),
    Packet {
        raw: RawId,
        head: Bytes,
        body: Bytes,
        due: Option<Instant>,
    },
    /// Look again whom you can reach.
    Look,
    Crash,
}

impl Post {
    fn raw(&self) -> Option<RawId> {
        match self {
            Post::Accepted(raw) | Post::Closed(raw) | Post::Packet { raw, .. } => Some(*raw),
            Post::Look | Post::Crash => None,
        }
    }

    fn due(&self) -> Option<Instant> {
        match self {
            Post::Packet { due, .. } => *due,
            Post::Accepted(_) | Post::Closed(_) | Post::Look | Post::Crash => None,
        }
    }
}

/// Builds a [`Network`] with other than the default options.
#[derive(Clone, Debug)]
pub struct NetworkBuilder {
    link: LinkConfig,
    seed: u64,
}

impl NetworkBuilder {
    /// When links become suspect and go down, and how much they hold.
    pub fn link(mut self, link: LinkConfig) -> Self {
        self.link = link;
        self
    }

    /// Seeds the delays that are drawn at random.
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    /// The network.
    pub fn build(self) -> Network {
        let state = State { random: self.seed | 1, ..State::default() };
        Network(Arc::new(Shared { link: self.link, next_raw: AtomicU64::new(1), state: Mutex::new(state) }))
    }
}

impl Default for Network {
    fn default() -> Self {
        Self::new()
    }
}

impl Network {
    /// An empty network with the default options.
    pub fn new() -> Self {
        Self::builder().build()
    }

    /// Options before the network is made. A broken connection is always reported here, so idle links are
    /// not pinged unless [`NetworkBuilder::link`] says so.
    pub fn builder() -> NetworkBuilder {
        NetworkBuilder { link: LinkConfig { ping_interval: None, ..LinkConfig::default() }, seed: 1 }
    }

    /// A transport for the node of this name. A name that is no [`NodeId`] is refused when it starts.
    pub fn node(&self, name: impl AsRef<str>) -> MemoryTransport {
        let id = NodeId::new(name.as_ref());
        let shown = id.clone().unwrap_or_else(|_| NodeId::unnamed());
        MemoryTransport(Arc::new(Inner { network: self.clone(), id, shown, running: Mutex::new(None) }))
    }

    /// The nodes that are on the network now.
    pub fn nodes(&self) -> Vec<Peer> {
        self.0.state.lock().nodes.values().map(|live| live.peer.clone()).collect()
    }

    /// Takes a node off the network without a goodbye, as `kill -9` would. It can be started again.
    pub fn crash(&self, node: &str) {
        let mut state = self.0.state.lock();
        if let Some(live) = state.nodes.remove(node) {
            let _ = live.post.send(Post::Crash);
            state.close_where(|from, to| from.as_str() == node || to.as_str() == node);
        }
    }

    /// Breaks the connection between two nodes and keeps them apart until [`Network::heal`].
    pub fn cut(&self, a: &str, b: &str) {
        self.cut_one_way(a, b);
        self.cut_one_way(b, a);
        let mut state = self.0.state.lock();
        state.close_where(|from, to| {
            (from.as_str(), to.as_str()) == (a, b) || (from.as_str(), to.as_str()) == (b, a)
        });
    }

    /// Lets nothing through from one node to another; the other way stays open, and nobody is told.
    pub fn cut_one_way(&self, from: &str, to: &str) {
        if let (Ok(from), Ok(to)) = (NodeId::new(from), NodeId::new(to)) {
            self.0.state.lock().cuts.insert((from, to));
        }
    }

    /// Breaks the connection between two nodes once; they connect again at once, and nothing is lost.
    pub fn blip(&self, a: &str, b: &str) {
        self.cut(a, b);
        self.heal(a, b);
    }

    /// Lets two nodes reach one another again, both ways. What a one-way cut swallowed is gone: the
    /// connection is broken, and what was on it is sent again on the next.
    pub fn heal(&self, a: &str, b: &str) {
        let mut state = self.0.state.lock();
        let before = state.cuts.len();
        state
            .cuts
            .retain(|(x, y)| !((x.as_str(), y.as_str()) == (a, b) || (x.as_str(), y.as_str()) == (b, a)));
        if state.cuts.len() < before {
            state.close_where(|from, to| {
                (from.as_str(), to.as_str()) == (a, b) || (from.as_str(), to.as_str()) == (b, a)
            });
        }
        state.look();
    }

    /// Heals every cut.
    pub fn heal_all(&self) {
        let cuts: Vec<(NodeId, NodeId)> = self.0.state.lock().cuts.iter().cloned().collect();
        cuts.iter().for_each(|(a, b)| self.heal(a.as_str(), b.as_str()));
    }

    /// Stops a node in its tracks, as SIGSTOP would: it takes and sends nothing, and its links stay open.
    pub fn freeze(&self, node: &str) {
        if let Some(live) = self.0.state.lock().nodes.get_mut(node) {
            live.frozen = true;
            let _ = live.post.send(Post::Look);
        }
    }

    /// Lets a frozen node go on.
    pub fn thaw(&self, node: &str) {
        if let Some(live) = self.0.state.lock().nodes.get_mut(node) {
            live.frozen = false;
            live.thaw.notify_one();
        }
    }

    /// Every packet from one node to another takes this long, drawn at random, and never overtakes an
    /// earlier one. An empty range takes the delay away.
    pub fn delay(&self, from: &str, to: &str, range: Range<Duration>) {
        if let (Ok(from), Ok(to)) = (NodeId::new(from), NodeId::new(to)) {
            let mut state = self.0.state.lock();
            if range.is_empty() {
                state.delays.remove(&(from, to));
            } else {
                state.delays.insert((from, to), range);
            }
        }
    }
}

impl State {
    fn close_where(&mut self, broken: impl Fn(&NodeId, &NodeId) -> bool) {
        let gone: Vec<RawId> =
            self.raws.iter().filter(|(_, (a, b))| broken(a, b)).map(|(raw, _)| *raw).collect();
        gone.into_iter().for_each(|raw| self.close(raw));
    }

    /// Both ends hear that a connection is gone, after what was written to it before.
    fn close(&mut self, raw: RawId) {
        let Some((a, b)) = self.raws.remove(&raw) else { return };
        self.dialled.remove(&(a.clone(), b.clone()));
        for end in [a, b] {
            if let Some(live) = self.nodes.get(&end) {
                let _ = live.post.send(Post::Closed(raw));
            }
        }
    }

    fn look(&self) {
        for live in self.nodes.values() {
            let _ = live.post.send(Post::Look);
        }
    }

    fn reaches(&self, from: &NodeId, to: &NodeId) -> bool {
        self.nodes.contains_key(to)
            && !self.cuts.contains(&(from.clone(), to.clone()))
            && !self.cuts.contains(&(to.clone(), from.clone()))
    }

    fn draw(&mut self, range: &Range<Duration>) -> Duration {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        let span = u64::try_from((range.end - range.start).as_nanos()).unwrap_or(u64::MAX).max(1);
        range.start + Duration::from_nanos(self.random % span)
    }

    /// Puts a packet on its way.
    fn write(&mut self, from: &NodeId, raw: RawId, head: Bytes, body: Bytes) {
        let Some((a, b)) = self.raws.get(&raw) else { return };
        let to = if a == from { b.clone() } else { a.clone() };
        let way = (from.clone(), to);
        if self.cuts.contains(&way) {
            return;
        }
        let range = self.delays.get(&way).cloned();
        let due = range.map(|range| Instant::now() + self.draw(&range));
        if let Some(live) = self.nodes.get(&way.1) {
            let _ = live.post.send(Post::Packet { raw, head, body, due });
        }
    }
}

impl fmt::Debug for Network {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Network").field("nodes", &self.nodes()).finish_non_exhaustive()
    }
}

/// One node's end of a [`Network`]. Cloning gives the same end.
#[derive(Clone)]
pub struct MemoryTransport(Arc<Inner>);

struct Inner {
    network: Network,
    id: Result<NodeId, NameError>,
    shown: NodeId,
    running: Mutex<Option<Running>>,
}

struct Running {
    core: Arc<Core>,
    task: JoinHandle<()>,
}

/// What senders and the node's task share.
struct Core {
    me: Peer,
    endpoint: Mutex<Endpoint>,
    started: Instant,
    wake: Notify,
    room: Notify,
    stop: Notify,
    network: Network,
}

impl Core {
    fn now(&self) -> Duration {
        self.started.elapsed()
    }
}

#[async_trait]
impl Transport for MemoryTransport {
    fn node(&self) -> &NodeId {
        &self.0.shown
    }

    async fn start(&self, inbound: Inbound) -> Result<Peer, TransportError> {
        let node =
            self.0.id.clone().map_err(|refused| TransportError::Failed { reason: refused.to_string() })?;
        let (post, inbox) = mpsc::unbounded_channel();
        let mut running = self.0.running.lock();
        if running.as_ref().is_some_and(|running| !running.task.is_finished()) {
            return Err(TransportError::AlreadyStarted { node });
        }
        let mut state = self.0.network.0.state.lock();
        if let Some(live) = state.nodes.get(&node) {
            return Err(TransportError::Superseded { node, live: live.peer.incarnation });
        }
        let clock = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_micros();
        // above every earlier life on this network, also when the clock went backwards
        let number = u64::try_from(clock).unwrap_or(u64::MAX).max(state.last_incarnation + 1);
        state.last_incarnation = number;
        let me = Peer::new(node.clone(), Incarnation::new(number).unwrap_or(Incarnation::MIN));
        let shared = &self.0.network.0;
        let endpoint = Endpoint::new(me.clone(), inbound.terms().clone(), shared.link.clone(), number << 1);
        let thaw = Arc::new(Notify::new());
        state.nodes.insert(node, Live { peer: me.clone(), post, frozen: false, thaw: thaw.clone() });
        let core = Arc::new(Core {
            me: me.clone(),
            endpoint: Mutex::new(endpoint),
            started: Instant::now(),
            wake: Notify::new(),
            room: Notify::new(),
            stop: Notify::new(),
            network: self.0.network.clone(),
        });
        let pump = Pump {
            core: core.clone(),
            inbound,
            inbox,
            arrived: VecDeque::new(),
            delayed: BTreeMap::new(),
            thaw,
            settled: false,
            redial: Some(Instant::now()),
        };
        *running = Some(Running { core, task: tokio::spawn(pump.run()) });
        Ok(me)
    }

    async fn send(&self, to: &Peer, frame: Frame) -> Result<(), SendError> {
        let mut frame = frame;
        loop {
            let Some(core) = self.core() else { return Err(SendError::NoLink(frame)) };
            // asked for before the try, so that room which appears in between is not missed
            let room = core.room.notified();
            tokio::pin!(room);
            room.as_mut().enable();
            match self.try_send(to, frame) {
                Err(SendError::Busy(back)) => frame = back,
                result => return result,
            }
            room.await;
        }
    }

    fn try_send(&self, to: &Peer, frame: Frame) -> Result<(), SendError> {
        let Some(core) = self.core() else { return Err(SendError::NoLink(frame)) };
        core.endpoint.lock().send(to, frame)?;
        core.wake.notify_one();
        Ok(())
    }

    async fn shutdown(&self) {
        let running = self.0.running.lock().take();
        if let Some(Running { core, task }) = running {
            core.stop.notify_one();
            // it ends by itself; a task that was ended from outside has nothing left to say
            let _ = task.await;
        }
    }
}

impl MemoryTransport {
    fn core(&self) -> Option<Arc<Core>> {
        self.0.running.lock().as_ref().map(|running| running.core.clone())
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if let Some(running) = self.running.get_mut() {
            running.core.stop.notify_one();
        }
    }
}

impl fmt::Debug for MemoryTransport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryTransport").field("node", &self.0.shown).finish_non_exhaustive()
    }
}

/// A node's task: takes packets in, reports, and writes. All reports of a node come from here, one at a time.
struct Pump {
    core: Arc<Core>,
    inbound: Inbound,
    inbox: mpsc::UnboundedReceiver<Post>,
    /// What has arrived and is not handled yet.
    arrived: VecDeque<Post>,
    /// What is not due yet, and what came after it on the same connection.
    delayed: BTreeMap<RawId, VecDeque<Post>>,
    thaw: Arc<Notify>,
    settled: bool,
    /// When to look again whom to dial.
    redial: Option<Instant>,
}

/// What woke the task.
enum Woken {
    Posts,
    Stop,
    Gone,
}

impl Pump {
    async fn run(mut self) {
        let mut posts = Vec::with_capacity(BURST);
        loop {
            let woken = self.wait(&mut posts).await;
            if matches!(woken, Woken::Gone) {
                break;
            }
            if matches!(woken, Woken::Stop) {
                self.say_goodbye();
                break;
            }
            if self.is_frozen() {
                self.arrived.extend(posts.drain(..));
                if !self.wait_for_thaw().await {
                    break;
                }
            }
            self.arrived.extend(posts.drain(..));
            if !self.take_in() {
                break;
            }
            self.dial();
            self.write();
            self.settle();
            tokio::task::consume_budget().await;
        }
        self.core.room.notify_waiters();
    }

    async fn wait(&mut self, posts: &mut Vec<Post>) -> Woken {
        let (deadline, busy) = {
            let endpoint = self.core.endpoint.lock();
            (endpoint.deadline().map(|at| self.core.started + at), endpoint.wants_to_write())
        };
        let due = self.delayed.values().filter_map(|posts| posts.front()?.due()).min();
        let next = [deadline, due, self.redial].into_iter().flatten().min();
        let sleep = async {
            match next {
                Some(at) => tokio::time::sleep_until(at).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            () = self.core.stop.notified() => Woken::Stop,
            taken = self.inbox.recv_many(posts, BURST) => if taken == 0 { Woken::Gone } else { Woken::Posts },
            () = std::future::ready(()), if busy => Woken::Posts,
            () = self.core.wake.notified() => Woken::Posts,
            () = sleep => Woken::Posts,
        }
    }

    fn is_frozen(&self) -> bool {
        let state = self.core.network.0.state.lock();
        state.nodes.get(&self.core.me.node).is_some_and(|live| live.frozen)
    }

    /// `false` if the node was stopped or crashed meanwhile.
    async fn wait_for_thaw(&mut self) -> bool {
        loop {
            tokio::select! {
                () = self.core.stop.notified() => {
                    self.say_goodbye();
                    return false;
                }
                () = self.thaw.notified() => {}
                post = self.inbox.recv() => match post {
                    None | Some(Post::Crash) => return false,
                    Some(post) => self.arrived.push_back(post),
                },
            }
            if !self.is_frozen() {
                return true;
            }
        }
    }

    /// Handles what has arrived and is due. `false` if the node crashed.
    fn take_in(&mut self) -> bool {
        let now = Instant::now();
        let mut ready = VecDeque::new();
        for posts in self.delayed.values_mut() {
            while posts.front().is_some_and(|post| post.due().is_none_or(|due| due <= now)) {
                ready.extend(posts.pop_front());
            }
        }
        self.delayed.retain(|_, posts| !posts.is_empty());
        while let Some(post) = self.arrived.pop_front() {
            // one that is not due holds back what came after it on its connection, and nothing else
            match post
                .raw()
                .filter(|raw| post.due().is_some_and(|due| due > now) || self.delayed.contains_key(raw))
            {
                Some(raw) => self.delayed.entry(raw).or_default().push_back(post),
                None => ready.push_back(post),
            }
        }
        if !self.handle(ready, now) {
            return false;
        }
        self.report();
        true
    }

    fn handle(&mut self, posts: VecDeque<Post>, now: Instant) -> bool {
        let mut endpoint = self.core.endpoint.lock();
        for post in posts {
            match post {
                Post::Packet { raw, head, body, .. } => {
                    endpoint.handle_packet(raw, head, body, self.core.now());
                }
                Post::Accepted(raw) => endpoint.handle_accepted(raw),
                Post::Closed(raw) => {
                    endpoint.handle_closed(raw, self.core.now());
                    self.redial = Some(now);
                }
                Post::Look => self.redial = Some(now),
                Post::Crash => return false,
            }
        }
        endpoint.handle_timeout(self.core.now());
        true
    }

    /// Reports without holding a lock: what is reported may send.
    fn report(&mut self) {
        loop {
            let event = self.core.endpoint.lock().poll_event();
            match event {
                None => break,
                Some(LinkEvent::Up(peer)) => self.inbound.peer_up(peer),
                Some(LinkEvent::Suspect(peer)) => self.inbound.peer_suspect(&peer),
                Some(LinkEvent::Resumed(peer)) => self.inbound.peer_resumed(&peer),
                Some(LinkEvent::Down(peer)) => {
                    self.inbound.peer_down(&peer);
                    self.redial = Some(Instant::now());
                }
                Some(LinkEvent::Frame(peer, frame)) => self.inbound.frame(&peer, frame),
                Some(LinkEvent::Close(raw)) => self.core.network.0.state.lock().close(raw),
                Some(LinkEvent::Refused(raw, refusal)) => {
                    tracing::debug!(node = %self.core.me, %refusal, "a connection was refused");
                    self.core.network.0.state.lock().close(raw);
                    self.redial = Some(Instant::now() + REDIAL);
                }
            }
        }
        self.core.room.notify_waiters();
    }

    /// Opens connections to the nodes that this one can reach and has none to: those with higher names, and
    /// all of them at the start.
    fn dial(&mut self) {
        if self.redial.is_none_or(|at| at > Instant::now()) {
            return;
        }
        self.redial = None;
        let me = &self.core.me.node;
        let mut endpoint = self.core.endpoint.lock();
        let mut state = self.core.network.0.state.lock();
        let wanted: Vec<NodeId> = state
            .nodes
            .keys()
            .filter(|other| *other != me && (*other > me || !self.settled))
            .filter(|other| !endpoint.is_connected(other) && state.reaches(me, other))
            .filter(|&other| {
                let (ours, theirs) = ((me.clone(), other.clone()), (other.clone(), me.clone()));
                !state.dialled.contains(&ours) && !state.dialled.contains(&theirs)
            })
            .cloned()
            .collect();
        for other in wanted {
            let raw = RawId(self.core.network.0.next_raw.fetch_add(1, Ordering::Relaxed));
            state.raws.insert(raw, (me.clone(), other.clone()));
            state.dialled.insert((me.clone(), other.clone()));
            if let Some(live) = state.nodes.get(&other) {
                let _ = live.post.send(Post::Accepted(raw));
            }
            endpoint.handle_dialled(raw, Some(other));
        }
    }

    fn write(&mut self) {
        for _ in 0..BURST {
            let mut endpoint = self.core.endpoint.lock();
            let Some((raw, head, body)) = endpoint.poll_write(self.core.now()) else { break };
            drop(endpoint);
            self.core.network.0.state.lock().write(&self.core.me.node, raw, head, body);
        }
        self.report();
    }

    /// Every node that can be reached is linked: discovery has settled.
    fn settle(&mut self) {
        if self.settled {
            return;
        }
        let me = &self.core.me.node;
        let waiting = {
            let endpoint = self.core.endpoint.lock();
            let state = self.core.network.0.state.lock();
            state.nodes.keys().any(|n| n != me && state.reaches(me, n) && !endpoint.has_link(n))
        };
        if waiting {
            self.redial.get_or_insert(Instant::now() + REDIAL);
        } else {
            self.settled = true;
            self.inbound.discovery_settled();
        }
    }

    /// Writes what is queued, says goodbye, and leaves the network.
    fn say_goodbye(&mut self) {
        self.core.endpoint.lock().close();
        loop {
            let packet = self.core.endpoint.lock().poll_write(self.core.now());
            let Some((raw, head, body)) = packet else { break };
            self.core.network.0.state.lock().write(&self.core.me.node, raw, head, body);
        }
        let mut state = self.core.network.0.state.lock();
        if state.nodes.get(&self.core.me.node).is_some_and(|live| live.peer == self.core.me) {
            state.nodes.remove(&self.core.me.node);
        }
        let me = self.core.me.node.clone();
        state.close_where(|a, b| *a == me || *b == me);
    }
}
