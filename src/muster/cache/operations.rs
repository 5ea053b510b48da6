//! The operations of a cache.

use std::collections::BTreeMap;

use super::{Cache, CallOptions, Partition, key_and_partition};
use crate::cache::store::{Cursor, Entry};
use crate::cache::{
    CacheError, Found, Operation, Options, Outcome, PartitionId, PatternError, ReadOp, Record, RecordPattern,
    Reply, Table, Term, WriteOp,
};
use crate::driver::cache::Answer;

/// How many bytes of a batch go to one partition at a time.
const PIECE_BYTES: usize = 512 << 10;
/// How many partitions are asked at a time.
const WINDOW: usize = 4096;
/// How many bytes of records are copied at a time for a scan.
const SCAN_BYTES: usize = 128 << 10;

/// What a scan of this node's own records gave.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LocalScan<A> {
    /// What the fold gave.
    pub value: A,
    /// Whether this node was an active owner of every partition that was asked for, from beginning to end. If not, the
    /// scan has left something out.
    pub complete: bool,
}

/// What a partition has said of an operation.
type Said = (PartitionId, Answer);

// Puts.
impl Cache {
    /// Puts one record: in a set it replaces the record of its key, in a bag it joins the others.
    ///
    /// # Errors
    /// Before anything is sent: [`CacheError::RecordTooShort`], [`CacheError::Arity`], [`CacheError::Term`],
    /// [`CacheError::TooLarge`], [`CacheError::Config`] for a mode that the cache does not allow. Then those of the
    /// write mode; [`CacheError::applied`] says of each whether anything has changed.
    ///
    /// ```
    /// # use muster_router::{Muster, cache::CacheConfig, record, transport::memory::Network};
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let muster = Muster::builder("shop").transport(Network::new().node("a")).start().await?;
    /// let cache = muster.cache(CacheConfig::new("users").arity(Some(2))).await?;
    /// cache.put(record!["ada", 36]).await?;
    /// assert!(cache.put(record!["ada"]).await.is_err(), "an arity was agreed on");
    /// # Ok(())
    /// # }
    /// ```
    pub async fn put(&self, record: Record) -> Result<(), CacheError> {
        self.config().check_record(&record)?;
        let (_, partition) = self.config().key_and_partition(&record)?;
        self.call(partition, Operation::Write(WriteOp::Put(vec![record]))).await.map(drop)
    }

    /// Puts many records, all partitions at once; how many were put. Two records of one key come in their order.
    ///
    /// # Errors
    /// [`CacheError::Batch`] if a part failed: records that are not allowed are left out and named by their place,
    /// partitions that failed are named with the reason, and the rest is applied. Of a partition that failed a part
    /// may be applied: [`CacheError::applied`]. [`CacheError::TooLarge`] for more than `max_batch_records`, and
    /// nothing was sent.
    ///
    /// ```
    /// # use muster_router::{Muster, cache::{CacheConfig, CacheError}, record, transport::memory::Network};
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let muster = Muster::builder("shop").transport(Network::new().node("a")).start().await?;
    /// let cache = muster.cache(CacheConfig::new("users").arity(Some(2))).await?;
    /// let records = vec![record!["ada", 36], record!["bob"], record!["eve", 7]];
    /// match cache.put_batch(records).await {
    ///     Err(CacheError::Batch { applied: 2, refused, .. }) => assert_eq!(refused[0].0, 1),
    ///     other => panic!("{other:?}"),
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub async fn put_batch(&self, records: impl IntoIterator<Item = Record>) -> Result<u64, CacheError> {
        let config = self.config();
        let max = config.max_batch_records;
        let records: Vec<Record> = records.into_iter().take(max.saturating_add(1)).collect();
        if records.len() > max {
            let (what, option) = ("the batch in records".into(), "max_batch_records".into());
            return Err(CacheError::TooLarge { what, given: records.len() as u64, max: max as u64, option });
        }
        self.options()?;
        let mut refused = Vec::new();
        let mut groups: BTreeMap<PartitionId, Vec<Record>> = BTreeMap::new();
        for (index, record) in (0..).zip(records) {
            let placed = config.check_record(&record).and_then(|()| config.key_and_partition(&record));
            match placed.map(|(_, partition)| partition) {
                Ok(partition) => groups.entry(partition).or_default().push(record),
                Err(error) => refused.push((index, error)),
            }
        }
        let (applied, failed) = self.put_groups(groups).await;
        if refused.is_empty() && failed.is_empty() {
            Ok(applied)
        } else {
            Err(CacheError::Batch { applied, refused, failed })
        }
    }

