//! Turns any ordered link that may break into the [`Transport`](super::Transport) contract. Sans-IO: packets,
//! breaks and the time come in, effects and packets go out.
//!
//! A **raw connection** delivers packets whole and in order until it breaks; then it loses an end of what was on
//! its way. A **session** lives across several of them: frames are numbered for each lane, acknowledged
//! cumulatively, and written again on the next connection, so a short break loses nothing. One session exists for
//! each peer name; a session that is given up never comes back.
//!
//! # A connection's handshake
//! The end with the lower [`NodeId`] leads: it decides which connection is used and which session goes on, so two
//! connections that were opened at once cannot give two answers.
//!
//! ```text
//!        leader                                   follower
//!   Hello ────────────────▶   ◀──────────────── Hello         who, in which life, on which terms
//!   Ask   ────────────────▶                                    "this connection; what do you have?"
//!         ◀──────────────── Propose{session, received}
//!   both hold that session:
//!   Resume{received} ─────▶                                    both write again what was not received
//!   otherwise:
//!   [peer_down(old)] Fresh ▶ [peer_down(old), peer_up]
//!   [peer_up]        ◀──── Up                                  both ends have given up the old session before
//!   Up       ─────────────▶                                    either reports the peer up; nobody sends a frame
//!                                                              before both have returned from peer_up
//! ```
//!
//! Phases of a connection, and what may be said in each (anything else breaks it):
//!
//! ```text
//!   Greeting ──Hello──▶ Asked (leader) ──Propose──▶ Live, or Offered ──Up──▶ Live ──▶ Closing ──▶ gone
//!       │        │  └─▶ Ready (follower) ──Ask──▶ Proposed ──Resume/Fresh──▶ Live
//!       │        └────▶ Probing: the name has a connection already; does it answer a ping? One of a name: a
//!       │               later one takes its place
//!       └─▶ Closing: refused
//! ```
//!
//! # A session
//! ```text
//!             no acknowledgement progress or no answer for suspect_after, or the connection is gone
//!   (none) ──Up──▶ up ───────────────────────────────────────────────────────────────────────▶ suspect
//!                  ▲ ◀──────────── progress, an answer, or resumed on a new connection ──────────┘ │
//!                  └─ down: ping_timeout of silence, reconnect_grace without a connection,         │
//!                     stall_timeout without progress, Down from the peer, a newer life of it ◀─────┘
//! ```
//!
//! # Two live nodes of one name
//! A newcomer of a *higher* incarnation is the later life: the old session goes down at once. One of a lower
//! incarnation (or of the same, if nobody has been told of it yet) is refused as `Superseded` if the old
//! connection answers a ping; if it does not, the newcomer's clock has jumped back: it is told the incarnation that we knew and takes a
//! higher one, unless it is known to others already, and then it is accepted as it is.
//!
//! # Driving it
//! Give inputs (`handle_*`), then carry out **all** effects ([`Links::poll_effect`]) in order, then write
//! ([`Links::poll_dirty`], [`Links::poll_output`]), then sleep until [`Links::poll_timeout`]. The order matters: a
//! packet that says "my router knows" may only leave after the router was told.
//!
//! A session takes frames from the moment on when its [`Effect::Up`] is given out, and until its end is decided here,
//! which is before its [`Effect::Down`] is carried out. So a router that counts the frames of a session never has
//! one of them in another: one session may replace another of the same peer in one step.

mod dirty;
mod news;
pub(crate) mod packet;
pub(crate) mod pieces;
mod rules;
mod session;

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;
use std::time::Duration;

use bytes::BytesMut;
use serde::{Deserialize, Serialize};

use dirty::Dirty;
use news::News;
pub use packet::Packet;
use packet::{Heard, Hello, LINK_VERSION, PacketError, PerLane, Word};
use pieces::Piece;
pub use rules::{LinkMutation, LinkRules};
use session::{Due, Session};

use super::{Frame, SendError, Terms};
use crate::types::{Incarnation, NodeId, Peer};

/// Time since some fixed moment, of a clock that never goes back.
pub type Time = Duration;

/// How many names are remembered with the highest incarnation that was seen of them.
const KNOWN_NAMES: usize = 16_384;

/// Names a raw connection at one end; chosen by the caller, never used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RawId(pub u64);

/// The times and bounds of links. All nodes of a scope should use the same.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LinkConfig {
    /// A peer that acknowledges nothing for so long, while something is outstanding, is suspect (500 ms).
    pub suspect_after: Duration,
    /// A peer that has said nothing for so long is pinged (1 s); `None`: only one that owes an answer, for
    /// networks where a connection that breaks is always reported.
    pub ping_interval: Option<Duration>,
    /// A peer that has said nothing for so long (without `ping_interval`: although it owed an answer) is down
    /// (3 s). Choose it above `ping_interval`.
    pub ping_timeout: Duration,
    /// How long a session waits for a new connection (2 s).
    pub reconnect_grace: Duration,
    /// A peer that acknowledges nothing for so long, while something is outstanding, is disconnected (10 s).
    pub stall_timeout: Duration,
    /// A connection whose handshake takes longer is closed (3 s).
    pub handshake_timeout: Duration,
    /// How many frames of one lane may wait for one peer or for its acknowledgement (8192).
    pub queue_frames: usize,
    /// How many bytes of data and bulk may do so for one peer, and of control (64 MiB each). A lane that holds
    /// nothing takes one frame of any size.
    pub queue_bytes: usize,
    /// A longer frame travels in pieces of this many bytes, so that a more urgent one need not wait for all of it,
    /// and a slow peer makes progress (unlimited: the frame is one packet). Each end chooses its own.
    pub piece_bytes: usize,
    /// The longest frame, head and body, in bytes (1 GiB and 1 MiB: the longest payload that a scope allows). Ends
    /// with different limits refuse each other: what one may send, the other has to take. So it cannot be changed by
    /// restarting one node after the other: the halves would not talk meanwhile.
    pub max_frame: usize,
}

impl Default for LinkConfig {
    fn default() -> Self {
        Self {
            suspect_after: Duration::from_millis(500),
            ping_interval: Some(Duration::from_secs(1)),
            ping_timeout: Duration::from_secs(3),
            reconnect_grace: Duration::from_secs(2),
            stall_timeout: Duration::from_secs(10),
            handshake_timeout: Duration::from_secs(3),
            queue_frames: 8192,
            queue_bytes: 64 << 20,
            piece_bytes: usize::MAX,
            max_frame: (1 << 30) + (1 << 20),
        }
    }
}

impl LinkConfig {
    /// No wait of nothing: a timer that is due when it is set would be due for ever.
    fn bounded(mut self) -> Self {
        let waits = [
            &mut self.suspect_after,
            &mut self.ping_timeout,
            &mut self.reconnect_grace,
            &mut self.stall_timeout,
            &mut self.handshake_timeout,
        ];
        for wait in waits.into_iter().chain(&mut self.ping_interval) {
            *wait = (*wait).clamp(Duration::from_millis(1), Duration::from_secs(365 * 86_400));
        }
        self
    }
}

