//! What a TCP transport is told, and what it refuses to be told.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use super::TcpTransport;
use super::auth::Secret;
use super::discovery::{DiscoveryOptions, Endpoint, GossipOptions};
use super::resolver::Resolver;
use super::tls::TlsOptions;
use crate::transport::link::LinkConfig;
use crate::types::{Incarnation, NameError, NodeId};

/// The longest frame that its length prefix can carry.
const MAX_FRAME: usize = u32::MAX as usize - (1 << 16);

/// The longest piece of a frame, in bytes: what is more urgent waits no longer than this takes to write.
const PIECE: usize = 64 << 10;

/// A wrong option of [`TcpTransport::builder`]; nothing was started. The text names the option, what was given
/// and what is allowed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TcpConfigError {
    /// The node's name is none.
    #[error("node: {0}")]
    Node(#[from] NameError),
    /// An option has to be given and was not.
    #[error("{option} is missing: {why}")]
    Missing {
        /// The builder's method.
        option: &'static str,
        /// Why it has to be given.
        why: &'static str,
    },
    /// An option has a value that it may not have.
    #[error("{option} is {given}; allowed is {allowed}")]
    Value {
        /// The builder's method, or the field of its argument.
        option: &'static str,
        /// What was given.
        given: String,
        /// What is allowed.
        allowed: &'static str,
    },
    /// Two options contradict each other.
    #[error("{option} is {given} and {other} is {other_given}: {rule}")]
    Conflict {
        /// One option.
        option: &'static str,
        /// Its value.
        given: String,
        /// The other option.
        other: &'static str,
        /// Its value.
        other_given: String,
        /// What must hold.
        rule: &'static str,
    },
    /// The certificate is not for this node.
    #[error("tls: {reason}")]
    Tls {
        /// The name of the node, and what the certificate names.
        reason: String,
    },
    /// The options of discovery contradict each other.
    #[error("discovery: {rule}")]
    Discovery {
        /// What must hold, with the values.
        rule: String,
    },
    /// The options of gossip make no sense.
    #[error("gossip: {rule}")]
    Gossip {
        /// What must hold, with the values.
        rule: String,
    },
    /// Others could connect, and nothing would tell them from members of the cluster.
    #[error(
        "listen is {listen}, which can be reached from outside this machine, with neither .tls() nor .secret(): \
         give one of them, listen on a loopback address, or call .insecure() if the network itself keeps \
         strangers out"
    )]
    Exposed {
        /// Where it was to listen.
        listen: String,
    },
}

impl TcpConfigError {
    /// The option that is wrong: the builder's method, or the field of its argument.
    pub fn option(&self) -> &'static str {
        match self {
            TcpConfigError::Node(_) => "node",
            TcpConfigError::Missing { option, .. }
            | TcpConfigError::Value { option, .. }
            | TcpConfigError::Conflict { option, .. } => option,
            TcpConfigError::Tls { .. } => "tls",
            TcpConfigError::Discovery { .. } => "discovery",
            TcpConfigError::Gossip { .. } => "gossip",
            TcpConfigError::Exposed { .. } => "listen",
        }
    }
}

/// The bounds of what strangers can cost, and of how many peers there may be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TcpLimits {
    /// How many connections may be in their handshake at once (256; 1 to 65 536). More are closed at once and
    /// counted.
    pub pending_handshakes: usize,
    /// How many of these may come from one IP address (64; 1 to 65 536).
    pub pending_per_ip: usize,
    /// How long a handshake may take, from the connection to the end of the authentication (5 s; 10 ms to
    /// 60 s).
    pub handshake_timeout: Duration,
    /// How long a dial may wait for a connection (3 s; 10 ms to 60 s).
    pub connect_timeout: Duration,
    /// How many connections there may be at once (8192; 1 to 1 048 576). A peer has one, and for moments two.
    pub connections: usize,
}

impl Default for TcpLimits {
    fn default() -> Self {
        Self {
            pending_handshakes: 256,
            pending_per_ip: 64,
            handshake_timeout: Duration::from_secs(5),
            connect_timeout: Duration::from_secs(3),
            connections: 8192,
        }
    }
}

/// A host and a port, as they were given.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct HostPort(Arc<str>);

impl HostPort {
    /// `host:port`; an IPv6 address stands in brackets.
    pub(super) fn parse(text: &str) -> Option<Self> {
        if text.parse::<SocketAddr>().is_ok() {
            return Some(Self(text.into()));
        }
        let (host, port) = text.rsplit_once(':')?;
        let good = !host.is_empty()
            && host.len() <= 253
            && host.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-._".contains(&byte))
            && !port.is_empty()
            && port.bytes().all(|byte| byte.is_ascii_digit());
        (good && port.parse::<u16>().is_ok()).then(|| Self(text.into()))
    }

