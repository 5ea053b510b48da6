//! The view of this node and how it changes: peers come and go, and every change is prepared.
//!
//! ```text
//!                  a peer came, went, was reborn, or drains
//!      settled ───────────────────────────────────────────▶ round: Leaving sent to all of the old view
//!       ▲  ▲                                                  │   │ further change: a new round
//!       │  └── back to the committed view, nobody lost ───────┘   │
//!       │      (cancel: announced again, under a new version)     │ all have acknowledged or gone down
//!       │                                                         ▼
//!       └──────────────── all groups gathered ◀──────────────── commit: new ring published, gather
//! ```
//!
//! The coordinator alone writes `Published`. It keeps what it owes to whom as state, not as a queue of
//! effects: [`Coordinator::poll_transmit`] works out what a peer must hear next.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;
use std::sync::Arc;

use crate::ring::{Ring, RingConfig};
use crate::sync::Counter;
use crate::transport::Lane;
use crate::types::{Incarnation, NodeId, Peer};
use crate::view::{Standing, View, ViewHash};

use super::agreement::{Agreement, PeerRecord, Transfer};
use super::claims::GatherPlan;
use super::digest::Digest;
use super::effect::{Effects, NodeEvent, Outgoing};
use super::message::{DataKind, Message};
use super::published::{Connected, Published, Status};
use super::rules::{Mutation, Rules};
use super::{Settings, Time};

/// A change of the view that is being prepared.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Round {
    awaiting: BTreeSet<Peer>,
    version: u64,
    retry_at: Time,
}

/// A gather under way, after a commit.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Gather {
    pub(super) plan: Arc<GatherPlan>,
    /// The shard that is being walked.
    pub(super) shard: usize,
}

/// What a change of the coordinator's asks of the rest of the node, at once and in this order.
#[derive(Default)]
pub(super) struct Consequences {
    /// A commit: every claim shard starts this gather.
    pub(super) gather: Option<Arc<GatherPlan>>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Coordinator {
    me: Peer,
    ring: RingConfig,
    rules: Rules,
    rpc_timeout: Time,
    chunk_groups: usize,
    chunk_bytes: usize,
    beat_peers: usize,
    /// The last peer that has had its turn in the heartbeats; `None` as long as all fit into one.
    beat_last: Option<NodeId>,
    settled: bool,
    draining: bool,
    superseded: bool,
    pub(super) peers: BTreeMap<NodeId, PeerRecord>,
    view: View,
    hash: ViewHash,
    /// How many members of the view agree with it: counted, not looked for, because every message asks.
    agreeing: usize,
    /// Whether who is connected, or suspect, has changed since it was published.
    connections_stale: bool,
    /// Members of the view whose link broke since the commit: what was on its way to them is gone.
    lost: BTreeSet<Peer>,
    round: Option<Round>,
    pub(super) gather: Option<Gather>,
    /// The version of what we announce now.
    announced: u64,
    published: Published,
}

// Getters.
impl Coordinator {
    pub(super) fn new(me: Peer, settings: &Settings) -> Self {
        let view = View::alone(me.clone());
        let ring = settings.ring;
        let hash = hash_of(&view, &ring, settings.rules);
        let published = Published {
            me: me.clone(),
            status: Status::Converging,
            hash,
            ring: Ring::of(view.ring_nodes(), ring),
            routers: Arc::from([me.clone()]),
            view: view.clone(),
            connected: Arc::from([]),
            slots: Arc::from([]),
            settled: false,
            draining: false,
            superseded: false,
        };
        Self {
            me,
            ring,
            rules: settings.rules,
            rpc_timeout: settings.rpc_timeout,
            chunk_groups: settings.chunk_groups,
            chunk_bytes: settings.chunk_bytes,
            beat_peers: settings.beat_peers.max(1),
            beat_last: None,
            settled: false,
            draining: false,
            superseded: false,
            peers: BTreeMap::new(),
            view,
            hash,
            agreeing: 0,
            connections_stale: false,
            lost: BTreeSet::new(),
            round: None,
            gather: None,
            announced: 0,
            published,
        }
    }

