//! What everybody may read: one immutable value, swapped whole by the coordinator.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::ring::Ring;
use crate::types::{NodeId, Peer};
use crate::view::{View, ViewHash};

/// How sure a node is of its routing table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Status {
    /// The view is committed, but not every member has said that it has the same one.
    Converging,
    /// Every member agrees: routing tables are exact and trusted.
    Ready,
    /// The view is changing: broadcasts are flooded.
    Rebalancing,
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Status::Converging => "Converging",
            Status::Ready => "Ready",
            Status::Rebalancing => "Rebalancing",
        })
    }
}

/// A connected peer as `Published` lists it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Connected {
    /// Numbers this connection among all that the node has had; rows in the occupancy table carry it, so
    /// that rows of an earlier connection are nobody's.
    pub slot: u32,
    /// Who.
    pub peer: Peer,
    /// Whether its link makes no progress.
    pub suspect: bool,
}

/// The coordinator's word to all readers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Published {
    /// Who we are.
    pub me: Peer,
    /// How sure we are.
    pub status: Status,
    /// The committed view.
    pub view: View,
    /// Its hash.
    pub hash: ViewHash,
    /// The ring of the committed view.
    pub ring: Ring,
    /// The peers of the ring's nodes, in the ring's order of nodes.
    pub routers: Arc<[Peer]>,
    /// Every peer that the transport has connected, sorted by node: whom a flood reaches.
    pub connected: Arc<[Connected]>,
    /// Slots in rising order, each with its place in `connected`.
    pub slots: Arc<[(u32, u32)]>,
    /// Whether the node has found out, after its start, if it has peers.
    pub settled: bool,
    /// Whether this node drains: it takes no joins and routes nothing.
    pub draining: bool,
    /// Whether a later life of this node's name was seen: it takes no part any more.
    pub superseded: bool,
}

impl Hash for Published {
    /// The view decides its hash, its ring and its routers, so they need not be hashed again.
    fn hash<H: Hasher>(&self, state: &mut H) {
        (&self.me, self.status, &self.view, &self.connected).hash(state);
        (self.settled, self.draining, self.superseded).hash(state);
    }
}

impl Published {
    /// The peer that routes `group` in the committed view.
    pub fn router(&self, group: &[u8]) -> &Peer {
        self.ring.router_index(group).and_then(|index| self.routers.get(index)).unwrap_or(&self.me)
    }

    /// What this node tags a hop with: its view hash while it is `Ready`, else `UNSETTLED`.
    pub fn sender_hash(&self) -> ViewHash {
        if self.status == Status::Ready { self.hash } else { ViewHash::UNSETTLED }
    }

    /// The connected peer with this slot.
    pub fn by_slot(&self, slot: u32) -> Option<&Connected> {
        let found = self.slots.binary_search_by_key(&slot, |(slot, _)| *slot).ok()?;
        self.connected.get(self.slots.get(found)?.1 as usize)
    }

    /// The connection to exactly this peer, if there is one.
    pub fn connection(&self, peer: &Peer) -> Option<&Connected> {
        let index = self.connected.binary_search_by(|c| c.peer.node.cmp(&peer.node)).ok()?;
        self.connected.get(index).filter(|c| c.peer == *peer)
    }

    /// Whether exactly this peer is connected and its link makes progress.
    pub fn serves(&self, peer: &Peer) -> bool {
        self.connection(peer).is_some_and(|c| !c.suspect)
    }
}

/// Where a caller sends a broadcast.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Route {
    /// To this node, which decides.
    Router(NodeId),
    /// To all of these, and to the caller's own members.
    Flood(Arc<[NodeId]>),
}

/// "I cannot be sure": the answer of a router that is not `Ready` or whose view differs from the sender's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("this node cannot decide for the sender's view; flood")]
pub struct Flood;
