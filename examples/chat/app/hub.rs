//! Who is in a room, over all nodes, and what was said there lately.
//!
//! The library has members, not people, so presence is built on its broadcasts. Each node that has people in
//! a room runs one hub for it. A hub tells the others its *whole* list whenever that changes, numbered and
//! under the node's life, so that a later list always replaces an earlier one and a lost or repeated one does
//! no harm. A hub that starts asks for the lists of the others; they answer with their history, too. A node
//! that is no longer connected takes its list along.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tokio::sync::{Notify, watch};
use tokio::time::Instant;

use super::Failure;
use super::cluster::{Message, Muster, NodeId, Phase};
use super::outbox::Outbox;
use super::wire::{Event, Past, Person, Said, room_group, seen_group};

/// How many messages a room remembers, and how many bytes of text.
const PAST: usize = 100;
const PAST_BYTES: usize = 128 * 1024;
/// A list that changes often is told at most this often.
const PACE: Duration = Duration::from_millis(100);
/// The list is told again after this time, should an announcement have found nobody.
const AGAIN: Duration = Duration::from_secs(5);
/// A hub whose groups could not be joined tries again after this time.
const RETRY: Duration = Duration::from_millis(500);

/// What hubs say to each other.
#[derive(Serialize, Deserialize)]
#[serde(tag = "is", rename_all = "lowercase")]
enum Word {
    Ask,
    Here {
        /// Counts the lists of one life of a node.
        number: u64,
        people: Vec<(Arc<str>, Arc<str>)>,
        #[serde(default)]
        past: Vec<Past>,
    },
}

/// The hubs of one node.
pub(crate) struct Hubs {
    name: Arc<str>,
    muster: Muster,
    phase: watch::Receiver<Phase>,
    rooms: Rooms,
}

type Rooms = Arc<Mutex<HashMap<Arc<str>, Arc<Hub>>>>;

#[derive(Default)]
struct Hub {
    people: Mutex<Local>,
    changed: Notify,
}

/// Somebody's name, and where the page is told about the room.
type Here = (Arc<str>, Arc<Outbox>);

#[derive(Default)]
struct Local {
    /// The people of this node by session and handle, with their names.
    here: BTreeMap<(u64, Arc<str>), Here>,
    /// Sessions that have not been told anything yet.
    fresh: BTreeSet<u64>,
    /// What all know, as it was last told to the sessions.
    told: Vec<Person>,
    past: VecDeque<Past>,
}

impl Hubs {
    pub(crate) fn new(name: Arc<str>, muster: Muster, phase: watch::Receiver<Phase>) -> Self {
        Self { name, muster, phase, rooms: Arc::default() }
    }

    /// Shows this user in the room and sends what is known about the room to the session.
    pub(crate) fn enter(
        &self,
        room: &Arc<str>,
        session: u64,
        user: Arc<str>,
        name: Arc<str>,
        outbox: Arc<Outbox>,
    ) {
        let mut rooms = self.rooms.lock();
        let hub = rooms.entry(room.clone()).or_insert_with(|| {
            let hub = Arc::new(Hub::default());
            let task = Task {
                node: self.name.clone(),
                muster: self.muster.clone(),
                room: room.clone(),
                hub: hub.clone(),
                others: BTreeMap::new(),
                number: 0,
                new: true,
            };
            tokio::spawn(task.run(self.rooms.clone(), self.phase.clone()));
            hub
        });
        let mut local = hub.people.lock();
        local.here.insert((session, user), (name, outbox));
        local.fresh.insert(session);
        drop(local);
        hub.changed.notify_one();
    }

    /// Notes what somebody here is about to say. The hub hears it, too, but one that has just been made may
    /// not listen yet.
    pub(crate) fn note(&self, room: &Arc<str>, said: &Said) {
        let hub = self.rooms.lock().get(room).cloned();
        if let Some(hub) = hub {
            insert(&mut hub.people.lock().past, Past { origin: self.name.clone(), said: said.clone() });
        }
    }

    /// The reverse of [`Hubs::enter`].
    pub(crate) fn leave(&self, room: &Arc<str>, session: u64, user: &Arc<str>) {
        let hub = self.rooms.lock().get(room).cloned();
        if let Some(hub) = hub {
            hub.people.lock().here.remove(&(session, user.clone()));
            hub.changed.notify_one();
        }
    }
}

/// What another node said last.
struct Other {
    life: u64,
    number: u64,
    people: Vec<(Arc<str>, Arc<str>)>,
}

struct Task {
    node: Arc<str>,
    muster: Muster,
    room: Arc<str>,
    hub: Arc<Hub>,
    others: BTreeMap<NodeId, Other>,
    number: u64,
    /// It has not told anybody its list yet.
    new: bool,
}

impl Task {
    async fn run(mut self, rooms: Rooms, phase: watch::Receiver<Phase>) {
        loop {
            let result = self.serve().await;
            let stopping = *phase.borrow() != Phase::Open;
            {
                // Entering takes this lock, too: nobody enters between the look and the removal.
                let mut rooms = rooms.lock();
                if stopping || self.hub.people.lock().here.is_empty() {
                    rooms.remove(&self.room);
                    return;
                }
            }
            if let Err(error) = result {
                eprintln!("{}: the list of people of {:?} starts over: {error}", self.node, self.room);
                tokio::time::sleep(RETRY).await;
            }
        }
    }

