//! Clusters of processes on loopback: killed, frozen, restarted, drained, many at once, and one that never reads.
//!
//! Each scenario prints a line: what was sent, what had to arrive and did, and how long others took to notice and to
//! be ready again.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "what is not as expected fails the test"
)]

#[path = "support/agent/mod.rs"]
mod agent;

use agent::lab::{Lab, Times, millis_since};
use agent::words::{Happened, now};

/// Not a test of its own: the process that is a node.
#[test]
fn a_node_process() {
    agent::child::main_if_asked();
}

/// A killed process closes its connections, so it is missed at once; a frozen one is suspect after half a second.
const LATEST: u64 = 600_000;

/// Names of many nodes.
fn names(count: usize) -> Vec<String> {
    (1..=count).map(|number| format!("n{number:02}")).collect()
}

/// The router of a busy group is killed: what its callers were told and what comes later arrives everywhere.
fn kill_the_router(mut lab: Lab) {
    let (all, rest) = (["a", "b", "c", "d"], ["a", "b", "d"]);
    let group = lab.routed_by("a", "c", "busy");
    for node in all {
        lab.join(node, &group);
    }
    lab.load(&all, &group, 100, 64);
    lab.let_run(1500);
    let fault = lab.kill("c");
    let seen = lab.until_event(&rest, "c", Happened::Suspect, fault);
    let whole = lab.until_whole(&rest);
    lab.let_run(1000);
    lab.rest(&rest);
    let times =
        Times { detection: Some(millis_since(fault, seen)), recovery: Some(millis_since(fault, whole)) };
    let (account, lag) = lab.close(times);
    assert!(account.flooded > 0, "the router was killed with broadcasts in hand");
    assert!(account.latest <= LATEST + lag, "the latest after {} ms, lag {lag} us", account.latest / 1000);
}

#[test]
fn hazard_13_kill_9_of_the_router_of_a_busy_group() {
    kill_the_router(Lab::of("kill -9 of the router", ["a", "b", "c", "d"]));
}

#[cfg(feature = "gossip")]
#[test]
fn hazard_13_kill_9_of_the_router_with_gossip() {
    kill_the_router(Lab::gossiping("kill -9 of the router, gossip", ["a", "b", "c", "d"]));
}

/// For less than the time after which a silent peer is down: it stays a member and misses nothing.
#[test]
fn hazard_27_a_router_under_sigstop_for_a_moment_loses_nothing() {
    let (all, rest) = (["a", "b", "c"], ["a", "b"]);
    let mut lab = Lab::of("SIGSTOP of the router for 1.5 s", all);
    let group = lab.routed_by("a", "c", "busy");
    for node in all {
        lab.join(node, &group);
    }
    lab.load(&all, &group, 100, 64);
    lab.let_run(1000);
    let fault = now();
    lab.agent("c").freeze();
    let seen = lab.until_event(&rest, "c", Happened::Suspect, fault);
    lab.let_run(1500_u64.saturating_sub(millis_since(fault, now())));
    lab.agent("c").thaw();
    let thawed = now();
    lab.ledger.frozen("c", fault, thawed);
    let back = lab.until_event(&rest, "c", Happened::Resumed, fault);
    lab.let_run(1000);
    lab.rest(&all);
    assert!(rest.iter().all(|name| {
        lab.agents[*name].heard(|heard| heard.events.iter().all(|(_, what, _)| *what != Happened::Down))
    }));
    let times =
        Times { detection: Some(millis_since(fault, seen)), recovery: Some(millis_since(thawed, back)) };
    let (account, lag) = lab.close(times);
    assert!(account.latest <= LATEST + lag, "the latest after {} ms, lag {lag} us", account.latest / 1000);
}

/// For longer: the others go on without it, and it is a member again when it wakes.
#[test]
fn hazard_27_a_router_under_sigstop_for_long_comes_back() {
    let (all, rest) = (["a", "b", "c"], ["a", "b"]);
    let mut lab = Lab::of("SIGSTOP of the router for 5 s", all);
    let group = lab.routed_by("a", "c", "busy");
    for node in all {
        lab.join(node, &group);
    }
    lab.load(&rest, &group, 100, 64);
    lab.let_run(1000);
    let fault = now();
    lab.agent("c").freeze();
    let seen = lab.until_event(&rest, "c", Happened::Suspect, fault);
    lab.until_event(&rest, "c", Happened::Down, fault);
    let whole = lab.until_whole(&rest);
    lab.let_run(5000_u64.saturating_sub(millis_since(fault, now())));
    lab.agent("c").thaw();
    let thawed = now();
    let back = lab.until_whole(&all);
    println!("    woken, it was a member again after {} ms", millis_since(thawed, back));
    // it had lost the others, and what was said meanwhile, until both ends had met again
    lab.ledger.lost("c", fault, back);
    lab.ledger.frozen("c", fault, back);
    lab.load(&["c"], &group, 100, 64);
    lab.let_run(1000);
    lab.rest(&all);
    let times =
        Times { detection: Some(millis_since(fault, seen)), recovery: Some(millis_since(fault, whole)) };
    let (account, lag) = lab.close(times);
    assert!(account.latest <= LATEST + lag, "the latest after {} ms, lag {lag} us", account.latest / 1000);
}

