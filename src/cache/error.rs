//! What can go wrong with the cache: what happened, whether anything changed, and what the caller can do.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::partition::PartitionId;
use super::pattern::PatternError;
use super::term::{Record, Term, TermError};
use super::version::{Epoch, Version};
use crate::config::ConfigError;
use crate::types::{NodeId, Peer};

/// Whether an operation that failed has changed anything.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Applied {
    /// Nothing has changed, and nothing will.
    No,
    /// It has changed all that it should.
    Yes,
    /// It may have changed everything, a part, or nothing, or may do so still.
    Unknown,
}

impl fmt::Display for Applied {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Applied::No => "nothing has changed",
            Applied::Yes => "it was applied",
            Applied::Unknown => "it may have been applied or not",
        })
    }
}

/// What an operation on all partitions found or did in those that answered.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Found {
    /// Bindings of a pattern's variables.
    Bindings(Vec<Vec<Term>>),
    /// Whole records.
    Records(Vec<Record>),
    /// How many records went.
    Removed(u64),
}

/// Why an operation of the cache failed. "Not found" is never an error, and no error means "not found".
///
/// It goes over the wire: the node that finds it is often not the one that is told.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
#[non_exhaustive]
pub enum CacheError {
    /// A cache of this name is open on this scope with other options.
    #[error("cache {name:?} is open already with other options")]
    AlreadyOpen {
        /// The name.
        name: String,
    },
    /// A cache of this name was closed on this node: it can be opened again after a restart of the scope.
    #[error(
        "cache {name:?} was closed on this node; it can be opened when the scope has been started anew, for \
             the others would take the new copy, which has forgotten what it promised, for the old one"
    )]
    Closed {
        /// The name.
        name: String,
    },
    /// Two nodes have opened the cache with options that have to be equal.
    #[error("cache {name:?}: option {option} is {here} on this node and {there} on {peer}; make them equal")]
    ConfigMismatch {
        /// The name of the cache.
        name: String,
        /// The option.
        option: String,
        /// Its value on this node.
        here: String,
        /// Its value on the other.
        there: String,
        /// The other.
        peer: Peer,
    },
    /// A value is no term.
    #[error("nothing has changed: {0}")]
    Term(#[from] TermError),
    /// A pattern is not allowed.
    #[error("nothing was looked for: {0}")]
    Pattern(#[from] PatternError),
    /// A record has no such field, and the cache needs it.
    #[error("nothing has changed: the record has {given} fields, and field {field} is its {option}")]
    RecordTooShort {
        /// How many fields it has.
        given: usize,
        /// The field that is missing, from 0.
        field: usize,
        /// Which option names this field: "key_field" or "partition_field".
        option: String,
    },
    /// The cache allows records of one arity only (option `arity`).
    #[error("nothing has changed: the record has {given} fields; {allowed} are allowed (arity)")]
    Arity {
        /// How many fields it has.
        given: usize,
        /// How many are allowed.
        allowed: usize,
    },
    /// Something is larger than its limit.
    #[error("nothing has changed: {what} is {given}; at most {max} is allowed ({option})")]
    TooLarge {
        /// What, as text: "the record in bytes".
        what: String,
        /// How large.
        given: u64,
        /// How large it may be.
        max: u64,
        /// The option that sets the limit.
        option: String,
    },
    /// A call for tables where the key field is the partition field, on another one.
    #[error(
        "nothing was looked for: key_field is {key_field} and partition_field is {partition_field}; \
         use the call that takes both"
    )]
    KeyIsNotPartition {
        /// The key field.
        key_field: usize,
        /// The partition field.
        partition_field: usize,
    },
    /// A forwarded operation came to a node that is not the primary. The caller follows the hint by itself.
    #[error("partition {partition} is served by {}", primary.as_ref().map_or("nobody known".into(), Peer::to_string))]
    WrongOwner {
        /// The partition.
        partition: PartitionId,
        /// Who serves it, as far as the node knows.
        primary: Option<Peer>,
        /// Since which epoch.
        epoch: Option<Epoch>,
    },
    /// An owner has seen a later epoch than the one of the operation.
    #[error("epoch {given} of partition {partition} is over; it is in {current}")]
    StaleEpoch {
        /// The partition.
        partition: PartitionId,
        /// The epoch of the operation.
        given: Epoch,
        /// The epoch of the owner.
        current: Epoch,
    },
    /// No owner of the partition is ready to serve.
    #[error("no owner of partition {partition} is active yet; nothing has changed")]
    NotActive {
        /// The partition.
        partition: PartitionId,
    },
    /// A node could not be reached, and nobody else may answer.
    #[error("node {node} could not be reached for partition {partition}; {applied}")]
    Unreachable {
        /// The partition.
        partition: PartitionId,
        /// The node.
        node: NodeId,
        /// Whether anything has changed.
        applied: Applied,
    },
    /// The deadline was over.
    #[error("the deadline was over; {applied}")]
    Timeout {
        /// Whether anything has changed.
        applied: Applied,
    },
    /// Too few owners have confirmed a write in time; those that have keep it. Where enough owners have, and fewer of the
    /// expected nodes are left than when it began (`expected_nodes`), these are the nodes.
    #[error("{got} of {need} nodes confirmed the write; it may have been applied or not")]
    NotEnoughAcks {
        /// How many owners have confirmed it; or how many of the expected nodes are there.
        got: usize,
        /// How many are needed of them.
        need: usize,
    },
    /// Too few owners, or too few of the expected nodes, can be reached to begin.
    #[error("{got} nodes can be reached and {need} are needed; nothing has changed")]
    NoQuorum {
        /// How many can be reached.
        got: usize,
        /// How many are needed.
        need: usize,
    },
    /// The history that is served now went on without this write of the session. It was lost with its primary; or it was
    /// made on the side of a split that gave way: then it was taken over in the merge, or reported as a loser. Look
    /// whether it is there, and [`forget`](crate::cache::Session::forget) it.
    #[error(
        "partition {partition} went on without the session's write {version}: it is lost, or a merge has taken it over or reported it"
    )]
    WriteLost {
        /// The partition.
        partition: PartitionId,
        /// The write.
        version: Version,
    },
    /// An operation on all partitions had answers of some only.
    #[error("{} partitions did not answer: {}", missing.len(), silent(missing))]
    Partial {
        /// What the others found or did.
        found: Found,
        /// The partitions that did not answer, and why.
        missing: Vec<(PartitionId, CacheError)>,
    },
    /// Parts of a batch failed; the others are applied.
    #[error("{applied} records of the batch were applied; {}", failures(refused, failed))]
    Batch {
        /// How many records were applied.
        applied: u64,
        /// The records that are not allowed, by their place in the batch, from 0, and why. They were not sent.
        refused: Vec<(u64, CacheError)>,
        /// The partitions that failed, and why.
        failed: Vec<(PartitionId, CacheError)>,
    },
    /// What was given as a session's token is none of this cache.
    #[error("the session's token cannot be used: {reason}")]
    Token {
        /// What is wrong with it.
        reason: String,
    },
    /// Too much waits.
    #[error("nothing has changed: too many operations wait; try again when some are done")]
    Busy,
    /// A peer sent what cannot be understood.
    #[error("node {node} sent what cannot be understood: {reason}")]
    Malformed {
        /// The node.
        node: NodeId,
        /// What is wrong with it.
        reason: String,
    },
    /// The node drains: it accepts nothing new.
    #[error("nothing has changed: the node is draining")]
    Draining,
    /// The scope is stopped, or the cache closed.
    #[error("nothing has changed: the scope is stopped or the cache closed")]
    Stopped,
    /// The scope was stopped or the cache closed while a write was under way.
    #[error("the scope was stopped or the cache closed meanwhile; {}", Applied::Unknown)]
    Interrupted,
    /// A delete was carried out, perhaps twice: the first answer was lost, or its primary replaced. What was to go is gone,
    /// and how many records went is not known. A session remembers the write. There is nothing to try again; whoever
    /// does not need the number takes it for success ([`Applied::Yes`]).
    #[error("it was applied: {at_least} records went at least, and how many by a first try is not known")]
    Uncounted {
        /// How many went by the last try.
        at_least: u64,
        /// The write, in the order of its partition; `None` if it was about several partitions.
        version: Option<Version>,
    },
    /// An option is not allowed: of a cache, which did not start, or of one call, of which nothing was carried out. It never goes over the wire, and stays last because of it.
    #[error("nothing has changed: {0}")]
    #[serde(skip)]
    Config(#[from] ConfigError),
}

