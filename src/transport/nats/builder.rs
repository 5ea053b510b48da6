//! How a [`NatsTransport`] is made: its options, checked as a whole.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_nats::{Client, ConnectOptions, Event, ServerAddr};

use super::NatsTransport;
use super::subject::refuse_prefix;
use super::wire::LEAST_MESSAGE;
use crate::transport::link::LinkConfig;
use crate::types::{NameError, NodeId};

const MILLISECOND: Duration = Duration::from_millis(1);
const MINUTE: Duration = Duration::from_secs(60);
/// A server that restarts is away for all nodes at once, and longer than a connection that blips.
const GRACE: Duration = Duration::from_secs(5);

/// Why a [`NatsTransport`] cannot be made as it was asked for. Names the option and what it allows.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NatsConfigError {
    /// The node's name is none.
    #[error("option `node`: {0}")]
    Node(#[from] NameError),
    /// Neither servers nor a client were given.
    #[error("option `servers` or `client` is required: where is NATS?")]
    NoServers,
    /// Both servers and a client were given.
    #[error("option `{option}` has no meaning beside `client`, which is connected already")]
    BesideClient {
        /// The option that is too much.
        option: &'static str,
    },
    /// A server's address cannot be read. It is not shown, since it may hold a password.
    #[error("option `servers`: number {number} is no address of a NATS server: {reason}")]
    Server {
        /// Which one, from 1.
        number: usize,
        /// Why not.
        reason: String,
    },
    /// The credentials in the URL of a server cannot be used.
    #[error("option `servers`: the credentials in the URL of number {number} cannot be used: {reason}")]
    Credentials {
        /// Which one, from 1.
        number: usize,
        /// Why not, and what to do.
        reason: &'static str,
    },
    /// The prefix of the subjects cannot be used.
    #[error("option `prefix`: {given:?} was given; {allowed}")]
    Prefix {
        /// What was given.
        given: String,
        /// What is allowed.
        allowed: &'static str,
    },
    /// A value is out of its range.
    #[error("option `{option}`: {given} was given; {allowed} is allowed")]
    Range {
        /// The option.
        option: &'static str,
        /// What was given.
        given: String,
        /// What is allowed.
        allowed: &'static str,
    },
}

impl NatsConfigError {
    /// The name of the option that is to be changed.
    pub fn option(&self) -> &'static str {
        match self {
            NatsConfigError::Node(_) => "node",
            NatsConfigError::NoServers
            | NatsConfigError::Server { .. }
            | NatsConfigError::Credentials { .. } => "servers",
            NatsConfigError::Prefix { .. } => "prefix",
            NatsConfigError::BesideClient { option } | NatsConfigError::Range { option, .. } => option,
        }
    }
}

/// What a node spends on others, and how long it waits for them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NatsLimits {
    /// How many bytes may be on their way to one peer without being taken, 64 KiB to 1 GiB (1 MiB). A message
    /// counts 4 KiB at least. Choose bandwidth times round trip, and keep it, times the number of peers, below
    /// what the server holds for one client (`max_pending`, 64 MiB).
    pub window: usize,
    /// The longest NATS message, 512 bytes to 64 MiB (64 KiB); what is longer takes several. The server's
    /// `max_payload` holds as well. Shorter messages let urgent ones pass sooner.
    pub message: usize,
    /// How many lives of nodes are known at a time, 2 to 65,536 (4096); more are ignored and counted.
    pub peers: usize,
    /// How often a node says that it is there, 50 ms to 1 minute (1 s); rarer in large clusters, 20 ms for each
    /// node. This finds nodes; that a link is down is found by [`LinkConfig`].
    pub presence_interval: Duration,
    /// How long a node that starts waits for answers if it has not heard of everyone before, 1 ms to 1 minute
    /// (500 ms). Choose it above the slowest answer.
    pub discovery_window: Duration,
    /// How long a node that starts waits for the holder of its name, if the server says that there is one, 1 ms
    /// to 1 minute (1 s). A holder that does not answer is taken for dead. Its own first messages have to come back
    /// within this time, or within the links' `handshake_timeout` if that is longer, or the account lacks rights.
    pub claim_timeout: Duration,
    /// How long the rest of what is queued may take when a node leaves, 1 ms to 1 minute (2 s).
    pub shutdown_timeout: Duration,
}

impl Default for NatsLimits {
    fn default() -> Self {
        Self {
            window: 1 << 20,
            message: 64 << 10,
            peers: 4096,
            presence_interval: Duration::from_secs(1),
            discovery_window: Duration::from_millis(500),
            claim_timeout: Duration::from_secs(1),
            shutdown_timeout: Duration::from_secs(2),
        }
    }
}

