//! Proves that a killed session whose PID namespace does not become empty runs no more
//! ([`conman_core::preemption::ExitProof`]).
//!
//! Each proof runs on a thread of its own: reading of a dying process may take as long as its death.

use std::sync::Arc;
use std::time::Duration;

use conman_core::preemption::{ExitProof, ThreadSeen};
use conman_linux::{CgroupThread, PidFd};
use conman_runtime::{ContainerKey, Runtime};
use tokio::task::spawn_blocking;
use tokio::time::sleep;

/// Pause between two scans.
const PAUSE: Duration = Duration::from_millis(10);

/// Longest pause, for what stays in the kernel.
const LONGEST_PAUSE: Duration = Duration::from_millis(500);

/// Completes when nothing of the container runs any more, while its init is not yet dead; never, if its
/// runtime has no such proof.
pub(crate) async fn of(runtime: Arc<dyn Runtime>, key: ContainerKey, init: Arc<PidFd>) {
    let of_key = {
        let key = key.clone();
        move || runtime.exit_scan(&key)
    };
    let Ok(Some(scan)) = spawn_blocking(of_key).await else {
        return std::future::pending().await;
    };
    let (scan, mut proof, mut pause) = (Arc::new(scan), ExitProof::default(), PAUSE);
    // The init's own certificate comes when it is dead.
    while !init.is_dead().unwrap_or(false) {
        let again = Arc::clone(&scan);
        match spawn_blocking(move || again.end_and_list()).await {
            Ok(Ok(threads)) => {
                if proof.scanned(threads.into_iter().map(seen)) {
                    return;
                }
            }
            failed => {
                let error = failed.map(|result| result.err());
                tracing::debug!(container = %key, ?error, "cannot list the threads of a killed session");
                proof.failed();
            }
        }
        sleep(pause).await;
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
    std::future::pending().await
}

fn seen(thread: CgroupThread) -> ThreadSeen {
    ThreadSeen {
        process: thread.process,
        thread: thread.thread,
        started: thread.start_time_ticks,
        exiting: thread.exiting,
    }
}
