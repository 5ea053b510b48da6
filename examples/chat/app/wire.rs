//! What goes over a websocket.
//!
//! * **Text**, for people: each frame of a client is one [`Command`]; each frame of the server is a JSON
//!   array of [`Event`]s, so that one frame carries whatever has gathered.
//! * **Binary**, for gateways that carry many users over one socket: each frame, either way, is a sequence of
//!   [`Compact`] items back to back. Users and rooms are numbers; the payload is passed on untouched.
//!
//! Both name the user in every command, so one socket can carry any number of users.

use std::sync::Arc;

use bytes::{Buf, BufMut, Bytes, BytesMut};
use serde::{Deserialize, Serialize};

use super::cluster::{Decision, Picture};

/// The longest room name, user handle, display name and message id, in bytes.
pub(crate) const MAX_NAME: usize = 200;
/// The longest text of a message, in bytes.
pub(crate) const MAX_TEXT: usize = 16 * 1024;
/// The largest websocket message that is taken, in bytes.
pub(crate) const MAX_FRAME: usize = 1024 * 1024;

/// The group in which a room's messages travel.
pub(crate) fn room_group(room: &str) -> String {
    format!("room:{room}")
}

/// The group in which the nodes tell each other who is in a room.
pub(crate) fn seen_group(room: &str) -> String {
    format!("seen:{room}")
}

/// What a client asks for. `re` comes back in the answer.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "lowercase", deny_unknown_fields)]
pub(crate) enum Command {
    /// `quiet` members are not shown in the list of people and get no history.
    Join {
        re: u64,
        user: Arc<str>,
        #[serde(default)]
        name: Arc<str>,
        room: Arc<str>,
        #[serde(default)]
        quiet: bool,
    },
    Leave {
        re: u64,
        user: Arc<str>,
        room: Arc<str>,
    },
    /// `id` names the message for good: a client that sends it again over another node uses the same one,
    /// and receivers drop the second copy.
    Say {
        re: u64,
        user: Arc<str>,
        #[serde(default)]
        name: Arc<str>,
        room: Arc<str>,
        id: Arc<str>,
        text: String,
    },
    /// Keep sending pictures of the cluster, with this room in them.
    Watch {
        room: Option<Arc<str>>,
    },
    /// Stop a node; `crash` cuts it off without warning.
    Stop {
        re: u64,
        node: Arc<str>,
        #[serde(default)]
        crash: bool,
    },
    Start {
        re: u64,
        node: Arc<str>,
    },
    /// Answered behind everything that was queued for this socket before.
    Echo {
        re: u64,
    },
}

/// What the server says.
#[derive(Debug, Serialize)]
#[serde(tag = "is", rename_all = "lowercase")]
pub(crate) enum Event<'a> {
    Welcome {
        node: &'a str,
        nodes: Vec<Place>,
    },
    Ok {
        re: u64,
    },
    Sent {
        re: u64,
        decision: &'static str,
        nodes: Option<usize>,
    },
    Failed {
        re: Option<u64>,
        why: String,
    },
    /// One message, for these users of this socket.
    Said {
        room: &'a str,
        origin: &'a str,
        to: &'a [Arc<str>],
        said: &'a Said,
    },
    /// What was said in a room before.
    Past {
        room: &'a str,
        said: Vec<&'a Past>,
    },
    Who {
        room: &'a str,
        people: Vec<Person>,
    },
    Cluster {
        picture: &'a Picture,
    },
    /// This node is about to stop; move to another one.
    Going,
}

impl Event<'_> {
    pub(crate) fn encode(&self) -> String {
        serde_json::to_string(self).unwrap_or_else(|error| {
            // None of the types above can fail to serialise; say so if one ever does.
            format!(
                r#"{{"is":"failed","re":null,"why":"not encodable ({} characters)"}}"#,
                error.to_string().len()
            )
        })
    }
}

/// A node and where its page is.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Place {
    pub(crate) name: Arc<str>,
    pub(crate) port: u16,
}

/// Somebody in a room.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) struct Person {
    pub(crate) name: Arc<str>,
    pub(crate) user: Arc<str>,
    pub(crate) node: Arc<str>,
}

/// The payload of a broadcast in a room, as the text protocol writes and reads it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Said {
    pub(crate) id: Arc<str>,
    pub(crate) user: Arc<str>,
    pub(crate) name: Arc<str>,
    pub(crate) text: String,
    /// Milliseconds since 1970, by the clock of the sender's node.
    pub(crate) at: u64,
}

/// A message of before, and the node where it began.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Past {
    pub(crate) origin: Arc<str>,
    #[serde(flatten)]
    pub(crate) said: Said,
}

/// How a decision is called on the wire and on the page.
pub(crate) fn decision_name(decision: Decision) -> &'static str {
    match decision {
        Decision::Targeted => "targeted",
        Decision::Flooded => "flooded",
        _ => "unknown",
    }
}

