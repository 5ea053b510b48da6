//! Whole nodes against one another, every message delivered in order: the plain way of each rule. The wide
//! search is the simulator's and the model's.

use std::collections::{BTreeMap, VecDeque};

use super::message::Cast;
use super::*;
use crate::config::Config;
use crate::types::Incarnation;

/// Frames of the data lane on their way.
#[derive(Default)]
struct DataNet {
    frames: VecDeque<(Peer, Peer, DataMessage, bytes::Bytes)>,
    busy: bool,
}

struct Out<'a>(&'a Peer, &'a std::cell::RefCell<DataNet>);

impl Wire for Out<'_> {
    fn try_send(&mut self, to: &Peer, message: DataMessage<&Cast>, body: &bytes::Bytes) -> relay::Sent {
        let mut net = self.1.borrow_mut();
        if net.busy {
            return relay::Sent::Busy;
        }
        net.frames.push_back((self.0.clone(), to.clone(), message.cloned(), body.clone()));
        relay::Sent::Accepted
    }
}

struct Cluster {
    data: std::cell::RefCell<DataNet>,
    /// Node, group, payload.
    got: Vec<(Peer, Group, bytes::Bytes)>,
    receipts: Vec<relay::Settled>,
    nodes: BTreeMap<Peer, Node<u8>>,
    net: VecDeque<(Peer, Peer, Message)>,
    joined: Vec<(Ticket, Result<(), JoinRefused>)>,
    now: Time,
    ticket: u64,
}

fn peer(name: &str, incarnation: u64) -> Peer {
    Peer::new(NodeId::new(name).unwrap(), Incarnation::new(incarnation).unwrap())
}

impl Cluster {
    fn of(names: &[&str]) -> Self {
        let mut cluster = Cluster {
            data: Default::default(),
            got: Vec::new(),
            receipts: Vec::new(),
            nodes: BTreeMap::new(),
            net: VecDeque::new(),
            joined: Vec::new(),
            now: Time::ZERO,
            ticket: 0,
        };
        for name in names {
            cluster.start(&peer(name, 1));
        }
        cluster
    }

    fn start(&mut self, me: &Peer) {
        let mut settings = Settings::from(&Config::default());
        settings.shards = 2;
        settings.work_step = 2;
        settings.chunk_groups = 2;
        let node = Node::new(me.clone(), settings, self.now);
        let others: Vec<Peer> = self.nodes.keys().cloned().collect();
        self.nodes.insert(me.clone(), node);
        for other in others {
            self.link(me, &other);
        }
        self.nodes[me].handle_discovery_settled(self.now);
    }

    fn link(&self, a: &Peer, b: &Peer) {
        self.nodes[b].handle_peer_up(a.clone(), &mut Out(b, &self.data), self.now);
        self.nodes[a].handle_peer_up(b.clone(), &mut Out(a, &self.data), self.now);
    }

    fn cut(&mut self, a: &Peer, b: &Peer) {
        self.net.retain(|(from, to, _)| !((from == a && to == b) || (from == b && to == a)));
        self.data
            .borrow_mut()
            .frames
            .retain(|(from, to, ..)| !((from == a && to == b) || (from == b && to == a)));
        for (x, y) in [(a, b), (b, a)] {
            if let Some(node) = self.nodes.get(x) {
                node.handle_peer_down(y, &mut Out(x, &self.data), self.now);
            }
        }
    }

    fn kill(&mut self, who: &Peer) {
        let others: Vec<Peer> = self.nodes.keys().cloned().collect();
        self.nodes.remove(who);
        for other in others {
            self.cut(&other, who);
        }
    }