/// Why there is no link. Names both values where two differ.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// Another scope.
    #[error("the scope {theirs:?} was offered to a node of scope {ours:?}")]
    Scope {
        /// What the refused end has.
        theirs: String,
        /// What the refusing end has.
        ours: String,
    },
    /// Other ring parameters.
    #[error("a ring of {theirs} tokens a node was offered to a node with {ours}")]
    Vnodes {
        /// What the refused end has.
        theirs: u32,
        /// What the refusing end has.
        ours: u32,
    },
    /// Another major version of the protocol.
    #[error("protocol version {theirs} was offered to a node of version {ours}")]
    Protocol {
        /// What the refused end has.
        theirs: u16,
        /// What the refusing end has.
        ours: u16,
    },
    /// Another version of the link layer.
    #[error("link version {theirs} was offered to a node of version {ours}")]
    LinkVersion {
        /// What the refused end has.
        theirs: u8,
        /// What the refusing end has.
        ours: u8,
    },
    /// A live node of that name has this incarnation.
    #[error("incarnation {theirs} came under a name that a live node has with incarnation {live}")]
    Superseded {
        /// The incarnation of the refused end.
        theirs: Incarnation,
        /// The incarnation that holds the name.
        live: Incarnation,
    },
    /// The name was known in this, not lower, incarnation: take a higher one.
    #[error("incarnation {theirs} came under a name that was known with incarnation {incarnation}")]
    Known {
        /// The incarnation of the refused end.
        theirs: Incarnation,
        /// The highest incarnation that was known.
        incarnation: Incarnation,
    },
    /// Another limit of a frame: what the one may send, the other would not take.
    #[error("a limit of {theirs} bytes a frame (`max_frame`) was offered to a node with {ours}")]
    MaxFrame {
        /// What the refused end has.
        theirs: u64,
        /// What the refusing end has.
        ours: u64,
    },
}

/// Why a peer went down.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum DownReason {
    /// No connection for `reconnect_grace`.
    NoConnection,
    /// Nothing heard for `ping_timeout`.
    Silent,
    /// Nothing acknowledged for `stall_timeout` on one connection, or for that, `ping_timeout` and `reconnect_grace`
    /// together on however many.
    Stalled,
    /// It said so: it has shut down or given us up.
    Goodbye,
    /// It no longer holds the session that we hold.
    Forgotten,
    /// A later life of its name has come.
    Reborn,
    /// It acknowledged what was never sent, or sent pieces of a frame above the limit.
    Broken,
}

/// What the driver has to do, in this order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Report the peer up.
    Up(Peer),
    /// Report it suspect.
    Suspect(Peer),
    /// Report it resumed.
    Resumed(Peer),
    /// Report it down.
    Down(Peer, DownReason),
    /// Give the frame to the router.
    Frame(Peer, Frame),
    /// A queue to this peer that was full has room again: wake who waits.
    Room(Peer),
    /// A connection was refused, by us or by the other end. Dialling again helps only after `Known`.
    Refused {
        /// The connection.
        raw: RawId,
        /// The other end, if it had said so.
        node: Option<NodeId>,
        /// Why.
        refusal: Refusal,
    },
    /// Another live node holds our name: this node has lost it.
    Superseded {
        /// The incarnation that holds it.
        live: Incarnation,
    },
    /// [`Links::me`] has taken a higher incarnation. Only before the first peer is up.
    Reborn,
}

/// What [`Links::poll_output`] wants on a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Output {
    /// Write this.
    Packet(Packet),
    /// Close it, after what was written before; the connection is forgotten here.
    Close,
    /// Nothing for now.
    Idle,
}

/// How often something out of the ordinary happened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct LinkStats {
    /// Packets that could not be decoded; each closed its connection.
    pub malformed: u64,
    /// Packets of a kind that this version does not have; ignored.
    pub unknown: u64,
    /// Words at the wrong moment; each closed its connection.
    pub unexpected: u64,
    /// Frames that came twice; dropped.
    pub duplicates: u64,
    /// Gaps in the numbering; each closed its connection, and the next one brought what was missing.
    pub gaps: u64,
    /// Sessions that went on with a new connection.
    pub resumed: u64,
    /// Peers given up because they acknowledged nothing.
    pub stalled: u64,
    /// Hellos that named another node than the one that had proved its name; each closed its connection.
    pub impostors: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Greeting,
    /// The name has another connection, `of`, which was pinged with `token`. A follower may have been asked
    /// meanwhile.
    Probing {
        token: u64,
        of: RawId,
        asked: bool,
    },
    Ready,
    Asked,
    Proposed {
        session: Option<u64>,
    },
    Offered {
        session: u64,
    },
    Live,
    Closing,
}

#[derive(Debug)]
#[cfg_attr(feature = "testing", derive(Clone))]
struct Raw {
    phase: Phase,
    peer: Option<Peer>,
    /// The name that was proved below, if names are proved there.
    proved: Option<NodeId>,
    /// Whether the peer's incarnation can no longer change.
    settled: bool,
    out: VecDeque<Packet>,
    /// The last ping that is not answered yet: one who pings and reads nothing is owed no more than one answer.
    pong: Option<u64>,
    /// The timer of the handshake or of the probe.
    timer: Option<Time>,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Timer {
    Raw(RawId),
    Session(NodeId),
}

/// All links of one node. See the module.
#[derive(Debug)]
#[cfg_attr(feature = "testing", derive(Clone))]
pub struct Links {
    me: Peer,
    settled: bool,
    stopped: bool,
    terms: Terms,
    config: LinkConfig,
    rules: LinkRules,
    now: Time,
    raws: BTreeMap<RawId, Raw>,
    /// The connection of each name that has passed admission.
    current: BTreeMap<NodeId, RawId>,
    /// The newcomer of a name that waits while its connection is asked whether somebody is there.
    waiting: BTreeMap<NodeId, RawId>,
    /// Names that have lost their connection during this input; empty between two.
    vacant: BTreeSet<NodeId>,
    sessions: BTreeMap<NodeId, Session>,
    /// The highest incarnation that was up of each name.
    known: BTreeMap<NodeId, Incarnation>,
    timers: BTreeSet<(Time, Timer)>,
    dirty: Dirty,
    effects: VecDeque<Effect>,
    /// How many of `effects` report a peer up.
    ups: usize,
    scratch: BytesMut,
    last_session: u64,
    last_token: u64,
    stats: LinkStats,
    news: News,
}

// Getters.
impl Links {
    /// No links yet. `me` may take a higher incarnation until the first peer is up or [`Links::settle`] is called.
    pub fn new(me: Peer, terms: Terms, config: LinkConfig) -> Self {
        Self {
            me,
            settled: false,
            stopped: false,
            terms,
            config: config.bounded(),
            rules: LinkRules::all(),
            now: Time::ZERO,
            raws: BTreeMap::new(),
            current: BTreeMap::new(),
            waiting: BTreeMap::new(),
            vacant: BTreeSet::new(),
            sessions: BTreeMap::new(),
            known: BTreeMap::new(),
            timers: BTreeSet::new(),
            dirty: Dirty::default(),
            effects: VecDeque::new(),
            ups: 0,
            scratch: BytesMut::new(),
            last_session: 0,
            last_token: 0,
            stats: LinkStats::default(),
            news: News::default(),
        }
    }

