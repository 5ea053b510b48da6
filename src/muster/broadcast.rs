//! Broadcasts: what may be said about one, and what comes back.

use bytes::Bytes;
use serde::Serialize;

use super::Muster;
use super::membership::superseded;
use crate::driver::Driver;
use crate::error::{BroadcastError, TryBroadcastError};
use crate::node::relay::{Audience, NewCast, Reach, Settled};
use crate::types::{BroadcastId, Group, MemberId, NodeId};

/// The headers of one broadcast, names and values together, in bytes at most.
pub const MAX_HEADERS_LEN: usize = 8 * 1024;

/// How sure a broadcast arrives.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Delivery {
    /// It is kept until every node that must hear it has acknowledged it, and goes another way when its router
    /// dies.
    #[default]
    Acknowledged,
    /// It is sent once and forgotten: faster, and lost if a link breaks or a queue is full on the way.
    AtMostOnce,
}

/// What may be said about one broadcast.
///
/// ```
/// use muster_router::{BroadcastOptions, Delivery};
/// let options = BroadcastOptions::default()
///     .delivery(Delivery::AtMostOnce)
///     .header("trace", "7f3a");
/// # let _ = options;
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct BroadcastOptions {
    /// A member that must not get it, usually the one that sends.
    pub except: Option<MemberId>,
    /// How sure it arrives.
    pub delivery: Delivery,
    /// Small things beside the payload; [`MAX_HEADERS_LEN`] bytes at most.
    pub headers: Vec<(String, Bytes)>,
}

impl BroadcastOptions {
    /// Leaves out one member, in whichever node it lives.
    #[must_use]
    pub fn except(mut self, member: MemberId) -> Self {
        self.except = Some(member);
        self
    }

    /// Sets [`BroadcastOptions::delivery`].
    #[must_use]
    pub fn delivery(mut self, delivery: Delivery) -> Self {
        self.delivery = delivery;
        self
    }

    /// Adds headers.
    #[must_use]
    pub fn headers<N: Into<String>, V: Into<Bytes>>(
        mut self,
        headers: impl IntoIterator<Item = (N, V)>,
    ) -> Self {
        self.headers.extend(headers.into_iter().map(|(name, value)| (name.into(), value.into())));
        self
    }

    /// Adds one header.
    #[must_use]
    pub fn header(self, name: impl Into<String>, value: impl Into<Bytes>) -> Self {
        self.headers([(name.into(), value.into())])
    }
}

/// How it was decided who must hear a broadcast.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[non_exhaustive]
pub enum Decision {
    /// The router knew which nodes hold the group; only those got it.
    Targeted,
    /// It went to every connected node, because the cluster was changing.
    Flooded,
    /// Nobody told: the broadcast was sent [`Delivery::AtMostOnce`].
    Unknown,
}

/// Every node that had to hear a broadcast has it (with [`Delivery::Acknowledged`]), but for *suspect* ones,
/// whose links make no progress at the moment: theirs is kept for them, and they get it when the link
/// resumes. If it is given up instead, they have lost the link to the origin and may not get it.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize)]
#[non_exhaustive]
pub struct Receipt {
    /// The broadcast, as its members see it in [`Message::id`](crate::Message::id).
    pub id: BroadcastId,
    /// How it was decided who must hear it.
    pub decision: Decision,
    /// How many nodes that was, where it is known: the holders of the group if it was targeted, all that have
    /// acknowledged it and this one if it was flooded.
    pub nodes: Option<usize>,
}

impl Receipt {
    fn of(id: BroadcastId, settled: Option<Settled>) -> Self {
        match settled {
            None => Self { id, decision: Decision::Unknown, nodes: None },
            Some(settled) => {
                let decision = match settled.reach {
                    Reach::Targeted => Decision::Targeted,
                    Reach::Flooded => Decision::Flooded,
                };
                Self { id, decision, nodes: Some(settled.nodes) }
            }
        }
    }
}

