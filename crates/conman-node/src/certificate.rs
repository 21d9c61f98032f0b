//! Waits for death certificates.

use std::sync::Arc;
use std::time::Duration;

use conman_core::preemption::Certificate;
use conman_linux::PidFd;

/// Interval between polls when the kernel refuses to notify.
const LOOK_AGAIN: Duration = Duration::from_millis(5);

/// What the journal says of a certificate.
pub(crate) const fn message(certificate: Certificate) -> &'static str {
    match certificate {
        Certificate::Empty => "its PID namespace is empty",
        Certificate::Exiting => {
            "every thread of it is exiting; the kernel is still taking down what they had"
        }
    }
}

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