    /// Breaks a rule, for the checks.
    #[cfg(feature = "testing")]
    pub(crate) fn set_rules(&mut self, rules: LinkRules) {
        self.rules = rules;
    }

    /// The number of the session with exactly this peer.
    #[cfg(feature = "testing")]
    pub(crate) fn session_id(&self, peer: &Peer) -> Option<u64> {
        self.session(peer).map(|session| session.id)
    }

    /// This node, in this life.
    pub fn me(&self) -> &Peer {
        &self.me
    }

    /// What went wrong so far.
    pub fn stats(&self) -> LinkStats {
        self.stats
    }

    /// The peers that are up (suspect ones too).
    pub fn peers(&self) -> impl Iterator<Item = &Peer> {
        self.sessions.values().map(|session| &session.peer)
    }

    /// Whether exactly this peer is up.
    pub fn is_up(&self, peer: &Peer) -> bool {
        self.session(peer).is_some()
    }

    /// Whether the name has a connection that has passed admission: no need to dial it.
    pub fn has_connection(&self, node: &NodeId) -> bool {
        self.current.contains_key(node)
    }

    /// The connection that carries the session with this name, if there is one now.
    pub fn connection(&self, node: &NodeId) -> Option<RawId> {
        self.sessions.get(node)?.raw
    }

    /// Whether the connection is of no more use: it is closed once [`Links::poll_output`] says so.
    pub fn is_closing(&self, raw: RawId) -> bool {
        self.raws.get(&raw).is_none_or(|state| state.phase == Phase::Closing)
    }

    /// Whether both ends have told their routers: frames flow.
    pub fn is_linked(&self, node: &NodeId) -> bool {
        self.sessions.get(node).is_some_and(|session| session.confirmed)
    }

    /// How many frames wait for this peer or for its acknowledgement; 0 for a peer that is not up.
    pub fn queued(&self, peer: &Peer) -> usize {
        self.session(peer).map_or(0, Session::queued)
    }

    fn session(&self, peer: &Peer) -> Option<&Session> {
        self.sessions.get(&peer.node).filter(|session| session.peer == *peer)
    }
}

// Inputs.
impl Links {
    /// A raw connection exists; either end may have dialled.
    pub fn handle_opened(&mut self, raw: RawId, now: Time) {
        self.tick(now);
        if self.stopped {
            self.raws.insert(raw, Raw::new(Phase::Closing));
            self.dirty.insert(raw);
            return;
        }
        self.raws.insert(raw, Raw::new(Phase::Greeting));
        let (terms, peer, settled) = (self.terms.clone(), self.me.clone(), self.settled);
        let max_frame = self.max_frame();
        self.say(raw, &Word::Hello(Hello { terms, peer, settled, max_frame }));
        self.set_raw_timer(raw, Some(self.now + self.config.handshake_timeout));
    }

    /// The same, where whatever lies below has proved who is at the other end: a hello of another name breaks
    /// the connection.
    pub fn handle_opened_as(&mut self, raw: RawId, node: NodeId, now: Time) {
        self.handle_opened(raw, now);
        if let Some(state) = self.raws.get_mut(&raw) {
            state.proved = Some(node);
        }
    }

    /// A packet came.
    pub fn handle_packet(&mut self, raw: RawId, packet: Packet, now: Time) {
        self.tick(now);
        self.on_packet(raw, packet);
        self.readmit();
    }

    fn on_packet(&mut self, raw: RawId, packet: Packet) {
        let Some(state) = self.raws.get(&raw) else { return };
        if state.phase == Phase::Closing {
            return;
        }
        match packet::decode(packet, self.config.max_frame) {
            Ok(Heard::Piece { number, piece }) => self.on_piece(raw, number, piece),
            Ok(Heard::Word(word)) => self.on_word(raw, word),
            Err(error @ PacketError::UnknownKind(_)) => {
                self.stats.unknown += 1;
                self.log(raw, "unknown", error);
            }
            Err(PacketError::OtherVersion(theirs)) => {
                self.refuse(raw, Refusal::LinkVersion { theirs, ours: LINK_VERSION });
            }
            Err(error @ (PacketError::Malformed | PacketError::TooLarge)) => {
                self.stats.malformed += 1;
                self.log(raw, "malformed", error);
                self.break_raw(raw);
            }
        }
    }

    /// Once for each peer and cause.
    fn log(&mut self, raw: RawId, cause: &'static str, error: PacketError) {
        let node = self.session_on(raw).map(|session| session.peer.node.clone());
        if self.news.is_news(node.as_ref(), cause) {
            let said = self.peer_of(raw);
            tracing::warn!(me = %self.me, peer = ?said, %error, "strange input; more of this sort is counted only");
        }
    }

    /// A raw connection is gone. Unknown ones are ignored.
    pub fn handle_closed(&mut self, raw: RawId, now: Time) {
        self.tick(now);
        self.release(raw);
        self.forget(raw);
        self.readmit();
    }

    /// Time has passed. Call it with every input's `now` that reaches [`Links::poll_timeout`].
    pub fn handle_timeout(&mut self, now: Time) {
        self.tick(now);
        while let Some((at, timer)) = self.timers.first().cloned() {
            if at > self.now {
                return;
            }
            self.timers.pop_first();
            match timer {
                Timer::Raw(raw) => self.on_raw_timer(raw),
                Timer::Session(node) => self.on_session_timer(&node),
            }
            self.readmit();
        }
    }

    /// From now on this node's incarnation is known outside and stays.
    pub fn settle(&mut self) {
        self.settled = true;
    }

    fn tick(&mut self, now: Time) {
        self.now = self.now.max(now);
    }
}

// Commands.
impl Links {
    /// Queues a frame.
    ///
    /// # Errors
    /// [`SendError`], which gives the frame back. There is no link to a peer whose [`Effect::Up`] waits to be
    /// carried out: whoever sends now still means the session before.
    pub fn try_send(&mut self, to: &Peer, frame: Frame, now: Time) -> Result<(), SendError> {
        self.try_send_at(to, frame, || now)
    }

    /// The same where it costs something to read the clock: it is read only if this frame is the first that waits.
    ///
    /// # Errors
    /// As [`Links::try_send`].
    pub fn try_send_at(
        &mut self,
        to: &Peer,
        frame: Frame,
        clock: impl FnOnce() -> Time,
    ) -> Result<(), SendError> {
        let session = self.sessions.get_mut(&to.node);
        let Some(session) = session.filter(|session| session.peer == *to && session.reported) else {
            return Err(SendError::NoLink(frame));
        };
        if self.stopped {
            return Err(SendError::NoLink(frame));
        }
        if frame.len() > self.config.max_frame {
            return Err(SendError::TooLarge(frame));
        }
        let waits = session.outstanding();
        if !waits {
            self.now = self.now.max(clock());
        }
        session.push(frame, &self.config, self.now).map_err(SendError::Busy)?;
        if let Some(raw) = session.raw {
            self.dirty.insert(raw);
        }
        // where something waits already, one more changes no deadline
        if !waits {
            arm(&mut self.timers, &self.config, session);
        }
        Ok(())
    }

