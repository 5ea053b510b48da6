//! A network of relays on loopback, so that connections can be broken, held up and refused without privileges.
//!
//! Each node is reached through a relay of its own, whose address it advertises. Who dials is read from the
//! preamble, which is why this works without TLS only.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::Arc;

use muster_router::transport::Transport;
use muster_router::transport::tcp::TcpTransport;
use parking_lot::Mutex;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::AbortHandle;

/// Magic, version, kind and length.
const PREAMBLE_HEADER: usize = 10;

#[derive(Default)]
struct State {
    lives: BTreeMap<String, Vec<Arc<TcpTransport>>>,
    relays: BTreeMap<String, SocketAddr>,
    /// Connections by pair; a cut one is aborted, which closes its sockets.
    connections: Vec<([String; 2], AbortHandle)>,
    cuts: BTreeSet<[String; 2]>,
    /// Whoever is told of a cut, and of whom: the other end's sockets stay open.
    told: watch::Sender<BTreeSet<[String; 2]>>,
    gone: BTreeSet<String>,
}

#[derive(Clone)]
pub(crate) struct Relays {
    state: Arc<Mutex<State>>,
    /// Who is frozen.
    frozen: watch::Sender<BTreeSet<String>>,
}

fn pair(a: &str, b: &str) -> [String; 2] {
    let mut pair = [a.to_owned(), b.to_owned()];
    pair.sort();
    pair
}

impl Relays {
    pub(crate) fn new() -> Self {
        Self { state: Arc::default(), frozen: watch::Sender::new(BTreeSet::new()) }
    }

    /// The address of the relay in front of this node, which exists from now on.
    pub(crate) async fn front(&self, node: &str) -> SocketAddr {
        if let Some(there) = self.state.lock().relays.get(node) {
            return *there;
        }
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        self.state.lock().relays.insert(node.to_owned(), address);
        let (relays, node) = (self.clone(), node.to_owned());
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(relays.clone().relay(stream, node.clone()));
            }
        });
        address
    }

    /// All relays so far.
    pub(crate) fn fronts(&self) -> Vec<SocketAddr> {
        self.state.lock().relays.values().copied().collect()
    }

    /// Another life of the node is made; the earlier ones get no connections any more once it runs.
    pub(crate) fn born(&self, node: &str, life: Arc<TcpTransport>) {
        let mut state = self.state.lock();
        state.gone.remove(node);
        state.lives.entry(node.to_owned()).or_default().push(life);
    }

    pub(crate) fn blip(&self, a: &str, b: &str) {
        let pair = pair(a, b);
        self.state.lock().connections.retain(|(between, connection)| {
            if *between == pair {
                connection.abort();
            }
            *between != pair && !connection.is_finished()
        });
    }

    pub(crate) fn cut(&self, a: &str, b: &str) {
        self.state.lock().cuts.insert(pair(a, b));
        self.blip(a, b);
    }

    /// Closes the sockets of `a` only: `b` is at a connection from which nothing comes any more.
    pub(crate) fn cut_seen_by(&self, a: &str, b: &str) {
        let mut state = self.state.lock();
        state.cuts.insert(pair(a, b));
        state.told.send_modify(|told| {
            told.insert([a.to_owned(), b.to_owned()]);
        });
    }

    pub(crate) fn heal(&self, a: &str, b: &str) {
        let mut state = self.state.lock();
        state.cuts.remove(&pair(a, b));
        state.told.send_modify(|told| told.retain(|[one, other]| pair(one, other) != pair(a, b)));
    }

    /// Nothing of this node gets out any more, also no goodbye.
    pub(crate) async fn crash(&self, node: &str) {
        let lives = {
            let mut state = self.state.lock();
            state.gone.insert(node.to_owned());
            for (between, connection) in &state.connections {
                if between.iter().any(|end| end == node) {
                    connection.abort();
                }
            }
            state.lives.remove(node).unwrap_or_default()
        };
        for life in lives {
            life.shutdown().await;
        }
    }

    pub(crate) fn freeze(&self, node: &str, freeze: bool) {
        self.frozen.send_modify(|frozen| {
            if freeze {
                frozen.insert(node.to_owned())
            } else {
                frozen.remove(node)
            };
        });
    }

    async fn relay(self, mut stream: TcpStream, to: String) {
        let _ = stream.set_nodelay(true);
        let Some((from, read)) = who(&mut stream).await else { return };
        let between = pair(&from, &to);
        let real = {
            let state = self.state.lock();
            let shut = state.cuts.contains(&between) || between.iter().any(|end| state.gone.contains(end));
            let lives = state.lives.get(&to);
            lives.filter(|_| !shut).and_then(|lives| lives.iter().rev().find_map(|life| life.local_addr()))
        };
        let Some(real) = real else { return };
        let Ok(mut onward) = TcpStream::connect(real).await else { return };
        let _ = onward.set_nodelay(true);
        if onward.write_all(&read).await.is_err() {
            return;
        }
        let ((mut there, mut back), (mut answer, mut on)) = (stream.into_split(), onward.into_split());
        let mut told = self.state.lock().told.subscribe();
        let frozen = self.frozen.clone();
        let ends = between.clone();
        let pumps = tokio::spawn(async move {
            let both = async {
                tokio::join!(
                    pump(&mut there, &mut on, frozen.subscribe(), &ends),
                    pump(&mut answer, &mut back, frozen.subscribe(), &ends)
                );
            };
            let [dialled, dialler] = [[to.clone(), from.clone()], [from, to]];
            let first = tokio::select! {
                () = both => return,
                first = async {
                    let told = told.wait_for(|told| told.contains(&dialled) || told.contains(&dialler)).await;
                    told.is_ok_and(|told| told.contains(&dialler))
                } => first,
            };
            if first {
                drop((there, back));
            } else {
                drop((answer, on));
            }
            // what is left stays open until the end at it closes it or the test is over
            std::future::pending::<()>().await;
        });
        let mut state = self.state.lock();
        let shut = state.cuts.contains(&between) || between.iter().any(|end| state.gone.contains(end));
        if shut {
            pumps.abort();
        }
        state.connections.retain(|(_, connection)| !connection.is_finished());
        state.connections.push((between, pumps.abort_handle()));
    }
}

/// Who dials, and what was read to find out.
async fn who(stream: &mut TcpStream) -> Option<(String, Vec<u8>)> {
    let mut read = Vec::new();
    loop {
        if stream.read_buf(&mut read).await.ok()? == 0 {
            return None;
        }
        let Some((length, rest)) = read.get(PREAMBLE_HEADER..).and_then(<[u8]>::split_first) else {
            continue;
        };
        if let Some(name) = rest.get(..usize::from(*length)) {
            return Some((String::from_utf8_lossy(name).into_owned(), read.clone()));
        }
    }
}

async fn pump(
    from: &mut OwnedReadHalf,
    to: &mut OwnedWriteHalf,
    mut frozen: watch::Receiver<BTreeSet<String>>,
    ends: &[String; 2],
) {
    let mut bytes = vec![0; 64 << 10];
    loop {
        let moves = frozen.wait_for(|frozen| !ends.iter().any(|end| frozen.contains(end)));
        if moves.await.is_err() {
            return;
        }
        let Ok(read @ 1..) = from.read(&mut bytes).await else { break };
        let moves = frozen.wait_for(|frozen| !ends.iter().any(|end| frozen.contains(end)));
        if moves.await.is_err() {
            return;
        }
        if to.write_all(&bytes[..read]).await.is_err() {
            break;
        }
    }
    let _ = to.shutdown().await;
}
