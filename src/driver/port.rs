//! The transport's way in.

use std::sync::{Arc, OnceLock, Weak};

use parking_lot::Mutex;

use super::Driver;
use crate::transport::{Frame, Receiver};
use crate::types::Peer;

/// What a transport may report before the node exists: its own life is known only when it has started.
enum Input {
    Up(Peer),
    Suspect(Peer),
    Resumed(Peer),
    Down(Peer),
    Settled,
    Frame(Peer, Frame),
}

/// Keeps the inputs of the first moments, then passes every input on at once.
pub(crate) struct Port {
    driver: OnceLock<Weak<Driver>>,
    early: Mutex<Vec<Input>>,
}

impl Port {
    pub(crate) fn new() -> Self {
        Self { driver: OnceLock::new(), early: Mutex::default() }
    }

    /// Hands over what came early, in order, and lets the rest through. Under the lock, so that nothing
    /// overtakes it; no member exists yet, so no user's code can run here.
    pub(crate) fn open(&self, driver: &Arc<Driver>) {
        let mut early = self.early.lock();
        for input in early.drain(..) {
            hand_over(driver, input);
        }
        let _ = self.driver.set(Arc::downgrade(driver));
    }

    fn take(&self, input: Input) {
        if self.driver.get().is_none() {
            let mut early = self.early.lock();
            if self.driver.get().is_none() {
                early.push(input);
                return;
            }
        }
        if let Some(driver) = self.driver.get().and_then(Weak::upgrade) {
            hand_over(&driver, input);
        }
    }
}

fn hand_over(driver: &Arc<Driver>, input: Input) {
    match input {
        Input::Up(peer) => driver.peer_up(peer),
        Input::Suspect(peer) => driver.peer_suspect(&peer),
        Input::Resumed(peer) => driver.peer_resumed(&peer),
        Input::Down(peer) => driver.peer_down(&peer),
        Input::Settled => driver.discovery_settled(),
        Input::Frame(peer, frame) => driver.frame(&peer, frame),
    }
}

impl Receiver for Port {
    fn peer_up(&self, peer: Peer) {
        self.take(Input::Up(peer));
    }

    fn peer_suspect(&self, peer: &Peer) {
        self.take(Input::Suspect(peer.clone()));
    }

    fn peer_resumed(&self, peer: &Peer) {
        self.take(Input::Resumed(peer.clone()));
    }

    fn peer_down(&self, peer: &Peer) {
        self.take(Input::Down(peer.clone()));
    }

    fn discovery_settled(&self) {
        self.take(Input::Settled);
    }

    fn frame(&self, peer: &Peer, frame: Frame) {
        match self.driver.get().and_then(Weak::upgrade) {
            Some(driver) => driver.frame(peer, frame),
            None => self.take(Input::Frame(peer.clone(), frame)),
        }
    }

    fn frames(&self, peer: &Peer, frames: Vec<Frame>) {
        match self.driver.get().and_then(Weak::upgrade) {
            Some(driver) => driver.frames(peer, frames),
            None => frames.into_iter().for_each(|frame| self.take(Input::Frame(peer.clone(), frame))),
        }
    }
}
