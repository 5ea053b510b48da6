//! Who holds what: the router's table, one shard of it.
//!
//! A row is a last-writer-wins register keyed by (group, connection of the source): `Present` beats an older
//! version strictly, a tombstone beats an older *or equal* one. A retraction writes a tombstone and never
//! deletes, so that a late claim cannot bring the group back.

use std::collections::BTreeMap;
use std::hash::{Hash, Hasher};

use indexmap::IndexMap;
use smallvec::SmallVec;

use crate::types::Group;

use super::Time;
use super::hashing::{SeededState, make_room};
use super::rules::{Mutation, Rules};

/// One register. The version is its sequence number; the incarnation is the slot's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Row {
    /// The connection whose row it is.
    pub(crate) slot: u32,
    /// When it was written, in tenths of a second since the node's start; counts for tombstones.
    written: u32,
    /// The version, and in the lowest bit whether the group is present.
    word: u64,
}

impl Row {
    fn new(slot: u32, version: u64, present: bool, now: Time) -> Self {
        let written = u32::try_from(now.as_millis() / 100).unwrap_or(u32::MAX);
        Self { slot, written, word: (version << 1) | u64::from(present) }
    }

    pub(crate) fn version(self) -> u64 {
        self.word >> 1
    }

    pub(crate) fn present(self) -> bool {
        self.word & 1 == 1
    }

    /// Since when it is a tombstone, to a tenth of a second, rounded down.
    pub(crate) fn written(self) -> Time {
        Time::from_millis(u64::from(self.written) * 100)
    }
}

/// What the sweep finds about a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    Keep,
    /// It becomes a tombstone of its own version.
    Bury,
    Drop,
}

#[derive(Clone, Debug)]
pub(crate) struct OccupancyShard {
    rows: IndexMap<Group, SmallVec<[Row; 1]>, SeededState>,
    /// Rows of each connection, tombstones included.
    counts: BTreeMap<u32, usize>,
    present: usize,
    rules: Rules,
}

impl PartialEq for OccupancyShard {
    fn eq(&self, other: &Self) -> bool {
        self.rows == other.rows
    }
}

impl Eq for OccupancyShard {}

impl Hash for OccupancyShard {
    fn hash<H: Hasher>(&self, state: &mut H) {
        let mut sorted: Vec<_> = self.rows.iter().collect();
        sorted.sort_by(|a, b| a.0.cmp(b.0));
        sorted.hash(state);
    }
}

impl OccupancyShard {
    pub(crate) fn new(hasher: SeededState, rules: Rules) -> Self {
        Self { rows: IndexMap::with_hasher(hasher), counts: BTreeMap::new(), present: 0, rules }
    }

    /// The connections with a row for this group.
    pub(crate) fn read(&self, group: &[u8]) -> impl Iterator<Item = u32> {
        let rows = self.rows.get(group).map(|rows| rows.as_slice()).unwrap_or_default();
        rows.iter().filter(|row| row.present()).map(|row| row.slot)
    }

    pub(crate) fn len(&self) -> usize {
        self.rows.len()
    }

    /// Present rows and tombstones.
    pub(crate) fn counts(&self) -> (usize, usize) {
        let all: usize = self.counts.values().sum();
        (self.present, all.saturating_sub(self.present))
    }

    /// Whether this connection has any row here.
    pub(crate) fn knows(&self, slot: u32) -> bool {
        self.counts.contains_key(&slot)
    }

    pub(crate) fn list(&self) -> impl Iterator<Item = (&Group, &Row)> {
        self.rows.iter().flat_map(|(group, rows)| rows.iter().map(move |row| (group, row)))
    }

