//! Whom to dial: the address book of the mesh. Sans-IO: what was resolved, dialled, linked and told comes in with
//! the time, dials and messages go out.
//!
//! # Where addresses come from
//! * **Seeds**, as the user gave them. They are never forgotten. A name among them is resolved again for as long as
//!   no node behind it is linked.
//! * **DNS**, a name that stands for all nodes, resolved again every interval. An answer adds addresses; a missing
//!   one is no news of a death, so it is only forgotten some time after its node is gone.
//! * **Peers**: each node tells those that it is linked to who else it is linked to, and where. What a node says of
//!   itself goes before what others say of it; so a node that has moved is found by what others say, and one that is
//!   linked cannot be moved by others.
//!
//! # One address
//! ```text
//!             due, and its node is not linked, not being dialled        it answered, and a link came of it
//!   waiting ───────────────────────────────────────────▶ dialling ──────────────────────────────▶ held
//!      ▲ ▲                                                │   │ it was ourselves                  │
//!      │ └──── failed: wait longer, up to redial_cap ─────┘   └──────────▶ own                    │
//!      └──────────────── the link is gone: at once if it was an old one, else wait longer ────────┘
//! ```
//! An *own* address is left alone; only while no peer is linked it is tried once a minute, because it may be a load
//! balancer that gives us ourselves by chance. The address that we advertise is never dialled.
//!
//! # Driving it
//! Give inputs (`handle_*`), carry out all of [`Book::poll_action`], sleep until [`Book::poll_timeout`]. Each
//! [`Action::Dial`] and each [`Action::Resolve`] must be answered once, in bounded time.

mod exchange;
#[cfg(feature = "gossip")]
mod gossip;
#[cfg(not(feature = "gossip"))]
#[path = "no_gossip.rs"]
mod gossip;
mod members;
mod options;
mod random;

#[cfg(test)]
mod cluster_tests;
#[cfg(all(test, feature = "gossip"))]
mod gossip_tests;
#[cfg(test)]
mod sim;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::SocketAddr;
use std::time::Duration;

use bytes::Bytes;

use crate::types::{NodeId, Peer};
use exchange::{Heard, Ignored, MAX_NOTICE_ENTRIES, Notice};
use gossip::Gossip;
#[cfg(feature = "gossip")]
pub use gossip::GossipOptions;
#[cfg(not(feature = "gossip"))]
pub(crate) use gossip::GossipOptions;
pub use members::{MemberInfo, MemberState};
pub use options::DiscoveryOptions;
pub(crate) use options::Endpoint;
use options::{canonical, unusable};
use random::Random;

/// Time since some fixed moment, of a clock that never goes back.
pub(crate) type Time = Duration;

/// DNS is asked no more often.
const MIN_DNS_INTERVAL: Duration = Duration::from_millis(100);
/// How many dials may be underway at once.
const MAX_DIALS: usize = 64;
/// How many addresses one DNS answer may bring, and how many nodes one peer may tell.
const MAX_TOLD: usize = 4096;
/// Changes of whom we are linked to are collected for so long before peers are told.
const NOTICE_DELAY: Duration = Duration::from_millis(100);
/// How often an address that turned out to be our own is tried again while no peer is linked.
const OWN_RECHECK: Duration = Duration::from_secs(60);
/// A node that answered a dial must be linked within this time, or the dial counts as failed.
const LINK_WITHIN: Duration = Duration::from_secs(10);

/// What a book starts with.
#[derive(Clone, Debug)]
pub(crate) struct Config {
    /// This node.
    pub(crate) me: Peer,
    /// Where others reach it.
    pub(crate) advertise: SocketAddr,
    /// Addresses to begin with.
    pub(crate) seeds: Vec<Endpoint>,
    /// Names that stand for all nodes, and how often to ask again.
    pub(crate) dns: Vec<(Endpoint, Duration)>,
    /// Times and bounds.
    pub(crate) options: DiscoveryOptions,
    /// Whether to gossip.
    pub(crate) gossip: Option<GossipOptions>,
}

