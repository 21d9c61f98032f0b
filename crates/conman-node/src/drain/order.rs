//! What is asked of a drain, and the file that has it outlive its daemon.

use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::time::Duration;

use conman_linux::{replace_file, sync_parent};
use conman_proto::DrainRequest;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use tokio::task::spawn_blocking;

use crate::session::SessionHandle;
use crate::slow_file::Lane;

/// Sessions stopped at a time when nothing else is asked for: enough for one with a long grace not
/// to hold up all others, few enough for the other nodes to start them as fast.
const PARALLEL: u32 = 8;

/// Most that may be asked for.
pub const MAX_PARALLEL: u32 = 256;

/// Before SIGKILL where the operator names a signal, and neither they nor the session a time.
const DEFAULT_GRACE_MS: u32 = 10_000;

/// How long a change of the file is waited for. One that the disk holds up goes on by itself.
const DISK_PATIENCE: Duration = Duration::from_secs(3);

/// Changes of the file that a disk may hold up: some of an operator's, and one every few seconds of a
/// drain that is not written down.
const MAX_WAITING: usize = 16;

const DEFAULT_REASON: &str = "the node is being drained";

/// What is written down of a drain. What a newer conman adds is passed over.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Order {
    pub(super) reason: String,
    pub(super) started_at: Timestamp,
    pub(super) parallel: u32,
    signal: Option<String>,
    grace_ms: Option<u32>,
}

impl Order {
    pub(super) fn of(request: &DrainRequest) -> Self {
        let reason = request.reason.clone().filter(|reason| !reason.is_empty());
        Self {
            reason: reason.unwrap_or_else(|| DEFAULT_REASON.to_owned()),
            started_at: Timestamp::now(),
            parallel: request.parallel.unwrap_or(PARALLEL).clamp(1, MAX_PARALLEL),
            signal: request.signal.clone(),
            grace_ms: request.grace_ms,
        }
    }

    /// What is sent first to a session's program, and how long before it is killed; without time
    /// nothing is sent.
    pub(super) fn warning(&self, handle: &SessionHandle) -> (Option<String>, u32) {
        let own = handle.spec.preempt_grace_ms;
        let grace_ms = match (self.grace_ms, &self.signal) {
            (Some(grace_ms), _) => grace_ms,
            (None, Some(_)) if own == 0 => DEFAULT_GRACE_MS,
            (None, _) => own,
        };
        let signal = self.signal.clone().or(handle.spec.preempt_signal.clone());
        (signal.filter(|_| grace_ms > 0), grace_ms)
    }
}

/// Where an order is written down. Its changes are made one after the other, in their order.
#[derive(Debug)]
pub(super) struct OrderFile {
    path: PathBuf,
    pub(super) lane: Lane,
}

impl OrderFile {
    pub(super) fn new(path: PathBuf) -> Self {
        Self {
            path,
            lane: Lane::new(DISK_PATIENCE, MAX_WAITING),
        }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// What an earlier daemon wrote down; one that cannot be read is a drain for no reason told.
    pub(super) async fn read(&self) -> Option<Order> {
        let path = self.path.clone();
        let read = spawn_blocking(move || std::fs::read(path)).await;
        match read.unwrap_or_else(|error| Err(io::Error::other(error))) {
            Ok(bytes) => Some(serde_json::from_slice(&bytes).unwrap_or_else(|error| {
                tracing::warn!(%error, "what is written of a drain cannot be read; it goes on as usual");
                Order::of(&DrainRequest::default())
            })),
            Err(error) if error.kind() == ErrorKind::NotFound => None,
            Err(error) => {
                // Rather full by mistake than admitting on a machine that is about to be taken away.
                tracing::warn!(%error, "cannot read whether the node is being drained; it is");
                Some(Order::of(&DrainRequest::default()))
            }
        }
    }

    pub(super) async fn write(&self, order: &Order) -> io::Result<()> {
        let bytes = serde_json::to_vec(order)?;
        self.change(move |path| replace_file(path, &bytes)).await
    }

    pub(super) async fn remove(&self) -> io::Result<()> {
        self.change(|path| match std::fs::remove_file(path) {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
            other => other.and_then(|()| sync_parent(path)),
        })
        .await
    }

    async fn change(
        &self,
        change: impl FnOnce(&Path) -> io::Result<()> + Send + 'static,
    ) -> io::Result<()> {
        let path = self.path.clone();
        self.lane.make(move || change(&path)).await
    }
}
