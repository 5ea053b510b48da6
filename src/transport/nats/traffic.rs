//! The raw connections of a node: what comes from the others and what is written to them.

use std::sync::atomic::Ordering;

use async_nats::message::OutboundMessage;
use async_nats::{Message, StatusCode, Subject};
use bytes::Bytes;

use super::end::{Progress, count};
use super::envelope::{DATA_PREFIX, Envelope, Key, Presence, Word};
use super::seat::{Connection, Seat};
use super::subject::{LifeId, nobody_at};
use super::wire::{Broken, LEAST_MESSAGE, PROBE, Wire};
use crate::transport::Lane;
use crate::transport::link::{Links, Output, RawId, Time};
use crate::types::NodeId;

/// How many messages are given to the link layer before their effects are carried out.
const BATCH: usize = 256;
/// How much may wait here for the client to take it, in bytes; what is more stays in the links' queues.
const OUTBOX: usize = 4 << 20;
/// How many closed connections are remembered, to tell their other ends again.
const GRAVES: usize = 256;
/// How often an other end is told.
const TELL: std::time::Duration = std::time::Duration::from_millis(100);

/// How writing a connection has ended for now.
enum Filled {
    /// There is a whole message.
    Whole,
    /// There is no more to write, or no room for it.
    Idle,
    /// The link layer has closed it.
    Closed,
}

// What comes.
impl Seat {
    /// Gives a batch to the link layer; whether there may be more.
    pub(super) fn read(&mut self) -> bool {
        for _ in 0..BATCH {
            let Some(message) = self.arrived.pop_front() else { break };
            self.hear(&message);
        }
        // after the input: what has arrived while nobody looked counts as heard
        let more = !self.arrived.is_empty();
        if !more {
            self.end.links.lock().handle_timeout(self.end.now());
        }
        more
    }

    fn hear(&mut self, message: &Message) {
        if let Some(status) = message.status {
            // its process is gone or has lost NATS: no need to wait until it was silent for long
            if status == StatusCode::NO_RESPONDERS
                && let Some(raw) = nobody_at(&message.subject)
            {
                self.close(RawId(raw), false);
            }
            return;
        }
        let counters = &self.end.signals.counters;
        count(&counters.messages_in, 1);
        count(&counters.bytes_in, message.payload.len());
        let envelope = match Envelope::decode(message.payload.clone()) {
            Ok(envelope) => envelope,
            Err(error) => {
                if counters.malformed.fetch_add(1, Ordering::Relaxed) == 0 {
                    tracing::warn!(subject = %message.subject, %error, "dropped; more of these are only counted");
                }
                return;
            }
        };
        match envelope {
            Envelope::Presence(presence) => self.on_presence(&presence),
            Envelope::Claim(claim) => self.on_claim(&claim),
            Envelope::Taken(holder) => self.on_taken(&holder),
            Envelope::Open { from, dialer, window } => self.on_open(from, dialer, window),
            Envelope::Accept { key, window } => self.on_accept(key, window),
            Envelope::Data { key, number, taken, piece } => self.on_data(key, number, taken, piece),
            Envelope::Credit { key, taken } => {
                if let Some(connection) = self.connection(key) {
                    connection.wire.acknowledged(taken);
                }
            }
            Envelope::Close { key } => {
                if let Some(raw) = self.keys.get(&key).copied() {
                    self.slow_down(raw);
                    self.close(raw, false);
                }
            }
        }
    }

    fn on_presence(&mut self, presence: &Presence) {
        if self.leaving {
            return;
        }
        let heard = self.directory.heard(presence, self.end.now());
        if heard.too_many {
            count(&self.end.signals.counters.too_many, 1);
        }
        if heard.reopened {
            self.close_old(presence.life, presence.epoch);
        }
        if heard.answer {
            let answer = self.directory.presence(Word::Answer, self.linked());
            let [to, ..] = self.subjects.lanes(&presence.node, presence.life);
            self.publish(to, Envelope::Presence(answer).encode());
        }
    }

