//! The memberships of this node: who holds a guard of what.
//!
//! ```text
//!   (none) ── join ──▶ Joining ── answered ──▶ Joined{guards} ── last guard, Closed, panic ──▶ (none)
//!                         └── refused, cancelled ──▶ (none)
//! ```
//!
//! The registry keeps a handle of every member for as long as the node might have one, so that the user's
//! subscriber is never dropped inside the node, under one of its locks.

use std::collections::HashMap;
use std::collections::hash_map::{Entry, RandomState};
use std::hash::BuildHasher;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use tokio::sync::watch;

use super::member::Member;
use crate::types::Group;

/// A member of a group: the group and the member's number on this node.
pub(crate) type Key = (Group, u64);

const SHARDS: usize = 32;

pub(crate) struct Registry {
    shards: Box<[Mutex<Shard>]>,
    hasher: RandomState,
    generations: AtomicU64,
}

#[derive(Default)]
struct Shard {
    closed: bool,
    slots: HashMap<Key, Slot>,
}

struct Slot {
    member: Member,
    /// 0 while the join is under way.
    guards: usize,
    /// It ended (closed, panicked) before its join had returned.
    ended: bool,
    /// Dropped when the join is decided, for those who wait to share it.
    decided: Option<watch::Sender<()>>,
}

/// How a join finds the registry.
pub(crate) enum Begin {
    /// Nobody has this membership: go and join.
    New(Member),
    /// It is there; here is one more guard of this generation.
    Shared(u64),
    /// Its first join is under way: wait until the sender is gone, then look again.
    Wait(watch::Receiver<()>),
    /// The scope is stopped.
    Closed,
}

impl Registry {
    pub(crate) fn new() -> Self {
        Self {
            shards: (0..SHARDS).map(|_| Mutex::default()).collect(),
            hasher: RandomState::new(),
            generations: AtomicU64::new(1),
        }
    }

    #[allow(clippy::indexing_slicing, reason = "the index is a remainder of the number of shards")]
    fn shard(&self, key: &Key) -> &Mutex<Shard> {
        &self.shards[self.hasher.hash_one(key) as usize % SHARDS]
    }

    /// Takes the place of a membership, or shares it. `make` is given the generation; it is called at most
    /// once, under the registry's lock, so it must not call anybody's code.
    pub(crate) fn begin(&self, key: &Key, make: impl FnOnce(u64) -> Member) -> Begin {
        let mut shard = self.shard(key).lock();
        if shard.closed {
            return Begin::Closed;
        }
        match shard.slots.entry(key.clone()) {
            Entry::Vacant(place) => {
                let member = make(self.generations.fetch_add(1, Ordering::Relaxed));
                place.insert(Slot { member: member.clone(), guards: 0, ended: false, decided: None });
                Begin::New(member)
            }
            Entry::Occupied(mut slot) => {
                let slot = slot.get_mut();
                if slot.guards > 0 {
                    slot.guards += 1;
                    return Begin::Shared(slot.member.generation());
                }
                let decided = slot.decided.get_or_insert_with(|| watch::channel(()).0);
                Begin::Wait(decided.subscribe())
            }
        }
    }

    /// The join succeeded: it has its first guard. `false` if the scope was stopped meanwhile.
    pub(crate) fn joined(&self, key: &Key, generation: u64) -> bool {
        let mut removed = None;
        let mut decided = None;
        let joined = {
            let mut shard = self.shard(key).lock();
            match shard.slots.get_mut(key) {
                Some(slot) if slot.member.generation() == generation => {
                    slot.guards = 1;
                    decided = slot.decided.take();
                    if slot.ended {
                        removed = shard.slots.remove(key);
                    }
                    true
                }
                Some(_) | None => false,
            }
        };
        drop((removed, decided));
        joined
    }

    /// The join failed or was given up.
    pub(crate) fn abandon(&self, key: &Key, generation: u64) {
        let removed = {
            let mut shard = self.shard(key).lock();
            let own = shard.slots.get(key).is_some_and(|slot| slot.member.generation() == generation);
            if own { shard.slots.remove(key) } else { None }
        };
        drop(removed);
    }

    /// One guard is dropped; the last one leaves. `leave` runs under the lock, so that a new join of the same
    /// member cannot come between and be undone; what it returns is dropped after.
    pub(crate) fn release<R>(&self, key: &Key, generation: u64, leave: impl FnOnce() -> R) {
        let removed = {
            let mut shard = self.shard(key).lock();
            match shard.slots.get_mut(key) {
                Some(slot) if slot.member.generation() == generation => {
                    slot.guards = slot.guards.saturating_sub(1);
                    if slot.guards == 0 { shard.slots.remove(key).map(|slot| (slot, leave())) } else { None }
                }
                Some(_) | None => None,
            }
        };
        drop(removed);
    }

    /// The member takes no more. `true` if this call ended it.
    pub(crate) fn end<R>(&self, key: &Key, generation: u64, leave: impl FnOnce() -> R) -> bool {
        let (ended, removed) = {
            let mut shard = self.shard(key).lock();
            match shard.slots.get_mut(key) {
                Some(slot) if slot.member.generation() == generation && !slot.ended => {
                    if slot.guards > 0 {
                        let slot = shard.slots.remove(key);
                        (true, Some((slot, leave())))
                    } else {
                        slot.ended = true;
                        (true, Some((None, leave())))
                    }
                }
                Some(_) | None => (false, None),
            }
        };
        drop(removed);
        ended
    }

    /// Takes every membership out and lets nobody in any more.
    pub(crate) fn close(&self) -> Vec<(Key, Member)> {
        let mut all = Vec::new();
        for shard in &self.shards {
            let slots = {
                let mut shard = shard.lock();
                shard.closed = true;
                std::mem::take(&mut shard.slots)
            };
            all.extend(slots.into_iter().map(|(key, slot)| (key, slot.member)));
        }
        all
    }

    /// How many memberships there are.
    pub(crate) fn len(&self) -> usize {
        self.shards.iter().map(|shard| shard.lock().slots.len()).sum()
    }
}