    pub(super) fn as_str(&self) -> &str {
        &self.0
    }

    fn ip(&self) -> Option<IpAddr> {
        self.0.parse::<SocketAddr>().ok().map(|address| address.ip())
    }

    fn port(&self) -> u16 {
        self.0.rsplit_once(':').and_then(|(_, port)| port.parse().ok()).unwrap_or(0)
    }

    /// Whether only this machine can reach it, as far as the text says.
    fn is_loopback(&self) -> bool {
        match self.ip() {
            Some(ip) => ip.is_loopback(),
            None => self.0.rsplit_once(':').is_some_and(|(host, _)| host.eq_ignore_ascii_case("localhost")),
        }
    }
}

impl fmt::Debug for HostPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Everything that was told, found to be right.
#[derive(Clone, Debug)]
pub(super) struct Settings {
    pub(super) node: NodeId,
    pub(super) listen: HostPort,
    /// In the place of the clock.
    pub(super) incarnation: Option<Incarnation>,
    pub(super) advertise: Option<HostPort>,
    pub(super) seeds: Vec<Endpoint>,
    pub(super) dns: Vec<(Endpoint, Duration)>,
    pub(super) discovery: DiscoveryOptions,
    pub(super) gossip: Option<GossipOptions>,
    pub(super) resolver: Resolver,
    pub(super) secret: Option<Secret>,
    pub(super) tls: Option<TlsOptions>,
    /// Whether strangers may be able to connect.
    pub(super) exposed: bool,
    pub(super) link: LinkConfig,
    pub(super) limits: TcpLimits,
}

/// Makes a [`TcpTransport`]. Nothing is checked before [`TcpBuilder::build`].
#[derive(Clone, Debug)]
#[must_use = "build() makes the transport"]
pub struct TcpBuilder {
    node: String,
    incarnation: Option<Incarnation>,
    listen: Option<String>,
    advertise: Option<String>,
    seeds: Vec<String>,
    dns: Vec<(String, Duration)>,
    discovery: DiscoveryOptions,
    gossip: Option<GossipOptions>,
    resolver: Resolver,
    secret: Option<Secret>,
    tls: Option<TlsOptions>,
    insecure: bool,
    link: LinkConfig,
    limits: TcpLimits,
}

impl TcpBuilder {
    pub(super) fn new(node: String) -> Self {
        Self {
            node,
            incarnation: None,
            listen: None,
            advertise: None,
            seeds: Vec::new(),
            dns: Vec::new(),
            discovery: DiscoveryOptions::default(),
            gossip: None,
            resolver: Resolver::default(),
            secret: None,
            tls: None,
            insecure: false,
            link: LinkConfig::default(),
            limits: TcpLimits::default(),
        }
    }

    /// The incarnation that the clock would give: for tests of clocks that were set back.
    #[doc(hidden)]
    pub fn incarnation(mut self, incarnation: Incarnation) -> Self {
        self.incarnation = Some(incarnation);
        self
    }

    /// Where to take connections: `host:port`, port 0 for any. Required.
    pub fn listen(mut self, address: impl Into<String>) -> Self {
        self.listen = Some(address.into());
        self
    }

    /// Where the others reach this node: `host:port`. The address that was bound, if not given; required if
    /// that is an unspecified one such as `0.0.0.0`.
    pub fn advertise(mut self, address: impl Into<String>) -> Self {
        self.advertise = Some(address.into());
        self
    }

    /// A node to begin with: `host:port`, resolved at every dial. The own address may be among the seeds, so
    /// that all nodes can be given the same list.
    pub fn seed(mut self, address: impl Into<String>) -> Self {
        self.seeds.push(address.into());
        self
    }

    /// Several of them.
    pub fn seeds<S: Into<String>>(mut self, addresses: impl IntoIterator<Item = S>) -> Self {
        self.seeds.extend(addresses.into_iter().map(Into::into));
        self
    }

    /// A name that stands for all nodes, such as a headless service: `host:port`, resolved again every so often
    /// (100 ms to 1 day).
    pub fn dns(mut self, name: impl Into<String>, every: Duration) -> Self {
        self.dns.push((name.into(), every));
        self
    }

