//! Two ends over loopback, with certificates made here.

use std::net::SocketAddr;

use bytes::BytesMut;
use rcgen::string::Ia5String;
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair,
    SanType, date_time_ymd,
};
use tokio::net::TcpListener;

use super::*;
use crate::transport::tcp::auth::{Handshake, RefusalCause, Role, Secret, Step};
use crate::transport::tcp::preamble::Preamble;

type Authority = CertifiedIssuer<'static, KeyPair>;

fn authority(name: &str) -> Authority {
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.distinguished_name.push(DnType::CommonName, name);
    CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap()
}

/// A certificate and its key, as PEM.
fn leaf(authority: &Authority, change: impl FnOnce(&mut CertificateParams)) -> (String, String) {
    let mut params = CertificateParams::default();
    change(&mut params);
    let key = KeyPair::generate().unwrap();
    (params.signed_by(&key, authority).unwrap().pem(), key.serialize_pem())
}

fn dns(name: &str) -> SanType {
    SanType::DnsName(Ia5String::try_from(name).unwrap())
}

fn uri(name: &str) -> SanType {
    SanType::URI(Ia5String::try_from(name).unwrap())
}

fn options(authority: &Authority, change: impl FnOnce(&mut CertificateParams)) -> TlsOptions {
    let (cert, key) = leaf(authority, change);
    TlsOptions::from_pem(authority.pem(), cert, key).unwrap()
}

fn named_dns(authority: &Authority, name: &str) -> TlsOptions {
    options(authority, |params| params.subject_alt_names.push(dns(name)))
}

/// Both ends of a TCP connection.
async fn pair() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind(SocketAddr::from(([127, 0, 0, 1], 0))).await.unwrap();
    let dialled = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
    (dialled, listener.accept().await.unwrap().0)
}

/// TLS and then the handshake of one end, as the transport does it.
async fn greet(
    role: Role,
    node: &str,
    tls: TlsOptions,
    stream: TcpStream,
    secret: Option<Secret>,
) -> Result<NodeId, Reject> {
    let (mut stream, peer) = match role {
        Role::Dialer => tls.connect(stream).await?,
        Role::Acceptor => tls.accept(stream).await?,
    };
    let ours = Preamble {
        node: NodeId::new(node).unwrap(),
        scope: "rooms".into(),
        advertise: "127.0.0.1:1".into(),
        instance: node.len() as u64,
    };
    let nonce = [role as u8; 32];
    let mut handshake = Handshake::new(role, ours, secret.as_ref(), nonce).over_tls(peer);
    let mut bytes = BytesMut::new();
    loop {
        match handshake.handle(&mut bytes) {
            Ok(Step::Send(words)) => {
                // what the other end has said may still be there to read
                let _ = stream.write_all(&words).await;
                let _ = stream.flush().await;
            }
            Ok(Step::NeedMore) => match stream.read_buf(&mut bytes).await {
                Ok(0) => return Err(Reject::Closed),
                Ok(_) => {}
                Err(error) => return Err(tls.reject_of(&error)),
            },
            Ok(Step::Done { peer }) => return Ok(peer.node),
            Err(reject) => {
                if reject.is_ours_to_say() {
                    let _ = stream.write_all(&reject.encode()).await;
                    let _ = stream.shutdown().await;
                    while stream.read_buf(&mut bytes).await.is_ok_and(|read| read > 0) {}
                }
                return Err(reject);
            }
        }
    }
}

/// `a` dials `b`.
async fn meet(a: &TlsOptions, b: &TlsOptions) -> (Result<NodeId, Reject>, Result<NodeId, Reject>) {
    let (dialled, taken) = pair().await;
    let dialler = greet(Role::Dialer, "a", a.clone(), dialled, None);
    let acceptor = greet(Role::Acceptor, "b", b.clone(), taken, None);
    tokio::join!(dialler, acceptor)
}

