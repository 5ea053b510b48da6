//! Clusters of processes in network namespaces: split, cut one way, with loss, at a low rate, with delay.
//!
//! ```text
//!   a ── veth ──┐                          ┌── veth ── c
//!               bridge "left" ── veth ── bridge "right"        each node and the bridges in a namespace of its own
//!   b ── veth ──┘                          └── veth ── d
//! ```
//!
//! Needs root, `ip`, `tc` and `nft`, and says so where it skips; with `MUSTER_REQUIRE_ALL=1` a skip is a failure.
//! It touches only namespaces that it has made, and removes them.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "what is not as expected fails the test"
)]

#[path = "support/agent/mod.rs"]
mod agent;
#[path = "support/relay.rs"]
mod relay;

use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use agent::lab::{Lab, Times, millis_since};
use agent::words::{Happened, now};

/// Not a test of its own: the process that is a node.
#[test]
fn a_node_process() {
    agent::child::main_if_asked();
}

/// Runs a program; what it says if it fails.
fn run(line: &str) -> Result<(), String> {
    let mut words = line.split_whitespace();
    let program = words.next().unwrap();
    let output = Command::new(program).args(words).output().map_err(|error| format!("{program}: {error}"))?;
    if output.status.success() {
        return Ok(());
    }
    Err(format!("{line}: {}", String::from_utf8_lossy(&output.stderr).trim()))
}

fn must(line: &str) {
    run(line).unwrap();
}

/// Namespaces and the wires between them.
struct Wires {
    tag: String,
    nodes: Vec<String>,
}

static WIRES: AtomicU32 = AtomicU32::new(0);

impl Wires {
    /// The first nodes on the left, the others on the right; `None`, with a reason, where that is impossible.
    fn new(left: &[&str], right: &[&str]) -> Option<Self> {
        let tag = format!("mr{}-{}", std::process::id(), WIRES.fetch_add(1, Ordering::SeqCst));
        let mut wires = Self { tag, nodes: Vec::new() };
        match wires.lay(left, right) {
            Ok(()) => Some(wires),
            Err(why) if std::env::var_os("MUSTER_REQUIRE_ALL").is_none() => {
                println!("skipped: network namespaces need root, ip, tc and nft: {why}");
                None
            }
            Err(why) => panic!("network namespaces need root, ip, tc and nft: {why}"),
        }
    }

    fn lay(&mut self, left: &[&str], right: &[&str]) -> Result<(), String> {
        run("nft --version")?;
        run("tc -V")?;
        let hub = self.namespace("hub");
        run(&format!("ip netns add {hub}"))?;
        for bridge in ["left", "right"] {
            run(&format!("ip -n {hub} link add {bridge} type bridge"))?;
            run(&format!("ip -n {hub} link set {bridge} up"))?;
        }
        run(&format!("ip -n {hub} link add trunk0 type veth peer name trunk1"))?;
        for (end, bridge) in [("trunk0", "left"), ("trunk1", "right")] {
            run(&format!("ip -n {hub} link set {end} master {bridge}"))?;
            run(&format!("ip -n {hub} link set {end} up"))?;
        }
        let sides = left.iter().map(|node| (*node, "left")).chain(right.iter().map(|node| (*node, "right")));
        for (node, bridge) in sides {
            let namespace = self.namespace(node);
            self.nodes.push(node.to_owned());
            let address = self.ip(node);
            run(&format!("ip netns add {namespace}"))?;
            run(&format!("ip -n {namespace} link set lo up"))?;
            run(&format!("ip link add eth0 netns {namespace} type veth peer name to-{node} netns {hub}"))?;
            run(&format!("ip -n {namespace} address add {address}/24 dev eth0"))?;
            run(&format!("ip -n {namespace} link set eth0 up"))?;
            run(&format!("ip -n {hub} link set to-{node} master {bridge}"))?;
            run(&format!("ip -n {hub} link set to-{node} up"))?;
        }
        Ok(())
    }

    fn namespace(&self, node: &str) -> String {
        format!("{}-{node}", self.tag)
    }

    fn ip(&self, node: &str) -> String {
        let place = self.nodes.iter().position(|known| known == node).unwrap();
        format!("10.77.0.{}", place + 1)
    }

    /// A cluster of all nodes, whole.
    fn lab(&self, scenario: &'static str) -> Lab {
        let mut lab = Lab::new(scenario);
        lab.gossip = cfg!(feature = "gossip");
        for node in &self.nodes {
            lab.namespaces.insert(node.clone(), self.namespace(node));
            lab.setup(node).listen = format!("{}:7001", self.ip(node));
        }
        let all: Vec<_> = self.nodes.iter().map(String::as_str).collect();
        lab.start_all(&all);
        lab.until_whole(&all);
        lab
    }

    /// Left from right.
    fn trunk(&self, up: bool) {
        let state = if up { "up" } else { "down" };
        must(&format!("ip -n {} link set trunk0 {state}", self.namespace("hub")));
    }

    fn in_node(&self, node: &str, line: &str) {
        must(&format!("ip netns exec {} {line}", self.namespace(node)));
    }