    async fn serve(&mut self) -> Result<(), Failure> {
        // Listening comes before asking: the other way round, an answer could pass unheard.
        let mut seen = self.muster.subscribe(seen_group(&self.room)).await?;
        let mut said = self.muster.subscribe(room_group(&self.room)).await?;
        let mut views = self.muster.changes();
        self.say(&Word::Ask).await;
        let mut told_at = Instant::now();
        let mut due = Some(told_at);
        loop {
            let wake = due.unwrap_or(told_at + AGAIN);
            tokio::select! {
                word = seen.recv() => self.hear(&word.ok_or("its node has stopped")?).await,
                message = said.recv() => self.remember(&message.ok_or("its node has stopped")?),
                () = self.hub.changed.notified() => due = Some(due.unwrap_or((told_at + PACE).max(Instant::now()))),
                change = views.changed() => {
                    change.map_err(|_| "its node has stopped")?;
                    // Somebody may have come who has not heard our list, or gone.
                    due = Some(due.unwrap_or((told_at + PACE).max(Instant::now())));
                }
                () = tokio::time::sleep_until(wake) => {
                    told_at = Instant::now();
                    due = None;
                    if self.announce().await {
                        return Ok(());
                    }
                }
            }
            self.show();
        }
    }

    /// Tells the others who is here; whether nobody is, and this hub may end.
    async fn announce(&mut self) -> bool {
        let people = list(&self.hub.people.lock());
        let empty = people.is_empty();
        // The first list brings the history along: somebody who asked before this hub listened got no answer.
        let first = std::mem::replace(&mut self.new, false);
        let past = if first { self.hub.people.lock().past.iter().cloned().collect() } else { Vec::new() };
        self.number += 1;
        self.say(&Word::Here { number: self.number, people, past }).await;
        empty
    }

    async fn say(&self, word: &Word) {
        // Lists are told again, so one that could not be sent is no loss.
        if let Ok(bytes) = serde_json::to_vec(word) {
            let _told_again = self.muster.broadcast(seen_group(&self.room), bytes).await;
        }
    }

    async fn hear(&mut self, message: &Message) {
        let from = &message.id().origin;
        if from.node.as_str() == &*self.node {
            return;
        }
        let Ok(word) = serde_json::from_slice::<Word>(message.payload()) else { return };
        match word {
            Word::Ask => {
                let (people, past) = {
                    let local = self.hub.people.lock();
                    (list(&local), local.past.iter().cloned().collect())
                };
                self.number += 1;
                let answer = Word::Here { number: self.number, people, past };
                if let Ok(bytes) = serde_json::to_vec(&answer) {
                    let asker = from.node.clone();
                    let _told_again = self.muster.send_to_node(asker, seen_group(&self.room), bytes).await;
                }
            }
            Word::Here { number, people, past } => {
                let life = from.incarnation.get();
                let known = self.others.get(&from.node).map(|other| (other.life, other.number));
                if known < Some((life, number)) {
                    self.others.insert(from.node.clone(), Other { life, number, people });
                }
                self.learn(past);
            }
        }
    }

    fn remember(&mut self, message: &Message) {
        if let Ok(said) = serde_json::from_slice::<Said>(message.payload()) {
            let origin = message.id().origin.node.as_str().into();
            insert(&mut self.hub.people.lock().past, Past { origin, said });
        }
    }

    /// What others remember and this hub did not know; shown to everybody here, who drop what they know.
    fn learn(&mut self, past: Vec<Past>) {
        let mut local = self.hub.people.lock();
        let before = local.past.len();
        past.into_iter().for_each(|past| insert(&mut local.past, past));
        if local.past.len() != before {
            local.fresh = local.here.keys().map(|(session, _)| *session).collect();
        }
    }

    /// Tells the sessions of this node what has changed for them.
    fn show(&mut self) {
        let connected = self.muster.connected();
        self.others.retain(|node, other| {
            connected.iter().any(|peer| peer.node == *node && peer.incarnation.get() == other.life)
        });
        let mut local = self.hub.people.lock();
        let mut people = BTreeMap::new();
        for (node, other) in &self.others {
            let node: Arc<str> = node.as_str().into();
            people
                .extend(other.people.iter().map(|(user, name)| (user.clone(), (name.clone(), node.clone()))));
        }
        // Someone who is just moving is on two nodes for a moment; here counts.
        for ((_, user), (name, _)) in &local.here {
            people.insert(user.clone(), (name.clone(), self.node.clone()));
        }
        let mut people: Vec<_> =
            people.into_iter().map(|(user, (name, node))| Person { name, user, node }).collect();
        people.sort();
        let changed = people != local.told;
        let fresh = std::mem::take(&mut local.fresh);
        let mut done = BTreeSet::new();
        for ((session, _), (_, outbox)) in &local.here {
            if !done.insert(*session) {
                continue;
            }
            if fresh.contains(session) {
                outbox.event(&Event::Past { room: &self.room, said: local.past.iter().collect() });
            }
            if changed || fresh.contains(session) {
                outbox.event(&Event::Who { room: &self.room, people: people.clone() });
            }
        }
        local.told = people;
    }
}

fn list(local: &Local) -> Vec<(Arc<str>, Arc<str>)> {
    let unique: BTreeMap<_, _> =
        local.here.iter().map(|((_, user), (name, _))| (user.clone(), name.clone())).collect();
    unique.into_iter().collect()
}

/// In the order of time, each id once, the oldest dropped beyond the limit.
fn insert(past: &mut VecDeque<Past>, new: Past) {
    if past.iter().any(|old| old.said.id == new.said.id) {
        return;
    }
    let place = past.partition_point(|old| (old.said.at, &old.said.id) < (new.said.at, &new.said.id));
    past.insert(place, new);
    let mut bytes: usize = past.iter().map(|old| old.said.text.len()).sum();
    while past.len() > PAST || (bytes > PAST_BYTES && past.len() > 1) {
        bytes -= past.pop_front().map_or(0, |old| old.said.text.len());
    }
}
