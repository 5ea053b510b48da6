//! One node of a cluster, for a terminal. Start three, each in its own:
//!
//! ```sh
//! cargo run --features tcp --example node -- --id a --listen 127.0.0.1:7001 --seed 127.0.0.1:7001
//! cargo run --features tcp --example node -- --id b --listen 127.0.0.1:7002 --seed 127.0.0.1:7001
//! cargo run --features tcp --example node -- --id c --listen 127.0.0.1:7003 --seed 127.0.0.1:7001
//! ```
//!
//! Then type `join lobby` in one and `say lobby hello` in another.

use std::collections::HashMap;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use muster_router::transport::tcp::{Secret, TcpTransport, TlsOptions};
use muster_router::{Event, Membership, Message, Muster};
use tokio::sync::mpsc;

type Failure = Box<dyn std::error::Error + Send + Sync>;

const HELP: &str = "\
One node of a cluster.

Usage: node --id NAME --listen HOST:PORT [--seed HOST:PORT]... [options]

  --id NAME            its name; no other live node has it
  --listen HOST:PORT   where others connect to; port 0 takes a free one
  --advertise HOST:PORT what others are told, if they cannot use the address it listens on
  --seed HOST:PORT     a node to meet; may be given several times and may be this one
  --dns HOST:PORT      a name whose addresses are nodes, resolved again every 5 s
  --gossip             members find each other by gossip (feature `gossip`)
  --secret-file FILE   a secret that all nodes share, at least 16 bytes
  --tls-dir DIR        ca.pem, cert.pem and key.pem; the certificate's name is the node's
  --insecure           listen beyond loopback with neither

Then, on standard input:
  join GROUP           get what is said there     say GROUP TEXT       say it to all members
  leave GROUP          get it no more             status               how sure this node is
  members              the nodes of the view      drain                leave the routing to others
  quit                 drain, then end (so does Ctrl-C)
";

/// What was asked for on the command line.
#[derive(Default)]
struct Options {
    id: String,
    listen: String,
    advertise: Option<String>,
    seeds: Vec<String>,
    dns: Option<String>,
    gossip: bool,
    secret_file: Option<PathBuf>,
    tls_dir: Option<PathBuf>,
    insecure: bool,
}

/// `None` asks for the help text.
fn parse(mut arguments: impl Iterator<Item = String>) -> Result<Option<Options>, String> {
    let mut options = Options::default();
    while let Some(option) = arguments.next() {
        let mut value = || arguments.next().ok_or_else(|| format!("{option} needs a value"));
        match option.as_str() {
            "--id" => options.id = value()?,
            "--listen" => options.listen = value()?,
            "--advertise" => options.advertise = Some(value()?),
            "--seed" => options.seeds.push(value()?),
            "--dns" => options.dns = Some(value()?),
            "--secret-file" => options.secret_file = Some(value()?.into()),
            "--tls-dir" => options.tls_dir = Some(value()?.into()),
            "--gossip" => options.gossip = true,
            "--insecure" => options.insecure = true,
            "--help" | "-h" => return Ok(None),
            _ => return Err(format!("unknown option {option:?}")),
        }
    }
    for (name, given) in [("--id", &options.id), ("--listen", &options.listen)] {
        if given.is_empty() {
            return Err(format!("{name} is missing"));
        }
    }
    Ok(Some(options))
}

fn transport(options: &Options) -> Result<TcpTransport, Failure> {
    let mut builder = TcpTransport::builder(&options.id).listen(&options.listen).seeds(&options.seeds);
    if let Some(address) = &options.advertise {
        builder = builder.advertise(address);
    }
    if let Some(name) = &options.dns {
        builder = builder.dns(name, Duration::from_secs(5));
    }
    if let Some(file) = &options.secret_file {
        builder = builder.secret(Secret::from_file(file)?);
    }
    if let Some(folder) = &options.tls_dir {
        builder = builder.tls(TlsOptions::from_dir(folder)?);
    }
    if options.insecure {
        builder = builder.insecure();
    }
    if options.gossip {
        #[cfg(feature = "gossip")]
        {
            builder = builder.gossip(muster_router::transport::tcp::GossipOptions::default());
        }
        #[cfg(not(feature = "gossip"))]
        return Err("--gossip needs a build with --features gossip".into());
    }
    Ok(builder.build()?)
}

fn main() -> ExitCode {
    let options = match parse(std::env::args().skip(1)) {
        Ok(Some(options)) => options,
        Ok(None) => {
            print!("{HELP}");
            return ExitCode::SUCCESS;
        }
        Err(error) => {
            eprintln!("node: {error}\n\n{HELP}");
            return ExitCode::from(2);
        }
    };
    tracing_subscriber::fmt()
        .with_env_filter(
            // a refused node has to be seen without RUST_LOG
            tracing_subscriber::EnvFilter::builder()
                .with_default_directive(tracing_subscriber::filter::LevelFilter::WARN.into())
                .from_env_lossy(),
        )
        .with_writer(std::io::stderr)
        .init();
    let runtime = tokio::runtime::Runtime::new().map_err(Failure::from);
    match runtime.and_then(|runtime| runtime.block_on(run(&options))) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("node: {error}");
            ExitCode::FAILURE
        }
    }
}

