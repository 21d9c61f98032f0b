//! Errors of the journal.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use conman_linux::FORMAT;

/// Why the journal could not be opened or read.
#[derive(Debug, Clone, thiserror::Error)]
pub enum JournalError {
    #[error("another conman already uses {path}; stop it, or give this one its own state_dir")]
    InUse { path: PathBuf },
    #[error(
        "{path} has format {found}, and this conman uses format {FORMAT}; run the conman that wrote \
        it, or move the file away to begin a new journal"
    )]
    OtherFormat { path: PathBuf, found: u32 },
    #[error("{action} {path}")]
    Io {
        action: &'static str,
        path: PathBuf,
        #[source]
        source: Arc<io::Error>,
    },
    #[error("{action} the journal {path}")]
    Store {
        action: &'static str,
        path: PathBuf,
        #[source]
        source: Arc<redb::Error>,
    },
    #[error("event {seq} of the journal cannot be read")]
    Corrupt {
        seq: u64,
        #[source]
        source: Arc<serde_json::Error>,
    },
    #[error(
        "the journal {path} is not open: its disk refused a write, which is retried \
        automatically"
    )]
    Unavailable { path: PathBuf },
}

impl JournalError {
    /// Whether the same call may succeed later without a change by its caller.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::Io { .. } | Self::Store { .. } | Self::Unavailable { .. } => true,
            Self::InUse { .. } | Self::OtherFormat { .. } | Self::Corrupt { .. } => false,
        }
    }
}
