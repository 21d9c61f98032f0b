//! The batch of releases that is with the registry.

use std::sync::Arc;

use conman_registry::{Registry, RegistryError, Release};
use futures_util::future::{BoxFuture, FutureExt};

/// A batch with the result of each release.
pub(super) type Released = Vec<(Release, Result<(), RegistryError>)>;

/// One batch at a time.
pub(super) struct Releases {
    registry: Arc<dyn Registry>,
    under_way: Option<BoxFuture<'static, Released>>,
}

impl Releases {
    pub(super) fn new(registry: Arc<dyn Registry>) -> Self {
        Self {
            registry,
            under_way: None,
        }
    }

    pub(super) fn send(&mut self, batch: Vec<Release>) {
        let registry = Arc::clone(&self.registry);
        let work = async move {
            let results = registry.release(batch.clone()).await;
            batch.into_iter().zip(results).collect()
        };
        self.under_way = Some(work.boxed());
    }

    /// Returns the batch under way once it is answered; pending without one. Cancel safe: it is kept.
    pub(super) async fn next(&mut self) -> Released {
        let Some(work) = &mut self.under_way else {
            return std::future::pending().await;
        };
        let released = work.await;
        self.under_way = None;
        released
    }
}
