//! One enum per verb: what happened, whether anything changed, and what the caller can do.
//!
//! `is_retryable()` is true where the very same call may succeed later without the caller changing
//! anything.

use std::time::Duration;

use crate::config::ConfigError;
use crate::transport::TransportError;
use crate::types::{Group, Incarnation, MemberId, NameError, NodeId, Peer};

/// Why a scope did not start. Nothing runs then.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// An option is not allowed.
    #[error("the scope did not start: {0}")]
    Config(#[from] ConfigError),
    /// The transport did not start.
    #[error("the scope did not start: {0}")]
    Transport(#[from] TransportError),
    /// The name of the scope has to be 1 to `max` bytes long.
    #[error("the scope did not start: its name has {given} bytes; 1 to {max} bytes are allowed")]
    ScopeLength {
        /// How many bytes the name had.
        given: usize,
        /// How many are allowed.
        max: usize,
    },
    /// The builder was given no transport.
    #[error("scope {scope:?} did not start: it has no transport; give the builder one with `transport(..)`")]
    MissingTransport {
        /// The scope.
        scope: String,
    },
    /// The transport cannot carry the longest frame that the options allow.
    #[error(
        "the scope did not start: its transport takes frames of {max_frame} bytes, and {needed} are needed \
         (max_payload_len {max_payload_len}, max_group_len {max_group_len}, 64 KiB for all else); \
         lower these, or raise its max_frame"
    )]
    FrameLimit {
        /// What the transport takes, in bytes.
        max_frame: usize,
        /// What the options allow, in bytes.
        needed: usize,
        /// The option of the scope.
        max_payload_len: usize,
        /// The option of the scope.
        max_group_len: usize,
    },
    /// This node is in the scope already.
    #[error(
        "scope {scope:?} did not start: node {node} has joined it already; \
         clone the running handle, or shut it down first"
    )]
    AlreadyJoined {
        /// The scope.
        scope: String,
        /// The node.
        node: NodeId,
    },
}

impl StartError {
    /// Whether the same start may succeed later.
    pub fn is_retryable(&self) -> bool {
        match self {
            StartError::Transport(error) => match error {
                TransportError::Failed { .. } => true,
                TransportError::AlreadyStarted { .. }
                | TransportError::Superseded { .. }
                | TransportError::Name(_) => false,
            },
            StartError::Config(_)
            | StartError::ScopeLength { .. }
            | StartError::MissingTransport { .. }
            | StartError::FrameLimit { .. }
            | StartError::AlreadyJoined { .. } => false,
        }
    }
}

/// Why a join failed. The member is not registered then and gets nothing.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum JoinError {
    /// The router of the group refused the claim or did not answer within `join_timeout`.
    #[error("no join of group {group}: its router {router} could not be reached in time; join again")]
    RouterUnreachable {
        /// The group.
        group: Group,
        /// The node that is its router.
        router: NodeId,
    },
    /// The node has started and had not settled on a view within `join_timeout`.
    #[error("no join of group {group}: this node did not settle on a view within {waited:?}; join again")]
    NotSettled {
        /// The group.
        group: Group,
        /// How long the join waited.
        waited: Duration,
    },
    /// This node is on its way out and takes no new members.
    #[error("no join: this node is draining; join on another node")]
    Draining,
    /// The scope is stopped.
    #[error("no join: the scope is stopped; start it again")]
    Stopped,
    /// A later life of this node's name has taken over.
    #[error(
        "no join: node {node} lives elsewhere as incarnation {live}; stop this one or give it another name"
    )]
    Superseded {
        /// The name that both use.
        node: NodeId,
        /// The life that has taken over.
        live: Incarnation,
    },
    /// The name of the group is not allowed.
    #[error("no join: {0}")]
    Name(#[from] NameError),
    /// A member can join only on the node that it lives on.
    #[error("no join: member {member} does not live on this node, which is {here}")]
    ForeignMember {
        /// The member.
        member: MemberId,
        /// This node.
        here: Peer,
    },
}

impl JoinError {
    /// Whether the same join may succeed later.
    pub fn is_retryable(&self) -> bool {
        match self {
            JoinError::RouterUnreachable { .. } | JoinError::NotSettled { .. } => true,
            JoinError::Draining
            | JoinError::Stopped
            | JoinError::Superseded { .. }
            | JoinError::Name(_)
            | JoinError::ForeignMember { .. } => false,
        }
    }
}

