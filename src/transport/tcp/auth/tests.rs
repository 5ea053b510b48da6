//! The handshake of two ends, and of one end with somebody who should not get in.

use proptest::prelude::*;

use super::*;

const SECRET: &[u8] = b"sixteen bytes and some more";

fn preamble(node: &str) -> Preamble {
    let instance = node.bytes().map(u64::from).sum();
    let node = NodeId::new(node).unwrap();
    Preamble { advertise: format!("{node}:7001"), node, scope: "rooms".into(), instance }
}

fn secret() -> Secret {
    Secret::new(SECRET).unwrap()
}

fn dialer(secret: Option<&Secret>) -> Handshake {
    Handshake::new(Role::Dialer, preamble("a"), secret, [1; 32])
}

fn acceptor(secret: Option<&Secret>) -> Handshake {
    Handshake::new(Role::Acceptor, preamble("b"), secret, [2; 32])
}

fn tls(binding: u8, names: &[&str]) -> TlsPeer {
    TlsPeer { binding: [binding; 32], names: names.iter().map(|name| (*name).to_owned()).collect() }
}

/// What an end does with these bytes: what it writes, then how it stands.
fn drive(end: &mut Handshake, input: &mut BytesMut) -> (Vec<Bytes>, Result<Option<Preamble>, Reject>) {
    let mut sent = Vec::new();
    loop {
        match end.handle(input) {
            Ok(Step::Send(bytes)) => sent.push(bytes),
            Ok(Step::NeedMore) => return (sent, Ok(None)),
            Ok(Step::Done { peer }) => return (sent, Ok(Some(peer))),
            Err(reject) => return (sent, Err(reject)),
        }
    }
}

type Outcome = Result<Option<Preamble>, Reject>;

/// Runs two ends against each other, as connections would: a refusal that may be said is said.
fn meet(mut one: Handshake, mut other: Handshake) -> (Outcome, Outcome) {
    let (mut to_one, mut to_other) = (BytesMut::new(), BytesMut::new());
    let (mut at_one, mut at_other) = (Ok(None), Ok(None));
    for _ in 0..6 {
        at_one = turn(&mut one, &mut to_one, &mut to_other);
        at_other = turn(&mut other, &mut to_other, &mut to_one);
    }
    (at_one, at_other)
}

fn turn(end: &mut Handshake, input: &mut BytesMut, output: &mut BytesMut) -> Outcome {
    let failed = matches!(end.state, State::Failed(_));
    let (sent, outcome) = drive(end, input);
    sent.iter().for_each(|bytes| output.extend_from_slice(bytes));
    match &outcome {
        Err(reject) if reject.is_ours_to_say() && !failed => output.extend_from_slice(&reject.encode()),
        _ => {}
    }
    outcome
}

fn both_know_each_other(one: Handshake, other: Handshake) {
    assert_eq!(meet(one, other), (Ok(Some(preamble("b"))), Ok(Some(preamble("a")))));
}

/// The refusing end gives its reject; the other one has heard of the same cause, in words with `values`.
fn refused(one: Handshake, other: Handshake, cause: RefusalCause, values: &[&str]) {
    let (at_one, at_other) = meet(one, other);
    for outcome in [at_one, at_other] {
        let reject = outcome.expect_err("one end took it");
        assert_eq!(reject.cause(), cause, "{reject}");
        for value in values {
            assert!(reject.to_string().contains(value), "{reject} does not name {value}");
        }
    }
}

#[test]
fn ends_that_agree_know_each_other() {
    let secret = secret();
    both_know_each_other(dialer(None), acceptor(None));
    both_know_each_other(dialer(Some(&secret)), acceptor(Some(&secret)));
    both_know_each_other(
        dialer(Some(&secret)).over_tls(tls(7, &["b"])),
        acceptor(Some(&secret)).over_tls(tls(7, &["x", "a"])),
    );
    both_know_each_other(dialer(None).over_tls(tls(7, &["b"])), acceptor(None).over_tls(tls(8, &["a"])));
}

#[test]
fn what_follows_the_handshake_is_left_in_the_input() {
    let (mut one, mut other) = (dialer(None), acceptor(None));
    let mut input = BytesMut::new();
    for bytes in drive(&mut one, &mut input).0 {
        input.extend_from_slice(&bytes);
    }
    let (sent, _) = drive(&mut other, &mut input);
    let (sent, _) = drive(&mut one, &mut BytesMut::from(&sent[0][..]));
    let (sent, outcome) = drive(&mut other, &mut BytesMut::from(&sent[0][..]));
    assert_eq!(outcome, Ok(Some(preamble("a"))));
    let mut input = BytesMut::from(&sent[0][..]);
    input.extend_from_slice(b"records");
    assert_eq!(drive(&mut one, &mut input), (vec![], Ok(Some(preamble("b")))));
    assert_eq!(&input[..], b"records");
}

