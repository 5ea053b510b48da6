//! Groups in a small simulated cluster: links that are cut, lives that end, views that follow late.

use std::collections::BTreeMap;

use super::*;
use crate::cache::version::Epoch;
use crate::types::Incarnation;

fn peer(node: usize, life: u64) -> Peer {
    let incarnation = Incarnation::new(life).unwrap();
    Peer::new(NodeId::new(format!("n{node}")).unwrap(), incarnation)
}

fn member(node: usize, life: u64) -> Member {
    Member { peer: peer(node, life), opening: node as u32 + 7 }
}

struct Rng(u64);

impl Rng {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        xxh3_64(&self.0.to_le_bytes()) % bound
    }
}

struct Cluster {
    nodes: Vec<Option<Consensus>>,
    lives: Vec<u64>,
    expected: usize,
    replicas: usize,
    cut: BTreeSet<(usize, usize)>,
    /// In order for each pair.
    flying: BTreeMap<(usize, usize), VecDeque<(Duration, ConsensusMessage)>>,
    now: Duration,
    rng: Rng,
    /// What was decided, by partition and counter: the same for everybody.
    decided: BTreeMap<(PartitionId, u64), Decided>,
    established: BTreeSet<GroupId>,
    /// Somebody makes messages up: what is decided is no longer looked at.
    liar: bool,
}

impl Cluster {
    fn new(count: usize, expected: usize, replicas: usize, seed: u64) -> Self {
        let mut cluster = Self {
            nodes: Vec::new(),
            lives: vec![0; count],
            expected,
            replicas,
            cut: BTreeSet::new(),
            flying: BTreeMap::new(),
            now: Duration::ZERO,
            rng: Rng(seed),
            decided: BTreeMap::new(),
            established: BTreeSet::new(),
            liar: false,
        };
        cluster.nodes.resize_with(count, || None);
        (0..count).for_each(|node| cluster.start(node));
        cluster.views();
        cluster
    }

    fn start(&mut self, node: usize) {
        self.lives[node] += 1;
        let seed = self.rng.below(u64::MAX);
        let me = member(node, self.lives[node]);
        self.nodes[node] = Some(Consensus::new(me, self.expected, self.replicas, seed, self.now));
    }

    fn crash(&mut self, node: usize) {
        self.nodes[node] = None;
        self.flying.retain(|(from, to), _| *from != node && *to != node);
    }

    fn linked(&self, a: usize, b: usize) -> bool {
        self.nodes[a].is_some() && self.nodes[b].is_some() && !self.cut.contains(&(a.min(b), a.max(b)))
    }

    /// Cuts everybody of one side from everybody else.
    fn split(&mut self, side: &[usize]) {
        self.cut.clear();
        for a in 0..self.nodes.len() {
            for b in a + 1..self.nodes.len() {
                if side.contains(&a) != side.contains(&b) {
                    self.cut.insert((a, b));
                }
            }
        }
        let cut = self.cut.clone();
        self.flying.retain(|(a, b), _| !cut.contains(&(*a.min(b), *a.max(b))));
        self.views();
    }

    /// Everybody hears who is there.
    fn views(&mut self) {
        let count = self.nodes.len();
        for node in 0..count {
            let there = (0..count).filter(|other| *other == node || self.linked(node, *other));
            let members: BTreeSet<_> = there.map(|other| member(other, self.lives[other])).collect();
            let now = self.now;
            if let Some(machine) = &mut self.nodes[node] {
                let before = machine.members.clone();
                before.difference(&members).for_each(|gone| machine.handle_peer_down(&gone.peer, now));
                machine.handle_members(&members, true, now);
                members.difference(&before).for_each(|new| machine.handle_peer_up(&new.peer, now));
            }
            self.carry_out(node);
        }
    }

    fn carry_out(&mut self, node: usize) {
        while let Some(effect) = self.nodes[node].as_mut().and_then(Consensus::poll_effect) {
            match effect {
                ConsensusEffect::Send { to, message } => {
                    let target = (0..self.nodes.len()).find(|other| peer(*other, self.lives[*other]) == to);
                    let Some(target) = target.filter(|target| self.linked(node, *target)) else { continue };
                    let bytes = postcard::to_stdvec(&message).unwrap();
                    let message = postcard::from_bytes(&bytes).unwrap();
                    let lane = self.flying.entry((node, target)).or_default();
                    let after = lane.back().map_or(Duration::ZERO, |(at, _)| *at);
                    let at = self.now + Duration::from_millis(1 + self.rng.below(40));
                    lane.push_back((at.max(after), message));
                }
                ConsensusEffect::Decided(partition) => {
                    let config = self.nodes[node].as_ref().unwrap().config(partition).unwrap().clone();
                    let place = (partition, config.epoch.counter);
                    let known = self.decided.entry(place).or_insert_with(|| config.clone());
                    assert!(
                        self.liar || *known == config,
                        "two decisions of one counter: {known:?}, {config:?}"
                    );
                }
            }
        }
        let Some(machine) = &self.nodes[node] else { return };
        if machine.is_established() {
            self.established.insert(machine.group().unwrap().0.clone());
            assert!(self.liar || self.established.len() == 1, "two groups");
        }
    }

