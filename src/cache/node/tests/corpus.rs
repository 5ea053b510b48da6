//! The kept inputs of the fuzz targets `cache_message` and `cache_node`: what nodes really say.

use super::*;

/// After a change of the messages: `cargo test --lib --features cache write_the_corpora -- --ignored`.
#[test]
#[ignore = "writes the kept inputs of the fuzz targets anew"]
fn write_the_corpora() {
    let cache = CacheConfig::new("fuzz").partitions(2).replicas(2).table(Table::DuplicateBag);
    let mut kinds: BTreeMap<String, Vec<u8>> = BTreeMap::new();
    for seed in 1..=6 {
        let mut net = Net::new(seed);
        net.to_a = Some(Vec::new());
        net.open("a", &cache);
        net.open("b", &cache);
        net.see(&["a", "b"]);
        net.run_for(SECOND);
        let one = cache.partition_of(&1.into());
        let put = |n: i64| Operation::Write(WriteOp::Put(vec![record![n, 1]]));
        for n in [1, 2] {
            let at = cache.partition_of(&n.into());
            net.operate("a", at, put(n), |_| {}).unwrap();
            net.operate("b", at, put(n), |_| {}).unwrap();
            net.operate("b", at, Operation::Read(ReadOp::Get(n.into())), |o| o.read_mode = ReadMode::Quorum)
                .unwrap();
        }
        net.open("c", &cache);
        net.see(&["a", "b", "c"]);
        net.run_for(SECOND * 5);
        net.operate("c", one, put(1), |_| {}).unwrap();
        net.cut("a", "b");
        net.cut("a", "c");
        for me in ["a", "b", "c"] {
            let side: Vec<Peer> = if me == "a" { vec![peer("a")] } else { vec![peer("b"), peer("c")] };
            net.with(me, |node, now| node.handle_view(&side, true, now));
        }
        net.run_for(SECOND * 5);
        for (at, n) in [("a", 1), ("b", 1), ("a", 2), ("b", 2)] {
            let partition = cache.partition_of(&n.into());
            let _ = net.operate(at, partition, put(n), |o| o.write_mode = crate::cache::WriteMode::Async);
        }
        net.see(&["a", "b", "c"]);
        net.run_for(SECOND * 5);
        net.with("b", |node, now| node.drain(now));
        net.run_for(SECOND * 5);
        net.close("c");
        net.run_for(SECOND);
        for (from, bytes, kind) in net.to_a.take().unwrap() {
            if bytes.len() > 255 {
                continue;
            }
            let who: u8 = if from == peer("b") { 0 } else { 0x10 };
            let mut input = vec![2, 3, 0, 0x10, 3, 1, 0x13, 1, 10, 6];
            input.extend([4 | who, bytes.len() as u8]);
            input.extend(&bytes);
            input.extend([12, 0, 3, 10, 12]);
            let entry = kinds.entry(kind).or_default();
            if entry.is_empty() || (entry.len() + input.len() < 400) {
                entry.extend(input);
            }
        }
    }
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus");
    std::fs::create_dir_all(folder.join("cache_node")).unwrap();
    std::fs::create_dir_all(folder.join("cache_message")).unwrap();
    for (kind, input) in &kinds {
        std::fs::write(folder.join("cache_node").join(kind), input).unwrap();
    }
    #[cfg(feature = "consensus")]
    write_the_strong_corpus(&folder);
    for (n, message) in codec::tests::samples().into_iter().enumerate() {
        let mut bytes = Vec::new();
        codec::encode(&message, &mut bytes).unwrap();
        let kind = format!("{message:?}").split([' ', '(', '{']).next().unwrap().to_lowercase();
        std::fs::write(folder.join("cache_message").join(format!("{kind}_{n}")), bytes).unwrap();
    }
}

/// Each kind of what a node of a `Strong` cache hears, after the greetings and what was said before it to found the group.
#[cfg(feature = "consensus")]
fn write_the_strong_corpus(folder: &std::path::Path) {
    let cache = CacheConfig::new("fuzz").partitions(2).replicas(2).expected_nodes(Some(3));
    let cache = cache.write_mode(crate::cache::WriteMode::Strong);
    let mut heard = Vec::new();
    // it founds the group, and it comes into one that is there, whose leader dies
    for first in [["a", "b", "c"], ["b", "c", "d"]] {
        let mut net = Net::new(7);
        net.to_a = Some(Vec::new());
        first.iter().for_each(|name| net.open(name, &cache));
        net.see(&first);
        net.run_for(SECOND * 10);
        if first[0] != "a" {
            net.open("a", &cache);
            net.see(&["a", "b", "c", "d"]);
            net.run_for(SECOND * 10);
        }
        for n in [1, 2] {
            let at = cache.partition_of(&n.into());
            let put = Operation::Write(WriteOp::Put(vec![record![n, 1]]));
            ["a", "b", "c"].iter().for_each(|name| drop(net.operate(name, at, put.clone(), |_| {}).unwrap()));
        }
        net.kill("b");
        net.run_for(SECOND * 5);
        heard.extend(net.to_a.take().unwrap());
    }
    let folder = folder.join("cache_strong");
    std::fs::create_dir_all(&folder).unwrap();
    let mut kinds: BTreeMap<String, Vec<u8>> = BTreeMap::new();
    for (from, bytes, kind) in heard {
        let mut input = vec![2, 3, 0, 0x10, 3, 1, 0x13, 1, 10, 6];
        let who: u8 = if from == peer("b") { 0 } else { 0x10 };
        if bytes.len() > 120 {
            continue;
        }
        // as it was said, and with the highest number in each place
        input.extend([4 | who, bytes.len() as u8]);
        input.extend(&bytes);
        for at in 0..bytes.len() {
            input.extend([8 | who, at as u8, 7, bytes.len() as u8]);
            input.extend(&bytes);
        }
        input.extend([10, 8, 12, 0, 3, 10, 13, 10, 13]);
        kinds.entry(kind).or_insert(input);
    }
    for (kind, input) in kinds {
        std::fs::write(folder.join(kind), input).unwrap();
    }
}