#[test]
fn a_byte_at_a_time_is_as_good() {
    let secret = secret();
    let (mut one, mut other) = (dialer(Some(&secret)), acceptor(Some(&secret)));
    let (mut to_one, mut to_other) = (BytesMut::new(), BytesMut::new());
    let mut outcomes = (Ok(None), Ok(None));
    let mut on_the_way = (Vec::<u8>::new(), Vec::<u8>::new());
    for _ in 0..2000 {
        let (sent, outcome) = drive(&mut one, &mut to_one);
        on_the_way.1.extend(sent.concat());
        outcomes.0 = outcome;
        let (sent, outcome) = drive(&mut other, &mut to_other);
        on_the_way.0.extend(sent.concat());
        outcomes.1 = outcome;
        if !on_the_way.0.is_empty() {
            to_one.extend_from_slice(&[on_the_way.0.remove(0)]);
        }
        if !on_the_way.1.is_empty() {
            to_other.extend_from_slice(&[on_the_way.1.remove(0)]);
        }
    }
    assert_eq!(outcomes, (Ok(Some(preamble("b"))), Ok(Some(preamble("a")))));
}

#[test]
fn a_wrong_secret_is_refused_by_name_and_the_dialler_proves_first() {
    let wrong = Secret::new(b"another secret, also long").unwrap();
    let named = ["\"a\"", "\"b\"", "secret"];
    refused(dialer(Some(&secret())), acceptor(Some(&wrong)), RefusalCause::Secret, &named);
    let (mut other, secret) = (acceptor(Some(&wrong)), secret());
    let (sent, _) = drive(&mut dialer(Some(&secret)), &mut BytesMut::new());
    let (sent, _) = drive(&mut other, &mut BytesMut::from(&sent[0][..]));
    assert_eq!(sent.len(), 1, "the preamble, and no proof to guess on");
}

/// An acceptor that knows no secret and says yes to every proof.
#[test]
fn an_acceptor_that_proves_nothing_is_refused() {
    let secret = secret();
    for proof in [vec![], vec![0; 32], vec![0; 31]] {
        let (mut one, mut honest) = (dialer(Some(&secret)), acceptor(Some(&secret)));
        let (sent, _) = drive(&mut one, &mut BytesMut::new());
        let (sent, _) = drive(&mut honest, &mut BytesMut::from(&sent[0][..]));
        assert_eq!(drive(&mut one, &mut BytesMut::from(&sent[0][..])).1, Ok(None));
        let (_, outcome) = drive(&mut one, &mut BytesMut::from(&preamble::encode_proof(&proof)[..]));
        assert_eq!(outcome.map_err(|reject| reject.cause()), Err(RefusalCause::Secret));
    }
}

#[test]
fn a_proof_that_is_reflected_is_refused() {
    let secret = secret();
    // the attacker answers with what the dialler says
    let mut one = dialer(Some(&secret));
    let (sent, _) = drive(&mut one, &mut BytesMut::new());
    let (_, outcome) = drive(&mut one, &mut BytesMut::from(&sent[0][..]));
    assert_eq!(outcome, Err(Reject::Malformed { what: "our own preamble" }));
    // or it has a preamble of its own, and sends the dialler's proof back
    let mut one = dialer(Some(&secret));
    assert_eq!(drive(&mut one, &mut BytesMut::new()).1, Ok(None));
    let opening =
        Opening { preamble: preamble("b"), nonce: [9; 32], mode: Mode { secret: true, tls: false } };
    let opening = preamble::encode_opening(&opening).unwrap();
    let (sent, _) = drive(&mut one, &mut BytesMut::from(&opening[..]));
    let (_, outcome) = drive(&mut one, &mut BytesMut::from(&sent[0][..]));
    assert_eq!(outcome.map_err(|reject| reject.cause()), Err(RefusalCause::Secret));
}

#[test]
fn a_proof_that_is_replayed_is_refused() {
    let secret = secret();
    let mut recorded = Vec::new();
    let (mut one, mut other) = (dialer(Some(&secret)), acceptor(Some(&secret)));
    let mut input = BytesMut::new();
    for _ in 0..2 {
        let (sent, _) = drive(&mut one, &mut input);
        recorded.push(sent[0].clone());
        let (sent, outcome) = drive(&mut other, &mut BytesMut::from(&sent[0][..]));
        assert!(outcome.is_ok());
        input = BytesMut::from(&sent[0][..]);
    }
    // the same words to the same node, which has another nonce this time
    let mut later = Handshake::new(Role::Acceptor, preamble("b"), Some(&secret), [3; 32]);
    assert_eq!(drive(&mut later, &mut BytesMut::from(&recorded[0][..])).1, Ok(None));
    let (_, outcome) = drive(&mut later, &mut BytesMut::from(&recorded[1][..]));
    assert_eq!(outcome.map_err(|reject| reject.cause()), Err(RefusalCause::Secret));
}

