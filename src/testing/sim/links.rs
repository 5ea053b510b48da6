//! A cluster whose nodes have their link layers: below those there are only raw connections ([`super::pipes`]).
//!
//! What the nodes are told comes out of [`Links`], and what they send goes into it. The network of the plain cluster
//! ([`super::network`]) moves nothing here: it is the contract. It writes down what the link layers took and
//! reported, and every report and every frame is held against it: a peer is up before its first frame, none comes
//! after it is down, the frames of a lane come in order and each once, those of a session come in no other, and
//! when one end has given a session up, the other one does before either begins the next.

use std::collections::{BTreeMap, BTreeSet};

use super::cluster::{Cluster, MAX_UNDER_WAY, Outcome};
use super::network::{self, End};
use super::pipes::{Item, Pipes};
use super::step::{LinkStep, Place, Seen, Step};
use crate::node::Time;
use crate::testing::oracle::Violation;
use crate::transport::link::{DownReason, Effect, LinkConfig, LinkRules, LinkStats, Links, Output, RawId};
use crate::transport::{Frame, Lane, SendError, Terms};
use crate::types::Peer;

/// How late a link layer may look at its timers.
const LAG: Time = Time::from_millis(100);
/// A frame that is under way for so long is given up with its link, whatever moves.
const GIVEN_UP: Time = Time::from_millis(7000);
/// How many connections a pair may have at once.
const MOST: usize = 4;
/// How long a place waits before it dials again, and at most.
const REDIAL: Time = Time::from_millis(5);
const REDIAL_MAX: Time = Time::from_millis(80);

/// What the link layers of a run came to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LinkTally {
    /// Connections that were opened.
    pub opened: u64,
    /// Connections that were broken.
    pub broken: u64,
    /// Packets that were lost.
    pub lost: u64,
    /// Sessions that both ends were told of.
    pub sessions: u64,
    /// Of those, sessions in place of an earlier one between the same two lives.
    pub replaced: u64,
    /// How often an end went on with its session on a new connection.
    pub resumed: u64,
    /// Frames that came out of a link layer.
    pub frames: u64,
    /// Frames that came on a connection again and were dropped.
    pub duplicates: u64,
}

impl LinkTally {
    /// Adds another one's numbers.
    pub fn add(&mut self, other: &LinkTally) {
        self.opened += other.opened;
        self.broken += other.broken;
        self.lost += other.lost;
        self.sessions += other.sessions;
        self.replaced += other.replaced;
        self.resumed += other.resumed;
        self.frames += other.frames;
        self.duplicates += other.duplicates;
    }
}

/// A session: the lives at both ends, the lower place first, and the number that the link layers gave it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Key {
    lives: [u64; 2],
    id: u64,
}

/// The link layers of a cluster and what is below them.
#[derive(Clone, Debug)]
pub(super) struct Linked {
    config: LinkConfig,
    rules: LinkRules,
    links: Vec<Option<Links>>,
    pub(super) pipes: Pipes,
    /// Places whose node has not been told yet of all that its link layer decided.
    pending: Vec<bool>,
    /// Connections that wait for room to write.
    blocked: Vec<BTreeSet<RawId>>,
    /// What a sender holds because its queue is full: by sender and receiver.
    stash: BTreeMap<(usize, usize), [Option<Frame>; 3]>,
    /// The session that the first place was last told of the second.
    told: BTreeMap<(usize, usize), Key>,
    /// How often the first place has dialled the second in vain, and when it may again.
    redial: BTreeMap<(usize, usize), (u32, Time)>,
    /// A promise that was broken while a node acted.
    pub(super) broken: Option<Violation>,
    tally: LinkTally,
}

impl Linked {
    pub(super) fn new(places: usize, config: LinkConfig, rules: LinkRules, width: usize) -> Self {
        Self {
            config,
            rules,
            links: (0..places).map(|_| None).collect(),
            pipes: Pipes::new(width),
            pending: vec![false; places],
            blocked: vec![BTreeSet::new(); places],
            stash: BTreeMap::new(),
            told: BTreeMap::new(),
            redial: BTreeMap::new(),
            broken: None,
            tally: LinkTally::default(),
        }
    }

    pub(super) fn at(&mut self, place: usize) -> Option<&mut Links> {
        self.links.get_mut(place)?.as_mut()
    }

