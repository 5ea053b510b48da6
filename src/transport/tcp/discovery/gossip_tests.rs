//! Many books that gossip.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use super::sim::{LINK_TIMEOUT, World, name, place, secs};
use super::*;
use crate::types::Incarnation;

const SEEDS: std::ops::Range<u64> = 0..3;
const FORGET_AFTER: Duration = Duration::from_secs(60);
/// One round over twenty members may pass before the first one is probed; news spread while it is suspected.
const DETECTION: u64 = 20 + 4 + 3;

fn world(seed: u64, count: usize) -> World {
    World::new(seed, count, |_, config| {
        config.seeds = vec![Endpoint::Address(place(0))];
        config.gossip = Some(GossipOptions::lan());
        config.options.forget_after = FORGET_AFTER;
    })
}

fn running(world: &World) -> Vec<usize> {
    (0..world.machines.len()).filter(|i| world.machines[*i].book.is_some()).collect()
}

fn mesh(world: &World) -> bool {
    world.is_mesh(&running(world))
}

/// What gossip itself says of this one.
fn word(world: &World, i: usize, of: usize) -> Option<MemberState> {
    let gossip = world.book(i).gossip.as_ref().unwrap();
    gossip.standings().find(|(node, ..)| **node == name(of)).map(|(_, _, state)| state)
}

/// Whether gossip says on every node that all who run live, and nobody else.
fn agree(world: &World) -> bool {
    let running = running(world);
    running.iter().all(|i| {
        (0..world.machines.len()).filter(|j| j != i).all(|j| {
            let alive = word(world, *i, j) == Some(MemberState::Unreachable);
            alive == running.contains(&j)
        })
    })
}

#[test]
fn twenty_learn_of_all_from_one_seed() {
    for seed in SEEDS {
        let mut world = world(seed, 20);
        world.start_all();
        world.until(secs(2), "a mesh", mesh);
        world.until(secs(10), "agreement", agree);
        world.run(secs(60));
        assert!(agree(&world) && mesh(&world), "and it stays so");
    }
}

#[test]
fn messages_are_bounded() {
    let mut world = world(1, 20);
    world.start_all();
    world.run(secs(60));
    let before: Vec<(u64, u64)> = world.machines.iter().map(|m| (m.sent, m.sent_bytes)).collect();
    world.run(secs(100));
    for (machine, (sent, bytes)) in world.machines.iter().zip(before) {
        // a probe and its answer, sent and answered, each second; now and then a list of all
        assert!(machine.sent - sent < 400, "{} messages in 100 s", machine.sent - sent);
        assert!(machine.sent_bytes - bytes < 100_000, "{} bytes in 100 s", machine.sent_bytes - bytes);
    }
}

#[test]
fn a_dead_node_is_down_everywhere_within_a_bound_and_forgotten_after_another() {
    for seed in SEEDS {
        let mut world = world(seed, 20);
        world.start_all();
        world.until(secs(12), "agreement", |w| mesh(w) && agree(w));
        world.kill(7, seed % 2 == 0);
        world.until(secs(DETECTION), "down everywhere", |w| {
            (0..20).filter(|i| *i != 7).all(|i| w.state(i, 7) == Some(MemberState::Down))
        });
        assert!(agree(&world), "nobody else is suspected");
        let dials: u64 = world.machines.iter().filter_map(|m| m.dialled.get(&place(7))).sum();
        world.run(secs(20));
        let more = world.machines.iter().filter_map(|m| m.dialled.get(&place(7))).sum::<u64>() - dials;
        assert!(more <= 19 * 9, "{more} dials of a dead node in 20 s");
        world.run(FORGET_AFTER + secs(60));
        assert!((0..20).filter(|i| *i != 7).all(|i| world.state(i, 7).is_none()), "forgotten");
    }
}

#[test]
fn mem_09_gossip_does_not_teach_a_dead_node_back() {
    let mut world = world(3, 5);
    world.start_all();
    world.until(secs(12), "agreement", |w| mesh(w) && agree(w));
    world.kill(4, true);
    world.run(secs(40));
    world.kill(3, false);
    world.start(3);
    world.run(FORGET_AFTER + secs(60));
    for _ in 0..10 {
        assert!((0..4).all(|i| world.state(i, 4).is_none()));
        world.run(FORGET_AFTER);
    }
}