    pub(super) fn published(&self) -> &Published {
        &self.published
    }

    /// The record of exactly this peer.
    pub(super) fn record(&mut self, peer: &Peer) -> Option<&mut PeerRecord> {
        self.peers.get_mut(&peer.node).filter(|record| record.peer == *peer)
    }

    /// Whether the view is neither changing nor being gathered.
    pub(super) fn is_quiet(&self) -> bool {
        self.round.is_none() && self.gather.is_none()
    }

    pub(super) fn announced(&self) -> u64 {
        self.announced
    }

    pub(super) fn hash(&self) -> ViewHash {
        self.hash
    }

    fn is_ready(&self) -> bool {
        self.is_quiet()
            && !self.superseded
            && (self.settled || self.view.len() > 1)
            && self.agreeing + 1 == self.view.len()
    }

    /// Whether this peer is a member of our view and agrees with it.
    fn agrees(&self, record: &PeerRecord) -> bool {
        record.member && record.agreement.is_with(self.hash)
    }

    fn status(&self) -> Status {
        if !self.is_quiet() {
            Status::Rebalancing
        } else if self.is_ready() {
            Status::Ready
        } else {
            Status::Converging
        }
    }

    /// Who has not yet taken over from this draining node, or is still owed data by it.
    pub(super) fn drain_waiting_for(&self) -> Vec<NodeId> {
        let done = |record: &&PeerRecord| {
            self.is_quiet() && record.agreement.is_with(self.hash) && !record.is_owed()
        };
        let flagged = self.view.standing(&self.me) == Some(Standing::Draining);
        self.peers.values().filter(|r| !(flagged && done(r))).map(|r| r.peer.node.clone()).collect()
    }

    /// What must hold after every step.
    pub(super) fn check(&self) -> Result<(), String> {
        let connected: BTreeSet<&Peer> = self.peers.values().map(|r| &r.peer).chain([&self.me]).collect();
        if self.round.is_none() && !self.superseded {
            let view: BTreeSet<&Peer> = self.view.peers().collect();
            if view != connected {
                return Err(format!("no round, but the view is {view:?} and connected are {connected:?}"));
            }
        }
        if let Some(round) = &self.round {
            if let Some(gone) = round.awaiting.iter().find(|p| !connected.contains(*p)) {
                return Err(format!("round {} waits for {gone}, which is not connected", round.version));
            }
            if round.awaiting.is_empty() {
                return Err(format!("round {} waits for nobody and is not committed", round.version));
            }
        }
        let agreeing = self.peers.values().filter(|record| self.agrees(record)).count();
        if agreeing != self.agreeing {
            return Err(format!("{agreeing} members agree, {} are counted", self.agreeing));
        }
        if let Some(record) = self.peers.values().find(|r| r.member != self.view.contains(&r.peer)) {
            return Err(format!(
                "{} is taken for a member, or not, and the view says otherwise",
                record.peer
            ));
        }
        if self.connections_stale {
            return Err("who is connected has changed and is not published".into());
        }
        if self.published.status != self.status() || self.published.hash != self.hash {
            return Err(format!("published {} but are {}", self.published.status, self.status()));
        }
        // a lost member is owed a snapshot by the commit to come
        let settled = |r: &PeerRecord| r.member && !self.lost.contains(&r.peer) && !r.is_owed();
        if self.gather.is_some() && self.peers.values().any(settled) {
            return Err("a gather is under way, but a member is owed nothing".into());
        }
        Ok(())
    }
}

// Inputs.
impl Coordinator {
    /// Takes a new connection. The caller has seen to it that no other life of the node is connected.
    pub(super) fn handle_peer_up(&mut self, peer: &Peer, slot: u32, step: &mut Step<'_>) {
        let record = PeerRecord::new(peer.clone(), slot, self.view.contains(peer));
        let earlier = self.peers.insert(peer.node.clone(), record);
        self.connections_stale = true;
        self.agreeing -= usize::from(earlier.is_some_and(|record| self.agrees(&record)));
        step.effects.event(NodeEvent::PeerUp(peer.clone()));
        self.retarget(step);
    }

