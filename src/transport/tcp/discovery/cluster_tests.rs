//! Many books together.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use super::sim::{LINK_TIMEOUT, World, name, place, secs};
use super::*;

const SEEDS: std::ops::Range<u64> = 0..10;

/// Everybody knows machine 0.
fn one_seed(_: usize, config: &mut Config) {
    config.seeds = vec![Endpoint::Address(place(0))];
}

fn all(world: &World) -> Vec<usize> {
    (0..world.machines.len()).collect()
}

fn running(world: &World) -> Vec<usize> {
    all(world).into_iter().filter(|i| world.machines[*i].book.is_some()).collect()
}

fn mesh(world: &World) -> bool {
    world.is_mesh(&running(world))
}

#[test]
fn twenty_nodes_up_at_once_with_one_seed_are_a_mesh_and_settle_in_it() {
    for seed in SEEDS {
        let mut world = World::new(seed, 20, one_seed);
        world.start_all();
        world.until(secs(2), "a mesh", mesh);
        world.run(secs(5));
        let dials: u64 = world.machines.iter().flat_map(|m| m.dialled.values()).sum();
        assert!(dials < 2 * 190, "{dials} dials for 190 links");
        assert_eq!(world.machines[0].dialled.get(&place(0)), None, "it is its own seed");
        world.machines.iter().for_each(|m| assert!(m.settled.unwrap() < secs(2)));
        let sent: u64 = world.machines.iter().map(|m| m.sent).sum();
        world.run(secs(600));
        assert_eq!(sent, world.machines.iter().map(|m| m.sent).sum::<u64>(), "silent when nothing changes");
    }
}

#[test]
fn a_node_is_settled_only_once_it_has_tried_whom_its_seed_knows() {
    for seed in SEEDS {
        let mut world = World::new(seed, 10, one_seed);
        (0..9).for_each(|i| world.start(i));
        world.until(secs(2), "a mesh", mesh);
        world.run(secs(1));
        world.start(9);
        world.until(secs(1), "settled", |w| w.machines[9].settled.is_some());
        assert!(mesh(&world), "{:?}", world.linked(9));
    }
}

#[test]
fn mem_10_a_node_that_lost_all_peers_finds_them_again() {
    for seed in SEEDS {
        let mut world = World::new(seed, 4, one_seed);
        world.start_all();
        world.until(secs(2), "a mesh", mesh);
        (0..3).for_each(|i| world.cut_both(i, 3));
        world.run(secs(1800));
        assert!(world.linked(3).is_empty());
        world.heal();
        world.until(secs(8), "a mesh", mesh);
    }
}

#[test]
fn mem_10_seeds_that_are_all_dead_and_come_back_are_found() {
    for seed in SEEDS {
        let mut world = World::new(seed, 6, |_, config| {
            config.seeds = vec![Endpoint::Address(place(0)), Endpoint::Address(place(1))];
        });
        world.start_all();
        world.until(secs(2), "a mesh", mesh);
        world.kill(0, true);
        world.kill(1, false);
        world.run(secs(3600));
        assert!(mesh(&world), "the others stay");
        world.start(0);
        world.until(secs(6), "a mesh with one seed", mesh);
        world.start(1);
        world.until(secs(6), "a mesh with both", mesh);
    }
}

#[test]
fn all_nodes_dead_but_one_and_started_again_are_a_mesh() {
    for seed in SEEDS {
        let mut world = World::new(seed, 6, one_seed);
        world.start_all();
        world.until(secs(2), "a mesh", mesh);
        (0..5).for_each(|i| world.kill(i, false));
        world.run(secs(60));
        (0..5).for_each(|i| world.start(i));
        world.until(secs(7), "a mesh", mesh);
    }
}

#[test]
fn mem_07_a_node_that_moves_to_a_new_address_is_found_there_and_the_old_one_is_forgotten() {
    for seed in SEEDS {
        let mut world = World::new(seed, 5, one_seed);
        world.start_all();
        world.until(secs(2), "a mesh", mesh);
        world.kill(3, seed % 2 == 0);
        world.run(secs(1));
        world.move_to(3, place(100));
        world.start(3);
        world.until(secs(8), "a mesh", mesh);
        for i in [0, 1, 2, 4] {
            let members = world.book(i).members();
            let moved = members.iter().find(|m| m.node == name(3)).unwrap();
            assert_eq!((moved.address, moved.state), (Some(place(100)), MemberState::Linked));
        }
        world.run(DiscoveryOptions::default().forget_after + secs(10));
        for i in [0, 1, 2, 4] {
            assert!(!world.book(i).entries.contains_key(&place(3)), "{i} keeps the old address");
        }
    }
}

#[test]
fn mem_05_restarts_leave_nothing_behind() {
    let mut world = World::new(1, 3, one_seed);
    world.start_all();
    for life in 0..100 {
        world.until(secs(8), "a mesh", mesh);
        world.kill(2, false);
        world.move_to(2, place(10 + life));
        world.run(secs(6));
        world.start(2);
    }
    world.until(secs(8), "a mesh", mesh);
    world.kill(2, false);
    world.run(DiscoveryOptions::default().forget_after + secs(10));
    for i in [0, 1] {
        assert_eq!(world.book(i).members().len(), 1, "{:?}", world.book(i).members());
        assert_eq!(world.book(i).entries.len(), usize::from(i == 0) + usize::from(i == 1));
        let dials: u64 = world.machines[i].dialled.values().sum();
        world.run(secs(600));
        assert_eq!(dials, world.machines[i].dialled.values().sum::<u64>(), "nobody is dialled any more");
    }
}