    /// Gives a peer up.
    pub fn disconnect(&mut self, peer: &Peer, now: Time) {
        self.tick(now);
        if self.is_up(peer) {
            self.down(&peer.node, DownReason::Goodbye);
            self.readmit();
        }
    }

    /// Says goodbye to everybody, after what is queued. No effects come any more; write until every connection
    /// has been closed.
    pub fn shutdown(&mut self, now: Time) {
        self.tick(now);
        self.stopped = true;
        for session in std::mem::take(&mut self.sessions).values_mut() {
            let Some(raw) = session.raw.and_then(|raw| self.raws.get_mut(&raw)) else { continue };
            if session.ack_due {
                raw.out.push_back(packet::encode_word(&Word::Ack { received: session.received }));
            }
            while session.confirmed
                && let Some((number, piece)) = session.next_piece()
            {
                raw.out.push_back(packet::encode_piece(number, piece, &mut self.scratch));
            }
            raw.out.push_back(packet::encode_word(&Word::Down));
        }
        for (id, raw) in &mut self.raws {
            raw.phase = Phase::Closing;
            self.dirty.insert(*id);
        }
        self.timers.clear();
        self.current.clear();
        self.waiting.clear();
        self.effects.clear();
        self.ups = 0;
    }
}

// Outputs.
impl Links {
    /// The next thing to do; those before it have been carried out.
    pub fn poll_effect(&mut self) -> Option<Effect> {
        let effect = self.effects.pop_front()?;
        if let Effect::Up(peer) = &effect {
            self.given_out(peer);
        }
        Some(effect)
    }

    /// Many of them at once; those that were taken before have been carried out. Ask again until there are none: an
    /// [`Effect::Up`] is only ever the first, so that what comes before it has been carried out as well.
    pub fn take_effects(&mut self) -> VecDeque<Effect> {
        if self.ups == 0 {
            if self.effects.is_empty() {
                return VecDeque::new();
            }
            // the next burst is about as long as this one
            let next = VecDeque::with_capacity(self.effects.len());
            return std::mem::replace(&mut self.effects, next);
        }
        let is_up = |effect: &Effect| matches!(effect, Effect::Up(_));
        let next = self.effects.iter().skip(1).position(is_up).map_or(self.effects.len(), |place| place + 1);
        let rest = self.effects.split_off(next);
        let taken = std::mem::replace(&mut self.effects, rest);
        if let Some(Effect::Up(peer)) = taken.front() {
            self.given_out(peer);
        }
        taken
    }

    /// Is about to be reported up: from now on its session takes frames, if it is still the one that is meant.
    fn given_out(&mut self, peer: &Peer) {
        self.ups = self.ups.saturating_sub(1);
        let again = self.ups > 0
            && self
                .effects
                .iter()
                .any(|effect| matches!(effect, Effect::Up(later) if later.node == peer.node));
        if let Some(session) = self.sessions.get_mut(&peer.node).filter(|session| session.peer == *peer)
            && !again
        {
            session.reported = true;
        }
    }

    /// A connection that may have something to write. Each is named once; ask it until it is idle.
    pub fn poll_dirty(&mut self) -> Option<RawId> {
        self.dirty.pop_first()
    }

    /// What to write on a connection. Carry out all effects first. With `frames: false` only the link layer's own
    /// words come, for a connection whose buffer is full: they are few and must not wait.
    pub fn poll_output(&mut self, raw: RawId, frames: bool) -> Output {
        let Some(state) = self.raws.get_mut(&raw) else { return Output::Idle };
        if let Some(packet) = state.out.pop_front() {
            return Output::Packet(packet);
        }
        if let Some(token) = state.pong.take() {
            return Output::Packet(packet::encode_word(&Word::Pong { token }));
        }
        match state.phase {
            Phase::Closing => {
                self.forget(raw);
                Output::Close
            }
            Phase::Live => self.poll_session(raw, frames),
            Phase::Greeting
            | Phase::Probing { .. }
            | Phase::Ready
            | Phase::Asked
            | Phase::Proposed { .. }
            | Phase::Offered { .. } => Output::Idle,
        }
    }

    /// When to call [`Links::handle_timeout`] next.
    pub fn poll_timeout(&self) -> Option<Time> {
        self.timers.first().map(|(at, _)| *at)
    }

    /// The frames that [`Links::poll_output`] would give next, each with its number, while `write` says that it takes
    /// more: for whoever lays them out without a packet for each. Ask it for words first (`frames: false`).
    #[cfg(feature = "tcp")]
    pub(crate) fn poll_pieces(&mut self, raw: RawId, mut write: impl FnMut(u64, &Piece) -> bool) {
        if self.raws.get(&raw).is_none_or(|state| state.phase != Phase::Live) {
            return;
        }
        let Some(session) = self.session_on(raw).filter(|session| session.confirmed) else { return };
        while let Some((number, piece)) = session.next_piece() {
            if !write(number, piece) {
                return;
            }
        }
    }

    fn poll_session(&mut self, raw: RawId, frames: bool) -> Output {
        let Some(node) = self.raws.get(&raw).and_then(|state| state.peer.as_ref()).map(|peer| &peer.node)
        else {
            return Output::Idle;
        };
        let session = self.sessions.get_mut(node).filter(|session| session.raw == Some(raw));
        let Some(session) = session else { return Output::Idle };
        if session.ack_due {
            session.ack_due = false;
            return Output::Packet(packet::encode_word(&Word::Ack { received: session.received }));
        }
        if !frames || !session.confirmed {
            return Output::Idle;
        }
        match session.next_piece() {
            Some((number, piece)) => Output::Packet(packet::encode_piece(number, piece, &mut self.scratch)),
            None => Output::Idle,
        }
    }
}

// The handshake.
impl Links {
    fn on_word(&mut self, raw: RawId, word: Word) {
        let Some(state) = self.raws.get(&raw) else { return };
        let phase = state.phase;
        if phase == Phase::Live {
            self.on_live_word(raw, word);
            return;
        }
        if matches!(phase, Phase::Asked | Phase::Proposed { .. } | Phase::Offered { .. })
            && !self.is_current(raw)
        {
            // another connection of that name has been let in since
            self.break_raw(raw);
            return;
        }
        match (phase, word) {
            (Phase::Greeting, Word::Hello(hello)) => self.on_hello(raw, hello),
            (_, Word::Refused(refusal)) => self.on_refused(raw, refusal),
            (Phase::Ready, Word::Ask) => self.on_ask(raw),
            (Phase::Probing { token, of, .. }, Word::Ask) => {
                self.set_phase(raw, Phase::Probing { token, of, asked: true });
            }
            (Phase::Asked, Word::Propose { session, received }) => self.on_propose(raw, session, received),
            (Phase::Proposed { session }, Word::Resume { received }) => {
                self.on_resume(raw, session, received);
            }
            (Phase::Proposed { .. }, Word::Fresh { session }) => self.on_fresh(raw, session),
            (Phase::Offered { session }, Word::Up { session: theirs }) if session == theirs => {
                self.on_confirmed(raw, session);
            }
            (_, Word::Ping { token, .. }) if phase != Phase::Greeting => self.owe_pong(raw, token),
            (_, Word::Pong { token }) => self.on_pong(raw, token),
            (_, Word::Down) => self.break_raw(raw),
            (_, _) => self.unexpected(raw),
        }
    }

