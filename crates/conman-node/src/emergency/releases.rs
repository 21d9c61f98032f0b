//! Releases of one preemption: one batch at a time is with the registry, and whatever is certified
//! meanwhile makes up the next one.

use std::sync::Arc;
use std::time::Duration;

use conman_registry::{Registry, RegistryError, Release};
use futures_util::future::{BoxFuture, FutureExt};
use tokio::time::Instant;

/// Pause between two tries of a release that failed.
const RETRY_PAUSE: Duration = Duration::from_millis(20);

/// Sessions in one batch: large enough for one commit to serve many, small enough for the first
/// ones not to wait for the last.
const BATCH: usize = 512;

/// A batch with the result of each release.
pub(super) type Released = Vec<(Release, Result<(), RegistryError>)>;

pub(super) struct Releases {
    registry: Arc<dyn Registry>,
    waiting: Vec<Release>,
    under_way: Option<BoxFuture<'static, Released>>,
    retry_at: Option<Instant>,
}

impl Releases {
    pub(super) fn new(registry: Arc<dyn Registry>) -> Self {
        Self {
            registry,
            waiting: Vec::new(),
            under_way: None,
            retry_at: None,
        }
    }

    pub(super) fn push(&mut self, release: Release) {
        self.waiting.push(release);
    }

    /// Queues a failed release again.
    pub(super) fn put_back(&mut self, release: Release) {
        self.retry_at = Some(Instant::now() + RETRY_PAUSE);
        self.waiting.push(release);
    }

    /// When to call [`Self::begin`] again, if not at once.
    pub(super) fn retry_at(&self) -> Option<Instant> {
        self.retry_at
    }

    /// Sends the next batch, unless one is under way or a pause is running.
    pub(super) fn begin(&mut self) {
        let paused = self.retry_at.is_some_and(|at| Instant::now() < at);
        if self.under_way.is_some() || self.waiting.is_empty() || paused {
            return;
        }
        self.retry_at = None;
        let size = self.waiting.len().min(BATCH);
        let batch: Vec<Release> = self.waiting.drain(..size).collect();
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