#[test]
fn mem_07_a_restart_at_another_address_replaces_the_old_one_everywhere() {
    for seed in SEEDS {
        let mut world = world(seed, 10);
        world.start_all();
        world.until(secs(12), "agreement", |w| mesh(w) && agree(w));
        world.kill(4, seed % 2 == 0);
        world.run(secs(seed));
        world.move_to(4, place(100));
        world.start(4);
        world.until(secs(10), "a mesh", mesh);
        world.until(secs(10), "agreement", agree);
        world.run(secs(30));
        for i in (0..10).filter(|i| *i != 4) {
            let gossip = world.book(i).gossip.as_ref().unwrap();
            let (_, address, _) = gossip.standings().find(|(node, ..)| **node == name(4)).unwrap();
            assert_eq!(address, place(100));
        }
        assert!(agree(&world) && mesh(&world));
    }
}

#[test]
fn mem_05_restarts_leave_one_member() {
    let mut world = world(5, 3);
    world.start_all();
    for _ in 0..100 {
        world.until(secs(10), "a mesh", mesh);
        world.kill(2, false);
        world.run(secs(1));
        world.start(2);
    }
    world.until(secs(10), "agreement", |w| mesh(w) && agree(w));
    let gossip = world.book(0).gossip.as_ref().unwrap();
    assert_eq!(gossip.standings().count(), 2);
    world.kill(2, false);
    world.run(FORGET_AFTER + secs(60));
    assert_eq!(world.book(0).members().len(), 1);
}

#[test]
fn one_way_loss_is_one_bad_link_and_no_dead_node() {
    for seed in SEEDS {
        let mut world = world(seed, 6);
        world.start_all();
        world.until(secs(12), "agreement", |w| mesh(w) && agree(w));
        world.cut(1, 2);
        world.run(LINK_TIMEOUT + secs(1));
        for _ in 0..120 {
            world.run(secs(1));
            assert!(agree(&world), "all live, by everybody's word");
            assert_eq!(world.state(1, 2), Some(MemberState::Unreachable));
            assert_eq!(world.state(2, 1), Some(MemberState::Unreachable));
        }
        world.heal();
        world.until(secs(6), "a mesh", mesh);
    }
}

#[test]
fn messages_lost_one_way_on_a_link_that_stays_harm_nobody() {
    for seed in SEEDS {
        let mut world = world(seed, 6);
        world.start_all();
        world.until(secs(12), "agreement", |w| mesh(w) && agree(w));
        world.loss_of_links = false;
        world.cut(1, 2);
        for _ in 0..120 {
            world.run(secs(1));
            assert!(agree(&world));
        }
    }
}

#[test]
fn a_split_is_seen_by_both_sides_and_heals() {
    for seed in SEEDS {
        let mut world = World::new(seed, 10, |_, config| {
            config.seeds = vec![Endpoint::Address(place(0)), Endpoint::Address(place(9))];
            config.gossip = Some(GossipOptions::lan());
        });
        world.start_all();
        world.until(secs(12), "agreement", |w| mesh(w) && agree(w));
        for (a, b) in (0..5).flat_map(|a| (5..10).map(move |b| (a, b))) {
            world.cut_both(a, b);
        }
        world.until(secs(60), "each side knows", |w| {
            (0..5).all(|a| (5..10).all(|b| word(w, a, b) == Some(MemberState::Down)))
                && (5..10).all(|a| (0..5).all(|b| word(w, a, b) == Some(MemberState::Down)))
        });
        world.run(secs(60));
        world.heal();
        world.until(secs(8), "a mesh", mesh);
        world.until(secs(15), "agreement", agree);
        world.run(secs(60));
        assert!(agree(&world));
    }
}

#[test]
fn mem_10_zero_members_recover_through_the_seeds() {
    for seed in SEEDS {
        let mut world = world(seed, 4);
        world.start_all();
        world.until(secs(12), "agreement", |w| mesh(w) && agree(w));
        (0..3).for_each(|i| world.cut_both(i, 3));
        world.run(secs(300));
        assert!(world.linked(3).is_empty());
        world.heal();
        world.until(secs(8), "a mesh", mesh);
        world.until(secs(15), "agreement", agree);
        // all seeds dead, then back
        world.kill(0, true);
        world.run(secs(300));
        world.start(0);
        world.until(secs(8), "a mesh", mesh);
        world.until(secs(15), "agreement", agree);
    }
}

#[test]
fn who_leaves_is_down_at_once() {
    let mut world = world(1, 5);
    world.start_all();
    world.until(secs(12), "agreement", |w| mesh(w) && agree(w));
    world.leave(4);
    world.until(secs(2), "down", |w| (0..4).all(|i| w.state(i, 4) == Some(MemberState::Down)));
}

