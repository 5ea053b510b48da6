//! The steps of a schedule: each stands for itself, and one that cannot be done does nothing. So any part of
//! a schedule is a schedule, which is how a failing one is made short.

use std::fmt;

use crate::transport::Lane;

/// A place in the cluster: the node `n<place>`, whichever life it is in.
pub type Place = u8;

/// How a broadcast is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum CastKind {
    /// To every member.
    All,
    /// To every member but the first one on the origin.
    ExceptOwn,
    /// To every member but one that lives elsewhere, if there is one.
    ExceptOther,
    /// Once, without acknowledgement.
    AtMostOnce,
    /// To the members on one other node, if there is one that holds the group.
    OneNode,
}

/// One thing that happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Step {
    /// A node that is not running starts, under the same name in a later life.
    Start(Place),
    /// Discovery has found all that there is to find.
    Settle(Place),
    /// A node dies.
    Crash(Place),
    /// A node drains.
    Drain(Place),
    /// The first node is told that the second is up; a session begins if there is none.
    Up(Place, Place),
    /// The first node is told that the second is down.
    Down {
        /// Who is told.
        at: Place,
        /// Who is down.
        of: Place,
        /// Whether what the first one had sent is lost, too (or arrives until the second is told).
        lose: bool,
    },
    /// The first node's link to the second makes no progress.
    Suspect {
        /// Who is told.
        at: Place,
        /// Who is suspect.
        of: Place,
        /// Whether the link stands still in fact.
        blocked: bool,
    },
    /// The link is back, and nothing was lost.
    Resume {
        /// Who is told.
        at: Place,
        /// Who is back.
        of: Place,
    },
    /// Nothing from the first reaches the second.
    Block(Place, Place),
    /// It does again.
    Unblock(Place, Place),
    /// The first node's sender takes what it has for the second.
    Send(Place, Place),
    /// The next frame of a lane from the first to the second arrives.
    Deliver(Place, Place, Lane),
    /// The first node is told that its queue to the second has room again.
    Room(Place, Place),
    /// A bounded step of background work.
    Work(Place),
    /// A node looks at its timers.
    Timeout(Place),
    /// Nothing: but if nothing is on its way and all nodes are connected, then all are `Ready` and every table
    /// is exact.
    Quiet,
    /// Time goes by, in milliseconds; less if a frame would be under way for longer than a link allows.
    Time(u32),
    /// A member joins the group.
    Join(Place, u16),
    /// One of the members on this node leaves the group: the first number modulo how many there are.
    Leave(Place, u16, u8),
    /// One of the joins that wait on this node is given up.
    Cancel(Place, u8),
    /// A broadcast begins.
    Cast(Place, u16, CastKind),
    /// Something below the nodes; only where they have link layers.
    Link(LinkStep),
}

/// One thing that happens on the raw connections below the nodes' link layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum LinkStep {
    /// The first place dials the second.
    Dial(Place, Place),
    /// The next thing on one of their connections arrives.
    Carry {
        /// Who sent it.
        from: Place,
        /// Whom it reaches.
        to: Place,
        /// On which of the connections that have something.
        nth: u8,
        /// The node hears of what follows from it later, in steps of their own.
        later: bool,
    },
    /// The node hears of the next thing that its link layer has decided.
    Report(Place),
    /// The link layer looks at its timers.
    Tick(Place),
    /// A connection breaks.
    Break {
        /// Who notices it first.
        at: Place,
        /// Who is at the other end.
        of: Place,
        /// Which of the connections that the first one has.
        nth: u8,
        /// How many of the things that it had sent still arrive.
        keep: u8,
        /// Who notices it at all.
        seen: Seen,
    },
    /// The next packet is lost, though its connection goes on.
    Drop {
        /// Who sent it.
        from: Place,
        /// Whom it does not reach.
        to: Place,
        /// On which of the connections that have something.
        nth: u8,
    },
    /// The next packet will arrive twice.
    Repeat {
        /// Who sent it.
        from: Place,
        /// Whom it reaches.
        to: Place,
        /// On which of the connections that have something.
        nth: u8,
    },
    /// Nothing moves from the first to the second.
    Hold(Place, Place),
    /// It moves again.
    Release(Place, Place),
    /// All connections of two places break, and none is made.
    Cut {
        /// Who notices it first.
        at: Place,
        /// Who is at the other end.
        of: Place,
        /// Who notices it at all.
        seen: Seen,
    },
    /// They can connect again.
    Mend(Place, Place),
    /// The first one gives the second up.
    Disconnect(Place, Place),
    /// A node leaves in an orderly way: it says goodbye.
    Stop(Place),
    /// A node dies, and nobody's connections break.
    Vanish(Place),
}

