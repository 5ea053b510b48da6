//! The ring and the view hash, as a cluster relies on them: the same everywhere, for ever, and changing no
//! more than they must.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::{BTreeMap, BTreeSet};

use muster_router::{
    Group, Incarnation, NameError, NodeId, Peer, Ring, RingConfig, Standing, View, ViewHash, key_hash,
};
use proptest::prelude::*;
use xxhash_rust::xxh3::xxh3_64;

fn node(name: &str) -> NodeId {
    NodeId::new(name).unwrap()
}

fn numbered(count: usize) -> Vec<NodeId> {
    (0..count).map(|index| node(&format!("node-{index}"))).collect()
}

fn peer(name: &str, incarnation: u64) -> Peer {
    Peer::new(node(name), Incarnation::new(incarnation).unwrap())
}

fn keys(count: usize) -> impl Iterator<Item = String> {
    (0..count).map(|index| format!("room:{index}"))
}

fn bytes_of(hex: &str) -> Vec<u8> {
    hex.as_bytes()
        .chunks(2)
        .map(|pair| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap())
        .collect()
}

fn hash_of(hex: &str) -> u64 {
    u64::from_str_radix(hex, 16).unwrap()
}

/// Every token, by the documented bytes and nothing of the library: place -> lowest node.
fn naive_tokens(nodes: &[NodeId], vnodes: u32) -> BTreeMap<u64, NodeId> {
    let mut tokens = BTreeMap::<u64, NodeId>::new();
    for node in nodes {
        for vnode in 0..vnodes {
            let bytes = [&vnode.to_le_bytes(), node.as_bytes()].concat();
            let lowest = tokens.entry(xxh3_64(&bytes)).or_insert_with(|| node.clone());
            if node < lowest {
                *lowest = node.clone();
            }
        }
    }
    tokens
}

fn naive_router<'t>(tokens: &'t BTreeMap<u64, NodeId>, key: &[u8]) -> Option<&'t NodeId> {
    tokens.range(xxh3_64(key)..).next().or_else(|| tokens.first_key_value()).map(|(_, node)| node)
}

// Golden vectors.

struct GoldenKey {
    key: Vec<u8>,
    hash: u64,
    routers: [NodeId; 3],
}

fn golden_keys() -> Vec<GoldenKey> {
    let lines = include_str!("golden/ring.txt").lines().filter(|line| !line.starts_with('#'));
    lines
        .map(|line| {
            let [key, hash, one, three, sixteen] = line.split(' ').collect::<Vec<_>>().try_into().unwrap();
            GoldenKey { key: bytes_of(key), hash: hash_of(hash), routers: [one, three, sixteen].map(node) }
        })
        .collect()
}

fn golden_members() -> [Vec<NodeId>; 3] {
    [vec![node("solo")], ["a", "b", "c"].map(node).to_vec(), numbered(16)]
}

#[test]
fn ring_07_golden_keys_have_their_hash_and_their_router() {
    let golden = golden_keys();
    assert_eq!(golden.len(), 1000);
    let rings = golden_members().map(|nodes| Ring::of(nodes, RingConfig::default()));
    for GoldenKey { key, hash, routers } in &golden {
        assert_eq!(key_hash(key), *hash, "{key:02x?}");
        for (ring, router) in rings.iter().zip(routers) {
            assert_eq!(ring.router_for(key), Some(router), "{key:02x?} on {ring:?}");
        }
    }
}

#[test]
fn ring_07_golden_keys_follow_from_the_documented_bytes() {
    for (nodes, column) in golden_members().iter().zip(0..) {
        let tokens = naive_tokens(nodes, 128);
        for golden in golden_keys() {
            let router: &NodeId = &golden.routers[column];
            assert_eq!(naive_router(&tokens, &golden.key), Some(router));
        }
    }
}

struct GoldenView {
    ring: RingConfig,
    view: View,
    bytes: Vec<u8>,
    hash: u64,
}

fn golden_views() -> Vec<GoldenView> {
    let lines = include_str!("golden/view.txt").lines().filter(|line| !line.starts_with('#'));
    lines
        .map(|line| {
            let [vnodes, members, bytes, hash] = line.split(' ').collect::<Vec<_>>().try_into().unwrap();
            let ring = RingConfig { vnodes: vnodes.parse().unwrap() };
            let view = View::new(members.split(',').map(golden_member));
            GoldenView { ring, view, bytes: bytes_of(bytes), hash: hash_of(hash) }
        })
        .collect()
}

