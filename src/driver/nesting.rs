//! Broadcasts from inside a delivery: queued by thread, run by the outermost call, so that a subscriber that
//! broadcasts cannot recurse.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;

/// A queued broadcast; it is told whether it may run at once.
type Later = Box<dyn FnOnce(bool)>;

thread_local! {
    static INSIDE: Cell<bool> = const { Cell::new(false) };
    static RUNNING: Cell<bool> = const { Cell::new(false) };
    static QUEUE: RefCell<VecDeque<Later>> = const { RefCell::new(VecDeque::new()) };
}

/// How many queued broadcasts the outermost call runs itself; the rest goes to the scope's own task, so that
/// subscribers that answer each other for ever do not keep this thread for themselves.
const RUN_AT_ONCE: usize = 64;

struct Restore(&'static std::thread::LocalKey<Cell<bool>>, bool);

impl Restore {
    fn set(key: &'static std::thread::LocalKey<Cell<bool>>) -> Self {
        Self(key, key.try_with(|flag| flag.replace(true)).unwrap_or(true))
    }
}

impl Drop for Restore {
    fn drop(&mut self) {
        let _ = self.0.try_with(|flag| flag.set(self.1));
    }
}

/// Runs a delivery.
pub(crate) fn inside<R>(deliver: impl FnOnce() -> R) -> R {
    let _restore = Restore::set(&INSIDE);
    deliver()
}

/// Whether this thread is in a delivery now.
pub(crate) fn is_inside() -> bool {
    INSIDE.try_with(Cell::get).unwrap_or(false)
}

/// Keeps `later` for the outermost call, which says whether it may run at once (or must be passed on).
pub(crate) fn queue(later: impl FnOnce(bool) + 'static) {
    let later = Box::new(later);
    let _ = QUEUE.try_with(|queue| queue.borrow_mut().push_back(later));
}

/// Runs what deliveries have queued, unless this call is itself inside one.
pub(crate) fn run_queued() {
    if is_inside() || RUNNING.try_with(Cell::get).unwrap_or(true) {
        return;
    }
    let mut count = 0;
    let mut restore = None;
    // the borrow ends before the broadcast runs: what runs may queue more
    while let Some(later) = QUEUE.try_with(|queue| queue.borrow_mut().pop_front()).ok().flatten() {
        restore.get_or_insert_with(|| Restore::set(&RUNNING));
        later(count < RUN_AT_ONCE);
        count += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::rc::Rc;

    #[test]
    fn what_runs_may_queue_more_and_nothing_recurses() {
        fn step(left: u32, depth: Rc<Cell<u32>>, deepest: Rc<Cell<u32>>, passed_on: Rc<Cell<u32>>) {
            depth.set(depth.get() + 1);
            deepest.set(deepest.get().max(depth.get()));
            inside(|| {
                if left > 0 {
                    let (d, m, p) = (depth.clone(), deepest.clone(), passed_on.clone());
                    queue(move |now| if now { step(left - 1, d, m, p) } else { p.set(p.get() + 1) });
                }
                run_queued(); // inside: nothing runs
            });
            run_queued();
            depth.set(depth.get() - 1);
        }
        let cells = || Rc::new(Cell::new(0));
        let (depth, deepest, passed_on) = (cells(), cells(), cells());
        step(1000, depth, deepest.clone(), passed_on.clone());
        assert_eq!((deepest.get(), passed_on.get()), (2, 1));
    }
}
