//! Containers that are frozen while their disk usage is measured. Commands for them wait until the measurement ends,
//! because the shim refuses to start a command in a frozen container.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::timeout;
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::ContainerKey;

#[derive(Debug, Default)]
pub(super) struct Standing(Mutex<HashMap<ContainerKey, CancellationToken>>);

impl Standing {
    /// It stands still until the guard is dropped.
    pub(super) fn begin(&self, key: &ContainerKey) -> DropGuard {
        let mut all = self.lock();
        all.retain(|_, ended| !ended.is_cancelled());
        let ended = CancellationToken::new();
        all.insert(key.clone(), ended.clone());
        ended.drop_guard()
    }

    /// Waits until it runs again, at most for `patience`.
    pub(super) async fn ended(&self, key: &ContainerKey, patience: Duration) {
        let ended = self.lock().get(key).cloned();
        if let Some(ended) = ended {
            // One that stands longer is refused the command, which says so.
            let _ = timeout(patience, ended.cancelled()).await;
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<ContainerKey, CancellationToken>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use conman_proto::Generation;
    use futures_util::FutureExt as _;

    use super::*;

    const LONG: Duration = Duration::from_secs(3_600);

    #[tokio::test(start_paused = true)]
    async fn a_command_waits_while_its_container_stands_still() {
        let standing = Standing::default();
        let key = |name: &str| {
            let session = name.parse().expect("a session's id");
            ContainerKey::new(session, Generation::new(1).expect("not zero"))
        };
        let (one, other) = (key("one"), key("other"));
        let guard = standing.begin(&one);
        assert!(standing.ended(&other, LONG).now_or_never().is_some());
        let mut waiting = std::pin::pin!(standing.ended(&one, LONG));
        assert!(waiting.as_mut().now_or_never().is_none());
        drop(guard);
        assert!(waiting.now_or_never().is_some());
        assert!(standing.ended(&one, LONG).now_or_never().is_some());
    }
}
