//! OCI image layouts, as directories and as archives.

use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::path::Path;

use oci_spec::image::{Descriptor, ImageIndex, ImageManifest};

use crate::archive::Members;
use crate::beneath::{open_file, read_bounded};
use crate::blobs::{Blobs, check_type, import_manifest, parse, read_verified};
use crate::digest::Digest;
use crate::image::Image;
use crate::import::ImportError;
use crate::name::ImageName;
use crate::store::ImageStore;

pub(crate) const MANIFEST_TYPES: [&str; 2] = [
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
];
pub(crate) const INDEX_TYPES: [&str; 2] = [
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
];

/// Go's name for this machine's architecture.
pub(crate) const HOST_ARCHITECTURE: &str = if cfg!(target_arch = "x86_64") {
    "amd64"
} else if cfg!(target_arch = "aarch64") {
    "arm64"
} else {
    std::env::consts::ARCH
};
const HOST_OS: &str = "linux";

/// Most nested indexes: `docker buildx` writes two.
const MAX_INDEX_DEPTH: usize = 4;

/// Most platforms that an error lists.
const LISTED: usize = 8;

struct Directory(OwnedFd);

impl Blobs for Directory {
    fn open(&self, digest: &Digest) -> io::Result<Option<Box<dyn Read + '_>>> {
        match open_file(&self.0, &Path::new("blobs/sha256").join(digest.hex())) {
            Ok(file) => Ok(Some(Box::new(file))),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }
}

impl Blobs for Members {
    fn open(&self, digest: &Digest) -> io::Result<Option<Box<dyn Read + '_>>> {
        let name = format!("blobs/sha256/{}", digest.hex());
        Ok(Members::open(self, &name).map(|section| Box::new(section) as Box<dyn Read>))
    }
}

pub(crate) fn import_directory(
    store: &ImageStore,
    path: &Path,
    directory: OwnedFd,
    name: &ImageName,
) -> Result<Image, ImportError> {
    let read = |part: &'static str| match open_file(&directory, Path::new(part)) {
        Ok(file) => read_part(store, part, file),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Err(ImportError::NoLayout {
            path: path.to_owned(),
            missing: part,
        }),
        Err(source) => Err(ImportError::ReadPart {
            what: part.to_owned(),
            source,
        }),
    };
    read("oci-layout")?;
    let index = read("index.json")?;
    import_index(store, &Directory(directory), &index, name)
}

pub(crate) fn import_members(
    store: &ImageStore,
    members: &Members,
    name: &ImageName,
) -> Result<Image, ImportError> {
    let what = "index.json";
    let section = members.open(what).ok_or_else(|| ImportError::Missing {
        what: what.to_owned(),
    })?;
    let index = read_part(store, what, section)?;
    import_index(store, members, &index, name)
}

fn read_part(store: &ImageStore, what: &str, source: impl Read) -> Result<Vec<u8>, ImportError> {
    read_bounded(source, store.limits().max_json_bytes).map_err(|source| ImportError::ReadPart {
        what: what.to_owned(),
        source,
    })
}

fn import_index(
    store: &ImageStore,
    blobs: &dyn Blobs,
    index: &[u8],
    name: &ImageName,
) -> Result<Image, ImportError> {
    let mut index: ImageIndex = parse("index.json", index)?;
    for _ in 0..MAX_INDEX_DEPTH {
        let chosen = choose(&index, Some(name))?.clone();
        let media_type = chosen.media_type().to_string();
        if INDEX_TYPES.contains(&media_type.as_str()) {
            let bytes = read_verified(store, blobs, &chosen, "an index")?;
            index = parse("an index", &bytes)?;
            continue;
        }
        check_type("an image in the index", &media_type, &MANIFEST_TYPES)?;
        let bytes = read_verified(store, blobs, &chosen, "the manifest")?;
        let manifest: ImageManifest = parse("the manifest", &bytes)?;
        return import_manifest(store, blobs, &manifest, name);
    }
    Err(ImportError::NestedIndexes {
        limit: MAX_INDEX_DEPTH,
    })
}

/// The one image of an index that can run here; `name` decides if several can.
pub(crate) fn choose<'a>(
    index: &'a ImageIndex,
    name: Option<&ImageName>,
) -> Result<&'a Descriptor, ImportError> {
    if index.manifests().is_empty() {
        return Err(ImportError::Missing {
            what: "any image in the index".to_owned(),
        });
    }
    let fitting: Vec<&Descriptor> = index
        .manifests()
        .iter()
        .filter(|descriptor| fits(descriptor))
        .collect();
    match fitting[..] {
        [] => Err(ImportError::NoPlatform {
            os: HOST_OS,
            architecture: HOST_ARCHITECTURE,
            present: shown(index.manifests().iter().map(platform_name)),
        }),
        [only] => Ok(only),
        _ => fitting
            .iter()
            .copied()
            .find(|descriptor| {
                let reference = reference_name(descriptor);
                name.is_some_and(|name| reference == name.to_string() || reference == name.tag())
            })
            // Variants of one architecture are in order of preference.
            .or_else(|| {
                fitting
                    .iter()
                    .all(|descriptor| reference_name(descriptor).is_empty())
                    .then(|| fitting.first().copied())
                    .flatten()
                    .filter(|first| first.platform().is_some())
            })
            .ok_or_else(|| ImportError::Ambiguous {
                count: fitting.len(),
                present: shown(fitting.iter().map(|one| reference_name(one).to_owned())),
            }),
    }
}

/// An image without a platform is checked when it is unpacked.
fn fits(descriptor: &Descriptor) -> bool {
    descriptor.platform().as_ref().is_none_or(|platform| {
        platform.os().to_string() == HOST_OS
            && platform.architecture().to_string() == HOST_ARCHITECTURE
    })
}

fn reference_name(descriptor: &Descriptor) -> &str {
    descriptor
        .annotations()
        .as_ref()
        .and_then(|annotations| annotations.get("org.opencontainers.image.ref.name"))
        .map_or("", String::as_str)
}

fn platform_name(descriptor: &Descriptor) -> String {
    match descriptor.platform() {
        Some(platform) => format!("{}/{}", platform.os(), platform.architecture()),
        None => "one without a platform".to_owned(),
    }
}

fn shown(names: impl Iterator<Item = String>) -> String {
    let names: Vec<String> = names.take(LISTED).collect();
    names.join(", ").chars().take(300).collect()
}
