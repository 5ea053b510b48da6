//! What a cache is not to be asked, and what it says when the cluster cannot answer: typed errors, never an empty answer.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by it")]

mod caches;
mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use caches::*;
use muster_router::cache::CacheEvent;
use muster_router::cache::{
    Applied, CacheConfig, CacheError, CallOptions, Found, KeyValue, Partition, PartitionId, PatternError,
    ReadMode, Record, SessionToken, Table, Term, TermError, WriteMode, var,
};
use muster_router::transport::link::LinkConfig;
use muster_router::transport::memory::Network;
use muster_router::{ConfigError, Muster, pattern, record};
use support::*;

async fn alone(config: &CacheConfig) -> (Muster, muster_router::cache::Cache) {
    let network = Network::new();
    let [a] = cluster(&network, ["a"]).await;
    let cache = open(&a, config).await;
    ready(std::slice::from_ref(&cache)).await;
    (a, cache)
}

#[tokio::test(start_paused = true)]
async fn options_that_are_not_allowed_are_named_and_nothing_opens() {
    let network = Network::new();
    let [a] = cluster(&network, ["a"]).await;
    for (option, bad) in [
        ("partitions", config().partitions(0)),
        ("replicas", config().replicas(0)),
        ("min_copies", config().min_copies(3)),
        ("operation_timeout", config().operation_timeout(Duration::ZERO)),
        ("name", CacheConfig::new("")),
        ("max_pending", config().max_pending(0)),
    ] {
        match a.cache(bad).await {
            Err(CacheError::Config(error)) => assert_eq!(error.option(), option),
            other => panic!("{option}: {other:?}"),
        }
    }
    let cache = open(&a, &config()).await;
    let other = a.cache(config().replicas(3)).await.unwrap_err();
    assert_eq!(other, CacheError::AlreadyOpen { name: "users".into() });
    assert!(!other.is_retryable());
    assert!(a.cache(config()).await.is_ok());
    drop(cache);
    #[cfg(not(feature = "consensus"))]
    assert!(matches!(
        a.cache(CacheConfig::new("s").write_mode(WriteMode::Strong)).await,
        Err(CacheError::Config(_))
    ));
}

#[tokio::test(start_paused = true)]
async fn records_that_do_not_fit_are_refused_before_anything_is_sent() {
    let bad = config().key_field(1).partition_field(2).max_record_len(100);
    let (_a, cache) = alone(&bad).await;
    let short =
        |given, field, option: &str| CacheError::RecordTooShort { given, field, option: option.into() };
    assert_eq!(cache.put(record!["x"]).await.unwrap_err(), short(1, 2, "partition_field"));
    assert_eq!(cache.put(record!["x", 1]).await.unwrap_err(), short(2, 2, "partition_field"));
    assert_eq!(cache.put(Record::new([])).await.unwrap_err(), short(0, 2, "partition_field"));
    assert_eq!(cache.get(&record!["x", 1]).await.unwrap_err(), short(2, 2, "partition_field"));
    assert_eq!(cache.delete(&record!["x"]).await.unwrap_err(), short(1, 2, "partition_field"));
    let nan = Record::new([Term::Nil, Term::Float(f64::NAN), 1.into()]);
    for error in [cache.put(nan.clone()).await.unwrap_err(), cache.get(&nan).await.unwrap_err()] {
        assert_eq!(error, CacheError::Term(TermError::NotANumber));
    }
    assert!(cache.get_by_key_partition(Term::Float(f64::NAN), 1).await.is_err());
    assert!(cache.delete_by_key_partition(1, Term::Float(f64::NAN)).await.is_err());
    assert!(cache.scan(Partition::Of(Term::Float(f64::NAN)), 0, |n, _| n + 1).is_err());
    let deep = (0..100).fold(Term::Nil, |inner, _| Term::List(vec![inner]));
    assert!(matches!(
        cache.put(Record::new([deep, 1.into(), 1.into()])).await,
        Err(CacheError::Term(TermError::TooDeep { .. }))
    ));
    match cache.put(record!["x".repeat(200), 1, 1]).await.unwrap_err() {
        CacheError::TooLarge { given, max: 100, option, .. } => {
            assert!(given > 200 && option == "max_record_len");
        }
        other => panic!("{other}"),
    }
    let stats = cache.stats();
    assert_eq!((stats.reads, stats.writes), (0, 0), "nothing was begun");
    assert_eq!(cache.get_by_match_object(Partition::All, pattern![_, _, _]).await.unwrap(), []);
}

