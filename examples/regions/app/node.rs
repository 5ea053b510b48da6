//! A node of one region, with its part in the traffic between regions.
//!
//! ```text
//!   origin ──GATE──▶ gateway ──Wide──▶ router in the other region ──DOOR──▶ nodes with members ──▶ members
//!     ▲                 │  ▲               │ targets(group, tag) says Flood? then DOOR of every node
//!     └──────BACK───────┘  └──── answer ───┘
//! ```
//!
//! The origin keeps a broadcast until the other region has answered, and hands it over again if that takes long; so
//! neither a gateway nor a router that dies loses it. Each node's door gives a hop to its members once.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::join_all;
use muster_router::{Group, Membership, Message, Muster, NodeId, Ring, RingConfig, View, ViewHash};
use parking_lot::Mutex;
use tokio::sync::{Notify, Semaphore, mpsc, oneshot};
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::hop::{Hop, Seen, WINDOW};
use super::wide::{Answer, Question, Wide};
use super::{Broken, Failure};

/// Groups of the nodes themselves; every node is a member of each.
const GATE: &str = "\0gate";
const BACK: &str = "\0back";
const DOOR: &str = "\0door";
/// Who routes this key is the gateway: nobody has to be elected.
const GATEWAY: &str = "\0gateway";

/// How many of the nodes that own that key serve as gateways when the first is silent.
const GATEWAYS: usize = 3;

/// After so long without an answer a hop is handed over again.
const AGAIN: Duration = Duration::from_millis(300);
/// How many hops may wait at a gateway. More are dropped, and come again.
const AT_THE_GATE: usize = 4096;
/// How many hops a node has in hand at once as a gateway, and how many as the other region's end.
const IN_HAND: usize = 256;
/// How long it may take with one: then the origin has handed it over again anyway.
const PATIENCE: Duration = Duration::from_secs(5);

/// What a gateway knows of the other region.
struct Remote {
    view: View,
    ring: Ring,
    hash: ViewHash,
}

impl Remote {
    /// From the view that a node of the other region has told us: its ring and its hash follow from it.
    fn of(view: View) -> Self {
        let config = RingConfig::default();
        Self { ring: Ring::of(view.ring_nodes(), config), hash: ViewHash::of(&view, &config), view }
    }
}

/// The broadcasts that the other region has not answered.
#[derive(Default)]
struct Open {
    last: u64,
    waiting: BTreeMap<u64, oneshot::Sender<()>>,
}

/// How the other region was reached.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    pub(crate) targeted: AtomicU64,
    pub(crate) flooded: AtomicU64,
    pub(crate) again: AtomicU64,
    pub(crate) copies: AtomicU64,
}

pub(crate) struct Node {
    pub(crate) muster: Muster,
    wide: Wide,
    /// Nodes of the other region to ask before it has told us its view.
    seeds: Vec<NodeId>,
    remote: Mutex<Arc<Remote>>,
    open: Mutex<Open>,
    /// A number is no longer open.
    settled: Notify,
    seen: Mutex<Seen>,
    gate: mpsc::Sender<Hop>,
    tasks: Mutex<JoinSet<()>>,
    memberships: Mutex<Vec<Membership>>,
    counts: Arc<Counts>,
    broken: Broken,
}

// Start and end.
impl Node {
    /// Takes part once `muster` is ready: a node that has not met its region yet would answer for a region of its own.
    pub(crate) async fn start(
        muster: Muster,
        wide: Wide,
        seeds: Vec<NodeId>,
        counts: Arc<Counts>,
        broken: Broken,
    ) -> Result<Arc<Self>, Failure> {
        let (gate, hops) = mpsc::channel(AT_THE_GATE);
        let node = Arc::new(Self {
            muster,
            wide,
            seeds,
            remote: Mutex::new(Arc::new(Remote::of(View::new([])))),
            open: Mutex::default(),
            settled: Notify::new(),
            seen: Mutex::new(Seen::new(broken)),
            gate,
            tasks: Mutex::default(),
            memberships: Mutex::default(),
            counts,
            broken,
        });
        node.hear(GATE, |node, hop| drop(node.gate.try_send(hop))).await?;
        node.hear(DOOR, |node, hop| node.deliver(hop)).await?;
        node.hear(BACK, |node, hop| node.answered(&hop)).await?;
        node.muster.until_ready(Duration::from_secs(30)).await?;
        let questions = node.wide.open(node.muster.node());
        node.spawn(node.clone().serve(questions));
        node.spawn(node.clone().guard(hops));
        Ok(node)
    }

