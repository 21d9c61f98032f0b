//! The images of containers. An image is not collected while a container uses it.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use conman_image::{ImageGuard, ImageId, ImageName, ImageStore, LayerLease, StoreError};

use super::base_layer;
use super::failure::refused;
use crate::shared::container_files::host_error;
use crate::{ContainerKey, RuntimeError};

#[derive(Debug)]
pub(super) struct Images {
    store: ImageStore,
    /// The layer below every image, in the store.
    base: Option<PathBuf>,
    held: Mutex<UsedImages>,
}

#[derive(Debug, Default)]
struct UsedImages {
    images: HashMap<ImageId, (ImageGuard, usize)>,
    users: HashMap<ContainerKey, ImageId>,
    /// Layers of containers whose image the store no longer knows.
    layers: HashMap<ContainerKey, Vec<LayerLease>>,
}

fn no_such(text: &str, name: &ImageName) -> RuntimeError {
    RuntimeError::NoSuchImage {
        image: text.to_owned(),
        remedy: format!("import it with `conman image import FILE {name}`"),
    }
}

impl Images {
    /// Blocks.
    pub(super) fn new(store: ImageStore) -> Self {
        Self {
            base: base_layer::ensure(store.directory(), store.first_id()),
            store,
            held: Mutex::default(),
        }
    }

    pub(super) fn store(&self) -> &ImageStore {
        &self.store
    }

    /// The layer below every image, as a path below the store.
    pub(super) fn base(&self) -> Option<&Path> {
        self.base.as_deref()
    }

    /// An error if `text` is a valid name of an image that is missing. Blocks.
    pub(super) fn lack(&self, text: &str) -> Option<RuntimeError> {
        let name: ImageName = text.parse().ok()?;
        match self.store.get(&name) {
            Some(_) => None,
            None => Some(no_such(text, &name)),
        }
    }

    /// The image that `text` names. Blocks.
    pub(super) fn pin(&self, subject: &str, text: &str) -> Result<ImageGuard, RuntimeError> {
        let name: ImageName = text
            .parse()
            .map_err(|error: conman_image::ImageNameError| {
                refused("create", subject, error.to_string())
            })?;
        self.store.pin(&name).map_err(|error| match error {
            StoreError::NoSuchImage { .. } => no_such(text, &name),
            StoreError::Io {
                action,
                path,
                source,
            } => host_error(action, &path, source),
            other => refused("create", subject, other.to_string()),
        })
    }

    /// Keeps the image for as long as the container exists.
    pub(super) fn hold(&self, key: &ContainerKey, guard: ImageGuard) {
        let mut held = self.lock();
        let id = guard.image().id;
        if held.users.insert(key.clone(), id).is_none() {
            held.images.entry(id).or_insert((guard, 0)).1 += 1;
        }
    }

    /// Likewise for a container that an earlier process made of these layers. Blocks.
    pub(super) fn hold_again(&self, key: &ContainerKey, image: &ImageId, layers: &[PathBuf]) {
        match self.store.pin_id(image) {
            Ok(guard) => self.hold(key, guard),
            Err(error) => {
                tracing::warn!(container = %key, %error, "its layers are kept without their image");
                let leases = self.store.hold_layers(layers.iter().map(PathBuf::as_path));
                self.lock().layers.insert(key.clone(), leases);
            }
        }
    }

    /// The signal by which the container's image wants to be stopped.
    pub(super) fn stop_signal(&self, key: &ContainerKey) -> Option<String> {
        let held = self.lock();
        let (guard, _) = held.images.get(held.users.get(key)?)?;
        guard.image().config.stop_signal.clone()
    }

    /// Call it when the container has been removed.
    pub(super) fn release(&self, key: &ContainerKey) {
        let mut held = self.lock();
        held.layers.remove(key);
        let Some(id) = held.users.remove(key) else {
            return;
        };
        if let Some((_, users)) = held.images.get_mut(&id) {
            *users -= 1;
            if *users == 0 {
                held.images.remove(&id);
            }
        }
    }

    /// A panic while the lock is held can at most keep an image for too long.
    fn lock(&self) -> MutexGuard<'_, UsedImages> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use conman_image::ImageLimits;

    use super::*;

    #[test]
    fn what_is_lacking_is_told_before_anything_is_made_and_in_the_same_words() {
        let dir = tempfile::tempdir().expect("a directory");
        let store = ImageStore::open(dir.path(), ImageLimits::default()).expect("a store");
        let images = Images::new(store);
        let missing = images.lack("no-such/image:1").expect("it is lacking");
        let refused = images
            .pin("alice", "no-such/image:1")
            .expect_err("likewise");
        assert_eq!(missing.to_string(), refused.to_string());
        assert!(
            missing.to_string().contains("conman image import"),
            "{missing}"
        );
        // An invalid name is reported by the call that uses it.
        assert!(images.lack("NO NAME").is_none());
    }
}
