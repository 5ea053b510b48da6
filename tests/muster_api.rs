//! The public handle, as users see it.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
use std::time::Duration;

use muster_router::transport::memory::Network;
use muster_router::*;

const PATIENCE: Duration = Duration::from_secs(60);

async fn start(network: &Network, name: &str) -> Muster {
    Muster::builder("rooms").transport(network.node(name)).start().await.expect("starts")
}

/// Nodes of these names, all ready with the same view.
async fn cluster<const N: usize>(network: &Network, names: [&str; N]) -> [Muster; N] {
    let mut all = Vec::new();
    for name in names {
        all.push(start(network, name).await);
    }
    settle(&all).await;
    all.try_into().expect("as many as names")
}

async fn settle(all: &[Muster]) {
    for muster in all {
        muster
            .until(PATIENCE, |s| s.status == Status::Ready && s.view.len() == all.len())
            .await
            .unwrap_or_else(|error| panic!("{error}\n{}", muster.dump()));
    }
}

#[tokio::test(start_paused = true)]
async fn a_broadcast_reaches_every_member_on_every_node_once() {
    let network = Network::new();
    let nodes = cluster(&network, ["a", "b", "c"]).await;
    let mut inboxes = Vec::new();
    for node in &nodes {
        inboxes.push(node.subscribe("room").await.expect("joined"));
        inboxes.push(node.subscribe("room").await.expect("joined"));
    }
    for (i, node) in nodes.iter().enumerate() {
        let receipt = node.broadcast("room", format!("from {i}")).await.expect("sent");
        assert_eq!(receipt.decision, Decision::Targeted);
        assert_eq!(receipt.nodes, Some(3));
    }
    for inbox in &mut inboxes {
        for i in 0..3 {
            assert_eq!(inbox.recv().await.expect("open").payload(), format!("from {i}").as_bytes());
        }
        assert_eq!(inbox.try_recv(), None);
    }
}
