//! The task that gives orders to the fence in their order, and tells the driver its news.
//!
//! Each connection has a number. The driver marks its orders with the latest that it heard of;
//! what it ordered before is lost with the connection that it was meant for.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use conman_core::ownership::SlotView;
use conman_vitals::Pulse;
use tokio::sync::{Notify, mpsc};
use tokio::time::{sleep, timeout};

use crate::fence_link::{FenceHolds, FenceLink, FenceLinkError, FenceNews, FenceOrder};

/// Bound on one order: a shim that takes longer is as good as gone, and is connected to anew.
const ORDER_PATIENCE: Duration = Duration::from_secs(2);

/// Between two tries to connect.
const RECONNECT_PAUSE: Duration = Duration::from_millis(200);

/// What the task is called when it ends or stands still.
pub(super) const NAME: &str = "fence orders";

/// News that the driver has not heard: it takes them as they come.
pub(super) const MAX_NEWS: usize = 64;

#[derive(Debug)]
pub(super) enum FenceEvent {
    Fired,
    Connected {
        connection: u64,
        fired: bool,
        slots: Vec<SlotView>,
    },
}

/// Orders that wait. Bounded: a deadline replaces an earlier one that waits behind nothing else,
/// and of the others the protocol gives a few an outage.
#[derive(Debug, Default)]
pub(super) struct FenceQueue {
    waiting: Mutex<VecDeque<(u64, FenceOrder)>>,
    more: Notify,
}

impl FenceQueue {
    pub(super) fn push(&self, connection: u64, order: FenceOrder) {
        let mut waiting = self.waiting();
        match (waiting.back_mut(), &order) {
            (Some((same, FenceOrder::SetDeadline(earlier))), FenceOrder::SetDeadline(later))
                if *same == connection =>
            {
                *earlier = *later;
            }
            _ => waiting.push_back((connection, order)),
        }
        drop(waiting);
        self.more.notify_one();
    }

    /// The next order for this connection. Cancel safe: it is taken when it is returned.
    async fn next(&self, connection: u64) -> FenceOrder {
        loop {
            let next = {
                let mut waiting = self.waiting();
                loop {
                    match waiting.pop_front() {
                        Some((meant, order)) if meant == connection => break Some(order),
                        Some(_) => {}
                        None => break None,
                    }
                }
            };
            match next {
                Some(order) => return order,
                None => self.more.notified().await,
            }
        }
    }

