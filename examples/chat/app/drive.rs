//! `--replay FILE`: the people of a trace on the page's cluster, in their own time or faster, to be watched.
//!
//! One gateway a node carries its users over one websocket, in the text protocol, as a phone provider's
//! chat bridge would. When the node goes, it does what the page does: another node, the same rooms, and what was
//! not confirmed again.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use serde::Deserialize;
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_tungstenite::tungstenite::Message as Frame;

use super::Failure;
use super::client::{self, Sink, Stream};
use super::cluster::Cluster;
use super::trace::{self, Kind, node_of};
use super::wire::Command;

/// What one gateway is to do.
enum Act {
    Join { user: Arc<str>, room: Arc<str> },
    Leave { user: Arc<str>, room: Arc<str> },
    Say { user: Arc<str>, room: Arc<str>, text: String },
}

/// Plays the trace at `speed` minutes a second; returns at its end.
pub(crate) async fn run(cluster: &Arc<Cluster>, file: &Path, speed: f64) -> Result<(), Failure> {
    let rooms = trace::load(file)?;
    let addresses: Vec<_> = cluster.addresses().into_iter().map(|(_, address)| address).collect();
    let gateways: Vec<_> = (0..addresses.len()).map(|node| Gateway::start(node, addresses.clone())).collect();
    let mut busiest: Vec<_> = rooms.iter().map(|room| (room.steps.len(), &room.name)).collect();
    busiest.sort_unstable_by(|a, b| b.cmp(a));
    let names: Vec<_> = busiest.iter().take(5).map(|(_, name)| name.as_str()).collect();
    println!("{} rooms come to life at {speed} minutes a second; look at {}.", rooms.len(), names.join(", "));

    // All rooms in one order of time; within a minute, room by room.
    let mut steps = Vec::new();
    for room in &rooms {
        let name: Arc<str> = room.name.as_str().into();
        steps.extend(room.steps.iter().map(|step| (step, name.clone(), room)));
    }
    steps.sort_by_key(|(step, ..)| step.minute);
    let began = Instant::now();
    for (count, (step, room, people)) in steps.into_iter().enumerate() {
        let due = began + Duration::from_secs_f64(f64::from(step.minute) / speed);
        tokio::time::sleep_until(due).await;
        if count % 200 == 0 {
            // A minute can hold thousands of joins: the nodes get a breath in between.
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        let user: Arc<str> = people.users[step.user].as_str().into();
        let node = node_of(&user, gateways.len());
        let act = match step.kind {
            Kind::Join => Act::Join { user, room },
            Kind::Leave => Act::Leave { user, room },
            Kind::Say => Act::Say { user, room, text: words(count, step.bytes) },
        };
        gateways[node].send(act).map_err(|_| "a gateway has ended early")?;
    }
    Ok(())
}

/// Something to read of about that many bytes: the trace has no text.
fn words(seed: usize, bytes: usize) -> String {
    const WORDS: [&str; 16] = [
        "has", "anyone", "tried", "the", "new", "kernel", "with", "this", "driver", "it", "works", "here",
        "after", "a", "clean", "install",
    ];
    let mut dice = super::Dice::new(seed as u64);
    let mut text = String::new();
    while text.len() < bytes.max(1) {
        if !text.is_empty() {
            text.push(' ');
        }
        text.push_str(WORDS[dice.roll(WORDS.len())]);
    }
    text
}

struct Gateway {
    home: usize,
    addresses: Vec<SocketAddr>,
    /// Who is in which room.
    seats: BTreeSet<(Arc<str>, Arc<str>)>,
    /// What was said and not confirmed, by `re`.
    open: BTreeMap<u64, String>,
    next: u64,
}

#[derive(Deserialize)]
struct Answer<'a> {
    is: &'a str,
    re: Option<u64>,
}

impl Gateway {
    fn start(home: usize, addresses: Vec<SocketAddr>) -> mpsc::UnboundedSender<Act> {
        let (sender, acts) = mpsc::unbounded_channel();
        let gateway = Self { home, addresses, seats: BTreeSet::new(), open: BTreeMap::new(), next: 1 };
        tokio::spawn(gateway.run(acts));
        sender
    }

    async fn run(mut self, mut acts: mpsc::UnboundedReceiver<Act>) {
        let mut at = self.home;
        loop {
            match client::connect(self.addresses[at]).await {
                Ok((sink, stream)) => {
                    // However this one ends: the next one starts over.
                    let _ended = self.serve(sink, stream, &mut acts).await;
                }
                Err(_) => tokio::time::sleep(Duration::from_millis(50)).await,
            }
            at = (at + 1) % self.addresses.len();
        }
    }

    /// Returns when the connection has ended or the node is about to stop.
    async fn serve(
        &mut self,
        mut sink: Sink,
        mut stream: Stream,
        acts: &mut mpsc::UnboundedReceiver<Act>,
    ) -> Result<(), Failure> {
        for (user, room) in self.seats.clone() {
            let command = self.join(user, room);
            self.send(&mut sink, &command).await?;
        }
        for text in self.open.values() {
            client::send(&mut sink, text.clone()).await?;
        }
        loop {
            tokio::select! {
                frame = stream.next() => match frame {
                    Some(Ok(Frame::Text(text))) => {
                        if self.hear(&text) {
                            return client::send(&mut sink, Frame::Close(None)).await;
                        }
                    }
                    Some(Ok(Frame::Close(_)) | Err(_)) | None => return Ok(()),
                    Some(Ok(_)) => {}
                },
                // At the end of the trace its people stay in their rooms, silent.
                Some(act) = acts.recv() => self.act(&mut sink, act).await?,
            }
        }
    }

    async fn act(&mut self, sink: &mut Sink, act: Act) -> Result<(), Failure> {
        let command = match act {
            Act::Join { user, room } => {
                self.seats.insert((user.clone(), room.clone()));
                self.join(user, room)
            }
            Act::Leave { user, room } => {
                self.seats.remove(&(user.clone(), room.clone()));
                Command::Leave { re: self.number(), user, room }
            }
            Act::Say { user, room, text } => {
                let re = self.number();
                let id = format!("{}-{re}", self.home).into();
                let command = Command::Say { re, name: user.clone(), user, room, id, text };
                self.open.insert(re, serde_json::to_string(&command)?);
                command
            }
        };
        self.send(sink, &command).await
    }

    async fn send(&self, sink: &mut Sink, command: &Command) -> Result<(), Failure> {
        client::send(sink, serde_json::to_string(command)?).await
    }

    fn join(&mut self, user: Arc<str>, room: Arc<str>) -> Command {
        Command::Join { re: self.number(), name: user.clone(), user, room, quiet: false }
    }

    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// Whether the node is about to stop.
    fn hear(&mut self, text: &str) -> bool {
        let Ok(answers) = serde_json::from_str::<Vec<Answer<'_>>>(text) else { return false };
        for answer in &answers {
            if let ("sent", Some(re)) = (answer.is, answer.re) {
                self.open.remove(&re);
            }
        }
        answers.iter().any(|answer| answer.is == "going")
    }
}
