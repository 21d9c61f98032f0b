//! Errors of the registry.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use conman_linux::FORMAT;
use conman_proto::{Generation, SessionId};

/// Why the registry refused or failed. One failed commit answers many callers, hence `Clone`.
#[derive(Debug, Clone, thiserror::Error)]
pub enum RegistryError {
    #[error("session {id} is owned by generation {generation}, which has not ended")]
    Owned {
        id: SessionId,
        generation: Generation,
    },
    #[error("generation {generation} of session {id} is not current{}",
        current.map(|g| format!("; the current one is {g}")).unwrap_or_default())]
    Superseded {
        id: SessionId,
        generation: Generation,
        current: Option<Generation>,
    },
    #[error("the record of session {id} has changed since it was read; read it again")]
    Changed { id: SessionId },
    #[error("generation {generation} of session {id} has ended; it can only be forgotten")]
    Ended {
        id: SessionId,
        generation: Generation,
    },
    #[error("cannot set session {id} to state `{state}`: only {by} does so")]
    NotNotable {
        id: SessionId,
        state: &'static str,
        by: &'static str,
    },
    #[error("another conman{} already uses {path}; stop it, or give this one its own state_dir",
        holder.map(|pid| format!(" (process {pid})")).unwrap_or_default())]
    InUse { path: PathBuf, holder: Option<u32> },
    #[error("{path} has format {found}, and this conman uses format {FORMAT}; {}",
        start_afresh(*found, *floor))]
    OtherFormat {
        path: PathBuf,
        found: u32,
        /// The greatest generation that may have been used, as far as known.
        floor: Option<u64>,
    },
    #[error(
        "{path} and the registry file next to it are missing or damaged, so used generations are \
        unknown; restore one of them, or start once with --generation-floor N above every \
        generation ever used"
    )]
    FloorUnknown { path: PathBuf },
    #[error(
        "this node belongs to a fleet ({path} exists), but its configuration names no etcd: add \
        [registry] kind = \"etcd\" and its endpoints again; or, to remove this node from its \
        fleet, start once with --generation-floor N above every generation that the fleet has \
        used, which ends the fleet's sessions on this node"
    )]
    OfFleet { path: PathBuf },
    #[error(
        "{path} is damaged ({what}); restore it from a backup, or move it away to start \
        without records: generations keep growing, and running containers are ended"
    )]
    Damaged { path: PathBuf, what: String },
    #[error("{action} {path}")]
    Io {
        action: &'static str,
        path: PathBuf,
        #[source]
        source: Arc<io::Error>,
    },
    #[error("{action} in the registry file {path}")]
    Store {
        action: &'static str,
        path: PathBuf,
        #[source]
        source: Arc<redb::Error>,
    },
    #[error("the record of session {id} cannot be read")]
    Corrupt {
        id: String,
        #[source]
        source: Arc<serde_json::Error>,
    },
    /// The stored value is not one that this version of conman writes.
    #[error("{reason}")]
    Unreadable { reason: String },
    #[error("session {id} is owned by node `{node}`; send the request there")]
    Elsewhere { id: SessionId, node: String },
    /// Ownership can be neither read nor recorded at the moment.
    #[error("{reason}")]
    Unavailable { reason: String },
    #[error("generations are used up")]
    Exhausted,
    #[error("the registry's writer has stopped: {reason}; restart conman")]
    Closed { reason: String },
}

/// The command that starts a node above all generations used so far.
#[must_use]
pub fn serve_above(floor: Option<u64>) -> String {
    match floor {
        Some(0) => "`conman serve`".to_owned(),
        Some(floor) => format!("`conman serve --generation-floor {floor}`"),
        None => {
            "`conman serve --generation-floor N`, N above every generation ever used".to_owned()
        }
    }
}

/// What to do about a state directory of another format. Nothing is migrated, and nothing was changed.
#[must_use]
pub fn start_afresh(found: u32, floor: Option<u64>) -> String {
    if found > FORMAT {
        return "run the newer conman that wrote it".to_owned();
    }
    format!(
        "nothing was changed. To start afresh: end its sessions with the conman that wrote it, stop \
         conman and its shim, move the state directory away, and start once with {}",
        serve_above(floor)
    )
}

impl RegistryError {
    /// Whether the same call may succeed later without a change by its caller, who must read again
    /// what the decision was based on.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::Io { .. }
            | Self::Store { .. }
            | Self::Changed { .. }
            | Self::Unreadable { .. }
            | Self::Unavailable { .. } => true,
            Self::Owned { .. }
            | Self::Superseded { .. }
            | Self::Ended { .. }
            | Self::NotNotable { .. }
            | Self::InUse { .. }
            | Self::OtherFormat { .. }
            | Self::FloorUnknown { .. }
            | Self::OfFleet { .. }
            | Self::Damaged { .. }
            | Self::Corrupt { .. }
            | Self::Elsewhere { .. }
            | Self::Exhausted
            | Self::Closed { .. } => false,
        }
    }

    /// Whether the disk, or the quota on it, is full.
    #[must_use]
    pub fn is_disk_full(&self) -> bool {
        let kind = match self {
            Self::Io { source, .. } => source.kind(),
            Self::Store { source, .. } => match &**source {
                redb::Error::Io(source) => source.kind(),
                _ => return false,
            },
            _ => return false,
        };
        matches!(
            kind,
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded
        )
    }
}
