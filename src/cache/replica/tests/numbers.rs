//! Counters that nobody counts to.

use super::*;
use crate::cache::replica::message::MAX_NUMBER;
use crate::cache::store::{SnapshotHeader, Write};
use crate::cache::version::Lineage;
use std::sync::Arc;

/// Whether the next owner takes over from a primary that crashes, after a peer has said this to everybody.
fn takes_over(said: impl Fn(&Peer, &Peer) -> ReplicaMessage) -> bool {
    let mut net = Net::new(1, &NAMES[..3], config(3));
    net.settle();
    let ticket = net.ask(1, true, WriteMode::Sync).unwrap();
    net.settle();
    assert!(net.confirmed(ticket));
    let primary = net.primary().unwrap();
    let broken = peer("z", 1);
    for to in net.peers() {
        let message = said(&broken, &to);
        net.with(&to, |replica, ctx| replica.handle_message(&broken, message, ctx));
    }
    net.crash(&primary);
    net.heal();
    let until = net.now + Duration::from_secs(60);
    while net.now < until && net.step() {
        if net.is_settled() && net.queues.values().all(VecDeque::is_empty) {
            net.check();
            return true;
        }
    }
    false
}

// caught by: any counter but the highest taken in
#[test]
fn a_number_that_nobody_counts_to_keeps_nobody_from_taking_over() {
    let half = u64::MAX / 2;
    for counter in [u64::MAX, u64::MAX - 1, half + 1, half, half - 1, MAX_NUMBER + 1, 1 << 62] {
        let of = |primary: &Peer| Epoch::new(counter, primary.clone());
        let alone = |broken: &Peer| {
            let owners = vec![broken.clone()];
            Config { epoch: of(broken), base: None, owners, before: Vec::new() }
        };
        assert!(
            takes_over(|broken, _| ReplicaMessage::Inquire { attempt: of(broken), known: Some(of(broken)) }),
            "Inquire {counter}"
        );
        assert!(
            takes_over(|broken, to| ReplicaMessage::Refuse {
                attempt: of(to),
                promised: Some(of(broken)),
                config: None,
                effective: false,
            }),
            "Refuse {counter}"
        );
        assert!(
            takes_over(|broken, _| ReplicaMessage::Nominate {
                seen: of(broken),
                config: None,
                effective: false,
                accept_loss: false,
                replace: false,
            }),
            "Nominate {counter}"
        );
        assert!(
            takes_over(|broken, to| ReplicaMessage::Reject {
                epoch: of(to),
                promised: of(broken),
                config: None,
                effective: false,
            }),
            "Reject {counter}"
        );
        if counter > MAX_NUMBER {
            // it is not learned either; a number in range is news of a primary, from which there is a copy to fetch
            assert!(
                takes_over(|broken, _| ReplicaMessage::Known { config: alone(broken), effective: true }),
                "Known {counter}"
            );
            assert!(
                takes_over(|broken, _| ReplicaMessage::Announce { config: alone(broken), settled: true }),
                "Announce {counter}"
            );
        }
    }
}

// caught by: numbers looked at where they are counted on from only
#[test]
fn numbers_that_nobody_counts_to_are_refused_wherever_they_stand() {
    let me = peer("a", 1);
    let epoch = |counter| Epoch::new(counter, me.clone());
    let version = |counter, seq| Version::new(epoch(counter), seq);
    let mut lineages = Vec::new();
    let over = MAX_NUMBER + 1;
    for (counter, base) in [(over, None), (MAX_NUMBER, Some(version(1, over)))] {
        let mut lineage = Lineage::default();
        lineage.push(epoch(counter), base);
        lineages.push(lineage);
    }
    let put = |version| crate::cache::store::Entry::Put { record: record!["k", 1], version };
    let header = |lineage: &Lineage, applied| {
        let store = Store::new(&config(2));
        SnapshotHeader { lineage: lineage.clone(), applied, ..store.snapshot_header() }
    };
    let begin = |header| ReplicaMessage::SnapshotBegin { epoch: epoch(2), header };
    let append = |version, write| ReplicaMessage::Append {
        epoch: epoch(2),
        prev: None,
        entries: vec![(version, Arc::new(write))],
        commit: None,
        all_have: None,
    };
    let whole = Lineage::default();
    let refused = [
        begin(header(&lineages[0], None)),
        begin(header(&lineages[1], None)),
        begin(header(&whole, Some(version(1, over)))),
        append(version(over, 1), Write::Nothing),
        append(version(2, over), Write::Nothing),
        append(version(2, 1), Write::Merge(vec![put(version(over, 1))])),
        ReplicaMessage::Offer {
            epoch: epoch(2),
            number: 0,
            entries: vec![put(version(over, 1))],
            last: true,
        },
        ReplicaMessage::Want { epoch: epoch(2), lineage: whole.clone(), end: Some(version(over, 1)) },
        ReplicaMessage::HandOver { from: epoch(MAX_NUMBER), epoch: epoch(over) },
    ];
    for message in refused {
        assert!(!message.is_bounded(), "{message:?}");
    }
    let taken = [
        begin(header(&whole, Some(version(1, 7)))),
        append(version(MAX_NUMBER, MAX_NUMBER), Write::Nothing),
        append(version(2, 1), Write::Merge(vec![put(version(1, 1))])),
    ];
    for message in taken {
        assert!(message.is_bounded(), "{message:?}");
    }
}

// caught by: a node that begins to count where its incarnation is
#[test]
fn nodes_whose_incarnations_are_no_time_count_in_range() {
    let mut net = Net::new(1, &[], config(2));
    for (name, life) in [("a", u64::MAX), ("b", u64::MAX / 2), ("c", u64::MAX - 1)] {
        net.start(peer(name, life));
    }
    net.heal();
    net.settle();
    let ticket = net.ask(1, true, WriteMode::Sync).unwrap();
    net.settle();
    assert!(net.confirmed(ticket));
    let primary = net.primary().unwrap();
    net.crash(&primary);
    net.heal();
    net.settle();
    net.check();
}
