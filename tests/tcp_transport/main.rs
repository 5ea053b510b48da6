//! The transport over TCP: the conformance suite, and what only a network can do.

// helpers of tests are no test functions to the lint
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "tests say what went wrong by panicking"
)]

mod mesh;
mod relay;

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use muster_router::Muster;
use muster_router::testing::conformance::{Harness, Unsupported};
use muster_router::transport::Transport;
use muster_router::transport::link::LinkConfig;
use muster_router::transport::tcp::{DiscoveryOptions, TcpLimits, TcpTransport};
use relay::Relays;

/// On a machine that is busy with other tests, a node may get no time for seconds: only a fault that a rule
/// causes may take a link down.
fn patient() -> LinkConfig {
    let patience = Duration::from_secs(60);
    LinkConfig {
        ping_timeout: patience,
        stall_timeout: patience,
        handshake_timeout: Duration::from_secs(20),
        reconnect_grace: Duration::from_secs(4),
        ..LinkConfig::default()
    }
}

/// Back soon, so that no rule waits for the back-off.
fn eager() -> DiscoveryOptions {
    DiscoveryOptions { redial_cap: Duration::from_millis(400), ..DiscoveryOptions::default() }
}

/// How many seeds a node gets at most; the others it finds through them.
const SEEDS: usize = 10;

struct Relayed(Relays);

#[async_trait]
impl Harness for Relayed {
    async fn new() -> Self {
        Self(Relays::new())
    }
    async fn transport(&self, node: &str) -> Arc<dyn Transport> {
        let front = self.0.front(node).await;
        let seeds = self.0.fronts().into_iter().take(SEEDS).map(|seed| seed.to_string());
        let transport = TcpTransport::builder(node)
            .listen("127.0.0.1:0")
            .advertise(front.to_string())
            .seeds(seeds)
            .link(patient())
            .discovery(eager())
            .limits(TcpLimits {
                handshake_timeout: Duration::from_secs(30),
                connect_timeout: Duration::from_secs(30),
                ..TcpLimits::default()
            })
            .build()
            .unwrap();
        let transport = Arc::new(transport);
        self.0.born(node, transport.clone());
        transport
    }
    fn patience(&self) -> Duration {
        // a relay doubles the work, and the machine may be busy with other tests
        Duration::from_secs(90)
    }
    fn peers(&self) -> usize {
        // each pair has two connections with a relay between them, in one process
        24
    }
    fn refuses_duplicates(&self) -> bool {
        // the later of two nodes of one name wins; there is nobody to ask before
        false
    }
    fn skipped(&self, rule: &str, why: &str) {
        assert_eq!(rule, "duplicate_identity", "every other rule applies here, but was skipped: {why}");
    }
    async fn blip(&self, a: &str, b: &str) -> Result<(), Unsupported> {
        self.0.blip(a, b);
        Ok(())
    }
    async fn cut(&self, a: &str, b: &str) -> Result<(), Unsupported> {
        self.0.cut(a, b);
        Ok(())
    }
    async fn cut_seen_by(&self, a: &str, b: &str) -> Result<(), Unsupported> {
        self.0.cut_seen_by(a, b);
        Ok(())
    }
    async fn heal(&self, a: &str, b: &str) -> Result<(), Unsupported> {
        self.0.heal(a, b);
        Ok(())
    }
    async fn crash(&self, node: &str) -> Result<(), Unsupported> {
        self.0.crash(node).await;
        Ok(())
    }
    async fn freeze(&self, node: &str) -> Result<(), Unsupported> {
        self.0.freeze(node, true);
        Ok(())
    }
    async fn thaw(&self, node: &str) -> Result<(), Unsupported> {
        self.0.freeze(node, false);
        Ok(())
    }
}

muster_router::transport_conformance!(Relayed);

#[tokio::test]
async fn two_nodes_with_static_seeds() {
    let a = Arc::new(TcpTransport::builder("a").listen("127.0.0.1:0").build().unwrap());
    let first = Muster::builder("rooms").transport(a.clone()).start().await.unwrap();
    let seed = a.local_addr().unwrap().to_string();
    let b = Arc::new(TcpTransport::builder("b").listen("127.0.0.1:0").seed(seed).build().unwrap());
    let second = Muster::builder("rooms").transport(b.clone()).start().await.unwrap();
    let mut inbox = second.subscribe("room").await.unwrap();
    first.broadcast("room", "hello").await.unwrap();
    let message = tokio::time::timeout(Duration::from_secs(10), inbox.recv()).await;
    let message = message.unwrap().unwrap();
    assert_eq!(message.payload(), "hello");
    let stats = a.stats();
    assert_eq!((stats.accepted, stats.connections, stats.all_refused()), (1, 1, 0), "{stats:?}");
}
