//! Why a call to etcd has no answer: every failure told apart by whether the call may have had an
//! effect.

use tonic::{Code, ConnectError, Status};

/// In etcd's answer where what is asked for is compacted away.
const COMPACTED: &str = "required revision has been compacted";

/// Why a call has no answer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum CallError {
    /// It did not reach etcd.
    #[error("{reason}")]
    NotSent { reason: String },
    /// etcd said no, and did nothing.
    #[error("etcd refuses: {reason}")]
    Refused { reason: String },
    /// It may have taken effect, and may still do so.
    #[error("{reason}")]
    Unknown { reason: String },
    /// It was not answered in time, and may have taken effect, or may still do so.
    #[error("{reason}")]
    Late { reason: String },
    /// It was answered with more than is taken.
    #[error("{reason}")]
    TooLong { reason: String },
    /// The answer is not from the etcd of before.
    #[error("{reason}")]
    Stale { reason: String },
}

impl CallError {
    /// By what is certain: that no connection came about, or that etcd looked at the call and did not
    /// take it. All else may have been done. A full store is not among the certain: etcd carries a
    /// transaction out that finds it full.
    pub(super) fn of(name: &str, status: &Status) -> Self {
        if is_from_connecting(status) {
            let why = explained(status);
            let reason = format!("{name} cannot be connected to: {why}");
            return Self::NotSent { reason };
        }
        if status.code() == Code::OutOfRange && status.message().contains("decoded message length")
        {
            let reason = format!(
                "{name} answers with more than is taken: {}",
                status.message()
            );
            return Self::TooLong { reason };
        }
        // Not full, but larger than a message may be: nobody has looked into it.
        let too_large = status.code() == Code::ResourceExhausted
            && status.message().contains("larger than max");
        let refused = match status.code() {
            Code::ResourceExhausted => too_large,
            // Of all that it is said of, etcd has done nothing.
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

    /// Whether it certainly has and will have no effect.
    pub(super) fn is_without_effect(&self) -> bool {
        match self {
            Self::NotSent { .. } | Self::Refused { .. } => true,
            Self::Unknown { .. }
            | Self::Late { .. }
            | Self::TooLong { .. }
            | Self::Stale { .. } => false,
        }
    }

    /// Whether the revision that it is about was compacted away.
    pub(super) fn is_about_compaction(&self) -> bool {
        matches!(self, Self::Refused { reason } if reason.contains(COMPACTED))
    }

    /// Whether less may be had at a time.
    pub(super) fn is_about_size(&self) -> bool {
        match self {
            Self::Late { .. } | Self::TooLong { .. } => true,
            Self::Refused { reason } => reason.contains("too many operations"),
            Self::NotSent { .. } | Self::Unknown { .. } | Self::Stale { .. } => false,
        }
    }
}

/// What went wrong, and what to do where it is about certificates. With TLS 1.3 a client hears only
/// after it has connected that its certificate is not taken, if it hears more of it at all than the
/// end of the connection.
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
            "; `registry.ca_file` must be whoever signed etcd's certificate, which must name the \
             host of `registry.endpoints`",
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

/// A token that etcd does not know (any more), or one from before users were changed.
pub(super) fn is_about_sign_in(reason: &str) -> bool {
    [
        "invalid auth token",
        "revision of auth store is old",
        "user name is empty",
    ]
    .iter()
    .any(|known| reason.contains(known))
}