    /// Ends its part in the traffic between regions: what it has in hand goes another way.
    pub(crate) async fn stop(&self) {
        let mut tasks = std::mem::take(&mut *self.tasks.lock());
        tasks.shutdown().await;
        self.memberships.lock().clear();
    }

    fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        let mut tasks = self.tasks.lock();
        while tasks.try_join_next().is_some() {}
        tasks.spawn(task);
    }

    async fn hear(self: &Arc<Self>, group: &str, act: fn(&Self, Hop)) -> Result<(), Failure> {
        let node: Weak<Self> = Arc::downgrade(self);
        let hear = move |message: &Message| {
            if let (Some(node), Some(hop)) = (node.upgrade(), Hop::decode(message.payload())) {
                act(&node, hop);
            }
        };
        let membership = self.muster.join_fn(group, hear).await?;
        self.memberships.lock().push(membership);
        Ok(())
    }
}

/// A number that is open, until it is dropped.
struct Ticket<'a>(&'a Node, u64);

impl Drop for Ticket<'_> {
    fn drop(&mut self) {
        self.0.open.lock().waiting.remove(&self.1);
        self.0.settled.notify_waiters();
    }
}

// The origin.
impl Node {
    /// Sends to the members of `group` in both regions, and waits until both have it. As long as the other region
    /// cannot be reached at all, it waits: put your own deadline around it. Dropped before it returns, the broadcast
    /// may have arrived in one region only.
    pub(crate) async fn broadcast(&self, group: &str, payload: Bytes) -> Result<(), Failure> {
        let here = self.muster.broadcast(group.to_owned(), payload.clone());
        let (here, ()) = tokio::join!(here, self.abroad(group, payload));
        here.map(drop).map_err(Failure::from)
    }

