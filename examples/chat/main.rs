//! A chat on a cluster, in one process or several. `cargo run --release --example chat -- --help` says how.

use std::process::ExitCode;
use std::sync::Arc;

mod app;

use app::cli::{self, Options, Task};
use app::cluster::Cluster;
#[cfg(feature = "tcp")]
use app::one;
use app::stage::Place;
use app::{Failure, check, drive, replay};

fn main() -> ExitCode {
    let options = match cli::parse(std::env::args().skip(1)) {
        Ok(options) => options,
        Err(error) => {
            eprintln!("chat: {error}\n\n{}", cli::HELP);
            return ExitCode::from(2);
        }
    };
    tracing_subscriber::fmt().with_env_filter(log_filter()).with_writer(std::io::stderr).init();
    let runtime = match tokio::runtime::Runtime::new() {
        Ok(runtime) => runtime,
        Err(error) => {
            eprintln!("chat: no runtime: {error}");
            return ExitCode::FAILURE;
        }
    };
    match runtime.block_on(run(options)) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("chat: {error}");
            ExitCode::FAILURE
        }
    }
}

async fn run(options: Options) -> Result<ExitCode, Failure> {
    let report = match options.task {
        Task::Help => {
            print!("{}", cli::HELP);
            return Ok(ExitCode::SUCCESS);
        }
        #[cfg(feature = "tcp")]
        Task::Node(ref node) => {
            one::run(node, options.ports).await?;
            return Ok(ExitCode::SUCCESS);
        }
        Task::Serve { ref replay } => {
            let replay = replay.clone();
            let cluster = start(&options).await?;
            serve(&cluster, replay).await?;
            cluster.shutdown().await;
            return Ok(ExitCode::SUCCESS);
        }
        Task::Check => {
            let (nodes, place) = (options.nodes, options.place.clone());
            check::run(&check::Plan { nodes, place, ..check::Plan::default() }).await?
        }
        Task::CheckReplay { ref file } => {
            let cluster = start(&options).await?;
            replay::run(file, cluster).await?
        }
    };
    println!("{report}");
    Ok(if report.passed() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// All nodes in this process.
async fn start(options: &Options) -> Result<Arc<Cluster>, Failure> {
    match options.place {
        #[cfg(feature = "tcp")]
        Place::Tcp | Place::Processes { .. } => Cluster::start_tcp(options.nodes, options.ports).await,
        #[cfg(feature = "nats")]
        Place::Nats { ref url } => Cluster::start_nats(options.nodes, options.ports, url.clone()).await,
        Place::Memory => Cluster::start(options.nodes, options.ports).await,
    }
}

async fn serve(cluster: &Arc<Cluster>, replay: Option<(std::path::PathBuf, f64)>) -> Result<(), Failure> {
    println!("The chat runs; open two of these and talk (Ctrl-C ends it):");
    for (name, address) in cluster.addresses() {
        println!("  {name}  http://{address}/");
    }
    let driven = async {
        match replay {
            Some((file, speed)) => drive::run(cluster, &file, speed).await,
            None => std::future::pending().await,
        }
    };
    tokio::select! {
        result = driven => {
            result?;
            println!("The trace has ended; the chat goes on.");
            Ok(tokio::signal::ctrl_c().await?)
        }
        end = tokio::signal::ctrl_c() => Ok(end?),
    }
}

/// Warnings are shown, or what `RUST_LOG` says: a node that is refused has to be seen.
fn log_filter() -> tracing_subscriber::EnvFilter {
    tracing_subscriber::EnvFilter::builder()
        .with_default_directive(tracing_subscriber::filter::LevelFilter::WARN.into())
        .from_env_lossy()
}
