//! What ended a life, for whoever has to decide whether there shall be another one.

use serde::{Deserialize, Serialize};

/// What the reason of a session begins with that ended because its node was preempted.
pub const PREEMPTED: &str = "preempted";
/// Likewise, because its node gave its sessions to others.
pub const DRAINED: &str = "drained";
/// Likewise, because its machine went down with it.
pub const LOST: &str = "its node was lost";
/// Likewise of a start that the registry took too long for.
pub const UNRECORDED: &str = "the registry did not record the start in time";

/// The whole reason of a session that its node's fence killed.
pub const FENCED: &str = "its node was lost: the node's fence killed it, which had not frozen in time \
                          or was frozen for too long";

/// What ended a life. The names stand in records, which outlive versions: none comes to mean
/// something else, and one that is not known is nobody's loss.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EndCause {
    /// Its node was preempted.
    Preempted,
    /// Its node gave its sessions to others.
    Drained,
    /// Its machine went down with it, or its node's fence killed it.
    NodeLost,
    /// The registry took too long for its start.
    Unrecorded,
    /// Somebody did not want it any more.
    Deleted,
    /// It was idle, or lived, for as long as its spec allows.
    Expired,
    /// It took more disk space or inodes than its spec allows.
    DiskLimit,
    /// Its daemon was told to take its sessions along.
    ShutDown,
    /// The registry holds it for another's, or knows no container of it.
    Disowned,
    /// Its program ended by itself.
    Exited,
    /// It could not be started, or nobody knows how it ended.
    Failed,
    #[serde(other)]
    Unknown,
}

impl EndCause {
    /// What a record says: one of a conman that knew no causes says it by its reason alone.
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
