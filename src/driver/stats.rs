//! What a scope has done, in numbers.

use std::sync::atomic::{AtomicU64, Ordering};

use serde::Serialize;

use super::message::Delivered;

/// A number that only rises.
#[derive(Debug, Default)]
pub(crate) struct Count(AtomicU64);

impl Count {
    pub(crate) fn add(&self, by: u64) {
        // most deliveries drop nothing
        if by != 0 {
            self.0.fetch_add(by, Ordering::Relaxed);
        }
    }

    pub(crate) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

macro_rules! counters {
    ($($(#[doc = $doc:literal])+ $name:ident),* $(,)?) => {
        #[derive(Debug, Default)]
        pub(crate) struct Stats {
            $(pub(crate) $name: Count,)*
        }

        /// What a scope has done since its start; every number only rises.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
        #[non_exhaustive]
        pub struct Counters {
            $($(#[doc = $doc])+ pub $name: u64,)*
        }

        impl Stats {
            pub(crate) fn read(&self) -> Counters {
                Counters { $($name: self.$name.get(),)* }
            }
        }
    };
}

counters! {
    /// Broadcasts that began on this node.
    broadcasts,
    /// Those of them that this node or its router knew the targets of.
    targeted,
    /// Those of them that went to all connected nodes.
    flooded,
    /// Broadcasts that were refused because a queue was full.
    busy,
    /// Messages that members of this node have accepted.
    delivered,
    /// Messages that members of this node had no room for.
    dropped,
    /// Members that were removed because they took no more.
    closed_members,
    /// Panics of subscribers.
    panics,
    /// Deliveries that took over 10 ms.
    slow_deliveries,
    /// Frames that came in.
    frames_in,
    /// Frames that were not understood: of a newer version, of an unknown kind, or malformed.
    frames_ignored,
    /// Frames that the transport refused as too large.
    frames_too_large,
}

impl Stats {
    pub(crate) fn count(&self, delivered: Delivered, times: u64) {
        match delivered {
            Delivered::Accepted => self.delivered.add(times),
            Delivered::Dropped => self.dropped.add(times),
            Delivered::Closed => {}
        }
    }
}
