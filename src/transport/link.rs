//! Sans-IO: turns raw connections that keep their order but may break into the [`super::Transport`] contract.
//!
//! One [`Endpoint`] stands for one node. It is told of raw connections (opened, packet, closed) and of the
//! time, and says what to write and what to report. A custom transport has to do no more than move its
//! packets.
//!
//! ```text
//!   dialler                                   acceptor
//!     │ Hello{who, terms, session?, received}    │
//!     │ ───────────────────────────────────────▶ │ no such session: Down(old), Up(new)
//!     │              Welcome{session, received}  │ same session: Resumed, send again what was lost
//!     │ ◀─────────────────────────────────────── │
//!     │ Up(new)                                  │
//!     │ Ready                                    │ until now the acceptor has sent no frame
//!     │ ───────────────────────────────────────▶ │
//!
//!   Open ── the connection broke, or no acknowledgement made progress ──▶ Suspect ── grace over ──▶ Down
//!    ▲                                                                       │
//!    └────────────── resumed on a new connection, or progress ───────────────┘
//! ```
//!
//! Frames are numbered per lane and kept until they are acknowledged, so a connection that breaks and is
//! replaced within `reconnect_grace` loses nothing. A session ends for both ends: whoever comes back without
//! it is a new session for the other one, which reports the old one down first.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use bytes::{BufMut, Bytes, BytesMut};
use serde::{Deserialize, Serialize};

use super::{Frame, Lane, SendError, Terms};
use crate::types::{Incarnation, NodeId, Peer};

/// Time since the endpoint's start, from a clock that only goes forward.
pub type Time = Duration;

/// Names one raw connection; chosen by the transport, never used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RawId(pub u64);

/// When a link is given up, and how much it may hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LinkConfig {
    /// Without acknowledgement progress for this long, while something is outstanding, the peer is suspect.
    pub suspect_after: Duration,
    /// How often an idle link is pinged; `None` where broken connections are always reported.
    pub ping_interval: Option<Duration>,
    /// After this long without a packet, while one is expected, the peer is down.
    pub ping_timeout: Duration,
    /// How long a session outlives its connection.
    pub reconnect_grace: Duration,
    /// A peer that takes nothing for this long, while something is outstanding, is down.
    pub stall_timeout: Duration,
    /// Frames that a lane to one peer holds until they are acknowledged.
    pub queue_frames: usize,
    /// Bytes that a lane to one peer holds until they are acknowledged.
    pub queue_bytes: usize,
    /// The largest frame, head and body together, in bytes.
    pub max_frame: usize,
    /// Frames that are written ahead of their acknowledgement.
    pub window: usize,
}

impl Default for LinkConfig {
    fn default() -> Self {
        Self {
            suspect_after: Duration::from_millis(500),
            ping_interval: Some(Duration::from_secs(1)),
            ping_timeout: Duration::from_secs(3),
            reconnect_grace: Duration::from_secs(2),
            stall_timeout: Duration::from_secs(10),
            queue_frames: 8192,
            queue_bytes: 64 << 20,
            max_frame: 16 << 20,
            window: 4096,
        }
    }
}

/// What is said over a raw connection.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Packet {
    Hello(Hello),
    Welcome(Welcome),
    Refuse(Refusal),
    Ready,
    Frame { lane: Lane, number: u64, head: Bytes, body: Bytes },
    Ack([u64; 3]),
    Ping,
    Pong,
    Goodbye,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Hello {
    me: Peer,
    terms: Terms,
    session: Option<u64>,
    received: [u64; 3],
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Welcome {
    me: Peer,
    session: u64,
    resumed: bool,
    received: [u64; 3],
}

/// Why a connection was refused, with both sides' values.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum Refusal {
    /// The scope, the ring's parameters or the protocol's version differ.
    #[error("the terms differ: theirs are {theirs:?}, ours are {ours:?}")]
    Terms {
        /// Of the one who was refused.
        theirs: Terms,
        /// Of the one who refused.
        ours: Terms,
    },
    /// A later life of this name is known.
    #[error("node {node} is known in the later incarnation {known}")]
    Superseded {
        /// The name.
        node: NodeId,
        /// Its latest incarnation.
        known: Incarnation,
    },
    /// The refusing end dials as well, and its dial wins.
    #[error("both ends dial; the other connection is used")]
    Crossed,
    /// Something that is no packet, or not the one that is due.
    #[error("not understood")]
    Malformed,
}

