//! Removing a container with everything that was made for it.
//!
//! Its directory is moved away first, so that no start finds it, and moved back if the removal
//! fails. Only once nothing of it can run are its files removed, then its cgroups; its ids are
//! released last. A removal that fails half-way can be repeated.

use std::sync::Arc;

use conman_shim_protocol::{CallError, Request};

use super::failure::call_failed;
use super::{Inner, away, store};
use crate::shared::container_files::ContainerFiles;
use crate::shim_link::LinkError;
use crate::{ContainerKey, RuntimeError};

const ACTION: &str = "remove";

impl Inner {
    pub(super) async fn remove(self: Arc<Self>, key: ContainerKey) -> Result<(), RuntimeError> {
        let (inner, owned) = (Arc::clone(&self), key.clone());
        let screen = self.last_screen(&key).await;
        if let Some(name) = self.kernel.ahead_of(&key) {
            self.pool.drop_one(name);
        }
        let leaving = away(ACTION, move || {
            inner.kernel.check_dead(&owned)?;
            let dir = inner.store.container(&owned);
            let kept = match screen {
                Some(screen) => inner.kept_logs.keep_ends(&owned, screen, None),
                None => inner.kept_logs.keep(&owned, &dir.log(), &dir.log_stderr()),
            };
            if let Err(error) = kept {
                tracing::warn!(container = %owned, %error, "cannot keep the log");
            }
            inner.store.leave(&owned)
        })
        .await?;
        let removed = self.remove_rest(&key, leaving.clone()).await;
        if removed.is_err()
            && let Some(leaving) = leaving
        {
            let inner = Arc::clone(&self);
            if let Err(error) = away(ACTION, move || inner.store.stay(&leaving)).await {
                tracing::error!(container = %key, %error, "cannot move back the directory");
            }
        }
        removed
    }

    /// The container's directory is where no start finds it.
    async fn remove_rest(
        self: &Arc<Self>,
        key: &ContainerKey,
        leaving: Option<store::ContainerDir>,
    ) -> Result<(), RuntimeError> {
        // A start that is already further is not delayed by that.
        let found = self.look(key, ACTION).await?;
        if found.starting || found.container.is_some_and(|view| view.state.is_alive()) {
            return Err(RuntimeError::StillAlive {
                subject: key.to_string(),
                // Only for the error message.
                pids: self.kernel.pids(key).unwrap_or_default(),
            });
        }
        let (inner, owned, dir) = (Arc::clone(self), key.clone(), leaving.clone());
        away(ACTION, move || {
            inner.kernel.check_dead(&owned)?;
            // First, or the kernel writes all of it back before it removes the cgroups.
            if let Some(dir) = &dir {
                dir.shed();
            }
            // Nobody waits for it: it may wait for others' starts.
            let (other, root) = (Arc::clone(&inner), owned.clone());
            tokio::task::spawn_blocking(move || other.remove_root(&root));
            inner.kernel.remove_cgroups(&owned)?;
            match dir.map(|dir| dir.plan()) {
                Some(Ok(Some(plan))) => ContainerFiles::at(&plan.files_dir).remove(),
                Some(Err(error)) => {
                    tracing::warn!(container = %owned, %error, "cannot remove its small files");
                    Ok(())
                }
                Some(Ok(None)) | None => Ok(()),
            }
        })
        .await?;
        let plan = leaving.as_ref().and_then(|dir| dir.plan().ok().flatten());
        if let Some(link) = plan.and_then(|plan| plan.link) {
            self.network.leave(key, &link).await;
        }
        let names = vec![store::name(key)];
        // Last: another container may get its ids from here on. Its kept commands are forgotten with it.
        match self.ask(&Request::Acknowledge { names }).await {
            Ok(_) => {}
            // Its start has not been answered yet.
            Err(LinkError::Refused(CallError::StillAlive { .. })) => {
                return Err(RuntimeError::StillAlive {
                    subject: key.to_string(),
                    pids: Vec::new(),
                });
            }
            Err(error) => return Err(call_failed(ACTION, key, error)),
        }
        if let Some(leaving) = leaving {
            let inner = Arc::clone(self);
            away(ACTION, move || inner.store.discard(&leaving)).await?;
        }
        self.images.release(key);
        self.kernel.forget(key);
        self.lock_with_runtime().remove(key);
        self.ends.forget(&store::name(key));
        Ok(())
    }
}
