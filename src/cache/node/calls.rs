//! Operations of this node: whom to ask, what an answer means, and when to give up.

use std::time::Duration;

use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::cache::config::{ReadMode, WriteMode};
use crate::cache::error::{Applied, CacheError};
use crate::cache::operation::{Operation, Options, Outcome, Reply, WriteOp};
use crate::cache::partition::PartitionId;
use crate::cache::replica::Coverage;
use crate::cache::version::Epoch;
use crate::transport::Lane;
use crate::types::Peer;

use super::copies::Replica;
use super::message::{CacheMessage, ForwardOptions};
use super::pending::{Doubt, Pending, State};
use super::quorum::{self, Verdict};
use super::{CacheEffect, CacheNode, read_copy};

/// The first pause before an operation is tried again, and the longest. Mostly something changes before and ends it.
const PAUSE: Duration = Duration::from_millis(2);
const LONGEST_PAUSE: Duration = Duration::from_millis(250);
/// The answer of a forwarded operation has to come before the caller gives up: the primary has this much less time.
const WAY_BACK: Duration = Duration::from_millis(500);
/// Above so many bytes a message does not go on the lane of small ones.
const SMALL: usize = 32 << 10;

/// Whether another node, or the same a moment later, may carry it out: this one has not.
fn is_misdirected(error: &CacheError) -> bool {
    matches!(
        error,
        CacheError::WrongOwner { .. }
            | CacheError::NotActive { .. }
            | CacheError::StaleEpoch { .. }
            | CacheError::Draining
            | CacheError::Stopped
    )
}

/// The lane for a message of about so many bytes.
pub(super) fn lane_for(bytes: usize) -> Lane {
    if bytes > SMALL { Lane::Bulk } else { Lane::Control }
}

// Beginning and ending.
impl CacheNode {
    pub(super) fn begin(
        &mut self,
        ticket: u64,
        partition: PartitionId,
        operation: Operation,
        options: Options,
        now: Duration,
    ) {
        if let Err(error) = self.admit(partition, &operation, &options, now) {
            self.effects.push_back(CacheEffect::Done { ticket, result: Err(error) });
            return;
        }
        let id = self.next_id();
        self.pending.insert(id, Pending::new(ticket, partition, operation, options));
        self.ready.insert(id);
    }

    fn admit(
        &self,
        partition: PartitionId,
        operation: &Operation,
        options: &Options,
        now: Duration,
    ) -> Result<(), CacheError> {
        if self.closed {
            return Err(CacheError::Stopped);
        }
        if self.place(partition).is_none() {
            return Err(CacheError::WrongOwner { partition, primary: None, epoch: None });
        }
        operation.check(&self.config, partition)?;
        // also where it would not be forwarded: whether a write is allowed must not depend on where it begins
        self.check_size("the operation in bytes", operation.wire_len())?;
        if options.deadline <= now {
            return Err(CacheError::Timeout { applied: Applied::No });
        }
        // all may be about one key of this shard; the driver counts the operations of all shards together
        if self.pending.len() >= self.config.max_pending {
            return Err(CacheError::Busy);
        }
        Ok(())
    }

    /// Whether one message carries so much.
    pub(super) fn check_size(&self, what: &str, bytes: usize) -> Result<(), CacheError> {
        let (given, max) = (bytes as u64, self.max_message as u64);
        if given <= max {
            return Ok(());
        }
        let option = "max_frame of the transport".into();
        Err(CacheError::TooLarge { what: what.into(), given, max, option })
    }

    pub(super) fn next_id(&mut self) -> u64 {
        self.last_id += 1;
        self.last_id
    }

    pub(super) fn finish(&mut self, id: u64, result: Result<Reply, CacheError>) {
        if let Some(pending) = self.pending.remove(id) {
            self.ready.remove(&id);
            self.effects.push_back(CacheEffect::Done { ticket: pending.ticket, result });
        }
    }

