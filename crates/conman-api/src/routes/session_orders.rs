//! Orders to a running session: pause, resume, restart, signal.

use axum::Json;
use axum::extract::{Extension, State};
use axum::response::{IntoResponse as _, Response};
use conman_auth::Caller;
use conman_linux::{Signal, SignalNumber, parse_signal};
use conman_proto::{EnsureResponse, Session, SessionId};
use http::StatusCode;

use super::sessions::{no_such_session, stopped_by};
use crate::ApiState;
use crate::path_params::SessionPath;
use crate::problem::{ApiError, IntoApiError as _, Kind};
use crate::query::{NoQuery, Query};

/// Pause a session
///
/// Its processes do not run until it is resumed, and the kernel takes back what it can of its memory. Open
/// connections stay open and stand still; the next connection, command or client of a terminal resumes it. A
/// paused session does not get `preempt_signal`. Native sessions only, on a host with cgroup v2.
#[utoipa::path(
    post, path = "/v1/sessions/{id}/pause", tag = "sessions", operation_id = "pause_session",
    params(("id" = SessionId, Path, description = "The session's name.")),
    responses(
        (status = 200, description = "It is paused.", body = Session),
        (status = 404, description = "no-such-session"),
        (status = 409, description = "not-running"),
        (status = 422, description = "not-supported"),
        (status = 503, description = "runtime-unavailable"),
    )
)]
pub(crate) async fn pause(
    State(state): State<ApiState>,
    SessionPath(id): SessionPath,
    _: NoQuery,
) -> Result<Json<Session>, ApiError> {
    state.node.access().pause(&id).await?;
    shown(&state, &id)
}

/// Resume a session
///
/// Succeeds for one that is not paused.
#[utoipa::path(
    post, path = "/v1/sessions/{id}/resume", tag = "sessions", operation_id = "resume_session",
    params(("id" = SessionId, Path, description = "The session's name.")),
    responses(
        (status = 200, description = "It runs.", body = Session),
        (status = 404, description = "no-such-session"),
        (status = 409, description = "not-running"),
        (status = 503, description = "runtime-unavailable"),
    )
)]
pub(crate) async fn resume(
    State(state): State<ApiState>,
    SessionPath(id): SessionPath,
    _: NoQuery,
) -> Result<Json<Session>, ApiError> {
    state.node.access().resume(&id).await?;
    shown(&state, &id)
}

fn shown(state: &ApiState, id: &SessionId) -> Result<Json<Session>, ApiError> {
    let session = state.node.sessions().get(id);
    session.map(Json).ok_or_else(|| no_such_session(id))
}

/// Restart a session
///
/// Stops it, if it runs, and starts it again by the same spec on the same node, in a new generation. Answers
/// once it is ready.
#[utoipa::path(
    post, path = "/v1/sessions/{id}/restart", tag = "sessions", operation_id = "restart_session",
    params(("id" = SessionId, Path, description = "The session's name.")),
    responses(
        (status = 200, description = "It runs.", body = EnsureResponse),
        (status = 404, description = "no-such-session"),
        (status = 409, description = "session-stopping or session-stuck"),
        (status = 422, description = "no-such-image or start-refused"),
        (status = 502, description = "start-failed"),
        (status = 504, description = "start-not-ready or start-timed-out"),
        (status = 503, description =
            "runtime-unavailable, registry-failed, node-full, host-full, node-preempted, node-draining, \
             node-cordoned or node-recovering; a node that takes no sessions does not stop it"),
    )
)]
pub(crate) async fn restart(
    State(state): State<ApiState>,
    SessionPath(id): SessionPath,
    Extension(caller): Extension<Caller>,
    _: NoQuery,
) -> Result<Response, ApiError> {
    let why = stopped_by(&caller);
    // A client that disconnects does not leave the session stopped.
    let restarting = tokio::spawn(async move {
        let sessions = state.node.sessions();
        let spec = sessions.spec(&id).ok_or_else(|| no_such_session(&id))?;
        // A node that would refuse the start does not stop it either.
        if let Some(refusal) = sessions.refusal() {
            return Err(refusal.into());
        }
        let report = sessions.stop_gently(&id, &why).await?;
        if !report.state.is_ended() {
            let reason = report.reason.unwrap_or_default();
            return Err(Kind::STUCK.because(format!("session `{id}`: {reason}")));
        }
        Ok(sessions.start(&id, &spec).await?)
    });
    let answer = restarting
        .await
        .map_err(|_| Kind::INTERNAL.because("the restart failed without a reason given"))??;
    Ok((StatusCode::OK, Json(answer)).into_response())
}

/// Signal a session
///
/// Sends a signal to its program. Without an init (`init = false`), the program is process 1 of its namespace
/// and gets only signals that it handles, and `SIGKILL`, which ends the session.
#[utoipa::path(
    post, path = "/v1/sessions/{id}/kill", tag = "sessions", operation_id = "signal_session",
    params(
        ("id" = SessionId, Path, description = "The session's name."),
        ("signal" = Option<String>, Query, description =
            "Such as `SIGTERM`, `HUP`, `10` or `SIGRTMIN+3`; `SIGKILL` when absent."),
    ),
    responses(
        (status = 204, description = "It is sent."),
        (status = 404, description = "no-such-session"),
        (status = 409, description = "not-running"),
    )
)]
pub(crate) async fn kill(
    State(state): State<ApiState>,
    SessionPath(id): SessionPath,
    query: Query,
) -> Result<StatusCode, ApiError> {
    let signal = signal_of(query)?.unwrap_or(Signal::SIGKILL.into());
    state.node.access().signal(&id, signal).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// The signal in a query.
pub(super) fn signal_of(mut query: Query) -> Result<Option<SignalNumber>, ApiError> {
    let signal = query.parsed("signal", |text| {
        parse_signal(text).ok_or_else(|| format!("`{text}` is not a signal, such as SIGTERM"))
    });
    query.finish()?;
    Ok(signal)
}
