//! New sessions with a generated name, and changes of sessions that run.

use std::time::Duration;

use axum::Json;
use axum::extract::{Extension, Request, State};
use axum::response::Response;
use conman_proto::{EnsureResponse, FieldError, Session, SessionId, SessionPatch, SessionRequest};
use serde_json::{Map, Value};
use tokio::time::timeout;

use super::sessions::{NodeLabel, ensure_as};
use crate::ApiState;
use crate::json_body::{self, MAX_BODY_BYTES};
use crate::path_params::SessionPath;
use crate::problem::{ApiError, IntoApiError as _, Kind};
use crate::query::{NoQuery, Query};

/// How long a change may take to be recorded, before its caller is answered.
const PATCH_TIMEOUT: Duration = Duration::from_secs(30);

/// Start a session with a generated name
///
/// Like a PUT with a new name, which has no dash.
#[utoipa::path(
    post, path = "/v1/sessions", tag = "sessions", operation_id = "create_session",
    params(
        ("wait" = Option<bool>, Query, description =
            "Answer once the session is ready (the default), or at once."),
        ("node_label" = inline(Option<Vec<NodeLabel>>), Query, max_items = 16, description =
            "Only on a node with this label, as `key=value`; repeated: with all of them. Added to \
             the spec's `node_labels`."),
    ),
    request_body = SessionRequest,
    responses(
        (status = 201, description = "It runs.", body = EnsureResponse,
            headers(("Location" = String, description = "Its path."))),
        (status = 202, description = "It is starting; only with `wait=false`.",
            body = EnsureResponse, headers(("Location" = String, description = "Its path."))),
        (status = 409, description = "session-stopping"),
        (status = 422, description = "bad-spec, no-such-image or start-refused"),
        (status = 502, description = "start-failed"),
        (status = 504, description = "start-not-ready or start-timed-out"),
        (status = 503, description =
            "runtime-unavailable, registry-failed, node-full, host-full, node-preempted, \
             node-recovering, no-node, node-unreachable or session-moves"),
    )
)]
pub(crate) async fn create(
    State(state): State<ApiState>,
    Extension(id): Extension<SessionId>,
    query: Query,
    request: Request,
) -> Result<Response, ApiError> {
    ensure_as(&state, &id, query, request).await
}

/// Change a session while it runs
///
/// Its labels, its idle timeout, its ports and its end; nothing else of it can change. Durable: the change applies
/// on every node that starts it again later, too.
#[utoipa::path(
    patch, path = "/v1/sessions/{id}", tag = "sessions", operation_id = "update_session",
    params(("id" = SessionId, Path, description = "The session's name.")),
    request_body = SessionPatch,
    responses(
        (status = 200, description = "It is changed.", body = Session),
        (status = 404, description = "no-such-session"),
        (status = 409, description = "not-running"),
        (status = 503, description = "registry-failed, node-unreachable or session-moves"),
    )
)]
pub(crate) async fn update(
    State(state): State<ApiState>,
    SessionPath(id): SessionPath,
    _: NoQuery,
    request: Request,
) -> Result<Json<Session>, ApiError> {
    let patch = json_body::read::<SessionPatch>(request, MAX_BODY_BYTES).await;
    let patch = patch.map_err(name_fixed_fields)?;
    // A client that disconnects does not leave it recorded and without effect.
    let patching = tokio::spawn(async move { state.node.sessions().patch(&id, &patch).await });
    let patched = timeout(PATCH_TIMEOUT, patching).await;
    let patched = patched.map_err(|_| {
        Kind::NO_REGISTRY.because(format!(
            "the change was not recorded within {} s; GET the session to see whether it is",
            PATCH_TIMEOUT.as_secs()
        ))
    })?;
    let patched = patched.map_err(|_| Kind::INTERNAL.because("the change was interrupted"))?;
    Ok(Json(patched?))
}

/// Says of a field that a session has and that cannot change what to do instead.
fn name_fixed_fields(error: ApiError) -> ApiError {
    let mut problem = error.into_problem();
    for FieldError { field, message } in &mut problem.errors {
        let null = Map::from_iter([(field.clone(), Value::Null)]);
        let is_known = serde_json::from_value::<SessionRequest>(Value::Object(null)).is_ok();
        if is_known && !["labels", "idle_timeout_s", "ports"].contains(&field.as_str()) {
            *message = "cannot change while the session runs; DELETE it, then PUT it with the new \
                value. labels, idle_timeout_s, ports and expires_at can change"
                .to_owned();
        }
    }
    match problem.errors.is_empty() {
        true => Box::new(problem).into(),
        false => Kind::BAD_BODY.with_fields(problem.errors),
    }
}
