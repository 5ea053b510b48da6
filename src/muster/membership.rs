//! Joining, and the guard that leaves.

use std::fmt;
use std::sync::{Arc, Weak};

use tokio::time::{Instant, timeout_at};

use crate::driver::Driver;
use crate::driver::member::{Member, Target, drop_guarded};
use crate::driver::registry::Begin;
use crate::error::JoinError;
use crate::node::{JoinRefused, JoinStart, Ticket};
use crate::types::{Group, Incarnation, MemberId};

/// A member of a group, for as long as this guard lives.
///
/// Leaving is the same as dropping: both are synchronous and take effect at once, and neither spawns anything, so
/// a guard may be dropped anywhere. Guards of one membership ([`Muster::join_as`](crate::Muster::join_as)) share
/// it; the last one leaves. A guard does not keep its scope alive.
///
/// ```
/// # use muster_router::{Muster, transport::memory::Network};
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let muster = Muster::builder("rooms").transport(Network::new().node("a")).start().await?;
/// let (sender, _receiver) = tokio::sync::mpsc::channel(64);
/// let membership = muster.join("room:42", sender).await?;
/// assert_eq!(muster.local_member_count("room:42"), 1);
/// drop(membership);
/// assert_eq!(muster.local_member_count("room:42"), 0);
/// # Ok(())
/// # }
/// ```
#[must_use = "dropping the guard leaves the group"]
pub struct Membership {
    driver: Weak<Driver>,
    id: MemberId,
    group: Group,
    generation: u64,
    released: bool,
}

impl Membership {
    /// Who the member is, for instance to leave it out of a broadcast
    /// ([`BroadcastOptions::except`](crate::BroadcastOptions::except)).
    pub fn id(&self) -> &MemberId {
        &self.id
    }

    /// The group.
    pub fn group(&self) -> &Group {
        &self.group
    }

    /// Leaves the group. Leaving one whose member has ended already, or whose scope has stopped, does nothing.
    pub fn leave(self) {}

    pub(super) fn release(&mut self) {
        if std::mem::replace(&mut self.released, true) {
            return;
        }
        if let Some(driver) = self.driver.upgrade() {
            driver.release(&self.group, self.id.number, self.generation);
        }
    }
}

impl Drop for Membership {
    fn drop(&mut self) {
        self.release();
    }
}

impl fmt::Debug for Membership {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Membership").field("id", &self.id).field("group", &self.group).finish()
    }
}

/// A join under way. Dropped before it is done, it undoes what it did.
struct Pending<'a> {
    driver: &'a Arc<Driver>,
    member: Member,
    ticket: Option<Ticket>,
    done: bool,
}

impl Drop for Pending<'_> {
    fn drop(&mut self) {
        if self.done {
            return;
        }
        let (group, number) = (self.member.group().as_bytes(), self.member.id().number);
        if let Some(ticket) = self.ticket {
            self.driver.joins.forget(&ticket);
            drop(self.driver.node.cancel_join(group, ticket));
        }
        // it may have been answered already, and the answer not been read
        drop(self.driver.node.leave(group, number, self.driver.now()));
        self.driver.registry.abandon(&self.member);
        self.driver.pump();
    }
}

/// A subscriber that did not become a member: its drop may panic, as any member's.
struct Unused<'a> {
    target: Option<Target>,
    driver: &'a Arc<Driver>,
}

impl Drop for Unused<'_> {
    fn drop(&mut self) {
        drop_guarded(&mut self.target, self.driver);
    }
}

