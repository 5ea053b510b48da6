//! The nodes of the chat, all in this process: starting, stopping, crashing and looking at them.
//!
//! The only module that names the library's types; the others take them from here.

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use serde::Serialize;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, mpsc, watch};

use muster_router::transport::Transport;
use muster_router::transport::memory::Network;
pub(crate) use muster_router::{
    BroadcastId, Decision, Delivered, Membership, Message, Muster, NodeId, Receipt, Route, ScopeState,
    Status, Subscriber,
};

use super::Failure;
use super::hub::Hubs;

/// How long a node that is being stopped waits for its people to move to another one.
const MOVE_TIME: Duration = Duration::from_secs(3);
/// How long the rest of an orderly stop may take.
const DRAIN_TIME: Duration = Duration::from_secs(3);
/// How long a started node waits for the others to agree with it before it opens its door.
const READY_TIME: Duration = Duration::from_secs(10);

/// What a node tells its sessions about its own end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Serving.
    Open,
    /// About to stop: move to another node, this one still serves.
    Going,
    /// Stopped in order: what is queued is written, then the socket is closed.
    Closed,
    /// Crashed: the socket is dropped as it is.
    Crashed,
}

/// How to stop a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stop {
    /// People move first, then the node drains and leaves the cluster.
    Orderly,
    /// Everything is gone at once, as in a power cut.
    Crash,
}

/// One running node.
pub(crate) struct Node {
    pub(crate) name: Arc<str>,
    pub(crate) muster: Muster,
    pub(crate) hubs: Hubs,
    pub(crate) phase: watch::Sender<Phase>,
    sessions: AtomicUsize,
    session_left: Notify,
}

/// Counts a session of a node for as long as it lives.
pub(crate) struct SessionGuard(Arc<Node>);

impl Drop for SessionGuard {
    fn drop(&mut self) {
        self.0.sessions.fetch_sub(1, Ordering::SeqCst);
        self.0.session_left.notify_waiters();
    }
}

impl Node {
    pub(crate) fn enter(self: &Arc<Self>) -> SessionGuard {
        self.sessions.fetch_add(1, Ordering::SeqCst);
        SessionGuard(self.clone())
    }

    async fn until_empty(&self) {
        loop {
            let left = self.session_left.notified();
            tokio::pin!(left);
            // Registered before the count is read: the other way round, the last one could leave in between.
            left.as_mut().enable();
            if self.sessions.load(Ordering::SeqCst) == 0 {
                return;
            }
            left.await;
        }
    }

    /// People first, then the routing, then the network.
    async fn leave_in_order(&self) {
        self.phase.send_replace(Phase::Going);
        // People who do not move in time are cut off, and connect elsewhere then.
        let _moved = tokio::time::timeout(MOVE_TIME, self.until_empty()).await;
        if let Err(waiting) = self.muster.drain(DRAIN_TIME).await {
            eprintln!("{} stops without having drained: {waiting}", self.name);
        }
        self.phase.send_replace(Phase::Closed);
        let _flushed = tokio::time::timeout(MOVE_TIME, self.until_empty()).await;
        self.muster.shutdown().await;
    }
}

enum Life {
    Down,
    Starting,
    Up(Arc<Node>),
    Stopping(Arc<Node>),
}

/// The place of a node: its name and port outlive its lives.
struct Slot {
    name: Arc<str>,
    address: SocketAddr,
    life: Mutex<Life>,
    /// Where accepted connections go while the node runs.
    door: Arc<Mutex<Option<mpsc::Sender<TcpStream>>>>,
}

/// What connects the nodes.
pub(crate) enum Net {
    Memory(Network),
    #[cfg(feature = "tcp")]
    Tcp(super::tcp::Mesh),
    #[cfg(feature = "nats")]
    Nats(Arc<super::nats::Nats>),
}

impl Net {
    fn transport(&self, name: &str) -> Result<Arc<dyn Transport>, Failure> {
        match self {
            Net::Memory(network) => Ok(Arc::new(network.node(name))),
            #[cfg(feature = "tcp")]
            Net::Tcp(mesh) => mesh.transport(name),
            #[cfg(feature = "nats")]
            Net::Nats(nats) => nats.transport(name),
        }
    }
}

/// All nodes of this process and the network between them.
pub(crate) struct Cluster {
    network: Net,
    slots: Vec<Slot>,
    accepting: Mutex<Vec<tokio::task::JoinHandle<()>>>,
}

