use std::collections::{BTreeMap, btree_map};
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use futures_util::{Sink, Stream, sink, stream};
use muster_router::transport::endpoint::{Endpoint, Running};
use muster_router::transport::{Frame, Inbound, SendError, Transport, TransportError};
use muster_router::{NodeId, Peer};
use parking_lot::Mutex;
use tokio::sync::mpsc::{self, Receiver, Sender};

/// One end of a connection: what comes and what goes.
type Line = (Receiver<Bytes>, Sender<Bytes>);

fn halves((mut from, to): Line) -> (impl Stream<Item = Result<Bytes, Infallible>>, impl Sink<Bytes>) {
    let stream = stream::poll_fn(move |context| from.poll_recv(context).map(|bytes| bytes.map(Ok)));
    let sink = sink::unfold(to, |to, bytes| async move { to.send(bytes).await.map(|()| to) });
    (stream, sink)
}

/// The network: where each node takes calls. Yours is a listener, and a list of addresses from somewhere.
type Office = Arc<Mutex<BTreeMap<NodeId, Sender<Line>>>>;

/// A name in the office, until it is dropped: with the task that takes the calls, so with the life of its node.
struct Entry(Office, NodeId);

impl Entry {
    /// A name that is taken stays with its holder.
    fn new(office: &Office, node: &NodeId, calls: Sender<Line>) -> Result<Self, TransportError> {
        match office.lock().entry(node.clone()) {
            btree_map::Entry::Occupied(_) => {
                Err(TransportError::Failed { reason: format!("{node} is taken") })
            }
            btree_map::Entry::Vacant(free) => {
                free.insert(calls);
                Ok(Self(office.clone(), node.clone()))
            }
        }
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        self.0.lock().remove(&self.1);
    }
}

struct Post {
    endpoint: Endpoint,
    office: Office,
}

#[async_trait]
impl Transport for Post {
    fn node(&self) -> &NodeId {
        self.endpoint.node()
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
    async fn start(&self, inbound: Inbound) -> Result<Peer, TransportError> {
        // bind first: what fails before the life has begun needs no cleaning up
        let (sender, calls) = mpsc::channel(16);
        let join = |running: Running| {
            let me = running.node().clone();
            let entry = Entry::new(&self.office, &me, sender)?;
            running.spawn(accept(running.clone(), calls, entry));
            running.spawn(dial_all(running.clone(), self.office.clone()));
            // who is known to be there; the start waits until each of them is linked, or has been tried
            let others: Vec<NodeId> =
                self.office.lock().keys().filter(|node| **node != me).cloned().collect();
            Ok(others)
        };
        self.endpoint.start(inbound, join).await
    }
}

/// A connection comes in: give it to the endpoint. One task for each.
async fn accept(running: Running, mut calls: Receiver<Line>, _entry: Entry) {
    while let Some(line) = calls.recv().await {
        let carrier = running.clone();
        running.spawn(async move {
            let (stream, sink) = halves(line);
            carrier.accepted(None, stream, sink).await;
        });
    }
}

/// Again and again, for everybody known: is there something to dial? The endpoint says so, and spaces the attempts.
async fn dial_all(running: Running, office: Office) {
    loop {
        let known: Vec<(NodeId, Sender<Line>)> =
            office.lock().iter().map(|(n, s)| (n.clone(), s.clone())).collect();
        for (node, theirs) in known {
            // of a pair, the lower name dials
            if running.node() < &node
                && let Some(attempt) = running.attempt(&node)
            {
                running.spawn(async move {
                    let ((there, from), (here, to)) = (mpsc::channel(64), mpsc::channel(64));
                    // an attempt that is dropped here counts as tried in vain
                    let Ok(()) = theirs.send((from, here)).await else { return };
                    let (stream, sink) = halves((to, there));
                    attempt.carry(stream, sink).await;
                });
            }
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}
