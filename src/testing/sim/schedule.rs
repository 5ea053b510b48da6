//! Draws the next step of a schedule: mostly frames and work, sometimes a fault.

use super::cluster::Cluster;
use super::network::End;
use super::random::Random;
use super::step::{CastKind, Place, Step};
use crate::transport::Lane;

/// How a run is to be: drawn from its seed.
#[derive(Clone, Debug)]
pub(super) struct Temper {
    /// One in so many looks at a healthy link ends in a fault.
    pub(super) link_fault: usize,
    /// One in so many looks at a running node ends in a crash.
    pub(super) crash: usize,
    /// One in so many looks at a running node ends in a drain.
    pub(super) drain: usize,
    /// Of 1000 steps, how many are joins, leaves, broadcasts, looks at links and looks at nodes.
    pub(super) join: usize,
    pub(super) leave: usize,
    pub(super) cast: usize,
    pub(super) link: usize,
    pub(super) node: usize,
    /// Of 1000 steps, how many let time go by, and how many milliseconds at most.
    pub(super) time: usize,
    pub(super) time_step: usize,
    /// Whether frames of random links are delivered, or some links are left behind.
    pub(super) lag: usize,
    /// How many groups are used.
    pub(super) groups: usize,
    /// Few faults at a time, each time from a cluster that is whole again: that is how most faults of
    /// protocols show, while a storm hides them.
    pub(super) bursts: bool,
}

impl Temper {
    pub(super) fn draw(random: &mut Random, groups: usize) -> Self {
        let pick = |random: &mut Random, of: &[usize]| of[random.below(of.len())];
        Self {
            link_fault: pick(random, &[2, 4, 8, 16, 40]),
            crash: pick(random, &[3, 6, 12, 40, 100_000]),
            drain: pick(random, &[30, 200, 100_000, 100_000]),
            join: pick(random, &[10, 30, 60]),
            leave: pick(random, &[5, 20, 40]),
            cast: pick(random, &[20, 60, 120]),
            link: pick(random, &[10, 30, 60]),
            node: pick(random, &[3, 8, 15]),
            time: pick(random, &[15, 40, 80]),
            time_step: pick(random, &[2, 10, 60, 300]),
            lag: pick(random, &[0, 0, 2, 6]),
            groups,
            bursts: random.below(3) > 0,
        }
    }
}

/// The scheduler: a seed and a temper.
#[derive(Clone, Debug)]
pub(super) struct Scheduler {
    pub(super) random: Random,
    pub(super) temper: Temper,
    /// Directions that are left behind for a while.
    pub(super) lagging: Vec<(usize, usize)>,
    /// The pair that most faults of a burst are about.
    pub(super) focus: (usize, usize),
    /// Whether the dead come back while the cluster is mended.
    revive: bool,
    mood: Mood,
}

/// Where a run in bursts stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mood {
    /// Everything is mended, for at most so many more steps.
    Mend(usize),
    /// So many faults may still happen, within so many steps.
    Burst { faults: usize, steps: usize },
}

impl Scheduler {
    pub(super) fn new(random: Random, temper: Temper) -> Self {
        Self { random, temper, lagging: Vec::new(), focus: (0, 1), revive: true, mood: Mood::Mend(0) }
    }

    /// The next step of the phase with faults.
    pub(super) fn next(&mut self, cluster: &Cluster) -> Step {
        if !self.temper.bursts {
            return self.storm(cluster);
        }
        match self.mood {
            Mood::Mend(0) => {
                let steps = [12, 40, 120, 400][self.random.below(4)];
                self.mood = Mood::Burst { faults: self.random.between(1, 6), steps };
                let nodes = cluster.len();
                let pair = |random: &mut Random| {
                    let a = random.below(nodes);
                    (a, (a + random.between(1, nodes.max(2) - 1)) % nodes)
                };
                self.focus = pair(&mut self.random);
                let slow = self.random.below(4);
                self.lagging = (0..slow).map(|_| pair(&mut self.random)).collect();
                self.burst(cluster)
            }
            Mood::Mend(left) => {
                self.mood = Mood::Mend(left - 1);
                if let Some(step) = self.mend(cluster).or_else(|| self.movement(cluster)) {
                    return step;
                }
                if let Some(step) = self.wait(cluster) {
                    return step;
                }
                self.mood = Mood::Mend(0);
                Step::Quiet
            }
            Mood::Burst { faults, steps } => {
                self.mood = match steps {
                    0 => {
                        self.lagging.clear();
                        self.revive = self.random.one_in(2);
                        Mood::Mend(600)
                    }
                    _ => Mood::Burst { faults, steps: steps - 1 },
                };
                self.burst(cluster)
            }
        }
    }

