//! Who connects and is no node: each costs a counted refusal, gets no word that would help it, and is in
//! nobody's way.

use std::net::SocketAddr;

use bytes::{BufMut, BytesMut};
use muster_router::transport::link::LinkConfig;
use muster_router::transport::tcp::TcpLimits;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};

use super::*;

/// A preamble's head, and a version.
const MAGIC: &[u8] = b"\x8fMSTR\n\x01";

async fn dial(to: &Node) -> TcpStream {
    TcpStream::connect(to.address()).await.unwrap()
}

/// Everything that comes until the other end closes.
async fn rest(stream: &mut TcpStream) -> Vec<u8> {
    let mut all = Vec::new();
    // a reset is an end too
    let _ = tokio::time::timeout(PATIENCE, stream.read_to_end(&mut all)).await.expect("closed in time");
    all
}

fn message(kind: u8, body: &[u8]) -> Vec<u8> {
    let length = u16::try_from(body.len()).unwrap().to_le_bytes();
    [MAGIC, &[kind], &length, body].concat()
}

/// The preamble of a node without a secret.
pub fn preamble(node: &str, tls: bool) -> Vec<u8> {
    let fields = (node, "rooms", "127.0.0.1:1", 7_u64, [3_u8; 32], (false, tls));
    message(1, &postcard::to_allocvec(&fields).unwrap())
}

/// As a node of that name would: to the end of the authentication, which asks for nothing here.
async fn authenticated(to: &Node, node: &str) -> TcpStream {
    let mut stream = dial(to).await;
    stream.write_all(&preamble(node, false)).await.unwrap();
    let mut head = [0; 10];
    stream.read_exact(&mut head).await.unwrap();
    assert_eq!(head[..8], [MAGIC, &[1]].concat());
    let mut body = vec![0; usize::from(u16::from_le_bytes([head[8], head[9]]))];
    stream.read_exact(&mut body).await.unwrap();
    stream.write_all(&message(2, &[])).await.unwrap();
    stream.read_exact(&mut head).await.unwrap();
    assert_eq!(head[..], message(2, &[]));
    stream
}

