//! How operations are carried out: one, or many at once.

use super::{Cache, CallOptions, Partition};
use crate::cache::{
    Applied, CacheError, Found, Operation, Options, Outcome, PartitionId, PatternError, Record,
    RecordPattern, Reply, Term, Version,
};
use crate::driver::cache::Answer;

/// How many partitions are asked at a time.
const WINDOW: usize = 4096;

/// What a partition has said of an operation.
type Said = (PartitionId, Answer);

/// An answer of all partitions is whole or an error.
pub(super) fn complete<T>(found: T, missing: Vec<Missing>, name: fn(T) -> Found) -> Result<T, CacheError> {
    if missing.is_empty() { Ok(found) } else { Err(CacheError::Partial { found: name(found), missing }) }
}

/// The version of a write that was applied, whatever else its answer says.
fn written(answer: &Answer) -> Option<&Version> {
    match answer {
        Ok(Reply { version, .. }) | Err(CacheError::Uncounted { version, .. }) => version.as_ref(),
        Err(_) => None,
    }
}

impl Cache {
    /// A handle whose calls do otherwise than the cache's options say. The same session, if this one has one.
    #[must_use]
    pub fn with(&self, options: CallOptions) -> Self {
        Self { options: self.options.and(options), ..self.clone() }
    }

    pub(super) fn options(&self) -> Result<Options, CacheError> {
        let (write_mode, read_mode, timeout) = self.options.resolve(self.config())?;
        let deadline = self.driver.now().saturating_add(timeout);
        Ok(Options { write_mode, read_mode, at_least: Vec::new(), deadline })
    }

    /// A read of a session knows of the session's last writes to its partition.
    fn on(&self, partition: PartitionId, operation: &Operation, options: &Options) -> Options {
        let session = self.session.as_ref().filter(|_| matches!(operation, Operation::Read(_)));
        Options {
            at_least: session.map(|session| session.get(partition)).unwrap_or_default(),
            ..options.clone()
        }
    }

    /// One operation on one partition.
    pub(super) async fn call(&self, partition: PartitionId, operation: Operation) -> Answer {
        let result = self.check_open().and_then(|()| self.options());
        let answer = match result {
            Ok(options) => self.call_with(partition, operation, options).await,
            Err(error) => Err(error),
        };
        self.hosted.stats.ended(&answer);
        answer
    }

    async fn call_with(&self, partition: PartitionId, operation: Operation, options: Options) -> Answer {
        let options = self.on(partition, &operation, &options);
        self.hosted.stats.began(&operation);
        let is_write = match &operation {
            Operation::Read(read) => {
                if let Some(answer) = self.hosted.try_read(partition, read, &options) {
                    self.hosted.stats.reads_at_once.add(1);
                    self.remember(partition, &options.at_least, false, &answer);
                    return answer;
                }
                false
            }
            Operation::Write(_) => true,
        };
        let asked = options.at_least.clone();
        let answer = self.hosted.begin(&self.driver, partition, operation, options).answer().await;
        self.remember(partition, &asked, is_write, &answer);
        answer
    }

    /// Operations on several partitions at once, each with its own answer, in their order.
    pub(super) async fn call_all(&self, operations: Vec<(PartitionId, Operation)>) -> Vec<Said> {
        match self.check_open().and_then(|()| self.options()) {
            Ok(options) => self.call_all_with(operations, options).await,
            Err(error) => {
                self.hosted.stats.ended::<()>(&Err(error.clone()));
                operations.into_iter().map(|(partition, _)| (partition, Err(error.clone()))).collect()
            }
        }
    }

