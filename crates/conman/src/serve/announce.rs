//! Announces this node to the others: the data that placement uses.

use std::fs;
use std::sync::Arc;
use std::time::Duration;

use conman_node::StatusHandle;
use conman_proto::NodeState;
use conman_registry::{Announcement, Fleet, NodeLoad, READS};
use conman_vitals::{Vitals, essential};
use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;

use crate::config::Config;

/// The task's name in the log when it ends or stalls.
const NAME: &str = "announcer";
/// Interval between checks of this node. A change such as a drain is announced at once then; the
/// load is announced when the next announcement is due.
const LOOK_EVERY: Duration = Duration::from_millis(250);

/// Announces this node until the daemon stops.
pub(super) fn run(
    config: &Config,
    status: &StatusHandle,
    fleet: &Arc<dyn Fleet>,
    vitals: &Vitals,
    closing: CancellationToken,
) {
    let pulse = vitals.task(NAME);
    let fixed = Announcement {
        peer_url: config.fleet.peer_url.clone(),
        reads: READS,
        version: env!("CARGO_PKG_VERSION").to_owned(),
        labels: config.fleet.labels.clone(),
        max_sessions: u32::try_from(config.limits.node.max_sessions).unwrap_or(u32::MAX),
        ..Announcement::default()
    };
    // At once: a client that sees this node as ready may request a session from it.
    fleet.announce(announcement(&fixed, status));
    let (status, fleet) = (status.clone(), Arc::clone(fleet));
    tokio::spawn(essential(NAME, async move {
        let mut looks = tokio::time::interval(LOOK_EVERY);
        looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            pulse.beat().await;
            // Cancel safe: a tick dropped at shutdown is not needed.
            let next = closing.run_until_cancelled(looks.tick());
            if pulse.idle(next).await.is_none() {
                break;
            }
            fleet.announce(announcement(&fixed, &status));
        }
        fleet.announce(Announcement {
            draining: true,
            ..announcement(&fixed, &status)
        });
    }));
}

fn announcement(fixed: &Announcement, status: &StatusHandle) -> Announcement {
    let view = status.view();
    // Other nodes need not try sessions that the host has no room for.
    let host = view.host_limit.as_ref().map(|limit| limit.max_sessions);
    let max_sessions = host.map_or(fixed.max_sessions, |host| {
        fixed
            .max_sessions
            .min(u32::try_from(host).unwrap_or(u32::MAX))
    });
    let count = |number: u64| u32::try_from(number).unwrap_or(u32::MAX);
    Announcement {
        draining: !matches!(view.state, NodeState::Live | NodeState::Recovering),
        max_sessions,
        templates: status.templates(),
        load: NodeLoad {
            sessions: count(view.sessions()),
            starting: count(view.sessions_starting),
            ..host_load()
        },
        view: Some(view),
        ..fixed.clone()
    }
}

/// Pressure and memory, as far as the kernel reports them.
pub(super) fn host_load() -> NodeLoad {
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
    let memory = read("/proc/meminfo");
    NodeLoad {
        cpu_pressure_percent: pressure(&read("/proc/pressure/cpu")).unwrap_or_default(),
        memory_available_bytes: kibibytes(&memory, "MemAvailable:").unwrap_or_default(),
        memory_total_bytes: kibibytes(&memory, "MemTotal:").unwrap_or_default(),
        ..NodeLoad::default()
    }
}

/// `avg10` of the line `some`.
fn pressure(text: &str) -> Option<f64> {
    let line = text.lines().find_map(|line| line.strip_prefix("some "))?;
    let value = line
        .split(' ')
        .find_map(|word| word.strip_prefix("avg10="))?;
    value.parse().ok()
}

fn kibibytes(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    let number: u64 = line.split_whitespace().next()?.parse().ok()?;
    number.checked_mul(1_024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pressure_and_memory_are_read_as_the_kernel_writes_them() {
        let cpu = "some avg10=12.34 avg60=5.00 avg300=1.00 total=1\nfull avg10=0.00 avg60=0.00\n";
        assert_eq!(pressure(cpu), Some(12.34));
        assert_eq!(pressure(""), None);
        let memory = "MemTotal:       1024 kB\nMemFree: 1 kB\nMemAvailable:    512 kB\n";
        assert_eq!(kibibytes(memory, "MemAvailable:"), Some(512 << 10));
        assert_eq!(kibibytes(memory, "SwapTotal:"), None);
    }

    #[test]
    fn this_host_tells_how_much_memory_it_has() {
        let load = host_load();
        assert!(load.memory_total_bytes >= load.memory_available_bytes);
        assert!(load.memory_total_bytes > 0);
    }
}
