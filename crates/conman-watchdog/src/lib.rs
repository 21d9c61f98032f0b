//! The tasks that are essential for the daemon.
//!
//! - [`essential`] ends the process when such a task panics: containers outlive the daemon, the
//!   service manager starts another, and the shim's fence stays armed meanwhile.
//! - [`Watchdog`] knows when each has last shown progress, through its [`TaskProgress`]. The code that sends
//!   heartbeats for the process calls [`Watchdog::still`] first.
//! - [`CrashLoopBackoff`] keeps a daemon whose starts fail repeatedly from holding its sessions for ever.
//!
//! No tasks and no channels: the time of each task's progress is behind a mutex that is held only for an assignment.
//!
//! A task shows progress when it begins its next turn ([`TaskProgress::beat`]). It makes its waits through its
//! handle, which says how long a wait may take without counting as a standstill. So a lock that is never
//! released, an endless loop and an unbounded wait are reported.
#![forbid(unsafe_code)]

use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::pin::pin;
use std::process::abort;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use futures_util::FutureExt;
use tokio::time::{Instant, sleep};

mod crash_loop;
mod failpoint;

pub use crash_loop::CrashLoopBackoff;

/// How long an essential task may show no progress. Longer than the longest turn of any on a loaded
/// machine; together with the unit's `WatchdogSec` it is the time after which a daemon that hangs is
/// restarted.
pub const ALLOWANCE: Duration = Duration::from_secs(3);

/// How often a waiting task shows progress.
const SHOW_INTERVAL: Duration = Duration::from_millis(500);

/// Runs an essential task. A panic in it ends the process.
pub async fn essential<T>(name: &'static str, work: impl Future<Output = T>) -> T {
    match AssertUnwindSafe(work).catch_unwind().await {
        Ok(output) => output,
        Err(panic) => {
            let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
            let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
            end(name, &format!("it panicked: {}", text.unwrap_or_default()))
        }
    }
}

/// Ends the process because an essential task has ended.
pub fn end(name: &str, why: &str) -> ! {
    tracing::error!(
        "essential task ended: {name}, {why}; aborting. Sessions keep running, and the next conman \
         adopts them"
    );
    abort()
}

/// When each essential task has last shown progress.
#[derive(Debug, Clone, Default)]
pub struct Watchdog {
    tasks: Arc<Mutex<Vec<Weak<Task>>>>,
}

#[derive(Debug)]
struct Task {
    name: &'static str,
    shown_at: Mutex<Instant>,
}

/// A task that shows no progress.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Still {
    pub name: &'static str,
    pub since: Duration,
}

impl Watchdog {
    /// Watches a task as long as its handle exists.
    #[must_use]
    pub fn task(&self, name: &'static str) -> TaskProgress {
        let task = Arc::new(Task {
            name,
            shown_at: Mutex::new(Instant::now()),
        });
        let mut tasks = lock(&self.tasks);
        tasks.retain(|task| task.strong_count() > 0);
        tasks.push(Arc::downgrade(&task));
        TaskProgress { task }
    }

    /// Returns the tasks that have shown no progress for longer than [`ALLOWANCE`].
    #[must_use]
    pub fn still(&self) -> Vec<Still> {
        let now = Instant::now();
        let tasks = lock(&self.tasks);
        let living = tasks.iter().filter_map(Weak::upgrade);
        let all = living.map(|task| Still {
            name: task.name,
            since: now.saturating_duration_since(*lock(&task.shown_at)),
        });
        all.filter(|still| still.since > ALLOWANCE).collect()
    }
}

/// The handle by which a task shows progress.
#[derive(Debug)]
pub struct TaskProgress {
    task: Arc<Task>,
}

impl TaskProgress {
    /// A handle that is not watched.
    #[must_use]
    pub fn unwatched(name: &'static str) -> Self {
        Watchdog::default().task(name)
    }