/// How the transport gets its connection to NATS.
#[derive(Clone)]
pub(super) enum Source {
    /// A new one at every start.
    Connect(Vec<ServerAddr>, Box<ConnectOptions>),
    /// One that is there.
    Client(Client),
}

/// Hears what the NATS client reports.
pub(super) type OnEvent = Arc<dyn Fn(&Event) + Send + Sync>;

/// What a [`NatsTransport`] is made of, checked.
pub(super) struct Settings {
    pub(super) node: NodeId,
    pub(super) source: Source,
    pub(super) prefix: String,
    pub(super) link: LinkConfig,
    pub(super) limits: NatsLimits,
    pub(super) on_event: Option<OnEvent>,
}

/// Makes a [`NatsTransport`]; see there for an example.
#[must_use = "nothing is made until `build` is called"]
pub struct NatsBuilder {
    node: String,
    servers: Vec<String>,
    options: Option<Box<ConnectOptions>>,
    client: Option<Client>,
    prefix: String,
    link: LinkConfig,
    limits: NatsLimits,
    on_event: Option<OnEvent>,
}

impl fmt::Debug for NatsBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // an address may hold a password
        f.debug_struct("NatsBuilder")
            .field("node", &self.node)
            .field("servers", &self.servers.len())
            .field("client", &self.client.is_some())
            .field("prefix", &self.prefix)
            .field("link", &self.link)
            .field("limits", &self.limits)
            .finish_non_exhaustive()
    }
}

impl NatsBuilder {
    pub(super) fn new(node: String) -> Self {
        Self {
            node,
            servers: Vec::new(),
            options: None,
            client: None,
            prefix: "muster".to_owned(),
            link: LinkConfig { reconnect_grace: GRACE, ..LinkConfig::default() },
            limits: NatsLimits::default(),
            on_event: None,
        }
    }

    /// Where NATS is: URLs of one or several servers of a cluster, separated by commas.
    ///
    /// Without [`NatsBuilder::options`] a URL may hold credentials, `nats://user:password@host` or
    /// `nats://token@host`, the same in every URL that has some; they are used with all servers. Write `%2C` for a
    /// comma and `%40` for an `@` in them.
    pub fn servers(mut self, servers: impl AsRef<str>) -> Self {
        let servers = servers.as_ref().split(',').map(str::trim).filter(|server| !server.is_empty());
        self.servers.extend(servers.map(str::to_owned));
        self
    }

    /// Credentials, TLS and whatever else the client can do; a connection is made with them at every start. Begin
    /// with [`NatsTransport::connect_options`], whose reconnects are quick enough for the grace of a link. Its
    /// `event_callback` is replaced, see [`NatsBuilder::on_event`]. Without this, those options are used. URLs must
    /// not hold credentials beside it: say `user_and_password` or `token` here.
    ///
    /// With `retry_on_initial_connect()` a start waits without end while no server is there; put a timeout around
    /// it, dropping the start gives it up. With `no_echo()` it fails, since a node has to hear itself.
    pub fn options(mut self, options: ConnectOptions) -> Self {
        self.options = Some(Box::new(options));
        self
    }

    /// A client that is connected already, instead of [`NatsBuilder::servers`]. It is left connected at shutdown.
    pub fn client(mut self, client: Client) -> Self {
        self.client = Some(client);
        self
    }

    /// Hears what the client reports, from a task of its own: disconnects, slow consumers, errors of the server.
    pub fn on_event(mut self, hear: impl Fn(&Event) + Send + Sync + 'static) -> Self {
        self.on_event = Some(Arc::new(hear));
        self
    }

    /// The first tokens of all subjects (`muster`). The same on every node; a NATS account that may publish and
    /// subscribe to `<prefix>.>` is enough.
    pub fn prefix(mut self, prefix: impl Into<String>) -> Self {
        self.prefix = prefix.into();
        self
    }

    /// The times and bounds of links: [`LinkConfig::default`] with a `reconnect_grace` of 5 s. The same on every
    /// node. Choose the grace longer than your server takes to restart: what a node has accepted meanwhile waits
    /// that long, and is lost with the link after it. Its `piece_bytes` is at most [`NatsLimits::message`]. [`Config::tombstone_ttl`](crate::Config) has to be above
    /// `stall_timeout`, `ping_timeout` and `reconnect_grace` together.
    pub fn link(mut self, link: LinkConfig) -> Self {
        self.link = link;
        self
    }

    /// What a node spends on others, and how long it waits for them.
    pub fn limits(mut self, limits: NatsLimits) -> Self {
        self.limits = limits;
        self
    }

