//! One cache on this node: its partitions in shards, each a sans-IO machine behind a lock.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{Notify, oneshot};

use super::Late;
use super::events::CacheHub;
use super::outbound::{Item, Outbound};
use super::stats::Stats;
use crate::cache::node::{CacheEffect, CacheMessage, CacheNode, Shard};
use crate::cache::replica::{Budget, CacheEvent};
use crate::cache::{CacheConfig, CacheError, Operation, Options, PartitionId, ReadOp, Reply};
use crate::driver::Driver;
use crate::types::Peer;

/// In how many shards the partitions of a cache lie, partition n in shard n % 16: part of the protocol.
pub(crate) const SHARDS: u8 = 16;
/// No timer is armed.
const NEVER: u64 = u64::MAX;

/// How an operation ended.
pub(crate) type Answer = Result<Reply, CacheError>;

/// One cache on this node.
pub(crate) struct Hosted {
    pub(crate) name: Arc<str>,
    pub(crate) config: Arc<CacheConfig>,
    pub(crate) stats: Stats,
    pub(crate) events: CacheHub,
    shards: Vec<ShardCell>,
    tickets: AtomicU64,
    /// Operations without an answer.
    pending: AtomicUsize,
    closed: AtomicBool,
    /// Everything was handed over when it was closed.
    handed_over: AtomicBool,
    timer: Notify,
    /// When the timer task will wake by itself, in nanoseconds since the scope's start.
    armed: AtomicU64,
}

struct ShardCell {
    state: Mutex<ShardState>,
    /// When the machine wants to be woken, in nanoseconds since the scope's start.
    due: AtomicU64,
}

struct ShardState {
    node: CacheNode,
    /// The sessions that are open, as this shard has heard of them.
    links: BTreeMap<Peer, Arc<Outbound>>,
    waiting: HashMap<u64, oneshot::Sender<Answer>>,
    closed: bool,
}

/// What is to be done when no lock is held any more.
#[derive(Default)]
pub(super) struct After {
    sends: Vec<(Peer, Arc<Outbound>)>,
    answers: Vec<(oneshot::Sender<Answer>, Answer)>,
    /// Answers of operations that nobody waits for yet.
    at_once: Vec<(u64, Answer)>,
    events: Vec<CacheEvent>,
    changed: bool,
}

/// An operation that has begun.
pub(crate) enum Begun {
    /// It was over at once.
    Done(Box<Answer>),
    /// The answer comes.
    Waits(Waits),
}

/// The answer to come. Dropped before it has come, the operation is forgotten here; it may be carried out all the same.
pub(crate) struct Waits {
    driver: Arc<Driver>,
    hosted: Arc<Hosted>,
    partition: PartitionId,
    ticket: u64,
    is_write: bool,
    receiver: Option<oneshot::Receiver<Answer>>,
}

impl Drop for Waits {
    fn drop(&mut self) {
        if self.receiver.take().is_some() {
            self.hosted.cancel(&self.driver, self.partition, self.ticket);
        }
    }
}

impl Begun {
    pub(crate) async fn answer(self) -> Answer {
        match self {
            Begun::Done(answer) => *answer,
            Begun::Waits(mut waits) => {
                let Some(receiver) = &mut waits.receiver else { return Err(CacheError::Stopped) };
                let answer = receiver.await;
                waits.receiver = None;
                match answer.unwrap_or(Err(CacheError::Stopped)) {
                    // it was under way
                    Err(CacheError::Stopped) if waits.is_write => Err(CacheError::Interrupted),
                    answer => answer,
                }
            }
        }
    }
}

impl ShardState {
    /// Under the lock, so that no older view comes after a newer one.
    fn read_view(&mut self, driver: &Driver) {
        let (members, settled) = driver.node.with_published(|published| {
            (published.view.peers().cloned().collect::<Vec<Peer>>(), published.settled)
        });
        self.node.handle_view(&members, settled, driver.now());
    }

