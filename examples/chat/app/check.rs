//! `--check`: real websocket clients on every node talk while a node is stopped, crashed and restarted.
//!
//! Six parts of equal size: quiet; while a node stops in order; while it starts again; while it crashes; while
//! it starts again; quiet, but that a server which the nodes share is killed and started again. In each the messages flow all the time. Clients of the node that goes do what the
//! page does: told in advance, they join at another node first and leave then; cut off, they connect to another
//! node and send again what was not confirmed. When the node is back, they move home.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use parking_lot::Mutex;
use serde::Deserialize;
use tokio::sync::{Notify, Semaphore, mpsc, oneshot};
use tokio_tungstenite::tungstenite::Message as Frame;

use super::client::{self, Sink, Stream};
use super::cluster::Stop;
use super::ledger::{Account, Ledger, Row};
use super::stage::{Place, Stage};
use super::wire::Command;
use super::{Dice, Failure};

/// What does not happen in this time does not happen.
const PATIENCE: Duration = Duration::from_secs(30);
/// How long the sockets must have been silent for the books to be closed.
const SILENCE: Duration = Duration::from_millis(300);
/// How many messages of one client may be under way.
const WINDOW: usize = 4;

/// How large the check is.
#[derive(Debug, Clone)]
pub(crate) struct Plan {
    pub(crate) nodes: usize,
    pub(crate) messages: usize,
    pub(crate) rooms: usize,
    pub(crate) clients_per_node: usize,
    pub(crate) rooms_per_client: usize,
    pub(crate) seed: u64,
    pub(crate) place: Place,
}

impl Default for Plan {
    fn default() -> Self {
        Self {
            nodes: 3,
            messages: 3000,
            rooms: 50,
            clients_per_node: 8,
            rooms_per_client: 16,
            seed: 1,
            place: Place::Memory,
        }
    }
}

/// What came out; its last line is the verdict.
pub(crate) struct Report {
    pub(crate) lines: Vec<String>,
    pub(crate) sent: usize,
    pub(crate) total: Row,
    pub(crate) trouble: Vec<String>,
}

impl Report {
    pub(crate) fn passed(&self) -> bool {
        self.trouble.is_empty()
            && self.total.missed == 0
            && self.total.duplicated == 0
            && self.total.should > 0
            && self.total.did == self.total.should
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for line in &self.lines {
            writeln!(f, "{line}")?;
        }
        for trouble in self.trouble.iter().take(20) {
            writeln!(f, "  {trouble}")?;
        }
        if self.trouble.len() > 20 {
            writeln!(f, "  and {} more", self.trouble.len() - 20)?;
        }
        let Row { should, did, missed, duplicated, .. } = self.total;
        let verdict = if self.passed() { "passed" } else { "failed" };
        write!(
            f,
            "check {verdict}: {} sent, {did} of {should} deliveries, {missed} missed, {duplicated} duplicated",
            self.sent
        )
    }
}

/// What all clients share.
struct Shared {
    addresses: Vec<SocketAddr>,
    rooms: usize,
    ledger: Mutex<Ledger>,
    /// Notified at every receipt and delivery.
    progress: Notify,
    /// One permit a message that may be sent now.
    allowance: Semaphore,
    next: Mutex<usize>,
    /// Messages kept for a burst.
    kept: Mutex<usize>,
}

impl Shared {
    /// Releases what was kept and returns when the first of it has been confirmed.
    async fn burst(&self) -> Result<(), Failure> {
        let confirmed = self.ledger.lock().confirmed_count() + 1;
        self.allowance.add_permits(std::mem::take(&mut *self.kept.lock()));
        until(self, || self.ledger.lock().confirmed_count() >= confirmed, "the first receipt of a burst")
            .await
    }
}

/// What the conductor tells a client.
enum Order {
    /// Connect to this node and leave the present one.
    Move(usize, oneshot::Sender<()>),
    /// Answer when everything that the node had queued for this client before has been read.
    Settle(oneshot::Sender<()>),
    /// The node is about to crash: nothing more is due from it.
    Brace(usize, oneshot::Sender<()>),
}

