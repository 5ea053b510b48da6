//! An owner that is not the primary, a learner, and a node that keeps a copy which nobody may need any more.
//!
//! * **A config is accepted only from its own primary, and only if nothing above its authority was promised.** What a
//!   candidate was promised is thereby true: no older primary gets another acknowledgement from here.
//! * **Writes are applied in order, each once.** What does not follow the last one is not kept for later: the primary is
//!   told the position, and goes on from there.
//! * **A copy is never dropped because it seems outdated.** The primary decides: it has what the copy alone holds
//!   offered first (see [`merge`](super::merge)), and lets it go when all wanted owners are active.

use std::sync::Arc;
use std::time::Duration;

use super::effect::Coverage;
use super::history::contains;
use super::log::Log;
use super::message::{Config, ReplicaMessage, next_counter};
use super::snapshot::Incoming;
use super::{Context, Mutation, Replica, Role};
use crate::cache::store::{SnapshotHeader, Step, Store, Write};
use crate::cache::version::{Epoch, Lineage, Version};
use crate::transport::Lane;
use crate::types::Peer;

/// What a node knows that follows a primary.
#[derive(Debug)]
pub(super) struct Following {
    pub(super) epoch: Epoch,
    /// The number of the stream, as its primary gave it.
    pub(super) stream: u64,
    /// The epochs of the primary's copy.
    pub(super) lineage: Lineage,
    pub(super) incoming: Option<Incoming>,
    /// All owners have all up to here, and when to look next what of it may be forgotten.
    pub(super) all_have: Option<Version>,
    pub(super) purge_at: Option<Duration>,
    /// The primary was told the position, and what does not fit is ignored until it goes on from there.
    pub(super) asked: bool,
}

/// The beginning of a stream, as it arrives.
pub(super) struct Beginning {
    pub(super) config: Config,
    pub(super) lineage: Lineage,
    pub(super) since: Epoch,
    pub(super) effective: bool,
    pub(super) goes_on: bool,
    pub(super) stream: u64,
}

impl Beginning {
    fn is_sound(&self, from: &Peer) -> bool {
        let Self { config, lineage, since, .. } = self;
        config.is_sound()
            && config.epoch.primary == *from
            && *since <= config.epoch
            && lineage.is_sound()
            && lineage.epoch() == Some(&config.epoch)
            && lineage.base() == config.base.as_ref()
    }
}

impl Replica {
    pub(super) fn on_new_config(&mut self, from: &Peer, beginning: Beginning, ctx: Context<'_>) {
        if !beginning.is_sound(from) {
            return;
        }
        let epoch = beginning.config.epoch.clone();
        self.seen = self.seen.max(epoch.counter);
        let promised = self.promised.as_ref();
        let allowed = promised == Some(&epoch) || promised <= Some(&beginning.since);
        if !allowed && !ctx.rules.breaks(Mutation::NoEpochCheck) {
            return self.reject(from, epoch);
        }
        self.step_down(ctx);
        self.promised = Some(epoch.clone());
        self.inquiry = None;
        self.nominated = None;
        self.handed = None;
        self.offer = None;
        self.take_birth(&beginning, ctx);
        let (goes_on, stream) = (beginning.goes_on, beginning.stream);
        let lineage = beginning.lineage;
        self.learn(beginning.config, beginning.effective);
        self.changed = true;
        match &mut self.role {
            Role::Following(following)
                if goes_on && following.epoch == beginning.since && following.stream == stream =>
            {
                following.epoch = epoch;
                following.lineage = lineage;
                // what was sent before may have been refused: then the next write does not fit, and the primary hears
                following.asked = false;
                self.acknowledge(from);
            }
            Role::Idle | Role::Following(_) | Role::Leading(_) => {
                let following = Following {
                    epoch,
                    stream,
                    lineage,
                    incoming: None,
                    all_have: None,
                    purge_at: None,
                    asked: true,
                };
                self.role = Role::Following(Box::new(following));
                self.tell_position(from);
            }
        }
    }

    /// The owners of a partition that is born have all of it: nothing.
    fn take_birth(&mut self, beginning: &Beginning, ctx: Context<'_>) {
        let config = &beginning.config;
        let born = config.base.is_none() && beginning.lineage.entries().len() == 1;
        if born && !self.whole && config.owners.contains(ctx.me) {
            self.drop_copy(ctx);
            self.whole = true;
        }
    }