#[tokio::test(start_paused = true)]
async fn an_arity_that_was_agreed_on_holds_for_records_and_patterns() {
    let (_a, cache) = alone(&config().arity(Some(2))).await;
    assert_eq!(cache.put(record!["k", 1, 2]).await.unwrap_err(), CacheError::Arity { given: 3, allowed: 2 });
    let error = cache.get_by_match(Partition::All, pattern![_, _, _]).await.unwrap_err();
    assert_eq!(error, CacheError::Pattern(PatternError::Arity { given: 3, held: vec![2] }));
}

#[tokio::test(start_paused = true)]
async fn a_pattern_of_other_arity_than_the_records_is_an_error_and_not_an_empty_answer() {
    let network = Network::new();
    let nodes = cluster(&network, ["a", "b"]).await;
    let all = open_all(&nodes, &config()).await;
    all[0].put(record!["k", 1, 2]).await.unwrap();
    let arity = CacheError::Pattern(PatternError::Arity { given: 2, held: vec![3] });
    for cache in &all {
        for partition in [Partition::of("k"), Partition::All] {
            let pattern = || pattern![_, _];
            assert_eq!(cache.get_by_match(partition.clone(), pattern()).await.unwrap_err(), arity);
            assert_eq!(cache.get_by_match_object(partition.clone(), pattern()).await.unwrap_err(), arity);
            assert_eq!(cache.delete_match(partition, pattern()).await.unwrap_err(), arity);
        }
        // records of that arity elsewhere make it a good question
        all[0].put(record!["other", 1]).await.unwrap();
        assert_eq!(cache.get_by_match_object(Partition::All, pattern![_, _]).await.unwrap().len(), 1);
        all[0].delete_key("other").await.unwrap();
        let short = cache.get_by_match(Partition::All, pattern![]).await.unwrap_err();
        assert!(matches!(short, CacheError::Pattern(PatternError::TooShort { .. })), "{short}");
    }
    let many = (0..300).map(muster_router::cache::var);
    let error = all[0].get_by_match(Partition::All, many.collect::<Vec<_>>()).await.unwrap_err();
    assert!(matches!(error, CacheError::Pattern(PatternError::TooManyVariables { .. })));
}

#[tokio::test(start_paused = true)]
async fn unknown_modes_and_modes_that_a_cache_has_not_are_named() {
    for name in ["", "SYNC", "eventual"] {
        let error: ConfigError = name.parse::<WriteMode>().unwrap_err();
        assert_eq!(error.option(), "write_mode");
        assert_eq!(name.parse::<ReadMode>().unwrap_err().option(), "read_mode");
        assert_eq!(name.parse::<Table>().unwrap_err().option(), "table");
    }
    let (_a, cache) = alone(&config()).await;
    let strong = cache.with(CallOptions::new().write_mode(WriteMode::Strong));
    let option = |error: CacheError| match error {
        CacheError::Config(error) => error.option(),
        other => panic!("{other}"),
    };
    assert_eq!(option(strong.put(record!["k"]).await.unwrap_err()), "write_mode");
    assert_eq!(option(strong.put_batch([record!["k"]]).await.unwrap_err()), "write_mode");
    assert_eq!(option(strong.delete_all().await.unwrap_err()), "write_mode");
    for timeout in [Duration::ZERO, Duration::from_secs(86_400)] {
        let error = cache.with(CallOptions::new().timeout(timeout)).get_key("k").await.unwrap_err();
        assert_eq!(option(error), "timeout");
    }
    assert_eq!(cache.get_key("k").await.unwrap(), [], "nothing was put");
    let bags = open(&_a, &CacheConfig::new("bag").table(Table::Bag)).await;
    assert_eq!(option(bags.keyvalue::<u8, u8>("n").unwrap_err()), "table");
    let fields = open(&_a, &CacheConfig::new("fields").partition_field(1)).await;
    assert_eq!(option(fields.keyvalue::<u8, u8>("n").unwrap_err()), "partition_field");
}

