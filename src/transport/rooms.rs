//! Those who wait for room in the queues to a peer.

use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::Notify;

use super::{Frame, SendError};
use crate::types::Peer;

/// One bell a peer. It stays while the peer is up: a bell that was taken away when it rang would leave behind
/// whoever had found it just before, and nobody would ring for them again.
#[derive(Debug, Default)]
pub(crate) struct Rooms(Mutex<BTreeMap<Peer, Arc<Notify>>>);

impl Rooms {
    fn bell(&self, peer: &Peer) -> Arc<Notify> {
        self.0.lock().entry(peer.clone()).or_default().clone()
    }

    /// There is room again.
    pub(crate) fn wake(&self, peer: &Peer) {
        let bell = self.0.lock().get(peer).cloned();
        if let Some(bell) = bell {
            bell.notify_waiters();
        }
    }

    /// The peer is down: whoever waits finds that out.
    pub(crate) fn forget(&self, peer: &Peer) {
        let bell = self.0.lock().remove(peer);
        if let Some(bell) = bell {
            bell.notify_waiters();
        }
    }

    /// There are no links any more.
    pub(crate) fn close(&self) {
        for bell in std::mem::take(&mut *self.0.lock()).into_values() {
            bell.notify_waiters();
        }
    }

    /// Tries until there is room or no link. Cancel-safe as [`Transport::send`](super::Transport::send) says.
    pub(crate) async fn send(
        &self,
        to: &Peer,
        mut frame: Frame,
        try_send: impl Fn(&Peer, Frame) -> Result<(), SendError>,
    ) -> Result<(), SendError> {
        let mut waited = false;
        let result = loop {
            frame = match try_send(to, frame) {
                Err(SendError::Busy(frame)) => frame,
                result => break result,
            };
            waited = true;
            let bell = self.bell(to);
            let mut rung = std::pin::pin!(bell.notified());
            rung.as_mut().enable();
            // there may have come room before we listened
            frame = match try_send(to, frame) {
                Err(SendError::Busy(frame)) => frame,
                result => break result,
            };
            rung.await;
        };
        if waited && matches!(result, Err(SendError::NoLink(_))) {
            // it may have gone down before this bell was hung
            self.forget(to);
        }
        result
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use crate::transport::Lane;
    use crate::types::{Incarnation, NodeId};

    fn peer() -> Peer {
        Peer::new(NodeId::new("b").unwrap(), Incarnation::MIN)
    }

    /// It rings between a sender's finding it and its listening, and the room is taken by others at once: the next
    /// ring has to reach that sender, whatever was done meanwhile.
    #[tokio::test]
    async fn a_bell_that_rang_before_anyone_listened_rings_again() {
        let rooms = Rooms::default();
        let bell = rooms.bell(&peer());
        rooms.wake(&peer());
        let mut rung = std::pin::pin!(bell.notified());
        assert!(!rung.as_mut().enable());
        rooms.wake(&peer());
        assert!(rung.as_mut().enable(), "not rung");
        let mut rung = std::pin::pin!(bell.notified());
        rung.as_mut().enable();
        rooms.forget(&peer());
        assert!(rung.as_mut().enable(), "nor at the end");
    }

    #[tokio::test]
    async fn no_bell_stays_of_a_peer_that_is_down() {
        let rooms = Rooms::default();
        let tries = AtomicUsize::new(0);
        let try_send = |to: &Peer, frame: Frame| match tries.fetch_add(1, Ordering::SeqCst) {
            0 => {
                rooms.forget(to);
                Err(SendError::Busy(frame))
            }
            _ => Err(SendError::NoLink(frame)),
        };
        let sent = rooms.send(&peer(), Frame::new(Lane::Data, "", "x"), try_send).await;
        assert!(matches!(sent, Err(SendError::NoLink(_))));
        assert!(rooms.0.lock().is_empty());
    }
}
