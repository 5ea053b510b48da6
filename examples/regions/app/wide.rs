//! The network between the regions: stands for what you have there (TCP, a message queue). A gateway asks one node of
//! the other region at a time, and gets an answer or none.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use muster_router::{NodeId, View, ViewHash};
use parking_lot::Mutex;
use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;

use super::hop::Hop;

/// How many questions may wait at one node.
const WAITING: usize = 256;
/// Who has not answered for so long is taken for gone.
const PATIENCE: Duration = Duration::from_secs(1);

/// "See that your region hears this."
pub(crate) struct Question {
    pub(crate) hop: Hop,
    /// The view by which the gateway chose this node; [`ViewHash::UNSETTLED`] if it just chose one.
    pub(crate) tag: ViewHash,
    pub(crate) answer: oneshot::Sender<Answer>,
}

/// "It has heard it", and what the gateway should know for the next time.
pub(crate) struct Answer {
    pub(crate) view: View,
}

/// Everybody's door to the other region. Cloning gives the same network.
#[derive(Clone, Default)]
pub(crate) struct Wide(Arc<Shared>);

#[derive(Default)]
struct Shared {
    doors: Mutex<BTreeMap<NodeId, mpsc::Sender<Question>>>,
    asked: AtomicU64,
    /// Every so many answers, one is lost on its way.
    lose: AtomicU64,
}

impl Wide {
    pub(crate) fn lose_one_answer_in(&self, many: u64) {
        self.0.lose.store(many, Ordering::Relaxed);
    }

    pub(crate) fn open(&self, node: &NodeId) -> mpsc::Receiver<Question> {
        let (sender, receiver) = mpsc::channel(WAITING);
        self.0.doors.lock().insert(node.clone(), sender);
        receiver
    }

    /// Asks one node. `None`: nobody is there, it is too slow, or its answer was lost; it may have done it or not.
    pub(crate) async fn ask(&self, node: &NodeId, hop: &Hop, tag: ViewHash) -> Option<Answer> {
        let door = self.0.doors.lock().get(node).cloned()?;
        let (answer, answered) = oneshot::channel();
        let question = Question { hop: hop.clone(), tag, answer };
        let asked = async {
            door.send(question).await.ok()?;
            answered.await.ok()
        };
        let answer = timeout(PATIENCE, asked).await.ok()??;
        let lose = self.0.lose.load(Ordering::Relaxed);
        let lost = lose > 0 && self.0.asked.fetch_add(1, Ordering::Relaxed) % lose == lose - 1;
        (!lost).then_some(answer)
    }
}
