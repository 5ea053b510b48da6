//! Who is there, and whom to connect with. Sans-IO: presences and the time come in, dials and beats go out.
//!
//! Of two nodes the one with the lower name opens the raw connection, so that there is one. A life that is not
//! heard of for three of its beats is forgotten; that a *link* is down is found much sooner, by the link layer.
//!
//! ```text
//!          heard of                    due                 accepted
//!   (none) ────────▶ Due (lower name) ────────▶ Asked ───────────────▶ Connected ──▶ closed: Due, later each time
//!              └───▶ Idle (higher name) ──────── opened by it ────────────▲  └─────▶ or Idle
//! ```

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::envelope::{Presence, Word};
use super::subject::LifeId;
use crate::transport::link::Time;
use crate::types::{NodeId, Peer};

/// The first wait before a connection that has not led to a link is tried again; doubled up to a second.
const REDIAL: Duration = Duration::from_millis(5);
const REDIAL_MAX: Duration = Duration::from_secs(1);
/// How long an answer to a wish for a connection may take at first; twice as long each time that none has come, up to
/// `try_for`, since a network may be slower than any fixed time.
const DIAL_TIMEOUT: Duration = Duration::from_millis(500);
/// A life that does not open a connection is told at most so often that one is missed.
const REMIND: Duration = Duration::from_millis(500);
/// Beats are that much rarer for each node that hears them: a thousand nodes do not hear a million a second.
const BEAT_PER_NODE: Duration = Duration::from_millis(20);
/// After how many beats of silence a life is forgotten.
const SILENT_BEATS: u32 = 3;
const LONGEST_BEAT: Duration = Duration::from_secs(600);

/// See [`super::NatsLimits`] and [`super::NatsBuilder`].
#[derive(Clone, Debug)]
pub(super) struct DirectoryConfig {
    pub(super) beat: Duration,
    /// How long answers are waited for at the start, if not everyone is known before.
    pub(super) window: Duration,
    /// How long a node that was heard of may take to be linked before discovery goes on without it.
    pub(super) try_for: Duration,
    pub(super) lives: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Dial {
    Idle,
    Due(Time),
    Asked { until: Time },
    Connected,
}

#[derive(Debug)]
struct Known {
    node: NodeId,
    epoch: u64,
    expires: Time,
    dial: Dial,
    attempts: u32,
    /// The number of the last wish; its answer is taken until the next one is out.
    dialer: Option<u64>,
    /// How long the next answer may take.
    patience: Duration,
    refused: bool,
    tried: bool,
    first_heard: Time,
    reminded: Option<Time>,
}

/// What follows from a presence.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Heard {
    /// Answer it.
    pub(super) answer: bool,
    /// Every raw connection with it is gone.
    pub(super) reopened: bool,
    /// There are too many lives to know this one.
    pub(super) too_many: bool,
}

/// See the module. Inputs: `heard`, `opened`, `closed`, `linked`, `refused`, `lost`, `back`; outputs: `due`,
/// `beat`, `settled`, `timeout`.
#[derive(Debug)]
pub(super) struct Directory {
    me: Peer,
    life: LifeId,
    epoch: u64,
    config: DirectoryConfig,
    random: u64,
    known: BTreeMap<LifeId, Known>,
    online: bool,
    lost_at: Time,
    next_beat: Time,
    started: Time,
    /// How many nodes there are, by the answers.
    expected: usize,
    settled: bool,
}

// Inputs.
impl Directory {
    pub(super) fn new(me: Peer, life: LifeId, config: DirectoryConfig, seed: u64, now: Time) -> Self {
        Self {
            me,
            life,
            epoch: 0,
            config,
            random: seed,
            known: BTreeMap::new(),
            online: true,
            lost_at: now,
            next_beat: now,
            started: now,
            expected: 0,
            settled: false,
        }
    }

    /// This node has taken a higher incarnation.
    pub(super) fn reborn(&mut self, me: Peer) {
        self.me = me;
    }

