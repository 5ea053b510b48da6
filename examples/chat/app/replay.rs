//! `--check --replay FILE`: a whole trace, as fast as it goes, and the question whether everybody got everything.
//!
//! Users are spread over the nodes by a hash of their name. A gateway carries them over 16 websockets a node,
//! a room always over the same one, in the binary protocol; each user in each room is a member of its own.
//!
//! The events of a room happen in their order, the rooms at once. Messages go out up to [`WINDOW`] at a time;
//! before somebody joins or leaves, everything that was said has arrived. So who must hear a message is simply
//! who has joined and not left in the trace before it, **its sender included**. That is computed from the
//! trace alone, in [`due`], and compared bit by bit with what the sockets brought.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::{BufMut, Bytes, BytesMut};
use futures_util::StreamExt;
use parking_lot::Mutex;
use tokio::sync::{Notify, mpsc};
use tokio_tungstenite::tungstenite::Message as Frame;

use super::Failure;
use super::check::Report;
use super::client::{self, Sink, Stream};
use super::cluster::Cluster;
use super::ledger::Row;
use super::trace::{self, Kind, Room, Step, node_of};
use super::wire::{Compact, MAX_FRAME};

/// Websockets to each node.
const SOCKETS: usize = 16;
/// Messages of one room that may be under way.
const WINDOW: usize = 24;
/// A room that gets nothing for so long gives up.
const PATIENCE: Duration = Duration::from_secs(60);
/// In front of the bytes of a message: its number in the room, and its sender.
const HEAD: usize = 8;
/// The longest body that is sent; a trace that asks for more gets this much.
const MAX_BODY: usize = 512 * 1024;

/// A set of small numbers.
#[derive(Clone, Default, PartialEq, Eq)]
struct Bits(Vec<u64>);

impl Bits {
    /// Whether it is new.
    fn insert(&mut self, number: usize) -> bool {
        let (word, bit) = (number / 64, 1u64 << (number % 64));
        if self.0.len() <= word {
            self.0.resize(word + 1, 0);
        }
        let new = self.0[word] & bit == 0;
        self.0[word] |= bit;
        new
    }

    fn add(&mut self, number: usize) {
        let _known = self.insert(number);
    }

    fn remove(&mut self, number: usize) {
        if let Some(word) = self.0.get_mut(number / 64) {
            *word &= !(1 << (number % 64));
        }
    }

    fn iter(&self) -> impl Iterator<Item = usize> {
        let word = |(index, word): (usize, &u64)| {
            let word = *word;
            (0..64).filter(move |bit| word & (1 << bit) != 0).map(move |bit| index * 64 + bit)
        };
        self.0.iter().enumerate().flat_map(word)
    }

    fn without(&self, other: &Self) -> u64 {
        let pairs = self.0.iter().enumerate();
        pairs
            .map(|(index, word)| u64::from((word & !other.0.get(index).copied().unwrap_or(0)).count_ones()))
            .sum()
    }

    fn len(&self) -> u64 {
        self.0.iter().map(|word| u64::from(word.count_ones())).sum()
    }
}

/// Which messages each user of a room has to hear, from the trace alone.
fn due(room: &Room) -> Vec<Bits> {
    let mut due = vec![Bits::default(); room.users.len()];
    let mut inside = Bits::default();
    let mut said = 0;
    for step in &room.steps {
        match step.kind {
            Kind::Join => inside.add(step.user),
            Kind::Leave => inside.remove(step.user),
            Kind::Say => {
                inside.iter().for_each(|user| due[user].add(said));
                said += 1;
            }
        }
    }
    due
}

/// What has happened in one room so far, as seen from the sockets.
#[derive(Default)]
struct Seen {
    heard: Vec<Bits>,
    sent: usize,
    receipts: usize,
    flooded: usize,
    /// Joins and leaves that were confirmed.
    moves: usize,
    deliveries: u64,
    duplicated: u64,
    trouble: Vec<String>,
}

struct Place {
    number: usize,
    /// The number of its first user; the others follow.
    base: usize,
    /// Which node serves each user.
    nodes: Vec<usize>,
    seen: Mutex<Seen>,
    progress: Notify,
}

/// Where a room's commands go, by node.
type Senders = Vec<mpsc::UnboundedSender<Compact>>;

