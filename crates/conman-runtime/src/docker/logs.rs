//! Reads a container's log from dockerd.

use std::sync::Arc;
use std::time::Duration;

use bollard::container::LogOutput;
use bollard::query_parameters::LogsOptionsBuilder;
use futures_util::stream::{self, BoxStream, StreamExt};
use jiff::Timestamp;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::timeout;

use super::Shared;
use super::daemon::Lane;
use super::failure::Failure;
use crate::{ContainerKey, LogChunk, LogOptions, OutputStream, RuntimeError};

const ACTION: &str = "read the log of";

/// How long a container whose log stream broke may take to end or to be gone: dockerd removes the log a
/// moment before the container.
const END_PATIENCE: Duration = Duration::from_secs(10);

pub(super) async fn logs(
    shared: &Arc<Shared>,
    key: &ContainerKey,
    options: LogOptions,
) -> Result<BoxStream<'static, Result<LogChunk, RuntimeError>>, RuntimeError> {
    let subject = key.to_string();
    let place = shared.stream_place(key, ACTION)?;
    let container = shared.existing(key, ACTION).await?;
    let stream = if container.tty {
        raw(shared, &container.container_id, options).await
    } else {
        framed(shared, container.container_id, options).await
    };
    let stream = stream.map_err(|failure| failure.about(ACTION, &subject))?;
    let following = Following {
        shared: Arc::clone(shared),
        key: key.clone(),
        follow: options.follow,
        stream,
        _place: place,
    };
    let chunks = stream::unfold(Some(following), |following| async move {
        let mut following = following?;
        match following.next().await? {
            Ok(chunk) => Some((Ok(chunk), Some(following))),
            // Nothing follows an error.
            Err(error) => Some((Err(error), None)),
        }
    });
    Ok(chunks.boxed())
}

/// A log's pieces as they arrive.
type Chunks = BoxStream<'static, Result<LogChunk, Failure>>;

fn tail(options: LogOptions) -> String {
    options
        .tail
        .map_or_else(|| "all".to_owned(), |lines| lines.to_string())
}

/// Seconds since 1970; 0 for all.
fn since(options: LogOptions) -> i32 {
    let seconds = options.since.map_or(0, Timestamp::as_second);
    i32::try_from(seconds.max(0)).unwrap_or(i32::MAX)
}

async fn framed(shared: &Arc<Shared>, id: String, options: LogOptions) -> Result<Chunks, Failure> {
    let query = LogsOptionsBuilder::default()
        .stdout(true)
        .stderr(true)
        .follow(options.follow)
        .timestamps(options.timestamps)
        .tail(&tail(options))
        .since(since(options))
        .build();
    let started = shared
        .daemon
        .call(Lane::Calls, shared.timeouts.inspect, |facts| async move {
            Ok(facts.client.logs(&id, Some(query)))
        });
    let socket = shared.daemon.socket().to_owned();
    let chunks = started
        .await?
        .map(move |item| item.map(chunk).map_err(|error| Failure::of(error, &socket)));
    Ok(chunks.boxed())
}

/// The log of a container with a terminal, which has no frames.
async fn raw(shared: &Arc<Shared>, id: &str, options: LogOptions) -> Result<Chunks, Failure> {
    let query = format!(
        "stdout=1&stderr=1&follow={}&timestamps={}&tail={}&since={}",
        options.follow,
        options.timestamps,
        tail(options),
        since(options)
    );
    let log = shared.raw_log(id, &query).await?;
    let chunks = log.map(|piece| {
        piece.map(|bytes| LogChunk {
            stream: OutputStream::Stdout,
            bytes,
        })
    });
    Ok(chunks.boxed())
}

struct Following {
    shared: Arc<Shared>,
    key: ContainerKey,
    follow: bool,
    stream: Chunks,
    /// Held as long as the stream.
    _place: OwnedSemaphorePermit,
}

impl Following {
    async fn next(&mut self) -> Option<Result<LogChunk, RuntimeError>> {
        let failure = match self.stream.next().await? {
            Ok(chunk) => return Some(Ok(chunk)),
            Err(failure) => failure,
        };
        // dockerd breaks a followed log when its container is removed; that is its end.
        let ended = timeout(END_PATIENCE, self.shared.noticed_exit_code(&self.key));
        if self.follow && ended.await.is_ok() {
            return None;
        }
        Some(Err(failure.about(ACTION, &self.key.to_string())))
    }
}

fn chunk(output: LogOutput) -> LogChunk {
    let stream = match output {
        LogOutput::StdErr { .. } => OutputStream::Stderr,
        LogOutput::StdOut { .. } | LogOutput::StdIn { .. } | LogOutput::Console { .. } => {
            OutputStream::Stdout
        }
    };
    LogChunk {
        stream,
        bytes: output.into_bytes(),
    }
}