impl Drop for Cluster {
    fn drop(&mut self) {
        for task in self.accepting.lock().drain(..) {
            task.abort();
        }
    }
}

/// Where the ports come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ports {
    /// This one and the following; a taken one is replaced by any free one.
    From(u16),
    /// Any free ones.
    Any,
    /// This one and no other.
    #[cfg(feature = "tcp")]
    Just(u16),
}

impl Cluster {
    /// Starts `count` nodes, n1, n2, …, on a memory network, and returns when all are ready.
    pub(crate) async fn start(count: usize, ports: Ports) -> Result<Arc<Self>, Failure> {
        Self::start_on(Net::Memory(Network::new()), numbered(count), ports).await
    }

    /// The same over TCP.
    #[cfg(feature = "tcp")]
    pub(crate) async fn start_tcp(count: usize, ports: Ports) -> Result<Arc<Self>, Failure> {
        let mesh = super::tcp::Mesh::local(numbered(count))?;
        Self::start_on(Net::Tcp(mesh), numbered(count), ports).await
    }

    /// The same over NATS.
    #[cfg(feature = "nats")]
    pub(crate) async fn start_nats(
        count: usize,
        ports: Ports,
        url: Option<String>,
    ) -> Result<Arc<Self>, Failure> {
        let nats = Arc::new(super::nats::Nats::start(url)?);
        Self::start_on(Net::Nats(nats), numbered(count), ports).await
    }

    /// Kills and starts again what all nodes share: the NATS server, if it is ours.
    pub(crate) async fn restart_network(&self) -> Result<(), Failure> {
        match &self.network {
            Net::Memory(_) => Ok(()),
            #[cfg(feature = "tcp")]
            Net::Tcp(_) => Ok(()),
            #[cfg(feature = "nats")]
            Net::Nats(nats) => {
                if nats.restart_server().await? {
                    println!("the nats-server was killed and started again with messages in hand");
                }
                Ok(())
            }
        }
    }

    /// Starts the nodes of these names and returns when all are ready.
    pub(crate) async fn start_on(
        network: Net,
        names: Vec<Arc<str>>,
        ports: Ports,
    ) -> Result<Arc<Self>, Failure> {
        let count = names.len();
        let mut slots = Vec::with_capacity(count);
        let mut accepting = Vec::with_capacity(count);
        for (index, name) in names.into_iter().enumerate() {
            let listener = listen(ports, index).await?;
            let door = Arc::new(Mutex::new(None));
            slots.push(Slot {
                name,
                address: listener.local_addr()?,
                life: Mutex::new(Life::Down),
                door: door.clone(),
            });
            accepting.push(tokio::spawn(accept(listener, door)));
        }
        let cluster = Arc::new(Self { network, slots, accepting: Mutex::new(accepting) });
        futures_util::future::try_join_all((0..count).map(|index| cluster.start_slot(index))).await?;
        if count > 1 {
            // One alone may have others elsewhere.
            cluster.until_all_ready().await?;
        }
        Ok(cluster)
    }

    /// The names and addresses of all nodes, running or not.
    pub(crate) fn addresses(&self) -> Vec<(Arc<str>, SocketAddr)> {
        self.slots.iter().map(|slot| (slot.name.clone(), slot.address)).collect()
    }

    /// Starts a stopped node; returns when it is ready.
    pub(crate) async fn start_node(self: &Arc<Self>, name: &str) -> Result<(), Failure> {
        let index = self.index(name)?;
        self.start_slot(index).await
    }

    async fn start_slot(self: &Arc<Self>, index: usize) -> Result<(), Failure> {
        let slot = &self.slots[index];
        {
            let mut life = slot.life.lock();
            match &*life {
                Life::Down => *life = Life::Starting,
                Life::Starting => return Err(format!("{} is starting already", slot.name).into()),
                Life::Up(_) => return Err(format!("{} runs already", slot.name).into()),
                Life::Stopping(_) => return Err(format!("{} is still stopping", slot.name).into()),
            }
        }
        match self.bring_up(slot).await {
            Ok(node) => {
                *slot.life.lock() = Life::Up(node);
                Ok(())
            }
            Err(error) => {
                *slot.life.lock() = Life::Down;
                Err(error)
            }
        }
    }