    pub(super) fn start(&mut self, me: Peer, place: usize) {
        let terms = Terms { scope: "sim".into(), vnodes: 1, protocol: 1 };
        let mut links = Links::new(me, terms, self.config.clone());
        links.set_rules(self.rules);
        links.settle();
        self.links[place] = Some(links);
        self.redial.retain(|(a, b), _| *a != place && *b != place);
    }

    pub(super) fn end(&mut self, place: usize, vanished: bool) {
        if let Some(links) = self.links[place].take() {
            self.count(&links);
        }
        self.pending[place] = false;
        self.blocked[place].clear();
        self.stash.retain(|(from, _), _| *from != place);
        self.pipes.leave(place, vanished);
    }

    fn count(&mut self, links: &Links) {
        self.tally.resumed += links.stats().resumed;
        self.tally.duplicates += links.stats().duplicates;
    }

    /// Whether this place may dial that one now: it has no connection with it, and has waited long enough.
    pub(super) fn may_dial(&self, a: usize, b: usize, now: Time) -> bool {
        let both = self.links[a].is_some() && self.links[b].is_some();
        let waits = self.redial.get(&(a, b)).is_some_and(|(_, at)| *at > now);
        a != b && both && !waits && !self.pipes.is_cut(a, b) && self.pipes.held_by(a, b) == 0
    }

    fn lost(&mut self, at: usize, raw: RawId, now: Time) {
        let (attempts, again) = self.redial.entry((at, Pipes::other_end(raw, at))).or_default();
        *again = now
            + if *attempts == 0 { Time::ZERO } else { REDIAL_MAX.min(REDIAL * (1 << (*attempts).min(8))) };
        *attempts += 1;
        self.blocked[at].remove(&raw);
    }

    /// Whether this place's link layer has still the session that its node was last told of.
    fn stands(&self, at: usize, of: usize, peer: &Peer) -> bool {
        let id = self.links[at].as_ref().and_then(|links| links.session_id(peer));
        id.is_some() && id == self.told.get(&(at, of)).map(|key| key.id)
    }

    pub(super) fn is_pending(&self, place: usize) -> bool {
        self.pending[place]
    }

    /// Whether a node has to be told something, or something to send waits for room.
    pub(super) fn is_any_pending(&self) -> bool {
        self.pending.contains(&true) || !self.stash.is_empty()
    }

    pub(super) fn is_due(&self, place: usize, now: Time) -> bool {
        let due = self.links[place].as_ref().and_then(Links::poll_timeout);
        due.is_some_and(|at| at <= now)
    }

    fn next_timer(&self) -> Option<Time> {
        self.links.iter().flatten().filter_map(Links::poll_timeout).min()
    }

    pub(super) fn tally(&self) -> LinkTally {
        let Pipes { opened, broken, lost, .. } = self.pipes;
        let mut all = LinkTally { opened, broken, lost, ..self.tally };
        for links in self.links.iter().flatten() {
            all.resumed += links.stats().resumed;
            all.duplicates += links.stats().duplicates;
        }
        all
    }
}

fn contract(what: String) -> Violation {
    Violation::new("contract", what)
}

// Steps.
impl Cluster {
    pub(super) fn apply_link(&mut self, step: LinkStep) -> Outcome {
        let Some(linked) = self.linked.as_mut() else { return Ok(()) };
        let at = usize::from;
        match step {
            LinkStep::Dial(a, b) => self.dial(at(a), at(b)),
            LinkStep::Carry { from, to, nth, later } => self.carry(at(from), at(to), at(nth), later),
            LinkStep::Report(n) => self.report(at(n)).map(|_| ()),
            LinkStep::Tick(n) => {
                self.link_input(at(n), Links::handle_timeout)?;
                self.carry_out(at(n))
            }
            LinkStep::Break { at: a, of, nth, keep, seen } => {
                self.break_link(at(a), at(of), at(nth), at(keep), seen)
            }
            LinkStep::Drop { from, to, nth } => {
                linked.pipes.drop_or_repeat(at(from), at(to), at(nth), true);
                Ok(())
            }
            LinkStep::Repeat { from, to, nth } => {
                linked.pipes.drop_or_repeat(at(from), at(to), at(nth), false);
                Ok(())
            }
            LinkStep::Hold(a, b) => {
                linked.pipes.hold(at(a), at(b), true);
                Ok(())
            }
            LinkStep::Release(a, b) => {
                linked.pipes.hold(at(a), at(b), false);
                Ok(())
            }
            LinkStep::Cut { at: a, of, seen } => self.cut_link(at(a), at(of), seen),
            LinkStep::Mend(a, b) => {
                linked.pipes.cut(at(a), at(b), false);
                Ok(())
            }
            LinkStep::Disconnect(a, b) => self.disconnect(at(a), at(b)),
            LinkStep::Stop(n) => self.stop(at(n)),
            LinkStep::Vanish(n) => self.die(at(n), true),
        }
    }

