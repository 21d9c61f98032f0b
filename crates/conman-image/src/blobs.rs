//! Blobs by digest, in any form of image, and the import of an image from them.

use std::io::Read;
use std::str::FromStr as _;

use oci_spec::image::{Descriptor, ImageConfiguration, ImageManifest};
use serde::de::DeserializeOwned;

use crate::beneath::read_bounded;
use crate::digest::{Digest, LayerId};
use crate::image::Image;
use crate::image_config::ImageConfig;
use crate::import::ImportError;
use crate::index::ImageRecord;
use crate::limits::Allowance;
use crate::name::ImageName;
use crate::store::ImageStore;

/// A place that holds blobs.
pub(crate) trait Blobs {
    /// The blob, unverified; `None` if it is missing.
    fn open(&self, digest: &Digest) -> Result<Option<Box<dyn Read + '_>>, std::io::Error>;
}

const CONFIG_TYPES: [&str; 2] = [
    "application/vnd.oci.image.config.v1+json",
    "application/vnd.docker.container.image.v1+json",
];

/// Media types of layers. The compression is detected from the bytes.
const LAYER_TYPES: [&str; 9] = [
    "application/vnd.oci.image.layer.v1.tar",
    "application/vnd.oci.image.layer.v1.tar+gzip",
    "application/vnd.oci.image.layer.v1.tar+zstd",
    "application/vnd.oci.image.layer.nondistributable.v1.tar",
    "application/vnd.oci.image.layer.nondistributable.v1.tar+gzip",
    "application/vnd.oci.image.layer.nondistributable.v1.tar+zstd",
    "application/vnd.docker.image.rootfs.diff.tar",
    "application/vnd.docker.image.rootfs.diff.tar.gzip",
    "application/vnd.docker.image.rootfs.diff.tar.zstd",
];

/// A manifest whose parts have been checked against each other.
#[derive(Debug)]
pub(crate) struct Plan {
    pub(crate) id: Digest,
    pub(crate) config: ImageConfig,
    pub(crate) architecture: String,
    /// The lowest first.
    pub(crate) layers: Vec<LayerId>,
}

pub(crate) fn digest_of(descriptor: &Descriptor, what: &str) -> Result<Digest, ImportError> {
    Digest::from_str(descriptor.digest().as_ref()).map_err(|source| ImportError::Digest {
        what: what.to_owned(),
        source,
    })
}

/// The layers' blobs of a manifest, the lowest first, with their sizes. All parts have known types and allowed
/// sizes.
pub(crate) fn layer_blobs(
    manifest: &ImageManifest,
    store: &ImageStore,
) -> Result<Vec<(Digest, u64)>, ImportError> {
    let limits = store.limits();
    let media_type = manifest.config().media_type();
    check_type("the configuration", media_type.as_ref(), &CONFIG_TYPES)?;
    let numbered = manifest.layers().iter().enumerate();
    numbered
        .map(|(index, descriptor)| {
            let what = format!("layer {}", index + 1);
            check_type(&what, descriptor.media_type().as_ref(), &LAYER_TYPES)?;
            if descriptor.size() > limits.max_blob_bytes {
                return Err(ImportError::TooLarge {
                    what,
                    limit: limits.max_blob_bytes,
                });
            }
            Ok((digest_of(descriptor, &what)?, descriptor.size()))
        })
        .collect()
}

/// Reads the configuration of an image whose manifest has `count` layers.
pub(crate) fn plan(config: &[u8], count: usize, store: &ImageStore) -> Result<Plan, ImportError> {
    let limit = store.limits().max_layers;
    if count > limit {
        return Err(ImportError::TooManyLayers { count, limit });
    }
    if count == 0 {
        return Err(ImportError::NoLayers);
    }
    let parsed: ImageConfiguration = parse("the configuration", config)?;
    let layers = diff_ids(&parsed)?;
    if layers.len() != count {
        return Err(ImportError::LayerCount {
            manifest: count,
            config: layers.len(),
        });
    }
    Ok(Plan {
        id: Digest::of(config),
        config: ImageConfig::from_oci(&parsed)?,
        architecture: parsed.architecture().to_string(),
        layers,
    })
}

fn diff_ids(config: &ImageConfiguration) -> Result<Vec<LayerId>, ImportError> {
    let numbered = config.rootfs().diff_ids().iter().enumerate();
    numbered
        .map(|(index, text)| {
            text.parse().map_err(|source| ImportError::Digest {
                what: format!("layer {} in the configuration", index + 1),
                source,
            })
        })
        .collect()
}

