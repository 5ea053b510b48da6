//! Inputs of nodes, and what they want done.

use super::*;

impl Cluster {
    /// An input for every shard of a node.
    pub(super) fn input(&mut self, place: usize, act: impl Fn(&mut CacheNode, Duration)) -> Outcome1 {
        for shard in 0..self.spots[place].nodes.len() {
            self.input_of(place, shard, &act)?;
        }
        Ok(())
    }

    pub(super) fn input_of(
        &mut self,
        place: usize,
        shard: usize,
        act: impl FnOnce(&mut CacheNode, Duration),
    ) -> Outcome1 {
        self.message(place, shard, false, act)
    }

    pub(super) fn message(
        &mut self,
        place: usize,
        shard: usize,
        forwarded: bool,
        act: impl FnOnce(&mut CacheNode, Duration),
    ) -> Outcome1 {
        let now = self.local(place);
        self.inputs += 1;
        let spot = &mut self.spots[place];
        let Some(node) = spot.nodes.get_mut(shard) else { return Ok(()) };
        act(node, now);
        if let Err(what) = node.check_invariants() {
            return broken("invariant", format!("n{place}: {what}"));
        }
        spot.inputs = if spot.inputs.0 == self.now { (self.now, spot.inputs.1 + 1) } else { (self.now, 1) };
        if spot.inputs.1 > MAX_AT_ONCE {
            return broken("loop", format!("n{place} has had {MAX_AT_ONCE} inputs at one moment"));
        }
        loop {
            let effect = self.spots[place].nodes.get_mut(shard).and_then(CacheNode::poll_effect);
            let Some(effect) = effect else { break };
            let again = matches!(effect, CacheEffect::Send { message: CacheMessage::Forward { .. }, .. });
            if forwarded && again {
                return broken("loop", format!("n{place} forwards what was forwarded to it: {effect:?}"));
            }
            self.carry_out(place, shard, effect)?;
        }
        self.leave_if_drained(place);
        Ok(())
    }

    pub(super) fn leave_if_drained(&mut self, place: usize) {
        let spot = &self.spots[place];
        if spot.draining && !spot.nodes.is_empty() && spot.nodes.iter().all(CacheNode::is_drained) {
            let life = spot.life;
            let known =
                self.events.values().any(|event| matches!(event, Event::Leave { at, .. } if *at == place));
            if !known {
                self.later(30, Event::Leave { at: place, life });
            }
        }
    }

    pub(super) fn carry_out(&mut self, place: usize, shard: usize, effect: CacheEffect) -> Outcome1 {
        match effect {
            CacheEffect::Send { to, lane, message } => self.send(place, shard, &to, lane, &message),
            CacheEffect::Done { ticket, result } => match self.spots[place].waiting.remove(&ticket) {
                Some((op, _)) => self.answered(op, result),
                None => broken(
                    "answers",
                    format!("n{place} answers {ticket}, which nobody waits for: {result:?}"),
                ),
            },
            CacheEffect::Event(event) => self.event(place, event),
            CacheEffect::Changed => self.changed(place, shard),
        }
    }

    pub(super) fn answered(&mut self, op: usize, result: Result<Reply, CacheError>) -> Outcome1 {
        self.note(|| format!("answer #{op} {result:?}"));
        self.trace = xxh3_64_with_seed(format!("{op} {result:?}").as_bytes(), self.trace);
        let reply = match result {
            Ok(reply) => reply,
            Err(error) => return self.oracle.fail(op, &error),
        };
        let records: Option<Vec<(i64, i64)>> = match &reply.outcome {
            Outcome::Records(records) => {
                let number = |record: &Record, field| record.get(field).and_then(Term::as_int).unwrap_or(-1);
                Some(records.iter().map(|record| (number(record, 0), number(record, 1))).collect())
            }
            Outcome::Written(_) | Outcome::Removed(_) => None,
            Outcome::Bindings(_) => return broken("answers", format!("#{op} is answered by bindings")),
        };
        if records.is_some() == self.oracle.op(op).what.is_write() {
            return broken("answers", format!("#{op} is answered by {reply:?}"));
        }
        if let Some(version) = reply.version.as_ref().filter(|_| records.is_none()) {
            // the history of an epoch may end with the side of a split that it was on
            let partition = self.oracle.op(op).partition;
            let place = self.spots.iter().position(|spot| spot.id == version.epoch.primary.node);
            let node = place.and_then(|p| self.spots[p].nodes.get((partition % self.setup.shards) as usize));
            if let Some((store, _)) = node.and_then(|node| node.store(PartitionId::new(partition))) {
                self.oracle.history(partition, store.lineage().entries())?;
            }
        }
        self.oracle.succeed(op, reply.version.clone(), records.as_deref())?;
        if records.is_some() {
            return Ok(());
        }
        let demand = self.demand(op, reply.version.as_ref());
        self.oracle.judge_copies_of(op, demand)?;
        match (&self.oracle.op(op).what, reply.outcome) {
            (What::Put(put), Outcome::Written(count)) if count == put.len() as u64 => Ok(()),
            (What::Put(_), outcome) => broken("count", format!("#{op}, a put, is answered by {outcome:?}")),
            (_, Outcome::Removed(count)) => self.oracle.removed(op, count),
            (_, outcome) => broken("count", format!("#{op}, a delete, is answered by {outcome:?}")),
        }
    }

