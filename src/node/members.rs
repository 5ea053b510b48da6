//! The members of one group on this node.
//!
//! They live in chunks behind an `Arc`: reading takes no copy, and a change copies one chunk at most (none
//! while nobody reads).

use std::cmp::Ordering;
use std::sync::Arc;

/// How many members a chunk holds before it is split.
const CHUNK: usize = 128;

/// A member as the routing core knows it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct MemberRef<M> {
    /// Its number on this node.
    pub number: u64,
    /// How it is reached.
    pub handle: M,
}

type Chunk<M> = Arc<Vec<MemberRef<M>>>;

/// The members, in the order of their numbers.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Members<M> {
    /// Exactly one, as in most groups: it needs no chunk.
    One(MemberRef<M>),
    /// Two at least, `CHUNK` at most.
    Few(Chunk<M>),
    /// More; no chunk is empty.
    Many(Arc<Vec<Chunk<M>>>),
    /// Nobody.
    None,
}

impl<M: Clone> Members<M> {
    pub(crate) fn is_empty(&self) -> bool {
        matches!(self, Members::None)
    }

    pub(crate) fn len(&self) -> usize {
        match self {
            Members::None => 0,
            Members::One(_) => 1,
            Members::Few(chunk) => chunk.len(),
            Members::Many(chunks) => chunks.iter().map(|c| c.len()).sum(),
        }
    }

    pub(crate) fn contains(&self, number: u64) -> bool {
        let chunk = match self {
            Members::None => return false,
            Members::One(one) => return one.number == number,
            Members::Few(chunk) => chunk,
            Members::Many(chunks) => match chunks.get(place(chunks, number)) {
                Some(chunk) => chunk,
                None => return false,
            },
        };
        chunk.binary_search_by_key(&number, |m| m.number).is_ok()
    }

    /// Adds a member; `false` if the number is there already (the older handle stays).
    pub(crate) fn insert(&mut self, number: u64, handle: M) -> bool {
        let member = MemberRef { number, handle };
        match self {
            Members::None => {
                *self = Members::One(member);
                true
            }
            Members::One(one) => {
                let mut both = vec![one.clone(), member];
                match one.number.cmp(&number) {
                    Ordering::Less => {}
                    Ordering::Equal => return false,
                    Ordering::Greater => both.reverse(),
                }
                *self = Members::Few(Arc::new(both));
                true
            }
            Members::Few(chunk) => {
                if !insert_into(chunk, member) {
                    return false;
                }
                if chunk.len() > CHUNK {
                    let mut chunks = vec![chunk.clone()];
                    split(&mut chunks, 0);
                    *self = Members::Many(Arc::new(chunks));
                }
                true
            }
            Members::Many(chunks) => {
                let chunks = Arc::make_mut(chunks);
                let at = place(chunks, number).min(chunks.len().saturating_sub(1));
                let Some(chunk) = chunks.get_mut(at) else { return false };
                if !insert_into(chunk, member) {
                    return false;
                }
                if chunk.len() > CHUNK {
                    split(chunks, at);
                }
                true
            }
        }
    }

    /// Removes a member and gives its handle back.
    pub(crate) fn remove(&mut self, number: u64) -> Option<M> {
        match self {
            Members::None => None,
            Members::One(one) if one.number != number => None,
            Members::One(_) => match std::mem::replace(self, Members::None) {
                Members::One(one) => Some(one.handle),
                _ => None,
            },
            Members::Few(chunk) => {
                let handle = remove_from(chunk, number)?;
                if let [only] = chunk.as_slice() {
                    *self = Members::One(only.clone());
                }
                Some(handle)
            }
            Members::Many(chunks) => {
                let chunks = Arc::make_mut(chunks);
                let at = place(chunks, number);
                let chunk = chunks.get_mut(at)?;
                let handle = remove_from(chunk, number)?;
                if chunk.is_empty() {
                    chunks.remove(at);
                }
                if let [only] = chunks.as_slice() {
                    *self = match only.as_slice() {
                        [one] => Members::One(one.clone()),
                        _ => Members::Few(only.clone()),
                    };
                }
                Some(handle)
            }
        }
    }
}