/// Imports the image of `manifest`, whose digest has been verified.
pub(crate) fn import_manifest(
    store: &ImageStore,
    blobs: &dyn Blobs,
    manifest: &ImageManifest,
    name: &ImageName,
) -> Result<Image, ImportError> {
    let layers = layer_blobs(manifest, store)?;
    let config = read_verified(store, blobs, manifest.config(), "the configuration")?;
    let plan = plan(&config, layers.len(), store)?;
    carry_out(store, plan, name, |index| {
        open_layer(blobs, &layers[index].0, index)
    })
}

/// Unpacks what the store lacks and names the image. `open` opens the archive of a layer, by its index in the
/// plan.
pub(crate) fn carry_out<R: Read>(
    store: &ImageStore,
    plan: Plan,
    name: &ImageName,
    open: impl Fn(usize) -> Result<R, ImportError>,
) -> Result<Image, ImportError> {
    let mut allowance = Allowance::new(store.limits());
    let count = plan.layers.len();
    let mut leases = Vec::with_capacity(count);
    for (index, layer) in plan.layers.iter().enumerate() {
        let numbered = |error| ImportError::layer(index + 1, count, *layer, error);
        let layers = &store.inner.layers;
        leases.push(layers.ensure(*layer, &mut allowance, || open(index), numbered)?);
    }
    let record = ImageRecord {
        config: plan.config,
        architecture: plan.architecture,
        layers: plan.layers,
        imported_at_s: 0,
    };
    Ok(store.record(name, plan.id, record, &leases)?)
}

/// Opens the blob of the layer with this index.
pub(crate) fn open_layer<'a>(
    blobs: &'a dyn Blobs,
    blob: &Digest,
    index: usize,
) -> Result<Box<dyn Read + 'a>, ImportError> {
    open(blobs, blob, &format!("the blob of layer {}", index + 1))
}

fn open<'a>(
    blobs: &'a dyn Blobs,
    blob: &Digest,
    what: &str,
) -> Result<Box<dyn Read + 'a>, ImportError> {
    match blobs.open(blob) {
        Ok(Some(source)) => Ok(source),
        Ok(None) => Err(ImportError::Missing {
            what: format!("{what} ({blob})"),
        }),
        Err(source) => Err(ImportError::ReadPart {
            what: what.to_owned(),
            source,
        }),
    }
}

/// Reads a small blob whole and verifies its size and digest.
pub(crate) fn read_verified(
    store: &ImageStore,
    blobs: &dyn Blobs,
    descriptor: &Descriptor,
    what: &str,
) -> Result<Vec<u8>, ImportError> {
    let expected = digest_of(descriptor, what)?;
    let limit = store.limits().max_json_bytes;
    if descriptor.size() > limit {
        return Err(ImportError::TooLarge {
            what: what.to_owned(),
            limit,
        });
    }
    let bytes = read_bounded(open(blobs, &expected, what)?, limit).map_err(|source| {
        ImportError::ReadPart {
            what: what.to_owned(),
            source,
        }
    })?;
    verify(what, &bytes, expected, descriptor.size())?;
    Ok(bytes)
}

pub(crate) fn verify(
    what: &str,
    bytes: &[u8],
    expected: Digest,
    size: u64,
) -> Result<(), ImportError> {
    if bytes.len() as u64 != size {
        return Err(ImportError::SizeMismatch {
            what: what.to_owned(),
            expected: size,
            actual: bytes.len() as u64,
        });
    }
    let actual = Digest::of(bytes);
    if actual != expected {
        return Err(ImportError::DigestMismatch {
            what: what.to_owned(),
            expected,
            actual,
        });
    }
    Ok(())
}

pub(crate) fn parse<T: DeserializeOwned>(what: &str, bytes: &[u8]) -> Result<T, ImportError> {
    serde_json::from_slice(bytes).map_err(|source| ImportError::Json {
        what: what.to_owned(),
        source,
    })
}

pub(crate) fn check_type(what: &str, media_type: &str, known: &[&str]) -> Result<(), ImportError> {
    if known.contains(&media_type) {
        return Ok(());
    }
    Err(ImportError::MediaType {
        what: what.to_owned(),
        media_type: media_type.chars().take(100).collect(),
    })
}
