//! The reader's end of a mailbox.

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use futures_core::Stream;

use super::membership::Membership;
use crate::driver::mailbox::{ClosedReason, Mailbox};
use crate::driver::message::Message;
use crate::types::{Group, MemberId};

/// Messages of one group through a bounded mailbox: a [`Stream`] that leaves the group when it is dropped.
///
/// Reading is cancel-safe: a `recv` that is dropped has taken no message. A reader that is too slow loses
/// messages as [`Overflow`](crate::Overflow) says, and learns of it by [`Message::missed`] of the next one.
///
/// ```
/// # use muster_router::{Muster, transport::memory::Network};
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let muster = Muster::builder("rooms").transport(Network::new().node("a")).start().await?;
/// let mut inbox = muster.subscribe("room:42").await?;
/// muster.broadcast("room:42", "hello").await?;
/// let message = inbox.recv().await.ok_or("closed")?;
/// assert_eq!(message.payload(), "hello");
/// # Ok(())
/// # }
/// ```
pub struct Subscription {
    mailbox: Arc<Mailbox>,
    membership: Membership,
}

impl Subscription {
    pub(crate) fn new(mailbox: Arc<Mailbox>, membership: Membership) -> Self {
        Self { mailbox, membership }
    }

    /// The next message, in the order in which they came. `None` when the subscription is closed and everything
    /// that waited has been read. Cancel-safe.
    pub async fn recv(&mut self) -> Option<Message> {
        poll_fn(|context| self.mailbox.poll(context)).await
    }

    /// The next message if one waits.
    pub fn try_recv(&mut self) -> Option<Message> {
        self.mailbox.pop()
    }

    /// Why no more messages come; `None` while they may. Messages that waited can still be read.
    pub fn closed_reason(&self) -> Option<ClosedReason> {
        self.mailbox.closed()
    }

    /// How many messages this mailbox has dropped in all because it was full.
    pub fn missed(&self) -> u64 {
        self.mailbox.missed_in_all()
    }

    /// How many messages wait.
    pub fn len(&self) -> usize {
        self.mailbox.len()
    }

    /// Whether no message waits.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The member, to leave it out of a broadcast ([`BroadcastOptions::except`](crate::BroadcastOptions::except)).
    pub fn id(&self) -> &MemberId {
        self.membership.id()
    }

    /// The group.
    pub fn group(&self) -> &Group {
        self.membership.group()
    }

    /// Leaves the group, as dropping does, but keeps what waits readable: the stream ends after that.
    pub fn close(&mut self) {
        self.mailbox.close(ClosedReason::Left);
        self.membership.release();
    }
}

impl Stream for Subscription {
    type Item = Message;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Message>> {
        self.mailbox.poll(context)
    }
}

impl Drop for Subscription {
    fn drop(&mut self) {
        self.mailbox.close(ClosedReason::Left);
    }
}

impl std::fmt::Debug for Subscription {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Subscription")
            .field("id", self.id())
            .field("group", self.group())
            .field("waiting", &self.len())
            .field("closed", &self.closed_reason())
            .finish()
    }
}
