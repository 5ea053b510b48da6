//! Sides that do not see one another: who goes on, who waits, what is merged, and what is told.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by it")]

mod caches;
mod support;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use caches::*;
use muster_router::cache::{
    Applied, Cache, CacheConfig, CacheError, CallOptions, Partition, PartitionId, Term, WriteMode,
};
use muster_router::cache::{CacheEvent, Loser, OwnerState};
use muster_router::transport::memory::Network;
use muster_router::{pattern, record};
use support::*;

fn hasty(cache: &Cache) -> Cache {
    cache.with(CallOptions::new().timeout(Duration::from_millis(500)))
}

/// Every loser that any of these nodes reports from now on.
fn losers(all: &[Cache]) -> Arc<Mutex<Vec<Loser>>> {
    let losers = Arc::new(Mutex::new(Vec::new()));
    for cache in all {
        let losers = losers.clone();
        cache.on_conflict(move |_, loser| losers.lock().unwrap().push(loser.clone()));
    }
    losers
}

// ---- writes whose primary is replaced

/// The caller hears nothing of it: the write waits for a majority, its primary learns that another one serves, and the
/// write is made again there.
#[tokio::test(start_paused = true)]
async fn a_write_whose_primary_was_replaced_is_made_again_within_its_deadline() {
    let (network, nodes, all) = three(&config().replicas(3)).await;
    let keys: Vec<String> = (0..20).map(|nth| key_at(&all[0], "a", nth)).collect();
    for key in &keys {
        all[0].put(record![key.as_str(), "before"]).await.unwrap();
    }
    network.cut("a", "b");
    network.cut("a", "c");
    let patient = all[0].with(CallOptions::new().timeout(PATIENCE));
    let writes: Vec<_> = keys
        .iter()
        .enumerate()
        .map(|(i, key)| {
            let (cache, key) = (patient.clone(), key.clone());
            tokio::spawn(async move {
                match i % 2 {
                    0 => cache.put(record![key.as_str(), "after"]).await.map(|()| 1),
                    // the first time it removed something as well: the count of the second is not to be relied on
                    _ => cache.delete_key(key.as_str()).await,
                }
            })
        })
        .collect();
    eventually("all of them wait", || all[0].stats().pending == 20).await;
    split(&network, &nodes, &["a"], &["b", "c"]).await;
    ready(&all[1..]).await;
    // the others have gone on, in a later epoch
    for (i, key) in keys.iter().enumerate() {
        all[1].put(record![key.as_str(), i as i64]).await.unwrap();
    }
    assert_eq!(all[0].stats().pending, 20);
    heal(&network, &nodes, &all).await;
    for (i, write) in writes.into_iter().enumerate() {
        match write.await.unwrap() {
            Ok(count) => assert_eq!(count, 1, "write {i}"),
            Err(error) => panic!("write {i}: {error}"),
        }
    }
    for (i, key) in keys.iter().enumerate() {
        let expected = if i % 2 == 0 { vec![record![key.as_str(), "after"]] } else { vec![] };
        for cache in &all {
            assert_eq!(cache.get_key(key.as_str()).await.unwrap(), expected, "{key} on {}", cache.peer());
        }
    }
}

/// What must not be done twice is not made again: the caller is told that it is open.
#[tokio::test(start_paused = true)]
async fn a_write_that_must_not_be_made_twice_is_left_open() {
    use muster_router::cache::Table;
    let (network, nodes, all) = three(&config().replicas(3).table(Table::DuplicateBag)).await;
    let key = key_at(&all[0], "a", 0);
    network.cut("a", "b");
    network.cut("a", "c");
    let (cache, k) = (all[0].with(CallOptions::new().timeout(PATIENCE)), key.clone());
    let write = tokio::spawn(async move { cache.put(record![k.as_str(), 1]).await });
    split(&network, &nodes, &["a"], &["b", "c"]).await;
    ready(&all[1..]).await;
    heal(&network, &nodes, &all).await;
    let error = write.await.unwrap().unwrap_err();
    assert_eq!(error, CacheError::NotEnoughAcks { got: 1, need: 2 });
    assert_eq!(error.applied(), Applied::Unknown);
    let found = all[1].get_key(key.as_str()).await.unwrap();
    assert!(found.len() <= 1, "never twice: {found:?}");
}

