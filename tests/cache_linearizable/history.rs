//! Histories of operations on one key, and their judges.

use std::collections::BTreeMap;

use stateright::semantics::{ConsistencyTester, LinearizabilityTester, SequentialSpec};

#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Op {
    Put(i64),
    Delete,
    Get,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Ret {
    Put,
    Deleted(bool),
    Got(Option<i64>),
}

/// What a key should be: a register that can be emptied.
#[derive(Clone, Debug, Default)]
struct Slot(Option<i64>);

impl SequentialSpec for Slot {
    type Op = Op;
    type Ret = Ret;

    fn invoke(&mut self, op: &Op) -> Ret {
        match op {
            Op::Put(value) => {
                self.0 = Some(*value);
                Ret::Put
            }
            Op::Delete => Ret::Deleted(self.0.take().is_some()),
            Op::Get => Ret::Got(self.0),
        }
    }
}

/// One operation in a history; the numbers order what was asked and answered.
#[derive(Clone, Debug)]
pub(crate) struct Call {
    pub(crate) asked: u64,
    /// `None`: nobody knows whether it has had an effect, or may have it yet.
    pub(crate) answered: Option<(u64, Ret)>,
    pub(crate) op: Op,
}

/// Whether one order of the operations explains all answers.
pub(crate) fn is_linearizable(history: &[Call]) -> bool {
    let mut moments: Vec<(u64, usize, bool)> = Vec::new();
    for (index, call) in history.iter().enumerate() {
        moments.push((call.asked, index, true));
        moments.extend(call.answered.as_ref().map(|(at, _)| (*at, index, false)));
    }
    moments.sort_unstable();
    let mut tester = LinearizabilityTester::new(Slot::default());
    // each operation that is under way needs a thread of its own
    let (mut free, mut threads, mut last): (Vec<usize>, BTreeMap<usize, usize>, usize) = Default::default();
    for (_, index, asked) in moments {
        if asked {
            let thread = free.pop().unwrap_or_else(|| {
                last += 1;
                last
            });
            threads.insert(index, thread);
            tester.on_invoke(thread, history[index].op.clone()).unwrap();
        } else if let (Some(thread), Some((_, ret))) = (threads.get(&index), &history[index].answered) {
            tester.on_return(*thread, ret.clone()).unwrap();
            free.push(*thread);
        }
    }
    tester.is_consistent()
}

/// Whether no read returned what an acknowledged write had surely replaced before the read began.
pub(crate) fn is_recent(history: &[Call]) -> bool {
    let writes = || history.iter().filter(|call| call.op != Op::Get);
    let acked_before =
        |moment: u64| writes().filter(move |w| w.answered.as_ref().is_some_and(|(at, _)| *at < moment));
    history.iter().all(|read| {
        let Some((_, Ret::Got(value))) = &read.answered else { return true };
        // every write that may have left this behind, and what was there in the beginning
        let beginning = value.is_none().then_some(Some(0));
        let sources = writes().filter(|write| match (&write.op, value) {
            (Op::Put(put), Some(value)) => put == value,
            (Op::Delete, None) => true,
            _ => false,
        });
        let ends = sources.map(|write| write.answered.as_ref().map(|(at, _)| *at));
        ends.chain(beginning).any(|end| match end {
            None => true,
            Some(end) => !acked_before(read.asked).any(|later| later.asked > end),
        })
    })
}
/// The judges themselves.
#[test]
fn a_stale_read_is_seen() {
    let call = |asked, answered, op, ret| Call { asked, answered: Some((answered, ret)), op };
    let put = |asked, answered, value| call(asked, answered, Op::Put(value), Ret::Put);
    let got = |asked, answered, value| call(asked, answered, Op::Get, Ret::Got(value));
    let good = [put(1, 2, 7), put(3, 6, 8), got(4, 5, Some(7)), got(7, 8, Some(8))];
    assert!(is_linearizable(&good) && is_recent(&good));
    let stale = [put(1, 2, 7), put(3, 4, 8), got(5, 6, Some(7))];
    assert!(!is_linearizable(&stale) && !is_recent(&stale));
    // back in time while the write is under way: allowed to quorum reads, not to strong ones
    let back = [put(1, 2, 7), put(3, 10, 8), got(4, 5, Some(8)), got(6, 7, Some(7))];
    assert!(!is_linearizable(&back) && is_recent(&back));
    let doubtful = [put(1, 2, 7), Call { asked: 3, answered: None, op: Op::Put(8) }, got(4, 5, Some(8))];
    assert!(is_linearizable(&doubtful) && is_recent(&doubtful));
    let lost = [put(1, 2, 7), got(3, 4, None)];
    assert!(!is_linearizable(&lost) && !is_recent(&lost));
}