fn golden_member(text: &str) -> (Peer, Standing) {
    let (text, standing) = match text.strip_suffix('!') {
        Some(text) => (text, Standing::Draining),
        None => (text, Standing::Active),
    };
    let (name, incarnation) = text.split_once('#').unwrap();
    (peer(name, incarnation.parse().unwrap()), standing)
}

#[test]
fn ring_07_golden_views_have_their_hash() {
    let golden = golden_views();
    assert_eq!(golden.len(), 32);
    for GoldenView { ring, view, hash, .. } in &golden {
        assert_eq!(view.hash(ring).get(), *hash, "{view} on {ring:?}");
        assert_eq!(ViewHash::of(view, ring), ViewHash::from_raw(*hash));
    }
    let distinct: BTreeSet<u64> = golden.iter().map(|golden| golden.hash).collect();
    assert_eq!(distinct.len(), golden.len());
}

#[test]
fn ring_07_golden_views_follow_from_the_documented_bytes() {
    for GoldenView { ring, view, bytes, hash } in golden_views() {
        let mut expected = ring.vnodes.to_le_bytes().to_vec();
        expected.extend(u32::try_from(view.len()).unwrap().to_le_bytes());
        for (peer, standing) in view.iter() {
            expected.extend(u32::try_from(peer.node.as_bytes().len()).unwrap().to_le_bytes());
            expected.extend(peer.node.as_bytes());
            expected.extend(peer.incarnation.get().to_le_bytes());
            expected.push(u8::from(standing == Standing::Draining));
        }
        assert_eq!(bytes, expected);
        assert_eq!(xxh3_64(&bytes), hash);
    }
}

// The ring.

#[test]
fn an_empty_ring_has_no_answer() {
    let ring = Ring::of([], RingConfig::default());
    assert!(ring.is_empty());
    assert_eq!(ring.router_for("key"), None);
    assert_eq!(ring.router_index("key"), None);
    assert_eq!(ring.owners("key", 3), Vec::<&NodeId>::new());
    assert_eq!(ring.share(&node("a")), 0.0);
}

#[test]
fn rings_of_1_to_1000_nodes_route_by_the_documented_rule() {
    for count in [1, 2, 3, 7, 50, 300, 1000] {
        let nodes = numbered(count);
        let ring = Ring::of(nodes.clone(), RingConfig::default());
        let tokens = naive_tokens(&nodes, 128);
        for key in keys(500) {
            let router = ring.router_for(&key);
            assert_eq!(router, naive_router(&tokens, key.as_bytes()), "{key} on {count} nodes");
            let index = ring.router_index(&key).unwrap();
            assert_eq!(ring.nodes().get(index), router);
        }
        let shares: f64 = nodes.iter().map(|node| ring.share(node)).sum();
        assert!((shares - 1.0).abs() < 1e-9, "shares of {count} nodes add up to {shares}");
    }
}

#[test]
fn keys_at_a_token_and_next_to_it_go_to_it_and_past_it() {
    // The key is found, not made up: the first of many whose hash lies past the last token wraps round.
    let nodes = numbered(2);
    let config = RingConfig { vnodes: 1 };
    let ring = Ring::of(nodes.clone(), config);
    let tokens = naive_tokens(&nodes, 1);
    let (first, first_node) = tokens.first_key_value().unwrap();
    let (last, last_node) = tokens.last_key_value().unwrap();
    let routed = |wanted: &dyn Fn(u64) -> bool| {
        let key = keys(100_000).find(|key| wanted(key_hash(key.as_bytes()))).unwrap();
        ring.router_for(key).unwrap()
    };
    assert_eq!(routed(&|hash| hash < *first), first_node);
    assert_eq!(routed(&|hash| hash > *first && hash < *last), last_node);
    assert_eq!(routed(&|hash| hash > *last), first_node);
}

#[test]
fn a_number_of_tokens_outside_the_range_is_brought_into_it() {
    let ring = |vnodes| Ring::of(numbered(2), RingConfig { vnodes });
    assert_eq!(ring(0), ring(RingConfig::MIN_VNODES));
    assert_eq!(ring(0).config().vnodes, 1);
    assert_eq!(ring(u32::MAX), ring(RingConfig::MAX_VNODES));
    let view = View::alone(peer("a", 1));
    assert_eq!(view.hash(&RingConfig { vnodes: 0 }), view.hash(&RingConfig { vnodes: 1 }));
}

