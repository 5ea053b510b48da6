//! The machine alone: two and three ends in virtual time, joined by connections that break anywhere.

use super::*;
use crate::transport::Lane;
use bytes::Bytes;

const MS: Duration = Duration::from_millis(1);

fn peer(name: &str, incarnation: u64) -> Peer {
    Peer::new(NodeId::new(name).unwrap(), Incarnation::new(incarnation).unwrap())
}

fn terms() -> Terms {
    Terms { scope: "s".into(), vnodes: 128, protocol: 1 }
}

fn splitmix(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// One direction of a connection.
#[derive(Default)]
struct Way {
    packets: VecDeque<Packet>,
    /// The sender has closed; comes after the packets.
    closed: bool,
    /// Nothing arrives any more, and nobody is told.
    dead: bool,
}

struct Connection {
    ends: [usize; 2],
    ways: [Way; 2],
    /// Which ends still hold it.
    held: [bool; 2],
}

/// What an end's router was told, in order.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Told {
    Up(Peer),
    Suspect,
    Resumed,
    Down(Peer),
    Frame(Lane, u64),
}

struct World {
    now: Time,
    ends: Vec<Links>,
    told: Vec<Vec<Told>>,
    refused: Vec<Vec<Refusal>>,
    superseded: Vec<Option<Incarnation>>,
    connections: BTreeMap<u64, Connection>,
    last: u64,
    /// A counter for each end: for every report that an end makes, when it made it.
    clock: u64,
    reports: Vec<Vec<(u64, Told)>>,
}

impl World {
    fn new(peers: &[Peer]) -> Self {
        Self::with(peers, &LinkConfig::default())
    }

    fn with(peers: &[Peer], config: &LinkConfig) -> Self {
        let ends: Vec<Links> =
            peers.iter().map(|peer| Links::new(peer.clone(), terms(), config.clone())).collect();
        let n = ends.len();
        Self {
            now: Time::ZERO,
            ends,
            told: vec![Vec::new(); n],
            refused: vec![Vec::new(); n],
            superseded: vec![None; n],
            connections: BTreeMap::new(),
            last: 0,
            clock: 0,
            reports: vec![Vec::new(); n],
        }
    }

    fn open(&mut self, a: usize, b: usize) -> u64 {
        self.last += 1;
        let raw = self.last;
        let ways = Default::default();
        self.connections.insert(raw, Connection { ends: [a, b], ways, held: [true, true] });
        for end in [a, b] {
            self.ends[end].handle_opened(RawId(raw), self.now);
            self.after(end);
        }
        raw
    }

    /// Effects first, then packets, as the driver has to.
    fn after(&mut self, end: usize) {
        self.ends[end].check();
        while let Some(effect) = self.ends[end].poll_effect() {
            if let Effect::Down(peer, _) = &effect {
                // also if the next session of the same peer exists already
                let sent = self.ends[end].try_send(peer, Frame::new(Lane::Data, "late", ""), self.now);
                assert!(matches!(sent, Err(SendError::NoLink(_))), "{sent:?} while {peer} is reported down");
            }
            let told = match effect {
                Effect::Up(peer) => Told::Up(peer),
                Effect::Suspect(_) => Told::Suspect,
                Effect::Resumed(_) => Told::Resumed,
                Effect::Down(peer, _) => Told::Down(peer),
                Effect::Frame(_, frame) => {
                    Told::Frame(frame.lane, u64::from_le_bytes(frame.body[..8].try_into().unwrap()))
                }
                Effect::Refused { refusal, .. } => {
                    self.refused[end].push(refusal);
                    continue;
                }
                Effect::Superseded { live } => {
                    self.superseded[end] = Some(live);
                    continue;
                }
                Effect::Room(_) | Effect::Reborn => continue,
            };
            self.clock += 1;
            self.reports[end].push((self.clock, told.clone()));
            self.told[end].push(told);
        }
        while let Some(raw) = self.ends[end].poll_dirty() {
            loop {
                let output = self.ends[end].poll_output(raw, true);
                let Some(connection) = self.connections.get_mut(&raw.0) else { break };
                let side = usize::from(connection.ends[0] != end);
                match output {
                    Output::Packet(packet) => connection.ways[side].packets.push_back(packet),
                    Output::Close => {
                        connection.ways[side].closed = true;
                        connection.held[side] = false;
                        break;
                    }
                    Output::Idle => break,
                }
            }
        }
        self.ends[end].check();
    }

    /// Moves one thing from one side to the other; whether there was any.
    fn carry(&mut self, raw: u64, from: usize) -> bool {
        let Some(connection) = self.connections.get_mut(&raw) else { return false };
        let (way, to) = (&mut connection.ways[from], connection.ends[1 - from]);
        if let Some(packet) = way.packets.pop_front() {
            if way.dead || !connection.held[1 - from] {
                return true;
            }
            self.ends[to].handle_packet(RawId(raw), packet, self.now);
        } else if way.closed && connection.held[1 - from] && !way.dead {
            connection.held[1 - from] = false;
            self.ends[to].handle_closed(RawId(raw), self.now);
        } else {
            return false;
        }
        self.after(to);
        true
    }

    /// Breaks a connection: `seen` by which sides; what is on its way is lost.
    fn cut(&mut self, raw: u64, seen: [bool; 2]) {
        for (side, seen) in seen.into_iter().enumerate() {
            let Some(connection) = self.connections.get_mut(&raw) else { return };
            connection.ways[side].packets.clear();
            connection.ways[side].dead = true;
            if seen && std::mem::replace(&mut connection.held[side], false) {
                let end = connection.ends[side];
                self.ends[end].handle_closed(RawId(raw), self.now);
                self.after(end);
            }
        }
    }

