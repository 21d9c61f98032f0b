//! Pausing containers, by orders to the shim that are independent of its fence. A file in the container's
//! directory tells the next daemon.

use std::sync::Arc;
use std::time::Duration;

use conman_linux::Freezer;
use conman_proto::RuntimeKind;
use conman_shim_protocol::{Reply, Request};
use tokio::time::{Instant, sleep};

use super::failure::{call_failed, milliseconds};
use super::{Inner, store};
use crate::shared::container_files::host_error;
use crate::shim_link::LinkError;
use crate::{ContainerKey, PausedBy, RuntimeError};

/// Bound on the time until all processes have stopped: one in a system call that hangs does not.
const FREEZE: Duration = Duration::from_secs(2);
/// Pause between two orders.
const RETRY: Duration = Duration::from_millis(5);

/// Content of the file if an operator's order has paused the container.
const BY_OPERATOR: &[u8] = b"operator\n";

/// Whether containers can be frozen: without cgroup v2, ending a frozen one would take more steps than a
/// preemption has time for.
pub(super) fn is_possible() -> bool {
    Freezer::detect().is_ok_and(|freezer| freezer.dies_frozen())
}

impl Inner {
    pub(super) async fn pause(
        self: &Arc<Self>,
        key: &ContainerKey,
        by: PausedBy,
    ) -> Result<(), RuntimeError> {
        if !is_possible() {
            return Err(RuntimeError::Unsupported {
                runtime: RuntimeKind::Native,
                action: "pause",
                subject: key.to_string(),
                reason: "the host has no unified cgroup hierarchy (v2)".to_owned(),
            });
        }
        self.hold(key, by).await?;
        let (inner, key) = (Arc::clone(self), key.clone());
        // Not awaited: a session that is resumed meanwhile only gets its pages back.
        tokio::task::spawn_blocking(move || inner.kernel.reclaim_memory(&key));
        Ok(())
    }

    /// Freezes it. If the daemon dies, the next one finds it paused.
    pub(super) async fn hold(&self, key: &ContainerKey, by: PausedBy) -> Result<(), RuntimeError> {
        let mark = self.store.container(key).paused();
        let content: &[u8] = match by {
            PausedBy::Operator => BY_OPERATOR,
            PausedBy::IdleTimeout => &[],
        };
        tokio::fs::write(&mark, content)
            .await
            .map_err(|source| host_error("write", &mark, source))?;
        let began = Instant::now();
        let name = store::name(key);
        while !self.freeze(key, &name).await? {
            if began.elapsed() > FREEZE {
                return Err(RuntimeError::TimedOut {
                    runtime: RuntimeKind::Native,
                    action: "pause",
                    subject: key.to_string(),
                    after_ms: milliseconds(FREEZE),
                });
            }
            sleep(RETRY).await;
        }
        Ok(())
    }

    async fn freeze(&self, key: &ContainerKey, name: &str) -> Result<bool, RuntimeError> {
        let name = name.to_owned();
        match self.ask(&Request::Freeze { name }).await {
            Ok(Reply::Frozen { verified }) => Ok(verified),
            Ok(_) => Err(call_failed("pause", key, LinkError::Unexpected)),
            Err(error) => Err(call_failed("pause", key, error)),
        }
    }

    pub(super) async fn resume(&self, key: &ContainerKey) -> Result<(), RuntimeError> {
        let name = store::name(key);
        let thawed = self.ask(&Request::Thaw { name }).await;
        thawed.map_err(|error| call_failed("resume", key, error))?;
        // One that stays lets the next daemon resume what runs, which changes nothing.
        let _ = tokio::fs::remove_file(self.store.container(key).paused()).await;
        Ok(())
    }

    pub(super) async fn paused_by(&self, key: &ContainerKey) -> Option<PausedBy> {
        let mark = self.store.container(key).paused();
        match tokio::fs::read(mark).await.ok()?.as_slice() {
            BY_OPERATOR => Some(PausedBy::Operator),
            _ => Some(PausedBy::IdleTimeout),
        }
    }
}
