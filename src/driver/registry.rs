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
use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};

use hashbrown::HashTable;
use hashbrown::hash_table::Entry;
use parking_lot::Mutex;
use tokio::sync::watch;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::member::Member;
use crate::types::Group;

const SHARDS: usize = 32;

pub(crate) struct Registry {
    shards: Box<[Mutex<Shard>]>,
    /// Random, so that nobody outside can choose groups that all meet in one bucket.
    seed: u64,
    generations: AtomicU64,
}

/// A membership is found by its member's group and number: a key beside it would say the same again.
#[derive(Default)]
struct Shard {
    closed: bool,
    slots: HashTable<Slot>,
    /// For those who wait to share a membership whose first join is under way, by its generation: dropped when
    /// that is decided. A map of its own, since hardly any membership is ever waited for.
    deciding: HashMap<u64, watch::Sender<()>>,
}

struct Slot {
    member: Member,
    /// 0 while the join is under way.
    guards: u32,
    /// It ended (closed, panicked) before its join had returned.
    ended: bool,
}

impl Slot {
    fn is(&self, group: &Group, number: u64) -> bool {
        self.member.id().number == number && self.member.group() == group
    }
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

/// What is taken out under a shard's lock and dropped after it.
type Removed = (Option<Slot>, Option<watch::Sender<()>>);

impl Shard {
    /// The slot of exactly this membership.
    fn slot(&mut self, hash: u64, member: &Member) -> Option<&mut Slot> {
        let (generation, number) = (member.generation(), member.id().number);
        self.slots
            .find_mut(hash, |slot| slot.is(member.group(), number))
            .filter(|slot| slot.member.generation() == generation)
    }

    /// Takes exactly this membership out.
    fn remove(&mut self, hash: u64, member: &Member) -> Removed {
        let (generation, number) = (member.generation(), member.id().number);
        let own = |slot: &Slot| slot.is(member.group(), number) && slot.member.generation() == generation;
        let slot = self.slots.find_entry(hash, own).ok().map(|entry| entry.remove().0);
        (slot, self.deciding.remove(&generation))
    }
}

impl Registry {
    pub(crate) fn new() -> Self {
        Self {
            shards: (0..SHARDS).map(|_| Mutex::default()).collect(),
            seed: RandomState::new().hash_one(0u64),
            generations: AtomicU64::new(1),
        }
    }

    fn hash(&self, group: &Group, number: u64) -> u64 {
        // numbers are counted up here: mixing is enough for them
        xxh3_64_with_seed(group.as_bytes(), self.seed ^ number.wrapping_mul(0x9e37_79b9_7f4a_7c15))
    }

    /// The hash and its shard. The table uses the lowest and the highest bits of the hash.
    #[allow(clippy::indexing_slicing, reason = "the index is a remainder of the number of shards")]
    fn shard(&self, group: &Group, number: u64) -> (u64, &Mutex<Shard>) {
        let hash = self.hash(group, number);
        (hash, &self.shards[(hash >> 32) as usize % SHARDS])
    }

    fn shard_of(&self, member: &Member) -> (u64, &Mutex<Shard>) {
        self.shard(member.group(), member.id().number)
    }

    /// Takes the place of a membership, or shares it. `make` is given the generation; it is called at most
    /// once, under the registry's lock, so it must not call anybody's code.
    pub(crate) fn begin(&self, group: &Group, number: u64, make: impl FnOnce(u64) -> Member) -> Begin {
        let (hash, shard) = self.shard(group, number);
        let mut shard = shard.lock();
        let shard = &mut *shard;
        if shard.closed {
            return Begin::Closed;
        }
        let rehash = |slot: &Slot| self.hash(slot.member.group(), slot.member.id().number);
        match shard.slots.entry(hash, |slot| slot.is(group, number), rehash) {
            Entry::Vacant(place) => {
                let member = make(self.generations.fetch_add(1, Ordering::Relaxed));
                place.insert(Slot { member: member.clone(), guards: 0, ended: false });
                Begin::New(member)
            }
            Entry::Occupied(mut slot) => {
                let slot = slot.get_mut();
                if slot.guards > 0 {
                    slot.guards = slot.guards.saturating_add(1);
                    return Begin::Shared(slot.member.generation());
                }
                let decided = shard.deciding.entry(slot.member.generation());
                Begin::Wait(decided.or_insert_with(|| watch::channel(()).0).subscribe())
            }
        }
    }

    /// The join succeeded: it has its first guard. `false` if the scope was stopped meanwhile.
    pub(crate) fn joined(&self, member: &Member) -> bool {
        let (hash, shard) = self.shard_of(member);
        let removed: Removed;
        {
            let mut shard = shard.lock();
            let Some(slot) = shard.slot(hash, member) else { return false };
            slot.guards = 1;
            removed = if slot.ended {
                shard.remove(hash, member)
            } else {
                (None, shard.deciding.remove(&member.generation()))
            };
        }
        drop(removed);
        true
    }

    /// The join failed or was given up.
    pub(crate) fn abandon(&self, member: &Member) {
        let (hash, shard) = self.shard_of(member);
        let removed = shard.lock().remove(hash, member);
        drop(removed);
    }

    /// One guard is dropped; the last one leaves. `leave` runs under the lock, so that a new join of the same
    /// member cannot come between and be undone; what it returns is dropped after.
    pub(crate) fn release<R>(&self, group: &Group, number: u64, generation: u64, leave: impl FnOnce() -> R) {
        let (hash, shard) = self.shard(group, number);
        let removed = {
            let mut shard = shard.lock();
            match shard.slots.find_entry(hash, |slot| slot.is(group, number)) {
                Ok(mut entry) if entry.get().member.generation() == generation => {
                    let slot = entry.get_mut();
                    slot.guards = slot.guards.saturating_sub(1);
                    if slot.guards == 0 { Some((entry.remove().0, leave())) } else { None }
                }
                Ok(_) | Err(_) => None,
            }
        };
        drop(removed);
    }

    /// The member takes no more. `true` if this call ended it.
    pub(crate) fn end<R>(&self, member: &Member, leave: impl FnOnce() -> R) -> bool {
        let (hash, shard) = self.shard_of(member);
        let removed = {
            let mut shard = shard.lock();
            let Some(slot) = shard.slot(hash, member).filter(|slot| !slot.ended) else { return false };
            if slot.guards > 0 {
                (shard.remove(hash, member), leave())
            } else {
                slot.ended = true;
                ((None, None), leave())
            }
        };
        drop(removed);
        true
    }

    /// Takes every membership out and lets nobody in any more.
    pub(crate) fn close(&self) -> Vec<Member> {
        let mut all = Vec::new();
        for shard in &self.shards {
            let (slots, deciding) = {
                let mut shard = shard.lock();
                shard.closed = true;
                (std::mem::take(&mut shard.slots), std::mem::take(&mut shard.deciding))
            };
            all.extend(slots.into_iter().map(|slot| slot.member));
            drop(deciding);
        }
        all
    }

    /// How many memberships there are.
    pub(crate) fn len(&self) -> usize {
        self.shards.iter().map(|shard| shard.lock().slots.len()).sum()
    }
}
