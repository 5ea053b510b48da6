//! Which subjects a scope uses.
//!
//! ```text
//! <prefix>.<scope>.presence                       who is there: every node hears it
//! <prefix>.<scope>.name.<node>                    held by the one node of that name, while it lives
//! <prefix>.<scope>.node.<node>.<life>.<lane>      what is for this life of this node; lane: control, data, bulk
//! ```
//!
//! Scopes and nodes may have any UTF-8 name; a subject's token may not. A name of letters, digits, `-` and `_`
//! stands for itself, any other is written as its hash. Two names of one hash would share a subject and still not
//! be mixed up: a life's number is part of its subjects, and the handshake of a link compares the full names.

use async_nats::Subject;

use crate::transport::Lane;
use crate::types::NodeId;

/// The longest name that stands for itself.
const MAX_PLAIN: usize = 64;
/// The longest prefix, in bytes: a server takes control lines of 4096 bytes.
pub(super) const MAX_PREFIX: usize = 256;

const NOBODY: &str = "nobody-";

/// The number behind [`Subjects::nobody`].
pub(super) fn nobody_at(subject: &str) -> Option<u64> {
    subject.rsplit('.').next()?.strip_prefix(NOBODY)?.parse().ok()
}

/// One life of a node, as others address it: drawn at random at every start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
pub(super) struct LifeId(pub(super) u64);

/// The subjects of one scope.
#[derive(Clone, Debug)]
pub(super) struct Subjects {
    base: String,
}

impl Subjects {
    pub(super) fn new(prefix: &str, scope: &str) -> Self {
        Self { base: format!("{prefix}.{}", token(scope)) }
    }

    pub(super) fn presence(&self) -> Subject {
        format!("{}.presence", self.base).into()
    }

    pub(super) fn name(&self, node: &NodeId) -> Subject {
        format!("{}.name.{}", self.base, token(node.as_str())).into()
    }

    /// Everything that is for one life of a node. One subscription: what one node sends stays in order.
    pub(super) fn everything_for(&self, node: &NodeId, life: LifeId) -> Subject {
        format!("{}.*", self.of(node, life)).into()
    }

    /// By [`Lane::index`].
    pub(super) fn lanes(&self, node: &NodeId, life: LifeId) -> [Subject; 3] {
        let base = self.of(node, life);
        Lane::ALL.map(|lane| {
            let lane = match lane {
                Lane::Control => "control",
                Lane::Data => "data",
                Lane::Bulk => "bulk",
            };
            format!("{base}.{lane}").into()
        })
    }

    /// What the reply subjects of this life begin with; a number of it follows. The server answers there at once if
    /// nobody listens where a message was sent.
    pub(super) fn nobody(&self, node: &NodeId, life: LifeId) -> String {
        format!("{}.{NOBODY}", self.of(node, life))
    }

    fn of(&self, node: &NodeId, life: LifeId) -> String {
        format!("{}.node.{}.{:016x}", self.base, token(node.as_str()), life.0)
    }
}

fn token(name: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_';
    if !name.is_empty() && name.len() <= MAX_PLAIN && name.bytes().all(plain) {
        return name.to_owned();
    }
    // no plain name begins with this
    format!("~{:032x}", xxhash_rust::xxh3::xxh3_128(name.as_bytes()))
}

/// Why a prefix cannot be used, if so.
pub(super) fn refuse_prefix(prefix: &str) -> Option<&'static str> {
    if prefix.is_empty() || prefix.len() > MAX_PREFIX {
        return Some("1 to 256 bytes are allowed");
    }
    if prefix.starts_with('$') || prefix.starts_with('_') {
        return Some("a leading `$` or `_` is reserved by NATS");
    }
    let fine = |token: &str| {
        !token.is_empty() && token.bytes().all(|byte| byte.is_ascii_graphic() && !matches!(byte, b'*' | b'>'))
    };
    if !prefix.split('.').all(fine) {
        return Some("tokens of printable ASCII without `*` and `>`, separated by single dots, are allowed");
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn node(name: &str) -> NodeId {
        NodeId::new(name).unwrap()
    }

    #[test]
    fn the_subjects_of_plain_names_can_be_read() {
        let subjects = Subjects::new("muster", "chat");
        assert_eq!(subjects.presence().as_str(), "muster.chat.presence");
        assert_eq!(subjects.name(&node("a-1")).as_str(), "muster.chat.name.a-1");
        let lanes = subjects.lanes(&node("a-1"), LifeId(255));
        assert_eq!(lanes[0].as_str(), "muster.chat.node.a-1.00000000000000ff.control");
        assert_eq!(lanes[2].as_str(), "muster.chat.node.a-1.00000000000000ff.bulk");
        let nobody = format!("{}17", subjects.nobody(&node("a-1"), LifeId(255)));
        assert_eq!(nobody, "muster.chat.node.a-1.00000000000000ff.nobody-17");
        assert_eq!(nobody_at(&nobody), Some(17));
        assert_eq!(nobody_at(lanes[0].as_str()), None);
    }

    #[test]
    fn names_that_only_look_alike_have_subjects_of_their_own() {
        let names =
            ["a.b", "a b", "a>b", "a*b", "a\nb", "ä", "a\u{308}", "~a", "A.B", &"x".repeat(65), "a_b"];
        let tokens: std::collections::BTreeSet<String> = names.iter().map(|name| token(name)).collect();
        assert_eq!(tokens.len(), names.len());
    }

    #[test]
    fn prefixes() {
        for fine in ["muster", "team.muster", "a-b.c_d", "~x"] {
            assert_eq!(refuse_prefix(fine), None, "{fine}");
        }
        let long = "x".repeat(257);
        for bad in ["", ".", "a.", ".a", "a..b", "a b", "a.*", "a.>", "$SYS", "_INBOX", "ä", "a\tb", &long] {
            assert!(refuse_prefix(bad).is_some(), "{bad}");
        }
    }

    proptest! {
        #[test]
        fn every_name_gives_a_valid_token(name in "\\PC{1,80}|[\\x00-\\x20.*>]{1,20}") {
            let token = token(&name);
            prop_assert!(token.len() <= MAX_PLAIN);
            prop_assert!(token.bytes().all(|b| b.is_ascii_graphic() && !matches!(b, b'.' | b'*' | b'>')));
            let subjects = Subjects::new("muster", &name);
            prop_assert!(subjects.everything_for(&NodeId::new(&name).unwrap(), LifeId(1)).is_valid());
            prop_assert!(subjects.presence().is_valid());
        }
    }
}
