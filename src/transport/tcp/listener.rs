//! Who may come in: the socket that is listened on, and what a stranger can cost before it is known.
//!
//! ```text
//!   accept ──▶ gate: too many pending, or from this address? ──▶ closed, counted
//!                │
//!                ▼  within the deadline
//!              preamble, proof ──▶ refused, counted by cause
//!                │
//!                ▼
//!              a connection
//! ```

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use bytes::BytesMut;
use parking_lot::Mutex;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use super::auth::{Handshake, RefusalCause, Reject, Role, Step};
use super::builder::TcpLimits;
use super::connection::{self, Reading, Writing};
use super::mesh::{Alive, Mesh};
use super::preamble::Preamble;
use super::tls::TlsOptions;
use crate::types::NodeId;

/// After an accept that failed (no file descriptors, mostly), how long before the next one.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// How long a refused end may take to read why.
const LAST_WORDS: Duration = Duration::from_millis(500);

/// Counts who is in a handshake.
#[derive(Debug)]
pub(super) struct Gate {
    total: usize,
    per_ip: usize,
    pending: Mutex<Pending>,
}

#[derive(Debug, Default)]
struct Pending {
    total: usize,
    by_ip: BTreeMap<IpAddr, usize>,
}

/// One handshake that may go on.
#[derive(Debug)]
pub(super) struct Pass {
    gate: Arc<Gate>,
    ip: IpAddr,
}

impl Gate {
    pub(super) fn new(limits: &TcpLimits) -> Arc<Self> {
        let (total, per_ip) = (limits.pending_handshakes, limits.pending_per_ip);
        Arc::new(Self { total, per_ip, pending: Mutex::default() })
    }

    /// `None`: too many already.
    pub(super) fn enter(self: &Arc<Self>, ip: IpAddr) -> Option<Pass> {
        let ip = ip.to_canonical();
        let mut pending = self.pending.lock();
        if pending.total >= self.total {
            return None;
        }
        let here = pending.by_ip.entry(ip).or_insert(0);
        if *here >= self.per_ip {
            return None;
        }
        *here += 1;
        pending.total += 1;
        Some(Pass { gate: self.clone(), ip })
    }
}

impl Drop for Pass {
    fn drop(&mut self) {
        let mut pending = self.gate.pending.lock();
        pending.total = pending.total.saturating_sub(1);
        if let Some(here) = pending.by_ip.get_mut(&self.ip) {
            *here = here.saturating_sub(1);
            if *here == 0 {
                pending.by_ip.remove(&self.ip);
            }
        }
    }
}

/// Takes connections until this life ends.
pub(super) async fn listen(mesh: Arc<Mesh>, alive: Alive, ours: Preamble, listener: TcpListener) {
    let gate = Gate::new(&mesh.settings.limits);
    loop {
        let accepted = tokio::select! {
            biased;
            () = mesh.stopped() => return,
            accepted = listener.accept() => accepted,
        };
        let (stream, from) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                if mesh.counted.is_news("accept", &error) {
                    tracing::warn!(me = %mesh.settings.node, %error, "could not accept a connection");
                }
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        mesh.counted.accepted();
        let Some(pass) = gate.enter(from.ip()) else {
            mesh.counted.refused(RefusalCause::TooMany);
            continue;
        };
        let (mesh, alive, ours) = (mesh.clone(), alive.clone(), ours.clone());
        tokio::spawn(async move {
            let accepted = tokio::select! {
                biased;
                () = mesh.stopped() => return,
                accepted = greet(&mesh, Role::Acceptor, &ours, stream) => accepted,
            };
            drop(pass);
            match accepted {
                Ok(greeted) => open(&mesh, &alive, greeted),
                Err(reject) => refused(&mesh, &from.ip().to_canonical().to_string(), &reject),
            }
        });
    }
}

/// Counts a refusal, and logs it once for each end and cause. `who`: an address, since a name proves nothing yet.
pub(super) fn refused(mesh: &Mesh, who: &str, reject: &Reject) {
    mesh.counted.refused(reject.cause());
    if matches!(reject, Reject::Itself) {
        return;
    }
    if mesh.counted.is_news_from(who, reject.node(), &reject.cause()) {
        tracing::warn!(me = %mesh.settings.node, who, %reject, "connection refused");
    }
}

/// An authenticated connection, and what was read beyond the handshake.
pub(super) struct Greeted {
    pub(super) peer: Preamble,
    io: (Reading, Writing),
    rest: BytesMut,
}

