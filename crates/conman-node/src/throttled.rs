//! Processor time for what was killed: a session's own limit may give it a millisecond in a tenth of a
//! second, for all of its processes, to die in.

use std::sync::Arc;
use std::time::Duration;

use conman_linux::{CpuLimit, PidFd};
use conman_runtime::{ContainerKey, Runtime};
use tokio::task::spawn_blocking;
use tokio::time::{Instant, sleep};

/// Pause between two looks. A limit is lifted only for what lives on after one: most of the killed die
/// sooner, and the kernel visits every cgroup of the host for each. It is also the limit's period, in
/// which what is throttled is throttled again.
const PAUSE: Duration = Duration::from_millis(100);

/// A look waits at least this multiple of the previous one's duration: it must not take a processor
/// from those who die.
const PAUSE_FACTOR: u32 = 8;

/// Looks until it is given up: what lives on is held up by something else.
const LOOKS: usize = 300;

/// A container that was sent SIGKILL.
pub(crate) struct Killed {
    pub(crate) runtime: Arc<dyn Runtime>,
    pub(crate) key: ContainerKey,
    pub(crate) process: Arc<PidFd>,
}

/// A container that lives and has a limit, and how often that had held it back.
struct Limited {
    key: ContainerKey,
    process: Arc<PidFd>,
    limit: CpuLimit,
    throttled: u64,
}

/// Lifts the limit of processor time of those that it keeps from dying. Nothing waits for it.
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

/// Returns what is to be looked at again.
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
            tracing::warn!(container = %one.key, %error, "cannot lift the CPU limit of a killed session");
        }
    }
    left
}
