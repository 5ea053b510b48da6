//! The tables of the guide name tests that exist, and every hazard has one.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

use std::collections::BTreeSet;
use std::path::Path;

const GUIDE: &str = include_str!("../src/guide/protocol.md");

/// The names of all functions under a folder, this file apart.
fn functions(folder: &Path, into: &mut BTreeSet<String>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            functions(&path, into);
        } else if path.extension().is_some_and(|e| e == "rs") && !path.ends_with("tests/guide.rs") {
            let text = std::fs::read_to_string(&path).unwrap();
            for rest in text.split("fn ").skip(1) {
                let name: String =
                    rest.chars().take_while(|c| c.is_ascii_alphanumeric() || *c == '_').collect();
                if rest[name.len()..].starts_with('(') {
                    into.insert(name);
                }
            }
        }
    }
}

fn sources() -> BTreeSet<String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut all = BTreeSet::new();
    functions(&root.join("src"), &mut all);
    functions(&root.join("tests"), &mut all);
    all
}

/// The rows of the tables after the heading: the first cell, and the last one.
fn rows(heading: &str) -> Vec<(&'static str, &'static str)> {
    let (_, table) = GUIDE.split_once(heading).unwrap();
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
    assert_eq!(cases.len(), 40);
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
