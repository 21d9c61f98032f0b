//! Commands inside a session: run to the end, or interactively over a WebSocket.

use std::convert::Infallible;

use axum::Json;
use axum::body::Body;
use axum::extract::ws::WebSocketUpgrade;
use axum::extract::ws::rejection::WebSocketUpgradeRejection;
use axum::extract::{Request, State};
use axum::response::{IntoResponse as _, Response};
use conman_node::AccessError;
use conman_proto::{
    EXEC_PROTOCOL, ExecRequest, ExecResult, ExecStatus, LogLine, NotRun, SessionId,
};
use conman_runtime::RuntimeError;
use futures_util::stream;
use http::header::CONTENT_TYPE;
use tokio::sync::mpsc;

use crate::exec_request::{self, Form};
use crate::json_body::{self, MAX_EXEC_BODY_BYTES};
use crate::path_params::SessionPath;
use crate::problem::ApiError;
use crate::query::Query;
use crate::web_socket::accept;
use crate::{ApiState, exec_collect, exec_socket};

/// Pieces of output that wait for a slow client before the command is slowed, each of at most 16 KiB of it.
const LINES_QUEUE: usize = 4;

/// Run a command to its end
///
/// The answer has what it printed, at most 1 MiB of each stream. With `stream`, it is sent as it comes and
/// without a bound: one `LogLine` a line, and an `ExecStatus` as the last one. A command ends when its first
/// process does; processes that it leaves behind continue, and what they print then is dropped. A command that
/// outlasts `timeout_ms`, or whose client disconnects, is killed, with the processes that it started and that did
/// not leave its session. To keep it, use `POST …/execs`.
#[utoipa::path(
    post, path = "/v1/sessions/{id}/exec", tag = "exec", operation_id = "exec",
    params(
        ("id" = SessionId, Path, description = "The session's name."),
        ("stream" = Option<bool>, Query, description =
            "Send the output while the command runs; a slow client slows it."),
    ),
    request_body = ExecRequest,
    responses(
        (status = 200, description = "It ended; with `stream`, it has begun.", content(
            (ExecResult = "application/json"),
            (LogLine = "application/x-ndjson"),
        )),
        (status = 404, description = "no-such-session"),
        (status = 409, description = "not-running"),
        (status = 422, description = "no-such-command, no-such-user or no-such-workdir"),
        (status = 502, description = "exec-failed"),
        (status = 503, description = "runtime-unavailable"),
        (status = 504, description = "exec-timed-out"),
    )
)]
pub(crate) async fn exec(
    State(state): State<ApiState>,
    SessionPath(id): SessionPath,
    mut query: Query,
    request: Request,
) -> Result<Response, ApiError> {
    let streams = query.flag("stream", false);
    query.finish()?;
    let asked: ExecRequest = json_body::read(request, MAX_EXEC_BODY_BYTES).await?;
    let checked = exec_request::check(asked, Form::Json)?;
    let io = state.node.access().exec(&id, checked.plan).await?;
    if streams {
        let (to, lines) = mpsc::channel(LINES_QUEUE);
        let run = exec_collect::run_with_lines(io, checked.stdin, checked.timeout, to);
        tokio::spawn(run);
        let lines = stream::unfold(lines, |mut lines| async move {
            let some = lines.recv().await?;
            Some((Ok::<_, Infallible>(some), lines))
        });
        let body = Body::from_stream(lines);
        return Ok(([(CONTENT_TYPE, "application/x-ndjson")], body).into_response());
    }
    // A client that leaves cancels this, which ends the command.
    let result = exec_collect::run_to_end(io, checked.stdin, checked.timeout).await?;
    Ok(Json(result).into_response())
}

/// Run a command interactively
///
/// A WebSocket with subprotocol `conman.exec.v1`. Every binary message is one channel byte and
/// its payload: from the client 0 (standard input, empty for its end) and 4 (terminal size as
/// JSON); from the server 1 (standard output), 2 (standard error) and last 3 (`ExecStatus` as
/// JSON). A command that outlasts `timeout_ms` is killed, and the status says so. A client that disconnects ends
/// the command: its terminal hangs up, and without one it is killed.
#[utoipa::path(
    get, path = "/v1/sessions/{id}/exec", tag = "exec", operation_id = "exec_interactive",
    params(
        ("id" = SessionId, Path, description = "The session's name."),
        ("request" = ExecRequest, Query, description =
            "An `ExecRequest` as JSON, without `stdin`."),
    ),
    responses(
        (status = 101, description = "The command runs."),
        (status = 404, description = "no-such-session"),
        (status = 409, description = "not-running"),
        (status = 422, description = "bad-body: a mistake within `request`"),
        (status = 426, description = "upgrade-required"),
        (status = 503, description = "runtime-unavailable"),
    )
)]
pub(crate) async fn exec_interactive(
    State(state): State<ApiState>,
    SessionPath(id): SessionPath,
    mut query: Query,
    upgrade: Result<WebSocketUpgrade, WebSocketUpgradeRejection>,
) -> Result<Response, ApiError> {
    let asked = query.one("request");
    if asked.is_none() {
        query.mistake("request", "is required: an ExecRequest as JSON");
    }
    query.finish()?;
    let asked: ExecRequest = json_body::parse(asked.unwrap_or_default().as_bytes())?;
    let checked = exec_request::check(asked, Form::Interactive)?;
    let limit = checked.plan.timeout;
    let upgrade = accept(upgrade, EXEC_PROTOCOL, ", or POST")?;
    match state.node.access().exec(&id, checked.plan).await {
        Ok(io) => Ok(upgrade.on_upgrade(move |socket| {
            exec_socket::converse(socket, io, limit, state.closing.clone())
        })),
        // As in a shell: the terminal was set up, and the command's status is 126 or 127.
        Err(error) if let Some(status) = no_such_command(&error) => {
            Ok(upgrade.on_upgrade(move |socket| exec_socket::report(socket, status)))
        }
        Err(error) => Err(error.into()),
    }
}

fn no_such_command(error: &AccessError) -> Option<ExecStatus> {
    match error {
        AccessError::Runtime { source, .. } => match source {
            RuntimeError::NoSuchCommand { exit_code, .. } => Some(ExecStatus {
                exit_code: Some(*exit_code),
                error: Some(source.to_string()),
                not_run: Some(NotRun::NoSuchCommand),
                ..ExecStatus::default()
            }),
            _ => None,
        },
        _ => None,
    }
}