    /// Checks everything; connects at the start of the scope.
    ///
    /// # Errors
    /// [`NatsConfigError`], which names the option.
    pub fn build(self) -> Result<NatsTransport, NatsConfigError> {
        let Self { node, servers, options, client, prefix, link, limits, on_event } = self;
        let node = NodeId::new(node)?;
        let source = match (client, servers.is_empty(), options) {
            (Some(_), false, _) => return Err(NatsConfigError::BesideClient { option: "servers" }),
            (Some(_), true, Some(_)) => return Err(NatsConfigError::BesideClient { option: "options" }),
            (Some(_), true, None) if on_event.is_some() => {
                return Err(NatsConfigError::BesideClient { option: "on_event" });
            }
            (Some(client), true, None) => Source::Client(client),
            (None, true, _) => return Err(NatsConfigError::NoServers),
            (None, false, options) => {
                let (servers, login) = read_servers(&servers)?;
                Source::Connect(servers, log_in(options, login)?)
            }
        };
        if let Some(allowed) = refuse_prefix(&prefix) {
            return Err(NatsConfigError::Prefix { given: prefix, allowed });
        }
        check(&limits)?;
        check_link(&link)?;
        // longer ones would take several messages and let nothing urgent between them
        let link = LinkConfig { piece_bytes: link.piece_bytes.min(limits.message), ..link };
        Ok(NatsTransport::new(Settings { node, source, prefix, link, limits, on_event }))
    }
}

/// Who to be, as the URL of a server says. Not printed.
#[derive(PartialEq, Eq)]
struct Login {
    /// From which server, from 1.
    number: usize,
    /// The user, or without a password the token.
    user: String,
    password: Option<String>,
}

/// The servers without credentials, so that nothing that logs an address shows them.
fn read_servers(servers: &[String]) -> Result<(Vec<ServerAddr>, Option<Login>), NatsConfigError> {
    let mut read = Vec::new();
    let mut login: Option<Login> = None;
    for (number, given) in (1..).zip(servers) {
        let refused = |error: &dyn fmt::Display| {
            // the rest of what it says would show a part of what was given
            let text = error.to_string();
            let known = text.starts_with("NATS server URL is invalid");
            let reason =
                if known { text } else { "`nats://host:port` or `tls://host:port` is allowed".to_owned() };
            NatsConfigError::Server { number, reason: format!("{reason} (a comma in a password is `%2C`)") }
        };
        let mut url = given.parse::<ServerAddr>().map_err(|error| refused(&error))?.into_inner();
        if !url.username().is_empty() || url.password().is_some() {
            let unusable = |reason| NatsConfigError::Credentials { number, reason };
            let decoded = |text| decode(text).ok_or_else(|| unusable("an escape (`%`) does not give UTF-8"));
            let user = decoded(url.username())?;
            let password = url.password().map(decoded).transpose()?;
            if user.is_empty() {
                return Err(unusable("there is no user"));
            }
            if login.as_ref().is_some_and(|first| (&first.user, &first.password) != (&user, &password)) {
                return Err(unusable("they differ from those of another server"));
            }
            login = Some(Login { number, user, password });
            if url.set_username("").is_err() || url.set_password(None).is_err() {
                return Err(refused(&"there is no host"));
            }
        }
        read.push(ServerAddr::from_url(url).map_err(|error| refused(&error))?);
    }
    Ok((read, login))
}

/// The client does not look at credentials in an address by itself.
fn log_in(
    options: Option<Box<ConnectOptions>>,
    login: Option<Login>,
) -> Result<Box<ConnectOptions>, NatsConfigError> {
    match (options, login) {
        (Some(options), None) => Ok(options),
        (None, None) => Ok(Box::new(NatsTransport::connect_options())),
        (None, Some(Login { user, password, .. })) => {
            let options = NatsTransport::connect_options();
            Ok(Box::new(match password {
                Some(password) => options.user_and_password(user, password),
                None => options.token(user),
            }))
        }
        (Some(_), Some(Login { number, .. })) => Err(NatsConfigError::Credentials {
            number,
            reason: "`options` was given as well: say `user_and_password` or `token` there instead",
        }),
    }
}

/// `%2C` is a comma.
fn decode(text: &str) -> Option<String> {
    let mut parts = text.split('%');
    let mut bytes = parts.next()?.as_bytes().to_vec();
    for part in parts {
        let (code, rest) = part.split_at_checked(2)?;
        if !code.bytes().all(|digit| digit.is_ascii_hexdigit()) {
            return None;
        }
        bytes.push(u8::from_str_radix(code, 16).ok()?);
        bytes.extend_from_slice(rest.as_bytes());
    }
    String::from_utf8(bytes).ok()
}

