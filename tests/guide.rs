//! The tables of the guide name tests that exist, and every hazard has one.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

use std::collections::BTreeSet;
use std::path::Path;

const GUIDE: &str = include_str!("../src/guide/protocol.md");
const CACHE: &str = include_str!("../src/guide/cache.md");

/// The names of all tests under a folder, this file apart.
fn tests_below(folder: &Path, into: &mut BTreeSet<String>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            tests_below(&path, into);
        } else if path.extension().is_some_and(|e| e == "rs") && !path.ends_with("tests/guide.rs") {
            tests_in(&std::fs::read_to_string(&path).unwrap(), into);
        }
    }
}

/// The functions with an attribute that makes a test of them (inside `proptest!` too), and the rules that the
/// conformance suite turns into tests.
fn tests_in(text: &str, into: &mut BTreeSet<String>) {
    let mut attributed = false;
    for line in text.lines().map(str::trim) {
        if line.starts_with("#[test]") || line.starts_with("#[tokio::test") {
            attributed = true;
        } else if line.starts_with("#[") || line.starts_with("//") || line.ends_with(")]") {
            // between the attribute and its function
        } else {
            let function = line.strip_prefix("async ").unwrap_or(line).strip_prefix("fn ");
            if let Some((name, _)) = function.filter(|_| attributed).and_then(|rest| rest.split_once('(')) {
                into.insert(name.to_string());
            }
            attributed = false;
        }
    }
    let suite = text.split("transport_conformance!(@each $threads $harness:\n").nth(1);
    let rules = suite.and_then(|rest| rest.split(");").next()).unwrap_or_default();
    into.extend(rules.split_whitespace().map(str::to_string));
}

fn sources() -> BTreeSet<String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut all = BTreeSet::new();
    tests_below(&root.join("src"), &mut all);
    tests_below(&root.join("tests"), &mut all);
    all
}

/// The rows of the tables after the heading: the first cell, and the last one.
fn rows(heading: &str) -> Vec<(&'static str, &'static str)> {
    rows_of(GUIDE, heading)
}

fn rows_of(guide: &'static str, heading: &str) -> Vec<(&'static str, &'static str)> {
    let (_, table) = guide.split_once(heading).unwrap();
    let table = table.split("\n# ").next().unwrap();
    let cells = |line: &'static str| {
        let mut cells = line.trim_matches('|').split('|').map(str::trim);
        Some((cells.next()?, cells.next_back()?))
    };
    table.lines().filter(|line| line.starts_with("| ")).filter_map(cells).skip(1).collect()
}

/// What is in backquotes and may be the name of a test.
fn named(cell: &str) -> impl Iterator<Item = &str> {
    cell.split('`').skip(1).step_by(2).filter(|name| name.contains('_'))
}

#[test]
fn every_test_that_the_guide_names_exists() {
    let sources = sources();
    let hazards = rows("# Hazards and their tests");
    let cases = rows("# Public cases and their tests");
    assert_eq!(cases.len(), 50);
    for (row, cell) in hazards.iter().chain(&cases) {
        assert!(
            cell.contains('`') || cell.contains("needs a network") || cell.contains("does not apply"),
            "{row}"
        );
        for name in named(cell) {
            assert!(sources.contains(name), "{row}: there is no test {name}");
        }
    }
}

#[test]
fn every_measured_fault_of_a_cache_has_a_test_that_exists() {
    let sources = sources();
    let faults = rows_of(CACHE, "# Faults of comparable systems and their tests");
    assert_eq!(faults.len(), 10);
    for (fault, cell) in faults {
        assert!(named(cell).any(|name| name.starts_with("measured_")), "{fault}");
        for name in named(cell) {
            assert!(sources.contains(name), "{fault}: there is no test {name}");
        }
    }
}

#[test]
fn only_tests_count_as_tests() {
    let text = "fn helper() {}\n#[test]\n#[ignore = \"slow\"]\n/// Why.\nfn one() {\n    fn inner() {}\n}\n\
        #[tokio::test(start_paused = true)]\nasync fn two() {}\n#[cfg(test)]\nfn other() {}\n";
    let mut found = BTreeSet::new();
    tests_in(text, &mut found);
    assert_eq!(found.into_iter().collect::<Vec<_>>(), ["one", "two"]);
    assert!(sources().contains("other_terms_are_refused"), "a rule of the conformance suite");
}

#[test]
fn every_hazard_has_a_row_with_a_test() {
    let hazards = rows("# Hazards and their tests");
    let numbers: Vec<String> = hazards.iter().map(|(number, _)| number.to_string()).collect();
    assert_eq!(numbers, (1..=32).map(|n| n.to_string()).collect::<Vec<_>>());
    for (number, cell) in hazards {
        assert!(named(cell).next().is_some(), "hazard {number} has no test");
        let others = named(cell).filter(|name| name.starts_with("hazard_"));
        let own = format!("hazard_{:0>2}_", number);
        others.for_each(|name| assert!(name.starts_with(&own), "{name} is in row {number}"));
    }
}
