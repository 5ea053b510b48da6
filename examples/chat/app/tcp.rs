//! The nodes over TCP: in this process, or one of several processes.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::PathBuf;
use std::sync::Arc;

use muster_router::transport::Transport;
use muster_router::transport::tcp::{Secret, TcpTransport, TlsOptions};

use super::Failure;

/// What keeps strangers out.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Trust {
    pub(crate) secret_file: Option<PathBuf>,
    pub(crate) tls_dir: Option<PathBuf>,
}

/// Where each node is, and whom it asks for the others.
#[derive(Debug, Clone)]
pub(crate) struct Mesh {
    /// Name and address.
    nodes: Vec<(Arc<str>, String)>,
    seeds: Vec<String>,
    trust: Trust,
}

impl Mesh {
    /// Nodes on this machine, each the seed of all.
    pub(crate) fn local(names: impl IntoIterator<Item = Arc<str>>) -> Result<Self, Failure> {
        let names: Vec<_> = names.into_iter().collect();
        let addresses = free_addresses(names.len())?;
        let nodes: Vec<_> = names.into_iter().zip(addresses.iter().map(SocketAddr::to_string)).collect();
        let seeds = nodes.iter().map(|(_, address)| address.clone()).collect();
        Ok(Self { nodes, seeds, trust: Trust::default() })
    }

    /// One node that meets others elsewhere.
    pub(crate) fn one(name: Arc<str>, listen: String, seeds: Vec<String>, trust: Trust) -> Self {
        Self { nodes: vec![(name, listen)], seeds, trust }
    }

    pub(crate) fn nodes(&self) -> &[(Arc<str>, String)] {
        &self.nodes
    }

    pub(crate) fn transport(&self, name: &str) -> Result<Arc<dyn Transport>, Failure> {
        let (_, listen) =
            self.nodes.iter().find(|(known, _)| **known == *name).ok_or("a node without an address")?;
        let mut builder = TcpTransport::builder(name).listen(listen).seeds(&self.seeds);
        if let Some(file) = &self.trust.secret_file {
            builder = builder.secret(Secret::from_file(file)?);
        }
        if let Some(folder) = &self.trust.tls_dir {
            builder = builder.tls(TlsOptions::from_dir(folder)?);
        }
        Ok(Arc::new(builder.build()?))
    }
}

/// Addresses of this machine that nobody uses, and that no outgoing connection is given while their node is down:
/// below the range that the system takes those from.
pub(crate) fn free_addresses(count: usize) -> Result<Vec<SocketAddr>, Failure> {
    const PORTS: std::ops::Range<u16> = 10_000..32_000;
    let first = PORTS.start + u16::try_from(std::process::id() % 2000)? * 10;
    let free = (first..PORTS.end).chain(PORTS.start..first).filter_map(|port| {
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        // kept until all are found, or one would be found twice
        TcpListener::bind(address).ok().map(|kept| (address, kept))
    });
    let found: Vec<_> = free.take(count).collect();
    if found.len() < count {
        return Err("no free ports".into());
    }
    Ok(found.into_iter().map(|(address, _)| address).collect())
}
