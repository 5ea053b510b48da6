//! Which broadcasts of one origin were seen here.

use std::collections::VecDeque;

use crate::node::Time;

/// What the window says of a broadcast.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Seen {
    New,
    Duplicate,
    /// So far above the floor that the window cannot hold it; no origin has so many open.
    OutOfRange,
}

/// The broadcasts of one origin at and above its floor. Below the floor all are settled: what comes again
/// from there is a second copy.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Window {
    floor: u64,
    /// A bit for each broadcast, 64 in a word; the first word has the floor in it. Bits below the floor are not
    /// set and the last word is not empty, so that equal windows look alike.
    seen: VecDeque<u64>,
    pub(super) used: Time,
}

/// Broadcasts in a word.
const WORD: u64 = u64::BITS as u64;

impl Window {
    pub(super) fn new(now: Time) -> Self {
        Self { floor: 0, seen: VecDeque::new(), used: now }
    }

    pub(super) fn len(&self) -> usize {
        self.seen.iter().map(|word| word.count_ones() as usize).sum()
    }

    /// Notes broadcast `seq` of an origin whose lowest open broadcast is `floor`.
    pub(super) fn note(&mut self, seq: u64, floor: u64, size: u64, now: Time) -> Seen {
        self.used = now;
        if floor > self.floor {
            self.raise(floor);
        }
        if seq < self.floor {
            Seen::Duplicate
        } else if seq - self.floor >= size {
            Seen::OutOfRange
        } else if self.insert(seq) {
            Seen::New
        } else {
            Seen::Duplicate
        }
    }

    fn raise(&mut self, floor: u64) {
        let passed = floor / WORD - self.floor / WORD;
        self.floor = floor;
        let passed = usize::try_from(passed).unwrap_or(usize::MAX).min(self.seen.len());
        self.seen.drain(..passed);
        if let Some(first) = self.seen.front_mut() {
            *first &= u64::MAX << (floor % WORD);
            // only the last word may be the first
            if *first == 0 && self.seen.len() == 1 {
                self.seen.clear();
            }
        }
    }

    /// Whether it was not there; `seq` is not below the floor.
    fn insert(&mut self, seq: u64) -> bool {
        let Ok(at) = usize::try_from(seq / WORD - self.floor / WORD) else { return false };
        if at >= self.seen.len() {
            self.seen.resize(at + 1, 0);
        }
        let bit = 1 << (seq % WORD);
        let Some(word) = self.seen.get_mut(at) else { return false };
        let new = *word & bit == 0;
        *word |= bit;
        new
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_broadcast_is_new_once() {
        let mut window = Window::new(Time::ZERO);
        assert_eq!(window.note(5, 3, 100, Time::ZERO), Seen::New);
        assert_eq!(window.note(5, 3, 100, Time::ZERO), Seen::Duplicate);
        assert_eq!(window.note(4, 3, 100, Time::ZERO), Seen::New, "out of order is fine");
        assert_eq!(window.note(2, 3, 100, Time::ZERO), Seen::Duplicate, "below the floor all are settled");
    }

    proptest::proptest! {
        #[test]
        fn a_window_is_a_set_above_its_floor(
            steps in proptest::collection::vec((0u64..400, 0u64..8), 0..300),
        ) {
            let (mut window, mut seen, mut floor) = (Window::new(Time::ZERO), std::collections::BTreeSet::new(), 0);
            for (seq, back) in steps {
                // floors that rise along with the numbers, and now and then an older one
                floor = floor.max(seq.saturating_sub(back * 30));
                seen.retain(|old| *old >= floor);
                let expected = match seq {
                    _ if seq < floor => Seen::Duplicate,
                    _ if seq - floor >= 100 => Seen::OutOfRange,
                    _ if seen.insert(seq) => Seen::New,
                    _ => Seen::Duplicate,
                };
                proptest::prop_assert_eq!(window.note(seq, floor, 100, Time::ZERO), expected);
                proptest::prop_assert_eq!(window.len(), seen.len());
                proptest::prop_assert!(window.seen.back() != Some(&0));
            }
        }
    }

    #[test]
    fn the_floor_frees_what_is_below_and_never_falls() {
        let mut window = Window::new(Time::ZERO);
        (1..=50).for_each(|seq| assert_eq!(window.note(seq, 1, 100, Time::ZERO), Seen::New));
        assert_eq!(window.note(51, 51, 100, Time::ZERO), Seen::New);
        assert_eq!(window.len(), 1);
        assert_eq!(window.note(7, 1, 100, Time::ZERO), Seen::Duplicate, "an older floor changes nothing");
        assert_eq!(window.note(151, 51, 100, Time::ZERO), Seen::OutOfRange);
        assert_eq!(window.len(), 1);
    }
}
