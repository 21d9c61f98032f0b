//! Why a call to etcd failed. Failures are distinguished by whether the call may have had an
//! effect.

use tonic::{Code, ConnectError, Status};

/// Part of etcd's error when the requested revision is compacted.
const COMPACTED: &str = "required revision has been compacted";

/// Why a call has no answer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum CallError {
    /// It did not reach etcd.
    #[error("{reason}")]
    NotSent { reason: String },
    /// etcd refused it; it has no effect.
    #[error("etcd refuses: {reason}")]
    Refused { reason: String },
    /// It may have taken effect, or may still do so.
    #[error("{reason}")]
    Unknown { reason: String },
    /// It was not answered in time; it may have taken effect, or may still do so.
    #[error("{reason}")]
    Late { reason: String },
    /// The answer was larger than the limit.
    #[error("{reason}")]
    TooLong { reason: String },
    /// The answer is from another or an older etcd.
    #[error("{reason}")]
    Stale { reason: String },
}

impl CallError {
    /// Certain are only that no connection was made, or that etcd rejected the call; after any
    /// other failure it may have taken effect. A full store is not certain: etcd may execute a
    /// transaction that finds it full.
    pub(super) fn of(name: &str, status: &Status) -> Self {
        if is_from_connecting(status) {
            let why = explained(status);
            let reason = format!("{name} cannot be connected to: {why}");
            return Self::NotSent { reason };
        }
        if status.code() == Code::OutOfRange && status.message().contains("decoded message length")
        {
            let reason = format!(
                "the answer of {name} is larger than the limit: {}",
                status.message()
            );
            return Self::TooLong { reason };
        }
        // The store is not full, but the message is too large: etcd has not processed it.
        let too_large = status.code() == Code::ResourceExhausted
            && status.message().contains("larger than max");
        let refused = match status.code() {
            Code::ResourceExhausted => too_large,
            // For every call that returns this, etcd has done nothing.
            Code::OutOfRange => status.message().contains(COMPACTED),
            Code::InvalidArgument
            | Code::Unauthenticated
            | Code::PermissionDenied
            | Code::Unimplemented => true,
            Code::Ok
            | Code::Cancelled
            | Code::Unknown
            | Code::DeadlineExceeded
            | Code::NotFound
            | Code::AlreadyExists
            | Code::FailedPrecondition
            | Code::Aborted
            | Code::Internal
            | Code::Unavailable
            | Code::DataLoss => false,
        };
        if refused {
            let reason = status.message().to_owned();
            return Self::Refused { reason };
        }
        let reason = format!("{name} failed: {}", explained(status));
        Self::Unknown { reason }
    }

    /// Whether the call has no effect and never will.
    pub(super) fn is_without_effect(&self) -> bool {
        match self {
            Self::NotSent { .. } | Self::Refused { .. } => true,
            Self::Unknown { .. }
            | Self::Late { .. }
            | Self::TooLong { .. }
            | Self::Stale { .. } => false,
        }
    }

    /// Whether the revision of the call was compacted.
    pub(super) fn is_about_compaction(&self) -> bool {
        matches!(self, Self::Refused { reason } if reason.contains(COMPACTED))
    }

    /// Whether a smaller request may succeed.
    pub(super) fn is_about_size(&self) -> bool {
        match self {
            Self::Late { .. } | Self::TooLong { .. } => true,
            Self::Refused { reason } => reason.contains("too many operations"),
            Self::NotSent { .. } | Self::Unknown { .. } | Self::Stale { .. } => false,
        }
    }
}

/// Returns the cause and, for certificates, what to do. With TLS 1.3 a client learns only after
/// connecting that its certificate was refused, and may see only that the connection ended.
fn explained(status: &Status) -> String {
    let mut text = status.message().to_owned();
    let mut cause = std::error::Error::source(status);
    while let Some(error) = cause {
        let more = error.to_string();
        if !text.contains(&more) {
            text = format!("{text}: {more}");
        }
        cause = error.source();
    }
    if text.contains("invalid peer certificate") {
        text.push_str(
            "; `registry.ca_file` must be the CA of etcd's certificate, which must name the host \
             of `registry.endpoints`",
        );
    } else if text.contains("received fatal alert") {
        text.push_str(
            "; etcd does not take this node's certificate: see `registry.cert_file` and \
             `registry.key_file`",
        );
    }
    text
}

fn is_from_connecting(status: &Status) -> bool {
    let mut cause = std::error::Error::source(status);
    while let Some(error) = cause {
        if error.is::<ConnectError>() {
            return true;
        }
        cause = error.source();
    }
    false
}

/// A token that etcd does not know or has dropped, or one from before users were changed.
pub(super) fn is_about_sign_in(reason: &str) -> bool {
    [
        "invalid auth token",
        "revision of auth store is old",
        "user name is empty",
    ]
    .iter()
    .any(|known| reason.contains(known))
}