/// What is checked of every broadcast before anything else happens.
fn new_cast(
    driver: &Driver,
    group: Group,
    body: Bytes,
    options: BroadcastOptions,
) -> Result<NewCast, TryBroadcastError> {
    if driver.is_stopped() {
        return Err(TryBroadcastError::Stopped);
    }
    group.check(driver.config.max_group_len)?;
    let (given, max) = (body.len(), driver.config.max_payload_len);
    if given > max {
        return Err(TryBroadcastError::PayloadTooLarge { given, max });
    }
    let given: usize = options.headers.iter().map(|(name, value)| name.len() + value.len()).sum();
    if given > MAX_HEADERS_LEN {
        return Err(TryBroadcastError::HeadersTooLarge { given, max: MAX_HEADERS_LEN });
    }
    if driver.node.with_published(|published| published.superseded) {
        let (node, live) = superseded(driver);
        return Err(TryBroadcastError::Superseded { node, live });
    }
    Ok(NewCast {
        group,
        body,
        except: options.except,
        headers: options.headers,
        at_most_once: options.delivery == Delivery::AtMostOnce,
        audience: Audience::Group,
        ticket: None,
    })
}

impl Muster {
    /// Sends `payload` to every member of `group` in the cluster, and waits until every node that holds some has
    /// it (a [`Receipt`] does not wait for suspect nodes; they get it when their link resumes). Waits for room where queues are full.
    ///
    /// Cancel-safe: dropped before the broadcast has its id, nothing is sent; dropped later, the library
    /// finishes it.
    ///
    /// # Errors
    /// [`BroadcastError`]; unless it says otherwise, nothing was sent.
    ///
    /// ```
    /// # use muster_router::{Decision, Muster, transport::memory::Network};
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let muster = Muster::builder("rooms").transport(Network::new().node("a")).start().await?;
    /// let receipt = muster.broadcast("room:42", "hello").await?;
    /// assert_ne!(receipt.decision, Decision::Unknown);
    /// # Ok(())
    /// # }
    /// ```
    pub async fn broadcast(
        &self,
        group: impl Into<Group>,
        payload: impl Into<Bytes>,
    ) -> Result<Receipt, BroadcastError> {
        self.broadcast_with(group, payload, BroadcastOptions::default()).await
    }

    /// The same with [`BroadcastOptions`].
    ///
    /// # Errors
    /// As [`Muster::broadcast`].
    ///
    /// ```
    /// # use muster_router::{BroadcastOptions, Decision, Delivery, Muster};
    /// # use muster_router::transport::memory::Network;
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let muster = Muster::builder("rooms").transport(Network::new().node("a")).start().await?;
    /// let options = BroadcastOptions::default().delivery(Delivery::AtMostOnce).header("trace", "7f3a");
    /// let receipt = muster.broadcast_with("room:42", "tick", options).await?;
    /// assert_eq!(receipt.decision, Decision::Unknown);
    /// # Ok(())
    /// # }
    /// ```
    pub async fn broadcast_with(
        &self,
        group: impl Into<Group>,
        payload: impl Into<Bytes>,
        options: BroadcastOptions,
    ) -> Result<Receipt, BroadcastError> {
        let driver = self.driver();
        let cast = new_cast(driver, group.into(), payload.into(), options)?;
        let (id, settled) = driver.cast(cast).await?;
        Ok(Receipt::of(id, settled))
    }

    /// Sends without ever waiting, and without a receipt; acknowledged delivery goes on in the background. From
    /// inside a [`Subscriber`](crate::Subscriber) it is queued and made when the delivery is over.
    ///
    /// # Errors
    /// [`TryBroadcastError`]; nothing was sent.
    ///
    /// ```
    /// # use muster_router::{Muster, TryBroadcastError};
    /// # use muster_router::transport::memory::Network;
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let muster = Muster::builder("rooms").transport(Network::new().node("a")).start().await?;
    /// match muster.try_broadcast("room:42", "typing") {
    ///     Ok(()) => {}
    ///     Err(TryBroadcastError::Busy) => println!("not so important"),
    ///     Err(error) => return Err(error.into()),
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub fn try_broadcast(
        &self,
        group: impl Into<Group>,
        payload: impl Into<Bytes>,
    ) -> Result<(), TryBroadcastError> {
        self.try_broadcast_with(group, payload, BroadcastOptions::default())
    }

