//! A transport of one's own: WebSockets, with axum on the accepting side and tokio-tungstenite on the dialling one.
//!
//! `cargo run --example custom_transport` starts three nodes that meet over it; `cargo test --example
//! custom_transport` holds it against the conformance suite. The guide `muster_router::guide::own_transport` explains
//! each step.

use std::collections::BTreeMap;
use std::error::Error;
use std::future::ready;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use axum::Router;
use axum::extract::ws::{self, WebSocketUpgrade};
use axum::routing::any;
use bytes::Bytes;
use futures_util::{Sink, SinkExt, Stream, StreamExt};
use muster_router::transport::endpoint::{Attempt, Endpoint, MESSAGE_OVERHEAD, Running};
use muster_router::transport::link::LinkConfig;
use muster_router::transport::{Frame, Inbound, SendError, Transport, TransportError};
use muster_router::{Muster, NodeId, Peer, Status};
use parking_lot::Mutex;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;
use tokio_tungstenite::tungstenite;
use tokio_tungstenite::tungstenite::protocol::WebSocketConfig;

/// The longest frame; a WebSocket library refuses messages that are longer than it was told to expect.
const MAX_FRAME: usize = 8 << 20;
const MAX_MESSAGE: usize = MAX_FRAME + MESSAGE_OVERHEAD;

/// Who is where: stands for the discovery that you have (etcd, Consul, a file). It gives each name once.
#[derive(Default)]
struct Directory {
    addresses: Mutex<BTreeMap<NodeId, SocketAddr>>,
    changed: Notify,
    /// Pairs that may not dial each other, for the tests.
    #[cfg(test)]
    apart: Mutex<Vec<[NodeId; 2]>>,
}

/// A name in the directory, until it is dropped.
struct Entry(Arc<Directory>, NodeId);

impl Drop for Entry {
    fn drop(&mut self) {
        self.0.addresses.lock().remove(&self.1);
    }
}

impl Directory {
    fn enter(self: &Arc<Self>, node: &NodeId, address: SocketAddr) -> Result<Entry, TransportError> {
        let mut addresses = self.addresses.lock();
        if addresses.contains_key(node) {
            return Err(TransportError::Failed { reason: format!("the name {node} is taken") });
        }
        addresses.insert(node.clone(), address);
        self.changed.notify_waiters();
        Ok(Entry(self.clone(), node.clone()))
    }

    /// The others that a node may dial.
    fn others(&self, me: &NodeId) -> Vec<(NodeId, SocketAddr)> {
        let mut others: Vec<_> = self.addresses.lock().iter().map(|(node, at)| (node.clone(), *at)).collect();
        #[cfg(test)]
        others.retain(|(node, _)| !self.apart.lock().contains(&[me.clone(), node.clone()]));
        others.retain(|(node, _)| node != me);
        others
    }
}

/// The transport: an [`Endpoint`], which keeps the contract, on a network of WebSockets.
struct WebSockets {
    endpoint: Endpoint,
    directory: Arc<Directory>,
}

impl WebSockets {
    fn new(node: NodeId, directory: Arc<Directory>, link: LinkConfig) -> Self {
        let link = LinkConfig { max_frame: MAX_FRAME, ..link };
        Self { endpoint: Endpoint::new(node, link), directory }
    }
}

#[async_trait]
impl Transport for WebSockets {
    fn node(&self) -> &NodeId {
        self.endpoint.node()
    }
    async fn start(&self, inbound: Inbound) -> Result<Peer, TransportError> {
        let failed = |error: std::io::Error| TransportError::Failed { reason: error.to_string() };
        let listener = TcpListener::bind("127.0.0.1:0").await.map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        let directory = &self.directory;
        let join = |running: Running| {
            let entry = directory.enter(running.node(), address)?;
            running.spawn(accept(running.clone(), listener, entry));
            running.spawn(dial_all(running.clone(), directory.clone()));
            Ok(directory.others(running.node()).into_iter().map(|(node, _)| node).collect::<Vec<_>>())
        };
        self.endpoint.start(inbound, join).await
    }
    async fn send(&self, to: &Peer, frame: Frame) -> Result<(), SendError> {
        self.endpoint.send(to, frame).await
    }
    fn try_send(&self, to: &Peer, frame: Frame) -> Result<(), SendError> {
        self.endpoint.try_send(to, frame)
    }
    fn max_frame(&self) -> usize {
        self.endpoint.max_frame()
    }
    async fn shutdown(&self) {
        self.endpoint.shutdown().await;
    }
}

/// Serves `/link`. Your own server can have it among its routes.
async fn accept(running: Running, listener: TcpListener, _entry: Entry) {
    let link = move |upgrade: WebSocketUpgrade| {
        let running = running.clone();
        let upgrade =
            upgrade.read_buffer_size(16 << 10).max_message_size(MAX_MESSAGE).max_frame_size(MAX_MESSAGE);
        ready(upgrade.on_upgrade(async move |socket| {
            let read = |message| if let ws::Message::Binary(bytes) = message { Some(bytes) } else { None };
            let (stream, sink) = halves(socket, read, ws::Message::Binary);
            // nobody has proved who is at the other end: put your authentication in front of this
            running.accepted(None, stream, sink).await;
        }))
    };
    let _ = axum::serve(listener, Router::new().route("/link", any(link))).await;
}