    /// The same with a deadline that was set before, for what takes several rounds.
    pub(super) async fn call_all_with(
        &self,
        operations: Vec<(PartitionId, Operation)>,
        options: Options,
    ) -> Vec<Said> {
        let mut said = Vec::with_capacity(operations.len());
        // more than may be under way at once would be refused as busy
        let at_once = WINDOW.min(self.config().max_pending).max(1);
        let mut operations = operations.into_iter().peekable();
        while operations.peek().is_some() {
            let mut places = Vec::new();
            let window = operations.by_ref().take(at_once).map(|(partition, operation)| {
                self.hosted.stats.began(&operation);
                let options = self.on(partition, &operation, &options);
                let is_write = matches!(operation, Operation::Write(_));
                places.push((partition, is_write, options.at_least.clone()));
                (partition, operation, options)
            });
            let begun = self.hosted.begin_all(&self.driver, window);
            for ((partition, is_write, asked), begun) in places.into_iter().zip(begun) {
                let answer = begun.answer().await;
                self.remember(partition, &asked, is_write, &answer);
                self.hosted.stats.ended(&answer);
                said.push((partition, answer));
            }
        }
        said
    }

    /// The same question to all partitions that may hold what fits.
    pub(super) async fn ask(
        &self,
        partition: Partition,
        pattern: RecordPattern,
        operation: impl Fn(RecordPattern) -> Operation,
    ) -> Result<Sorted, CacheError> {
        let config = self.config();
        let exact = pattern.exact(config.partition_field);
        let places = partition.places(config, exact.as_ref())?;
        if let [place] = places.as_slice() {
            let reply = self.call(*place, operation(pattern)).await?;
            return Ok(Sorted { answers: vec![reply], ..Sorted::default() });
        }
        let operations = places.into_iter().map(|place| (place, operation(pattern.clone())));
        sort_out(self.call_all(operations.collect()).await)
    }

    /// What the session knows by this answer.
    fn remember(&self, partition: PartitionId, asked: &[Version], is_write: bool, answer: &Answer) {
        let Some(session) = &self.session else { return };
        if let Some(version) = written(answer).filter(|_| is_write) {
            session.remember(partition, version);
        } else if answer.is_ok() && !is_write {
            session.seen_together(partition, asked);
        }
    }

    pub(super) fn pattern<P>(&self, pattern: P) -> Result<RecordPattern, CacheError>
    where
        P: TryInto<RecordPattern>,
        CacheError: From<P::Error>,
    {
        let pattern = pattern.try_into()?;
        self.config().check_pattern(&pattern)?;
        Ok(pattern)
    }

    /// A key and the partition of a term; `None` where the key is the partition field and another term: then no record
    /// has both.
    pub(super) fn named(
        &self,
        key: Term,
        partition_term: &Term,
    ) -> Result<Option<(Term, PartitionId)>, CacheError> {
        key.check()?;
        partition_term.check()?;
        let config = self.config();
        let none = config.key_field == config.partition_field && key != *partition_term;
        Ok((!none).then(|| (key, config.partition_of(partition_term))))
    }

    pub(super) fn records(&self, reply: Reply) -> Result<Vec<Record>, CacheError> {
        match reply.outcome {
            Outcome::Records(records) => Ok(records),
            _ => Err(self.nonsense()),
        }
    }

    pub(super) fn removed(&self, reply: &Reply) -> Result<u64, CacheError> {
        match reply.outcome {
            Outcome::Removed(removed) => Ok(removed),
            _ => Err(self.nonsense()),
        }
    }

    /// A node has answered another question than was asked.
    pub(super) fn nonsense(&self) -> CacheError {
        let node = self.peer().node.clone();
        CacheError::Malformed { node, reason: "the answer is not to the question".into() }
    }
}

/// A partition that gave no answer, and why.
pub(super) type Missing = (PartitionId, CacheError);

/// What the partitions have said to one question.
#[derive(Debug, Default)]
pub(super) struct Sorted {
    /// The good answers.
    pub(super) answers: Vec<Reply>,
    /// Those that gave none.
    pub(super) missing: Vec<Missing>,
    /// A delete was applied, and its count may be too low.
    pub(super) uncounted: bool,
}

