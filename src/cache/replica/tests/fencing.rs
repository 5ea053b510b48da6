//! An owner that has promised a later epoch confirms nothing of an older one. In a whole cluster nobody can see that
//! this rule is broken: only an old primary that lives on, on the other side of a link that broke, asks for it; and in
//! the merge after a split its writes are taken in or reported. So this is looked at step by step.

use super::*;

impl Net {
    /// All that is on its way from one node to another, and nothing that this leads to.
    pub(super) fn carry(&mut self, from: &Peer, to: &Peer) {
        let queues = self.queues.iter_mut().filter(|((a, b, _), _)| a == from && b == to);
        let messages: Vec<ReplicaMessage> = queues.flat_map(|(_, queue)| queue.drain(..)).collect();
        for message in messages {
            self.with(to, |replica, ctx| replica.handle_message(from, message, ctx));
        }
    }

    pub(super) fn tell_view(&mut self, me: &Peer, live: &[&Peer]) {
        let node = self.nodes.get_mut(me).unwrap();
        node.members.live = live.iter().copied().cloned().collect();
        let wanted = node.wanted.clone();
        self.with(me, |replica, ctx| replica.handle_members(&wanted, ctx));
    }
}

/// The old primary and the next one do not see each other, and the third owner sees both. Whether a write is confirmed
/// that the old one accepts after the third has told the next one how far its copy is; and whether the next one serves
/// without it in the end.
fn written_behind_a_promise(rules: Rules) -> (bool, bool) {
    let mut net = Net::new(1, &NAMES[..3], config(3));
    net.settle();
    net.rules = rules;
    let owners = net.nodes[&net.primary().unwrap()].replica.config().unwrap().owners.clone();
    let [old, next, third] = &owners[..] else { panic!("three owners: {owners:?}") };
    net.link(old, next, false);
    net.tell_view(next, &[next, third]);
    net.carry(next, third);
    assert_eq!(net.nodes[third].replica.promised.as_ref().unwrap().primary, *next, "the third has promised");
    let ticket = net.ask_at(old, 1, true, WriteMode::Sync).unwrap();
    net.carry(old, third);
    net.carry(third, old);
    let confirmed = net.confirmed(ticket);
    for _ in 0..4 {
        net.carry(third, next);
        net.carry(next, third);
    }
    let next = &net.nodes[next].replica;
    (confirmed, next.serving().is_some() && next.store().is_empty())
}

#[test]
fn an_owner_confirms_nothing_behind_its_promise() {
    assert_eq!(written_behind_a_promise(Rules::all()), (false, true));
    let (confirmed, _) = written_behind_a_promise(Rules::broken(Mutation::NoEpochCheck));
    assert!(
        confirmed,
        "this test sees the rule broken: it is confirmed, and no answer to the next one tells of it"
    );
}
