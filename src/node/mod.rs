//! The decisions of one node: sans-IO, so that the code that ships is the code that is checked.
//!
//! A [`Node`] takes inputs (a peer came, a message arrived, time went by) together with the time, and says
//! through [`Node::poll_effect`] and [`Node::poll_transmit`] what is to be done. It reads no clock, draws no
//! random number, opens no socket and starts no task. Its methods take `&self`: the parts sit behind locks
//! of their own, so that a server calls it from many threads, while a simulator clones, compares and hashes
//! whole nodes.
//!
//! Locks are taken in this order: chores, coordinator, relay, a claim shard, an occupancy shard, outboxes,
//! effects. None is held while another of the same kind is taken, and none across a call into user code.

mod agreement;
mod chores;
mod claims;
mod coordinator;
mod digest;
mod effect;
mod hashing;
mod invariants;
mod members;
pub mod message;
mod occupancy;
mod outbox;
mod published;
mod rebalance;
pub mod relay;
mod rules;
mod settings;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::hash::{BuildHasher, Hasher};
use std::sync::Arc;

use crate::sync::{Cell, Counter, Lock};
use crate::transport::Lane;
use crate::types::{Group, NodeId, Peer};
use crate::view::ViewHash;

use chores::Chores;
use claims::{Admission, Asked, ClaimShard, Context};
use coordinator::{Consequences, Coordinator, Step};
use digest::Digest;
use effect::Effects;
use hashing::SeededState;
use message::{DataMessage, Message};
use occupancy::OccupancyShard;
use outbox::Outbox;
use relay::{Begun, LocalDelivery, NewCast, Relay, Wire, World};

pub use effect::{Effect, JoinRefused, JoinStart, NodeEvent, Outgoing, Ticket};
pub use members::{LocalMembers, MemberRef};
pub use published::{Connected, Flood, Published, Route, Status};
pub use rules::{Mutation, Rules};
pub use settings::Settings;

/// Time since the node's start, from a clock that only goes forward.
pub type Time = std::time::Duration;

/// The nodes that must hear a broadcast: each once, this node among them if it holds the group. May be empty.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Targets(Vec<NodeId>);

impl Targets {
    /// The nodes.
    pub fn as_slice(&self) -> &[NodeId] {
        &self.0
    }

    /// How many.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether nobody holds the group.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether this node is one of them.
    pub fn contains(&self, node: &NodeId) -> bool {
        self.0.contains(node)
    }

    /// The nodes, one by one.
    pub fn iter(&self) -> impl Iterator<Item = &NodeId> {
        self.0.iter()
    }
}

impl IntoIterator for Targets {
    type Item = NodeId;
    type IntoIter = std::vec::IntoIter<NodeId>;
    fn into_iter(self) -> Self::IntoIter {
        self.0.into_iter()
    }
}

/// How much a node holds, in numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Counts {
    /// Groups with members on this node.
    pub groups: usize,
    /// Members on this node, counted once a group.
    pub members: usize,
    /// Groups with a claim state, those without members included.
    pub claims: usize,
    /// Rows of other nodes in this node's table.
    pub rows: usize,
    /// Tombstones in this node's table.
    pub tombstones: usize,
}

/// One node's routing state and decisions. `M` is how a member is reached.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Node<M> {
    me: Peer,
    settings: Arc<Settings>,
    hasher: SeededState,
    versions: Counter,
    numbers: Counter,
    slots: Counter,
    published: Cell<Published>,
    chores: Lock<Chores>,
    coordinator: Lock<Coordinator>,
    claims: Box<[Lock<ClaimShard<M>>]>,
    occupancy: Box<[Lock<OccupancyShard>]>,
    relay: Lock<Relay>,
    outboxes: Lock<BTreeMap<NodeId, Outbox>>,
    effects: Lock<Effects>,
}

