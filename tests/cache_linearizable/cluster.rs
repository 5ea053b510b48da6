//! Cache nodes in virtual time, for histories of operations: a network that breaks at one end first, views that follow
//! late, lives that end and begin, processes that stand still, and a clock of its own on each node.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use muster_router::cache::node::{CacheEffect, CacheMessage, CacheNode, Shard, codec};
use muster_router::cache::replica::Rules;
use muster_router::cache::{CacheConfig, CacheError, Operation, Options, PartitionId, Reply, WriteMode};
use muster_router::transport::Lane;
use muster_router::{Incarnation, NodeId, Peer};

/// Numbers that follow from a seed.
#[derive(Debug)]
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed ^ 0x9e37_79b9_7f4a_7c15)
    }

    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        // splitmix64
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % bound.max(1)
    }

    pub(crate) fn millis(&mut self, below: u64) -> Duration {
        Duration::from_micros(self.below(below * 1000))
    }

    pub(crate) fn one_in(&mut self, count: u64) -> bool {
        self.below(count) == 0
    }
}

/// What happens at a time.
#[derive(Debug)]
enum Event {
    LinkDown { at: usize, peer: Peer, link: u64 },
    LinkUp { at: usize, peer: Peer, link: u64 },
    View { at: usize, life: u64 },
    Wake { at: usize, life: u64 },
    Resume { at: usize, life: u64 },
}

#[derive(Debug)]
struct Place {
    node: CacheNode,
    life: u64,
    /// Links that it believes to be up.
    links: BTreeMap<Peer, u64>,
    /// Its clock: what it shows now, and how fast it goes, in thousandths.
    offset: Duration,
    began: Duration,
    rate: u64,
    frozen_until: Option<Duration>,
    /// What has come while it stood still: it is read afterwards, also if the link has gone meanwhile.
    door: Vec<(Peer, (usize, usize, bool), Flying)>,
    settled: bool,
    wake_at: Option<Duration>,
}

#[derive(Debug)]
struct Flying {
    at: Duration,
    link: u64,
    bytes: Vec<u8>,
}

/// An operation that has ended.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) ticket: u64,
    pub(crate) result: Result<Reply, CacheError>,
}

pub(crate) struct Cluster {
    pub(crate) now: Duration,
    config: Arc<CacheConfig>,
    rules: Rules,
    places: Vec<Option<Place>>,
    lives: Vec<u64>,
    pub(crate) cut: BTreeSet<(usize, usize)>,
    /// Links that are up or coming up, by their ends.
    links: BTreeMap<(usize, usize), u64>,
    last_link: u64,
    flying: BTreeMap<(usize, usize, bool), VecDeque<Flying>>,
    events: BTreeMap<(Duration, u64), Event>,
    last_event: u64,
    pub(crate) random: Random,
    ended: Vec<Ended>,
    /// Who has served which partition, by the counter of the epoch and, if sides of a split may count alike, by its primary.
    served: BTreeMap<(PartitionId, u64, Option<Peer>), Peer>,
    /// Two that have served one partition in one epoch; the first few.
    pub(crate) rivals: Vec<String>,
    pub(crate) messages: u64,
    /// How many things have happened at this moment.
    stuck: u64,
}

impl Cluster {
    pub(crate) fn new(count: usize, config: CacheConfig, rules: Rules, seed: u64) -> Self {
        config.validate().unwrap();
        let mut cluster = Self {
            now: Duration::ZERO,
            config: Arc::new(config),
            rules,
            places: (0..count).map(|_| None).collect(),
            lives: vec![0; count],
            cut: BTreeSet::new(),
            links: BTreeMap::new(),
            last_link: 0,
            flying: BTreeMap::new(),
            events: BTreeMap::new(),
            last_event: 0,
            random: Random::new(seed),
            ended: Vec::new(),
            served: BTreeMap::new(),
            rivals: Vec::new(),
            messages: 0,
            stuck: 0,
        };
        (0..count).for_each(|at| cluster.start(at));
        cluster
    }

