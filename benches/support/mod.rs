//! What all benches share: rows that stand beside their floors, and the one table that they make together.
#![allow(dead_code, reason = "no bench needs all of it")]

pub(crate) mod report;

use std::time::Duration;

/// Whether this run only shows that everything works: `MUSTER_BENCH_SMOKE=1`, or criterion's `--test`.
pub(crate) fn smoke() -> bool {
    std::env::var_os("MUSTER_BENCH_SMOKE").is_some() || std::env::args().any(|arg| arg == "--test")
}

/// Whether the million has its turn, too: `MUSTER_BENCH_FULL=1`.
pub(crate) fn full() -> bool {
    std::env::var_os("MUSTER_BENCH_FULL").is_some()
}

/// The first plain word of the command line: only rows whose names contain it are wanted.
pub(crate) fn filter() -> Option<String> {
    std::env::args().skip(1).find(|arg| !arg.starts_with('-'))
}

/// Whether rows of this name are wanted.
pub(crate) fn wanted(name: &str) -> bool {
    filter().is_none_or(|word| name.contains(&word))
}

/// The middle one; of an even number the upper of the two in the middle.
pub(crate) fn median(values: impl IntoIterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.into_iter().collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

/// One figure and its floor, measured one after the other.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Round {
    pub(crate) ours: f64,
    pub(crate) floor: f64,
}

impl Round {
    pub(crate) fn times(ours: Duration, floor: Duration) -> Self {
        Self { ours: ours.as_secs_f64(), floor: floor.as_secs_f64() }
    }
}
