use super::*;

fn peer(name: &str, incarnation: u64) -> Peer {
    Peer::new(NodeId::new(name).unwrap(), Incarnation::new(incarnation).unwrap())
}

fn terms() -> Terms {
    Terms { scope: "s".into(), vnodes: 128, protocol: 1 }
}

fn config() -> LinkConfig {
    LinkConfig { queue_frames: 64, window: 8, ..LinkConfig::default() }
}

/// One end and what it has reported.
struct End {
    endpoint: Endpoint,
    log: Vec<LinkEvent>,
}

/// Two ends, raw connections between them that can break, and packets on their way.
struct Pair {
    ends: [End; 2],
    raw: Option<RawId>,
    next_raw: u64,
    wire: [VecDeque<(RawId, Bytes, Bytes)>; 2],
    now: Time,
}

impl Pair {
    fn new() -> Self {
        let end = |name: &str| End {
            endpoint: Endpoint::new(peer(name, 1), terms(), config(), 10 + u64::from(name == "b")),
            log: Vec::new(),
        };
        Self { ends: [end("a"), end("b")], raw: None, next_raw: 0, wire: Default::default(), now: Time::ZERO }
    }

    fn dial(&mut self) {
        self.next_raw += 1;
        let raw = RawId(self.next_raw);
        self.raw = Some(raw);
        self.ends[0].endpoint.handle_dialled(raw, Some(peer("b", 1).node));
        self.ends[1].endpoint.handle_accepted(raw);
    }

    fn cut(&mut self) {
        self.wire.iter_mut().for_each(VecDeque::clear);
        if let Some(raw) = self.raw.take() {
            self.ends.iter_mut().for_each(|end| end.endpoint.handle_closed(raw, self.now));
        }
    }

    /// Reports, then writes up to `limit` packets.
    fn pump(&mut self, i: usize, limit: usize) {
        for _ in 0..limit {
            while let Some(event) = self.ends[i].endpoint.poll_event() {
                if let LinkEvent::Close(raw) = event {
                    if self.raw == Some(raw) {
                        while self.deliver(i) {} // what was written before is not taken back
                        self.cut();
                    }
                }
                self.ends[i].log.push(event);
            }
            let Some(packet) = self.ends[i].endpoint.poll_write(self.now) else { break };
            if self.raw == Some(packet.0) {
                self.wire[i].push_back(packet);
            }
        }
    }

    fn deliver(&mut self, from: usize) -> bool {
        let Some((raw, head, body)) = self.wire[from].pop_front() else { return false };
        self.ends[1 - from].endpoint.handle_packet(raw, head, body, self.now);
        true
    }

    fn run(&mut self) {
        loop {
            (0..2).for_each(|i| self.pump(i, usize::MAX));
            if !(0..2).any(|i| self.deliver(i)) {
                (0..2).for_each(|i| self.pump(i, usize::MAX));
                return;
            }
        }
    }

    fn pass(&mut self, time: Time) {
        self.now += time;
        self.ends.iter_mut().for_each(|end| end.endpoint.handle_timeout(self.now));
    }

    fn send(&mut self, i: usize, lane: Lane, number: u64) -> bool {
        let to = if i == 0 { peer("b", 1) } else { peer("a", 1) };
        let frame = Frame::new(lane, number.to_le_bytes().to_vec(), Bytes::from_static(b"body"));
        self.ends[i].endpoint.send(&to, frame).is_ok()
    }

    fn kinds(&self, i: usize) -> Vec<&'static str> {
        let kind = |event: &LinkEvent| match event {
            LinkEvent::Up(_) => "up",
            LinkEvent::Suspect(_) => "suspect",
            LinkEvent::Resumed(_) => "resumed",
            LinkEvent::Down(_) => "down",
            LinkEvent::Frame(..) => "frame",
            LinkEvent::Close(_) => "close",
            LinkEvent::Refused(..) => "refused",
        };
        self.ends[i].log.iter().map(kind).collect()
    }
}

