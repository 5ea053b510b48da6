//! A cluster of cache nodes and its network, moved one step at a time.

mod effects;
mod judge;
mod steps;
mod time;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::links::{End, Frame, Links};
use super::oracle::{Demand, Kind, Op, Oracle, Tally, What, class_of, tell};
use super::step::{Place, ReadKind, Step, WriteKind};
use crate::cache::node::{CacheEffect, CacheMessage, CacheNode, PartitionStatus, Shard, codec};
use crate::cache::operation::{Operation, Options, Outcome, ReadOp, Reply, WriteOp};
use crate::cache::replica::{CacheEvent, OwnerState, ReplicaMessage, Rules};
use crate::cache::{
    CacheConfig, CacheError, Epoch, PartitionId, ReadMode, Record, RecordPattern, Store, Term, Version,
    WriteMode,
};
use crate::ring::{Ring, RingConfig};
use crate::testing::oracle::Violation;
use crate::transport::Lane;
use crate::types::{Incarnation, NodeId, Peer};

/// How long a link may carry nothing before the transport gives it up.
const SUSPICION: Duration = Duration::from_millis(1500);
/// Messages under way at once: more is a flood.
const MAX_IN_FLIGHT: usize = 20_000;
/// Inputs of a node at one moment: more is a loop.
const MAX_AT_ONCE: u32 = 20_000;

/// What a cluster begins with.
#[derive(Clone, Debug)]
pub(super) struct Setup {
    pub(super) kind: Kind,
    pub(super) places: usize,
    /// How many of them start at once.
    pub(super) first: usize,
    pub(super) keys: u8,
    pub(super) sessions: u8,
    pub(super) shards: u32,
    pub(super) config: Arc<CacheConfig>,
    /// How long operations may take, in milliseconds.
    pub(super) patience: u64,
    /// How many bytes each record is longer than it needs to be.
    pub(super) padding: usize,
    /// The longest that a frame takes on a link that is not slow, in milliseconds.
    pub(super) delay: u64,
    /// The longest until a node knows of a change of a link, in milliseconds.
    pub(super) view_delay: u64,
    pub(super) rules: Rules,
    pub(super) seed: u64,
}

/// One place: a name, and the node that lives there now.
#[derive(Debug)]
struct Spot {
    id: NodeId,
    life: u64,
    running: bool,
    born: Duration,
    /// One for each shard; none while the cache is closed.
    nodes: Vec<CacheNode>,
    openings: u32,
    draining: bool,
    view: BTreeSet<Peer>,
    settled: bool,
    /// By ticket: which operation waits, and until when.
    waiting: BTreeMap<u64, (usize, Duration)>,
    /// Which partitions it serves, and in which epoch.
    serves: BTreeMap<u32, Epoch>,
    /// Of which partitions it has heard who else serves them.
    knows: BTreeSet<u32>,
    /// The most nodes that its view had in this life.
    most_seen: usize,
    inputs: (Duration, u32),
}

#[derive(Clone, Debug)]
enum Event {
    Connect(usize, usize),
    Up { at: usize, of: usize, session: u32 },
    Down { at: usize, of: usize, session: u32 },
    Suspect { from: usize, to: usize, session: u32 },
    Deliver { from: usize, to: usize, lane: usize, session: u32 },
    View { at: usize, life: u64 },
    Settle { at: usize, life: u64 },
    Leave { at: usize, life: u64 },
}

/// Nodes that share a cache, in a network of the caller's whims. Every step returns the first promise that it broke.
#[derive(Debug)]
pub(super) struct Cluster {
    setup: Setup,
    spots: Vec<Spot>,
    links: Links,
    events: BTreeMap<(Duration, u64), Event>,
    oracle: Oracle,
    now: Duration,
    order: u64,
    tickets: u64,
    trace: u64,
    /// How many crashes a run without splits still allows.
    budget: usize,
    /// How many inputs nodes have taken.
    inputs: u64,
    /// Partitions of which the operator has given something up.
    gave_up: BTreeSet<u32>,
    pub(super) healing: bool,
    log: Option<Vec<String>>,
}

type Outcome1 = Result<(), Violation>;

fn broken(promise: &'static str, what: String) -> Outcome1 {
    Err(Violation::new(promise, what))
}

const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

