//! One shard of a cache on one node: the copies of its partitions, who takes part, and operations in flight. Sans-IO.
//!
//! A [`CacheNode`] takes inputs (the view changed, a peer came, a message arrived, time went by, somebody asks) with
//! the time since the node's start, and says through [`CacheNode::poll_effect`] what is to be done. It reads no clock,
//! draws no random number, opens no socket and starts no task.
//!
//! ```text
//!   operate ─▶ serves it here? ─▶ the copy ─▶ Done
//!                    │ no
//!                    ▼ forwarded once, with the epoch
//!                 the primary ─▶ Answer ─▶ Done          not the primary: WrongOwner, with who is; the caller follows
//! ```
//! * **Who takes part** is told by Hello, NotOpen and Bye; the partitions are placed on a ring of those who do.
//! * **A forwarded operation is never forwarded again.** It is carried out only by the primary that serves, in the epoch
//!   that the caller knows or a newer one; everybody else says whom they know.
//! * **While nobody serves** a partition its operations wait, and are tried again as soon as somebody does, within their
//!   deadlines.
//! * **A lost answer** leaves a write in doubt. It is sent again to the same life of the same primary, which remembers
//!   what it has answered. If another node serves by then, writes that may be done twice are done again, and the others
//!   end as [`Applied::Unknown`](crate::cache::Applied). A delete that was done again may not know how many records
//!   went: it ends as [`Uncounted`](crate::cache::CacheError::Uncounted), with its version.
//! * **A primary that steps down** leaves the writes open that too few owners have confirmed. Those that may be made
//!   twice are made again by whoever serves next; the others end as `NotEnoughAcks`.
//!
//! Nothing here reaches over partitions except who takes part. So the driver cuts a cache into shards with a lock each.
//! A message costs work for its own partition only; a change of the view, a link or a Hello visits all of the shard
//! once.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use super::config::{CacheConfig, ReadMode, WriteMode};
use super::error::CacheError;
use super::operation::{Operation, Options, ReadOp, Reply};
use super::partition::PartitionId;
use super::replica::{Budget, CacheEvent, Context, Coverage, Members, Mutation, OwnerState, Rules};
use super::store::Store;
use super::version::Version;
use crate::ring::{Ring, RingConfig};
use crate::transport::Lane;
use crate::types::{NodeId, Peer};

mod calls;
pub mod codec;
mod copies;
mod effect;
mod memory;
pub mod message;
mod peers;
mod pending;
mod quorum;
mod reads;
mod serve;
mod status;
#[cfg(feature = "consensus")]
pub mod strong;
#[cfg(test)]
mod tests;

pub use codec::CodecError;
pub use effect::{CacheEffect, PartitionStatus, Readiness, Shard};
pub use message::{CacheMessage, ForwardOptions};

use copies::{Given, Replica, Said, Wanted};
use memory::Memory;
use peers::{Consequences, Hello, Peers};
use pending::PendingTable;
use serve::Served;

/// One shard of a cache on one node; see the [module](self). Methods are grouped: getters, inputs, commands, outputs.
#[derive(Debug)]
pub struct CacheNode {
    me: Peer,
    config: Arc<CacheConfig>,
    shard: Shard,
    rules: Rules,
    budget: Budget,
    /// How many bytes one message may have.
    max_message: usize,
    seed: u64,
    closed: bool,
    draining: bool,
    peers: Peers,
    members: Members,
    /// Who is on the ring now.
    ring: Vec<NodeId>,
    /// By their place in the shard.
    replicas: Vec<Replica>,
    wanted: Vec<Vec<Peer>>,
    /// Write mode `strong` only.
    #[cfg(feature = "consensus")]
    strong: Option<Box<strong::Strong>>,
    alarms: BTreeSet<(Duration, usize)>,
    alarm_of: Vec<Option<Duration>>,
    /// Replicas that may have effects.
    touched: BTreeSet<usize>,
    pending: PendingTable,
    /// Operations to be tried now.
    ready: BTreeSet<u64>,
    /// Operations of others that are with a replica, by the number under which it knows them.
    served: BTreeMap<u64, Served>,
    memories: BTreeMap<Peer, Memory>,
    last_id: u64,
    effects: VecDeque<CacheEffect>,
    changed: bool,
}