impl<M: Clone> World for Node<M> {
    fn published(&self) -> Arc<Published> {
        self.published.load()
    }

    fn with_published<R>(&self, look: impl FnOnce(&Published) -> R) -> R {
        Node::with_published(self, look)
    }

    fn target_peers(&self, group: &[u8], sender: ViewHash) -> Result<Vec<Peer>, Flood> {
        Node::target_peers(self, group, sender)
    }
}

// Getters: what is published, read without a lock, and single shards.
impl<M: Clone> Node<M> {
    /// A node that has just started: `Converging`, alone in its view, not settled.
    pub fn new(me: Peer, settings: Settings, now: Time) -> Self {
        let coordinator = Coordinator::new(me.clone(), &settings);
        let hasher = SeededState(settings.hash_seed);
        let count = settings.shards.max(1);
        Self {
            relay: Lock::new(Relay::new(me.clone(), &settings)),
            me,
            hasher,
            versions: Counter::new(),
            numbers: Counter::new(),
            slots: Counter::new(),
            published: Cell::new(coordinator.published().clone()),
            chores: Lock::new(Chores::new(&settings, now)),
            coordinator: Lock::new(coordinator),
            claims: (0..count).map(|_| Lock::new(ClaimShard::new(hasher))).collect(),
            occupancy: (0..count).map(|_| Lock::new(OccupancyShard::new(hasher, settings.rules))).collect(),
            outboxes: Lock::new(BTreeMap::new()),
            effects: Lock::new(Effects::default()),
            settings: Arc::new(settings),
        }
    }

    /// Who this node is.
    pub fn me(&self) -> &Peer {
        &self.me
    }

    /// The options that the node runs with.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// What everybody may read: one immutable value.
    pub fn published(&self) -> Arc<Published> {
        self.published.load()
    }

    /// Reads what is published, without touching its reference count.
    pub fn with_published<R>(&self, look: impl FnOnce(&Published) -> R) -> R {
        self.published.read(|published| look(published))
    }

    /// Where a caller sends a broadcast to this group.
    pub fn router(&self, group: &[u8]) -> Route {
        self.published.read(|published| match published.status {
            Status::Ready | Status::Converging => Route::Router(published.router(group).node.clone()),
            Status::Rebalancing => {
                Route::Flood(published.connected.iter().map(|c| c.peer.node.clone()).collect())
            }
        })
    }

    /// Whether this node would decide for a caller of that view.
    pub fn can_decide(&self, sender: ViewHash) -> bool {
        self.published.read(|published| self.may_decide(published, sender))
    }

    /// As the router of `group`: the nodes that hold it.
    ///
    /// # Errors
    /// [`Flood`] if this node is not `Ready`, the caller's view is another, the group is not routed here, or
    /// the view changed while the table was read.
    pub fn targets(&self, group: &[u8], sender: ViewHash) -> Result<Targets, Flood> {
        self.decide(group, sender, |peer| peer.node.clone()).map(Targets)
    }

    /// The same as [`Node::targets`], as peers.
    ///
    /// # Errors
    /// As [`Node::targets`].
    pub fn target_peers(&self, group: &[u8], sender: ViewHash) -> Result<Vec<Peer>, Flood> {
        self.decide(group, sender, Peer::clone)
    }

    fn may_decide(&self, published: &Published, sender: ViewHash) -> bool {
        let rules = self.settings.rules;
        (published.status == Status::Ready || rules.breaks(Mutation::UnreadyRouterDecides))
            && (published.hash == sender || rules.breaks(Mutation::NoHashCheck))
    }