// ---- who goes on

#[tokio::test(start_paused = true)]
async fn accept_loss_is_the_way_out_when_too_few_owners_are_left() {
    let (network, mut nodes, mut all) = three(&config().replicas(3).partitions(4)).await;
    fill(&all[0], 100, "v").await;
    ready(&all).await;
    eventually("all copies have all", || {
        all.iter().all(|cache| cache.scan(Partition::All, 0, |n, _| n + 1).unwrap().value == 100)
    })
    .await;
    let mut events = all[0].events();
    network.crash("b");
    network.crash("c");
    without("b", &mut nodes, &mut all);
    without("c", &mut nodes, &mut all);
    settle(&nodes).await;
    // one copy of three: another might have been further, so nobody goes on by itself
    let stalled = async {
        let mut stalled = BTreeSet::new();
        while stalled.len() < 4 {
            if let CacheEvent::Stalled { partition, got, need } = events.recv().await.expect("open") {
                assert_eq!((got, need), (1, 2));
                stalled.insert(partition);
            }
        }
    };
    tokio::time::timeout(PATIENCE, stalled).await.expect("each partition says that it stalls");
    let readiness = all[0].readiness();
    assert_eq!((readiness.complete, readiness.missing.len()), (0, 4));
    for key in ["user:1", "user:2", "user:3"] {
        let error = hasty(&all[0]).put(record![key, "w"]).await.unwrap_err();
        assert!(error.is_retryable(), "{error}");
    }
    let half: Vec<PartitionId> = (0..2).map(PartitionId::new).collect();
    for partition in &half {
        all[0].accept_loss(*partition).unwrap();
    }
    let served =
        |cache: &Cache| partitions(cache).filter(|p| p.serving).map(|p| p.partition).collect::<Vec<_>>();
    eventually("what was accepted goes on", || half.iter().all(|p| served(&all[0]).contains(p))).await;
    assert!(all[0].until_ready(Duration::from_secs(5)).await.is_err(), "the others still wait");
    for partition in PartitionId::all(4) {
        all[0].accept_loss(partition).unwrap();
    }
    ready(&all).await;
    assert_eq!(readable(&all[0], 100, "v").await, 100, "the copy was whole");
    fill(&all[0], 100, "w").await;
}

#[tokio::test(start_paused = true)]
async fn expected_nodes_refuses_sync_writes_on_a_side_that_is_no_majority() {
    let (network, nodes, all) = three(&config().replicas(3).expected_nodes(Some(3))).await;
    fill(&all[0], 100, "before").await;
    let on_a: Vec<usize> =
        (0..100).filter(|i| primary_of(&all[0], format!("user:{i}")).as_deref() == Some("a")).collect();
    assert!(!on_a.is_empty());
    split(&network, &nodes, &["a"], &["b", "c"]).await;
    ready(&all[1..]).await;
    fill(&all[1], 100, "after").await;
    for i in &on_a {
        let error = hasty(&all[0]).put(user(*i, "alone")).await.unwrap_err();
        assert!(error.is_retryable(), "{error}");
    }
    heal(&network, &nodes, &all).await;
    for cache in &all {
        assert_eq!(readable(cache, 100, "after").await, 100, "no acknowledged write lost: {}", cache.peer());
    }
}

