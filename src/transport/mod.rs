//! The network, as the router sees it: something that moves frames between peers.
//!
//! The crate decides who must hear a message; a [`Transport`] carries it there.

pub(crate) mod calls;
pub mod endpoint;
pub mod link;
pub mod memory;
#[cfg(feature = "nats")]
pub mod nats;
pub(crate) mod rooms;
#[cfg(feature = "tcp")]
pub mod tcp;
pub(crate) mod wire;

use std::fmt;
use std::sync::{Arc, Weak};

use async_trait::async_trait;
use bytes::Bytes;

use crate::types::{NodeId, Peer};

/// Frames of one lane arrive in the order in which they were sent; lanes do not wait for one another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Lane {
    /// Small messages of the protocol; never stuck behind the other lanes.
    Control,
    /// Broadcasts.
    Data,
    /// Snapshots and other large transfers.
    Bulk,
}

impl Lane {
    /// All lanes, the most urgent first.
    pub const ALL: [Lane; 3] = [Lane::Control, Lane::Data, Lane::Bulk];

    /// The place of this lane in [`Lane::ALL`].
    pub const fn index(self) -> usize {
        match self {
            Lane::Control => 0,
            Lane::Data => 1,
            Lane::Bulk => 2,
        }
    }
}

/// One message on its way to one peer. The head is the library's, the body is the user's payload, passed
/// on without a copy. A transport must not look inside either.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frame {
    /// In which order it travels.
    pub lane: Lane,
    /// What the library says about it.
    pub head: Bytes,
    /// The payload; may be empty.
    pub body: Bytes,
}

impl Frame {
    /// A frame on `lane`.
    pub fn new(lane: Lane, head: impl Into<Bytes>, body: impl Into<Bytes>) -> Self {
        Self { lane, head: head.into(), body: body.into() }
    }

    /// Head and body together, in bytes.
    pub fn len(&self) -> usize {
        self.head.len() + self.body.len()
    }

    /// Whether head and body are both empty.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Why a frame was not accepted. The frame comes back and nothing was sent.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SendError {
    /// The lane's queue to that peer is full; try again when it has moved.
    #[error("the queue to this peer is full")]
    Busy(Frame),
    /// There is no link to exactly this peer (this life of the node).
    #[error("there is no link to this peer")]
    NoLink(Frame),
    /// The frame is larger than the transport can carry ([`Transport::max_frame`]).
    #[error("a frame of {} bytes is larger than the transport carries", .0.len())]
    TooLarge(Frame),
}

impl SendError {
    /// The frame that was not sent.
    pub fn into_frame(self) -> Frame {
        match self {
            SendError::Busy(frame) | SendError::NoLink(frame) | SendError::TooLarge(frame) => frame,
        }
    }

    /// Whether the same send may succeed later without anything else changing.
    pub fn is_retryable(&self) -> bool {
        matches!(self, SendError::Busy(_))
    }
}

impl fmt::Debug for SendError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (name, frame) = match self {
            SendError::Busy(frame) => ("Busy", frame),
            SendError::NoLink(frame) => ("NoLink", frame),
            SendError::TooLarge(frame) => ("TooLarge", frame),
        };
        write!(f, "{name}({:?}, {} bytes)", frame.lane, frame.len())
    }
}

/// Why a transport could not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TransportError {
    /// It runs already; one transport value serves one scope.
    #[error("the transport of node {node} runs already; one transport value serves one scope at a time")]
    AlreadyStarted {
        /// The node of the transport.
        node: NodeId,
    },
    /// Another live node holds this name.
    #[error(
        "node {node} is refused: a live node of that name is on this network, in incarnation {live}; choose \
         another name, stop that node, or give each scope a network of its own"
    )]
    Superseded {
        /// The name that both claim.
        node: NodeId,
        /// The incarnation that holds it.
        live: crate::types::Incarnation,
    },
    /// The node's name is none.
    #[error("the transport could not start: {0}")]
    Name(#[from] crate::types::NameError),
    /// The network said no, in its own words.
    #[error("the transport could not start: {reason}")]
    Failed {
        /// What the network said.
        reason: String,
    },
}

/// Moves frames between the peers of one scope.
///
/// The contract, which the conformance suite checks:
/// * frames of one lane to one peer arrive in order, each once;
/// * `peer_up` has returned at *both* ends before either end's frames are delivered or sent;
/// * `peer_down` comes after the last frame of that peer; no frame of a closed session reaches the next;
/// * a session takes frames from its `peer_up` on and until its end is decided: from there to the next `peer_up`
///   there is no link, also while `peer_down` is being reported, and also for a `send` that waits for room;
/// * when one end has reported `peer_down`, the other reports it too before either reports that peer up again;
/// * a node reborn under its name: `peer_down` of the old life, then `peer_up` of the new one;
/// * `try_send` and `send` never call the [`Inbound`] handle before they return (no re-entrance), and the
///   frames of one peer are reported by one thread at a time.
#[async_trait]
pub trait Transport: Send + Sync + 'static {
    /// The name under which this transport joins the network.
    fn node(&self) -> &NodeId;

    /// Joins the network under a fresh, higher incarnation and reports peers and frames to `inbound`.
    /// May be called again after [`Transport::shutdown`].
    ///
    /// # Errors
    /// [`TransportError`]; nothing runs then.
    async fn start(&self, inbound: Inbound) -> Result<Peer, TransportError>;

    /// Hands over one frame, waiting for room. `Ok` means accepted for in-order delivery to exactly this
    /// peer on that lane. Cancel-safe: dropped before it returns, the frame was either not accepted or is
    /// accepted whole.
    ///
    /// # Errors
    /// [`SendError::NoLink`] or [`SendError::TooLarge`], which give the frame back.
    async fn send(&self, to: &Peer, frame: Frame) -> Result<(), SendError>;

    /// The same without waiting.
    ///
    /// # Errors
    /// [`SendError`], which gives the frame back.
    fn try_send(&self, to: &Peer, frame: Frame) -> Result<(), SendError>;

    /// The longest frame, head and body together, in bytes, that this transport takes; [`SendError::TooLarge`] is
    /// for longer ones only. A scope whose options allow longer ones does not start. It never changes.
    fn max_frame(&self) -> usize;

    /// Leaves the network: every link is closed, every task of the transport ends, and nothing is reported
    /// any more once this has returned.
    async fn shutdown(&self);
}

