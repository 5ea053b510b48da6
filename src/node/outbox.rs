//! What is on its way to one peer, apart from the view protocol: claims and retractions until they are
//! acknowledged, and the acknowledgements that we owe.

use std::collections::{BTreeMap, VecDeque};

use crate::types::{Group, Peer};

use super::Time;
use super::message::Message;

/// Claims that travel in one message (fewer, if their names are long), and how many messages may be
/// unacknowledged.
const CLAIMS_PER_CALL: usize = 256;
const CALLS_IN_FLIGHT: usize = 32;
/// Retraction batches that may be unacknowledged.
const RETRACTS_IN_FLIGHT: usize = 32;
/// Acknowledgements and "not held" notes that are kept for a peer that does not read; beyond, they are
/// dropped: the peer asks again, and a stale row is told again at its next use.
const MAX_OWED: usize = 4096;
/// Acknowledgements that travel in one message.
const ACKS_PER_MESSAGE: usize = 1024;

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Call {
    claims: Vec<(Group, u64)>,
    sent: Time,
}

/// One peer's.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Outbox {
    pub(crate) peer: Peer,
    pub(crate) slot: u32,
    claims: VecDeque<(Group, u64)>,
    calls: BTreeMap<u64, Call>,
    again: VecDeque<u64>,
    next_call: u64,
    claim_acks: Vec<u64>,
    /// Version, shard, groups.
    retracts: VecDeque<(u64, usize, Vec<Group>)>,
    /// By version: the shard, and when it was sent.
    retracts_in_flight: BTreeMap<u64, (usize, Time)>,
    retract_acks: Vec<u64>,
    not_held: VecDeque<(Group, u64)>,
}

// Getters.
impl Outbox {
    pub(crate) fn new(peer: Peer, slot: u32) -> Self {
        Self {
            peer,
            slot,
            claims: VecDeque::new(),
            calls: BTreeMap::new(),
            again: VecDeque::new(),
            next_call: 1,
            claim_acks: Vec::new(),
            retracts: VecDeque::new(),
            retracts_in_flight: BTreeMap::new(),
            retract_acks: Vec::new(),
            not_held: VecDeque::new(),
        }
    }

    pub(crate) fn has_some(&self) -> bool {
        !self.claim_acks.is_empty()
            || !self.retract_acks.is_empty()
            || !self.again.is_empty()
            || !self.not_held.is_empty()
            || (!self.claims.is_empty() && self.calls.len() < CALLS_IN_FLIGHT)
            || (!self.retracts.is_empty() && self.retracts_in_flight.len() < RETRACTS_IN_FLIGHT)
    }

    /// The sizes of everything that must not grow without bound.
    pub(crate) fn footprint(&self) -> usize {
        self.claims.len()
            + self.calls.values().map(|c| c.claims.len()).sum::<usize>()
            + self.claim_acks.len()
            + self.retracts.len()
            + self.retracts_in_flight.len()
            + self.retract_acks.len()
            + self.not_held.len()
    }
}

// Commands.
impl Outbox {
    pub(crate) fn claim(&mut self, group: Group, version: u64) {
        self.claims.push_back((group, version));
    }

    pub(crate) fn retract(&mut self, version: u64, shard: usize, groups: Vec<Group>) {
        self.retracts.push_back((version, shard, groups));
    }

    pub(crate) fn acknowledge_claims(&mut self, call: u64) {
        if self.claim_acks.len() < MAX_OWED {
            self.claim_acks.push(call);
        }
    }

    pub(crate) fn acknowledge_retract(&mut self, version: u64) {
        if self.retract_acks.len() < MAX_OWED {
            self.retract_acks.push(version);
        }
    }

    pub(crate) fn not_held(&mut self, group: Group, version: u64) {
        if self.not_held.len() < MAX_OWED {
            self.not_held.push_back((group, version));
        }
    }
}

// Inputs.
impl Outbox {
    /// The claims of these calls are in the peer's table.
    pub(crate) fn claims_acknowledged(&mut self, calls: &[u64]) -> Vec<(Group, u64)> {
        let mut claims = Vec::new();
        for call in calls {
            if let Some(done) = self.calls.remove(call) {
                claims.extend(done.claims);
            }
        }
        claims
    }

