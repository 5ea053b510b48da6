//! What must hold, whoever carries it out: a checker that knows who has joined and which broadcasts began
//! when, and nothing of how the cluster works.
//!
//! It is told of four things (a join was answered, a member left, a node died, a broadcast began) and of
//! every delivery, and says which promise of the protocol is broken. The numbers are those of the protocol
//! page: P1 no missed delivery, P2 once, P3 order, P4 precision.

use std::collections::BTreeMap;
use std::fmt;

use smallvec::SmallVec;

/// One life of one place in the cluster under test.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Life {
    /// Which place.
    pub place: usize,
    /// Which life of it.
    pub life: u64,
}

impl fmt::Display for Life {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "n{}#{}", self.place, self.life)
    }
}

/// A broken promise.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// Which promise: "P1" to "P7", or the name of a check.
    pub promise: &'static str,
    /// What happened.
    pub what: String,
}

impl Violation {
    /// A broken promise, told.
    pub fn new(promise: &'static str, what: impl Into<String>) -> Self {
        Self { promise, what: what.into() }
    }
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.promise, self.what)
    }
}

impl std::error::Error for Violation {}

/// A member as the oracle knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Joined {
    /// Where it lives.
    pub at: Life,
    /// Its number there.
    pub number: u64,
}

/// Somebody who must get a broadcast, and over which session of the link he was reachable when it began.
#[derive(Clone, Copy, Debug)]
struct Must {
    member: Joined,
    session: u32,
    got: bool,
}

/// Names a broadcast for the oracle.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CastId(pub usize);

/// One broadcast.
#[derive(Clone, Debug)]
struct Cast {
    origin: Life,
    seq: u64,
    group: usize,
    must: SmallVec<[Must; 4]>,
    /// Others that got it, and may get it once: members that joined later.
    others: SmallVec<[Joined; 2]>,
    /// Not in `must` on purpose.
    except: Option<Joined>,
    /// The one life whose members it is for.
    only: Option<Life>,
    /// The places that payload was sent to while nothing was disturbed.
    sent_to: SmallVec<[usize; 4]>,
    /// How often the calm had been disturbed when it began; `None` if there was none.
    calm: Option<u64>,
    /// It may be lost when anything is disturbed.
    at_most_once: bool,
}

/// A broadcast that begins.
#[derive(Clone, Copy, Debug)]
pub struct NewCast {
    /// Where.
    pub origin: Life,
    /// Its number there.
    pub seq: u64,
    /// To which group.
    pub group: usize,
    /// A member that must not get it.
    pub except: Option<Joined>,
    /// The one life whose members it is for.
    pub only: Option<Life>,
    /// It may be lost when anything is disturbed.
    pub at_most_once: bool,
}

/// What the oracle has seen, in numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Broadcasts that began.
    pub broadcasts: u64,
    /// Broadcasts judged to the end.
    pub checked: u64,
    /// Deliveries that had to happen.
    pub expected: u64,
    /// Deliveries that happened: `needed` and `extra`.
    pub seen: u64,
    /// Deliveries that had to happen and did: with `excused` and `missed`, all that were expected.
    pub needed: u64,
    /// Deliveries that nobody asked for and nobody minds: to members that joined when the broadcast was under
    /// way, or that were not connected when it began.
    pub extra: u64,
    /// Deliveries that had to happen and did not, excused by a crash, a leave or a lost link.
    pub excused: u64,
    /// Deliveries that had to happen and did not.
    pub missed: u64,
    /// Second copies at a member.
    pub duplicated: u64,
    /// Deliveries whose order was judged.
    pub ordered: u64,
}

impl Tally {
    /// Adds another one's numbers.
    pub fn add(&mut self, other: &Tally) {
        self.broadcasts += other.broadcasts;
        self.checked += other.checked;
        self.expected += other.expected;
        self.seen += other.seen;
        self.needed += other.needed;
        self.extra += other.extra;
        self.excused += other.excused;
        self.missed += other.missed;
        self.duplicated += other.duplicated;
        self.ordered += other.ordered;
    }
}

/// The checker. Groups and places are numbers, from 0.
#[derive(Clone, Debug, Default)]
pub struct Oracle {
    members: Vec<Vec<Joined>>,
    casts: Vec<Cast>,
    ids: BTreeMap<(Life, u64), usize>,
    open: Vec<usize>,
    /// The last broadcast in order: by origin, group and member.
    last: BTreeMap<(Life, usize, Joined), u64>,
    disturbed: u64,
    calm: bool,
    tally: Tally,
}

