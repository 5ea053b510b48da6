//! Copies of one partition, and one group that decides for all of them: what is said arrives at once and in order, unless
//! its receiver stands still.

use super::*;
use crate::cache::config::{CacheConfig, WriteMode};
use crate::cache::consensus::{ConsensusEffect, Member, Wish};
use crate::cache::error::Applied;
use crate::cache::replica::{Budget, Members, Rules};
use crate::cache::store::{SnapshotHeader, Write};
use crate::cache::version::MAX_LINEAGE;
use crate::types::{Incarnation, NodeId};
use crate::{pattern, record};

const MS: Duration = Duration::from_millis(1);

fn id() -> PartitionId {
    PartitionId::new(0)
}

fn peer(node: usize) -> Peer {
    Peer::new(NodeId::new(format!("n{node}")).unwrap(), Incarnation::MIN)
}

struct Net {
    config: CacheConfig,
    group: Consensus,
    /// One that decides nothing.
    leaderless: Consensus,
    copies: Vec<StrongCopy>,
    members: Vec<Members>,
    frozen: BTreeSet<usize>,
    /// These are without a leader.
    lost: BTreeSet<usize>,
    /// What is wished is not decided.
    stuck: bool,
    leases: Leases,
    budget: Budget,
    flying: VecDeque<(usize, Peer, CopyMessage)>,
    written: Vec<(u64, Result<Reply, CacheError>)>,
    now: Duration,
}

impl Net {
    /// The first `owners` of `count` nodes own the partition.
    fn new(count: usize, owners: usize, config: CacheConfig) -> Self {
        let now = Duration::from_secs(1);
        let member = |node| Member { peer: peer(node), opening: 1 };
        let mut group = Consensus::new(member(0), 1, 1, 7, now);
        group.handle_members(&BTreeSet::from([member(0)]), true, now);
        let config = config.write_mode(WriteMode::Strong).replicas(owners);
        let all: BTreeSet<Peer> = (0..count).map(peer).collect();
        let members = Members { live: all.clone(), up: all, draining: BTreeSet::new(), complete: true };
        let mut net = Self {
            config,
            group,
            leaderless: Consensus::new(member(count), 3, 2, 7, now),
            copies: Vec::new(),
            members: vec![members; count],
            frozen: BTreeSet::new(),
            lost: BTreeSet::new(),
            stuck: false,
            leases: Leases::default(),
            budget: Budget::default(),
            flying: VecDeque::new(),
            written: Vec::new(),
            now,
        };
        for node in 0..count {
            let (config, members, budget) = (&net.config, &net.members[node], &net.budget);
            let rules = Rules::default();
            let me = &peer(node);
            net.copies.push(StrongCopy::new(id(), Context { me, config, now, members, rules, budget }));
        }
        net.wait(2000);
        assert!(net.group.can_decide());
        let wanted: Vec<_> = (0..owners).map(peer).collect();
        (0..count).for_each(|node| net.with(node, |copy, ctx| copy.handle_members(&wanted, ctx)));
        net.wait(5000);
        let decided = net.group.config(id()).unwrap();
        assert_eq!(decided.owners, wanted);
        assert!(net.copies[0].serving().is_some() && net.copies[..owners].iter().all(StrongCopy::is_active));
        net
    }

