//! Keeps new sessions away from a node, while the present ones stay and are served.
//!
//! A file in the state directory says so, so that it outlives the daemon. A full or hanging disk may be
//! the reason for a cordon, so a failed write does not prevent it.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use conman_linux::StateFile;
use conman_proto::EventKind;
use conman_registry::NewEvent;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::context::Context;
use crate::disk_queue::DiskQueue;
use crate::error::CordonError;

/// How long to wait for a change of the file. A change that the disk delays is made later.
const DISK_PATIENCE: Duration = Duration::from_secs(3);

/// Changes of the file that may wait for the disk: those of an operator.
const MAX_WAITING: usize = 16;

#[derive(Debug)]
pub(crate) struct Cordon {
    is_set: AtomicBool,
    file: StateFile,
    queue: DiskQueue,
}

/// The file's content.
#[derive(Debug, Serialize, Deserialize)]
struct Saved {
    /// For people who read the file.
    cordoned_at: Timestamp,
}

impl Cordon {
    pub(crate) fn new(state_dir: &Path) -> Self {
        Self {
            is_set: AtomicBool::new(false),
            file: StateFile::new(state_dir.join("cordon.json")),
            queue: DiskQueue::new(DISK_PATIENCE, MAX_WAITING),
        }
    }

    pub(crate) fn is_set(&self) -> bool {
        self.is_set.load(Ordering::Acquire)
    }

    /// Continues an earlier daemon's cordon. A file that cannot be read counts as one: admitting
    /// sessions by mistake is worse.
    pub(crate) async fn resume(&self) {
        let file = self.file.clone();
        let read = tokio::task::spawn_blocking(move || file.read::<Saved>()).await;
        let saved = read.unwrap_or_else(|error| Err(io::Error::other(error)));
        let is_set = match saved {
            Ok(None) => false,
            Ok(Some(_)) => {
                tracing::info!("the node stays cordoned, as under the previous daemon");
                true
            }
            Err(error) => {
                tracing::warn!(%error, "cannot read cordon.json; the node is cordoned until `conman uncordon`");
                true
            }
        };
        self.is_set.store(is_set, Ordering::Release);
    }
}

/// Admits no new sessions from now on.
pub(crate) async fn cordon(context: &Arc<Context>) {
    let cordon = &context.cordon;
    let was_set = cordon.is_set.swap(true, Ordering::AcqRel);
    let file = cordon.file.clone();
    let cordoned_at = Timestamp::now();
    let write = move || file.write(&Saved { cordoned_at });
    let mut message = "cordoned: no new sessions; those present stay".to_owned();
    if let Err(error) = cordon.queue.make(write).await {
        tracing::warn!(%error, "cannot save the cordon");
        message = format!("{message}; a restarted daemon may admit sessions again: {error}");
    }
    if !was_set {
        tracing::info!("cordoned");
        context.note(NewEvent::of_node(EventKind::NodeCordoned, message));
    }
}

/// Admits sessions again.
///
/// # Errors
/// The file cannot be removed; then the node stays cordoned.
pub(crate) async fn uncordon(context: &Arc<Context>) -> Result<(), CordonError> {
    let cordon = &context.cordon;
    let file = cordon.file.clone();
    if let Err(source) = cordon.queue.make(move || file.remove()).await {
        return Err(CordonError {
            path: cordon.file.path().to_owned(),
            source: Arc::new(source),
        });
    }
    if cordon.is_set.swap(false, Ordering::AcqRel) {
        let message = "uncordoned".to_owned();
        tracing::info!("{message}");
        context.note(NewEvent::of_node(EventKind::NodeUncordoned, message));
    }
    Ok(())
}
