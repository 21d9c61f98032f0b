//! The task that sends orders to the fence in sequence, and forwards the fence's events to the
//! driver.
//!
//! Each connection has a number. The driver marks its orders with the latest number that it
//! received; orders for an earlier connection are lost with that connection.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use conman_core::ownership::{FenceHolds, FenceLinkError, FenceNews, SlotView};
use conman_watchdog::TaskProgress;
use tokio::sync::{Notify, mpsc};
use tokio::time::{sleep, timeout};

use conman_registry::{FenceLink, FenceOrder};

/// Timeout of one order: a shim that takes longer counts as lost, and is reconnected.
const ORDER_PATIENCE: Duration = Duration::from_secs(2);

/// Pause between two connection attempts.
const RECONNECT_PAUSE: Duration = Duration::from_millis(200);

/// Name of the task in reports of its end or stall.
pub(super) const NAME: &str = "fence orders";

/// Events that the driver has not received: it takes them as they come.
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

/// Orders that wait. Bounded: a deadline replaces an earlier one at the end of the queue, and of
/// the other orders the protocol sends a few per outage.
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

    /// The next order for this connection. Cancel safe: it is taken only when it is returned.
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

    /// A panic while the lock is held cannot leave a partial change: each is one operation.
    fn waiting(&self) -> MutexGuard<'_, VecDeque<(u64, FenceOrder)>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

enum Next {
    Order(FenceOrder),
    Heard(FenceNews),
    /// The driver is gone.
    Over,
}

/// Starts with an existing connection, number 0, and runs until the driver is gone.
pub(super) async fn run(
    link: Arc<dyn FenceLink>,
    queue: Arc<FenceQueue>,
    news: mpsc::Sender<FenceEvent>,
    progress: TaskProgress,
) {
    let mut connection = 0;
    // A thaw order may have been executed in part. The rest then stays frozen behind an open fence,
    // which does not report it.
    let mut thaws_in_part = false;
    loop {
        progress.beat().await;
        let next = next(&*link, &queue, connection, &news);
        let lost = match progress.idle(next).await {
            Next::Order(order) => {
                let thaws = matches!(order, FenceOrder::Thaw { .. });
                thaws_in_part |= thaws;
                let ordered = timeout(ORDER_PATIENCE, link.order(order));
                match progress.wait(ORDER_PATIENCE, ordered).await {
                    Ok(Ok(())) => {
                        thaws_in_part &= !thaws;
                        false
                    }
                    Ok(Err(FenceLinkError::Refused { reason })) => {
                        tracing::warn!(reason, "the fence refused an order");
                        // It is closed in that case; the next renewal opens it.
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
            // A shim that does not answer is not a stall of this daemon.
            let connected = progress.idle(reconnect(&*link, &news)).await;
            let Some(FenceHolds { fired, slots }) = connected else {
                return;
            };
            let event = FenceEvent::Connected {
                connection,
                // If true, the next renewal thaws what is still frozen.
                fired: fired || thaws_in_part,
                slots,
            };
            if news.send(event).await.is_err() {
                return;
            }
        }
    }
}

/// Waits for what comes next on this connection. Cancel safe.
async fn next(
    link: &dyn FenceLink,
    queue: &FenceQueue,
    connection: u64,
    news: &mpsc::Sender<FenceEvent>,
) -> Next {
    tokio::select! {
        // Cancel safe: an order is taken only when it is returned.
        order = queue.next(connection) => Next::Order(order),
        // Cancel safe by its contract.
        heard = link.news() => Next::Heard(heard),
        // Cancel safe: it only waits.
        () = news.closed() => Next::Over,
    }
}

/// `None` when the driver is gone.
async fn reconnect(link: &dyn FenceLink, news: &mpsc::Sender<FenceEvent>) -> Option<FenceHolds> {
    let mut is_logged = false;
    loop {
        match link.connect().await {
            Ok(holds) => return Some(holds),
            Err(error) if !is_logged => {
                tracing::error!(%error, "lost the connection to the fence; reconnecting");
                is_logged = true;
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

    /// An open fence, and the results of the thaw orders that it receives.
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
            let reason = "as ordered".to_owned();
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

    /// For each thaw order, after which the connection breaks: whether the driver sees the fence as
    /// fired. A failed order breaks the connection too.
    async fn reported_fired(fates: &[Fate]) -> Vec<bool> {
        let link = Arc::new(Open {
            fates: fates.to_vec(),
            thaws: AtomicUsize::new(0),
            breaks: Notify::new(),
        });
        let queue = Arc::new(FenceQueue::default());
        let (sender, mut news) = mpsc::channel(MAX_NEWS);
        let progress = TaskProgress::unwatched(NAME);
        let task = run(Arc::clone(&link) as _, Arc::clone(&queue), sender, progress);
        let task = tokio::spawn(task);
        let mut reported = Vec::new();
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
                match news.recv().await.expect("still running") {
                    FenceEvent::Fired => {}
                    FenceEvent::Connected {
                        connection, fired, ..
                    } => {
                        at = connection;
                        reported.push(fired);
                        break;
                    }
                }
            }
        }
        task.abort();
        reported
    }

    #[tokio::test]
    async fn a_thaw_that_may_have_come_to_some_alone_is_called_for_again() {
        use Fate::{Done, Hangs, Lost, Refused};
        assert_eq!(reported_fired(&[Done, Done]).await, [false, false]);
        // Until one was executed completely.
        let fates = [Lost, Refused, Hangs, Done, Done];
        assert_eq!(
            reported_fired(&fates).await,
            [true, true, true, false, false]
        );
    }
}