/// Makes a member of `group`; `number` is given for a member that may be there already.
pub(super) async fn join(
    driver: &Arc<Driver>,
    group: Group,
    number: Option<u64>,
    target: Target,
) -> Result<Membership, JoinError> {
    let mut now = Instant::now();
    let deadline = now + driver.config.join_timeout;
    let mut target = Unused { target: Some(target), driver };
    loop {
        let member_number = number.unwrap_or_else(|| driver.node.next_member_number());
        let guard = |generation| Membership {
            driver: Arc::downgrade(driver),
            id: MemberId::new(driver.node.me().clone(), member_number),
            group: group.clone(),
            generation,
            released: false,
        };
        let begin = driver.registry.begin(&group, member_number, |generation| {
            let id = MemberId::new(driver.node.me().clone(), member_number);
            Member::new(id, group.clone(), generation, target.target.take(), Arc::downgrade(driver))
        });
        match begin {
            Begin::Closed => return Err(JoinError::Stopped),
            Begin::New(member) => {
                let mut pending = Pending { driver, member, ticket: None, done: false };
                admit(&mut pending, now, deadline).await?;
                if !driver.registry.joined(&pending.member) {
                    return Err(JoinError::Stopped); // and `pending` takes the member out again
                }
                pending.done = true;
                return Ok(guard(pending.member.generation()));
            }
            Begin::Shared(generation) => {
                let guard = guard(generation);
                if number.is_some() {
                    return Ok(guard);
                }
                // somebody has named a member with the number that was to be ours: take the next
            }
            Begin::Wait(mut decided) => {
                if number.is_some() && timeout_at(deadline, decided.changed()).await.is_err() {
                    return Err(unreachable(driver, &group));
                }
                // a claim that this one begins is shared by others, who have all of their time
                now = Instant::now();
            }
        }
    }
}

/// Has the member registered by the node. `now` is when the join was called.
async fn admit(pending: &mut Pending<'_>, mut now: Instant, deadline: Instant) -> Result<(), JoinError> {
    let driver = pending.driver;
    let (group, number) = (pending.member.group().clone(), pending.member.id().number);
    loop {
        if driver.is_stopped() {
            return Err(JoinError::Stopped);
        }
        let mut wait = None;
        let (member, since) = (pending.member.clone(), driver.since(now));
        // most joins are answered at once: only one that waits needs a place for its answer
        let ticket = || {
            let ticket = driver.next_ticket();
            wait = Some((ticket, driver.joins.wait_for(ticket)));
            ticket
        };
        let start = driver.node.join_with(group.clone(), number, member, ticket, since);
        let (ticket, answer) = wait.unzip();
        pending.ticket = ticket;
        driver.pump();
        match start {
            JoinStart::Joined | JoinStart::AlreadyMember => return Ok(()),
            JoinStart::Refused(refused) => return Err(refusal(driver, &group, refused)),
            JoinStart::Waiting => {
                let answer = answer.flatten().ok_or(JoinError::Stopped)?;
                // the node keeps the time of a claim itself; this is for a join that has waited before
                let late = deadline + driver.node.settings().tick() * 4;
                return match timeout_at(late, answer).await {
                    Ok(Ok(Ok(()))) => Ok(()),
                    Ok(Ok(Err(refused))) => Err(refusal(driver, &group, refused)),
                    Ok(Err(_)) => Err(JoinError::Stopped),
                    Err(_) => Err(unreachable(driver, &group)),
                };
            }
            JoinStart::Unsettled(handle) => {
                drop(handle);
                // it looks at the state as it is first, so nothing that has happened meanwhile is missed
                let mut state = driver.state.subscribe();
                let ready = state.wait_for(|s| s.settled || s.draining || s.superseded || s.stopped);
                match timeout_at(deadline, ready).await {
                    // the sender is the driver's own: it is not gone
                    Ok(_) => now = Instant::now(),
                    Err(_) => {
                        let waited = driver.config.join_timeout;
                        return Err(JoinError::NotSettled { group, waited });
                    }
                }
            }
        }
    }
}

fn refusal(driver: &Driver, group: &Group, refused: JoinRefused) -> JoinError {
    match refused {
        JoinRefused::RouterUnreachable { router } => {
            JoinError::RouterUnreachable { group: group.clone(), router }
        }
        JoinRefused::Draining => JoinError::Draining,
        JoinRefused::Superseded => {
            let (node, live) = superseded(driver);
            JoinError::Superseded { node, live }
        }
    }
}

fn unreachable(driver: &Driver, group: &Group) -> JoinError {
    let router = driver.node.with_published(|published| published.router(group.as_bytes()).node.clone());
    JoinError::RouterUnreachable { group: group.clone(), router }
}

/// This node's name, and the life that has taken it over.
pub(super) fn superseded(driver: &Driver) -> (crate::types::NodeId, Incarnation) {
    let me = driver.node.me();
    // the event that names it may still be on its way
    let live = driver.superseded_by().map_or_else(|| me.incarnation.next(), |by| by.incarnation);
    (me.node.clone(), live)
}