    fn on_hello(&mut self, raw: RawId, hello: Hello) {
        if let Some(refusal) = self.differs(&hello.terms, hello.max_frame) {
            self.refuse(raw, refusal);
            return;
        }
        let Hello { peer, settled, .. } = hello;
        let proved = self.raws.get(&raw).and_then(|state| state.proved.as_ref());
        if proved.is_some_and(|proved| *proved != peer.node) {
            self.stats.impostors += 1;
            self.break_raw(raw);
            return;
        }
        if peer.node == self.me.node {
            self.on_own_name(raw, peer.incarnation);
            return;
        }
        if let Some(state) = self.raws.get_mut(&raw) {
            state.peer = Some(peer);
            state.settled = settled;
        }
        self.admit(raw, false);
    }

    fn max_frame(&self) -> u64 {
        u64::try_from(self.config.max_frame).unwrap_or(u64::MAX)
    }

    fn differs(&self, terms: &Terms, max_frame: u64) -> Option<Refusal> {
        let ours = &self.terms;
        if terms.protocol != ours.protocol {
            return Some(Refusal::Protocol { theirs: terms.protocol, ours: ours.protocol });
        }
        if terms.scope != ours.scope {
            return Some(Refusal::Scope { theirs: terms.scope.clone(), ours: ours.scope.clone() });
        }
        if terms.vnodes != ours.vnodes {
            return Some(Refusal::Vnodes { theirs: terms.vnodes, ours: ours.vnodes });
        }
        if max_frame != self.max_frame() {
            return Some(Refusal::MaxFrame { theirs: max_frame, ours: self.max_frame() });
        }
        None
    }

    fn on_own_name(&mut self, raw: RawId, theirs: Incarnation) {
        let ours = self.me.incarnation;
        match theirs.cmp(&ours) {
            std::cmp::Ordering::Less => self.refuse(raw, Refusal::Superseded { theirs, live: ours }),
            // we have dialled ourselves
            std::cmp::Ordering::Equal => self.break_raw(raw),
            std::cmp::Ordering::Greater => {
                self.effects.push_back(Effect::Superseded { live: theirs });
                self.break_raw(raw);
            }
        }
    }

    /// Decides whether this connection may be the one of its name. `asked`: the leader wants it already.
    fn admit(&mut self, raw: RawId, asked: bool) {
        let Some(Raw { peer: Some(peer), settled, .. }) = self.raws.get(&raw) else { return };
        let (peer, settled) = (peer.clone(), *settled);
        let leader = self.me.node < peer.node;
        let session = self.sessions.get(&peer.node).map(|session| session.peer.incarnation);
        let current = self.current.get(&peer.node).copied().filter(|current| *current != raw);
        let rival = session.or_else(|| {
            let current = self.raws.get(&current?)?;
            current.peer.as_ref().map(|peer| peer.incarnation)
        });
        let ours = peer.incarnation;
        if rival.is_some_and(|rival| rival < ours) {
            self.retire(&peer.node);
        } else if let Some(rival) = rival {
            let older = ours < rival || (session.is_some() && !settled);
            if let Some(current) = current
                && (older || leader)
            {
                let suspect = self.sessions.get(&peer.node).is_some_and(|session| session.suspect);
                if older || !suspect {
                    self.probe(raw, current, asked);
                    return;
                }
                // the same peer, and the old connection has been asked already: the grace is running at its end
                self.break_raw(current);
                if let Some(earlier) = self.waiting.remove(&peer.node).filter(|earlier| *earlier != raw) {
                    self.break_raw(earlier);
                }
            }
            if older && settled {
                self.retire(&peer.node);
            } else if older {
                self.refuse(raw, Refusal::Known { theirs: ours, incarnation: rival });
                return;
            }
        }
        if let Some(known) = self.known.get(&peer.node).filter(|known| !settled && ours <= **known) {
            self.refuse(raw, Refusal::Known { theirs: ours, incarnation: *known });
            return;
        }
        self.set_raw_timer(raw, Some(self.now + self.config.handshake_timeout));
        if leader {
            self.current.insert(peer.node.clone(), raw);
            self.set_phase(raw, Phase::Asked);
            self.say(raw, &Word::Ask);
        } else {
            self.set_phase(raw, Phase::Ready);
            if asked {
                self.on_ask(raw);
            }
        }
    }

    /// Asks the connection that the name has whether somebody is there. One newcomer of a name waits: an earlier one
    /// is closed, and this one waits in its place, for the same answer.
    fn probe(&mut self, raw: RawId, current: RawId, asked: bool) {
        let Some(node) = self.peer_of(raw).map(|peer| peer.node) else { return };
        let earlier = self.waiting.insert(node, raw).filter(|earlier| *earlier != raw);
        let asked_for = earlier.and_then(|earlier| match self.raws.get(&earlier) {
            Some(Raw { phase: Phase::Probing { token, of, .. }, timer: Some(at), .. }) if *of == current => {
                Some((*token, *at))
            }
            _ => None,
        });
        if let Some(earlier) = earlier {
            self.break_raw(earlier);
        }
        let (token, until) = asked_for.unwrap_or_else(|| {
            self.last_token += 1;
            let sent = self.session_on(current).map_or([0; 3], |session| session.sent());
            self.say(current, &Word::Ping { token: self.last_token, sent });
            (self.last_token, self.now + self.config.suspect_after)
        });
        self.set_phase(raw, Phase::Probing { token, of: current, asked });
        self.set_raw_timer(raw, Some(until));
    }

    /// The connection in use has answered: the newcomer of that probe, or of one before it, is not needed, or not
    /// wanted.
    fn on_pong(&mut self, current: RawId, answered: u64) {
        let Some(node) = self.peer_of(current).map(|peer| peer.node) else { return };
        let Some(raw) = self.waiting.get(&node).copied() else { return };
        let Some(Raw { phase: Phase::Probing { token, of, .. }, peer: Some(peer), settled, .. }) =
            self.raws.get(&raw)
        else {
            return;
        };
        if *of != current || *token > answered {
            return;
        }
        let (theirs, settled) = (peer.incarnation, *settled);
        let live = self.sessions.get(&node).map(|session| session.peer.incarnation);
        match live {
            // nearly always the same life, which has opened two connections while it started: no event. A twin that
            // starts and has drawn the same number learns of it by the word
            Some(live) if !settled && theirs == live => {
                self.say(raw, &Word::Refused(Refusal::Superseded { theirs, live }));
                self.close(raw);
            }
            Some(live) if theirs < live || !settled => self.refuse(raw, Refusal::Superseded { theirs, live }),
            Some(_) | None => self.break_raw(raw),
        }
    }

