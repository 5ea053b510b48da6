//! Broadcasts: from the call to the relay, from the relay to the members and to the receipt.

use std::collections::VecDeque;
use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::sync::{Notify, oneshot};

use super::message::Message;
use super::waiting::Waiting;
use super::{Driver, Late, nesting};
use crate::error::BroadcastError;
use crate::node::message::{Cast, DataMessage};
use crate::node::relay::{Audience, Begun, NewCast, Reach, Sent, Settled, Wire};
use crate::node::{Ticket, Time};
use crate::transport::{Frame, Lane, SendError, wire};
use crate::types::{BroadcastId, MemberId, Peer};

/// How many broadcasts from inside deliveries may wait in one scope.
const MAX_LATER: usize = 1024;
/// Broadcasts that wait for room queue up by router, so that one slow router holds up its own only.
const GATES: usize = 16;

/// The broadcasts of one scope that are under way or wait.
pub(crate) struct Casts {
    receipts: Waiting<Ticket, Settled>,
    /// Wakes those who wait for room.
    pub(super) room: Notify,
    gates: [Gate; GATES],
    /// How many wait at all gates together.
    queued: AtomicUsize,
    later: Mutex<VecDeque<Later>>,
    later_count: AtomicUsize,
    pub(super) later_wake: Notify,
}

#[derive(Default)]
struct Gate {
    queued: AtomicUsize,
    turn: tokio::sync::Mutex<()>,
}

/// Counts one waiter for as long as it lives.
struct Queued<'a>(&'a AtomicUsize);

impl<'a> Queued<'a> {
    fn new(count: &'a AtomicUsize) -> Self {
        count.fetch_add(1, Ordering::AcqRel);
        Self(count)
    }
}

impl Drop for Queued<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Release);
    }
}

/// A receipt that is waited for; forgotten when nobody waits any more.
pub(crate) struct Waits<'a> {
    casts: &'a Casts,
    ticket: Ticket,
    receiver: oneshot::Receiver<Settled>,
    answered: bool,
}

impl Drop for Waits<'_> {
    fn drop(&mut self) {
        if !self.answered {
            self.casts.receipts.forget(&self.ticket);
        }
    }
}

/// The answer to one who waits for a broadcast that was put off.
pub(crate) type Reply = oneshot::Sender<Result<(BroadcastId, Option<Settled>), BroadcastError>>;

/// A broadcast from inside a delivery.
pub(crate) struct Later {
    cast: NewCast,
    local_only: bool,
    reply: Option<Reply>,
}

/// Why a broadcast has not begun. Nothing was sent.
enum NotBegun {
    /// There is no room now.
    Busy(Box<NewCast>),
    /// The node that it is for is not connected.
    NoLink(Box<NewCast>),
}

impl Casts {
    pub(super) fn new() -> Self {
        Self {
            receipts: Waiting::new(),
            room: Notify::new(),
            gates: Default::default(),
            queued: AtomicUsize::new(0),
            later: Mutex::default(),
            later_count: AtomicUsize::new(0),
            later_wake: Notify::new(),
        }
    }

    /// Whoever waits for a receipt learns that there will be none.
    pub(super) fn close(&self) {
        self.receipts.close();
        let later = std::mem::take(&mut *self.later.lock());
        self.later_count.fetch_sub(later.len(), Ordering::Relaxed);
        drop(later);
        self.room.notify_waiters();
    }

    pub(super) fn next_later(&self) -> Option<Later> {
        let later = self.later.lock().pop_front()?;
        self.later_count.fetch_sub(1, Ordering::Relaxed);
        Some(later)
    }

    fn put_off(&self, later: Later) {
        self.later_count.fetch_add(1, Ordering::Relaxed);
        self.later.lock().push_back(later);
        self.later_wake.notify_one();
    }
}

/// The way out for data frames, without a task in between.
struct Out<'a>(&'a Driver);

impl Wire for Out<'_> {
    fn try_send(&mut self, to: &Peer, message: DataMessage<&Cast>, body: &Bytes) -> Sent {
        let Some(head) = wire::encode_data(&message) else { return Sent::NoLink };
        match self.0.transport.try_send(to, Frame::new(Lane::Data, head, body.clone())) {
            Ok(()) => Sent::Accepted,
            Err(SendError::Busy(_)) => Sent::Busy,
            Err(SendError::NoLink(_)) => Sent::NoLink,
            // no scope starts over a transport that cannot carry what its options allow: such a transport breaks its
            // word, and what it refuses is gone
            Err(SendError::TooLarge(frame)) => {
                self.0.stats.frames_too_large.add(1);
                let (bytes, limit) = (frame.len(), self.0.transport.max_frame());
                tracing::error!(peer = %to, bytes, limit, "the transport cannot carry a broadcast");
                Sent::NoLink
            }
        }
    }
}

