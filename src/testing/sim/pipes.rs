//! Raw connections between places: what lies below the link layers. Packets arrive whole and in order until the
//! connection breaks; then an end of what was on its way is lost, and each end finds out for itself, or never.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use crate::transport::link::{Packet, RawId};

/// What comes out of a connection at its far end.
#[derive(Clone, Debug)]
pub(super) enum Item {
    /// Somebody has dialled.
    Opened,
    Packet(Packet),
    /// It is over.
    Closed,
}

/// One connection, from the side of who dialled (0) and who was dialled (1).
#[derive(Clone, Debug)]
struct Connection {
    ends: [usize; 2],
    /// This end's link layer has it.
    held: [bool; 2],
    /// This end will never have it again.
    gone: [bool; 2],
    /// Nothing gets through any more, and nobody is told.
    dead: bool,
    /// A packet was lost or doubled in its middle, which is more than a connection may do.
    inexact: bool,
    ways: [VecDeque<Item>; 2],
}

impl Connection {
    fn side(&self, place: usize) -> usize {
        usize::from(self.ends[0] != place)
    }
}

/// Where everything on its way is.
#[derive(Clone, Debug)]
pub(super) struct Pipes {
    /// By pair, the lower place first, and in the order in which they were opened.
    connections: BTreeMap<((usize, usize), u64), Connection>,
    last: u64,
    /// Directions in which nothing moves.
    held: BTreeSet<(usize, usize)>,
    /// Pairs that cannot connect, the lower place first.
    cut: BTreeSet<(usize, usize)>,
    /// How many frames a direction of a connection holds.
    width: usize,
    pub(super) opened: u64,
    pub(super) broken: u64,
    pub(super) lost: u64,
}

fn pair(a: usize, b: usize) -> (usize, usize) {
    (a.min(b), a.max(b))
}

/// The pair is told by the number, so that no table of them is needed.
fn raw_id(number: u64, (low, high): (usize, usize)) -> RawId {
    RawId(number << 16 | (low as u64) << 8 | high as u64)
}

fn key_of(raw: RawId) -> ((usize, usize), u64) {
    (((raw.0 >> 8 & 255) as usize, (raw.0 & 255) as usize), raw.0 >> 16)
}

impl Pipes {
    pub(super) fn new(width: usize) -> Self {
        Self {
            connections: BTreeMap::new(),
            last: 0,
            held: BTreeSet::new(),
            cut: BTreeSet::new(),
            width,
            opened: 0,
            broken: 0,
            lost: 0,
        }
    }

    fn between(&self, a: usize, b: usize) -> impl Iterator<Item = (RawId, &Connection)> {
        let pair = pair(a, b);
        let range = self.connections.range((pair, 0)..=(pair, u64::MAX));
        range.map(move |((pair, number), connection)| (raw_id(*number, *pair), connection))
    }

    fn get_mut(&mut self, raw: RawId) -> Option<&mut Connection> {
        self.connections.get_mut(&key_of(raw))
    }

    fn forget_if_over(&mut self, raw: RawId) {
        if self.connections.get(&key_of(raw)).is_some_and(|connection| connection.gone == [true; 2]) {
            self.connections.remove(&key_of(raw));
        }
    }
}

// What a schedule can see.
impl Pipes {
    /// How many connections of this pair have something for `to` that may arrive now.
    pub(super) fn ready(&self, from: usize, to: usize) -> usize {
        self.carryable(from, to).count()
    }

    fn carryable(&self, from: usize, to: usize) -> impl Iterator<Item = RawId> {
        let stands = self.is_held(from, to);
        self.between(from, to)
            .filter(move |(_, connection)| {
                !stands && !connection.dead && !connection.ways[connection.side(from)].is_empty()
            })
            .map(|(raw, _)| raw)
    }

    /// How many connections of this pair the end `at` has.
    pub(super) fn held_by(&self, at: usize, of: usize) -> usize {
        self.between(at, of).filter(|(_, connection)| connection.held[connection.side(at)]).count()
    }

    pub(super) fn is_held(&self, from: usize, to: usize) -> bool {
        self.held.contains(&(from, to))
    }

