//! Who is known, and how they are.

use std::net::SocketAddr;

use crate::types::NodeId;

/// How a node of the mesh is, as seen from here.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum MemberState {
    /// There is a connection to it.
    Linked,
    /// There is none, but others say that it lives: the way from here to there is what is broken.
    Unreachable,
    /// There is none, and it has answered nobody lately. Only with gossip.
    Suspect,
    /// There is none, and nobody is known to have one.
    Down,
}

/// A node that this one knows of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemberInfo {
    /// Its name.
    pub node: NodeId,
    /// Where it is dialled. What it said of itself, or else what others say; `None` if that cannot be dialled.
    pub address: Option<SocketAddr>,
    /// How it is.
    pub state: MemberState,
}
