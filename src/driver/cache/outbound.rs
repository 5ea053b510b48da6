//! What the caches of a scope have to say to one peer, in order, for one session with it.
//!
//! Whoever has something to say queues it while it holds the lock of the shard that says it, so that the order of a
//! shard's messages is the order of its steps. Frames are made and sent afterwards, under no lock; messages that wait
//! together travel together. When the transport has no room, the peer's sender task goes on.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::Bytes;
use parking_lot::Mutex;

use crate::cache::node::{CacheMessage, codec};
use crate::driver::Driver;
use crate::transport::wire::{self, CacheHead};
use crate::transport::{Frame, Lane, SendError};
use crate::types::Peer;

/// No further message goes into a frame that has so many bytes.
const FRAME_BYTES: usize = 128 << 10;
/// What a frame may have besides its largest message: those before it, and what names and numbers take.
pub(super) const FRAME_REST: usize = 2 * FRAME_BYTES;
/// So many bytes of operations and answers may wait for one peer. Beyond, forwarded operations and reads are refused as
/// busy: a peer that takes little must not make this node keep all that is asked of it, or that it asks.
const BUDGET: usize = 64 << 20;
/// What precedes the messages of a shard in a body: its number in one byte, their length in four.
const PREFIX: usize = 5;

pub(super) enum Item {
    /// Of a shard of a cache.
    Message {
        cache: Arc<str>,
        shard: u8,
        message: Box<CacheMessage>,
        /// See [`CacheMessage::weight`].
        weight: usize,
    },
    /// The peer has spoken of a cache that is not open here.
    NotOpen { cache: String },
}

#[derive(Default)]
struct Queue {
    waiting: VecDeque<Item>,
    /// Found no room; the sender task takes it.
    blocked: Option<Frame>,
    /// Somebody makes and sends frames, and looks again before it stops.
    sending: bool,
    /// The session is over.
    over: bool,
}

/// The queues to one peer in one session, one for each lane that caches use.
#[derive(Default)]
pub(in crate::driver) struct Outbound {
    control: Mutex<Queue>,
    bulk: Mutex<Queue>,
    /// What the messages that wait weigh together.
    weight: AtomicUsize,
}

impl Queue {
    /// Before all that has come since.
    fn put_back(&mut self, mut rest: VecDeque<Item>) {
        if !self.over {
            rest.append(&mut self.waiting);
            self.waiting = rest;
        }
    }
}

impl Outbound {
    /// Caches say nothing on the data lane.
    fn queue(&self, lane: Lane) -> &Mutex<Queue> {
        match lane {
            Lane::Control => &self.control,
            Lane::Data | Lane::Bulk => &self.bulk,
        }
    }

    /// Whether so much waits for the peer that nothing more is taken on for it.
    pub(super) fn is_full(&self) -> bool {
        self.weight.load(Ordering::Relaxed) >= BUDGET
    }

    pub(super) fn push(&self, lane: Lane, item: Item) {
        let mut queue = self.queue(lane).lock();
        if !queue.over {
            self.weight.fetch_add(item.weight(), Ordering::Relaxed);
            queue.waiting.push_back(item);
        }
    }

    /// The session is over: what waits is lost, as what is in flight is.
    pub(in crate::driver) fn end(&self) {
        for queue in [&self.control, &self.bulk] {
            let waiting = {
                let mut queue = queue.lock();
                queue.over = true;
                (std::mem::take(&mut queue.waiting), queue.blocked.take())
            };
            drop(waiting);
        }
    }

    /// Sends what waits, as far as there is room.
    pub(super) fn flush(&self, driver: &Driver, peer: &Peer) {
        for lane in [Lane::Control, Lane::Bulk] {
            while let Some(batch) = self.claim(lane) {
                if !self.send_batch(driver, peer, lane, batch) {
                    driver.wake_senders(peer);
                    break;
                }
            }
        }
    }

    fn send_batch(&self, driver: &Driver, peer: &Peer, lane: Lane, mut batch: VecDeque<Item>) -> bool {
        while let Some(frame) = self.next_frame(lane, &mut batch) {
            match driver.transport.try_send(peer, frame) {
                Ok(()) => {}
                Err(SendError::Busy(frame) | SendError::NoLink(frame)) => {
                    let mut queue = self.queue(lane).lock();
                    queue.put_back(batch);
                    queue.blocked = Some(frame).filter(|_| !queue.over);
                    queue.sending = false;
                    return false;
                }
                Err(SendError::TooLarge(frame)) => driver.refused_as_too_large(peer, &frame),
            }
        }
        self.queue(lane).lock().sending = false;
        true
    }