    /// The check and the read are one decision: if what is published changes in between, it is no answer.
    fn decide<T>(&self, group: &[u8], sender: ViewHash, name: impl Fn(&Peer) -> T) -> Result<Vec<T>, Flood> {
        self.published.read(|before| {
            if !self.may_decide(before, sender) || *before.router(group) != self.me {
                return Err(Flood);
            }
            let shard = self.shard_index(group);
            let mut targets: Vec<T> = self.occupancy_at(shard).with(|shard| {
                shard.read(group).filter_map(|slot| before.by_slot(slot)).map(|c| name(&c.peer)).collect()
            });
            let holds = self.claims_at(shard).with(|shard| shard.holds(group));
            if holds && !self.settings.rules.breaks(Mutation::SelfLeftOut) {
                targets.push(name(&self.me));
            }
            let same = self.published.read(|after| Arc::ptr_eq(before, after));
            if same || self.settings.rules.breaks(Mutation::NoSecondLook) { Ok(targets) } else { Err(Flood) }
        })
    }

    /// The nodes that the table names for this group, this one included, without asking whether the table
    /// can be trusted: for inspection.
    pub fn occupancy(&self, group: &[u8]) -> Vec<NodeId> {
        let published = self.published.load();
        let mut nodes: Vec<NodeId> = self.occupancy_shard(group).with(|shard| {
            shard
                .read(group)
                .filter_map(|slot| published.by_slot(slot))
                .map(|c| c.peer.node.clone())
                .collect()
        });
        if self.holds(group) {
            nodes.push(self.me.node.clone());
        }
        nodes.sort();
        nodes
    }

    /// The members of this group on this node, as they are now.
    pub fn local_members(&self, group: &[u8]) -> LocalMembers<M> {
        self.claim_shard(group).with(|shard| shard.local_members(group))
    }

    /// Whether this node has members of this group.
    pub fn holds(&self, group: &[u8]) -> bool {
        self.claim_shard(group).with(|shard| shard.holds(group))
    }

    /// Whether this member of this group is registered here.
    pub fn is_local_member(&self, group: &[u8], number: u64) -> bool {
        self.claim_shard(group).with(|shard| shard.contains(group, number))
    }

    /// How much the node holds. Visits every shard, one at a time.
    pub fn counts(&self) -> Counts {
        let mut counts = Counts::default();
        for shard in &self.claims {
            let (groups, claims, members) = shard.with(|shard| shard.counts());
            counts.groups += groups;
            counts.claims += claims;
            counts.members += members;
        }
        for shard in &self.occupancy {
            let (rows, tombstones) = shard.with(|shard| shard.counts());
            counts.rows += rows;
            counts.tombstones += tombstones;
        }
        counts
    }

    /// Every group with a claim state: its name, the state's name, its number of members.
    pub fn claims(&self) -> Vec<(Group, &'static str, usize)> {
        let mut all: Vec<_> = self.claims.iter().flat_map(|shard| shard.with(|shard| shard.list())).collect();
        all.sort();
        all
    }

    /// Every row of the table: group, source, version, and whether it is present (or a tombstone). Rows of
    /// connections that are gone are left out; the sweep takes them away.
    pub fn rows(&self) -> Vec<(Group, Peer, u64, bool)> {
        let published = self.published.load();
        let mut all = Vec::new();
        for shard in &self.occupancy {
            shard.with(|shard| {
                all.extend(shard.list().filter_map(|(group, row)| {
                    let source = published.by_slot(row.slot)?;
                    Some((group.clone(), source.peer.clone(), row.version(), row.present()))
                }));
            });
        }
        all.sort();
        all
    }

    /// The version of what this node announces now: whatever it said up to that version was said before it
    /// committed to its view.
    pub fn announced(&self) -> u64 {
        self.coordinator.with(|coordinator| coordinator.announced())
    }

    /// Who has not yet taken over from this draining node; empty when the drain is done.
    pub fn drain_waiting_for(&self) -> Vec<NodeId> {
        self.coordinator.with(|coordinator| coordinator.drain_waiting_for())
    }

    /// Broadcasts of this node that are not settled everywhere, and broadcasts of others that it relays.
    pub fn in_flight(&self) -> (usize, usize) {
        self.relay.with(|relay| (relay.open(), relay.serving()))
    }