    /// What an acknowledged write has to have.
    fn demand(&self, op: usize, version: Option<&Version>) -> Demand {
        let (place, partition) = (self.oracle.op(op).place, PartitionId::new(self.oracle.op(op).partition));
        let (min_copies, expected_nodes) = (self.setup.config.min_copies, self.setup.config.expected_nodes);
        let own = version.is_some_and(|version| version.epoch.primary == self.peer(place));
        let status = self.status(place, partition).filter(|status| own && status.serving);
        let here = status.map(|status| (status.owners.len(), self.spots[place].view.len()));
        Demand { min_copies, expected_nodes, here }
    }

    pub(super) fn event(&mut self, place: usize, event: CacheEvent) -> Outcome1 {
        self.note(|| format!("n{place} event {event:?}"));
        match event {
            CacheEvent::Conflict { partition, loser } => self.oracle.conflict(partition.get(), loser),
            CacheEvent::Discarded { partition, owner, .. } => {
                let at = (0..self.len()).find(|place| self.peer(*place) == owner);
                let of = self.setup.shards;
                let node = at.and_then(|place| self.spots[place].nodes.get((partition.get() % of) as usize));
                let store = node.and_then(|node| node.store(partition)).map(|(store, _)| store);
                self.oracle.discard(partition.get(), store);
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// Who serves what is looked at whenever a node says that something has changed.
    pub(super) fn changed(&mut self, place: usize, shard: usize) -> Outcome1 {
        let of = self.setup.shards;
        for partition in self.partitions().filter(|p| p.get() % of == shard as u32) {
            let Some(status) = self.status(place, partition) else { continue };
            let number = partition.get();
            if status.owners.contains(&self.peer(place)) {
                // a cluster that has become smaller has fewer copies to lose
                self.budget = self.budget.min(status.wanted.len() / 2);
            }
            if status.primary.as_ref().is_some_and(|primary| *primary != self.peer(place)) {
                self.spots[place].knows.insert(number);
            }
            if !status.serving {
                self.spots[place].serves.remove(&number);
                continue;
            }
            let Some(epoch) = &status.epoch else {
                return broken("epoch", format!("n{place} serves partition {partition} in no epoch"));
            };
            // a primary that goes on serves in another epoch then
            let before = self.spots[place].serves.insert(number, epoch.clone());
            if before.as_ref() == Some(epoch) {
                continue;
            }
            let (me, spot) = (self.peer(place), &self.spots[place]);
            self.oracle.serves(number, epoch, (place, spot.life, spot.openings), &me)?;
            let also = (0..self.len()).find(|other| {
                *other != place && self.status(*other, partition).is_some_and(|status| status.serving)
            });
            if let Some(other) = also.filter(|_| self.setup.kind == Kind::Whole) {
                return broken("two primaries", format!("n{place} and n{other} serve partition {partition}"));
            }
            let node = self.spots[place].nodes.get(shard);
            if let Some((store, _)) = node.and_then(|node| node.store(partition)) {
                self.oracle.judge_copy(number, &format!("n{place}, which begins to serve,"), store)?;
                self.oracle.begins(number, &format!("n{place}"), store)?;
                let news = before.is_none() && store.applied().is_none();
                self.check_birth(place, number, news)?;
            }
        }
        Ok(())
    }

    /// A partition of which nobody knew anything begins only among enough nodes.
    fn check_birth(&self, place: usize, partition: u32, news: bool) -> Outcome1 {
        let spot = &self.spots[place];
        let born = news && !spot.knows.contains(&partition) && !self.gave_up.contains(&partition);
        let (seen, expected) = (spot.most_seen, self.setup.config.expected_nodes.unwrap_or(0));
        if born && seen * 2 <= expected {
            let text = format!("n{place}, which has seen {seen} of {expected}, begins partition {partition}");
            return broken("expected nodes", text);
        }
        Ok(())
    }

    pub(super) fn check_deadlines(&self) -> Outcome1 {
        let late = self.spots.iter().flat_map(|spot| spot.waiting.values());
        match late.filter(|(_, deadline)| *deadline + ms(1) < self.now).map(|(op, _)| *op).next() {
            Some(op) => broken("deadline", format!("{} is still open", tell(self.oracle.op(op)))),
            None => Ok(()),
        }
    }
}
