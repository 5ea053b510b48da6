//! One node's part in one group: the Raft library with its log, driven by ticks and messages.

use std::collections::{BTreeMap, BTreeSet};

use raft::eraftpb::{ConfChange, Entry, EntryType, Message};
use raft::{RawNode, SnapshotStatus, StateRole};
use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::log::Log;
use super::message::{self, GroupId, RaftMessage, change_type};
use super::raft_id;
use super::state::{Change, Logged, Member, Role, State};
use crate::cache::partition::PartitionId;
use crate::types::Peer;

/// In ticks: how long nothing is heard from a leader before an election, at least and less than; how often it speaks.
const ELECTION: (usize, usize) = (10, 20);
const HEARTBEAT: usize = 3;
/// How many bytes of entries one message has at most, about, and how many messages may be under way to one node.
const MESSAGE_BYTES: u64 = 64 << 10;
const IN_FLIGHT: usize = 64;
/// A node that is so many entries behind does not yet get a vote.
const CAUGHT_UP: u64 = 64;

pub(super) struct Group {
    pub(super) id: GroupId,
    /// Those with whom it was founded: until it is established nobody else is taken in.
    pub(super) founders: Vec<Member>,
    me: Member,
    seed: u64,
    raw: RawNode<Log>,
    /// Numbers of those who have spoken to us, for answers before the log has told who they are.
    heard: BTreeMap<u64, Member>,
}

impl std::fmt::Debug for Group {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let raft = &self.raw.raft;
        write!(f, "{:?} term {} leader {} {:?}", self.id, raft.term, raft.leader_id, raft.state)
    }
}

/// What came of driving it.
#[derive(Debug, Default)]
pub(super) struct Progress {
    pub(super) messages: Vec<(Peer, RaftMessage)>,
    /// Partitions about which something was decided.
    pub(super) decided: BTreeSet<PartitionId>,
    /// Everything may have changed.
    pub(super) restored: bool,
}

impl Group {
    /// Begins a group: this node is its only voter.
    pub(super) fn found(me: &Member, id: GroupId, founders: Vec<Member>, seed: u64) -> Option<Self> {
        let mut state = State::default();
        state.member(me, Role::Voter);
        let mut group = Self::new(me, id, founders, seed, Log::born(raft_id(me), state), 1)?;
        group.raw.campaign().ok()?;
        Some(group)
    }

    /// Waits to be taken in.
    pub(super) fn join(me: &Member, id: GroupId, founders: Vec<Member>, seed: u64) -> Option<Self> {
        Self::new(me, id, founders, seed, Log::default(), 0)
    }

    fn new(
        me: &Member,
        id: GroupId,
        founders: Vec<Member>,
        seed: u64,
        log: Log,
        applied: u64,
    ) -> Option<Self> {
        let config = raft::Config {
            id: raft_id(me),
            election_tick: ELECTION.0,
            heartbeat_tick: HEARTBEAT,
            min_election_tick: ELECTION.0,
            max_election_tick: ELECTION.1,
            applied,
            max_size_per_msg: MESSAGE_BYTES,
            max_inflight_msgs: IN_FLIGHT,
            check_quorum: true,
            pre_vote: true,
            ..raft::Config::default()
        };
        let logger = slog::Logger::root(slog::Discard, slog::o!());
        let raw = RawNode::new(&config, log, &logger).ok()?;
        let mut group = Self { id, founders, me: me.clone(), seed, raw, heard: BTreeMap::new() };
        group.spread();
        Some(group)
    }

    // ---- getters

    pub(super) fn state(&self) -> &State {
        &self.raw.store().state
    }

    pub(super) fn applied(&self) -> u64 {
        self.raw.store().applied.0
    }

    pub(super) fn is_leader(&self) -> bool {
        self.raw.raft.state == StateRole::Leader
    }

    /// Whether somebody leads, as far as this node knows.
    pub(super) fn has_leader(&self) -> bool {
        self.raw.raft.leader_id != raft::INVALID_ID
    }

    pub(super) fn voters(&self) -> Vec<Member> {
        let log = self.raw.store();
        log.conf().voters.iter().filter_map(|id| log.state.members.get(id).cloned()).collect()
    }

    pub(super) fn term(&self) -> u64 {
        self.raw.raft.term
    }

