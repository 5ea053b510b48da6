//! The relay alone is tested with whole nodes in `node/tests.rs` and in the simulator; here are the parts
//! that whole nodes cannot reach.

use super::*;
use crate::config::Config;
use crate::types::{Incarnation, NodeId};

struct Nowhere;

impl Wire for Nowhere {
    fn try_send(&mut self, _to: &Peer, _message: DataMessage<&Cast>, _body: &Bytes) -> Sent {
        Sent::NoLink
    }
}

struct Lost(Peer);

impl World for Lost {
    fn published(&self) -> Arc<Published> {
        let node: crate::node::Node<()> =
            crate::node::Node::new(self.0.clone(), Settings::from(&Config::default()), Time::ZERO);
        node.published()
    }
    fn target_peers(&self, _group: &[u8], _sender: ViewHash) -> Result<Vec<Peer>, Flood> {
        Err(Flood)
    }
}

fn peer(name: &str) -> Peer {
    Peer::new(NodeId::new(name).unwrap(), Incarnation::MIN)
}

fn deliver(hop: u64, seq: u64, origin: &str) -> DataMessage {
    let cast = Cast {
        hop,
        id: BroadcastId::new(peer(origin), seq),
        floor: 1,
        group: Group::from("g"),
        except: None,
        at_most_once: false,
        headers: Vec::new(),
    };
    DataMessage::Deliver { cast, targeted: true }
}

#[test]
fn a_frame_of_an_unknown_peer_a_repeated_one_and_one_after_a_gap_are_not_handled() {
    let mut relay = Relay::new(peer("a"), &Settings::from(&Config::default()));
    let world = Lost(peer("a"));
    let take = |relay: &mut Relay, hop, seq| {
        relay
            .handle_data(&peer("b"), deliver(hop, seq, "c"), Bytes::new(), &world, &mut Nowhere, Time::ZERO)
            .map(|delivery| delivery.hop)
    };
    assert_eq!(take(&mut relay, 1, 1), None, "b is not connected");
    relay.handle_peer_up(&peer("b"), &mut Nowhere);
    assert_eq!(take(&mut relay, 1, 1), Some(1));
    assert_eq!(take(&mut relay, 1, 1), None, "the same frame again");
    assert_eq!(take(&mut relay, 3, 3), None, "frame 2 is missing");
    assert_eq!(relay.violations(), 1);
    relay.delivered(&peer("b"), 3);
    assert_eq!(relay.poll_progress(&peer("b")), None, "nothing was handled that may be acknowledged");
    relay.delivered(&peer("b"), 1);
    assert_eq!(relay.poll_progress(&peer("b")), Some(Progress { hop: 1, routed: Vec::new() }));
    assert_eq!(take(&mut relay, 2, 1), None, "a second copy by another frame");
    assert_eq!(relay.poll_progress(&peer("b")).map(|p| p.hop), Some(2), "is acknowledged, and dropped");
}

#[test]
fn progress_beyond_what_was_sent_and_answers_to_nothing_are_ignored() {
    let mut relay = Relay::new(peer("a"), &Settings::from(&Config::default()));
    relay.handle_peer_up(&peer("b"), &mut Nowhere);
    let outcome = super::super::message::RoutedOutcome::Flooded { covered: Vec::new() };
    let routed = vec![super::super::message::Routed { seq: 9, outcome }];
    relay.handle_progress(&peer("b"), Progress { hop: u64::MAX, routed }, &mut Nowhere);
    relay.check_invariants().unwrap();
    assert_eq!(relay.footprint(), 0);
}

#[test]
fn an_unreadable_frame_counts_as_handled_and_holds_nothing_back() {
    let mut relay = Relay::new(peer("a"), &Settings::from(&Config::default()));
    let world = Lost(peer("a"));
    relay.handle_peer_up(&peer("b"), &mut Nowhere);
    relay.skip(&peer("b"));
    assert_eq!(relay.poll_progress(&peer("b")).map(|p| p.hop), Some(1));
    let delivery =
        relay.handle_data(&peer("b"), deliver(2, 1, "b"), Bytes::new(), &world, &mut Nowhere, Time::ZERO);
    assert_eq!(delivery.map(|delivery| delivery.hop), Some(2));
    assert_eq!(relay.violations(), 0);
}