#[test]
fn ring_03_empty_node_name() {
    assert_eq!(NodeId::new(""), Err(NameError::NodeIdLength { given: 0 }));
    assert_eq!(NodeId::new("x".repeat(64 << 10)), Err(NameError::NodeIdLength { given: 64 << 10 }));
    let odd = [node("\0"), node(&"x".repeat(255)), node("a")];
    let all = Ring::of(odd.clone(), RingConfig::default());
    for removed in &odd {
        assert!(keys(1000).any(|key| all.router_for(key) == Some(removed)));
        let left = Ring::of(odd.iter().filter(|node| *node != removed).cloned(), RingConfig::default());
        assert!(keys(1000).all(|key| left.router_for(key) != Some(removed)));
    }
}

#[test]
fn ring_04_fewer_replicas_than_asked() {
    for count in 1..=8 {
        for vnodes in [1, 2, 5, 16, 64, 256] {
            let ring = Ring::of(numbered(count), RingConfig { vnodes });
            for (index, key) in keys(10_000).enumerate() {
                let all = ring.owners(&key, count + 3);
                assert_eq!(all.len(), count);
                assert_eq!(all.first().copied(), ring.router_for(&key));
                assert!(
                    all.iter().enumerate().all(|(place, owner)| !all[..place].contains(owner)),
                    "{all:?}"
                );
                if index % 50 == 0 {
                    assert!((0..=count + 3).all(|n| ring.owners(&key, n) == all[..n.min(count)]));
                }
            }
        }
    }
}

#[test]
fn owners_of_more_nodes_than_there_are_do_not_overflow() {
    let ring = Ring::of(numbered(3), RingConfig::default());
    assert_eq!(ring.owners("key", usize::MAX).len(), 3);
    assert_eq!(ring.owners("key", 0).len(), 0);
}

#[test]
fn ring_06_uneven_few_vnodes() {
    const MAX_OVER_MEAN: f64 = 1.3;
    const KEYS: usize = 1_000_000;
    let hashed: Vec<[u8; 8]> = (0..KEYS as u64).map(u64::to_le_bytes).collect();
    for count in [3, 5, 10, 50] {
        let ring = Ring::of(numbered(count), RingConfig::default());
        let mut load = vec![0usize; count];
        for key in &hashed {
            load[ring.router_index(key).unwrap()] += 1;
        }
        let mean = KEYS as f64 / count as f64;
        let highest = *load.iter().max().unwrap() as f64 / mean;
        assert!(highest < MAX_OVER_MEAN, "{count} nodes: the busiest has {highest:.3} of the mean");
        for (node, load) in ring.nodes().iter().zip(&load) {
            let (measured, told) = (*load as f64 / KEYS as f64, ring.share(node));
            assert!((measured - told).abs() < 0.003, "{node} has {measured} of the keys, share says {told}");
        }
    }
}

/// The farthest that the share of one of 16 nodes is from an even one, as a part of it.
fn worst_of_sixteen(name: impl Fn(usize) -> String) -> f64 {
    let nodes: Vec<NodeId> = (0..16).map(|index| node(&name(index))).collect();
    let ring = Ring::of(nodes.clone(), RingConfig::default());
    nodes.iter().map(|node| (ring.share(node) * 16.0 - 1.0).abs()).fold(0.0, f64::max)
}

#[test]
fn sixteen_nodes_have_their_share_within_a_quarter_of_even() {
    for family in ["node-", "node_", "node", "chat-", "server-", "n", ""] {
        let worst = worst_of_sixteen(|index| format!("{family}{index}"));
        assert!(worst <= 0.25, "{family}0 to {family}15: {worst:.3} from even");
    }
}

#[test]
fn names_of_any_kind_spread_as_random_tokens_would() {
    // Random tokens leave 93 of 100 rings within a quarter of even. Names that differ in one byte must not
    // do worse, which is what a weak hash would show first.
    let worst: Vec<f64> =
        (0..100).map(|subnet| worst_of_sixteen(|index| format!("10.0.{subnet}.{index}:7000"))).collect();
    let within = worst.iter().filter(|worst| **worst <= 0.25).count();
    assert!(within >= 85, "only {within} of 100 rings are within a quarter of even");
    assert!(worst.iter().all(|worst| *worst <= 0.5), "{worst:?}");
}

#[test]
fn ring_10_two_placements() {
    let view = View::new(numbered(9).into_iter().map(|node| {
        (
            Peer::new(node.clone(), Incarnation::MIN),
            if node.as_str() < "node-3" { Standing::Draining } else { Standing::Active },
        )
    }));
    let config = RingConfig::default();
    let here = Ring::of(view.ring_nodes(), config);
    assert_eq!(here.nodes().len(), 6);
    let sent: View = postcard::from_bytes(&postcard::to_stdvec(&view).unwrap()).unwrap();
    let there = Ring::of(sent.ring_nodes().into_iter().rev(), config);
    assert_eq!(here, there);
    for key in keys(2000) {
        let router = here.router_for(&key).unwrap();
        assert_eq!(here.router_index(&key).map(|index| &here.nodes()[index]), Some(router));
        assert_eq!(here.owners(&key, 1), [router]);
        assert_eq!(here.owners(&key, 3), there.owners(&key, 3));
        assert_eq!(here.owners(&key, 3)[0], router);
        assert_eq!(here.clone().router_for(Group::from(&key)), Some(router));
    }
}

