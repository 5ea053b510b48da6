//! What copies hold, and what it has to be.

use super::*;
use crate::cache::Record;

impl Oracle {
    /// A copy tells the epochs that made it.
    pub(in super::super) fn history(
        &mut self,
        partition: u32,
        entries: &[(Epoch, Option<Version>)],
    ) -> Result<(), Violation> {
        for (index, (epoch, base)) in entries.iter().enumerate() {
            let told = entries.get(..=index).unwrap_or_default();
            match self.histories.get_mut(&(partition, epoch.clone())) {
                Some(known) if known.last().is_some_and(|(_, other)| other != base) => {
                    let text =
                        format!("partition {partition}: epoch {epoch} began from {known:?} and {base:?}");
                    return broken("epoch", text);
                }
                Some(known) if known.len() >= told.len() => {}
                Some(known) => *known = told.to_vec(),
                None => {
                    self.histories.insert((partition, epoch.clone()), told.to_vec());
                }
            }
        }
        Ok(())
    }

    /// A copy was offered what another side of a split had. What of it is there now has come into its history.
    pub(in super::super) fn merges(&mut self, partition: u32, offered: &[Entry], store: &Store) {
        let Some(at) = store.applied() else { return };
        for entry in offered {
            let key = match entry {
                Entry::Put { record, .. } | Entry::DeletedRecord { record, .. } => record.get(0),
                Entry::DeletedKey { key, .. } => Some(key),
                Entry::DeletedAll { .. } => None,
            };
            let there = match (key, entry) {
                // the same record by a later write: nothing is lost by that
                (Some(key), Entry::Put { record, version }) => {
                    store.get(key).any(|(held, at)| held == record && at >= version)
                }
                (Some(key), _) => {
                    let gone = |record: &Record| match entry {
                        Entry::DeletedRecord { record: deleted, .. } if !self.is_set => deleted == record,
                        _ => true,
                    };
                    let stays = store.get(key).any(|(held, at)| gone(held) && at <= entry.version());
                    !stays && store.read(key).version.as_ref() >= Some(entry.version())
                }
                (None, _) => store.floor() >= Some(entry.version()),
            };
            // unless the copy was discarded, which reports it and takes nothing
            let reported = self.losers[partition as usize]
                .iter()
                .any(|loser| loser.version == *entry.version() && loser.key.as_ref() == key);
            let discarded = reported && self.was_discarded(partition, entry.version());
            if there && !discarded {
                let number = match entry {
                    Entry::Put { record, .. } | Entry::DeletedRecord { record, .. } if !self.is_set => {
                        Some(number_of(record))
                    }
                    _ => None,
                };
                let key = key.cloned().unwrap_or_default();
                let with = self.merged.entry((partition, entry.version().clone(), key, number)).or_default();
                if with.last() != Some(at) {
                    with.push(at.clone());
                }
            }
        }
    }