    /// Names whose connection in use is gone: the newcomer that waited for its answer is looked at again.
    fn readmit(&mut self) {
        while let Some(node) = self.vacant.pop_first() {
            let Some(raw) = self.waiting.remove(&node) else { continue };
            if let Some(Phase::Probing { asked, .. }) = self.raws.get(&raw).map(|state| state.phase) {
                self.admit(raw, asked);
            }
        }
    }

    fn on_ask(&mut self, raw: RawId) {
        let Some(peer) = self.peer_of(raw) else { return };
        // over a slow network each answer has the time that the first had
        self.set_raw_timer(raw, Some(self.now + self.config.handshake_timeout));
        if let Some(current) = self.current.get(&peer.node).copied()
            && current != raw
        {
            self.break_raw(current);
        }
        self.current.insert(peer.node.clone(), raw);
        let held = self.sessions.get(&peer.node).filter(|session| session.peer == peer);
        let (session, received) = held.map_or((None, [0; 3]), |session| (Some(session.id), session.received));
        self.set_phase(raw, Phase::Proposed { session });
        self.say(raw, &Word::Propose { session, received });
    }

    fn on_propose(&mut self, raw: RawId, proposed: Option<u64>, received: PerLane) {
        let Some(peer) = self.peer_of(raw) else { return };
        self.set_raw_timer(raw, Some(self.now + self.config.handshake_timeout));
        let held = self.sessions.get(&peer.node).map(|session| session.id);
        if held.is_some() && held == proposed {
            if self.resume(raw, &peer, received) {
                let received = self.session_on(raw).map_or([0; 3], |session| session.received);
                self.say(raw, &Word::Resume { received });
            }
            return;
        }
        self.down(&peer.node, DownReason::Forgotten);
        self.last_session += 1;
        let session = self.last_session;
        self.set_phase(raw, Phase::Offered { session });
        self.say(raw, &Word::Fresh { session });
    }

    fn on_resume(&mut self, raw: RawId, proposed: Option<u64>, received: PerLane) {
        let Some(peer) = self.peer_of(raw) else { return };
        let held = self.sessions.get(&peer.node).map(|session| session.id);
        if held.is_none() || held != proposed {
            // given up while the answer was on its way: the leader has to give it up as well
            self.say(raw, &Word::Down);
            self.close(raw);
            return;
        }
        self.resume(raw, &peer, received);
    }

    fn on_fresh(&mut self, raw: RawId, session: u64) {
        let Some(peer) = self.peer_of(raw) else { return };
        let left = match self.sessions.get(&peer.node) {
            Some(session) if self.rules.breaks(LinkMutation::QueueOutlives) => session.left(),
            Some(_) | None => Vec::new(),
        };
        self.down(&peer.node, DownReason::Forgotten);
        self.up(raw, &peer, session);
        if let Some(session) = self.session_on(raw) {
            session.take_over(left);
        }
    }

    fn on_confirmed(&mut self, raw: RawId, session: u64) {
        let Some(peer) = self.peer_of(raw) else { return };
        self.up(raw, &peer, session);
        if let Some(session) = self.session_on(raw) {
            session.confirmed = true;
        }
    }

    fn on_refused(&mut self, raw: RawId, refusal: Refusal) {
        let node = self.name_of(raw);
        match refusal {
            Refusal::Known { incarnation, .. } if !self.settled => {
                self.me.incarnation = self.me.incarnation.max(incarnation).next();
                self.effects.push_back(Effect::Reborn);
                // the others have read the old one
                let all: Vec<RawId> = self.raws.keys().copied().collect();
                for raw in all {
                    self.break_raw(raw);
                }
                return;
            }
            Refusal::Superseded { live, .. } if live == self.me.incarnation && self.settled => {
                // it had this very life on another connection, which may be over again meanwhile; two that dial each
                // other at once open two
                self.break_raw(raw);
                return;
            }
            Refusal::Superseded { live, .. } => self.effects.push_back(Effect::Superseded { live }),
            Refusal::Known { .. }
            | Refusal::Scope { .. }
            | Refusal::Vnodes { .. }
            | Refusal::Protocol { .. }
            | Refusal::LinkVersion { .. }
            | Refusal::MaxFrame { .. } => {}
        }
        self.effects.push_back(Effect::Refused { raw, node, refusal });
        self.break_raw(raw);
    }

    fn refuse(&mut self, raw: RawId, refusal: Refusal) {
        let node = self.name_of(raw);
        self.say(raw, &Word::Refused(refusal.clone()));
        self.effects.push_back(Effect::Refused { raw, node, refusal });
        self.close(raw);
    }
}

// Sessions.
impl Links {
    fn up(&mut self, raw: RawId, peer: &Peer, id: u64) {
        self.settled = true;
        self.remember(peer);
        let session = Session::new(peer.clone(), id, raw, self.now, self.rules);
        self.sessions.insert(peer.node.clone(), session);
        self.set_phase(raw, Phase::Live);
        self.set_raw_timer(raw, None);
        self.effects.push_back(Effect::Up(peer.clone()));
        self.ups += 1;
        self.say(raw, &Word::Up { session: id });
        self.arm_session(&peer.node);
    }

    fn remember(&mut self, peer: &Peer) {
        let known = self.known.entry(peer.node.clone()).or_insert(peer.incarnation);
        *known = (*known).max(peer.incarnation);
        if self.known.len() > KNOWN_NAMES {
            let idle = self.known.keys().find(|node| !self.sessions.contains_key(*node)).cloned();
            if let Some(idle) = idle {
                self.known.remove(&idle);
            }
        }
    }

    /// Whether it went on; if not, the session is over.
    fn resume(&mut self, raw: RawId, peer: &Peer, received: PerLane) -> bool {
        let now = self.now;
        let Some(session) = self.sessions.get_mut(&peer.node) else { return false };
        if session.resume(raw, received, now).is_err() {
            self.say(raw, &Word::Down);
            self.close(raw);
            self.down(&peer.node, DownReason::Broken);
            return false;
        }
        self.stats.resumed += 1;
        if std::mem::take(&mut session.suspect) {
            self.effects.push_back(Effect::Resumed(peer.clone()));
        }
        if std::mem::take(&mut session.wants_room) {
            self.effects.push_back(Effect::Room(peer.clone()));
        }
        self.set_phase(raw, Phase::Live);
        self.set_raw_timer(raw, None);
        self.arm_session(&peer.node);
        self.dirty.insert(raw);
        true
    }

