//! A recorded chat: who joined, spoke and left in which room, replayed as fast as the cluster takes it. The trace is a
//! table of tab-separated columns (minute, room, event, user, bytes; events are join, msg and leave), named by
//! `MUSTER_BENCH_TRACE`; without it one of the same shape is made up.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use bytes::Bytes;
use muster_router::{Group, Membership, Message};
use tokio::task::JoinSet;

use super::node::Life;
use super::words::*;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Join,
    Say,
    Leave,
}

struct Event {
    room: String,
    kind: Kind,
    user: String,
    bytes: usize,
}

/// Rooms of the trace that is made up, and its events.
const ROOMS: usize = 187;
const EVENTS: usize = 120_000;

fn load() -> Result<Vec<Event>, String> {
    let Some(path) = std::env::var_os("MUSTER_BENCH_TRACE") else { return Ok(made_up()) };
    let text = std::fs::read_to_string(&path).map_err(|error| format!("{}: {error}", path.display()))?;
    let event = |line: &str| {
        let mut fields = line.split('\t').skip(1);
        let room = fields.next()?.to_owned();
        let kind = match fields.next()? {
            "join" => Kind::Join,
            "msg" => Kind::Say,
            "leave" => Kind::Leave,
            _ => return None,
        };
        Some(Event { room, kind, user: fields.next()?.to_owned(), bytes: fields.next()?.parse().ok()? })
    };
    let lines = text.lines().enumerate().skip(1);
    lines.map(|(at, line)| event(line).ok_or_else(|| format!("line {}: {line:?}", at + 1))).collect()
}

/// As recorded ones are: few rooms are busy, one event in eight is a join and few are leaves, and lines are short.
fn made_up() -> Vec<Event> {
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    let mut roll = move |below: usize| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 16) as usize % below
    };
    let mut present: Vec<Vec<usize>> = vec![Vec::new(); ROOMS];
    let mut met = vec![0; ROOMS];
    let mut events = Vec::with_capacity(EVENTS);
    while events.len() < EVENTS {
        let widest = roll(ROOMS) + 1;
        let room = roll(widest);
        let here = &mut present[room];
        let (kind, user) = match roll(100) {
            _ if here.is_empty() => (Kind::Join, met[room]),
            0..12 => (Kind::Join, met[room]),
            12 if here.len() > 3 => (Kind::Leave, here.swap_remove(roll(here.len()))),
            _ => (Kind::Say, here[roll(here.len())]),
        };
        if kind == Kind::Join {
            met[room] += 1;
            here.push(user);
        }
        let bytes = if kind == Kind::Say { 10 + roll(50) + roll(50) } else { 0 };
        events.push(Event { room: format!("r{room}"), kind, user: format!("r{room}u{user}"), bytes });
    }
    events
}

fn hash(name: &str) -> usize {
    name.bytes().fold(0xcbf2_9ce4_8422_2325u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    }) as usize
        >> 8
}

/// What happens in one room to the users of one node, in order; all rooms at the same time, as far as callers reach.
pub(crate) async fn run(life: &Life, nodes: usize, index: usize, callers: usize) -> Result<Replayed, String> {
    let mut events = load()?;
    if crate::support::smoke() {
        events.truncate(2000);
    }
    let mut lanes: Vec<Vec<Event>> = (0..callers).map(|_| Vec::new()).collect();
    for event in events.into_iter().filter(|event| hash(&event.user) % nodes == index) {
        lanes[hash(&event.room) % callers].push(event);
    }
    let began = now();
    let mut tasks = JoinSet::new();
    for lane in lanes {
        tasks.spawn(replay(life.clone(), lane));
    }
    let mut all = Replayed::default();
    while let Some(one) = tasks.join_next().await {
        let one = one.map_err(|error| error.to_string())?;
        all.events += one.events;
        all.joins += one.joins;
        all.says += one.says;
        all.bytes += one.bytes;
        all.failed += one.failed;
    }
    all.nanos = now() - began;
    Ok(all)
}

async fn replay(life: Life, events: Vec<Event>) -> Replayed {
    let line = Bytes::from(vec![b'.'; 64 << 10]);
    let mut members: HashMap<String, Membership> = HashMap::new();
    let mut done = Replayed::default();
    for Event { room, kind, user, bytes } in events {
        done.events += 1;
        match kind {
            Kind::Join => {
                let counted = Arc::clone(&life.counted);
                let hear = move |_: &Message| {
                    counted.fetch_add(1, Ordering::Relaxed);
                };
                done.joins += 1;
                match life.muster.join_fn(Group::from(room), hear).await {
                    Ok(member) => drop(members.insert(user, member)),
                    Err(_) => done.failed += 1,
                }
            }
            Kind::Say => {
                let text = line.slice(..bytes.min(line.len()));
                done.says += 1;
                done.bytes += text.len() as u64;
                done.failed += u64::from(life.muster.broadcast(room, text).await.is_err());
            }
            Kind::Leave => drop(members.remove(&user)),
        }
    }
    done
}
