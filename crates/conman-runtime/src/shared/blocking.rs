//! Runs work on files and cgroups outside the threads that carry tunnels.

use conman_proto::RuntimeKind;

use crate::RuntimeError;

/// Runs `work` on a blocking thread. A panic in `work` is passed on to the caller.
///
/// Cancelling discards the result; work that has started runs to its end.
pub async fn on_blocking_thread<T: Send + 'static>(
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
