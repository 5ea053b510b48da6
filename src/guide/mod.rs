//! Guides: how the library works and how to use it well. Their examples are compiled and run as tests.
//!
//! * [`protocol`]: how a broadcast reaches every member while the cluster changes, what is promised, and which
//!   test watches over each promise.
//! * [`growth`]: what a cluster costs as it grows, in messages, bytes and time.
//! * [`own_transport`]: bring the network that you have.
//! * [`regions`]: several clusters, one audience.
//! * [`discovery`]: how the nodes of a TCP mesh find each other, and what to choose.
#![cfg_attr(
    feature = "cache",
    doc = "* [`cache`]: the partitioned cache: what each mode promises, and what it does not."
)]
#![cfg_attr(feature = "nats", doc = "* [`nats`]: over the NATS that your team runs already.")]
#![cfg_attr(
    feature = "testing",
    doc = "* [`simulation`]: simulate your own server, and check your own transport."
)]
#![cfg_attr(
    feature = "tcp",
    doc = "* [`security`]: who gets a link over TCP; secrets, certificates, and how to change them."
)]

#[cfg(feature = "cache")]
pub mod cache {
    #![doc = include_str!("cache.md")]
}

pub mod discovery {
    #![doc = include_str!("discovery.md")]
}

pub mod protocol {
    #![doc = include_str!("protocol.md")]
}

pub mod growth {
    #![doc = include_str!("growth.md")]
}

pub mod own_transport {
    #![doc = include_str!("own_transport.md")]
}

pub mod regions {
    #![doc = include_str!("regions.md")]
}

#[cfg(feature = "nats")]
pub mod nats {
    #![doc = include_str!("nats.md")]
}

#[cfg(feature = "testing")]
pub mod simulation {
    #![doc = include_str!("simulation.md")]
}

#[cfg(feature = "tcp")]
pub mod security {
    #![doc = include_str!("security.md")]
}
