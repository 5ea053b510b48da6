//! Which node is responsible for which key: a consistent-hash ring.
//!
//! The ring is a value: built from node names and [`RingConfig`], never edited. The same names give the
//! same ring in every process, on every platform and in every release, whatever the order in which they
//! were given; golden vectors in the tests pin that.
//!
//! ```text
//! token = xxh3_64( len(id): u32 LE | id | vnode: u32 LE )      vnode = 0 .. vnodes
//! key   = xxh3_64( bytes )
//! owner = the node of the first token at or after the key, round the end to the lowest token
//! ```

use std::fmt;
use std::hash::{BuildHasher, Hash, Hasher};

use hashring::HashRing;
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

use crate::types::NodeId;

/// The parameters of a [`Ring`]. Nodes whose parameters differ never agree on a view.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RingConfig {
    /// Tokens per node, [`RingConfig::MIN_VNODES`] to [`RingConfig::MAX_VNODES`]; a ring takes the nearest
    /// allowed number for one outside.
    pub vnodes: u32,
}

impl RingConfig {
    /// The fewest tokens per node.
    pub const MIN_VNODES: u32 = 1;
    /// The most tokens per node. A token costs 28 bytes: 1000 nodes with so many take 115 MB a ring.
    pub const MAX_VNODES: u32 = 4096;

    /// The same with `vnodes` brought into the allowed range.
    pub(crate) fn clamped(self) -> Self {
        Self { vnodes: self.vnodes.clamp(Self::MIN_VNODES, Self::MAX_VNODES) }
    }
}

impl Default for RingConfig {
    /// 128 tokens per node: the busiest of up to 50 nodes gets at most 1.3 times the mean.
    fn default() -> Self {
        Self { vnodes: 128 }
    }
}

/// A consistent-hash ring of nodes.
///
/// ```
/// use muster_router::{NodeId, Ring, RingConfig};
/// let nodes = ["a", "b", "c"].map(|name| NodeId::new(name).unwrap());
/// let ring = Ring::of(nodes, RingConfig::default());
/// let owners = ring.owners("room:42", 2);
/// assert_eq!(owners.len(), 2);
/// assert_eq!(ring.router_for("room:42"), Some(owners[0]));
/// ```
#[derive(Clone)]
pub struct Ring {
    config: RingConfig,
    nodes: Box<[NodeId]>,
    /// The distinct tokens, each with the node that has it.
    tokens: HashRing<Token, PrecomputedState>,
    /// The node of every token, in the order of (token, node): what [`Ring::owners`] walks. Here equal
    /// tokens are all kept, so each node is met at least once on the way round.
    order: Box<[u32]>,
    /// Per node, which part of the hash space it owns.
    shares: Box<[f64]>,
}

/// Slim on purpose: with the name inside, a lookup takes twice as long.
#[derive(Clone)]
struct Token {
    at: u64,
    /// Index into [`Ring::nodes`].
    node: u32,
    /// Index into [`Ring::order`].
    position: u32,
}

impl Hash for Token {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(self.at);
    }
}

/// A key that [`key_hash`] has hashed.
struct HashedKey(u64);

impl Hash for HashedKey {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(self.0);
    }
}

/// Hands `hashring` the hashes that we have computed from explicit bytes. `std::hash` promises no stable
/// bytes for what it hashes, so nothing of it may have a say in a placement.
#[derive(Clone, Copy, Default)]
struct PrecomputedState;

/// See [`PrecomputedState`].
struct Precomputed(u64);

impl BuildHasher for PrecomputedState {
    type Hasher = Precomputed;
    fn build_hasher(&self) -> Precomputed {
        Precomputed(0)
    }
}

impl Hasher for Precomputed {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write_u64(&mut self, hash: u64) {
        self.0 = hash;
    }
    /// Not called: [`Token`] and [`HashedKey`] write one `u64`.
    fn write(&mut self, bytes: &[u8]) {
        self.0 = xxh3_64_with_seed(bytes, self.0);
    }
}

/// The stable hash of a key: xxh3 (64 bits, seed 0) of its bytes.
pub fn key_hash(key: &[u8]) -> u64 {
    xxh3_64(key)
}

/// The place of the `vnode`-th token of `node`.
fn token_hash(node: &NodeId, vnode: u32) -> u64 {
    let id = node.as_bytes();
    let mut bytes = Vec::with_capacity(id.len() + 8);
    bytes.extend_from_slice(&(id.len() as u32).to_le_bytes());
    bytes.extend_from_slice(id);
    bytes.extend_from_slice(&vnode.to_le_bytes());
    xxh3_64(&bytes)
}

impl Ring {
    /// The ring of these nodes. A node given twice counts once.
    pub fn of(nodes: impl IntoIterator<Item = NodeId>, config: RingConfig) -> Self {
        Self::with_tokens(nodes, config, token_hash)
    }

