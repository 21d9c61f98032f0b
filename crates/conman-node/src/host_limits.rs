//! How many sessions the host has room for, as last reported.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use conman_proto::{LimitMet, RuntimeKind};
use tokio::sync::Notify;

/// The limit of the host that binds first for sessions of one runtime.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostLimit {
    /// Maximum number of this node's sessions, of all runtimes; further ones are refused.
    pub max_sessions: usize,
    /// The limit, for the error of a refused client.
    pub met: LimitMet,
}

#[derive(Debug, Default)]
pub(crate) struct HostLimits {
    /// For one runtime or, while the disk is short, for all. No entry without a binding limit.
    latest: Mutex<BTreeMap<Option<RuntimeKind>, HostLimit>>,
    /// A start was refused: the latest report may be outdated.
    pub(crate) met: Notify,
}

impl HostLimits {
    /// Sets the limit for a runtime, or for all while the disk is short.
    pub(crate) fn set(&self, runtime: Option<RuntimeKind>, limit: Option<HostLimit>) {
        let mut latest = self.lock();
        match limit {
            Some(limit) => latest.insert(runtime, limit),
            None => latest.remove(&runtime),
        };
    }

    pub(crate) fn disk(&self) -> Option<HostLimit> {
        self.lock().get(&None).cloned()
    }

    pub(crate) fn of(&self, runtime: RuntimeKind) -> Option<HostLimit> {
        let latest = self.lock();
        let limit = latest.get(&None).or_else(|| latest.get(&Some(runtime)));
        limit.cloned()
    }

    /// A panic cannot leave a partial change: each change is one map operation.
    fn lock(&self) -> MutexGuard<'_, BTreeMap<Option<RuntimeKind>, HostLimit>> {
        self.latest.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
