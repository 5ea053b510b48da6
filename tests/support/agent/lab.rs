//! A cluster of processes, its loads and its books.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};

use super::ledger::{Account, Ledger};
use super::process::Agent;
use super::words::*;

/// One scenario at a time: each has the machine for itself, so that times mean something.
static TURN: Mutex<()> = Mutex::new(());
static LABS: AtomicU32 = AtomicU32::new(0);

const PORT: u16 = 7001;

pub struct Lab {
    pub agents: BTreeMap<String, Agent>,
    pub ledger: Ledger,
    scenario: &'static str,
    /// Each lab and node has a loopback address of its own, so that fixed ports are free.
    lab: u32,
    setups: BTreeMap<String, Setup>,
    incarnations: BTreeMap<String, u64>,
    next_member: u32,
    lag: Micros,
    pub gossip: bool,
    /// The network namespaces of nodes that have one.
    pub namespaces: BTreeMap<String, String>,
    _turn: MutexGuard<'static, ()>,
}

/// Detection and recovery of a scenario, in milliseconds after the fault.
#[derive(Clone, Copy, Debug, Default)]
pub struct Times {
    pub detection: Option<u64>,
    pub recovery: Option<u64>,
}

pub fn millis_since(fault: Micros, at: Micros) -> u64 {
    at.saturating_sub(fault) / 1000
}

impl Lab {
    pub fn new(scenario: &'static str) -> Self {
        let turn = TURN.lock();
        Self {
            agents: BTreeMap::new(),
            ledger: Ledger::default(),
            scenario,
            lab: LABS.fetch_add(1, Ordering::SeqCst),
            setups: BTreeMap::new(),
            incarnations: BTreeMap::new(),
            next_member: 1,
            lag: 0,
            gossip: false,
            namespaces: BTreeMap::new(),
            _turn: turn,
        }
    }

    /// A cluster of these nodes, each the seed of all, whole.
    pub fn of<const N: usize>(scenario: &'static str, names: [&str; N]) -> Self {
        let mut lab = Self::new(scenario);
        lab.start_all(&names);
        lab.until_whole(&names);
        lab
    }

    /// The same of nodes that gossip and know one of them.
    pub fn gossiping<const N: usize>(scenario: &'static str, names: [&str; N]) -> Self {
        let mut lab = Self::new(scenario);
        lab.gossip = true;
        let seed = lab.address(names[0]);
        for name in names {
            lab.setup(name).seeds = vec![seed.clone()];
        }
        lab.launch(&names);
        lab.until_whole(&names);
        lab
    }

    /// Starts another process of this name at another address; the old one goes on as "old NAME".
    pub fn impostor(&mut self, name: &str) {
        let there = self.agents.remove(name).expect("it runs");
        self.agents.insert(format!("old {name}"), there);
        let elsewhere = self.address("impostor");
        self.setup(name).listen = elsewhere;
        self.launch(&[name]);
    }

    pub fn until_superseded(&mut self, name: &str) -> Micros {
        let seen = self.agent(name).wait("superseded", |heard| {
            heard.events.iter().find(|(_, what, _)| *what == Happened::Superseded).map(|(at, ..)| *at)
        });
        seen.expect("it has ended")
    }

    /// Where this node listens: the same in all its lives.
    pub fn address(&mut self, name: &str) -> String {
        let place = match self.setups.keys().position(|known| known == name) {
            Some(_) => return self.setups[name].listen.clone(),
            None => self.setups.len() as u32 + 1,
        };
        let process = std::process::id();
        let [.., high, low] = (process % 30_000).to_be_bytes();
        let [.., block] = (self.lab % 8).to_be_bytes();
        let listen = format!("127.{}.{}.{}:{PORT}", 1 + high, low, u32::from(block) * 32 + place);
        let setup = Setup {
            name: name.into(),
            listen: listen.clone(),
            secret: Some("only for these tests".into()),
            ..Setup::default()
        };
        self.setups.insert(name.into(), setup);
        listen
    }

    /// What a node of this name is started with.
    pub fn setup(&mut self, name: &str) -> &mut Setup {
        self.address(name);
        self.setups.get_mut(name).unwrap()
    }

    /// Starts processes for all of these at once; each knows the addresses of all.
    pub fn start_all(&mut self, names: &[&str]) {
        let seeds: Vec<_> = names.iter().map(|name| self.address(name)).collect();
        for name in names {
            self.setup(name).seeds.clone_from(&seeds);
        }
        self.launch(names);
    }

