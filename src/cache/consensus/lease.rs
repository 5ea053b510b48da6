//! Leases: a promise between two nodes, for all partitions at once, that the one will not make itself primary in place of
//! the other for a while. A primary reads only while all other owners have promised it.
//!
//! Who grants counts from the moment it answers, who holds from the moment it asked, which is earlier. So while both
//! clocks run at about the same speed (the one who grants adds an eighth), a lease is over at the holder before the other
//! one does anything against it. A grant names how much of the group's log its giver has heard: what the giver has taken
//! over before is in there, and whoever has not heard that much may not use the grant yet.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use crate::types::Peer;

/// How long a lease is.
pub(crate) const LEASE: Duration = Duration::from_millis(1500);
/// How often a primary asks.
const ASK: Duration = Duration::from_millis(400);
/// How much longer who grants keeps it: clocks differ in speed by less.
const MARGIN: Duration = Duration::from_millis(190);
/// How many grants of one peer are kept: newer ones may not be usable yet.
const KEPT: usize = 4;

#[derive(Debug)]
struct Held {
    until: Duration,
    heard: u64,
}

/// The leases of one node; see the [module](self).
#[derive(Debug, Default)]
pub(crate) struct Leases {
    granted: BTreeMap<Peer, Duration>,
    held: BTreeMap<Peer, VecDeque<Held>>,
    next_ask: Option<Duration>,
}

impl Leases {
    // ---- as the one who grants

    /// The end of the lease that is granted.
    pub(crate) fn grant(&mut self, to: &Peer, now: Duration) {
        let until = now + LEASE + MARGIN;
        let end = self.granted.entry(to.clone()).or_default();
        *end = until.max(*end);
    }

    /// Until when this node has promised to do nothing against a peer.
    pub(crate) fn bound_until(&self, peer: &Peer) -> Option<Duration> {
        self.granted.get(peer).copied()
    }

    // ---- as the one who holds

    pub(crate) fn granted(&mut self, by: &Peer, asked: Duration, heard: u64, now: Duration) {
        if asked > now {
            // nobody asks in the future
            return;
        }
        let held = self.held.entry(by.clone()).or_default();
        held.push_back(Held { until: asked + LEASE, heard });
        held.retain(|lease| lease.until > now);
        if held.len() > KEPT {
            held.pop_front();
        }
    }

    /// Whether this peer's promise holds, for a node that has heard so much.
    pub(crate) fn holds(&self, from: &Peer, heard: u64, now: Duration) -> bool {
        let held = self.held.get(from).into_iter().flatten();
        held.into_iter().any(|lease| now < lease.until && lease.heard <= heard)
    }

    /// Everybody was asked.
    pub(crate) fn asked(&mut self, now: Duration) {
        self.next_ask = Some(now + ASK);
    }

    /// When to ask next; `None` until there was something to ask for.
    pub(crate) fn next_ask(&self) -> Option<Duration> {
        self.next_ask
    }

    /// Asks at once: somebody came, or this node has become a primary.
    pub(crate) fn hurry(&mut self, now: Duration) {
        self.next_ask = Some(now);
    }

    /// Forgets what is long over.
    pub(crate) fn clean(&mut self, now: Duration) {
        self.granted.retain(|_, until| *until > now);
        self.held.retain(|_, held| held.back().is_some_and(|lease| lease.until > now));
    }

    pub(crate) fn len(&self) -> usize {
        self.granted.len() + self.held.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::{Incarnation, NodeId};

    // caught by: a lease counted from its answer, or used by one who has not heard what its giver had
    #[test]
    fn a_lease_ends_at_its_holder_first() {
        let peer = Peer::new(NodeId::new("a").unwrap(), Incarnation::MIN);
        let ms = Duration::from_millis;
        let (mut holder, mut giver) = (Leases::default(), Leases::default());
        // asked at 100, granted at 150, heard of at 700
        giver.grant(&peer, ms(150));
        holder.granted(&peer, ms(100), 7, ms(700));
        let bound = giver.bound_until(&peer).unwrap();
        let over = (0..3000).map(ms).find(|now| *now >= ms(700) && !holder.holds(&peer, 7, *now)).unwrap();
        assert!(over < bound, "{over:?} {bound:?}");
        assert_eq!(over, ms(100) + LEASE);
        assert!(!holder.holds(&peer, 6, ms(800)), "it does not know what was decided");
        holder.granted(&peer, ms(900), 9, ms(950));
        assert!(holder.holds(&peer, 7, ms(960)), "the older grant is still good");
    }
}
