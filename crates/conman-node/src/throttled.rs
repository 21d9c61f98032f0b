//! Processor time for killed sessions: a session's CPU limit may give all of its processes only one
//! millisecond in 100 ms to die in.

use std::sync::Arc;
use std::time::Duration;

use conman_linux::{CpuLimit, PidFd};
use conman_runtime::{ContainerKey, Runtime};
use tokio::task::spawn_blocking;
use tokio::time::{Instant, sleep};

/// Interval between polls. A limit is lifted only for a session that lives on after one: most die sooner,
/// and the kernel visits every cgroup of the host for each change. It is also the limit's period, in which
/// a throttled cgroup is throttled again.
const PAUSE: Duration = Duration::from_millis(100);

/// A poll waits at least this multiple of the previous one's duration, so that it does not compete with
/// dying processes.
const PAUSE_FACTOR: u32 = 8;

/// Polls before giving up: something else keeps what lives on from dying.
const LOOKS: usize = 300;

/// A container that was sent SIGKILL.
pub(crate) struct Killed {
    pub(crate) runtime: Arc<dyn Runtime>,
    pub(crate) key: ContainerKey,
    pub(crate) process: Arc<PidFd>,
}

/// A live container with a limit, and how often it had been throttled.
struct Limited {
    key: ContainerKey,
    process: Arc<PidFd>,
    limit: CpuLimit,
    throttled: u64,
}

/// Lifts the CPU limits that keep killed sessions from dying. Runs in the background.
pub(crate) fn release(killed: Vec<Killed>) {
    tokio::spawn(async move {
        let limited = spawn_blocking(move || killed.into_iter().filter_map(limited_by).collect());
        let mut limited: Vec<Limited> = limited.await.unwrap_or_default();
        let mut pause = PAUSE;
        for _ in 0..LOOKS {
            if limited.is_empty() {
                return;
            }
            sleep(pause).await;
            let begun = Instant::now();
            limited = spawn_blocking(move || look(limited))
                .await
                .unwrap_or_default();
            pause = PAUSE.max(begun.elapsed() * PAUSE_FACTOR);
        }
    });
}

fn limited_by(killed: Killed) -> Option<Limited> {
    let limit = killed.runtime.cpu_limit(&killed.key)?;
    Some(Limited {
        throttled: limit.throttled(),
        key: killed.key,
        process: killed.process,
        limit,
    })
}

/// Returns what is to be polled again.
fn look(limited: Vec<Limited>) -> Vec<Limited> {
    let lives = |one: &Limited| !one.process.is_dead().unwrap_or(false);
    let is_held_back = |one: &Limited| one.limit.throttled() > one.throttled;
    let mut left = Vec::new();
    for one in limited {
        if !lives(&one) {
            continue;
        }
        if !is_held_back(&one) {
            left.push(one);
        } else if let Err(error) = one.limit.lift() {
            tracing::warn!(
                container = %one.key,
                %error,
                "cannot lift the CPU limit of a killed session"
            );
        }
    }
    left
}
