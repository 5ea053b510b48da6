//! The floors: what the same machine does with bare tokio sockets, between the conductor and a bare process.
//!
//! A connection says by its first byte what it is for; all numbers are little-endian.
//!
//! ```text
//! e: requests | length: u32 | length of the answer: u32 | bytes |, answered in order by so many bytes
//! s: frames   | length: u32 | bytes |, counted; after the end their number comes back
//! f: the same on the other listener: each frame is given to 100 channels, and what their tasks read is counted
//! ```

use std::collections::VecDeque;
use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytes::{Buf, BufMut, Bytes, BytesMut};
use hdrhistogram::Histogram;
use parking_lot::Mutex;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::{Builder, Runtime};
use tokio::sync::{Notify, mpsc, oneshot};

use super::process::Process;
use super::words::*;

/// How much is read or written at once, in bytes.
const CHUNK: usize = 64 << 10;
const CHANNELS: usize = 100;

/// The bare process.
pub(crate) fn main() {
    let (sender, fan) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let runtime = Builder::new_multi_thread().enable_all().build().unwrap();
        runtime.block_on(listen(move |address| sender.send(address).unwrap()));
    });
    let runtime = Builder::new_current_thread().enable_all().build().unwrap();
    std::thread::spawn(|| {
        for _ in std::io::stdin().lines().map_while(Result::ok) {}
        std::process::exit(0);
    });
    runtime.block_on(listen(move |echo| {
        let answer = Answer::Listening { echo, fan: fan.recv().unwrap() };
        let mut out = std::io::stdout();
        writeln!(out, "{}", serde_json::to_string(&answer).unwrap()).and_then(|()| out.flush()).unwrap();
    }));
}

async fn listen(ready: impl FnOnce(String)) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    ready(listener.local_addr().unwrap().to_string());
    loop {
        let (mut socket, _) = listener.accept().await.unwrap();
        tokio::spawn(async move {
            socket.set_nodelay(true)?;
            match socket.read_u8().await? {
                b'e' => echo(socket).await,
                b's' => sink(socket).await,
                _ => fan(socket).await,
            }
        });
    }
}

async fn echo(mut socket: TcpStream) -> std::io::Result<()> {
    let (mut input, mut output) = (BytesMut::with_capacity(CHUNK), Vec::with_capacity(CHUNK));
    loop {
        while let Some((&length, &answer)) = header(&input).as_ref().map(|(a, b)| (a, b)) {
            if input.len() < 8 + length {
                break;
            }
            input.advance(8 + length);
            output.resize(output.len() + answer, b'.');
        }
        if !output.is_empty() {
            socket.write_all(&output).await?;
            output.clear();
        }
        input.reserve(CHUNK);
        if socket.read_buf(&mut input).await? == 0 {
            return Ok(());
        }
    }
}

fn header(input: &[u8]) -> Option<(usize, usize)> {
    let word = |from: usize| Some(u32::from_le_bytes(input.get(from..from + 4)?.try_into().ok()?) as usize);
    Some((word(0)?, word(4)?))
}

/// Calls back with each frame, without a copy, until the other end has sent its last.
async fn frames(socket: &mut TcpStream, mut each: impl FnMut(Bytes)) -> std::io::Result<()> {
    let mut input = BytesMut::with_capacity(CHUNK);
    loop {
        while let Some(head) = input.first_chunk::<4>() {
            let length = u32::from_le_bytes(*head) as usize;
            if input.len() < 4 + length {
                break;
            }
            input.advance(4);
            each(input.split_to(length).freeze());
        }
        input.reserve(CHUNK);
        if socket.read_buf(&mut input).await? == 0 {
            return Ok(());
        }
    }
}

async fn sink(mut socket: TcpStream) -> std::io::Result<()> {
    let (mut count, before) = (0, busy());
    frames(&mut socket, |_| count += 1).await?;
    socket.write_u64_le(count).await?;
    socket.write_u64_le(busy() - before).await
}

