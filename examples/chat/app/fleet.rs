//! The nodes of the check as processes of their own: this program again, once for each node.

use std::io::{BufRead, BufReader, Write};
use std::net::SocketAddr;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::watch;

use super::Failure;
use super::cluster::Stop;
use super::tcp::{Mesh, free_addresses};

/// What a node does not do in this time it does not do.
const PATIENCE: Duration = Duration::from_secs(30);

/// What a managed node says about itself: ready, and how many it sees.
type State = (bool, usize);

pub(crate) struct Fleet {
    mesh: Mesh,
    places: Vec<Place>,
}

struct Place {
    name: Arc<str>,
    http: SocketAddr,
    process: Mutex<Option<Process>>,
}

struct Process {
    child: Child,
    input: Option<ChildStdin>,
    state: watch::Receiver<State>,
}

impl Drop for Process {
    fn drop(&mut self) {
        // An error means that it has ended.
        let _ended = self.child.kill();
        let _status = self.child.wait();
    }
}

impl Fleet {
    /// Starts `count` processes, n1, n2, …, and returns when all are ready.
    pub(crate) async fn start(count: usize) -> Result<Self, Failure> {
        let mesh = Mesh::local((1..=count).map(|number| format!("n{number}").into()))?;
        let http = free_addresses(2 * count)?.into_iter().skip(count);
        let places = mesh.nodes().iter().zip(http).map(|((name, _), http)| Place {
            name: name.clone(),
            http,
            process: Mutex::new(None),
        });
        let fleet = Self { places: places.collect(), mesh };
        for place in &fleet.places {
            fleet.launch(place)?;
        }
        fleet.until_all_ready().await?;
        Ok(fleet)
    }

    pub(crate) fn addresses(&self) -> Vec<(Arc<str>, SocketAddr)> {
        self.places.iter().map(|place| (place.name.clone(), place.http)).collect()
    }

    /// Starts a node that was stopped; returns when it serves.
    pub(crate) async fn start_node(&self, name: &str) -> Result<(), Failure> {
        let place = self.place(name)?;
        self.launch(place)?;
        until(place, |(ready, _)| ready).await
    }

    /// Stops a node in order, or kills it.
    pub(crate) async fn stop_node(&self, name: &str, stop: Stop) -> Result<(), Failure> {
        let place = self.place(name)?;
        let process = place.process.lock().take();
        let mut process = process.ok_or_else(|| format!("{name} does not run"))?;
        let ended = tokio::task::spawn_blocking(move || {
            match stop {
                Stop::Orderly => drop(process.input.take()),
                Stop::Crash => process.child.kill()?,
            }
            process.child.wait()
        });
        let status = tokio::time::timeout(PATIENCE, ended).await???;
        match stop {
            Stop::Orderly if !status.success() => Err(format!("{name} ended with {status}").into()),
            Stop::Orderly | Stop::Crash => Ok(()),
        }
    }

    /// Returns when every running node is ready and sees all others that run.
    pub(crate) async fn until_all_ready(&self) -> Result<(), Failure> {
        let running: Vec<_> = self.places.iter().filter(|place| place.process.lock().is_some()).collect();
        for place in &running {
            until(place, |(ready, seen)| ready && seen == running.len()).await?;
        }
        Ok(())
    }

    pub(crate) async fn shutdown(&self) {
        for place in &self.places {
            let process = place.process.lock().take();
            drop(process);
        }
    }

    fn place(&self, name: &str) -> Result<&Place, Failure> {
        self.places.iter().find(|place| *place.name == *name).ok_or_else(|| format!("no node {name}").into())
    }

    fn launch(&self, place: &Place) -> Result<(), Failure> {
        let mut process = place.process.lock();
        if process.is_some() {
            return Err(format!("{} runs already", place.name).into());
        }
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["--id", &*place.name, "--port", &place.http.port().to_string(), "--managed"]);
        for (name, address) in self.mesh.nodes() {
            if *name == place.name {
                command.args(["--listen", address.as_str()]);
            }
            command.args(["--seed", address.as_str()]);
        }
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let input = child.stdin.take();
        let output = child.stdout.take().ok_or("no output")?;
        let (told, state) = watch::channel((false, 0));
        std::thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                if let Some(state) = read(&line) {
                    told.send_replace(state);
                }
            }
        });
        *process = Some(Process { child, input, state });
        Ok(())
    }
}

async fn until(place: &Place, holds: impl Fn(State) -> bool) -> Result<(), Failure> {
    let state = place.process.lock().as_ref().map(|process| process.state.clone());
    let mut state = state.ok_or_else(|| format!("{} does not run", place.name))?;
    let reached = tokio::time::timeout(PATIENCE, state.wait_for(|state| holds(*state))).await;
    match reached {
        Ok(Ok(_)) => Ok(()),
        Ok(Err(_)) => Err(format!("{} has ended early", place.name).into()),
        Err(_) => Err(format!("{} is not ready in time", place.name).into()),
    }
}

/// A line of a managed node.
fn read(line: &str) -> Option<State> {
    let (status, seen) = line.strip_prefix("state ")?.split_once(' ')?;
    Some((status == "ready", seen.parse().ok()?))
}

/// What a managed node says; [`read`] reads it. Nobody reads: the parent is gone, and this ends, too.
pub(crate) fn say((ready, seen): State) {
    let line = format!("state {} {seen}\n", if ready { "ready" } else { "busy" });
    let _parent_gone = std::io::stdout().write_all(line.as_bytes());
}
