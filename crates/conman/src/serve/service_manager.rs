//! Notifies the service manager, by systemd's protocol (sd_notify(3)), that the daemon is ready,
//! alive or stopping. Without a service manager nothing is sent.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use conman_node::{PreemptionHandle, StatusHandle};
use conman_watchdog::Watchdog;
use sd_notify::NotifyState;
use tokio::runtime::Handle;
use tokio::time::{sleep, timeout};

/// Heartbeats in each interval of the watchdog: one may be late.
const BEATS: u32 = 3;

/// Everything is adopted, and the listeners answer.
pub(super) fn ready() {
    notify(&[NotifyState::Ready]);
}

/// Extends the start's time-out by at least this much.
pub(super) fn goes_on(longer: Duration, status: &str) {
    let micros = u32::try_from(longer.as_micros()).unwrap_or(u32::MAX);
    notify(&[
        NotifyState::ExtendTimeoutUsec(micros),
        NotifyState::Status(status),
    ]);
}

/// The daemon is stopping.
pub(super) fn stopping(why: &str) {
    let status = format!("stopping: {why}");
    notify(&[NotifyState::Stopping, NotifyState::Status(&status)]);
}

/// Sends heartbeats, if the service manager expects any, as long as the main runtime's tasks and
/// the node's tables answer and no essential task is stalled. They are sent from the emergency
/// thread, which still runs when nothing else does.
pub(super) fn watch(status: StatusHandle, preemption: &PreemptionHandle, watchdog: Watchdog) {
    let Some(interval) = sd_notify::watchdog_enabled() else {
        return;
    };
    let look = move || {
        // Takes the locks that everything else takes.
        let _ = status.view();
    };
    let stood = AtomicBool::new(false);
    let beat = move || {
        let still = watchdog.still();
        if still.is_empty() {
            if stood.swap(false, Ordering::Relaxed) {
                notify(&[NotifyState::Status("running")]);
            }
            return notify(&[NotifyState::Watchdog]);
        }
        stood.store(true, Ordering::Relaxed);
        let names: Vec<&str> = still.iter().map(|one| one.name).collect();
        let status = format!("standing still: {}", names.join(", "));
        tracing::error!(
            ?still,
            "tasks are stalled; if this continues, the service manager restarts the daemon, and \
             the sessions keep running"
        );
        notify(&[NotifyState::Status(&status)]);
    };
    preemption.spawn(beats(interval / BEATS, Handle::current(), look, beat));
}

/// Calls `beat` after every pause in which `look` completed on `main`.
async fn beats(
    pause: Duration,
    main: Handle,
    look: impl Fn() + Clone + Send + 'static,
    beat: impl Fn(),
) {
    loop {
        sleep(pause).await;
        let look = look.clone();
        match timeout(pause, main.spawn(async move { look() })).await {
            Ok(Ok(())) => beat(),
            Ok(Err(error)) => tracing::error!(%error, "the daemon's self-check panicked"),
            Err(_) => tracing::error!(
                pause_ms = pause.as_millis(),
                "the main runtime does not answer; if this continues, the service manager restarts \
                 the daemon, and the sessions keep running"
            ),
        }
    }
}

fn notify(states: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(states) {
        tracing::warn!(%error, "cannot notify the service manager");
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use super::*;

    const PAUSE: Duration = Duration::from_secs(1);

    /// Counts heartbeats in a hundred pauses, on a clock that advances only while all is idle.
    async fn count(main: Handle) -> usize {
        let count = AtomicUsize::new(0);
        let beat = || {
            count.fetch_add(1, Ordering::Relaxed);
        };
        let never = beats(PAUSE, main, || (), beat);
        assert!(timeout(PAUSE * 100, never).await.is_err());
        count.into_inner()
    }

    #[tokio::test(start_paused = true)]
    async fn signs_of_life_come_while_the_main_tasks_answer() {
        assert!(count(Handle::current()).await >= 98);
    }

    #[tokio::test(start_paused = true)]
    async fn none_comes_while_the_main_tasks_hang() {
        // It is never polled.
        let hung = tokio::runtime::Builder::new_current_thread()
            .build()
            .expect("a runtime");
        assert_eq!(count(hung.handle().clone()).await, 0);
        hung.shutdown_background();
    }
}