    pub(super) fn give_up(&mut self, ticket: u64) {
        let Some(id) = self.pending.id_of(ticket) else { return };
        let Some(pending) = self.pending.remove(id) else { return };
        self.ready.remove(&id);
        let at_replica = matches!(pending.state, State::AtReplica);
        if let Some(place) = self.place(pending.partition).filter(|_| at_replica) {
            self.forget_write(place, id);
        }
    }

    /// Nobody waits for this write any more; its alarm at the replica goes with it.
    fn forget_write(&mut self, place: usize, id: u64) {
        if let Some(replica) = self.replicas.get_mut(place) {
            replica.forget(id);
        }
        self.set_alarm(place);
    }

    /// The cache closes.
    pub(super) fn end_all(&mut self) {
        self.ready.clear();
        self.served.clear();
        self.memories.clear();
        for id in self.pending.ids() {
            let unknown = self.pending.get(id).is_some_and(|pending| {
                let begun = pending.is_in_doubt() || pending.unconfirmed.is_some();
                pending.is_write() && (begun || !matches!(pending.state, State::Waiting))
            });
            let error = if unknown { CacheError::Interrupted } else { CacheError::Stopped };
            self.finish(id, Err(error));
        }
    }

    /// An alarm of an operation: its pause or its time is over.
    pub(super) fn handle_wake(&mut self, id: u64, now: Duration) {
        let Some(pending) = self.pending.get(id) else { return };
        if now < pending.options.deadline {
            self.ready.insert(id);
            return;
        }
        let error = pending.overdue();
        let at_replica = matches!(pending.state, State::AtReplica);
        if let Some(place) = self.place(pending.partition).filter(|_| at_replica) {
            self.forget_write(place, id);
        }
        self.finish(id, Err(error));
    }
}

impl Pending {
    /// Whether somebody may have carried it out.
    fn is_in_doubt(&self) -> bool {
        self.doubt.is_some() || self.unsure
    }

    /// What to say when the deadline is over.
    fn overdue(&self) -> CacheError {
        let sent = match &self.state {
            State::AtReplica | State::Sent { .. } => true,
            State::Waiting | State::Quorum(_) => false,
        };
        if let Some(unconfirmed) = &self.unconfirmed {
            return unconfirmed.clone();
        }
        if self.is_write() && (sent || self.is_in_doubt()) {
            return CacheError::Timeout { applied: Applied::Unknown };
        }
        if let State::Quorum(quorum) = &self.state
            && let Verdict::Open { got, need, .. } = quorum.verdict()
        {
            return CacheError::NoQuorum { got, need };
        }
        match (&self.last, sent) {
            (Some(why), false) => why.clone(),
            (None, false) => CacheError::NotActive { partition: self.partition },
            (_, true) => CacheError::Timeout { applied: Applied::No },
        }
    }
}

// Trying.
impl CacheNode {
    /// Tries an operation that waits.
    pub(super) fn attempt(&mut self, id: u64, now: Duration) {
        let Some(pending) = self.pending.get_mut(id) else { return };
        if !matches!(pending.state, State::Waiting) {
            return;
        }
        pending.attempts = pending.attempts.saturating_add(1);
        let strong = self.config.write_mode == WriteMode::Strong;
        match &pending.operation {
            Operation::Read(_) => match pending.options.read_mode {
                // a strong cache has one who knows everything
                ReadMode::Quorum if strong => self.attempt_primary(id, now),
                ReadMode::Quorum => self.attempt_quorum(id, now),
                ReadMode::Local => self.attempt_local(id, now),
                ReadMode::Primary => self.attempt_primary(id, now),
            },
            Operation::Write(_) => self.attempt_primary(id, now),
        }
    }

    /// Waits for a change of the partition, or for a moment that grows from time to time.
    pub(super) fn pause(&mut self, id: u64, why: CacheError, now: Duration) {
        let Some(pending) = self.pending.get_mut(id) else { return };
        let longest = (PAUSE * (1 << pending.attempts.min(10))).min(LONGEST_PAUSE);
        // from half of it to all of it, so that those who were refused together do not come back together
        let spread = xxh3_64_with_seed(&id.to_le_bytes(), self.seed ^ u64::from(pending.attempts)) % 1024;
        let pause = longest / 2 + longest * u32::try_from(spread).unwrap_or(0) / 2048;
        pending.last = Some(why);
        self.pending.enter(id, State::Waiting, Some(now.saturating_add(pause)));
    }

