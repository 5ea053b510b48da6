//! The few shared cells of the library. The checker and the shipped library use the same ones, so that
//! what is checked is what ships; they can be cloned, compared and hashed when nobody else holds them.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

#[cfg(not(muster_loom))]
use std::sync::atomic::{AtomicU64, Ordering};

#[cfg(muster_loom)]
use loom::sync::atomic::{AtomicU64, Ordering};

/// A lock that is held for one step: never across an await, never while user code runs.
#[derive(Default)]
pub(crate) struct Lock<T> {
    #[cfg(not(muster_loom))]
    inner: parking_lot::Mutex<T>,
    #[cfg(muster_loom)]
    inner: loom::sync::Mutex<T>,
}

impl<T> Lock<T> {
    pub(crate) fn new(value: T) -> Self {
        Self {
            #[cfg(not(muster_loom))]
            inner: parking_lot::Mutex::new(value),
            #[cfg(muster_loom)]
            inner: loom::sync::Mutex::new(value),
        }
    }

    pub(crate) fn with<R>(&self, step: impl FnOnce(&mut T) -> R) -> R {
        #[cfg(not(muster_loom))]
        return step(&mut self.inner.lock());
        #[cfg(muster_loom)]
        return match self.inner.lock() {
            Ok(mut guard) => step(&mut guard),
            Err(mut poisoned) => step(poisoned.get_mut()),
        };
    }
}

impl<T: Clone> Clone for Lock<T> {
    fn clone(&self) -> Self {
        Self::new(self.with(|value| value.clone()))
    }
}

impl<T: PartialEq> PartialEq for Lock<T> {
    fn eq(&self, other: &Self) -> bool {
        std::ptr::eq(self, other) || self.with(|a| other.with(|b| a == b))
    }
}

impl<T: Eq> Eq for Lock<T> {}

impl<T: Hash> Hash for Lock<T> {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.with(|value| value.hash(state));
    }
}

impl<T: fmt::Debug> fmt::Debug for Lock<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.with(|value| value.fmt(f))
    }
}

/// A value that is replaced whole and read without a lock.
pub(crate) struct Cell<T> {
    #[cfg(not(muster_loom))]
    inner: arc_swap::ArcSwap<T>,
    #[cfg(muster_loom)]
    inner: Lock<Arc<T>>,
}

impl<T> Cell<T> {
    pub(crate) fn new(value: T) -> Self {
        Self {
            #[cfg(not(muster_loom))]
            inner: arc_swap::ArcSwap::from_pointee(value),
            #[cfg(muster_loom)]
            inner: Lock::new(Arc::new(value)),
        }
    }

    /// The value, kept alive for as long as the caller likes.
    pub(crate) fn load(&self) -> Arc<T> {
        #[cfg(not(muster_loom))]
        return self.inner.load_full();
        #[cfg(muster_loom)]
        return self.inner.with(|value| value.clone());
    }

    /// Reads the value without touching its reference count.
    pub(crate) fn read<R>(&self, look: impl FnOnce(&Arc<T>) -> R) -> R {
        #[cfg(not(muster_loom))]
        return look(&self.inner.load());
        #[cfg(muster_loom)]
        return look(&self.load());
    }

    pub(crate) fn store(&self, value: T) {
        #[cfg(not(muster_loom))]
        self.inner.store(Arc::new(value));
        #[cfg(muster_loom)]
        self.inner.with(|cell| *cell = Arc::new(value));
    }
}

impl<T> Clone for Cell<T> {
    fn clone(&self) -> Self {
        Self {
            #[cfg(not(muster_loom))]
            inner: arc_swap::ArcSwap::new(self.load()),
            #[cfg(muster_loom)]
            inner: Lock::new(self.load()),
        }
    }
}

impl<T: PartialEq> PartialEq for Cell<T> {
    fn eq(&self, other: &Self) -> bool {
        let (a, b) = (self.load(), other.load());
        Arc::ptr_eq(&a, &b) || a == b
    }
}

impl<T: Eq> Eq for Cell<T> {}

impl<T: Hash> Hash for Cell<T> {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.load().hash(state);
    }
}

impl<T: fmt::Debug> fmt::Debug for Cell<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.load().fmt(f)
    }
}

/// Counts up from 1; every number is given once.
pub(crate) struct Counter(AtomicU64);

impl Counter {
    pub(crate) fn new() -> Self {
        Self(AtomicU64::new(1))
    }

    pub(crate) fn next(&self) -> u64 {
        self.0.fetch_add(1, Ordering::SeqCst)
    }

    /// The number that `next` would give.
    pub(crate) fn peek(&self) -> u64 {
        self.0.load(Ordering::SeqCst)
    }
}

impl Clone for Counter {
    fn clone(&self) -> Self {
        Self(AtomicU64::new(self.peek()))
    }
}

impl PartialEq for Counter {
    fn eq(&self, other: &Self) -> bool {
        self.peek() == other.peek()
    }
}

impl Eq for Counter {}

impl Hash for Counter {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.peek().hash(state);
    }
}

impl fmt::Debug for Counter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.peek().fmt(f)
    }
}
