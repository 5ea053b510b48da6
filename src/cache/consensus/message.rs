//! What the nodes of a group say to one another, and its way into the Raft library and out of it.
//!
//! The library's own encoding never meets the network: what arrives is of our types, bounded and checked, and the
//! library's messages are built from it. Whatever would make the library panic is refused before.

use bytes::Bytes;
use raft::StateRole;
use raft::eraftpb::{ConfState, Entry, EntryType, Message, MessageType, Snapshot};
use raft::prelude::ConfChangeType;
use serde::{Deserialize, Serialize};

use super::log::Log;
use super::raft_id;
use super::state::{Change, Logged, Member, Role, State as Decisions};

/// How many entries and how many nodes one message may have.
const MAX_ENTRIES: usize = 4096;
const MAX_NODES: usize = 4096;
/// The highest term, index, attempt or counter that is taken in: nobody counts so far, and to count on from the highest
/// number that there is would overflow, in the library too.
pub(super) const MAX_NUMBER: u64 = u64::MAX / 2;
/// How many changes one entry may have.
pub(super) const MAX_CHANGES: usize = 64;

/// Names a group: the how-manieth attempt to found one it is, and who founds it.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub struct GroupId {
    /// Higher in every later attempt.
    pub attempt: u64,
    /// Who founds it.
    pub founder: Member,
}

impl GroupId {
    fn is_sound(&self) -> bool {
        self.attempt <= MAX_NUMBER
    }
}

/// What the nodes of a cache say to one another about who decides, and what is decided.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum ConsensusMessage {
    /// The sender wants to found this group with these nodes: will the receiver be of it?
    Found {
        /// The group.
        group: GroupId,
        /// Everybody who is asked, rising.
        founders: Vec<Member>,
    },
    /// The sender is of this group, and of no lower one any more.
    Joined {
        /// The group.
        group: GroupId,
        /// Which opening of the cache on its node the sender is.
        opening: u32,
    },
    /// The sender has promised itself to a higher group.
    Refused {
        /// The group it has promised itself to.
        promised: GroupId,
    },
    /// The sender is of a group that is established.
    Established {
        /// The group.
        group: GroupId,
    },
    /// A message of the Raft library.
    Raft {
        /// The group.
        group: GroupId,
        /// Which opening of the cache on its node the sender is.
        opening: u32,
        /// Whether the sender knows it to be established.
        established: bool,
        /// The message.
        message: Box<RaftMessage>,
    },
}

impl ConsensusMessage {
    /// Whether the number of its group can be counted on from.
    pub(super) fn is_sound(&self) -> bool {
        match self {
            ConsensusMessage::Found { group, .. }
            | ConsensusMessage::Joined { group, .. }
            | ConsensusMessage::Refused { promised: group }
            | ConsensusMessage::Established { group }
            | ConsensusMessage::Raft { group, .. } => group.is_sound(),
        }
    }
}

