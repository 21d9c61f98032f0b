//! Reads a container's log from dockerd.

use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use futures_util::stream::{self, BoxStream, StreamExt, TryStreamExt};
use jiff::Timestamp;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::{sleep, timeout};

use super::Shared;
use super::failure::Failure;
use super::frames::Frames;
use crate::{ContainerKey, LogChunk, LogOptions, OutputStream, RuntimeError};

const ACTION: &str = "read the log of";

/// How long a container whose log stream broke may take to be gone: dockerd removes the log a moment before
/// the container.
const REMOVAL_PATIENCE: Duration = Duration::from_secs(10);
const REMOVAL_INTERVAL: Duration = Duration::from_millis(100);

pub(super) async fn logs(
    shared: &Arc<Shared>,
    key: &ContainerKey,
    options: LogOptions,
) -> Result<BoxStream<'static, Result<LogChunk, RuntimeError>>, RuntimeError> {
    let subject = key.to_string();
    let place = shared.stream_place(key, ACTION)?;
    let container = shared.existing(key, ACTION).await?;
    let query = query(options);
    let log = shared.raw_log(&container.container_id, &query).await;
    let log = log.map_err(|failure| failure.about(ACTION, &subject))?;
    let stream = if container.tty {
        let chunks = log.map_ok(|bytes| chunk(OutputStream::Stdout, bytes));
        chunks.boxed()
    } else {
        framed(log)
    };
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

fn query(options: LogOptions) -> String {
    let tail = options
        .tail
        .map_or_else(|| "all".to_owned(), |lines| lines.to_string());
    // Seconds since 1970; 0 for all.
    let since = options.since.map_or(0, Timestamp::as_second).max(0);
    format!(
        "stdout=1&stderr=1&follow={}&timestamps={}&tail={tail}&since={since}",
        options.follow, options.timestamps
    )
}

/// The log of a container without a terminal.
fn framed(log: BoxStream<'static, Result<Bytes, Failure>>) -> Chunks {
    let mut frames = Frames::new();
    let mut received = BytesMut::new();
    let chunks = log.map_ok(move |bytes| {
        received.extend_from_slice(&bytes);
        let pieces = std::iter::from_fn(|| frames.next(&mut received));
        let chunks = pieces.map(|(stream, bytes)| Ok::<_, Failure>(chunk(stream, bytes)));
        stream::iter(chunks.collect::<Vec<_>>())
    });
    chunks.try_flatten().boxed()
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
        let is_removed = async {
            loop {
                match self.shared.look(&self.key).await {
                    Ok(Some(_)) => sleep(REMOVAL_INTERVAL).await,
                    looked => return looked.is_ok(),
                }
            }
        };
        let is_removed = timeout(REMOVAL_PATIENCE, is_removed).await;
        if self.follow && is_removed.unwrap_or(false) {
            return None;
        }
        Some(Err(failure.about(ACTION, &self.key.to_string())))
    }
}

fn chunk(stream: OutputStream, bytes: Bytes) -> LogChunk {
    LogChunk { stream, bytes }
}
