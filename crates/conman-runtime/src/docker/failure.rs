//! Failures of calls to dockerd, and their meaning for the caller.

use std::io::ErrorKind;
use std::path::Path;
use std::time::Duration;

use bollard::errors::Error as BollardError;
use conman_proto::RuntimeKind;

use crate::{ContainerKey, RuntimeError};

const NOT_FOUND: u16 = 404;
const CONFLICT: u16 = 409;

/// Fragments of answers with status 500 which mean that dockerd lost its connection to containerd
/// during a call. The request may still take effect.
const LOST_TOUCH: [&str; 8] = [
    "context deadline exceeded",
    "context canceled",
    "transport is closing",
    "ttrpc: closed",
    "connection error",
    "connection refused",
    "unexpected EOF",
    "error reading from server",
];

/// Most characters of a daemon's message that an error quotes: some contain whole configurations.
const QUOTED_CHARS: usize = 600;

/// Why a call to the daemon failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Failure {
    /// The daemon was not reached; nothing was requested.
    Unreachable {
        reason: String,
    },
    /// The connection ended before the answer; the request may have taken effect.
    Unavailable {
        reason: String,
    },
    TimedOut {
        after: Duration,
    },
    /// The daemon answered with an error.
    Answered {
        status: u16,
        message: String,
    },
}

impl Failure {
    /// Classifies an error of the client library; `socket` is for the remedy.
    pub(super) fn of(error: BollardError, socket: &Path) -> Self {
        match error {
            BollardError::DockerResponseServerError {
                status_code,
                message,
            } => Self::Answered {
                status: status_code,
                message,
            },
            BollardError::SocketNotFoundError(_) => Self::unreachable(ErrorKind::NotFound, socket),
            // These two have no message, so their inner error is used.
            BollardError::IOError { err } => Self::unavailable(&err, socket),
            BollardError::HyperResponseError { err } => Self::unavailable(&err, socket),
            other => Self::unavailable(&other, socket),
        }
    }