    /// Frames of peers that did not fit the contract.
    pub fn violations(&self) -> u64 {
        self.relay.with(|relay| relay.violations())
    }

    /// How many entries all queues, maps and tables of this node have together.
    pub fn footprint(&self) -> usize {
        let claims: usize = self.claims.iter().map(|s| s.with(|s| s.footprint())).sum();
        let rows: usize = self.occupancy.iter().map(|s| s.with(|s| s.len())).sum();
        let outboxes: usize = self.outboxes.with(|all| all.values().map(Outbox::footprint).sum());
        claims + rows + outboxes + self.relay.with(|relay| relay.footprint())
    }

    fn shard_index(&self, group: &[u8]) -> usize {
        let mut hasher = self.hasher.build_hasher();
        hasher.write(group);
        (hasher.finish() >> 32) as usize % self.claims.len().max(1)
    }

    fn claim_shard(&self, group: &[u8]) -> &Lock<ClaimShard<M>> {
        self.claims_at(self.shard_index(group))
    }

    fn occupancy_shard(&self, group: &[u8]) -> &Lock<OccupancyShard> {
        self.occupancy_at(self.shard_index(group))
    }

    #[allow(clippy::indexing_slicing, reason = "the index is a remainder of the number of shards")]
    fn claims_at(&self, shard: usize) -> &Lock<ClaimShard<M>> {
        &self.claims[shard]
    }

    #[allow(clippy::indexing_slicing, reason = "the index is a remainder of the number of shards")]
    fn occupancy_at(&self, shard: usize) -> &Lock<OccupancyShard> {
        &self.occupancy[shard]
    }
}

// Commands.
impl<M: Clone> Node<M> {
    /// A number for a new member, unique on this node.
    pub fn next_member_number(&self) -> u64 {
        self.numbers.next()
    }

    /// Registers a member, at once or after the group's router has been told.
    pub fn join(&self, group: Group, number: u64, handle: M, ticket: Ticket, now: Time) -> JoinStart<M> {
        self.join_with(group, number, handle, || ticket, now)
    }

    /// The same for a caller who makes a ticket only if the join has to wait. `ticket` is called at most once, and
    /// before an answer can come; it must not call this node.
    pub fn join_with(
        &self,
        group: Group,
        number: u64,
        handle: M,
        ticket: impl FnOnce() -> Ticket,
        now: Time,
    ) -> JoinStart<M> {
        let mut asked = Asked::default();
        let shard = self.claim_shard(group.as_bytes());
        let start = shard.with(|shard| {
            // read under the shard's lock: the old ring before the group is gathered, or the new one after
            let published = self.published.load();
            if published.superseded {
                return JoinStart::Refused(JoinRefused::Superseded);
            }
            if published.draining {
                return JoinStart::Refused(JoinRefused::Draining);
            }
            if !published.settled {
                return JoinStart::Unsettled(handle);
            }
            let ctx = self.context(&published, now);
            match shard.join(group, number, handle, ticket, &ctx, &mut asked) {
                Admission::Joined => JoinStart::Joined,
                Admission::AlreadyMember => JoinStart::AlreadyMember,
                Admission::Waiting => JoinStart::Waiting,
            }
        });
        self.carry_out(asked);
        self.debug_check();
        start
    }

    /// Forgets a join that waits, and gives its handle back; `None` if it is answered already.
    pub fn cancel_join(&self, group: &[u8], ticket: Ticket) -> Option<M> {
        self.claim_shard(group).with(|shard| shard.cancel(group, ticket))
    }

    /// Takes a member out of a group and gives its handle back; `None` if it is not in it.
    pub fn leave(&self, group: &[u8], number: u64, now: Time) -> Option<M> {
        let mut asked = Asked::default();
        let handle = self.claim_shard(group).with(|shard| {
            let published = self.published.load();
            shard.leave(group, number, &self.context(&published, now), &mut asked)
        });
        self.carry_out(asked);
        self.debug_check();
        handle
    }

