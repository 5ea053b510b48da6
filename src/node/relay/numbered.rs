//! What is under way, by its number.

use std::collections::VecDeque;
use std::hash::{Hash, Hasher};

/// A map from numbers that are nearly always given in rising order, whose entries nearly always end in that order. A
/// queue, because a tree moves its entries about with every one that comes and goes.
///
/// The first and the last entry are there, and of those between no more are gone than there, or a few.
#[derive(Clone, Debug)]
pub(super) struct Numbered<T> {
    entries: VecDeque<(u64, Option<T>)>,
    /// How many are there.
    count: usize,
}

/// So many may be gone before it is worth while to close the gaps.
const GAPS: usize = 32;

impl<T> Numbered<T> {
    pub(super) fn new() -> Self {
        Self { entries: VecDeque::new(), count: 0 }
    }

    pub(super) fn len(&self) -> usize {
        self.count
    }

    pub(super) fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// The lowest number.
    pub(super) fn first(&self) -> Option<u64> {
        self.entries.front().map(|(number, _)| *number)
    }

    pub(super) fn contains(&self, number: u64) -> bool {
        self.get(number).is_some()
    }

    pub(super) fn get(&self, number: u64) -> Option<&T> {
        let place = self.place(number).ok()?;
        self.entries.get(place)?.1.as_ref()
    }

    pub(super) fn get_mut(&mut self, number: u64) -> Option<&mut T> {
        let place = self.place(number).ok()?;
        self.entries.get_mut(place)?.1.as_mut()
    }

    /// Of an entry that is there already the value is replaced.
    pub(super) fn insert(&mut self, number: u64, value: T) {
        if self.entries.back().is_none_or(|(last, _)| *last < number) {
            self.entries.push_back((number, Some(value)));
            self.count += 1;
            return;
        }
        match self.place(number) {
            Ok(place) => {
                if let Some((_, entry)) = self.entries.get_mut(place) {
                    self.count += usize::from(entry.replace(value).is_none());
                }
            }
            Err(place) => {
                self.entries.insert(place, (number, Some(value)));
                self.count += 1;
            }
        }
    }

    pub(super) fn remove(&mut self, number: u64) -> Option<T> {
        let place = self.place(number).ok()?;
        let value = self.entries.get_mut(place)?.1.take()?;
        self.removed();
        Some(value)
    }

    /// Removes one that nobody needs any more; it is not moved.
    pub(super) fn discard(&mut self, number: u64) {
        let place = self.place(number).ok();
        if let Some((_, entry)) = place.and_then(|place| self.entries.get_mut(place))
            && entry.is_some()
        {
            *entry = None;
            self.removed();
        }
    }

    fn removed(&mut self) {
        self.count -= 1;
        while self.entries.front().is_some_and(|(_, entry)| entry.is_none()) {
            self.entries.pop_front();
        }
        while self.entries.back().is_some_and(|(_, entry)| entry.is_none()) {
            self.entries.pop_back();
        }
        if self.entries.len() > 2 * self.count + GAPS {
            self.entries.retain(|(_, entry)| entry.is_some());
        }
    }

    /// In rising order.
    pub(super) fn iter(&self) -> impl Iterator<Item = (u64, &T)> {
        self.entries.iter().filter_map(|(number, entry)| Some((*number, entry.as_ref()?)))
    }

    /// In rising order.
    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = (u64, &mut T)> {
        self.entries.iter_mut().filter_map(|(number, entry)| Some((*number, entry.as_mut()?)))
    }

    /// Where it is, or belongs.
    fn place(&self, number: u64) -> Result<usize, usize> {
        let ahead = self.first().map_or(0, |first| number.saturating_sub(first));
        // without gaps it lies right there, and with gaps before that
        let place = usize::try_from(ahead).unwrap_or(usize::MAX).min(self.entries.len());
        match self.entries.get(place) {
            Some((there, _)) if *there == number => Ok(place),
            _ => self.entries.binary_search_by_key(&number, |(number, _)| *number),
        }
    }
}

impl<T: PartialEq> PartialEq for Numbered<T> {
    /// Gaps tell of the past only.
    fn eq(&self, other: &Self) -> bool {
        self.count == other.count && self.iter().eq(other.iter())
    }
}

impl<T: Eq> Eq for Numbered<T> {}

impl<T: Hash> Hash for Numbered<T> {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_usize(self.count);
        self.iter().for_each(|entry| entry.hash(state));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    proptest! {
        #[test]
        fn it_is_a_map(steps in prop::collection::vec((0u8..8, 0u64..300), 0..600)) {
            let (mut numbered, mut truth, mut next) = (Numbered::new(), BTreeMap::new(), 0);
            for (act, number) in steps {
                match act {
                    // mostly as it is meant: the next one, now and then with a gap
                    0..4 => {
                        next += 1 + number / 250;
                        numbered.insert(next, number);
                        truth.insert(next, number);
                    }
                    4 => {
                        numbered.insert(number, number);
                        truth.insert(number, number);
                    }
                    5 => {
                        let first = truth.first_key_value().map(|(first, _)| *first);
                        prop_assert_eq!(numbered.first(), first);
                        if let Some(first) = first {
                            prop_assert_eq!(numbered.remove(first), truth.remove(&first));
                        }
                    }
                    6 => prop_assert_eq!(numbered.remove(number), truth.remove(&number)),
                    _ => {
                        numbered.discard(number);
                        truth.remove(&number);
                    }
                }
                prop_assert_eq!(numbered.get(number), truth.get(&number));
                prop_assert_eq!(numbered.get_mut(next), truth.get_mut(&next));
                prop_assert_eq!(numbered.contains(next), truth.contains_key(&next));
                prop_assert!(numbered.iter().eq(truth.iter().map(|(number, value)| (*number, value))));
                prop_assert_eq!((numbered.len(), numbered.is_empty()), (truth.len(), truth.is_empty()));
                prop_assert!(numbered.entries.len() <= 2 * numbered.len() + GAPS);
                let there = |end: Option<&(u64, Option<u64>)>| end.is_none_or(|(_, entry)| entry.is_some());
                prop_assert!(there(numbered.entries.front()) && there(numbered.entries.back()));
            }
        }
    }

    #[test]
    fn equal_is_what_holds_the_same() {
        let mut gaps = Numbered::new();
        (0..9).for_each(|number| gaps.insert(number, ()));
        gaps.remove(4);
        let mut none = Numbered::new();
        (0..9).filter(|number| *number != 4).for_each(|number| none.insert(number, ()));
        assert_eq!(gaps, none);
    }
}
