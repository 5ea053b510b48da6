//! One region: its network, its nodes, and on each the members and callers that live there.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytes::Bytes;
use muster_router::transport::link::LinkConfig;
use muster_router::transport::memory::Network;
use muster_router::{Membership, Message, Muster, NodeId, ScopeState, Status};
use parking_lot::Mutex;
use tokio::sync::RwLock;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};

use super::ledger::{Ledger, Member};
use super::node::{Counts, Node};
use super::wide::Wide;
use super::{Broken, Failure};

/// What all parts of a run share.
#[derive(Clone)]
pub(crate) struct World {
    pub(crate) ledger: Arc<Ledger>,
    pub(crate) wide: Wide,
    pub(crate) counts: Arc<Counts>,
    pub(crate) broken: Broken,
    pub(crate) groups: u64,
    pub(crate) members: u64,
    /// No more broadcasts begin.
    pub(crate) quiet: Arc<AtomicBool>,
}

impl World {
    fn group(&self, random: &mut Random) -> String {
        format!("room:{}", random.below(self.groups))
    }
}

/// Numbers that look random, from a seed.
pub(crate) struct Random(pub u64);

impl Random {
    pub(crate) fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % limit.max(1)
    }
}

/// How long a link is cut: everybody talks on meanwhile.
const CUT: Duration = Duration::from_millis(300);
/// How long it is waited for, when it is. Far longer, so that a cut takes nobody down, also on a busy machine.
const GRACE: Duration = Duration::from_secs(2);
/// Longer than anything takes.
const PATIENCE: Duration = Duration::from_secs(60);

pub(crate) struct Site {
    pub(crate) index: usize,
    name: &'static str,
    network: Network,
    seeds: Vec<NodeId>,
    world: World,
    nodes: BTreeMap<NodeId, Resident>,
    started: u64,
    /// Held by a cut: what a suspect link keeps for a member is due only if that stays until it has come.
    staying: Arc<RwLock<()>>,
}

/// A node with those who live on it.
struct Resident {
    node: Arc<Node>,
    /// Callers, and members that come and go.
    busy: JoinSet<()>,
    members: Vec<Guest>,
    passing: Passing,
}

type Guest = (Membership, Arc<Member>);
/// The member that comes and goes; here, so that it does not leave before the ledger knows.
type Passing = Arc<Mutex<Option<Guest>>>;

impl Site {
    pub(crate) fn new(index: usize, name: &'static str, seeds: Vec<NodeId>, world: World) -> Self {
        // a machine that is busy is no reason to give a node up
        let link = LinkConfig {
            ping_interval: None,
            reconnect_grace: GRACE,
            ping_timeout: PATIENCE,
            stall_timeout: PATIENCE,
            ..LinkConfig::default()
        };
        let network = Network::builder().link(link).seed(index as u64).build();
        let staying = Arc::default();
        Self { index, name, network, seeds, world, nodes: BTreeMap::new(), started: 0, staying }
    }

    pub(crate) fn nodes(&self) -> Vec<NodeId> {
        self.nodes.keys().cloned().collect()
    }

    /// The node that its region takes for its gateway.
    pub(crate) fn gateway(&self) -> Option<NodeId> {
        self.nodes.values().find_map(|resident| resident.node.gateway())
    }

    /// Starts a node, and on it members and callers.
    pub(crate) async fn start(&mut self, name: &NodeId) -> Result<(), Failure> {
        let transport = self.network.node(name.as_str());
        let muster = Muster::builder(self.name).transport(transport).start().await?;
        let world = self.world.clone();
        let (wide, counts) = (world.wide.clone(), world.counts.clone());
        let node = Node::start(muster, wide, self.seeds.clone(), counts, world.broken).await?;
        self.started += 1;
        let mut random = Random((self.index as u64) << 32 | self.started);
        let mut members = Vec::new();
        for _ in 0..world.members {
            let group = world.group(&mut random);
            members.push(join(&world, self.index, &node, &group).await?);
        }
        let mut busy = JoinSet::new();
        let passing = Passing::default();
        busy.spawn(come_and_go(
            world.clone(),
            self.index,
            node.clone(),
            Arc::clone(&passing),
            Arc::clone(&self.staying),
            random.below(999),
        ));
        for _ in 0..2 {
            busy.spawn(call(world.clone(), self.index, node.clone(), random.below(9999)));
        }
        self.nodes.insert(name.clone(), Resident { node, busy, members, passing });
        Ok(())
    }

    /// As `kill -9` would: nothing of the node does anything any more.
    pub(crate) async fn crash(&mut self, name: &NodeId) {
        let Some(mut resident) = self.nodes.remove(name) else { return };
        resident.busy.shutdown().await;
        self.depart(&resident);
        resident.node.stop().await;
        self.network.crash(name.as_str());
        resident.node.muster.shutdown().await;
    }

