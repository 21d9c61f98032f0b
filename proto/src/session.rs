//! Sessions and their states.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{Generation, Network, ResolvedSpec, RuntimeKind, SessionEnd, SessionId};

/// Where a session stands.
///
/// ```text
/// starting ──> running ──> stopping ──> stopped
///     │           │            └──────> stuck ──> stopped
///     │           ├──> paused ──> running
///     │           ├──> stopped (exited with 0, idle, lifetime, preempted)
///     └──> failed └──> failed  (exited with another code or by a signal)
/// ```
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, ToSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum SessionState {
    /// Being created, or not ready yet.
    Starting,
    /// Its program runs and, where it has a port, has answered on it.
    Running,
    /// Frozen because its node could not prove ownership.
    Frozen,
    /// Its processes do not run, by a client's order or because it was idle; what connects to it resumes it.
    Paused,
    /// Killed, its death certificate awaited.
    Stopping,
    /// Killed, and still not dead; `reason` says why. Never released in this state.
    Stuck,
    /// Ended as asked or by itself with exit code 0.
    Stopped,
    /// Could not start, or ended by itself with another exit code.
    Failed,
}

impl SessionState {
    /// Every state, in the order of a session's life.
    pub const ALL: [Self; 8] = [
        Self::Starting,
        Self::Running,
        Self::Frozen,
        Self::Paused,
        Self::Stopping,
        Self::Stuck,
        Self::Stopped,
        Self::Failed,
    ];

    /// The name on the wire.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::Running => "running",
            Self::Frozen => "frozen",
            Self::Paused => "paused",
            Self::Stopping => "stopping",
            Self::Stuck => "stuck",
            Self::Stopped => "stopped",
            Self::Failed => "failed",
        }
    }

    /// Whether no process of the session can exist any more.
    #[must_use]
    pub const fn is_ended(self) -> bool {
        matches!(self, Self::Stopped | Self::Failed)
    }
}

impl fmt::Display for SessionState {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.as_str())
    }
}

impl FromStr for SessionState {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Self::ALL
            .into_iter()
            .find(|state| state.as_str() == text)
            .ok_or_else(|| {
                let known = Self::ALL.map(Self::as_str).join(", ");
                format!("`{text}` is not a session state; the states are {known}")
            })
    }
}

/// A session as the API shows it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Session {
    pub id: SessionId,
    pub state: SessionState,
    /// Why it is in this state, in words, where there is something to say.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Why it ended, or is being ended, for programs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub end: Option<SessionEnd>,
    /// Exit code of the container's program once it ended and the runtime told it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub exit_code: Option<i32>,
    pub spec: ResolvedSpec,
    /// Where a frontend reaches the session; null when it has no port.
    pub url: Option<String>,
    /// The same for a browser, which reaches each session at a host; null when it has no port.
    #[serde(default)]
    pub browser_url: Option<String>,
    /// Like `browser_url` for one of the session's ports, whose number replaces `{port}`; null when there
    /// are no `ports`, and for an id of more than 57 characters.
    #[serde(default)]
    pub port_url: Option<String>,
    pub node: String,
    pub runtime: RuntimeKind,
    pub generation: Generation,
    /// Process id of the container's init in the host's PID namespace while it lives.
    pub pid: Option<i32>,
    pub port: Option<u16>,
    pub network: Network,
    pub template: Option<String>,
    #[schema(value_type = String, format = DateTime)]
    pub created_at: Timestamp,
    /// When it became running in this generation.
    #[schema(value_type = Option<String>, format = DateTime)]
    pub started_at: Option<Timestamp>,
    /// When it ended.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>, format = DateTime)]
    pub ended_at: Option<Timestamp>,
    /// Duration of each phase of the last start, in milliseconds. A name with a dot, such as
    /// `start.cgroup`, is a part of the phase before the dot.
    pub phases_ms: BTreeMap<String, f64>,
    /// Open tunnels, requests in flight through this node, running commands, and clients of terminals.
    pub connections: u64,
    /// Its processes that the kernel has killed in this life because memory ran out, as far as its node has
    /// noticed.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub oom_kills: u64,
}

#[expect(
    clippy::trivially_copy_pass_by_ref,
    reason = "serde passes a reference"
)]
fn is_zero(value: &u64) -> bool {
    *value == 0
}

/// Answer to `PUT /v1/sessions/{id}`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct EnsureResponse {
    #[serde(flatten)]
    pub session: Session,
    /// Whether this very request started a container.
    pub created: bool,
    /// Whether the running session has the spec that was asked for; a running one's is never
    /// changed.
    pub spec_matches: bool,
}

/// A page of sessions, ordered by id.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct SessionList {
    pub sessions: Vec<Session>,
    /// Pass as `?cursor=` for the next page; null on the last one.
    pub next: Option<String>,
    /// What is missing from the list, why, and what to do: records that cannot be read.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<String>,
}

/// Answer to `DELETE /v1/sessions/{id}`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct StopReport {
    pub id: SessionId,
    pub generation: Generation,
    /// `stopped`, or `stuck` when a process could not be killed yet.
    pub state: SessionState,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// From the request to the death certificate, in milliseconds; null while stuck.
    pub dead_ms: Option<f64>,
    /// From the request to the release in the registry, in milliseconds; null while stuck.
    pub released_ms: Option<f64>,
}
