//! A session as a small value that travels: in a cookie, a header, a message.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::session::Remembered;
use crate::cache::{CacheError, Epoch, PartitionId, Version};
use crate::types::Peer;

/// The form of tokens that this release writes, and the only one that it reads.
const FORM: u8 = 1;
/// The longest token, in bytes before it becomes text.
const MAX_BYTES: usize = 1 << 20;
/// The most partitions of a cache.
const MAX_PARTITIONS: usize = 65_536;

/// The last writes of a [`Session`](super::Session), by partition. As text ([`fmt::Display`], [`FromStr`], serde) it has
/// only letters, digits, `-` and `_`. Reading one never panics and never holds more than a small multiple of its length;
/// whether it is of a cache, [`Cache::session_from`](super::Cache::session_from) says.
///
/// It is not signed: who changes it changes what its own reads wait for, and no more.
///
/// ```
/// use muster_router::cache::SessionToken;
/// assert!("no token".parse::<SessionToken>().is_err());
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SessionToken {
    cache: String,
    versions: BTreeMap<PartitionId, Vec<Version>>,
}

/// What is written after the form: peers once, each with the lowest counter of its epochs, for these begin from the
/// clock and have long numbers; writes with the place of their primary among them, and how far their epoch is above.
#[derive(Serialize, Deserialize)]
struct Body {
    cache: String,
    peers: Vec<(Peer, u64)>,
    writes: Vec<Write>,
}

#[derive(Serialize, Deserialize)]
struct Write {
    partition: PartitionId,
    above: u64,
    primary: u32,
    seq: u64,
}

fn refused(reason: &str) -> CacheError {
    CacheError::Token { reason: reason.into() }
}

impl SessionToken {
    pub(super) fn new(cache: &str, versions: BTreeMap<PartitionId, Vec<Version>>) -> Self {
        Self { cache: cache.into(), versions }
    }

    /// The name of its cache.
    pub fn cache(&self) -> &str {
        &self.cache
    }

    /// The last writes to each partition, rising, one of each epoch.
    pub fn versions(&self) -> &BTreeMap<PartitionId, Vec<Version>> {
        &self.versions
    }

    /// As bytes, for those who carry bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut lowest: BTreeMap<&Peer, u64> = BTreeMap::new();
        for Version { epoch, .. } in self.versions.values().flatten() {
            let counter = lowest.entry(&epoch.primary).or_insert(epoch.counter);
            *counter = epoch.counter.min(*counter);
        }
        let peers: Vec<(Peer, u64)> =
            lowest.into_iter().map(|(peer, counter)| (peer.clone(), counter)).collect();
        let write = |(partition, version): (&PartitionId, &Version)| {
            let Epoch { primary, counter } = &version.epoch;
            let place = peers.binary_search_by(|(peer, _)| peer.cmp(primary)).unwrap_or_default();
            let above = counter - peers.get(place).map_or(0, |(_, lowest)| *lowest);
            Write { partition: *partition, above, primary: place as u32, seq: version.seq }
        };
        let all = self
            .versions
            .iter()
            .flat_map(|(partition, versions)| versions.iter().map(move |v| (partition, v)));
        let writes = all.map(write).collect();
        let body = Body { cache: self.cache.clone(), peers, writes };
        // text and numbers always have an encoding
        postcard::to_extend(&body, vec![FORM]).unwrap_or_default()
    }

    /// From [`SessionToken::encode`].
    ///
    /// # Errors
    /// [`CacheError::Token`] for what is none.
    pub fn decode(bytes: &[u8]) -> Result<Self, CacheError> {
        if bytes.len() > MAX_BYTES {
            return Err(refused("it is too long"));
        }
        let body = match bytes.split_first() {
            Some((&FORM, body)) => body,
            Some((form, _)) => {
                return Err(CacheError::Token { reason: format!("it has the unknown form {form}") });
            }
            None => return Err(refused("it is empty")),
        };
        let Ok((Body { cache, peers, writes }, [])) = postcard::take_from_bytes::<Body>(body) else {
            return Err(refused("it is malformed"));
        };
        if cache.is_empty() || cache.len() > 255 || writes.len() > MAX_PARTITIONS * Remembered::EPOCHS {
            return Err(refused("it is malformed"));
        }
        let mut versions: BTreeMap<PartitionId, Vec<Version>> = BTreeMap::new();
        for Write { partition, above, primary, seq } in writes {
            let (primary, lowest) =
                peers.get(primary as usize).ok_or_else(|| refused("it names a node that it has not"))?;
            let counter = lowest.checked_add(above).ok_or_else(|| refused("it is malformed"))?;
            let version = Version::new(Epoch::new(counter, primary.clone()), seq);
            let rises = versions.last_key_value().is_none_or(|(last, of)| {
                let more =
                    of.len() < Remembered::EPOCHS && of.last().map(|v| &v.epoch) < Some(&version.epoch);
                *last < partition || (*last == partition && more)
            });
            if !rises {
                return Err(refused("its partitions or epochs do not rise"));
            }
            versions.entry(partition).or_default().push(version);
        }
        Ok(Self { cache, versions })
    }
}