    /// Begins a broadcast.
    pub fn broadcast(&self, cast: NewCast, wire: &mut impl Wire) -> Begun {
        self.begin(cast, wire).0
    }

    /// The same; whether there are effects now is said as well, since mostly there are none.
    pub(crate) fn begin(&self, cast: NewCast, wire: &mut impl Wire) -> (Begun, bool) {
        self.relay.with(|relay| (relay.broadcast(cast, self, wire), relay.effects() > 0))
    }

    /// Nobody waits for the receipt of this node's broadcast `seq` any more.
    pub fn abandon(&self, seq: u64) {
        self.relay.with(|relay| relay.abandon(seq));
    }

    /// Starts to drain: joins are refused and the ring's tokens go to others. It cannot be taken back.
    pub fn drain(&self, now: Time) {
        self.step(now, |coordinator, step| coordinator.drain(step));
    }
}

// Inputs.
impl<M: Clone> Node<M> {
    /// A peer is connected. When this returns, broadcasts of this node reach it.
    pub fn handle_peer_up(&self, peer: Peer, wire: &mut impl Wire, now: Time) {
        let earlier = self.coordinator.with(|c| c.peers.get(&peer.node).map(|record| record.peer.clone()));
        match earlier {
            Some(earlier) if earlier.incarnation >= peer.incarnation => return,
            Some(earlier) => self.handle_peer_down(&earlier, wire, now),
            None => {}
        }
        if peer.node == self.me.node {
            self.step(now, |coordinator, step| coordinator.supersede(&peer, step));
            return;
        }
        // before it is published: whoever reads that it is connected can send to it
        self.relay.with(|relay| relay.handle_peer_up(&peer, wire));
        let slot = u32::try_from(self.slots.next()).unwrap_or(u32::MAX);
        self.step(now, |coordinator, step| {
            // before anything can be routed to it
            self.outboxes.with(|all| all.insert(peer.node.clone(), Outbox::new(peer.clone(), slot)));
            coordinator.handle_peer_up(&peer, slot, step);
        });
    }

    /// A peer's link makes no progress; what is sent to it is kept for now.
    pub fn handle_peer_suspect(&self, peer: &Peer, wire: &mut impl Wire, now: Time) {
        self.step(now, |coordinator, step| coordinator.handle_suspect(peer, true, step));
        self.relay.with(|relay| relay.handle_peer_suspect(peer, wire));
    }

    /// A suspect peer's link is back and nothing was lost.
    pub fn handle_peer_resumed(&self, peer: &Peer, wire: &mut impl Wire, now: Time) {
        self.relay.with(|relay| relay.handle_peer_resumed(peer, wire));
        self.step(now, |coordinator, step| coordinator.handle_suspect(peer, false, step));
    }

    /// A peer is gone. Its rows, its agreement and what it is owed go with it.
    pub fn handle_peer_down(&self, peer: &Peer, wire: &mut impl Wire, now: Time) {
        self.step(now, |coordinator, step| {
            // what is published comes first: nobody reads `Ready` and then misses the rows
            coordinator.handle_peer_down(peer, step);
            self.outboxes.with(|all| {
                if all.get(&peer.node).is_some_and(|outbox| outbox.peer == *peer) {
                    all.remove(&peer.node);
                }
            });
        });
        self.relay.with(|relay| relay.handle_peer_down(peer, wire));
    }

    /// The transport has tried every address that it knows.
    pub fn handle_discovery_settled(&self, now: Time) {
        self.step(now, |coordinator, step| coordinator.settle(step));
    }

