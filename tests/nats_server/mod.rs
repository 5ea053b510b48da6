//! A real `nats-server`, and a wire to it that can be cut, for the tests of the NATS transport.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod process;

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

pub use process::{NatsServer, is_installed};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    Open,
    /// Nothing moves, and nobody is told.
    Frozen,
    /// No connection, and none is made.
    Cut,
}

/// Stands between one client and the server.
pub struct Proxy {
    address: SocketAddr,
    /// With a number that tells two cuts apart.
    mode: Arc<watch::Sender<(Mode, u64)>>,
    accepting: tokio::task::JoinHandle<()>,
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.cut();
        self.accepting.abort();
    }
}

impl Proxy {
    pub async fn to(server: SocketAddr) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.expect("a free port");
        let address = listener.local_addr().expect("bound");
        let mode = Arc::new(watch::Sender::new((Mode::Open, 0)));
        let accepting = tokio::spawn(accept(listener, server, mode.clone()));
        Self { address, mode, accepting }
    }

    pub fn url(&self) -> String {
        format!("nats://{}", self.address)
    }

    pub fn cut(&self) {
        self.mode.send_modify(|(mode, number)| (*mode, *number) = (Mode::Cut, *number + 1));
    }

    pub fn heal(&self) {
        self.mode.send_modify(|(mode, _)| *mode = Mode::Open);
    }

    /// Breaks the connection once.
    pub fn blip(&self) {
        self.mode.send_modify(|(_, number)| *number += 1);
    }

    pub fn freeze(&self) {
        self.mode.send_modify(|(mode, _)| *mode = Mode::Frozen);
    }
}

async fn accept(listener: TcpListener, server: SocketAddr, mode: Arc<watch::Sender<(Mode, u64)>>) {
    loop {
        let Ok((client, _)) = listener.accept().await else { continue };
        let (now, number) = *mode.borrow();
        if now == Mode::Cut {
            continue;
        }
        let mode = mode.subscribe();
        tokio::spawn(async move {
            let Ok(server) = TcpStream::connect(server).await else { return };
            let _ = (client.set_nodelay(true), server.set_nodelay(true));
            let ((from_client, to_client), (from_server, to_server)) =
                (client.into_split(), server.into_split());
            let mut broken = mode.clone();
            tokio::select! {
                () = pass(from_client, to_server, mode.clone()) => {}
                () = pass(from_server, to_client, mode) => {}
                _ = broken.wait_for(|(_, later)| *later != number) => {}
            }
        });
    }
}

async fn pass(mut from: OwnedReadHalf, mut to: OwnedWriteHalf, mut mode: watch::Receiver<(Mode, u64)>) {
    let mut buffer = vec![0; 64 << 10];
    loop {
        let Ok(read) = from.read(&mut buffer).await else { return };
        if read == 0 || mode.wait_for(|(mode, _)| *mode != Mode::Frozen).await.is_err() {
            return;
        }
        if to.write_all(&buffer[..read]).await.is_err() {
            return;
        }
    }
}
