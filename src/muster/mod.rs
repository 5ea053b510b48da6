//! The public handle.

mod broadcast;
mod builder;
#[cfg(feature = "cache")]
pub(crate) mod cache;
mod mailbox;
mod membership;
mod summary;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, timeout};

use crate::driver::counting::MemberCount;
use crate::driver::events::Events;
use crate::driver::mailbox::{Mailbox, MailboxOptions};
use crate::driver::member::{Member, Target};
use crate::driver::message::{Delivered, FnSubscriber, Message, Subscriber};
use crate::driver::{Driver, ScopeState};
use crate::error::{CountError, DrainTimeout, JoinError};
use crate::node::{Flood, Published, Route, Status, Targets};
use crate::ring::Ring;
use crate::types::{Group, MemberId, NodeId, Peer};
use crate::view::{View, ViewHash};

pub use broadcast::{BroadcastOptions, Decision, Delivery, MAX_HEADERS_LEN, Receipt};
pub use builder::MusterBuilder;
pub use mailbox::Subscription;
pub use membership::Membership;
pub use summary::{Dump, Summary};

/// A snapshot of the members of one group on this node.
pub type LocalMembers = crate::node::LocalMembers<Member>;
/// One of [`LocalMembers`].
pub type MemberRef = crate::node::MemberRef<Member>;

/// The status did not become `Ready` in time.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not ready after {waited:?}: the scope is {status}{}", if *.stopped { " and stopped" } else { "" })]
#[non_exhaustive]
pub struct NotReady {
    /// The status it has.
    pub status: Status,
    /// Whether the scope is stopped: it will never be ready.
    pub stopped: bool,
    /// How long was waited.
    pub waited: Duration,
}

impl NotReady {
    /// Whether the same call may succeed later.
    pub fn is_retryable(&self) -> bool {
        !self.stopped
    }
}

/// One scope on one node: members join groups here, and broadcasts begin here.
///
/// Cheap to clone. When the last clone is dropped the scope stops, as by [`Muster::shutdown`], which also waits
/// for it. Calls that read never wait and never visit a task. After the end `Result` calls say `Stopped` and the
/// others answer as for a scope without nodes and members.
///
/// ```
/// # use muster_router::{Muster, transport::memory::Network};
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let network = Network::new();
/// let a = Muster::builder("rooms").transport(network.node("a")).start().await?;
/// let b = Muster::builder("rooms").transport(network.node("b")).start().await?;
///
/// let mut inbox = b.subscribe("room:42").await?;
/// a.broadcast("room:42", "hello").await?;
/// assert_eq!(inbox.recv().await.ok_or("closed")?.payload(), "hello");
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Muster(Arc<Handle>);

/// Its drop is the drop of the last clone.
struct Handle(Arc<Driver>);

impl Drop for Handle {
    fn drop(&mut self) {
        self.0.begin_stop();
    }
}

impl fmt::Debug for Muster {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Muster")
            .field("scope", &self.0.0.scope)
            .field("node", self.peer())
            .field("status", &self.status())
            .finish()
    }
}

// Start and end.
impl Muster {
    /// A new scope of this name; nodes of one name and one network find each other.
    pub fn builder(scope: impl Into<String>) -> MusterBuilder {
        MusterBuilder::new(scope.into())
    }

    fn new(driver: Arc<Driver>) -> Self {
        Self(Arc::new(Handle(driver)))
    }

    fn driver(&self) -> &Arc<Driver> {
        &self.0.0
    }