    /// Carries until nothing moves.
    fn settle(&mut self) {
        let mut moved = true;
        while moved {
            moved = false;
            for raw in self.connections.keys().copied().collect::<Vec<_>>() {
                moved |= self.carry(raw, 0) | self.carry(raw, 1);
            }
        }
    }

    fn timeouts(&mut self) {
        for end in 0..self.ends.len() {
            if self.ends[end].poll_timeout().is_some_and(|at| at <= self.now) {
                self.ends[end].handle_timeout(self.now);
                self.after(end);
            }
        }
    }

    /// Lets time pass, with all packets carried at each moment.
    fn pass(&mut self, time: Duration) {
        let until = self.now + time;
        loop {
            self.settle();
            let next = self.ends.iter().filter_map(Links::poll_timeout).min();
            match next.filter(|at| *at <= until) {
                Some(at) => self.now = self.now.max(at),
                None => break,
            }
            self.timeouts();
        }
        self.now = until;
    }

    fn send(&mut self, from: usize, to: usize, lane: Lane, value: u64) -> bool {
        let peer = self.ends[to].me().clone();
        let frame = Frame::new(lane, "head", value.to_le_bytes().to_vec());
        let sent = self.ends[from].try_send(&peer, frame, self.now).is_ok();
        self.after(from);
        sent
    }

    fn frames(&self, end: usize) -> Vec<u64> {
        self.told[end]
            .iter()
            .filter_map(|told| if let Told::Frame(_, value) = told { Some(*value) } else { None })
            .collect()
    }
}

#[test]
fn up_at_both_ends_then_frames() {
    let mut w = World::new(&[peer("a", 1), peer("b", 2)]);
    w.open(0, 1);
    w.settle();
    for value in 0..10 {
        assert!(w.send(0, 1, Lane::Data, value) && w.send(1, 0, Lane::Bulk, value));
    }
    w.settle();
    assert_eq!(w.told[0][0], Told::Up(peer("b", 2)));
    assert_eq!(w.told[1][0], Told::Up(peer("a", 1)));
    assert_eq!((w.frames(0), w.frames(1)), ((0..10).collect(), (0..10).collect()));
    assert_eq!(w.ends[0].queued(&peer("b", 2)), 0, "acknowledged");
}

#[test]
fn nobody_writes_before_both_have_returned_from_peer_up() {
    let mut w = World::new(&[peer("a", 1), peer("b", 2)]);
    let raw = w.open(0, 1);
    // whoever is up first queues at once; step by step nothing may reach an end that is not up
    for _ in 0..50 {
        for side in [0, 1] {
            w.send(side, 1 - side, Lane::Control, 1);
            let written =
                w.connections[&raw].ways.iter().flat_map(|way| &way.packets).any(|p| p.lane().is_some());
            assert!(!written || w.told.iter().all(|told| !told.is_empty()), "written before both were told");
            w.carry(raw, side);
        }
    }
    for told in &w.told {
        assert!(matches!(told[0], Told::Up(_)), "{told:?}");
        assert!(told.iter().any(|told| matches!(told, Told::Frame(..))));
    }
    // and in the order of the whole: no frame anywhere before the later of the two
    let up = |end: usize| w.reports[end].iter().find(|(_, t)| matches!(t, Told::Up(_))).unwrap().0;
    let frame = |end: usize| w.reports[end].iter().find(|(_, t)| matches!(t, Told::Frame(..))).unwrap().0;
    assert!(up(0).max(up(1)) < frame(0).min(frame(1)));
}

/// The leader has given the follower up, and the follower finds out by the next connection: it replaces the session
/// in one step. Until the new one is reported, who sends means the old one.
#[test]
fn a_session_takes_frames_only_from_its_report_on() {
    let mut w = World::new(&[peer("a", 1), peer("b", 2)]);
    let old = w.open(0, 1);
    w.settle();
    w.cut(old, [true, false]);
    w.pass(2100 * MS);
    assert_eq!(w.told[0].last(), Some(&Told::Down(peer("b", 2))));
    let new = w.open(0, 1);
    // Hello and Hello, Ask, Propose: the next word is the one that counts
    while !w.ends[0].raws[&RawId(new)].out.is_empty() || w.carry(new, 0) | w.carry(new, 1) {
        if matches!(w.ends[0].raws[&RawId(new)].phase, Phase::Offered { .. }) {
            break;
        }
    }
    let fresh = w.connections.get_mut(&new).unwrap().ways[0].packets.pop_front().unwrap();
    let b = &mut w.ends[1];
    b.handle_packet(RawId(new), fresh, w.now);
    let send = |b: &mut Links, value: &'static str| {
        b.try_send(&peer("a", 1), Frame::new(Lane::Data, "head", value), Time::ZERO)
    };
    assert!(b.is_up(&peer("a", 1)), "the next session is there");
    assert!(send(b, "decided").is_err());
    let first = b.take_effects();
    assert!(matches!(first.back(), Some(Effect::Down(..))), "{first:?}");
    assert!(send(b, "being reported down").is_err());
    let second = b.take_effects();
    assert_eq!(second, [Effect::Up(peer("a", 1))]);
    assert!(send(b, "being reported up").is_ok());
    assert_eq!(b.queued(&peer("a", 1)), 1, "the only one");
}