    /// The seam through which tests make tokens collide.
    fn with_tokens(
        nodes: impl IntoIterator<Item = NodeId>,
        config: RingConfig,
        token: impl Fn(&NodeId, u32) -> u64,
    ) -> Self {
        let config = config.clamped();
        let mut nodes: Vec<NodeId> = nodes.into_iter().collect();
        nodes.sort_unstable();
        nodes.dedup();
        let mut placed = Vec::with_capacity(nodes.len() * config.vnodes as usize);
        for (node, id) in (0u32..).zip(&nodes) {
            placed.extend((0..config.vnodes).map(|vnode| (token(id, vnode), node)));
        }
        placed.sort_unstable();
        placed.dedup();
        let distinct = distinct_tokens(&placed);
        let shares = shares(&distinct, nodes.len());
        let mut tokens = HashRing::with_hasher(PrecomputedState);
        tokens.batch_add(distinct);
        let order = placed.into_iter().map(|(_, node)| node).collect();
        Self { config, nodes: nodes.into(), tokens, order, shares }
    }

    /// The node responsible for `key`; `None` if the ring has no node. Every other placement of this ring
    /// starts from here, so there is one answer for a key and no second.
    pub fn router_for(&self, key: impl AsRef<[u8]>) -> Option<&NodeId> {
        self.nodes.get(self.router_index(key)?)
    }

    /// The same as an index into [`Ring::nodes`].
    pub fn router_index(&self, key: impl AsRef<[u8]>) -> Option<usize> {
        self.token_of(key.as_ref()).map(|token| token.node as usize)
    }

    /// The first `n` distinct nodes at and after `key`: [`Ring::router_for`] and then its replicas. Fewer
    /// only if the ring has fewer nodes.
    pub fn owners(&self, key: impl AsRef<[u8]>, n: usize) -> Vec<&NodeId> {
        let wanted = n.min(self.nodes.len());
        let mut owners = Vec::with_capacity(wanted);
        let Some(first) = self.token_of(key.as_ref()) else { return owners };
        let (before, from) = self.order.split_at(first.position as usize);
        let mut met = vec![false; self.nodes.len()];
        for &index in from.iter().chain(before) {
            if owners.len() == wanted {
                break;
            }
            let (Some(met), Some(node)) = (met.get_mut(index as usize), self.nodes.get(index as usize))
            else {
                continue;
            };
            if !std::mem::replace(met, true) {
                owners.push(node);
            }
        }
        owners
    }

    /// The part of the hash space for which `node` is the router, 0.0 to 1.0; 0.0 for a node that is not
    /// on the ring.
    pub fn share(&self, node: &NodeId) -> f64 {
        let index = self.nodes.binary_search(node).ok();
        index.and_then(|index| self.shares.get(index)).copied().unwrap_or(0.0)
    }

    /// The nodes, sorted, each once.
    pub fn nodes(&self) -> &[NodeId] {
        &self.nodes
    }

    /// Whether there is no node.
    pub fn is_empty(&self) -> bool {
        self.nodes.is_empty()
    }

    /// The parameters, as used: `vnodes` is within its range.
    pub fn config(&self) -> RingConfig {
        self.config
    }

    fn token_of(&self, key: &[u8]) -> Option<&Token> {
        self.tokens.get(&HashedKey(key_hash(key)))
    }
}

/// One token per place, the lowest node's. `hashring` would answer with any of equals, and with another one
/// after the next build.
fn distinct_tokens(placed: &[(u64, u32)]) -> Vec<Token> {
    let mut distinct: Vec<Token> = Vec::with_capacity(placed.len());
    for (position, &(at, node)) in (0u32..).zip(placed) {
        if distinct.last().is_none_or(|last| last.at != at) {
            distinct.push(Token { at, node, position });
        }
    }
    distinct
}

/// A token owns what lies between its predecessor (without) and itself (with).
fn shares(distinct: &[Token], nodes: usize) -> Box<[f64]> {
    const SPACE: u128 = 1 << 64;
    let mut owned = vec![0u128; nodes];
    let mut before = distinct.last().map_or(0, |last| last.at);
    for token in distinct {
        let arc = match token.at.wrapping_sub(before) {
            0 => SPACE,
            arc => u128::from(arc),
        };
        before = token.at;
        if let Some(owned) = owned.get_mut(token.node as usize) {
            *owned += arc;
        }
    }
    owned.into_iter().map(|owned| owned as f64 / SPACE as f64).collect()
}

impl PartialEq for Ring {
    fn eq(&self, other: &Self) -> bool {
        self.config == other.config && self.nodes == other.nodes
    }
}

impl Eq for Ring {}

impl Hash for Ring {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.config.hash(state);
        self.nodes.hash(state);
    }
}

impl fmt::Debug for Ring {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Ring({:?} x {})", self.nodes, self.config.vnodes)
    }
}
