//! Hashing inside one node: fixed for a seed, so that one seed is one run; the driver draws the seed at
//! random, so that nobody outside can choose group names that collide.

use std::hash::{BuildHasher, Hash, Hasher};

use indexmap::IndexMap;
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// Hashes with a seed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct SeededState(pub(crate) u64);

pub(crate) struct Seeded(u64);

impl BuildHasher for SeededState {
    type Hasher = Seeded;
    fn build_hasher(&self) -> Seeded {
        Seeded(self.0)
    }
}

impl Hasher for Seeded {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        self.0 = xxh3_64_with_seed(bytes, self.0);
    }

    // the length that precedes a slice of bytes adds nothing to one hash of all of them
    fn write_usize(&mut self, _length: usize) {}
}

/// Room for one more in a table that stays large for long: a quarter more when it is full, not twice as much, which
/// would leave a third of it empty in the mean.
pub(crate) fn make_room<K: Hash + Eq, V>(table: &mut IndexMap<K, V, SeededState>) {
    if table.len() == table.capacity() {
        table.reserve_exact((table.len() / 4).max(4));
    }
}
