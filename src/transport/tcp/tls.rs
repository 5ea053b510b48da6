//! Mutual TLS: both ends show a certificate of the cluster's own authority that names the node.
//!
//! TLS 1.3 only, with the *ring* provider, whatever default the process has installed. A dialler does not know
//! whom it dials before the preamble, so the two checks are made one after the other: while TLS is set up, that
//! the certificate chains to the authority, is valid now and may be used so; and with the preamble, that it names
//! the node which the preamble names. Sessions are never resumed, so each connection is checked against what is
//! loaded then.
//!
//! # Which names count
//! Subject alternative names of two kinds, compared byte by byte: a DNS name that equals the node's id, or the
//! URI `muster://` and the id, percent-encoded where a URI cannot hold it (a percent sign always is). The common
//! name does not count, wildcards stand for nothing, and a certificate may name several nodes.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use arc_swap::ArcSwap;
use parking_lot::Mutex;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use tokio_rustls::rustls::client::{Resumption, verify_server_cert_signed_by_trust_anchor};
use tokio_rustls::rustls::crypto::{CryptoProvider, verify_tls13_signature};
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use tokio_rustls::rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use tokio_rustls::rustls::server::{ParsedCertificate, WebPkiClientVerifier};
use tokio_rustls::rustls::sign::{CertifiedKey, SingleCertAndKey};
use tokio_rustls::rustls::{
    AlertDescription, CertificateError, ClientConfig, ConnectionCommon, DigitallySignedStruct,
    DistinguishedName, Error, PeerMisbehaved, RootCertStore, ServerConfig, SignatureScheme, version,
};
use tokio_rustls::{TlsAcceptor, TlsConnector, TlsStream};
use x509_parser::prelude::{ASN1Time, FromDer, GeneralName, X509Certificate};

use super::auth::{Reject, TlsPeer, named};
use super::preamble::{Foreign, Sniffed, sniff};
use crate::types::NodeId;

/// Of the keying material that a proof of the secret is bound to.
const BINDING_LABEL: &[u8] = b"EXPORTER-muster-router-tcp";
/// Before the id in a name of the URI kind.
const URI_SCHEME: &str = "muster://";
/// The longest PEM file, in bytes.
const MAX_PEM: u64 = 1 << 20;
/// How long an end whose certificate is refused may take to read the alert.
const LAST_WORDS: Duration = Duration::from_millis(500);

/// Why certificates were not taken. What was in use before still is.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TlsError {
    /// A file could not be read.
    #[error("{} could not be read: {error}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        error: io::Error,
    },
    /// It is no PEM, or no certificate or key that can be used.
    #[error("{what}: {reason}")]
    Pem {
        /// `ca`, `cert` or `key`.
        what: &'static str,
        /// What is wrong with it.
        reason: String,
    },
    /// The certificate is of another key.
    #[error("the certificate, which names {names}, is not of the private key that was given: {reason}")]
    KeyMismatch {
        /// The nodes that it names.
        names: String,
        /// In the words of the TLS library.
        reason: String,
    },
    /// The certificate does not name the node that uses it.
    #[error(
        "the certificate of node {node:?} names {names}; it needs a subject alternative name DNS:{node} or \
         URI:{URI_SCHEME}{node}"
    )]
    Name {
        /// The node.
        node: NodeId,
        /// The nodes that it names.
        names: String,
    },
    /// A certificate that has expired or is not valid yet was given to [`TlsOptions::reload`].
    #[error("the certificate is valid {valid}, and now it is {now}")]
    Time {
        /// From when to when.
        valid: String,
        /// This machine's time.
        now: String,
    },
    /// The options are from [`TlsOptions::from_pem`], so there is nothing to read again.
    #[error("these certificates came from memory: give the new ones to replace_pem")]
    NoDirectory,
}

