//! One session with one peer: what was sent and not acknowledged, what was received, and when something has to
//! happen if nothing does. Knows no connection's handshake.

use std::collections::VecDeque;

use super::packet::PerLane;
use super::pieces::{Assembly, Piece, cut};
use super::{DownReason, LinkConfig, LinkMutation, LinkRules, RawId, Time};
use crate::transport::{Frame, Lane};
use crate::types::Peer;

/// How many frames of a more urgent lane may pass a waiting less urgent one before it gets a turn.
const TURN: u32 = 64;

/// The sending half of a lane. Frames stay until they are acknowledged, so that they can be written again.
#[derive(Debug, Default)]
#[cfg_attr(feature = "testing", derive(Clone))]
struct LaneOut {
    /// Numbered from `acked + 1`.
    frames: VecDeque<Piece>,
    acked: u64,
    /// How many of `frames` have been written on the present connection.
    written: usize,
    bytes: usize,
}

/// See the module.
#[derive(Debug)]
#[cfg_attr(feature = "testing", derive(Clone))]
pub(crate) struct Session {
    pub(crate) peer: Peer,
    pub(crate) id: u64,
    /// The connection that carries it now.
    pub(crate) raw: Option<RawId>,
    /// The other end has told its router: frames may be written.
    pub(crate) confirmed: bool,
    /// Our router is being told, or has been: frames may be taken.
    pub(crate) reported: bool,
    pub(crate) received: PerLane,
    /// What has come of a frame whose last piece has not.
    pub(crate) incoming: [Assembly; 3],
    pub(crate) ack_due: bool,
    pub(crate) suspect: bool,
    /// A sender was told `Busy` and wants to know of room.
    pub(crate) wants_room: bool,
    /// When this session's timer is set for.
    pub(crate) armed: Option<Time>,
    rules: LinkRules,
    out: [LaneOut; 3],
    passed_over: u32,
    heard_at: Time,
    progress_at: Time,
    /// As `progress_at`, but a new connection alone is none: one that breaks before anything has come, again and
    /// again, must not hold frames for ever.
    moved_at: Time,
    /// When the ping that is not answered yet was sent.
    ping_at: Option<Time>,
    /// When any ping was last sent.
    last_ping_at: Time,
    detached_at: Option<Time>,
}

/// What a timer asks for.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Due {
    Nothing,
    Ping,
    /// Report the peer suspect and ping it.
    Suspect,
    Down(DownReason),
}

/// Why an acknowledgement cannot be true.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Impossible;

impl Session {
    pub(crate) fn new(peer: Peer, id: u64, raw: RawId, now: Time, rules: LinkRules) -> Self {
        Self {
            peer,
            id,
            raw: Some(raw),
            confirmed: rules.breaks(LinkMutation::WritesUntold),
            reported: rules.breaks(LinkMutation::TakesUnreported),
            received: [0; 3],
            incoming: Default::default(),
            ack_due: false,
            suspect: false,
            wants_room: false,
            armed: None,
            rules,
            out: Default::default(),
            passed_over: 0,
            heard_at: now,
            progress_at: now,
            moved_at: now,
            ping_at: None,
            last_ping_at: now,
            detached_at: None,
        }
    }

    /// Whether something waits for an acknowledgement.
    pub(crate) fn outstanding(&self) -> bool {
        self.out.iter().any(|lane| !lane.frames.is_empty())
    }

    /// The last number written on each lane.
    pub(crate) fn sent(&self) -> PerLane {
        self.out.each_ref().map(|lane| lane.acked + lane.written as u64)
    }

    /// Frames that wait or are unacknowledged; of long ones, the pieces.
    pub(crate) fn queued(&self) -> usize {
        self.out.iter().map(|lane| lane.frames.len()).sum()
    }

    /// Takes a frame into its lane's queue, or gives it back. The control lane has a bound of its own: it must
    /// have room when the others are full.
    pub(crate) fn push(&mut self, frame: Frame, config: &LinkConfig, now: Time) -> Result<(), Frame> {
        let others: usize = match frame.lane {
            Lane::Control => self.out[0].bytes,
            Lane::Data | Lane::Bulk => self.out[1].bytes + self.out[2].bytes,
        };
        let outstanding = self.outstanding();
        let lane = &mut self.out[frame.lane.index()];
        let too_many = lane.frames.len() >= config.queue_frames;
        let too_large = others > 0 && others.saturating_add(frame.len()) > config.queue_bytes;
        // a lane that holds nothing always takes one frame, or a large one could never be sent
        if too_many || (too_large && !lane.frames.is_empty()) {
            self.wants_room = true;
            return Err(frame);
        }
        lane.bytes += frame.len();
        if frame.len() <= config.piece_bytes {
            lane.frames.push_back(Piece { part: frame, more: false });
        } else {
            lane.frames.extend(cut(frame, config.piece_bytes));
        }
        if !outstanding {
            (self.progress_at, self.moved_at) = (now, now);
        }
        Ok(())
    }

