//! Nodes that should have no link, and say who they are.

use muster_router::transport::SendError;
use muster_router::transport::link::LinkConfig;
use muster_router::transport::tcp::TcpConfigError;

use super::*;

#[tokio::test]
async fn a_wrong_secret() {
    let (log, _guard) = logs();
    let a = Node::start(with_secret("a")).await;
    let wrong = Secret::new("a secret of somebody else").unwrap();
    let y = Node::start(plain("y").secret(wrong.clone()).seed(a.address())).await;
    let x = Node::start(plain("x").secret(wrong).seed(a.address())).await;
    no_link(&a, &x, RefusalCause::Secret, RefusalCause::Secret, with_secret("c")).await;
    // both ends say whom they mean, once, though there were many dials
    let values = ["node \"x\"", "did not prove the secret that node \"a\" uses"];
    let at_a = log.lines(&[&["me=a", "WARN"][..], &values[..]].concat());
    let at_x = log.lines(&[&["me=x", "WARN", "refused by the other end"][..], &values[..]].concat());
    assert_eq!((at_a.len(), at_x.len()), (1, 1), "{at_a:?} {at_x:?}");
    // another node on the same machine is another node
    assert_eq!(log.lines(&["me=a", "node \"y\" at"]).len(), 1);
    y.transport.shutdown().await;
    assert_eq!(log.lines(&["a secret of"]), [""; 0], "a secret was logged");
    assert!(x.refused(RefusalCause::Secret) >= 4, "{:?}", x.stats());
}

#[tokio::test]
async fn a_secret_on_one_side_only() {
    let (log, _guard) = logs();
    let values = ["uses a secret without TLS", "uses neither TLS nor a secret"];
    let a = Node::start(with_secret("a")).await;
    let x = Node::start(plain("x").seed(a.address())).await;
    no_link(&a, &x, RefusalCause::Mode, RefusalCause::Mode, with_secret("c")).await;
    assert_eq!(log.lines(&[&["me=a"][..], &values[..]].concat()).len(), 1);
    assert_eq!(log.lines(&[&["me=x"][..], &values[..]].concat()).len(), 1);

    let b = Node::start(plain("b")).await;
    let y = Node::start(with_secret("y").seed(b.address())).await;
    no_link(&b, &y, RefusalCause::Mode, RefusalCause::Mode, plain("d")).await;
    assert_eq!(log.lines(&[&["me=b"][..], &values[..]].concat()).len(), 1);
    assert_eq!(log.lines(&[&["me=y"][..], &values[..]].concat()).len(), 1);
}

#[tokio::test]
async fn another_scope() {
    let (log, _guard) = logs();
    let a = Node::start(with_secret("a")).await;
    let elsewhere = Terms { scope: "lobby".into(), ..terms() };
    let x = Node::start_on(with_secret("x").seed(a.address()), elsewhere).await;
    no_link(&a, &x, RefusalCause::Scope, RefusalCause::Scope, with_secret("c")).await;
    for me in ["me=a", "me=x"] {
        assert_eq!(log.lines(&[me, "\"lobby\"", "\"rooms\""]).len(), 1, "{me}");
    }
}

#[tokio::test]
async fn hazard_23_other_ring_parameters() {
    let (log, _guard) = logs();
    let a = Node::start(with_secret("a")).await;
    let other = Terms { vnodes: 64, ..terms() };
    let x = Node::start_on(with_secret("x").seed(a.address()), other).await;
    no_link(&a, &x, RefusalCause::Link, RefusalCause::Link, with_secret("c")).await;
    for me in ["me=a", "me=x"] {
        assert_eq!(log.lines(&[me, "a ring of ", "64", "128"]).len(), 1, "{me}");
    }
}

#[tokio::test]
async fn hazard_23_another_major_version_of_the_protocol() {
    let (log, _guard) = logs();
    let a = Node::start(with_secret("a")).await;
    let other = Terms { protocol: 7, ..terms() };
    let x = Node::start_on(with_secret("x").seed(a.address()), other).await;
    no_link(&a, &x, RefusalCause::Link, RefusalCause::Link, with_secret("c")).await;
    for me in ["me=a", "me=x"] {
        assert_eq!(log.lines(&[me, "protocol version", "7", "1"]).len(), 1, "{me}");
    }
}