async fn run(options: &Options) -> Result<(), Failure> {
    let transport = std::sync::Arc::new(transport(options)?);
    let muster = Muster::builder("node").transport(transport.clone()).start().await?;
    if let Some(address) = transport.local_addr() {
        println!("{} listens on {address}", muster.peer());
    }
    tokio::spawn(tell(muster.clone()));
    let mut lines = read_lines();
    let mut groups = HashMap::new();
    let mut terminal = true;
    let mut ended = std::pin::pin!(end_signal());
    loop {
        tokio::select! {
            line = lines.recv(), if terminal => match line {
                Some(line) if line.trim() == "quit" => break,
                Some(line) => {
                    if let Err(error) = follow(&muster, &mut groups, line.trim()).await {
                        println!("! {error}");
                    }
                }
                // Started in the background: the signal ends it.
                None => terminal = false,
            },
            () = &mut ended => break,
        }
    }
    println!("draining");
    if let Err(waiting) = muster.drain(Duration::from_secs(10)).await {
        println!("! {waiting}");
    }
    muster.shutdown().await;
    println!("ended");
    Ok(())
}

/// In a thread of its own: a terminal that is still being read holds up no end.
fn read_lines() -> mpsc::Receiver<String> {
    let (sender, lines) = mpsc::channel(16);
    std::thread::spawn(move || {
        for line in std::io::stdin().lines().map_while(Result::ok) {
            if sender.blocking_send(line).is_err() {
                return;
            }
        }
    });
    lines
}

async fn follow(
    muster: &Muster,
    groups: &mut HashMap<String, Membership>,
    line: &str,
) -> Result<(), Failure> {
    let (command, rest) = line.split_once(' ').unwrap_or((line, ""));
    match (command, rest.trim()) {
        ("", _) => {}
        ("join", group) if !group.is_empty() => {
            let membership = muster.join_fn(group, show).await?;
            groups.insert(group.to_owned(), membership);
            println!("joined {group}");
        }
        ("leave", group) if !group.is_empty() => match groups.remove(group) {
            Some(membership) => {
                membership.leave();
                println!("left {group}");
            }
            None => println!("! not a member of {group}"),
        },
        ("say", rest) if rest.contains(' ') => {
            let (group, text) = rest.split_once(' ').unwrap_or((rest, ""));
            let receipt = muster.broadcast(group, text.to_owned()).await?;
            let nodes = receipt.nodes.map_or_else(String::new, |nodes| format!(", {nodes} nodes"));
            println!("sent ({:?}{nodes})", receipt.decision);
        }
        ("status", _) => {
            let now = muster.summary();
            println!("{}, {} connected, {} suspect", now.status, now.connected.len(), now.suspect.len());
            println!("{} members here, {:?}", now.memberships, now.counters);
        }
        ("members", _) => println!("{}", muster.members()),
        ("drain", _) => {
            muster.drain(Duration::from_secs(10)).await?;
            println!("drained: the others route, members here stay");
        }
        _ => println!("! join GROUP, leave GROUP, say GROUP TEXT, status, members, drain, quit"),
    }
    Ok(())
}

fn show(message: &Message) {
    println!("[{}] {}: {}", message.group(), message.origin(), String::from_utf8_lossy(message.payload()));
}

/// What happens in the cluster, as it happens.
async fn tell(muster: Muster) {
    let mut events = muster.events();
    let mut last = String::new();
    while let Some(event) = events.recv().await {
        match event {
            Event::NodeUp(peer) => println!("+ {peer}"),
            Event::NodeDown(peer) => println!("- {peer}"),
            Event::NodeSuspect(peer) => println!("? {peer} is silent"),
            Event::NodeResumed(peer) => println!("+ {peer} is back, nothing was lost"),
            Event::Status { status, .. } => {
                let now = format!("* {status}, {} in the view", muster.members().len());
                if now != last {
                    println!("{now}");
                    last = now;
                }
            }
            Event::Superseded { by } => println!("! superseded by {by}"),
            Event::Partitioned { peer, missing } => {
                println!("! {peer} reaches {missing}, this node does not")
            }
            Event::Stopped => return,
            _ => {}
        }
    }
}

/// Ctrl-C, or what a process manager sends.
async fn end_signal() {
    #[cfg(unix)]
    {
        use tokio::signal::unix::{SignalKind, signal};
        if let Ok(mut terminate) = signal(SignalKind::terminate()) {
            tokio::select! {
                _ = terminate.recv() => return,
                _ = tokio::signal::ctrl_c() => return,
            }
        }
    }
    let _interrupted = tokio::signal::ctrl_c().await;
}
