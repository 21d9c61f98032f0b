//! A node's state, load and problems, for the API and the other nodes.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use conman_proto::{NodeRuntime, NodeState, NodeStore, NodeTakeover, RuntimeKind, SessionState};
use conman_registry::Standing;
use jiff::Timestamp;

use crate::context::Context;
use crate::disk_watch;
use crate::host_limits::HostLimit;
use crate::start_waits::held_now;
use crate::view::Counts;

/// A node's state, load and problems. Cheap to clone.
#[derive(Debug, Clone)]
pub struct StatusHandle {
    context: Arc<Context>,
    reported: Arc<Mutex<Reported>>,
    started_at: Timestamp,
}

/// What other parts of the daemon report about the node.
#[derive(Debug, Default)]
struct Reported {
    takeover: Option<NodeTakeover>,
    store: Option<NodeStore>,
    unreached: Vec<String>,
    cut_off: bool,
}

impl StatusHandle {
    pub(crate) fn new(context: Arc<Context>) -> Self {
        Self {
            context,
            reported: Arc::default(),
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
        let mut warnings = self.context.health.warnings();
        warnings.extend(disk_watch::warning(&self.context));
        warnings.extend(self.context.journal.trouble());
        let reported = self.reported();
        let takeover = reported.takeover.as_ref();
        warnings.extend(takeover.and_then(NodeTakeover::warning));
        let store = reported.store.as_ref();
        warnings.extend(store.and_then(|store| store.warning.clone()));
        if !reported.unreached.is_empty() {
            let names = reported.unreached.join(", ");
            warnings.push(format!("this node does not reach {names}"));
        }
        warnings
    }

    /// Sets when other nodes take over, and how steady the host is.
    pub fn set_takeover(&self, takeover: NodeTakeover) {
        self.reported().takeover = Some(takeover);
    }

    /// Sets how this node finds the registry.
    pub fn set_store(&self, store: Option<NodeStore>) {
        self.reported().store = store;
    }

    /// Sets which live nodes this one does not reach, and whether it is cut off from most of the nodes that
    /// reach each other.
    pub fn set_reach(&self, unreached: Vec<String>, cut_off: bool) {
        let mut reported = self.reported();
        (reported.unreached, reported.cut_off) = (unreached, cut_off);
    }

    /// Returns the nodes that this one does not reach if it is cut off.
    #[must_use]
    pub fn cut_off(&self) -> Option<Vec<String>> {
        let reported = self.reported();
        reported.cut_off.then(|| reported.unreached.clone())
    }

    /// A panic cannot leave a partial change: each is an assignment.
    fn reported(&self) -> MutexGuard<'_, Reported> {
        let reported = self.reported.lock();
        reported.unwrap_or_else(PoisonError::into_inner)
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
            error: self.context.health.error(*runtime),
            answered_ago_ms: self.context.health.answered_ago_ms(*runtime),
        });
        let host_limit = context.host_limits.of(runtime);
        let reported = self.reported();
        conman_proto::Node {
            name: context.options.name.clone(),
            instance: context.options.instance.to_string(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            state: self.state(),
            runtime,
            runtime_error: self.context.health.error(runtime),
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
            takeover: reported.takeover,
            store: reported.store.clone(),
            unreached: reported.unreached.clone(),
            clock: Some(Timestamp::now()),
            started_at: self.started_at,
            fleet: None,
        }
    }

    /// Sets the gauges of what there is, by state and never by session. Call it before metrics are read, so
    /// that they are as true as a list.
    pub fn measure(&self) {
        let context = &*self.context;
        let mut shown = context.sessions.shown_after(None);
        shown.retain(|handle| !handle.is_elsewhere.load(Ordering::Relaxed));
        let counts = Counts::of(context, &shown);
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
        let ahead = context.runtimes.values().map(|one| one.made_ahead());
        metrics::gauge!("conman_pool_waiting").set(ahead.sum::<usize>() as f64);
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