// Getters.
impl Oracle {
    /// Of no members and no broadcasts.
    pub fn new() -> Self {
        Self::default()
    }

    /// The members of a group, in no order.
    pub fn members(&self, group: usize) -> &[Joined] {
        self.members.get(group).map(Vec::as_slice).unwrap_or_default()
    }

    /// Whether this life has members of the group.
    pub fn holds(&self, group: usize, at: Life) -> bool {
        self.members(group).iter().any(|member| member.at == at)
    }

    /// How many groups have been named.
    pub fn groups(&self) -> usize {
        self.members.len()
    }

    /// What it has seen.
    pub fn tally(&self) -> Tally {
        self.tally
    }

    /// The broadcast's number at its origin, if the oracle knows it.
    pub fn find(&self, origin: Life, seq: u64) -> Option<CastId> {
        self.ids.get(&(origin, seq)).copied().map(CastId)
    }

    /// The member that must not get it.
    pub fn except(&self, cast: CastId) -> Option<Joined> {
        self.casts.get(cast.0).and_then(|cast| cast.except)
    }

    /// Where it began.
    pub fn origin(&self, cast: CastId) -> Option<Life> {
        self.casts.get(cast.0).map(|cast| cast.origin)
    }

    /// The places that must still get it, with the session over which they were reachable.
    pub fn waiting(&self, cast: CastId) -> impl Iterator<Item = (Joined, u32)> {
        let cast = self.casts.get(cast.0);
        let group = cast.map_or(usize::MAX, |cast| cast.group);
        cast.into_iter()
            .flat_map(|cast| cast.must.iter())
            .filter(move |must| !must.got && self.members(group).contains(&must.member))
            .map(|must| (must.member, must.session))
    }

    /// How many broadcasts are not judged yet.
    pub fn open(&self) -> usize {
        self.open.len()
    }

    /// Whether the calm has lasted since the broadcast began.
    pub fn is_calm_since(&self, cast: CastId) -> bool {
        self.casts.get(cast.0).is_some_and(|cast| self.calm && cast.calm == Some(self.disturbed))
    }
}

// What it is told.
impl Oracle {
    /// A join was answered with success.
    pub fn joined(&mut self, group: usize, member: Joined) {
        if self.members.len() <= group {
            self.members.resize_with(group + 1, Vec::new);
        }
        if !self.members[group].contains(&member) {
            self.members[group].push(member);
        }
    }

    /// A member left, or began to.
    pub fn left(&mut self, group: usize, member: Joined) {
        if let Some(members) = self.members.get_mut(group) {
            members.retain(|other| *other != member);
        }
    }

    /// A life has ended.
    pub fn died(&mut self, life: Life) {
        self.members.iter_mut().for_each(|members| members.retain(|member| member.at != life));
    }

    /// Whether the whole cluster is `Ready` and no link is suspect or changing.
    pub fn set_calm(&mut self, calm: bool) {
        if self.calm && !calm {
            self.disturbed += 1;
            self.last.clear();
        }
        self.calm = calm;
    }

    /// A broadcast began. `session` names the link's session with a life if both its ends are up (anything
    /// for the origin itself).
    pub fn began(&mut self, new: NewCast, session: impl Fn(Life) -> Option<u32>) -> CastId {
        let NewCast { origin, seq, group, except, only, at_most_once } = new;
        let mut must = SmallVec::new();
        for member in self.members(group) {
            if Some(*member) == except || only.is_some_and(|only| only != member.at) {
                continue;
            }
            let session = session(member.at);
            must.extend(session.map(|session| Must { member: *member, session, got: false }));
        }
        let calm = self.calm.then_some(self.disturbed);
        let id = self.casts.len();
        self.tally.broadcasts += 1;
        self.casts.push(Cast {
            origin,
            seq,
            group,
            must,
            others: SmallVec::new(),
            except,
            only,
            sent_to: SmallVec::new(),
            calm,
            at_most_once,
        });
        self.ids.insert((origin, seq), id);
        self.open.push(id);
        CastId(id)
    }

