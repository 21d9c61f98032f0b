//! A session's output.

use axum::body::Body;
use axum::extract::State;
use axum::response::{IntoResponse as _, Response};
use conman_proto::{LOG_FRAMES, LogLine, SessionId};
use conman_runtime::{LogChunk, LogOptions, RuntimeError};
use futures_util::stream::BoxStream;
use futures_util::{Stream, StreamExt as _, stream};
use http::header::CONTENT_TYPE;
use jiff::Timestamp;

use crate::ApiState;
use crate::log_lines::{self, LogLines};
use crate::path_params::SessionPath;
use crate::problem::ApiError;
use crate::query::Query;

/// Most lines of `tail`; without `tail` only the log's size bounds the answer.
const MAX_TAIL: u64 = 1_000_000;

/// What a session printed
///
/// Standard output and standard error of its program, in the order written. The end of an ended native
/// session's log is kept for a while.
#[utoipa::path(
    get, path = "/v1/sessions/{id}/logs", tag = "sessions", operation_id = "get_logs",
    params(
        ("id" = SessionId, Path, description = "The session's name."),
        ("follow" = Option<bool>, Query, description =
            "Follow the log until the container ends for any reason. The session then has its \
             `reason` and, if it moved, a later `generation`."),
        ("tail" = Option<u32>, Query, maximum = 1_000_000, description =
            "Only so many lines from the end."),
        ("previous" = Option<bool>, Query, description =
            "The log of the session's generation before this one, if it is kept."),
        ("since" = inline(Option<Time>), Query, description =
            "Only lines that were written at this time or later."),
        ("timestamps" = Option<bool>, Query, description =
            "Put the time of writing before each line; for native sessions to two seconds."),
        ("format" = inline(Option<LogFormat>), Query, description =
            "`text`, the default: the bytes as they were printed, of both outputs. `json`: a `LogLine` a \
             line. `frames`: the bytes, each piece preceded by eight bytes as in Docker's API: 1 or 2 for \
             its output (3: a note on what is lost), three zero bytes, and its length, the greatest first."),
    ),
    responses(
        (status = 200, description = "The log.", content(
            (String = "text/plain"),
            (LogLine = "application/x-ndjson"),
            (String = "application/vnd.docker.multiplexed-stream"),
        )),
        (status = 404, description = "no-such-session, or log-not-kept"),
        (status = 409, description =
            "too-many-terminals: following the log of a session with `tty` counts as being \
             attached"),
        (status = 503, description = "runtime-unavailable"),
    )
)]
pub(crate) async fn logs(
    State(state): State<ApiState>,
    SessionPath(id): SessionPath,
    mut query: Query,
) -> Result<Response, ApiError> {
    let options = LogOptions {
        follow: query.flag("follow", false),
        tail: query
            .number("tail", 0, MAX_TAIL)
            .and_then(|lines| u32::try_from(lines).ok()),
        since: query.parsed("since", |text| {
            text.parse::<Timestamp>()
                .map_err(|_| "must be a time such as 2030-01-31T18:00:00Z".to_owned())
        }),
        timestamps: query.flag("timestamps", false),
        previous: query.flag("previous", false),
    };
    let format = query.parsed("format", LogFormat::parse).unwrap_or_default();
    query.finish()?;
    let chunks = state.node.access().logs(&id, options).await?;
    let chunks = chunks
        .take_until(state.closing.clone().cancelled_owned())
        .boxed();
    let (kind, body) = match format {
        LogFormat::Text => {
            let bytes = chunks.map(|chunk| chunk.map(|chunk| chunk.bytes));
            ("text/plain; charset=utf-8", Body::from_stream(bytes))
        }
        LogFormat::Frames => {
            let frames = chunks.map(|chunk| chunk.map(|chunk| log_lines::to_frames(&chunk)));
            (LOG_FRAMES, Body::from_stream(frames))
        }
        LogFormat::Json => {
            let lines = as_ndjson(chunks, LogLines::new(options.timestamps));
            ("application/x-ndjson", Body::from_stream(lines))
        }
    };
    Ok(([(CONTENT_TYPE, kind)], body).into_response())
}

/// A point in time.
#[derive(utoipa::ToSchema)]
#[schema(value_type = String, format = DateTime)]
#[expect(dead_code, reason = "it describes a parameter")]
struct Time(String);

/// How a log is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum LogFormat {
    /// The bytes as they were printed.
    #[default]
    Text,
    /// One `LogLine` a line.
    Json,
    /// The bytes, with the output that each piece belongs to.
    Frames,
}

impl LogFormat {
    fn parse(text: &str) -> Result<Self, String> {
        match text {
            "text" => Ok(Self::Text),
            "json" => Ok(Self::Json),
            "frames" => Ok(Self::Frames),
            other => Err(format!("is `{other}`; give `text`, `json` or `frames`")),
        }
    }
}

/// An error within the log breaks the connection, which shows the client that the log is
/// incomplete.
fn as_ndjson(
    chunks: BoxStream<'static, Result<LogChunk, RuntimeError>>,
    lines: LogLines,
) -> impl Stream<Item = Result<bytes::Bytes, RuntimeError>> + Send + 'static {
    stream::unfold((chunks, Some(lines)), |(mut chunks, lines)| async move {
        let mut lines = lines?;
        match chunks.next().await {
            Some(Ok(chunk)) => {
                let found = lines.push(&chunk);
                Some((Ok(log_lines::to_ndjson(&found)), (chunks, Some(lines))))
            }
            Some(Err(error)) => Some((Err(error), (chunks, None))),
            None => Some((Ok(log_lines::to_ndjson(&lines.finish())), (chunks, None))),
        }
    })
}