    pub(super) fn attempt_primary(&mut self, id: u64, now: Duration) {
        let Some(pending) = self.pending.get(id) else { return };
        let partition = pending.partition;
        let Some(replica) = self.replica(partition) else { return };
        if replica.serving().is_some() {
            self.execute(id, now);
            return;
        }
        let Some(target) = self.target(pending, replica) else {
            let why = self.why_nobody(partition, replica);
            self.pause(id, why, now);
            return;
        };
        let Some(life) = self.peers.life_of(&target) else { return };
        let Some(again) = self.may_send(pending, Some((&target, life)), replica) else {
            self.wait_in_doubt(id, now);
            return;
        };
        self.forward(id, target, life, again, now);
    }

    /// Whom to ask: first who was named last, then whom we know to serve, then the others who may know more.
    fn target(&self, pending: &Pending, replica: &Replica) -> Option<Peer> {
        let up = |peer: &&Peer| self.peers.is_up(peer);
        if let Some(doubt) = &pending.doubt
            && !self.is_over(doubt, replica)
        {
            return Some(doubt.peer.clone()).filter(|peer| self.peers.is_up(peer));
        }
        if let Some((hint, _)) = pending.hint.as_ref().filter(|(hint, _)| self.peers.is_up(hint)) {
            return Some(hint.clone());
        }
        let known = replica.config();
        let primary = known.map(|known| &known.epoch.primary);
        let wanted = self.place(pending.partition).and_then(|place| self.wanted.get(place));
        let mut candidates: Vec<&Peer> = Vec::new();
        let owners = known.iter().flat_map(|known| &known.owners);
        for peer in primary.into_iter().chain(wanted.into_iter().flatten()).chain(owners).filter(up) {
            if !candidates.contains(&peer) {
                candidates.push(peer);
            }
        }
        let turn = pending.attempts.saturating_sub(1) as usize;
        candidates.get(turn % candidates.len().max(1)).map(|peer| (*peer).clone())
    }

    /// Why there is nobody to ask.
    fn why_nobody(&self, partition: PartitionId, replica: &Replica) -> CacheError {
        match replica.config().map(|known| &known.epoch.primary) {
            Some(primary) if *primary != self.me && self.members.live.contains(primary) => {
                let node = primary.node.clone();
                CacheError::Unreachable { partition, node, applied: Applied::No }
            }
            _ => CacheError::NotActive { partition },
        }
    }

    /// Whether the peer that may have had a write can tell nothing more: it is gone, or has opened the cache anew, or
    /// somebody else serves.
    fn is_over(&self, doubt: &Doubt, replica: &Replica) -> bool {
        let gone = !self.peers.takes_part(&doubt.peer) || self.peers.life_of(&doubt.peer) != Some(doubt.life);
        let later = |known: &Epoch| doubt.epoch.as_ref().is_none_or(|sent| known > sent);
        let other = |known: &Epoch| known.primary != doubt.peer && later(known);
        gone || replica.config().is_some_and(|known| other(&known.epoch))
    }

    /// Whether an operation may be given to this peer (`None`: to this node's own copy), and if so, whether it has to be
    /// marked as sent again. A write in doubt goes to the same life of the same peer, or to nobody, or twice.
    fn may_send(&self, pending: &Pending, target: Option<(&Peer, u32)>, replica: &Replica) -> Option<bool> {
        let Some(doubt) = &pending.doubt else { return Some(false) };
        if target == Some((&doubt.peer, doubt.life)) {
            return Some(true);
        }
        let twice = pending.options.write_mode != WriteMode::Strong
            && self.config.write_mode != WriteMode::Strong
            && pending.operation.is_idempotent(&self.config);
        (twice && self.is_over(doubt, replica)).then_some(false)
    }