/// Each connection that waited let the next one in from inside its own end: the stack of a thread held a few thousand.
#[test]
fn many_connections_of_one_name_cost_one_that_waits() {
    let mut w = World::new(&[peer("a", 1), peer("b", 2)]);
    let first = w.open(0, 1);
    w.settle();
    w.ends[1].disconnect(&peer("a", 1), w.now);
    // b is silent from here on; who comes says hello as b and nothing else
    let mut stranger = Links::new(peer("b", 2), terms(), LinkConfig::default());
    stranger.settle();
    stranger.handle_opened(RawId(1), w.now);
    let Output::Packet(hello) = stranger.poll_output(RawId(1), true) else { panic!("a hello") };
    let a = &mut w.ends[0];
    let many = 20_000;
    for raw in 1000..1000 + many {
        a.handle_opened(RawId(raw), w.now);
        a.handle_packet(RawId(raw), hello.clone(), w.now);
        if raw < 1010 {
            a.check();
        }
    }
    let waits = |a: &Links| a.raws.values().filter(|raw| matches!(raw.phase, Phase::Probing { .. })).count();
    assert_eq!(waits(a), 1);
    let pings = a.raws[&RawId(first)].out.len();
    assert_eq!(pings, 1, "all of them wait for one answer");
    a.handle_timeout(w.now + LinkConfig::default().suspect_after);
    a.check();
    assert_eq!(waits(a), 0);
    assert_eq!(a.raws[&RawId(999 + many)].phase, Phase::Asked, "nobody has answered: the last one is let in");
    assert!(a.is_closing(RawId(first)) && a.is_closing(RawId(1000)));
}

#[test]
fn one_who_pings_and_reads_nothing_is_owed_one_answer() {
    let mut w = World::new(&[peer("a", 1), peer("b", 2)]);
    let raw = w.open(0, 1);
    w.settle();
    let ping = |token| packet::encode_word(&Word::Ping { token, sent: [0; 3] });
    for token in 1..1000 {
        w.ends[0].handle_packet(RawId(raw), ping(token), w.now);
    }
    let mut pongs = 0;
    while let Output::Packet(_) = w.ends[0].poll_output(RawId(raw), true) {
        pongs += 1;
    }
    assert_eq!(pongs, 1);
}

#[test]
fn a_frame_that_comes_twice_is_given_once() {
    let mut w = World::new(&[peer("a", 1), peer("b", 2)]);
    let raw = w.open(0, 1);
    w.settle();
    for value in 0..5 {
        w.send(0, 1, Lane::Data, value);
        let way = &mut w.connections.get_mut(&raw).unwrap().ways[0].packets;
        let again: Vec<Packet> = way.iter().cloned().collect();
        way.extend(again);
    }
    w.settle();
    assert_eq!(w.frames(1), [0, 1, 2, 3, 4]);
    assert!(w.ends[1].stats().duplicates >= 5);
    assert_eq!(w.ends[0].queued(&peer("b", 2)), 0);
}

#[test]
fn hazard_14_a_short_break_loses_nothing() {
    let mut w = World::new(&[peer("a", 1), peer("b", 2)]);
    let raw = w.open(0, 1);
    w.settle();
    for value in 0..100 {
        w.send(0, 1, Lane::Data, value);
    }
    for _ in 0..40 {
        w.carry(raw, 0);
    }
    w.cut(raw, [true, true]);
    w.send(0, 1, Lane::Data, 100);
    w.pass(1900 * MS);
    w.open(0, 1);
    w.settle();
    assert_eq!(w.frames(1), (0..=100).collect::<Vec<_>>());
    assert!(w.told[1].contains(&Told::Suspect) && w.told[1].last() != Some(&Told::Suspect));
    assert!(!w.told.iter().flatten().any(|told| matches!(told, Told::Down(_))));
    assert_eq!(w.told[0].iter().filter(|t| matches!(t, Told::Resumed)).count(), 1);
}

/// Each new connection began the wait anew: a frame that no connection lived long enough to carry was under way for
/// ever, beyond every tombstone.
#[test]
fn connections_that_break_before_a_frame_arrives_do_not_hold_it_for_ever() {
    let mut w = World::new(&[peer("a", 1), peer("b", 2)]);
    let mut raw = w.open(0, 1);
    w.settle();
    let began = w.now;
    assert!(w.send(0, 1, Lane::Data, 1));
    while !w.told[0].iter().any(|told| matches!(told, Told::Down(_))) {
        assert!(w.now - began < Duration::from_secs(15), "no tombstone lives longer");
        w.cut(raw, [true, true]);
        w.pass(1900 * MS);
        if w.told[0].iter().any(|told| matches!(told, Told::Down(_))) {
            break;
        }
        raw = w.open(0, 1);
        // the connection is agreed on and breaks before the frame has arrived
        while !w.ends[0].raws.get(&RawId(raw)).is_some_and(|state| state.phase == Phase::Live)
            || !w.ends[1].raws.get(&RawId(raw)).is_some_and(|state| state.phase == Phase::Live)
        {
            assert!(w.carry(raw, 0) | w.carry(raw, 1));
        }
        let way = &mut w.connections.get_mut(&raw).unwrap().ways[0].packets;
        way.retain(|packet| packet.lane().is_none());
        // and before any timer has its turn
    }
    assert_eq!(w.ends[0].stats().stalled, 1);
    w.pass(200 * MS);
    assert!(w.frames(1).is_empty());
    assert!(matches!(w.told[1].last(), Some(Told::Down(_))), "both ends: {:?}", w.told[1]);
}

/// A break may last longer than a link that stalls, where more is allowed: what waited for it has not stalled.
#[test]
fn hazard_14_a_break_within_the_grace_loses_nothing_also_if_it_is_longer_than_a_stall() {
    let config = LinkConfig { reconnect_grace: Duration::from_secs(30), ..LinkConfig::default() };
    let mut w = World::with(&[peer("a", 1), peer("b", 2)], &config);
    let raw = w.open(0, 1);
    w.settle();
    w.send(0, 1, Lane::Data, 1);
    w.cut(raw, [true, true]);
    w.send(0, 1, Lane::Data, 2);
    w.pass(Duration::from_secs(12));
    let raw = w.open(0, 1);
    while !w.ends[0].raws.get(&RawId(raw)).is_some_and(|state| state.phase == Phase::Live) {
        assert!(w.carry(raw, 0) | w.carry(raw, 1));
    }
    // a timer has its turn before anything is written
    w.timeouts();
    w.settle();
    assert_eq!(w.frames(1), [1, 2]);
    assert!(!w.told.iter().flatten().any(|told| matches!(told, Told::Down(_))), "{:?}", w.told);
}