    /// Each partition in pieces, one after the other so that their order stays; all partitions at once.
    async fn put_groups(
        &self,
        groups: BTreeMap<PartitionId, Vec<Record>>,
    ) -> (u64, Vec<(PartitionId, CacheError)>) {
        let mut pieces: Vec<_> =
            groups.into_iter().map(|(partition, records)| (partition, in_pieces(records))).collect();
        let (mut applied, mut failed) = (0, Vec::new());
        while !pieces.is_empty() {
            let next = pieces.iter_mut().filter_map(|(partition, pieces)| {
                let records = pieces.next()?;
                Some((*partition, Operation::Write(WriteOp::Put(records))))
            });
            for (partition, answer) in self.call_all(next.collect()).await {
                match answer.map(|reply| reply.outcome) {
                    Ok(Outcome::Written(written)) => applied += written,
                    Ok(_) => failed.push((partition, self.nonsense())),
                    Err(error) => failed.push((partition, error)),
                }
            }
            // what follows a piece that failed is not sent
            pieces.retain(|(partition, pieces)| {
                pieces.len() > 0 && !failed.iter().any(|(failed, _)| failed == partition)
            });
        }
        failed.sort_by_key(|(partition, _)| *partition);
        (applied, failed)
    }
}

/// Of bounded size each, in order.
fn in_pieces(records: Vec<Record>) -> std::vec::IntoIter<Vec<Record>> {
    let (mut pieces, mut piece, mut bytes) = (Vec::new(), Vec::new(), 0);
    for record in records {
        let length = record.encoded_len();
        if bytes + length > PIECE_BYTES && !piece.is_empty() {
            pieces.push(std::mem::take(&mut piece));
            bytes = 0;
        }
        bytes += length;
        piece.push(record);
    }
    pieces.push(piece);
    pieces.into_iter()
}

// Reads.
impl Cache {
    /// The records of a record's key, in its partition. Only its key and its partition field are looked at.
    ///
    /// # Errors
    /// [`CacheError`]; never because there are none.
    pub async fn get(&self, record: &Record) -> Result<Vec<Record>, CacheError> {
        let (key, partition) = key_and_partition(self.config(), record)?;
        self.get_in(partition, key.clone()).await
    }

    /// The records of a key, where the partition field holds `partition_term`.
    ///
    /// # Errors
    /// As [`Cache::get`].
    ///
    /// ```
    /// # use muster_router::{Muster, cache::CacheConfig, record, transport::memory::Network};
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let muster = Muster::builder("shop").transport(Network::new().node("a")).start().await?;
    /// let cache = muster.cache(CacheConfig::new("users").key_field(0).partition_field(1)).await?;
    /// cache.put(record!["ada", "London", 36]).await?;
    /// assert_eq!(cache.get_by_key_partition("ada", "London").await?.len(), 1);
    /// # Ok(())
    /// # }
    /// ```
    pub async fn get_by_key_partition(
        &self,
        key: impl Into<Term>,
        partition_term: impl Into<Term>,
    ) -> Result<Vec<Record>, CacheError> {
        match self.named(key.into(), &partition_term.into())? {
            Some((key, partition)) => self.get_in(partition, key).await,
            None => Ok(Vec::new()),
        }
    }

