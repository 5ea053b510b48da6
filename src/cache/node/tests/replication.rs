//! What several copies make of it: the public cases, and the faults of a comparable system.

use super::*;
use crate::cache::replica::ReplicaMessage;

fn keys(count: usize) -> Vec<String> {
    (0..count).map(|n| format!("key{n}")).collect()
}

fn put_all(net: &mut Net, name: &str, keys: &[String]) {
    for (n, key) in keys.iter().enumerate() {
        let reply = net.put(name, key, n as i64).unwrap_or_else(|error| panic!("put of {key}: {error}"));
        assert_eq!(reply.outcome, Outcome::Written(1));
    }
}

fn found_everywhere(net: &mut Net, keys: &[String]) {
    for name in net.names() {
        for (n, key) in keys.iter().enumerate() {
            assert_eq!(net.get(&name, key), Some(n as i64), "{key} on {name}");
        }
    }
}

/// How many nodes hold an active copy with this key.
fn copies(net: &Net, key: &str) -> usize {
    let partition = config().partition_of(&key.into());
    let holds = |name: &String| {
        net.node(name)
            .store(partition)
            .is_some_and(|(store, active)| active && store.get(&key.into()).next().is_some())
    };
    net.names().iter().filter(|name| holds(name)).count()
}

/// Who keeps a partition with three owners in a cluster of four.
struct Owners {
    primary: String,
    others: [String; 2],
    stranger: String,
}

fn owners(net: &Net, partition: PartitionId) -> Owners {
    let owners = net.node("a").status(partition).owners;
    let [primary, b, c] = [0, 1, 2].map(|n| owners[n].node.to_string());
    assert_eq!(net.primary(partition), Some(primary.clone()));
    let stranger = net.names().into_iter().find(|name| !owners.contains(&peer(name))).unwrap();
    Owners { primary, others: [b, c], stranger }
}

fn is_ready(net: &Net) -> bool {
    net.names().iter().all(|name| net.node(name).readiness().is_ready())
}

#[test]
fn cache_01_third_join_empties() {
    let keys = keys(30);
    for seed in 1..=3 {
        let mut net = Net::of(seed, &["a"], &config());
        put_all(&mut net, "a", &keys);
        let mut names = vec!["a"];
        for name in ["b", "c", "d"] {
            net.open(name, &config());
            names.push(name);
            net.see(&names);
            found_everywhere(&mut net, &keys);
            net.run_for(SECOND * 10);
            found_everywhere(&mut net, &keys);
            assert!(is_ready(&net));
            keys.iter().for_each(|key| assert_eq!(copies(&net, key), 2, "{key} after {name}"));
        }
    }
}

#[test]
fn cache_04_no_active_repair() {
    each_seed(|seed| {
        let keys = keys(30);
        let mut net = Net::of(seed, &["a", "b", "c"], &config());
        put_all(&mut net, "a", &keys);
        net.kill("b");
        assert!(!is_ready(&net), "it shows that copies are missing");
        net.run_for(SECOND * 5);
        // nobody has read a key
        keys.iter().for_each(|key| assert_eq!(copies(&net, key), 2, "{key}"));
        assert!(is_ready(&net), "and when they are there again");
    });
}

#[test]
fn cache_06_quorum_not_met_says_ok() {
    let operations: [fn(&str) -> Operation; 3] =
        [|key| put_of(&config(), key, 2).1, delete_of, |_| Operation::Write(WriteOp::DeleteAll)];
    for operation in operations {
        for stranger_asks in [false, true] {
            let cache = config().replicas(3);
            let mut net = Net::of(1, &["a", "b", "c", "d"], &cache);
            let partition = PartitionId::new(0);
            let Owners { primary, others, stranger } = owners(&net, partition);
            let key = key_of(&cache, partition);
            assert!(net.put("b", &key, 1).is_ok());
            // both replicas are cut from the primary, and the view does not know yet
            others.iter().for_each(|other| net.cut(&primary, other));
            let asker = if stranger_asks { &stranger } else { &primary };
            let error = net.operate(asker, partition, operation(&key), |_| {}).unwrap_err();
            assert!(
                matches!(error, CacheError::NotEnoughAcks { got: 1, need: 2 }),
                "asked by {asker}: {error}"
            );
            assert_eq!(error.applied(), Applied::Unknown);
        }
    }
}

