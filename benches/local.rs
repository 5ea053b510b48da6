//! What one process does without a network, each beside its floor. Criterion runs and judges ours; in each of its
//! samples the floor is measured, too, turn by turn, because the machine is shared and only ratios last.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs, reason = "a bench")]

#[path = "local/count.rs"]
mod count;
mod support;

use std::collections::HashMap;
use std::hint::black_box;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use cpu_time::ThreadTime;
use criterion::{Criterion, SamplingMode};
use dashmap::DashMap;
use futures_util::FutureExt;
use hashring::HashRing;
use muster_router::cache::{CacheConfig, Record, Term, WriteMode};
use muster_router::transport::memory::Network;
use muster_router::{BroadcastId, Group, MemberId, Message, Muster, NodeId, Route, Status, record};
use parking_lot::Mutex;
use tokio::runtime::Runtime;
use tokio::sync::mpsc;
use xxhash_rust::xxh3::Xxh3DefaultBuilder;

use support::Round;
use support::report::{Report, Row, Target, Unit};

const PATIENCE: Duration = Duration::from_secs(60);
/// Turns of ours and the floor in one sample.
const TURNS: u64 = 4;

struct Bench {
    criterion: Criterion,
    report: Report,
}

/// What a row shows: the time of one, or how many in a second.
#[derive(Clone, Copy)]
enum As {
    Time,
    Rate,
}

impl Bench {
    fn new() -> Self {
        let mut criterion = Criterion::default().sample_size(30).warm_up_time(Duration::from_millis(500));
        criterion = criterion.measurement_time(Duration::from_secs(2)).without_plots();
        if support::smoke() {
            criterion = criterion.sample_size(10).warm_up_time(Duration::from_millis(1));
            criterion = criterion.measurement_time(Duration::from_millis(1));
        }
        Self { criterion: criterion.configure_from_args(), report: Report::new("local") }
    }

    /// Both take a number of iterations, of `each` units, and say how long they took.
    #[allow(clippy::too_many_arguments, reason = "a row")]
    fn pair(
        &mut self,
        (name, what): (&str, &str),
        (shown, target): (As, Target),
        each: f64,
        mut ours: impl FnMut(u64) -> Duration,
        against: &str,
        mut floor: impl FnMut(u64) -> Duration,
    ) {
        let mut rounds: Vec<(u64, Round)> = Vec::new();
        let mut group = self.criterion.benchmark_group("local");
        group.sampling_mode(SamplingMode::Flat);
        group.bench_function(name, |bencher| {
            bencher.iter_custom(|iterations| {
                let (mut our_time, mut floor_time) = (Duration::ZERO, Duration::ZERO);
                for turn in 0..TURNS {
                    let share = iterations / TURNS + u64::from(turn < iterations % TURNS);
                    our_time += ours(share);
                    floor_time += floor(share);
                }
                let per = |time: Duration| time.as_secs_f64() / iterations as f64 / each;
                let (ours, floor) = (per(our_time), per(floor_time));
                rounds.push((
                    iterations,
                    match shown {
                        As::Time => Round { ours, floor },
                        As::Rate => Round { ours: 1.0 / ours, floor: 1.0 / floor },
                    },
                ));
                our_time
            });
        });
        group.finish();
        // warming up has other numbers of iterations, all samples have the same
        let Some((last, _)) = rounds.last().copied() else { return };
        rounds.retain(|(iterations, _)| *iterations == last);
        let rounds: Vec<Round> = rounds.into_iter().map(|(_, round)| round).collect();
        let unit = match shown {
            As::Time => Unit::Seconds,
            As::Rate => Unit::PerSecond,
        };
        self.report.row(Row::paired(what, unit, &rounds, against, target));
    }
}

/// How long so many calls keep this thread's processor busy, which leaves out what other processes take of it; each is
/// given its number.
fn timed<R>(iterations: u64, mut call: impl FnMut(usize) -> R) -> Duration {
    let start = ThreadTime::now();
    for at in 0..iterations {
        black_box(call(at as usize));
    }
    start.elapsed()
}

