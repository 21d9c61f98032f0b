//! A fence in memory, for tests of code that drives a fence.

use std::sync::{Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;
use conman_core::ownership::{BootTime, FenceHolds, FenceLinkError, FenceNews, Slot, SlotView};
use conman_registry::{FenceLink, FenceOrder};
use tokio::sync::Notify;

/// A fence that holds what the test sets.
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
