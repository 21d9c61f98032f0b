//! What a part's change means for the others, as data.

use conman_shim_protocol::{FenceState, Reply};

/// A consequence for other parts. The loop carries effects out in their order.
#[derive(Debug, PartialEq)]
pub(crate) enum Effect {
    /// Send the fence's state to subscribers.
    Publish(FenceState),
    /// Record the fence's state for a later shim.
    RecordFence,
    /// Freeze everything with one order, and abort the starts under way.
    FreezeAll,
    /// Undo that order where frozen processes cannot be killed: each container is ordered separately now.
    ReleaseAll,
    Freeze(String),
    Thaw(String),
    /// The fence kills it.
    Kill(String),
    /// Kill the processes that have appeared of a start by another program.
    KillAppeared(String),
    /// A kept command's time is over.
    TimedOut(String),
    /// It has ended: record that, and report it to the fence and to subscribers.
    ReportEnd(String),
    LiftCpuLimit {
        cgroup: String,
    },
    /// Stop sending starts to the launcher, or resume it.
    HoldStarts(bool),
    Reply {
        client: u64,
        call: u64,
        reply: Reply,
    },
}