    pub(super) fn reject(&mut self, to: &Peer, epoch: Epoch) {
        let Some(promised) = self.promised.clone() else { return };
        let (config, effective) = self.known_config();
        self.send(to, Lane::Control, ReplicaMessage::Reject { epoch, promised, config, effective });
    }

    fn header(&self) -> SnapshotHeader {
        self.store.snapshot_header()
    }

    /// Tells the primary where this copy is.
    pub(super) fn tell_position(&mut self, to: &Peer) {
        let Some(epoch) = self.config().map(|config| config.epoch.clone()) else { return };
        let stream = match &self.role {
            Role::Following(following) if following.epoch == epoch => Some(following.stream),
            Role::Following(_) | Role::Idle | Role::Leading(_) => None,
        };
        let (header, whole) = (self.header(), self.whole);
        let (follows, stream) = (stream.is_some(), stream.unwrap_or(0));
        self.send(to, Lane::Control, ReplicaMessage::Position { epoch, header, whole, follows, stream });
    }

    pub(super) fn acknowledge(&mut self, to: &Peer) {
        let Role::Following(following) = &self.role else { return };
        let epoch = following.epoch.clone();
        let (end, whole) = match &following.incoming {
            Some(incoming) => (incoming.store.applied(), false),
            None => (self.store.applied(), self.whole),
        };
        let end = end.cloned();
        self.send(to, Lane::Control, ReplicaMessage::Ack { epoch, end, whole });
    }

    /// Whether this node follows a primary.
    pub(super) fn follows(&self, primary: &Peer) -> bool {
        match &self.role {
            Role::Following(following) => following.epoch.primary == *primary,
            Role::Idle | Role::Leading(_) => false,
        }
    }

    /// Whether something of this epoch is to be taken from this peer.
    pub(super) fn accepts_from(&mut self, from: &Peer, epoch: &Epoch, ctx: Context<'_>) -> bool {
        let follows = match &self.role {
            Role::Following(following) => following.epoch == *epoch && following.epoch.primary == *from,
            Role::Idle | Role::Leading(_) => false,
        };
        if self.promised.as_ref() > Some(epoch) && !(follows && ctx.rules.breaks(Mutation::NoEpochCheck)) {
            self.reject(from, epoch.clone());
            return false;
        }
        if !follows && epoch.primary == *from && self.config().is_some_and(|config| config.epoch == *epoch) {
            // the stream was given up here
            self.tell_position(from);
        }
        follows
    }

    pub(super) fn on_append(
        &mut self,
        from: &Peer,
        epoch: &Epoch,
        prev: Option<&Version>,
        entries: Vec<(Version, Arc<Write>)>,
        all_have: Option<Version>,
        ctx: Context<'_>,
    ) {
        if !self.accepts_from(from, epoch, ctx) {
            return;
        }
        let Role::Following(following) = &mut self.role else { return };
        if following.incoming.is_none() && !self.whole {
            if prev.is_some() {
                return self.ask_again(from);
            }
            // from the very beginning: an empty copy is whole
            self.store = Store::new(ctx.config);
            self.log = Log::default();
            self.whole = true;
            self.changed = true;
        }
        let Role::Following(following) = &mut self.role else { return };
        let own = following.incoming.is_none();
        let store = match &mut following.incoming {
            Some(incoming) => &mut incoming.store,
            None => &mut self.store,
        };
        if store.applied() != prev {
            if ctx.rules.breaks(Mutation::OutOfOrder) {
                jump(store, prev, &following.lineage, ctx);
                self.log = Log::from(store.applied().cloned());
            } else {
                return self.ask_again(from);
            }
        }
        following.asked = false;
        for (version, write) in entries {
            match follow(store, &following.lineage, &version, &write, ctx) {
                Some(Step::Applied { .. }) if own => self.log.push(version, write, ctx.config.max_log_bytes),
                Some(_) => {}
                None => return self.ask_again(from),
            }
        }
        if all_have.is_some() {
            following.all_have = all_have.clone();
        }
        if let Some(all_have) = all_have.filter(|_| own) {
            self.purge_through(&all_have, ctx);
        }
        self.finish_snapshot();
        self.acknowledge(from);
    }

