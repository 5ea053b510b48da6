//! The table of all benches: printed, and kept as `target/muster-bench.json`.
//!
//! Each bench is a program of its own. It replaces its part of the file, and the program that completes a run prints
//! all parts, so that `cargo bench` ends with the whole table.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::PathBuf;
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use super::{Round, filter, median, smoke};

/// The programs, in the order of the table.
const PARTS: [&str; 3] = ["local", "memory", "cluster"];

/// What a figure counts; figures are kept in seconds, events a second, bytes, or plain numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Unit {
    Seconds,
    PerSecond,
    Bytes,
    Count,
}

/// What a row has to reach.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum Target {
    AtMost(f64),
    AtLeast(f64),
    /// Of the ratio to the floor.
    RatioAtMost(f64),
    RatioAtLeast(f64),
    /// Shown to place the others.
    Shown,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Row {
    pub(crate) what: String,
    pub(crate) unit: Unit,
    pub(crate) value: f64,
    pub(crate) floor: Option<f64>,
    /// What the floor does.
    pub(crate) against: String,
    /// The median of the rounds' ratios, value to floor.
    pub(crate) ratio: Option<f64>,
    pub(crate) target: Target,
    /// `None` if there is no target.
    pub(crate) met: Option<bool>,
}

impl Row {
    /// The medians of rounds in which both were measured.
    pub(crate) fn paired(what: &str, unit: Unit, rounds: &[Round], against: &str, target: Target) -> Self {
        let value = median(rounds.iter().map(|round| round.ours));
        let floor = median(rounds.iter().map(|round| round.floor));
        let ratio = median(rounds.iter().map(|round| round.ours / round.floor));
        Self::new(what, unit, value, Some((floor, ratio)), against, target)
    }

    /// A figure without a floor.
    pub(crate) fn alone(what: &str, unit: Unit, value: f64, against: &str, target: Target) -> Self {
        Self::new(what, unit, value, None, against, target)
    }

    fn new(
        what: &str,
        unit: Unit,
        value: f64,
        floor: Option<(f64, f64)>,
        against: &str,
        target: Target,
    ) -> Self {
        let ratio = floor.map(|(_, ratio)| ratio);
        let met = match target {
            Target::AtMost(most) => Some(value <= most),
            Target::AtLeast(least) => Some(value >= least),
            Target::RatioAtMost(most) => ratio.map(|ratio| ratio <= most),
            Target::RatioAtLeast(least) => ratio.map(|ratio| ratio >= least),
            Target::Shown => None,
        };
        let floor = floor.map(|(floor, _)| floor);
        Self { what: what.into(), unit, value, floor, against: against.into(), ratio, target, met }
    }

    fn cells(&self) -> [String; 7] {
        let none = || "-".to_owned();
        let ratio = |ratio: f64| match self.unit {
            Unit::PerSecond => format!("{} %", digits(ratio * 100.0)),
            Unit::Seconds | Unit::Bytes | Unit::Count => format!("{} x", digits(ratio)),
        };
        let target = match self.target {
            Target::AtMost(most) => format!("<= {}", self.unit.show(most)),
            Target::AtLeast(least) => format!(">= {}", self.unit.show(least)),
            Target::RatioAtMost(most) => format!("<= {}", ratio(most)),
            Target::RatioAtLeast(least) => format!(">= {}", ratio(least)),
            Target::Shown => none(),
        };
        let met = self.met.map_or_else(none, |met| if met { "yes" } else { "NO" }.to_owned());
        [
            self.what.clone(),
            self.unit.show(self.value),
            self.floor.map_or_else(none, |floor| self.unit.show(floor)),
            self.ratio.map_or_else(none, ratio),
            target,
            met,
            self.against.clone(),
        ]
    }
}

