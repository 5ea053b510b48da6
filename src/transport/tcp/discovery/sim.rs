//! Many books on a network in virtual time, from one seed.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::time::Duration;

use bytes::Bytes;

use super::random::Random;
use super::*;
use crate::types::{Incarnation, NodeId, Peer};

/// How long a link with a silent end lives.
pub(super) const LINK_TIMEOUT: Duration = Duration::from_secs(3);
/// How long a dial into nothing takes.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);

pub(super) fn secs(n: u64) -> Duration {
    Duration::from_secs(n)
}

pub(super) fn name(i: usize) -> NodeId {
    NodeId::new(format!("n{i:03}")).unwrap()
}

/// `10.0.x.y:7000`
pub(super) fn place(n: usize) -> SocketAddr {
    SocketAddr::new([10, 0, u8::try_from(n / 250).unwrap(), u8::try_from(n % 250 + 1).unwrap()].into(), 7000)
}

#[derive(Debug)]
enum Happening {
    Wake,
    Dialled(SocketAddr),
    TimedOut(SocketAddr),
    Resolved(String),
    /// Of the link of this number, with this node.
    Unlinked(u64, usize),
    Message(u64, usize, Bytes),
}

/// When, and a number that makes it unique.
type Ticket = (Time, u64);
/// To which machine, in which of its lives.
type Due = (usize, u64, Happening);

pub(super) struct Machine {
    pub(super) book: Option<Book>,
    pub(super) at: SocketAddr,
    life: u64,
    config: Config,
    wake: Option<Time>,
    pub(super) settled: Option<Time>,
    pub(super) dialled: BTreeMap<SocketAddr, u64>,
    pub(super) sent: u64,
    pub(super) sent_bytes: u64,
}

/// Says the seed if a test fails.
pub(super) struct World {
    seed: u64,
    pub(super) now: Time,
    random: Random,
    pub(super) machines: Vec<Machine>,
    queue: BTreeMap<Ticket, Due>,
    ticket: u64,
    links: BTreeMap<(usize, usize), u64>,
    /// From the first to the second nothing arrives.
    cuts: BTreeSet<(usize, usize)>,
    pub(super) dns: BTreeMap<String, Vec<SocketAddr>>,
    pub(super) loss_of_links: bool,
}

impl Drop for World {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("seed {} at {:?}", self.seed, self.now);
            for (i, machine) in self.machines.iter().enumerate() {
                eprintln!("{i}: settled {:?}, sent {}, {:?}", machine.settled, machine.sent, self.linked(i));
            }
        }
    }
}

fn pair(a: usize, b: usize) -> (usize, usize) {
    (a.min(b), a.max(b))
}

impl World {
    /// `count` machines that are off; each has its name and place by its number, and what `adjust` says.
    pub(super) fn new(seed: u64, count: usize, adjust: impl Fn(usize, &mut Config)) -> Self {
        let machine = |i: usize| {
            let mut config = Config::new(Peer::new(name(i), Incarnation::MIN), place(i));
            adjust(i, &mut config);
            let at = config.advertise;
            Machine {
                book: None,
                at,
                life: 0,
                config,
                wake: None,
                settled: None,
                dialled: BTreeMap::new(),
                sent: 0,
                sent_bytes: 0,
            }
        };
        Self {
            seed,
            now: Time::ZERO,
            random: Random::new(seed),
            machines: (0..count).map(machine).collect(),
            queue: BTreeMap::new(),
            ticket: 0,
            links: BTreeMap::new(),
            cuts: BTreeSet::new(),
            dns: BTreeMap::new(),
            loss_of_links: true,
        }
    }

    pub(super) fn start(&mut self, i: usize) {
        let seed = self.random.next();
        let machine = &mut self.machines[i];
        machine.life += 1;
        machine.settled = None;
        machine.wake = None;
        let mut config = machine.config.clone();
        config.me.incarnation = Incarnation::new(machine.life).unwrap();
        machine.book = Some(Book::new(config, seed));
        self.input(i, |book, now| book.handle_timeout(now));
    }

