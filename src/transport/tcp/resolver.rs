//! How names become addresses.

use std::fmt;
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;

/// A look-up that is underway.
type Lookup = Pin<Box<dyn Future<Output = io::Result<Vec<SocketAddr>>> + Send>>;

/// Looks up `host:port`. The system's resolver, or one that the user has given.
#[derive(Clone)]
pub(super) struct Resolver(Arc<dyn Fn(String) -> Lookup + Send + Sync>);

impl Resolver {
    pub(super) fn new<F, A>(resolver: F) -> Self
    where
        F: Fn(String) -> A + Send + Sync + 'static,
        A: Future<Output = io::Result<Vec<SocketAddr>>> + Send + 'static,
    {
        Self(Arc::new(move |name| Box::pin(resolver(name))))
    }

    pub(super) async fn resolve(&self, name: &str) -> io::Result<Vec<SocketAddr>> {
        (self.0)(name.to_owned()).await
    }
}

impl Default for Resolver {
    fn default() -> Self {
        Self::new(|name| async move { Ok(tokio::net::lookup_host(name).await?.collect()) })
    }
}

impl fmt::Debug for Resolver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Resolver")
    }
}
