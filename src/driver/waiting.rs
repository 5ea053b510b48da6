//! Calls that wait for an answer that comes from elsewhere.

use std::collections::HashMap;
use std::hash::Hash;

use parking_lot::Mutex;
use tokio::sync::oneshot;

/// Callers by what they wait for. Closed once, it refuses and drops all of them.
pub(crate) struct Waiting<K, V>(Mutex<Option<HashMap<K, oneshot::Sender<V>>>>);

impl<K: Eq + Hash, V> Waiting<K, V> {
    pub(crate) fn new() -> Self {
        Self(Mutex::new(Some(HashMap::new())))
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