// caught by: a forwarded write made again because its time at the primary was over: under load, five times
#[test]
fn cache_06_a_write_that_slow_owners_do_not_confirm_in_time_is_made_once() {
    for stranger_asks in [false, true] {
        let cache = config().replicas(3);
        let mut net = Net::of(1, &["a", "b", "c", "d"], &cache);
        let partition = PartitionId::new(0);
        let Owners { primary, stranger, .. } = owners(&net, partition);
        let key = key_of(&cache, partition);
        assert!(net.put("b", &key, 1).is_ok());
        let end = |net: &Net| net.node(&primary).store(partition).unwrap().0.applied().map(|end| end.seq);
        let before = end(&net).unwrap();
        let ack = |message: &ReplicaMessage| matches!(message, ReplicaMessage::Ack { .. });
        net.hold = Some(Box::new(
            move |_, _, message| matches!(message, CacheMessage::Replica { message, .. } if ack(message)),
        ));
        let asker = if stranger_asks { &stranger } else { &primary };
        let error = net.operate(asker, partition, put_of(&cache, &key, 2).1, |_| {}).unwrap_err();
        assert_eq!(error, CacheError::NotEnoughAcks { got: 1, need: 2 }, "asked by {asker}");
        net.hold = None;
        net.run_for(SECOND * 5);
        assert_eq!(end(&net), Some(before + 1), "asked by {asker}");
        assert_eq!(net.get(asker, &key), Some(2));
    }
}

// one of two replicas is enough, whichever it is; the other is brought forward when it comes back
#[test]
fn cache_15_last_error_wins() {
    let cache = config().replicas(3);
    for lost in ["a", "c"] {
        for seed in 1..=4 {
            let mut net = Net::of(seed, &["a", "b", "c"], &cache);
            let key = key_at(&net, "b");
            let partition = cache.partition_of(&key.as_str().into());
            net.cut("b", lost);
            assert_eq!(net.put("b", &key, 5).unwrap().outcome, Outcome::Written(1), "without {lost}");
            assert_eq!(net.node("b").status(partition).behind, [peer(lost)], "the one that failed is named");
            net.link("b", lost);
            net.run_for(SECOND * 5);
            for name in ["a", "b", "c"] {
                let (store, active) = net.node(name).store(partition).unwrap();
                assert!(active, "{name}");
                let held =
                    store.get(&key.as_str().into()).next().and_then(|(record, _)| record.get(1)).cloned();
                assert_eq!(held, Some(5.into()), "{name} without {lost}");
                assert_eq!(net.node(name).status(partition).behind, []);
            }
        }
    }
}

#[test]
fn after_one_of_three_died_with_two_copies_everything_is_found() {
    each_seed(|seed| {
        let keys = keys(30);
        let mut net = Net::of(seed, &["a", "b", "c"], &config());
        put_all(&mut net, "a", &keys);
        net.kill("b");
        found_everywhere(&mut net, &keys);
        // whoever wrote first has gone, and what is written now has its copies all the same
        put_all(&mut net, "c", &keys);
        net.run_for(SECOND * 10);
        net.kill("a");
        found_everywhere(&mut net, &keys);
    });
}

#[test]
fn a_join_hides_nothing() {
    each_seed(|seed| {
        let keys = keys(30);
        let mut net = Net::of(seed, &["a", "b"], &config());
        put_all(&mut net, "a", &keys);
        net.open("c", &config());
        net.see(&["a", "b", "c"]);
        found_everywhere(&mut net, &keys);
    });
}

