//! Sends requests to another node, and reads its answers.

use std::time::Duration;

use bytes::Bytes;
use conman_fleet::{AskError, NoAddress, PeerAddress, RefusedBy};
use conman_proto::{Problem, SessionId};
use http::{HeaderValue, Request, StatusCode};
use http_body_util::{BodyExt as _, Empty, Limited};
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};

use super::{Seeker, Was};
use crate::serve::chain;

/// Most bytes of another node's problem.
const MAX_PROBLEM_BYTES: usize = 64 * 1024;
/// Time for its body, once the head has arrived: the node's liveness is not checked then.
const PROBLEM_PATIENCE: Duration = Duration::from_secs(5);
/// The caller's name, for the other node's log.
const CALLER: HeaderValue = HeaderValue::from_static("frontend sessions");

/// Another node's answer.
pub(super) enum Said {
    Ready,
    /// The session is elsewhere.
    Elsewhere,
    Problem(Problem),
    /// It rejects this node.
    Refused(RefusedBy),
    Nothing,
}

impl Seeker {
    /// Requests a node to make the session ready.
    pub(super) async fn ask(
        &self,
        id: &SessionId,
        address: &Result<PeerAddress, NoAddress>,
        may_start: bool,
        was: &Was,
    ) -> Said {
        let from = utf8_percent_encode(&was.node, NON_ALPHANUMERIC);
        let lost = was.is_lost;
        let target = format!("/peer/sessions/{id}/ready?start={may_start}&lost={lost}&from={from}");
        self.post(id, address, target).await
    }

    pub(super) async fn post(
        &self,
        id: &SessionId,
        address: &Result<PeerAddress, NoAddress>,
        target: String,
    ) -> Said {
        let Ok(address) = address else {
            return Said::Nothing;
        };
        let request = Request::post(target)
            .header("x-conman-caller", CALLER)
            .body(Empty::<Bytes>::new());
        let Ok(request) = request else {
            return Said::Nothing;
        };
        let response = match self.map.client().ask(address, request).await {
            Ok(response) => response,
            Err(AskError::Refused(refused)) => return Said::Refused(refused),
            Err(
                error @ (AskError::Dial(_)
                | AskError::Stopped(_)
                | AskError::Silent(_)
                | AskError::Request { .. }
                | AskError::NoRoom { .. }
                | AskError::Unanswered { .. }),
            ) => {
                tracing::debug!(session = %id, error = chain(&error), "no answer from the node");
                return Said::Nothing;
            }
        };
        if response.headers().contains_key("x-conman-turned") {
            return Said::Elsewhere;
        }
        if response.status() == StatusCode::OK {
            return Said::Ready;
        }
        let body = Limited::new(response.into_body(), MAX_PROBLEM_BYTES).collect();
        let body = tokio::time::timeout(PROBLEM_PATIENCE, body).await;
        let problem = body
            .ok()
            .and_then(Result::ok)
            .and_then(|body| serde_json::from_slice(&body.to_bytes()).ok());
        problem.map_or(Said::Nothing, Said::Problem)
    }
}
