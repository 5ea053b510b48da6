//! One websocket: its commands, and the members that its users are.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::task::Poll;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::extract::ws::{Message as Frame, WebSocket};
use bytes::Bytes;
use futures_util::future::BoxFuture;
use futures_util::stream::{FuturesUnordered, SplitStream};
use futures_util::{FutureExt, StreamExt};

use super::cluster::{Cluster, Decision, Membership, Node, Phase, Picture, Receipt, Stop};
use super::outbox::{CompactMember, Outbox, TextMember, swallow};
use super::wire::{Command, Compact, Event, MAX_NAME, MAX_TEXT, Place, Said, decision_name, room_group};

/// How many commands of one socket may be under way; beyond, the socket is not read.
const UNDER_WAY: usize = 4096;
/// How often a watching page is told what has changed in the cluster.
const LOOK: Duration = Duration::from_millis(250);
/// How long a closing socket may take to write what it still has.
const LAST_WORDS: Duration = Duration::from_secs(2);

static SESSIONS: AtomicU64 = AtomicU64::new(1);

/// A user in a room, in the terms of either protocol.
#[derive(Clone, PartialEq, Eq, Hash)]
enum Key {
    Text { user: Arc<str>, room: Arc<str> },
    Compact { user: u32, room: u32 },
}

enum Seat {
    /// The join is under way; these commands wait for it. `left`: a leave came meanwhile.
    Joining {
        answer: Vec<u64>,
        left: bool,
    },
    In(#[allow(dead_code, reason = "held for its drop: it leaves")] Membership),
}

/// What ends a command that waited.
enum Done {
    Joined { key: Key, result: Result<Membership, String> },
    Sent { re: u64, result: Result<Receipt, String> },
    CompactSent { room: u32, number: u32, result: Result<Receipt, String> },
    Managed { re: u64, result: Result<(), String> },
}

struct Session {
    id: u64,
    node: Arc<Node>,
    cluster: Weak<Cluster>,
    outbox: Arc<Outbox>,
    seats: HashMap<Key, Seat>,
    /// Names of the users of this socket who show themselves, for the list of people.
    shown: HashMap<Key, Arc<str>>,
    under_way: FuturesUnordered<BoxFuture<'static, Done>>,
    watching: Option<Option<Arc<str>>>,
    pictured: Option<Picture>,
}

/// Serves one websocket until either side ends it.
pub(crate) async fn run(socket: WebSocket, node: Arc<Node>, cluster: Weak<Cluster>) {
    let _guard = node.enter();
    let (sink, mut stream) = socket.split();
    let outbox = Arc::new(Outbox::default());
    let mut session = Session {
        id: SESSIONS.fetch_add(1, Ordering::Relaxed),
        node,
        cluster,
        outbox: outbox.clone(),
        seats: HashMap::new(),
        shown: HashMap::new(),
        under_way: FuturesUnordered::new(),
        watching: None,
        pictured: None,
    };
    session.welcome();
    let mut writer = tokio::spawn(async move { outbox.write_to(sink).await });
    let crashed = tokio::select! {
        crashed = session.serve(&mut stream) => crashed,
        _ = &mut writer => false,
    };
    session.leave_all();
    session.outbox.close();
    if crashed {
        writer.abort();
    } else {
        let rest = async {
            if !writer.is_finished() {
                let _ended = (&mut writer).await;
            }
            swallow(stream).await;
        };
        if tokio::time::timeout(LAST_WORDS, rest).await.is_err() {
            writer.abort();
        }
    }
}

impl Session {
    fn welcome(&self) {
        let Some(cluster) = self.cluster.upgrade() else { return };
        let nodes =
            cluster.addresses().into_iter().map(|(name, address)| Place { name, port: address.port() });
        self.outbox.event(&Event::Welcome { node: &self.node.name, nodes: nodes.collect() });
    }

    /// Whether the node crashed; else the socket is closed in order.
    async fn serve(&mut self, stream: &mut SplitStream<WebSocket>) -> bool {
        let mut phase = self.node.phase.subscribe();
        let mut look = tokio::time::interval(LOOK);
        look.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        if *phase.borrow_and_update() == Phase::Going {
            self.outbox.event(&Event::Going);
        }
        loop {
            tokio::select! {
                frame = stream.next(), if self.under_way.len() < UNDER_WAY => match frame {
                    Some(Ok(Frame::Text(text))) => self.text(&text),
                    Some(Ok(Frame::Binary(frame))) => {
                        if !self.binary(frame) {
                            return false;
                        }
                    }
                    Some(Ok(Frame::Ping(_) | Frame::Pong(_))) => {}
                    Some(Ok(Frame::Close(_)) | Err(_)) | None => return false,
                },
                Some(done) = self.under_way.next() => self.finish(done),
                _ = look.tick(), if self.watching.is_some() => self.picture(),
                change = phase.changed() => match change.map(|()| *phase.borrow_and_update()) {
                    Ok(Phase::Going) => self.outbox.event(&Event::Going),
                    Ok(Phase::Crashed) => return true,
                    Ok(Phase::Closed) | Err(_) => return false,
                    Ok(Phase::Open) => {}
                },
            }
        }
    }

