//! Who should have got what, and who did.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

/// Later than everything.
const NEVER: u64 = u64::MAX;

/// Numbers what happens: a member is due a broadcast that began after its join had returned and ended before it began
/// to leave.
#[derive(Default)]
pub(crate) struct Ledger {
    clock: AtomicU64,
    casts: Mutex<Vec<Cast>>,
    sent: AtomicU64,
    members: Mutex<Vec<Arc<Member>>>,
}

#[derive(Clone)]
struct Cast {
    region: usize,
    group: String,
    began: u64,
    /// When it returned `Ok`.
    ended: u64,
}

pub(crate) struct Member {
    region: usize,
    group: String,
    joined: AtomicU64,
    left: AtomicU64,
    got: Mutex<BTreeMap<u64, u32>>,
}

impl Ledger {
    fn now(&self) -> u64 {
        self.clock.fetch_add(1, Ordering::SeqCst)
    }

    /// A broadcast begins; its number is its payload.
    pub(crate) fn begin(&self, region: usize, group: &str) -> u64 {
        let mut casts = self.casts.lock();
        casts.push(Cast { region, group: group.to_owned(), began: self.now(), ended: NEVER });
        casts.len() as u64 - 1
    }

    /// It has returned `Ok`.
    pub(crate) fn end(&self, cast: u64) {
        let mut casts = self.casts.lock();
        let now = self.now();
        if let Some(cast) = casts.get_mut(cast as usize) {
            cast.ended = now;
            self.sent.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// How many have returned `Ok`.
    pub(crate) fn sent(&self) -> u64 {
        self.sent.load(Ordering::Relaxed)
    }

    /// A member that is about to join.
    pub(crate) fn member(&self, region: usize, group: &str) -> Arc<Member> {
        let member = Arc::new(Member {
            region,
            group: group.to_owned(),
            joined: AtomicU64::new(NEVER),
            left: AtomicU64::new(NEVER),
            got: Mutex::default(),
        });
        self.members.lock().push(member.clone());
        member
    }

    pub(crate) fn joined(&self, member: &Member) {
        member.joined.store(self.now(), Ordering::SeqCst);
    }

    /// It begins to leave, or its node is about to end.
    pub(crate) fn leaves(&self, member: &Member) {
        let _ = member.left.compare_exchange(NEVER, self.now(), Ordering::SeqCst, Ordering::SeqCst);
    }

    pub(crate) fn count(&self) -> Totals {
        let (casts, members) = (self.casts.lock().clone(), self.members.lock().clone());
        let sent = casts.iter().filter(|cast| cast.ended != NEVER).count() as u64;
        let mut totals = Totals { sent, ..Totals::default() };
        for member in members {
            let joined = member.joined.load(Ordering::SeqCst);
            let left = member.left.load(Ordering::SeqCst);
            let got = member.got.lock();
            totals.duplicated += got.values().map(|copies| u64::from(copies - 1)).sum::<u64>();
            for (number, cast) in (0u64..).zip(&casts) {
                let due = cast.group == member.group && cast.began > joined && cast.ended < left;
                if !due || cast.ended == NEVER {
                    continue;
                }
                totals.due += 1;
                totals.abroad += u64::from(cast.region != member.region);
                totals.missed += u64::from(!got.contains_key(&number));
            }
        }
        totals
    }
}

impl Member {
    pub(crate) fn got(&self, cast: u64) {
        *self.got.lock().entry(cast).or_default() += 1;
    }
}

/// What the ledger says.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Totals {
    pub(crate) sent: u64,
    pub(crate) due: u64,
    /// Of those, from the other region.
    pub(crate) abroad: u64,
    pub(crate) missed: u64,
    pub(crate) duplicated: u64,
}

impl fmt::Display for Totals {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { sent, due, abroad, missed, duplicated } = self;
        let did = due - missed;
        write!(f, "{sent} sent, {did} of {due} deliveries ({abroad} between regions), ")?;
        write!(f, "{missed} missed, {duplicated} duplicated")
    }
}