    /// Starts processes for these, each with its setup.
    pub fn launch(&mut self, names: &[&str]) {
        let mut starting = Vec::new();
        for name in names {
            let mut agent = Agent::spawn(name, self.namespaces.get(*name).map(String::as_str));
            let mut setup = self.setup(name).clone();
            setup.gossip = self.gossip;
            starting.push((*name, agent.tell(Act::Start(setup))));
            self.agents.insert((*name).into(), agent);
        }
        for (name, re) in starting {
            match self.agent(name).answer(re) {
                Ok(Answer::Started { incarnation, .. }) => {
                    self.incarnations.insert(name.into(), incarnation);
                }
                other => panic!("{name}: {other:?}"),
            }
        }
    }

    pub fn agent(&mut self, name: &str) -> &mut Agent {
        self.agents.get_mut(name).expect("it runs")
    }

    pub fn incarnation(&self, name: &str) -> u64 {
        self.incarnations[name]
    }

    /// Waits until each of these is ready with a view of just these lives; when the last one was.
    pub fn until_whole(&mut self, names: &[&str]) -> Micros {
        self.until_view(names, names)
    }

    /// The same for some who should see others.
    pub fn until_view(&mut self, who: &[&str], view: &[&str]) -> Micros {
        let mut wanted: Vec<_> =
            view.iter().map(|name| ((*name).to_owned(), self.incarnations[*name])).collect();
        wanted.sort();
        let whole = |name: &&str| {
            let seen = self.agents[*name].wait("ready with the whole view", |heard| {
                heard.states.last().filter(|state| state.ready && state.view == wanted).map(|state| state.at)
            });
            seen.unwrap_or_else(|| panic!("{name} has ended"))
        };
        who.iter().map(whole).max().expect("somebody")
    }

    /// When the last of these saw that happen to `node` at or after `since`.
    pub fn until_event(&mut self, who: &[&str], node: &str, what: Happened, since: Micros) -> Micros {
        let saw = |name: &&str| {
            let seen = self.agents[*name].wait(&format!("{what:?} of {node}"), |heard| {
                let fits = |(at, event, about): &&(Micros, Happened, String)| {
                    *at >= since && *event == what && about == node
                };
                heard.events.iter().find(fits).map(|(at, ..)| *at)
            });
            seen.unwrap_or_else(|| panic!("{name} has ended"))
        };
        who.iter().map(saw).max().expect("somebody")
    }

    /// When the last of these had `node` again, up anew or resumed.
    pub fn until_back(&mut self, who: &[&str], node: &str, since: Micros) -> Micros {
        let saw = |name: &&str| {
            let seen = self.agents[*name].wait(&format!("{node} is back"), |heard| {
                let back = |(at, what, about): &&(Micros, Happened, String)| {
                    *at >= since && matches!(what, Happened::Up | Happened::Resumed) && about == node
                };
                heard.events.iter().find(back).map(|(at, ..)| *at)
            });
            seen.unwrap_or_else(|| panic!("{name} has ended"))
        };
        who.iter().map(saw).max().expect("somebody")
    }

    /// A new member of the group on this node, that has joined.
    pub fn join(&mut self, node: &str, group: &str) -> u32 {
        let member = self.next_member;
        self.next_member += 1;
        let joined = self.agent(node).ask(Act::Join { group: group.into(), member });
        let Answer::Joined { at } = joined else { panic!("{joined:?}") };
        self.ledger.joined(member, node, group, at);
        member
    }

    /// The same on many nodes at once, before any of them answers.
    pub fn join_on(&mut self, nodes: &[&str], group: &str) {
        let mut waiting = Vec::new();
        for node in nodes {
            let member = self.next_member;
            self.next_member += 1;
            let re = self.agent(node).tell(Act::Join { group: group.into(), member });
            waiting.push((*node, member, re));
        }
        for (node, member, re) in waiting {
            match self.agent(node).answer(re) {
                Ok(Answer::Joined { at }) => self.ledger.joined(member, node, group, at),
                other => panic!("{node}: {other:?}"),
            }
        }
    }

    pub fn leave(&mut self, node: &str, member: u32) {
        self.ledger.left(member, now());
        self.agent(node).ask(Act::Leave { member });
    }

    /// Broadcasts from each of these, so many a second each.
    pub fn load(&mut self, nodes: &[&str], group: &str, a_second: u64, size: usize) {
        for node in nodes {
            self.agent(node).ask(Act::Load { group: group.into(), every: 1_000_000 / a_second, size });
        }
    }