impl Driver {
    /// A receipt: whoever waits for it gets it.
    pub(super) fn settle(&self, receipt: Settled) {
        match receipt.reach {
            Reach::Targeted => self.stats.targeted.add(1),
            Reach::Flooded => self.stats.flooded.add(1),
        }
        let ticket = receipt.ticket;
        self.casts.receipts.answer(&ticket, receipt);
    }

    /// Begins a broadcast and gives it to this node's own members, or says that there is no room.
    fn begin(self: &Arc<Self>, cast: NewCast) -> Result<BroadcastId, NotBegun> {
        let (group, body, headers) = (cast.group.clone(), cast.body.clone(), cast.headers.clone());
        let except = self.own_number(cast.except.as_ref());
        let (begun, effects) = self.node.begin(cast, &mut Out(self));
        if effects {
            self.pump();
        }
        match begun {
            Begun::Busy(cast) => Err(NotBegun::Busy(cast)),
            Begun::NoLink(cast) => Err(NotBegun::NoLink(cast)),
            Begun::Sent { id, deliver_here } => {
                self.stats.broadcasts.add(1);
                let members = deliver_here.then(|| self.node.local_members(group.as_bytes()));
                if let Some(members) = members.filter(|members| !members.is_empty()) {
                    self.deliver_to(&members, &Message::new(group, body, id.clone(), headers), except);
                }
                Ok(id)
            }
        }
    }

    fn own_number(&self, member: Option<&MemberId>) -> Option<u64> {
        member.filter(|member| member.peer == *self.node.me()).map(|member| member.number)
    }
}

// Calls.
impl Driver {
    /// Makes a broadcast now, or refuses it as busy (`false`). From inside a delivery it is queued.
    pub(crate) fn try_cast(self: &Arc<Self>, cast: NewCast) -> bool {
        if nesting::is_inside() {
            return self.queue_later(Later { cast, local_only: false, reply: None });
        }
        let made = self.begin(cast).is_ok();
        if !made {
            self.stats.busy.add(1);
        }
        self.run_queued();
        made
    }

    /// Makes a broadcast when there is room, and waits for its receipt (`None` for one without).
    pub(crate) async fn cast(
        self: &Arc<Self>,
        mut cast: NewCast,
    ) -> Result<(BroadcastId, Option<Settled>), BroadcastError> {
        if nesting::is_inside() {
            let (reply, answer) = oneshot::channel();
            let later = Later { cast, local_only: false, reply: Some(reply) };
            if !self.queue_later(later) {
                return Err(BroadcastError::Busy);
            }
            return answer.await.unwrap_or(Err(BroadcastError::Interrupted));
        }
        let mut waits = None;
        if !cast.at_most_once {
            let ticket = self.next_ticket();
            let receiver = self.casts.receipts.wait_for(ticket).ok_or(BroadcastError::Stopped)?;
            cast.ticket = Some(ticket);
            waits = Some(Waits { casts: &self.casts, ticket, receiver, answered: false });
        }
        let id = match self.begin_at_once(cast) {
            Ok(begun) => begun?,
            Err(cast) => self.begin_in_turn(cast).await?,
        };
        self.run_queued();
        match waits {
            None => Ok((id, None)),
            Some(mut waits) => {
                let answer = (&mut waits.receiver).await;
                // taken out by whoever answered, or by the end of the scope
                waits.answered = true;
                match answer {
                    Ok(settled) => Ok((id, Some(settled))),
                    Err(_) => Err(BroadcastError::Interrupted),
                }
            }
        }
    }

    /// Waits in turn for room. Until it returns nothing has been sent.
    async fn begin_when_room(self: &Arc<Self>, cast: NewCast) -> Result<BroadcastId, BroadcastError> {
        match self.begin_at_once(cast) {
            Ok(begun) => begun,
            Err(cast) => self.begin_in_turn(cast).await,
        }
    }