    /// A node says that it is there.
    pub(super) fn heard(&mut self, presence: &Presence, now: Time) -> Heard {
        // two nodes of one name have nothing to say to each other here
        if presence.life == self.life || presence.node == self.me.node {
            return Heard::default();
        }
        if presence.word == Word::Leaving {
            self.known.remove(&presence.life);
            return Heard::default();
        }
        if self.known.len() >= self.config.lives && !self.known.contains_key(&presence.life) {
            return Heard { too_many: true, ..Heard::default() };
        }
        if presence.word == Word::Answer {
            self.expected = self.expected.max(presence.nodes as usize);
        }
        let leads = self.me.node < presence.node;
        let known = self.known.entry(presence.life).or_insert_with(|| Known {
            node: presence.node.clone(),
            epoch: presence.epoch,
            expires: now,
            dial: if leads { Dial::Due(now) } else { Dial::Idle },
            attempts: 0,
            dialer: None,
            patience: DIAL_TIMEOUT,
            refused: false,
            tried: false,
            first_heard: now,
            reminded: None,
        });
        let every = Duration::from_millis(u64::from(presence.every_ms)).min(LONGEST_BEAT);
        known.expires = now + every.max(self.config.beat) * SILENT_BEATS;
        let reopened = known.epoch < presence.epoch;
        if reopened {
            known.epoch = presence.epoch;
            known.refused = false;
            (known.attempts, known.dialer) = (0, None);
            known.dial = if leads { Dial::Due(now) } else { Dial::Idle };
        }
        let missed = !leads
            && !known.refused
            && known.dial != Dial::Connected
            && known.reminded.is_none_or(|at| now >= at + REMIND);
        let answer = presence.word == Word::Hello || (missed && presence.word != Word::Answer);
        if answer {
            known.reminded = Some(now);
        }
        Heard { answer, reopened, too_many: false }
    }

    /// There is a raw connection with this life.
    pub(super) fn opened(&mut self, life: LifeId) {
        if let Some(known) = self.known.get_mut(&life) {
            (known.dial, known.dialer) = (Dial::Connected, None);
        }
    }

    /// It is gone.
    pub(super) fn closed(&mut self, life: LifeId, now: Time) {
        let jitter = self.random();
        let (online, leads) =
            (self.online, self.known.get(&life).is_some_and(|known| self.me.node < known.node));
        let Some(known) = self.known.get_mut(&life).filter(|known| known.dial == Dial::Connected) else {
            return;
        };
        known.dial = if leads && online { Dial::Due(now + known.back_off(jitter)) } else { Dial::Idle };
    }

    /// The link with it works.
    pub(super) fn linked(&mut self, node: &NodeId) {
        for known in self.known.values_mut().filter(|known| known.node == *node) {
            (known.attempts, known.tried) = (0, true);
            known.patience = DIAL_TIMEOUT.max(known.patience / 2);
        }
    }

    /// There will be no link with it.
    pub(super) fn refused(&mut self, life: LifeId) {
        if let Some(known) = self.known.get_mut(&life) {
            (known.refused, known.tried) = (true, true);
        }
    }

    pub(super) fn knows(&self, life: LifeId) -> bool {
        self.known.contains_key(&life)
    }

    /// Whose wish this was.
    pub(super) fn asked(&self, dialer: u64) -> Option<(NodeId, LifeId, u64)> {
        let waits = |known: &Known| matches!(known.dial, Dial::Asked { .. } | Dial::Due(_));
        self.known
            .iter()
            .find(|(_, known)| known.dialer == Some(dialer) && waits(known))
            .map(|(life, known)| (known.node.clone(), *life, known.epoch))
    }

    /// NATS is away: nobody can be dialled, and that nobody is heard means nothing.
    pub(super) fn lost(&mut self, now: Time) {
        self.online = false;
        self.lost_at = now;
        for known in self.known.values_mut() {
            known.dial = Dial::Idle;
        }
    }

    /// NATS is there again: everyone is dialled at once.
    pub(super) fn back(&mut self, now: Time) {
        self.online = true;
        self.epoch += 1;
        self.next_beat = now;
        for known in self.known.values_mut() {
            known.expires = known.expires.max(now + self.config.beat * SILENT_BEATS);
            (known.attempts, known.dialer) = (0, None);
            let due = self.me.node < known.node && !known.refused;
            known.dial = if due { Dial::Due(now) } else { Dial::Idle };
        }
    }
}

// Outputs.
impl Directory {
    /// What to say of this node.
    pub(super) fn presence(&self, word: Word, linked: usize) -> Presence {
        Presence {
            node: self.me.node.clone(),
            life: self.life,
            incarnation: self.me.incarnation,
            epoch: self.epoch,
            word,
            every_ms: u32::try_from(self.every().as_millis()).unwrap_or(u32::MAX),
            // who starts itself cannot say how many there are
            nodes: if self.settled { u32::try_from(linked + 1).unwrap_or(u32::MAX) } else { 0 },
        }
    }

