//! What the steps of a schedule do.

use super::*;

impl Cluster {
    pub(in crate::testing::cache) fn apply(&mut self, step: Step) -> Outcome1 {
        self.note(|| format!("STEP {step}"));
        let places = self.len();
        let at = |place: Place| usize::from(place) % places;
        let pair = |a: Place, b: Place| (at(a) != at(b)).then(|| (at(a), at(b)));
        match step {
            Step::Start(n) => self.start(at(n))?,
            Step::Crash(n) => self.crash(at(n))?,
            Step::Drain(n) => self.drain(at(n))?,
            Step::Close(n) => self.close(at(n))?,
            Step::Open(n) => self.open(at(n))?,
            Step::Cut(a, b, gap) => {
                if let Some((a, b)) = pair(a, b) {
                    self.cut(a, b, gap, true)?;
                }
            }
            Step::Blip(a, b, gap) => {
                if let Some((a, b)) = pair(a, b) {
                    self.cut(a, b, gap, false)?;
                }
            }
            Step::Block(a, b) => {
                if let Some((a, b)) = pair(a, b) {
                    self.block(a, b);
                }
            }
            Step::Heal(a, b) => {
                if let Some((a, b)) = pair(a, b) {
                    self.heal(a, b);
                }
            }
            Step::Split(mask) => {
                for (a, b) in self.links.pairs() {
                    if (mask >> a) & 1 != (mask >> b) & 1 {
                        let gap = self.draw(1, a, b, self.order, 300) as u16;
                        self.cut(a, b, gap, true)?;
                    }
                }
            }
            Step::HealAll => self.links.pairs().for_each(|(a, b)| self.heal(a, b)),
            Step::Slow(a, b, millis) => {
                if let Some((a, b)) = pair(a, b) {
                    let (link, side) = self.links.get_mut(a, b);
                    link.slow[side] = ms(millis.into());
                }
            }
            Step::Time(millis) => self.run_for(ms(millis.into()))?,
            Step::Write(n, session, kind, mode) => self.write(at(n), session, kind, mode)?,
            Step::Read(n, session, kind, mode, own) => self.ask(at(n), session, kind, mode, own)?,
            Step::Cancel(n) => self.cancel(at(n))?,
        }
        Ok(())
    }

    pub(super) fn start(&mut self, place: usize) -> Outcome1 {
        if self.spots[place].running {
            return Ok(());
        }
        let skew = ms(self.draw(2, place, 0, self.spots[place].life, 900_000));
        let spot = &mut self.spots[place];
        spot.life += 1;
        spot.running = true;
        spot.born = self.now.saturating_sub(skew);
        spot.openings = 0;
        spot.draining = false;
        spot.settled = false;
        spot.most_seen = 1;
        spot.knows.clear();
        let life = spot.life;
        for other in 0..self.len() {
            if other != place && self.spots[other].running {
                let delay = 5 + self.draw(3, place, other, life, 100);
                self.later(delay, Event::Connect(place, other));
            }
        }
        let me = self.peer(place);
        self.spots[place].view = BTreeSet::from([me]);
        if self.setup.kind == Kind::Wild {
            let delay = 300 + self.draw(4, place, 0, life, 1500);
            self.later(delay, Event::Settle { at: place, life });
        }
        // some open the cache later
        match self.draw(17, place, 0, life, 7) {
            0 if !self.healing => Ok(()),
            _ => self.open(place),
        }
    }

    pub(super) fn open(&mut self, place: usize) -> Outcome1 {
        if !self.spots[place].running || self.is_open(place) {
            return Ok(());
        }
        if self.spots[place].openings > 0 {
            // a cache is opened once in a life
            self.stop(place);
            return self.start(place);
        }
        let me = self.peer(place);
        self.spots[place].openings += 1;
        self.spots[place].draining = false;
        let now = self.local(place);
        let of = self.setup.shards;
        let node = |index: u32| {
            let seed = xxh3_64_with_seed(me.to_string().as_bytes(), self.setup.seed ^ u64::from(index));
            let shard = Shard { index, of };
            CacheNode::new(me.clone(), self.setup.config.clone(), shard, seed, now)
                .with_rules(self.setup.rules)
        };
        self.spots[place].nodes = (0..of).map(node).collect();
        for other in 0..self.len() {
            let up = other != place && {
                let (link, side) = self.links.get(place, other);
                link.ends[side] == End::Up
            };
            if up {
                let peer = self.linked(place, other);
                self.input(place, |node, now| node.handle_peer_up(&peer, now))?;
            }
        }
        self.tell_view(place)
    }