    /// The records of a key, where the key is the partition field.
    ///
    /// # Errors
    /// [`CacheError::KeyIsNotPartition`] where it is not, and as [`Cache::get`].
    pub async fn get_key(&self, key: impl Into<Term>) -> Result<Vec<Record>, CacheError> {
        let key = key.into();
        key.check()?;
        let partition = self.config().partition_of_key(&key)?;
        self.get_in(partition, key).await
    }

    async fn get_in(&self, partition: PartitionId, key: Term) -> Result<Vec<Record>, CacheError> {
        let reply = self.call(partition, Operation::Read(ReadOp::Get(key))).await?;
        self.records(reply)
    }

    /// For each record that fits the pattern, the values of its variables in their numeric order. By partition, and
    /// within one in the order of keys; from an `OrderedSet` all in the order of keys.
    ///
    /// A pattern that names the partition field's term exactly asks that partition only.
    ///
    /// # Errors
    /// [`CacheError::Pattern`] for a pattern that is not allowed, or that no record can fit because all of them have
    /// another arity; [`CacheError::Partial`] if partitions did not answer; else as [`Cache::get`].
    pub async fn get_by_match<P>(
        &self,
        partition: Partition,
        pattern: P,
    ) -> Result<Vec<Vec<Term>>, CacheError>
    where
        P: TryInto<RecordPattern>,
        CacheError: From<P::Error>,
    {
        let pattern = self.pattern(pattern)?;
        if self.config().table == Table::OrderedSet && partition == Partition::All {
            // bindings have no key to sort by
            return match self.match_objects(partition, pattern.clone()).await {
                Ok(records) => Ok(bindings(&pattern, &records)),
                Err(CacheError::Partial { found: Found::Records(records), missing }) => {
                    let found = Found::Bindings(bindings(&pattern, &records));
                    Err(CacheError::Partial { found, missing })
                }
                Err(error) => Err(error),
            };
        }
        let read = |pattern| Operation::Read(ReadOp::Match(pattern));
        let (answers, missing) = self.ask(partition, pattern, read).await?;
        let mut found = Vec::new();
        for reply in answers {
            match reply.outcome {
                Outcome::Bindings(bindings) => found.extend(bindings),
                _ => return Err(self.nonsense()),
            }
        }
        complete(found, missing, Found::Bindings)
    }

    /// The records that fit the pattern, in the order that [`Cache::get_by_match`] has.
    ///
    /// # Errors
    /// As [`Cache::get_by_match`].
    ///
    /// ```
    /// # use muster_router::{Muster, transport::memory::Network};
    /// use muster_router::{cache::{CacheConfig, Partition}, pattern, record};
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let muster = Muster::builder("shop").transport(Network::new().node("a")).start().await?;
    /// let cache = muster.cache(CacheConfig::new("users").partition_field(1)).await?;
    /// cache.put_batch([record!["ada", "London"], record!["bob", "Oslo"]]).await?;
    /// let londoners = cache.get_by_match_object(Partition::of("London"), pattern![_, "London"]).await?;
    /// assert_eq!(londoners, [record!["ada", "London"]]);
    /// assert_eq!(cache.get_by_match_object(Partition::All, pattern![_, _]).await?.len(), 2);
    /// # Ok(())
    /// # }
    /// ```
    pub async fn get_by_match_object<P>(
        &self,
        partition: Partition,
        pattern: P,
    ) -> Result<Vec<Record>, CacheError>
    where
        P: TryInto<RecordPattern>,
        CacheError: From<P::Error>,
    {
        let pattern = self.pattern(pattern)?;
        self.match_objects(partition, pattern).await
    }

    async fn match_objects(
        &self,
        partition: Partition,
        pattern: RecordPattern,
    ) -> Result<Vec<Record>, CacheError> {
        let read = |pattern| Operation::Read(ReadOp::MatchObject(pattern));
        let (answers, missing) = self.ask(partition, pattern, read).await?;
        let mut found = Vec::new();
        for reply in answers {
            found.extend(self.records(reply)?);
        }
        if self.config().table == Table::OrderedSet {
            let key_field = self.config().key_field;
            // stable: equal keys stay in the order of partitions
            found.sort_by(|a, b| a.get(key_field).cmp(&b.get(key_field)));
        }
        complete(found, missing, Found::Records)
    }