    /// Writes one register; says whether the write won.
    pub(crate) fn apply(&mut self, group: &Group, slot: u32, version: u64, present: bool, now: Time) -> bool {
        if !present && self.rules.breaks(Mutation::DeleteInsteadOfTombstone) {
            return self.delete(group, slot, version);
        }
        let new = Row::new(slot, version, present, now);
        if !self.rows.contains_key(group.as_bytes()) {
            make_room(&mut self.rows);
            self.rows.insert(group.clone(), SmallVec::new());
        }
        let Some(rows) = self.rows.get_mut(group.as_bytes()) else { return false };
        let Some(row) = rows.iter_mut().find(|row| row.slot == slot) else {
            rows.push(new);
            *self.counts.entry(slot).or_default() += 1;
            self.present += usize::from(present);
            return true;
        };
        let wins = match present {
            true if self.rules.breaks(Mutation::ClaimWinsEqual) => version >= row.version(),
            true => version > row.version() || self.rules.breaks(Mutation::ClaimAlwaysWins),
            false => version >= row.version(),
        };
        if wins {
            self.present = self.present + usize::from(present) - usize::from(row.present());
            *row = new;
        }
        wins
    }

    /// Turns the older rows of a connection into tombstones of this version, those that `matches`.
    pub(crate) fn bury_older(
        &mut self,
        slot: u32,
        version: u64,
        now: Time,
        mut matches: impl FnMut(&Group) -> bool,
    ) {
        if !self.knows(slot) {
            return;
        }
        for (group, rows) in &mut self.rows {
            for row in rows.iter_mut().filter(|row| row.slot == slot && row.version() < version) {
                if matches(group) {
                    self.present -= usize::from(row.present());
                    *row = Row::new(slot, version, false, now);
                }
            }
        }
    }

    /// Judges up to `limit` groups below place `from`; the place to go on, 0 at the end of the walk.
    pub(crate) fn sweep(
        &mut self,
        from: usize,
        limit: usize,
        now: Time,
        mut judge: impl FnMut(&Group, Row) -> Verdict,
    ) -> usize {
        let mut at = from.min(self.rows.len());
        for _ in 0..limit {
            if at == 0 {
                break;
            }
            at -= 1;
            let Some((group, rows)) = self.rows.get_index_mut(at) else { continue };
            let (counts, present) = (&mut self.counts, &mut self.present);
            rows.retain(|row| match judge(group, *row) {
                Verdict::Keep => true,
                Verdict::Bury => {
                    *present -= usize::from(row.present());
                    *row = Row::new(row.slot, row.version(), false, now);
                    true
                }
                Verdict::Drop => {
                    *present -= usize::from(row.present());
                    uncount(counts, row.slot);
                    false
                }
            });
            if rows.is_empty() {
                // the last group takes its place: it was judged already
                self.rows.swap_remove_index(at);
            }
        }
        if at == 0 && self.rows.capacity() > 1024 && self.rows.len() < self.rows.capacity() / 4 {
            self.rows.shrink_to(self.rows.len() * 2);
        }
        at
    }

    /// Visits up to `limit` groups below place `from`; the place to go on.
    pub(crate) fn visit(&self, from: usize, limit: usize, mut visit: impl FnMut(&Group, Row)) -> usize {
        let from = from.min(self.rows.len());
        let to = from.saturating_sub(limit);
        for (group, rows) in self.rows.get_range(to..from).into_iter().flatten() {
            rows.iter().for_each(|row| visit(group, *row));
        }
        to
    }

    fn delete(&mut self, group: &Group, slot: u32, version: u64) -> bool {
        let Some(rows) = self.rows.get_mut(group.as_bytes()) else { return false };
        let Some(at) = rows.iter().position(|row| row.slot == slot && row.version() <= version) else {
            return false;
        };
        self.present -= usize::from(rows[at].present());
        rows.remove(at);
        if rows.is_empty() {
            self.rows.swap_remove(group.as_bytes());
        }
        uncount(&mut self.counts, slot);
        true
    }
}

