//! The times and bounds of discovery.

use std::net::SocketAddr;
use std::time::Duration;

use super::random::Random;

/// The times and bounds of discovery. The defaults suit nodes of one network.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiscoveryOptions {
    /// How long to wait before an address that failed is dialled again (50 ms). Doubles with each failure up to
    /// `redial_cap`, and a random half of it is taken off so that nodes do not dial in step.
    pub redial_base: Duration,
    /// The longest wait between two dials of an address (5 s). Dialling never ends, so this is also about how
    /// long a node that lost everybody needs to notice that they are back.
    pub redial_cap: Duration,
    /// Discovery counts as settled at the latest after so long (5 s), although an address has not answered yet.
    pub settle_within: Duration,
    /// An address that nobody vouches for any more (it is no seed, no DNS answer has it, no linked peer tells it,
    /// and its node is not linked) is dialled for so long and then forgotten (10 min). Seeds never are.
    pub forget_after: Duration,
    /// How many addresses are kept (4096). Those that peers or DNS tell beyond it are ignored and counted.
    pub max_addresses: usize,
}

impl Default for DiscoveryOptions {
    fn default() -> Self {
        Self {
            redial_base: Duration::from_millis(50),
            redial_cap: Duration::from_secs(5),
            settle_within: Duration::from_secs(5),
            forget_after: Duration::from_secs(600),
            max_addresses: 4096,
        }
    }
}

impl DiscoveryOptions {
    /// Says which option makes no sense, and why.
    pub(crate) fn check(&self) -> Result<(), String> {
        let DiscoveryOptions { redial_base, redial_cap, settle_within, forget_after, max_addresses } = self;
        if redial_base.is_zero() {
            return Err("redial_base must not be zero".into());
        }
        if redial_cap < redial_base {
            return Err(format!("redial_cap ({redial_cap:?}) is below redial_base ({redial_base:?})"));
        }
        if settle_within.is_zero() {
            return Err("settle_within must not be zero".into());
        }
        if forget_after < redial_cap {
            return Err(format!(
                "forget_after ({forget_after:?}) is below redial_cap ({redial_cap:?}): an address would be \
                 forgotten before it is tried again"
            ));
        }
        if *max_addresses == 0 {
            return Err("max_addresses must not be zero".into());
        }
        Ok(())
    }

    /// How long to wait after so many failures in a row; the second half of it is random.
    pub(super) fn delay(&self, failures: u32, random: &mut Random) -> Duration {
        let doublings = failures.saturating_sub(1).min(30);
        let delay = self.redial_base.saturating_mul(1 << doublings).min(self.redial_cap);
        delay / 2 + random.up_to(delay / 2)
    }
}

/// What a `host:port` text names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Endpoint {
    /// An address that can be dialled as it is.
    Address(SocketAddr),
    /// A name to be resolved, with its port.
    Name(String),
}

/// The longest `host:port`: a DNS name has at most 253 bytes.
const MAX_ENDPOINT_LEN: usize = 253 + 6;

impl Endpoint {
    /// Reads `host:port`; the error says what is wrong with it.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        if let Ok(address) = text.parse::<SocketAddr>() {
            let address = canonical(address);
            return match unusable(address) {
                Some(reason) => Err(format!("{text:?} {reason}")),
                None => Ok(Self::Address(address)),
            };
        }
        let Some((host, port)) = text.rsplit_once(':') else {
            return Err(format!("{text:?} is not host:port"));
        };
        if !matches!(port.parse::<u16>(), Ok(1..)) {
            return Err(format!("{text:?} has no port from 1 to 65535"));
        }
        let legal = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
        if host.is_empty() || text.len() > MAX_ENDPOINT_LEN || !host.chars().all(legal) {
            return Err(format!("{text:?} does not begin with a host name or an address"));
        }
        Ok(Self::Name(text.to_owned()))
    }
}

/// IPv4 inside IPv6 is the IPv4 address: one address must not be two entries.
pub(super) fn canonical(address: SocketAddr) -> SocketAddr {
    match address {
        SocketAddr::V6(v6) => match v6.ip().to_ipv4_mapped() {
            Some(ip) => SocketAddr::new(ip.into(), v6.port()),
            None => address,
        },
        SocketAddr::V4(_) => address,
    }
}

/// Why nobody can be dialled there.
pub(super) fn unusable(address: SocketAddr) -> Option<&'static str> {
    if address.port() == 0 {
        Some("has port 0")
    } else if address.ip().is_unspecified() {
        Some("is the unspecified address")
    } else if address.ip().is_multicast() {
        Some("is a multicast address")
    } else {
        None
    }
}
