//! How nodes on real sockets find each other.

#![cfg(feature = "tcp")]
// helpers of tests are no test functions to the lint
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "tests say what went wrong by panicking"
)]

use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use muster_router::Muster;
use muster_router::transport::tcp::{MemberState, TcpBuilder, TcpTransport};
use tokio::time::Instant;

type Node = (Arc<TcpTransport>, Muster);

async fn start(builder: TcpBuilder) -> Node {
    let transport = Arc::new(builder.build().unwrap());
    let scope = Muster::builder("rooms").transport(transport.clone()).start().await.unwrap();
    (transport, scope)
}

fn builder(name: &str) -> TcpBuilder {
    TcpTransport::builder(name).listen("127.0.0.1:0")
}

fn address((transport, _): &Node) -> SocketAddr {
    transport.local_addr().unwrap()
}

fn states((transport, _): &Node) -> Vec<(String, MemberState)> {
    transport.members().into_iter().map(|member| (member.node.to_string(), member.state)).collect()
}

fn linked(names: &[&str]) -> Vec<(String, MemberState)> {
    names.iter().map(|name| ((*name).to_owned(), MemberState::Linked)).collect()
}

/// Looks again until it holds.
async fn eventually(what: &str, holds: impl Fn() -> bool) {
    let begun = Instant::now();
    while !holds() {
        assert!(begun.elapsed() < Duration::from_secs(30), "not within 30 s: {what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Holds all the while.
async fn throughout(time: Duration, holds: impl Fn() -> bool) {
    let begun = Instant::now();
    while begun.elapsed() < time {
        assert!(holds());
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// A message of the first reaches a member on the last.
async fn hears(from: &Node, to: &Node) {
    let mut inbox = to.1.subscribe("room").await.unwrap();
    from.1.broadcast("room", "hello").await.unwrap();
    let message = tokio::time::timeout(Duration::from_secs(30), inbox.recv()).await.unwrap().unwrap();
    assert_eq!(message.payload(), "hello");
}

/// What DNS says, to be changed by the test.
#[derive(Clone, Default)]
struct Dns(Arc<Mutex<Vec<SocketAddr>>>);

impl Dns {
    fn set(&self, answer: &[SocketAddr]) {
        *self.0.lock().unwrap() = answer.to_vec();
    }

    fn on(&self, builder: TcpBuilder) -> TcpBuilder {
        let this = self.clone();
        builder.resolver(move |name| {
            let answer = this.0.lock().unwrap().clone();
            async move {
                assert_eq!(name, "all.test:7001");
                if answer.is_empty() { Err(io::ErrorKind::NotFound.into()) } else { Ok(answer) }
            }
        })
    }

    fn all(&self, builder: TcpBuilder) -> TcpBuilder {
        self.on(builder.dns("all.test:7001", Duration::from_millis(100)))
    }
}

#[tokio::test]
async fn three_nodes_with_one_seed_are_a_mesh_when_they_have_started() {
    let a = start(builder("a")).await;
    let seed = address(&a).to_string();
    let b = start(builder("b").seed(&seed)).await;
    let c = start(builder("c").seed(&seed)).await;
    assert_eq!(states(&c), linked(&["a", "b"]), "its start has waited for whom the seed knows");
    eventually("a mesh", || states(&a) == linked(&["b", "c"]) && states(&b) == linked(&["a", "c"])).await;
    hears(&b, &c).await;
    let members = a.0.members();
    assert_eq!(members[0].address, Some(address(&b)));
    assert_eq!(a.0.stats().discovery.malformed, 0);
}

#[tokio::test]
async fn a_dns_name_is_asked_again_and_what_it_no_longer_says_stays() {
    let dns = Dns::default();
    let a = start(dns.all(builder("a"))).await;
    let b = start(dns.all(builder("b"))).await;
    assert!(states(&a).is_empty() && states(&b).is_empty(), "nobody is in it yet");
    dns.set(&[address(&a), address(&b)]);
    eventually("a mesh", || states(&a) == linked(&["b"]) && states(&b) == linked(&["a"])).await;
    let c = start(dns.all(builder("c"))).await;
    dns.set(&[address(&c)]);
    eventually("all three", || states(&a) == linked(&["b", "c"])).await;
    throughout(Duration::from_millis(500), || states(&a) == linked(&["b", "c"])).await;
    hears(&a, &c).await;
}

#[tokio::test]
async fn a_seed_by_name_is_resolved_until_it_is_there() {
    let dns = Dns::default();
    let b = start(dns.on(builder("b").seed("all.test:7001"))).await;
    assert!(b.0.stats().discovery.failed_lookups > 0);
    let a = start(builder("a")).await;
    dns.set(&[address(&a)]);
    eventually("linked", || states(&b) == linked(&["a"])).await;
}

#[tokio::test]
async fn mem_07_a_node_that_moves_to_a_new_address_is_found_there() {
    let a = start(builder("a")).await;
    let seed = address(&a).to_string();
    let b = start(builder("b").seed(&seed)).await;
    let c = start(builder("c").seed(&seed)).await;
    eventually("a mesh", || states(&b) == linked(&["a", "c"])).await;
    let old = address(&b);
    b.1.shutdown().await;
    // somebody else may not take the old place meanwhile
    let _held = std::net::TcpListener::bind(old).unwrap();
    let b = start(builder("b").seed(&seed)).await;
    assert_ne!(address(&b), old);
    eventually("a mesh", || states(&a) == linked(&["b", "c"]) && states(&c) == linked(&["a", "b"])).await;
    for node in [&a, &c] {
        let members = node.0.members();
        let moved = members.iter().find(|m| m.node.as_str() == "b").unwrap();
        assert_eq!(moved.address, Some(address(&b)));
    }
    hears(&a, &b).await;
    hears(&b, &c).await;
}

#[tokio::test]
async fn the_own_address_among_the_seeds_is_not_dialled() {
    let dns = Dns::default();
    let a = start(dns.all(builder("a"))).await;
    dns.set(&[address(&a)]);
    let b = start(builder("b").seed(address(&a).to_string())).await;
    eventually("linked", || states(&a) == linked(&["b"])).await;
    throughout(Duration::from_millis(500), || a.0.stats().discovery.dials == 0).await;
    drop(b);
}

#[tokio::test]
async fn a_balancer_that_leads_to_ourselves_is_dialled_once() {
    let balancer = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let front = balancer.local_addr().unwrap();
    let dns = Dns::default();
    let a = start(dns.all(builder("a"))).await;
    let behind = address(&a);
    tokio::spawn(async move {
        while let Ok((mut client, _)) = balancer.accept().await {
            tokio::spawn(async move {
                let mut server = tokio::net::TcpStream::connect(behind).await.unwrap();
                let _ = tokio::io::copy_bidirectional(&mut client, &mut server).await;
            });
        }
    });
    dns.set(&[front]);
    eventually("dialled", || a.0.stats().discovery.dials == 1).await;
    throughout(Duration::from_secs(1), || a.0.stats().discovery.dials == 1).await;
    assert!(states(&a).is_empty());
}

/// An address where nobody answers, for as long as it is held.
fn nowhere() -> (std::net::TcpListener, String) {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    // 127.0.0.2 is not where it is bound
    (listener, format!("127.0.0.2:{port}"))
}

#[tokio::test]
async fn a_node_that_only_others_reach_is_unreachable_and_not_down() {
    let c = start(builder("c")).await;
    let seed = address(&c).to_string();
    let ((_a, a_place), (_b, b_place)) = (nowhere(), nowhere());
    let a = start(builder("a").advertise(a_place).seed(&seed)).await;
    let b = start(builder("b").advertise(b_place).seed(&seed)).await;
    let expected = vec![("b".to_owned(), MemberState::Unreachable), ("c".to_owned(), MemberState::Linked)];
    eventually("told by c", || states(&a) == expected).await;
    b.1.shutdown().await;
    eventually("down", || states(&a)[0].1 == MemberState::Down).await;
}

#[cfg(feature = "gossip")]
mod gossip {
    use super::*;
    use muster_router::transport::tcp::{GossipOptions, TcpConfigError};

    /// Nobody is suspected for as long as a test lasts, and nobody needs to be: who leaves says so.
    fn patient(name: &str) -> TcpBuilder {
        builder(name).gossip(GossipOptions { suspicion: Duration::from_secs(600), ..GossipOptions::lan() })
    }

    fn eager(name: &str) -> TcpBuilder {
        builder(name).gossip(GossipOptions {
            probe_interval: Duration::from_millis(200),
            probe_timeout: Duration::from_millis(100),
            suspicion: Duration::from_secs(1),
            gossip_interval: Duration::from_millis(50),
            ..GossipOptions::lan()
        })
    }

    #[tokio::test]
    async fn a_mesh_with_gossip_and_one_that_leaves() {
        let a = start(patient("a")).await;
        let seed = address(&a).to_string();
        let b = start(patient("b").seed(&seed)).await;
        let c = start(patient("c").seed(&seed)).await;
        eventually("a mesh", || states(&a) == linked(&["b", "c"]) && states(&b) == linked(&["a", "c"])).await;
        hears(&a, &c).await;
        c.1.shutdown().await;
        let gone =
            |with: &str| vec![(with.to_owned(), MemberState::Linked), ("c".to_owned(), MemberState::Down)];
        eventually("down", || states(&a) == gone("b") && states(&b) == gone("a")).await;
        let stats = a.0.stats().discovery;
        assert_eq!((stats.malformed, stats.unknown), (0, 0), "{stats:?}");
        // and back under its name
        let c = start(patient("c").seed(&seed)).await;
        eventually("a mesh", || states(&a) == linked(&["b", "c"]) && states(&b) == linked(&["a", "c"])).await;
        hears(&c, &b).await;
    }

    #[tokio::test]
    async fn one_bad_link_is_no_dead_node() {
        let c = start(eager("c")).await;
        let seed = address(&c).to_string();
        let ((_a, a_place), (_b, b_place)) = (nowhere(), nowhere());
        let a = start(eager("a").advertise(a_place).seed(&seed)).await;
        let b = start(eager("b").advertise(b_place).seed(&seed)).await;
        eventually("known", || states(&a).len() == 2 && states(&b).len() == 2).await;
        // far longer than it takes to be probed, suspected and down
        throughout(Duration::from_secs(3), || {
            states(&a)[0].1 != MemberState::Down && states(&b)[0].1 != MemberState::Down
        })
        .await;
        eventually("unreachable", || states(&a)[0].1 == MemberState::Unreachable).await;
    }

    #[test]
    fn wrong_options_are_named() {
        let options = GossipOptions { gossip_fanout: 0, ..GossipOptions::lan() };
        let error = builder("a").gossip(options).build().unwrap_err();
        assert!(matches!(&error, TcpConfigError::Gossip { .. }), "{error}");
        assert_eq!(error.option(), "gossip");
        assert!(error.to_string().contains("gossip_fanout"), "{error}");
    }
}
