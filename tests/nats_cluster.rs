//! Whole scopes over NATS, against a real server: what is lost when a node or the server goes away under load.
//! Each scenario prints a line.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "helpers of tests are no test functions"
)]

mod nats_server;

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use bytes::Bytes;
use muster_router::transport::link::LinkConfig;
use muster_router::transport::nats::{NatsLimits, NatsTransport, async_nats};
use muster_router::{Membership, Message, Muster, Status};
use nats_server::{NatsServer, is_installed};
use parking_lot::Mutex;
use tokio::task::JoinHandle;

const PATIENCE: Duration = Duration::from_secs(120);
const GROUPS: usize = 12;

/// One broadcast, as its sender knows it.
#[derive(Clone, Debug)]
struct Sent {
    group: usize,
    began: Instant,
    confirmed: Option<Instant>,
}

/// One member of one group, with what it got.
struct Listener {
    node: String,
    group: usize,
    joined: OnceLock<Instant>,
    left: Mutex<Option<Instant>>,
    got: Mutex<HashMap<Bytes, usize>>,
}

/// The nodes, what they send, and what their members get.
struct Lab {
    scenario: &'static str,
    url: String,
    client: fn() -> async_nats::ConnectOptions,
    link: LinkConfig,
    limits: NatsLimits,
    body: usize,
    nodes: Mutex<BTreeMap<String, (Muster, NatsTransport)>>,
    sent: Mutex<HashMap<Bytes, Sent>>,
    confirmed: AtomicUsize,
    listeners: Mutex<Vec<Arc<Listener>>>,
    memberships: Mutex<Vec<(String, Membership)>>,
    /// Broadcasts that began or were open in these are not due.
    outages: Mutex<Vec<(Instant, Instant)>>,
}

impl Lab {
    fn new(scenario: &'static str, server: &NatsServer) -> Self {
        Self {
            scenario,
            url: server.url(),
            client: NatsTransport::connect_options,
            link: LinkConfig { reconnect_grace: Duration::from_secs(10), ..LinkConfig::default() },
            limits: NatsLimits { discovery_window: Duration::from_secs(2), ..NatsLimits::default() },
            body: 64,
            nodes: Mutex::default(),
            sent: Mutex::default(),
            confirmed: AtomicUsize::new(0),
            listeners: Mutex::default(),
            memberships: Mutex::default(),
            outages: Mutex::default(),
        }
    }

    async fn start(&self, name: &str) {
        let transport = NatsTransport::builder(name)
            .servers(&self.url)
            .options((self.client)())
            .link(self.link.clone())
            .limits(self.limits.clone())
            .build()
            .expect("valid");
        let muster = Muster::builder("räume 1.*").transport(transport.clone()).start().await.expect("starts");
        self.nodes.lock().insert(name.to_owned(), (muster, transport));
    }

    async fn start_all(&self, names: &[&str]) {
        for name in names {
            self.start(name).await;
        }
        self.until_whole().await;
        for name in names {
            self.join(name).await;
        }
    }

    fn muster(&self, name: &str) -> Muster {
        self.nodes.lock().get(name).expect("it runs").0.clone()
    }

    fn transport(&self, name: &str) -> NatsTransport {
        self.nodes.lock().get(name).expect("it runs").1.clone()
    }

    /// Every node that runs is ready, and sees every other.
    async fn until_whole(&self) {
        let all: Vec<Muster> = self.nodes.lock().values().map(|(muster, _)| muster.clone()).collect();
        for muster in &all {
            muster
                .until(PATIENCE, |state| state.status == Status::Ready && state.view.len() == all.len())
                .await
                .unwrap_or_else(|error| panic!("{}: {error}\n{}", self.scenario, muster.dump()));
        }
    }

    /// A member of every group.
    async fn join(&self, name: &str) {
        let muster = self.muster(name);
        for group in 0..GROUPS {
            let listener = Arc::new(Listener {
                node: name.to_owned(),
                group,
                joined: OnceLock::new(),
                left: Mutex::new(None),
                got: Mutex::default(),
            });
            let heard = listener.clone();
            let hear = move |message: &Message| {
                *heard.got.lock().entry(message.payload().clone()).or_default() += 1;
            };
            let membership = muster.join_fn(format!("group-{group}"), hear).await.expect("joins");
            // due from now on
            listener.joined.set(Instant::now()).expect("once");
            self.listeners.lock().push(listener);
            self.memberships.lock().push((name.to_owned(), membership));
        }
    }

