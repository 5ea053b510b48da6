//! The process that is a node: it does what the conductor asks, one act after the other.

use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use hdrhistogram::Histogram;
use muster_router::cache::Cache;
use muster_router::transport::tcp::TcpTransport;
use muster_router::{Group, Membership, Message, Muster, Status, TryBroadcastError};
use parking_lot::Mutex;
use tokio::task::JoinSet;

use super::words::*;
use super::{EARLY, cache, replay};

const PATIENCE: Duration = Duration::from_secs(60);
/// Tasks that probe, so that one slow call does not hide the next.
const PROBES: usize = 4;

pub(crate) fn main() {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let workers = std::env::var("MUSTER_BENCH_WORKERS").ok().and_then(|count| count.parse().ok());
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    let runtime = builder.worker_threads(workers.unwrap_or(cores)).enable_all().build().unwrap();
    runtime.block_on(async {
        let (acts, mut coming) = tokio::sync::mpsc::unbounded_channel();
        std::thread::spawn(move || {
            for line in std::io::stdin().lines().map_while(Result::ok) {
                if acts.send(serde_json::from_str(&line).expect("an act")).is_err() {
                    return;
                }
            }
            // nobody conducts any more
            std::process::exit(0);
        });
        let mut node = Node::default();
        while let Some(act) = coming.recv().await {
            let answer = node.act(act).await.unwrap_or_else(Answer::Failed);
            let mut line = serde_json::to_vec(&answer).unwrap();
            line.push(b'\n');
            let mut out = std::io::stdout();
            out.write_all(&line).and_then(|()| out.flush()).unwrap();
        }
    });
}

#[derive(Clone)]
pub(crate) struct Life {
    pub(crate) muster: Muster,
    transport: Arc<TcpTransport>,
    pub(crate) counted: Arc<AtomicU64>,
    noted: Arc<Mutex<Vec<(u64, Nanos, Nanos)>>>,
}

#[derive(Default)]
struct Node {
    life: Option<Life>,
    members: Vec<Membership>,
    cache: Option<Cache>,
    pace: Option<Running<(u64, u64)>>,
    probe: Option<Running<Probed>>,
}

/// Goes on until it is told to stop.
struct Running<R> {
    stop: Arc<AtomicBool>,
    ended: tokio::task::JoinHandle<R>,
}

impl<R> Running<R> {
    async fn end(self) -> Result<R, String> {
        self.stop.store(true, Ordering::SeqCst);
        self.ended.await.map_err(text)
    }
}

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

