//! The router's side: from a caller's question to the answer.

use bytes::Bytes;

use crate::node::message::{Cast, DataMessage, Routed, RoutedOutcome};
use crate::types::Peer;
use crate::view::ViewHash;

use super::link::Errand;
use super::peers::Peers;
use super::{Relay, Sent, Wire, World};

/// A broadcast of another node that is being relayed.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Serving {
    /// Who has not handled it yet.
    pub(super) pending: Peers,
    /// Who has, in a flood, besides this node.
    reached: Vec<Peer>,
    failed: Vec<Peer>,
    /// The number of holders if we knew them; `None` for a flood.
    holders: Option<u32>,
}

impl Relay {
    /// Decides who must hear a broadcast, and sends it there.
    pub(super) fn route(
        &mut self,
        origin: &Peer,
        cast: &Cast,
        hash: ViewHash,
        body: &Bytes,
        world: &impl World,
        wire: &mut impl Wire,
    ) {
        // only its origin may ask for a broadcast: the answer goes back on the same link
        if cast.id.origin != *origin {
            self.violations += 1;
            return;
        }
        let key = (origin.clone(), cast.id.seq);
        let crowded = self.link(origin).is_some_and(|link| link.serving as u64 >= self.window);
        if self.serving.contains_key(&key) {
            return;
        }
        let decision = world.target_peers(cast.group.as_bytes(), hash);
        let (targets, holders) = match decision {
            Ok(targets) => {
                let holders = u32::try_from(targets.len()).unwrap_or(u32::MAX);
                (targets, Some(holders))
            }
            Err(_) => (self.peers(), None),
        };
        let mut serving =
            Serving { pending: Peers::default(), reached: Vec::new(), failed: Vec::new(), holders };
        // the origin has given it to its own members, and ours get it from this frame
        for peer in targets {
            if peer == *origin || peer == self.me {
                continue;
            }
            if crowded || !self.pass_on(cast, &peer, holders.is_some(), body, wire) {
                serving.failed.push(peer);
            } else {
                serving.pending.insert(peer);
            }
        }
        if cast.at_most_once {
            return;
        }
        if serving.pending.is_empty() {
            self.answer(origin, cast.id.seq, serving);
        } else {
            self.serving.insert(key, serving);
            if let Some(link) = self.link_mut(origin) {
                link.serving += 1;
            }
        }
    }

    /// Sends a copy to one peer, if it can be counted on to handle it.
    fn pass_on(
        &mut self,
        cast: &Cast,
        to: &Peer,
        targeted: bool,
        body: &Bytes,
        wire: &mut impl Wire,
    ) -> bool {
        let Some(link) = self.link(to).filter(|link| !link.suspect && link.unsent.is_empty()) else {
            return false;
        };
        let mut cast = cast.clone();
        cast.hop = link.next_hop();
        let errand = match cast.at_most_once {
            true => Errand::Nobody,
            false => Errand::Served(cast.id.origin.clone(), cast.id.seq),
        };
        let accepted = wire.try_send(to, DataMessage::Deliver { cast, targeted }, body) == Sent::Accepted;
        if accepted && let Some(link) = self.link_mut(to) {
            link.sent(errand);
        }
        accepted
    }

    /// A target has handled its copy.
    pub(super) fn served(&mut self, origin: &Peer, seq: u64, by: &Peer) {
        let key = (origin.clone(), seq);
        let Some(serving) = self.serving.get_mut(&key) else { return };
        if serving.pending.remove(by) && serving.holders.is_none() {
            serving.reached.push(by.clone());
        }
        if serving.pending.is_empty() {
            self.finish(&key);
        }
    }

    /// This peer cannot be counted on: what waits for it is the origins' to send.
    pub(super) fn give_up_serving(&mut self, peer: &Peer) {
        let mut finished = Vec::new();
        for (key, serving) in &mut self.serving {
            if serving.pending.remove(peer) {
                serving.failed.push(peer.clone());
                if serving.pending.is_empty() {
                    finished.push(key.clone());
                }
            }
        }
        finished.iter().for_each(|key| self.finish(key));
    }

    fn finish(&mut self, key: &(Peer, u64)) {
        let Some(serving) = self.serving.remove(key) else { return };
        if let Some(link) = self.link_mut(&key.0) {
            link.serving = link.serving.saturating_sub(1);
        }
        self.answer(&key.0, key.1, serving);
    }

    fn answer(&mut self, origin: &Peer, seq: u64, mut serving: Serving) {
        let outcome = match serving.holders {
            Some(nodes) => RoutedOutcome::Targeted { nodes, failed: serving.failed },
            None => {
                serving.reached.insert(0, self.me.clone());
                RoutedOutcome::Flooded { covered: serving.reached }
            }
        };
        if let Some(link) = self.link_mut(origin) {
            link.answers.push_back(Routed { seq, outcome });
            self.wake.insert(origin.clone());
        }
    }
}
