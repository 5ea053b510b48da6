//! Who gets no link over TCP: each refusal is named and counted on both ends where both may know, dials go on
//! ever more slowly, and the good peers link all the while.

// helpers of tests are no test functions to the lint
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    unreachable_pub,
    reason = "tests say what went wrong by panicking"
)]

mod certificates;
mod peers;
mod strangers;

use std::io;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use muster_router::Peer;
use muster_router::transport::tcp::{RefusalCause, Secret, TcpBuilder, TcpStats, TcpTransport};
use muster_router::transport::{Frame, Inbound, Lane, Receiver, Terms, Transport};

/// Far longer than anything may take.
const PATIENCE: Duration = Duration::from_secs(60);

/// What a transport has reported.
#[derive(Default)]
struct Reports {
    up: Vec<Peer>,
    /// Everything that happened to links, in words.
    all: Vec<String>,
    frames: Vec<Frame>,
}

#[derive(Default)]
struct Recorder(Mutex<Reports>);

impl Recorder {
    fn note(&self, what: &str, peer: &Peer) {
        self.0.lock().unwrap().all.push(format!("{what} {}", peer.node));
    }
}

impl Receiver for Recorder {
    fn peer_up(&self, peer: Peer) {
        self.note("up", &peer);
        self.0.lock().unwrap().up.push(peer);
    }
    fn peer_suspect(&self, peer: &Peer) {
        self.note("suspect", peer);
    }
    fn peer_resumed(&self, peer: &Peer) {
        self.note("resumed", peer);
    }
    fn peer_down(&self, peer: &Peer) {
        self.note("down", peer);
        self.0.lock().unwrap().up.retain(|other| other != peer);
    }
    fn discovery_settled(&self) {}
    fn frame(&self, _peer: &Peer, frame: Frame) {
        self.0.lock().unwrap().frames.push(frame);
    }
}

/// A transport that runs, and what it has reported.
struct Node {
    transport: Arc<TcpTransport>,
    reports: Arc<Recorder>,
    since: Instant,
}

fn terms() -> Terms {
    Terms { scope: "rooms".into(), vnodes: 128, protocol: 1 }
}

fn plain(node: &str) -> TcpBuilder {
    TcpTransport::builder(node).listen("127.0.0.1:0")
}

fn secret() -> Secret {
    Secret::new("a secret of the whole cluster").unwrap()
}

fn with_secret(node: &str) -> TcpBuilder {
    plain(node).secret(secret())
}

impl Node {
    async fn start(builder: TcpBuilder) -> Self {
        Self::start_on(builder, terms()).await
    }

    async fn start_on(builder: TcpBuilder, terms: Terms) -> Self {
        let transport = Arc::new(builder.build().unwrap());
        let reports = Arc::new(Recorder::default());
        let receiver: Arc<dyn Receiver> = reports.clone();
        let since = Instant::now();
        transport.start(Inbound::new(Arc::downgrade(&receiver), terms)).await.unwrap();
        Node { transport, reports, since }
    }

    fn address(&self) -> String {
        self.transport.local_addr().unwrap().to_string()
    }

    fn stats(&self) -> TcpStats {
        self.transport.stats()
    }

    fn refused(&self, cause: RefusalCause) -> u64 {
        self.stats().refused(cause)
    }

    fn peer(&self, node: &str) -> Option<Peer> {
        self.reports.0.lock().unwrap().up.iter().find(|peer| peer.node.as_str() == node).cloned()
    }

    fn linked(&self) -> Vec<String> {
        let mut names: Vec<String> =
            self.reports.0.lock().unwrap().up.iter().map(|peer| peer.node.to_string()).collect();
        names.sort();
        names
    }

    async fn until_linked(&self, names: &[&str]) {
        until(
            || format!("links to {names:?}: {:?}, {:?}", self.linked(), self.stats()),
            || self.linked() == names,
        )
        .await;
    }

    async fn until_refused(&self, cause: RefusalCause) {
        until(|| format!("{cause}: {:?}", self.stats()), || self.refused(cause) > 0).await;
    }

    /// Waits for some dials of the one address that this node was given, and sees that they become rarer: by
    /// default the wait doubles from 50 ms on, less a random half.
    async fn dials_ever_more_slowly(&self) {
        const DIALS: u64 = 5;
        until(|| format!("{DIALS} dials: {:?}", self.stats()), || self.stats().dialled >= DIALS).await;
        // the number first: the time that passes until it is looked at allows more dials, not fewer
        let dials = self.stats().dialled;
        let least = Duration::from_millis(25) * ((1 << (dials - 1)) - 1);
        assert!(self.since.elapsed() >= least, "{dials} dials within {:?}", self.since.elapsed());
    }
}

async fn until(what: impl Fn() -> String, mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < PATIENCE, "never: {}", what());
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

/// `bad` was given the address of `good` and of nobody else. Both count the cause, nobody gets a link, it is no
/// tight loop, and a node that is as it should be still gets in.
async fn no_link(good: &Node, bad: &Node, at_good: RefusalCause, at_bad: RefusalCause, newcomer: TcpBuilder) {
    good.until_refused(at_good).await;
    bad.until_refused(at_bad).await;
    bad.dials_ever_more_slowly().await;
    assert_eq!(bad.linked(), [""; 0]);
    let before = good.linked();
    let newcomer = Node::start(newcomer.seed(good.address())).await;
    let name = newcomer.transport.node().to_string();
    until(|| format!("a link to {name}: {:?}", good.stats()), || good.peer(&name).is_some()).await;
    newcomer.transport.shutdown().await;
    until(|| format!("{name} leaves"), || good.linked() == before).await;
    assert_eq!(good.stats().malformed, 0);
}

/// What is logged on this thread from now on, warnings and worse.
fn logs() -> (Arc<Log>, tracing::subscriber::DefaultGuard) {
    let log = Arc::new(Log::default());
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(tracing::Level::WARN)
        .with_ansi(false)
        .with_writer(log.clone())
        .finish();
    (log, tracing::subscriber::set_default(subscriber))
}

#[derive(Default)]
struct Log(Mutex<String>);

impl Log {
    /// The lines that hold all of these.
    fn lines(&self, with: &[&str]) -> Vec<String> {
        let text = self.0.lock().unwrap();
        text.lines().filter(|line| with.iter().all(|part| line.contains(part))).map(str::to_owned).collect()
    }
}

impl io::Write for &Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().push_str(&String::from_utf8_lossy(bytes));
        Ok(bytes.len())
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn data(text: &str) -> Frame {
    Frame::new(Lane::Data, "", text.to_owned())
}
