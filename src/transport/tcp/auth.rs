//! Who is at the other end: the exchange of preambles and proofs, sans-IO.
//!
//! ```text
//!   dialler                                     acceptor
//!   preamble{node, scope, nonce, mode} ───────▶           checks it; has written nothing so far
//!             ◀─────── preamble{node, scope, nonce, mode}
//!   checks it;  proof ────────────────────────▶           checks it: knows now who dials
//!             ◀─────────────────────────── proof
//!   checks it: knows now whom it has dialled; records follow
//! ```
//!
//! A proof is HMAC-SHA-256, under the secret, of the prover's role, both preambles as they went over the wire
//! (with both nonces) and, under TLS, of keying material that only the two ends of this TLS connection have. So
//! it is of no use on another connection (replay), in the other direction (reflection), after a change of either
//! preamble, or through a relay that ends TLS. Without a secret the proofs are empty, and with TLS the
//! certificates prove who speaks. The dialler proves first: a stranger who connects learns nothing that it could
//! try guesses on.

use std::fmt;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;
use subtle::ConstantTimeEq;

use super::preamble::{self, Foreign, Mode, Opening, Preamble, Said};
use crate::types::NodeId;

/// The shortest secret, in bytes.
const MIN_SECRET: usize = 16;
/// The longest file that is read as a secret, in bytes.
const MAX_SECRET: usize = 64 << 10;

/// Why a secret was not taken.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SecretError {
    /// It has to be long enough that nobody can try all of them.
    #[error(
        "a secret of {given} bytes was given; {MIN_SECRET} to {MAX_SECRET} bytes are allowed (openssl rand -hex 32)"
    )]
    Length {
        /// How many bytes it had, a newline at the end of a file not counted.
        given: usize,
    },
    /// The file could not be read.
    #[error("the secret could not be read from {}: {error}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        error: std::io::Error,
    },
}

/// What all nodes of a scope know and nobody else: it proves that a node belongs to them, and never travels.
///
/// Everybody who has it can take any node's name. Without TLS it does not hide or protect what nodes say to each
/// other; see the guide on security.
#[derive(Clone)]
pub struct Secret {
    bytes: Arc<[u8]>,
    also: Vec<Arc<[u8]>>,
}

impl Secret {
    /// Takes 16 bytes or more, from a random generator.
    ///
    /// # Errors
    /// [`SecretError::Length`].
    pub fn new(bytes: impl AsRef<[u8]>) -> Result<Self, SecretError> {
        let bytes = bytes.as_ref();
        if !(MIN_SECRET..=MAX_SECRET).contains(&bytes.len()) {
            return Err(SecretError::Length { given: bytes.len() });
        }
        Ok(Self { bytes: bytes.into(), also: Vec::new() })
    }

    /// Reads it from a file. Newlines at its end do not count; everything else does.
    ///
    /// # Errors
    /// [`SecretError`].
    pub fn from_file(path: impl AsRef<Path>) -> Result<Self, SecretError> {
        let path = path.as_ref();
        let mut bytes = Vec::new();
        std::fs::File::open(path)
            .and_then(|file| file.take(MAX_SECRET as u64 + 3).read_to_end(&mut bytes))
            .map_err(|error| SecretError::Read { path: path.to_owned(), error })?;
        let end = bytes.iter().rposition(|byte| !matches!(byte, b'\n' | b'\r')).map_or(0, |last| last + 1);
        bytes.truncate(end);
        Self::new(bytes)
    }