#[tokio::test(start_paused = true)]
async fn a_batch_says_which_part_failed_and_keeps_the_rest() {
    let (_a, cache) = alone(&config().arity(Some(2)).max_record_len(100).max_batch_records(5)).await;
    let records = [
        record!["a", 1],
        record!["b"],
        record!["c", "x".repeat(200)],
        Record::new(["d".into(), Term::Float(f64::NAN)]),
        record!["e", 5],
    ];
    match cache.put_batch(records).await.unwrap_err() {
        error @ CacheError::Batch { .. } => {
            assert!(!error.is_retryable());
            let CacheError::Batch { applied, refused, failed } = error else { unreachable!() };
            assert_eq!((applied, failed), (2, vec![]));
            let [(1, CacheError::Arity { .. }), (2, CacheError::TooLarge { .. }), (3, CacheError::Term(_))] =
                &refused[..]
            else {
                panic!("{refused:?}");
            };
        }
        other => panic!("{other}"),
    }
    assert_eq!(cache.get_by_match_object(Partition::All, pattern![_, _]).await.unwrap().len(), 2);
    let six = cache.put_batch((0..6).map(|i| record![i, i])).await.unwrap_err();
    assert!(matches!(six, CacheError::TooLarge { given: 6, max: 5, .. }), "{six}");
    let endless = cache.put_batch(std::iter::repeat_with(|| record![1, 1])).await.unwrap_err();
    assert!(matches!(endless, CacheError::TooLarge { .. }));
}

/// Nodes that differ keep apart, both say so, and each goes on with those that agree.
#[tokio::test(start_paused = true)]
async fn a_partition_count_that_differs_is_told_on_both_sides_with_both_values() {
    let network = Network::new();
    let nodes = cluster(&network, ["a", "b", "c"]).await;
    let a = open(&nodes[0], &config()).await;
    let c = open(&nodes[2], &config()).await;
    ready(&[a.clone(), c.clone()]).await;
    a.put(record!["k", 1]).await.unwrap();
    let (mut at_a, b) = (a.events(), open(&nodes[1], &config().partitions(64)).await);
    let mut at_b = b.events();
    let mut told = Vec::new();
    for events in [&mut at_a, &mut at_b] {
        let mismatch = async {
            loop {
                if let CacheEvent::Disagrees { error } = events.recv().await.expect("open") {
                    return error;
                }
            }
        };
        told.push(tokio::time::timeout(PATIENCE, mismatch).await.expect("it is told"));
    }
    for (error, values, peer) in [(&told[0], ("32", "64"), "b"), (&told[1], ("64", "32"), "")] {
        let CacheError::ConfigMismatch { option, here, there, peer: other, .. } = error else {
            panic!("{error}")
        };
        assert_eq!((option.as_str(), here.as_str(), there.as_str()), ("partitions", values.0, values.1));
        assert!(peer.is_empty() || other.node.as_str() == peer);
    }
    for cache in [&a, &c] {
        assert_eq!(cache.get_key("k").await.unwrap(), [record!["k", 1]]);
        cache.put(record!["k", 1]).await.unwrap();
    }
    assert_eq!(b.get_key("k").await.unwrap(), [], "its own data, apart");
    // it is the one that is not ready, so that a rolling restart stops there
    assert_eq!((b.readiness().is_ready(), b.readiness().nodes), (false, 1));
    assert_eq!(b.readiness().differs, [a.peer().clone(), c.peer().clone()]);
    let text = b.until_ready(Duration::from_secs(1)).await.unwrap_err().to_string();
    assert!(text.contains("options differ from those of a#") && text.ends_with("and 1 more"), "{text}");
    assert_eq!((a.readiness().is_ready(), a.readiness().nodes), (true, 2));
    assert_eq!(a.readiness().differs, [b.peer().clone()]);
    b.put(record!["k", 9]).await.unwrap();
    assert_eq!(a.get_key("k").await.unwrap(), [record!["k", 1]]);
}