    /// Takes out what the machine asks for. Under the lock, so that messages are queued in the order of its steps.
    fn collect(&mut self, hosted: &Hosted, driver: &Driver, shard: u8, after: &mut After) {
        while let Some(effect) = self.node.poll_effect() {
            match effect {
                CacheEffect::Send { to, lane, mut message } => {
                    // to nobody who is not up: it would be lost in any case
                    let Some(link) = self.links.get(&to) else { continue };
                    if link.is_full() {
                        if let CacheMessage::Forward { request, .. } = message {
                            self.node.not_sent(&to, request, driver.now());
                            continue;
                        }
                        message.shorten();
                    }
                    let (cache, weight) = (hosted.name.clone(), message.weight());
                    link.push(lane, Item::Message { cache, shard, message: Box::new(message), weight });
                    if !after.sends.iter().any(|(peer, _)| *peer == to) {
                        after.sends.push((to, link.clone()));
                    }
                }
                CacheEffect::Done { ticket, result } => match self.waiting.remove(&ticket) {
                    Some(waiter) => {
                        hosted.pending.fetch_sub(1, Ordering::Relaxed);
                        after.answers.push((waiter, result));
                    }
                    None => after.at_once.push((ticket, result)),
                },
                // every shard hears of it, and one tells
                CacheEffect::Event(CacheEvent::Disagrees { .. }) if shard != 0 => {}
                CacheEffect::Event(event) => after.events.push(event),
                CacheEffect::Changed => after.changed = true,
            }
        }
    }
}

impl After {
    /// Sends, answers and tells, under no lock.
    pub(super) fn carry_out(self, driver: &Driver, hosted: &Hosted) {
        for (peer, link) in &self.sends {
            link.flush(driver, peer);
        }
        for (waiter, answer) in self.answers {
            // whoever waited may have gone
            let _ = waiter.send(answer);
        }
        for event in self.events {
            hosted.events.publish(&hosted.stats, event);
        }
        if self.changed {
            hosted.events.changed.notify_waiters();
            driver.pulse.notify_waiters();
        }
    }
}

// Steps.
impl Hosted {
    pub(super) fn new(
        config: Arc<CacheConfig>,
        max_message: usize,
        me: &Peer,
        seed: u64,
        now: Duration,
    ) -> Self {
        let budget = Budget::default();
        let cell = |index: u8| {
            let shard = Shard { index: index.into(), of: SHARDS.into() };
            let seed = seed.wrapping_add(u64::from(index));
            let node = CacheNode::new(me.clone(), config.clone(), shard, seed, now);
            let node = node.within(budget.clone(), max_message);
            let state = ShardState { node, links: BTreeMap::new(), waiting: HashMap::new(), closed: false };
            ShardCell { state: Mutex::new(state), due: AtomicU64::new(NEVER) }
        };
        Self {
            name: config.name.as_str().into(),
            stats: Stats::default(),
            events: CacheHub::default(),
            shards: (0..SHARDS).map(cell).collect(),
            tickets: AtomicU64::new(1),
            pending: AtomicUsize::new(0),
            closed: AtomicBool::new(false),
            handed_over: AtomicBool::new(false),
            timer: Notify::new(),
            armed: AtomicU64::new(NEVER),
            config,
        }
    }

    #[allow(clippy::indexing_slicing, reason = "the index is a remainder of the number of shards")]
    fn cell(&self, partition: PartitionId) -> (u8, &ShardCell) {
        let index = (partition.get() % u32::from(SHARDS)) as u8;
        (index, &self.shards[usize::from(index)])
    }

    /// One step of one shard.
    fn step<R>(
        &self,
        driver: &Driver,
        (index, cell): (u8, &ShardCell),
        after: &mut After,
        act: impl FnOnce(&mut ShardState) -> R,
    ) -> R {
        let mut state = cell.state.lock();
        let result = act(&mut state);
        state.collect(self, driver, index, after);
        self.arm(cell, &state);
        result
    }

    fn cells(&self) -> impl Iterator<Item = (u8, &ShardCell)> {
        (0..).zip(&self.shards)
    }

    /// One step of every shard.
    fn each(&self, driver: &Driver, mut act: impl FnMut(&mut ShardState)) {
        let mut after = After::default();
        for cell in self.cells() {
            self.step(driver, cell, &mut after, &mut act);
        }
        after.carry_out(driver, self);
    }

    fn arm(&self, cell: &ShardCell, state: &ShardState) {
        let due = state.node.poll_timeout().map_or(NEVER, nanoseconds);
        // sequentially consistent, here and in the timer: one of the two sees what the other has written
        cell.due.store(due, Ordering::SeqCst);
        if due < self.armed.load(Ordering::SeqCst) {
            self.timer.notify_one();
        }
    }
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(NEVER - 1)
}

// Inputs.
impl Hosted {
    /// The first inputs: the view as it is now, and who is up. What follows from them is carried out by the caller.
    pub(super) fn open(&self, driver: &Driver, up: &BTreeMap<Peer, Arc<Outbound>>) -> After {
        let mut after = After::default();
        for cell in self.cells() {
            self.step(driver, cell, &mut after, |state| {
                state.links.clone_from(up);
                state.read_view(driver);
                up.keys().for_each(|peer| state.node.handle_peer_up(peer, driver.now()));
            });
        }
        after
    }