    fn on_live_word(&mut self, raw: RawId, word: Word) {
        let now = self.now;
        let Some(session) = self.session_on(raw) else { return };
        session.heard(now);
        self.answered(raw);
        let Some(session) = self.session_on(raw) else { return };
        match word {
            Word::Ack { received } => self.on_ack(raw, received),
            Word::Ping { token, sent } => {
                let lost = sent.iter().zip(session.received).any(|(sent, received)| *sent > received);
                self.owe_pong(raw, token);
                if lost {
                    self.stats.gaps += 1;
                    self.break_raw(raw);
                }
            }
            Word::Pong { token } => self.on_pong(raw, token),
            Word::Up { session: id } if !session.confirmed && session.id == id => {
                session.confirmed = true;
                self.dirty.insert(raw);
            }
            Word::Down => {
                if let Some(node) = self.peer_of(raw).map(|peer| peer.node) {
                    self.down(&node, DownReason::Goodbye);
                }
                self.break_raw(raw);
            }
            Word::Hello(_)
            | Word::Ask
            | Word::Propose { .. }
            | Word::Resume { .. }
            | Word::Fresh { .. }
            | Word::Up { .. }
            | Word::Refused(_) => self.unexpected(raw),
        }
    }

    fn on_ack(&mut self, raw: RawId, received: PerLane) {
        let now = self.now;
        let Some(session) = self.session_on(raw) else { return };
        match session.acknowledge(received, now) {
            Ok(progress) => {
                if progress && std::mem::take(&mut session.wants_room) {
                    let peer = session.peer.clone();
                    self.effects.push_back(Effect::Room(peer));
                }
                if progress {
                    self.trusted(raw);
                }
            }
            Err(session::Impossible) => {
                let node = session.peer.node.clone();
                self.down(&node, DownReason::Broken);
            }
        }
    }

    fn on_piece(&mut self, raw: RawId, number: u64, piece: Piece) {
        let (max_frame, rules) = (self.config.max_frame, self.rules);
        let now = self.now;
        let Some(state) = self.raws.get(&raw).filter(|state| state.phase == Phase::Live) else {
            self.unexpected(raw);
            return;
        };
        let session = state.peer.as_ref().and_then(|peer| self.sessions.get_mut(&peer.node));
        let Some(session) = session.filter(|session| session.raw == Some(raw)) else { return };
        session.heard(now);
        let lane = piece.part.lane.index();
        let expected = session.received[lane] + 1;
        let again = number < expected && rules.breaks(LinkMutation::GivesTwice);
        let behind = number > expected && rules.breaks(LinkMutation::TakesBehindGap);
        if number == expected || again || behind {
            let Ok(frame) = session.incoming[lane].add(piece, max_frame) else {
                // written again it would be as long again
                let node = session.peer.node.clone();
                self.stats.malformed += 1;
                self.down(&node, DownReason::Broken);
                return;
            };
            session.received[lane] = number.max(session.received[lane]);
            session.ack_due = true;
            let suspect = session.suspect;
            if let Some(frame) = frame {
                let peer = session.peer.clone();
                self.effects.push_back(Effect::Frame(peer, frame));
            }
            self.dirty.insert(raw);
            if suspect {
                self.answered(raw);
            }
        } else if number < expected {
            // acknowledged again, in case it came twice because nobody had heard of it
            session.ack_due = true;
            self.stats.duplicates += 1;
            self.dirty.insert(raw);
        } else {
            self.stats.gaps += 1;
            self.break_raw(raw);
        }
    }

    /// Something was heard: that is enough if nothing is outstanding.
    fn answered(&mut self, raw: RawId) {
        if self.session_on(raw).is_some_and(|session| session.suspect && !session.outstanding()) {
            self.trusted(raw);
        }
    }

    fn trusted(&mut self, raw: RawId) {
        let Some(session) = self.session_on(raw) else { return };
        if std::mem::take(&mut session.suspect) {
            let peer = session.peer.clone();
            self.effects.push_back(Effect::Resumed(peer.clone()));
            self.arm_session(&peer.node);
        }
    }

    /// Gives a session up, and its connection with it. No session: nothing happens.
    fn down(&mut self, node: &NodeId, reason: DownReason) {
        let Some(session) = self.sessions.remove(node) else { return };
        if let Some(at) = session.armed {
            self.timers.remove(&(at, Timer::Session(node.clone())));
        }
        if reason == DownReason::Stalled {
            self.stats.stalled += 1;
        }
        if reason == DownReason::Broken && self.news.is_news(Some(node), "broken") {
            tracing::warn!(me = %self.me, peer = %session.peer, %reason, "link given up; more of this sort at debug");
        }
        let silent = reason == DownReason::Forgotten && self.rules.breaks(LinkMutation::ReplacesInSilence);
        if !silent {
            self.effects.push_back(Effect::Down(session.peer, reason));
        }
        if let Some(raw) = session.raw {
            self.say(raw, &Word::Down);
            self.close(raw);
        }
    }

    /// The present life of a name is over: its session, and any connection of it that got as far as admission.
    fn retire(&mut self, node: &NodeId) {
        self.down(node, DownReason::Reborn);
        if let Some(current) = self.current.get(node).copied() {
            self.break_raw(current);
        }
    }

    fn on_session_timer(&mut self, node: &NodeId) {
        let now = self.now;
        let Some(session) = self.sessions.get_mut(node) else { return };
        session.armed = None;
        let due = session.due(&self.config, now);
        match due {
            Due::Nothing => {}
            Due::Ping => self.ping(node),
            Due::Suspect => {
                session.suspect = true;
                self.effects.push_back(Effect::Suspect(session.peer.clone()));
                self.ping(node);
            }
            Due::Down(reason) => {
                self.down(node, reason);
                return;
            }
        }
        self.arm_session(node);
    }

    fn ping(&mut self, node: &NodeId) {
        self.last_token += 1;
        let token = self.last_token;
        let Some(session) = self.sessions.get_mut(node) else { return };
        session.pinged(self.now);
        let sent = session.sent();
        if let Some(raw) = session.raw {
            self.say(raw, &Word::Ping { token, sent });
        }
    }

    fn arm_session(&mut self, node: &NodeId) {
        if let Some(session) = self.sessions.get_mut(node) {
            arm(&mut self.timers, &self.config, session);
        }
    }
}

/// Sets the session's timer, if it is not set for an earlier moment already: a timer that comes too early finds
/// nothing due and is set again, which is cheaper than moving it with every packet.
fn arm(timers: &mut BTreeSet<(Time, Timer)>, config: &LinkConfig, session: &mut Session) {
    let Some(deadline) = session.deadline(config) else { return };
    if session.armed.is_some_and(|armed| armed <= deadline) {
        return;
    }
    if let Some(armed) = session.armed.replace(deadline) {
        timers.remove(&(armed, Timer::Session(session.peer.node.clone())));
    }
    timers.insert((deadline, Timer::Session(session.peer.node.clone())));
}

// Connections.
impl Raw {
    fn new(phase: Phase) -> Self {
        Self {
            phase,
            peer: None,
            proved: None,
            settled: false,
            out: VecDeque::new(),
            pong: None,
            timer: None,
        }
    }
}

impl Links {
    fn peer_of(&self, raw: RawId) -> Option<Peer> {
        self.raws.get(&raw)?.peer.clone()
    }

