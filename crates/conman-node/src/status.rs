//! A node's state, load and problems, for the API and the other nodes.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use conman_proto::{NodeRuntime, NodeState, NodeTakeover, RuntimeKind, SessionState};
use conman_registry::Standing;
use jiff::Timestamp;

use crate::context::Context;
use crate::disk_watch;
use crate::hold::held_now;
use crate::host_limits::HostLimit;
use crate::runtime_health::RuntimeHealth;
use crate::view::Counts;

/// A node's state, load and problems. Cheap to clone.
#[derive(Debug, Clone)]
pub struct StatusHandle {
    context: Arc<Context>,
    health: Arc<RuntimeHealth>,
    takeover: Arc<Mutex<Option<NodeTakeover>>>,
    started_at: Timestamp,
}

impl StatusHandle {
    pub(crate) fn new(context: Arc<Context>, health: Arc<RuntimeHealth>) -> Self {
        Self {
            context,
            health,
            takeover: Arc::default(),
            started_at: Timestamp::now(),
        }
    }

    /// Returns whether the node still holds its ownership.
    #[must_use]
    pub fn standing(&self) -> Standing {
        self.context.options.standing.borrow().clone()
    }

    /// Returns problems that do not make the node unready, for people.
    #[must_use]
    pub fn warnings(&self) -> Vec<String> {
        let mut warnings = self.health.warnings();
        warnings.extend(disk_watch::warning(&self.context));
        warnings.extend(self.context.journal.trouble());
        warnings.extend(self.takeover().and_then(|takeover| takeover.warning()));
        warnings
    }

    /// Sets when other nodes take over, and how steady the host is.
    pub fn set_takeover(&self, takeover: NodeTakeover) {
        *self.lock_takeover() = Some(takeover);
    }

    fn takeover(&self) -> Option<NodeTakeover> {
        *self.lock_takeover()
    }

    /// A panic cannot leave a partial change: each is one assignment.
    fn lock_takeover(&self) -> MutexGuard<'_, Option<NodeTakeover>> {
        let takeover = self.takeover.lock();
        takeover.unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the names of the templates.
    #[must_use]
    pub fn templates(&self) -> Vec<String> {
        self.context
            .policy
            .get()
            .templates
            .keys()
            .cloned()
            .collect()
    }

    /// Sets the limit of the host that binds first for sessions of a runtime, if one does.
    pub fn limit_by_host(&self, runtime: RuntimeKind, limit: Option<HostLimit>) {
        self.context.host_limits.set(Some(runtime), limit);
    }

    /// Returns once a start was refused because of a limit of the host. Cancel safe: the next call returns
    /// for what this one missed.
    pub async fn host_limit_met(&self) {
        self.context.host_limits.met.notified().await;
    }

    /// Returns the node as the API shows it.
    #[must_use]
    pub fn view(&self) -> conman_proto::Node {
        let context = &*self.context;
        let shown = context.sessions.shown_after(None);
        let counts = Counts::of(context, &shown);
        let runtime = context.options.policy.default_runtime;
        let runtimes = context.runtimes.keys().map(|runtime| NodeRuntime {
            runtime: *runtime,
            error: self.health.error(*runtime),
        });
        let host_limit = context.host_limits.of(runtime);
        conman_proto::Node {
            name: context.options.name.clone(),
            instance: context.options.instance.to_string(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            state: self.state(),
            runtime,
            runtime_error: self.health.error(runtime),
            runtimes: runtimes.collect(),
            sessions_running: counts.get(SessionState::Running),
            sessions_starting: counts.get(SessionState::Starting),
            sessions_stuck: counts.get(SessionState::Stuck),
            sessions_paused: counts.get(SessionState::Paused),
            sessions_frozen: counts.get(SessionState::Frozen),
            max_sessions: context.options.limits.max_sessions as u64,
            host_limit: host_limit.map(|limit| conman_proto::HostLimit {
                max_sessions: limit.max_sessions as u64,
                limit: limit.met,
            }),
            connections: shown.iter().map(|handle| handle.activity.in_flight()).sum(),
            through: context.leave.through().in_flight(),
            takeover: self.takeover(),
            started_at: self.started_at,
            fleet: None,
        }
    }

    /// Sets the gauges of what there is, by state and never by session. Call it before metrics are read, so
    /// that they are as true as a list.
    pub fn measure(&self) {
        let context = &*self.context;
        let counts = Counts::of(context, &context.sessions.shown_after(None));
        for state in SessionState::ALL {
            let count = counts.get(state) as f64;
            metrics::gauge!("conman_sessions", "state" => state.as_str()).set(count);
        }
        let now = self.state();
        for state in NodeState::ALL {
            let is_now = f64::from(u8::from(state == now));
            metrics::gauge!("conman_node_state", "state" => state.as_str()).set(is_now);
        }
        let through = context.leave.through().in_flight() as f64;
        metrics::gauge!("conman_through_connections").set(through);
        metrics::gauge!("conman_held_connections").set(held_now(&context.held) as f64);
        metrics::gauge!("conman_cleanups_waiting").set(context.cleanup.len() as f64);
    }

    /// Returns the node's state, without counting its sessions.
    #[must_use]
    pub fn state(&self) -> NodeState {
        if self.context.table.closed().is_some() {
            NodeState::Preempted
        } else if self.context.drain.reason().is_some() {
            NodeState::Draining
        } else if self.context.leave.is_stopping() {
            NodeState::Stopping
        } else if self.context.cordon.is_set() {
            NodeState::Cordoned
        } else {
            NodeState::Live
        }
    }
}
