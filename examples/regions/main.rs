//! Two regions, a scope each, and gateways between them. `cargo run --release --example regions` shows it, with
//! `-- --check` it runs a bounded scenario in which both clusters change, and counts every delivery. The guide
//! `muster_router::guide::regions` explains it.

use std::process::ExitCode;

mod app;

use app::check::{self, Plan};

const HELP: &str = "usage: regions [--check] [--rounds N]
  without --check: one short round, told as it happens
  --check          more of it, quietly; exits with 1 if a delivery is missing or came twice
  --rounds N       how often both clusters change (6; with --check 18)";

fn main() -> ExitCode {
    let mut plan = Plan { tell: true, rounds: 6, ..Plan::default() };
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--check" => plan = Plan::default(),
            "--rounds" => match arguments.next().and_then(|rounds| rounds.parse().ok()) {
                Some(rounds) => plan.rounds = rounds,
                None => return usage("--rounds needs a number"),
            },
            "--help" | "-h" => {
                println!("{HELP}");
                return ExitCode::SUCCESS;
            }
            other => return usage(&format!("unknown: {other}")),
        }
    }
    let runtime = match tokio::runtime::Runtime::new() {
        Ok(runtime) => runtime,
        Err(error) => {
            eprintln!("regions: no runtime: {error}");
            return ExitCode::FAILURE;
        }
    };
    match runtime.block_on(check::run(&plan)) {
        Ok(report) => {
            println!("{report}");
            if report.passed() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
        }
        Err(error) => {
            eprintln!("regions: {error}");
            ExitCode::FAILURE
        }
    }
}

fn usage(error: &str) -> ExitCode {
    eprintln!("regions: {error}\n\n{HELP}");
    ExitCode::from(2)
}
