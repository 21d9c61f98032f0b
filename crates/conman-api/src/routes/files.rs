//! Files in a session.

use std::time::Duration;

use axum::Json;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::response::{IntoResponse as _, Response};
use conman_node::{AccessError, FilesGuard};
use conman_proto::{FileEntry, SessionId, UnpackReport};
use conman_runtime::{
    ByteRange, FilesFailure, FilesInput, FilesOrder, FilesOutput, FilesReply, files_streams,
};
use futures_util::{Stream, StreamExt as _};
use http::header::{
    ACCEPT_RANGES, CONTENT_DISPOSITION, CONTENT_LENGTH, CONTENT_RANGE, CONTENT_TYPE, IF_RANGE,
    LAST_MODIFIED, RANGE,
};
use http::{HeaderMap, HeaderValue, Method, StatusCode};

use crate::path_params::SessionPath;
use crate::problem::{ApiError, IntoApiError as _, Kind};
use crate::query::Query;
use crate::{ApiState, upload};

/// Longest path that the kernel takes.
const MAX_PATH_BYTES: usize = 4_095;

const MAX_USER_BYTES: usize = 256;

/// Bound on the wait for an order's result once all of its input was sent: a large tree may have to be
/// removed, and a frozen session does not answer.
const REPLY_PATIENCE: Duration = Duration::from_secs(120);

/// The content of a file or an archive.
#[derive(utoipa::ToSchema)]
#[schema(value_type = String, format = Binary)]
#[expect(
    dead_code,
    reason = "it describes a body that is never whole in memory"
)]
struct Content(Vec<u8>);

/// The form of a tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum ArchiveForm {
    Tar,
}

/// The parameters of a request about one path.
pub(super) struct Target {
    pub(super) path: String,
    pub(super) user: Option<String>,
    archive: Option<ArchiveForm>,
}

impl Target {
    pub(super) fn of(query: &mut Query) -> Self {
        if !query.has("path") {
            query.mistake("path", "is required: a path in the session");
        }
        let path = query.parsed("path", |text| checked_path(text).map(str::to_owned));
        Self {
            path: path.unwrap_or_default(),
            user: query.parsed("user", |text| checked_user(text).map(str::to_owned)),
            archive: query.parsed("archive", |text| match text {
                "tar" => Ok(ArchiveForm::Tar),
                other => Err(format!("is `{other}`; give `tar`")),
            }),
        }
    }
}

pub(super) fn checked_path(path: &str) -> Result<&str, String> {
    if path.is_empty() || path.len() > MAX_PATH_BYTES || path.contains('\0') {
        return Err(format!("must have 1 to {MAX_PATH_BYTES} bytes and no NUL"));
    }
    if path.split('/').any(|part| part == "..") {
        return Err("must not contain `..`".to_owned());
    }
    Ok(path)
}

pub(super) fn checked_user(user: &str) -> Result<&str, String> {
    let valid = (1..=MAX_USER_BYTES).contains(&user.len()) && !user.contains(char::is_control);
    valid
        .then_some(user)
        .ok_or_else(|| format!("must have 1 to {MAX_USER_BYTES} bytes and no control characters"))
}

/// An order that is being carried out. The session counts as in use meanwhile.
pub(super) struct Running {
    input: FilesInput,
    output: FilesOutput,
    guard: FilesGuard,
}

pub(super) async fn begin(
    state: &ApiState,
    id: &SessionId,
    order: FilesOrder,
    user: Option<String>,
) -> Result<Running, ApiError> {
    let (io, guard) = state.node.access().files(id, order, user).await?;
    let (input, output) = files_streams(io);
    Ok(Running {
        input,
        output,
        guard,
    })
}

impl Running {
    pub(super) async fn reply(&mut self) -> Result<FilesReply, ApiError> {
        reply(&mut self.output, self.guard.no_result()).await
    }

    pub(super) fn into_body(self) -> Body {
        let guard = self.guard;
        Body::from_stream(self.output.content().map(move |piece| {
            // Held as long as the content is sent.
            let _ = &guard;
            piece
        }))
    }
}

