//! The path of one request to its session's node.

use std::sync::Arc;

use async_trait::async_trait;
use axum::Json;
use axum::body::Body;
use axum::extract::Request;
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};
use conman_fleet::{
    BufferedRequest, CallError, EarlierAttempts, ExpectedGeneration, ForwardAttempt, ForwardStep,
    Node, NotForwarded, Policy, SessionLocation, UnreachableNode,
};
use conman_peer::headers::X_CONMAN_MISDIRECTED;
use conman_proto::{Generation, SessionId, SessionState, StopReport};
use http::Method;

use super::start_answer::wants_another;
use super::{BodyLimit, Forwarder, buffer, unanswered, unreachable};
use crate::node_errors::chain;
use crate::problem::{ApiError, IntoApiError as _, Kind};

/// A request for a session that does not run on this node, or that is to be started on some node.
pub(super) struct ForwardedRequest {
    pub(super) forwarder: Forwarder,
    pub(super) id: SessionId,
    pub(super) request: BufferedRequest,
    next: Next,
}

/// Result of an attempt.
pub(super) type Step = ForwardStep<Response, ApiError>;

impl ForwardedRequest {
    pub(super) async fn begin(
        forwarder: Forwarder,
        id: SessionId,
        (request, limit): (Request, BodyLimit),
        next: Next,
    ) -> Response {
        let request = match buffer(request, limit).await {
            Ok(request) => request,
            Err(refusal) => return refusal.into_response(),
        };
        let forwarded = Self {
            forwarder,
            id,
            request,
            next,
        };
        let (map, id) = (&forwarded.forwarder.map, &forwarded.id);
        let served = map.forward(id, forwarded.policy(), &forwarded).await;
        let mut response = served.unwrap_or_else(ApiError::into_response);
        response.headers_mut().remove(&X_CONMAN_MISDIRECTED);
        response
    }

    fn policy(&self) -> Policy {
        Policy::of(&self.request.parts.method, self.is_of_session())
    }

    pub(super) fn is_put(&self) -> bool {
        self.request.parts.method == Method::PUT
    }

    /// Whether it is about the session itself, not about something in it.
    pub(super) fn is_of_session(&self) -> bool {
        let path = self.request.parts.uri.path();
        path.strip_prefix("/v1/sessions/") == Some(self.id.as_str())
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
            SessionLocation::Here { generation } => (self.forwarder.map.me(), *generation),
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
        let called = self.forwarder.map.call(node, &self.request, expected).await;
        called.map(|response| response.map(Body::new))
    }

    async fn there(&self, node: &Node, generation: Generation) -> Result<Step, ApiError> {
        let expected = ExpectedGeneration {
            generation,
            ended: false,
        };
        let sent = self.call(node, Some(expected)).await;
        let step = match sent {
            Err(CallError::Unanswered { why }) if self.policy().is_confirmed => {
                let node = Arc::clone(&node.name);
                Step::Unanswered(UnreachableNode { node, why }, generation)
            }
            sent => stepped(node, sent)?,
        };
        if matches!(step, Step::Moved) {
            let fleet = self.forwarder.map.fleet();
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
        let node = self.forwarder.map.node(name);
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

#[async_trait]
impl ForwardAttempt for ForwardedRequest {
    type Answer = Response;
    type Error = ApiError;

    async fn attempt(&self, earlier: EarlierAttempts) -> Result<Step, ApiError> {
        let EarlierAttempts {
            must_read: mut fresh,
            unreached,
            deleted,
        } = earlier;
        if self.forwarder.node.sessions().is_live(&self.id) {
            if let Some(deleted) = deleted {
                return Err(self.started_again(deleted, self.forwarder.map.me()));
            }
            if self.is_put() {
                return Ok(self.here_or_elsewhere().await);
            }
            // A start without a generation yet has nothing to report, and another node may be first.
            self.forwarder.node.sessions().claimed(&self.id).await;
            if self.forwarder.node.sessions().owns(&self.id) {
                return Ok(self.here().await);
            }
            fresh = true;
        }
        let location = self.forwarder.map.locate(&self.id, &mut fresh).await;
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
            SessionLocation::Released { node, .. } if node == self.forwarder.map.me() => {
                Ok(self.here().await)
            }
            SessionLocation::Released { node, generation } => {
                self.ended_there(&node, generation).await
            }
            SessionLocation::Lost { node, generation } => self.by_record(&node, generation).await,
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

impl From<NotForwarded> for ApiError {
    fn from(error: NotForwarded) -> Self {
        let why = error.to_string();
        match error {
            NotForwarded::Moves { .. } => Kind::MOVES.because(why),
            NotForwarded::Crowded(_) => Kind::CROWDED.because(why),
            NotForwarded::Unreachable(_) => unreachable(&why),
            NotForwarded::Unanswered(_) => unanswered(&why),
        }
    }
}