    fn dial(&mut self, a: usize, b: usize) -> Outcome {
        let Some(linked) = self.linked.as_mut() else { return Ok(()) };
        let both = linked.at(a).is_some() && linked.at(b).is_some();
        if a == b || !both || linked.pipes.held_by(a, b) >= MOST {
            return Ok(());
        }
        let Some(raw) = linked.pipes.dial(a, b) else { return Ok(()) };
        self.link_input(a, |links, now| links.handle_opened(raw, now))?;
        self.carry_out(a)
    }

    fn carry(&mut self, from: usize, to: usize, nth: usize, later: bool) -> Outcome {
        let now = self.now;
        let Some(linked) = self.linked.as_mut() else { return Ok(()) };
        let Some((raw, item)) = linked.pipes.carry(from, to, nth) else { return Ok(()) };
        let writes = linked.blocked[from].contains(&raw);
        let exact = linked.pipes.is_exact(raw);
        match item {
            Some(Item::Opened) => self.link_input(to, |links, now| links.handle_opened(raw, now))?,
            Some(Item::Packet(packet)) => {
                let mut misheard = None;
                self.link_input(to, |links, now| {
                    let before = links.stats();
                    links.handle_packet(raw, packet, now);
                    let LinkStats { malformed, unexpected, gaps, duplicates, .. } = links.stats();
                    let now = (malformed, unexpected, gaps, duplicates);
                    let before = (before.malformed, before.unexpected, before.gaps, before.duplicates);
                    misheard = (now != before).then_some((before, now));
                })?;
                if let Some((before, now)) = misheard.filter(|_| exact) {
                    let what = "malformed, unexpected, gaps and duplicates on a connection that lost nothing";
                    return Err(contract(format!("n{to} counts {what}: {now:?} after {before:?}")));
                }
            }
            Some(Item::Closed) => {
                linked.lost(to, raw, now);
                self.link_input(to, |links, now| links.handle_closed(raw, now))?;
            }
            None => {}
        }
        if !later {
            self.carry_out(to)?;
        }
        if writes { self.flush(from) } else { Ok(()) }
    }

    fn break_link(&mut self, at: usize, of: usize, nth: usize, keep: usize, seen: Seen) -> Outcome {
        let now = self.now;
        let Some(linked) = self.linked.as_mut() else { return Ok(()) };
        let keep = (seen == Seen::Both).then_some(keep);
        let told = seen != Seen::Nobody;
        let Some(raw) = linked.pipes.break_nth(at, of, nth, told, keep) else { return Ok(()) };
        if !told {
            return Ok(());
        }
        linked.lost(at, raw, now);
        self.link_input(at, |links, now| links.handle_closed(raw, now))?;
        self.carry_out(at)
    }

    fn cut_link(&mut self, a: usize, b: usize, seen: Seen) -> Outcome {
        if let Some(linked) = self.linked.as_mut() {
            linked.pipes.cut(a, b, true);
        }
        for nth in 0..MOST {
            // who is told loses it, and the next one is the first
            self.break_link(a, b, if seen == Seen::Nobody { nth } else { 0 }, 0, seen)?;
        }
        for _ in 0..if seen == Seen::Both { MOST } else { 0 } {
            self.break_link(b, a, 0, 0, seen)?;
        }
        Ok(())
    }

    fn disconnect(&mut self, at: usize, of: usize) -> Outcome {
        if at == of {
            return Ok(());
        }
        let (link, side) = self.net().link(at, of);
        let (up, life) = (link.ends[side] == End::Up, link.lives[1 - side]);
        let peer = self.peer_of(of, life);
        if up {
            self.link_input(at, |links, now| links.disconnect(&peer, now))?
        }
        self.carry_out(at)
    }