/// The certificates of a node: its own, with its private key, and the authority's, which has signed all nodes'.
///
/// Clones share what is loaded, so a clone that was kept can [`reload`](TlsOptions::reload) the certificates of a
/// transport that runs.
#[derive(Clone)]
pub struct TlsOptions {
    shared: Arc<Shared>,
}

struct Shared {
    directory: Option<PathBuf>,
    loaded: ArcSwap<Loaded>,
    /// Who uses it; new certificates have to name them too. Held while certificates are changed.
    users: Mutex<Vec<NodeId>>,
}

/// What was read, checked and made ready.
struct Loaded {
    provider: Arc<CryptoProvider>,
    key: Arc<CertifiedKey>,
    roots: Arc<RootCertStore>,
    clients: Arc<dyn ClientCertVerifier>,
    own: Described,
    /// The authorities, for errors.
    trusted: String,
}

/// What errors say about a certificate.
#[derive(Clone, Debug)]
struct Described {
    names: Vec<String>,
    issuer: String,
    not_before: i64,
    not_after: i64,
}

impl TlsOptions {
    /// Reads `ca.pem` (one authority or more), `cert.pem` (the node's certificate, then intermediate ones, if
    /// any) and `key.pem` (its private key) from a directory.
    ///
    /// A certificate that has expired is taken with a warning: it is the other nodes that refuse it.
    ///
    /// # Errors
    /// [`TlsError`], which names the file.
    pub fn from_dir(directory: impl Into<PathBuf>) -> Result<Self, TlsError> {
        let directory = directory.into();
        let loaded = Loaded::read(&directory)?;
        Ok(Self::new(Some(directory), loaded))
    }

    /// Takes the same three as PEM text.
    ///
    /// # Errors
    /// [`TlsError`], which names the argument.
    pub fn from_pem(
        ca: impl AsRef<[u8]>,
        cert: impl AsRef<[u8]>,
        key: impl AsRef<[u8]>,
    ) -> Result<Self, TlsError> {
        Ok(Self::new(None, Loaded::parse(ca.as_ref(), cert.as_ref(), key.as_ref())?))
    }

    fn new(directory: Option<PathBuf>, loaded: Loaded) -> Self {
        if let Err(error) = loaded.own.check_time(now()) {
            tracing::warn!(%error, names = named(&loaded.own.names), "the other nodes will refuse this certificate");
        }
        let loaded = ArcSwap::from_pointee(loaded);
        Self { shared: Arc::new(Shared { directory, loaded, users: Mutex::default() }) }
    }

    /// Reads the directory again; connections that are made from now on use what is there. Links that exist stay.
    /// Nothing calls this by itself: call it when the files have changed, for example on SIGHUP.
    ///
    /// Reads files, so it blocks for a moment.
    ///
    /// # Errors
    /// [`TlsError`]; then the old certificates stay in use.
    pub fn reload(&self) -> Result<(), TlsError> {
        let Some(directory) = &self.shared.directory else { return Err(TlsError::NoDirectory) };
        self.replace(|| Loaded::read(directory))
    }

    /// As [`reload`](TlsOptions::reload), with new PEM text.
    ///
    /// # Errors
    /// [`TlsError`]; then the old certificates stay in use.
    pub fn replace_pem(
        &self,
        ca: impl AsRef<[u8]>,
        cert: impl AsRef<[u8]>,
        key: impl AsRef<[u8]>,
    ) -> Result<(), TlsError> {
        self.replace(|| Loaded::parse(ca.as_ref(), cert.as_ref(), key.as_ref()))
    }

    fn replace(&self, load: impl FnOnce() -> Result<Loaded, TlsError>) -> Result<(), TlsError> {
        // two at once must not end with the older one in use
        let users = self.shared.users.lock();
        let loaded = load()?;
        loaded.own.check_time(now())?;
        users.iter().try_for_each(|node| loaded.own.check_name(node))?;
        self.shared.loaded.store(Arc::new(loaded));
        Ok(())
    }

