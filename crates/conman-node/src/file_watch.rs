//! Watches of files in sessions. Each is a process in its session and a few descriptors of the node.

use std::sync::Arc;

use conman_proto::SessionId;
use conman_runtime::{ExecIo, FilesOrder};
use tokio::sync::OwnedSemaphorePermit;

use crate::access::{AccessHandle, Running, answering, running, unless_ending};
use crate::error::AccessError;
use crate::file_orders;
use crate::session::SessionHandle;

/// Watches of one session at a time. Each takes one of its `pids` and of its inotify instances.
pub(crate) const MAX_WATCHES: usize = 8;

/// Watches of all sessions of a node at a time.
pub(crate) const MAX_NODE_WATCHES: usize = 512;

/// The places that a watch takes; dropping it makes room for another.
#[derive(Debug)]
pub struct WatchPlace {
    handle: Arc<SessionHandle>,
    _session: OwnedSemaphorePermit,
    _node: OwnedSemaphorePermit,
}

impl WatchPlace {
    /// Returns why the watch has not begun, after its process has ended without a result.
    pub async fn no_result(&self) -> AccessError {
        file_orders::no_result(&self.handle).await
    }
}

impl AccessHandle {
    /// Watches a directory or a file of a running session, as `user` or its program's user. The session does not
    /// count as in use.
    pub async fn watch_files(
        &self,
        id: &SessionId,
        path: String,
        user: Option<String>,
    ) -> Result<(ExecIo, WatchPlace), AccessError> {
        self.awake(id).await?;
        let Running {
            handle,
            runtime,
            key,
        } = running(&self.context, id)?;
        let full = |limit, of| AccessError::TooManyWatches {
            id: id.clone(),
            limit,
            of,
        };
        let session = Arc::clone(&handle.watches).try_acquire_owned();
        let node = Arc::clone(&self.context.watches).try_acquire_owned();
        let place = WatchPlace {
            _session: session.map_err(|_| full(MAX_WATCHES, "of the session"))?,
            _node: node.map_err(|_| full(MAX_NODE_WATCHES, "of sessions of its node"))?,
            handle,
        };
        let began = runtime.files(&key, FilesOrder::Watch { path }, user);
        let began = answering(&self.context, runtime, "watch files of", began).await;
        Ok((unless_ending(&place.handle, began)?, place))
    }
}
