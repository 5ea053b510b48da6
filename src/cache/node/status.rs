//! What a node says about itself: partitions, readiness, what is left to hand over, what must hold.

use crate::cache::partition::PartitionId;
use crate::cache::replica::OwnerState;
use crate::cache::store::Store;
use crate::types::Peer;

use super::CacheNode;
use super::copies::Replica;
use super::effect::{PartitionStatus, Readiness};
use super::memory::Memory;

impl CacheNode {
    /// One partition, as this node sees it; all of it `Absent` for one of another shard.
    pub fn status(&self, partition: PartitionId) -> PartitionStatus {
        let place = self.place(partition);
        let replica = place.and_then(|place| self.replicas.get(place));
        let known = replica.and_then(Replica::config);
        let state = replica.map_or(OwnerState::Absent, Replica::state);
        let held = replica.filter(|_| state != OwnerState::Absent).map(Replica::store);
        let serving = replica.is_some_and(|replica| replica.serving().is_some());
        let behind = replica.and_then(Replica::behind);
        PartitionStatus {
            partition,
            state,
            serving,
            epoch: known.map(|known| known.epoch.clone()),
            primary: known.map(|known| known.epoch.primary.clone()),
            owners: known.map(|known| known.owners.clone()).unwrap_or_default(),
            wanted: place.and_then(|place| self.wanted.get(place)).cloned().unwrap_or_default(),
            records: held.map_or(0, Store::len),
            bytes: held.map_or(0, Store::bytes),
            lag: behind.as_ref().map(|behind| behind.iter().map(|(_, writes)| *writes).max().unwrap_or(0)),
            behind: behind.into_iter().flatten().map(|(peer, _)| peer).collect(),
        }
    }

    /// Whether every partition has its full number of active owners. Visits all partitions of the shard.
    pub fn readiness(&self) -> Readiness {
        let mut readiness = Readiness {
            unknown: self.peers.unknown().cloned().collect(),
            differs: self.peers.differing().cloned().collect(),
            nodes: u32::try_from(self.peers.participants().count()).unwrap_or(u32::MAX),
            ..Readiness::default()
        };
        for (place, partition) in self.shard.partitions(self.config.partitions).enumerate() {
            readiness.partitions += 1;
            let (Some(replica), Some(wanted)) = (self.replicas.get(place), self.wanted.get(place)) else {
                continue;
            };
            let lives = |peer: &Peer| *peer == self.me || self.members.up.contains(peer);
            let serves = |primary: &Peer| match *primary == self.me {
                true => replica.serving().is_some(),
                false => self.members.live.contains(primary) && lives(primary),
            };
            let known = replica.config().filter(|known| serves(&known.epoch.primary));
            readiness.served += u32::from(known.is_some());
            let whole = known.is_some_and(|known| {
                !wanted.is_empty() && known.owners.iter().filter(|owner| lives(owner)).count() >= wanted.len()
            });
            if whole && self.bears_a_crash() {
                readiness.complete += 1;
            } else if readiness.missing.len() < Readiness::NAMED {
                readiness.missing.push(partition);
            }
        }
        readiness
    }

    /// Whether nothing is left to hand over after [`CacheNode::drain`]. A node that holds records and has nobody to take
    /// them is not drained: how long it waits for somebody is for the caller to say.
    pub fn is_drained(&self) -> bool {
        let taker = self.has_taker();
        let done = |replica: &Replica| {
            replica.state() == OwnerState::Absent || (!taker && replica.store().is_empty())
        };
        self.closed || (self.draining && self.replicas.iter().all(done))
    }

    /// Whether it drains, holds records, and knows that nobody will take them: everybody in the view has said whether it
    /// takes part, and none that does stays.
    pub fn has_no_taker(&self) -> bool {
        let keeps = |replica: &Replica| replica.state() != OwnerState::Absent && !replica.store().is_empty();
        let nobody = self.draining && self.members.complete && !self.has_taker();
        !self.closed && nobody && self.replicas.iter().any(keeps)
    }

    fn has_taker(&self) -> bool {
        let stays = |peer: &Peer| !self.members.draining.contains(peer) && *peer != self.me;
        self.members.live.iter().any(stays)
    }

    /// How many operations of this node have not ended, and how many of others.
    pub fn in_flight(&self) -> (usize, usize) {
        (self.pending.len(), self.served.len())
    }

    /// How many entries all queues, maps and tables have together, copies apart: must not grow without bound.
    pub fn footprint(&self) -> usize {
        let remembered: usize = self.memories.values().map(Memory::len).sum();
        let calls = self.pending.len() + self.served.len() + self.ready.len() + remembered;
        #[cfg(feature = "consensus")]
        let calls = calls + self.strong.as_ref().map_or(0, |strong| strong.len());
        calls + self.effects.len() + self.alarms.len() + self.peers.len()
    }

    /// Checks all parts; meant for tests, it visits every partition.
    ///
    /// # Errors
    /// What does not hold.
    pub fn check_invariants(&self) -> Result<(), String> {
        if self.closed {
            return Ok(());
        }
        for (place, partition) in self.shard.partitions(self.config.partitions).enumerate() {
            let Some(replica) = self.replicas.get(place) else {
                return Err(format!("{partition} has no replica"));
            };
            let sound = replica.check_invariants();
            sound.map_err(|broken| format!("partition {partition} of {}: {broken}", self.me))?;
            if replica.poll_timeout() != self.alarm_of.get(place).copied().flatten() {
                return Err(format!("the alarm of partition {partition} of {} is not set", self.me));
            }
        }
        let under_way: usize = self.memories.values().map(Memory::under_way).sum();
        if under_way != self.served.len() {
            return Err(format!("{} operations of others, {under_way} remembered", self.served.len()));
        }
        self.pending.check().map_err(|broken| format!("operations of {}: {broken}", self.me))
    }

    #[inline]
    pub(super) fn debug_check(&self) {
        #[cfg(debug_assertions)]
        if self.replicas.len() <= 32 {
            let checked = self.check_invariants();
            debug_assert!(checked.is_ok(), "{}", checked.err().unwrap_or_default());
        }
    }
}