    /// The ports of the connection between two nodes, the first one's own before the other's.
    fn ports(&self, node: &str, other: &str) -> (String, String) {
        let namespace = self.namespace(node);
        let listing = ["netns", "exec", &namespace, "ss", "-Htn", "state", "established"];
        let output = Command::new("ip").args(listing).output().unwrap();
        let lines = String::from_utf8(output.stdout).unwrap();
        let (here, there) = (self.ip(node), self.ip(other));
        let port = |word: &str, ip: &str| word.strip_prefix(ip)?.strip_prefix(':').map(str::to_owned);
        let found = lines.lines().find_map(|line| {
            let words: Vec<_> = line.split_whitespace().collect();
            Some((port(words.get(2)?, &here)?, port(words.get(3)?, &there)?))
        });
        found.unwrap_or_else(|| panic!("no connection from {here} to {there}:\n{lines}"))
    }

    /// A filter of what comes in.
    fn filter(&self, node: &str, rule: &str) {
        self.in_node(node, "nft add table inet cut");
        self.in_node(node, "nft add chain inet cut input { type filter hook input priority 0 ; }");
        self.in_node(node, &format!("nft add rule inet cut input {rule} counter drop"));
    }

    /// Ends the filter, which must have dropped something: a fault that never bit proves nothing.
    fn heal(&self, node: &str) {
        let dropped = self.read(node, "nft list table inet cut");
        let dropped = number_after(&dropped, "counter packets");
        assert!(dropped.is_some_and(|packets| packets > 0), "the filter of {node} has dropped {dropped:?}");
        self.in_node(node, "nft delete table inet cut");
    }