    /// Begins it if nobody waits for room and there is some, or gives it back. No future, because it would be moved
    /// about with each broadcast, and those that wait are few.
    fn begin_at_once(
        self: &Arc<Self>,
        cast: NewCast,
    ) -> Result<Result<BroadcastId, BroadcastError>, Box<NewCast>> {
        // whoever waits is seldom: only then it matters who waits for which router
        let alone = self.casts.queued.load(Ordering::Acquire) == 0;
        if !alone && self.gate(&cast).queued.load(Ordering::Acquire) != 0 {
            return Err(Box::new(cast));
        }
        match self.begin(cast) {
            Ok(id) => Ok(Ok(id)),
            Err(NotBegun::NoLink(cast)) => Ok(Err(no_such_node(*cast))),
            Err(NotBegun::Busy(back)) => {
                self.stats.busy.add(1);
                Err(back)
            }
        }
    }

    async fn begin_in_turn(self: &Arc<Self>, mut cast: Box<NewCast>) -> Result<BroadcastId, BroadcastError> {
        let gate = self.gate(&cast);
        let _queued = [Queued::new(&gate.queued), Queued::new(&self.casts.queued)];
        let _turn = gate.turn.lock().await;
        loop {
            let room = self.casts.room.notified();
            tokio::pin!(room);
            // from here on no sign of room is missed
            room.as_mut().enable();
            if self.is_stopped() {
                return Err(BroadcastError::Stopped);
            }
            match self.begin(*cast) {
                Ok(id) => return Ok(id),
                Err(NotBegun::NoLink(cast)) => return Err(no_such_node(*cast)),
                Err(NotBegun::Busy(back)) => cast = back,
            }
            room.await;
        }
    }

    #[allow(clippy::indexing_slicing, reason = "the index is a remainder of the number of gates")]
    fn gate(&self, cast: &NewCast) -> &Gate {
        let hasher = BuildHasherDefault::<DefaultHasher>::default();
        let hash = match &cast.audience {
            Audience::Node(peer) => hasher.hash_one(&peer.node),
            Audience::Group => {
                self.node.with_published(|p| hasher.hash_one(&p.router(cast.group.as_bytes()).node))
            }
        };
        &self.casts.gates[hash as usize % GATES]
    }

    /// To the members on this node only; how many have been addressed. From inside a delivery it is queued.
    pub(crate) fn cast_local(self: &Arc<Self>, cast: NewCast) -> usize {
        let except = self.own_number(cast.except.as_ref());
        if nesting::is_inside() {
            let members = self.node.local_members(cast.group.as_bytes()).len();
            let later = Later { cast, local_only: true, reply: None };
            return if self.queue_later(later) { members } else { 0 };
        }
        let addressed = self.deliver_here(cast, except);
        self.run_queued();
        addressed
    }

    fn deliver_here(self: &Arc<Self>, cast: NewCast, except: Option<u64>) -> usize {
        // no broadcast of the cluster has number 0: it is this node's own affair
        let id = BroadcastId::new(self.node.me().clone(), 0);
        let NewCast { group, body, headers, .. } = cast;
        self.deliver_local(&Message::new(group, body, id, headers), except)
    }

    /// Keeps a broadcast for the outermost call of this thread; `false` if too many wait.
    fn queue_later(self: &Arc<Self>, later: Later) -> bool {
        let count = &self.casts.later_count;
        if count.fetch_add(1, Ordering::Relaxed) >= MAX_LATER {
            count.fetch_sub(1, Ordering::Relaxed);
            self.stats.busy.add(1);
            return false;
        }
        let driver = self.clone();
        nesting::queue(move |at_once| {
            driver.casts.later_count.fetch_sub(1, Ordering::Relaxed);
            driver.make_later(later, at_once);
        });
        true
    }

    fn make_later(self: &Arc<Self>, later: Later, at_once: bool) {
        if self.is_stopped() {
            return;
        }
        // behind what was put off before, so that the order stays
        let waits = later.reply.is_some() || !self.casts.later.lock().is_empty();
        if !at_once || waits {
            return self.casts.put_off(later);
        }
        let Later { cast, local_only, reply } = later;
        if local_only {
            let except = self.own_number(cast.except.as_ref());
            self.deliver_here(cast, except);
        } else if let Err(NotBegun::Busy(cast)) = self.begin(cast) {
            self.casts.put_off(Later { cast: *cast, local_only, reply });
        }
    }
}

