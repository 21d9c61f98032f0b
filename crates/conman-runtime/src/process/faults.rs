//! Trouble on demand, for tests of whoever uses the runtime.

use std::collections::{BTreeMap, BTreeSet};
use std::future::pending;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use conman_proto::SessionId;
use tokio::sync::watch;

/// A call that trouble can be made for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Operation {
    Info,
    /// Only a lack can be found.
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

/// What befalls a call.
#[derive(Debug, Clone)]
pub enum Fault {
    /// It takes so much longer.
    Delay(Duration),
    /// It is refused for this reason, and nothing happens.
    Refuse(String),
    /// The host lacks this image, and nothing happens.
    LackImage(String),
    /// The same, found out so much later.
    LackImageAfter(Duration, String),
    /// The runtime does not answer, and nothing happens.
    Unavailable,
    /// The call times out at once, and what it asked happens nevertheless, so much later.
    LoseAnswer { happens_after: Duration },
    /// It times out as every call does while the runtime hangs, and nothing happens.
    Hang,
}

/// The handle through which a test makes trouble; clones act on the same runtime.
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
    /// Calls that it will still befall; `None` for all.
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
    /// Befalls every call of `operation` until [`Self::clear`].
    pub fn always(&self, operation: Operation, fault: Fault) {
        self.add(Rule {
            operation,
            session: None,
            fault,
            remaining: None,
        });
    }

    /// Befalls the next `times` calls of `operation`.
    pub fn next(&self, operation: Operation, times: u32, fault: Fault) {
        self.add(Rule {
            operation,
            session: None,
            fault,
            remaining: Some(times),
        });
    }

    /// Befalls every call of `operation` for one session until [`Self::clear`].
    pub fn for_session(&self, operation: Operation, session: SessionId, fault: Fault) {
        self.add(Rule {
            operation,
            session: Some(session),
            fault,
            remaining: None,
        });
    }

    /// Ends all trouble but [`Self::hang`].
    pub fn clear(&self) {
        self.with_state(|state| state.rules.clear());
    }

    /// From now on nothing is answered, as by a stopped daemon: calls in progress included, they
    /// go on after [`Self::resume`] or time out.
    pub fn hang(&self) {
        self.shared.hung.send_replace(true);
    }

    /// Ends [`Self::hang`].
    pub fn resume(&self) {
        self.shared.hung.send_replace(false);
    }

    /// The session's containers are told from now on as killed by a fence, once they are dead.
    pub fn fence(&self, session: SessionId) {
        self.with_state(|state| state.fenced.insert(session));
    }

    /// From now on nobody is told whether a fence killed something.
    pub fn be_mute_about_fences(&self) {
        self.with_state(|state| state.mute_about_fences = true);
    }

    pub(super) async fn was_fenced(&self, session: &SessionId) -> bool {
        if self.with_state(|state| state.mute_about_fences) {
            return pending().await;
        }
        self.with_state(|state| state.fenced.contains(session))
    }

    /// How often `operation` was called so far; a removal counts once for each key.
    #[must_use]
    pub fn calls(&self, operation: Operation) -> u64 {
        self.with_state(|state| state.calls.get(&operation).copied().unwrap_or(0))
    }

    /// Counts a call and tells what befalls it.
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
