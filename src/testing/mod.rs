//! For tests of this crate and of servers that are built on it: a simulated cluster and its oracle.

pub mod oracle;
pub mod sim;