/// Case 15 at the handle: whichever partitions cannot answer, they are named, and no later success hides them.
#[tokio::test(start_paused = true)]
async fn cache_15_unreachable_is_an_error_that_names_the_partitions_in_any_order() {
    let network = Network::new();
    let nodes = cluster(&network, ["a", "b", "c"]).await;
    let all = open_all(&nodes, &config().replicas(1)).await;
    fill(&all[0], 200, "v").await;
    let numbers: Vec<u64> = (0..50).collect();
    for silent in ["b", "c"] {
        let values: KeyValue<u64, u64> = all[0].keyvalue("numbers").unwrap();
        assert_eq!(values.put_many(numbers.iter().zip(&numbers)).await.unwrap(), 50);
        let hasty = all[0].with(CallOptions::new().timeout(Duration::from_millis(100)));
        let theirs: Vec<PartitionId> = partitions(&all[0])
            .filter(|status| status.primary.as_ref().unwrap().node.as_str() == silent)
            .map(|status| status.partition)
            .collect();
        assert!(!theirs.is_empty() && theirs.len() < 32);
        network.freeze(silent);
        match hasty.get_by_match_object(Partition::All, pattern![_, _]).await.unwrap_err() {
            CacheError::Partial { found: Found::Records(found), missing } => {
                assert_eq!(missing.iter().map(|(partition, _)| *partition).collect::<Vec<_>>(), theirs);
                let late = |error: &CacheError| matches!(error, CacheError::Timeout { applied: Applied::No });
                assert!(missing.iter().all(|(_, error)| late(error)), "{missing:?}");
                assert!(!found.is_empty() && found.len() < 200);
            }
            other => panic!("{other}"),
        }
        match hasty.put_batch((0..200).map(|i| user(i, silent))).await.unwrap_err() {
            error @ CacheError::Batch { .. } => {
                assert_eq!(error.applied(), Applied::Unknown);
                let CacheError::Batch { applied, refused, failed } = error else { unreachable!() };
                let names: Vec<_> = failed.iter().map(|(partition, _)| *partition).collect();
                assert!(names.iter().all(|name| theirs.contains(name)) && names.len() > 1, "{names:?}");
                assert!(applied > 0 && applied < 200 && refused.is_empty());
                // the rest is there
                let mut kept = 0;
                for record in (0..200).map(|i| user(i, silent)) {
                    let key = record.get(0).unwrap().clone();
                    if !names.contains(&all[0].partition_of(key.clone())) {
                        assert_eq!(all[0].get_key(key).await.unwrap(), [record]);
                        kept += 1;
                    }
                }
                assert_eq!(kept, applied);
            }
            other => panic!("{other}"),
        }
        let hasty_values: KeyValue<u64, u64> = hasty.keyvalue("numbers").unwrap();
        match hasty_values.get_many(&numbers).await.unwrap_err() {
            error @ CacheError::Partial { .. } => {
                assert!(error.is_retryable() && error.applied() == Applied::No);
                let CacheError::Partial { found: Found::Records(found), missing } = error else {
                    unreachable!()
                };
                assert!(!found.is_empty() && found.len() < 50);
                assert!(!missing.is_empty() && missing.iter().all(|(name, _)| theirs.contains(name)));
            }
            other => panic!("{other}"),
        }
        let key = key_at(&all[0], silent, 0);
        let read = hasty.get_key(key.as_str()).await.unwrap_err();
        assert_eq!(read.applied(), Applied::No, "{read}");
        let write = hasty.delete_key(key.as_str()).await.unwrap_err();
        assert_eq!(write.applied(), Applied::Unknown, "{write}");
        network.thaw(silent);
        settled(&nodes, &all).await;
    }
    match all[0].delete_all().await {
        Ok(removed) => assert_eq!(removed, 250),
        Err(error) => panic!("{error}"),
    }
}

