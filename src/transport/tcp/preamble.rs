//! What the two ends of a connection say before they trust each other, in bytes; and what is no such thing.
//!
//! ```text
//! | 8f "MSTR" 0a | version: u8 | kind: u8 | length: u16 LE | body |        1 KiB at most, all in all
//!   kind 1  preamble: node, scope, advertised address, instance, nonce, wanted authentication (postcard)
//!   kind 2  proof: 32 bytes, or none where no secret is used
//!   kind 3  refused: cause: u8, words (postcard); read the same in all versions
//! ```
//!
//! Bytes may stand behind the fields of a body: a later minor version may add some. The first byte is neither
//! text nor TLS, so a stranger is known by its first bytes.

use std::fmt;

use bytes::{Buf, BufMut, Bytes, BytesMut};
use serde::{Deserialize, Serialize};

use super::auth::{RefusalCause, Reject};
use crate::types::NodeId;

/// Of the preamble and the records; ends of different ones refuse each other.
pub(crate) const TCP_VERSION: u8 = 1;
/// The longest message before a peer is trusted, in bytes.
pub(crate) const MAX_MESSAGE: usize = 1024;
/// The longest advertised address, in bytes: a DNS name and a port.
pub(crate) const MAX_ADVERTISE: usize = 270;

const MAGIC: [u8; 6] = *b"\x8fMSTR\n";
const HEADER: usize = 10;
const PREAMBLE: u8 = 1;
const PROOF: u8 = 2;
const REFUSED: u8 = 3;
/// The longest words of a refusal, in bytes.
const MAX_WORDS: usize = 900;

/// Who a node says that it is, before anything is proved.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Preamble {
    /// Its name.
    pub(crate) node: NodeId,
    /// The name of its scope, 255 bytes at most.
    pub(crate) scope: String,
    /// Where others may dial it: `host:port`, [`MAX_ADVERTISE`] bytes at most.
    pub(crate) advertise: String,
    /// A random number of this start of the transport: tells a node that has dialled itself from two nodes of
    /// one name.
    pub(crate) instance: u64,
}

/// How an end wants to be sure of the other one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Mode {
    pub(crate) secret: bool,
    pub(crate) tls: bool,
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match (self.secret, self.tls) {
            (false, false) => "neither TLS nor a secret",
            (true, false) => "a secret without TLS",
            (false, true) => "TLS without a secret",
            (true, true) => "TLS and a secret",
        })
    }
}

/// The body of a preamble.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Opening {
    pub(crate) preamble: Preamble,
    pub(crate) nonce: [u8; 32],
    pub(crate) mode: Mode,
}

/// Something that is not ours, known by its first bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Foreign {
    Http,
    Tls,
    Unknown,
}

impl fmt::Display for Foreign {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Foreign::Http => "HTTP",
            Foreign::Tls => "TLS, and this node has no TLS on that port",
            Foreign::Unknown => "something that is no message of this library",
        })
    }
}

/// What first bytes say about a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sniffed {
    /// Ours, as far as can be seen.
    Ours,
    /// Too few bytes to know.
    Open,
    Foreign(Foreign),
}

/// Looks at the first bytes of a connection; eight of them always decide.
pub(crate) fn sniff(bytes: &[u8]) -> Sniffed {
    const HTTP: [&[u8]; 11] = [
        b"GET ",
        b"HEAD ",
        b"POST ",
        b"PUT ",
        b"DELETE ",
        b"CONNECT ",
        b"OPTIONS ",
        b"TRACE ",
        b"PATCH ",
        b"PRI * ",
        b"HTTP/",
    ];
    // a handshake, or an alert: the answer of a TLS server to what it did not understand
    const TLS: [&[u8]; 2] = [&[0x16, 3], &[0x15, 3]];
    let begins = |whole: &[u8]| whole.iter().zip(bytes).all(|(a, b)| a == b);
    let known = |whole: &&[u8]| begins(whole) && bytes.len() >= whole.len();
    if begins(&MAGIC) {
        return if bytes.is_empty() { Sniffed::Open } else { Sniffed::Ours };
    }
    if HTTP.iter().any(known) {
        return Sniffed::Foreign(Foreign::Http);
    }
    if TLS.iter().any(known) {
        return Sniffed::Foreign(Foreign::Tls);
    }
    if HTTP.iter().chain(&TLS).any(|whole| begins(whole)) {
        return Sniffed::Open;
    }
    Sniffed::Foreign(Foreign::Unknown)
}

/// One message, whole.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Said {
    /// Also as it came, for the transcript.
    Preamble(Box<Opening>, Bytes),
    Proof(Bytes),
    Refused {
        cause: RefusalCause,
        words: String,
    },
}