    fn run(&mut self, time: Duration) {
        let end = self.now + time;
        loop {
            let arrival = self.flying.values().filter_map(|lane| lane.front().map(|(at, _)| *at)).min();
            let timeout = self.nodes.iter().flatten().filter_map(Consensus::poll_timeout).min();
            let Some(next) = arrival.into_iter().chain(timeout).min().filter(|next| *next <= end) else {
                break;
            };
            self.now = self.now.max(next);
            let due: Vec<_> = self
                .flying
                .iter_mut()
                .filter_map(|(pair, lane)| {
                    let due = lane.front().is_some_and(|(at, _)| *at <= next);
                    due.then(|| lane.pop_front().map(|(_, message)| (*pair, message))).flatten()
                })
                .collect();
            for ((from, to), message) in due {
                let sender = peer(from, self.lives[from]);
                if let Some(machine) = &mut self.nodes[to] {
                    machine.handle_message(&sender, message, self.now);
                }
                self.carry_out(to);
            }
            for node in 0..self.nodes.len() {
                if let Some(machine) = &mut self.nodes[node]
                    && machine.poll_timeout().is_some_and(|at| at <= self.now)
                {
                    machine.handle_timeout(self.now);
                    self.carry_out(node);
                }
            }
        }
        self.now = end;
    }

    /// Wishes the next config of a partition: this node first, then everybody who is there.
    fn wish(&mut self, node: usize, partition: u32) {
        let now = self.now;
        let partition = PartitionId::new(partition);
        let Some(machine) = &mut self.nodes[node] else { return };
        let current = machine.config(partition).cloned();
        let counter = current.as_ref().map_or(1, |config| config.epoch.counter + 1);
        let epoch = Epoch::new(counter, machine.me.peer.clone());
        let mut owners = vec![machine.me.peer.clone()];
        owners.extend(
            machine.members.iter().filter(|other| **other != machine.me).map(|other| other.peer.clone()),
        );
        let (by, expect) = (machine.me.peer.clone(), current.map(|config| config.epoch));
        // born anew each time, so that everybody may wish
        let config = Decided { epoch, owners, born: counter };
        machine.propose(Change { partition, expect, by, config }, now);
        self.carry_out(node);
    }

    fn machine(&self, node: usize) -> &Consensus {
        self.nodes[node].as_ref().unwrap()
    }

    /// Everybody who is there decides and has heard the same.
    fn assert_agreed(&self, seed: u64) {
        let all: Vec<_> = self.nodes.iter().flatten().collect();
        let first: Vec<_> = all[0].configs().collect();
        for machine in &all {
            assert!(machine.can_decide(), "seed {seed}: {machine:?}");
            assert_eq!(machine.configs().collect::<Vec<_>>(), first, "seed {seed}");
        }
        assert_eq!(all.iter().filter(|machine| machine.is_leader()).count(), 1, "seed {seed}");
    }
}

const SECOND: Duration = Duration::from_secs(1);

#[test]
fn a_group_is_founded_when_all_expected_nodes_are_together_and_decides() {
    let mut cluster = Cluster::new(3, 3, 2, 1);
    cluster.run(5 * SECOND);
    cluster.assert_agreed(1);
    cluster.wish(2, 7);
    cluster.wish(1, 7);
    cluster.run(SECOND);
    cluster.assert_agreed(1);
    assert_eq!(cluster.decided.len(), 1, "one of two wishes");
    assert_eq!(cluster.machine(0).quorum(), (3, 2));
    assert!(cluster.nodes.iter().flatten().all(|machine| machine.wishes().next().is_none()));
}

// caught by: a founding with a majority of the expected nodes, or one that does not wait for everybody's word
#[test]
fn two_sides_of_a_split_never_both_begin() {
    for seed in 0..20 {
        let mut cluster = Cluster::new(5, 5, 3, seed);
        let side: Vec<_> = (0..5).filter(|_| cluster.rng.below(2) == 0).collect();
        cluster.split(&side);
        cluster.run(5 * SECOND);
        if !side.is_empty() && side.len() < 5 {
            assert!(cluster.established.is_empty(), "seed {seed}");
        }
        cluster.split(&[]);
        // cut again in the middle of it
        let after = Duration::from_millis(cluster.rng.below(1500));
        cluster.run(after);
        let side: Vec<_> = (0..5).filter(|_| cluster.rng.below(2) == 0).collect();
        cluster.split(&side);
        cluster.run(5 * SECOND);
        cluster.split(&[]);
        cluster.run(10 * SECOND);
        cluster.assert_agreed(seed);
    }
}

