//! The conformance suite on NATS, against a real server, and what is particular to NATS.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "helpers of tests are no test functions"
)]

mod nats_server;

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use futures_util::StreamExt;
use muster_router::Peer;
use muster_router::testing::conformance::{Harness, Recorder, Seen, Unsupported};
use muster_router::transport::link::LinkConfig;
use muster_router::transport::memory::Network;
use muster_router::transport::nats::{NatsConfigError, NatsLimits, NatsTransport, async_nats};
use muster_router::transport::{Frame, Inbound, Lane, Receiver, Terms, Transport, TransportError};
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
        let known = self.server.is_none() || why.contains("that one end sees");
        assert!(known, "every other rule applies here, but {rule} was skipped: {why}");
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

/// Hears everything and keeps nothing.
struct Quiet(NatsTransport, Arc<Recorder>, Peer);

impl Quiet {
    async fn start(transport: NatsTransport, scope: &str) -> Result<Self, TransportError> {
        let recorder = Recorder::new(Arc::new(AtomicU64::new(1)), Duration::from_secs(60));
        let receiver: Arc<dyn Receiver> = recorder.clone();
        let terms = Terms { scope: scope.to_owned(), vnodes: 64, protocol: 1 };
        let peer = transport.start(Inbound::new(Arc::downgrade(&receiver), terms)).await?;
        Ok(Self(transport, recorder, peer))
    }
}

fn at(server: &NatsServer, node: &str) -> NatsTransport {
    NatsTransport::builder(node)
        .servers(server.url())
        .link(patient())
        .limits(limits())
        .build()
        .expect("valid")
}

