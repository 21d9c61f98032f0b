//! Sends buffered requests to the API about a session to the session's node, and again when that node does not
//! serve it, by the request's [`Policy`]. This is the only such loop; a caller makes the attempts. Connections:
//! [`Locator::find_again`](crate::Locator::find_again).
//!
//! ```text
//! attempt: locate, send ─▶ answer
//!    ▲       ├ it does not own the session ─▶ pause, unless the location was a cached one
//!    │       ├ it cannot be reached ─▶ wait until it can be, or the session has moved, if the policy waits
//!    │       ├ its answer to a DELETE is lost ─▶ the registry tells whether the session has ended
//!    │       └ it does not accept this node ─▶ the reason, unless the location was a cached one
//!    └───────┘
//! ```

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use conman_proto::{Generation, SessionId};
use http::Method;
use thiserror::Error;
use tokio::time::{Instant, sleep, timeout};

use crate::FleetMap;
use crate::node_waits::{CutOff, pause};

/// How much longer than the takeover delay a request waits for a session whose node cannot be
/// reached: other nodes may have begun to count later, and the session must be claimed after that.
const AFTER_TAKEOVER: Duration = Duration::from_secs(18);

/// How one kind of request is treated when a node does not serve it. Which requests may be sent a second
/// time after a lost answer follows from the method alone: [`conman_peer::may_be_repeated`].
/// A body of any size is sent once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Policy {
    /// How often nodes may refuse it as misdirected, while the session moves.
    pub max_refusals: u32,
    /// Whether it waits for a node that cannot be reached, somewhat longer than the takeover delay.
    pub waits: bool,
    /// Whether a lost answer leads to the question whether it was carried out, which the registry answers.
    pub is_confirmed: bool,
}

impl Policy {
    /// PUT: starts a session, or changes nothing.
    pub const START: Self = Self::new(6, true, false);
    /// DELETE of a session.
    pub const END: Self = Self::new(6, true, true);
    /// Anything else that is buffered: reads, changes, commands.
    pub const OTHER: Self = Self::new(6, false, false);
    const fn new(max_refusals: u32, waits: bool, is_confirmed: bool) -> Self {
        Self {
            max_refusals,
            waits,
            is_confirmed,
        }
    }

    /// The policy of a buffered request to the API. `is_of_session`: it is about the session itself, not
    /// about something in it.
    #[must_use]
    pub fn of(method: &Method, is_of_session: bool) -> Self {
        match *method {
            Method::PUT => Self::START,
            Method::DELETE if is_of_session => Self::END,
            _ => Self::OTHER,
        }
    }
}

/// The result of one attempt.
#[derive(Debug)]
pub enum ForwardStep<A, E> {
    Answer(A),
    /// The session is elsewhere.
    Moved,
    /// This node refuses it; another one may accept it.
    Elsewhere(A),
    /// Its node may have ended this generation, but has not confirmed it.
    Unanswered(UnreachableNode, Generation),
    Unreachable(UnreachableNode),
    /// Its node accepts no requests of this one.
    Refused(E),
}

/// A node that cannot be reached, and why.
#[derive(Debug)]
pub struct UnreachableNode {
    pub node: Arc<str>,
    pub why: String,
}

/// The results of earlier attempts.
#[derive(Debug, Default)]
pub struct EarlierAttempts {
    /// Whether the location must be read from the registry: a cached one was wrong.
    pub must_read: bool,
    /// The node that was just unreachable; it is not tried again at once.
    pub unreached: Option<UnreachableNode>,
    /// The generation that may have been ended already.
    pub deleted: Option<Generation>,
}

/// Makes the attempts for one request.
#[async_trait]
pub trait ForwardAttempt {
    type Answer: Send;
    type Error: From<NotForwarded> + Send;

    /// Locates the session and sends the request to its node, once.
    async fn attempt(
        &self,
        earlier: EarlierAttempts,
    ) -> Result<ForwardStep<Self::Answer, Self::Error>, Self::Error>;
}