    /// The same with [`BroadcastOptions`].
    ///
    /// # Errors
    /// As [`Muster::try_broadcast`].
    pub fn try_broadcast_with(
        &self,
        group: impl Into<Group>,
        payload: impl Into<Bytes>,
        options: BroadcastOptions,
    ) -> Result<(), TryBroadcastError> {
        let driver = self.driver();
        let cast = new_cast(driver, group.into(), payload.into(), options)?;
        if driver.try_cast(cast) { Ok(()) } else { Err(TryBroadcastError::Busy) }
    }

    /// Gives `payload` to the members on this node only, now; how many there are. 0 for a name that is not
    /// allowed and for a payload that is too large. The messages have the number 0.
    ///
    /// ```
    /// # use muster_router::{Muster};
    /// # use muster_router::transport::memory::Network;
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let muster = Muster::builder("rooms").transport(Network::new().node("a")).start().await?;
    /// let mut inbox = muster.subscribe("room:42").await?;
    /// assert_eq!(muster.broadcast_local("room:42", "restarting soon"), 1);
    /// assert!(inbox.try_recv().is_some());
    /// # Ok(())
    /// # }
    /// ```
    pub fn broadcast_local(&self, group: impl Into<Group>, payload: impl Into<Bytes>) -> usize {
        let driver = self.driver();
        match new_cast(driver, group.into(), payload.into(), BroadcastOptions::default()) {
            Ok(cast) => driver.cast_local(cast),
            Err(_) => 0,
        }
    }

    /// Gives `payload` to the members of `group` on one node, and waits until that node has it. Cancel-safe as
    /// [`Muster::broadcast`].
    ///
    /// # Errors
    /// [`BroadcastError::NoSuchNode`] if it is not connected, [`BroadcastError::NodeLost`] if it went away before
    /// it had acknowledged, and as [`Muster::broadcast`].
    ///
    /// ```
    /// # use muster_router::{Muster};
    /// # use muster_router::transport::memory::Network;
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let muster = Muster::builder("rooms").transport(Network::new().node("a")).start().await?;
    /// let mut inbox = muster.subscribe("room:42").await?;
    /// muster.send_to_node("a", "room:42", "only for node a").await?;
    /// assert!(inbox.try_recv().is_some());
    /// # Ok(())
    /// # }
    /// ```
    pub async fn send_to_node(
        &self,
        node: impl AsRef<str>,
        group: impl Into<Group>,
        payload: impl Into<Bytes>,
    ) -> Result<(), BroadcastError> {
        let driver = self.driver();
        let mut cast = new_cast(driver, group.into(), payload.into(), BroadcastOptions::default())?;
        let name = node.as_ref();
        let peer = driver.node.with_published(|published| {
            let me = (published.me.node.as_str() == name).then(|| published.me.clone());
            me.or_else(|| {
                published.connected.iter().find(|c| c.peer.node.as_str() == name).map(|c| c.peer.clone())
            })
        });
        let Some(peer) = peer else {
            return Err(match NodeId::new(name) {
                Ok(node) => BroadcastError::NoSuchNode { node },
                Err(error) => BroadcastError::Name(error),
            });
        };
        let connection = driver.connection_number(&peer);
        cast.audience = Audience::Node(peer.clone());
        driver.cast(cast).await?;
        if driver.still_there(&peer, connection).await {
            Ok(())
        } else {
            Err(BroadcastError::NodeLost { node: peer.node })
        }
    }
}