    /// Looks up the names of seeds and of [`TcpBuilder::dns`], `host:port`, instead of the system's resolver. A
    /// look-up may take [`TcpLimits::connect_timeout`]; an answer without addresses is one that failed.
    ///
    /// ```
    /// # use muster_router::transport::tcp::TcpTransport;
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let transport = TcpTransport::builder("a")
    ///     .listen("127.0.0.1:0")
    ///     .dns("chat.internal:7001", std::time::Duration::from_secs(10))
    ///     .resolver(|name: String| async move {
    ///         assert_eq!(name, "chat.internal:7001");
    ///         Ok(vec!["10.0.0.2:7001".parse().map_err(std::io::Error::other)?])
    ///     })
    ///     .build()?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn resolver<F, A>(mut self, resolver: F) -> Self
    where
        F: Fn(String) -> A + Send + Sync + 'static,
        A: Future<Output = std::io::Result<Vec<SocketAddr>>> + Send + 'static,
    {
        self.resolver = Resolver::new(resolver);
        self
    }

    /// Members find each other, and find out who is dead, by gossip over the links. See the
    /// [guide](crate::guide::discovery).
    #[cfg(feature = "gossip")]
    pub fn gossip(mut self, options: GossipOptions) -> Self {
        self.gossip = Some(options);
        self
    }

    /// The times and bounds of discovery.
    pub fn discovery(mut self, options: DiscoveryOptions) -> Self {
        self.discovery = options;
        self
    }

    /// What all nodes know and nobody else: each end proves it to the other, and it never travels.
    pub fn secret(mut self, secret: Secret) -> Self {
        self.secret = Some(secret);
        self
    }

    /// Mutual TLS: every connection is encrypted, and each end's certificate has to name its node.
    pub fn tls(mut self, tls: TlsOptions) -> Self {
        self.tls = Some(tls);
        self
    }

    /// Allows an address that others can reach without TLS and without a secret. Whoever can connect is a
    /// member then: only for networks that keep strangers out by themselves.
    pub fn insecure(mut self) -> Self {
        self.insecure = true;
        self
    }

    /// The times and bounds of links; the same on all nodes. Frames travel in pieces of at most 64 KiB here, so
    /// that a large one holds nothing else up.
    pub fn link(mut self, link: LinkConfig) -> Self {
        self.link = link;
        self
    }

    /// The bounds of what strangers can cost.
    pub fn limits(mut self, limits: TcpLimits) -> Self {
        self.limits = limits;
        self
    }

    /// Checks everything and makes the transport. Nothing is bound before it starts.
    ///
    /// # Errors
    /// [`TcpConfigError`] names the option that is wrong.
    pub fn build(self) -> Result<TcpTransport, TcpConfigError> {
        Ok(TcpTransport::new(self.checked()?))
    }

    fn checked(self) -> Result<Settings, TcpConfigError> {
        let node = NodeId::new(&self.node)?;
        let Some(listen) = self.listen else {
            return Err(TcpConfigError::Missing {
                option: "listen",
                why: "give the host:port where others connect, such as 127.0.0.1:7001",
            });
        };
        let listen = host_port("listen", &listen)?;
        let advertise = self.advertise.as_deref().map(|text| host_port("advertise", text)).transpose()?;
        check_advertise(&listen, advertise.as_ref())?;
        let seeds = self.seeds.iter().map(|text| endpoint("seed", text)).collect::<Result<Vec<_>, _>>()?;
        let dns = self.dns.iter().map(|(text, every)| dns(text, *every)).collect::<Result<Vec<_>, _>>()?;
        if let Some(tls) = &self.tls {
            tls.use_for(&node).map_err(|error| TcpConfigError::Tls { reason: error.to_string() })?;
        }
        let protected = self.secret.is_some() || self.tls.is_some();
        if !listen.is_loopback() && !self.insecure && !protected {
            return Err(TcpConfigError::Exposed { listen: listen.as_str().to_owned() });
        }
        self.discovery.check().map_err(|rule| TcpConfigError::Discovery { rule })?;
        #[cfg(feature = "gossip")]
        if let Some(gossip) = &self.gossip {
            gossip.check().map_err(|rule| TcpConfigError::Gossip { rule })?;
        }
        check_limits(&self.limits)?;
        check_link(&self.link)?;
        Ok(Settings {
            node,
            incarnation: self.incarnation,
            listen,
            advertise,
            seeds,
            dns,
            discovery: self.discovery,
            gossip: self.gossip,
            resolver: self.resolver,
            exposed: self.insecure || protected,
            secret: self.secret,
            tls: self.tls,
            link: LinkConfig { piece_bytes: self.link.piece_bytes.min(PIECE), ..self.link },
            limits: self.limits,
        })
    }
}

