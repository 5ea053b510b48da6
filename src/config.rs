//! Every option of a scope: what it means, what is allowed, how to choose.

use std::fmt::Debug;
use std::ops::RangeInclusive;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::ring::RingConfig;

const MILLISECOND: Duration = Duration::from_millis(1);
const HOUR: Duration = Duration::from_secs(60 * 60);
const DAY: Duration = Duration::from_secs(24 * 60 * 60);

/// How long a link may take to give up a peer: `stall_timeout` (10 s), `ping_timeout` (3 s) and
/// `reconnect_grace` (2 s) one after the other. A tombstone has to outlive whatever is still on a link.
const LINK_GIVES_UP: Duration = Duration::from_secs(15);

/// The options of a scope.
///
/// Start from [`Config::default`], change what you need by the setter of the same name, and let the start
/// of the scope check it ([`Config::validate`]). From a file, durations are written as in `"30s"` or
/// `"250ms"`, missing fields take their defaults and unknown ones are refused.
///
/// ```
/// use std::time::Duration;
/// use muster_router::Config;
/// let config = Config::default().vnodes(256).join_timeout(Duration::from_secs(10));
/// config.validate()?;
/// # Ok::<(), muster_router::ConfigError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[non_exhaustive]
pub struct Config {
    /// Tokens per node on the ring, 1 to 4096 [128]. **The same on every node**: nodes that differ refuse
    /// each other. More tokens spread the groups more evenly and make a ring slower to build; 128 keeps the
    /// busiest of 50 nodes within 1.3 times the mean.
    pub vnodes: u32,
    /// In how many independently locked parts the groups of this node are kept, 1 to 65,536 [four times the
    /// available cores]. Raise it if joins and leaves wait for one another.
    pub shards: usize,
    /// How long a group that has lost its last member on this node stays announced, 0 to 1 day [30 s]. A
    /// member that comes back in this time costs no message; until it is over the node gets broadcasts of
    /// that group for nobody. Choose it longer than the usual reconnect of your clients.
    #[serde(with = "humantime_serde")]
    pub vacancy_cooldown: Duration,
    /// How often groups whose cooldown is over are given back to their routers, in one batch for each
    /// router, 1 ms to 1 hour [5 s]. Shorter frees rows sooner, longer makes larger batches.
    #[serde(with = "humantime_serde")]
    pub flush_interval: Duration,
    /// How often a node announces its view again and compares digests, 1 ms to 1 hour [10 s]. This is the
    /// safety net that repairs what an event should have settled; a cluster is ready within two of them after
    /// the last fault. The cost is one small message for each pair of nodes.
    #[serde(with = "humantime_serde")]
    pub heartbeat_interval: Duration,
    /// How long a node that meets no peer waits before it believes that it is alone, 1 ms to 1 hour [5 s],
    /// and below `join_timeout`: joins wait for this. A transport that knows that it has asked every address
    /// ends the wait sooner. Choose it longer than your slowest connect, or joins of the first moments
    /// are unknown to the others until the views have met.
    #[serde(with = "humantime_serde")]
    pub singleton_timeout: Duration,
    /// How long a request to another node may make no progress, 1 ms to 10 minutes [5 s], and below
    /// `tombstone_ttl`. It bounds silence and not size: a long transfer that moves does not time out.
    #[serde(with = "humantime_serde")]
    pub rpc_timeout: Duration,
    /// How long a join may take in all, 1 ms to 1 hour [30 s], and above `singleton_timeout`. Choose it longer
    /// than a change of the view takes, so that a join can be claimed anew when its router dies.
    #[serde(with = "humantime_serde")]
    pub join_timeout: Duration,
    /// How long a router remembers that a group was given back, above 15 s (the time in which a link
    /// surely gives up: stall, ping and reconnect grace) and above `rpc_timeout`, to 1 day [25 s]. A claim that
    /// arrives later than this could bring the group back to life. Choose five times `rpc_timeout`.
    #[serde(with = "humantime_serde")]
    pub tombstone_ttl: Duration,
    /// How often rows that no longer route to this node are removed, 1 ms to 1 day [25 s, as
    /// `tombstone_ttl`]. They cost memory and nothing else.
    #[serde(with = "humantime_serde")]
    pub sweep_interval: Duration,
    /// The longest group name in bytes, 1 to 65,535 [1024]. **The same on every node**: a name that one
    /// node keeps has to be allowed on its router. Each name is held once on its nodes and once on its router.
    pub max_group_len: usize,
    /// The largest payload of a broadcast in bytes, 1 to 1 GiB [1 MiB]. **The same on every node.** A
    /// payload is held in memory until each of its nodes has acknowledged it.
    pub max_payload_len: usize,
    /// How many frames may wait for one peer, 1 to 1,048,576 [8192]. When they are so many, a broadcast
    /// waits and a `try_broadcast` says `Busy`. Choose the frames of your longest burst.
    pub outbound_queue_frames: usize,
    /// How many bytes may wait for one peer, from `max_payload_len` to 4 GiB - 1 [64 MiB]. Times the number of
    /// peers it bounds the memory that slow peers can take.
    pub outbound_queue_bytes: usize,
    /// How many payload bytes may have been sent to one peer without its acknowledgement, from
    /// `max_payload_len` to 4 GiB - 1 [64 MiB]. They are kept, to be sent again after a reconnect. Choose
    /// bandwidth times the reconnect grace.
    pub max_unacknowledged: usize,
    /// How many of one origin's latest broadcasts a receiver tells apart, 2 to 67,108,864 [1,048,576];
    /// memory grows on demand. **The same on every node**: an origin keeps at most half as many open and waits
    /// beyond, and a receiver drops what is older. Choose twice the broadcasts of a node in the time in
    /// which a link gives up.
    pub dedupe_window: u64,
}

