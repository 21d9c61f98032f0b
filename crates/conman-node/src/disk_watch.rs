//! Ends sessions that use more of the disk than their specs allow, where the file system does not
//! enforce that, and refuses starts while the disk is short.
//!
//! One task. Every second it reads how much of the file system with the state directory is free.
//! Measuring a session means reading all of its files, so sessions are measured one after the other,
//! soon after disk usage grew and rarely otherwise. A session that was within its limits and has used no processor time
//! since then has written nothing.
//!
//! The disk may hang, and the task with it: it is essential, but the watchdog does not watch it.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use conman_core::{EndCause, size};
use conman_linux::DiskUsage;
use conman_proto::EventKind;
use conman_proto::LimitMet;
use conman_runtime::{ContainerKey, DiskExcess, Runtime};
use tokio::time::{Instant, sleep};

use crate::context::Context;
use crate::host_limits::HostLimit;
use crate::pause;
use crate::session::SessionHandle;

/// The task's name in messages about its end.
pub(crate) const NAME: &str = "disk watch";

const LOOK_INTERVAL: Duration = Duration::from_secs(1);

/// Growth of disk usage after which sessions are measured.
const GROWTH: DiskUsage = DiskUsage {
    bytes: 32 << 20,
    inodes: 4_096,
};

/// Bounds on the time between two rounds without such growth: one session may use what another has
/// freed.
const SHORTEST_PAUSE: Duration = Duration::from_secs(5);
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

/// A round waits at least this multiple of the previous round's duration.
const PAUSE_FACTOR: u32 = 20;

/// A session is measured again after this multiple of the time that measuring it took, so that one with
/// many files does not delay the others.
const SESSION_PAUSE_FACTOR: u32 = 8;

/// Measurements that may fail in a row. The next one, of the frozen session, decides.
const FAILED_MEASUREMENTS: u32 = 2;

/// Ended sessions stay in the list until it is longer than this.
const MAX_UNMEASURED: usize = 4_096;

const UNMEASURED: &str = "disk usage cannot be measured: its processes have more open files and mappings \
                          than are searched for files without a name";

/// The state of a file system at one time.
#[derive(Debug, Clone, Copy)]
struct Space {
    total_bytes: u64,
    /// Available to sessions.
    free_bytes: u64,
    used: DiskUsage,
}

/// When sessions are measured.
#[derive(Debug)]
struct Schedule {
    /// The lowest usage since the last round.
    baseline: Option<DiskUsage>,
    /// Earliest time of the next round after growth; `latest` applies otherwise.
    soonest: Instant,
    latest: Instant,
    /// Sessions that take long, and when they may be measured again.
    postponed: HashMap<ContainerKey, Instant>,
    /// Sessions that could not be measured, and how often in a row.
    unmeasured: HashMap<ContainerKey, u32>,
    /// Sessions that were within these limits.
    within: HashMap<ContainerKey, Within>,
}

/// The limits of a session, and the processor time in microseconds that it had used before it was measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Within {
    limits: DiskUsage,
    cpu_us: u64,
}

/// A session with limits.
struct Limited {
    handle: Arc<SessionHandle>,
    runtime: Arc<dyn Runtime>,
    key: ContainerKey,
    limits: DiskUsage,
}

/// Watches until it is aborted.
pub(crate) async fn run(context: Arc<Context>) {
    let now = Instant::now();
    let mut schedule = Schedule {
        baseline: None,
        soonest: now,
        latest: now,
        postponed: HashMap::new(),
        unmeasured: HashMap::new(),
        within: HashMap::new(),
    };
    loop {
        let state_dir = context.options.state_dir.clone();
        let looked = tokio::task::spawn_blocking(move || space(&state_dir));
        match looked.await {
            Ok(Ok(space)) => {
                note(&context, space);
                if schedule.is_due(space.used, Instant::now()) {
                    measure_all(&context, &mut schedule).await;
                }
            }
            Ok(Err(error)) => tracing::debug!(%error, "cannot read how full the disk is"),
            Err(error) => tracing::debug!(%error, "cannot read how full the disk is"),
        }
        sleep(LOOK_INTERVAL).await;
    }
}

impl Schedule {
    /// Whether to measure sessions now; if so, the next round's growth counts from here.
    fn is_due(&mut self, used: DiskUsage, now: Instant) -> bool {
        let baseline = self.baseline.get_or_insert(used);
        baseline.bytes = baseline.bytes.min(used.bytes);
        baseline.inodes = baseline.inodes.min(used.inodes);
        let grown = used.bytes - baseline.bytes >= GROWTH.bytes
            || used.inodes - baseline.inodes >= GROWTH.inodes;
        let due = now >= self.latest || grown && now >= self.soonest;
        if due {
            self.baseline = Some(used);
        }
        due
    }

