//! The data of the partitioned cache: terms and records, patterns, options, errors, and the versioned store of one
//! partition. All of it is pure: no IO, no clock, no randomness.
//!
//! * [`Term`] and [`Record`] are what is kept; [`to_term`], [`from_term`] and [`record!`](crate::record) make them.

pub mod term;

pub use term::{MAX_TERM_DEPTH, Record, Term, TermError, from_term, to_term};