    pub(super) fn peer_up(&self, driver: &Driver, peer: &Peer, link: &Arc<Outbound>) {
        self.each(driver, |state| {
            state.links.insert(peer.clone(), link.clone());
            state.node.handle_peer_up(peer, driver.now());
        });
    }

    pub(super) fn peer_down(&self, driver: &Driver, peer: &Peer) {
        self.each(driver, |state| {
            state.links.remove(peer);
            state.node.handle_peer_down(peer, driver.now());
        });
    }

    /// The committed view has changed.
    pub(super) fn view(&self, driver: &Driver) {
        self.each(driver, |state| state.read_view(driver));
    }

    /// What a peer says, in its order.
    pub(super) fn messages(
        &self,
        driver: &Driver,
        from: &Peer,
        messages: Vec<(u8, Vec<CacheMessage>)>,
        late: &mut Late,
    ) {
        let mut after = After::default();
        let now = driver.now();
        for (index, messages) in messages {
            let Some(cell) = self.shards.get(usize::from(index)) else { continue };
            self.step(driver, (index, cell), &mut after, |state| {
                // nothing of a session that is over
                if state.links.contains_key(from) {
                    messages.into_iter().for_each(|message| state.node.handle_message(from, message, now));
                }
            });
        }
        late.add(std::mem::take(&mut after.sends));
        after.carry_out(driver, self);
    }

    pub(crate) fn drain(&self, driver: &Driver) {
        self.each(driver, |state| state.node.drain(driver.now()));
    }

    pub(crate) fn accept_loss(&self, driver: &Driver, partition: PartitionId) -> Result<(), CacheError> {
        let mut after = After::default();
        let now = driver.now();
        let mut result = Ok(());
        self.step(driver, self.cell(partition), &mut after, |state| {
            result = state.node.accept_loss(partition, now);
        });
        after.carry_out(driver, self);
        result
    }

    /// The peer has no such cache open.
    pub(super) fn not_open(&self, driver: &Driver, from: &Peer, late: &mut Late) {
        let all = (0..SHARDS).map(|shard| (shard, vec![CacheMessage::NotOpen])).collect();
        self.messages(driver, from, all, late);
    }

    /// The end: says goodbye, and every operation that waits ends with `Stopped`.
    pub(super) fn close(&self, driver: &Driver) {
        if !self.is_closed() && self.is_drained() {
            self.handed_over.store(true, Ordering::Release);
        }
        self.closed.store(true, Ordering::Release);
        let mut waiters = Vec::new();
        self.each(driver, |state| {
            if !state.closed {
                state.closed = true;
                state.node.close(driver.now());
            }
            waiters.extend(state.waiting.drain());
        });
        for (_, waiter) in waiters {
            self.pending.fetch_sub(1, Ordering::Relaxed);
            let _ = waiter.send(Err(CacheError::Stopped));
        }
        self.events.close();
        // its task ends
        self.timer.notify_one();
        driver.pulse.notify_waiters();
    }

    /// Wakes the machines when they want to be woken, for as long as the cache is open.
    pub(super) async fn keep_time(self: Arc<Self>, driver: Arc<Driver>) {
        while !self.is_closed() {
            self.armed.store(NEVER, Ordering::SeqCst);
            let due = self.shards.iter().map(|cell| cell.due.load(Ordering::SeqCst)).min();
            let due = due.unwrap_or(NEVER);
            self.armed.store(due, Ordering::SeqCst);
            let sleep = driver.sleep_until(Duration::from_nanos(due));
            tokio::select! {
                biased;
                () = self.timer.notified() => {}
                () = sleep, if due != NEVER => {}
            }
            self.handle_timeout(&driver);
        }
    }

    fn handle_timeout(&self, driver: &Driver) {
        let mut after = After::default();
        let now = driver.now();
        for (index, cell) in self.cells() {
            if cell.due.load(Ordering::SeqCst) <= nanoseconds(now) {
                self.step(driver, (index, cell), &mut after, |state| state.node.handle_timeout(now));
            }
        }
        after.carry_out(driver, self);
    }
}

