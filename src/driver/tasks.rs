//! The tasks of a scope: two senders a peer, the timer, background work, broadcasts that were put off, and the
//! keeper that ends them all.

use std::future::poll_fn;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::task::AbortHandle;
use tokio::time::{MissedTickBehavior, interval};

use super::port::Port;
use super::{Driver, Phase};
use crate::transport::{Frame, Lane, SendError, wire};
use crate::types::Peer;

/// How long a sender waits before it tries again at a peer that is up here and unknown to the transport.
const LINK_RETRY: Duration = Duration::from_millis(10);

/// The tasks that send to one peer.
pub(super) struct Link {
    lanes: [Arc<LaneState>; 2],
    tasks: [AbortHandle; 2],
}

/// What a sender shares with those who wake and end it.
#[derive(Default)]
struct LaneState {
    wake: Notify,
    /// Held while the node is asked what it owes and while the transport takes it, so that the sender of a session
    /// that is over can neither take what belongs to the next one nor send what belonged to its own into it.
    over: Mutex<bool>,
    /// What the caches have to say to the peer; one for both lanes.
    #[cfg(feature = "cache")]
    caches: Arc<super::cache::Outbound>,
}

impl Link {
    /// There is something to send.
    pub(super) fn wake(&self) {
        self.lanes.iter().for_each(|lane| lane.wake.notify_one());
    }

    /// What the caches have to say to the peer in this session.
    #[cfg(feature = "cache")]
    pub(super) fn caches(&self) -> Option<Arc<super::cache::Outbound>> {
        self.lanes.first().map(|lane| lane.caches.clone())
    }

    fn end(&self) {
        self.lanes.iter().for_each(|lane| *lane.over.lock() = true);
        self.tasks.iter().for_each(AbortHandle::abort);
        #[cfg(feature = "cache")]
        self.lanes.iter().for_each(|lane| lane.caches.end());
    }
}

impl Driver {
    pub(super) fn spawn_tasks(self: &Arc<Self>, port: Arc<Port>) {
        self.spawn(timer(self.clone()));
        self.spawn(work(self.clone()));
        self.spawn(put_off(self.clone()));
        self.runtime.spawn(keep(End(self.clone()), port));
    }

    /// Starts a task that the end of the scope waits for.
    fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) -> AbortHandle {
        let task = self.runtime.spawn(task);
        let abort = task.abort_handle();
        let mut tasks = self.tasks.lock();
        tasks.retain(|task| !task.is_finished());
        tasks.push(task);
        abort
    }

    /// A small task that passes on one answer.
    pub(crate) fn spawn_reply(&self, reply: impl Future<Output = ()> + Send + 'static) {
        drop(self.spawn(reply));
    }

    /// How many tasks run.
    pub(crate) fn task_count(&self) -> usize {
        self.tasks.lock().iter().filter(|task| !task.is_finished()).count()
    }

    pub(super) fn open_link(self: &Arc<Self>, peer: &Peer) {
        let control = LaneState::default();
        let bulk = LaneState {
            #[cfg(feature = "cache")]
            caches: control.caches.clone(),
            ..LaneState::default()
        };
        let lanes = [Arc::new(control), Arc::new(bulk)];
        let [control, bulk] = lanes.clone();
        let tasks = [
            self.spawn(sender(self.clone(), peer.clone(), Lane::Control, control)),
            self.spawn(sender(self.clone(), peer.clone(), Lane::Bulk, bulk)),
        ];
        let earlier = self.links.lock().insert(peer.clone(), Link { lanes, tasks });
        if let Some(earlier) = earlier {
            earlier.end();
        }
    }

    pub(super) fn close_link(&self, peer: &Peer) {
        let link = self.links.lock().remove(peer);
        if let Some(link) = link {
            link.end();
        }
    }
}

