//! A pub/sub broadcast router for clusters, as an embeddable library.

mod config;
mod error;
pub mod node;
mod ring;
mod sync;
pub mod transport;
mod types;
mod view;

pub use config::{Config, ConfigError};
pub use error::{BroadcastError, DrainTimeout, JoinError, StartError, TryBroadcastError};
pub use ring::{Ring, RingConfig, key_hash};
pub use types::{
    BroadcastId, Group, Incarnation, MAX_NODE_ID_LEN, MemberId, NameError, NodeId, Peer, Version,
};
pub use view::{Standing, View, ViewHash};
