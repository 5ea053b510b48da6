//! The two tasks of a connection: one reads, one writes.

use std::collections::VecDeque;
use std::fmt::Display;
use std::io::{self, IoSlice};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::sync::{Notify, watch};
use tokio::time::Instant;

use super::mesh::{Alive, Mesh, Polled, Read};
use super::record::{self, Batch, Record};
use crate::transport::link::RawId;
use crate::types::NodeId;

/// How much is read at once, in bytes, if that much has come.
const READ: usize = 64 << 10;
/// A long record makes the buffer grow by no more than this before its bytes have come.
const GROWTH: usize = 1 << 20;
/// How long a connection that is to be closed may take to write its last words, and the other end to close it.
const LINGER: Duration = Duration::from_secs(1);
/// A connection that has rested for less is busy: what it writes next waits until the tasks that are ready have run.
const BUSY: Duration = Duration::from_micros(100);
/// How many messages of the mesh may wait to be written; more are dropped and counted.
const MAX_MESSAGES: usize = 256;

pub(super) type Reading = Box<dyn AsyncRead + Send + Unpin>;
pub(super) type Writing = Box<dyn AsyncWrite + Send + Unpin>;

/// A connection whose other end has proved its name.
pub(super) struct Connection {
    pub(super) raw: RawId,
    pub(super) node: NodeId,
    /// Where it says that others reach it.
    pub(super) advertise: SocketAddr,
    /// Wakes the one who writes.
    pub(super) wake: Notify,
    /// It was woken for what the links have, and has not looked since. Touched under the lock of the links only.
    pub(super) woken: AtomicBool,
    messages: Mutex<VecDeque<Bytes>>,
    /// When its tasks have to end.
    deadline: watch::Sender<Option<Instant>>,
}

impl Connection {
    pub(super) fn new(raw: RawId, node: NodeId, advertise: SocketAddr) -> Self {
        Self {
            raw,
            node,
            advertise,
            wake: Notify::new(),
            woken: AtomicBool::new(false),
            messages: Mutex::default(),
            deadline: watch::Sender::new(None),
        }
    }

    /// It is to be closed: its tasks end when they are done, or after a while.
    pub(super) fn end_soon(&self) {
        self.end_at(Instant::now() + LINGER);
    }

    pub(super) fn end_now(&self) {
        self.end_at(Instant::now());
    }

    fn end_at(&self, at: Instant) {
        self.deadline.send_if_modified(|deadline| {
            let earlier = deadline.is_none_or(|there| at < there);
            if earlier {
                *deadline = Some(at);
            }
            earlier
        });
    }

    /// Puts a message of the mesh on its way; `false`: dropped, as too many wait.
    pub(super) fn tell(&self, message: Bytes) -> bool {
        let mut messages = self.messages.lock();
        let room = messages.len() < MAX_MESSAGES;
        if room {
            messages.push_back(message);
        }
        drop(messages);
        self.wake.notify_one();
        room
    }

    fn put_back(&self, mut earlier: VecDeque<Bytes>) {
        let mut messages = self.messages.lock();
        earlier.append(&mut messages);
        *messages = earlier;
    }
}

/// Starts both tasks. `rest`: what has been read already.
pub(super) fn spawn(
    mesh: &Arc<Mesh>,
    alive: &Alive,
    connection: &Arc<Connection>,
    io: (Reading, Writing),
    rest: BytesMut,
) {
    let reader = Reader { mesh: mesh.clone(), connection: connection.clone(), io: io.0, buffer: rest };
    let writer = Writer { mesh: mesh.clone(), connection: connection.clone(), io: io.1 };
    let reading = alive.clone();
    tokio::spawn(async move {
        reader.run().await;
        drop(reading);
    });
    let writing = alive.clone();
    tokio::spawn(async move {
        writer.run().await;
        drop(writing);
    });
}

/// Returns at the deadline.
async fn overdue(deadline: &mut watch::Receiver<Option<Instant>>) {
    loop {
        let at = *deadline.borrow_and_update();
        let changed = match at {
            Some(at) => tokio::time::timeout_at(at, deadline.changed()).await,
            None => Ok(deadline.changed().await),
        };
        match changed {
            // the connection itself is gone
            Err(_) | Ok(Err(_)) => return,
            Ok(Ok(())) => {}
        }
    }
}

struct Reader {
    mesh: Arc<Mesh>,
    connection: Arc<Connection>,
    io: Reading,
    buffer: BytesMut,
}

