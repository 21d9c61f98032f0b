//! Kept commands: they need no client, and their output can be read later.

use axum::Json;
use axum::extract::State;
use conman_linux::Signal;
use conman_proto::{ExecId, ExecRequest, KeptExec, KeptExecList, SessionId};
use http::StatusCode;

use super::session_orders::signal_of;
use crate::ApiState;
use crate::exec_request::{self, Form};
use crate::json_body::JsonBody;
use crate::path_params::{ExecPath, SessionPath};
use crate::problem::ApiError;
use crate::query::{NoQuery, Query};

/// Start a command that is kept
///
/// It continues without attached clients, until it ends, is ended, its `timeout_ms` is over, or the session
/// ends; also while the daemon restarts. It is never slowed by clients: the last 64 KiB of its output are kept,
/// and older output is dropped and counted. A session has at most 128, of which those that have ended are
/// removed to make room, the oldest first.
#[utoipa::path(
    post, path = "/v1/sessions/{id}/execs", tag = "exec", operation_id = "start_exec",
    params(("id" = SessionId, Path, description = "The session's name.")),
    request_body(content = ExecRequest, description = "Without `stdin`."),
    responses(
        (status = 201, description = "It runs.", body = KeptExec),
        (status = 404, description = "no-such-session"),
        (status = 409, description = "not-running or too-many-terminals"),
        (status = 422, description =
            "no-such-command, no-such-user, no-such-workdir or not-supported"),
        (status = 503, description = "runtime-unavailable"),
    )
)]
pub(crate) async fn start(
    State(state): State<ApiState>,
    SessionPath(id): SessionPath,
    JsonBody(asked): JsonBody<ExecRequest>,
) -> Result<(StatusCode, Json<KeptExec>), ApiError> {
    let checked = exec_request::check(asked, Form::Kept)?;
    let kept = state.node.access().keep_exec(&id, checked.plan).await?;
    Ok((StatusCode::CREATED, Json(kept)))
}

/// List the kept commands of a session
#[utoipa::path(
    get, path = "/v1/sessions/{id}/execs", tag = "exec", operation_id = "list_execs",
    params(("id" = SessionId, Path, description = "The session's name.")),
    responses(
        (status = 200, description = "The oldest first.", body = KeptExecList),
        (status = 404, description = "no-such-session"),
        (status = 409, description = "not-running"),
        (status = 503, description = "runtime-unavailable"),
    )
)]
pub(crate) async fn list(
    State(state): State<ApiState>,
    SessionPath(id): SessionPath,
    _: NoQuery,
) -> Result<Json<KeptExecList>, ApiError> {
    let execs = state.node.access().kept_execs(&id).await?;
    Ok(Json(KeptExecList { execs }))
}

/// Show a kept command
#[utoipa::path(
    get, path = "/v1/sessions/{id}/execs/{exec}", tag = "exec", operation_id = "get_exec",
    params(
        ("id" = SessionId, Path, description = "The session's name."),
        ("exec" = ExecId, Path, description = "The command's id."),
    ),
    responses(
        (status = 200, description = "It runs, or has ended.", body = KeptExec),
        (status = 404, description = "no-such-session or no-such-exec"),
        (status = 409, description = "not-running"),
        (status = 503, description = "runtime-unavailable"),
    )
)]
pub(crate) async fn get(
    State(state): State<ApiState>,
    ExecPath(id, exec): ExecPath,
    _: NoQuery,
) -> Result<Json<KeptExec>, ApiError> {
    Ok(Json(state.node.access().kept_exec(&id, exec).await?))
}

/// Signal a kept command
///
/// Sends a signal to its first process.
#[utoipa::path(
    post, path = "/v1/sessions/{id}/execs/{exec}/signal", tag = "exec", operation_id = "signal_exec",
    params(
        ("id" = SessionId, Path, description = "The session's name."),
        ("exec" = ExecId, Path, description = "The command's id."),
        ("signal" = Option<String>, Query, description =
            "Such as `SIGINT`, `HUP` or `10`; `SIGKILL` when absent."),
    ),
    responses(
        (status = 204, description = "It is sent."),
        (status = 404, description = "no-such-session or no-such-exec"),
        (status = 409, description = "not-running or exec-ended"),
        (status = 503, description = "runtime-unavailable"),
    )
)]
pub(crate) async fn signal(
    State(state): State<ApiState>,
    ExecPath(id, exec): ExecPath,
    query: Query,
) -> Result<StatusCode, ApiError> {
    let signal = signal_of(query)?.unwrap_or(Signal::SIGKILL.into());
    state.node.access().signal_exec(&id, exec, signal).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Remove a kept command
///
/// Kills it, if it has not ended, with what it has started, and forgets it.
#[utoipa::path(
    delete, path = "/v1/sessions/{id}/execs/{exec}", tag = "exec", operation_id = "end_exec",
    params(
        ("id" = SessionId, Path, description = "The session's name."),
        ("exec" = ExecId, Path, description = "The command's id."),
    ),
    responses(
        (status = 204, description = "It is gone."),
        (status = 404, description = "no-such-session or no-such-exec"),
        (status = 409, description = "not-running"),
        (status = 503, description = "runtime-unavailable"),
    )
)]
pub(crate) async fn end(
    State(state): State<ApiState>,
    ExecPath(id, exec): ExecPath,
    _: NoQuery,
) -> Result<StatusCode, ApiError> {
    state.node.access().end_exec(&id, exec).await?;
    Ok(StatusCode::NO_CONTENT)
}
