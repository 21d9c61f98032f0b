//! Reasons, in words, of ends that the node causes, not a client or the program.

pub use conman_proto::EndCause;

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
