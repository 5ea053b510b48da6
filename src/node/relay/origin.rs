//! The origin's side: from a new broadcast to its receipt.

use std::collections::BTreeSet;

use bytes::Bytes;

use crate::node::effect::Ticket;
use crate::node::message::{Cast, DataMessage, Routed, RoutedOutcome};
use crate::node::published::Status;
use crate::node::rules::Mutation;
use crate::types::{BroadcastId, Group, Peer};
use crate::view::ViewHash;

use super::link::{Errand, Link};
use super::peers::Receivers;
use super::{Audience, Begun, NewCast, Reach, Relay, Sent, Settled, Wire, World};

/// A broadcast of this node that is not settled everywhere.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Open {
    /// As it is sent; number of the hop and floor are those of each moment, and 0 in between.
    cast: Cast,
    body: Bytes,
    ticket: Option<Ticket>,
    receivers: Receivers,
    reach: Reach,
    nodes: usize,
}

/// What a broadcast keeps of its caller's.
fn kept_bytes(group: &Group, headers: &[(String, Bytes)], body: &Bytes) -> usize {
    let headers: usize = headers.iter().map(|(name, value)| name.len() + value.len()).sum();
    group.as_bytes().len() + headers + body.len()
}

impl Open {
    pub(super) fn size(&self) -> usize {
        kept_bytes(&self.cast.group, &self.cast.headers, &self.body)
    }

    pub(super) fn waits_for(&self) -> impl Iterator<Item = &Peer> {
        self.receivers.waiting().chain(self.receivers.router())
    }

    pub(super) fn is_done(&self) -> bool {
        self.waits_for().next().is_none()
    }

    fn new(cast: NewCast, id: BroadcastId) -> Self {
        let NewCast { group, body, except, headers, ticket, at_most_once, audience: _ } = cast;
        let cast = Cast { hop: 0, id, floor: 0, group, except, at_most_once, headers };
        let (reach, nodes) = (Reach::Flooded, 1);
        Self { cast, body, ticket, receivers: Receivers::default(), reach, nodes }
    }

    /// It has not begun after all.
    fn back(self, audience: Audience) -> Box<NewCast> {
        let Self { cast: Cast { group, except, at_most_once, headers, .. }, body, ticket, .. } = self;
        Box::new(NewCast { group, body, except, headers, at_most_once, audience, ticket })
    }

    /// Sends it to whoever is at the other end of this link, with what else there is to say.
    fn send(&mut self, link: &mut Link, floor: u64, rest: Rest, wire: &mut impl Wire) -> Sent {
        (self.cast.hop, self.cast.floor) = (link.next_hop(), floor);
        let cast = &self.cast;
        let message = match rest {
            Rest::Route(hash) => DataMessage::Route { cast, hash },
            Rest::Deliver { targeted } => DataMessage::Deliver { cast, targeted },
        };
        let sent = wire.try_send(&link.peer, message, &self.body);
        (self.cast.hop, self.cast.floor) = (0, 0);
        if sent == Sent::Accepted {
            let (once, seq) = (self.cast.at_most_once, self.cast.id.seq);
            link.sent(if once { Errand::Nobody } else { Errand::Own(seq) });
        }
        sent
    }
}

/// What a frame says besides the broadcast.
#[derive(Clone, Copy)]
enum Rest {
    Route(ViewHash),
    Deliver { targeted: bool },
}

/// Where a new broadcast goes first.
enum Way {
    Router(Peer, ViewHash),
    /// To these, by our own decision; the number of nodes that hold the group.
    Targets(Vec<Peer>, usize),
    Flood,
}

// Commands.
impl Relay {
    /// Begins a broadcast.
    pub fn broadcast(&mut self, cast: NewCast, world: &impl World, wire: &mut impl Wire) -> Begun {
        // receivers tell apart what lies within a window above the lowest open number: what counts is how far
        // the numbers have run ahead of it, not how many are open
        let full = self.next_seq - self.floor() >= self.window / 2
            || (!self.open.is_empty()
                && self.open_bytes + kept_bytes(&cast.group, &cast.headers, &cast.body) > self.max_bytes);
        if full && !cast.at_most_once {
            return Begun::Busy(Box::new(cast));
        }
        let deliver_here = match &cast.audience {
            Audience::Group => true,
            Audience::Node(peer) => *peer == self.me,
        };
        if let Audience::Node(peer) = &cast.audience
            && *peer != self.me
            && self.link(peer).is_none()
        {
            return Begun::NoLink(Box::new(cast));
        }
        let seq = self.next_seq;
        let id = BroadcastId::new(self.me.clone(), seq);
        match self.way(&cast, world) {
            Way::Router(router, hash) => {
                // the first frame decides whether it begins at all: before it nothing has an id
                if self.link(&router).is_some_and(|link| !link.unsent.is_empty()) {
                    return Begun::Busy(Box::new(cast));
                }
                let mut open = Open::new(cast, id.clone());
                match self.ask_router(&mut open, &router, hash, wire) {
                    Sent::Accepted => {
                        self.next_seq += 1;
                        if !open.cast.at_most_once {
                            self.open_with_router(router, open);
                        }
                    }
                    Sent::Busy => return Begun::Busy(open.back(Audience::Group)),
                    // its end is about to be reported
                    Sent::NoLink => self.send_to_peers(self.peers(), false, open, wire),
                }
            }
            Way::Targets(targets, nodes) => {
                let mut open = Open::new(cast, id.clone());
                (open.reach, open.nodes) = (Reach::Targeted, nodes);
                self.send_to_peers(targets, true, open, wire);
            }
            Way::Flood => self.send_to_peers(self.peers(), false, Open::new(cast, id.clone()), wire),
        }
        Begun::Sent { id, deliver_here }
    }