// Getters.
impl CacheNode {
    /// A shard that knows nobody: give it the view and the peers that are up. `config` is valid. `seed` spreads the
    /// pauses of several nodes in time, and equal seeds give equal runs. A cache that was closed and is opened again in
    /// one life of the node is a new one at a later `now`.
    pub fn new(me: Peer, config: Arc<CacheConfig>, shard: Shard, seed: u64, now: Duration) -> Self {
        // later than every number of a former opening: operations come more slowly than this counts
        let opened = u64::try_from(now.as_micros()).unwrap_or(u64::MAX >> 4);
        let shard = Shard { index: shard.index, of: shard.of.max(1) };
        let members = Members::default();
        let (rules, budget) = (Rules::default(), Budget::default());
        let ctx = Context { me: &me, config: &config, now, members: &members, rules, budget: &budget };
        let replicas: Vec<_> = shard.partitions(config.partitions).map(|id| Replica::new(id, ctx)).collect();
        let count = replicas.len();
        #[cfg(feature = "consensus")]
        let strong = (config.write_mode == super::config::WriteMode::Strong).then(|| {
            let member = super::consensus::Member { peer: me.clone(), opening: opened as u32 };
            let expected = config.expected_nodes.unwrap_or(usize::MAX);
            Box::new(strong::Strong::new(member, expected, config.replicas, seed, now))
        });
        Self {
            #[cfg(feature = "consensus")]
            strong,
            peers: Peers::new(me.clone(), shard.of, opened as u32),
            members,
            ring: Vec::new(),
            replicas,
            wanted: vec![Vec::new(); count],
            alarms: BTreeSet::new(),
            alarm_of: vec![None; count],
            touched: BTreeSet::new(),
            pending: PendingTable::default(),
            ready: BTreeSet::new(),
            served: BTreeMap::new(),
            memories: BTreeMap::new(),
            last_id: opened << 4,
            effects: VecDeque::new(),
            changed: false,
            rules,
            budget,
            max_message: usize::MAX,
            closed: false,
            draining: false,
            me,
            config,
            shard,
            seed,
        }
    }

    /// The same with what it shares with the other shards of its cache on this node (what may be spent on filling
    /// copies), and with how many bytes one message may have: operations and answers beyond that are refused.
    #[must_use]
    pub fn within(mut self, budget: Budget, max_message: usize) -> Self {
        (self.budget, self.max_message) = (budget, max_message);
        self
    }

    /// The same with a rule broken, to see whether it is noticed.
    #[cfg(feature = "testing")]
    #[must_use]
    pub fn with_rules(mut self, rules: Rules) -> Self {
        self.rules = rules;
        #[cfg(feature = "consensus")]
        if let Some(strong) = &mut self.strong {
            strong.set_rules(rules);
        }
        self
    }

    /// What a [`CacheMessage::Replica`] of this peer has to name to be heard.
    #[cfg(feature = "testing")]
    pub fn session(&self, peer: &Peer) -> Option<u32> {
        self.peers.session(peer)
    }

    /// Who this node is.
    pub fn me(&self) -> &Peer {
        &self.me
    }

    /// The options of the cache.
    pub fn config(&self) -> &Arc<CacheConfig> {
        &self.config
    }

    /// Which partitions it has.
    pub fn shard(&self) -> Shard {
        self.shard
    }

    /// What this node holds of a partition, and whether its copy is active; `None` if it holds nothing.
    pub fn store(&self, partition: PartitionId) -> Option<(&Store, bool)> {
        let replica = self.replica(partition)?;
        (replica.state() != OwnerState::Absent).then(|| (replica.store(), replica.is_active()))
    }

    /// The answer of a read, if this node may give it at once: it serves the partition, or holds an active copy and the
    /// read allows it. It allocates nothing but the answer. `None`: ask with [`CacheNode::operate`].
    pub fn try_read(
        &self,
        partition: PartitionId,
        read: &ReadOp,
        options: &Options,
    ) -> Option<Result<Reply, CacheError>> {
        let replica = self.replica(partition)?;
        let may = match options.read_mode {
            // a lease has an end, and no time comes in here
            ReadMode::Primary => replica.serving().is_some() && !replica.is_strong(),
            ReadMode::Local => replica.serving().is_some() || replica.is_active(),
            ReadMode::Quorum => false,
        };
        match self.covers(replica, &options.at_least) {
            None | Some((Coverage::Yes, _)) if may && !self.closed => Some(read_copy(replica, read)),
            None | Some(_) => None,
        }
    }

