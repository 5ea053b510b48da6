//! What the cache reads from peers: terms, patterns, and everything that goes into a store.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use super::{Input, peer};
use crate::cache::node::{CacheEffect, CacheMessage, CacheNode, Shard, codec};
use crate::cache::store::{Cursor, SnapshotHeader};
use crate::cache::{
    CacheConfig, Entry, Epoch, Operation, Options, PartitionId, ReadMode, ReadOp, Record, RecordPattern,
    Store, Table, Term, Write, WriteMode, WriteOp, from_term, to_term,
};
use crate::record;
use crate::types::Peer;

/// The decoder of terms. What is read is written in the same bytes, and goes through serde unchanged.
pub fn cache_term(input: &[u8]) -> bool {
    let Ok(term) = Term::decode(input) else { return false };
    assert_eq!(term.encode().as_deref(), Ok(input), "one term, one encoding");
    assert_eq!(term.encoded_len(), input.len());
    assert_eq!(to_term(&term).as_ref(), Ok(&term));
    assert_eq!(from_term::<Term>(&term).as_ref(), Ok(&term));
    if let Ok(record) = Record::decode(input) {
        assert_eq!(record.stable_hash(), term.stable_hash(), "a record is its tuple");
    }
    true
}

/// The decoder of patterns. What is read can be written and read again, and is used without harm.
pub fn cache_pattern(input: &[u8]) -> bool {
    let Ok(pattern) = RecordPattern::decode(input) else { return false };
    assert_eq!(RecordPattern::decode(&pattern.encode()).as_ref(), Ok(&pattern));
    let records = [record![], record!["a"], record!["a", 1], record![1, ("a", [1, 1]), Term::Nil]];
    for record in records.iter().chain(&Record::decode(input).ok()) {
        let bound = pattern.bindings(record);
        assert_eq!(bound.is_some(), pattern.fits(record));
        assert!(bound.is_none_or(|values| values.len() == pattern.variables().len()));
    }
    true
}

/// A store among peers that send anything. The first byte is the kind of its table; then come orders: writes, entries,
/// headers, cursors, epochs, time. Its invariants are checked after each.
pub fn cache_store(input: &[u8]) -> bool {
    let mut input = Input(input);
    let table = match input.next() % 4 {
        0 => Table::Set,
        1 => Table::OrderedSet,
        2 => Table::Bag,
        _ => Table::DuplicateBag,
    };
    let config = CacheConfig::new("fuzz").table(table);
    let Some(primary) = peer("a", 1) else { return false };
    let mut store = Store::new(&config);
    let (mut now, mut heard) = (Duration::ZERO, false);
    while let Some(order) = input.byte() {
        heard |= match order % 6 {
            0 => postcard::from_bytes::<Write>(input.bytes()).is_ok_and(|write| {
                let next = store.next_version();
                next.is_some_and(|version| store.apply(&write, &version, now).is_ok())
            }),
            1 => postcard::from_bytes::<Vec<Entry>>(input.bytes())
                .is_ok_and(|entries| store.install(&entries, now).is_ok()),
            2 => postcard::from_bytes::<SnapshotHeader>(input.bytes()).is_ok_and(|header| {
                let begun = Store::from_header(&config, header);
                begun.is_ok_and(|begun| {
                    store = begun;
                    true
                })
            }),
            3 => {
                let cursor = postcard::from_bytes::<Cursor>(input.bytes()).ok();
                let chunk = store.chunk(cursor.as_ref(), usize::from(input.next()) * 16);
                let mut copy = Store::new(&config);
                assert_eq!(copy.install(&chunk.entries, now), Ok(()), "what was held can be held");
                assert_eq!(copy.check_invariants(), Ok(()));
                cursor.is_some()
            }
            4 => {
                let counter = store.epoch().map_or(0, |epoch| epoch.counter).saturating_add(1);
                let base = store.applied().cloned();
                store.open_epoch(&Epoch::new(counter, primary.clone()), base.as_ref()).is_ok()
            }
            _ => {
                now += input.time();
                let all = store.applied().cloned();
                all.is_some_and(|all| store.purge(now, Duration::from_secs(1), &all, 8) > 0)
            }
        };
        assert_eq!(store.check_invariants(), Ok(()), "the store is sound");
    }
    heard
}

