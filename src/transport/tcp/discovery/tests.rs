#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use super::*;
use crate::types::Incarnation;

fn id(name: &str) -> NodeId {
    NodeId::new(name).unwrap()
}

fn addr(text: &str) -> SocketAddr {
    text.parse().unwrap()
}

/// `10.0.0.n:7000`
fn host(n: u8) -> SocketAddr {
    SocketAddr::new([10, 0, 0, n].into(), 7000)
}

fn ms(n: u64) -> Duration {
    Duration::from_millis(n)
}

fn config(name: &str, at: u8, seeds: &[u8]) -> Config {
    Config {
        seeds: seeds.iter().map(|n| Endpoint::Address(host(*n))).collect(),
        ..Config::new(Peer::new(id(name), Incarnation::MIN), host(at))
    }
}

/// A started book.
fn book(config: Config) -> Book {
    let mut book = Book::new(config, 1);
    book.handle_timeout(Time::ZERO);
    book
}

fn actions(book: &mut Book) -> Vec<Action> {
    std::iter::from_fn(|| book.poll_action()).collect()
}

fn dials(book: &mut Book) -> Vec<SocketAddr> {
    actions(book)
        .into_iter()
        .filter_map(|action| match action {
            Action::Dial(target) => Some(target.address),
            Action::Resolve(_) | Action::Send(..) | Action::Settled => None,
        })
        .collect()
}

fn dial(n: u8, node: Option<&str>) -> Action {
    Action::Dial(Target { address: host(n), node: node.map(id) })
}

/// Runs the timers until `until`; dials fail. Gives the times of the dials.
fn run_failing(book: &mut Book, until: Time) -> Vec<(Time, SocketAddr)> {
    let mut now = book.now;
    let mut seen = Vec::new();
    loop {
        for address in dials(book) {
            seen.push((now, address));
            book.handle_dialled(address, Outcome::Failed, now);
        }
        match book.poll_timeout().filter(|at| *at <= until) {
            Some(at) => {
                now = now.max(at);
                book.handle_timeout(now);
            }
            None => return seen,
        }
    }
}

fn answer(book: &mut Book, n: u8, node: &str, now: Time) {
    book.handle_dialled(host(n), Outcome::Answered(id(node)), now);
    book.handle_linked(&id(node), host(n), now);
}

fn introduce(book: &mut Book, from: &str, linked: &[(&str, u8)], now: Time) {
    let linked = linked.iter().map(|(node, n)| (id(node), host(*n))).collect();
    let notice = Notice { first: true, linked, gone: Vec::new() };
    book.handle_message(&id(from), &notice.encode().unwrap(), now);
}

#[test]
fn without_seeds_it_is_settled_at_once() {
    assert_eq!(actions(&mut book(config("a", 1, &[]))), [Action::Settled]);
}

#[test]
fn the_advertised_address_among_the_seeds_is_never_dialled() {
    let mut book = book(config("a", 1, &[1]));
    assert_eq!(actions(&mut book), [Action::Settled]);
    assert_eq!(run_failing(&mut book, Duration::from_secs(3600)), []);
    assert_eq!(book.poll_timeout(), None);
}

#[test]
fn an_address_that_answers_with_our_name_is_left_alone() {
    let mut book = book(config("a", 1, &[9, 2]));
    assert_eq!(actions(&mut book), [dial(2, None), dial(9, None)]);
    book.handle_dialled(host(9), Outcome::Answered(id("a")), ms(1));
    answer(&mut book, 2, "b", ms(1));
    introduce(&mut book, "b", &[], ms(2));
    assert!(actions(&mut book).contains(&Action::Settled));
    assert_eq!(run_failing(&mut book, Duration::from_secs(3600)), [], "it is ours and somebody is linked");
    // alone, it is tried again, rarely: a load balancer may give somebody else next time
    book.handle_unlinked(&id("b"), Duration::from_secs(3600));
    let mut tries = Vec::new();
    let mut now = Duration::from_secs(3600);
    while let Some(at) = book.poll_timeout().filter(|at| *at < Duration::from_secs(4200)) {
        now = now.max(at);
        book.handle_timeout(now);
        for address in dials(&mut book) {
            let ours = address == host(9);
            let outcome = if ours { Outcome::Answered(id("a")) } else { Outcome::Failed };
            book.handle_dialled(address, outcome, now);
            tries.extend(ours.then_some(now));
        }
    }
    assert!((9..=11).contains(&tries.len()), "{tries:?}");
}

