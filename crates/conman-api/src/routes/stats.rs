//! What sessions use.

use std::io;
use std::time::Duration;

use axum::Json;
use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::response::{IntoResponse as _, Response};
use conman_proto::{SessionId, SessionStats, StatsList};
use futures_util::{StreamExt as _, stream};
use http::header::CONTENT_TYPE;

use crate::ApiState;
use crate::path_params::{OwnNode, SessionPath};
use crate::problem::ApiError;
use crate::query::Query;

/// Interval of a stream.
const INTERVAL: Duration = Duration::from_secs(1);

/// Show what a session uses
///
/// It is read for this request; nothing is measured while nobody asks.
#[utoipa::path(
    get, path = "/v1/sessions/{id}/stats", tag = "sessions", operation_id = "get_stats",
    params(
        ("id" = SessionId, Path, description = "The session's name."),
        ("stream" = Option<bool>, Query, description =
            "One object a line, each second, until the session ends."),
    ),
    responses(
        (status = 200, description = "What it uses.", content(
            (SessionStats = "application/json"),
            (SessionStats = "application/x-ndjson"),
        )),
        (status = 404, description = "no-such-session"),
        (status = 409, description = "not-running"),
        (status = 503, description = "runtime-unavailable"),
    )
)]
pub(crate) async fn session(
    State(state): State<ApiState>,
    SessionPath(id): SessionPath,
    mut query: Query,
) -> Result<Response, ApiError> {
    let streams = query.flag("stream", false);
    query.finish()?;
    let first = state.node.access().stats(&id).await?;
    if !streams {
        return Ok(Json(first).into_response());
    }
    let closing = state.closing.clone().cancelled_owned();
    let later = stream::unfold((state, id), |(state, id)| async move {
        tokio::time::sleep(INTERVAL).await;
        let next = state.node.access().stats(&id).await.ok()?;
        Some((next, (state, id)))
    });
    let lines = stream::iter([first]).chain(later).map(|stats| line(&stats));
    let body = Body::from_stream(lines.take_until(closing));
    Ok(([(CONTENT_TYPE, "application/x-ndjson")], body).into_response())
}

fn line(stats: &SessionStats) -> io::Result<Bytes> {
    let mut line = serde_json::to_vec(stats)?;
    line.push(b'\n');
    Ok(line.into())
}

/// Show what a node's sessions use
///
/// It is read for this request; nothing is measured while nobody asks.
#[utoipa::path(
    get, path = "/v1/nodes/{id}/stats", tag = "nodes", operation_id = "get_node_stats",
    params(("id" = String, Path, description = "The node's name, or `self`.")),
    responses(
        (status = 200, description = "The node's running sessions.", body = StatsList),
        (status = 404, description = "no-such-node"),
    )
)]
pub(crate) async fn node(
    State(state): State<ApiState>,
    _: OwnNode,
) -> Result<Json<StatsList>, ApiError> {
    let sessions = state.node.access().all_stats().await;
    Ok(Json(StatsList { sessions }))
}
