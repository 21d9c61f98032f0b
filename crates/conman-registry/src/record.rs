use std::borrow::Cow;
use std::ops::Deref;
use std::sync::Arc;

use conman_core::EndCause;
use conman_proto::{Generation, ResolvedSpec, SessionId};
use jiff::Timestamp;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// What the registry stores about a session.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SessionRecord {
    pub id: SessionId,
    pub generation: Generation,
    pub state: RecordState,
    pub spec: ResolvedSpec,
    /// Set once the container's init was seen; kept after the session ends.
    pub container: Option<ContainerIdentity>,
    pub created_at: Timestamp,
}

/// State of a session in the registry.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "state", rename_all = "snake_case")]
pub enum RecordState {
    /// Claimed: a container of this generation may exist or may still appear.
    Starting,
    /// Its program runs and has answered its first probe.
    Running {
        started_at: Timestamp,
        phases: Phases,
    },
    /// Killed, or about to be.
    Stopping {
        reason: String,
        /// Absent in records of versions that did not write causes.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        cause: Option<EndCause>,
    },
    /// Killed without a death certificate.
    Stuck {
        reason: String,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        cause: Option<EndCause>,
    },
    /// Proven dead, ownership given up.
    Ended(Ending),
}

impl RecordState {
    /// The cause of the session's end, once it is decided.
    #[must_use]
    pub fn end_cause(&self) -> Option<EndCause> {
        match self {
            Self::Starting | Self::Running { .. } => None,
            Self::Stopping { reason, cause } | Self::Stuck { reason, cause } => {
                Some(EndCause::written(*cause, reason))
            }
            Self::Ended(ending) => Some(ending.cause()),
        }
    }

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
    /// The machine-readable cause; `reason` is for people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cause: Option<EndCause>,
    pub reason: String,
    pub exit_code: Option<i32>,
    pub ended_at: Timestamp,
    /// Of the last start, as far as known.
    pub started_at: Option<Timestamp>,
    pub phases: Phases,
}

impl Ending {
    #[must_use]
    pub fn cause(&self) -> EndCause {
        match EndCause::written(self.cause, &self.reason) {
            // Written by a version without causes; its reason is free text.
            EndCause::Unknown if self.cause.is_none() && self.failed => EndCause::Failed,
            cause => cause,
        }
    }
}

/// One finished phase of a start.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Phase {
    /// Borrowed for phases measured by this process.
    pub name: Cow<'static, str>,
    pub started_at: Timestamp,
    pub duration_ms: f64,
}

/// The finished phases of one start, shared by all readers.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Phases(Arc<[Phase]>);

impl Deref for Phases {
    type Target = [Phase];

    fn deref(&self) -> &[Phase] {
        &self.0
    }
}

impl From<Vec<Phase>> for Phases {
    fn from(phases: Vec<Phase>) -> Self {
        Self(phases.into())
    }
}

impl From<&[Phase]> for Phases {
    fn from(phases: &[Phase]) -> Self {
        Self(phases.into())
    }
}

impl Serialize for Phases {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.0[..].serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for Phases {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Vec::deserialize(deserializer).map(Self::from)
    }
}

/// Identifies a process as the container's init and not a later one with the same PID.
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