    /// The shard of a batch that the peer has acknowledged.
    pub(crate) fn retract_acknowledged(&mut self, version: u64) -> Option<usize> {
        self.retracts_in_flight.remove(&version).map(|(shard, _)| shard)
    }

    /// Calls without an answer for `patience` are made again; batches are the shards' to repeat.
    pub(crate) fn handle_timeout(&mut self, now: Time, patience: Time) {
        for (id, call) in &mut self.calls {
            if call.sent.saturating_add(patience) <= now && now > call.sent {
                call.sent = now;
                if !self.again.contains(id) {
                    self.again.push_back(*id);
                }
            }
        }
        // the shard makes the retraction again, under a new version
        self.retracts_in_flight.retain(|_, (_, sent)| sent.saturating_add(patience) > now || now <= *sent);
    }
}

// Outputs.
impl Outbox {
    /// What to say next, with about `bytes` bytes of names; acknowledgements first, they are what the peer waits for.
    pub(crate) fn poll(&mut self, now: Time, bytes: usize) -> Option<Message> {
        if !self.claim_acks.is_empty() {
            let count = self.claim_acks.len().min(ACKS_PER_MESSAGE);
            return Some(Message::ClaimsAck { calls: self.claim_acks.drain(..count).collect() });
        }
        if !self.retract_acks.is_empty() {
            let count = self.retract_acks.len().min(ACKS_PER_MESSAGE);
            return Some(Message::RetractAck { versions: self.retract_acks.drain(..count).collect() });
        }
        while let Some(id) = self.again.pop_front() {
            if let Some(call) = self.calls.get(&id) {
                return Some(Message::Claims { call: id, claims: call.claims.clone() });
            }
        }
        if !self.claims.is_empty() && self.calls.len() < CALLS_IN_FLIGHT {
            let count = within(self.claims.iter().map(|(group, _)| group), CLAIMS_PER_CALL, bytes);
            let claims: Vec<_> = self.claims.drain(..count).collect();
            let call = self.next_call;
            self.next_call += 1;
            self.calls.insert(call, Call { claims: claims.clone(), sent: now });
            return Some(Message::Claims { call, claims });
        }
        if self.retracts_in_flight.len() < RETRACTS_IN_FLIGHT
            && let Some((version, shard, groups)) = self.retracts.pop_front()
        {
            self.retracts_in_flight.insert(version, (shard, now));
            return Some(Message::Retract { version, groups });
        }
        if !self.not_held.is_empty() {
            let count = within(self.not_held.iter().map(|(group, _)| group), MAX_OWED, bytes);
            return Some(Message::NotHeld { groups: self.not_held.drain(..count).collect() });
        }
        None
    }
}

/// What a name costs in a message besides its bytes, with the version beside it.
const NAME_REST: usize = 16;

/// How many of these names travel in one message: no more than `max`, and about `bytes` bytes; one at least.
pub(super) fn within<'a>(groups: impl Iterator<Item = &'a Group>, max: usize, bytes: usize) -> usize {
    let mut size = 0usize;
    let fits = |group: &&Group| {
        size = size.saturating_add(group.as_bytes().len() + NAME_REST);
        size <= bytes
    };
    groups.take(max).take_while(fits).count().max(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::{Incarnation, NodeId};

    // caught by: a batch that is cut by its number alone (a transport with a limit would drop it, for ever)
    #[test]
    fn long_names_travel_in_several_messages() {
        let peer = Peer::new(NodeId::new("b").unwrap(), Incarnation::MIN);
        let mut outbox = Outbox::new(peer, 1);
        let long = |number: usize| Group::from(format!("{number:01000}"));
        for number in 0..10 {
            outbox.claim(long(number), number as u64);
            outbox.not_held(long(number), number as u64);
        }
        let mut sizes = Vec::new();
        while let Some(message) = outbox.poll(Time::ZERO, 3100) {
            sizes.push(match message {
                Message::Claims { claims, .. } => claims.len(),
                Message::NotHeld { groups } => groups.len(),
                other => panic!("{other:?}"),
            });
        }
        assert_eq!(sizes, [3, 3, 3, 1, 3, 3, 3, 1]);
        let one = [long(1)];
        assert_eq!(within(one.iter(), 256, 10), 1, "a name longer than that travels alone");
    }
}