    /// The writes with which a statement of another side, or one that replaced it there, came into a history.
    pub(super) fn merged_with<'a>(
        &'a self,
        partition: u32,
        version: &'a Version,
        about: Option<About>,
    ) -> impl Iterator<Item = &'a Version> {
        let of = self.merged.iter().filter(move |((p, later, key, number), _)| {
            let concerns = about.is_none_or(|about| {
                let same = key.as_int() == Some(about.key) && (number.is_none() || *number == about.number);
                same || key.is_nil()
            });
            *p == partition && concerns && self.holds(partition, later, version)
        });
        of.flat_map(|(_, with)| with)
    }

    /// Whether the history of a copy contains what a write says of a key: itself, or by a merge.
    fn contains(&self, partition: u32, store: &Store, version: &Version, about: About) -> bool {
        let within = |version: &Version| within(store.lineage().entries(), store.applied(), version);
        within(version) || self.merged_with(partition, version, Some(about)).any(within)
    }

    /// Whether the history that made `later` contains what `version` says of a key, as far as it was told.
    pub(super) fn knows(&self, partition: u32, later: &Version, version: &Version, about: About) -> bool {
        self.holds(partition, later, version)
            || self
                .merged_with(partition, version, Some(about))
                .any(|with| self.holds(partition, later, with))
    }

    pub(super) fn holds(&self, partition: u32, later: &Version, version: &Version) -> bool {
        if later.epoch == version.epoch {
            return version.seq <= later.seq;
        }
        let history = self.histories.get(&(partition, later.epoch.clone()));
        history.is_some_and(|history| within(history, Some(later), version))
    }

    /// A copy that counts as whole has everything that its history tells of, and nothing else.
    pub(in super::super) fn judge_copy(
        &mut self,
        partition: u32,
        whose: &str,
        store: &Store,
    ) -> Result<(), Violation> {
        self.tally.copies_judged += 1;
        self.history(partition, store.lineage().entries())?;
        let wrong = |promise, what: String| {
            let (applied, lineage) = (store.applied(), store.lineage());
            broken(promise, format!("partition {partition} on {whose} (at {applied:?}, {lineage:?}) {what}"))
        };
        for (record, version) in store.records() {
            let number = number_of(record);
            let op = usize::try_from(number).ok().and_then(|number| self.records.get(number));
            match op.map(|(op, _)| &self.ops[*op]) {
                None => return wrong("invented", format!("has {record} at {version}, which nobody put")),
                Some(op) if op.fate == Fate::Never => {
                    return wrong("visible", format!("has {record} of {}, which never was", tell(op)));
                }
                Some(_) => {}
            }
        }
        for id in &self.writes[partition as usize] {
            let op = &self.ops[*id];
            for (key, version) in versions_of(op) {
                if !self.contains(partition, store, &version, self.about(op, key)) {
                    continue;
                }
                if let Some(what) = self.wrong_of_key(op, key, &version, store) {
                    return wrong("hole", format!("should have {} and {what}", tell(op)));
                }
            }
            let version = op.version.as_ref().filter(|_| op.fate == Fate::Done);
            let Some(version) =
                version.filter(|version| within(store.lineage().entries(), store.applied(), version))
            else {
                continue;
            };
            match &op.what {
                What::DeleteAll if store.floor() < Some(version) => {
                    return wrong("hole", format!("has not had {}", tell(op)));
                }
                What::DeleteMatch(class) => {
                    // what came from another side later was not known to it
                    let known = |at: &Version| at <= version && self.holds(partition, version, at);
                    let mut records = store.records();
                    let back =
                        records.find(|(record, at)| class_of(number_of(record)) == *class && known(at));
                    if let Some((record, at)) = back {
                        return wrong("hole", format!("has had {} and holds {record} at {at}", tell(op)));
                    }
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// What is wrong with a key of a copy that has this write in its history.
    fn wrong_of_key(&self, op: &Op, key: i64, version: &Version, store: &Store) -> Option<String> {
        let term = Term::from(key);
        if store.floor() >= Some(version) {
            return None;
        }
        let live = || store.get(&term).map(|(record, at)| (number_of(record), at));
        let same = live().find(|(_, at)| *at == version).map(|(number, _)| number);
        let put = match &op.what {
            What::Put(records) => records.iter().find(|(put, _)| *put == key).map(|(_, number)| *number),
            _ => None,
        };
        if same.is_some_and(|same| Some(same) != put) {
            return Some(format!("has another record by that very write: {key}/{same:?}"));
        }
        // Nothing is there unless deletes have left a trace. Of what came by a merge it is not known whether this history
        // has had it or has forgotten as much; a record that comes back is seen all the same.
        let own = within(store.lineage().entries(), store.applied(), version);
        let trace =
            !own || store.read(&term).version.max(store.purged_through().cloned()) >= Some(version.clone());
        match put {
            Some(number) => {
                let mut there = live().filter(|(_, at)| *at >= version);
                let there =
                    if self.is_set { there.next().is_some() } else { there.any(|(n, _)| n == number) };
                let stale = if self.is_set { live().next() } else { None };
                match (there, stale) {
                    (true, _) => None,
                    (false, Some((stale, at))) => Some(format!("has {key}/{stale} at {at}")),
                    (false, None) if trace && self.is_deleted_since(op, key, number, version) => None,
                    (false, None) => Some(format!("has nothing, and nobody has deleted {key}/{number}")),
                }
            }
            None => match live().find(|(_, at)| *at <= version) {
                Some((back, at)) => Some(format!("holds {key}/{back} at {at}")),
                None => (!trace).then(|| format!("has {:?} of key {key}", store.read(&term).version)),
            },
        }
    }

    /// Whether a delete above this put may have taken what it put, or what has replaced it. (A delete of everything
    /// leaves its floor, which is never forgotten.)
    fn is_deleted_since(&self, put: &Op, key: i64, number: i64, version: &Version) -> bool {
        let writes = &self.writes[put.partition as usize];
        let replaced_by = |class: i64| {
            self.is_set
                && writes.iter().map(|id| &self.ops[*id]).any(|other| match &other.what {
                    What::Put(records) if other.fate != Fate::Never => {
                        records.iter().any(|(k, number)| *k == key && class_of(*number) == class)
                    }
                    _ => false,
                })
        };
        writes.iter().any(|id| {
            let delete = &self.ops[*id];
            let takes = match &delete.what {
                What::DeleteKeys(keys) => keys.contains(&key),
                What::DeleteMatch(class) => class_of(number) == *class || replaced_by(*class),
                _ => false,
            };
            let above = match delete.version.as_ref().filter(|_| delete.fate == Fate::Done) {
                // it may have been made twice, on both sides of a split: of the first time nobody knows the version
                Some(at) => at > version || (self.kind != Kind::Whole && !self.before(*id, put)),
                None => delete.fate != Fate::Never && delete.settled.is_none_or(|at| at > put.begun),
            };
            takes && above
        })
    }

    /// A node begins to serve: in a run without splits it has all that was acknowledged and that no crash may have
    /// taken.
    pub(in super::super) fn begins(
        &mut self,
        partition: u32,
        whose: &str,
        store: &Store,
    ) -> Result<(), Violation> {
        let entries = store.lineage().entries();
        for id in &self.writes[partition as usize] {
            let op = &self.ops[*id];
            let Some(version) = op.version.as_ref().filter(|_| op.fate == Fate::Done && self.is_safe(op))
            else {
                continue;
            };
            if !reaches(entries, store.applied(), version) {
                let at = store.applied();
                let text = format!(
                    "{whose} begins to serve partition {partition} from {at:?}, without {}",
                    tell(op)
                );
                self.tally.lost += 1;
                return broken("lost", text);
            }
        }
        Ok(())
    }

    /// In the end, when all copies are alike: what was acknowledged is there, overwritten, or reported.
    pub(in super::super) fn account(&mut self, partition: u32, store: &Store) -> Result<(), Violation> {
        let records = |key: i64| -> Vec<i64> {
            let key = Term::from(key);
            store.get(&key).filter_map(|(record, _)| record.get(1).and_then(Term::as_int)).collect()
        };
        let mut tally = self.tally;
        for id in &self.writes[partition as usize] {
            let op = &self.ops[*id];
            if op.fate != Fate::Done {
                let What::Put(put) = &op.what else { continue };
                let there = put.iter().find(|(key, number)| records(*key).contains(number));
                if let Some((key, number)) = there.filter(|_| op.fate == Fate::Never) {
                    let text = format!("{key}/{number} of {} is there, which never was", tell(op));
                    return broken("visible", text);
                }
                continue;
            }
            for (key, version) in versions_of(op) {
                let contradiction = self.contradicts(op, key, &records(key));
                if let Some((promise, what)) = contradiction.filter(|_| self.is_safe(op)) {
                    *if promise == "lost" { &mut tally.lost } else { &mut tally.resurrected } += 1;
                    self.tally = tally;
                    return broken(promise, format!("in the end {what}: {} is missing", tell(op)));
                }
                if self.is_accounted(op, key, &version, store, &records(key)) {
                    continue;
                }
                if self.kind == Kind::Split {
                    self.tally.lost += 1;
                    let has = store.read(&Term::from(key)).version;
                    let text = format!("{} is gone, and nobody was told: {has:?} of key {key}", tell(op));
                    return broken("unreported", text);
                }
                tally.excused += 1;
            }
        }
        self.tally = tally;
        Ok(())
    }

    /// Whether an acknowledged write is in the history of the copy (then [`Oracle::judge_copy`] looks at it), won or
    /// was overwritten, or was reported.
    fn is_accounted(&self, op: &Op, key: i64, version: &Version, store: &Store, records: &[i64]) -> bool {
        let (partition, about) = (op.partition, self.about(op, key));
        if self.contains(partition, store, version, about) || self.is_reported(op, key, version) {
            return true;
        }
        // what was deleted, and that forgotten, in a copy before it was discarded is not reported by itself
        let forgotten = self.discarded.get(&partition).into_iter().flatten();
        let mut forgotten = forgotten.filter_map(|copy| copy.forgotten.as_ref());
        let deleted = match &op.what {
            What::Put(put) => {
                put.iter().any(|(of, number)| *of == key && self.is_deleted_since(op, key, *number, version))
            }
            _ => matches!(op.what, What::DeleteKeys(_)),
        };
        if deleted && forgotten.any(|p| self.knows(partition, p, version, about)) {
            return true;
        }
        let term = Term::from(key);
        let has = store.read(&term).version;
        let purged = records.is_empty() && has.as_ref() <= store.purged_through();
        if has.as_ref().filter(|_| !purged).is_some_and(|has| self.knows(partition, has, version, about)) {
            return true;
        }
        if !matches!(op.what, What::Put(_)) && self.is_deleted_after(op, key, version, store, has.as_ref()) {
            return true;
        }
        if let What::Put(put) = &op.what {
            let number = put.iter().find(|(put, _)| *put == key).map(|(_, number)| *number);
            let there = number.is_some_and(|number| records.contains(&number));
            // deleted there, and that was forgotten; or of a bag, which tells of each record by itself
            let gone = |number: i64| self.is_deleted_since(op, key, number, version);
            if there || ((purged || !self.is_set) && number.is_some_and(gone)) {
                return true;
            }
        } else if purged
            && store.purged_through().is_some_and(|through| self.knows(partition, through, version, about))
        {
            return true;
        }
        // overwritten on its own side by one that has to be accounted for as well
        self.writes[partition as usize].iter().map(|id| &self.ops[*id]).any(|later| {
            let after = |later: &Version| later != version && self.knows(partition, later, version, about);
            // in a bag a later record takes nothing away
            let replaces = self.is_set || !matches!((&op.what, &later.what), (What::Put(_), What::Put(_)));
            let same_key = replaces && versions_of(later).any(|(other, at)| other == key && after(&at));
            same_key || (later.what == What::DeleteAll && later.version.as_ref().is_some_and(after))
        })
    }

    /// Whether a later delete of this key says what the one of `version` said: then nothing of it is lost, and in a
    /// merge it does not count as a loser. (If the later one is lost in the next merge, that one is reported.)
    fn is_deleted_after(
        &self,
        delete: &Op,
        key: i64,
        version: &Version,
        store: &Store,
        has: Option<&Version>,
    ) -> bool {
        let (partition, about) = (delete.partition, self.about(delete, key));
        let remains = |other: &Op, at: &Version| {
            at > version
                && (self.contains(partition, store, at, about)
                    || has.is_some_and(|has| self.knows(partition, has, at, about))
                    || self.is_reported(other, key, at))
        };
        self.writes[partition as usize].iter().map(|id| &self.ops[*id]).any(|other| match other.what {
            What::DeleteKeys(_) => versions_of(other).any(|(of, at)| of == key && remains(other, &at)),
            What::DeleteAll => other.version.as_ref().is_some_and(|at| remains(other, at)),
            What::Put(_) | What::DeleteMatch(_) | What::Get(_) | What::ReadAll => false,
        })
    }
}

fn number_of(record: &Record) -> i64 {
    record.get(1).and_then(Term::as_int).unwrap_or(-1)
}
