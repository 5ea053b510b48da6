//! A pub/sub broadcast router for clusters, as an embeddable library: members join groups on any node, and a
//! broadcast from any node reaches every member, each once, **also while nodes come and go**.
//!
//! ```text
//!    caller's node            router of the group          nodes with members
//!   ┌─────────────┐   route   ┌──────────────────┐ deliver ┌──────────────────┐
//!   │ broadcast() │ ────────▶ │ table: who holds │ ──────▶ │ members: deliver │──▶ Subscriber
//!   └─────────────┘           │ group "room:42"  │ ──────▶ └──────────────────┘
//!      ▲    a ring says       └──────────────────┘   only to nodes that hold it
//!      └─── who routes what           │ acknowledged when all of them have it
//!      └──────────────────────────────┘
//!    While the cluster changes nobody trusts a table: the broadcast goes to every connected node.
//! ```
//!
//! # In one screen
//!
//! ```
//! use muster_router::{Muster, transport::memory::Network};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let network = Network::new();                                  // embedded: no server, no port
//! let a = Muster::builder("rooms").transport(network.node("a")).start().await?;
//! let b = Muster::builder("rooms").transport(network.node("b")).start().await?;
//!
//! let mut inbox = b.subscribe("room:42").await?;                 // a Stream of Message; leaves on drop
//! let receipt = a.broadcast("room:42", "hello").await?;          // caller -> router -> sources -> members
//! assert_eq!(inbox.recv().await.unwrap().payload(), "hello");
//! # assert_eq!(receipt.id.origin.node.as_str(), "a");
//! # Ok(())
//! # }
//! ```
//!
//! # What is where
//!
//! * [`Muster`] is a scope on a node: [`join`](Muster::join) and [`subscribe`](Muster::subscribe) make members,
//!   [`broadcast`](Muster::broadcast) reaches them, [`router`](Muster::router), [`targets`](Muster::targets) and
//!   [`local_members`](Muster::local_members) are the three hops for those who wire them by themselves.
//! * [`Subscriber`] is what gets messages: a channel, a closure, a type of yours. A [`Subscription`] is a bounded
//!   mailbox that says what it missed.
//! * [`Config`] has every option, with its meaning and how to choose it.
//! * [`transport`] moves frames: [`transport::memory`] inside one process, or one of your own by
//!   [`transport::endpoint`].
#![cfg_attr(
    feature = "cache",
    doc = "* [`cache`] is a partitioned, replicated cache on the same ring; [`Muster::cache`] opens one."
)]
//! * [`node`] decides: sans-IO, so that what is checked is what ships.
//! * [`Ring`], [`View`] and [`ViewHash`] are the pure parts.
//! * [`guide`] explains the protocol, with what is promised and which test watches over it, and simulation.
//!
//! What is promised: a member whose join has returned misses no broadcast that begins on a connected node while it
//! stays, gets none twice, and in a quiet cluster gets one caller's broadcasts in order. What is not: anything
//! about nodes that crash with their members, and order across a change of the cluster.

#[cfg(feature = "cache")]
pub mod cache;
mod config;
mod driver;
mod error;
pub mod guide;
mod muster;
pub mod node;
mod ring;
mod sync;
#[cfg(feature = "testing")]
pub mod testing;
pub mod transport;
mod types;
mod view;

pub use config::{Config, ConfigError};
pub use driver::ScopeState;
pub use driver::counting::MemberCount;
pub use driver::events::{Event, Events};
pub use driver::mailbox::{ClosedReason, MailboxOptions, Overflow};
pub use driver::member::Member;
pub use driver::message::{Delivered, Message, Subscriber};
pub use driver::stats::Counters;
pub use error::{BroadcastError, CountError, DrainTimeout, JoinError, StartError, TryBroadcastError};
pub use muster::{
    BroadcastOptions, Decision, Delivery, Dump, LocalMembers, MAX_HEADERS_LEN, MemberRef, Membership, Muster,
    MusterBuilder, NotReady, Receipt, Subscription, Summary,
};
pub use node::{Counts, Flood, Route, Status, Targets};
pub use ring::{Ring, RingConfig, key_hash};
pub use types::{
    BroadcastId, Group, Incarnation, MAX_NODE_ID_LEN, MemberId, NameError, NodeId, Peer, Version,
};
pub use view::{Standing, View, ViewHash};

/// The README's example compiles and runs.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
