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

/// A copy of one epoch, made by these writes.
fn copy_of(writes: &[Write]) -> Store {
    let numbered = writes.iter().zip(1..).map(|(write, seq)| (write.clone(), version(1, "a", seq)));
    store(&[(epoch(1, "a"), None)], &numbered.collect::<Vec<_>>())
}

fn deleted(bench: &mut Bench, key: i64, at: Version) {
    let op = bench.begin(0, What::DeleteKeys(vec![key]), WriteMode::Sync);
    bench.0.succeed(op, Some(at), None).unwrap();
}

#[test]
fn a_delete_of_unknown_fate_excuses_nothing_that_comes_after_a_time_of_rest() {
    let lost = |rest: bool| {
        let mut bench = Bench::new(Kind::Whole);
        let op = bench.begin(2, What::DeleteKeys(vec![1]), WriteMode::Sync);
        bench.0.fail(op, &CacheError::Timeout { applied: Applied::Unknown }).unwrap();
        if rest {
            bench.0.settle();
        }
        bench.kept(1, WriteMode::Sync, version(1, "a", 2));
        promise(bench.read(ReadMode::Primary, 1, &[]))
    };
    assert_eq!(lost(false), "kept", "it may still come");
    assert_eq!(lost(true), "lost");

    // a put of unknown fate that a delete came after is not seen again
    let mut bench = Bench::new(Kind::Whole);
    let (op, number) = bench.put(2, 1, WriteMode::Sync);
    bench.0.abandon(op);
    bench.0.settle();
    deleted(&mut bench, 1, version(1, "a", 2));
    assert_eq!(promise(bench.read(ReadMode::Primary, 1, &[number])), "resurrected");
}

#[test]
fn an_absence_is_explained_by_a_delete_and_not_by_what_is_forgotten() {
    let forgetful = || {
        let mut copy = copy_of(&[Write::Put(record(2, 0)), Write::DeleteKeys(vec![1.into()])]);
        copy.purge(Duration::from_secs(9), Duration::ZERO, &version(1, "a", 2), 10);
        assert_eq!(copy.purged_through(), Some(&version(1, "a", 2)));
        copy
    };
    let with = |key: i64, is_set: bool| {
        let mut bench = Bench(Oracle::new(Kind::Wild, is_set, 1, 8));
        bench.kept(key, WriteMode::Sync, version(1, "a", 1));
        deleted(&mut bench, 1, version(1, "a", 2));
        promise(bench.0.judge_copy(0, "n0", &forgetful()))
    };
    for is_set in [true, false] {
        assert_eq!(with(2, is_set), "kept");
        assert_eq!(with(3, is_set), "hole", "another key was deleted");
    }

    // a delete that was settled before the put began has not taken it
    let (writes, at) = ([Write::Nothing, Write::Nothing], version(1, "a", 1));
    for settled in [true, false] {
        let mut bench = Bench::new(Kind::Wild);
        let op = bench.begin(2, What::DeleteKeys(vec![1]), WriteMode::Sync);
        bench.0.abandon(op);
        if settled {
            bench.0.settle();
        }
        bench.kept(1, WriteMode::Sync, at.clone());
        let mut copy = copy_of(&writes);
        copy.apply(&Write::DeleteKeys(vec![1.into()]), &version(1, "a", 3), Duration::ZERO).unwrap();
        let expected = if settled { "hole" } else { "kept" };
        assert_eq!(promise(bench.0.judge_copy(0, "n0", &copy)), expected);
    }
}

#[test]
fn a_delete_that_was_made_on_both_sides_of_a_split_may_have_taken_what_was_put_meanwhile() {
    let with = |kind: Kind, meanwhile: bool| {
        let mut bench = Bench(Oracle::new(kind, true, 1, 8));
        let delete = bench.begin(2, What::DeleteKeys(vec![1]), WriteMode::Async);
        let end = |bench: &mut Bench| bench.0.succeed(delete, Some(version(2, "a", 1)), None).unwrap();
        if meanwhile {
            bench.kept(1, WriteMode::Sync, version(2, "b", 1));
            end(&mut bench);
        } else {
            end(&mut bench);
            bench.kept(1, WriteMode::Sync, version(2, "b", 1));
        }
        // its first try came to b, behind the put
        let writes = [Write::Nothing, Write::DeleteKeys(vec![1.into()])];
        let numbered = writes.into_iter().zip(1..).map(|(write, seq)| (write, version(2, "b", seq)));
        let copy = store(&[(epoch(2, "b"), None)], &numbered.collect::<Vec<_>>());
        promise(bench.0.judge_copy(0, "n0", &copy))
    };
    assert_eq!(with(Kind::Split, true), "kept");
    assert_eq!(with(Kind::Split, false), "hole");
    assert_eq!(with(Kind::Whole, true), "hole");
}