    /// Takes proofs of another secret too, while this one stays the one that is proved. For a change of secret
    /// without a pause: roll out `old.accept(new)`, then `new.accept(old)`, then `new`.
    #[must_use]
    pub fn accept(mut self, other: Secret) -> Self {
        self.also.push(other.bytes);
        self
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

/// Why a connection became no link, for counting. A cause of the peer's refusal counts as the same cause here.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum RefusalCause {
    /// Another scope.
    Scope,
    /// Another major version of the TCP transport.
    Version,
    /// A node that has dialled itself; an own address among the seeds is no fault.
    Itself,
    /// Another node of our name.
    SameName,
    /// One end wants a secret or TLS, the other one does not.
    Mode,
    /// The secret was not proved.
    Secret,
    /// A certificate of another authority, expired, not valid yet, or not fit for its use.
    Certificate,
    /// A certificate that does not name the node.
    CertificateName,
    /// TLS failed in another way.
    Tls,
    /// An HTTP client or server.
    Http,
    /// TLS where none is spoken.
    TlsForeign,
    /// Bytes that mean nothing.
    Malformed,
    /// A length above the limit.
    TooLarge,
    /// The connection ended during the handshake: a port scanner, a health check.
    Closed,
    /// The handshake took too long.
    Deadline,
    /// Too many handshakes were going on.
    TooMany,
    /// The link's own handshake refused: ring parameters, protocol version, the same name twice.
    Link,
    /// The link's hello named another node than the preamble.
    OtherNode,
    /// A cause that a newer node gave.
    Other,
}

impl RefusalCause {
    /// All causes, in a fixed order.
    pub const ALL: [RefusalCause; 19] = [
        RefusalCause::Scope,
        RefusalCause::Version,
        RefusalCause::Itself,
        RefusalCause::SameName,
        RefusalCause::Mode,
        RefusalCause::Secret,
        RefusalCause::Certificate,
        RefusalCause::CertificateName,
        RefusalCause::Tls,
        RefusalCause::Http,
        RefusalCause::TlsForeign,
        RefusalCause::Malformed,
        RefusalCause::TooLarge,
        RefusalCause::Closed,
        RefusalCause::Deadline,
        RefusalCause::TooMany,
        RefusalCause::Link,
        RefusalCause::OtherNode,
        RefusalCause::Other,
    ];

    /// Its place in [`RefusalCause::ALL`].
    pub const fn index(self) -> usize {
        self as usize
    }

    /// A short name, for a label of a metric.
    pub const fn name(self) -> &'static str {
        match self {
            RefusalCause::Scope => "scope",
            RefusalCause::Version => "version",
            RefusalCause::Itself => "itself",
            RefusalCause::SameName => "same_name",
            RefusalCause::Mode => "mode",
            RefusalCause::Secret => "secret",
            RefusalCause::Certificate => "certificate",
            RefusalCause::CertificateName => "certificate_name",
            RefusalCause::Tls => "tls",
            RefusalCause::Http => "http",
            RefusalCause::TlsForeign => "tls_foreign",
            RefusalCause::Malformed => "malformed",
            RefusalCause::TooLarge => "too_large",
            RefusalCause::Closed => "closed",
            RefusalCause::Deadline => "deadline",
            RefusalCause::TooMany => "too_many",
            RefusalCause::Link => "link",
            RefusalCause::OtherNode => "other_node",
            RefusalCause::Other => "other",
        }
    }

    /// On the wire a cause is its place: add new ones before `Other` only together with a new number here.
    pub(crate) fn to_wire(self) -> u8 {
        match self {
            RefusalCause::Other => u8::MAX,
            cause => cause.index() as u8,
        }
    }

    pub(crate) fn from_wire(number: u8) -> Self {
        Self::ALL.get(usize::from(number)).copied().unwrap_or(RefusalCause::Other)
    }
}

impl fmt::Display for RefusalCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Why a connection was refused. Nothing has changed but a counter. Names come from ends that may have proved
/// nothing, so they are written escaped.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Reject {
    #[error("node {node:?} of scope {theirs:?} was refused by a node of scope {ours:?}")]
    Scope { node: NodeId, theirs: String, ours: String },
    #[error("version {theirs} of the TCP transport was refused by a node of version {ours}")]
    Version { theirs: u8, ours: u8 },
    #[error("the node has dialled itself")]
    Itself,
    #[error(
        "two live nodes are named {node:?}: one at {theirs:?} was refused by one at {ours:?}; each needs a name \
         of its own"
    )]
    SameName { node: NodeId, theirs: String, ours: String },
    #[error("node {node:?}, which uses {theirs}, was refused by node {us:?}, which uses {ours}")]
    Mode { node: NodeId, theirs: Mode, us: NodeId, ours: Mode },
    /// A plain preamble came where TLS is spoken; it was not read further, so nobody is named.
    #[error("a connection without TLS was refused by a node that uses TLS")]
    PlainForTls,
    #[error("node {node:?} at {address:?} did not prove the secret that node {us:?} uses")]
    Secret { node: NodeId, address: String, us: NodeId },
    #[error("the certificate of node {node:?} names {names}, not that node")]
    CertificateName { node: NodeId, names: String },
    /// A certificate is not to be trusted; the words name both sides' values.
    #[error("{words}")]
    Certificate { words: String },
    #[error("TLS failed: {words}")]
    Tls { words: String },
    #[error("the other end speaks {what}")]
    Foreign { what: Foreign },
    #[error("the other end sent {what}")]
    Malformed { what: &'static str },
    #[error("a handshake message of {length} bytes was sent; {max} are allowed")]
    TooLarge { length: usize, max: usize },
    /// The other end said so.
    #[error("refused by the other end: {words}")]
    Refused { cause: RefusalCause, words: String },
    #[error("the connection ended during the handshake")]
    Closed,
    #[error("the handshake was not done in time")]
    Deadline,
}

