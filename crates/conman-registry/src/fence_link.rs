//! How the registry reaches the dead-man fence, which freezes all containers of this node once its
//! ownership can no longer be relied on.

use std::sync::{Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;
use conman_core::ownership::{BootTime, Slot, SlotView};
use tokio::sync::Notify;

/// The fence of this node, whichever process keeps it.
///
/// Orders are carried out in their order over one connection, and lost with it.
#[async_trait]
pub trait FenceLink: Send + Sync + std::fmt::Debug + 'static {
    /// Connects, and asks what the fence holds. What an earlier daemon ordered is carried out or
    /// dropped by then.
    async fn connect(&self) -> Result<FenceHolds, FenceLinkError>;

    /// Gives an order over the latest connection.
    async fn order(&self, order: FenceOrder) -> Result<(), FenceLinkError>;

    /// Waits for the next news of the latest connection. Cancel safe: nothing is missed.
    async fn news(&self) -> FenceNews;
}

/// What a fence has to do with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FenceHolds {
    /// Closed: thawing takes an order.
    pub fired: bool,
    /// Every container of a session, and every start that may yet become one.
    pub slots: Vec<SlotView>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FenceOrder {
    /// Ownership was renewed. Never thaws.
    SetDeadline(BootTime),
    /// Ownership was renewed after the fence had fired; these are still ours.
    Thaw {
        deadline: BootTime,
        slots: Vec<Slot>,
    },
    /// Freeze everything now.
    FreezeAll,
    /// Kill it, frozen or not; its certificate comes by the node.
    Kill(Slot),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FenceNews {
    Fired,
    /// The connection is gone.
    Lost,
}

/// Why an order was not carried out, or no connection made.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FenceLinkError {
    #[error("the fence cannot be reached: {reason}")]
    Lost { reason: String },
    /// The fence is closed now.
    #[error("the fence stays closed: {reason}")]
    Refused { reason: String },
}

/// A fence in memory that holds what it is told to: for tests of whoever drives one.
#[derive(Debug, Default)]
pub struct MemoryFence {
    state: Mutex<Memory>,
    news: Notify,
}

#[derive(Debug, Default)]
struct Memory {
    slots: Vec<SlotView>,
    deadline: BootTime,
    closed: bool,
    thawed: Vec<Slot>,
    killed: Vec<Slot>,
    told: Vec<FenceNews>,
}

impl MemoryFence {
    /// A closed one that holds these.
    #[must_use]
    pub fn holding(slots: Vec<SlotView>) -> Self {
        let memory = Memory {
            slots,
            closed: true,
            ..Memory::default()
        };
        Self {
            state: Mutex::new(memory),
            news: Notify::new(),
        }
    }

    /// As its deadline's passing would.
    pub fn fire(&self) {
        let mut state = self.state();
        state.closed = true;
        state.thawed.clear();
        state.told.push(FenceNews::Fired);
        drop(state);
        self.news.notify_one();
    }

    /// As the death of its process would.
    pub fn break_connection(&self) {
        self.state().told.push(FenceNews::Lost);
        self.news.notify_one();
    }

    /// The latest deadline.
    #[must_use]
    pub fn deadline(&self) -> BootTime {
        self.state().deadline
    }

    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.state().closed
    }

    /// What the latest order to thaw named.
    #[must_use]
    pub fn thawed(&self) -> Vec<Slot> {
        self.state().thawed.clone()
    }

    /// All that was to be killed.
    #[must_use]
    pub fn killed(&self) -> Vec<Slot> {
        self.state().killed.clone()
    }

    /// What it tells of from the next connection on.
    pub fn hold(&self, slots: Vec<SlotView>) {
        self.state().slots = slots;
    }

    fn state(&self) -> MutexGuard<'_, Memory> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[async_trait]
impl FenceLink for MemoryFence {
    async fn connect(&self) -> Result<FenceHolds, FenceLinkError> {
        let mut state = self.state();
        state.told.clear();
        Ok(FenceHolds {
            fired: state.closed,
            slots: state.slots.clone(),
        })
    }

    async fn order(&self, order: FenceOrder) -> Result<(), FenceLinkError> {
        let mut state = self.state();
        match order {
            FenceOrder::SetDeadline(deadline) => state.deadline = state.deadline.max(deadline),
            FenceOrder::Thaw { deadline, slots } => {
                state.deadline = deadline;
                state.closed = false;
                state.thawed = slots;
            }
            FenceOrder::FreezeAll => {
                state.closed = true;
                state.thawed.clear();
            }
            FenceOrder::Kill(slot) => state.killed.push(slot),
        }
        Ok(())
    }

    async fn news(&self) -> FenceNews {
        loop {
            let next = {
                let mut state = self.state();
                (!state.told.is_empty()).then(|| state.told.remove(0))
            };
            match next {
                Some(news) => return news,
                None => self.news.notified().await,
            }
        }
    }
}