#[tokio::test(start_paused = true)]
async fn after_the_end_every_operation_says_stopped() {
    let network = Network::new();
    let nodes = cluster(&network, ["a", "b"]).await;
    let all = open_all(&nodes, &config()).await;
    let (cache, session) = (all[0].clone(), all[0].session());
    let mut events = cache.events();
    nodes[0].shutdown().await;
    let stopped = CacheError::Stopped;
    assert!(cache.is_closed() && !stopped.is_retryable());
    assert_eq!(cache.put(record!["k"]).await.unwrap_err(), stopped);
    assert_eq!(session.put(record!["k"]).await.unwrap_err(), stopped);
    assert_eq!(cache.get_key("k").await.unwrap_err(), stopped);
    assert_eq!(cache.get(&record!["k"]).await.unwrap_err(), stopped);
    assert_eq!(cache.get_by_key_partition("k", "k").await.unwrap_err(), stopped);
    assert_eq!(cache.delete(&record!["k"]).await.unwrap_err(), stopped);
    assert_eq!(cache.delete_key("k").await.unwrap_err(), stopped);
    assert_eq!(cache.delete_by_key_partition("k", "k").await.unwrap_err(), stopped);
    assert_eq!(cache.get_by_match(Partition::All, pattern![_]).await.unwrap_err(), stopped);
    assert_eq!(cache.get_by_match_object(Partition::of(1), pattern![_]).await.unwrap_err(), stopped);
    assert_eq!(cache.delete_match(Partition::All, pattern![_]).await.unwrap_err(), stopped);
    assert_eq!(cache.delete_all().await.unwrap_err(), stopped);
    assert_eq!(cache.scan(Partition::All, 0, |n, _| n + 1).unwrap_err(), stopped);
    assert_eq!(cache.accept_loss(PartitionId::new(0)).unwrap_err(), stopped);
    assert_eq!(cache.put_batch([record!["k"]]).await.unwrap_err(), stopped);
    assert_eq!(nodes[0].cache(config()).await.unwrap_err(), stopped);
    let not_ready = cache.until_ready(PATIENCE).await.unwrap_err();
    assert!(not_ready.closed && !not_ready.is_retryable());
    assert!(cache.drain(Duration::from_secs(1)).await.unwrap_err().stopped);
    while events.recv().await.is_some() {}
    assert_eq!(cache.events().recv().await, None);
    cache.on_conflict(|_, _| {});
    cache.close();
}

#[tokio::test(start_paused = true)]
async fn operations_that_wait_end_when_the_scope_does() {
    let network = Network::new();
    let nodes = cluster(&network, ["a", "b"]).await;
    let all = open_all(&nodes, &config()).await;
    let key = key_at(&all[0], "b", 0);
    network.freeze("b");
    let (read, write) = (all[0].clone(), all[0].clone());
    let (k1, k2) = (key.clone(), key.clone());
    let reading = tokio::spawn(async move { read.get_key(k1).await });
    let writing = tokio::spawn(async move { write.put(record![k2.as_str()]).await });
    eventually("both wait", || all[0].stats().pending == 2).await;
    nodes[0].shutdown().await;
    assert_eq!(reading.await.unwrap().unwrap_err(), CacheError::Stopped);
    let interrupted = writing.await.unwrap().unwrap_err();
    assert_eq!(interrupted, CacheError::Interrupted);
    assert_eq!(interrupted.applied(), Applied::Unknown);
    assert_eq!(all[0].stats().pending, 0);
}

#[tokio::test(start_paused = true)]
async fn more_than_may_wait_is_refused() {
    let network = Network::new();
    let nodes = cluster(&network, ["a", "b"]).await;
    let all = open_all(&nodes, &config().max_pending(3)).await;
    let key = key_at(&all[0], "b", 0);
    network.freeze("b");
    let reads = (0..5).map(|_| {
        let (cache, key) = (all[0].with(CallOptions::new().timeout(Duration::from_millis(100))), key.clone());
        tokio::spawn(async move { cache.get_key(key).await.unwrap_err() })
    });
    let mut errors = Vec::new();
    for read in reads.collect::<Vec<_>>() {
        errors.push(read.await.unwrap());
    }
    assert_eq!(errors.iter().filter(|error| **error == CacheError::Busy).count(), 2, "{errors:?}");
    assert_eq!(all[0].stats().busy, 2);
    network.thaw("b");
}

#[tokio::test(start_paused = true)]
async fn tokens_of_others_and_partitions_that_do_not_exist_are_refused() {
    let (a, cache) = alone(&config()).await;
    let session = cache.session();
    session.put(record!["k"]).await.unwrap();
    let other = open(&a, &CacheConfig::new("other").partitions(1)).await;
    let error = other.session_from(&session.token()).unwrap_err();
    assert!(error.to_string().contains("cache \"users\""), "{error}");
    // the same cache with fewer partitions, elsewhere
    let (_b, small) = alone(&config().partitions(1)).await;
    let named_too_much = cache.partition_of("k").get() > 0;
    assert_eq!(small.session_from(&session.token()).is_err(), named_too_much);
    assert!("AQ".parse::<SessionToken>().is_err());
    match cache.accept_loss(PartitionId::new(32)).unwrap_err() {
        CacheError::TooLarge { given: 32, max: 31, .. } => {}
        other => panic!("{other}"),
    }
    cache.accept_loss(PartitionId::new(31)).unwrap();
    assert_eq!(cache.get_key("k").await.unwrap().len(), 1, "there was nothing to lose");
}