    fn finish_round(&mut self, begun: Instant, now: Instant) {
        let took = now - begun;
        let pause = (took * PAUSE_FACTOR).clamp(SHORTEST_PAUSE, LONGEST_PAUSE);
        (self.soonest, self.latest) = (now + took, now + pause);
        self.postponed.retain(|_, at| *at > now);
        if self.unmeasured.len() > MAX_UNMEASURED {
            self.unmeasured.clear();
        }
    }
}

fn space(state_dir: &std::path::Path) -> std::io::Result<Space> {
    let data = rustix::fs::statvfs(state_dir)?;
    Ok(Space {
        total_bytes: data.f_blocks * data.f_frsize,
        free_bytes: data.f_bavail * data.f_frsize,
        used: DiskUsage {
            bytes: data.f_blocks.saturating_sub(data.f_bfree) * data.f_frsize,
            inodes: data.f_files.saturating_sub(data.f_ffree),
        },
    })
}

/// Refuses starts while less than the reserve is free.
fn note(context: &Context, space: Space) {
    metrics::gauge!("conman_disk_free_bytes").set(space.free_bytes as f64);
    let reserve = context.options.limits.disk_reserve_bytes;
    let limit = (space.free_bytes < reserve).then(|| HostLimit {
        max_sessions: 0,
        met: LimitMet {
            name: "disk space".to_owned(),
            bounds: format!(
                "bytes of the file system with {}, less limits.disk_reserve_bytes",
                context.options.state_dir.display()
            ),
            value: space.total_bytes.saturating_sub(reserve),
            used: space.total_bytes.saturating_sub(space.free_bytes),
            remedy: "remove sessions, images or other files there, or make it larger".to_owned(),
        },
    });
    let before = context.host_limits.disk().is_some();
    if limit.is_some() && !before {
        tracing::warn!(
            free_bytes = space.free_bytes,
            reserve_bytes = reserve,
            "the disk is short; new sessions are refused"
        );
    } else if limit.is_none() && before {
        tracing::info!(free_bytes = space.free_bytes, "the disk is no longer short");
    }
    context.host_limits.set(None, limit);
}

/// The warning that the disk is short.
pub(crate) fn warning(context: &Context) -> Option<String> {
    let met = context.host_limits.disk()?.met;
    Some(format!(
        "the disk is short and no session is started: {} of {} {} are used; {}",
        met.used, met.value, met.bounds, met.remedy
    ))
}

async fn measure_all(context: &Context, schedule: &mut Schedule) {
    let begun = Instant::now();
    let counted = tokio::task::spawn_blocking({
        let limited = limited(context);
        move || {
            let counted = limited.into_iter().map(|one| (one.cpu_us(), one));
            counted.collect::<Vec<_>>()
        }
    });
    let former = std::mem::take(&mut schedule.within);
    for (cpu_us, one) in counted.await.unwrap_or_default() {
        let now = cpu_us.map(|cpu_us| Within {
            limits: one.limits,
            cpu_us,
        });
        if now.is_some() && former.get(&one.key) == now.as_ref() {
            schedule.within.extend(now.map(|now| (one.key, now)));
        } else if measure(context, schedule, &one).await {
            schedule.within.extend(now.map(|now| (one.key, now)));
        }
    }
    schedule.finish_round(begun, Instant::now());
}

fn limited(context: &Context) -> Vec<Limited> {
    let limited = context.sessions.live().into_iter().filter_map(|handle| {
        let spec = handle.spec();
        spec.disk_bytes.or(spec.disk_inodes)?;
        Some(Limited {
            runtime: Arc::clone(context.runtime(spec.runtime)?),
            key: ContainerKey::new(handle.id.clone(), handle.generation()?),
            limits: DiskUsage {
                bytes: spec.disk_bytes.unwrap_or(u64::MAX),
                inodes: spec.disk_inodes.unwrap_or(u64::MAX),
            },
            handle,
        })
    });
    limited.collect()
}

impl Limited {
    fn cpu_us(&self) -> Option<u64> {
        self.runtime.cpu_us(&self.key)
    }
}

