//! Digests: what a source holds for a router in 256 buckets, so that the two can find out cheaply that
//! their tables differ and where.

use std::collections::BTreeMap;

use crate::ring::key_hash;
use crate::types::Group;

use super::message::Bucket;

/// Buckets in rising order, the empty ones left out.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Digest(BTreeMap<u8, (u32, u64)>);

/// The stable hash of a group and the bucket it falls into.
pub(crate) fn bucket_of(group: &Group) -> (u8, u64) {
    let hash = key_hash(group.as_bytes());
    ((hash >> 56) as u8, hash)
}

impl Digest {
    pub(crate) fn add(&mut self, group: &Group) {
        let (index, hash) = bucket_of(group);
        let (count, xor) = self.0.entry(index).or_default();
        *count = count.wrapping_add(1);
        *xor ^= hash;
    }

    pub(crate) fn to_buckets(&self) -> Vec<Bucket> {
        self.0
            .iter()
            .map(|(index, (count, xor))| Bucket { index: *index, count: *count, xor: *xor })
            .collect()
    }

    pub(crate) fn from_buckets(buckets: &[Bucket]) -> Self {
        Self(buckets.iter().map(|b| (b.index, (b.count, b.xor))).collect())
    }

    fn get(&self, index: u8) -> (u32, u64) {
        self.0.get(&index).copied().unwrap_or_default()
    }

    /// The buckets that differ although neither side has changed since its digest before.
    pub(crate) fn settled_differences(theirs: [&Digest; 2], ours: [&Digest; 2]) -> Vec<u8> {
        (0..=u8::MAX)
            .filter(|index| {
                let (theirs_before, theirs_now) = (theirs[0].get(*index), theirs[1].get(*index));
                let (ours_before, ours_now) = (ours[0].get(*index), ours[1].get(*index));
                theirs_now != ours_now && theirs_before == theirs_now && ours_before == ours_now
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn digest(names: &[&str]) -> Digest {
        let mut digest = Digest::default();
        names.iter().for_each(|name| digest.add(&Group::from(*name)));
        digest
    }

    #[test]
    fn the_order_of_groups_does_not_count() {
        assert_eq!(digest(&["a", "b", "c"]), digest(&["c", "a", "b"]));
        assert_eq!(Digest::from_buckets(&digest(&["a", "b"]).to_buckets()), digest(&["b", "a"]));
    }

    #[test]
    fn only_a_difference_that_stays_is_settled() {
        let (one, two) = (digest(&["a"]), digest(&["a", "b"]));
        let (index, _) = bucket_of(&Group::from("b"));
        assert_eq!(Digest::settled_differences([&two, &two], [&one, &one]), [index]);
        assert!(Digest::settled_differences([&one, &two], [&one, &one]).is_empty(), "theirs just changed");
        assert!(Digest::settled_differences([&two, &two], [&two, &one]).is_empty(), "ours just changed");
        assert!(Digest::settled_differences([&two, &two], [&two, &two]).is_empty());
    }
}