/// As [`replied`], at most for [`REPLY_PATIENCE`].
pub(super) async fn reply(
    output: &mut FilesOutput,
    no_result: impl Future<Output = AccessError>,
) -> Result<FilesReply, ApiError> {
    let reply = tokio::time::timeout(REPLY_PATIENCE, replied(output, no_result)).await;
    reply.map_err(|_| {
        Kind::TIMED_OUT.because(format!(
            "the session did not carry it out within {REPLY_PATIENCE:?}, and may still do so"
        ))
    })?
}

/// Waits for an order's result. `no_result` returns why there is none.
async fn replied(
    output: &mut FilesOutput,
    no_result: impl Future<Output = AccessError>,
) -> Result<FilesReply, ApiError> {
    match output.reply().await {
        Some(reply) => checked(reply),
        None => Err(no_result.await.into()),
    }
}

/// A failed order's problem.
fn checked(reply: FilesReply) -> Result<FilesReply, ApiError> {
    let FilesReply::Failed { failure, detail } = reply else {
        return Ok(reply);
    };
    let kind = match failure {
        FilesFailure::Missing => Kind::NO_SUCH_FILE,
        FilesFailure::IsDirectory => Kind::IS_DIRECTORY,
        FilesFailure::Conflict => Kind::FILE_CONFLICT,
        FilesFailure::Refused => Kind::FILE_REFUSED,
        FilesFailure::Range => Kind::BAD_RANGE,
        FilesFailure::Archive => Kind::BAD_ARCHIVE,
        FilesFailure::Full => Kind::DISK_FULL,
        FilesFailure::Interrupted => Kind::BAD_REQUEST,
        FilesFailure::Other => Kind::FILES_FAILED,
    };
    Err(kind.because(detail))
}

pub(super) fn unexpected() -> ApiError {
    Kind::INTERNAL.because("the session's process answered something else")
}

/// Read a file, or a directory as an archive
///
/// Without `archive`, the content of a regular file; links are followed inside the session. With
/// `archive=tar`, the content of a directory, with names relative to it; links are kept as links, and
/// devices, FIFOs and sockets are left out. An answer that ends early is incomplete. HEAD describes a file.
#[utoipa::path(
    get, path = "/v1/sessions/{id}/files", tag = "files", operation_id = "read_file",
    params(
        ("id" = SessionId, Path, description = "The session's name."),
        ("path" = String, Query, min_length = 1, max_length = 4_095, description = "A path in the session."),
        ("archive" = inline(Option<ArchiveForm>), Query, description =
            "Return a directory as an archive."),
        ("user" = Option<String>, Query, min_length = 1, max_length = 256, description =
            "User name or uid whose rights count; the session's own when absent."),
        ("range" = Option<String>, Header, description =
            "One range of bytes, for example `bytes=100-199`."),
    ),
    responses(
        (status = 200, description = "The content.", content(
            (Content = "application/octet-stream"), (Content = "application/x-tar"),
        )),
        (status = 206, description = "The requested bytes.", body = Content,
            content_type = "application/octet-stream"),
        (status = 403, description = "file-refused"),
        (status = 404, description = "no-such-session or no-such-file"),
        (status = 409, description = "not-running, is-a-directory or file-conflict"),
        (status = 416, description = "bad-range"),
        (status = 422, description = "not-supported"),
        (status = 502, description = "files-failed"),
        (status = 503, description = "runtime-unavailable or timed-out"),
    )
)]
pub(crate) async fn read(
    State(state): State<ApiState>,
    SessionPath(id): SessionPath,
    method: Method,
    headers: HeaderMap,
    mut query: Query,
) -> Result<Response, ApiError> {
    let Target {
        path,
        user,
        archive,
    } = Target::of(&mut query);
    query.finish()?;
    let range = range_of(&headers);
    let order = match archive {
        _ if method == Method::HEAD => FilesOrder::Stat { path },
        Some(ArchiveForm::Tar) => FilesOrder::Pack { path },
        None => FilesOrder::Read { path, range },
    };
    let mut running = begin(&state, &id, order, user).await?;
    match running.reply().await? {
        FilesReply::Content => {
            let tar = [(CONTENT_TYPE, HeaderValue::from_static("application/x-tar"))];
            Ok((tar, running.into_body()).into_response())
        }
        FilesReply::File {
            entry,
            start,
            length,
        } if method == Method::HEAD => Ok(described(&entry, start, length.max(entry.size), None)
            .body(Body::empty())
            .map_err(|_| unexpected())?),
        FilesReply::File {
            entry,
            start,
            length,
        } => described(&entry, start, length, range)
            .body(running.into_body())
            .map_err(|_| unexpected()),
        _ => Err(unexpected()),
    }
}