#[tokio::test]
async fn strangers_cost_a_counted_refusal_and_get_no_answer() {
    let client_hello = [&[0x16, 3, 1, 2, 0, 1, 0, 1, 0xfc, 3, 3][..], &[7; 506]].concat();
    let random: Vec<u8> = (0..4096_u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let inputs: [(&str, Vec<u8>, RefusalCause); 6] = [
        ("TLS", client_hello, RefusalCause::TlsForeign),
        ("HTTP", b"GET /metrics HTTP/1.1\r\nhost: a\r\n\r\n".to_vec(), RefusalCause::Http),
        ("random bytes", random, RefusalCause::Malformed),
        ("a giant length", [MAGIC, &[1, 0xff, 0xff]].concat(), RefusalCause::TooLarge),
        ("a frame before its preamble", message(2, &[0; 32]), RefusalCause::Malformed),
        ("a length and no preamble", vec![0xff; 4], RefusalCause::Malformed),
    ];
    let a = Node::start(with_secret("a")).await;
    for (what, input, cause) in inputs {
        let before = a.refused(cause);
        let mut stream = dial(&a).await;
        stream.write_all(&input).await.unwrap();
        // at once, not at the deadline, although nothing more comes
        assert_eq!(rest(&mut stream).await, [0; 0], "{what}");
        until(|| format!("{what}: {:?}", a.stats()), || a.refused(cause) == before + 1).await;
    }
    assert_eq!((a.stats().all_refused(), a.refused(RefusalCause::Deadline)), (6, 0));
    let b = Node::start(with_secret("b").seed(a.address())).await;
    b.until_linked(&["a"]).await;
}

#[tokio::test]
async fn another_version_of_the_transport_is_told_so() {
    let a = Node::start(with_secret("a")).await;
    let mut newer = preamble("x", false);
    newer[6] = 2;
    let mut stream = dial(&a).await;
    stream.write_all(&newer).await.unwrap();
    let mut head = [0; 10];
    stream.read_exact(&mut head).await.unwrap();
    assert_eq!(head[..8], [MAGIC, &[3]].concat(), "a refusal");
    let mut words = vec![0; usize::from(head[8])];
    stream.read_exact(&mut words).await.unwrap();
    let words = String::from_utf8_lossy(&words);
    assert!(words.contains("version 2") && words.contains("version 1"), "{words}");
    a.until_refused(RefusalCause::Version).await;
}

#[tokio::test]
async fn a_port_scanner_is_counted_and_logged_once() {
    let (log, _guard) = logs();
    let a = Node::start(with_secret("a")).await;
    for _ in 0..20 {
        drop(dial(&a).await);
    }
    until(|| format!("{:?}", a.stats()), || a.refused(RefusalCause::Closed) == 20).await;
    assert!(log.lines(&["WARN"]).len() <= 1, "{:?}", log.lines(&["WARN"]));
    let b = Node::start(with_secret("b").seed(a.address())).await;
    b.until_linked(&["a"]).await;
}

#[tokio::test]
async fn half_a_preamble_ends_at_the_deadline() {
    let limits = TcpLimits { handshake_timeout: Duration::from_millis(200), ..TcpLimits::default() };
    let a = Node::start(with_secret("a").limits(limits)).await;
    let whole = preamble("x", false);
    for sent in [0, 1, 9, whole.len() - 1] {
        let before = a.refused(RefusalCause::Deadline);
        let mut stream = dial(&a).await;
        stream.write_all(&whole[..sent]).await.unwrap();
        assert_eq!(rest(&mut stream).await, [0; 0], "{sent} bytes");
        until(|| format!("{:?}", a.stats()), || a.refused(RefusalCause::Deadline) == before + 1).await;
    }
    // nor does a byte now and then keep it open
    let start = Instant::now();
    let mut stream = dial(&a).await;
    for byte in whole.iter().cycle() {
        if stream.write_all(&[*byte]).await.is_err() {
            break;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
        assert!(start.elapsed() < PATIENCE, "a slow preamble goes on for ever");
    }
}

/// Whoever connects and says nothing fills no more than its share.
#[tokio::test]
async fn five_hundred_idle_connections_keep_nobody_out() {
    let limits = TcpLimits { handshake_timeout: Duration::from_secs(60), ..TcpLimits::default() };
    let a = Node::start(with_secret("a").limits(limits)).await;
    let mut idle = Vec::new();
    for _ in 0..500 {
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind(SocketAddr::from(([127, 0, 0, 2], 0))).unwrap();
        idle.push(socket.connect(a.transport.local_addr().unwrap()).await.unwrap());
    }
    until(|| format!("{:?}", a.stats()), || a.stats().accepted == 500).await;
    assert_eq!(a.refused(RefusalCause::TooMany), 500 - 64, "{:?}", a.stats());
    // 64 of them sit there, for a minute; another address gets in meanwhile
    let b = Node::start(with_secret("b").seed(a.address())).await;
    b.until_linked(&["a"]).await;
    assert_eq!(a.refused(RefusalCause::Deadline), 0);
    drop(idle);
}

/// The same from the address of the real peers: they get in as soon as a deadline has passed.
#[tokio::test]
async fn idle_connections_from_the_address_of_a_peer_delay_it_until_their_deadline() {
    let limits = TcpLimits {
        handshake_timeout: Duration::from_millis(500),
        pending_handshakes: 4,
        pending_per_ip: 4,
        ..TcpLimits::default()
    };
    let a = Node::start(with_secret("a").limits(limits)).await;
    let mut idle = Vec::new();
    for _ in 0..100 {
        idle.push(dial(&a).await);
    }
    until(|| format!("{:?}", a.stats()), || a.refused(RefusalCause::TooMany) == 96).await;
    let b = Node::start(with_secret("b").seed(a.address())).await;
    b.until_linked(&["a"]).await;
    until(|| format!("{:?}", a.stats()), || a.refused(RefusalCause::Deadline) == 4).await;
}

#[tokio::test]
async fn a_giant_length_after_authentication_closes_the_connection() {
    let (log, _guard) = logs();
    let a = Node::start(plain("a")).await;
    for length in [u32::MAX, 0] {
        let before = a.stats().malformed;
        let mut stream = authenticated(&a, "x").await;
        stream.write_all(&[&length.to_le_bytes()[..], &[0, 1, 2, 3]].concat()).await.unwrap();
        rest(&mut stream).await;
        until(|| format!("{:?}", a.stats()), || a.stats().malformed == before + 1).await;
    }
    assert_eq!(a.linked(), [""; 0]);
    assert_eq!(log.lines(&["WARN", "malformed", "node=x"]).len(), 1, "once: {:?}", log.lines(&[]));
    let mut stream = authenticated(&a, "x").await;
    stream.write_all(&[3, 0, 0, 0, 77, 1, 2].repeat(3)).await.unwrap();
    until(|| format!("{:?}", a.stats()), || a.stats().unknown_records == 3).await;
    assert_eq!(log.lines(&["WARN", "unknown", "node=x"]).len(), 1, "once: {:?}", log.lines(&[]));
    let b = Node::start(plain("b").seed(a.address())).await;
    b.until_linked(&["a"]).await;
}

/// The name was proved (or, here, claimed) in the preamble; the link's own hello says another one.
#[tokio::test]
async fn a_hello_of_another_name_than_the_preamble_closes_the_connection() {
    let a = Node::start(plain("a")).await;
    let hello = |node: &str| {
        let max_frame = LinkConfig::default().max_frame as u64;
        let fields = (("rooms", 128_u32, 1_u16), (node, 5_u64), true, max_frame);
        let mut head = b"\x00MSTR\x01".to_vec();
        head.extend(postcard::to_allocvec(&fields).unwrap());
        let mut record = BytesMut::new();
        record.put_u32_le(5 + head.len() as u32);
        record.put_u8(0);
        record.put_u32_le(head.len() as u32);
        record.put_slice(&head);
        record
    };
    // that these bytes are a hello at all: the right name is answered with more than a hello
    let mut stream = authenticated(&a, "x").await;
    stream.write_all(&hello("x")).await.unwrap();
    let mut heard = vec![0; hello("a").len() + 5];
    tokio::time::timeout(PATIENCE, stream.read_exact(&mut heard)).await.expect("in time").unwrap();
    drop(stream);

    let mut stream = authenticated(&a, "x").await;
    stream.write_all(&hello("b")).await.unwrap();
    rest(&mut stream).await;
    assert_eq!(a.stats().link.impostors, 1);
    assert_eq!(a.linked(), [""; 0]);
}

/// Nobody stays connected without becoming a link.
#[tokio::test]
async fn silence_after_authentication_ends() {
    let a = Node::start(plain("a")).await;
    let mut stream = authenticated(&a, "x").await;
    rest(&mut stream).await;
    until(|| format!("{:?}", a.stats()), || a.stats().connections == 0).await;
    assert_eq!(a.linked(), [""; 0]);
}
