//! Who serves a partition, decided by a consensus (feature `consensus`, write mode `strong`). Sans-IO.
//!
//! # What is decided
//! For each partition its [`Decided`] config: epoch, primary, owners. Data does not pass through here. A config
//! changes only by [`Change`], which names the epoch that it follows: of several wishes one is decided, the others
//! come to nothing. Everybody in the group hears of every decision, in one order.
//!
//! # The library
//! The consensus is Raft by `raft-rs` (crate `raft`, of TiKV). It does no IO and reads no clock, so it runs in our
//! simulator step by step with everything around it; `openraft`, the other kept one, brings tasks, timers and a runtime
//! of its own, and what is checked would not be what ships. Election timeouts, which the library draws at random, are
//! set from our seed. The library's own encoding (`protobuf` 2, whose parser an advisory warns of) never meets the
//! network: what arrives is ours, checked, and what would make the library panic is refused.
//!
//! # In memory
//! Nothing is on disk. A node that restarts has lost log and vote, and comes back as a new member with a new number
//! (the number is a hash of node, incarnation and opening of the cache); the old number never speaks again. So Raft's promise,
//! that nobody forgets a vote, holds. What does not survive is the loss of a majority of the voters at once: the group
//! then decides nothing any more (`NoQuorum`; partitions whose owners are all there go on), until all nodes restart.
//! There are `2 * replicas - 1` voters, so that the group bears what the data bears: `replicas - 1` crashes at a time.
//! A voter that has gone is replaced by another member, in two steps of one node each, as soon as there is one.
//!
//! # How a group begins
//! Without a disk, nobody can know alone whether a group exists. So a group is founded only when **all of
//! `expected_nodes`** (at least; everybody in the view) are together, none of them knows of an established group, and all
//! have joined the new one:
//!
//! ```text
//!  the lowest of the view              every other one
//!  Found{group, founders}   ────────▶  established: Established, and nothing begins
//!                                      promised to a higher group: Refused
//!  all have joined:         ◀────────  else it promises itself to it for good: Joined
//!  the group begins with it alone as voter; others are added one by one;
//!  with 2 * replicas - 1 voters it is established, and only then decides anything
//! ```
//!
//! Two groups can therefore only be if there are twice as many nodes as `expected_nodes` says, or if so many nodes
//! restart while they are cut off from all who know the group. A founding that comes to nothing (its founder dies) is
//! followed by a higher one, which needs everybody of the one before or a later life of theirs; who has promised itself to
//! the higher one takes no part in the lower, keeps what it knows of it, and returns to it if it turns out that it was
//! established.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

use crate::cache::partition::PartitionId;
use crate::cache::replica::{Mutation, Rules};
use crate::types::{NodeId, Peer};

mod copy;
mod group;
mod lease;
mod log;
mod message;
mod state;
#[cfg(test)]
mod tests;

pub use copy::CopyMessage;
pub(crate) use copy::{CopyEffect, StrongContext, StrongCopy};
use group::{Group, Progress};
pub(crate) use lease::Leases;
pub use message::{ConsensusMessage, GroupId, RaftMessage};
pub use state::{Change, Decided, Member, Role};

/// How often the library's clock ticks.
pub(crate) const TICK: Duration = Duration::from_millis(100);
/// How often what has had no answer is said again.
const AGAIN: Duration = Duration::from_millis(500);

/// A member's number in a group.
fn raft_id(member: &Member) -> u64 {
    let life = [member.peer.incarnation.get(), u64::from(member.opening)].map(u64::to_le_bytes);
    // 0 means nobody
    xxh3_64_with_seed(member.peer.node.as_bytes(), xxh3_64(life.as_flattened())).max(1)
}

/// What the caller has to do.
#[derive(Clone, Debug, PartialEq)]
pub enum ConsensusEffect {
    /// Send a message; messages to one peer stay in order.
    Send {
        /// To whom.
        to: Peer,
        /// What.
        message: ConsensusMessage,
    },
    /// Something new is decided about this partition.
    Decided(PartitionId),
}