#[test]
fn a_write_is_the_record_that_was_put_by_it() {
    for is_set in [true, false] {
        let mut bench = Bench(Oracle::new(Kind::Wild, is_set, 1, 8));
        let number = bench.kept(1, WriteMode::Sync, version(1, "a", 1));
        let other = bench.put(1, 1, WriteMode::Sync).1;
        assert_eq!(promise(bench.0.judge_copy(0, "n0", &copy_of(&[Write::Put(record(1, number))]))), "kept");
        assert_eq!(promise(bench.0.judge_copy(0, "n0", &copy_of(&[Write::Put(record(1, other))]))), "hole");
        assert_eq!(promise(bench.0.judge_copy(0, "n0", &copy_of(&[Write::Put(record(1, 9))]))), "invented");
    }
}

#[test]
fn a_copy_that_has_had_a_delete_holds_nothing_of_it() {
    let put = |bench: &mut Bench| Write::Put(record(1, bench.kept(1, WriteMode::Sync, version(1, "a", 1))));
    let mut bench = Bench::new(Kind::Wild);
    let held = copy_of(&[put(&mut bench), Write::Nothing]);
    deleted(&mut bench, 1, version(1, "a", 2));
    assert_eq!(promise(bench.0.judge_copy(0, "n0", &held)), "hole");

    let mut bench = Bench::new(Kind::Wild);
    let held = copy_of(&[put(&mut bench), Write::Nothing]);
    let op = bench.begin(0, What::DeleteMatch(class_of(0)), WriteMode::Sync);
    bench.0.succeed(op, Some(version(1, "a", 2)), None).unwrap();
    assert_eq!(promise(bench.0.judge_copy(0, "n0", &held)), "hole");
}

#[test]
fn who_begins_to_serve_has_all_that_was_acknowledged() {
    let empty = Store::new(&CacheConfig::default());
    let mut bench = Bench::new(Kind::Whole);
    assert_eq!(promise(bench.0.begins(0, "n1", &empty)), "kept");
    let number = bench.kept(1, WriteMode::Async, version(1, "a", 1));
    assert_eq!(promise(bench.0.begins(0, "n1", &empty)), "lost");
    assert_eq!(promise(bench.0.begins(0, "n1", &copy_of(&[Write::Put(record(1, number))]))), "kept");
    bench.0.crash();
    assert_eq!(
        promise(bench.0.begins(0, "n1", &empty)),
        "kept",
        "of an Async write nothing more is promised"
    );
}

#[test]
fn an_acknowledged_sync_write_has_as_many_copies_as_were_asked_for() {
    let b = epoch(1, "b").primary;
    let written = |mode: WriteMode, acked: Option<u64>, demand: Demand| {
        let mut bench = Bench::new(Kind::Wild);
        if let Some(seq) = acked {
            bench.0.acked(0, &b, &version(1, "a", seq));
        }
        let (op, _) = bench.put(0, 1, mode);
        bench.0.succeed(op, Some(version(1, "a", 5)), None).unwrap();
        promise(bench.0.judge_copies_of(op, demand))
    };
    let (sync, two) = (WriteMode::Sync, Demand { min_copies: 2, expected_nodes: None, here: None });
    assert_eq!(written(sync, Some(5), two), "kept");
    assert_eq!(written(sync, Some(4), two), "copies", "the other one had not had it");
    assert_eq!(written(sync, None, two), "copies");
    assert_eq!(written(WriteMode::Async, None, two), "kept");
    let majority = |owners| Demand { min_copies: 1, expected_nodes: None, here: Some((owners, 9)) };
    assert_eq!(written(sync, None, majority(1)), "kept");
    assert_eq!(written(sync, None, majority(3)), "copies");
    let among = |nodes| Demand { min_copies: 1, expected_nodes: Some(5), here: Some((1, nodes)) };
    assert_eq!(written(sync, None, among(3)), "kept");
    assert_eq!(written(sync, None, among(2)), "expected nodes");
}