    /// Carries out effects and delivers messages until nothing moves.
    fn run(&mut self) {
        loop {
            let mut moved = false;
            for (me, node) in &self.nodes {
                while node.work(self.now) {
                    moved = true;
                }
                while let Some(effect) = node.poll_effect() {
                    moved = true;
                    match effect {
                        Effect::Transmit(to) => {
                            while let Some(out) = node.poll_transmit(&to, self.now) {
                                self.net.push_back((me.clone(), to.clone(), out.message));
                            }
                        }
                        Effect::Joined { ticket, result } => self.joined.push((ticket, result)),
                        Effect::Settled(settled) => self.receipts.push(settled),
                        Effect::Room | Effect::Work | Effect::Changed | Effect::Event(_) => {}
                    }
                }
                node.check_invariants().unwrap();
            }
            if let Some((from, to, message)) = self.net.pop_front() {
                moved = true;
                if let Some(node) = self.nodes.get(&to) {
                    node.handle_message(&from, message, &mut Out(&to, &self.data), self.now);
                }
            }
            let frame = self.data.borrow_mut().frames.pop_front();
            if let Some((from, to, message, body)) = frame {
                moved = true;
                if let Some(node) = self.nodes.get(&to) {
                    let mut out = Out(&to, &self.data);
                    if let Some(delivery) = node.handle_data_frame(&from, message, body, &mut out, self.now) {
                        let members = node.local_members(delivery.group.as_bytes());
                        for _ in members.iter() {
                            self.got.push((to.clone(), delivery.group.clone(), delivery.body.clone()));
                        }
                        if members.is_empty() && delivery.targeted {
                            node.tell_not_held(&from, &delivery.group, self.now);
                        }
                        node.delivered(&from, delivery.hop);
                    }
                }
            }
            if !moved {
                return;
            }
        }
    }

    fn pass(&mut self, time: Time) {
        let end = self.now + time;
        while self.now < end {
            self.now += Time::from_millis(250);
            self.nodes.iter().for_each(|(me, node)| node.handle_timeout(&mut Out(me, &self.data), self.now));
            self.run();
        }
    }

    fn join(&mut self, who: &Peer, group: &str) -> JoinStart<u8> {
        self.ticket += 1;
        let node = &self.nodes[who];
        node.join(Group::from(group), node.next_member_number(), 0, Ticket(self.ticket), self.now)
    }

    fn cast(&mut self, who: &Peer, group: &str, payload: &str) {
        self.ticket += 1;
        let cast = NewCast {
            group: Group::from(group),
            body: bytes::Bytes::copy_from_slice(payload.as_bytes()),
            except: None,
            headers: Vec::new(),
            at_most_once: false,
            audience: relay::Audience::Group,
            ticket: Some(Ticket(self.ticket)),
        };
        let begun = self.nodes[who].broadcast(cast, &mut Out(who, &self.data));
        let Begun::Sent { deliver_here: true, .. } = begun else { panic!("{begun:?}") };
        for _ in self.nodes[who].local_members(group.as_bytes()).iter() {
            self.got.push((
                who.clone(),
                Group::from(group),
                bytes::Bytes::copy_from_slice(payload.as_bytes()),
            ));
        }
    }

    fn status(&self) -> Vec<Status> {
        self.nodes.values().map(|node| node.published().status).collect()
    }

    fn all_ready(&self) -> bool {
        let hashes: std::collections::BTreeSet<_> = self.nodes.values().map(|n| n.published().hash).collect();
        hashes.len() == 1 && self.status().iter().all(|status| *status == Status::Ready)
    }

    /// Every table against the truth.
    fn assert_exact(&self) {
        assert!(self.all_ready(), "{:?}", self.status());
        let mut truth = Vec::new();
        let mut seen = Vec::new();
        for (me, node) in &self.nodes {
            for (group, state, members) in node.claims() {
                let router = node.with_published(|p| p.router(group.as_bytes()).clone());
                if router != *me && (members > 0 || state == "Cooldown") {
                    truth.push((router, group, me.clone()));
                }
            }
            let rows = node.rows().into_iter().filter(|(.., present)| *present);
            seen.extend(rows.map(|(group, source, ..)| (me.clone(), group, source)));
        }
        truth.sort();
        seen.sort();
        assert_eq!(seen, truth);
    }
}