impl Reject {
    /// Under which name it is counted.
    pub(crate) fn cause(&self) -> RefusalCause {
        match self {
            Reject::Scope { .. } => RefusalCause::Scope,
            Reject::Version { .. } => RefusalCause::Version,
            Reject::Itself => RefusalCause::Itself,
            Reject::SameName { .. } => RefusalCause::SameName,
            Reject::Mode { .. } | Reject::PlainForTls => RefusalCause::Mode,
            Reject::Secret { .. } => RefusalCause::Secret,
            Reject::CertificateName { .. } => RefusalCause::CertificateName,
            Reject::Certificate { .. } => RefusalCause::Certificate,
            Reject::Tls { .. } => RefusalCause::Tls,
            Reject::Foreign { what: Foreign::Http } => RefusalCause::Http,
            Reject::Foreign { what: Foreign::Tls } => RefusalCause::TlsForeign,
            Reject::Foreign { what: Foreign::Unknown } | Reject::Malformed { .. } => RefusalCause::Malformed,
            Reject::TooLarge { .. } => RefusalCause::TooLarge,
            Reject::Refused { cause, .. } => *cause,
            Reject::Closed => RefusalCause::Closed,
            Reject::Deadline => RefusalCause::Deadline,
        }
    }

    /// The node that is refused, as far as it has said its name.
    pub(crate) fn node(&self) -> Option<&NodeId> {
        match self {
            Reject::Scope { node, .. }
            | Reject::SameName { node, .. }
            | Reject::Mode { node, .. }
            | Reject::Secret { node, .. }
            | Reject::CertificateName { node, .. } => Some(node),
            Reject::Version { .. }
            | Reject::Itself
            | Reject::PlainForTls
            | Reject::Certificate { .. }
            | Reject::Tls { .. }
            | Reject::Foreign { .. }
            | Reject::Malformed { .. }
            | Reject::TooLarge { .. }
            | Reject::Refused { .. }
            | Reject::Closed
            | Reject::Deadline => None,
        }
    }

    /// Whether a short refusal ([`Reject::encode`]) may be written before closing: the other end has shown that
    /// it speaks our protocol, and it did not refuse first.
    pub(crate) fn is_ours_to_say(&self) -> bool {
        match self {
            Reject::Scope { .. }
            | Reject::Version { .. }
            | Reject::Itself
            | Reject::SameName { .. }
            | Reject::Mode { .. }
            | Reject::PlainForTls
            | Reject::Secret { .. }
            | Reject::CertificateName { .. } => true,
            Reject::Certificate { .. }
            | Reject::Tls { .. }
            | Reject::Foreign { .. }
            | Reject::Malformed { .. }
            | Reject::TooLarge { .. }
            | Reject::Refused { .. }
            | Reject::Closed
            | Reject::Deadline => false,
        }
    }

    /// The refusal as it goes over the wire.
    pub(crate) fn encode(&self) -> Bytes {
        preamble::encode_refused(self.cause(), &self.to_string())
    }
}

/// Which end of the connection this is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    Dialer,
    Acceptor,
}

impl Role {
    fn label(self) -> &'static [u8] {
        match self {
            Role::Dialer => b"muster-router tcp proof of the dialler\0",
            Role::Acceptor => b"muster-router tcp proof of the acceptor\0",
        }
    }

    fn other(self) -> Self {
        match self {
            Role::Dialer => Role::Acceptor,
            Role::Acceptor => Role::Dialer,
        }
    }
}

/// What TLS has found out about the other end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TlsPeer {
    /// Keying material that only the two ends of this TLS connection have.
    pub(crate) binding: [u8; 32],
    /// The nodes that its certificate names.
    pub(crate) names: Vec<String>,
}

/// What to do next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// Write this, then call again.
    Send(Bytes),
    /// Read more, then call again.
    NeedMore,
    /// The other end is who it says; what is left of the input is records.
    Done { peer: Preamble },
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum State {
    /// The dialler has said nothing yet.
    Begin,
    AwaitPreamble,
    AwaitProof,
    /// The acceptor has proved itself.
    Finished,
    Failed(Reject),
}