    /// Begins something that may wait. It is polled at once, so that commands of one socket start in the
    /// order in which they came.
    fn begin(&mut self, work: impl Future<Output = Done> + Send + 'static) {
        let mut work = work.boxed();
        let mut context = std::task::Context::from_waker(std::task::Waker::noop());
        match work.as_mut().poll(&mut context) {
            Poll::Ready(done) => self.finish(done),
            Poll::Pending => self.under_way.push(work),
        }
    }

    fn failed(&self, re: Option<u64>, why: impl Into<String>) {
        self.outbox.event(&Event::Failed { re, why: why.into() });
    }

    fn text(&mut self, text: &str) {
        match serde_json::from_str::<Command>(text) {
            Ok(command) => self.command(command),
            Err(error) => self.failed(None, format!("not a command: {error}")),
        }
    }

    fn command(&mut self, command: Command) {
        match command {
            Command::Join { re, user, name, room, quiet } => {
                if let Err(why) =
                    checked(&[("room", &room), ("user", &user)]).and_then(|()| short("name", &name))
                {
                    return self.failed(Some(re), why);
                }
                let key = Key::Text { user: user.clone(), room: room.clone() };
                if !quiet {
                    self.shown.insert(key.clone(), name);
                }
                let member = TextMember { outbox: self.outbox.clone(), room: room.clone(), user };
                let muster = self.node.muster.clone();
                self.join(
                    key,
                    re,
                    async move { muster.join(room_group(&room), member).await.map_err(words) },
                );
            }
            Command::Leave { re, user, room } => {
                self.leave(&Key::Text { user, room });
                self.outbox.event(&Event::Ok { re });
            }
            Command::Say { re, user, name, room, id, text } => {
                self.say(re, room, Said { id, user, name, text, at: now() })
            }
            Command::Watch { room } => {
                self.watching = Some(room);
                self.picture();
            }
            Command::Stop { re, node, crash } => {
                let stop = if crash { Stop::Crash } else { Stop::Orderly };
                self.manage(re, move |cluster| async move { cluster.stop_node(&node, stop).await });
            }
            Command::Start { re, node } => {
                self.manage(re, move |cluster| async move { cluster.start_node(&node).await });
            }
            Command::Echo { re } => self.outbox.event(&Event::Ok { re }),
        }
    }

    fn say(&mut self, re: u64, room: Arc<str>, said: Said) {
        let named = [("room", &room), ("user", &said.user), ("id", &said.id)];
        let fits = checked(&named).and_then(|()| short("name", &said.name)).and_then(|()| {
            let given = said.text.len();
            (1..=MAX_TEXT)
                .contains(&given)
                .then_some(())
                .ok_or(format!("a text of {given} bytes; 1 to {MAX_TEXT} are allowed"))
        });
        let payload = fits.and_then(|()| serde_json::to_vec(&said).map_err(|error| error.to_string()));
        match payload {
            Ok(payload) => {
                self.node.hubs.note(&room, &said);
                let muster = self.node.muster.clone();
                self.begin(async move {
                    let result = muster.broadcast(room_group(&room), payload).await.map_err(words);
                    Done::Sent { re, result }
                });
            }
            Err(why) => self.failed(Some(re), why),
        }
    }

    /// Runs apart from this session, so that it also ends when the session's own node is the one to stop.
    fn manage<F>(&mut self, re: u64, work: impl FnOnce(Arc<Cluster>) -> F)
    where
        F: Future<Output = Result<(), super::Failure>> + Send + 'static,
    {
        let Some(cluster) = self.cluster.upgrade() else { return };
        let task = tokio::spawn(work(cluster));
        self.begin(async move {
            let result = match task.await {
                Ok(result) => result.map_err(|error| error.to_string()),
                Err(error) => Err(error.to_string()),
            };
            Done::Managed { re, result }
        });
    }

    fn join(
        &mut self,
        key: Key,
        re: u64,
        work: impl Future<Output = Result<Membership, String>> + Send + 'static,
    ) {
        match self.seats.get_mut(&key) {
            Some(Seat::In(_)) => self.joined(&key, re),
            Some(Seat::Joining { answer, left }) => {
                answer.push(re);
                *left = false;
            }
            None => {
                self.seats.insert(key.clone(), Seat::Joining { answer: vec![re], left: false });
                self.begin(async move { Done::Joined { key, result: work.await } });
            }
        }
    }