#[cfg(test)]
impl Config {
    /// Without any address to begin with.
    pub(crate) fn new(me: Peer, advertise: SocketAddr) -> Self {
        let options = DiscoveryOptions::default();
        Self { me, advertise, seeds: Vec::new(), dns: Vec::new(), options, gossip: None }
    }
}

/// Where to dial.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Target {
    /// The address.
    pub(crate) address: SocketAddr,
    /// Who is expected there; it may be somebody else.
    pub(crate) node: Option<NodeId>,
}

/// What the driver has to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Action {
    /// Connect, and answer with [`Book::handle_dialled`].
    Dial(Target),
    /// Look up the addresses of this `host:port`, and answer with [`Book::handle_resolved`].
    Resolve(String),
    /// Send a mesh message to a linked node. It may be dropped if the link is just gone.
    Send(NodeId, Bytes),
    /// Every known address has been tried once. Comes once.
    Settled,
}

/// What came of a dial.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// This node has proved its name there. [`Book::handle_linked`] is to follow, or [`Book::handle_unlinked`] if no
    /// link comes of it (refused, broken). Our own name means that we have dialled ourselves.
    Answered(NodeId),
    /// No connection, no authentication, a refusal.
    Failed,
}

/// How often something out of the ordinary happened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct DiscoveryStats {
    /// Dials begun.
    pub dials: u64,
    /// Dials that no node answered with its name.
    pub failed_dials: u64,
    /// Look-ups that brought no address.
    pub failed_lookups: u64,
    /// Addresses ignored because the book was full.
    pub overflow: u64,
    /// Addresses forgotten because nobody vouched for them any more.
    pub forgotten: u64,
    /// Messages of peers that made no sense; ignored.
    pub malformed: u64,
    /// Messages of peers of a version or kind that is not known here; ignored.
    pub unknown: u64,
}

/// A name that is resolved.
#[derive(Debug)]
struct Source {
    name: String,
    /// `None`: a seed.
    every: Option<Duration>,
    /// `None`: being resolved.
    due: Option<Time>,
    failures: u32,
    /// Whether it has been resolved, or failed to, once.
    tried: bool,
    addresses: BTreeSet<SocketAddr>,
}

/// An address.
#[derive(Debug)]
struct Entry {
    /// Given by the user.
    seed: bool,
    /// How many linked peers tell it.
    tellers: u32,
    /// Who answered there or is said to be there.
    node: Option<NodeId>,
    /// Whether its node answered there, and has been linked since or is about to be.
    answered: bool,
    own: bool,
    dialling: bool,
    due: Time,
    failures: u32,
    tried: bool,
    /// Since when nobody vouches for it.
    orphan: Option<Time>,
}

/// A node that is linked, or has answered a dial and is about to be.
#[derive(Debug)]
struct Node {
    /// Since when it is linked.
    linked: Option<Time>,
    /// Until when the link is awaited.
    awaited: Time,
    /// What it advertises, if that can be dialled.
    home: Option<SocketAddr>,
    /// Whether it has told us its peers.
    introduced: bool,
    /// Whom it tells.
    told: BTreeMap<NodeId, SocketAddr>,
}

/// All addresses that one node knows. See the module.
#[derive(Debug)]
pub(crate) struct Book {
    me: Peer,
    advertise: SocketAddr,
    options: DiscoveryOptions,
    random: Random,
    now: Time,
    started: Option<Time>,
    settled: bool,
    sources: Vec<Source>,
    entries: BTreeMap<SocketAddr, Entry>,
    nodes: BTreeMap<NodeId, Node>,
    /// Who has been linked (with an address to tell) or unlinked since the last notice.
    changes: BTreeMap<NodeId, Option<SocketAddr>>,
    notice_due: Option<Time>,
    gossip: Option<Gossip>,
    /// Who lives, by the word of gossip.
    alive: BTreeMap<NodeId, SocketAddr>,
    members_changed: bool,
    actions: VecDeque<Action>,
    wake: Option<Time>,
    stats: DiscoveryStats,
}