#[derive(Debug)]
struct Wish {
    change: Change,
    again: Duration,
}

/// A founding under way, led by this node.
#[derive(Debug)]
struct Founding {
    group: GroupId,
    founders: Vec<Member>,
    joined: BTreeSet<Member>,
    again: Duration,
}

/// One node's part in the consensus of one cache; see the [module](self). Methods are grouped: getters, inputs, commands,
/// outputs.
#[derive(Debug)]
pub struct Consensus {
    me: Member,
    expected: usize,
    voters: usize,
    seed: u64,
    members: BTreeSet<Member>,
    /// Everybody in the view has said whether it takes part.
    complete: bool,
    /// The highest group that this node has promised itself to, and with whom.
    promised: Option<(GroupId, Vec<Member>)>,
    founding: Option<Founding>,
    group: Option<Group>,
    wishes: BTreeMap<PartitionId, Wish>,
    next_tick: Duration,
    effects: VecDeque<ConsensusEffect>,
    rules: Rules,
}

// Getters.
impl Consensus {
    /// A node that knows of no group. `expected` nodes have to be together to found one, which then has so many voters
    /// as bear `replicas - 1` crashes.
    pub fn new(me: Member, expected: usize, replicas: usize, seed: u64, now: Duration) -> Self {
        let members = BTreeSet::from([me.clone()]);
        Self {
            me,
            expected: expected.max(1),
            voters: (2 * replicas.max(1) - 1).min(expected.max(1)),
            seed,
            members,
            complete: false,
            promised: None,
            founding: None,
            group: None,
            wishes: BTreeMap::new(),
            next_tick: now + TICK,
            effects: VecDeque::new(),
            rules: Rules::default(),
        }
    }

    /// The same with a rule broken.
    #[cfg(feature = "testing")]
    pub(crate) fn set_rules(&mut self, rules: Rules) {
        self.rules = rules;
    }

    /// What is decided about a partition, as far as this node has heard.
    pub fn config(&self, partition: PartitionId) -> Option<&Decided> {
        self.active()?.state().configs.get(&partition)
    }

    /// Everything that is decided, as far as this node has heard.
    pub fn configs(&self) -> impl Iterator<Item = (PartitionId, &Decided)> {
        self.active()
            .into_iter()
            .flat_map(|group| group.state().configs.iter().map(|(id, config)| (*id, config)))
    }

    /// Up to which entry of the group's log this node has heard; it only rises.
    pub fn heard(&self) -> u64 {
        self.active().map_or(0, Group::applied)
    }

    /// Whether this node's group is established and has a leader, so that a wish may be decided soon.
    pub fn can_decide(&self) -> bool {
        let led = |group: &Group| group.has_leader() || self.rules.breaks(Mutation::DecideAlone);
        self.active().is_some_and(|group| group.state().established && led(group))
    }

    /// Whether this node is of a group that is established.
    pub fn is_established(&self) -> bool {
        self.group.as_ref().is_some_and(|group| group.state().established)
    }

    /// Whether this node leads the group.
    pub fn is_leader(&self) -> bool {
        self.active().is_some_and(Group::is_leader)
    }

    /// Which group it is, and in which term, as far as this node knows.
    pub fn group(&self) -> Option<(&GroupId, u64)> {
        self.active().map(|group| (&group.id, group.term()))
    }

    /// The voters that are members, and how many of them decide: for `NoQuorum`.
    pub fn quorum(&self) -> (usize, usize) {
        let voters = self.active().map(Group::voters).unwrap_or_default();
        match voters.len() {
            0 => (self.members.len(), self.expected),
            count => (voters.iter().filter(|voter| self.members.contains(*voter)).count(), count / 2 + 1),
        }
    }

    /// Whether it can lose as many members as it is meant to bear: all voters are there, and none is being replaced (one more
    /// voter, of whom one has gone, makes the majority harder to reach).
    pub fn is_whole(&self) -> bool {
        let (there, _) = self.quorum();
        let count = self.active().map_or(0, |group| group.voters().len());
        self.is_established()
            && self.can_decide()
            && count <= self.voters
            && there >= self.voters.min(self.members.len())
    }