#[tokio::test]
async fn the_same_name_twice() {
    let (log, _guard) = logs();
    let a = Node::start(with_secret("a")).await;
    let b = Node::start(with_secret("b").seed(a.address())).await;
    a.until_linked(&["b"]).await;
    let twin = Node::start(with_secret("a").seed(a.address())).await;
    no_link(&a, &twin, RefusalCause::SameName, RefusalCause::SameName, with_secret("c")).await;
    // both say where the two of them are
    let addresses = [twin.address(), a.address()];
    let values: Vec<&str> = addresses.iter().map(String::as_str).collect();
    assert_eq!(log.lines(&values).len(), 2);
    assert_eq!((a.linked(), b.linked()), (vec!["b".to_owned()], vec!["a".to_owned()]));
    assert_eq!(a.reports.0.lock().unwrap().all.iter().filter(|said| said.ends_with(" b")).count(), 1);
}

/// All nodes may be given one list of seeds: the own address in it is no fault.
#[tokio::test]
async fn the_own_address_among_the_seeds() {
    let (log, _guard) = logs();
    let probe = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = probe.local_addr().unwrap().port();
    drop(probe);
    // under the address that it advertises it is not even dialled; here it has two, as behind a translation
    let (address, outside) = (format!("127.0.0.1:{port}"), format!("127.0.0.2:{port}"));
    let a = TcpTransport::builder("a").listen(&address).advertise(outside).seed(&address).secret(secret());
    let a = Node::start(a).await;
    until(|| format!("{:?}", a.stats()), || a.refused(RefusalCause::Itself) >= 1).await;
    let b = Node::start(with_secret("b").seed(&address)).await;
    b.until_linked(&["a"]).await;
    assert_eq!(a.stats().all_refused(), a.refused(RefusalCause::Itself), "{:?}", a.stats());
    assert_eq!(log.lines(&["WARN"]), [""; 0]);
}

/// They were linked, and what was above the lower limit was accepted and gone.
#[tokio::test]
async fn another_limit_of_a_frame() {
    let (log, _guard) = logs();
    let a = Node::start(with_secret("a")).await;
    let link = LinkConfig { max_frame: 200_000, ..LinkConfig::default() };
    let x = Node::start(with_secret("x").link(link).seed(a.address())).await;
    no_link(&a, &x, RefusalCause::Link, RefusalCause::Link, with_secret("c")).await;
    let both = ["200000", &LinkConfig::default().max_frame.to_string(), "max_frame"].map(str::to_owned);
    for me in ["me=a", "me=x"] {
        let with = [&["WARN", me][..], &both.each_ref().map(String::as_str)].concat();
        assert!(!log.lines(&with).is_empty(), "{:?}", log.lines(&[]));
    }
}

#[tokio::test]
async fn tr_01_a_frame_above_the_limit_is_an_error_at_the_sender() {
    let link = LinkConfig { max_frame: 1000, ..LinkConfig::default() };
    let a = Node::start(with_secret("a").link(link.clone())).await;
    let b = Node::start(with_secret("b").link(link).seed(a.address())).await;
    b.until_linked(&["a"]).await;
    a.until_linked(&["b"]).await;
    let to = b.peer("a").unwrap();
    let long = data(&"x".repeat(1001));
    let Err(SendError::TooLarge(back)) = b.transport.try_send(&to, long.clone()) else {
        panic!("it was taken")
    };
    assert_eq!(back, long);
    let Err(SendError::TooLarge(_)) = b.transport.send(&to, long).await else { panic!("it was taken") };
    let exact = data(&"y".repeat(1000));
    b.transport.send(&to, exact.clone()).await.unwrap();
    until(|| "the frame after it".into(), || a.reports.0.lock().unwrap().frames == [exact.clone()]).await;
    assert_eq!((a.reports.0.lock().unwrap().all.len(), a.stats().malformed), (1, 0));
}

#[test]
fn an_open_address_needs_protection() {
    let open = |listen: &str| TcpTransport::builder("a").listen(listen).advertise("10.0.0.1:7001");
    for listen in ["0.0.0.0:7001", "[::]:7001", "10.0.0.1:7001", "chat.example.com:7001"] {
        let error = open(listen).build().unwrap_err();
        assert!(matches!(error, TcpConfigError::Exposed { .. }), "{error}");
        assert_eq!(error.option(), "listen");
        assert!(error.to_string().contains(listen), "{error}");
        open(listen).insecure().build().unwrap();
        open(listen).secret(secret()).build().unwrap();
    }
    for listen in ["127.0.0.1:7001", "127.8.8.8:0", "[::1]:7001", "localhost:7001"] {
        open(listen).build().unwrap();
    }
}
