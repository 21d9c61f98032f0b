//! Detects nodes that no longer answer, while a request to them takes long.
//!
//! A daemon that is stopped or cut off does not answer, and neither does one that is busy with a
//! long request: a start, a command, a long poll. So a waiting caller also sends a request that is
//! answered at once, and continues to wait for as long as that is answered. All callers that wait
//! for one node share the result.

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

/// Path of that request: the peer listener answers it without other components.
pub const PULSE: &str = "/peer/pulse";

/// The node is probed after this time without an answer. Most answers come sooner, and the sum with
/// the timeout is below the three seconds within which a client must know.
const QUIET: Duration = Duration::from_millis(750);
/// Timeout of the probe, a new connection included. A packet that is lost once is sent again after
/// one second.
const PATIENCE: Duration = Duration::from_secs(2);
/// Pause before the node is probed again, while the answer is outstanding.
const AGAIN: Duration = Duration::from_secs(3);
/// Number of nodes that are remembered; beyond it, all are forgotten and probed again.
const MAX_NODES: usize = 1_024;

/// Detects nodes that do not answer.
#[derive(Debug, Clone)]
pub struct Pulse {
    dialer: Dialer,
    nodes: Arc<Mutex<HashMap<PeerAddress, Arc<Beat>>>>,
}

/// A node that does not answer.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error(
    "node `{node}` at {address} does not answer: its daemon is stopped, or cut off from this node"
)]
pub struct Silent {
    pub node: String,
    pub address: String,
}

/// State of one node.
#[derive(Debug, Default)]
struct Beat {
    /// Held during a probe, so that one probe serves all callers.
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

    /// Waits for `answer` for as long as the node answers probes. Cancel safe if `answer` is.
    ///
    /// # Errors
    /// The node does not answer; the request may have been executed.
    pub async fn while_it_answers<T>(
        &self,
        of: &PeerAddress,
        answer: impl Future<Output = T>,
    ) -> Result<T, Silent> {
        let waited = while_seen(answer, |since| self.look(of, since)).await;
        waited.ok_or_else(|| silent(of))
    }

    /// Returns when a node, of which an answer is expected from here on, does not answer any more.
    /// Cancel safe.
    pub async fn falls_silent(&self, of: &PeerAddress) -> Silent {
        match self.while_it_answers(of, pending::<()>()).await {
            Err(silent) => silent,
            Ok(()) => silent(of),
        }
    }

    /// Whether the node did not answer the latest probe.
    #[must_use]
    pub fn was_silent(&self, of: &PeerAddress) -> bool {
        let nodes = self.nodes.lock().unwrap_or_else(PoisonError::into_inner);
        nodes
            .get(of)
            .is_some_and(|beat| beat.silent.load(Ordering::Relaxed))
    }

    /// Probes a node now, whatever is known of it. Cancel safe.
    pub async fn answers(&self, of: &PeerAddress) -> bool {
        self.look(of, Instant::now()).await
    }

    /// Probes a node again that did not answer, before another request is sent to it.
    ///
    /// # Errors
    /// It still does not answer.
    pub async fn check(&self, of: &PeerAddress) -> Result<(), Silent> {
        if self.was_silent(of) && !self.answers(of).await {
            return Err(silent(of));
        }
        Ok(())
    }

    /// Whether the node answered a probe made after `since`.
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
            tracing::warn!(node = of.node, answered, "liveness of a node changed");
        }
        answered
    }

    /// Any answer shows that it is alive, including a refusal.
    async fn ask(&self, of: &PeerAddress) -> bool {
        let Ok(request) = Request::get(PULSE).body(Empty::<Bytes>::new()) else {
            return false;
        };
        // On a new connection: the failure of an old one proves nothing.
        let asked = async {
            let mut wire = Wire::open(&self.dialer, of).await?;
            wire.send(&self.dialer, of, request).await
        };
        match asked.await {
            Ok(_) => true,
            // Something accepted the connection, and at least answered that it is full.
            Err(
                AskError::Unanswered { .. }
                | AskError::Refused(_)
                | AskError::Dial(DialError::Tls { .. } | DialError::NoRoom { .. }),
            ) => true,
            Err(error) => {
                tracing::debug!(node = of.node, %error, "node does not answer a probe");
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

/// Waits for an answer for as long as every probe, or every second one, succeeds; `None` when it
/// gives up.
async fn while_seen<T, L: Future<Output = bool>>(
    answer: impl Future<Output = T>,
    look: impl Fn(Instant) -> L,
) -> Option<T> {
    let mut answer = pin!(answer);
    let (mut since, mut quiet) = (Instant::now(), QUIET);
    // A node that has answered during this wait is not given up after one missed probe.
    let mut answered = false;
    loop {
        tokio::select! {
            biased;
            // Polled again below if the other arm is first.
            answer = &mut answer => return Some(answer),
            () = sleep(quiet) => {}
        }
        tokio::select! {
            biased;
            // Polled again in the next iteration if the other arm is first.
            answer = &mut answer => return Some(answer),
            // If the probe is dropped here, the next waiting caller probes.
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

    /// Whether a node with these probe results, one after the other, is given up; and how many of
    /// them were left.
    async fn is_given_up(looks: &[bool]) -> (bool, usize) {
        let left = RefCell::new(VecDeque::from_iter(looks.iter().copied()));
        let (tell, answer) = tokio::sync::oneshot::channel::<()>();
        let tell = RefCell::new(Some(tell));
        let look = |_| {
            let seen = left.borrow_mut().pop_front();
            if left.borrow().is_empty() {
                // The answer comes at last, if the caller still waits.
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
