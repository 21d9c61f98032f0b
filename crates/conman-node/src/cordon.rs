//! Keeps new sessions away from a node, while the present ones stay and are served.
//!
//! A file in the state directory says so, so that it outlives the daemon. A full or hanging disk may be
//! the reason for a cordon, so a failed write does not prevent it.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use conman_proto::EventKind;
use conman_registry::NewEvent;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;

use crate::context::Context;
use crate::error::CordonError;
use crate::state_writer::StateWriter;

#[derive(Debug)]
pub(crate) struct Cordon {
    is_set: AtomicBool,
    file: StateWriter<Saved>,
}

/// The file's content.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Saved {
    /// For people who read the file.
    cordoned_at: Timestamp,
}

impl Saved {
    fn now() -> Option<Self> {
        Some(Self {
            cordoned_at: Timestamp::now(),
        })
    }
}

impl Cordon {
    pub(crate) fn new(state_dir: &Path) -> io::Result<Self> {
        Ok(Self {
            is_set: AtomicBool::new(false),
            file: StateWriter::start(state_dir.join("cordon.json"))?,
        })
    }

    pub(crate) fn is_set(&self) -> bool {
        self.is_set.load(Ordering::Acquire)
    }

    /// Continues an earlier daemon's cordon. A file that cannot be read counts as one: admitting
    /// sessions by mistake is worse.
    pub(crate) async fn resume(&self) {
        let is_set = match self.file.read().await {
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

/// Cordons the node for each reason that a source of notices has, until it is aborted.
pub(crate) async fn on_notice(context: Arc<Context>, mut reasons: mpsc::Receiver<String>) {
    while let Some(reason) = reasons.recv().await {
        cordon(&context, Some(&reason)).await;
    }
}

/// Admits no new sessions from now on.
pub(crate) async fn cordon(context: &Arc<Context>, reason: Option<&str>) {
    let cordon = &context.cordon;
    let was_set = cordon.is_set.swap(true, Ordering::AcqRel);
    let mut message = "cordoned: no new sessions; those present stay".to_owned();
    if let Some(reason) = reason {
        message = format!("{message} ({reason})");
    }
    if let Err(error) = cordon.file.set_and_wait(Saved::now()).await {
        message = format!("{message}; a restarted daemon may admit sessions again: {error}");
    }
    if !was_set {
        tracing::info!(reason, "cordoned");
        context.note(NewEvent::of_node(EventKind::NodeCordoned, message));
    }
}

/// Admits sessions again.
///
/// # Errors
/// The file cannot be removed; then the node stays cordoned.
pub(crate) async fn uncordon(context: &Arc<Context>) -> Result<(), CordonError> {
    let cordon = &context.cordon;
    if let Err(source) = cordon.file.set_and_wait(None).await {
        if cordon.is_set() {
            cordon.file.set(Saved::now());
        }
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
