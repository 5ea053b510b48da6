//! Write mode `strong` on real nodes: everything through the driver, the transport and the handle.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by it")]

mod caches;
mod support;

use std::time::Duration;

use caches::*;
use muster_router::cache::{Applied, CacheConfig, CacheError, CallOptions, ReadMode, WriteMode};
use muster_router::record;
use muster_router::transport::memory::Network;
use support::*;

fn strong() -> CacheConfig {
    CacheConfig::new("strong").partitions(16).write_mode(WriteMode::Strong).expected_nodes(Some(3))
}

#[tokio::test(start_paused = true)]
async fn strong_writes_survive_a_crash_a_join_and_a_drain() {
    let network = Network::new();
    let mut nodes = Vec::from(cluster(&network, ["a", "b", "c"]).await);
    let mut all = open_all(&nodes, &strong()).await;
    fill(&all[0], 300, "v").await;
    for cache in &all {
        assert_eq!(readable(cache, 300, "v").await, 300, "{}", cache.peer());
    }
    network.crash("b");
    nodes.retain(|node| node.node().as_str() != "b");
    all.retain(|cache| cache.peer().node.as_str() != "b");
    assert_eq!(readable(&all[0], 300, "v").await, 300, "an operation waits for the takeover");
    settled(&nodes, &all).await;
    for name in ["d", "e"] {
        nodes.push(start(&network, name).await);
        all.push(open(nodes.last().unwrap(), &strong()).await);
        settled(&nodes, &all).await;
        assert_eq!(readable(all.last().unwrap(), 300, "v").await, 300);
    }
    let key = key_at(&all[0], "d", 0);
    all[0].put(record![key.as_str(), 1]).await.unwrap();
    assert_eq!(all[1].get_key(key.as_str()).await.unwrap(), [record![key.as_str(), 1]]);
    assert_eq!(all[1].delete_key(key.as_str()).await.unwrap(), 1);
    assert_eq!(all[2].get_key(key.as_str()).await.unwrap(), []);
    // a hands everything over while it is written to, and ends at once
    assert!(partitions(&all[0]).any(|status| status.serving), "a has something to hand over");
    let writer = all[1].clone();
    let writes = tokio::spawn(async move { fill(&writer, 300, "w").await });
    nodes[0].drain(PATIENCE).await.unwrap();
    assert!(partitions(&all[0]).all(|status| !status.serving && status.records == 0));
    nodes[0].shutdown().await;
    without("a", &mut nodes, &mut all);
    writes.await.unwrap();
    for cache in &all {
        assert_eq!(readable(cache, 300, "w").await, 300, "{}", cache.peer());
    }
    settled(&nodes, &all).await;
    // every copy that a had is somewhere else: another death costs nothing
    network.crash("c");
    without("c", &mut nodes, &mut all);
    assert_eq!(readable(&all[0], 300, "w").await, 300);
}