    fn joined(&self, key: &Key, re: u64) {
        match key {
            Key::Text { user, room } => {
                if let Some(name) = self.shown.get(key) {
                    self.node.hubs.enter(room, self.id, user.clone(), name.clone(), self.outbox.clone());
                }
                self.outbox.event(&Event::Ok { re });
            }
            Key::Compact { user, room } => self.outbox.compact(Compact::Joined { user: *user, room: *room }),
        }
    }

    fn leave(&mut self, key: &Key) {
        match self.seats.get_mut(key) {
            Some(Seat::Joining { left, .. }) => *left = true,
            Some(Seat::In(_)) => drop(self.seats.remove(key)),
            None => {}
        }
        if let Key::Text { user, room } = key
            && self.shown.remove(key).is_some()
        {
            self.node.hubs.leave(room, self.id, user);
        }
    }

    fn leave_all(&mut self) {
        self.seats.clear();
        for key in std::mem::take(&mut self.shown).into_keys() {
            if let Key::Text { user, room } = key {
                self.node.hubs.leave(&room, self.id, &user);
            }
        }
    }

    fn finish(&mut self, done: Done) {
        match done {
            Done::Joined { key, result } => self.seat(key, result),
            Done::Sent { re, result: Ok(receipt) } => {
                let decision = decision_name(receipt.decision);
                self.outbox.event(&Event::Sent { re, decision, nodes: receipt.nodes });
            }
            Done::CompactSent { room, number, result: Ok(receipt) } => {
                let flooded = receipt.decision != Decision::Targeted;
                self.outbox.compact(Compact::Sent { room, number, flooded });
            }
            Done::CompactSent { room, number, result: Err(why) } => {
                self.outbox.compact(Compact::Failed { room, why: format!("message {number}: {why}") });
            }
            Done::Managed { re, result: Ok(()) } => self.outbox.event(&Event::Ok { re }),
            Done::Sent { re, result: Err(why) } | Done::Managed { re, result: Err(why) } => {
                self.failed(Some(re), why);
            }
        }
    }

    fn seat(&mut self, key: Key, result: Result<Membership, String>) {
        let Some(Seat::Joining { answer, left }) = self.seats.remove(&key) else { return };
        match result {
            Ok(membership) => {
                // A leave that came first has been answered; the guard leaves as it drops.
                if !left {
                    self.seats.insert(key.clone(), Seat::In(membership));
                }
                answer.iter().for_each(|re| self.joined(&key, *re));
            }
            Err(why) => match key {
                Key::Text { .. } => answer.iter().for_each(|re| self.failed(Some(*re), why.clone())),
                Key::Compact { user, room } => {
                    self.outbox.compact(Compact::Failed { room, why: format!("join of {user}: {why}") });
                }
            },
        }
    }

    /// Whether the frame was well formed.
    fn binary(&mut self, mut frame: Bytes) -> bool {
        while !frame.is_empty() {
            match Compact::read(&mut frame) {
                Ok(Compact::Join { user, room }) => {
                    let member = CompactMember { outbox: self.outbox.clone(), room, user };
                    let muster = self.node.muster.clone();
                    let group = compact_group(room);
                    self.join(Key::Compact { user, room }, 0, async move {
                        muster.join(group, member).await.map_err(words)
                    });
                }
                Ok(Compact::Leave { user, room }) => {
                    self.leave(&Key::Compact { user, room });
                    self.outbox.compact(Compact::Left { user, room });
                }
                Ok(Compact::Say { room, number, payload }) => {
                    let muster = self.node.muster.clone();
                    self.begin(async move {
                        let result = muster.broadcast(compact_group(room), payload).await.map_err(words);
                        Done::CompactSent { room, number, result }
                    });
                }
                Ok(_) | Err(_) => {
                    self.failed(None, "not a sequence of commands");
                    return false;
                }
            }
        }
        true
    }

    fn picture(&mut self) {
        let Some(room) = &self.watching else { return };
        let Some(cluster) = self.cluster.upgrade() else { return };
        let picture = cluster.picture(&self.node, room.as_deref());
        if self.pictured.as_ref() != Some(&picture) {
            self.outbox.event(&Event::Cluster { picture: &picture });
            self.pictured = Some(picture);
        }
    }
}

fn compact_group(room: u32) -> String {
    room_group(&format!("r{room}"))
}

fn words(error: impl std::fmt::Display) -> String {
    error.to_string()
}

fn now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

fn checked(names: &[(&str, &Arc<str>)]) -> Result<(), String> {
    for (what, name) in names {
        if name.trim().is_empty() {
            return Err(format!("the {what} is empty; 1 to {MAX_NAME} bytes are allowed"));
        }
        short(what, name)?;
    }
    Ok(())
}

fn short(what: &str, name: &str) -> Result<(), String> {
    if name.len() > MAX_NAME {
        return Err(format!("the {what} has {} bytes; at most {MAX_NAME} are allowed", name.len()));
    }
    Ok(())
}
