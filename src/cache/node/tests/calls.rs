//! Operations in flight.

use super::*;
use crate::cache::version::{Epoch, Version};
use crate::cache::{RecordPattern, var};
use crate::pattern;

fn held(kind: &'static str, from: &'static str) -> Option<Held> {
    Some(Box::new(move |sender, _, message| {
        sender.node.as_str() == from && format!("{message:?}").starts_with(kind)
    }))
}

// caught by: a forwarded operation is carried out by whoever gets it, or forwarded again
#[test]
fn a_forwarded_operation_is_carried_out_by_the_primary_or_by_nobody() {
    each_seed(|seed| {
        let mut net = Net::of(seed, &["a", "b", "c"], &config());
        let key = key_at(&net, "b");
        let (partition, operation) = put_of(&config(), &key, 1);
        let epoch = net.node("b").status(partition).epoch.unwrap();
        // c is asked wrongly
        let before = net.delivered("Forward");
        let options = ForwardOptions {
            write_mode: WriteMode::Sync,
            read_mode: ReadMode::Primary,
            at_least: Vec::new(),
            patience_ms: 1000,
            again: false,
            attempt: 1,
        };
        let (request, epoch) = (77, Some(epoch));
        let message = |operation, epoch| CacheMessage::Forward {
            request,
            partition,
            operation,
            options: options.clone(),
            epoch,
        };
        let answer = |net: &mut Net, at: &str, message| {
            net.nodes.get_mut(&peer(at)).unwrap().handle_message(&peer("a"), message, SECOND * 100);
            let node = net.nodes.get_mut(&peer(at)).unwrap();
            std::iter::from_fn(|| node.poll_effect()).find_map(|effect| match effect {
                CacheEffect::Send { message: CacheMessage::Answer { request: 77, result, .. }, .. } => {
                    Some(result)
                }
                _ => None,
            })
        };
        let wrong = answer(&mut net, "c", message(operation.clone(), epoch.clone()));
        let primary = Some(peer("b"));
        assert_eq!(wrong, Some(Err(CacheError::WrongOwner { partition, primary, epoch: epoch.clone() })));
        // b is not primary in the epoch that the caller knows
        let later = Epoch::new(epoch.as_ref().unwrap().counter + 99, peer("b"));
        let wrong = answer(&mut net, "b", message(operation.clone(), Some(later)));
        assert!(matches!(wrong, Some(Err(CacheError::WrongOwner { .. }))), "{wrong:?}");
        net.run();
        assert_eq!(net.delivered("Forward"), before, "nothing goes on to anybody");
        assert_eq!(net.get("a", &key), None);
    });
}

#[test]
fn whoever_is_asked_wrongly_says_who_serves_and_the_caller_follows() {
    each_seed(|seed| {
        let mut net = Net::of(seed, &["a", "b", "c", "d"], &config());
        for name in ["a", "b", "c", "d"] {
            for n in 0..20 {
                assert!(net.put(name, &format!("key{n}"), n).is_ok());
            }
        }
        let forwards = net.delivered("Forward");
        assert_eq!(forwards, net.delivered("Answer"), "each is answered once");
        assert!(forwards <= 80, "each is forwarded once at most: {forwards}");
    });
}

#[test]
fn operations_wait_while_nobody_serves_and_end_in_time() {
    each_seed(|seed| {
        let mut net = Net::new(seed);
        net.open("a", &config());
        let (partition, put) = put_of(&config(), "key", 1);
        let waits = net.begin("a", partition, put.clone(), |_| {});
        let short = net.begin("a", partition, put, |options| options.deadline = SECOND + SECOND / 2);
        net.run_for(SECOND / 2);
        assert_eq!(net.answer(short), Some(Err(CacheError::NotActive { partition })));
        assert_eq!(net.answer(waits), None);
        net.see(&["a"]);
        net.run();
        assert_eq!(net.answer(waits).unwrap().unwrap().outcome, Outcome::Written(1));
        assert_eq!(net.node("a").in_flight(), (0, 0));
    });
}

