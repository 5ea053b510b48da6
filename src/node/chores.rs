//! Work in the background, in bounded steps: sweeping the table, working out digests, collecting repairs.

use std::collections::BTreeMap;

use crate::types::{NodeId, Peer};
use crate::view::ViewHash;

use super::Time;
use super::digest::{Digest, bucket_of};
use super::settings::Settings;
use crate::types::Group;

/// Where a walk over shards stands: which shard, and the place below which it has not been.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Walk {
    pub(super) shard: usize,
    pub(super) at: usize,
}

impl Walk {
    /// Before the first shard's last place; places are capped by each shard.
    pub(super) const START: Walk = Walk { shard: 0, at: usize::MAX };

    /// On to place `at`, or to the next shard when this one is done.
    pub(super) fn advance(&mut self, at: usize) {
        if at == 0 {
            *self = Walk { shard: self.shard + 1, at: usize::MAX };
        } else {
            self.at = at;
        }
    }
}

/// Digests being worked out: of what we hold, then of what we see.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Scan {
    pub(super) held_walk: Walk,
    pub(super) seen_walk: Walk,
    pub(super) held: BTreeMap<NodeId, Digest>,
    pub(super) seen: BTreeMap<u32, Digest>,
}

/// Groups being collected for one peer's repair.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct RepairScan {
    pub(super) to: Peer,
    pub(super) hash: ViewHash,
    pub(super) version: u64,
    pub(super) buckets: Vec<u8>,
    pub(super) walk: Walk,
    pub(super) groups: Vec<Group>,
}

impl RepairScan {
    pub(super) fn wants(&self, group: &Group) -> bool {
        self.buckets.contains(&bucket_of(group).0)
    }
}

/// What is due, and where the walks stand.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Chores {
    pub(super) flush_at: Time,
    pub(super) beat_at: Time,
    pub(super) sweep_at: Time,
    pub(super) singleton_at: Time,
    pub(super) sweep: Option<Walk>,
    pub(super) scan: Option<Scan>,
    pub(super) repairs: BTreeMap<NodeId, RepairScan>,
}

impl Chores {
    pub(super) fn new(settings: &Settings, now: Time) -> Self {
        Self {
            flush_at: now.saturating_add(settings.flush_interval),
            beat_at: now.saturating_add(settings.heartbeat_interval),
            sweep_at: now.saturating_add(settings.sweep_interval),
            singleton_at: now.saturating_add(settings.singleton_timeout),
            sweep: None,
            scan: None,
            repairs: BTreeMap::new(),
        }
    }

    pub(super) fn sweep_again(&mut self) {
        self.sweep = Some(Walk::START);
    }

    pub(super) fn scan_again(&mut self) {
        if self.scan.is_none() {
            self.scan = Some(Scan {
                held_walk: Walk::START,
                seen_walk: Walk::START,
                held: BTreeMap::new(),
                seen: BTreeMap::new(),
            });
        }
    }

    pub(super) fn idle(&self) -> bool {
        self.sweep.is_none() && self.scan.is_none() && self.repairs.is_empty()
    }
}

/// Moves a due time on past `now`; says whether it was due.
pub(super) fn due(at: &mut Time, interval: Time, now: Time) -> bool {
    if *at > now {
        return false;
    }
    *at = now.saturating_add(interval);
    true
}