/// A message of the Raft library, without what is not used.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RaftMessage {
    kind: Kind,
    term: u64,
    log_term: u64,
    index: u64,
    commit: u64,
    commit_term: u64,
    reject: bool,
    reject_hint: u64,
    entries: Vec<LogEntry>,
    snapshot: Option<Box<GroupSnapshot>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum Kind {
    Propose,
    Append,
    AppendResponse,
    Vote,
    VoteResponse,
    PreVote,
    PreVoteResponse,
    Snapshot,
    Heartbeat,
    HeartbeatResponse,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct LogEntry {
    term: u64,
    index: u64,
    logged: Logged,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct GroupSnapshot {
    index: u64,
    term: u64,
    voters: Vec<u64>,
    learners: Vec<u64>,
    state: Decisions,
}

const KINDS: [(Kind, MessageType); 10] = [
    (Kind::Propose, MessageType::MsgPropose),
    (Kind::Append, MessageType::MsgAppend),
    (Kind::AppendResponse, MessageType::MsgAppendResponse),
    (Kind::Vote, MessageType::MsgRequestVote),
    (Kind::VoteResponse, MessageType::MsgRequestVoteResponse),
    (Kind::PreVote, MessageType::MsgRequestPreVote),
    (Kind::PreVoteResponse, MessageType::MsgRequestPreVoteResponse),
    (Kind::Snapshot, MessageType::MsgSnapshot),
    (Kind::Heartbeat, MessageType::MsgHeartbeat),
    (Kind::HeartbeatResponse, MessageType::MsgHeartbeatResponse),
];

/// How what is decided is kept inside the library's snapshots; it stays on this node.
pub(super) struct State;

impl State {
    pub(super) fn encode(state: &Decisions) -> Vec<u8> {
        postcard::to_stdvec(state).unwrap_or_default()
    }

    pub(super) fn decode(bytes: &[u8]) -> Option<Decisions> {
        postcard::from_bytes(bytes).ok()
    }
}

/// The library's entry for one of ours.
pub(super) fn to_entry(logged: &Logged) -> Entry {
    let mut entry = Entry::default();
    match logged {
        Logged::Nothing => {}
        Logged::Changes(_) | Logged::Established => {
            entry.data = postcard::to_stdvec(logged).unwrap_or_default().into();
        }
        Logged::Member(member, role) => {
            entry.set_entry_type(EntryType::EntryConfChange);
            entry.data = conf_change(raft_id(member), *role);
            entry.context = postcard::to_stdvec(logged).unwrap_or_default().into();
        }
    }
    entry
}

/// Ours for one of the library's.
pub(super) fn from_entry(entry: &Entry) -> Option<Logged> {
    match entry.get_entry_type() {
        EntryType::EntryNormal if entry.data.is_empty() => Some(Logged::Nothing),
        EntryType::EntryNormal => postcard::from_bytes(&entry.data).ok(),
        EntryType::EntryConfChange => postcard::from_bytes(&entry.context).ok(),
        EntryType::EntryConfChangeV2 => None,
    }
}

/// The kind of change, as the library has it.
pub(super) fn change_type(role: Role) -> ConfChangeType {
    match role {
        Role::Voter => ConfChangeType::AddNode,
        Role::Learner => ConfChangeType::AddLearnerNode,
        Role::Gone => ConfChangeType::RemoveNode,
    }
}

/// A `ConfChange` in the library's encoding: its fields 2 and 3, as variable-length numbers. Written by hand, so that
/// nothing of ours needs the library's encoder.
fn conf_change(id: u64, role: Role) -> Bytes {
    let mut bytes = Vec::with_capacity(16);
    if change_type(role) != ConfChangeType::AddNode {
        bytes.extend([0x10, change_type(role) as u8]);
    }
    bytes.push(0x18);
    let mut rest = id;
    while rest >= 0x80 {
        bytes.push((rest & 0x7f) as u8 | 0x80);
        rest >>= 7;
    }
    bytes.push(rest as u8);
    bytes.into()
}

impl RaftMessage {
    /// One of the library's messages as ours; `None` for those that have no business on the network.
    pub(super) fn from_library(mut message: Message) -> Option<Self> {
        let kind = KINDS.iter().find(|(_, theirs)| *theirs == message.msg_type)?.0;
        let entries = message.take_entries().into_iter().map(|entry| {
            Some(LogEntry { term: entry.term, index: entry.index, logged: from_entry(&entry)? })
        });
        let snapshot = match kind {
            Kind::Snapshot => Some(Box::new(GroupSnapshot::from_library(message.get_snapshot())?)),
            _ => None,
        };
        Some(Self {
            kind,
            term: message.term,
            log_term: message.log_term,
            index: message.index,
            commit: message.commit,
            commit_term: message.commit_term,
            reject: message.reject,
            reject_hint: message.reject_hint,
            entries: entries.collect::<Option<_>>()?,
            snapshot,
        })
    }

    /// Ours as one of the library's, if the library can take it in as it is now.
    pub(super) fn into_library(self, from: u64, to: u64, raft: &raft::Raft<Log>) -> Option<Message> {
        if !self.is_sound(raft) {
            return None;
        }
        let mut message = Message { from, to, ..Message::default() };
        let theirs = KINDS.iter().find(|(ours, _)| *ours == self.kind)?.1;
        message.set_msg_type(theirs);
        (message.term, message.log_term, message.index) = (self.term, self.log_term, self.index);
        (message.commit, message.commit_term) = (self.commit, self.commit_term);
        (message.reject, message.reject_hint) = (self.reject, self.reject_hint);
        let entries: Vec<_> = self
            .entries
            .iter()
            .map(|entry| {
                let (index, term) = (entry.index, entry.term);
                Entry { index, term, ..to_entry(&entry.logged) }
            })
            .collect();
        message.set_entries(entries.into());
        if let Some(snapshot) = self.snapshot {
            message.set_snapshot(snapshot.to_library());
        }
        Some(message)
    }

    fn is_bounded(&self) -> bool {
        let own = [self.term, self.log_term, self.index, self.commit, self.commit_term, self.reject_hint];
        let entries = self.entries.iter().flat_map(|entry| [entry.term, entry.index]);
        self.entries.len() <= MAX_ENTRIES && own.into_iter().chain(entries).all(|number| number <= MAX_NUMBER)
    }

    fn is_sound(&self, raft: &raft::Raft<Log>) -> bool {
        let log = &raft.raft_log;
        let (last, committed) = (log.last_index(), log.committed);
        // first: what follows counts with these numbers
        if !self.is_bounded() {
            return false;
        }
        let changes = |entry: &LogEntry| match &entry.logged {
            Logged::Changes(changes) => changes.len() <= MAX_CHANGES && changes.iter().all(is_sound),
            Logged::Nothing | Logged::Established | Logged::Member(..) => true,
        };
        let kind = match self.kind {
            // only what a member may wish for itself; who is of the group is the leader's affair
            Kind::Propose => {
                let wish = |entry: &LogEntry| matches!(entry.logged, Logged::Changes(_));
                self.term == 0 && !self.entries.is_empty() && self.entries.iter().all(wish)
            }
            Kind::Append => {
                let follows = self.entries.iter().zip(1..).all(|(e, at)| e.index == self.index + at);
                let rises = self.entries.iter().all(|e| e.term >= self.log_term && e.term <= self.term);
                // what is committed never changes
                let keeps = self
                    .entries
                    .iter()
                    .take_while(|e| e.index <= committed)
                    .all(|entry| log.term(entry.index).is_ok_and(|term| term == 0 || term == entry.term));
                // a second leader of one term cannot be
                let alone = !(raft.state == StateRole::Leader && raft.term == self.term);
                follows && rises && keeps && alone
            }
            // the leader knows how far we are, or its commit would be lower
            Kind::Heartbeat => self.commit <= last || self.term < raft.term,
            Kind::AppendResponse => self.index <= last || self.reject,
            Kind::Snapshot => self.snapshot.as_ref().is_some_and(|snapshot| snapshot.is_sound(committed)),
            Kind::Vote | Kind::VoteResponse | Kind::PreVote | Kind::PreVoteResponse => true,
            Kind::HeartbeatResponse => self.commit <= last,
        };
        // a term of zero marks what a node says to itself
        kind && (self.term > 0) == (self.kind != Kind::Propose) && self.entries.iter().all(changes)
    }
}

/// Whether a wish that came over the wire is bounded.
fn is_sound(change: &Change) -> bool {
    change.config.is_sound()
}

impl GroupSnapshot {
    fn from_library(snapshot: &Snapshot) -> Option<Self> {
        let meta = snapshot.get_metadata();
        let conf = meta.get_conf_state();
        Some(Self {
            index: meta.index,
            term: meta.term,
            voters: conf.voters.clone(),
            learners: conf.learners.clone(),
            state: State::decode(&snapshot.data)?,
        })
    }

    fn to_library(&self) -> Snapshot {
        let mut conf = ConfState::default();
        conf.set_voters(self.voters.clone());
        conf.set_learners(self.learners.clone());
        let mut snapshot = Snapshot::default();
        let meta = snapshot.mut_metadata();
        (meta.index, meta.term) = (self.index, self.term);
        meta.set_conf_state(conf);
        snapshot.set_data(State::encode(&self.state).into());
        snapshot
    }

    fn is_sound(&self, committed: u64) -> bool {
        let mut all: Vec<_> = self.voters.iter().chain(&self.learners).collect();
        all.sort_unstable();
        let distinct = all.windows(2).all(|pair| pair[0] != pair[1]);
        let known = all.iter().all(|id| **id != 0 && self.state.members.contains_key(id));
        let _ = committed;
        let numbers = 1..=MAX_NUMBER;
        let bounded = all.len() <= MAX_NODES && numbers.contains(&self.index) && numbers.contains(&self.term);
        bounded && distinct && known && !self.voters.is_empty() && self.state.is_sound()
    }
}

#[cfg(test)]
impl RaftMessage {
    /// Messages of every kind that stand out by nothing but one number.
    pub(super) fn hostile(number: u64, state: &Decisions) -> Vec<Self> {
        let logged = Logged::Changes(Vec::new());
        let plain = |kind| Self {
            kind,
            term: u64::from(kind != Kind::Propose),
            log_term: 0,
            index: 0,
            commit: 0,
            commit_term: 0,
            reject: false,
            reject_hint: 0,
            entries: Vec::new(),
            snapshot: None,
        };
        let all = KINDS.iter().flat_map(|(kind, _)| {
            let mut all = vec![plain(*kind); 8];
            (all[0].term, all[1].log_term, all[2].index) = (number, number, number);
            (all[3].commit, all[4].commit_term) = (number, number);
            (all[5].reject, all[5].reject_hint) = (true, number);
            (all[6].reject, all[6].index) = (true, number);
            (all[7].term, all[7].log_term) = (number, number);
            all[7].entries = vec![LogEntry { term: number, index: 1, logged: logged.clone() }];
            // the same, each with an entry that follows
            let entry = |message: &Self| LogEntry {
                term: message.term,
                index: message.index.wrapping_add(1),
                logged: logged.clone(),
            };
            let filled = all.clone().into_iter().map(move |message| {
                let entries = vec![entry(&message)];
                Self { entries, ..message }
            });
            all.into_iter().chain(filled.collect::<Vec<_>>())
        });
        let voters: Vec<u64> = state.members.keys().copied().collect();
        let snapshots = [(number, 1), (1, number), (number, number)].map(|(index, term)| {
            let state = state.clone();
            let snapshot = GroupSnapshot { index, term, voters: voters.clone(), learners: Vec::new(), state };
            Self { term: term.min(MAX_NUMBER), snapshot: Some(Box::new(snapshot)), ..plain(Kind::Snapshot) }
        });
        all.chain(snapshots).collect()
    }
}