// caught by: no memory of what was answered
#[test]
fn a_write_whose_answer_was_lost_is_not_applied_twice() {
    each_seed(|seed| {
        let cache = config().table(Table::DuplicateBag);
        let mut net = Net::of(seed, &["a", "b"], &cache);
        let key = key_at(&net, "b");
        let (partition, put) = put_of(&cache, &key, 1);
        for lost in ["Answer", "Forward"] {
            net.hold = held(lost, if lost == "Answer" { "b" } else { "a" });
            let ticket = net.begin("a", partition, put.clone(), |_| {});
            net.run();
            assert_eq!(net.answer(ticket), None);
            net.cut("a", "b");
            net.hold = None;
            net.run();
            net.link("a", "b");
            net.run_for(SECOND * 3);
            let reply = net.answer(ticket).unwrap().unwrap();
            assert_eq!(reply.outcome, Outcome::Written(1), "the {lost} was lost");
        }
        let read = net.operate("a", partition, get_of(&key), |_| {});
        assert_eq!(records(read).len(), 2, "two were put");
    });
}

/// Under which number a has sent this, and how often.
fn sending(net: &Net, ticket: u64) -> (u64, u32) {
    let node = net.node("a");
    let request = node.pending.id_of(ticket).unwrap();
    let pending = node.pending.get(request).unwrap();
    assert!(matches!(pending.state, pending::State::Sent { .. }), "{pending:?}");
    (request, pending.sendings)
}

// caught by: a refusal that is taken for one of the sending after it (simulation seed 10007453)
#[test]
fn a_refusal_of_one_sending_says_nothing_of_the_next() {
    each_seed(|seed| {
        let cache = config().table(Table::DuplicateBag).replicas(2).min_copies(2);
        let mut net = Net::of(seed, &["a", "b", "c"], &cache);
        let key = key_at(&net, "b");
        let (partition, put) = put_of(&cache, &key, 1);
        net.hold = held("Forward", "a");
        let ticket = net.begin("a", partition, put, |_| {});
        let (request, first) = sending(&net, ticket);
        // a takes b for gone, and sends it again; then the refusal of the first comes, which nobody else heard of
        net.with("a", |node, now| {
            node.lose_peer(&peer("b"), now);
            node.handle_timeout(now + SECOND / 10);
        });
        let (same, second) = sending(&net, ticket);
        assert_eq!((same, second), (request, first + 1));
        let refused = |attempt| CacheMessage::Answer { request, attempt, result: Err(CacheError::Busy) };
        net.with("a", |node, now| node.handle_message(&peer("b"), refused(first), now));
        assert_eq!(net.answer(ticket), None, "the second may be carried out yet");
        net.with("a", |node, now| node.handle_message(&peer("b"), refused(second), now));
        assert_eq!(net.answer(ticket), Some(Err(CacheError::Busy)));
    });
}

// caught by: what was not sent for want of room takes the doubt about an earlier sending away
#[test]
fn what_was_not_sent_leaves_a_doubt_as_it_was() {
    each_seed(|seed| {
        let mut net = Net::of(seed, &["a", "b"], &config());
        let key = key_at(&net, "b");
        for doubt in [false, true] {
            net.hold = held("Forward", "a");
            let (partition, put) = put_of(&config(), &key, 1);
            let ticket = net.begin("a", partition, put, |_| {});
            let (request, _) = sending(&net, ticket);
            net.with("a", |node, now| {
                if doubt {
                    node.lose_peer(&peer("b"), now);
                    node.handle_timeout(now + SECOND / 10);
                }
                node.not_sent(&peer("b"), request, now);
            });
            let applied = net.answer(ticket).unwrap().unwrap_err().applied();
            assert_eq!(applied, if doubt { Applied::Unknown } else { Applied::No });
        }
    });
}