    /// A write that nobody can be asked about: it ends if that stays so.
    fn wait_in_doubt(&mut self, id: u64, now: Duration) {
        let Some(pending) = self.pending.get(id) else { return };
        let (Some(replica), Some(doubt)) = (self.replica(pending.partition), &pending.doubt) else { return };
        let partition = pending.partition;
        let node = doubt.peer.node.clone();
        let error = CacheError::Unreachable { partition, node, applied: Applied::Unknown };
        if self.is_over(doubt, replica) {
            self.finish(id, Err(error));
        } else {
            self.pause(id, error, now);
        }
    }

    pub(super) fn forward(&mut self, id: u64, to: Peer, life: u32, again: bool, now: Duration) {
        let Some(pending) = self.pending.get_mut(id) else { return };
        let hint = pending.hint.take();
        pending.repeated |= pending.unsure || (pending.doubt.is_some() && !again);
        let partition = pending.partition;
        let operation = pending.operation.clone();
        pending.sendings = pending.sendings.saturating_add(1);
        let options = pending.forwarded(now, again);
        pending.patience = now.saturating_add(Duration::from_millis(options.patience_ms.into()));
        let epoch = match hint {
            Some((peer, epoch)) if peer == to => epoch,
            _ => self.known_epoch(partition, &to),
        };
        let lane = lane_for(operation.wire_len());
        self.pending.enter(id, State::Sent { to: to.clone(), life, epoch: epoch.clone() }, None);
        let message = CacheMessage::Forward { request: id, partition, operation, options, epoch };
        self.send(to, lane, message);
    }

    /// The epoch in which we believe this peer to serve.
    fn known_epoch(&self, partition: PartitionId, peer: &Peer) -> Option<Epoch> {
        let known = self.replica(partition)?.config()?;
        (known.epoch.primary == *peer).then(|| known.epoch.clone())
    }

    /// This node serves the partition.
    fn execute(&mut self, id: u64, now: Duration) {
        let Some(pending) = self.pending.get(id) else { return };
        let Some(place) = self.place(pending.partition) else { return };
        let Some(replica) = self.replicas.get(place) else { return };
        if let Operation::Read(read) = &pending.operation {
            if !self.may_read(replica, now) {
                let partition = pending.partition;
                self.pause(id, CacheError::NotActive { partition }, now);
                return;
            }
            match self.covers_now(replica, &pending.options.at_least, now) {
                None | Some((Coverage::Yes, _)) => {
                    let result = read_copy(replica, read);
                    self.finish(id, result);
                }
                Some((Coverage::Lost, version)) => {
                    let (partition, version) = (pending.partition, version.clone());
                    self.finish(id, Err(CacheError::WriteLost { partition, version }));
                }
                // a primary that does not know of it is not the newest; if it is so to the end, the write is lost
                Some((Coverage::NotYet, version)) => {
                    let (partition, version) = (pending.partition, version.clone());
                    self.pause(id, CacheError::WriteLost { partition, version }, now);
                }
            }
            return;
        }
        if self.may_send(pending, None, replica).is_none() {
            self.wait_in_doubt(id, now);
            return;
        }
        self.write_here(id, place, now);
    }

    fn write_here(&mut self, id: u64, place: usize, now: Duration) {
        let Some(pending) = self.pending.get_mut(id) else { return };
        pending.repeated |= pending.is_in_doubt();
        let Operation::Write(op) = pending.operation.clone() else { return };
        let (mode, deadline) = (pending.options.write_mode, pending.options.deadline);
        let begun = self.with(place, now, |replica, given| replica.write(id, &op, mode, deadline, given));
        let Some(begun) = begun else { return };
        match begun {
            Ok(()) => self.pending.enter(id, State::AtReplica, None),
            Err(error) => self.refused(id, error, now),
        }
    }