pub(crate) async fn run(file: &Path, cluster: Arc<Cluster>) -> Result<Report, Failure> {
    let began = Instant::now();
    let rooms = trace::load(file)?;
    let nodes = cluster.addresses().len();
    let mut places = Vec::with_capacity(rooms.len());
    let mut base = 0;
    for (number, room) in rooms.iter().enumerate() {
        let nodes: Vec<_> = room.users.iter().map(|user| node_of(user, nodes)).collect();
        let seen = Seen { heard: vec![Bits::default(); room.users.len()], ..Seen::default() };
        places.push(Place { number, base, nodes, seen: Mutex::new(seen), progress: Notify::new() });
        base += room.users.len();
    }
    let places: Arc<[Place]> = places.into();
    let mut sockets: Vec<Senders> = vec![Vec::new(); SOCKETS];
    for senders in &mut sockets {
        for (node, (_, address)) in cluster.addresses().into_iter().enumerate() {
            let (sink, stream) = client::connect(address).await?;
            let (sender, commands) = mpsc::unbounded_channel();
            senders.push(sender);
            tokio::spawn(write(sink, commands));
            tokio::spawn(read(stream, node, places.clone()));
        }
    }
    let rooms = Arc::new(rooms);
    let mut playing = tokio::task::JoinSet::new();
    for number in 0..rooms.len() {
        let (rooms, places) = (rooms.clone(), places.clone());
        let senders = sockets[number % SOCKETS].clone();
        playing.spawn(async move {
            let place = &places[number];
            if let Err(what) = play(&rooms[number], place, &senders).await {
                place.seen.lock().trouble.push(format!("room {}: {what}", rooms[number].name));
            }
        });
    }
    let mut tick = tokio::time::interval(Duration::from_secs(5));
    tick.tick().await;
    loop {
        tokio::select! {
            played = playing.join_next() => match played {
                Some(played) => played?,
                None => break,
            },
            _ = tick.tick() => progress(&places, began),
        }
    }
    let took = began.elapsed();
    drop(sockets);
    cluster.shutdown().await;
    Ok(report(&rooms, &places, nodes, took))
}

fn progress(places: &[Place], began: Instant) {
    let (sent, deliveries) = places.iter().fold((0, 0), |(sent, deliveries), place| {
        let seen = place.seen.lock();
        (sent + seen.receipts, deliveries + seen.deliveries)
    });
    eprintln!("{:>4} s: {sent} messages, {deliveries} deliveries", began.elapsed().as_secs());
}

/// One room from its first event to its last.
async fn play(room: &Room, place: &Place, senders: &Senders) -> Result<(), String> {
    let send = |user: usize, command| {
        senders[place.nodes[user]].send(command).map_err(|_| "its websocket has ended".to_owned())
    };
    let number = wire(place.number);
    let (mut moves, mut expected, mut inside) = (0, 0u64, Bits::default());
    for group in room.steps.chunk_by(|a, b| a.kind == b.kind) {
        // What was said before has arrived before anybody comes or goes, and the reverse.
        for step in group {
            let user = wire(place.base + step.user);
            match step.kind {
                Kind::Join => {
                    inside.add(step.user);
                    send(step.user, Compact::Join { user, room: number })?;
                    moves += 1;
                }
                Kind::Leave => {
                    inside.remove(step.user);
                    send(step.user, Compact::Leave { user, room: number })?;
                    moves += 1;
                }
                Kind::Say => {
                    place.until(|seen| seen.sent - seen.receipts < WINDOW).await?;
                    expected += inside.len();
                    let said = {
                        let mut seen = place.seen.lock();
                        seen.sent += 1;
                        seen.sent - 1
                    };
                    let payload = payload(place, said, step);
                    send(step.user, Compact::Say { room: number, number: wire(said), payload })?;
                }
            }
        }
        place
            .until(|seen| seen.receipts == seen.sent && seen.deliveries >= expected && seen.moves == moves)
            .await?;
    }
    Ok(())
}

impl Place {
    async fn until(&self, holds: impl Fn(&Seen) -> bool) -> Result<(), String> {
        loop {
            let progress = self.progress.notified();
            tokio::pin!(progress);
            progress.as_mut().enable();
            {
                let seen = self.seen.lock();
                if holds(&seen) {
                    return Ok(());
                }
            }
            if tokio::time::timeout(PATIENCE, progress).await.is_err() {
                let seen = self.seen.lock();
                return Err(format!(
                    "nothing for {} s, with {} of {} messages confirmed and {} joins and leaves",
                    PATIENCE.as_secs(),
                    seen.receipts,
                    seen.sent,
                    seen.moves
                ));
            }
        }
    }

    fn take(&self, item: Compact, node: usize) {
        let mut seen = self.seen.lock();
        match item {
            Compact::Joined { .. } | Compact::Left { .. } => seen.moves += 1,
            Compact::Sent { flooded, .. } => {
                seen.receipts += 1;
                seen.flooded += usize::from(flooded);
            }
            Compact::Deliver { payload, to, .. } => self.deliver(&mut seen, &payload, &to, node),
            Compact::Failed { why, .. } => seen.trouble.push(why),
            Compact::Join { .. } | Compact::Leave { .. } | Compact::Say { .. } => {
                seen.trouble.push("a node sent a command".to_owned());
            }
        }
        drop(seen);
        self.progress.notify_waiters();
    }

