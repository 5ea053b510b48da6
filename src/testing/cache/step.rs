//! The steps of a schedule: each stands for itself, and one that cannot be done does nothing. So any part of a
//! schedule is a schedule, which is how a failing one is made short.

use std::fmt;

use crate::cache::{ReadMode, WriteMode};

/// A place in the cluster: the node `n<place>`, whichever life it is in.
pub type Place = u8;

/// What a write does. Keys and partitions are numbers modulo how many there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriteKind {
    /// Puts one record of this key.
    Put(u8),
    /// Puts so many records of different keys of the partition of this key.
    Batch(u8, u8),
    /// Deletes this key.
    Delete(u8),
    /// Deletes the records of a class from the partition of this key.
    DeleteMatch(u8, u8),
    /// Deletes all of the partition of this key.
    DeleteAll(u8),
}

/// What a read asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReadKind {
    /// The records of this key.
    Get(u8),
    /// All records of the partition of this key.
    All(u8),
}

/// One thing that happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// A node that is not running starts, under the same name in a later life, and opens the cache.
    Start(Place),
    /// A node dies with all it holds. A run without splits allows it only when enough copies are whole.
    Crash(Place),
    /// A node hands over what it has, and leaves when that is done.
    Drain(Place),
    /// A node closes the cache and stays in the cluster; to the data this is a crash.
    Close(Place),
    /// It opens the cache; if it has closed it, it starts again in a later life.
    Open(Place),
    /// The link breaks: the first node is told now, the second so many milliseconds later. It does not come back
    /// before it is healed.
    Cut(Place, Place, u16),
    /// The same, but the link comes back by itself.
    Blip(Place, Place, u16),
    /// Nothing from the first reaches the second; the transport gives the link up after a while.
    Block(Place, Place),
    /// Everything between the two is as it should be, again.
    Heal(Place, Place),
    /// All links between the places in the mask and the others are cut.
    Split(u8),
    /// All links are as they should be.
    HealAll,
    /// What the first sends to the second takes so many milliseconds more.
    Slow(Place, Place, u16),
    /// Time goes by, in milliseconds.
    Time(u16),
    /// A write of a session, if the session has nothing under way.
    Write(Place, u8, WriteKind, WriteMode),
    /// A read of a session, if the session has nothing under way. The flag: it must see the session's own writes.
    Read(Place, u8, ReadKind, ReadMode, bool),
    /// Whoever waits for an operation of this node goes away.
    Cancel(Place),
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Step::Start(n) => write!(f, "start n{n}"),
            Step::Crash(n) => write!(f, "crash n{n}"),
            Step::Drain(n) => write!(f, "drain n{n}"),
            Step::Close(n) => write!(f, "close the cache on n{n}"),
            Step::Open(n) => write!(f, "open the cache on n{n}"),
            Step::Cut(a, b, gap) => write!(f, "cut n{a} - n{b}, n{b} is told {gap} ms later"),
            Step::Blip(a, b, gap) => write!(f, "break n{a} - n{b} for a moment, n{b} is told {gap} ms later"),
            Step::Block(a, b) => write!(f, "block n{a} -> n{b}"),
            Step::Heal(a, b) => write!(f, "heal n{a} - n{b}"),
            Step::Split(mask) => write!(f, "split {mask:06b}"),
            Step::HealAll => write!(f, "heal all"),
            Step::Slow(a, b, ms) => write!(f, "slow n{a} -> n{b} by {ms} ms"),
            Step::Time(ms) => write!(f, "{ms} ms go by"),
            Step::Write(n, s, kind, mode) => write!(f, "n{n} session {s}: {kind:?} {mode}"),
            Step::Read(n, s, kind, mode, own) => {
                write!(f, "n{n} session {s}: {kind:?} {mode}{}", if own { " own writes" } else { "" })
            }
            Step::Cancel(n) => write!(f, "cancel an operation on n{n}"),
        }
    }
}
