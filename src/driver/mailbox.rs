//! A bounded queue between those who bring messages and the one who reads them.

use std::collections::VecDeque;
use std::task::{Context, Poll, Waker};

use parking_lot::Mutex;

use super::message::{Delivered, Message};

/// What happens when a message comes and the mailbox is full.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Overflow {
    /// The new message is dropped; what waits stays.
    #[default]
    DropNewest,
    /// The oldest waiting message is dropped.
    DropOldest,
    /// The subscription is closed: what waits can still be read, then it ends with
    /// [`ClosedReason::Overflow`].
    Disconnect,
}

/// How a subscription's mailbox behaves.
///
/// ```
/// use muster_router::{MailboxOptions, Overflow};
/// let options = MailboxOptions::default().capacity(64).overflow(Overflow::DropOldest);
/// assert_eq!(options.capacity, 64);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct MailboxOptions {
    /// How many messages may wait, at least 1 (0 counts as 1); 1024 unless said otherwise.
    pub capacity: usize,
    /// What happens beyond [`Overflow::DropNewest`].
    pub overflow: Overflow,
}

impl Default for MailboxOptions {
    fn default() -> Self {
        Self { capacity: 1024, overflow: Overflow::default() }
    }
}

impl MailboxOptions {
    /// Sets [`MailboxOptions::capacity`].
    #[must_use]
    pub fn capacity(mut self, capacity: usize) -> Self {
        self.capacity = capacity;
        self
    }

    /// Sets [`MailboxOptions::overflow`].
    #[must_use]
    pub fn overflow(mut self, overflow: Overflow) -> Self {
        self.overflow = overflow;
        self
    }
}

/// Why a subscription gets no more messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ClosedReason {
    /// It was full and its policy is [`Overflow::Disconnect`].
    Overflow,
    /// It was left.
    Left,
    /// The scope was stopped.
    Stopped,
}

/// One per subscription; the reader is one task, the writers are many.
pub(crate) struct Mailbox {
    state: Mutex<State>,
    options: MailboxOptions,
}

#[derive(Default)]
struct State {
    queue: VecDeque<Message>,
    /// Dropped since the last accepted message (`DropNewest`).
    missed: u64,
    missed_in_all: u64,
    closed: Option<ClosedReason>,
    reader: Option<Waker>,
}

impl Mailbox {
    pub(crate) fn new(options: MailboxOptions) -> Self {
        let options = MailboxOptions { capacity: options.capacity.max(1), ..options };
        Self { state: Mutex::default(), options }
    }

    /// Takes a message without ever waiting. What falls out and the waker are used after the unlock: a payload's
    /// drop or a waker may be anybody's code.
    pub(crate) fn deliver(&self, message: &Message) -> Delivered {
        let mut fallen = None;
        let (delivered, reader) = {
            let mut state = self.state.lock();
            if state.closed.is_some() {
                return Delivered::Closed;
            }
            let full = state.queue.len() >= self.options.capacity;
            match self.options.overflow {
                Overflow::DropNewest if full => {
                    state.missed += 1;
                    state.missed_in_all += 1;
                    return Delivered::Dropped;
                }
                Overflow::Disconnect if full => {
                    state.closed = Some(ClosedReason::Overflow);
                    (Delivered::Closed, state.reader.take())
                }
                Overflow::DropOldest if full => {
                    fallen = state.queue.pop_front();
                    state.missed_in_all += 1;
                    state.queue.push_back(message.clone());
                    // the reader learns of the gap at the message that follows it
                    let gap = fallen.as_ref().map_or(0, Message::missed) + 1;
                    if let Some(next) = state.queue.front_mut() {
                        next.add_missed(gap);
                    }
                    (Delivered::Dropped, state.reader.take())
                }
                Overflow::DropNewest | Overflow::Disconnect | Overflow::DropOldest => {
                    let mut message = message.clone();
                    message.add_missed(std::mem::take(&mut state.missed));
                    state.queue.push_back(message);
                    (Delivered::Accepted, state.reader.take())
                }
            }
        };
        drop(fallen);
        if let Some(reader) = reader {
            reader.wake();
        }
        delivered
    }

