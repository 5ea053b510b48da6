//! What the conductor and its processes say to each other: one JSON value a line, one answer for each act.

use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

/// Nanoseconds of the machine's clock, which all processes share.
pub(crate) type Nanos = u64;

pub(crate) fn now() -> Nanos {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970");
    u64::try_from(since.as_nanos()).expect("before the year 2554")
}

/// The processor time of this process.
pub(crate) fn busy() -> Nanos {
    u64::try_from(cpu_time::ProcessTime::now().as_duration().as_nanos()).expect("not 500 years")
}

pub(crate) fn seconds(nanos: Nanos) -> f64 {
    nanos as f64 / 1e9
}

/// Names that every node with the same view derives alike.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Groups {
    pub(crate) prefix: String,
    pub(crate) count: usize,
    /// Only those that this node routes.
    pub(crate) router: Option<String>,
}

/// What a member does with what it gets.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) enum Kind {
    /// Counts it, on the thread that brought it.
    Counts,
    /// A channel without a bound, read by a task that counts.
    Reads,
    /// Notes when it came, for broadcasts of [`Act::Pace`].
    Notes,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum Act {
    Start {
        name: String,
        seeds: Vec<String>,
    },
    /// Waits until it is ready with so many in its view.
    Ready {
        nodes: usize,
    },
    /// So many callers make members in all groups, so many in each.
    Join {
        groups: Groups,
        members: usize,
        callers: usize,
        kind: Kind,
    },
    LeaveAll,
    /// So many callers broadcast, each one after the other, for a while.
    Saturate {
        groups: Groups,
        callers: usize,
        size: usize,
        millis: u64,
    },
    /// Broadcasts at fixed times, whether or not earlier ones have ended, until [`Act::Rest`].
    Pace {
        groups: Groups,
        a_second: u64,
        size: usize,
        /// Waits for each moment on the processor, so that the sleep's own lateness is not measured.
        exactly: bool,
    },
    Rest,
    /// What the noting members have noted since they were last asked.
    Noted {
        /// Each delivery, and not only the quantiles.
        all: bool,
    },
    /// First joins and broadcasts, one after the other, until [`Act::ProbeEnd`].
    Probe {
        prefix: String,
    },
    ProbeEnd,
    /// Waits until the members here have had so many deliveries, since their start.
    Counted {
        at_least: u64,
    },
    Replay {
        nodes: usize,
        index: usize,
        callers: usize,
    },
    /// Opens the cache.
    Open,
    /// So many callers put records that another node serves, or get them, each one after the other, for a while.
    Call {
        puts: bool,
        callers: usize,
        millis: u64,
    },
    Stats,
    Drain,
    Shutdown,
    /// Of a bare process: where it listens.
    Listen,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum Answer {
    Done,
    Failed(String),
    Started { address: String, began: Nanos },
    At(Nanos),
    Took { count: u64, nanos: Nanos },
    Sent { sent: u64, failed: u64 },
    Noted(Noted),
    Probed(Probed),
    Replayed(Replayed),
    Stats { bytes_in: u64, bytes_out: u64, busy: Nanos },
    Listening { echo: String, fan: String },
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Noted {
    pub(crate) count: u64,
    pub p50: Nanos,
    pub p99: Nanos,
    pub(crate) most: Nanos,
    /// The broadcast's number, when it was due, and when it came.
    pub(crate) all: Vec<(u64, Nanos, Nanos)>,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Probed {
    pub(crate) joins: u64,
    pub(crate) casts: u64,
    pub(crate) failed: u64,
    pub(crate) slowest_join: Nanos,
    pub(crate) slowest_cast: Nanos,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Replayed {
    pub(crate) events: u64,
    pub(crate) joins: u64,
    pub(crate) says: u64,
    pub(crate) bytes: u64,
    pub(crate) nanos: Nanos,
    pub(crate) failed: u64,
}