    /// Leaves the routing, and the partitions of its caches, to others, and waits until they have taken over: joins are
    /// refused from now on, while members that are here still get everything, and broadcasts and operations of caches
    /// still work. It cannot be taken back. Follow it by [`Muster::shutdown`] when your members have moved on.
    /// Cancel-safe: a drain goes on whether or not it is waited for.
    ///
    /// # Errors
    /// [`DrainTimeout`] names the nodes that have not confirmed it, and the caches that have data to hand over, after
    /// `timeout`; drain again to wait longer. At once if all that is left are caches that no other node takes over. `Ok`
    /// also if the scope is stopped, before or meanwhile: then there is nothing left to drain.
    ///
    /// ```
    /// # use muster_router::{Muster};
    /// # use muster_router::transport::memory::Network;
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let muster = Muster::builder("rooms").transport(Network::new().node("a")).start().await?;
    /// muster.drain(std::time::Duration::from_secs(30)).await?;
    /// muster.shutdown().await;
    /// # Ok(())
    /// # }
    /// ```
    pub async fn drain(&self, timeout: Duration) -> Result<(), DrainTimeout> {
        let driver = self.driver();
        if driver.is_stopped() {
            return Ok(());
        }
        driver.node.drain(driver.now());
        driver.pump();
        #[cfg(feature = "cache")]
        driver.drain_caches();
        let deadline = Instant::now() + timeout.min(FOREVER);
        loop {
            let pulse = driver.pulse.notified();
            tokio::pin!(pulse);
            pulse.as_mut().enable();
            let waiting_for = driver.node.drain_waiting_for();
            #[cfg(feature = "cache")]
            let (caches, alone) = driver.caches_to_drain();
            #[cfg(not(feature = "cache"))]
            let (caches, alone) = (Vec::new(), Vec::<String>::new());
            if (waiting_for.is_empty() && caches.is_empty()) || driver.is_stopped() {
                return Ok(());
            }
            // nobody to wait for, once all that can be handed over has been
            let in_vain = waiting_for.is_empty() && caches.len() == alone.len();
            if in_vain || tokio::time::timeout_at(deadline, pulse).await.is_err() {
                return Err(DrainTimeout::new(waiting_for).with_caches(caches).with_nobody_for(alone));
            }
        }
    }

    /// Stops the scope: leaves the network, ends every task, ends every subscription
    /// ([`ClosedReason::Stopped`](crate::ClosedReason::Stopped)). The transport can then be started again. Cancel-safe:
    /// once begun it goes on.
    ///
    /// ```
    /// # use muster_router::{BroadcastError, Muster};
    /// # use muster_router::transport::memory::Network;
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let muster = Muster::builder("rooms").transport(Network::new().node("a")).start().await?;
    /// muster.shutdown().await;
    /// assert_eq!(muster.broadcast("room:42", "x").await, Err(BroadcastError::Stopped));
    /// # Ok(())
    /// # }
    /// ```
    pub async fn shutdown(&self) {
        self.driver().begin_stop();
        self.driver().stopped().await;
    }
}

/// Longer than any process; adding it to a clock does not overflow.
const FOREVER: Duration = Duration::from_secs(100 * 365 * 24 * 60 * 60);

// Members.
impl Muster {
    /// Makes `subscriber` a new member of `group`. When this returns, the member gets every broadcast that begins
    /// anywhere in the cluster.
    ///
    /// Waits for the group's router to know, at most `join_timeout`. Cancel-safe: dropped before it returns,
    /// nobody has joined.
    ///
    /// # Errors
    /// [`JoinError`]; the member is not registered then.
    ///
    /// ```
    /// # use muster_router::{Delivered, Message, Muster, Subscriber, transport::memory::Network};
    /// struct Printer;
    /// impl Subscriber for Printer {
    ///     fn deliver(&self, message: &Message) -> Delivered {
    ///         println!("{:?}", message.payload());
    ///         Delivered::Accepted
    ///     }
    /// }
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let muster = Muster::builder("rooms").transport(Network::new().node("a")).start().await?;
    /// let membership = muster.join("room:42", Printer).await?;
    /// assert!(muster.is_local_member("room:42", membership.id()));
    /// membership.leave();
    /// assert_eq!(muster.local_member_count("room:42"), 0);
    /// # Ok(())
    /// # }
    /// ```
    pub async fn join(
        &self,
        group: impl Into<Group>,
        subscriber: impl Subscriber,
    ) -> Result<Membership, JoinError> {
        self.join_target(group.into(), None, Target::user(subscriber)).await
    }