#[test]
fn a_delete_counts_what_goes() {
    let count = |is_set: bool, class: bool, broke: bool, count: u64| {
        let mut bench = Bench(Oracle::new(Kind::Whole, is_set, 1, 8));
        bench.kept(1, WriteMode::Sync, version(1, "a", 1));
        bench.kept(1, WriteMode::Sync, version(1, "a", 2));
        bench.put(3, 1, WriteMode::Sync);
        bench.kept(2, WriteMode::Sync, version(1, "a", 3));
        let what = if class { What::DeleteMatch(class_of(0)) } else { What::DeleteKeys(vec![1]) };
        let op = bench.begin(0, what, WriteMode::Sync);
        if broke {
            bench.0.broke();
        }
        bench.0.succeed(op, Some(version(1, "a", 4)), None).unwrap();
        promise(bench.0.removed(op, count))
    };
    let all = |is_set, class| [0, 1, 2, 3, 4].map(|n| count(is_set, class, false, n) == "kept");
    assert_eq!(all(true, false), [false, true, false, false, false]);
    assert_eq!(all(false, false), [false, false, true, true, false], "one is under way");
    assert_eq!(all(true, true), [false, true, false, false, false], "one of the class was replaced");
    assert_eq!(all(false, true), [false, false, true, false, false]);
    assert_eq!(count(true, false, true, 0), "kept", "it may have been carried out twice");
}

#[test]
fn a_copy_that_was_discarded_excuses_only_what_it_held() {
    let other = store(&[(epoch(2, "b"), None)], &[(Write::Put(record(9, 0)), version(2, "b", 1))]);
    let discarded = copy_of(&[Write::Put(record(1, 1))]);
    let mut bench = Bench::new(Kind::Split);
    bench.kept(9, WriteMode::Sync, version(2, "b", 1));
    let write = |bench: &mut Bench, key: i64, at: Version| {
        let (op, _) = bench.put(1, key, WriteMode::Sync);
        bench.0.succeed(op, Some(at), None).unwrap();
    };
    write(&mut bench, 1, version(1, "a", 1));
    assert_eq!(promise(bench.read(ReadMode::Local, 1, &[])), "session");
    bench.0.discard(0, Some(&discarded));
    assert_eq!(promise(bench.read(ReadMode::Local, 1, &[])), "kept", "it may have gone with the copy");
    assert_eq!(promise(bench.0.account(0, &other)), "unreported", "and was not reported");
    let lower =
        |at: Version| Loser { key: Some(1.into()), record: None, version: at, by: version(1, "0", 9) };
    assert_eq!(promise(bench.0.conflict(0, lower(version(1, "a", 1)))), "kept");
    assert_eq!(promise(bench.0.conflict(0, lower(version(1, "a", 2)))), "conflict", "it did not hold that");
    write(&mut bench, 2, version(2, "b", 2));
    assert_eq!(promise(bench.read(ReadMode::Local, 2, &[])), "session", "the other side's own");
}

#[test]
fn a_delete_of_another_side_leaves_no_trace_where_as_much_is_forgotten() {
    let of_b = |purged: bool| {
        let writes = [(Write::DeleteKeys(vec![5.into()]), version(1, "b", 1))];
        let mut copy = store(&[(epoch(1, "b"), None)], &writes);
        if purged {
            copy.purge(Duration::from_secs(9), Duration::ZERO, &version(1, "b", 1), 10);
        }
        copy
    };
    let with = |back: bool| {
        let mut bench = Bench(Oracle::new(Kind::Wild, true, 1, 8));
        let old = bench.kept(1, WriteMode::Sync, version(1, "0", 1));
        deleted(&mut bench, 1, version(1, "a", 1));
        // b has forgotten its deletes: it cannot be told from its copy whether it has had this one
        bench.0.merges(0, &[Entry::DeletedKey { key: 1.into(), version: version(1, "a", 1) }], &of_b(true));
        let mut copy = of_b(false);
        if back {
            copy = store(
                &[(epoch(1, "0"), None), (epoch(1, "b"), Some(version(1, "0", 1)))],
                &[
                    (Write::Put(record(1, old)), version(1, "0", 1)),
                    (Write::DeleteKeys(vec![5.into()]), version(1, "b", 2)),
                ],
            );
        }
        promise(bench.0.judge_copy(0, "n0", &copy))
    };
    assert_eq!((with(false), with(true)), ("kept", "hole"));
}

#[test]
fn a_loser_of_a_batch_is_reported_by_its_own_version() {
    let with = |lost: u64| {
        let mut bench = Bench(Oracle::new(Kind::Wild, false, 1, 8));
        let numbers: Vec<i64> = (0..3).map(|_| bench.0.next_record()).collect();
        let put = What::Put(numbers.iter().zip(1..).map(|(number, key)| (key, *number)).collect());
        let op = bench.begin(1, put, WriteMode::Async);
        bench.0.succeed(op, Some(version(1, "a", 3)), None).unwrap();
        let (version, by) = (version(1, "a", lost), version(2, "b", 1));
        let loser = Loser { key: Some(1.into()), record: Some(record(1, numbers[0])), version, by };
        bench.0.conflict(0, loser).unwrap();
        promise(bench.read(ReadMode::Primary, 1, &[]))
    };
    assert_eq!((with(1), with(3)), ("kept", "session"), "the record is the first of three");
}
