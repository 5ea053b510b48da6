//! A recorded trace: who joined, left and spoke in which room, and how many bytes.

use std::collections::HashMap;
use std::path::Path;

use super::Failure;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Join,
    Say,
    Leave,
}

/// One line of the trace, in its room.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Step {
    pub(crate) minute: u32,
    pub(crate) kind: Kind,
    /// Which user of the room.
    pub(crate) user: usize,
    pub(crate) bytes: usize,
}

/// One room, its users in the order in which they appear, and what happens in it.
#[derive(Debug, Default)]
pub(crate) struct Room {
    pub(crate) name: String,
    pub(crate) users: Vec<String>,
    pub(crate) steps: Vec<Step>,
}

pub(crate) fn load(file: &Path) -> Result<Vec<Room>, Failure> {
    let text = std::fs::read_to_string(file).map_err(|error| format!("{}: {error}", file.display()))?;
    parse(&text).map_err(|error| format!("{}: {error}", file.display()).into())
}

/// Reads the lines; the first one names the columns.
pub(crate) fn parse(text: &str) -> Result<Vec<Room>, String> {
    const COLUMNS: &str = "minute\troom\tevent\tuser\tbytes";
    let mut lines = text.lines().enumerate();
    if lines.next().map(|(_, line)| line) != Some(COLUMNS) {
        return Err(format!("the first line must be {COLUMNS:?}"));
    }
    let mut rooms: Vec<Room> = Vec::new();
    let mut numbers = HashMap::new();
    let mut users = HashMap::new();
    for (index, line) in lines {
        let bad = |what: &str| format!("line {}: {what} in {line:?}", index + 1);
        let fields: Vec<_> = line.split('\t').collect();
        let [minute, room, event, user, bytes] = fields[..] else {
            return Err(bad(&format!("{} fields instead of 5", fields.len())));
        };
        let minute = minute.parse().map_err(|_| bad("no minute"))?;
        let bytes = bytes.parse().map_err(|_| bad("no number of bytes"))?;
        let kind = match event {
            "join" => Kind::Join,
            "msg" => Kind::Say,
            "leave" => Kind::Leave,
            _ => return Err(bad("an event that is not join, msg or leave")),
        };
        if room.is_empty() || user.is_empty() {
            return Err(bad("an empty room or user"));
        }
        let number = *numbers.entry(room).or_insert_with(|| {
            rooms.push(Room { name: room.to_owned(), ..Room::default() });
            rooms.len() - 1
        });
        let place = &mut rooms[number];
        let user = *users.entry((number, user)).or_insert_with(|| {
            place.users.push(user.to_owned());
            place.users.len() - 1
        });
        place.steps.push(Step { minute, kind, user, bytes });
    }
    Ok(rooms)
}

/// Which of so many nodes serves a user: by a hash of its name, so that it does not depend on the room.
pub(crate) fn node_of(user: &str, nodes: usize) -> usize {
    let hash = user.bytes().fold(0xcbf2_9ce4_8422_2325u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    });
    super::Dice::new(hash).roll(nodes)
}