    fn peer(&self, at: usize) -> Peer {
        let incarnation = Incarnation::new(self.lives[at]).unwrap();
        Peer::new(NodeId::new(format!("n{at}")).unwrap(), incarnation)
    }

    fn place_of(&self, peer: &Peer) -> Option<usize> {
        (0..self.places.len()).find(|at| self.places[*at].is_some() && self.peer(*at) == *peer)
    }

    pub(crate) fn count(&self) -> usize {
        self.places.len()
    }

    pub(crate) fn is_alive(&self, at: usize) -> bool {
        self.places[at].is_some()
    }

    fn after(&mut self, delay: Duration, event: Event) {
        self.last_event += 1;
        self.events.insert((self.now + delay, self.last_event), event);
    }

    // ---- faults

    pub(crate) fn start(&mut self, at: usize) {
        self.lives[at] += 1;
        let (life, offset) = (self.lives[at], self.random.millis(100_000));
        let seed = self.random.below(u64::MAX);
        let node = CacheNode::new(self.peer(at), self.config.clone(), Shard::ALL, seed, offset)
            .with_rules(self.rules);
        let rate = 970 + self.random.below(61);
        self.places[at] = Some(Place {
            node,
            life,
            links: BTreeMap::new(),
            offset,
            began: self.now,
            rate,
            frozen_until: None,
            door: Vec::new(),
            settled: false,
            wake_at: None,
        });
        let delay = Duration::from_millis(400) + self.random.millis(300);
        self.after(delay, Event::View { at, life });
        self.follow(at);
        self.link_all();
    }

    /// What it was doing is not told to anybody any more.
    pub(crate) fn crash(&mut self, at: usize) {
        for other in 0..self.count() {
            self.break_link(at, other);
        }
        self.places[at] = None;
    }

    /// Its process stands still for a while.
    pub(crate) fn freeze(&mut self, at: usize, time: Duration) {
        let until = self.now + time;
        let Some(place) = &mut self.places[at] else { return };
        place.frozen_until = Some(until);
        let life = place.life;
        self.after(time, Event::Resume { at, life });
    }

    pub(crate) fn set_cut(&mut self, cut: BTreeSet<(usize, usize)>) {
        self.cut = cut;
        for (a, b) in self.cut.clone() {
            self.break_link(a, b);
        }
        self.link_all();
    }

    /// What is under way is lost; both ends hear of it, each in its time.
    fn break_link(&mut self, a: usize, b: usize) {
        let Some(link) = self.links.remove(&(a.min(b), a.max(b))) else { return };
        for (at, other) in [(a, b), (b, a)] {
            for bulk in [false, true] {
                self.flying.remove(&(at, other, bulk));
            }
            let delay = match self.random.below(3) {
                0 => Duration::from_millis(1),
                1 => self.random.millis(200),
                _ => self.random.millis(2500),
            };
            let peer = self.peer(other);
            self.after(delay, Event::LinkDown { at, peer, link });
        }
    }

    /// Links between all who can have one.
    fn link_all(&mut self) {
        for a in 0..self.count() {
            for b in a + 1..self.count() {
                let possible = self.is_alive(a) && self.is_alive(b) && !self.cut.contains(&(a, b));
                if !possible || self.links.contains_key(&(a, b)) {
                    continue;
                }
                self.last_link += 1;
                let link = self.last_link;
                self.links.insert((a, b), link);
                for (at, other) in [(a, b), (b, a)] {
                    let (peer, delay) =
                        (self.peer(other), Duration::from_millis(1) + self.random.millis(100));
                    self.after(delay, Event::LinkUp { at, peer, link });
                }
            }
        }
    }

    // ---- operations

    pub(crate) fn partition_of(&self, key: i64) -> PartitionId {
        self.config.partition_of(&key.into())
    }