/// The first chunk whose last member is not below `number`.
fn place<M>(chunks: &[Chunk<M>], number: u64) -> usize {
    chunks.partition_point(|chunk| chunk.last().is_some_and(|m| m.number < number))
}

fn insert_into<M: Clone>(chunk: &mut Chunk<M>, member: MemberRef<M>) -> bool {
    match chunk.binary_search_by_key(&member.number, |m| m.number) {
        Ok(_) => false,
        Err(at) => {
            Arc::make_mut(chunk).insert(at, member);
            true
        }
    }
}

fn remove_from<M: Clone>(chunk: &mut Chunk<M>, number: u64) -> Option<M> {
    let at = chunk.binary_search_by_key(&number, |m| m.number).ok()?;
    Some(Arc::make_mut(chunk).remove(at).handle)
}

/// Splits an overfull chunk. Numbers mostly rise, so an overfull last chunk keeps all but the newest.
fn split<M: Clone>(chunks: &mut Vec<Chunk<M>>, at: usize) {
    let last = at + 1 == chunks.len();
    let Some(chunk) = chunks.get_mut(at) else { return };
    let keep = if last { CHUNK } else { CHUNK / 2 };
    let tail = Arc::make_mut(chunk).split_off(keep);
    chunks.insert(at + 1, Arc::new(tail));
}

/// A snapshot of the members of one group on this node. Members that join or leave later do not change it.
#[derive(Clone, Debug)]
pub struct LocalMembers<M>(Members<M>);

impl<M: Clone> LocalMembers<M> {
    pub(crate) fn new(members: Members<M>) -> Self {
        Self(members)
    }

    /// Of a group without members here.
    pub fn none() -> Self {
        Self(Members::None)
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The members in the order of their numbers.
    pub fn iter(&self) -> impl Iterator<Item = &MemberRef<M>> {
        let (few, many): (&[MemberRef<M>], &[Chunk<M>]) = match &self.0 {
            Members::None => (&[], &[]),
            Members::One(one) => (std::slice::from_ref(one), &[]),
            Members::Few(chunk) => (chunk, &[]),
            Members::Many(chunks) => (&[], chunks),
        };
        few.iter().chain(many.iter().flat_map(|chunk| chunk.iter()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn members_equal_an_ordered_map(steps in prop::collection::vec((any::<bool>(), 0u64..600), 0..1500)) {
            let mut members = Members::None;
            let mut truth = std::collections::BTreeMap::new();
            for (add, number) in steps {
                let before = LocalMembers::new(members.clone());
                let count = truth.len();
                if add {
                    let new = !truth.contains_key(&number);
                    prop_assert_eq!(members.insert(number, number as u8), new);
                    truth.entry(number).or_insert(number as u8);
                } else {
                    prop_assert_eq!(members.remove(number), truth.remove(&number));
                }
                prop_assert_eq!(before.iter().count(), count, "a snapshot does not change");
                prop_assert_eq!(members.len(), truth.len());
                prop_assert_eq!(members.contains(number), truth.contains_key(&number));
                prop_assert_eq!(members.is_empty(), truth.is_empty());
            }
            let seen: Vec<u64> = LocalMembers::new(members).iter().map(|m| m.number).collect();
            prop_assert_eq!(seen, truth.keys().copied().collect::<Vec<_>>());
        }
    }

    #[test]
    fn a_large_group_that_grows_in_order_fills_its_chunks() {
        let mut members = Members::None;
        for number in 0..1000 {
            members.insert(number, ());
        }
        let Members::Many(chunks) = &members else { panic!("1000 members need chunks") };
        assert_eq!(chunks.len(), 1000usize.div_ceil(CHUNK));
    }
}
