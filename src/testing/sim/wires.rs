//! The part of the scheduler that is about raw connections: what moves on them, and how they fail.

use super::cluster::Cluster;
use super::links::Linked;
use super::network::End;
use super::schedule::Scheduler;
use super::step::{LinkStep, Place, Seen, Step};

impl Scheduler {
    /// Something that moves between two link layers, or between one and its node.
    pub(super) fn wire(&mut self, cluster: &Cluster) -> Option<Step> {
        let linked = cluster.linked.as_ref()?;
        let nodes = cluster.len();
        let first = self.random.below(nodes * nodes);
        let order = self.random.below(4);
        for offset in 0..nodes * nodes {
            let at = (first + offset) % (nodes * nodes);
            let (a, b) = (at / nodes, at % nodes);
            let (pa, pb) = (a as Place, b as Place);
            if a == b {
                // others may act meanwhile
                if linked.is_pending(a) && self.random.one_in(4) {
                    return Some(Step::Link(LinkStep::Report(pa)));
                }
                if linked.is_due(a, cluster.now()) {
                    return Some(Step::Link(LinkStep::Tick(pa)));
                }
                continue;
            }
            let (link, side) = cluster.net().link(a, b);
            if link.room[side] {
                return Some(Step::Room(pa, pb));
            }
            let sends = link.wake[side] && link.ends[side] == End::Up;
            if sends && order > 1 {
                return Some(Step::Send(pa, pb));
            }
            if self.lagging.contains(&(a, b)) || linked.is_pending(b) {
                continue;
            }
            let ready = linked.pipes.ready(a, b);
            if ready > 0 {
                let nth = self.random.below(ready) as u8;
                let later = self.random.one_in(4);
                return Some(Step::Link(LinkStep::Carry { from: pa, to: pb, nth, later }));
            }
            if sends {
                return Some(Step::Send(pa, pb));
            }
            if linked.may_dial(a, b, cluster.now()) {
                return Some(Step::Link(LinkStep::Dial(pa, pb)));
            }
        }
        let pending = (0..nodes).find(|place| linked.is_pending(*place))?;
        Some(Step::Link(LinkStep::Report(pending as Place)))
    }

    /// Something that goes wrong between two places, or is mended.
    pub(super) fn wire_fault(&mut self, linked: &Linked, a: usize, b: usize) -> Option<Step> {
        let (pa, pb) = (a as Place, b as Place);
        let nth = self.random.below(4) as u8;
        let keep = [0, 0, 1, 3, 250][self.random.below(5)];
        if linked.pipes.is_held(a, b) && self.random.one_in(2) {
            return Some(Step::Link(LinkStep::Release(pa, pb)));
        }
        if linked.pipes.is_cut(a, b) {
            let mend = self.random.one_in(2);
            return mend.then_some(Step::Link(LinkStep::Mend(pa, pb)));
        }
        if !self.random.one_in(self.temper.link_fault) {
            return None;
        }
        let step = match self.random.below(16) {
            0..=3 => LinkStep::Break { at: pa, of: pb, nth, keep, seen: Seen::Both },
            4 | 5 => LinkStep::Break { at: pa, of: pb, nth, keep, seen: Seen::One },
            6 => LinkStep::Break { at: pa, of: pb, nth, keep, seen: Seen::Nobody },
            7 | 8 => {
                let seen = [Seen::Both, Seen::One, Seen::One, Seen::Nobody][self.random.below(4)];
                LinkStep::Cut { at: pa, of: pb, seen }
            }
            9 | 10 => LinkStep::Hold(pa, pb),
            11 => LinkStep::Drop { from: pa, to: pb, nth },
            12 => LinkStep::Repeat { from: pa, to: pb, nth },
            13 => LinkStep::Disconnect(pa, pb),
            _ => LinkStep::Dial(pa, pb),
        };
        Some(Step::Link(step))
    }

    /// The end of a node.
    pub(super) fn end_of(&mut self, place: Place) -> Step {
        match self.random.below(4) {
            0 => Step::Link(LinkStep::Stop(place)),
            1 => Step::Link(LinkStep::Vanish(place)),
            _ => Step::Crash(place),
        }
    }

    /// Often a node that has yet to be told what its link layer has decided: what it sends meanwhile is the hard case.
    pub(super) fn untold(&mut self, cluster: &Cluster) -> Option<Place> {
        let linked = cluster.linked.as_ref()?;
        let pending = (0..cluster.len()).find(|place| linked.is_pending(*place))?;
        self.random.one_in(2).then_some(pending as Place)
    }

    /// What stands between two places is taken away.
    pub(super) fn mend_wire(cluster: &Cluster, linked: &Linked) -> Option<Step> {
        cluster.net().pairs().find_map(|(a, b)| {
            let (pa, pb) = (a as Place, b as Place);
            if linked.pipes.is_held(a, b) {
                return Some(Step::Link(LinkStep::Release(pa, pb)));
            }
            if linked.pipes.is_held(b, a) {
                return Some(Step::Link(LinkStep::Release(pb, pa)));
            }
            linked.pipes.is_cut(a, b).then_some(Step::Link(LinkStep::Mend(pa, pb)))
        })
    }

    /// Time, if that is what is missing: somebody has to find out that a connection is silent.
    pub(super) fn wait(&mut self, cluster: &Cluster) -> Option<Step> {
        let waits = cluster.linked.is_some() && !cluster.is_meshed();
        waits.then(|| Step::Time(self.random.between(1, 60) as u32))
    }
}