/// Runs the check.
pub(crate) async fn run(plan: &Plan) -> Result<Report, Failure> {
    let stage = Stage::start(plan.place.clone(), plan.nodes).await?;
    let shared = Arc::new(Shared {
        addresses: stage.addresses(),
        rooms: plan.rooms,
        ledger: Mutex::default(),
        progress: Notify::new(),
        allowance: Semaphore::new(0),
        next: Mutex::new(0),
        kept: Mutex::new(0),
    });
    let mut dice = Dice::new(plan.seed);
    let mut clients = Vec::new();
    for number in 0..plan.nodes * plan.clients_per_node {
        let mut rooms = HashSet::new();
        while rooms.len() < plan.rooms_per_client.min(plan.rooms) {
            rooms.insert(dice.roll(plan.rooms));
        }
        clients.push(Client::start(shared.clone(), number, number % plan.nodes, rooms).await?);
    }
    let outcome = tokio::time::timeout(PATIENCE * 6, conduct(plan, &stage, &shared, &clients)).await;
    let trouble = match outcome {
        Ok(Ok(())) => Vec::new(),
        Ok(Err(error)) => vec![error.to_string()],
        Err(_) => vec![format!(
            "the check did not end: {} messages confirmed",
            shared.ledger.lock().confirmed_count()
        )],
    };
    clients.iter().for_each(|client| client.task.abort());
    stage.shutdown().await;
    let account = shared.ledger.lock().account(plan.nodes);
    Ok(report(account, trouble))
}

async fn conduct(
    plan: &Plan,
    stage: &Stage,
    shared: &Arc<Shared>,
    clients: &[ClientHandle],
) -> Result<(), Failure> {
    let victim = plan.nodes - 1;
    let name = format!("n{}", victim + 1);
    let home: Vec<_> = clients.iter().filter(|client| client.home == victim).collect();
    let part = plan.messages / 6;
    let go_home = async || {
        stage.start_node(&name).await?;
        stage.until_all_ready().await?;
        for client in &home {
            client.order(|done| Order::Move(victim, done)).await?;
        }
        Ok(())
    };
    during(shared, part, async { Ok(()) }).await?;
    during(shared, part, stage.stop_node(&name, Stop::Orderly)).await?;
    during(shared, part, go_home()).await?;
    during(shared, part, async {
        // In this order: what was confirmed before the mark has been read by its members when the node goes.
        for client in &home {
            client.order(|done| Order::Brace(victim, done)).await?;
        }
        for client in &home {
            client.order(Order::Settle).await?;
        }
        // Into the middle of a burst, so that there are messages without a receipt.
        shared.burst().await?;
        stage.stop_node(&name, Stop::Crash).await?;
        stage.until_all_ready().await
    })
    .await?;
    during(shared, part, go_home()).await?;
    during(shared, plan.messages - 5 * part, stage.restart_network()).await?;
    settle(shared, clients).await
}

/// Lets `messages` flow from before `change` until after it, and waits for both.
async fn during(
    shared: &Shared,
    messages: usize,
    change: impl Future<Output = Result<(), Failure>>,
) -> Result<(), Failure> {
    let confirmed = shared.ledger.lock().confirmed_count() + messages;
    // A part of them is under way when the change begins, a part comes drop by drop, a part is kept for a
    // burst, or for after the change.
    let part = messages / 3;
    shared.allowance.add_permits(part);
    *shared.kept.lock() = part;
    let mut dripping = messages - 2 * part;
    let mut drip = tokio::time::interval(Duration::from_millis(1));
    tokio::pin!(change);
    loop {
        tokio::select! {
            result = &mut change => break result?,
            _ = drip.tick(), if dripping > 0 => {
                dripping -= 1;
                shared.allowance.add_permits(1);
            }
        }
    }
    shared.allowance.add_permits(dripping + std::mem::take(&mut *shared.kept.lock()));
    until(shared, || shared.ledger.lock().confirmed_count() >= confirmed, "receipts").await
}

async fn until(shared: &Shared, holds: impl Fn() -> bool, what: &str) -> Result<(), Failure> {
    loop {
        let progress = shared.progress.notified();
        tokio::pin!(progress);
        progress.as_mut().enable();
        if holds() {
            return Ok(());
        }
        if tokio::time::timeout(PATIENCE, progress).await.is_err() {
            return Err(format!("no progress for {} s while waiting for {what}", PATIENCE.as_secs()).into());
        }
    }
}

