//! Kept terminals: of a session's program, and of commands in it.

use axum::Json;
use axum::extract::ws::WebSocketUpgrade;
use axum::extract::ws::rejection::WebSocketUpgradeRejection;
use axum::extract::{Request, State};
use axum::response::Response;
use conman_proto::{
    ATTACH_PROTOCOL, ExecId, ExecRequest, KeptExec, KeptExecList, SessionId, TerminalSize,
};
use conman_runtime::AttachOptions;
use http::{StatusCode, Uri};

use super::exec::accept;
use crate::exec_request::{self, Form};
use crate::json_body::{self, MAX_BODY_BYTES};
use crate::path_params::{ExecPath, SessionPath};
use crate::problem::ApiError;
use crate::query::Query;
use crate::{ApiState, exec_socket};

/// Attach to a terminal
///
/// A WebSocket with subprotocol `conman.attach.v1`. Every binary message is one channel byte and
/// its payload: from the client 0 (what is typed) and 4 (terminal size as JSON); from the server 5
/// (what the terminal showed last; clear the screen and show this, also when it comes again because a
/// slow client missed output), 1 (what the program writes) and last 3 (`ExecStatus` as JSON, when the
/// program has ended). Closing the connection detaches; the program continues. All attached clients
/// share one screen; its size is the latest that one of them sent.
#[utoipa::path(
    get, path = "/v1/sessions/{id}/attach", tag = "exec", operation_id = "attach",
    params(
        ("id" = SessionId, Path, description = "The session's name."),
        ("exec" = Option<ExecId>, Query, description =
            "A kept command's terminal instead of that of the session's program."),
        ("columns" = Option<u16>, Query, minimum = 1, maximum = 65_535, description =
            "The terminal gets this size; needs `rows`."),
        ("rows" = Option<u16>, Query, minimum = 1, maximum = 65_535, description =
            "Needs `columns`."),
        ("scrollback" = Option<bool>, Query, description =
            "Whether to begin with what the terminal showed last, at most 64 KiB; true when \
             absent."),
    ),
    responses(
        (status = 101, description = "Attached."),
        (status = 404, description = "no-such-session or no-such-exec"),
        (status = 409, description = "not-running, no-terminal or too-many-terminals"),
        (status = 422, description = "not-supported: the session's runtime keeps no terminals"),
        (status = 426, description = "upgrade-required"),
        (status = 503, description = "runtime-unavailable"),
    )
)]
pub(crate) async fn attach(
    State(state): State<ApiState>,
    SessionPath(id): SessionPath,
    uri: Uri,
    upgrade: Result<WebSocketUpgrade, WebSocketUpgradeRejection>,
) -> Result<Response, ApiError> {
    let mut query = Query::of(&uri);
    let exec = query.parsed("exec", str::parse::<ExecId>);
    let options = AttachOptions {
        size: size(&mut query),
        scrollback: query.flag("scrollback", true),
    };
    query.finish()?;
    let upgrade = accept(upgrade, ATTACH_PROTOCOL, "")?;
    let attached = state.node.access().attach(&id, exec, options).await?;
    Ok(upgrade
        .on_upgrade(move |socket| exec_socket::watch(socket, attached, state.closing.clone())))
}

/// Both dimensions or none.
fn size(query: &mut Query) -> Option<TerminalSize> {
    match (query.has("columns"), query.has("rows")) {
        (true, false) => query.mistake("rows", "is required with `columns`"),
        (false, true) => query.mistake("columns", "is required with `rows`"),
        _ => {}
    }
    let mut measure = |name| {
        let number = query.number(name, 1, u16::MAX.into());
        number.and_then(|number| u16::try_from(number).ok())
    };
    let (columns, rows) = (measure("columns"), measure("rows"));
    Some(TerminalSize {
        columns: columns?,
        rows: rows?,
    })
}

/// Run a command in a kept terminal
///
/// The command continues without attached clients, until it ends, is ended, or the session ends. A
/// session has at most 16; ended ones are removed to make room.
#[utoipa::path(
    post, path = "/v1/sessions/{id}/execs", tag = "exec", operation_id = "keep_exec",
    params(("id" = SessionId, Path, description = "The session's name.")),
    request_body(content = ExecRequest, description =
        "With `tty`, and without `stdin` and `timeout_ms`."),
    responses(
        (status = 201, description = "It runs.", body = KeptExec),
        (status = 404, description = "no-such-session"),
        (status = 409, description = "not-running or too-many-terminals"),
        (status = 422, description = "no-such-command or not-supported"),
        (status = 503, description = "runtime-unavailable"),
    )
)]
pub(crate) async fn keep(
    State(state): State<ApiState>,
    SessionPath(id): SessionPath,
    uri: Uri,
    request: Request,
) -> Result<(StatusCode, Json<KeptExec>), ApiError> {
    Query::of(&uri).finish()?;
    let asked: ExecRequest = json_body::read(request, MAX_BODY_BYTES).await?;
    let checked = exec_request::check(asked, Form::Kept)?;
    let kept = state.node.access().keep_exec(&id, checked.plan).await?;
    Ok((StatusCode::CREATED, Json(kept)))
}

/// List the commands whose terminals are kept
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
    uri: Uri,
) -> Result<Json<KeptExecList>, ApiError> {
    Query::of(&uri).finish()?;
    let execs = state.node.access().kept_execs(&id).await?;
    Ok(Json(KeptExecList { execs }))
}

/// End a command whose terminal is kept
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
    uri: Uri,
) -> Result<StatusCode, ApiError> {
    Query::of(&uri).finish()?;
    state.node.access().end_exec(&id, exec).await?;
    Ok(StatusCode::NO_CONTENT)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The size, or which parameters are wrong.
    fn size_of(text: &str) -> Result<Option<TerminalSize>, Vec<String>> {
        let mut query = Query::of(&format!("/x?{text}").parse().expect("a URI"));
        let size = size(&mut query);
        let wrong = |error: ApiError| {
            let errors = error.problem().errors.iter();
            errors.map(|error| error.field.clone()).collect()
        };
        query.finish().map(|()| size).map_err(wrong)
    }

    #[test]
    fn a_size_has_both_measures_and_each_mistake_is_told_once() {
        let columns = 80;
        assert_eq!(size_of(""), Ok(None));
        let both = Some(TerminalSize { columns, rows: 24 });
        assert_eq!(size_of("columns=80&rows=24"), Ok(both));
        for (text, wrong) in [
            ("columns=80", "rows"),
            ("rows=24", "columns"),
            ("columns=0&rows=5", "columns"),
            ("columns=80&rows=x", "rows"),
        ] {
            assert_eq!(size_of(text), Err(vec![wrong.to_owned()]), "{text}");
        }
    }
}