/// Who notices that a connection is broken, other than by silence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Seen {
    /// One end now, the other one later.
    Both,
    /// One end.
    One,
    /// Nobody.
    Nobody,
}

impl fmt::Display for LinkStep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            LinkStep::Dial(a, b) => write!(f, "n{a} dials n{b}"),
            LinkStep::Carry { from, to, nth, later } => {
                let later = if later { ", what follows is told later" } else { "" };
                write!(f, "carry n{from} -> n{to} ({nth}){later}")
            }
            LinkStep::Report(n) => write!(f, "n{n} is told"),
            LinkStep::Tick(n) => write!(f, "link timers n{n}"),
            LinkStep::Break { at, of, nth, keep, seen } => {
                write!(f, "n{at}'s connection ({nth}) with n{of} breaks, {keep} arrive, seen by {seen:?}")
            }
            LinkStep::Drop { from, to, nth } => write!(f, "lose one n{from} -> n{to} ({nth})"),
            LinkStep::Repeat { from, to, nth } => write!(f, "double one n{from} -> n{to} ({nth})"),
            LinkStep::Hold(a, b) => write!(f, "hold n{a} -> n{b}"),
            LinkStep::Release(a, b) => write!(f, "release n{a} -> n{b}"),
            LinkStep::Cut { at, of, seen } => write!(f, "cut n{at} n{of}, seen by {seen:?}"),
            LinkStep::Mend(a, b) => write!(f, "mend n{a} n{b}"),
            LinkStep::Disconnect(a, b) => write!(f, "n{a} gives n{b} up"),
            LinkStep::Stop(n) => write!(f, "stop n{n}"),
            LinkStep::Vanish(n) => write!(f, "n{n} dies, no connection breaks"),
        }
    }
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Step::Start(n) => write!(f, "start n{n}"),
            Step::Settle(n) => write!(f, "settle n{n}"),
            Step::Crash(n) => write!(f, "crash n{n}"),
            Step::Drain(n) => write!(f, "drain n{n}"),
            Step::Up(a, b) => write!(f, "n{a} is told: n{b} up"),
            Step::Down { at, of, lose } => {
                write!(f, "n{at} is told: n{of} down{}", if lose { "" } else { " (what it sent arrives)" })
            }
            Step::Suspect { at, of, blocked } => {
                write!(f, "n{at} is told: n{of} suspect{}", if blocked { " (link stands)" } else { "" })
            }
            Step::Resume { at, of } => write!(f, "n{at} is told: n{of} resumed"),
            Step::Block(a, b) => write!(f, "block n{a} -> n{b}"),
            Step::Unblock(a, b) => write!(f, "unblock n{a} -> n{b}"),
            Step::Send(a, b) => write!(f, "send n{a} -> n{b}"),
            Step::Deliver(a, b, lane) => write!(f, "deliver n{a} -> n{b} {lane:?}"),
            Step::Room(a, b) => write!(f, "room n{a} -> n{b}"),
            Step::Work(n) => write!(f, "work n{n}"),
            Step::Timeout(n) => write!(f, "timers n{n}"),
            Step::Quiet => write!(f, "look at the tables if all is quiet"),
            Step::Time(ms) => write!(f, "{ms} ms go by"),
            Step::Join(n, g) => write!(f, "join n{n} g{g}"),
            Step::Leave(n, g, which) => write!(f, "leave n{n} g{g} ({which})"),
            Step::Cancel(n, which) => write!(f, "cancel join n{n} ({which})"),
            Step::Cast(n, g, kind) => write!(f, "broadcast n{n} g{g} {kind:?}"),
            Step::Link(step) => step.fmt(f),
        }
    }
}
