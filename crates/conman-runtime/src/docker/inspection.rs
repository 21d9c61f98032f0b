//! What dockerd knows of one container.

use bollard::models::ContainerInspectResponse;

use super::daemon::Lane;
use super::descriptions::Listed;
use super::{FIRST_EXIT_INTERVAL, LAST_EXIT_INTERVAL, Shared};
use crate::ContainerKey;

impl Shared {
    /// Whether memory ran out in a container that has ended. Its cgroups are gone.
    pub(super) async fn ran_out_of_memory(&self, key: &ContainerKey) -> bool {
        let state = self.inspected(key).await.and_then(|found| found.state);
        state.is_some_and(|state| state.oom_killed == Some(true))
    }

    /// The signal by which the container's image wants to be stopped.
    pub(super) async fn stop_signal(&self, key: &ContainerKey) -> Option<String> {
        self.inspected(key).await?.config?.stop_signal
    }

    async fn inspected(&self, key: &ContainerKey) -> Option<ContainerInspectResponse> {
        let name = self.container_name(key);
        let inspected = self
            .daemon
            .call(Lane::Calls, self.timeouts.inspect, |facts| async move {
                facts.client.inspect_container(&name, None).await
            });
        match inspected.await {
            Ok(container) => Some(container),
            Err(failure) => {
                tracing::debug!(container = %key, ?failure, "cannot inspect the container");
                None
            }
        }
    }

    /// Waits until dockerd has noticed the end, without a bound.
    pub(super) async fn noticed_exit_code(&self, key: &ContainerKey) -> Option<i32> {
        let mut interval = FIRST_EXIT_INTERVAL;
        loop {
            match self.look(key).await {
                Ok(None) => return None,
                Ok(Some(Listed {
                    exit_code: Some(exit_code),
                    ..
                })) => return Some(exit_code),
                Ok(Some(_)) => {}
                Err(failure) => tracing::debug!(container = %key, ?failure, "no exit code yet"),
            }
            tokio::time::sleep(interval).await;
            interval = (interval * 2).min(LAST_EXIT_INTERVAL);
        }
    }
}
