//! What a shard of a `strong` cache has beside its copies: its part in the consensus, and the leases.

use std::collections::BTreeSet;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::copies::Replica;
use super::{CacheMessage, CacheNode};
use crate::cache::consensus::{
    Change, Consensus, ConsensusEffect, ConsensusMessage, CopyMessage, Leases, Member,
};
use crate::cache::partition::PartitionId;
#[cfg(feature = "testing")]
use crate::cache::replica::Rules;
use crate::cache::replica::{Config, Mutation};
use crate::transport::Lane;
use crate::types::Peer;

/// What the shards of a `strong` cache say to one another.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum StrongMessage {
    /// About who decides, and what is decided.
    Consensus(ConsensusMessage),
    /// The sender is a primary and asks for a lease.
    Ask {
        /// When, by its clock, in microseconds.
        asked: u64,
    },
    /// The sender grants it.
    Grant {
        /// When it was asked for.
        asked: u64,
        /// How much of the consensus the sender has heard.
        heard: u64,
    },
    /// Between the copies of a partition.
    Copy {
        /// Which.
        partition: PartitionId,
        /// What.
        message: CopyMessage,
    },
}

/// See the [module](self).
#[derive(Debug)]
pub(super) struct Strong {
    consensus: Consensus,
    leases: Leases,
    /// Something has come in that may have changed whether the group is whole.
    touched: bool,
    /// Whether it was when that was last looked at.
    whole: bool,
}

impl Strong {
    pub(super) fn new(me: Member, expected: usize, replicas: usize, seed: u64, now: Duration) -> Self {
        let consensus = Consensus::new(me, expected, replicas, seed, now);
        Self { consensus, leases: Leases::default(), touched: false, whole: false }
    }

    #[cfg(feature = "testing")]
    pub(super) fn set_rules(&mut self, rules: Rules) {
        self.consensus.set_rules(rules);
    }

    pub(super) fn consensus(&self) -> &Consensus {
        &self.consensus
    }

    pub(super) fn leases(&self) -> &Leases {
        &self.leases
    }

    pub(super) fn len(&self) -> usize {
        self.consensus.footprint() + self.leases.len()
    }
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

impl CacheNode {
    pub(super) fn tell_consensus_members(&mut self, now: Duration) {
        let Some(strong) = &mut self.strong else { return };
        let opening = |peer: &Peer| match *peer == self.me {
            true => Some(self.peers.own_life()),
            false => self.peers.life_of(peer),
        };
        let member = |peer: &Peer| Some(Member { peer: peer.clone(), opening: opening(peer)? });
        let members: BTreeSet<Member> = self.peers.participants().filter_map(member).collect();
        strong.touched = true;
        strong.consensus.handle_members(&members, self.peers.is_complete(), now);
    }

    pub(super) fn strong_peer_up(&mut self, peer: &Peer, now: Duration) {
        if let Some(strong) = &mut self.strong {
            strong.touched = true;
            strong.consensus.handle_peer_up(peer, now);
            strong.leases.hurry(now);
        }
    }

    pub(super) fn strong_peer_down(&mut self, peer: &Peer, now: Duration) {
        if let Some(strong) = &mut self.strong {
            strong.touched = true;
            strong.consensus.handle_peer_down(peer, now);
        }
    }

    pub(super) fn handle_strong(&mut self, from: &Peer, message: StrongMessage, now: Duration) {
        let Some(strong) = &mut self.strong else { return };
        match message {
            StrongMessage::Consensus(message) => {
                strong.touched = true;
                strong.consensus.handle_message(from, message, now);
            }
            StrongMessage::Ask { asked } => self.handle_ask(from, asked, now),
            StrongMessage::Grant { asked, heard } => {
                let heard = if self.rules.breaks(Mutation::LeaseUnheard) { 0 } else { heard };
                strong.leases.granted(from, Duration::from_micros(asked), heard, now);
                self.ready.extend(self.pending.waiting());
            }
            StrongMessage::Copy { partition, message } => {
                if let Some(place) = self.place(partition) {
                    self.with(place, now, |copy, given| {
                        copy.handle_message(from, super::copies::Said::Strong(message), given)
                    });
                }
            }
        }
    }