    /// The peer at the other end of a link, in the life that it had when the link began.
    pub(super) fn linked(&self, at: usize, of: usize) -> Peer {
        let (link, side) = self.links.get(at, of);
        let life = link.lives[1 - side];
        Peer::new(self.spots[of].id.clone(), Incarnation::new(life).unwrap_or(Incarnation::MIN))
    }

    pub(super) fn crash(&mut self, place: usize) -> Outcome1 {
        if !self.spots[place].running || !self.may_lose(place) {
            return Ok(());
        }
        if self.is_open(place) {
            self.oracle.crash();
        }
        self.stop(place);
        Ok(())
    }

    /// Whether the promises of this run allow a copy to be lost now.
    pub(super) fn may_lose(&mut self, place: usize) -> bool {
        match self.setup.kind {
            Kind::Wild => true,
            Kind::Split => !self.is_open(place),
            Kind::Whole if !self.is_open(place) => true,
            Kind::Whole => {
                self.count_budget();
                // who drains leaves fewer owners
                let owners = self.partitions().map(|partition| self.wanted(partition).len()).min();
                let allowed = self.budget > 0 && owners.unwrap_or(0) > 1;
                self.budget = self.budget.saturating_sub(1);
                allowed
            }
        }
    }

    pub(super) fn count_budget(&mut self) {
        // whole, and everybody has heard of it
        if self.links.in_flight() > 0 || !self.links_are_up() || !self.is_whole() {
            return;
        }
        self.oracle.settle();
        if self.setup.kind == Kind::Whole {
            let owners = self.partitions().map(|partition| self.wanted(partition).len()).min();
            self.budget = owners.unwrap_or(0) / 2;
        }
    }

    fn links_are_up(&self) -> bool {
        let running = |(a, b): &(usize, usize)| self.spots[*a].running && self.spots[*b].running;
        self.links.pairs().filter(running).all(|(a, b)| self.links.get(a, b).0.is_up())
    }

    pub(super) fn stop(&mut self, place: usize) {
        let spot = &mut self.spots[place];
        spot.running = false;
        spot.nodes.clear();
        spot.serves.clear();
        spot.view.clear();
        let life = spot.life;
        self.oracle.broke();
        let waiting = std::mem::take(&mut spot.waiting);
        waiting.into_values().for_each(|(op, _)| self.oracle.abandon(op));
        for other in (0..self.len()).filter(|other| *other != place) {
            let lost = self.draw(5, place, other, life, 1) == 0;
            let detect = 5 + self.draw(6, place, other, life, 400);
            let (link, side) = self.links.get_mut(place, other);
            let session = link.session;
            link.ends[side] = End::Gone;
            link.clear(1 - side);
            if lost {
                link.clear(side);
            }
            match link.ends[1 - side] {
                End::Waiting => link.ends[1 - side] = End::Gone,
                End::Up => self.later(detect, Event::Down { at: other, of: place, session }),
                End::Gone => {}
            }
        }
        // who has not seen everybody until now, may do so without this one
        for at in 0..self.len() {
            if !self.spots[at].running || self.spots[at].settled {
                continue;
            }
            let life = self.spots[at].life;
            let delay = 500 + self.draw(20, at, place, life, 200);
            self.later(delay, Event::View { at, life });
        }
    }

    pub(super) fn drain(&mut self, place: usize) -> Outcome1 {
        let others = (0..self.len()).any(|p| p != place && self.is_open(p) && !self.spots[p].draining);
        if !self.is_open(place) || self.spots[place].draining || !others {
            return Ok(());
        }
        self.spots[place].draining = true;
        self.input(place, CacheNode::drain)
    }

