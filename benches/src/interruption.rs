//! Ends a measurement at Ctrl-C or SIGTERM.

use std::io;
use std::sync::LazyLock;

use anyhow::{Context, Result, bail};
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

static INTERRUPTED: LazyLock<CancellationToken> = LazyLock::new(CancellationToken::new);

/// Commands of [`run_to_end`] that have not ended.
static RUNNING: LazyLock<TaskTracker> = LazyLock::new(TaskTracker::new);

/// From now on a signal does not end this process: what is being prepared is finished, and then removed again.
///
/// # Errors
/// When the signals cannot be listened for.
pub(crate) fn listen() -> Result<()> {
    let mut terminate = signal(SignalKind::terminate()).context("listening for SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("listening for Ctrl-C")?;
    tokio::spawn(async move {
        // Cancel safe: a second signal has no meaning.
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        INTERRUPTED.cancel();
    });
    Ok(())
}

/// Runs `measurement` unless Ctrl-C or SIGTERM comes first, so that the caller can clean up in
/// either case.
///
/// # Errors
/// Those of the measurement; when it was interrupted.
pub(crate) async fn until_interrupted<T>(
    measurement: impl Future<Output = Result<T>>,
) -> Result<T> {
    tokio::select! {
        // The caller ends what the measurement had started.
        done = measurement => done,
        () = INTERRUPTED.cancelled() => {
            RUNNING.close();
            RUNNING.wait().await;
            bail!("interrupted; everything is cleaned up")
        }
    }
}

/// Runs a command that makes a container. An interruption does not end it, but waits for it: only a container that is
/// complete can be removed.
///
/// # Errors
/// Those of the command.
pub(crate) async fn run_to_end<T: Send + 'static>(
    command: impl Future<Output = io::Result<T>> + Send + 'static,
) -> io::Result<T> {
    RUNNING.spawn(command).await.map_err(io::Error::other)?
}

/// Whether Ctrl-C or SIGTERM has come.
pub(crate) fn is_interrupted() -> bool {
    INTERRUPTED.is_cancelled()
}

/// Whether a benchmark has something to report although its measurement ended early: why it did then.
///
/// # Errors
/// Those of a measurement that has measured nothing.
pub(crate) fn early_end(ended: Result<()>, measured: usize) -> Result<Option<String>> {
    match ended {
        Ok(()) => Ok(None),
        Err(error) if measured > 0 => Ok(Some(format!("not complete: {error:#}"))),
        Err(error) => Err(error),
    }
}
