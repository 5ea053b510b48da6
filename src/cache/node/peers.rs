//! Who takes part: what each peer has said about this cache, and whether it has heard us.
//!
//! ```text
//!            link up, or we open          its Hello, terms agree              Hello{heard}, or any message
//!  Unknown ─────────────────────▶ asked ──────────────────────────▶ takes part ───────────────────────────▶ up
//!                                   │ NotOpen, Bye                     │ Bye, NotOpen                       │ link down
//!                                   ▼                                  ▼                                    ▼
//!                                 no part ◀─────────────────────────── ┘          takes part, until the view drops it
//! ```
//! Nothing but Hello is sent to a peer before it has heard ours: lanes overtake one another, and what arrives before the
//! Hello would be lost on a link that is taken to lose nothing. Each opening of a cache has a number, its *life*: two
//! lives of a cache in one life of a node are told apart by it, and what was said to the former one is not heard.

use std::collections::{BTreeMap, BTreeSet};

use crate::cache::config::{CacheConfig, CacheTerms};
use crate::cache::error::CacheError;
use crate::types::Peer;

use super::message::CacheMessage;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Said {
    #[default]
    Nothing,
    Open {
        life: u32,
        draining: bool,
    },
    NotOpen,
    Differs {
        life: u32,
    },
}

impl Said {
    fn life(self) -> Option<u32> {
        match self {
            Said::Open { life, .. } | Said::Differs { life } => Some(life),
            Said::Nothing | Said::NotOpen => None,
        }
    }
}

#[derive(Clone, Debug, Default)]
struct Known {
    link: bool,
    said: Said,
    /// It has our Hello of this link.
    heard_us: bool,
    /// We have told it that we have its Hello.
    told: bool,
}

impl Known {
    fn is_up(&self) -> bool {
        self.link && self.heard_us && matches!(self.said, Said::Open { .. })
    }
}

/// What a peer's words changed.
#[derive(Debug, Default)]
pub(super) struct Consequences {
    /// To be said to it.
    pub(super) reply: Option<CacheMessage>,
    /// It was up and is not, or not with that life of its cache.
    pub(super) down: bool,
    /// It can be talked to from now on.
    pub(super) up: bool,
    /// Who takes part, or who drains, is not what it was.
    pub(super) changed: bool,
    /// It has other options than we.
    pub(super) mismatch: Option<CacheError>,
}

/// See the [module](self).
#[derive(Debug)]
pub(super) struct Peers {
    me: Peer,
    life: u32,
    shards: u32,
    draining: bool,
    settled: bool,
    view: BTreeSet<Peer>,
    known: BTreeMap<Peer, Known>,
}

// Getters.
impl Peers {
    pub(super) fn new(me: Peer, shards: u32, life: u32) -> Self {
        let (view, known) = (BTreeSet::new(), BTreeMap::new());
        Self { me, life, shards, draining: false, settled: false, view, known }
    }

    /// Whether messages to it arrive.
    pub(super) fn is_up(&self, peer: &Peer) -> bool {
        self.known.get(peer).is_some_and(Known::is_up)
    }

    /// Whether what it has asked can be answered: it has the cache open, and asks only those whom it has heard.
    pub(super) fn can_answer(&self, peer: &Peer) -> bool {
        self.known.get(peer).is_some_and(|known| known.link && matches!(known.said, Said::Open { .. }))
    }

    pub(super) fn up(&self) -> impl Iterator<Item = &Peer> {
        self.known.iter().filter(|(_, known)| known.is_up()).map(|(peer, _)| peer)
    }

    /// Who keeps and serves partitions: the members of the view that have the cache open, this node among them.
    pub(super) fn participants(&self) -> impl Iterator<Item = &Peer> {
        self.view.iter().filter(|peer| self.takes_part(peer))
    }

    pub(super) fn takes_part(&self, peer: &Peer) -> bool {
        self.view.contains(peer) && (*peer == self.me || self.life_of(peer).is_some())
    }

    pub(super) fn is_draining(&self, peer: &Peer) -> bool {
        if *peer == self.me {
            return self.draining;
        }
        matches!(self.known.get(peer).map(|known| known.said), Some(Said::Open { draining: true, .. }))
    }

    /// Which opening of the cache this one is.
    #[cfg(feature = "consensus")]
    pub(super) fn own_life(&self) -> u32 {
        self.life
    }

    /// Which opening of its cache we have to do with, if it is open.
    pub(super) fn life_of(&self, peer: &Peer) -> Option<u32> {
        match self.known.get(peer)?.said {
            Said::Open { life, .. } => Some(life),
            Said::Nothing | Said::NotOpen | Said::Differs { .. } => None,
        }
    }

    /// The members of the view that have not said whether they take part.
    pub(super) fn unknown(&self) -> impl Iterator<Item = &Peer> {
        self.view.iter().filter(|peer| {
            **peer != self.me && self.known.get(*peer).is_none_or(|known| known.said == Said::Nothing)
        })
    }

    /// The members of the view that have it open with other options.
    pub(super) fn differing(&self) -> impl Iterator<Item = &Peer> {
        let differs = |peer: &&Peer| {
            self.known.get(*peer).is_some_and(|known| matches!(known.said, Said::Differs { .. }))
        };
        self.view.iter().filter(differs)
    }

