//! All operations of the cache, from owners and from others, on the four kinds of tables.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by it")]

mod caches;
mod support;

use std::collections::BTreeMap;
use std::time::Duration;

use caches::*;
use muster_router::cache::{
    Applied, CacheConfig, CacheError, CallOptions, KeyValue, Partition, ReadMode, RecordPattern, Table, Term,
    WriteMode, var,
};
use muster_router::transport::memory::Network;
use muster_router::{pattern, record};
use support::*;

#[tokio::test(start_paused = true)]
async fn what_one_node_puts_every_node_gets_and_deletes() {
    let network = Network::new();
    let nodes = cluster(&network, ["a", "b", "c"]).await;
    let all = open_all(&nodes, &config()).await;
    for (w, writer) in all.iter().enumerate() {
        for primary in ["a", "b", "c"] {
            let key = key_at(writer, primary, w);
            writer.put(record![key.as_str(), w as i64]).await.unwrap();
            for reader in &all {
                let found = reader.get_key(key.as_str()).await.unwrap();
                assert_eq!(found, [record![key.as_str(), w as i64]], "{w} wrote, {} reads", reader.peer());
                let by_record = reader.get(&record![key.as_str()]).await.unwrap();
                assert_eq!(by_record, found, "other fields are not looked at");
            }
            let deleter = &all[(w + 1) % 3];
            assert_eq!(deleter.delete(&record![key.as_str(), "whatever"]).await.unwrap(), 1);
            assert_eq!(deleter.delete_key(key.as_str()).await.unwrap(), 0, "it is gone");
            for reader in &all {
                assert_eq!(reader.get_key(key.as_str()).await.unwrap(), []);
            }
        }
    }
    // a default read where there is no copy finds what there is
    let key = key_at(&all[0], "a", 0);
    all[0].put(record![key.as_str()]).await.unwrap();
    let owners = holders(&all, all[0].partition_of(key.as_str()));
    assert_eq!(owners.len(), 2);
    let stranger = all.iter().find(|cache| !owners.contains(&name(cache))).unwrap();
    assert_eq!(stranger.get_key(key.as_str()).await.unwrap().len(), 1);
}

#[tokio::test(start_paused = true)]
async fn the_four_tables_keep_what_they_promise_on_every_node() {
    let network = Network::new();
    let nodes = cluster(&network, ["a", "b", "c"]).await;
    for (table, left) in [(Table::Set, 1), (Table::OrderedSet, 1), (Table::Bag, 2), (Table::DuplicateBag, 3)]
    {
        let all = open_all(&nodes, &CacheConfig::new(table.to_string()).table(table).partitions(8)).await;
        for (cache, value) in all.iter().zip([1, 2, 1]) {
            cache.put(record!["k", value]).await.unwrap();
        }
        for cache in &all {
            let mut found = cache.get_key("k").await.unwrap();
            found.sort();
            let expected: Vec<_> = match table {
                Table::Set | Table::OrderedSet => vec![record!["k", 1]],
                Table::Bag => vec![record!["k", 1], record!["k", 2]],
                Table::DuplicateBag => vec![record!["k", 1], record!["k", 1], record!["k", 2]],
            };
            assert_eq!(found, expected, "{table}");
        }
        let one = all[2].delete_match(Partition::of("k"), pattern!["k", 2]).await.unwrap();
        assert_eq!(one, u64::from(!table.is_set()), "{table}");
        assert_eq!(all[1].delete_key("k").await.unwrap(), left - one, "{table}");
    }
}

