//! Epochs and versions: the one order of all writes of a partition, and the lineage that two copies compare.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::types::Peer;

/// The time of one primary of one partition. Ordered by counter, then by primary.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Epoch {
    /// Higher in every later epoch.
    pub counter: u64,
    /// Who orders the writes in it: two sides of a split may reach one counter, never with one primary.
    pub primary: Peer,
}

impl Epoch {
    /// The epoch of `primary` with this counter.
    pub fn new(counter: u64, primary: Peer) -> Self {
        Self { counter, primary }
    }
}

impl fmt::Display for Epoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}@{}", self.counter, self.primary)
    }
}

impl fmt::Debug for Epoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The place of one write among all of its partition. Ordered by epoch, then by number; no clock takes part.
///
/// Numbers go on from epoch to epoch: the first write of an epoch has the number after its base. So the number of
/// a write tells at once whether one before it is missing.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Version {
    /// Whose order.
    pub epoch: Epoch,
    /// Which write, from 1.
    pub seq: u64,
}

impl Version {
    /// The write of this number in an epoch.
    pub fn new(epoch: Epoch, seq: u64) -> Self {
        Self { epoch, seq }
    }

    /// What a digest adds for this version, and one hash per record with it.
    pub(super) fn write(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.epoch.counter.to_le_bytes());
        out.extend_from_slice(&self.epoch.primary.incarnation.get().to_le_bytes());
        out.extend_from_slice(&self.seq.to_le_bytes());
        out.extend_from_slice(self.epoch.primary.node.as_bytes());
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.epoch, self.seq)
    }
}

impl fmt::Debug for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// How many epochs a copy remembers; copies that parted before that have nothing in common.
pub const MAX_LINEAGE: usize = 64;

/// The epochs that made a copy, rising, each with its **base**: the last write before it. Two copies find in it the
/// last write that both hold: where they parted.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lineage(Vec<(Epoch, Option<Version>)>);

impl Lineage {
    /// The epoch that the copy is in; `None` for a copy that has never been in one.
    pub fn epoch(&self) -> Option<&Epoch> {
        self.0.last().map(|(epoch, _)| epoch)
    }

    /// The base of the epoch that the copy is in.
    pub fn base(&self) -> Option<&Version> {
        self.0.last().and_then(|(_, base)| base.as_ref())
    }

    /// The epochs with their bases, rising.
    pub fn entries(&self) -> &[(Epoch, Option<Version>)] {
        &self.0
    }

    /// Whether it could have grown by itself: few enough epochs, rising, no base after its epoch. What came from a
    /// peer is checked by this.
    pub fn is_sound(&self) -> bool {
        let rising = self.0.iter().zip(self.0.iter().skip(1)).all(|((a, base_a), (b, base_b))| {
            a < b && base_a <= base_b && base_b.as_ref().is_none_or(|base| base.epoch <= *a)
        });
        let first = self.0.first().is_none_or(|(epoch, base)| base.as_ref().is_none_or(|b| b.epoch < *epoch));
        self.0.len() <= MAX_LINEAGE && rising && first
    }

    pub(super) fn push(&mut self, epoch: Epoch, base: Option<Version>) {
        if self.0.len() == MAX_LINEAGE {
            self.0.remove(0);
        }
        self.0.push((epoch, base));
    }

    /// The last write of the epoch at `index` that a copy holds which has applied all up to `applied`.
    fn end_of<'a>(&'a self, index: usize, applied: Option<&'a Version>) -> Option<&'a Version> {
        match self.0.get(index + 1) {
            Some((_, base)) => base.as_ref(),
            None => applied,
        }
    }

    /// Whether a copy of this lineage that has applied all up to `applied` holds a write for certain. Of a time that the
    /// lineage tells nothing of any more, only the last write before its beginning is certain, with what its epoch wrote
    /// before it. What was taken over from another side of a split, which keeps its versions, is not of this history.
    pub fn surely_contains(&self, applied: Option<&Version>, write: &Version) -> bool {
        match self.0.iter().position(|(epoch, _)| *epoch == write.epoch) {
            Some(index) => self.end_of(index, applied) >= Some(write),
            None => match self.0.first() {
                Some((_, Some(base))) => base.epoch == write.epoch && base >= write,
                Some((_, None)) | None => false,
            },
        }
    }