    /// Folds the records that this node holds itself, whether as primary or as replica: nothing is asked of other
    /// nodes, and [`LocalScan::complete`] says whether this node had all that was wanted. Records that are written
    /// meanwhile are met or not. In the order of partitions, and within one in the order of keys.
    ///
    /// `fold` runs while no lock is held. This blocks for as long as it takes: give up to other tasks by scanning one
    /// partition at a time.
    ///
    /// # Errors
    /// [`CacheError::Stopped`]; [`CacheError::Term`] for a partition that no record can have.
    ///
    /// ```
    /// # use muster_router::{Muster, transport::memory::Network};
    /// use muster_router::{cache::{CacheConfig, Partition}, record};
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let muster = Muster::builder("shop").transport(Network::new().node("a")).start().await?;
    /// let cache = muster.cache(CacheConfig::new("users")).await?;
    /// cache.put_batch([record!["ada", 36], record!["bob", 7]]).await?;
    /// let here = cache.scan(Partition::All, 0, |sum, record| sum + record.get(1).unwrap().as_int().unwrap())?;
    /// assert_eq!((here.value, here.complete), (43, true), "one node holds all");
    /// # Ok(())
    /// # }
    /// ```
    pub fn scan<A>(
        &self,
        partition: Partition,
        start: A,
        mut fold: impl FnMut(A, &Record) -> A,
    ) -> Result<LocalScan<A>, CacheError> {
        let mut scan = LocalScan { value: start, complete: true };
        for place in partition.places(self.config(), None)? {
            self.check_open()?;
            let mut cursor: Option<Cursor> = None;
            loop {
                let piece = self.hosted.look(place, |node| {
                    let (store, active) = node.store(place)?;
                    Some((store.chunk(cursor.as_ref(), SCAN_BYTES), active))
                });
                let Some((chunk, active)) = piece else {
                    scan.complete = false;
                    break;
                };
                scan.complete &= active;
                for entry in &chunk.entries {
                    if let Entry::Put { record, .. } = entry {
                        scan.value = fold(scan.value, record);
                    }
                }
                cursor = chunk.next;
                if cursor.is_none() {
                    break;
                }
            }
        }
        Ok(scan)
    }
}

fn bindings(pattern: &RecordPattern, records: &[Record]) -> Vec<Vec<Term>> {
    records.iter().filter_map(|record| pattern.bindings(record)).collect()
}

// Deletes.
impl Cache {
    /// Deletes all records of a record's key, in its partition; how many went. Only its key and its partition field
    /// are looked at.
    ///
    /// # Errors
    /// [`CacheError`]; never because there was nothing to delete.
    pub async fn delete(&self, record: &Record) -> Result<u64, CacheError> {
        let (key, partition) = key_and_partition(self.config(), record)?;
        self.delete_in(partition, key.clone()).await
    }

    /// Deletes all records of a key, where the partition field holds `partition_term`; how many went.
    ///
    /// # Errors
    /// As [`Cache::delete`].
    pub async fn delete_by_key_partition(
        &self,
        key: impl Into<Term>,
        partition_term: impl Into<Term>,
    ) -> Result<u64, CacheError> {
        match self.named(key.into(), &partition_term.into())? {
            Some((key, partition)) => self.delete_in(partition, key).await,
            None => Ok(0),
        }
    }

    /// Deletes all records of a key, where the key is the partition field; how many went.
    ///
    /// # Errors
    /// [`CacheError::KeyIsNotPartition`] where it is not, and as [`Cache::delete`].
    pub async fn delete_key(&self, key: impl Into<Term>) -> Result<u64, CacheError> {
        let key = key.into();
        key.check()?;
        let partition = self.config().partition_of_key(&key)?;
        self.delete_in(partition, key).await
    }

