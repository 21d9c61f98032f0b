//! Changes of files in a session, as they happen.

use std::convert::Infallible;
use std::time::Duration;

use axum::extract::State;
use axum::response::sse::{Event as SseEvent, KeepAlive, Sse};
use axum::response::{IntoResponse as _, Response};
use bytes::BytesMut;
use conman_proto::{FileChange, SessionId};
use conman_runtime::{FilesReply, files_streams};
use futures_util::{Stream, StreamExt as _, stream};

use super::files::{Target, reply, unexpected};
use crate::ApiState;
use crate::path_params::SessionPath;
use crate::problem::ApiError;
use crate::query::Query;

/// Interval of comments on an idle stream, by which lost clients are noticed.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// Longest line of the session's process: a name of 255 bytes in JSON, and the rest.
const MAX_LINE_BYTES: usize = 8 * 1_024;

/// Watch files of a session
///
/// Server-sent events, one JSON `FileChange` each: what changes in the directory `path`, but not below its own
/// directories, or the file `path`. The watch has begun when the answer begins. What a slow client does not take waits
/// in the kernel; beyond its bound an `overflow` says that changes are lost. The stream ends with the session, after
/// `gone`, and when the daemon restarts; list the directory and watch again. Watching does not count as use of the
/// session.
#[utoipa::path(
    get, path = "/v1/sessions/{id}/files/watch", tag = "files", operation_id = "watch_files",
    params(
        ("id" = SessionId, Path, description = "The session's name."),
        ("path" = String, Query, min_length = 1, max_length = 4_095, description =
            "A directory or a file in the session."),
        ("user" = Option<String>, Query, min_length = 1, max_length = 256, description =
            "User name or uid whose rights count; the session's own when absent."),
    ),
    responses(
        (status = 200, description = "The stream.", body = String, content_type = "text/event-stream"),
        (status = 403, description = "file-refused"),
        (status = 404, description = "no-such-session or no-such-file"),
        (status = 409, description = "not-running or file-conflict"),
        (status = 422, description = "not-supported"),
        (status = 429, description = "too-many-watches"),
        (status = 502, description = "files-failed"),
        (status = 503, description = "runtime-unavailable or timed-out"),
    )
)]
pub(crate) async fn watch(
    State(state): State<ApiState>,
    SessionPath(id): SessionPath,
    mut query: Query,
) -> Result<Response, ApiError> {
    let Target { path, user, .. } = Target::of(&mut query);
    query.finish()?;
    let (io, place) = state.node.access().watch_files(&id, path, user).await?;
    let (_, mut output) = files_streams(io);
    let FilesReply::Content = reply(&mut output, place.no_result()).await? else {
        return Err(unexpected());
    };
    let changes = changes(output.content().boxed()).map(move |change| {
        // Held as long as the stream is sent.
        let _ = &place;
        Ok::<_, Infallible>(SseEvent::default().data(change))
    });
    let changes = changes.take_until(state.closing.clone().cancelled_owned());
    let keep_alive = KeepAlive::new().interval(KEEP_ALIVE);
    Ok(Sse::new(changes).keep_alive(keep_alive).into_response())
}

/// The changes as JSON; what is none ends them.
fn changes(
    content: impl Stream<Item = std::io::Result<bytes::Bytes>> + Send + Unpin + 'static,
) -> impl Stream<Item = String> + Send + 'static {
    stream::unfold(
        (content, BytesMut::new()),
        |(mut content, mut unread)| async {
            loop {
                if let Some(end) = unread.iter().position(|byte| *byte == b'\n') {
                    let line = unread.split_to(end + 1);
                    let change: FileChange = serde_json::from_slice(&line).ok()?;
                    let json = serde_json::to_string(&change).ok()?;
                    return Some((json, (content, unread)));
                }
                if unread.len() > MAX_LINE_BYTES {
                    return None;
                }
                // An error is the end of the session or of its process.
                unread.extend_from_slice(&content.next().await?.ok()?);
            }
        },
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn changes_are_taken_apart_however_they_arrive_and_end_with_what_is_none() {
        let created = r#"{"kind":"created","name":"a","directory":false}"#;
        let gone = r#"{"kind":"gone","directory":true}"#;
        let text = format!("{created}\n{gone}\n");
        for cut in 0..=text.len() {
            let (one, two) = text.split_at(cut);
            let pieces =
                [one, two].map(|piece| Ok(bytes::Bytes::copy_from_slice(piece.as_bytes())));
            let found: Vec<String> = changes(stream::iter(pieces)).collect().await;
            assert_eq!(found, [created, gone], "{cut}");
        }
        for bad in ["x\n".to_owned(), "{".repeat(MAX_LINE_BYTES + 1)] {
            let pieces = [
                Ok(bytes::Bytes::from(bad)),
                Ok(bytes::Bytes::from_static(b"\n")),
            ];
            assert_eq!(changes(stream::iter(pieces)).count().await, 0);
        }
    }
}
