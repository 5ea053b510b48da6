//! Nodes that come, die, leave and part: measured faults of comparable systems, and faults reported in public.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by it")]

mod caches;
mod support;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use caches::*;
use muster_router::cache::OwnerState;
use muster_router::cache::{
    Applied, Cache, CacheConfig, CacheError, CallOptions, Partition, ReadMode, Term, WriteMode,
};
use muster_router::transport::memory::Network;
use muster_router::{Muster, pattern, record};
use support::*;

/// For tests in real time: on a busy machine an operation may take long.
fn patient() -> CacheConfig {
    config().operation_timeout(PATIENCE)
}

// ---- measured

#[tokio::test(start_paused = true)]
async fn measured_a_death_with_two_copies_leaves_everything_readable() {
    let (network, mut nodes, mut all) = three(&config()).await;
    fill(&all[0], 500, "v").await;
    network.crash("b");
    without("b", &mut nodes, &mut all);
    // from the first moment: an operation waits for the takeover, within its deadline
    assert_eq!(readable(&all[0], 500, "v").await, 500);
    settled(&nodes, &all).await;
    for cache in &all {
        assert_eq!(readable(cache, 500, "v").await, 500);
    }
}

#[tokio::test(start_paused = true)]
async fn measured_a_join_hides_nothing() {
    let network = Network::new();
    let mut nodes = Vec::from(cluster(&network, ["a", "b"]).await);
    let mut all = open_all(&nodes, &config()).await;
    fill(&all[0], 500, "v").await;
    nodes.push(start(&network, "c").await);
    all.push(open(&nodes[2], &config()).await);
    // while it fills as well as after
    for _ in 0..2 {
        for cache in &all {
            assert_eq!(readable(cache, 500, "v").await, 500, "{}", cache.peer());
        }
        settled(&nodes, &all).await;
    }
    let moved = partitions(&all[2]).filter(|status| status.serving).count();
    assert!(moved > 0, "the newcomer serves its part");
}

#[tokio::test(start_paused = true)]
async fn measured_a_forward_that_fails_is_an_error() {
    let (network, _nodes, all) = three(&config().replicas(1)).await;
    let key = key_at(&all[0], "c", 0);
    network.freeze("c");
    let hasty = all[0].with(CallOptions::new().timeout(Duration::from_millis(300)));
    let error = hasty.put(record![key.as_str(), 1]).await.unwrap_err();
    assert_eq!(error.applied(), Applied::Unknown, "{error}");
    network.thaw("c");
}

#[tokio::test(start_paused = true)]
async fn measured_replication_goes_on_when_the_node_that_wrote_first_has_ended() {
    let (_network, mut nodes, mut all) = three(&config()).await;
    fill(&all[0], 100, "v").await;
    nodes[0].shutdown().await;
    without("a", &mut nodes, &mut all);
    settled(&nodes, &all).await;
    fill(&all[1], 100, "w").await;
    for partition in 0..32 {
        let partition = muster_router::cache::PartitionId::new(partition);
        assert_eq!(holders(&all, partition).len(), 2);
    }
    assert_eq!(readable(&all[0], 100, "w").await, 100);
}

