//! How a scope is started.

use std::sync::Arc;
use std::time::Duration;

use super::Muster;
use crate::config::Config;
use crate::driver::Driver;
use crate::error::StartError;
use crate::transport::Transport;

/// The longest name of a scope, in bytes.
const MAX_SCOPE_LEN: usize = 255;

/// Starts a scope: a name, a transport, and options.
///
/// ```
/// # use std::time::Duration;
/// # use muster_router::{Muster, StartError, transport::memory::Network};
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() {
/// let network = Network::new();
/// let refused = Muster::builder("rooms").transport(network.node("a")).vnodes(0).start().await;
/// assert!(matches!(refused, Err(StartError::Config(error)) if error.option() == "vnodes"));
///
/// let muster = Muster::builder("rooms")
///     .transport(network.node("a"))
///     .join_timeout(Duration::from_secs(10))
///     .start()
///     .await
///     .expect("allowed");
/// # drop(muster);
/// # }
/// ```
#[must_use = "nothing runs until `start` is awaited"]
pub struct MusterBuilder {
    scope: String,
    transport: Option<Arc<dyn Transport>>,
    config: Config,
}

impl std::fmt::Debug for MusterBuilder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MusterBuilder")
            .field("scope", &self.scope)
            .field("node", &self.transport.as_ref().map(|transport| transport.node().clone()))
            .field("config", &self.config)
            .finish()
    }
}

macro_rules! options {
    ($($name:ident: $type:ty),* $(,)?) => {
        $(
            #[doc = concat!("Sets the option [`", stringify!($name), "`](struct@Config#structfield.", stringify!($name), ").")]
            pub fn $name(mut self, $name: $type) -> Self {
                self.config.$name = $name;
                self
            }
        )*
    };
}

impl MusterBuilder {
    pub(super) fn new(scope: String) -> Self {
        Self { scope, transport: None, config: Config::default() }
    }

    /// The network. One transport value serves one scope at a time.
    pub fn transport(mut self, transport: impl Transport) -> Self {
        self.transport = Some(Arc::new(transport));
        self
    }

    /// All options at once; setters that come after it change single ones.
    pub fn config(mut self, config: Config) -> Self {
        self.config = config;
        self
    }

    options! {
        vnodes: u32,
        shards: usize,
        vacancy_cooldown: Duration,
        flush_interval: Duration,
        heartbeat_interval: Duration,
        singleton_timeout: Duration,
        rpc_timeout: Duration,
        join_timeout: Duration,
        tombstone_ttl: Duration,
        sweep_interval: Duration,
        max_group_len: usize,
        max_payload_len: usize,
        max_unacknowledged: usize,
        dedupe_window: u64,
    }

    /// Checks every option, then joins the network. Has to be called on a tokio runtime, which runs the scope's
    /// tasks from then on.
    ///
    /// # Errors
    /// [`StartError`]; nothing runs then.
    pub async fn start(self) -> Result<Muster, StartError> {
        let Self { scope, transport, config } = self;
        if scope.is_empty() || scope.len() > MAX_SCOPE_LEN {
            return Err(StartError::ScopeLength { given: scope.len(), max: MAX_SCOPE_LEN });
        }
        config.validate()?;
        let Some(transport) = transport else { return Err(StartError::MissingTransport { scope }) };
        Driver::start(scope, config, transport).await.map(Muster::new)
    }
}