/// Owners are cut off while strong writes are under way: some are committed, some cannot be. What is answered is on every
/// copy and outlives the primary; what is not is an error, and is there only if the error leaves that open.
#[tokio::test(start_paused = true)]
async fn measured_a_strong_write_that_fails_is_an_error_and_one_that_is_answered_is_there() {
    let (network, mut nodes, mut all) = three(&strong().expected_nodes(Some(3))).await;
    fill(&all[0], 60, "before").await;
    network.freeze("c");
    // not all owners can prepare it before the time is over: none may be answered as done that is kept by c
    let hasty = all[0].with(CallOptions::new().timeout(Duration::from_millis(300)));
    let kept_by_c: Vec<bool> = (0..60)
        .map(|i| {
            let status = all[0].status(all[0].partition_of(format!("user:{i}"))).unwrap();
            status.owners.iter().any(|owner| owner.node.as_str() == "c")
        })
        .collect();
    let writes: Vec<_> = (0..60)
        .map(|i| {
            let cache = hasty.clone();
            tokio::spawn(async move { cache.put(user(i, "after")).await })
        })
        .collect();
    let mut answers = Vec::new();
    for write in writes {
        answers.push(write.await.unwrap());
    }
    for (i, answer) in answers.iter().enumerate() {
        assert_eq!(answer.is_err(), kept_by_c[i], "user:{i}: {answer:?}");
    }
    assert!(answers.iter().any(Result::is_ok) && answers.iter().any(Result::is_err));
    network.thaw("c");
    settled(&nodes, &all).await;
    let mut now = Vec::new();
    for (i, answer) in answers.iter().enumerate() {
        let found = all[1].get_key(format!("user:{i}")).await.unwrap();
        let (old, new) = ([user(i, "before")], [user(i, "after")]);
        match answer.as_ref().map_err(CacheError::applied) {
            Ok(()) => assert_eq!(found, new, "user:{i} was answered"),
            Err(Applied::No) => assert_eq!(found, old, "user:{i} has failed"),
            Err(Applied::Yes | Applied::Unknown) => assert!(found == old || found == new, "{found:?}"),
        }
        now.push(found);
    }
    // whoever is asked, and whoever dies: nothing changes any more
    for round in 0..2 {
        for cache in &all {
            for (i, known) in now.iter().enumerate() {
                assert_eq!(cache.get_key(format!("user:{i}")).await.unwrap(), *known, "on {}", cache.peer());
            }
        }
        if round == 0 {
            network.crash("a");
            without("a", &mut nodes, &mut all);
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_side_of_a_split_goes_on_only_if_it_can_decide() {
    let network = Network::new();
    let nodes = Vec::from(cluster(&network, ["a", "b", "c"]).await);
    let all = open_all(&nodes, &strong()).await;
    fill(&all[0], 100, "before").await;
    let keys: Vec<_> = ["a", "b", "c"].into_iter().map(|node| key_at(&all[0], node, 0)).collect();
    network.cut("c", "a");
    network.cut("c", "b");
    for node in &nodes {
        let side = if node.node().as_str() == "c" { 1 } else { 2 };
        node.until(PATIENCE, |s| s.status == muster_router::Status::Ready && s.view.len() == side)
            .await
            .unwrap();
    }
    // the two go on with everything
    for key in &keys {
        all[0].put(record![key.as_str(), "after"]).await.unwrap();
    }
    // the one neither writes nor reads what may have changed meanwhile
    let hasty = all[2].with(CallOptions::new().timeout(Duration::from_millis(500)));
    for key in &keys {
        hasty.put(record![key.as_str(), "alone"]).await.unwrap_err();
        hasty.get_key(key.as_str()).await.unwrap_err();
    }
    // nor can an operator there throw away what the two have, now or when the split is over
    for partition in partitions(&all[2]).map(|status| status.partition) {
        let refused = all[2].accept_loss(partition).unwrap_err();
        assert!(matches!(refused, CacheError::NoQuorum { .. }), "{refused}");
    }
    network.heal("c", "a");
    network.heal("c", "b");
    settled(&nodes, &all).await;
    for key in &keys {
        for cache in &all {
            assert_eq!(cache.get_key(key.as_str()).await.unwrap(), [record![key.as_str(), "after"]]);
        }
    }
}

// caught by: an epoch before the first one of a lineage taken for one that the copy has: the read says that nothing is there
#[tokio::test(start_paused = true)]
async fn a_session_is_told_that_its_write_went_with_an_accepted_loss() {
    let (network, mut nodes, mut all) = three(&strong().replicas(1)).await;
    let key = key_at(&all[0], "c", 0);
    let session = all[0].session();
    session.put(record![key.as_str(), "mine"]).await.unwrap();
    network.crash("c");
    without("c", &mut nodes, &mut all);
    settle(&nodes).await;
    let partition = all[0].partition_of(key.as_str());
    all[0].accept_loss(partition).unwrap();
    all[1].put(record![key.as_str(), "of another"]).await.unwrap();
    all[1].delete_key(key.as_str()).await.unwrap();
    for cache in &all {
        let session = cache.session_from(&session.token()).unwrap();
        let lost = session.get_key(key.as_str()).await.unwrap_err();
        assert!(matches!(lost, CacheError::WriteLost { .. }), "{}: {lost}", cache.peer());
        session.forget(partition);
        assert_eq!(session.get_key(key.as_str()).await.unwrap(), []);
    }
}

// caught by: counters that begin again, so that what an earlier cluster wrote seems later than all that its primary knows of, and
// is waited for until the deadline
#[tokio::test(start_paused = true)]
async fn a_session_of_a_cluster_that_is_no_more_is_told_at_once() {
    let (network, mut nodes, mut all) = three(&strong()).await;
    let key = key_at(&all[0], "c", 0);
    let young = all[0].session();
    young.put(record![key.as_str(), "mine"]).await.unwrap();
    // the counter rises with each that goes and comes
    for _ in 0..2 {
        network.crash("c");
        without("c", &mut nodes, &mut all);
        settle(&nodes).await;
        nodes.push(start(&network, "c").await);
        all.push(open(nodes.last().unwrap(), &strong()).await);
        settled(&nodes, &all).await;
    }
    let old = all[0].session();
    old.put(record![key.as_str(), "mine"]).await.unwrap();
    let tokens = [young.token(), old.token()];
    assert!(tokens[0] != tokens[1]);
    ["a", "b", "c"].iter().for_each(|name| network.crash(name));
    drop((nodes, all));
    let nodes = Vec::from(cluster(&network, ["a", "b", "c"]).await);
    let all = open_all(&nodes, &strong()).await;
    for cache in &all {
        for token in &tokens {
            let began = tokio::time::Instant::now();
            let lost = cache.session_from(token).unwrap().get_key(key.as_str()).await.unwrap_err();
            assert!(matches!(lost, CacheError::WriteLost { .. }), "{}: {lost}", cache.peer());
            assert!(began.elapsed() < Duration::from_secs(1), "{:?}", began.elapsed());
        }
    }
}

#[tokio::test(start_paused = true)]
async fn nothing_begins_before_all_expected_nodes_are_there() {
    let network = Network::new();
    let mut nodes = Vec::from(cluster(&network, ["a", "b"]).await);
    let mut all = vec![open(&nodes[0], &strong()).await, open(&nodes[1], &strong()).await];
    let hasty = all[0].with(CallOptions::new().timeout(Duration::from_secs(5)));
    let error = hasty.put(record!["k", 1]).await.unwrap_err();
    assert!(matches!(error, CacheError::NotActive { .. } | CacheError::NoQuorum { .. }), "{error}");
    nodes.push(start(&network, "c").await);
    all.push(open(&nodes[2], &strong()).await);
    settled(&nodes, &all).await;
    all[0].put(record!["k", 1]).await.unwrap();
    let by_quorum = all[1].with(CallOptions::new().read_mode(ReadMode::Quorum));
    assert_eq!(by_quorum.get_key("k").await.unwrap(), [record!["k", 1]]);
}

#[tokio::test(start_paused = true)]
async fn strong_without_expected_nodes_is_refused() {
    let network = Network::new();
    let nodes = cluster(&network, ["a"]).await;
    let error = nodes[0].cache(strong().expected_nodes(None)).await.err().unwrap();
    assert!(
        error.to_string().contains("expected_nodes is none; 3 to 1024 with write_mode strong is allowed"),
        "{error}"
    );
}

// caught by: a rate for each partition's copy, so that a newcomer is filled by all at once
#[tokio::test(start_paused = true)]
async fn copies_of_a_strong_cache_are_filled_at_the_rate_of_the_node() {
    let network = Network::new();
    let slow = strong().partitions(32).transfer_rate(64 << 10);
    let mut nodes = Vec::from(cluster(&network, ["a", "b", "c"]).await);
    let mut all = open_all(&nodes, &slow).await;
    let large = "x".repeat(10_000);
    fill(&all[0], 128, &large).await;
    nodes.push(start(&network, "d").await);
    let start = tokio::time::Instant::now();
    all.push(open(&nodes[3], &slow).await);
    settled(&nodes, &all).await;
    eventually("everything is where it belongs", || partitions(&all[0]).all(|p| p.owners == p.wanted)).await;
    let taken: u64 = partitions(&all[3]).map(|status| status.bytes).sum();
    // from all of the others, each at its rate, with a tenth of a second ahead
    let least = Duration::from_secs_f64(taken as f64 / f64::from(3 * (64 << 10))) / 2;
    assert!(taken > 300_000 && start.elapsed() > least, "{taken} bytes in {:?}", start.elapsed());
}