/// Killed and back in less than a second, as its process manager would do it.
fn restart(scenario: &'static str, clock_set_back: bool) {
    let (all, rest) = (["a", "b", "c"], ["a", "b"]);
    let mut lab = Lab::of(scenario, all);
    let group = lab.routed_by("a", "c", "busy");
    for node in all {
        lab.join(node, &group);
    }
    lab.load(&rest, &group, 100, 64);
    lab.let_run(700);
    let fault = lab.kill("c");
    if clock_set_back {
        let before = lab.incarnation("c");
        lab.setup("c").incarnation = Some(before / 2);
    }
    lab.launch(&["c"]);
    let started = millis_since(fault, now());
    println!("    started again after {started} ms");
    let whole = lab.until_whole(&all);
    lab.join("c", &group);
    lab.load(&["c"], &group, 100, 64);
    lab.let_run(1000);
    lab.rest(&all);
    let (_, lag) = lab.close(Times { detection: None, recovery: Some(millis_since(fault, whole)) });
    assert!(started * 1000 <= 1_000_000 + lag, "it started after {started} ms, lag {lag} us");
}

#[test]
fn hazard_10_restarted_under_the_same_name_within_a_second() {
    restart("restart under the same name", false);
}

#[test]
fn hazard_10_restarted_with_the_clock_set_back() {
    restart("restart, the clock set back", true);
}

#[test]
fn hazard_16_rolling_restart_with_drain_misses_nothing() {
    let all = ["a", "b", "c", "d"];
    let mut lab = Lab::of("rolling restart with drain", all);
    for group in ["one", "two", "three"] {
        lab.join_on(&all, group);
        lab.load(&all, group, 20, 64);
    }
    let mut slowest = 0;
    for name in all {
        lab.let_run(300);
        // those who talk on it stop first, those who listen stay until the end
        lab.rest(&[name]);
        let stopped = lab.stop(name);
        lab.launch(&[name]);
        for group in ["one", "two", "three"] {
            lab.join(name, group);
        }
        let whole = lab.until_whole(&all);
        slowest = slowest.max(millis_since(stopped, whole));
        for group in ["one", "two", "three"] {
            lab.load(&[name], group, 20, 64);
        }
    }
    lab.let_run(300);
    lab.rest(&all);
    lab.close(Times { detection: None, recovery: Some(slowest) });
}

#[test]
fn hazard_16_all_nodes_killed_and_started_at_once() {
    let all = ["a", "b", "c", "d"];
    let mut lab = Lab::of("all killed and started at once", all);
    lab.join_on(&all, "one");
    lab.load(&all, "one", 50, 64);
    lab.let_run(500);
    let fault = now();
    for name in all {
        lab.kill(name);
    }
    lab.launch(&all);
    lab.join_on(&all, "one");
    let whole = lab.until_whole(&all);
    lab.load(&all, "one", 50, 64);
    lab.let_run(500);
    lab.rest(&all);
    lab.close(Times { detection: None, recovery: Some(millis_since(fault, whole)) });
}

/// All know all as seeds, or (with gossip) only the first one.
fn twenty_at_once(mut lab: Lab) {
    let names = names(20);
    let all: Vec<_> = names.iter().map(String::as_str).collect();
    let began = now();
    if lab.gossip {
        let seed = lab.address(all[0]);
        for name in &all {
            lab.setup(name).seeds = vec![seed.clone()];
        }
        lab.launch(&all);
    } else {
        lab.start_all(&all);
    }
    lab.join_on(&all, "lobby");
    let whole = lab.until_whole(&all);
    lab.load(&all, "lobby", 5, 64);
    lab.let_run(1000);
    lab.rest(&all);
    lab.close(Times { detection: None, recovery: Some(millis_since(began, whole)) });
}

#[test]
fn hazard_16_twenty_nodes_up_at_once() {
    twenty_at_once(Lab::new("20 nodes up at once"));
}

#[cfg(feature = "gossip")]
#[test]
fn hazard_16_twenty_nodes_up_at_once_with_gossip_and_one_seed() {
    let mut lab = Lab::new("20 nodes up at once, gossip, one seed");
    lab.gossip = true;
    twenty_at_once(lab);
}

/// A node is started into a busy cluster and joins at once: what begins after the join has returned arrives.
#[test]
fn hazard_25_joins_in_the_first_moments_of_a_process_are_known() {
    let busy = ["a", "b", "c"];
    let mut lab = Lab::of("joins in the first moments", busy);
    for group in ["one", "two"] {
        lab.load(&busy, group, 100, 64);
    }
    let began = now();
    lab.address("d");
    let seeds = busy.map(|name| lab.address(name)).to_vec();
    lab.setup("d").seeds = seeds;
    lab.launch(&["d"]);
    for group in ["one", "two"] {
        lab.join("d", group);
    }
    let joined = now();
    let whole = lab.until_whole(&["a", "b", "c", "d"]);
    println!("    joined {} ms after its start", millis_since(began, joined));
    lab.let_run(500);
    lab.rest(&busy);
    lab.close(Times { detection: None, recovery: Some(millis_since(began, whole)) });
}

