//! The conformance suite on NATS, against a real server, and what is particular to NATS.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "helpers of tests are no test functions"
)]

mod nats_server;

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use muster_router::testing::conformance::{Harness, Unsupported};
use muster_router::transport::Transport;
use muster_router::transport::link::LinkConfig;
use muster_router::transport::memory::Network;
use muster_router::transport::nats::{NatsLimits, NatsTransport};
use nats_server::{NatsServer, Proxy, is_installed};
use parking_lot::Mutex;

/// A server of its own, and a wire of its own for each node.
struct Nats {
    server: Option<NatsServer>,
    /// By name, the latest last: a rival of a live node does not take its wire away.
    nodes: Mutex<Vec<(String, Arc<Proxy>, NatsTransport)>>,
    /// Stands in where there is no server, so that the suite says what it skips instead of failing.
    nothing: Network,
}

impl Nats {
    fn latest(&self, node: &str) -> Option<(String, Arc<Proxy>, NatsTransport)> {
        self.nodes.lock().iter().rev().find(|(name, ..)| name == node).cloned()
    }

    fn proxy(&self, node: &str) -> Option<Arc<Proxy>> {
        self.latest(node).map(|(_, proxy, _)| proxy)
    }
}

/// On a machine that is busy with other tests, a node may get no time for seconds.
fn patient() -> LinkConfig {
    LinkConfig {
        ping_timeout: Duration::from_secs(10),
        stall_timeout: Duration::from_secs(60),
        handshake_timeout: Duration::from_secs(10),
        ..LinkConfig::default()
    }
}

fn limits() -> NatsLimits {
    NatsLimits { discovery_window: Duration::from_secs(2), ..NatsLimits::default() }
}

#[async_trait]
impl Harness for Nats {
    async fn new() -> Self {
        let server = is_installed("a rule of the conformance suite").then(NatsServer::start);
        Nats { server, nodes: Mutex::default(), nothing: Network::new() }
    }
    async fn transport(&self, node: &str) -> Arc<dyn Transport> {
        let Some(server) = &self.server else { return Arc::new(self.nothing.node(node)) };
        let proxy = Arc::new(Proxy::to(server.address()).await);
        let transport = NatsTransport::builder(node)
            .servers(proxy.url())
            .link(patient())
            .limits(limits())
            .build()
            .expect("valid");
        self.nodes.lock().push((node.to_owned(), proxy, transport.clone()));
        Arc::new(transport)
    }
    fn patience(&self) -> Duration {
        Duration::from_secs(60)
    }
    fn skipped(&self, rule: &str, why: &str) {
        assert!(self.server.is_none(), "every rule applies here, but {rule} was skipped: {why}");
    }
    async fn blip(&self, a: &str, _b: &str) -> Result<(), Unsupported> {
        self.proxy(a).ok_or(Unsupported)?.blip();
        Ok(())
    }
    async fn cut(&self, a: &str, _b: &str) -> Result<(), Unsupported> {
        self.proxy(a).ok_or(Unsupported)?.cut();
        Ok(())
    }
    async fn heal(&self, a: &str, _b: &str) -> Result<(), Unsupported> {
        self.proxy(a).ok_or(Unsupported)?.heal();
        Ok(())
    }
    async fn crash(&self, node: &str) -> Result<(), Unsupported> {
        let (_, _, transport) = self.latest(node).ok_or(Unsupported)?;
        transport.crash().await;
        Ok(())
    }
    async fn freeze(&self, node: &str) -> Result<(), Unsupported> {
        self.proxy(node).ok_or(Unsupported)?.freeze();
        Ok(())
    }
    async fn thaw(&self, node: &str) -> Result<(), Unsupported> {
        self.proxy(node).ok_or(Unsupported)?.heal();
        Ok(())
    }
}

muster_router::transport_conformance!(Nats);