    async fn delete_in(&self, partition: PartitionId, key: Term) -> Result<u64, CacheError> {
        let reply = self.call(partition, Operation::Write(WriteOp::DeleteKeys(vec![key]))).await?;
        self.removed(&reply)
    }

    /// Deletes the records that fit the pattern; how many went. The primary of each partition decides which, and its
    /// replicas remove just those. In a set the key of a record that fits goes with it.
    ///
    /// # Errors
    /// As [`Cache::get_by_match`]; after [`CacheError::Partial`] the partitions that are missing may have deleted or
    /// not.
    pub async fn delete_match<P>(&self, partition: Partition, pattern: P) -> Result<u64, CacheError>
    where
        P: TryInto<RecordPattern>,
        CacheError: From<P::Error>,
    {
        let pattern = self.pattern(pattern)?;
        let delete = |pattern| Operation::Write(WriteOp::DeleteMatch(pattern));
        let (answers, missing) = self.ask(partition, pattern, delete).await?;
        self.sum(answers, missing)
    }

    /// Deletes everything, partition by partition and not as one step; how many records went. Writes that come after
    /// it stay, also where copies of earlier ones arrive late.
    ///
    /// # Errors
    /// [`CacheError::Partial`] if partitions did not answer: they may have deleted or not.
    pub async fn delete_all(&self) -> Result<u64, CacheError> {
        let places = Partition::All.places(self.config(), None)?;
        let delete = |place| (place, Operation::Write(WriteOp::DeleteAll));
        let said = self.call_all(places.into_iter().map(delete).collect()).await;
        let (answers, missing) = sort_out(said)?;
        self.sum(answers, missing)
    }

    fn sum(&self, answers: Vec<Reply>, missing: Vec<PartitionId>) -> Result<u64, CacheError> {
        let mut removed = 0;
        for reply in answers {
            removed += self.removed(&reply)?;
        }
        complete(removed, missing, Found::Removed)
    }
}

/// An answer of all partitions is whole or an error.
fn complete<T>(found: T, missing: Vec<PartitionId>, name: fn(T) -> Found) -> Result<T, CacheError> {
    if missing.is_empty() { Ok(found) } else { Err(CacheError::Partial { found: name(found), missing }) }
}

// Calls.
impl Cache {
    /// A handle whose calls do otherwise than the cache's options say. The same session, if this one has one.
    #[must_use]
    pub fn with(&self, options: CallOptions) -> Self {
        Self { options: self.options.and(options), ..self.clone() }
    }

    fn options(&self) -> Result<Options, CacheError> {
        let (write_mode, read_mode, timeout) = self.options.resolve(self.config())?;
        let deadline = self.driver.now().saturating_add(timeout);
        Ok(Options { write_mode, read_mode, at_least: None, deadline })
    }

