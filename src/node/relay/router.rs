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
        cast: &mut Cast,
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
        let (window, seq) = (self.window, cast.id.seq);
        let Some(link) = self.link(origin) else { return };
        if link.serving.contains(seq) {
            return;
        }
        let crowded = link.serving.len() as u64 >= window;
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
            self.answer(origin, seq, serving);
        } else if let Some(link) = self.link_mut(origin) {
            link.serving.insert(seq, serving);
        }
    }

    /// Sends a copy to one peer, if it can be counted on to handle it.
    fn pass_on(
        &mut self,
        cast: &mut Cast,
        to: &Peer,
        targeted: bool,
        body: &Bytes,
        wire: &mut impl Wire,
    ) -> bool {
        let link = self.links.get_mut(to).filter(|link| !link.suspect && link.unsent.is_empty());
        let Some(link) = link else { return false };
        cast.hop = link.next_hop();
        let errand = match cast.at_most_once {
            true => Errand::Nobody,
            false => Errand::Served(cast.id.origin.clone(), cast.id.seq),
        };
        let message = DataMessage::Deliver { cast: &*cast, targeted };
        let accepted = wire.try_send(to, message, body) == Sent::Accepted;
        if accepted {
            link.sent(errand);
        }
        accepted
    }

    /// A target has handled its copy.
    pub(super) fn served(&mut self, origin: &Peer, seq: u64, by: &Peer) {
        let Some(link) = self.link_mut(origin) else { return };
        let Some(serving) = link.serving.get_mut(seq) else { return };
        if serving.pending.remove(by) && serving.holders.is_none() {
            serving.reached.push(by.clone());
        }
        if serving.pending.is_empty()
            && let Some(serving) = link.serving.remove(seq)
        {
            self.answer(origin, seq, serving);
        }
    }

    /// This peer cannot be counted on: what waits for it is the origins' to send.
    pub(super) fn give_up_serving(&mut self, peer: &Peer) {
        let mut finished = Vec::new();
        for link in self.links.iter_mut() {
            let mut done = Vec::new();
            for (seq, serving) in link.serving.iter_mut() {
                if serving.pending.remove(peer) {
                    serving.failed.push(peer.clone());
                    if serving.pending.is_empty() {
                        done.push(seq);
                    }
                }
            }
            finished.extend(done.into_iter().filter_map(|seq| {
                let serving = link.serving.remove(seq)?;
                Some((link.peer.clone(), seq, serving))
            }));
        }
        finished.into_iter().for_each(|(origin, seq, serving)| self.answer(&origin, seq, serving));
    }

    /// Everything that is being relayed: whose, its number.
    pub(super) fn all_serving(&self) -> impl Iterator<Item = (&Peer, u64, &Serving)> {
        self.links.iter().flat_map(|link| link.serving.iter().map(|(seq, it)| (&link.peer, seq, it)))
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
            self.wake(origin);
        }
    }
}