    pub(super) fn is_cut(&self, a: usize, b: usize) -> bool {
        self.cut.contains(&pair(a, b))
    }

    /// Whether what is written on this connection arrives.
    pub(super) fn flows(&self, raw: RawId, from: usize, to: usize) -> bool {
        let alive = |connection: &Connection| !connection.dead && connection.held == [true; 2];
        !self.is_held(from, to) && self.connections.get(&key_of(raw)).is_some_and(alive)
    }

    /// Whether it has delivered everything whole and in order.
    pub(super) fn is_exact(&self, raw: RawId) -> bool {
        self.connections.get(&key_of(raw)).is_some_and(|connection| !connection.inexact)
    }

    /// Whether a frame more fits into this direction.
    pub(super) fn has_room(&self, raw: RawId, from: usize) -> bool {
        let Some(connection) = self.connections.get(&key_of(raw)) else { return true };
        let frame = |item: &&Item| matches!(item, Item::Packet(packet) if packet.lane().is_some());
        self.width == usize::MAX
            || connection.ways[connection.side(from)].iter().filter(frame).count() < self.width
    }

    /// Who is at the other end.
    pub(super) fn other_end(raw: RawId, place: usize) -> usize {
        let (low, high) = key_of(raw).0;
        if low == place { high } else { low }
    }
}

// What happens to them.
impl Pipes {
    /// `a` has a connection with `b`, which will learn of it.
    pub(super) fn dial(&mut self, a: usize, b: usize) -> Option<RawId> {
        if self.is_cut(a, b) {
            return None;
        }
        self.last += 1;
        self.opened += 1;
        let connection = Connection {
            ends: [a, b],
            held: [true, false],
            gone: [false; 2],
            dead: false,
            inexact: false,
            ways: [VecDeque::from([Item::Opened]), VecDeque::new()],
        };
        self.connections.insert((pair(a, b), self.last), connection);
        Some(raw_id(self.last, pair(a, b)))
    }

    /// The end `from` has written this.
    pub(super) fn write(&mut self, raw: RawId, from: usize, packet: Packet) {
        let Some(connection) = self.get_mut(raw) else { return };
        let side = connection.side(from);
        // its own end may be over already, though the link layer is told of it next
        if connection.dead || !connection.held[side] || connection.gone[1 - side] {
            self.lost += 1;
        } else {
            connection.ways[side].push_back(Item::Packet(packet));
        }
    }

    /// The end `at` has closed it, after what it wrote.
    pub(super) fn close(&mut self, raw: RawId, at: usize) {
        let Some(connection) = self.get_mut(raw) else { return };
        let side = connection.side(at);
        (connection.held[side], connection.gone[side]) = (false, true);
        connection.ways[1 - side].clear();
        if !connection.gone[1 - side] && !connection.dead {
            connection.ways[side].push_back(Item::Closed);
        }
        self.forget_if_over(raw);
    }

    /// The next thing that arrives on the `nth` connection that has anything; `None` if nothing does, or nobody is
    /// there.
    pub(super) fn carry(&mut self, from: usize, to: usize, nth: usize) -> Option<(RawId, Option<Item>)> {
        let count = self.ready(from, to);
        let raw = self.carryable(from, to).nth(nth % count.max(1))?;
        let connection = self.get_mut(raw)?;
        let side = connection.side(from);
        let item = connection.ways[side].pop_front()?;
        let there = match item {
            Item::Opened => {
                connection.held[1 - side] = !connection.gone[1 - side];
                connection.held[1 - side]
            }
            Item::Packet(_) => connection.held[1 - side],
            Item::Closed => {
                connection.gone[1 - side] = true;
                if connection.gone[side] {
                    connection.ways[1 - side].clear();
                }
                std::mem::take(&mut connection.held[1 - side])
            }
        };
        self.forget_if_over(raw);
        Some((raw, there.then_some(item)))
    }

