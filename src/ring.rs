//! Which node is responsible for which key: a consistent-hash ring.
//!
//! The ring is a value: built from node names and [`RingConfig`], never edited. The same names give the
//! same ring in every process, on every platform and in every release, whatever the order in which they
//! were given; golden vectors in the tests pin that.
//!
//! ```text
//! token = xxh3_64( vnode: u32 LE | id )      vnode = 0 .. vnodes
//! key   = xxh3_64( bytes )
//! owner = the node of the first token at or after the key, round the end to the lowest token
//! ```

use std::fmt;
use std::hash::{BuildHasher, Hash, Hasher};
use std::sync::Arc;

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
    /// The most tokens per node. A token costs about 40 bytes: 1000 nodes with so many take some 170 MB a ring.
    pub const MAX_VNODES: u32 = 4096;

    /// The same with `vnodes` brought into the allowed range.
    pub(crate) fn clamped(self) -> Self {
        Self { vnodes: self.vnodes.clamp(Self::MIN_VNODES, Self::MAX_VNODES) }
    }
}

impl Default for RingConfig {
    /// 128 tokens per node: the busiest of 50 nodes gets about 1.2 times the mean, seldom more than 1.3 times.
    fn default() -> Self {
        Self { vnodes: 128 }
    }
}

/// A consistent-hash ring of nodes. Cloning is cheap.
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
    nodes: Arc<[NodeId]>,
    /// The distinct tokens, each with the node that has it.
    stretches: Arc<Stretches>,
    /// The node of every token, in the order of (token, node): what [`Ring::owners`] walks. Here equal
    /// tokens are all kept, so each node is met at least once on the way round.
    order: Arc<[u32]>,
    /// Per node, which part of the hash space it owns.
    shares: Arc<[f64]>,
}

/// Slim on purpose: with the name inside, a lookup takes twice as long.
#[derive(Clone, Copy)]
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
    let mut bytes = Vec::with_capacity(4 + node.as_bytes().len());
    bytes.extend_from_slice(&vnode.to_le_bytes());
    bytes.extend_from_slice(node.as_bytes());
    xxh3_64(&bytes)
}

impl Ring {
    /// The ring of these nodes. A node given twice counts once.
    ///
    /// For the ring of a view, also of another scope's, give it [`View::ring_nodes`](crate::View::ring_nodes) and that
    /// scope's `vnodes`; the guide [`regions`](crate::guide::regions) shows it at work.
    ///
    /// ```
    /// use muster_router::{Incarnation, NodeId, Peer, Ring, RingConfig, Standing, View};
    /// let member = |name| Peer::new(NodeId::new(name).unwrap(), Incarnation::MIN);
    /// let view = View::new([(member("a"), Standing::Active), (member("b"), Standing::Draining)]);
    /// let ring = Ring::of(view.ring_nodes(), RingConfig { vnodes: 64 });
    /// assert_eq!(ring.router_for("room:42").map(NodeId::as_str), Some("a"), "who drains routes nothing");
    /// ```
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
        let distinct = distinct_tokens(&placed);
        let shares = shares(&distinct, nodes.len());
        let stretches = Arc::new(Stretches::of(&distinct));
        let order = placed.into_iter().map(|(_, node)| node).collect();
        Self { config, nodes: nodes.into(), stretches, order, shares }
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
        self.stretches.token_at_or_after(key_hash(key))
    }
}

/// How many tokens a stretch has at most in the mean, besides the one that follows it.
const STRETCH: usize = 8;

/// The hash space in stretches of equal length, each with a `hashring` of its own: of its tokens and the first one
/// behind it. So a lookup searches among a few tokens, however many nodes there are: what lies far apart in one long
/// table is not fetched step by step.
struct Stretches {
    rings: Box<[HashRing<Token, PrecomputedState>]>,
    /// The first bits of a hash name its stretch; so many are shifted out.
    shift: u32,
}

