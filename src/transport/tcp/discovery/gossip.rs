//! Membership by gossip (SWIM, by foca), over the links.
//!
//! Each node probes one other after the other. Who does not answer is probed through others as well, so one bad link
//! is told apart from a dead node; who answers nobody is suspected, and down if it does not object in time. What is
//! found out spreads with the probes. Gossip decides who is dialled and what is reported, never whether a link is up:
//! that is first-hand knowledge of both its ends.
//!
//! A node is its name, its incarnation (higher with each start) and its address. Of two lives of one name the higher
//! incarnation stays. One that was declared down although it lives takes a new identity of the same incarnation and
//! is back.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::num::{NonZeroU8, NonZeroUsize};
use std::time::Duration;

use bytes::Bytes;
use foca::{Foca, Header, Member, Notification, PeriodicParams, PostcardCodec, Runtime, State, Timer};
use rand::SeedableRng;
use rand::rngs::StdRng;
use serde::{Deserialize, Serialize};

use super::Time;
use super::exchange::{Ignored, MAX_MESSAGE_LEN};
use super::members::MemberState;
use super::options::unusable;
use crate::types::{Incarnation, NodeId, Peer};

/// The longest message; the same on all nodes, since a longer one is refused.
const MAX_PACKET: usize = 16 * 1024;
const _: () = assert!(MAX_PACKET < MAX_MESSAGE_LEN);

/// The times of gossip. [`GossipOptions::lan`] is the default; all nodes should use the same.
///
/// A dead node is known to be down everywhere after about one `probe_interval`, `suspicion` and a few
/// `gossip_interval`s.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GossipOptions {
    /// How often another member is probed (1 s; 100 ms to 1 min).
    pub probe_interval: Duration,
    /// How long a member may take to answer before others are asked to probe it (400 ms): more than the slowest
    /// round trip, and at most half of `probe_interval`, because the answers through others need that time too.
    pub probe_timeout: Duration,
    /// How many others are asked (3; 1 to 16).
    pub indirect_probes: usize,
    /// How long a suspected member may take to object before it is down (4 s; at least `probe_interval`). Longer:
    /// fewer false alarms when machines are slow. Shorter: deaths are known sooner.
    pub suspicion: Duration,
    /// How often news are passed on besides those that travel with probes (200 ms; 10 ms to 1 min).
    pub gossip_interval: Duration,
    /// To how many members each time (3; 1 to 16).
    pub gossip_fanout: usize,
    /// How often a member is asked for all that it knows (30 s), and those that are down whether they really are (a
    /// sixth of it); 1 s to 1 h.
    pub sync_interval: Duration,
}

impl GossipOptions {
    /// For nodes of one network or region.
    pub fn lan() -> Self {
        Self {
            probe_interval: Duration::from_secs(1),
            probe_timeout: Duration::from_millis(400),
            indirect_probes: 3,
            suspicion: Duration::from_secs(4),
            gossip_interval: Duration::from_millis(200),
            gossip_fanout: 3,
            sync_interval: Duration::from_secs(30),
        }
    }

    /// For nodes of different regions: slower to judge, and quieter.
    pub fn wan() -> Self {
        Self {
            probe_interval: Duration::from_secs(5),
            probe_timeout: Duration::from_millis(2500),
            indirect_probes: 3,
            suspicion: Duration::from_secs(20),
            gossip_interval: Duration::from_millis(500),
            gossip_fanout: 4,
            sync_interval: Duration::from_secs(60),
        }
    }

    /// Says which option makes no sense, and why.
    pub(crate) fn check(&self) -> Result<(), String> {
        let within = |option: &str, given: Duration, low: Duration, high: Duration| {
            if given < low || given > high {
                return Err(format!("{option} is {given:?}; allowed is {low:?} to {high:?}"));
            }
            Ok(())
        };
        let (second, minute) = (Duration::from_secs(1), Duration::from_secs(60));
        within("probe_interval", self.probe_interval, Duration::from_millis(100), minute)?;
        within("probe_timeout", self.probe_timeout, Duration::from_millis(1), self.probe_interval / 2)?;
        within("suspicion", self.suspicion, self.probe_interval, minute * 60)?;
        within("gossip_interval", self.gossip_interval, Duration::from_millis(10), minute)?;
        within("sync_interval", self.sync_interval, second, minute * 60)?;
        for (option, given) in
            [("indirect_probes", self.indirect_probes), ("gossip_fanout", self.gossip_fanout)]
        {
            if !(1..=16).contains(&given) {
                return Err(format!("{option} is {given}; allowed is 1 to 16"));
            }
        }
        Ok(())
    }

