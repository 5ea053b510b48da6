//! Requests and their answers over frames. Sans-IO: the table of open calls; the driver sends and wakes.
//!
//! A call has a number of its caller, a service and a body that only the service reads. It ends with the answer, a
//! refusal, the end of its peer, or a deadline that starts anew with every sign of progress. A call that has ended
//! here is not cancelled at the far end, which may still carry it out: what a service does must bear that (the
//! protocol's versions make it harmless).
//!
//! Calls never travel on the data lane, whose frames are counted. A small one goes with control, a larger one with
//! bulk, so nothing is promised about the order of two calls.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::Lane;
use crate::types::Peer;

/// How many calls to one peer may be open, and how many of one peer may be served, at a time.
pub(crate) const MAX_OPEN: usize = 4096;
/// A body above this many bytes travels with bulk, so that control is not held up.
const SMALL: usize = 8 << 10;

/// Who answers. The number is on the wire: never changed, only added.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub(crate) enum Service {
    /// Who holds a group, and with how many members.
    Members,
}

/// What travels; the request or the answer itself is the frame's body.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum CallMessage {
    /// Answer this.
    Request { call: u64, service: u8 },
    /// The answer.
    Answer { call: u64 },
    /// Not yet: its deadline starts anew.
    Working { call: u64 },
    /// There will be no answer.
    Declined { call: u64, why: Declined },
}

/// Why a request was not carried out. Nothing has changed at the far end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub(crate) enum Declined {
    /// Too many requests of this peer are being served.
    #[error("it serves too many requests")]
    Busy,
    /// It has no such service.
    #[error("it has no such service")]
    Unknown,
    /// The request makes no sense to it.
    #[error("it does not understand the request")]
    Malformed,
}

/// The lane for a body of so many bytes.
pub(crate) fn lane_for(bytes: usize) -> Lane {
    if bytes <= SMALL { Lane::Control } else { Lane::Bulk }
}

impl Service {
    /// How it is named on the wire.
    pub(crate) const fn number(self) -> u8 {
        match self {
            Service::Members => 0,
        }
    }

    /// The service of that number, if this version has it.
    pub(crate) const fn of(number: u8) -> Option<Self> {
        match number {
            0 => Some(Service::Members),
            _ => None,
        }
    }
}

#[derive(Debug)]
struct Open<T> {
    to: Peer,
    waiter: T,
    patience: Duration,
    deadline: Duration,
}

/// The calls of one node that have no answer yet, and how many requests it serves. `T` is whoever waits; it is
/// given back exactly once.
#[derive(Debug)]
pub(crate) struct Calls<T> {
    last: u64,
    open: BTreeMap<u64, Open<T>>,
    deadlines: BTreeSet<(Duration, u64)>,
    open_to: BTreeMap<Peer, usize>,
    serving: BTreeMap<Peer, usize>,
}

// Getters.
impl<T> Calls<T> {
    /// None yet.
    pub(crate) fn new() -> Self {
        Self {
            last: 0,
            open: BTreeMap::new(),
            deadlines: BTreeSet::new(),
            open_to: BTreeMap::new(),
            serving: BTreeMap::new(),
        }
    }

    /// How many wait for an answer.
    pub(crate) fn len(&self) -> usize {
        self.open.len()
    }
}

// Inputs of a caller. Those that end calls give back who waited for them.
impl<T> Calls<T> {
    /// Opens a call to `to`, which may be silent for `patience`. Too many to that peer: the waiter comes back.
    pub(crate) fn begin(
        &mut self,
        to: &Peer,
        waiter: T,
        patience: Duration,
        now: Duration,
    ) -> Result<u64, T> {
        let open_to = self.open_to.entry(to.clone()).or_default();
        if *open_to >= MAX_OPEN {
            return Err(waiter);
        }
        *open_to += 1;
        self.last += 1;
        let deadline = now.saturating_add(patience);
        self.deadlines.insert((deadline, self.last));
        self.open.insert(self.last, Open { to: to.clone(), waiter, patience, deadline });
        Ok(self.last)
    }

    /// `from` has answered or declined. Nobody, if the call is over or was put to somebody else.
    pub(crate) fn handle_end(&mut self, from: &Peer, call: u64) -> Option<T> {
        self.open.get(&call).filter(|open| open.to == *from)?;
        self.end(call)
    }

    /// `from` still works on it.
    pub(crate) fn handle_working(&mut self, from: &Peer, call: u64, now: Duration) {
        let Some(open) = self.open.get_mut(&call).filter(|open| open.to == *from) else { return };
        self.deadlines.remove(&(open.deadline, call));
        open.deadline = now.saturating_add(open.patience);
        self.deadlines.insert((open.deadline, call));
    }

    /// That life of the node is over: so are the calls to it, and what it asked for.
    pub(crate) fn handle_peer_down(&mut self, peer: &Peer) -> Vec<T> {
        self.serving.remove(peer);
        if !self.open_to.contains_key(peer) {
            return Vec::new();
        }
        let calls: Vec<u64> =
            self.open.iter().filter(|(_, open)| open.to == *peer).map(|(call, _)| *call).collect();
        calls.into_iter().filter_map(|call| self.end(call)).collect()
    }

