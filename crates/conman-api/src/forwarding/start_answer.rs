//! Decides which answers leave a start to another node.

use axum::body::{Body, to_bytes};
use axum::response::Response;
use conman_fleet::Missing;
use conman_proto::Problem;
use http::StatusCode;

use super::unanswered;
use crate::node_errors::chain;
use crate::problem::ApiError;

/// Most bytes of another node's problem.
const MAX_PROBLEM_BYTES: usize = 64 * 1024;

/// Whether a node has no room or, as far as this node knows, lacks the image, so that the next
/// one may be asked.
pub(super) fn wants_another(response: &Response) -> bool {
    let problem = response.extensions().get::<Problem>();
    if response.status() != StatusCode::SERVICE_UNAVAILABLE {
        return problem.and_then(Missing::of) == Some(Missing::Image);
    }
    // Of another node only the status counts: none of them has started anything.
    problem.is_none_or(|problem| {
        [
            "node-full",
            "host-full",
            "node-preempted",
            "node-draining",
            "node-cordoned",
            "shutting-down",
        ]
        .contains(&problem.slug())
    })
}

/// Whether a node, this one or another, lacks the session's image or runtime, and which. Reads
/// the answer if its status does not decide it.
pub(super) async fn lacks(response: Response) -> Result<(Response, Option<Missing>), ApiError> {
    if response.status() != StatusCode::UNPROCESSABLE_ENTITY {
        return Ok((response, None));
    }
    if let Some(problem) = response.extensions().get::<Problem>() {
        let lacks = Missing::of(problem);
        return Ok((response, lacks));
    }
    let (parts, body) = response.into_parts();
    let body = to_bytes(body, MAX_PROBLEM_BYTES).await;
    let body = body.map_err(|error| unanswered(&chain(&error)))?;
    let problem: Option<Problem> = serde_json::from_slice(&body).ok();
    let lacks = problem.as_ref().and_then(Missing::of);
    Ok((Response::from_parts(parts, Body::from(body)), lacks))
}