    pub(super) fn start_all(&mut self) {
        (0..self.machines.len()).for_each(|i| self.start(i));
    }

    /// It is gone; the others notice at once, or when its silence is too long.
    pub(super) fn kill(&mut self, i: usize, silently: bool) {
        self.machines[i].book = None;
        self.machines[i].life += 1;
        let peers: Vec<usize> = (0..self.machines.len()).filter(|j| self.is_linked(i, *j)).collect();
        for j in peers {
            self.break_link(i, j, if silently { LINK_TIMEOUT } else { Duration::from_millis(1) });
        }
    }

    /// It says goodbye and ends.
    #[cfg(feature = "gossip")]
    pub(super) fn leave(&mut self, i: usize) {
        self.input(i, |book, now| book.handle_leaving(now));
        self.run(Duration::from_millis(10));
        self.kill(i, false);
    }

    /// Gives it another address for its next life.
    pub(super) fn move_to(&mut self, i: usize, to: SocketAddr) {
        self.machines[i].at = to;
        self.machines[i].config.advertise = to;
    }

    pub(super) fn cut(&mut self, from: usize, to: usize) {
        self.cuts.insert((from, to));
        if self.is_linked(from, to) && self.loss_of_links {
            self.break_link(from, to, LINK_TIMEOUT);
        }
    }

    pub(super) fn cut_both(&mut self, a: usize, b: usize) {
        self.cut(a, b);
        self.cut(b, a);
    }

    pub(super) fn heal(&mut self) {
        self.cuts.clear();
    }

    pub(super) fn is_linked(&self, a: usize, b: usize) -> bool {
        self.links.contains_key(&pair(a, b))
    }

    pub(super) fn linked(&self, i: usize) -> Vec<usize> {
        (0..self.machines.len()).filter(|j| self.is_linked(i, *j)).collect()
    }

    /// Whether all of these are linked to each other.
    pub(super) fn is_mesh(&self, of: &[usize]) -> bool {
        of.iter().all(|a| of.iter().all(|b| a == b || self.is_linked(*a, *b)))
    }

    pub(super) fn book(&self, i: usize) -> &Book {
        self.machines[i].book.as_ref().expect("it runs")
    }

    pub(super) fn state(&self, i: usize, of: usize) -> Option<MemberState> {
        self.book(i).members().into_iter().find(|m| m.node == name(of)).map(|m| m.state)
    }

    pub(super) fn run(&mut self, how_long: Duration) {
        let until = self.now + how_long;
        while let Some(((at, _), (i, life, what))) = self.pop(until) {
            self.now = at;
            if self.machines[i].life == life {
                self.happen(i, what);
            }
        }
        self.now = until;
    }

    /// Runs until the condition holds; fails after `limit`. How long it took.
    pub(super) fn until(&mut self, limit: Duration, what: &str, holds: impl Fn(&World) -> bool) -> Duration {
        let from = self.now;
        while !holds(self) {
            assert!(self.now - from < limit, "not within {limit:?}: {what}");
            self.run(Duration::from_millis(10));
        }
        self.now - from
    }

    fn pop(&mut self, until: Time) -> Option<(Ticket, Due)> {
        let first = self.queue.first_key_value().map(|(key, _)| *key)?;
        if first.0 > until { None } else { self.queue.pop_first() }
    }

    fn push(&mut self, after: Duration, i: usize, what: Happening) {
        self.ticket += 1;
        let life = self.machines[i].life;
        self.queue.insert((self.now + after, self.ticket), (i, life, what));
    }

    fn latency(&mut self) -> Duration {
        Duration::from_micros(200) + self.random.up_to(Duration::from_millis(5))
    }

    fn break_link(&mut self, a: usize, b: usize, after: Duration) {
        let number = self.links[&pair(a, b)];
        for (i, other) in [(a, b), (b, a)] {
            self.push(after, i, Happening::Unlinked(number, other));
        }
        if self.machines[a].book.is_none() || self.machines[b].book.is_none() {
            self.links.remove(&pair(a, b));
        }
    }

