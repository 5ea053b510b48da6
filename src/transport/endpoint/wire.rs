//! One connection: what its two halves and the seat share, and the loop that carries it.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytes::Bytes;
use futures_core::Stream;
use futures_sink::Sink;
use parking_lot::Mutex;
use tokio::sync::{Notify, Semaphore};

use super::life::{Arrival, Life};
use crate::transport::link::{Packet, RawId};
use crate::types::NodeId;

/// How much may wait in either direction of a connection, in units of 1 KiB (a packet counts one more).
const WINDOW: u32 = 512;
/// How much may wait to be written, the link layer's own words included: beyond it nothing more is asked for.
const STUFFED: u32 = 2 * WINDOW;
/// How long a connection that was closed in order waits for the other end to read on and close too: dropped at once,
/// what is still on its way to us would make the network throw away what is on its way from us.
const LINGER: Duration = Duration::from_secs(1);

pub(super) struct Wire {
    pub(super) raw: RawId,
    /// Who has to be at the other end.
    pub(super) expected: Option<NodeId>,
    /// We have dialled it.
    pub(super) dialled: bool,
    out: Mutex<Out>,
    /// Wakes the half that writes.
    ready: Notify,
    /// Room for what was read and not yet handled. Closed when nothing is to be read any more.
    credit: Arc<Semaphore>,
    /// The seat waits for room.
    blocked: AtomicBool,
}

#[derive(Default)]
struct Out {
    queue: VecDeque<Packet>,
    weight: u32,
    /// Close after what is queued.
    closing: bool,
    /// Close at once.
    broken: bool,
}

enum Next {
    Packet(Packet),
    Nothing,
    Close,
    Break,
}

fn weight(packet: &Packet) -> u32 {
    u32::try_from(packet.len() / 1024 + 1).unwrap_or(u32::MAX).min(WINDOW)
}

// For the seat.
impl Wire {
    pub(super) fn has_room(&self) -> bool {
        let room = || self.out.lock().weight < WINDOW;
        if room() {
            return true;
        }
        self.blocked.store(true, Ordering::SeqCst);
        // it may have changed just before
        room()
    }

    /// Whether nothing more may be written at all, not even the words that need no room. Ask after
    /// [`Wire::has_room`], which lets the seat be woken.
    pub(super) fn is_stuffed(&self) -> bool {
        self.out.lock().weight >= STUFFED
    }

    pub(super) fn write(&self, packet: Packet) {
        {
            let mut out = self.out.lock();
            out.weight = out.weight.saturating_add(weight(&packet));
            out.queue.push_back(packet);
        }
        self.ready.notify_one();
    }

    /// After what is queued. What still comes is thrown away.
    pub(super) fn close(&self) {
        self.out.lock().closing = true;
        self.credit.close();
        self.ready.notify_one();
    }

    pub(super) fn break_off(&self) {
        self.out.lock().broken = true;
        self.credit.close();
        self.ready.notify_one();
    }
}

// For the halves.
impl Wire {
    fn next(&self, life: &Life) -> Next {
        let mut out = self.out.lock();
        if out.broken {
            return Next::Break;
        }
        let Some(packet) = out.queue.pop_front() else {
            return if out.closing { Next::Close } else { Next::Nothing };
        };
        out.weight = out.weight.saturating_sub(weight(&packet));
        let much = out.weight >= WINDOW / 2;
        drop(out);
        if !much && self.blocked.swap(false, Ordering::SeqCst) {
            life.wake.notify_one();
        }
        Next::Packet(packet)
    }

    /// Gives what came to the seat, waiting for room. Whether to go on reading.
    async fn arrived(&self, life: &Life, bytes: Bytes) -> bool {
        let Some(packet) = Packet::from_bytes(bytes) else {
            life.push(Arrival::Malformed(self.raw));
            return false;
        };
        if let Ok(room) = self.credit.clone().acquire_many_owned(weight(&packet)).await {
            life.push(Arrival::Packet(self.raw, packet, room));
        }
        true
    }
}

/// However it ends: the seat is told.
struct Carried<'a>(&'a Life, RawId);

impl Drop for Carried<'_> {
    fn drop(&mut self) {
        self.0.push(Arrival::Closed(self.1));
        self.0.carried.fetch_sub(1, Ordering::AcqRel);
        self.0.wake.notify_one();
    }
}

/// Reads and writes one connection until it ends.
pub(super) async fn carry<R, W, E>(life: &Life, expected: Option<NodeId>, dialled: bool, stream: R, sink: W)
where
    R: Stream<Item = Result<Bytes, E>>,
    W: Sink<Bytes>,
{
    let mut over = life.over.subscribe();
    if life.is_gone() || !life.may_carry() {
        return;
    }
    let wire = Arc::new(Wire {
        raw: life.next_raw(),
        expected,
        dialled,
        out: Mutex::default(),
        ready: Notify::new(),
        credit: Arc::new(Semaphore::new(WINDOW as usize)),
        blocked: AtomicBool::new(false),
    });
    let _carried = Carried(life, wire.raw);
    life.push(Arrival::Opened(wire.clone()));
    let mut stream = pin!(stream);
    let mut read = pin!(async {
        while let Some(Ok(bytes)) = poll_fn(|context| stream.as_mut().poll_next(context)).await {
            if !wire.arrived(life, bytes).await {
                return;
            }
        }
    });
    let both = async {
        tokio::select! {
            () = &mut read => {}
            closed = write(life, &wire, sink) => {
                if closed.is_some() {
                    let _ = tokio::time::timeout(LINGER, read).await;
                }
            }
        }
    };
    tokio::select! {
        () = both => {}
        _ = over.wait_for(|over| *over) => {}
    }
}

/// Writes until it has closed the connection in order; `None` if that was not possible. The sink is dropped then: for
/// many, as for one that writes to a channel, that is how the other end learns of it.
async fn write<W: Sink<Bytes>>(life: &Life, wire: &Wire, sink: W) -> Option<()> {
    let mut sink = pin!(sink);
    loop {
        match wire.next(life) {
            Next::Packet(packet) => {
                poll_fn(|context| sink.as_mut().poll_ready(context)).await.ok()?;
                sink.as_mut().start_send(packet.to_bytes()).ok()?;
            }
            Next::Nothing => {
                poll_fn(|context| sink.as_mut().poll_flush(context)).await.ok()?;
                wire.ready.notified().await;
            }
            Next::Close => return poll_fn(|context| sink.as_mut().poll_close(context)).await.ok(),
            Next::Break => return None,
        }
    }
}
