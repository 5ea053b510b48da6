//! What arrives late, of a stream that has ended meanwhile.

use super::*;

impl Net {
    fn want(&mut self, me: &Peer, wanted: &[Peer]) {
        self.nodes.get_mut(me).unwrap().wanted = wanted.to_vec();
        self.with(me, |replica, ctx| replica.handle_members(wanted, ctx));
    }
}

// caught by: an acknowledgement of a stream that is gone passed over
#[test]
fn a_copy_that_is_filled_when_nobody_wants_it_any_more_is_let_go() {
    let mut net = Net::new(1, &NAMES[..3], config(2));
    net.settle();
    let ticket = net.ask(1, true, WriteMode::Sync).unwrap();
    net.settle();
    assert!(net.confirmed(ticket));
    let primary = net.primary().unwrap();
    let owners = net.nodes[&primary].replica.config().unwrap().owners.clone();
    let outsider = net.peers().into_iter().find(|peer| !owners.contains(peer)).unwrap();
    let more: Vec<Peer> = owners.iter().chain([&outsider]).cloned().collect();
    net.want(&primary, &more);
    net.carry(&primary, &outsider);
    net.carry(&outsider, &primary);
    // the writes are on their way
    net.want(&primary, &owners);
    net.carry(&primary, &outsider);
    assert!(!net.nodes[&outsider].replica.store().is_empty(), "they came");
    net.settle();
    assert!(net.nodes[&outsider].replica.store().is_empty(), "{}", net.dump());
    assert_eq!(net.nodes[&outsider].replica.state(), OwnerState::Absent);
    net.check();
}

// caught by: the position of an earlier stream taken for that of the new one
#[test]
fn a_copy_that_is_let_go_and_wanted_again_is_filled_again() {
    let mut net = Net::new(1, &NAMES[..3], config(2));
    net.settle();
    let ticket = net.ask(1, true, WriteMode::Sync).unwrap();
    net.settle();
    assert!(net.confirmed(ticket));
    let primary = net.primary().unwrap();
    let owners = net.nodes[&primary].replica.config().unwrap().owners.clone();
    let third = net.peers().into_iter().find(|peer| !owners.contains(peer)).unwrap();
    let all: Vec<Peer> = owners.iter().chain([&third]).cloned().collect();
    for node in &all {
        net.want(node, &all);
    }
    net.settle();
    assert_eq!(net.nodes[&third].replica.state(), OwnerState::Active);
    // it is not wanted any more, and the owners agree about that
    net.want(&primary, &owners);
    for _ in 0..4 {
        net.carry(&primary, &owners[1]);
        net.carry(&owners[1], &primary);
    }
    net.carry(&primary, &third);
    let twice = net.with(&third, |replica, _| replica.tell_position(&primary));
    assert!(twice.is_some());
    // one answer of its has the copy let go; the other one arrives when it is wanted again
    let queue = net.queues.get_mut(&(third.clone(), primary.clone(), Lane::Control)).unwrap();
    let last = queue.pop_back().unwrap();
    net.carry(&third, &primary);
    net.want(&primary, &all);
    net.with(&primary, |replica, ctx| replica.handle_message(&third, last, ctx));
    let counted = |net: &Net| net.nodes[&primary].replica.config().unwrap().owners.contains(&third);
    assert!(!counted(&net), "what it said of the copy that is let go makes it no owner");
    net.settle();
    let copy = &net.nodes[&third].replica;
    assert!(copy.state() == OwnerState::Active && !copy.store().is_empty(), "{}", net.dump());
    assert!(counted(&net));
    net.check();
}

// caught by: a node whose stream ends passed over, because it was told who keeps the partition before it had a copy
#[test]
fn a_node_whose_stream_ends_between_two_pieces_is_told_anew_who_keeps_the_partition() {
    // the log has not all of it, and pieces are given slowly
    let slow = config(2).max_log_bytes(256).transfer_rate(512);
    let mut net = Net::new(1, &NAMES[..3], slow);
    net.settle();
    for key in 0..100 {
        net.ask(key, true, WriteMode::Async).unwrap();
    }
    net.settle();
    let primary = net.primary().unwrap();
    let owners = net.nodes[&primary].replica.config().unwrap().owners.clone();
    let outsider = net.peers().into_iter().find(|peer| !owners.contains(peer)).unwrap();
    let more: Vec<Peer> = owners.iter().chain([&outsider]).cloned().collect();
    net.want(&primary, &more);
    for _ in 0..4 {
        net.carry(&primary, &outsider);
        net.carry(&outsider, &primary);
    }
    assert!(
        matches!(&net.nodes[&outsider].replica.role, Role::Following(following) if following.incoming.is_some())
    );
    assert!(net.queues.values().all(VecDeque::is_empty), "nothing is on its way that the primary would hear");
    net.want(&primary, &owners);
    net.settle();
    assert_eq!(net.nodes[&outsider].replica.state(), OwnerState::Absent);
    assert!(matches!(&net.nodes[&outsider].replica.role, Role::Idle), "{}", net.dump());
}