/// Only a broadcast to one node can lack its link.
fn no_such_node(cast: NewCast) -> BroadcastError {
    match cast.audience {
        Audience::Node(peer) => BroadcastError::NoSuchNode { node: peer.node },
        Audience::Group => BroadcastError::Busy,
    }
}

impl Later {
    /// From the task: waits for room, not for the receipt, so that one slow broadcast does not hold up the
    /// others longer than it must.
    pub(super) async fn make(self, driver: &Arc<Driver>) {
        let Later { mut cast, local_only, reply } = self;
        if local_only {
            let except = driver.own_number(cast.except.as_ref());
            driver.deliver_here(cast, except);
            driver.run_queued();
            return;
        }
        let ticket = (reply.is_some() && !cast.at_most_once).then(|| driver.next_ticket());
        let receiver = ticket.and_then(|ticket| driver.casts.receipts.wait_for(ticket));
        cast.ticket = ticket;
        let begun = driver.begin_when_room(cast).await;
        driver.run_queued();
        let Some(reply) = reply else { return };
        match (begun, receiver) {
            (Err(error), _) => drop(reply.send(Err(error))),
            (Ok(id), None) => drop(reply.send(Ok((id, None)))),
            (Ok(id), Some(receiver)) => driver.spawn_reply(async move {
                let answer = receiver.await.map_err(|_| BroadcastError::Interrupted);
                drop(reply.send(answer.map(|settled| (id, Some(settled)))));
            }),
        }
    }
}

// Inputs from the transport.
impl Driver {
    pub(super) fn peer_up(self: &Arc<Self>, peer: Peer) {
        // the senders first: the node may owe it something at once
        self.open_link(&peer);
        self.node.handle_peer_up(peer.clone(), &mut Out(self), self.now());
        self.pump();
        #[cfg(feature = "cache")]
        {
            let link = self.links.lock().get(&peer).and_then(super::tasks::Link::caches);
            if let Some(link) = link {
                self.caches_peer_up(&peer, link);
            }
        }
    }

    pub(super) fn peer_suspect(&self, peer: &Peer) {
        self.node.handle_peer_suspect(peer, &mut Out(self), self.now());
        self.pump();
    }

    pub(super) fn peer_resumed(&self, peer: &Peer) {
        self.node.handle_peer_resumed(peer, &mut Out(self), self.now());
        self.pump();
    }

    pub(super) fn peer_down(&self, peer: &Peer) {
        // the senders first: what they have not taken by now is the next session's
        self.close_link(peer);
        self.node.handle_peer_down(peer, &mut Out(self), self.now());
        self.calls.peer_down(peer);
        self.pump();
        #[cfg(feature = "cache")]
        self.caches_peer_down(peer);
    }

    pub(super) fn discovery_settled(&self) {
        self.node.handle_discovery_settled(self.now());
        self.pump();
    }

    pub(super) fn handle_timeout(&self) {
        self.node.handle_timeout(&mut Out(self), self.now());
        self.calls.handle_timeout(self.now());
        self.pump();
        // nobody who waits depends on having been woken at the right moment
        self.pulse.notify_waiters();
        self.casts.room.notify_waiters();
    }

    pub(super) fn frame(self: &Arc<Self>, peer: &Peer, frame: Frame) {
        self.stats.frames_in.add(1);
        let mut late = Late::default();
        if let Some(hop) = self.input(peer, frame, self.now(), &mut late) {
            self.node.delivered(peer, hop);
        }
        self.pump();
        late.carry_out(self);
        self.run_queued();
    }

    /// What follows from all of them is carried out once: that is what makes a burst cheap.
    pub(super) fn frames(self: &Arc<Self>, peer: &Peer, frames: Vec<Frame>) {
        self.stats.frames_in.add(frames.len() as u64);
        let (now, mut late, mut delivered) = (self.now(), Late::default(), None);
        for frame in frames {
            delivered = self.input(peer, frame, now, &mut late).or(delivered);
        }
        // acknowledged only now: the members have all of them
        if let Some(hop) = delivered {
            self.node.delivered(peer, hop);
        }
        self.pump();
        late.carry_out(self);
        self.run_queued();
    }