#[test]
fn mem_09_a_dead_node_is_not_taught_back() {
    for seed in SEEDS {
        let mut world = World::new(seed, 4, one_seed);
        world.start_all();
        world.until(secs(2), "a mesh", mesh);
        world.kill(3, true);
        // two who forget at different times, and one who hears of it all for the first time
        world.run(secs(300));
        world.kill(2, false);
        world.start(2);
        world.until(secs(8), "a mesh", mesh);
        assert_eq!(world.state(2, 3), None, "a newcomer does not hear of the dead");
        world.run(secs(320));
        for _ in 0..10 {
            for i in 0..3 {
                assert_eq!(world.state(i, 3), None);
            }
            world.run(DiscoveryOptions::default().forget_after);
        }
    }
}

#[test]
fn mem_13_missing_in_an_answer_is_no_death() {
    for seed in SEEDS {
        let all_of = "all.internal:7000";
        let mut world = World::new(seed, 5, |_, config| {
            config.dns = vec![(Endpoint::parse(all_of).unwrap(), secs(1))];
        });
        world.dns.insert(all_of.into(), (0..5).map(place).collect());
        world.start_all();
        world.until(secs(2), "a mesh", mesh);
        let mut random = Random::new(seed);
        for _ in 0..20 {
            let first = (random.next() % 5) as usize;
            world.dns.insert(all_of.into(), vec![place(first), place((first + 1) % 5)]);
            world.run(secs(1));
            assert!(mesh(&world));
            assert!((1..5).all(|i| world.state(0, i) == Some(MemberState::Linked)));
        }
    }
}

#[test]
fn one_bad_link_is_told_apart_from_a_dead_node() {
    for seed in SEEDS {
        let mut world = World::new(seed, 5, one_seed);
        world.start_all();
        world.until(secs(2), "a mesh", mesh);
        // one way is enough: a link is up for both or for none
        world.cut(1, 2);
        world.run(LINK_TIMEOUT + secs(1));
        assert_eq!(world.state(1, 2), Some(MemberState::Unreachable));
        assert_eq!(world.state(2, 1), Some(MemberState::Unreachable));
        assert_eq!(world.state(3, 1), Some(MemberState::Linked));
        world.run(secs(3600));
        assert_eq!(world.state(1, 2), Some(MemberState::Unreachable), "as long as others vouch for it");
        world.heal();
        world.until(secs(6), "a mesh", mesh);
    }
}

#[test]
fn a_split_heals() {
    for seed in SEEDS {
        let mut world = World::new(seed, 10, |_, config| {
            config.seeds = vec![Endpoint::Address(place(0)), Endpoint::Address(place(9))];
        });
        world.start_all();
        world.until(secs(2), "a mesh", mesh);
        for (a, b) in (0..5).flat_map(|a| (5..10).map(move |b| (a, b))) {
            world.cut_both(a, b);
        }
        world.run(secs(900));
        assert!(world.is_mesh(&[0, 1, 2, 3, 4]) && world.is_mesh(&[5, 6, 7, 8, 9]) && !world.is_linked(0, 9));
        world.heal();
        world.until(secs(8), "a mesh", mesh);
    }
}

#[test]
fn a_dns_name_makes_a_mesh_and_follows_its_answers() {
    for seed in SEEDS {
        let mut world = World::new(seed, 6, |_, config| {
            config.dns = vec![(Endpoint::parse("all.internal:7000").unwrap(), secs(10))];
        });
        // the service lists who is there; to begin with, two
        world.dns.insert("all.internal:7000".into(), vec![place(0), place(1)]);
        (0..2).for_each(|i| world.start(i));
        world.until(secs(2), "a mesh of two", mesh);
        // a third that is in no answer yet finds them, and the fourth is only found by DNS
        world.start(2);
        world.until(secs(2), "a mesh of three", mesh);
        world.dns.insert("all.internal:7000".into(), vec![place(1), place(3)]);
        world.start(3);
        world.until(secs(15), "a mesh of four", mesh);
        // mem-13: those missing from the answer stay
        world.run(secs(1200));
        assert!(mesh(&world));
        // a dead one is dialled while DNS has it, and forgotten some time after it has not
        world.kill(3, false);
        world.run(secs(1200));
        assert!(world.book(0).entries.contains_key(&place(3)));
        world.dns.insert("all.internal:7000".into(), vec![place(1)]);
        world.run(secs(10) + DiscoveryOptions::default().forget_after + secs(10));
        assert!(!world.book(0).entries.contains_key(&place(3)));
        // an outage of DNS takes nothing away
        world.dns.clear();
        world.run(secs(1200));
        assert!(mesh(&world));
        assert!(world.book(0).entries.contains_key(&place(1)));
    }
}

#[test]
fn a_seed_by_name_is_resolved_until_it_is_linked_and_again_when_it_is_lost() {
    for seed in SEEDS {
        let mut world = World::new(seed, 3, |i, config| {
            if i > 0 {
                config.seeds = vec![Endpoint::parse("first.internal:7000").unwrap()];
            }
        });
        world.start(1);
        world.start(2);
        world.until(secs(6), "settled without an answer", |w| w.machines[1].settled.is_some());
        world.run(secs(60));
        let lookups = world.book(1).stats().failed_lookups;
        assert!((12..50).contains(&lookups), "{lookups} in a minute");
        world.dns.insert("first.internal:7000".into(), vec![place(0)]);
        world.start(0);
        world.until(secs(6), "a mesh", mesh);
        // it moves
        world.kill(0, true);
        world.move_to(0, place(50));
        world.dns.insert("first.internal:7000".into(), vec![place(50)]);
        world.start(0);
        world.until(secs(15), "a mesh", mesh);
    }
}