    fn burst(&mut self, cluster: &Cluster) -> Step {
        let Mood::Burst { faults, steps } = self.mood else { return self.storm(cluster) };
        if faults > 0 && self.random.one_in(8) {
            let fault = match self.random.below(6) {
                0 | 1 => self.node(cluster),
                _ => self.link(cluster),
            };
            if let Some(fault) = fault {
                self.mood = Mood::Burst { faults: faults - 1, steps };
                return fault;
            }
        }
        match self.random.below(16) {
            0 => Step::Join(self.place(cluster), self.group()),
            1 => self.cast(cluster),
            2 => match self.random.below(4) {
                0 => Step::Time(self.random.between(1, self.temper.time_step) as u32),
                1 => Step::Timeout(self.place(cluster)),
                2 => self.leave(cluster).unwrap_or(Step::Timeout(self.place(cluster))),
                _ => self.half_told(cluster).unwrap_or(Step::Timeout(self.place(cluster))),
            },
            _ => self.movement(cluster).unwrap_or_else(|| self.cast(cluster)),
        }
    }

    /// Tells the other end of a link what the first one knows.
    fn half_told(&mut self, cluster: &Cluster) -> Option<Step> {
        if cluster.linked.is_some() {
            return self.wire(cluster);
        }
        let lose = self.random.one_in(2);
        cluster.net().pairs().find_map(|(a, b)| {
            let (link, side) = cluster.net().link(a, b);
            let (pa, pb) = (a as Place, b as Place);
            if link.old[side].is_some() {
                return Some(Step::Down { at: pa, of: pb, lose });
            }
            if link.old[1 - side].is_some() {
                return Some(Step::Down { at: pb, of: pa, lose });
            }
            match (link.ends[side], link.ends[1 - side]) {
                (End::Up, End::Waiting) => Some(Step::Up(pb, pa)),
                (End::Waiting, End::Up) => Some(Step::Up(pa, pb)),
                (End::Up, End::Gone) => Some(Step::Down { at: pa, of: pb, lose }),
                (End::Gone, End::Up) => Some(Step::Down { at: pb, of: pa, lose }),
                _ => None,
            }
        })
    }

    /// The next thing that is broken is mended; dead nodes mostly come back.
    fn mend(&mut self, cluster: &Cluster) -> Option<Step> {
        if !self.random.one_in(4) {
            return None;
        }
        for place in 0..cluster.len() {
            if cluster.node(place).is_none() && self.revive && self.random.one_in(6) {
                return Some(Step::Start(place as Place));
            }
            if cluster.node(place).is_some() && !cluster.is_settled(place) {
                return Some(Step::Settle(place as Place));
            }
        }
        if let Some(linked) = &cluster.linked {
            return Self::mend_wire(cluster, linked);
        }
        if let Some(step) = self.half_told(cluster) {
            return Some(step);
        }
        cluster.net().pairs().find_map(|(a, b)| {
            let (link, side) = cluster.net().link(a, b);
            let (pa, pb) = (a as Place, b as Place);
            if link.closed() {
                let both = cluster.node(a).is_some() && cluster.node(b).is_some();
                return both.then_some(Step::Up(pa, pb));
            }
            if link.suspect[side] {
                return Some(Step::Resume { at: pa, of: pb });
            }
            if link.suspect[1 - side] {
                return Some(Step::Resume { at: pb, of: pa });
            }
            if link.blocked[side] {
                return Some(Step::Unblock(pa, pb));
            }
            link.blocked[1 - side].then_some(Step::Unblock(pb, pa))
        })
    }

