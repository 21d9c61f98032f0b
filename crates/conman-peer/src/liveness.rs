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
use crate::client::{RequestError, addressed, connect, unanswered};
use crate::dial::{DialError, Dialer};

/// The path of liveness checks between nodes; the listener answers them itself.
pub const LIVENESS: &str = "/peer/liveness";

/// The node is probed after this time without an answer. Most answers come sooner, and the sum with
/// the timeout is below the three seconds within which a client must know.
const PROBE_AFTER: Duration = Duration::from_millis(750);
/// Timeout of the probe, a new connection included. A packet that is lost once is sent again after
/// one second.
const PROBE_TIMEOUT: Duration = Duration::from_secs(2);
/// Pause before the node is probed again, while the answer is outstanding.
const PROBE_INTERVAL: Duration = Duration::from_secs(3);
/// Number of nodes that are remembered; beyond it, all are forgotten and probed again.
const MAX_NODES: usize = 1_024;

/// Detects nodes that do not answer.
#[derive(Debug, Clone)]
pub struct Liveness {
    dialer: Dialer,
    nodes: Arc<Mutex<HashMap<PeerAddress, Arc<ProbeState>>>>,
}

/// A node that does not answer.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error(
    "node `{node}` at {address} does not answer: its daemon is stopped, or cut off from this node"
)]
pub struct Unresponsive {
    pub node: String,
    pub address: String,
}

/// State of one node.
#[derive(Debug, Default)]
struct ProbeState {
    /// Held during a probe, so that one probe serves all callers.
    last: tokio::sync::Mutex<Option<Probe>>,
    silent: AtomicBool,
}

#[derive(Debug, Clone, Copy)]
struct Probe {
    ended: Instant,
    answered: bool,
}

impl Liveness {
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
    ) -> Result<T, Unresponsive> {
        let waited = while_probed(answer, |since| self.probe(of, since)).await;
        waited.ok_or_else(|| silent(of))
    }

    /// Returns when a node, of which an answer is expected from here on, no longer answers.
    /// Cancel safe.
    pub async fn becomes_unresponsive(&self, of: &PeerAddress) -> Unresponsive {
        match self.while_it_answers(of, pending::<()>()).await {
            Err(silent) => silent,
            Ok(()) => silent(of),
        }
    }

    /// Whether the node did not answer the latest probe.
    #[must_use]
    pub fn was_unresponsive(&self, of: &PeerAddress) -> bool {
        let nodes = self.nodes.lock().unwrap_or_else(PoisonError::into_inner);
        nodes
            .get(of)
            .is_some_and(|state| state.silent.load(Ordering::Relaxed))
    }

    /// Probes a node now, whatever is known of it. Cancel safe.
    pub async fn answers(&self, of: &PeerAddress) -> bool {
        self.probe(of, Instant::now()).await
    }

    /// Probes a node again that did not answer, before another request is sent to it.
    ///
    /// # Errors
    /// It still does not answer.
    pub async fn check(&self, of: &PeerAddress) -> Result<(), Unresponsive> {
        if self.was_unresponsive(of) && !self.answers(of).await {
            return Err(silent(of));
        }
        Ok(())
    }

    /// Whether the node answered a probe made after `since`.
    async fn probe(&self, of: &PeerAddress, since: Instant) -> bool {
        let state = self.state_of(of);
        let mut last = state.last.lock().await;
        if let Some(probe) = last.filter(|probe| probe.ended >= since) {
            return probe.answered;
        }
        let answered = timeout(PROBE_TIMEOUT, self.request(of)).await == Ok(true);
        let ended = Instant::now();
        *last = Some(Probe { ended, answered });
        if state.silent.swap(!answered, Ordering::Relaxed) == answered {
            tracing::warn!(node = of.node, answered, "liveness of a node changed");
        }
        answered
    }

    /// Any answer shows that it is alive, including a refusal.
    async fn request(&self, of: &PeerAddress) -> bool {
        let Ok(request) = Request::get(LIVENESS).body(Empty::<Bytes>::new()) else {
            return false;
        };
        // On a new connection: the failure of an old one proves nothing.
        let answer = async {
            let mut connection = connect(&self.dialer, of).await?;
            let sent = connection.send(addressed(of, request)?).await;
            sent.map_err(|error| unanswered(of, error.into_error()))
        };
        match answer.await {
            Ok(_) => true,
            // Something accepted the connection, and at least answered that it is full.
            Err(
                RequestError::Unanswered { .. }
                | RequestError::Refused(_)
                | RequestError::Dial(DialError::Tls { .. } | DialError::NoRoom { .. }),
            ) => true,
            Err(error) => {
                tracing::debug!(node = of.node, %error, "node does not answer a probe");
                false
            }
        }
    }

    fn state_of(&self, of: &PeerAddress) -> Arc<ProbeState> {
        let mut nodes = self.nodes.lock().unwrap_or_else(PoisonError::into_inner);
        if nodes.len() >= MAX_NODES && !nodes.contains_key(of) {
            nodes.clear();
        }
        Arc::clone(nodes.entry(of.clone()).or_default())
    }
}

/// Waits for an answer for as long as every probe, or every second one, succeeds; `None` when it
/// gives up.
async fn while_probed<T, L: Future<Output = bool>>(
    answer: impl Future<Output = T>,
    probe: impl Fn(Instant) -> L,
) -> Option<T> {
    let mut answer = pin!(answer);
    let (mut since, mut quiet) = (Instant::now(), PROBE_AFTER);
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
            lives = probe(since) => match lives {
                true => (answered, quiet) = (true, PROBE_INTERVAL),
                false if answered => (answered, quiet) = (false, PROBE_AFTER),
                false => return None,
            },
        }
        since = Instant::now();
    }
}

fn silent(of: &PeerAddress) -> Unresponsive {
    Unresponsive {
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
    async fn is_given_up(probes: &[bool]) -> (bool, usize) {
        let left = RefCell::new(VecDeque::from_iter(probes.iter().copied()));
        let (tell, answer) = tokio::sync::oneshot::channel::<()>();
        let tell = RefCell::new(Some(tell));
        let probe = |_| {
            let seen = left.borrow_mut().pop_front();
            if left.borrow().is_empty() {
                // The answer comes at last, if the caller still waits.
                tell.borrow_mut().take();
            }
            async move { seen.unwrap_or(true) }
        };
        let waited = while_probed(answer, probe).await;
        let left = left.borrow().len();
        (waited.is_none(), left)
    }

    #[tokio::test(start_paused = true)]
    async fn a_node_that_misses_one_probe_and_answers_the_next_is_waited_for() {
        for probes in [
            &[true, false, true, true][..],
            &[true, false, true, false, true, false, true],
        ] {
            assert_eq!(is_given_up(probes).await, (false, 0), "{probes:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_node_that_misses_two_probes_in_a_row_or_the_first_is_given_up_at_once() {
        for (probes, left) in [
            (&[true, false, false, true, true][..], 2),
            (&[true, true, false, true, false, false, true], 1),
            (&[false, true, true], 2),
        ] {
            assert_eq!(is_given_up(probes).await, (true, left), "{probes:?}");
        }
    }
}
