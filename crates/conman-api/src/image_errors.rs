//! Maps each error of the image store to a problem. This is the only place.

use std::error::Error;
use std::io;

use conman_image::{ImportError, KeeperError, PullError, StoreError};

use crate::node_errors::chain;
use crate::problem::{ApiError, IntoApiError as _, Kind};

/// The field of the mistake in the request.
const BODY: &str = "body";
const PULL: &str = "pull";

impl From<KeeperError> for ApiError {
    fn from(error: KeeperError) -> Self {
        match &error {
            KeeperError::Busy { .. } => Kind::IMAGES_BUSY.because(chain(&error)),
            KeeperError::Panicked { .. } => Kind::INTERNAL.because(chain(&error)),
            KeeperError::Store(store) => store_kind(store).because(chain(&error)),
            KeeperError::Import(import) => import_problem(import, &error, BODY),
        }
    }
}

/// Why an image was not pulled.
pub(crate) fn pull_problem(error: &PullError) -> ApiError {
    let kind = match error {
        PullError::Reference { .. } | PullError::NoRegistry { .. } => Kind::BAD_BODY,
        PullError::NotAllowed { .. } => Kind::NOT_FROM_THERE,
        PullError::Fetch { .. } if error.is_absent() => Kind::NOT_IN_REGISTRY,
        PullError::Fetch { .. } if error.is_denied() => Kind::REGISTRY_REFUSES,
        PullError::Fetch { .. } if error.is_unreachable() => Kind::REGISTRY_UNREACHABLE,
        PullError::Client(_)
        | PullError::Fetch { .. }
        | PullError::Interrupted { .. }
        | PullError::DigestMismatch { .. }
        | PullError::TooLong { .. } => storage_kind(error).unwrap_or(Kind::REGISTRY_TROUBLE),
        PullError::Timeout { .. } => Kind::REGISTRY_SLOW,
        PullError::Import { source, .. } => return import_problem(source, error, PULL),
        PullError::Store(store) => store_kind(store),
        PullError::Busy { .. } => Kind::IMAGES_BUSY,
        PullError::Aborted { .. } => Kind::INTERNAL,
    };
    if kind.status < 500 {
        kind.in_field(PULL, chain(error))
    } else {
        kind.because(chain(error))
    }
}

/// `whole` is the reported error: `error` with its subject.
fn import_problem(error: &ImportError, whole: &(dyn Error + 'static), field: &str) -> ApiError {
    // A full disk shows wherever something is written.
    if let Some(kind) = storage_kind(error) {
        return kind.because(chain(whole));
    }
    match error {
        ImportError::Read(source) if source.kind() == io::ErrorKind::TimedOut => {
            Kind::BODY_TOO_SLOW.because(source.to_string())
        }
        ImportError::Read(_) => Kind::BAD_REQUEST.because(chain(whole)),
        ImportError::TooLarge { .. } if field == BODY => Kind::BODY_TOO_LARGE.because(chain(whole)),
        ImportError::Open { .. } | ImportError::Spool(_) => Kind::HOST_FAILED.because(chain(whole)),
        ImportError::Store(store) => store_kind(store).because(chain(whole)),
        ImportError::Archive(source) | ImportError::Layer { source, .. }
            if matches!(
                **source,
                conman_image::UnpackError::Read(_) | conman_image::UnpackError::Write { .. }
            ) =>
        {
            Kind::HOST_FAILED.because(chain(whole))
        }
        ImportError::Empty
        | ImportError::NoArchive
        | ImportError::ForeignFormat { .. }
        | ImportError::NoLayout { .. }
        | ImportError::Archive(_)
        | ImportError::Layer { .. }
        | ImportError::Missing { .. }
        | ImportError::MediaType { .. }
        | ImportError::TooLarge { .. }
        | ImportError::ReadPart { .. }
        | ImportError::Json { .. }
        | ImportError::Digest { .. }
        | ImportError::DigestMismatch { .. }
        | ImportError::SizeMismatch { .. }
        | ImportError::LayerCount { .. }
        | ImportError::TooManyLayers { .. }
        | ImportError::NoLayers
        | ImportError::NoPlatform { .. }
        | ImportError::Ambiguous { .. }
        | ImportError::NestedIndexes { .. }
        | ImportError::Config(_) => Kind::BAD_IMAGE.in_field(field, chain(whole)),
    }
}

fn store_kind(error: &StoreError) -> Kind {
    match error {
        StoreError::NoSuchImage { .. } | StoreError::NoSuchId { .. } => Kind::NO_IMAGE,
        StoreError::Io { .. } => storage_kind(error).unwrap_or(Kind::HOST_FAILED),
        StoreError::InUse { .. } | StoreError::MissingLayer { .. } => Kind::HOST_FAILED,
    }
}

/// The kind of an error whose cause is that nothing more can be written.
fn storage_kind(error: &(dyn Error + 'static)) -> Option<Kind> {
    let mut cause = Some(error);
    while let Some(error) = cause {
        if let Some(error) = error.downcast_ref::<io::Error>() {
            match error.kind() {
                io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                    return Some(Kind::STORE_FULL);
                }
                io::ErrorKind::ReadOnlyFilesystem => return Some(Kind::STORE_READ_ONLY),
                _ => {}
            }
        }
        cause = error.source();
    }
    None
}