    pub(super) fn handle_peer_down(&mut self, peer: &Peer, step: &mut Step<'_>) {
        if self.record(peer).is_none() {
            return;
        }
        let record = self.peers.remove(&peer.node);
        self.connections_stale = true;
        self.agreeing -= usize::from(record.is_some_and(|record| self.agrees(&record)));
        if self.view.contains(peer) && !self.rules.breaks(Mutation::ForgetLost) {
            self.lost.insert(peer.clone());
        }
        step.effects.event(NodeEvent::PeerDown(peer.clone()));
        step.effects.forget(peer);
        self.retarget(step);
    }

    pub(super) fn handle_suspect(&mut self, peer: &Peer, suspect: bool, step: &mut Step<'_>) {
        let Some(record) = self.record(peer) else { return };
        if std::mem::replace(&mut record.suspect, suspect) == suspect {
            return;
        }
        step.effects.event(match suspect {
            true => NodeEvent::PeerSuspect(peer.clone()),
            false => NodeEvent::PeerResumed(peer.clone()),
        });
        self.connections_stale = true;
        self.republish(step);
    }

    pub(super) fn settle(&mut self, step: &mut Step<'_>) {
        if !std::mem::replace(&mut self.settled, true) {
            self.republish(step);
        }
    }

    pub(super) fn drain(&mut self, step: &mut Step<'_>) {
        if !std::mem::replace(&mut self.draining, true) {
            for record in self.peers.values() {
                step.effects.transmit(&record.peer);
            }
            self.retarget(step);
        }
    }

    pub(super) fn handle_draining(&mut self, from: &Peer, step: &mut Step<'_>) {
        let Some(record) = self.record(from) else { return };
        if !std::mem::replace(&mut record.draining, true) {
            self.retarget(step);
        }
    }

    pub(super) fn handle_leaving(&mut self, from: &Peer, round: u64, step: &mut Step<'_>) {
        let careless = self.rules.breaks(Mutation::AckWithoutMark);
        if !careless {
            self.note_agreement(from, Agreement::InTransition { since: round });
        }
        let Some(record) = self.record(from) else { return };
        record.leaving_ack = Some(record.leaving_ack.map_or(round, |earlier| earlier.max(round)));
        // published before the acknowledgement can be fetched: nobody reads `Ready` after it is sent
        self.republish(step);
        step.effects.transmit(from);
    }

    pub(super) fn handle_leaving_ack(&mut self, from: &Peer, version: u64, step: &mut Step<'_>) {
        let rules = self.rules;
        let Some(round) = &mut self.round else { return };
        let ours = round.version == version || rules.breaks(Mutation::StaleLeavingAck);
        if ours && round.awaiting.remove(from) {
            if round.awaiting.is_empty() || rules.breaks(Mutation::CommitOnFirstAck) {
                self.commit(step);
            }
        }
    }

    /// A peer has committed to a view, and we have applied all that it owed us.
    pub(super) fn handle_agreement(
        &mut self,
        from: &Peer,
        hash: ViewHash,
        version: u64,
        step: &mut Step<'_>,
    ) {
        self.note_agreement(from, Agreement::With { hash, version });
        self.republish(step);
    }

    /// Takes what a peer says about its view, if it is newer than what it has said before.
    fn note_agreement(&mut self, from: &Peer, newer: Agreement) {
        let hash = self.hash;
        let Some(record) = self.record(from) else { return };
        let before = record.member && record.agreement.is_with(hash);
        record.agreement.update(newer);
        let after = record.member && record.agreement.is_with(hash);
        self.agreeing = self.agreeing + usize::from(after) - usize::from(before);
    }