/// One handshake of one connection. Input: [`Handshake::handle`], called until it is done or refuses. The caller
/// bounds the time.
pub(crate) struct Handshake {
    role: Role,
    ours: Opening,
    secret: Option<Secret>,
    tls: Option<TlsPeer>,
    state: State,
    peer: Option<Opening>,
    /// Both preambles as they are on the wire, by role.
    said: [Bytes; 2],
    /// Under which of the accepted secrets the dialler has proved itself; the acceptor answers with the same.
    proved: Option<Arc<[u8]>>,
}

impl fmt::Debug for Handshake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Handshake")
            .field("role", &self.role)
            .field("ours", &self.ours.preamble)
            .field("state", &self.state)
            .finish_non_exhaustive()
    }
}

impl Handshake {
    /// `nonce`: random, never used twice.
    pub(crate) fn new(role: Role, ours: Preamble, secret: Option<&Secret>, nonce: [u8; 32]) -> Self {
        let mode = Mode { secret: secret.is_some(), tls: false };
        let state = match role {
            Role::Dialer => State::Begin,
            Role::Acceptor => State::AwaitPreamble,
        };
        Self {
            role,
            ours: Opening { preamble: ours, nonce, mode },
            secret: secret.cloned(),
            tls: None,
            state,
            peer: None,
            said: [Bytes::new(), Bytes::new()],
            proved: None,
        }
    }

    /// The connection is a TLS one: the certificate has to name the node of the preamble, and proofs hold on this
    /// connection only.
    pub(crate) fn over_tls(mut self, peer: TlsPeer) -> Self {
        self.ours.mode.tls = true;
        self.tls = Some(peer);
        self
    }

    /// Who the other end says it is, once it has; for logs of a handshake that failed.
    pub(crate) fn claimed(&self) -> Option<&Preamble> {
        self.peer.as_ref().map(|opening| &opening.preamble)
    }

    /// Takes what it can off the front of `bytes`.
    ///
    /// # Errors
    /// A [`Reject`], and the same one ever after: close the connection, after writing [`Reject::encode`] if
    /// [`Reject::is_ours_to_say`].
    pub(crate) fn handle(&mut self, bytes: &mut BytesMut) -> Result<Step, Reject> {
        let step = self.step(bytes);
        if let Err(reject) = &step {
            self.state = State::Failed(reject.clone());
        }
        step
    }

    fn step(&mut self, bytes: &mut BytesMut) -> Result<Step, Reject> {
        match (&self.state, self.role) {
            (State::Begin, _) => {
                self.state = State::AwaitPreamble;
                self.open()
            }
            (State::AwaitPreamble, _) => match preamble::take(bytes)? {
                None => Ok(Step::NeedMore),
                Some(Said::Preamble(theirs, raw)) => self.greeted(*theirs, raw),
                Some(said) => Err(unexpected(said)),
            },
            (State::AwaitProof, role) => match preamble::take(bytes)? {
                None => Ok(Step::NeedMore),
                Some(Said::Proof(proof)) => {
                    self.check_proof(&proof)?;
                    self.state = State::Finished;
                    match role {
                        Role::Dialer => self.done(),
                        Role::Acceptor => Ok(Step::Send(self.prove())),
                    }
                }
                Some(said) => Err(unexpected(said)),
            },
            (State::Finished, _) => self.done(),
            (State::Failed(reject), _) => Err(reject.clone()),
        }
    }

    fn open(&mut self) -> Result<Step, Reject> {
        let bytes = preamble::encode_opening(&self.ours)?;
        self.hear(self.role, bytes.clone());
        Ok(Step::Send(bytes))
    }

    /// The other end's preamble has come.
    fn greeted(&mut self, theirs: Opening, raw: Bytes) -> Result<Step, Reject> {
        self.hear(self.role.other(), raw);
        let checked = self.check(&theirs);
        self.peer = Some(theirs);
        checked?;
        self.state = State::AwaitProof;
        match self.role {
            Role::Dialer => Ok(Step::Send(self.prove())),
            Role::Acceptor => self.open(),
        }
    }

    fn hear(&mut self, role: Role, raw: Bytes) {
        let [dialer, acceptor] = &mut self.said;
        match role {
            Role::Dialer => *dialer = raw,
            Role::Acceptor => *acceptor = raw,
        }
    }