    /// Closes what is left of a life's connection from before it was back.
    fn close_old(&mut self, life: LifeId, epoch: u64) {
        let Some(raw) = self.lives.get(&life).copied() else { return };
        if self.connections.get(&raw).is_some_and(|connection| connection.wire.epoch < epoch) {
            self.forget(raw);
            self.end.links.lock().handle_closed(raw, self.end.now());
        }
    }

    /// Somebody wants our name.
    fn on_claim(&mut self, claim: &Presence) {
        let me = self.directory.presence(Word::Answer, 0);
        if claim.node != me.node || claim.life == me.life || self.leaving {
            return;
        }
        let started = *self.progress.borrow() != Progress::Starting;
        // of two that start at the same moment the earlier one stays
        if started || (me.incarnation, me.life) < (claim.incarnation, claim.life) {
            let [to, ..] = self.subjects.lanes(&claim.node, claim.life);
            self.publish(to, Envelope::Taken(me).encode());
        } else {
            self.superseded = Some(claim.incarnation);
        }
    }

    fn on_taken(&mut self, holder: &Presence) {
        let me = self.directory.presence(Word::Answer, 0);
        let ours = holder.node == me.node && holder.life != me.life;
        // a holder that was silent for too long is late: the links settle who stays
        if ours && *self.progress.borrow() == Progress::Starting {
            self.superseded = Some(holder.incarnation);
        }
    }

    fn on_open(&mut self, from: Presence, dialer: u64, window: u32) {
        let me = self.end.links.lock().me().node.clone();
        if self.leaving || from.node >= me || from.word == Word::Leaving {
            return;
        }
        self.on_presence(&from);
        if !self.directory.knows(from.life) {
            return;
        }
        if let Some(old) = self.lives.get(&from.life).copied() {
            if self.connections.get(&old).is_some_and(|old| old.wire.key.dialer == dialer) {
                return;
            }
            // it has none any more, or it would not ask for one
            self.forget(old);
            self.end.links.lock().handle_closed(old, self.end.now());
        }
        // whoever invents lives, or takes its leave of each, must not get a connection for each
        if self.connections.len() >= self.limits.peers {
            count(&self.end.signals.counters.too_many, 1);
            return;
        }
        let key = Key { dialer, acceptor: self.directory.random() };
        let [to, ..] = self.subjects.lanes(&from.node, from.life);
        let (ours, _) = self.window(from.life);
        self.publish(to, Envelope::Accept { key, window: ours }.encode());
        self.open(key, (from.node, from.life), from.epoch, window);
    }

    fn on_accept(&mut self, key: Key, window: u32) {
        let Some((node, life, epoch)) = self.directory.asked(key.dialer) else { return };
        if !self.leaving {
            self.open(key, (node, life), epoch, window);
        }
    }

    fn on_data(&mut self, key: Key, number: u64, taken: u64, piece: Bytes) {
        let Some(raw) = self.keys.get(&key).copied() else {
            self.tell_again(key);
            return;
        };
        let Some(connection) = self.connections.get_mut(&raw) else { return };
        connection.wire.acknowledged(taken);
        let received = connection.wire.receive(number, piece, &mut self.packets);
        self.touched.insert(raw);
        if !self.packets.is_empty() {
            let mut links = self.end.links.lock();
            let now = self.end.now();
            for packet in self.packets.drain(..) {
                links.handle_packet(raw, packet, now);
            }
        }
        if let Err(broken) = received {
            let counters = &self.end.signals.counters;
            match broken {
                Broken::Gap => count(&counters.gaps, 1),
                Broken::Malformed => count(&counters.malformed, 1),
            }
            self.close(raw, true);
        }
    }
}

// Connections.
impl Seat {
    fn connection(&mut self, key: Key) -> Option<&mut Connection> {
        self.connections.get_mut(self.keys.get(&key)?)
    }

