//! Requests to another node about one session, on behalf of the clients that wait for it.

use conman_auth::{Caller, CallerOrigin, Scope};
use conman_proto::Problem;
use http::{Method, StatusCode};

use super::Locator;
use crate::remote_body::read_json;
use crate::{Attempt, BufferedRequest, CallError, LocateError};

/// Most bytes of another node's problem.
const MAX_PROBLEM_BYTES: usize = 64 * 1024;

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
    /// Posts a request of [`crate::node_api`] to another node.
    pub(super) async fn post(&self, node: &str, target: String) -> NodeAnswer {
        let no_answer = || LocateError::NoAnswer {
            node: node.to_owned(),
        };
        let Ok(target) = target.parse() else {
            return NodeAnswer::Failed(no_answer());
        };
        // For the other node's log.
        let caller = Caller {
            name: "sessions".to_owned(),
            scope: Scope::Frontend,
            origin: CallerOrigin::Peer,
        };
        let request = BufferedRequest::new(Method::POST, target, caller);
        let called = self.map.call(&self.map.node(node), &request, None).await;
        let error = match called {
            Ok(response) if response.status() == StatusCode::OK => return NodeAnswer::Ready,
            Ok(response) => {
                match read_json::<Problem, _>(response.into_body(), MAX_PROBLEM_BYTES).await {
                    Ok(problem) => LocateError::Answered {
                        node: node.to_owned(),
                        problem: Box::new(problem),
                    },
                    Err(_) => no_answer(),
                }
            }
            Err(CallError::Misdirected { .. }) => return NodeAnswer::Elsewhere,
            Err(CallError::Refused(refused)) => LocateError::Refused(refused),
            Err(error @ (CallError::Unreachable { .. } | CallError::Unanswered { .. })) => {
                tracing::debug!(node, %error, "no answer from the node");
                no_answer()
            }
        };
        NodeAnswer::Failed(error)
    }
}
