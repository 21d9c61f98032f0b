//! Reads a container's log from dockerd.

use std::collections::HashMap;
use std::future::ready;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::{Buf as _, Bytes, BytesMut};
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
) -> Result<LogStream, RuntimeError> {
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
    let all = LogOptions {
        follow: true,
        ..LogOptions::default()
    };
    let following = Following {
        shared: Arc::clone(shared),
        key: key.clone(),
        follow: options.follow,
        passed: (options == all).then(Passed::default),
        stream: chunks(&container, log),
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
) -> Result<LogStream, RuntimeError> {
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

/// Keeps the end of a container's log, before it is removed: whole once dockerd has noticed the container's death. A
/// log that cannot be read is not kept: that must not delay the removal.
pub(super) async fn keep_end(shared: &Arc<Shared>, container: &Listed) {
    let Some(kept_logs) = &shared.kept_logs else {
        return;
    };
    let most = kept_logs.most_bytes();
    if most == 0 {
        return;
    }
    let read = timeout(KEEP_PATIENCE, read_end(shared, container, most)).await;
    let (stdout, stderr) = match read {
        Ok(Ok(ends)) => ends,
        Ok(Err(error)) => {
            tracing::warn!(container = %container.key, %error, "cannot keep the log");
            return;
        }
        Err(_elapsed) => {
            tracing::warn!(container = %container.key, "cannot keep the log: it was not read in time");
            return;
        }
    };
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

async fn read_end(
    shared: &Arc<Shared>,
    container: &Listed,
    most: u64,
) -> Result<(OutputEnd, OutputEnd), RuntimeError> {
    let mut chunks = whole(shared, container).await?;
    let (mut stdout, mut stderr) = (OutputEnd::default(), OutputEnd::default());
    while let Some(chunk) = chunks.next().await {
        let chunk = chunk?;
        match chunk.stream {
            OutputStream::Stdout => stdout.push(&chunk.bytes, most),
            OutputStream::Stderr => stderr.push(&chunk.bytes, most),
        }
    }
    Ok((stdout, stderr))
}

/// All that dockerd has of a log now.
async fn whole(shared: &Arc<Shared>, container: &Listed) -> Result<LogStream, RuntimeError> {
    let query = query(LogOptions::default());
    let log = shared.raw_log(&container.container_id, &query).await;
    let log = log.map_err(|failure| failure.about(ACTION, &container.key.to_string()))?;
    Ok(chunks(container, log))
}

fn chunks(container: &Listed, log: BoxStream<'static, Result<Bytes, Failure>>) -> LogStream {
    let subject = container.key.to_string();
    let log = log.map_err(move |failure| failure.about(ACTION, &subject));
    match container.tty {
        true => log
            .map_ok(|bytes| chunk(OutputStream::Stdout, bytes))
            .boxed(),
        false => framed(log.boxed()),
    }
}

/// A log's pieces as they arrive.
type LogStream = BoxStream<'static, Result<LogChunk, RuntimeError>>;

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
fn framed(log: BoxStream<'static, Result<Bytes, RuntimeError>>) -> LogStream {
    let mut frames = Frames::new();
    let mut received = BytesMut::new();
    let chunks = log.map_ok(move |bytes| {
        received.extend_from_slice(&bytes);
        let pieces = std::iter::from_fn(|| frames.next(&mut received));
        let chunks = pieces.map(|(stream, bytes)| Ok::<_, RuntimeError>(chunk(stream, bytes)));
        stream::iter(chunks.collect::<Vec<_>>())
    });
    chunks.try_flatten().boxed()
}

struct Following {
    shared: Arc<Shared>,
    key: ContainerKey,
    follow: bool,
    /// What was passed on, if the rest can be found by that once dockerd ends the log: Docker Engine before 23 may end
    /// it before the last lines.
    passed: Option<Passed>,
    stream: LogStream,
    _follower: Option<watch::Receiver<()>>,
    /// Held as long as the stream.
    _place: OwnedSemaphorePermit,
}

impl Following {
    async fn next(&mut self) -> Option<Result<LogChunk, RuntimeError>> {
        loop {
            let failure = match self.stream.next().await {
                Some(Ok(chunk)) => {
                    if let Some(passed) = &mut self.passed {
                        *passed.of(chunk.stream) += chunk.bytes.len() as u64;
                    }
                    return Some(Ok(chunk));
                }
                Some(Err(failure)) => Some(failure),
                None => None,
            };
            if let Some(passed) = self.passed.take()
                && let Some(rest) = rest(&self.shared, &self.key, passed).await
            {
                self.stream = rest;
                continue;
            }
            let failure = failure?;
            // dockerd breaks a followed log when its container is removed; that is its end.
            let look = look_while(&self.shared, &self.key, |_| true);
            let is_removed = self.follow && matches!(look.await, Some(None));
            return (!is_removed).then_some(Err(failure));
        }
    }
}

/// The end of a dead container's log, after what was passed on; `None` if it cannot be read.
async fn rest(shared: &Arc<Shared>, key: &ContainerKey, mut passed: Passed) -> Option<LogStream> {
    let is_early = |container: &Listed| container.is_believed_running;
    let read = match look_while(shared, key, is_early).await? {
        Some(container) => whole(shared, &container).await.ok(),
        None => None,
    };
    let log = match read {
        Some(log) => log,
        // It is kept before the container is removed.
        None => kept(shared, key, LogOptions::default()).await.ok()?,
    };
    let rest = log.map_ok(move |mut chunk| {
        let passed = passed.of(chunk.stream);
        *passed = passed.saturating_sub(chunk.dropped);
        let skipped = chunk
            .bytes
            .len()
            .min(usize::try_from(*passed).unwrap_or(usize::MAX));
        chunk.bytes.advance(skipped);
        chunk.dropped = 0;
        *passed -= skipped as u64;
        chunk
    });
    let rest = rest.try_filter(|chunk| ready(!chunk.bytes.is_empty()));
    Some(rest.boxed())
}

/// Looks at the container until it is no longer as given, for a bounded time, in which there must be an answer.
async fn look_while(
    shared: &Arc<Shared>,
    key: &ContainerKey,
    is_early: impl Fn(&Listed) -> bool,
) -> Option<Option<Listed>> {
    let looking = async {
        loop {
            match shared.look(key).await {
                Ok(Some(container)) if is_early(&container) => sleep(REMOVAL_INTERVAL).await,
                looked => return looked.ok(),
            }
        }
    };
    timeout(REMOVAL_PATIENCE, looking).await.ok()?
}

/// Bytes of each output.
#[derive(Debug, Default)]
struct Passed {
    stdout: u64,
    stderr: u64,
}

impl Passed {
    fn of(&mut self, stream: OutputStream) -> &mut u64 {
        match stream {
            OutputStream::Stdout => &mut self.stdout,
            OutputStream::Stderr => &mut self.stderr,
        }
    }
}

fn chunk(stream: OutputStream, bytes: Bytes) -> LogChunk {
    LogChunk::new(stream, bytes)
}