async fn link(a: &TlsOptions, b: &TlsOptions) {
    let (at_a, at_b) = meet(a, b).await;
    assert_eq!((at_a.unwrap().as_str(), at_b.unwrap().as_str()), ("b", "a"));
}

/// `a` and `b` refuse each other in both directions; the texts, of `b`'s view first, name the values.
async fn refused(a: &TlsOptions, b: &TlsOptions, cause: RefusalCause, at_b: &[&str], at_a: &[&str]) {
    let (dialled, taken) = pair().await;
    let swapped = tokio::join!(
        greet(Role::Acceptor, "a", a.clone(), taken, None),
        greet(Role::Dialer, "b", b.clone(), dialled, None),
    );
    for (said_a, said_b) in [meet(a, b).await, swapped] {
        for (said, values) in [(said_b, at_b), (said_a, at_a)] {
            let reject = said.expect_err("it was taken");
            assert_eq!(reject.cause(), cause, "{reject}");
            for value in values {
                assert!(reject.to_string().contains(value), "{reject:?} does not name {value}");
            }
        }
    }
}

#[tokio::test]
async fn certificates_of_one_authority_that_name_their_nodes_link() {
    let ca = authority("cluster");
    let a = named_dns(&ca, "a");
    let b = options(&ca, |params| {
        params.subject_alt_names = vec![dns("other"), uri("muster://b")];
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
    });
    link(&a, &b).await;
    // and with a secret on top, which is bound to this connection
    let (dialled, taken) = pair().await;
    let secret = Secret::new([1; 16]).ok();
    let (at_a, at_b) = tokio::join!(
        greet(Role::Dialer, "a", a, dialled, secret.clone()),
        greet(Role::Acceptor, "b", b, taken, secret),
    );
    assert_eq!((at_a.unwrap().as_str(), at_b.unwrap().as_str()), ("b", "a"));
}

#[tokio::test]
async fn a_certificate_of_another_authority_is_refused_with_both_names() {
    let (ours, theirs) = (authority("ours"), authority("theirs"));
    let (a, b) = (named_dns(&theirs, "a"), named_dns(&ours, "b"));
    // whoever looks first refuses first: the dialler
    let (at_a, at_b) = meet(&a, &b).await;
    let (at_a, at_b) = (at_a.unwrap_err(), at_b.unwrap_err());
    assert_eq!((at_a.cause(), at_b.cause()), (RefusalCause::Certificate, RefusalCause::Certificate));
    let at_a = at_a.to_string();
    assert!(["\"b\"", "CN=ours", "CN=theirs"].iter().all(|value| at_a.contains(value)), "{at_a}");
    assert!(at_b.to_string().contains("our certificate for \"b\", issued by \"CN=ours\""), "{at_b}");
    // an authority of the same name is another one
    let (a, b) = (named_dns(&authority("ours"), "a"), named_dns(&ours, "b"));
    let (at_a, at_b) = meet(&a, &b).await;
    assert_eq!(at_a.unwrap_err().cause(), RefusalCause::Certificate);
    assert_eq!(at_b.unwrap_err().cause(), RefusalCause::Certificate);
}

#[tokio::test]
async fn an_expired_certificate_is_refused_on_both_ends_whoever_dials() {
    let ca = authority("cluster");
    let b = named_dns(&ca, "b");
    let old = options(&ca, |params| {
        params.subject_alt_names.push(dns("a"));
        (params.not_before, params.not_after) = (date_time_ymd(2001, 1, 1), date_time_ymd(2002, 1, 1));
    });
    let at_b = ["certificate for \"a\" was refused", "2002", "here it is"];
    refused(&old, &b, RefusalCause::Certificate, &at_b, &["our certificate for \"a\"", "2002"]).await;
    let early = options(&ca, |params| {
        params.subject_alt_names.push(dns("a"));
        (params.not_before, params.not_after) = (date_time_ymd(2901, 1, 1), date_time_ymd(2902, 1, 1));
    });
    refused(&early, &b, RefusalCause::Certificate, &["\"a\"", "2901", "here it is"], &["2901"]).await;
}

