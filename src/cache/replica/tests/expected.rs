//! What a side with too few of the expected nodes says.

use super::*;

// caught by: the owners counted where nodes are missing ("2 of 2 confirmed it")
#[test]
fn a_write_that_owners_confirm_and_too_few_nodes_are_there_for_says_how_many_nodes() {
    // four nodes, three of which have to be there; both owners are in the smaller half
    let mut net = Net::new(1, &NAMES[..4], config(2).expected_nodes(Some(4)));
    net.settle();
    let primary = net.primary().unwrap();
    let owners = net.nodes[&primary].replica.config().unwrap().owners.clone();
    let ticket = net.ask_at(&primary, 1, true, WriteMode::Sync).unwrap();
    net.group(&owners);
    while !net.answers.contains_key(&ticket) {
        assert!(net.step(), "it is never answered:\n{}", net.dump());
    }
    let held = owners.iter().filter(|owner| !net.nodes[*owner].replica.store().is_empty()).count();
    assert_eq!(held, 2, "both owners have it");
    assert_eq!(net.answers[&ticket], Err(CacheError::NotEnoughAcks { got: 2, need: 3 }));
    // as what is not begun says
    let refused = net.ask_at(&primary, 2, true, WriteMode::Sync);
    assert_eq!(refused, Err(CacheError::NoQuorum { got: 2, need: 3 }));
}
