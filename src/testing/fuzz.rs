//! What is done with hostile bytes: the bodies of the fuzz targets, called by ordinary tests as well.
//!
//! Each takes any bytes at all and must neither panic nor hold much more memory than they are long. The answer
//! says whether the input got anywhere: a test that only ever gives what is refused at once checks nothing.

use std::collections::{BTreeSet, VecDeque};
use std::time::Duration;

use bytes::Bytes;

use crate::config::Config;
use crate::node::message::{Cast, DataMessage, Message};
use crate::node::relay::{Audience, NewCast, Sent, Wire};
use crate::node::{JoinStart, Node, Settings, Ticket};
use crate::transport::link::{Effect, LinkConfig, Links, Output, Packet, RawId};
use crate::transport::wire::{self as frames, Heard};
use crate::transport::{Frame, Lane, Terms};
use crate::types::{Group, Incarnation, NodeId, Peer};

#[cfg(feature = "cache")]
mod cache;
#[cfg(feature = "consensus")]
pub use cache::cache_strong;
#[cfg(feature = "cache")]
pub use cache::{cache_message, cache_node, cache_pattern, cache_store, cache_term};

/// The decoder of frames: the first byte is the lane. What decodes can be said, and is then heard the same.
pub fn wire(input: &[u8]) -> bool {
    let Some((lane, head)) = input.split_first() else { return false };
    let hear = |head: Bytes| frames::decode(&Frame::new(lane_of(*lane), head, Bytes::new()));
    let Ok(heard) = hear(Bytes::copy_from_slice(head)) else { return false };
    let again = match &heard {
        Heard::Control(message) => frames::encode_control(message),
        Heard::Data(message) => frames::encode_data(message),
        Heard::Call(message) => frames::encode_call(message),
        Heard::Cache(head) => frames::encode_cache(head),
    };
    assert_eq!(again.map(hear), Some(Ok(heard)), "what was heard can be said");
    true
}

/// A configuration, read and written by the caller's format. What is read can be written and read again, and
/// to check it never panics.
pub fn config<R, W>(input: &[u8], read: R, write: W) -> bool
where
    R: Fn(&[u8]) -> Option<Config>,
    W: Fn(&Config) -> Option<Vec<u8>>,
{
    let Some(config) = read(input) else { return false };
    if let Err(error) = config.validate() {
        assert!(error.to_string().contains(error.option()), "the error names its option");
    }
    assert_eq!(write(&config).and_then(|text| read(&text)), Some(config), "what was read can be written");
    true
}

/// The link layer of two nodes whose connections an enemy holds. The input is a list of orders: carry a packet,
/// invent or change one, break, connect, send, let time pass. What the routers are told keeps the contract:
/// up and down in turn, frames in between.
pub fn link(input: &[u8]) -> bool {
    let (Some(a), Some(b)) = (peer("a", 5), peer("b", 6)) else { return false };
    let mut input = Input(input);
    let mut pair = LinkPair::new([a, b]);
    while let Some(order) = input.byte() {
        pair.order(order, &mut input);
    }
    pair.ever_up
}

/// A whole node among peers that say anything. The input is a list of orders: peers come, fall silent, go, send
/// what the input says or a fitting answer; members join and leave; broadcasts begin; time passes. The node's
/// invariants are checked after each.
pub fn node(input: &[u8]) -> bool {
    let Some(mut alone) = Alone::new() else { return false };
    let mut input = Input(input);
    while let Some(order) = input.byte() {
        alone.order(order, &mut input);
        assert_eq!(alone.node.check_invariants(), Ok(()), "the node is sound");
    }
    alone.heard > 0
}

fn peer(name: &str, incarnation: u64) -> Option<Peer> {
    Some(Peer::new(NodeId::new(name).ok()?, Incarnation::new(incarnation)?))
}

fn lane_of(byte: u8) -> Lane {
    match byte % 3 {
        0 => Lane::Control,
        1 => Lane::Data,
        _ => Lane::Bulk,
    }
}

