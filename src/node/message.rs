//! What nodes say to one another.
//!
//! Every message is said by a [`Peer`] (the link knows which), so a version travels as its sequence number:
//! the incarnation is the speaker's. Encoded with postcard; a kind is never changed, only added
//! (`transport/wire.rs` has the envelope).

use serde::{Deserialize, Serialize};

use crate::types::{BroadcastId, Group, MemberId, Peer};
use crate::view::{View, ViewHash};

/// How a round's data relates to what the router already has of the source.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum DataKind {
    /// All that the source holds for this router; older rows of the source become tombstones.
    Snapshot,
    /// Only the groups that moved to this router; removes nothing.
    Delta,
    /// All that the source holds in these digest buckets; older rows in them become tombstones.
    Repair(Vec<u8>),
}

/// One bucket of a digest: which, how many groups, and the xor of their hashes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Bucket {
    /// The top 8 bits of the groups' hashes.
    pub index: u8,
    /// How many groups.
    pub count: u32,
    /// The xor of their hashes.
    pub xor: u64,
}

/// A message of the protocol, on the control lane unless it says otherwise.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Message {
    /// "I am about to leave the view that you count on; do not trust my agreement."
    Leaving {
        /// The round, as a version of the sender.
        round: u64,
    },
    /// "I count on you no longer, since this round of yours."
    LeavingAck {
        /// The round that is acknowledged.
        round: u64,
    },
    /// "This is my committed view, and you have all that I owe you."
    Announce {
        /// The version of this announcement.
        version: u64,
        /// The view, by hash.
        hash: ViewHash,
    },
    /// The announcement again, with what the sender holds for the receiver, as a digest.
    Heartbeat {
        /// The version of the last announcement.
        version: u64,
        /// The view, by hash.
        hash: ViewHash,
        /// Whether the sender drains.
        draining: bool,
        /// The groups that the sender holds for the receiver; empty buckets are left out.
        digest: Vec<Bucket>,
    },
    /// "I drain: I stay member, source and caller, but route nothing."
    Draining,
    /// A chunk of a round's data (bulk lane). Chunks of one round arrive in order.
    Data {
        /// The round, as a version of the sender; the version of every row in it.
        round: u64,
        /// What it is.
        kind: DataKind,
        /// Which chunk, from 0.
        index: u32,
        /// On the last chunk: the view that the sender has committed to.
        last: Option<ViewHash>,
        /// The groups.
        groups: Vec<Group>,
    },
    /// "I have applied the chunks below this one."
    DataAck {
        /// The round.
        round: u64,
        /// How many chunks of it are applied.
        chunks: u32,
        /// Whether the last one was among them.
        complete: bool,
    },
    /// "I hold these groups now", each with its version.
    Claims {
        /// Names this message in its acknowledgement.
        call: u64,
        /// The groups and their versions.
        claims: Vec<(Group, u64)>,
    },
    /// "The rows of these calls are in my table."
    ClaimsAck {
        /// The calls.
        calls: Vec<u64>,
    },
    /// "I hold these groups no longer."
    Retract {
        /// The version of all of them; also names the batch.
        version: u64,
        /// The groups.
        groups: Vec<Group>,
    },
    /// "The tombstones of these batches are in my table."
    RetractAck {
        /// The batches.
        versions: Vec<u64>,
    },
    /// "You sent me a broadcast of a group that I do not hold."
    NotHeld {
        /// The group and the version at which it was not held.
        groups: Vec<(Group, u64)>,
    },
    /// "My digest of you differs from yours; send these buckets again."
    RepairRequest {
        /// The view in which that was seen.
        hash: ViewHash,
        /// The buckets.
        buckets: Vec<u8>,
    },
    /// The sender's committed view, said when two nodes keep disagreeing.
    Members {
        /// The view.
        view: View,
    },
    /// "I know a later life of your name."
    Superseded {
        /// That life.
        by: Peer,
    },
    /// How far the receiver's broadcasts have been handled here.
    Progress(Progress),
}

/// Acknowledgements of the data lane: state, not queue entries, so they travel in batches.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Progress {
    /// All frames of the data lane up to this hop number have been handled.
    pub hop: u64,
    /// Answers of this node, as router, to broadcasts of the receiver.
    pub routed: Vec<Routed>,
}

/// A router's answer to the origin of one broadcast.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Routed {
    /// The broadcast's number at its origin.
    pub seq: u64,
    /// What the router did.
    pub outcome: RoutedOutcome,
}

/// What a router did with a broadcast.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum RoutedOutcome {
    /// It knew who holds the group.
    Targeted {
        /// How many nodes hold it, the origin and the router included.
        nodes: u32,
        /// Holders that it could not serve; the origin sends to those itself.
        failed: Vec<Peer>,
    },
    /// It could not be sure and sent to all its peers.
    Flooded {
        /// The peers that have it (the router included); the origin sends to the rest of its own.
        covered: Vec<Peer>,
    },
}

/// A frame of the data lane; the payload is the frame's body. Sent with `C = &Cast`: what is sent is kept, too.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum DataMessage<C = Cast> {
    /// Caller to router: find out who must hear this.
    Route {
        /// The broadcast.
        cast: C,
        /// The caller's view, or `UNSETTLED`.
        hash: ViewHash,
    },
    /// To a source: give this to your members.
    Deliver {
        /// The broadcast.
        cast: C,
        /// Whether the sender knows that the receiver holds the group (then "not held" is worth telling).
        targeted: bool,
    },
}

impl DataMessage<&Cast> {
    /// One that may be kept.
    pub fn cloned(self) -> DataMessage {
        match self {
            DataMessage::Route { cast, hash } => DataMessage::Route { cast: cast.clone(), hash },
            DataMessage::Deliver { cast, targeted } => DataMessage::Deliver { cast: cast.clone(), targeted },
        }
    }
}

/// One broadcast, without its payload.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Cast {
    /// Counts the data frames from this sender to this receiver since the link came up, from 1.
    pub hop: u64,
    /// Which broadcast.
    pub id: BroadcastId,
    /// Every broadcast of the origin below this number is settled and never sent again.
    pub floor: u64,
    /// The group.
    pub group: Group,
    /// A member that must not get it.
    pub except: Option<MemberId>,
    /// Whether it is sent once, without acknowledgement (`Delivery::AtMostOnce`).
    pub at_most_once: bool,
    /// The user's headers.
    pub headers: Vec<(String, bytes::Bytes)>,
}
