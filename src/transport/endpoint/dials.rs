//! When which node may be dialled.

use std::collections::BTreeMap;
use std::time::Duration;

use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::transport::link::Time;
use crate::types::NodeId;

/// The wait after the second attempt in a row that led to no link; the first is followed at once.
const FIRST: Duration = Duration::from_millis(5);
const LONGEST: Duration = Duration::from_secs(1);
/// The wait after a refusal: only a change over there can help.
const REFUSED: Duration = Duration::from_secs(10);
/// How many names are remembered. Of more than that, some are dialled sooner than they should.
const NAMES: usize = 16_384;

#[derive(Debug, Default)]
pub(super) struct Dials {
    names: BTreeMap<NodeId, Dial>,
}

#[derive(Debug, Default)]
struct Dial {
    under_way: bool,
    failed: u32,
    not_before: Time,
}

impl Dials {
    /// Whether an attempt may begin now; it has begun then.
    pub(super) fn begin(&mut self, node: &NodeId, now: Time) -> bool {
        if self.names.len() >= NAMES && !self.names.contains_key(node) {
            self.names.retain(|_, dial| dial.under_way);
        }
        let dial = self.names.entry(node.clone()).or_default();
        if dial.under_way || now < dial.not_before {
            return false;
        }
        dial.under_way = true;
        true
    }

    /// An attempt is over. `seed` differs between nodes, so that many do not come back at once.
    pub(super) fn end(&mut self, node: &NodeId, now: Time, seed: u64) {
        let Some(dial) = self.names.get_mut(node) else { return };
        dial.under_way = false;
        let wait = match dial.failed {
            0 => Duration::ZERO,
            failed => LONGEST.min(FIRST * (1 << failed.min(10))),
        };
        dial.failed = dial.failed.saturating_add(1);
        let jitter = xxh3_64_with_seed(node.as_bytes(), seed.wrapping_add(u64::from(dial.failed))) % 256;
        // between three quarters and the whole
        let wait = wait - wait * u32::try_from(jitter).unwrap_or(0) / 1024;
        dial.not_before = dial.not_before.max(now + wait);
    }

    /// An attempt was refused. Only of attempts: nobody else may say whom we dial, or fill the table.
    pub(super) fn refused(&mut self, node: &NodeId, now: Time) {
        if let Some(dial) = self.names.get_mut(node) {
            dial.not_before = now + REFUSED;
        }
    }

    pub(super) fn linked(&mut self, node: &NodeId) {
        if let Some(dial) = self.names.get_mut(node) {
            (dial.failed, dial.not_before) = (0, Time::ZERO);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attempts_wait_longer_each_time_and_a_link_forgives() {
        let (mut dials, node) = (Dials::default(), NodeId::new("n").unwrap());
        let mut now = Time::ZERO;
        let mut waits = Vec::new();
        for _ in 0..12 {
            assert!(dials.begin(&node, now));
            assert!(!dials.begin(&node, now), "one at a time");
            dials.end(&node, now, 7);
            let began = now;
            while !dials.begin(&node, now) {
                now += Duration::from_millis(1);
            }
            waits.push(now - began);
            dials.names.get_mut(&node).unwrap().under_way = false;
        }
        assert_eq!(waits[0], Duration::ZERO);
        for (failed, wait) in (1..).zip(&waits[1..]) {
            let whole = LONGEST.min(FIRST * (1 << failed));
            let whole_tick = whole + Duration::from_millis(1);
            assert!(*wait >= whole * 3 / 4 && *wait <= whole_tick, "{waits:?}");
        }
        dials.linked(&node);
        assert!(dials.begin(&node, now));
        dials.end(&node, now, 7);
        assert!(dials.begin(&node, now), "after a link that broke, at once");
    }

    #[test]
    fn the_refused_and_the_many_wait_in_bounded_room() {
        let mut dials = Dials::default();
        let name = |number: usize| NodeId::new(format!("n{number}")).unwrap();
        dials.refused(&name(0), Time::ZERO);
        assert!(dials.names.is_empty(), "it was never dialled");
        assert!(dials.begin(&name(0), Time::ZERO));
        dials.refused(&name(0), Time::ZERO);
        dials.end(&name(0), Time::ZERO, 7);
        assert!(!dials.begin(&name(0), REFUSED / 2));
        assert!(dials.begin(&name(0), REFUSED));
        for number in 1..NAMES * 2 {
            assert!(dials.begin(&name(number), REFUSED));
            dials.end(&name(number), REFUSED, 7);
        }
        assert!(dials.names.len() <= NAMES);
        assert!(!dials.begin(&name(0), REFUSED), "it is still under way");
    }
}
