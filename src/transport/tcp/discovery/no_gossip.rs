//! In place of gossip where the feature is off: nothing of it can exist.

use std::net::SocketAddr;
use std::time::Duration;

use bytes::Bytes;

use super::Time;
use super::exchange::Ignored;
use super::members::MemberState;
use crate::types::{NodeId, Peer};

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum GossipOptions {}

#[derive(Debug)]
pub(super) enum Gossip {}

#[derive(Debug)]
pub(super) struct Output {
    pub(super) sends: Vec<(NodeId, Bytes)>,
    pub(super) changed: bool,
}

impl Gossip {
    pub(super) fn new(
        options: &GossipOptions,
        _: &Peer,
        _: SocketAddr,
        _: Duration,
        _: usize,
        _: u64,
    ) -> Self {
        match *options {}
    }

    pub(super) fn standings(&self) -> impl Iterator<Item = (&NodeId, SocketAddr, MemberState)> {
        match *self {}
        #[allow(unreachable_code, reason = "the type of what is never returned")]
        std::iter::empty()
    }

    pub(super) fn handle_linked(&mut self, _: &NodeId, _: SocketAddr, _: Time) {
        match *self {}
    }

    pub(super) fn handle_message(&mut self, _: &NodeId, _: &[u8], _: Time) -> Result<(), Ignored> {
        match *self {}
    }

    pub(super) fn handle_identity(&mut self, _: &Peer, _: SocketAddr, _: Time) {
        match *self {}
    }

    pub(super) fn handle_leaving(&mut self, _: Time) {
        match *self {}
    }

    pub(super) fn handle_timeout(&mut self, _: Time) {
        match *self {}
    }

    pub(super) fn poll_timeout(&self) -> Option<Time> {
        match *self {}
    }

    pub(super) fn take_output(&mut self) -> Output {
        match *self {}
    }
}