    pub(super) fn handle_data_ack(
        &mut self,
        from: &Peer,
        round: u64,
        chunks: u32,
        complete: bool,
        step: &mut Step<'_>,
    ) {
        let now = step.now;
        let Some(record) = self.record(from) else { return };
        let Some(transfer) = &mut record.transfer else { return };
        if transfer.round != round {
            return;
        }
        transfer.acknowledge(chunks, now);
        if complete && transfer.complete {
            // its last chunk carried our hash: a later announcement that was withheld goes out now
            record.transfer = None;
            record.announced = round;
        }
        step.effects.transmit(from);
    }

    /// Another node's committed view: is somebody in it who has replaced us, or whom we cannot see?
    pub(super) fn handle_members(&mut self, from: &Peer, view: &View, step: &mut Step<'_>) {
        for peer in view.peers() {
            if peer.node == self.me.node {
                if peer.incarnation > self.me.incarnation {
                    self.supersede(peer, step);
                }
                continue;
            }
            match self.peers.get_mut(&peer.node) {
                None => step
                    .effects
                    .event(NodeEvent::Partitioned { peer: from.node.clone(), missing: peer.node.clone() }),
                Some(record) if record.peer.incarnation < peer.incarnation => {
                    record.superseded_by = Some(peer.clone());
                    step.effects.transmit(&record.peer);
                }
                Some(_) => {}
            }
        }
    }

    pub(super) fn supersede(&mut self, by: &Peer, step: &mut Step<'_>) {
        let later = by.node == self.me.node && by.incarnation > self.me.incarnation;
        if later && !std::mem::replace(&mut self.superseded, true) {
            step.effects.event(NodeEvent::Superseded { by: by.clone() });
            self.republish(step);
        }
    }

    /// Repeats what has had no answer for long.
    pub(super) fn handle_timeout(&mut self, step: &mut Step<'_>) {
        let patience = self.rpc_timeout;
        let mut again: Vec<Peer> = Vec::new();
        if let Some(round) = self.round.as_mut().filter(|r| r.retry_at <= step.now) {
            round.retry_at = step.now.saturating_add(patience);
            again.extend(round.awaiting.iter().cloned());
        }
        for peer in &again {
            if let Some(record) = self.record(peer) {
                record.leaving_sent = 0;
            }
        }
        for record in self.peers.values_mut() {
            if record.transfer.as_mut().is_some_and(|t| t.retry(step.now, patience)) {
                again.push(record.peer.clone());
            }
        }
        again.iter().for_each(|peer| step.effects.transmit(peer));
    }
}

// The way of a change.
impl Coordinator {
    /// Who is connected, and this node: the view that is to be, in the order of nodes.
    fn target(&self) -> impl Iterator<Item = (&Peer, Standing)> {
        let standing = |draining| if draining { Standing::Draining } else { Standing::Active };
        let member = move |record: &'_ PeerRecord| standing(record.draining);
        let (me, above) = (&self.me, (Bound::Excluded(&self.me.node), Bound::Unbounded));
        let below = self.peers.range::<NodeId, _>(..&self.me.node).map(|(_, record)| record);
        below.map(move |record| (&record.peer, member(record))).chain([(me, standing(self.draining))]).chain(
            self.peers.range::<NodeId, _>(above).map(move |(_, record)| (&record.peer, member(record))),
        )
    }

    /// What is connected has changed: prepare the view that follows from it, or go back to ours.
    fn retarget(&mut self, step: &mut Step<'_>) {
        let back = self.view.len() == self.peers.len() + 1 && self.target().eq(self.view.iter());
        if back && self.lost.is_empty() {
            if self.round.take().is_some() && !self.rules.breaks(Mutation::QuietCancel) {
                // above the round's version, or the members that acknowledged it would take it for old
                self.announced = step.versions.next();
                self.wake_members(step);
            }
            return self.republish(step);
        }
        let skips =
            self.rules.breaks(Mutation::NoPrepareGrow) || self.rules.breaks(Mutation::NoPrepareShrink);
        let grows = skips && self.target().any(|(peer, _)| !self.view.contains(peer));
        let skipped = if grows { Mutation::NoPrepareGrow } else { Mutation::NoPrepareShrink };
        let awaiting: BTreeSet<Peer> = self
            .view
            .peers()
            .filter(|peer| self.peers.get(&peer.node).is_some_and(|r| r.peer == **peer))
            .filter(|_| !self.rules.breaks(skipped))
            .cloned()
            .collect();
        awaiting.iter().for_each(|peer| step.effects.transmit(peer));
        let retry_at = step.now.saturating_add(self.rpc_timeout);
        let ready = awaiting.is_empty();
        self.round = Some(Round { awaiting, version: step.versions.next(), retry_at });
        self.republish(step);
        if ready {
            self.commit(step);
        }
    }