/// The head of an answer with bytes of a file.
fn described(
    entry: &FileEntry,
    start: u64,
    length: u64,
    range: Option<ByteRange>,
) -> http::response::Builder {
    let modified = entry.modified_at.strftime("%a, %d %b %Y %H:%M:%S GMT");
    let head = Response::builder()
        .header(CONTENT_TYPE, "application/octet-stream")
        // Content of a session is never shown as a page of the API's.
        .header(CONTENT_DISPOSITION, "attachment")
        .header(ACCEPT_RANGES, "bytes")
        .header(LAST_MODIFIED, modified.to_string())
        .header(CONTENT_LENGTH, length);
    if range.is_none() {
        return head;
    }
    let last = (start + length).saturating_sub(1);
    head.status(StatusCode::PARTIAL_CONTENT).header(
        CONTENT_RANGE,
        format!("bytes {start}-{last}/{}", entry.size),
    )
}

/// The requested range. Several ranges, and what is no range of bytes, stand for the whole file.
fn range_of(headers: &HeaderMap) -> Option<ByteRange> {
    if headers.contains_key(IF_RANGE) {
        return None;
    }
    let text = headers.get(RANGE)?.to_str().ok()?.strip_prefix("bytes=")?;
    let (first, last) = text.split_once('-')?;
    match (first.parse().ok(), last.parse().ok()) {
        (Some(first), None) if last.is_empty() => Some(ByteRange::From { first, last: None }),
        (Some(first), Some(last)) if first <= last => Some(ByteRange::From {
            first,
            last: Some(last),
        }),
        (None, Some(bytes)) if first.is_empty() => Some(ByteRange::Suffix { bytes }),
        _ => None,
    }
}

/// Write a file, or unpack an archive into a directory
///
/// Without `archive`, the body replaces the file at `path` once all of it has arrived; a link there is
/// replaced, not followed. With `archive=tar`, the body is unpacked into the directory `path`, entry by
/// entry; nothing is written outside of it. Everything belongs to `user`. Devices, FIFOs and the archive's
/// owners are ignored.
#[utoipa::path(
    put, path = "/v1/sessions/{id}/files", tag = "files", operation_id = "write_file",
    params(
        ("id" = SessionId, Path, description = "The session's name."),
        ("path" = String, Query, min_length = 1, max_length = 4_095, description = "A path in the session."),
        ("archive" = inline(Option<ArchiveForm>), Query, description = "Unpack the body."),
        ("parents" = Option<bool>, Query, description = "Make missing directories."),
        ("mode" = Option<String>, Query, pattern = "^[0-7]{1,4}$", description =
            "Permissions of the file in octal digits; those of the present file, or 644, when absent."),
        ("user" = Option<String>, Query, min_length = 1, max_length = 256, description =
            "User name or uid who does it and owns the result; the session's own when absent."),
    ),
    request_body(content = Content, content_type = "application/octet-stream"),
    responses(
        (status = 200, description = "The archive is unpacked.", body = UnpackReport),
        (status = 204, description = "The file is written."),
        (status = 400, description = "bad-query or bad-request: the body ended early"),
        (status = 403, description = "file-refused"),
        (status = 404, description = "no-such-session or no-such-file: its directory is missing"),
        (status = 408, description = "body-too-slow"),
        (status = 409, description = "not-running, is-a-directory or file-conflict"),
        (status = 422, description = "bad-archive or not-supported"),
        (status = 502, description = "files-failed"),
        (status = 503, description = "runtime-unavailable, node-unreachable or session-moves"),
        (status = 507, description = "disk-full"),
    )
)]
pub(crate) async fn write(
    State(state): State<ApiState>,
    SessionPath(id): SessionPath,
    mut query: Query,
    request: Request,
) -> Result<Response, ApiError> {
    let Target {
        path,
        user,
        archive,
    } = Target::of(&mut query);
    let parents = query.flag("parents", false);
    let mode = query.parsed("mode", |text| {
        let mode = u32::from_str_radix(text, 8).ok();
        let mode = mode.filter(|mode| *mode <= 0o7777);
        mode.ok_or_else(|| format!("is `{text}`; give octal digits, for example 644"))
    });
    query.finish()?;
    let order = match archive {
        Some(ArchiveForm::Tar) => FilesOrder::Unpack { path, parents },
        None => FilesOrder::Write {
            path,
            parents,
            mode,
        },
    };
    let running = begin(&state, &id, order, user).await?;
    match upload_to(running, request.into_body()).await? {
        FilesReply::Unpacked { entries, skipped } => {
            Ok(Json(UnpackReport { entries, skipped }).into_response())
        }
        FilesReply::Done => Ok(StatusCode::NO_CONTENT.into_response()),
        _ => Err(unexpected()),
    }
}

