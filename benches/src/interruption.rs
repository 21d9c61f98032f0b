//! Ends a measurement at Ctrl-C or SIGTERM.

use std::sync::LazyLock;

use anyhow::{Context, Result, bail};
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

static INTERRUPTED: LazyLock<CancellationToken> = LazyLock::new(CancellationToken::new);

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
        () = INTERRUPTED.cancelled() => bail!("interrupted; everything is cleaned up"),
    }
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