    /// From now on this node uses the certificate.
    ///
    /// # Errors
    /// [`TlsError::Name`].
    pub(crate) fn use_for(&self, node: &NodeId) -> Result<(), TlsError> {
        let mut users = self.shared.users.lock();
        self.shared.loaded.load().own.check_name(node)?;
        if !users.contains(node) {
            users.push(node.clone());
        }
        Ok(())
    }
}

impl fmt::Debug for TlsOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let loaded = self.shared.loaded.load();
        f.debug_struct("TlsOptions")
            .field("directory", &self.shared.directory)
            .field("names", &loaded.own.names)
            .field("trusted", &loaded.trusted)
            .finish_non_exhaustive()
    }
}

// Connections.
impl TlsOptions {
    /// Sets TLS up on a connection that was dialled. The caller bounds the time.
    ///
    /// # Errors
    /// A [`Reject`]; the other end has had its alert.
    pub(crate) async fn connect(&self, stream: TcpStream) -> Result<(TlsStream<TcpStream>, TlsPeer), Reject> {
        let loaded = self.shared.loaded.load_full();
        let verifier = Arc::new(Verifier::new(loaded.clone()));
        let config = client_config(&loaded, verifier.clone()).map_err(|error| loaded.reject(&error))?;
        // the name is not sent, and what is checked instead is the preamble's
        let name = ServerName::try_from("muster").map_err(|_| Reject::Tls { words: "no name".into() })?;
        let connected = TlsConnector::from(Arc::new(config)).connect(name, stream).into_fallible().await;
        match connected {
            Ok(stream) => peer_of(stream.get_ref().1).map(|peer| (stream.into(), peer)),
            Err((error, stream)) => {
                linger(stream).await;
                Err(verifier.found().unwrap_or_else(|| self.reject_of(&error)))
            }
        }
    }

    /// Sets TLS up on a connection that was taken. The caller bounds the time.
    ///
    /// # Errors
    /// A [`Reject`]; the other end has had its alert, or, if it speaks our protocol without TLS, the refusal.
    pub(crate) async fn accept(
        &self,
        mut stream: TcpStream,
    ) -> Result<(TlsStream<TcpStream>, TlsPeer), Reject> {
        if let Err(reject) = is_tls(&stream).await {
            if reject.is_ours_to_say() {
                let _ = stream.write_all(&reject.encode()).await;
                linger(stream).await;
            }
            return Err(reject);
        }
        let loaded = self.shared.loaded.load_full();
        let verifier = Arc::new(Verifier::new(loaded.clone()));
        let config = server_config(&loaded, verifier.clone()).map_err(|error| loaded.reject(&error))?;
        match TlsAcceptor::from(Arc::new(config)).accept(stream).into_fallible().await {
            Ok(stream) => peer_of(stream.get_ref().1).map(|peer| (stream.into(), peer)),
            Err((error, stream)) => {
                linger(stream).await;
                Err(verifier.found().unwrap_or_else(|| self.reject_of(&error)))
            }
        }
    }

    /// What an error of a TLS connection means. In TLS 1.3 a dialler hears only after its own handshake that its
    /// certificate was refused, so errors of the first reads have to come here too.
    pub(crate) fn reject_of(&self, error: &io::Error) -> Reject {
        match error.get_ref().and_then(|inner| inner.downcast_ref::<Error>()) {
            Some(error) => self.shared.loaded.load().reject(error),
            None => Reject::Closed,
        }
    }
}

/// Looks at the first bytes without taking them.
async fn is_tls(stream: &TcpStream) -> Result<(), Reject> {
    let mut first = [0; 8];
    let length = stream.peek(&mut first).await.map_err(|_| Reject::Closed)?;
    match first.get(..length) {
        None | Some([]) => Err(Reject::Closed),
        Some([0x16, ..]) => Ok(()),
        Some(bytes) => Err(match sniff(bytes) {
            Sniffed::Ours => Reject::PlainForTls,
            // cut within the name of a method
            Sniffed::Open => Reject::Foreign { what: Foreign::Http },
            Sniffed::Foreign(Foreign::Tls) => Reject::Foreign { what: Foreign::Unknown },
            Sniffed::Foreign(what) => Reject::Foreign { what },
        }),
    }
}

