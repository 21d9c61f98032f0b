//! Imports images from files.

use std::fs::File;
use std::io::{self, Read, Seek as _, SeekFrom};
use std::path::{Path, PathBuf};

use crate::archive::{Kind, classify, keep};
use crate::digest::{Digest, DigestError};
use crate::image::Image;
use crate::image_config::{ConfigError, ImageConfig};
use crate::index::ImageRecord;
use crate::layers::LayerError;
use crate::limits::Allowance;
use crate::name::ImageName;
use crate::store::{ImageStore, StoreError};
use crate::unpack::UnpackError;
use crate::{docker_save, oci_layout};

/// Why an image was not imported. Nothing of it is left in the store, except possibly whole
/// layers that the next collection removes.
#[derive(Debug, thiserror::Error)]
pub enum ImportError {
    #[error("cannot open {}", path.display())]
    Open {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("cannot read the archive")]
    Read(#[source] io::Error),
    #[error("cannot store the archive")]
    Spool(#[source] io::Error),
    #[error("the archive is empty")]
    Empty,
    #[error("this is no archive: send a tar archive, plain or with gzip or zstd")]
    NoArchive,
    #[error(
        "the archive is in {format} format: pack it as a tar archive, plain or with gzip or zstd"
    )]
    ForeignFormat { format: &'static str },
    #[error("the directory {} is no OCI image layout: it has no {missing}", path.display())]
    NoLayout {
        path: PathBuf,
        missing: &'static str,
    },
    #[error(transparent)]
    Archive(Box<UnpackError>),
    #[error("layer {number} of {count} ({layer})")]
    Layer {
        number: usize,
        count: usize,
        layer: Digest,
        #[source]
        source: Box<UnpackError>,
    },
    #[error("{what} is missing from the image")]
    Missing { what: String },
    #[error("{what} has the unknown media type {media_type:?}")]
    MediaType { what: String, media_type: String },
    #[error("{what} is larger than {limit} bytes")]
    TooLarge { what: String, limit: u64 },
    #[error("cannot read {what}")]
    ReadPart {
        what: String,
        #[source]
        source: io::Error,
    },
    #[error("{what} is malformed")]
    Json {
        what: String,
        #[source]
        source: serde_json::Error,
    },
    #[error("{what} has no usable digest")]
    Digest {
        what: String,
        #[source]
        source: DigestError,
    },
    #[error("{what} has the digest {actual}, but {expected} was expected")]
    DigestMismatch {
        what: String,
        expected: Digest,
        actual: Digest,
    },
    #[error("{what} has {actual} bytes, but {expected} were expected")]
    SizeMismatch {
        what: String,
        expected: u64,
        actual: u64,
    },
    #[error("the manifest lists {manifest} layers and the configuration {config}")]
    LayerCount { manifest: usize, config: usize },
    #[error("the image has {count} layers, and {limit} are allowed")]
    TooManyLayers { count: usize, limit: usize },
    #[error("the image has no layers")]
    NoLayers,
    #[error("the index has no image for {os}/{architecture}; it has {present}")]
    NoPlatform {
        os: &'static str,
        architecture: &'static str,
        present: String,
    },
    #[error("it contains {count} images ({present}): pack only the one to import")]
    Ambiguous { count: usize, present: String },
    #[error("indexes are nested deeper than {limit}")]
    NestedIndexes { limit: usize },
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl ImportError {
    pub(crate) fn layer(number: usize, count: usize, layer: Digest, error: LayerError) -> Self {
        match error {
            LayerError::Unpack(source) => Self::Layer {
                number,
                count,
                layer,
                source: Box::new(source),
            },
            LayerError::Store(error) => Self::Store(error),
        }
    }
}

impl ImageStore {
    /// Imports `path` under `name`: an OCI image layout (a directory or an archive), an archive by
    /// `docker save`, or an archive of a root file system, in plain, gzip or zstd form. The kind is
    /// detected from the content. Blocks for as long as unpacking takes.
    pub fn import(&self, path: &Path, name: &ImageName) -> Result<Image, ImportError> {
        let opened = |source| ImportError::Open {
            path: path.to_owned(),
            source,
        };
        // Without it, opening a FIFO would block.
        let file = rustix::fs::open(
            path,
            rustix::fs::OFlags::RDONLY | rustix::fs::OFlags::NONBLOCK | rustix::fs::OFlags::CLOEXEC,
            rustix::fs::Mode::empty(),
        )
        .map_err(|errno| opened(errno.into()))?;
        let file = File::from(file);
        let kind = file.metadata().map_err(opened)?.file_type();
        if kind.is_dir() {
            return oci_layout::import_directory(self, path, file.into(), name);
        }
        if !kind.is_file() {
            return Err(opened(io::Error::new(
                io::ErrorKind::InvalidInput,
                "neither a file nor a directory",
            )));
        }
        self.import_file(file, name)
    }

    /// Like [`ImageStore::import`] for an archive that arrives as a stream, such as an upload. It is
    /// stored in the store's file system while it is imported.
    pub fn import_stream(&self, source: impl Read, name: &ImageName) -> Result<Image, ImportError> {
        let file = keep(source, &self.scratch(), self.limits())?;
        self.import_file(file, name)
    }

    fn import_file(&self, mut file: File, name: &ImageName) -> Result<Image, ImportError> {
        match classify(&file, &self.scratch(), self.limits())? {
            Kind::OciLayout(members) => oci_layout::import_members(self, &members, name),
            Kind::DockerSave(members) => docker_save::import(self, &members, name),
            Kind::RootFileSystem => {
                file.seek(SeekFrom::Start(0)).map_err(ImportError::Read)?;
                self.import_root(file, name)
            }
        }
    }

    fn import_root(&self, source: impl Read, name: &ImageName) -> Result<Image, ImportError> {
        let mut allowance = Allowance::new(self.limits());
        let lease = self
            .inner
            .layers
            .add(source, &mut allowance)
            .map_err(|error| match error {
                LayerError::Unpack(error) => ImportError::Archive(Box::new(error)),
                LayerError::Store(error) => ImportError::Store(error),
            })?;
        // There is no configuration to take the identity from: the layer's is used.
        let id = Digest::of(format!("root file system {}", lease.layer).as_bytes());
        let record = ImageRecord {
            config: ImageConfig::default(),
            architecture: oci_layout::HOST_ARCHITECTURE.to_owned(),
            layers: vec![lease.layer],
            imported_at_s: 0,
        };
        Ok(self.record(name, id, record, &[lease])?)
    }
}
