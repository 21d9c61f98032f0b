//! What the fence reports to the process that decides what the node still owns.

use super::SlotView;

/// State of a fence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FenceHolds {
    /// Whether it has fired: thawing then needs an order.
    pub fired: bool,
    /// Every container of a session, and every start that may still create one.
    pub slots: Vec<SlotView>,
}

/// An event of the fence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FenceNews {
    Fired,
    /// The connection is lost.
    Lost,
}

/// Why an order failed or no connection was made.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FenceLinkError {
    #[error("the fence cannot be reached: {reason}")]
    Lost { reason: String },
    /// The fence is closed now.
    #[error("the fence stays closed: {reason}")]
    Refused { reason: String },
}
