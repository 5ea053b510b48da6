//! The command line.

use std::path::PathBuf;

use super::cluster::Ports;

/// The most nodes that the page still shows well.
pub(crate) const MAX_NODES: usize = 16;

pub(crate) const HELP: &str = "\
A chat on a cluster of muster-router nodes, all in this process.

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
";

/// What to do.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Task {
    Help,
    Serve { replay: Option<(PathBuf, f64)> },
    Check,
    CheckReplay { file: PathBuf },
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Options {
    pub(crate) task: Task,
    pub(crate) nodes: usize,
    pub(crate) ports: Ports,
}

/// Reads the arguments, without the program's name.
pub(crate) fn parse(arguments: impl IntoIterator<Item = String>) -> Result<Options, String> {
    let mut arguments = arguments.into_iter();
    let (mut nodes, mut port, mut replay, mut speed) = (None, None, None, None);
    let (mut check, mut help) = (false, false);
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
            "--check" => check = true,
            "--help" | "-h" => help = true,
            _ => {
                return Err(format!(
                    "unknown option {argument:?}; allowed are --nodes, --port, --replay, --speed, --check and --help"
                ));
            }
        }
        if let Some(value) = inline {
            return Err(format!("{option} takes no value, {value:?} was given"));
        }
    }
    if help {
        return Ok(Options { task: Task::Help, nodes: 0, ports: Ports::Any });
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
    Ok(Options { task, nodes, ports })
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
