//! Who speaks, about what, and in which order: the identities of the protocol.

use std::borrow::Borrow;
use std::fmt;
use std::num::NonZeroU64;
use std::sync::Arc;

use serde::{Deserialize, Deserializer, Serialize};

/// The longest [`NodeId`], in bytes.
pub const MAX_NODE_ID_LEN: usize = 255;

/// Why a name was refused. Nothing has changed when this is returned.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NameError {
    /// A node id has to be 1 to 255 bytes long.
    #[error("a node id of {given} bytes was given; 1 to {MAX_NODE_ID_LEN} bytes are allowed")]
    NodeIdLength {
        /// How many bytes the id had.
        given: usize,
    },
    /// A group name has to be 1 to `max` bytes long.
    #[error("a group name of {given} bytes was given; 1 to {max} bytes are allowed")]
    GroupLength {
        /// How many bytes the name had.
        given: usize,
        /// The longest name that this scope allows (`Config::max_group_len`).
        max: usize,
    },
}

/// The stable name of a node: UTF-8, 1 to 255 bytes, ordered by its bytes.
///
/// ```
/// use muster_router::NodeId;
/// let node = NodeId::new("chat-1")?;
/// assert_eq!(node.as_str(), "chat-1");
/// assert!(NodeId::new("").is_err());
/// # Ok::<(), muster_router::NameError>(())
/// ```
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(transparent)]
pub struct NodeId(Arc<str>);

impl NodeId {
    /// Takes a name.
    ///
    /// # Errors
    /// [`NameError::NodeIdLength`] if it is empty or longer than 255 bytes.
    pub fn new(name: impl AsRef<str>) -> Result<Self, NameError> {
        let name = name.as_ref();
        if name.is_empty() || name.len() > MAX_NODE_ID_LEN {
            return Err(NameError::NodeIdLength { given: name.len() });
        }
        Ok(Self(name.into()))
    }

    /// Stands where a name was refused.
    pub(crate) fn unnamed() -> Self {
        Self("?".into())
    }

    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The name as bytes, the order and the hash input of everything that names nodes.
    pub fn as_bytes(&self) -> &[u8] {
        self.0.as_bytes()
    }
}

impl<'de> Deserialize<'de> for NodeId {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        // not by way of a `String`: that would be a second allocation for each name that comes in
        struct Visitor;
        impl serde::de::Visitor<'_> for Visitor {
            type Value = NodeId;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("the name of a node")
            }
            fn visit_str<E: serde::de::Error>(self, name: &str) -> Result<NodeId, E> {
                NodeId::new(name).map_err(E::custom)
            }
        }
        deserializer.deserialize_str(Visitor)
    }
}

impl fmt::Display for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", &*self.0)
    }
}

impl Borrow<str> for NodeId {
    fn borrow(&self) -> &str {
        &self.0
    }
}

impl AsRef<str> for NodeId {
    fn as_ref(&self) -> &str {
        &self.0
    }
}

impl TryFrom<&str> for NodeId {
    type Error = NameError;
    fn try_from(name: &str) -> Result<Self, NameError> {
        Self::new(name)
    }
}

impl TryFrom<String> for NodeId {
    type Error = NameError;
    fn try_from(name: String) -> Result<Self, NameError> {
        Self::new(name)
    }
}

/// Tells two lives of one [`NodeId`] apart: never zero, higher in every later life.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Incarnation(NonZeroU64);

impl Incarnation {
    /// The lowest incarnation.
    pub const MIN: Self = Self(NonZeroU64::MIN);

    /// `None` for zero.
    pub fn new(value: u64) -> Option<Self> {
        NonZeroU64::new(value).map(Self)
    }

    /// The number.
    pub fn get(self) -> u64 {
        self.0.get()
    }

    /// The next higher incarnation (the highest stays itself).
    pub fn next(self) -> Self {
        Self(self.0.saturating_add(1))
    }
}

impl fmt::Display for Incarnation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

impl fmt::Debug for Incarnation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

/// One life of one node. Everything a node says is said by a peer, never by a bare name.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Peer {
    /// The stable name.
    pub node: NodeId,
    /// Which life of it.
    pub incarnation: Incarnation,
}

impl Peer {
    /// One life of `node`.
    pub fn new(node: NodeId, incarnation: Incarnation) -> Self {
        Self { node, incarnation }
    }