async fn fan(mut socket: TcpStream) -> std::io::Result<()> {
    let counted = Arc::new(AtomicU64::new(0));
    let mut readers = tokio::task::JoinSet::new();
    let mut senders = Vec::new();
    for _ in 0..CHANNELS {
        let (sender, mut receiver) = mpsc::unbounded_channel::<Bytes>();
        let counted = counted.clone();
        readers.spawn(async move {
            while receiver.recv().await.is_some() {
                counted.fetch_add(1, Ordering::Relaxed);
            }
        });
        senders.push(sender);
    }
    frames(&mut socket, |frame| senders.iter().for_each(|sender| drop(sender.send(frame.clone())))).await?;
    drop(senders);
    while readers.join_next().await.is_some() {}
    socket.write_u64_le(counted.load(Ordering::SeqCst)).await?;
    socket.write_u64_le(0).await
}

/// The conductor's end.
pub(crate) struct Bare {
    _process: Process,
    echo: String,
    fan: String,
    /// As many workers as a node has.
    many: Runtime,
    one: Runtime,
}

impl Bare {
    pub(crate) fn start() -> Self {
        let mut process = Process::spawn("bare", "bare");
        let Answer::Listening { echo, fan } = process.hear() else { panic!("no address") };
        let many = Builder::new_multi_thread().enable_all().build().unwrap();
        let one = Builder::new_current_thread().enable_all().build().unwrap();
        Self { _process: process, echo, fan, many, one }
    }

    /// Answers a second to so many callers on one connection, each of whom waits for one at a time.
    pub(crate) fn ping_pongs(&self, callers: usize, request: usize, answer: usize, time: Duration) -> f64 {
        let socket = self.many.block_on(connect(&self.echo, b'e'));
        self.many.block_on(ping_pongs(socket, callers, request.max(8), answer.max(1), time))
    }

    /// Frames a second of one sender that fills whole buffers, and the processor time of a frame at both ends.
    pub(crate) fn frames(&self, size: usize, time: Duration) -> (f64, f64) {
        self.one.block_on(async { send_frames(connect(&self.echo, b's').await, size, time).await })
    }

    /// Deliveries a second of one sender whose frames go to 100 channels each.
    pub(crate) fn fan_out(&self, size: usize, time: Duration) -> f64 {
        self.one.block_on(async { send_frames(connect(&self.fan, b'f').await, size, time).await }).0
    }

    /// How long so many bytes take, until the other end says that it has them.
    pub(crate) fn transfer(&self, bytes: usize) -> Duration {
        self.one.block_on(async {
            let mut socket = connect(&self.echo, b's').await;
            let mut chunk = BytesMut::new();
            chunk.put_u32_le(u32::try_from(CHUNK).unwrap() - 4);
            chunk.resize(CHUNK, b'.');
            let began = Instant::now();
            let mut left = bytes;
            while left > 0 {
                let part = left.min(CHUNK);
                socket.write_all(&chunk[..part]).await.unwrap();
                left -= part;
            }
            socket.shutdown().await.unwrap();
            socket.read_u64_le().await.unwrap();
            began.elapsed()
        })
    }

    /// There and back at fixed times; one and ninety-nine hundredths take no longer than these.
    pub(crate) fn round_trips(&self, a_second: u64, size: usize, time: Duration) -> (Nanos, Nanos) {
        let mut histogram: Histogram<u64> = Histogram::new(3).unwrap();
        self.one.block_on(async {
            let mut socket = connect(&self.echo, b'e').await;
            let request = request(size.max(8), size.max(8));
            let mut answer = vec![0; size.max(8)];
            let (began, period) = (now(), 1_000_000_000 / a_second);
            for number in 1..=time.as_nanos() as u64 / period {
                let due = began + number * period;
                super::wait_until(due);
                socket.write_all(&request).await.unwrap();
                socket.read_exact(&mut answer).await.unwrap();
                histogram.record(now().saturating_sub(due).max(1)).unwrap();
            }
        });
        (histogram.value_at_quantile(0.5), histogram.value_at_quantile(0.99))
    }

