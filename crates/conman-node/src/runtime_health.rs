//! Checks every second whether the runtimes answer, and ends what waits for one that does not.
//!
//! A runtime that leaves a small request unanswered for three seconds is silent: its process is stopped, hangs,
//! or gets no processor time. Until it answers, starts and commands fail at once. Kills do not need it.

use std::collections::BTreeMap;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use conman_proto::RuntimeKind;
use conman_runtime::{Runtime, RuntimeError, RuntimeInfo};
use futures_util::future::join_all;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};

use crate::context::Context;

/// The task's name for the watchdog.
pub(crate) const NAME: &str = "runtime health";

const INTERVAL: Duration = Duration::from_secs(1);
/// A runtime that answers is described again after so many checks.
const DESCRIBED_EVERY: usize = 10;

/// Time after which a runtime counts as silent …
const PATIENCE: Duration = Duration::from_millis(2_500);
/// … if this has passed, too: after a stop of this process, the answer may have arrived long ago.
const LAST_PATIENCE: Duration = Duration::from_millis(500);
/// Time for a description, which takes longer on a busy host.
const INFO_PATIENCE: Duration = Duration::from_secs(5);
/// More than one check takes, with the start of the runtime's program.
const CHECK_BOUND: Duration = Duration::from_secs(20);

#[derive(Debug, Default)]
struct Latest {
    /// The last description, or why there was none; `None` before the first check.
    described: Option<Result<RuntimeInfo, String>>,
    answered: Option<Instant>,
    silent: bool,
}

impl Latest {
    fn error(&self) -> Option<&String> {
        self.described.as_ref()?.as_ref().err()
    }
}

/// The latest checks, by runtime.
#[derive(Debug)]
pub(crate) struct RuntimeHealth(BTreeMap<RuntimeKind, watch::Sender<Latest>>);

impl RuntimeHealth {
    pub(crate) fn new(kinds: impl Iterator<Item = RuntimeKind>) -> Self {
        Self(kinds.map(|kind| (kind, watch::Sender::default())).collect())
    }

    /// Returns why a runtime cannot start sessions at present.
    pub(crate) fn error(&self, kind: RuntimeKind) -> Option<String> {
        self.0.get(&kind)?.borrow().error().cloned()
    }

    /// Returns why starts and commands fail at present without a request to the runtime.
    pub(crate) fn silence(&self, kind: RuntimeKind) -> Option<String> {
        let latest = self.0.get(&kind)?.borrow();
        latest.error().filter(|_| latest.silent).cloned()
    }

    pub(crate) fn answered_ago_ms(&self, kind: RuntimeKind) -> Option<u64> {
        let answered = self.0.get(&kind)?.borrow().answered?;
        u64::try_from(answered.elapsed().as_millis()).ok()
    }

    pub(crate) fn warnings(&self) -> Vec<String> {
        let warnings = |latest: &watch::Sender<Latest>| match &latest.borrow().described {
            Some(Ok(info)) => info.warnings.clone(),
            Some(Err(error)) => vec![error.clone()],
            None => Vec::new(),
        };
        self.0.values().flat_map(warnings).collect()
    }

    /// Waits for a runtime's answer for as long as the runtime is not silent. A request to one that is silent is
    /// [`RuntimeError::NotSent`]. If the runtime falls silent later, the request may have been carried out, or may
    /// still be. Cancel safe if `answer` is.
    pub(crate) async fn while_it_answers<T>(
        &self,
        runtime: RuntimeKind,
        action: &'static str,
        answer: impl Future<Output = Result<T, RuntimeError>>,
    ) -> Result<T, RuntimeError> {
        let Some(latest) = self.0.get(&runtime) else {
            return answer.await;
        };
        if let Some(reason) = self.silence(runtime) {
            return Err(RuntimeError::NotSent {
                runtime,
                action,
                reason,
            });
        }
        let mut latest = latest.subscribe();
        tokio::select! {
            biased;
            // Cancel safe: it only waits.
            Ok(latest) = latest.wait_for(|latest| latest.silent) => {
                let reason = latest.error().cloned().unwrap_or_default();
                Err(RuntimeError::Unavailable { runtime, action, reason })
            }
            answer = answer => answer,
        }
    }

    fn note(
        &self,
        kind: RuntimeKind,
        silent: bool,
        described: Option<Result<RuntimeInfo, String>>,
    ) {
        let Some(latest) = self.0.get(&kind) else {
            return;
        };
        latest.send_modify(|latest| {
            if !silent && !matches!(described, Some(Err(_))) {
                latest.answered = Some(Instant::now());
            }
            latest.silent = silent;
            if let Some(described) = described {
                log_change(kind, latest.described.as_ref(), &described);
                latest.described = Some(described);
            }
        });
    }
}