// Getters.
impl Book {
    /// A book with the addresses of `config`; `seed` is for jitter. The first [`Book::handle_timeout`] starts it.
    pub(crate) fn new(config: Config, seed: u64) -> Self {
        let Config { me, advertise, seeds, dns, options, gossip } = config;
        let advertise = canonical(advertise);
        let mut random = Random::new(seed);
        let gossip = gossip.map(|with| {
            Gossip::new(&with, &me, advertise, options.forget_after, options.max_addresses, random.next())
        });
        let mut book = Self {
            me,
            advertise,
            options,
            random,
            now: Time::ZERO,
            started: None,
            settled: false,
            sources: Vec::new(),
            entries: BTreeMap::new(),
            nodes: BTreeMap::new(),
            changes: BTreeMap::new(),
            notice_due: None,
            gossip,
            alive: BTreeMap::new(),
            members_changed: false,
            actions: VecDeque::new(),
            wake: Some(Time::ZERO),
            stats: DiscoveryStats::default(),
        };
        let seeds = seeds.into_iter().map(|seed| (seed, None));
        let dns = dns.into_iter().map(|(name, every)| (name, Some(every)));
        seeds.chain(dns).for_each(|(endpoint, every)| book.add_source(endpoint, every));
        book
    }

    /// What happened so far.
    pub(crate) fn stats(&self) -> DiscoveryStats {
        self.stats
    }

    /// Everybody who is known by name, ordered by it.
    pub(crate) fn members(&self) -> Vec<MemberInfo> {
        let mut members: BTreeMap<&NodeId, MemberInfo> = BTreeMap::new();
        for (address, entry) in &self.entries {
            let Some(node) = &entry.node else { continue };
            let told = entry.tellers > 0;
            let state = if told { MemberState::Unreachable } else { MemberState::Down };
            let info = MemberInfo { node: node.clone(), address: Some(*address), state };
            let known = members.entry(node).or_insert_with(|| info.clone());
            // what others vouch for now goes before what is only remembered
            if told && known.state == MemberState::Down {
                *known = info;
            }
        }
        if let Some(gossip) = &self.gossip {
            for (node, address, state) in gossip.standings() {
                members.insert(node, MemberInfo { node: node.clone(), address: Some(address), state });
            }
        }
        for (node, known) in self.nodes.iter().filter(|(_, known)| known.linked.is_some()) {
            let info = MemberInfo { node: node.clone(), address: known.home, state: MemberState::Linked };
            members.insert(node, info);
        }
        members.into_values().collect()
    }

    fn is_linked(&self, node: &NodeId) -> bool {
        self.nodes.get(node).is_some_and(|n| n.linked.is_some())
    }

    /// Linked, or about to be: nothing to dial.
    fn is_held(&self, node: &NodeId) -> bool {
        self.nodes.contains_key(node)
    }

    fn is_alone(&self) -> bool {
        self.nodes.values().all(|n| n.linked.is_none())
    }

    fn add_source(&mut self, endpoint: Endpoint, every: Option<Duration>) {
        match endpoint {
            Endpoint::Address(address) => {
                if address != self.advertise {
                    self.entries.entry(address).or_insert_with(Entry::new).seed = true;
                }
            }
            Endpoint::Name(name) => {
                if !self.sources.iter().any(|s| s.name == name && s.every == every) {
                    self.sources.push(Source::new(name, every));
                }
            }
        }
    }
}

// Inputs.
impl Book {
    /// A look-up is done; no address means that it failed.
    pub(crate) fn handle_resolved(&mut self, name: &str, answer: &[SocketAddr], now: Time) {
        self.tick(now);
        let answer: BTreeSet<SocketAddr> = answer
            .iter()
            .map(|address| canonical(*address))
            .filter(|address| unusable(*address).is_none() && *address != self.advertise)
            .take(MAX_TOLD)
            .collect();
        let failed = answer.is_empty();
        if failed {
            self.stats.failed_lookups += 1;
        }
        for source in self.sources.iter_mut().filter(|s| s.name == name && s.due.is_none()) {
            source.tried = true;
            // an answer without addresses is a look-up that failed: those known before stay
            if !failed {
                source.addresses.clone_from(&answer);
            }
            // a seed's name is asked for while no node behind it is linked, ever less often; see `plan_lookups`
            source.failures =
                if failed || source.every.is_none() { source.failures.saturating_add(1) } else { 0 };
            let delay = self.options.delay(source.failures, &mut self.random);
            let delay = match (source.every, failed) {
                (Some(every), false) => every,
                (Some(every), true) => delay.min(every),
                (None, _) => delay,
            };
            source.due = Some(self.now + delay);
        }
        for address in answer {
            self.add(address, None);
        }
        self.plan();
    }

