//! What the registry stores about a session.

use std::borrow::Cow;
use std::net::IpAddr;
use std::ops::Deref;
use std::sync::Arc;

use conman_proto::{EndCause, Generation, ResolvedSpec, SessionEnd, SessionId};
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
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        paused: bool,
    },
    /// Killed, or about to be.
    Stopping {
        reason: String,
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
            Self::Stopping { cause, .. } | Self::Stuck { cause, .. } => {
                Some(cause.unwrap_or(EndCause::Unknown))
            }
            Self::Ended(ending) => Some(ending.cause()),
        }
    }

    /// Like [`Self::end_cause`], as the API shows it.
    #[must_use]
    pub fn end(&self) -> Option<SessionEnd> {
        match self {
            Self::Ended(ending) => Some(ending.end()),
            _ => self
                .end_cause()
                .map(|cause| SessionEnd { cause, phase: None }),
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
    /// The phase in which the start failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failed_phase: Option<String>,
    pub reason: String,
    pub exit_code: Option<i32>,
    pub ended_at: Timestamp,
    /// Of the last start, as far as known.
    pub started_at: Option<Timestamp>,
    pub phases: Phases,
}

impl Ending {
    /// An end at this moment of a life of which nothing more is known.
    #[must_use]
    pub fn now(failed: bool, cause: EndCause, reason: impl Into<String>) -> Self {
        Self {
            failed,
            cause: Some(cause),
            failed_phase: None,
            reason: reason.into(),
            exit_code: None,
            ended_at: Timestamp::now(),
            started_at: None,
            phases: Phases::default(),
        }
    }

    #[must_use]
    pub fn cause(&self) -> EndCause {
        self.cause.unwrap_or(EndCause::Unknown)
    }

    /// Why it ended, as the API shows it.
    #[must_use]
    pub fn end(&self) -> SessionEnd {
        SessionEnd {
            cause: self.cause(),
            phase: self.failed_phase.clone(),
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
    /// By which sessions on all nodes reach it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub addresses: Vec<IpAddr>,
}

/// One session to release.
#[derive(Debug, Clone, PartialEq)]
pub struct Release {
    pub id: SessionId,
    pub generation: Generation,
    pub ending: Ending,
}