    /// Whether a copy of this node knows of all of these writes, and of which not. `None` if nothing is asked for.
    fn covers<'a>(&self, replica: &Replica, writes: &'a [Version]) -> Option<(Coverage, &'a Version)> {
        let ignored = self.rules.breaks(Mutation::TokenIgnored);
        let of = |write: &'a Version| match ignored {
            true => (Coverage::Yes, write),
            false => (replica.covers(write), write),
        };
        let rank = |coverage: &Coverage| match coverage {
            Coverage::Lost => 0,
            Coverage::NotYet => 1,
            Coverage::Yes => 2,
        };
        writes.iter().map(of).min_by_key(|(coverage, _)| rank(coverage))
    }

    fn place(&self, partition: PartitionId) -> Option<usize> {
        let place = self.shard.place(partition);
        (self.shard.holds(partition) && place < self.replicas.len()).then_some(place)
    }

    /// Whether what decides about the partitions is as complete as they have to be.
    fn bears_a_crash(&self) -> bool {
        #[cfg(feature = "consensus")]
        return self.strong.as_ref().is_none_or(|strong| strong.consensus().is_whole());
        #[cfg(not(feature = "consensus"))]
        true
    }

    fn is_strong(&self) -> bool {
        self.config.write_mode == super::config::WriteMode::Strong
    }

    /// As [`Self::covers`]; a primary that has all that anybody was told of says of the rest at once that it is lost.
    fn covers_now<'a>(
        &self,
        replica: &Replica,
        writes: &'a [Version],
        now: Duration,
    ) -> Option<(Coverage, &'a Version)> {
        match self.covers(replica, writes)? {
            (Coverage::NotYet, write) if replica.would_know(write, self.given(now)) => {
                Some((Coverage::Lost, write))
            }
            known => Some(known),
        }
    }

    /// Whether this node's copy, which serves, may be read now.
    fn may_read(&self, replica: &Replica, now: Duration) -> bool {
        replica.may_read(self.given(now))
    }

    fn given(&self, now: Duration) -> Given<'_> {
        let (me, config, members, rules) = (&self.me, &*self.config, &self.members, self.rules);
        let base = Context { me, config, now, members, rules, budget: &self.budget };
        #[cfg(feature = "consensus")]
        return Given { base, strong: self.strong.as_deref() };
        #[cfg(not(feature = "consensus"))]
        Given { base }
    }

    fn replica(&self, partition: PartitionId) -> Option<&Replica> {
        self.replicas.get(self.place(partition)?)
    }
}

/// What a copy says.
fn read_copy(replica: &Replica, read: &ReadOp) -> Result<Reply, CacheError> {
    let outcome = read.read(replica.store())?;
    Ok(Reply { outcome, version: replica.end().cloned() })
}

// Inputs.
impl CacheNode {
    /// The scope's committed view, this node included, and whether the scope has found out who is there (a node that
    /// has just started has not, and begins nothing from nothing).
    pub fn handle_view(&mut self, members: &[Peer], settled: bool, now: Duration) {
        if self.closed || !self.peers.handle_view(members, settled) {
            return;
        }
        self.members_changed(now);
        self.settle(now);
    }

    /// A link to this peer is up: messages can be sent and come. Also said for every link that is up when the cache is
    /// opened.
    pub fn handle_peer_up(&mut self, peer: &Peer, now: Duration) {
        if self.closed || *peer == self.me {
            return;
        }
        if let Some(hello) = self.peers.handle_up(peer, &self.config) {
            self.send(peer.clone(), Lane::Control, hello);
        }
        self.settle(now);
    }

    /// The link is down: everything that was under way in either direction is lost.
    pub fn handle_peer_down(&mut self, peer: &Peer, now: Duration) {
        if self.closed {
            return;
        }
        if self.peers.handle_down(peer) {
            self.went_down(peer, now);
        }
        self.members_changed(now);
        self.settle(now);
    }