    /// The same with a closure, which may return nothing or [`Delivered`].
    ///
    /// # Errors
    /// As [`Muster::join`].
    ///
    /// ```
    /// # use muster_router::{Muster};
    /// # use muster_router::transport::memory::Network;
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let muster = Muster::builder("rooms").transport(Network::new().node("a")).start().await?;
    /// let (sender, receiver) = std::sync::mpsc::channel();
    /// let membership = muster
    ///     .join_fn("room:42", move |message| drop(sender.send(message.payload().clone())))
    ///     .await?;
    /// muster.broadcast("room:42", "hello").await?;
    /// assert_eq!(receiver.recv()?, "hello");
    /// # drop(membership);
    /// # Ok(())
    /// # }
    /// ```
    pub async fn join_fn<F, R>(&self, group: impl Into<Group>, deliver: F) -> Result<Membership, JoinError>
    where
        F: Fn(&Message) -> R + Send + Sync + 'static,
        R: Into<Delivered> + 'static,
    {
        self.join(group, FnSubscriber(deliver)).await
    }

    /// Makes the member `id` a member of `group`: one member may be in many groups, and is left out of a
    /// broadcast by one id. The same member in the same group again is the same membership, shared: the first
    /// subscriber stays, this one is dropped, and the last guard leaves. Take ids from [`Muster::new_member`] or
    /// from an earlier membership.
    ///
    /// # Errors
    /// [`JoinError::ForeignMember`] if it lives on another node, and as [`Muster::join`].
    ///
    /// ```
    /// # use muster_router::{BroadcastOptions, Muster};
    /// # use muster_router::transport::memory::Network;
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let muster = Muster::builder("rooms").transport(Network::new().node("a")).start().await?;
    /// let (sender, mut inbox) = tokio::sync::mpsc::channel(64);
    /// let me = muster.new_member();
    /// let room = muster.join_as("room:42", me.clone(), sender.clone()).await?;
    /// let lobby = muster.join_as("lobby", me.clone(), sender).await?;
    /// // everybody but the one who speaks
    /// muster.broadcast_with("lobby", "hi", BroadcastOptions::default().except(me)).await?;
    /// assert!(inbox.try_recv().is_err());
    /// # drop((room, lobby));
    /// # Ok(())
    /// # }
    /// ```
    pub async fn join_as(
        &self,
        group: impl Into<Group>,
        id: MemberId,
        subscriber: impl Subscriber,
    ) -> Result<Membership, JoinError> {
        if id.peer != *self.peer() {
            return Err(JoinError::ForeignMember { member: id, here: self.peer().clone() });
        }
        self.join_target(group.into(), Some(id.number), Target::user(subscriber)).await
    }

    /// An id for a member that joins several groups.
    pub fn new_member(&self) -> MemberId {
        MemberId::new(self.peer().clone(), self.driver().node.next_member_number())
    }

    /// Joins with a bounded mailbox of 1024 messages that drops what comes when it is full, and tells
    /// ([`Message::missed`]).
    ///
    /// # Errors
    /// As [`Muster::join`].
    pub async fn subscribe(&self, group: impl Into<Group>) -> Result<Subscription, JoinError> {
        self.subscribe_with(group, MailboxOptions::default()).await
    }

    /// The same with a mailbox of your choice.
    ///
    /// # Errors
    /// As [`Muster::join`].
    ///
    /// ```
    /// # use muster_router::{MailboxOptions, Muster, Overflow};
    /// # use muster_router::transport::memory::Network;
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let muster = Muster::builder("rooms").transport(Network::new().node("a")).start().await?;
    /// let options = MailboxOptions::default().capacity(16).overflow(Overflow::DropOldest);
    /// let mut inbox = muster.subscribe_with("prices", options).await?;
    /// for price in 0..20 {
    ///     muster.broadcast("prices", price.to_string()).await?;
    /// }
    /// let oldest = inbox.recv().await.ok_or("closed")?;
    /// assert_eq!((oldest.payload().as_ref(), oldest.missed()), (b"4".as_slice(), 4));
    /// # Ok(())
    /// # }
    /// ```
    pub async fn subscribe_with(
        &self,
        group: impl Into<Group>,
        options: MailboxOptions,
    ) -> Result<Subscription, JoinError> {
        let mailbox = Arc::new(Mailbox::new(options));
        let membership = self.join_target(group.into(), None, Target::Mailbox(mailbox.clone())).await?;
        Ok(Subscription::new(mailbox, membership))
    }