    /// A dial is done.
    pub(crate) fn handle_dialled(&mut self, address: SocketAddr, outcome: Outcome, now: Time) {
        self.tick(now);
        let address = canonical(address);
        let delay_by = |entry: &mut Entry, options: &DiscoveryOptions, random: &mut Random| {
            entry.failures = entry.failures.saturating_add(1);
            options.delay(entry.failures, random)
        };
        let Some(entry) = self.entries.get_mut(&address).filter(|entry| entry.dialling) else { return };
        entry.dialling = false;
        entry.tried = true;
        entry.own = false;
        match outcome {
            Outcome::Failed => {
                self.stats.failed_dials += 1;
                entry.answered = false;
                entry.due = self.now + delay_by(entry, &self.options, &mut self.random);
            }
            Outcome::Answered(node) if node == self.me.node => {
                entry.own = true;
                entry.node = None;
                entry.due = self.now + OWN_RECHECK;
            }
            Outcome::Answered(node) => {
                entry.node = Some(node.clone());
                entry.answered = true;
                // counts only if no link comes of it: whoever accepts and then refuses is not dialled in a loop
                entry.due = self.now + delay_by(entry, &self.options, &mut self.random);
                self.nodes
                    .entry(node)
                    .or_insert_with(|| Node::awaited_until(now.saturating_add(LINK_WITHIN)));
            }
        }
        self.plan();
    }

    /// A connection to this node is in use; it advertises this address. Said again when that changes.
    pub(crate) fn handle_linked(&mut self, node: &NodeId, advertised: SocketAddr, now: Time) {
        self.tick(now);
        if *node == self.me.node {
            return;
        }
        let home = Some(canonical(advertised)).filter(|a| unusable(*a).is_none() && *a != self.advertise);
        let known = self.nodes.entry(node.clone()).or_insert_with(|| Node::awaited_until(now));
        let newly = known.linked.is_none();
        known.linked.get_or_insert(self.now);
        let moved = known.home != home;
        known.home = home;
        self.forget_former_homes(node, home);
        if let Some(home) = home {
            let entry = self.entries.entry(home).or_insert_with(Entry::new);
            entry.node = Some(node.clone());
            entry.tried = true;
        }
        if newly {
            self.greet(node);
        }
        if newly || moved {
            self.changes.insert(node.clone(), home);
            self.notice_due.get_or_insert(self.now + NOTICE_DELAY);
        }
        if let Some(gossip) = self.gossip.as_mut().filter(|_| newly) {
            gossip.handle_linked(node, advertised, self.now);
        }
        self.plan();
    }

    /// Another connection to a linked node is in use: it is told everything again, because messages are not
    /// repeated like frames.
    pub(crate) fn handle_reconnected(&mut self, node: &NodeId, now: Time) {
        self.tick(now);
        if self.is_linked(node) {
            self.greet(node);
        }
    }

    /// No connection to this node is in use any more.
    pub(crate) fn handle_unlinked(&mut self, node: &NodeId, now: Time) {
        self.tick(now);
        let Some(gone) = self.nodes.remove(node) else { return };
        for address in gone.told.values() {
            self.untell(*address);
        }
        if gone.linked.is_some() {
            self.changes.insert(node.clone(), None);
            self.notice_due.get_or_insert(self.now + NOTICE_DELAY);
        }
        let lasted =
            gone.linked.is_some_and(|since| self.now.saturating_sub(since) >= self.options.redial_cap);
        for entry in self.entries.values_mut().filter(|e| e.node.as_ref() == Some(node)) {
            entry.answered = false;
            if lasted {
                entry.failures = 0;
                entry.due = self.now + self.random.up_to(self.options.redial_base);
            } else {
                // a link that is lost soon after it came must not be tried in a loop
                entry.failures = entry.failures.max(1);
                entry.due = entry.due.max(self.now + self.options.delay(entry.failures, &mut self.random));
            }
        }
        if lasted && self.is_alone() {
            for entry in self.entries.values_mut().filter(|e| e.seed && !e.own) {
                entry.failures = 0;
                entry.due = self.now + self.random.up_to(self.options.redial_base);
            }
        }
        // names of seeds may stand for other addresses by now
        for source in self.sources.iter_mut().filter(|s| s.every.is_none()) {
            source.failures = 0;
            let soon = self.now + self.random.up_to(self.options.redial_base);
            source.due = source.due.map(|due| due.min(soon));
        }
        self.plan();
    }