    pub(super) fn close(&mut self, place: usize) -> Outcome1 {
        if !self.is_open(place) || !self.may_lose(place) || self.setup.kind == Kind::Split {
            return Ok(());
        }
        self.oracle.crash();
        self.say_bye(place)
    }

    pub(super) fn say_bye(&mut self, place: usize) -> Outcome1 {
        self.input(place, CacheNode::close)?;
        self.spots[place].nodes.clear();
        self.spots[place].serves.clear();
        self.spots[place].draining = false;
        match std::mem::take(&mut self.spots[place].waiting).into_values().next() {
            Some((op, _)) => {
                let text = format!("{} was not answered when the cache closed", tell(self.oracle.op(op)));
                broken("answers", text)
            }
            None => Ok(()),
        }
    }

    /// The link breaks; `a` is told now.
    pub(super) fn cut(&mut self, a: usize, b: usize, gap: u16, for_long: bool) -> Outcome1 {
        if self.setup.kind == Kind::Whole && for_long {
            return Ok(());
        }
        let (link, side) = self.links.get_mut(a, b);
        link.cut |= for_long;
        let session = link.session;
        if link.ends[side] == End::Up {
            self.oracle.cut();
            // in a run without splits nobody may take the other for gone
            let gap = if self.setup.kind == Kind::Whole { gap % 20 } else { gap };
            let lost = self.draw(7, a, b, session.into(), 1) == 0;
            if lost {
                let (link, side) = self.links.get_mut(a, b);
                link.clear(side);
            }
            self.later(gap.into(), Event::Down { at: b, of: a, session });
            self.tell_down(a, b)?;
        }
        Ok(())
    }

    pub(super) fn block(&mut self, from: usize, to: usize) {
        if self.setup.kind == Kind::Whole {
            return;
        }
        let (link, side) = self.links.get_mut(from, to);
        if link.is_up() && !link.blocked[side] {
            link.blocked[side] = true;
            let session = link.session;
            self.oracle.cut();
            self.at(self.now + SUSPICION, Event::Suspect { from, to, session });
        }
    }

    pub(super) fn heal(&mut self, a: usize, b: usize) {
        let (link, _) = self.links.get_mut(a, b);
        (link.cut, link.blocked, link.slow) = (false, [false; 2], [Duration::ZERO; 2]);
        if link.closed() {
            let delay = 5 + self.draw(8, a, b, self.session_of(a, b), 150);
            self.later(delay, Event::Connect(a, b));
        } else {
            self.resume(a, b);
            self.resume(b, a);
        }
    }

    pub(super) fn write(&mut self, place: usize, session: u8, kind: WriteKind, mode: WriteMode) -> Outcome1 {
        let session = usize::from(session) % usize::from(self.setup.sessions);
        if !self.is_open(place) || self.oracle.is_busy(session) {
            return Ok(());
        }
        let keys = i64::from(self.setup.keys);
        let config = self.setup.config.clone();
        let key_of = |key: u8| i64::from(key) % keys;
        let partition_of = |key: i64| config.partition_of(&Term::from(key));
        let record = |key: i64, number: i64| {
            let padding = "x".repeat(self.setup.padding);
            Record::new([key.into(), number.into(), class_of(number).into(), padding.into()])
        };
        let mut number = self.oracle.next_record();
        let (key, what, op) = match kind {
            WriteKind::Put(key) => {
                let key = key_of(key);
                let op = WriteOp::Put(vec![record(key, number)]);
                (key, What::Put(vec![(key, number)]), op)
            }
            WriteKind::Batch(key, count) => {
                let key = key_of(key);
                let all = (0..keys).map(|offset| (key + offset) % keys);
                let same = all.filter(|other| partition_of(*other) == partition_of(key));
                let mut put = Vec::new();
                let mut records = Vec::new();
                for key in same.take(usize::from(count.max(1))) {
                    put.push((key, number));
                    records.push(record(key, number));
                    number += 1;
                }
                (key, What::Put(put), WriteOp::Put(records))
            }
            WriteKind::Delete(key) => {
                let key = key_of(key);
                (key, What::DeleteKeys(vec![key]), WriteOp::DeleteKeys(vec![key.into()]))
            }
            WriteKind::DeleteMatch(key, class) => {
                let class = class_of(class.into());
                let fields = crate::pattern![_, _, class, _];
                let Ok(pattern) = RecordPattern::new(fields) else { return Ok(()) };
                (key_of(key), What::DeleteMatch(class), WriteOp::DeleteMatch(pattern))
            }
            WriteKind::DeleteAll(key) => (key_of(key), What::DeleteAll, WriteOp::DeleteAll),
        };
        let partition = partition_of(key);
        let mut asked = Op::new(place, partition.get(), session, what);
        asked.write_mode = mode;
        self.begin(asked, Operation::Write(op))
    }