    /// Whether it is equal because it is a clone of the same name, which is cheap to see. `false` tells nothing.
    pub(crate) fn is_very(&self, other: &Self) -> bool {
        self.incarnation == other.incarnation && Arc::ptr_eq(&self.node.0, &other.node.0)
    }
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}#{}", self.node, self.incarnation)
    }
}

impl fmt::Debug for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The name of a group: opaque bytes, compared byte by byte (no normalising, no end at NUL).
///
/// How long it may be is an option of the scope (`Config::max_group_len`), checked where a call keeps
/// a name. Cloning copies no bytes.
///
/// ```
/// use muster_router::Group;
/// assert_eq!(Group::from("room:1"), Group::from(b"room:1".as_slice()));
/// ```
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Group(Arc<[u8]>);

impl Group {
    /// The bytes of the name.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// Checks the length against the scope's limit.
    ///
    /// # Errors
    /// [`NameError::GroupLength`] naming the length and the limit.
    pub fn check(&self, max: usize) -> Result<(), NameError> {
        if self.0.is_empty() || self.0.len() > max {
            return Err(NameError::GroupLength { given: self.0.len(), max });
        }
        Ok(())
    }
}

impl<T: AsRef<[u8]> + ?Sized> From<&T> for Group {
    fn from(name: &T) -> Self {
        Self(name.as_ref().into())
    }
}

impl From<String> for Group {
    fn from(name: String) -> Self {
        Self(name.into_bytes().into())
    }
}

impl From<Vec<u8>> for Group {
    fn from(name: Vec<u8>) -> Self {
        Self(name.into())
    }
}

impl From<bytes::Bytes> for Group {
    fn from(name: bytes::Bytes) -> Self {
        Self(name.as_ref().into())
    }
}

impl Borrow<[u8]> for Group {
    fn borrow(&self) -> &[u8] {
        &self.0
    }
}

impl AsRef<[u8]> for Group {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl Serialize for Group {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_bytes(&self.0)
    }
}

impl<'de> Deserialize<'de> for Group {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;
        impl<'de> serde::de::Visitor<'de> for Visitor {
            type Value = Group;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("the bytes of a group name")
            }
            fn visit_bytes<E: serde::de::Error>(self, name: &[u8]) -> Result<Group, E> {
                Ok(Group(name.into()))
            }
            fn visit_str<E: serde::de::Error>(self, name: &str) -> Result<Group, E> {
                Ok(Group(name.as_bytes().into()))
            }
        }
        deserializer.deserialize_bytes(Visitor)
    }
}

impl fmt::Display for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0.escape_ascii(), f)
    }
}

impl fmt::Debug for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.0.escape_ascii().to_string())
    }
}

/// The place of one statement among all that one peer says; versions of different peers are never
/// compared. Ordered by incarnation, then by sequence number.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Version {
    /// The life of the peer that says it.
    pub incarnation: Incarnation,
    /// The how-manieth of its statements it is, from 1.
    pub seq: u64,
}

impl Version {
    /// The `seq`-th statement of a life.
    pub fn new(incarnation: Incarnation, seq: u64) -> Self {
        Self { incarnation, seq }
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.incarnation, self.seq)
    }
}

impl fmt::Debug for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A member of groups: the peer it lives on and a number that is its own there.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct MemberId {
    /// The node, in the life, that owns the member.
    pub peer: Peer,
    /// Which member of that peer.
    pub number: u64,
}

impl MemberId {
    /// The member `number` of `peer`.
    pub fn new(peer: Peer, number: u64) -> Self {
        Self { peer, number }
    }
}

impl fmt::Display for MemberId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.peer, self.number)
    }
}

impl fmt::Debug for MemberId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Names one broadcast in the whole cluster; receivers use it to drop second copies.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct BroadcastId {
    /// The peer where it began.
    pub origin: Peer,
    /// The how-manieth broadcast of that peer it is, from 1.
    pub seq: u64,
}

impl BroadcastId {
    /// The `seq`-th broadcast of `origin`.
    pub fn new(origin: Peer, seq: u64) -> Self {
        Self { origin, seq }
    }
}

impl fmt::Display for BroadcastId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.origin, self.seq)
    }
}

impl fmt::Debug for BroadcastId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
