//! Many nodes, without relays.

use std::sync::Arc;
use std::time::Duration;

use muster_router::testing::conformance::Recorder;
use muster_router::transport::tcp::{DiscoveryOptions, TcpStats, TcpTransport};
use muster_router::transport::{Inbound, Receiver, Terms, Transport};

/// Starts nodes, all at once but the first; all have the first one as a seed.
async fn start(count: usize) -> Vec<(Arc<TcpTransport>, Arc<Recorder>)> {
    let clock = Arc::default();
    let mut nodes: Vec<(Arc<TcpTransport>, Arc<Recorder>)> = Vec::new();
    let mut starting = Vec::new();
    for number in 0..count {
        let mut builder = TcpTransport::builder(format!("n{number:03}")).listen("127.0.0.1:0");
        if let Some((first, _)) = nodes.first() {
            builder = builder.seed(first.local_addr().unwrap().to_string());
        }
        // nobody is known by then if something is waited for that never comes
        let discovery =
            DiscoveryOptions { settle_within: Duration::from_secs(60), ..DiscoveryOptions::default() };
        let builder = builder.link(super::patient()).discovery(discovery);
        let transport = Arc::new(builder.build().unwrap());
        let recorder = Recorder::new(Arc::clone(&clock), Duration::from_secs(60));
        let receiver: Arc<dyn Receiver> = recorder.clone();
        let inbound =
            Inbound::new(Arc::downgrade(&receiver), Terms { scope: "s".into(), vnodes: 8, protocol: 1 });
        let task = {
            let transport = transport.clone();
            tokio::spawn(async move { transport.start(inbound).await.unwrap() })
        };
        if number == 0 {
            task.await.unwrap();
        } else {
            starting.push(task);
        }
        nodes.push((transport, recorder));
    }
    for task in starting {
        task.await.unwrap();
    }
    nodes
}

async fn all_up(nodes: &[(Arc<TcpTransport>, Arc<Recorder>)]) {
    for (_, recorder) in nodes {
        recorder.until("everyone up", |log| log.up.len() == nodes.len() - 1).await.unwrap();
    }
}

fn sum(nodes: &[(Arc<TcpTransport>, Arc<Recorder>)]) -> TcpStats {
    let mut all = TcpStats::default();
    for (transport, _) in nodes {
        let stats = transport.stats();
        all.dialled += stats.dialled;
        all.failed_dials += stats.failed_dials;
        all.connections += stats.connections;
        all.writes += stats.writes;
        all.malformed += stats.malformed + stats.link.malformed + stats.link.unexpected + stats.link.gaps;
    }
    all
}

#[tokio::test]
async fn hazard_16_twenty_nodes_up_at_once_know_each_other_through_one() {
    let nodes = start(20).await;
    all_up(&nodes).await;
    let all = sum(&nodes);
    // both ends of a pair may dial at once; more than that would be a loop
    assert!((190..=3 * 380).contains(&all.dialled), "{all:?}");
    assert_eq!((all.failed_dials, all.malformed), (0, 0), "{all:?}");
    for (transport, _) in &nodes {
        transport.shutdown().await;
    }
    assert_eq!(sum(&nodes).connections, 0);
}

/// The first thing that two nodes tell each other must not be lost, or they would wait for it: with it, a start
/// takes the time of a few round trips.
#[tokio::test]
async fn discovery_settles_before_its_patience_has_run_out() {
    for _ in 0..3 {
        let begun = std::time::Instant::now();
        let nodes = start(4).await;
        all_up(&nodes).await;
        assert!(begun.elapsed() < Duration::from_secs(30), "{:?}", begun.elapsed());
    }
}