/// Sends what the node owes one peer on one lane, for as long as the peer is up, and what caches could not send for
/// lack of room; in turn, so that neither waits for all of the other.
async fn sender(driver: Arc<Driver>, peer: Peer, lane: Lane, state: Arc<LaneState>) {
    loop {
        let outgoing = {
            let over = state.over.lock();
            if *over {
                return;
            }
            driver.node.poll_transmit_on(&peer, lane, driver.now())
        };
        #[cfg_attr(not(feature = "cache"), expect(unused_mut, reason = "only caches say more"))]
        let mut idle = outgoing.is_none();
        if let Some(outgoing) = outgoing {
            if let Some(head) = wire::encode_control(&outgoing.message) {
                let frame = Frame::new(outgoing.lane, head, bytes::Bytes::new());
                if !deliver_frame(&driver, &peer, frame, &state).await {
                    return;
                }
            }
            driver.pump();
        }
        #[cfg(feature = "cache")]
        if let Some(frame) = state.caches.take(lane) {
            if !deliver_frame(&driver, &peer, frame, &state).await {
                return;
            }
            state.caches.sent(lane);
            idle = false;
        }
        if idle {
            state.wake.notified().await;
        }
    }
}

/// What the node gave out counts as sent, so it must arrive or the peer must go down (which ends this task). Whether
/// it is still up.
async fn deliver_frame(driver: &Driver, peer: &Peer, mut frame: Frame, state: &LaneState) -> bool {
    loop {
        let mut sending = driver.transport.send(peer, frame);
        let sent = poll_fn(|context| {
            let over = state.over.lock();
            if *over { Poll::Ready(None) } else { sending.as_mut().poll(context).map(Some) }
        });
        match sent.await {
            None => return false,
            Some(Ok(())) => return true,
            Some(Err(SendError::TooLarge(frame))) => {
                driver.refused_as_too_large(peer, &frame);
                return true;
            }
            Some(Err(SendError::NoLink(back) | SendError::Busy(back))) => {
                frame = back;
                tokio::time::sleep(LINK_RETRY).await;
            }
        }
    }
}

impl Driver {
    pub(super) fn refused_as_too_large(&self, peer: &Peer, frame: &Frame) {
        self.stats.frames_too_large.add(1);
        let (bytes, limit) = (frame.len(), self.transport.max_frame());
        tracing::error!(%peer, bytes, limit, "the transport cannot carry a frame of the protocol");
    }
}

async fn timer(driver: Arc<Driver>) {
    let mut ticks = interval(driver.node.settings().tick());
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        driver.handle_timeout();
    }
}

async fn work(driver: Arc<Driver>) {
    loop {
        while driver.node.work(driver.now()) {
            driver.pump();
            tokio::task::yield_now().await;
        }
        driver.pump();
        driver.work.notified().await;
    }
}

/// Makes the broadcasts that came from inside deliveries and could not be made at once.
async fn put_off(driver: Arc<Driver>) {
    loop {
        while let Some(later) = driver.casts.next_later() {
            later.make(&driver).await;
            tokio::task::yield_now().await;
        }
        driver.casts.later_wake.notified().await;
    }
}

/// Marks the end. Made before the keeper's task is, so that nobody waits for the end for ever, whatever becomes
/// of the task or of its runtime.
struct End(Arc<Driver>);

impl Drop for End {
    fn drop(&mut self) {
        self.0.begin_stop();
        // a runtime that ends has not come so far
        #[cfg(feature = "cache")]
        self.0.close_caches();
        self.0.close();
        self.0.phase.send_replace(Phase::Stopped);
    }
}

/// Waits for the end and carries it out. Started with the scope, so that stopping needs no new task.
async fn keep(end: End, port: Arc<Port>) {
    let driver = &end.0;
    // an error would mean that the sender is gone; it is the driver's own
    let _ = driver.phase.subscribe().wait_for(|phase| *phase != Phase::Running).await;
    // while the network is there: peers are told
    #[cfg(feature = "cache")]
    driver.close_caches();
    driver.transport.shutdown().await;
    driver.links.lock().clear();
    let tasks = std::mem::take(&mut *driver.tasks.lock());
    tasks.iter().for_each(|task| task.abort());
    for task in tasks {
        // an aborted task answers with an error; that is its end
        let _ = task.await;
    }
    drop(port);
}