#[test]
fn three_nodes_become_ready_and_know_who_holds_what() {
    let mut cluster = Cluster::of(&["a", "b", "c"]);
    cluster.run();
    assert!(cluster.all_ready(), "{:?}", cluster.status());
    let b = peer("b", 1);
    for i in 0..40 {
        cluster.join(&b, &format!("g{i}"));
    }
    cluster.run();
    assert!(cluster.joined.iter().all(|(_, result)| result.is_ok()));
    assert_eq!(cluster.nodes[&b].counts().groups, 40);
    cluster.assert_exact();
    for i in 0..40 {
        let group = format!("g{i}");
        let router = cluster.nodes[&b].with_published(|p| p.router(group.as_bytes()).clone());
        let hash = cluster.nodes[&b].with_published(Published::sender_hash);
        let targets = cluster.nodes[&router].target_peers(group.as_bytes(), hash).unwrap();
        assert_eq!(targets, std::slice::from_ref(&b));
    }
}

#[test]
fn groups_follow_the_ring_when_nodes_come_and_go() {
    let mut cluster = Cluster::of(&["a", "b"]);
    cluster.run();
    for i in 0..60 {
        for who in ["a", "b"] {
            cluster.join(&peer(who, 1), &format!("g{}-{who}", i % 45));
        }
    }
    cluster.run();
    cluster.assert_exact();
    cluster.start(&peer("c", 1));
    cluster.run();
    cluster.assert_exact();
    cluster.start(&peer("d", 1));
    cluster.run();
    cluster.assert_exact();
    cluster.kill(&peer("a", 1));
    cluster.run();
    cluster.assert_exact();
    cluster.start(&peer("a", 2));
    cluster.run();
    cluster.assert_exact();
    let (b, c) = (peer("b", 1), peer("c", 1));
    cluster.cut(&b, &c);
    cluster.link(&b, &c);
    cluster.run();
    cluster.assert_exact();
}

#[test]
fn a_drained_node_routes_nothing_and_stays_a_member() {
    let mut cluster = Cluster::of(&["a", "b", "c"]);
    cluster.run();
    let a = peer("a", 1);
    for i in 0..30 {
        cluster.join(&a, &format!("g{i}"));
    }
    cluster.run();
    cluster.nodes[&a].drain(cluster.now);
    assert!(!cluster.nodes[&a].drain_waiting_for().is_empty());
    assert_eq!(cluster.join(&a, "new"), JoinStart::Refused(JoinRefused::Draining));
    cluster.run();
    cluster.assert_exact();
    assert!(cluster.nodes[&a].drain_waiting_for().is_empty());
    let published = cluster.nodes[&peer("b", 1)].published();
    assert!((0..30).all(|i| published.router(format!("g{i}").as_bytes()).node.as_str() != "a"));
    assert_eq!(cluster.nodes[&a].counts().groups, 30);
    // the last two drain as well: then all members have tokens again
    for who in ["b", "c"] {
        cluster.nodes[&peer(who, 1)].drain(cluster.now);
    }
    cluster.run();
    cluster.assert_exact();
    assert!(cluster.nodes.values().all(|node| node.drain_waiting_for().is_empty()));
}

#[test]
fn a_left_group_is_gone_everywhere_after_its_times() {
    let mut cluster = Cluster::of(&["a", "b"]);
    cluster.run();
    let a = peer("a", 1);
    for i in 0..20 {
        cluster.join(&a, &format!("g{i}"));
    }
    cluster.run();
    for i in 0..20 {
        let group = format!("g{i}");
        let number = cluster.nodes[&a].local_members(group.as_bytes()).iter().next().unwrap().number;
        assert_eq!(cluster.nodes[&a].leave(group.as_bytes(), number, cluster.now), Some(0));
        assert_eq!(cluster.nodes[&a].leave(group.as_bytes(), number, cluster.now), None);
    }
    cluster.pass(Time::from_secs(40));
    cluster.assert_exact();
    assert_eq!(cluster.nodes[&a].counts().claims, 0);
    let rows = |c: &Cluster| c.nodes[&peer("b", 1)].rows();
    assert!(rows(&cluster).iter().all(|(.., present)| !present), "tombstones only");
    cluster.pass(Time::from_secs(60));
    assert!(rows(&cluster).is_empty());
    assert!(cluster.nodes.values().all(|node| node.footprint() == 0));
}

