//! `examples/node.rs`, as one starts it: processes that find each other, talk, and leave.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test that cannot go on says so by panicking"
)]

use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

const PATIENCE: Duration = Duration::from_secs(60);

/// The example, built with the features of this test: nothing is to be done if all targets were built.
fn example() -> PathBuf {
    let features = [("tcp", cfg!(feature = "tcp")), ("gossip", cfg!(feature = "gossip"))]
        .into_iter()
        .chain([("nats", cfg!(feature = "nats")), ("cache", cfg!(feature = "cache"))])
        .chain([("testing", cfg!(feature = "testing"))]);
    let features: Vec<&str> = features.filter(|(_, on)| *on).map(|(name, _)| name).collect();
    // target/debug/deps/example_node-0123
    let own = std::env::current_exe().unwrap();
    let folder = own.parent().and_then(|deps| deps.parent()).expect("a folder of builds");
    let target = folder.parent().expect("the target folder");
    let mut build = Command::new(env!("CARGO"));
    build.current_dir(env!("CARGO_MANIFEST_DIR")).args(["build", "--quiet", "--example", "node"]);
    build.arg("--features").arg(features.join(",")).arg("--target-dir").arg(target);
    if folder.ends_with("release") {
        build.arg("--release");
    }
    assert!(build.status().unwrap().success(), "{build:?}");
    folder.join("examples/node")
}

struct Node {
    child: Child,
    input: ChildStdin,
    lines: Receiver<String>,
    heard: Vec<String>,
}

impl Node {
    fn start(name: &str, seed: Option<&str>) -> Self {
        let mut command = Command::new(example());
        command.args(["--id", name, "--listen", "127.0.0.1:0"]);
        command.args(seed.iter().flat_map(|seed| ["--seed", seed]));
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (input, output) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        let (told, lines) = mpsc::channel();
        std::thread::spawn(move || {
            BufReader::new(output).lines().map_while(Result::ok).try_for_each(|line| told.send(line))
        });
        Self { child, input, lines, heard: Vec::new() }
    }

    fn say(&mut self, line: &str) {
        writeln!(self.input, "{line}").unwrap();
    }

    /// The first line, of those not looked at yet, that holds this.
    fn until(&mut self, part: &str) -> String {
        let end = Instant::now() + PATIENCE;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            let line = self.lines.recv_timeout(left);
            let line = line.unwrap_or_else(|_| panic!("no {part:?} after {:?}", self.heard));
            self.heard.push(line.clone());
            if line.contains(part) {
                return line;
            }
        }
    }

    /// Asks for its status until it has links to so many.
    fn until_connected(&mut self, others: usize) {
        let end = Instant::now() + PATIENCE;
        loop {
            self.say("status");
            let line = self.until(" connected, ");
            if line.starts_with("Ready, ") && line.contains(&format!(", {others} connected, 0 suspect")) {
                return;
            }
            assert!(Instant::now() < end, "never {others}: {:?}", self.heard);
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn processes_find_each_other_talk_and_leave() {
    let mut a = Node::start("a", None);
    let listens = a.until("listens on ");
    let address = listens.rsplit(' ').next().unwrap().to_owned();
    let mut others = ["b", "c"].map(|name| Node::start(name, Some(&address)));
    a.until_connected(2);
    let [b, c] = &mut others;
    for node in [&mut *b, &mut *c] {
        node.until_connected(2);
        node.say("join lobby");
        node.until("joined lobby");
    }
    a.say("say lobby hello there");
    a.until("sent (");
    for node in [&mut *b, &mut *c] {
        let line = node.until("[lobby]");
        assert!(line.starts_with("[lobby] a") && line.ends_with("hello there"), "{line}");
    }
    b.say("quit");
    b.until("ended");
    assert!(b.child.wait().unwrap().success());
    a.until_connected(1);
}
