//! What the consensus decides, as a state machine: equal commands in equal order give equal states on every node.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::message::MAX_NUMBER;
use super::raft_id;
use crate::cache::partition::PartitionId;
use crate::cache::version::Epoch;
use crate::types::Peer;

/// One opening of the cache on one life of a node: what is a member of a group. A cache that is closed and opened again
/// has lost its log and its vote as if the node had restarted.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub struct Member {
    /// The node.
    pub peer: Peer,
    /// Which opening of the cache there.
    pub opening: u32,
}

/// How many owners a partition may have in one config: the most replicas that are allowed, and those that come and go.
pub(super) const MAX_OWNERS: usize = 64;

/// Who serves and who keeps a partition: decided.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Decided {
    /// The epoch and its primary. The counter is one higher in each config of the partition, so that no two share it.
    pub epoch: Epoch,
    /// Who keeps the partition, the primary first.
    pub owners: Vec<Peer>,
    /// The epoch from which on it began empty: its first one, or the one in which an operator accepted the loss.
    pub born: u64,
}

impl Decided {
    /// Whether this peer keeps the partition.
    pub fn has(&self, peer: &Peer) -> bool {
        self.owners.contains(peer)
    }

    /// Whether what came over the wire can be one.
    pub(super) fn is_sound(&self) -> bool {
        let distinct = self.owners.iter().enumerate().all(|(at, owner)| !self.owners[..at].contains(owner));
        self.owners.first() == Some(&self.epoch.primary)
            && self.owners.len() <= MAX_OWNERS
            && distinct
            && self.epoch.counter <= MAX_NUMBER
            && (1..=self.epoch.counter).contains(&self.born)
    }
}

/// A wish to change who serves a partition: carried out only if nothing has changed since it was made.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Change {
    /// The partition.
    pub partition: PartitionId,
    /// The epoch that has to be the current one; `None`: there has never been one.
    pub expect: Option<Epoch>,
    /// Who wishes it.
    pub by: Peer,
    /// What should hold then.
    pub config: Decided,
}

impl Change {
    /// What may be decided at all: only the primary takes owners in; an owner may make itself primary, and then only
    /// leaves owners out; a partition begins empty only if it is new or its loss was accepted.
    fn is_allowed(&self, current: Option<&Decided>) -> bool {
        if !self.config.is_sound() || self.expect.as_ref() != current.map(|config| &config.epoch) {
            return false;
        }
        let Some(current) = current else {
            return self.config.epoch.counter == 1 && self.config.born == 1;
        };
        if self.config.epoch.counter != current.epoch.counter.saturating_add(1) {
            return false;
        }
        if self.config.born == self.config.epoch.counter {
            // the operator's word
            return self.by == self.config.epoch.primary;
        }
        let takes_over = self.by == self.config.epoch.primary
            && current.has(&self.by)
            && self.config.owners.iter().all(|owner| current.has(owner));
        let by_primary =
            self.by == current.epoch.primary && self.config.owners.iter().any(|o| current.has(o));
        // a handover goes to somebody who has all of it
        let to_owner = current.has(&self.config.epoch.primary);
        self.config.born == current.born && to_owner && (takes_over || by_primary)
    }
}

/// The part of a node in the group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Role {
    /// It votes.
    Voter,
    /// It is told what is decided.
    Learner,
    /// It has gone.
    Gone,
}

/// One entry of the group's log.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Logged {
    /// A new leader's first entry, and what was refused.
    Nothing,
    /// Changes of partitions, each by itself.
    Changes(Vec<Change>),
    /// The group has all its first voters: from here on it decides.
    Established,
    /// A node comes, goes, or changes its part.
    Member(Member, Role),
}

/// All that is decided.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct State {
    pub(super) established: bool,
    pub(super) configs: BTreeMap<PartitionId, Decided>,
    /// Those who are in the group, by their numbers there.
    pub(super) members: BTreeMap<u64, Member>,
}

impl State {
    /// Carries out one change; whether it was allowed.
    pub(super) fn change(&mut self, change: Change) -> bool {
        let allowed = self.established && change.is_allowed(self.configs.get(&change.partition));
        if allowed {
            self.configs.insert(change.partition, change.config);
        }
        allowed
    }

    pub(super) fn member(&mut self, member: &Member, role: Role) {
        match role {
            Role::Voter | Role::Learner => drop(self.members.insert(raft_id(member), member.clone())),
            Role::Gone => drop(self.members.remove(&raft_id(member))),
        }
    }

    /// Whether what came over the wire can be one.
    pub(super) fn is_sound(&self) -> bool {
        self.configs.values().all(Decided::is_sound)
            && self.members.iter().all(|(id, member)| raft_id(member) == *id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::{Incarnation, NodeId};

    fn peer(name: &str) -> Peer {
        Peer::new(NodeId::new(name).unwrap(), Incarnation::MIN)
    }

    fn config(counter: u64, owners: &[&str], born: u64) -> Decided {
        let owners: Vec<_> = owners.iter().map(|name| peer(name)).collect();
        Decided { epoch: Epoch::new(counter, owners[0].clone()), owners, born }
    }

    fn change(by: &str, expect: Option<(u64, &str)>, config: Decided) -> Change {
        let expect = expect.map(|(counter, primary)| Epoch::new(counter, peer(primary)));
        Change { partition: PartitionId::new(0), expect, by: peer(by), config }
    }

    // caught by: a comparison that is not made, an outsider that takes over, a replica that takes owners in
    #[test]
    fn only_what_follows_from_the_current_config_is_decided() {
        let mut state = State::default();
        let birth = change("a", None, config(1, &["a", "b", "c"], 1));
        assert!(!state.change(birth.clone()), "not before the group is established");
        state.established = true;
        assert!(state.change(birth.clone()));
        assert!(!state.change(birth), "once");
        for counter in [u64::MAX / 2 + 1, u64::MAX] {
            assert!(!config(counter, &["a"], 1).is_sound(), "nobody counts on from {counter}");
        }
        let first = Some((1, "a"));
        assert!(!state.change(change("d", first, config(2, &["d"], 1))), "an outsider");
        assert!(!state.change(change("b", first, config(2, &["b", "d"], 1))), "an owner takes nobody in");
        assert!(!state.change(change("b", first, config(3, &["b"], 1))), "a counter is left out");
        assert!(
            !state.change(change("a", first, config(2, &["d", "a"], 1))),
            "handed to one who has nothing"
        );
        assert!(!state.change(change("a", first, config(2, &["a", "b", "b"], 1))), "an owner twice");
        assert!(state.change(change("b", first, config(2, &["b", "c"], 1))));
        assert!(!state.change(change("c", first, config(2, &["c"], 1))), "too late");
        let second = Some((2, "b"));
        assert!(
            state.change(change("b", second, config(3, &["b", "c", "d"], 1))),
            "the primary takes one in"
        );
        assert!(state.change(change("b", Some((3, "b")), config(4, &["d", "b", "c"], 1))), "and hands over");
        assert!(state.change(change("e", Some((4, "d")), config(5, &["e"], 5))), "by the operator's word");
    }
}
