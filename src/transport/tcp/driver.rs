//! The task of the mesh: timers, discovery, dials, and the end.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::TcpStream;
use tokio::sync::mpsc;

use super::auth::{Reject, Role};
use super::discovery::{Action, Book, Outcome, Target};
use super::listener::{self, greet, refused};
use super::mesh::{Alive, Event, Mesh, Phase};
use super::preamble::Preamble;
use crate::transport::link::{RawId, Time};
use crate::types::NodeId;

/// A timer that is so late shows that this process has been standing still.
const STOOD_STILL: Duration = Duration::from_millis(100);
/// Then so much time is given to what has arrived meanwhile, before silence is held against anybody.
const CATCH_UP: Duration = Duration::from_millis(20);
/// A life that has had to take a higher incarnation has begun anew; so long it may take to link.
const REBORN: Duration = Duration::from_millis(500);

/// What a task that was started here has brought about.
enum Done {
    Dialled(SocketAddr, Outcome),
    Resolved(String, Vec<SocketAddr>),
}

pub(super) struct Driver {
    mesh: Arc<Mesh>,
    alive: Alive,
    ours: Preamble,
    book: Book,
    done: (mpsc::UnboundedSender<Done>, mpsc::UnboundedReceiver<Done>),
    /// Discovery has settled, but this life has just begun anew.
    settles: Option<Time>,
    reborn: Option<Time>,
    /// On which connection each linked node was told whom we know.
    told: BTreeMap<NodeId, RawId>,
}

impl Driver {
    pub(super) fn new(mesh: Arc<Mesh>, alive: Alive, ours: Preamble, book: Book) -> Self {
        // bounded by what the book asks for at once
        let done = mpsc::unbounded_channel();
        Self { mesh, alive, ours, book, done, settles: None, reborn: None, told: BTreeMap::new() }
    }