fn silent(missing: &[(PartitionId, CacheError)]) -> String {
    let mut text = ids(&missing.iter().map(|(partition, _)| *partition).collect::<Vec<_>>());
    if let Some((_, error)) = missing.first() {
        text.push_str(&format!(" (the first: {error})"));
    }
    text
}

fn ids(partitions: &[PartitionId]) -> String {
    let mut text = partitions.iter().take(8).map(PartitionId::to_string).collect::<Vec<_>>().join(", ");
    if partitions.len() > 8 {
        text.push_str(", ..");
    }
    text
}

fn failures(refused: &[(u64, CacheError)], failed: &[(PartitionId, CacheError)]) -> String {
    let mut text = Vec::new();
    if let Some((index, error)) = refused.first() {
        text.push(format!("{} were refused (the first, at {index}: {error})", refused.len()));
    }
    if let Some((_, error)) = failed.first() {
        let ids: Vec<_> = failed.iter().map(|(partition, _)| *partition).collect();
        text.push(format!("it failed in partitions {} (the first: {error})", self::ids(&ids)));
    }
    text.join("; ")
}

/// A conversion that cannot fail did not.
impl From<std::convert::Infallible> for CacheError {
    fn from(never: std::convert::Infallible) -> Self {
        match never {}
    }
}

