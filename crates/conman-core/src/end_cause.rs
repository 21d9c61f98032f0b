//! Why a life ended, for deciding whether the session is started again.

use serde::{Deserialize, Serialize};

/// Prefix of the reason of a session that ended because its node was preempted.
pub const PREEMPTED: &str = "preempted";
/// Likewise, because its node was drained.
pub const DRAINED: &str = "drained";
/// Likewise, because its machine was lost.
pub const LOST: &str = "its node was lost";
/// Likewise, because the registry took too long to record its start.
pub const UNRECORDED: &str = "the registry did not record the start in time";

/// The reason of a session that its node's fence killed.
pub const FENCED: &str = "its node was lost: the node's fence killed it, because it did not freeze \
                          in time or was frozen for too long";

/// What ended a life. The names are stored in records, which outlive versions: a name never changes
/// its meaning, and an unknown name is read as `Unknown`, which does not count as a lost node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
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
    /// It was deleted.
    Deleted,
    /// It reached the idle timeout or maximum lifetime of its spec.
    Expired,
    /// It exceeded the disk space or inodes of its spec.
    DiskLimit,
    /// Its daemon was ordered to stop its sessions when it exits.
    ShutDown,
    /// The registry says that another node owns it, or has no record of its container.
    Disowned,
    /// Its program ended by itself.
    Exited,
    /// It could not be started, or its end is unknown.
    Failed,
    #[serde(other)]
    Unknown,
}

impl EndCause {
    /// The cause in a record. Versions without causes wrote only the reason.
    #[must_use]
    pub fn written(cause: Option<Self>, reason: &str) -> Self {
        let by_reason = [
            (PREEMPTED, Self::Preempted),
            (DRAINED, Self::Drained),
            (LOST, Self::NodeLost),
            (UNRECORDED, Self::Unrecorded),
        ];
        let of_old = || by_reason.iter().find(|(text, _)| reason.starts_with(text));
        cause.unwrap_or_else(|| of_old().map_or(Self::Unknown, |(_, cause)| *cause))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_of_a_conman_that_knew_no_causes_is_told_by_its_reason() {
        let of = |reason| EndCause::written(None, reason);
        assert_eq!(of("preempted: SIGTERM"), EndCause::Preempted);
        assert_eq!(of("drained: new kernel"), EndCause::Drained);
        assert_eq!(of("its node was lost: booted"), EndCause::NodeLost);
        assert_eq!(of("stopped by the administrator"), EndCause::Unknown);
        let known = EndCause::written(Some(EndCause::Deleted), "preempted: SIGTERM");
        assert_eq!(known, EndCause::Deleted, "a cause counts alone");
    }

    #[test]
    fn a_cause_of_a_later_conman_is_nobodys_loss() {
        let read: EndCause = serde_json::from_str("\"eaten_by_a_grue\"").expect("read");
        assert_eq!(read, EndCause::Unknown);
        let text = serde_json::to_string(&EndCause::NodeLost).expect("text");
        assert_eq!(text, "\"node_lost\"");
    }
}
