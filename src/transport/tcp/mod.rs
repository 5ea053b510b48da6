//! A full mesh over TCP, with TLS or a shared secret.

#[allow(dead_code, reason = "the mesh that uses it comes next")]
pub(crate) mod auth;
#[allow(dead_code, reason = "the mesh that uses it comes next")]
mod discovery;
#[allow(dead_code, reason = "the mesh that uses it comes next")]
pub(crate) mod preamble;
#[allow(dead_code, reason = "the mesh that uses it comes next")]
pub(crate) mod tls;

pub use auth::{RefusalCause, Secret, SecretError};
pub use discovery::{DiscoveryOptions, DiscoveryStats};
pub use tls::{TlsError, TlsOptions};