/// Half of an even number is no majority either: neither side acknowledges what it might lose.
#[tokio::test(start_paused = true)]
async fn expected_nodes_lets_neither_half_write_sync_and_async_goes_on() {
    let network = Network::new();
    let nodes = Vec::from(cluster(&network, ["a", "b"]).await);
    let all = open_all(&nodes, &config().expected_nodes(Some(2))).await;
    fill(&all[0], 50, "v").await;
    split(&network, &nodes, &["a"], &["b"]).await;
    for cache in &all {
        let key = key_at(cache, &name(cache), 0);
        let sync = cache.with(CallOptions::new().write_mode(WriteMode::Sync));
        let error = sync.put(record![key.as_str(), 1]).await.unwrap_err();
        assert_eq!(error, CacheError::NoQuorum { got: 1, need: 2 });
        assert_eq!(error.applied(), Applied::No);
        cache
            .with(CallOptions::new().write_mode(WriteMode::Async))
            .put(record![key.as_str(), 2])
            .await
            .unwrap();
        assert_eq!(cache.get_key(key.as_str()).await.unwrap(), [record![key.as_str(), 2]]);
    }
    heal(&network, &nodes, &all).await;
    assert_eq!(readable(&all[1], 50, "v").await, 50);
}

#[tokio::test(start_paused = true)]
async fn expected_nodes_keeps_a_partition_from_beginning_empty_before_most_have_met() {
    let network = Network::new();
    let config = config().expected_nodes(Some(3));
    let mut nodes = vec![start(&network, "a").await];
    let mut all = vec![open(&nodes[0], &config).await];
    let error = hasty(&all[0]).put(record!["k", 1]).await.unwrap_err();
    assert_eq!(error.applied(), Applied::No, "{error}");
    assert!(partitions(&all[0]).all(|status| status.state != OwnerState::Active));
    nodes.push(start(&network, "b").await);
    all.push(open(&nodes[1], &config).await);
    settled(&nodes, &all).await;
    all[0].put(record!["k", 1]).await.unwrap();
    assert_eq!(all[1].get_key("k").await.unwrap(), [record!["k", 1]]);
}

// ---- what is merged and told

/// Both copies of the side that loses offer the same: each loser is told once.
#[tokio::test(start_paused = true)]
async fn each_loser_is_told_once_though_every_copy_of_its_side_offers_it() {
    let network = Network::new();
    let nodes = Vec::from(cluster(&network, ["a", "b", "c", "d"]).await);
    let all = open_all(&nodes, &config().replicas(4).write_mode(WriteMode::Async)).await;
    fill(&all[0], 40, "before").await;
    let losers = losers(&all);
    split(&network, &nodes, &["a", "b"], &["c", "d"]).await;
    ready(&all).await;
    for side in [0, 2] {
        fill(&all[side], 40, &format!("side {side}")).await;
        let both = [&all[side], &all[side + 1]];
        eventually("both copies have it", || {
            both.iter().all(|cache| {
                let wanted = Term::from(format!("side {side}"));
                let count = |n: usize, record: &muster_router::cache::Record| {
                    n + usize::from(record.get(1) == Some(&wanted))
                };
                cache.scan(Partition::All, 0, count).unwrap().value == 40
            })
        })
        .await;
    }
    heal(&network, &nodes, &all).await;
    assert_copies_agree(&all).await;
    eventually("each loser is told", || losers.lock().unwrap().len() >= 40).await;
    let mut told: BTreeMap<(Option<Term>, String), usize> = BTreeMap::new();
    for loser in losers.lock().unwrap().iter() {
        *told.entry((loser.key.clone(), loser.version.to_string())).or_default() += 1;
    }
    assert!(told.values().all(|times| *times == 1), "{told:?}");
    let keys: BTreeSet<_> = told.keys().map(|(key, _)| key.clone()).collect();
    assert_eq!((keys.len(), told.len()), (40, 40), "one of two writes of each key");
}

