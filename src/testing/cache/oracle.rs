//! What a cache promises, whoever carries it out: a checker that is told which operations began and how they were
//! answered, which nodes died, what was reported as lost, and what copies hold; and that knows nothing of how copies
//! are kept alike.
//!
//! Order is that of the steps of the run: a write is *before* another if it was answered before the other began. Every
//! record that is put is a record of its own (its number), so that each one seen tells which write it comes from.

use std::collections::{BTreeMap, BTreeSet};

use crate::cache::store::Loser;
use crate::cache::{Applied, CacheError, Entry, Epoch, ReadMode, Store, Term, Version, WriteMode};
use crate::testing::oracle::Violation;
use crate::types::Peer;

mod copies;
mod counts;
#[cfg(test)]
mod tests;

/// How many classes records have; a delete by pattern deletes one.
pub(super) const CLASSES: i64 = 3;

/// Which faults a run has, and so what may be lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// No split; at most floor(replicas / 2) crashes until all copies are whole again: no acknowledged `Sync` write is
    /// lost, and none at all as long as nobody crashes.
    Whole,
    /// Splits and no crash: what is lost is reported.
    Split,
    /// Everything.
    Wild,
}

/// What an operation does or asks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum What {
    /// Key and number of each record.
    Put(Vec<(i64, i64)>),
    DeleteKeys(Vec<i64>),
    /// The class.
    DeleteMatch(i64),
    DeleteAll,
    Get(i64),
    ReadAll,
}

impl What {
    pub(super) fn is_write(&self) -> bool {
        !matches!(self, What::Get(_) | What::ReadAll)
    }
}

/// What came of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fate {
    Open,
    Done,
    /// The answer said that nothing has changed and nothing will.
    Never,
    Unknown,
}

/// One operation.
#[derive(Clone, Debug)]
pub(super) struct Op {
    pub(super) place: usize,
    pub(super) partition: u32,
    pub(super) session: usize,
    pub(super) what: What,
    pub(super) write_mode: WriteMode,
    pub(super) read_mode: ReadMode,
    /// What a read of a session has to have reached.
    pub(super) token: Option<Version>,
    pub(super) fate: Fate,
    pub(super) version: Option<Version>,
    begun: u64,
    ended: Option<u64>,
    /// From when on it is certain that nothing more comes of it, if its answer did not say which write it was.
    settled: Option<u64>,
}

impl Op {
    pub(super) fn new(place: usize, partition: u32, session: usize, what: What) -> Self {
        Self {
            place,
            partition,
            session,
            what,
            write_mode: WriteMode::Sync,
            read_mode: ReadMode::Primary,
            token: None,
            fate: Fate::Open,
            version: None,
            begun: 0,
            ended: None,
            settled: None,
        }
    }
}

#[derive(Clone, Debug, Default)]
struct Session {
    busy: bool,
    /// By partition: the version of the last write, and the writes since the token began.
    tokens: BTreeMap<u32, (Version, Vec<usize>)>,
}

/// What was counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Operations that began.
    pub operations: u64,
    /// Writes that were acknowledged.
    pub acknowledged: u64,
    /// Of these, with `Sync`.
    pub acknowledged_sync: u64,
    /// Reads that were answered.
    pub reads: u64,
    /// Operations that failed and said that nothing has changed.
    pub refused: u64,
    /// Operations whose outcome their caller does not know.
    pub unknown: u64,
    /// Nodes that died, and caches that were closed.
    pub crashes: u64,
    /// Links that broke between living nodes.
    pub cuts: u64,
    /// Writes that lost in a merge and were reported.
    pub conflicts: u64,
    /// Acknowledged writes that the faults of the run were allowed to take: more crashes than promised, or a split.
    pub excused: u64,
    /// Acknowledged writes that are missing and should not be.
    pub lost: u64,
    /// Deleted records that are back.
    pub resurrected: u64,
    /// `WriteLost` answers to sessions.
    pub write_lost: u64,
    /// How many times a copy was compared with the writes that its history tells of.
    pub copies_judged: u64,
}

