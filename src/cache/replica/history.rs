//! Quorums, and which writes a history contains.

use super::effect::Coverage;
use crate::cache::version::{Epoch, Lineage, Version};

/// How many owners confirm a `Sync` write.
pub(super) fn majority(owners: usize) -> usize {
    owners / 2 + 1
}

/// How many owners a takeover or a change has to ask: any so many meet any majority.
pub(super) fn quorum(owners: usize) -> usize {
    owners + 1 - majority(owners).min(owners)
}

/// Whether a copy with this lineage and this last write has a write. A lineage that is cut off at its beginning cannot
/// tell old writes that it has from old ones that were lost; it says that it has them ([`Lineage::surely_contains`] does not).
pub(crate) fn contains(lineage: &Lineage, end: Option<&Version>, write: &Version) -> Coverage {
    let entries = lineage.entries();
    let Some((first, first_base)) = entries.first() else { return Coverage::NotYet };
    if let Some(index) = entries.iter().position(|(epoch, _)| *epoch == write.epoch) {
        return match entries.get(index + 1) {
            Some((_, base)) if base.as_ref() >= Some(write) => Coverage::Yes,
            Some(_) => Coverage::Lost,
            None if end >= Some(write) => Coverage::Yes,
            None => Coverage::NotYet,
        };
    }
    if write.epoch < *first {
        let old = first_base.as_ref() >= Some(write);
        return if old { Coverage::Yes } else { Coverage::Lost };
    }
    if lineage.epoch() < Some(&write.epoch) { Coverage::NotYet } else { Coverage::Lost }
}

/// Whether a copy that ends with `end` has nothing that this history lacks, for certain: else what it holds is merged,
/// and what loses is reported, rather than be dropped unseen.
pub(super) fn is_prefix(lineage: &Lineage, history_end: Option<&Version>, end: Option<&Version>) -> bool {
    end.is_none_or(|end| lineage.surely_contains(history_end, end))
}

/// The lineage with its next epoch, which may have no write yet: copies open an epoch with its first write, so that
/// an epoch without writes leaves no trace that others would lack.
pub(super) fn with_epoch(lineage: &Lineage, epoch: &Epoch, base: Option<&Version>) -> Lineage {
    let mut history = lineage.clone();
    if history.epoch() < Some(epoch) {
        history.push(epoch.clone(), base.cloned());
    }
    history
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::{Incarnation, NodeId, Peer};

    fn epoch(counter: u64) -> Epoch {
        Epoch::new(counter, Peer::new(NodeId::new("a").unwrap(), Incarnation::MIN))
    }

    fn version(counter: u64, seq: u64) -> Version {
        Version::new(epoch(counter), seq)
    }

    #[test]
    fn a_quorum_meets_every_majority() {
        assert_eq!([1, 2, 3, 4, 5].map(quorum), [1, 1, 2, 2, 3]);
        assert!((1..20).all(|owners| quorum(owners) + majority(owners) > owners));
    }

    // caught by: a lineage that is cut off trusted with all that is older
    #[test]
    fn what_is_older_than_a_history_may_be_another_side() {
        let mut lineage = Lineage::default();
        (1..200).for_each(|n| {
            lineage = with_epoch(&lineage, &epoch(2 * n), (n > 1).then(|| version(2 * n - 2, n)).as_ref());
        });
        let end = version(398, 300);
        let (first, base) = lineage.entries()[0].clone();
        let base = base.unwrap();
        assert!(first > epoch(100), "it is cut off: {first}");
        let whole = |of: &Version| is_prefix(&lineage, Some(&end), Some(of));
        assert!(whole(&base) && whole(&Version::new(base.epoch.clone(), base.seq - 1)));
        assert!(!whole(&Version::new(base.epoch.clone(), base.seq + 1)));
        assert!(!whole(&version(3, 2)), "an epoch of another side, 60 epochs ago");
        assert!(!whole(&version(4, 2)), "of this side, but nobody knows that any more");
        assert_eq!(
            contains(&lineage, Some(&end), &version(4, 2)),
            Coverage::Yes,
            "a session is not troubled"
        );
        assert!(!is_prefix(&Lineage::default(), None, Some(&version(1, 1))));
    }

    #[test]
    fn a_history_tells_what_it_lacks() {
        let mut lineage = with_epoch(&Lineage::default(), &epoch(1), None);
        lineage = with_epoch(&lineage, &epoch(3), Some(&version(1, 5)));
        let end = version(3, 8);
        let of = |write: &Version| contains(&lineage, Some(&end), write);
        assert_eq!(of(&version(1, 5)), Coverage::Yes);
        assert_eq!(of(&version(1, 6)), Coverage::Lost, "the next epoch began before it");
        assert_eq!(of(&version(2, 6)), Coverage::Lost, "an epoch that the history skipped");
        assert_eq!(of(&version(3, 8)), Coverage::Yes);
        assert_eq!(of(&version(3, 9)), Coverage::NotYet);
        assert_eq!(of(&version(4, 9)), Coverage::NotYet);
        assert!(is_prefix(&lineage, Some(&end), None));
        assert!(!is_prefix(&lineage, Some(&end), Some(&version(2, 6))));
    }
}
