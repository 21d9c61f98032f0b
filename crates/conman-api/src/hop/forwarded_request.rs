//! The path of one request to its session's node.

use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::body::Body;
use axum::extract::Request;
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};
use conman_fleet::hold::pause;
use conman_fleet::{BufferedRequest, CallError, ExpectedGeneration, Node, SessionLocation};
use conman_peer::headers::X_CONMAN_MISDIRECTED;
use conman_proto::{Generation, SessionId, SessionState, StopReport};
use http::Method;
use tokio::time::{Instant, timeout};

use super::start_answer::wants_another;
use super::{BodyLimit, Hop, buffer, unanswered, unreachable};
use crate::node_errors::chain;
use crate::problem::{ApiError, IntoApiError as _, Kind};

/// How often a misdirected request is sent to the next node, while the session moves.
const MAX_TRIES: u32 = 6;

/// How much longer than the takeover delay a PUT or a DELETE waits for a session whose node
/// cannot be reached: other nodes may have begun to count later, and the session must be claimed
/// after that.
const AFTER_TAKEOVER: Duration = Duration::from_secs(18);

/// A request for a session that does not run on this node, or that is to be started on some node.
pub(super) struct ForwardedRequest {
    pub(super) hop: Hop,
    pub(super) id: SessionId,
    pub(super) request: BufferedRequest,
    next: Next,
}

/// Result of an attempt.
pub(super) enum Step {
    Answer(Response),
    /// The session is elsewhere.
    Moved,
    /// This node refuses it; another one may accept it.
    Elsewhere(Response),
    /// Its node may have ended this generation, but has not confirmed it.
    Unanswered(UnreachableNode, Generation),
    /// Its node cannot be reached.
    Unreachable(UnreachableNode),
    /// Its node accepts no requests of this one.
    Refused(ApiError),
}

/// The results of earlier attempts.
struct Attempts {
    fresh: bool,
    /// The node that was just unreachable; it is not tried again at once.
    unreached: Option<UnreachableNode>,
    /// The generation that may have been ended already.
    deleted: Option<Generation>,
}

/// A node that cannot be reached, and why.
pub(super) struct UnreachableNode {
    node: Arc<str>,
    why: String,
}

impl ForwardedRequest {
    pub(super) async fn begin(
        hop: Hop,
        id: SessionId,
        (request, limit): (Request, BodyLimit),
        next: Next,
    ) -> Response {
        let request = match buffer(request, limit).await {
            Ok(request) => request,
            Err(refusal) => return refusal.into_response(),
        };
        let forwarded = Self {
            hop,
            id,
            request,
            next,
        };
        let mut response = forwarded
            .run()
            .await
            .unwrap_or_else(ApiError::into_response);
        response.headers_mut().remove(&X_CONMAN_MISDIRECTED);
        response
    }

    async fn run(&self) -> Result<Response, ApiError> {
        let began = Instant::now();
        let (mut fresh, mut tries, mut waits) = (false, 0, 0);
        let (mut unreached, mut deleted) = (None, None);
        let patience = self.hop.map.fleet().takeover() + AFTER_TAKEOVER;
        loop {
            let attempts = Attempts {
                fresh,
                unreached: unreached.take(),
                deleted,
            };
            let step = self.step(attempts).await?;
            fresh = true;
            tries += 1;
            match step {
                Step::Answer(response) => return Ok(response),
                Step::Moved | Step::Elsewhere(_) if tries < MAX_TRIES => {
                    metrics::counter!("conman_api_peer_refusals_total").increment(1);
                    // The first time, the registry was not read yet.
                    if tries > 1 {
                        tokio::time::sleep(pause(tries)).await;
                    }
                }
                Step::Moved => {
                    return Err(Kind::MOVES.because(format!(
                        "session `{}` changed its node each of {MAX_TRIES} times that it was \
                         looked up; try again",
                        self.id
                    )));
                }
                Step::Elsewhere(response) => return Ok(response),
                Step::Unanswered(node, generation) => {
                    deleted = Some(generation);
                    unreached = Some(node);
                }
                // The registry was not read yet; another node may own it.
                Step::Unreachable(node) if tries == 1 => unreached = Some(node),
                // A request that starts or ends a session waits for the node's takeover.
                Step::Unreachable(node) if self.decides() && began.elapsed() < patience => {
                    let Some(_waiting) = self.hop.map.wait_for(&node.node) else {
                        return Err(match deleted {
                            Some(_) => unanswered(&node.why),
                            None => crowded(&node),
                        });
                    };
                    // It may be reachable but unusable, for example because it is full.
                    waits += 1;
                    if waits > 1 {
                        tokio::time::sleep(pause(waits)).await;
                    }
                    let left = patience.saturating_sub(began.elapsed());
                    let reachable = self.hop.map.until_reachable(&self.id, &node.node);
                    // At its end, the next attempt reports why.
                    let _ = timeout(left, reachable).await;
                    tries = 2;
                }
                // It may have been done all the same.
                Step::Unreachable(node) if deleted.is_some() => return Err(unanswered(&node.why)),
                Step::Unreachable(node) => return Err(unreachable(&node.why)),
                // The location may be out of date; the registry was not read yet.
                Step::Refused(_) if tries == 1 => {}
                Step::Refused(error) => return Err(error),
            }
        }
    }