    /// It was not carried out, by whoever was asked.
    fn refused(&mut self, id: u64, error: CacheError, now: Duration) {
        let Some(pending) = self.pending.get_mut(id) else { return };
        let mut from = None;
        if let State::Sent { to, life, .. } = &pending.state {
            from = Some(to.clone());
            // it remembers what it has carried out: had it had this before, it would have said so
            if pending.doubt.as_ref().is_some_and(|doubt| (&doubt.peer, doubt.life) == (to, *life)) {
                pending.doubt = None;
            }
        }
        if !is_misdirected(&error) {
            self.end_with(id, Err(error));
            return;
        }
        if let CacheError::WrongOwner { primary: Some(primary), epoch, .. } = &error
            && Some(primary) != from.as_ref()
            && *primary != self.me
        {
            pending.hint = Some((primary.clone(), epoch.clone()));
        }
        // at once where somebody was named, as long as epochs rise: two who name each other lead nowhere
        let named = pending.hint.as_ref().and_then(|(_, epoch)| epoch.clone());
        let follow = pending.hint.is_some() && named > pending.followed;
        pending.followed = pending.followed.take().max(named);
        let partition = pending.partition;
        let why = match (&error, pending.options.at_least.last()) {
            // the one that serves does not know of the write: as for a primary of this node
            (CacheError::StaleEpoch { .. }, Some(version)) => {
                CacheError::WriteLost { partition, version: version.clone() }
            }
            _ => CacheError::NotActive { partition },
        };
        self.pause(id, why, now);
        if follow {
            self.ready.insert(id);
        }
    }

    /// An end that is told; the counts of what may have been done twice are not those of once.
    fn end_with(&mut self, id: u64, result: Result<Reply, CacheError>) {
        let Some(pending) = self.pending.get(id) else { return };
        let result = match result {
            Ok(reply)
                if pending.repeated && !pending.is_exact(&reply.outcome, self.config.table.is_set()) =>
            {
                // it is done, and its version is known: a session has to remember it
                let at_least = match reply.outcome {
                    Outcome::Removed(removed) => removed,
                    Outcome::Written(_) | Outcome::Records(_) | Outcome::Bindings(_) => 0,
                };
                Err(CacheError::Uncounted { at_least, version: reply.version })
            }
            Err(error) if pending.unconfirmed.is_some() && error.applied() == Applied::No => {
                Err(pending.unconfirmed.clone().unwrap_or(error))
            }
            Err(error) if pending.is_in_doubt() && error.applied() == Applied::No => {
                let node = pending.doubt.as_ref().map_or(&self.me, |doubt| &doubt.peer).node.clone();
                Err(CacheError::Unreachable { partition: pending.partition, node, applied: Applied::Unknown })
            }
            other => other,
        };
        self.finish(id, result);
    }
}

impl Pending {
    pub(super) fn forwarded(&self, now: Duration, again: bool) -> ForwardOptions {
        let left = self.options.deadline.saturating_sub(now);
        let left = left.saturating_sub((left / 8).min(WAY_BACK));
        ForwardOptions {
            write_mode: self.options.write_mode,
            read_mode: self.options.read_mode,
            at_least: self.options.at_least.clone(),
            patience_ms: u32::try_from(left.as_millis()).unwrap_or(u32::MAX).max(1),
            again,
            attempt: self.sendings,
        }
    }

    /// Whether the counts of a second time are sure to be those of the first: every key was there.
    fn is_exact(&self, outcome: &Outcome, one_a_key: bool) -> bool {
        match (&self.operation, outcome) {
            (Operation::Write(WriteOp::DeleteKeys(keys)), Outcome::Removed(removed)) => {
                one_a_key && *removed == keys.len() as u64
            }
            (_, Outcome::Removed(_)) => false,
            (_, Outcome::Written(_) | Outcome::Records(_) | Outcome::Bindings(_)) => true,
        }
    }
}

