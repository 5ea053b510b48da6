//! What a test and its nodes say to each other, one JSON value a line.

use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

/// Microseconds of the machine's clock, which all processes share.
pub type Micros = u64;

pub fn now() -> Micros {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970");
    u64::try_from(since.as_micros()).expect("before the year 500,000")
}

/// How a node is started.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Setup {
    pub name: String,
    pub listen: String,
    pub advertise: Option<String>,
    pub seeds: Vec<String>,
    pub dns: Option<String>,
    pub gossip: bool,
    pub secret: Option<String>,
    /// The incarnation that its clock would give; for clocks that were set back.
    pub incarnation: Option<u64>,
    pub link: LinkSetup,
}

/// What differs from the default, in milliseconds and bytes.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct LinkSetup {
    pub ping_timeout: Option<u64>,
    pub stall_timeout: Option<u64>,
    pub queue_bytes: Option<usize>,
}

#[derive(Debug, Serialize, Deserialize)]
pub struct Command {
    pub re: u64,
    pub act: Act,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Act {
    Start(Setup),
    Join {
        group: String,
        member: u32,
    },
    Leave {
        member: u32,
    },
    /// Broadcasts to the group at these times until told to rest, whatever becomes of the earlier ones.
    Load {
        group: String,
        every: Micros,
        size: usize,
    },
    /// Ends the load; answered when nothing is under way.
    Rest,
    /// A group of this prefix that `node` routes.
    RoutedBy {
        node: String,
        prefix: String,
    },
    Report,
    Dump,
    Drain {
        millis: u64,
    },
    Shutdown,
}

/// What a node says.
#[derive(Debug, Serialize, Deserialize)]
pub enum Word {
    Answer { re: u64, result: Result<Answer, String> },
    State(State),
    Event { at: Micros, what: Happened, node: String },
    Cast(Cast),
}

#[derive(Debug, Serialize, Deserialize)]
pub enum Answer {
    Done,
    Started { address: String, incarnation: u64 },
    Joined { at: Micros },
    Group(String),
    Report(Report),
    Text(String),
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct State {
    pub at: Micros,
    pub ready: bool,
    pub superseded: bool,
    /// Name and incarnation of each.
    pub view: Vec<(String, u64)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Happened {
    Up,
    Down,
    Suspect,
    Resumed,
    Superseded,
    Partitioned,
}

/// A broadcast that came to its end.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Cast {
    pub incarnation: u64,
    pub group: String,
    pub number: u64,
    /// Just before the call, and just after it.
    pub sent: Micros,
    pub ended: Micros,
    pub flooded: bool,
    pub error: Option<String>,
}

#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Report {
    /// Node, incarnation of each origin that is named below by its place.
    pub origins: Vec<(String, u64)>,
    /// Member, origin, number of the broadcast, when.
    pub got: Vec<(u32, usize, u64, Micros)>,
    /// The longest that a thread of this process overslept since the load began: how busy the machine was.
    pub lag: Micros,
    /// Memory in use, and the most that ever was, in KiB.
    pub resident: u64,
    pub peak: u64,
}
