//! What a scope says of itself: short, for monitors, and long, for people.

use std::fmt;

use serde::Serialize;

use crate::driver::stats::Counters;
use crate::node::{Counts, Status};
use crate::types::{Group, Peer};
use crate::view::{View, ViewHash};

/// A scope on this node in numbers. Cheap enough to be asked every second.
///
/// ```
/// # use muster_router::{Muster, transport::memory::Network};
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let muster = Muster::builder("rooms").transport(Network::new().node("a")).start().await?;
/// let json = serde_json::to_value(muster.summary())?;
/// assert_eq!(json["node"]["node"], "a");
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Summary {
    /// The scope's name.
    pub scope: String,
    /// This node, in this life.
    pub node: Peer,
    /// How sure it is of its routing table.
    pub status: Status,
    /// Its committed view.
    pub view: View,
    /// The view's hash.
    pub view_hash: ViewHash,
    /// The peers that the transport has connected.
    pub connected: Vec<Peer>,
    /// Those of them whose link makes no progress.
    pub suspect: Vec<Peer>,
    /// Whether it has found out if it has peers.
    pub settled: bool,
    /// Whether it drains.
    pub draining: bool,
    /// Whether a later life of its name has taken its place.
    pub superseded: bool,
    /// Whether it is stopped.
    pub stopped: bool,
    /// What it holds.
    pub holds: Counts,
    /// Memberships, those that are being joined included.
    pub memberships: usize,
    /// Joins that wait.
    pub joins_waiting: usize,
    /// Requests to other nodes that wait for an answer.
    pub calls_waiting: usize,
    /// Its broadcasts that are not acknowledged everywhere.
    pub broadcasts_open: usize,
    /// Broadcasts of others that it relays as their router.
    pub broadcasts_served: usize,
    /// Tasks that run for it.
    pub tasks: usize,
    /// Frames of peers that broke the protocol.
    pub violations: u64,
    /// What it has done since its start.
    pub counters: Counters,
}

/// Everything a scope knows, for people: print it. Takes time and memory in proportion to what it holds.
#[derive(Clone, Debug)]
pub struct Dump {
    pub(super) summary: Summary,
    pub(super) claims: Vec<(Group, &'static str, usize)>,
    pub(super) rows: Vec<(Group, Peer, u64, bool)>,
    pub(super) routers: Vec<Peer>,
    pub(super) drain_waiting_for: Vec<crate::types::NodeId>,
}

impl fmt::Display for Dump {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let s = &self.summary;
        writeln!(f, "scope {:?} on {}: {}", s.scope, s.node, s.status)?;
        writeln!(f, "  view {} hash {}", s.view, s.view_hash)?;
        for (name, yes) in [
            ("settled", s.settled),
            ("draining", s.draining),
            ("superseded", s.superseded),
            ("stopped", s.stopped),
        ] {
            if yes {
                writeln!(f, "  {name}")?;
            }
        }
        for peer in &s.connected {
            let mark = if s.suspect.contains(peer) { " suspect" } else { "" };
            writeln!(f, "  connected {peer}{mark}")?;
        }
        for peer in &self.routers {
            writeln!(f, "  routes {peer}")?;
        }
        for node in &self.drain_waiting_for {
            writeln!(f, "  drain waits for {node}")?;
        }
        writeln!(f, "  {:?}", s.holds)?;
        writeln!(
            f,
            "  memberships {} joins waiting {} calls waiting {} broadcasts open {} served {} tasks {} violations {}",
            s.memberships,
            s.joins_waiting,
            s.calls_waiting,
            s.broadcasts_open,
            s.broadcasts_served,
            s.tasks,
            s.violations
        )?;
        writeln!(f, "  {:?}", s.counters)?;
        writeln!(f, "groups of this node ({}):", self.claims.len())?;
        for (group, state, members) in &self.claims {
            writeln!(f, "  {group}: {state}, {members} members")?;
        }
        writeln!(f, "table of other nodes' groups ({}):", self.rows.len())?;
        for (group, peer, version, present) in &self.rows {
            let state = if *present { "present" } else { "tombstone" };
            writeln!(f, "  {group}: {peer} {state} since {version}")?;
        }
        Ok(())
    }
}