const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";

/// Base64 for URLs, without padding.
impl fmt::Display for SessionToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = String::new();
        for three in self.encode().chunks(3) {
            let bits =
                three.iter().fold(0u32, |bits, byte| bits << 8 | u32::from(*byte)) << (8 * (3 - three.len()));
            for place in 0..=three.len() {
                let digit = (bits >> (18 - 6 * place)) & 63;
                text.extend(DIGITS.get(digit as usize).map(|digit| char::from(*digit)));
            }
        }
        f.write_str(&text)
    }
}

impl FromStr for SessionToken {
    type Err = CacheError;

    fn from_str(text: &str) -> Result<Self, CacheError> {
        if text.len() > MAX_BYTES.div_ceil(3) * 4 {
            return Err(refused("it is too long"));
        }
        let mut bytes = Vec::with_capacity(text.len() / 4 * 3 + 2);
        for four in text.as_bytes().chunks(4) {
            let mut bits = 0u32;
            for digit in four {
                let place = DIGITS.iter().position(|known| known == digit);
                bits =
                    bits << 6 | place.ok_or_else(|| refused("it has a character that no token has"))? as u32;
            }
            bits <<= 6 * (4 - four.len());
            let [_, a, b, c] = bits.to_be_bytes();
            let (kept, rest) = match four.len() {
                4 => ([a, b, c].to_vec(), 0),
                3 => (vec![a, b], c),
                2 => (vec![a], b | c),
                _ => return Err(refused("it is cut off")),
            };
            // one token has one text
            if rest != 0 {
                return Err(refused("it is malformed"));
            }
            bytes.extend(kept);
        }
        Self::decode(&bytes)
    }
}

impl Serialize for SessionToken {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for SessionToken {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::{Incarnation, NodeId};
    use proptest::prelude::*;

    fn token(writes: &[(u32, u64, &str, u64)]) -> SessionToken {
        let version = |counter, node: &str, seq| {
            let primary = Peer::new(NodeId::new(node).unwrap(), Incarnation::MIN);
            Version::new(Epoch::new(counter, primary), seq)
        };
        let mut versions: BTreeMap<PartitionId, Vec<Version>> = BTreeMap::new();
        for (id, counter, node, seq) in writes {
            versions.entry(PartitionId::new(*id)).or_default().push(version(*counter, node, *seq));
        }
        SessionToken::new("users", versions)
    }

    #[test]
    fn a_token_comes_back_as_text_as_bytes_and_through_serde() {
        for token in [
            token(&[]),
            token(&[(0, 1, "a", 1)]),
            token(&[(0, 1, "a", 9), (0, 1, "b", 1), (0, 2, "a", 3), (0, 7, "a", 3), (1, 1, "a", 1)]),
            token(&[(3, 9, "b", 300), (200, u64::MAX, "a", u64::MAX), (65_535, 1, "b", 0)]),
        ] {
            let text = token.to_string();
            assert!(text.bytes().all(|byte| DIGITS.contains(&byte)), "{text}");
            assert_eq!(text.parse::<SessionToken>().unwrap(), token);
            assert_eq!(SessionToken::decode(&token.encode()).unwrap(), token);
            let json = serde_json::to_string(&token).unwrap();
            assert_eq!(serde_json::from_str::<SessionToken>(&json).unwrap(), token);
        }
    }