// caught by: a restarted voter that comes back under its old number, a voter that is never replaced
#[test]
fn a_restarted_voter_is_a_new_member_and_the_group_outlives_all_its_first_voters() {
    let mut cluster = Cluster::new(3, 3, 2, 5);
    cluster.run(5 * SECOND);
    for round in 0..9 {
        let node = round % 3;
        cluster.crash(node);
        cluster.views();
        cluster.run(3 * SECOND);
        cluster.wish((node + 1) % 3, round as u32);
        cluster.run(SECOND);
        cluster.start(node);
        cluster.views();
        cluster.run(5 * SECOND);
        cluster.assert_agreed(5);
        assert_eq!(
            cluster.machine(node).configs().count(),
            round + 1,
            "it has heard what was decided without it"
        );
        assert_eq!(cluster.machine(node).quorum(), (3, 2));
    }
}

#[test]
fn a_founder_that_dies_in_the_middle_is_followed_by_another_founding() {
    for seed in 0..30 {
        let mut cluster = Cluster::new(3, 3, 2, seed);
        let after = Duration::from_millis(cluster.rng.below(1000));
        cluster.run(after);
        let node = cluster.rng.below(3) as usize;
        cluster.crash(node);
        cluster.views();
        cluster.run(2 * SECOND);
        cluster.start(node);
        cluster.views();
        cluster.run(10 * SECOND);
        cluster.assert_agreed(seed);
    }
}

#[test]
fn without_a_majority_of_voters_nothing_is_decided() {
    let mut cluster = Cluster::new(3, 3, 2, 9);
    cluster.run(5 * SECOND);
    cluster.crash(0);
    cluster.crash(1);
    cluster.views();
    cluster.run(5 * SECOND);
    assert!(!cluster.machine(2).can_decide());
    assert_eq!(cluster.machine(2).quorum(), (1, 2));
    cluster.wish(2, 1);
    cluster.start(0);
    cluster.start(1);
    cluster.views();
    cluster.run(10 * SECOND);
    // two lives without memory, and one that knows a group that cannot decide: no second group
    assert!(cluster.nodes.iter().flatten().all(|machine| !machine.can_decide()));
    assert!(cluster.decided.is_empty());
    // with the last one that knows it the group is over
    cluster.established.clear();
    cluster.crash(2);
    cluster.views();
    cluster.start(2);
    cluster.views();
    cluster.run(10 * SECOND);
    cluster.assert_agreed(9);
}

// caught by: a snapshot that is older than the learner that gets it, a log that is never cut
#[test]
fn a_long_log_is_cut_and_a_newcomer_gets_a_snapshot() {
    let mut cluster = Cluster::new(3, 3, 2, 11);
    cluster.run(5 * SECOND);
    for round in 0..1200 {
        cluster.wish((round % 3) as usize, round % 10);
        cluster.run(Duration::from_millis(50));
    }
    assert!(cluster.machine(0).footprint() < 700, "{}", cluster.machine(0).footprint());
    cluster.crash(1);
    cluster.views();
    cluster.start(1);
    cluster.views();
    cluster.run(5 * SECOND);
    cluster.assert_agreed(11);
    assert_eq!(cluster.machine(1).configs().count(), 10);
}

#[test]
fn splits_crashes_and_late_views_never_give_two_decisions() {
    for seed in 0..25 {
        let count = 3 + (seed % 3) as usize;
        let mut cluster = Cluster::new(count, 3, 2, seed);
        cluster.run(6 * SECOND);
        let mut down = None;
        for _ in 0..30 {
            match cluster.rng.below(5) {
                0 => {
                    let side: Vec<_> = (0..count).filter(|_| cluster.rng.below(2) == 0).collect();
                    cluster.split(&side);
                }
                1 => cluster.split(&[]),
                // one at a time, and only when the last one is back in the group
                2 if down.is_none() && cluster.cut.is_empty() => {
                    cluster.run(5 * SECOND);
                    let node = cluster.rng.below(count as u64) as usize;
                    cluster.crash(node);
                    cluster.views();
                    down = Some(node);
                }
                3 => {
                    if let Some(node) = down.take() {
                        cluster.start(node);
                        cluster.split(&[]);
                    }
                }
                _ => {}
            }
            for _ in 0..3 {
                let (node, partition) =
                    (cluster.rng.below(count as u64) as usize, cluster.rng.below(4) as u32);
                cluster.wish(node, partition);
            }
            let time = Duration::from_millis(cluster.rng.below(3000));
            cluster.run(time);
        }
        if let Some(node) = down {
            cluster.start(node);
        }
        cluster.split(&[]);
        cluster.run(15 * SECOND);
        cluster.assert_agreed(seed);
        assert!(cluster.decided.len() > 10, "seed {seed}: {}", cluster.decided.len());
    }
}