const KIND_HELLO: u8 = 1;
const KIND_WELCOME: u8 = 2;
const KIND_REFUSE: u8 = 3;
const KIND_READY: u8 = 4;
const KIND_FRAME: u8 = 5;
const KIND_ACK: u8 = 6;
const KIND_PING: u8 = 7;
const KIND_PONG: u8 = 8;
const KIND_GOODBYE: u8 = 9;
/// Kind, lane, number, length of the head.
const FRAME_HEADER: usize = 1 + 1 + 8 + 4;
/// The longest packet that is not a frame.
const MAX_HANDSHAKE: usize = 4096;

impl Packet {
    /// The packet as bytes; a frame's body is passed on as it is.
    fn encode(&self) -> (Bytes, Bytes) {
        let mut out = BytesMut::new();
        let mut tail = Bytes::new();
        match self {
            Packet::Hello(hello) => encode_part(&mut out, KIND_HELLO, hello),
            Packet::Welcome(welcome) => encode_part(&mut out, KIND_WELCOME, welcome),
            Packet::Refuse(refusal) => encode_part(&mut out, KIND_REFUSE, refusal),
            Packet::Ready => out.put_u8(KIND_READY),
            Packet::Frame { lane, number, head, body } => {
                out.reserve(FRAME_HEADER + head.len());
                out.put_u8(KIND_FRAME);
                out.put_u8(lane.index() as u8);
                out.put_u64_le(*number);
                out.put_u32_le(u32::try_from(head.len()).unwrap_or(u32::MAX));
                out.extend_from_slice(head);
                tail = body.clone();
            }
            Packet::Ack(counts) => {
                out.put_u8(KIND_ACK);
                counts.iter().for_each(|count| out.put_u64_le(*count));
            }
            Packet::Ping => out.put_u8(KIND_PING),
            Packet::Pong => out.put_u8(KIND_PONG),
            Packet::Goodbye => out.put_u8(KIND_GOODBYE),
        }
        (out.freeze(), tail)
    }

    /// Reads a packet from its bytes, given whole or as the two parts that `encode` gave. Never panics, and
    /// allocates no more than the bytes that are there.
    fn decode(head: Bytes, body: Bytes) -> Option<Packet> {
        let kind = *head.first()?;
        if kind == KIND_FRAME {
            return decode_frame(head, body);
        }
        if !body.is_empty() || head.len() > MAX_HANDSHAKE {
            return None;
        }
        let rest = head.get(1..)?;
        match kind {
            KIND_HELLO => decode_part(rest).map(Packet::Hello),
            KIND_WELCOME => decode_part(rest).map(Packet::Welcome),
            KIND_REFUSE => decode_part(rest).map(Packet::Refuse),
            KIND_ACK => {
                let mut counts = [0; 3];
                for (count, bytes) in counts.iter_mut().zip(rest.chunks_exact(8)) {
                    *count = u64::from_le_bytes(bytes.try_into().ok()?);
                }
                (rest.len() == 24).then_some(Packet::Ack(counts))
            }
            KIND_READY if rest.is_empty() => Some(Packet::Ready),
            KIND_PING if rest.is_empty() => Some(Packet::Ping),
            KIND_PONG if rest.is_empty() => Some(Packet::Pong),
            KIND_GOODBYE if rest.is_empty() => Some(Packet::Goodbye),
            _ => None,
        }
    }
}

fn encode_part<T: Serialize>(out: &mut BytesMut, kind: u8, part: &T) {
    out.put_u8(kind);
    // these types always serialise; an empty part would be refused by the other end
    out.extend_from_slice(&postcard::to_stdvec(part).unwrap_or_default());
}

fn decode_part<'a, T: Deserialize<'a>>(bytes: &'a [u8]) -> Option<T> {
    match postcard::take_from_bytes(bytes) {
        Ok((part, [])) => Some(part),
        _ => None,
    }
}