/// Why a broadcast that may wait failed. Unless a variant says otherwise, nothing was sent.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BroadcastError {
    /// The scope is stopped.
    #[error("nothing was sent: the scope is stopped; start it again")]
    Stopped,
    /// The scope was stopped while the broadcast was under way.
    #[error("the scope was stopped before the broadcast was acknowledged; some members may have it")]
    Interrupted,
    /// The name of the group is not allowed.
    #[error("nothing was sent: {0}")]
    Name(#[from] NameError),
    /// The payload is larger than `max_payload_len`.
    #[error("nothing was sent: the payload has {given} bytes; at most {max} are allowed (max_payload_len)")]
    PayloadTooLarge {
        /// How many bytes it had.
        given: usize,
        /// How many are allowed.
        max: usize,
    },
    /// The headers are too large.
    #[error("nothing was sent: the headers have {given} bytes; at most {max} are allowed")]
    HeadersTooLarge {
        /// How many bytes they had.
        given: usize,
        /// How many are allowed.
        max: usize,
    },
    /// A broadcast from inside a delivery found the queue for such broadcasts full.
    #[error("nothing was sent: too many broadcasts wait; try again when some have left")]
    Busy,
    /// The node that was named is not connected.
    #[error("nothing was sent: node {node} is not connected; try again when it is")]
    NoSuchNode {
        /// The node.
        node: NodeId,
    },
    /// The node that was named went away before it acknowledged.
    #[error("node {node} went away before it acknowledged; its members may have the message or not")]
    NodeLost {
        /// The node.
        node: NodeId,
    },
    /// A later life of this node's name has taken over.
    #[error(
        "nothing was sent: node {node} lives elsewhere as incarnation {live}; \
         stop this one or give it another name"
    )]
    Superseded {
        /// The name that both use.
        node: NodeId,
        /// The life that has taken over.
        live: Incarnation,
    },
}

impl BroadcastError {
    /// Whether the same broadcast may succeed later. After [`BroadcastError::NodeLost`] a second call is a
    /// second message: members of that node may get both.
    pub fn is_retryable(&self) -> bool {
        match self {
            BroadcastError::Busy | BroadcastError::NoSuchNode { .. } | BroadcastError::NodeLost { .. } => {
                true
            }
            BroadcastError::Stopped
            | BroadcastError::Interrupted
            | BroadcastError::Name(_)
            | BroadcastError::PayloadTooLarge { .. }
            | BroadcastError::HeadersTooLarge { .. }
            | BroadcastError::Superseded { .. } => false,
        }
    }
}

/// Why a broadcast that never waits failed. Nothing was sent.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TryBroadcastError {
    /// A queue on the way is full, or too many broadcasts are unacknowledged.
    #[error("nothing was sent: a queue is full; try again when it has moved, or use broadcast, which waits")]
    Busy,
    /// The scope is stopped.
    #[error("nothing was sent: the scope is stopped; start it again")]
    Stopped,
    /// The name of the group is not allowed.
    #[error("nothing was sent: {0}")]
    Name(#[from] NameError),
    /// The payload is larger than `max_payload_len`.
    #[error("nothing was sent: the payload has {given} bytes; at most {max} are allowed (max_payload_len)")]
    PayloadTooLarge {
        /// How many bytes it had.
        given: usize,
        /// How many are allowed.
        max: usize,
    },
    /// The headers are too large.
    #[error("nothing was sent: the headers have {given} bytes; at most {max} are allowed")]
    HeadersTooLarge {
        /// How many bytes they had.
        given: usize,
        /// How many are allowed.
        max: usize,
    },
    /// A later life of this node's name has taken over.
    #[error(
        "nothing was sent: node {node} lives elsewhere as incarnation {live}; \
         stop this one or give it another name"
    )]
    Superseded {
        /// The name that both use.
        node: NodeId,
        /// The life that has taken over.
        live: Incarnation,
    },
}