    /// Whom to dial now, with the number to dial under.
    pub(super) fn due(&mut self, now: Time) -> Option<(NodeId, LifeId, u64)> {
        if !self.online {
            return None;
        }
        let dialer = self.random();
        let late = |known: &Known| matches!(known.dial, Dial::Asked { until, .. } if until <= now);
        if self.known.values().any(late) {
            let longest = self.config.try_for.max(DIAL_TIMEOUT);
            for known in self.known.values_mut().filter(|known| late(known)) {
                known.dial = Dial::Due(now + known.back_off(dialer));
                known.patience = longest.min(known.patience * 2);
            }
        }
        let due = |known: &Known| matches!(known.dial, Dial::Due(at) if at <= now) && !known.refused;
        let (life, known) = self.known.iter_mut().find(|(_, known)| due(known))?;
        known.dial = Dial::Asked { until: now + known.patience };
        known.dialer = Some(dialer);
        Some((known.node.clone(), *life, dialer))
    }

    /// Whether to say now that this node is there; forgets those who have not said so for long.
    pub(super) fn beat(&mut self, now: Time) -> bool {
        if !self.online || now < self.next_beat {
            return false;
        }
        self.next_beat = now + self.every();
        self.known.retain(|_, known| known.dial == Dial::Connected || known.expires > now);
        true
    }

    /// Whether everyone who is there has been tried; true once.
    pub(super) fn settled(&mut self, now: Time) -> bool {
        if self.settled || !self.online {
            return false;
        }
        let nodes: BTreeSet<&NodeId> = self.known.values().map(|known| &known.node).collect();
        let all_known = self.expected > 0 && nodes.len() >= self.expected;
        if !all_known && now < self.started + self.config.window {
            return false;
        }
        let try_for = self.config.try_for;
        self.settled = self.known.values().all(|known| known.tried || now >= known.first_heard + try_for);
        self.settled
    }

    /// Whether a start has waited long enough for NATS, which was lost meanwhile. Not for ever: nobody is found without
    /// it, and a node that goes on would believe that it is alone.
    pub(super) fn stranded(&self, now: Time) -> bool {
        self.stranded_at().is_some_and(|at| now >= at)
    }

    fn stranded_at(&self) -> Option<Time> {
        let waits = !self.online && !self.settled;
        waits.then(|| self.lost_at + self.config.window + self.config.try_for)
    }

    /// When something is due next.
    pub(super) fn timeout(&self) -> Option<Time> {
        if !self.online {
            return self.stranded_at();
        }
        let dials = self.known.values().filter_map(|known| match known.dial {
            Dial::Due(at) if !known.refused => Some(at),
            Dial::Asked { until, .. } => Some(until),
            Dial::Due(_) | Dial::Idle | Dial::Connected => None,
        });
        let try_for = self.config.try_for;
        let tries = self.known.values().filter(|known| !known.tried).map(|known| known.first_heard + try_for);
        let settling = (!self.settled).then_some(self.started + self.config.window);
        let unsettled = tries.chain(settling).filter(|_| !self.settled);
        dials.chain([self.next_beat]).chain(unsettled).min()
    }

    fn every(&self) -> Duration {
        let nodes = u32::try_from(self.known.len()).unwrap_or(u32::MAX);
        self.config.beat.max(BEAT_PER_NODE.saturating_mul(nodes)).min(LONGEST_BEAT)
    }

    /// A number that nobody guesses, as the seed is drawn from the system (splitmix64).
    pub(super) fn random(&mut self) -> u64 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.random;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}

