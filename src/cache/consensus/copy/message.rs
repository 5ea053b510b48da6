//! What the copies of one partition say to each other in write mode `strong`.

use serde::{Deserialize, Serialize};

use crate::cache::consensus::Decided;
use crate::cache::consensus::message::MAX_NUMBER;
use crate::cache::store::{Entry, SnapshotHeader, Write};
use crate::cache::version::{Epoch, Version};

/// The most runs and entries of one message that are taken in.
const MAX_RUNS: usize = 4096;
const MAX_ENTRIES: usize = 1 << 20;

/// One message of the stream of a partition; the module's documentation draws who says what when. Each carries the number
/// of the stream that it belongs to; what belongs to an older one is nothing any more.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum CopyMessage {
    /// The primary begins a stream: where is the receiver?
    Open {
        /// The stream.
        stream: u64,
        /// What is decided.
        config: Decided,
    },
    /// Where the sender's copy is.
    Opened {
        /// The stream.
        stream: u64,
        /// Whether it has a whole copy.
        whole: bool,
        /// The last write that it has applied.
        applied: Option<Version>,
        /// The writes after it that it has logged: epochs with the last number of each.
        tail: Vec<(Epoch, u64)>,
    },
    /// Everything there was before is forgotten: a snapshot begins.
    Snapshot {
        /// The stream.
        stream: u64,
        /// Where the snapshot is.
        header: SnapshotHeader,
    },
    /// A piece of the snapshot.
    Piece {
        /// The stream.
        stream: u64,
        /// What is in it.
        entries: Vec<Entry>,
        /// It is the last one.
        last: bool,
    },
    /// A piece is in.
    PieceIn {
        /// The stream.
        stream: u64,
    },
    /// *Prepare*: the next writes, to be logged; and *commit*: up to where all owners have logged them.
    Append {
        /// The stream.
        stream: u64,
        /// The number of the write before.
        after: u64,
        /// The writes.
        entries: Vec<(Version, Write)>,
        /// All up to here is committed.
        commit: u64,
    },
    /// Everything up to this number is logged.
    Logged {
        /// The stream.
        stream: u64,
        /// The number.
        end: u64,
    },
    /// The receiver is not needed any more.
    Drop {
        /// The stream.
        stream: u64,
    },
}

fn is_bounded(version: &Version) -> bool {
    version.seq <= MAX_NUMBER && version.epoch.counter <= MAX_NUMBER
}

impl CopyMessage {
    /// Whether it is bounded and does not contradict itself.
    pub(super) fn is_sound(&self) -> bool {
        match self {
            CopyMessage::Open { config, .. } => config.is_sound(),
            CopyMessage::Opened { applied, tail, .. } => {
                let bounded =
                    |(epoch, last): &(Epoch, u64)| epoch.counter <= MAX_NUMBER && *last <= MAX_NUMBER;
                tail.len() <= MAX_RUNS
                    && applied.iter().all(is_bounded)
                    && tail.iter().all(bounded)
                    && tail.windows(2).all(|pair| pair[0].0 < pair[1].0 && pair[0].1 < pair[1].1)
            }
            CopyMessage::Append { after, entries, .. } => {
                let follows = entries
                    .iter()
                    .zip(1..)
                    .all(|((version, _), at)| after.checked_add(at) == Some(version.seq));
                let rises = entries.windows(2).all(|pair| pair[0].0.epoch <= pair[1].0.epoch);
                // an entry of another side of a split cannot be: there are none
                let plain = entries.iter().all(|(_, write)| !matches!(write, Write::Merge(_)));
                let bounded = *after <= MAX_NUMBER && entries.iter().all(|(version, _)| is_bounded(version));
                entries.len() <= MAX_ENTRIES && follows && rises && plain && bounded
            }
            CopyMessage::Piece { entries, .. } => entries.len() <= MAX_ENTRIES,
            CopyMessage::Snapshot { header, .. } => {
                let epochs = header.lineage.entries().iter();
                header.applied.iter().all(is_bounded)
                    && epochs.clone().all(|(epoch, _)| epoch.counter <= MAX_NUMBER)
                    && epochs.flat_map(|(_, base)| base).all(is_bounded)
            }
            CopyMessage::PieceIn { .. } | CopyMessage::Logged { .. } | CopyMessage::Drop { .. } => true,
        }
    }
}
