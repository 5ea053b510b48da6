//! The books of the check: who had to receive what, and who did.
//!
//! They know nothing of the cluster. A counter ticks at everything that a client does or sees; what must have
//! arrived follows from the order of these ticks alone:
//!
//! * a **membership** is one user in one room over one connection. It counts from the tick at which its join
//!   was confirmed to the client until the tick at which the client asked to leave, or, when its node crashes,
//!   until a mark taken just before;
//! * a **message** is under way from the tick at which its client sent it (for the last time) until the tick
//!   at which its client read the receipt;
//! * a membership **must** receive a message of its room if it counted during all of that time. If only during
//!   a part, it may receive it; if it was not even asked for before the receipt, it must not.

use std::collections::HashMap;

pub(crate) type Tick = u64;

/// A user in a room over one connection.
pub(crate) struct Membership {
    /// The number of the node that it is on.
    pub(crate) node: usize,
    room: usize,
    asked: Tick,
    since: Option<Tick>,
    until: Option<Tick>,
    got: HashMap<usize, u32>,
}

struct Said {
    room: usize,
    sends: u32,
    sent: Tick,
    receipt: Option<Tick>,
    flooded: bool,
}

#[derive(Default)]
pub(crate) struct Ledger {
    clock: Tick,
    memberships: Vec<Membership>,
    said: Vec<Option<Said>>,
    confirmed: usize,
    trouble: Vec<String>,
}

/// What the books say about the memberships of one node.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(crate) struct Row {
    pub(crate) memberships: u64,
    /// How many deliveries had to be, and how many of these were.
    pub(crate) should: u64,
    pub(crate) did: u64,
    /// Deliveries that were allowed either way, because the member came or went meanwhile, and happened.
    pub(crate) allowed: u64,
    /// Second copies of messages that were sent twice, because a crash left the first one unconfirmed.
    pub(crate) again: u64,
    pub(crate) missed: u64,
    pub(crate) duplicated: u64,
}

/// The account at the end.
#[derive(Debug, Default)]
pub(crate) struct Account {
    pub(crate) rows: Vec<Row>,
    pub(crate) sent: usize,
    pub(crate) flooded: usize,
    pub(crate) resent: usize,
    pub(crate) trouble: Vec<String>,
}

impl Ledger {
    fn tick(&mut self) -> Tick {
        self.clock += 1;
        self.clock
    }

    pub(crate) fn trouble(&mut self, what: String) {
        self.trouble.push(what);
    }

    pub(crate) fn asked(&mut self, node: usize, room: usize) -> usize {
        let asked = self.tick();
        let got = HashMap::new();
        self.memberships.push(Membership { node, room, asked, since: None, until: None, got });
        self.memberships.len() - 1
    }

    pub(crate) fn joined(&mut self, membership: usize) {
        let now = self.tick();
        self.memberships[membership].since.get_or_insert(now);
    }

    /// The client is about to leave, or its node is about to crash, or it has found its connection closed:
    /// from here on nothing more is due.
    pub(crate) fn leaves(&mut self, membership: usize) {
        let now = self.tick();
        self.memberships[membership].until.get_or_insert(now);
    }

    pub(crate) fn sends(&mut self, message: usize, room: usize) {
        let sent = self.tick();
        if self.said.len() <= message {
            self.said.resize_with(message + 1, || None);
        }
        let said =
            self.said[message].get_or_insert(Said { room, sends: 0, sent, receipt: None, flooded: false });
        said.sends += 1;
        said.sent = sent;
    }

    /// A receipt was read.
    pub(crate) fn confirmed(&mut self, message: usize, flooded: bool) {
        let now = self.tick();
        match self.said.get_mut(message) {
            Some(Some(said)) if said.receipt.is_none() => {
                said.receipt = Some(now);
                said.flooded = flooded;
                self.confirmed += 1;
            }
            _ => self.trouble.push(format!("a receipt for message {message}, which was not open")),
        }
    }

    pub(crate) fn received(&mut self, membership: usize, room: usize, message: usize) {
        self.tick();
        let member = &mut self.memberships[membership];
        *member.got.entry(message).or_default() += 1;
        let wrong = match self.said.get(message).and_then(Option::as_ref) {
            None => "which nobody has sent",
            Some(said) if said.room != room || member.room != room => "of another room",
            Some(said) if said.receipt.is_some_and(|receipt| receipt < member.asked) => "of before its join",
            Some(_) => return,
        };
        self.trouble.push(format!("membership {membership} received message {message}, {wrong}"));
    }

    pub(crate) fn confirmed_count(&self) -> usize {
        self.confirmed
    }

    /// How many deliveries are still due.
    pub(crate) fn open(&self) -> u64 {
        self.account(0).rows.iter().map(|row| row.missed).sum()
    }

