//! What the tests of the cache share.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::BTreeSet;

use muster_router::Muster;
use muster_router::cache::{Cache, CacheConfig, Partition, PartitionId, Record, Term};
use muster_router::cache::{OwnerState, PartitionStatus};
use muster_router::record;
use muster_router::transport::memory::Network;

use crate::support::{PATIENCE, cluster, eventually, settle};

/// Two copies in a few partitions, so that a test moves quickly.
pub fn config() -> CacheConfig {
    CacheConfig::new("users").partitions(32)
}

pub async fn open(muster: &Muster, config: &CacheConfig) -> Cache {
    muster.cache(config.clone()).await.expect("opens")
}

/// The cache on all of these nodes, with all copies in place.
pub async fn open_all(nodes: &[Muster], config: &CacheConfig) -> Vec<Cache> {
    let mut caches = Vec::new();
    for node in nodes {
        caches.push(open(node, config).await);
    }
    ready(&caches).await;
    caches
}

/// Waits until these nodes agree on one view of just these, and all copies are in place.
pub async fn settled(nodes: &[Muster], caches: &[Cache]) {
    settle(nodes).await;
    ready(caches).await;
}

/// Waits until all copies are in place, as all of these see it.
pub async fn ready(caches: &[Cache]) {
    for cache in caches {
        if let Err(error) = cache.until_ready(PATIENCE).await {
            panic!("{}: {error}\n{:#?}", cache.peer(), first_trouble(cache));
        }
    }
}

fn first_trouble(cache: &Cache) -> Option<PartitionStatus> {
    cache.readiness().missing.first().and_then(|partition| cache.status(*partition))
}

pub fn partitions(cache: &Cache) -> impl Iterator<Item = PartitionStatus> + '_ {
    PartitionId::all(cache.config().partitions).map(|partition| cache.status(partition).expect("it has it"))
}

/// The names of the nodes whose copy of a partition is whole, as they say themselves.
pub fn holders(caches: &[Cache], partition: PartitionId) -> BTreeSet<String> {
    let holds = |cache: &&Cache| cache.status(partition).expect("has it").state == OwnerState::Active;
    caches.iter().filter(holds).map(name).collect()
}

pub fn name(cache: &Cache) -> String {
    cache.peer().node.as_str().to_owned()
}

/// The name of the node that serves a key, as `cache` sees it.
pub fn primary_of(cache: &Cache, key: impl Into<Term>) -> Option<String> {
    let partition = cache.partition_of(key);
    let primary = cache.status(partition).expect("has it").primary;
    primary.map(|peer| peer.node.as_str().to_owned())
}

/// A key that `node` serves, the `nth` of them.
pub fn key_at(cache: &Cache, node: &str, nth: usize) -> String {
    let served = |key: &String| primary_of(cache, key.as_str()).as_deref() == Some(node);
    (0..100_000).map(|i| format!("k{i}")).filter(served).nth(nth).expect("every node serves something")
}

pub fn user(i: usize, value: &str) -> Record {
    record![format!("user:{i}"), value]
}

pub async fn fill(cache: &Cache, count: usize, value: &str) {
    let applied = cache.put_batch((0..count).map(|i| user(i, value))).await.expect("put");
    assert_eq!(applied, count as u64);
}

/// How many of the users have this value, asked one by one.
pub async fn readable(cache: &Cache, count: usize, value: &str) -> usize {
    let mut found = 0;
    for i in 0..count {
        let records = cache.get_key(format!("user:{i}")).await.unwrap_or_else(|error| {
            panic!("user:{i} on {}: {error}", cache.peer());
        });
        found += usize::from(records == [user(i, value)]);
    }
    found
}

pub async fn three(config: &CacheConfig) -> (Network, Vec<Muster>, Vec<Cache>) {
    let network = Network::new();
    let nodes = Vec::from(cluster(&network, ["a", "b", "c"]).await);
    let all = open_all(&nodes, config).await;
    (network, nodes, all)
}

/// Takes a node out of the lists, so that only those that live are asked.
pub fn without(name: &str, nodes: &mut Vec<Muster>, all: &mut Vec<Cache>) {
    nodes.retain(|node| node.node().as_str() != name);
    all.retain(|cache| cache.peer().node.as_str() != name);
}

/// Cuts every link between the two sides, and waits until each has a view of its own.
pub async fn split(network: &Network, nodes: &[Muster], left: &[&str], right: &[&str]) {
    for a in left {
        for b in right {
            network.cut(a, b);
        }
    }
    for node in nodes {
        let side = if left.contains(&node.node().as_str()) { left.len() } else { right.len() };
        node.until(PATIENCE, |s| s.status == muster_router::Status::Ready && s.view.len() == side)
            .await
            .unwrap();
    }
}

pub async fn heal(network: &Network, nodes: &[Muster], all: &[Cache]) {
    network.heal_all();
    settled(nodes, all).await;
}

/// Every whole copy has the same records.
pub async fn assert_copies_agree(all: &[Cache]) {
    let copies = |cache: &Cache| {
        let add = |mut records: Vec<Record>, record: &Record| {
            records.push(record.clone());
            records
        };
        cache.scan(Partition::All, Vec::new(), add).unwrap().value
    };
    eventually("all copies agree", || {
        let first = copies(&all[0]);
        all.iter().all(|cache| copies(cache) == first)
    })
    .await;
}