    /// Whether nobody of the view is unknown, the scope has found out who is there, and all who can be reached and take
    /// part, or have not said so yet, are in the view. Without the last a node could begin what one of those, who has it
    /// in its own view already, has just begun.
    pub(super) fn is_complete(&self) -> bool {
        let joins = |(peer, known): (&Peer, &Known)| {
            known.link && matches!(known.said, Said::Open { .. } | Said::Nothing) && !self.view.contains(peer)
        };
        self.settled && self.unknown().next().is_none() && !self.known.iter().any(joins)
    }

    /// What both lives that talk have in common: equal on both sides, and another with a later life of either.
    pub(super) fn session(&self, peer: &Peer) -> Option<u32> {
        self.life_of(peer).map(|theirs| self.life.wrapping_add(theirs))
    }

    pub(super) fn len(&self) -> usize {
        self.known.len() + self.view.len()
    }
}

// Inputs.
impl Peers {
    /// Whether who takes part may have changed.
    pub(super) fn handle_view(&mut self, members: &[Peer], settled: bool) -> bool {
        let view: BTreeSet<Peer> = members.iter().cloned().collect();
        if view == self.view && settled == self.settled {
            return false;
        }
        (self.view, self.settled) = (view, settled);
        self.forget_strangers();
        true
    }

    fn forget_strangers(&mut self) {
        let view = &self.view;
        self.known.retain(|peer, known| known.link || view.contains(peer));
    }

    /// A link: the Hello to be said, if the link is a new one.
    pub(super) fn handle_up(&mut self, peer: &Peer, config: &CacheConfig) -> Option<CacheMessage> {
        let known = self.known.entry(peer.clone()).or_default();
        let new = !std::mem::replace(&mut known.link, true);
        new.then(|| self.hello(config.terms(), false))
    }

    /// Whether it was up. What it has said stays true until the view drops it: it may be back in a moment.
    pub(super) fn handle_down(&mut self, peer: &Peer) -> bool {
        let Some(known) = self.known.get_mut(peer) else { return false };
        let was_up = known.is_up();
        (known.link, known.heard_us, known.told) = (false, false, false);
        self.forget_strangers();
        was_up
    }

    fn hello(&self, terms: CacheTerms, heard: bool) -> CacheMessage {
        CacheMessage::Hello { terms, shards: self.shards, life: self.life, draining: self.draining, heard }
    }

    pub(super) fn handle_hello(&mut self, from: &Peer, hello: Hello, config: &CacheConfig) -> Consequences {
        let mut outcome = Consequences::default();
        let disagreement = self.disagreement(from, &hello, config);
        let reply = self.hello(config.terms(), true);
        let Some(known) = self.known.get_mut(from) else { return outcome };
        let (was_up, before) = (known.is_up(), known.said);
        known.said = match &disagreement {
            Some(_) => Said::Differs { life: hello.life },
            None => Said::Open { life: hello.life, draining: hello.draining },
        };
        let reborn = before.life() != Some(hello.life);
        if reborn {
            outcome.mismatch = disagreement;
        }
        if reborn {
            known.told = false;
        }
        known.heard_us = hello.heard || (known.heard_us && !reborn);
        if !hello.heard || !known.told {
            known.told = true;
            outcome.reply = Some(reply);
        }
        outcome.down = was_up && (reborn || !known.is_up());
        outcome.up = known.is_up() && (!was_up || outcome.down);
        outcome.changed = before != known.said;
        outcome
    }

    fn disagreement(&self, from: &Peer, hello: &Hello, config: &CacheConfig) -> Option<CacheError> {
        if hello.shards != self.shards {
            return Some(CacheError::ConfigMismatch {
                name: config.name.clone(),
                option: "shards (of the release)".into(),
                here: self.shards.to_string(),
                there: hello.shards.to_string(),
                peer: from.clone(),
            });
        }
        config.agrees_with(&hello.terms, from).err()
    }

    /// It has no such cache open, or none any more.
    pub(super) fn handle_not_open(&mut self, from: &Peer) -> Consequences {
        let Some(known) = self.known.get_mut(from) else { return Consequences::default() };
        let (down, changed) = (known.is_up(), known.said != Said::NotOpen);
        known.said = Said::NotOpen;
        (known.heard_us, known.told) = (false, false);
        Consequences { down, changed, ..Consequences::default() }
    }

    /// It has named a session that only who has our Hello can know. Whether that makes it up.
    pub(super) fn handle_session(&mut self, from: &Peer) -> bool {
        let Some(known) = self.known.get_mut(from) else { return false };
        let was_up = known.is_up();
        known.heard_us = true;
        known.is_up() && !was_up
    }
}

// Commands.
impl Peers {
    /// This node hands over from now on: what to tell everybody who knows us.
    pub(super) fn drain(&mut self, config: &CacheConfig) -> Vec<(Peer, CacheMessage)> {
        self.draining = true;
        let hello = self.hello(config.terms(), true);
        let told = self.known.iter().filter(|(_, known)| known.link && known.told);
        told.map(|(peer, _)| (peer.clone(), hello.clone())).collect()
    }

    /// Everybody whom a Bye reaches.
    pub(super) fn linked(&self) -> impl Iterator<Item = &Peer> {
        self.known.iter().filter(|(_, known)| known.link).map(|(peer, _)| peer)
    }
}

/// The fields of [`CacheMessage::Hello`].
pub(super) struct Hello {
    pub(super) terms: CacheTerms,
    pub(super) shards: u32,
    pub(super) life: u32,
    pub(super) draining: bool,
    pub(super) heard: bool,
}