/// The decoder of cache messages. What is heard can be said, and is then heard the same.
pub fn cache_message(input: &[u8]) -> bool {
    let Ok(heard) = codec::decode(input) else { return false };
    let mut said = Vec::new();
    for message in &heard {
        assert_eq!(codec::encode(message, &mut said), Ok(()), "what was heard can be said");
    }
    assert_eq!(codec::decode(&said).as_ref(), Ok(&heard));
    !heard.is_empty()
}

/// A whole cache node among peers that say anything. The input is a list of orders: the view changes, peers come and go,
/// greet, send what the input says; this node is asked; time passes. Its invariants are checked after each, and every
/// operation ends once.
pub fn cache_node(input: &[u8]) -> bool {
    let config = CacheConfig::new("fuzz").partitions(2).replicas(2).table(Table::DuplicateBag);
    Alone::new(config).is_some_and(|alone| alone.live(input))
}

/// The same in write mode `Strong`, where peers also say what a consensus and its copies say.
#[cfg(feature = "consensus")]
pub fn cache_strong(input: &[u8]) -> bool {
    let config = CacheConfig::new("fuzz").partitions(2).replicas(2).expected_nodes(Some(3));
    Alone::new(config.write_mode(WriteMode::Strong)).is_some_and(|alone| alone.live(input))
}

/// Numbers next to which something may run over.
const EXTREME: [u64; 8] =
    [0, 1, u64::MAX / 2 - 1, u64::MAX / 2, u64::MAX / 2 + 1, 3 << 61, u64::MAX - 1, u64::MAX];

/// The same bytes with another number in the place of a small one: bytes that are changed at random hardly ever become a
/// large one.
fn with_number(bytes: &[u8], at: u8, number: u64) -> Vec<u8> {
    let (mut number, at) = (number, usize::from(at) % bytes.len().max(1));
    let mut changed = bytes.get(..at).unwrap_or_default().to_vec();
    while number >= 0x80 {
        changed.push(number as u8 | 0x80);
        number >>= 7;
    }
    changed.push(number as u8);
    // the whole of the number that was there
    let old = bytes.iter().skip(at).take_while(|byte| **byte >= 0x80).count();
    changed.extend(bytes.iter().skip(at + old + 1));
    changed
}

impl Alone {
    fn live(mut self, input: &[u8]) -> bool {
        let mut input = Input(input);
        while let Some(order) = input.byte() {
            self.order(order, &mut input);
            self.follow();
        }
        self.heard > 0
    }
}

/// One node and what it is told.
struct Alone {
    node: CacheNode,
    now: Duration,
    peers: Vec<Peer>,
    up: BTreeSet<Peer>,
    asked: BTreeSet<u64>,
    tickets: u64,
    heard: u64,
}

impl Alone {
    fn new(config: CacheConfig) -> Option<Self> {
        let now = Duration::from_secs(1);
        let node = CacheNode::new(peer("a", 1)?, Arc::new(config), Shard::ALL, 7, now);
        let peers = vec![peer("b", 1)?, peer("c", 1)?, peer("b", 2)?];
        Some(Self { node, now, peers, up: BTreeSet::new(), asked: BTreeSet::new(), tickets: 0, heard: 0 })
    }