    /// All that waits, for one who then sends.
    fn claim(&self, lane: Lane) -> Option<VecDeque<Item>> {
        let mut queue = self.queue(lane).lock();
        if queue.over || queue.sending || queue.blocked.is_some() || queue.waiting.is_empty() {
            return None;
        }
        queue.sending = true;
        Some(std::mem::take(&mut queue.waiting))
    }

    /// The next frame, for the sender task; [`Outbound::sent`] has to follow.
    pub(in crate::driver) fn take(&self, lane: Lane) -> Option<Frame> {
        let mut batch = {
            let mut queue = self.queue(lane).lock();
            if queue.over || queue.sending {
                return None;
            }
            if let Some(frame) = queue.blocked.take() {
                queue.sending = true;
                return Some(frame);
            }
            if queue.waiting.is_empty() {
                return None;
            }
            queue.sending = true;
            std::mem::take(&mut queue.waiting)
        };
        let frame = self.next_frame(lane, &mut batch);
        let mut queue = self.queue(lane).lock();
        queue.put_back(batch);
        queue.sending = frame.is_some();
        frame
    }

    pub(in crate::driver) fn sent(&self, lane: Lane) {
        self.queue(lane).lock().sending = false;
    }

    fn next_frame(&self, lane: Lane, batch: &mut VecDeque<Item>) -> Option<Frame> {
        let (frame, weight) = next_frame(lane, batch)?;
        self.weight.fetch_sub(weight, Ordering::Relaxed);
        Some(frame)
    }
}

impl Item {
    fn weight(&self) -> usize {
        match self {
            Item::Message { weight, .. } => *weight,
            Item::NotOpen { .. } => 0,
        }
    }
}

/// A frame of as many messages as fit, of one cache, and what they weighed. `None` if nothing waits.
fn next_frame(lane: Lane, batch: &mut VecDeque<Item>) -> Option<(Frame, usize)> {
    let mut weight = 0;
    loop {
        weight += batch.front()?.weight();
        match batch.pop_front()? {
            Item::NotOpen { cache } => {
                if let Some(head) = wire::encode_cache(&CacheHead::NotOpen { cache }) {
                    return Some((Frame::new(lane, head, Bytes::new()), weight));
                }
            }
            Item::Message { cache, shard, message, .. } => {
                let mut body = Body::default();
                body.add(shard, &message);
                while body.bytes.len() < FRAME_BYTES
                    && let Some(Item::Message { cache: next, .. }) = batch.front()
                    && *next == cache
                    && let Some(Item::Message { shard, message, weight: more, .. }) = batch.pop_front()
                {
                    weight += more;
                    body.add(shard, &message);
                }
                if let Some(head) = wire::encode_cache(&CacheHead::Messages { cache: cache.to_string() }) {
                    return Some((Frame::new(lane, head, body.finish()), weight));
                }
            }
        }
    }
}

/// The body of a frame: groups of messages, each of one shard: its number, a length in four bytes, the messages.
#[derive(Default)]
struct Body {
    bytes: Vec<u8>,
    /// The group that is being written, and where it begins.
    group: Option<(u8, usize)>,
}

impl Body {
    fn add(&mut self, shard: u8, message: &CacheMessage) {
        if self.group.is_none_or(|(open, _)| open != shard) {
            self.close();
            self.group = Some((shard, self.bytes.len()));
            self.bytes.push(shard);
            self.bytes.extend_from_slice(&[0; 4]);
        }
        if let Err(error) = codec::encode(message, &mut self.bytes) {
            // no message of ours
            tracing::error!(%error);
        }
    }

    fn close(&mut self) {
        let Some((_, start)) = self.group.take() else { return };
        let length = u32::try_from(self.bytes.len() - start - PREFIX).unwrap_or(u32::MAX);
        if let Some(place) = self.bytes.get_mut(start + 1..start + PREFIX) {
            place.copy_from_slice(&length.to_le_bytes());
        }
    }

    fn finish(mut self) -> Vec<u8> {
        self.close();
        self.bytes
    }
}

