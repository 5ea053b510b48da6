//! A member as this node holds it: the user's subscriber, wrapped so that it cannot hurt anybody else.

use std::any::Any;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use super::Driver;
use super::mailbox::Mailbox;
use super::message::{Delivered, Message, Subscriber};
use super::nesting;
use crate::types::{Group, MemberId};

/// A delivery that takes longer is counted and logged: it holds up the thread that brings messages.
pub(crate) const SLOW_DELIVERY: Duration = Duration::from_millis(10);

/// Where messages go.
pub(crate) enum Target {
    /// A subscription of ours: never blocks and never panics, so it is neither timed nor guarded.
    Mailbox(Arc<Mailbox>),
    /// Somebody's code.
    User {
        subscriber: Box<dyn Subscriber>,
        /// See [`Subscriber::is_prompt`].
        prompt: bool,
    },
}

impl Target {
    /// Asks the subscriber's code, so it must not be called under a lock.
    pub(crate) fn user(subscriber: impl Subscriber) -> Self {
        Target::User { prompt: subscriber.is_prompt(), subscriber: Box::new(subscriber) }
    }
}

/// A member of a group on this node; cheap to clone.
///
/// Given by [`Muster::local_members`](crate::Muster::local_members) to callers that deliver by themselves.
#[derive(Clone)]
pub struct Member(Arc<Inner>);

struct Inner {
    id: MemberId,
    group: Group,
    /// Tells two memberships of one member in one group apart.
    generation: u64,
    /// `None` while it is dropped.
    target: Option<Target>,
    driver: Weak<Driver>,
}

impl Member {
    pub(crate) fn new(
        id: MemberId,
        group: Group,
        generation: u64,
        target: Option<Target>,
        driver: Weak<Driver>,
    ) -> Self {
        Self(Arc::new(Inner { id, group, generation, target, driver }))
    }

    /// Who it is.
    pub fn id(&self) -> &MemberId {
        &self.0.id
    }

    /// The group that it is a member of.
    pub fn group(&self) -> &Group {
        &self.0.group
    }

    /// Gives it a message, guarded like every delivery: a panic is caught and ends the member, and one that
    /// says [`Delivered::Closed`] is removed.
    pub fn deliver(&self, message: &Message) -> Delivered {
        let delivered = nesting::inside(|| self.give(message, &mut None));
        if let Some(driver) = self.0.driver.upgrade() {
            driver.stats.count(delivered, 1);
            self.settle(&driver, delivered);
        }
        // also if the scope is gone: what the subscriber has sent into another one was accepted
        nesting::run_queued();
        delivered
    }

    pub(crate) fn generation(&self) -> u64 {
        self.0.generation
    }

    pub(crate) fn target(&self) -> Option<&Target> {
        self.0.target.as_ref()
    }

    /// The delivery itself. `last` is when the previous one ended, so that a row of deliveries reads the clock
    /// once each.
    pub(crate) fn give(&self, message: &Message, last: &mut Option<Instant>) -> Delivered {
        let subscriber = match &self.0.target {
            Some(Target::Mailbox(mailbox)) => return mailbox.deliver(message),
            Some(Target::User { subscriber, prompt: false }) => subscriber,
            Some(Target::User { subscriber, prompt: true }) => {
                // what came before is not this one's time, nor the next one's
                *last = None;
                return self.guarded(&**subscriber, message);
            }
            None => return Delivered::Closed,
        };
        let start = last.unwrap_or_else(Instant::now);
        let delivered = self.guarded(&**subscriber, message);
        let end = Instant::now();
        *last = Some(end);
        let took = end.saturating_duration_since(start);
        if took > SLOW_DELIVERY {
            if let Some(driver) = self.0.driver.upgrade() {
                driver.stats.slow_deliveries.add(1);
            }
            tracing::warn!(member = %self.0.id, group = %self.0.group, ?took, "a subscriber holds up deliveries");
        }
        delivered
    }

    fn guarded(&self, subscriber: &dyn Subscriber, message: &Message) -> Delivered {
        catch_unwind(AssertUnwindSafe(|| subscriber.deliver(message))).unwrap_or_else(|panic| {
            tracing::error!(member = %self.0.id, group = %self.0.group, "a member is ended by its panic");
            report_panic(self.0.driver.upgrade().as_deref(), "deliver", panic);
            Delivered::Closed
        })
    }

    /// What follows from a delivery, when nothing is borrowed any more.
    pub(crate) fn settle(&self, driver: &Arc<Driver>, delivered: Delivered) {
        match delivered {
            Delivered::Accepted | Delivered::Dropped => {}
            Delivered::Closed => driver.end_member(self),
        }
    }
}

/// Counts and logs a panic of somebody's code.
fn report_panic(driver: Option<&Driver>, place: &'static str, panic: Box<dyn Any + Send>) {
    let text = panic
        .downcast_ref::<&'static str>()
        .copied()
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("no text");
    tracing::error!(place, panic = text, "a subscriber panicked");
    if let Some(driver) = driver {
        driver.stats.panics.add(1);
    }
    // what was thrown may itself panic when it is dropped; then it is left alone
    if let Err(second) = catch_unwind(AssertUnwindSafe(move || drop(panic))) {
        std::mem::forget(second);
    }
}

/// Drops somebody's subscriber; its panic is caught. Called under no lock.
pub(crate) fn drop_guarded(target: &mut Option<Target>, driver: &Driver) {
    let target = target.take();
    if let Err(panic) = catch_unwind(AssertUnwindSafe(move || drop(target))) {
        report_panic(Some(driver), "drop", panic);
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        let target = self.target.take();
        if let Err(panic) = catch_unwind(AssertUnwindSafe(move || drop(target))) {
            report_panic(self.driver.upgrade().as_deref(), "drop", panic);
        }
    }
}

impl fmt::Debug for Member {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}@{}", self.0.id, self.0.group)
    }
}
