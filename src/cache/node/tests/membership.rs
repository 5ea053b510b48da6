//! Who takes part.

use super::*;

fn owners(net: &Net, name: &str) -> BTreeSet<String> {
    let all = PartitionId::all(8).flat_map(|partition| net.node(name).status(partition).wanted);
    all.map(|peer| peer.node.to_string()).collect()
}

// caught by: messages before the Hello, a Hello that is not answered
#[test]
fn cache_02_join_without_sync() {
    each_seed(|seed| {
        let cache = config();
        // opened while alone and linked then; linked and opened then; opened in the middle of a Hello
        for order in 0..4 {
            let mut net = Net::of(seed, &["a"], &cache);
            (0..30).for_each(|n| assert!(net.put("a", &format!("key{n}"), n).is_ok()));
            match order {
                0 => {
                    net.open("b", &cache);
                    net.see(&["a", "b"]);
                }
                1 => {
                    net.bare("b");
                    net.see(&["a", "b"]);
                    net.run();
                    net.open("b", &cache);
                }
                2 => {
                    net.bare("b");
                    net.see(&["a", "b"]);
                    net.open("b", &cache);
                }
                _ => {
                    net.open("b", &cache);
                    net.link("a", "b");
                    net.run();
                    net.see(&["a", "b"]);
                }
            }
            // from the first moment: right or forwarded
            for n in 0..30 {
                assert_eq!(net.get("b", &format!("key{n}")), Some(n), "order {order}");
            }
            net.run_for(SECOND * 10);
            for name in ["a", "b"] {
                assert_eq!(owners(&net, name), BTreeSet::from(["a".into(), "b".into()]), "order {order}");
                let ready = net.node(name).readiness();
                assert!(ready.is_ready(), "order {order}: {ready:?}");
                (0..30).for_each(|n| assert_eq!(net.get(name, &format!("key{n}")), Some(n)));
            }
            for partition in PartitionId::all(8) {
                let digests = ["a", "b"].map(|name| net.node(name).store(partition).unwrap().0.digest());
                assert_eq!(digests[0], digests[1]);
            }
        }
    });
}

// caught by: a node that never answers is left out; a node without the cache is on the ring
#[test]
fn nothing_begins_before_everybody_has_said_whether_it_takes_part() {
    let mut net = Net::new(1);
    net.open("a", &config());
    // b lives and says nothing at all
    net.see(&["a", "b"]);
    net.run_for(SECOND);
    assert_eq!(net.node("a").readiness().unknown, [peer("b")]);
    assert_eq!(net.node("a").readiness().served, 0);
    let key = "k";
    let partition = config().partition_of(&key.into());
    let answer = net.operate("a", partition, get_of(key), |_| {});
    assert_eq!(answer, Err(CacheError::NotActive { partition }));
    // and now that it has no such cache
    net.with("a", |node, now| node.handle_message(&peer("b"), CacheMessage::NotOpen, now));
    net.run_for(SECOND);
    assert_eq!(net.put("a", key, 1).map(|reply| reply.outcome), Ok(Outcome::Written(1)));
    assert_eq!(owners(&net, "a"), BTreeSet::from(["a".into()]));
}

#[test]
fn other_options_take_no_part_and_both_sides_say_so() {
    each_seed(|seed| {
        let mut net = Net::of(seed, &["a", "b"], &config());
        net.open("c", &config().partitions(16));
        net.see(&["a", "b", "c"]);
        net.run_for(SECOND);
        let told: BTreeSet<_> = net
            .events
            .iter()
            .filter_map(|(at, event)| match event {
                CacheEvent::Disagrees {
                    error: CacheError::ConfigMismatch { option, here, there, peer, .. },
                } => Some((
                    at.node.to_string(),
                    peer.node.to_string(),
                    option.clone(),
                    here.clone(),
                    there.clone(),
                )),
                _ => None,
            })
            .collect();
        let line = |at: &str, of: &str, here: &str, there: &str| {
            (at.to_string(), of.to_string(), "partitions".to_string(), here.to_string(), there.to_string())
        };
        let expected = [
            line("a", "c", "8", "16"),
            line("b", "c", "8", "16"),
            line("c", "a", "16", "8"),
            line("c", "b", "16", "8"),
        ];
        assert_eq!(told, BTreeSet::from(expected), "each once");
        assert!(net.put("a", "key", 1).is_ok());
        assert_eq!(net.get("b", "key"), Some(1));
        assert_eq!(owners(&net, "a"), BTreeSet::from(["a".into(), "b".into()]));
    });
}

#[test]
fn another_number_of_shards_takes_no_part() {
    let mut net = Net::of(1, &["a"], &config());
    net.bare("b");
    net.link("a", "b");
    let hello = |shards| CacheMessage::Hello {
        terms: config().terms(),
        shards,
        life: 1,
        draining: false,
        heard: false,
    };
    net.with("a", |node, now| node.handle_message(&peer("b"), hello(16), now));
    let Some((_, CacheEvent::Disagrees { error })) = net.events.last() else { panic!("{:?}", net.events) };
    assert!(error.to_string().contains("shards"), "{error}");
}