    fn storm(&mut self, cluster: &Cluster) -> Step {
        let temper = self.temper.clone();
        let mut roll = self.random.below(1000);
        let mut among = |share: usize| {
            let hit = roll < share;
            roll = roll.wrapping_sub(share);
            hit
        };
        let step = if among(temper.join) {
            Some(Step::Join(self.place(cluster), self.group()))
        } else if among(temper.leave) {
            self.leave(cluster)
        } else if among(2) {
            Some(Step::Cancel(self.place(cluster), self.random.below(8) as u8))
        } else if among(temper.cast) {
            Some(self.cast(cluster))
        } else if among(temper.link) {
            self.link(cluster)
        } else if among(temper.node) {
            self.node(cluster)
        } else if among(temper.time) {
            Some(Step::Time(self.random.between(1, temper.time_step) as u32))
        } else if among(25) {
            Some(Step::Timeout(self.place(cluster)))
        } else {
            self.movement(cluster)
        };
        step.unwrap_or_else(|| match self.random.one_in(3) {
            true => Step::Time(self.random.between(1, 40) as u32),
            false => Step::Timeout(self.place(cluster)),
        })
    }

    fn place(&mut self, cluster: &Cluster) -> Place {
        self.random.below(cluster.len()) as Place
    }

    fn group(&mut self) -> u16 {
        self.random.below(self.temper.groups) as u16
    }

    fn leave(&mut self, cluster: &Cluster) -> Option<Step> {
        for _ in 0..8 {
            let group = self.group();
            let members = cluster.oracle().members(usize::from(group));
            if !members.is_empty() {
                let member = members[self.random.below(members.len())];
                return Some(Step::Leave(member.at.place as Place, group, self.random.below(256) as u8));
            }
        }
        None
    }

    fn cast(&mut self, cluster: &Cluster) -> Step {
        let place = self.untold(cluster).unwrap_or_else(|| self.place(cluster));
        let mut group = self.group();
        for _ in 0..3 {
            if !cluster.oracle().members(usize::from(group)).is_empty() {
                break;
            }
            group = self.group();
        }
        let kind = match self.random.below(16) {
            0 => CastKind::ExceptOwn,
            1 => CastKind::ExceptOther,
            2 => CastKind::AtMostOnce,
            3 => CastKind::OneNode,
            _ => CastKind::All,
        };
        Step::Cast(place, group, kind)
    }

    fn link(&mut self, cluster: &Cluster) -> Option<Step> {
        let nodes = cluster.len();
        if nodes < 2 {
            return None;
        }
        let a = self.random.below(nodes);
        let b = (a + self.random.between(1, nodes - 1)) % nodes;
        let about = self.temper.bursts && self.random.one_in(2);
        let (a, b) = match (about, self.random.one_in(2)) {
            (true, true) => self.focus,
            (true, false) => (self.focus.1, self.focus.0),
            (false, _) => (a, b),
        };
        if let Some(linked) = &cluster.linked {
            return self.wire_fault(linked, a, b);
        }
        let (link, side) = cluster.net().link(a, b);
        let (pa, pb) = (a as Place, b as Place);
        let lose = self.random.one_in(2);
        if link.old[side].is_some() {
            return Some(Step::Down { at: pa, of: pb, lose });
        }
        let reborn = cluster.node(a).is_some() && link.lives[side] != cluster.life(a).life;
        if link.closed() {
            let both = cluster.node(a).is_some() && cluster.node(b).is_some();
            return both.then_some(Step::Up(pa, pb));
        }
        match (link.ends[side], link.ends[1 - side]) {
            (End::Up, End::Waiting) if self.random.one_in(4) => Some(Step::Down { at: pa, of: pb, lose }),
            (End::Up, End::Waiting) => Some(Step::Up(pb, pa)),
            (End::Waiting, End::Up) => Some(Step::Up(pa, pb)),
            (End::Up, End::Gone) => Some(Step::Down { at: pa, of: pb, lose }),
            (End::Gone, End::Up) if reborn && self.random.one_in(2) => Some(Step::Up(pa, pb)),
            (End::Gone, End::Up) => Some(Step::Down { at: pb, of: pa, lose }),
            (End::Up, End::Up) if link.suspect[side] => match self.random.below(3) {
                0 => Some(Step::Down { at: pa, of: pb, lose }),
                _ => Some(Step::Resume { at: pa, of: pb }),
            },
            (End::Up, End::Up) if link.blocked[side] => match self.random.below(4) {
                0 => Some(Step::Down { at: pa, of: pb, lose }),
                1 => Some(Step::Suspect { at: pb, of: pa, blocked: true }),
                _ => Some(Step::Unblock(pa, pb)),
            },
            (End::Up, End::Up) if self.random.one_in(self.temper.link_fault) => match self.random.below(4) {
                0 => Some(Step::Suspect { at: pa, of: pb, blocked: self.random.one_in(2) }),
                1 => Some(Step::Block(pa, pb)),
                _ => Some(Step::Down { at: pa, of: pb, lose }),
            },
            _ => None,
        }
    }