/// Takes one message off the front of `bytes`, or `None` if it is not whole yet; no more than its own bytes.
///
/// # Errors
/// A [`Reject`] as soon as the bytes cannot become a message: before the rest has come.
pub(crate) fn take(bytes: &mut BytesMut) -> Result<Option<Said>, Reject> {
    match sniff(bytes) {
        Sniffed::Ours => {}
        Sniffed::Open => return Ok(None),
        Sniffed::Foreign(what) => return Err(Reject::Foreign { what }),
    }
    let Some((&[.., version, kind, low, high], _)) = bytes.split_first_chunk::<HEADER>() else {
        return Ok(None);
    };
    let length = usize::from(u16::from_le_bytes([low, high]));
    // refusals are read in all versions: an older or newer node says why there is no link
    if version != TCP_VERSION && kind != REFUSED {
        return Err(Reject::Version { theirs: version, ours: TCP_VERSION });
    }
    if HEADER + length > MAX_MESSAGE {
        return Err(Reject::TooLarge { length: HEADER + length, max: MAX_MESSAGE });
    }
    if bytes.len() < HEADER + length {
        return Ok(None);
    }
    let whole = bytes.split_to(HEADER + length).freeze();
    let mut body = whole.clone();
    body.advance(HEADER);
    match kind {
        PREAMBLE => opening(&body).map(|opening| Some(Said::Preamble(Box::new(opening), whole))),
        PROOF => Ok(Some(Said::Proof(body))),
        REFUSED => refused(&body).map(Some),
        _ => Err(Reject::Malformed { what: "a message of an unknown kind" }),
    }
}

fn opening(body: &[u8]) -> Result<Opening, Reject> {
    let Ok((opening, _later)) = postcard::take_from_bytes::<Opening>(body) else {
        return Err(Reject::Malformed { what: "a preamble whose fields make no sense" });
    };
    if opening.preamble.advertise.len() > MAX_ADVERTISE {
        return Err(Reject::Malformed { what: "an advertised address that is too long" });
    }
    Ok(opening)
}

fn refused(body: &[u8]) -> Result<Said, Reject> {
    let Ok(((cause, words), _later)) = postcard::take_from_bytes::<(u8, &str)>(body) else {
        return Err(Reject::Malformed { what: "a refusal whose fields make no sense" });
    };
    // it ends in a log, and whoever wrote it has proved nothing
    let words = words.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    Ok(Said::Refused { cause: RefusalCause::from_wire(cause), words })
}

fn message(kind: u8, body: &[u8]) -> Bytes {
    let mut bytes = BytesMut::with_capacity(HEADER + body.len());
    bytes.put_slice(&MAGIC);
    bytes.put_u8(TCP_VERSION);
    bytes.put_u8(kind);
    bytes.put_u16_le(body.len() as u16);
    bytes.put_slice(body);
    bytes.freeze()
}

/// # Errors
/// [`Reject::TooLarge`] if it could not be sent; names and addresses that were checked always fit.
pub(crate) fn encode_opening(opening: &Opening) -> Result<Bytes, Reject> {
    let body = postcard::to_allocvec(opening).unwrap_or_default();
    if body.is_empty() || HEADER + body.len() > MAX_MESSAGE {
        return Err(Reject::TooLarge { length: HEADER + body.len(), max: MAX_MESSAGE });
    }
    Ok(message(PREAMBLE, &body))
}

pub(crate) fn encode_proof(proof: &[u8]) -> Bytes {
    message(PROOF, proof)
}