    pub(super) fn footprint(&self) -> usize {
        self.raw.store().len() + self.heard.len() + self.state().configs.len()
    }

    // ---- inputs

    pub(super) fn tick(&mut self) {
        self.raw.tick();
        self.spread();
    }

    pub(super) fn step(&mut self, from: &Member, message: RaftMessage) {
        let (id, mine) = (raft_id(from), raft_id(&self.me));
        if self.heard.len() > 4096 {
            self.heard.clear();
        }
        self.heard.insert(id, from.clone());
        if let Some(message) = message.into_library(id, mine, &self.raw.raft) {
            // what it does not want to hear now will be said again
            let _ = self.raw.step(message);
        }
        self.spread();
    }

    /// What was under way to this peer is lost.
    pub(super) fn lost(&mut self, peer: &Peer) {
        let of_peer = |(_, member): &(&u64, &Member)| member.peer == *peer;
        let ids: Vec<_> = self.state().members.iter().filter(of_peer).map(|(id, _)| *id).collect();
        for id in ids {
            if self.is_leader() && self.raw.raft.prs().get(id).is_some() {
                self.raw.report_snapshot(id, SnapshotStatus::Failure);
                self.raw.report_unreachable(id);
            }
        }
    }

    /// Asks for changes, by way of the leader. Nobody says whether it arrives.
    pub(super) fn propose(&mut self, changes: Vec<Change>) {
        let entry = message::to_entry(&Logged::Changes(changes));
        let _ = self.raw.propose(entry.context.to_vec(), entry.data.to_vec());
    }

    /// Takes a wish for decided: a broken rule.
    pub(super) fn decide_alone(&mut self, change: Change) -> Option<PartitionId> {
        let partition = change.partition;
        self.raw.mut_store().state.change(change).then_some(partition)
    }

    /// What the leader has to do for the group: one step at a time.
    pub(super) fn tend(&mut self, members: &BTreeSet<Member>, voters: usize) {
        if !self.is_leader() || self.raw.raft.has_pending_conf() {
            return;
        }
        if let Some(logged) = self.next_step(members, voters) {
            let entry = message::to_entry(&logged);
            let _ = match logged {
                Logged::Member(peer, role) => {
                    let mut change = ConfChange::default();
                    change.set_change_type(change_type(role));
                    change.node_id = raft_id(&peer);
                    self.raw.propose_conf_change(entry.context.to_vec(), change)
                }
                _ => self.raw.propose(Vec::new(), entry.data.to_vec()),
            };
        }
    }

    fn next_step(&self, members: &BTreeSet<Member>, wanted: usize) -> Option<Logged> {
        let log = self.raw.store();
        let voters: BTreeSet<_> = log.conf().voters.iter().copied().collect();
        let welcome = |peer: &&Member| log.state.established || self.founders.contains(peer);
        let known = |peer: &Member| log.state.members.contains_key(&raft_id(peer));
        // a number that two peers share cannot be in the group twice: the second one waits until the first has gone
        if let Some(new) = members.iter().filter(welcome).find(|peer| !known(peer)) {
            return Some(Logged::Member(new.clone(), Role::Learner));
        }
        let live = |id: &u64| log.state.members.get(id).is_some_and(|peer| members.contains(peer));
        let ready = |id: &u64| {
            let progress = self.raw.raft.prs().get(*id);
            live(id)
                && progress.is_some_and(|p| {
                    p.recent_active && p.matched + CAUGHT_UP >= self.raw.raft.raft_log.committed
                })
        };
        let spare = log.conf().learners.iter().find(|id| ready(id)).and_then(|id| log.state.members.get(id));
        let dead = |id: &&u64| !live(id) && **id != raft_id(&self.me);
        let gone = voters.iter().find(dead).and_then(|id| log.state.members.get(id));
        // A voter that has gone is replaced: first the new one comes, then the old one goes. The other way round, one that
        // only seems to have gone would be missed if another one died in between.
        let alive = voters.iter().filter(|id| live(id)).count();
        let replaces = gone.is_some() && voters.len() == wanted && alive + 1 > voters.len().div_ceil(2);
        if (voters.len() < wanted || replaces)
            && let Some(spare) = spare
        {
            return Some(Logged::Member(spare.clone(), Role::Voter));
        }
        if voters.len() >= wanted && !log.state.established {
            // once: what is not applied yet may be just this
            let idle = self.raw.raft.raft_log.last_index() == log.applied.0;
            return idle.then_some(Logged::Established);
        }
        if voters.len() > wanted
            && let Some(gone) = gone
        {
            return Some(Logged::Member(gone.clone(), Role::Gone));
        }
        if voters.len() > wanted
            && let Some(extra) = voters.iter().rev().find(|id| **id != raft_id(&self.me))
        {
            return log.state.members.get(extra).map(|peer| Logged::Member(peer.clone(), Role::Learner));
        }
        let gone = log.conf().learners.iter().find(dead).and_then(|id| log.state.members.get(id));
        gone.map(|peer| Logged::Member(peer.clone(), Role::Gone))
    }