    fn open(&mut self, key: Key, to: (NodeId, LifeId), epoch: u64, window: u32) {
        count(&self.end.signals.counters.opened, 1);
        self.last_raw += 1;
        let raw = RawId(self.last_raw);
        let subjects = self.subjects.lanes(&to.0, to.1);
        let life = to.1;
        let mut wire = Wire::new(raw, key, to, epoch, self.longest_packet);
        let (ours, most) = self.window(life);
        wire.windows(ours, most, window);
        self.directory.opened(life);
        self.keys.insert(key, raw);
        self.lives.insert(life, raw);
        let nobody = format!("{}{}", self.nobody, raw.0).into();
        self.connections.insert(raw, Connection { wire, subjects, nobody });
        self.unlinked.insert((self.end.now() + PROBE, raw));
        self.end.links.lock().handle_opened(raw, self.end.now());
    }

    /// A raw connection is of no more use. `tell`: the other end does not know.
    pub(super) fn close(&mut self, raw: RawId, tell: bool) {
        if tell {
            self.tell(raw);
        }
        self.forget(raw);
        self.end.links.lock().handle_closed(raw, self.end.now());
    }

    /// The other end has closed it, most likely as something was missing: the next one begins with less on the way.
    fn slow_down(&mut self, raw: RawId) {
        let Some(connection) = self.connections.get(&raw) else { return };
        if self.slow.len() >= self.limits.peers {
            self.slow.clear();
        }
        self.slow.insert(connection.wire.life, connection.wire.less());
    }

    /// How much may be on the way to this life at first, and later.
    pub(super) fn window(&self, life: LifeId) -> (u32, u32) {
        let most = u32::try_from(self.limits.window).unwrap_or(u32::MAX);
        (self.slow.get(&life).copied().unwrap_or(most), most)
    }

    fn tell(&mut self, raw: RawId) {
        let Some(connection) = self.connections.get(&raw) else { return };
        let (key, [to, ..]) = (connection.wire.key, connection.subjects.clone());
        if self.graves.len() >= GRAVES {
            let oldest = self.graves.iter().min_by_key(|(_, (_, told))| *told).map(|(key, _)| *key);
            oldest.and_then(|oldest| self.graves.remove(&oldest));
        }
        self.graves.insert(key, (to.clone(), self.end.now()));
        self.publish(to, Envelope::Close { key }.encode());
    }

    /// Something came on a closed connection: the other end may have missed that.
    fn tell_again(&mut self, key: Key) {
        let now = self.end.now();
        let Some((to, told)) = self.graves.get_mut(&key).filter(|(_, told)| now >= *told + TELL) else {
            return;
        };
        *told = now;
        let to = to.clone();
        self.publish(to, Envelope::Close { key }.encode());
    }

    fn forget(&mut self, raw: RawId) {
        let Some(Connection { wire, .. }) = self.connections.remove(&raw) else { return };
        self.keys.remove(&wire.key);
        if self.lives.get(&wire.life) == Some(&raw) {
            self.lives.remove(&wire.life);
        }
        self.blocked.remove(&raw);
        self.touched.remove(&raw);
        self.directory.closed(wire.life, self.end.now());
    }
}

// What is written.
impl Seat {
    pub(super) fn publish(&mut self, subject: Subject, payload: Bytes) {
        self.publish_with(subject, None, payload);
    }

    fn publish_with(&mut self, subject: Subject, reply: Option<Subject>, payload: Bytes) {
        self.outbox_bytes += payload.len();
        self.outbox.push_back(OutboundMessage { subject, payload, reply, headers: None });
    }