    /// A peer whose link is up has sent this.
    pub fn handle_message(&mut self, from: &Peer, message: CacheMessage, now: Duration) {
        if self.closed || *from == self.me {
            return;
        }
        match message {
            CacheMessage::Hello { terms, shards, life, draining, heard } => {
                let hello = Hello { terms, shards, life, draining, heard };
                let outcome = self.peers.handle_hello(from, hello, &self.config);
                self.follow_peer(from, outcome, now);
            }
            CacheMessage::NotOpen | CacheMessage::Bye => {
                let outcome = self.peers.handle_not_open(from);
                self.follow_peer(from, outcome, now);
            }
            CacheMessage::Replica { partition, session, message } => {
                if self.peers.session(from) == Some(session) {
                    if self.peers.handle_session(from) {
                        self.came_up(from, now);
                    }
                    if let Some(place) = self.place(partition) {
                        let said = Said::Plain(message);
                        self.with(place, now, |replica, given| replica.handle_message(from, said, given));
                    }
                }
            }
            #[cfg(feature = "consensus")]
            CacheMessage::Strong { session, message } => {
                if self.peers.session(from) == Some(session) {
                    if self.peers.handle_session(from) {
                        self.came_up(from, now);
                    }
                    self.handle_strong(from, message, now);
                }
            }
            CacheMessage::Forward { request, partition, operation, options, epoch } => {
                self.handle_forward(from, request, partition, operation, options, epoch, now);
            }
            CacheMessage::Answer { request, attempt, result } => {
                self.handle_answer(from, request, attempt, result, now);
            }
            CacheMessage::Copy { request, epoch, owners, covers, end, result } => {
                self.handle_copy(from, request, quorum::Copy { epoch, owners, covers, end, result }, now);
            }
            CacheMessage::Nudge { partition, owner } => {
                if self.peers.takes_part(from) {
                    self.bring_forward(partition, &owner, now);
                }
            }
        }
        self.settle(now);
    }

    /// [`CacheNode::poll_timeout`] is reached.
    pub fn handle_timeout(&mut self, now: Duration) {
        if self.closed {
            return;
        }
        #[cfg(feature = "consensus")]
        self.strong_timeout(now);
        let due: Vec<usize> = self.alarms.range(..=(now, usize::MAX)).map(|(_, place)| *place).collect();
        for place in due {
            self.with(place, now, |replica, given| replica.handle_timeout(given));
        }
        // replicas first: they say how many owners have confirmed, and this only that the time is over
        self.settle(now);
        for id in self.pending.due(now) {
            self.handle_wake(id, now);
        }
        self.settle(now);
    }

    fn follow_peer(&mut self, peer: &Peer, outcome: Consequences, now: Duration) {
        if let Some(reply) = outcome.reply {
            self.send(peer.clone(), Lane::Control, reply);
        }
        if let Some(error) = outcome.mismatch {
            self.effects.push_back(CacheEffect::Event(CacheEvent::Disagrees { error }));
        }
        if outcome.down {
            self.went_down(peer, now);
        }
        if outcome.changed || outcome.down || outcome.up {
            self.members_changed(now);
        }
        if outcome.up {
            self.came_up(peer, now);
        }
    }

    /// It can be talked to.
    fn came_up(&mut self, peer: &Peer, now: Duration) {
        self.members.up.insert(peer.clone());
        #[cfg(feature = "consensus")]
        self.strong_peer_up(peer, now);
        for place in 0..self.replicas.len() {
            self.with(place, now, |replica, given| replica.handle_peer_up(peer, given));
        }
        self.ready.extend(self.pending.waiting());
        self.changed = true;
    }

    /// What was under way to it or from it is lost.
    fn went_down(&mut self, peer: &Peer, now: Duration) {
        self.members.up.remove(peer);
        #[cfg(feature = "consensus")]
        self.strong_peer_down(peer, now);
        for place in 0..self.replicas.len() {
            self.with(place, now, |replica, given| replica.handle_peer_down(peer, given));
        }
        self.lose_peer(peer, now);
        self.changed = true;
    }

    /// Works out who takes part and where everything belongs, and tells every replica.
    fn members_changed(&mut self, now: Duration) {
        let members = Members {
            live: self.peers.participants().cloned().collect(),
            up: self.peers.up().cloned().collect(),
            draining: self
                .peers
                .participants()
                .filter(|peer| self.peers.is_draining(peer))
                .cloned()
                .collect(),
            complete: self.peers.is_complete(),
        };
        let same = (&members.live, &members.draining, members.complete)
            == (&self.members.live, &self.members.draining, self.members.complete);
        self.members = members;
        #[cfg(feature = "consensus")]
        self.tell_consensus_members(now);
        if same {
            return;
        }
        self.place_on_ring();
        for place in 0..self.replicas.len() {
            let Some(wanted) = self.wanted.get(place).cloned() else { continue };
            self.with(place, now, |replica, given| replica.handle_members(&wanted, given));
        }
        for peer in self.pending.asked_peers() {
            if !self.members.live.contains(&peer) {
                self.lose_peer(&peer, now);
            }
        }
        self.forget_memories(now);
        self.ready.extend(self.pending.waiting());
        self.changed = true;
    }