/// Why a request is not sent again.
#[derive(Debug, Error)]
pub enum NotForwarded {
    #[error("session `{id}` changed its node each time that it was looked up; try again")]
    Moves { id: SessionId },
    /// Nothing was done.
    #[error("{}", .0.why)]
    Unreachable(UnreachableNode),
    /// Nothing was done.
    #[error("{}. The limit of requests that wait for unreachable nodes is met; try again in a moment", .0.why)]
    Crowded(UnreachableNode),
    /// It may have been carried out.
    #[error("{}", .0.why)]
    Unanswered(UnreachableNode),
}

/// How long one request has been attempted.
struct Patience {
    policy: Policy,
    began: Instant,
    /// Attempts since the location was read last, and at least one more once it was.
    tries: u32,
    waits: u32,
}

impl FleetMap {
    /// Attempts a request about a session until it is served, or refused for good.
    ///
    /// # Errors
    /// An attempt failed, or the policy permits no other one.
    pub async fn forward<R: ForwardAttempt + Sync>(
        &self,
        id: &SessionId,
        policy: Policy,
        request: &R,
    ) -> Result<R::Answer, R::Error> {
        let mut patience = Patience {
            policy,
            began: Instant::now(),
            tries: 0,
            waits: 0,
        };
        let mut earlier = EarlierAttempts::default();
        loop {
            let deleted = earlier.deleted;
            let step = request.attempt(earlier).await?;
            patience.tries += 1;
            let was_cached = patience.tries == 1;
            earlier = EarlierAttempts {
                must_read: true,
                unreached: None,
                deleted,
            };
            match step {
                ForwardStep::Answer(answer) => return Ok(answer),
                ForwardStep::Moved => {
                    if !patience.may_look_again().await {
                        return Err(NotForwarded::Moves { id: id.clone() }.into());
                    }
                }
                ForwardStep::Elsewhere(refusal) => {
                    if !patience.may_look_again().await {
                        return Ok(refusal);
                    }
                }
                ForwardStep::Unanswered(node, generation) => {
                    earlier.deleted = Some(generation);
                    earlier.unreached = Some(node);
                }
                // Another node may own it.
                ForwardStep::Unreachable(node) if was_cached => earlier.unreached = Some(node),
                ForwardStep::Unreachable(node) => {
                    match self.wait_until(id, node, &mut patience).await {
                        Ok(()) => {}
                        // It may have been done all the same.
                        Err(NotForwarded::Unreachable(node) | NotForwarded::Crowded(node))
                            if deleted.is_some() =>
                        {
                            return Err(NotForwarded::Unanswered(node).into());
                        }
                        Err(error) => return Err(error.into()),
                    }
                }
                ForwardStep::Refused(_) if was_cached => {}
                ForwardStep::Refused(error) => return Err(error),
            }
        }
    }

    /// After an attempt that did not reach the node, which the registry names: returns when the node can be
    /// reached, or the session may be on another one. Fails if the request does not wait, or has waited for too
    /// long.
    async fn wait_until(
        &self,
        id: &SessionId,
        node: UnreachableNode,
        patience: &mut Patience,
    ) -> Result<(), NotForwarded> {
        let limit = self.fleet().takeover() + AFTER_TAKEOVER;
        let left = limit.saturating_sub(patience.began.elapsed());
        if !patience.policy.waits || left.is_zero() {
            return Err(NotForwarded::Unreachable(node));
        }
        let Some(_waiting) = self.wait_for(&node.node) else {
            return Err(NotForwarded::Crowded(node));
        };
        // It may be reachable but unusable, for example because it is full.
        patience.waits += 1;
        if patience.waits > 1 {
            sleep(pause(patience.waits)).await;
        }
        // At the end of its patience, the next attempt reports why.
        let reached = timeout(left, self.until_reachable(id, &node.node)).await;
        if let Ok(Err(CutOff)) = reached {
            return Err(NotForwarded::Unreachable(node));
        }
        // The location has been read.
        patience.tries = 2;
        Ok(())
    }
}

impl Patience {
    /// After an attempt that found the session elsewhere: returns whether the request may be sent again, once it
    /// may be.
    async fn may_look_again(&self) -> bool {
        if self.tries >= self.policy.max_refusals {
            return false;
        }
        metrics::counter!("conman_api_peer_refusals_total").increment(1);
        // The first time, the registry was not read yet.
        if self.tries > 1 {
            sleep(pause(self.tries)).await;
        }
        true
    }
}
