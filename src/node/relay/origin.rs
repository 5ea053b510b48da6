//! The origin's side: from a new broadcast to its receipt.

use std::collections::BTreeSet;

use bytes::Bytes;

use crate::node::effect::Ticket;
use crate::node::message::{Cast, DataMessage, Routed, RoutedOutcome};
use crate::node::published::Status;
use crate::node::rules::Mutation;
use crate::types::{BroadcastId, Group, MemberId, Peer};
use crate::view::ViewHash;

use super::link::Errand;
use super::peers::Peers;
use super::{Audience, Begun, NewCast, Reach, Relay, Sent, Settled, Wire, World};

/// A broadcast of this node that is not settled everywhere.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Open {
    group: Group,
    body: Bytes,
    except: Option<MemberId>,
    headers: Vec<(String, Bytes)>,
    ticket: Option<Ticket>,
    /// The router whose answer decides who else must get it.
    router: Option<Peer>,
    /// Peers that have not handled what we sent them, the router included.
    waiting: Peers,
    /// Everyone we have sent it to or are about to.
    sent_to: Peers,
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
        kept_bytes(&self.group, &self.headers, &self.body)
    }

    pub(super) fn waits_for(&self) -> impl Iterator<Item = &Peer> {
        self.waiting.iter().chain(&self.router)
    }

    pub(super) fn is_done(&self) -> bool {
        self.router.is_none() && self.waiting.is_empty()
    }

    fn cast(&self, id: BroadcastId, floor: u64, hop: u64, at_most_once: bool) -> Cast {
        Cast {
            hop,
            id,
            floor,
            group: self.group.clone(),
            except: self.except.clone(),
            at_most_once,
            headers: self.headers.clone(),
        }
    }

    fn new(cast: NewCast, reach: Reach, nodes: usize) -> Self {
        let NewCast { group, body, except, headers, ticket, .. } = cast;
        Self {
            group,
            body,
            except,
            headers,
            ticket,
            router: None,
            waiting: Peers::default(),
            sent_to: Peers::default(),
            reach,
            nodes,
        }
    }
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
                match self.ask_router(seq, &router, hash, &cast, wire) {
                    Sent::Accepted => {
                        self.next_seq += 1;
                        if !cast.at_most_once {
                            self.open_with_router(seq, router, cast);
                        }
                    }
                    Sent::Busy => return Begun::Busy(Box::new(cast)),
                    // its end is about to be reported
                    Sent::NoLink => {
                        self.send_to_peers(seq, self.peers(), false, Reach::Flooded, 1, cast, wire)
                    }
                }
            }
            Way::Targets(targets, nodes) => {
                self.send_to_peers(seq, targets, true, Reach::Targeted, nodes, cast, wire);
            }
            Way::Flood => self.send_to_peers(seq, self.peers(), false, Reach::Flooded, 1, cast, wire),
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
        let published = world.published();
        let trusted = published.status == Status::Ready
            || (self.rules.breaks(Mutation::UnreadySenderTrusted) && published.status == Status::Converging);
        if !trusted {
            return Way::Flood;
        }
        let router = published.router(cast.group.as_bytes());
        if *router == self.me {
            return match world.target_peers(cast.group.as_bytes(), published.hash) {
                Ok(targets) => {
                    let nodes = targets.len();
                    Way::Targets(targets.into_iter().filter(|p| *p != self.me).collect(), nodes)
                }
                Err(_) => Way::Flood,
            };
        }
        match self.link(router) {
            Some(link) if !link.suspect => Way::Router(router.clone(), published.hash),
            _ => Way::Flood,
        }
    }
}