#[tokio::test(start_paused = true)]
async fn a_closed_cache_is_not_opened_again_in_the_same_life() {
    let (a, cache) = alone(&config()).await;
    let seen = Arc::new(AtomicUsize::new(0));
    let counter = seen.clone();
    cache.on_conflict(move |_, _| {
        counter.fetch_add(1, Ordering::SeqCst);
    });
    cache.close();
    cache.close();
    assert_eq!(cache.get_key("k").await.unwrap_err(), CacheError::Stopped);
    assert_eq!(a.cache(config()).await.unwrap_err(), CacheError::Closed { name: "users".into() });
    assert!(a.cache(CacheConfig::new("another")).await.is_ok());
    eventually("its callback's task has ended", || Arc::strong_count(&seen) == 1).await;
    a.drain(PATIENCE).await.unwrap();
    assert_eq!(a.cache(CacheConfig::new("third")).await.unwrap_err(), CacheError::Draining);
}

/// What the transport cannot carry is refused when the cache opens, or when it is asked for; nothing is lost silently.
#[tokio::test(start_paused = true)]
async fn what_no_frame_can_carry_is_refused_by_name() {
    let link = LinkConfig { max_frame: 1 << 20, ping_interval: None, ..LinkConfig::default() };
    let network = Network::builder().link(link).build();
    let mut nodes = Vec::new();
    for name in ["a", "b"] {
        let node = Muster::builder("rooms").transport(network.node(name)).max_payload_len(64 << 10);
        nodes.push(node.start().await.unwrap());
    }
    settle(&nodes).await;
    for (config, option, given) in [
        (config(), "max_record_len + 256 KiB", "1310720"),
        (config().max_record_len(1 << 10).chunk_bytes(1 << 20), "2 * chunk_bytes + 256 KiB", "2359296"),
    ] {
        let CacheError::Config(error) = nodes[0].cache(config).await.unwrap_err() else { panic!("{option}") };
        assert_eq!(error.option(), option);
        let text = error.to_string();
        assert!(text.contains(given) && text.contains("max_frame of the transport is 1048576"), "{text}");
    }
    let small = config().partitions(1).replicas(1).table(Table::Bag).max_record_len(64 << 10);
    let all = open_all(&nodes, &small).await;
    let (owner, other) = match primary_of(&all[0], "k").as_deref() {
        Some("a") => (&all[0], &all[1]),
        _ => (&all[1], &all[0]),
    };
    let large = "x".repeat(2000);
    assert_eq!(other.put_batch((0..1000).map(|i| record!["k", i, large.as_str()])).await.unwrap(), 1000);
    let too_large = |error: CacheError, what: &str| match &error {
        CacheError::TooLarge { what: of, given, max, option } => {
            assert!(of == what && given > max && option == "max_frame of the transport", "{error}");
            assert_eq!(error.applied(), Applied::No);
        }
        _ => panic!("{error}"),
    };
    for reader in [other.clone(), other.with(CallOptions::new().read_mode(ReadMode::Quorum))] {
        too_large(reader.get_key("k").await.unwrap_err(), "the answer in bytes");
        for partition in [Partition::All, Partition::of("k")] {
            let all_of_it = || pattern![_, _, _];
            let error = reader.get_by_match_object(partition.clone(), all_of_it()).await.unwrap_err();
            too_large(error, "the answer in bytes");
            let error = reader.get_by_match(partition, pattern![_, _, var(0)]).await.unwrap_err();
            too_large(error, "the answer in bytes");
        }
        assert_eq!(reader.get_by_match(Partition::All, pattern![_, var(0), _]).await.unwrap().len(), 1000);
    }
    assert_eq!(owner.get_key("k").await.unwrap().len(), 1000, "nothing travels");
    let endless = "x".repeat(1 << 20);
    let pattern = || pattern![_, _, endless.as_str()];
    too_large(other.get_by_match(Partition::All, pattern()).await.unwrap_err(), "the operation in bytes");
    for cache in [owner, other] {
        // what a write may do does not depend on where it begins
        too_large(cache.delete_match(Partition::All, pattern()).await.unwrap_err(), "the operation in bytes");
    }
    assert_eq!(other.delete_match(Partition::All, pattern![_, _, _]).await.unwrap(), 1000);
    assert_eq!(other.get_key("k").await.unwrap(), []);
}
