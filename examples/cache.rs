//! A cache on three nodes in one process. `cargo run --release --example cache` tells what happens: writes, an owner
//! that is killed, everything still there, a session that follows its user from node to node. With `-- --check` it
//! writes 100,000 keys with two copies, kills a node, adds one, drains one, and reads all of them after each step.
//! The guide `muster_router::guide::cache` explains it.

use std::error::Error;
use std::fmt;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use muster_router::cache::{Cache, CacheConfig, CacheError, CallOptions, KeyValue, ReadMode, SessionToken};
use muster_router::record;
use muster_router::transport::memory::Network;
use muster_router::{Muster, Status};

const HELP: &str = "usage: cache [--check] [--keys N]
  without --check: a short walk, told as it happens
  --check          writes many keys, kills a node, adds one, drains one; reads all keys after each step,
                   and exits with 1 if one is missing
  --keys N         how many keys the check writes (100000)";

/// Far longer than anything here takes.
const PATIENCE: Duration = Duration::from_secs(60);
/// How many readers ask at the same time.
const READERS: usize = 32;

type Failed = Box<dyn Error + Send + Sync>;

fn main() -> ExitCode {
    let (mut check, mut keys) = (false, 100_000);
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--check" => check = true,
            "--keys" => match arguments.next().and_then(|keys| keys.parse().ok()) {
                Some(number) if number > 0 => keys = number,
                _ => return usage("--keys needs a number above 0"),
            },
            "--help" | "-h" => {
                println!("{HELP}");
                return ExitCode::SUCCESS;
            }
            other => return usage(&format!("unknown: {other}")),
        }
    }
    let runtime = match tokio::runtime::Runtime::new() {
        Ok(runtime) => runtime,
        Err(error) => {
            eprintln!("cache: no runtime: {error}");
            return ExitCode::FAILURE;
        }
    };
    let ended = if check { runtime.block_on(checked(keys)) } else { runtime.block_on(walk()) };
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("cache: {error}");
            ExitCode::FAILURE
        }
    }
}

fn usage(error: &str) -> ExitCode {
    eprintln!("cache: {error}\n\n{HELP}");
    ExitCode::from(2)
}

/// A node of the cluster with its end of the cache.
#[derive(Clone)]
struct Node {
    muster: Muster,
    cache: Cache,
}

impl Node {
    async fn start(network: &Network, name: &str, config: &CacheConfig) -> Result<Self, Failed> {
        let muster = Muster::builder("shop").transport(network.node(name)).start().await?;
        let cache = muster.cache(config.clone()).await?;
        Ok(Self { muster, cache })
    }
}

impl fmt::Display for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.muster.node().as_str())
    }
}

/// Waits until just these nodes are one cluster, and every partition has its two copies.
async fn settled(nodes: &[Node]) -> Result<(), Failed> {
    for node in nodes {
        node.muster.until(PATIENCE, |s| s.status == Status::Ready && s.view.len() == nodes.len()).await?;
    }
    for node in nodes {
        node.cache.until_ready(PATIENCE).await?;
    }
    Ok(())
}

// ---- the check

/// Writes, then reads everything after each change of the cluster.
async fn checked(keys: usize) -> Result<(), Failed> {
    let network = Network::new();
    let config = CacheConfig::new("check").replicas(2).operation_timeout(Duration::from_secs(30));
    let mut nodes = Vec::new();
    for name in ["a", "b", "c"] {
        nodes.push(Node::start(&network, name, &config).await?);
    }
    settled(&nodes).await?;

    let start = Instant::now();
    let mut written = 0;
    for (batch, first) in (0..keys).step_by(10_000).enumerate() {
        let records = (first..keys.min(first + 10_000)).map(|i| record![key(i), i as i64]);
        let Some(node) = nodes.get(batch % nodes.len()) else { continue };
        written += node.cache.put_batch(records).await?;
    }
    println!("wrote {written} keys on 3 nodes with 2 copies in {:.1?}", start.elapsed());
    let mut least = read_all("written", &nodes, keys).await?;

    network.crash("b");
    nodes.retain(|node| node.to_string() != "b");
    least = least.min(read_all("killed b", &nodes, keys).await?);
    settled(&nodes).await?;
    least = least.min(read_all("two copies again", &nodes, keys).await?);

    nodes.push(Node::start(&network, "d", &config).await?);
    least = least.min(read_all("added d", &nodes, keys).await?);
    settled(&nodes).await?;
    least = least.min(read_all("d has its part", &nodes, keys).await?);

    let leaver = nodes.remove(0);
    leaver.muster.drain(PATIENCE).await?;
    leaver.muster.shutdown().await;
    least = least.min(read_all("drained a", &nodes, keys).await?);
    settled(&nodes).await?;
    least = least.min(read_all("two copies again", &nodes, keys).await?);

    if least == keys {
        println!("check passed: {least} of {keys} readable after each step");
        Ok(())
    } else {
        Err(format!("check failed: only {least} of {keys} were readable after some step").into())
    }
}