    async fn abroad(&self, group: &str, payload: Bytes) {
        let (number, oldest, mut answered) = self.number().await;
        let _ticket = Ticket(self, number);
        let group = Bytes::copy_from_slice(group.as_bytes());
        let hop = Hop { origin: self.muster.peer().clone(), number, oldest, group, payload };
        for attempt in 0.. {
            let handed_over = async {
                self.hand_over(&hop, attempt).await;
                std::future::pending::<()>().await;
            };
            tokio::select! {
                _ = &mut answered => return,
                _ = timeout(AGAIN, handed_over) => {}
            }
            self.counts.again.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// The next number, once it is near enough to the lowest open one.
    async fn number(&self) -> (u64, u64, oneshot::Receiver<()>) {
        loop {
            let settled = self.settled.notified();
            {
                let mut open = self.open.lock();
                let oldest = open.waiting.keys().next().copied().unwrap_or(open.last + 1);
                if open.last + 1 < oldest + WINDOW {
                    open.last += 1;
                    let (answer, answered) = oneshot::channel();
                    let number = open.last;
                    open.waiting.insert(number, answer);
                    return (number, oldest, answered);
                }
            }
            settled.await;
        }
    }

    /// To the gateway that there is now; later attempts go to those that would be next. That one fails is found out
    /// by silence.
    async fn hand_over(&self, hop: &Hop, attempt: usize) {
        let ring = self.muster.ring();
        let gateways = ring.owners(GATEWAY, GATEWAYS);
        match gateways.get(attempt % gateways.len().max(1)) {
            Some(gateway) if *gateway != self.muster.node() => {
                let _ = self.muster.send_to_node(gateway.as_str(), GATE, hop.encode()).await;
            }
            _ => drop(self.gate.try_send(hop.clone())),
        }
    }

    fn answered(&self, hop: &Hop) {
        // an earlier life of this node had numbers of its own
        if hop.origin == *self.muster.peer() {
            let answer = self.open.lock().waiting.remove(&hop.number);
            answer.map(|answer| answer.send(()));
            self.settled.notify_waiters();
        }
    }
}

// The gateway.
impl Node {
    async fn guard(self: Arc<Self>, mut hops: mpsc::Receiver<Hop>) {
        let hands = Arc::new(Semaphore::new(IN_HAND));
        while let Some(hop) = hops.recv().await {
            let Ok(hand) = Arc::clone(&hands).acquire_owned().await else { return };
            let node = Arc::clone(&self);
            self.spawn(async move {
                let _ = timeout(PATIENCE, node.forward(&hop)).await;
                drop(hand);
            });
        }
    }

    /// To the group's router in the other region, by the ring of the view that we know; to anybody there if it does
    /// not answer. `None` is told to nobody: the origin hands it over again.
    async fn forward(&self, hop: &Hop) {
        let remote = self.remote.lock().clone();
        let router = remote.ring.router_for(&hop.group);
        let mut answer = match router {
            Some(router) => self.wide.ask(router, hop, remote.hash).await,
            None => None,
        };
        if answer.is_none() {
            let known = remote.view.peers().map(|peer| &peer.node);
            for other in known.chain(&self.seeds).filter(|other| Some(*other) != router) {
                answer = self.wide.ask(other, hop, ViewHash::UNSETTLED).await;
                if answer.is_some() {
                    break;
                }
            }
        }
        let Some(Answer { view }) = answer else { return };
        self.learn(view);
        if hop.origin == *self.muster.peer() {
            self.answered(hop);
        } else {
            let back = Hop { group: Bytes::new(), payload: Bytes::new(), ..hop.clone() };
            let _ = self.muster.send_to_node(hop.origin.node.as_str(), BACK, back.encode()).await;
        }
    }

    fn learn(&self, view: View) {
        let mut remote = self.remote.lock();
        let old = self.broken == Broken::TrustsAnOldRing && !remote.view.is_empty();
        if remote.view != view && !old {
            *remote = Arc::new(Remote::of(view));
        }
    }

    /// The gateway of its region, as this node sees it.
    pub(crate) fn gateway(&self) -> Option<NodeId> {
        self.muster.ring().router_for(GATEWAY).cloned()
    }
}

// The other region's end.
impl Node {
    async fn serve(self: Arc<Self>, mut questions: mpsc::Receiver<Question>) {
        let hands = Arc::new(Semaphore::new(IN_HAND));
        while let Some(Question { hop, tag, answer }) = questions.recv().await {
            // nobody waits any more: it comes again
            if answer.is_closed() {
                continue;
            }
            let Ok(hand) = Arc::clone(&hands).acquire_owned().await else { return };
            let node = Arc::clone(&self);
            self.spawn(async move {
                if let Ok(Some(())) = timeout(PATIENCE, node.enter(&hop, tag)).await {
                    let _ = answer.send(Answer { view: node.muster.members() });
                }
                drop(hand);
            });
        }
    }

    /// Sees that this region hears a hop. If the gateway's view is ours, and we are sure of it, we are the group's
    /// router and know who must hear it; if not, every node must.
    async fn enter(&self, hop: &Hop, tag: ViewHash) -> Option<()> {
        let targets = match self.broken {
            Broken::TrustsAnOldRing => Ok(self.muster.occupancy(&hop.group)),
            _ => self.muster.targets(&hop.group, tag).map(|targets| targets.into_iter().collect()),
        };
        if let Ok(targets) = targets {
            let bytes = hop.encode();
            let send = |target: &NodeId| self.muster.send_to_node(target.to_string(), DOOR, bytes.clone());
            let sent = join_all(targets.iter().map(send)).await;
            if sent.iter().all(Result::is_ok) {
                self.counts.targeted.fetch_add(1, Ordering::Relaxed);
                return Some(());
            }
        }
        self.muster.broadcast(DOOR, hop.encode()).await.ok()?;
        self.counts.flooded.fetch_add(1, Ordering::Relaxed);
        Some(())
    }

    /// Gives a hop to the members on this node, once.
    fn deliver(&self, hop: Hop) {
        if !self.seen.lock().first(&hop) {
            self.counts.copies.fetch_add(1, Ordering::Relaxed);
            if self.broken != Broken::ForgetsWhatItHad {
                return;
            }
        }
        self.muster.broadcast_local(Group::from(hop.group), hop.payload);
    }
}