    /// How long after a `kill -9` of the other end its socket says that it is closed.
    pub(crate) fn close(&self) -> Duration {
        let mut process = Process::spawn("bare", "killed");
        let Answer::Listening { echo, .. } = process.hear() else { panic!("no address") };
        self.many.block_on(async {
            let mut socket = connect(&echo, b'e').await;
            let closed = tokio::spawn(async move {
                let _end = socket.read_u8().await;
                Instant::now()
            });
            let began = Instant::now();
            tokio::task::block_in_place(|| process.kill());
            closed.await.unwrap() - began
        })
    }
}

async fn connect(address: &str, purpose: u8) -> TcpStream {
    let mut socket = TcpStream::connect(address).await.unwrap();
    socket.set_nodelay(true).unwrap();
    socket.write_u8(purpose).await.unwrap();
    socket
}

/// Its whole length is `length`, if that is enough for the header.
fn request(length: usize, answer: usize) -> Vec<u8> {
    let mut request = Vec::with_capacity(length);
    request.put_u32_le(u32::try_from(length - 8).unwrap());
    request.put_u32_le(u32::try_from(answer).unwrap());
    request.resize(length, b'.');
    request
}

async fn send_frames(mut socket: TcpStream, size: usize, time: Duration) -> (f64, f64) {
    let before = busy();
    let payload = Bytes::from(vec![b'.'; size]);
    let mut buffer = BytesMut::with_capacity(CHUNK + size + 4);
    let began = Instant::now();
    while began.elapsed() < time {
        while buffer.len() < CHUNK {
            buffer.put_u32_le(u32::try_from(size).unwrap());
            buffer.extend_from_slice(&payload);
        }
        socket.write_all(&buffer).await.unwrap();
        buffer.clear();
    }
    socket.shutdown().await.unwrap();
    let count = socket.read_u64_le().await.unwrap() as f64;
    let took = began.elapsed().as_secs_f64();
    let spent = socket.read_u64_le().await.unwrap() + busy() - before;
    (count / took, seconds(spent) / count)
}

#[derive(Default)]
struct Shared {
    output: Mutex<Vec<u8>>,
    waiting: Mutex<VecDeque<oneshot::Sender<()>>>,
    wake: Notify,
    ended: AtomicBool,
}

async fn ping_pongs(socket: TcpStream, callers: usize, length: usize, answer: usize, time: Duration) -> f64 {
    let (mut reading, mut writing) = socket.into_split();
    let shared = Arc::new(Shared::default());
    let writer = tokio::spawn({
        let shared = shared.clone();
        async move {
            let mut buffer = Vec::new();
            while !shared.ended.load(Ordering::SeqCst) {
                std::mem::swap(&mut buffer, &mut *shared.output.lock());
                if buffer.is_empty() {
                    shared.wake.notified().await;
                } else {
                    writing.write_all(&buffer).await.unwrap();
                    buffer.clear();
                }
            }
        }
    });
    let reader = tokio::spawn({
        let shared = shared.clone();
        async move {
            let mut input = BytesMut::with_capacity(CHUNK);
            while reading.read_buf(&mut input).await.unwrap() > 0 {
                let come = input.len() / answer;
                input.advance(come * answer);
                let ready: Vec<_> = shared.waiting.lock().drain(..come).collect();
                for waiter in ready {
                    // all of them wait until their answer has come
                    waiter.send(()).unwrap();
                }
            }
        }
    });
    let request = Arc::new(request(length, answer));
    let began = Instant::now();
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..callers {
        let (shared, request) = (shared.clone(), request.clone());
        tasks.spawn(async move {
            let mut count = 0u64;
            while began.elapsed() < time {
                let (sender, receiver) = oneshot::channel();
                {
                    // in the order of the requests
                    let mut output = shared.output.lock();
                    output.extend_from_slice(&request);
                    shared.waiting.lock().push_back(sender);
                }
                shared.wake.notify_one();
                receiver.await.unwrap();
                count += 1;
            }
            count
        });
    }
    let mut all = 0;
    while let Some(count) = tasks.join_next().await {
        all += count.unwrap();
    }
    let rate = all as f64 / began.elapsed().as_secs_f64();
    shared.ended.store(true, Ordering::SeqCst);
    shared.wake.notify_one();
    let _done = writer.await;
    reader.abort();
    rate
}
