//! The locks and cells of the node under every order of its threads, on the node that ships.
//!
//! `RUSTFLAGS="--cfg muster_loom" CARGO_PROFILE_DEV_DEBUG_ASSERTIONS=false cargo test --target-dir target/loom
//! --test loom`, without the invariant checks of debug builds, which read everything and so multiply the orders.

#![cfg(muster_loom)]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "helpers of tests")]

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use loom::thread;
use muster_router::node::message::{Cast, DataMessage, Message};
use muster_router::node::relay::{Sent, Wire};
use muster_router::node::{JoinStart, Mutation, Node, Rules, Settings, Status, Ticket};
use muster_router::{Config, Group, Incarnation, NodeId, Peer};

struct Nowhere;

impl Wire for Nowhere {
    fn try_send(&mut self, _: &Peer, _: DataMessage<&Cast>, _: &Bytes) -> Sent {
        Sent::Accepted
    }
}

fn peer(name: &str) -> Peer {
    Peer::new(NodeId::new(name).unwrap(), Incarnation::new(1).unwrap())
}

const NOW: Duration = Duration::ZERO;

fn node() -> Node<u8> {
    node_under(Rules::all())
}

fn node_under(rules: Rules) -> Node<u8> {
    let mut settings = Settings::from(&Config::default());
    settings.ring.vnodes = 4;
    settings.shards = 1;
    settings.rules = rules;
    Node::new(peer("a"), settings, NOW)
}

/// Answers all that the node says to `other` as a peer of the same view; the groups that it transferred.
fn answer(node: &Node<u8>, other: &Peer) -> Vec<Group> {
    let mut moved = Vec::new();
    for _ in 0..8 {
        while node.work(NOW) {}
        while let Some(outgoing) = node.poll_transmit(other, NOW) {
            let reply = match outgoing.message {
                Message::Leaving { round } => Message::LeavingAck { round },
                Message::Announce { version, hash } => Message::Announce { version, hash },
                Message::Data { round, index, last, groups, .. } => {
                    moved.extend(groups);
                    // whoever has our data agrees with our view
                    if let Some(hash) = last {
                        let message = Message::Announce { version: round, hash };
                        node.handle_message(other, message, &mut Nowhere, NOW);
                    }
                    Message::DataAck { round, chunks: index + 1, complete: last.is_some() }
                }
                Message::Claims { call, claims } => {
                    moved.extend(claims.into_iter().map(|(group, _)| group));
                    Message::ClaimsAck { calls: vec![call] }
                }
                _ => continue,
            };
            node.handle_message(other, reply, &mut Nowhere, NOW);
        }
    }
    moved
}

/// A node that is `Ready` with `b`.
fn ready(rules: Rules) -> Node<u8> {
    let node = node_under(rules);
    node.handle_discovery_settled(NOW);
    node.handle_peer_up(peer("b"), &mut Nowhere, NOW);
    answer(&node, &peer("b"));
    assert_eq!(node.with_published(|p| p.status), Status::Ready);
    node
}

fn routed_by(node: &Node<u8>, router: &Peer) -> Group {
    let names = (0..).map(|i| Group::from(format!("g{i}").as_str()));
    names.into_iter().find(|g| node.with_published(|p| p.router(g.as_bytes()) == router)).unwrap()
}

fn orders(check: impl Fn() + Sync + Send + 'static) -> usize {
    let count = Arc::new(AtomicUsize::new(0));
    let counted = count.clone();
    let mut builder = loom::model::Builder::new();
    builder.max_branches = 100_000;
    builder.check(move || {
        counted.fetch_add(1, Ordering::Relaxed);
        check();
    });
    count.load(Ordering::Relaxed)
}

/// While the only source goes down, a decision is either made with its row or not made: never "nobody".
#[test]
fn a_decision_is_whole_while_a_source_goes_down() {
    decide_while_a_source_goes_down(Rules::all());
}

/// The check finds what it looks for: without the second look, "nobody" is an answer in some order.
#[test]
#[should_panic(expected = "a decision without the only source")]
fn the_second_look_of_a_decision_is_needed() {
    decide_while_a_source_goes_down(Rules::broken(Mutation::NoSecondLook));
}

fn decide_while_a_source_goes_down(rules: Rules) {
    let decided = Arc::new([AtomicUsize::new(0), AtomicUsize::new(0)]);
    let counted = decided.clone();
    let seen = orders(move || {
        let node = Arc::new(ready(rules));
        let group = routed_by(&node, &peer("a"));
        let claims = Message::Claims { call: 1, claims: vec![(group.clone(), 9)] };
        node.handle_message(&peer("b"), claims, &mut Nowhere, NOW);
        let sender = node.with_published(|p| p.hash);
        let writer = {
            let node = node.clone();
            thread::spawn(move || {
                node.handle_peer_down(&peer("b"), &mut Nowhere, NOW);
                while node.work(NOW) {} // drops the rows
            })
        };
        let targets = node.targets(group.as_bytes(), sender);
        counted[usize::from(targets.is_ok())].fetch_add(1, Ordering::Relaxed);
        if let Ok(targets) = targets {
            assert_eq!(targets.as_slice(), [peer("b").node], "a decision without the only source");
        }
        writer.join().unwrap();
        assert!(node.targets(group.as_bytes(), sender).is_err(), "the view is another one");
    });
    println!("{seen} orders, {decided:?} floods and decisions");
    assert!(decided.iter().all(|count| count.load(Ordering::Relaxed) > 0), "both answers occur: {decided:?}");
}

/// A join that meets a commit is told to the router, by the claim or by the transfer, whatever the order.
#[test]
fn a_join_that_meets_a_commit_is_told_to_the_router() {
    let seen = orders(|| {
        let node = Arc::new(node());
        node.handle_discovery_settled(NOW);
        let other = peer("b");
        // alone it routes all; the peer takes over a part, with the commit
        let joiner = {
            let node = node.clone();
            thread::spawn(move || {
                for i in 0..2 {
                    let group = Group::from(format!("g{i}").as_str());
                    let started = node.join(group, 1, 0, Ticket(1 + i), NOW);
                    assert!(matches!(started, JoinStart::Joined | JoinStart::Waiting), "{started:?}");
                }
            })
        };
        node.handle_peer_up(other.clone(), &mut Nowhere, NOW);
        while node.work(NOW) {} // gathers, while the joins are under way
        joiner.join().unwrap();
        let told = answer(&node, &other);
        for i in 0..2 {
            let group = Group::from(format!("g{i}").as_str());
            let elsewhere = node.with_published(|p| *p.router(group.as_bytes()) == other);
            assert_eq!(told.contains(&group), elsewhere, "{group:?}");
            assert!(node.is_local_member(group.as_bytes(), 1));
        }
    });
    println!("{seen} orders");
    assert!(seen > 1);
}
