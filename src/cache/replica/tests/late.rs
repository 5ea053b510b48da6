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
