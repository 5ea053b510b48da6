//! Calls that wait for an answer that comes from elsewhere.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hash, Hasher};

use parking_lot::Mutex;
use tokio::sync::oneshot;

/// Callers by what they wait for. Closed once, it refuses and drops all of them.
pub(crate) struct Waiting<K, V>(Mutex<Option<Map<K, V>>>);

type Map<K, V> = HashMap<K, oneshot::Sender<V>, BuildHasherDefault<Counted>>;

/// For keys that this node has counted up itself: nobody outside chooses them, so mixing their bits is enough.
#[derive(Default)]
struct Counted(u64);

impl Hasher for Counted {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u64(u64::from(*byte));
        }
    }

    fn write_u64(&mut self, number: u64) {
        self.0 = (self.0.rotate_left(5) ^ number).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.0 ^= self.0 >> 32;
    }
}

impl<K: Eq + Hash, V> Waiting<K, V> {
    pub(crate) fn new() -> Self {
        Self(Mutex::new(Some(HashMap::default())))
    }

    /// `None` if it is closed.
    pub(crate) fn wait_for(&self, key: K) -> Option<oneshot::Receiver<V>> {
        let (sender, receiver) = oneshot::channel();
        self.0.lock().as_mut()?.insert(key, sender);
        Some(receiver)
    }

    pub(crate) fn answer(&self, key: &K, value: V) {
        let sender = self.0.lock().as_mut().and_then(|all| all.remove(key));
        if let Some(sender) = sender {
            // nobody waits any more: then nobody need be told
            let _ = sender.send(value);
        }
    }

    pub(crate) fn forget(&self, key: &K) {
        let sender = self.0.lock().as_mut().and_then(|all| all.remove(key));
        drop(sender);
    }

    pub(crate) fn close(&self) {
        let all = self.0.lock().take();
        drop(all);
    }

    pub(crate) fn len(&self) -> usize {
        self.0.lock().as_ref().map_or(0, HashMap::len)
    }
}