#[test]
fn both_ends_are_up_before_either_sends() {
    let mut pair = Pair::new();
    pair.dial();
    pair.pump(0, 9);
    pair.deliver(0);
    pair.pump(1, 9); // accepted: up here, welcome on its way
    assert_eq!(pair.kinds(1), ["up"]);
    assert!(pair.send(1, Lane::Data, 1), "taken, and kept until the other end is up");
    pair.pump(1, 9);
    assert_eq!(pair.wire[1].len(), 1, "only the welcome is written");
    pair.run();
    assert_eq!(pair.kinds(0), ["up", "frame"]);
}

#[test]
fn a_short_break_loses_nothing_and_a_long_one_ends_the_session_at_both_ends() {
    let mut pair = Pair::new();
    pair.dial();
    pair.run();
    (1..=20).for_each(|n| assert!(pair.send(0, Lane::Data, n)));
    pair.pump(0, 5);
    pair.deliver(0);
    pair.cut();
    pair.pass(Time::from_millis(1999));
    pair.dial();
    pair.run();
    assert_eq!(pair.kinds(0), ["up", "suspect", "resumed"]);
    assert_eq!(pair.kinds(1).iter().filter(|k| **k == "frame").count(), 20);
    pair.cut();
    pair.pass(Time::from_secs(2));
    pair.run();
    assert_eq!(pair.kinds(0)[3..], ["suspect", "down"]);
    assert_eq!(*pair.kinds(1).last().unwrap(), "down");
    assert!(!pair.send(0, Lane::Data, 21));
}

#[test]
fn an_end_that_gave_up_alone_is_a_new_session_for_the_other() {
    let mut pair = Pair::new();
    pair.dial();
    pair.run();
    pair.cut();
    pair.now += Time::from_secs(2);
    let now = pair.now;
    pair.ends[1].endpoint.handle_timeout(now); // only b's clock has come so far
    pair.dial();
    pair.run();
    assert_eq!(pair.kinds(1), ["up", "suspect", "down", "up"]);
    assert_eq!(pair.kinds(0), ["up", "suspect", "down", "up"], "down before it is up again");
}

#[test]
fn a_peer_that_acknowledges_nothing_is_suspect_and_then_down_but_a_slow_one_is_not() {
    let mut pair = Pair::new();
    pair.dial();
    pair.run();
    (1..=30).for_each(|n| assert!(pair.send(0, Lane::Data, n)));
    for _ in 0..8 {
        pair.pump(0, 9);
        pair.deliver(0); // one frame, then half the patience
        pair.pump(1, 9);
        while pair.deliver(1) {}
        pair.pass(Time::from_millis(400));
    }
    assert_eq!(pair.kinds(0), ["up"], "a deep queue that moves is no reason for suspicion");
    pair.pass(Time::from_millis(500));
    pair.pump(0, 9);
    assert_eq!(pair.kinds(0), ["up", "suspect"]);
    while pair.deliver(0) {}
    pair.pump(1, 99);
    while pair.deliver(1) {}
    pair.pump(0, 9);
    assert_eq!(pair.kinds(0), ["up", "suspect", "resumed"]);
    pair.wire.iter_mut().for_each(VecDeque::clear);
    pair.pump(0, 99);
    for _ in 0..12 {
        pair.pass(Time::from_millis(500));
    }
    pair.pump(0, 9);
    assert_eq!(pair.kinds(0).last(), Some(&"down").or(pair.kinds(0).last()));
    assert!(pair.kinds(0).contains(&"down"));
}