impl Tally {
    /// Adds another run's.
    pub fn add(&mut self, other: &Tally) {
        self.operations += other.operations;
        self.acknowledged += other.acknowledged;
        self.acknowledged_sync += other.acknowledged_sync;
        self.reads += other.reads;
        self.refused += other.refused;
        self.unknown += other.unknown;
        self.crashes += other.crashes;
        self.cuts += other.cuts;
        self.conflicts += other.conflicts;
        self.excused += other.excused;
        self.lost += other.lost;
        self.resurrected += other.resurrected;
        self.write_lost += other.write_lost;
        self.copies_judged += other.copies_judged;
    }
}

pub(super) use counts::Demand;

/// One opening of a cache on one node: place, life, how often it was opened in it.
pub(super) type Opening = (usize, u64, u32);

/// Each epoch with the last write before it.
type History = Vec<(Epoch, Option<Version>)>;

/// The checker.
#[derive(Clone, Debug)]
pub(super) struct Oracle {
    kind: Kind,
    is_set: bool,
    ops: Vec<Op>,
    /// Writes by partition.
    writes: Vec<Vec<usize>>,
    /// By number of the record: which write put it, and its key.
    records: Vec<(usize, i64)>,
    seen: BTreeSet<i64>,
    sessions: Vec<Session>,
    clock: u64,
    /// When a node last died.
    last_crash: u64,
    losers: Vec<Vec<Loser>>,
    /// By partition: copies that were discarded, with a report.
    discarded: BTreeMap<u32, Vec<Discarded>>,
    /// The history of each epoch of each partition, as copies told it.
    histories: BTreeMap<(u32, Epoch), History>,
    /// Who served in an epoch.
    serving: BTreeMap<(u32, Epoch), Opening>,
    /// By partition, version, key and, in a bag, record: with which writes of other histories this statement came into
    /// them.
    merged: BTreeMap<(u32, Version, Term, Option<i64>), Vec<Version>>,
    /// Which acknowledged write has this version.
    versions: BTreeMap<(u32, Version), usize>,
    /// How far a peer's whole copy was in an epoch, as its primary has heard from it.
    acked: BTreeMap<(u32, Epoch), BTreeMap<Peer, u64>>,
    /// Operations of unknown fate that may still be carried out.
    unknown: Vec<usize>,
    /// When an answer may last have been lost on its way.
    last_break: u64,
    tally: Tally,
}

/// What a write tells of: a key, and in a bag which record of it, if it is a put.
#[derive(Clone, Copy, Debug)]
struct About {
    key: i64,
    number: Option<i64>,
}

/// A copy that was discarded.
#[derive(Clone, Debug)]
struct Discarded {
    /// Its epochs and its last write, if it was still there to be looked at.
    side: Option<(History, Option<Version>)>,
    /// Up to where it had forgotten its deletes.
    forgotten: Option<Version>,
    at: u64,
}

fn broken(promise: &'static str, what: String) -> Result<(), Violation> {
    Err(Violation::new(promise, what))
}

/// The class of a record.
pub(super) fn class_of(number: i64) -> i64 {
    number % CLASSES
}

// What happens.
impl Oracle {
    pub(super) fn new(kind: Kind, is_set: bool, partitions: u32, sessions: usize) -> Self {
        Self {
            kind,
            is_set,
            ops: Vec::new(),
            writes: vec![Vec::new(); partitions as usize],
            records: Vec::new(),
            seen: BTreeSet::new(),
            sessions: vec![Session::default(); sessions],
            clock: 0,
            last_crash: 0,
            losers: vec![Vec::new(); partitions as usize],
            discarded: BTreeMap::new(),
            histories: BTreeMap::new(),
            serving: BTreeMap::new(),
            merged: BTreeMap::new(),
            versions: BTreeMap::new(),
            acked: BTreeMap::new(),
            unknown: Vec::new(),
            last_break: 0,
            tally: Tally::default(),
        }
    }

    pub(super) fn tally(&self) -> Tally {
        self.tally
    }

    pub(super) fn op(&self, op: usize) -> &Op {
        &self.ops[op]
    }

    pub(super) fn is_busy(&self, session: usize) -> bool {
        self.sessions[session].busy
    }

