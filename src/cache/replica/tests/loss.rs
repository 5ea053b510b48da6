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