    async fn join_target(
        &self,
        group: Group,
        number: Option<u64>,
        target: Target,
    ) -> Result<Membership, JoinError> {
        let driver = self.driver();
        if driver.is_stopped() {
            return Err(JoinError::Stopped);
        }
        group.check(driver.config.max_group_len)?;
        membership::join(driver, group, number, target).await
    }

    /// The members of `group` on this node, as they are now: for callers that deliver by themselves.
    ///
    /// ```
    /// # use muster_router::{Muster};
    /// # use muster_router::transport::memory::Network;
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let muster = Muster::builder("rooms").transport(Network::new().node("a")).start().await?;
    /// let _inbox = muster.subscribe("room:42").await?;
    /// for member in muster.local_members("room:42").iter() {
    ///     println!("{}", member.handle.id());
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub fn local_members(&self, group: impl AsRef<[u8]>) -> LocalMembers {
        match self.running() {
            Some(driver) => driver.node.local_members(group.as_ref()),
            None => LocalMembers::none(),
        }
    }

    /// How many members of `group` are on this node.
    pub fn local_member_count(&self, group: impl AsRef<[u8]>) -> usize {
        self.local_members(group).len()
    }

    /// How many members `group` has on all nodes, asked of those that hold it. While members come and go it is the
    /// sum of answers given at slightly different moments. Cancel-safe.
    ///
    /// A node that does not answer is not waited for longer than `rpc_timeout`, nor once its link is down, and is
    /// named in [`MemberCount::missing`]: the others' answers are not lost.
    ///
    /// # Errors
    /// [`CountError`]: the scope is stopped, or the name is not allowed.
    ///
    /// ```
    /// # use muster_router::{Muster};
    /// # use muster_router::transport::memory::Network;
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let muster = Muster::builder("rooms").transport(Network::new().node("a")).start().await?;
    /// let _inbox = muster.subscribe("room:42").await?;
    /// let members = muster.member_count("room:42").await?;
    /// assert_eq!((members.count, members.missing.len()), (1, 0));
    /// # Ok(())
    /// # }
    /// ```
    pub async fn member_count(&self, group: impl Into<Group>) -> Result<MemberCount, CountError> {
        let driver = self.driver();
        let group = group.into();
        group.check(driver.config.max_group_len)?;
        if driver.is_stopped() {
            return Err(CountError::Stopped);
        }
        Ok(driver.member_count(group).await)
    }

    /// Whether this member of `group` is registered on this node.
    pub fn is_local_member(&self, group: impl AsRef<[u8]>, member: &MemberId) -> bool {
        member.peer == *self.peer()
            && self.running().is_some_and(|driver| driver.node.is_local_member(group.as_ref(), member.number))
    }
}

// Routing.
impl Muster {
    fn running(&self) -> Option<&Arc<Driver>> {
        Some(self.driver()).filter(|driver| !driver.is_stopped())
    }

    fn read<R>(&self, look: impl FnOnce(&Published) -> R) -> Option<R> {
        self.running().map(|driver| driver.node.with_published(look))
    }

    /// Where a caller that wires its own hops sends a message to `group`: to the router, or to all while the
    /// cluster changes. Reads one published value; takes no lock. Tag the hop with [`Muster::sender_hash`].
    ///
    /// ```
    /// # use muster_router::{Muster, Route};
    /// # use muster_router::transport::memory::Network;
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let muster = Muster::builder("rooms").transport(Network::new().node("a")).start().await?;
    /// match muster.router("room:42") {
    ///     Route::Router(node) => println!("{node} knows who holds it"),
    ///     Route::Flood(nodes) => println!("nobody can be sure: all of {nodes:?}"),
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub fn router(&self, group: impl AsRef<[u8]>) -> Route {
        match self.running() {
            Some(driver) => driver.node.router(group.as_ref()),
            None => Route::Flood(Arc::new([])),
        }
    }