#[test]
fn hazard_29_text_and_bytes_are_one_key() {
    let ring = Ring::of(numbered(16), RingConfig::default());
    for key in keys(200) {
        let router = ring.router_for(&key);
        assert_eq!(ring.router_for(key.as_bytes()), router);
        assert_eq!(ring.router_for(key.clone().into_bytes()), router);
        assert_eq!(ring.router_for(Group::from(key)), router);
    }
}

fn names() -> impl Strategy<Value = BTreeSet<String>> {
    proptest::collection::btree_set("[a-z0-9é.-]{1,12}", 1..12)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn a_new_node_takes_keys_and_moves_no_other(names in names(), newcomer in "[A-Z]{1,12}", vnodes in 1u32..40) {
        let config = RingConfig { vnodes };
        let nodes: Vec<NodeId> = names.iter().map(|name| node(name)).collect();
        let newcomer = node(&newcomer);
        let small = Ring::of(nodes.clone(), config);
        let large = Ring::of(nodes.iter().cloned().chain([newcomer.clone()]), config);
        for key in keys(200) {
            let (before, after) = (small.router_for(&key), large.router_for(&key));
            prop_assert!(after == before || after == Some(&newcomer));
            // The replicas too: without the newcomer the order of all owners is the old one.
            let mut owners = large.owners(&key, usize::MAX);
            owners.retain(|owner| **owner != newcomer);
            prop_assert_eq!(owners, small.owners(&key, usize::MAX));
        }
        for node in &nodes {
            prop_assert!(large.share(node) <= small.share(node));
        }
    }

    #[test]
    fn the_order_of_the_nodes_and_repeats_make_no_difference(names in names(), turn in 0usize..12) {
        let mut nodes: Vec<NodeId> = names.iter().map(|name| node(name)).collect();
        let ring = Ring::of(nodes.clone(), RingConfig { vnodes: 16 });
        let count = nodes.len();
        nodes.rotate_left(turn % count);
        nodes.push(nodes[0].clone());
        let other = Ring::of(nodes, RingConfig { vnodes: 16 });
        prop_assert_eq!(&ring, &other);
        prop_assert_eq!(ring.nodes(), other.nodes());
        for key in keys(50) {
            prop_assert_eq!(ring.owners(&key, count), other.owners(&key, count));
        }
    }
}

// The view.

fn members() -> impl Strategy<Value = Vec<(Peer, Standing)>> {
    let standing = prop_oneof![Just(Standing::Active), Just(Standing::Draining)];
    let member =
        ("[a-e]{1,2}", 1u64..4, standing).prop_map(|(name, life, standing)| (peer(&name, life), standing));
    proptest::collection::vec(member, 0..12)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn a_view_is_sorted_and_has_one_life_of_a_node(members in members()) {
        let view = View::new(members.clone());
        prop_assert!(view.peers().zip(view.peers().skip(1)).all(|(one, next)| one.node < next.node));
        prop_assert_eq!(view.len(), view.iter().count());
        for (peer, standing) in &members {
            let kept = view.peer_of(&peer.node).unwrap();
            prop_assert!((kept.incarnation, view.standing(kept).unwrap()) >= (peer.incarnation, *standing));
            prop_assert_eq!(view.contains(peer), kept == peer);
        }
        for (peer, standing) in view.iter() {
            prop_assert!(members.contains(&(peer.clone(), standing)));
        }
        prop_assert_eq!(&View::new(members.into_iter().rev()), &view);
    }

    #[test]
    fn views_are_equal_exactly_when_their_hashes_are(one in members(), other in members()) {
        let (one, other) = (View::new(one), View::new(other));
        let config = RingConfig::default();
        prop_assert_eq!(one == other, one.hash(&config) == other.hash(&config));
        prop_assert_ne!(one.hash(&config), ViewHash::UNSETTLED);
        prop_assert_ne!(one.hash(&config), one.hash(&RingConfig { vnodes: 127 }));
    }

    #[test]
    fn a_view_survives_the_wire(members in members()) {
        let view = View::new(members);
        let packed = postcard::to_stdvec(&view).unwrap();
        prop_assert_eq!(&postcard::from_bytes::<View>(&packed).unwrap(), &view);
        let text = serde_json::to_string(&view).unwrap();
        prop_assert_eq!(&serde_json::from_str::<View>(&text).unwrap(), &view);
    }

    #[test]
    fn no_bytes_make_a_view_that_breaks_its_rules(bytes in proptest::collection::vec(any::<u8>(), 0..64)) {
        if let Ok(view) = postcard::from_bytes::<View>(&bytes) {
            prop_assert!(view.peers().zip(view.peers().skip(1)).all(|(one, next)| one.node < next.node));
        }
    }
}