/// Sends the body to the session until it has its result.
async fn upload_to(running: Running, body: Body) -> Result<FilesReply, ApiError> {
    let Running {
        input,
        mut output,
        guard,
    } = running;
    let mut pieces = Box::pin(upload::pieces(body).fuse());
    let fed = tokio::select! {
        // Not polled again.
        fed = feed(input, &mut pieces) => fed,
        // An error, as a rule: the rest of the body is of no use.
        early = replied(&mut output, guard.no_result()) => {
            upload::drain(&mut pieces).await;
            return early;
        }
    };
    match fed {
        Err(error) if error.kind() == std::io::ErrorKind::TimedOut => {
            Err(Kind::BODY_TOO_SLOW.because(error.to_string()))
        }
        Err(_) => Err(Kind::BAD_REQUEST.because("the connection broke off within the body")),
        Ok(()) => reply(&mut output, guard.no_result()).await,
    }
}

async fn feed(
    mut input: FilesInput,
    pieces: &mut (impl Stream<Item = std::io::Result<bytes::Bytes>> + Unpin),
) -> std::io::Result<()> {
    while let Some(piece) = pieces.next().await {
        if !input.send(piece?).await {
            return Ok(());
        }
    }
    input.finish().await;
    Ok(())
}

#[cfg(test)]
mod tests {
    use conman_runtime::{ExecIo, ExecKill};
    use tokio::sync::{mpsc, oneshot};

    use super::*;

    /// The output of an order whose process has ended without a result.
    fn ended() -> FilesOutput {
        let io = ExecIo {
            stdin: mpsc::channel(1).0,
            output: mpsc::channel(1).1,
            resize: mpsc::channel(1).0,
            status: oneshot::channel().1,
            kill: ExecKill::new().0,
        };
        files_streams(io).1
    }

    #[tokio::test]
    async fn an_order_without_a_result_may_be_repeated_if_its_session_ended() {
        let id = || "alice".parse::<SessionId>().expect("an id");
        let with_session = AccessError::KilledWithSession {
            id: id(),
            why: "the session is moving".to_owned(),
        };
        let alone = AccessError::NoResult { id: id() };
        for (why, slug, retryable, words) in [
            (
                with_session,
                "not-running",
                true,
                "because the session is moving",
            ),
            (alone, "files-failed", false, "was killed"),
        ] {
            let error = reply(&mut ended(), async { why }).await;
            let error = error.expect_err("there is no result");
            let problem = error.problem();
            assert_eq!((problem.slug(), problem.retryable), (slug, retryable));
            assert!(problem.detail.contains(words), "{}", problem.detail);
        }
    }
}
