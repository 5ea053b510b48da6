//! What a primary remembers of the operations that others have sent it: so that one that is sent again, because its
//! answer was lost with a link, is answered as before and not carried out a second time.
//!
//! Nobody sends an operation again after its deadline, so nothing is remembered longer. Beyond that the number is
//! bounded; what had to be forgotten early is known by one number, and an operation below it that is sent again ends as
//! "may have been applied or not".

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use crate::cache::error::CacheError;
use crate::cache::operation::Reply;

/// How many answers are remembered for one peer.
const ANSWERS: usize = 1024;

/// What is known of an operation that has come.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Remembered {
    /// Nothing: it is new.
    New,
    /// It is being carried out.
    UnderWay,
    /// It ended like this.
    Answered(Result<Reply, CacheError>),
    /// It may have been answered; that is forgotten.
    Forgotten,
}

#[derive(Debug)]
struct Answered {
    request: u64,
    until: Duration,
    result: Result<Reply, CacheError>,
}

/// One peer's operations.
#[derive(Debug, Default)]
pub(super) struct Memory {
    /// The last sending of each, and until when it matters.
    under_way: BTreeMap<u64, (u32, Duration)>,
    answered: VecDeque<Answered>,
    /// All at or below it may be forgotten, and until when that matters.
    forgotten: Option<(u64, Duration)>,
}

impl Memory {
    pub(super) fn len(&self) -> usize {
        self.under_way.len() + self.answered.len()
    }

    pub(super) fn under_way(&self) -> usize {
        self.under_way.len()
    }

    /// Whether it can be dropped.
    pub(super) fn is_empty(&self) -> bool {
        self.len() == 0 && self.forgotten.is_none()
    }

    /// What is known of an operation, of which this sending has come.
    pub(super) fn look(&mut self, request: u64, again: bool, attempt: u32) -> Remembered {
        if let Some((last, _)) = self.under_way.get_mut(&request) {
            *last = attempt.max(*last);
            return Remembered::UnderWay;
        }
        // only what was sent again can be here, and it is rare
        if !again {
            return Remembered::New;
        }
        match self.answered.iter().find(|answer| answer.request == request) {
            Some(answer) => Remembered::Answered(answer.result.clone()),
            None if self.forgotten.as_ref().is_some_and(|(last, _)| request <= *last) => {
                Remembered::Forgotten
            }
            None => Remembered::New,
        }
    }

    pub(super) fn begin(&mut self, request: u64, attempt: u32, until: Duration) {
        self.under_way.insert(request, (attempt, until));
    }

    /// How it ended; to which sending of it that is to be said, if it was known at all.
    pub(super) fn end(
        &mut self,
        request: u64,
        result: &Result<Reply, CacheError>,
        now: Duration,
    ) -> Option<u32> {
        let (attempt, until) = self.under_way.remove(&request)?;
        self.expire(now);
        // what has changed nothing may be tried again, and what found nobody to serve must be
        if matches!(result, Err(error) if error.applied() == crate::cache::error::Applied::No) {
            return Some(attempt);
        }
        if self.answered.len() == ANSWERS
            && let Some(oldest) = self.answered.pop_front()
        {
            let (last, long) = self.forgotten.unwrap_or_default();
            self.forgotten = Some((last.max(oldest.request), long.max(oldest.until)));
        }
        self.answered.push_back(Answered { request, until, result: result.clone() });
        Some(attempt)
    }

    /// Forgets what nobody can ask for any more.
    pub(super) fn expire(&mut self, now: Duration) {
        while self.answered.front().is_some_and(|answer| answer.until < now) {
            self.answered.pop_front();
        }
        self.forgotten = self.forgotten.filter(|(_, until)| *until >= now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::operation::Outcome;

    const fn at(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    fn done(n: u64) -> Result<Reply, CacheError> {
        Ok(Reply { outcome: Outcome::Written(n), version: None })
    }

    // caught by: no floor, so that what was forgotten is taken for new
    #[test]
    fn what_was_forgotten_is_not_taken_for_new() {
        let mut memory = Memory::default();
        for request in 1..=ANSWERS as u64 + 1 {
            memory.begin(request, 1, at(1000));
            assert_eq!(memory.look(request, true, 1), Remembered::UnderWay);
            memory.end(request, &done(request), at(1));
        }
        assert_eq!(memory.look(1, true, 1), Remembered::Forgotten);
        assert_eq!(memory.look(1, false, 1), Remembered::New, "it is sent for the first time");
        assert_eq!(memory.look(2, true, 1), Remembered::Answered(done(2)));
        assert_eq!(memory.look(9999, true, 1), Remembered::New);
        assert_eq!(memory.len(), ANSWERS);
        memory.expire(at(1001));
        assert!(memory.is_empty());
    }

    #[test]
    fn what_changed_nothing_is_tried_again() {
        let mut memory = Memory::default();
        memory.begin(1, 1, at(1000));
        memory.end(1, &Err(CacheError::Busy), at(1));
        assert_eq!(memory.look(1, true, 1), Remembered::New);
        memory.begin(2, 1, at(1000));
        memory.end(2, &Err(CacheError::NotEnoughAcks { got: 1, need: 2 }), at(1));
        assert!(matches!(memory.look(2, true, 1), Remembered::Answered(Err(_))));
    }

    // caught by: an answer to the sending that came first
    #[test]
    fn the_last_sending_is_the_one_that_is_answered() {
        let mut memory = Memory::default();
        memory.begin(1, 1, at(1000));
        assert_eq!(memory.look(1, true, 3), Remembered::UnderWay);
        assert_eq!(memory.look(1, true, 2), Remembered::UnderWay);
        assert_eq!(memory.end(1, &Err(CacheError::Busy), at(1)), Some(3));
        assert_eq!(memory.end(1, &Err(CacheError::Busy), at(1)), None);
    }
}