    /// Nobody waits for this receipt any more; the broadcast itself is finished all the same.
    pub fn abandon(&mut self, seq: u64) {
        if let Some(open) = self.open.get_mut(seq) {
            open.ticket = None;
        }
    }

    fn way(&self, cast: &NewCast, world: &impl World) -> Way {
        if let Audience::Node(peer) = &cast.audience {
            let targets: Vec<Peer> = (*peer != self.me).then(|| peer.clone()).into_iter().collect();
            return Way::Targets(targets, 1);
        }
        world.with_published(|published| {
            let careless = self.rules.breaks(Mutation::UnreadySenderTrusted);
            let trusted =
                published.status == Status::Ready || (careless && published.status == Status::Converging);
            if !trusted {
                return Way::Flood;
            }
            let router = published.router(cast.group.as_bytes());
            if *router == self.me {
                return match world.target_peers(cast.group.as_bytes(), published.hash) {
                    Ok(mut targets) => {
                        let nodes = targets.len();
                        targets.retain(|peer| *peer != self.me);
                        Way::Targets(targets, nodes)
                    }
                    Err(_) => Way::Flood,
                };
            }
            match self.link(router) {
                Some(link) if !link.suspect => Way::Router(router.clone(), published.hash),
                _ => Way::Flood,
            }
        })
    }
}

// Steps.
impl Relay {
    fn ask_router(&mut self, open: &mut Open, router: &Peer, hash: ViewHash, wire: &mut impl Wire) -> Sent {
        // this broadcast is open from now on, so the floor is at most its own number
        let floor = self.floor().min(open.cast.id.seq);
        let Some(link) = self.links.get_mut(router) else { return Sent::NoLink };
        open.send(link, floor, Rest::Route(hash), wire)
    }

    fn open_with_router(&mut self, router: Peer, mut open: Open) {
        (open.reach, open.nodes) = (Reach::Targeted, 0);
        open.receivers.insert(router, true);
        self.open_bytes += open.size();
        self.open.insert(open.cast.id.seq, open);
    }

    fn send_to_peers(&mut self, peers: Vec<Peer>, targeted: bool, open: Open, wire: &mut impl Wire) {
        self.next_seq += 1;
        let seq = open.cast.id.seq;
        if open.cast.at_most_once {
            self.send_once(&peers, targeted, open, wire);
            return;
        }
        self.open_bytes += open.size();
        self.open.insert(seq, open);
        for peer in peers {
            self.send_or_queue(seq, peer, targeted, wire);
        }
        self.give_receipt(seq);
    }

    /// One try each, and it is forgotten.
    fn send_once(&mut self, peers: &[Peer], targeted: bool, mut open: Open, wire: &mut impl Wire) {
        let floor = self.floor().min(open.cast.id.seq);
        for peer in peers {
            if let Some(link) = self.links.get_mut(peer).filter(|link| link.unsent.is_empty()) {
                open.send(link, floor, Rest::Deliver { targeted }, wire);
            }
        }
    }

    /// Sends an open broadcast to a peer, in order behind what waits for room there.
    fn send_or_queue(&mut self, seq: u64, peer: Peer, targeted: bool, wire: &mut impl Wire) {
        let floor = self.floor().min(seq);
        let (links, open) = (&mut self.links, self.open.get_mut(seq));
        let (Some(link), Some(open)) = (links.get_mut(&peer), open) else { return };
        if !open.receivers.insert(peer, false) {
            return;
        }
        if !link.unsent.is_empty() || send_open(open, link, floor, targeted, wire) == Sent::Busy {
            link.unsent.push_back((seq, targeted));
        }
    }