// Steps.
impl Relay {
    fn ask_router(
        &mut self,
        seq: u64,
        router: &Peer,
        hash: ViewHash,
        cast: &NewCast,
        wire: &mut impl Wire,
    ) -> Sent {
        // this broadcast is open from now on, so the floor is at most its own number
        let floor = self.floor().min(seq);
        let Some(link) = self.links.get_mut(router) else { return Sent::NoLink };
        let head = Cast {
            hop: link.next_hop(),
            id: BroadcastId::new(self.me.clone(), seq),
            floor,
            group: cast.group.clone(),
            except: cast.except.clone(),
            at_most_once: cast.at_most_once,
            headers: cast.headers.clone(),
        };
        let sent = wire.try_send(router, DataMessage::Route { cast: head, hash }, &cast.body);
        if sent == Sent::Accepted {
            link.sent(if cast.at_most_once { Errand::Nobody } else { Errand::Own(seq) });
        }
        sent
    }

    fn open_with_router(&mut self, seq: u64, router: Peer, cast: NewCast) {
        let mut open = Open::new(cast, Reach::Targeted, 0);
        open.waiting.insert(router.clone());
        open.sent_to.insert(router.clone());
        open.router = Some(router);
        self.open_bytes += open.size();
        self.open.insert(seq, open);
    }

    #[allow(clippy::too_many_arguments, reason = "the parts of one decision")]
    fn send_to_peers(
        &mut self,
        seq: u64,
        peers: Vec<Peer>,
        targeted: bool,
        reach: Reach,
        nodes: usize,
        cast: NewCast,
        wire: &mut impl Wire,
    ) {
        self.next_seq += 1;
        let at_most_once = cast.at_most_once;
        let open = Open::new(cast, reach, nodes);
        self.open_bytes += open.size();
        self.open.insert(seq, open);
        if at_most_once {
            self.send_once(seq, &peers, targeted, wire);
            return;
        }
        for peer in &peers {
            self.send_or_queue(seq, peer, targeted, wire);
        }
        self.give_receipt(seq);
    }

    /// One try each, and it is forgotten.
    fn send_once(&mut self, seq: u64, peers: &[Peer], targeted: bool, wire: &mut impl Wire) {
        let Some(open) = self.open.remove(seq) else { return };
        self.open_bytes -= open.size();
        let floor = self.floor().min(seq);
        for peer in peers {
            let link = self.links.get_mut(peer);
            let Some(link) = link.filter(|link| link.unsent.is_empty()) else { continue };
            let cast = open.cast(BroadcastId::new(self.me.clone(), seq), floor, link.next_hop(), true);
            if wire.try_send(peer, DataMessage::Deliver { cast, targeted }, &open.body) == Sent::Accepted {
                link.sent(Errand::Nobody);
            }
        }
    }

    /// Sends an open broadcast to a peer, in order behind what waits for room there.
    fn send_or_queue(&mut self, seq: u64, peer: &Peer, targeted: bool, wire: &mut impl Wire) {
        let Some(waits) = self.link(peer).map(|link| !link.unsent.is_empty()) else { return };
        let Some(open) = self.open.get_mut(seq) else { return };
        if !open.sent_to.insert(peer.clone()) {
            return;
        }
        open.waiting.insert(peer.clone());
        if (waits || self.send_own(seq, peer, targeted, wire) == Sent::Busy)
            && let Some(link) = self.link_mut(peer)
        {
            link.unsent.push_back((seq, targeted));
        }
    }

    /// Tries to send an open broadcast to a peer that it waits for. Gives no receipt: the caller may have more
    /// peers to send to, and a broadcast that waits for nobody in between would be closed before it has been.
    pub(super) fn send_own(&mut self, seq: u64, peer: &Peer, targeted: bool, wire: &mut impl Wire) -> Sent {
        let floor = self.floor().min(seq);
        let Some(open) = self.open.get_mut(seq) else { return Sent::NoLink };
        let Some(link) = self.links.get_mut(peer) else { return Sent::NoLink };
        let cast = open.cast(BroadcastId::new(self.me.clone(), seq), floor, link.next_hop(), false);
        let sent = wire.try_send(peer, DataMessage::Deliver { cast, targeted }, &open.body);
        match sent {
            Sent::Accepted => link.sent(Errand::Own(seq)),
            Sent::Busy => {}
            Sent::NoLink => drop(open.waiting.remove(peer)),
        }
        sent
    }

