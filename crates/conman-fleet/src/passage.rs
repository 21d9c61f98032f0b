//! What passes through this node from its clients to other nodes, besides the connections of sessions.

use conman_core::{ActivityGuard, Departure};
use conman_node::Leave;
use tokio::sync::watch;

/// A request, a stream or a tunnel of a client of this node to another node. It counts as passing through
/// until it is dropped.
#[derive(Debug)]
pub struct Passage {
    _counted: ActivityGuard,
    departure: watch::Receiver<Departure>,
}

impl Passage {
    #[must_use]
    pub fn begin(leave: &Leave) -> Self {
        Self {
            _counted: leave.through().begin(),
            departure: leave.departure(),
        }
    }

    /// Returns when the node, as it leaves, closes what passes through. What begins after that is served:
    /// its client knows no other node. Cancel safe: a change that is missed is seen by the next call.
    pub async fn closes(&mut self) {
        while self.departure.changed().await.is_ok() {
            if *self.departure.borrow() >= Departure::Closing {
                return;
            }
        }
    }
}

/// Pending for what does not count as passing through.
pub(crate) async fn closes(passage: &mut Option<Passage>) {
    match passage {
        Some(passage) => passage.closes().await,
        None => std::future::pending().await,
    }
}