    /// A mesh message of a node that has proved its name, and is linked or was until just now.
    pub(crate) fn handle_message(&mut self, from: &NodeId, message: &[u8], now: Time) {
        self.tick(now);
        match exchange::decode(message) {
            // what it told counts for as long as it is linked
            Ok(Heard::Notice(notice)) if self.is_linked(from) => self.on_notice(from, notice),
            Ok(Heard::Notice(_)) => {}
            // the last words of a link come after its end: that one leaves, for example
            Ok(Heard::Gossip(data)) => {
                let heard = match &mut self.gossip {
                    Some(gossip) => gossip.handle_message(from, data, self.now),
                    None => Err(Ignored::Unknown),
                };
                heard.err().into_iter().for_each(|ignored| self.ignored(ignored));
            }
            Err(ignored) => self.ignored(ignored),
        }
        self.plan();
    }

    fn ignored(&mut self, ignored: Ignored) {
        match ignored {
            Ignored::Unknown => self.stats.unknown += 1,
            Ignored::Malformed => self.stats.malformed += 1,
            Ignored::Overflow => self.stats.overflow += 1,
        }
    }

    /// This node goes on under another incarnation.
    pub(crate) fn handle_reborn(&mut self, me: Peer, now: Time) {
        self.tick(now);
        self.me = me;
        if let Some(gossip) = &mut self.gossip {
            gossip.handle_identity(&self.me, self.advertise, self.now);
        }
        self.plan();
    }

    /// This node is about to end. What [`Book::poll_action`] wants sent now tells the others; nothing else is of use.
    pub(crate) fn handle_leaving(&mut self, now: Time) {
        self.tick(now);
        if let Some(gossip) = &mut self.gossip {
            gossip.handle_leaving(self.now);
            self.take_gossip();
        }
    }

    /// Time has passed.
    pub(crate) fn handle_timeout(&mut self, now: Time) {
        self.tick(now);
        if self.started.is_none() {
            self.started = Some(self.now);
            self.entries.values_mut().for_each(|entry| entry.due = now);
            self.sources.iter_mut().for_each(|source| source.due = Some(now));
        } else if self.wake.is_none_or(|wake| wake > self.now) {
            return;
        }
        self.plan();
    }

    fn tick(&mut self, now: Time) {
        self.now = self.now.max(now);
    }
}

// Outputs.
impl Book {
    /// The next thing to do.
    pub(crate) fn poll_action(&mut self) -> Option<Action> {
        self.actions.pop_front()
    }

    /// Whether [`Book::members`] may have changed since this was asked last.
    pub(crate) fn poll_members_changed(&mut self) -> bool {
        std::mem::take(&mut self.members_changed)
    }

    /// When to call [`Book::handle_timeout`] next.
    pub(crate) fn poll_timeout(&self) -> Option<Time> {
        self.wake
    }
}

// What peers tell.
impl Book {
    /// Tells a node that was just linked everything.
    fn greet(&mut self, node: &NodeId) {
        let all: Vec<(NodeId, SocketAddr)> = self
            .nodes
            .iter()
            .filter(|(other, known)| *other != node && known.linked.is_some())
            .filter_map(|(other, known)| Some((other.clone(), known.home?)))
            .collect();
        let mut chunks = all.chunks(MAX_NOTICE_ENTRIES);
        let notice =
            Notice { first: true, linked: chunks.next().unwrap_or_default().to_vec(), gone: Vec::new() };
        self.say(node, &notice);
        for chunk in chunks {
            self.say(node, &Notice { first: false, linked: chunk.to_vec(), gone: Vec::new() });
        }
    }