// caught by: a write in doubt is sent to a new primary though a second time would show
#[test]
fn a_write_in_doubt_is_done_again_only_where_that_does_no_harm() {
    each_seed(|seed| {
        let lost = |table, operation: &dyn Fn(&str) -> Operation, mode| {
            let cache = config().table(table).replicas(2);
            let mut net = Net::of(seed, &["a", "b", "c"], &cache);
            // c asks, b serves and dies, a takes over
            let key = (0..)
                .map(|n| format!("k{n}"))
                .find(|key| {
                    let status = net.node("a").status(cache.partition_of(&key.as_str().into()));
                    status.owners == [peer("b"), peer("a")]
                })
                .unwrap();
            let partition = cache.partition_of(&key.as_str().into());
            assert!(net.put("c", &key, 1).is_ok());
            net.hold = held("Answer", "b");
            let ticket = net.begin("c", partition, operation(&key), |options| options.write_mode = mode);
            net.run();
            assert_eq!(net.answer(ticket), None);
            net.hold = None;
            net.kill("b");
            net.run_for(SECOND * 6);
            (net.answer(ticket).unwrap(), records(net.operate("c", partition, get_of(&key), |_| {})).len())
        };
        let put = |key: &str| put_of(&config(), key, 2).1;
        let (answer, held) = lost(Table::Set, &put, WriteMode::Sync);
        assert_eq!((answer.unwrap().outcome, held), (Outcome::Written(1), 1));
        let (answer, held) = lost(Table::DuplicateBag, &put, WriteMode::Sync);
        assert_eq!(answer.unwrap_err().applied(), Applied::Unknown);
        assert_eq!(held, 2, "b's owner had it");
        // it is gone, and how many records went is not known any more
        let (answer, held) = lost(Table::Set, &delete_of, WriteMode::Sync);
        match answer.unwrap_err() {
            CacheError::Uncounted { at_least: 0, version: Some(version) } => {
                assert_eq!(version.epoch.primary, peer("a"), "the write of the second time")
            }
            other => panic!("{other}"),
        }
        assert_eq!(held, 0);
    });
}

#[test]
fn what_cannot_be_reached_is_an_error_and_never_an_empty_answer() {
    let mut net = Net::of(1, &["a", "b"], &config().replicas(1));
    let key = key_at(&net, "b");
    let partition = config().partition_of(&key.as_str().into());
    assert!(net.put("a", &key, 1).is_ok());
    // the link is cut, and the view is not yet another one
    net.cut("a", "b");
    let read = net.operate("a", partition, get_of(&key), |_| {});
    let (node, applied) = (NodeId::new("b").unwrap(), Applied::No);
    assert_eq!(read, Err(CacheError::Unreachable { partition, node, applied }));
    let (_, put) = put_of(&config(), &key, 2);
    let write = net.operate("a", partition, put, |_| {});
    assert_eq!(write.unwrap_err().applied(), Applied::No, "it was never sent");
}

#[test]
fn the_number_of_operations_that_wait_is_bounded() {
    let mut net = Net::new(1);
    net.open("a", &config().max_pending(3));
    let begin = |net: &mut Net| {
        let (partition, put) = put_of(&config(), "key", 1);
        net.begin("a", partition, put, |_| {})
    };
    let waiting: Vec<u64> = (0..3).map(|_| begin(&mut net)).collect();
    let refused = begin(&mut net);
    assert_eq!(net.answer(refused), Some(Err(CacheError::Busy)));
    net.with("a", |node, _| node.cancel(waiting[0]));
    let next = begin(&mut net);
    assert_eq!(net.answer(next), None);
    net.run_for(SECOND * 10);
    assert_eq!(net.answer(waiting[0]), None, "it was cancelled");
    assert_eq!(net.node("a").in_flight(), (0, 0));
}

