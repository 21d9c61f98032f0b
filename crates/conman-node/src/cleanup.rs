//! Removes what dead containers left, in the background and in batches.
//!
//! [`CleanupQueue`] (a set of containers, no larger than the number of containers that exist)
//! ──notify──> one task, which removes them from each runtime in batches and retries failures.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use conman_proto::{EventKind, RuntimeKind};
use conman_runtime::ContainerKey;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};

use crate::context::Context;

/// The task's name for the watchdog.
pub(crate) const NAME: &str = "clean-up";

/// Containers in one call: enough to share its cost, few enough that new ones do not wait long.
const BATCH: usize = 32;

/// First pause after a failure; it doubles with each further one.
const FIRST_PAUSE: Duration = Duration::from_millis(500);

/// A runtime that hung removes the containers soon after it answers again.
const LONGEST_PAUSE: Duration = Duration::from_secs(15);

/// How often a preempted node checks whether it was readmitted.
const PREEMPTED_PAUSE: Duration = Duration::from_secs(1);

/// A failure is journalled at first and then every so many failures, which is every twenty minutes.
const JOURNAL_EVERY: u32 = 80;

#[derive(Debug, Default)]
pub(crate) struct CleanupQueue {
    waiting: Mutex<BTreeMap<(RuntimeKind, ContainerKey), Try>>,
    added: Notify,
}

#[derive(Debug, Clone, Copy)]
struct Try {
    at: Instant,
    failures: u32,
}

impl CleanupQueue {
    /// A panic cannot leave a partial change: each change is one map operation.
    fn lock(&self) -> MutexGuard<'_, BTreeMap<(RuntimeKind, ContainerKey), Try>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Queues the removal of a dead or never started container. Queueing it twice has no further effect.
    pub(crate) fn push(&self, runtime: RuntimeKind, key: ContainerKey) {
        self.lock().entry((runtime, key)).or_insert(Try {
            at: Instant::now(),
            failures: 0,
        });
        self.added.notify_one();
    }

    pub(crate) fn len(&self) -> usize {
        self.lock().len()
    }

    /// Returns up to a batch of one runtime's containers that are due, and when to check again.
    fn due(&self, now: Instant) -> (Option<(RuntimeKind, Vec<ContainerKey>)>, Option<Instant>) {
        let waiting = self.lock();
        let Some(runtime) = waiting
            .iter()
            .find(|(_, one)| one.at <= now)
            .map(|((r, _), _)| *r)
        else {
            return (None, waiting.values().map(|one| one.at).min());
        };
        let keys = waiting
            .iter()
            .filter(|((kind, _), one)| *kind == runtime && one.at <= now)
            .map(|((_, key), _)| key.clone())
            .take(BATCH)
            .collect();
        (Some((runtime, keys)), None)
    }

    fn done(&self, runtime: RuntimeKind, key: &ContainerKey) {
        self.lock().remove(&(runtime, key.clone()));
    }

    /// Schedules another try, after the last one `took` so long. Returns the number of failures so far.
    fn failed(
        &self,
        runtime: RuntimeKind,
        key: &ContainerKey,
        now: Instant,
        took: Duration,
    ) -> u32 {
        let mut waiting = self.lock();
        let Some(one) = waiting.get_mut(&(runtime, key.clone())) else {
            return 0;
        };
        one.failures = one.failures.saturating_add(1);
        // A try that takes long is repeated less often, so that it does not delay the others.
        one.at = now + pause_after(one.failures).max(took);
        one.failures
    }
}

fn pause_after(failures: u32) -> Duration {
    let doublings = failures.saturating_sub(1).min(16);
    (FIRST_PAUSE * 2_u32.pow(doublings)).min(LONGEST_PAUSE)
}

/// Cleans up until it is aborted.
pub(crate) async fn run(context: Arc<Context>) {
    let progress = context.options.watchdog.task(NAME);
    loop {
        progress.beat().await;
        if context.table.closed().is_some() {
            // The machine is about to stop; if it stays, everything is still in the queue.
            progress.idle(tokio::time::sleep(PREEMPTED_PAUSE)).await;
            continue;
        }
        let added = context.cleanup.added.notified();
        let (batch, next) = context.cleanup.due(Instant::now());
        if let Some((runtime, keys)) = batch {
            // A runtime that hangs must not trip this task's watchdog.
            progress.idle(clean(&context, runtime, keys)).await;
            continue;
        }
        let more = async {
            tokio::select! {
                // Cancel safe: the queue is read again.
                () = added => {}
                // Cancel safe: a timer has no state.
                () = sleep_until(next.unwrap_or_else(Instant::now)), if next.is_some() => {}
            }
        };
        progress.idle(more).await;
    }
}

async fn clean(context: &Context, kind: RuntimeKind, keys: Vec<ContainerKey>) {
    let Some(runtime) = context.runtime(kind) else {
        // The runtime is no longer configured. Once it is configured again, the containers show in
        // its list.
        for key in keys {
            context.cleanup.done(kind, &key);
        }
        return;
    };
    let begun = Instant::now();
    let results = runtime.remove(&keys).await;
    let now = Instant::now();
    let took = now - begun;
    let mut results = results.into_iter();
    for key in keys {
        match results.next() {
            Some(Ok(())) => {
                context.cleanup.done(kind, &key);
                metrics::counter!("conman_cleanups_total", "result" => "done").increment(1);
                let message = "removed what its container left";
                context.note_session(
                    EventKind::SessionCleaned,
                    &key.session,
                    key.generation,
                    message,
                );
            }
            Some(Err(error)) => {
                let failures = context.cleanup.failed(kind, &key, now, took);
                metrics::counter!("conman_cleanups_total", "result" => "failed").increment(1);
                if failures % JOURNAL_EVERY == 1 {
                    let message = format!(
                        "{}; trying again in {} s",
                        conman_core::error_chain(&error),
                        pause_after(failures).max(took).as_secs_f64()
                    );
                    context.note_session(
                        EventKind::CleanupFailed,
                        &key.session,
                        key.generation,
                        message,
                    );
                }
            }
            // Without a result the removal is retried.
            None => {
                context.cleanup.failed(kind, &key, now, took);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(session: &str) -> ContainerKey {
        ContainerKey::new(
            session.parse().expect("an id"),
            conman_proto::Generation::FIRST,
        )
    }

    #[test]
    fn a_failed_removal_waits_and_the_others_go_on() {
        let queue = CleanupQueue::default();
        queue.push(RuntimeKind::Docker, key("a"));
        queue.push(RuntimeKind::Docker, key("b"));
        queue.push(RuntimeKind::Docker, key("a"));
        assert_eq!(queue.len(), 2);
        let now = Instant::now();
        let took = Duration::from_millis(20);
        assert_eq!(queue.failed(RuntimeKind::Docker, &key("a"), now, took), 1);
        let (batch, _) = queue.due(now);
        assert_eq!(batch, Some((RuntimeKind::Docker, vec![key("b")])));
        queue.done(RuntimeKind::Docker, &key("b"));
        let (batch, next) = queue.due(now);
        assert_eq!((batch, next), (None, Some(now + FIRST_PAUSE)));
    }

    #[test]
    fn pauses_grow_to_a_bound() {
        assert_eq!(pause_after(1), FIRST_PAUSE);
        assert_eq!(pause_after(2), FIRST_PAUSE * 2);
        assert_eq!(pause_after(u32::MAX), LONGEST_PAUSE);
    }
}