#[test]
fn seeds_are_dialled_for_ever_ever_less_often_and_not_in_step() {
    let mut book = book(config("a", 1, &[2, 3]));
    let seen = run_failing(&mut book, Duration::from_secs(3600));
    for n in [2, 3] {
        let times: Vec<Time> = seen.iter().filter(|(_, a)| *a == host(n)).map(|(at, _)| *at).collect();
        let gaps: Vec<Duration> = times.windows(2).map(|w| w[1] - w[0]).collect();
        for (failures, gap) in gaps.iter().enumerate() {
            let whole = ms(50).saturating_mul(1 << failures.min(20)).min(Duration::from_secs(5));
            assert!(*gap >= whole / 2 && *gap <= whole, "wait {failures} is {gap:?} of {whole:?}");
        }
        assert!((3600 / 5..=3600 * 2 / 5 + 20).contains(&times.len()), "{} dials", times.len());
    }
    let of = |n| seen.iter().filter(|(_, a)| *a == host(n)).map(|(at, _)| *at).collect::<Vec<_>>();
    assert_ne!(of(2)[1..], of(3)[1..]);
}

#[test]
fn settled_comes_once_when_each_has_been_tried() {
    let mut book = book(config("a", 1, &[2, 3]));
    assert_eq!(actions(&mut book), [dial(2, None), dial(3, None)]);
    book.handle_dialled(host(2), Outcome::Failed, ms(1));
    assert!(!actions(&mut book).contains(&Action::Settled));
    book.handle_dialled(host(3), Outcome::Answered(id("c")), ms(2));
    assert!(!actions(&mut book).contains(&Action::Settled), "the link has yet to come");
    book.handle_linked(&id("c"), host(3), ms(3));
    assert!(!actions(&mut book).contains(&Action::Settled), "it has yet to say whom it knows");
    introduce(&mut book, "c", &[("d", 4)], ms(4));
    assert!(!actions(&mut book).contains(&Action::Settled), "and those have to be tried");
    book.handle_timeout(ms(54));
    assert!(dials(&mut book).contains(&host(4)));
    book.handle_dialled(host(4), Outcome::Failed, ms(55));
    assert!(actions(&mut book).contains(&Action::Settled));
    run_failing(&mut book, Duration::from_secs(60));
    assert!(!actions(&mut book).contains(&Action::Settled));
}

#[test]
fn a_seed_that_never_answers_delays_settled_by_a_bounded_time() {
    let mut book = book(config("a", 1, &[2]));
    assert_eq!(actions(&mut book), [dial(2, None)]);
    assert_eq!(book.poll_timeout(), Some(Duration::from_secs(5)));
    book.handle_timeout(Duration::from_secs(5));
    assert_eq!(actions(&mut book), [Action::Settled]);
}

#[test]
fn one_dial_per_node_at_a_time_and_none_while_it_is_linked() {
    let mut book = book(config("a", 1, &[2]));
    actions(&mut book);
    answer(&mut book, 2, "b", ms(1));
    introduce(&mut book, "b", &[("c", 3)], ms(2));
    // another address of the same node, from somebody else
    book.handle_linked(&id("d"), host(4), ms(2));
    introduce(&mut book, "d", &[("c", 5)], ms(2));
    book.handle_timeout(ms(60));
    let first = dials(&mut book);
    assert_eq!(first.len(), 1, "{first:?}");
    book.handle_dialled(first[0], Outcome::Failed, ms(61));
    let second = dials(&mut book);
    assert_eq!(second.len(), 1);
    assert_ne!(first, second, "the other one is next");
    book.handle_dialled(second[0], Outcome::Answered(id("c")), ms(62));
    book.handle_linked(&id("c"), second[0], ms(62));
    assert_eq!(run_failing(&mut book, Duration::from_secs(60)), []);
}