    /// Asks a node; whether it could be asked.
    pub(crate) fn operate(
        &mut self,
        at: usize,
        ticket: u64,
        key: i64,
        operation: Operation,
        patience: Duration,
    ) -> bool {
        let partition = self.partition_of(key);
        let now = self.now;
        let config = self.config.clone();
        let Some(place) = self.places[at].as_mut().filter(|place| place.frozen_until.is_none()) else {
            return false;
        };
        let local = place.local(now);
        let options = Options { deadline: local + patience, ..Options::of(&config, local) };
        place.node.operate(ticket, partition, operation, options, local);
        self.follow(at);
        true
    }

    pub(crate) fn take_ended(&mut self) -> Vec<Ended> {
        std::mem::take(&mut self.ended)
    }

    /// Whether every partition has all its owners, as every node sees it.
    pub(crate) fn is_whole(&self) -> bool {
        self.places.iter().flatten().all(|place| place.node.readiness().is_ready())
    }

    /// Who keeps the partition of a key, the primary first.
    pub(crate) fn owners(&self, key: i64) -> Vec<usize> {
        let partition = self.partition_of(key);
        let statuses = self.places.iter().flatten().map(|place| place.node.status(partition));
        let newest = statuses.max_by(|a, b| a.epoch.cmp(&b.epoch));
        let owners = newest.map(|status| status.owners).unwrap_or_default();
        owners.iter().filter_map(|owner| self.place_of(owner)).collect()
    }

    /// Whether some process stands still.
    pub(crate) fn has_frozen(&self) -> bool {
        self.places.iter().flatten().any(|place| place.frozen_until.is_some())
    }

    /// What is not whole, as each node sees it.
    pub(crate) fn describe(&self) -> String {
        let mut text = String::new();
        for place in self.places.iter().flatten() {
            let readiness = place.node.readiness();
            text += &format!("{}: {readiness:?}\n", place.node.me());
            for partition in readiness.missing {
                text += &format!("    {:?}\n", place.node.status(partition));
            }
        }
        text
    }

    // ---- time

    /// Goes on until something happens that is told, or until a time.
    pub(crate) fn run_until(&mut self, end: Duration) {
        while self.ended.is_empty() {
            let arrival =
                self.flying.iter().filter_map(|(key, lane)| lane.front().map(|first| (first.at, *key))).min();
            let event = self.events.keys().next().copied();
            let next = arrival.map(|(at, _)| at).into_iter().chain(event.map(|(at, _)| at)).min();
            let Some(next) = next.filter(|next| *next <= end) else {
                self.now = self.now.max(end);
                return;
            };
            self.stuck = if next > self.now { 0 } else { self.stuck + 1 };
            assert!(
                self.stuck < 100_000,
                "time stands still: {:?}, {:?}",
                event.map(|key| &self.events[&key]),
                arrival
            );
            self.now = self.now.max(next);
            match arrival {
                // events first: a process that goes on now takes what arrives now
                Some((at, key)) if event.is_none_or(|(when, _)| at < when) => self.arrive(key),
                _ => {
                    if let Some(event) = event.and_then(|key| self.events.remove(&key)) {
                        self.happen(event);
                    }
                }
            }
        }
    }

    fn arrive(&mut self, key: (usize, usize, bool)) {
        let (from, to, _) = key;
        let Some(flying) = self.flying.get_mut(&key).and_then(VecDeque::pop_front) else { return };
        let (sender, now) = (self.peer(from), self.now);
        let Some(place) = &mut self.places[to] else { return };
        if place.frozen_until.is_some() {
            place.door.push((sender, key, flying));
            return;
        }
        if place.links.get(&sender) != Some(&flying.link) {
            if self.links.get(&(from.min(to), from.max(to))) == Some(&flying.link) {
                // this end is not up yet, and nothing is lost on a link that is
                let (lane, soon) = (self.flying.entry(key).or_default(), now + Duration::from_millis(10));
                lane.push_front(flying);
                lane.iter_mut().for_each(|flying| flying.at = flying.at.max(soon));
            }
            return;
        }
        self.take(to, &sender, &flying);
    }

