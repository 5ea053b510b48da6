//! What happened so far, in numbers.

use std::collections::BTreeSet;
use std::fmt::Display;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use super::auth::RefusalCause;
use super::discovery::DiscoveryStats;
use crate::transport::link::LinkStats;
use crate::types::NodeId;

/// How many different pieces of news are remembered; when there are more, all are news again.
const NEWS: usize = 4096;
/// How many of them may be about names that one address claims.
const NEWS_OF_ADDRESS: usize = 64;

/// What a [`TcpTransport`](super::TcpTransport) has been through since it was made. Links and discovery count
/// anew with each start.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct TcpStats {
    /// Connections that others have made.
    pub accepted: u64,
    /// Connections that were made to others.
    pub dialled: u64,
    /// Dials that nobody answered, or that were refused.
    pub failed_dials: u64,
    /// Connections that are open now and have passed authentication.
    pub connections: usize,
    /// Connections of authenticated peers that brought bytes which make no sense; each was closed.
    pub malformed: u64,
    /// Records of kinds that this version does not know; ignored.
    pub unknown_records: u64,
    /// Messages of the mesh, from peers or to them, that were dropped because too many waited.
    pub dropped_messages: u64,
    /// Bytes read from peers, before TLS is added.
    pub bytes_in: u64,
    /// Bytes written to peers, before TLS is added.
    pub bytes_out: u64,
    /// Reads; without TLS each is one system call.
    pub reads: u64,
    /// Writes; without TLS each is one system call.
    pub writes: u64,
    /// What the links have been through.
    pub link: LinkStats,
    /// What discovery has been through.
    pub discovery: DiscoveryStats,
    pub(super) refused: [u64; RefusalCause::ALL.len()],
}

impl TcpStats {
    /// How many connections were refused for this cause, by this node or by the other end.
    pub fn refused(&self, cause: RefusalCause) -> u64 {
        self.refused.get(cause.index()).copied().unwrap_or(0)
    }

    /// How many were refused at all.
    pub fn all_refused(&self) -> u64 {
        self.refused.iter().sum()
    }
}

/// Counts, from any thread.
#[derive(Debug, Default)]
pub(super) struct Counted {
    accepted: AtomicU64,
    dialled: AtomicU64,
    failed_dials: AtomicU64,
    malformed: AtomicU64,
    unknown_records: AtomicU64,
    dropped_messages: AtomicU64,
    bytes_in: AtomicU64,
    bytes_out: AtomicU64,
    reads: AtomicU64,
    writes: AtomicU64,
    refused: [AtomicU64; RefusalCause::ALL.len()],
    news: Mutex<BTreeSet<(String, String)>>,
    pub(super) discovery: Mutex<DiscoveryStats>,
}

fn add(counter: &AtomicU64, more: u64) {
    counter.fetch_add(more, Ordering::Relaxed);
}

impl Counted {
    pub(super) fn stats(&self) -> TcpStats {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        TcpStats {
            accepted: get(&self.accepted),
            dialled: get(&self.dialled),
            failed_dials: get(&self.failed_dials),
            connections: 0,
            malformed: get(&self.malformed),
            unknown_records: get(&self.unknown_records),
            dropped_messages: get(&self.dropped_messages),
            bytes_in: get(&self.bytes_in),
            bytes_out: get(&self.bytes_out),
            reads: get(&self.reads),
            writes: get(&self.writes),
            link: LinkStats::default(),
            discovery: *self.discovery.lock(),
            refused: self.refused.each_ref().map(get),
        }
    }

    pub(super) fn accepted(&self) {
        add(&self.accepted, 1);
    }

    pub(super) fn dialled(&self) {
        add(&self.dialled, 1);
    }

    pub(super) fn failed_dial(&self) {
        add(&self.failed_dials, 1);
    }

    pub(super) fn malformed(&self) {
        add(&self.malformed, 1);
    }

    pub(super) fn unknown_record(&self) {
        add(&self.unknown_records, 1);
    }

    pub(super) fn dropped_message(&self) {
        add(&self.dropped_messages, 1);
    }

    pub(super) fn read(&self, bytes: usize) {
        add(&self.bytes_in, bytes as u64);
        add(&self.reads, 1);
    }

    pub(super) fn written(&self, bytes: usize) {
        add(&self.bytes_out, bytes as u64);
        add(&self.writes, 1);
    }

    pub(super) fn refused(&self, cause: RefusalCause) {
        if let Some(counter) = self.refused.get(cause.index()) {
            add(counter, 1);
        }
    }

    /// Whether this has not been said about that one yet: a fault that comes back with every dial is logged once.
    pub(super) fn is_news(&self, about: &str, what: &dyn Display) -> bool {
        let mut news = self.news.lock();
        if news.len() >= NEWS {
            news.clear();
        }
        news.insert((about.to_owned(), what.to_string()))
    }

    /// The same for a stranger at this address, which may claim one name after the other: of each address some
    /// names are news, and then no more.
    pub(super) fn is_news_from(&self, address: &str, claimed: Option<&NodeId>, what: &dyn Display) -> bool {
        let Some(node) = claimed else { return self.is_news(address, what) };
        let here = format!("{address} ");
        let names = {
            let news = self.news.lock();
            let since = news.range((here.clone(), String::new())..);
            since.take_while(|(about, _)| about.starts_with(&here)).take(NEWS_OF_ADDRESS).count()
        };
        names < NEWS_OF_ADDRESS && self.is_news(&format!("{here}{node:?}"), what)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stranger_is_no_news_for_ever() {
        let counted = Counted::default();
        let claims = |address: &str, name: &str| {
            let node = NodeId::new(name).unwrap();
            counted.is_news_from(address, Some(&node), &"cause")
        };
        assert!(claims("10.0.0.1", "a") && claims("10.0.0.1", "b") && claims("10.0.0.12", "a"));
        assert!(!claims("10.0.0.1", "a"));
        let logged = (0..1000).filter(|i| claims("10.0.0.1", &format!("x{i}"))).count();
        assert_eq!(logged, NEWS_OF_ADDRESS - 2);
        assert!(claims("10.0.0.12", "b") && counted.is_news_from("10.0.0.1", None, &"cause"));
        assert!(!counted.is_news_from("10.0.0.1", None, &"cause"));
    }
}
