//! A read by quorum: a majority of the owners of the newest epoch that any of them knows has to answer from an active
//! copy that follows that epoch, and the copy that is furthest is right. Copies follow one stream, so the furthest holds whatever the others
//! hold; what is absent in it has been deleted or never was. A write that was acknowledged by a majority is in at least
//! one of any majority.

use std::collections::{BTreeMap, BTreeSet};

use crate::cache::error::CacheError;
use crate::cache::operation::Reply;
use crate::cache::version::{Epoch, Version};
use crate::types::Peer;

/// What one owner has said.
#[derive(Clone, Debug)]
pub(super) struct Copy {
    pub(super) epoch: Option<Epoch>,
    pub(super) owners: Vec<Peer>,
    pub(super) covers: Option<bool>,
    /// How far it is.
    pub(super) end: Option<Version>,
    pub(super) result: Result<Reply, CacheError>,
}

impl Copy {
    /// Whether it is an active copy's word: an answer, or that what it holds does not go with the question.
    fn counts(&self) -> bool {
        let refusal = |error: &CacheError| {
            matches!(error, CacheError::Pattern(_) | CacheError::Term(_) | CacheError::TooLarge { .. })
        };
        self.result.as_ref().err().is_none_or(refusal)
    }
}

/// Where a read by quorum stands.
#[derive(Debug)]
pub(super) enum Verdict {
    /// It is decided.
    Decided {
        /// The answer.
        reply: Reply,
        /// Whether it knows of the write that was asked for, as [`Copy::covers`].
        covers: Option<bool>,
        /// The owners that were behind it.
        behind: Vec<Peer>,
        /// Who can bring them forward.
        primary: Peer,
    },
    /// What the furthest copy holds does not go with the question.
    Refused(CacheError),
    /// More have to answer.
    Open {
        /// Those who have not been asked.
        ask: Vec<Peer>,
        /// How many active owners have answered.
        got: usize,
        /// How many have to.
        need: usize,
        /// Whether someone who was asked has yet to answer.
        waiting: bool,
    },
}

/// One read; see the [module](self).
#[derive(Debug, Default)]
pub(super) struct Quorum {
    asked: BTreeSet<Peer>,
    heard: BTreeMap<Peer, Copy>,
    config: Option<(Epoch, Vec<Peer>)>,
    /// One answer is enough: a broken rule.
    pub(super) hasty: bool,
}

impl Quorum {
    /// What is known of who keeps the partition.
    pub(super) fn learn(&mut self, epoch: &Epoch, owners: &[Peer]) {
        if !owners.is_empty() && self.config.as_ref().is_none_or(|(known, _)| known < epoch) {
            self.config = Some((epoch.clone(), owners.to_vec()));
        }
    }

    pub(super) fn ask(&mut self, owner: &Peer) {
        self.asked.insert(owner.clone());
    }

    pub(super) fn asked(&self) -> impl Iterator<Item = &Peer> {
        self.asked.iter()
    }

    /// Whether the answer is taken.
    pub(super) fn hear(&mut self, owner: &Peer, copy: Copy) -> bool {
        if !self.asked.contains(owner) || self.heard.contains_key(owner) {
            return false;
        }
        if let Some(epoch) = &copy.epoch {
            self.learn(epoch, &copy.owners);
        }
        self.heard.insert(owner.clone(), copy);
        true
    }

    /// It will not answer.
    pub(super) fn lose(&mut self, owner: &Peer) -> bool {
        self.asked.remove(owner) && !self.heard.contains_key(owner)
    }