/// Waits until everything due has come, and a little longer for what should not come.
async fn settle(shared: &Arc<Shared>, clients: &[ClientHandle]) -> Result<(), Failure> {
    for client in clients {
        client.order(Order::Settle).await?;
    }
    loop {
        let progress = shared.progress.notified();
        tokio::pin!(progress);
        progress.as_mut().enable();
        let wait = if shared.ledger.lock().open() == 0 { SILENCE } else { Duration::from_secs(5) };
        if tokio::time::timeout(wait, progress).await.is_err() {
            return Ok(());
        }
    }
}

fn report(account: Account, mut trouble: Vec<String>) -> Report {
    let mut lines = vec![
        "node  memberships  should receive  did receive  allowed either way  missed  duplicated".to_owned(),
    ];
    let mut total = Row::default();
    for (number, row) in account.rows.iter().enumerate() {
        lines.push(format!(
            "n{:<4} {:>11} {:>15} {:>12} {:>19} {:>7} {:>11}",
            number + 1,
            row.memberships,
            row.should,
            row.did,
            row.allowed,
            row.missed,
            row.duplicated
        ));
        total.memberships += row.memberships;
        total.should += row.should;
        total.did += row.did;
        total.allowed += row.allowed;
        total.again += row.again;
        total.missed += row.missed;
        total.duplicated += row.duplicated;
    }
    lines.push(format!(
        "{} of {} messages were flooded while the view changed, the others targeted; {} were sent again after a \
         crash ({} second copies, dropped by their id); allowed either way: the member came or went meanwhile",
        account.flooded, account.sent, account.resent, total.again
    ));
    trouble.extend(account.trouble);
    Report { lines, sent: account.sent, total, trouble }
}

/// The conductor's end of a client.
struct ClientHandle {
    home: usize,
    orders: mpsc::UnboundedSender<Order>,
    task: tokio::task::JoinHandle<()>,
}

impl ClientHandle {
    async fn order(&self, order: impl FnOnce(oneshot::Sender<()>) -> Order) -> Result<(), Failure> {
        let (done, answer) = oneshot::channel();
        self.orders.send(order(done)).map_err(|_| "a client has ended early")?;
        tokio::time::timeout(PATIENCE, answer)
            .await
            .map_err(|_| "a client does not follow its orders")?
            .map_err(|_| "a client has ended early".into())
    }
}

/// What a client waits for on a connection, by `re`.
enum Pending {
    Join { membership: usize, room: usize },
    Leave,
    Say { message: usize },
    Echo(oneshot::Sender<()>),
}

/// One connection of a client.
struct Connection {
    node: usize,
    sink: Sink,
    reader: tokio::task::JoinHandle<()>,
    memberships: HashMap<usize, usize>,
    joining: HashSet<usize>,
    pending: HashMap<u64, Pending>,
    /// It only waits for its receipts, and leaves then.
    ending: bool,
}

/// What a connection's reader passes on: frames, then `None`.
type Heard = (u64, Option<String>);

/// A user who talks in some rooms.
struct Client {
    shared: Arc<Shared>,
    number: usize,
    user: Arc<str>,
    rooms: HashSet<usize>,
    connections: HashMap<u64, Connection>,
    /// The connection that is used to send.
    primary: Option<u64>,
    /// The one that will be, when its rooms are joined, and who waits for that.
    coming: Option<(u64, Option<oneshot::Sender<()>>)>,
    heard: mpsc::UnboundedSender<Heard>,
    /// Messages without a receipt, and their rooms.
    open: HashMap<usize, usize>,
    next: u64,
}

/// The events that a client reads; see `wire::Event`.
#[derive(Deserialize)]
#[serde(tag = "is", rename_all = "lowercase")]
enum Read {
    Ok {
        re: u64,
    },
    Sent {
        re: u64,
        decision: String,
    },
    Failed {
        re: Option<u64>,
        why: String,
    },
    Said {
        room: String,
        to: Vec<String>,
        said: ReadSaid,
    },
    Going,
    #[serde(other)]
    Other,
}

#[derive(Deserialize)]
struct ReadSaid {
    id: String,
    text: String,
}

fn text_of(message: usize) -> String {
    format!("message {message}, {}", "as it was said. ".repeat(message % 7))
}