    /// In order: the node's routing goes to others first.
    pub(crate) async fn leave(&mut self, name: &NodeId) -> Result<(), Failure> {
        let Some(mut resident) = self.nodes.remove(name) else { return Ok(()) };
        resident.node.muster.drain(Duration::from_secs(30)).await?;
        resident.busy.shutdown().await;
        self.depart(&resident);
        resident.node.stop().await;
        resident.node.muster.shutdown().await;
        Ok(())
    }

    /// Cuts the link of two nodes that live on, and heals it before either is given up. What the one had for the other
    /// waits in the link; receipts do not wait for it.
    pub(crate) async fn cut(&self, a: &NodeId, b: &NodeId) -> Result<(), Failure> {
        let (Some(here), Some(there)) = (self.nodes.get(a), self.nodes.get(b)) else { return Ok(()) };
        let staying = self.staying.write().await;
        self.network.cut(a.as_str(), b.as_str());
        sleep(CUT).await;
        self.network.heal(a.as_str(), b.as_str());
        let deadline = Instant::now() + PATIENCE;
        for (from, to) in [(here, b), (there, a)] {
            let muster = &from.node.muster;
            while muster.summary().suspect.iter().any(|peer| peer.node == *to) {
                if Instant::now() > deadline {
                    return Err(format!("{} and {to} do not come together again", muster.node()).into());
                }
                sleep(Duration::from_millis(5)).await;
            }
            // what waited in the link goes before this, and this is waited for
            muster.send_to_node(to.to_string(), "\0after-the-cut", Bytes::new()).await?;
        }
        drop(staying);
        Ok(())
    }

    fn depart(&self, resident: &Resident) {
        for (_, member) in resident.members.iter().chain(&*resident.passing.lock()) {
            self.world.ledger.leaves(member);
        }
    }

    /// Waits until everybody who is busy has heard that it is enough.
    pub(crate) async fn quiet(&mut self) {
        for resident in self.nodes.values_mut() {
            while resident.busy.join_next().await.is_some() {}
        }
    }

    /// Waits until the nodes that are left agree that this one has gone.
    pub(crate) async fn settled_without(&self, gone: &NodeId) -> Result<(), Failure> {
        for resident in self.nodes.values() {
            let settled = |s: &ScopeState| s.status == Status::Ready && s.view.peer_of(gone).is_none();
            resident.node.muster.until(PATIENCE, settled).await?;
        }
        Ok(())
    }

    pub(crate) async fn end(&mut self) {
        for (_, resident) in std::mem::take(&mut self.nodes) {
            resident.node.stop().await;
            resident.node.muster.shutdown().await;
        }
    }
}

async fn join(world: &World, region: usize, node: &Node, group: &str) -> Result<Guest, Failure> {
    let member = world.ledger.member(region, group);
    let mine = member.clone();
    let hear = move |message: &Message| {
        if let Ok(number) = message.payload().as_ref().try_into() {
            mine.got(u64::from_le_bytes(number));
        }
    };
    let membership = node.muster.join_fn(group.to_owned(), hear).await?;
    world.ledger.joined(&member);
    Ok((membership, member))
}

/// A member that joins a group, stays for a little, and leaves for the next.
async fn come_and_go(
    world: World,
    region: usize,
    node: Arc<Node>,
    passing: Passing,
    staying: Arc<RwLock<()>>,
    seed: u64,
) {
    let mut random = Random(seed);
    while !world.quiet.load(Ordering::Relaxed) {
        let group = world.group(&mut random);
        // a node that drains or stops takes nobody in
        let Ok(guest) = join(&world, region, &node, &group).await else { return };
        *passing.lock() = Some(guest);
        sleep(Duration::from_millis(5 + random.below(20))).await;
        let _no_link_is_cut = staying.read().await;
        let gone = passing.lock().take();
        if let Some((membership, member)) = gone {
            world.ledger.leaves(&member);
            membership.leave();
        }
    }
}

/// Broadcasts, one after the other.
async fn call(world: World, region: usize, node: Arc<Node>, seed: u64) {
    let mut random = Random(seed);
    while !world.quiet.load(Ordering::Relaxed) {
        let group = world.group(&mut random);
        let cast = world.ledger.begin(region, &group);
        let payload = Bytes::copy_from_slice(&cast.to_le_bytes());
        if node.broadcast(&group, payload).await.is_ok() {
            world.ledger.end(cast);
        }
        sleep(Duration::from_millis(1 + random.below(4))).await;
    }
}