    fn stop(&mut self, place: usize) -> Outcome {
        self.link_input(place, |links, now| links.shutdown(now))?;
        self.carry_out(place)?;
        self.die(place, false)
    }

    /// An input of the link layer, after all that came of the one before.
    fn link_input(&mut self, place: usize, act: impl FnOnce(&mut Links, Time)) -> Outcome {
        self.carry_out(place)?;
        let now = self.now;
        let Some(linked) = self.linked.as_mut() else { return Ok(()) };
        if let Some(links) = linked.at(place) {
            act(links, now);
            linked.pending[place] = true;
            self.stale |= !(0..self.len()).all(|of| of == place || self.is_decided_between(place, of));
        }
        Ok(())
    }

    /// Whether no link layer has given a session up whose end its node has yet to be told of.
    pub(super) fn is_decided(&self) -> bool {
        self.linked.is_none() || self.net().pairs().all(|(a, b)| self.is_decided_between(a, b))
    }

    fn is_decided_between(&self, a: usize, b: usize) -> bool {
        !self.net().link(a, b).0.connected() || self.stands(a, b)
    }

    /// Tells the node all that its link layer has decided, and then writes.
    pub(super) fn carry_out(&mut self, place: usize) -> Outcome {
        while self.report(place)? {}
        Ok(())
    }

    /// Tells the node the next thing; whether there was any.
    fn report(&mut self, place: usize) -> Result<bool, Violation> {
        let Some(linked) = self.linked.as_mut().filter(|linked| linked.pending[place]) else {
            return Ok(false);
        };
        let Some(effect) = linked.at(place).and_then(Links::poll_effect) else {
            linked.pending[place] = false;
            self.flush(place)?;
            return Ok(false);
        };
        self.effect(place, effect).map(|()| true)
    }

    /// Writes what the link layer has, once its node knows all that it decided.
    pub(super) fn flush(&mut self, place: usize) -> Outcome {
        let now = self.now;
        let Some(linked) = self.linked.as_mut().filter(|linked| !linked.pending[place]) else {
            return Ok(());
        };
        let mut all = std::mem::take(&mut linked.blocked[place]);
        let Some(links) = linked.links[place].as_mut() else { return Ok(()) };
        let mut closed = Vec::new();
        while let Some(raw) = all.pop_first().or_else(|| links.poll_dirty()) {
            let other = Pipes::other_end(raw, place);
            loop {
                let room = linked.pipes.has_room(raw, place);
                match links.poll_output(raw, room) {
                    Output::Packet(packet) => {
                        let ours = linked.told.get(&(place, other));
                        if packet.lane().is_some() && ours != linked.told.get(&(other, place)) {
                            let what =
                                format!("n{place} writes a frame before n{other} was told of the session");
                            linked.broken.get_or_insert_with(|| contract(what));
                        }
                        linked.pipes.write(raw, place, packet);
                    }
                    Output::Close => {
                        linked.pipes.close(raw, place);
                        closed.push(raw);
                        break;
                    }
                    Output::Idle => {
                        if !room {
                            linked.blocked[place].insert(raw);
                        }
                        break;
                    }
                }
            }
        }
        for raw in closed {
            linked.lost(place, raw, now);
        }
        linked.broken.take().map_or(Ok(()), Err)
    }

    /// Time goes by; less than asked for if a timer would be late, or a frame that moves be under way for too long.
    pub(super) fn pass_linked(&mut self, time: Time) -> Outcome {
        for place in 0..self.len() {
            self.carry_out(place)?;
        }
        let Some(linked) = &self.linked else { return Ok(()) };
        let timers = linked.next_timer().map(|at| at + LAG);
        let moving = self.oldest(|from, to| self.flows(from, to)).map(|sent| sent + MAX_UNDER_WAY);
        let end = [Some(self.now + time), timers, moving].into_iter().flatten().min();
        self.now = self.now.max(end.unwrap_or_default());
        let now = self.now;
        for (a, b) in self.net().pairs().collect::<Vec<_>>() {
            for (from, to) in [(a, b), (b, a)] {
                let old = |sent: Time| sent + GIVEN_UP <= now;
                if self.oldest(|x, y| (x, y) == (from, to)).is_some_and(old) {
                    self.disconnect(from, to)?;
                }
            }
        }
        Ok(())
    }

