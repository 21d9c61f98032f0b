//! The registry's connection to the dead-man fence, which freezes all containers of this node once
//! its ownership is no longer certain.

use async_trait::async_trait;
use conman_core::ownership::{BootTime, FenceHolds, FenceLinkError, FenceNews, Slot};

/// The fence of this node, in whichever process it runs.
///
/// Orders are executed in sequence over one connection and are lost with it.
#[async_trait]
pub trait FenceLink: Send + Sync + std::fmt::Debug + 'static {
    /// Connects and returns what the fence holds. Orders of an earlier daemon are executed or
    /// dropped when this returns.
    async fn connect(&self) -> Result<FenceHolds, FenceLinkError>;

    /// Sends an order over the latest connection.
    async fn order(&self, order: FenceOrder) -> Result<(), FenceLinkError>;

    /// Waits for the next event of the latest connection. Cancel safe: no event is lost.
    async fn news(&self) -> FenceNews;
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FenceOrder {
    /// Ownership was renewed. Never thaws.
    SetDeadline(BootTime),
    /// Ownership was renewed after the fence had fired; these slots are still owned.
    Thaw {
        deadline: BootTime,
        slots: Vec<Slot>,
    },
    /// Freeze everything now.
    FreezeAll,
    /// Kill it, frozen or not; the node delivers its death certificate.
    Kill(Slot),
}