    /// The version that this session has to see in a partition.
    pub(super) fn token(&self, session: usize, partition: u32) -> Option<Version> {
        self.sessions[session].tokens.get(&partition).map(|(version, _)| version.clone())
    }

    /// The number of the next record.
    pub(super) fn next_record(&self) -> i64 {
        self.records.len() as i64
    }

    /// An operation begins.
    pub(super) fn begin(&mut self, mut op: Op) -> usize {
        self.clock += 1;
        self.tally.operations += 1;
        op.begun = self.clock;
        let id = self.ops.len();
        if let What::Put(records) = &op.what {
            self.records.extend(records.iter().map(|(key, _)| (id, *key)));
        }
        if op.what.is_write() {
            self.writes[op.partition as usize].push(id);
        }
        self.sessions[op.session].busy = true;
        self.ops.push(op);
        id
    }

    /// Nobody will be told how an operation ended.
    pub(super) fn abandon(&mut self, op: usize) {
        self.tally.unknown += 1;
        self.ops[op].fate = Fate::Unknown;
        self.sessions[self.ops[op].session].busy = false;
        self.unknown.push(op);
    }

    /// Every partition is whole, and nothing is on its way: what nobody knows the outcome of has happened or never
    /// will. It excuses nothing that comes after.
    pub(super) fn settle(&mut self) {
        self.clock += 1;
        for id in self.unknown.drain(..) {
            let op = &mut self.ops[id];
            op.settled = Some(self.clock);
            op.ended = op.ended.or(op.settled);
        }
    }

    /// A link broke, or a node left: answers may be lost, and operations carried out once more.
    pub(super) fn broke(&mut self) {
        self.clock += 1;
        self.last_break = self.clock;
    }

    /// A node died, or closed its cache.
    pub(super) fn crash(&mut self) {
        self.clock += 1;
        self.last_crash = self.clock;
        self.tally.crashes += 1;
    }

    pub(super) fn cut(&mut self) {
        self.tally.cuts += 1;
    }

    /// A write lost in a merge, and it was reported.
    pub(super) fn conflict(&mut self, partition: u32, loser: Loser) -> Result<(), Violation> {
        self.tally.conflicts += 1;
        // unless a whole copy was discarded
        if loser.by <= loser.version && !self.was_discarded(partition, &loser.version) {
            return broken("conflict", format!("partition {partition}: the lower version won: {loser:?}"));
        }
        let op = self.versions.get(&(partition, loser.version.clone())).map(|op| &self.ops[*op]);
        if let Some(op) = op.filter(|op| self.kind == Kind::Whole && op.write_mode == WriteMode::Sync) {
            self.tally.lost += 1;
            return broken("lost", format!("{} lost in a merge: {loser:?}", tell(op)));
        }
        self.losers[partition as usize].push(loser);
        Ok(())
    }

    /// A copy was discarded, and it was reported. The copy, as far as it can be looked at.
    pub(super) fn discard(&mut self, partition: u32, copy: Option<&Store>) {
        self.clock += 1;
        let side = copy.map(|store| (store.lineage().entries().to_vec(), store.applied().cloned()));
        let forgotten = copy.and_then(|store| store.purged_through().cloned());
        let discarded = Discarded { side, forgotten, at: self.clock };
        self.discarded.entry(partition).or_default().push(discarded);
    }

    /// Whether a copy that was discarded may have held this write.
    fn was_discarded(&self, partition: u32, version: &Version) -> bool {
        let mut copies = self.discarded.get(&partition).into_iter().flatten();
        copies.any(|copy| self.has_gone_with(partition, copy, version, None))
    }

    fn has_gone_with(
        &self,
        partition: u32,
        copy: &Discarded,
        version: &Version,
        about: Option<About>,
    ) -> bool {
        let Some((history, end)) = &copy.side else { return true };
        let held = |version: &Version| reaches(history, end.as_ref(), version);
        held(version) || self.merged_with(partition, version, about).any(held)
    }