#[test]
fn a_lost_link_is_dialled_at_once_and_a_short_one_is_no_loop() {
    let mut book = book(config("a", 1, &[2]));
    actions(&mut book);
    answer(&mut book, 2, "b", ms(1));
    actions(&mut book);
    let lost = Duration::from_secs(10);
    book.handle_unlinked(&id("b"), lost);
    let at = book.poll_timeout().unwrap();
    assert!(at <= lost + ms(50));
    // from now on it accepts and breaks at once
    let (mut now, mut tries) = (lost, 0);
    while let Some(at) = book.poll_timeout().filter(|at| *at < Duration::from_secs(70)) {
        now = now.max(at);
        book.handle_timeout(now);
        for address in dials(&mut book) {
            tries += 1;
            book.handle_dialled(address, Outcome::Answered(id("b")), now);
            book.handle_linked(&id("b"), address, now);
            book.handle_unlinked(&id("b"), now);
        }
    }
    assert!((12..40).contains(&tries), "{tries} dials in a minute");
}

#[test]
fn a_node_that_answers_and_refuses_is_no_loop() {
    let mut book = book(config("a", 1, &[2]));
    let (mut now, mut tries) = (Time::ZERO, 0);
    loop {
        for address in dials(&mut book) {
            tries += 1;
            book.handle_dialled(address, Outcome::Answered(id("b")), now);
            book.handle_unlinked(&id("b"), now);
        }
        let Some(at) = book.poll_timeout().filter(|at| *at < Duration::from_secs(60)) else { break };
        now = now.max(at);
        book.handle_timeout(now);
    }
    assert!((12..40).contains(&tries), "{tries} dials in a minute");
}

#[test]
fn an_answer_without_a_link_is_forgotten_in_time() {
    let mut book = book(config("a", 1, &[2]));
    actions(&mut book);
    book.handle_dialled(host(2), Outcome::Answered(id("b")), ms(1));
    let seen = run_failing(&mut book, Duration::from_secs(30));
    assert_eq!(seen[0].1, host(2));
    assert!(seen[0].0 >= LINK_WITHIN, "{seen:?}");
}

#[test]
fn endpoints_are_read_and_refused() {
    assert_eq!(Endpoint::parse("10.0.0.1:7"), Ok(Endpoint::Address(addr("10.0.0.1:7"))));
    assert_eq!(Endpoint::parse("[::1]:7"), Ok(Endpoint::Address(addr("[::1]:7"))));
    assert_eq!(Endpoint::parse("[::ffff:10.0.0.1]:7"), Ok(Endpoint::Address(addr("10.0.0.1:7"))));
    assert_eq!(Endpoint::parse("chat.internal:7"), Ok(Endpoint::Name("chat.internal:7".into())));
    for bad in
        ["", "a", ":7", "a:", "a:0", "a:70000", "10.0.0.1:0", "0.0.0.0:7", "a b:7", "http://a:7", "::1"]
    {
        assert!(Endpoint::parse(bad).is_err(), "{bad:?}");
    }
    assert!(Endpoint::parse(&format!("{}:7", "a".repeat(300))).is_err());
}

#[test]
fn options_that_make_no_sense_are_named() {
    let check = |change: fn(&mut DiscoveryOptions)| {
        let mut options = DiscoveryOptions::default();
        change(&mut options);
        options.check()
    };
    assert_eq!(check(|_| {}), Ok(()));
    assert!(check(|o| o.redial_base = Duration::ZERO).unwrap_err().contains("redial_base"));
    assert!(check(|o| o.redial_cap = ms(1)).unwrap_err().contains("redial_cap"));
    assert!(check(|o| o.settle_within = Duration::ZERO).unwrap_err().contains("settle_within"));
    assert!(check(|o| o.forget_after = ms(1)).unwrap_err().contains("forget_after"));
    assert!(check(|o| o.max_addresses = 0).unwrap_err().contains("max_addresses"));
}

