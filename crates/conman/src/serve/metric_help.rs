//! Texts for metrics whose crates only count.

use metrics::{describe_counter, describe_gauge, describe_histogram};

const COUNTERS: &[(&str, &str)] = &[
    (
        "conman_api_peer_refusals_total",
        "Requests of the API that another node refused because the session had moved",
    ),
    (
        "conman_api_requests_total",
        "Answered requests of the API, by status and route",
    ),
    (
        "conman_cleanups_total",
        "Clean-ups after sessions, by result",
    ),
    (
        "conman_orphans_ended_total",
        "Containers that were ended because no session has them",
    ),
    (
        "conman_preemptions_total",
        "Preemptions of this node that have ended",
    ),
    (
        "conman_restarts_total",
        "Starts of sessions after an earlier one had ended, by reason",
    ),
    (
        "conman_sessions_ended_total",
        "Sessions that have ended on this node, by cause",
    ),
    (
        "conman_pool_starts_total",
        "Starts of templates with a pool, by way: a container made ahead, or the usual one",
    ),
    (
        "conman_sessions_stuck_total",
        "Sessions of which a process could not be killed",
    ),
    (
        "conman_starts_total",
        "Starts of sessions on this node, by result",
    ),
];

const GAUGES: &[(&str, &str)] = &[
    (
        "conman_cleanups_waiting",
        "Sessions that have ended and are not cleaned up yet",
    ),
    (
        "conman_disk_free_bytes",
        "Free bytes of the file system that holds the state directory",
    ),
    (
        "conman_fleet_peers",
        "Other nodes of the fleet, by standing",
    ),
    (
        "conman_fleet_session_waits",
        "Sessions that requests at this node wait for",
    ),
    (
        "conman_held_connections",
        "Connections that wait for a session of this node",
    ),
    (
        "conman_node_state",
        "1 for the state that this node is in, 0 for the others",
    ),
    (
        "conman_pool_waiting",
        "Containers made ahead that wait for a start",
    ),
    (
        "conman_preempt_unreleased_sessions",
        "Sessions that the latest preemption has not released",
    ),
    ("conman_sessions", "Sessions that this node knows, by state"),
    (
        "conman_through_connections",
        "Tunnels and requests through this node to sessions on others",
    ),
];

const HISTOGRAMS: &[(&str, &str)] = &[
    (
        "conman_preempt_last_release_seconds",
        "Time from a preemption's notice to its last release",
    ),
    (
        "conman_session_hold_duration_seconds",
        "Time for which connections have waited for a session of this node",
    ),
    (
        "conman_start_duration_seconds",
        "Time from a start's order until the session was ready",
    ),
    (
        "conman_start_phase_duration_seconds",
        "Time that a phase of a start took",
    ),
];

/// Registers the texts with the recorder.
pub(super) fn describe() {
    for (name, text) in COUNTERS {
        describe_counter!(*name, *text);
    }
    for (name, text) in GAUGES {
        describe_gauge!(*name, *text);
    }
    for (name, text) in HISTOGRAMS {
        describe_histogram!(*name, *text);
    }
}