#[test]
fn what_is_asked_is_checked_on_both_sides() {
    let mut net = Net::of(1, &["a", "b"], &config().arity(Some(2)));
    let key = key_at(&net, "b");
    let partition = config().partition_of(&key.as_str().into());
    let other = PartitionId::new((partition.get() + 1) % 8);
    let bad = [
        (partition, Operation::Write(WriteOp::Put(vec![record![key.as_str(), 1, 2]]))),
        (other, Operation::Write(WriteOp::Put(vec![record![key.as_str(), 1]]))),
        (other, get_of(&key)),
        (other, delete_of(&key)),
        (PartitionId::new(8), get_of(&key)),
        (partition, Operation::Read(ReadOp::Get(f64::NAN.into()))),
        (partition, Operation::Read(ReadOp::Match(RecordPattern::new(pattern![var(1)]).unwrap()))),
    ];
    let asker = peer("a");
    for (partition, operation) in bad {
        let ticket = net.begin("a", partition, operation.clone(), |_| {});
        let local = net.answer(ticket).unwrap().unwrap_err();
        assert_eq!(local.applied(), Applied::No, "{local}");
        let options = ForwardOptions {
            write_mode: WriteMode::Sync,
            read_mode: ReadMode::Primary,
            at_least: Vec::new(),
            patience_ms: 1000,
            again: false,
            attempt: 1,
        };
        let message = CacheMessage::Forward { request: 5, partition, operation, options, epoch: None };
        let node = net.nodes.get_mut(&peer("b")).unwrap();
        node.handle_message(&asker, message, SECOND * 20);
        let answers: Vec<_> = std::iter::from_fn(|| node.poll_effect())
            .filter_map(|effect| match effect {
                CacheEffect::Send { message: CacheMessage::Answer { result, .. }, .. } => Some(result),
                _ => None,
            })
            .collect();
        assert_eq!(answers.len(), 1, "{answers:?}");
        assert!(answers[0].is_err());
    }
}

#[test]
fn reads_that_this_node_may_answer_take_no_way() {
    let mut net = Net::of(1, &["a", "b", "c"], &config());
    let key = key_at(&net, "b");
    let partition = config().partition_of(&key.as_str().into());
    let version = net.put("a", &key, 1).unwrap().version;
    net.run_for(SECOND);
    let options = |read_mode, at_least: Option<Version>| {
        let mut options = Options::of(&config(), SECOND);
        options.read_mode = read_mode;
        options.at_least = at_least.into_iter().collect();
        options
    };
    let read = ReadOp::Get(key.as_str().into());
    let at = |name: &str, mode, at_least| {
        net.node(name)
            .try_read(partition, &read, &options(mode, at_least))
            .map(|answer| value(answer.unwrap()))
    };
    let owners = net.node("b").status(partition).owners;
    let (second, stranger) = match owners[1].node.as_str() {
        "a" => ("a", "c"),
        _ => ("c", "a"),
    };
    assert_eq!(at("b", ReadMode::Primary, None), Some(Some(1)));
    assert_eq!(at("b", ReadMode::Local, version.clone()), Some(Some(1)));
    assert_eq!(at(second, ReadMode::Local, version.clone()), Some(Some(1)));
    assert_eq!(at(second, ReadMode::Primary, None), None);
    assert_eq!(at(stranger, ReadMode::Local, None), None);
    assert_eq!(at("b", ReadMode::Quorum, None), None);
    let mut later = version.unwrap();
    later.seq += 1;
    assert_eq!(at(second, ReadMode::Local, Some(later)), None, "the session knows more");
    for mode in [ReadMode::Local, ReadMode::Primary, ReadMode::Quorum] {
        for name in ["a", "b", "c"] {
            let read = net.operate(name, partition, get_of(&key), |options| options.read_mode = mode);
            assert_eq!(value(read.unwrap()), Some(1), "{mode} on {name}");
        }
    }
    let all = Operation::Read(ReadOp::Match(RecordPattern::new(pattern![var(1), var(2)]).unwrap()));
    let read = net.operate(stranger, partition, all, |_| {}).unwrap();
    assert_eq!(read.outcome, Outcome::Bindings(vec![vec![key.as_str().into(), 1.into()]]));
}

// caught by: a read by quorum that is still listed at a peer when it has ended
#[test]
fn a_read_by_quorum_goes_on_when_an_owner_is_lost() {
    let mut net = Net::of(1, &["a", "b", "c"], &config().replicas(3));
    let partition = PartitionId::new(0);
    let key = key_of(&config(), partition);
    assert!(net.put("a", &key, 1).is_ok());
    net.hold = held("Copy", "b");
    let read = net.begin("a", partition, get_of(&key), |options| options.read_mode = ReadMode::Quorum);
    net.cut("a", "c");
    net.run();
    assert_eq!(net.answer(read), None, "b is waited for");
    net.hold = None;
    net.run_for(SECOND);
    assert_eq!(value(net.answer(read).unwrap().unwrap()), Some(1));
    net.cut("a", "b");
    assert_eq!(net.node("a").in_flight(), (0, 0));
}
