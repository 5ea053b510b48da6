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
pub(crate) struct Rooms(Mutex<BTreeMap<Peer, Arc<Bell>>>);

#[derive(Debug, Default)]
struct Bell {
    rung: Notify,
    /// The session is over. Held while somebody who has waited tries again, so that they do not get into the
    /// next session of the same peer.
    over: Mutex<bool>,
}

impl Bell {
    fn end(&self) {
        *self.over.lock() = true;
        self.rung.notify_waiters();
    }
}

impl Rooms {
    fn bell(&self, peer: &Peer) -> Arc<Bell> {
        self.0.lock().entry(peer.clone()).or_default().clone()
    }

    /// There is room again.
    pub(crate) fn wake(&self, peer: &Peer) {
        let bell = self.0.lock().get(peer).cloned();
        if let Some(bell) = bell {
            bell.rung.notify_waiters();
        }
    }

    /// The peer is down: whoever waits gets `NoLink`, also if it is up again by then. Call it before that, and
    /// without a lock that `try_send` needs.
    pub(crate) fn forget(&self, peer: &Peer) {
        let bell = self.0.lock().remove(peer);
        if let Some(bell) = bell {
            bell.end();
        }
    }

    /// There are no links any more.
    pub(crate) fn close(&self) {
        let bells = std::mem::take(&mut *self.0.lock());
        bells.into_values().for_each(|bell| bell.end());
    }

    /// There is no link: a bell that was hung after the end of the session is taken away again.
    fn take_away(&self, peer: &Peer, bell: Arc<Bell>) {
        let mut bells = self.0.lock();
        let hangs = bells.get(peer).is_some_and(|hangs| Arc::ptr_eq(hangs, &bell));
        drop(bell);
        if hangs && bells.get(peer).is_some_and(|bell| Arc::strong_count(bell) == 1) {
            bells.remove(peer);
        }
    }

    /// Tries until there is room or no link. Cancel-safe as [`Transport::send`](super::Transport::send) says.
    pub(crate) async fn send(
        &self,
        to: &Peer,
        mut frame: Frame,
        try_send: impl Fn(&Peer, Frame) -> Result<(), SendError>,
    ) -> Result<(), SendError> {
        frame = match try_send(to, frame) {
            Err(SendError::Busy(frame)) => frame,
            result => return result,
        };
        let bell = self.bell(to);
        let result = loop {
            let mut rung = std::pin::pin!(bell.rung.notified());
            rung.as_mut().enable();
            frame = {
                let over = bell.over.lock();
                if *over {
                    break Err(SendError::NoLink(frame));
                }
                // there may have come room before we listened
                match try_send(to, frame) {
                    Err(SendError::Busy(frame)) => frame,
                    result => break result,
                }
            };
            rung.await;
        };
        if matches!(result, Err(SendError::NoLink(_))) {
            self.take_away(to, bell);
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
        let mut rung = std::pin::pin!(bell.rung.notified());
        assert!(!rung.as_mut().enable());
        rooms.wake(&peer());
        assert!(rung.as_mut().enable(), "not rung");
        let mut rung = std::pin::pin!(bell.rung.notified());
        rung.as_mut().enable();
        rooms.forget(&peer());
        assert!(rung.as_mut().enable(), "nor at the end");
    }

    /// The peer is down and up again before the one who waits runs: its next session is not for them.
    #[tokio::test]
    async fn who_waits_for_room_does_not_get_into_the_next_session() {
        let rooms = Rooms::default();
        let full = std::sync::atomic::AtomicBool::new(true);
        let try_send = |_: &Peer, frame: Frame| match full.load(Ordering::SeqCst) {
            true => Err(SendError::Busy(frame)),
            false => Ok(()),
        };
        let to = peer();
        let mut sending = std::pin::pin!(rooms.send(&to, Frame::new(Lane::Data, "", "x"), try_send));
        assert!(futures_util::poll!(&mut sending).is_pending());
        rooms.forget(&to);
        full.store(false, Ordering::SeqCst);
        assert!(matches!(sending.await, Err(SendError::NoLink(_))));
        assert!(rooms.send(&to, Frame::new(Lane::Data, "", "y"), try_send).await.is_ok());
        assert!(rooms.0.lock().is_empty());
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