#[test]
fn a_missing_and_a_phantom_row_are_repaired_by_digests() {
    let mut cluster = Cluster::of(&["a", "b"]);
    cluster.run();
    let (a, b) = (peer("a", 1), peer("b", 1));
    for i in 0..20 {
        cluster.join(&a, &format!("g{i}"));
    }
    cluster.run();
    let rows = cluster.nodes[&b].rows();
    let slot = cluster.nodes[&b].slot_of(&a).unwrap();
    let (group, _, version, _) = rows[0].clone();
    cluster.nodes[&b].write_row(&group, slot, version, false, cluster.now);
    let phantom = (0..)
        .map(|i| format!("phantom{i}"))
        .find(|name| cluster.nodes[&b].with_published(|p| *p.router(name.as_bytes()) == b));
    cluster.nodes[&b].write_row(&Group::from(phantom.unwrap()), slot, 1, true, cluster.now);
    cluster.pass(Time::from_secs(45));
    cluster.assert_exact();
}

#[test]
fn a_join_whose_router_never_answers_fails_and_registers_nothing() {
    let mut cluster = Cluster::of(&["a", "b"]);
    cluster.run();
    let a = peer("a", 1);
    let group = (0..)
        .map(|i| format!("g{i}"))
        .find(|name| cluster.nodes[&a].with_published(|p| p.router(name.as_bytes()).node.as_str() == "b"));
    let group = group.unwrap();
    assert_eq!(cluster.join(&a, &group), JoinStart::Waiting);
    let node = &cluster.nodes[&a];
    node.handle_timeout(&mut Out(&a, &cluster.data), cluster.now + node.settings().join_timeout);
    let refused = std::iter::from_fn(|| node.poll_effect()).find_map(|effect| match effect {
        Effect::Joined { result, .. } => Some(result),
        _ => None,
    });
    assert_eq!(refused, Some(Err(JoinRefused::RouterUnreachable { router: NodeId::new("b").unwrap() })));
    assert!(!node.holds(group.as_bytes()));
    // the claim lands after all: the retraction takes it back
    cluster.pass(Time::from_secs(40));
    cluster.assert_exact();
    assert_eq!(cluster.nodes[&a].counts().claims, 0);
}

#[test]
fn a_broadcast_reaches_each_member_once_by_three_hops() {
    let mut cluster = Cluster::of(&["a", "b", "c", "d"]);
    cluster.run();
    let all: Vec<Peer> = cluster.nodes.keys().cloned().collect();
    for i in 0..12 {
        for who in all.iter().take(i % 5) {
            cluster.join(who, &format!("g{i}"));
        }
    }
    cluster.run();
    for i in 0..12 {
        for from in &all {
            cluster.got.clear();
            cluster.receipts.clear();
            cluster.cast(from, &format!("g{i}"), "hello");
            cluster.run();
            let mut got: Vec<Peer> = cluster.got.iter().map(|(who, ..)| who.clone()).collect();
            got.sort();
            assert_eq!(got, all[..i % 5], "g{i} from {from}");
            let [receipt] = cluster.receipts.as_slice() else { panic!("{:?}", cluster.receipts) };
            assert_eq!((receipt.reach, receipt.nodes), (relay::Reach::Targeted, i % 5));
        }
    }
    assert!(cluster.nodes.values().all(|node| node.in_flight() == (0, 0)));
}

