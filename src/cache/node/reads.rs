//! Reads that others than the primary may answer: by any active owner, or by a majority of them.

use std::time::Duration;

use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::cache::config::ReadMode;
use crate::cache::error::CacheError;
use crate::cache::operation::{Operation, Reply};
use crate::cache::partition::PartitionId;
use crate::cache::replica::{Coverage, Mutation};
use crate::transport::Lane;
use crate::types::Peer;

use super::copies::Replica;
use super::message::CacheMessage;
use super::pending::State;
use super::quorum::{self, Quorum, Verdict};
use super::{CacheNode, read_copy};

impl CacheNode {
    pub(super) fn attempt_local(&mut self, id: u64, now: Duration) {
        let Some(pending) = self.pending.get(id) else { return };
        let Some(replica) = self.replica(pending.partition) else { return };
        let covered =
            matches!(self.covers(replica, &pending.options.at_least), None | Some((Coverage::Yes, _)));
        if let Operation::Read(read) = &pending.operation
            && (replica.is_active() || replica.serving().is_some())
            && covered
        {
            let result = read_copy(replica, read);
            self.finish(id, result);
            return;
        }
        // another owner once; a session's write is surely at the primary, and after a refusal so is the answer
        let near = match pending.attempts == 1 && pending.options.at_least.is_empty() {
            true => self.owner_to_ask(replica),
            false => None,
        };
        match near.and_then(|owner| Some((self.peers.life_of(&owner)?, owner))) {
            Some((life, owner)) => self.forward(id, owner, life, false, now),
            None => self.attempt_primary(id, now),
        }
    }

    /// The owner that this node asks for what any owner may answer: not the same for all nodes, so that they share the
    /// work, and always the same for one.
    fn owner_to_ask(&self, replica: &Replica) -> Option<Peer> {
        let owners = replica.config()?.owners.iter();
        let near = |owner: &&Peer| {
            let both = [self.me.node.as_bytes(), &[0], owner.node.as_bytes()].concat();
            xxh3_64_with_seed(&both, 0)
        };
        owners.filter(|owner| self.peers.is_up(owner)).min_by_key(near).cloned()
    }

    pub(super) fn attempt_quorum(&mut self, id: u64, now: Duration) {
        let Some(pending) = self.pending.get(id) else { return };
        let Some(replica) = self.replica(pending.partition) else { return };
        let mut quorum = Quorum::default();
        quorum.hasty = self.rules.breaks(Mutation::OneCopyIsQuorum);
        let known = replica.config();
        if let Some(known) = known {
            quorum.learn(&known.epoch, &known.owners);
        }
        // who knows nobody asks those who should know
        let wanted = self.place(pending.partition).and_then(|place| self.wanted.get(place));
        let ask: Vec<Peer> = match known {
            Some(_) => Vec::new(),
            None => wanted.into_iter().flatten().filter(|peer| self.peers.is_up(peer)).cloned().collect(),
        };
        self.pending.enter(id, State::Quorum(Box::new(quorum)), None);
        self.ask_owners(id, ask, now);
        self.advance_quorum(id, now);
    }

    /// Asks whoever has to be asked, and ends the read if it is decided.
    pub(super) fn advance_quorum(&mut self, id: u64, now: Duration) {
        loop {
            let Some(pending) = self.pending.get(id) else { return };
            let State::Quorum(quorum) = &pending.state else { return };
            match quorum.verdict() {
                Verdict::Decided { reply, covers, behind, primary } => {
                    self.repair(pending.partition, &primary, behind, now);
                    self.decided(id, reply, covers, now);
                    return;
                }
                Verdict::Refused(error) => {
                    self.finish(id, Err(error));
                    return;
                }
                Verdict::Open { ask, got, need, waiting } => {
                    let ask: Vec<Peer> = ask
                        .into_iter()
                        .filter(|owner| *owner == self.me || self.peers.is_up(owner))
                        .collect();
                    if ask.is_empty() && !waiting {
                        self.pause(id, CacheError::NoQuorum { got, need }, now);
                        return;
                    }
                    if ask.is_empty() {
                        return;
                    }
                    self.ask_owners(id, ask, now);
                }
            }
        }
    }

    fn ask_owners(&mut self, id: u64, owners: Vec<Peer>, now: Duration) {
        let Some(pending) = self.pending.get(id) else { return };
        let partition = pending.partition;
        let options = pending.forwarded(now, false);
        let operation = pending.operation.clone();
        for owner in owners {
            self.pending.change_quorum(id, |quorum| quorum.ask(&owner));
            if owner == self.me {
                let Operation::Read(read) = &operation else { continue };
                if let Some(copy) = self.own_copy(partition, read, &options.at_least) {
                    self.pending.change_quorum(id, |quorum| {
                        quorum.hear(&owner, copy);
                    });
                }
            } else {
                let (operation, options) = (operation.clone(), options.clone());
                let message =
                    CacheMessage::Forward { request: id, partition, operation, options, epoch: None };
                self.send(owner, Lane::Control, message);
            }
        }
    }

    fn decided(&mut self, id: u64, reply: Reply, covers: Option<bool>, now: Duration) {
        let Some(pending) = self.pending.get_mut(id) else { return };
        let version = pending.options.at_least.last().cloned();
        match (version, covers) {
            (Some(version), Some(false)) => {
                let partition = pending.partition;
                self.finish(id, Err(CacheError::WriteLost { partition, version }));
            }
            // an asynchronous write that the majority has not yet; the primary has it
            (Some(_), None) => {
                pending.options.read_mode = ReadMode::Primary;
                let partition = pending.partition;
                self.pause(id, CacheError::NotActive { partition }, now);
                self.ready.insert(id);
            }
            (None, _) | (Some(_), Some(true)) => self.finish(id, Ok(reply)),
        }
    }

    /// Has the owners that were behind brought forward. The reader writes nothing itself: what one owner has outside the
    /// stream could outlive a takeover that has lost it.
    fn repair(&mut self, partition: PartitionId, primary: &Peer, behind: Vec<Peer>, now: Duration) {
        for owner in behind {
            if *primary == self.me {
                self.bring_forward(partition, &owner, now);
            } else if self.peers.is_up(primary) {
                self.send(primary.clone(), Lane::Control, CacheMessage::Nudge { partition, owner });
            }
        }
    }

    /// This node serves the partition, and the owner is behind.
    pub(super) fn bring_forward(&mut self, partition: PartitionId, owner: &Peer, now: Duration) {
        if let Some(place) = self.place(partition) {
            self.with(place, now, |replica, given| replica.handle_nudge(owner, given));
        }
    }

    pub(super) fn handle_copy(&mut self, from: &Peer, request: u64, copy: quorum::Copy, now: Duration) {
        let Some(pending) = self.pending.get_mut(request) else { return };
        let State::Quorum(quorum) = &mut pending.state else { return };
        if quorum.hear(from, copy) {
            self.advance_quorum(request, now);
        }
    }
}
