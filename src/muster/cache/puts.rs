//! Puts: one record, and many.

use std::collections::BTreeMap;

use super::Cache;
use crate::cache::{CacheError, Operation, Options, Outcome, PartitionId, Record, WriteOp};
use crate::driver::cache::BATCH_BYTES;

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
            return Err(self.too_many("the batch in records"));
        }
        let options = self.check_open().and_then(|()| self.options())?;
        let mut refused = Vec::new();
        let mut groups: BTreeMap<PartitionId, Vec<Record>> = BTreeMap::new();
        for (index, record) in (0..).zip(records) {
            let placed = config.check_record(&record).and_then(|()| config.key_and_partition(&record));
            match placed.map(|(_, partition)| partition) {
                Ok(partition) => groups.entry(partition).or_default().push(record),
                Err(error) => refused.push((index, error)),
            }
        }
        let (applied, failed) = self.put_groups(groups, options).await;
        if refused.is_empty() && failed.is_empty() {
            Ok(applied)
        } else {
            Err(CacheError::Batch { applied, refused, failed })
        }
    }

    /// More than one call may name: the rest is not looked at.
    pub(super) fn too_many(&self, what: &str) -> CacheError {
        let max = self.config().max_batch_records as u64;
        let (what, option) = (what.into(), "max_batch_records".into());
        CacheError::TooLarge { what, given: max.saturating_add(1), max, option }
    }

    /// Each partition in pieces, one after the other so that their order stays; all partitions at once.
    async fn put_groups(
        &self,
        groups: BTreeMap<PartitionId, Vec<Record>>,
        options: Options,
    ) -> (u64, Vec<(PartitionId, CacheError)>) {
        let mut pieces: Vec<_> =
            groups.into_iter().map(|(partition, records)| (partition, in_pieces(records))).collect();
        let (mut applied, mut failed) = (0, Vec::new());
        while !pieces.is_empty() {
            let next = pieces.iter_mut().filter_map(|(partition, pieces)| {
                let records = pieces.next()?;
                Some((*partition, Operation::Write(WriteOp::Put(records))))
            });
            for (partition, answer) in self.call_all_with(next.collect(), options.clone()).await {
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
        if bytes + length > BATCH_BYTES && !piece.is_empty() {
            pieces.push(std::mem::take(&mut piece));
            bytes = 0;
        }
        bytes += length;
        piece.push(record);
    }
    pieces.push(piece);
    pieces.into_iter()
}
