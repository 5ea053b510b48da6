//! The network between simulated nodes: one link a pair, three lanes a direction, no clock of its own.
//!
//! A link is opened at one end first and closed at one end first, as real ones are. Frames flow when both
//! ends have been told; frames of a closed session reach nobody, or the other end until it is told as well.

use std::collections::{BTreeMap, VecDeque};

use bytes::Bytes;

use crate::node::Time;
use crate::node::message::{Cast, DataMessage};
use crate::node::relay::{Sent, Wire};
use crate::transport::link::Links;
use crate::transport::{self, Lane, SendError};
use crate::types::{NodeId, Peer};

/// What is on its way.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Frame {
    pub(super) sent: Time,
    pub(super) head: Bytes,
    pub(super) body: Bytes,
}

/// What one end of a session knows of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(super) enum End {
    /// It has not been told yet.
    #[default]
    Waiting,
    /// It has been told that the other is up.
    Up,
    /// It has been told that the other is down, or has died.
    Gone,
}

/// Both directions between two places, from the side of the lower one (0) and the higher one (1).
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Link {
    /// Counts the sessions of this pair; of two times with the same number and both ends up, nothing was
    /// lost in between.
    pub(super) session: u32,
    pub(super) ends: [End; 2],
    /// Both ends have been up at the same time in this session.
    pub(super) open: bool,
    /// The lives at both ends of this session.
    pub(super) lives: [u64; 2],
    /// An end that has yet to be told that this earlier life of the other is down.
    pub(super) old: [Option<u64>; 2],
    /// Which end takes the other for suspect.
    pub(super) suspect: [bool; 2],
    /// Nothing is delivered from this end.
    pub(super) blocked: [bool; 2],
    /// Lanes that the hand of a test holds back, from this end.
    pub(super) held: [[bool; 3]; 2],
    /// This end's sender has been woken.
    pub(super) wake: [bool; 2],
    /// This end was told that the data lane is full, and it is no longer.
    pub(super) room: [bool; 2],
    /// This end was told that the data lane is full.
    pub(super) full: [bool; 2],
    pub(super) lanes: [[VecDeque<Frame>; 3]; 2],
}

impl Link {
    pub(super) fn closed(&self) -> bool {
        !self.ends.contains(&End::Up)
    }

    /// Whether the end `side` has been told that this life of the other is up, and not that it is down.
    pub(super) fn is_up(&self, side: usize, life: u64) -> bool {
        self.ends[side] == End::Up && self.lives[1 - side] == life
    }

    /// Both ends have been told of this session and neither of its end.
    pub(super) fn connected(&self) -> bool {
        self.open && self.ends == [End::Up; 2]
    }

    fn clear(&mut self) {
        self.lanes.iter_mut().flatten().for_each(VecDeque::clear);
        self.suspect = [false; 2];
        self.blocked = [false; 2];
        self.held = [[false; 3]; 2];
        self.wake = [false; 2];
        self.room = [false; 2];
        self.full = [false; 2];
    }

    pub(super) fn begin(&mut self, lives: [u64; 2]) {
        self.clear();
        self.session += 1;
        self.ends = [End::Waiting; 2];
        self.open = false;
        self.lives = lives;
    }

    /// The end `side` is over; what was on its way to it is gone.
    pub(super) fn end(&mut self, side: usize, lose: bool) {
        self.ends[side] = End::Gone;
        self.suspect[side] = false;
        self.wake[side] = false;
        self.room[side] = false;
        self.full[side] = false;
        self.lanes[1 - side].iter_mut().for_each(VecDeque::clear);
        if lose || !self.open {
            self.lanes[side].iter_mut().for_each(VecDeque::clear);
        }
        if self.ends[1 - side] == End::Waiting {
            self.ends[1 - side] = End::Gone;
        }
        if self.closed() {
            self.clear();
        }
    }

    /// Whether the next frame of this lane may be delivered now.
    pub(super) fn may_deliver(&self, from_side: usize, lane: Lane) -> bool {
        self.open
            && self.ends[1 - from_side] == End::Up
            && !self.blocked[from_side]
            && !self.held[from_side][lane.index()]
            && !self.lanes[from_side][lane.index()].is_empty()
    }
}

/// All links.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Network {
    nodes: usize,
    links: Vec<Link>,
}

impl Network {
    pub(super) fn new(nodes: usize) -> Self {
        Self { nodes, links: vec![Link::default(); nodes * nodes] }
    }