fn host_port(option: &'static str, text: &str) -> Result<HostPort, TcpConfigError> {
    HostPort::parse(text).ok_or_else(|| TcpConfigError::Value {
        option,
        given: format!("{text:?}"),
        allowed: "host:port, an IPv6 address in brackets",
    })
}

fn endpoint(option: &'static str, text: &str) -> Result<Endpoint, TcpConfigError> {
    Endpoint::parse(text).map_err(|_| TcpConfigError::Value {
        option,
        given: format!("{text:?}"),
        allowed: "host:port that can be dialled, an IPv6 address in brackets, a port from 1 to 65535",
    })
}

fn dns(text: &str, every: Duration) -> Result<(Endpoint, Duration), TcpConfigError> {
    if !(Duration::from_millis(100)..=Duration::from_secs(86_400)).contains(&every) {
        return Err(TcpConfigError::Value {
            option: "dns",
            given: format!("every {every:?}"),
            allowed: "an interval of 100ms to 1 day",
        });
    }
    Ok((endpoint("dns", text)?, every))
}

fn check_advertise(listen: &HostPort, advertise: Option<&HostPort>) -> Result<(), TcpConfigError> {
    let unspecified = |address: &HostPort| address.ip().is_some_and(|ip| ip.is_unspecified());
    match advertise {
        Some(address) if unspecified(address) || address.port() == 0 => Err(TcpConfigError::Value {
            option: "advertise",
            given: format!("{:?}", address.as_str()),
            allowed: "an address that others can connect to, and a port from 1 to 65535",
        }),
        None if unspecified(listen) => Err(TcpConfigError::Missing {
            option: "advertise",
            why: "listen is an unspecified address, which tells the others nothing",
        }),
        Some(_) | None => Ok(()),
    }
}

fn check_limits(limits: &TcpLimits) -> Result<(), TcpConfigError> {
    let counts = [
        ("limits.pending_handshakes", limits.pending_handshakes, 1..=65_536, "1 to 65536"),
        ("limits.pending_per_ip", limits.pending_per_ip, 1..=65_536, "1 to 65536"),
        ("limits.connections", limits.connections, 1..=1_048_576, "1 to 1048576"),
    ];
    for (option, given, range, allowed) in counts {
        if !range.contains(&given) {
            return Err(TcpConfigError::Value { option, given: given.to_string(), allowed });
        }
    }
    for (option, given) in [
        ("limits.handshake_timeout", limits.handshake_timeout),
        ("limits.connect_timeout", limits.connect_timeout),
    ] {
        if !(Duration::from_millis(10)..=Duration::from_secs(60)).contains(&given) {
            return Err(TcpConfigError::Value {
                option,
                given: format!("{given:?}"),
                allowed: "10ms to 60s",
            });
        }
    }
    Ok(())
}