    fn order(&mut self, order: u8, input: &mut Input<'_>) {
        let Some(peer) = self.peers.get(usize::from(order >> 4) % self.peers.len()).cloned() else { return };
        let now = self.now;
        match order & 15 {
            0 => {
                // one life of a name at a time
                if !self.up.iter().any(|up| up.node == peer.node) {
                    self.up.insert(peer.clone());
                    self.node.handle_peer_up(&peer, now);
                }
            }
            1 => {
                if self.up.remove(&peer) {
                    self.node.handle_peer_down(&peer, now);
                }
            }
            2 => {
                let drawn = input.next();
                let others = self.peers.iter().enumerate().filter(|(at, _)| drawn >> at & 1 == 1);
                let mut view: Vec<Peer> = others.map(|(_, peer)| peer.clone()).collect();
                view.push(self.node.me().clone());
                self.node.handle_view(&view, drawn & 128 == 0, now);
            }
            3 if self.up.contains(&peer) => {
                let hello = CacheMessage::Hello {
                    terms: self.node.config().terms(),
                    shards: 1,
                    life: u32::from(input.next() & 3),
                    draining: order & 128 != 0,
                    heard: true,
                };
                self.node.handle_message(&peer, hello, now);
            }
            4..=7 if self.up.contains(&peer) => self.hear(&peer, input.bytes()),
            8 | 9 if self.up.contains(&peer) => {
                let (at, which) = (input.next(), input.next());
                let number = EXTREME.iter().cycle().nth(which.into()).copied().unwrap_or_default();
                self.hear(&peer, &with_number(input.bytes(), at, number));
            }
            10 | 11 => {
                self.now += input.time();
                self.node.handle_timeout(self.now);
            }
            12 | 13 => self.operate(input),
            14 => self.node.cancel(self.tickets),
            _ => match input.next() {
                0 => self.node.drain(now),
                1 => self.node.close(now),
                2..=9 => drop(self.node.accept_loss(PartitionId::new(u32::from(order >> 4) & 1), now)),
                _ => {}
            },
        }
    }

    fn hear(&mut self, peer: &Peer, bytes: &[u8]) {
        for mut message in codec::decode(bytes).unwrap_or_default() {
            self.heard += 1;
            let right = self.node.session(peer);
            match &mut message {
                CacheMessage::Replica { session, .. } => *session = right.unwrap_or(*session),
                #[cfg(feature = "consensus")]
                CacheMessage::Strong { session, .. } => *session = right.unwrap_or(*session),
                _ => {}
            }
            self.node.handle_message(peer, message, self.now);
        }
    }

    fn operate(&mut self, input: &mut Input<'_>) {
        let key = [Term::from(1), Term::from(2)][usize::from(input.next() & 1)].clone();
        let config = self.node.config().clone();
        let partition = config.partition_of(&key);
        let kind = input.next();
        let operation = match kind % 4 {
            0 => Operation::Read(ReadOp::Get(key)),
            1 => Operation::Write(WriteOp::DeleteKeys(vec![key])),
            2 => Operation::Write(WriteOp::DeleteAll),
            _ => Operation::Write(WriteOp::Put(vec![Record::new([key, Term::from(kind)])])),
        };
        let mut options = Options::of(&config, self.now);
        options.read_mode =
            [ReadMode::Local, ReadMode::Primary, ReadMode::Quorum, ReadMode::Quorum][usize::from(kind >> 6)];
        if kind & 32 != 0 {
            options.write_mode = WriteMode::Async;
        }
        self.tickets += 1;
        self.asked.insert(self.tickets);
        self.node.operate(self.tickets, partition, operation, options, self.now);
    }

    fn follow(&mut self) {
        while let Some(effect) = self.node.poll_effect() {
            match effect {
                CacheEffect::Done { ticket, .. } => assert!(self.asked.remove(&ticket), "{ticket} ends once"),
                CacheEffect::Send { to, message, .. } => {
                    assert!(self.up.contains(&to), "{message:?} to {to}, which is not up");
                    let mut said = Vec::new();
                    assert_eq!(codec::encode(&message, &mut said), Ok(()));
                    assert_eq!(codec::decode(&said), Ok(vec![message]), "what is said is heard");
                }
                CacheEffect::Event(_) | CacheEffect::Changed => {}
            }
        }
        assert_eq!(self.node.check_invariants(), Ok(()), "the node is sound");
        assert!(self.node.footprint() < 4096, "nothing grows without bound");
    }
}
