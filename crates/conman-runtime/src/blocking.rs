//! Work on files and cgroups, away from the threads that carry tunnels.

use conman_proto::RuntimeKind;

use crate::RuntimeError;

/// Does `work` on a thread that may wait for a disk. Its panic is the caller's.
///
/// Cancelling loses the result; what has begun goes on to its end.
pub(crate) async fn on_blocking_thread<T: Send + 'static>(
    runtime: RuntimeKind,
    action: &'static str,
    work: impl FnOnce() -> Result<T, RuntimeError> + Send + 'static,
) -> Result<T, RuntimeError> {
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result,
        Err(error) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
        Err(_) => Err(RuntimeError::Unavailable {
            runtime,
            action,
            reason: "conman is shutting down".to_owned(),
        }),
    }
}