fn uncount(counts: &mut BTreeMap<u32, usize>, slot: u32) {
    if let Some(count) = counts.get_mut(&slot) {
        *count -= 1;
        if *count == 0 {
            counts.remove(&slot);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn shard() -> OccupancyShard {
        OccupancyShard::new(SeededState(0), Rules::all())
    }

    fn state(shard: &OccupancyShard) -> Vec<(Group, u32, u64, bool)> {
        let mut all: Vec<_> =
            shard.list().map(|(g, r)| (g.clone(), r.slot, r.version(), r.present())).collect();
        all.sort();
        all
    }

    #[test]
    fn a_tombstone_beats_an_equal_claim_in_either_order() {
        let group = Group::from("g");
        for order in [[true, false], [false, true]] {
            let mut shard = shard();
            for present in order {
                shard.apply(&group, 1, 7, present, Time::ZERO);
            }
            assert_eq!(shard.read(b"g").count(), 0, "order {order:?}");
        }
    }

    #[test]
    fn a_late_claim_does_not_beat_a_newer_retraction() {
        let group = Group::from("g");
        let mut shard = shard();
        shard.apply(&group, 1, 9, false, Time::ZERO);
        assert!(!shard.apply(&group, 1, 8, true, Time::ZERO));
        assert!(shard.apply(&group, 1, 10, true, Time::ZERO));
        assert_eq!(shard.read(b"g").collect::<Vec<_>>(), [1]);
    }

    #[test]
    fn burying_spares_newer_rows_and_other_connections() {
        let mut shard = shard();
        for (name, slot, version) in [("a", 1, 1), ("b", 1, 5), ("c", 2, 1)] {
            shard.apply(&Group::from(name), slot, version, true, Time::ZERO);
        }
        shard.bury_older(1, 5, Time::ZERO, |_| true);
        assert_eq!(shard.read(b"a").count(), 0);
        assert_eq!(shard.read(b"b").count(), 1);
        assert_eq!(shard.read(b"c").count(), 1);
        assert_eq!(shard.counts(), (2, 1));
    }

    proptest! {
        /// Registers commute and are idempotent: any order of the same writes ends in the same table.
        #[test]
        fn writes_commute(
            writes in prop::collection::vec((0u8..3, 1u32..3, 1u64..6, any::<bool>()), 0..24),
            order in any::<u64>(),
        ) {
            let mut shuffled: Vec<_> = writes.iter().chain(writes.iter()).copied().collect();
            let mut random = order | 1;
            for i in (1..shuffled.len()).rev() {
                random ^= random << 13;
                random ^= random >> 7;
                random ^= random << 17;
                shuffled.swap(i, (random % (i as u64 + 1)) as usize);
            }
            let (mut a, mut b) = (shard(), shard());
            for (shard, writes) in [(&mut a, &writes), (&mut b, &shuffled)] {
                for (name, slot, version, present) in writes {
                    shard.apply(&Group::from(&[*name]), *slot, *version, *present, Time::ZERO);
                }
            }
            prop_assert_eq!(state(&a), state(&b));
            prop_assert_eq!(a.counts(), b.counts());
        }

        /// A sweep sees every group, also while it removes some.
        #[test]
        fn a_sweep_in_steps_misses_no_group(names in prop::collection::btree_set(any::<u16>(), 0..200), limit in 1usize..50) {
            let mut shard = shard();
            for name in &names {
                shard.apply(&Group::from(&name.to_le_bytes()), 1, 1, true, Time::ZERO);
            }
            let mut seen = std::collections::BTreeSet::new();
            let mut at = shard.len();
            while at > 0 {
                at = shard.sweep(at, limit, Time::ZERO, |group, _| {
                    seen.insert(group.clone());
                    if group.as_bytes()[0] % 2 == 0 { Verdict::Drop } else { Verdict::Keep }
                });
            }
            prop_assert_eq!(seen.len(), names.len());
            prop_assert_eq!(shard.len(), names.iter().filter(|n| *n % 2 == 1).count());
        }
    }
}
