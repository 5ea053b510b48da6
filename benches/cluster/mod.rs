//! The conductor, its nodes and its floors.

mod bare;
mod cache;
mod faults;
mod lab;
mod node;
mod process;
mod replay;
mod rows;
mod words;

use crate::support::report::Report;

use words::{Nanos, now};

pub(crate) fn main() {
    match std::env::var(process::CHILD).as_deref() {
        Ok("node") => node::main(),
        Ok(_) => bare::main(),
        Err(_) => conduct(),
    }
}

fn conduct() {
    let mut report = Report::new("cluster");
    let bare = bare::Bare::start();
    rows::joins(&mut report, &bare);
    rows::broadcasts(&mut report, &bare);
    rows::latency(&mut report, &bare);
    rows::fan_out(&mut report, &bare);
    rows::rebalance(&mut report, &bare, 100_000);
    if crate::support::full() {
        rows::rebalance(&mut report, &bare, 1_000_000);
    }
    faults::kill(&mut report, &bare);
    faults::freeze(&mut report);
    faults::drain(&mut report, &bare);
    rows::trace(&mut report, &bare);
    cache::rows(&mut report, &bare);
    report.finish();
}

/// A wish for so many of them, or for a few if the run only shows that everything works.
fn many(count: usize, smoke: usize) -> usize {
    if crate::support::smoke() { smoke } else { count }
}

/// Before the moment by so much a sleeper wakes, and waits for the rest on the processor: sleep itself is late.
const EARLY: Nanos = 100_000;

fn wait_until(due: Nanos) {
    loop {
        match due.saturating_sub(now()) {
            0 => return,
            left if left > EARLY => std::thread::sleep(std::time::Duration::from_nanos(left - EARLY)),
            _ => std::hint::spin_loop(),
        }
    }
}