    fn nth(&self, at: usize, of: usize, nth: usize) -> Option<RawId> {
        let held = |(_, connection): &(RawId, &Connection)| connection.held[connection.side(at)];
        let count = self.held_by(at, of);
        self.between(at, of).filter(held).nth(nth % count.max(1)).map(|(raw, _)| raw)
    }

    /// The `nth` connection that `at` has with `of` breaks. `at` is told now if `seen`; of what it sent the first
    /// `keep` still arrive and then the other end is told, or nothing does (`None`): the other end is never told.
    pub(super) fn break_nth(
        &mut self,
        at: usize,
        of: usize,
        nth: usize,
        seen: bool,
        keep: Option<usize>,
    ) -> Option<RawId> {
        let raw = self.nth(at, of, nth)?;
        self.broken += 1;
        self.break_one(raw, at, seen, keep);
        Some(raw)
    }

    fn break_one(&mut self, raw: RawId, at: usize, seen: bool, keep: Option<usize>) {
        let Some(connection) = self.get_mut(raw) else { return };
        let side = connection.side(at);
        let before: usize = connection.ways.iter().map(VecDeque::len).sum();
        connection.ways[1 - side].clear();
        connection.ways[side].truncate(keep.unwrap_or(0));
        let after: usize = connection.ways.iter().map(VecDeque::len).sum();
        match keep {
            Some(_) if connection.gone[1 - side] => {}
            Some(_) => connection.ways[side].push_back(Item::Closed),
            None => connection.dead = true,
        }
        if seen {
            (connection.held[side], connection.gone[side]) = (false, true);
        }
        // who was dialled and never heard of it will not
        if connection.dead && !connection.held[1 - side] {
            connection.gone[1 - side] = true;
        }
        self.lost += (before - after) as u64;
        self.forget_if_over(raw);
    }

    /// The next packet from one to the other is lost, or will arrive twice; what follows it arrives.
    pub(super) fn drop_or_repeat(&mut self, from: usize, to: usize, nth: usize, lost: bool) {
        let count = self.ready(from, to);
        let Some(raw) = self.carryable(from, to).nth(nth % count.max(1)) else { return };
        let Some(connection) = self.get_mut(raw) else { return };
        let side = connection.side(from);
        connection.inexact = true;
        let way = &mut connection.ways[side];
        let Some(Item::Packet(packet)) = way.front().cloned() else { return };
        match lost {
            true => way.pop_front().map_or((), drop),
            false => way.push_front(Item::Packet(packet)),
        }
        self.lost += u64::from(lost);
    }

    pub(super) fn hold(&mut self, from: usize, to: usize, held: bool) {
        match held {
            true => self.held.insert((from, to)),
            false => self.held.remove(&(from, to)),
        };
    }

    pub(super) fn cut(&mut self, a: usize, b: usize, cut: bool) {
        match cut {
            true => self.cut.insert(pair(a, b)),
            false => self.cut.remove(&pair(a, b)),
        };
    }

    /// Nobody is at this place any more. What it wrote still arrives, and then the others are told; or, if it
    /// vanished, they are not.
    pub(super) fn leave(&mut self, place: usize, vanished: bool) {
        let here = |(raw, connection): (&((usize, usize), u64), &Connection)| {
            let side = connection.side(place);
            let here = connection.ends.contains(&place) && !connection.gone[side];
            here.then_some(raw_id(raw.1, raw.0))
        };
        for raw in self.connections.iter().filter_map(here).collect::<Vec<_>>() {
            let keep = (!vanished).then_some(usize::MAX);
            self.break_one(raw, place, true, keep);
        }
    }

    /// The network is whole again: nothing stands, and who holds a connection that is dead is told so.
    pub(super) fn heal(&mut self) {
        self.held.clear();
        self.cut.clear();
        for connection in self.connections.values_mut() {
            let dead = std::mem::take(&mut connection.dead);
            for side in 0..2 {
                if connection.held[side] && (dead || connection.gone[1 - side]) {
                    connection.ways[1 - side] = VecDeque::from([Item::Closed]);
                } else if dead {
                    connection.gone[side] = true;
                }
            }
        }
        self.connections.retain(|_, connection| connection.gone != [true; 2]);
    }
}
