//! A chat on a cluster: the nodes, the page that people use, and the checks that nothing gets lost.
//!
//! ```text
//! browser or check ── websocket ── session ── Muster of that node ── network ── the other nodes
//!                                     │
//!                                     └ hub: who is in a room, and what was said lately
//! ```

pub(crate) mod check;
pub(crate) mod cli;
pub(crate) mod client;
pub(crate) mod cluster;
pub(crate) mod drive;
#[cfg(feature = "tcp")]
pub(crate) mod fleet;
mod hub;
pub(crate) mod ledger;
#[cfg(feature = "nats")]
pub(crate) mod nats;
#[cfg(feature = "tcp")]
pub(crate) mod one;
mod outbox;
pub(crate) mod replay;
mod server;
mod session;
pub(crate) mod stage;
#[cfg(feature = "tcp")]
pub(crate) mod tcp;
pub(crate) mod trace;
pub(crate) mod wire;

/// What stops the program, in words for whoever started it.
pub(crate) type Failure = Box<dyn std::error::Error + Send + Sync>;

/// A small deterministic generator (splitmix64): the same choices in every run of the check.
pub(crate) struct Dice(u64);

impl Dice {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(crate) fn roll(&mut self, sides: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % sides.max(1) as u64) as usize
    }
}