    pub(super) async fn run(mut self) {
        loop {
            if let Some(live) = self.mesh.expelled() {
                self.alive.send_replace(Phase::Superseded(live));
                self.mesh.stop();
            }
            if self.mesh.is_stopping() {
                self.leave();
                self.mesh.goodbye();
                return;
            }
            let due = self.turn();
            if let Some(due) = due.filter(|due| *due <= self.mesh.now()) {
                self.timers(due).await;
                continue;
            }
            let mesh = self.mesh.clone();
            let timer = async {
                match due {
                    Some(due) => tokio::time::sleep_until(mesh.instant(due)).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                biased;
                () = mesh.stopped() => {}
                // before the wake, which a peer that never pauses gives in every turn; of these there are only as many
                // as were asked for
                Some(done) = self.done.1.recv() => self.done(done),
                () = mesh.wake.notified() => {}
                () = timer => {}
            }
        }
    }

    /// In every turn in which one is due, and not when nothing else is to be done: a peer that always has something
    /// to say would put off the timers of all others.
    async fn timers(&self, due: Time) {
        if self.mesh.now() > due + STOOD_STILL {
            tokio::time::sleep(CATCH_UP).await;
        }
        self.mesh.input(|state, now| state.links.handle_timeout(now));
        // something that is due and stays so must not take the thread for itself
        tokio::task::yield_now().await;
    }

    /// Does what is due; when to come back.
    fn turn(&mut self) -> Option<Time> {
        for event in self.mesh.take_events() {
            self.event(event);
        }
        let now = self.mesh.now();
        self.book.handle_timeout(now);
        while let Some(action) = self.book.poll_action() {
            self.act(action, now);
        }
        if self.settles.is_some_and(|at| at <= now) {
            self.settle();
        }
        *self.mesh.counted.discovery.lock() = self.book.stats();
        if self.book.poll_members_changed() {
            *self.mesh.members.lock() = self.book.members().into();
        }
        let mut state = self.mesh.state.lock();
        let due =
            [state.links.poll_timeout(), self.book.poll_timeout(), self.settles].into_iter().flatten().min();
        state.alarm = due;
        due
    }

    fn event(&mut self, event: Event) {
        let now = self.mesh.now();
        match event {
            Event::Check(node) => {
                let (held, live) = {
                    let state = self.mesh.state.lock();
                    let live = state.links.connection(&node).and_then(|raw| state.connections.get(&raw));
                    let held = state.connections.values().any(|connection| connection.node == node);
                    (held, live.map(|connection| (connection.raw, connection.advertise)))
                };
                match live {
                    Some((raw, advertise)) => {
                        self.settles = self.settles.map(|_| now);
                        self.reborn = None;
                        self.book.handle_linked(&node, advertise, now);
                        if self.told.insert(node.clone(), raw).is_some_and(|told| told != raw) {
                            // what was on its way on the connection before may be lost
                            self.book.handle_reconnected(&node, now);
                        }
                    }
                    // one is on its way, or on its way out: then there is another look when it is gone
                    None if held => {}
                    None => {
                        self.told.remove(&node);
                        self.book.handle_unlinked(&node, now);
                    }
                }
            }
            Event::Message(node, message) => self.book.handle_message(&node, &message, now),
            Event::Reborn => {
                tracing::info!(me = %self.mesh.settings.node, "known already: going on under a higher incarnation");
                self.reborn = Some(now);
                let me = self.mesh.state.lock().links.me().clone();
                self.book.handle_reborn(me, now);
            }
        }
    }

    /// What the book has to say before the connections say goodbye.
    fn leave(&mut self) {
        self.book.handle_leaving(self.mesh.now());
        while let Some(action) = self.book.poll_action() {
            match action {
                Action::Send(node, message) => self.mesh.tell(&node, message),
                Action::Dial(_) | Action::Resolve(_) | Action::Settled => {}
            }
        }
    }

    fn act(&mut self, action: Action, now: Time) {
        match action {
            Action::Dial(target) => self.dial(target),
            Action::Resolve(name) => self.resolve(name),
            Action::Send(node, message) => self.mesh.tell(&node, message),
            Action::Settled => self.settles = Some(self.reborn.map_or(now, |at| at + REBORN)),
        }
    }

    fn settle(&mut self) {
        self.settles = None;
        self.mesh.inbound.discovery_settled();
        self.alive.send_replace(Phase::Running);
    }

    fn done(&mut self, done: Done) {
        let now = self.mesh.now();
        match done {
            Done::Dialled(address, outcome) => {
                let answered = match &outcome {
                    Outcome::Answered(node) => Some(node.clone()),
                    Outcome::Failed => None,
                };
                self.book.handle_dialled(address, outcome, now);
                // the connection may have led to a link, or to none, before its dial was told
                if let Some(node) = answered.filter(|node| *node != self.mesh.settings.node) {
                    self.event(Event::Check(node));
                }
            }
            Done::Resolved(name, answer) => self.book.handle_resolved(&name, &answer, now),
        }
    }

    fn resolve(&self, name: String) {
        let (done, mesh, alive) = (self.done.0.clone(), self.mesh.clone(), self.alive.clone());
        tokio::spawn(async move {
            let limit = mesh.settings.limits.connect_timeout;
            let lookup = tokio::time::timeout(limit, mesh.settings.resolver.resolve(&name));
            let answer = tokio::select! {
                biased;
                () = mesh.stopped() => return,
                answer = lookup => answer,
            };
            let answer = match answer {
                Ok(Ok(answer)) => answer,
                Ok(Err(error)) => {
                    if mesh.counted.is_news(&name, &error) {
                        tracing::warn!(me = %mesh.settings.node, name, %error, "a name was not resolved");
                    }
                    Vec::new()
                }
                Err(_) => Vec::new(),
            };
            let _ = done.send(Done::Resolved(name, answer));
            drop(alive);
        });
    }

    fn dial(&self, target: Target) {
        let done = self.done.0.clone();
        let (mesh, alive, ours) = (self.mesh.clone(), self.alive.clone(), self.ours.clone());
        tokio::spawn(async move {
            let outcome = tokio::select! {
                biased;
                () = mesh.stopped() => return,
                outcome = dial(&mesh, &alive, &ours, &target) => outcome,
            };
            let _ = done.send(Done::Dialled(target.address, outcome));
        });
    }
}

async fn dial(mesh: &Arc<Mesh>, alive: &Alive, ours: &Preamble, target: &Target) -> Outcome {
    mesh.counted.dialled();
    let address = target.address;
    let connect = tokio::time::timeout(mesh.settings.limits.connect_timeout, TcpStream::connect(address));
    let stream = match connect.await {
        Ok(Ok(stream)) => stream,
        Ok(Err(error)) => {
            tracing::debug!(me = %mesh.settings.node, %address, %error, "nobody answers");
            mesh.counted.failed_dial();
            return Outcome::Failed;
        }
        Err(_) => {
            mesh.counted.failed_dial();
            return Outcome::Failed;
        }
    };
    match greet(mesh, Role::Dialer, ours, stream).await {
        Ok(greeted) => {
            let node = greeted.peer.node.clone();
            listener::open(mesh, alive, greeted);
            Outcome::Answered(node)
        }
        Err(Reject::Itself) => {
            refused(mesh, "itself", &Reject::Itself);
            Outcome::Answered(mesh.settings.node.clone())
        }
        Err(reject) => {
            mesh.counted.failed_dial();
            refused(mesh, &listener::name(target.node.as_ref(), address), &reject);
            Outcome::Failed
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Weak;

    use super::super::TcpTransport;
    use super::super::discovery;
    use super::*;
    use crate::transport::{Frame, Inbound, Receiver, Terms};
    use crate::types::Peer;

    /// A router that nobody tells anything.
    struct Nobody;

    impl Receiver for Nobody {
        fn peer_up(&self, _: Peer) {}
        fn peer_suspect(&self, _: &Peer) {}
        fn peer_resumed(&self, _: &Peer) {}
        fn peer_down(&self, _: &Peer) {}
        fn discovery_settled(&self) {}
        fn frame(&self, _: &Peer, _: Frame) {}
    }

    fn driver() -> (TcpTransport, Arc<Mesh>, Driver) {
        let transport = TcpTransport::builder("a").listen("127.0.0.1:0").build().unwrap();
        let terms = Terms { scope: "s".into(), vnodes: 8, protocol: 1 };
        let (mesh, alive) = transport.begin(Inbound::new(Weak::<Nobody>::new(), terms)).unwrap();
        let me = mesh.state.lock().links.me().clone();
        let advertise: SocketAddr = "127.0.0.1:1".parse().unwrap();
        let ours = Preamble {
            node: me.node.clone(),
            scope: "s".into(),
            advertise: advertise.to_string(),
            instance: 1,
        };
        let config = discovery::Config {
            me,
            advertise,
            seeds: Vec::new(),
            dns: Vec::new(),
            options: Default::default(),
            gossip: None,
        };
        let driver = Driver::new(mesh.clone(), alive, ours, Book::new(config, 1));
        (transport, mesh, driver)
    }

    /// Timers had their turn only when nothing else was to be done. A peer that sent messages of the mesh without a
    /// pause put off the deadlines of all others.
    #[tokio::test(start_paused = true)]
    async fn a_flood_does_not_put_off_timers() {
        let (_transport, mesh, driver) = driver();
        let quiet = mesh.open(NodeId::new("quiet").unwrap(), "127.0.0.1:2".parse().unwrap()).unwrap();
        let flood = driver.done.0.clone();
        let task = tokio::spawn(driver.run());
        tokio::task::yield_now().await;
        // far more than is taken while this task waits for its turn below
        for _ in 0..200_000 {
            assert!(flood.send(Done::Resolved(String::new(), Vec::new())).is_ok());
        }
        assert!(!mesh.state.lock().links.is_closing(quiet.raw));
        tokio::time::advance(mesh.settings.link.handshake_timeout).await;
        tokio::task::yield_now().await;
        assert!(mesh.state.lock().links.is_closing(quiet.raw), "nobody has said hello there in time");
        mesh.stop();
        task.await.unwrap();
    }

    #[test]
    fn messages_that_nobody_writes_are_bounded_and_counted() {
        let (_transport, mesh, _driver) = driver();
        let connection = mesh.open(NodeId::new("b").unwrap(), "127.0.0.1:2".parse().unwrap()).unwrap();
        let taken = (0..1000).filter(|_| connection.tell("m".into())).count();
        assert_eq!(taken, 256);
    }
}