    /// A node serves a partition in this epoch.
    pub(super) fn serves(
        &mut self,
        partition: u32,
        epoch: &Epoch,
        who: Opening,
        me: &Peer,
    ) -> Result<(), Violation> {
        if epoch.primary != *me {
            return broken("epoch", format!("{me} serves partition {partition} in epoch {epoch} of another"));
        }
        let other = self.serving.entry((partition, epoch.clone())).or_insert(who);
        if *other != who {
            let text = format!("partition {partition}: epoch {epoch} was served by {other:?} and by {who:?}");
            return broken("epoch", text);
        }
        Ok(())
    }

    /// An operation was answered with a success.
    pub(super) fn succeed(
        &mut self,
        id: usize,
        version: Option<Version>,
        seen: Option<&[(i64, i64)]>,
    ) -> Result<(), Violation> {
        self.clock += 1;
        let clock = self.clock;
        let op = &mut self.ops[id];
        op.ended = Some(clock);
        op.fate = Fate::Done;
        op.version = version;
        let session = op.session;
        self.sessions[session].busy = false;
        match seen {
            None => self.written(id),
            Some(seen) => self.read(id, seen),
        }
    }

    /// An operation was answered with an error.
    pub(super) fn fail(&mut self, id: usize, error: &CacheError) -> Result<(), Violation> {
        self.clock += 1;
        let op = &mut self.ops[id];
        self.sessions[op.session].busy = false;
        if !op.what.is_write() {
            op.fate = Fate::Never;
            self.tally.refused += 1;
            return match error {
                CacheError::WriteLost { version, .. } => self.write_lost(id, version),
                _ => Ok(()),
            };
        }
        match error.applied() {
            Applied::Unknown => {
                op.fate = Fate::Unknown;
                self.tally.unknown += 1;
                self.unknown.push(id);
                return Ok(());
            }
            // it was done, and how often is not known
            Applied::Yes => {
                op.fate = Fate::Done;
                op.ended = Some(self.clock);
                self.unknown.push(id);
                self.tally.acknowledged += 1;
                self.tally.acknowledged_sync += u64::from(op.write_mode == WriteMode::Sync);
                return Ok(());
            }
            Applied::No => {}
        }
        op.fate = Fate::Never;
        self.tally.refused += 1;
        let What::Put(records) = &self.ops[id].what else { return Ok(()) };
        match records.iter().find(|(_, number)| self.seen.contains(number)) {
            Some((key, number)) => broken(
                "visible",
                format!("{} was answered {error}, and record {key}/{number} was seen", tell(&self.ops[id])),
            ),
            None => Ok(()),
        }
    }

    fn write_lost(&mut self, id: usize, version: &Version) -> Result<(), Violation> {
        self.tally.write_lost += 1;
        let (session, partition) = (self.ops[id].session, self.ops[id].partition);
        let token = self.sessions[session].tokens.remove(&partition);
        let own = token.map(|(_, own)| own).unwrap_or_default();
        if self.kind != Kind::Whole {
            return Ok(());
        }
        let safe = own.iter().all(|op| self.is_safe(&self.ops[*op]));
        if safe {
            let text = format!("{}: write {version} is said to be lost", tell(&self.ops[id]));
            return broken("session", text);
        }
        Ok(())
    }

    /// Whether no fault of the run may have taken this acknowledged write.
    fn is_safe(&self, op: &Op) -> bool {
        self.kind == Kind::Whole && (op.write_mode == WriteMode::Sync || self.last_crash < op.begun)
    }

    fn written(&mut self, id: usize) -> Result<(), Violation> {
        let op = &self.ops[id];
        self.tally.acknowledged += 1;
        self.tally.acknowledged_sync += u64::from(op.write_mode == WriteMode::Sync);
        let Some(version) = op.version.clone() else { return Ok(()) };
        let (partition, session) = (op.partition, op.session);
        if let Some(other) = self.versions.insert((partition, version.clone()), id) {
            let text = format!("{} and {} have one version", tell(&self.ops[other]), tell(op));
            return broken("version", text);
        }
        let tokens = &mut self.sessions[session].tokens;
        let (token, own) = tokens.entry(partition).or_insert_with(|| (version.clone(), Vec::new()));
        *token = version.max(token.clone());
        own.push(id);
        Ok(())
    }

