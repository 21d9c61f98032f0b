//! Announces this node to the others: the data that placement uses.

use std::sync::Arc;
use std::time::Duration;

use conman_node::{StatusHandle, host_load};
use conman_proto::NodeState;
use conman_registry::{Announcement, Fleet, NodeLoad, READS};
use conman_watchdog::{Watchdog, essential};
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
    watchdog: &Watchdog,
    closing: CancellationToken,
) {
    let progress = watchdog.task(NAME);
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
            progress.beat().await;
            // Cancel safe: a tick dropped at shutdown is not needed.
            let next = closing.run_until_cancelled(looks.tick());
            if progress.idle(next).await.is_none() {
                break;
            }
            status.set_store(fleet.store());
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