// Answers.
impl CacheNode {
    pub(super) fn handle_answer(
        &mut self,
        from: &Peer,
        request: u64,
        attempt: u32,
        result: Result<Reply, CacheError>,
        now: Duration,
    ) {
        let Some(pending) = self.pending.get(request) else { return };
        let current = attempt == pending.sendings;
        match &pending.state {
            State::Sent { to, .. } if to == from => {}
            State::Sent { .. } | State::Waiting | State::AtReplica | State::Quorum(_) => return,
        }
        match result {
            // what was sent since may be carried out yet, and is answered too
            Err(error) if error.applied() == Applied::No && !current => {}
            Err(error) if error.applied() == Applied::No => self.refused(request, error, now),
            Err(error) if self.may_repeat(request, &error, now) => self.repeat(request, error, now),
            other => self.end_with(request, other),
        }
    }

    /// An operation that was to be forwarded has not been sent, for want of room.
    pub fn not_sent(&mut self, to: &Peer, request: u64, now: Duration) {
        let sent = |pending: &Pending| matches!(&pending.state, State::Sent { to: peer, .. } if peer == to);
        if self.pending.get(request).is_some_and(sent) {
            // an earlier sending may have arrived: that doubt stays
            self.end_with(request, Err(CacheError::Busy));
        }
        let (result, nobody) = (Err(CacheError::Busy), Vec::new());
        let copy = quorum::Copy { epoch: None, owners: nobody, covers: None, end: None, result };
        self.handle_copy(to, request, copy, now);
        self.settle(now);
    }

    /// A replica has ended a write: one of ours, or of another node.
    pub(super) fn handle_written(&mut self, id: u64, result: Result<Reply, CacheError>, now: Duration) {
        if self.pending.get(id).is_none() {
            self.handle_served(id, result, now);
            return;
        }
        match result {
            Err(error) if error.applied() == Applied::No => self.refused(id, error, now),
            Err(error) if self.may_repeat(id, &error, now) => self.repeat(id, error, now),
            other => self.end_with(id, other),
        }
    }

    /// Whether a write that too few owners have confirmed is made again: its primary was replaced, there is time left, and
    /// twice does no harm. Owners that are only slow would be slower still.
    fn may_repeat(&self, id: u64, error: &CacheError, now: Duration) -> bool {
        let Some(pending) = self.pending.get(id) else { return false };
        let strong = [pending.options.write_mode, self.config.write_mode].contains(&WriteMode::Strong);
        let expired = matches!(pending.state, State::Sent { .. }) && pending.patience <= now;
        matches!(error, CacheError::NotEnoughAcks { .. })
            && !strong
            && !expired
            && now < pending.options.deadline
            && pending.operation.is_idempotent(&self.config)
    }

    /// Makes it again, as another operation: whoever remembers the first answer must not give it once more.
    fn repeat(&mut self, id: u64, error: CacheError, now: Duration) {
        let Some(mut pending) = self.pending.remove(id) else { return };
        self.ready.remove(&id);
        pending.state = State::Waiting;
        pending.repeated = true;
        pending.doubt = None;
        pending.unconfirmed = Some(error.clone());
        let id = self.next_id();
        self.pending.insert(id, pending);
        self.pause(id, error, now);
    }

    /// What this peer was asked for will not be answered.
    pub(super) fn lose_peer(&mut self, peer: &Peer, now: Duration) {
        for id in self.pending.sent_to(peer) {
            let Some(pending) = self.pending.get_mut(id) else { continue };
            match &mut pending.state {
                State::Sent { to, life, epoch } => {
                    let doubt = Doubt { peer: to.clone(), life: *life, epoch: epoch.clone() };
                    let partition = pending.partition;
                    let node = doubt.peer.node.clone();
                    let mut applied = Applied::No;
                    if pending.is_write() {
                        let same = |before: &Doubt| (&before.peer, before.life) == (&doubt.peer, doubt.life);
                        pending.unsure |= pending.doubt.as_ref().is_some_and(|before| !same(before));
                        pending.doubt = Some(doubt);
                        applied = Applied::Unknown;
                    }
                    self.pause(id, CacheError::Unreachable { partition, node, applied }, now);
                }
                State::Quorum(_) => {
                    self.pending.change_quorum(id, |quorum| {
                        quorum.lose(peer);
                    });
                    self.advance_quorum(id, now);
                }
                State::Waiting | State::AtReplica => {}
            }
        }
    }
}