/// One whose requests come to both sides of a split sees what it wrote last, or hears that the partition went on without
/// it; what it wrote before is an old value.
// caught by: the highest version of a session kept, and not what it wrote last
#[tokio::test(start_paused = true)]
async fn a_session_on_both_sides_of_a_split_never_sees_its_older_write() {
    let (network, nodes, all) = three(&config().write_mode(WriteMode::Async)).await;
    fill(&all[0], 120, "v").await;
    ready(&all).await;
    let is_at_c = |i: usize| {
        let status = all[2].status(all[2].partition_of(format!("user:{i}"))).unwrap();
        status.state == OwnerState::Active
    };
    let keys: Vec<usize> = (0..120).filter(|i| is_at_c(*i)).collect();
    split(&network, &nodes, &["a", "b"], &["c"]).await;
    let mut tokens = Vec::new();
    for (at, i) in keys.iter().enumerate() {
        let sides = if at % 2 == 0 { [0, 2] } else { [2, 0] };
        let first = all[sides[0]].session();
        first.put(user(*i, "first")).await.unwrap();
        let then = all[sides[1]].session_from(&first.token()).unwrap();
        then.put(user(*i, "then")).await.unwrap();
        tokens.push(then.token());
    }
    heal(&network, &nodes, &all).await;
    assert_copies_of_partitions_agree(&all).await;
    let mut seen = BTreeMap::new();
    for (i, token) in keys.iter().zip(&tokens) {
        for cache in &all {
            let session = cache.session_from(token).unwrap();
            let read = match session.get_key(format!("user:{i}")).await {
                Ok(records) if records == [user(*i, "then")] => "then",
                Err(CacheError::WriteLost { .. }) => "told",
                other => panic!("user:{i} at {}: {other:?}", cache.peer()),
            };
            *seen.entry(read).or_insert(0) += 1;
        }
    }
    assert!(seen["told"] > 0, "{seen:?}");
}

/// The deletes of a long split are forgotten on the side that made them. A copy of the other side, which has missed
/// them, is then given up and told of, for nobody can say what of it was deleted.
#[tokio::test(start_paused = true)]
async fn measured_a_copy_that_was_away_longer_than_deletes_are_remembered_is_discarded_and_told() {
    let brief = Duration::from_secs(2);
    let config = config().write_mode(WriteMode::Async).tombstone_ttl(brief);
    let (network, nodes, all) = three(&config).await;
    fill(&all[0], 120, "v").await;
    ready(&all).await;
    let mut events: Vec<_> = all.iter().map(Cache::events).collect();
    let losers = losers(&all);
    let is_at_c = |i: usize| {
        let status = all[2].status(all[2].partition_of(format!("user:{i}"))).unwrap();
        status.state == OwnerState::Active
    };
    let at_c: Vec<usize> = (0..120).filter(|i| is_at_c(*i)).collect();
    split(&network, &nodes, &["a", "b"], &["c"]).await;
    ready(&all[..2]).await;
    // one side deletes most and goes on for long; the other writes one record to each of its partitions
    for i in 0..100 {
        assert_eq!(all[0].delete_key(format!("user:{i}")).await.unwrap(), 1);
    }
    let mut written = BTreeMap::new();
    for i in &at_c {
        written.entry(all[2].partition_of(format!("user:{i}"))).or_insert(*i);
    }
    for i in written.values() {
        all[2].put(user(*i, "other side")).await.unwrap();
    }
    let deleted_bytes = || partitions(&all[0]).filter(|p| p.records == 0).map(|p| p.bytes).sum::<u64>();
    eventually("the deletes are forgotten", || deleted_bytes() == 0).await;
    pass(brief * 10).await;
    heal(&network, &nodes, &all).await;
    assert_copies_of_partitions_agree(&all).await;
    for cache in &all {
        for i in 0..100 {
            let found = cache.get_key(format!("user:{i}")).await.unwrap();
            assert!(found.is_empty(), "user:{i} came back on {}: {found:?}", cache.peer());
        }
    }
    let mut discarded = 0;
    for events in &mut events {
        while let Some(event) = events.try_recv() {
            discarded += usize::from(matches!(event, CacheEvent::Discarded { .. }));
        }
    }
    assert!(discarded > 0, "it is told");
    let told: BTreeSet<Option<Term>> = losers.lock().unwrap().iter().map(|loser| loser.key.clone()).collect();
    for i in written.values().filter(|i| **i < 100) {
        assert!(told.contains(&Some(Term::from(format!("user:{i}")))), "user:{i} was accepted, and is told");
    }
    let left = all[1].get_by_match_object(Partition::All, pattern![_, _]).await.unwrap();
    assert_eq!(left.len(), 20);
}