// Operations.
impl Hosted {
    /// The answer, if this node may give it at once.
    pub(crate) fn try_read(
        &self,
        partition: PartitionId,
        read: &ReadOp,
        options: &Options,
    ) -> Option<Answer> {
        let (_, cell) = self.cell(partition);
        let state = cell.state.lock();
        if state.closed {
            return Some(Err(CacheError::Stopped));
        }
        state.node.try_read(partition, read, options)
    }

    /// Begins one operation.
    pub(crate) fn begin(
        self: &Arc<Self>,
        driver: &Arc<Driver>,
        partition: PartitionId,
        operation: Operation,
        options: Options,
    ) -> Begun {
        let mut after = After::default();
        let begun = self.begin_one(driver, &mut after, partition, operation, options);
        after.carry_out(driver, self);
        begun
    }

    /// Begins operations, each on its partition; their messages travel together.
    pub(crate) fn begin_all(
        self: &Arc<Self>,
        driver: &Arc<Driver>,
        operations: impl IntoIterator<Item = (PartitionId, Operation, Options)>,
    ) -> Vec<Begun> {
        let mut after = After::default();
        let begun = operations
            .into_iter()
            .map(|(partition, operation, options)| {
                self.begin_one(driver, &mut after, partition, operation, options)
            })
            .collect();
        after.carry_out(driver, self);
        begun
    }

    fn begin_one(
        self: &Arc<Self>,
        driver: &Arc<Driver>,
        after: &mut After,
        partition: PartitionId,
        operation: Operation,
        options: Options,
    ) -> Begun {
        if self.pending.load(Ordering::Relaxed) >= self.config.max_pending {
            return Begun::Done(Box::new(Err(CacheError::Busy)));
        }
        let ticket = self.tickets.fetch_add(1, Ordering::Relaxed);
        let (index, cell) = self.cell(partition);
        let is_write = matches!(operation, Operation::Write(_));
        let mut state = cell.state.lock();
        if state.closed {
            return Begun::Done(Box::new(Err(CacheError::Stopped)));
        }
        state.node.operate(ticket, partition, operation, options, driver.now());
        after.at_once.clear();
        state.collect(self, driver, index, after);
        self.arm(cell, &state);
        let at_once = after.at_once.iter().position(|(done, _)| *done == ticket);
        if let Some(at) = at_once {
            return Begun::Done(Box::new(after.at_once.swap_remove(at).1));
        }
        let (waiter, receiver) = oneshot::channel();
        state.waiting.insert(ticket, waiter);
        self.pending.fetch_add(1, Ordering::Relaxed);
        let (driver, hosted, receiver) = (driver.clone(), self.clone(), Some(receiver));
        Begun::Waits(Waits { driver, hosted, partition, ticket, is_write, receiver })
    }

    fn cancel(&self, driver: &Driver, partition: PartitionId, ticket: u64) {
        let mut after = After::default();
        let waiter = self.step(driver, self.cell(partition), &mut after, |state| {
            let waiter = state.waiting.remove(&ticket);
            if waiter.is_some() {
                state.node.cancel(ticket);
            }
            waiter
        });
        if waiter.is_some() {
            self.pending.fetch_sub(1, Ordering::Relaxed);
        }
        after.carry_out(driver, self);
    }
}

// Getters.
impl Hosted {
    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// Whether nothing is to be handed over any more.
    pub(crate) fn is_drained(&self) -> bool {
        self.is_closed() || self.shards.iter().all(|cell| cell.state.lock().node.is_drained())
    }

    /// Whether everything was handed over, and before it was closed if it is.
    pub(crate) fn is_handed_over(&self) -> bool {
        match self.is_closed() {
            true => self.handed_over.load(Ordering::Acquire),
            false => self.is_drained(),
        }
    }

    /// Whether it drains and keeps records that nobody will take: no other node that takes part stays.
    pub(crate) fn has_no_taker(&self) -> bool {
        !self.is_closed() && self.shards.iter().any(|cell| cell.state.lock().node.has_no_taker())
    }

    pub(crate) fn pending(&self) -> usize {
        self.pending.load(Ordering::Relaxed)
    }

    /// Looks at the machine of a partition's shard. `look` is library code: the lock is held.
    pub(crate) fn look<R>(&self, partition: PartitionId, look: impl FnOnce(&CacheNode) -> R) -> R {
        look(&self.cell(partition).1.state.lock().node)
    }

    /// Looks at all machines, one after the other.
    pub(crate) fn look_at_all<R>(&self, mut look: impl FnMut(&CacheNode) -> R) -> Vec<R> {
        self.shards.iter().map(|cell| look(&cell.state.lock().node)).collect()
    }
}
