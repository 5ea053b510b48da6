//! Operations that other nodes have forwarded to this one.

use std::time::Duration;

use crate::cache::config::ReadMode;
use crate::cache::error::{Applied, CacheError};
use crate::cache::operation::{Operation, ReadOp, Reply, WriteOp};
use crate::cache::partition::PartitionId;
use crate::cache::replica::{Coverage, Mutation};
use crate::cache::version::{Epoch, Version};
use crate::types::Peer;

use super::calls::lane_for;
use super::memory::Remembered;
use super::message::{CacheMessage, ForwardOptions};
use super::quorum::Copy;
use super::{CacheNode, read_copy};

/// The longest that a forwarded operation may take, whatever it says: the longest that the options allow.
const LONGEST: Duration = Duration::from_secs(600);

/// Whose a write is that a replica works on.
#[derive(Debug)]
pub(super) struct Served {
    origin: Peer,
    request: u64,
}

impl CacheNode {
    #[allow(clippy::too_many_arguments, reason = "the fields of the message")]
    pub(super) fn handle_forward(
        &mut self,
        from: &Peer,
        request: u64,
        partition: PartitionId,
        operation: Operation,
        options: ForwardOptions,
        epoch: Option<Epoch>,
        now: Duration,
    ) {
        // who takes no part is told so by its own Hello
        if self.peers.life_of(from).is_none() {
            return;
        }
        let attempt = options.attempt;
        let Some(place) = self.place(partition) else {
            let result = Err(CacheError::WrongOwner { partition, primary: None, epoch: None });
            return self.answer(from, request, attempt, result);
        };
        if let Err(error) = operation.check(&self.config, partition) {
            return self.answer(from, request, attempt, Err(error));
        }
        match operation {
            // a strong cache has one who knows everything
            Operation::Read(read) if options.read_mode == ReadMode::Quorum && !self.is_strong() => {
                self.show_copy(from, request, partition, &read, &options.at_least);
            }
            Operation::Read(read) => {
                let result = self.read_for(partition, &read, &options, epoch.as_ref(), now);
                self.answer(from, request, attempt, result);
            }
            Operation::Write(op) => {
                let result = self.write_for(from, request, place, &op, &options, epoch.as_ref(), now);
                if let Some(result) = result {
                    self.answer(from, request, attempt, result);
                }
            }
        }
    }

    /// Says how it ended, if there is still a link to say it on.
    fn answer(&mut self, to: &Peer, request: u64, attempt: u32, result: Result<Reply, CacheError>) {
        if self.peers.can_answer(to) {
            let (result, bytes) = self.fitting(result);
            self.send(to.clone(), lane_for(bytes), CacheMessage::Answer { request, attempt, result });
        }
    }

    /// An answer that one message can carry, and about how many bytes it has; else that it is too large.
    fn fitting(&self, result: Result<Reply, CacheError>) -> (Result<Reply, CacheError>, usize) {
        let bytes = result.as_ref().map_or(0, |reply| reply.outcome.wire_len());
        match self.check_size("the answer in bytes", bytes) {
            Ok(()) => (result, bytes),
            Err(error) => (Err(error), 0),
        }
    }

    /// Whether this node serves the partition in the epoch that the caller knows or a newer one; else, whom it knows.
    fn check_serving(&self, partition: PartitionId, known: Option<&Epoch>) -> Result<(), CacheError> {
        let Some(replica) = self.replica(partition) else { return Err(CacheError::NotActive { partition }) };
        match replica.serving() {
            Some(epoch) if known.is_none_or(|known| known <= epoch) => Ok(()),
            _ => {
                let config = replica.config().filter(|config| config.epoch.primary != self.me);
                let primary = config.map(|config| config.epoch.primary.clone());
                let epoch = config.map(|config| config.epoch.clone());
                Err(CacheError::WrongOwner { partition, primary, epoch })
            }
        }
    }

    fn read_for(
        &self,
        partition: PartitionId,
        read: &ReadOp,
        options: &ForwardOptions,
        known: Option<&Epoch>,
        now: Duration,
    ) -> Result<Reply, CacheError> {
        let Some(replica) = self.replica(partition) else { return Err(CacheError::NotActive { partition }) };
        let any_owner = options.read_mode == ReadMode::Local && replica.is_active();
        let serving = self.check_serving(partition, known);
        if !any_owner && !self.rules.breaks(Mutation::BlindExecution) {
            serving.clone()?;
            if !self.may_read(replica, now) {
                return Err(CacheError::NotActive { partition });
            }
        }
        match self.covers_now(replica, &options.at_least, now) {
            None | Some((Coverage::Yes, _)) => read_copy(replica, read),
            Some((Coverage::Lost, write)) if serving.is_ok() => {
                Err(CacheError::WriteLost { partition, version: write.clone() })
            }
            Some((Coverage::Lost | Coverage::NotYet, write)) => {
                serving?;
                let current = replica.serving().ok_or(CacheError::NotActive { partition })?.clone();
                Err(CacheError::StaleEpoch { partition, given: write.epoch.clone(), current })
            }
        }
    }