/// What is left of the input.
struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    fn byte(&mut self) -> Option<u8> {
        let (first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(*first)
    }

    /// The next byte, or 0 at the end.
    fn next(&mut self) -> u8 {
        self.byte().unwrap_or_default()
    }

    /// So many bytes as the next byte says, or as there are.
    fn bytes(&mut self) -> &'a [u8] {
        let length = usize::from(self.next()).min(self.0.len());
        let (taken, rest) = self.0.split_at(length);
        self.0 = rest;
        taken
    }

    /// A time from nothing to a minute, the short ones as often as the long ones.
    fn time(&mut self) -> Duration {
        Duration::from_millis(1 << (self.next() % 17))
    }
}

/// Two ends and one connection between them.
struct LinkPair {
    now: Duration,
    ends: [Links; 2],
    up: [BTreeSet<Peer>; 2],
    raw: RawId,
    /// From each end to the other; `None` is its end.
    ways: [VecDeque<Option<Packet>>; 2],
    ever_up: bool,
}

impl LinkPair {
    fn new(peers: [Peer; 2]) -> Self {
        let terms = Terms { scope: "s".into(), vnodes: 128, protocol: 1 };
        let config =
            LinkConfig { queue_frames: 8, queue_bytes: 1 << 12, max_frame: 1 << 12, ..LinkConfig::default() };
        let mut pair = Self {
            now: Duration::ZERO,
            ends: peers.map(|me| Links::new(me, terms.clone(), config.clone())),
            up: Default::default(),
            raw: RawId(0),
            ways: Default::default(),
            ever_up: false,
        };
        pair.connect();
        pair
    }

    fn connect(&mut self) {
        let old = self.raw;
        self.raw = RawId(old.0 + 1);
        self.ways = Default::default();
        for end in &mut self.ends {
            end.handle_closed(old, self.now);
            end.handle_opened(self.raw, self.now);
        }
        self.follow();
    }

    fn order(&mut self, order: u8, input: &mut Input<'_>) {
        let to = usize::from(order >> 7);
        let from = 1 - to;
        match order & 15 {
            0..=5 => {
                let carried = 1 << (order & 3);
                for _ in 0..carried {
                    self.carry(0);
                    self.carry(1);
                }
            }
            6 => {
                let invented = Bytes::copy_from_slice(input.bytes());
                self.give(to, Packet { head: invented, body: Bytes::from_static(b"body") });
            }
            7 => {
                let (at, by) = (usize::from(input.next()), input.next());
                if let Some(Some(packet)) = self.ways.get_mut(from).and_then(VecDeque::front_mut) {
                    let mut head = packet.head.to_vec();
                    let length = head.len().max(1);
                    if let Some(byte) = head.get_mut(at % length) {
                        *byte ^= by;
                    }
                    packet.head = head.into();
                }
            }
            8 => {
                if let Some(way) = self.ways.get_mut(from) {
                    way.pop_front();
                }
            }
            9 => {
                if let Some(way) = self.ways.get_mut(from) {
                    way.extend(way.front().cloned());
                }
            }
            10 => self.connect(),
            11 => {
                self.now += input.time();
                self.ends.iter_mut().for_each(|end| end.handle_timeout(self.now));
                self.follow();
            }
            12 => {
                let body = Bytes::copy_from_slice(input.bytes());
                let frame = Frame::new(lane_of(order >> 4), Bytes::from_static(b"head"), body);
                self.at(from, |end, now| {
                    let to = end.peers().next().cloned();
                    if let Some(to) = to {
                        let _ = end.try_send(&to, frame, now);
                    }
                });
            }
            13 => self.at(to, |end, now| {
                let other = end.peers().next().cloned();
                if let Some(other) = other {
                    end.disconnect(&other, now);
                }
            }),
            14 => self.at(to, |end, _| end.settle()),
            _ => {
                let raw = self.raw;
                self.at(to, |end, now| end.handle_closed(raw, now));
            }
        }
    }

