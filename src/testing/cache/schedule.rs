//! Draws the next step of a run from its seed.

use super::cluster::Cluster;
use super::oracle::Kind;
use super::step::{Place, ReadKind, Step, WriteKind};
use crate::cache::{ReadMode, WriteMode};
use crate::testing::sim::Random;

/// How a run is: chances in a thousand steps, and sizes.
#[derive(Clone, Debug)]
pub(super) struct Temper {
    node: usize,
    link: usize,
    write: usize,
    read: usize,
    /// The longest single wait, in milliseconds.
    wait: usize,
    /// How many writes in ten are `Async`.
    loose: usize,
    /// How many writes in a hundred delete many.
    broad: usize,
    /// Everything is mended from time to time.
    bursts: bool,
    /// Nobody waits between the steps of a burst for longer than this, in milliseconds.
    rush: usize,
}

impl Temper {
    pub(super) fn draw(random: &mut Random) -> Self {
        let pick = |random: &mut Random, of: &[usize]| of[random.below(of.len())];
        Self {
            node: pick(random, &[4, 12, 30, 60]),
            link: pick(random, &[5, 20, 60]),
            write: pick(random, &[100, 250, 450]),
            read: pick(random, &[80, 200, 300]),
            wait: pick(random, &[8, 30, 100, 400]),
            loose: pick(random, &[0, 1, 5, 10]),
            broad: pick(random, &[0, 2, 10]),
            bursts: !random.one_in(4),
            rush: pick(random, &[3, 20, 120]),
        }
    }
}

#[derive(Clone, Copy, Debug)]
enum Mood {
    /// Everything is mended, for at most so many more steps.
    Mend(usize),
    /// So many faults within so many steps.
    Burst { faults: usize, steps: usize },
}

/// The scheduler: a seed and a temper.
#[derive(Clone, Debug)]
pub(super) struct Scheduler {
    random: Random,
    temper: Temper,
    mood: Mood,
    /// Where each session is.
    homes: Vec<usize>,
}

impl Scheduler {
    pub(super) fn new(random: Random, temper: Temper) -> Self {
        Self { random, temper, mood: Mood::Mend(0), homes: vec![0; 256] }
    }

    /// The next step of the phase with faults.
    pub(super) fn next(&mut self, cluster: &Cluster) -> Step {
        if !self.temper.bursts {
            return self.storm(cluster);
        }
        match self.mood {
            Mood::Mend(0) => {
                let steps = [8, 30, 90][self.random.below(3)];
                self.mood = Mood::Burst { faults: self.random.between(1, 5), steps };
                self.storm(cluster)
            }
            Mood::Mend(left) => {
                self.mood = Mood::Mend(left - 1);
                if cluster.is_whole() && self.random.one_in(4) {
                    self.mood = Mood::Mend(0);
                }
                self.mend(cluster)
            }
            Mood::Burst { steps: 0, .. } => {
                self.mood = Mood::Mend([40, 100][self.random.below(2)]);
                Step::HealAll
            }
            Mood::Burst { faults, steps } => {
                let fault = faults > 0 && self.random.below(steps + 1) < 2 * faults;
                self.mood = Mood::Burst { faults: faults - usize::from(fault), steps: steps - 1 };
                match fault {
                    true if self.random.one_in(2) => self.node(cluster),
                    true => self.link(cluster),
                    false => self.work(cluster, self.temper.rush),
                }
            }
        }
    }

    fn mend(&mut self, cluster: &Cluster) -> Step {
        let place = self.place(cluster);
        if !cluster.is_running(place) && self.random.one_in(3) {
            return Step::Start(place as Place);
        }
        if cluster.is_running(place) && !cluster.is_open(place) {
            return Step::Open(place as Place);
        }
        if self.random.one_in(2) {
            return Step::Time(self.random.between(1, 200) as u16);
        }
        self.work(cluster, self.temper.wait)
    }

    fn storm(&mut self, cluster: &Cluster) -> Step {
        let roll = self.random.below(1000);
        let Temper { node, link, .. } = self.temper;
        if roll < node {
            self.node(cluster)
        } else if roll < node + link {
            self.link(cluster)
        } else {
            self.work(cluster, self.temper.wait)
        }
    }