    /// Since when the oldest frame is under way in the directions that count.
    fn oldest(&self, counts: impl Fn(usize, usize) -> bool) -> Option<Time> {
        let both = |(a, b)| [(a, b), (b, a)];
        let fronts = self.net().pairs().flat_map(both).filter_map(|(from, to)| {
            let (link, side) = self.net().link(from, to);
            let sent =
                link.lanes[side].iter().filter_map(|lane| lane.front()).map(|frame| frame.sent).min()?;
            counts(from, to).then_some(sent)
        });
        fronts.min()
    }

    /// Whether one connection carries the session at both ends and moves.
    fn flows(&self, from: usize, to: usize) -> bool {
        let Some(linked) = &self.linked else { return false };
        let carrier = |at: usize, of: usize| linked.links[at].as_ref()?.connection(&self.peer(of).node);
        let raw = carrier(from, to).filter(|raw| carrier(to, from) == Some(*raw));
        raw.is_some_and(|raw| linked.pipes.flows(raw, from, to))
    }

    /// Whether both link layers have still the session that both nodes were told of.
    pub(super) fn stands(&self, a: usize, b: usize) -> bool {
        let Some(linked) = &self.linked else { return true };
        let (link, side) = self.net().link(a, b);
        linked.stands(a, b, &self.peer_of(b, link.lives[1 - side]))
            && linked.stands(b, a, &self.peer_of(a, link.lives[side]))
    }
}

// What the link layers report.
impl Cluster {
    fn effect(&mut self, place: usize, effect: Effect) -> Outcome {
        match effect {
            Effect::Up(peer) => self.link_up(place, peer),
            Effect::Down(peer, DownReason::Broken) => {
                Err(contract(format!("n{place} takes what {peer} says for impossible")))
            }
            Effect::Down(peer, _) => self.link_down(place, &peer),
            Effect::Suspect(peer) => self.link_suspect(place, &peer, true),
            Effect::Resumed(peer) => self.link_suspect(place, &peer, false),
            Effect::Frame(peer, frame) => self.link_frame(place, &peer, frame),
            Effect::Room(peer) => self.link_room(place, &peer),
            // a late word of an earlier life is refused
            Effect::Refused { .. } => Ok(()),
            Effect::Superseded { live } => {
                Err(contract(format!("{} is told that {live} holds its name", self.peer(place))))
            }
            Effect::Reborn => Err(contract(format!("{} takes another incarnation", self.peer(place)))),
        }
    }

    /// The place of this peer, if it may be reported to `place` as one that is up.
    fn reported(&self, place: usize, peer: &Peer, what: &str) -> Result<usize, Violation> {
        let of = self.place_of(peer).filter(|of| *of != place);
        let of = of.ok_or_else(|| contract(format!("n{place} is told of {peer}, {what}: there is none")))?;
        let (link, side) = self.net().link(place, of);
        match link.is_up(side, peer.incarnation.get()) {
            true => Ok(of),
            false => Err(contract(format!("n{place} is told of {peer}, {what}, while it is not up"))),
        }
    }

    fn link_up(&mut self, place: usize, peer: Peer) -> Outcome {
        let of = self.place_of(&peer).filter(|of| *of != place);
        let of = of.ok_or_else(|| contract(format!("n{place} is told that {peer} is up: there is none")))?;
        let mut lives = [self.life(place).life, peer.incarnation.get()];
        if place > of {
            lives.reverse();
        }
        let Some(linked) = self.linked.as_mut() else { return Ok(()) };
        let id = linked.at(place).and_then(|links| links.session_id(&peer));
        let id = id.ok_or_else(|| contract(format!("n{place} is told of {peer} without a session")))?;
        let key = Key { lives, id };
        let before = linked.told.insert((place, of), key);
        let theirs = linked.told.get(&(of, place)).copied();
        linked.redial.remove(&(place, of));
        if before == Some(key) {
            return Err(contract(format!("n{place} is told of a session with {peer} again")));
        }
        let (link, side) = self.net.link_mut(place, of);
        if link.ends[side] == End::Up {
            return Err(contract(format!("n{place} is told that {peer} is up, which is up")));
        }
        if link.ends[1 - side] == End::Up && theirs != Some(key) {
            let what = format!("n{place} is told that {peer} is up, which has not given the last session up");
            return Err(contract(what));
        }
        if link.closed() {
            link.begin(lives);
        }
        link.ends[side] = End::Up;
        link.open = link.ends[1 - side] == End::Up;
        if link.open {
            linked.tally.sessions += 1;
            linked.tally.replaced += u64::from(before.is_some_and(|before| before.lives == lives));
        }
        self.stale = true;
        let now = self.now;
        self.input(place, |node, wire| node.handle_peer_up(peer, wire, now))
    }

