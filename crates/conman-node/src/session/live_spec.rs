//! The spec of a session, of which a client may change some fields while it runs.

use std::sync::{Arc, PoisonError, RwLock};

use conman_proto::ResolvedSpec;
use tokio::sync::{Mutex, Notify};

#[derive(Debug)]
pub(crate) struct LiveSpec {
    current: RwLock<Arc<ResolvedSpec>>,
    changed: Notify,
    /// Held while a change is being recorded.
    changing: Mutex<()>,
}

impl LiveSpec {
    pub(super) fn new(spec: ResolvedSpec) -> Self {
        Self {
            current: RwLock::new(Arc::new(spec)),
            changed: Notify::new(),
            changing: Mutex::new(()),
        }
    }

    pub(super) fn get(&self) -> Arc<ResolvedSpec> {
        Arc::clone(&self.current.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Replaces the spec by what `change` returns, which has recorded it. One change at a time.
    pub(crate) async fn change<E>(
        &self,
        change: impl AsyncFnOnce(&ResolvedSpec) -> Result<ResolvedSpec, E>,
    ) -> Result<(), E> {
        let _changing = self.changing.lock().await;
        let spec = Arc::new(change(&self.get()).await?);
        *self.current.write().unwrap_or_else(PoisonError::into_inner) = spec;
        self.changed.notify_one();
        Ok(())
    }

    /// Waits for a change since the last call. For the session's task only. Cancel safe.
    pub(super) async fn changed(&self) {
        self.changed.notified().await;
    }
}
