//! Checks whether dockerd has an image, before a container is created.

use std::time::Duration;

use super::Shared;
use super::daemon::Lane;
use super::failure::no_image;
use crate::RuntimeError;

/// Longest wait for the answer. The caller continues without it.
const PATIENCE: Duration = Duration::from_secs(2);

impl Shared {
    /// Returns an error only if dockerd itself reports that it has no such image, and does so at
    /// once. It pulls none when a container is created, so a missing image stays missing.
    pub(super) async fn lacks_image(&self, image: &str) -> Option<RuntimeError> {
        let limit = self.timeouts.inspect.min(PATIENCE);
        let inspected = self.daemon.call(Lane::Calls, limit, |facts| async move {
            facts.client.inspect_image(image).await
        });
        match inspected.await {
            Ok(_) => None,
            Err(failure) if failure.is_no_such_image() => Some(no_image(image)),
            Err(failure) => {
                tracing::debug!(image, ?failure, "cannot look up the image");
                None
            }
        }
    }
}
