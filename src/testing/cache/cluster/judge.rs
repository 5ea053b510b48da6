//! What has to hold in a cluster at rest, and what copies hold.

use super::*;

impl Cluster {
    /// All copies that count as whole are compared with what their history tells of.
    pub(in crate::testing::cache) fn judge_copies(&mut self) -> Outcome1 {
        for partition in self.partitions() {
            for place in 0..self.spots.len() {
                let node = self.spots[place].nodes.get((partition.get() % self.setup.shards) as usize);
                let Some((store, active)) = node.and_then(|node| node.store(partition)) else { continue };
                if active {
                    self.oracle.judge_copy(partition.get(), &format!("n{place}"), store)?;
                }
            }
        }
        Ok(())
    }

    /// In a cluster at rest: all copies are alike, nobody else holds anything, and nothing waits.
    pub(in crate::testing::cache) fn judge_rest(&mut self) -> Outcome1 {
        if !self.is_whole() {
            return broken("convergence", format!("not whole any more: {}", self.unwhole()));
        }
        self.judge_copies()?;
        for partition in self.partitions() {
            let wanted = self.wanted(partition);
            let stand = |place: usize| {
                self.store(place, partition).map(|(store, active)| {
                    (active, store.applied().cloned(), store.digest(), store.floor().cloned())
                })
            };
            let first = wanted.first().and_then(|place| stand(*place));
            for place in 0..self.len() {
                let here = stand(place);
                if wanted.contains(&place) {
                    if here != first || here.is_none() {
                        let text =
                            format!("partition {partition}: n{place} has {here:?}, the primary {first:?}");
                        return broken("convergence", text);
                    }
                } else if here.is_some() {
                    return broken("convergence", format!("n{place} keeps partition {partition}: {here:?}"));
                }
            }
        }
        let ready = |spot: &Spot| spot.nodes.iter().all(|node| node.readiness().is_ready());
        if let Some(spot) = self.spots.iter().find(|spot| !ready(spot)) {
            let readiness: Vec<_> = spot.nodes.iter().map(CacheNode::readiness).collect();
            return broken("convergence", format!("{} is not ready: {readiness:?}", spot.id));
        }
        match self.oracle.open().first().filter(|_| self.waiting() == 0) {
            Some(open) => broken("answers", format!("{open} was never answered")),
            None => Ok(()),
        }
    }

    /// What was acknowledged is there, overwritten, or reported.
    pub(in crate::testing::cache) fn account(&mut self) -> Outcome1 {
        for partition in self.partitions() {
            let Some(first) = self.wanted(partition).first().copied() else { continue };
            let node = self.spots[first].nodes.get((partition.get() % self.setup.shards) as usize);
            if let Some((store, _)) = node.and_then(|node| node.store(partition)) {
                self.oracle.account(partition.get(), store)?;
            }
        }
        Ok(())
    }

    /// Tombstones of all copies, and what all nodes keep beside records.
    pub(in crate::testing::cache) fn leftovers(&self) -> (u64, usize) {
        let stores = (0..self.len()).flat_map(|place| {
            self.partitions()
                .filter_map(move |partition| self.store(place, partition))
                .map(|(store, _)| store)
        });
        let kept = self.spots.iter().flat_map(|spot| &spot.nodes).map(CacheNode::footprint).max();
        (stores.map(Store::tombstones).sum(), kept.unwrap_or(0))
    }

    /// Whether there are as many nodes as the options ask for.
    pub(in crate::testing::cache) fn may_write(&self) -> bool {
        let open = |place: &usize| self.is_open(*place) && !self.is_draining(*place);
        let config = &self.setup.config;
        let (there, expected) = ((0..self.len()).filter(open).count(), config.expected_nodes.unwrap_or(0));
        there >= config.min_copies && there * 2 > expected
    }

    /// Sessions begin anew.
    pub(in crate::testing::cache) fn forget_tokens(&mut self) {
        self.oracle.forget_tokens();
    }

    /// Partitions that do not have their full number of owners.
    pub(in crate::testing::cache) fn stuck(&self) -> Vec<PartitionId> {
        self.partitions().filter(|partition| self.missing(*partition).is_some()).collect()
    }
}
