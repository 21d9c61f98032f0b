//! Reads a container's log from dockerd.

use std::sync::Arc;
use std::time::Duration;

use bollard::container::LogOutput;
use bollard::query_parameters::LogsOptionsBuilder;
use conman_proto::RuntimeKind;
use futures_util::stream::{self, BoxStream, StreamExt};
use jiff::Timestamp;
use tokio::sync::OwnedSemaphorePermit;

use super::Shared;
use super::daemon::Lane;
use super::failure::Failure;
use crate::{ContainerKey, LogChunk, LogOptions, OutputStream, RuntimeError};

const ACTION: &str = "read the log of";

/// Polls for the removal of a container whose log stream broke: dockerd removes the log a moment
/// before the container.
const REMOVAL_LOOKS: u32 = 100;
const REMOVAL_INTERVAL: Duration = Duration::from_millis(100);

pub(super) async fn logs(
    shared: &Arc<Shared>,
    key: &ContainerKey,
    options: LogOptions,
) -> Result<BoxStream<'static, Result<LogChunk, RuntimeError>>, RuntimeError> {
    let subject = key.to_string();
    let Some(place) = shared.daemon.stream_place() else {
        return Err(RuntimeError::Refused {
            runtime: RuntimeKind::Docker,
            action: ACTION,
            subject,
            reason: "too many commands and logs are open at a time; close some".to_owned(),
        });
    };
    let found = shared.look(key).await;
    let found = found.map_err(|failure| failure.about(ACTION, &subject))?;
    let Some(container) = found else {
        return Err(RuntimeError::NoSuchContainer { subject });
    };
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
        if self.follow && is_removed(&self.shared, &self.key).await {
            return None;
        }
        Some(Err(failure.about(ACTION, &self.key.to_string())))
    }
}

/// Whether the container is removed or being removed.
async fn is_removed(shared: &Shared, key: &ContainerKey) -> bool {
    for _ in 0..REMOVAL_LOOKS {
        match shared.look(key).await {
            Ok(None) => return true,
            Ok(Some(_)) => tokio::time::sleep(REMOVAL_INTERVAL).await,
            Err(_) => return false,
        }
    }
    false
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
