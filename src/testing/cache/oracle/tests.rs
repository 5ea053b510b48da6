use std::time::Duration;

use super::*;
use crate::cache::{CacheConfig, PartitionId, Record, Write};
use crate::types::{Incarnation, NodeId, Peer};

fn epoch(counter: u64, node: &str) -> Epoch {
    Epoch::new(counter, Peer::new(NodeId::new(node).unwrap(), Incarnation::MIN))
}

fn version(counter: u64, node: &str, seq: u64) -> Version {
    Version::new(epoch(counter, node), seq)
}

struct Bench(Oracle);

impl Bench {
    fn new(kind: Kind) -> Self {
        Self(Oracle::new(kind, true, 1, 8))
    }

    fn begin(&mut self, session: usize, what: What, mode: WriteMode) -> usize {
        let mut op = Op::new(0, 0, session, what);
        op.write_mode = mode;
        self.0.begin(op)
    }

    /// A put of one record, begun: the operation and the record's number.
    fn put(&mut self, session: usize, key: i64, mode: WriteMode) -> (usize, i64) {
        let number = self.0.next_record();
        (self.begin(session, What::Put(vec![(key, number)]), mode), number)
    }

    /// A put that was acknowledged.
    fn kept(&mut self, key: i64, mode: WriteMode, at: Version) -> i64 {
        let (op, number) = self.put(0, key, mode);
        self.0.succeed(op, Some(at), None).unwrap();
        number
    }

    fn read(&mut self, mode: ReadMode, key: i64, seen: &[i64]) -> Result<(), Violation> {
        let mut op = Op::new(1, 0, 1, What::Get(key));
        op.read_mode = mode;
        op.token = self.0.token(1, 0);
        let op = self.0.begin(op);
        let seen: Vec<(i64, i64)> = seen.iter().map(|number| (key, *number)).collect();
        self.0.succeed(op, None, Some(&seen))
    }
}

fn promise(result: Result<(), Violation>) -> &'static str {
    result.map_or_else(|violation| violation.promise, |()| "kept")
}

#[test]
fn an_acknowledged_write_that_is_not_seen_is_lost() {
    let mut bench = Bench::new(Kind::Whole);
    let old = bench.kept(1, WriteMode::Sync, version(1, "a", 1));
    let new = bench.kept(1, WriteMode::Sync, version(1, "a", 2));
    assert_eq!(promise(bench.read(ReadMode::Primary, 1, &[new])), "kept");
    assert_eq!(promise(bench.read(ReadMode::Quorum, 1, &[old])), "lost");
    assert_eq!(promise(bench.read(ReadMode::Primary, 1, &[])), "lost");
    assert_eq!(promise(bench.read(ReadMode::Local, 1, &[old])), "kept", "nothing is promised of those");
}

#[test]
fn a_crash_may_take_async_writes_and_no_others() {
    let mut bench = Bench::new(Kind::Whole);
    bench.kept(1, WriteMode::Async, version(1, "a", 1));
    assert_eq!(promise(bench.read(ReadMode::Primary, 1, &[])), "lost");
    bench.0.crash();
    assert_eq!(promise(bench.read(ReadMode::Primary, 1, &[])), "kept");
    bench.kept(1, WriteMode::Sync, version(2, "b", 1));
    bench.0.crash();
    assert_eq!(promise(bench.read(ReadMode::Primary, 1, &[])), "lost");
}

