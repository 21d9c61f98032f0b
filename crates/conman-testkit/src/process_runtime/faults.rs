//! Fault injection, for tests of the runtime's callers.

use std::collections::{BTreeMap, BTreeSet};
use std::future::pending;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use conman_proto::SessionId;
use tokio::sync::watch;

/// A call that faults can be injected into.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Operation {
    Info,
    /// Can only report a missing image.
    LookForImage,
    Create,
    Start,
    Find,
    List,
    ExitCode,
    Remove,
    Exec,
    Logs,
}

/// A fault of a call.
#[derive(Debug, Clone)]
pub enum Fault {
    /// The call takes this much longer.
    Delay(Duration),
    /// The call is refused for this reason; nothing happens.
    Refuse(String),
    /// The host lacks this image; nothing happens.
    LackImage(String),
    /// The same, after a delay.
    LackImageAfter(Duration, String),
    /// The runtime does not answer; nothing happens.
    Unavailable,
    /// The call times out at once, but is carried out later.
    LoseAnswer { happens_after: Duration },
    /// The call times out as while the runtime hangs; nothing happens.
    Hang,
}

/// The handle to inject faults; clones act on the same runtime.
#[derive(Debug, Clone)]
pub struct Faults {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    hung: watch::Sender<bool>,
}

#[derive(Debug, Default)]
struct State {
    rules: Vec<Rule>,
    calls: BTreeMap<Operation, u64>,
    fenced: BTreeSet<SessionId>,
    mute_about_fences: bool,
}

#[derive(Debug)]
struct Rule {
    operation: Operation,
    session: Option<SessionId>,
    fault: Fault,
    /// How many calls it still affects; `None` for all.
    remaining: Option<u32>,
}

impl Default for Faults {
    fn default() -> Self {
        let hung = watch::Sender::new(false);
        Self {
            shared: Arc::new(Shared {
                state: Mutex::default(),
                hung,
            }),
        }
    }
}

impl Faults {
    /// Affects every call of `operation` until [`Self::clear`].
    pub fn always(&self, operation: Operation, fault: Fault) {
        self.add(Rule {
            operation,
            session: None,
            fault,
            remaining: None,
        });
    }

    /// Affects the next `times` calls of `operation`.
    pub fn next(&self, operation: Operation, times: u32, fault: Fault) {
        self.add(Rule {
            operation,
            session: None,
            fault,
            remaining: Some(times),
        });
    }

    /// Affects every call of `operation` for one session until [`Self::clear`].
    pub fn for_session(&self, operation: Operation, session: SessionId, fault: Fault) {
        self.add(Rule {
            operation,
            session: Some(session),
            fault,
            remaining: None,
        });
    }

    /// Ends all faults except [`Self::hang`].
    pub fn clear(&self) {
        self.with_state(|state| state.rules.clear());
    }

    /// From here on no call is answered, as by a stopped daemon. Calls in progress are included:
    /// they continue after [`Self::resume`] or time out.
    pub fn hang(&self) {
        self.shared.hung.send_replace(true);
    }

    /// Ends [`Self::hang`].
    pub fn resume(&self) {
        self.shared.hung.send_replace(false);
    }

    /// Reports the session's containers as killed by a fence, once they are dead.
    pub fn fence(&self, session: SessionId) {
        self.with_state(|state| state.fenced.insert(session));
    }

    /// From here on the runtime does not report whether a fence killed a container.
    pub fn be_mute_about_fences(&self) {
        self.with_state(|state| state.mute_about_fences = true);
    }

    pub(super) async fn was_fenced(&self, session: &SessionId) -> bool {
        if self.with_state(|state| state.mute_about_fences) {
            return pending().await;
        }
        self.with_state(|state| state.fenced.contains(session))
    }

    /// Number of calls of `operation` so far; a removal counts once for each key.
    #[must_use]
    pub fn calls(&self, operation: Operation) -> u64 {
        self.with_state(|state| state.calls.get(&operation).copied().unwrap_or(0))
    }

    /// Counts a call and returns the fault that affects it.
    pub(super) fn strike(
        &self,
        operation: Operation,
        session: Option<&SessionId>,
    ) -> Option<Fault> {
        self.with_state(|state| {
            *state.calls.entry(operation).or_default() += 1;
            let rule = state.rules.iter_mut().find(|rule| {
                rule.operation == operation
                    && rule.remaining != Some(0)
                    && (rule.session.is_none() || rule.session.as_ref() == session)
            })?;
            if let Some(remaining) = &mut rule.remaining {
                *remaining -= 1;
            }
            Some(rule.fault.clone())
        })
    }

    /// Waits while the runtime is made to hang.
    pub(super) async fn answering(&self) {
        let mut hung = self.shared.hung.subscribe();
        // The sender lives in `self`, so this cannot fail.
        let _ = hung.wait_for(|hung| !hung).await;
    }

    fn add(&self, rule: Rule) {
        self.with_state(|state| state.rules.push(rule));
    }

    fn with_state<T>(&self, act: impl FnOnce(&mut State) -> T) -> T {
        act(&mut self
            .shared
            .state
            .lock()
            .unwrap_or_else(PoisonError::into_inner))
    }
}