    /// A peer has handled one of our frames.
    pub(super) fn hop_done(&mut self, from: &Peer, errand: Errand) {
        match errand {
            Errand::Nobody => {}
            Errand::Served(origin, seq) => self.served(&origin, seq, from),
            Errand::Own(seq) => {
                let Some(open) = self.open.get_mut(seq) else { return };
                if !open.waiting.remove(from) {
                    return;
                }
                if open.reach == Reach::Flooded && open.router.is_none() {
                    open.nodes += 1;
                }
                self.give_receipt(seq);
            }
        }
    }

    /// A router's answer: who it could not serve, or whom a flood of its has reached.
    pub(super) fn handle_routed(&mut self, from: &Peer, answer: Routed, wire: &mut impl Wire) {
        let Some(open) = self.open.get_mut(answer.seq) else { return };
        if open.router.as_ref() != Some(from) {
            return; // given up and flooded meanwhile
        }
        open.router = None;
        let careless = self.rules.breaks(Mutation::FailedNotResent);
        let rest = match answer.outcome {
            RoutedOutcome::Targeted { nodes, failed } => {
                open.nodes = nodes as usize;
                failed
            }
            RoutedOutcome::Flooded { covered } => {
                open.reach = Reach::Flooded;
                // the router counts when it has handled its own copy, if it has not yet
                open.nodes = covered.len() + usize::from(!open.waiting.contains(from));
                let covered: BTreeSet<Peer> = covered.into_iter().collect();
                self.peers().into_iter().filter(|peer| !covered.contains(peer)).collect()
            }
        };
        for peer in rest.iter().filter(|_| !careless) {
            self.send_or_queue(answer.seq, peer, false, wire);
        }
        self.give_receipt(answer.seq);
    }

    /// This peer will not answer as router: what waits for it goes to everybody, at once. Its own copy lies
    /// in the queue to it, so it still waits for that.
    pub(super) fn give_up_router(&mut self, router: &Peer, wire: &mut impl Wire) {
        if self.rules.breaks(Mutation::NoFloodOnDeadRouter) {
            for (_, open) in self.open.iter_mut().filter(|(_, open)| open.router.as_ref() == Some(router)) {
                open.router = None;
            }
            return;
        }
        let waiting: Vec<u64> = self
            .open
            .iter()
            .filter(|(_, open)| open.router.as_ref() == Some(router))
            .map(|(seq, _)| seq)
            .collect();
        for seq in waiting {
            if let Some(open) = self.open.get_mut(seq) {
                open.router = None;
                open.reach = Reach::Flooded;
                // it may have handled its own copy and owe only the answer
                open.nodes = 1 + usize::from(!open.waiting.contains(router));
            }
            for peer in self.peers() {
                self.send_or_queue(seq, &peer, false, wire);
            }
        }
    }

    /// This peer is gone: nothing waits for it.
    pub(super) fn forget_target(&mut self, peer: &Peer) {
        self.open.iter_mut().for_each(|(_, open)| {
            open.waiting.remove(peer);
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
        if open.router.is_some() {
            return;
        }
        let suspect = |peer: &Peer| links.get(peer).is_some_and(|link| link.suspect);
        if open.waiting.iter().all(suspect)
            && let Some(ticket) = open.ticket.take()
        {
            let id = BroadcastId::new(self.me.clone(), seq);
            self.settled.push_back(Settled { ticket, id, reach: open.reach, nodes: open.nodes });
        }
        if open.waiting.is_empty() {
            self.open_bytes -= open.size();
            self.open.discard(seq);
            self.room = true;
        }
    }
}