    pub(super) fn is_put(&self) -> bool {
        self.request.parts.method == Method::PUT
    }

    /// Whether the request creates or ends a session.
    fn decides(&self) -> bool {
        self.is_put() || self.ends()
    }

    /// Whether it ends the session.
    fn ends(&self) -> bool {
        self.is_of_session() && self.request.parts.method == Method::DELETE
    }

    /// Whether it is about the session itself, not about something in it.
    pub(super) fn is_of_session(&self) -> bool {
        let path = self.request.parts.uri.path();
        path.strip_prefix("/v1/sessions/") == Some(self.id.as_str())
    }

    /// One attempt; not with a node that was just unreachable.
    async fn step(&self, attempts: Attempts) -> Result<Step, ApiError> {
        let Attempts {
            mut fresh,
            unreached,
            deleted,
        } = attempts;
        if self.hop.node.sessions().is_live(&self.id) {
            if let Some(deleted) = deleted {
                return Err(self.started_again(deleted, self.hop.map.me()));
            }
            if self.is_put() {
                return Ok(self.here_or_elsewhere().await);
            }
            // A start without a generation yet has nothing to report, and another node may be first.
            self.hop.node.sessions().claimed(&self.id).await;
            if self.hop.node.sessions().owns(&self.id) {
                return Ok(self.here().await);
            }
            fresh = true;
        }
        let location = self.hop.map.locate(&self.id, &mut fresh).await;
        let location = location.map_err(|error| Kind::NO_REGISTRY.because(chain(&error)))?;
        if let Some(deleted) = deleted {
            match self.after_delete(deleted, &location) {
                Some(ended) => return ended,
                // Nothing has changed.
                None => fresh = true,
            }
        }
        match location {
            SessionLocation::There(owner) => match unreached {
                Some(unreached) if unreached.node == owner.node.name => {
                    Ok(Step::Unreachable(unreached))
                }
                Some(_) | None => self.there(&owner.node, owner.generation).await,
            },
            SessionLocation::Here { .. } => Ok(self.here_or_elsewhere().await),
            SessionLocation::NoOwner
            | SessionLocation::Released { .. }
            | SessionLocation::Lost { .. }
                if self.is_put() =>
            {
                self.place().await
            }
            SessionLocation::NoOwner => Ok(self.here().await),
            // Only the registry's answer proves that it has ended.
            SessionLocation::Released { .. } if !fresh => Ok(Step::Moved),
            SessionLocation::Released { node, .. } if node == self.hop.map.me() => {
                Ok(self.here().await)
            }
            SessionLocation::Released { node, generation } => {
                self.ended_there(&node, generation).await
            }
            SessionLocation::Lost { node, generation } => self.by_record(&node, generation).await,
        }
    }

    /// Calls the handler of this node.
    pub(super) async fn here(&self) -> Step {
        let (parts, body) = (self.request.parts.clone(), self.request.body.clone());
        let request = Request::from_parts(parts, Body::from(body));
        let response = self.next.clone().run(request).await;
        if response.headers().contains_key(&X_CONMAN_MISDIRECTED) {
            return Step::Moved;
        }
        Step::Answer(response)
    }