    /// Tells everybody what has changed. Whoever was linked meanwhile hears it twice, which changes nothing.
    fn tell_changes(&mut self) {
        self.notice_due = None;
        let changes: Vec<(NodeId, Option<SocketAddr>)> =
            std::mem::take(&mut self.changes).into_iter().collect();
        let linked: Vec<NodeId> =
            self.nodes.iter().filter(|(_, n)| n.linked.is_some()).map(|(node, _)| node.clone()).collect();
        for chunk in changes.chunks(MAX_NOTICE_ENTRIES) {
            for to in &linked {
                let others = chunk.iter().filter(|(node, _)| node != to);
                let (mut up, mut gone) = (Vec::new(), Vec::new());
                for (node, home) in others {
                    match home {
                        Some(home) => up.push((node.clone(), *home)),
                        None => gone.push(node.clone()),
                    }
                }
                if !up.is_empty() || !gone.is_empty() {
                    self.say(to, &Notice { first: false, linked: up, gone });
                }
            }
        }
    }

    fn say(&mut self, to: &NodeId, notice: &Notice) {
        if let Some(message) = notice.encode() {
            self.actions.push_back(Action::Send(to.clone(), message));
        }
    }

    fn on_notice(&mut self, from: &NodeId, notice: Notice) {
        let Some(teller) = self.nodes.get_mut(from) else { return };
        let mut withdrawn: Vec<SocketAddr> = Vec::new();
        if notice.first {
            teller.introduced = true;
            withdrawn.extend(std::mem::take(&mut teller.told).into_values());
        }
        withdrawn.extend(notice.gone.iter().filter_map(|node| teller.told.remove(node)));
        let mut told = Vec::new();
        for (node, address) in notice.linked {
            let address = canonical(address);
            if node == self.me.node || address == self.advertise || unusable(address).is_some() {
                continue;
            }
            if teller.told.len() >= MAX_TOLD && !teller.told.contains_key(&node) {
                self.stats.overflow += 1;
                continue;
            }
            withdrawn.extend(teller.told.insert(node.clone(), address));
            told.push((node, address));
        }
        for (node, address) in told {
            if !self.tell(node.clone(), address) {
                self.nodes.get_mut(from).and_then(|teller| teller.told.remove(&node));
            }
        }
        for address in withdrawn {
            self.untell(address);
        }
    }

    /// A peer says that this node is there; false if there is no room for it.
    fn tell(&mut self, node: NodeId, address: SocketAddr) -> bool {
        // both ends hear of each other at the same time; the one whose dial would win the tie dials first
        let patience = if self.me.node < node { Duration::ZERO } else { self.options.redial_base };
        let soon = self.now + patience + self.random.up_to(self.options.redial_base);
        let known = self.entries.contains_key(&address);
        if !self.add(address, Some(soon)) {
            return false;
        }
        let occupied = self.entries.get(&address).and_then(|entry| entry.node.clone());
        let occupied = occupied.is_some_and(|occupant| self.is_held(&occupant));
        let Some(entry) = self.entries.get_mut(&address) else { return false };
        entry.tellers = entry.tellers.saturating_add(1);
        if !occupied {
            entry.node = Some(node);
        }
        // somebody is linked to it now: that is worth a dial, however long it failed
        if known && !entry.own {
            entry.failures = 0;
            entry.due = entry.due.min(soon);
        }
        true
    }

    fn untell(&mut self, address: SocketAddr) {
        if let Some(entry) = self.entries.get_mut(&address) {
            entry.tellers = entry.tellers.saturating_sub(1);
        }
    }
}

// What gossip says.
impl Book {
    fn plan_gossip(&mut self) -> Option<Time> {
        self.gossip.as_mut()?.handle_timeout(self.now);
        self.take_gossip();
        self.gossip.as_ref()?.poll_timeout()
    }

    fn take_gossip(&mut self) {
        let Some(gossip) = &mut self.gossip else { return };
        let output = gossip.take_output();
        for (to, data) in output.sends {
            // probes of those who are not linked are lost, as they should be
            if self.is_linked(&to) {
                self.actions.push_back(Action::Send(to, exchange::gossip(&data)));
            }
        }
        if output.changed {
            self.follow_gossip();
        }
    }

