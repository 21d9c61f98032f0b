//! Waits for death certificates.

use std::sync::Arc;
use std::time::Duration;

use conman_linux::PidFd;

/// Interval between polls when the kernel refuses to notify.
const LOOK_AGAIN: Duration = Duration::from_millis(5);

/// Completes once the process is dead: for a container's init, once no process of its PID
/// namespace is left. Cancelling loses nothing.
pub(crate) async fn of(process: Arc<PidFd>) {
    // Notification may need a descriptor and none may be left: poll then.
    if process.dead().await.is_ok() {
        return;
    }
    while !process.is_dead().unwrap_or(false) {
        tokio::time::sleep(LOOK_AGAIN).await;
    }
}
