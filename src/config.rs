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
    /// Tokens per node on the ring, 1 to 4096 (default 128). **The same on every node**: nodes that differ
    /// refuse each other. More tokens spread the groups more evenly and make a ring slower to build; with
    /// 128 the busiest of 50 nodes gets about 1.2 times the mean, seldom more than 1.3 times.
    pub vnodes: u32,
    /// In how many independently locked parts the groups of this node are kept, 1 to 65,536 (default four
    /// times the available cores). Raise it if joins and leaves wait for one another.
    pub shards: usize,
    /// How long a group that has lost its last member on this node stays announced, 0 to 1 day (default 30
    /// s). A member that comes back in this time costs no message; until it is over the node gets
    /// broadcasts of that group for nobody. Choose it longer than the usual reconnect of your clients.
    #[serde(with = "humantime_serde")]
    pub vacancy_cooldown: Duration,
    /// How often groups whose cooldown is over are given back to their routers, in one batch for each
    /// router, 1 ms to 1 hour (default 5 s). Shorter frees rows sooner, longer makes larger batches.
    #[serde(with = "humantime_serde")]
    pub flush_interval: Duration,
    /// How often a node announces its view again and compares digests, 1 ms to 1 hour (default 10 s). This
    /// is the safety net that repairs what an event should have settled; a cluster is ready within two of
    /// them after the last fault. The cost is one small message for each pair of nodes.
    #[serde(with = "humantime_serde")]
    pub heartbeat_interval: Duration,
    /// How long a node that meets no peer waits before it believes that it is alone, 1 ms to 1 hour
    /// (default 5 s), and below `join_timeout`: joins wait for this. A transport that knows that it has
    /// asked every address ends the wait sooner. Choose it longer than your slowest connect, or joins of
    /// the first moments are unknown to the others until the views have met.
    #[serde(with = "humantime_serde")]
    pub singleton_timeout: Duration,
    /// How long a request to another node may make no progress, 1 ms to 10 minutes (default 5 s), and below
    /// `tombstone_ttl`. It bounds silence and not size: a long transfer that moves does not time out.
    #[serde(with = "humantime_serde")]
    pub rpc_timeout: Duration,
    /// How long a join may take in all, 1 ms to 1 hour (default 30 s), and above `singleton_timeout`.
    /// Choose it longer than a change of the view takes, so that a join can be claimed anew when its router
    /// dies.
    #[serde(with = "humantime_serde")]
    pub join_timeout: Duration,
    /// How long a router remembers that a group was given back, above 15 s (the time in which a link surely
    /// gives up: stall, ping and reconnect grace) and above `rpc_timeout`, to 1 day (default 25 s). A claim
    /// that arrives later than this could bring the group back to life. Choose five times `rpc_timeout`.
    #[serde(with = "humantime_serde")]
    pub tombstone_ttl: Duration,
    /// How often rows that no longer route to this node are removed, 1 ms to 1 day (default 25 s, as
    /// `tombstone_ttl`). They cost memory and nothing else.
    #[serde(with = "humantime_serde")]
    pub sweep_interval: Duration,
    /// The longest group name in bytes, 1 to 65,535 (default 1024). **The same on every node**: a name that
    /// one node keeps has to be allowed on its router. Each name is held once on its nodes and once on its
    /// router.
    pub max_group_len: usize,
    /// The largest payload of a broadcast in bytes, 1 to 1 GiB (default 1 MiB). **The same on every node.**
    /// A payload is held in memory until each of its nodes has acknowledged it.
    pub max_payload_len: usize,
    /// How many bytes of names, headers and payloads this node's broadcasts may have that are not yet acknowledged, in
    /// all, from `max_payload_len` to 4 GiB - 1 (default 64 MiB). They are kept, to be sent again if a node on the way
    /// is lost; beyond it a broadcast waits and a `try_broadcast` says `Busy`. Choose bandwidth times the reconnect
    /// grace. What waits for one peer is bounded by its transport
    /// ([`LinkConfig`](crate::transport::link::LinkConfig)).
    pub max_unacknowledged: usize,
    /// How far this node's broadcasts may run ahead of its oldest open one, twice over: 2 to 67,108,864
    /// (default 1,048,576). A broadcast beyond half of it waits for room. Receivers tell as many apart as
    /// any node may have open, whatever they set themselves; their memory grows on demand. Choose twice the
    /// broadcasts of a node in the time in which a link gives up.
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
            max_unacknowledged: 64 << 20,
            dedupe_window: 1 << 20,
        }
    }
}