fn decode_frame(head: Bytes, body: Bytes) -> Option<Packet> {
    let header = head.get(..FRAME_HEADER)?;
    let lane = *Lane::ALL.get(usize::from(*header.get(1)?))?;
    let number = u64::from_le_bytes(header.get(2..10)?.try_into().ok()?);
    let length = u32::from_le_bytes(header.get(10..14)?.try_into().ok()?) as usize;
    let end = FRAME_HEADER.checked_add(length)?;
    if head.len() < end || (head.len() > end && !body.is_empty()) {
        return None;
    }
    let body = if head.len() > end { head.slice(end..) } else { body };
    Some(Packet::Frame { lane, number, head: head.slice(FRAME_HEADER..end), body })
}

/// What an endpoint reports, in the order in which it must reach [`super::Inbound`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LinkEvent {
    /// See [`super::Inbound::peer_up`]. Must have been reported before the endpoint is asked what to write.
    Up(Peer),
    /// See [`super::Inbound::peer_suspect`].
    Suspect(Peer),
    /// See [`super::Inbound::peer_resumed`].
    Resumed(Peer),
    /// See [`super::Inbound::peer_down`].
    Down(Peer),
    /// See [`super::Inbound::frame`].
    Frame(Peer, Frame),
    /// Close this connection.
    Close(RawId),
    /// The other end refused this connection (it is to be closed, too).
    Refused(RawId, Refusal),
}

/// A lane's frames: kept from `first` on until they are acknowledged.
#[derive(Debug, Default)]
struct Queue {
    frames: VecDeque<Frame>,
    bytes: usize,
    /// The number of the first frame kept; the numbers start at 1.
    acknowledged: u64,
    /// The number of the last frame written to the present connection.
    written: u64,
    /// The number of the last frame received.
    received: u64,
}

impl Queue {
    fn outstanding(&self) -> u64 {
        self.written - self.acknowledged
    }

    fn unwritten(&self) -> bool {
        self.written < self.acknowledged + self.frames.len() as u64
    }

    /// Says whether anything new was acknowledged.
    fn acknowledge(&mut self, number: u64) -> bool {
        let before = self.acknowledged;
        while self.acknowledged < number.min(self.written) {
            let Some(frame) = self.frames.pop_front() else { break };
            self.bytes -= frame.len();
            self.acknowledged += 1;
        }
        self.acknowledged > before
    }

    fn next(&mut self, window: u64) -> Option<(u64, Frame)> {
        if self.outstanding() >= window {
            return None;
        }
        let place = usize::try_from(self.written - self.acknowledged).ok()?;
        let frame = self.frames.get(place)?.clone();
        self.written += 1;
        Some((self.written, frame))
    }
}

#[derive(Debug)]
struct Link {
    peer: Peer,
    session: u64,
    raw: Option<RawId>,
    /// The other end has said that it is ready for frames.
    open: bool,
    /// We dialled and have been welcomed: say so.
    ready_due: bool,
    suspect: bool,
    queues: [Queue; 3],
    ack_due: bool,
    ping_due: bool,
    pong_due: bool,
    goodbye: bool,
    /// Since when no acknowledgement has made progress while something was outstanding.
    stuck_since: Time,
    /// When the last packet came.
    heard: Time,
    /// When the connection was lost.
    lost: Time,
    pinged: Time,
}

impl Link {
    fn new(peer: Peer, session: u64, raw: RawId, open: bool, now: Time) -> Self {
        Self {
            peer,
            session,
            raw: Some(raw),
            open,
            ready_due: open,
            suspect: false,
            queues: Default::default(),
            ack_due: false,
            ping_due: false,
            pong_due: false,
            goodbye: false,
            stuck_since: now,
            heard: now,
            lost: now,
            pinged: now,
        }
    }

    fn outstanding(&self) -> bool {
        self.queues.iter().any(|queue| queue.outstanding() > 0)
    }

    fn received(&self) -> [u64; 3] {
        [0, 1, 2].map(|lane: usize| self.queues.get(lane).map_or(0, |queue| queue.received))
    }

    /// A new connection carries the session on: everything that did not arrive is written again.
    fn rewind(&mut self, received: [u64; 3]) {
        for (queue, received) in self.queues.iter_mut().zip(received) {
            queue.acknowledge(received);
            queue.written = queue.acknowledged;
        }
    }

    fn wants_to_write(&self) -> bool {
        self.raw.is_some()
            && (self.ready_due
                || self.ack_due
                || self.ping_due
                || self.pong_due
                || self.goodbye
                || (self.open && self.queues.iter().any(Queue::unwritten)))
    }

