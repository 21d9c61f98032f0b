use anyhow::{Context, Result, bail};
use tokio::signal::unix::{SignalKind, signal};

/// Carries `measurement` out unless Ctrl-C or SIGTERM comes first, so that the caller can clean
/// up after it either way.
///
/// # Errors
/// Those of the measurement; when it was interrupted.
pub(crate) async fn until_interrupted<T>(
    measurement: impl Future<Output = Result<T>>,
) -> Result<T> {
    let mut terminate = signal(SignalKind::terminate()).context("listening for SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("listening for Ctrl-C")?;
    tokio::select! {
        // What the measurement had begun is the caller's to end.
        done = measurement => done,
        // A signal that is not awaited any more means nothing.
        _ = terminate.recv() => bail!("interrupted by SIGTERM; everything is cleaned up"),
        _ = interrupt.recv() => bail!("interrupted; everything is cleaned up"),
    }
}