    fn happen(&mut self, i: usize, what: Happening) {
        match what {
            Happening::Wake => {
                if self.machines[i].wake == Some(self.now) {
                    self.machines[i].wake = None;
                    self.input(i, |book, now| book.handle_timeout(now));
                }
            }
            Happening::TimedOut(at) => {
                self.input(i, |book, now| book.handle_dialled(at, Outcome::Failed, now));
            }
            Happening::Dialled(at) => self.dialled(i, at),
            Happening::Resolved(of) => {
                let answer = self.dns.get(&of).cloned().unwrap_or_default();
                self.input(i, |book, now| book.handle_resolved(&of, &answer, now));
            }
            Happening::Unlinked(number, other) => {
                // the first of both ends takes the link away, the second only hears of it
                match self.links.get(&pair(i, other)) {
                    Some(now) if *now != number => return,
                    Some(_) => {
                        self.links.remove(&pair(i, other));
                    }
                    None => {}
                }
                self.input(i, |book, now| book.handle_unlinked(&name(other), now));
            }
            Happening::Message(number, from, message) => {
                if self.links.get(&pair(i, from)) == Some(&number) && !self.cuts.contains(&(from, i)) {
                    self.input(i, |book, now| book.handle_message(&name(from), &message, now));
                }
            }
        }
    }

    fn dialled(&mut self, i: usize, at: SocketAddr) {
        let there = self.machines.iter().position(|m| m.at == at && m.book.is_some());
        let Some(j) = there else {
            return self.input(i, |book, now| book.handle_dialled(at, Outcome::Failed, now));
        };
        if i != j && (self.cuts.contains(&(i, j)) || self.cuts.contains(&(j, i))) {
            return self.push(CONNECT_TIMEOUT, i, Happening::TimedOut(at));
        }
        self.input(i, |book, now| book.handle_dialled(at, Outcome::Answered(name(j)), now));
        if i == j {
            return;
        }
        self.ticket += 1;
        let number = self.ticket;
        self.links.entry(pair(i, j)).or_insert(number);
        let places = [(i, name(j), self.machines[j].at), (j, name(i), self.machines[i].at)];
        for (end, peer, advertised) in places {
            self.input(end, |book, now| book.handle_linked(&peer, advertised, now));
        }
    }

    pub(super) fn input(&mut self, i: usize, give: impl FnOnce(&mut Book, Time)) {
        let now = self.now;
        let Some(book) = self.machines[i].book.as_mut() else { return };
        give(book, now);
        let actions: Vec<Action> = std::iter::from_fn(|| book.poll_action()).collect();
        let wake = book.poll_timeout();
        for action in actions {
            self.act(i, action);
        }
        // a later timer than before is a stale one, and is left to fire for nothing
        let wake = wake.map(|at| at.max(now));
        if wake != self.machines[i].wake {
            self.machines[i].wake = wake;
            if let Some(at) = wake {
                self.push(at - now, i, Happening::Wake);
            }
        }
    }

    fn act(&mut self, i: usize, action: Action) {
        let latency = self.latency();
        match action {
            Action::Dial(target) => {
                *self.machines[i].dialled.entry(target.address).or_default() += 1;
                self.push(latency, i, Happening::Dialled(target.address));
            }
            Action::Resolve(of) => self.push(latency, i, Happening::Resolved(of)),
            Action::Send(to, message) => {
                self.machines[i].sent += 1;
                self.machines[i].sent_bytes += message.len() as u64;
                let to = self.machines.iter().enumerate().position(|(j, _)| name(j) == to).unwrap();
                if let Some(number) = self.links.get(&pair(i, to)).copied() {
                    self.push(latency, to, Happening::Message(number, i, message));
                }
            }
            Action::Settled => {
                assert_eq!(self.machines[i].settled, None, "settled comes once");
                self.machines[i].settled = Some(self.now);
            }
        }
    }
}
