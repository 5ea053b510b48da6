//! As one who follows: an owner, or one who is being filled to become one.

use std::sync::Arc;

use super::data::Data;
use super::{CopyEffect, CopyMessage, Decided, StrongContext, StrongCopy};
use crate::cache::store::{Entry, SnapshotHeader, Write};
use crate::cache::version::Version;
use crate::transport::Lane;
use crate::types::Peer;

/// The stream that this copy follows.
#[derive(Debug)]
pub(super) struct Follow {
    pub(super) primary: Peer,
    stream: u64,
    /// Up to here the log is the primary's.
    verified: Option<u64>,
}

impl StrongCopy {
    pub(super) fn follows(&self, from: &Peer, stream: u64) -> bool {
        self.follow.as_ref().is_some_and(|follow| follow.primary == *from && follow.stream == stream)
    }

    fn reply(&mut self, to: &Peer, message: CopyMessage) {
        self.effects.push_back(CopyEffect::Send { to: to.clone(), lane: Lane::Control, message });
    }

    pub(super) fn handle_open(&mut self, from: &Peer, stream: u64, config: Decided, ctx: StrongContext<'_>) {
        // a primary that has gone on to its next config meanwhile goes on with this stream
        let old = self
            .config
            .as_ref()
            .is_some_and(|known| known.epoch.counter > config.epoch.counter && known.epoch.primary != *from);
        if old || config.epoch.primary != *from || *from == *ctx.base.me {
            // it will hear what is decided
            return;
        }
        // What a primary says comes in its order: what it opens when this copy has writes of a later epoch is left from
        // before another one took over, and would replace what that one's owners have.
        let newest = self.data.as_ref().filter(|data| data.whole).and_then(|data| data.newest());
        if newest.is_some_and(|newest| newest > config.epoch.counter) {
            return;
        }
        self.adopt(config, ctx);
        self.follow = Some(Follow { primary: from.clone(), stream, verified: None });
        let whole = self.data.as_ref().filter(|data| data.whole);
        let opened = CopyMessage::Opened {
            stream,
            whole: whole.is_some(),
            applied: whole.and_then(|data| data.store.applied().cloned()),
            tail: whole.map(|data| data.runs()).unwrap_or_default(),
        };
        self.reply(from, opened);
        self.review(ctx);
    }

    pub(super) fn handle_snapshot(
        &mut self,
        from: &Peer,
        stream: u64,
        header: SnapshotHeader,
        ctx: StrongContext<'_>,
    ) {
        if !self.follows(from, stream) {
            return;
        }
        let applied = header.applied.as_ref().map_or(0, |version| version.seq);
        let Ok(data) = Data::filling(ctx.base.config, header) else { return };
        self.data = Some(Box::new(data));
        self.data_born = self.config.as_ref().map_or(0, |config| config.born);
        if let Some(follow) = &mut self.follow {
            follow.verified = Some(applied);
        }
        self.tell_state(ctx);
    }

    pub(super) fn handle_piece(
        &mut self,
        from: &Peer,
        stream: u64,
        entries: &[Entry],
        last: bool,
        ctx: StrongContext<'_>,
    ) {
        if !self.follows(from, stream) {
            return;
        }
        let Some(data) = self.data.as_mut().filter(|data| !data.whole) else { return };
        if data.install(entries, ctx.base.config, ctx.base.now).is_err() {
            return;
        }
        data.whole = last;
        self.reply(from, CopyMessage::PieceIn { stream });
        self.tell_state(ctx);
    }

    pub(super) fn handle_append(
        &mut self,
        from: &Peer,
        stream: u64,
        after: u64,
        entries: Vec<(Version, Write)>,
        commit: u64,
        ctx: StrongContext<'_>,
    ) {
        if !self.follows(from, stream) {
            return;
        }
        let (Some(data), Some(follow)) = (self.data.as_mut(), self.follow.as_mut()) else { return };
        let first = follow.verified.is_none();
        // the primary has worked out that all up to here is equal, or has sent it
        let follows = match follow.verified {
            Some(verified) => verified == after,
            None => (data.applied()..=data.end()).contains(&after),
        };
        if !follows {
            return;
        }
        let new = !entries.is_empty();
        let mut verified = after;
        for (version, write) in entries {
            verified = version.seq;
            data.log(version, Arc::new(write));
        }
        follow.verified = Some(verified);
        while data.applied() < commit.min(verified) {
            if data.apply_next(ctx.base.config, ctx.base.now).is_none() {
                break;
            }
        }
        if new || first {
            self.reply(from, CopyMessage::Logged { stream, end: verified });
        }
    }
}
