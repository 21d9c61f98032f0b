//! Links that connect running sessions to interfaces of their nodes.

use axum::Json;
use axum::extract::State;
use conman_proto::{LinkRequest, SessionId, SessionLink, SessionLinkList};
use http::StatusCode;

use crate::ApiState;
use crate::json_body::JsonBody;
use crate::path_params::{LinkPath, SessionPath};
use crate::problem::ApiError;
use crate::query::NoQuery;

/// List a session's attached links
#[utoipa::path(
    get, path = "/v1/sessions/{id}/links", tag = "sessions", operation_id = "list_links",
    params(("id" = SessionId, Path, description = "The session's name.")),
    responses(
        (status = 200, description = "Its links, without those that it began with.", body = SessionLinkList),
        (status = 404, description = "no-such-session"),
        (status = 409, description = "not-running"),
    )
)]
pub(crate) async fn list(
    State(state): State<ApiState>,
    SessionPath(id): SessionPath,
    _: NoQuery,
) -> Result<Json<SessionLinkList>, ApiError> {
    let links = state.node.access().links(&id).await?;
    Ok(Json(SessionLinkList { links }))
}

/// Attach a link to a session
///
/// Gives the running session an interface on one of its node's interfaces or bridges, with addresses and
/// routes. It disappears with the session's container, and when it is detached.
#[utoipa::path(
    post, path = "/v1/sessions/{id}/links", tag = "sessions", operation_id = "attach_link",
    params(("id" = SessionId, Path, description = "The session's name.")),
    request_body = LinkRequest,
    responses(
        (status = 201, description = "It is attached.", body = SessionLink),
        (status = 404, description = "no-such-session"),
        (status = 409, description = "not-running"),
        (status = 422, description = "bad-body, link-refused or not-supported"),
    )
)]
pub(crate) async fn attach(
    State(state): State<ApiState>,
    SessionPath(id): SessionPath,
    JsonBody(link): JsonBody<LinkRequest>,
) -> Result<(StatusCode, Json<SessionLink>), ApiError> {
    let attached = state.node.access().attach_link(&id, &link).await?;
    Ok((StatusCode::CREATED, Json(attached)))
}

/// Detach a link from a session
#[utoipa::path(
    delete, path = "/v1/sessions/{id}/links/{name}", tag = "sessions", operation_id = "detach_link",
    params(
        ("id" = SessionId, Path, description = "The session's name."),
        ("name" = String, Path, description = "The interface's name in the session."),
    ),
    responses(
        (status = 204, description = "It is gone."),
        (status = 404, description = "no-such-session or no-such-link"),
        (status = 409, description = "not-running"),
    )
)]
pub(crate) async fn detach(
    State(state): State<ApiState>,
    LinkPath(id, name): LinkPath,
    _: NoQuery,
) -> Result<StatusCode, ApiError> {
    state.node.access().detach_link(&id, name.into()).await?;
    Ok(StatusCode::NO_CONTENT)
}