    fn at(&mut self, end: usize, input: impl FnOnce(&mut Links, Duration)) {
        if let Some(end) = self.ends.get_mut(end) {
            input(end, self.now);
        }
        self.follow();
    }

    fn give(&mut self, to: usize, packet: Packet) {
        let raw = self.raw;
        self.at(to, |end, now| end.handle_packet(raw, packet, now));
    }

    fn carry(&mut self, from: usize) {
        let raw = self.raw;
        match self.ways.get_mut(from).and_then(VecDeque::pop_front) {
            Some(Some(packet)) => self.give(1 - from, packet),
            Some(None) => self.at(1 - from, |end, now| end.handle_closed(raw, now)),
            None => {}
        }
    }

    /// Effects first, then packets.
    fn follow(&mut self) {
        for ((end, up), way) in self.ends.iter_mut().zip(&mut self.up).zip(&mut self.ways) {
            while let Some(effect) = end.poll_effect() {
                match effect {
                    Effect::Up(peer) => {
                        assert!(
                            up.iter().all(|other| other.node != peer.node),
                            "{peer} is up while its name is"
                        );
                        up.insert(peer);
                        self.ever_up = true;
                    }
                    Effect::Down(peer, _) => assert!(up.remove(&peer), "{peer} is down, and was not up"),
                    Effect::Frame(peer, _) => {
                        assert!(up.contains(&peer), "a frame of {peer}, which is not up")
                    }
                    _ => {}
                }
            }
            while let Some(raw) = end.poll_dirty() {
                loop {
                    match end.poll_output(raw, true) {
                        Output::Packet(packet) if raw == self.raw => way.push_back(Some(packet)),
                        Output::Packet(_) => {}
                        Output::Close => {
                            if raw == self.raw {
                                way.push_back(None);
                            }
                            break;
                        }
                        Output::Idle => break,
                    }
                }
            }
        }
    }
}

/// A network that takes every frame, or none.
struct Taker(bool);

impl Wire for Taker {
    fn try_send(&mut self, _: &Peer, _: DataMessage<&Cast>, _: &Bytes) -> Sent {
        if self.0 { Sent::Accepted } else { Sent::Busy }
    }
}

/// One node and what it is told.
struct Alone {
    node: Node<u8>,
    now: Duration,
    peers: Vec<Peer>,
    /// Which of them the transport has told it of.
    up: BTreeSet<Peer>,
    wire: Taker,
    last: u64,
    heard: u64,
}

impl Alone {
    fn new() -> Option<Self> {
        let mut settings = Settings::from(&Config::default());
        settings.ring.vnodes = 4;
        settings.shards = 2;
        settings.work_step = 2;
        settings.chunk_groups = 2;
        settings.dedupe_window = 16;
        Some(Self {
            node: Node::new(peer("a", 5)?, settings, Duration::ZERO),
            now: Duration::ZERO,
            peers: vec![peer("b", 6)?, peer("c", 7)?, peer("b", 8)?, peer("d", 1)?],
            up: BTreeSet::new(),
            wire: Taker(true),
            last: 0,
            heard: 0,
        })
    }