/// Checks until it is aborted.
pub(crate) async fn run(context: Arc<Context>) {
    let progress = context.options.watchdog.task(NAME);
    for round in 0.. {
        progress.beat().await;
        let is_described = round % DESCRIBED_EVERY == 0;
        let checks = context.runtimes.iter();
        let checks =
            checks.map(|(kind, runtime)| check(&context.health, *kind, &**runtime, is_described));
        progress.wait(CHECK_BOUND, join_all(checks)).await;
        progress.wait(INTERVAL, sleep(INTERVAL)).await;
    }
}

async fn check(health: &RuntimeHealth, kind: RuntimeKind, runtime: &dyn Runtime, describe: bool) {
    let mut ping = pin!(runtime.ping());
    let mut answered = timeout(PATIENCE, &mut ping).await;
    if answered.is_err() {
        answered = timeout(LAST_PATIENCE, &mut ping).await;
    }
    // Bounded by the runtime. What waits for a program that is starting need not be repeated by its client.
    while answered.is_err() && runtime.is_starting() {
        answered = timeout(LAST_PATIENCE, &mut ping).await;
    }
    let failed = |error: &RuntimeError| Some(Err(conman_core::error_chain(error)));
    match answered {
        Err(_) => health.note(kind, true, Some(Err(silence(kind)))),
        Ok(Err(error)) => health.note(kind, false, failed(&error)),
        Ok(Ok(())) if describe || health.error(kind).is_some() => {
            health.note(kind, false, None);
            let described = match timeout(INFO_PATIENCE, runtime.info()).await {
                Ok(Ok(info)) => Some(Ok(info)),
                Ok(Err(error)) => failed(&error),
                Err(_) => Some(Err(format!(
                    "{kind} did not describe itself within {} s",
                    INFO_PATIENCE.as_secs()
                ))),
            };
            health.note(kind, false, described);
        }
        Ok(Ok(())) => health.note(kind, false, None),
    }
}

fn silence(kind: RuntimeKind) -> String {
    let program = match kind {
        RuntimeKind::Native | RuntimeKind::Gvisor | RuntimeKind::Oci(_) => "the shim",
        RuntimeKind::Docker => "dockerd",
        RuntimeKind::Process => "the runtime",
    };
    format!(
        "{program} has not answered for {} s: it is stopped, hangs, or gets no processor time; running \
         sessions continue, and starts and commands fail until it answers or is restarted",
        (PATIENCE + LAST_PATIENCE).as_secs()
    )
}

fn log_change(
    kind: RuntimeKind,
    before: Option<&Result<RuntimeInfo, String>>,
    now: &Result<RuntimeInfo, String>,
) {
    match (before, now) {
        (Some(Ok(_)) | None, Err(error)) => {
            tracing::warn!(runtime = %kind, error, "the runtime does not answer");
        }
        (Some(Err(_)), Ok(_)) => tracing::info!(runtime = %kind, "the runtime answers again"),
        (None, Ok(info)) => {
            tracing::info!(runtime = %kind, version = info.version, "the runtime answers");
            for warning in &info.warnings {
                tracing::warn!(runtime = %kind, "{warning}");
            }
        }
        (Some(Ok(_)), Ok(_)) | (Some(Err(_)), Err(_)) => {}
    }
}

#[cfg(test)]
mod tests {
    use std::future::{pending, ready};

    use super::*;

    const KIND: RuntimeKind = RuntimeKind::Native;

    #[tokio::test]
    async fn what_waits_for_a_runtime_ends_once_it_is_silent_and_nothing_is_sent_to_it_then() {
        let health = RuntimeHealth::new([KIND].into_iter());
        let answered = health.while_it_answers(KIND, "start", ready(Ok(7))).await;
        assert_eq!(answered.expect("it answers"), 7);
        let waits = health.while_it_answers(KIND, "start", pending::<Result<(), _>>());
        let is_silent = async { health.note(KIND, true, Some(Err(silence(KIND)))) };
        let (waited, ()) = tokio::join!(waits, is_silent);
        let error = waited.expect_err("it is silent");
        assert!(error.is_ambiguous(), "it may have been carried out");
        let error = error.to_string();
        assert!(
            error.contains("the shim has not answered for 3 s"),
            "{error}"
        );
        let unsent = async { panic!("nothing is sent") };
        let refused: Result<(), _> = health.while_it_answers(KIND, "start", unsent).await;
        let error = refused.expect_err("it is silent");
        assert!(!error.is_ambiguous(), "{error}");
        assert!(health.silence(KIND).is_some());
        assert_eq!(health.answered_ago_ms(KIND), None);
        health.note(KIND, false, None);
        assert_eq!(health.silence(KIND), None);
        assert!(health.answered_ago_ms(KIND).is_some());
    }

    #[tokio::test]
    async fn a_runtime_that_refuses_connections_is_not_silent() {
        let health = RuntimeHealth::new([KIND].into_iter());
        health.note(KIND, false, Some(Err("connection refused".to_owned())));
        assert_eq!(health.silence(KIND), None);
        assert!(health.error(KIND).is_some());
    }
}
