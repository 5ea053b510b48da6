//! For tests of this crate and of servers that are built on it: the rules of a transport, a simulated
//! cluster and its oracle.

#[cfg(feature = "cache")]
pub mod cache;
pub mod conformance;
pub mod fuzz;
pub mod oracle;
pub mod sim;

use crate::node::message::{DataMessage, Message};
use crate::transport::wire;

/// The head of a control or bulk frame, as it travels; `None` for what cannot be encoded, which no message is.
pub fn control_head(message: &Message) -> Option<bytes::Bytes> {
    wire::encode_control(message)
}

/// The head of a data frame, as it travels.
pub fn data_head(message: &DataMessage) -> Option<bytes::Bytes> {
    wire::encode_data(message)
}
