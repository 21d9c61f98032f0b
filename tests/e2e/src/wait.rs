use std::time::Duration;

use tokio::time::{Instant, sleep};

use crate::slowness;

/// How often a condition is looked at.
const POLL: Duration = Duration::from_millis(20);

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
    let deadline = Instant::now() + patience;
    loop {
        if let Some(value) = look().await {
            return value;
        }
        assert!(
            Instant::now() < deadline,
            "waited {patience:?} in vain for this: {what}"
        );
        sleep(POLL).await;
    }
}

/// Waits until `look` says yes.
///
/// # Panics
/// After `patience`, of a usual machine, saying what was waited for.
pub async fn eventually(what: &str, patience: Duration, mut look: impl AsyncFnMut() -> bool) {
    eventually_some(what, patience, async || look().await.then_some(())).await;
}