    fn check(&self, theirs: &Opening) -> Result<(), Reject> {
        let (them, us) = (&theirs.preamble, &self.ours.preamble);
        if theirs.nonce == self.ours.nonce {
            return Err(Reject::Malformed { what: "our own preamble" });
        }
        if them.instance == us.instance && them.node == us.node {
            return Err(Reject::Itself);
        }
        if them.scope != us.scope {
            let (theirs, ours) = (them.scope.clone(), us.scope.clone());
            return Err(Reject::Scope { node: them.node.clone(), theirs, ours });
        }
        if them.node == us.node {
            let (theirs, ours) = (them.advertise.clone(), us.advertise.clone());
            return Err(Reject::SameName { node: us.node.clone(), theirs, ours });
        }
        if theirs.mode != self.ours.mode {
            let (theirs, ours) = (theirs.mode, self.ours.mode);
            return Err(Reject::Mode { node: them.node.clone(), theirs, us: us.node.clone(), ours });
        }
        match &self.tls {
            Some(tls) if !tls.names.iter().any(|name| name == them.node.as_str()) => {
                Err(Reject::CertificateName { node: them.node.clone(), names: named(&tls.names) })
            }
            _ => Ok(()),
        }
    }

    fn mac(&self, secret: &[u8], role: Role) -> Option<Hmac<Sha256>> {
        // any length of key will do for HMAC
        let mut mac = <Hmac<Sha256> as KeyInit>::new_from_slice(secret).ok()?;
        mac.update(role.label());
        for raw in &self.said {
            mac.update(&(raw.len() as u64).to_le_bytes());
            mac.update(raw);
        }
        match &self.tls {
            Some(tls) => {
                mac.update(&[1]);
                mac.update(&tls.binding);
            }
            None => mac.update(&[0]),
        }
        Some(mac)
    }

    fn prove(&self) -> Bytes {
        let secret = self.secret.as_ref().map(|secret| self.proved.as_ref().unwrap_or(&secret.bytes));
        match secret.and_then(|secret| self.mac(secret, self.role)) {
            Some(mac) => preamble::encode_proof(&mac.finalize().into_bytes()),
            None => preamble::encode_proof(&[]),
        }
    }

    fn check_proof(&mut self, proof: &[u8]) -> Result<(), Reject> {
        let Some(secret) = &self.secret else {
            return match proof {
                [] => Ok(()),
                _ => Err(Reject::Malformed { what: "a proof where none is used" }),
            };
        };
        // the acceptor answers with the secret that the dialler has proved: the dialler's first one
        let also = match self.role {
            Role::Dialer => [].as_slice(),
            Role::Acceptor => secret.also.as_slice(),
        };
        for candidate in std::iter::once(&secret.bytes).chain(also) {
            let Some(mac) = self.mac(candidate, self.role.other()) else { continue };
            if bool::from(mac.finalize().into_bytes().as_slice().ct_eq(proof)) {
                self.proved = Some(candidate.clone());
                return Ok(());
            }
        }
        let us = self.ours.preamble.node.clone();
        let (node, address) = match self.claimed() {
            Some(peer) => (peer.node.clone(), peer.advertise.clone()),
            None => (NodeId::unnamed(), String::new()),
        };
        Err(Reject::Secret { node, address, us })
    }

    fn done(&self) -> Result<Step, Reject> {
        match self.claimed() {
            Some(peer) => Ok(Step::Done { peer: peer.clone() }),
            None => Err(Reject::Malformed { what: "no preamble" }),
        }
    }
}

/// For an error: the names of a certificate, some of them if they are many.
pub(crate) fn named(names: &[String]) -> String {
    match names {
        [] => "no node".into(),
        names => {
            let shown: Vec<String> = names.iter().take(4).map(|name| format!("{name:?}")).collect();
            let more = if names.len() > shown.len() { ", .." } else { "" };
            format!("{}{more}", shown.join(", "))
        }
    }
}

fn unexpected(said: Said) -> Reject {
    match said {
        Said::Refused { cause: RefusalCause::Itself, .. } => Reject::Itself,
        Said::Refused { cause, words } => Reject::Refused { cause, words },
        Said::Preamble(..) => Reject::Malformed { what: "a second preamble" },
        Said::Proof(_) => Reject::Malformed { what: "a proof before its preamble" },
    }
}

#[cfg(test)]
mod tests;
