#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use proptest::prelude::*;

use super::*;
use crate::cache::config::{CacheConfig, ReadMode, WriteMode};
use crate::cache::error::{Applied, Found};
use crate::cache::node::message::ForwardOptions;
use crate::cache::operation::{Operation, Outcome, ReadOp, WriteOp};
use crate::cache::partition::PartitionId;
use crate::cache::replica::ReplicaMessage;
use crate::cache::version::{Epoch, Version};
use crate::cache::{RecordPattern, Term, var};
use crate::types::{Incarnation, NodeId, Peer};
use crate::{pattern, record};

fn peer(name: &str) -> Peer {
    Peer::new(NodeId::new(name).unwrap(), Incarnation::MIN)
}

/// One of every kind, and of every kind of operation.
pub(crate) fn samples() -> Vec<CacheMessage> {
    let partition = PartitionId::new(3);
    let epoch = Epoch::new(2, peer("a"));
    let version = Version::new(epoch.clone(), 9);
    let options = ForwardOptions {
        write_mode: WriteMode::Sync,
        read_mode: ReadMode::Local,
        at_least: vec![version.clone()],
        patience_ms: 4500,
        again: true,
        attempt: 2,
    };
    let pattern = RecordPattern::new(pattern!["k", _, var(1)]).unwrap();
    let operations = [
        Operation::Write(WriteOp::Put(vec![record!["k", 1], record!["k", ("x", 2.5)]])),
        Operation::Write(WriteOp::DeleteKeys(vec!["k".into(), Term::Nil])),
        Operation::Write(WriteOp::DeleteMatch(pattern.clone())),
        Operation::Write(WriteOp::DeleteAll),
        Operation::Read(ReadOp::Get("k".into())),
        Operation::Read(ReadOp::Match(pattern.clone())),
        Operation::Read(ReadOp::MatchObject(pattern)),
    ];
    let good = |outcome| Ok(Reply { outcome, version: Some(version.clone()) });
    let results = [
        good(Outcome::Written(2)),
        good(Outcome::Removed(0)),
        good(Outcome::Records(vec![record!["k", 1]])),
        good(Outcome::Bindings(vec![vec![1.into(), "x".into()], vec![]])),
        Err(CacheError::WrongOwner { partition, primary: Some(peer("b")), epoch: Some(epoch.clone()) }),
        Err(CacheError::NotEnoughAcks { got: 1, need: 2 }),
        Err(CacheError::Timeout { applied: Applied::Unknown }),
    ];
    let mut all = vec![
        CacheMessage::Hello {
            terms: CacheConfig::default().terms(),
            shards: 16,
            life: 77,
            draining: false,
            heard: true,
        },
        CacheMessage::NotOpen,
        CacheMessage::Bye,
        CacheMessage::Replica { partition, session: 5, message: ReplicaMessage::AcceptLoss },
        CacheMessage::Nudge { partition, owner: peer("c") },
    ];
    all.extend(operations.map(|operation| CacheMessage::Forward {
        request: 1 << 40,
        partition,
        operation,
        options: options.clone(),
        epoch: Some(epoch.clone()),
    }));
    for result in results {
        all.push(CacheMessage::Answer { request: 300, attempt: 1, result: result.clone() });
        let owners = vec![peer("a"), peer("b")];
        all.push(CacheMessage::Copy {
            request: 300,
            epoch: Some(epoch.clone()),
            owners,
            covers: None,
            end: None,
            result,
        });
    }
    all
}

fn bytes_of(message: &CacheMessage) -> Vec<u8> {
    let mut bytes = Vec::new();
    encode(message, &mut bytes).unwrap();
    bytes
}

#[test]
fn every_message_comes_back_alone_and_in_company() {
    let samples = samples();
    let kinds: std::collections::BTreeSet<u8> = samples.iter().map(|message| bytes_of(message)[0]).collect();
    assert_eq!(kinds, (0..=7).collect(), "one sample of every kind");
    let mut all = Vec::new();
    for message in &samples {
        assert_eq!(decode(&bytes_of(message)), Ok(vec![message.clone()]));
        encode(message, &mut all).unwrap();
    }
    assert_eq!(decode(&all), Ok(samples));
    assert_eq!(decode(&[]), Ok(vec![]));
}

#[test]
fn what_is_cut_anywhere_is_refused_whole() {
    for message in samples() {
        let whole = bytes_of(&message);
        for end in 1..whole.len() {
            assert!(decode(&whole[..end]).is_err(), "{message:?} cut at {end}");
        }
    }
}

/// Without a refusal the reader would go one level deeper for every four bytes, until its stack is used up.
#[test]
fn errors_do_not_nest() {
    let within = vec![(PartitionId::new(1), CacheError::Busy)];
    let partial = CacheError::Partial { found: Found::Removed(1), missing: within.clone() };
    let said = bytes_of(&CacheMessage::Answer { request: 1, attempt: 1, result: Err(partial) });
    assert!(matches!(decode(&said), Err(CodecError::Malformed { .. })));
    let error = CacheError::Batch { applied: 1, failed: within, refused: Vec::new() };
    let said = bytes_of(&CacheMessage::Answer { request: 1, attempt: 1, result: Err(error.clone()) });
    assert!(matches!(decode(&said), Err(CodecError::Malformed { .. })));
    let inner = postcard::to_stdvec(&CacheError::Busy).unwrap();
    let batch = postcard::to_stdvec(&error).unwrap();
    let level = &batch[..batch.len() - inner.len()];
    let deep: Vec<u8> = level.iter().copied().cycle().take(level.len() * 200_000).chain(inner).collect();
    let kind = bytes_of(&CacheMessage::Answer { request: 1, attempt: 1, result: Err(CacheError::Busy) })[0];
    let mut said = vec![kind, 1, 1];
    said.extend(postcard::to_stdvec(&deep).unwrap());
    assert!(matches!(decode(&said), Err(CodecError::Malformed { .. })));
}

#[test]
fn a_count_beyond_the_bytes_holds_no_memory() {
    // an operation that puts 2^63 records
    let put = Operation::Write(WriteOp::Put(Vec::new()));
    let empty = postcard::to_stdvec(&put).unwrap();
    let mut huge = empty[..empty.len() - 1].to_vec();
    huge.extend([0xff; 8]);
    huge.push(0x7f);
    assert!(postcard::from_bytes::<Operation>(&huge).is_err());
}

#[test]
fn what_has_no_encoding_leaves_the_buffer_as_it_was() {
    let bad = CacheMessage::Forward {
        request: 1,
        partition: PartitionId::new(0),
        operation: Operation::Read(ReadOp::Get(f64::NAN.into())),
        options: ForwardOptions {
            write_mode: WriteMode::Sync,
            read_mode: ReadMode::Local,
            at_least: Vec::new(),
            patience_ms: 1,
            again: false,
            attempt: 1,
        },
        epoch: None,
    };
    let mut out = vec![1, 2, 3];
    assert!(matches!(encode(&bad, &mut out), Err(CodecError::Unwritable { .. })));
    assert_eq!(out, [1, 2, 3]);
}

proptest! {
    #[test]
    fn a_changed_byte_never_panics(which in any::<prop::sample::Index>(), at in any::<prop::sample::Index>(), byte in any::<u8>()) {
        let mut bytes = bytes_of(&samples()[which.index(samples().len())]);
        let at = at.index(bytes.len());
        bytes[at] = byte;
        let _ = decode(&bytes);
    }

    #[test]
    fn any_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let _ = decode(&bytes);
    }
}