    /// Everyone who counted on the old view knows that we leave it: take the new one.
    fn commit(&mut self, step: &mut Step<'_>) {
        if self.round.take().is_none() {
            return;
        }
        let old = Arc::new(self.published.clone());
        let members: Vec<_> = self.target().map(|(peer, standing)| (peer.clone(), standing)).collect();
        self.view = View::of_sorted(members.into_iter());
        self.hash = hash_of(&self.view, &self.ring, self.rules);
        // taken before any shard is locked: whatever a shard says from its gather on is newer
        let version = step.versions.next();
        self.announced = version;
        let lost = std::mem::take(&mut self.lost);
        self.published.view = self.view.clone();
        self.published.hash = self.hash;
        self.published.ring = Ring::of(self.view.ring_nodes(), self.ring);
        self.published.routers = self
            .published
            .ring
            .nodes()
            .iter()
            .map(|node| self.view.peer_of(node).unwrap_or(&self.me).clone())
            .collect();

        let cut = self.gather.is_some();
        for record in self.peers.values_mut() {
            let was_owed = record.is_owed() && !(cut && self.rules.breaks(Mutation::GatherCut));
            let full =
                !std::mem::replace(&mut record.member, true) || lost.contains(&record.peer) || was_owed;
            let full = full && !self.rules.breaks(Mutation::DeltaAlways);
            let kind = if full { DataKind::Snapshot } else { DataKind::Delta };
            record.transfer = Some(Box::new(Transfer::new(version, kind, was_owed, step.now)));
            record.repair = None;
        }
        self.agreeing = self.peers.values().filter(|record| self.agrees(record)).count();
        self.published.status = Status::Rebalancing;
        self.publish_connections();
        let full = self.published.ring.nodes().iter().map(|node| self.is_full(node)).collect();
        let plan = Arc::new(GatherPlan { old, new: Arc::new(self.published.clone()), full });
        self.gather = Some(Gather { plan: plan.clone(), shard: 0 });
        // the new ring is there for all to read before the first shard is gathered
        step.publish(&self.published);
        step.effects.work();
        step.consequences.gather = Some(plan);
    }

    fn is_full(&self, node: &NodeId) -> bool {
        self.peers
            .get(node)
            .and_then(|record| record.transfer.as_ref())
            .is_some_and(|transfer| transfer.kind == DataKind::Snapshot)
    }

    /// All groups are gathered: whoever gets nothing is owed nothing.
    pub(super) fn end_gather(&mut self, step: &mut Step<'_>) {
        self.gather = None;
        for record in self.peers.values_mut() {
            let Some(transfer) = &mut record.transfer else { continue };
            transfer.complete = true;
            if transfer.groups.is_empty() && !transfer.was_owed {
                record.transfer = None;
            }
        }
        self.wake_members(step);
        self.republish(step);
    }

    fn wake_members(&self, step: &mut Step<'_>) {
        for record in self.peers.values() {
            step.effects.transmit(&record.peer);
        }
    }

    /// Works out what is published from the state, and publishes it if it differs.
    fn republish(&mut self, step: &mut Step<'_>) {
        let before = (self.published.status, self.published.settled, self.published.draining);
        self.published.status = self.status();
        self.published.settled = self.settled;
        self.published.draining = self.draining;
        let superseded = std::mem::replace(&mut self.published.superseded, self.superseded);
        let connections = self.publish_connections();
        let after = (self.published.status, self.published.settled, self.published.draining);
        if connections || before != after || superseded != self.superseded {
            step.publish(&self.published);
            if after.0 == Status::Ready {
                step.effects.work();
                step.became_ready = true;
            }
        }
    }