    /// A member got a broadcast.
    ///
    /// # Errors
    /// P2 if it had it already, P3 if it came before an earlier one although nothing was disturbed, "except"
    /// if it must not get it, "unknown" if no such broadcast began.
    pub fn delivered(
        &mut self,
        origin: Life,
        seq: u64,
        group: usize,
        member: Joined,
    ) -> Result<(), Violation> {
        let Some(id) = self.ids.get(&(origin, seq)).copied() else {
            return Err(Violation::new(
                "unknown",
                format!("{member:?} got {origin}:{seq}, which nobody sent"),
            ));
        };
        self.tally.seen += 1;
        let (calm, disturbed) = (self.calm, self.disturbed);
        let cast = &mut self.casts[id];
        if cast.group != group {
            return Err(Violation::new(
                "group",
                format!("{origin}:{seq} to group {} came to {group}", cast.group),
            ));
        }
        if cast.except == Some(member) {
            return Err(Violation::new("except", format!("{member:?} got {origin}:{seq} despite `except`")));
        }
        if cast.only.is_some_and(|only| only != member.at) {
            return Err(Violation::new(
                "audience",
                format!("{member:?} got {origin}:{seq}, meant for {:?}", cast.only),
            ));
        }
        let twice = match cast.must.iter_mut().find(|must| must.member == member) {
            Some(must) => std::mem::replace(&mut must.got, true),
            None => {
                let known = cast.others.contains(&member);
                cast.others.push(member);
                known
            }
        };
        if twice {
            self.tally.duplicated += 1;
            return Err(Violation::new(
                "P2",
                format!("{member:?} got {origin}:{seq} of group {group} twice"),
            ));
        }
        match cast.others.contains(&member) {
            true => self.tally.extra += 1,
            false => self.tally.needed += 1,
        }
        // what is for one node goes there without the router
        if calm && cast.calm == Some(disturbed) && cast.only.is_none() {
            self.tally.ordered += 1;
            let last = self.last.entry((origin, group, member)).or_default();
            if *last > seq {
                return Err(Violation::new(
                    "P3",
                    format!("{member:?} got {origin}:{seq} of group {group} after {origin}:{last}, in calm"),
                ));
            }
            *last = seq;
        }
        Ok(())
    }

    /// A frame with the payload of a broadcast was sent to a place.
    ///
    /// # Errors
    /// P4 if that place had one before and nothing was disturbed since the broadcast began.
    pub fn payload_sent(&mut self, origin: Life, seq: u64, to: usize) -> Result<(), Violation> {
        let Some(id) = self.ids.get(&(origin, seq)).copied() else { return Ok(()) };
        let (calm, disturbed) = (self.calm, self.disturbed);
        let cast = &mut self.casts[id];
        if !calm || cast.calm != Some(disturbed) {
            return Ok(());
        }
        if cast.sent_to.contains(&to) {
            return Err(Violation::new("P4", format!("{origin}:{seq} was sent to n{to} twice, in calm")));
        }
        cast.sent_to.push(to);
        Ok(())
    }

    /// The places that payload was sent to while nothing was disturbed since the broadcast began.
    pub fn sent_to(&self, cast: CastId) -> &[usize] {
        self.casts.get(cast.0).map(|cast| cast.sent_to.as_slice()).unwrap_or_default()
    }

    /// Judges a broadcast that its origin takes for settled: everybody reachable has it. `reachable` says
    /// whether the session with a life still stands and was not suspect.
    ///
    /// # Errors
    /// P1, with who missed it.
    pub fn settled(
        &mut self,
        cast: CastId,
        reachable: impl Fn(Life, Life, u32) -> bool,
    ) -> Result<(), Violation> {
        let Some(cast) = self.casts.get(cast.0) else { return Ok(()) };
        match self.missing(cast, &reachable) {
            Some(missed) => Err(self.miss(cast, missed, "when it was settled")),
            None => Ok(()),
        }
    }

    /// Judges every broadcast that is not judged yet: nothing is on its way any more. `kept` says whether the
    /// session with a life has stood since.
    ///
    /// # Errors
    /// P1, with who missed it.
    pub fn judge(&mut self, kept: impl Fn(Life, Life, u32) -> bool) -> Result<(), Violation> {
        for id in std::mem::take(&mut self.open) {
            let Some(cast) = self.casts.get(id) else { continue };
            self.tally.checked += 1;
            self.tally.expected += cast.must.len() as u64;
            self.tally.excused += cast.must.iter().filter(|must| !must.got).count() as u64;
            if cast.at_most_once && cast.calm != Some(self.disturbed) {
                continue;
            }
            if let Some(missed) = self.missing(cast, &kept) {
                let violation = self.miss(cast, missed, "");
                self.tally.missed += 1;
                return Err(violation);
            }
        }
        Ok(())
    }