impl Client {
    async fn start(
        shared: Arc<Shared>,
        number: usize,
        home: usize,
        rooms: HashSet<usize>,
    ) -> Result<ClientHandle, Failure> {
        let (heard, mut hearing) = mpsc::unbounded_channel();
        let (orders, mut ordered) = mpsc::unbounded_channel();
        let mut client = Self {
            shared,
            number,
            user: format!("client-{number}").into(),
            rooms,
            connections: HashMap::new(),
            primary: None,
            coming: None,
            heard,
            open: HashMap::new(),
            next: 1,
        };
        client.connect(home, None).await?;
        while client.primary.is_none() {
            let heard = tokio::time::timeout(PATIENCE, hearing.recv()).await?;
            client.hear(heard.ok_or("no connection")?).await?;
        }
        let task = tokio::spawn(async move {
            if let Err(error) = client.live(&mut hearing, &mut ordered).await {
                client.shared.ledger.lock().trouble(format!("{}: {error}", client.user));
            }
        });
        Ok(ClientHandle { home, orders, task })
    }

    async fn live(
        &mut self,
        hearing: &mut mpsc::UnboundedReceiver<Heard>,
        ordered: &mut mpsc::UnboundedReceiver<Order>,
    ) -> Result<(), Failure> {
        let shared = self.shared.clone();
        loop {
            let may_send = self.primary.is_some() && self.open.len() < WINDOW;
            tokio::select! {
                Some(heard) = hearing.recv() => self.hear(heard).await?,
                // One that is on its way to a node arrives there first.
                order = ordered.recv(), if self.primary.is_some() && self.coming.is_none() => match order {
                    Some(order) => self.follow(order).await?,
                    None => return Ok(()),
                },
                permit = shared.allowance.acquire(), if may_send => {
                    permit?.forget();
                    self.say_next().await?;
                }
            }
            shared.progress.notify_waiters();
        }
    }

    async fn follow(&mut self, order: Order) -> Result<(), Failure> {
        match order {
            Order::Move(node, done) => self.connect(node, Some(done)).await,
            Order::Settle(done) => {
                let Some(primary) = self.primary else {
                    return Err("not connected when everything should be settled".into());
                };
                self.ask(primary, Pending::Echo(done), |re| Command::Echo { re }).await
            }
            Order::Brace(node, done) => {
                let on_node = self.connections.values().filter(|connection| connection.node == node);
                let mut ledger = self.shared.ledger.lock();
                on_node
                    .flat_map(|connection| connection.memberships.values())
                    .for_each(|one| ledger.leaves(*one));
                drop(ledger);
                let _asked_no_more = done.send(());
                Ok(())
            }
        }
    }

    /// Where to go from this node; not all clients to the same one.
    fn elsewhere(&self, node: usize) -> usize {
        let nodes = self.shared.addresses.len();
        (node + 1 + self.number / nodes % (nodes - 1).max(1)) % nodes
    }