    /// Grants a lease, unless this node has made, or has asked the group to make, something against it.
    fn handle_ask(&mut self, from: &Peer, asked: u64, now: Duration) {
        let Some(strong) = &mut self.strong else { return };
        let against = |change: &Change| {
            let primary = change.expect.as_ref().map(|epoch| &epoch.primary);
            change.config.epoch.primary == self.me && primary == Some(from)
        };
        if !self.members.live.contains(from) || strong.consensus.wishes().any(against) {
            return;
        }
        strong.leases.grant(from, now);
        let heard = strong.consensus.heard();
        self.send_strong(from.clone(), Lane::Control, StrongMessage::Grant { asked, heard });
    }

    pub(super) fn send_strong(&mut self, to: Peer, lane: Lane, message: StrongMessage) {
        if let Some(session) = self.peers.session(&to).filter(|_| self.peers.is_up(&to)) {
            self.send(to, lane, CacheMessage::Strong { session, message });
        }
    }

    pub(super) fn strong_timeout(&mut self, now: Duration) {
        let Some(strong) = &mut self.strong else { return };
        if strong.consensus.poll_timeout().is_some_and(|at| at <= now) {
            strong.touched = true;
            strong.consensus.handle_timeout(now);
        }
        if strong.leases.next_ask().is_some_and(|at| at <= now) {
            self.ask_for_leases(now);
        }
    }

    /// Asks everybody who owns what this node serves.
    fn ask_for_leases(&mut self, now: Duration) {
        let leads = |copy: &&Replica| copy.config().is_some_and(|config| config.epoch.primary == self.me);
        let owners =
            self.replicas.iter().filter(leads).filter_map(Replica::config).flat_map(|c: &Config| &c.owners);
        let wished = self
            .strong
            .iter()
            .flat_map(|strong| strong.consensus.wishes())
            .flat_map(|wish| &wish.config.owners);
        let asked: BTreeSet<Peer> =
            owners.chain(wished).filter(|owner| **owner != self.me).cloned().collect();
        let Some(strong) = &mut self.strong else { return };
        strong.leases.clean(now);
        strong.leases.asked(now);
        for owner in asked {
            self.send_strong(owner, Lane::Control, StrongMessage::Ask { asked: micros(now) });
        }
    }

    pub(super) fn propose(&mut self, change: Change, now: Duration) {
        if let Some(strong) = &mut self.strong {
            strong.consensus.propose(change, now);
            strong.leases.hurry(now);
        }
    }

    pub(super) fn withdraw(&mut self, change: &Change) {
        if let Some(strong) = &mut self.strong {
            strong.consensus.withdraw(change);
        }
    }

    /// Carries out one thing that the consensus wants; whether there was one.
    pub(super) fn follow_consensus(&mut self, now: Duration) -> bool {
        let Some(strong) = &mut self.strong else { return false };
        let Some(effect) = strong.consensus.poll_effect() else {
            // readiness depends on it, and nothing else may say that it has changed
            if std::mem::take(&mut strong.touched) {
                let whole = strong.consensus.is_whole();
                self.changed |= std::mem::replace(&mut strong.whole, whole) != whole;
            }
            return false;
        };
        match effect {
            ConsensusEffect::Send { to, message } => {
                self.send_strong(to, Lane::Control, StrongMessage::Consensus(message));
            }
            ConsensusEffect::Decided(partition) => {
                if let Some(place) = self.place(partition) {
                    self.with(place, now, |copy, given| copy.handle_decided(given));
                }
                if let Some(strong) = &mut self.strong {
                    strong.leases.hurry(now);
                }
            }
        }
        true
    }

    pub(super) fn strong_wake(&self) -> Option<Duration> {
        let strong = self.strong.as_ref()?;
        strong.consensus.poll_timeout().into_iter().chain(strong.leases.next_ask()).min()
    }
}
