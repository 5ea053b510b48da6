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

    pub(super) fn contains(&self, peer: &Peer) -> bool {
        self.0.binary_search(peer).is_ok()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn iter(&self) -> std::slice::Iter<'_, Peer> {
        self.0.iter()
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
                prop_assert_eq!(peers.contains(&peer), truth.contains(&peer));
                prop_assert!(peers.iter().eq(truth.iter()));
                prop_assert_eq!(peers.is_empty(), truth.is_empty());
            }
        }
    }
}