    fn link_down(&mut self, place: usize, peer: &Peer) -> Outcome {
        let of = self.reported(place, peer, "down")?;
        let (link, side) = self.net.link_mut(place, of);
        link.end(side, false);
        let now = self.now;
        if let Some(linked) = self.linked.as_mut() {
            linked.stash.remove(&(place, of));
            // the next session may be there already, but whoever sends now means the one that is over
            let late = Frame::new(Lane::Data, "late", "");
            if linked.at(place).is_some_and(|links| links.try_send(peer, late, now).is_ok()) {
                return Err(contract(format!(
                    "n{place}'s link takes a frame to {peer}, which is being reported down"
                )));
            }
        }
        self.stale = true;
        self.input(place, |node, wire| node.handle_peer_down(peer, wire, now))
    }

    fn link_suspect(&mut self, place: usize, peer: &Peer, suspect: bool) -> Outcome {
        let of = self.reported(place, peer, if suspect { "suspect" } else { "resumed" })?;
        let (link, side) = self.net.link_mut(place, of);
        if std::mem::replace(&mut link.suspect[side], suspect) == suspect {
            return Err(contract(format!("n{place} is told twice: {peer} suspect {suspect}")));
        }
        self.stale = true;
        let now = self.now;
        self.input(place, |node, wire| match suspect {
            true => node.handle_peer_suspect(peer, wire, now),
            false => node.handle_peer_resumed(peer, wire, now),
        })
    }

    fn link_room(&mut self, place: usize, peer: &Peer) -> Outcome {
        let of = self.reported(place, peer, "room")?;
        let (link, side) = self.net.link_mut(place, of);
        link.room[side] |= std::mem::take(&mut link.full[side]);
        link.wake[side] = true;
        self.stale = true;
        Ok(())
    }

    /// A frame came out: it must be the next one that went in at the other end, in this very session.
    fn link_frame(&mut self, place: usize, peer: &Peer, frame: Frame) -> Outcome {
        let of = self.reported(place, peer, "a frame")?;
        let lane = frame.lane;
        let (link, side) = self.net.link_mut(place, of);
        if !link.open {
            return Err(contract(format!(
                "n{place} gets a frame of {peer}, which was not told of the session"
            )));
        }
        let next = link.lanes[1 - side][lane.index()].pop_front();
        let same = next.as_ref().is_some_and(|next| next.head == frame.head && next.body == frame.body);
        if !same {
            let what = if next.is_some() { "another one was next" } else { "none is under way" };
            return Err(contract(format!("n{place} gets a frame of {peer} on {lane:?}, but {what}")));
        }
        if let Some(linked) = self.linked.as_mut() {
            linked.tally.frames += 1;
        }
        self.hand_over(of, place, peer, frame)
    }