    /// Whether `op` was over when `other` began: answered, or settled without anybody knowing how it ended.
    fn before(&self, op: usize, other: &Op) -> bool {
        let op = &self.ops[op];
        let over = matches!(op.fate, Fate::Done | Fate::Unknown);
        over && op.ended.is_some_and(|ended| ended < other.begun)
    }

    fn about(&self, write: &Op, key: i64) -> About {
        let number = match &write.what {
            What::Put(records) if !self.is_set => records.iter().find(|(put, _)| *put == key),
            _ => None,
        };
        About { key, number: number.map(|(_, number)| *number) }
    }

    /// Whether this write deletes a record of this key and number.
    fn deletes(&self, op: &Op, key: i64, number: Option<i64>) -> bool {
        match &op.what {
            What::DeleteKeys(keys) => keys.contains(&key),
            What::DeleteMatch(class) => number.is_none_or(|number| class_of(number) == *class),
            What::DeleteAll => true,
            What::Put(_) | What::Get(_) | What::ReadAll => false,
        }
    }

    /// Whether any delete that was not over when `write` began may have deleted what it put.
    fn may_be_deleted(&self, write: &Op, key: i64, number: i64) -> bool {
        // in a set a later record of the key may have been deleted, of any class
        let number = (!self.is_set).then_some(number);
        self.writes[write.partition as usize].iter().any(|id| {
            let op = &self.ops[*id];
            op.fate != Fate::Never && self.deletes(op, key, number) && !self.before(*id, write)
        })
    }

    /// What is wrong if somebody who has to know of `write` sees just these records of a key.
    fn contradicts(&self, write: &Op, key: i64, seen: &[i64]) -> Option<(&'static str, String)> {
        let too_old = |number: &&i64| {
            let (writer, _) = self.records[**number as usize];
            self.before(writer, write)
        };
        match &write.what {
            What::Put(records) => {
                let (_, number) = *records.iter().find(|(put, _)| *put == key)?;
                if seen.contains(&number) {
                    return None;
                }
                if self.is_set {
                    if let Some(seen) = seen.first() {
                        let stale = too_old(&seen);
                        return stale.then(|| ("lost", format!("{key}/{seen} is seen instead of {number}")));
                    }
                }
                let deleted = self.may_be_deleted(write, key, number);
                (!deleted).then(|| ("lost", format!("{key}/{number} is not there, of {seen:?}")))
            }
            What::DeleteKeys(_) | What::DeleteMatch(_) | What::DeleteAll => {
                let back = seen.iter().find(|n| self.deletes(write, key, Some(**n)) && too_old(n))?;
                Some(("resurrected", format!("{key}/{back} is back")))
            }
            What::Get(_) | What::ReadAll => None,
        }
    }

    fn read(&mut self, id: usize, seen: &[(i64, i64)]) -> Result<(), Violation> {
        self.tally.reads += 1;
        let mut by_key: BTreeMap<i64, Vec<i64>> = BTreeMap::new();
        for (key, number) in seen {
            self.seen.insert(*number);
            self.is_real(id, *key, *number)?;
            by_key.entry(*key).or_default().push(*number);
        }
        let op = self.ops[id].clone();
        let twice = |numbers: &[i64]| numbers.iter().collect::<BTreeSet<_>>().len() < numbers.len();
        if let Some((key, numbers)) = by_key.iter().find(|(_, numbers)| twice(numbers)) {
            return broken("twice", format!("{}: key {key} has {numbers:?}, each put once", tell(&op)));
        }
        if let Some((key, numbers)) = by_key.iter().find(|(_, n)| self.is_set && n.len() > 1) {
            return broken("set", format!("{}: key {key} has the records {numbers:?}", tell(&op)));
        }
        let writes = &self.writes[op.partition as usize];
        let known = writes.iter().filter(|id| self.obliges(&self.ops[**id], &op));
        let known: Vec<usize> = known.copied().collect();
        for write in known {
            self.judge(&op, write, &by_key)?;
            let write = &self.ops[write];
            if op.version < write.version && op.version.is_some() && write.write_mode == WriteMode::Sync {
                let text = format!("{} answered from before {}", tell(&op), tell(write));
                return broken("stale read", text);
            }
        }
        self.judge_session(&op, &by_key)
    }