/// Whatever arrives, nothing panics and what is decided stays.
#[test]
fn changed_messages_do_no_harm_to_the_library() {
    let mut taken = 0;
    for seed in 0..20 {
        let mut cluster = Cluster::new(3, 3, 2, seed);
        cluster.run(3 * SECOND);
        cluster.liar = true;
        for round in 0..300 {
            cluster.wish((round % 3) as usize, round % 5);
            let time = Duration::from_millis(cluster.rng.below(60));
            cluster.run(time);
            let lanes: Vec<_> = cluster.flying.iter().filter(|(_, lane)| !lane.is_empty()).collect();
            if lanes.is_empty() {
                continue;
            }
            let pick = lanes[round as usize % lanes.len()];
            let ((from, to), message) = (*pick.0, pick.1[0].1.clone());
            let mut bytes = postcard::to_stdvec(&message).unwrap();
            for _ in 0..1 + cluster.rng.below(3) {
                let at = cluster.rng.below(bytes.len() as u64) as usize;
                bytes[at] = bytes[at].wrapping_add(1 + cluster.rng.below(255) as u8);
            }
            if let Ok(message) = postcard::from_bytes::<ConsensusMessage>(&bytes) {
                taken += 1;
                let (sender, now) = (peer(from, cluster.lives[from]), cluster.now);
                cluster.nodes[to].as_mut().unwrap().handle_message(&sender, message, now);
                // what a liar decides is not looked at: this is about the library's panics
                while cluster.nodes[to].as_mut().unwrap().poll_effect().is_some() {}
            }
        }
    }
    assert!(taken > 500, "{taken}");
}

// caught by: an attempt, a term or an index from the network that the next step overflows
#[test]
fn numbers_that_nobody_counts_to_are_refused() {
    for number in [u64::MAX / 2 + 1, u64::MAX - 1, u64::MAX] {
        let liar = member(1, 1);
        let group = GroupId { attempt: number, founder: liar.clone() };
        let founders: Vec<_> = (0..3).map(|node| member(node, 1)).collect();
        let mut told = vec![
            ConsensusMessage::Found { group: group.clone(), founders },
            ConsensusMessage::Joined { group: group.clone(), opening: liar.opening },
            ConsensusMessage::Refused { promised: group.clone() },
            ConsensusMessage::Established { group: group.clone() },
        ];
        let raft = |group: &GroupId, message| ConsensusMessage::Raft {
            group: group.clone(),
            opening: liar.opening,
            established: true,
            message: Box::new(message),
        };
        let any = RaftMessage::hostile(1, &state::State::default()).remove(0);
        told.push(raft(&group, any));
        for message in told {
            let mut cluster = Cluster::new(3, 3, 2, 13);
            for node in [0, 2] {
                let now = cluster.now;
                cluster.nodes[node].as_mut().unwrap().handle_message(&liar.peer, message.clone(), now);
            }
            // whoever has promised itself to nothing higher founds a group
            cluster.split(&[1]);
            cluster.split(&[]);
            cluster.run(5 * SECOND);
            cluster.assert_agreed(13);
        }
        let mut cluster = Cluster::new(3, 3, 2, 13);
        cluster.run(5 * SECOND);
        let own = cluster.machine(0).group().unwrap().0.clone();
        let decisions = cluster.machine(0).group.as_ref().unwrap().state().clone();
        let terms = |cluster: &Cluster| [0, 1, 2].map(|node| cluster.machine(node).group().unwrap().1);
        let before = terms(&cluster);
        for message in RaftMessage::hostile(number, &decisions) {
            for node in [0, 2] {
                let now = cluster.now;
                let message = raft(&own, message.clone());
                cluster.nodes[node].as_mut().unwrap().handle_message(&liar.peer, message, now);
            }
        }
        assert_eq!(terms(&cluster), before);
        let leader = (0..3).find(|node| cluster.machine(*node).is_leader()).unwrap();
        cluster.crash(leader);
        cluster.views();
        cluster.run(5 * SECOND);
        assert!(cluster.nodes.iter().flatten().all(Consensus::can_decide), "{number}");
    }
}
