//! What a member gets.

use std::fmt;
use std::sync::Arc;

use bytes::Bytes;

use crate::types::{BroadcastId, Group, NodeId};

/// A broadcast as it reaches a member. Cloning copies no payload.
///
/// ```
/// # use muster_router::{BroadcastId, Group, Incarnation, Message, NodeId, Peer};
/// # let origin = Peer::new(NodeId::new("a").unwrap(), Incarnation::MIN);
/// let message = Message::new("room:42", "hello", BroadcastId::new(origin, 1), Vec::new());
/// assert_eq!(message.payload(), "hello");
/// assert_eq!(message.payload(), b"hello".as_slice());
/// assert_eq!(message.group().as_bytes(), b"room:42");
/// assert_eq!(message.missed(), 0);
/// ```
#[derive(Clone)]
pub struct Message {
    shared: Arc<Shared>,
    missed: u64,
}

struct Shared {
    group: Group,
    payload: Bytes,
    id: BroadcastId,
    headers: Vec<(String, Bytes)>,
}

impl Message {
    /// A message for callers that wire the three hops themselves and deliver to the members of
    /// [`Muster::local_members`](crate::Muster::local_members).
    pub fn new(
        group: impl Into<Group>,
        payload: impl Into<Bytes>,
        id: BroadcastId,
        headers: Vec<(String, Bytes)>,
    ) -> Self {
        let shared = Shared { group: group.into(), payload: payload.into(), id, headers };
        Self { shared: Arc::new(shared), missed: 0 }
    }

    /// The group it was sent to.
    pub fn group(&self) -> &Group {
        &self.shared.group
    }

    /// What was sent; compares with `&str` and `&[u8]`.
    pub fn payload(&self) -> &Bytes {
        &self.shared.payload
    }

    /// The node where it was sent.
    pub fn origin(&self) -> &NodeId {
        &self.shared.id.origin.node
    }

    /// Its name in the whole cluster. The numbers of one origin rise in the order in which it sent them, so a
    /// member can tell when a change of the cluster has reordered them.
    pub fn id(&self) -> &BroadcastId {
        &self.shared.id
    }

    /// What the sender put beside the payload, in the sender's order.
    pub fn headers(&self) -> &[(String, Bytes)] {
        &self.shared.headers
    }

    /// The first header of this name.
    pub fn header(&self, name: &str) -> Option<&Bytes> {
        self.shared.headers.iter().find(|(key, _)| key == name).map(|(_, value)| value)
    }

    /// How many messages this mailbox has dropped between the message that was read before and this one,
    /// because it was full. Always 0 outside a [`Subscription`](crate::Subscription).
    pub fn missed(&self) -> u64 {
        self.missed
    }

    pub(crate) fn add_missed(&mut self, count: u64) {
        self.missed = self.missed.saturating_add(count);
    }
}

impl PartialEq for Message {
    fn eq(&self, other: &Self) -> bool {
        let (a, b) = (&*self.shared, &*other.shared);
        a.id == b.id && a.group == b.group && a.payload == b.payload && a.headers == b.headers
    }
}

impl Eq for Message {}

impl fmt::Debug for Message {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Message")
            .field("group", self.group())
            .field("id", self.id())
            .field("payload", self.payload())
            .field("headers", &self.headers().len())
            .field("missed", &self.missed)
            .finish()
    }
}

/// How a subscriber took a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Delivered {
    /// It has it.
    Accepted,
    /// It had no room and goes on without this one. Counted.
    Dropped,
    /// It wants no more: the member is removed, as by a leave.
    Closed,
}

/// So that a closure may return nothing.
impl From<()> for Delivered {
    fn from((): ()) -> Self {
        Delivered::Accepted
    }
}

/// Something that messages are given to: a channel's sending end, a closure, a type of yours.
///
/// `deliver` is called on the thread that brought the message, for one member after the other, so it must not
/// block: hand the message over and return. One that takes over 10 ms is counted and logged. A panic in it is
/// caught (with `panic = "unwind"`), counted, and ends that member only. It may call the library: no lock is
/// held, leaving and dropping guards take effect at once, and a broadcast is queued (bounded, else `Busy`) and
/// run when the outermost delivery of this thread is over. It must not wait for one there.
///
/// Messages of one origin to one group come in order while the cluster is ready and quiet; two threads may call
/// `deliver` at the same time for broadcasts of different nodes.
///
/// ```
/// use std::sync::atomic::{AtomicUsize, Ordering};
/// use muster_router::{Delivered, Message, Subscriber};
///
/// struct Counter(AtomicUsize);
///
/// impl Subscriber for Counter {
///     fn deliver(&self, _message: &Message) -> Delivered {
///         self.0.fetch_add(1, Ordering::Relaxed);
///         Delivered::Accepted
///     }
/// }
/// ```
pub trait Subscriber: Send + Sync + 'static {
    /// Takes one message; see the trait for what it may do.
    fn deliver(&self, message: &Message) -> Delivered;

    /// Whether `deliver` only hands over and always returns at once, as the channels here do: such a one is not
    /// timed, which for a group of a thousand is half of the work. Asked once, when it joins.
    fn is_prompt(&self) -> bool {
        false
    }
}

impl<S: Subscriber + ?Sized> Subscriber for Arc<S> {
    fn deliver(&self, message: &Message) -> Delivered {
        (**self).deliver(message)
    }
    fn is_prompt(&self) -> bool {
        (**self).is_prompt()
    }
}

impl<S: Subscriber + ?Sized> Subscriber for Box<S> {
    fn deliver(&self, message: &Message) -> Delivered {
        (**self).deliver(message)
    }
    fn is_prompt(&self) -> bool {
        (**self).is_prompt()
    }
}

/// A full channel drops the message; one whose receiver is gone ends the member.
impl Subscriber for tokio::sync::mpsc::Sender<Message> {
    fn deliver(&self, message: &Message) -> Delivered {
        use tokio::sync::mpsc::error::TrySendError;
        match self.try_send(message.clone()) {
            Ok(()) => Delivered::Accepted,
            Err(TrySendError::Full(_)) => Delivered::Dropped,
            Err(TrySendError::Closed(_)) => Delivered::Closed,
        }
    }
    fn is_prompt(&self) -> bool {
        true
    }
}

/// One whose receiver is gone ends the member. Nothing bounds what a receiver that does not read leaves
/// waiting.
impl Subscriber for tokio::sync::mpsc::UnboundedSender<Message> {
    fn deliver(&self, message: &Message) -> Delivered {
        match self.send(message.clone()) {
            Ok(()) => Delivered::Accepted,
            Err(_) => Delivered::Closed,
        }
    }
    fn is_prompt(&self) -> bool {
        true
    }
}

/// Without a receiver the message is dropped: others may subscribe to the sender later.
impl Subscriber for tokio::sync::broadcast::Sender<Message> {
    fn deliver(&self, message: &Message) -> Delivered {
        match self.send(message.clone()) {
            Ok(_) => Delivered::Accepted,
            Err(_) => Delivered::Dropped,
        }
    }
    fn is_prompt(&self) -> bool {
        true
    }
}

/// A closure as a subscriber; see [`Muster::join_fn`](crate::Muster::join_fn).
pub(crate) struct FnSubscriber<F>(pub(crate) F);

impl<F, R> Subscriber for FnSubscriber<F>
where
    F: Fn(&Message) -> R + Send + Sync + 'static,
    R: Into<Delivered>,
{
    fn deliver(&self, message: &Message) -> Delivered {
        (self.0)(message).into()
    }
}