impl TryBroadcastError {
    /// Whether the same broadcast may succeed later.
    pub fn is_retryable(&self) -> bool {
        match self {
            TryBroadcastError::Busy => true,
            TryBroadcastError::Stopped
            | TryBroadcastError::Name(_)
            | TryBroadcastError::PayloadTooLarge { .. }
            | TryBroadcastError::HeadersTooLarge { .. }
            | TryBroadcastError::Superseded { .. } => false,
        }
    }
}

impl From<TryBroadcastError> for BroadcastError {
    fn from(error: TryBroadcastError) -> Self {
        match error {
            TryBroadcastError::Busy => BroadcastError::Busy,
            TryBroadcastError::Stopped => BroadcastError::Stopped,
            TryBroadcastError::Name(error) => BroadcastError::Name(error),
            TryBroadcastError::PayloadTooLarge { given, max } => {
                BroadcastError::PayloadTooLarge { given, max }
            }
            TryBroadcastError::HeadersTooLarge { given, max } => {
                BroadcastError::HeadersTooLarge { given, max }
            }
            TryBroadcastError::Superseded { node, live } => BroadcastError::Superseded { node, live },
        }
    }
}

/// Why members were not counted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CountError {
    /// The scope is stopped.
    #[error("no members were counted: the scope is stopped; start it again")]
    Stopped,
    /// The name of the group is not allowed.
    #[error("no members were counted: {0}")]
    Name(#[from] NameError),
}

impl CountError {
    /// Whether the same call may succeed later: never. Nodes that do not answer are no error.
    pub fn is_retryable(&self) -> bool {
        match self {
            CountError::Stopped | CountError::Name(_) => false,
        }
    }
}

/// A drain reached its deadline. The node goes on draining: drain again to wait longer, or shut down and
/// accept that its members may miss broadcasts of the nodes that are named.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the drain is not over: {}", unfinished(.waiting_for, .caches, .without_taker, *.stopped))]
#[non_exhaustive]
pub struct DrainTimeout {
    /// The nodes that have not confirmed it, sorted.
    pub waiting_for: Vec<NodeId>,
    /// The caches that have not handed over all of their partitions, sorted.
    pub caches: Vec<String>,
    /// Those of them that nobody takes over: no other node that has them open stays. Waiting does not help unless one
    /// comes, so the drain has ended before its time; what they hold goes with this node.
    pub without_taker: Vec<String>,
    /// The scope was stopped, or the cache closed, before it was over: what was not handed over has gone with this node.
    pub stopped: bool,
}

impl DrainTimeout {
    /// A drain that still waits for these nodes.
    pub fn new(mut waiting_for: Vec<NodeId>) -> Self {
        waiting_for.sort_unstable();
        waiting_for.dedup();
        Self { waiting_for, caches: Vec::new(), without_taker: Vec::new(), stopped: false }
    }

    /// One that also waits for these caches.
    #[must_use]
    pub fn with_caches(mut self, mut caches: Vec<String>) -> Self {
        caches.sort_unstable();
        self.caches = caches;
        self
    }

    /// Nobody takes these of the caches over.
    #[must_use]
    pub fn with_nobody_for(mut self, mut caches: Vec<String>) -> Self {
        caches.sort_unstable();
        self.without_taker = caches;
        self
    }

    /// It ended because the scope was stopped or the cache closed.
    #[must_use]
    pub fn with_stopped(mut self) -> Self {
        self.stopped = true;
        self
    }

    /// A drain goes on where it was, unless the scope was stopped or the cache closed.
    pub fn is_retryable(&self) -> bool {
        !self.stopped
    }
}

fn unfinished(waiting_for: &[NodeId], caches: &[String], alone: &[String], stopped: bool) -> String {
    let mut parts = Vec::new();
    if !waiting_for.is_empty() || caches.is_empty() {
        parts.push(format!(
            "{} of the nodes have not confirmed it ({})",
            waiting_for.len(),
            names(waiting_for)
        ));
    }
    if !caches.is_empty() {
        parts.push(format!("{} of the caches have data to hand over ({})", caches.len(), caches.join(", ")));
    }
    let mut text = parts.join(", ");
    if stopped {
        text.push_str(
            "; the scope was stopped or the cache closed meanwhile: what they hold has gone with this node",
        );
    } else if alone.is_empty() {
        text.push_str("; drain again to wait longer");
    } else {
        let alone = alone.join(", ");
        text.push_str(&format!(
            "; no other node stays that could take over ({alone}): what they hold goes with this node"
        ));
    }
    text
}