    /// Whoever lives is worth dialling; whoever is down is only tried now and then.
    fn follow_gossip(&mut self) {
        let Some(gossip) = &self.gossip else { return };
        let standings: Vec<(NodeId, SocketAddr, MemberState)> =
            gossip.standings().map(|(node, address, state)| (node.clone(), address, state)).collect();
        let mut alive = BTreeMap::new();
        for (node, address, state) in standings {
            let address = canonical(address);
            let usable = unusable(address).is_none() && address != self.advertise && node != self.me.node;
            if state == MemberState::Down || !usable {
                continue;
            }
            if self.alive.get(&node) == Some(&address) || self.tell(node.clone(), address) {
                alive.insert(node, address);
            }
        }
        for (node, address) in std::mem::replace(&mut self.alive, alive) {
            if self.alive.get(&node) != Some(&address) {
                self.untell(address);
                self.slow_down(&node);
            }
        }
    }

    fn slow_down(&mut self, node: &NodeId) {
        if self.is_held(node) || self.alive.contains_key(node) {
            return;
        }
        let Self { entries, options, random, now, .. } = self;
        for entry in entries.values_mut().filter(|e| e.node.as_ref() == Some(node) && e.tellers == 0) {
            entry.failures = entry.failures.max(16);
            entry.due = entry.due.max(*now + options.delay(entry.failures, random));
        }
    }
}

// Addresses.
impl Book {
    /// Makes sure that the address has an entry; false if the book is full.
    fn add(&mut self, address: SocketAddr, due: Option<Time>) -> bool {
        if self.entries.contains_key(&address) {
            return true;
        }
        if self.entries.len() >= self.options.max_addresses {
            self.stats.overflow += 1;
            return false;
        }
        self.entries.insert(address, Entry { due: due.unwrap_or(self.now), ..Entry::new() });
        true
    }

    /// A linked node says where it is: what was only said of it, or failed, is worth nothing any more.
    fn forget_former_homes(&mut self, node: &NodeId, home: Option<SocketAddr>) {
        let Self { entries, sources, .. } = self;
        entries.retain(|address, entry| {
            entry.node.as_ref() != Some(node)
                || Some(*address) == home
                || entry.answered
                || entry.dialling
                || entry.seed
                || entry.tellers > 0
                || sources.iter().any(|s| s.addresses.contains(address))
        });
    }

    fn vouched(&self, address: &SocketAddr, entry: &Entry) -> bool {
        // an address of a linked node where it no longer is vouches for nothing
        let node = entry.node.as_ref().and_then(|node| self.nodes.get(node));
        entry.seed
            || entry.tellers > 0
            || node.is_some_and(|node| entry.answered || node.home == Some(*address))
            || self.sources.iter().any(|s| s.addresses.contains(address))
    }

    /// Forgets what nobody has vouched for since `forget_after`; says when to look again.
    fn plan_forgetting(&mut self) -> Option<Time> {
        let mut next = None;
        let vouched: BTreeSet<SocketAddr> =
            self.entries.iter().filter(|(a, e)| self.vouched(a, e)).map(|(address, _)| *address).collect();
        let Self { entries, options, stats, now, .. } = self;
        entries.retain(|address, entry| {
            if vouched.contains(address) {
                entry.orphan = None;
                return true;
            }
            let until = entry.orphan.get_or_insert(*now).saturating_add(options.forget_after);
            if until <= *now && !entry.dialling {
                stats.forgotten += 1;
                return false;
            }
            // while it is being dialled, the end of that dial is the time to look again
            next = earliest(next, Some(until).filter(|until| until > now));
            true
        });
        next
    }
}