pub(crate) fn encode_refused(cause: RefusalCause, words: &str) -> Bytes {
    let mut end = words.len().min(MAX_WORDS);
    while !words.is_char_boundary(end) {
        end -= 1;
    }
    let words = words.get(..end).unwrap_or_default();
    message(REFUSED, &postcard::to_allocvec(&(cause.to_wire(), words)).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    pub(crate) fn an_opening(node: &str) -> Opening {
        Opening {
            preamble: Preamble {
                node: NodeId::new(node).unwrap(),
                scope: "rooms".into(),
                advertise: "10.0.0.1:7001".into(),
                instance: 300,
            },
            nonce: [7; 32],
            mode: Mode { secret: true, tls: false },
        }
    }

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|b| format!("{b:02x}")).collect()
    }

    fn taken(bytes: &[u8]) -> Result<Option<Said>, Reject> {
        take(&mut BytesMut::from(bytes))
    }

    /// A change here is a change of the wire: nodes of two releases would not understand each other.
    #[test]
    fn golden_bytes_of_every_message() {
        let opening = an_opening("a");
        let bytes = encode_opening(&opening).unwrap();
        let head =
            "8f4d5354520a 01 01 3a00 0161 05726f6f6d73 0d31302e302e302e313a37303031 ac02".replace(' ', "");
        assert_eq!(hex(&bytes), format!("{head}{}0100", "07".repeat(32)));
        assert_eq!(taken(&bytes), Ok(Some(Said::Preamble(Box::new(opening), bytes.clone()))));

        let bytes = encode_proof(&[1, 2]);
        assert_eq!(hex(&bytes), "8f4d5354520a010202000102");
        assert_eq!(taken(&bytes), Ok(Some(Said::Proof(Bytes::from_static(&[1, 2])))));

        let bytes = encode_refused(RefusalCause::Scope, "no\nway");
        assert_eq!(hex(&bytes), "8f4d5354520a0103080000066e6f0a776179");
        let refused = Said::Refused { cause: RefusalCause::Scope, words: "no way".into() };
        assert_eq!(taken(&bytes), Ok(Some(refused)));
    }

    #[test]
    fn the_longest_names_fit_and_longer_ones_are_refused() {
        let mut opening = an_opening(&"n".repeat(255));
        opening.preamble.scope = "s".repeat(255);
        opening.preamble.advertise = "a".repeat(MAX_ADVERTISE);
        opening.preamble.instance = u64::MAX;
        let bytes = encode_opening(&opening).unwrap();
        assert!(matches!(taken(&bytes), Ok(Some(Said::Preamble(back, _))) if *back == opening));
        opening.preamble.advertise.push('a');
        let bytes = encode_opening(&opening).unwrap();
        assert!(matches!(taken(&bytes), Err(Reject::Malformed { .. })));
        opening.preamble.scope = "s".repeat(900);
        assert!(matches!(encode_opening(&opening), Err(Reject::TooLarge { .. })));
    }

    #[test]
    fn hazard_22_a_message_that_is_cut_waits_and_one_that_cannot_be_is_refused_at_once() {
        let bytes = encode_opening(&an_opening("a")).unwrap();
        for end in 0..bytes.len() {
            assert_eq!(taken(&bytes[..end]), Ok(None), "cut at {end}");
        }
        let huge = [&MAGIC[..], &[TCP_VERSION, PREAMBLE, 0xff, 0xff]].concat();
        assert_eq!(taken(&huge), Err(Reject::TooLarge { length: 65545, max: 1024 }));
        let newer = [&MAGIC[..], &[2, PREAMBLE, 4, 0]].concat();
        assert_eq!(taken(&newer), Err(Reject::Version { theirs: 2, ours: 1 }));
        let mut refusal = encode_refused(RefusalCause::Version, "too old").to_vec();
        refusal[6] = 2;
        assert!(matches!(taken(&refusal), Ok(Some(Said::Refused { cause: RefusalCause::Version, .. }))));
        let unknown = [&MAGIC[..], &[TCP_VERSION, 9, 0, 0]].concat();
        assert!(matches!(taken(&unknown), Err(Reject::Malformed { .. })));
    }

    #[test]
    fn strangers_are_known_by_their_first_bytes() {
        let foreign = |what| Sniffed::Foreign(what);
        assert_eq!(sniff(b"GET / HTTP/1.1\r\n"), foreign(Foreign::Http));
        assert_eq!(sniff(b"OPTIONS * HTTP/1.1\r\n"), foreign(Foreign::Http));
        assert_eq!(sniff(b"HTTP/1.1 400 Bad Request"), foreign(Foreign::Http));
        assert_eq!(sniff(b"PRI * HTTP/2.0"), foreign(Foreign::Http));
        assert_eq!(sniff(&[0x16, 3, 1, 2, 0]), foreign(Foreign::Tls));
        assert_eq!(sniff(&[0x15, 3, 3, 0, 2]), foreign(Foreign::Tls));
        assert_eq!(sniff(b"SSH-2.0-x"), foreign(Foreign::Unknown));
        assert_eq!(sniff(&[0, 0, 0, 0]), foreign(Foreign::Unknown));
        assert_eq!(sniff(b"GETS"), foreign(Foreign::Unknown));
        assert_eq!((sniff(b""), sniff(b"GE"), sniff(&[0x16])), (Sniffed::Open, Sniffed::Open, Sniffed::Open));
        assert_eq!((sniff(&MAGIC[..1]), sniff(&MAGIC)), (Sniffed::Ours, Sniffed::Ours));
    }

    #[test]
    fn long_words_of_a_refusal_are_cut_at_a_character() {
        let bytes = encode_refused(RefusalCause::Secret, &"ä".repeat(2000));
        assert!(bytes.len() <= MAX_MESSAGE);
        let Ok(Some(Said::Refused { words, .. })) = taken(&bytes) else { panic!("no refusal") };
        assert_eq!(words, "ä".repeat(450));
    }

    proptest! {
        #[test]
        fn hazard_22_random_bytes_never_panic(
            random in prop::collection::vec(any::<u8>(), 0..80), kind in 0u8..5, length in 0u16..90
        ) {
            let _ = taken(&random);
            prop_assert!(random.len() < 8 || sniff(&random) != Sniffed::Open);
            let framed = [&MAGIC[..], &[TCP_VERSION, kind], &length.to_le_bytes(), &random].concat();
            let mut bytes = BytesMut::from(&framed[..]);
            if let Ok(Some(_)) = take(&mut bytes) {
                prop_assert_eq!(bytes.len(), random.len() - usize::from(length));
            }
        }
    }
}