    /// The node's sender takes what it has for a peer, as long as there is room.
    pub(super) fn send_linked(&mut self, from: usize, to: usize) -> Outcome {
        let (link, side) = self.net.link_mut(from, to);
        link.wake[side] = false;
        if link.ends[side] != End::Up {
            return Ok(());
        }
        let life = link.lives[1 - side];
        let peer = self.peer_of(to, life);
        let now = self.now;
        let (Some(linked), Some(node)) = (self.linked.as_mut(), &self.spots[from].node) else {
            return Ok(());
        };
        let mut stash = linked.stash.remove(&(from, to)).unwrap_or_default();
        let Some(links) = linked.links[from].as_mut() else { return Ok(()) };
        let (link, side) = self.net.link_mut(from, to);
        for lane in Lane::ALL {
            loop {
                let frame = match stash[lane.index()].take() {
                    Some(frame) => frame,
                    None => {
                        let Some(out) = node.poll_transmit_on(&peer, lane, now) else { break };
                        let Ok(head) = postcard::to_allocvec(&out.message) else {
                            return Err(Violation::new(
                                "wire",
                                format!("{:?} cannot be encoded", out.message),
                            ));
                        };
                        Frame::new(out.lane, head, "")
                    }
                };
                let shadow = network::Frame { sent: now, head: frame.head.clone(), body: frame.body.clone() };
                match links.try_send(&peer, frame, now) {
                    Ok(()) => link.lanes[side][lane.index()].push_back(shadow),
                    Err(SendError::Busy(frame) | SendError::NoLink(frame) | SendError::TooLarge(frame)) => {
                        stash[lane.index()] = Some(frame);
                        break;
                    }
                }
            }
        }
        if stash.iter().any(Option::is_some) {
            linked.stash.insert((from, to), stash);
        }
        self.collect(from)
    }
}

// Whole-cluster moves.
impl Cluster {
    /// As [`Cluster::run`]: one round in a fixed order.
    pub(super) fn run_once_linked(&mut self) -> Result<bool, Violation> {
        let mut moved = false;
        let mut step = |cluster: &mut Self, step: Step| {
            moved = true;
            cluster.apply(step)
        };
        for a in 0..self.len() {
            let pa = a as Place;
            while self.has_work(a) {
                step(self, Step::Work(pa))?;
            }
            if self.linked.as_ref().is_some_and(|linked| linked.is_due(a, self.now)) {
                step(self, Step::Link(LinkStep::Tick(pa)))?;
            }
            for b in (0..self.len()).filter(|b| *b != a) {
                let pb = b as Place;
                let (link, side) = self.net().link(a, b);
                if link.room[side] {
                    step(self, Step::Room(pa, pb))?;
                }
                let (link, side) = self.net().link(a, b);
                if link.wake[side] && link.ends[side] == End::Up {
                    step(self, Step::Send(pa, pb))?;
                }
                let Some(linked) = &self.linked else { continue };
                let alone = a < b || linked.pipes.held_by(b, a) > 0;
                if alone && linked.may_dial(a, b, self.now) {
                    step(self, Step::Link(LinkStep::Dial(pa, pb)))?;
                }
                let ready = self.linked.as_ref().map_or(0, |linked| linked.pipes.ready(a, b));
                for nth in 0..ready as u8 {
                    step(self, Step::Link(LinkStep::Carry { from: pa, to: pb, nth, later: false }))?;
                }
            }
        }
        Ok(moved)
    }

    /// The network is whole again: every pair of nodes must be linked before the link layers' times are over.
    pub(super) fn heal_linked(&mut self) -> Outcome {
        let Some(linked) = self.linked.as_mut() else { return Ok(()) };
        linked.pipes.heal();
        linked.redial.clear();
        let LinkConfig { ping_timeout, reconnect_grace, handshake_timeout, .. } = linked.config;
        let limit = self.now + 2 * (ping_timeout + reconnect_grace + handshake_timeout);
        self.stale = true;
        loop {
            self.run()?;
            if self.is_meshed() {
                break;
            }
            if self.now > limit {
                let what =
                    format!("nothing is broken for {limit:?}, and not all are linked\n{}", self.describe());
                return Err(Violation::new("links", what));
            }
            self.apply(Step::Time(5))?;
        }
        Ok(())
    }

    /// Whether every pair of running nodes is linked, and nobody is taken for alive who is not.
    pub(super) fn is_meshed(&self) -> bool {
        let pair = |(a, b)| match self.node(a).is_some() && self.node(b).is_some() {
            true => self.connected(a, b),
            false => self.net().link(a, b).0.closed(),
        };
        !self.net().disturbed() && self.net().pairs().all(pair)
    }

    pub(super) fn place_of(&self, peer: &Peer) -> Option<usize> {
        self.names.get(&peer.node).copied()
    }

    /// What the link layers came to; nothing where there are none.
    pub fn link_tally(&self) -> LinkTally {
        self.linked.as_ref().map(|linked| linked.tally()).unwrap_or_default()
    }
}
