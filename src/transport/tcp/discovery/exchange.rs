//! What nodes tell each other below the router: messages over a link that are not frames.
//!
//! ```text
//! | version: u8 | kind: u8 | fields, in postcard |
//! ```
//!
//! Kind 0 is a [`Notice`], kind 1 is gossip. Another version or kind is ignored and counted: a newer node may say more than we
//! understand. Decoding never panics and allocates no more than a small multiple of the message's own length.

use std::net::SocketAddr;

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use crate::types::NodeId;

/// The version of these messages.
const VERSION: u8 = 1;
const NOTICE: u8 = 0;
const GOSSIP: u8 = 1;

/// No message is longer; a longer one is dropped and counted.
pub(crate) const MAX_MESSAGE_LEN: usize = 64 * 1024;
/// No notice says more, so that it is never longer: a name has at most 255 bytes, an address about 20.
pub(super) const MAX_NOTICE_ENTRIES: usize = 200;

/// To whom the sender is linked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Notice {
    /// Forget what I told before: it begins anew.
    pub(super) first: bool,
    /// These are linked, under the addresses that they advertise.
    pub(super) linked: Vec<(NodeId, SocketAddr)>,
    /// These are no longer.
    pub(super) gone: Vec<NodeId>,
}

/// What a message says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Heard<'a> {
    Notice(Notice),
    Gossip(&'a [u8]),
}

/// Why a message was not understood.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ignored {
    /// Of a version or a kind that this version does not have.
    Unknown,
    /// It makes no sense, or is longer or says more than is allowed.
    Malformed,
    /// It names more nodes than there is room for.
    #[cfg_attr(not(feature = "gossip"), allow(dead_code, reason = "only gossip is refused whole"))]
    Overflow,
}

impl Notice {
    /// The message; `None` if it cannot be encoded, which no notice within the bounds is.
    pub(super) fn encode(&self) -> Option<Bytes> {
        postcard::to_extend(self, vec![VERSION, NOTICE]).ok().map(Bytes::from)
    }
}

/// A message of gossip.
pub(super) fn gossip(data: &[u8]) -> Bytes {
    [&[VERSION, GOSSIP], data].concat().into()
}

/// What the message says.
pub(super) fn decode(message: &[u8]) -> Result<Heard<'_>, Ignored> {
    if message.len() > MAX_MESSAGE_LEN {
        return Err(Ignored::Malformed);
    }
    let Some((&[version, kind], fields)) = message.split_first_chunk::<2>() else {
        return Err(Ignored::Malformed);
    };
    match (version, kind) {
        (VERSION, NOTICE) => match postcard::take_from_bytes::<Notice>(fields) {
            Ok((notice, [])) if notice.linked.len() + notice.gone.len() <= MAX_NOTICE_ENTRIES => {
                Ok(Heard::Notice(notice))
            }
            Ok(_) | Err(_) => Err(Ignored::Malformed),
        },
        (VERSION, GOSSIP) => Ok(Heard::Gossip(fields)),
        _ => Err(Ignored::Unknown),
    }
}
