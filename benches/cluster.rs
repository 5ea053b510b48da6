//! Real processes over TCP on loopback, each figure beside its floor of the same run. This program is the conductor;
//! started again with `MUSTER_BENCH_CHILD` it is a node, or the bare end of a floor.
//!
//! `cargo bench --features tcp --bench cluster -- latency` runs the rows of one name.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs, reason = "a bench")]

mod support;

#[cfg(feature = "tcp")]
#[path = "cluster/mod.rs"]
mod cluster;

fn main() {
    #[cfg(feature = "tcp")]
    cluster::main();
    #[cfg(not(feature = "tcp"))]
    again_with_tcp();
}

/// So that a plain `cargo bench` prints the whole table.
#[cfg(not(feature = "tcp"))]
fn again_with_tcp() {
    let mut cargo = std::process::Command::new(env!("CARGO"));
    cargo.args(["bench", "--features", "tcp", "--bench", "cluster", "--"]);
    cargo.args(std::env::args().skip(1).filter(|arg| arg != "--bench"));
    cargo.env(support::report::RUN, support::report::run()).current_dir(env!("CARGO_MANIFEST_DIR"));
    let ended = cargo.status().expect("cargo runs");
    std::process::exit(ended.code().unwrap_or(1));
}
