//! A cluster of processes.

use std::collections::BTreeMap;

use super::process::Process;
use super::words::*;

pub(crate) struct Lab {
    nodes: BTreeMap<&'static str, (Process, String)>,
}

impl Lab {
    /// These nodes, each ready with all of them.
    pub(crate) fn of(names: &[&'static str]) -> Self {
        let mut lab = Self { nodes: BTreeMap::new() };
        for name in names {
            lab.start(name, Process::spawn("node", name));
        }
        lab.ready();
        lab
    }

    /// Starts a node in a process that waits for it; when it began.
    pub(crate) fn start(&mut self, name: &'static str, mut process: Process) -> Nanos {
        let seeds = self.nodes.values().map(|(_, address)| address.clone()).collect();
        match process.ask(&Act::Start { name: name.into(), seeds }) {
            Answer::Started { address, began } => {
                self.nodes.insert(name, (process, address));
                began
            }
            other => panic!("{other:?}"),
        }
    }

    /// A process of this name is put in the place of one that has ended.
    pub(crate) fn restart(&mut self, name: &'static str) {
        self.start(name, Process::spawn("node", name));
        self.ready();
    }

    pub(crate) fn names(&self) -> Vec<&'static str> {
        self.nodes.keys().copied().collect()
    }

    pub(crate) fn node(&mut self, name: &str) -> &mut Process {
        &mut self.nodes.get_mut(name).expect("it runs").0
    }

    /// Takes a node out, for instance because it is to die.
    pub(crate) fn remove(&mut self, name: &str) -> Process {
        self.nodes.remove(name).expect("it runs").0
    }

    pub(crate) fn ask(&mut self, name: &str, act: Act) -> Answer {
        self.node(name).ask(&act)
    }

    /// Asks these at the same time.
    pub(crate) fn ask_all(&mut self, names: &[&str], act: &Act) -> Vec<Answer> {
        for name in names {
            self.node(name).tell(act);
        }
        names.iter().map(|name| self.node(name).hear()).collect()
    }

    /// Waits until all are ready with all; when the last one was.
    pub(crate) fn ready(&mut self) -> Nanos {
        let names = self.names();
        let ready = self.ask_all(&names, &Act::Ready { nodes: names.len() });
        let at = |answer| if let Answer::At(at) = answer { at } else { panic!("{answer:?}") };
        ready.into_iter().map(at).max().expect("somebody")
    }

    pub(crate) fn join(&mut self, names: &[&str], groups: &Groups, members: usize, kind: Kind) {
        let act = Act::Join { groups: groups.clone(), members, callers: 64, kind };
        self.ask_all(names, &act);
    }

    /// Deliveries to all members of these since their start; waits for so many.
    pub(crate) fn counted(&mut self, names: &[&str], at_least: u64) -> Vec<(u64, Nanos)> {
        let each = at_least / names.len() as u64;
        let answers = self.ask_all(names, &Act::Counted { at_least: each });
        let counted = |answer| match answer {
            Answer::Took { count, nanos } => (count, nanos),
            other => panic!("{other:?}"),
        };
        answers.into_iter().map(counted).collect()
    }

    pub(crate) fn bytes(&mut self, name: &str) -> (u64, u64) {
        match self.ask(name, Act::Stats) {
            Answer::Stats { bytes_in, bytes_out, .. } => (bytes_in, bytes_out),
            other => panic!("{other:?}"),
        }
    }

    /// The processor time of all nodes until now.
    pub(crate) fn busy(&mut self) -> Nanos {
        let names = self.names();
        let busy = |answer| if let Answer::Stats { busy, .. } = answer { busy } else { panic!("{answer:?}") };
        self.ask_all(&names, &Act::Stats).into_iter().map(busy).sum()
    }

    pub(crate) fn noted(&mut self, name: &str, all: bool) -> Noted {
        match self.ask(name, Act::Noted { all }) {
            Answer::Noted(noted) => noted,
            other => panic!("{other:?}"),
        }
    }

    pub(crate) fn probed(&mut self, name: &str) -> Probed {
        match self.ask(name, Act::ProbeEnd) {
            Answer::Probed(probed) => probed,
            other => panic!("{other:?}"),
        }
    }

    /// Ends the paced broadcasts of this node: how many there were.
    pub(crate) fn rest(&mut self, name: &str) -> (u64, u64) {
        match self.ask(name, Act::Rest) {
            Answer::Sent { sent, failed } => (sent, failed),
            other => panic!("{other:?}"),
        }
    }
}

/// One group that this node routes.
pub(crate) fn one(prefix: &str, router: &str) -> Groups {
    Groups { prefix: prefix.into(), count: 1, router: Some(router.into()) }
}

pub(crate) fn let_run(millis: u64) {
    std::thread::sleep(std::time::Duration::from_millis(millis));
}