    async fn bring_up(self: &Arc<Self>, slot: &Slot) -> Result<Arc<Node>, Failure> {
        let muster = Muster::builder("chat").transport(self.network.transport(&slot.name)?).start().await?;
        muster.until_ready(READY_TIME).await?;
        let phase = watch::Sender::new(Phase::Open);
        let node = Arc::new(Node {
            name: slot.name.clone(),
            hubs: Hubs::new(slot.name.clone(), muster.clone(), phase.subscribe()),
            muster,
            phase,
            sessions: AtomicUsize::new(0),
            session_left: Notify::new(),
        });
        // The door opens last: whoever gets in finds a node that serves.
        let streams = super::server::serve(slot.address, node.clone(), Arc::downgrade(self));
        *slot.door.lock() = Some(streams);
        Ok(node)
    }

    /// The first node, if it runs.
    #[cfg(feature = "tcp")]
    pub(crate) fn first(&self) -> Option<Arc<Node>> {
        self.running().into_iter().next()
    }

    /// Stops the node of a process that has no other.
    #[cfg(feature = "tcp")]
    pub(crate) async fn stop_orderly(&self, node: &Node) {
        if let Ok(slot) = self.slot(&node.name) {
            *slot.door.lock() = None;
        }
        node.leave_in_order().await;
    }

    /// Stops a running node. The last one stays: nothing would be left to start it again from.
    pub(crate) async fn stop_node(&self, name: &str, stop: Stop) -> Result<(), Failure> {
        let slot = self.slot(name)?;
        let node = {
            let others = self.slots.iter().filter(|other| other.name != slot.name);
            let alone = !others.clone().any(|other| matches!(&*other.life.lock(), Life::Up(_)));
            let mut life = slot.life.lock();
            match &*life {
                Life::Up(_) if alone => {
                    return Err(format!("{name} is the last node that runs; it stays").into());
                }
                Life::Up(node) => {
                    let node = node.clone();
                    *life = Life::Stopping(node.clone());
                    node
                }
                Life::Down | Life::Starting | Life::Stopping(_) => {
                    return Err(format!("{name} does not run").into());
                }
            }
        };
        // No new connections; those that are here hear about it below.
        *slot.door.lock() = None;
        match stop {
            Stop::Orderly => node.leave_in_order().await,
            Stop::Crash => {
                self.crash(&slot.name).await;
                node.phase.send_replace(Phase::Crashed);
                node.muster.shutdown().await;
            }
        }
        *slot.life.lock() = Life::Down;
        Ok(())
    }

    /// Over TCP the node's own end, without a drain, is all the crash there is within one process.
    async fn crash(&self, name: &str) {
        match &self.network {
            Net::Memory(network) => {
                network.crash(name);
            }
            #[cfg(feature = "tcp")]
            Net::Tcp(_) => {}
            #[cfg(feature = "nats")]
            Net::Nats(nats) => nats.crash(name).await,
        }
    }

    /// Stops everything, for the end of the program.
    pub(crate) async fn shutdown(&self) {
        for slot in &self.slots {
            *slot.door.lock() = None;
            let life = std::mem::replace(&mut *slot.life.lock(), Life::Down);
            if let Life::Up(node) | Life::Stopping(node) = life {
                node.phase.send_replace(Phase::Closed);
                node.muster.shutdown().await;
            }
        }
    }

    /// Returns when every running node is ready and sees all others that run.
    pub(crate) async fn until_all_ready(&self) -> Result<(), Failure> {
        let running = self.running();
        for node in &running {
            let whole =
                |state: &ScopeState| state.status == Status::Ready && state.view.len() == running.len();
            node.muster.until(READY_TIME, whole).await?;
        }
        Ok(())
    }

    fn running(&self) -> Vec<Arc<Node>> {
        let up = |slot: &Slot| match &*slot.life.lock() {
            Life::Up(node) | Life::Stopping(node) => Some(node.clone()),
            Life::Down | Life::Starting => None,
        };
        self.slots.iter().filter_map(up).collect()
    }

    fn slot(&self, name: &str) -> Result<&Slot, Failure> {
        Ok(&self.slots[self.index(name)?])
    }

    fn index(&self, name: &str) -> Result<usize, Failure> {
        self.slots.iter().position(|slot| &*slot.name == name).ok_or_else(|| {
            let names: Vec<_> = self.slots.iter().map(|slot| &*slot.name).collect();
            format!("there is no node {name:?}; the nodes are {}", names.join(", ")).into()
        })
    }
}

