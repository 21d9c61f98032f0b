//! Why a call to etcd failed. Failures are distinguished by whether the call may have had an
//! effect.

use tonic::{Code, ConnectError, Status};

/// Part of etcd's error when the requested revision is compacted.
const COMPACTED: &str = "required revision has been compacted";

/// Part of etcd's error when its quota is used up.
const NO_SPACE: &str = "database space exceeded";

/// Why a call has no answer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum CallError {
    /// It did not reach etcd.
    #[error("{reason}")]
    NotSent { reason: String },
    /// etcd refused it; it has no effect.
    #[error("etcd refuses: {reason}")]
    Refused { reason: String },
    /// etcd has no space left. It may have executed the call all the same.
    #[error("etcd has no space left: {reason}")]
    Full { reason: String },
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
    /// other failure it may have taken effect. A full store is not certain: the member that reaches
    /// the quota first executes the transaction and then reports the same error.
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
        let message = status.message();
        if status.code() == Code::ResourceExhausted && message.contains(NO_SPACE) {
            let reason = message.to_owned();
            return Self::Full { reason };
        }
        // The message is too large, or too many wait: etcd has not processed it.
        let unprocessed = ["larger than max", "too many requests"];
        let refused = match status.code() {
            Code::ResourceExhausted => unprocessed.iter().any(|why| message.contains(why)),
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
            Self::Full { .. }
            | Self::Unknown { .. }
            | Self::Late { .. }
            | Self::TooLong { .. }
            | Self::Stale { .. } => false,
        }
    }

    /// Whether etcd refuses: the same request would be refused again at once.
    pub(super) fn is_refusal(&self) -> bool {
        match self {
            Self::Refused { .. } | Self::Full { .. } => true,
            Self::NotSent { .. }
            | Self::Unknown { .. }
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
            Self::NotSent { .. }
            | Self::Full { .. }
            | Self::Unknown { .. }
            | Self::Stale { .. } => false,
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_refusals_of_calls_that_etcd_has_not_executed_are_certain() {
        let of = |code, message: &str| CallError::of("etcd", &Status::new(code, message));
        let full = of(
            Code::ResourceExhausted,
            "etcdserver: mvcc: database space exceeded",
        );
        assert!(!full.is_without_effect() && full.is_refusal(), "{full}");
        let busy = of(Code::ResourceExhausted, "etcdserver: too many requests");
        assert!(busy.is_without_effect() && busy.is_refusal(), "{busy}");
        let changed = of(Code::Unavailable, "etcdserver: leader changed");
        assert!(!changed.is_without_effect() && !changed.is_refusal());
        let credentials = of(Code::Unauthenticated, "etcdserver: invalid auth token");
        assert!(credentials.is_without_effect() && credentials.is_refusal());
    }
}
