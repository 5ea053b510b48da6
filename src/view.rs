//! Whom a node counts on: the view, and the hash by which nodes compare views.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Deserializer, Serialize};
use xxhash_rust::xxh3::xxh3_64;

use crate::ring::RingConfig;
use crate::types::{NodeId, Peer};

/// Whether a member of a view takes routing work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Standing {
    /// It has its tokens on the ring.
    Active,
    /// It is on its way out: still a member, source and caller, but no router unless all members drain.
    Draining,
}

impl Standing {
    /// The byte that stands for it in the canonical form of a view.
    const fn code(self) -> u8 {
        match self {
            Standing::Active => 0,
            Standing::Draining => 1,
        }
    }
}

/// Equal hashes mean equal views and equal ring parameters.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ViewHash(u64);

impl ViewHash {
    /// What a caller that is not ready says. No view has it, so no router accepts it.
    pub const UNSETTLED: Self = Self(0);

    /// The hash of a view and of the parameters of the ring that is made of it: xxh3 (64 bits, seed 0) over
    ///
    /// ```text
    /// vnodes: u32 LE | members: u32 LE
    /// then per member, sorted by id:  len(id): u32 LE | id | incarnation: u64 LE | standing: u8
    /// ```
    ///
    /// with 1 in the place of 0, which is [`ViewHash::UNSETTLED`].
    ///
    /// With the view of another scope this is the tag for its routers ([`Muster::targets`](crate::Muster::targets));
    /// the guide [`regions`](crate::guide::regions) shows it at work.
    ///
    /// ```
    /// use muster_router::{Incarnation, NodeId, Peer, RingConfig, Standing, View, ViewHash};
    /// let member = |incarnation| Peer::new(NodeId::new("a").unwrap(), Incarnation::new(incarnation).unwrap());
    /// let hash = |incarnation| {
    ///     let view = View::new([(member(incarnation), Standing::Active)]);
    ///     ViewHash::of(&view, &RingConfig::default())
    /// };
    /// assert_eq!(hash(1), hash(1));
    /// assert_ne!(hash(1), hash(2), "a node that was started again is another member");
    /// ```
    pub fn of(view: &View, ring: &RingConfig) -> Self {
        Self::settled(xxh3_64(&view.canonical_bytes(ring)))
    }

    /// The hash of a view, which is never taken for [`ViewHash::UNSETTLED`].
    const fn settled(hash: u64) -> Self {
        Self(if hash == 0 { 1 } else { hash })
    }

    /// The number.
    pub const fn get(self) -> u64 {
        self.0
    }

    /// A hash that came from elsewhere.
    pub const fn from_raw(hash: u64) -> Self {
        Self(hash)
    }
}

impl fmt::Display for ViewHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

impl fmt::Debug for ViewHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The peers that a node has committed to: sorted by [`NodeId`], at most one life per node. Cloning is
/// cheap.
///
/// ```
/// use muster_router::{Incarnation, NodeId, Peer, Standing, View};
/// let peer = Peer::new(NodeId::new("a").unwrap(), Incarnation::MIN);
/// let view = View::new([(peer.clone(), Standing::Active)]);
/// assert!(view.contains(&peer));
/// ```
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(transparent)]
pub struct View(Arc<[(Peer, Standing)]>);

impl View {
    /// The view of these peers. Of two lives of one node the later one stays; of one life given twice
    /// `Draining` stays, because a drain is never taken back.
    pub fn new(members: impl IntoIterator<Item = (Peer, Standing)>) -> Self {
        let mut latest: BTreeMap<NodeId, (Peer, Standing)> = BTreeMap::new();
        for (peer, standing) in members {
            let rank = |peer: &Peer, standing| (peer.incarnation, standing);
            match latest.get(&peer.node) {
                Some((known, known_standing)) if rank(known, *known_standing) >= rank(&peer, standing) => {}
                Some(_) | None => {
                    latest.insert(peer.node.clone(), (peer, standing));
                }
            }
        }
        Self(latest.into_values().collect())
    }

    /// The view of these peers, which are sorted by node and of which no two have the same.
    pub(crate) fn of_sorted(members: impl ExactSizeIterator<Item = (Peer, Standing)>) -> Self {
        let view = Self(members.collect());
        debug_assert!(view.0.is_sorted_by(|a, b| a.0.node < b.0.node));
        view
    }

