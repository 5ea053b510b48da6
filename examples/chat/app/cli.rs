//! The command line.

use std::path::PathBuf;

use super::cluster::Ports;
use super::stage::Place;
#[cfg(feature = "tcp")]
use super::tcp::Trust;

/// The most nodes that the page still shows well.
pub(crate) const MAX_NODES: usize = 16;

pub(crate) const HELP: &str = "\
A chat on a cluster of muster-router nodes, all in this process unless you say otherwise.

Usage: chat [--nodes N] [--port BASE] [--replay FILE [--speed X]] [--check]

  --nodes N      how many nodes to start, 1 to 16 (default 3; with --check 2 to 16)
  --port BASE    the first node's HTTP port, 1 to 65535 (default 8101); the others follow;
                 a port that is taken is replaced by a free one
  --replay FILE  let the people of a recorded trace join, talk and leave
                 (tab-separated: minute, room, event (join, msg, leave), user, bytes)
  --speed X      with --replay: minutes of the trace per second, above 0 (default 1)
  --check        no page: real websocket clients on every node send 3000 messages in 50 rooms while a
                 node is stopped and restarted; prints what they should and did receive
  --check --replay FILE
                 the same question for the whole trace, as fast as it goes
  --help         this text

With the feature `tcp` (cargo run --features tcp --example chat -- …):
  --transport T  what connects the nodes, memory, tcp or, with the feature `nats`, nats (default memory)
  --nats URL     with --transport nats: the server, instead of one that is started for this and restarted by --check
  --processes N  with --check --transport tcp: N nodes, each in a process of its own
  --kill         with --processes: one of them is killed (kill -9) and started again

  --id NAME --listen HOST:PORT [--seed HOST:PORT]... [--port PORT] [--secret-file FILE] [--tls-dir DIR]
                 one node in this process, for a cluster of several: its name, where the others connect to it,
                 nodes to meet, the port of its page, and what keeps strangers out
";

/// What to do.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Task {
    Help,
    Serve {
        replay: Option<(PathBuf, f64)>,
    },
    Check,
    CheckReplay {
        file: PathBuf,
    },
    /// One node of a cluster of processes.
    #[cfg(feature = "tcp")]
    Node(NodeOptions),
}

