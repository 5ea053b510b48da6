//! A pub/sub broadcast router for clusters, as an embeddable library.

pub mod transport;
mod types;

pub use types::{BroadcastId, Group, Incarnation, MAX_NODE_ID_LEN, MemberId, NameError, NodeId, Peer, Version};