fn range<T: PartialOrd + fmt::Debug>(
    option: &'static str,
    given: T,
    allowed: std::ops::RangeInclusive<T>,
    text: &'static str,
) -> Result<(), NatsConfigError> {
    if allowed.contains(&given) {
        return Ok(());
    }
    Err(NatsConfigError::Range { option, given: format!("{given:?}"), allowed: text })
}

fn check(limits: &NatsLimits) -> Result<(), NatsConfigError> {
    range("window", limits.window, 64 << 10..=1 << 30, "64 KiB to 1 GiB")?;
    range("message", limits.message, LEAST_MESSAGE..=64 << 20, "512 bytes to 64 MiB")?;
    range("peers", limits.peers, 2..=65_536, "2 to 65,536")?;
    range("presence_interval", limits.presence_interval, 50 * MILLISECOND..=MINUTE, "50 ms to 1 minute")?;
    range("discovery_window", limits.discovery_window, MILLISECOND..=MINUTE, "1 ms to 1 minute")?;
    range("claim_timeout", limits.claim_timeout, MILLISECOND..=MINUTE, "1 ms to 1 minute")?;
    range("shutdown_timeout", limits.shutdown_timeout, MILLISECOND..=MINUTE, "1 ms to 1 minute")
}

fn check_link(link: &LinkConfig) -> Result<(), NatsConfigError> {
    let refused = |given: String, allowed| Err(NatsConfigError::Range { option: "link", given, allowed });
    let Some(ping) = link.ping_interval else {
        return refused(
            "ping_interval None".to_owned(),
            "an interval: NATS does not report that a connection to a peer broke, so only some `ping_interval`",
        );
    };
    if ping >= link.ping_timeout {
        let given = format!("ping_interval {ping:?} with ping_timeout {:?}", link.ping_timeout);
        return refused(given, "a ping_interval below ping_timeout");
    }
    if u32::try_from(link.max_frame).is_err() || link.max_frame == 0 {
        return refused(format!("max_frame {}", link.max_frame), "a max_frame of 1 byte to 4 GiB - 1");
    }
    if link.piece_bytes == 0 {
        return refused("piece_bytes 0".to_owned(), "piece_bytes of at least 1");
    }
    if link.queue_frames == 0 || link.queue_bytes == 0 {
        return refused("a queue for nothing".to_owned(), "queue_frames and queue_bytes of at least 1");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// User and password, or a token.
    type Who = Option<(String, Option<String>)>;

    fn read(servers: &str) -> Result<(Vec<String>, Who), NatsConfigError> {
        let NatsBuilder { servers, .. } = NatsTransport::builder("a").servers(servers);
        let (servers, login) = read_servers(&servers)?;
        let servers = servers.iter().map(|server| server.as_url_str().to_owned()).collect();
        Ok((servers, login.map(|login| (login.user, login.password))))
    }

    fn refusal(servers: &str) -> String {
        NatsTransport::builder("a").servers(servers).build().expect_err(servers).to_string()
    }

    #[test]
    fn credentials_in_a_url_are_taken_out_of_it() {
        let (servers, login) = read("nats://me:a%2Cb%40c%C3%A4@one:4222, tls://two").unwrap();
        assert_eq!(servers, ["nats://one:4222", "tls://two"]);
        assert_eq!(login, Some(("me".to_owned(), Some("a,b@cä".to_owned()))));
        let (_, login) = read("one,s3cret@two").unwrap();
        assert_eq!(login, Some(("s3cret".to_owned(), None)), "a token");
        assert_eq!(read("one,two:4222").unwrap().1, None);
        assert!(read("nats://me:x@one,nats://me:x@two").is_ok());
    }

    #[test]
    fn no_refusal_shows_a_part_of_a_password() {
        for given in [
            "nats://ok:hush,quiet@host",
            "nats://ok:hush@:x",
            "nats://ok:1,hush://quiet@host",
            "nats://ok:hush@one,nats://ok:quiet@two",
            "nats://:hush@one",
            "nats://ok:hush%zz@one",
            "nats://ok:hush%ff@one",
            "nats://ok:hush%@one",
            "hush://quiet",
        ] {
            let text = refusal(given);
            assert!(text.contains("option `servers`") && text.contains("number "), "{text}");
            assert!(!text.contains("hush") && !text.contains("quiet"), "{given}: {text}");
        }
        assert!(refusal("one,nats://ok:hush@:x").contains("number 2"), "counted from 1");
    }

    #[test]
    fn credentials_in_a_url_are_refused_beside_options() {
        let both = NatsTransport::builder("a").servers("one,nats://me:hush@two");
        let error = both.options(NatsTransport::connect_options()).build().expect_err("both");
        assert!(matches!(error, NatsConfigError::Credentials { number: 2, .. }), "{error}");
        assert!(error.to_string().contains("`options`") && !error.to_string().contains("hush"), "{error}");
    }
}