#[test]
fn what_others_say_moves_nobody_who_is_linked() {
    let mut book = book(config("a", 1, &[2]));
    actions(&mut book);
    answer(&mut book, 2, "b", ms(1));
    book.handle_linked(&id("c"), host(3), ms(1));
    introduce(&mut book, "b", &[("c", 9)], ms(2));
    let address = |book: &Book| book.members().into_iter().find(|m| m.node == id("c")).unwrap().address;
    assert_eq!(address(&book), Some(host(3)));
    // nor is that told on, and nobody dials it
    book.handle_linked(&id("d"), host(4), ms(3));
    let told = actions(&mut book).into_iter().filter_map(|action| match action {
        Action::Send(to, message) if to == id("d") => Some(message),
        Action::Send(..) | Action::Settled => None,
        Action::Dial(_) | Action::Resolve(_) => panic!("{action:?}"),
    });
    let linked = vec![(id("b"), host(2)), (id("c"), host(3))];
    let notice = Notice { first: true, linked, gone: vec![] };
    assert_eq!(told.collect::<Vec<_>>(), [notice.encode().unwrap()]);
    // once it is gone, what others say is tried as well
    book.handle_unlinked(&id("c"), Duration::from_secs(20));
    let tried: BTreeSet<SocketAddr> =
        run_failing(&mut book, Duration::from_secs(30)).into_iter().map(|(_, a)| a).collect();
    assert_eq!(tried, BTreeSet::from([host(3), host(9)]));
}

#[test]
fn two_who_tell_one_address_and_one_who_stops_leave_one() {
    let mut book = book(config("a", 1, &[]));
    for (node, n) in [("b", 2), ("c", 3)] {
        book.handle_linked(&id(node), host(n), ms(1));
        introduce(&mut book, node, &[("d", 4)], ms(1));
        introduce(&mut book, node, &[("d", 4)], ms(2));
    }
    assert_eq!(book.entries[&host(4)].tellers, 2);
    introduce(&mut book, "b", &[("d", 5)], ms(3));
    assert_eq!((book.entries[&host(4)].tellers, book.entries[&host(5)].tellers), (1, 1));
    let notice = Notice { first: false, linked: vec![], gone: vec![id("d")] };
    book.handle_message(&id("b"), &notice.encode().unwrap(), ms(4));
    assert_eq!((book.entries[&host(4)].tellers, book.entries[&host(5)].tellers), (1, 0));
    book.handle_unlinked(&id("c"), ms(5));
    assert_eq!(book.entries[&host(4)].tellers, 0);
    run_failing(&mut book, Duration::from_secs(700));
    assert_eq!(book.entries.keys().copied().collect::<Vec<_>>(), [host(2)], "only the linked one stays");
}

#[test]
fn addresses_that_nobody_can_dial_and_our_own_are_not_taken() {
    let mut book = book(config("a", 1, &[]));
    book.handle_linked(&id("b"), addr("0.0.0.0:7000"), ms(1));
    assert_eq!(book.members()[0].address, None);
    let linked =
        ["0.0.0.0:1", "10.0.0.9:0", "224.0.0.1:7", "[::]:7", "10.0.0.1:7000", "[::ffff:10.0.0.1]:7000"];
    let mut linked: Vec<_> =
        linked.iter().enumerate().map(|(i, text)| (id(&format!("x{i}")), addr(text))).collect();
    linked.push((id("a"), host(8)));
    let notice = Notice { first: true, linked, gone: vec![] };
    book.handle_message(&id("b"), &notice.encode().unwrap(), ms(2));
    assert!(book.entries.is_empty(), "{:?}", book.entries);
}

#[test]
fn the_book_is_bounded_and_says_so() {
    let mut config = config("a", 1, &[2]);
    config.options.max_addresses = 10;
    let mut book = book(config);
    answer(&mut book, 2, "b", ms(1));
    for round in 0..10u8 {
        let linked = (0..MAX_NOTICE_ENTRIES)
            .map(|i| (id(&format!("x{round}-{i}")), SocketAddr::new([10, 1, round, i as u8].into(), 7)));
        let notice = Notice { first: false, linked: linked.collect(), gone: vec![] };
        book.handle_message(&id("b"), &notice.encode().unwrap(), ms(2));
    }
    assert_eq!(book.entries.len(), 10);
    assert_eq!(book.stats().overflow, 2000 - 9);
    assert_eq!(book.nodes[&id("b")].told.len(), 9, "what has no entry is not remembered either");
    book.handle_linked(&id("late"), host(7), ms(3));
    assert!(book.entries.contains_key(&host(7)), "who is linked always has a place");
}