/// Closes a connection so that the other end can read what was written last: with bytes of it unread, a close
/// would be a reset, which overtakes them.
async fn linger(mut stream: TcpStream) {
    let drained = async {
        stream.shutdown().await?;
        let mut ignored = [0; 512];
        while stream.read(&mut ignored).await? > 0 {}
        io::Result::Ok(())
    };
    let _ = tokio::time::timeout(LAST_WORDS, drained).await;
}

fn peer_of<Side>(connection: &ConnectionCommon<Side>) -> Result<TlsPeer, Reject> {
    let certificate = connection.peer_certificates().and_then(<[_]>::first);
    let names = certificate.and_then(|der| Described::of(der)).map(|described| described.names);
    let binding = connection.export_keying_material([0; 32], BINDING_LABEL, None);
    match (names, binding) {
        (Some(names), Ok(binding)) => Ok(TlsPeer { binding, names }),
        _ => Err(Reject::Tls { words: "the certificate could not be read".into() }),
    }
}

fn client_config(loaded: &Loaded, verifier: Arc<Verifier>) -> Result<ClientConfig, Error> {
    let mut config = ClientConfig::builder_with_provider(loaded.provider.clone())
        .with_protocol_versions(&[&version::TLS13])?
        .dangerous()
        .with_custom_certificate_verifier(verifier)
        .with_client_cert_resolver(Arc::new(SingleCertAndKey::from(loaded.key.clone())));
    config.resumption = Resumption::disabled();
    config.enable_sni = false;
    Ok(config)
}

fn server_config(loaded: &Loaded, verifier: Arc<Verifier>) -> Result<ServerConfig, Error> {
    let mut config = ServerConfig::builder_with_provider(loaded.provider.clone())
        .with_protocol_versions(&[&version::TLS13])?
        .with_client_cert_verifier(verifier)
        .with_cert_resolver(Arc::new(SingleCertAndKey::from(loaded.key.clone())));
    config.send_tls13_tickets = 0;
    Ok(config)
}

// Loading.
impl Loaded {
    fn read(directory: &Path) -> Result<Self, TlsError> {
        let read = |name: &str| {
            let path = directory.join(name);
            let length = std::fs::metadata(&path).map(|metadata| metadata.len());
            let bytes = match length {
                Ok(length) if length > MAX_PEM => {
                    Err(io::Error::other(format!("longer than {MAX_PEM} bytes")))
                }
                Ok(_) => std::fs::read(&path),
                Err(error) => Err(error),
            };
            bytes.map_err(|error| TlsError::Read { path, error })
        };
        Self::parse(&read("ca.pem")?, &read("cert.pem")?, &read("key.pem")?)
    }

    fn parse(ca: &[u8], cert: &[u8], key: &[u8]) -> Result<Self, TlsError> {
        let provider = Arc::new(tokio_rustls::rustls::crypto::ring::default_provider());
        let mut roots = RootCertStore::empty();
        let mut trusted = Vec::new();
        for der in certificates("ca", ca)? {
            let described = X509Certificate::from_der(&der).map(|(_, x509)| x509.subject().to_string());
            trusted.push(described.unwrap_or_default());
            roots.add(der).map_err(|error| pem_error("ca", error))?;
        }
        let roots = Arc::new(roots);
        let clients = WebPkiClientVerifier::builder_with_provider(roots.clone(), provider.clone())
            .build()
            .map_err(|error| pem_error("ca", error))?;
        let chain = certificates("cert", cert)?;
        let Some(own) = chain.first().and_then(|der| Described::of(der)) else {
            return Err(pem_error("cert", "the first certificate cannot be read"));
        };
        let key = PrivateKeyDer::from_pem_slice(key).map_err(|error| pem_error("key", error))?;
        let key = CertifiedKey::from_der(chain, key, &provider).map_err(|error| match error {
            Error::InconsistentKeys(_) => {
                TlsError::KeyMismatch { names: named(&own.names), reason: error.to_string() }
            }
            error => pem_error("key", error),
        })?;
        Ok(Self { provider, key: Arc::new(key), roots, clients, own, trusted: trusted.join("; ") })
    }

