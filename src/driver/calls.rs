//! Requests over frames, carried: the table is in `transport/calls.rs`.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::sync::oneshot;

use super::{Driver, counting};
use crate::transport::calls::{self, CallMessage, Declined, Service};
use crate::transport::{Frame, SendError, wire};
use crate::types::Peer;

/// Why a call has no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum CallError {
    /// The peer is not connected, or went down before it answered.
    #[error("it cannot be reached")]
    Unreachable,
    /// It made no progress for as long as the call allows.
    #[error("it made no progress in time")]
    TimedOut,
    /// Too many calls to it are open.
    #[error("too many calls to it are open")]
    Busy,
    /// It said no.
    #[error("it declined: {0}")]
    Declined(Declined),
    /// The transport cannot carry the request.
    #[error("the request is too large for the transport")]
    TooLarge,
}

type Answer = Result<Bytes, CallError>;
type Table = calls::Calls<oneshot::Sender<Answer>>;

/// The calls of one scope; `None` once it has stopped.
pub(crate) struct Calls(Mutex<Option<Table>>);

impl Calls {
    pub(super) fn new() -> Self {
        Self(Mutex::new(Some(Table::new())))
    }

    fn with<R>(&self, act: impl FnOnce(&mut Table) -> R) -> Option<R> {
        self.0.lock().as_mut().map(act)
    }

    /// Ends what `act` gives back, outside the lock: wakers run there.
    fn end(&self, answer: Answer, act: impl FnOnce(&mut Table) -> Vec<oneshot::Sender<Answer>>) {
        for waiter in self.with(act).unwrap_or_default() {
            // whoever waited may have gone
            let _ = waiter.send(answer.clone());
        }
    }

    pub(super) fn peer_down(&self, peer: &Peer) {
        self.end(Err(CallError::Unreachable), |table| table.handle_peer_down(peer));
    }

    pub(super) fn handle_timeout(&self, now: Duration) {
        self.end(Err(CallError::TimedOut), |table| table.handle_timeout(now));
    }

    pub(super) fn close(&self) {
        let table = self.0.lock().take();
        for waiter in table.map(|mut table| table.close()).unwrap_or_default() {
            let _ = waiter.send(Err(CallError::Unreachable));
        }
    }

    /// How many wait for an answer.
    pub(crate) fn len(&self) -> usize {
        self.with(|table| table.len()).unwrap_or_default()
    }
}

/// Takes a call out of the table when its caller goes.
struct Entry<'a> {
    calls: &'a Calls,
    call: u64,
}

impl Drop for Entry<'_> {
    fn drop(&mut self) {
        let waiter = self.calls.with(|table| table.forget(self.call));
        drop(waiter);
    }
}

// Calling.
impl Driver {
    /// Asks `to` and waits, as long as it makes progress every `patience`. Dropped, the call may still be carried
    /// out there.
    pub(crate) async fn call(
        &self,
        to: &Peer,
        service: Service,
        request: Bytes,
        patience: Duration,
    ) -> Answer {
        let (waiter, answer) = oneshot::channel();
        let begun = self.calls.with(|table| table.begin(to, waiter, patience, self.now()));
        let call = begun.ok_or(CallError::Unreachable)?.map_err(|_| CallError::Busy)?;
        let _entry = Entry { calls: &self.calls, call };
        let message = CallMessage::Request { call, service: service.number() };
        let sent = async {
            match self.send_call(to, &message, request).await {
                // the answer, or the end of the peer, comes by the table
                Ok(()) => std::future::pending().await,
                Err(error) => error,
            }
        };
        tokio::select! {
            biased;
            answer = answer => answer.unwrap_or(Err(CallError::Unreachable)),
            error = sent => Err(error),
        }
    }

    async fn send_call(&self, to: &Peer, message: &CallMessage, body: Bytes) -> Result<(), CallError> {
        let Some(frame) = call_frame(message, body) else { return Err(CallError::TooLarge) };
        match self.transport.send(to, frame).await {
            Ok(()) => Ok(()),
            Err(SendError::TooLarge(_)) => {
                self.stats.frames_too_large.add(1);
                Err(CallError::TooLarge)
            }
            Err(SendError::NoLink(_)) => Err(CallError::Unreachable),
            Err(SendError::Busy(_)) => Err(CallError::Busy),
        }
    }
}

fn call_frame(message: &CallMessage, body: Bytes) -> Option<Frame> {
    let lane = calls::lane_for(body.len());
    wire::encode_call(message).map(|head| Frame::new(lane, head, body))
}

// Answering.
impl Driver {
    pub(super) fn call_message(self: &Arc<Self>, from: &Peer, message: CallMessage, body: Bytes) {
        match message {
            CallMessage::Request { call, service } => self.serve(from, call, service, &body),
            CallMessage::Answer { call } => self.finish(from, call, Ok(body)),
            CallMessage::Declined { call, why } => self.finish(from, call, Err(CallError::Declined(why))),
            CallMessage::Working { call } => {
                self.calls.with(|table| table.handle_working(from, call, self.now()));
            }
        }
    }

    fn finish(&self, from: &Peer, call: u64, answer: Answer) {
        if let Some(waiter) = self.calls.with(|table| table.handle_end(from, call)).flatten() {
            let _ = waiter.send(answer);
        }
    }

    fn serve(self: &Arc<Self>, from: &Peer, call: u64, service: u8, request: &[u8]) {
        if self.calls.with(|table| table.serve(from)) != Some(true) {
            // not queued: who asks more than may wait is told so only if there is room
            self.try_answer(from, &CallMessage::Declined { call, why: Declined::Busy }, Bytes::new());
            return;
        }
        let answer = match Service::of(service) {
            Some(Service::Members) => counting::serve(&self.node, request).ok_or(Declined::Malformed),
            None => Err(Declined::Unknown),
        };
        let (message, body) = match answer {
            Ok(body) => (CallMessage::Answer { call }, body),
            Err(why) => (CallMessage::Declined { call, why }, Bytes::new()),
        };
        self.answer(from, message, body);
    }

    /// Without a task if there is room, which there nearly always is.
    fn answer(self: &Arc<Self>, from: &Peer, message: CallMessage, body: Bytes) {
        if self.try_answer(from, &message, body.clone()) {
            self.calls.with(|table| table.served(from));
            return;
        }
        let (driver, from) = (self.clone(), from.clone());
        self.spawn_reply(async move {
            // a peer that is gone wants no answer
            let _ = driver.send_call(&from, &message, body).await;
            driver.calls.with(|table| table.served(&from));
        });
    }

    /// Whether that is done with: sent, or not to be sent at all.
    fn try_answer(&self, to: &Peer, message: &CallMessage, body: Bytes) -> bool {
        let Some(frame) = call_frame(message, body) else { return true };
        match self.transport.try_send(to, frame) {
            Ok(()) | Err(SendError::NoLink(_)) => true,
            Err(SendError::TooLarge(_)) => {
                self.stats.frames_too_large.add(1);
                true
            }
            Err(SendError::Busy(_)) => false,
        }
    }
}
