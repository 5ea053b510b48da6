//! How many copies a write has when it is answered, and how many records a delete says that it took.

use super::*;

/// What the primary was told to ask for.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct Demand {
    /// The options of the cache.
    pub(in super::super) min_copies: usize,
    pub(in super::super) expected_nodes: Option<usize>,
    /// If the primary has answered its own caller, it is looked at in that very moment: how many owners there are, and
    /// how many nodes are in its view.
    pub(in super::super) here: Option<(usize, usize)>,
}

impl Oracle {
    /// A primary has heard that this whole copy goes up to there.
    pub(in super::super) fn acked(&mut self, partition: u32, owner: &Peer, end: &Version) {
        let seqs = self.acked.entry((partition, end.epoch.clone())).or_default();
        let seq = seqs.entry(owner.clone()).or_default();
        *seq = end.seq.max(*seq);
    }

    /// How many nodes are known to have had a write, its primary included.
    fn copies_of(&self, partition: u32, version: &Version) -> usize {
        let from = (partition, version.epoch.clone());
        let later = self.acked.range(from..).take_while(|((of, _), _)| *of == partition);
        let mut owners = BTreeSet::from([&version.epoch.primary]);
        for ((_, epoch), seqs) in later {
            let has = |seq: u64| {
                let end = Version::new(epoch.clone(), seq);
                let told = self.histories.contains_key(&(partition, epoch.clone()));
                seq >= version.seq && (!told || self.holds(partition, &end, version))
            };
            owners.extend(seqs.iter().filter(|(_, seq)| has(**seq)).map(|(peer, _)| peer));
        }
        owners.len()
    }

    /// A `Sync` write was acknowledged: as many owners have it as were asked for, and as many nodes are there.
    pub(in super::super) fn judge_copies_of(&mut self, id: usize, demand: Demand) -> Result<(), Violation> {
        let op = &self.ops[id];
        if op.write_mode != WriteMode::Sync || op.fate != Fate::Done || !op.what.is_write() {
            return Ok(());
        }
        let Some(version) = &op.version else {
            return broken("version", format!("{} has no version", tell(op)));
        };
        let majority = demand.here.map_or(0, |(owners, _)| owners / 2 + 1);
        let (got, need) = (self.copies_of(op.partition, version), majority.max(demand.min_copies));
        if got < need {
            let text = format!("{} was answered with {got} copies, and {need} are asked for", tell(op));
            return broken("copies", text);
        }
        match (demand.here, demand.expected_nodes) {
            (Some((_, nodes)), Some(expected)) if nodes * 2 <= expected => {
                let text = format!("{} was answered among {nodes} of {expected} expected nodes", tell(op));
                broken("expected nodes", text)
            }
            _ => Ok(()),
        }
    }

    /// A delete says that so many records went: no more than were there, and all that were certainly there.
    pub(in super::super) fn removed(&mut self, id: usize, count: u64) -> Result<(), Violation> {
        let op = &self.ops[id];
        // an answer that was lost has had it carried out once more, and the rest went then
        if self.kind != Kind::Whole || self.last_break > op.begun || self.last_crash > op.begun {
            return Ok(());
        }
        let (least, most) = self.removable(id);
        if count < least || count > most {
            let text = format!("{} says that {count} records went, of {least} to {most}", tell(op));
            return broken("count", text);
        }
        Ok(())
    }

    /// How many records a delete has to find at least and at most.
    fn removable(&self, id: usize) -> (u64, u64) {
        let delete = &self.ops[id];
        let writes = &self.writes[delete.partition as usize];
        let mut certain: BTreeSet<(i64, i64)> = BTreeSet::new();
        let mut possible: BTreeSet<(i64, i64)> = BTreeSet::new();
        for put_id in writes {
            let put = &self.ops[*put_id];
            let What::Put(records) = &put.what else { continue };
            if put.fate == Fate::Never {
                continue;
            }
            for (key, number) in records.iter().filter(|(key, n)| self.deletes(delete, *key, Some(*n))) {
                // a set has one record of a key
                let place = if self.is_set { (*key, 0) } else { (*key, *number) };
                let others = || writes.iter().filter(|other| **other != id && **other != *put_id);
                let gone = others().any(|other| {
                    let done = &self.ops[*other];
                    let over = done.fate == Fate::Done && self.is_safe(done) && self.before(*other, delete);
                    let takes = match &done.what {
                        What::Put(by) => self.is_set && by.iter().any(|(k, _)| k == key),
                        _ => self.deletes(done, *key, Some(*number)),
                    };
                    over && takes && self.before(*put_id, done)
                });
                if !gone {
                    possible.insert(place);
                }
                let there = put.fate == Fate::Done && self.is_safe(put) && self.before(*put_id, delete);
                let by_class = matches!(delete.what, What::DeleteMatch(_));
                let disturbed = || {
                    others().any(|other| {
                        let done = &self.ops[*other];
                        let takes = match &done.what {
                            What::Put(by) => self.is_set && by_class && by.iter().any(|(k, _)| k == key),
                            _ => self.deletes(done, *key, (!self.is_set).then_some(*number)),
                        };
                        takes && done.fate != Fate::Never && !self.before(*other, put)
                    })
                };
                if there && !disturbed() {
                    certain.insert(place);
                }
            }
        }
        (certain.len() as u64, possible.len() as u64)
    }
}