#[test]
fn what_was_deleted_does_not_come_back() {
    let mut bench = Bench::new(Kind::Whole);
    let number = bench.kept(1, WriteMode::Sync, version(1, "a", 1));
    let delete = bench.begin(0, What::DeleteKeys(vec![1]), WriteMode::Sync);
    assert_eq!(promise(bench.read(ReadMode::Primary, 1, &[])), "kept", "a delete is under way");
    assert_eq!(promise(bench.read(ReadMode::Primary, 1, &[number])), "kept");
    bench.0.succeed(delete, Some(version(1, "a", 2)), None).unwrap();
    assert_eq!(promise(bench.read(ReadMode::Primary, 1, &[])), "kept");
    assert_eq!(promise(bench.read(ReadMode::Primary, 1, &[number])), "resurrected");
    let other = bench.kept(2, WriteMode::Sync, version(1, "a", 3));
    let delete = bench.begin(0, What::DeleteMatch(class_of(other)), WriteMode::Sync);
    bench.0.succeed(delete, Some(version(1, "a", 4)), None).unwrap();
    assert_eq!(promise(bench.read(ReadMode::Primary, 2, &[other])), "resurrected");
}

#[test]
fn what_never_was_is_seen_nowhere() {
    let mut bench = Bench::new(Kind::Wild);
    let (op, number) = bench.put(0, 1, WriteMode::Sync);
    bench.0.fail(op, &CacheError::Busy).unwrap();
    assert_eq!(promise(bench.read(ReadMode::Local, 1, &[number])), "visible");
    let (op, number) = bench.put(0, 1, WriteMode::Sync);
    assert_eq!(promise(bench.read(ReadMode::Local, 1, &[number])), "kept");
    assert_eq!(promise(bench.0.fail(op, &CacheError::Busy)), "visible");
    assert_eq!(promise(bench.read(ReadMode::Local, 1, &[77])), "invented");
    assert_eq!(promise(bench.read(ReadMode::Local, 2, &[number])), "invented", "under another key");
}

#[test]
fn a_session_sees_its_own_writes() {
    let mut bench = Bench::new(Kind::Wild);
    let (op, old) = bench.put(1, 1, WriteMode::Async);
    bench.0.succeed(op, Some(version(1, "a", 1)), None).unwrap();
    let (op, new) = bench.put(1, 1, WriteMode::Async);
    bench.0.succeed(op, Some(version(1, "a", 2)), None).unwrap();
    assert_eq!(promise(bench.read(ReadMode::Local, 1, &[new])), "kept");
    assert_eq!(promise(bench.read(ReadMode::Local, 1, &[old])), "session");
    let lost = CacheError::WriteLost { partition: PartitionId::new(0), version: version(1, "a", 2) };
    let op = bench.0.begin(Op::new(1, 0, 1, What::Get(1)));
    bench.0.fail(op, &lost).unwrap();
    assert_eq!(promise(bench.read(ReadMode::Local, 1, &[old])), "kept", "it was told");

    let mut bench = Bench::new(Kind::Whole);
    let (op, _) = bench.put(1, 1, WriteMode::Sync);
    bench.0.succeed(op, Some(version(1, "a", 2)), None).unwrap();
    let op = bench.0.begin(Op::new(1, 0, 1, What::Get(1)));
    assert_eq!(promise(bench.0.fail(op, &lost)), "session", "no fault of the run may have taken it");
}

#[test]
fn epochs_and_versions_name_one_thing() {
    let mut bench = Bench::new(Kind::Wild);
    let (a, b) = (epoch(1, "a"), epoch(1, "b"));
    assert_eq!(promise(bench.0.serves(0, &a, (0, 1, 1), &a.primary)), "kept");
    assert_eq!(promise(bench.0.serves(0, &a, (0, 1, 1), &a.primary)), "kept");
    assert_eq!(promise(bench.0.serves(0, &a, (0, 1, 2), &a.primary)), "epoch", "opened again");
    assert_eq!(promise(bench.0.serves(0, &b, (0, 1, 1), &a.primary)), "epoch", "of another");
    bench.kept(1, WriteMode::Sync, version(1, "a", 1));
    let (op, _) = bench.put(0, 1, WriteMode::Sync);
    assert_eq!(promise(bench.0.succeed(op, Some(version(1, "a", 1)), None)), "version");
    let base = |seq| [(epoch(1, "a"), None), (epoch(2, "a"), Some(version(1, "a", seq)))];
    assert_eq!(promise(bench.0.history(0, &base(3))), "kept");
    assert_eq!(promise(bench.0.history(0, &base(4))), "epoch");
}

