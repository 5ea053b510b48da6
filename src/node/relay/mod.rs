//! Broadcasts in flight: the three hops, their acknowledgements, and what happens when a hop fails.
//!
//! * An **origin** keeps a broadcast *open* until the router has answered (or was given up and the broadcast
//!   flooded) and every peer that it sent to itself has handled it or gone down. The receipt is given
//!   earlier: it does not wait for suspects.
//! * A **router** gives it to its own members, sends it to the others that hold the group, and answers when
//!   all have handled it, naming those that it could not serve.
//! * A **receiver** drops second copies by the broadcast's id and acknowledges the hop when its members have
//!   the message.
//!
//! Why an open broadcast waits for suspects: every frame carries the *floor*, the origin's lowest open
//! number, and receivers take what is below it for a second copy. If the floor passed a broadcast whose only
//! copy still lies in a suspect peer's queue, that peer would drop it as seen when it resumes.
//!
//! Frames go out by [`Wire::try_send`] while the relay is stepped, so that their numbers are their order.

#[cfg(test)]
mod counting;
mod link;
mod links;
mod numbered;
mod origin;
mod peers;
mod router;
#[cfg(test)]
mod storm;
#[cfg(test)]
mod tests;
mod window;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use bytes::Bytes;

use crate::types::{BroadcastId, Group, MemberId, Peer};
use crate::view::ViewHash;

use super::Time;
use super::effect::{Effect, Ticket};
use super::message::{Cast, DataMessage, Progress};
use super::published::{Flood, Published};
use super::rules::{Mutation, Rules};
use super::settings::Settings;

use link::{Arrival, Link};
use links::Links;
use numbered::Numbered;
use origin::Open;
use window::{Seen, Window};

/// Answers that travel in one message.
const ANSWERS: usize = 256;
/// Origins whose windows are kept; the one that was used least lately goes first.
const MAX_WINDOWS: usize = 65_536;

/// What the relay must know of the rest of the node.
pub trait World {
    /// What is published.
    fn published(&self) -> Arc<Published>;
    /// The same for a look at it.
    fn with_published<R>(&self, look: impl FnOnce(&Published) -> R) -> R {
        look(&self.published())
    }
    /// The router's decision.
    ///
    /// # Errors
    /// [`Flood`] if this node cannot be sure.
    fn target_peers(&self, group: &[u8], sender: ViewHash) -> Result<Vec<Peer>, Flood>;
}

/// What became of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sent {
    /// It is on its way.
    Accepted,
    /// The queue is full.
    Busy,
    /// There is no link to this peer.
    NoLink,
}

/// The way out for frames of the data lane. Must not call back into the relay.
pub trait Wire {
    /// Hands over one frame without waiting.
    fn try_send(&mut self, to: &Peer, message: DataMessage<&Cast>, body: &Bytes) -> Sent;
}

/// Who should get a broadcast.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Audience {
    /// All members of the group.
    Group,
    /// The members on one node.
    Node(Peer),
}

/// A broadcast that is to begin.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewCast {
    /// The group.
    pub group: Group,
    /// The payload.
    pub body: Bytes,
    /// A member that must not get it.
    pub except: Option<MemberId>,
    /// The user's headers.
    pub headers: Vec<(String, Bytes)>,
    /// Whether it is sent once, without acknowledgement.
    pub at_most_once: bool,
    /// Who should get it.
    pub audience: Audience,
    /// Who waits for the receipt; nobody for `None`.
    pub ticket: Option<Ticket>,
}

/// How a broadcast began.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Begun {
    /// No room: nothing was sent, and here it is again.
    Busy(Box<NewCast>),
    /// The one node that it is for is not connected: nothing was sent, and here it is again.
    NoLink(Box<NewCast>),
    /// It is on its way, or done; [`Relay::poll_settled`] gives the receipt.
    Sent {
        /// Its id.
        id: BroadcastId,
        /// Whether this node's own members should get it, now.
        deliver_here: bool,
    },
}

/// How it was decided who must hear a broadcast.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Reach {
    /// The router knew.
    Targeted,
    /// It went to everybody.
    Flooded,
}

