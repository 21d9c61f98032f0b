//! How many sessions the host has room for, as whoever looks at the host says now and then.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use conman_proto::{LimitMet, RuntimeKind};
use tokio::sync::Notify;

/// The limit of the host that binds first for sessions of one runtime.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostLimit {
    /// Sessions of this node, of whatever runtime, that there may be; further ones are refused.
    pub max_sessions: usize,
    /// The limit, for whoever is refused.
    pub met: LimitMet,
}

#[derive(Debug, Default)]
pub(crate) struct HostLimits {
    /// None for a runtime that no limit binds.
    latest: Mutex<BTreeMap<RuntimeKind, HostLimit>>,
    /// While the disk is short, whatever the runtime.
    disk: Mutex<Option<HostLimit>>,
    /// A start was refused: what was seen last may be outdated.
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

    /// A panic while the lock is held cannot leave half a change: each is one map operation.
    fn lock(&self) -> MutexGuard<'_, BTreeMap<RuntimeKind, HostLimit>> {
        self.latest.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
