//! Logs endpoints that fail while another one serves. Otherwise a wrong certificate or a dead
//! member would go unnoticed until the last endpoint fails.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use conman_core::Sparing;

use super::shared::boot_time;

/// Interval between repeated warnings.
const SAY_AGAIN_MS: u64 = 600_000;

#[derive(Debug)]
pub(super) struct PassedOver(Mutex<State>);

#[derive(Debug)]
struct State {
    /// The reason by endpoint index; only of those that have failed since the last report.
    reasons: BTreeMap<usize, String>,
    said: Sparing,
}

impl Default for PassedOver {
    fn default() -> Self {
        Self(Mutex::new(State {
            reasons: BTreeMap::new(),
            said: Sparing::new(SAY_AGAIN_MS),
        }))
    }
}

impl PassedOver {
    pub(super) fn failed(&self, endpoint: usize, reason: String) {
        self.with(|state| state.reasons.insert(endpoint, reason));
    }

    /// This endpoint serves: reports the failures of the others.
    pub(super) fn serves(&self, endpoint: usize) {
        self.with(|state| {
            state.reasons.remove(&endpoint);
            for reason in std::mem::take(&mut state.reasons).into_values() {
                if state.said.say(&reason, boot_time().0).is_some() {
                    tracing::warn!("{reason}; another one of `registry.endpoints` is used");
                }
            }
        });
    }

    /// A panic while the lock is held cannot leave a partial change.
    fn with<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        change(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}