    /// What this node has wished and nobody has decided yet.
    pub fn wish(&self, partition: PartitionId) -> Option<&Change> {
        self.wishes.get(&partition).map(|wish| &wish.change)
    }

    /// All that it has wished and nobody has decided yet.
    pub fn wishes(&self) -> impl Iterator<Item = &Change> {
        self.wishes.values().map(|wish| &wish.change)
    }

    /// How many entries all queues, maps and logs have together.
    pub fn footprint(&self) -> usize {
        self.effects.len() + self.wishes.len() + self.group.as_ref().map_or(0, Group::footprint)
    }

    /// The group, unless this node has promised itself to a later one.
    fn active(&self) -> Option<&Group> {
        self.group.as_ref().filter(|group| !self.is_frozen(group))
    }

    fn is_frozen(&self, group: &Group) -> bool {
        !group.state().established
            && self.promised.as_ref().is_some_and(|(promised, _)| *promised != group.id)
    }
}

// Inputs.
impl Consensus {
    /// Who takes part, this node included, and whether everybody in the scope's settled view has said so.
    pub fn handle_members(&mut self, members: &BTreeSet<Member>, complete: bool, now: Duration) {
        self.members.clone_from(members);
        self.members.insert(self.me.clone());
        self.complete = complete;
        self.consider_founding(now);
        self.drive(now);
    }

    /// A link came up: what waits for an answer is said again.
    pub fn handle_peer_up(&mut self, peer: &Peer, now: Duration) {
        let _ = peer;
        if let Some(founding) = &mut self.founding {
            founding.again = now;
        }
        self.wishes.values_mut().for_each(|wish| wish.again = now);
        self.handle_timeout(now);
    }

    /// A link went down.
    pub fn handle_peer_down(&mut self, peer: &Peer, now: Duration) {
        if let Some(group) = &mut self.group {
            group.lost(peer);
        }
        self.drive(now);
    }

    /// Something has arrived.
    pub fn handle_message(&mut self, from: &Peer, message: ConsensusMessage, now: Duration) {
        if !message.is_sound() {
            return;
        }
        match message {
            ConsensusMessage::Found { group, founders } => self.handle_found(from, group, founders),
            ConsensusMessage::Joined { group, opening } => {
                self.handle_joined(Member { peer: from.clone(), opening }, &group);
            }
            ConsensusMessage::Refused { promised } => {
                // nothing is promised by this: the next attempt is a higher one
                let lost = self.founding.as_ref().is_some_and(|founding| founding.group < promised);
                if lost && !self.is_established() {
                    self.founding = None;
                    self.raise(promised.attempt);
                    self.consider_founding(now);
                }
            }
            ConsensusMessage::Established { group } => self.handle_established(group),
            ConsensusMessage::Raft { group, opening, established, message } => {
                self.handle_raft(Member { peer: from.clone(), opening }, group, established, *message);
            }
        }
        self.drive(now);
    }

    /// Time went by.
    pub fn handle_timeout(&mut self, now: Duration) {
        if now >= self.next_tick {
            self.next_tick = now + TICK;
            let frozen = self.active().is_none();
            if let Some(group) = self.group.as_mut().filter(|_| !frozen) {
                group.tick();
            }
        }
        if let Some(founding) = &mut self.founding
            && founding.again <= now
        {
            founding.again = now + AGAIN;
            let missing = founding.founders.iter().filter(|peer| !founding.joined.contains(*peer));
            let (group, founders) = (&founding.group, &founding.founders);
            self.effects.extend(missing.map(|to| ConsensusEffect::Send {
                to: to.peer.clone(),
                message: ConsensusMessage::Found { group: group.clone(), founders: founders.clone() },
            }));
        }
        self.drive(now);
    }
}