// Planning, after every input.
impl Book {
    fn plan(&mut self) {
        let Some(started) = self.started else { return };
        self.members_changed = true;
        let mut wake = self.plan_awaited();
        wake = earliest(wake, self.plan_gossip());
        wake = earliest(wake, self.plan_lookups());
        wake = earliest(wake, self.plan_dials());
        wake = earliest(wake, self.plan_forgetting());
        if self.notice_due.is_some_and(|due| due <= self.now) {
            self.tell_changes();
        }
        wake = earliest(wake, self.notice_due);
        if !self.settled {
            let until = started.saturating_add(self.options.settle_within);
            if until <= self.now || self.all_tried() {
                self.settled = true;
                self.actions.push_back(Action::Settled);
            } else {
                wake = earliest(wake, Some(until));
            }
        }
        self.wake = wake;
    }

    fn all_tried(&self) -> bool {
        let tried = |entry: &Entry| entry.tried || entry.node.as_ref().is_some_and(|node| self.is_held(node));
        self.sources.iter().all(|source| source.tried)
            && self.entries.values().all(tried)
            && self.nodes.values().all(|node| node.linked.is_some() && node.introduced)
    }

    /// A node that answered but is not linked in time has failed.
    fn plan_awaited(&mut self) -> Option<Time> {
        let mut next = None;
        self.nodes.retain(|_, node| {
            let waiting = node.linked.is_none();
            if waiting && node.awaited > self.now {
                next = earliest(next, Some(node.awaited));
            }
            !waiting || node.awaited > self.now
        });
        next
    }

    fn plan_lookups(&mut self) -> Option<Time> {
        let mut next = None;
        let linked = |address: &SocketAddr| {
            let node = self.entries.get(address).and_then(|entry| entry.node.as_ref());
            node.is_some_and(|node| self.is_held(node))
        };
        let asleep: Vec<bool> =
            self.sources.iter().map(|s| s.every.is_none() && s.addresses.iter().any(linked)).collect();
        for (source, asleep) in self.sources.iter_mut().zip(asleep) {
            let Some(due) = source.due else { continue };
            if asleep {
                continue;
            }
            if due <= self.now {
                source.due = None;
                self.actions.push_back(Action::Resolve(source.name.clone()));
            } else {
                next = earliest(next, Some(due));
            }
        }
        next
    }

    fn plan_dials(&mut self) -> Option<Time> {
        let mut room = MAX_DIALS.saturating_sub(self.entries.values().filter(|e| e.dialling).count());
        let mut busy: BTreeSet<NodeId> =
            self.entries.values().filter(|e| e.dialling).filter_map(|e| e.node.clone()).collect();
        let alone = self.is_alone();
        let mut next = None;
        let mut due: Vec<(Time, SocketAddr)> = Vec::new();
        for (address, entry) in &self.entries {
            let held = entry.node.as_ref().is_some_and(|node| self.is_held(node));
            if entry.dialling || held || (entry.own && !alone) {
                continue;
            }
            if entry.due <= self.now {
                due.push((entry.due, *address));
            } else {
                next = earliest(next, Some(entry.due));
            }
        }
        due.sort_unstable();
        for (_, address) in due {
            let Some(entry) = self.entries.get_mut(&address).filter(|_| room > 0) else { break };
            // the others of its node wait until this dial is done
            if entry.node.clone().is_some_and(|node| !busy.insert(node)) {
                continue;
            }
            entry.dialling = true;
            room -= 1;
            self.stats.dials += 1;
            self.actions.push_back(Action::Dial(Target { address, node: entry.node.clone() }));
        }
        next
    }
}

impl Source {
    fn new(name: String, every: Option<Duration>) -> Self {
        let every = every.map(|every| every.max(MIN_DNS_INTERVAL));
        Self { name, every, due: Some(Time::ZERO), failures: 0, tried: false, addresses: BTreeSet::new() }
    }
}

impl Entry {
    fn new() -> Self {
        Self {
            seed: false,
            tellers: 0,
            node: None,
            answered: false,
            own: false,
            dialling: false,
            due: Time::ZERO,
            failures: 0,
            tried: false,
            orphan: None,
        }
    }
}

impl Node {
    fn awaited_until(until: Time) -> Self {
        Self { linked: None, awaited: until, home: None, introduced: false, told: BTreeMap::new() }
    }
}

fn earliest(a: Option<Time>, b: Option<Time>) -> Option<Time> {
    match (a, b) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (a, b) => a.or(b),
    }
}
