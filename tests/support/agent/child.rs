//! The node process.

use std::collections::HashMap;
use std::io::{BufRead, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc;
use std::time::Duration;

use muster_router::transport::link::LinkConfig;
use muster_router::transport::tcp::{Secret, TcpTransport};
use muster_router::{Decision, Event, Incarnation, Membership, Message, Muster, Peer, Status};
use parking_lot::Mutex;
use tokio::sync::{Notify, watch};
use tokio::time::Instant;

use super::words::*;

/// The test that is a node if it is asked to be one, and the variable that asks.
pub const TEST: &str = "a_node_process";
pub const ASKED: &str = "MUSTER_TEST_NODE";

/// How many broadcasts of one node may be under way.
const UNDER_WAY: usize = 100_000;

/// To be called by the test [`TEST`].
pub fn main_if_asked() {
    if std::env::var_os(ASKED).is_none() {
        return;
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(run());
    // not to wait for tasks that have nobody to work for
    std::process::exit(0);
}

async fn run() {
    tracing_subscriber::fmt()
        .with_env_filter(tracing_subscriber::EnvFilter::from_default_env())
        .with_writer(std::io::stderr)
        .init();
    let (said, saying) = mpsc::channel::<Word>();
    std::thread::spawn(move || write(&saying));
    let (commands, mut coming) = tokio::sync::mpsc::unbounded_channel();
    std::thread::spawn(move || {
        for line in std::io::stdin().lock().lines().map_while(Result::ok) {
            let command: Command = serde_json::from_str(&line).expect("a command");
            if commands.send(command).is_err() {
                return;
            }
        }
    });
    let node =
        Arc::new(Node { said, life: Mutex::default(), members: Mutex::default(), load: Load::default() });
    while let Some(Command { re, act }) = coming.recv().await {
        let node = node.clone();
        tokio::spawn(async move {
            let result = node.act(act).await;
            node.say(Word::Answer { re, result });
        });
    }
}

/// One line a word; whatever waits is written at once.
fn write(saying: &mpsc::Receiver<Word>) {
    let mut out = std::io::stdout();
    // ends the line in which the test harness says what it runs
    let _ended = out.write_all(b"\n");
    while let Ok(word) = saying.recv() {
        let mut lines = Vec::new();
        for word in std::iter::once(word).chain(saying.try_iter()) {
            serde_json::to_writer(&mut lines, &word).unwrap();
            lines.push(b'\n');
        }
        if out.write_all(&lines).and_then(|()| out.flush()).is_err() {
            std::process::exit(0);
        }
    }
}

struct Node {
    said: mpsc::Sender<Word>,
    life: Mutex<Option<Life>>,
    members: Mutex<HashMap<u32, Membership>>,
    load: Load,
}

#[derive(Clone)]
struct Life {
    muster: Muster,
    transport: Arc<TcpTransport>,
}

#[derive(Default)]
struct Load {
    /// Ends the generator.
    running: Mutex<Vec<(watch::Sender<bool>, tokio::task::JoinHandle<()>)>>,
    number: AtomicU64,
    under_way: AtomicUsize,
    ended: Notify,
    got: Mutex<Got>,
    lag: AtomicU64,
}

#[derive(Default)]
struct Got {
    origins: Vec<Peer>,
    all: Vec<(u32, usize, u64, Micros)>,
}

impl Node {
    fn say(&self, word: Word) {
        // the writer ends the process when nobody reads
        let _ended = self.said.send(word);
    }

    fn life(&self) -> Result<Life, String> {
        self.life.lock().clone().ok_or_else(|| "not started".into())
    }

    async fn act(self: &Arc<Self>, act: Act) -> Result<Answer, String> {
        match act {
            Act::Start(setup) => self.start(setup).await,
            Act::Join { group, member } => self.join(group, member).await,
            Act::Leave { member } => {
                self.members.lock().remove(&member);
                Ok(Answer::Done)
            }
            Act::Load { group, every, size } => {
                self.begin(group, every, size)?;
                Ok(Answer::Done)
            }
            Act::Rest => {
                let running = std::mem::take(&mut *self.load.running.lock());
                for (stop, generator) in running {
                    stop.send_replace(true);
                    generator.await.map_err(|error| error.to_string())?;
                }
                loop {
                    let ended = self.load.ended.notified();
                    tokio::pin!(ended);
                    ended.as_mut().enable();
                    if self.load.under_way.load(Ordering::SeqCst) == 0 {
                        return Ok(Answer::Done);
                    }
                    ended.await;
                }
            }
            Act::RoutedBy { node, prefix } => {
                let ring = self.life()?.muster.ring();
                let routed = |group: &String| ring.router_for(group).is_some_and(|r| r.as_str() == node);
                let group = (0..100_000).map(|i| format!("{prefix}{i}")).find(routed);
                group.map(Answer::Group).ok_or_else(|| format!("{node} routes nothing"))
            }
            Act::Report => Ok(Answer::Report(self.report())),
            Act::Dump => {
                let life = self.life()?;
                Ok(Answer::Text(format!("{}\n{:?}", life.muster.dump(), life.transport.stats())))
            }
            Act::Drain { millis } => {
                let muster = self.life()?.muster;
                muster.drain(Duration::from_millis(millis)).await.map_err(|error| error.to_string())?;
                Ok(Answer::Done)
            }
            Act::Shutdown => {
                let life = self.life.lock().take().ok_or("not started")?;
                self.members.lock().clear();
                life.muster.shutdown().await;
                Ok(Answer::Done)
            }
        }
    }

    async fn start(self: &Arc<Self>, setup: Setup) -> Result<Answer, String> {
        let transport = Arc::new(transport(&setup)?);
        let starting = Muster::builder("rooms").transport(transport.clone()).start();
        let muster = starting.await.map_err(|error| error.to_string())?;
        let address = transport.local_addr().map(|address| address.to_string()).unwrap_or_default();
        let incarnation = muster.peer().incarnation.get();
        tokio::spawn(tell_states(self.clone(), muster.clone()));
        tokio::spawn(tell_events(self.clone(), muster.clone()));
        *self.life.lock() = Some(Life { muster, transport });
        Ok(Answer::Started { address, incarnation })
    }

    async fn join(self: &Arc<Self>, group: String, member: u32) -> Result<Answer, String> {
        let muster = self.life()?.muster;
        let node = self.clone();
        let joined = muster.join_fn(group, move |message| node.hear(member, message)).await;
        let at = now();
        self.members.lock().insert(member, joined.map_err(|error| error.to_string())?);
        Ok(Answer::Joined { at })
    }

    fn hear(&self, member: u32, message: &Message) {
        let at = now();
        let number = message.payload().get(..8).and_then(|head| head.try_into().ok()).map(u64::from_le_bytes);
        let number = number.expect("our own payload");
        let mut got = self.load.got.lock();
        let origin = &message.id().origin;
        let place = got.origins.iter().position(|known| known == origin).unwrap_or_else(|| {
            got.origins.push(origin.clone());
            got.origins.len() - 1
        });
        got.all.push((member, place, number, at));
    }

    fn begin(self: &Arc<Self>, group: String, every: Micros, size: usize) -> Result<(), String> {
        let muster = self.life()?.muster;
        let mut running = self.load.running.lock();
        if running.is_empty() {
            self.load.lag.store(0, Ordering::SeqCst);
        }
        let (stop, stopped) = watch::channel(false);
        tokio::spawn(watch_lag(self.clone(), stopped.clone()));
        let generator = tokio::spawn(generate(self.clone(), muster, group, every, size, stopped));
        running.push((stop, generator));
        Ok(())
    }

    fn report(&self) -> Report {
        let got = self.load.got.lock();
        let (resident, peak) = memory();
        Report {
            origins: got.origins.iter().map(|o| (o.node.to_string(), o.incarnation.get())).collect(),
            got: got.all.clone(),
            lag: self.load.lag.load(Ordering::SeqCst),
            resident,
            peak,
        }
    }
}

fn transport(setup: &Setup) -> Result<TcpTransport, String> {
    let millis = |given: Option<u64>, usual| given.map_or(usual, Duration::from_millis);
    let usual = LinkConfig::default();
    let link = LinkConfig {
        ping_timeout: millis(setup.link.ping_timeout, usual.ping_timeout),
        stall_timeout: millis(setup.link.stall_timeout, usual.stall_timeout),
        queue_bytes: setup.link.queue_bytes.unwrap_or(usual.queue_bytes),
        ..usual
    };
    let mut builder = TcpTransport::builder(&setup.name).listen(&setup.listen).seeds(&setup.seeds).link(link);
    builder = match &setup.secret {
        Some(secret) => builder.secret(Secret::new(secret.as_bytes()).map_err(|error| error.to_string())?),
        None => builder.insecure(),
    };
    if let Some(address) = &setup.advertise {
        builder = builder.advertise(address);
    }
    if let Some(name) = &setup.dns {
        builder = builder.dns(name, Duration::from_secs(1));
    }
    if let Some(incarnation) = setup.incarnation {
        builder = builder.incarnation(Incarnation::new(incarnation).ok_or("no incarnation")?);
    }
    #[cfg(feature = "gossip")]
    if setup.gossip {
        builder = builder.gossip(muster_router::transport::tcp::GossipOptions::default());
    }
    builder.build().map_err(|error| error.to_string())
}

async fn tell_states(node: Arc<Node>, muster: Muster) {
    let mut changes = muster.changes();
    let mut last = State::default();
    loop {
        let (ready, view, stopped) = {
            let state = changes.borrow_and_update();
            let view = state.view.peers().map(|p| (p.node.to_string(), p.incarnation.get())).collect();
            (state.status == Status::Ready, view, state.stopped)
        };
        let state = State { at: now(), ready, superseded: muster.summary().superseded, view };
        if stopped {
            return;
        }
        if (state.ready, &state.view) != (last.ready, &last.view) {
            node.say(Word::State(state.clone()));
            last = state;
        }
        if changes.changed().await.is_err() {
            return;
        }
    }
}

async fn tell_events(node: Arc<Node>, muster: Muster) {
    let mut events = muster.events();
    drop(muster);
    while let Some(event) = events.recv().await {
        let (what, who) = match event {
            Event::NodeUp(peer) => (Happened::Up, peer.node),
            Event::NodeDown(peer) => (Happened::Down, peer.node),
            Event::NodeSuspect(peer) => (Happened::Suspect, peer.node),
            Event::NodeResumed(peer) => (Happened::Resumed, peer.node),
            Event::Superseded { by } => (Happened::Superseded, by.node),
            Event::Partitioned { missing, .. } => (Happened::Partitioned, missing),
            _ => continue,
        };
        node.say(Word::Event { at: now(), what, node: who.to_string() });
    }
}

/// Open loop: each broadcast begins at its time, or as soon after as the machine allows.
async fn generate(
    node: Arc<Node>,
    muster: Muster,
    group: String,
    every: Micros,
    size: usize,
    mut stopped: watch::Receiver<bool>,
) {
    let began = Instant::now();
    for step in 0u64.. {
        let due = began + Duration::from_micros(every * step);
        tokio::select! {
            biased;
            _ = stopped.wait_for(|stopped| *stopped) => return,
            () = tokio::time::sleep_until(due) => {}
        }
        let under_way = node.load.under_way.fetch_add(1, Ordering::SeqCst);
        assert!(under_way < UNDER_WAY, "the load is more than the cluster takes");
        tokio::spawn(cast(node.clone(), muster.clone(), group.clone(), size));
    }
}

async fn cast(node: Arc<Node>, muster: Muster, group: String, size: usize) {
    let number = node.load.number.fetch_add(1, Ordering::SeqCst);
    let mut payload = number.to_le_bytes().to_vec();
    payload.resize(size.max(8), b'.');
    let sent = now();
    let result = muster.broadcast(group.clone(), payload).await;
    let ended = now();
    let incarnation = muster.peer().incarnation.get();
    let flooded = matches!(&result, Ok(receipt) if receipt.decision == Decision::Flooded);
    let error = result.err().map(|error| error.to_string());
    node.say(Word::Cast(Cast { incarnation, group, number, sent, ended, flooded, error }));
    if node.load.under_way.fetch_sub(1, Ordering::SeqCst) == 1 {
        node.load.ended.notify_waiters();
    }
}

/// A task that wants to wake every 10 ms knows how long the others of this runtime had to wait for a core. (A thread of
/// its own that sleeps most of the time is favoured by the scheduler, and knows of no delay.)
async fn watch_lag(node: Arc<Node>, stopped: watch::Receiver<bool>) {
    const REST: Duration = Duration::from_millis(10);
    while !*stopped.borrow() {
        let due = tokio::time::Instant::now() + REST;
        tokio::time::sleep_until(due).await;
        let late = due.elapsed();
        node.load.lag.fetch_max(u64::try_from(late.as_micros()).unwrap(), Ordering::SeqCst);
    }
}

/// KiB in use, and the most that ever was.
fn memory() -> (u64, u64) {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let field = |name: &str| {
        let line = status.lines().find(|line| line.starts_with(name)).unwrap();
        line.split_whitespace().nth(1).unwrap().parse().unwrap()
    };
    (field("VmRSS:"), field("VmHWM:"))
}
