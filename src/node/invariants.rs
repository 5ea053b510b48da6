//! What must hold after every step, by name: checked after each input in debug builds and by the simulator.

use super::Node;

/// Above this many groups in a shard the debug build leaves the shard's checks to the simulator.
const SMALL: usize = 32;

impl<M: Clone> Node<M> {
    /// Checks every part of the node; meant for tests, it visits every group.
    ///
    /// # Errors
    /// The name of the part and what is wrong with it.
    pub fn check_invariants(&self) -> Result<(), String> {
        self.check_up_to(usize::MAX)
    }

    fn check_up_to(&self, size: usize) -> Result<(), String> {
        self.relay
            .with(|relay| relay.check_invariants())
            .map_err(|broken| format!("relay of {}: {broken}", self.me))?;
        self.coordinator.with(|coordinator| {
            coordinator.check().map_err(|broken| format!("coordinator of {}: {broken}", self.me))?;
            let published = coordinator.published();
            for shard in &self.claims {
                shard
                    .with(|shard| if shard.len() <= size { shard.check(published) } else { Ok(()) })
                    .map_err(|broken| format!("claims of {}: {broken}", self.me))?;
            }
            Ok(())
        })
    }

    #[inline]
    pub(super) fn debug_check(&self) {
        #[cfg(debug_assertions)]
        {
            let checked = self.check_up_to(SMALL);
            debug_assert!(checked.is_ok(), "{}", checked.err().unwrap_or_default());
        }
        #[cfg(not(debug_assertions))]
        let _ = SMALL;
    }
}