    /// A message of a connected peer; anybody else's is ignored.
    pub fn handle_message(&self, from: &Peer, message: Message, wire: &mut impl Wire, now: Time) {
        match message {
            Message::Leaving { round } => self.step(now, |c, step| c.handle_leaving(from, round, step)),
            Message::LeavingAck { round } => {
                self.step(now, |c, step| c.handle_leaving_ack(from, round, step));
            }
            Message::Announce { version, hash } => {
                self.step(now, |c, step| c.handle_agreement(from, hash, version, step));
            }
            Message::Heartbeat { version, hash, draining, digest } => self.step(now, |c, step| {
                if draining {
                    c.handle_draining(from, step);
                }
                c.handle_heartbeat(from, version, hash, Digest::from_buckets(&digest), step);
            }),
            Message::Draining => self.step(now, |c, step| c.handle_draining(from, step)),
            Message::Data { round, kind, index, last, groups } => {
                self.handle_data(from, rebalance::Chunk { round, kind, index, last, groups }, now);
            }
            Message::DataAck { round, chunks, complete } => {
                self.step(now, |c, step| c.handle_data_ack(from, round, chunks, complete, step));
            }
            Message::Claims { call, claims } => self.handle_claims(from, call, &claims, now),
            Message::ClaimsAck { calls } => self.handle_claims_ack(from, &calls, now),
            Message::Retract { version, groups } => self.handle_retract(from, version, &groups, now),
            Message::RetractAck { versions } => self.handle_retract_ack(from, &versions, now),
            Message::NotHeld { groups } => {
                if let Some(slot) = self.slot_of(from) {
                    for (group, version) in &groups {
                        self.write_row(group, slot, *version, false, now);
                    }
                }
            }
            Message::RepairRequest { hash, buckets } => self.handle_repair_request(from, hash, buckets),
            Message::Members { view } => self.step(now, |c, step| c.handle_members(from, &view, step)),
            Message::Superseded { by } => self.step(now, |c, step| c.supersede(&by, step)),
            Message::Progress(progress) => {
                self.relay.with(|relay| relay.handle_progress(from, progress, wire));
            }
        }
    }

    /// Time has gone by: repeat, expire, flush, beat. Cheap when nothing is due.
    pub fn handle_timeout(&self, wire: &mut impl Wire, now: Time) {
        let settings = &self.settings;
        let (flush, beat, sweep, alone) = self.chores.with(|chores| {
            let sweep = chores::due(&mut chores.sweep_at, settings.sweep_interval, now);
            let beat = chores::due(&mut chores.beat_at, settings.heartbeat_interval, now);
            if sweep {
                chores.sweep_again();
            }
            if beat {
                chores.scan_again();
            }
            let flush = chores::due(&mut chores.flush_at, settings.flush_interval, now);
            (flush, beat, sweep, chores.singleton_at <= now)
        });
        if sweep || beat {
            self.effects.with(Effects::work);
        }
        self.step(now, |coordinator, step| {
            if alone {
                coordinator.settle(step);
            }
            coordinator.handle_timeout(step);
        });
        for shard in &self.claims {
            let mut asked = Asked::default();
            shard.with(|shard| {
                let published = self.published.load();
                let ctx = self.context(&published, now);
                shard.handle_timeout(&ctx, &mut asked);
                if flush {
                    shard.flush(&ctx, &mut asked);
                }
            });
            self.carry_out(asked);
        }
        let woken: Vec<Peer> = self.outboxes.with(|all| {
            all.values_mut().for_each(|outbox| outbox.handle_timeout(now, settings.rpc_timeout));
            all.values().filter(|outbox| outbox.has_some()).map(|outbox| outbox.peer.clone()).collect()
        });
        self.effects.with(|effects| woken.iter().for_each(|peer| effects.transmit(peer)));
        self.relay.with(|relay| relay.handle_timeout(wire, now));
        self.debug_check();
    }

