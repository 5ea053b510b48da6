//! What waits to be written to one websocket, and the members that put it there.

use std::sync::Arc;

use axum::extract::ws::{CloseFrame, Message as Frame, WebSocket, close_code};
use bytes::{Bytes, BytesMut};
use futures_util::stream::SplitSink;
use futures_util::{SinkExt, StreamExt};
use parking_lot::Mutex;
use tokio::sync::Notify;

use super::cluster::{BroadcastId, Delivered, Message, Subscriber};
use super::wire::{Compact, Event, Said};

/// A client that leaves this many bytes unread is disconnected: it connects again and reads the history,
/// which is better than holding everything for it or silently dropping some.
const LIMIT: usize = 64 * 1024 * 1024;
/// Frames are cut about here, in bytes.
const FRAME: usize = 256 * 1024;
/// How many of the latest items are looked through for the message that is being delivered. All members
/// of a node get a message in one go, so it is one of the last, unless several threads deliver at once.
const LOOK_BACK: usize = 8;

enum Item {
    Event(String),
    Compact(Compact),
    /// One message for some users of the text protocol.
    Said {
        id: BroadcastId,
        room: Arc<str>,
        payload: Bytes,
        to: Vec<Arc<str>>,
    },
    /// One message for some users of the binary protocol.
    Deliver {
        id: BroadcastId,
        room: u32,
        payload: Bytes,
        to: Vec<u32>,
    },
}

#[derive(Default)]
struct Waiting {
    items: Vec<Item>,
    bytes: usize,
    /// Nothing more is taken; what is here is still written.
    closed: bool,
    overflowed: bool,
}

/// The queue of one websocket. Deliveries of one message gather in one item, each put there by the
/// member's own `deliver`.
#[derive(Default)]
pub(crate) struct Outbox {
    waiting: Mutex<Waiting>,
    ready: Notify,
}

impl Outbox {
    pub(crate) fn event(&self, event: &Event<'_>) {
        let text = event.encode();
        self.put(text.len(), Item::Event(text));
    }

    pub(crate) fn compact(&self, item: Compact) {
        self.put(32, Item::Compact(item));
    }

    pub(crate) fn close(&self) {
        self.waiting.lock().closed = true;
        self.ready.notify_one();
    }

    fn put(&self, bytes: usize, item: Item) {
        let mut waiting = self.waiting.lock();
        if waiting.take(bytes) {
            waiting.items.push(item);
        }
        drop(waiting);
        self.ready.notify_one();
    }

    fn said(&self, message: &Message, room: &Arc<str>, user: &Arc<str>) -> Delivered {
        let mut waiting = self.waiting.lock();
        for item in waiting.items.iter_mut().rev().take(LOOK_BACK) {
            if let Item::Said { id, room: known, to, .. } = item
                && id == message.id()
                && known == room
            {
                to.push(user.clone());
                return Delivered::Accepted;
            }
        }
        let payload = message.payload().clone();
        if !waiting.take(payload.len() + 200) {
            drop(waiting);
            self.ready.notify_one();
            return Delivered::Closed;
        }
        waiting.items.push(Item::Said {
            id: message.id().clone(),
            room: room.clone(),
            payload,
            to: vec![user.clone()],
        });
        drop(waiting);
        self.ready.notify_one();
        Delivered::Accepted
    }

    fn deliver(&self, message: &Message, room: u32, user: u32) -> Delivered {
        let mut waiting = self.waiting.lock();
        for item in waiting.items.iter_mut().rev().take(LOOK_BACK) {
            if let Item::Deliver { id, room: known, to, .. } = item
                && *known == room
                && id == message.id()
            {
                to.push(user);
                return Delivered::Accepted;
            }
        }
        let payload = message.payload().clone();
        if !waiting.take(payload.len() + 64) {
            drop(waiting);
            self.ready.notify_one();
            return Delivered::Closed;
        }
        waiting.items.push(Item::Deliver { id: message.id().clone(), room, payload, to: vec![user] });
        drop(waiting);
        self.ready.notify_one();
        Delivered::Accepted
    }

