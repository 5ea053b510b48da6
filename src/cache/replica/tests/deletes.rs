//! Which deletes are forgotten, and what that does to the other side of a split.

use super::*;

impl Net {
    /// Until then, also where nobody waits for anything.
    fn pass(&mut self, time: Duration) {
        let until = self.now + time;
        loop {
            let waits = self.queues.values().any(|queue| !queue.is_empty())
                || self.views.values().any(|told| !told.is_empty());
            let next = self.nodes.values().filter_map(|node| node.replica.poll_timeout()).min();
            if !waits && next.is_none_or(|next| next > until) {
                self.now = self.now.max(until);
                return;
            }
            self.step();
        }
    }
}

/// The side of the old primary, without a majority of the nodes, deletes something that nobody has to confirm; the other
/// one goes on with `Sync` writes; both for longer than deletes are kept.
fn split_for_long(expected_nodes: usize) -> (Net, u64) {
    let ttl = Duration::from_secs(2);
    let mut config = config(2).tombstone_ttl(ttl);
    if expected_nodes > 0 {
        config = config.expected_nodes(Some(expected_nodes));
    }
    let mut net = Net::new(1, &NAMES[..3], config);
    net.settle();
    let primary = net.primary().unwrap();
    let first = net.ask_at(&primary, 1, true, WriteMode::Sync).unwrap();
    net.settle();
    assert!(net.confirmed(first));
    let others: Vec<Peer> = net.peers().into_iter().filter(|peer| *peer != primary).collect();
    net.group(std::slice::from_ref(&primary));
    net.group(&others);
    net.pass(Duration::from_secs(3));
    net.ask_at(&primary, 1, false, WriteMode::Async).unwrap();
    let next = others.iter().find(|peer| net.nodes[*peer].replica.serving().is_some()).unwrap().clone();
    let ticket = net.ask_at(&next, 2, true, WriteMode::Sync).unwrap();
    net.pass(ttl * 20);
    assert!(net.confirmed(ticket));
    net.heal();
    net.settle();
    (net, ticket)
}

// caught by: a side that may accept nothing, and forgets deletes all the same: the other one is behind them
#[test]
fn a_side_without_the_expected_nodes_forgets_no_deletes_that_the_other_has_missed() {
    let (net, _) = split_for_long(3);
    assert_eq!((net.discarded, net.losers.len()), (0, 0), "nothing of the larger side is discarded");
    assert!(net.held(2).is_some(), "it was acknowledged by the larger side");
    assert!(net.held(1).is_none(), "the delete is merged");
    net.check();
}

/// And what it is about: without `expected_nodes`, no side knows that it is the smaller one.
#[test]
fn a_side_that_has_missed_forgotten_deletes_is_discarded() {
    let (net, _) = split_for_long(0);
    assert!(net.discarded > 0 && net.held(1).is_none());
}