    pub(super) fn write(&mut self) {
        for raw in std::mem::take(&mut self.blocked) {
            self.write_one(raw);
            self.probe(raw);
        }
        loop {
            let Some(raw) = self.end.links.lock().poll_dirty() else { break };
            self.write_one(raw);
        }
        // what was written before has told already
        for raw in std::mem::take(&mut self.touched) {
            let Some(connection) = self.connections.get_mut(&raw) else { continue };
            if let Some(credit) = connection.wire.credit() {
                let [to, ..] = connection.subjects.clone();
                self.publish(to, credit.encode());
            }
        }
    }

    /// Asks the other ends of connections that are no link yet. Each end waits for the other's next word, and nothing
    /// else is written: that a word was lost is only found when a later message comes.
    pub(super) fn ask_unlinked(&mut self, now: Time) {
        while let Some((_, raw)) = self.unlinked.first().copied().filter(|(at, _)| *at <= now) {
            self.unlinked.pop_first();
            let Some(connection) = self.connections.get_mut(&raw) else { continue };
            let links = self.end.links.lock();
            let node = &connection.wire.node;
            if links.is_linked(node) && links.connection(node) == Some(raw) {
                continue;
            }
            drop(links);
            self.unlinked.insert((now + PROBE, raw));
            let (question, nobody) = (connection.wire.ask(), connection.nobody.clone());
            let [to, ..] = connection.subjects.clone();
            self.publish_with(to, Some(nobody), question);
        }
    }

    /// Asks the other end of a connection that is stuck.
    fn probe(&mut self, raw: RawId) {
        let now = self.end.now();
        let Some(connection) = self.connections.get_mut(&raw) else { return };
        if let Some(probe) = connection.wire.probe(now) {
            let ([to, ..], nobody) = (connection.subjects.clone(), connection.nobody.clone());
            self.publish_with(to, Some(nobody), probe);
        }
    }

    fn write_one(&mut self, raw: RawId) {
        let message = self.limits.message.min(self.client.max_payload().saturating_sub(DATA_PREFIX));
        let message = message.max(LEAST_MESSAGE);
        loop {
            if self.outbox_bytes >= OUTBOX {
                self.blocked.insert(raw);
                return;
            }
            let Some(connection) = self.connections.get_mut(&raw) else { return };
            let (filled, packets) = {
                let mut links = self.end.links.lock();
                fill(&mut links, &mut connection.wire, message, self.leaving)
            };
            count(&self.end.signals.counters.packets_out, packets);
            let closed = matches!(filled, Filled::Closed);
            let mut cut: Vec<(Lane, Bytes)> = Vec::new();
            while let Some(next) = connection.wire.cut(message, closed) {
                cut.push(next);
            }
            let (subjects, nobody) = (connection.subjects.clone(), connection.nobody.clone());
            let waits = connection.wire.pending() > 0 || !connection.wire.has_room(message);
            for (lane, bytes) in cut {
                let [control, data, bulk] = &subjects;
                let to = match lane {
                    Lane::Control => control,
                    Lane::Data => data,
                    Lane::Bulk => bulk,
                };
                self.publish_with(to.clone(), Some(nobody.clone()), bytes);
            }
            match filled {
                Filled::Closed => {
                    self.tell(raw);
                    self.forget(raw);
                    return;
                }
                Filled::Idle | Filled::Whole if waits => {
                    self.blocked.insert(raw);
                    return;
                }
                Filled::Idle => return,
                Filled::Whole => {}
            }
        }
    }
}

/// Takes from the link layer until there is a whole message; with how many packets.
fn fill(links: &mut Links, wire: &mut Wire, message: usize, leaving: bool) -> (Filled, usize) {
    let mut packets = 0;
    while wire.pending() < message {
        let room = wire.has_room(message);
        // at the end the link layer gives everything at once
        if leaving && !room {
            return (Filled::Idle, packets);
        }
        match links.poll_output(wire.raw, room) {
            Output::Packet(packet) => {
                wire.push(packet);
                packets += 1;
            }
            Output::Close => return (Filled::Closed, packets),
            Output::Idle => return (Filled::Idle, packets),
        }
    }
    (Filled::Whole, packets)
}