    /// A read of a session knows of the session's last write to its partition.
    fn on(&self, partition: PartitionId, operation: &Operation, options: &Options) -> Options {
        let session = self.session.as_ref().filter(|_| matches!(operation, Operation::Read(_)));
        Options { at_least: session.and_then(|session| session.get(partition)), ..options.clone() }
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
                    return answer;
                }
                false
            }
            Operation::Write(_) => true,
        };
        let answer = self.hosted.begin(&self.driver, partition, operation, options).answer().await;
        if is_write {
            self.remember(partition, &answer);
        }
        answer
    }

    /// Operations on several partitions at once, each with its own answer, in their order.
    pub(super) async fn call_all(&self, operations: Vec<(PartitionId, Operation)>) -> Vec<Said> {
        let mut said = Vec::with_capacity(operations.len());
        let options = match self.check_open().and_then(|()| self.options()) {
            Ok(options) => options,
            Err(error) => {
                self.hosted.stats.ended::<()>(&Err(error.clone()));
                said.extend(operations.into_iter().map(|(partition, _)| (partition, Err(error.clone()))));
                return said;
            }
        };
        let mut operations = operations.into_iter().peekable();
        while operations.peek().is_some() {
            let mut places = Vec::new();
            let window = operations.by_ref().take(WINDOW).map(|(partition, operation)| {
                self.hosted.stats.began(&operation);
                places.push((partition, matches!(operation, Operation::Write(_))));
                let options = self.on(partition, &operation, &options);
                (partition, operation, options)
            });
            let begun = self.hosted.begin_all(&self.driver, window);
            for ((partition, is_write), begun) in places.into_iter().zip(begun) {
                let answer = begun.answer().await;
                if is_write {
                    self.remember(partition, &answer);
                }
                self.hosted.stats.ended(&answer);
                said.push((partition, answer));
            }
        }
        said
    }

    /// The same question to all partitions that may hold what fits.
    async fn ask(
        &self,
        partition: Partition,
        pattern: RecordPattern,
        operation: impl Fn(RecordPattern) -> Operation,
    ) -> Result<(Vec<Reply>, Vec<PartitionId>), CacheError> {
        let config = self.config();
        let exact = pattern.exact(config.partition_field);
        let places = partition.places(config, exact.as_ref())?;
        if let [place] = places.as_slice() {
            let reply = self.call(*place, operation(pattern)).await?;
            return Ok((vec![reply], Vec::new()));
        }
        let operations = places.into_iter().map(|place| (place, operation(pattern.clone())));
        sort_out(self.call_all(operations.collect()).await)
    }

    fn remember(&self, partition: PartitionId, answer: &Answer) {
        if let (Some(session), Ok(Reply { version: Some(version), .. })) = (&self.session, answer) {
            session.remember(partition, version);
        }
    }

    fn pattern<P>(&self, pattern: P) -> Result<RecordPattern, CacheError>
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
    fn named(&self, key: Term, partition_term: &Term) -> Result<Option<(Term, PartitionId)>, CacheError> {
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

    fn removed(&self, reply: &Reply) -> Result<u64, CacheError> {
        match reply.outcome {
            Outcome::Removed(removed) => Ok(removed),
            _ => Err(self.nonsense()),
        }
    }

    /// A node has answered another question than was asked.
    fn nonsense(&self) -> CacheError {
        let node = self.peer().node.clone();
        CacheError::Malformed { node, reason: "the answer is not to the question".into() }
    }
}

/// The good answers and the partitions that gave none. What makes no sense for any partition is an error of the whole:
/// that the pattern has another arity than the records counts only if no partition has records of its arity.
fn sort_out(said: Vec<Said>) -> Result<(Vec<Reply>, Vec<PartitionId>), CacheError> {
    let (mut answers, mut missing) = (Vec::new(), Vec::new());
    let mut arity: Option<(usize, Vec<usize>)> = None;
    for (partition, answer) in said {
        match answer {
            Ok(reply) => answers.push(reply),
            Err(CacheError::Pattern(PatternError::Arity { given, held })) => {
                arity.get_or_insert((given, Vec::new())).1.extend(held);
            }
            // nothing has been begun anywhere
            Err(error @ (CacheError::Stopped | CacheError::Config(_) | CacheError::Pattern(_))) => {
                return Err(error);
            }
            Err(_) => missing.push(partition),
        }
    }
    let found = answers.iter().any(|reply| !is_empty(&reply.outcome));
    match arity {
        Some((given, mut held)) if !found && missing.is_empty() => {
            held.sort_unstable();
            held.dedup();
            held.truncate(8);
            Err(PatternError::Arity { given, held }.into())
        }
        _ => Ok((answers, missing)),
    }
}

fn is_empty(outcome: &Outcome) -> bool {
    match outcome {
        Outcome::Written(count) | Outcome::Removed(count) => *count == 0,
        Outcome::Records(records) => records.is_empty(),
        Outcome::Bindings(bindings) => bindings.is_empty(),
    }
}