    /// Ends a node as `kill -9` would; its members are due nothing from now on.
    async fn crash(&self, name: &str) {
        let now = Instant::now();
        for listener in self.listeners.lock().iter().filter(|listener| listener.node == name) {
            listener.left.lock().get_or_insert(now);
        }
        let (muster, transport) = self.nodes.lock().remove(name).expect("it runs");
        transport.crash().await;
        self.memberships.lock().retain(|(node, _)| node != name);
        muster.shutdown().await;
    }

    /// Sends on this node until told to stop, in all groups in turn.
    fn load(self: &Arc<Self>, name: &str) -> Load {
        let (lab, muster, name) = (self.clone(), self.muster(name), name.to_owned());
        static LAST: AtomicUsize = AtomicUsize::new(0);
        let load = LAST.fetch_add(1, Ordering::Relaxed);
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let task = tokio::spawn(async move {
            let life = muster.peer().incarnation;
            for number in 0_usize.. {
                if stopped.load(Ordering::SeqCst) {
                    return;
                }
                let group = number % GROUPS;
                let mut text = format!("{name} {life} {load} {number} ").into_bytes();
                text.resize(text.len().max(lab.body), b'.');
                let body = Bytes::from(text);
                let sent = Sent { group, began: Instant::now(), confirmed: None };
                lab.sent.lock().insert(body.clone(), sent);
                if muster.broadcast(format!("group-{group}"), body.clone()).await.is_err() {
                    // the node has ended
                    return;
                }
                lab.sent.lock().get_mut(&body).expect("just sent").confirmed = Some(Instant::now());
                lab.confirmed.fetch_add(1, Ordering::SeqCst);
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        });
        Load { stop, task }
    }

    /// Until so many more broadcasts have been confirmed.
    async fn flow(&self, count: usize) {
        let until = self.confirmed.load(Ordering::SeqCst) + count;
        self.eventually("broadcasts are confirmed", || self.confirmed.load(Ordering::SeqCst) >= until).await;
    }

    async fn eventually(&self, what: &str, mut holds: impl FnMut() -> bool) {
        let start = Instant::now();
        while !holds() {
            assert!(start.elapsed() < PATIENCE, "{}: never: {what}; {}", self.scenario, self.verdict());
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Expected, delivered of those, missed, and duplicated.
    fn count(&self) -> [usize; 4] {
        let [mut expected, mut delivered, mut duplicated] = [0; 3];
        let outages = self.outages.lock().clone();
        let sent = self.sent.lock();
        for listener in self.listeners.lock().iter() {
            let (got, left) = (listener.got.lock(), *listener.left.lock());
            duplicated += got.values().filter(|count| **count > 1).count();
            let joined = *listener.joined.get().expect("joined");
            for (body, sent) in sent.iter().filter(|(_, sent)| sent.group == listener.group) {
                let Some(confirmed) = sent.confirmed else { continue };
                let away = |(from, to): &(Instant, Instant)| sent.began < *to && confirmed > *from;
                if sent.began < joined
                    || left.is_some_and(|left| left < confirmed)
                    || outages.iter().any(away)
                {
                    continue;
                }
                expected += 1;
                delivered += usize::from(got.contains_key(body));
            }
        }
        [expected, delivered, expected - delivered, duplicated]
    }

    fn verdict(&self) -> String {
        let [expected, delivered, missed, duplicated] = self.count();
        format!(
            "sent {}, expected {expected}, delivered {delivered}, missed {missed}, duplicated {duplicated}",
            self.sent.lock().len()
        )
    }

    /// All loads end, everything due arrives, and nothing twice.
    async fn close(&self, loads: Vec<Load>) {
        for load in loads {
            load.stop.store(true, Ordering::SeqCst);
            tokio::time::timeout(PATIENCE, load.task).await.expect("a load ends").expect("and not badly");
        }
        self.eventually("everything due has arrived", || self.count()[2] == 0).await;
        println!("{}: {}", self.scenario, self.verdict());
        let [expected, _, missed, duplicated] = self.count();
        assert!(expected > 0, "nothing was due");
        assert_eq!((missed, duplicated), (0, 0));
        let nodes = std::mem::take(&mut *self.nodes.lock());
        for (muster, _) in nodes.into_values() {
            muster.shutdown().await;
        }
    }
}

struct Load {
    stop: Arc<AtomicBool>,
    task: JoinHandle<()>,
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_node_that_is_killed_under_load_and_comes_back() {
    if !is_installed("a node that is killed") {
        return;
    }
    let server = NatsServer::start();
    let lab = Arc::new(Lab::new("a node is killed and comes back", &server));
    lab.start_all(&["a", "b", "c", "d"]).await;
    let mut loads: Vec<Load> = ["a", "b", "c", "d"].map(|name| lab.load(name)).into();
    lab.flow(300).await;
    for _ in 0..2 {
        lab.crash("c").await;
        lab.flow(100).await;
        lab.until_whole().await;
        lab.start("c").await;
        lab.until_whole().await;
        lab.join("c").await;
        loads.push(lab.load("c"));
        lab.flow(300).await;
    }
    lab.close(loads).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_server_that_restarts_under_load_loses_nothing() {
    if !is_installed("a server that restarts") {
        return;
    }
    let mut server = NatsServer::start();
    let lab = Arc::new(Lab::new("the server restarts twice", &server));
    lab.start_all(&["a", "b", "c"]).await;
    let loads: Vec<Load> = ["a", "b", "c"].map(|name| lab.load(name)).into();
    for round in 1..=2 {
        lab.flow(300).await;
        server.kill();
        let down = || ["a", "b", "c"].iter().all(|name| !lab.transport(name).stats().connected);
        lab.eventually("all have lost NATS", down).await;
        server.run();
        let all = ["a", "b", "c"].map(|name| lab.transport(name));
        lab.eventually("all links have resumed", || {
            all.iter().all(|transport| transport.stats().link.resumed >= 2 * round)
        })
        .await;
    }
    lab.flow(300).await;
    for name in ["a", "b", "c"] {
        let stats = lab.transport(name).stats();
        assert!(stats.disconnects >= 2 && stats.connected, "{stats:?}");
        // nobody was given up: the scope has its first view still
        assert_eq!(stats.peers, 2);
    }
    lab.close(loads).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_server_that_stays_away_for_longer_than_the_grace() {
    if !is_installed("a server that stays away") {
        return;
    }
    let mut server = NatsServer::start();
    let mut lab = Lab::new("the server is away for longer than the grace", &server);
    lab.link.reconnect_grace = Duration::from_secs(1);
    let lab = Arc::new(lab);
    lab.start_all(&["a", "b", "c"]).await;
    let loads: Vec<Load> = ["a", "b", "c"].map(|name| lab.load(name)).into();
    lab.flow(300).await;
    let from = Instant::now();
    server.kill();
    let alone = || ["a", "b", "c"].iter().all(|name| lab.transport(name).stats().peers == 0);
    lab.eventually("everyone is down for everyone", alone).await;
    server.run();
    let together = || ["a", "b", "c"].iter().all(|name| lab.transport(name).stats().peers == 2);
    lab.eventually("everyone is up again", together).await;
    lab.until_whole().await;
    lab.outages.lock().push((from, Instant::now()));
    lab.flow(300).await;
    lab.close(loads).await;
}

/// The client drops what a small subscription cannot hold, as it does when a node is too slow.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_slow_consumer_loses_nothing() {
    if !is_installed("a slow consumer") {
        return;
    }
    let server = NatsServer::start();
    let mut lab = Lab::new("a slow consumer", &server);
    lab.client = || NatsTransport::connect_options().subscription_capacity(6);
    lab.body = 20_000;
    lab.limits.message = 1024;
    let lab = Arc::new(lab);
    lab.start_all(&["a", "b"]).await;
    let loads: Vec<Load> = ["a", "a", "b"].map(|name| lab.load(name)).into();
    let dropped = || {
        let stats = lab.transport("b").stats();
        stats.slow_consumers > 3 && stats.gaps > 3
    };
    lab.eventually("the client has dropped messages and it was noticed", dropped).await;
    lab.close(loads).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_server_that_takes_small_messages_only() {
    if !is_installed("a small max_payload") {
        return;
    }
    let config = std::env::temp_dir().join(format!("muster-nats-small-{}.conf", std::process::id()));
    std::fs::write(&config, "max_payload: 1024\n").expect("a file");
    let server = NatsServer::start_with(&["-c", config.to_str().expect("UTF-8")]);
    let mut lab = Lab::new("max_payload of 1 KiB, broadcasts of 100 KB", &server);
    lab.body = 100_000;
    let lab = Arc::new(lab);
    lab.start_all(&["a", "b"]).await;
    let loads: Vec<Load> = ["a", "b"].map(|name| lab.load(name)).into();
    lab.flow(60).await;
    assert_eq!(lab.transport("a").stats().gaps, 0);
    lab.close(loads).await;
    std::fs::remove_file(config).expect("removed");
}