    /// A frame of the data lane. What comes back is for this node's members; when they have it, say
    /// [`Node::delivered`].
    pub fn handle_data_frame(
        &self,
        from: &Peer,
        message: DataMessage,
        body: bytes::Bytes,
        wire: &mut impl Wire,
        now: Time,
    ) -> Option<LocalDelivery> {
        self.relay.with(|relay| relay.handle_data(from, message, body, self, wire, now))
    }

    /// A frame of the data lane that cannot be read, of a newer kind perhaps: it counts as handled.
    pub fn skip_data_frame(&self, from: &Peer) {
        self.relay.with(|relay| relay.skip(from));
    }

    /// The members here have what came as this hop.
    pub fn delivered(&self, from: &Peer, hop: u64) {
        self.relay.with(|relay| relay.delivered(from, hop));
    }

    /// The transport has room again for this peer.
    pub fn handle_room(&self, peer: &Peer, wire: &mut impl Wire) {
        self.relay.with(|relay| relay.handle_room(peer, wire));
    }

    fn handle_claims(&self, from: &Peer, call: u64, claims: &[(Group, u64)], now: Time) {
        let Some(slot) = self.slot_of(from) else { return };
        for (group, version) in claims {
            self.write_row(group, slot, *version, true, now);
        }
        self.to_outbox(from, |outbox| outbox.acknowledge_claims(call));
    }

    fn handle_claims_ack(&self, from: &Peer, calls: &[u64], now: Time) {
        let mut done = Vec::new();
        self.to_outbox(from, |outbox| done = outbox.claims_acknowledged(calls));
        for (group, version) in done {
            let mut asked = Asked::default();
            self.claim_shard(group.as_bytes()).with(|shard| {
                let published = self.published.load();
                let ctx = self.context(&published, now);
                shard.claim_acknowledged(&group, version, from, &ctx, &mut asked);
            });
            self.carry_out(asked);
        }
        self.debug_check();
    }

    fn handle_retract(&self, from: &Peer, version: u64, groups: &[Group], now: Time) {
        let Some(slot) = self.slot_of(from) else { return };
        for group in groups {
            self.write_row(group, slot, version, false, now);
        }
        self.to_outbox(from, |outbox| outbox.acknowledge_retract(version));
    }

    fn handle_retract_ack(&self, from: &Peer, versions: &[u64], now: Time) {
        for version in versions {
            let mut shard = None;
            self.to_outbox(from, |outbox| shard = outbox.retract_acknowledged(*version));
            if let Some(shard) = shard.and_then(|index| self.claims.get(index)) {
                let published = self.published.load();
                shard.with(|shard| shard.retract_acknowledged(*version, &self.context(&published, now)));
            }
        }
        self.debug_check();
    }

    /// A broadcast that `router` sent to us by its table found no group here: tell it, if that is so.
    pub fn tell_not_held(&self, router: &Peer, group: &Group, now: Time) {
        let version = self.claim_shard(group.as_bytes()).with(|shard| {
            let published = self.published.load();
            shard.not_held(group.as_bytes(), &self.context(&published, now))
        });
        if let Some(version) = version {
            self.to_outbox(router, |outbox| outbox.not_held(group.clone(), version));
        }
    }
}

// Outputs.
impl<M: Clone> Node<M> {
    /// The next thing to do; `None` when there is nothing. Call it until then after every input.
    pub fn poll_effect(&self) -> Option<Effect> {
        self.effects.with(Effects::poll).or_else(|| self.relay.with(Relay::poll_effect))
    }

    /// All that is to do now, added to `into`; `false` if that is nothing. As many calls of [`Node::poll_effect`],
    /// with each lock taken once.
    pub fn poll_effects(&self, into: &mut Vec<Effect>) -> bool {
        self.effects.with(|effects| into.extend(std::iter::from_fn(|| effects.poll())));
        self.relay.with(|relay| {
            into.reserve(relay.effects());
            into.extend(std::iter::from_fn(|| relay.poll_effect()));
        });
        !into.is_empty()
    }