/// The receipt of a broadcast.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Settled {
    /// Who waits for it.
    pub ticket: Ticket,
    /// The broadcast.
    pub id: BroadcastId,
    /// How it went.
    pub reach: Reach,
    /// How many nodes have it, this one included.
    pub nodes: usize,
}

/// A broadcast for the members on this node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LocalDelivery {
    /// The broadcast.
    pub id: BroadcastId,
    /// The group.
    pub group: Group,
    /// A member that must not get it.
    pub except: Option<MemberId>,
    /// The user's headers.
    pub headers: Vec<(String, Bytes)>,
    /// The payload.
    pub body: Bytes,
    /// Whether a router sent it by its table: then "not held" is worth telling it.
    pub targeted: bool,
    /// Names the hop for [`Relay::delivered`].
    pub hop: u64,
}

/// The broadcasts in flight at one node.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Relay {
    me: Peer,
    rules: Rules,
    window: u64,
    max_bytes: usize,
    window_ttl: Time,
    next_seq: u64,
    open: Numbered<Open>,
    open_bytes: usize,
    links: Links,
    windows: BTreeMap<Peer, Window>,
    settled: VecDeque<Settled>,
    wake: BTreeSet<Peer>,
    room: bool,
    violations: u64,
}

// Getters.
impl Relay {
    /// No broadcast in flight, no peer connected.
    pub fn new(me: Peer, settings: &Settings) -> Self {
        Self {
            me,
            rules: settings.rules,
            window: settings.dedupe_window.max(2),
            max_bytes: settings.max_unacknowledged,
            window_ttl: settings.tombstone_ttl,
            next_seq: 1,
            open: Numbered::new(),
            open_bytes: 0,
            links: Links::default(),
            windows: BTreeMap::new(),
            settled: VecDeque::new(),
            wake: BTreeSet::new(),
            room: false,
            violations: 0,
        }
    }

    /// Broadcasts of this node that are not settled everywhere.
    pub fn open(&self) -> usize {
        self.open.len()
    }

    /// Broadcasts of others that this node relays.
    pub fn serving(&self) -> usize {
        self.links.iter().map(|link| link.serving.len()).sum()
    }

    /// Frames that did not fit the contract: out of order, out of range, or of unknown peers.
    pub fn violations(&self) -> u64 {
        self.violations
    }

    /// How many entries all queues, maps and windows have together.
    pub fn footprint(&self) -> usize {
        self.open.len()
            + self.serving()
            + self.windows.values().map(Window::len).sum::<usize>()
            + self.links.iter().map(|l| l.in_flight() + l.unsent.len() + l.answers.len()).sum::<usize>()
            + self.settled.len()
    }

    /// What must hold after every step.
    ///
    /// # Errors
    /// What is wrong.
    pub fn check_invariants(&self) -> Result<(), String> {
        let bytes: usize = self.open.iter().map(|(_, open)| open.size()).sum();
        if bytes != self.open_bytes {
            return Err(format!("{bytes} bytes are open, {} are counted", self.open_bytes));
        }
        for (seq, open) in self.open.iter() {
            if let Some(gone) = open.waits_for().find(|p| self.link(p).is_none()) {
                return Err(format!("broadcast {seq} waits for {gone}, which is not connected"));
            }
            if open.is_done() {
                return Err(format!("broadcast {seq} waits for nothing and is open"));
            }
        }
        for (origin, seq, serving) in self.all_serving() {
            if let Some(gone) = serving.pending.iter().find(|p| self.link(p).is_none_or(|l| l.suspect)) {
                return Err(format!("{origin}:{seq} waits for {gone}, which cannot answer"));
            }
            if serving.pending.is_empty() {
                return Err(format!("{origin}:{seq} waits for nothing and is served"));
            }
        }
        Ok(())
    }

    fn link(&self, peer: &Peer) -> Option<&Link> {
        self.links.get(peer)
    }

    fn link_mut(&mut self, peer: &Peer) -> Option<&mut Link> {
        self.links.get_mut(peer)
    }

    fn peers(&self) -> Vec<Peer> {
        self.links.iter().map(|link| link.peer.clone()).collect()
    }