impl Stretches {
    /// `tokens`: in order, each place once.
    fn of(tokens: &[Token]) -> Self {
        // two at least, so that the shift is less than the width
        let bits = (tokens.len() / STRETCH).max(2).next_power_of_two().trailing_zeros();
        let shift = u64::BITS - bits;
        let mut rest = tokens;
        let rings = (0..1u64 << bits).map(|stretch| {
            let (own, behind) = rest.split_at(rest.partition_point(|token| token.at >> shift == stretch));
            rest = behind;
            // round the end to the lowest token: for the library, too, which then finds nothing at or after a hash
            let next = behind.first().or(tokens.first());
            let mut ring = HashRing::with_hasher(PrecomputedState);
            ring.batch_add(own.iter().chain(next).copied().collect());
            ring
        });
        Self { rings: rings.collect(), shift }
    }

    fn token_at_or_after(&self, hash: u64) -> Option<&Token> {
        self.rings.get(usize::try_from(hash >> self.shift).ok()?)?.get(&HashedKey(hash))
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
fn shares(distinct: &[Token], nodes: usize) -> Arc<[f64]> {
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

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn nodes(names: &[&str]) -> Vec<NodeId> {
        names.iter().map(|name| NodeId::new(name).unwrap()).collect()
    }

    fn keys() -> impl Iterator<Item = Vec<u8>> {
        (0..500u32).map(|index| index.to_le_bytes().to_vec())
    }

    /// Few places for many tokens.
    fn crowded(node: &NodeId, vnode: u32) -> u64 {
        (token_hash(node, vnode) % 7).wrapping_mul(0x2492_4924_9249_2492)
    }

    fn ring(nodes: Vec<NodeId>, vnodes: u32, token: impl Fn(&NodeId, u32) -> u64) -> Ring {
        Ring::with_tokens(nodes, RingConfig { vnodes }, token)
    }

    fn permutations(nodes: &[NodeId]) -> Vec<Vec<NodeId>> {
        let Some((last, rest)) = nodes.split_last() else { return vec![vec![]] };
        let insert = |shorter: Vec<NodeId>| {
            (0..=shorter.len()).map(move |place| {
                let mut longer = shorter.clone();
                longer.insert(place, last.clone());
                longer
            })
        };
        permutations(rest).into_iter().flat_map(insert).collect()
    }

    #[test]
    fn of_equal_tokens_the_lowest_nodes_stays_whatever_the_order() {
        let all = nodes(&["a", "b", "c", "d"]);
        let mut lowest = BTreeMap::new();
        for node in all.iter().rev() {
            lowest.extend((0..5).map(|vnode| (crowded(node, vnode), node.clone())));
        }
        assert!(lowest.len() < 20, "nothing collides");
        for order in permutations(&all) {
            let ring = ring(order, 5, crowded);
            for key in keys() {
                let expected = lowest.range(key_hash(&key)..).next().or_else(|| lowest.first_key_value());
                assert_eq!(ring.router_for(&key), expected.map(|(_, node)| node));
            }
        }
    }

    #[test]
    fn ring_02_remove_with_collision() {
        for order in permutations(&nodes(&["a", "b", "c"])) {
            for token in [crowded, |_: &NodeId, _: u32| 42] {
                let mut left = order.clone();
                while let Some(gone) = left.pop() {
                    let before = ring([left.clone(), vec![gone.clone()]].concat(), 8, token);
                    let after = ring(left.clone(), 8, token);
                    assert_eq!(after.nodes().len(), left.len());
                    for key in keys() {
                        let (was, is) = (before.router_for(&key), after.router_for(&key));
                        assert!(is == was || was == Some(&gone), "{key:?} moved from {was:?} to {is:?}");
                        assert_eq!(is.is_none(), left.is_empty());
                    }
                }
                let back = ring(order.iter().take(1).cloned().collect(), 8, token);
                assert!(keys().all(|key| back.router_for(key) == order.first()));
            }
        }
    }

    #[test]
    fn a_node_that_lost_every_token_is_still_an_owner() {
        let ring = ring(nodes(&["b", "c", "a"]), 4, |_, _| 42);
        assert_eq!(ring.owners("key", 9), ring.nodes().iter().collect::<Vec<_>>());
        assert_eq!(ring.share(&ring.nodes()[0]), 1.0);
        assert_eq!(ring.share(&ring.nodes()[1]), 0.0);
    }

    #[test]
    fn owners_keep_their_order_when_a_node_with_equal_tokens_goes() {
        let all = nodes(&["a", "b", "c", "d"]);
        let before = ring(all.clone(), 5, crowded);
        for gone in &all {
            let after = ring(all.iter().filter(|node| *node != gone).cloned().collect(), 5, crowded);
            for key in keys() {
                let mut owners = before.owners(&key, 4);
                owners.retain(|owner| *owner != gone);
                assert_eq!(owners, after.owners(&key, 4));
            }
        }
    }

    #[test]
    fn shares_are_the_arcs_up_to_each_token() {
        // Tokens at a quarter and at the half: the first owns the rest of the circle too.
        let ring =
            ring(nodes(&["a", "b"]), 1, |node, _| if node.as_str() == "a" { 1 << 62 } else { 1 << 63 });
        assert_eq!(ring.share(&ring.nodes()[0]), 0.75);
        assert_eq!(ring.share(&ring.nodes()[1]), 0.25);
    }

    #[test]
    fn a_key_at_a_token_belongs_to_it() {
        let key = b"key";
        let at = |node: &NodeId, _| key_hash(key).wrapping_add(u64::from(node.as_str() == "b"));
        let ring = ring(nodes(&["a", "b"]), 1, at);
        assert_eq!(ring.router_for(key).map(NodeId::as_str), Some("a"));
        assert_eq!(ring.owners(key, 2), ring.nodes().iter().collect::<Vec<_>>());
    }

    /// A lookup in a stretch against one in the library's ring of all tokens.
    fn same_as_one_ring(ring: &Ring, tokens: &[u64], hashes: impl IntoIterator<Item = u64>) {
        let mut whole = HashRing::with_hasher(PrecomputedState);
        whole.batch_add(tokens.iter().map(|&at| HashedKey(at)).collect());
        let shift = ring.stretches.shift;
        let ends = (0..1u64 << (u64::BITS - shift)).flat_map(|n| [n << shift, (n << shift).wrapping_sub(1)]);
        let near = tokens.iter().flat_map(|at| [at.wrapping_sub(1), *at, at.wrapping_add(1)]);
        for hash in near.chain(ends).chain([0, u64::MAX]).chain(hashes) {
            let found = ring.stretches.token_at_or_after(hash).map(|token| token.at);
            assert_eq!(found, whole.get(&HashedKey(hash)).map(|place| place.0), "{hash:#x}");
        }
    }

    proptest::proptest! {
        #[test]
        fn a_lookup_in_stretches_is_the_librarys_in_one_ring(
            count in 0usize..40, vnodes in 1u32..40, squeeze in 0u32..64, up in proptest::prelude::any::<bool>(),
            hashes in proptest::collection::vec(proptest::prelude::any::<u64>(), 50),
        ) {
            let names: Vec<NodeId> = (0..count).map(|n| NodeId::new(format!("n{n}")).unwrap()).collect();
            // squeezed, all tokens lie at one end of the space, and most stretches have none
            let place = |node: &NodeId, vnode| {
                let at = token_hash(node, vnode) >> squeeze;
                if up { !at } else { at }
            };
            let tokens: std::collections::BTreeSet<u64> =
                names.iter().flat_map(|node| (0..vnodes).map(move |vnode| place(node, vnode))).collect();
            let tokens: Vec<u64> = tokens.into_iter().collect();
            same_as_one_ring(&ring(names, vnodes, place), &tokens, hashes);
        }
    }

    #[test]
    fn the_hasher_hands_our_hashes_through() {
        for hash in [0, 1, u64::MAX] {
            assert_eq!(PrecomputedState.hash_one(HashedKey(hash)), hash);
            assert_eq!(PrecomputedState.hash_one(Token { at: hash, node: 3, position: 9 }), hash);
        }
    }
}