/// Nothing runs on it but what is waited for: no task disturbs a measurement.
fn runtime() -> Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
}

/// Nodes of one network, ready, each with all of them in its view.
fn cluster(runtime: &Runtime, count: usize) -> Vec<Muster> {
    runtime.block_on(async {
        let network = Network::new();
        let mut nodes = Vec::new();
        for number in 0..count {
            let transport = network.node(format!("node-{number:03}").as_str());
            nodes.push(Muster::builder("bench").transport(transport).start().await.unwrap());
        }
        for node in &nodes {
            let whole = node.until(PATIENCE, |s| s.status == Status::Ready && s.view.len() == count);
            whole.await.unwrap();
        }
        nodes
    })
}

fn names(count: usize) -> Vec<Group> {
    (0..count).map(|number| Group::from(format!("room:{number:08}"))).collect()
}

/// A thousand and some names, so that more than one line of a cache is used, and all of them fit into it.
const NAMES: usize = 1024;

fn router(bench: &mut Bench) {
    if !support::wanted("router") {
        return;
    }
    let runtime = runtime();
    let nodes = cluster(&runtime, if support::smoke() { 10 } else { 100 });
    let groups = names(NAMES);
    let mut ring: HashRing<(u32, u32), Xxh3DefaultBuilder> = HashRing::with_hasher(Xxh3DefaultBuilder);
    ring.batch_add((0..100).flat_map(|node| (0..128).map(move |vnode| (node, vnode))).collect());
    assert!(matches!(nodes[0].router(&groups[0]), Route::Router(_)));
    bench.pair(
        ("router", "`router(group)`, 100 nodes x 128 vnodes"),
        (As::Time, Target::AtMost(60e-9)),
        1.0,
        |count| timed(count, |at| nodes[0].router(&groups[at % NAMES])),
        "`HashRing::get` of 12,800 entries with the same hash",
        |count| timed(count, |at| ring.get(&groups[at % NAMES].as_bytes()).copied()),
    );
}

fn targets(bench: &mut Bench) {
    if !support::wanted("targets") {
        return;
    }
    let runtime = runtime();
    let nodes = cluster(&runtime, 4);
    let me = nodes[0].node().clone();
    let routed = |group: &Group| matches!(nodes[0].router(group), Route::Router(node) if node == me);
    let groups: Vec<Group> = names(NAMES * 8).into_iter().filter(routed).take(NAMES).collect();
    let held: DashMap<Group, Vec<NodeId>, Xxh3DefaultBuilder> = DashMap::with_hasher(Xxh3DefaultBuilder);
    let mut members = Vec::new();
    for group in &groups {
        for node in &nodes[1..] {
            members.push(runtime.block_on(node.join_fn(group.clone(), |_| ())).unwrap());
        }
        held.insert(group.clone(), nodes[1..].iter().map(|node| node.node().clone()).collect());
    }
    let sender = nodes[0].sender_hash();
    assert!(groups.iter().all(|group| nodes[0].targets(group, sender).unwrap().len() == 3));
    bench.pair(
        ("targets", "`targets(group)`, 3 holders"),
        (As::Time, Target::AtMost(250e-9)),
        1.0,
        |count| timed(count, |at| nodes[0].targets(&groups[at % groups.len()], sender)),
        "one read of a `DashMap` with as many rows",
        |count| timed(count, |at| held.get(groups[at % groups.len()].as_bytes()).map(|row| row.len())),
    );
    drop(members);
}

fn local_members(bench: &mut Bench) {
    if !support::wanted("local_members") {
        return;
    }
    let runtime = runtime();
    let nodes = cluster(&runtime, 1);
    let members: Vec<_> =
        (0..1000).map(|_| runtime.block_on(nodes[0].join_fn("hall", |_| ())).unwrap()).collect();
    let bare: Vec<Arc<MemberId>> = members.iter().map(|m| Arc::new(m.id().clone())).collect();
    bench.pair(
        ("local_members", "`local_members(group)`, visit 1000: each"),
        (As::Time, Target::AtMost(10e-9)),
        1000.0,
        |count| {
            timed(count, |_| {
                let members = nodes[0].local_members("hall");
                members.iter().map(|member| member.handle.id().number).fold(0, |a, b| a ^ b)
            })
        },
        "a loop over a slice of `Arc`s",
        |count| timed(count, |_| black_box(&bare).iter().map(|id| id.number).fold(0, |a, b| a ^ b)),
    );
}

