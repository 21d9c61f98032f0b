//! `images.json`: names, and the images that they stand for.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::beneath::read_bounded;
use crate::digest::{ImageId, LayerId};
use crate::image_config::ImageConfig;
use crate::name::ImageName;
use crate::records::replace;

pub(crate) const INDEX_FILE: &str = "images.json";

/// The version of all formats of conman.
const VERSION: u32 = 2;

/// Most bytes of an index: some 10,000 images with ordinary configurations.
const MAX_INDEX_BYTES: u64 = 256 << 20;

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Index {
    version: u32,
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

#[derive(Deserialize)]
struct Versioned {
    version: u32,
}

impl Default for Index {
    fn default() -> Self {
        Self {
            version: VERSION,
            names: BTreeMap::new(),
            images: BTreeMap::new(),
        }
    }
}

impl Index {
    /// A missing file is an empty index. For a damaged one, [`is_damage`] of the error is true; for
    /// another version's it is false, so that the file is left alone.
    ///
    /// [`is_damage`]: crate::records::is_damage
    pub(crate) fn load(directory: &Path) -> io::Result<Self> {
        let file = match File::open(directory.join(INDEX_FILE)) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Self::default()),
            Err(error) => return Err(error),
        };
        let json = read_bounded(file, MAX_INDEX_BYTES)?;
        // First and separately: another version may have other fields.
        let Versioned { version } = serde_json::from_slice(&json)?;
        if version != VERSION {
            return Err(io::Error::new(
                io::ErrorKind::Unsupported,
                format!(
                    "it has format {version}, and this conman uses format {VERSION}: run the conman \
                     that wrote it"
                ),
            ));
        }
        let index: Self = serde_json::from_slice(&json)?;
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

    /// Replaces the file atomically. The draft is in `scratch`.
    pub(crate) fn store(&self, directory: &Path, scratch: &Path) -> io::Result<()> {
        let json = serde_json::to_vec_pretty(self)?;
        if json.len() as u64 > MAX_INDEX_BYTES {
            // Otherwise the next start could not read it.
            return Err(io::Error::new(
                io::ErrorKind::FileTooLarge,
                format!("the index is longer than {MAX_INDEX_BYTES} bytes: remove images first"),
            ));
        }
        replace(&directory.join(INDEX_FILE), &json, scratch)?;
        File::open(directory)?.sync_all()
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
