//! One node process, seen from the test.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command as Program, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::child;
use super::words::*;

/// Far longer than anything may take.
pub const PATIENCE: Duration = Duration::from_secs(60);

pub struct Agent {
    pub name: String,
    process: Child,
    input: Option<ChildStdin>,
    seen: Arc<Seen>,
    next: u64,
    /// Wakes the process again when it is dropped, even if that is because the test has died.
    frozen: Option<Child>,
    reader: Option<std::thread::JoinHandle<()>>,
}

#[derive(Default)]
struct Seen {
    heard: Mutex<Heard>,
    changed: Condvar,
}

/// All that it has said.
#[derive(Default)]
pub struct Heard {
    answers: Vec<(u64, Result<Answer, String>)>,
    pub states: Vec<State>,
    pub events: Vec<(Micros, Happened, String)>,
    pub casts: Vec<Cast>,
    ended: bool,
}

impl Agent {
    /// Starts the process, in the network namespace if there is one.
    pub fn spawn(name: &str, namespace: Option<&str>) -> Self {
        let binary = std::env::current_exe().unwrap();
        let mut program = match namespace {
            None => Program::new(&binary),
            Some(namespace) => {
                let mut program = Program::new("ip");
                program.args(["netns", "exec", namespace]).arg(&binary);
                program
            }
        };
        let mut process = program
            .args(["--exact", child::TEST, "--nocapture", "--test-threads=1"])
            .env(child::ASKED, "1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let seen = Arc::new(Seen::default());
        let output = BufReader::new(process.stdout.take().unwrap());
        let reader = std::thread::spawn({
            let seen = seen.clone();
            move || {
                // what is no JSON comes from the test harness
                for line in output.lines().map_while(Result::ok).filter(|line| line.starts_with('{')) {
                    let word = serde_json::from_str(&line);
                    seen.hear(word.unwrap_or_else(|error| panic!("{error}: {line}")));
                }
                seen.heard.lock().ended = true;
                seen.changed.notify_all();
            }
        });
        let input = process.stdin.take();
        Self { name: name.to_owned(), process, input, seen, next: 1, frozen: None, reader: Some(reader) }
    }

    /// Says it without waiting; [`Agent::answer`] waits.
    pub fn tell(&mut self, act: Act) -> u64 {
        let re = self.next;
        self.next += 1;
        let mut line = serde_json::to_string(&Command { re, act }).unwrap();
        line.push('\n');
        self.input.as_mut().expect("it lives").write_all(line.as_bytes()).expect("it listens");
        re
    }

    pub fn answer(&mut self, re: u64) -> Result<Answer, String> {
        let found = self.wait("an answer", |heard| {
            let place = heard.answers.iter().position(|(about, _)| *about == re)?;
            Some(heard.answers.swap_remove(place).1)
        });
        found.unwrap_or_else(|| Err(format!("{} ended without an answer", self.name)))
    }

    pub fn ask(&mut self, act: Act) -> Answer {
        let what = format!("{act:?}");
        let re = self.tell(act);
        self.answer(re).unwrap_or_else(|error| panic!("{}: {what}: {error}", self.name))
    }

    /// Waits until `look` finds something; `None` if the process ended before.
    pub fn wait<T>(&self, what: &str, mut look: impl FnMut(&mut Heard) -> Option<T>) -> Option<T> {
        let deadline = Instant::now() + PATIENCE;
        let mut heard = self.seen.heard.lock();
        loop {
            if let Some(found) = look(&mut heard) {
                return Some(found);
            }
            if heard.ended {
                return None;
            }
            if self.seen.changed.wait_until(&mut heard, deadline).timed_out() {
                drop(heard);
                panic!("{}: never: {what}\n{}", self.name, self.history());
            }
        }
    }

    pub fn heard<T>(&self, look: impl FnOnce(&Heard) -> T) -> T {
        look(&self.seen.heard.lock())
    }

    /// What it has said of the cluster, in order, for a failure.
    pub fn history(&self) -> String {
        let heard = self.seen.heard.lock();
        let states = heard.states.iter().map(|s| (s.at, format!("ready {} {:?}", s.ready, s.view)));
        let events = heard.events.iter().map(|(at, what, node)| (*at, format!("{what:?} {node}")));
        let mut all: Vec<_> = states.chain(events).collect();
        all.sort();
        all.iter().map(|(at, what)| format!("  {at} {what}\n")).collect()
    }

    /// `kill -9`. What it said before is still read; returns when that is done.
    pub fn kill(&mut self) {
        self.frozen = None;
        // an error means that it has ended already
        let _ended = self.process.kill();
        let _status = self.process.wait();
        if let Some(reader) = self.reader.take() {
            reader.join().unwrap();
        }
    }

    /// Lets it end by itself.
    pub fn end(&mut self) {
        self.input = None;
        let _status = self.process.wait();
        if let Some(reader) = self.reader.take() {
            reader.join().unwrap();
        }
    }

    /// `SIGSTOP`; returns when it has been sent.
    pub fn freeze(&mut self) {
        const SCRIPT: &str = "kill -STOP $0 && echo stopped && read end; kill -CONT $0";
        let mut guard = Program::new("sh")
            .args(["-c", SCRIPT, &self.process.id().to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(guard.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, "stopped\n");
        self.frozen = Some(guard);
    }

    /// `SIGCONT`; returns when it has been sent.
    pub fn thaw(&mut self) {
        let mut guard = self.frozen.take().expect("it was frozen");
        drop(guard.stdin.take());
        assert!(guard.wait().unwrap().success());
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        if let Some(mut guard) = self.frozen.take() {
            drop(guard.stdin.take());
            let _status = guard.wait();
        }
        let _ended = self.process.kill();
        let _status = self.process.wait();
    }
}

impl Seen {
    fn hear(&self, word: Word) {
        let mut heard = self.heard.lock();
        match word {
            Word::Answer { re, result } => heard.answers.push((re, result)),
            Word::State(state) => heard.states.push(state),
            Word::Event { at, what, node } => heard.events.push((at, what, node)),
            Word::Cast(cast) => heard.casts.push(cast),
        }
        drop(heard);
        self.changed.notify_all();
    }
}
