//! Whether dockerd has an image, asked before anything is begun.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use super::Shared;
use super::daemon::Lane;
use super::failure::no_image;
use crate::RuntimeError;

/// Longest wait for the answer: whoever asks goes on without it.
const PATIENCE: Duration = Duration::from_secs(2);
/// For so long one that was there is taken to be there still. Where it has gone meanwhile, its
/// container's creation says so.
const KEPT: Duration = Duration::from_secs(10);
/// Names that are kept at a time.
const MAX_KEPT: usize = 256;

/// Names of images that were there a moment ago, and until when that counts.
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
    /// That dockerd says by itself that it has no such image; nothing where it says anything else, or
    /// not at once. It pulls none when a container is created, so that what it lacks stays away.
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
                tracing::debug!(image, ?failure, "not known whether Docker has it");
                None
            }
        }
    }
}