    /// On the router: the nodes that must hear a message to `group` from a caller whose view is `sender`.
    ///
    /// # Errors
    /// [`Flood`] if this node cannot be sure; then the message has to go to everybody.
    ///
    /// ```
    /// # use muster_router::{Flood, Muster, ViewHash};
    /// # use muster_router::transport::memory::Network;
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let muster = Muster::builder("rooms").transport(Network::new().node("a")).start().await?;
    /// // a caller that is not ready itself gets no decision
    /// assert_eq!(muster.targets("room:42", ViewHash::UNSETTLED), Err(Flood));
    /// if let Ok(nodes) = muster.targets("room:42", muster.sender_hash()) {
    ///     assert!(nodes.is_empty());
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub fn targets(&self, group: impl AsRef<[u8]>, sender: ViewHash) -> Result<Targets, Flood> {
        self.running().ok_or(Flood)?.node.targets(group.as_ref(), sender)
    }

    /// Whether this node would decide for a caller of that view.
    pub fn can_decide(&self, sender: ViewHash) -> bool {
        self.running().is_some_and(|driver| driver.node.can_decide(sender))
    }

    /// The nodes that this node's table names as holders of `group`, whether or not the table can be trusted now:
    /// for inspection. Complete only on the group's router.
    pub fn occupancy(&self, group: impl AsRef<[u8]>) -> Vec<NodeId> {
        self.running().map_or_else(Vec::new, |driver| driver.node.occupancy(group.as_ref()))
    }

    /// The ring of the committed view.
    ///
    /// ```
    /// # use muster_router::{Muster};
    /// # use muster_router::transport::memory::Network;
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let muster = Muster::builder("rooms").transport(Network::new().node("a")).start().await?;
    /// let ring = muster.ring();
    /// let owners = ring.owners("user:7", 2);
    /// assert_eq!(owners.first().copied(), ring.router_for("user:7"));
    /// # Ok(())
    /// # }
    /// ```
    pub fn ring(&self) -> Arc<Ring> {
        let empty = || Ring::of([], self.driver().config.ring());
        Arc::new(self.read(|published| published.ring.clone()).unwrap_or_else(empty))
    }
}

// State.
impl Muster {
    /// The scope's name.
    pub fn scope(&self) -> &str {
        &self.driver().scope
    }

    /// This node, in this life.
    pub fn peer(&self) -> &Peer {
        self.driver().node.me()
    }

    /// This node's name.
    pub fn node(&self) -> &NodeId {
        &self.peer().node
    }

    /// The committed view: the peers that this node counts on, itself included.
    pub fn members(&self) -> View {
        self.read(|published| published.view.clone()).unwrap_or_else(|| View::new([]))
    }

    /// The peers that the transport has connected, without this node.
    pub fn connected(&self) -> Vec<Peer> {
        self.read(|published| published.connected.iter().map(|c| c.peer.clone()).collect())
            .unwrap_or_default()
    }

    /// How sure this node is of its routing table.
    pub fn status(&self) -> Status {
        self.read(|published| published.status).unwrap_or(Status::Converging)
    }

    /// The hash of the committed view.
    pub fn view_hash(&self) -> ViewHash {
        self.read(|published| published.hash).unwrap_or(ViewHash::UNSETTLED)
    }

    /// What a caller tags a hop with: the view's hash while this node is `Ready`, else
    /// [`ViewHash::UNSETTLED`], for which no router decides.
    pub fn sender_hash(&self) -> ViewHash {
        self.read(Published::sender_hash).unwrap_or(ViewHash::UNSETTLED)
    }

    /// Status and view as they change. A receiver sees the latest; it may skip what was between. Do not keep a
    /// `borrow` of it while you call the library: nothing can change while it is borrowed.
    ///
    /// ```
    /// # use muster_router::{Muster, transport::memory::Network};
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let network = Network::new();
    /// # let a = Muster::builder("rooms").transport(network.node("a")).start().await?;
    /// # a.until_ready(std::time::Duration::from_secs(10)).await?;
    /// # let b = Muster::builder("rooms").transport(network.node("b")).start().await?;
    /// let mut changes = a.changes();
    /// while changes.borrow_and_update().view.len() < 2 {
    ///     changes.changed().await?;
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub fn changes(&self) -> watch::Receiver<ScopeState> {
        self.driver().state.subscribe()
    }

