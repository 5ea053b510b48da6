//! Reads: by key, by pattern, and what this node holds itself.

use super::calls::{Sorted, complete};
use super::{Cache, Partition, key_and_partition};
use crate::cache::store::{Cursor, Entry};
use crate::cache::{
    CacheError, Found, Operation, Outcome, PartitionId, ReadOp, Record, RecordPattern, Table, Term,
};

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
        let Sorted { answers, missing, .. } = self.ask(partition, pattern, read).await?;
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
        let Sorted { answers, missing, .. } = self.ask(partition, pattern, read).await?;
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