/// Also when the runtime ends the task, or a report panics.
impl Drop for Reader {
    fn drop(&mut self) {
        self.mesh.closed(&self.connection);
    }
}

impl Reader {
    async fn run(mut self) {
        let mut deadline = self.connection.deadline.subscribe();
        let mut read = Read::default();
        loop {
            // also before the first read: the handshake may have read more than its own
            if let Err(error) = self.decode(&mut read) {
                self.mesh.counted.malformed();
                self.log(&error);
                return;
            }
            if !read.packets.is_empty() || !read.messages.is_empty() {
                self.mesh.received(&self.connection, &mut read).await;
            }
            let more = record::missing(&self.buffer).clamp(READ, GROWTH);
            self.buffer.reserve(more);
            let came = tokio::select! {
                biased;
                came = self.io.read_buf(&mut self.buffer) => came,
                () = overdue(&mut deadline) => return,
            };
            match came {
                Ok(0) | Err(_) => return,
                Ok(bytes) => self.mesh.counted.read(bytes),
            }
        }
    }

    fn decode(&mut self, read: &mut Read) -> Result<(), record::Malformed> {
        let max_frame = self.mesh.settings.link.max_frame;
        let mut whole = record::split_whole(&mut self.buffer, max_frame)?;
        while let Some(record) = record::decode(&mut whole)? {
            match record {
                Record::Packet(packet) => read.packets.push(packet),
                Record::Message(message) => read.messages.push_back(message),
                Record::Unknown => {
                    self.mesh.counted.unknown_record();
                    self.log(&"a record of a kind that is unknown here");
                }
            }
        }
        Ok(())
    }

    /// Once for each peer and cause.
    fn log(&self, strange: &dyn Display) {
        let (mesh, node) = (&self.mesh, &self.connection.node);
        if mesh.counted.is_news(node.as_str(), strange) {
            let me = &mesh.settings.node;
            tracing::warn!(%me, %node, %strange, "strange input; more of this sort is counted only");
        }
    }
}

struct Writer {
    mesh: Arc<Mesh>,
    connection: Arc<Connection>,
    io: Writing,
}

impl Writer {
    async fn run(mut self) {
        let mut deadline = self.connection.deadline.subscribe();
        if self.write_all(&mut deadline).await.is_err() {
            // what the other end has said before may still be there to be read
            self.connection.end_soon();
        }
    }

    async fn write_all(&mut self, deadline: &mut watch::Receiver<Option<Instant>>) -> io::Result<()> {
        let mut batch = Batch::default();
        loop {
            // taken before and written after: the word that makes a link must not come behind the first message
            let messages = std::mem::take(&mut *self.connection.messages.lock());
            let polled = self.mesh.output(&self.connection, &mut batch);
            if polled == Polled::Later {
                self.connection.put_back(messages);
            } else {
                messages.into_iter().for_each(|message| batch.message(message));
            }
            self.write(&mut batch, deadline).await?;
            match polled {
                Polled::More => {}
                Polled::Closed => {
                    // the end of the stream comes after the last words; the other task reads on until the other
                    // end has closed too, or what it has not read would take the last words with it
                    return tokio::select! {
                        biased;
                        done = self.io.shutdown() => done,
                        () = overdue(deadline) => Err(io::ErrorKind::TimedOut.into()),
                    };
                }
                Polled::Idle | Polled::Later => {
                    let rest = Instant::now();
                    tokio::select! {
                        biased;
                        () = self.connection.wake.notified() => {}
                        () = overdue(deadline) => return Ok(()),
                    }
                    if rest.elapsed() < BUSY {
                        // others are about to add to what is to be written: it shall be one write
                        tokio::task::yield_now().await;
                    }
                }
            }
        }
    }

    async fn write(
        &mut self,
        batch: &mut Batch,
        deadline: &mut watch::Receiver<Option<Instant>>,
    ) -> io::Result<()> {
        while !batch.is_empty() {
            let mut slices: Vec<IoSlice<'_>> = Vec::new();
            batch.slices(&mut slices);
            let written = tokio::select! {
                biased;
                written = self.io.write_vectored(&slices) => written?,
                () = overdue(deadline) => return Err(io::ErrorKind::TimedOut.into()),
            };
            if written == 0 {
                return Err(io::ErrorKind::WriteZero.into());
            }
            self.mesh.counted.written(written);
            batch.written(written);
        }
        // over TLS a write may still lie in a buffer
        tokio::select! {
            biased;
            flushed = self.io.flush() => flushed,
            () = overdue(deadline) => Err(io::ErrorKind::TimedOut.into()),
        }
    }
}
