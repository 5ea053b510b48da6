//! What nodes tell each other below the router: messages over a link that are not frames.
//!
//! ```text
//! | version: u8 | kind: u8 | fields, in postcard |
//! ```
//!
//! Kind 0 is a [`Notice`]. Another version or kind is ignored and counted: a newer node may say more than we
//! understand. Decoding never panics and allocates no more than a small multiple of the message's own length.

use std::net::SocketAddr;

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use crate::types::NodeId;

/// The version of these messages.
const VERSION: u8 = 1;
const NOTICE: u8 = 0;

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
pub(super) enum Heard {
    Notice(Notice),
}

/// Why a message was not understood.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ignored {
    /// Of a version or a kind that this version does not have.
    Unknown,
    /// It makes no sense, or is longer or says more than is allowed.
    Malformed,
}

impl Notice {
    /// The message; `None` if it cannot be encoded, which no notice within the bounds is.
    pub(super) fn encode(&self) -> Option<Bytes> {
        postcard::to_extend(self, vec![VERSION, NOTICE]).ok().map(Bytes::from)
    }
}

/// What the message says.
pub(super) fn decode(message: &[u8]) -> Result<Heard, Ignored> {
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
        _ => Err(Ignored::Unknown),
    }
}