#[test]
fn hazard_27_a_broadcast_whose_router_dies_or_falls_silent_is_flooded_at_once() {
    for silent in [false, true] {
        let mut cluster = Cluster::of(&["a", "b", "c"]);
        cluster.run();
        let (a, b, c) = (peer("a", 1), peer("b", 1), peer("c", 1));
        let group = (0..)
            .map(|i| format!("g{i}"))
            .find(|name| cluster.nodes[&a].with_published(|p| *p.router(name.as_bytes()) == b));
        let group = group.unwrap();
        cluster.join(&b, &group);
        cluster.join(&c, &group);
        cluster.run();
        cluster.cast(&a, &group, "hello");
        assert_eq!(cluster.data.borrow().frames.len(), 1, "it is on its way to the router");
        if silent {
            let held = cluster.data.borrow_mut().frames.pop_front();
            cluster.nodes[&a].handle_peer_suspect(&b, &mut Out(&a, &cluster.data), cluster.now);
            cluster.run();
            assert_eq!(cluster.got.len(), 1, "c has it without the router");
            assert_eq!(cluster.receipts.len(), 1, "the receipt does not wait for a suspect");
            assert_eq!(cluster.nodes[&a].in_flight(), (1, 0), "but the broadcast stays open");
            cluster.data.borrow_mut().frames.extend(held);
            cluster.nodes[&a].handle_peer_resumed(&b, &mut Out(&a, &cluster.data), cluster.now);
            cluster.run();
            let mut got: Vec<Peer> = cluster.got.iter().map(|(who, ..)| who.clone()).collect();
            got.sort();
            assert_eq!(got, [b, c], "once each, though the router relayed it as well");
        } else {
            cluster.kill(&b);
            cluster.run();
            assert_eq!(cluster.got.len(), 1);
            assert_eq!(cluster.receipts.len(), 1);
            assert_eq!(cluster.receipts[0].reach, relay::Reach::Flooded);
        }
        assert!(cluster.nodes.values().all(|node| node.in_flight() == (0, 0)));
    }
}

#[test]
fn a_full_queue_delays_and_loses_nothing() {
    let mut cluster = Cluster::of(&["a", "b"]);
    cluster.run();
    let (a, b) = (peer("a", 1), peer("b", 1));
    let group = (0..)
        .map(|i| format!("g{i}"))
        .find(|name| cluster.nodes[&a].with_published(|p| *p.router(name.as_bytes()) == a));
    let group = group.unwrap();
    cluster.join(&b, &group);
    cluster.run();
    cluster.data.borrow_mut().busy = true;
    for i in 0..5 {
        cluster.cast(&a, &group, &i.to_string());
    }
    cluster.run();
    assert!(cluster.got.is_empty() && cluster.receipts.is_empty());
    cluster.data.borrow_mut().busy = false;
    cluster.pass(Time::from_millis(250));
    let got: Vec<&[u8]> = cluster.got.iter().map(|(.., body)| body.as_ref()).collect();
    assert_eq!(got, [b"0", b"1", b"2", b"3", b"4"]);
    assert_eq!(cluster.receipts.len(), 5);
}

#[test]
fn a_stale_row_heals_at_its_first_use() {
    let mut cluster = Cluster::of(&["a", "b"]);
    cluster.run();
    let (a, b) = (peer("a", 1), peer("b", 1));
    let group = (0..)
        .map(|i| format!("g{i}"))
        .find(|name| cluster.nodes[&a].with_published(|p| *p.router(name.as_bytes()) == a));
    let group = group.unwrap();
    let slot = cluster.nodes[&a].slot_of(&b).unwrap();
    cluster.nodes[&a].write_row(&Group::from(&group), slot, 1, true, cluster.now);
    cluster.cast(&a, &group, "anybody?");
    cluster.run();
    assert!(cluster.got.is_empty());
    assert!(cluster.nodes[&a].occupancy(group.as_bytes()).is_empty());
}