    pub(super) fn verdict(&self) -> Verdict {
        let Some((epoch, owners)) = &self.config else {
            return Verdict::Open { ask: Vec::new(), got: 0, need: 1, waiting: false };
        };
        let need = if self.hasty { 1 } else { owners.len() / 2 + 1 };
        let heard: Vec<(&Peer, &Copy)> =
            owners.iter().filter_map(|owner| Some((owner, self.heard.get(owner)?))).collect();
        // a copy that does not follow this epoch yet may hold what is lost in it; one that refuses the question for what
        // it holds is a word like any other, and one that is behind may refuse what the furthest one answers
        let good: Vec<(&Peer, &Copy)> = heard
            .iter()
            .copied()
            .filter(|(_, copy)| copy.epoch.as_ref() == Some(epoch) && copy.counts())
            .collect();
        let furthest = good.iter().max_by(|(_, a), (_, b)| a.end.cmp(&b.end));
        match furthest {
            Some((_, copy)) if good.len() >= need => match &copy.result {
                Err(error) => Verdict::Refused(error.clone()),
                Ok(reply) => {
                    let behind = good.iter().filter(|(_, other)| other.end < copy.end);
                    Verdict::Decided {
                        reply: reply.clone(),
                        covers: copy.covers,
                        behind: behind.map(|(owner, _)| (*owner).clone()).collect(),
                        primary: epoch.primary.clone(),
                    }
                }
            },
            _ => Verdict::Open {
                ask: owners.iter().filter(|owner| !self.asked.contains(*owner)).cloned().collect(),
                got: good.len(),
                need,
                waiting: self.asked.iter().any(|owner| !self.heard.contains_key(owner)),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::PatternError;
    use crate::cache::operation::Outcome;
    use crate::types::{Incarnation, NodeId};

    fn peer(name: &str) -> Peer {
        Peer::new(NodeId::new(name).unwrap(), Incarnation::MIN)
    }

    fn epoch(counter: u64) -> Epoch {
        Epoch::new(counter, peer("a"))
    }

    fn said(counter: u64, seq: u64, owners: &[&str]) -> Copy {
        let epoch = epoch(counter);
        let version = Some(Version::new(epoch.clone(), seq));
        Copy {
            epoch: Some(epoch),
            owners: owners.iter().map(|name| peer(name)).collect(),
            covers: Some(true),
            end: version.clone(),
            result: Ok(Reply { outcome: Outcome::Removed(seq), version }),
        }
    }

    fn asking(owners: &[&str]) -> Quorum {
        let mut quorum = Quorum::default();
        quorum.learn(&epoch(1), &owners.iter().map(|name| peer(name)).collect::<Vec<_>>());
        owners.iter().for_each(|name| quorum.ask(&peer(name)));
        quorum
    }

    fn seq(verdict: &Verdict) -> Option<u64> {
        match verdict {
            Verdict::Decided { reply, .. } => reply.version.as_ref().map(|version| version.seq),
            Verdict::Refused(_) | Verdict::Open { .. } => None,
        }
    }

    // caught by: one answer is enough; the first answer wins
    #[test]
    fn one_stale_answer_is_no_quorum_and_the_furthest_copy_wins() {
        let mut quorum = asking(&["a", "b", "c"]);
        assert!(quorum.hear(&peer("b"), said(1, 3, &["a", "b", "c"])));
        assert!(!quorum.hear(&peer("b"), said(1, 9, &["a", "b", "c"])), "each is heard once");
        assert!(matches!(quorum.verdict(), Verdict::Open { got: 1, need: 2, waiting: true, .. }));
        assert!(quorum.hear(&peer("c"), said(1, 5, &["a", "b", "c"])));
        let verdict = quorum.verdict();
        assert_eq!(seq(&verdict), Some(5));
        let Verdict::Decided { behind, .. } = verdict else { panic!("{verdict:?}") };
        assert_eq!(behind, [peer("b")]);
    }

    // caught by: a majority of the owners that the caller knew, not of the newest ones
    #[test]
    fn the_owners_of_the_newest_epoch_decide() {
        let mut quorum = asking(&["a", "b"]);
        quorum.hear(&peer("a"), said(1, 9, &["a", "b"]));
        quorum.hear(&peer("b"), said(2, 4, &["b", "c", "d"]));
        let Verdict::Open { ask, got: 1, need: 2, .. } = quorum.verdict() else {
            panic!("{:?}", quorum.verdict())
        };
        assert_eq!(ask, [peer("c"), peer("d")]);
        ["c", "d"].iter().for_each(|name| quorum.ask(&peer(name)));
        // c has not heard of the epoch: what it holds may be lost in it
        quorum.hear(&peer("c"), said(1, 9, &["a", "b"]));
        assert!(matches!(quorum.verdict(), Verdict::Open { got: 1, need: 2, .. }));
        quorum.hear(&peer("d"), said(2, 5, &["b", "c", "d"]));
        assert_eq!(seq(&quorum.verdict()), Some(5), "9 of epoch 1 is not of it");
    }

    // caught by: a refusal of any copy ends the read
    #[test]
    fn a_copy_that_is_behind_cannot_refuse_for_the_others() {
        let refusal = CacheError::Pattern(PatternError::Arity { given: 2, held: vec![3] });
        let mut quorum = asking(&["a", "b", "c"]);
        let refused = Copy { result: Err(refusal.clone()), ..said(1, 3, &["a", "b", "c"]) };
        quorum.hear(&peer("c"), refused.clone());
        assert!(matches!(quorum.verdict(), Verdict::Open { got: 1, need: 2, .. }), "it is one word of two");
        quorum.hear(&peer("b"), said(1, 4, &["a", "b", "c"]));
        assert_eq!(seq(&quorum.verdict()), Some(4));
        // the furthest one knows
        let mut quorum = asking(&["a", "b", "c"]);
        quorum.hear(&peer("a"), said(1, 2, &["a", "b", "c"]));
        quorum.hear(&peer("c"), refused);
        assert!(matches!(quorum.verdict(), Verdict::Refused(error) if error == refusal));
    }

    #[test]
    fn copies_that_are_not_active_do_not_count() {
        let mut quorum = asking(&["a", "b", "c"]);
        let syncing = Copy { result: Err(CacheError::Busy), ..said(1, 0, &["a", "b", "c"]) };
        quorum.hear(&peer("a"), syncing);
        quorum.hear(&peer("b"), said(1, 3, &["a", "b", "c"]));
        assert!(quorum.lose(&peer("c")), "it was waited for");
        assert!(!quorum.hear(&peer("c"), said(1, 4, &["a", "b", "c"])), "it was given up");
        let Verdict::Open { ask, waiting: false, .. } = quorum.verdict() else {
            panic!("{:?}", quorum.verdict())
        };
        assert_eq!(ask, [peer("c")]);
    }
}
