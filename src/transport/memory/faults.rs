//! What can go wrong between two nodes, as stackable rules.

use std::collections::BTreeMap;
use std::ops::Range;
use std::time::Duration;

use tokio::time::Instant;

use super::connection::Late;
use crate::transport::Lane;
use crate::types::NodeId;

/// Names a rule, to take it away again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RuleId(pub(super) u64);

/// What happens to packets. Chances are in percent, drawn from the network's seed.
#[derive(Clone, Debug, PartialEq)]
pub enum Fault {
    /// They are late by something in this range; their order stays.
    Delay(Range<Duration>),
    /// They are late by something in this range, each lane for itself: a frame may pass one of another lane.
    Reorder(Range<Duration>),
    /// A frame comes twice.
    Duplicate {
        /// How often, in percent.
        percent: u8,
    },
    /// A frame or an acknowledgement is lost without a break, as no connection should; the link layer finds
    /// out and connects again.
    Lose {
        /// How often, in percent.
        percent: u8,
    },
}

#[derive(Debug)]
struct Rule {
    id: RuleId,
    /// From and to; `None` is everybody.
    from: Option<NodeId>,
    to: Option<NodeId>,
    fault: Fault,
}

/// All rules, and the chance that drives them.
#[derive(Debug)]
pub(super) struct Faults {
    rules: Vec<Rule>,
    /// The rules that `set_delay` has made.
    delays: BTreeMap<(NodeId, NodeId), RuleId>,
    last: u64,
    chance: u64,
}

/// What becomes of one packet.
#[derive(Debug, Default)]
pub(super) struct Fate {
    pub(super) copies: u8,
    pub(super) due: Option<Instant>,
}

impl Faults {
    pub(super) fn new(seed: u64) -> Self {
        Self { rules: Vec::new(), delays: BTreeMap::new(), last: 0, chance: seed }
    }

    pub(super) fn add(&mut self, from: Option<NodeId>, to: Option<NodeId>, fault: Fault) -> RuleId {
        self.last += 1;
        let id = RuleId(self.last);
        self.rules.push(Rule { id, from, to, fault });
        id
    }

    pub(super) fn set_delay(&mut self, from: NodeId, to: NodeId, range: Range<Duration>) {
        if let Some(old) = self.delays.remove(&(from.clone(), to.clone())) {
            self.remove(old);
        }
        if !range.is_empty() {
            let id = self.add(Some(from.clone()), Some(to.clone()), Fault::Delay(range));
            self.delays.insert((from, to), id);
        }
    }

    pub(super) fn remove(&mut self, id: RuleId) {
        self.rules.retain(|rule| rule.id != id);
    }

    pub(super) fn clear(&mut self) {
        self.rules.clear();
    }

    /// `lane`: of a frame; `None` for a word of the link layer or a close. `late` is the state of this direction
    /// of the connection.
    pub(super) fn fate(
        &mut self,
        (from, to): (&NodeId, &NodeId),
        lane: Option<Lane>,
        acknowledgement: bool,
        late: &mut Late,
        now: Instant,
    ) -> Fate {
        let mut copies = 1;
        let mut delay = Duration::ZERO;
        let mut reorder = false;
        let matches = |name: &Option<NodeId>, node: &NodeId| name.as_ref().is_none_or(|name| name == node);
        for rule in &self.rules {
            if !matches(&rule.from, from) || !matches(&rule.to, to) {
                continue;
            }
            match &rule.fault {
                Fault::Delay(range) => delay += draw(&mut self.chance, range),
                Fault::Reorder(range) => {
                    delay += draw(&mut self.chance, range);
                    reorder = true;
                }
                Fault::Duplicate { percent } => {
                    if lane.is_some() && copies > 0 && splitmix(&mut self.chance) % 100 < u64::from(*percent)
                    {
                        copies += 1;
                    }
                }
                Fault::Lose { percent } => {
                    let may = lane.is_some() || acknowledgement;
                    if may && splitmix(&mut self.chance) % 100 < u64::from(*percent) {
                        copies = 0;
                    }
                }
            }
        }
        if copies == 0 {
            return Fate::default();
        }
        Fate { copies, due: late.due(now + delay, lane.filter(|_| reorder)) }
    }
}

fn draw(chance: &mut u64, range: &Range<Duration>) -> Duration {
    let width = range.end.saturating_sub(range.start).as_micros() as u64;
    range.start + Duration::from_micros(splitmix(chance) % width.max(1))
}

fn splitmix(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
