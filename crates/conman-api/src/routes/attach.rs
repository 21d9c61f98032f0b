//! Attaching to the terminal of a session's program, and to kept commands.

use axum::extract::State;
use axum::extract::ws::WebSocketUpgrade;
use axum::extract::ws::rejection::WebSocketUpgradeRejection;
use axum::response::Response;
use conman_proto::{ATTACH_PROTOCOL, ExecId, SessionId, TerminalSize};
use conman_runtime::AttachOptions;

use crate::path_params::{ExecPath, SessionPath};
use crate::problem::ApiError;
use crate::query::Query;
use crate::web_socket::accept;
use crate::{ApiState, exec_socket};

type Upgrade = Result<WebSocketUpgrade, WebSocketUpgradeRejection>;

/// Attach to a session's terminal
///
/// A WebSocket with subprotocol `conman.attach.v1`. Every binary message is one channel byte and
/// its payload: from the client 0 (what is typed) and 4 (terminal size as JSON); from the server 6
/// (`OutputPosition` as JSON: with which offset the output continues), 5
/// (what the terminal showed last; clear the screen and show this, also when it comes again because a
/// slow client missed output), 1 (what the program writes) and last 3 (`ExecStatus` as JSON, when the
/// program has ended). Closing the connection detaches; the program continues. All attached clients
/// share one screen; its size is the latest that one of them sent.
#[utoipa::path(
    get, path = "/v1/sessions/{id}/attach", tag = "exec", operation_id = "attach",
    params(
        ("id" = SessionId, Path, description = "The session's name."),
        ("columns" = Option<u16>, Query, minimum = 1, maximum = 65_535, description =
            "The terminal gets this size; needs `rows`."),
        ("rows" = Option<u16>, Query, minimum = 1, maximum = 65_535, description =
            "Needs `columns`."),
        ("scrollback" = Option<bool>, Query, description =
            "Whether to begin with what the terminal showed last, at most 64 KiB; true when \
             absent."),
        ("after" = Option<u64>, Query, minimum = 0, description =
            "Instead, begin with this offset in the output, if it is still kept."),
    ),
    responses(
        (status = 101, description = "Attached."),
        (status = 404, description = "no-such-session"),
        (status = 409, description = "not-running, no-terminal or too-many-terminals"),
        (status = 422, description = "not-supported: the session's runtime keeps no terminals"),
        (status = 426, description = "upgrade-required"),
        (status = 503, description = "runtime-unavailable"),
    )
)]
pub(crate) async fn attach(
    State(state): State<ApiState>,
    SessionPath(id): SessionPath,
    query: Query,
    upgrade: Upgrade,
) -> Result<Response, ApiError> {
    connect(state, &id, None, query, upgrade).await
}

/// Attach to a kept command
///
/// As for a session's terminal. A command without a terminal has no screen (5): 6 comes first, then what is
/// kept of its outputs, 1 and 2, and what it writes later. 0 is its standard input, if it was started with
/// `open_stdin`; an empty message ends it for all clients. A client that missed output gets another 6, whose
/// `dropped` counts the bytes. After its end, what is kept can be read as long as the command is listed.
#[utoipa::path(
    get, path = "/v1/sessions/{id}/execs/{exec}/attach", tag = "exec", operation_id = "attach_exec",
    params(
        ("id" = SessionId, Path, description = "The session's name."),
        ("exec" = ExecId, Path, description = "The command's id."),
        ("columns" = Option<u16>, Query, minimum = 1, maximum = 65_535, description =
            "Its terminal gets this size; needs `rows`."),
        ("rows" = Option<u16>, Query, minimum = 1, maximum = 65_535, description =
            "Needs `columns`."),
        ("scrollback" = Option<bool>, Query, description =
            "Whether to begin with the output that is kept, at most 64 KiB; true when absent."),
        ("after" = Option<u64>, Query, minimum = 0, description =
            "Instead, begin with this offset in the output, as far as it is kept."),
    ),
    responses(
        (status = 101, description = "Attached."),
        (status = 404, description = "no-such-session or no-such-exec"),
        (status = 409, description = "not-running, no-terminal or too-many-terminals"),
        (status = 422, description = "not-supported: the session's runtime keeps no commands"),
        (status = 426, description = "upgrade-required"),
        (status = 503, description = "runtime-unavailable"),
    )
)]
pub(crate) async fn attach_exec(
    State(state): State<ApiState>,
    ExecPath(id, exec): ExecPath,
    query: Query,
    upgrade: Upgrade,
) -> Result<Response, ApiError> {
    connect(state, &id, Some(exec), query, upgrade).await
}

async fn connect(
    state: ApiState,
    id: &SessionId,
    exec: Option<ExecId>,
    mut query: Query,
    upgrade: Upgrade,
) -> Result<Response, ApiError> {
    let size = size(&mut query);
    let after = query.number("after", 0, u64::MAX);
    let options = AttachOptions {
        size,
        after: match query.flag("scrollback", true) {
            true => after,
            false => after.or(Some(AttachOptions::NOW)),
        },
    };
    query.finish()?;
    let upgrade = accept(upgrade, ATTACH_PROTOCOL, "")?;
    let attached = state.node.access().attach(id, exec, options).await?;
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
