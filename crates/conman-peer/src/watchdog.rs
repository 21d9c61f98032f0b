//! A bound on waiting.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::time::{Instant, Sleep, sleep_until};

/// A bound on waiting that costs nothing while nothing is awaited.
///
/// The timer is made at the first wait and then moved only when it fires too early, so that
/// frequent progress does not touch the runtime's timer wheel.
#[derive(Debug, Default)]
pub struct Watchdog {
    deadline: Option<Instant>,
    timer: Option<Pin<Box<Sleep>>>,
}

impl Watchdog {
    /// There was progress: the next wait starts again.
    pub fn calm(&mut self) {
        self.deadline = None;
    }

    /// Ready once the present wait has lasted for `limit`.
    pub fn poll(&mut self, cx: &mut Context<'_>, limit: Duration) -> Poll<()> {
        let deadline = *self.deadline.get_or_insert_with(|| far(limit));
        self.poll_until(cx, deadline)
    }

    /// Ready once `deadline` has passed.
    pub fn poll_until(&mut self, cx: &mut Context<'_>, deadline: Instant) -> Poll<()> {
        self.deadline = Some(deadline);
        let timer = self
            .timer
            .get_or_insert_with(|| Box::pin(sleep_until(deadline)));
        if timer.deadline() > deadline {
            timer.as_mut().reset(deadline);
        }
        loop {
            ready!(timer.as_mut().poll(cx));
            if Instant::now() >= deadline {
                return Poll::Ready(());
            }
            timer.as_mut().reset(deadline);
        }
    }
}

/// The instant after `limit`, or one that never comes if the clock cannot count that far.
fn far(limit: Duration) -> Instant {
    /// About thirty years, as tokio uses for "never".
    const NEVER: Duration = Duration::from_secs(86_400 * 365 * 30);
    let now = Instant::now();
    now.checked_add(limit.min(NEVER)).unwrap_or(now)
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn it_fires_after_the_limit_without_progress_and_not_before() {
        let limit = Duration::from_secs(60);
        let mut watchdog = Watchdog::default();
        let begun = Instant::now();
        let early = tokio::time::timeout(
            Duration::from_secs(59),
            poll_fn(|cx| watchdog.poll(cx, limit)),
        );
        assert!(early.await.is_err());
        watchdog.calm();
        poll_fn(|cx| watchdog.poll(cx, limit)).await;
        assert_eq!(begun.elapsed().as_secs(), 59 + 60);
    }

    #[tokio::test(start_paused = true)]
    async fn a_nearer_deadline_takes_effect() {
        let mut watchdog = Watchdog::default();
        let begun = Instant::now();
        let late = begun + Duration::from_secs(60);
        let soon = begun + Duration::from_secs(5);
        let waiting = poll_fn(|cx| watchdog.poll_until(cx, late));
        assert!(
            tokio::time::timeout(Duration::from_secs(1), waiting)
                .await
                .is_err()
        );
        poll_fn(|cx| watchdog.poll_until(cx, soon)).await;
        assert_eq!(begun.elapsed().as_secs(), 5);
    }
}