#[test]
fn hazard_14_a_long_break_is_down_at_both_ends_and_seen_by_one_first() {
    for seen in [[true, true], [true, false], [false, true]] {
        let mut w = World::new(&[peer("a", 1), peer("b", 2)]);
        let raw = w.open(0, 1);
        w.settle();
        w.send(0, 1, Lane::Data, 1);
        w.cut(raw, seen);
        w.pass(Duration::from_secs(4));
        for (told, other) in w.told.iter().zip([peer("b", 2), peer("a", 1)]) {
            assert_eq!(told.last(), Some(&Told::Down(other)), "{seen:?}");
        }
        w.open(0, 1);
        w.settle();
        assert!(w.send(0, 1, Lane::Data, 2));
        w.settle();
        assert_eq!(w.frames(1), [2], "a frame of the closed session must not come");
    }
}

#[test]
fn symmetric_down_when_only_one_end_gave_up() {
    for who in [0, 1] {
        let mut w = World::new(&[peer("a", 1), peer("b", 2)]);
        let raw = w.open(0, 1);
        w.settle();
        w.cut(raw, [who == 0, who == 1]);
        // that end gives up before the other has noticed anything
        w.pass(2100 * MS);
        assert!(matches!(w.told[who].last(), Some(Told::Down(_))));
        let other = 1 - who;
        assert!(!w.told[other].iter().any(|t| matches!(t, Told::Down(_))));
        w.open(0, 1);
        // the leader asks the dead connection first
        w.pass(600 * MS);
        let order = |end: usize, down: bool| {
            let which = |t: &Told| if down { matches!(t, Told::Down(_)) } else { matches!(t, Told::Up(_)) };
            w.reports[end].iter().filter(|(_, t)| which(t)).map(|(at, _)| *at).next_back().unwrap()
        };
        let last_down = order(0, true).max(order(1, true));
        assert!(last_down < order(0, false).min(order(1, false)), "{:?}", w.reports);
    }
}

#[test]
fn suspect_without_progress_and_a_moving_queue_is_not() {
    let mut w = World::new(&[peer("a", 1), peer("b", 2)]);
    let raw = w.open(0, 1);
    w.settle();
    w.send(0, 1, Lane::Data, 1);
    w.now += 499 * MS;
    w.timeouts();
    assert!(!w.told[0].contains(&Told::Suspect));
    w.now += MS;
    w.timeouts();
    assert_eq!(w.told[0].last(), Some(&Told::Suspect));
    w.settle();
    assert_eq!(w.told[0].last(), Some(&Told::Resumed));
    for value in 2..50 {
        w.send(0, 1, Lane::Data, value);
    }
    for _ in 0..40 {
        w.now += 400 * MS;
        w.carry(raw, 0);
        w.carry(raw, 1);
        w.timeouts();
    }
    assert_eq!(w.told[0].iter().filter(|t| **t == Told::Suspect).count(), 1, "the queue moves");
}

#[test]
fn hazard_20_a_peer_that_talks_but_drains_nothing_is_disconnected() {
    let mut w = World::new(&[peer("a", 1), peer("b", 2)]);
    let raw = w.open(0, 1);
    w.settle();
    w.send(0, 1, Lane::Data, 1);
    // the frame stays in the way, the other end's words still come
    let frame = w.connections.get_mut(&raw).unwrap().ways[0].packets.pop_front().unwrap();
    assert_eq!(frame.lane(), Some(Lane::Data));
    let pong = |w: &mut World| {
        let alive = packet::encode_word(&Word::Pong { token: 0 });
        w.ends[0].handle_packet(RawId(raw), alive, w.now);
        w.after(0);
    };
    for _ in 0..99 {
        w.now += 100 * MS;
        pong(&mut w);
        w.timeouts();
    }
    assert!(w.ends[0].is_up(&peer("b", 2)));
    w.now += 100 * MS;
    pong(&mut w);
    w.timeouts();
    assert!(!w.ends[0].is_up(&peer("b", 2)));
    assert_eq!(w.ends[0].stats().stalled, 1);
}

#[test]
fn mem_16_a_clock_that_goes_back_changes_nothing() {
    let mut w = World::new(&[peer("a", 1), peer("b", 2)]);
    w.open(0, 1);
    w.settle();
    w.pass(Duration::from_secs(100));
    let before = w.told.clone();
    w.ends[0].handle_timeout(Duration::ZERO);
    w.ends[1].handle_timeout(Duration::from_secs(5));
    w.after(0);
    w.after(1);
    w.pass(Duration::from_secs(30));
    assert_eq!(w.told, before, "nobody is suspect or down");
}

#[test]
fn different_terms_are_refused_and_both_values_named() {
    let other = |terms: Terms| {
        let mut w = World::new(&[peer("a", 1), peer("b", 2)]);
        w.ends[1] = Links::new(peer("b", 2), terms, LinkConfig::default());
        w.open(0, 1);
        w.settle();
        assert!(w.told.iter().all(Vec::is_empty));
        assert!(w.connections.values().all(|c| c.held == [false, false]), "closed at both ends");
        w.refused[0].clone()
    };
    let vnodes = other(Terms { vnodes: 64, ..terms() });
    assert_eq!(vnodes[0], Refusal::Vnodes { theirs: 64, ours: 128 });
    let scope = other(Terms { scope: "t".into(), ..terms() });
    assert_eq!(scope[0], Refusal::Scope { theirs: "t".into(), ours: "s".into() });
    let protocol = other(Terms { protocol: 2, ..terms() });
    assert_eq!(protocol[0], Refusal::Protocol { theirs: 2, ours: 1 });
    assert!(protocol[0].to_string().contains('2') && protocol[0].to_string().contains('1'));
}

