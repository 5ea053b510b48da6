//! How cache messages become bytes: postcard, one message after another. A frame holds any number of them, so that what
//! many partitions say to one peer travels together.
//!
//! # How a driver combines
//! It takes all effects that are there, appends each message with [`encode`] to the buffer of its peer and lane, and
//! hands a buffer over when there are no more effects or when it has grown beyond what one frame should have. Order
//! within a peer and lane is kept by that. The receiver gives every message of [`decode`] to its node in order.
//!
//! # Hostile bytes
//! Decoding never panics, and holds no more than a small multiple of the length of the bytes. Nothing in a message
//! nests without a bound: terms and patterns count their depth, and an error that holds other errors is refused, for no
//! single operation ends with one.

use crate::cache::error::{CacheError, Found};
use crate::cache::operation::Reply;

use super::message::CacheMessage;

/// Why bytes are no messages, or a message has no bytes. It is logged and counted, and the frame ignored.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CodecError {
    /// Not what any message is written as.
    #[error("a frame of the cache cannot be read: {reason}")]
    Malformed {
        /// In what way.
        reason: String,
    },
    /// A message holds what has no encoding.
    #[error("a message of the cache cannot be written: {reason}")]
    Unwritable {
        /// In what way.
        reason: String,
    },
}

/// Appends a message.
///
/// # Errors
/// [`CodecError::Unwritable`]; nothing is appended then.
pub fn encode(message: &CacheMessage, out: &mut Vec<u8>) -> Result<(), CodecError> {
    let length = out.len();
    if let Err(error) = postcard::to_io(message, &mut *out) {
        out.truncate(length);
        return Err(CodecError::Unwritable { reason: error.to_string() });
    }
    Ok(())
}

/// Reads all messages of a frame.
///
/// # Errors
/// [`CodecError::Malformed`] if any of them cannot be read; none is given then.
pub fn decode(bytes: &[u8]) -> Result<Vec<CacheMessage>, CodecError> {
    let (mut messages, mut rest) = (Vec::new(), bytes);
    while !rest.is_empty() {
        let (message, after) = postcard::take_from_bytes(rest)
            .map_err(|error| CodecError::Malformed { reason: error.to_string() })?;
        messages.push(message);
        rest = after;
    }
    Ok(messages)
}

/// Results on the wire: an error is written as bytes of its own, so that the reader can refuse one that nests before it
/// has read it.
pub(super) mod answered {
    use std::borrow::Cow;

    use serde::de::Error as _;
    use serde::ser::Error as _;
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    use super::{CacheError, Found, Reply};

    #[derive(Serialize)]
    enum Said<'a> {
        Good(&'a Reply),
        Bad(&'a [u8]),
    }

    #[derive(Deserialize)]
    enum Heard<'a> {
        Good(Reply),
        Bad(#[serde(borrow)] Cow<'a, [u8]>),
    }

    pub(in super::super) fn serialize<S: Serializer>(
        result: &Result<Reply, CacheError>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        match result {
            Ok(reply) => Said::Good(reply).serialize(serializer),
            Err(error) => {
                let bytes = postcard::to_stdvec(error).map_err(S::Error::custom)?;
                Said::Bad(&bytes).serialize(serializer)
            }
        }
    }

    pub(in super::super) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Result<Reply, CacheError>, D::Error> {
        match Heard::deserialize(deserializer)? {
            Heard::Good(reply) => Ok(Ok(reply)),
            Heard::Bad(bytes) => {
                let batch = CacheError::Batch { applied: 0, refused: Vec::new(), failed: Vec::new() };
                let partial = CacheError::Partial { found: Found::Removed(0), missing: Vec::new() };
                for nesting in [batch, partial] {
                    let nesting = postcard::to_stdvec(&nesting).map_err(D::Error::custom)?;
                    if bytes.first() == nesting.first() {
                        return Err(D::Error::custom("an error that holds errors"));
                    }
                }
                postcard::from_bytes(&bytes).map(Err).map_err(D::Error::custom)
            }
        }
    }
}

#[cfg(test)]
#[path = "codec_tests.rs"]
pub(super) mod tests;