// caught by: an Ack of the former life counts for the new one, a remembered answer of it answers the new one
#[test]
fn a_cache_that_is_opened_again_is_another_one() {
    each_seed(|seed| {
        let mut net = Net::of(seed, &["a", "b", "c"], &config());
        (0..40).for_each(|n| assert!(net.put("a", &format!("key{n}"), n).is_ok()));
        net.close("b");
        net.now += Duration::from_millis(1);
        net.open("b", &config());
        net.run_for(SECOND * 10);
        for name in ["a", "b", "c"] {
            (0..40).for_each(|n| assert_eq!(net.get(name, &format!("key{n}")), Some(n), "{name}"));
            assert!(net.node(name).readiness().is_ready(), "{name}");
        }
    });
}

#[test]
fn cache_17_stopping_node_breaks_puts() {
    each_seed(|seed| {
        let mut net = Net::of(seed, &["a", "b", "c"], &config());
        (0..40).for_each(|n| assert!(net.put("a", &format!("key{n}"), n).is_ok()));
        // b stops its cache; it lives, and its links stay up; writes are under way meanwhile
        let begun: Vec<u64> = (0..40)
            .map(|n| {
                let (partition, put) = put_of(&config(), &format!("key{n}"), n + 100);
                net.begin("a", partition, put, |_| {})
            })
            .collect();
        net.close("b");
        net.run_for(SECOND * 5);
        for (n, ticket) in begun.into_iter().enumerate() {
            let answer = net.answer(ticket).unwrap();
            let found = net.get("c", &format!("key{n}"));
            match answer {
                Ok(_) => assert_eq!(found, Some(n as i64 + 100)),
                Err(error) => {
                    assert_eq!(error.applied(), Applied::Unknown, "{error}");
                    assert!(found == Some(n as i64) || found == Some(n as i64 + 100));
                }
            }
        }
        for n in 0..40 {
            assert!(net.put("a", &format!("key{n}"), n + 200).is_ok());
            assert_eq!(net.get("c", &format!("key{n}")), Some(n + 200));
        }
        assert_eq!(owners(&net, "a"), BTreeSet::from(["a".into(), "c".into()]));
        assert!(net.node("a").readiness().is_ready());
    });
}

#[test]
fn a_drained_node_has_handed_over_everything() {
    each_seed(|seed| {
        let mut net = Net::of(seed, &["a", "b", "c"], &config());
        (0..40).for_each(|n| assert!(net.put("a", &format!("key{n}"), n).is_ok()));
        net.with("b", |node, now| node.drain(now));
        assert!(!net.node("b").is_drained());
        for n in 0..40 {
            assert_eq!(net.get("b", &format!("key{n}")), Some(n), "it serves and forwards meanwhile");
        }
        net.run_for(SECOND * 20);
        assert!(net.node("b").is_drained());
        net.kill("b");
        for n in 0..40 {
            assert_eq!(net.get("a", &format!("key{n}")), Some(n));
        }
    });
}

#[test]
fn a_node_alone_is_not_drained_while_it_holds_records() {
    let mut net = Net::of(1, &["a"], &config());
    assert!(net.put("a", "key", 1).is_ok());
    assert!(!net.node("a").is_drained());
    net.with("a", |node, now| node.drain(now));
    net.run_for(SECOND);
    assert!(!net.node("a").is_drained(), "it holds what nobody else has");
    assert_eq!(net.get("a", "key"), Some(1), "it serves until it is closed");
    // somebody comes after all
    net.open("b", &config());
    net.see(&["a", "b"]);
    net.run_for(SECOND * 10);
    assert!(net.node("a").is_drained());
    assert_eq!(net.get("b", "key"), Some(1));
    net.kill("a");
    // and with nothing in it there is nothing to wait for
    let gone = net.operate("b", config().partition_of(&"key".into()), delete_of("key"), |_| {});
    assert_eq!(gone.unwrap().outcome, Outcome::Removed(1));
    net.with("b", |node, now| node.drain(now));
    assert!(net.node("b").is_drained());
}

#[test]
fn a_closed_cache_ends_its_operations_and_hears_nothing() {
    let mut net = Net::of(1, &["a", "b"], &config());
    let key = key_at(&net, "b");
    let (partition, put) = put_of(&config(), &key, 1);
    let sent = net.begin("a", partition, put, |_| {});
    let read = net.begin("a", partition, get_of(&key), |_| {});
    net.with("a", |node, now| node.close(now));
    assert_eq!(net.answer(sent), Some(Err(CacheError::Interrupted)));
    assert_eq!(net.answer(read), Some(Err(CacheError::Stopped)));
    let late = net.begin("a", partition, get_of(&key), |_| {});
    assert_eq!(net.answer(late), Some(Err(CacheError::Stopped)));
    let node = net.node("a");
    assert_eq!(node.poll_timeout(), None);
    assert_eq!(node.in_flight(), (0, 0));
    net.run_for(SECOND);
    assert_eq!(net.node("a").footprint(), net.node("a").peers.len());
}