    /// Everything of this node below this number is settled and never sent again.
    fn floor(&self) -> u64 {
        if self.rules.breaks(Mutation::FloorRunsAhead) {
            return self.next_seq;
        }
        self.open.first().unwrap_or(self.next_seq)
    }
}

// Inputs.
impl Relay {
    /// A peer is connected: from now on broadcasts reach it.
    pub fn handle_peer_up(&mut self, peer: &Peer, wire: &mut impl Wire) {
        if let Some(earlier) = self.links.named(&peer.node).map(|link| link.peer.clone()) {
            self.handle_peer_down(&earlier, wire);
        }
        self.links.insert(Link::new(peer.clone()));
    }

    /// A peer's link makes no progress: what waits for it as router is flooded, and nothing else waits for it.
    pub fn handle_peer_suspect(&mut self, peer: &Peer, wire: &mut impl Wire) {
        let Some(link) = self.link_mut(peer) else { return };
        link.suspect = true;
        self.give_up_serving(peer);
        self.give_up_router(peer, wire);
        self.give_receipts();
    }

    /// A suspect peer's link is back, and nothing was lost.
    pub fn handle_peer_resumed(&mut self, peer: &Peer, wire: &mut impl Wire) {
        let Some(link) = self.link_mut(peer) else { return };
        link.suspect = false;
        self.handle_room(peer, wire);
    }

    /// A peer is gone, and with it all that was on its way to it.
    pub fn handle_peer_down(&mut self, peer: &Peer, wire: &mut impl Wire) {
        if self.link(peer).is_none() {
            return;
        }
        self.links.remove(peer);
        self.wake.remove(peer);
        self.give_up_serving(peer);
        self.give_up_router(peer, wire);
        self.forget_target(peer);
        self.give_receipts();
        self.room = true;
    }

    /// A frame of the data lane. What this node's members must get comes back; [`Relay::delivered`] says that
    /// they have it.
    pub fn handle_data(
        &mut self,
        from: &Peer,
        message: DataMessage,
        body: Bytes,
        world: &impl World,
        wire: &mut impl Wire,
        now: Time,
    ) -> Option<LocalDelivery> {
        let hop = match &message {
            DataMessage::Route { cast, .. } | DataMessage::Deliver { cast, .. } => cast.hop,
        };
        match self.link_mut(from)?.arrive(hop) {
            Arrival::Next => {}
            Arrival::Repeated => return None,
            Arrival::Gap => {
                // never acknowledged, so its sender does not take it for handled
                self.violations += 1;
                return None;
            }
        }
        let (cast, targeted) = match message {
            DataMessage::Deliver { cast, targeted } => (cast, targeted),
            DataMessage::Route { mut cast, hash } => {
                self.route(from, &mut cast, hash, &body, world, wire);
                (cast, false)
            }
        };
        if !self.is_new(&cast, now) {
            self.delivered(from, hop);
            return None;
        }
        let Cast { id, group, except, headers, .. } = cast;
        Some(LocalDelivery { id, group, except, headers, body, targeted, hop })
    }

    /// A frame that cannot be read has arrived: it has had a number, and nothing is done with it.
    pub fn skip(&mut self, from: &Peer) {
        let Some(link) = self.link_mut(from) else { return };
        let hop = link.skip();
        self.delivered(from, hop);
    }

    /// This node's members have what arrived as this hop.
    pub fn delivered(&mut self, from: &Peer, hop: u64) {
        if self.link_mut(from).is_some_and(|link| link.handled(hop)) {
            self.wake(from);
        }
    }

    /// A peer says how far it has come with our frames, and answers our broadcasts as router.
    pub fn handle_progress(&mut self, from: &Peer, progress: Progress, wire: &mut impl Wire) {
        let Some(link) = self.link_mut(from) else { return };
        let moved = progress.hop > link.confirmed();
        // what cannot have been handled settles nothing, or a broadcast would be closed that nobody has
        let Some(done) = link.progress(progress.hop) else {
            self.violations += 1;
            return;
        };
        for errand in done {
            self.hop_done(from, errand);
        }
        for answer in progress.routed {
            self.handle_routed(from, answer, wire);
        }
        if moved {
            self.handle_room(from, wire);
            self.room = true;
        }
    }

