//! What an operator accepts.

use super::*;

/// Whether a primary that is cut off from both other owners confirms a write alone.
fn confirms_alone(accepted_before: bool, accepted_since: bool) -> bool {
    let mut net = Net::new(1, &NAMES[..3], config(3));
    net.settle();
    let primary = net.primary().unwrap();
    let accept = |net: &mut Net| net.with(&primary, |replica, ctx| replica.accept_loss(ctx));
    if accepted_before {
        accept(&mut net);
    }
    net.settle();
    net.group(std::slice::from_ref(&primary));
    net.run(2_000);
    if accepted_since {
        accept(&mut net);
        net.run(2_000);
    }
    let Ok(ticket) = net.ask_at(&primary, 1, true, WriteMode::Sync) else { return false };
    net.run(2_000);
    net.confirmed(ticket)
}

// caught by: a word that is kept until it is of use
#[test]
fn what_an_operator_accepts_of_a_partition_that_is_well_is_not_kept() {
    assert!(!confirms_alone(false, false));
    assert!(!confirms_alone(true, false), "in the next split nobody has accepted anything");
    assert!(confirms_alone(false, true));
}

/// A network that is well, its primary, and somebody who follows.
fn well() -> (Net, Peer, Peer) {
    let mut net = Net::new(1, &NAMES[..3], config(3));
    net.settle();
    let primary = net.primary().unwrap();
    let follower = net.peers().into_iter().find(|peer| *peer != primary).unwrap();
    (net, primary, follower)
}

// caught by: whoever gets the word acts on it (simulation seed 9001349)
#[test]
fn an_operators_word_that_comes_to_a_follower_does_not_disturb_the_primary() {
    let (mut net, primary, follower) = well();
    let epochs = net.primaries.len();
    net.with(&follower, |replica, ctx| replica.handle_message(&primary, ReplicaMessage::AcceptLoss, ctx));
    net.run(5_000);
    net.settle();
    assert_eq!((net.primaries.len(), net.primary()), (epochs, Some(primary)));
}

// caught by: a nomination that is kept where the primary has refused it (simulation seed 9001349)
#[test]
fn a_nominee_that_the_primary_refuses_asks_once() {
    let (mut net, primary, follower) = well();
    let (epochs, began) = (net.primaries.len(), net.now);
    let seen = net.nodes[&primary].replica.serving().cloned().unwrap();
    let nominate =
        ReplicaMessage::Nominate { seen, config: None, effective: false, accept_loss: true, replace: false };
    net.with(&follower, |replica, ctx| replica.handle_message(&primary, nominate, ctx));
    // one inquiry takes the promise away from the primary, which hears of it and begins one epoch more
    while net.primaries.len() == epochs {
        assert!(net.step());
    }
    assert!(net.now < began + Duration::from_secs(2), "{:?}", net.now - began);
    net.run(5_000);
    net.settle();
    assert_eq!((net.primaries.len(), net.primary()), (epochs + 1, Some(primary)));
}
