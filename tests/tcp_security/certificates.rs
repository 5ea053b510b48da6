//! Nodes whose certificates are not to be trusted, and certificates that change.

use muster_router::transport::tcp::{TcpConfigError, TlsOptions};
use rcgen::string::Ia5String;
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair, SanType, date_time_ymd,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::{ClientConfig, RootCertStore, version};

use super::*;

type Authority = CertifiedIssuer<'static, KeyPair>;

fn authority(name: &str) -> Authority {
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.distinguished_name.push(DnType::CommonName, name);
    CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap()
}

fn leaf(authority: &Authority, node: &str, years: (i32, i32)) -> (String, String) {
    let mut params = CertificateParams::default();
    params.subject_alt_names.push(SanType::DnsName(Ia5String::try_from(node).unwrap()));
    params.not_before = date_time_ymd(years.0, 1, 1);
    params.not_after = date_time_ymd(years.1, 1, 1);
    let key = KeyPair::generate().unwrap();
    (params.signed_by(&key, authority).unwrap().pem(), key.serialize_pem())
}

const VALID: (i32, i32) = (2001, 2901);

fn certified(authority: &Authority, node: &str) -> TlsOptions {
    certified_for(authority, node, VALID)
}

fn certified_for(authority: &Authority, node: &str, years: (i32, i32)) -> TlsOptions {
    let (cert, key) = leaf(authority, node, years);
    TlsOptions::from_pem(authority.pem(), cert, key).unwrap()
}

fn with_tls(authority: &Authority, node: &str) -> TcpBuilder {
    plain(node).tls(certified(authority, node))
}

#[tokio::test]
async fn nodes_of_one_authority_link_with_and_without_a_secret() {
    let ca = authority("cluster");
    let a = Node::start(with_tls(&ca, "a")).await;
    let b = Node::start(with_tls(&ca, "b").seed(a.address())).await;
    b.until_linked(&["a"]).await;
    a.until_linked(&["b"]).await;
    let long = data(&"x".repeat(3 << 20));
    b.transport.send(&b.peer("a").unwrap(), long.clone()).await.unwrap();
    until(|| "a long frame".into(), || a.reports.0.lock().unwrap().frames == [long.clone()]).await;

    let c = Node::start(with_tls(&ca, "c").secret(secret())).await;
    let d = Node::start(with_tls(&ca, "d").secret(secret()).seed(c.address())).await;
    d.until_linked(&["c"]).await;
    // the secret alone is not enough, nor is the certificate
    let x = Node::start(with_tls(&ca, "x").seed(c.address())).await;
    no_link(&c, &x, RefusalCause::Mode, RefusalCause::Mode, with_tls(&ca, "e").secret(secret())).await;
}

#[tokio::test]
async fn another_authority() {
    let (log, _guard) = logs();
    let (ours, theirs) = (authority("ours"), authority("theirs"));
    let a = Node::start(with_tls(&ours, "a")).await;
    let x = Node::start(with_tls(&theirs, "x").seed(a.address())).await;
    no_link(&a, &x, RefusalCause::Certificate, RefusalCause::Certificate, with_tls(&ours, "c")).await;
    // the dialler looks first
    assert_eq!(log.lines(&["me=x", "\"a\"", "CN=ours", "CN=theirs"]).len(), 1);
    assert_eq!(log.lines(&["me=a", "our certificate for \"a\"", "CN=ours", "authority"]).len(), 1);
}

#[tokio::test]
async fn an_expired_certificate() {
    let (log, _guard) = logs();
    let ca = authority("cluster");
    let a = Node::start(with_tls(&ca, "a")).await;
    let expired = certified_for(&ca, "x", (2001, 2002));
    assert_eq!(log.lines(&["WARN", "2002", "the other nodes will refuse this certificate"]).len(), 1);
    let x = Node::start(plain("x").tls(expired).seed(a.address())).await;
    no_link(&a, &x, RefusalCause::Certificate, RefusalCause::Certificate, with_tls(&ca, "c")).await;
    assert_eq!(log.lines(&["me=a", "\"x\"", "2002", "here it is"]).len(), 1);
    assert_eq!(log.lines(&["me=x", "our certificate for \"x\"", "2002"]).len(), 1);
}

#[tokio::test]
async fn a_certificate_of_another_name_is_not_taken_for_the_own_node() {
    let ca = authority("cluster");
    let error = plain("x").tls(certified(&ca, "b")).build().unwrap_err();
    assert!(matches!(error, TcpConfigError::Tls { .. }), "{error}");
    assert_eq!(error.option(), "tls");
    assert!(error.to_string().contains("node \"x\"") && error.to_string().contains("\"b\""), "{error}");
    let options = certified(&ca, "x");
    plain("x").tls(options.clone()).build().unwrap();
    let (cert, key) = leaf(&ca, "b", VALID);
    assert!(options.replace_pem(ca.pem(), cert, key).is_err());
}

