//! Whether nodes still answer, found out where something that was asked of one takes long.
//!
//! A daemon that is stopped, and one that cannot be reached any more, leave what was asked of them
//! without an answer, as does one that has long to do: a start, a command, a long poll. So whoever
//! waits asks beside it for something that is answered at once, and goes on waiting for as long as
//! that is answered. All who wait for one node share what was found out.

use std::collections::HashMap;
use std::future::{Future, pending};
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use http::Request;
use http_body_util::Empty;
use thiserror::Error;
use tokio::time::{Instant, sleep, timeout};

use crate::PeerAddress;
use crate::client::AskError;
use crate::dial::{DialError, Dialer};
use crate::idle::Wire;

/// What is asked: the listener for nodes answers it by itself.
pub const PULSE: &str = "/peer/pulse";

/// Silence after which the node is asked whether it lives. Most answers come sooner, and together
/// with the patience it is less than the three seconds after which a client shall know.
const QUIET: Duration = Duration::from_millis(750);
/// Time for the answer, a new connection included. A packet that is lost once is sent again after
/// one second.
const PATIENCE: Duration = Duration::from_secs(2);
/// Before the node is asked again, while the answer is still not there.
const AGAIN: Duration = Duration::from_secs(3);
/// Nodes of which it is remembered; beyond, all are forgotten and asked anew.
const MAX_NODES: usize = 1_024;

/// Finds out which nodes have fallen silent.
#[derive(Debug, Clone)]
pub struct Pulse {
    dialer: Dialer,
    nodes: Arc<Mutex<HashMap<PeerAddress, Arc<Beat>>>>,
}

/// A node that answers nothing.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error(
    "node `{node}` at {address} answers nothing: its daemon is stopped, or cut off from this node"
)]
pub struct Silent {
    pub node: String,
    pub address: String,
}

/// What is known of one node.
#[derive(Debug, Default)]
struct Beat {
    /// Held while the node is asked, so that it is asked once for all who wait.
    last: tokio::sync::Mutex<Option<Look>>,
    silent: AtomicBool,
}

#[derive(Debug, Clone, Copy)]
struct Look {
    ended: Instant,
    answered: bool,
}

impl Pulse {
    #[must_use]
    pub fn new(dialer: Dialer) -> Self {
        let nodes = Arc::default();
        Self { dialer, nodes }
    }

    /// Waits for what was asked of a node, for as long as it answers anything at all. Safe to cancel
    /// where `answer` is.
    ///
    /// # Errors
    /// The node has fallen silent; what was asked may have been done.
    pub async fn while_it_answers<T>(
        &self,
        of: &PeerAddress,
        answer: impl Future<Output = T>,
    ) -> Result<T, Silent> {
        let waited = while_seen(answer, |since| self.look(of, since)).await;
        waited.ok_or_else(|| silent(of))
    }

    /// Returns when a node has fallen silent of which an answer is expected from now on. Safe to
    /// cancel.
    pub async fn falls_silent(&self, of: &PeerAddress) -> Silent {
        match self.while_it_answers(of, pending::<()>()).await {
            Err(silent) => silent,
            Ok(()) => silent(of),
        }
    }

    /// Whether the node was silent when it was last asked.
    #[must_use]
    pub fn was_silent(&self, of: &PeerAddress) -> bool {
        let nodes = self.nodes.lock().unwrap_or_else(PoisonError::into_inner);
        nodes
            .get(of)
            .is_some_and(|beat| beat.silent.load(Ordering::Relaxed))
    }

    /// Asks a node now, whatever is known of it. Safe to cancel.
    pub async fn answers(&self, of: &PeerAddress) -> bool {
        self.look(of, Instant::now()).await
    }

    /// Asks a node that was silent once more, before anything else is asked of it.
    ///
    /// # Errors
    /// It still is.
    pub async fn check(&self, of: &PeerAddress) -> Result<(), Silent> {
        if self.was_silent(of) && !self.answers(of).await {
            return Err(silent(of));
        }
        Ok(())
    }