const SHARDS: RangeInclusive<usize> = 1..=65_536;
const GROUP_LEN: RangeInclusive<usize> = 1..=65_535;
const PAYLOAD_LEN: RangeInclusive<usize> = 1..=1 << 30;
const KEPT_BYTES: RangeInclusive<usize> = 1..=u32::MAX as usize;
/// The most that one origin may keep open twice over; receivers tell so many apart, whatever they set.
pub(crate) const MAX_DEDUPE_WINDOW: u64 = 1 << 26;
const DEDUPE_WINDOW: RangeInclusive<u64> = 2..=MAX_DEDUPE_WINDOW;

macro_rules! setters {
    ($($field:ident: $type:ty),* $(,)?) => {
        impl Config {
            $(
                #[doc = concat!("Sets [`Config::", stringify!($field), "`](Config#structfield.", stringify!($field), ").")]
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
        within("max_unacknowledged", self.max_unacknowledged, KEPT_BYTES)?;
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

pub(crate) fn within<T: PartialOrd + Debug>(
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

pub(crate) type Named<T> = (&'static str, T);

fn below<T: PartialOrd + Debug>(
    small: Named<T>,
    large: Named<T>,
    why: &'static str,
) -> Result<(), ConfigError> {
    if small.1 < large.1 { Ok(()) } else { Err(conflict(small, large, "below", why)) }
}

pub(crate) fn at_most<T: PartialOrd + Debug>(
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

#[cfg(test)]
mod tests {
    use super::*;

    const NANOSECOND: Duration = Duration::from_nanos(1);

    fn refused(config: &Config) -> &'static str {
        config.validate().expect_err("it should be refused").option()
    }

    /// Every bound from both sides: the last value that is allowed and the first that is not. `$with` are
    /// the options that have to move along so that no pair contradicts.
    macro_rules! bounds {
        ($($field:ident: $low:expr, $below:expr, $high:expr, $above:expr $(, with $($with:ident = $value:expr),*)?;)*) => {
            $(
                #[test]
                fn $field() {
                    let base = Config::default()$($(.$with($value))*)?;
                    for allowed in [$low, $high] {
                        assert_eq!(base.clone().$field(allowed).validate(), Ok(()));
                    }
                    for not_allowed in [$below, $above] {
                        let config = base.clone().$field(not_allowed);
                        assert_eq!(refused(&config), stringify!($field));
                        let text = config.validate().expect_err("refused").to_string();
                        assert!(text.contains(&format!("{not_allowed:?}")), "{text}");
                        assert!(text.contains(&format!("{:?} to {:?}", $low, $high)), "{text}");
                    }
                }
            )*
        };
    }

    mod bounds {
        use super::*;
        bounds! {
            vnodes: 1, 0, 4096, 4097;
            shards: 1, 0, 65_536, 65_537;
            flush_interval: MILLISECOND, MILLISECOND - NANOSECOND, HOUR, HOUR + NANOSECOND;
            heartbeat_interval: MILLISECOND, MILLISECOND - NANOSECOND, HOUR, HOUR + NANOSECOND;
            rpc_timeout: MILLISECOND, MILLISECOND - NANOSECOND, HOUR / 6, HOUR / 6 + NANOSECOND,
                with tombstone_ttl = HOUR;
            tombstone_ttl: LINK_GIVES_UP + MILLISECOND, LINK_GIVES_UP, DAY, DAY + NANOSECOND;
            sweep_interval: MILLISECOND, MILLISECOND - NANOSECOND, DAY, DAY + NANOSECOND;
            max_group_len: 1, 0, 65_535, 65_536;
            max_payload_len: 1, 0, 1 << 30, (1 << 30) + 1,
                with max_unacknowledged = 1 << 31;
            max_unacknowledged: 1, 0, u32::MAX as usize, u32::MAX as usize + 1, with max_payload_len = 1;
            dedupe_window: 2, 1, 1 << 26, (1 << 26) + 1;
        }
    }

    #[test]
    fn vacancy_cooldown_may_be_zero() {
        assert_eq!(Config::default().vacancy_cooldown(Duration::ZERO).validate(), Ok(()));
        assert_eq!(Config::default().vacancy_cooldown(DAY).validate(), Ok(()));
        assert_eq!(refused(&Config::default().vacancy_cooldown(DAY + NANOSECOND)), "vacancy_cooldown");
    }

    #[test]
    fn singleton_and_join_timeout() {
        let with = |singleton, join| Config::default().singleton_timeout(singleton).join_timeout(join);
        assert_eq!(with(MILLISECOND, MILLISECOND * 2).validate(), Ok(()));
        assert_eq!(with(HOUR - NANOSECOND, HOUR).validate(), Ok(()));
        assert_eq!(refused(&with(MILLISECOND - NANOSECOND, HOUR)), "singleton_timeout");
        assert_eq!(refused(&with(HOUR + NANOSECOND, HOUR)), "singleton_timeout");
        assert_eq!(refused(&with(MILLISECOND, MILLISECOND - NANOSECOND)), "join_timeout");
        assert_eq!(refused(&with(MILLISECOND, HOUR + NANOSECOND)), "join_timeout");
    }

    /// Allowed, refused, and the two names that the refusal has to have.
    fn pair(allowed: Config, not_allowed: &Config, option: &str, other: &str) {
        assert_eq!(allowed.validate(), Ok(()));
        let error = not_allowed.validate().expect_err("a conflict");
        assert!(matches!(error, ConfigError::Conflict { .. }), "{error}");
        let text = error.to_string();
        assert!(text.contains(option) && text.contains(other), "{text}");
    }

    #[test]
    fn a_conflict_names_both_options() {
        let seconds = Duration::from_secs;
        let config = Config::default;
        pair(
            config().singleton_timeout(seconds(30) - NANOSECOND),
            &config().singleton_timeout(seconds(30)),
            "singleton_timeout is 30s",
            "join_timeout is 30s",
        );
        pair(
            config().rpc_timeout(seconds(25) - NANOSECOND),
            &config().rpc_timeout(seconds(25)),
            "rpc_timeout is 25s",
            "tombstone_ttl is 25s",
        );
        pair(
            config().max_unacknowledged(1 << 20),
            &config().max_unacknowledged((1 << 20) - 1),
            "max_payload_len is 1048576",
            "max_unacknowledged is 1048575",
        );
    }

    #[test]
    fn the_defaults_are_allowed_and_are_the_documented_ones() {
        let config = Config::default();
        assert_eq!(config.validate(), Ok(()));
        assert_eq!(config.ring(), RingConfig::default());
        assert_eq!(config.tombstone_ttl, config.rpc_timeout * 5);
        assert_eq!(config.sweep_interval, config.tombstone_ttl);
        let seconds = [config.vacancy_cooldown, config.flush_interval, config.heartbeat_interval]
            .map(|duration| duration.as_secs());
        assert_eq!(seconds, [30, 5, 10]);
        assert_eq!((config.max_payload_len, config.dedupe_window), (1_048_576, 1_048_576));
    }

    #[test]
    fn a_file_gives_durations_as_people_write_them() {
        let text = r#"{"vacancy_cooldown": "1m 30s", "flush_interval": "250ms", "vnodes": 64}"#;
        let config: Config = serde_json::from_str(text).expect("a config");
        let expected = Config::default()
            .vacancy_cooldown(Duration::from_secs(90))
            .flush_interval(Duration::from_millis(250))
            .vnodes(64);
        assert_eq!(config, expected);
        assert_eq!(serde_json::from_str::<Config>("{}").expect("a config"), Config::default());
        let text = serde_json::to_string(&config).expect("text");
        assert_eq!(serde_json::from_str::<Config>(&text).expect("a config"), config);
    }

    #[test]
    fn a_file_with_a_mistake_is_refused() {
        for (text, named) in [
            (r#"{"heartbeat": "1s"}"#, "heartbeat"),
            (r#"{"flush_interval": "5 parsecs"}"#, "parsecs"),
            (r#"{"flush_interval": 5}"#, "integer"),
            (r#"{"vnodes": -1}"#, "-1"),
        ] {
            let error = serde_json::from_str::<Config>(text).expect_err(text).to_string();
            assert!(error.contains(named), "{error}");
        }
    }
}