    fn take(&mut self, at: usize, sender: &Peer, flying: &Flying) {
        let now = self.now;
        let Some(place) = &mut self.places[at] else { return };
        let local = place.local(now);
        self.messages += 1;
        for message in codec::decode(&flying.bytes).unwrap() {
            place.node.handle_message(sender, message, local);
        }
        self.follow(at);
    }

    fn happen(&mut self, event: Event) {
        let now = self.now;
        let (Event::LinkDown { at, .. }
        | Event::LinkUp { at, .. }
        | Event::View { at, .. }
        | Event::Wake { at, .. }
        | Event::Resume { at, .. }) = event;
        let Some(place) = &mut self.places[at] else { return };
        if let Some(until) = place.frozen_until.filter(|_| !matches!(event, Event::Resume { .. })) {
            return self.after(until.saturating_sub(now), event);
        }
        let local = place.local(now);
        match event {
            Event::LinkDown { peer, link, .. } => {
                if place.links.get(&peer) != Some(&link) {
                    return;
                }
                place.links.remove(&peer);
                place.node.handle_peer_down(&peer, local);
                self.view_soon(at);
            }
            Event::LinkUp { peer, link, .. } => {
                // gone again, or this end has not heard of the end of the one before: after that
                if let Some(old) = place.links.get(&peer).copied() {
                    if old < link {
                        self.after(Duration::from_millis(50), Event::LinkUp { at, peer, link });
                    }
                    return;
                }
                let Some(other) = self.place_of(&peer) else { return };
                if self.links.get(&(at.min(other), at.max(other))) != Some(&link) {
                    return;
                }
                let Some(place) = &mut self.places[at] else { return };
                place.links.insert(peer.clone(), link);
                place.node.handle_peer_up(&peer, local);
                self.view_soon(at);
            }
            Event::View { life, .. } => {
                if place.life != life {
                    return;
                }
                place.settled |= now >= place.began + Duration::from_millis(400);
                let mut members: Vec<_> = place.links.keys().cloned().collect();
                members.push(place.node.me().clone());
                members.sort();
                place.node.handle_view(&members, place.settled, local);
            }
            Event::Wake { life, .. } => {
                if place.life != life || place.wake_at.is_none_or(|wake| wake > now) {
                    return;
                }
                place.wake_at = None;
                place.node.handle_timeout(local);
            }
            Event::Resume { life, .. } => {
                if place.life != life || place.frozen_until.is_none_or(|until| until > now) {
                    return;
                }
                place.frozen_until = None;
                let links = place.links.clone();
                let (here, early): (Vec<_>, Vec<_>) = std::mem::take(&mut place.door)
                    .into_iter()
                    .partition(|(sender, _, flying)| links.get(sender) == Some(&flying.link));
                here.into_iter().for_each(|(sender, _, flying)| self.take(at, &sender, &flying));
                // of a link that this end has not heard of yet
                for (_, key, flying) in early.into_iter().rev() {
                    if self.links.get(&(key.0.min(key.1), key.0.max(key.1))) == Some(&flying.link) {
                        self.flying.entry(key).or_default().push_front(flying);
                    }
                }
            }
        }
        self.follow(at);
    }

    fn view_soon(&mut self, at: usize) {
        let delay = self.random.millis(250);
        if let Some(place) = &self.places[at] {
            let life = place.life;
            self.after(delay, Event::View { at, life });
        }
    }

    /// Carries out what a node wants.
    fn follow(&mut self, at: usize) {
        loop {
            let Some(place) = &mut self.places[at] else { return };
            let Some(effect) = place.node.poll_effect() else { break };
            match effect {
                CacheEffect::Send { to, lane, message } => self.send(at, &to, lane, &message),
                CacheEffect::Done { ticket, result } => self.ended.push(Ended { ticket, result }),
                CacheEffect::Event(_) | CacheEffect::Changed => {}
            }
        }
        self.see_who_serves(at);
        let now = self.now;
        let Some(place) = &mut self.places[at] else { return };
        let Some(wanted) = place.node.poll_timeout() else { return };
        let wake = place.global(wanted).max(now);
        if place.wake_at.is_none_or(|before| wake < before || before < now) {
            place.wake_at = Some(wake);
            let life = place.life;
            self.after(wake - now, Event::Wake { at, life });
        }
    }