#[test]
fn the_last_of_two_quick_writes_is_the_one_that_every_copy_has() {
    each_seed(|seed| {
        let mut net = Net::of(seed, &["a", "b", "c"], &config().replicas(3));
        for (n, key) in keys(30).iter().enumerate() {
            let at = ["a", "b", "c"][n % 3];
            let begun: Vec<u64> = (0..2)
                .map(|value| {
                    let (partition, put) = put_of(&config(), key, value);
                    net.begin(at, partition, put, |_| {})
                })
                .collect();
            net.run_for(SECOND);
            begun.iter().for_each(|ticket| assert!(net.answer(*ticket).unwrap().is_ok()));
            for name in ["a", "b", "c"] {
                let partition = config().partition_of(&key.as_str().into());
                let (store, _) = net.node(name).store(partition).unwrap();
                let held =
                    store.get(&key.as_str().into()).next().and_then(|(record, _)| record.get(1)).cloned();
                assert_eq!(held, Some(1.into()), "{key} on {name}");
            }
        }
    });
}

#[test]
fn a_read_on_a_node_that_owns_nothing_finds_what_is_there() {
    each_seed(|seed| {
        let mut net = Net::of(seed, &["a", "b", "c", "d"], &config().replicas(1));
        for key in keys(30) {
            assert!(net.put("a", &key, 7).is_ok());
            let partition = config().partition_of(&key.as_str().into());
            for name in ["a", "b", "c", "d"] {
                for mode in [ReadMode::Local, ReadMode::Primary, ReadMode::Quorum] {
                    let read = net.operate(name, partition, get_of(&key), |options| options.read_mode = mode);
                    assert_eq!(value(read.unwrap()), Some(7), "{key} on {name}, {mode}");
                }
            }
        }
    });
}

// caught by: a quorum of whoever answers first
#[test]
fn a_read_by_quorum_is_not_answered_by_one_stale_copy() {
    each_seed(|seed| {
        let cache = config().replicas(3);
        let mut net = Net::of(seed, &["a", "b", "c", "d"], &cache);
        let partition = PartitionId::new(0);
        let key = key_of(&cache, partition);
        let Owners { primary: first, others: [second, third], stranger } = owners(&net, partition);
        assert!(net.put(&stranger, &key, 1).is_ok());
        net.run_for(SECOND);
        // the third copy stays behind
        net.cut(&first, &third);
        assert!(net.put(&stranger, &key, 2).is_ok());
        let quorum = |net: &mut Net| {
            let options = |options: &mut Options| options.read_mode = ReadMode::Quorum;
            net.operate(&stranger, partition, get_of(&key), options)
        };
        assert_eq!(value(quorum(&mut net).unwrap()), Some(2));
        // only the stale one and the primary are left: two of three
        net.cut(&stranger, &second);
        assert_eq!(value(quorum(&mut net).unwrap()), Some(2));
        // the stale one alone is none
        net.cut(&stranger, &first);
        assert_eq!(quorum(&mut net), Err(CacheError::NoQuorum { got: 1, need: 2 }));
        // and it is brought forward
        net.link(&first, &third);
        net.run_for(SECOND * 5);
        let (store, _) = net.node(&third).store(partition).unwrap();
        let held = store.get(&key.as_str().into()).next().and_then(|(record, _)| record.get(1)).cloned();
        assert_eq!(held, Some(2.into()));
    });
}