#[test]
fn the_last_words_of_a_link_are_heard_after_its_end() {
    let mut world = world(1, 2);
    world.start_all();
    world.until(secs(12), "agreement", |w| mesh(w) && agree(w));
    let mut last_words = Vec::new();
    world.input(1, |book, now| {
        book.handle_leaving(now);
        last_words.extend(std::iter::from_fn(|| book.poll_action()));
    });
    let Some(Action::Send(_, message)) = last_words.pop() else { panic!("it says nothing") };
    world.kill(1, false);
    world.run(Duration::from_millis(5));
    assert_eq!(world.state(0, 1), Some(MemberState::Unreachable), "nobody knows yet");
    world.input(0, |book, now| book.handle_message(&name(1), &message, now));
    assert_eq!(world.state(0, 1), Some(MemberState::Down));
}

#[test]
fn a_higher_incarnation_taken_while_running_is_followed() {
    let mut world = world(1, 4);
    world.start_all();
    world.until(secs(12), "agreement", |w| mesh(w) && agree(w));
    let me = Peer::new(name(3), Incarnation::new(99).unwrap());
    world.input(3, |book, now| book.handle_reborn(me, now));
    world.until(secs(10), "agreement", agree);
    world.run(secs(60));
    assert!(agree(&world));
}

#[test]
fn hazard_22_gossip_that_makes_no_sense_is_counted_and_ignored() {
    let mut world = world(1, 3);
    world.start_all();
    world.until(secs(12), "agreement", |w| mesh(w) && agree(w));
    let malformed = world.book(0).stats().malformed;
    let mut random = Random::new(7);
    for _ in 0..2000 {
        let length = random.next() % 60;
        let bytes: Vec<u8> = (0..length).map(|_| random.next() as u8).collect();
        world.input(0, |book, now| book.handle_message(&name(1), &exchange::gossip(&bytes), now));
    }
    assert!(world.book(0).stats().malformed > malformed + 1000);
    assert_eq!(world.book(0).members().len(), 2);
    // in another's name, and too long
    let stranger = Gossip::new(
        &GossipOptions::lan(),
        &Peer::new(NodeId::new("stranger").unwrap(), Incarnation::MIN),
        place(77),
        secs(60),
        10,
        1,
    );
    let mut stranger = stranger;
    stranger.handle_linked(&name(0), place(0), Time::ZERO);
    let (_, announce) = stranger.take_output().sends.remove(0);
    let malformed = world.book(0).stats().malformed;
    world.input(0, |book, now| book.handle_message(&name(1), &exchange::gossip(&announce), now));
    world.input(0, |book, now| book.handle_message(&name(1), &exchange::gossip(&[0; 20_000]), now));
    assert_eq!(world.book(0).stats().malformed, malformed + 2);
    assert_eq!(world.book(0).members().len(), 2);
    assert!(agree(&world));
}

#[test]
fn the_list_of_members_is_bounded() {
    let mut world = World::new(1, 6, |i, config| {
        config.seeds = vec![Endpoint::Address(place(0))];
        config.gossip = Some(GossipOptions::lan());
        if i == 1 {
            config.options.max_addresses = 3;
        }
    });
    world.start_all();
    world.run(secs(30));
    assert!(world.book(1).gossip.as_ref().unwrap().standings().count() <= 3);
    assert!(world.book(1).stats().overflow > 0);
}

#[test]
fn gossip_options_that_make_no_sense_are_named() {
    let check = |change: fn(&mut GossipOptions)| {
        let mut options = GossipOptions::default();
        change(&mut options);
        options.check()
    };
    assert_eq!(check(|_| {}), Ok(()));
    assert_eq!(GossipOptions::wan().check(), Ok(()));
    type Change = fn(&mut GossipOptions);
    let bad: [(&str, Change); 7] = [
        ("probe_interval", |o| o.probe_interval = Duration::ZERO),
        ("probe_timeout", |o| o.probe_timeout = o.probe_interval),
        ("indirect_probes", |o| o.indirect_probes = 0),
        ("suspicion", |o| o.suspicion = o.probe_interval / 2),
        ("gossip_interval", |o| o.gossip_interval = Duration::ZERO),
        ("gossip_fanout", |o| o.gossip_fanout = 17),
        ("sync_interval", |o| o.sync_interval = Duration::MAX),
    ];
    for (option, change) in bad {
        assert!(check(change).unwrap_err().starts_with(option), "{option}");
    }
}