    fn send(&mut self, from: usize, to: &Peer, lane: Lane, message: &CacheMessage) {
        let Some(link) = self.places[from].as_ref().and_then(|place| place.links.get(to)).copied() else {
            return;
        };
        let Some(target) = self.place_of(to) else { return };
        if self.links.get(&(from.min(target), from.max(target))) != Some(&link) {
            // this end does not know yet that it is down
            return;
        }
        let mut bytes = Vec::new();
        codec::encode(message, &mut bytes).unwrap();
        let key = (from, target, lane == Lane::Bulk);
        let slow = self.random.one_in(50);
        let mut at = self.now + Duration::from_micros(200) + self.random.millis(if slow { 200 } else { 8 });
        // the other end is up first
        if self.places[target].as_ref().is_some_and(|place| !place.links.contains_key(&self.peer(from))) {
            at += Duration::from_millis(150);
        }
        let lane = self.flying.entry(key).or_default();
        at = at.max(lane.back().map_or(Duration::ZERO, |last| last.at));
        lane.push_back(Flying { at, link, bytes });
    }

    fn see_who_serves(&mut self, at: usize) {
        let Some(place) = &self.places[at] else { return };
        let me = place.node.me();
        for partition in PartitionId::all(self.config.partitions) {
            let status = place.node.status(partition);
            let Some(epoch) = status.epoch.filter(|_| status.serving) else { continue };
            // a group decides each counter once
            let decided = self.config.write_mode == WriteMode::Strong;
            let side = (!decided).then(|| epoch.primary.clone());
            let known = self.served.entry((partition, epoch.counter, side)).or_insert_with(|| me.clone());
            if known != me && self.rivals.len() < 10 {
                self.rivals.push(format!("{known} and {me} have both served {partition} in {epoch}"));
            }
        }
    }

    /// What must hold at any time on each node, and what must have held since the beginning.
    pub(crate) fn check(&self) -> Result<(), String> {
        self.places.iter().flatten().try_for_each(|place| place.node.check_invariants())?;
        self.rivals.first().map_or(Ok(()), |rivals| Err(rivals.clone()))
    }

    /// Every owner of every partition has just what its primary has; how many were compared. Holds when all is whole
    /// and nothing is under way.
    pub(crate) fn check_copies(&self) -> Result<usize, String> {
        let mut compared = 0;
        for partition in PartitionId::all(self.config.partitions) {
            let serves = |place: &&Place| place.node.status(partition).serving;
            let serving: Vec<_> = self.places.iter().flatten().filter(serves).collect();
            let [primary] = serving[..] else {
                return Err(format!("{} nodes serve {partition}", serving.len()));
            };
            let copy = |place: &Place| {
                let (store, whole) = place.node.store(partition)?;
                whole.then(|| (store.applied().cloned(), store.digest(), store.len()))
            };
            let has = copy(primary);
            for owner in primary.node.status(partition).owners {
                let place = self.place_of(&owner).and_then(|at| self.places[at].as_ref());
                let found = place.and_then(copy);
                if has.is_none() || found != has {
                    let primary = primary.node.me();
                    return Err(format!(
                        "of {partition}, {owner} has {found:?} and its primary {primary} {has:?}"
                    ));
                }
                compared += usize::from(owner != *primary.node.me());
            }
        }
        Ok(compared)
    }
}

impl Place {
    /// What its clock shows.
    fn local(&self, now: Duration) -> Duration {
        let passed = (now - self.began).as_micros() as u64;
        self.offset + Duration::from_micros(passed * self.rate / 1000)
    }

    /// When its clock shows this.
    fn global(&self, local: Duration) -> Duration {
        // up, or it would be woken a little too early for ever
        let passed = local.saturating_sub(self.offset).as_micros() as u64 + 1;
        self.began + Duration::from_micros((passed * 1000).div_ceil(self.rate))
    }
}