fn key(i: usize) -> String {
    format!("user:{i}")
}

/// Asks for every key, one by one, all nodes in turn. How many have the value that was written.
async fn read_all(step: &str, nodes: &[Node], keys: usize) -> Result<usize, Failed> {
    let start = Instant::now();
    let readers: Vec<_> = (0..READERS)
        .map(|reader| {
            let caches: Vec<Cache> = nodes.iter().map(|node| node.cache.clone()).collect();
            tokio::spawn(read_part(caches, reader, keys))
        })
        .collect();
    let (mut readable, mut first_error) = (0, None);
    for reader in readers {
        let (found, error) = reader.await?;
        readable += found;
        first_error = first_error.or(error);
    }
    print!("{step}: {readable} of {keys} readable in {:.1?}", start.elapsed());
    match first_error {
        Some(error) => println!(" (first error: {error})"),
        None => println!(),
    }
    Ok(readable)
}

async fn read_part(caches: Vec<Cache>, reader: usize, keys: usize) -> (usize, Option<CacheError>) {
    let (mut found, mut error) = (0, None);
    for i in (reader..keys).step_by(READERS) {
        let Some(cache) = caches.get(i / READERS % caches.len()) else { continue };
        match cache.get_key(key(i)).await {
            Ok(records) => found += usize::from(records == [record![key(i), i as i64]]),
            Err(failed) => error = error.or(Some(failed)),
        }
    }
    (found, error)
}

// ---- the walk

async fn walk() -> Result<(), Failed> {
    let network = Network::new();
    let config = CacheConfig::new("baskets");
    let mut nodes = Vec::new();
    for name in ["a", "b", "c"] {
        nodes.push(Node::start(&network, name, &config).await?);
    }
    settled(&nodes).await?;
    println!("three nodes, {} partitions, two copies of each", config.partitions);

    let [a, b, c] = [0, 1, 2].map(|i: usize| nodes.get(i).cloned());
    let (Some(a), Some(b), Some(c)) = (a, b, c) else { return Err("three were started".into()) };
    let baskets: KeyValue<String, Vec<String>> = a.cache.keyvalue("basket")?;
    for user in ["ada", "bob", "eve"] {
        baskets.put(&user.into(), &vec!["apple".into()]).await?;
    }
    let elsewhere: KeyValue<String, Vec<String>> = c.cache.keyvalue("basket")?;
    println!("put on a, read on c: ada has {:?}", elsewhere.get(&"ada".into()).await?);

    // a request of ada's comes to a, her next one to c: she sees what she has done, though c may answer from a copy
    let session = a.cache.session();
    baskets.within(&session)?.put(&"ada".into(), &vec!["apple".into(), "pear".into()]).await?;
    let cookie = session.token().to_string();
    println!("ada's browser keeps a cookie of {} bytes", cookie.len());
    let session = c.cache.session_from(&cookie.parse::<SessionToken>()?)?;
    let nearest = CallOptions::new().read_mode(ReadMode::Local);
    let hers = elsewhere.with(nearest).within(&session)?.get(&"ada".into()).await?;
    println!("ada's next request, on c, reads her own write: {hers:?}");

    println!("killing b, without a goodbye");
    network.crash("b");
    drop(b);
    nodes.retain(|node| node.to_string() != "b");
    for user in ["ada", "bob", "eve"] {
        let basket = elsewhere.get(&user.into()).await?;
        println!("  {user} still has {basket:?}");
        if basket.is_none() {
            return Err(format!("the basket of {user} is lost").into());
        }
    }
    settled(&nodes).await?;
    let readiness = a.cache.readiness();
    println!("{} of {} partitions have two copies again", readiness.complete, readiness.partitions);
    Ok(())
}