    /// The ring of those who take part and stay; of all if nobody stays.
    fn place_on_ring(&mut self) {
        let stays = |peer: &&Peer| !self.members.draining.contains(*peer);
        let mut on_ring: Vec<&Peer> = self.members.live.iter().filter(stays).collect();
        if on_ring.is_empty() {
            on_ring = self.members.live.iter().collect();
        }
        let peers: BTreeMap<NodeId, Peer> =
            on_ring.into_iter().map(|peer| (peer.node.clone(), peer.clone())).collect();
        let same = self.ring.len() == peers.len() && self.ring.iter().eq(peers.keys());
        let placed = self.wanted.iter().flatten().all(|owner| peers.get(&owner.node) == Some(owner));
        if same && placed {
            return;
        }
        self.ring = peers.keys().cloned().collect();
        let ring = Ring::of(self.ring.iter().cloned(), RingConfig::default());
        for (partition, wanted) in self.shard.partitions(self.config.partitions).zip(&mut self.wanted) {
            let owners = ring.owners(partition.ring_key(&self.config.name), self.config.replicas);
            *wanted = owners.into_iter().filter_map(|node| peers.get(node).cloned()).collect();
        }
    }

    /// Gives an input to a replica; its effects are taken by [`Self::settle`].
    fn with<R>(
        &mut self,
        place: usize,
        now: Duration,
        input: impl FnOnce(&mut Replica, Given<'_>) -> R,
    ) -> Option<R> {
        let replica = self.replicas.get_mut(place)?;
        let (me, config, members, rules) = (&self.me, &*self.config, &self.members, self.rules);
        let base = Context { me, config, now, members, rules, budget: &self.budget };
        #[cfg(feature = "consensus")]
        let given = Given { base, strong: self.strong.as_deref() };
        #[cfg(not(feature = "consensus"))]
        let given = Given { base };
        let result = input(replica, given);
        self.touched.insert(place);
        Some(result)
    }

    /// Takes the effects of replicas and tries operations until nothing is left to do at this moment.
    fn settle(&mut self, now: Duration) {
        loop {
            if let Some(place) = self.touched.pop_first() {
                self.follow_replica(place, now);
            } else if self.follow_strong(now) {
            } else if let Some(id) = self.ready.pop_first() {
                self.attempt(id, now);
            } else {
                break;
            }
        }
        if std::mem::take(&mut self.changed) && !matches!(self.effects.back(), Some(CacheEffect::Changed)) {
            self.effects.push_back(CacheEffect::Changed);
        }
        self.debug_check();
    }

    fn follow_replica(&mut self, place: usize, now: Duration) {
        while let Some(effect) = self.replicas.get_mut(place).and_then(Replica::poll_effect) {
            match effect {
                Wanted::Send { to, lane, said } => {
                    let partition = self.partition_at(place);
                    // who is not up hears nothing, and hears all there is to hear when it comes
                    if let Some(session) = self.peers.session(&to).filter(|_| self.peers.is_up(&to)) {
                        let message = match said {
                            Said::Plain(message) => CacheMessage::Replica { partition, session, message },
                            #[cfg(feature = "consensus")]
                            Said::Strong(message) => {
                                let message = strong::StrongMessage::Copy { partition, message };
                                CacheMessage::Strong { session, message }
                            }
                        };
                        self.send(to, lane, message);
                    }
                }
                #[cfg(feature = "consensus")]
                Wanted::Propose(change) => self.propose(change, now),
                #[cfg(feature = "consensus")]
                Wanted::Withdraw(change) => self.withdraw(&change),
                Wanted::Written { ticket, result } => self.handle_written(ticket, result, now),
                Wanted::Event(event) => self.effects.push_back(CacheEffect::Event(event)),
                Wanted::Changed => {
                    self.changed = true;
                    self.ready.extend(self.pending.waiting_for(self.partition_at(place)));
                }
            }
        }
        self.set_alarm(place);
    }

    /// Whether there was something to do for the consensus.
    fn follow_strong(&mut self, now: Duration) -> bool {
        #[cfg(feature = "consensus")]
        return self.follow_consensus(now);
        #[cfg(not(feature = "consensus"))]
        {
            let _ = now;
            false
        }
    }

    fn set_alarm(&mut self, place: usize) {
        let wanted = self.replicas.get(place).and_then(Replica::poll_timeout);
        let Some(alarm) = self.alarm_of.get_mut(place) else { return };
        if *alarm == wanted {
            return;
        }
        if let Some(old) = alarm.take() {
            self.alarms.remove(&(old, place));
        }
        if let Some(at) = wanted {
            self.alarms.insert((at, place));
        }
        *alarm = wanted;
    }

    /// The partition at a place of the shard.
    fn partition_at(&self, place: usize) -> PartitionId {
        let number = u32::try_from(place).unwrap_or(u32::MAX).saturating_mul(self.shard.of);
        PartitionId::new(number.saturating_add(self.shard.index))
    }

    fn send(&mut self, to: Peer, lane: Lane, message: CacheMessage) {
        self.effects.push_back(CacheEffect::Send { to, lane, message });
    }
}

// Commands.
impl CacheNode {
    /// Carries out an operation on one partition. Its end is said by exactly one [`CacheEffect::Done`] with this
    /// ticket, at the deadline at the latest. The driver's tickets are unique.
    pub fn operate(
        &mut self,
        ticket: u64,
        partition: PartitionId,
        operation: Operation,
        options: Options,
        now: Duration,
    ) {
        let mut options = options;
        if self.config.write_mode == WriteMode::Strong {
            options.write_mode = WriteMode::Strong;
        }
        self.begin(ticket, partition, operation, options, now);
        self.settle(now);
    }

