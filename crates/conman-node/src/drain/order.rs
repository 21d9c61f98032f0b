//! The parameters of a drain, and the file that makes it outlive its daemon.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use conman_linux::StateFile;
use conman_proto::DrainRequest;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use tokio::task::spawn_blocking;

use crate::disk_queue::DiskQueue;
use crate::session::SessionHandle;

/// Default number of sessions stopped at a time: enough that one with a long grace does not delay all
/// others, few enough that the other nodes can start them as fast.
const PARALLEL: u32 = 8;

/// Maximum of `parallel`.
pub const MAX_PARALLEL: u32 = 256;

/// Time before SIGKILL where the operator names a signal, and neither they nor the session a time.
const DEFAULT_GRACE_MS: u32 = 10_000;

/// How long to wait for a change of the file. A change that the disk delays is made later.
const DISK_PATIENCE: Duration = Duration::from_secs(3);

/// Changes of the file that may wait for the disk: some of an operator, and one every few seconds of a
/// drain that is not saved yet.
const MAX_WAITING: usize = 16;

const DEFAULT_REASON: &str = "the node is being drained";

/// The saved form of a drain.
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

    /// Returns the signal sent first to a session's program, and the time before it is killed; without time
    /// no signal is sent.
    pub(super) fn warning(&self, handle: &SessionHandle) -> (Option<String>, u32) {
        let own = handle.spec().preempt_grace_ms;
        let grace_ms = match (self.grace_ms, &self.signal) {
            (Some(grace_ms), _) => grace_ms,
            (None, Some(_)) if own == 0 => DEFAULT_GRACE_MS,
            (None, _) => own,
        };
        let signal = self.signal.clone().or(handle.spec().preempt_signal.clone());
        (signal.filter(|_| grace_ms > 0), grace_ms)
    }
}

/// The file of an order. Its changes are made one after the other, in their order.
#[derive(Debug)]
pub(super) struct OrderFile {
    file: StateFile,
    pub(super) queue: DiskQueue,
}

impl OrderFile {
    pub(super) fn new(path: PathBuf) -> Self {
        Self {
            file: StateFile::new(path),
            queue: DiskQueue::new(DISK_PATIENCE, MAX_WAITING),
        }
    }

    pub(super) fn path(&self) -> &Path {
        self.file.path()
    }

    /// Reads an earlier daemon's order. A file that cannot be read counts as a drain without a reason.
    pub(super) async fn read(&self) -> Option<Order> {
        let file = self.file.clone();
        let read = spawn_blocking(move || file.read()).await;
        let read = read.unwrap_or_else(|error| Err(io::Error::other(error)));
        read.unwrap_or_else(|error| {
            // Draining by mistake is safer than admitting sessions on a machine that is about to stop.
            tracing::warn!(%error, "cannot read whether the node is being drained; draining");
            Some(Order::of(&DrainRequest::default()))
        })
    }

    pub(super) async fn write(&self, order: &Order) -> io::Result<()> {
        let (file, order) = (self.file.clone(), order.clone());
        self.queue.make(move || file.write(&order)).await
    }

    pub(super) async fn remove(&self) -> io::Result<()> {
        let file = self.file.clone();
        self.queue.make(move || file.remove()).await
    }
}