/// Measures a session, and ends it if it exceeds its limits. Returns whether it is certainly within them.
async fn measure(context: &Context, schedule: &mut Schedule, one: &Limited) -> bool {
    let Limited {
        handle,
        runtime,
        key,
        limits,
    } = one;
    let before = Instant::now();
    if schedule.postponed.get(key).is_some_and(|at| *at > before) {
        return false;
    }
    let failures = schedule.unmeasured.get(key).copied().unwrap_or_default();
    let measured = match failures >= FAILED_MEASUREMENTS {
        true => pause::measure_frozen(&**runtime, handle, key, *limits).await,
        false => runtime.excess_disk_usage(key, *limits, false).await,
    };
    let is_within = matches!(measured, Ok(None));
    match measured {
        Ok(Some(DiskExcess::Measured(usage))) => end(handle, &excess(usage, *limits)),
        Ok(Some(DiskExcess::Unmeasurable)) if failures >= FAILED_MEASUREMENTS => {
            end(handle, UNMEASURED);
        }
        Ok(Some(DiskExcess::Unmeasurable)) => {
            schedule.unmeasured.insert(key.clone(), failures + 1);
            warn(context, handle, key);
        }
        // Most programs change directories now and then, so this is no reason for a warning.
        Ok(Some(DiskExcess::Unsteady)) if failures < FAILED_MEASUREMENTS => {
            schedule.unmeasured.insert(key.clone(), failures + 1);
        }
        Ok(Some(DiskExcess::Unsteady) | None) => {
            schedule.unmeasured.remove(key);
        }
        Err(error) => {
            let error = conman_core::error_chain(&error);
            tracing::warn!(session = %key, error, "cannot measure a session's disk usage");
        }
    }
    let took = before.elapsed();
    let again = Instant::now() + took * SESSION_PAUSE_FACTOR;
    if took > LOOK_INTERVAL / SESSION_PAUSE_FACTOR {
        schedule.postponed.insert(key.clone(), again);
    }
    is_within
}

fn end(handle: &SessionHandle, why: &str) {
    tracing::warn!(session = %handle.id, why, "ending a session");
    handle.order_stop(EndCause::DiskLimit, why);
}

/// A session that hides files among more descriptors and mappings than are searched is warned first, since a
/// program may have that many for a moment.
fn warn(context: &Context, handle: &SessionHandle, key: &ContainerKey) {
    let warning = format!("{UNMEASURED}; it is ended if this does not change");
    tracing::warn!(session = %handle.id, warning, "cannot measure a session's disk usage");
    context.note_session(
        EventKind::SessionUnmeasured,
        &handle.id,
        key.generation,
        warning,
    );
}

/// Why a session is ended.
fn excess(usage: DiskUsage, limits: DiskUsage) -> String {
    if usage.inodes > limits.inodes {
        return format!(
            "disk limit exceeded: more than {} files and directories (disk_inodes)",
            limits.inodes
        );
    }
    let (used, limit) = (size(usage.bytes), size(limits.bytes));
    format!("disk limit exceeded: {used} of {limit} (disk_bytes)")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reason_says_how_much_of_how_much() {
        let limits = DiskUsage {
            bytes: 1 << 30,
            inodes: 65_536,
        };
        let usage = DiskUsage {
            bytes: (1 << 30) + (220 << 20),
            inodes: 3,
        };
        assert_eq!(
            excess(usage, limits),
            "disk limit exceeded: 1.2 GiB of 1 GiB (disk_bytes)"
        );
        let usage = DiskUsage {
            bytes: 0,
            inodes: 65_537,
        };
        assert_eq!(
            excess(usage, limits),
            "disk limit exceeded: more than 65536 files and directories (disk_inodes)"
        );
    }

    #[test]
    fn sessions_are_measured_when_the_disk_gets_fuller_and_rarely_otherwise() {
        let begin = Instant::now();
        let at = |ms| begin + Duration::from_millis(ms);
        let mut schedule = Schedule {
            baseline: None,
            soonest: begin,
            latest: begin,
            postponed: HashMap::new(),
            unmeasured: HashMap::new(),
            within: HashMap::new(),
        };
        let used = |mib: u64| DiskUsage {
            bytes: mib << 20,
            inodes: 0,
        };
        assert!(schedule.is_due(used(100), at(0)));
        schedule.finish_round(at(0), at(500));
        // A round took half a second: not before another half, and after ten at the latest.
        assert!(!schedule.is_due(used(200), at(900)));
        assert!(schedule.is_due(used(200), at(1_000)));
        schedule.finish_round(at(1_000), at(1_000));
        assert!(!schedule.is_due(used(50), at(2_000)));
        assert!(!schedule.is_due(used(70), at(3_000)));
        assert!(schedule.is_due(used(90), at(4_000)));
        schedule.finish_round(at(4_000), at(4_000));
        assert!(!schedule.is_due(used(90), at(8_900)));
        assert!(schedule.is_due(used(90), at(9_000)));
    }
}