#[tokio::test(start_paused = true)]
async fn key_and_partition_may_be_different_fields() {
    let network = Network::new();
    let nodes = cluster(&network, ["a", "b", "c"]).await;
    let all = open_all(&nodes, &config().key_field(1).partition_field(0)).await;
    all[0]
        .put_batch([record!["oslo", 1, "x"], record!["oslo", 2, "y"], record!["rome", 1, "z"]])
        .await
        .unwrap();
    for cache in &all {
        assert_eq!(cache.get_by_key_partition(1, "oslo").await.unwrap(), [record!["oslo", 1, "x"]]);
        assert_eq!(cache.get_by_key_partition(1, "rome").await.unwrap(), [record!["rome", 1, "z"]]);
        assert_eq!(cache.get_by_key_partition(2, "rome").await.unwrap(), []);
        let error = cache.get_key(1).await.unwrap_err();
        assert_eq!(error, CacheError::KeyIsNotPartition { key_field: 1, partition_field: 0 });
        assert_eq!(cache.delete_key(1).await.unwrap_err(), error);
    }
    assert_eq!(all[1].delete_by_key_partition(1, "oslo").await.unwrap(), 1);
    assert_eq!(all[2].get(&record!["oslo", 1]).await.unwrap(), []);
    assert_eq!(all[2].get(&record!["rome", 1]).await.unwrap().len(), 1, "the other partition keeps its own");
    // where both are one field, another term names no record
    let same = open_all(&nodes, &CacheConfig::new("same")).await;
    same[0].put(record!["k"]).await.unwrap();
    assert_eq!(same[1].get_by_key_partition("k", "k").await.unwrap().len(), 1);
    assert_eq!(same[1].get_by_key_partition("k", "other").await.unwrap(), []);
    assert_eq!(same[1].delete_by_key_partition("k", "other").await.unwrap(), 0);
}

#[tokio::test(start_paused = true)]
async fn patterns_are_answered_by_one_partition_or_by_all() {
    let network = Network::new();
    let nodes = cluster(&network, ["a", "b", "c"]).await;
    let all = open_all(&nodes, &config().partition_field(1)).await;
    let people = [("ada", "oslo", 36), ("bob", "oslo", 36), ("eve", "rome", 7), ("kim", "lima", 7)];
    all[0].put_batch(people.map(|(who, town, age)| record![who, town, age])).await.unwrap();
    for cache in &all {
        let in_oslo =
            cache.get_by_match(Partition::of("oslo"), pattern![var(9), "oslo", var(1)]).await.unwrap();
        let expected: [[Term; 2]; 2] = [[36.into(), "ada".into()], [36.into(), "bob".into()]];
        assert_eq!(in_oslo, expected, "variables in the order of their numbers");
        let mut sevens = cache.get_by_match(Partition::All, pattern![var(0), _, 7]).await.unwrap();
        sevens.sort();
        assert_eq!(sevens, [["eve".into()], ["kim".into()]] as [[Term; 1]; 2]);
        // the pattern names the partition
        let exact = cache.get_by_match_object(Partition::All, pattern![_, "rome", _]).await.unwrap();
        assert_eq!(exact, [record!["eve", "rome", 7]]);
        // and another partition than asked for has none of it
        let none = cache.get_by_match_object(Partition::of("oslo"), pattern![_, "rome", _]).await.unwrap();
        assert_eq!(none, []);
        let same = cache.get_by_match(Partition::All, pattern![var(1), var(1), _]).await.unwrap();
        assert_eq!(same, [[]; 0] as [[Term; 0]; 0], "a variable twice fits equal values only");
        let pattern = RecordPattern::new(pattern![_, _, _]).unwrap();
        assert_eq!(cache.get_by_match_object(Partition::All, &pattern).await.unwrap().len(), 4);
    }
    assert_eq!(all[1].delete_match(Partition::All, pattern![_, _, 36]).await.unwrap(), 2);
    assert_eq!(all[2].delete_match(Partition::of("rome"), pattern![_, "rome", _]).await.unwrap(), 1);
    assert_eq!(all[0].get_by_match_object(Partition::All, pattern![_, _, _]).await.unwrap().len(), 1);
    assert_eq!(all[0].delete_all().await.unwrap(), 1);
    assert_eq!(all[2].delete_all().await.unwrap(), 0);
}

#[tokio::test(start_paused = true)]
async fn an_ordered_set_gives_all_in_the_order_of_keys() {
    let network = Network::new();
    let nodes = cluster(&network, ["a", "b"]).await;
    let all = open_all(&nodes, &config().table(Table::OrderedSet)).await;
    all[0].put_batch((0..100).rev().map(|i| record![i, i * 2])).await.unwrap();
    let records = all[1].get_by_match_object(Partition::All, pattern![_, _]).await.unwrap();
    assert_eq!(records, (0..100).map(|i| record![i, i * 2]).collect::<Vec<_>>());
    let values = all[1].get_by_match(Partition::All, pattern![_, var(0)]).await.unwrap();
    assert_eq!(values, (0..100).map(|i| vec![Term::from(i * 2)]).collect::<Vec<_>>());
}