    fn deliver(&self, seen: &mut Seen, payload: &Bytes, to: &[u32], node: usize) {
        let Some(said) = unpack(self, payload).filter(|said| *said < seen.sent) else {
            seen.trouble.push(format!("a message of {} bytes that nobody sent so", payload.len()));
            return;
        };
        for user in to {
            let user = (*user as usize).wrapping_sub(self.base);
            if self.nodes.get(user) != Some(&node) {
                seen.trouble.push(format!("message {said} came to user {user} over node n{}", node + 1));
            } else if seen.heard[user].insert(said) {
                seen.deliveries += 1;
            } else {
                seen.duplicated += 1;
            }
        }
    }
}

/// The body repeats a pattern that follows from room and number, so that a byte out of place is seen.
fn payload(place: &Place, said: usize, step: &Step) -> Bytes {
    let body = step.bytes.min(MAX_BODY);
    let mut bytes = BytesMut::with_capacity(HEAD + body);
    bytes.put_u32_le(wire(said));
    bytes.put_u32_le(wire(place.base + step.user));
    bytes.extend((0..body).map(|index| pattern(place, said, index)));
    bytes.freeze()
}

fn pattern(place: &Place, said: usize, index: usize) -> u8 {
    (place.number.wrapping_mul(7) + said.wrapping_mul(13) + index.wrapping_mul(31)) as u8
}

/// The number of the message, if it is whole.
fn unpack(place: &Place, payload: &Bytes) -> Option<usize> {
    let said = u32::from_le_bytes(payload.get(..4)?.try_into().ok()?) as usize;
    let body = payload.get(HEAD..)?;
    body.iter().enumerate().all(|(index, byte)| *byte == pattern(place, said, index)).then_some(said)
}

fn wire(number: usize) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}

/// Puts the commands that have gathered into one frame.
async fn write(mut sink: Sink, mut commands: mpsc::UnboundedReceiver<Compact>) {
    let mut batch = Vec::new();
    while commands.recv_many(&mut batch, 1024).await > 0 {
        let mut frame = BytesMut::new();
        for command in batch.drain(..) {
            command.write(&mut frame);
            if frame.len() >= MAX_FRAME / 4 && client::send(&mut sink, frame.split().freeze()).await.is_err()
            {
                return;
            }
        }
        if !frame.is_empty() && client::send(&mut sink, frame.freeze()).await.is_err() {
            return;
        }
    }
    let _ended = client::send(&mut sink, Frame::Close(None)).await;
}

async fn read(mut stream: Stream, node: usize, places: Arc<[Place]>) {
    while let Some(Ok(frame)) = stream.next().await {
        let Frame::Binary(mut frame) = frame else { continue };
        while !frame.is_empty() {
            let Ok(item) = Compact::read(&mut frame) else {
                complain(&places, "a malformed frame");
                return;
            };
            match places.get(item.room() as usize) {
                Some(place) => place.take(item, node),
                None => complain(&places, "something of a room that there is not"),
            }
        }
    }
}

fn complain(places: &[Place], what: &str) {
    if let Some(place) = places.first() {
        place.seen.lock().trouble.push(what.to_owned());
    }
}

fn report(rooms: &[Room], places: &[Place], nodes: usize, took: Duration) -> Report {
    let mut rows = vec![Row::default(); nodes];
    let (mut trouble, mut sent, mut flooded, mut total) = (Vec::new(), 0, 0, Row::default());
    for (room, place) in rooms.iter().zip(places) {
        let seen = place.seen.lock();
        sent += seen.sent;
        flooded += seen.flooded;
        total.duplicated += seen.duplicated;
        trouble.extend(seen.trouble.iter().cloned());
        for (user, due) in due(room).into_iter().enumerate() {
            let row = &mut rows[place.nodes[user]];
            let (missed, stray) = (due.without(&seen.heard[user]), seen.heard[user].without(&due));
            row.memberships += 1;
            row.should += due.len();
            row.did += due.len() - missed;
            row.missed += missed;
            if missed + stray > 0 {
                let name = &room.users[user];
                trouble
                    .push(format!("{name} in {}: {missed} missed, {stray} that were not for it", room.name));
            }
        }
    }
    let mut lines = vec!["node  users in rooms  should receive  did receive  missed".to_owned()];
    for (number, row) in rows.iter().enumerate() {
        lines.push(format!(
            "n{:<4} {:>13} {:>15} {:>12} {:>7}",
            number + 1,
            row.memberships,
            row.should,
            row.did,
            row.missed
        ));
        total.memberships += row.memberships;
        total.should += row.should;
        total.did += row.did;
        total.missed += row.missed;
    }
    let seconds = took.as_secs_f64();
    lines.push(format!(
        "{} rooms, {SOCKETS} websockets a node, {seconds:.1} s: {:.0} messages and {:.0} deliveries a second; {flooded} flooded",
        rooms.len(),
        sent as f64 / seconds,
        total.did as f64 / seconds,
    ));
    Report { lines, sent, total, trouble }
}