    /// Tries to send an open broadcast to a peer that it waits for. Gives no receipt: the caller may have more
    /// peers to send to, and a broadcast that waits for nobody in between would be closed before it has been.
    pub(super) fn send_own(&mut self, seq: u64, peer: &Peer, targeted: bool, wire: &mut impl Wire) -> Sent {
        let floor = self.floor().min(seq);
        match (self.links.get_mut(peer), self.open.get_mut(seq)) {
            (Some(link), Some(open)) => send_open(open, link, floor, targeted, wire),
            _ => Sent::NoLink,
        }
    }

    /// A peer has handled one of our frames.
    pub(super) fn hop_done(&mut self, from: &Peer, errand: Errand) {
        match errand {
            Errand::Nobody => {}
            Errand::Served(origin, seq) => self.served(&origin, seq, from),
            Errand::Own(seq) => {
                let Some(open) = self.open.get_mut(seq) else { return };
                if !open.receivers.handled(from) {
                    return;
                }
                if open.reach == Reach::Flooded && open.receivers.router().is_none() {
                    open.nodes += 1;
                }
                self.give_receipt(seq);
            }
        }
    }

    /// A router's answer: who it could not serve, or whom a flood of its has reached.
    pub(super) fn handle_routed(&mut self, from: &Peer, answer: Routed, wire: &mut impl Wire) {
        let Some(open) = self.open.get_mut(answer.seq) else { return };
        let Some(router) = open.receivers.get_mut(from).filter(|router| router.asked) else {
            return; // given up and flooded meanwhile
        };
        router.asked = false;
        let handled = !router.waits;
        let careless = self.rules.breaks(Mutation::FailedNotResent);
        let rest = match answer.outcome {
            RoutedOutcome::Targeted { nodes, failed } => {
                open.nodes = nodes as usize;
                failed
            }
            RoutedOutcome::Flooded { covered } => {
                open.reach = Reach::Flooded;
                // the router counts when it has handled its own copy, if it has not yet
                open.nodes = covered.len() + usize::from(handled);
                let covered: BTreeSet<Peer> = covered.into_iter().collect();
                self.peers().into_iter().filter(|peer| !covered.contains(peer)).collect()
            }
        };
        for peer in rest.into_iter().filter(|_| !careless) {
            self.send_or_queue(answer.seq, peer, false, wire);
        }
        self.give_receipt(answer.seq);
    }

    /// This peer will not answer as router: what waits for it goes to everybody, at once. Its own copy lies
    /// in the queue to it, so it still waits for that.
    pub(super) fn give_up_router(&mut self, router: &Peer, wire: &mut impl Wire) {
        let careless = self.rules.breaks(Mutation::NoFloodOnDeadRouter);
        let mut waiting = Vec::new();
        for (seq, open) in self.open.iter_mut().filter(|(_, open)| open.receivers.router() == Some(router)) {
            let handled = open.receivers.answered().is_some_and(|router| !router.waits);
            if !careless {
                open.reach = Reach::Flooded;
                // it may have handled its own copy and owe only the answer
                open.nodes = 1 + usize::from(handled);
                waiting.push(seq);
            }
        }
        for seq in waiting {
            for peer in self.peers() {
                self.send_or_queue(seq, peer, false, wire);
            }
        }
    }

    /// This peer is gone: nothing waits for it.
    pub(super) fn forget_target(&mut self, peer: &Peer) {
        self.open.iter_mut().for_each(|(_, open)| {
            open.receivers.handled(peer);
        });
    }

    pub(super) fn give_receipts(&mut self) {
        let all: Vec<u64> = self.open.iter().map(|(seq, _)| seq).collect();
        all.into_iter().for_each(|seq| self.give_receipt(seq));
    }

    /// Gives the receipt when nobody but suspects is waited for, and closes the broadcast when nobody is.
    pub(super) fn give_receipt(&mut self, seq: u64) {
        let links = &self.links;
        let Some(open) = self.open.get_mut(seq) else { return };
        if open.receivers.router().is_some() {
            return;
        }
        let suspect = |peer: &Peer| links.get(peer).is_some_and(|link| link.suspect);
        if open.receivers.waiting().all(suspect)
            && let Some(ticket) = open.ticket.take()
        {
            let id = open.cast.id.clone();
            self.settled.push_back(Settled { ticket, id, reach: open.reach, nodes: open.nodes });
        }
        if open.receivers.waiting().next().is_none() {
            self.open_bytes -= open.size();
            self.open.discard(seq);
            self.room = true;
        }
    }
}

/// See [`Relay::send_own`].
fn send_open(open: &mut Open, link: &mut Link, floor: u64, targeted: bool, wire: &mut impl Wire) -> Sent {
    let sent = open.send(link, floor, Rest::Deliver { targeted }, wire);
    if sent == Sent::NoLink {
        open.receivers.handled(&link.peer);
    }
    sent
}
