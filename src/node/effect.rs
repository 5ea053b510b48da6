//! What the node asks of those who drive it.

use std::collections::{BTreeSet, VecDeque};

use crate::transport::Lane;
use crate::types::{Group, NodeId, Peer};

use super::message::Message;
use super::relay::Settled;

/// Names one waiting join; chosen by the caller, never used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket(pub u64);

/// How a join began.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum JoinStart<M> {
    /// The member is registered.
    Joined,
    /// This member was registered before.
    AlreadyMember,
    /// The router is asked; [`Effect::Joined`] answers.
    Waiting,
    /// The node does not know yet if it has peers: try again when it has settled. Here is the handle.
    Unsettled(M),
    /// Refused; nothing has changed.
    Refused(JoinRefused),
}

/// Why a join was refused. The member is not registered.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum JoinRefused {
    /// The node that routes the group could not be told in time.
    RouterUnreachable {
        /// That node.
        router: NodeId,
    },
    /// This node drains.
    Draining,
    /// A later life of this node's name has taken its place.
    Superseded,
}

/// One thing to do. [`super::Node::poll_effect`] gives them one by one.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Effect {
    /// There is something to send to this peer: see [`super::Node::poll_transmit`].
    Transmit(Peer),
    /// There is background work: call [`super::Node::work`] until it says that there is no more.
    Work,
    /// A waiting join is answered.
    Joined {
        /// Which.
        ticket: Ticket,
        /// How.
        result: Result<(), JoinRefused>,
    },
    /// What is published has changed.
    Changed,
    /// A broadcast's receipt.
    Settled(Settled),
    /// There is room again for broadcasts that were refused as busy.
    Room,
    /// Something worth telling.
    Event(NodeEvent),
}

/// Something worth telling a person or a monitor.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum NodeEvent {
    /// A peer is connected.
    PeerUp(Peer),
    /// A peer is gone.
    PeerDown(Peer),
    /// A peer's link makes no progress.
    PeerSuspect(Peer),
    /// A suspect peer's link is back.
    PeerResumed(Peer),
    /// This node has its first member of the group.
    Occupied(Group),
    /// This node has lost its last member of the group.
    Vacant(Group),
    /// A later life of this node's name is in the cluster; this one takes no part any more.
    Superseded {
        /// The later life.
        by: Peer,
    },
    /// `peer` counts on a node to which we have no link. While that lasts, the cluster floods.
    Partitioned {
        /// Who told us.
        peer: NodeId,
        /// The node that we cannot see.
        missing: NodeId,
    },
}

/// A message on its way to a peer.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Outgoing {
    /// The lane that it must travel on.
    pub lane: Lane,
    /// What is said.
    pub message: Message,
}

/// Events that nobody has fetched yet are kept up to this many; older ones are dropped and counted.
const MAX_EVENTS: usize = 4096;

/// What is to be done, held as state: one entry a peer, however often it was woken.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Effects {
    joined: VecDeque<(Ticket, Result<(), JoinRefused>)>,
    changed: bool,
    transmit: BTreeSet<Peer>,
    work: bool,
    events: VecDeque<NodeEvent>,
    pub(crate) events_lost: u64,
}

impl Effects {
    pub(crate) fn joined(&mut self, ticket: Ticket, result: Result<(), JoinRefused>) {
        self.joined.push_back((ticket, result));
    }

    pub(crate) fn changed(&mut self) {
        self.changed = true;
    }

    pub(crate) fn transmit(&mut self, peer: &Peer) {
        if !self.transmit.contains(peer) {
            self.transmit.insert(peer.clone());
        }
    }

    pub(crate) fn forget(&mut self, peer: &Peer) {
        self.transmit.remove(peer);
    }

    pub(crate) fn work(&mut self) {
        self.work = true;
    }

    pub(crate) fn event(&mut self, event: NodeEvent) {
        if self.events.len() >= MAX_EVENTS {
            self.events.pop_front();
            self.events_lost += 1;
        }
        self.events.push_back(event);
    }

    pub(crate) fn poll(&mut self) -> Option<Effect> {
        if let Some((ticket, result)) = self.joined.pop_front() {
            return Some(Effect::Joined { ticket, result });
        }
        if std::mem::take(&mut self.changed) {
            return Some(Effect::Changed);
        }
        if let Some(peer) = self.transmit.pop_first() {
            return Some(Effect::Transmit(peer));
        }
        if std::mem::take(&mut self.work) {
            return Some(Effect::Work);
        }
        self.events.pop_front().map(Effect::Event)
    }
}
