//! What only other nodes ask.

use axum::Json;
use axum::extract::Query as AxumQuery;
use axum::extract::State;
use conman_proto::Generation;
use serde::{Deserialize, Serialize};

use crate::ApiState;
use crate::node_errors::route_error;
use crate::path_params::SessionPath;
use crate::problem::ApiError;

/// Where a node asks another to have a session ready.
pub(crate) const READY: &str = "/peer/sessions/{id}/ready";

/// Answer of `ready`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ready {
    /// The generation that takes requests now.
    pub generation: Generation,
}

#[derive(Debug, Deserialize)]
pub(crate) struct Asked {
    /// Whether a connection may start it.
    start: bool,
    /// Whether its former node is gone.
    lost: bool,
}

/// Answers once a session of this node can take requests, and starts it by its record where its
/// node has given it up. The node that asks holds its clients meanwhile.
pub(crate) async fn ready(
    State(state): State<ApiState>,
    SessionPath(id): SessionPath,
    AxumQuery(asked): AxumQuery<Asked>,
) -> Result<Json<Ready>, ApiError> {
    let route = state.node.revive(&id, asked.start, asked.lost).await;
    let route = route.map_err(|error| route_error(&error))?;
    let generation = route.generation;
    Ok(Json(Ready { generation }))
}
