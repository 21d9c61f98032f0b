//! Files in a session: list, make directories, move, remove.

use axum::extract::State;
use axum::response::{IntoResponse as _, Response};
use conman_proto::{FileList, MakeDirectoryRequest, MoveRequest, SessionId};
use conman_runtime::{FilesOrder, FilesReply};
use http::header::CONTENT_TYPE;
use http::{HeaderValue, StatusCode};

use super::files::{Target, begin, checked_path, checked_user, unexpected};
use crate::ApiState;
use crate::body_mistakes::BodyMistakes;
use crate::json_body::JsonBody;
use crate::path_params::SessionPath;
use crate::problem::ApiError;
use crate::query::Query;

/// List a directory of a session
///
/// Links are described, not followed.
#[utoipa::path(
    get, path = "/v1/sessions/{id}/files/list", tag = "files", operation_id = "list_files",
    params(
        ("id" = SessionId, Path, description = "The session's name."),
        ("path" = String, Query, min_length = 1, max_length = 4_095, description = "A directory in the session."),
        ("user" = Option<String>, Query, min_length = 1, max_length = 256, description =
            "User name or uid whose rights count; the session's own when absent."),
    ),
    responses(
        (status = 200, description = "Its entries. An answer that ends early is incomplete.",
            body = FileList),
        (status = 403, description = "file-refused"),
        (status = 404, description = "no-such-session or no-such-file"),
        (status = 409, description = "not-running or file-conflict: not a directory"),
        (status = 422, description = "not-supported"),
        (status = 502, description = "files-failed"),
        (status = 503, description = "runtime-unavailable or timed-out"),
    )
)]
pub(crate) async fn list(
    State(state): State<ApiState>,
    SessionPath(id): SessionPath,
    mut query: Query,
) -> Result<Response, ApiError> {
    let target = Target::of(&mut query);
    query.finish()?;
    let order = FilesOrder::List { path: target.path };
    let mut running = begin(&state, &id, order, target.user).await?;
    match running.reply().await? {
        FilesReply::Content => {
            let json = [(CONTENT_TYPE, HeaderValue::from_static("application/json"))];
            Ok((json, running.into_body()).into_response())
        }
        _ => Err(unexpected()),
    }
}

/// Remove a file or a directory of a session
///
/// A link is removed, not followed.
#[utoipa::path(
    delete, path = "/v1/sessions/{id}/files", tag = "files", operation_id = "remove_file",
    params(
        ("id" = SessionId, Path, description = "The session's name."),
        ("path" = String, Query, min_length = 1, max_length = 4_095, description = "A path in the session."),
        ("recursive" = Option<bool>, Query, description =
            "Remove a directory with everything in it."),
        ("user" = Option<String>, Query, min_length = 1, max_length = 256, description =
            "User name or uid who does it; the session's own when absent."),
    ),
    responses(
        (status = 204, description = "It is gone."),
        (status = 403, description = "file-refused"),
        (status = 404, description = "no-such-session or no-such-file"),
        (status = 409, description =
            "not-running or file-conflict: the directory is not empty, or something is mounted there"),
        (status = 422, description = "not-supported"),
        (status = 502, description = "files-failed"),
        (status = 503, description = "runtime-unavailable or timed-out"),
    )
)]
pub(crate) async fn remove(
    State(state): State<ApiState>,
    SessionPath(id): SessionPath,
    mut query: Query,
) -> Result<StatusCode, ApiError> {
    let Target { path, user, .. } = Target::of(&mut query);
    let recursive = query.flag("recursive", false);
    query.finish()?;
    done(&state, &id, FilesOrder::Remove { path, recursive }, user).await
}

/// Make a directory in a session
#[utoipa::path(
    post, path = "/v1/sessions/{id}/files/mkdir", tag = "files", operation_id = "make_directory",
    params(("id" = SessionId, Path, description = "The session's name.")),
    request_body = MakeDirectoryRequest,
    responses(
        (status = 204, description = "It exists."),
        (status = 403, description = "file-refused"),
        (status = 404, description = "no-such-session or no-such-file: its parent is missing"),
        (status = 409, description = "not-running or file-conflict: something is there"),
        (status = 422, description = "bad-body or not-supported"),
        (status = 502, description = "files-failed"),
        (status = 503, description = "runtime-unavailable or timed-out"),
        (status = 507, description = "disk-full"),
    )
)]
pub(crate) async fn make_directory(
    State(state): State<ApiState>,
    SessionPath(id): SessionPath,
    JsonBody(asked): JsonBody<MakeDirectoryRequest>,
) -> Result<StatusCode, ApiError> {
    let MakeDirectoryRequest {
        path,
        parents,
        user,
    } = asked;
    check(&[("path", &path)], user.as_deref())?;
    let order = FilesOrder::MakeDirectory { path, parents };
    done(&state, &id, order, user).await
}

/// Rename a file or a directory of a session
#[utoipa::path(
    post, path = "/v1/sessions/{id}/files/move", tag = "files", operation_id = "move_file",
    params(("id" = SessionId, Path, description = "The session's name.")),
    request_body = MoveRequest,
    responses(
        (status = 204, description = "It has its new path."),
        (status = 403, description = "file-refused"),
        (status = 404, description = "no-such-session or no-such-file"),
        (status = 409, description =
            "not-running, is-a-directory, or file-conflict: something is at the new path, or they are \
             in different file systems"),
        (status = 422, description = "bad-body or not-supported"),
        (status = 502, description = "files-failed"),
        (status = 503, description = "runtime-unavailable or timed-out"),
        (status = 507, description = "disk-full"),
    )
)]
pub(crate) async fn rename(
    State(state): State<ApiState>,
    SessionPath(id): SessionPath,
    JsonBody(asked): JsonBody<MoveRequest>,
) -> Result<StatusCode, ApiError> {
    let MoveRequest {
        from,
        to,
        overwrite,
        user,
    } = asked;
    check(&[("from", &from), ("to", &to)], user.as_deref())?;
    let order = FilesOrder::Move {
        from,
        to,
        overwrite,
    };
    done(&state, &id, order, user).await
}

/// Carries out an order that has no content.
async fn done(
    state: &ApiState,
    id: &SessionId,
    order: FilesOrder,
    user: Option<String>,
) -> Result<StatusCode, ApiError> {
    match begin(state, id, order, user).await?.reply().await? {
        FilesReply::Done => Ok(StatusCode::NO_CONTENT),
        _ => Err(unexpected()),
    }
}

/// Checks a body's paths and user.
fn check(paths: &[(&str, &String)], user: Option<&str>) -> Result<(), ApiError> {
    let checked = paths
        .iter()
        .map(|(field, path)| (*field, checked_path(path)))
        .chain(user.map(|user| ("user", checked_user(user))));
    let mut mistakes = BodyMistakes::default();
    for (field, checked) in checked {
        if let Err(message) = checked {
            mistakes.add(field, message);
        }
    }
    mistakes.into_result()
}