#[tokio::test(start_paused = true)]
async fn a_batch_reaches_all_partitions_and_keeps_its_order_within_a_key() {
    let network = Network::new();
    let nodes = cluster(&network, ["a", "b", "c"]).await;
    let all = open_all(&nodes, &config()).await;
    fill(&all[1], 1000, "v").await;
    for cache in &all {
        assert_eq!(readable(cache, 1000, "v").await, 1000);
    }
    // more than travels in one piece, each key twice
    let large = "x".repeat(40_000);
    let records = (0..60).map(|i| record![format!("large:{}", i % 30), i, large.as_str()]);
    assert_eq!(all[2].put_batch(records).await.unwrap(), 60);
    for i in 0..30 {
        let found = all[0].get_key(format!("large:{i}")).await.unwrap();
        assert_eq!(found[0].get(1), Some(&Term::from(i + 30)), "the later one stays");
    }
    assert_eq!(all[0].put_batch([]).await.unwrap(), 0);
}

#[tokio::test(start_paused = true)]
async fn a_scan_says_whether_this_node_has_it_all() {
    let network = Network::new();
    let nodes = cluster(&network, ["a", "b", "c"]).await;
    let all = open_all(&nodes, &config().replicas(1)).await;
    fill(&all[0], 300, "v").await;
    let here: Vec<_> = all.iter().map(|c| c.scan(Partition::All, 0, |n, _| n + 1).unwrap()).collect();
    assert_eq!(here.iter().map(|scan| scan.value).sum::<i32>(), 300, "each record is on one node");
    assert!(here.iter().all(|scan| !scan.complete && scan.value > 0), "{here:?}");
    let owner = primary_of(&all[0], "user:7").unwrap();
    for cache in &all {
        let keys = |mut keys: Vec<Term>, record: &muster_router::cache::Record| {
            keys.extend(record.get(0).cloned());
            keys
        };
        let scan = cache.scan(Partition::of("user:7"), Vec::new(), keys).unwrap();
        assert_eq!(scan.complete, name(cache) == owner);
        assert_eq!(scan.value.contains(&"user:7".into()), name(cache) == owner);
    }
    let everywhere = open_all(&nodes, &CacheConfig::new("everywhere").replicas(3).partitions(8)).await;
    fill(&everywhere[0], 300, "v").await;
    eventually("all copies have all", || {
        everywhere.iter().all(|cache| {
            let scan = cache.scan(Partition::All, 0, |n, _| n + 1).unwrap();
            scan.complete && scan.value == 300
        })
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn one_call_may_choose_its_mode() {
    let network = Network::new();
    let nodes = cluster(&network, ["a", "b", "c"]).await;
    let all = open_all(&nodes, &config().replicas(3)).await;
    for write_mode in [WriteMode::Async, WriteMode::Sync] {
        for read_mode in [ReadMode::Local, ReadMode::Primary, ReadMode::Quorum] {
            let key = format!("{write_mode} {read_mode}");
            let with = |i: usize| all[i].with(CallOptions::new().write_mode(write_mode).read_mode(read_mode));
            let primary = all.iter().position(|c| Some(name(c)) == primary_of(c, key.as_str())).unwrap();
            with(primary).put(record![key.as_str()]).await.unwrap();
            // the primary sees its own write in every mode
            assert_eq!(with(primary).get_key(key.as_str()).await.unwrap().len(), 1, "{key}");
            for i in 0..3 {
                let found = with(i).get_key(key.as_str()).await.unwrap().len();
                assert!(found == 1 || (found == 0 && read_mode != ReadMode::Primary), "{key}");
                if (write_mode, read_mode) == (WriteMode::Sync, ReadMode::Quorum) {
                    assert_eq!(found, 1, "two majorities meet");
                }
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_local_read_at_an_owner_asks_nobody() {
    let network = Network::new();
    let nodes = cluster(&network, ["a", "b", "c"]).await;
    let all = open_all(&nodes, &config().replicas(3).read_mode(ReadMode::Local)).await;
    fill(&all[0], 50, "v").await;
    eventually("all copies have all", || {
        all.iter().all(|c| c.scan(Partition::All, 0, |n, _| n + 1).unwrap().value == 50)
    })
    .await;
    for cache in &all {
        let before = cache.stats();
        assert_eq!(readable(cache, 50, "v").await, 50);
        assert_eq!(cache.stats().reads_at_once - before.reads_at_once, 50);
        assert_eq!(cache.stats().reads - before.reads, 50);
    }
}

#[tokio::test(start_paused = true)]
async fn values_by_key_in_namespaces_of_one_cache() {
    #[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
    enum State {
        Online { since: u64 },
        Away(String),
    }
    let network = Network::new();
    let nodes = cluster(&network, ["a", "b", "c"]).await;
    let all = open_all(&nodes, &config()).await;
    let here: KeyValue<(u32, String), State> = all[0].keyvalue("states").unwrap();
    let there: KeyValue<(u32, String), State> = all[1].keyvalue("states").unwrap();
    let other: KeyValue<(u32, String), u8> = all[1].keyvalue("numbers").unwrap();
    let (ada, bob, eve) = ((1, "ada".to_string()), (2, "bob".to_string()), (3, "eve".to_string()));
    let away = State::Away("lunch".into());
    here.put(&ada, &State::Online { since: 7 }).await.unwrap();
    other.put(&ada, &9).await.unwrap();
    assert_eq!(there.get(&ada).await.unwrap(), Some(State::Online { since: 7 }));
    assert_eq!(there.get(&bob).await.unwrap(), None);
    assert_eq!(other.get(&ada).await.unwrap(), Some(9));
    assert_eq!(there.put_many([(&ada, &away), (&bob, &away)]).await.unwrap(), 2);
    let many = here.get_many([&bob, &eve, &ada]).await.unwrap();
    assert_eq!(many, [Some(away.clone()), None, Some(away.clone())]);
    let entries: BTreeMap<_, _> = here.entries().await.unwrap().into_iter().map(|(k, _)| (k, ())).collect();
    assert_eq!(entries.into_keys().collect::<Vec<_>>(), [ada.clone(), bob.clone()]);
    assert!(there.contains(&bob).await.unwrap());
    assert!(there.remove(&bob).await.unwrap() && !there.remove(&bob).await.unwrap());
    assert_eq!(here.clear().await.unwrap(), 1);
    assert_eq!((here.entries().await.unwrap().len(), other.get(&ada).await.unwrap()), (0, Some(9)));
    // what was written as another type is an error, not a missing value
    let confused: KeyValue<(u32, String), State> = all[2].keyvalue("numbers").unwrap();
    assert!(matches!(confused.get(&ada).await, Err(CacheError::Term(_))));
    assert!(matches!(confused.entries().await, Err(CacheError::Term(_))));
}

#[tokio::test(start_paused = true)]
async fn what_is_no_term_is_named_among_many() {
    let network = Network::new();
    let nodes = cluster(&network, ["a"]).await;
    let all = open_all(&nodes, &config().max_record_len(100)).await;
    let values: KeyValue<u64, String> = all[0].keyvalue("v").unwrap();
    let (short, long) = ("x".to_string(), "x".repeat(200));
    let pairs = [(&1, &short), (&u64::MAX, &short), (&2, &long), (&3, &short)];
    match values.put_many(pairs).await.unwrap_err() {
        CacheError::Batch { applied, refused, failed } => {
            assert_eq!((applied, failed.len()), (2, 0));
            assert!(matches!(refused[..], [(1, CacheError::Term(_)), (2, CacheError::TooLarge { .. })]));
        }
        other => panic!("{other}"),
    }
    assert_eq!(values.get_many([&1, &2, &3]).await.unwrap(), [Some(short.clone()), None, Some(short)]);
    assert!(values.get(&u64::MAX).await.is_err());
}

// caught by: all keys gathered before anybody counts them
#[tokio::test(start_paused = true)]
async fn many_without_end_are_too_many() {
    let network = Network::new();
    let nodes = cluster(&network, ["a"]).await;
    let all = open_all(&nodes, &config().max_batch_records(3)).await;
    let values: KeyValue<u64, u64> = all[0].keyvalue("v").unwrap();
    let too_many = |error: CacheError| match error {
        CacheError::TooLarge { given: 4, max: 3, option, .. } => assert_eq!(option, "max_batch_records"),
        other => panic!("{other}"),
    };
    too_many(values.put_many(std::iter::repeat((&1, &2))).await.unwrap_err());
    too_many(values.get_many(std::iter::repeat(&1)).await.unwrap_err());
    assert_eq!(values.put_many([(&1, &2), (&2, &3), (&3, &4)]).await.unwrap(), 3);
    assert_eq!(values.get_many([&1, &2, &9]).await.unwrap(), [Some(2), Some(3), None]);
}

// ---- sessions

#[tokio::test(start_paused = true)]
async fn a_session_reads_its_own_writes_on_every_node_and_in_every_mode() {
    let network = Network::new();
    let nodes = cluster(&network, ["a", "b", "c"]).await;
    let all = open_all(&nodes, &config().replicas(3).write_mode(WriteMode::Async)).await;
    // what a primary sends to its replicas takes half a second
    for (from, to) in [("a", "b"), ("a", "c"), ("b", "a"), ("b", "c"), ("c", "a"), ("c", "b")] {
        network.delay(from, to, Duration::from_millis(150)..Duration::from_millis(151));
    }
    let local = CallOptions::new().read_mode(ReadMode::Local);
    let mut behind = 0;
    for round in 0..6 {
        let primary = ["a", "b", "c"][round % 3];
        let writer = all.iter().find(|cache| name(cache) == primary).unwrap();
        let session = writer.session();
        let key = key_at(writer, primary, round);
        session.put(record![key.as_str(), 1]).await.unwrap();
        session.put_batch([record![key.as_str(), 2]]).await.unwrap();
        let token = session.token();
        for cache in all.iter().filter(|cache| name(cache) != primary) {
            behind += usize::from(cache.with(local).get_key(key.as_str()).await.unwrap().is_empty());
            let followed = cache.session_from(&token.to_string().parse().unwrap()).unwrap();
            let found = followed.with(local).get_key(key.as_str()).await.unwrap();
            assert_eq!(found, [record![key.as_str(), 2]], "{} reads what {primary} wrote", cache.peer());
        }
        // a delete is a write, too
        assert_eq!(session.delete_key(key.as_str()).await.unwrap(), 1);
        let elsewhere = all.iter().find(|cache| name(cache) != primary).unwrap();
        let followed = elsewhere.session_from(&session.token()).unwrap();
        assert_eq!(followed.with(local).get_key(key.as_str()).await.unwrap(), []);
    }
    assert!(behind > 0, "without a session a local read is behind");
}

#[tokio::test(start_paused = true)]
async fn a_session_remembers_the_highest_write_of_each_partition_only() {
    let network = Network::new();
    let nodes = cluster(&network, ["a", "b"]).await;
    let all = open_all(&nodes, &config()).await;
    let session = all[0].session();
    fill(&session, 500, "v").await;
    let token = session.token();
    assert!(token.versions().len() <= 32 && token.versions().len() > 20);
    let partition = session.partition_of("user:7");
    let before = session.last_write(partition).unwrap();
    session.put(user(7, "w")).await.unwrap();
    assert!(session.last_write(partition).unwrap() > before);
    assert_eq!(
        session.clone().last_write(partition),
        session.last_write(partition),
        "a clone is the same session"
    );
    session.forget(partition);
    assert_eq!(session.last_write(partition), None);
    assert!(all[0].session().token().versions().is_empty());
    // typed values within a session
    let values: KeyValue<u32, u32> = all[0].keyvalue("n").unwrap();
    let mine = values.within(&session).unwrap();
    mine.put(&1, &2).await.unwrap();
    assert_eq!(mine.get(&1).await.unwrap(), Some(2));
    assert!(!session.token().versions().is_empty());
    let stranger = open(&nodes[0], &CacheConfig::new("other")).await.session();
    assert!(matches!(values.within(&stranger), Err(CacheError::Token { .. })));
}

// ---- state

#[tokio::test(start_paused = true)]
async fn status_and_readiness_tell_where_everything_is() {
    let network = Network::new();
    let nodes = cluster(&network, ["a", "b", "c"]).await;
    let all = open_all(&nodes, &config()).await;
    fill(&all[0], 200, "v").await;
    let readiness = all[0].readiness();
    assert_eq!((readiness.partitions, readiness.complete, readiness.served), (32, 32, 32));
    let mut serving = 0;
    for cache in &all {
        for status in partitions(cache) {
            assert_eq!(status.owners.len(), 2);
            assert_eq!(status.wanted, status.owners, "the ring's owners have it");
            assert_eq!(status.primary.as_ref(), status.owners.first());
            assert_eq!(holders(&all, status.partition).len(), 2);
            serving += usize::from(status.serving);
        }
    }
    assert_eq!(serving, 32, "each partition is served by one node");
    assert!(all[0].status(muster_router::cache::PartitionId::new(32)).is_none());
    let records: u64 = all.iter().flat_map(partitions).map(|status| status.records).sum();
    assert_eq!(records, 400, "two copies of each");
}

#[tokio::test(start_paused = true)]
async fn several_caches_live_on_one_scope_opened_in_any_order() {
    let network = Network::new();
    let nodes = cluster(&network, ["a", "b"]).await;
    let (one, other) = (config(), CacheConfig::new("other").partitions(4));
    let a1 = open(&nodes[0], &one).await;
    let a2 = open(&nodes[0], &other).await;
    let b2 = open(&nodes[1], &other).await;
    let b1 = open(&nodes[1], &one).await;
    ready(&[a1.clone(), a2.clone(), b1.clone(), b2.clone()]).await;
    a1.put(record!["k", 1]).await.unwrap();
    b2.put(record!["k", 2]).await.unwrap();
    assert_eq!(b1.get_key("k").await.unwrap(), [record!["k", 1]]);
    assert_eq!(a2.get_key("k").await.unwrap(), [record!["k", 2]]);
    assert_eq!(a1.delete_all().await.unwrap(), 1);
    assert_eq!(a2.get_key("k").await.unwrap().len(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_dropped_operation_leaves_nothing_behind() {
    let network = Network::new();
    let nodes = cluster(&network, ["a", "b"]).await;
    let all = open_all(&nodes, &config()).await;
    let key = key_at(&all[0], "b", 0);
    network.freeze("b");
    for _ in 0..10 {
        let put = tokio::time::timeout(Duration::from_millis(1), all[0].put(record![key.as_str(), 1]));
        assert!(put.await.is_err(), "b does not answer");
    }
    assert_eq!(all[0].stats().pending, 0);
    network.thaw("b");
    all[0].put(record![key.as_str(), 2]).await.unwrap();
    assert_eq!(all[1].get_key(key.as_str()).await.unwrap(), [record![key.as_str(), 2]]);
}

#[tokio::test(start_paused = true)]
async fn an_operation_ends_at_its_own_deadline() {
    let network = Network::new();
    let nodes = cluster(&network, ["a", "b"]).await;
    let all = open_all(&nodes, &config()).await;
    let key = key_at(&all[0], "b", 0);
    network.freeze("b");
    let hasty = all[0].with(CallOptions::new().timeout(Duration::from_millis(200)));
    let start = tokio::time::Instant::now();
    let read = hasty.get_key(key.as_str()).await.unwrap_err();
    assert_eq!(read.applied(), Applied::No, "a read changes nothing: {read}");
    let write = hasty.put(record![key.as_str(), 1]).await.unwrap_err();
    assert_eq!(write.applied(), Applied::Unknown, "it may have arrived: {write}");
    assert!(start.elapsed() < Duration::from_secs(1), "{:?}", start.elapsed());
    assert!(read.is_retryable() && write.is_retryable());
    network.thaw("b");
}
