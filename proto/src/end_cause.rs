//! Why a session ended.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// What ended a session. The names are stored in records, which outlive versions: a name never
/// changes its meaning, and the name of a newer version is read as `unknown`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum EndCause {
    /// Its node was preempted.
    Preempted,
    /// Its node was drained.
    Drained,
    /// Its machine was lost, or its node's fence killed it.
    NodeLost,
    /// The registry took too long to record its start.
    Unrecorded,
    /// A client deleted it.
    Deleted,
    /// It had no connection for as long as its spec allows.
    Idle,
    /// It reached the maximum lifetime of its spec.
    Lifetime,
    /// It exceeded the disk space or inodes of its spec.
    DiskLimit,
    /// Its daemon was ordered to stop its sessions when it exits.
    ShutDown,
    /// The registry says that another node owns it, or has no record of its container.
    Disowned,
    /// Its program ended without an order.
    Exited,
    /// The kernel killed its program, because the session's memory ran out.
    OutOfMemory,
    /// A signal that a client sent to its program ended it.
    Killed,
    /// It could not be started.
    StartFailed,
    /// Not known, or written by a newer version.
    #[serde(other)]
    Unknown,
}

/// Why a session ended, or is being ended, for programs; the session's `reason` is for people.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SessionEnd {
    pub cause: EndCause,
    /// The phase in which its start failed: one of the names in `phases_ms`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub phase: Option<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cause_of_a_newer_version_is_unknown() {
        let read: EndCause = serde_json::from_str("\"eaten_by_a_grue\"").expect("read");
        assert_eq!(read, EndCause::Unknown);
        let text = serde_json::to_string(&EndCause::NodeLost).expect("text");
        assert_eq!(text, "\"node_lost\"");
        let end: SessionEnd =
            serde_json::from_str(r#"{"cause":"start_failed","phase":"create","more":1}"#)
                .expect("read");
        assert_eq!(end.cause, EndCause::StartFailed);
        assert_eq!(end.phase.as_deref(), Some("create"));
    }
}