/// Somebody between the two ends, with a TLS connection to each.
#[test]
fn a_relay_that_ends_tls_is_refused() {
    let secret = secret();
    let one = dialer(Some(&secret)).over_tls(tls(7, &["b"]));
    let other = acceptor(Some(&secret)).over_tls(tls(8, &["a"]));
    refused(one, other, RefusalCause::Secret, &["\"a\""]);
}

/// Whatever is changed on the way, no end takes the other for what it is not.
#[test]
fn no_byte_of_a_preamble_can_be_changed_on_the_way() {
    let secret = secret();
    let length = drive(&mut dialer(Some(&secret)), &mut BytesMut::new()).0[0].len();
    let mut proofs = 0;
    for at in 0..length {
        let (mut one, mut other) = (dialer(Some(&secret)), acceptor(Some(&secret)));
        let (sent, _) = drive(&mut one, &mut BytesMut::new());
        let mut changed = BytesMut::from(&sent[0][..]);
        changed[at] ^= 1;
        let (sent, outcome) = drive(&mut other, &mut changed);
        let (Ok(None), [answer]) = (outcome, &sent[..]) else { continue };
        let (sent, _) = drive(&mut one, &mut BytesMut::from(&answer[..]));
        let (_, outcome) = drive(&mut other, &mut BytesMut::from(&sent[0][..]));
        assert_eq!(outcome.map_err(|reject| reject.cause()), Err(RefusalCause::Secret), "byte {at}");
        proofs += 1;
    }
    assert!(proofs >= 32, "the nonce at least may be any");
}

#[test]
fn other_scopes_and_names_and_modes_are_refused_with_both_values() {
    let secret = secret();
    let mut elsewhere = preamble("a");
    elsewhere.scope = "lobby".into();
    let one = Handshake::new(Role::Dialer, elsewhere, None, [1; 32]);
    refused(one, acceptor(None), RefusalCause::Scope, &["\"lobby\"", "\"rooms\""]);

    let mut twin = preamble("b");
    (twin.instance, twin.advertise) = (99, "other:7".into());
    let one = Handshake::new(Role::Dialer, twin, None, [1; 32]);
    refused(one, acceptor(None), RefusalCause::SameName, &["\"other:7\"", "\"b:7001\""]);

    let itself = Handshake::new(Role::Dialer, preamble("b"), None, [1; 32]);
    assert_eq!(meet(itself, acceptor(None)), (Err(Reject::Itself), Err(Reject::Itself)));

    let values = ["a secret without TLS", "neither TLS nor a secret"];
    refused(dialer(Some(&secret)), acceptor(None), RefusalCause::Mode, &values);
    refused(dialer(None), acceptor(Some(&secret)), RefusalCause::Mode, &values);
}

#[test]
fn a_certificate_has_to_name_the_node() {
    let one = dialer(None).over_tls(tls(7, &["b"]));
    let other = acceptor(None).over_tls(tls(7, &["c", "d"]));
    refused(one, other, RefusalCause::CertificateName, &["\"a\"", "\"c\", \"d\""]);
    // the dialler looks as well
    let one = dialer(None).over_tls(tls(7, &[]));
    let other = acceptor(None).over_tls(tls(7, &["a"]));
    refused(one, other, RefusalCause::CertificateName, &["\"b\"", "no node"]);
}

#[test]
fn another_major_version_is_refused_and_told_so() {
    let (sent, _) = drive(&mut dialer(None), &mut BytesMut::new());
    let mut newer = sent[0].to_vec();
    newer[6] = 9;
    let (sent, outcome) = drive(&mut acceptor(None), &mut BytesMut::from(&newer[..]));
    let Err(reject) = outcome else { panic!("it was taken") };
    assert_eq!((sent.len(), &reject), (0, &Reject::Version { theirs: 9, ours: 1 }));
    assert!(reject.is_ours_to_say());
    let mut one = dialer(None);
    assert_eq!(drive(&mut one, &mut BytesMut::new()).1, Ok(None));
    let (_, outcome) = drive(&mut one, &mut BytesMut::from(&reject.encode()[..]));
    let Err(heard) = outcome else { panic!("it was taken") };
    assert_eq!(heard.cause(), RefusalCause::Version);
    assert!(heard.to_string().contains("version 9") && heard.to_string().contains("version 1"), "{heard}");
}