    fn node(&mut self, cluster: &Cluster) -> Option<Step> {
        let about = self.temper.bursts && self.random.one_in(2);
        let focus = if self.random.one_in(2) { self.focus.0 } else { self.focus.1 };
        let place = if about { focus as Place } else { self.place(cluster) };
        let at = usize::from(place);
        if cluster.node(at).is_none() {
            return Some(Step::Start(place));
        }
        if !cluster.is_settled(at) {
            return Some(Step::Settle(place));
        }
        if self.random.one_in(self.temper.crash) {
            if cluster.linked.is_some() {
                return Some(self.end_of(place));
            }
            return Some(Step::Crash(place));
        }
        if self.random.one_in(self.temper.drain) && !cluster.is_drained(at) {
            return Some(Step::Drain(place));
        }
        None
    }

    /// A frame, a sender or a bit of work; `None` if nothing is due.
    pub(super) fn movement(&mut self, cluster: &Cluster) -> Option<Step> {
        let nodes = cluster.len();
        if self.random.one_in(6) {
            let first = self.random.below(nodes);
            for offset in 0..nodes {
                let place = (first + offset) % nodes;
                if cluster.has_work(place) {
                    return Some(Step::Work(place as Place));
                }
            }
        }
        if !self.temper.bursts && self.temper.lag > 0 && self.random.one_in(100) {
            let a = self.random.below(nodes);
            let b = self.random.below(nodes);
            self.lagging.clear();
            if a != b && self.random.below(8) < self.temper.lag {
                self.lagging.push((a, b));
            }
        }
        match self.frame(cluster) {
            Some(step) => Some(step),
            None => {
                if !matches!(self.mood, Mood::Burst { .. }) {
                    self.lagging.clear();
                }
                (0..nodes).find(|place| cluster.has_work(*place)).map(|place| Step::Work(place as Place))
            }
        }
    }

    fn frame(&mut self, cluster: &Cluster) -> Option<Step> {
        if cluster.linked.is_some() {
            return self.wire(cluster);
        }
        let nodes = cluster.len();
        let first = self.random.below(nodes * nodes);
        let lanes = self.random.below(3);
        let send_first = self.random.one_in(2);
        for offset in 0..nodes * nodes {
            let at = (first + offset) % (nodes * nodes);
            let (a, b) = (at / nodes, at % nodes);
            if a == b || self.lagging.contains(&(a, b)) {
                continue;
            }
            let (link, side) = cluster.net().link(a, b);
            if !link.open {
                continue;
            }
            if link.room[side] {
                return Some(Step::Room(a as Place, b as Place));
            }
            let due = link.wake[side] && link.connected();
            if due && send_first {
                return Some(Step::Send(a as Place, b as Place));
            }
            for turn in 0..3 {
                let lane = Lane::ALL[(lanes + turn) % 3];
                if link.may_deliver(side, lane) {
                    return Some(Step::Deliver(a as Place, b as Place, lane));
                }
            }
            if due {
                return Some(Step::Send(a as Place, b as Place));
            }
        }
        None
    }
}
