//! `images.json`: names, and the images that they stand for.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::Path;

use conman_linux::StateFile;
use serde::{Deserialize, Serialize};

use crate::digest::{ImageId, LayerId};
use crate::image_config::ImageConfig;
use crate::name::ImageName;

pub(crate) const INDEX_FILE: &str = "images.json";

/// Most bytes of an index: some 10,000 images with ordinary configurations.
const MAX_INDEX_BYTES: u64 = 256 << 20;

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Index {
    pub(crate) names: BTreeMap<ImageName, ImageId>,
    pub(crate) images: BTreeMap<ImageId, ImageRecord>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct ImageRecord {
    pub(crate) config: ImageConfig,
    pub(crate) architecture: String,
    /// The lowest first.
    pub(crate) layers: Vec<LayerId>,
    /// Seconds since 1970.
    pub(crate) imported_at_s: u64,
}

impl Index {
    /// A missing file is an empty index. For a damaged one, [`is_damage`] of the error is true; for
    /// another version's it is false, so that the file is left alone.
    ///
    /// [`is_damage`]: crate::records::is_damage
    pub(crate) fn load(directory: &Path) -> io::Result<Self> {
        let index: Self = Self::file(directory).read()?.unwrap_or_default();
        let invalid = |text: String| Err(io::Error::new(io::ErrorKind::InvalidData, text));
        if let Some((name, _)) = index
            .names
            .iter()
            .find(|(_, image)| !index.images.contains_key(image))
        {
            return invalid(format!("{name} stands for an image that is not listed"));
        }
        Ok(index)
    }

    /// Replaces the file durably, and completely or not at all.
    pub(crate) fn store(&self, directory: &Path) -> io::Result<()> {
        Self::file(directory).write(self)
    }

    fn file(directory: &Path) -> StateFile {
        StateFile::with_limit(directory.join(INDEX_FILE), MAX_INDEX_BYTES)
    }

    pub(crate) fn names_of(&self, image: &ImageId) -> Vec<ImageName> {
        self.names
            .iter()
            .filter(|(_, named)| *named == image)
            .map(|(name, _)| name.clone())
            .collect()
    }

    /// Drops images without a name that `kept` does not hold; returns them.
    pub(crate) fn forget_unnamed(&mut self, kept: &BTreeSet<ImageId>) -> Vec<ImageId> {
        let named: BTreeSet<ImageId> = self.names.values().copied().collect();
        let gone: Vec<ImageId> = self
            .images
            .keys()
            .filter(|image| !named.contains(image) && !kept.contains(image))
            .copied()
            .collect();
        for image in &gone {
            self.images.remove(image);
        }
        gone
    }
}