#[tokio::test(start_paused = true)]
async fn measured_the_last_of_two_quick_writes_is_the_one_on_every_copy() {
    let (_network, _nodes, all) = three(&config().replicas(3).write_mode(WriteMode::Async)).await;
    for i in 0..100 {
        all[i % 3].put(user(i, "first")).await.unwrap();
        all[i % 3].put(user(i, "last")).await.unwrap();
    }
    let values = |cache: &Cache| {
        let value = |mut values: BTreeMap<Term, Term>, record: &muster_router::cache::Record| {
            values.insert(record.get(0).unwrap().clone(), record.get(1).unwrap().clone());
            values
        };
        cache.scan(Partition::All, BTreeMap::new(), value).unwrap().value
    };
    eventually("all copies have the last", || {
        all.iter()
            .map(values)
            .all(|copy| copy.len() == 100 && copy.values().all(|v| *v == Term::from("last")))
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn measured_a_read_on_a_node_without_a_copy_finds_what_there_is() {
    let (_network, _nodes, all) = three(&config()).await;
    fill(&all[0], 200, "v").await;
    let local = CallOptions::new().read_mode(ReadMode::Local);
    let mut elsewhere = 0;
    for cache in &all {
        for i in 0..200 {
            let key = format!("user:{i}");
            let own = cache.status(cache.partition_of(key.as_str())).unwrap().state == OwnerState::Active;
            elsewhere += usize::from(!own);
            assert_eq!(cache.get_key(key.as_str()).await.unwrap(), [user(i, "v")], "{}", cache.peer());
            assert_eq!(cache.with(local).get_key(key.as_str()).await.unwrap(), [user(i, "v")]);
        }
    }
    assert_eq!(elsewhere, 200, "two copies on three nodes");
}

#[tokio::test(start_paused = true)]
async fn measured_a_quorum_read_is_not_one_stale_answer() {
    let (network, _nodes, all) = three(&config().replicas(3)).await;
    let key = key_at(&all[0], "a", 0);
    all[0].put(record![key.as_str(), "old"]).await.unwrap();
    // c hears nothing of a's writes for a while, and answers others
    network.delay("a", "c", Duration::from_millis(300)..Duration::from_millis(301));
    all[0].put(record![key.as_str(), "new"]).await.unwrap();
    for cache in &all {
        let quorum = cache.with(CallOptions::new().read_mode(ReadMode::Quorum));
        let found = quorum.get_key(key.as_str()).await.unwrap();
        assert_eq!(found, [record![key.as_str(), "new"]], "{}", cache.peer());
    }
    // most owners silent: no answer is an error
    network.freeze("a");
    network.freeze("b");
    let quorum = CallOptions::new().read_mode(ReadMode::Quorum).timeout(Duration::from_millis(300));
    assert!(all[2].with(quorum).get_key(key.as_str()).await.is_err());
}

#[tokio::test(start_paused = true)]
async fn measured_what_was_deleted_on_one_side_of_a_split_stays_deleted() {
    let (network, nodes, all) = three(&config().replicas(3).write_mode(WriteMode::Async)).await;
    fill(&all[0], 100, "v").await;
    split(&network, &nodes, &["a", "b"], &["c"]).await;
    for i in 0..50 {
        assert_eq!(all[0].delete_key(format!("user:{i}")).await.unwrap(), 1);
    }
    heal(&network, &nodes, &all).await;
    for cache in &all {
        for i in 0..100 {
            let found = cache.get_key(format!("user:{i}")).await.unwrap();
            assert_eq!(found.len(), usize::from(i >= 50), "user:{i} on {}", cache.peer());
        }
    }
    assert_copies_agree(&all).await;
}

// ---- reported in public

#[tokio::test(start_paused = true)]
async fn cache_01_third_join_empties() {
    let network = Network::new();
    let (mut nodes, mut all): (Vec<Muster>, Vec<Cache>) = (Vec::new(), Vec::new());
    for (i, name) in ["a", "b", "c", "d"].into_iter().enumerate() {
        nodes.push(start(&network, name).await);
        all.push(open(&nodes[i], &config()).await);
        settled(&nodes, &all).await;
        if i == 0 {
            fill(&all[0], 1000, "v").await;
        }
        for cache in &all {
            assert_eq!(readable(cache, 1000, "v").await, 1000, "after {name} joined, on {}", cache.peer());
        }
    }
}

#[tokio::test(start_paused = true)]
async fn cache_02_join_without_sync() {
    for connected_first in [false, true] {
        let network = Network::new();
        let a = start(&network, "a").await;
        let at_a = open(&a, &config()).await;
        ready(std::slice::from_ref(&at_a)).await;
        fill(&at_a, 200, "v").await;
        if !connected_first {
            network.cut("a", "b");
        }
        let b = start(&network, "b").await;
        let at_b = if connected_first {
            settle(&[a.clone(), b.clone()]).await;
            open(&b, &config()).await
        } else {
            let at_b = open(&b, &config()).await;
            ready(std::slice::from_ref(&at_b)).await;
            network.heal_all();
            settle(&[a.clone(), b.clone()]).await;
            at_b
        };
        // right or forwarded from the first moment
        assert_eq!(readable(&at_b, 200, "v").await, 200, "connected first: {connected_first}");
        ready(&[at_a.clone(), at_b.clone()]).await;
        for cache in [&at_a, &at_b] {
            assert_eq!(readable(cache, 200, "v").await, 200);
            assert_eq!(cache.scan(Partition::All, 0, |n, _| n + 1).unwrap().value, 200, "two copies");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn cache_04_no_active_repair() {
    let (network, mut nodes, mut all) = three(&config()).await;
    fill(&all[0], 1000, "v").await;
    network.crash("c");
    without("c", &mut nodes, &mut all);
    // nobody reads meanwhile
    settled(&nodes, &all).await;
    for cache in &all {
        let here = cache.scan(Partition::All, 0, |n, _| n + 1).unwrap();
        assert_eq!((here.value, here.complete), (1000, true), "two copies of each on two nodes");
    }
    // so the next death costs nothing either
    network.crash("b");
    without("b", &mut nodes, &mut all);
    settled(&nodes, &all).await;
    assert_eq!(readable(&all[0], 1000, "v").await, 1000);
}

#[tokio::test(start_paused = true)]
async fn cache_06_quorum_not_met_says_ok() {
    let (network, _nodes, all) = three(&config().replicas(3).min_copies(2)).await;
    let key = key_at(&all[0], "a", 0);
    all[0].put(record![key.as_str(), "before"]).await.unwrap();
    network.cut("a", "b");
    network.cut("a", "c");
    let too_few = |error: &CacheError| {
        matches!(
            error,
            CacheError::NotEnoughAcks { got: 1, need: 2 } | CacheError::NoQuorum { got: 1, need: 2 }
        )
    };
    // at once, while the cut is not noticed, and after it is
    for _ in 0..2 {
        let put = all[0].put(record![key.as_str(), "during"]).await.unwrap_err();
        assert!(too_few(&put), "{put}");
        let delete = all[0].delete_key(key.as_str()).await.unwrap_err();
        assert!(too_few(&delete), "{delete}");
        match all[0].put_batch([record![key.as_str(), "batch"]]).await.unwrap_err() {
            CacheError::Batch { failed, applied: 0, .. } => assert!(too_few(&failed[0].1), "{}", failed[0].1),
            other => panic!("{other}"),
        }
        match all[0].delete_all().await.unwrap_err() {
            CacheError::Partial { missing, .. } => {
                assert_eq!(missing.len(), 32);
                let served_here = |partition| all[0].status(partition).is_some_and(|status| status.serving);
                let here = missing.iter().filter(|(partition, _)| served_here(*partition));
                let few: Vec<bool> = here.map(|(_, error)| too_few(error)).collect();
                assert!(!few.is_empty() && few.iter().all(|few| *few), "{missing:?}");
            }
            other => panic!("{other}"),
        }
    }
}

/// The second half of the case: one replica that does not answer is no reason to fail, and two copies exist then.
#[tokio::test(start_paused = true)]
async fn cache_06_a_write_that_is_ok_has_its_copies() {
    let (network, mut nodes, mut all) = three(&config().replicas(3)).await;
    let key = key_at(&all[0], "a", 0);
    network.freeze("c");
    all[0].put(record![key.as_str(), 1]).await.unwrap();
    network.crash("a");
    network.thaw("c");
    without("a", &mut nodes, &mut all);
    settled(&nodes, &all).await;
    assert_eq!(all[1].get_key(key.as_str()).await.unwrap(), [record![key.as_str(), 1]]);
}

#[tokio::test(start_paused = true)]
async fn cache_08_put_during_state_transfer() {
    let network = Network::new();
    let mut nodes = Vec::from(cluster(&network, ["a", "b", "c"]).await);
    let small = config().chunk_bytes(1024);
    let mut all = open_all(&nodes, &small).await;
    let large = "x".repeat(1000);
    fill(&all[0], 600, &large).await;
    // the newcomer is far away: a piece of a partition takes a tenth of a second, and there are many
    for name in ["a", "b", "c"] {
        network.delay(name, "d", Duration::from_millis(50)..Duration::from_millis(51));
        network.delay("d", name, Duration::from_millis(50)..Duration::from_millis(51));
    }
    nodes.push(start(&network, "d").await);
    all.push(open(&nodes[3], &small).await);
    settle(&nodes).await;
    let filling = || partitions(&all[3]).filter(|status| status.state == OwnerState::Syncing).count();
    eventually("it is being filled", || filling() > 0).await;
    let writes: Vec<_> = (0..600)
        .map(|i| {
            let new = all[3].clone();
            tokio::spawn(async move {
                match i % 3 {
                    0 => new.put(user(i, "new")).await.unwrap(),
                    1 => assert_eq!(new.delete_key(format!("user:{i}")).await.unwrap(), 1),
                    _ => {}
                }
            })
        })
        .collect();
    for write in writes {
        write.await.unwrap();
    }
    assert!(filling() > 0, "all of it came while older data was on its way");
    ready(&all).await;
    for cache in &all {
        for i in 0..600 {
            let found = cache.get_key(format!("user:{i}")).await.unwrap();
            match i % 3 {
                0 => assert_eq!(found, [user(i, "new")]),
                1 => assert_eq!(found, []),
                _ => assert_eq!(found, [user(i, &large)]),
            }
        }
    }
}

/// Also when a later tombstone could be about: over many deletes, and over the death of the primary that made them.
#[tokio::test(start_paused = true)]
async fn versions_rise_over_deletes_and_a_takeover() {
    let (network, mut nodes, mut all) = three(&config()).await;
    let session = all[0].session();
    let partition = all[0].partition_of("k");
    let mut last = None;
    for round in 0..20 {
        session.put(record!["k", round]).await.unwrap();
        session.delete_key("k").await.unwrap();
        assert!(session.last_write(partition) > last, "versions only rise");
        last = session.last_write(partition);
    }
    let primary = primary_of(&all[0], "k").unwrap();
    network.crash(&primary);
    without(&primary, &mut nodes, &mut all);
    settled(&nodes, &all).await;
    let session = all[0].session();
    session.put(record!["k", "v2"]).await.unwrap();
    assert!(session.last_write(partition) > last, "over the next primary too");
    for cache in &all {
        assert_eq!(cache.get_key("k").await.unwrap(), [record!["k", "v2"]], "no late tombstone deletes it");
    }
}

#[tokio::test(start_paused = true)]
async fn cache_13_merge_drops_primary_only() {
    let network = Network::new();
    let mut nodes = Vec::from(cluster(&network, ["a", "b"]).await);
    let mut all = open_all(&nodes, &config()).await;
    let conflicts = Arc::new(AtomicUsize::new(0));
    for cache in &all {
        let conflicts = conflicts.clone();
        cache.on_conflict(move |_, _| {
            conflicts.fetch_add(1, Ordering::SeqCst);
            panic!("a callback that panics harms nothing");
        });
    }
    fill(&all[0], 60, "v").await;
    split(&network, &nodes, &["a"], &["b"]).await;
    for i in 0..60 {
        all[0].delete_key(format!("user:{i}")).await.unwrap();
        if i % 2 == 0 {
            all[1].put(user(i, "other side")).await.unwrap();
        }
    }
    heal(&network, &nodes, &all).await;
    assert_copies_agree(&all).await;
    let merged = all[0].scan(Partition::All, 0, |n, _| n + 1).unwrap().value;
    assert!(merged <= 30, "what only one side deleted stays deleted");
    eventually("each loser is reported", || conflicts.load(Ordering::SeqCst) >= 30).await;
    eventually("each panic is counted", || all.iter().map(|c| c.stats().panics).sum::<u64>() >= 30).await;
    // fail over: nothing comes back
    network.crash("a");
    without("a", &mut nodes, &mut all);
    settled(&nodes, &all).await;
    let found = all[0].get_by_match_object(Partition::All, pattern![_, _]).await.unwrap();
    assert_eq!(found.len(), merged);
    assert!(found.iter().all(|record| record.get(1) == Some(&Term::from("other side"))));
}

#[tokio::test(start_paused = true)]
async fn cache_17_stopping_node_breaks_puts() {
    let (_network, nodes, all) = three(&config()).await;
    fill(&all[0], 300, "v").await;
    all[1].close();
    assert_eq!(nodes[0].connected().len(), 2, "its node stays");
    // at once, and when its partitions have moved
    for value in ["v", "w"] {
        for cache in [&all[0], &all[2]] {
            assert_eq!(readable(cache, 300, value).await, 300);
        }
        ready(&[all[0].clone(), all[2].clone()]).await;
        fill(&all[2], 300, "w").await;
    }
    assert_eq!(all[1].get_key("user:1").await.unwrap_err(), CacheError::Stopped);
}

// ---- answers that are lost

/// The primary has carried out the delete, and dies before the caller hears of it. Whoever serves next carries it out
/// again and finds nothing: nobody knows how many records went. It is applied all the same, and the session knows it.
#[tokio::test(start_paused = true)]
async fn a_session_remembers_a_delete_whose_first_answer_was_lost() {
    let (network, mut nodes, mut all) = three(&config()).await;
    let keys = (0..1000).map(|i| format!("k{i}"));
    let key = keys.into_iter().find(|key| {
        let owners = all[2].status(all[2].partition_of(key.as_str())).unwrap().owners;
        owners.iter().map(|owner| owner.node.as_str()).eq(["a", "b"])
    });
    let key = key.expect("some partition is kept by a and b");
    let partition = all[2].partition_of(key.as_str());
    let session = all[2].session();
    session.put(record![key.as_str(), 1]).await.unwrap();
    let put = session.last_write(partition).unwrap();
    // what a says is long on its way to c; to b it is not
    network.delay("a", "c", Duration::from_secs(2)..Duration::from_secs(3));
    let (deleting, k) = (session.clone(), key.clone());
    let delete = tokio::spawn(async move { deleting.delete_key(k.as_str()).await });
    let held = |cache: &Cache| cache.status(partition).unwrap().records;
    let before = held(&all[1]);
    eventually("b has the delete", || held(&all[1]) < before).await;
    assert!(!delete.is_finished());
    network.crash("a");
    without("a", &mut nodes, &mut all);
    let error = delete.await.unwrap().unwrap_err();
    assert_eq!((error.applied(), error.is_retryable()), (Applied::Yes, false), "{error}");
    let CacheError::Uncounted { at_least: 0, version: Some(version) } = error else { panic!("{error}") };
    assert!(version > put);
    assert_eq!(session.last_write(partition), Some(version));
    let nearest = session.with(CallOptions::new().read_mode(ReadMode::Local));
    assert_eq!(nearest.get_key(key.as_str()).await.unwrap(), []);
}

// ---- going on purpose

#[tokio::test(start_paused = true)]
async fn a_drained_node_takes_nothing_with_it() {
    let (_network, mut nodes, mut all) = three(&config()).await;
    fill(&all[0], 300, "v").await;
    nodes[1].drain(PATIENCE).await.unwrap();
    assert!(partitions(&all[1]).all(|status| !status.serving));
    assert_eq!(readable(&all[1], 300, "v").await, 300, "it still forwards");
    nodes[1].shutdown().await;
    without("b", &mut nodes, &mut all);
    assert_eq!(readable(&all[0], 300, "v").await, 300);
    settled(&nodes, &all).await;
    assert_eq!(readable(&all[1], 300, "v").await, 300);
}

/// Nobody is there to wait for: the answer does not wait for the deadline.
#[tokio::test(start_paused = true)]
async fn the_last_node_says_at_once_that_nobody_takes_over() {
    let network = Network::new();
    let nodes = Vec::from(cluster(&network, ["a", "b"]).await);
    let all = open_all(&nodes, &config()).await;
    fill(&all[0], 100, "v").await;
    nodes[0].drain(PATIENCE).await.unwrap();
    nodes[0].shutdown().await;
    let start = tokio::time::Instant::now();
    let of_cache = all[1].drain(PATIENCE).await.unwrap_err();
    assert_eq!(of_cache.without_taker, ["users"]);
    let timeout = nodes[1].drain(PATIENCE).await.unwrap_err();
    assert_eq!((timeout.caches, timeout.waiting_for), (vec!["users".to_owned()], vec![]));
    assert_eq!(timeout.without_taker, ["users"]);
    assert!(start.elapsed() < PATIENCE, "{:?}", start.elapsed());
    assert_eq!(readable(&all[1], 100, "v").await, 100, "it serves on until it ends");
    // with nothing in it there is nothing to hand over
    all[1].delete_all().await.unwrap();
    nodes[1].drain(PATIENCE).await.unwrap();
}

/// `Ok` means that others have everything, and nothing else.
#[tokio::test(start_paused = true)]
async fn a_drain_that_is_cut_short_by_the_end_says_so() {
    for by_close in [true, false] {
        let network = Network::new();
        let slow = config().transfer_rate(64 << 10).max_record_len(32 << 10);
        let mut nodes = Vec::from(cluster(&network, ["a", "b", "c"]).await);
        let all = open_all(&nodes, &slow).await;
        fill(&all[0], 200, &"x".repeat(10_000)).await;
        let drained = all[0].clone();
        let drain = tokio::spawn(async move { drained.drain(PATIENCE).await });
        pass(Duration::from_secs(1)).await;
        assert!(!drain.is_finished(), "it takes long");
        if by_close {
            all[0].close();
        } else {
            nodes.remove(0).shutdown().await;
        }
        let error = drain.await.unwrap().unwrap_err();
        assert!(error.stopped && !error.is_retryable(), "{error}");
        assert_eq!(error.caches, ["users"]);
        assert!(all[0].drain(PATIENCE).await.unwrap_err().stopped, "nor later");
        // once it is over it stays so
        let rest = all[1].drain(PATIENCE).await;
        rest.unwrap();
        all[1].close();
        all[1].drain(PATIENCE).await.unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn a_node_that_comes_back_gets_its_part_again() {
    let (network, mut nodes, mut all) = three(&config()).await;
    fill(&all[0], 300, "v").await;
    for round in 0..3 {
        let name = ["a", "b", "c"][round];
        network.crash(name);
        without(name, &mut nodes, &mut all);
        settled(&nodes, &all).await;
        nodes.push(start(&network, name).await);
        all.push(open(nodes.last().unwrap(), &config()).await);
        settled(&nodes, &all).await;
        for cache in &all {
            assert_eq!(readable(cache, 300, "v").await, 300, "round {round}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn measured_many_tasks_on_several_threads_lose_nothing_while_a_node_drains() {
    let network = Network::new();
    let nodes = Vec::from(cluster(&network, ["a", "b", "c"]).await);
    let all = open_all(&nodes, &patient()).await;
    let mut tasks = Vec::new();
    for task in 0..8usize {
        let cache = all[[0, 2][task % 2]].clone();
        tasks.push(tokio::spawn(async move {
            for i in 0..200 {
                cache.put(record![format!("{task}:{i}"), i]).await.unwrap();
                let found = cache.get_key(format!("{task}:{i}")).await.unwrap();
                assert_eq!(found, [record![format!("{task}:{i}"), i]]);
            }
        }));
    }
    nodes[1].drain(PATIENCE).await.unwrap();
    nodes[1].shutdown().await;
    for task in tasks {
        task.await.unwrap();
    }
    let records = all[0].get_by_match_object(Partition::All, pattern![_, _]).await.unwrap();
    assert_eq!(records.len(), 1600);
}

/// One rate for all partitions of a node: a newcomer is not flooded by all of them at once.
#[tokio::test(start_paused = true)]
async fn copies_are_filled_at_the_rate_of_the_node_and_not_of_each_partition() {
    let network = Network::new();
    let slow = config().partitions(8).transfer_rate(64 << 10);
    let mut nodes = Vec::from(cluster(&network, ["a", "b"]).await);
    let mut all = open_all(&nodes, &slow).await;
    let large = "x".repeat(10_000);
    fill(&all[0], 128, &large).await;
    nodes.push(start(&network, "c").await);
    let start = tokio::time::Instant::now();
    all.push(open(&nodes[2], &slow).await);
    settled(&nodes, &all).await;
    eventually("everything is where it belongs", || partitions(&all[0]).all(|p| p.owners == p.wanted)).await;
    let taken: u64 = partitions(&all[2]).map(|status| status.bytes).sum();
    // from both of the others, each at its rate, with a tenth of a second ahead
    let least = Duration::from_secs_f64(taken as f64 / f64::from(2 * (64 << 10))) / 2;
    assert!(taken > 300_000 && start.elapsed() > least, "{taken} bytes in {:?}", start.elapsed());
    for cache in &all {
        assert_eq!(readable(cache, 128, &large).await, 128);
    }
}

// ---- over a real network

#[cfg(feature = "tcp")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cache_over_tcp() {
    use muster_router::transport::tcp::TcpTransport;
    let mut nodes: Vec<Muster> = Vec::new();
    let mut seed = None;
    for name in ["a", "b", "c"] {
        let mut builder = TcpTransport::builder(name).listen("127.0.0.1:0");
        if let Some(seed) = &seed {
            builder = builder.seed(seed);
        }
        let transport = Arc::new(builder.build().unwrap());
        nodes.push(Muster::builder("rooms").transport(transport.clone()).start().await.unwrap());
        seed.get_or_insert_with(|| transport.local_addr().unwrap().to_string());
    }
    settle(&nodes).await;
    let mut all = open_all(&nodes, &patient()).await;
    let large = "x".repeat(20_000);
    fill(&all[0], 100, &large).await;
    for cache in &all {
        assert_eq!(readable(cache, 100, &large).await, 100);
    }
    let session = all[0].session();
    session.put(user(0, "mine")).await.unwrap();
    let followed = all[2].session_from(&session.token()).unwrap();
    assert_eq!(followed.get_key("user:0").await.unwrap(), [user(0, "mine")]);
    nodes[1].shutdown().await;
    without("b", &mut nodes, &mut all);
    settled(&nodes, &all).await;
    assert_eq!(readable(&all[1], 100, &large).await, 99, "one has another value");
}