// Making one, and looking at it.
impl Cluster {
    pub(super) fn new(setup: Setup) -> Self {
        let spot = |place: usize| {
            NodeId::new(format!("n{place}")).ok().map(|id| Spot {
                id,
                life: 0,
                running: false,
                born: Duration::ZERO,
                nodes: Vec::new(),
                openings: 0,
                draining: false,
                view: BTreeSet::new(),
                settled: false,
                waiting: BTreeMap::new(),
                serves: BTreeMap::new(),
                knows: BTreeSet::new(),
                most_seen: 0,
                inputs: (Duration::ZERO, 0),
            })
        };
        let config = &setup.config;
        let oracle =
            Oracle::new(setup.kind, config.table.is_set(), config.partitions, usize::from(setup.sessions));
        Self {
            spots: (0..setup.places).filter_map(spot).collect(),
            links: Links::new(setup.places),
            events: BTreeMap::new(),
            oracle,
            now: Duration::from_secs(1000),
            order: 0,
            tickets: 0,
            trace: 0,
            budget: 0,
            inputs: 0,
            gave_up: BTreeSet::new(),
            healing: false,
            log: None,
            setup,
        }
    }

    /// Starts the first nodes and waits until they are one cluster.
    pub(super) fn boot(&mut self) -> Outcome1 {
        for place in 0..self.setup.first {
            self.start(place)?;
        }
        self.run_for(ms(3000))
    }

    /// Keeps a log of everything from now on.
    pub(super) fn keep_log(&mut self) {
        self.log = Some(Vec::new());
    }

    pub(super) fn log(&self) -> &[String] {
        self.log.as_deref().unwrap_or_default()
    }

    fn note(&mut self, text: impl FnOnce() -> String) {
        if let Some(log) = &mut self.log {
            let at = self.now.as_secs_f64();
            log.push(format!("{at:10.4} {}", text()));
        }
    }

    pub(super) fn setup(&self) -> &Setup {
        &self.setup
    }

    pub(super) fn oracle(&self) -> &Oracle {
        &self.oracle
    }

    pub(super) fn tally(&self) -> Tally {
        self.oracle.tally()
    }

    pub(super) fn trace(&self) -> u64 {
        self.trace
    }

    pub(super) fn inputs(&self) -> u64 {
        self.inputs
    }

    pub(super) fn now(&self) -> Duration {
        self.now
    }

    pub(super) fn len(&self) -> usize {
        self.spots.len()
    }

    pub(super) fn is_running(&self, place: usize) -> bool {
        self.spots[place].running
    }

    pub(super) fn is_open(&self, place: usize) -> bool {
        !self.spots[place].nodes.is_empty()
    }

    pub(super) fn is_draining(&self, place: usize) -> bool {
        self.spots[place].draining
    }

    pub(super) fn is_cut(&self, a: usize, b: usize) -> bool {
        let link = self.links.get(a, b).0;
        link.cut || link.blocked != [false; 2]
    }

    pub(super) fn waiting(&self) -> usize {
        self.spots.iter().map(|spot| spot.waiting.len()).sum()
    }

    fn peer(&self, place: usize) -> Peer {
        let spot = &self.spots[place];
        Peer::new(spot.id.clone(), Incarnation::new(spot.life).unwrap_or(Incarnation::MIN))
    }

    fn local(&self, place: usize) -> Duration {
        self.now.saturating_sub(self.spots[place].born)
    }

    fn partitions(&self) -> impl Iterator<Item = PartitionId> + use<> {
        PartitionId::all(self.setup.config.partitions)
    }

    fn node(&self, place: usize, partition: PartitionId) -> Option<&CacheNode> {
        self.spots[place].nodes.get((partition.get() % self.setup.shards) as usize)
    }

    pub(super) fn status(&self, place: usize, partition: PartitionId) -> Option<PartitionStatus> {
        self.node(place, partition).map(|node| node.status(partition))
    }

    pub(super) fn store(&self, place: usize, partition: PartitionId) -> Option<(&Store, bool)> {
        self.node(place, partition)?.store(partition)
    }

    /// A number that depends on the seed and these only, so that a step left out changes nothing else.
    fn draw(&self, what: u64, a: usize, b: usize, n: u64, most: u64) -> u64 {
        let mut bytes = [0; 32];
        for (at, number) in [what, a as u64, b as u64, n].into_iter().enumerate() {
            bytes[at * 8..][..8].copy_from_slice(&number.to_le_bytes());
        }
        xxh3_64_with_seed(&bytes, self.setup.seed) % (most + 1)
    }