// Founding.
impl Consensus {
    /// The attempt from which on this node's own would be higher.
    fn raise(&mut self, attempt: u64) {
        let own = self.promised.as_ref().map_or(0, |(group, _)| group.attempt);
        if attempt > own {
            // a promise to nobody: only higher attempts are answered from here on
            let founders = self.promised.take().map(|(_, founders)| founders).unwrap_or_default();
            self.promised = Some((GroupId { attempt, founder: self.me.clone() }, founders));
        }
    }

    fn consider_founding(&mut self, now: Duration) {
        let names: BTreeSet<&NodeId> = self.members.iter().map(|member| &member.peer.node).collect();
        let together = self.complete && names.len() == self.members.len() && names.len() >= self.expected;
        let first = self.members.first() == Some(&self.me);
        if self.is_established() || !together || !first {
            self.founding = None;
            return;
        }
        let founders: Vec<_> = self.members.iter().cloned().collect();
        let under_way = self.founding.as_ref().is_some_and(|founding| founding.founders == founders);
        let begun = self.active().is_some_and(|group| group.founders == founders && group.has_leader());
        if under_way || begun {
            return;
        }
        let attempt = self.promised.as_ref().map_or(0, |(group, _)| group.attempt).saturating_add(1);
        let group = GroupId { attempt, founder: self.me.clone() };
        self.promised = Some((group.clone(), founders.clone()));
        let joined = BTreeSet::from([self.me.clone()]);
        self.founding = Some(Founding { group, founders, joined, again: now });
        self.begin_if_all_joined();
    }

    fn handle_found(&mut self, from: &Peer, group: GroupId, founders: Vec<Member>) {
        let sound = group.founder.peer == *from
            && founders.contains(&self.me)
            && founders.contains(&group.founder)
            && founders.len() >= self.expected
            && founders.len() <= 4096;
        if !sound {
            return;
        }
        if let Some(own) = self.group.as_ref().filter(|group| group.state().established) {
            let group = own.id.clone();
            return self.send(from, ConsensusMessage::Established { group });
        }
        let current = self.promised.as_ref();
        if let Some((promised, _)) = current.filter(|(promised, _)| *promised > group) {
            let promised = promised.clone();
            return self.send(from, ConsensusMessage::Refused { promised });
        }
        // whoever may know better has to be asked too
        let asked = |old: &Member| founders.iter().any(|new| new.peer.node == old.peer.node);
        let before = self.group.as_ref().map(|group| &group.founders);
        if !current.map(|(_, old)| old).into_iter().chain(before).flatten().all(asked) {
            return;
        }
        self.promised = Some((group.clone(), founders));
        self.founding = None;
        let opening = self.me.opening;
        self.send(from, ConsensusMessage::Joined { group, opening });
    }

    fn handle_joined(&mut self, from: Member, group: &GroupId) {
        if let Some(founding) = self.founding.as_mut().filter(|founding| founding.group == *group) {
            founding.joined.insert(from);
            self.begin_if_all_joined();
        }
    }

    fn begin_if_all_joined(&mut self) {
        let Some(founding) = &self.founding else { return };
        let all = founding.founders.iter().all(|peer| founding.joined.contains(peer));
        let promised = self.promised.as_ref().is_some_and(|(group, _)| *group == founding.group);
        if all && promised && !self.is_established() {
            let (group, founders) = (founding.group.clone(), founding.founders.clone());
            self.founding = None;
            self.group = Group::found(&self.me, group, founders, self.seed);
        }
    }

    /// A group of which somebody knows for certain that it decides: every promise to another one is void, since that
    /// one cannot have begun.
    fn handle_established(&mut self, group: GroupId) {
        if self.is_established() {
            return;
        }
        self.founding = None;
        if self.group.as_ref().is_none_or(|own| own.id != group) {
            self.group = Group::join(&self.me, group.clone(), Vec::new(), self.seed);
        }
        let founders = self.group.as_ref().map(|group| group.founders.clone()).unwrap_or_default();
        self.promised = Some((group, founders));
    }

