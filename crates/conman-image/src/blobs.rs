//! Blobs by digest, in any form of image, and the import of an image from them.

use std::io::Read;
use std::str::FromStr as _;

use oci_spec::image::{Descriptor, ImageConfiguration, ImageManifest};
use serde::de::DeserializeOwned;

use crate::beneath::read_bounded;
use crate::digest::Digest;
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
    pub(crate) layers: Vec<PlannedLayer>,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct PlannedLayer {
    pub(crate) layer: Digest,
    pub(crate) blob: Digest,
    pub(crate) size: u64,
}

pub(crate) fn digest_of(descriptor: &Descriptor, what: &str) -> Result<Digest, ImportError> {
    Digest::from_str(descriptor.digest().as_ref()).map_err(|source| ImportError::Digest {
        what: what.to_owned(),
        source,
    })
}

/// The layers' blobs of a manifest, with known types and allowed sizes.
pub(crate) fn layer_blobs(
    manifest: &ImageManifest,
    store: &ImageStore,
) -> Result<Vec<(Digest, u64)>, ImportError> {
    let limits = store.limits();
    check_layer_count(manifest.layers().len(), store)?;
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

pub(crate) fn check_config_type(manifest: &ImageManifest) -> Result<(), ImportError> {
    let media_type = manifest.config().media_type();
    check_type("the configuration", media_type.as_ref(), &CONFIG_TYPES)
}

pub(crate) fn check_layer_count(count: usize, store: &ImageStore) -> Result<(), ImportError> {
    let limit = store.limits().max_layers;
    if count > limit {
        return Err(ImportError::TooManyLayers { count, limit });
    }
    if count == 0 {
        return Err(ImportError::NoLayers);
    }
    Ok(())
}

/// Combines a manifest's layers with the configuration's digests of their unpacked form.
pub(crate) fn plan(config: &[u8], blobs: &[(Digest, u64)]) -> Result<Plan, ImportError> {
    let parsed: ImageConfiguration = parse("the configuration", config)?;
    let layers = diff_ids(&parsed)?;
    if layers.len() != blobs.len() {
        return Err(ImportError::LayerCount {
            manifest: blobs.len(),
            config: layers.len(),
        });
    }
    Ok(Plan {
        id: Digest::of(config),
        config: ImageConfig::from_oci(&parsed)?,
        architecture: parsed.architecture().to_string(),
        layers: layers
            .into_iter()
            .zip(blobs)
            .map(|(layer, (blob, size))| PlannedLayer {
                layer,
                blob: *blob,
                size: *size,
            })
            .collect(),
    })
}

pub(crate) fn diff_ids(config: &ImageConfiguration) -> Result<Vec<Digest>, ImportError> {
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
    check_config_type(manifest)?;
    let layers = layer_blobs(manifest, store)?;
    let config = read_verified(store, blobs, manifest.config(), "the configuration")?;
    let plan = plan(&config, &layers)?;
    carry_out(store, blobs, plan, name)
}

/// Unpacks what the store lacks and names the image.
pub(crate) fn carry_out(
    store: &ImageStore,
    blobs: &dyn Blobs,
    plan: Plan,
    name: &ImageName,
) -> Result<Image, ImportError> {
    let mut allowance = Allowance::new(store.limits());
    let count = plan.layers.len();
    let mut leases = Vec::with_capacity(count);
    for (index, planned) in plan.layers.iter().enumerate() {
        let number = index + 1;
        let what = || format!("the blob of layer {number} ({})", planned.blob);
        let open = || match blobs.open(&planned.blob) {
            Ok(Some(blob)) => Ok(blob),
            Ok(None) => Err(LayerFailure::Import(ImportError::Missing { what: what() })),
            Err(source) => Err(LayerFailure::Import(ImportError::ReadPart {
                what: what(),
                source,
            })),
        };
        let announced = Some((planned.blob, planned.size));
        let lease = store
            .inner
            .layers
            .ensure(planned.layer, announced, &mut allowance, open)
            .map_err(|failure| failure.at(number, count, planned.layer))?;
        leases.push(lease);
    }
    let record = ImageRecord {
        config: plan.config,
        architecture: plan.architecture,
        layers: plan.layers.iter().map(|planned| planned.layer).collect(),
        imported_at_s: 0,
    };
    Ok(store.record(name, plan.id, record, &leases)?)
}

/// A failure on the way to a layer, before its number is known.
pub(crate) enum LayerFailure {
    Layer(crate::layers::LayerError),
    Import(ImportError),
}

impl LayerFailure {
    pub(crate) fn at(self, number: usize, count: usize, layer: Digest) -> ImportError {
        match self {
            Self::Layer(error) => ImportError::layer(number, count, layer, error),
            Self::Import(error) => error,
        }
    }
}

impl From<crate::layers::LayerError> for LayerFailure {
    fn from(error: crate::layers::LayerError) -> Self {
        Self::Layer(error)
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
    let failed = |source| ImportError::ReadPart {
        what: what.to_owned(),
        source,
    };
    let limit = store.limits().max_json_bytes;
    if descriptor.size() > limit {
        return Err(ImportError::TooLarge {
            what: what.to_owned(),
            limit,
        });
    }
    let blob = blobs.open(&expected).map_err(failed)?;
    let blob = blob.ok_or_else(|| ImportError::Missing {
        what: format!("{what} ({expected})"),
    })?;
    let bytes = read_bounded(blob, limit).map_err(failed)?;
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