impl Unit {
    fn show(self, value: f64) -> String {
        let scaled = |steps: &[(f64, &str)]| {
            let (size, name) = steps
                .iter()
                .find(|(size, _)| value.abs() >= *size)
                .or(steps.last())
                .copied()
                .unwrap_or((1.0, ""));
            format!("{} {name}", digits(value / size))
        };
        match self {
            Unit::Seconds => scaled(&[(1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns")]),
            Unit::PerSecond => scaled(&[(1e6, "M/s"), (1e3, "k/s"), (1.0, "/s")]),
            Unit::Bytes => {
                scaled(&[(1_048_576.0, "MiB"), (10_240.0, "KiB"), (1.0, "B")]).replace("1024 B", "1 KiB")
            }
            Unit::Count => digits(value),
        }
    }
}

/// Three digits that count.
fn digits(value: f64) -> String {
    match value.abs() {
        size if size >= 100.0 || value.fract() == 0.0 => format!("{value:.0}"),
        size if size >= 10.0 => format!("{value:.1}"),
        _ => format!("{value:.2}"),
    }
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct Part {
    /// The parts of one `cargo bench` have the same.
    run: String,
    /// Seconds since 1970 at the end.
    at: u64,
    /// The load average of the last minute before and after: what else the machine was doing.
    load: [String; 2],
    smoke: bool,
    rows: Vec<Row>,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct File {
    machine: String,
    parts: BTreeMap<String, Part>,
}

/// The rows of one program, as they come.
pub(crate) struct Report {
    name: &'static str,
    part: Part,
}

impl Report {
    pub(crate) fn new(name: &'static str) -> Self {
        let load = [load_average(), String::new()];
        Self { name, part: Part { run: run(), load, smoke: smoke(), ..Part::default() } }
    }

    /// Prints a row and keeps it.
    pub(crate) fn row(&mut self, row: Row) {
        let [what, value, floor, ratio, target, met, against] = row.cells();
        println!("{what}: {value}; floor {floor} ({against}), ratio {ratio}; target {target}, met: {met}");
        self.part.rows.push(row);
    }

    /// Writes this part, and prints the table: all of it if this completes a run.
    pub(crate) fn finish(mut self) {
        self.part.at = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        self.part.load[1] = load_average();
        let path = path(self.part.smoke);
        let mut file: File = std::fs::read(&path)
            .ok()
            .and_then(|bytes| serde_json::from_slice(&bytes).ok())
            .unwrap_or_default();
        file.machine = machine();
        let run = self.part.run.clone();
        file.parts.insert(self.name.into(), self.part);
        let whole = PARTS.iter().all(|name| file.parts.get(*name).is_some_and(|part| part.run == run));
        let shown: Vec<&Part> = PARTS
            .iter()
            .filter(|name| whole || **name == self.name)
            .filter_map(|name| file.parts.get(*name))
            .collect();
        println!("\n{}", table(&file.machine, &shown));
        if filter().is_some() {
            return;
        }
        let json = serde_json::to_vec_pretty(&file).unwrap_or_default();
        match std::fs::write(&path, json) {
            Ok(()) => println!("written to {}", path.display()),
            Err(error) => eprintln!("{}: {error}", path.display()),
        }
    }
}

fn table(machine: &str, parts: &[&Part]) -> String {
    let mut out = String::new();
    let loads: Vec<String> = parts.iter().map(|part| part.load.join(" to ")).collect();
    let _ = writeln!(out, "{machine}; load average {}", loads.join(", "));
    if parts.iter().any(|part| part.smoke) {
        let _ = writeln!(out, "A run that only shows that everything works: its figures mean nothing.");
    }
    let head = ["what", "value", "floor", "ratio", "target", "met", "the floor is"].map(str::to_owned);
    let rows: Vec<[String; 7]> = parts.iter().flat_map(|part| part.rows.iter().map(Row::cells)).collect();
    let width = |at: usize| {
        std::iter::once(&head).chain(&rows).map(|cells| cells[at].chars().count()).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..7).map(width).collect();
    let line = |cells: &[String; 7]| {
        let mut line = String::from("|");
        for (cell, width) in cells.iter().zip(&widths) {
            let _ = write!(line, " {cell:<width$} |");
        }
        line
    };
    let _ = writeln!(out, "{}", line(&head));
    let rule: Vec<String> = widths.iter().map(|width| "-".repeat(width + 2)).collect();
    let _ = writeln!(out, "|{}|", rule.join("|"));
    for row in &rows {
        let _ = writeln!(out, "{}", line(row));
    }
    let (met, with) = rows.iter().fold((0, 0), |(met, with), cells| match cells[5].as_str() {
        "yes" => (met + 1, with + 1),
        "NO" => (met, with + 1),
        _ => (met, with),
    });
    let _ = write!(out, "{met} of {with} targets met");
    out
}

/// `target/muster-bench.json`, wherever `target` is: this program is `target/PROFILE/deps/NAME`.
fn path(smoke: bool) -> PathBuf {
    let name = if smoke { "muster-bench-smoke.json" } else { "muster-bench.json" };
    let here = std::env::current_exe().ok();
    let target = here.as_deref().and_then(|exe| exe.ancestors().nth(3));
    target.map_or_else(|| PathBuf::from(name), |target| target.join(name))
}

/// The variable by which a program that starts another `cargo bench` makes it part of its own run.
pub(crate) const RUN: &str = "MUSTER_BENCH_RUN";

/// Which `cargo bench` this is.
pub(crate) fn run() -> String {
    std::env::var(RUN).unwrap_or_else(|_| std::os::unix::process::parent_id().to_string())
}

fn machine() -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = info.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": "));
    let model = model.map_or("an unknown processor", |(_, model)| model);
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    format!("{model}, {cores} cores, {}", std::env::consts::OS)
}

fn load_average() -> String {
    let text = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split_whitespace().next().unwrap_or("?").to_owned()
}