    fn config(&self, forget_after: Duration) -> foca::Config {
        let count = |n: usize| NonZeroUsize::new(n).unwrap_or(NonZeroUsize::MIN);
        let every = |frequency, n| Some(PeriodicParams { frequency, num_members: count(n) });
        foca::Config {
            probe_period: self.probe_interval,
            probe_rtt: self.probe_timeout,
            num_indirect_probes: count(self.indirect_probes),
            // enough for about 300 members; more only hear of news a little later
            max_transmissions: NonZeroU8::new(10).unwrap_or(NonZeroU8::MIN),
            suspect_to_down_after: self.suspicion,
            remove_down_after: Some(forget_after),
            max_packet_size: count(MAX_PACKET),
            notify_down_members: true,
            periodic_announce: every(self.sync_interval, 1),
            periodic_announce_to_down_members: every(self.sync_interval / 6, 2),
            periodic_gossip: every(self.gossip_interval, self.gossip_fanout),
        }
    }
}

impl Default for GossipOptions {
    fn default() -> Self {
        Self::lan()
    }
}

/// One life of a node at one address.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Identity {
    node: NodeId,
    incarnation: Incarnation,
    /// How often it was declared down in this life, and was not.
    renewals: u32,
    address: SocketAddr,
}

impl Identity {
    fn rank(&self) -> (Incarnation, u32, SocketAddr) {
        (self.incarnation, self.renewals, self.address)
    }
}

impl foca::Identity for Identity {
    type Addr = NodeId;

    fn renew(&self) -> Option<Self> {
        Some(Self { renewals: self.renewals.checked_add(1)?, ..self.clone() })
    }

    fn addr(&self) -> NodeId {
        self.node.clone()
    }

    fn win_addr_conflict(&self, adversary: &Self) -> bool {
        self.rank() > adversary.rank()
    }
}

/// What an input has led to.
#[derive(Debug, Default)]
pub(super) struct Output {
    /// To whom, if linked.
    pub(super) sends: Vec<(NodeId, Bytes)>,
    /// Whether [`Gossip::standings`] may be others than before.
    pub(super) changed: bool,
    timers: Vec<(Duration, Timer<Identity>)>,
}

impl Runtime<Identity> for Output {
    fn notify(&mut self, notification: Notification<'_, Identity>) {
        match notification {
            Notification::MemberUp(_) | Notification::MemberDown(_) | Notification::Rename(..) => {
                self.changed = true;
            }
            Notification::Active | Notification::Idle | Notification::Defunct | Notification::Rejoin(_) => {}
        }
    }

    fn send_to(&mut self, to: Identity, data: &[u8]) {
        self.sends.push((to.node, Bytes::copy_from_slice(data)));
    }

    fn submit_after(&mut self, event: Timer<Identity>, after: Duration) {
        self.timers.push((after, event));
    }
}

/// See the module. Everything that it leads to is in [`Gossip::take_output`].
pub(super) struct Gossip {
    foca: Foca<Identity, PostcardCodec, StdRng, foca::NoCustomBroadcast>,
    max_members: usize,
    timers: BTreeMap<(Time, u64), Timer<Identity>>,
    ticket: u64,
    now: Time,
    output: Output,
}

impl std::fmt::Debug for Gossip {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Gossip").field("me", self.foca.identity()).finish_non_exhaustive()
    }
}

impl Gossip {
    pub(super) fn new(
        options: &GossipOptions,
        me: &Peer,
        address: SocketAddr,
        forget_after: Duration,
        max_members: usize,
        seed: u64,
    ) -> Self {
        let Peer { node, incarnation } = me.clone();
        let identity = Identity { node, incarnation, renewals: 0, address };
        let random = StdRng::seed_from_u64(seed);
        Self {
            foca: Foca::new(identity, options.config(forget_after), random, PostcardCodec),
            max_members,
            timers: BTreeMap::new(),
            ticket: 0,
            now: Time::ZERO,
            output: Output::default(),
        }
    }

    /// Everybody who is known, with the latest address.
    pub(super) fn standings(&self) -> impl Iterator<Item = (&NodeId, SocketAddr, MemberState)> {
        self.foca.iter_membership_state().map(|member| {
            let state = match member.state() {
                State::Alive => MemberState::Unreachable,
                State::Suspect => MemberState::Suspect,
                State::Down => MemberState::Down,
            };
            (&member.id().node, member.id().address, state)
        })
    }