    /// What came does not follow: the primary is told once where to go on.
    fn ask_again(&mut self, from: &Peer) {
        let Role::Following(following) = &mut self.role else { return };
        if !std::mem::replace(&mut following.asked, true) {
            following.incoming = None;
            self.tell_position(from);
        }
    }

    // ---- nodes that are told

    /// A primary in force tells who keeps the partition.
    pub(super) fn on_announce(&mut self, from: &Peer, config: Config, settled: bool, ctx: Context<'_>) {
        if !config.is_sound() || config.epoch.primary != *from {
            return;
        }
        if self.config().is_some_and(|known| known.epoch > config.epoch) {
            return self.correct(from, config.epoch, ctx);
        }
        let same_primary = self.follows(from);
        self.hear(Some(config.clone()), true, ctx);
        if let Role::Leading(_) = self.role {
            return;
        }
        // also who follows a stream that ended before anything came of it
        let holds = self.whole || matches!(&self.role, Role::Following(_));
        let offering = self.offer.as_ref().is_some_and(|offer| offer.epoch == config.epoch);
        if holds && !config.owners.contains(ctx.me) && (settled || !same_primary) && !offering {
            self.tell_position(from);
        }
    }

    /// Somebody believes to be primary, and is not any more.
    fn correct(&mut self, from: &Peer, epoch: Epoch, ctx: Context<'_>) {
        match &mut self.role {
            Role::Leading(leading) if leading.effective && ctx.members.reach(from) => {
                // told again with the others
                leading.announced.remove(from);
            }
            Role::Leading(_) | Role::Idle | Role::Following(_) => self.reject(from, epoch),
        }
    }

    /// The copy is of no use any more.
    pub(super) fn on_release(&mut self, from: &Peer, epoch: &Epoch, ctx: Context<'_>) {
        let Some(config) = self.config() else { return };
        if config.epoch != *epoch || epoch.primary != *from || config.owners.contains(ctx.me) {
            return;
        }
        if let Role::Leading(_) = self.role {
            return;
        }
        self.role = Role::Idle;
        self.offer = None;
        self.drop_copy(ctx);
    }

    /// The primary has given this node everything, and asks it to go on.
    pub(super) fn on_hand_over(&mut self, from: &Peer, ended: &Epoch, epoch: Epoch, ctx: Context<'_>) {
        let follows = matches!(&self.role, Role::Following(f) if f.epoch == *ended && f.incoming.is_none());
        let next = epoch.primary == *ctx.me && Some(epoch.counter) == next_counter(ended.counter);
        if !follows || !next || !self.whole || ended.primary != *from {
            return;
        }
        if self.promised.as_ref() != Some(ended) {
            return self.reject(from, ended.clone());
        }
        let Some(config) = self.config().filter(|config| config.epoch == *ended).cloned() else { return };
        self.seen = self.seen.max(epoch.counter);
        let others = config.owners.iter().filter(|owner| *owner != ctx.me).cloned();
        let owners = std::iter::once(ctx.me.clone()).chain(others).collect();
        self.begin(epoch, ended.clone(), owners, vec![config.owners]);
    }
}

/// Applies one write of the stream, and opens its epoch first if it is the first of it.
fn follow(
    store: &mut Store,
    lineage: &Lineage,
    version: &Version,
    write: &Write,
    ctx: Context<'_>,
) -> Option<Step> {
    if store.epoch() != Some(&version.epoch) {
        let (epoch, base) = lineage.entries().iter().find(|(epoch, _)| *epoch == version.epoch)?;
        store.open_epoch(epoch, base.as_ref()).ok()?;
    }
    store.apply(write, version, ctx.now).ok()
}

/// A break of the rules: goes on as if everything before had come.
fn jump(store: &mut Store, to: Option<&Version>, lineage: &Lineage, ctx: Context<'_>) {
    let mut header = store.snapshot_header();
    header.applied = to.cloned();
    if to.is_some_and(|to| contains(&header.lineage, Some(to), to) != Coverage::Yes) {
        header.lineage = lineage.clone();
    }
    let Ok(mut other) = Store::from_header(ctx.config, header) else { return };
    let _ = other.install(&store.chunk(None, usize::MAX).entries, ctx.now);
    *store = other;
}
