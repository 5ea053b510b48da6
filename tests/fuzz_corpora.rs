//! The fuzz targets without a fuzzer: their kept inputs, and 200,000 seeded mutations of them.
//!
//! `FUZZ_SEED` is the first seed and `FUZZ_RUNS` how many times as many mutations are tried.

#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests")]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use muster_router::testing::fuzz;
use muster_router::testing::sim::Random;

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

/// The kept inputs of a target. They are not part of the published package.
fn corpus(target: &str) -> Vec<Vec<u8>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus").join(target);
    let Ok(entries) = std::fs::read_dir(&folder) else {
        assert!(std::env::var_os("MUSTER_REQUIRE_ALL").is_none(), "{folder:?} is missing");
        println!("{folder:?} is missing: only invented inputs are tried");
        return vec![Vec::new()];
    };
    let mut paths: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    paths.iter().map(|path| std::fs::read(path).unwrap()).collect()
}

/// Another input, made of those that are there.
fn mutated(corpus: &[Vec<u8>], random: &mut Random) -> Vec<u8> {
    let mut input = corpus[random.below(corpus.len())].clone();
    for _ in 0..random.between(1, 4) {
        let at = random.below(input.len() + 1);
        // half of the new bytes are such as occur, or text would hardly ever stay text
        let model = &corpus[random.below(corpus.len())];
        let byte = match random.below(2 * model.len() + 1) {
            index if index < model.len() => model[index],
            _ => random.next() as u8,
        };
        match random.below(7) {
            0 => input.truncate(at),
            1 => input.insert(at, byte),
            2 if at < input.len() => input[at] = byte,
            3 if at < input.len() => input[at] ^= 1 << (byte & 7),
            4 if at < input.len() => drop(input.remove(at)),
            5 => input.splice(at..at, std::iter::repeat_n(byte, random.below(12))).for_each(drop),
            _ => {
                let other = &corpus[random.below(corpus.len())];
                input.extend(&other[random.below(other.len() + 1)..]);
            }
        }
    }
    input.truncate(512);
    input
}

/// Runs the corpus and the mutations; how many of each got anywhere.
fn search(target: &str, mutations: u64, body: impl Fn(&[u8]) -> bool) {
    let corpus = corpus(target);
    let tried = |what: &str, input: &[u8]| {
        catch_unwind(AssertUnwindSafe(|| body(input)))
            .unwrap_or_else(|_| panic!("{target}, {what}: {:?} ({input:?})", String::from_utf8_lossy(input)))
    };
    let kept = corpus.iter().filter(|input| tried("kept", input)).count();
    assert!(
        kept * 2 >= corpus.len() || corpus.len() < 2,
        "{kept} of {} inputs of {target} get anywhere",
        corpus.len()
    );
    let first = number("FUZZ_SEED").unwrap_or(1);
    let mutations = mutations * number("FUZZ_RUNS").unwrap_or(1);
    let far = (first..first + mutations)
        .filter(|seed| tried(&format!("seed {seed}"), &mutated(&corpus, &mut Random::new(*seed))))
        .count();
    println!(
        "{target}: {kept} of {} kept inputs and {far} of {mutations} mutations got anywhere",
        corpus.len()
    );
    assert!(
        far as u64 * 200 >= mutations || corpus.len() < 2,
        "the mutations of {target} are refused at once"
    );
}

#[test]
fn frames() {
    search("wire", 120_000, fuzz::wire);
}

#[test]
fn links() {
    search("link", 20_000, fuzz::link);
}

#[test]
fn nodes() {
    search("node", 10_000, fuzz::node);
}

#[test]
fn configurations() {
    let read = |text: &[u8]| serde_json::from_slice(text).ok();
    let write = |config: &_| serde_json::to_vec(config).ok();
    search("config", 50_000, |input| fuzz::config(input, read, write));
}

#[cfg(feature = "cache")]
#[test]
fn cache_terms() {
    search("cache_term", 60_000, fuzz::cache_term);
}

#[cfg(feature = "cache")]
#[test]
fn cache_patterns() {
    search("cache_pattern", 60_000, fuzz::cache_pattern);
}

#[cfg(feature = "cache")]
#[test]
fn cache_stores() {
    search("cache_store", 20_000, fuzz::cache_store);
}

#[cfg(feature = "cache")]
#[test]
fn cache_messages() {
    search("cache_message", 60_000, fuzz::cache_message);
}

#[cfg(feature = "cache")]
#[test]
fn cache_nodes() {
    search("cache_node", 5_000, fuzz::cache_node);
}

// caught by: numbers that the consensus counts on from, and that are not looked at
#[cfg(feature = "consensus")]
#[test]
fn cache_strong_nodes() {
    search("cache_strong", 5_000, fuzz::cache_strong);
}

/// A target that breaks is reported with the input that broke it.
#[test]
#[should_panic(expected = "wire, kept: ")]
fn a_broken_target_is_reported() {
    search("wire", 100, |input| {
        assert!(input.len() < 3, "a frame of three bytes");
        true
    });
}
