//! Time, links and views.

use super::*;

impl Cluster {
    pub(in crate::testing::cache) fn run_for(&mut self, time: Duration) -> Outcome1 {
        let end = self.now + time;
        while self.step(end)? {}
        self.now = end;
        self.check_deadlines()?;
        self.count_budget();
        Ok(())
    }

    /// The next thing that is due by `end`.
    pub(super) fn step(&mut self, end: Duration) -> Result<bool, Violation> {
        let (now, event) = (self.now, self.events.first_key_value().map(|(at, _)| *at));
        let timers = self.spots.iter().enumerate().flat_map(|(place, spot)| {
            let due = move |(shard, node): (usize, &CacheNode)| {
                node.poll_timeout().map(|at| (spot.born.saturating_add(at).max(now), place, shard))
            };
            spot.nodes.iter().enumerate().filter_map(due)
        });
        let timer = timers.min();
        match (event, timer) {
            (Some(at), timer) if at.0 <= end && timer.is_none_or(|(due, ..)| at.0 <= due) => {
                self.now = self.now.max(at.0);
                let Some(event) = self.events.remove(&at) else { return Ok(false) };
                self.happen(event)?;
            }
            (_, Some((due, place, shard))) if due <= end => {
                self.now = due;
                self.input_of(place, shard, CacheNode::handle_timeout)?;
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    pub(super) fn happen(&mut self, event: Event) -> Outcome1 {
        match event {
            Event::Connect(a, b) => self.connect(a, b)?,
            Event::Up { at, of, session } => {
                let (link, side) = self.links.get(at, of);
                if link.session == session && link.ends[side] == End::Waiting {
                    match link.cut {
                        true => self.never_up(at, of)?,
                        false => self.tell_up(at, of)?,
                    }
                }
            }
            Event::Down { at, of, session } => {
                let (link, side) = self.links.get(at, of);
                if link.session == session && link.ends[side] == End::Up {
                    self.tell_down(at, of)?;
                }
            }
            Event::Suspect { from, to, session } => {
                let (link, side) = self.links.get_mut(from, to);
                if link.session == session && link.blocked[side] {
                    link.cut = true;
                    self.tell_down(to, from)?;
                    let gap = self.draw(9, from, to, session.into(), 500);
                    self.later(gap, Event::Down { at: from, of: to, session });
                }
            }
            Event::Deliver { from, to, lane, session } => self.deliver(from, to, lane, session)?,
            Event::View { at, life } => {
                if self.spots[at].running && self.spots[at].life == life {
                    self.take_view(at)?;
                }
            }
            Event::Settle { at, life } => {
                if self.spots[at].running && self.spots[at].life == life && !self.spots[at].settled {
                    self.spots[at].settled = true;
                    self.tell_view(at)?;
                }
            }
            Event::Leave { at, life } => {
                let spot = &self.spots[at];
                let drained = spot.draining && spot.nodes.iter().all(CacheNode::is_drained);
                // with nobody to take what it has a node is drained as well: leaving then is a crash
                let empty = self.partitions().all(|partition| self.store(at, partition).is_none());
                let drained = drained && (empty || self.setup.kind == Kind::Wild);
                if self.spots[at].life == life && drained {
                    self.say_bye(at)?;
                    self.stop(at);
                }
            }
        }
        Ok(())
    }

    pub(super) fn connect(&mut self, a: usize, b: usize) -> Outcome1 {
        let lives = [self.spots[a.min(b)].life, self.spots[a.max(b)].life];
        let both = self.spots[a].running && self.spots[b].running;
        let (link, side) = self.links.get(a, b);
        if !both || link.cut || link.blocked != [false; 2] {
            return Ok(());
        }
        if !link.closed() {
            // an end that has not yet been told of the earlier life, is told first
            for (at, of, end) in [(a, b, link.ends[side]), (b, a, link.ends[1 - side])] {
                let (link, side) = self.links.get(at, of);
                if end == End::Up && link.lives[1 - side] != self.spots[of].life {
                    self.tell_down(at, of)?;
                }
            }
            return Ok(());
        }
        let (link, _) = self.links.get_mut(a, b);
        link.begin(lives);
        let session = link.session;
        let (first, second) = if self.draw(10, a, b, session.into(), 1) == 0 { (a, b) } else { (b, a) };
        let gap = self.draw(11, a, b, session.into(), 80);
        self.later(gap, Event::Up { at: second, of: first, session });
        self.tell_up(first, second)
    }

    pub(super) fn tell_up(&mut self, at: usize, of: usize) -> Outcome1 {
        let (link, side) = self.links.get_mut(at, of);
        link.ends[side] = End::Up;
        let peer = self.linked(at, of);
        self.note(|| format!("n{at} is told: {peer} up"));
        self.view_later(at, of, 1);
        self.input(at, |node, now| node.handle_peer_up(&peer, now))?;
        self.resume(of, at);
        Ok(())
    }

    /// The link breaks before this end was told of it.
    pub(super) fn never_up(&mut self, at: usize, of: usize) -> Outcome1 {
        let (link, side) = self.links.get_mut(at, of);
        link.ends[side] = End::Gone;
        if link.ends[1 - side] == End::Up {
            self.tell_down(of, at)?;
        }
        Ok(())
    }

    pub(super) fn tell_down(&mut self, at: usize, of: usize) -> Outcome1 {
        let peer = self.linked(at, of);
        let (link, side) = self.links.get_mut(at, of);
        link.ends[side] = End::Gone;
        link.clear(1 - side);
        match link.ends[1 - side] {
            End::Waiting => link.ends[1 - side] = End::Gone,
            End::Up => {
                let session = link.session;
                let gap = self.draw(12, at, of, session.into(), 300);
                self.later(gap, Event::Down { at: of, of: at, session });
            }
            End::Gone => {}
        }
        if self.links.get(at, of).0.closed() {
            let short = self.setup.kind == Kind::Whole;
            let most = if short { 10 } else { 150 };
            let delay = 2 + self.draw(13, at, of, self.session_of(at, of), most);
            self.later(delay, Event::Connect(at, of));
        }
        self.note(|| format!("n{at} is told: {peer} down"));
        self.oracle.broke();
        self.view_later(at, of, 0);
        self.input(at, |node, now| node.handle_peer_down(&peer, now))
    }

    /// What was held up on its way goes on.
    pub(super) fn resume(&mut self, from: usize, to: usize) {
        let (link, side) = self.links.get(from, to);
        let session = link.session;
        let counts: Vec<usize> = link.lanes[side].iter().map(|queue| queue.frames.len()).collect();
        for (lane, count) in counts.into_iter().enumerate() {
            for _ in 0..count {
                self.later(1, Event::Deliver { from, to, lane, session });
            }
        }
    }

    pub(super) fn view_later(&mut self, at: usize, of: usize, up: u64) {
        let life = self.spots[at].life;
        let session = self.session_of(at, of);
        // in a run without splits a short break is over before anybody leaves a view
        let least = if self.setup.kind == Kind::Whole && up == 0 { 120 } else { 5 };
        let delay = least + self.draw(14 + up, at, of, session, self.setup.view_delay);
        self.later(delay, Event::View { at, life });
    }

    /// A node commits a view of the peers that it is connected with.
    pub(super) fn take_view(&mut self, at: usize) -> Outcome1 {
        let mut view = BTreeSet::from([self.peer(at)]);
        for other in (0..self.len()).filter(|other| *other != at) {
            let (link, side) = self.links.get(at, other);
            let peer = self.linked(at, other);
            // in a run without splits a short break of a link changes no view
            let whole = self.setup.kind == Kind::Whole && self.spots[other].running;
            let lives = whole && self.peer(other) == peer && self.spots[at].view.contains(&peer);
            if link.ends[side] == End::Up || lives {
                view.insert(peer);
            }
        }
        let all: BTreeSet<Peer> =
            (0..self.len()).filter(|p| self.is_running(*p)).map(|p| self.peer(p)).collect();
        let settled = self.spots[at].settled || view == all;
        if view == self.spots[at].view && settled == self.spots[at].settled {
            return Ok(());
        }
        self.spots[at].view = view;
        self.spots[at].settled = settled;
        self.tell_view(at)
    }

    pub(super) fn tell_view(&mut self, at: usize) -> Outcome1 {
        let view: Vec<Peer> = self.spots[at].view.iter().cloned().collect();
        self.spots[at].most_seen = self.spots[at].most_seen.max(view.len());
        let settled = self.spots[at].settled;
        self.note(|| format!("n{at} view {view:?} settled {settled}"));
        self.input(at, |node, now| node.handle_view(&view, settled, now))
    }

    pub(super) fn deliver(&mut self, from: usize, to: usize, lane: usize, session: u32) -> Outcome1 {
        let peer = self.linked(to, from);
        let (link, side) = self.links.get_mut(from, to);
        let ready = link.session == session && link.ends[1 - side] == End::Up && !link.blocked[side];
        if !ready {
            return Ok(());
        }
        let Some(frame) = link.lanes[side][lane].frames.pop_front() else { return Ok(()) };
        self.trace = xxh3_64_with_seed(&frame.bytes, self.trace ^ self.now.as_nanos() as u64);
        let message = match codec::decode(&frame.bytes).map(|mut messages| messages.pop()) {
            Ok(Some(message)) => message,
            other => return broken("codec", format!("{other:?}: {:?}", frame.bytes)),
        };
        self.note(|| format!("n{from} -> n{to} {:?}: {message:?}", Lane::ALL[lane]));
        if let CacheMessage::Replica { partition, message: ReplicaMessage::Position { header, .. }, .. } =
            &message
        {
            // a copy that is merged tells here what made it, and maybe nowhere else
            self.oracle.history(partition.get(), header.lineage.entries())?;
        }
        if self.is_open(to) {
            self.heard(to, &peer, &message);
            let forwarded = matches!(message, CacheMessage::Forward { .. });
            let offered = match &message {
                CacheMessage::Replica {
                    partition, message: ReplicaMessage::Offer { entries, .. }, ..
                } => Some((*partition, entries.clone())),
                _ => None,
            };
            self.message(to, frame.shard, forwarded, |node, now| node.handle_message(&peer, message, now))?;
            let node = self.spots[to].nodes.get(frame.shard);
            if let (Some((partition, entries)), Some(node)) = (offered, node)
                && let Some((store, _)) = node.store(partition)
            {
                self.oracle.merges(partition.get(), &entries, store);
            }
            return Ok(());
        }
        if matches!(message, CacheMessage::Hello { .. }) {
            self.send(to, frame.shard, &peer, Lane::ALL[lane], &CacheMessage::NotOpen)?;
        }
        Ok(())
    }

    /// How far a copy is, as its primary hears.
    fn heard(&mut self, at: usize, from: &Peer, message: &CacheMessage) {
        let CacheMessage::Replica { partition, message, .. } = message else { return };
        let (epoch, end) = match message {
            ReplicaMessage::Ack { epoch, end, whole: true } => (epoch, end.as_ref()),
            ReplicaMessage::Position { epoch, header, whole: true, follows: true, .. } => {
                (epoch, header.applied.as_ref())
            }
            _ => return,
        };
        if let Some(end) = end.filter(|_| epoch.primary == self.peer(at)) {
            self.oracle.acked(partition.get(), from, end);
        }
    }

    pub(super) fn send(
        &mut self,
        from: usize,
        shard: usize,
        to: &Peer,
        lane: Lane,
        message: &CacheMessage,
    ) -> Outcome1 {
        let Some(target) = self.spots.iter().position(|spot| spot.id == to.node) else {
            return broken("address", format!("n{from} sends to {to}: {message:?}"));
        };
        if target == from {
            return broken("address", format!("n{from} sends to itself: {message:?}"));
        }
        let known = self.linked(from, target) == *to;
        let mut bytes = Vec::with_capacity(64);
        if let Err(error) = codec::encode(message, &mut bytes) {
            return broken("codec", format!("{error}: {message:?}"));
        }
        let bytes = Bytes::from(bytes);
        let (link, side) = self.links.get_mut(from, target);
        if !known || link.ends[side] != End::Up || link.ends[1 - side] == End::Gone {
            return Ok(());
        }
        let (session, slow) = (link.session, link.slow[side]);
        let queue = &mut link.lanes[side][lane.index()];
        queue.frames.push_back(Frame { shard, bytes });
        queue.sent += 1;
        let sent = queue.sent;
        let delay = self.draw(16 + lane.index() as u64, from, target, sent, self.setup.delay * 1000);
        let arrives = self.now + Duration::from_micros(200 + delay) + slow;
        let (link, side) = self.links.get_mut(from, target);
        let queue = &mut link.lanes[side][lane.index()];
        queue.last = queue.last.max(arrives);
        let arrives = queue.last;
        self.at(arrives, Event::Deliver { from, to: target, lane: lane.index(), session });
        if self.links.in_flight() > MAX_IN_FLIGHT {
            return broken("flood", format!("more than {MAX_IN_FLIGHT} messages are under way"));
        }
        Ok(())
    }
}