    fn reject(&self, error: &Error) -> Reject {
        match error {
            Error::AlertReceived(alert) => self.refused_by_alert(*alert),
            Error::InvalidMessage(_) => Reject::Tls { words: "the other end does not speak TLS".into() },
            error => Reject::Tls { words: error.to_string() },
        }
    }

    /// What it says about our certificate is all that the other end can say.
    fn refused_by_alert(&self, alert: AlertDescription) -> Reject {
        let why = match alert {
            AlertDescription::UnknownCA | AlertDescription::DecryptError => {
                "its authority is not trusted there"
            }
            AlertDescription::CertificateExpired => "it has expired, or is not valid yet",
            AlertDescription::BadCertificate
            | AlertDescription::CertificateUnknown
            | AlertDescription::UnsupportedCertificate
            | AlertDescription::CertificateRevoked
            | AlertDescription::CertificateRequired
            | AlertDescription::AccessDenied => "it is not fit for this",
            alert => {
                return Reject::Tls { words: format!("the other end has ended it with the alert {alert:?}") };
            }
        };
        let Described { names, issuer, .. } = &self.own;
        let (names, valid) = (named(names), self.own.valid());
        Reject::Certificate {
            words: format!(
                "our certificate for {names}, issued by {issuer:?} and valid {valid}, was refused by the other \
                 end: {why} ({alert:?})"
            ),
        }
    }

    /// Why a certificate is refused here.
    fn distrust(&self, der: &CertificateDer<'_>, at: UnixTime, error: &Error) -> Reject {
        let Some(theirs) = Described::of(der) else {
            return Reject::Certificate {
                words: format!("a certificate that cannot be read was refused: {error}"),
            };
        };
        let names = named(&theirs.names);
        let words = match error {
            Error::InvalidCertificate(
                CertificateError::UnknownIssuer
                | CertificateError::BadSignature
                | CertificateError::UnsupportedSignatureAlgorithmForPublicKeyContext { .. },
            ) => format!(
                "a certificate for {names} was refused: it was issued by {:?}, and this node trusts only {:?} (by \
                 key, not by name)",
                theirs.issuer, self.trusted
            ),
            Error::InvalidCertificate(
                CertificateError::Expired
                | CertificateError::ExpiredContext { .. }
                | CertificateError::NotValidYet
                | CertificateError::NotValidYetContext { .. },
            ) => format!(
                "a certificate for {names} was refused: it is valid {}, and here it is {}",
                theirs.valid(),
                time(i64::try_from(at.as_secs()).unwrap_or(i64::MAX))
            ),
            error => format!("a certificate for {names} was refused: {error}"),
        };
        Reject::Certificate { words }
    }
}

fn pem_error(what: &'static str, reason: impl ToString) -> TlsError {
    TlsError::Pem { what, reason: reason.to_string() }
}

fn certificates(what: &'static str, pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    match found {
        Ok(found) if found.is_empty() => Err(pem_error(what, "there is no certificate in it")),
        Ok(found) => Ok(found),
        Err(error) => Err(pem_error(what, error)),
    }
}

fn now() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_secs()).unwrap_or(i64::MAX)
}

fn time(seconds: i64) -> String {
    ASN1Time::from_timestamp(seconds)
        .map_or_else(|_| format!("{seconds} s after 1970"), |time| time.to_string())
}