    /// What follows from it is the caller's to carry out, and to tell the node of the last hop whose broadcast the
    /// members here have; it comes back.
    #[cfg_attr(
        not(feature = "cache"),
        expect(unused_variables, reason = "only caches have something to do later")
    )]
    fn input(self: &Arc<Self>, peer: &Peer, frame: Frame, now: Time, late: &mut Late) -> Option<u64> {
        match wire::decode(&frame) {
            Ok(wire::Heard::Data(message)) => return self.data(peer, message, frame.body, now),
            Ok(wire::Heard::Control(message)) => {
                self.node.handle_message(peer, message, &mut Out(self), now);
            }
            Ok(wire::Heard::Call(message)) => self.call_message(peer, message, frame.body),
            #[cfg(feature = "cache")]
            Ok(wire::Heard::Cache(head)) => self.cache_frame(peer, &head, &frame.body, late),
            #[cfg(not(feature = "cache"))]
            Ok(wire::Heard::Cache(head)) => self.no_such_cache(peer, head),
            Err(error) => {
                if frame.lane == Lane::Data {
                    // it has had its number: the frames behind it are not to wait for it
                    self.node.skip_data_frame(peer);
                }
                self.ignore(peer, error);
            }
        }
        None
    }

    /// So many broadcasts of this peer came before there was a node, and more than could be kept: they count as
    /// handled, since nobody here had joined a group.
    pub(super) fn missed_data(&self, peer: &Peer, count: u64) {
        self.stats.frames_in.add(count);
        for _ in 0..count {
            self.node.skip_data_frame(peer);
        }
        self.pump();
    }

    fn data(self: &Arc<Self>, peer: &Peer, message: DataMessage, body: Bytes, now: Time) -> Option<u64> {
        let delivery = self.node.handle_data_frame(peer, message, body, &mut Out(self), now)?;
        let except = self.own_number(delivery.except.as_ref());
        let (hop, targeted) = (delivery.hop, delivery.targeted);
        let message = Message::new(delivery.group, delivery.body, delivery.id, delivery.headers);
        let addressed = self.deliver_local(&message, except);
        if targeted && addressed == 0 {
            self.node.tell_not_held(peer, message.group(), now);
        }
        Some(hop)
    }

    /// The connection with this peer, by the number that only this one has. `None` for this node itself, too.
    pub(crate) fn connection_number(&self, peer: &Peer) -> Option<u32> {
        self.node.with_published(|p| p.connection(peer).map(|c| c.slot))
    }

    /// Whether a peer that was sent something over this connection has it: that one is up, or resumes. Another
    /// connection with the same life of the peer is none: what was on its way is lost then.
    pub(crate) async fn still_there(&self, peer: &Peer, connection: Option<u32>) -> bool {
        loop {
            let pulse = self.pulse.notified();
            tokio::pin!(pulse);
            pulse.as_mut().enable();
            let link = self.node.with_published(|p| {
                p.connection(peer).filter(|c| Some(c.slot) == connection).map(|c| c.suspect)
            });
            match link {
                _ if peer == self.node.me() => return true,
                None => return false,
                Some(false) => return true,
                Some(true) if self.is_stopped() => return false,
                Some(true) => pulse.await,
            }
        }
    }

    /// Built without caches, this node says that it has none: the others wait to hear it.
    #[cfg(not(feature = "cache"))]
    fn no_such_cache(self: &Arc<Self>, peer: &Peer, head: wire::CacheHead) {
        let wire::CacheHead::Messages { cache } = head else { return };
        let Some(head) = wire::encode_cache(&wire::CacheHead::NotOpen { cache }) else { return };
        let frame = Frame::new(Lane::Control, head, Bytes::new());
        if let Err(SendError::Busy(frame)) = self.transport.try_send(peer, frame) {
            let (driver, peer) = (self.clone(), peer.clone());
            // a peer that is gone need not know
            self.spawn_reply(async move { drop(driver.transport.send(&peer, frame).await) });
        }
    }

    pub(super) fn ignore(&self, peer: &Peer, error: wire::WireError) {
        self.stats.frames_ignored.add(1);
        let mut logged = self.logged.lock();
        if logged.len() < MAX_LOGGED && !logged.contains(&error) {
            logged.push(error);
            drop(logged);
            tracing::warn!(%peer, %error, "a frame is ignored; more of this sort are counted only");
        }
    }
}

/// Sorts of ignored frames that are logged.
const MAX_LOGGED: usize = 32;