/// A delete of a key of a bag takes away what it has seen; what the other side has put meanwhile stays if its version
/// is higher. Then the delete is what is lost, and is told.
#[tokio::test(start_paused = true)]
async fn in_a_bag_a_delete_that_the_other_sides_put_outlives_is_told() {
    use muster_router::cache::Table;
    for table in [Table::Bag, Table::DuplicateBag] {
        let network = Network::new();
        let nodes = Vec::from(cluster(&network, ["a", "b"]).await);
        let all = open_all(&nodes, &config().table(table)).await;
        fill(&all[0], 40, "before").await;
        let losers = losers(&all);
        split(&network, &nodes, &["a"], &["b"]).await;
        // each side deletes half of the keys and puts to the others: one of the two comes first in every partition
        for i in 0..40 {
            let (deletes, puts) = (&all[i % 2], &all[1 - i % 2]);
            assert_eq!(deletes.delete_key(format!("user:{i}")).await.unwrap(), 1);
            puts.put(user(i, "after")).await.unwrap();
        }
        heal(&network, &nodes, &all).await;
        assert_copies_agree(&all).await;
        let told = || -> BTreeMap<Term, Vec<Loser>> {
            let mut told: BTreeMap<Term, Vec<Loser>> = BTreeMap::new();
            for loser in losers.lock().unwrap().iter() {
                told.entry(loser.key.clone().expect("of one key")).or_default().push(loser.clone());
            }
            told
        };
        eventually("of each key one side is told", || told().len() == 40).await;
        let mut outlived = 0;
        for (key, told) in told() {
            let found = all[0].get_key(key.clone()).await.unwrap();
            let stays = found.iter().any(|record| record.get(1) == Some(&Term::from("after")));
            outlived += usize::from(stays);
            let is_delete = |loser: &Loser| loser.record.is_none();
            assert_eq!(told.len(), 1, "{key}: {told:?}");
            assert_eq!(is_delete(&told[0]), stays, "{table} {key}: {told:?}, and {found:?} stays");
        }
        assert!(outlived > 0 && outlived < 40, "both happened: {outlived}");
    }
}

/// For fewer copies than nodes: the records of all copies together are two of each.
async fn assert_copies_of_partitions_agree(all: &[Cache]) {
    eventually("all copies agree", || {
        PartitionId::all(all[0].config().partitions).all(|partition| {
            let states = all.iter().map(|cache| cache.status(partition).expect("has it"));
            let sizes: BTreeSet<_> =
                states.filter(|p| p.state == OwnerState::Active).map(|p| (p.records, p.bytes)).collect();
            sizes.len() == 1
        })
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn with_two_copies_each_side_goes_on_and_one_of_two_writes_wins() {
    let network = Network::new();
    let nodes = Vec::from(cluster(&network, ["a", "b"]).await);
    let all = open_all(&nodes, &CacheConfig::new("two").partitions(8)).await;
    fill(&all[0], 30, "before").await;
    let losers = losers(&all);
    split(&network, &nodes, &["a"], &["b"]).await;
    for (side, cache) in all.iter().enumerate() {
        fill(cache, 30, &format!("side {side}")).await;
    }
    heal(&network, &nodes, &all).await;
    assert_copies_agree(&all).await;
    eventually("each loser is told", || losers.lock().unwrap().len() == 30).await;
    let told = losers.lock().unwrap().clone();
    for loser in &told {
        let key = loser.key.clone().unwrap();
        let kept = all[0].get_key(key.clone()).await.unwrap();
        assert_ne!(kept.first(), loser.record.as_ref(), "{key:?} was kept and is told as lost");
    }
}
