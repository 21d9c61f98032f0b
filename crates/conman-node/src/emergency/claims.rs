//! Claims under way when a preemption begins, whose tasks may be too stuck to take the answers.

use std::sync::Arc;

use conman_proto::{Generation, SessionId};
use conman_registry::{RecordState, Registry};
use futures_util::future::{BoxFuture, FutureExt};

/// Reads the generations of claims from the registry, one round at a time.
#[derive(Default)]
pub(super) struct Claims {
    under_way: Option<BoxFuture<'static, Vec<(SessionId, Generation)>>>,
}

impl Claims {
    pub(super) fn look_up(&mut self, registry: &Arc<dyn Registry>, claiming: Vec<SessionId>) {
        let registry = Arc::clone(registry);
        let work = async move {
            let mut found = Vec::new();
            for id in claiming {
                if let Ok(Some(record)) = registry.get(&id).await
                    && record.state == RecordState::Starting
                {
                    found.push((id, record.generation));
                }
            }
            found
        };
        self.under_way = Some(work.boxed());
    }

    /// Returns the result of the round under way; pending without one. Cancel safe: the round is kept.
    pub(super) async fn next(&mut self) -> Vec<(SessionId, Generation)> {
        let Some(work) = &mut self.under_way else {
            return std::future::pending().await;
        };
        let found = work.await;
        self.under_way = None;
        found
    }
}