    fn handle_raft(&mut self, from: Member, id: GroupId, established: bool, message: RaftMessage) {
        let own = self.group.as_ref().is_some_and(|group| group.id == id);
        if !own && self.is_established() {
            // one of the other group that does not know yet
            return;
        }
        if established && !self.is_established() {
            self.handle_established(id.clone());
        } else if !own {
            // a group that has begun: everybody has joined it, so that all before it are over
            let Some((_, founders)) = self.promised.as_ref().filter(|(promised, _)| *promised == id) else {
                return;
            };
            self.group = Group::join(&self.me, id.clone(), founders.clone(), self.seed);
        }
        if let Some(group) = self.group.as_mut() {
            let frozen = !group.state().established
                && self.promised.as_ref().is_some_and(|(promised, _)| *promised != group.id);
            if !frozen && group.id == id {
                group.step(&from, message);
            }
        }
    }

    fn send(&mut self, to: &Peer, message: ConsensusMessage) {
        self.effects.push_back(ConsensusEffect::Send { to: to.clone(), message });
    }
}

// Commands.
impl Consensus {
    /// Wishes a change. It is said again until something about the partition is decided that comes after the epoch which
    /// the change expects: this, or somebody else's, or until it is [withdrawn](Self::withdraw). What was said cannot be
    /// taken back: even a wish that was replaced by another, or withdrawn, may be decided.
    pub fn propose(&mut self, change: Change, now: Duration) {
        self.wishes.insert(change.partition, Wish { change, again: now });
        self.drive(now);
    }

    /// Does not say this wish again.
    pub fn withdraw(&mut self, change: &Change) {
        if self.wish(change.partition) == Some(change) {
            self.wishes.remove(&change.partition);
        }
    }
}

// Outputs.
impl Consensus {
    /// What to do next.
    pub fn poll_effect(&mut self) -> Option<ConsensusEffect> {
        self.effects.pop_front()
    }

    /// When [`Consensus::handle_timeout`] wants to be called.
    pub fn poll_timeout(&self) -> Option<Duration> {
        let tick = self.active().map(|_| self.next_tick);
        let founding = self.founding.as_ref().map(|founding| founding.again);
        tick.into_iter().chain(founding).min()
    }

    /// Everything that follows from what is known now.
    fn drive(&mut self, now: Duration) {
        let (members, voters) = (&self.members, self.voters);
        let frozen = self.active().is_none();
        let Some(group) = self.group.as_mut().filter(|_| !frozen) else { return };
        let mut progress = Progress::default();
        group.advance(&mut progress);
        group.tend(members, voters);
        if group.state().established && group.has_leader() {
            let due = self.wishes.values_mut().filter(|wish| wish.again <= now);
            let mut changes: Vec<_> = due
                .map(|wish| {
                    wish.again = now + AGAIN;
                    wish.change.clone()
                })
                .collect();
            while !changes.is_empty() {
                let rest = changes.split_off(changes.len().min(message::MAX_CHANGES));
                group.propose(std::mem::replace(&mut changes, rest));
            }
        } else if group.state().established && self.rules.breaks(Mutation::DecideAlone) {
            let wishes = self.wishes.values().map(|wish| wish.change.clone());
            progress.decided.extend(wishes.filter_map(|wish| group.decide_alone(wish)));
        }
        group.advance(&mut progress);
        let established = group.state().established;
        let (id, opening) = (group.id.clone(), self.me.opening);
        for (to, message) in progress.messages {
            let message = ConsensusMessage::Raft {
                group: id.clone(),
                opening,
                established,
                message: Box::new(message),
            };
            self.effects.push_back(ConsensusEffect::Send { to, message });
        }
        let state = group.state();
        self.wishes.retain(|partition, wish| {
            let current = state.configs.get(partition).map(|config| &config.epoch);
            current == wish.change.expect.as_ref()
        });
        if progress.restored {
            progress.decided.extend(state.configs.keys());
        }
        self.effects.extend(progress.decided.into_iter().map(ConsensusEffect::Decided));
        if established {
            self.founding = None;
        }
    }
}