impl Described {
    fn of(der: &[u8]) -> Option<Self> {
        let (_, x509) = X509Certificate::from_der(der).ok()?;
        let mut names = Vec::new();
        if let Ok(Some(alternative)) = x509.subject_alternative_name() {
            for name in &alternative.value.general_names {
                match name {
                    GeneralName::DNSName(name) => names.push((*name).to_owned()),
                    GeneralName::URI(uri) => {
                        names.extend(uri.strip_prefix(URI_SCHEME).and_then(decode_percent))
                    }
                    _ => {}
                }
            }
        }
        let validity = x509.validity();
        Some(Self {
            names,
            issuer: x509.issuer().to_string(),
            not_before: validity.not_before.timestamp(),
            not_after: validity.not_after.timestamp(),
        })
    }

    fn valid(&self) -> String {
        format!("from {} to {}", time(self.not_before), time(self.not_after))
    }

    fn check_time(&self, now: i64) -> Result<(), TlsError> {
        match (self.not_before..=self.not_after).contains(&now) {
            true => Ok(()),
            false => Err(TlsError::Time { valid: self.valid(), now: time(now) }),
        }
    }

    fn check_name(&self, node: &NodeId) -> Result<(), TlsError> {
        match self.names.iter().any(|name| name == node.as_str()) {
            true => Ok(()),
            false => Err(TlsError::Name { node: node.clone(), names: named(&self.names) }),
        }
    }
}

/// `None` if it is not well formed: then it names nobody.
fn decode_percent(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        match byte {
            b'%' => {
                let high = char::from(rest.next()?).to_digit(16)?;
                let low = char::from(rest.next()?).to_digit(16)?;
                bytes.push((high * 16 + low) as u8);
            }
            byte => bytes.push(byte),
        }
    }
    String::from_utf8(bytes).ok().filter(|name| !name.is_empty())
}

/// Checks the other end's certificate of one connection, and keeps why it was refused.
struct Verifier {
    loaded: Arc<Loaded>,
    found: Mutex<Option<Reject>>,
}

impl Verifier {
    fn new(loaded: Arc<Loaded>) -> Self {
        Self { loaded, found: Mutex::default() }
    }

    fn found(&self) -> Option<Reject> {
        self.found.lock().take()
    }

    fn note<T>(&self, der: &CertificateDer<'_>, at: UnixTime, checked: Result<T, Error>) -> Result<T, Error> {
        if let Err(error) = &checked {
            *self.found.lock() = Some(self.loaded.distrust(der, at, error));
        }
        checked
    }

    fn check_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, cert, dss, &self.loaded.provider.signature_verification_algorithms)
    }
}

/// Not reached: only TLS 1.3 is spoken.
fn no_tls12() -> Result<HandshakeSignatureValid, Error> {
    Err(Error::PeerMisbehaved(PeerMisbehaved::SignedHandshakeWithUnadvertisedSigScheme))
}

impl fmt::Debug for Verifier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Verifier").field("trusted", &self.loaded.trusted).finish_non_exhaustive()
    }
}

impl ServerCertVerifier for Verifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _name: &ServerName<'_>,
        _ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let algorithms = self.loaded.provider.signature_verification_algorithms.all;
        let checked = ParsedCertificate::try_from(end_entity).and_then(|parsed| {
            verify_server_cert_signed_by_trust_anchor(
                &parsed,
                &self.loaded.roots,
                intermediates,
                now,
                algorithms,
            )
        });
        self.note(end_entity, now, checked).map(|()| ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _cert: &CertificateDer<'_>,
        _dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        no_tls12()
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.check_signature(message, cert, dss)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.loaded.provider.signature_verification_algorithms.supported_schemes()
    }
}

impl ClientCertVerifier for Verifier {
    fn client_auth_mandatory(&self) -> bool {
        true
    }

    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.loaded.clients.root_hint_subjects()
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        let checked = self.loaded.clients.verify_client_cert(end_entity, intermediates, now);
        self.note(end_entity, now, checked)
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _cert: &CertificateDer<'_>,
        _dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        no_tls12()
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.check_signature(message, cert, dss)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.loaded.provider.signature_verification_algorithms.supported_schemes()
    }
}

#[cfg(test)]
mod tests;
