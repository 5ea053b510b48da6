//! Who had to get what, and who did.
//!
//! From the promise alone: a member whose join had returned before a broadcast began, and that had not left when the
//! broadcast had its receipt, must get it, once, unless its node or the sender's had been killed, or the two had lost
//! each other meanwhile. The test says when that was ([`Ledger::lost`]); nothing is taken from the nodes' own view.

use std::collections::{BTreeMap, HashMap};

use super::words::*;

/// A life of a node: its name and incarnation.
pub type Life = (String, u64);

#[derive(Default)]
pub struct Ledger {
    members: BTreeMap<u32, Member>,
    casts: Vec<(Life, Cast)>,
    got: HashMap<(u32, Life, u64), Vec<Micros>>,
    /// Pairs of nodes that were not connected.
    lost: Vec<(Ends, Micros, Micros)>,
    /// Nodes that were frozen: what they send or get then may be late.
    frozen: Vec<(String, Micros, Micros)>,
}

/// One node and another, or one node and all others.
type Ends = (String, Option<String>);

struct Member {
    node: String,
    group: String,
    since: Micros,
    until: Micros,
}

/// What came out.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Account {
    pub sent: usize,
    pub flooded: usize,
    pub expected: usize,
    pub delivered: usize,
    pub missed: usize,
    pub duplicated: usize,
    /// The longest from the call of a broadcast to a member that had to get it.
    pub latest: Micros,
    pub trouble: Vec<String>,
}

impl Ledger {
    pub fn joined(&mut self, member: u32, node: &str, group: &str, since: Micros) {
        let known = self
            .members
            .insert(member, Member { node: node.into(), group: group.into(), since, until: Micros::MAX });
        assert!(known.is_none(), "each membership has a number of its own");
    }

    /// From here on nothing more is due to it.
    pub fn left(&mut self, member: u32, at: Micros) {
        let member = self.members.get_mut(&member).expect("it joined");
        member.until = member.until.min(at);
    }

    /// The same for all members of a node.
    pub fn gone(&mut self, node: &str, at: Micros) {
        for member in self.members.values_mut().filter(|member| member.node == node) {
            member.until = member.until.min(at);
        }
    }

    /// It was killed, and with it what its members had got: nothing is due to them.
    pub fn crashed(&mut self, node: &str) {
        self.gone(node, 0);
    }

    /// The node was not connected with the others all the time from then to then.
    pub fn lost(&mut self, node: &str, from: Micros, until: Micros) {
        self.lost.push(((node.into(), None), from, until));
    }

    /// Nor these two.
    pub fn lost_between(&mut self, one: &str, other: &str, from: Micros, until: Micros) {
        self.lost.push(((one.into(), Some(other.into())), from, until));
    }

    pub fn frozen(&mut self, node: &str, from: Micros, until: Micros) {
        self.frozen.push((node.into(), from, until));
    }

    pub fn casts(&mut self, node: &str, casts: impl IntoIterator<Item = Cast>) {
        self.casts.extend(casts.into_iter().map(|cast| ((node.to_owned(), cast.incarnation), cast)));
    }

    /// All that has come to the members of one process so far: in place of what it reported before.
    pub fn reported(&mut self, report: &Report) {
        let mut got: HashMap<_, Vec<Micros>> = HashMap::new();
        for (member, origin, number, at) in &report.got {
            got.entry((*member, report.origins[*origin].clone(), *number)).or_default().push(*at);
        }
        self.got.extend(got);
    }

    pub fn was_frozen(&self, node: &str) -> bool {
        self.frozen.iter().any(|(frozen, ..)| frozen == node)
    }

    /// Settles everything as it is now.
    pub fn account(&self) -> Account {
        let mut account = Account { sent: self.casts.len(), ..Account::default() };
        for ((member, origin, number), times) in &self.got {
            account.duplicated += times.len() - 1;
            if times.len() > 1 {
                account.note(format!(
                    "duplicated: {number} of {origin:?} came to member {member} on {} at {times:?}",
                    self.members[member].node
                ));
            }
        }
        for (origin, cast) in &self.casts {
            account.flooded += usize::from(cast.flooded);
            if let Some(error) = &cast.error {
                account.note(format!("{} of {origin:?} at {} failed: {error}", cast.number, cast.sent));
                continue;
            }
            for (number, member) in self.members.iter().filter(|(_, m)| self.must(m, origin, cast)) {
                self.settle(&mut account, *number, member, origin, cast);
            }
        }
        account
    }