    fn publish_connections(&mut self) -> bool {
        if !std::mem::take(&mut self.connections_stale) {
            return false;
        }
        let now: Vec<Connected> = self
            .peers
            .values()
            .map(|r| Connected { slot: r.slot, peer: r.peer.clone(), suspect: r.suspect })
            .collect();
        let mut slots: Vec<(u32, u32)> = now.iter().zip(0u32..).map(|(c, place)| (c.slot, place)).collect();
        slots.sort_unstable();
        self.published.connected = now.into();
        self.published.slots = slots.into();
        true
    }
}

// Heartbeats.
impl Coordinator {
    /// The digests of what we hold for each router and of what we see of each source are worked out.
    pub(super) fn beat(
        &mut self,
        held: &BTreeMap<NodeId, Digest>,
        seen: &BTreeMap<u32, Digest>,
        step: &mut Step<'_>,
    ) {
        let turn = self.beat_turn();
        for record in self.peers.values_mut() {
            record.seen_digests.swap(0, 1);
            record.seen_digests[1] = Some(seen.get(&record.slot).cloned().unwrap_or_default());
            if turn.as_ref().is_none_or(|turn| turn.contains(&record.peer.node)) {
                record.beat = Some(held.get(&record.peer.node).cloned().unwrap_or_default());
                step.effects.transmit(&record.peer);
            }
        }
    }

    /// Whose turn it is in this heartbeat; `None`: everybody's. All to all would be the square of the cluster,
    /// every time. Where nothing is amiss a heartbeat is only the net under the events, so it may take turns;
    /// where something is (this node is not `Ready`) everybody gets it.
    fn beat_turn(&mut self) -> Option<BTreeSet<NodeId>> {
        if self.peers.len() <= self.beat_peers || !self.is_ready() {
            return None;
        }
        let after = match self.beat_last.take() {
            Some(last) => (Bound::Excluded(last), Bound::Unbounded),
            None => (Bound::Unbounded, Bound::Unbounded),
        };
        let next = self.peers.range(after).map(|(node, _)| node).chain(self.peers.keys());
        let turn: Vec<NodeId> = next.take(self.beat_peers).cloned().collect();
        self.beat_last = turn.last().cloned();
        Some(turn.into_iter().collect())
    }

    pub(super) fn handle_heartbeat(
        &mut self,
        from: &Peer,
        version: u64,
        hash: ViewHash,
        digest: Digest,
        step: &mut Step<'_>,
    ) {
        let (quiet, ours) = (self.is_quiet(), self.hash);
        self.note_agreement(from, Agreement::With { hash, version });
        let Some(record) = self.record(from) else { return };
        let agreed = quiet && record.agreement.is_with(ours);
        if quiet && hash != ours {
            record.disagreements = record.disagreements.saturating_add(1);
            // twice is no race any more; then seldom
            if record.disagreements >= 2 && record.disagreements.is_power_of_two() {
                record.members_due = true;
                step.effects.transmit(from);
            }
        } else {
            record.disagreements = 0;
        }
        let before = record.their_digest.replace(digest.clone());
        if let (true, Some(before), [Some(seen_before), Some(seen)]) = (agreed, &before, &record.seen_digests)
        {
            let buckets = Digest::settled_differences([before, &digest], [seen_before, seen]);
            if !buckets.is_empty() {
                record.repair_request = Some(buckets);
                step.effects.transmit(from);
            }
        }
        self.republish(step);
    }
}

// Outputs.
impl Coordinator {
    /// What this peer must hear next, on this lane. Given once is sent.
    pub(super) fn poll_transmit(&mut self, to: &Peer, lane: Lane, now: Time) -> Option<Outgoing> {
        let message = match lane {
            Lane::Control => self.poll_control(to),
            Lane::Bulk => self.poll_bulk(to, now),
            Lane::Data => None,
        }?;
        Some(Outgoing { lane, message })
    }