#[async_trait]
impl<T: Transport + ?Sized> Transport for Arc<T> {
    fn node(&self) -> &NodeId {
        (**self).node()
    }
    async fn start(&self, inbound: Inbound) -> Result<Peer, TransportError> {
        (**self).start(inbound).await
    }
    async fn send(&self, to: &Peer, frame: Frame) -> Result<(), SendError> {
        (**self).send(to, frame).await
    }
    fn try_send(&self, to: &Peer, frame: Frame) -> Result<(), SendError> {
        (**self).try_send(to, frame)
    }
    fn max_frame(&self) -> usize {
        (**self).max_frame()
    }
    async fn shutdown(&self) {
        (**self).shutdown().await;
    }
}

/// What a transport tells the router. None of it waits. It may hand the transport frames by
/// [`Transport::try_send`], so a transport must hold no lock that `try_send` needs while it reports.
pub trait Receiver: Send + Sync + 'static {
    /// A link to this peer exists. Returns before either side sends on it. A later life of the node's own name
    /// says that this one has been superseded: the router takes no further part.
    fn peer_up(&self, peer: Peer);
    /// Its link broke or fell silent; frames to it are kept for now.
    fn peer_suspect(&self, peer: &Peer);
    /// The same link is back and nothing was lost.
    fn peer_resumed(&self, peer: &Peer);
    /// The link is given up. Comes after the last frame of that peer.
    fn peer_down(&self, peer: &Peer);
    /// Every known address has been tried once.
    fn discovery_settled(&self);
    /// A frame of that peer.
    fn frame(&self, peer: &Peer, frame: Frame);
    /// Frames of that peer that came together, in order: one step, so that what follows from all of them (an
    /// acknowledgement, a wake-up) happens once.
    fn frames(&self, peer: &Peer, frames: Vec<Frame>) {
        for frame in frames {
            self.frame(peer, frame);
        }
    }
}

/// What a link handshake must agree on, given to a transport when it starts: a peer whose values differ
/// is refused, and the refusal names both.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Terms {
    /// The scope's name.
    pub scope: String,
    /// Tokens per node on the ring.
    pub vnodes: u32,
    /// The major version of the protocol.
    pub protocol: u16,
}

/// The router's end of a transport: a weak handle, so that a transport never keeps a scope alive. All
/// calls are no-ops once the scope has gone.
#[derive(Clone)]
pub struct Inbound {
    receiver: Weak<dyn Receiver>,
    terms: Arc<Terms>,
}

impl Inbound {
    /// A handle on `receiver`, for a scope of these terms.
    pub fn new(receiver: Weak<dyn Receiver>, terms: Terms) -> Self {
        Self { receiver, terms: Arc::new(terms) }
    }

    /// What the handshake of a link must agree on.
    pub fn terms(&self) -> &Terms {
        &self.terms
    }

    /// See [`Receiver::peer_up`].
    pub fn peer_up(&self, peer: Peer) {
        if let Some(receiver) = self.receiver.upgrade() {
            receiver.peer_up(peer);
        }
    }

    /// See [`Receiver::peer_suspect`].
    pub fn peer_suspect(&self, peer: &Peer) {
        if let Some(receiver) = self.receiver.upgrade() {
            receiver.peer_suspect(peer);
        }
    }

    /// See [`Receiver::peer_resumed`].
    pub fn peer_resumed(&self, peer: &Peer) {
        if let Some(receiver) = self.receiver.upgrade() {
            receiver.peer_resumed(peer);
        }
    }

    /// See [`Receiver::peer_down`].
    pub fn peer_down(&self, peer: &Peer) {
        if let Some(receiver) = self.receiver.upgrade() {
            receiver.peer_down(peer);
        }
    }

    /// See [`Receiver::discovery_settled`].
    pub fn discovery_settled(&self) {
        if let Some(receiver) = self.receiver.upgrade() {
            receiver.discovery_settled();
        }
    }

    /// See [`Receiver::frame`].
    pub fn frame(&self, peer: &Peer, frame: Frame) {
        if let Some(receiver) = self.receiver.upgrade() {
            receiver.frame(peer, frame);
        }
    }

    /// See [`Receiver::frames`].
    pub fn frames(&self, peer: &Peer, frames: Vec<Frame>) {
        if let Some(receiver) = self.receiver.upgrade() {
            receiver.frames(peer, frames);
        }
    }
}

impl fmt::Debug for Inbound {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Inbound").field("terms", &self.terms).finish_non_exhaustive()
    }
}
