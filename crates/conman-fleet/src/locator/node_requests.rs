//! Requests to another node about one session, on behalf of the clients that wait for it.

use std::time::Duration;

use bytes::Bytes;
use conman_core::error_chain;
use conman_proto::{Problem, SessionId};
use http::{HeaderValue, Request, StatusCode};
use http_body_util::{BodyExt as _, Empty, Limited};
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};

use super::{FormerNode, Locator};
use crate::{AskError, Attempt, LocateError};

/// Most bytes of another node's problem.
const MAX_PROBLEM_BYTES: usize = 64 * 1024;
/// Time for its body, once the head has arrived: the node's liveness is not checked then.
const PROBLEM_TIMEOUT: Duration = Duration::from_secs(5);
/// The caller's name, for the other node's log.
const CALLER: HeaderValue = HeaderValue::from_static("frontend sessions");

/// A node's answer to the request to start a session, or to make it ready.
#[derive(Debug)]
pub(super) enum NodeAnswer {
    Ready,
    /// The session is elsewhere.
    Elsewhere,
    Failed(LocateError),
}

impl NodeAnswer {
    /// The answer as an attempt to start the session for a connection.
    pub(super) fn into_attempt(self) -> Attempt<Result<(), LocateError>> {
        match self {
            // If another node was first, the next look-up finds it.
            Self::Ready | Self::Elsewhere => Attempt::Final(Ok(())),
            Self::Failed(error) => match error.missing() {
                Some(missing) => Attempt::Failed(missing, Err(error)),
                None => Attempt::Final(Err(error)),
            },
        }
    }
}

impl Locator {
    /// Requests another node to make the session ready.
    pub(super) async fn request_ready(
        &self,
        id: &SessionId,
        node: &str,
        may_start: bool,
        former: &FormerNode,
    ) -> NodeAnswer {
        let from = utf8_percent_encode(&former.name, NON_ALPHANUMERIC);
        let lost = former.is_lost;
        let target = format!("/peer/sessions/{id}/ready?start={may_start}&lost={lost}&from={from}");
        self.post(id, node, target).await
    }

    pub(super) async fn post(&self, id: &SessionId, node: &str, target: String) -> NodeAnswer {
        let failed = |error| NodeAnswer::Failed(error);
        let no_answer = || {
            failed(LocateError::NoAnswer {
                node: node.to_owned(),
            })
        };
        let address = match self.map.node(node).address {
            Ok(address) => address,
            Err(why) => return failed(LocateError::Unreachable(why)),
        };
        let request = Request::post(target)
            .header("x-conman-caller", CALLER)
            .body(Empty::<Bytes>::new());
        let Ok(request) = request else {
            return no_answer();
        };
        let response = match self.map.client().ask(&address, request).await {
            Ok(response) => response,
            Err(AskError::Refused(refused)) => return failed(LocateError::Refused(refused)),
            Err(
                error @ (AskError::Dial(_)
                | AskError::Stopped(_)
                | AskError::Silent(_)
                | AskError::Request { .. }
                | AskError::NoRoom { .. }
                | AskError::Unanswered { .. }),
            ) => {
                let error = error_chain(&error);
                tracing::debug!(session = %id, error, "no answer from the node");
                return no_answer();
            }
        };
        if response.headers().contains_key("x-conman-turned") {
            return NodeAnswer::Elsewhere;
        }
        if response.status() == StatusCode::OK {
            return NodeAnswer::Ready;
        }
        let body = Limited::new(response.into_body(), MAX_PROBLEM_BYTES).collect();
        let body = tokio::time::timeout(PROBLEM_TIMEOUT, body).await;
        let problem: Option<Problem> = body
            .ok()
            .and_then(Result::ok)
            .and_then(|body| serde_json::from_slice(&body.to_bytes()).ok());
        match problem {
            Some(problem) => failed(LocateError::Answered {
                node: node.to_owned(),
                problem: Box::new(problem),
            }),
            None => no_answer(),
        }
    }
}
