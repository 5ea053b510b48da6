//! For tests of this crate and of servers that are built on it: the rules of a transport, a simulated
//! cluster and its oracle.

#[cfg(feature = "cache")]
pub mod cache;
pub mod conformance;
pub mod fuzz;
pub mod oracle;
pub mod sim;