    fn must(&self, member: &Member, (origin, _): &Life, cast: &Cast) -> bool {
        let apart = self.lost.iter().any(|((one, other), from, until)| {
            let ends = match other {
                None => *one == member.node || one == origin,
                Some(other) => [(one, other), (other, one)].contains(&(&member.node, origin)),
            };
            ends && under_way(cast, *from, *until)
        });
        member.group == cast.group
            && member.since < cast.sent
            && member.until > cast.ended
            && (member.node == *origin || !apart)
    }

    fn settle(&self, account: &mut Account, number: u32, member: &Member, origin: &Life, cast: &Cast) {
        account.expected += 1;
        let Some(times) = self.got.get(&(number, origin.clone(), cast.number)) else {
            account.missed += 1;
            return account.note(format!(
                "missed: {} of {origin:?} to {:?} (sent {}, receipt {}, flooded {}) by member {number} on {} \
                 (since {}, until {})",
                cast.number,
                cast.group,
                cast.sent,
                cast.ended,
                cast.flooded,
                member.node,
                member.since,
                member.until
            ));
        };
        account.delivered += 1;
        let excused = |node: &str| {
            self.frozen.iter().any(|(frozen, from, until)| frozen == node && under_way(cast, *from, *until))
        };
        if !excused(&member.node) && !excused(&origin.0) {
            account.latest = account.latest.max(times[0].saturating_sub(cast.sent));
        }
    }
}

fn under_way(cast: &Cast, from: Micros, until: Micros) -> bool {
    cast.ended >= from && cast.sent <= until
}

impl Account {
    fn note(&mut self, what: String) {
        self.trouble.push(what);
    }

    pub fn check(&self, scenario: &str) {
        let shown: Vec<_> = self.trouble.iter().take(20).collect();
        assert!(self.trouble.is_empty(), "{scenario}: {self:?}\n{shown:#?}");
        assert!(self.expected > 0, "{scenario}: nothing was due");
        assert_eq!((self.missed, self.duplicated, self.delivered), (0, 0, self.expected), "{scenario}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cast(number: u64, sent: Micros, ended: Micros) -> Cast {
        let group = "g".into();
        Cast { incarnation: 1, group, number, sent, ended, flooded: false, error: None }
    }

    fn report(got: &[(u32, u64, Micros)]) -> Report {
        let got = got.iter().map(|(member, number, at)| (*member, 0, *number, *at)).collect();
        Report { origins: vec![("a".into(), 1)], got, ..Report::default() }
    }

    #[test]
    fn the_oracle_finds_what_is_missed_and_what_came_twice() {
        let mut ledger = Ledger::default();
        ledger.joined(1, "b", "g", 10);
        ledger.joined(2, "c", "g", 35);
        ledger.casts("a", [cast(0, 5, 20), cast(1, 20, 30), cast(2, 40, 50), cast(3, 60, 70)]);
        ledger.left(1, 65);
        ledger.reported(&report(&[(1, 1, 25), (1, 1, 26), (2, 3, 90)]));
        let account = ledger.account();
        // 1 and 2 are due to member 1 (not 0, before its join, nor 3, during its leave); 2 and 3 to member 2
        assert_eq!((account.expected, account.delivered, account.missed, account.duplicated), (4, 2, 2, 1));
        assert_eq!((account.trouble.len(), account.latest), (3, 30));
    }

    #[test]
    fn the_oracle_excuses_only_while_two_nodes_were_apart() {
        let mut ledger = Ledger::default();
        ledger.joined(1, "b", "g", 0);
        ledger.casts("a", [cast(0, 10, 20), cast(1, 30, 40), cast(2, 50, 60)]);
        ledger.lost("b", 25, 35);
        let account = ledger.account();
        assert_eq!((account.expected, account.missed), (2, 2));
        ledger.lost("a", 15, 55);
        assert_eq!(ledger.account().expected, 0);
    }
}