impl CacheError {
    /// Whether the same call may succeed later without the caller changing anything. After
    /// [`Applied::Unknown`] a second call may apply it a second time.
    pub fn is_retryable(&self) -> bool {
        match self {
            CacheError::WrongOwner { .. }
            | CacheError::StaleEpoch { .. }
            | CacheError::NotActive { .. }
            | CacheError::Unreachable { .. }
            | CacheError::Timeout { .. }
            | CacheError::NotEnoughAcks { .. }
            | CacheError::NoQuorum { .. }
            | CacheError::Busy => true,
            CacheError::Partial { missing, .. } => missing.iter().all(|(_, error)| error.is_retryable()),
            CacheError::Batch { refused, failed, .. } => {
                refused.is_empty() && failed.iter().all(|(_, error)| error.is_retryable())
            }
            CacheError::Config(_)
            | CacheError::AlreadyOpen { .. }
            | CacheError::Closed { .. }
            | CacheError::Token { .. }
            | CacheError::ConfigMismatch { .. }
            | CacheError::Term(_)
            | CacheError::Pattern(_)
            | CacheError::RecordTooShort { .. }
            | CacheError::Arity { .. }
            | CacheError::TooLarge { .. }
            | CacheError::KeyIsNotPartition { .. }
            | CacheError::WriteLost { .. }
            | CacheError::Malformed { .. }
            | CacheError::Draining
            | CacheError::Stopped
            | CacheError::Interrupted
            | CacheError::Uncounted { .. } => false,
        }
    }

