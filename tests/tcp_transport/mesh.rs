//! Many nodes, without relays.

use std::sync::Arc;
use std::time::Duration;

use muster_router::Peer;
use muster_router::testing::conformance::{Recorder, Seen};
use muster_router::transport::tcp::{DiscoveryOptions, TcpStats, TcpTransport};
use muster_router::transport::{Frame, Inbound, Lane, Receiver, Terms, Transport};

fn inbound(receiver: &Arc<dyn Receiver>) -> Inbound {
    Inbound::new(Arc::downgrade(receiver), Terms { scope: "s".into(), vnodes: 8, protocol: 1 })
}

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
        let inbound = inbound(&receiver);
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

fn pair_of(nodes: &[(Arc<TcpTransport>, Arc<Recorder>)]) -> (Arc<TcpTransport>, Peer, Arc<Recorder>) {
    let there = nodes[0].1.with(|log| log.up.values().next().cloned().unwrap());
    (nodes[0].0.clone(), there, nodes[1].1.clone())
}

#[tokio::test]
async fn many_frames_are_few_writes() {
    let nodes = start(2).await;
    all_up(&nodes).await;
    let (a, to, recorder) = pair_of(&nodes);
    let before = a.stats().writes;
    for number in 0..1000_u64 {
        let head = number.to_le_bytes().to_vec();
        a.try_send(&to, Frame::new(Lane::Data, head, vec![0; 100])).unwrap();
    }
    recorder.until("all frames", |log| log.frames.values().sum::<usize>() == 1000).await.unwrap();
    // besides the frames there are pings and what discovery says
    let writes = a.stats().writes - before;
    assert!(writes < 100, "{writes} writes for 1000 frames");
}

#[tokio::test]
async fn control_passes_a_large_frame_that_is_being_written() {
    let nodes = start(2).await;
    all_up(&nodes).await;
    let (a, to, recorder) = pair_of(&nodes);
    let before = a.stats().bytes_out;
    a.try_send(&to, Frame::new(Lane::Bulk, "large", vec![7; 48 << 20])).unwrap();
    while a.stats().bytes_out < before + (128 << 10) {
        tokio::task::yield_now().await;
    }
    a.try_send(&to, Frame::new(Lane::Control, "urgent", "")).unwrap();
    recorder.until("both frames", |log| log.frames.values().sum::<usize>() == 2).await.unwrap();
    let lanes: Vec<Lane> = recorder.with(|log| {
        let frames = log.events.iter().filter_map(|(_, seen)| match seen {
            Seen::Frame(_, frame) => Some((frame.lane, frame.len())),
            _ => None,
        });
        assert_eq!(frames.clone().map(|(_, len)| len).sum::<usize>(), (48 << 20) + 11);
        frames.map(|(lane, _)| lane).collect()
    });
    assert_eq!(lanes, [Lane::Control, Lane::Bulk]);
}

/// One thread, many tasks that send and wait at once: nobody holds a lock while another task runs.
#[tokio::test]
async fn tr_03_thirty_tasks_on_one_thread() {
    let nodes = start(2).await;
    all_up(&nodes).await;
    let (a, to, recorder) = pair_of(&nodes);
    let mut tasks = Vec::new();
    for _ in 0..30 {
        let (a, to) = (a.clone(), to.clone());
        tasks.push(tokio::spawn(async move {
            for _ in 0..100 {
                a.send(&to, Frame::new(Lane::Data, "head", vec![0; 1000])).await.unwrap();
                let _ = (a.stats(), a.local_addr(), a.members());
                tokio::task::yield_now().await;
            }
        }));
    }
    for task in tasks {
        tokio::time::timeout(Duration::from_secs(60), task).await.unwrap().unwrap();
    }
    recorder.until("all frames", |log| log.frames.values().sum::<usize>() == 3000).await.unwrap();
}

/// The tasks go with the last handle, and the address is free again.
#[tokio::test]
async fn a_transport_that_is_dropped_says_goodbye() {
    let mut nodes = start(2).await;
    all_up(&nodes).await;
    let (gone, recorder) = nodes.remove(0);
    let address = gone.local_addr().unwrap();
    drop((gone, recorder));
    nodes[0].1.until("the other down", |log| log.downs.len() == 1).await.unwrap();
    let bind = async {
        while tokio::net::TcpListener::bind(address).await.is_err() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), bind).await.unwrap();
}

#[tokio::test]
async fn an_address_that_is_taken_fails_the_start_and_nothing_runs() {
    let taken = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let transport = TcpTransport::builder("a").listen(address.as_str()).build().unwrap();
    let recorder = Recorder::new(Arc::default(), Duration::from_secs(60));
    let receiver: Arc<dyn Receiver> = recorder.clone();
    let error = transport.start(inbound(&receiver)).await.unwrap_err().to_string();
    assert!(error.contains(&address), "{error}");
    drop(taken);
    transport.start(inbound(&receiver)).await.unwrap();
    transport.shutdown().await;
}
