//! Sessions and the node as the API shows them.

use conman_proto::{NodeState, Session, SessionState};
use jiff::Timestamp;

use crate::context::Context;
use crate::runtime_health::RuntimeHealth;
use crate::session::SessionHandle;

pub(crate) fn session(context: &Context, handle: &SessionHandle) -> Session {
    let view = handle.view();
    let spec = &*handle.spec;
    let mut phases_ms = std::collections::BTreeMap::new();
    for phase in view.phases.iter() {
        *phases_ms.entry(phase.name.to_string()).or_insert(0.0) += phase.duration_ms;
    }
    Session {
        id: handle.id.clone(),
        state: view.state,
        reason: view.reason,
        exit_code: view.exit_code,
        url: spec.port.map(|_| context.options.urls.url(&handle.id)),
        node: context.options.name.clone(),
        runtime: spec.runtime,
        // Lives without one are not shown; a start that was never recorded has none to show.
        generation: view.generation.unwrap_or(conman_proto::Generation::FIRST),
        pid: view.process.map(|process| process.pid()),
        port: spec.port,
        network: spec.network,
        template: spec.template.clone(),
        created_at: view.created_at,
        started_at: view.started_at,
        ended_at: view.ended_at,
        phases_ms,
        connections: handle.activity.in_flight(),
        spec: spec.clone(),
    }
}

pub(crate) fn node(
    context: &Context,
    health: &RuntimeHealth,
    started_at: Timestamp,
) -> conman_proto::Node {
    let shown = context.sessions.shown_after(None);
    let count = |wanted: SessionState| {
        shown
            .iter()
            .filter(|handle| handle.state() == wanted)
            .count() as u64
    };
    let runtime = context.options.policy.default_runtime;
    let preempted = context.table.closed().is_some();
    conman_proto::Node {
        name: context.options.name.clone(),
        instance: context.options.instance.to_string(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        state: if preempted {
            NodeState::Preempted
        } else {
            NodeState::Live
        },
        runtime,
        runtime_error: health.error(runtime),
        sessions_running: count(SessionState::Running),
        sessions_starting: count(SessionState::Starting),
        sessions_stuck: count(SessionState::Stuck),
        max_sessions: context.options.limits.max_sessions as u64,
        host_limit: context
            .host_limits
            .of(runtime)
            .map(|limit| conman_proto::HostLimit {
                max_sessions: limit.max_sessions as u64,
                limit: limit.met,
            }),
        connections: shown.iter().map(|handle| handle.activity.in_flight()).sum(),
        started_at,
    }
}

/// Gauges of what there is, by state and never by session.
pub(crate) fn measure(context: &Context) {
    let shown = context.sessions.shown_after(None);
    for state in SessionState::ALL {
        let count = shown
            .iter()
            .filter(|handle| handle.state() == state)
            .count();
        metrics::gauge!("conman_sessions", "state" => state.as_str()).set(count as f64);
    }
    metrics::gauge!("conman_held_connections").set(context.held.taken() as f64);
    metrics::gauge!("conman_cleanups_waiting").set(context.cleanup.len() as f64);
}
