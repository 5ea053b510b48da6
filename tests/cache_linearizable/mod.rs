//! Whole caches in virtual time with faults, what their clients did, and the judges of it.

pub(crate) mod cluster;
pub(crate) mod history;
pub(crate) mod run;
pub(crate) mod survive;