    /// A panic while the lock is held cannot leave half a change: each is one operation.
    fn waiting(&self) -> MutexGuard<'_, VecDeque<(u64, FenceOrder)>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

enum Next {
    Order(FenceOrder),
    Heard(FenceNews),
    /// Nobody is left to tell.
    Over,
}

/// From a connection that stands, number 0, until the driver is gone.
pub(super) async fn run(
    link: Arc<dyn FenceLink>,
    queue: Arc<FenceQueue>,
    news: mpsc::Sender<FenceEvent>,
    pulse: Pulse,
) {
    let mut connection = 0;
    // An order to thaw was given and may have been carried out in part: the rest stays frozen below
    // an open fence, which tells of it no more.
    let mut thaws_in_part = false;
    loop {
        pulse.beat().await;
        let next = async {
            tokio::select! {
                // Cancel safe: an order is taken when it is returned.
                order = queue.next(connection) => Next::Order(order),
                // Cancel safe by its contract.
                heard = link.news() => Next::Heard(heard),
                // Cancel safe: it only waits.
                () = news.closed() => Next::Over,
            }
        };
        let lost = match pulse.idle(next).await {
            Next::Order(order) => {
                let thaws = matches!(order, FenceOrder::Thaw { .. });
                thaws_in_part |= thaws;
                let ordered = timeout(ORDER_PATIENCE, link.order(order));
                match pulse.wait(ORDER_PATIENCE, ordered).await {
                    Ok(Ok(())) => {
                        thaws_in_part &= !thaws;
                        false
                    }
                    Ok(Err(FenceLinkError::Refused { reason })) => {
                        tracing::warn!(reason, "the fence refuses an order");
                        // It is closed then, and opened by the next renewal.
                        if news.send(FenceEvent::Fired).await.is_err() {
                            return;
                        }
                        false
                    }
                    Ok(Err(FenceLinkError::Lost { .. })) | Err(_) => true,
                }
            }
            Next::Heard(FenceNews::Lost) => true,
            Next::Heard(FenceNews::Fired) => {
                if news.send(FenceEvent::Fired).await.is_err() {
                    return;
                }
                false
            }
            Next::Over => return,
        };
        if lost {
            connection += 1;
            // A shim that does not come is not this daemon's standstill.
            let connected = pulse.idle(reconnect(&*link, &news)).await;
            let Some(FenceHolds { fired, slots }) = connected else {
                return;
            };
            let event = FenceEvent::Connected {
                connection,
                // Then the next renewal thaws whatever is still to be thawed.
                fired: fired || thaws_in_part,
                slots,
            };
            if news.send(event).await.is_err() {
                return;
            }
        }
    }
}

/// `None` when nobody is left to tell.
async fn reconnect(link: &dyn FenceLink, news: &mpsc::Sender<FenceEvent>) -> Option<FenceHolds> {
    let mut told = false;
    loop {
        match link.connect().await {
            Ok(holds) => return Some(holds),
            Err(error) if !told => {
                tracing::error!(%error, "the fence is gone; trying again");
                told = true;
            }
            Err(_) => {}
        }
        tokio::select! {
            // Cancel safe: it only waits.
            () = sleep(RECONNECT_PAUSE) => {}
            // Cancel safe: likewise.
            () = news.closed() => return None,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use async_trait::async_trait;
    use conman_core::ownership::BootTime;

    use super::*;

    #[derive(Debug, Clone, Copy)]
    enum Fate {
        Done,
        Refused,
        Lost,
        /// No answer comes.
        Hangs,
    }

    /// An open fence, which says so, and what becomes of the orders to thaw that it is given.
    #[derive(Debug)]
    struct Open {
        fates: Vec<Fate>,
        thaws: AtomicUsize,
        breaks: Notify,
    }

    #[async_trait]
    impl FenceLink for Open {
        async fn connect(&self) -> Result<FenceHolds, FenceLinkError> {
            Ok(FenceHolds {
                fired: false,
                slots: Vec::new(),
            })
        }

        async fn order(&self, order: FenceOrder) -> Result<(), FenceLinkError> {
            if !matches!(order, FenceOrder::Thaw { .. }) {
                return Ok(());
            }
            let reason = "as told".to_owned();
            match self.fates[self.thaws.fetch_add(1, Ordering::Relaxed)] {
                Fate::Done => Ok(()),
                Fate::Refused => Err(FenceLinkError::Refused { reason }),
                Fate::Lost => Err(FenceLinkError::Lost { reason }),
                Fate::Hangs => std::future::pending().await,
            }
        }

        async fn news(&self) -> FenceNews {
            self.breaks.notified().await;
            FenceNews::Lost
        }
    }

    /// What the driver hears of an open fence when the connection breaks after each order to thaw;
    /// one that fails breaks it.
    async fn told_fired(fates: &[Fate]) -> Vec<bool> {
        let link = Arc::new(Open {
            fates: fates.to_vec(),
            thaws: AtomicUsize::new(0),
            breaks: Notify::new(),
        });
        let queue = Arc::new(FenceQueue::default());
        let (sender, mut news) = mpsc::channel(MAX_NEWS);
        let pulse = Pulse::unwatched(NAME);
        let task = run(Arc::clone(&link) as _, Arc::clone(&queue), sender, pulse);
        let task = tokio::spawn(task);
        let mut told = Vec::new();
        let mut at = 0;
        for (index, fate) in fates.iter().enumerate() {
            let thaw = FenceOrder::Thaw {
                deadline: BootTime(7),
                slots: Vec::new(),
            };
            queue.push(at, thaw);
            match fate {
                Fate::Done | Fate::Refused => {
                    while link.thaws.load(Ordering::Relaxed) <= index {
                        tokio::task::yield_now().await;
                    }
                    link.breaks.notify_one();
                }
                Fate::Lost | Fate::Hangs => {}
            }
            loop {
                match news.recv().await.expect("it goes on") {
                    FenceEvent::Fired => {}
                    FenceEvent::Connected {
                        connection, fired, ..
                    } => {
                        at = connection;
                        told.push(fired);
                        break;
                    }
                }
            }
        }
        task.abort();
        told
    }

    #[tokio::test]
    async fn a_thaw_that_may_have_come_to_some_alone_is_called_for_again() {
        use Fate::{Done, Hangs, Lost, Refused};
        assert_eq!(told_fired(&[Done, Done]).await, [false, false]);
        // Until one was carried out as a whole.
        let fates = [Lost, Refused, Hangs, Done, Done];
        assert_eq!(told_fired(&fates).await, [true, true, true, false, false]);
    }
}