impl Known {
    /// How long to wait with the next dial: not at all after a link, then longer each time.
    fn back_off(&mut self, random: u64) -> Duration {
        let wait = match self.attempts {
            0 => Duration::ZERO,
            n => REDIAL_MAX.min(REDIAL * (1 << n.min(10))),
        };
        self.attempts = self.attempts.saturating_add(1);
        // a quarter of it at random, so that many do not come at once
        wait.mul_f64(0.75 + (random >> 11) as f64 / (1_u64 << 53) as f64 / 4.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::Incarnation;

    const S: Time = Duration::from_secs(1);

    fn peer(name: &str) -> Peer {
        Peer::new(NodeId::new(name).unwrap(), Incarnation::MIN)
    }

    fn directory(name: &str) -> Directory {
        let config = DirectoryConfig { beat: S, window: S / 2, try_for: 3 * S, lives: 8 };
        Directory::new(peer(name), LifeId(1000), config, 1, Time::ZERO)
    }

    fn says(name: &str, life: u64, word: Word) -> Presence {
        let Peer { node, incarnation } = peer(name);
        Presence { node, life: LifeId(life), incarnation, epoch: 0, word, every_ms: 1000, nodes: 1 }
    }

    #[test]
    fn the_lower_name_dials_and_the_higher_one_answers() {
        let (mut a, mut b) = (directory("a"), directory("b"));
        a.heard(&says("b", 1, Word::Beat), S);
        assert_eq!(a.due(S).map(|(node, ..)| node.to_string()).as_deref(), Some("b"));
        assert_eq!(a.due(S), None, "asked once");
        assert!(b.heard(&says("a", 1, Word::Beat), S).answer, "so that a dials");
        assert!(!b.heard(&says("a", 1, Word::Beat), S).answer, "not each time");
        assert!(!b.heard(&says("a", 1, Word::Answer), 3 * S).answer, "no answer is answered");
        assert_eq!(b.due(S), None);
        b.opened(LifeId(1));
        assert!(!b.heard(&says("a", 1, Word::Beat), 9 * S).answer, "connected");
        assert!(b.heard(&says("a", 1, Word::Hello), 9 * S).answer, "but a hello always is");
    }

    #[test]
    fn a_dial_without_an_answer_is_tried_again_and_later_each_time() {
        let mut a = directory("a");
        a.heard(&says("b", 1, Word::Beat), Time::ZERO);
        let (mut now, mut waits) = (Time::ZERO, Vec::new());
        for _ in 0..12 {
            let asked = now;
            while a.due(now).is_none() {
                now = a.known[&LifeId(1)].next_dial();
            }
            waits.push(now - asked);
        }
        assert_eq!(waits[0], Time::ZERO);
        assert_eq!(waits[1], DIAL_TIMEOUT, "at once when the first was not answered");
        assert!(waits[2..].windows(2).all(|w| w[0] <= w[1] + REDIAL_MAX / 4), "{waits:?}");
        // the time that an answer may take has doubled up to three seconds
        assert!(waits[11] > 3 * S + REDIAL_MAX / 2 && waits[11] <= 3 * S + REDIAL_MAX);
    }

    impl Known {
        fn next_dial(&self) -> Time {
            match self.dial {
                Dial::Due(at) | Dial::Asked { until: at, .. } => at,
                Dial::Idle | Dial::Connected => panic!("{self:?}"),
            }
        }
    }

    #[test]
    fn an_accept_that_is_late_or_of_another_wish_is_not_taken() {
        let mut a = directory("a");
        a.heard(&says("b", 1, Word::Beat), S);
        let (_, life, dialer) = a.due(S).unwrap();
        assert_eq!(a.asked(dialer + 1), None);
        assert_eq!(a.asked(dialer).map(|(_, life, _)| life), Some(LifeId(1)));
        a.opened(life);
        assert_eq!(a.asked(dialer), None, "once");
    }

    /// With a round trip above the fixed 500 ms nobody ever linked: the answer came when the next wish was out.
    #[test]
    fn a_slow_network_is_given_the_time_that_it_needs() {
        for round_trip in [100, 499, 501, 600, 1000, 2500_u32] {
            let round_trip = round_trip * S / 1000;
            let mut a = directory("a");
            a.heard(&says("b", 1, Word::Beat), Time::ZERO);
            let mut asked: Vec<(Time, u64)> = Vec::new();
            let mut now = Time::ZERO;
            while !asked.iter().any(|(at, dialer)| *at + round_trip <= now && a.asked(*dialer).is_some()) {
                assert!(now < 10 * S, "a round trip of {round_trip:?}: {} wishes", asked.len());
                // what comes in is looked at once, when it comes
                asked.retain(|(at, _)| *at + round_trip > now);
                while let Some((_, _, dialer)) = a.due(now) {
                    asked.push((now, dialer));
                }
                now += S / 1000;
            }
            assert!(asked.len() <= 4, "{} wishes under way", asked.len());
        }
    }

    #[test]
    fn an_answer_that_comes_before_the_next_wish_is_taken() {
        let mut a = directory("a");
        a.heard(&says("b", 1, Word::Beat), Time::ZERO);
        let mut now = Time::ZERO;
        let mut last = a.due(now).unwrap().2;
        loop {
            while a.due(now).is_none() && !matches!(a.known[&LifeId(1)].dial, Dial::Due(at) if at > now) {
                now += S / 1000;
            }
            let known = &a.known[&LifeId(1)];
            if matches!(known.dial, Dial::Due(_)) {
                break;
            }
            last = known.dialer.unwrap();
        }
        assert!(
            a.asked(last).is_some(),
            "it waits with the next wish: the answer to the last one is welcome"
        );
        let (.., next) = a.due(now + S).unwrap();
        assert_eq!(a.asked(last), None, "the other end has replaced it");
        assert!(a.asked(next).is_some());
    }

    /// `settled` was never true then, and nothing was due: the start waited for ever.
    #[test]
    fn a_start_does_not_wait_for_ever_for_nats() {
        let mut a = directory("a");
        a.lost(S);
        let end = S + S / 2 + 3 * S;
        assert_eq!(a.timeout(), Some(end));
        assert!(!a.settled(60 * S) && !a.stranded(end - S / 1000) && a.stranded(end));
        a.back(2 * S);
        assert!(!a.stranded(60 * S));
        assert!(a.settled(60 * S));
        a.lost(61 * S);
        assert!(!a.stranded(600 * S), "once it runs it waits as long as it takes");
    }

    #[test]
    fn who_starts_itself_does_not_say_how_many_there_are() {
        let (mut a, mut b) = (directory("a"), directory("b"));
        let answer = Presence { life: LifeId(7), ..a.presence(Word::Answer, 0) };
        b.heard(&answer, Time::ZERO);
        b.linked(&NodeId::new("a").unwrap());
        assert!(!b.settled(Time::ZERO), "it knows as little: others may answer");
        assert!(a.settled(S / 2));
        b.heard(&Presence { life: LifeId(7), ..a.presence(Word::Answer, 0) }, S / 10);
        assert!(b.settled(S / 10), "that one knows");
    }

    #[test]
    fn who_was_away_is_dialled_anew() {
        let mut a = directory("a");
        a.heard(&says("b", 1, Word::Beat), S);
        a.due(S);
        a.opened(LifeId(1));
        assert!(!a.heard(&says("b", 1, Word::Beat), S).reopened);
        let back = Presence { epoch: 1, ..says("b", 1, Word::Back) };
        assert!(a.heard(&back, S).reopened);
        assert!(!a.heard(&back, S).reopened, "once");
        assert!(a.due(S).is_some());
    }

    #[test]
    fn while_nats_is_away_nobody_is_dialled_or_forgotten() {
        let mut a = directory("a");
        a.heard(&says("b", 1, Word::Beat), S);
        assert!(!a.settled(S) && a.settled(9 * S), "the start is over");
        a.lost(9 * S);
        assert_eq!((a.due(9 * S), a.beat(9 * S), a.timeout()), (None, false, None));
        a.back(60 * S);
        assert!(a.beat(60 * S));
        assert!(a.due(60 * S).is_some());
        assert_eq!(a.presence(Word::Beat, 0).epoch, 1);
    }

    #[test]
    fn the_silent_and_the_leaving_are_forgotten_and_the_connected_are_not() {
        let mut b = directory("b");
        for life in 1..=3 {
            b.heard(&says(["a", "c", "d"][life as usize - 1], life, Word::Beat), Time::ZERO);
        }
        b.opened(LifeId(1));
        b.heard(&says("d", 3, Word::Leaving), S);
        assert_eq!(b.known.len(), 2);
        assert!(b.beat(4 * S));
        assert_eq!(b.known.keys().collect::<Vec<_>>(), [&LifeId(1)]);
    }

    #[test]
    fn lives_are_bounded_and_own_names_are_not_dialled() {
        let mut b = directory("b");
        assert_eq!(b.heard(&says("b", 77, Word::Hello), S), Heard::default());
        for life in 1..=8 {
            assert!(!b.heard(&says("c", life, Word::Beat), S).too_many);
        }
        assert!(b.heard(&says("c", 9, Word::Beat), S).too_many);
        assert!(b.knows(LifeId(8)) && !b.knows(LifeId(9)) && !b.knows(LifeId(77)));
        assert_eq!(b.known.len(), 8);
    }

    #[test]
    fn discovery_settles_when_all_are_tried_or_the_window_is_over() {
        let mut alone = directory("b");
        assert!(!alone.settled(Time::ZERO));
        assert_eq!(alone.timeout(), Some(Time::ZERO), "the first beat");
        assert!(alone.settled(S / 2));
        assert!(!alone.settled(S), "once");

        let mut b = directory("b");
        b.heard(&Presence { nodes: 2, ..says("a", 1, Word::Answer) }, Time::ZERO);
        b.heard(&Presence { nodes: 2, ..says("c", 2, Word::Answer) }, Time::ZERO);
        assert!(!b.settled(S), "heard of, not tried");
        b.linked(&NodeId::new("a").unwrap());
        assert!(!b.settled(S));
        b.refused(LifeId(2));
        assert!(b.settled(Time::ZERO), "all are known: no need to wait for the window");

        let mut b = directory("b");
        b.heard(&says("a", 1, Word::Answer), Time::ZERO);
        assert!(!b.settled(2 * S));
        assert!(b.settled(3 * S), "it does not wait for ever");
    }
}
