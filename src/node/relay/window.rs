//! Which broadcasts of one origin were seen here.

use std::collections::BTreeSet;

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
    seen: BTreeSet<u64>,
    pub(super) used: Time,
}

impl Window {
    pub(super) fn new(now: Time) -> Self {
        Self { floor: 0, seen: BTreeSet::new(), used: now }
    }

    pub(super) fn len(&self) -> usize {
        self.seen.len()
    }

    /// Notes broadcast `seq` of an origin whose lowest open broadcast is `floor`.
    pub(super) fn note(&mut self, seq: u64, floor: u64, size: u64, now: Time) -> Seen {
        self.used = now;
        if floor > self.floor {
            self.floor = floor;
            while self.seen.first().is_some_and(|lowest| *lowest < floor) {
                self.seen.pop_first();
            }
        }
        if seq < self.floor {
            Seen::Duplicate
        } else if seq - self.floor >= size {
            Seen::OutOfRange
        } else if self.seen.insert(seq) {
            Seen::New
        } else {
            Seen::Duplicate
        }
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