    fn is_active(&self, node: &NodeId) -> bool {
        self.foca.iter_members().any(|member| member.id().node == *node)
    }

    /// A link is there: whoever is not known to live is asked what it knows.
    pub(super) fn handle_linked(&mut self, node: &NodeId, address: SocketAddr, now: Time) {
        if self.is_active(node) {
            return;
        }
        // only the name matters here: who it is now, it says itself
        let there = Identity { node: node.clone(), incarnation: Incarnation::MIN, renewals: 0, address };
        self.run(now, |foca, output| foca.announce(there, output));
    }

    /// A message of a linked node.
    pub(super) fn handle_message(&mut self, from: &NodeId, data: &[u8], now: Time) -> Result<(), Ignored> {
        self.admit(from, data)?;
        match self.run(now, |foca, output| foca.handle_data(data, output)) {
            None | Some(foca::Error::IndirectForOurselves) => Ok(()),
            Some(_) => Err(Ignored::Malformed),
        }
    }

    /// This node has another incarnation or another address.
    pub(super) fn handle_identity(&mut self, me: &Peer, address: SocketAddr, now: Time) {
        let Peer { node, incarnation } = me.clone();
        let current = self.foca.identity();
        if (current.incarnation, current.address) == (incarnation, address) {
            return;
        }
        let renewals =
            if current.incarnation == incarnation { current.renewals.saturating_add(1) } else { 0 };
        let identity = Identity { node, incarnation, renewals, address };
        self.run(now, |foca, output| foca.change_identity(identity, output));
    }

    /// This node is about to end: the others need not find out by themselves.
    pub(super) fn handle_leaving(&mut self, now: Time) {
        self.run(now, |foca, output| foca.leave_cluster(output));
        self.timers.clear();
    }

    pub(super) fn handle_timeout(&mut self, now: Time) {
        while let Some(due) = self.timers.first_entry().filter(|entry| entry.key().0 <= now) {
            let timer = due.remove();
            self.output.changed |= matches!(timer, Timer::RemoveDown(_) | Timer::ProbeRandomMember(_));
            self.run(now, |foca, output| foca.handle_timer(timer, output));
        }
    }

    pub(super) fn poll_timeout(&self) -> Option<Time> {
        self.timers.first_key_value().map(|((at, _), _)| *at)
    }

    pub(super) fn take_output(&mut self) -> Output {
        std::mem::take(&mut self.output)
    }

    /// Whether the message is of its sender and leaves the list of members within its bound.
    fn admit(&self, from: &NodeId, data: &[u8]) -> Result<(), Ignored> {
        let malformed = |_| Ignored::Malformed;
        let (header, rest) = postcard::take_from_bytes::<Header<Identity>>(data).map_err(malformed)?;
        if header.src.node != *from || unusable(header.src.address).is_some() {
            return Err(Ignored::Malformed);
        }
        let mut known: BTreeSet<&NodeId> =
            self.foca.iter_membership_state().map(|member| &member.id().node).collect();
        let mut told: Vec<Member<Identity>> = Vec::new();
        if let Some((count, mut rest)) = rest.split_first_chunk::<2>() {
            for _ in 0..u16::from_be_bytes(*count) {
                let (member, after) =
                    postcard::take_from_bytes::<Member<Identity>>(rest).map_err(malformed)?;
                told.push(member);
                rest = after;
            }
        }
        known.insert(from);
        known.extend(told.iter().map(|member| &member.id().node));
        if known.len() > self.max_members { Err(Ignored::Overflow) } else { Ok(()) }
    }

    /// Gives foca an input; the error, if that was one.
    fn run(
        &mut self,
        now: Time,
        give: impl FnOnce(
            &mut Foca<Identity, PostcardCodec, StdRng, foca::NoCustomBroadcast>,
            &mut Output,
        ) -> Result<(), foca::Error>,
    ) -> Option<foca::Error> {
        self.now = self.now.max(now);
        let result = give(&mut self.foca, &mut self.output);
        for (after, timer) in std::mem::take(&mut self.output.timers) {
            self.ticket += 1;
            self.timers.insert((self.now.saturating_add(after), self.ticket), timer);
        }
        let error = result.err()?;
        tracing::debug!(me = %self.foca.identity().node, %error, "gossip");
        Some(error)
    }
}