    /// Whoever waited for this operation has gone: no `Done` follows. What was begun may still be applied.
    pub fn cancel(&mut self, ticket: u64) {
        self.give_up(ticket);
    }

    /// The operator gives up what dead owners alone may have had of this partition: it goes on with what is there, if
    /// need be with nothing.
    ///
    /// # Errors
    /// [`CacheError::NoQuorum`] if a consensus has to decide it and cannot now: nothing will come of it.
    pub fn accept_loss(&mut self, partition: PartitionId, now: Duration) -> Result<(), CacheError> {
        let place = self.place(partition).filter(|_| !self.closed);
        let result =
            place.and_then(|place| self.with(place, now, |replica, given| replica.accept_loss(given)));
        self.settle(now);
        result.unwrap_or(Ok(()))
    }

    /// Begins to hand over everything; this node keeps serving meanwhile. See [`CacheNode::is_drained`].
    pub fn drain(&mut self, now: Duration) {
        if self.closed || self.draining {
            return;
        }
        self.draining = true;
        for (peer, hello) in self.peers.drain(&self.config) {
            self.send(peer, Lane::Control, hello);
        }
        self.members_changed(now);
        self.settle(now);
    }

    /// Ends it: says Bye to everybody, and ends all operations. Everything later is ignored. What this node alone had is
    /// gone; drain first to keep it.
    pub fn close(&mut self, now: Duration) {
        if self.closed {
            return;
        }
        self.settle(now);
        self.closed = true;
        let linked: Vec<Peer> = self.peers.linked().cloned().collect();
        linked.into_iter().for_each(|peer| self.send(peer, Lane::Control, CacheMessage::Bye));
        self.end_all();
        self.alarms.clear();
        self.replicas.clear();
        self.effects.push_back(CacheEffect::Changed);
    }
}

// Outputs.
impl CacheNode {
    /// What to do next; `None` when there is nothing left. Ask after every input and command.
    pub fn poll_effect(&mut self) -> Option<CacheEffect> {
        self.effects.pop_front()
    }

    /// When [`CacheNode::handle_timeout`] wants to be called next, since the node's start; `None` if not at all.
    pub fn poll_timeout(&self) -> Option<Duration> {
        if self.closed {
            return None;
        }
        let replicas = self.alarms.first().map(|(at, _)| *at);
        let wakes = replicas.into_iter().chain(self.pending.next_wake());
        #[cfg(feature = "consensus")]
        let wakes = wakes.chain(self.strong_wake());
        wakes.min()
    }
}