    /// What is queued, for the mutation that keeps it.
    pub(crate) fn left(&self) -> Vec<Piece> {
        self.out.iter().flat_map(|lane| lane.frames.iter().cloned()).collect()
    }

    /// Takes what another session had not sent.
    pub(crate) fn take_over(&mut self, left: Vec<Piece>) {
        for piece in left {
            let lane = &mut self.out[piece.part.lane.index()];
            lane.bytes += piece.part.len();
            lane.frames.push_back(piece);
        }
    }

    /// The next piece to write, with its number: the most urgent lane first, but none waits for ever.
    pub(crate) fn next_piece(&mut self) -> Option<(u64, &Piece)> {
        let mut waiting = self.out.iter().enumerate().filter(|(_, lane)| lane.written < lane.frames.len());
        let first = waiting.next()?.0;
        let second = waiting.next().map(|(index, _)| index);
        let index = match second {
            Some(second) if first > 0 && self.passed_over >= TURN => second,
            _ => first,
        };
        self.passed_over = if second.is_some() && index == first { self.passed_over + 1 } else { 0 };
        let lane = &mut self.out[index];
        let piece = lane.frames.get(lane.written)?;
        lane.written += 1;
        Some((lane.acked + lane.written as u64, piece))
    }

    /// Takes an acknowledgement; whether it was progress.
    pub(crate) fn acknowledge(&mut self, received: PerLane, now: Time) -> Result<bool, Impossible> {
        let possible = |(lane, to): (&LaneOut, u64)| to <= lane.acked + lane.written as u64;
        if !self.out.iter().zip(received).all(possible) {
            return Err(Impossible);
        }
        let mut progress = false;
        for (lane, to) in self.out.iter_mut().zip(received) {
            let to = to + u64::from(self.rules.breaks(LinkMutation::CountsOneMore) && lane.acked < to);
            while lane.acked < to {
                let Some(frame) = lane.frames.pop_front() else {
                    let careless = self.rules.breaks(LinkMutation::CountsOneMore);
                    return if careless { Ok(true) } else { Err(Impossible) };
                };
                lane.bytes -= frame.part.len();
                lane.acked += 1;
                lane.written = lane.written.saturating_sub(1);
                progress = true;
            }
        }
        if progress {
            (self.progress_at, self.moved_at) = (now, now);
        }
        Ok(progress)
    }

    /// The connection is gone.
    pub(crate) fn detach(&mut self, now: Time) {
        self.raw = None;
        self.detached_at = Some(now);
        self.ping_at = None;
    }

    /// Goes on with a new connection: what the other end has not received is written again.
    pub(crate) fn resume(&mut self, raw: RawId, received: PerLane, now: Time) -> Result<(), Impossible> {
        let written = self.sent();
        for lane in &mut self.out {
            // whatever was written before may have been received, also what an older rewind has forgotten
            lane.written = lane.frames.len();
        }
        if self.out.iter().zip(received).any(|(lane, to)| to < lane.acked) {
            return Err(Impossible);
        }
        let careless = self.rules.breaks(LinkMutation::WrittenIsReceived);
        self.acknowledge(if careless { written } else { received }, now)?;
        for lane in self.out.iter_mut().filter(|_| !self.rules.breaks(LinkMutation::WritesNothingAgain)) {
            lane.written = 0;
        }
        self.raw = Some(raw);
        self.confirmed = true;
        self.detached_at = None;
        self.ping_at = None;
        self.heard_at = now;
        self.progress_at = now;
        Ok(())
    }

    /// Something came from the other end.
    pub(crate) fn heard(&mut self, now: Time) {
        self.heard_at = now;
        self.ping_at = None;
    }

    /// A ping was put on the way.
    pub(crate) fn pinged(&mut self, now: Time) {
        self.ping_at = Some(now);
        self.last_ping_at = now;
    }

    /// Since when an answer is due; `None` if the peer may be silent. Where idle links are pinged it never may.
    fn silent_since(&self, config: &LinkConfig) -> Option<Time> {
        if config.ping_interval.is_some() {
            return Some(self.heard_at);
        }
        let stuck = self.outstanding().then_some(self.progress_at);
        let due = [self.ping_at, stuck].into_iter().flatten().min()?;
        Some(due.max(self.heard_at))
    }

    /// When the next ping is due: the peer was not heard for long, or talks but acknowledges nothing and has to
    /// be told what it should have (a ping may have been lost as well).
    fn next_ping(&self, config: &LinkConfig) -> Option<Time> {
        let reminder = config.ping_interval.unwrap_or(config.suspect_after);
        let remind = (self.suspect && self.outstanding()).then_some(self.last_ping_at + reminder);
        let idle = config.ping_interval.filter(|_| self.ping_at.is_none()).map(|wait| self.heard_at + wait);
        [remind, idle].into_iter().flatten().min()
    }

    /// When the peer becomes suspect if nothing comes.
    fn suspicion(&self, config: &LinkConfig) -> Option<Time> {
        let stuck = self.outstanding().then_some(self.progress_at);
        let since = [self.ping_at, stuck].into_iter().flatten().min().filter(|_| !self.suspect)?;
        Some(since + config.suspect_after)
    }