    /// Tokens are kept by browsers while servers are replaced: a change here needs another form.
    #[test]
    fn golden_token() {
        let text = "AQV1c2VycwEBYQEBAgMIAKwCCAAAAg";
        assert_eq!(token(&[(3, 9, "a", 300), (8, 1, "a", 2)]).to_string(), text);
    }

    #[test]
    fn a_token_of_many_writes_stays_small() {
        // epochs that begin from a clock, within some seconds
        let counter = |id| 1_800_000_000_000_000 + u64::from(id) * 9_000;
        let write = |id| (id, counter(id), ["shop-1", "shop-2"][id as usize % 2], 100_000);
        let length = token(&(0..256).map(write).collect::<Vec<_>>()).to_string().len();
        assert!(length < 3300, "{length} bytes do not fit a cookie with others");
        // the largest that a cache can have is read again
        let large = token(&(0..65_536).map(write).collect::<Vec<_>>());
        assert_eq!(large.to_string().parse::<SessionToken>().unwrap(), large);
    }

    #[test]
    fn what_is_no_token_is_refused_by_name() {
        let reason = |text: &str| text.parse::<SessionToken>().unwrap_err().to_string();
        assert!(reason("").contains("empty"));
        assert!(reason("A").contains("cut off"));
        assert!(reason("Ag").contains("unknown form 2"));
        assert!(reason("AQ").contains("malformed"));
        assert!(reason("AQ==").contains("character"));
        assert!(reason("AR").contains("malformed"), "bits that no text has");
        let bytes = token(&[(3, 9, "a", 300)]).encode();
        for end in 0..bytes.len() {
            assert!(SessionToken::decode(&bytes[..end]).is_err(), "cut at {end}");
        }
        assert!(SessionToken::decode(&[&bytes[..], &[0]].concat()).is_err());
        let twice = Body {
            cache: "users".into(),
            peers: vec![(Peer::new(NodeId::new("a").unwrap(), Incarnation::MIN), 0)],
            writes: [3, 3]
                .map(|id| Write { partition: PartitionId::new(id), above: 1, primary: 0, seq: 1 })
                .into(),
        };
        let bytes = postcard::to_extend(&twice, vec![FORM]).unwrap();
        assert!(SessionToken::decode(&bytes).unwrap_err().to_string().contains("do not rise"));
        let stranger = Body { peers: vec![], ..twice };
        let bytes = postcard::to_extend(&stranger, vec![FORM]).unwrap();
        assert!(SessionToken::decode(&bytes).unwrap_err().to_string().contains("names a node"));
        let peers = vec![(Peer::new(NodeId::new("a").unwrap(), Incarnation::MIN), u64::MAX)];
        let bytes = postcard::to_extend(&Body { peers, ..stranger }, vec![FORM]).unwrap();
        assert!(SessionToken::decode(&bytes).unwrap_err().to_string().contains("malformed"));
    }

    proptest! {
        #[test]
        fn hostile_text_never_panics(text in "[A-Za-z0-9_-]{0,80}|\\PC{0,20}") {
            let _ = text.parse::<SessionToken>();
        }

        #[test]
        fn a_changed_byte_never_panics(at in any::<prop::sample::Index>(), byte in any::<u8>()) {
            let mut bytes = token(&[(3, 9, "b", 300), (200, 7, "a", 1)]).encode();
            let at = at.index(bytes.len());
            bytes[at] = byte;
            if let Ok(token) = SessionToken::decode(&bytes) {
                prop_assert_eq!(SessionToken::decode(&token.encode()).unwrap(), token);
            }
        }
    }
}
