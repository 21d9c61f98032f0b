//! Routes for other nodes only.

use std::convert::Infallible;

use axum::Json;
use axum::body::{Body, Bytes};
use axum::extract::Query as AxumQuery;
use axum::extract::State;
use conman_node::{Former, WithoutImage};
use conman_proto::{EventKind, Generation, SessionId, Timeline};
use futures_util::StreamExt as _;
use http::HeaderName;
use serde::{Deserialize, Serialize};

use crate::ApiState;
use crate::events::{self, EventFilter, From};
use crate::hop;
use crate::node_errors::route_error;
use crate::path_params::SessionPath;
use crate::problem::ApiError;

/// Answer of `ready` and `restart`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ready {
    /// The generation that takes requests now.
    pub generation: Generation,
}

#[derive(Debug, Deserialize)]
pub(crate) struct ReadyQuery {
    /// Whether a connection may start it.
    start: bool,
    /// Whether its former node is lost.
    lost: bool,
    /// That node.
    from: String,
}

/// Answers once a session of this node can take requests. Starts it from its record if its node
/// has given it up. The requesting node holds its clients meanwhile.
pub(crate) async fn ready(
    State(state): State<ApiState>,
    SessionPath(id): SessionPath,
    AxumQuery(asked): AxumQuery<ReadyQuery>,
) -> Result<Json<Ready>, ApiError> {
    let former = Former {
        node: Some(&asked.from),
        is_lost: asked.lost,
    };
    let route = state.node.access().revive(&id, asked.start, former).await;
    let route = route.map_err(|error| route_error(&error))?;
    let generation = route.generation;
    Ok(Json(Ready { generation }))
}

#[derive(Debug, Deserialize)]
pub(crate) struct AskedForEvents {
    after: Option<u64>,
    since_ms: u64,
    session: Option<SessionId>,
    /// Separated by commas; absent for all but phases.
    #[serde(default)]
    kinds: String,
}

/// This node's events as frames, one per line, for as long as the other node reads.
pub(crate) async fn events(
    State(state): State<ApiState>,
    AxumQuery(asked): AxumQuery<AskedForEvents>,
) -> Result<([(HeaderName, String); 1], Body), ApiError> {
    let from = From {
        after: asked.after,
        since_ms: asked.since_ms,
    };
    // Kinds of a newer node match nothing here.
    let kinds = asked.kinds.split(',').filter(|kind| !kind.is_empty());
    let kinds = kinds.map(|kind| kind.parse().unwrap_or(EventKind::Unknown));
    let filter = EventFilter {
        session: asked.session,
        kinds: kinds.collect(),
    };
    super::events::settle(&state).await;
    let frames = events::frames(state.node.journal(), from, filter).await?;
    let lines = frames
        .map(|frame| {
            // Plain data always becomes JSON, and JSON contains no line breaks.
            let mut line = serde_json::to_vec(&frame).unwrap_or_default();
            line.push(b'\n');
            Ok::<_, Infallible>(Bytes::from(line))
        })
        .take_until(state.closing.clone().cancelled_owned());
    let who = (hop::X_CONMAN_NODE, state.node.name().to_owned());
    Ok(([who], Body::from_stream(lines)))
}

#[derive(Debug, Deserialize)]
pub(crate) struct Lost {
    /// The node that it was on.
    from: String,
    /// The generation that was there.
    generation: Generation,
    /// Whether it may go to another node if this one lacks its image.
    elsewhere: bool,
}

/// Restarts a session that lost its node, if its record still says so, and answers once it runs.
pub(crate) async fn restart(
    State(state): State<ApiState>,
    SessionPath(id): SessionPath,
    AxumQuery(lost): AxumQuery<Lost>,
) -> Result<Json<Ready>, ApiError> {
    let without_image = match lost.elsewhere {
        true => WithoutImage::Refuse,
        false => WithoutImage::Try,
    };
    let restarted = state
        .node
        .sessions()
        .restart(&id, lost.generation, &lost.from, without_image);
    let generation = restarted.await?;
    Ok(Json(Ready { generation }))
}

/// This node's journal of a session; empty if there is none.
pub(crate) async fn timeline(
    State(state): State<ApiState>,
    SessionPath(id): SessionPath,
) -> Result<Json<Timeline>, ApiError> {
    super::events::settle(&state).await;
    Ok(Json(state.node.journal().timeline(&id).await?))
}