    /// Writes whatever has gathered, until the outbox is closed and empty or the socket fails.
    pub(crate) async fn write_to(&self, mut sink: SplitSink<WebSocket, Frame>) {
        loop {
            let (items, closed, overflowed) = self.drain();
            if items.is_empty() {
                if closed {
                    let (code, reason) = if overflowed {
                        (close_code::AGAIN, "this client reads too slowly")
                    } else {
                        (close_code::NORMAL, "bye")
                    };
                    let _gone =
                        sink.send(Frame::Close(Some(CloseFrame { code, reason: reason.into() }))).await;
                    return;
                }
                self.ready.notified().await;
                continue;
            }
            for frame in frames(items) {
                if sink.feed(frame).await.is_err() {
                    return;
                }
            }
            if sink.flush().await.is_err() {
                return;
            }
        }
    }

    fn drain(&self) -> (Vec<Item>, bool, bool) {
        let mut waiting = self.waiting.lock();
        waiting.bytes = 0;
        (std::mem::take(&mut waiting.items), waiting.closed, waiting.overflowed)
    }
}

impl Waiting {
    fn take(&mut self, bytes: usize) -> bool {
        if self.closed {
            return false;
        }
        if self.bytes + bytes > LIMIT {
            self.closed = true;
            self.overflowed = true;
            return false;
        }
        self.bytes += bytes;
        true
    }
}

/// Text items and binary items each go into as few frames as their size allows, in order.
fn frames(items: Vec<Item>) -> Vec<Frame> {
    let mut frames = Vec::new();
    let mut text = String::new();
    let mut binary = BytesMut::new();
    for item in items {
        match item {
            Item::Event(event) => append(&mut text, &event, &mut frames),
            Item::Said { id, room, payload, to } => {
                if let Ok(said) = serde_json::from_slice::<Said>(&payload) {
                    let origin = id.origin.node.as_str();
                    append(
                        &mut text,
                        &Event::Said { room: &room, origin, to: &to, said: &said }.encode(),
                        &mut frames,
                    );
                }
            }
            Item::Compact(item) => item.write(&mut binary),
            Item::Deliver { room, payload, to, .. } => {
                Compact::Deliver { room, payload, to }.write(&mut binary)
            }
        }
        if binary.len() >= FRAME {
            frames.push(Frame::Binary(binary.split().freeze()));
        }
    }
    if !text.is_empty() {
        text.push(']');
        frames.push(Frame::Text(text.into()));
    }
    if !binary.is_empty() {
        frames.push(Frame::Binary(binary.freeze()));
    }
    frames
}

fn append(text: &mut String, event: &str, frames: &mut Vec<Frame>) {
    text.push(if text.is_empty() { '[' } else { ',' });
    text.push_str(event);
    if text.len() >= FRAME {
        text.push(']');
        frames.push(Frame::Text(std::mem::take(text).into()));
    }
}

/// A user of the text protocol in a room.
pub(crate) struct TextMember {
    pub(crate) outbox: Arc<Outbox>,
    pub(crate) room: Arc<str>,
    pub(crate) user: Arc<str>,
}

impl Subscriber for TextMember {
    fn deliver(&self, message: &Message) -> Delivered {
        self.outbox.said(message, &self.room, &self.user)
    }
}

/// A user of the binary protocol in a room.
pub(crate) struct CompactMember {
    pub(crate) outbox: Arc<Outbox>,
    pub(crate) room: u32,
    pub(crate) user: u32,
}

impl Subscriber for CompactMember {
    fn deliver(&self, message: &Message) -> Delivered {
        self.outbox.deliver(message, self.room, self.user)
    }
}

/// Drops what the other side still sends after its close, so that the close can complete.
pub(crate) async fn swallow(mut stream: futures_util::stream::SplitStream<WebSocket>) {
    while let Some(Ok(_)) = stream.next().await {}
}