fn numbered(count: usize) -> Vec<Arc<str>> {
    (1..=count).map(|number| format!("n{number}").into()).collect()
}

async fn listen(ports: Ports, index: usize) -> Result<TcpListener, Failure> {
    #[cfg(feature = "tcp")]
    if let Ports::Just(port) = ports {
        return Ok(TcpListener::bind((Ipv4Addr::LOCALHOST, port)).await?);
    }
    if let Ports::From(base) = ports {
        let wanted = base.saturating_add(u16::try_from(index).unwrap_or(u16::MAX));
        if let Ok(listener) = TcpListener::bind((Ipv4Addr::LOCALHOST, wanted)).await {
            return Ok(listener);
        }
    }
    Ok(TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?)
}

/// Keeps the port over all lives of its node, so that nobody takes it meanwhile; while the node is down,
/// whoever connects is hung up on at once.
async fn accept(listener: TcpListener, door: Arc<Mutex<Option<mpsc::Sender<TcpStream>>>>) {
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                let streams = door.lock().clone();
                if let Some(streams) = streams {
                    let _too_many = streams.try_send(stream);
                }
            }
            // Out of descriptors or the like: the next try may do.
            Err(_) => tokio::time::sleep(Duration::from_millis(50)).await,
        }
    }
}

/// What the live panel shows of one node.
#[derive(Debug, Serialize, PartialEq, Clone)]
pub(crate) struct NodePicture {
    name: Arc<str>,
    port: u16,
    state: &'static str,
    status: String,
    view: Vec<String>,
    sessions: usize,
    members: usize,
}

/// What the live panel shows of the cluster, and of one room in it.
#[derive(Debug, Serialize, PartialEq, Clone)]
pub(crate) struct Picture {
    nodes: Vec<NodePicture>,
    room: Option<RoomPicture>,
}

#[derive(Debug, Serialize, PartialEq, Clone)]
struct RoomPicture {
    name: String,
    /// Who routes it, as the asking node sees it; `None` while it floods.
    router: Option<String>,
    /// Members of the room by node, for each node that holds it.
    holders: BTreeMap<Arc<str>, usize>,
    /// What the router's table says, itself not included.
    table: Vec<String>,
}

impl Cluster {
    /// The cluster as it is now; `room` as seen from node `from`.
    pub(crate) fn picture(&self, from: &Node, room: Option<&str>) -> Picture {
        let group = room.map(super::wire::room_group);
        let nodes = self.slots.iter().map(|slot| node_picture(slot, group.as_deref())).collect();
        Picture { nodes, room: room.map(|room| self.room_picture(from, room)) }
    }

    fn room_picture(&self, from: &Node, room: &str) -> RoomPicture {
        let group = super::wire::room_group(room);
        let router = match from.muster.router(&group) {
            Route::Router(node) => Some(node.to_string()),
            Route::Flood(_) => None,
        };
        let running = self.running();
        let holders = running
            .iter()
            .map(|node| (node.name.clone(), node.muster.local_member_count(&group)))
            .filter(|(_, members)| *members > 0)
            .collect();
        let table = running
            .iter()
            .find(|node| Some(&*node.name) == router.as_deref())
            .map(|node| node.muster.occupancy(&group).iter().map(ToString::to_string).collect())
            .unwrap_or_default();
        RoomPicture { name: room.to_owned(), router, holders, table }
    }
}

fn node_picture(slot: &Slot, group: Option<&str>) -> NodePicture {
    let (state, node) = match &*slot.life.lock() {
        Life::Down => ("down", None),
        Life::Starting => ("starting", None),
        Life::Up(node) => ("up", Some(node.clone())),
        Life::Stopping(node) => ("stopping", Some(node.clone())),
    };
    let mut picture = NodePicture {
        name: slot.name.clone(),
        port: slot.address.port(),
        state,
        status: String::new(),
        view: Vec::new(),
        sessions: 0,
        members: 0,
    };
    if let Some(node) = node {
        picture.status = format!("{:?}", node.muster.status());
        picture.view = node.muster.members().peers().map(|peer| peer.node.to_string()).collect();
        picture.sessions = node.sessions.load(Ordering::SeqCst);
        picture.members = group.map_or(0, |group| node.muster.local_member_count(group));
    }
    picture
}