    fn judge(&mut self, op: &Op, write: usize, seen: &BTreeMap<i64, Vec<i64>>) -> Result<(), Violation> {
        for key in self.keys_of(op, write) {
            let of_key = seen.get(&key).map_or(&[][..], Vec::as_slice);
            if let Some((promise, what)) = self.contradicts(&self.ops[write], key, of_key) {
                *if promise == "lost" { &mut self.tally.lost } else { &mut self.tally.resurrected } += 1;
                let text = format!("{} does not know of {}: {what}", tell(op), tell(&self.ops[write]));
                return broken(promise, text);
            }
        }
        Ok(())
    }

    /// Which keys of a write a read tells of.
    fn keys_of(&self, op: &Op, write: usize) -> Vec<i64> {
        let asked = |key: &i64| match op.what {
            What::Get(one) => one == *key,
            _ => true,
        };
        let keys: Vec<i64> = match &self.ops[write].what {
            What::Put(records) => records.iter().map(|(key, _)| *key).collect(),
            What::DeleteKeys(keys) => keys.clone(),
            _ => match op.what {
                What::Get(one) => vec![one],
                _ => self.records.iter().map(|(_, key)| *key).collect::<BTreeSet<_>>().into_iter().collect(),
            },
        };
        keys.into_iter().filter(asked).collect()
    }

    fn is_real(&self, id: usize, key: i64, number: i64) -> Result<(), Violation> {
        let op = &self.ops[id];
        let Some((writer, put)) = usize::try_from(number).ok().and_then(|n| self.records.get(n)) else {
            return broken("invented", format!("{}: nobody put record {key}/{number}", tell(op)));
        };
        let writer = &self.ops[*writer];
        if *put != key || writer.partition != op.partition {
            return broken("invented", format!("{}: record {number} is under key {key}", tell(op)));
        }
        if writer.fate == Fate::Never {
            let text = format!("{} sees {key}/{number} of {}, which never was", tell(op), tell(writer));
            return broken("visible", text);
        }
        Ok(())
    }

    /// Whether this read has to know of this write.
    fn obliges(&self, write: &Op, read: &Op) -> bool {
        let over = write.fate == Fate::Done && write.ended.is_some_and(|ended| ended < read.begun);
        let mode = match read.read_mode {
            ReadMode::Primary => true,
            ReadMode::Quorum => write.write_mode == WriteMode::Sync,
            ReadMode::Local => false,
        };
        over && mode && self.is_safe(write)
    }

    /// A session sees what it wrote, or what came after it.
    fn judge_session(&self, op: &Op, seen: &BTreeMap<i64, Vec<i64>>) -> Result<(), Violation> {
        if op.token.is_none() {
            return Ok(());
        }
        let Some((token, own)) = self.sessions[op.session].tokens.get(&op.partition) else { return Ok(()) };
        // a token is one version: of a session that wrote on both sides of a split it tells one side
        let told = |id: &&usize| {
            let version = self.ops[**id].version.as_ref();
            version.is_some_and(|version| self.holds(op.partition, token, version))
        };
        for id in own.iter().filter(told) {
            for key in self.keys_of(op, *id) {
                let of_key = seen.get(&key).map_or(&[][..], Vec::as_slice);
                let Some((_, what)) = self.contradicts(&self.ops[*id], key, of_key) else { continue };
                if !self.is_excused(&self.ops[*id], key, of_key) {
                    let text =
                        format!("{} does not know of its own {}: {what}", tell(op), tell(&self.ops[*id]));
                    return broken("session", text);
                }
            }
        }
        Ok(())
    }

