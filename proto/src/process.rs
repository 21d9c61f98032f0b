//! Processes of a session.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The answer to `GET /v1/sessions/{id}/processes`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ProcessList {
    /// Ordered by `pid`.
    pub processes: Vec<SessionProcess>,
    /// Whether there are more than are listed: at most 4,096.
    pub truncated: bool,
}

/// A process of a session, as its other processes see it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct SessionProcess {
    /// Inside the session.
    pub pid: i32,
    /// The pid of its parent inside; absent if that is outside.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<i32>,
    /// Its user id inside; absent if the session has no such id.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uid: Option<u32>,
    /// Program and arguments, at most 4 KiB; a name in brackets if it has none, as a process that has ended
    /// and was not waited for.
    pub command: Vec<String>,
    /// As in proc(5): R, S, D, Z, T.
    pub state: String,
    pub threads: u32,
    /// Processor time since its start.
    pub cpu_s: f64,
    /// Memory that is resident, with what it shares with others.
    pub memory_bytes: u64,
    #[schema(value_type = String, format = DateTime)]
    pub started_at: Timestamp,
}
