//! The data lane to one connected peer: numbered hops there and back.

use std::collections::VecDeque;

use crate::node::message::Routed;
use crate::types::Peer;

use super::numbered::Numbered;
use super::router::Serving;

/// Whose a frame on its way is.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum Errand {
    /// A broadcast of this node.
    Own(u64),
    /// A broadcast that this node relays as router.
    Served(Peer, u64),
    /// A frame that nobody waits for: only its number counts.
    Nobody,
}

/// How a frame's number fits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Arrival {
    Next,
    Repeated,
    /// Frames are missing before it: the transport has broken its contract.
    Gap,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Link {
    pub(super) peer: Peer,
    pub(super) suspect: bool,
    /// The number of the last frame that was accepted for sending.
    sent: u64,
    /// The number of the last frame that the peer has said to have handled.
    confirmed: u64,
    in_flight: VecDeque<(u64, Errand)>,
    /// Own broadcasts that found the queue full, in order, and whether they are targeted.
    pub(super) unsent: VecDeque<(u64, bool)>,
    /// The number of the last frame received, of the last one handled, and of the last one acknowledged.
    received: u64,
    handled: u64,
    acknowledged: u64,
    /// Answers to the peer's broadcasts.
    pub(super) answers: VecDeque<Routed>,
    /// Broadcasts of the peer that are being relayed.
    pub(super) serving: Numbered<Serving>,
}

impl Link {
    pub(super) fn new(peer: Peer) -> Self {
        Self {
            peer,
            suspect: false,
            sent: 0,
            confirmed: 0,
            in_flight: VecDeque::new(),
            unsent: VecDeque::new(),
            received: 0,
            handled: 0,
            acknowledged: 0,
            answers: VecDeque::new(),
            serving: Numbered::new(),
        }
    }

    pub(super) fn in_flight(&self) -> usize {
        self.in_flight.len()
    }

    pub(super) fn next_hop(&self) -> u64 {
        self.sent + 1
    }

    /// The frame with the next number is accepted for sending.
    pub(super) fn sent(&mut self, errand: Errand) {
        self.sent += 1;
        // kept, these would pile up for a peer that takes frames and never acknowledges
        if errand != Errand::Nobody {
            self.in_flight.push_back((self.sent, errand));
        }
    }

    /// The number of the last frame that the peer has said to have handled.
    pub(super) fn confirmed(&self) -> u64 {
        self.confirmed
    }

    /// The peer has handled every frame up to this one; `None` if it was never sent.
    pub(super) fn progress(&mut self, hop: u64) -> Option<Vec<Errand>> {
        if hop > self.sent {
            return None;
        }
        self.confirmed = self.confirmed.max(hop);
        let done = self.in_flight.partition_point(|(number, _)| *number <= hop);
        Some(self.in_flight.drain(..done).map(|(_, errand)| errand).collect())
    }

    pub(super) fn arrive(&mut self, hop: u64) -> Arrival {
        if hop <= self.received {
            return Arrival::Repeated;
        }
        if hop > self.received + 1 {
            return Arrival::Gap;
        }
        self.received = hop;
        Arrival::Next
    }

    /// The next frame has arrived and cannot be read; its number.
    pub(super) fn skip(&mut self) -> u64 {
        self.received += 1;
        self.received
    }

    /// A frame that has arrived is handled; says whether there is something new to acknowledge.
    pub(super) fn handled(&mut self, hop: u64) -> bool {
        if hop > self.received || hop <= self.handled {
            return false;
        }
        self.handled = hop;
        true
    }

    pub(super) fn owes_progress(&self) -> bool {
        self.handled > self.acknowledged || !self.answers.is_empty()
    }

    pub(super) fn acknowledge(&mut self) -> u64 {
        self.acknowledged = self.handled;
        self.handled
    }
}