    /// Opens a connection and joins all rooms over it; when that is done, it is the one to use.
    async fn connect(&mut self, first: usize, done: Option<oneshot::Sender<()>>) -> Result<(), Failure> {
        let nodes = self.shared.addresses.len();
        for step in 0..nodes * 50 {
            let node = (first + step) % nodes;
            let Ok((sink, stream)) = client::connect(self.shared.addresses[node]).await else {
                // Each node was tried: they may all be busy with the change.
                if step % nodes == nodes - 1 {
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
                continue;
            };
            let id = self.next;
            self.next += 1;
            let reader = tokio::spawn(read(id, stream, self.heard.clone()));
            let connection = Connection {
                node,
                sink,
                reader,
                memberships: HashMap::new(),
                joining: self.rooms.clone(),
                pending: HashMap::new(),
                ending: false,
            };
            self.connections.insert(id, connection);
            self.coming = Some((id, done));
            for room in self.rooms.clone() {
                self.join(id, room).await?;
            }
            return Ok(());
        }
        Err("no node takes a connection".into())
    }

    async fn join(&mut self, id: u64, room: usize) -> Result<(), Failure> {
        let Some(node) = self.connections.get(&id).map(|connection| connection.node) else { return Ok(()) };
        let membership = self.shared.ledger.lock().asked(node, room);
        if let Some(connection) = self.connections.get_mut(&id) {
            connection.memberships.insert(room, membership);
        }
        let user = self.user.clone();
        self.ask(id, Pending::Join { membership, room }, |re| Command::Join {
            re,
            user,
            name: "".into(),
            room: room_name(room),
            quiet: true,
        })
        .await
    }

    /// Sends a command; if the connection has ended, its reader will say so.
    async fn ask(
        &mut self,
        id: u64,
        pending: Pending,
        command: impl FnOnce(u64) -> Command,
    ) -> Result<(), Failure> {
        let re = self.next;
        self.next += 1;
        let text = serde_json::to_string(&command(re))?;
        if let Some(connection) = self.connections.get_mut(&id) {
            connection.pending.insert(re, pending);
            let _ended = client::send(&mut connection.sink, text).await;
        }
        Ok(())
    }

    async fn say_next(&mut self) -> Result<(), Failure> {
        let message = {
            let mut next = self.shared.next.lock();
            *next += 1;
            *next - 1
        };
        let room = Dice::new(message as u64).roll(self.shared.rooms);
        self.open.insert(message, room);
        self.say(message, room).await
    }

    async fn say(&mut self, message: usize, room: usize) -> Result<(), Failure> {
        let Some(primary) = self.primary else { return Ok(()) };
        self.shared.ledger.lock().sends(message, room);
        let user = self.user.clone();
        self.ask(primary, Pending::Say { message }, |re| Command::Say {
            re,
            user,
            name: "".into(),
            room: room_name(room),
            id: message.to_string().into(),
            text: text_of(message),
        })
        .await
    }

    /// Sends what has no receipt and no connection that could still bring one.
    async fn say_again(&mut self) -> Result<(), Failure> {
        let waiting: HashSet<_> = self
            .connections
            .values()
            .flat_map(|connection| connection.pending.values())
            .filter_map(|pending| match pending {
                Pending::Say { message } => Some(*message),
                _ => None,
            })
            .collect();
        for (message, room) in self.open.clone() {
            if !waiting.contains(&message) {
                self.say(message, room).await?;
            }
        }
        Ok(())
    }

    async fn hear(&mut self, (id, text): Heard) -> Result<(), Failure> {
        let Some(text) = text else { return self.closed(id).await };
        for event in serde_json::from_str::<Vec<Read>>(&text)? {
            match event {
                Read::Ok { re } => self.answered(id, re).await?,
                Read::Sent { re, decision } => {
                    if let Some(Pending::Say { message }) = self.pending(id, re) {
                        self.shared.ledger.lock().confirmed(message, decision == "flooded");
                        self.open.remove(&message);
                        self.end_if_done(id).await?;
                    }
                }
                Read::Failed { re, why } => self.refused(id, re, &why).await?,
                Read::Said { room, to, said } => self.received(id, &room, &to, &said),
                Read::Going => {
                    if self.primary == Some(id) && self.coming.is_none() {
                        let node = self.connections.get(&id).map_or(0, |connection| connection.node);
                        self.connect(self.elsewhere(node), None).await?;
                    }
                }
                Read::Other => {}
            }
        }
        Ok(())
    }

    fn pending(&mut self, id: u64, re: u64) -> Option<Pending> {
        self.connections.get_mut(&id)?.pending.remove(&re)
    }

    async fn answered(&mut self, id: u64, re: u64) -> Result<(), Failure> {
        match self.pending(id, re) {
            Some(Pending::Join { membership, room }) => {
                self.shared.ledger.lock().joined(membership);
                let joined = self.connections.get_mut(&id).is_some_and(|connection| {
                    connection.joining.remove(&room);
                    connection.joining.is_empty()
                });
                if joined {
                    self.arrived(id).await?;
                }
            }
            Some(Pending::Leave) => self.close_if_left(id).await?,
            Some(Pending::Echo(done)) => {
                let _asked_no_more = done.send(());
            }
            Some(Pending::Say { .. }) | None => return Err("an answer to no question".into()),
        }
        Ok(())
    }

    async fn refused(&mut self, id: u64, re: Option<u64>, why: &str) -> Result<(), Failure> {
        match re.and_then(|re| self.pending(id, re)) {
            // As the page does: the same question a little later.
            Some(Pending::Join { membership, room }) => {
                self.shared.ledger.lock().leaves(membership);
                tokio::time::sleep(Duration::from_millis(100)).await;
                self.join(id, room).await
            }
            Some(Pending::Say { message }) => Err(format!("message {message} was refused: {why}").into()),
            Some(Pending::Leave | Pending::Echo(_)) | None => Err(format!("refused: {why}").into()),
        }
    }

    fn received(&mut self, id: u64, room: &str, to: &[String], said: &ReadSaid) {
        let mut ledger = self.shared.ledger.lock();
        let Some(connection) = self.connections.get(&id) else { return };
        let number = room.strip_prefix("check-").and_then(|room| room.parse::<usize>().ok());
        let message = said.id.parse::<usize>().ok();
        let membership = number.and_then(|room| connection.memberships.get(&room));
        let (Some(room), Some(message), Some(membership)) = (number, message, membership) else {
            ledger.trouble(format!(
                "{}: something of {room:?} that nobody here waits for: {:?}",
                self.user, said.id
            ));
            return;
        };
        if said.text != text_of(message) {
            ledger.trouble(format!("message {message} arrived changed: {:?}", said.text));
        }
        for user in to {
            if **user == *self.user {
                ledger.received(*membership, room, message);
            } else {
                ledger.trouble(format!("message {message} came to {}, for {user}", self.user));
            }
        }
    }

    /// All rooms are joined over this connection: it is used from now on, and the one before may end.
    async fn arrived(&mut self, id: u64) -> Result<(), Failure> {
        let Some((_, done)) = self.coming.take_if(|(coming, _)| *coming == id) else { return Ok(()) };
        let old = self.primary.replace(id);
        match old {
            Some(old) => {
                if let Some(connection) = self.connections.get_mut(&old) {
                    connection.ending = true;
                }
                self.end_if_done(old).await?;
            }
            None => {
                // The connection before was cut: what it did not confirm is said again.
                self.say_again().await?;
            }
        }
        if let Some(done) = done {
            let _asked_no_more = done.send(());
        }
        Ok(())
    }

    /// A connection that is no longer used leaves its rooms once its receipts are here.
    async fn end_if_done(&mut self, id: u64) -> Result<(), Failure> {
        let Some(connection) = self.connections.get_mut(&id) else { return Ok(()) };
        let waits = connection.pending.values().any(|pending| matches!(pending, Pending::Say { .. }));
        if !connection.ending || waits {
            return Ok(());
        }
        let memberships = connection.memberships.clone();
        for (room, membership) in memberships {
            self.shared.ledger.lock().leaves(membership);
            let user = self.user.clone();
            self.ask(id, Pending::Leave, |re| Command::Leave { re, user, room: room_name(room) }).await?;
        }
        Ok(())
    }

    async fn close_if_left(&mut self, id: u64) -> Result<(), Failure> {
        if let Some(connection) = self.connections.get_mut(&id)
            && connection.pending.is_empty()
        {
            let _ended = client::send(&mut connection.sink, Frame::Close(None)).await;
        }
        Ok(())
    }

    /// The connection is closed and everything that came over it has been read.
    async fn closed(&mut self, id: u64) -> Result<(), Failure> {
        let Some(connection) = self.connections.remove(&id) else { return Ok(()) };
        connection.reader.abort();
        {
            let mut ledger = self.shared.ledger.lock();
            connection.memberships.values().for_each(|membership| ledger.leaves(*membership));
        }
        let next = self.elsewhere(connection.node);
        if self.coming.as_ref().is_some_and(|(coming, _)| *coming == id) {
            let done = self.coming.take().and_then(|(_, done)| done);
            return self.connect(next, done).await;
        }
        if self.primary == Some(id) {
            self.primary = None;
            if self.coming.is_none() {
                return self.connect(next, None).await;
            }
            return Ok(());
        }
        self.say_again().await
    }
}

fn room_name(room: usize) -> Arc<str> {
    format!("check-{room}").into()
}

async fn read(id: u64, mut stream: Stream, heard: mpsc::UnboundedSender<Heard>) {
    while let Some(Ok(frame)) = stream.next().await {
        if let Frame::Text(text) = frame {
            let _client_ended = heard.send((id, Some(text.as_str().to_owned())));
        }
    }
    let _client_ended = heard.send((id, None));
}