/// Dials everybody in the directory whom there is no connection to. Of a pair the lower name dials: if both did, one
/// of the two connections would be closed again.
async fn dial_all(running: Running, directory: Arc<Directory>) {
    loop {
        let changed = directory.changed.notified();
        for (node, address) in directory.others(running.node()) {
            if running.node() < &node
                && let Some(attempt) = running.attempt(&node)
            {
                running.spawn(dial(attempt, address));
            }
        }
        let _ = tokio::time::timeout(Duration::from_millis(200), changed).await;
    }
}

async fn dial(attempt: Attempt, address: SocketAddr) {
    let Ok(stream) = TcpStream::connect(address).await else { return };
    let config = WebSocketConfig::default()
        .read_buffer_size(16 << 10)
        .max_message_size(Some(MAX_MESSAGE))
        .max_frame_size(Some(MAX_MESSAGE));
    let url = format!("ws://{address}/link");
    let upgrade = tokio_tungstenite::client_async_with_config(url, stream, Some(config));
    // a server that says nothing must not keep this attempt for ever
    let Ok(Ok((socket, _))) = tokio::time::timeout(Duration::from_secs(3), upgrade).await else { return };
    let read = |message| if let tungstenite::Message::Binary(bytes) = message { Some(bytes) } else { None };
    let (stream, sink) = halves(socket, read, tungstenite::Message::Binary);
    attempt.carry(stream, sink).await;
}

/// What an [`Endpoint`] carries: a stream and a sink of whole messages. What `read` makes nothing of (pings and the
/// like) is the WebSocket's own affair.
fn halves<S, M, E>(
    socket: S,
    read: fn(M) -> Option<Bytes>,
    write: fn(Bytes) -> M,
) -> (impl Stream<Item = Result<Bytes, E>>, impl Sink<Bytes>)
where
    S: Stream<Item = Result<M, E>> + Sink<M, Error = E>,
{
    let (sink, stream) = socket.split();
    let stream = stream.filter_map(move |message| ready(message.map(read).transpose()));
    (stream, sink.with(move |bytes| ready(Ok::<_, E>(write(bytes)))))
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let directory = Arc::new(Directory::default());
    let mut nodes = Vec::new();
    for name in ["a", "b", "c"] {
        let transport = WebSockets::new(NodeId::new(name)?, directory.clone(), LinkConfig::default());
        nodes.push(Muster::builder("rooms").transport(transport).start().await?);
        println!("node {name} listens on {:?}", directory.addresses.lock().get(&NodeId::new(name)?));
    }
    let mut inboxes = Vec::new();
    for node in &nodes {
        node.until(Duration::from_secs(10), |s| s.status == Status::Ready && s.view.len() == 3).await?;
        inboxes.push(node.subscribe("room:42").await?);
    }
    for node in &nodes {
        let receipt = node.broadcast("room:42", format!("hello from {}", node.node())).await?;
        println!("{} has spoken: {:?}, {:?} nodes have it", node.node(), receipt.decision, receipt.nodes);
        for (inbox, at) in inboxes.iter_mut().zip(&nodes) {
            let message = inbox.recv().await.ok_or("the inbox was closed")?;
            println!("  {} has heard: {}", at.node(), String::from_utf8_lossy(message.payload()));
        }
    }
    Ok(())
}

/// What the conformance suite needs: transports on one network, and faults.
#[cfg(test)]
mod tests {
    use super::*;
    use muster_router::testing::conformance::{Harness, Unsupported, patient_links};

    fn id(name: &str) -> NodeId {
        NodeId::new(name).unwrap()
    }

    #[derive(Default)]
    struct Harnessed(Arc<Directory>, Mutex<BTreeMap<String, Arc<WebSockets>>>);

    #[async_trait]
    impl Harness for Harnessed {
        async fn new() -> Self {
            Self::default()
        }
        async fn transport(&self, node: &str) -> Arc<dyn Transport> {
            let transport = Arc::new(WebSockets::new(id(node), self.0.clone(), patient_links()));
            self.1.lock().insert(node.to_owned(), transport.clone());
            transport
        }
        async fn blip(&self, a: &str, b: &str) -> Result<(), Unsupported> {
            self.1.lock()[a].endpoint.break_connection(&id(b));
            Ok(())
        }
        async fn cut(&self, a: &str, b: &str) -> Result<(), Unsupported> {
            self.0.apart.lock().extend([[id(a), id(b)], [id(b), id(a)]]);
            self.blip(a, b).await
        }
        async fn heal(&self, _a: &str, _b: &str) -> Result<(), Unsupported> {
            self.0.apart.lock().clear();
            Ok(())
        }
        async fn crash(&self, node: &str) -> Result<(), Unsupported> {
            let crashing = self.1.lock()[node].clone();
            crashing.endpoint.abort().await;
            Ok(())
        }
    }

    muster_router::transport_conformance!(Harnessed);
}
