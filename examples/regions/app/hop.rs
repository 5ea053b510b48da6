//! What travels between regions, and how a second copy is recognised.

use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;
use muster_router::Peer;
use serde::{Deserialize, Serialize};

use super::Broken;

/// One broadcast on its way into the other region. Its origin and its number name it, whatever way it goes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Hop {
    pub(crate) origin: Peer,
    pub(crate) number: u64,
    /// The lowest number that its origin still had open. Not that everything below has *arrived*: a receipt does not
    /// wait for suspect nodes, whose copies come when their links resume.
    pub(crate) oldest: u64,
    pub(crate) group: Bytes,
    pub(crate) payload: Bytes,
}

impl Hop {
    pub(crate) fn encode(&self) -> Bytes {
        postcard::to_allocvec(self).unwrap_or_default().into()
    }

    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        postcard::from_bytes(bytes).ok()
    }
}

/// How far apart the numbers of one origin may be that are open.
pub(crate) const WINDOW: u64 = 1024;

/// How far below the highest number of an origin a hop may be and still count as new: what a [`Seen`] remembers of it.
/// Above [`WINDOW`], because a number is closed before its last copy has come where a link is suspect.
pub(crate) const REMEMBERED: u64 = 4 * WINDOW;

/// How many origins are remembered; beyond, the one that was heard least recently is forgotten.
const ORIGINS: usize = 1024;

/// Which hops a node has had. Bounded: of each origin the last [`REMEMBERED`] numbers; what is older counts as had.
#[derive(Debug, Default)]
pub(crate) struct Seen {
    origins: BTreeMap<Peer, Origin>,
    turn: u64,
    broken: Broken,
}

#[derive(Debug, Default)]
struct Origin {
    /// Everything below is too old.
    floor: u64,
    above: BTreeSet<u64>,
    heard: u64,
}

impl Seen {
    pub(crate) fn new(broken: Broken) -> Self {
        Self { broken, ..Self::default() }
    }

    /// Whether this is the first copy. It is not any more then.
    pub(crate) fn first(&mut self, hop: &Hop) -> bool {
        self.turn += 1;
        if self.origins.len() >= ORIGINS && !self.origins.contains_key(&hop.origin) {
            let idle = self.origins.iter().min_by_key(|(_, origin)| origin.heard);
            let idle = idle.map(|(peer, _)| peer.clone());
            idle.and_then(|idle| self.origins.remove(&idle));
        }
        let origin = self.origins.entry(hop.origin.clone()).or_default();
        origin.heard = self.turn;
        if hop.number < origin.floor || !origin.above.insert(hop.number) {
            return false;
        }
        origin.floor = origin.floor.max(hop.number.saturating_sub(REMEMBERED));
        if self.broken == Broken::TakesReceiptsForArrivals {
            origin.floor = origin.floor.max(hop.oldest);
        }
        origin.above = origin.above.split_off(&origin.floor);
        true
    }
}
