//! Ends a measurement at Ctrl-C or SIGTERM.

use anyhow::{Context, Result, bail};
use tokio::signal::unix::{SignalKind, signal};

/// Runs `measurement` unless Ctrl-C or SIGTERM comes first, so that the caller can clean up in
/// either case.
///
/// # Errors
/// Those of the measurement; when it was interrupted.
pub(crate) async fn until_interrupted<T>(
    measurement: impl Future<Output = Result<T>>,
) -> Result<T> {
    let mut terminate = signal(SignalKind::terminate()).context("listening for SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("listening for Ctrl-C")?;
    tokio::select! {
        // The caller ends what the measurement had started.
        done = measurement => done,
        // Cancel safe: a later signal has no meaning.
        _ = terminate.recv() => bail!("interrupted by SIGTERM; everything is cleaned up"),
        _ = interrupt.recv() => bail!("interrupted; everything is cleaned up"),
    }
}