    fn with<R>(&mut self, node: usize, input: impl FnOnce(&mut StrongCopy, StrongContext<'_>) -> R) -> R {
        let (me, rules) = (&peer(node), Rules::default());
        let (config, members, budget) = (&self.config, &self.members[node], &self.budget);
        let base = Context { me, config, now: self.now, members, rules, budget };
        let consensus = if self.lost.contains(&node) { &self.leaderless } else { &self.group };
        let result = input(&mut self.copies[node], StrongContext { base, consensus, leases: &self.leases });
        self.copies[node].check_invariants().unwrap();
        self.carry_out(node);
        result
    }

    fn carry_out(&mut self, node: usize) {
        while let Some(effect) = self.copies[node].poll_effect() {
            let group = if self.lost.contains(&node) { &mut self.leaderless } else { &mut self.group };
            match effect {
                CopyEffect::Send { to, message, .. } => {
                    if self.members[node].up.contains(&to) {
                        self.flying.push_back((node, to, message));
                    }
                }
                CopyEffect::Propose(change) if self.stuck => {
                    group.wishes.insert(id(), Wish { change, again: Duration::MAX });
                }
                CopyEffect::Propose(change) => group.propose(change, self.now),
                CopyEffect::Withdraw(change) => group.withdraw(&change),
                CopyEffect::Written { ticket, result } => self.written.push((ticket, result)),
                CopyEffect::Event(_) | CopyEffect::Changed => {}
            }
        }
    }

    /// All that follows at this moment.
    fn settle(&mut self) {
        loop {
            if let Some(effect) = self.group.poll_effect() {
                if matches!(effect, ConsensusEffect::Decided(_)) {
                    let hears: Vec<_> =
                        (0..self.copies.len()).filter(|node| !self.lost.contains(node)).collect();
                    hears.into_iter().for_each(|node| self.with(node, StrongCopy::handle_decided));
                }
            } else if let Some((from, to, message)) = self.flying.pop_front() {
                let to = (0..self.copies.len()).find(|node| peer(*node) == to).unwrap();
                if !self.frozen.contains(&to) {
                    self.with(to, |copy, ctx| copy.handle_message(&peer(from), message, ctx));
                }
            } else {
                return;
            }
        }
    }

    fn wait(&mut self, ms: u32) {
        let end = self.now + ms * MS;
        while self.now < end {
            self.now += 50 * MS;
            self.group.handle_timeout(self.now);
            for node in 0..self.copies.len() {
                if self.copies[node].poll_timeout().is_some_and(|at| at <= self.now) {
                    self.with(node, StrongCopy::handle_timeout);
                }
            }
            self.settle();
        }
    }

    /// This node sees only these, itself included.
    fn sees(&mut self, node: usize, others: &[usize]) {
        let seen: BTreeSet<Peer> = others.iter().copied().map(peer).collect();
        let before = std::mem::replace(&mut self.members[node].live, seen.clone());
        self.members[node].up.clone_from(&seen);
        for gone in before.difference(&seen) {
            self.with(node, |copy, ctx| copy.handle_peer_down(gone, ctx));
        }
        let wanted = self.copies[node].wanted.clone();
        self.with(node, |copy, ctx| copy.handle_members(&wanted, ctx));
        self.settle();
    }

    fn write(&mut self, ticket: u64, op: &WriteOp) -> Result<(), CacheError> {
        let deadline = self.now + Duration::from_secs(60);
        let result = self.with(0, |copy, ctx| copy.write(ticket, op, deadline, ctx));
        self.settle();
        result
    }
}

fn put(key: i64) -> WriteOp {
    WriteOp::Put(vec![record![key, "value"]])
}

// caught by: a primary that counts the owners of the moment when a write was begun, and not those that are left
#[test]
fn a_write_that_too_few_owners_are_left_of_is_not_answered_as_done() {
    let mut net = Net::new(2, 2, CacheConfig::new("c").min_copies(2));
    net.write(1, &put(1)).unwrap();
    assert!(matches!(&net.written[..], [(1, Ok(_))]), "{:?}", net.written);
    net.written.clear();
    net.frozen.insert(1);
    net.write(2, &put(2)).unwrap();
    // what a pattern finds depends on the write before, so it is not begun yet
    net.write(3, &WriteOp::DeleteMatch(pattern![_, _].try_into().unwrap())).unwrap();
    assert_eq!(net.written, []);
    net.sees(0, &[0]);
    net.wait(1000);
    assert_eq!(net.group.config(id()).unwrap().owners, [peer(0)]);
    let few = CacheError::NotEnoughAcks { got: 1, need: 2 };
    assert_eq!(few.applied(), Applied::Unknown);
    let refused = CacheError::NoQuorum { got: 1, need: 2 };
    assert_eq!(net.written, [(2, Err(few)), (3, Err(refused.clone()))]);
    assert_eq!(net.copies[0].store().len(), 2, "it is there all the same");
    assert_eq!(net.write(4, &put(4)), Err(refused));
}

// caught by: a counter or the number of a write from the network that this node counts on from
#[test]
fn numbers_that_nobody_counts_to_are_refused() {
    for number in [u64::MAX / 2 + 1, u64::MAX] {
        let mut net = Net::new(3, 2, CacheConfig::new("c"));
        let from = peer(1);
        let epoch = |counter| Epoch::new(counter, from.clone());
        let config = |counter| Decided { epoch: epoch(counter), owners: vec![from.clone()], born: 1 };
        let header = |version: Version| {
            let mut store = Store::new(&net.config);
            store.open_epoch(&version.epoch, None).unwrap();
            SnapshotHeader { applied: Some(version), ..store.snapshot_header() }
        };
        let write = |version| CopyMessage::Append {
            stream: 9,
            after: 0,
            entries: vec![(version, Write::Nothing)],
            commit: 0,
        };
        let hostile = [
            CopyMessage::Open { stream: 9, config: config(number) },
            CopyMessage::Open { stream: 9, config: Decided { born: number, ..config(number) } },
            CopyMessage::Opened { stream: 9, whole: true, applied: None, tail: vec![(epoch(1), number)] },
            CopyMessage::Opened { stream: 9, whole: true, applied: None, tail: vec![(epoch(number), 1)] },
            CopyMessage::Opened {
                stream: 9,
                whole: true,
                applied: Some(Version::new(epoch(1), number)),
                tail: Vec::new(),
            },
            CopyMessage::Snapshot { stream: 9, header: header(Version::new(epoch(1), number)) },
            CopyMessage::Snapshot { stream: 9, header: header(Version::new(epoch(number), 1)) },
            CopyMessage::Append { stream: 9, after: number, entries: Vec::new(), commit: number },
            write(Version::new(epoch(number), 1)),
            write(Version::new(epoch(1), number)),
        ];
        for message in hostile {
            assert!(!message.is_sound(), "{message:?}");
            // and so nothing comes of it
            for node in 0..3 {
                net.with(node, |copy, ctx| copy.handle_message(&from, message.clone(), ctx));
            }
        }
        net.with(2, StrongCopy::handle_timeout);
        let _ = net.with(2, StrongCopy::accept_loss);
        net.wait(1000);
        assert_eq!(net.copies[2].config().unwrap().epoch, *net.copies[0].serving().unwrap());
        // what is just allowed does no harm either, when the next one is counted
        net.with(2, |copy, ctx| {
            copy.handle_message(&from, CopyMessage::Open { stream: 9, config: config(u64::MAX / 2) }, ctx);
        });
        net.sees(2, &[2]);
        let _ = net.with(2, StrongCopy::accept_loss);
        net.wait(1000);
    }
}

// caught by: an operator's word that waits, for as long as it takes, until owners are back whose data it throws away
#[test]
fn an_accepted_loss_is_decided_at_once_or_never() {
    let mut net = Net::new(3, 2, CacheConfig::new("c"));
    net.write(1, &put(1)).unwrap();
    net.sees(2, &[2]);
    let before = net.group.config(id()).cloned();
    // nobody decides on its side: it is refused, and nothing is left of it
    net.lost.insert(2);
    let refused = net.with(2, StrongCopy::accept_loss);
    assert!(matches!(refused, Err(CacheError::NoQuorum { .. })), "{refused:?}");
    assert_eq!(net.leaderless.wish(id()), None);
    net.lost.clear();
    net.stuck = true;
    let word = |net: &mut Net| {
        net.with(2, StrongCopy::accept_loss).unwrap();
        net.wait(3000);
        net.group.wish(id()).expect("it waits as long as nothing changes").clone()
    };
    // an owner comes back
    let wish = word(&mut net);
    assert_eq!(wish.config.owners, [peer(2)]);
    net.sees(2, &[1, 2]);
    assert_eq!(net.group.wish(id()), None);
    net.sees(2, &[2]);
    // its side loses the leader: at the end of a split somebody may lead again before an owner is seen
    let wish = word(&mut net);
    net.leaderless.wishes.insert(id(), Wish { change: wish, again: Duration::MAX });
    net.lost.insert(2);
    net.wait(500);
    assert_eq!(net.leaderless.wish(id()), None);
    assert_eq!(net.group.config(id()).cloned(), before);
    // and if none comes back it begins again
    net.lost.clear();
    net.stuck = false;
    net.group.wishes.clear();
    net.with(2, StrongCopy::accept_loss).unwrap();
    net.wait(1000);
    let config = net.group.config(id()).unwrap();
    assert_eq!((&config.owners[..], config.born), (&[peer(2)][..], config.epoch.counter));
    assert!(net.copies[2].serving().is_some() && net.copies[2].store().is_empty());
}

// caught by: tombstones that are forgotten with the next write only, for which they leave no room
#[test]
fn deletes_are_forgotten_by_time() {
    let ttl = Duration::from_secs(20);
    let config = CacheConfig::new("c").max_partition_bytes(100_000).tombstone_ttl(ttl);
    let mut net = Net::new(2, 2, config);
    let mut ticket = 0;
    let full = loop {
        ticket += 2;
        let key = ticket as i64;
        if let Err(error) = net.write(ticket, &put(key)) {
            break error;
        }
        net.write(ticket + 1, &WriteOp::DeleteKeys(vec![key.into()])).unwrap();
        assert!(ticket < 10_000);
    };
    assert!(matches!(full, CacheError::TooLarge { .. }), "{full}");
    let held = |net: &Net| [0, 1].map(|node| net.copies[node].store().tombstones());
    let many = held(&net);
    assert!(many[0] > 100 && many[0] == many[1], "{many:?}");
    assert!(net.copies[0].store().is_empty());
    net.wait(19_000);
    assert_eq!(held(&net), many, "too early");
    assert_eq!(net.write(1, &put(ticket as i64)), Err(full));
    // on every owner, without a write
    net.wait(8_000);
    assert_eq!(held(&net), [0, 0]);
    net.write(1, &put(ticket as i64)).unwrap();
    assert!(net.copies.iter().all(|copy| copy.poll_timeout().is_none_or(|at| at > net.now + ttl)), "idle");
}

// caught by: any stream taken that the primary of today has begun, however long ago
#[test]
fn a_stream_from_before_another_primary_took_over_is_refused() {
    let mut net = Net::new(3, 3, CacheConfig::new("c"));
    let decided = net.group.config(id()).unwrap().clone();
    let primary = decided.epoch.primary.clone();
    net.write(1, &put(1)).unwrap();
    assert_eq!(net.copies[1].data.as_ref().unwrap().newest(), Some(decided.epoch.counter));
    // as if it had led before, and somebody else in between
    let mut late = decided.clone();
    late.epoch.counter -= 1;
    let open = |stream, config: &Decided| CopyMessage::Open { stream, config: config.clone() };
    net.with(1, |copy, ctx| copy.handle_message(&primary, open(900, &late), ctx));
    assert!(!net.copies[1].follows(&primary, 900), "its writes would replace later ones");
    net.with(1, |copy, ctx| copy.handle_message(&primary, open(901, &decided), ctx));
    assert!(net.copies[1].follows(&primary, 901));
}

/// The last write that a copy has applied, as a session remembers it.
fn last(net: &Net, node: usize) -> Version {
    net.copies[node].end().unwrap().clone()
}

/// These two hand the partition to each other until the lineage no longer tells of the epochs before.
fn hand_to_and_fro(net: &mut Net, pair: [usize; 2]) {
    for round in 0..2 * MAX_LINEAGE {
        let [first, second] = [pair[round % 2], pair[(round + 1) % 2]];
        let wanted = [peer(first), peer(second)];
        (0..net.copies.len()).for_each(|node| net.with(node, |copy, ctx| copy.handle_members(&wanted, ctx)));
        net.wait(500);
        assert!(net.copies[first].serving().is_some(), "round {round}");
    }
    assert_eq!(net.copies[pair[0]].store().lineage().entries().len(), MAX_LINEAGE);
}

// caught by: whatever is older than the lineage taken for lost; a takeover that the lineage does not count on from
#[test]
fn a_session_has_its_write_through_takeovers_and_hand_overs_without_number() {
    let mut net = Net::new(3, 2, CacheConfig::new("c"));
    net.write(1, &put(1)).unwrap();
    let write = last(&net, 0);
    net.sees(1, &[1, 2]);
    net.wait(1000);
    assert!(net.copies[1].serving().is_some(), "it takes over");
    assert_eq!(net.copies[1].covers(&write), Coverage::Yes);
    net.sees(1, &[0, 1, 2]);
    hand_to_and_fro(&mut net, [0, 1]);
    for node in [0, 1] {
        assert!(net.copies[node].store().lineage().entries()[0].0 > write.epoch, "nothing tells of it");
        assert_eq!(net.copies[node].covers(&write), Coverage::Yes);
        assert_eq!(net.copies[node].store().len(), 1);
    }
}

// caught by: every epoch before the first one of the lineage taken for one that the copy has; after a cut of the lineage,
// what is in front of its beginning
#[test]
fn a_session_is_told_that_an_accepted_loss_took_its_write() {
    let mut net = Net::new(3, 2, CacheConfig::new("c"));
    net.write(1, &put(1)).unwrap();
    let write = last(&net, 0);
    net.sees(2, &[2]);
    net.with(2, StrongCopy::accept_loss).unwrap();
    net.wait(1000);
    let deadline = net.now + Duration::from_secs(60);
    net.with(2, |copy, ctx| copy.write(2, &put(2), deadline, ctx)).unwrap();
    assert_eq!(net.copies[2].store().len(), 1);
    assert_eq!(net.copies[2].covers(&write), Coverage::Lost);
    let later = last(&net, 2);
    assert_eq!(net.copies[2].covers(&later), Coverage::Yes);
    // however long ago that was
    net.sees(2, &[0, 1, 2]);
    hand_to_and_fro(&mut net, [1, 2]);
    for node in [1, 2] {
        assert_eq!(net.copies[node].covers(&write), Coverage::Lost);
        assert_eq!(net.copies[node].covers(&later), Coverage::Yes);
    }
}

// caught by: a token of a cluster that is no more, which is waited for until the deadline; one of a primary that is there and
// may be ahead, or of a side that this node may only not see, taken for lost
#[test]
fn a_primary_that_may_read_knows_every_write_there_is() {
    let mut net = Net::new(3, 2, CacheConfig::new("c"));
    net.write(1, &put(1)).unwrap();
    let dead = Peer::new(NodeId::new("n0").unwrap(), Incarnation::new(7).unwrap());
    let old = |counter, peer: &Peer| Version::new(Epoch::new(counter, peer.clone()), 5);
    // of its beginning, and of a later time
    assert_eq!(net.copies[0].covers(&old(0, &dead)), Coverage::Lost);
    assert_eq!(net.copies[0].covers(&old(90, &dead)), Coverage::NotYet);
    let would_know = |net: &mut Net, write: &Version| net.with(0, |copy, ctx| copy.would_know(write, ctx));
    assert!(!would_know(&mut net, &old(90, &dead)), "nobody has promised not to take over");
    let now = net.now;
    net.leases.granted(&peer(1), now, 0, now);
    assert!(would_know(&mut net, &old(90, &dead)));
    assert!(!would_know(&mut net, &old(90, &peer(2))), "it may have gone on by an operator's word");
    net.lost.insert(0);
    assert!(!would_know(&mut net, &old(90, &dead)), "what others decide is not heard");
}

fn large(key: u64, bytes: usize) -> WriteOp {
    WriteOp::Put(vec![record![key as i64, "x".repeat(bytes)]])
}

/// Writes until one is refused.
fn fill(net: &mut Net, bytes: usize) -> (u64, CacheError) {
    let mut refused = |ticket| Some((ticket, net.write(ticket, &large(ticket, bytes)).err()?));
    (1..4096).find_map(&mut refused).expect("it is bounded by more than the number of writes")
}

// caught by: what waits bounded by the number of writes only, which may be of half a MiB each, and more from a peer
#[test]
fn what_waits_for_a_slow_owner_is_bounded_in_bytes() {
    let mut net = Net::new(2, 2, CacheConfig::new("c"));
    net.frozen.insert(1);
    let (refused, error) = fill(&mut net, 512 << 10);
    assert_eq!(error, CacheError::Busy);
    assert!((32..=33).contains(&refused), "{refused}");
    assert_eq!(net.write(9000, &WriteOp::DeleteAll), Err(CacheError::Busy), "whatever it is");
    // what nobody waits for any more makes room
    net.with(0, |copy, _| copy.forget(refused - 1));
    assert_eq!(net.write(9001, &WriteOp::DeleteKeys(vec![1.into()])), Ok(()));
    assert_eq!(net.write(9002, &put(1)), Ok(()));
    net.sees(0, &[0]);
    net.wait(1000);
    assert_eq!(net.written.len() as u64, refused - 2 + 2);
    assert!(net.written.iter().all(|(_, result)| result.is_ok()), "{:?}", net.written);
    assert_eq!(net.write(9003, &put(2)), Ok(()), "and nothing waits");
}

// caught by: what waits not counted with what is there: a partition that is several times as large as it may be
#[test]
fn what_waits_does_not_fill_a_partition_beyond_its_size() {
    let mut net = Net::new(2, 2, CacheConfig::new("c").max_partition_bytes(100_000));
    net.frozen.insert(1);
    let (refused, error) = fill(&mut net, 1000);
    assert_eq!(error, CacheError::Busy, "it may replace what is there: nobody knows yet");
    assert!((80..=100).contains(&refused), "{refused}");
    net.sees(0, &[0]);
    net.wait(1000);
    assert_eq!(net.written.len() as u64, refused - 1);
    assert!(net.copies[0].store().bytes() <= 100_000);
    // and now it is known
    let (_, error) = fill(&mut net, 50_000);
    assert!(matches!(error, CacheError::TooLarge { .. }), "{error}");
}
