//! Waits for conditions.

use std::time::Duration;

use tokio::time::{Instant, sleep};

use crate::slowness;

/// How often a condition is looked at, in the beginning and at least. In between, a wait is a twentieth longer
/// than it has to be: a look costs a debug build some milliseconds of processor time, which others need.
const POLL: Duration = Duration::from_millis(20);
const SLOWEST_POLL: Duration = Duration::from_millis(100);

/// A wait is given up after its bound and as many looks as it has room for: where other programs delay each look,
/// they delay as well what is waited for. Where looks hang, it is given up after this multiple of the bound.
const MOST_TIMES: u32 = 3;

/// Waits until `look` gives a value.
///
/// # Panics
/// After `patience`, of a usual machine, saying what was waited for.
pub async fn eventually_some<T>(
    what: &str,
    patience: Duration,
    mut look: impl AsyncFnMut() -> Option<T>,
) -> T {
    let patience = patience * slowness();
    let looks_at_least = patience.as_millis() / SLOWEST_POLL.as_millis();
    let mut looks = 0;
    let begun = Instant::now();
    loop {
        if let Some(value) = look().await {
            return value;
        }
        looks += 1;
        let waited = begun.elapsed();
        let is_over = waited > patience && looks > looks_at_least || waited > patience * MOST_TIMES;
        assert!(!is_over, "waited {waited:?} in vain for this: {what}");
        sleep((waited / 20).clamp(POLL, SLOWEST_POLL)).await;
    }
}

/// Waits until `look` says yes.
///
/// # Panics
/// After `patience`, of a usual machine, saying what was waited for.
pub async fn eventually(what: &str, patience: Duration, mut look: impl AsyncFnMut() -> bool) {
    eventually_some(what, patience, async || look().await.then_some(())).await;
}