    /// Ends the loads and waits for what is under way.
    pub fn rest(&mut self, nodes: &[&str]) {
        let waiting: Vec<_> = nodes.iter().map(|node| (*node, self.agent(node).tell(Act::Rest))).collect();
        for (node, re) in waiting {
            let answer = self.agent(node).answer(re);
            if answer.is_err() {
                self.fail(&format!("{node}: {answer:?}"));
            }
        }
    }

    pub fn routed_by(&mut self, asked: &str, node: &str, prefix: &str) -> String {
        match self.agent(asked).ask(Act::RoutedBy { node: node.into(), prefix: prefix.into() }) {
            Answer::Group(group) => group,
            other => panic!("{other:?}"),
        }
    }

    /// Lets the load run.
    pub fn let_run(&self, millis: u64) {
        std::thread::sleep(Duration::from_millis(millis));
    }

    /// `kill -9`; when.
    pub fn kill(&mut self, name: &str) -> Micros {
        let mut agent = self.agents.remove(name).expect("it runs");
        let fault = now();
        self.ledger.crashed(name);
        agent.kill();
        agent.heard(|heard| self.ledger.casts(name, heard.casts.iter().cloned()));
        fault
    }

    /// Drains, stops and ends a node in order; its load must rest. Returns when it was told to stop.
    pub fn stop(&mut self, name: &str) -> Micros {
        self.agent(name).ask(Act::Drain { millis: 20_000 });
        let at = now();
        self.ledger.gone(name, at);
        self.agent(name).ask(Act::Shutdown);
        self.report(name);
        let mut agent = self.agents.remove(name).expect("it runs");
        agent.end();
        agent.heard(|heard| self.ledger.casts(name, heard.casts.iter().cloned()));
        at
    }

    /// Takes what has come to this node into the books.
    fn report(&mut self, name: &str) -> Report {
        match self.agent(name).ask(Act::Report) {
            Answer::Report(report) => {
                self.ledger.reported(&report);
                if !self.ledger.was_frozen(name) {
                    self.lag = self.lag.max(report.lag);
                }
                report
            }
            other => panic!("{other:?}"),
        }
    }

    pub fn memory(&mut self, name: &str) -> (u64, u64) {
        match self.agent(name).ask(Act::Report) {
            Answer::Report(report) => (report.resident, report.peak),
            other => panic!("{other:?}"),
        }
    }

    /// Everything that a node says of itself, for a failure.
    pub fn dump(&mut self, name: &str) -> String {
        match self.agent(name).ask(Act::Dump) {
            Answer::Text(text) => text,
            other => panic!("{other:?}"),
        }
    }

    fn fail(&mut self, why: &str) -> ! {
        let names: Vec<_> = self.agents.keys().cloned().collect();
        for name in names {
            let dump = self.dump(&name);
            let history = self.agents[&name].history();
            eprintln!("== {name}\n{dump}\n{history}");
        }
        panic!("{}: {why}", self.scenario);
    }

    /// Closes the books: the loads must rest. Prints the line of the scenario and fails if anything was lost.
    pub fn close(mut self, times: Times) -> (Account, Micros) {
        let names: Vec<_> = self.agents.keys().cloned().collect();
        for name in &names {
            let casts = self.agents[name].heard(|heard| heard.casts.clone());
            self.ledger.casts(name, casts);
        }
        // What has a receipt has been delivered, but for nodes that were suspect: those get a moment.
        for _ in 0..50 {
            for name in &names {
                self.report(name);
            }
            if self.ledger.account().missed == 0 {
                break;
            }
            self.let_run(100);
        }
        if std::env::var_os("MUSTER_HISTORY").is_some() {
            for name in &names {
                eprintln!("== {name}\n{}", self.agents[name].history());
            }
        }
        let account = self.ledger.account();
        let show = |time: Option<u64>| time.map_or("-".into(), |time| time.to_string());
        let line = format!(
            "{}: {} sent, {} flooded, {} expected, {} delivered, missed {}, duplicated {}, latest {} ms, \
             detection {} ms, recovery {} ms",
            self.scenario,
            account.sent,
            account.flooded,
            account.expected,
            account.delivered,
            account.missed,
            account.duplicated,
            account.latest / 1000,
            show(times.detection),
            show(times.recovery)
        );
        println!("{line}");
        if !account.trouble.is_empty() {
            let shown = account.trouble.iter().take(10).cloned().collect::<Vec<_>>().join("\n");
            self.fail(&shown);
        }
        account.check(self.scenario);
        (account, self.lag)
    }
}