    /// Whether this own write was beaten by one of another side, which was reported; or may have been.
    fn is_excused(&self, write: &Op, key: i64, seen: &[i64]) -> bool {
        if self.kind == Kind::Whole {
            return false;
        }
        let Some(version) = &write.version else { return true };
        // of a batch each record has a version of its own
        let own = versions_of(write).find(|(of, _)| *of == key).map(|(_, version)| version);
        let version = own.as_ref().unwrap_or(version);
        let newer = seen.iter().any(|number| {
            let writer = &self.ops[self.records[*number as usize].0];
            let Some(theirs) = &writer.version else { return true };
            // a delete by pattern takes what its side knows
            let unknown = matches!(write.what, What::DeleteMatch(_))
                && !self.knows(write.partition, version, theirs, self.about(writer, key));
            theirs > version || unknown
        });
        // a copy that was discarded takes what it held then, and nothing that came after
        let mut copies = self.discarded.get(&write.partition).into_iter().flatten();
        let about = self.about(write, key);
        newer
            || self.is_reported(write, key, version)
            || copies.any(|copy| {
                write.begun < copy.at && self.has_gone_with(write.partition, copy, version, Some(about))
            })
    }

    fn is_reported(&self, write: &Op, key: i64, version: &Version) -> bool {
        let (partition, about, term) = (write.partition, self.about(write, key), Term::from(key));
        self.losers[partition as usize].iter().any(|loser| {
            // of a bag each record is reported by itself
            let concerns = self.is_set || loser.record.is_none() || loser.version == *version;
            concerns
                && loser.key.as_ref().is_none_or(|lost| *lost == term)
                && self.knows(partition, &loser.version, version, about)
        })
    }
}

impl Oracle {
    /// Sessions begin anew, as those of users who come later.
    pub(super) fn forget_tokens(&mut self) {
        self.sessions.iter_mut().for_each(|session| session.tokens.clear());
    }

    /// How many operations have begun.
    pub(super) fn count(&self) -> usize {
        self.ops.len()
    }

    /// Operations that nobody has answered.
    pub(super) fn open(&self) -> Vec<String> {
        self.ops.iter().filter(|op| op.fate == Fate::Open).map(tell).collect()
    }
}

/// Whether a history with this end contains a version.
fn within(history: &[(Epoch, Option<Version>)], end: Option<&Version>, version: &Version) -> bool {
    let Some(index) = history.iter().position(|(epoch, _)| *epoch == version.epoch) else { return false };
    let end = match history.get(index + 1) {
        Some((_, base)) => base.as_ref(),
        None => end,
    };
    end >= Some(version)
}

/// The same of a copy, whose history may be cut off at its beginning: what is older than it and up to its first base
/// counts as held.
fn reaches(history: &[(Epoch, Option<Version>)], end: Option<&Version>, version: &Version) -> bool {
    let first = history.first();
    let old = first.is_some_and(|(epoch, base)| version.epoch < *epoch && base.as_ref() >= Some(version));
    old || within(history, end, version)
}

/// The keys that an acknowledged write has decided, each with the version of its own. (A delete by pattern does not
/// tell its keys.)
fn versions_of(op: &Op) -> impl Iterator<Item = (i64, Version)> {
    let version = op.version.clone().filter(|_| op.fate == Fate::Done);
    let keys: Vec<(i64, u64)> = match &op.what {
        // a batch is one write for each record, and the answer names the last
        What::Put(records) => {
            let last = records.len() as u64 - 1;
            records.iter().enumerate().map(|(index, (key, _))| (*key, last - index as u64)).collect()
        }
        What::DeleteKeys(keys) => keys.iter().map(|key| (*key, 0)).collect(),
        What::DeleteMatch(_) | What::DeleteAll | What::Get(_) | What::ReadAll => Vec::new(),
    };
    let at = move |(key, back): (i64, u64)| {
        let version = version.as_ref()?;
        Some((key, Version::new(version.epoch.clone(), version.seq.saturating_sub(back))))
    };
    keys.into_iter().filter_map(at)
}

/// An operation, in words.
pub(super) fn tell(op: &Op) -> String {
    let mode = match op.what.is_write() {
        true => op.write_mode.to_string(),
        false => format!("{}{}", op.read_mode, if op.token.is_some() { " session" } else { "" }),
    };
    let version = op.version.as_ref().map(|version| format!(" = {version}")).unwrap_or_default();
    let (what, partition, place, session) = (&op.what, op.partition, op.place, op.session);
    format!("{what:?} ({mode}, partition {partition}, n{place}, session {session}, {:?}{version})", op.fate)
}
