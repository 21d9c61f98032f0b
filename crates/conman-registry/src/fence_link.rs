//! The registry's connection to the dead-man fence, which freezes all containers of this node once
//! its ownership is no longer certain.

use std::sync::{Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;
use conman_core::ownership::{BootTime, Slot, SlotView};
use tokio::sync::Notify;

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

/// State of a fence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FenceHolds {
    /// Whether it has fired: thawing then needs an order.
    pub fired: bool,
    /// Every container of a session, and every start that may still create one.
    pub slots: Vec<SlotView>,
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

/// A fence in memory that holds what the test sets, for tests of code that drives a fence.
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
    /// A closed fence that holds these slots.
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

    /// Simulates the passing of its deadline.
    pub fn fire(&self) {
        let mut state = self.state();
        state.closed = true;
        state.thawed.clear();
        state.told.push(FenceNews::Fired);
        drop(state);
        self.news.notify_one();
    }

    /// Simulates the death of its process.
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

    /// The slots of the latest thaw order.
    #[must_use]
    pub fn thawed(&self) -> Vec<Slot> {
        self.state().thawed.clone()
    }

    /// All slots that were ordered killed.
    #[must_use]
    pub fn killed(&self) -> Vec<Slot> {
        self.state().killed.clone()
    }

    /// Sets the slots that it reports from the next connection on.
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