    pub(super) fn ask(
        &mut self,
        place: usize,
        session: u8,
        kind: ReadKind,
        mode: ReadMode,
        own: bool,
    ) -> Outcome1 {
        let session = usize::from(session) % usize::from(self.setup.sessions);
        if !self.is_open(place) || self.oracle.is_busy(session) {
            return Ok(());
        }
        let (ReadKind::Get(key) | ReadKind::All(key)) = kind;
        let key = i64::from(key) % i64::from(self.setup.keys);
        let partition = self.setup.config.partition_of(&Term::from(key));
        let (what, read) = match kind {
            ReadKind::Get(_) => (What::Get(key), ReadOp::Get(key.into())),
            ReadKind::All(_) => {
                let Ok(pattern) = RecordPattern::new(crate::pattern![_, _, _, _]) else { return Ok(()) };
                (What::ReadAll, ReadOp::MatchObject(pattern))
            }
        };
        let mut asked = Op::new(place, partition.get(), session, what);
        asked.read_mode = mode;
        asked.token = if own { self.oracle.token(session, partition.get()) } else { None };
        self.begin(asked, Operation::Read(read))
    }

    pub(super) fn begin(&mut self, op: Op, operation: Operation) -> Outcome1 {
        let (place, partition) = (op.place, PartitionId::new(op.partition));
        let now = self.local(place);
        let deadline = now + ms(self.setup.patience);
        let options = Options {
            write_mode: op.write_mode,
            read_mode: op.read_mode,
            at_least: op.token.clone().into_iter().collect(),
            deadline,
        };
        let id = self.oracle.begin(op);
        self.note(|| format!("n{place} asks #{id} {operation:?}"));
        let shard = (partition.get() % self.setup.shards) as usize;
        // what this node may answer at once is answered so
        if let Operation::Read(read) = &operation {
            let at_once = self.spots[place].nodes.get(shard);
            if let Some(result) = at_once.and_then(|node| node.try_read(partition, read, &options)) {
                return self.answered(id, result);
            }
        }
        self.tickets += 1;
        let ticket = self.tickets;
        self.spots[place].waiting.insert(ticket, (id, self.now + ms(self.setup.patience)));
        self.input_of(place, shard, |node, now| node.operate(ticket, partition, operation, options, now))
    }

    pub(super) fn cancel(&mut self, place: usize) -> Outcome1 {
        let Some((ticket, (op, _))) = self.spots[place].waiting.pop_first() else { return Ok(()) };
        let shard = (self.oracle.op(op).partition % self.setup.shards) as usize;
        self.oracle.abandon(op);
        self.input_of(place, shard, |node, _| node.cancel(ticket))
    }

    /// The operator gives up what only dead nodes had.
    pub(in crate::testing::cache) fn accept_loss(&mut self, partition: PartitionId) -> Outcome1 {
        let shard = (partition.get() % self.setup.shards) as usize;
        self.gave_up.insert(partition.get());
        for place in 0..self.len() {
            if self.is_open(place) {
                self.input_of(place, shard, |node, now| {
                    // who cannot decide it has said so, and somebody else may
                    let _ = node.accept_loss(partition, now);
                })?;
            }
        }
        Ok(())
    }

    /// Which session of their link two places are in.
    pub(super) fn session_of(&self, a: usize, b: usize) -> u64 {
        self.links.get(a, b).0.session.into()
    }
}