    fn poll_control(&mut self, to: &Peer) -> Option<Message> {
        let leaving = self.round.as_ref().filter(|r| r.awaiting.contains(to)).map(|r| r.version);
        let (quiet, announced, hash, draining) = (self.is_quiet(), self.announced, self.hash, self.draining);
        let careless = self.rules.breaks(Mutation::AnnounceOwed);
        let view = &self.view;
        let record = self.peers.get_mut(&to.node).filter(|record| record.peer == *to)?;
        if let Some(by) = record.superseded_by.take() {
            return Some(Message::Superseded { by });
        }
        if draining && !std::mem::replace(&mut record.told_draining, true) {
            return Some(Message::Draining);
        }
        if let Some(round) = record.leaving_ack.take() {
            return Some(Message::LeavingAck { round });
        }
        if let Some(round) = leaving.filter(|round| *round != record.leaving_sent) {
            record.leaving_sent = round;
            return Some(Message::Leaving { round });
        }
        if let Some((round, chunks, complete)) = record.data_ack.take() {
            return Some(Message::DataAck { round, chunks, complete });
        }
        let may_announce = quiet && record.member && (careless || !record.is_owed());
        if may_announce && record.announced != announced {
            record.announced = announced;
            return Some(Message::Announce { version: announced, hash });
        }
        if record.beat.is_some() && may_announce {
            let digest = record.beat.take().unwrap_or_default().to_buckets();
            return Some(Message::Heartbeat { version: announced, hash, draining, digest });
        }
        if std::mem::take(&mut record.members_due) {
            return Some(Message::Members { view: view.clone() });
        }
        if let Some(buckets) = record.repair_request.take() {
            return Some(Message::RepairRequest { hash, buckets });
        }
        None
    }

    fn poll_bulk(&mut self, to: &Peer, now: Time) -> Option<Message> {
        let (limit, bytes, hash) = (self.chunk_groups, self.chunk_bytes, self.hash);
        let record = self.record(to)?;
        if let Some(transfer) = &mut record.transfer
            && let Some(chunk) = transfer.next_chunk(limit, bytes, now)
        {
            return Some(Message::Data {
                round: transfer.round,
                kind: transfer.kind.clone(),
                index: chunk.index,
                last: chunk.last.then_some(hash),
                groups: chunk.groups,
            });
        }
        let repair = record.repair.as_mut()?;
        let chunk = repair.next_chunk(limit, bytes, now)?;
        // nobody acknowledges a repair: a difference that stays is found again
        repair.acknowledge(chunk.index.saturating_add(1), now);
        let (round, kind) = (repair.round, repair.kind.clone());
        if chunk.last {
            record.repair = None;
        }
        Some(Message::Data {
            round,
            kind,
            index: chunk.index,
            last: chunk.last.then_some(hash),
            groups: chunk.groups,
        })
    }
}

/// What a step may use and what it leaves behind.
pub(super) struct Step<'a> {
    pub(super) now: Time,
    pub(super) versions: &'a Counter,
    pub(super) effects: &'a mut Effects,
    pub(super) cell: &'a crate::sync::Cell<Published>,
    pub(super) consequences: Consequences,
    pub(super) became_ready: bool,
}

impl Step<'_> {
    fn publish(&mut self, published: &Published) {
        self.cell.store(published.clone());
        self.effects.changed();
    }
}

fn hash_of(view: &View, ring: &RingConfig, rules: Rules) -> ViewHash {
    if rules.breaks(Mutation::NamesOnlyHash) {
        let anonymous = view.iter().map(|(p, s)| (Peer::new(p.node.clone(), Incarnation::MIN), s));
        return View::new(anonymous).hash(ring);
    }
    if rules.breaks(Mutation::DrainOutsideHash) {
        return View::new(view.peers().map(|p| (p.clone(), Standing::Active))).hash(ring);
    }
    view.hash(ring)
}