/// Makes a connection of it; `false` if there may be no more.
pub(super) fn open(mesh: &Arc<Mesh>, alive: &Alive, greeted: Greeted) {
    let Greeted { peer, io, rest } = greeted;
    // what cannot be dialled is no news for anybody
    let nowhere = SocketAddr::from(([0, 0, 0, 0], 0));
    let advertise = peer.advertise.parse().unwrap_or(nowhere);
    match mesh.open(peer.node, advertise) {
        Some(connection) => connection::spawn(mesh, alive, &connection, io, rest),
        None => mesh.counted.refused(RefusalCause::TooMany),
    }
}

/// Brings a connection through its handshake, within the deadline.
///
/// # Errors
/// Why it was refused; the other end has been told, if it may know.
pub(super) async fn greet(
    mesh: &Mesh,
    role: Role,
    ours: &Preamble,
    stream: TcpStream,
) -> Result<Greeted, Reject> {
    let _ = stream.set_nodelay(true);
    let deadline = mesh.settings.limits.handshake_timeout;
    match tokio::time::timeout(deadline, shake(mesh, role, ours, stream)).await {
        Ok(done) => done,
        Err(_) => Err(Reject::Deadline),
    }
}

async fn shake(mesh: &Mesh, role: Role, ours: &Preamble, stream: TcpStream) -> Result<Greeted, Reject> {
    let mut nonce = [0; 32];
    getrandom::fill(&mut nonce).map_err(|_| Reject::Malformed { what: "no random number here" })?;
    let settings = &mesh.settings;
    let machine = Handshake::new(role, ours.clone(), settings.secret.as_ref(), nonce);
    let Some(tls) = &settings.tls else {
        let (reading, writing) = stream.into_split();
        return exchange(machine, None, Box::new(reading), Box::new(writing)).await;
    };
    let (stream, peer) = match role {
        Role::Dialer => tls.connect(stream).await?,
        Role::Acceptor => tls.accept(stream).await?,
    };
    let (reading, writing) = tokio::io::split(stream);
    exchange(machine.over_tls(peer), Some(tls), Box::new(reading), Box::new(writing)).await
}

async fn exchange(
    mut machine: Handshake,
    tls: Option<&TlsOptions>,
    mut reading: Reading,
    mut writing: Writing,
) -> Result<Greeted, Reject> {
    let broken = |error: std::io::Error| tls.map_or(Reject::Closed, |tls| tls.reject_of(&error));
    let mut bytes = BytesMut::with_capacity(1024);
    loop {
        match machine.handle(&mut bytes) {
            Ok(Step::Send(words)) => {
                // if that fails, the end of the input says so, and before it may come the reason
                if writing.write_all(&words).await.is_ok() {
                    let _ = writing.flush().await;
                }
            }
            Ok(Step::NeedMore) => {
                if reading.read_buf(&mut bytes).await.map_err(broken)? == 0 {
                    return Err(Reject::Closed);
                }
            }
            Ok(Step::Done { peer }) => return Ok(Greeted { peer, io: (reading, writing), rest: bytes }),
            Err(reject) => {
                if reject.is_ours_to_say() {
                    let _ = tokio::time::timeout(LAST_WORDS, say(&reject, &mut reading, &mut writing)).await;
                }
                return Err(reject);
            }
        }
    }
}

/// Says why, and waits until the other end has heard it: closed too early, the words would be lost.
async fn say(reject: &Reject, reading: &mut Reading, writing: &mut Writing) -> std::io::Result<()> {
    writing.write_all(&reject.encode()).await?;
    writing.shutdown().await?;
    let mut ignored = [0; 512];
    while reading.read(&mut ignored).await? > 0 {}
    Ok(())
}

/// For a log: who was dialled.
pub(super) fn name(node: Option<&NodeId>, address: SocketAddr) -> String {
    match node {
        Some(node) => format!("{node} at {address}"),
        None => address.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_gate_counts_all_and_each_address() {
        let limits = TcpLimits { pending_handshakes: 3, pending_per_ip: 2, ..TcpLimits::default() };
        let gate = Gate::new(&limits);
        let ip = |last: u8| IpAddr::from([10, 0, 0, last]);
        let mapped: IpAddr = "::ffff:10.0.0.1".parse().unwrap();
        let first = gate.enter(ip(1)).expect("nobody is there");
        let second = gate.enter(mapped).expect("two are allowed from one address");
        assert!(gate.enter(ip(1)).is_none(), "a third from that address, written in either way");
        let _third = gate.enter(ip(2)).expect("another address");
        assert!(gate.enter(ip(3)).is_none(), "three in all");
        drop(second);
        let _fourth = gate.enter(ip(1)).expect("one has left");
        drop(first);
        drop((_third, _fourth));
        let pending = gate.pending.lock();
        assert_eq!((pending.total, pending.by_ip.len()), (0, 0), "nothing is kept of who has left");
    }
}