    /// The queue to this peer may have room again.
    pub fn handle_room(&mut self, peer: &Peer, wire: &mut impl Wire) {
        while let Some((seq, targeted)) = self.link_mut(peer).and_then(|link| link.unsent.pop_front()) {
            match self.send_own(seq, peer, targeted, wire) {
                Sent::Accepted => {}
                Sent::NoLink => self.give_receipt(seq),
                Sent::Busy => {
                    if let Some(link) = self.link_mut(peer) {
                        link.unsent.push_front((seq, targeted));
                    }
                    break;
                }
            }
        }
    }

    /// Time has gone by: windows of origins that are long gone are freed, full queues are tried again.
    pub fn handle_timeout(&mut self, wire: &mut impl Wire, now: Time) {
        let (links, ttl) = (&self.links, self.window_ttl);
        self.windows
            .retain(|origin, window| links.get(origin).is_some() || window.used.saturating_add(ttl) > now);
        let waiting: Vec<Peer> =
            self.links.iter().filter(|l| !l.unsent.is_empty()).map(|l| l.peer.clone()).collect();
        waiting.iter().for_each(|peer| self.handle_room(peer, wire));
    }

    fn wake(&mut self, peer: &Peer) {
        if !self.wake.contains(peer) {
            self.wake.insert(peer.clone());
        }
    }

    /// Whether members here have not had this broadcast yet.
    fn is_new(&mut self, cast: &Cast, now: Time) -> bool {
        if cast.id.origin == self.me {
            return false;
        }
        // sent once by its origin and once by its router: there is no second copy to drop
        if cast.at_most_once || self.rules.breaks(Mutation::NoDedupe) {
            return true;
        }
        let window = match self.windows.get_mut(&cast.id.origin) {
            Some(window) => window,
            None => self.new_window(&cast.id.origin, now),
        };
        match window.note(cast.id.seq, cast.floor, crate::config::MAX_DEDUPE_WINDOW, now) {
            Seen::New => true,
            Seen::Duplicate => false,
            Seen::OutOfRange => {
                self.violations += 1;
                false
            }
        }
    }
}

impl Relay {
    fn new_window(&mut self, origin: &Peer, now: Time) -> &mut Window {
        if self.windows.len() >= MAX_WINDOWS {
            let oldest = self.windows.iter().min_by_key(|(_, window)| window.used).map(|(o, _)| o.clone());
            oldest.and_then(|origin| self.windows.remove(&origin));
        }
        self.windows.entry(origin.clone()).or_insert_with(|| Window::new(now))
    }
}

// Outputs.
impl Relay {
    /// A peer for which [`Relay::poll_progress`] has something.
    pub fn poll_wake(&mut self) -> Option<Peer> {
        self.wake.pop_first()
    }

    /// What we owe this peer as acknowledgement.
    pub fn poll_progress(&mut self, to: &Peer) -> Option<Progress> {
        let link = self.link_mut(to).filter(|link| link.owes_progress())?;
        let count = link.answers.len().min(ANSWERS);
        let routed = link.answers.drain(..count).collect();
        Some(Progress { hop: link.acknowledge(), routed })
    }

    /// How many things [`Relay::poll_effect`] has.
    pub(super) fn effects(&self) -> usize {
        self.wake.len() + self.settled.len() + usize::from(self.room)
    }

    /// The next thing to do: wake a sender, give a receipt, tell of room.
    pub(super) fn poll_effect(&mut self) -> Option<Effect> {
        if let Some(peer) = self.poll_wake() {
            return Some(Effect::Transmit(peer));
        }
        match self.poll_settled() {
            Some(settled) => Some(Effect::Settled(settled)),
            None => self.poll_room().then_some(Effect::Room),
        }
    }

    /// The next receipt.
    pub fn poll_settled(&mut self) -> Option<Settled> {
        self.settled.pop_front()
    }

    /// Whether room has appeared since this was last asked: those who were told `Busy` may try again.
    pub fn poll_room(&mut self) -> bool {
        std::mem::take(&mut self.room)
    }
}