    fn order(&mut self, order: u8, input: &mut Input<'_>) {
        let Some(peer) = self.peers.get(usize::from(order >> 6)).cloned() else { return };
        let (node, now) = (&self.node, self.now);
        let group = Group::from([b'g', (order >> 4) & 3].as_slice());
        match order & 15 {
            0 => {
                // a transport reports the old life down first
                let old = self.up.iter().find(|old| old.node == peer.node).cloned();
                if old.as_ref() != Some(&peer) {
                    if let Some(old) = old {
                        self.up.remove(&old);
                        node.handle_peer_down(&old, &mut self.wire, now);
                    }
                    self.up.insert(peer.clone());
                    node.handle_peer_up(peer, &mut self.wire, now);
                }
            }
            1 => {
                if self.up.remove(&peer) {
                    node.handle_peer_down(&peer, &mut self.wire, now);
                }
            }
            2 if self.up.contains(&peer) => node.handle_peer_suspect(&peer, &mut self.wire, now),
            3 if self.up.contains(&peer) => node.handle_peer_resumed(&peer, &mut self.wire, now),
            4 | 5 => {
                let said = input.bytes();
                let (lane, family) = if order & 1 == 0 { (Lane::Control, 0) } else { (Lane::Data, 1) };
                let head = [&[frames::MAJOR, frames::MINOR, family], said].concat();
                match frames::decode(&Frame::new(lane, head, Bytes::new())) {
                    Ok(heard) if self.up.contains(&peer) => {
                        self.heard += 1;
                        match heard {
                            Heard::Control(message) => {
                                node.handle_message(&peer, message, &mut self.wire, now)
                            }
                            Heard::Data(message) => self.data(&peer, message),
                            // the node knows nothing of calls and caches
                            Heard::Call(_) | Heard::Cache(_) => {}
                        }
                    }
                    _ => node.skip_data_frame(&peer),
                }
            }
            6 | 7 => self.answer(&peer, order & 1 == 0),
            8 => {
                self.last += 1;
                let started = node.join(group, self.last % 4, 0, Ticket(self.last), now);
                if let JoinStart::Unsettled(_) = started {
                    node.handle_discovery_settled(now);
                }
            }
            9 => {
                node.leave(group.as_bytes(), u64::from(input.next() % 4), now);
            }
            10 => {
                node.cancel_join(
                    group.as_bytes(),
                    Ticket(self.last.saturating_sub(u64::from(input.next() % 4))),
                );
            }
            11 => {
                self.last += 1;
                let audience = if input.next() & 1 == 0 { Audience::Group } else { Audience::Node(peer) };
                let cast = NewCast {
                    group,
                    body: Bytes::from_static(b"payload"),
                    except: None,
                    headers: Vec::new(),
                    at_most_once: order & 16 != 0,
                    audience,
                    ticket: Some(Ticket(self.last)),
                };
                node.broadcast(cast, &mut self.wire);
            }
            12 => {
                self.now += input.time();
                node.handle_timeout(&mut self.wire, self.now);
            }
            13 => {
                node.work(now);
            }
            14 => {
                self.wire.0 = !self.wire.0;
                if self.wire.0 {
                    self.up.iter().for_each(|peer| node.handle_room(peer, &mut self.wire));
                }
            }
            15 if order == 15 => node.drain(now),
            _ => node.handle_discovery_settled(now),
        }
        while self.node.poll_effect().is_some() {}
    }

    fn data(&mut self, from: &Peer, message: DataMessage) {
        let (node, body) = (&self.node, Bytes::from_static(b"payload"));
        let hop = match &message {
            DataMessage::Route { cast, .. } | DataMessage::Deliver { cast, .. } => cast.hop,
        };
        if node.handle_data_frame(from, message, body, &mut self.wire, self.now).is_some() {
            node.delivered(from, hop);
        }
    }

    /// Takes what the node owes this peer and answers as a peer of the same view would, or not at all.
    fn answer(&mut self, peer: &Peer, answer: bool) {
        if !self.up.contains(peer) {
            return;
        }
        for _ in 0..32 {
            let Some(outgoing) = self.node.poll_transmit(peer, self.now) else { return };
            let reply = match outgoing.message {
                Message::Leaving { round } => Message::LeavingAck { round },
                Message::Announce { version, hash } => Message::Announce { version, hash },
                Message::Heartbeat { version, hash, .. } => {
                    Message::Heartbeat { version, hash, draining: false, digest: Vec::new() }
                }
                Message::Data { round, index, last, .. } => {
                    Message::DataAck { round, chunks: index.saturating_add(1), complete: last.is_some() }
                }
                Message::Claims { call, .. } => Message::ClaimsAck { calls: vec![call] },
                Message::Retract { version, .. } => Message::RetractAck { versions: vec![version] },
                _ => continue,
            };
            if answer {
                self.heard += 1;
                self.node.handle_message(peer, reply, &mut self.wire, self.now);
            }
        }
    }
}