/// Somebody with the good certificate of `b` who says that it is `x`.
#[tokio::test]
async fn a_certificate_of_another_name() {
    let (log, _guard) = logs();
    let ca = authority("cluster");
    let a = Node::start(with_tls(&ca, "a")).await;
    let (cert, key) = leaf(&ca, "b", VALID);
    let mut roots = RootCertStore::empty();
    roots.add(ca.der().clone()).unwrap();
    let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_protocol_versions(&[&version::TLS13])
        .unwrap()
        .with_root_certificates(roots)
        .with_client_auth_cert(
            vec![CertificateDer::from_pem_slice(cert.as_bytes()).unwrap()],
            PrivateKeyDer::from_pem_slice(key.as_bytes()).unwrap(),
        )
        .unwrap();
    let stream = TcpStream::connect(a.address()).await.unwrap();
    let connector = TlsConnector::from(Arc::new(config));
    let mut stream = connector.connect("a".try_into().unwrap(), stream).await.unwrap();
    stream.write_all(&strangers::preamble("x", true)).await.unwrap();
    let mut answer = Vec::new();
    tokio::time::timeout(PATIENCE, stream.read_to_end(&mut answer)).await.expect("in time").unwrap();
    let answer = String::from_utf8_lossy(&answer);
    assert!(answer.contains("the certificate of node \"x\" names \"b\""), "{answer}");
    a.until_refused(RefusalCause::CertificateName).await;
    assert_eq!(log.lines(&["me=a", "node \"x\" names \"b\""]).len(), 1);
    let c = Node::start(with_tls(&ca, "c").seed(a.address())).await;
    c.until_linked(&["a"]).await;
}

#[tokio::test]
async fn tls_on_one_side_only() {
    let (log, _guard) = logs();
    let ca = authority("cluster");
    // a node without TLS dials one with it, and both can be told
    let a = Node::start(with_tls(&ca, "a")).await;
    let x = Node::start(plain("x").seed(a.address())).await;
    no_link(&a, &x, RefusalCause::Mode, RefusalCause::Mode, with_tls(&ca, "c")).await;
    assert_eq!(log.lines(&["me=x", "without TLS was refused by a node that uses TLS"]).len(), 1);
    // the other way round: nothing can be said to an end that speaks TLS
    let b = Node::start(plain("b")).await;
    let y = Node::start(with_tls(&ca, "y").seed(b.address())).await;
    no_link(&b, &y, RefusalCause::TlsForeign, RefusalCause::Closed, plain("d")).await;
    assert_eq!(log.lines(&["me=b", "speaks TLS, and this node has no TLS"]).len(), 1);
}

#[tokio::test]
async fn certificates_change_while_links_are_up() {
    let (old, new) = (authority("old"), authority("new"));
    let both = format!("{}{}", old.pem(), new.pem());
    let options: Vec<TlsOptions> = ["a", "b"].map(|node| certified(&old, node)).into();
    let a = Node::start(plain("a").tls(options[0].clone())).await;
    let b = Node::start(plain("b").tls(options[1].clone()).seed(a.address())).await;
    b.until_linked(&["a"]).await;
    a.until_linked(&["b"]).await;
    let newcomer = Node::start(with_tls(&new, "c").seed(a.address())).await;
    a.until_refused(RefusalCause::Certificate).await;
    newcomer.transport.shutdown().await;

    for (node, options) in ["a", "b"].iter().zip(&options) {
        let (cert, key) = leaf(&old, node, VALID);
        options.replace_pem(&both, cert, key).unwrap();
    }
    for (node, options) in ["a", "b"].iter().zip(&options) {
        let (cert, key) = leaf(&new, node, VALID);
        options.replace_pem(&both, "broken", &key).unwrap_err();
        options.replace_pem(&both, cert, key).unwrap();
    }
    let newcomer = Node::start(with_tls(&new, "c").seed(a.address())).await;
    newcomer.until_linked(&["a", "b"]).await;
    // what was up stayed up all the while
    b.transport.send(&b.peer("a").unwrap(), data("still here")).await.unwrap();
    until(|| "a frame".into(), || a.reports.0.lock().unwrap().frames == [data("still here")]).await;
    let about_b = |said: &&String| said.ends_with(" b");
    assert_eq!(a.reports.0.lock().unwrap().all.iter().filter(about_b).count(), 1);
}

/// The commands of the guide, as they stand there.
#[tokio::test]
async fn the_certificates_of_the_guide_link() {
    let skipped = |why: &str| {
        assert!(std::env::var("MUSTER_REQUIRE_ALL").as_deref() != Ok("1"), "{why}");
        println!("skipped: {why}");
    };
    let Ok(found) = std::process::Command::new("openssl").arg("version").output() else {
        return skipped("there is no openssl on the PATH");
    };
    let found = String::from_utf8_lossy(&found.stdout).into_owned();
    if !found.starts_with("OpenSSL 3") {
        return skipped(&format!("the commands are for OpenSSL 3, and here is {found}"));
    }
    let guide = include_str!("../../src/guide/security.md");
    let commands = guide.split_once("```sh\n").and_then(|(_, rest)| rest.split_once("```")).unwrap().0;
    let directory = std::env::temp_dir().join(format!("muster-guide-{}", std::process::id()));
    std::fs::create_dir_all(&directory).unwrap();
    let made = std::process::Command::new("sh").args(["-e", "-c", commands]).current_dir(&directory).output();
    let made = made.unwrap();
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let tls = |node: &str| plain(node).tls(TlsOptions::from_dir(directory.join(node)).unwrap());
    let a = Node::start(tls("a")).await;
    let b = Node::start(tls("b").seed(a.address())).await;
    b.until_linked(&["a"]).await;
    std::fs::remove_dir_all(&directory).unwrap();
}
