//! Makes a preemption outlive its daemon: the machine is about to stop even if the daemon is restarted.
//!
//! A file in the state directory records it until the node is readmitted or the machine reboots. The
//! emergency thread waits for no disk, so another thread writes the file. A readmission does not wait
//! either, since a node whose disk fails must still serve.

use std::io;
use std::path::Path;

use conman_linux::StateFile;
use serde::{Deserialize, Serialize};

use crate::state_writer::{RETRY_PAUSE, StateWriter};

/// File in the state directory.
const FILE: &str = "preempted.json";

/// Saves why the machine is about to stop, or that it stays.
pub(crate) type PreemptionFile = StateWriter<String>;

/// The content of the file.
#[derive(Debug, Serialize, Deserialize)]
struct Content {
    reason: String,
    boot_id: String,
}

pub(crate) fn start(state_dir: &Path) -> io::Result<PreemptionFile> {
    // Not synced: after a crash of the machine the file is from an earlier boot and has no effect. So a
    // notice does not load the disk that the releases are written to.
    PreemptionFile::written_by(state_dir.join(FILE), RETRY_PAUSE, |file, reason| {
        let Some(reason) = reason.cloned() else {
            return file.remove();
        };
        let boot_id = conman_linux::boot_id()?;
        file.write_unsynced(&Content { reason, boot_id })
    })
}

/// Returns why an earlier daemon of this boot was preempted, unless it was readmitted. Blocks on the
/// disk.
pub(crate) fn recall(state_dir: &Path) -> Option<String> {
    let file = StateFile::new(state_dir.join(FILE));
    let saved: Content = file.read().unwrap_or_else(|error| {
        let path = file.path().display();
        tracing::warn!(%path, %error, "cannot read whether the node was preempted; it is not");
        None
    })?;
    let present = conman_linux::boot_id().ok()?;
    (saved.boot_id == present).then_some(saved.reason)
}