    fn stall(&self, config: &LinkConfig) -> Option<Time> {
        let plain = self.outstanding().then_some(self.progress_at + config.stall_timeout);
        [plain, self.held_too_long(config)].into_iter().flatten().min()
    }

    /// When frames have been held for so long that no connection saves them any more, however many come: the longest
    /// that one may take which stalls, is lost, and is waited for.
    fn held_too_long(&self, config: &LinkConfig) -> Option<Time> {
        let longest = config.stall_timeout + config.ping_timeout + config.reconnect_grace;
        self.outstanding().then_some(self.moved_at + longest)
    }

    /// When [`Session::due`] has to be asked next, if at all.
    pub(crate) fn deadline(&self, config: &LinkConfig) -> Option<Time> {
        if let Some(at) = self.detached_at {
            return [Some(at + config.reconnect_grace), self.held_too_long(config)]
                .into_iter()
                .flatten()
                .min();
        }
        let silence = self.silent_since(config).map(|at| at + config.ping_timeout);
        [silence, self.next_ping(config), self.suspicion(config), self.stall(config)]
            .into_iter()
            .flatten()
            .min()
    }

    /// What time has made necessary.
    pub(crate) fn due(&self, config: &LinkConfig, now: Time) -> Due {
        let over = |at: Option<Time>| at.is_some_and(|at| now >= at);
        if let Some(at) = self.detached_at {
            return if now >= at + config.reconnect_grace {
                Due::Down(DownReason::NoConnection)
            } else if over(self.held_too_long(config)) {
                Due::Down(DownReason::Stalled)
            } else {
                Due::Nothing
            };
        }
        if over(self.silent_since(config).map(|at| at + config.ping_timeout)) {
            Due::Down(DownReason::Silent)
        } else if over(self.stall(config)) {
            Due::Down(DownReason::Stalled)
        } else if over(self.suspicion(config)) {
            Due::Suspect
        } else if over(self.next_ping(config)) {
            Due::Ping
        } else {
            Due::Nothing
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::{Incarnation, NodeId};

    fn session() -> Session {
        let peer = Peer::new(NodeId::new("b").unwrap(), Incarnation::MIN);
        Session::new(peer, 1, RawId(1), Time::ZERO, LinkRules::all())
    }

    fn frame(lane: Lane, len: usize) -> Frame {
        Frame::new(lane, vec![0; len], "")
    }

    #[test]
    fn control_first_and_bulk_gets_its_turn() {
        let (mut s, config) = (session(), LinkConfig::default());
        for lane in [Lane::Bulk, Lane::Data, Lane::Control] {
            for _ in 0..200 {
                s.push(frame(lane, 1), &config, Time::ZERO).unwrap();
            }
        }
        let lanes: Vec<Lane> =
            std::iter::from_fn(|| s.next_piece().map(|(_, piece)| piece.part.lane)).collect();
        assert!(lanes[..200].iter().all(|lane| *lane == Lane::Control));
        let bulk_before_the_last_data = lanes[200..].iter().take(200).filter(|l| **l == Lane::Bulk).count();
        assert!((1..20).contains(&bulk_before_the_last_data), "{bulk_before_the_last_data}");
        assert_eq!(lanes.len(), 600);
    }

    #[test]
    fn full_of_frames_and_full_of_bytes() {
        let mut s = session();
        let config = LinkConfig { queue_frames: 2, queue_bytes: 100, ..LinkConfig::default() };
        s.push(frame(Lane::Data, 500), &config, Time::ZERO).expect("an empty lane takes one of any size");
        assert!(s.push(frame(Lane::Data, 1), &config, Time::ZERO).is_err(), "no bytes left");
        s.push(frame(Lane::Bulk, 1), &config, Time::ZERO).expect("an empty lane");
        s.push(frame(Lane::Control, 1), &config, Time::ZERO).expect("control has its own room");
        s.push(frame(Lane::Control, 1), &config, Time::ZERO).expect("two frames");
        assert!(s.push(frame(Lane::Control, 1), &config, Time::ZERO).is_err(), "three frames");
    }

    #[test]
    fn an_acknowledgement_of_what_was_not_sent_is_refused() {
        let (mut s, config) = (session(), LinkConfig::default());
        s.push(frame(Lane::Data, 1), &config, Time::ZERO).unwrap();
        assert_eq!(s.acknowledge([0, 1, 0], Time::ZERO), Err(Impossible), "not written yet");
        assert_eq!(s.next_piece().map(|(n, _)| n), Some(1));
        assert_eq!(s.acknowledge([0, 1, 0], Time::ZERO), Ok(true));
        assert_eq!(s.acknowledge([0, 1, 0], Time::ZERO), Ok(false), "again: no progress, no harm");
        assert_eq!(s.resume(RawId(2), [0, 0, 0], Time::ZERO), Err(Impossible), "it has forgotten frame 1");
    }
}
