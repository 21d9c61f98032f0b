//! Compares the runtimes' containers with the node's lives, and ends containers without an owner.
//!
//! A container without a life of its generation is an orphan: its record is lost with the registry, it
//! was created after its start was given up, or an earlier daemon died before removing it. The comparison
//! is sound because a life is known, with its generation, before the runtime gets a request for the
//! session.

use std::sync::Arc;
use std::time::Duration;

use conman_linux::PidFd;
use conman_proto::EventKind;
use conman_runtime::{FoundContainer, Runtime};
use futures_util::future::join_all;
use tokio::time::{Instant, sleep, timeout};

use crate::certificate;
use crate::context::Context;

/// The task's name for the watchdog.
pub(crate) const NAME: &str = "reconciler";

/// Interval between comparisons when all is well.
const INTERVAL: Duration = Duration::from_secs(60);

/// Interval between comparisons while containers may appear late, or a runtime does not answer.
const SHORT_INTERVAL: Duration = Duration::from_secs(3);

/// How long a container may still appear after its start was given up.
const STRAY_PERIOD: Duration = Duration::from_secs(120);

/// The bound on one listing.
const PATIENCE: Duration = Duration::from_secs(30);

/// How long to wait for an orphan's death before the next orphan.
const DEATH_PATIENCE: Duration = Duration::from_secs(5);

/// Compares until it is aborted.
pub(crate) async fn run(context: Arc<Context>) {
    let progress = context.options.watchdog.task(NAME);
    let mut strays_until: Option<Instant> = None;
    loop {
        progress.beat().await;
        let all_well = match context.table.closed() {
            // The emergency thread does the rest.
            Some(_) => true,
            // A runtime that hangs must not trip this task's watchdog.
            None => progress.idle(sweep(&context)).await,
        };
        let expected = strays_until.is_some_and(|until| Instant::now() < until);
        let pause = if all_well && !expected {
            INTERVAL
        } else {
            SHORT_INTERVAL
        };
        let next = async {
            tokio::select! {
                // Cancel safe: a notification is kept as a permit until it is taken.
                () = context.stray_expected.notified() => {
                    strays_until = Some(Instant::now() + STRAY_PERIOD);
                    // It does not exist yet right after the notification.
                    sleep(SHORT_INTERVAL).await;
                }
                // Cancel safe: the pause starts again.
                () = sleep(pause) => {}
            }
        };
        progress.idle(next).await;
    }
}

/// One comparison with every runtime. Returns whether all of them answered.
async fn sweep(context: &Context) -> bool {
    let runtimes = context.runtimes.values();
    let swept = runtimes.map(|runtime| sweep_one(context, &**runtime));
    join_all(swept).await.into_iter().all(|is_well| is_well)
}

async fn sweep_one(context: &Context, runtime: &dyn Runtime) -> bool {
    match timeout(PATIENCE, runtime.list()).await {
        Ok(Ok(found)) => {
            let mut all_well = true;
            for container in found {
                all_well &= settle(context, runtime, container).await;
            }
            all_well
        }
        Ok(Err(error)) => {
            let reason = conman_core::error_chain(&error);
            tracing::debug!(runtime = %runtime.kind(), reason, "cannot list containers");
            false
        }
        Err(_) => false,
    }
}

/// Ends and removes a container that no life owns. Returns whether that is under way.
async fn settle(context: &Context, runtime: &dyn Runtime, found: FoundContainer) -> bool {
    let key = &found.key;
    if context.sessions.is_live(&key.session, key.generation) {
        return true;
    }
    let Some(pid) = found.pid else {
        context.cleanup.push(runtime.kind(), found.key);
        return true;
    };
    let process = match PidFd::open(pid) {
        Ok(process) => Arc::new(process),
        // Dead since the list was made; the next one shows it as ended.
        Err(error) if error.proves_death() => return false,
        Err(error) => {
            tracing::warn!(
                container = %key,
                pid,
                %error,
                "cannot open an orphaned container's process"
            );
            return false;
        }
    };
    if !runtime.owns_pid(key, pid) {
        return false;
    }
    if let Err(error) = process.kill() {
        tracing::warn!(container = %key, pid, %error, "cannot kill an orphaned container");
        return false;
    }
    let dead = timeout(DEATH_PATIENCE, certificate::of(process))
        .await
        .is_ok();
    if dead {
        metrics::counter!("conman_orphans_ended_total").increment(1);
        let message = "killed a container that no record of this node owns";
        context.note_session(
            EventKind::OrphanEnded,
            &key.session,
            key.generation,
            message,
        );
        context.cleanup.push(runtime.kind(), found.key);
    }
    dead
}