    /// Whether the node answers, as was found out at some time after `since`.
    async fn look(&self, of: &PeerAddress, since: Instant) -> bool {
        let beat = self.beat(of);
        let mut last = beat.last.lock().await;
        if let Some(look) = last.filter(|look| look.ended >= since) {
            return look.answered;
        }
        let answered = timeout(PATIENCE, self.ask(of)).await == Ok(true);
        let ended = Instant::now();
        *last = Some(Look { ended, answered });
        if beat.silent.swap(!answered, Ordering::Relaxed) == answered {
            tracing::warn!(
                node = of.node,
                answered,
                "whether a node answers has changed"
            );
        }
        answered
    }

    /// Any answer shows that it lives, a refusal too.
    async fn ask(&self, of: &PeerAddress) -> bool {
        let Ok(request) = Request::get(PULSE).body(Empty::<Bytes>::new()) else {
            return false;
        };
        // On a new connection: that an old one fails says nothing.
        let asked = async {
            let mut wire = Wire::open(&self.dialer, of).await?;
            wire.send(&self.dialer, of, request).await
        };
        match asked.await {
            Ok(_) => true,
            // Something took the connection, and said at least that it has no room for it.
            Err(
                AskError::Unanswered { .. }
                | AskError::Refused(_)
                | AskError::Dial(DialError::Tls { .. } | DialError::NoRoom { .. }),
            ) => true,
            Err(error) => {
                tracing::debug!(node = of.node, %error, "no pulse");
                false
            }
        }
    }

    fn beat(&self, of: &PeerAddress) -> Arc<Beat> {
        let mut nodes = self.nodes.lock().unwrap_or_else(PoisonError::into_inner);
        if nodes.len() >= MAX_NODES && !nodes.contains_key(of) {
            nodes.clear();
        }
        Arc::clone(nodes.entry(of.clone()).or_default())
    }
}

/// Waits for an answer for as long as every look, or every second one, sees that the node lives;
/// `None` when it is given up.
async fn while_seen<T, L: Future<Output = bool>>(
    answer: impl Future<Output = T>,
    look: impl Fn(Instant) -> L,
) -> Option<T> {
    let mut answer = pin!(answer);
    let (mut since, mut quiet) = (Instant::now(), QUIET);
    // One that has answered during this wait is not given up for one pulse that is missed.
    let mut answered = false;
    loop {
        tokio::select! {
            biased;
            // Polled again below where the other arm is first.
            answer = &mut answer => return Some(answer),
            () = sleep(quiet) => {}
        }
        tokio::select! {
            biased;
            // Polled again in the next round where the other arm is first.
            answer = &mut answer => return Some(answer),
            // What is given up here, the next who waits asks.
            lives = look(since) => match lives {
                true => (answered, quiet) = (true, AGAIN),
                false if answered => (answered, quiet) = (false, QUIET),
                false => return None,
            },
        }
        since = Instant::now();
    }
}

fn silent(of: &PeerAddress) -> Silent {
    Silent {
        node: of.node.clone(),
        address: of.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::collections::VecDeque;

    use super::*;

    /// Whether a node whose looks come to these, one after the other, is given up; and how many of
    /// them were left.
    async fn is_given_up(looks: &[bool]) -> (bool, usize) {
        let left = RefCell::new(VecDeque::from_iter(looks.iter().copied()));
        let (tell, answer) = tokio::sync::oneshot::channel::<()>();
        let tell = RefCell::new(Some(tell));
        let look = |_| {
            let seen = left.borrow_mut().pop_front();
            if left.borrow().is_empty() {
                // What was asked is answered at last, if anybody still waits.
                tell.borrow_mut().take();
            }
            async move { seen.unwrap_or(true) }
        };
        let waited = while_seen(answer, look).await;
        let left = left.borrow().len();
        (waited.is_none(), left)
    }

    #[tokio::test(start_paused = true)]
    async fn a_node_that_misses_one_pulse_and_answers_the_next_is_waited_for() {
        for looks in [
            &[true, false, true, true][..],
            &[true, false, true, false, true, false, true],
        ] {
            assert_eq!(is_given_up(looks).await, (false, 0), "{looks:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_node_that_misses_two_pulses_running_or_the_first_is_given_up_at_once() {
        for (looks, left) in [
            (&[true, false, false, true, true][..], 2),
            (&[true, true, false, true, false, false, true], 1),
            (&[false, true, true], 2),
        ] {
            assert_eq!(is_given_up(looks).await, (true, left), "{looks:?}");
        }
    }
}