    /// Control first, data next, bulk last; an acknowledgement goes when nothing else does, or after every
    /// burst.
    fn next_packet(&mut self, window: u64) -> Option<Packet> {
        if std::mem::take(&mut self.ready_due) {
            return Some(Packet::Ready);
        }
        if std::mem::take(&mut self.pong_due) {
            return Some(Packet::Pong);
        }
        if std::mem::take(&mut self.ack_due) {
            return Some(Packet::Ack(self.received()));
        }
        if self.open {
            for (lane, queue) in Lane::ALL.into_iter().zip(&mut self.queues) {
                if let Some((number, frame)) = queue.next(window) {
                    return Some(Packet::Frame { lane, number, head: frame.head, body: frame.body });
                }
            }
        }
        if std::mem::take(&mut self.ping_due) {
            return Some(Packet::Ping);
        }
        std::mem::take(&mut self.goodbye).then_some(Packet::Goodbye)
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Raw {
    /// Accepted: a `Hello` is due.
    Accepted,
    /// Dialled, perhaps knowing whom: a `Welcome` is due.
    Dialled(Option<NodeId>),
    /// It carries the link to this node.
    Bound(NodeId),
}

/// One node's end of all its links.
#[derive(Debug)]
pub struct Endpoint {
    me: Peer,
    terms: Terms,
    config: LinkConfig,
    /// Session ids: a node's own, starting anywhere.
    next_session: u64,
    links: BTreeMap<NodeId, Link>,
    raws: BTreeMap<RawId, Raw>,
    /// The latest life of each name that was seen.
    known: BTreeMap<NodeId, Incarnation>,
    events: VecDeque<LinkEvent>,
    handshakes: VecDeque<(RawId, Packet)>,
    /// Links with something to write, and links whose times count.
    writers: BTreeSet<NodeId>,
    watched: BTreeSet<NodeId>,
    refused: u64,
}

/// Names that are remembered with their latest incarnation.
const MAX_KNOWN: usize = 65_536;

// Getters.
impl Endpoint {
    /// An endpoint without connections. `seed` should differ between the lives of a node: session ids come
    /// from it.
    pub fn new(me: Peer, terms: Terms, config: LinkConfig, seed: u64) -> Self {
        Self {
            me,
            terms,
            config,
            next_session: seed | 1,
            links: BTreeMap::new(),
            raws: BTreeMap::new(),
            known: BTreeMap::new(),
            events: VecDeque::new(),
            handshakes: VecDeque::new(),
            writers: BTreeSet::new(),
            watched: BTreeSet::new(),
            refused: 0,
        }
    }

    /// Whether there is a link to any life of this node.
    pub fn has_link(&self, node: &NodeId) -> bool {
        self.links.contains_key(node)
    }

    /// Whether the link to this node has a connection.
    pub fn is_connected(&self, node: &NodeId) -> bool {
        self.links.get(node).is_some_and(|link| link.raw.is_some())
    }

    /// Connections that were refused here.
    pub fn refused(&self) -> u64 {
        self.refused
    }

    /// When [`Endpoint::handle_timeout`] is wanted next, if at all.
    pub fn deadline(&self) -> Option<Time> {
        self.watched.iter().filter_map(|node| self.links.get(node)).map(|link| self.deadline_of(link)).min()
    }

    fn deadline_of(&self, link: &Link) -> Time {
        let config = &self.config;
        if link.raw.is_none() {
            return link.lost.saturating_add(config.reconnect_grace);
        }
        let mut next = Time::MAX;
        if link.outstanding() {
            let patience = if link.suspect { config.stall_timeout } else { config.suspect_after };
            next = next.min(link.stuck_since.saturating_add(patience));
            next = next.min(link.heard.max(link.stuck_since).saturating_add(config.ping_timeout));
        }
        if let Some(interval) = config.ping_interval {
            next = next.min(link.pinged.max(link.heard).saturating_add(interval));
            next = next.min(link.heard.saturating_add(config.ping_timeout));
        }
        next
    }
}

// Commands.
impl Endpoint {
    /// Queues one frame for exactly this peer.
    ///
    /// # Errors
    /// [`SendError`], which gives the frame back.
    pub fn send(&mut self, to: &Peer, frame: Frame) -> Result<(), SendError> {
        if frame.len() > self.config.max_frame {
            return Err(SendError::TooLarge(frame));
        }
        let Some(link) = self.links.get_mut(&to.node).filter(|link| link.peer == *to && !link.goodbye) else {
            return Err(SendError::NoLink(frame));
        };
        let Some(queue) = link.queues.get_mut(frame.lane.index()) else {
            return Err(SendError::NoLink(frame));
        };
        let full = queue.frames.len() >= self.config.queue_frames
            || (!queue.frames.is_empty() && queue.bytes + frame.len() > self.config.queue_bytes);
        if full {
            return Err(SendError::Busy(frame));
        }
        queue.bytes += frame.len();
        queue.frames.push_back(frame);
        if link.raw.is_some() {
            self.writers.insert(to.node.clone());
        }
        Ok(())
    }

    /// Says goodbye on every link: the peers see this node down at once, after its last frame.
    pub fn close(&mut self) {
        for (node, link) in &mut self.links {
            link.goodbye = true;
            self.writers.insert(node.clone());
        }
    }
}

// Inputs.
impl Endpoint {
    /// We have opened a connection, to this node if that is known.
    pub fn handle_dialled(&mut self, raw: RawId, to: Option<NodeId>) {
        let link = to.as_ref().and_then(|node| self.links.get(node));
        let hello = Hello {
            me: self.me.clone(),
            terms: self.terms.clone(),
            session: link.map(|link| link.session),
            received: link.map_or([0; 3], Link::received),
        };
        self.raws.insert(raw, Raw::Dialled(to));
        self.handshakes.push_back((raw, Packet::Hello(hello)));
    }

    /// Another node has opened a connection to us.
    pub fn handle_accepted(&mut self, raw: RawId) {
        self.raws.insert(raw, Raw::Accepted);
    }

    /// A connection is gone.
    pub fn handle_closed(&mut self, raw: RawId, now: Time) {
        let Some(Raw::Bound(node)) = self.raws.remove(&raw) else { return };
        let Some(link) = self.links.get_mut(&node).filter(|link| link.raw == Some(raw)) else { return };
        link.raw = None;
        link.lost = now;
        self.watched.insert(node.clone());
        self.writers.remove(&node);
        self.suspect(&node);
    }

    /// A packet has arrived, as the one or two parts in which it was written.
    pub fn handle_packet(&mut self, raw: RawId, head: Bytes, body: Bytes, now: Time) {
        let Some(state) = self.raws.get(&raw).cloned() else { return };
        match (state, Packet::decode(head, body)) {
            (Raw::Accepted, Some(Packet::Hello(hello))) => self.handle_hello(raw, hello, now),
            (Raw::Dialled(to), Some(Packet::Welcome(welcome))) => self.handle_welcome(raw, to, welcome, now),
            (Raw::Dialled(_), Some(Packet::Refuse(refusal))) => {
                self.raws.remove(&raw);
                self.events.push_back(LinkEvent::Refused(raw, refusal));
            }
            (Raw::Bound(node), Some(packet)) => self.handle_bound(raw, &node, packet, now),
            _ => self.refuse(raw, Refusal::Malformed, now),
        }
    }

    /// Time has gone by: what makes no progress becomes suspect, then down; idle links are pinged.
    pub fn handle_timeout(&mut self, now: Time) {
        let watched: Vec<NodeId> = self.watched.iter().cloned().collect();
        for node in watched {
            let Some(link) = self.links.get_mut(&node) else {
                self.watched.remove(&node);
                continue;
            };
            let config = &self.config;
            let over = |since: Time, patience: Duration| since.saturating_add(patience) <= now;
            if link.raw.is_none() {
                if over(link.lost, config.reconnect_grace) {
                    self.down(&node);
                }
                continue;
            }
            let outstanding = link.outstanding();
            let silent = over(link.heard.max(link.stuck_since), config.ping_timeout) && outstanding
                || config.ping_interval.is_some() && over(link.heard, config.ping_timeout);
            if silent || (outstanding && over(link.stuck_since, config.stall_timeout)) {
                self.down(&node);
                continue;
            }
            if let Some(interval) = config.ping_interval {
                if over(link.pinged.max(link.heard), interval) {
                    link.pinged = now;
                    link.ping_due = true;
                    self.writers.insert(node.clone());
                }
            } else if !outstanding {
                self.watched.remove(&node);
            }
            if outstanding && over(link.stuck_since, config.suspect_after) {
                self.suspect(&node);
            }
        }
    }

    fn handle_hello(&mut self, raw: RawId, hello: Hello, now: Time) {
        if hello.terms != self.terms {
            let refusal = Refusal::Terms { theirs: hello.terms, ours: self.terms.clone() };
            return self.refuse(raw, refusal, now);
        }
        let node = hello.me.node.clone();
        let own = (node == self.me.node).then_some(self.me.incarnation);
        let known = own.or_else(|| self.known.get(&node).copied());
        if let Some(known) = known.filter(|known| *known > hello.me.incarnation || own.is_some()) {
            return self.refuse(raw, Refusal::Superseded { node, known }, now);
        }
        let dialling = self.raws.values().any(|state| *state == Raw::Dialled(Some(node.clone())));
        if dialling && self.me.node < node {
            return self.refuse(raw, Refusal::Crossed, now);
        }
        if let Some(link) = self.links.get_mut(&node).filter(|link| link.peer == hello.me) {
            if hello.session == Some(link.session) {
                let (session, received) = (link.session, link.received());
                let welcome = Welcome { me: self.me.clone(), session, resumed: true, received };
                self.handshakes.push_back((raw, Packet::Welcome(welcome)));
                return self.resume(&node, raw, hello.received, now);
            }
        }
        // whoever comes without the session has seen its end, or never saw its beginning
        self.down(&node);
        let session = self.next_session;
        self.next_session = self.next_session.wrapping_add(2);
        let welcome = Welcome { me: self.me.clone(), session, resumed: false, received: [0; 3] };
        self.handshakes.push_back((raw, Packet::Welcome(welcome)));
        self.establish(hello.me, session, raw, false, now);
    }

    fn handle_welcome(&mut self, raw: RawId, to: Option<NodeId>, welcome: Welcome, now: Time) {
        let node = welcome.me.node.clone();
        let unexpected = to.is_some_and(|to| to != node) || node == self.me.node;
        if unexpected || self.known.get(&node).is_some_and(|known| *known > welcome.me.incarnation) {
            return self.refuse(raw, Refusal::Malformed, now);
        }
        let same = self
            .links
            .get(&node)
            .is_some_and(|link| link.peer == welcome.me && link.session == welcome.session);
        if welcome.resumed && same {
            return self.resume(&node, raw, welcome.received, now);
        }
        if welcome.resumed {
            // we gave the session up while it was being resumed: the next dial starts a new one
            return self.drop_raw(raw, now);
        }
        self.down(&node);
        self.establish(welcome.me, welcome.session, raw, true, now);
    }

    fn handle_bound(&mut self, raw: RawId, node: &NodeId, packet: Packet, now: Time) {
        let Some(link) = self.links.get_mut(node).filter(|link| link.raw == Some(raw)) else { return };
        link.heard = now;
        match packet {
            Packet::Ready => {
                link.open = true;
                self.writers.insert(node.clone());
            }
            Packet::Frame { lane, number, head, body } => {
                let Some(queue) = link.queues.get_mut(lane.index()) else { return };
                if number == queue.received + 1 {
                    queue.received = number;
                    link.ack_due = true;
                    self.writers.insert(node.clone());
                    let peer = link.peer.clone();
                    self.events.push_back(LinkEvent::Frame(peer, Frame { lane, head, body }));
                } else if number > queue.received {
                    // a connection that loses what it has taken is broken
                    self.drop_raw(raw, now);
                }
            }
            Packet::Ack(received) => {
                let mut moved = false;
                for (queue, received) in link.queues.iter_mut().zip(received) {
                    moved |= queue.acknowledge(received);
                }
                if moved {
                    link.stuck_since = now;
                    self.resumed(node);
                    self.writers.insert(node.clone());
                }
            }
            Packet::Ping => {
                link.pong_due = true;
                self.writers.insert(node.clone());
            }
            Packet::Pong => {}
            Packet::Goodbye => {
                self.down(node);
            }
            Packet::Hello(_) | Packet::Welcome(_) | Packet::Refuse(_) => self.drop_raw(raw, now),
        }
    }
}

// Steps.
impl Endpoint {
    fn establish(&mut self, peer: Peer, session: u64, raw: RawId, dialled: bool, now: Time) {
        let node = peer.node.clone();
        if self.known.len() < MAX_KNOWN || self.known.contains_key(&node) {
            self.known.insert(node.clone(), peer.incarnation);
        }
        self.raws.insert(raw, Raw::Bound(node.clone()));
        self.links.insert(node.clone(), Link::new(peer.clone(), session, raw, dialled, now));
        self.events.push_back(LinkEvent::Up(peer));
        self.writers.insert(node.clone());
        self.watched.insert(node);
    }

    /// The session goes on over a new connection. An old one that still looks alive is closed: the other end
    /// has left it.
    fn resume(&mut self, node: &NodeId, raw: RawId, received: [u64; 3], now: Time) {
        self.raws.insert(raw, Raw::Bound(node.clone()));
        let Some(link) = self.links.get_mut(node) else { return };
        let old = link.raw.replace(raw);
        link.rewind(received);
        link.open = true;
        link.ready_due = false;
        link.heard = now;
        link.stuck_since = now;
        self.writers.insert(node.clone());
        if let Some(old) = old.filter(|old| *old != raw) {
            self.raws.remove(&old);
            self.events.push_back(LinkEvent::Close(old));
        }
        self.resumed(node);
    }

    fn resumed(&mut self, node: &NodeId) {
        if let Some(link) = self.links.get_mut(node).filter(|link| link.suspect && link.raw.is_some()) {
            link.suspect = false;
            self.events.push_back(LinkEvent::Resumed(link.peer.clone()));
        }
    }

    fn suspect(&mut self, node: &NodeId) {
        if let Some(link) = self.links.get_mut(node).filter(|link| !link.suspect) {
            link.suspect = true;
            self.events.push_back(LinkEvent::Suspect(link.peer.clone()));
        }
    }

    fn down(&mut self, node: &NodeId) {
        let Some(link) = self.links.remove(node) else { return };
        self.writers.remove(node);
        self.watched.remove(node);
        if let Some(raw) = link.raw {
            self.raws.remove(&raw);
            self.events.push_back(LinkEvent::Close(raw));
        }
        self.events.push_back(LinkEvent::Down(link.peer));
    }

    fn refuse(&mut self, raw: RawId, refusal: Refusal, now: Time) {
        self.refused += 1;
        match self.raws.get(&raw) {
            Some(Raw::Bound(_)) => self.drop_raw(raw, now),
            Some(_) => {
                // closed when the refusal is written: see `poll_write`
                self.raws.remove(&raw);
                self.handshakes.push_back((raw, Packet::Refuse(refusal)));
            }
            None => {}
        }
    }

    fn drop_raw(&mut self, raw: RawId, now: Time) {
        self.events.push_back(LinkEvent::Close(raw));
        self.handle_closed(raw, now);
        self.raws.remove(&raw);
    }
}

// Outputs.
impl Endpoint {
    /// The next thing to report. Report all of them before asking what to write: nobody may hear a frame of
    /// ours before `Up` has been reported here.
    pub fn poll_event(&mut self) -> Option<LinkEvent> {
        self.events.pop_front()
    }

    /// The next packet to write, as two parts that belong together, and where.
    pub fn poll_write(&mut self, now: Time) -> Option<(RawId, Bytes, Bytes)> {
        if let Some((raw, packet)) = self.handshakes.pop_front() {
            if matches!(packet, Packet::Refuse(_)) {
                self.events.push_back(LinkEvent::Close(raw));
            }
            let (head, body) = packet.encode();
            return Some((raw, head, body));
        }
        while let Some(node) = self.writers.first().cloned() {
            let window = self.config.window as u64;
            if let Some(link) = self.links.get_mut(&node) {
                if let Some(raw) = link.raw {
                    let idle = !link.outstanding();
                    if let Some(packet) = link.next_packet(window) {
                        if idle && link.outstanding() {
                            link.stuck_since = now;
                            self.watched.insert(node);
                        }
                        let (head, body) = packet.encode();
                        return Some((raw, head, body));
                    }
                }
            }
            self.writers.remove(&node);
        }
        None
    }

    /// Whether there is something to write.
    pub fn wants_to_write(&self) -> bool {
        !self.handshakes.is_empty()
            || self.writers.iter().any(|node| self.links.get(node).is_some_and(Link::wants_to_write))
    }
}

#[cfg(test)]
#[path = "link_tests.rs"]
mod tests;
