//! Sessions as the API shows them.

use std::collections::BTreeMap;
use std::sync::Arc;

use conman_proto::{ResolvedSpec, Session, SessionId, SessionState};
use conman_registry::{Ending, Phases, RecordState, SessionRecord};

use crate::context::Context;
use crate::session::SessionHandle;

pub(crate) fn session(context: &Context, handle: &SessionHandle) -> Session {
    let view = handle.view();
    let record = SessionRecord {
        id: handle.id.clone(),
        // A life without a generation is not shown; this is for a start that was never recorded.
        generation: view.generation.unwrap_or(conman_proto::Generation::FIRST),
        state: RecordState::Starting,
        spec: Arc::unwrap_or_clone(handle.spec()),
        container: None,
        created_at: view.created_at,
    };
    Session {
        // Of the same moment as the rest.
        state: shown(context, handle, view.state),
        reason: view.reason,
        end: view.end,
        exit_code: view.exit_code,
        pid: view
            .process
            .map(|process| handle.program_pid(process.pid())),
        started_at: view.started_at,
        ended_at: view.ended_at,
        phases_ms: phases_ms(&view.phases),
        connections: handle.activity.in_flight(),
        oom_kills: handle.oom_kills_noted(),
        ..recorded(context, &context.options.name, record)
    }
}

/// The state that is shown and counted.
pub(crate) fn state(context: &Context, handle: &SessionHandle) -> SessionState {
    shown(context, handle, handle.state())
}

fn shown(context: &Context, handle: &SessionHandle, state: SessionState) -> SessionState {
    match state {
        // While fenced, nothing of this node runs until its ownership is renewed.
        SessionState::Starting | SessionState::Running if context.is_fenced() => {
            SessionState::Frozen
        }
        SessionState::Running if handle.pausing.is_paused() => SessionState::Paused,
        state => state,
    }
}

/// Number of sessions by state.
#[derive(Debug)]
pub(crate) struct Counts(BTreeMap<&'static str, u64>);

impl Counts {
    pub(crate) fn of<'a>(
        context: &Context,
        handles: impl IntoIterator<Item = &'a Arc<SessionHandle>>,
    ) -> Self {
        let mut counts = BTreeMap::new();
        for handle in handles {
            *counts.entry(state(context, handle).as_str()).or_default() += 1;
        }
        Self(counts)
    }

    pub(crate) fn get(&self, state: SessionState) -> u64 {
        self.0.get(state.as_str()).copied().unwrap_or_default()
    }
}

/// A session as its record shows it; it may be another node's.
pub(crate) fn recorded(context: &Context, node: &str, record: SessionRecord) -> Session {
    let spec = &record.spec;
    let (state, reason, ending) = match &record.state {
        RecordState::Starting => (SessionState::Starting, None, None),
        RecordState::Running { paused: true, .. } => (SessionState::Paused, None, None),
        RecordState::Running { paused: false, .. } => (SessionState::Running, None, None),
        RecordState::Stopping { reason, .. } => {
            (SessionState::Stopping, Some(reason.clone()), None)
        }
        RecordState::Stuck { reason, .. } => (SessionState::Stuck, Some(reason.clone()), None),
        RecordState::Ended(ending) => (
            ended_state(ending),
            Some(ending.reason.clone()),
            Some(ending),
        ),
    };
    let (started_at, phases) = match &record.state {
        RecordState::Running {
            started_at, phases, ..
        } => (Some(*started_at), phases.clone()),
        RecordState::Ended(ending) => (ending.started_at, ending.phases.clone()),
        RecordState::Starting | RecordState::Stopping { .. } | RecordState::Stuck { .. } => {
            (None, Phases::default())
        }
    };
    Session {
        id: record.id.clone(),
        state,
        reason,
        end: record.state.end(),
        exit_code: ending.and_then(|ending| ending.exit_code),
        url: spec
            .default_port()
            .map(|_| context.options.urls.url(&record.id)),
        browser_url: spec
            .default_port()
            .map(|_| context.options.browser_urls.url(&record.id)),
        port_url: port_url(context, &record.id, spec),
        node: node.to_owned(),
        runtime: spec.runtime,
        generation: record.generation,
        pid: record
            .container
            .as_ref()
            .filter(|_| ending.is_none())
            .map(|container| container.pid),
        port: spec.port,
        network: spec.network.clone(),
        template: spec.template.clone(),
        created_at: record.created_at,
        started_at,
        ended_at: ending.map(|ending| ending.ended_at),
        phases_ms: phases_ms(&phases),
        connections: 0,
        oom_kills: 0,
        spec: record.spec,
    }
}

fn port_url(context: &Context, id: &SessionId, spec: &ResolvedSpec) -> Option<String> {
    let has_ports = !spec.ports.is_empty();
    has_ports.then(|| context.options.browser_urls.port_url(id))?
}

pub(crate) fn ended_state(ending: &Ending) -> SessionState {
    if ending.failed {
        SessionState::Failed
    } else {
        SessionState::Stopped
    }
}

fn phases_ms(phases: &Phases) -> BTreeMap<String, f64> {
    let mut phases_ms = BTreeMap::new();
    for phase in phases.iter() {
        *phases_ms.entry(phase.name.to_string()).or_insert(0.0) += phase.duration_ms;
    }
    phases_ms
}
