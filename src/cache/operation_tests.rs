#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use std::time::Duration;

use super::*;
use crate::cache::config::Table;
use crate::cache::version::Epoch;
use crate::cache::{Pattern, var};
use crate::types::{Incarnation, NodeId, Peer};
use crate::{pattern, record};

fn store_of(config: &CacheConfig, records: &[Record]) -> Store {
    let mut store = Store::new(config);
    let primary = Peer::new(NodeId::new("a").unwrap(), Incarnation::MIN);
    store.open_epoch(&Epoch::new(1, primary), None).unwrap();
    for record in records {
        let version = store.next_version().unwrap();
        store.apply(&Write::Put(record.clone()), &version, Duration::ZERO).unwrap();
    }
    store
}

#[test]
fn a_batch_is_one_entry_for_each_record_and_what_finds_nothing_is_one_too() {
    let config = CacheConfig::new("c");
    let store = store_of(&config, &[record!["a", 1], record!["b", 1], record!["c", 2]]);
    let plan = |op: WriteOp| op.plan(&store).unwrap();
    let records = vec![record!["x", 1], record!["y", 1]];
    let puts: Vec<Write> = records.iter().cloned().map(Write::Put).collect();
    assert_eq!(plan(WriteOp::Put(records)), puts);
    assert_eq!(plan(WriteOp::DeleteAll), [Write::DeleteAll]);
    let ones = RecordPattern::new(pattern![_, 1]).unwrap();
    assert_eq!(plan(WriteOp::DeleteMatch(ones)), [Write::DeleteKeys(vec!["a".into(), "b".into()])]);
    let none = RecordPattern::new(pattern![_, 9]).unwrap();
    assert_eq!(plan(WriteOp::DeleteMatch(none)), [Write::Nothing]);
    assert_eq!(plan(WriteOp::Put(vec![])), [Write::Nothing]);
    let long = RecordPattern::new(pattern![_, _, _]).unwrap();
    assert!(matches!(WriteOp::DeleteMatch(long).plan(&store), Err(CacheError::Pattern(_))));
}

// caught by: one entry however large, which no frame could carry
#[test]
fn a_delete_of_many_keys_is_cut() {
    let store = store_of(&CacheConfig::new("c"), &[]);
    let keys: Vec<Term> = (0..40).map(|n| Term::from(format!("{n:0>20000}"))).collect();
    let plan = WriteOp::DeleteKeys(keys.clone()).plan(&store).unwrap();
    assert_eq!(plan.len(), 4, "12 fit each");
    let together: Vec<Term> = plan
        .into_iter()
        .flat_map(|write| match write {
            Write::DeleteKeys(keys) => keys,
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(together, keys);
    let one = WriteOp::DeleteKeys(vec![Term::from("x".repeat(ENTRY_BYTES * 2))]);
    assert_eq!(one.plan(&store).unwrap().len(), 1);
}

#[test]
fn what_belongs_elsewhere_or_is_not_allowed_is_refused() {
    let config = CacheConfig::new("c").partition_field(1).arity(Some(2)).max_batch_records(2);
    let home = config.partition_of(&"p".into());
    let check = |op: Operation| op.check(&config, home);
    let put = |records: Vec<Record>| Operation::Write(WriteOp::Put(records));
    assert_eq!(check(put(vec![record!["k", "p"]])), Ok(()));
    let elsewhere = config.partition_of(&"q".into());
    assert_ne!(home, elsewhere);
    let there = CacheError::WrongOwner { partition: elsewhere, primary: None, epoch: None };
    assert_eq!(check(put(vec![record!["k", "p"], record!["k", "q"]])), Err(there.clone()));
    assert!(matches!(check(put(vec![record!["k", "p", 1]])), Err(CacheError::Arity { .. })));
    assert!(matches!(
        check(put(vec![record!["k", "p"]; 3])),
        Err(CacheError::TooLarge { given: 3, max: 2, .. })
    ));
    // the key does not tell the partition here, and a pattern may
    assert_eq!(check(Operation::Read(ReadOp::Get("anything".into()))), Ok(()));
    let matching =
        |second| Operation::Read(ReadOp::MatchObject(RecordPattern::new([Pattern::Any, second]).unwrap()));
    assert_eq!(check(matching("p".into())), Ok(()));
    assert_eq!(check(matching(var(1))), Ok(()));
    assert_eq!(check(matching("q".into())), Err(there));
    let nan = Operation::Write(WriteOp::DeleteKeys(vec![f64::NAN.into()]));
    assert!(matches!(check(nan), Err(CacheError::Term(_))));
}

#[test]
fn a_second_put_shows_only_where_copies_are_kept() {
    let put = Operation::Write(WriteOp::Put(vec![record!["k", 1]]));
    for (table, harmless) in
        [(Table::Set, true), (Table::OrderedSet, true), (Table::Bag, true), (Table::DuplicateBag, false)]
    {
        assert_eq!(put.is_idempotent(&CacheConfig::new("c").table(table)), harmless, "{table}");
    }
}