    /// The answer, if it is there at once.
    #[allow(clippy::too_many_arguments, reason = "the fields of the message")]
    fn write_for(
        &mut self,
        from: &Peer,
        request: u64,
        place: usize,
        op: &WriteOp,
        options: &ForwardOptions,
        known: Option<&Epoch>,
        now: Duration,
    ) -> Option<Result<Reply, CacheError>> {
        let partition = self.partition_at(place);
        let memory = self.memories.get_mut(from).filter(|_| !self.rules.breaks(Mutation::AnswersForgotten));
        let remembered = memory.map(|memory| memory.look(request, options.again, options.attempt));
        match remembered.unwrap_or(Remembered::New) {
            Remembered::New => {}
            Remembered::UnderWay => return None,
            Remembered::Answered(result) => return Some(result),
            Remembered::Forgotten => return Some(Err(CacheError::Timeout { applied: Applied::Unknown })),
        }
        if let Err(error) = self.check_serving(partition, known) {
            if self.rules.breaks(Mutation::BlindExecution) {
                return Some(Ok(Reply { outcome: op.outcome(0), version: None }));
            }
            return Some(Err(error));
        }
        if self.memories.get(from).is_some_and(|memory| memory.under_way() >= self.config.max_pending) {
            return Some(Err(CacheError::Busy));
        }
        let patience = Duration::from_millis(options.patience_ms.into()).min(LONGEST);
        let deadline = now.saturating_add(patience);
        let id = self.next_id();
        let mode = options.write_mode;
        let begun = self.with(place, now, |replica, given| replica.write(id, op, mode, deadline, given))?;
        if let Err(error) = begun {
            return Some(Err(error));
        }
        // somewhat longer than the caller waits: its time was cut when it sent this
        let until = deadline.saturating_add(patience / 4).saturating_add(Duration::from_secs(1));
        self.memories.entry(from.clone()).or_default().begin(request, options.attempt, until);
        self.served.insert(id, Served { origin: from.clone(), request });
        None
    }

    /// A replica has ended the write of another node.
    pub(super) fn handle_served(&mut self, id: u64, result: Result<Reply, CacheError>, now: Duration) {
        let Some(Served { origin, request }) = self.served.remove(&id) else { return };
        let ended = self.memories.get_mut(&origin).and_then(|memory| memory.end(request, &result, now));
        let attempt = ended.unwrap_or_default();
        self.answer(&origin, request, attempt, result);
    }

    /// Drops what nobody can ask about any more.
    pub(super) fn forget_memories(&mut self, now: Duration) {
        self.memories.retain(|_, memory| {
            memory.expire(now);
            !memory.is_empty()
        });
    }

    fn show_copy(
        &mut self,
        to: &Peer,
        request: u64,
        partition: PartitionId,
        read: &ReadOp,
        at_least: &[Version],
    ) {
        let Some(copy) = self.own_copy(partition, read, at_least) else { return };
        if self.peers.can_answer(to) {
            let Copy { epoch, owners, covers, end, result } = copy;
            let (result, bytes) = self.fitting(result);
            let message = CacheMessage::Copy { request, epoch, owners, covers, end, result };
            self.send(to.clone(), lane_for(bytes), message);
        }
    }

    /// What this node's copy says for a quorum.
    pub(super) fn own_copy(
        &self,
        partition: PartitionId,
        read: &ReadOp,
        at_least: &[Version],
    ) -> Option<Copy> {
        let replica = self.replica(partition)?;
        let known = replica.config();
        let result = match replica.is_active() {
            true => read_copy(replica, read),
            false => Err(CacheError::NotActive { partition }),
        };
        let covers = match self.covers(replica, at_least) {
            None | Some((Coverage::Yes, _)) => Some(true),
            Some((Coverage::Lost, _)) => Some(false),
            Some((Coverage::NotYet, _)) => None,
        };
        Some(Copy {
            epoch: known.map(|known| known.epoch.clone()),
            owners: known.map(|known| known.owners.clone()).unwrap_or_default(),
            covers,
            end: replica.end().cloned(),
            result,
        })
    }
}