#[cfg(feature = "tcp")]
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct NodeOptions {
    pub(crate) id: String,
    pub(crate) listen: String,
    pub(crate) seeds: Vec<String>,
    pub(crate) trust: Trust,
    /// Started by a check: it tells its state on standard output, and ends in order with standard input.
    pub(crate) managed: bool,
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Options {
    pub(crate) task: Task,
    pub(crate) nodes: usize,
    pub(crate) ports: Ports,
    /// Where the nodes are.
    pub(crate) place: Place,
}

/// What only a build with the feature `tcp` has.
#[derive(Default)]
struct Network {
    transport: Option<String>,
    nats: Option<String>,
    processes: Option<u64>,
    kill: bool,
    id: Option<String>,
    listen: Option<String>,
    seeds: Vec<String>,
    secret_file: Option<PathBuf>,
    tls_dir: Option<PathBuf>,
    managed: bool,
}

/// Reads the arguments, without the program's name.
pub(crate) fn parse(arguments: impl IntoIterator<Item = String>) -> Result<Options, String> {
    let mut arguments = arguments.into_iter();
    let (mut nodes, mut port, mut replay, mut speed) = (None, None, None, None);
    let (mut check, mut help) = (false, false);
    let mut network = Network::default();
    while let Some(argument) = arguments.next() {
        let (option, mut inline) = match argument.split_once('=') {
            Some((option, value)) if option.starts_with("--") => (option.to_owned(), Some(value.to_owned())),
            _ => (argument.clone(), None),
        };
        let mut value = |allowed: &str| {
            inline.take().or_else(|| arguments.next()).ok_or(format!("{option} needs a value: {allowed}"))
        };
        match option.as_str() {
            "--nodes" => {
                once(&option, &mut nodes, number(&option, &value("1 to 16")?, 1, MAX_NODES as u64)?)?
            }
            "--port" => {
                once(&option, &mut port, number(&option, &value("1 to 65535")?, 1, u64::from(u16::MAX))?)?
            }
            "--replay" => once(&option, &mut replay, PathBuf::from(value("the path of a trace")?))?,
            "--speed" => once(&option, &mut speed, positive(&option, &value("a number above 0")?)?)?,
            "--transport" => once(&option, &mut network.transport, value("memory, tcp or nats")?)?,
            "--nats" => once(&option, &mut network.nats, value("the URL of a server")?)?,
            "--processes" => once(
                &option,
                &mut network.processes,
                number(&option, &value("2 to 16")?, 2, MAX_NODES as u64)?,
            )?,
            "--kill" => network.kill = true,
            "--id" => once(&option, &mut network.id, value("the name of a node")?)?,
            "--listen" => once(&option, &mut network.listen, value("host:port")?)?,
            "--seed" => network.seeds.push(value("host:port")?),
            "--secret-file" => {
                once(&option, &mut network.secret_file, PathBuf::from(value("the path of a secret")?))?
            }
            "--tls-dir" => {
                once(&option, &mut network.tls_dir, PathBuf::from(value("the path of a folder")?))?
            }
            "--managed" => network.managed = true,
            "--check" => check = true,
            "--help" | "-h" => help = true,
            _ => {
                return Err(format!(
                    "unknown option {argument:?}; allowed are --nodes, --port, --replay, --speed, --check, --transport, --nats, \
                     --processes, --kill, --id, --listen, --seed, --secret-file, --tls-dir and --help"
                ));
            }
        }
        if let Some(value) = inline {
            return Err(format!("{option} takes no value, {value:?} was given"));
        }
    }
    if help {
        return Ok(Options { task: Task::Help, nodes: 0, ports: Ports::Any, place: Place::Memory });
    }
    if network.id.is_some() || network.listen.is_some() {
        if check || nodes.is_some() || replay.is_some() || network.processes.is_some() {
            return Err(
                "--id and --listen start one node; --check, --nodes, --replay and --processes start all"
                    .into(),
            );
        }
        return one_node(network, port);
    }
    if !network.seeds.is_empty()
        || network.secret_file.is_some()
        || network.tls_dir.is_some()
        || network.managed
    {
        return Err(
            "--seed, --secret-file and --tls-dir are for one node: --id and --listen are missing".into()
        );
    }
    let place = network.place(check && replay.is_none(), nodes.is_some())?;
    if let Some(processes) = network.processes {
        nodes = Some(processes);
    }
    if check && nodes == Some(1) {
        return Err(
            "--check stops a node while the others go on: --nodes must be 2 to 16, 1 was given".into()
        );
    }
    if check && port.is_some() {
        return Err("--check takes any free ports; --port is for the page".into());
    }
    let task = match (check, replay, speed) {
        (_, None, Some(_)) => {
            return Err("--speed says how fast to --replay FILE; no --replay was given".into());
        }
        (true, Some(_), Some(_)) => {
            return Err("--check --replay goes as fast as it can; --speed is not for it".into());
        }
        (true, Some(file), None) => Task::CheckReplay { file },
        (true, None, None) => Task::Check,
        (false, replay, speed) => Task::Serve { replay: replay.map(|file| (file, speed.unwrap_or(1.0))) },
    };
    let nodes = nodes.map_or(3, |nodes| usize::try_from(nodes).unwrap_or(MAX_NODES));
    let ports = match (check, port) {
        (true, _) => Ports::Any,
        (false, port) => Ports::From(port.and_then(|port| u16::try_from(port).ok()).unwrap_or(8101)),
    };
    Ok(Options { task, nodes, ports, place })
}

impl Network {
    /// Where all nodes of this start are.
    fn place(&self, plain_check: bool, nodes: bool) -> Result<Place, String> {
        let (tcp, nats) = match self.transport.as_deref() {
            None | Some("memory") => (false, false),
            Some("tcp") => (true, false),
            Some("nats") => (false, true),
            Some(other) => return Err(format!("--transport {other:?}: memory, tcp or nats is allowed")),
        };
        if self.nats.is_some() && !nats {
            return Err("--nats is for --transport nats".into());
        }
        if self.processes.is_some() && !(tcp && plain_check) {
            return Err("--processes is for --check --transport tcp".into());
        }
        if self.processes.is_some() && nodes {
            return Err("--processes says how many nodes; --nodes is not for it".into());
        }
        if self.kill && self.processes.is_none() {
            return Err("--kill kills one of --processes N; no --processes was given".into());
        }
        if nats {
            #[cfg(feature = "nats")]
            return Ok(Place::Nats { url: self.nats.clone() });
            #[cfg(not(feature = "nats"))]
            return Err("this needs the feature nats: cargo run --features nats --example chat -- …".into());
        }
        if !tcp {
            return Ok(Place::Memory);
        }
        #[cfg(feature = "tcp")]
        return Ok(match self.processes {
            Some(_) => Place::Processes { kill: self.kill },
            None => Place::Tcp,
        });
        #[cfg(not(feature = "tcp"))]
        Err(NEEDS_TCP.into())
    }
}

#[cfg(not(feature = "tcp"))]
const NEEDS_TCP: &str = "this needs the feature tcp: cargo run --features tcp --example chat -- …";

#[cfg(not(feature = "tcp"))]
fn one_node(_network: Network, _port: Option<u64>) -> Result<Options, String> {
    Err(NEEDS_TCP.into())
}

#[cfg(feature = "tcp")]
fn one_node(network: Network, port: Option<u64>) -> Result<Options, String> {
    let Network { id, listen, seeds, secret_file, tls_dir, managed, kill, transport, .. } = network;
    if kill || transport.is_some_and(|transport| transport != "tcp") {
        return Err(
            "--id and --listen start one node over tcp; --kill and another --transport are not for it".into(),
        );
    }
    let options = NodeOptions {
        id: id.ok_or("--listen starts one node; its --id is missing")?,
        listen: listen.ok_or("--id starts one node; --listen is missing")?,
        seeds,
        trust: Trust { secret_file, tls_dir },
        managed,
    };
    let port = port.and_then(|port| u16::try_from(port).ok());
    let ports = match port {
        Some(port) if managed => Ports::Just(port),
        port => Ports::From(port.unwrap_or(8101)),
    };
    Ok(Options { task: Task::Node(options), nodes: 1, ports, place: Place::Tcp })
}

fn once<T>(option: &str, place: &mut Option<T>, value: T) -> Result<(), String> {
    if place.replace(value).is_some() {
        return Err(format!("{option} was given twice"));
    }
    Ok(())
}

fn number(option: &str, given: &str, low: u64, high: u64) -> Result<u64, String> {
    match given.parse() {
        Ok(number) if (low..=high).contains(&number) => Ok(number),
        _ => Err(format!("{option} {given:?}: a whole number from {low} to {high} is allowed")),
    }
}

fn positive(option: &str, given: &str) -> Result<f64, String> {
    match given.parse::<f64>() {
        Ok(number) if number > 0.0 && number.is_finite() => Ok(number),
        _ => Err(format!("{option} {given:?}: a number above 0 is allowed")),
    }
}