/// In rows of a thousand: each joins a group of its own, which has a member, and all leave again.
fn join_and_leave(bench: &mut Bench) {
    const ROW: usize = 1000;
    if !support::wanted("join_held") && !support::wanted("leave") {
        return;
    }
    let runtime = runtime();
    let nodes = cluster(&runtime, 1);
    let groups = names(ROW);
    let held: Vec<_> = groups
        .iter()
        .map(|group| runtime.block_on(nodes[0].join_fn(group.clone(), |_| ())).unwrap())
        .collect();
    let join = |at: usize| {
        let joined = nodes[0].join_fn(groups[at].clone(), |_| ()).now_or_never();
        joined.expect("a held group is joined at once").unwrap()
    };
    let map: Mutex<HashMap<u64, u64>> = Mutex::new((0..ROW as u64).map(|at| (at, at)).collect());
    let added = |at: usize| (ROW + at) as u64;
    // what is timed of each row: all joins, or all leaves
    let rows = |count: u64, of: &dyn Fn(usize) -> [Duration; 2], which: usize| {
        let (mut left, mut time) = (count as usize, Duration::ZERO);
        while left > 0 {
            let row = left.min(ROW);
            time += of(row)[which];
            left -= row;
        }
        time
    };
    let ours = |row: usize| {
        let mut members = Vec::with_capacity(row);
        let start = ThreadTime::now();
        (0..row).for_each(|at| members.push(join(at)));
        let joined = ThreadTime::now();
        members.clear();
        [joined.duration_since(start), joined.elapsed()]
    };
    let floor = |row: usize| {
        let start = ThreadTime::now();
        for at in 0..row {
            black_box(map.lock().insert(added(at), 1));
        }
        let joined = ThreadTime::now();
        for at in 0..row {
            black_box(map.lock().remove(&added(at)));
        }
        [joined.duration_since(start), joined.elapsed()]
    };
    for (which, name, what, against) in [
        (0, "join_held", "join of a held group, one thread", "a free mutex and an insert into its map"),
        (1, "leave", "leave, one thread", "a free mutex and a removal from its map"),
    ] {
        if support::wanted(name) {
            bench.pair(
                (name, what),
                (As::Rate, Target::AtLeast(2e6)),
                1.0,
                |count| rows(count, &ours, which),
                against,
                |count| rows(count, &floor, which),
            );
        }
    }
    drop(held);
}

/// Broadcasts to a thousand, in runs that fit into the mailboxes; emptying them is not timed.
const RUN: u64 = 64;

fn in_runs(count: u64, mut run: impl FnMut(u64) -> Duration) -> Duration {
    let (mut left, mut time) = (count, Duration::ZERO);
    while left > 0 {
        time += run(left.min(RUN));
        left -= left.min(RUN);
    }
    time
}

fn bare_senders() -> (Vec<mpsc::Sender<Message>>, Vec<mpsc::Receiver<Message>>) {
    (0..1000).map(|_| mpsc::channel(1024)).unzip()
}

fn emptied(receivers: &mut [mpsc::Receiver<Message>], expected: u64) {
    for receiver in receivers {
        for _ in 0..expected {
            receiver.try_recv().expect("delivered");
        }
    }
}