    #[must_use]
    pub fn name(&self) -> &'static str {
        self.task.name
    }

    /// Begins a turn of the task. Completes at once, unless a test makes it hang.
    pub async fn beat(&self) {
        self.show();
        failpoint::pass(self.task.name).await;
    }

    /// Waits without a bound. Cancel safe if `work` is.
    pub async fn idle<T>(&self, work: impl Future<Output = T>) -> T {
        self.show_while(work, None).await
    }

    /// Waits for `work`, which takes longer than `bound` only if something is wrong. Cancel safe if `work` is.
    pub async fn wait<T>(&self, bound: Duration, work: impl Future<Output = T>) -> T {
        self.show_while(work, Some(Instant::now() + bound)).await
    }

    async fn show_while<T>(&self, work: impl Future<Output = T>, until: Option<Instant>) -> T {
        let mut work = pin!(work);
        loop {
            self.show();
            tokio::select! {
                biased;
                // Not cancelled by the other arm: the same future is polled again.
                output = &mut work => {
                    self.show();
                    return output;
                }
                // Cancel safe: a timer has no state.
                () = sleep(SHOW_INTERVAL) => failpoint::pass(self.task.name).await,
            }
            if until.is_some_and(|until| Instant::now() >= until) {
                return work.await;
            }
        }
    }

    fn show(&self) {
        *lock(&self.task.shown_at) = Instant::now();
    }
}

/// A panic cannot leave a partial change: each change is one operation.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::future::pending;
    use std::process::Command;

    use tokio::time::{advance, timeout};

    use super::*;

    fn names(watchdog: &Watchdog) -> Vec<&'static str> {
        watchdog
            .still()
            .into_iter()
            .map(|still| still.name)
            .collect()
    }

    #[tokio::test(start_paused = true)]
    async fn a_task_stands_still_once_it_has_shown_nothing_for_the_time_allowed() {
        let watchdog = Watchdog::default();
        let (one, other) = (watchdog.task("one"), watchdog.task("other"));
        advance(ALLOWANCE).await;
        assert_eq!(names(&watchdog), [""; 0]);
        other.beat().await;
        advance(Duration::from_millis(1)).await;
        assert_eq!(names(&watchdog), ["one"]);
        one.beat().await;
        assert_eq!(names(&watchdog), [""; 0]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_task_that_is_gone_is_not_asked_for() {
        let watchdog = Watchdog::default();
        drop(watchdog.task("gone"));
        advance(ALLOWANCE * 2).await;
        assert_eq!(names(&watchdog), [""; 0]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_wait_is_no_standstill_until_its_bound_is_over() {
        let watchdog = Watchdog::default();
        let progress = watchdog.task("waits");
        let never = progress.idle(pending::<()>());
        assert!(timeout(ALLOWANCE * 9, never).await.is_err());
        assert_eq!(names(&watchdog), [""; 0]);
        let bound = ALLOWANCE * 2;
        let wait = progress.wait(bound, pending::<()>());
        assert!(timeout(bound, wait).await.is_err());
        assert_eq!(names(&watchdog), [""; 0]);
        let wait = progress.wait(bound, pending::<()>());
        assert!(timeout(bound + ALLOWANCE * 2, wait).await.is_err());
        assert_eq!(names(&watchdog), ["waits"]);
    }

    /// Set in the process that the test below starts.
    const PANICS: &str = "CONMAN_WATCHDOG_PANICS";

    #[test]
    fn a_panic_of_an_essential_task_ends_the_process_with_its_name() {
        if std::env::var_os(PANICS).is_some() {
            let runtime = tokio::runtime::Builder::new_current_thread().build();
            let panicking = async {
                let task = essential("panicking", async { panic!("on purpose") });
                tokio::spawn(task).await
            };
            let _: Result<(), _> = runtime.expect("a runtime").block_on(panicking);
            return;
        }
        let this = "tests::a_panic_of_an_essential_task_ends_the_process_with_its_name";
        let ended = Command::new(std::env::current_exe().expect("this test's binary"))
            .args(["--exact", this, "--nocapture"])
            .env(PANICS, "1")
            .output()
            .expect("it can be run");
        assert_eq!(
            std::os::unix::process::ExitStatusExt::signal(&ended.status),
            Some(SIGABRT),
            "{ended:?}"
        );
    }

    const SIGABRT: i32 = 6;
}
