//! Where the nodes of the check are: here, or each in a process of its own.

use std::net::SocketAddr;
use std::sync::Arc;

use super::Failure;
use super::cluster::{Cluster, Ports, Stop};
#[cfg(feature = "tcp")]
use super::fleet::Fleet;

/// Where the nodes are.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) enum Place {
    /// In this process, on a memory network.
    #[default]
    Memory,
    /// In this process, over TCP.
    #[cfg(feature = "tcp")]
    Tcp,
    /// In this process, over NATS: the server of this address, or one that is started for them.
    #[cfg(feature = "nats")]
    Nats { url: Option<String> },
    /// Each in its own process. What crashes elsewhere is killed (`kill -9`), or is stopped in order.
    #[cfg(feature = "tcp")]
    Processes { kill: bool },
}

/// The nodes, wherever they are.
pub(crate) enum Stage {
    Here(Arc<Cluster>),
    #[cfg(feature = "tcp")]
    Apart {
        fleet: Fleet,
        kill: bool,
    },
}

impl Stage {
    pub(crate) async fn start(place: Place, nodes: usize) -> Result<Self, Failure> {
        Ok(match place {
            Place::Memory => Self::Here(Cluster::start(nodes, Ports::Any).await?),
            #[cfg(feature = "tcp")]
            Place::Tcp => Self::Here(Cluster::start_tcp(nodes, Ports::Any).await?),
            #[cfg(feature = "nats")]
            Place::Nats { url } => Self::Here(Cluster::start_nats(nodes, Ports::Any, url).await?),
            #[cfg(feature = "tcp")]
            Place::Processes { kill } => Self::Apart { fleet: Fleet::start(nodes).await?, kill },
        })
    }

    pub(crate) fn addresses(&self) -> Vec<SocketAddr> {
        let named = match self {
            Self::Here(cluster) => cluster.addresses(),
            #[cfg(feature = "tcp")]
            Self::Apart { fleet, .. } => fleet.addresses(),
        };
        named.into_iter().map(|(_, address)| address).collect()
    }

    pub(crate) async fn start_node(&self, name: &str) -> Result<(), Failure> {
        match self {
            Self::Here(cluster) => cluster.start_node(name).await,
            #[cfg(feature = "tcp")]
            Self::Apart { fleet, .. } => fleet.start_node(name).await,
        }
    }

    pub(crate) async fn stop_node(&self, name: &str, stop: Stop) -> Result<(), Failure> {
        match self {
            Self::Here(cluster) => cluster.stop_node(name, stop).await,
            #[cfg(feature = "tcp")]
            Self::Apart { fleet, kill: true } => fleet.stop_node(name, stop).await,
            #[cfg(feature = "tcp")]
            Self::Apart { fleet, kill: false } => fleet.stop_node(name, Stop::Orderly).await,
        }
    }

    /// Restarts what the nodes share, if there is such a thing.
    pub(crate) async fn restart_network(&self) -> Result<(), Failure> {
        match self {
            Self::Here(cluster) => cluster.restart_network().await,
            #[cfg(feature = "tcp")]
            Self::Apart { .. } => Ok(()),
        }
    }

    pub(crate) async fn until_all_ready(&self) -> Result<(), Failure> {
        match self {
            Self::Here(cluster) => cluster.until_all_ready().await,
            #[cfg(feature = "tcp")]
            Self::Apart { fleet, .. } => fleet.until_all_ready().await,
        }
    }

    pub(crate) async fn shutdown(&self) {
        match self {
            Self::Here(cluster) => cluster.shutdown().await,
            #[cfg(feature = "tcp")]
            Self::Apart { fleet, .. } => fleet.shutdown().await,
        }
    }
}