/// The messages of a body by shard, in their order; `None` if it is malformed: then none of them is taken.
pub(super) fn decode(mut body: &[u8]) -> Option<Vec<(u8, Vec<CacheMessage>)>> {
    let mut groups = Vec::new();
    while let Some((&[shard, a, b, c, d], rest)) = body.split_first_chunk::<PREFIX>() {
        let length = usize::try_from(u32::from_le_bytes([a, b, c, d])).ok()?;
        let (messages, rest) = rest.split_at_checked(length)?;
        groups.push((shard, codec::decode(messages).ok()?));
        body = rest;
    }
    body.is_empty().then_some(groups)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(shard: u8, cache: &Arc<str>) -> Item {
        Item::Message { cache: cache.clone(), shard, message: Box::new(CacheMessage::Bye), weight: 10 }
    }

    #[test]
    fn messages_travel_together_and_keep_their_order() {
        let (one, other): (Arc<str>, Arc<str>) = ("one".into(), "other".into());
        let items = [message(3, &one), message(3, &one), message(0, &one), message(3, &one)];
        let mut batch: VecDeque<Item> = items.into_iter().chain([message(1, &other)]).collect();
        batch.push_back(Item::NotOpen { cache: "third".into() });
        let (frame, weight) = next_frame(Lane::Control, &mut batch).unwrap();
        assert_eq!(weight, 40);
        let groups = decode(&frame.body).unwrap();
        let lengths: Vec<_> = groups.iter().map(|(shard, messages)| (*shard, messages.len())).collect();
        assert_eq!(lengths, [(3, 2), (0, 1), (3, 1)]);
        let heads: Vec<_> = std::iter::from_fn(|| next_frame(Lane::Control, &mut batch))
            .map(|(frame, _)| wire::decode(&frame).unwrap())
            .collect();
        let other = wire::Heard::Cache(CacheHead::Messages { cache: "other".into() });
        let third = wire::Heard::Cache(CacheHead::NotOpen { cache: "third".into() });
        assert_eq!(heads, [other, third]);
    }

    #[test]
    fn hazard_22_a_body_that_is_cut_or_longer_is_refused() {
        let mut body = Body::default();
        (0..4).for_each(|shard| body.add(shard, &CacheMessage::NotOpen));
        let bytes = body.finish();
        assert_eq!(decode(&bytes).unwrap().len(), 4);
        let whole: Vec<usize> = (0..bytes.len()).filter(|end| decode(&bytes[..*end]).is_some()).collect();
        assert_eq!(whole, [0, 6, 12, 18], "only whole groups");
        assert!(decode(&[&bytes[..], &[1]].concat()).is_none());
        assert!(decode(&[0, 255, 255, 255, 255, 1]).is_none(), "a length beyond the body");
    }

    #[test]
    fn what_waits_is_lost_with_its_session() {
        let out = Outbound::default();
        out.push(Lane::Bulk, message(1, &"c".into()));
        out.end();
        out.push(Lane::Bulk, message(1, &"c".into()));
        assert!(out.take(Lane::Bulk).is_none() && out.claim(Lane::Bulk).is_none());
    }

    // caught by: a queue without a bound
    #[test]
    fn a_peer_that_takes_nothing_is_full_until_it_takes_something() {
        let (out, cache): (_, Arc<str>) = (Outbound::default(), "c".into());
        let heavy = || Item::Message {
            cache: cache.clone(),
            shard: 0,
            message: Box::new(CacheMessage::Bye),
            weight: BUDGET / 2,
        };
        out.push(Lane::Bulk, heavy());
        assert!(!out.is_full());
        out.push(Lane::Control, heavy());
        assert!(out.is_full());
        assert!(out.take(Lane::Bulk).is_some());
        assert!(!out.is_full());
    }

    #[test]
    fn one_at_a_time_sends_so_that_the_order_stays() {
        let out = Outbound::default();
        out.push(Lane::Control, message(1, &"a".into()));
        out.push(Lane::Control, message(1, &"b".into()));
        assert!(out.take(Lane::Control).is_some());
        assert!(out.take(Lane::Control).is_none() && out.claim(Lane::Control).is_none(), "one is on its way");
        out.sent(Lane::Control);
        assert_eq!(out.claim(Lane::Control).unwrap().len(), 1);
        assert!(out.take(Lane::Bulk).is_none());
    }
}