impl Default for Config {
    fn default() -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Self {
            vnodes: RingConfig::default().vnodes,
            shards: (4 * cores).min(*SHARDS.end()),
            vacancy_cooldown: Duration::from_secs(30),
            flush_interval: Duration::from_secs(5),
            heartbeat_interval: Duration::from_secs(10),
            singleton_timeout: Duration::from_secs(5),
            rpc_timeout: Duration::from_secs(5),
            join_timeout: Duration::from_secs(30),
            tombstone_ttl: Duration::from_secs(25),
            sweep_interval: Duration::from_secs(25),
            max_group_len: 1024,
            max_payload_len: 1 << 20,
            outbound_queue_frames: 8192,
            outbound_queue_bytes: 64 << 20,
            max_unacknowledged: 64 << 20,
            dedupe_window: 1 << 20,
        }
    }
}

const SHARDS: RangeInclusive<usize> = 1..=65_536;
const GROUP_LEN: RangeInclusive<usize> = 1..=65_535;
const PAYLOAD_LEN: RangeInclusive<usize> = 1..=1 << 30;
const QUEUE_FRAMES: RangeInclusive<usize> = 1..=1 << 20;
const QUEUE_BYTES: RangeInclusive<usize> = 1..=u32::MAX as usize;
const DEDUPE_WINDOW: RangeInclusive<u64> = 2..=1 << 26;

macro_rules! setters {
    ($($field:ident: $type:ty),* $(,)?) => {
        impl Config {
            $(
                #[doc = concat!("Sets [`Config::", stringify!($field), "`](struct@Config).")]
                #[must_use]
                pub fn $field(mut self, $field: $type) -> Self {
                    self.$field = $field;
                    self
                }
            )*
        }
    };
}

setters! {
    vnodes: u32,
    shards: usize,
    vacancy_cooldown: Duration,
    flush_interval: Duration,
    heartbeat_interval: Duration,
    singleton_timeout: Duration,
    rpc_timeout: Duration,
    join_timeout: Duration,
    tombstone_ttl: Duration,
    sweep_interval: Duration,
    max_group_len: usize,
    max_payload_len: usize,
    outbound_queue_frames: usize,
    outbound_queue_bytes: usize,
    max_unacknowledged: usize,
    dedupe_window: u64,
}

