//! What a cache has done on this node, in numbers.

use serde::Serialize;

use crate::cache::{Applied, CacheError, Operation};
use crate::driver::stats::Count;

macro_rules! counters {
    ($($(#[doc = $doc:literal])+ $name:ident),* $(,)?) => {
        #[derive(Debug, Default)]
        pub(crate) struct Stats {
            $(pub(crate) $name: Count,)*
        }

        /// What a cache has done on this node since it was opened; every number only rises, `pending` apart.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
        #[non_exhaustive]
        pub struct CacheStats {
            $($(#[doc = $doc])+ pub $name: u64,)*
            /// Operations that wait for their answer now.
            pub pending: u64,
        }

        impl Stats {
            pub(crate) fn read(&self, pending: usize) -> CacheStats {
                CacheStats { $($name: self.$name.get(),)* pending: pending as u64 }
            }
        }
    };
}

counters! {
    /// Reads of one partition that began on this node; one of all partitions counts once for each.
    reads,
    /// Those of them that this node answered from its own copy, without waiting.
    reads_at_once,
    /// Writes to one partition that began on this node; a batch counts once for each of its partitions.
    writes,
    /// Operations that failed and have changed nothing.
    failed,
    /// Operations that failed, and nobody knows whether they were applied.
    unknown,
    /// Operations that were refused because too many waited.
    busy,
    /// Frames of this cache that came in.
    frames_in,
    /// Frames of this cache that could not be read.
    frames_ignored,
    /// Writes that lost when two sides of a split came together, as told by partitions whose primary is here.
    conflicts,
    /// Events that a reader or a callback was too slow for.
    events_missed,
    /// Panics of callbacks.
    panics,
}

impl Stats {
    pub(crate) fn began(&self, operation: &Operation) {
        match operation {
            Operation::Read(_) => self.reads.add(1),
            Operation::Write(_) => self.writes.add(1),
        }
    }

    pub(crate) fn ended<T>(&self, result: &Result<T, CacheError>) {
        let Err(error) = result else { return };
        if *error == CacheError::Busy {
            self.busy.add(1);
        }
        match error.applied() {
            Applied::Unknown => self.unknown.add(1),
            Applied::No => self.failed.add(1),
            // it was done: what is missing is a count
            Applied::Yes => {}
        }
    }
}