/// One item of a binary frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Compact {
    Join { user: u32, room: u32 },
    Leave { user: u32, room: u32 },
    Say { room: u32, number: u32, payload: Bytes },
    Joined { user: u32, room: u32 },
    Left { user: u32, room: u32 },
    Sent { room: u32, number: u32, flooded: bool },
    Deliver { room: u32, payload: Bytes, to: Vec<u32> },
    Failed { room: u32, why: String },
}

/// A binary frame that is not a sequence of items.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Malformed;

impl Compact {
    /// The room that it is about.
    pub(crate) fn room(&self) -> u32 {
        match self {
            Compact::Join { room, .. }
            | Compact::Leave { room, .. }
            | Compact::Say { room, .. }
            | Compact::Joined { room, .. }
            | Compact::Left { room, .. }
            | Compact::Sent { room, .. }
            | Compact::Deliver { room, .. }
            | Compact::Failed { room, .. } => *room,
        }
    }

    pub(crate) fn write(&self, out: &mut BytesMut) {
        match self {
            Compact::Join { user, room } => put(out, 1, &[*user, *room]),
            Compact::Leave { user, room } => put(out, 2, &[*user, *room]),
            Compact::Say { room, number, payload } => {
                put(out, 3, &[*room, *number, length(payload.len())]);
                out.put_slice(payload);
            }
            Compact::Joined { user, room } => put(out, 4, &[*user, *room]),
            Compact::Left { user, room } => put(out, 5, &[*user, *room]),
            Compact::Sent { room, number, flooded } => put(out, 6, &[*room, *number, u32::from(*flooded)]),
            Compact::Deliver { room, payload, to } => {
                put(out, 7, &[*room, length(payload.len()), length(to.len())]);
                out.put_slice(payload);
                to.iter().for_each(|user| put_number(out, *user));
            }
            Compact::Failed { room, why } => {
                put(out, 8, &[*room, length(why.len())]);
                out.put_slice(why.as_bytes());
            }
        }
    }

    /// The next item of a frame. Nothing is reserved beyond the frame's own length.
    pub(crate) fn read(frame: &mut Bytes) -> Result<Self, Malformed> {
        let kind = if frame.has_remaining() { frame.get_u8() } else { return Err(Malformed) };
        let first = number(frame)?;
        Ok(match kind {
            1 => Compact::Join { user: first, room: number(frame)? },
            2 => Compact::Leave { user: first, room: number(frame)? },
            3 => Compact::Say { room: first, number: number(frame)?, payload: block(frame)? },
            4 => Compact::Joined { user: first, room: number(frame)? },
            5 => Compact::Left { user: first, room: number(frame)? },
            6 => Compact::Sent { room: first, number: number(frame)?, flooded: number(frame)? != 0 },
            7 => {
                let (bytes, users) = (number(frame)? as usize, number(frame)? as usize);
                let payload = take(frame, bytes)?;
                if users > frame.remaining() {
                    return Err(Malformed);
                }
                let to = (0..users).map(|_| number(frame)).collect::<Result<_, _>>()?;
                Compact::Deliver { room: first, payload, to }
            }
            8 => {
                let why = block(frame)?;
                Compact::Failed { room: first, why: String::from_utf8_lossy(&why).into_owned() }
            }
            _ => return Err(Malformed),
        })
    }
}

fn length(value: usize) -> u32 {
    u32::try_from(value).unwrap_or(u32::MAX)
}

fn put(out: &mut BytesMut, kind: u8, numbers: &[u32]) {
    out.put_u8(kind);
    numbers.iter().for_each(|number| put_number(out, *number));
}

fn put_number(out: &mut BytesMut, mut value: u32) {
    while value >= 0x80 {
        out.put_u8((value & 0x7f) as u8 | 0x80);
        value >>= 7;
    }
    out.put_u8(value as u8);
}

fn number(frame: &mut Bytes) -> Result<u32, Malformed> {
    let mut value = 0u64;
    for shift in (0..35).step_by(7) {
        if !frame.has_remaining() {
            return Err(Malformed);
        }
        let byte = frame.get_u8();
        value |= u64::from(byte & 0x7f) << shift;
        if byte < 0x80 {
            return u32::try_from(value).map_err(|_| Malformed);
        }
    }
    Err(Malformed)
}

fn block(frame: &mut Bytes) -> Result<Bytes, Malformed> {
    let bytes = number(frame)? as usize;
    take(frame, bytes)
}

fn take(frame: &mut Bytes, bytes: usize) -> Result<Bytes, Malformed> {
    if bytes > frame.remaining() {
        return Err(Malformed);
    }
    Ok(frame.split_to(bytes))
}