    /// The last write that both copies hold, each given by its lineage and the last write that it has applied.
    /// `None` if they have none in common.
    pub fn common(
        &self,
        applied: Option<&Version>,
        other: &Lineage,
        other_applied: Option<&Version>,
    ) -> Option<Version> {
        // from the latest epoch that both have been in; what lies before it is in both
        self.0.iter().enumerate().rev().find_map(|(index, entry)| {
            let there = other.0.iter().position(|theirs| theirs == entry)?;
            let ends = (self.end_of(index, applied), other.end_of(there, other_applied));
            ends.0.min(ends.1).cloned()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::{Incarnation, NodeId};

    fn epoch(counter: u64, primary: &str) -> Epoch {
        Epoch::new(counter, Peer::new(NodeId::new(primary).unwrap(), Incarnation::MIN))
    }

    fn version(counter: u64, primary: &str, seq: u64) -> Version {
        Version::new(epoch(counter, primary), seq)
    }

    fn lineage(entries: &[(Epoch, Option<Version>)]) -> Lineage {
        let mut lineage = Lineage::default();
        entries.iter().cloned().for_each(|(epoch, base)| lineage.push(epoch, base));
        lineage
    }

    #[test]
    fn epochs_come_before_numbers() {
        assert!(version(1, "b", 9) < version(2, "a", 1));
        assert!(version(1, "a", 9) < version(1, "b", 1));
        assert_eq!(version(2, "a", 3).to_string(), "2@a#1:3");
    }

    // caught by: a common write taken from the higher of the two ends, or from the first epoch
    #[test]
    fn copies_find_where_they_parted() {
        let root = (epoch(1, "a"), None);
        let left = lineage(&[root.clone(), (epoch(2, "a"), Some(version(1, "a", 5)))]);
        let right = lineage(&[root.clone(), (epoch(2, "b"), Some(version(1, "a", 3)))]);
        let (l, r) = (version(2, "a", 9), version(2, "b", 7));
        assert_eq!(left.common(Some(&l), &right, Some(&r)), Some(version(1, "a", 3)));
        assert_eq!(right.common(Some(&r), &left, Some(&l)), Some(version(1, "a", 3)));
        // one has only fallen behind
        let behind = lineage(&[root]);
        assert_eq!(left.common(Some(&l), &behind, Some(&version(1, "a", 4))), Some(version(1, "a", 4)));
        assert_eq!(left.common(Some(&l), &left, Some(&version(2, "a", 6))), Some(version(2, "a", 6)));
        // strangers, and copies without a write
        assert_eq!(left.common(Some(&l), &lineage(&[(epoch(1, "c"), None)]), Some(&r)), None);
        assert_eq!(left.common(Some(&l), &behind, None), None);
        assert_eq!(left.common(Some(&l), &Lineage::default(), None), None);
    }

    #[test]
    fn a_lineage_is_bounded_and_checked() {
        let mut long = Lineage::default();
        (1..200).for_each(|n| long.push(epoch(n, "a"), (n > 1).then(|| version(n - 1, "a", n))));
        assert_eq!(long.entries().len(), MAX_LINEAGE);
        assert!(long.is_sound());
        assert!(!lineage(&[(epoch(2, "a"), None), (epoch(1, "a"), None)]).is_sound(), "not rising");
        assert!(!lineage(&[(epoch(1, "a"), Some(version(1, "a", 1)))]).is_sound(), "its base is in itself");
        let later = (epoch(2, "a"), Some(version(3, "a", 1)));
        assert!(!lineage(&[(epoch(1, "a"), None), later]).is_sound(), "a base after its epoch");
    }
}