    fn read(&self, node: &str, line: &str) -> String {
        let words = line.split_whitespace();
        let output =
            Command::new("ip").args(["netns", "exec", &self.namespace(node)]).args(words).output().unwrap();
        assert!(output.status.success(), "{line}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }
}

impl Drop for Wires {
    fn drop(&mut self) {
        for node in self.nodes.iter().map(String::as_str).chain(["hub"]) {
            // one that was never made is no trouble
            let _gone = run(&format!("ip netns delete {}", self.namespace(node)));
        }
    }
}

/// The number that follows these words.
fn number_after(text: &str, words: &str) -> Option<u64> {
    text.split_once(words)?.1.split_whitespace().next()?.trim_end_matches(')').parse().ok()
}

const ALL: [&str; 4] = ["a", "b", "c", "d"];

/// Both sides go on alone, with joins and leaves of their own, and are one again.
#[test]
fn hazard_15_a_full_split_by_link_down_heals() {
    let Some(wires) = Wires::new(&["a", "b"], &["c", "d"]) else { return };
    let mut lab = wires.lab("full split, link down");
    lab.join_on(&ALL, "one");
    let leaves = lab.join("b", "one");
    lab.load(&ALL, "one", 40, 64);
    lab.let_run(1000);
    let fault = now();
    wires.trunk(false);
    let left = lab.until_whole(&["a", "b"]);
    let right = lab.until_whole(&["c", "d"]);
    lab.join("a", "one");
    lab.join("d", "one");
    lab.leave("b", leaves);
    lab.let_run(1000);
    let healed = now();
    wires.trunk(true);
    let whole = lab.until_whole(&ALL);
    for (one, other) in [("a", "c"), ("a", "d"), ("b", "c"), ("b", "d")] {
        lab.ledger.lost_between(one, other, fault, whole);
    }
    lab.let_run(1000);
    lab.rest(&ALL);
    lab.close(Times {
        detection: Some(millis_since(fault, left.max(right))),
        recovery: Some(millis_since(healed, whole)),
    });
}

/// Shorter than the time that a link is kept: nothing is lost between the two sides either.
#[test]
fn hazard_14_a_short_split_loses_nothing() {
    let Some(wires) = Wires::new(&["a", "b"], &["c"]) else { return };
    let all = ["a", "b", "c"];
    let mut lab = wires.lab("split for 1 s");
    lab.join_on(&all, "one");
    lab.load(&all, "one", 40, 64);
    lab.let_run(1000);
    let fault = now();
    wires.trunk(false);
    let seen = lab.until_event(&["a", "b"], "c", Happened::Suspect, fault);
    lab.let_run(1000_u64.saturating_sub(millis_since(fault, now())));
    let healed = now();
    wires.trunk(true);
    let back = lab.until_event(&["a", "b"], "c", Happened::Resumed, fault);
    lab.ledger.frozen("c", fault, back);
    lab.let_run(1000);
    lab.rest(&all);
    lab.close(Times {
        detection: Some(millis_since(fault, seen)),
        recovery: Some(millis_since(healed, back)),
    });
}

/// Nothing comes from a to c, all the rest does; b and d see both.
#[test]
fn hazard_14_a_one_way_cut_is_down_at_both_ends_and_heals() {
    let Some(wires) = Wires::new(&["a", "b"], &["c", "d"]) else { return };
    let mut lab = wires.lab("one-way cut");
    lab.join_on(&ALL, "one");
    lab.load(&ALL, "one", 40, 64);
    lab.let_run(1000);
    let fault = now();
    wires.filter("c", &format!("ip saddr {}", wires.ip("a")));
    let down = lab.until_event(&["a"], "c", Happened::Down, fault).max(lab.until_event(
        &["c"],
        "a",
        Happened::Down,
        fault,
    ));
    // those who are connected with everybody still hear and reach everybody
    lab.let_run(2000);
    let healed = now();
    wires.heal("c");
    let whole = lab.until_whole(&ALL);
    lab.ledger.lost_between("a", "c", fault, whole);
    lab.let_run(500);
    lab.rest(&ALL);
    lab.close(Times {
        detection: Some(millis_since(fault, down)),
        recovery: Some(millis_since(healed, whole)),
    });
}

/// One connection goes silent without a close, as behind a firewall that has forgotten it; new ones pass.
#[test]
fn bc_23_a_connection_that_went_silent_does_not_block_the_next() {
    let Some(wires) = Wires::new(&["a", "b"], &["c"]) else { return };
    let all = ["a", "b", "c"];
    let mut lab = wires.lab("a connection gone silent");
    lab.join_on(&all, "one");
    lab.load(&all, "one", 40, 64);
    lab.let_run(500);
    let (near, far) = wires.ports("a", "c");
    let fault = now();
    for (node, from) in [("a", "c"), ("c", "a")] {
        let (source, target) = if node == "a" { (&far, &near) } else { (&near, &far) };
        let peer = wires.ip(from);
        wires.filter(node, &format!("ip saddr {peer} tcp sport {source} tcp dport {target}"));
    }
    let seen = lab.until_event(&["a"], "c", Happened::Suspect, fault);
    let again = lab.until_back(&["a"], "c", seen);
    let whole = lab.until_whole(&all).max(again);
    lab.ledger.lost_between("a", "c", fault, whole);
    lab.let_run(500);
    lab.rest(&all);
    lab.close(Times {
        detection: Some(millis_since(fault, seen)),
        recovery: Some(millis_since(fault, whole)),
    });
}

/// Every twentieth packet is lost on its way in, on every node.
#[test]
fn loss_of_5_percent_costs_time_and_no_message() {
    let Some(wires) = Wires::new(&["a", "b"], &["c"]) else { return };
    let all = ["a", "b", "c"];
    let mut lab = wires.lab("5 % loss");
    lab.join_on(&all, "one");
    for node in all {
        wires.filter(node, "numgen random mod 100 < 5");
    }
    lab.load(&all, "one", 40, 200);
    lab.let_run(6000);
    lab.rest(&all);
    for node in all {
        wires.heal(node);
    }
    lab.until_whole(&all);
    lab.close(Times::default());
}

/// 4 Mbit/s in and out of each node, and about two thirds of that to carry.
#[test]
fn a_low_rate_by_tbf_costs_time_and_no_message() {
    let Some(wires) = Wires::new(&["a", "b"], &["c"]) else { return };
    let all = ["a", "b", "c"];
    let mut lab = wires.lab("4 Mbit/s by tbf");
    lab.join_on(&all, "one");
    for node in all {
        wires.in_node(node, "tc qdisc add dev eth0 root tbf rate 4mbit burst 32kbit latency 400ms");
    }
    lab.load(&all, "one", 40, 4000);
    lab.let_run(4000);
    lab.rest(&all);
    lab.until_whole(&all);
    for node in all {
        let held = number_after(&wires.read(node, "tc -s qdisc show dev eth0"), "overlimits");
        assert!(held.is_some_and(|times| times > 0), "the rate limit of {node} has held up {held:?} packets");
    }
    lab.close(Times::default());
}

/// Every connection passes a relay that holds each piece for 50 ms and up to 30 ms more, by a seed.
#[test]
fn a_delay_of_50_ms_with_jitter_costs_time_and_no_message() {
    let all = ["a", "b", "c"];
    let mut lab = Lab::new("50 ms delay with jitter");
    lab.gossip = cfg!(feature = "gossip");
    let mut relays = Vec::new();
    let mut seeds = Vec::new();
    for (seed, name) in (1..).zip(all) {
        let node = lab.address(name);
        let door = lab.address(&format!("relay of {name}"));
        relays.push(relay::Relay::start(&door, &node, seed));
        lab.setup(name).advertise = Some(door.clone());
        seeds.push(door);
    }
    for name in all {
        lab.setup(name).seeds.clone_from(&seeds);
    }
    lab.launch(&all);
    lab.until_whole(&all);
    lab.join_on(&all, "one");
    let began = now();
    lab.load(&all, "one", 40, 200);
    lab.let_run(2000);
    let fault = lab.kill("c");
    let whole = lab.until_whole(&["a", "b"]);
    lab.let_run(1000);
    lab.rest(&["a", "b"]);
    let (account, _) = lab.close(Times { detection: None, recovery: Some(millis_since(fault, whole)) });
    assert!(account.latest >= 50_000, "the delay was not felt: {} us, since {began}", account.latest);
    assert!(relays.iter().all(|relay| relay.carried() > 0), "a relay was passed by");
}