    /// Settles everything.
    pub(crate) fn account(&self, nodes: usize) -> Account {
        let highest = self.memberships.iter().map(|member| member.node + 1).max().unwrap_or(0);
        let mut account = Account {
            rows: vec![Row::default(); highest.max(nodes)],
            sent: self.said.iter().flatten().count(),
            flooded: self.said.iter().flatten().filter(|said| said.flooded).count(),
            resent: self.said.iter().flatten().filter(|said| said.sends > 1).count(),
            trouble: self.trouble.clone(),
        };
        for (index, member) in self.memberships.iter().enumerate() {
            account.rows[member.node].memberships += 1;
            for (message, said) in self.said.iter().enumerate() {
                if let Some(said) = said.as_ref().filter(|said| said.room == member.room) {
                    settle(&mut account, index, member, message, said);
                }
            }
        }
        account
    }
}

fn settle(account: &mut Account, index: usize, member: &Membership, message: usize, said: &Said) {
    let row = &mut account.rows[member.node];
    let copies = member.got.get(&message).copied().unwrap_or(0);
    let ended = member.until.unwrap_or(Tick::MAX);
    let must = member.since.is_some_and(|since| since < said.sent)
        && said.receipt.is_some_and(|receipt| receipt < ended);
    if must {
        row.should += 1;
        row.did += u64::from(copies > 0);
        row.missed += u64::from(copies == 0);
    } else {
        row.allowed += u64::from(copies > 0);
    }
    // A message that was sent twice under one id may arrive twice; the page shows the second copy to nobody.
    row.again += u64::from(copies.min(said.sends).saturating_sub(1));
    row.duplicated += u64::from(copies.saturating_sub(said.sends));
    if must && copies == 0 {
        account.trouble.push(format!(
            "missed: message {message} in room {} (sent at {}, confirmed at {:?}) by membership {index} on n{} \
             (joined at {:?}, left at {:?})",
            said.room,
            said.sent,
            said.receipt.unwrap_or_default(),
            member.node + 1,
            member.since.unwrap_or_default(),
            member.until,
        ));
    }
    if copies > said.sends {
        account.trouble.push(format!(
            "duplicated: message {message} (sent {} times) came {copies} times to membership {index} on n{}",
            said.sends,
            member.node + 1
        ));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(ledger: &Ledger) -> Row {
        ledger.account(1).rows[0].clone()
    }

    #[test]
    fn a_member_counts_between_its_join_and_its_leave() {
        let mut ledger = Ledger::default();
        let early = ledger.asked(0, 7);
        ledger.sends(0, 7);
        ledger.joined(early);
        ledger.confirmed(0, false);
        ledger.sends(1, 7);
        ledger.confirmed(1, false);
        ledger.sends(2, 7);
        ledger.leaves(early);
        ledger.confirmed(2, false);
        assert_eq!((rows(&ledger).should, rows(&ledger).missed), (1, 1), "only message 1 is due");
        ledger.received(early, 7, 1);
        ledger.received(early, 7, 2);
        let row = rows(&ledger);
        assert_eq!((row.should, row.did, row.allowed, row.missed, row.duplicated), (1, 1, 1, 0, 0));
        assert!(ledger.account(1).trouble.is_empty());
    }

    #[test]
    fn misses_copies_and_strays_are_found() {
        let mut ledger = Ledger::default();
        let member = ledger.asked(0, 7);
        ledger.joined(member);
        for message in 0..2 {
            ledger.sends(message, 7);
            ledger.confirmed(message, false);
        }
        ledger.received(member, 7, 0);
        ledger.received(member, 7, 0);
        let row = rows(&ledger);
        assert_eq!((row.should, row.did, row.missed, row.duplicated), (2, 1, 1, 1));
        assert_eq!(ledger.account(1).trouble.len(), 2);
        let late = ledger.asked(0, 7);
        ledger.received(late, 7, 1);
        ledger.received(member, 8, 1);
        ledger.received(member, 7, 9);
        assert_eq!(ledger.account(1).trouble.len(), 4, "{:?}", ledger.account(1).trouble);
    }

    #[test]
    fn a_message_sent_again_may_arrive_again() {
        let mut ledger = Ledger::default();
        let member = ledger.asked(0, 7);
        ledger.joined(member);
        ledger.sends(0, 7);
        ledger.sends(0, 7);
        ledger.confirmed(0, true);
        ledger.received(member, 7, 0);
        ledger.received(member, 7, 0);
        let row = rows(&ledger);
        assert_eq!((row.should, row.did, row.again, row.duplicated), (1, 1, 1, 0));
        ledger.received(member, 7, 0);
        assert_eq!(rows(&ledger).duplicated, 1);
    }
}