    /// There is no connection, or it broke.
    pub(super) fn unavailable(error: &(dyn std::error::Error + 'static), socket: &Path) -> Self {
        let mut reasons = vec![error.to_string()];
        let mut cause = Some(error);
        while let Some(error) = cause {
            if let Some(io) = error.downcast_ref::<std::io::Error>() {
                let kind = io.kind();
                if matches!(
                    kind,
                    ErrorKind::NotFound
                        | ErrorKind::ConnectionRefused
                        | ErrorKind::PermissionDenied
                ) {
                    return Self::unreachable(kind, socket);
                }
            }
            let text = error.to_string();
            if !reasons.iter().any(|known| known.contains(&text)) {
                reasons.push(text);
            }
            cause = error.source();
        }
        Self::Unavailable {
            reason: reasons.join(": "),
        }
    }

    fn unreachable(kind: ErrorKind, socket: &Path) -> Self {
        let socket = socket.display();
        let reason = match kind {
            ErrorKind::NotFound => format!(
                "there is no socket {socket}; install and start Docker, or set its socket's path"
            ),
            ErrorKind::PermissionDenied => format!(
                "no permission to use {socket}; run conman as root or in the socket's group"
            ),
            _ => format!("nothing listens on {socket}; start Docker (`systemctl start docker`)"),
        };
        Self::Unreachable { reason }
    }

    pub(super) fn is_not_found(&self) -> bool {
        matches!(
            self,
            Self::Answered {
                status: NOT_FOUND,
                ..
            }
        )
    }

    /// Whether the daemon supports none of the versions that were negotiated with an earlier one.
    pub(super) fn is_version_mismatch(&self) -> bool {
        matches!(self, Self::Answered { status: 400, message } if message.contains("client version"))
    }

    /// The error of a call about an existing container.
    pub(super) fn about(self, action: &'static str, subject: &str) -> RuntimeError {
        let runtime = RuntimeKind::Docker;
        let subject = subject.to_owned();
        match self {
            Self::Unreachable { reason } | Self::Unavailable { reason } => {
                RuntimeError::Unavailable {
                    runtime,
                    action,
                    reason,
                }
            }
            Self::TimedOut { after } => {
                let after_ms = after.as_millis().try_into().unwrap_or(u64::MAX);
                RuntimeError::TimedOut {
                    runtime,
                    action,
                    subject,
                    after_ms,
                }
            }
            Self::Answered {
                status: NOT_FOUND,
                message,
            } if message.to_ascii_lowercase().contains("no such container") => {
                RuntimeError::NoSuchContainer { subject }
            }
            Self::Answered { message, .. } if names_no_user(&message) => {
                let reason = quote(&message);
                RuntimeError::NoSuchUser { subject, reason }
            }
            Self::Answered { status, message } => {
                let reason = quote(&message);
                let lost_touch =
                    status >= 500 && LOST_TOUCH.iter().any(|words| message.contains(words));
                // 502 to 504 are sent not by dockerd but by a proxy before it.
                if lost_touch || (502..=504).contains(&status) {
                    RuntimeError::Unavailable {
                        runtime,
                        action,
                        reason,
                    }
                } else {
                    RuntimeError::Refused {
                        runtime,
                        action,
                        subject,
                        reason,
                    }
                }
            }
        }
    }

    /// Whether the daemon reports that it has no such image.
    pub(super) fn is_no_such_image(&self) -> bool {
        matches!(self, Self::Answered { status: NOT_FOUND, message }
            if message.to_ascii_lowercase().contains("no such image"))
    }

    /// The error of a container's creation.
    pub(super) fn of_create(self, key: &ContainerKey, image: &str) -> RuntimeError {
        let subject = key.to_string();
        match &self {
            failure if failure.is_no_such_image() => no_image(image),
            Self::Answered {
                status: CONFLICT,
                message,
            } if message.contains("already in use") => RuntimeError::Exists { subject },
            Self::Answered { .. }
            | Self::Unreachable { .. }
            | Self::Unavailable { .. }
            | Self::TimedOut { .. } => self.about("create", &subject),
        }
    }

    /// The error of a container's start.
    pub(super) fn of_start(self, key: &ContainerKey) -> RuntimeError {
        let subject = key.to_string();
        match self {
            Self::Answered { message, .. } if unrunnable_exit_code(&message).is_some() => {
                RuntimeError::NoSuchCommand {
                    command: quoted_program(&message).to_owned(),
                    subject,
                    reason: quote(&message),
                    exit_code: unrunnable_exit_code(&message).unwrap_or(126),
                }
            }
            failure => failure.about("start", &subject),
        }
    }
}

pub(super) fn no_image(image: &str) -> RuntimeError {
    RuntimeError::NoSuchImage {
        image: image.to_owned(),
        remedy: format!(
            "conman never pulls images: run `docker pull {image}`, or `docker load` or \
             `docker build` it on this node"
        ),
    }
}

/// Whether a message says that the image has no such user or group.
pub(super) fn names_no_user(message: &str) -> bool {
    ["unable to find user", "unable to find group"]
        .iter()
        .any(|words| message.contains(words))
}

/// The program that runc's message names.
fn quoted_program(message: &str) -> &str {
    let begun = message.split_once("exec: \"").map(|(_, rest)| rest);
    begun
        .and_then(|rest| rest.split_once('"'))
        .map_or("the program", |(program, _)| program)
}

/// The exit code that shells use for runc's message about a program that it could not execute;
/// `None` for any other message.
pub(super) fn unrunnable_exit_code(message: &str) -> Option<i32> {
    let of_program = |words: &str| message.contains("exec: \"") && message.contains(words);
    if message.contains("executable file not found") || of_program("no such file or directory") {
        Some(127)
    } else if ["permission denied", "is a directory", "exec format error"]
        .into_iter()
        .any(of_program)
    {
        Some(126)
    } else {
        None
    }
}

pub(super) fn quote(message: &str) -> String {
    let message = message.trim();
    match message.char_indices().nth(QUOTED_CHARS) {
        None => message.to_owned(),
        Some((end, _)) => format!("{}…", &message[..end]),
    }
}

#[cfg(test)]
mod tests {
    use conman_proto::Generation;

