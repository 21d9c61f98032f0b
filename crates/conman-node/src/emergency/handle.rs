//! The handle of the emergency thread.

use std::future::Future;

use conman_core::preemption::Origin;
use conman_proto::{PreemptPlan, PreemptReport, PreemptRequest};
use tokio::runtime;
use tokio::sync::{mpsc, oneshot};

use super::{Command, Means, Notice};
use crate::error::PreemptError;
use crate::plan;

/// A node's preemption: gives notice, withdraws it, and predicts. Works from any thread and any runtime,
/// also when everything else hangs. Cheap to clone.
#[derive(Debug, Clone)]
pub struct PreemptionHandle {
    pub(super) commands: mpsc::Sender<Command>,
    pub(super) runtime: runtime::Handle,
    pub(super) means: Means,
}

/// The future report of a preemption. Dropping it does not affect the preemption.
#[derive(Debug)]
pub struct PendingReport(oneshot::Receiver<PreemptReport>);

impl PendingReport {
    /// Waits until every session is released, load balancers have noticed, and nothing passes through the
    /// node any more; the budget bounds all of it.
    pub async fn wait(self) -> Result<PreemptReport, PreemptError> {
        self.0.await.map_err(|_| PreemptError::ThreadEnded)
    }
}

impl PreemptionHandle {
    /// Kills, certifies and releases every session, and admits no more. A second notice gets the first one's
    /// report. The emergency thread does the work; cancelling does not cancel it.
    ///
    /// `source` says who gave notice: `api`, `admin`, `signal`, or `restart` for an earlier daemon's.
    /// The next daemon acts on it too, except for a signal, which ends only this daemon.
    pub async fn preempt(
        &self,
        request: &PreemptRequest,
        source: &str,
    ) -> Result<PreemptReport, PreemptError> {
        self.begin(request, source)?.wait().await
    }

    /// Like [`Self::preempt`], but returns as soon as the notice is queued.
    pub fn begin(
        &self,
        request: &PreemptRequest,
        source: &str,
    ) -> Result<PendingReport, PreemptError> {
        let (reply, receiver) = oneshot::channel();
        let reason = request.reason.as_deref().unwrap_or("preemption notice");
        let notice = Notice::now(source, Origin::Operator, reason, request.budget_ms, reply);
        self.send(Command::Preempt(notice))?;
        Ok(PendingReport(receiver))
    }

    /// Admits sessions again, at once or when the preemption under way is finished. Returns when that is
    /// done or scheduled.
    pub async fn readmit(&self) -> Result<(), PreemptError> {
        let (reply, done) = oneshot::channel();
        self.send(Command::Readmit(Origin::Operator, Some(reply)))?;
        done.await.map_err(|_| PreemptError::ThreadEnded)
    }

    /// Returns what a preemption would do now.
    #[must_use]
    pub fn plan(&self, budget_ms: Option<u32>) -> PreemptPlan {
        plan::of_table(&self.means.table, budget_ms.unwrap_or(self.means.budget_ms))
    }

    /// Whether a preemption is under way or over, and why.
    #[must_use]
    pub fn preempted(&self) -> Option<String> {
        self.means.table.closed().map(|closed| closed.reason)
    }

    /// Runs a task on the emergency thread that must work when the rest of the daemon hangs, such as a
    /// signal handler. It must never block: that thread is the one that preempts.
    pub fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        self.runtime.spawn(task);
    }

    pub(crate) fn stop(&self) {
        // A full queue has no reader: the thread has ended already.
        let _ = self.commands.try_send(Command::Stop);
    }

    fn send(&self, command: Command) -> Result<(), PreemptError> {
        self.commands.try_send(command).map_err(PreemptError::from)
    }
}