fn fan_out(bench: &mut Bench) {
    let payload = Bytes::from(vec![7; 100]);
    let runtime = runtime();
    let node = cluster(&runtime, 1).remove(0);
    let id = BroadcastId::new(node.peer().clone(), 0);
    let (bare, mut bare_receivers) = bare_senders();
    let mut floor = |count| {
        in_runs(count, |run| {
            let time = timed(run, |_| {
                let message = Message::new("hall", payload.clone(), id.clone(), Vec::new());
                bare.iter().filter(|sender| sender.try_send(message.clone()).is_ok()).count()
            });
            emptied(&mut bare_receivers, run);
            time
        })
    };
    let against = "the same loop over bare `tokio::sync::mpsc` senders";
    if support::wanted("fan_out_mpsc") {
        let (senders, mut receivers) = bare_senders();
        let join = |sender| runtime.block_on(node.join("hall", sender)).unwrap();
        let members: Vec<_> = senders.into_iter().map(join).collect();
        let ours = |count| {
            in_runs(count, |run| {
                let time = timed(run, |_| node.broadcast_local("hall", payload.clone()));
                emptied(&mut receivers, run);
                time
            })
        };
        let what = "local fan-out to 1000 members that are mpsc senders";
        let shown = (As::Rate, Target::RatioAtLeast(0.8));
        bench.pair(("fan_out_mpsc", what), shown, 1000.0, ours, against, &mut floor);
        drop(members);
    }
    if support::wanted("fan_out_mailboxes") {
        let mut inboxes: Vec<_> =
            (0..1000).map(|_| runtime.block_on(node.subscribe("hall")).unwrap()).collect();
        let ours = |count| {
            in_runs(count, |run| {
                let time = timed(run, |_| node.broadcast_local("hall", payload.clone()));
                for inbox in &mut inboxes {
                    for _ in 0..run {
                        inbox.try_recv().expect("delivered");
                    }
                }
                time
            })
        };
        let what = "local fan-out to 1000 mailboxes";
        let shown = (As::Rate, Target::RatioAtLeast(0.8));
        bench.pair(("fan_out_mailboxes", what), shown, 1000.0, ours, against, &mut floor);
    }
}

/// A record by its key on the node that serves it, and a put there that waits for nobody.
fn cache(bench: &mut Bench) {
    const KEYS: usize = 1000;
    if !support::wanted("cache_get") && !support::wanted("cache_put") {
        return;
    }
    let runtime = runtime();
    let node = cluster(&runtime, 1).remove(0);
    let config = CacheConfig::new("bench").write_mode(WriteMode::Async);
    let cache = runtime.block_on(node.cache(config)).unwrap();
    runtime.block_on(cache.until_ready(PATIENCE)).unwrap();
    let keys: Vec<Term> = (0..KEYS).map(|number| Term::from(format!("user:{number:08}"))).collect();
    let of = |at: usize| record![keys[at % KEYS].clone(), &[7_u8; 100][..]];
    runtime.block_on(cache.put_batch((0..KEYS).map(of))).unwrap();
    let map: DashMap<Term, Record> = (0..KEYS).map(|at| (keys[at].clone(), of(at))).collect();
    if support::wanted("cache_get") {
        let get =
            |at: usize| cache.get_key(keys[at % KEYS].clone()).now_or_never().expect("at once").unwrap();
        let floor = |at: usize| map.get(&keys[at % KEYS]).map(|record| vec![record.clone()]);
        let shown = (As::Rate, Target::AtLeast(5e6));
        let names = ("cache_get", "cache: get by key on its owner");
        let against = "a read of a `DashMap`, the record cloned";
        bench.pair(names, shown, 1.0, |n| timed(n, get), against, |n| timed(n, floor));
    }
    if support::wanted("cache_put") {
        let put = |at: usize| cache.put(of(at)).now_or_never().expect("at once").unwrap();
        let floor = |at: usize| map.insert(keys[at % KEYS].clone(), of(at));
        let shown = (As::Rate, Target::AtLeast(2e5));
        let names = ("cache_put", "cache: async put on its owner, no replica");
        bench.pair(names, shown, 1.0, |n| timed(n, put), "an insert into a `DashMap`", |n| timed(n, floor));
    }
}

fn main() {
    if count::counted() {
        return;
    }
    let mut bench = Bench::new();
    router(&mut bench);
    targets(&mut bench);
    local_members(&mut bench);
    join_and_leave(&mut bench);
    fan_out(&mut bench);
    cache(&mut bench);
    bench.criterion.final_summary();
    count::rows(&mut bench.report);
    bench.report.finish();
}
