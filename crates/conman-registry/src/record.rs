use std::path::PathBuf;

use conman_proto::{Generation, ResolvedSpec, SessionId};
use jiff::Timestamp;
use serde::{Deserialize, Serialize};

/// What the registry holds of a session.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SessionRecord {
    pub id: SessionId,
    pub generation: Generation,
    pub state: RecordState,
    pub spec: ResolvedSpec,
    /// Set once the container's init was seen; kept after the end.
    pub container: Option<ContainerIdentity>,
    pub created_at: Timestamp,
}

/// Where a session stands in the registry.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "state", rename_all = "snake_case")]
pub enum RecordState {
    /// Claimed: a container of this generation may exist or may still appear.
    Starting,
    /// Its program runs and has answered.
    Running { started_at: Timestamp, phases: Vec<Phase> },
    /// Killed, or about to be.
    Stopping { reason: String },
    /// Killed without a death certificate.
    Stuck { reason: String },
    /// Proven dead, ownership given up.
    Ended(Ending),
}

impl RecordState {
    /// Whether ownership was given up.
    #[must_use]
    pub fn is_ended(&self) -> bool {
        matches!(self, Self::Ended(_))
    }
}

/// How a session ended.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Ending {
    /// Whether it counts as `failed` rather than `stopped`.
    pub failed: bool,
    pub reason: String,
    pub exit_code: Option<i32>,
    pub ended_at: Timestamp,
    /// Of the last start, as far as they are known.
    pub started_at: Option<Timestamp>,
    pub phases: Vec<Phase>,
}

/// One finished phase of a start.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Phase {
    pub name: String,
    pub started_at: Timestamp,
    pub duration_ms: f64,
}

/// What proves that a process is the container's init and not a later one with its PID.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ContainerIdentity {
    /// The runtime's id of the container.
    pub container_id: String,
    pub pid: i32,
    /// Field 22 of `/proc/PID/stat`, in clock ticks since boot.
    pub start_time_ticks: u64,
    /// `/proc/sys/kernel/random/boot_id`.
    pub boot_id: String,
}

/// One session to release.
#[derive(Debug, Clone, PartialEq)]
pub struct Release {
    pub id: SessionId,
    pub generation: Generation,
    pub ending: Ending,
}

/// Why the registry refused or failed.
#[derive(Debug, thiserror::Error)]
pub enum RegistryError {
    #[error("session {id} is owned by generation {generation}, which has not ended")]
    Owned { id: SessionId, generation: Generation },
    #[error("generation {generation} of session {id} is not current{}",
        current.map(|g| format!("; the current one is {g}")).unwrap_or_default())]
    Superseded { id: SessionId, generation: Generation, current: Option<Generation> },
    #[error("another conman already uses {path}; stop it, or give this one its own state_dir")]
    InUse { path: PathBuf },
    #[error("the registry file {path} has format {found}, and this conman knows up to {known}; \
        run the newer conman that wrote it")]
    TooNew { path: PathBuf, found: u32, known: u32 },
    #[error("{path} is missing or damaged while its counterpart exists, so used generations are \
        unknown; restore it, or start once with --generation-floor N above every generation \
        ever used")]
    FloorUnknown { path: PathBuf },
    #[error("{action} {path}")]
    Io { action: &'static str, path: PathBuf, #[source] source: std::io::Error },
    #[error("{action} in the registry file {path}")]
    Store { action: &'static str, path: PathBuf, #[source] source: Box<redb::Error> },
    #[error("the record of session {id} cannot be read")]
    Corrupt { id: String, #[source] source: serde_json::Error },
    #[error("generations are used up")]
    Exhausted,
    #[error("the registry's writer has stopped: {reason}; restart conman")]
    Closed { reason: String },
}

impl RegistryError {
    /// Whether the same call may succeed later without a change by its caller.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::Io { .. } | Self::Store { .. } => true,
            Self::Owned { .. }
            | Self::Superseded { .. }
            | Self::InUse { .. }
            | Self::TooNew { .. }
            | Self::FloorUnknown { .. }
            | Self::Corrupt { .. }
            | Self::Exhausted
            | Self::Closed { .. } => false,
        }
    }
}