fn record(key: i64, number: i64) -> Record {
    Record::new([key.into(), number.into(), class_of(number).into()])
}

fn store(epochs: &[(Epoch, Option<Version>)], writes: &[(Write, Version)]) -> Store {
    let mut store = Store::new(&CacheConfig::default());
    let mut epochs = epochs.iter();
    for (write, version) in writes {
        while store.epoch() != Some(&version.epoch) {
            let (epoch, base) = epochs.next().unwrap();
            store.open_epoch(epoch, base.as_ref()).unwrap();
        }
        store.apply(write, version, Duration::ZERO).unwrap();
    }
    store
}

#[test]
fn a_copy_has_what_its_history_tells_of() {
    let mut bench = Bench::new(Kind::Wild);
    let number = bench.kept(1, WriteMode::Async, version(1, "a", 1));
    bench.kept(2, WriteMode::Async, version(1, "a", 2));
    let begun = [(epoch(1, "a"), None)];
    let put = (Write::Put(record(1, number)), version(1, "a", 1));
    let behind = store(&begun, std::slice::from_ref(&put));
    assert_eq!(promise(bench.0.judge_copy(0, "n0", &behind)), "kept");
    let hole = store(&begun, &[put, (Write::Nothing, version(1, "a", 2))]);
    assert_eq!(promise(bench.0.judge_copy(0, "n0", &hole)), "hole");
}

#[test]
fn a_delete_that_both_sides_of_a_split_made_is_not_lost() {
    let deleted = |bench: &mut Bench, at: Version| {
        let op = bench.begin(0, What::DeleteKeys(vec![1]), WriteMode::Async);
        bench.0.succeed(op, Some(at), None).unwrap();
    };
    let begun = [(epoch(2, "b"), None)];
    let write = |key: i64| Write::DeleteKeys(vec![Term::from(key)]);
    let mut bench = Bench::new(Kind::Split);
    deleted(&mut bench, version(1, "a", 1));
    let other = store(&begun, &[(write(2), version(2, "b", 1))]);
    assert_eq!(promise(bench.0.account(0, &other)), "unreported", "another key");
    deleted(&mut bench, version(2, "b", 1));
    let same = store(&begun, &[(write(1), version(2, "b", 1))]);
    assert_eq!(promise(bench.0.account(0, &same)), "kept");
}

#[test]
fn what_a_split_takes_is_reported() {
    let loser =
        |key: i64, at: Version, by: Version| Loser { key: Some(key.into()), record: None, version: at, by };
    // b began from nothing, a lost
    let other = store(&[(epoch(2, "b"), None)], &[(Write::Put(record(9, 0)), version(2, "b", 1))]);
    let lost = || {
        let mut bench = Bench::new(Kind::Split);
        bench.kept(9, WriteMode::Sync, version(2, "b", 1));
        bench.kept(1, WriteMode::Sync, version(1, "a", 1));
        bench
    };
    assert_eq!(promise(lost().0.account(0, &other)), "unreported");
    let mut bench = lost();
    bench.0.conflict(0, loser(1, version(1, "a", 1), version(2, "b", 1))).unwrap();
    assert_eq!(promise(bench.0.account(0, &other)), "kept");
    let mut bench = lost();
    bench.0.conflict(0, loser(1, version(1, "a", 7), version(2, "b", 1))).unwrap();
    assert_eq!(promise(bench.0.account(0, &other)), "kept", "one that came after it was reported");
    let mut bench = lost();
    bench.0.conflict(0, loser(2, version(1, "a", 1), version(2, "b", 1))).unwrap();
    assert_eq!(promise(bench.0.account(0, &other)), "unreported", "another key");
}