fn names(nodes: &[NodeId]) -> String {
    nodes.iter().map(NodeId::as_str).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node() -> NodeId {
        NodeId::new("chat-1").expect("a name")
    }

    #[test]
    fn messages_name_what_was_given_and_what_is_allowed() {
        let start = StartError::ScopeLength { given: 300, max: 255 };
        assert_eq!(
            start.to_string(),
            "the scope did not start: its name has 300 bytes; 1 to 255 bytes are allowed"
        );
        let config = crate::Config::default().vnodes(0).validate().expect_err("refused");
        let start = StartError::from(config);
        assert_eq!(start.to_string(), "the scope did not start: option vnodes is 0; 1 to 4096 is allowed");
        let join = JoinError::RouterUnreachable { group: Group::from("room:1"), router: node() };
        assert_eq!(
            join.to_string(),
            "no join of group room:1: its router chat-1 could not be reached in time; join again"
        );
        let broadcast = BroadcastError::PayloadTooLarge { given: 9, max: 8 };
        assert_eq!(
            broadcast.to_string(),
            "nothing was sent: the payload has 9 bytes; at most 8 are allowed (max_payload_len)"
        );
    }

    #[test]
    fn a_name_error_keeps_its_words() {
        let name = NameError::GroupLength { given: 0, max: 1024 };
        for text in [
            JoinError::from(name.clone()).to_string(),
            BroadcastError::from(name.clone()).to_string(),
            TryBroadcastError::from(name).to_string(),
        ] {
            assert!(
                text.ends_with("a group name of 0 bytes was given; 1 to 1024 bytes are allowed"),
                "{text}"
            );
        }
    }

    #[test]
    fn only_what_may_pass_by_itself_is_retryable() {
        assert!(!JoinError::Draining.is_retryable());
        assert!(!JoinError::Stopped.is_retryable());
        assert!(BroadcastError::NoSuchNode { node: node() }.is_retryable());
        assert!(!BroadcastError::Interrupted.is_retryable());
        assert!(TryBroadcastError::Busy.is_retryable());
        assert!(!TryBroadcastError::PayloadTooLarge { given: 2, max: 1 }.is_retryable());
        assert!(StartError::from(TransportError::Failed { reason: "refused".into() }).is_retryable());
        assert!(!StartError::from(TransportError::AlreadyStarted { node: node() }).is_retryable());
    }

    #[test]
    fn a_try_error_widens_without_losing_its_meaning() {
        let live = Incarnation::MIN;
        for (narrow, wide) in [
            (TryBroadcastError::Busy, BroadcastError::Busy),
            (TryBroadcastError::Stopped, BroadcastError::Stopped),
            (
                TryBroadcastError::PayloadTooLarge { given: 2, max: 1 },
                BroadcastError::PayloadTooLarge { given: 2, max: 1 },
            ),
            (
                TryBroadcastError::HeadersTooLarge { given: 2, max: 1 },
                BroadcastError::HeadersTooLarge { given: 2, max: 1 },
            ),
            (
                TryBroadcastError::Superseded { node: node(), live },
                BroadcastError::Superseded { node: node(), live },
            ),
        ] {
            assert_eq!(narrow.is_retryable(), wide.is_retryable());
            assert_eq!(BroadcastError::from(narrow), wide);
        }
    }

    #[test]
    fn a_drain_says_whom_it_waits_for() {
        let other = NodeId::new("b").expect("a name");
        let timeout = DrainTimeout::new(vec![node(), other.clone(), node()]);
        assert_eq!(timeout.waiting_for, [other, node()]);
        assert_eq!(
            timeout.to_string(),
            "the drain is not over: 2 of the nodes have not confirmed it (b, chat-1); drain again to wait longer"
        );
        assert!(timeout.is_retryable());
        let caches = DrainTimeout::new(vec![]).with_caches(vec!["b".into(), "a".into()]);
        assert_eq!(
            caches.to_string(),
            "the drain is not over: 2 of the caches have data to hand over (a, b); drain again to wait longer"
        );
    }
}
