//! Changes of a file on a disk that may hang: made one after the other, in the order of the requests.
//!
//! A caller waits for a bounded time; a change that takes longer, or waits behind one that does, is still
//! made once the disk answers.
//!
//! [`DiskQueue::make`] ──a task for each change, bounded──> a blocking thread, one at a time.

use std::io::{self, ErrorKind};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::{Semaphore, oneshot};
use tokio::task::{JoinHandle, spawn_blocking};
use tokio::time::timeout;

#[derive(Debug)]
pub(crate) struct DiskQueue {
    patience: Duration,
    /// A permit for each change that may wait.
    room: Arc<Semaphore>,
    /// Completes with the last change.
    last: Mutex<Option<JoinHandle<()>>>,
}

impl DiskQueue {
    pub(crate) fn new(patience: Duration, max_waiting: usize) -> Self {
        Self {
            patience,
            room: Arc::new(Semaphore::new(max_waiting)),
            last: Mutex::default(),
        }
    }

    /// Makes a change after all earlier ones. After an error of the kind [`ErrorKind::TimedOut`] it may still
    /// be made. Cancelling does not cancel it.
    pub(crate) async fn make(
        &self,
        change: impl FnOnce() -> io::Result<()> + Send + 'static,
    ) -> io::Result<()> {
        let slow = |_| io::Error::new(ErrorKind::TimedOut, "the disk does not answer in time");
        let made = self.add(change)?;
        let made = timeout(self.patience, made).await.map_err(slow)?;
        made.unwrap_or_else(|error| Err(io::Error::other(error)))
    }

    fn add(
        &self,
        change: impl FnOnce() -> io::Result<()> + Send + 'static,
    ) -> io::Result<oneshot::Receiver<io::Result<()>>> {
        let full = |_| {
            let why = "the disk does not answer, and too many changes wait for it";
            io::Error::new(ErrorKind::TimedOut, why)
        };
        let place = Arc::clone(&self.room).try_acquire_owned().map_err(full)?;
        let (done, outcome) = oneshot::channel();
        // No panic can happen while the lock is held.
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let earlier = last.take();
        *last = Some(tokio::spawn(async move {
            if let Some(earlier) = earlier {
                // Its own caller gets its outcome.
                let _ = earlier.await;
            }
            let made = spawn_blocking(change).await;
            drop(place);
            // The caller may have stopped waiting.
            let _ = done.send(made.unwrap_or_else(|error| Err(io::Error::other(error))));
        }));
        Ok(outcome)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(60);

    #[tokio::test]
    async fn changes_that_the_disk_delays_are_bounded_and_made_in_order() {
        let queue = DiskQueue::new(Duration::from_millis(1), 3);
        let (disk, answers) = channel::<()>();
        let (made, order) = channel();
        let note = |number| {
            let made = made.clone();
            move || made.send(number).map_err(io::Error::other)
        };
        let first = note(1);
        let held = move || {
            answers.recv().map_err(io::Error::other)?;
            first()
        };
        let slow = queue.make(held).await.expect_err("it is held up");
        assert_eq!(slow.kind(), ErrorKind::TimedOut);
        let slow = queue.make(note(2)).await.expect_err("it waits");
        assert_eq!(slow.kind(), ErrorKind::TimedOut);
        let (third, fourth) = (queue.add(note(3)), queue.add(note(4)));
        let third = third.expect("there is room");
        let full = fourth.expect_err("there is no room");
        assert_eq!(full.kind(), ErrorKind::TimedOut);
        disk.send(()).expect("the change waits");
        let third = timeout(PATIENCE, third).await.expect("it is made");
        third.expect("it has a result").expect("it is made well");
        assert_eq!(order.try_iter().collect::<Vec<_>>(), [1, 2, 3]);
    }
}