#[test]
fn dials_at_once_are_bounded() {
    let mut config = config("a", 1, &[]);
    config.seeds = (0..200).map(|i| Endpoint::Address(SocketAddr::new([10, 2, 0, i].into(), 7))).collect();
    let mut book = book(config);
    let first = dials(&mut book);
    assert_eq!(first.len(), MAX_DIALS);
    book.handle_dialled(first[0], Outcome::Failed, ms(1));
    let next = dials(&mut book);
    assert_eq!(next.len(), 1);
    assert!(!first.contains(&next[0]), "those that have waited longer come first");
}

#[test]
fn hazard_22_messages_that_make_no_sense_are_counted_and_ignored() {
    let mut book = book(config("a", 1, &[]));
    book.handle_linked(&id("b"), host(2), ms(1));
    let good =
        Notice { first: true, linked: vec![(id("c"), host(3))], gone: vec![id("d")] }.encode().unwrap();
    for end in 0..good.len() {
        book.handle_message(&id("b"), &good[..end], ms(1));
    }
    assert_eq!(book.stats().malformed, good.len() as u64);
    book.handle_message(&id("b"), &[&good[..], &[0]].concat(), ms(1));
    book.handle_message(&id("b"), &vec![1; exchange::MAX_MESSAGE_LEN + 1], ms(1));
    // a length beyond the message
    book.handle_message(&id("b"), &[1, 0, 1, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x7f], ms(1));
    let many = (0..=MAX_NOTICE_ENTRIES).map(|i| id(&i.to_string())).collect();
    let many = Notice { first: true, linked: vec![], gone: many }.encode().unwrap();
    book.handle_message(&id("b"), &many, ms(1));
    assert_eq!(book.stats().malformed, good.len() as u64 + 4);
    book.handle_message(&id("b"), &[2, 0, 0, 0, 0], ms(1));
    book.handle_message(&id("b"), &[1, 200, 0], ms(1));
    assert_eq!(book.stats().unknown, 2);
    book.handle_message(&id("stranger"), &good, ms(1));
    assert_eq!(book.members().len(), 1, "nothing was learned");
    book.handle_message(&id("b"), &good, ms(1));
    assert_eq!(book.members().len(), 2);
}

#[test]
fn golden_bytes_of_a_notice() {
    let notice = Notice { first: true, linked: vec![(id("c"), host(3))], gone: vec![id("d")] };
    let bytes: String = notice.encode().unwrap().iter().map(|b| format!("{b:02x}")).collect();
    assert_eq!(bytes, "01000101016300".to_owned() + "0a000003d836" + "010164");
    // the longest one fits
    let long = |i: usize| id(&format!("{i:0>255}"));
    let v6 = addr("[2001:db8:ffff:ffff:ffff:ffff:ffff:ffff]:65535");
    let notice = Notice {
        first: true,
        linked: (0..MAX_NOTICE_ENTRIES).map(|i| (long(i), v6)).collect(),
        gone: vec![],
    };
    assert!(notice.encode().unwrap().len() <= exchange::MAX_MESSAGE_LEN);
}

proptest::proptest! {
    #[test]
    fn hazard_22_random_messages_never_panic(mut bytes in proptest::collection::vec(proptest::prelude::any::<u8>(), 0..300), own: bool) {
        if own {
            for (at, byte) in [1, 0].into_iter().enumerate() {
                if let Some(place) = bytes.get_mut(at) { *place = byte; }
            }
        }
        let mut book = book(config("a", 1, &[]));
        book.handle_linked(&id("b"), host(2), ms(1));
        book.handle_message(&id("b"), &bytes, ms(1));
    }
}