    /// Whether the operation has changed anything.
    pub fn applied(&self) -> Applied {
        match self {
            CacheError::Unreachable { applied, .. } | CacheError::Timeout { applied } => *applied,
            CacheError::NotEnoughAcks { .. } | CacheError::Malformed { .. } | CacheError::Interrupted => {
                Applied::Unknown
            }
            CacheError::Partial { found: Found::Removed(_), .. } => Applied::Unknown,
            CacheError::Uncounted { .. } => Applied::Yes,
            CacheError::Batch { applied, failed, .. } => {
                let nothing = *applied == 0 && failed.iter().all(|(_, error)| error.applied() == Applied::No);
                if nothing { Applied::No } else { Applied::Unknown }
            }
            CacheError::Config(_)
            | CacheError::AlreadyOpen { .. }
            | CacheError::Closed { .. }
            | CacheError::Token { .. }
            | CacheError::ConfigMismatch { .. }
            | CacheError::Term(_)
            | CacheError::Pattern(_)
            | CacheError::RecordTooShort { .. }
            | CacheError::Arity { .. }
            | CacheError::TooLarge { .. }
            | CacheError::KeyIsNotPartition { .. }
            | CacheError::WrongOwner { .. }
            | CacheError::StaleEpoch { .. }
            | CacheError::NotActive { .. }
            | CacheError::NoQuorum { .. }
            | CacheError::WriteLost { .. }
            | CacheError::Partial { .. }
            | CacheError::Busy
            | CacheError::Draining
            | CacheError::Stopped => Applied::No,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::Incarnation;

    fn partition(id: u32) -> PartitionId {
        PartitionId::new(id)
    }

    fn node() -> NodeId {
        NodeId::new("n1").unwrap()
    }

    fn epoch(counter: u64) -> Epoch {
        Epoch::new(counter, Peer::new(node(), Incarnation::MIN))
    }

    #[test]
    fn messages_name_what_happened() {
        for (error, text) in [
            (
                CacheError::NotEnoughAcks { got: 1, need: 2 },
                "1 of 2 nodes confirmed the write; it may have been applied or not",
            ),
            (
                CacheError::WrongOwner { partition: partition(3), primary: None, epoch: None },
                "partition 3 is served by nobody known",
            ),
            (
                CacheError::StaleEpoch { partition: partition(3), given: epoch(1), current: epoch(2) },
                "epoch 1@n1#1 of partition 3 is over; it is in 2@n1#1",
            ),
            (
                CacheError::Partial {
                    found: Found::Records(vec![]),
                    missing: (0..10).map(|id| (partition(id), CacheError::Busy)).collect(),
                },
                "10 partitions did not answer: 0, 1, 2, 3, 4, 5, 6, 7, .. (the first: nothing has changed: too many \
                 operations wait; try again when some are done)",
            ),
            (
                CacheError::Batch {
                    applied: 4,
                    refused: vec![(2, CacheError::Arity { given: 1, allowed: 2 })],
                    failed: vec![(partition(7), CacheError::Busy)],
                },
                "4 records of the batch were applied; 1 were refused (the first, at 2: nothing has changed: the \
                 record has 1 fields; 2 are allowed (arity)); it failed in partitions 7 (the first: nothing has changed: too many operations wait; try again when some are done)",
            ),
        ] {
            assert_eq!(error.to_string(), text);
        }
    }

    #[test]
    fn what_may_have_changed_is_never_called_unchanged() {
        let unreachable =
            |applied| CacheError::Unreachable { partition: partition(1), node: node(), applied };
        assert_eq!(unreachable(Applied::Unknown).applied(), Applied::Unknown);
        assert_eq!(unreachable(Applied::No).applied(), Applied::No);
        assert_eq!(CacheError::NotEnoughAcks { got: 1, need: 2 }.applied(), Applied::Unknown);
        assert_eq!(CacheError::NoQuorum { got: 1, need: 2 }.applied(), Applied::No);
        assert_eq!(CacheError::Uncounted { at_least: 1, version: None }.applied(), Applied::Yes);
        let batch = |applied, error| CacheError::Batch {
            applied,
            refused: vec![],
            failed: vec![(partition(1), error)],
        };
        assert_eq!(batch(0, CacheError::Busy).applied(), Applied::No);
        assert_eq!(batch(1, CacheError::Busy).applied(), Applied::Unknown);
        assert_eq!(batch(0, unreachable(Applied::Unknown)).applied(), Applied::Unknown);
    }

    #[test]
    fn only_what_may_pass_by_itself_is_retryable() {
        assert!(CacheError::Busy.is_retryable());
        assert!(CacheError::Timeout { applied: Applied::Unknown }.is_retryable());
        assert!(!CacheError::Stopped.is_retryable());
        assert!(!CacheError::Term(TermError::NotANumber).is_retryable());
        let batch =
            |error| CacheError::Batch { applied: 1, refused: vec![], failed: vec![(partition(1), error)] };
        assert!(batch(CacheError::Busy).is_retryable());
        assert!(!batch(CacheError::Stopped).is_retryable());
        let version = Version::new(epoch(1), 7);
        let lost = CacheError::WriteLost { partition: partition(1), version };
        let partial = |error| CacheError::Partial {
            found: Found::Records(Vec::new()),
            missing: vec![(partition(1), CacheError::Busy), (partition(2), error)],
        };
        assert!(partial(CacheError::Timeout { applied: Applied::No }).is_retryable());
        assert!(!partial(lost).is_retryable(), "it says so until the session forgets the write");
    }

    #[test]
    fn an_error_goes_over_the_wire() {
        for error in [
            CacheError::Pattern(PatternError::Arity { given: 2, held: vec![3] }),
            CacheError::StaleEpoch { partition: partition(3), given: epoch(1), current: epoch(2) },
            CacheError::Partial {
                found: Found::Bindings(vec![vec![1.into()]]),
                missing: vec![(partition(1), CacheError::Busy)],
            },
            CacheError::Uncounted { at_least: 2, version: Some(Version::new(epoch(1), 7)) },
            CacheError::Batch {
                applied: 1,
                refused: vec![(3, CacheError::Draining)],
                failed: vec![(partition(2), CacheError::Stopped)],
            },
        ] {
            let bytes = postcard::to_stdvec(&error).unwrap();
            assert_eq!(postcard::from_bytes::<CacheError>(&bytes).unwrap(), error);
        }
    }
}
