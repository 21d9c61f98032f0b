//! Checks whether dockerd has an image, before a container is created.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use super::Shared;
use super::daemon::Lane;
use super::failure::no_image;
use crate::RuntimeError;

/// Longest wait for the answer. The caller continues without it.
const PATIENCE: Duration = Duration::from_secs(2);
/// How long a present image is assumed to stay. If it is removed meanwhile, the creation of the
/// container fails with that error.
const KEPT: Duration = Duration::from_secs(10);
/// Most names that are cached at a time.
const MAX_KEPT: usize = 256;

/// Names of images that were present a moment ago, and until when that is assumed.
#[derive(Debug, Default)]
pub(super) struct Present(Mutex<HashMap<String, Instant>>);

impl Present {
    /// Each change is one operation on the map.
    fn lock(&self) -> MutexGuard<'_, HashMap<String, Instant>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn has(&self, image: &str, now: Instant) -> bool {
        self.lock().get(image).is_some_and(|until| now < *until)
    }

    fn add(&self, image: &str, now: Instant) {
        let mut kept = self.lock();
        if kept.len() >= MAX_KEPT {
            kept.retain(|_, until| now < *until);
        }
        if kept.len() < MAX_KEPT {
            kept.insert(image.to_owned(), now + KEPT);
        }
    }

    pub(super) fn forget(&self, image: &str) {
        self.lock().remove(image);
    }
}

impl Shared {
    /// Returns an error only if dockerd itself reports that it has no such image, and does so at
    /// once. It pulls none when a container is created, so a missing image stays missing.
    pub(super) async fn lacks_image(&self, image: &str) -> Option<RuntimeError> {
        if self.present.has(image, Instant::now()) {
            return None;
        }
        let limit = self.timeouts.inspect.min(PATIENCE);
        let inspected = self.daemon.call(Lane::Calls, limit, |facts| async move {
            facts.client.inspect_image(image).await
        });
        match inspected.await {
            Ok(_) => {
                self.present.add(image, Instant::now());
                None
            }
            Err(failure) if failure.is_no_such_image() => Some(no_image(image)),
            Err(failure) => {
                tracing::debug!(image, ?failure, "cannot look up the image");
                None
            }
        }
    }
}