#[test]
fn strangers_get_no_answer() {
    let inputs: [(&[u8], RefusalCause); 5] = [
        (b"GET / HTTP/1.1\r\n\r\n", RefusalCause::Http),
        (&[0x16, 3, 1, 0, 200, 1], RefusalCause::TlsForeign),
        (&[0xff; 64], RefusalCause::Malformed),
        (b"\x8fMSTR\n\x01\x01\xff\xff", RefusalCause::TooLarge),
        (b"\x8fMSTR\n\x01\x02\x00\x00", RefusalCause::Malformed),
    ];
    for (input, cause) in inputs {
        let mut other = acceptor(Some(&secret()));
        let (sent, outcome) = drive(&mut other, &mut BytesMut::from(input));
        let Err(reject) = outcome else { panic!("it was taken") };
        assert_eq!((sent.len(), reject.cause(), reject.is_ours_to_say()), (0, cause, false), "{reject}");
        // and it stays refused, whatever comes later
        let (good, _) = drive(&mut dialer(Some(&secret())), &mut BytesMut::new());
        assert_eq!(drive(&mut other, &mut BytesMut::from(&good[0][..])), (vec![], Err(reject)));
    }
}

#[test]
fn a_secret_is_changed_without_a_pause() {
    let (old, new) = (secret(), Secret::new(b"the secret of next year").unwrap());
    let steps = [old.clone(), old.clone().accept(new.clone()), new.clone().accept(old.clone()), new.clone()];
    // nodes at neighbouring steps link in both directions, at the far ends they do not
    for pair in steps.windows(2) {
        both_know_each_other(dialer(Some(&pair[0])), acceptor(Some(&pair[1])));
        both_know_each_other(dialer(Some(&pair[1])), acceptor(Some(&pair[0])));
    }
    refused(dialer(Some(&old)), acceptor(Some(&new)), RefusalCause::Secret, &[]);
}

#[test]
fn secrets_are_long_enough_and_never_shown() {
    assert!(matches!(Secret::new(b""), Err(SecretError::Length { given: 0 })));
    assert!(matches!(Secret::new([b'x'; 15]), Err(SecretError::Length { given: 15 })));
    assert_eq!(format!("{:?}", Secret::new([b'x'; 16]).unwrap()), "Secret(..)");
    let shown = format!("{:?}", dialer(Some(&secret())));
    assert!(!shown.contains("sixteen"), "{shown}");
    // nor does it travel
    let (sent, _) = drive(&mut dialer(Some(&secret())), &mut BytesMut::new());
    assert!(!sent[0].windows(16).any(|window| window == &SECRET[..16]));
}

#[test]
fn a_secret_of_a_file_ends_before_its_newline() {
    let path = std::env::temp_dir().join(format!("muster-secret-{}", std::process::id()));
    std::fs::write(&path, [SECRET, b"\r\n"].concat()).unwrap();
    let read = Secret::from_file(&path).unwrap();
    both_know_each_other(dialer(Some(&read)), acceptor(Some(&secret())));
    std::fs::write(&path, "\n").unwrap();
    assert!(matches!(Secret::from_file(&path), Err(SecretError::Length { given: 0 })));
    std::fs::write(&path, vec![b'x'; MAX_SECRET + 1]).unwrap();
    assert!(matches!(Secret::from_file(&path), Err(SecretError::Length { .. })));
    std::fs::remove_file(&path).unwrap();
    let Err(error) = Secret::from_file(&path) else { panic!("there is no file") };
    assert!(error.to_string().contains(path.to_str().unwrap()), "{error}");
}

#[test]
fn causes_keep_their_place() {
    for (place, cause) in RefusalCause::ALL.into_iter().enumerate() {
        assert_eq!((cause.index(), RefusalCause::from_wire(cause.to_wire())), (place, cause));
    }
    assert_eq!(RefusalCause::from_wire(200), RefusalCause::Other);
}

proptest! {
    #[test]
    fn hazard_22_random_words_never_panic_and_never_get_in(
        words in prop::collection::vec((1u8..4, prop::collection::vec(any::<u8>(), 0..60)), 1..5),
    ) {
        let secret = secret();
        for mut end in [acceptor(Some(&secret)), dialer(Some(&secret))] {
            for (kind, body) in &words {
                let head = [b"\x8fMSTR\n\x01".as_slice(), &[*kind, body.len() as u8, 0], body].concat();
                let (_, outcome) = drive(&mut end, &mut BytesMut::from(&head[..]));
                prop_assert!(!matches!(outcome, Ok(Some(_))));
            }
        }
    }
}
