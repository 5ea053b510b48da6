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
        me: Peer::new(id(name), Incarnation::MIN),
        advertise: host(at),
        seeds: seeds.iter().map(|n| Endpoint::Address(host(*n))).collect(),
        dns: Vec::new(),
        options: DiscoveryOptions::default(),
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
