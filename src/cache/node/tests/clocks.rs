//! Clocks that do not agree, messages that come late, and a copy that has missed one.

use super::*;

/// What this node's own copy says.
fn own(net: &mut Net, name: &str, key: &str) -> Option<i64> {
    let partition = net.node(name).config().partition_of(&key.into());
    let (store, active) = net.node(name).store(partition).unwrap();
    assert!(active, "{name} keeps it");
    store.get(&key.into()).next().and_then(|(record, _)| record.get(1)).and_then(Term::as_int)
}

/// Three nodes that keep everything; a's clock is ahead.
fn three(seed: u64, ahead: Duration) -> (CacheConfig, Net) {
    let cache = config().replicas(3);
    let mut net = Net::new(seed);
    net.ahead("a", ahead);
    ["a", "b", "c"].iter().for_each(|name| net.open(name, &cache));
    net.see(&["a", "b", "c"]);
    net.run_for(SECOND * 5);
    (cache, net)
}

fn write(net: &mut Net, name: &str, key: &str, operation: Operation) -> Version {
    let partition = net.node(name).config().partition_of(&key.into());
    net.operate(name, partition, operation, |_| {}).unwrap().version.unwrap()
}

fn put(net: &mut Net, name: &str, key: &str, value: i64) -> Version {
    let operation = put_of(net.node(name).config(), key, value).1;
    write(net, name, key, operation)
}

/// Delivers these once more.
fn again(net: &mut Net, messages: &[(Peer, Peer, CacheMessage)]) {
    let names = net.names();
    let living = |to: &Peer| names.contains(&to.node.to_string());
    for (from, to, message) in messages.iter().filter(|(_, to, _)| living(to)) {
        net.with(to.node.as_str(), |node, now| node.handle_message(from, message.clone(), now));
        net.run();
    }
}

// caught by: versions from the clock of whoever writes; epochs that begin from the clock of the new primary alone
#[test]
fn cache_11_clock_back_write_ignored() {
    for ahead in [SECOND * 10, SECOND * 1000] {
        each_seed(|seed| {
            let (_, mut net) = three(seed, ahead);
            // both ways round, whoever is the primary
            for primary in ["a", "b"] {
                let key = key_at(&net, primary);
                let first = put(&mut net, "a", &key, 1);
                let second = put(&mut net, "b", &key, 2);
                assert!(second > first, "{second} after {first}");
                net.run_for(SECOND);
                for name in ["a", "b", "c"] {
                    assert_eq!(
                        (net.get(name, &key), own(&mut net, name, &key)),
                        (Some(2), Some(2)),
                        "{name}"
                    );
                }
            }
            // and when the clock that is ahead has ordered the first, and another one orders the second
            let key = key_at(&net, "a");
            let first = put(&mut net, "a", &key, 3);
            net.kill("a");
            net.run_for(SECOND * 5);
            let second = put(&mut net, "b", &key, 4);
            assert!(second > first, "{second} after {first}");
            net.open("a", &config().replicas(3));
            net.see(&["a", "b", "c"]);
            net.run_for(SECOND * 10);
            for name in ["a", "b", "c"] {
                assert_eq!((net.get(name, &key), own(&mut net, name, &key)), (Some(4), Some(4)), "{name}");
            }
        });
    }
}

// caught by: a put below its own tombstone; a write of the stream that is applied a second time
#[test]
fn cache_10_tombstone_floor() {
    each_seed(|seed| {
        let (_, mut net) = three(seed, SECOND * 1000);
        let key = key_at(&net, "a");
        put(&mut net, "c", &key, 1);
        net.heard = Some(Vec::new());
        let deleted = write(&mut net, "c", &key, delete_of(&key));
        net.run();
        let heard = net.heard.take().unwrap();
        let is_tombstone = |message: &CacheMessage| format!("{message:?}").contains("DeleteKeys");
        let tombstones: Vec<_> = heard
            .into_iter()
            .filter(|(from, _, message)| *from == peer("a") && is_tombstone(message))
            .collect();
        assert_eq!(tombstones.len(), 2, "to both of the others");
        // put by the same primary, and the tombstone comes again
        let second = put(&mut net, "b", &key, 2);
        assert!(second > deleted, "{second} after {deleted}");
        again(&mut net, &tombstones);
        net.run_for(SECOND);
        for name in ["a", "b", "c"] {
            assert_eq!((net.get(name, &key), own(&mut net, name, &key)), (Some(2), Some(2)), "{name}");
        }
        // deleted again, and put by another primary, whose clock is far behind
        net.heard = Some(Vec::new());
        let deleted = write(&mut net, "c", &key, delete_of(&key));
        net.run();
        let heard = net.heard.take().unwrap();
        let late: Vec<_> = heard.into_iter().filter(|(_, _, message)| is_tombstone(message)).collect();
        net.kill("a");
        net.run_for(SECOND * 5);
        let third = put(&mut net, "b", &key, 3);
        assert!(third > deleted, "{third} after {deleted}");
        again(&mut net, &[tombstones, late].concat());
        net.run_for(SECOND);
        for name in ["b", "c"] {
            assert_eq!((net.get(name, &key), own(&mut net, name, &key)), (Some(3), Some(3)), "{name}");
        }
    });
}

// caught by: a reader that sees an owner behind and leaves it there
#[test]
fn a_quorum_read_that_sees_an_owner_behind_has_it_brought_forward() {
    each_seed(|seed| {
        let cache = config().replicas(3);
        for reads_at_primary in [true, false] {
            let mut net = Net::of(seed, &["a", "b", "c", "d"], &cache);
            let partition = PartitionId::new(0);
            let key = key_of(&cache, partition);
            let owners = net.node("a").status(partition).owners;
            let [first, second, third] = [0, 1, 2].map(|n| owners[n].node.to_string());
            let stranger = net.names().into_iter().find(|name| !owners.contains(&peer(name))).unwrap();
            let reader = if reads_at_primary { &first } else { &stranger };
            put(&mut net, &stranger, &key, 1);
            net.run_for(SECOND);
            assert_eq!(net.node(&first).status(partition).lag, Some(0));
            // one frame is lost though the link stays, and nothing comes after it that would tell
            let lagging = peer(&third);
            net.lose = Some(Box::new(move |_, to, message| {
                *to == lagging && format!("{message:?}").contains("Append")
            }));
            put(&mut net, &stranger, &key, 2);
            net.run();
            net.lose = None;
            net.run_for(SECOND);
            assert_eq!((own(&mut net, &second, &key), own(&mut net, &third, &key)), (Some(2), Some(1)));
            assert_eq!(net.node(&first).status(partition).lag, Some(1));
            assert_eq!(net.node(&third).status(partition).lag, None, "it cannot know");
            // the answer is of the primary and of the one that is behind
            let silent = peer(&second);
            net.hold = Some(Box::new(move |from, _, message| {
                *from == silent && matches!(message, CacheMessage::Copy { .. })
            }));
            let quorum = |options: &mut Options| options.read_mode = ReadMode::Quorum;
            let read = net.operate(reader, partition, get_of(&key), quorum);
            assert_eq!(value(read.unwrap()), Some(2));
            // no time passes, and nobody writes
            net.run();
            assert_eq!(own(&mut net, &third, &key), Some(2), "read at {reader}");
            assert_eq!(net.node(&first).status(partition).lag, Some(0));
        }
    });
}
