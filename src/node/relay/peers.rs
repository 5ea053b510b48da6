//! A small set of peers: a broadcast waits for two or three of them, and in a flood for all.

use smallvec::SmallVec;

use crate::types::Peer;

const NEAR: usize = 4;

/// Sorted; two fit without a list of their own.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Peers(SmallVec<[Peer; 2]>);

impl Peers {
    /// Whether it was not there.
    pub(super) fn insert(&mut self, peer: Peer) -> bool {
        match self.0.binary_search(&peer) {
            Ok(_) => false,
            Err(at) => {
                self.0.insert(at, peer);
                true
            }
        }
    }

    /// Whether it was there.
    pub(super) fn remove(&mut self, peer: &Peer) -> bool {
        // most sets are small, and hold the very name that is asked for: then no bytes are compared
        let near = self.0.iter().take(NEAR).position(|there| there.is_very(peer));
        let place = near.or_else(|| self.0.binary_search(peer).ok());
        place.is_some_and(|place| {
            self.0.remove(place);
            true
        })
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn iter(&self) -> std::slice::Iter<'_, Peer> {
        self.0.iter()
    }
}

/// Who is sent a broadcast.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Receiver {
    pub(super) peer: Peer,
    /// It has not handled it.
    pub(super) waits: bool,
    /// It is the router, whose answer decides who else must get it.
    pub(super) asked: bool,
}

/// Everyone a broadcast was sent to or is about to be, each once. Sorted; two fit without a list of their own.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Receivers(SmallVec<[Receiver; 2]>);

impl Receivers {
    /// One who has to handle it; `false` if it is there already, whatever became of it.
    pub(super) fn insert(&mut self, peer: Peer, asked: bool) -> bool {
        match self.0.binary_search_by(|there| there.peer.cmp(&peer)) {
            Ok(_) => false,
            Err(at) => {
                self.0.insert(at, Receiver { peer, waits: true, asked });
                true
            }
        }
    }

    pub(super) fn get_mut(&mut self, peer: &Peer) -> Option<&mut Receiver> {
        // see `Peers::remove`
        let near = self.0.iter().take(NEAR).position(|there| there.peer.is_very(peer));
        let place = near.or_else(|| self.0.binary_search_by(|there| there.peer.cmp(peer)).ok());
        self.0.get_mut(place?)
    }

    /// Nobody waits for this one any more; whether anybody did.
    pub(super) fn handled(&mut self, peer: &Peer) -> bool {
        self.get_mut(peer).is_some_and(|there| std::mem::take(&mut there.waits))
    }

    /// Nobody is asked any more; the one who was.
    pub(super) fn answered(&mut self) -> Option<&Receiver> {
        let there = self.0.iter_mut().find(|there| there.asked)?;
        there.asked = false;
        Some(there)
    }

    /// Who is asked.
    pub(super) fn router(&self) -> Option<&Peer> {
        self.0.iter().find(|there| there.asked).map(|there| &there.peer)
    }

    /// Who has not handled it.
    pub(super) fn waiting(&self) -> impl Iterator<Item = &Peer> {
        self.0.iter().filter(|there| there.waits).map(|there| &there.peer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::{Incarnation, NodeId};
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn it_is_a_set(steps in prop::collection::vec((any::<bool>(), 0u64..6), 0..40)) {
            let (mut peers, mut truth) = (Peers::default(), std::collections::BTreeSet::new());
            for (add, life) in steps {
                let peer = Peer::new(NodeId::new("a").unwrap(), Incarnation::new(life + 1).unwrap());
                if add {
                    prop_assert_eq!(peers.insert(peer.clone()), truth.insert(peer.clone()));
                } else {
                    prop_assert_eq!(peers.remove(&peer), truth.remove(&peer));
                }
                prop_assert!(peers.iter().eq(truth.iter()));
                prop_assert_eq!(peers.is_empty(), truth.is_empty());
            }
        }
    }

    #[test]
    fn a_receiver_is_there_once_and_is_waited_for_and_asked_until_it_is_not() {
        let peer = |life| Peer::new(NodeId::new("a").unwrap(), Incarnation::new(life).unwrap());
        let mut receivers = Receivers::default();
        assert!(receivers.insert(peer(3), false) && receivers.insert(peer(2), true));
        assert!(!receivers.insert(peer(2), false), "it is there");
        assert_eq!(receivers.router(), Some(&peer(2)), "and still asked");
        assert!(receivers.waiting().eq(&[peer(2), peer(3)]));
        assert!(receivers.handled(&peer(2)) && !receivers.handled(&peer(2)) && !receivers.handled(&peer(9)));
        assert!(receivers.waiting().eq(&[peer(3)]));
        assert_eq!(
            receivers.answered().map(|there| (there.peer.clone(), there.waits)),
            Some((peer(2), false))
        );
        assert_eq!(receivers.router(), None);
        assert_eq!(receivers.answered(), None);
        assert!(!receivers.insert(peer(2), false), "nobody gets it twice");
    }
}
