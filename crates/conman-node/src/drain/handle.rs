//! The handle on a node's drain.

use std::sync::Arc;

use conman_proto::{DrainPlan, DrainReport, DrainRequest, RebalanceReport};

use crate::context::Context;
use crate::error::DrainError;
use crate::revival::Relocate;

/// A node's drain: orders, reports and cancels it. Cheap to clone.
#[derive(Debug, Clone)]
pub struct DrainHandle {
    context: Arc<Context>,
}

impl DrainHandle {
    pub(crate) fn new(context: Arc<Context>) -> Self {
        Self { context }
    }

    /// Returns what a drain would do now.
    #[must_use]
    pub fn plan(&self, request: &DrainRequest) -> DrainPlan {
        super::plan_now(&self.context, request)
    }

    /// Refuses new sessions from now on, and stops the present ones in order, a few at a time. Returns once
    /// that has begun; a drain that is under way or finished is not changed.
    pub async fn begin(&self, request: &DrainRequest) -> Result<DrainReport, DrainError> {
        let (context, request) = (Arc::clone(&self.context), request.clone());
        // In its own task: a cancelled caller must not leave a file without a drain.
        let draining = tokio::spawn(async move { super::drain(&context, &request).await });
        draining.await.unwrap_or(Err(DrainError::NotDraining))
    }

    /// Returns the state of the drain; `None` without one.
    #[must_use]
    pub fn report(&self) -> Option<DrainReport> {
        super::report(&self.context)
    }

    /// Admits sessions again after a drain; those that have not had their turn stay.
    pub async fn cancel(&self) -> Result<(), DrainError> {
        let context = Arc::clone(&self.context);
        let cancelling = tokio::spawn(async move { super::undrain(&context).await });
        cancelling.await.unwrap_or(Err(DrainError::NotDraining))
    }

    /// Returns which sessions would be moved now if `count` were too many.
    #[must_use]
    pub fn rebalance_plan(&self, count: u32) -> DrainPlan {
        super::rebalance::plan_now(&self.context, count)
    }

    /// Begins to move `count` sessions to other nodes, unused and light ones first, one at a time. Returns false,
    /// and begins nothing, while an earlier order is carried out, and for some seconds afterwards. Must be called
    /// within a tokio runtime.
    #[must_use]
    pub fn rebalance(&self, count: u32) -> bool {
        super::rebalance::begin(&self.context, count)
    }

    /// Returns what the latest rebalance has done; `None` before the first of this daemon.
    #[must_use]
    pub fn rebalance_report(&self) -> Option<RebalanceReport> {
        super::rebalance::report(&self.context)
    }

    /// Makes other nodes start the sessions that a drain releases and that want it. Only the first call has
    /// an effect.
    pub fn relocate_by(&self, relocate: Arc<dyn Relocate>) {
        let _ = self.context.relocate.set(relocate);
    }
}
