//! The transport over TCP: the conformance suite, and what only a network can do.

// helpers of tests are no test functions to the lint
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "tests say what went wrong by panicking"
)]

use std::sync::Arc;
use std::time::Duration;

use muster_router::Muster;
use muster_router::transport::tcp::TcpTransport;

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