impl Config {
    /// Checks every option, then what options ask of one another. Nothing is started or changed.
    ///
    /// # Errors
    /// [`ConfigError`] for the first option that is not allowed, in the order of the fields.
    pub fn validate(&self) -> Result<(), ConfigError> {
        within("vnodes", self.vnodes, RingConfig::MIN_VNODES..=RingConfig::MAX_VNODES)?;
        within("shards", self.shards, SHARDS)?;
        within("vacancy_cooldown", self.vacancy_cooldown, Duration::ZERO..=DAY)?;
        within("flush_interval", self.flush_interval, MILLISECOND..=HOUR)?;
        within("heartbeat_interval", self.heartbeat_interval, MILLISECOND..=HOUR)?;
        within("singleton_timeout", self.singleton_timeout, MILLISECOND..=HOUR)?;
        within("rpc_timeout", self.rpc_timeout, MILLISECOND..=HOUR / 6)?;
        within("join_timeout", self.join_timeout, MILLISECOND..=HOUR)?;
        within("tombstone_ttl", self.tombstone_ttl, LINK_GIVES_UP + MILLISECOND..=DAY)?;
        within("sweep_interval", self.sweep_interval, MILLISECOND..=DAY)?;
        within("max_group_len", self.max_group_len, GROUP_LEN)?;
        within("max_payload_len", self.max_payload_len, PAYLOAD_LEN)?;
        within("outbound_queue_frames", self.outbound_queue_frames, QUEUE_FRAMES)?;
        within("outbound_queue_bytes", self.outbound_queue_bytes, QUEUE_BYTES)?;
        within("max_unacknowledged", self.max_unacknowledged, QUEUE_BYTES)?;
        within("dedupe_window", self.dedupe_window, DEDUPE_WINDOW)?;
        self.validate_pairs()
    }

    fn validate_pairs(&self) -> Result<(), ConfigError> {
        below(
            ("singleton_timeout", self.singleton_timeout),
            ("join_timeout", self.join_timeout),
            "a join waits until the node has settled, which a lone node has after singleton_timeout",
        )?;
        below(
            ("rpc_timeout", self.rpc_timeout),
            ("tombstone_ttl", self.tombstone_ttl),
            "a claim that is still under way could bring a group back to life",
        )?;
        let fits = "a payload of the allowed size would never fit";
        let payload = ("max_payload_len", self.max_payload_len);
        at_most(payload, ("outbound_queue_bytes", self.outbound_queue_bytes), fits)?;
        at_most(payload, ("max_unacknowledged", self.max_unacknowledged), fits)
    }

    /// The parameters of the ring.
    pub fn ring(&self) -> RingConfig {
        RingConfig { vnodes: self.vnodes }
    }
}

/// Which option is not allowed. Nothing was started; correct the option and start again.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// The value of one option is outside its range.
    #[error("option {option} is {given}; {allowed} is allowed")]
    OutOfRange {
        /// The option.
        option: &'static str,
        /// Its value.
        given: String,
        /// The range, both ends included.
        allowed: String,
    },
    /// Two options, each within its range, contradict each other.
    #[error(
        "option {option} is {given} and {other} is {other_given}; {option} must be {rule} {other}: {why}"
    )]
    Conflict {
        /// The option that should be the smaller one.
        option: &'static str,
        /// Its value.
        given: String,
        /// The option that should be the larger one.
        other: &'static str,
        /// Its value.
        other_given: String,
        /// How the first has to stand to the second: "below" or "at most".
        rule: &'static str,
        /// What would go wrong.
        why: &'static str,
    },
}

impl ConfigError {
    /// The option that is not allowed; the first of the two in a conflict.
    pub fn option(&self) -> &'static str {
        match self {
            ConfigError::OutOfRange { option, .. } | ConfigError::Conflict { option, .. } => option,
        }
    }
}

fn within<T: PartialOrd + Debug>(
    option: &'static str,
    given: T,
    allowed: RangeInclusive<T>,
) -> Result<(), ConfigError> {
    if allowed.contains(&given) {
        return Ok(());
    }
    let allowed = format!("{:?} to {:?}", allowed.start(), allowed.end());
    Err(ConfigError::OutOfRange { option, given: format!("{given:?}"), allowed })
}

type Named<T> = (&'static str, T);

fn below<T: PartialOrd + Debug>(
    small: Named<T>,
    large: Named<T>,
    why: &'static str,
) -> Result<(), ConfigError> {
    if small.1 < large.1 { Ok(()) } else { Err(conflict(small, large, "below", why)) }
}

fn at_most<T: PartialOrd + Debug>(
    small: Named<T>,
    large: Named<T>,
    why: &'static str,
) -> Result<(), ConfigError> {
    if small.1 <= large.1 { Ok(()) } else { Err(conflict(small, large, "at most", why)) }
}

fn conflict<T: Debug>(
    small: Named<T>,
    large: Named<T>,
    rule: &'static str,
    why: &'static str,
) -> ConfigError {
    ConfigError::Conflict {
        option: small.0,
        given: format!("{:?}", small.1),
        other: large.0,
        other_given: format!("{:?}", large.1),
        rule,
        why,
    }
}
