//! What a node may spend on filling copies: one rate for all partitions of a cache, so that a node that comes or goes
//! does not take the whole network.
//!
//! Whoever has a piece to send takes the next free time, and comes back when it is there. So a thousand partitions that
//! wait wake one by one, and not all of them each time that one may go.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

/// What may be sent ahead of the rate.
const BURST: Duration = Duration::from_millis(100);

/// The time until which all is spent. A clone is the same one: all shards of a cache on one node share it.
#[derive(Clone, Debug, Default)]
pub struct Budget(Arc<Mutex<Duration>>);

fn time_of(bytes: usize, rate: u64) -> Duration {
    let nanos = (bytes as u128 * 1_000_000_000) / u128::from(rate.max(1));
    Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
}

impl Budget {
    /// Takes the next free time for about so many bytes, at `rate` bytes a second.
    pub(crate) fn reserve(&self, now: Duration, bytes: usize, rate: u64) -> Slot {
        let time = time_of(bytes, rate);
        let mut spent = self.0.lock();
        let at = spent.saturating_sub(BURST);
        *spent = (*spent).max(now).saturating_add(time);
        Slot { at, time, budget: self.clone() }
    }
}

/// A time that was taken; dropped unused it is given back.
#[derive(Debug)]
pub(crate) struct Slot {
    /// From when on it may be used.
    pub(crate) at: Duration,
    time: Duration,
    budget: Budget,
}

impl Slot {
    /// So many bytes went.
    pub(crate) fn spend(mut self, bytes: usize, rate: u64) {
        let used = time_of(bytes, rate);
        let mut spent = self.budget.0.lock();
        *spent = spent.saturating_sub(self.time).saturating_add(used);
        drop(spent);
        self.time = Duration::ZERO;
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        let mut spent = self.budget.0.lock();
        *spent = spent.saturating_sub(self.time);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    // caught by: a budget of its own for each clone; nothing given back
    #[test]
    fn all_that_share_it_go_one_after_the_other_at_the_rate() {
        let (budget, now) = (Budget::default(), ms(1000));
        let other = budget.clone();
        // 100 bytes are a tenth of a second
        let slots: Vec<Slot> = [&budget, &other, &budget].map(|budget| budget.reserve(now, 100, 1000)).into();
        assert_eq!(slots.iter().map(|slot| slot.at).collect::<Vec<_>>(), [ms(0), ms(1000), ms(1100)]);
        for slot in slots {
            slot.spend(100, 1000);
        }
        drop(other.reserve(now, 1_000_000, 1000));
        assert_eq!(budget.reserve(now, 1, 1000).at, ms(1200), "what was not used was given back");
        budget.reserve(now, 1000, 1000).spend(100, 1000);
        assert_eq!(budget.reserve(now, 1, 1000).at, ms(1300), "and what was too much");
        assert_eq!(
            budget.reserve(ms(60_000), 1, 1000).at,
            ms(1300),
            "at once: nothing is saved up beyond a burst"
        );
    }
}
