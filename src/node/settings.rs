//! What the core must know of the configuration.

use super::Time;
use super::rules::Rules;
use crate::config::Config;
use crate::ring::RingConfig;

/// The options of a [`super::Node`]. Times are durations; nothing here reads a clock.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Settings {
    /// The ring's parameters; equal on all nodes.
    pub ring: RingConfig,
    /// How many shards share the groups; each node's own affair.
    pub shards: usize,
    /// How long a group without members is still claimed.
    pub vacancy_cooldown: Time,
    /// How often retractions are sent.
    pub flush_interval: Time,
    /// How often the announcement is repeated, with a digest.
    pub heartbeat_interval: Time,
    /// After how long without a peer a node takes itself to be alone.
    pub singleton_timeout: Time,
    /// After how long without an answer something is said again.
    pub rpc_timeout: Time,
    /// How long a join waits for its router.
    pub join_timeout: Time,
    /// How long a tombstone is kept.
    pub tombstone_ttl: Time,
    /// How often the table is swept.
    pub sweep_interval: Time,
    /// Broadcasts of one origin that a receiver can tell apart.
    pub dedupe_window: u64,
    /// Bytes of payload that an origin keeps until they are acknowledged.
    pub max_unacknowledged: usize,
    /// Groups that one step of background work visits.
    pub work_step: usize,
    /// Groups in one chunk of a transfer.
    pub chunk_groups: usize,
    /// Bytes of group names in one chunk of a transfer, about.
    pub chunk_bytes: usize,
    /// How many peers a node that is `Ready` gives a heartbeat at a time; with more peers they take turns.
    pub beat_peers: usize,
    /// Seeds the hash maps: drawn at random by the driver, fixed in a simulation.
    pub hash_seed: u64,
    /// Which rules are in force; all of them outside the checkers.
    pub rules: Rules,
}

impl From<&Config> for Settings {
    fn from(config: &Config) -> Self {
        Self {
            ring: config.ring(),
            shards: config.shards.max(1),
            vacancy_cooldown: config.vacancy_cooldown,
            flush_interval: config.flush_interval,
            heartbeat_interval: config.heartbeat_interval,
            singleton_timeout: config.singleton_timeout,
            rpc_timeout: config.rpc_timeout,
            join_timeout: config.join_timeout,
            tombstone_ttl: config.tombstone_ttl,
            sweep_interval: config.sweep_interval,
            dedupe_window: config.dedupe_window,
            max_unacknowledged: config.max_unacknowledged,
            work_step: 1000,
            chunk_groups: 1000,
            chunk_bytes: 128 * 1024,
            beat_peers: 64,
            hash_seed: 0,
            rules: Rules::all(),
        }
    }
}

impl Settings {
    /// How often [`super::Node::handle_timeout`] should be called: often enough for the shortest interval
    /// here, and at most every quarter of a second.
    pub fn tick(&self) -> Time {
        let shortest = [
            self.flush_interval,
            self.heartbeat_interval,
            self.singleton_timeout,
            self.rpc_timeout,
            self.join_timeout,
            self.sweep_interval,
        ]
        .into_iter()
        .min()
        .unwrap_or_default();
        (shortest / 2).clamp(Time::from_millis(1), Time::from_millis(250))
    }
}
