//! A child process, seen from the conductor.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use super::words::*;

pub(crate) const CHILD: &str = "MUSTER_BENCH_CHILD";

pub(crate) struct Process {
    name: String,
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Process {
    /// Starts this program again, as a `node` or as something `bare`.
    pub(crate) fn spawn(what: &str, name: &str) -> Self {
        let mut program = Command::new(std::env::current_exe().expect("this program"));
        program.env(CHILD, what).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = program.spawn().expect("a process");
        let input = child.stdin.take().expect("piped");
        let output = BufReader::new(child.stdout.take().expect("piped"));
        Self { name: name.into(), child, input, output }
    }

    pub(crate) fn tell(&mut self, act: &Act) {
        let mut line = serde_json::to_vec(act).expect("it can be written");
        line.push(b'\n');
        self.input.write_all(&line).unwrap_or_else(|error| panic!("{}: {error}", self.name));
    }

    pub(crate) fn hear(&mut self) -> Answer {
        let mut line = String::new();
        self.output.read_line(&mut line).expect("a line");
        match serde_json::from_str(&line) {
            Ok(Answer::Failed(why)) => panic!("{}: {why}", self.name),
            Ok(answer) => answer,
            Err(error) => panic!("{}: {error} in {line:?}", self.name),
        }
    }

    pub(crate) fn ask(&mut self, act: &Act) -> Answer {
        self.tell(act);
        self.hear()
    }

    pub(crate) fn kill(&mut self) {
        self.child.kill().expect("it runs");
        self.child.wait().expect("it has ended");
    }

    pub(crate) fn signal(&self, signal: &str) {
        let id = self.child.id().to_string();
        let sent = Command::new("kill").args([signal, &id]).status();
        assert!(sent.expect("kill runs").success(), "kill {signal}");
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // one that is frozen ends, too
        let _gone = self.child.kill();
        let _gone = self.child.wait();
    }
}