/// A process that keeps its sockets open and reads nothing costs bounded memory, is given up, and holds up nobody.
#[test]
fn hazard_20_a_process_that_never_reads() {
    const QUEUE: usize = 4 << 20;
    let (all, rest) = (["a", "b", "c"], ["a", "b"]);
    let mut lab = Lab::new("a peer that never reads");
    for name in all {
        let link = &mut lab.setup(name).link;
        // silence alone must not end it: this is about a socket that does not drain
        link.ping_timeout = Some(30_000);
        link.stall_timeout = Some(4000);
        link.queue_bytes = Some(QUEUE);
    }
    lab.start_all(&all);
    lab.until_whole(&all);
    lab.join_on(&all, "big");
    lab.load(&rest, "big", 40, 64 * 1024);
    lab.let_run(1000);
    let before = rest.map(|name| lab.memory(name).0);
    let fault = now();
    lab.agent("c").freeze();
    let seen = lab.until_event(&rest, "c", Happened::Suspect, fault);
    let down = lab.until_event(&rest, "c", Happened::Down, fault);
    println!("    given up after {} ms", millis_since(fault, down));
    let whole = lab.until_whole(&rest);
    lab.let_run(500);
    let peak = rest.map(|name| lab.memory(name).1);
    lab.agent("c").thaw();
    let back = lab.until_whole(&all);
    lab.ledger.lost("c", fault, back);
    lab.ledger.frozen("c", fault, back);
    lab.rest(&rest);
    let times =
        Times { detection: Some(millis_since(fault, seen)), recovery: Some(millis_since(fault, whole)) };
    let (account, lag) = lab.close(times);
    for (before, peak) in before.iter().zip(&peak) {
        let grown = peak.saturating_sub(*before);
        println!("    memory of a sender: {before} KiB before, at most {peak} KiB");
        assert!(grown <= 8 * QUEUE as u64 / 1024, "{before} KiB grew to {peak} KiB");
    }
    assert!(account.latest <= LATEST + lag, "the latest after {} ms, lag {lag} us", account.latest / 1000);
}

/// The others die, come back without knowing anybody, and are found by the one who stayed.
#[test]
fn mem_10_a_process_that_lost_all_peers_finds_them_again() {
    let (all, others) = (["a", "b", "c"], ["b", "c"]);
    let mut lab = Lab::of("a node that lost all peers", all);
    lab.join("a", "one");
    lab.load(&["a"], "one", 50, 64);
    let fault = now();
    for name in others {
        lab.kill(name);
    }
    let alone = lab.until_whole(&["a"]);
    lab.let_run(4000);
    for name in others {
        lab.setup(name).seeds = Vec::new();
    }
    let began = now();
    lab.launch(&others);
    let whole = lab.until_whole(&all);
    lab.join_on(&others, "one");
    lab.load(&others, "one", 50, 64);
    lab.let_run(500);
    lab.rest(&all);
    lab.close(Times {
        detection: Some(millis_since(fault, alone)),
        recovery: Some(millis_since(began, whole)),
    });
}

/// A node dies and comes back under its name at another address.
#[test]
fn mem_07_the_same_name_at_another_address() {
    let (all, rest) = (["a", "b", "c"], ["a", "b"]);
    let mut lab = Lab::of("the same name at another address", all);
    lab.join_on(&all, "one");
    lab.load(&rest, "one", 50, 64);
    lab.let_run(300);
    let fault = lab.kill("c");
    let moved = lab.address("elsewhere");
    lab.setup("c").listen = moved;
    lab.launch(&["c"]);
    let whole = lab.until_whole(&all);
    lab.join("c", "one");
    lab.load(&["c"], "one", 50, 64);
    lab.let_run(500);
    // and the others find it there, too, when they are the ones who come back
    lab.kill("b");
    lab.launch(&["b"]);
    lab.until_whole(&all);
    lab.rest(&["a", "c"]);
    lab.close(Times { detection: None, recovery: Some(millis_since(fault, whole)) });
}

/// The same name twice, both alive: the later one wins or is refused, the cluster stays whole.
#[test]
fn hazard_11_two_live_processes_of_one_name() {
    let all = ["a", "b", "c"];
    let mut lab = Lab::of("two live processes of one name", all);
    lab.join_on(&["a", "b"], "one");
    lab.load(&["a", "b"], "one", 50, 64);
    let fault = now();
    lab.impostor("c");
    let superseded = lab.until_superseded("old c");
    let whole = lab.until_whole(&all);
    lab.let_run(500);
    lab.rest(&["a", "b"]);
    lab.close(Times {
        detection: Some(millis_since(fault, superseded)),
        recovery: Some(millis_since(fault, whole)),
    });
}