#[test]
fn different_terms_an_older_life_and_garbage_are_refused_with_both_values() {
    let mut pair = Pair::new();
    pair.ends[0].endpoint = Endpoint::new(peer("a", 1), Terms { vnodes: 64, ..terms() }, config(), 1);
    pair.dial();
    pair.run();
    let Some(LinkEvent::Refused(_, refusal)) = pair.ends[0].log.first() else {
        panic!("{:?}", pair.ends[0].log)
    };
    let text = refusal.to_string();
    assert!(text.contains("64") && text.contains("128"), "{text}");
    assert_eq!(pair.ends[1].endpoint.refused(), 1);

    let mut pair = Pair::new();
    pair.ends[0].endpoint = Endpoint::new(peer("a", 7), terms(), config(), 1);
    pair.dial();
    pair.run();
    pair.ends[0] = End { endpoint: Endpoint::new(peer("a", 3), terms(), config(), 1), log: Vec::new() };
    pair.dial();
    pair.run();
    let known = Incarnation::new(7).unwrap();
    assert!(
        matches!(&pair.ends[0].log[..], [LinkEvent::Refused(_, Refusal::Superseded { known: k, .. })] if *k == known)
    );

    let mut end = Endpoint::new(peer("b", 1), terms(), config(), 1);
    end.handle_accepted(RawId(1));
    end.handle_packet(RawId(1), Bytes::from_static(b"GET / HTTP/1.1\r\n"), Bytes::new(), Time::ZERO);
    assert_eq!(end.refused(), 1);
}

#[test]
fn a_half_open_old_connection_does_not_block_a_new_one() {
    let mut pair = Pair::new();
    pair.dial();
    pair.run();
    // a loses the connection, b does not notice
    let raw = pair.raw.take().unwrap();
    pair.ends[0].endpoint.handle_closed(raw, Time::ZERO);
    pair.dial();
    pair.run();
    assert_eq!(pair.kinds(0), ["up", "suspect", "resumed"]);
    assert_eq!(pair.kinds(1), ["up", "close"], "b takes the new connection and closes the old one");
    pair.send(1, Lane::Control, 1);
    pair.run();
    assert_eq!(*pair.kinds(0).last().unwrap(), "frame");
}

#[test]
fn a_queue_is_bounded_and_a_frame_has_a_limit() {
    let mut pair = Pair::new();
    pair.dial();
    pair.run();
    assert_eq!((1..=100).filter(|n| pair.send(0, Lane::Bulk, *n)).count(), 64);
    assert!(pair.send(0, Lane::Control, 1), "another lane has its own queue");
    let huge = Frame::new(Lane::Data, Bytes::new(), vec![0; config().max_frame + 1]);
    assert!(matches!(pair.ends[0].endpoint.send(&peer("b", 1), huge), Err(SendError::TooLarge(_))));
    let stranger = Frame::new(Lane::Data, Bytes::new(), Bytes::new());
    assert!(matches!(pair.ends[0].endpoint.send(&peer("b", 2), stranger), Err(SendError::NoLink(_))));
}

/// The next number of a simple generator: the tests' own randomness, replayed by its seed.
fn random(state: &mut u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    *state
}

/// Anything may happen at any point; then the contract is read off the two logs.
#[test]
fn the_contract_holds_through_random_breaks() {
    for seed in 1..=300u64 {
        let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15);
        let mut pair = Pair::new();
        let mut sent = [[0u64; 3]; 2];
        for _ in 0..400 {
            let i = (random(&mut state) % 2) as usize;
            match random(&mut state) % 16 {
                0 => pair.cut(),
                1 | 2 if pair.raw.is_none() => pair.dial(),
                3 => pair.pass(Time::from_millis(random(&mut state) % 900)),
                4..=7 => {
                    let lane = Lane::ALL[(random(&mut state) % 3) as usize];
                    if pair.send(i, lane, sent[i][lane.index()] + 1) {
                        sent[i][lane.index()] += 1;
                    }
                }
                8..=11 => pair.pump(i, (random(&mut state) % 6) as usize),
                _ => {
                    pair.deliver(i);
                }
            }
        }
        if pair.raw.is_none() {
            pair.dial();
        }
        pair.run();
        if pair.raw.is_none() {
            pair.dial();
            pair.run();
        }
        for end in &pair.ends {
            check_log(seed, &end.log);
        }
        let count = |i: usize, kind| pair.kinds(i).iter().filter(|k| **k == kind).count();
        for i in 0..2 {
            assert_eq!(count(i, "up"), count(i, "down") + 1, "seed {seed}: both ends are up at the end");
        }
        // the accepting end is told first, so it may have seen a session that never began for the other
        assert!(count(0, "up") <= count(1, "up"), "seed {seed}");
    }
}

