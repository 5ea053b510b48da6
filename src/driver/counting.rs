//! How many members a group has in the whole cluster: asked of those who hold it.

use std::collections::BTreeSet;
use std::sync::Arc;

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use tokio::task::JoinSet;

use super::Driver;
use super::member::Member;
use crate::node::{Node, Route};
use crate::transport::calls::Service;
use crate::types::{Group, NodeId, Peer};
use crate::view::ViewHash;

#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
enum Request {
    /// To the router: who holds the group, if you can be sure for a caller of that view?
    Holders { group: Group, sender: ViewHash },
    /// To a holder: how many members have you?
    Count { group: Group },
}

#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
enum Reply {
    /// `None`: cannot be sure.
    Holders(Option<Vec<NodeId>>),
    Count(u64),
}

/// How many members a group has.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct MemberCount {
    /// The members on the nodes that answered.
    pub count: u64,
    /// Nodes that may hold members and did not answer: they could not be reached, went down, or were silent for
    /// `rpc_timeout`. Sorted. Empty: the count is of all nodes that this one knows of.
    pub missing: Vec<NodeId>,
}

/// Answers a peer; nothing if its request makes no sense.
pub(super) fn serve(node: &Node<Member>, request: &[u8]) -> Option<Bytes> {
    let reply = match postcard::from_bytes(request).ok()? {
        Request::Holders { group, sender } => {
            let targets = node.targets(group.as_bytes(), sender).ok();
            Reply::Holders(targets.map(|nodes| nodes.as_slice().to_vec()))
        }
        Request::Count { group } => Reply::Count(node.local_members(group.as_bytes()).len() as u64),
    };
    encode(&reply)
}

fn encode(message: &impl Serialize) -> Option<Bytes> {
    postcard::to_allocvec(message).ok().map(Bytes::from)
}

impl Driver {
    /// Asks all holders at once; takes at most two times `rpc_timeout`.
    pub(crate) async fn member_count(self: &Arc<Self>, group: Group) -> MemberCount {
        let mut count = self.node.local_members(group.as_bytes()).len() as u64;
        let (asked, mut missing) = self.whom_to_ask(&group).await;
        let mut answers = JoinSet::new();
        for peer in asked {
            let (driver, group) = (self.clone(), group.clone());
            answers.spawn_on(
                async move {
                    let answer = driver.ask(&peer, &Request::Count { group }).await;
                    (peer, answer)
                },
                &self.runtime,
            );
        }
        while let Some(answer) = answers.join_next().await {
            match answer {
                Ok((_, Some(Reply::Count(more)))) => count = count.saturating_add(more),
                Ok((peer, _)) => drop(missing.insert(peer.node)),
                // the runtime ends
                Err(_) => {}
            }
        }
        MemberCount { count, missing: missing.into_iter().collect() }
    }

    /// The other nodes that may hold members, and those of them that are not connected.
    async fn whom_to_ask(self: &Arc<Self>, group: &Group) -> (Vec<Peer>, BTreeSet<NodeId>) {
        let holders = self.holders(group).await;
        let connected: Vec<Peer> =
            self.node.with_published(|p| p.connected.iter().map(|c| c.peer.clone()).collect());
        let Some(holders) = holders else { return (connected, BTreeSet::new()) };
        let mut missing: BTreeSet<NodeId> = holders.into_iter().collect();
        missing.remove(&self.node.me().node);
        let asked: Vec<Peer> = connected.into_iter().filter(|peer| missing.remove(&peer.node)).collect();
        (asked, missing)
    }

    /// Who holds the group, if somebody can be sure.
    async fn holders(self: &Arc<Self>, group: &Group) -> Option<Vec<NodeId>> {
        let sender = self.node.with_published(crate::node::Published::sender_hash);
        if sender == ViewHash::UNSETTLED {
            return None;
        }
        let Route::Router(router) = self.node.router(group.as_bytes()) else { return None };
        if router == self.node.me().node {
            return self.node.targets(group.as_bytes(), sender).ok().map(|nodes| nodes.as_slice().to_vec());
        }
        let router = self.node.with_published(|p| {
            p.connected.iter().find(|c| c.peer.node == router && !c.suspect).map(|c| c.peer.clone())
        })?;
        match self.ask(&router, &Request::Holders { group: group.clone(), sender }).await {
            Some(Reply::Holders(nodes)) => nodes,
            Some(Reply::Count(_)) | None => None,
        }
    }

    async fn ask(&self, peer: &Peer, request: &Request) -> Option<Reply> {
        let answer = self.call(peer, Service::Members, encode(request)?, self.config.rpc_timeout).await;
        match answer {
            Ok(answer) => postcard::from_bytes(&answer).ok(),
            Err(error) => {
                tracing::debug!(%peer, %error, "no answer about the members of a group");
                None
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node::Settings;
    use crate::types::Incarnation;

    #[test]
    fn a_request_that_makes_no_sense_has_no_answer() {
        let me = Peer::new(NodeId::new("a").unwrap(), Incarnation::MIN);
        let node = Node::new(me, Settings::from(&crate::Config::default()), std::time::Duration::ZERO);
        for hostile in [&[][..], &[2], &[9, 9, 9], &[1, 0xff, 0xff, 0xff, 0xff, 0x0f, 1]] {
            assert_eq!(serve(&node, hostile), None, "{hostile:?}");
        }
        let count = encode(&Request::Count { group: Group::from("g") }).unwrap();
        let answer: Reply = postcard::from_bytes(&serve(&node, &count).unwrap()).unwrap();
        assert_eq!(answer, Reply::Count(0));
        let unsettled = Request::Holders { group: Group::from("g"), sender: ViewHash::UNSETTLED };
        let answer = serve(&node, &encode(&unsettled).unwrap()).unwrap();
        assert_eq!(postcard::from_bytes::<Reply>(&answer).unwrap(), Reply::Holders(None));
    }
}