    /// The result for the generation that was to be ended, if it is not the session's any more: it
    /// has ended, one way or another, and a later one must not be ended instead.
    fn after_delete(
        &self,
        deleted: Generation,
        now: &SessionLocation,
    ) -> Option<Result<Step, ApiError>> {
        let (node, generation) = match now {
            SessionLocation::NoOwner => {
                let report = StopReport {
                    id: self.id.clone(),
                    generation: deleted,
                    state: SessionState::Stopped,
                    reason: None,
                    dead_ms: None,
                    released_ms: None,
                };
                return Some(Ok(Step::Answer(Json(report).into_response())));
            }
            SessionLocation::Here { generation } => (self.hop.map.me(), *generation),
            SessionLocation::There(owner) => (&*owner.node.name, owner.generation),
            SessionLocation::Released { node, generation }
            | SessionLocation::Lost { node, generation } => (node.as_str(), *generation),
        };
        (generation != deleted).then(|| Err(self.started_again(deleted, node)))
    }

    fn started_again(&self, deleted: Generation, node: &str) -> ApiError {
        Kind::NODE_SILENT.because(format!(
            "the node that was to end generation {deleted} of session `{}` has not confirmed it, \
             and a later one has started on node `{node}`; check before you repeat it",
            self.id
        ))
    }

    /// Calls the handler of this node; another node may start it instead.
    async fn here_or_elsewhere(&self) -> Step {
        match self.here().await {
            Step::Answer(response) if self.is_put() && wants_another(&response) => {
                Step::Elsewhere(response)
            }
            step => step,
        }
    }

    pub(super) async fn call(
        &self,
        node: &Node,
        expected: Option<ExpectedGeneration>,
    ) -> Result<Response, CallError> {
        let called = self.hop.map.call(node, &self.request, expected).await;
        called.map(|response| response.map(Body::new))
    }

    async fn there(&self, node: &Node, generation: Generation) -> Result<Step, ApiError> {
        let expected = ExpectedGeneration {
            generation,
            ended: false,
        };
        let sent = self.call(node, Some(expected)).await;
        let step = match sent {
            Err(CallError::Unanswered { why }) if self.ends() => {
                let node = Arc::clone(&node.name);
                Step::Unanswered(UnreachableNode { node, why }, generation)
            }
            sent => stepped(node, sent)?,
        };
        if matches!(step, Step::Moved) {
            let fleet = self.hop.map.fleet();
            fleet.forget_location(&self.id, generation);
        }
        Ok(step)
    }

    /// Calls the node that has ended it, which has its log; or uses its record if that node is lost.
    async fn ended_there(&self, name: &str, generation: Generation) -> Result<Step, ApiError> {
        let expected = ExpectedGeneration {
            generation,
            ended: true,
        };
        let node = self.hop.map.node(name);
        match stepped(&node, self.call(&node, Some(expected)).await)? {
            Step::Moved | Step::Unreachable(_) => self.by_record(name, generation).await,
            Step::Refused(error) => match self.by_record(name, generation).await {
                Ok(step) => Ok(step),
                Err(_) => Err(error),
            },
            answer => Ok(answer),
        }
    }
}

pub(super) fn stepped(node: &Node, called: Result<Response, CallError>) -> Result<Step, ApiError> {
    match called {
        Ok(response) => Ok(Step::Answer(response)),
        Err(CallError::Misdirected { .. }) => Ok(Step::Moved),
        Err(CallError::Unreachable { why }) => {
            let node = Arc::clone(&node.name);
            Ok(Step::Unreachable(UnreachableNode { node, why }))
        }
        Err(error @ CallError::Refused(_)) => Ok(Step::Refused(error.into())),
        Err(error @ CallError::Unanswered { .. }) => Err(error.into()),
    }
}

fn crowded(node: &UnreachableNode) -> ApiError {
    Kind::CROWDED.because(format!(
        "{}. The limit of requests that wait for unreachable nodes is met; try \
         again in a moment",
        node.why
    ))
}