    /// Time has passed.
    pub(crate) fn handle_timeout(&mut self, now: Duration) -> Vec<T> {
        let mut ended = Vec::new();
        while let Some(&(deadline, call)) = self.deadlines.first() {
            if deadline > now {
                break;
            }
            ended.extend(self.end(call));
        }
        ended
    }

    /// Whoever waited has gone.
    pub(crate) fn forget(&mut self, call: u64) -> Option<T> {
        self.end(call)
    }

    /// Everything is over.
    pub(crate) fn close(&mut self) -> Vec<T> {
        let open = std::mem::take(&mut self.open);
        *self = Self { last: self.last, ..Self::new() };
        open.into_values().map(|open| open.waiter).collect()
    }

    fn end(&mut self, call: u64) -> Option<T> {
        let open = self.open.remove(&call)?;
        self.deadlines.remove(&(open.deadline, call));
        release(&mut self.open_to, &open.to);
        Some(open.waiter)
    }
}

// Inputs of a server.
impl<T> Calls<T> {
    /// Whether one more request of `from` may be served; then [`Calls::served`] has to follow.
    pub(crate) fn serve(&mut self, from: &Peer) -> bool {
        let serving = self.serving.entry(from.clone()).or_default();
        let room = *serving < MAX_OPEN;
        *serving += usize::from(room);
        room
    }

    /// A request of `from` is answered or given up.
    pub(crate) fn served(&mut self, from: &Peer) {
        release(&mut self.serving, from);
    }
}

fn release(counts: &mut BTreeMap<Peer, usize>, peer: &Peer) {
    if let Some(count) = counts.get_mut(peer) {
        *count = count.saturating_sub(1);
        if *count == 0 {
            counts.remove(peer);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::{Incarnation, NodeId};

    const SECOND: Duration = Duration::from_secs(1);

    fn peer(name: &str, incarnation: u64) -> Peer {
        Peer::new(NodeId::new(name).unwrap(), Incarnation::new(incarnation).unwrap())
    }

    fn begin(calls: &mut Calls<&'static str>, to: &Peer, who: &'static str, now: Duration) -> u64 {
        calls.begin(to, who, SECOND, now).unwrap()
    }

    #[test]
    fn an_answer_ends_its_call_once_and_only_from_whom_it_was_asked() {
        let (b, reborn, c) = (peer("b", 1), peer("b", 2), peer("c", 1));
        let mut calls = Calls::new();
        let call = begin(&mut calls, &b, "x", Duration::ZERO);
        assert_eq!(calls.handle_end(&c, call), None, "another node");
        assert_eq!(calls.handle_end(&reborn, call), None, "another life");
        assert_eq!(calls.handle_end(&b, call + 1), None, "another call");
        assert_eq!(calls.handle_end(&b, call), Some("x"));
        assert_eq!(calls.handle_end(&b, call), None, "a second copy");
        assert_eq!((calls.len(), calls.deadlines.len(), calls.open_to.len()), (0, 0, 0), "nothing stays");
    }

    #[test]
    fn a_deadline_follows_progress() {
        let b = peer("b", 1);
        let mut calls = Calls::new();
        let call = begin(&mut calls, &b, "x", Duration::ZERO);
        begin(&mut calls, &b, "y", Duration::ZERO);
        calls.handle_working(&peer("c", 1), call, SECOND / 2);
        calls.handle_working(&b, call, SECOND / 2);
        assert_eq!(calls.handle_timeout(SECOND - Duration::from_nanos(1)), Vec::<&str>::new());
        assert_eq!(calls.handle_timeout(SECOND), ["y"]);
        assert_eq!(calls.handle_timeout(SECOND * 3 / 2), ["x"]);
        calls.handle_working(&b, call, SECOND * 2);
        assert_eq!(calls.handle_timeout(SECOND * 9), Vec::<&str>::new(), "it is over");
    }

    #[test]
    fn the_end_of_a_peer_ends_the_calls_to_that_life_only() {
        let (old, new) = (peer("b", 1), peer("b", 2));
        let mut calls = Calls::new();
        for who in ["x", "y"] {
            begin(&mut calls, &old, who, Duration::ZERO);
        }
        begin(&mut calls, &new, "z", Duration::ZERO);
        assert_eq!(calls.handle_peer_down(&old), ["x", "y"]);
        assert_eq!(calls.handle_peer_down(&old), Vec::<&str>::new());
        assert_eq!(calls.close(), ["z"]);
        assert_eq!(calls.len(), 0);
    }

    #[test]
    fn both_sides_are_bounded_for_each_peer() {
        let (b, c) = (peer("b", 1), peer("c", 1));
        let mut calls = Calls::new();
        let first = begin(&mut calls, &b, "first", Duration::ZERO);
        for _ in 1..MAX_OPEN {
            begin(&mut calls, &b, "x", Duration::ZERO);
            assert!(calls.serve(&b));
        }
        assert_eq!(calls.begin(&b, "late", SECOND, Duration::ZERO), Err("late"));
        begin(&mut calls, &c, "another", Duration::ZERO);
        assert_eq!(calls.forget(first), Some("first"));
        begin(&mut calls, &b, "late", Duration::ZERO);
        assert!(calls.serve(&b) && !calls.serve(&b) && calls.serve(&c));
        calls.served(&b);
        assert!(calls.serve(&b));
    }
}