    /// No message is taken any more; the first reason stays.
    pub(crate) fn close(&self, reason: ClosedReason) {
        let reader = {
            let mut state = self.state.lock();
            state.closed.get_or_insert(reason);
            state.reader.take()
        };
        if let Some(reader) = reader {
            reader.wake();
        }
    }

    pub(crate) fn pop(&self) -> Option<Message> {
        self.state.lock().queue.pop_front()
    }

    pub(crate) fn closed(&self) -> Option<ClosedReason> {
        self.state.lock().closed
    }

    pub(crate) fn missed_in_all(&self) -> u64 {
        self.state.lock().missed_in_all
    }

    pub(crate) fn len(&self) -> usize {
        self.state.lock().queue.len()
    }

    /// The next message, or a wake-up when there is one.
    pub(crate) fn poll(&self, context: &mut Context<'_>) -> Poll<Option<Message>> {
        let mut state = self.state.lock();
        if let Some(message) = state.queue.pop_front() {
            return Poll::Ready(Some(message));
        }
        if state.closed.is_some() {
            return Poll::Ready(None);
        }
        let earlier = match &state.reader {
            Some(reader) if reader.will_wake(context.waker()) => None,
            Some(_) | None => state.reader.replace(context.waker().clone()),
        };
        drop(state);
        drop(earlier);
        Poll::Pending
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::{BroadcastId, Incarnation, NodeId, Peer};

    fn message(seq: u64) -> Message {
        let origin = Peer::new(NodeId::new("a").unwrap(), Incarnation::MIN);
        Message::new("g", "x", BroadcastId::new(origin, seq), Vec::new())
    }

    fn fill(overflow: Overflow, count: u64) -> (Mailbox, Vec<Delivered>) {
        let mailbox = Mailbox::new(MailboxOptions { capacity: 2, overflow });
        let delivered = (1..=count).map(|seq| mailbox.deliver(&message(seq))).collect();
        (mailbox, delivered)
    }

    fn read(mailbox: &Mailbox) -> Vec<(u64, u64)> {
        let mut state = mailbox.state.lock();
        state.queue.drain(..).map(|m| (m.id().seq, m.missed())).collect()
    }

    #[test]
    fn drop_newest_tells_the_gap_at_the_next_accepted_message() {
        let (mailbox, delivered) = fill(Overflow::DropNewest, 5);
        use Delivered::{Accepted, Dropped};
        assert_eq!(delivered, [Accepted, Accepted, Dropped, Dropped, Dropped]);
        assert_eq!(read(&mailbox), [(1, 0), (2, 0)]);
        mailbox.deliver(&message(6));
        mailbox.deliver(&message(7));
        assert_eq!(read(&mailbox), [(6, 3), (7, 0)]);
    }

    #[test]
    fn drop_oldest_tells_the_whole_gap_at_the_first_message_left() {
        let (mailbox, _) = fill(Overflow::DropOldest, 5);
        assert_eq!(read(&mailbox), [(4, 3), (5, 0)]);
        let (mailbox, _) = {
            let mailbox = Mailbox::new(MailboxOptions { capacity: 1, overflow: Overflow::DropOldest });
            (1..=4).for_each(|seq| {
                mailbox.deliver(&message(seq));
            });
            (mailbox, ())
        };
        assert_eq!(read(&mailbox), [(4, 3)]);
    }

    #[test]
    fn disconnect_keeps_what_waits_and_takes_no_more() {
        let (mailbox, delivered) = fill(Overflow::Disconnect, 4);
        use Delivered::{Accepted, Closed};
        assert_eq!(delivered, [Accepted, Accepted, Closed, Closed]);
        assert_eq!(read(&mailbox), [(1, 0), (2, 0)]);
        assert_eq!(mailbox.state.lock().closed, Some(ClosedReason::Overflow));
    }
}
