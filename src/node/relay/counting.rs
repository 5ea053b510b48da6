//! What a peer says or keeps back that changes what is counted.
use super::*;
use crate::config::Config;
use crate::node::published::Status;
use crate::ring::{Ring, RingConfig};
use crate::types::{Incarnation, NodeId};
use crate::view::View;

struct All(Vec<(Peer, DataMessage)>);
impl Wire for All {
    fn try_send(&mut self, to: &Peer, message: DataMessage<&Cast>, _body: &Bytes) -> Sent {
        self.0.push((to.clone(), message.cloned()));
        Sent::Accepted
    }
}
struct W(Peer, Peer);
impl World for W {
    fn published(&self) -> Arc<Published> {
        Arc::new(Published {
            me: self.0.clone(),
            status: Status::Ready,
            view: View::alone(self.0.clone()),
            hash: ViewHash::from_raw(7),
            ring: Ring::of([self.1.node.clone()], RingConfig::default()),
            routers: Arc::new([self.1.clone()]),
            connected: Arc::new([]),
            slots: Arc::new([]),
            settled: true,
            draining: false,
            superseded: false,
        })
    }
    fn target_peers(&self, _: &[u8], _: ViewHash) -> Result<Vec<Peer>, Flood> {
        Ok(Vec::new())
    }
}
fn peer(name: &str) -> Peer {
    Peer::new(NodeId::new(name).unwrap(), Incarnation::MIN)
}
fn cast(once: bool, ticket: u64) -> NewCast {
    NewCast {
        group: Group::from("g"),
        body: Bytes::from_static(b"x"),
        except: None,
        headers: Vec::new(),
        at_most_once: once,
        audience: Audience::Group,
        ticket: (!once).then_some(Ticket(ticket)),
    }
}
fn origin() -> (Relay, All, W) {
    let mut relay = Relay::new(peer("a"), &Settings::from(&Config::default()));
    let mut wire = All(Vec::new());
    relay.handle_peer_up(&peer("r"), &mut wire);
    relay.handle_peer_up(&peer("t"), &mut wire);
    (relay, wire, W(peer("a"), peer("r")))
}

/// r handled the Route, then fell silent before its answer; t handled the flooded copy: a, r and t have it.
#[test]
fn a_receipt_counts_a_router_that_had_its_copy_and_fell_silent() {
    let (mut relay, mut wire, world) = origin();
    relay.broadcast(cast(false, 1), &world, &mut wire);
    relay.handle_progress(&peer("r"), Progress { hop: 1, routed: vec![] }, &mut wire);
    relay.handle_peer_suspect(&peer("r"), &mut wire);
    relay.handle_progress(&peer("t"), Progress { hop: 1, routed: vec![] }, &mut wire);
    let settled = relay.poll_settled().unwrap();
    assert_eq!((settled.reach, settled.nodes), (Reach::Flooded, 3));
}

/// A hop number that was never sent settles nothing.
#[test]
fn progress_beyond_what_was_sent_settles_nothing() {
    let (mut relay, mut wire, world) = origin();
    relay.broadcast(cast(false, 1), &world, &mut wire);
    relay.handle_peer_suspect(&peer("r"), &mut wire); // flooded: t has hop 1 in flight
    relay.handle_progress(&peer("t"), Progress { hop: u64::MAX, routed: vec![] }, &mut wire);
    assert_eq!(relay.link(&peer("t")).unwrap().in_flight(), 1, "t cannot have handled hop 2^64-1");
    assert_eq!(relay.violations(), 1);
}

/// A peer that takes frames and never acknowledges.
#[test]
fn frames_that_nobody_waits_for_are_not_kept() {
    let (mut relay, mut wire, world) = origin();
    for i in 0..100_000 {
        relay.broadcast(cast(true, i), &world, &mut wire);
        wire.0.clear();
    }
    assert!(relay.footprint() < 10_000, "{} entries", relay.footprint());
}
