//! The transport's way in.

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock, Weak};

use parking_lot::Mutex;

use super::Driver;
use crate::transport::{Frame, Lane, Receiver};
use crate::types::Peer;

/// What a transport may report before the node exists: its own life is known only when it has started.
enum Input {
    Up(Peer),
    Suspect(Peer),
    Resumed(Peer),
    Down(Peer),
    Settled,
    Frame(Peer, Frame),
    /// So many broadcasts of this peer came when there was no room to keep them.
    Missed(Peer, u64),
}

/// How many bytes of broadcasts are kept while a start waits. Nobody on this node can have joined a group yet, and no
/// view has it for a router: what is beyond is counted as handled, which it is.
const EARLY_DATA: usize = 4 << 20;
/// And how many bytes of everything else, which peers that keep to the protocol never reach: they send little before
/// they have an answer. More is dropped.
const EARLY_REST: usize = 64 << 20;
/// What a frame takes besides its bytes.
const FRAME: usize = size_of::<Input>();

#[derive(Default)]
struct Early {
    inputs: Vec<Input>,
    data: usize,
    rest: usize,
    /// Where the broadcasts of a peer that are not kept are counted. Once there, all later ones are.
    missed: BTreeMap<Peer, usize>,
}

impl Early {
    fn push(&mut self, input: Input) {
        match input {
            Input::Frame(peer, frame) if frame.lane == Lane::Data => self.push_data(peer, frame),
            Input::Frame(peer, frame) => {
                self.rest += frame.len() + FRAME;
                if self.rest > EARLY_REST {
                    self.rest -= frame.len() + FRAME;
                    tracing::error!(%peer, "a peer floods a node that is starting: dropped");
                    return;
                }
                self.inputs.push(Input::Frame(peer, frame));
            }
            Input::Down(peer) => {
                self.missed.remove(&peer);
                self.inputs.push(Input::Down(peer));
            }
            other => self.inputs.push(other),
        }
    }

    /// The frames of a peer are numbered: none may be left out in between.
    fn push_data(&mut self, peer: Peer, frame: Frame) {
        let place = self.missed.get(&peer).copied();
        if let Some(Input::Missed(_, count)) = place.and_then(|place| self.inputs.get_mut(place)) {
            *count += 1;
            return;
        }
        if self.data + frame.len() + FRAME > EARLY_DATA {
            self.missed.insert(peer.clone(), self.inputs.len());
            self.inputs.push(Input::Missed(peer, 1));
            return;
        }
        self.data += frame.len() + FRAME;
        self.inputs.push(Input::Frame(peer, frame));
    }
}

/// Keeps the inputs of the first moments, then passes every input on at once.
pub(crate) struct Port {
    driver: OnceLock<Weak<Driver>>,
    early: Mutex<Early>,
}

impl Port {
    pub(crate) fn new() -> Self {
        Self { driver: OnceLock::new(), early: Mutex::default() }
    }

    /// Hands over what came early, in order, and lets the rest through. Under the lock, so that nothing
    /// overtakes it; no member exists yet, so no user's code can run here.
    pub(crate) fn open(&self, driver: &Arc<Driver>) {
        let mut early = self.early.lock();
        for input in std::mem::take(&mut *early).inputs {
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
        Input::Missed(peer, count) => driver.missed_data(&peer, count),
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::{Incarnation, NodeId};

    fn peer(name: &str) -> Peer {
        Peer::new(NodeId::new(name).unwrap(), Incarnation::MIN)
    }

    fn frame(lane: Lane, len: usize) -> Frame {
        Frame::new(lane, "", vec![0; len])
    }

    /// What waits as (of b, of c, missed of b, missed of c).
    fn kept(early: &Early) -> [u64; 4] {
        let mut all = [0; 4];
        for input in &early.inputs {
            match input {
                Input::Frame(from, _) => all[usize::from(*from == peer("c"))] += 1,
                Input::Missed(from, count) => all[2 + usize::from(*from == peer("c"))] += count,
                _ => {}
            }
        }
        all
    }

    #[test]
    fn what_comes_while_a_start_waits_is_bounded_and_no_number_is_lost() {
        let mut early = Early::default();
        early.push(Input::Up(peer("b")));
        early.push(Input::Up(peer("c")));
        for _ in 0..3 {
            early.push(Input::Frame(peer("b"), frame(Lane::Data, EARLY_DATA / 2)));
        }
        // smaller, and there would be room for it: but it comes behind one that is not kept
        early.push(Input::Frame(peer("b"), frame(Lane::Data, 1)));
        early.push(Input::Frame(peer("b"), frame(Lane::Control, 1)));
        early.push(Input::Frame(peer("c"), frame(Lane::Data, 1)));
        assert_eq!(kept(&early), [2, 1, 3, 0]);
        for _ in 0..100_000 {
            early.push(Input::Frame(peer("c"), frame(Lane::Data, 100)));
        }
        let [_, of_c, _, missed_of_c] = kept(&early);
        assert_eq!(of_c + missed_of_c, 100_001);
        assert!(missed_of_c > 50_000 && early.data <= EARLY_DATA);
        // a link that is made anew counts anew, and is heard of
        early.push(Input::Down(peer("c")));
        early.push(Input::Up(peer("c")));
        early.push(Input::Frame(peer("c"), frame(Lane::Data, EARLY_DATA)));
        let last: Vec<&Input> = early.inputs.iter().rev().take(3).collect();
        assert!(matches!(last[..], [Input::Missed(_, 1), Input::Up(_), Input::Down(_)]));
        for _ in 0..10 {
            early.push(Input::Frame(peer("b"), frame(Lane::Bulk, EARLY_REST / 4)));
        }
        assert!(early.rest <= EARLY_REST);
    }
}