#[tokio::test]
async fn a_certificate_of_another_name_is_refused_on_both_ends_whoever_dials() {
    let ca = authority("cluster");
    let (a, b) = (named_dns(&ca, "c"), named_dns(&ca, "b"));
    let values = ["node \"a\"", "names \"c\""];
    refused(&a, &b, RefusalCause::CertificateName, &values, &values).await;
    // the common name does not count
    let a = options(&ca, |params| params.distinguished_name.push(DnType::CommonName, "a"));
    refused(&a, &b, RefusalCause::CertificateName, &["no node"], &["no node"]).await;
}

#[tokio::test]
async fn a_certificate_that_may_not_be_used_so_is_refused() {
    let ca = authority("cluster");
    let a = options(&ca, |params| {
        params.subject_alt_names.push(dns("a"));
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::CodeSigning];
    });
    refused(&a, &named_dns(&ca, "b"), RefusalCause::Certificate, &["\"a\""], &["not fit"]).await;
}

#[tokio::test]
async fn strangers_are_told_apart_before_tls() {
    let tls = named_dns(&authority("cluster"), "b");
    let plain = b"\x8fMSTR\n\x01\x01\x00\x00";
    let inputs: [(&[u8], RefusalCause); 5] = [
        (b"GET / HTTP/1.1\r\n\r\n", RefusalCause::Http),
        (plain, RefusalCause::Mode),
        (&[0xff; 100], RefusalCause::Malformed),
        (b"", RefusalCause::Closed),
        (&[0x16, 3, 1, 0xff, 0xff, 1, 2, 3, 4, 5], RefusalCause::Tls),
    ];
    for (input, cause) in inputs {
        let (mut dialled, taken) = pair().await;
        dialled.write_all(input).await.unwrap();
        dialled.shutdown().await.unwrap();
        let reject = tls.accept(taken).await.expect_err("it was taken");
        assert_eq!(reject.cause(), cause, "{reject}");
        let mut answer = Vec::new();
        let _ = dialled.read_to_end(&mut answer).await;
        assert_eq!(answer.starts_with(b"\x8fMSTR"), cause == RefusalCause::Mode, "{cause}: {answer:?}");
    }
    // the other way round: TLS where none is spoken
    let (dialled, taken) = pair().await;
    drop(taken);
    assert_eq!(tls.connect(dialled).await.expect_err("it was taken"), Reject::Closed);
}

#[tokio::test]
async fn a_node_without_a_certificate_gets_no_link() {
    let ca = authority("cluster");
    let tls = named_dns(&ca, "b");
    let mut roots = RootCertStore::empty();
    roots.add(ca.der().clone()).unwrap();
    let provider = Arc::new(tokio_rustls::rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&version::TLS13])
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    let (dialled, taken) = pair().await;
    let name = ServerName::try_from("b").unwrap();
    let client = async {
        let mut stream = TlsConnector::from(Arc::new(config)).connect(name, dialled).await.unwrap();
        stream.read_u8().await.unwrap_err()
    };
    let (error, taken) = tokio::join!(client, tls.accept(taken));
    assert_eq!(taken.expect_err("it was taken").cause(), RefusalCause::Tls);
    assert!(tls.reject_of(&error).to_string().contains("CertificateRequired"), "{error}");
}

