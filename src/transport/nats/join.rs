//! How a node joins a scope: connects, makes sure that NATS carries its messages, and takes its name.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use async_nats::{Client, Message, StatusCode, Subject, Subscriber};
use bytes::Bytes;
use futures_util::StreamExt;
use tokio::sync::watch;

use super::builder::{Settings, Source};
use super::directory::{Directory, DirectoryConfig};
use super::end::{End, Progress, Signals};
use super::envelope::{Envelope, Key, Presence, Word};
use super::seat::Seat;
use super::subject::{LifeId, Subjects};
use super::{Ears, Inner, envelope, failed, wire, within};
use crate::transport::link::Links;
use crate::transport::{Inbound, TransportError};
use crate::types::{Incarnation, Peer};

/// How much that comes before the task runs is kept for it; others say it again.
const EARLY: usize = 4096;

impl Inner {
    /// Connects, makes sure of its rights and of the name, and starts the task.
    pub(super) async fn join(&self, inbound: Inbound) -> Result<Arc<End>, TransportError> {
        let Settings { node, prefix, limits, link, .. } = &self.settings;
        let signals = Arc::new(Signals { on_event: self.settings.on_event.clone(), ..Signals::default() });
        let client = self.connect(&signals).await?;
        let least = client.max_payload();
        if least < wire::LEAST_MESSAGE + envelope::DATA_PREFIX {
            return Err(failed(format!("the server's max_payload of {least} bytes is too small")));
        }
        let (life, seed) = (LifeId(random()?), random()?);
        let subjects = Subjects::new(prefix, &inbound.terms().scope);
        let me = Peer::new(node.clone(), self.incarnation());
        let config = DirectoryConfig {
            beat: limits.presence_interval,
            window: limits.discovery_window,
            try_for: link.handshake_timeout,
            lives: limits.peers,
        };
        let directory = Directory::new(me.clone(), life, config, seed, Duration::ZERO);
        let mut inbox = client.subscribe(subjects.everything_for(node, life)).await.map_err(failed)?;
        let mut presence = client.subscribe(subjects.presence()).await.map_err(failed)?;
        let mut rights = Rights {
            client: &client,
            signals: &signals,
            prefix,
            // a server that is slow is no server that refuses
            patience: limits.claim_timeout.max(link.handshake_timeout),
            early: VecDeque::new(),
        };
        // the end of a connection that never was: nobody does anything about it
        let mark = Envelope::Close { key: Key { dialer: life.0, acceptor: random()? } }.encode();
        let [own, ..] = subjects.lanes(node, life);
        rights.prove(&mut inbox, own, None, &mark).await?;
        rights.prove(&mut presence, subjects.presence(), None, &mark).await?;
        let claim = directory.presence(Word::Hello, 0);
        let name = self.claim(&mut rights, &subjects, &mut inbox, &claim).await?;
        let early = rights.early;
        let links = Links::new(me, inbound.terms().clone(), link.clone());
        let (started, progress) = watch::channel(Progress::Starting);
        let end = Arc::new(End::new(links, inbound, signals, progress));
        let ears = Ears { inbox, presence, name };
        let seat = Seat::new(end.clone(), client, subjects, (directory, life), ears, limits, started);
        let mut seat = seat.longest_packet(link.max_frame);
        seat.arrived = early;
        self.running.lock().end = Some(end.clone());
        tokio::spawn(seat.run());
        Ok(end)
    }

    async fn connect(&self, signals: &Arc<Signals>) -> Result<Client, TransportError> {
        match &self.settings.source {
            Source::Client(client) => Ok(client.clone()),
            Source::Connect(servers, options) => {
                let signals = signals.clone();
                let hear = move |event| {
                    signals.hear(&event);
                    std::future::ready(())
                };
                options.clone().event_callback(hear).connect(servers.as_slice()).await.map_err(failed)
            }
        }
    }

    /// Above every earlier life of this value, also when the clock went back.
    fn incarnation(&self) -> Incarnation {
        let clock = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_micros();
        let clock = u64::try_from(clock).unwrap_or(u64::MAX);
        let after = |last: u64| Some(clock.max(last.saturating_add(1)));
        let last = self.last_incarnation.fetch_update(Ordering::SeqCst, Ordering::SeqCst, after);
        let last = last.unwrap_or_default();
        Incarnation::new(clock.max(last.saturating_add(1))).unwrap_or(Incarnation::MIN)
    }