/// Whoever may publish on the subjects can send anything.
#[tokio::test]
async fn bc_17_what_cannot_be_decoded_is_dropped_and_counted() {
    if !is_installed("bc-17") {
        return;
    }
    let server = NatsServer::start();
    let a = Quiet::start(at(&server, "a"), "s").await.expect("starts");
    let b = Quiet::start(at(&server, "b"), "s").await.expect("starts");
    a.1.until("b up", |log| log.is_up(&b.2)).await.unwrap();
    let stranger = async_nats::connect(server.url()).await.expect("connects");
    let mut spy = stranger.subscribe("muster.s.node.a.*.*").await.expect("subscribes");
    stranger.flush().await.expect("flushes");
    // what b says to a goes there
    b.0.send(&a.2, Frame::new(Lane::Data, "head", "body")).await.expect("a link");
    let subject = spy.next().await.expect("a message").subject;
    let mut rubbish: Vec<Bytes> = (0..=255_u8).map(|kind| vec![1, kind, 255, 254, 0, 1].into()).collect();
    rubbish.extend([Bytes::new(), Bytes::from(vec![0xff; 300_000]), Bytes::from_static(&[2, 1])]);
    for bytes in &rubbish {
        stranger.publish(subject.clone(), bytes.clone()).await.expect("published");
        stranger.publish("muster.s.presence", bytes.clone()).await.expect("published");
        stranger.publish("muster.s.name.a", bytes.clone()).await.expect("published");
    }
    stranger.flush().await.expect("flushes");
    b.0.send(&a.2, Frame::new(Lane::Data, "after", "")).await.expect("a link");
    a.1.until("the frame after it", |log| {
        log.events.iter().any(|(_, seen)| matches!(seen, Seen::Frame(_, frame) if frame.head == "after"))
    })
    .await
    .unwrap();
    let dropped = rubbish.len() as u64 * 3;
    while a.0.stats().malformed < dropped {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert_eq!(a.0.stats().malformed, dropped);
    assert_eq!(a.1.with(|log| log.downs_of(&b.2)), 0);
    a.0.shutdown().await;
    b.0.shutdown().await;
}

/// Names are any UTF-8, subjects are not.
#[tokio::test]
async fn names_that_are_no_subjects() {
    if !is_installed("odd names") {
        return;
    }
    let server = NatsServer::start();
    let scope = "räume.* > 1";
    let long = "x".repeat(255);
    let mut nodes = Vec::new();
    for name in ["a.b", "a b", "*", ">", "\u{1f600}", &long] {
        nodes.push(Quiet::start(at(&server, name), scope).await.expect("starts"));
    }
    for node in &nodes {
        node.1.until("all others up", |log| log.up.len() == nodes.len() - 1).await.unwrap();
        for other in nodes.iter().filter(|other| other.2 != node.2) {
            node.0.send(&other.2, Frame::new(Lane::Control, "hello", "")).await.expect("a link");
        }
    }
    for node in &nodes {
        node.1.until("a frame of everyone", |log| log.frames.len() == nodes.len() - 1).await.unwrap();
        node.0.shutdown().await;
    }
}

#[tokio::test]
async fn credentials_are_the_clients_own() {
    if !is_installed("credentials") {
        return;
    }
    let server = NatsServer::start_with(&["--user", "chat", "--pass", "secret"]);
    let build = |options| at_with(&server, options).build().expect("valid");
    let wrong = NatsTransport::connect_options().user_and_password("chat".into(), "guess".into());
    let error = Quiet::start(build(wrong), "s").await.err().expect("refused");
    assert!(
        matches!(&error, TransportError::Failed { reason } if reason.contains("authorization")),
        "{error}"
    );
    assert!(!error.to_string().contains("guess"), "{error}");
    let right = || NatsTransport::connect_options().user_and_password("chat".into(), "secret".into());
    let a = Quiet::start(build(right()), "s").await.expect("starts");
    // a client that is there already
    let client = right().connect(server.url()).await.expect("connects");
    let b = NatsTransport::builder("b").client(client.clone()).limits(limits()).link(patient());
    let b = Quiet::start(b.build().expect("valid"), "s").await.expect("starts");
    a.1.until("b up", |log| log.is_up(&b.2)).await.unwrap();
    b.0.shutdown().await;
    a.1.until("b down", |log| log.downs_of(&b.2) == 1).await.unwrap();
    assert_eq!(
        client.connection_state(),
        async_nats::connection::State::Connected,
        "it is not ours to close"
    );
    a.0.shutdown().await;
}

/// The client does not look into its addresses for credentials.
#[tokio::test]
async fn credentials_in_a_url_are_used_at_every_server() {
    if !is_installed("credentials in a URL") {
        return;
    }
    let server = NatsServer::start_with(&["--user", "chat", "--pass", "a,b@c"]);
    let servers = |login: &str| format!("nats://{login}@127.0.0.1:1,{}", server.address());
    let build = |node: &str, login: &str| {
        let builder = NatsTransport::builder(node).servers(servers(login)).limits(limits()).link(patient());
        builder.build().expect("valid")
    };
    let wrong = Quiet::start(build("a", "chat:hush"), "s").await.err().expect("refused").to_string();
    assert!(!wrong.contains("hush"), "{wrong}");
    let a = Quiet::start(build("a", "chat:a%2Cb%40c"), "s").await.expect("starts");
    a.0.shutdown().await;

    let server = NatsServer::start_with(&["--auth", "s3cret"]);
    let token = format!("nats://s3cret@{}", server.address());
    let token = NatsTransport::builder("a").servers(token).limits(limits()).link(patient()).build();
    let a = Quiet::start(token.expect("valid"), "s").await.expect("starts");
    a.0.shutdown().await;
}

/// The server says nothing to whoever subscribes or publishes without the right to: a node that started anyhow would
/// be alone, and its members would miss everything.
#[tokio::test]
async fn an_account_without_rights_does_not_start() {
    if !is_installed("an account without rights") {
        return;
    }
    let all = r#"publish: "m.>", subscribe: "m.>""#;
    let cases = [
        ("nothing", r#"publish: "x.>", subscribe: "x.>""#, "m.s.node.a"),
        ("deaf", r#"publish: "m.>", subscribe: "x.>""#, "m.s.node.a"),
        ("mute", r#"publish: "x.>", subscribe: "m.>""#, "m.s.node.a"),
        ("blind", r#"publish: "m.>", subscribe: { allow: "m.>", deny: "m.*.presence" }"#, "m.s.presence"),
        ("unseen", r#"publish: { allow: "m.>", deny: "m.*.presence" }, subscribe: "m.>""#, "m.s.presence"),
        ("nameless", r#"publish: "m.>", subscribe: { allow: "m.>", deny: "m.*.name.>" }"#, "m.s.name.a"),
    ];
    let user = |(name, rights): (&str, &str)| {
        format!("{{ user: {name}, password: pw, permissions: {{ {rights} }} }}\n")
    };
    let users: String =
        cases.iter().map(|(name, rights, _)| (*name, *rights)).chain([("all", all)]).map(user).collect();
    let server = NatsServer::start_configured(&format!("authorization {{ users = [\n{users}] }}\n"));
    let options = |name: &str| NatsTransport::connect_options().user_and_password(name.into(), "pw".into());
    let build = |node: &str| NatsTransport::builder(node).prefix("m").limits(limits()).link(patient());
    // what the server does not bring back in this time is not allowed; its own words come sooner
    let hasty = LinkConfig { handshake_timeout: Duration::from_millis(200), ..patient() };
    let hasty_limits = NatsLimits { claim_timeout: Duration::from_millis(200), ..limits() };
    for (name, _, subject) in cases {
        let own = build("a").servers(server.url()).options(options(name)).build().expect("valid");
        let client = options(name).connect(server.url()).await.expect("connects");
        let given = build("a").client(client).limits(hasty_limits.clone()).link(hasty.clone()).build();
        for transport in [own, given.expect("valid")] {
            let error = Quiet::start(transport, "s").await.err().unwrap_or_else(|| panic!("{name} started"));
            let TransportError::Failed { reason } = &error else { panic!("{name}: {error}") };
            for part in [subject, "may not publish or subscribe there", "`m.>`"] {
                assert!(reason.contains(part), "{name}: {reason}");
            }
        }
    }
    // and this is enough
    let start =
        |node: &str| build(node).servers(server.url()).options(options("all")).build().expect("valid");
    let a = Quiet::start(start("a"), "s").await.expect("starts");
    let b = Quiet::start(start("b"), "s").await.expect("starts");
    a.1.until("b up", |log| log.is_up(&b.2)).await.unwrap();
    b.0.send(&a.2, Frame::new(Lane::Bulk, "head", "body")).await.expect("a link");
    a.1.until("its frame", |log| log.frames_from(&b.2) == 1).await.unwrap();
    assert_eq!((a.0.stats().errors, b.0.stats().errors), (0, 0));
    for node in [a, b] {
        node.0.shutdown().await;
    }
}

/// Whoever may publish can invent lives: as many as are known get a connection, also if each takes its leave.
#[tokio::test]
async fn hazard_22_invented_lives_do_not_get_connections_without_end() {
    if !is_installed("invented lives") {
        return;
    }
    const LIVES: u8 = 100;
    let server = NatsServer::start();
    let bounds = NatsLimits { peers: 4, ..limits() };
    // nothing is given up while this test runs
    let link = LinkConfig { handshake_timeout: Duration::from_secs(60), ..patient() };
    let m = NatsTransport::builder("m").servers(server.url()).limits(bounds).link(link).build();
    let m = Quiet::start(m.expect("valid"), "s").await.expect("starts");
    let stranger = async_nats::connect(server.url()).await.expect("connects");
    // the server would say that nobody is there
    let _there = stranger.subscribe("muster.s.node.a.*.*").await.expect("subscribes");
    let inbox = {
        let mut spy = stranger.subscribe("muster.s.node.m.*.*").await.expect("subscribes");
        let b = Quiet::start(at(&server, "b"), "s").await.expect("starts");
        m.1.until("b up", |log| log.is_up(&b.2)).await.unwrap();
        let subject = spy.next().await.expect("a message").subject;
        b.0.shutdown().await;
        m.1.until("b down", |log| log.downs_of(&b.2) == 1).await.unwrap();
        subject
    };
    let before = m.0.stats();
    // node "a", a life, incarnation 1, epoch 0, a word, every 1000 ms, 1 node
    let presence = |life: u8, word: u8| [1, b'a', life, 1, 0, word, 0xe8, 0x07, 1];
    for leaves in [false, true] {
        for life in 1..=LIVES {
            // dialer number, window
            let open = [&[1, 4][..], &presence(life, 2), &[life, 0x80, 0x80, 0x04]].concat();
            stranger.publish(inbox.clone(), open.into()).await.expect("published");
            if leaves {
                let leaving = [&[1, 1][..], &presence(life, 4)].concat();
                stranger.publish(inbox.clone(), leaving.into()).await.expect("published");
            }
        }
    }
    stranger.flush().await.expect("flushes");
    let seen = before.messages_in + 3 * u64::from(LIVES);
    while m.0.stats().messages_in < seen {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let after = m.0.stats();
    assert_eq!(after.malformed, before.malformed);
    assert!(after.opened > before.opened, "they are understood");
    assert!(after.opened - before.opened <= 4, "{after:?}");
    assert!(after.too_many - before.too_many >= 2 * u64::from(LIVES) - 8, "{after:?}");
    m.0.shutdown().await;
}

fn at_with(
    server: &NatsServer,
    options: async_nats::ConnectOptions,
) -> muster_router::transport::nats::NatsBuilder {
    NatsTransport::builder("a").servers(server.url()).options(options).limits(limits()).link(patient())
}

#[tokio::test]
async fn without_a_server_the_start_says_so() {
    let transport = NatsTransport::builder("a").servers("nats://127.0.0.1:1").build().expect("valid");
    let error = Quiet::start(transport.clone(), "s").await.err().expect("nobody there");
    assert!(matches!(error, TransportError::Failed { .. }), "{error}");
    // and nothing is left of it
    let again = Quiet::start(transport, "s").await.err().expect("nobody there");
    assert!(matches!(again, TransportError::Failed { .. }), "{again}");
}

/// The server knows whether somebody listens for a name, so a start needs no wait; of two that ask at the same
/// moment, one at most goes on.
#[tokio::test]
async fn two_starts_at_one_moment_give_one_node() {
    if !is_installed("two starts at one moment") {
        return;
    }
    let server = NatsServer::start();
    for round in 0..10 {
        let scope = format!("round-{round}");
        let (first, second) =
            tokio::join!(Quiet::start(at(&server, "a"), &scope), Quiet::start(at(&server, "a"), &scope));
        let started = [&first, &second].iter().filter(|start| start.is_ok()).count();
        assert!(started <= 1, "round {round}: both started");
        for refused in [&first, &second].into_iter().filter_map(|start| start.as_ref().err()) {
            assert!(matches!(refused, TransportError::Superseded { .. }), "{refused}");
        }
        for node in [first, second].into_iter().flatten() {
            node.0.shutdown().await;
        }
    }
}

/// The start waited for the connection to come back, which a closed client's never does.
#[tokio::test]
async fn a_start_whose_client_is_closed_fails() {
    if !is_installed("a client that is closed") {
        return;
    }
    let server = NatsServer::start();
    let others = async_nats::connect(server.url()).await.expect("connects");
    let mut spy = others.subscribe("muster.s.presence").await.expect("subscribes");
    others.flush().await.expect("flushes");
    let client = async_nats::connect(server.url()).await.expect("connects");
    let slow = NatsLimits { discovery_window: Duration::from_secs(60), ..limits() };
    let a = NatsTransport::builder("a").client(client.clone()).limits(slow).link(patient()).build();
    let start = tokio::spawn(Quiet::start(a.expect("valid"), "s"));
    // the mark of its rights, then its hello: it waits for answers
    for _ in 0..2 {
        spy.next().await.expect("a message");
    }
    client.drain().await.expect("drains");
    let ended =
        tokio::time::timeout(Duration::from_secs(40), start).await.expect("it does not wait for ever");
    let Err(error) = ended.unwrap() else { panic!("it started without NATS") };
    assert!(error.to_string().contains("closed"), "{error}");
}

/// A holder that does not answer is taken for dead. When it comes back it has lost its name, and says so.
#[tokio::test]
async fn bc_23_a_holder_that_is_cut_off_does_not_keep_its_name() {
    if !is_installed("bc-23") {
        return;
    }
    let server = NatsServer::start();
    let proxy = Proxy::to(server.address()).await;
    let zombie = NatsTransport::builder("a").servers(proxy.url()).limits(limits()).link(patient()).build();
    let zombie = Quiet::start(zombie.expect("valid"), "s").await.expect("starts");
    let b = Quiet::start(at(&server, "b"), "s").await.expect("starts");
    zombie.1.until("b up", |log| log.is_up(&b.2)).await.unwrap();
    // its side is frozen with the connection open: the server still takes it for there
    proxy.freeze();
    let a = Quiet::start(at(&server, "a"), "s").await.expect("starts");
    b.1.until("the new life up", |log| log.is_up(&a.2)).await.unwrap();
    b.0.send(&a.2, Frame::new(Lane::Data, "for the new one", "")).await.expect("a link");
    a.1.until("its frame", |log| log.frames_from(&b.2) == 1).await.unwrap();
    proxy.heal();
    zombie
        .1
        .until("that it was superseded", |log| {
            log.events.iter().any(|(_, seen)| matches!(seen, Seen::Up(peer) if *peer == a.2))
        })
        .await
        .unwrap();
    assert!(b.1.with(|log| log.is_up(&a.2)), "the new life stays");
    for node in [a, b] {
        node.0.shutdown().await;
    }
}

#[test]
fn every_option_is_checked_and_named() {
    let plain = || NatsTransport::builder("a").servers("nats://127.0.0.1:4222");
    assert!(plain().build().is_ok());
    assert!(NatsTransport::builder("a").servers("a:1, tls://b:2 ,").prefix("x.y").build().is_ok());
    let limits = |change: fn(&mut NatsLimits)| {
        let mut limits = NatsLimits::default();
        change(&mut limits);
        plain().limits(limits)
    };
    let link = |change: fn(&mut LinkConfig)| {
        let mut link = LinkConfig::default();
        change(&mut link);
        plain().link(link)
    };
    for (builder, option) in [
        (NatsTransport::builder("").servers("x"), "node"),
        (NatsTransport::builder("a"), "servers"),
        (NatsTransport::builder("a").servers("http://x"), "servers"),
        (plain().prefix("a b"), "prefix"),
        (limits(|limits| limits.window = 1), "window"),
        (limits(|limits| limits.message = 100), "message"),
        (limits(|limits| limits.peers = 0), "peers"),
        (limits(|limits| limits.presence_interval = Duration::ZERO), "presence_interval"),
        (limits(|limits| limits.discovery_window = Duration::from_secs(61)), "discovery_window"),
        (limits(|limits| limits.claim_timeout = Duration::ZERO), "claim_timeout"),
        (limits(|limits| limits.shutdown_timeout = Duration::ZERO), "shutdown_timeout"),
        (link(|link| link.ping_interval = None), "link"),
        (link(|link| link.ping_timeout = Duration::from_millis(1)), "link"),
        (link(|link| link.max_frame = 0), "link"),
        (link(|link| link.queue_frames = 0), "link"),
        (link(|link| link.piece_bytes = 0), "link"),
    ] {
        let error = builder.build().err().unwrap_or_else(|| panic!("{option} was accepted"));
        assert_eq!(error.option(), option, "{error}");
        assert!(error.to_string().contains(&format!("`{option}`")), "{error}");
    }
    let secret = NatsTransport::builder("a").servers("nats://me:secret@:x").build().expect_err("no address");
    assert!(
        matches!(secret, NatsConfigError::Server { .. }) && !secret.to_string().contains("secret"),
        "{secret}"
    );
}
