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
    /// No entry for a runtime without a binding limit.
    latest: Mutex<BTreeMap<RuntimeKind, HostLimit>>,
    /// Set while the disk is short, for all runtimes.
    disk: Mutex<Option<HostLimit>>,
    /// A start was refused: the latest report may be outdated.
    pub(crate) met: Notify,
}

impl HostLimits {
    pub(crate) fn set(&self, runtime: RuntimeKind, limit: Option<HostLimit>) {
        let mut latest = self.lock();
        match limit {
            Some(limit) => latest.insert(runtime, limit),
            None => latest.remove(&runtime),
        };
    }

    pub(crate) fn set_disk(&self, limit: Option<HostLimit>) {
        *self.lock_disk() = limit;
    }

    pub(crate) fn disk(&self) -> Option<HostLimit> {
        self.lock_disk().clone()
    }

    pub(crate) fn of(&self, runtime: RuntimeKind) -> Option<HostLimit> {
        self.disk().or_else(|| self.lock().get(&runtime).cloned())
    }

    fn lock_disk(&self) -> MutexGuard<'_, Option<HostLimit>> {
        self.disk.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A panic cannot leave a partial change: each change is one map operation.
    fn lock(&self) -> MutexGuard<'_, BTreeMap<RuntimeKind, HostLimit>> {
        self.latest.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
