//! What a session uses.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::SessionId;

/// What a session uses. A field is null where the host does not count it. Counters begin with the
/// session's present start.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct SessionStats {
    pub id: SessionId,
    /// When it was read.
    #[schema(value_type = String, format = DateTime)]
    pub at: Timestamp,
    /// Processor time.
    pub cpu_s: Option<f64>,
    /// Time for which the limit of processor time held it up, and how often.
    pub throttled_s: Option<f64>,
    pub throttled_count: Option<u64>,
    /// Without the page cache that can be dropped at once.
    pub memory_bytes: Option<u64>,
    pub memory_limit_bytes: Option<u64>,
    /// Processes killed because memory ran out.
    pub oom_kills: Option<u64>,
    /// Processes and threads.
    pub pids: Option<u64>,
    pub pids_limit: u64,
    /// Read from and written to disks.
    pub read_bytes: Option<u64>,
    pub written_bytes: Option<u64>,
    /// Over its network interfaces, without loopback; what conman's proxy carries does not count.
    pub received_bytes: Option<u64>,
    pub sent_bytes: Option<u64>,
    /// To and from it by conman's proxies, counted from its start or the daemon's, whichever is later.
    #[serde(default)]
    pub proxy_received_bytes: u64,
    #[serde(default)]
    pub proxy_sent_bytes: u64,
    pub disk_limit_bytes: Option<u64>,
}

/// The answer to `GET /v1/nodes/{id}/stats`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct StatsList {
    /// The node's running sessions, ordered by id.
    pub sessions: Vec<SessionStats>,
}