/// Up before the first frame and down after the last, numbers in order on each lane within a session.
fn check_log(seed: u64, log: &[LinkEvent]) {
    let mut up = false;
    let mut last = [0u64; 3];
    for event in log {
        match event {
            LinkEvent::Up(_) => {
                assert!(!up, "seed {seed}: up twice");
                up = true;
            }
            LinkEvent::Down(_) => {
                assert!(up, "seed {seed}: down without up");
                up = false;
            }
            LinkEvent::Frame(_, frame) => {
                assert!(up, "seed {seed}: a frame of a session that is not up");
                let number = u64::from_le_bytes(frame.head[..8].try_into().unwrap());
                let last = &mut last[frame.lane.index()];
                assert!(number > *last, "seed {seed}: {number} after {last} on {:?}", frame.lane);
                *last = number;
            }
            _ => {}
        }
    }
}

#[test]
fn nothing_is_lost_while_every_break_is_short() {
    for seed in 1..=100u64 {
        let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15);
        let mut pair = Pair::new();
        pair.dial();
        pair.run();
        let mut sent = 0;
        for _ in 0..300 {
            match random(&mut state) % 8 {
                0 => {
                    pair.cut();
                    pair.dial();
                }
                1..=3 => sent += u64::from(pair.send(0, Lane::Data, sent + 1)),
                4 | 5 => pair.pump((random(&mut state) % 2) as usize, 3),
                _ => {
                    pair.deliver((random(&mut state) % 2) as usize);
                }
            }
        }
        pair.run();
        let got: Vec<u64> = pair.ends[1]
            .log
            .iter()
            .filter_map(|event| match event {
                LinkEvent::Frame(_, frame) => Some(u64::from_le_bytes(frame.head[..8].try_into().unwrap())),
                _ => None,
            })
            .collect();
        assert_eq!(got, (1..=sent).collect::<Vec<_>>(), "seed {seed}");
    }
}

#[test]
fn hazard_22_no_bytes_break_the_decoder_and_none_are_misread() {
    let good = [
        Packet::Hello(Hello { me: peer("a", 1), terms: terms(), session: Some(5), received: [1, 2, 3] }),
        Packet::Welcome(Welcome { me: peer("b", 1), session: 9, resumed: true, received: [0; 3] }),
        Packet::Refuse(Refusal::Superseded { node: peer("a", 1).node, known: Incarnation::MIN }),
        Packet::Ready,
        Packet::Frame {
            lane: Lane::Bulk,
            number: 7,
            head: Bytes::from_static(b"head"),
            body: Bytes::from_static(b"body"),
        },
        Packet::Ack([1, 2, 3]),
        Packet::Ping,
        Packet::Pong,
        Packet::Goodbye,
    ];
    for packet in &good {
        let (head, body) = packet.encode();
        assert_eq!(Packet::decode(head.clone(), body.clone()).as_ref(), Some(packet));
        let whole = Bytes::from([head, body].concat());
        assert_eq!(Packet::decode(whole.clone(), Bytes::new()).as_ref(), Some(packet));
        let mut state = 88172645463325252;
        for _ in 0..20_000 {
            let mut bytes = whole.to_vec();
            for _ in 0..1 + random(&mut state) % 4 {
                let at = random(&mut state) as usize % (bytes.len() + 1);
                match random(&mut state) % 3 {
                    0 => bytes.truncate(at),
                    1 => bytes.insert(at, random(&mut state) as u8),
                    _ if at < bytes.len() => bytes[at] = random(&mut state) as u8,
                    _ => {}
                }
            }
            let mut end = Endpoint::new(peer("z", 1), terms(), config(), 1);
            end.handle_accepted(RawId(1));
            end.handle_packet(RawId(1), Bytes::from(bytes.clone()), Bytes::new(), Time::ZERO);
            if let Some(Packet::Frame { head, body, .. }) = Packet::decode(bytes.clone().into(), Bytes::new())
            {
                assert_eq!(FRAME_HEADER + head.len() + body.len(), bytes.len());
            }
        }
    }
}