impl Node {
    async fn act(&mut self, act: Act) -> Result<Answer, String> {
        if let Act::Start { name, seeds } = act {
            return self.start(name, seeds).await;
        }
        let life = self.life.clone().ok_or("not started")?;
        match act {
            Act::Start { .. } | Act::Listen => Err("not now".into()),
            Act::Ready { nodes } => {
                let ready =
                    life.muster.until(PATIENCE, |s| s.status == Status::Ready && s.view.len() == nodes);
                ready.await.map_err(|error| format!("{error}\n{}", life.muster.dump()))?;
                Ok(Answer::At(now()))
            }
            Act::Join { groups, members, callers, kind } => {
                let names = list(&life, &groups);
                let count = (names.len() * members) as u64;
                let began = now();
                self.members.extend(join(&life, names, members, callers, kind).await?);
                Ok(Answer::Took { count, nanos: now() - began })
            }
            Act::LeaveAll => {
                self.members = Vec::new();
                Ok(Answer::Done)
            }
            Act::Saturate { groups, callers, size, millis } => {
                let until = now() + millis * 1_000_000;
                let began = now();
                let count = saturate(&life, list(&life, &groups), callers, size, until).await?;
                Ok(Answer::Took { count, nanos: now() - began })
            }
            Act::Pace { groups, a_second, size, exactly } => {
                let stop = Arc::new(AtomicBool::new(false));
                let names = list(&life, &groups);
                let pace = Pace { life, names, period: 1_000_000_000 / a_second, size, exactly };
                let ended = tokio::task::spawn_blocking({
                    let stop = stop.clone();
                    move || pace.run(&stop)
                });
                self.pace = Some(Running { stop, ended });
                Ok(Answer::Done)
            }
            Act::Rest => {
                let (sent, failed) = self.pace.take().ok_or("no pace")?.end().await?;
                while life.muster.summary().broadcasts_open > 0 {
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
                Ok(Answer::Sent { sent, failed })
            }
            Act::Noted { all } => Ok(Answer::Noted(noted(std::mem::take(&mut *life.noted.lock()), all))),
            Act::Probe { prefix } => {
                let stop = Arc::new(AtomicBool::new(false));
                let ended = tokio::spawn(probe(life, prefix, stop.clone()));
                self.probe = Some(Running { stop, ended });
                Ok(Answer::Done)
            }
            Act::ProbeEnd => Ok(Answer::Probed(self.probe.take().ok_or("no probe")?.end().await?)),
            Act::Counted { at_least } => {
                let counted = async {
                    while life.counted.load(Ordering::SeqCst) < at_least {
                        tokio::time::sleep(Duration::from_micros(200)).await;
                    }
                };
                // one that stays below is the conductor's to judge
                let _late = tokio::time::timeout(Duration::from_secs(10), counted).await;
                Ok(Answer::Took { count: life.counted.load(Ordering::SeqCst), nanos: now() })
            }
            Act::Replay { nodes, index, callers } => {
                Ok(Answer::Replayed(replay::run(&life, nodes, index, callers).await?))
            }
            Act::Open => {
                self.cache = Some(cache::open(&life.muster).await?);
                Ok(Answer::Done)
            }
            Act::Call { puts, callers, millis } => {
                let opened = self.cache.as_ref().ok_or("no cache")?;
                let (count, nanos) = cache::call(opened, puts, callers, now() + millis * 1_000_000).await?;
                Ok(Answer::Took { count, nanos })
            }
            Act::Stats => {
                let stats = life.transport.stats();
                Ok(Answer::Stats { bytes_in: stats.bytes_in, bytes_out: stats.bytes_out, busy: busy() })
            }
            Act::Drain => {
                let began = now();
                life.muster.drain(PATIENCE).await.map_err(text)?;
                Ok(Answer::Took { count: 1, nanos: now() - began })
            }
            Act::Shutdown => {
                self.members.clear();
                life.muster.shutdown().await;
                self.life = None;
                Ok(Answer::At(now()))
            }
        }
    }

    async fn start(&mut self, name: String, seeds: Vec<String>) -> Result<Answer, String> {
        let builder = TcpTransport::builder(&name).listen("127.0.0.1:0").seeds(&seeds).insecure();
        let transport = Arc::new(builder.build().map_err(text)?);
        let began = now();
        let muster = Muster::builder("bench").transport(transport.clone()).start().await.map_err(text)?;
        let address = transport.local_addr().map(|address| address.to_string()).unwrap_or_default();
        self.life = Some(Life { muster, transport, counted: Arc::default(), noted: Arc::default() });
        Ok(Answer::Started { address, began })
    }
}

fn list(life: &Life, groups: &Groups) -> Vec<Group> {
    let ring = life.muster.ring();
    let fits = |name: &String| match &groups.router {
        None => true,
        Some(router) => ring.router_for(name).is_some_and(|node| node.as_str() == router),
    };
    let names = (0u64..).map(|number| format!("{}{number}", groups.prefix));
    names.filter(fits).take(groups.count).map(Group::from).collect()
}

async fn member(life: &Life, group: Group, kind: Kind) -> Result<Membership, String> {
    let counted = life.counted.clone();
    let joined = match kind {
        Kind::Counts => {
            let count = move |_: &Message| {
                counted.fetch_add(1, Ordering::Relaxed);
            };
            life.muster.join_fn(group, count).await
        }
        Kind::Notes => {
            let noted = life.noted.clone();
            let note = move |message: &Message| {
                let at = now();
                let word = |from: usize| message.payload().get(from..from + 8)?.try_into().ok();
                let (number, due) = (word(0).map(u64::from_le_bytes), word(8).map(u64::from_le_bytes));
                noted.lock().push((number.unwrap_or(u64::MAX), due.unwrap_or(0), at));
            };
            life.muster.join_fn(group, note).await
        }
        Kind::Reads => {
            let (sender, mut receiver) = tokio::sync::mpsc::unbounded_channel();
            tokio::spawn(async move {
                while receiver.recv().await.is_some() {
                    counted.fetch_add(1, Ordering::Relaxed);
                }
            });
            life.muster.join(group, sender).await
        }
    };
    joined.map_err(text)
}

async fn join(
    life: &Life,
    names: Vec<Group>,
    members: usize,
    callers: usize,
    kind: Kind,
) -> Result<Vec<Membership>, String> {
    let (names, next) = (Arc::new(names), Arc::new(AtomicUsize::new(0)));
    let mut tasks = JoinSet::new();
    for _ in 0..callers {
        let (life, names, next) = (life.clone(), names.clone(), next.clone());
        tasks.spawn(async move {
            let mut joined = Vec::new();
            loop {
                let at = next.fetch_add(1, Ordering::Relaxed);
                let Some(name) = names.get(at / members) else { return Ok::<_, String>(joined) };
                joined.push(member(&life, name.clone(), kind).await?);
            }
        });
    }
    let mut all = Vec::new();
    while let Some(joined) = tasks.join_next().await {
        all.extend(joined.map_err(text)??);
    }
    Ok(all)
}

async fn saturate(
    life: &Life,
    names: Vec<Group>,
    callers: usize,
    size: usize,
    until: Nanos,
) -> Result<u64, String> {
    let names = Arc::new(names);
    let payload = Bytes::from(vec![b'.'; size]);
    let mut tasks = JoinSet::new();
    for caller in 0..callers {
        let (muster, names, payload) = (life.muster.clone(), names.clone(), payload.clone());
        tasks.spawn(async move {
            let mut count = 0;
            while now() < until {
                let group = names[(caller + count as usize) % names.len()].clone();
                muster.broadcast(group, payload.clone()).await.map_err(text)?;
                count += 1;
            }
            Ok::<u64, String>(count)
        });
    }
    let mut all = 0;
    while let Some(count) = tasks.join_next().await {
        all += count.map_err(text)??;
    }
    Ok(all)
}

struct Pace {
    life: Life,
    names: Vec<Group>,
    period: Nanos,
    size: usize,
    exactly: bool,
}

impl Pace {
    /// On a thread of its own. How many were sent, and how many of them were refused or failed.
    fn run(&self, stop: &AtomicBool) -> (u64, u64) {
        let began = now() + self.period;
        let failed = Arc::new(AtomicU64::new(0));
        for number in 0.. {
            let due = began + number * self.period;
            if !self.wait(due, stop) {
                return (number, failed.load(Ordering::SeqCst));
            }
            let mut payload = number.to_le_bytes().to_vec();
            payload.extend_from_slice(&due.to_le_bytes());
            payload.resize(self.size.max(16), b'.');
            let payload = Bytes::from(payload);
            let group = self.names[number as usize % self.names.len()].clone();
            match self.life.muster.try_broadcast(group.clone(), payload.clone()) {
                Ok(()) => {}
                // it waits for room, as a server's task would
                Err(TryBroadcastError::Busy) => {
                    let (muster, failed) = (self.life.muster.clone(), failed.clone());
                    tokio::spawn(async move {
                        if muster.broadcast(group, payload).await.is_err() {
                            failed.fetch_add(1, Ordering::SeqCst);
                        }
                    });
                }
                Err(_) => {
                    failed.fetch_add(1, Ordering::SeqCst);
                }
            }
        }
        (0, 0)
    }

