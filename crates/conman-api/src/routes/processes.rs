//! The processes of a session.

use axum::Json;
use axum::extract::State;
use conman_proto::{ProcessList, SessionId};

use crate::ApiState;
use crate::path_params::SessionPath;
use crate::problem::ApiError;
use crate::query::NoQuery;

/// List the processes of a session
///
/// With what each of them uses, read for this request. The commands of conman in it are among them.
#[utoipa::path(
    get, path = "/v1/sessions/{id}/processes", tag = "sessions", operation_id = "list_processes",
    params(("id" = SessionId, Path, description = "The session's name.")),
    responses(
        (status = 200, description = "Its processes.", body = ProcessList),
        (status = 404, description = "no-such-session"),
        (status = 409, description = "not-running"),
        (status = 503, description = "runtime-unavailable"),
    )
)]
pub(crate) async fn list(
    State(state): State<ApiState>,
    SessionPath(id): SessionPath,
    _: NoQuery,
) -> Result<Json<ProcessList>, ApiError> {
    Ok(Json(state.node.access().processes(&id).await?))
}