    /// Waits until this node is `Ready`. Cancel-safe.
    ///
    /// # Errors
    /// [`NotReady`] if that takes longer than `timeout`, or the scope is stopped.
    pub async fn until_ready(&self, timeout: Duration) -> Result<(), NotReady> {
        self.until(timeout, |state| state.status == Status::Ready).await
    }

    /// Waits for a state of your choice, for instance a view of three members that is ready. Cancel-safe.
    ///
    /// # Errors
    /// [`NotReady`] if that takes longer than `timeout`, or the scope is stopped.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use muster_router::{Muster, Status, transport::memory::Network};
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let network = Network::new();
    /// let a = Muster::builder("rooms").transport(network.node("a")).start().await?;
    /// let b = Muster::builder("rooms").transport(network.node("b")).start().await?;
    /// a.until(Duration::from_secs(5), |s| s.status == Status::Ready && s.view.len() == 2).await?;
    /// # Ok(())
    /// # }
    /// ```
    pub async fn until(
        &self,
        timeout: Duration,
        mut wanted: impl FnMut(&ScopeState) -> bool,
    ) -> Result<(), NotReady> {
        let mut changes = self.changes();
        let reached = self::timeout(timeout, async {
            loop {
                // a copy: the caller's code runs while nothing is borrowed
                let state = changes.borrow_and_update().clone();
                if state.stopped || wanted(&state) || changes.changed().await.is_err() {
                    return !state.stopped;
                }
            }
        })
        .await;
        if reached == Ok(true) {
            return Ok(());
        }
        Err(NotReady { status: self.status(), stopped: self.driver().is_stopped(), waited: timeout })
    }

    /// What happens to this scope on this node, from now on.
    ///
    /// ```
    /// # use muster_router::{Event, Muster};
    /// # use muster_router::transport::memory::Network;
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let muster = Muster::builder("rooms").transport(Network::new().node("a")).start().await?;
    /// let mut events = muster.events();
    /// let _inbox = muster.subscribe("room:42").await?;
    /// while let Some(event) = events.recv().await {
    ///     if let Event::Occupied(group) = event {
    ///         assert_eq!(group.as_bytes(), b"room:42");
    ///         break;
    ///     }
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub fn events(&self) -> Events {
        self.driver().events.subscribe()
    }

    /// The scope in numbers, for monitors.
    pub fn summary(&self) -> Summary {
        let driver = self.driver();
        let published = driver.node.published();
        let peers = |suspect: bool| {
            let wanted = published.connected.iter().filter(|c| c.suspect || !suspect);
            wanted.map(|c| c.peer.clone()).collect::<Vec<Peer>>()
        };
        let stopped = driver.is_stopped();
        let (broadcasts_open, broadcasts_served) = driver.node.in_flight();
        Summary {
            scope: driver.scope.clone(),
            node: self.peer().clone(),
            status: self.status(),
            view: self.members(),
            view_hash: self.view_hash(),
            connected: if stopped { Vec::new() } else { peers(false) },
            suspect: if stopped { Vec::new() } else { peers(true) },
            settled: published.settled,
            draining: published.draining,
            superseded: published.superseded,
            stopped,
            holds: driver.node.counts(),
            memberships: driver.registry.len(),
            joins_waiting: driver.joins.len(),
            calls_waiting: driver.calls.len(),
            broadcasts_open,
            broadcasts_served,
            tasks: driver.task_count(),
            violations: driver.node.violations(),
            counters: driver.stats.read(),
        }
    }

    /// Everything, for people.
    ///
    /// ```
    /// # use muster_router::{Muster};
    /// # use muster_router::transport::memory::Network;
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let muster = Muster::builder("rooms").transport(Network::new().node("a")).start().await?;
    /// println!("{}", muster.dump());
    /// # Ok(())
    /// # }
    /// ```
    pub fn dump(&self) -> Dump {
        let node = &self.driver().node;
        Dump {
            summary: self.summary(),
            claims: node.claims(),
            rows: node.rows(),
            routers: node.published().routers.to_vec(),
            drain_waiting_for: node.drain_waiting_for(),
        }
    }
}