    use super::*;

    fn key() -> ContainerKey {
        ContainerKey::new(
            "alice".parse().expect("a valid id"),
            Generation::new(7).expect("not zero"),
        )
    }

    fn answered(status: u16, message: &str) -> Failure {
        Failure::Answered {
            status,
            message: message.to_owned(),
        }
    }

    #[test]
    fn a_missing_image_is_told_from_a_missing_container() {
        let image = answered(404, "No such image: nosuch:latest").of_create(&key(), "nosuch");
        assert!(matches!(&image, RuntimeError::NoSuchImage { image, .. } if image == "nosuch"));
        assert!(image.to_string().contains("docker pull nosuch"), "{image}");
        let container = answered(404, "No such container: conman-x").about("start", "alice");
        assert!(
            matches!(container, RuntimeError::NoSuchContainer { .. }),
            "{container}"
        );
        let network = answered(404, "network bridge not found").of_start(&key());
        assert!(matches!(network, RuntimeError::Refused { .. }), "{network}");
    }

    #[test]
    fn only_a_name_in_use_means_that_the_container_exists() {
        let message = "Conflict. The container name \"/conman-x\" is already in use by container";
        assert!(matches!(
            answered(409, message).of_create(&key(), "i"),
            RuntimeError::Exists { .. }
        ));
        assert!(matches!(
            answered(409, "something else").of_create(&key(), "i"),
            RuntimeError::Refused { .. }
        ));
    }

    #[test]
    fn a_start_that_may_still_happen_is_ambiguous_and_a_refused_one_is_not() {
        for message in [
            "failed to start shim: start failed: context deadline exceeded: unknown",
            "connection error: desc = \"transport: error while dialing\"",
            "error reading from server: EOF: unavailable",
        ] {
            assert!(
                answered(500, message).of_start(&key()).is_ambiguous(),
                "{message}"
            );
        }
        let full = "failed to add the host (vetha) <=> sandbox (vethb) pair: exchange full";
        assert!(!answered(500, full).of_start(&key()).is_ambiguous());
        let late = Failure::TimedOut {
            after: Duration::from_secs(30),
        }
        .of_start(&key());
        assert!(matches!(
            late,
            RuntimeError::TimedOut {
                after_ms: 30_000,
                ..
            }
        ));
        assert!(late.is_ambiguous());
    }

    #[test]
    fn what_cannot_be_executed_bears_the_exit_code_of_shells() {
        for (message, expected) in [
            (
                "exec: \"nosuch\": executable file not found in $PATH: unknown",
                Some(127),
            ),
            (
                "exec: \"/no/such\": stat /no/such: no such file or directory",
                Some(127),
            ),
            (
                "exec: \"/etc/passwd\": permission denied: unknown",
                Some(126),
            ),
            (
                "error mounting \"/x\" to rootfs: no such file or directory",
                None,
            ),
        ] {
            assert_eq!(unrunnable_exit_code(message), expected, "{message}");
        }
    }

    #[test]
    fn every_way_of_not_reaching_the_daemon_names_its_remedy() {
        let socket = Path::new("/run/docker.sock");
        for (kind, remedy) in [
            (ErrorKind::NotFound, "install and start"),
            (ErrorKind::ConnectionRefused, "systemctl start docker"),
            (ErrorKind::PermissionDenied, "as root"),
        ] {
            let error = BollardError::from(std::io::Error::from(kind));
            match Failure::of(error, socket) {
                Failure::Unreachable { reason } => {
                    assert!(reason.contains(remedy), "{reason}");
                    assert!(reason.contains("/run/docker.sock"), "{reason}");
                }
                other => panic!("{other:?}"),
            }
        }
    }

    #[test]
    fn long_answers_are_cut_at_a_character() {
        let error = answered(500, &"ä".repeat(5_000)).about("start", "alice");
        assert!(error.to_string().chars().count() < QUOTED_CHARS + 100);
    }
}