/// The good answers and the partitions that gave none. What makes no sense for any partition is an error of the whole,
/// unless one has given another answer and may have changed something: that the pattern has another arity than the records counts only if no partition has records of its arity.
pub(super) fn sort_out(said: Vec<Said>) -> Result<Sorted, CacheError> {
    let (mut answers, mut missing, mut refused) = (Vec::new(), Vec::new(), Vec::new());
    let mut uncounted = false;
    let mut unsure = false;
    let mut arity: Option<(usize, Vec<usize>)> = None;
    let mut whole = None;
    for (partition, answer) in said {
        match answer {
            Ok(reply) => answers.push(reply),
            Err(CacheError::Uncounted { at_least, version }) => {
                uncounted = true;
                answers.push(Reply { outcome: Outcome::Removed(at_least), version });
            }
            Err(CacheError::Pattern(PatternError::Arity { given, held })) => {
                arity.get_or_insert((given, Vec::new())).1.extend(held);
            }
            Err(
                error @ (CacheError::Stopped
                | CacheError::Config(_)
                | CacheError::Pattern(_)
                | CacheError::TooLarge { .. }),
            ) => {
                refused.push((partition, error.clone()));
                whole.get_or_insert(error);
            }
            Err(error) => {
                unsure |= error.applied() != Applied::No;
                missing.push((partition, error));
            }
        }
    }
    // of a delete that a part of the partitions has carried out nobody may say that nothing has changed
    let changed = |reply: &Reply| matches!(reply.outcome, Outcome::Written(_) | Outcome::Removed(_));
    match whole {
        Some(error) if !unsure && !answers.iter().any(changed) => return Err(error),
        _ => missing.append(&mut refused),
    }
    let found = answers.iter().any(|reply| !is_empty(&reply.outcome));
    match arity {
        Some((given, mut held)) if !found && missing.is_empty() => {
            held.sort_unstable();
            held.dedup();
            held.truncate(8);
            Err(PatternError::Arity { given, held }.into())
        }
        _ => Ok(Sorted { answers, missing, uncounted }),
    }
}

fn is_empty(outcome: &Outcome) -> bool {
    match outcome {
        Outcome::Written(count) | Outcome::Removed(count) => *count == 0,
        Outcome::Records(records) => records.is_empty(),
        Outcome::Bindings(bindings) => bindings.is_empty(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reply(outcome: Outcome) -> Answer {
        Ok(Reply { outcome, version: None })
    }

    // caught by: one partition that was stopped speaks for all
    #[test]
    fn of_a_delete_that_was_carried_out_in_part_nobody_says_that_nothing_has_changed() {
        let place = PartitionId::new;
        let stopped = || Err(CacheError::Stopped);
        let sorted = sort_out(vec![(place(0), reply(Outcome::Removed(3))), (place(1), stopped())]).unwrap();
        assert_eq!((sorted.answers.len(), sorted.missing), (1, vec![(place(1), CacheError::Stopped)]));
        let unknown = Err(CacheError::Timeout { applied: Applied::Unknown });
        let missing = sort_out(vec![(place(0), unknown), (place(1), stopped())]).unwrap().missing;
        assert_eq!(missing.iter().map(|(partition, _)| *partition).collect::<Vec<_>>(), [place(0), place(1)]);
        // nothing was, or it was a read
        let both = sort_out(vec![(place(0), stopped()), (place(1), Err(CacheError::Busy))]);
        assert_eq!(both.unwrap_err(), CacheError::Stopped);
        let read = sort_out(vec![(place(0), reply(Outcome::Records(Vec::new()))), (place(1), stopped())]);
        assert_eq!(read.unwrap_err(), CacheError::Stopped);
    }
    // caught by: a delete that was applied counted among those that failed
    #[test]
    fn a_delete_without_its_count_is_an_answer_and_not_missing() {
        let place = PartitionId::new;
        let uncounted = Err(CacheError::Uncounted { at_least: 2, version: None });
        let sorted = sort_out(vec![(place(0), reply(Outcome::Removed(3))), (place(1), uncounted)]).unwrap();
        let removed: Vec<_> = sorted.answers.iter().map(|answer| answer.outcome.clone()).collect();
        assert_eq!(removed, [Outcome::Removed(3), Outcome::Removed(2)]);
        assert_eq!((sorted.missing, sorted.uncounted), (vec![], true));
    }
}
