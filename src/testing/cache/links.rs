//! The network: one link a pair, opened and closed at one end first, three lanes a direction, each in order and
//! with a delay.

use std::collections::VecDeque;
use std::time::Duration;

use bytes::Bytes;

/// What one end of a session knows of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum End {
    /// It has not been told yet.
    Waiting,
    /// It has been told that the other is up.
    Up,
    /// It has been told that the other is down, or has died.
    #[default]
    Gone,
}

/// What is on its way: which shard it is for, and the encoded message.
#[derive(Clone, Debug)]
pub(super) struct Frame {
    pub(super) shard: usize,
    pub(super) bytes: Bytes,
}

/// One direction of one lane.
#[derive(Clone, Debug, Default)]
pub(super) struct Queue {
    pub(super) frames: VecDeque<Frame>,
    /// When the last frame arrives.
    pub(super) last: Duration,
    /// How many frames were ever sent here.
    pub(super) sent: u64,
}

/// Both directions between two places, from the side of the lower one (0) and the higher one (1).
#[derive(Clone, Debug, Default)]
pub(super) struct Link {
    /// Counts the sessions of this pair.
    pub(super) session: u32,
    pub(super) ends: [End; 2],
    /// It may not come back before it is healed.
    pub(super) cut: bool,
    /// The lives at both ends of this session.
    pub(super) lives: [u64; 2],
    /// Nothing is delivered from this end.
    pub(super) blocked: [bool; 2],
    /// What this end sends takes so much more.
    pub(super) slow: [Duration; 2],
    pub(super) lanes: [[Queue; 3]; 2],
}

impl Link {
    pub(super) fn closed(&self) -> bool {
        self.ends == [End::Gone; 2]
    }

    pub(super) fn is_up(&self) -> bool {
        self.ends == [End::Up; 2]
    }

    pub(super) fn begin(&mut self, lives: [u64; 2]) {
        self.session += 1;
        self.lives = lives;
        self.ends = [End::Waiting; 2];
        self.clear(0);
        self.clear(1);
    }

    /// What `side` has sent and has not arrived is lost.
    pub(super) fn clear(&mut self, side: usize) {
        self.lanes[side].iter_mut().for_each(|queue| {
            queue.frames.clear();
            queue.last = Duration::ZERO;
        });
    }

    pub(super) fn in_flight(&self) -> usize {
        self.lanes.iter().flatten().map(|queue| queue.frames.len()).sum()
    }
}

/// All links.
#[derive(Clone, Debug)]
pub(super) struct Links {
    places: usize,
    links: Vec<Link>,
}

impl Links {
    pub(super) fn new(places: usize) -> Self {
        Self { places, links: vec![Link::default(); places * places] }
    }

    /// The link between two places, and which side of it the first one is.
    pub(super) fn get(&self, a: usize, b: usize) -> (&Link, usize) {
        (&self.links[a.min(b) * self.places + a.max(b)], usize::from(a > b))
    }

    pub(super) fn get_mut(&mut self, a: usize, b: usize) -> (&mut Link, usize) {
        (&mut self.links[a.min(b) * self.places + a.max(b)], usize::from(a > b))
    }

    /// Every pair, the lower place first.
    pub(super) fn pairs(&self) -> impl Iterator<Item = (usize, usize)> + use<> {
        let places = self.places;
        (0..places).flat_map(move |a| (a + 1..places).map(move |b| (a, b)))
    }

    pub(super) fn in_flight(&self) -> usize {
        self.links.iter().map(Link::in_flight).sum()
    }
}