    /// The library draws its election timeouts at random; ours follow from the seed, so that a run can be repeated.
    fn spread(&mut self) {
        let raft = &mut self.raw.raft;
        let drawn = xxh3_64_with_seed(&raft.term.to_le_bytes(), self.seed ^ raft.id);
        let timeout = ELECTION.0 + (drawn % (ELECTION.1 - ELECTION.0) as u64) as usize;
        if raft.randomized_election_timeout() != timeout {
            raft.set_randomized_election_timeout(timeout);
        }
    }

    // ---- outputs

    /// Carries out all that the library wants done.
    pub(super) fn advance(&mut self, progress: &mut Progress) {
        while self.raw.has_ready() {
            let mut ready = self.raw.ready();
            self.send(ready.take_messages(), progress);
            let snapshot = ready.snapshot();
            if !snapshot.is_empty_snapshot() {
                let snapshot = snapshot.clone();
                let state = message::State::decode(&snapshot.data).unwrap_or_default();
                self.raw.mut_store().restore(&snapshot, state);
                progress.restored = true;
            }
            self.raw.mut_store().append(ready.entries());
            if let Some(hard) = ready.hs() {
                self.raw.mut_store().set_hard(hard.clone());
            }
            self.apply(ready.take_committed_entries(), progress);
            self.send(ready.take_persisted_messages(), progress);
            let mut light = self.raw.advance(ready);
            if let Some(commit) = light.commit_index() {
                self.raw.mut_store().set_commit(commit);
            }
            self.send(light.take_messages(), progress);
            self.apply(light.take_committed_entries(), progress);
            self.raw.advance_apply();
            self.spread();
        }
        self.raw.mut_store().compact();
    }

    fn apply(&mut self, entries: Vec<Entry>, progress: &mut Progress) {
        for entry in entries {
            let logged = message::from_entry(&entry);
            if entry.get_entry_type() == EntryType::EntryConfChange
                && let Some(Logged::Member(peer, role)) = &logged
            {
                let mut change = ConfChange::default();
                change.set_change_type(change_type(*role));
                change.node_id = raft_id(peer);
                if let Ok(conf) = self.raw.apply_conf_change(&change) {
                    self.raw.mut_store().set_conf(conf);
                    self.raw.mut_store().state.member(peer, *role);
                }
            }
            let log = self.raw.mut_store();
            match logged {
                Some(Logged::Changes(changes)) => {
                    for change in changes {
                        let partition = change.partition;
                        if log.state.change(change) {
                            progress.decided.insert(partition);
                        }
                    }
                }
                Some(Logged::Established) => log.state.established = true,
                Some(Logged::Member(..) | Logged::Nothing) | None => {}
            }
            log.applied = (entry.index, entry.term);
        }
    }

    fn send(&self, messages: Vec<Message>, progress: &mut Progress) {
        for message in messages {
            let id = message.to;
            let Some(to) = self.state().members.get(&id).or_else(|| self.heard.get(&id)) else { continue };
            let to = to.peer.clone();
            progress.messages.extend(RaftMessage::from_library(message).map(|message| (to, message)));
        }
    }
}

trait Emptiness {
    fn is_empty_snapshot(&self) -> bool;
}

impl Emptiness for raft::eraftpb::Snapshot {
    fn is_empty_snapshot(&self) -> bool {
        self.get_metadata().index == 0
    }
}