    /// What we owe this peer next, on any lane. Once returned it counts as sent: hand it to the transport, or
    /// see the peer go down.
    pub fn poll_transmit(&self, to: &Peer, now: Time) -> Option<Outgoing> {
        Lane::ALL.into_iter().find_map(|lane| self.poll_transmit_on(to, lane, now))
    }

    /// The same on one lane.
    pub fn poll_transmit_on(&self, to: &Peer, lane: Lane, now: Time) -> Option<Outgoing> {
        if let Some(outgoing) = self.coordinator.with(|c| c.poll_transmit(to, lane, now)) {
            return Some(outgoing);
        }
        if lane != Lane::Control {
            return None;
        }
        if let Some(progress) = self.relay.with(|relay| relay.poll_progress(to)) {
            return Some(Outgoing { lane, message: Message::Progress(progress) });
        }
        let message = self.outboxes.with(|all| {
            all.get_mut(&to.node)
                .filter(|outbox| outbox.peer == *to)
                .and_then(|outbox| outbox.poll(now, self.settings.chunk_bytes))
        })?;
        Some(Outgoing { lane, message })
    }
}

// Steps.
impl<M: Clone> Node<M> {
    fn context<'a>(&'a self, published: &'a Published, now: Time) -> Context<'a> {
        Context { published, versions: &self.versions, settings: &self.settings, now }
    }

    /// One step of the coordinator, and what follows from it in the shards, before anybody else steps it.
    fn step<R>(&self, now: Time, act: impl FnOnce(&mut Coordinator, &mut Step<'_>) -> R) -> R {
        let (result, became_ready) = self.coordinator.with(|coordinator| {
            let (result, consequences, became_ready) = self.effects.with(|effects| {
                let mut step = Step {
                    now,
                    versions: &self.versions,
                    effects,
                    cell: &self.published,
                    consequences: Consequences::default(),
                    became_ready: false,
                };
                let result = act(coordinator, &mut step);
                (result, step.consequences, step.became_ready)
            });
            if let Some(plan) = consequences.gather {
                for shard in &self.claims {
                    shard.with(|shard| shard.begin_gather(plan.clone()));
                }
            }
            (result, became_ready)
        });
        if became_ready {
            self.chores.with(Chores::sweep_again);
        }
        self.debug_check();
        result
    }

    fn carry_out(&self, asked: Asked) {
        let Asked { claims, retracts, joined, events } = asked;
        for (router, group, version) in claims {
            self.to_outbox(&router, |outbox| outbox.claim(group, version));
        }
        for (router, version, groups) in retracts {
            let Some(shard) = groups.first().map(|group| self.shard_index(group.as_bytes())) else {
                continue;
            };
            self.to_outbox(&router, |outbox| outbox.retract(version, shard, groups));
        }
        if !joined.is_empty() || !events.is_empty() {
            self.effects.with(|effects| {
                joined.into_iter().for_each(|(ticket, result)| effects.joined(ticket, result));
                events.into_iter().for_each(|event| effects.event(event));
            });
        }
    }

    /// Gives a peer's outbox something, if exactly this peer is connected, and wakes its sender.
    fn to_outbox(&self, peer: &Peer, give: impl FnOnce(&mut Outbox)) {
        let wake = self.outboxes.with(|all| {
            let Some(outbox) = all.get_mut(&peer.node).filter(|outbox| outbox.peer == *peer) else {
                return false;
            };
            give(outbox);
            outbox.has_some()
        });
        if wake {
            self.effects.with(|effects| effects.transmit(peer));
        }
    }

    fn slot_of(&self, peer: &Peer) -> Option<u32> {
        self.published.read(|published| published.connection(peer).map(|c| c.slot))
    }

    fn write_row(&self, group: &Group, slot: u32, version: u64, present: bool, now: Time) {
        self.occupancy_shard(group.as_bytes()).with(|shard| shard.apply(group, slot, version, present, now));
    }
}