    fn at(&mut self, when: Duration, event: Event) {
        self.order += 1;
        self.events.insert((when, self.order), event);
    }

    fn later(&mut self, millis: u64, event: Event) {
        self.at(self.now + ms(millis), event);
    }

    /// Who should keep a partition by the ring.
    fn wanted(&self, partition: PartitionId) -> Vec<usize> {
        let takes_part = |place: &usize| self.is_open(*place) && !self.spots[*place].draining;
        let places: Vec<usize> = (0..self.len()).filter(takes_part).collect();
        let ring = Ring::of(places.iter().map(|p| self.spots[*p].id.clone()), RingConfig::default());
        let key = partition.ring_key(&self.setup.config.name);
        let owners = ring.owners(key, self.setup.config.replicas);
        let place = |id: &NodeId| self.spots.iter().position(|spot| spot.id == *id);
        owners.into_iter().filter_map(place).collect()
    }

    /// What keeps a partition from having its full number of owners, as its owners say.
    pub(super) fn missing(&self, partition: PartitionId) -> Option<String> {
        let wanted = self.wanted(partition);
        let Some(first) = wanted.first() else { return Some("nobody takes part".into()) };
        let serving: Vec<usize> =
            (0..self.len()).filter(|p| self.status(*p, partition).is_some_and(|s| s.serving)).collect();
        if serving != [*first] {
            return Some(format!("served by {serving:?}, wanted {wanted:?}"));
        }
        let status = self.status(*first, partition)?;
        let owners: BTreeSet<&Peer> = status.owners.iter().collect();
        let peers: Vec<Peer> = wanted.iter().map(|place| self.peer(*place)).collect();
        if owners != peers.iter().collect() || status.owners.len() != peers.len() {
            return Some(format!("owners {:?}, wanted {peers:?}", status.owners));
        }
        let active = |place: &usize| {
            let owner = self.status(*place, partition);
            owner.is_some_and(|s| s.state == OwnerState::Active && s.epoch == status.epoch)
        };
        wanted.iter().find(|p| !active(p)).map(|place| {
            format!(
                "n{place} of {wanted:?} is not active in {:?}: {:?}",
                status.epoch,
                self.status(*place, partition)
            )
        })
    }

    fn views_agree(&self) -> bool {
        let running: BTreeSet<Peer> =
            (0..self.len()).filter(|p| self.is_running(*p)).map(|p| self.peer(p)).collect();
        self.spots.iter().all(|spot| !spot.running || spot.view == running)
    }

    /// Every partition has its full number of active owners.
    pub(super) fn is_whole(&self) -> bool {
        self.views_agree() && self.partitions().all(|partition| self.missing(partition).is_none())
    }

    /// The first partition that is not as it should be, in words.
    pub(super) fn unwhole(&self) -> String {
        let missing =
            self.partitions().find_map(|p| self.missing(p).map(|why| format!("partition {p}: {why}")));
        missing
            .unwrap_or_else(|| format!("views: {:?}", self.spots.iter().map(|s| &s.view).collect::<Vec<_>>()))
    }

    /// How the nodes stand.
    pub(super) fn describe(&self) -> String {
        let mut text = format!("at {:.4}, {} in flight\n", self.now.as_secs_f64(), self.links.in_flight());
        for (place, spot) in self.spots.iter().enumerate() {
            let state = match (spot.running, spot.nodes.is_empty(), spot.draining) {
                (false, ..) => "dead",
                (_, true, _) => "closed",
                (.., true) => "draining",
                _ => "open",
            };
            let (view, settled) = (&spot.view, spot.settled);
            text.push_str(&format!("n{place}#{} {state} settled {settled}, view {view:?}\n", spot.life));
            for partition in self.partitions() {
                let Some(status) = self.status(place, partition) else { continue };
                let store = self.store(place, partition);
                let PartitionStatus { state, serving, epoch, owners, wanted, lag, .. } = &status;
                text.push_str(&format!(
                    "  partition {partition}: {state:?}{}, epoch {epoch:?}, owners {owners:?}, wanted {wanted:?}, lag {lag:?}, {:?}\n",
                    if *serving { " SERVING" } else { "" },
                    store.map(|(store, active)| {
                        let tombstones = (store.tombstones(), store.purged_through());
                        (active, store.applied(), store.digest(), tombstones)
                    })
                ));
            }
        }
        text
    }
}