    /// The view of a node that knows no other.
    pub fn alone(peer: Peer) -> Self {
        Self(Arc::new([(peer, Standing::Active)]))
    }

    /// How many members.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there is no member. A running node's view has at least itself.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The members with their standing, sorted by node.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = (&Peer, Standing)> + ExactSizeIterator + Clone {
        self.0.iter().map(|(peer, standing)| (peer, *standing))
    }

    /// The members, sorted by node.
    pub fn peers(&self) -> impl DoubleEndedIterator<Item = &Peer> + ExactSizeIterator + Clone {
        self.0.iter().map(|(peer, _)| peer)
    }

    /// Whether exactly this life of the node is a member.
    pub fn contains(&self, peer: &Peer) -> bool {
        self.standing(peer).is_some()
    }

    /// The life of `node` that is a member.
    pub fn peer_of(&self, node: &NodeId) -> Option<&Peer> {
        self.entry(node).map(|(peer, _)| peer)
    }

    /// The standing of exactly this life of the node; `None` if it is no member.
    pub fn standing(&self, peer: &Peer) -> Option<Standing> {
        self.entry(&peer.node).filter(|(member, _)| member == peer).map(|(_, standing)| *standing)
    }

    /// The nodes that own tokens: the active members, or all of them if none is active (the last node that
    /// drains still has to route for itself).
    pub fn ring_nodes(&self) -> Vec<NodeId> {
        let any_active = self.0.iter().any(|(_, standing)| *standing == Standing::Active);
        self.iter()
            .filter(|(_, standing)| !any_active || *standing == Standing::Active)
            .map(|(peer, _)| peer.node.clone())
            .collect()
    }

    /// See [`ViewHash::of`].
    pub fn hash(&self, ring: &RingConfig) -> ViewHash {
        ViewHash::of(self, ring)
    }

    fn entry(&self, node: &NodeId) -> Option<&(Peer, Standing)> {
        let index = self.0.binary_search_by(|(peer, _)| peer.node.cmp(node)).ok()?;
        self.0.get(index)
    }

    /// See [`ViewHash::of`]. Every part has a fixed size or its length before it, so two different views
    /// never have the same bytes.
    fn canonical_bytes(&self, ring: &RingConfig) -> Vec<u8> {
        let names: usize = self.peers().map(|peer| peer.node.as_bytes().len()).sum();
        let mut bytes = Vec::with_capacity(8 + names + 13 * self.len());
        bytes.extend_from_slice(&ring.clamped().vnodes.to_le_bytes());
        bytes.extend_from_slice(&(self.len() as u32).to_le_bytes());
        for (peer, standing) in self.iter() {
            let id = peer.node.as_bytes();
            bytes.extend_from_slice(&(id.len() as u32).to_le_bytes());
            bytes.extend_from_slice(id);
            bytes.extend_from_slice(&peer.incarnation.get().to_le_bytes());
            bytes.push(standing.code());
        }
        bytes
    }
}

impl<'de> Deserialize<'de> for View {
    /// Refuses a view that names a node twice: no node sends one.
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let members = Vec::<(Peer, Standing)>::deserialize(deserializer)?;
        let given = members.len();
        let view = Self::new(members);
        if view.len() != given {
            return Err(serde::de::Error::custom(format_args!(
                "a view names each node once; {given} members name {} nodes",
                view.len()
            )));
        }
        Ok(view)
    }
}

impl FromIterator<(Peer, Standing)> for View {
    fn from_iter<I: IntoIterator<Item = (Peer, Standing)>>(members: I) -> Self {
        Self::new(members)
    }
}

impl fmt::Display for View {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("{")?;
        for (index, (peer, standing)) in self.iter().enumerate() {
            let separator = if index == 0 { "" } else { ", " };
            let mark = match standing {
                Standing::Active => "",
                Standing::Draining => " draining",
            };
            write!(f, "{separator}{peer}{mark}")?;
        }
        f.write_str("}")
    }
}

impl fmt::Debug for View {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_view_has_the_unsettled_hash() {
        assert_eq!(ViewHash::settled(0), ViewHash(1));
        assert_eq!(ViewHash::settled(u64::MAX), ViewHash(u64::MAX));
        assert_eq!(ViewHash::UNSETTLED, ViewHash(0));
    }
}
