//! Puts and gets of a cache whose primary is another process.

use std::sync::Arc;
use std::time::Duration;

use muster_router::cache::{Cache, CacheConfig, Term, WriteMode};
use muster_router::{Muster, record};
use tokio::task::JoinSet;

use super::bare::Bare;
use super::lab::Lab;
use super::many;
use super::words::*;
use crate::support::report::{Report, Row, Target, Unit};
use crate::support::{Round, median, wanted};

const SIZE: usize = 100;
const CALLERS: usize = 64;
const KEYS: usize = 10_000;
const PATIENCE: Duration = Duration::from_secs(60);

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

// ---- the node

/// Opens the cache, and waits until all its partitions have so many copies as they should.
pub(crate) async fn open(muster: &Muster) -> Result<Cache, String> {
    let cache = muster.cache(CacheConfig::new("bench").write_mode(WriteMode::Async)).await.map_err(text)?;
    cache.until_ready(PATIENCE).await.map_err(text)?;
    Ok(cache)
}

/// So many callers put or get, each one after the other, records that another node serves.
pub(crate) async fn call(
    cache: &Cache,
    puts: bool,
    callers: usize,
    until: Nanos,
) -> Result<(u64, Nanos), String> {
    let elsewhere = |key: &Term| {
        let status = cache.status(cache.partition_of(key.clone()));
        status.is_some_and(|status| status.primary.as_ref().is_some_and(|primary| primary != cache.peer()))
    };
    let keys = (0..).map(|number: u64| Term::from(format!("user:{number:08}")));
    let keys: Arc<Vec<Term>> = Arc::new(keys.filter(elsewhere).take(KEYS).collect());
    let began = now();
    let mut tasks = JoinSet::new();
    for caller in 0..callers {
        let (cache, keys) = (cache.clone(), keys.clone());
        tasks.spawn(async move {
            let mut count = 0;
            while now() < until {
                let key = keys[(caller * 151 + count as usize) % keys.len()].clone();
                if puts {
                    cache.put(record![key, &[7_u8; SIZE][..]]).await.map_err(text)?;
                } else {
                    cache.get_key(key).await.map_err(text)?;
                }
                count += 1;
            }
            Ok::<u64, String>(count)
        });
    }
    let mut all = 0;
    while let Some(count) = tasks.join_next().await {
        all += count.map_err(text)??;
    }
    Ok((all, now() - began))
}

// ---- the conductor

/// On a node that serves none of these records, and has a copy of each.
pub(crate) fn rows(report: &mut Report, bare: &Bare) {
    if !wanted("cache_tcp") {
        return;
    }
    let mut lab = Lab::of(&["a", "b"]);
    lab.ask_all(&["a", "b"], &Act::Open);
    for (what, puts, target) in [
        ("cache: async puts of 100 B at another node, 2 copies, TCP", true, Target::AtLeast(200e3)),
        ("cache: gets by key from another node, TCP", false, Target::Shown),
    ] {
        let (mut done, mut spent) = (Vec::new(), Vec::new());
        for _ in 0..many(5, 1) {
            let (before, busy) = (lab.bytes("a"), lab.busy());
            let act = Act::Call { puts, callers: CALLERS, millis: many(700, 50) as u64 };
            let Answer::Took { count, nanos } = lab.ask("a", act) else { panic!("no count") };
            let (after, busy) = (lab.bytes("a"), lab.busy() - busy);
            let each = |after: u64, before: u64| ((after - before) / count) as usize;
            let (answer, request) = (each(after.0, before.0), each(after.1, before.1));
            let floor = bare.ping_pongs(CALLERS, request, answer, Duration::from_nanos(nanos));
            done.push(Round { ours: count as f64 / seconds(nanos), floor });
            spent.push(seconds(busy) / count as f64);
        }
        let against = "ping-pong of as many bytes by as many callers";
        report.row(Row::paired(&format!("{what}, 64 callers"), Unit::PerSecond, &done, against, target));
        let what = format!("one of those {}, processor time of both", if puts { "puts" } else { "gets" });
        report.row(Row::alone(&what, Unit::Seconds, median(spent), "none", Target::Shown));
    }
}
