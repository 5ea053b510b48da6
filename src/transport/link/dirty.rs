//! The connections that may have something to write.

use std::collections::VecDeque;

use super::RawId;

/// A small set, first the lowest. It is filled and emptied with every burst, and keeps its room.
#[derive(Clone, Debug, Default)]
pub(super) struct Dirty(VecDeque<RawId>);

impl Dirty {
    pub(super) fn insert(&mut self, raw: RawId) {
        if let Err(place) = self.0.binary_search(&raw) {
            self.0.insert(place, raw);
        }
    }

    pub(super) fn remove(&mut self, raw: RawId) {
        if let Ok(place) = self.0.binary_search(&raw) {
            self.0.remove(place);
        }
    }

    pub(super) fn pop_first(&mut self) -> Option<RawId> {
        self.0.pop_front()
    }
}