    /// Who is at the other end, as far as it has been said, or proved below.
    fn name_of(&self, raw: RawId) -> Option<NodeId> {
        let state = self.raws.get(&raw)?;
        state.peer.as_ref().map(|peer| peer.node.clone()).or_else(|| state.proved.clone())
    }

    /// The session that this connection carries.
    fn session_on(&mut self, raw: RawId) -> Option<&mut Session> {
        let node = &self.raws.get(&raw)?.peer.as_ref()?.node;
        self.sessions.get_mut(node).filter(|session| session.raw == Some(raw))
    }

    fn is_current(&self, raw: RawId) -> bool {
        self.peer_of(raw).is_some_and(|peer| self.current.get(&peer.node) == Some(&raw))
    }

    fn say(&mut self, raw: RawId, word: &Word) {
        if let Some(state) = self.raws.get_mut(&raw)
            && state.phase != Phase::Closing
        {
            state.out.push_back(packet::encode_word(word));
            self.dirty.insert(raw);
        }
    }

    fn owe_pong(&mut self, raw: RawId, token: u64) {
        if let Some(state) = self.raws.get_mut(&raw)
            && state.phase != Phase::Closing
        {
            state.pong = Some(token);
            self.dirty.insert(raw);
        }
    }

    fn set_phase(&mut self, raw: RawId, phase: Phase) {
        if let Some(state) = self.raws.get_mut(&raw) {
            state.phase = phase;
        }
    }

    fn set_raw_timer(&mut self, raw: RawId, at: Option<Time>) {
        let Some(state) = self.raws.get_mut(&raw) else { return };
        if let Some(old) = std::mem::replace(&mut state.timer, at) {
            self.timers.remove(&(old, Timer::Raw(raw)));
        }
        if let Some(at) = at {
            self.timers.insert((at, Timer::Raw(raw)));
        }
    }

    fn on_raw_timer(&mut self, raw: RawId) {
        let Some(state) = self.raws.get_mut(&raw) else { return };
        state.timer = None;
        let (phase, peer) = (state.phase, state.peer.clone());
        match (phase, peer) {
            (Phase::Probing { of, .. }, Some(peer)) => {
                // nobody answered there; losing it lets the newcomer in
                if self.current.get(&peer.node) == Some(&of) {
                    self.break_raw(of);
                }
                self.vacant.insert(peer.node);
            }
            (_, _) => self.break_raw(raw),
        }
    }

    fn unexpected(&mut self, raw: RawId) {
        self.stats.unexpected += 1;
        self.break_raw(raw);
    }

    /// Closes a connection that is of no more use, without a word. Its session waits for the next one.
    fn break_raw(&mut self, raw: RawId) {
        if let Some(state) = self.raws.get_mut(&raw)
            && state.phase != Phase::Closing
        {
            state.out.clear();
        }
        self.close(raw);
    }

    /// Closes it after what is still to be said.
    fn close(&mut self, raw: RawId) {
        self.set_phase(raw, Phase::Closing);
        self.set_raw_timer(raw, None);
        if let Some(state) = self.raws.get_mut(&raw) {
            state.pong = None;
        }
        self.release(raw);
        self.dirty.insert(raw);
    }

    /// Nothing counts on this connection any more.
    fn release(&mut self, raw: RawId) {
        let now = self.now;
        let Some(peer) = self.peer_of(raw) else { return };
        if self.current.get(&peer.node) == Some(&raw) {
            self.current.remove(&peer.node);
            // not at once, one inside the other: whoever waits may be let in and lost again
            self.vacant.insert(peer.node.clone());
        }
        if self.waiting.get(&peer.node) == Some(&raw) {
            self.waiting.remove(&peer.node);
        }
        let Some(session) = self.sessions.get_mut(&peer.node).filter(|session| session.raw == Some(raw))
        else {
            return;
        };
        session.detach(now);
        if !std::mem::replace(&mut session.suspect, true) {
            self.effects.push_back(Effect::Suspect(session.peer.clone()));
        }
        self.arm_session(&peer.node);
    }

    fn forget(&mut self, raw: RawId) {
        self.set_raw_timer(raw, None);
        self.raws.remove(&raw);
        self.dirty.remove(raw);
    }
}

#[cfg(test)]
impl Links {
    /// What must hold between any two calls.
    fn check(&self) {
        for (node, raw) in &self.current {
            let state = self.raws.get(raw).expect("a current connection exists");
            assert_eq!(state.peer.as_ref().map(|peer| &peer.node), Some(node));
            assert!(
                !matches!(state.phase, Phase::Greeting | Phase::Closing | Phase::Probing { .. }),
                "{state:?}"
            );
        }
        assert!(self.vacant.is_empty());
        for (id, raw) in &self.raws {
            if matches!(raw.phase, Phase::Probing { .. }) {
                let node = &raw.peer.as_ref().expect("it has said hello").node;
                assert_eq!(self.waiting.get(node), Some(id), "one of a name");
            }
        }
        for (node, raw) in &self.waiting {
            let state = self.raws.get(raw).expect("who waits is there");
            assert!(matches!(state.phase, Phase::Probing { .. }), "{node}: {state:?}");
        }
        for (node, session) in &self.sessions {
            assert_eq!(session.peer.node, *node);
            if let Some(armed) = session.armed {
                assert!(self.timers.contains(&(armed, Timer::Session(node.clone()))));
            }
            if let Some(deadline) = session.deadline(&self.config) {
                assert!(session.armed.is_some_and(|armed| armed <= deadline), "a timer must not be late");
            }
            let Some(raw) = session.raw else {
                assert!(session.suspect, "no connection, but not suspect");
                continue;
            };
            assert_eq!(self.current.get(node), Some(&raw));
            assert_eq!(self.raws.get(&raw).map(|raw| raw.phase), Some(Phase::Live));
        }
        for (id, raw) in &self.raws {
            if raw.phase == Phase::Live {
                let peer = raw.peer.as_ref().expect("a live connection has a peer");
                assert_eq!(self.sessions.get(&peer.node).and_then(|session| session.raw), Some(*id));
            }
        }
        let armed = self.sessions.values().filter(|session| session.armed.is_some()).count()
            + self.raws.values().filter(|raw| raw.timer.is_some()).count();
        assert_eq!(armed, self.timers.len(), "no stale timers");
    }
}

impl fmt::Display for DownReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            DownReason::NoConnection => "no connection",
            DownReason::Silent => "silent",
            DownReason::Stalled => "acknowledged nothing",
            DownReason::Goodbye => "said goodbye",
            DownReason::Forgotten => "no longer has the session",
            DownReason::Reborn => "a later life has come",
            DownReason::Broken => "acknowledged what was never sent, or sent a frame without end",
        })
    }
}