#[test]
fn a_decoded_view_is_sorted_and_names_no_node_twice() {
    let member = |name: &str, life: u64| format!(r#"[{{"node":"{name}","incarnation":{life}}},"active"]"#);
    let view: View = serde_json::from_str(&format!("[{},{}]", member("b", 1), member("a", 1))).unwrap();
    assert_eq!(view.to_string(), "{a#1, b#1}");
    let twice = serde_json::from_str::<View>(&format!("[{},{}]", member("a", 1), member("a", 2)));
    assert!(twice.unwrap_err().to_string().contains("2 members name 1 nodes"));
    assert!(serde_json::from_str::<View>(&format!("[{}]", member("a", 0))).is_err());
    assert!(serde_json::from_str::<View>(&format!("[{}]", member("", 1))).is_err());
}

#[test]
fn ring_09_readd_updates_node() {
    let config = RingConfig::default();
    let old = View::new([(peer("a", 1), Standing::Active), (peer("b", 1), Standing::Active)]);
    let readded = View::new(
        old.iter()
            .map(|(peer, standing)| (peer.clone(), standing))
            .chain([(peer("b", 2), Standing::Active), (peer("b", 2), Standing::Active)]),
    );
    assert_eq!(readded.to_string(), "{a#1, b#2}");
    assert_eq!(readded.peer_of(&node("b")), Some(&peer("b", 2)));
    assert!(!readded.contains(&peer("b", 1)));
    assert_eq!(readded.standing(&peer("b", 1)), None);
    assert_ne!(readded.hash(&config), old.hash(&config));
    // A new life has the tokens of the old one, once.
    let ring = Ring::of(readded.ring_nodes(), config);
    assert_eq!(ring, Ring::of(old.ring_nodes(), config));
    assert_eq!(ring.owners("key", 5).len(), 2);
    // Its standing is its own, not the old life's; within one life a drain stays.
    let drained = View::new([(peer("b", 1), Standing::Draining), (peer("b", 2), Standing::Active)]);
    assert_eq!(drained.standing(&peer("b", 2)), Some(Standing::Active));
    let drained = View::new([(peer("b", 2), Standing::Draining), (peer("b", 2), Standing::Active)]);
    assert_eq!(drained.standing(&peer("b", 2)), Some(Standing::Draining));
}

#[test]
fn hazard_23_nodes_with_different_ring_parameters_never_agree() {
    let view = View::alone(peer("a", 1));
    let hashes: BTreeSet<ViewHash> = (1..=256).map(|vnodes| view.hash(&RingConfig { vnodes })).collect();
    assert_eq!(hashes.len(), 256);
}

#[test]
fn draining_members_own_no_tokens_unless_all_drain() {
    let members = |a, b| View::new([(peer("a", 1), a), (peer("b", 1), b)]);
    let (active, draining) = (Standing::Active, Standing::Draining);
    assert_eq!(members(active, active).ring_nodes(), [node("a"), node("b")]);
    assert_eq!(members(draining, active).ring_nodes(), [node("b")]);
    assert_eq!(members(draining, draining).ring_nodes(), [node("a"), node("b")]);
    assert_eq!(members(draining, active).to_string(), "{a#1 draining, b#1}");
    let hashes = [
        members(active, active),
        members(draining, active),
        members(active, draining),
        members(draining, draining),
    ]
    .map(|view| view.hash(&RingConfig::default()));
    assert_eq!(BTreeSet::from(hashes).len(), 4);
    assert_eq!(View::new([]).ring_nodes(), Vec::<NodeId>::new());
}

#[test]
fn a_view_hash_reads_as_hex() {
    assert_eq!(ViewHash::from_raw(0xab).to_string(), "00000000000000ab");
    assert_eq!(ViewHash::UNSETTLED.get(), 0);
    assert_eq!(serde_json::to_string(&ViewHash::from_raw(7)).unwrap(), "7");
}