    fn wait(&self, due: Nanos, stop: &AtomicBool) -> bool {
        let early = if self.exactly { EARLY } else { 0 };
        loop {
            if stop.load(Ordering::SeqCst) {
                return false;
            }
            match due.saturating_sub(now()) {
                0 => return true,
                left if left > early => {
                    std::thread::sleep(Duration::from_nanos((left - early).max(1000)));
                }
                _ => std::hint::spin_loop(),
            }
        }
    }
}

/// Latencies count from the moment at which a broadcast was due, not from when it was made: one that waits behind
/// another is late, and is counted as late.
fn noted(all: Vec<(u64, Nanos, Nanos)>, wanted: bool) -> Noted {
    let mut histogram: Histogram<u64> = Histogram::new(3).unwrap();
    for (_, due, at) in &all {
        histogram.record(at.saturating_sub(*due).max(1)).unwrap();
    }
    Noted {
        count: all.len() as u64,
        p50: histogram.value_at_quantile(0.5),
        p99: histogram.value_at_quantile(0.99),
        most: histogram.max(),
        all: if wanted { all } else { Vec::new() },
    }
}

/// One joins a new group, then broadcasts to it, then rests for a moment.
async fn probe(life: Life, prefix: String, stop: Arc<AtomicBool>) -> Probed {
    let mut tasks = JoinSet::new();
    for task in 0..PROBES {
        let (life, prefix, stop) = (life.clone(), prefix.clone(), stop.clone());
        tasks.spawn(async move {
            let (mut probed, mut members) = (Probed::default(), Vec::new());
            let mut number = task;
            while !stop.load(Ordering::SeqCst) {
                let group = Group::from(format!("{prefix}{number}"));
                number += PROBES;
                let began = now();
                let joined = member(&life, group.clone(), Kind::Counts).await;
                let then = now();
                probed.joins += 1;
                probed.slowest_join = probed.slowest_join.max(then - began);
                match joined {
                    Ok(member) => members.push(member),
                    Err(_) => probed.failed += 1,
                }
                let receipt = life.muster.broadcast(group, "probe").await;
                probed.casts += 1;
                probed.failed += u64::from(receipt.is_err());
                probed.slowest_cast = probed.slowest_cast.max(now() - then);
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            probed
        });
    }
    let mut all = Probed::default();
    while let Some(Ok(one)) = tasks.join_next().await {
        all.joins += one.joins;
        all.casts += one.casts;
        all.failed += one.failed;
        all.slowest_join = all.slowest_join.max(one.slowest_join);
        all.slowest_cast = all.slowest_cast.max(one.slowest_cast);
    }
    all
}
