//! A relay that holds back what it passes on: a delay with jitter, drawn from a seed.
#![allow(unreachable_pub, clippy::unwrap_used, reason = "a helper of tests")]

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

const DELAY: Duration = Duration::from_millis(50);
const JITTER: u64 = 30_000;

pub struct Relay {
    address: String,
    ended: Arc<AtomicBool>,
    carried: Arc<AtomicU64>,
}

impl Relay {
    /// Takes connections at `from` and makes one to `to` for each.
    pub fn start(from: &str, to: &str, seed: u64) -> Self {
        let listener = TcpListener::bind(from).unwrap();
        let (ended, carried) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let relay = Self { address: from.into(), ended: ended.clone(), carried: carried.clone() };
        let to = to.to_owned();
        std::thread::spawn(move || {
            let mut seed = seed;
            for stream in listener.incoming().map_while(Result::ok) {
                if ended.load(Ordering::SeqCst) {
                    return;
                }
                // nobody there: the one who dials finds the connection closed, as without a relay
                let Ok(onward) = TcpStream::connect(&to) else { continue };
                for (from, to) in [(&stream, &onward), (&onward, &stream)] {
                    seed += 1;
                    pass(from.try_clone().unwrap(), to.try_clone().unwrap(), seed, carried.clone());
                }
            }
        });
        relay
    }

    /// Bytes so far.
    pub fn carried(&self) -> u64 {
        self.carried.load(Ordering::SeqCst)
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::SeqCst);
        // wakes the one who accepts
        let _woken = TcpStream::connect(&self.address);
    }
}

/// One direction of one connection: each piece leaves at its time, in order.
fn pass(mut from: TcpStream, mut to: TcpStream, seed: u64, carried: Arc<AtomicU64>) {
    // at most 256 pieces wait, as in the buffers of a network
    let (sender, pieces) = mpsc::sync_channel::<(Instant, Vec<u8>)>(256);
    std::thread::spawn(move || {
        let mut random = seed;
        let mut buffer = vec![0; 16 * 1024];
        while let Ok(length) = from.read(&mut buffer) {
            if length == 0 {
                break;
            }
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let due = Instant::now() + DELAY + Duration::from_micros((random >> 33) % JITTER);
            if sender.send((due, buffer[..length].to_vec())).is_err() {
                break;
            }
        }
        let _closed = from.shutdown(Shutdown::Read);
    });
    std::thread::spawn(move || {
        for (due, piece) in pieces {
            std::thread::sleep(due.saturating_duration_since(Instant::now()));
            carried.fetch_add(piece.len() as u64, Ordering::SeqCst);
            if to.write_all(&piece).is_err() {
                break;
            }
        }
        let _closed = to.shutdown(Shutdown::Both);
    });
}