    fn work(&mut self, cluster: &Cluster, wait: usize) -> Step {
        let roll = self.random.below(1000);
        let Temper { write, read, .. } = self.temper;
        if roll < write {
            self.write(cluster)
        } else if roll < write + read {
            self.read(cluster)
        } else if roll < write + read + 3 {
            Step::Cancel(self.place(cluster) as Place)
        } else {
            Step::Time(self.random.between(1, wait) as u16)
        }
    }

    fn place(&mut self, cluster: &Cluster) -> usize {
        self.random.below(cluster.len())
    }

    /// A session, and the node that it is on now: it moves from time to time.
    fn session(&mut self, cluster: &Cluster) -> (Place, u8) {
        let session = self.random.below(cluster.setup().sessions.into());
        if self.random.one_in(4) || !cluster.is_open(self.homes[session] % cluster.len()) {
            self.homes[session] = self.place(cluster);
        }
        ((self.homes[session] % cluster.len()) as Place, session as u8)
    }

    fn write(&mut self, cluster: &Cluster) -> Step {
        let (place, session) = self.session(cluster);
        let key = self.random.below(cluster.setup().keys.into()) as u8;
        let mode = match self.random.below(10) < self.temper.loose {
            true => WriteMode::Async,
            false => WriteMode::Sync,
        };
        let kind = if self.random.below(100) < self.temper.broad {
            match self.random.below(3) {
                0 => WriteKind::DeleteAll(key),
                _ => WriteKind::DeleteMatch(key, self.random.below(3) as u8),
            }
        } else {
            match self.random.below(12) {
                0..=6 => WriteKind::Put(key),
                7 | 8 => WriteKind::Batch(key, self.random.between(2, 6) as u8),
                _ => WriteKind::Delete(key),
            }
        };
        Step::Write(place, session, kind, mode)
    }

    fn read(&mut self, cluster: &Cluster) -> Step {
        let (place, session) = self.session(cluster);
        let key = self.random.below(cluster.setup().keys.into()) as u8;
        let kind = match self.random.one_in(5) {
            true => ReadKind::All(key),
            false => ReadKind::Get(key),
        };
        let mode = [ReadMode::Local, ReadMode::Primary, ReadMode::Quorum][self.random.below(3)];
        Step::Read(place, session, kind, mode, self.random.one_in(2))
    }

    fn node(&mut self, cluster: &Cluster) -> Step {
        let at = self.place(cluster);
        let place = at as Place;
        if !cluster.is_running(at) {
            return Step::Start(place);
        }
        if !cluster.is_open(at) {
            return Step::Open(place);
        }
        let split = cluster.setup().kind == Kind::Split;
        match self.random.below(8) {
            0 | 1 => Step::Drain(place),
            2 if !split => Step::Close(place),
            _ if split => self.link(cluster),
            _ => Step::Crash(place),
        }
    }

    fn link(&mut self, cluster: &Cluster) -> Step {
        let a = self.place(cluster);
        let b = (a + self.random.between(1, cluster.len().max(2) - 1)) % cluster.len();
        let (pa, pb) = (a as Place, b as Place);
        let gap = [2, 30, 200, 700][self.random.below(4)];
        let gap = self.random.below(gap) as u16;
        if cluster.is_cut(a, b) && self.random.one_in(2) {
            return Step::Heal(pa, pb);
        }
        if cluster.setup().kind == Kind::Whole {
            return match self.random.below(3) {
                0 => Step::Blip(pa, pb, gap),
                1 => Step::Heal(pa, pb),
                _ => Step::Slow(pa, pb, [5, 50, 300, 900][self.random.below(4)]),
            };
        }
        match self.random.below(8) {
            0 | 1 => Step::Cut(pa, pb, gap),
            2 => Step::Block(pa, pb),
            3 => Step::Blip(pa, pb, gap),
            4 => Step::Slow(pa, pb, [5, 50, 300, 900][self.random.below(4)]),
            5 => Step::HealAll,
            _ => Step::Split(self.random.below(1 << cluster.len()) as u8),
        }
    }
}