    /// Makes sure that no live node holds the name, then holds it. The server says at once if nobody listens
    /// there; whoever does is given time to answer.
    async fn claim(
        &self,
        rights: &mut Rights<'_>,
        subjects: &Subjects,
        inbox: &mut Subscriber,
        claim: &Presence,
    ) -> Result<Subscriber, TransportError> {
        let Settings { node, limits, .. } = &self.settings;
        let client = rights.client;
        let holders = subjects.name(node);
        let [reply, ..] = subjects.lanes(node, claim.life);
        let bytes: Bytes = Envelope::Claim(claim.clone()).encode();
        let live = within(limits.claim_timeout, async {
            let asked = client.publish_with_reply(holders.clone(), reply.clone(), bytes.clone());
            asked.await.map_err(failed)?;
            while let Some(message) = inbox.next().await {
                match verdict(&message, claim) {
                    Some(live) => return Ok(live),
                    None => continue,
                }
            }
            Err(closed())
        });
        match live.await {
            Some(Ok(Some(live))) => {
                return Err(TransportError::Superseded { node: node.clone(), live });
            }
            Some(Err(error)) => return Err(error),
            // nobody listens, or nobody answers
            Some(Ok(None)) | None => {}
        }
        let mut name = client.subscribe(holders.clone()).await.map_err(failed)?;
        // two that start at the same moment have both found it free: at least one of them hears the other now
        rights.prove(&mut name, holders, Some(reply), &bytes).await?;
        Ok(name)
    }
}

/// Finds out whether messages of this node come back to it. The server does not tell who publishes or subscribes
/// without the right to, so such a node would believe that it is alone, and its members would miss everything.
struct Rights<'a> {
    client: &'a Client,
    signals: &'a Signals,
    prefix: &'a str,
    patience: Duration,
    /// What others have said meanwhile.
    early: VecDeque<Message>,
}

impl Rights<'_> {
    /// Sends a message that no other node sends, and waits until it is back.
    async fn prove(
        &mut self,
        ear: &mut Subscriber,
        subject: Subject,
        reply: Option<Subject>,
        bytes: &Bytes,
    ) -> Result<(), TransportError> {
        let (client, early) = (self.client, &mut self.early);
        let back = async {
            match reply {
                Some(reply) => client.publish_with_reply(subject.clone(), reply, bytes.clone()).await,
                None => client.publish(subject.clone(), bytes.clone()).await,
            }
            .map_err(failed)?;
            while let Some(message) = ear.next().await {
                if message.status.is_none() && message.payload == *bytes {
                    return Ok(());
                }
                if early.len() < EARLY {
                    early.push_back(message);
                }
            }
            Err(closed())
        };
        let prefix = self.prefix;
        tokio::select! {
            back = within(self.patience, back) => back.unwrap_or_else(|| Err(failed(format!(
                "what was sent to `{subject}` did not come back within {:?}: the account may not publish or \
                 subscribe there (it needs `{prefix}.>`), or the client has `no_echo`",
                self.patience
            )))),
            denial = self.signals.denied() => Err(failed(format!(
                "{denial}: the account may not publish or subscribe there (it needs `{prefix}.>`)"
            ))),
        }
    }
}

fn closed() -> TransportError {
    failed("the connection to NATS was closed")
}

/// `None`: it says nothing of the name. Otherwise who holds it, if anyone.
fn verdict(message: &Message, claim: &Presence) -> Option<Option<Incarnation>> {
    if message.status == Some(StatusCode::NO_RESPONDERS) {
        return Some(None);
    }
    match Envelope::decode(message.payload.clone()) {
        Ok(Envelope::Taken(holder)) if holder.node == claim.node && holder.life != claim.life => {
            Some(Some(holder.incarnation))
        }
        Ok(_) | Err(_) => None,
    }
}

fn random() -> Result<u64, TransportError> {
    getrandom::u64().map_err(failed)
}