fn check_link(link: &LinkConfig) -> Result<(), TcpConfigError> {
    let day = Duration::from_secs(86_400);
    let waits = [
        ("link.suspect_after", Some(link.suspect_after)),
        ("link.ping_interval", link.ping_interval),
        ("link.ping_timeout", Some(link.ping_timeout)),
        ("link.reconnect_grace", Some(link.reconnect_grace)),
        ("link.stall_timeout", Some(link.stall_timeout)),
        ("link.handshake_timeout", Some(link.handshake_timeout)),
    ];
    for (option, given) in waits {
        let Some(given) = given else { continue };
        if !(Duration::from_millis(1)..=day).contains(&given) {
            return Err(TcpConfigError::Value {
                option,
                given: format!("{given:?}"),
                allowed: "1ms to 1 day",
            });
        }
    }
    let Some(interval) = link.ping_interval else {
        return Err(TcpConfigError::Value {
            option: "link.ping_interval",
            given: "None".to_owned(),
            allowed: "a time: a TCP connection to a machine that is gone is not reported by itself",
        });
    };
    if link.ping_timeout <= interval {
        return Err(TcpConfigError::Conflict {
            option: "link.ping_timeout",
            given: format!("{:?}", link.ping_timeout),
            other: "link.ping_interval",
            other_given: format!("{interval:?}"),
            rule: "the timeout has to be longer, or an idle peer is down before it is asked",
        });
    }
    for (option, given) in [
        ("link.queue_frames", link.queue_frames),
        ("link.queue_bytes", link.queue_bytes),
        ("link.piece_bytes", link.piece_bytes),
    ] {
        if given == 0 {
            return Err(TcpConfigError::Value { option, given: "0".to_owned(), allowed: "1 or more" });
        }
    }
    if link.max_frame == 0 || link.max_frame > MAX_FRAME {
        return Err(TcpConfigError::Value {
            option: "link.max_frame",
            given: link.max_frame.to_string(),
            allowed: "1 to 4294901759 bytes",
        });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn builder() -> TcpBuilder {
        TcpBuilder::new("a".to_owned()).listen("127.0.0.1:7001")
    }

    /// The option and the text of the refusal.
    fn refused(builder: TcpBuilder) -> (&'static str, String) {
        let error = builder.checked().expect_err("it should be refused");
        (error.option(), error.to_string())
    }

    #[test]
    fn names_and_addresses() {
        assert!(builder().checked().is_ok());
        assert!(TcpBuilder::new("a".to_owned()).listen("[::1]:0").checked().is_ok());
        assert!(TcpBuilder::new("a".to_owned()).listen("localhost:7001").checked().is_ok());
        assert_eq!(refused(TcpBuilder::new(String::new()).listen("127.0.0.1:0")).0, "node");
        assert_eq!(refused(TcpBuilder::new("a".to_owned())).0, "listen");
        for wrong in ["", "127.0.0.1", ":7001", "127.0.0.1:70000", "host name:1", "127.0.0.1:"] {
            let (option, text) = refused(builder().listen(wrong));
            assert!(option == "listen" && text.contains(&format!("{wrong:?}")), "{text}");
        }
        for wrong in ["b", "b:0", "0.0.0.0:7001"] {
            let (option, text) = refused(builder().seed("b:7001").seed(wrong));
            assert!(option == "seed" && text.contains(wrong), "{text}");
            assert_eq!(refused(builder().dns(wrong, Duration::from_secs(1))).0, "dns");
        }
        let (option, text) = refused(builder().dns("b:1", Duration::from_millis(99)));
        assert!(option == "dns" && text.contains("99ms") && text.contains("100ms to 1 day"), "{text}");
        assert_eq!(refused(builder().advertise("0.0.0.0:7001")).0, "advertise");
        assert_eq!(refused(builder().advertise("10.0.0.1:0")).0, "advertise");
        let (option, text) = refused(builder().listen("0.0.0.0:7001").insecure());
        assert!(option == "advertise" && text.contains("missing"), "{text}");
    }

    #[test]
    fn nobody_is_exposed_by_accident() {
        for open in ["10.0.0.1:7001", "[fd00::1]:7001", "chat-1.internal:7001"] {
            let (option, text) = refused(builder().listen(open));
            assert!(option == "listen" && text.contains(open) && text.contains(".insecure()"), "{text}");
            assert!(builder().listen(open).insecure().checked().is_ok());
            let secret = Secret::new([7; 16]).expect("long enough");
            assert!(builder().listen(open).secret(secret).checked().is_ok());
        }
    }

    #[test]
    fn limits_and_links() {
        let limits = |change: fn(&mut TcpLimits)| {
            let mut limits = TcpLimits::default();
            change(&mut limits);
            refused(builder().limits(limits)).0
        };
        assert_eq!(limits(|l| l.pending_handshakes = 0), "limits.pending_handshakes");
        assert_eq!(limits(|l| l.pending_per_ip = 65_537), "limits.pending_per_ip");
        assert_eq!(limits(|l| l.connections = 0), "limits.connections");
        assert_eq!(limits(|l| l.handshake_timeout = Duration::from_millis(9)), "limits.handshake_timeout");
        assert_eq!(limits(|l| l.connect_timeout = Duration::from_secs(61)), "limits.connect_timeout");
        let link = |change: fn(&mut LinkConfig)| {
            let mut link = LinkConfig::default();
            change(&mut link);
            refused(builder().link(link))
        };
        assert_eq!(link(|l| l.suspect_after = Duration::ZERO).0, "link.suspect_after");
        assert_eq!(link(|l| l.ping_interval = None).0, "link.ping_interval");
        assert_eq!(link(|l| l.max_frame = usize::MAX).0, "link.max_frame");
        assert_eq!(link(|l| l.queue_bytes = 0).0, "link.queue_bytes");
        assert_eq!(link(|l| l.piece_bytes = 0).0, "link.piece_bytes");
        let (option, text) = link(|l| l.ping_timeout = Duration::from_secs(1));
        assert!(option == "link.ping_timeout" && text.contains("ping_interval is 1s"), "{text}");
    }

    #[test]
    fn frames_are_cut_here_unless_shorter_pieces_are_asked_for() {
        let pieces = |link| builder().link(link).checked().map(|settings| settings.link.piece_bytes);
        assert_eq!(pieces(LinkConfig::default()), Ok(PIECE));
        assert_eq!(pieces(LinkConfig { piece_bytes: 100, ..LinkConfig::default() }), Ok(100));
    }
}