#[tokio::test]
async fn new_certificates_are_used_by_new_connections_and_broken_ones_are_not_taken() {
    let (old, new) = (authority("old"), authority("new"));
    let directory = std::env::temp_dir().join(format!("muster-tls-{}", std::process::id()));
    std::fs::create_dir_all(&directory).unwrap();
    let write = |ca: &str, (cert, key): (String, String)| {
        for (name, text) in [("ca.pem", ca), ("cert.pem", cert.as_str()), ("key.pem", key.as_str())] {
            std::fs::write(directory.join(name), text).unwrap();
        }
    };
    let for_a = |params: &mut CertificateParams| params.subject_alt_names.push(dns("a"));
    write(&old.pem(), leaf(&old, for_a));
    let a = TlsOptions::from_dir(&directory).unwrap();
    a.use_for(&NodeId::new("a").unwrap()).unwrap();
    let b = named_dns(&old, "b");
    link(&a, &b).await;

    // broken files of each kind: the old ones stay
    let (cert, key) = leaf(&old, for_a);
    let (_, other_key) = leaf(&old, for_a);
    let not_a = leaf(&old, |params| params.subject_alt_names.push(dns("c")));
    let expired = leaf(&old, |params| {
        for_a(params);
        (params.not_before, params.not_after) = (date_time_ymd(2001, 1, 1), date_time_ymd(2002, 1, 1));
    });
    write("no certificate", (cert.clone(), key.clone()));
    assert!(matches!(a.reload(), Err(TlsError::Pem { what: "ca", .. })));
    write(&old.pem(), ("half a file".into(), key.clone()));
    assert!(matches!(a.reload(), Err(TlsError::Pem { what: "cert", .. })));
    write(&old.pem(), (cert.clone(), String::new()));
    assert!(matches!(a.reload(), Err(TlsError::Pem { what: "key", .. })));
    write(&old.pem(), (cert.clone(), other_key));
    assert!(matches!(a.reload(), Err(TlsError::KeyMismatch { .. })));
    write(&old.pem(), not_a);
    let error = a.reload().unwrap_err();
    assert!(matches!(error, TlsError::Name { .. }), "{error}");
    assert!(error.to_string().contains("node \"a\" names \"c\""), "{error}");
    write(&old.pem(), expired);
    assert!(matches!(a.reload(), Err(TlsError::Time { .. })));
    std::fs::remove_file(directory.join("cert.pem")).unwrap();
    assert!(matches!(a.reload(), Err(TlsError::Read { .. })));
    link(&a, &b).await;

    // a new authority, without a pause: first both are trusted, then certificates change
    let both = format!("{}{}", old.pem(), new.pem());
    write(&both, (cert, key));
    a.reload().unwrap();
    link(&a, &b).await;
    let (cert, key) = leaf(&new, |params| params.subject_alt_names.push(dns("b")));
    b.replace_pem(&both, cert, key).unwrap();
    link(&a, &b).await;
    write(&new.pem(), leaf(&new, for_a));
    a.reload().unwrap();
    link(&a, &b).await;
    assert!(meet(&a, &named_dns(&old, "b")).await.0.is_err());
    std::fs::remove_dir_all(&directory).unwrap();
    assert!(matches!(b.reload(), Err(TlsError::NoDirectory)));
}

#[test]
fn names_of_a_certificate() {
    let ca = authority("cluster");
    let tls = options(&ca, |params| {
        params.subject_alt_names = vec![
            dns("chat-1"),
            dns("*.chat"),
            uri("muster://caf%C3%A9%20b%2fx"),
            uri("muster://half%2"),
            uri("https://other"),
            uri("muster://"),
        ];
    });
    assert_eq!(tls.shared.loaded.load().own.names, ["chat-1", "*.chat", "café b/x"]);
    for (name, good) in
        [("chat-1", true), ("café b/x", true), ("Chat-1", false), ("x.chat", false), ("other", false)]
    {
        assert_eq!(tls.use_for(&NodeId::new(name).unwrap()).is_ok(), good, "{name}");
    }
    let error = tls.use_for(&NodeId::new("chat-2").unwrap()).unwrap_err().to_string();
    assert!(error.contains("DNS:chat-2") && error.contains("\"chat-1\""), "{error}");
}

#[test]
fn nothing_private_is_shown() {
    let shown = format!("{:?}", named_dns(&authority("cluster"), "a"));
    assert!(shown.contains("\"a\"") && shown.contains("CN=cluster") && !shown.contains("PRIVATE"), "{shown}");
}
