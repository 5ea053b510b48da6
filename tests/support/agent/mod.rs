//! Nodes in processes of their own, for tests that kill, freeze and cut them.
//!
//! ```text
//!   test ── Lab ── Agent ── pipe, JSON lines ──▶ the same test binary again, as one node (child)
//!             └── Ledger: who sent what when, who had to get it, who did
//! ```
//!
//! A child is the test binary itself, run for the one test that calls [`child::main_if_asked`]. It ends when its
//! standard input ends, so no child outlives its test.
#![allow(
    dead_code,
    unreachable_pub,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "shared by several tests; what is not as expected fails the test"
)]

pub mod child;
pub mod lab;
pub mod ledger;
pub mod process;
pub mod words;
