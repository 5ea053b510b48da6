//! The links to all connected peers.

use super::link::Link;
use crate::types::{NodeId, Peer};

/// Sorted by name, one of each.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Links(Vec<Link>);

/// So many are looked at for the very name that is asked for, which compares no bytes; most clusters have no more.
const NEAR: usize = 8;

impl Links {
    pub(super) fn get(&self, peer: &Peer) -> Option<&Link> {
        self.0.get(self.place(peer)?)
    }

    pub(super) fn get_mut(&mut self, peer: &Peer) -> Option<&mut Link> {
        let place = self.place(peer)?;
        self.0.get_mut(place)
    }

    /// The one of this name, in whichever life.
    pub(super) fn named(&self, node: &NodeId) -> Option<&Link> {
        self.0.get(self.search(node).ok()?)
    }

    /// Takes the place of another one of that name.
    pub(super) fn insert(&mut self, link: Link) {
        match self.search(&link.peer.node) {
            Ok(place) => {
                if let Some(there) = self.0.get_mut(place) {
                    *there = link;
                }
            }
            Err(place) => self.0.insert(place, link),
        }
    }

    pub(super) fn remove(&mut self, peer: &Peer) {
        if let Some(place) = self.place(peer) {
            self.0.remove(place);
        }
    }

    pub(super) fn iter(&self) -> std::slice::Iter<'_, Link> {
        self.0.iter()
    }

    pub(super) fn iter_mut(&mut self) -> std::slice::IterMut<'_, Link> {
        self.0.iter_mut()
    }

    fn place(&self, peer: &Peer) -> Option<usize> {
        let near = self.0.iter().take(NEAR).position(|link| link.peer.is_very(peer));
        near.or_else(|| {
            let place = self.search(&peer.node).ok()?;
            self.0.get(place).is_some_and(|link| link.peer == *peer).then_some(place)
        })
    }

    fn search(&self, node: &NodeId) -> Result<usize, usize> {
        self.0.binary_search_by(|link| link.peer.node.cmp(node))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::Incarnation;

    #[test]
    fn a_link_is_found_by_its_name_and_life_whoever_spells_it() {
        let peer = |number: usize, life| {
            Peer::new(NodeId::new(format!("n{number:02}")).unwrap(), Incarnation::new(life).unwrap())
        };
        let mut links = Links::default();
        for number in (0..30).rev() {
            links.insert(Link::new(peer(number, 1)));
        }
        links.insert(Link::new(peer(7, 2)));
        assert!(links.iter().map(|link| &link.peer).is_sorted());
        for number in 0..30 {
            let life = if number == 7 { 2 } else { 1 };
            let there = links.named(&peer(number, 9).node).unwrap().peer.clone();
            assert_eq!(there, peer(number, life));
            // by the name itself, and by one that only reads the same
            for asked in [there, peer(number, life)] {
                assert_eq!(links.get(&asked).map(|link| &link.peer), Some(&asked));
                assert_eq!(links.get_mut(&asked).map(|link| link.peer.clone()), Some(asked));
            }
            assert!(links.get(&peer(number, 3)).is_none());
        }
        links.remove(&peer(7, 1));
        assert!(links.get(&peer(7, 2)).is_some(), "that was another life");
        links.remove(&peer(7, 2));
        assert!(links.named(&peer(7, 2).node).is_none() && links.iter().len() == 29);
    }
}