    /// The link between two places, and which side of it the first one is.
    pub(super) fn link(&self, a: usize, b: usize) -> (&Link, usize) {
        (&self.links[a.min(b) * self.nodes + a.max(b)], usize::from(a > b))
    }

    pub(super) fn link_mut(&mut self, a: usize, b: usize) -> (&mut Link, usize) {
        (&mut self.links[a.min(b) * self.nodes + a.max(b)], usize::from(a > b))
    }

    /// Every pair, the lower place first.
    pub(super) fn pairs(&self) -> impl Iterator<Item = (usize, usize)> + use<> {
        let nodes = self.nodes;
        (0..nodes).flat_map(move |a| (a + 1..nodes).map(move |b| (a, b)))
    }

    /// When the oldest frame under way was sent.
    pub(super) fn oldest(&self) -> Option<Time> {
        let fronts = self.links.iter().flat_map(|link| link.lanes.iter().flatten());
        fronts.filter_map(|lane| lane.front()).map(|frame| frame.sent).min()
    }

    /// How many frames are under way.
    pub(super) fn in_flight(&self) -> usize {
        self.links.iter().flat_map(|link| link.lanes.iter().flatten()).map(VecDeque::len).sum()
    }

    /// Whether any sender was woken.
    pub(super) fn woken(&self) -> bool {
        self.links.iter().any(|link| link.wake != [false; 2])
    }

    /// Whether any link is opening, closing, suspect, blocked or full.
    pub(super) fn disturbed(&self) -> bool {
        self.links.iter().any(|l| {
            l.suspect != [false; 2]
                || l.blocked != [false; 2]
                || l.full != [false; 2]
                || l.room != [false; 2]
                || l.old != [None; 2]
                || (!l.closed() && !l.connected())
        })
    }
}

/// One node's way out for the data lane.
pub(super) struct Out<'a> {
    pub(super) net: &'a mut Network,
    pub(super) names: &'a BTreeMap<NodeId, usize>,
    pub(super) from: usize,
    /// How many frames a lane holds.
    pub(super) room: usize,
    pub(super) now: Time,
    /// What was sent: the broadcast's origin and number, and where to.
    pub(super) sent: Vec<(Peer, u64, usize)>,
    pub(super) busy: bool,
    /// The node's link layer, where there is one: then the lanes here only say what it has taken.
    pub(super) links: Option<&'a mut Links>,
    /// It took a frame to this place, whose node this one had not been told of.
    pub(super) untold: Option<usize>,
}

impl Out<'_> {
    fn by_link(&mut self, links_to: &Peer, place: usize, frame: Frame) -> Sent {
        let Some(links) = self.links.as_mut() else { return Sent::NoLink };
        let whole = transport::Frame { lane: Lane::Data, head: frame.head.clone(), body: frame.body.clone() };
        let (link, side) = self.net.link_mut(self.from, place);
        match links.try_send(links_to, whole, self.now) {
            Ok(()) => {
                if !link.is_up(side, links_to.incarnation.get()) {
                    self.untold = Some(place);
                }
                link.lanes[side][Lane::Data.index()].push_back(frame);
                Sent::Accepted
            }
            Err(SendError::Busy(_)) => {
                link.full[side] = true;
                self.busy = true;
                Sent::Busy
            }
            Err(SendError::NoLink(_) | SendError::TooLarge(_)) => Sent::NoLink,
        }
    }
}

impl Wire for Out<'_> {
    fn try_send(&mut self, to: &Peer, message: DataMessage<&Cast>, body: &Bytes) -> Sent {
        let Some(place) = self.names.get(&to.node).copied() else { return Sent::NoLink };
        let Ok(head) = postcard::to_allocvec(&message) else { return Sent::NoLink };
        let frame = Frame { sent: self.now, head: head.into(), body: body.clone() };
        if self.links.is_some() {
            let sent = self.by_link(to, place, frame);
            if sent != Sent::Accepted {
                return sent;
            }
        } else {
            let (link, side) = self.net.link_mut(self.from, place);
            if !link.is_up(side, to.incarnation.get()) {
                return Sent::NoLink;
            }
            let lane = &mut link.lanes[side][Lane::Data.index()];
            if lane.len() >= self.room {
                link.full[side] = true;
                self.busy = true;
                return Sent::Busy;
            }
            lane.push_back(frame);
        }
        let (DataMessage::Route { cast, .. } | DataMessage::Deliver { cast, .. }) = message;
        self.sent.push((cast.id.origin.clone(), cast.id.seq, place));
        Sent::Accepted
    }
}