#[test]
fn a_session_reads_its_own_writes_wherever_it_asks() {
    each_seed(|seed| {
        let mut net = Net::of(seed, &["a", "b", "c"], &config().replicas(3).write_mode(WriteMode::Async));
        for (n, key) in keys(30).iter().enumerate() {
            let at = ["a", "b", "c"][n % 3];
            let partition = config().partition_of(&key.as_str().into());
            let written = net.put(at, key, n as i64).unwrap().version;
            for name in ["a", "b", "c"] {
                for mode in [ReadMode::Local, ReadMode::Primary, ReadMode::Quorum] {
                    let read = net.operate(name, partition, get_of(key), |options| {
                        options.read_mode = mode;
                        options.at_least = written.clone().into_iter().collect();
                    });
                    assert_eq!(value(read.unwrap()), Some(n as i64), "{key} on {name}, {mode}");
                }
            }
            let gone = net.operate(at, partition, delete_of(key), |_| {}).unwrap();
            assert_eq!(gone.outcome, Outcome::Removed(1));
            let read = net.operate("b", partition, get_of(key), |options| {
                options.read_mode = ReadMode::Local;
                options.at_least = gone.version.clone().into_iter().collect();
            });
            assert_eq!(value(read.unwrap()), None);
        }
    });
}

// caught by: silence instead of WriteLost
#[test]
fn a_session_whose_write_was_lost_is_told_so() {
    each_seed(|seed| {
        let cache = config().write_mode(WriteMode::Async);
        let mut net = Net::of(seed, &["a", "b", "c"], &cache);
        let key = key_at(&net, "b");
        let partition = cache.partition_of(&key.as_str().into());
        assert!(net.put("b", &key, 1).is_ok());
        net.run_for(SECOND);
        // the primary answers, and dies before anybody else has it
        net.cut("b", "a");
        net.cut("b", "c");
        let lost = net.put("b", &key, 2).unwrap().version;
        net.kill("b");
        net.run_for(SECOND * 5);
        for mode in [ReadMode::Local, ReadMode::Primary, ReadMode::Quorum] {
            for name in ["a", "c"] {
                let read = net.operate(name, partition, get_of(&key), |options| {
                    options.read_mode = mode;
                    options.at_least = lost.clone().into_iter().collect();
                });
                let version = lost.clone().unwrap();
                assert_eq!(read, Err(CacheError::WriteLost { partition, version }), "{name}, {mode}");
            }
        }
        assert_eq!(net.get("a", &key), Some(1), "without the session");
    });
}

// a deleted key came back after a split
#[test]
fn what_was_deleted_during_a_split_stays_deleted() {
    each_seed(|seed| {
        let keys = keys(30);
        let mut net = Net::of(seed, &["a", "b"], &config().write_mode(WriteMode::Async));
        put_all(&mut net, "a", &keys);
        net.run_for(SECOND);
        net.cut("a", "b");
        for me in ["a", "b"] {
            net.with(me, |node, now| node.handle_view(&[peer(me)], true, now));
        }
        net.run_for(SECOND * 5);
        for key in &keys {
            let partition = config().partition_of(&key.as_str().into());
            let gone = net.operate("a", partition, delete_of(key), |_| {});
            assert_eq!(gone.unwrap().outcome, Outcome::Removed(1));
        }
        net.see(&["a", "b"]);
        net.run_for(SECOND * 10);
        for key in &keys {
            assert_eq!((net.get("a", key), net.get("b", key)), (None, None), "{key}");
        }
    });
}

// caught by: a wait without an end, and an error that says that nobody serves
#[test]
fn a_session_from_before_everything_was_lost_is_told_so() {
    let mut net = Net::of(1, &["a"], &config());
    let partition = config().partition_of(&"key".into());
    let mut token = net.put("a", "key", 1).unwrap().version.unwrap();
    token.epoch.counter += 100;
    net.open("b", &config());
    net.see(&["a", "b"]);
    net.run_for(SECOND * 5);
    for name in ["a", "b"] {
        for mode in [ReadMode::Local, ReadMode::Primary, ReadMode::Quorum] {
            let read = net.operate(name, partition, get_of("key"), |options| {
                options.read_mode = mode;
                options.at_least = vec![token.clone()];
            });
            assert_eq!(
                read,
                Err(CacheError::WriteLost { partition, version: token.clone() }),
                "{name}, {mode}"
            );
        }
    }
}
