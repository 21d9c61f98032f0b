//! An image in the store, and the guard that keeps it.

use std::path::{Path, PathBuf};

use crate::digest::{ImageId, LayerId};
use crate::image_config::ImageConfig;
use crate::index::ImageRecord;
use crate::layers::LayerFacts;
use crate::name::ImageName;
use crate::store::{ImageStore, layer_root};

/// An image in the store.
#[derive(Clone, Debug)]
pub struct Image {
    pub id: ImageId,
    pub config: ImageConfig,
    /// As the image's author wrote it: `amd64`, `arm64`.
    pub architecture: String,
    /// The lowest first.
    pub layers: Vec<ImageLayer>,
}

/// A layer of an image.
#[derive(Clone, Debug)]
pub struct ImageLayer {
    pub id: LayerId,
    /// The unpacked tree, in overlayfs's format.
    pub root: PathBuf,
    /// Bytes of its files; `None` if the layer is missing from the store.
    pub file_bytes: Option<u64>,
    /// Device nodes of its archive, which were not unpacked.
    pub skipped_devices: u64,
    /// Entries whose owner or group no session can have; sessions see nobody there.
    pub owners_out_of_range: u64,
    /// Whether it hides all layers below.
    pub hides_all_below: bool,
}

/// An image's entry in a list.
#[derive(Clone, Debug)]
pub struct ImageSummary {
    pub image: Image,
    pub names: Vec<ImageName>,
    /// Bytes of all its files, including layers shared with other images.
    pub file_bytes: u64,
    /// Seconds since 1970.
    pub imported_at_s: u64,
    /// Whether a guard holds it.
    pub in_use: bool,
}

impl Image {
    pub(crate) fn new(id: ImageId, record: &ImageRecord, layers: &Path) -> Self {
        let layer = |layer: &LayerId| {
            let facts = LayerFacts::load(&layers.join(layer.hex()));
            ImageLayer {
                id: *layer,
                root: layer_root(layers, layer),
                file_bytes: facts.as_ref().map(|facts| facts.file_bytes),
                skipped_devices: facts.as_ref().map_or(0, |facts| facts.skipped_devices),
                owners_out_of_range: facts.as_ref().map_or(0, |facts| facts.owners_out_of_range),
                hides_all_below: facts.is_some_and(|facts| facts.hides_all_below),
            }
        };
        Self {
            id,
            config: record.config.clone(),
            architecture: record.architecture.clone(),
            layers: record.layers.iter().map(layer).collect(),
        }
    }

    /// The `lowerdir`s of an overlay of this image, the topmost first. Layers that a higher one hides
    /// completely are left out, since overlayfs does not support opaque marks on a layer's root; so are the
    /// lower places of a layer that is there twice, which overlayfs refuses: the topmost hides them.
    pub fn lower_directories(&self) -> Vec<&Path> {
        let mut directories = Vec::new();
        for layer in self.layers.iter().rev() {
            if !directories.contains(&layer.root.as_path()) {
                directories.push(layer.root.as_path());
            }
            if layer.hides_all_below {
                break;
            }
        }
        directories
    }

    pub(crate) fn missing_layer(&self) -> Option<LayerId> {
        self.layers
            .iter()
            .find(|layer| layer.file_bytes.is_none())
            .map(|layer| layer.id)
    }
}

impl ImageSummary {
    pub(crate) fn new(
        image: Image,
        record: &ImageRecord,
        names: Vec<ImageName>,
        in_use: bool,
    ) -> Self {
        Self {
            file_bytes: image
                .layers
                .iter()
                .filter_map(|layer| layer.file_bytes)
                .sum(),
            image,
            names,
            imported_at_s: record.imported_at_s,
            in_use,
        }
    }
}

/// Keeps an image and its layers while it lives.
#[derive(Debug)]
pub struct ImageGuard {
    image: Image,
    store: ImageStore,
}

impl ImageGuard {
    pub(crate) fn new(image: Image, store: ImageStore) -> Self {
        Self { image, store }
    }

    pub fn image(&self) -> &Image {
        &self.image
    }
}

impl Drop for ImageGuard {
    fn drop(&mut self) {
        self.store.unpin(&self.image.id);
    }
}