/// Such a link was made, and whatever was longer than the other end takes was accepted and gone.
#[test]
fn different_limits_of_a_frame_are_refused_and_both_named() {
    for (ours, theirs) in [(1000, 2000), (2000, 1000)] {
        let limit = |max_frame| LinkConfig { max_frame, ..LinkConfig::default() };
        let mut w = World::new(&[peer("a", 1), peer("b", 2)]);
        w.ends[0] = Links::new(peer("a", 1), terms(), limit(ours));
        w.ends[1] = Links::new(peer("b", 2), terms(), limit(theirs));
        w.open(0, 1);
        w.settle();
        assert!(w.told.iter().all(Vec::is_empty));
        assert!(w.connections.values().all(|c| c.held == [false, false]), "closed at both ends");
        let [a, b] = [&w.refused[0][0], &w.refused[1][0]];
        for text in [a.to_string(), b.to_string()] {
            assert!(text.contains("1000") && text.contains("2000") && text.contains("max_frame"), "{text}");
        }
    }
}

/// Nobody saw why a link broke again and again.
#[test]
fn strange_input_is_logged_once_for_each_peer_and_cause() {
    #[derive(Clone, Default)]
    struct Text(std::sync::Arc<parking_lot::Mutex<Vec<u8>>>);
    impl std::io::Write for Text {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().extend_from_slice(bytes);
            Ok(bytes.len())
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    let text = Text::default();
    let writer = text.clone();
    let log = tracing_subscriber::fmt().with_ansi(false).with_writer(move || writer.clone()).finish();
    tracing::subscriber::with_default(log, || {
        let mut w = World::new(&[peer("a", 1), peer("b", 2)]);
        let head = |bytes: &'static [u8]| Packet { head: bytes.into(), body: Bytes::new() };
        let never_sent = packet::encode_word(&Word::Ack { received: [0, 9, 0] });
        for strange in [head(&[200]), head(&[201]), head(&[7]), head(&[]), never_sent.clone(), never_sent] {
            if w.ends[0].connection(&peer("b", 2).node).is_none() {
                w.open(0, 1);
                w.pass(600 * MS);
            }
            let raw = w.ends[0].connection(&peer("b", 2).node).unwrap();
            w.ends[0].handle_packet(raw, strange, w.now);
            w.after(0);
            w.settle();
        }
        assert_eq!((w.ends[0].stats().unknown, w.ends[0].stats().malformed), (2, 2));
    });
    let text = String::from_utf8(text.0.lock().clone()).unwrap();
    let warned =
        |part: &str| text.lines().filter(|line| line.contains("WARN") && line.contains(part)).count();
    assert_eq!((warned("unknown"), warned("malformed"), warned("never sent")), (1, 1, 1), "{text}");
}

/// A node dials and is dialled while it starts: the second connection is refused as the first one lives. If the other
/// end leaves meanwhile, the answer comes when there is no link any more: the node took itself for another.
#[test]
fn nobody_is_expelled_by_its_own_second_connection() {
    let mut w = World::new(&[peer("a", 5), peer("b", 7)]);
    w.ends[0].settle();
    let [first, second] = [w.open(0, 1), w.open(1, 0)];
    while w.carry(first, 0) | w.carry(first, 1) {}
    assert!(w.ends[0].is_linked(&peer("b", 7).node));
    // b's hello, written when nobody had been told of it, and a's; then the ping and the pong
    assert!(w.carry(second, 1) && w.carry(second, 0));
    while w.carry(first, 0) | w.carry(first, 1) {}
    assert_eq!(w.refused, [[], []], "two that dial each other are nothing to be told of");
    w.ends[0].shutdown(w.now);
    w.after(0);
    while w.carry(first, 0) | w.carry(first, 1) {}
    assert_eq!(w.told[1], [Told::Up(peer("a", 5)), Told::Down(peer("a", 5))]);
    w.settle();
    assert_eq!(w.superseded, [None, None]);
    assert_eq!(w.refused, [[], []]);
}

#[test]
fn hazard_10_reborn_before_the_old_life_is_missed() {
    // as leader and as follower
    for (name, reborn) in [("b", "a"), ("b", "c")] {
        let mut w = World::new(&[peer(name, 1), peer(reborn, 5), peer(reborn, 6)]);
        let old = w.open(0, 1);
        w.settle();
        w.send(1, 0, Lane::Data, 1);
        // the old life is gone and nobody has noticed; one frame of it is still on its way
        w.connections.get_mut(&old).unwrap().ways[0].dead = true;
        w.open(0, 2);
        for _ in 0..20 {
            for raw in w.connections.keys().copied().filter(|raw| *raw != old).collect::<Vec<_>>() {
                w.carry(raw, 0);
                w.carry(raw, 1);
            }
        }
        w.carry(old, 1);
        w.send(2, 0, Lane::Data, 2);
        w.settle();
        assert_eq!(
            w.told[0],
            [
                Told::Up(peer(reborn, 5)),
                Told::Down(peer(reborn, 5)),
                Told::Up(peer(reborn, 6)),
                Told::Frame(Lane::Data, 2)
            ]
        );
    }
}

#[test]
fn hazard_10_reborn_with_a_clock_that_went_back() {
    for reborn in ["a", "c"] {
        // while the old life's connection is still open but dead; and when it is known to be gone
        for dead in [true, false] {
            let mut w = World::new(&[peer("b", 1), peer(reborn, 5), peer(reborn, 3)]);
            let old = w.open(0, 1);
            w.settle();
            w.cut(old, [!dead, false]);
            w.open(0, 2);
            w.pass(600 * MS);
            assert_eq!(w.ends[2].me().incarnation.get(), 6, "told that it was known as 5");
            w.open(0, 2);
            w.pass(10 * MS);
            let ups: Vec<&Told> =
                w.told[0].iter().filter(|t| matches!(t, Told::Up(_) | Told::Down(_))).collect();
            assert_eq!(
                ups,
                [&Told::Up(peer(reborn, 5)), &Told::Down(peer(reborn, 5)), &Told::Up(peer(reborn, 6))],
                "{dead}"
            );
        }
    }
}

#[test]
fn hazard_10_a_lower_life_that_others_know_already_is_accepted_as_it_is() {
    let mut w = World::new(&[peer("b", 1), peer("c", 5), peer("c", 3)]);
    let old = w.open(0, 1);
    w.settle();
    w.cut(old, [false, true]);
    w.ends[2].settle();
    w.open(0, 2);
    w.pass(600 * MS);
    assert_eq!(w.told[0][1..], [Told::Suspect, Told::Down(peer("c", 5)), Told::Up(peer("c", 3))]);
}

#[test]
fn hazard_11_two_live_nodes_of_one_name() {
    for twin in ["a", "c"] {
        for (incarnation, settled) in [(4, true), (4, false), (5, false)] {
            let mut w = World::new(&[peer("b", 1), peer(twin, 5), peer(twin, incarnation)]);
            if settled {
                w.ends[2].settle();
            }
            w.open(0, 1);
            w.settle();
            w.open(0, 2);
            w.settle();
            assert_eq!(w.told[0], [Told::Up(peer(twin, 5))], "the live one stays");
            assert_eq!(w.superseded[2], Incarnation::new(5), "the newcomer is told by whom");
            assert!(w.ends[1].is_up(&peer("b", 1)));
        }
    }
    // and when they meet each other
    let mut w = World::new(&[peer("a", 4), peer("a", 5)]);
    w.open(0, 1);
    w.settle();
    assert_eq!(w.superseded, [Incarnation::new(5), None]);
}

#[test]
fn bc_23_a_half_open_connection_does_not_block_the_next() {
    for who in [0, 1] {
        let mut w = World::new(&[peer("a", 1), peer("b", 2)]);
        let old = w.open(0, 1);
        w.settle();
        w.cut(old, [who == 0, who == 1]);
        w.open(0, 1);
        w.pass(600 * MS);
        assert!(w.send(0, 1, Lane::Data, 1) && w.send(1, 0, Lane::Data, 2));
        w.settle();
        assert_eq!((w.frames(0), w.frames(1)), (vec![2], vec![1]));
        assert!(!w.told.iter().flatten().any(|t| matches!(t, Told::Down(_))), "the same session");
    }
}

#[test]
fn two_connections_at_once_give_one_link() {
    for seed in 0..200 {
        let mut chance = seed;
        let mut w = World::new(&[peer("a", 1), peer("b", 2)]);
        let raws = [w.open(0, 1), w.open(1, 0)];
        for _ in 0..100 {
            let pick = splitmix(&mut chance);
            w.carry(raws[(pick & 1) as usize], (pick >> 1 & 1) as usize);
        }
        w.pass(600 * MS);
        assert!(w.send(0, 1, Lane::Data, 1));
        w.settle();
        assert_eq!(w.told[0], [Told::Up(peer("b", 2))], "seed {seed}");
        assert_eq!(w.told[1], [Told::Up(peer("a", 1)), Told::Frame(Lane::Data, 1)], "seed {seed}");
        let held = w.connections.values().filter(|c| c.held == [true, true]).count();
        assert_eq!(held, 1, "the other is closed");
        // and one that comes when the link is there, of a life of which nobody has been told yet
        w.open(0, 1);
        w.pass(600 * MS);
        assert_eq!(w.superseded, [None, None], "seed {seed}: nobody is driven out by itself");
        assert_eq!(w.connections.values().filter(|c| c.held == [true, true]).count(), 1);
        assert_eq!(w.told[0].len(), 1, "seed {seed}: {:?}", w.told[0]);
    }
}

#[test]
fn shutdown_writes_what_is_queued_and_says_goodbye() {
    let mut w = World::new(&[peer("a", 1), peer("b", 2)]);
    w.open(0, 1);
    w.settle();
    for value in 0..3 {
        let frame = Frame::new(Lane::Data, "", u64::to_le_bytes(value).to_vec());
        w.ends[0].try_send(&peer("b", 2), frame, w.now).unwrap();
    }
    let now = w.now;
    w.ends[0].shutdown(now);
    w.after(0);
    w.settle();
    assert_eq!(w.frames(1), [0, 1, 2]);
    assert_eq!(w.told[1].last(), Some(&Told::Down(peer("a", 1))));
    let late = Frame::new(Lane::Data, "", "");
    assert!(matches!(w.ends[0].try_send(&peer("b", 2), late, w.now), Err(SendError::NoLink(_))));
}

/// What is urgent passes a long frame that is being written.
#[test]
fn a_long_frame_holds_nothing_up() {
    let config = LinkConfig { piece_bytes: 100, ..LinkConfig::default() };
    let mut w = World::with(&[peer("a", 1), peer("b", 2)], &config);
    let raw = w.open(0, 1);
    w.settle();
    let to = peer("b", 2);
    let frame = |lane, value: u64, len: usize| {
        let mut body = value.to_le_bytes().to_vec();
        body.resize(len, 0);
        Frame::new(lane, "", body)
    };
    w.ends[0].try_send(&to, frame(Lane::Bulk, 1, 1000), w.now).unwrap();
    let mut lanes = Vec::new();
    for _ in 0..3 {
        let Output::Packet(packet) = w.ends[0].poll_output(RawId(raw), true) else { panic!("a piece") };
        assert!(packet.len() <= 100 + 10);
        lanes.extend(packet.lane());
        w.ends[1].handle_packet(RawId(raw), packet, w.now);
    }
    w.after(1);
    assert!(w.frames(1).is_empty(), "not whole yet");
    w.ends[0].try_send(&to, frame(Lane::Data, 2, 8), w.now).unwrap();
    w.ends[0].try_send(&to, frame(Lane::Control, 3, 8), w.now).unwrap();
    while let Output::Packet(packet) = w.ends[0].poll_output(RawId(raw), true) {
        lanes.extend(packet.lane());
        w.ends[1].handle_packet(RawId(raw), packet, w.now);
    }
    w.after(1);
    assert_eq!(lanes[..6], [Lane::Bulk, Lane::Bulk, Lane::Bulk, Lane::Control, Lane::Data, Lane::Bulk]);
    assert_eq!(lanes.len(), 12, "ten pieces of 100 bytes");
    assert_eq!(w.frames(1), [3, 2, 1]);
}

/// After a break only the pieces that did not arrive are written again.
#[test]
fn a_long_frame_goes_on_where_it_was_broken() {
    let config = LinkConfig { piece_bytes: 4, ..LinkConfig::default() };
    let mut w = World::with(&[peer("a", 1), peer("b", 2)], &config);
    let raw = w.open(0, 1);
    w.settle();
    assert!(w.send(0, 1, Lane::Bulk, 7), "twelve bytes with the head: three pieces");
    assert!(w.carry(raw, 0), "the first arrives");
    w.cut(raw, [true, true]);
    w.open(0, 1);
    w.settle();
    assert_eq!((w.frames(1), w.ends[1].stats().duplicates), (vec![7], 0));
}

#[test]
fn bc_17_a_packet_that_does_not_decode_costs_a_connection_and_nothing_else() {
    let mut w = World::new(&[peer("a", 1), peer("b", 2)]);
    let raw = w.open(0, 1);
    w.settle();
    // an unknown kind is left out, what follows counts
    let unknown = Packet { head: Bytes::from_static(&[77, 1, 2]), body: Bytes::new() };
    w.ends[1].handle_packet(RawId(raw), unknown, w.now);
    w.after(1);
    w.send(0, 1, Lane::Data, 1);
    w.settle();
    assert_eq!((w.frames(1), w.ends[1].stats().unknown), (vec![1], 1));
    let bad = Packet { head: Bytes::from_static(&[6, 0xff]), body: Bytes::new() };
    w.ends[1].handle_packet(RawId(raw), bad, w.now);
    w.after(1);
    w.settle();
    assert_eq!(w.ends[1].stats().malformed, 1);
    assert_eq!(w.connections[&raw].held, [false, false], "closed once");
    w.send(0, 1, Lane::Data, 2);
    w.open(0, 1);
    w.settle();
    assert_eq!(w.frames(1), [1, 2]);
}

/// Mutated and invented packets, at every phase: nobody panics, the invariants hold, and a new pair of
/// connections always works again.
#[test]
fn hazard_22_mutated_packets() {
    for seed in 0..300u64 {
        let mut chance = seed;
        let mut w = World::new(&[peer("a", 1), peer("b", 2)]);
        let mut raw = w.open(0, 1);
        for step in 0..300 {
            let pick = splitmix(&mut chance);
            let side = (pick & 1) as usize;
            if pick >> 1 & 7 == 0 {
                let connection = w.connections.get_mut(&raw).unwrap();
                let way = &mut connection.ways[side];
                let mut head = way.packets.front().map_or_else(Vec::new, |p| p.head.to_vec());
                match pick >> 4 & 3 {
                    0 => head.truncate((pick >> 6) as usize % (head.len() + 1)),
                    1 => head = (0..pick >> 6 & 31).map(|_| splitmix(&mut chance) as u8).collect(),
                    2 if !head.is_empty() => {
                        let at = (pick >> 6) as usize % head.len();
                        head[at] ^= 1 << (pick >> 20 & 7);
                    }
                    _ => {
                        head = (0..12).map(|_| splitmix(&mut chance) as u8 & 15).collect();
                    }
                }
                way.packets.push_front(Packet { head: head.into(), body: Bytes::from_static(&[0; 8]) });
            }
            w.send(side, 1 - side, Lane::ALL[(pick >> 30) as usize % 3], step);
            w.carry(raw, 1 - side);
            w.carry(raw, side);
            if w.connections[&raw].held == [false, false] {
                raw = w.open(0, 1);
            }
        }
        w.cut(raw, [true, true]);
        w.pass(Duration::from_secs(20));
        for end in [0, 1] {
            for other in w.ends[end].peers().cloned().collect::<Vec<_>>() {
                w.ends[end].disconnect(&other, w.now);
            }
            w.after(end);
        }
        // a forged hello may have made one remember names: only a later life gets past that
        let later = [peer("a", u64::MAX), peer("b", u64::MAX)];
        let fresh: Vec<Links> =
            later.iter().map(|p| Links::new(p.clone(), terms(), LinkConfig::default())).collect();
        w.ends.extend(fresh);
        w.told.resize(4, Vec::new());
        w.refused.resize(4, Vec::new());
        w.superseded.resize(4, None);
        w.reports.resize(4, Vec::new());
        w.open(0, 3);
        w.open(2, 1);
        w.pass(Duration::from_secs(1));
        assert!(w.ends[0].is_up(&later[1]) && w.ends[1].is_up(&later[0]), "seed {seed}");
    }
}

/// The contract under breaks at any point, seen by either end first or by none, with long and short pauses.
#[test]
fn random_breaks_keep_the_contract() {
    let seeds = std::env::var("LINK_SEEDS").ok().and_then(|n| n.parse().ok()).unwrap_or(600);
    let first = std::env::var("LINK_SEED").ok().and_then(|n| n.parse().ok()).unwrap_or(0u64);
    let mut totals = (0, 0, 0);
    for seed in first..first + seeds {
        let (frames, downs, resumed) = one_random_run(seed);
        totals = (totals.0 + frames, totals.1 + downs, totals.2 + resumed);
    }
    println!("frames, downs, resumed: {totals:?}");
    if seeds > 100 {
        assert!(
            totals.0 > 10_000 && totals.1 > 100 && totals.2 > 100,
            "the test has to meet all of it: {totals:?}"
        );
    }
}

fn one_random_run(seed: u64) -> (usize, usize, u64) {
    let mut chance = seed;
    // every other run cuts its frames of 12 bytes into four pieces
    let piece_bytes = if seed.is_multiple_of(2) { usize::MAX } else { 3 };
    let config = LinkConfig { piece_bytes, ..LinkConfig::default() };
    let mut w = World::with(&[peer("a", 1), peer("b", 2)], &config);
    let mut value = 0;
    // what each end sent in each of its own sessions, by lane
    let mut sent: [Vec<[Vec<u64>; 3]>; 2] = Default::default();
    for _ in 0..600 {
        let pick = splitmix(&mut chance);
        let side = (pick >> 8 & 1) as usize;
        let raws: Vec<u64> = w.connections.keys().copied().collect();
        let some = raws.get((pick >> 16) as usize % raws.len().max(1)).copied();
        match pick & 63 {
            0..=19 => {
                let lane = Lane::ALL[(pick >> 32) as usize % 3];
                value += 1;
                let session = w.told[side].iter().filter(|t| matches!(t, Told::Up(_))).count();
                if w.send(side, 1 - side, lane, value) {
                    sent[side].resize(session, Default::default());
                    sent[side][session - 1][lane.index()].push(value);
                }
            }
            20..=49 => {
                for _ in 0..(pick >> 40 & 7) {
                    for raw in raws.iter().rev().take(2) {
                        w.carry(*raw, side);
                    }
                }
            }
            50..=53 => {
                if let Some(raw) = some {
                    let seen = pick >> 50 & 3;
                    w.cut(raw, [seen & 1 == 1, seen & 2 == 2]);
                }
            }
            54..=57 => {
                w.open(side, 1 - side);
            }
            58..=61 => {
                w.now += Duration::from_millis(pick >> 20 & 255);
                w.timeouts();
            }
            62 => w.pass(Duration::from_millis(pick >> 20 & 1023)),
            _ => {
                w.now += Duration::from_millis(pick >> 20 & 4095);
                w.timeouts();
            }
        }
        w.connections.retain(|_, c| c.held != [false, false]);
    }
    // quiet: whatever is half open dies, one connection stays
    for raw in w.connections.keys().copied().collect::<Vec<_>>() {
        w.cut(raw, [true, true]);
    }
    w.open(0, 1);
    w.pass(Duration::from_secs(5));
    assert!(w.ends[0].is_linked(&w.ends[1].me().node.clone()), "seed {seed}");
    verify(&w, &sent, seed);
    let frames = w.frames(0).len() + w.frames(1).len();
    let downs = w.told.iter().flatten().filter(|t| matches!(t, Told::Down(_))).count();
    (frames, downs, w.ends[0].stats().resumed)
}

/// One session of an end: when it was up and down, and what came in it.
#[derive(Default)]
struct Life {
    up: u64,
    down: Option<u64>,
    frames: [Vec<u64>; 3],
}

fn lives(reports: &[(u64, Told)], seed: u64) -> Vec<Life> {
    let mut lives: Vec<Life> = Vec::new();
    let mut suspect = false;
    for (at, told) in reports {
        let open = lives.last().is_some_and(|life| life.down.is_none());
        match told {
            Told::Up(_) => {
                assert!(!open, "seed {seed}: up twice");
                suspect = false;
                lives.push(Life { up: *at, ..Life::default() });
            }
            Told::Down(_) => {
                assert!(open, "seed {seed}: down without up");
                lives.last_mut().unwrap().down = Some(*at);
            }
            Told::Suspect | Told::Resumed => {
                assert!(open, "seed {seed}: {told:?} outside a session");
                assert_eq!(suspect, *told == Told::Resumed, "seed {seed}: {told:?} twice");
                suspect = *told == Told::Suspect;
            }
            Told::Frame(lane, value) => {
                assert!(open, "seed {seed}: a frame outside a session");
                lives.last_mut().unwrap().frames[lane.index()].push(*value);
            }
        }
    }
    lives
}

fn verify(w: &World, sent: &[Vec<[Vec<u64>; 3]>; 2], seed: u64) {
    let lives = [lives(&w.reports[0], seed), lives(&w.reports[1], seed)];
    for end in [0, 1] {
        let other = 1 - end;
        for (index, life) in lives[end].iter().enumerate() {
            // symmetric down: whatever the other end had open when we reported down is over before either
            // end reports up again
            let (Some(down), Some(next)) = (life.down, lives[end].get(index + 1)) else { continue };
            for theirs in &lives[other] {
                if theirs.up < down {
                    assert!(theirs.down.is_some_and(|at| at < next.up), "seed {seed}: not symmetric");
                }
            }
        }
        // each of our sessions' frames is the start of what the other end sent in exactly one of its sessions
        let mut used = 0;
        for life in &lives[end] {
            if life.frames.iter().all(Vec::is_empty) {
                continue;
            }
            let from = (used..sent[other].len()).find(|session| {
                life.frames.iter().zip(&sent[other][*session]).all(|(got, sent)| sent.starts_with(got))
            });
            let Some(from) = from else {
                panic!("seed {seed}: {:?} is not the start of any of {:?}", life.frames, sent[other]);
            };
            if life.down.is_none() {
                assert_eq!(
                    life.frames, sent[other][from],
                    "seed {seed}: a session that lives has lost frames"
                );
            }
            used = from + 1;
        }
        let last_open = lives[end].last().is_some_and(|life| life.down.is_none());
        assert!(last_open, "seed {seed}: not linked in the end");
    }
}
