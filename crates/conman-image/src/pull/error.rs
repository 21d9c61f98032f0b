//! Errors of a pull.

use std::time::Duration;

use oci_client::errors::{OciDistributionError, OciErrorCode};

use crate::digest::Digest;
use crate::import::ImportError;
use crate::store::StoreError;

/// Why an image was not pulled. Downloaded bytes stay for the next attempt.
#[derive(Debug, thiserror::Error)]
pub enum PullError {
    #[error("{reference:?} is not an image reference")]
    Reference {
        reference: String,
        #[source]
        source: oci_client::ParseError,
    },
    #[error(
        "{reference:?} does not name a registry: add one, as in \
         registry.example.org/team/app:1"
    )]
    NoRegistry { reference: String },
    #[error("{registry} is not among the registries that this node pulls from ({allowed})")]
    NotAllowed { registry: String, allowed: String },
    #[error("cannot set up the registry client")]
    Client(#[source] Box<OciDistributionError>),
    #[error("cannot get {what} of {reference}")]
    Fetch {
        what: String,
        reference: String,
        #[source]
        source: Box<OciDistributionError>,
    },
    #[error("cannot get {what} of {reference}: the connection failed {attempts} times")]
    Interrupted {
        what: String,
        reference: String,
        attempts: u32,
        #[source]
        source: std::io::Error,
    },
    #[error("{reference}: no answer for {what} within {} s", after.as_secs())]
    Timeout {
        what: String,
        reference: String,
        after: Duration,
    },
    #[error("{what} of {reference} has the digest {actual}, but {expected} was expected")]
    DigestMismatch {
        what: String,
        reference: String,
        expected: Digest,
        actual: Digest,
    },
    #[error("{what} of {reference} is longer than the expected {expected} bytes")]
    TooLong {
        what: String,
        reference: String,
        expected: u64,
    },
    #[error("cannot import {reference}")]
    Import {
        reference: String,
        #[source]
        source: ImportError,
    },
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("{limit} pulls are under way or waiting: try again later")]
    Busy { limit: usize },
    #[error("the pull of {reference} failed inside conman")]
    Aborted { reference: String },
}

impl PullError {
    /// Whether the registry reports that it does not have the image.
    pub fn is_absent(&self) -> bool {
        let Self::Fetch { source, .. } = self else {
            return false;
        };
        match &**source {
            OciDistributionError::ImageManifestNotFoundError(_) => true,
            OciDistributionError::ServerError { code, .. } => *code == 404,
            OciDistributionError::RegistryError { envelope, .. } => {
                envelope.errors.iter().any(|error| {
                    matches!(
                        error.code,
                        OciErrorCode::ManifestUnknown
                            | OciErrorCode::NameUnknown
                            | OciErrorCode::BlobUnknown
                            | OciErrorCode::NotFound
                    )
                })
            }
            _ => false,
        }
    }

    /// Whether no connection to the registry can be made, for example because DNS does not know its name.
    pub fn is_unreachable(&self) -> bool {
        let Self::Fetch { source, .. } = self else {
            return false;
        };
        matches!(&**source, OciDistributionError::RequestError(error) if error.is_connect())
    }

    /// Whether the registry refuses access with conman's login.
    pub fn is_denied(&self) -> bool {
        let Self::Fetch { source, .. } = self else {
            return false;
        };
        match &**source {
            OciDistributionError::AuthenticationFailure(_)
            | OciDistributionError::UnauthorizedError { .. } => true,
            OciDistributionError::ServerError { code, .. } => matches!(code, 401 | 403),
            OciDistributionError::RegistryError { envelope, .. } => {
                envelope.errors.iter().any(|error| {
                    matches!(
                        error.code,
                        OciErrorCode::Denied | OciErrorCode::Unauthorized
                    )
                })
            }
            _ => false,
        }
    }
}

/// Whether another attempt may succeed.
pub(super) fn is_passing(error: &OciDistributionError) -> bool {
    match error {
        OciDistributionError::RequestError(_) | OciDistributionError::IoError(_) => true,
        OciDistributionError::ServerError { code, .. } => *code >= 500 || *code == 429,
        _ => false,
    }
}
