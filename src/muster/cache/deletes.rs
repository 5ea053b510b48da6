//! Deletes: by key, by pattern, and of everything.

use super::calls::{Sorted, complete, sort_out};
use super::{Cache, Partition, key_and_partition};
use crate::cache::{CacheError, Found, Operation, PartitionId, Record, RecordPattern, Term, WriteOp};

impl Cache {
    /// Deletes all records of a record's key, in its partition; how many went. Only its key and its partition field
    /// are looked at.
    ///
    /// # Errors
    /// [`CacheError`]; never because there was nothing to delete. [`CacheError::Uncounted`] if it is done, and its count
    /// is not known because it may have been carried out twice.
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
    /// not. [`CacheError::Uncounted`] as for [`Cache::delete`].
    pub async fn delete_match<P>(&self, partition: Partition, pattern: P) -> Result<u64, CacheError>
    where
        P: TryInto<RecordPattern>,
        CacheError: From<P::Error>,
    {
        let pattern = self.pattern(pattern)?;
        let delete = |pattern| Operation::Write(WriteOp::DeleteMatch(pattern));
        self.sum(self.ask(partition, pattern, delete).await?)
    }

    /// Deletes everything, partition by partition and not as one step; how many records went. Writes that come after
    /// it stay, also where copies of earlier ones arrive late.
    ///
    /// # Errors
    /// [`CacheError::Partial`] if partitions did not answer: they may have deleted or not. [`CacheError::Uncounted`] as
    /// for [`Cache::delete`].
    pub async fn delete_all(&self) -> Result<u64, CacheError> {
        let places = Partition::All.places(self.config(), None)?;
        let delete = |place| (place, Operation::Write(WriteOp::DeleteAll));
        let said = self.call_all(places.into_iter().map(delete).collect()).await;
        self.sum(sort_out(said)?)
    }

    fn sum(&self, sorted: Sorted) -> Result<u64, CacheError> {
        let Sorted { answers, missing, uncounted } = sorted;
        let mut removed = 0;
        for reply in answers {
            removed += self.removed(&reply)?;
        }
        let removed = complete(removed, missing, Found::Removed)?;
        if uncounted { Err(CacheError::Uncounted { at_least: removed, version: None }) } else { Ok(removed) }
    }
}
