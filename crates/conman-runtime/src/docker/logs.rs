//! Reads a container's log from dockerd.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use futures_util::stream::{self, BoxStream, StreamExt, TryStreamExt};
use jiff::Timestamp;
use tokio::sync::{OwnedSemaphorePermit, watch};
use tokio::time::{sleep, timeout};

use super::Shared;
use super::descriptions::Listed;
use super::failure::Failure;
use super::frames::Frames;
use crate::shared::container_files::host_error;
use crate::shared::kept_logs::OutputEnd;
use crate::shared::log_files;
use crate::{ContainerKey, LogChunk, LogOptions, OutputStream, RuntimeError};

const ACTION: &str = "read the log of";

/// How long a container whose log stream broke may take to be gone: dockerd removes the log a moment before
/// the container.
const REMOVAL_PATIENCE: Duration = Duration::from_secs(10);
const REMOVAL_INTERVAL: Duration = Duration::from_millis(100);

/// Clients that follow the logs of containers.
#[derive(Debug, Default)]
pub(super) struct Followers(Mutex<HashMap<ContainerKey, watch::Sender<()>>>);

impl Followers {
    /// The client follows until this is dropped.
    fn follow(&self, key: &ContainerKey) -> watch::Receiver<()> {
        self.lock().entry(key.clone()).or_default().subscribe()
    }

    /// Waits until the clients of a dead container have its whole log, for a bounded time: dockerd breaks what is
    /// followed when it removes the container, and its last bytes would be lost.
    pub(super) async fn finish(&self, key: &ContainerKey) {
        let sender = self.lock().remove(key);
        if let Some(sender) = sender {
            // Those that are slower lose the rest.
            let _ = timeout(KEEP_PATIENCE, sender.closed()).await;
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<ContainerKey, watch::Sender<()>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Longest wait for the log of a container that is to be removed, and for the clients that read it.
const KEEP_PATIENCE: Duration = Duration::from_secs(5);

pub(super) async fn logs(
    shared: &Arc<Shared>,
    key: &ContainerKey,
    options: LogOptions,
) -> Result<BoxStream<'static, Result<LogChunk, RuntimeError>>, RuntimeError> {
    let subject = key.to_string();
    if options.previous {
        return kept(shared, key, options).await;
    }
    let place = shared.stream_place(key, ACTION)?;
    let container = match shared.existing(key, ACTION).await {
        Err(RuntimeError::NoSuchContainer { .. }) => return kept(shared, key, options).await,
        existing => existing?,
    };
    let query = query(options);
    let follower = options.follow.then(|| shared.followers.follow(key));
    let log = match shared.raw_log(&container.container_id, &query).await {
        Ok(log) => log,
        // While it is being removed, its log is kept already.
        Err(failure) => {
            let kept = kept(shared, key, options).await;
            return kept.map_err(|_| failure.about(ACTION, &subject));
        }
    };
    let stream = chunks(&container, log);
    let following = Following {
        shared: Arc::clone(shared),
        key: key.clone(),
        follow: options.follow,
        stream,
        _follower: follower,
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

/// The log of a container that is removed.
async fn kept(
    shared: &Arc<Shared>,
    key: &ContainerKey,
    options: LogOptions,
) -> Result<BoxStream<'static, Result<LogChunk, RuntimeError>>, RuntimeError> {
    let none = || RuntimeError::NoSuchContainer {
        subject: key.to_string(),
    };
    let kept_logs = shared.kept_logs.clone().ok_or_else(none)?;
    let owned = key.clone();
    let find = move || kept_logs.find_for(&owned, options);
    let files = shared.on_blocking_thread(ACTION, find).await?;
    let options = LogOptions {
        follow: false,
        ..options
    };
    log_files::read(files.ok_or_else(none)?, options, || true).await
}

/// Keeps the end of a dead container's log, before it is removed. A log that cannot be read is not kept: that
/// must not delay the removal.
pub(super) async fn keep_end(shared: &Arc<Shared>, container: &Listed) {
    let Some(kept_logs) = &shared.kept_logs else {
        return;
    };
    let most = kept_logs.most_bytes();
    if most == 0 {
        return;
    }
    let (mut stdout, mut stderr) = (OutputEnd::default(), OutputEnd::default());
    let read = read_end(shared, container, most, [&mut stdout, &mut stderr]);
    match timeout(KEEP_PATIENCE, read).await {
        Ok(Ok(())) => {}
        Ok(Err(failure)) => {
            tracing::warn!(container = %container.key, ?failure, "cannot keep the log");
            return;
        }
        Err(_elapsed) => {
            tracing::warn!(container = %container.key, "the kept log may lack its end: it was not read in time");
        }
    }
    let (kept_logs, key) = (Arc::clone(kept_logs), container.key.clone());
    let stderr = (!stderr.bytes.is_empty()).then_some(stderr);
    let keep = move || {
        let kept = kept_logs.keep_ends(&key, stdout, stderr);
        kept.map_err(|source| host_error("write", kept_logs.directory(), source))
    };
    if let Err(error) = shared.on_blocking_thread("keep the log of", keep).await {
        tracing::warn!(container = %container.key, %error, "cannot keep the log");
    }
}

/// Reads until dockerd has closed the log: it may notice the end of the container after conman, and writes the last
/// line of an output, if that lacks its newline, only then. It does not follow the log of a container that it has
/// stopped.
async fn read_end(
    shared: &Arc<Shared>,
    container: &Listed,
    most: u64,
    [stdout, stderr]: [&mut OutputEnd; 2],
) -> Result<(), Failure> {
    let query = query(LogOptions {
        follow: true,
        ..LogOptions::default()
    });
    let log = shared.raw_log(&container.container_id, &query).await?;
    let mut chunks = chunks(container, log);
    while let Some(chunk) = chunks.next().await {
        let chunk = chunk?;
        match chunk.stream {
            OutputStream::Stdout => stdout.push(&chunk.bytes, most),
            OutputStream::Stderr => stderr.push(&chunk.bytes, most),
        }
    }
    Ok(())
}

fn chunks(container: &Listed, log: BoxStream<'static, Result<Bytes, Failure>>) -> Chunks {
    match container.tty {
        true => log
            .map_ok(|bytes| chunk(OutputStream::Stdout, bytes))
            .boxed(),
        false => framed(log),
    }
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
    _follower: Option<watch::Receiver<()>>,
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
    LogChunk::new(stream, bytes)
}
