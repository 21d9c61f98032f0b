//! Which answers leave a start to another node.

use axum::body::{Body, to_bytes};
use axum::response::Response;
use conman_proto::Problem;
use http::StatusCode;

use super::unanswered;
use crate::node_errors::chain;
use crate::problem::ApiError;

/// Bytes of a problem that another node answers with.
const MAX_PROBLEM_BYTES: usize = 64 * 1024;

/// How it may come about that a node starts what it did not start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Hope {
    /// By another configuration.
    Runtime,
    /// By an image that is brought to it.
    Image,
    /// Once it takes requests of this node's.
    Repair,
    /// By itself: it has no room, or cannot be reached.
    Room,
}

/// Whether a node has no room, or not the image, as it knows of this one, so that the next may be
/// asked.
pub(super) fn wants_another(response: &Response) -> bool {
    let problem = response.extensions().get::<Problem>();
    if response.status() != StatusCode::SERVICE_UNAVAILABLE {
        return problem.and_then(for_want_of) == Some(Hope::Image);
    }
    // Of another node only the status is looked at: none of them has started anything.
    problem.is_none_or(|problem| {
        [
            "node-full",
            "host-full",
            "node-preempted",
            "node-draining",
            "shutting-down",
        ]
        .contains(&problem.slug())
    })
}

fn for_want_of(problem: &Problem) -> Option<Hope> {
    match problem.slug() {
        "no-such-runtime" => Some(Hope::Runtime),
        "no-such-image" => Some(Hope::Image),
        _ => None,
    }
}

/// Whether a node, this one or another, has not started it for want of its image or runtime, and of
/// which. Reads the answer where its status leaves that open.
pub(super) async fn lacks(response: Response) -> Result<(Response, Option<Hope>), ApiError> {
    if response.status() != StatusCode::UNPROCESSABLE_ENTITY {
        return Ok((response, None));
    }
    if let Some(problem) = response.extensions().get::<Problem>() {
        let lacks = for_want_of(problem);
        return Ok((response, lacks));
    }
    let (parts, body) = response.into_parts();
    let body = to_bytes(body, MAX_PROBLEM_BYTES).await;
    let body = body.map_err(|error| unanswered(&chain(&error)))?;
    let problem: Option<Problem> = serde_json::from_slice(&body).ok();
    let lacks = problem.as_ref().and_then(for_want_of);
    Ok((Response::from_parts(parts, Body::from(body)), lacks))
}
