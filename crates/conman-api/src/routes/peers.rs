//! Routes for other nodes only.

use axum::Json;
use axum::extract::Query as AxumQuery;
use axum::extract::State;
use conman_node::{Former, WithoutImage};
use conman_proto::{EventPage, Generation, Timeline};
use http::HeaderName;
use serde::{Deserialize, Serialize};

use crate::ApiState;
use crate::events::{self, PageRequest};
use crate::forwarding;
use crate::node_errors::{chain, route_error};
use crate::path_params::SessionPath;
use crate::problem::{ApiError, IntoApiError as _, Kind};

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
pub(crate) struct EventsQuery {
    /// A [`PageRequest`] as JSON.
    page: String,
}

/// A page of this node's events.
pub(crate) async fn events(
    State(state): State<ApiState>,
    AxumQuery(query): AxumQuery<EventsQuery>,
) -> Result<([(HeaderName, String); 1], Json<EventPage>), ApiError> {
    let request: PageRequest = serde_json::from_str(&query.page)
        .map_err(|error| Kind::BAD_QUERY.because(chain(&error)))?;
    if state.closing.is_cancelled() {
        // Without a wait, the other node would repeat an empty page at once.
        return Err(Kind::SHUTTING_DOWN.because("the daemon stops"));
    }
    if !request.waits {
        super::events::settle(&state).await;
    }
    let page = events::awaited_page(state.node.journal(), &request, &state.closing).await?;
    let who = (forwarding::X_CONMAN_NODE, state.node.name().to_owned());
    Ok(([who], Json(page)))
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