    fn missing(&self, cast: &Cast, kept: impl Fn(Life, Life, u32) -> bool) -> Option<Joined> {
        let still = |must: &&Must| {
            !must.got
                && self.members(cast.group).contains(&must.member)
                && kept(cast.origin, must.member.at, must.session)
        };
        cast.must.iter().find(still).map(|must| must.member)
    }

    fn miss(&self, cast: &Cast, missed: Joined, when: &str) -> Violation {
        let what = format!(
            "member {} of group {} on {} missed {}:{} {when}",
            missed.number, cast.group, missed.at, cast.origin, cast.seq
        );
        Violation::new("P1", what)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: Life = Life { place: 0, life: 1 };
    const B: Life = Life { place: 1, life: 1 };
    const M: Joined = Joined { at: B, number: 1 };

    fn cast(seq: u64, except: Option<Joined>) -> NewCast {
        NewCast { origin: A, seq, group: 0, except, only: None, at_most_once: false }
    }

    fn with_member() -> Oracle {
        let mut oracle = Oracle::new();
        oracle.joined(0, M);
        oracle
    }

    #[test]
    fn a_missed_delivery_is_found_and_a_leave_a_death_or_a_lost_link_excuse_it() {
        let begin = |oracle: &mut Oracle| oracle.began(cast(1, None), |_| Some(7));
        let mut oracle = with_member();
        begin(&mut oracle);
        assert_eq!(oracle.judge(|_, _, session| session == 7).unwrap_err().promise, "P1");
        let mut oracle = with_member();
        begin(&mut oracle);
        assert!(oracle.judge(|_, _, _| false).is_ok());
        let mut oracle = with_member();
        begin(&mut oracle);
        oracle.left(0, M);
        assert!(oracle.judge(|_, _, _| true).is_ok());
        let mut oracle = with_member();
        begin(&mut oracle);
        oracle.died(B);
        assert!(oracle.judge(|_, _, _| true).is_ok());
    }

    #[test]
    fn who_is_not_connected_or_joins_later_need_not_get_it() {
        let mut oracle = with_member();
        oracle.began(cast(1, None), |_| None);
        oracle.joined(0, Joined { at: B, number: 2 });
        assert!(oracle.judge(|_, _, _| true).is_ok());
        assert_eq!(oracle.tally().expected, 0);
    }

    #[test]
    fn a_second_copy_a_wrong_group_and_an_excepted_member_are_found() {
        let mut oracle = with_member();
        oracle.began(cast(1, None), |_| Some(1));
        oracle.began(cast(2, Some(M)), |_| Some(1));
        assert!(oracle.delivered(A, 1, 0, M).is_ok());
        assert_eq!(oracle.delivered(A, 1, 0, M).unwrap_err().promise, "P2");
        assert_eq!(oracle.delivered(A, 1, 1, M).unwrap_err().promise, "group");
        assert_eq!(oracle.delivered(A, 2, 0, M).unwrap_err().promise, "except");
        assert_eq!(oracle.delivered(A, 3, 0, M).unwrap_err().promise, "unknown");
    }

    #[test]
    fn payload_goes_to_a_place_once_in_calm() {
        let mut oracle = with_member();
        oracle.set_calm(true);
        oracle.began(cast(1, None), |_| Some(1));
        assert!(oracle.payload_sent(A, 1, 1).is_ok());
        assert_eq!(oracle.payload_sent(A, 1, 1).unwrap_err().promise, "P4");
        oracle.set_calm(false);
        assert!(oracle.payload_sent(A, 1, 1).is_ok());
    }

    #[test]
    fn order_is_judged_in_calm_only() {
        let mut oracle = with_member();
        oracle.set_calm(true);
        (1..5).for_each(|seq| {
            oracle.began(cast(seq, None), |_| Some(1));
        });
        assert!(oracle.delivered(A, 2, 0, M).is_ok());
        assert_eq!(oracle.delivered(A, 1, 0, M).unwrap_err().promise, "P3");
        oracle.set_calm(false);
        assert!(oracle.delivered(A, 4, 0, M).is_ok());
        assert!(oracle.delivered(A, 3, 0, M).is_ok());
    }
}
