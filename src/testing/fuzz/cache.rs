//! What the cache reads from peers: terms, patterns, and everything that goes into a store.

use std::time::Duration;

use super::{Input, peer};
use crate::cache::store::{Cursor, SnapshotHeader};
use crate::cache::{
    CacheConfig, Entry, Epoch, Record, RecordPattern, Store, Table, Term, Write, from_term, to_term,
};
use crate::record;

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
                .is_ok_and(|entries| store.repair(&entries, now).is_ok()),
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
