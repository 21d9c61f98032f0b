//! Errors for the shim's refusals.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use conman_proto::RuntimeKind;
use conman_shim_protocol::{CallError, LaunchError};
use rustix::io::Errno;

use crate::RuntimeError;
use crate::shim_link::{LinkError, REMEDY_FOR_FULL};

const RUNTIME: RuntimeKind = RuntimeKind::Native;

/// The start of a container, and not of a command in one.
pub(super) const START: &str = "start";

/// Any failure of a call except a missing program.
pub(super) fn call_failed(
    action: &'static str,
    subject: impl ToString,
    error: LinkError,
) -> RuntimeError {
    match error {
        lost @ (LinkError::Unreachable { .. } | LinkError::Lost | LinkError::Unexpected) => {
            RuntimeError::Unavailable {
                runtime: RUNTIME,
                action,
                reason: lost.to_string(),
            }
        }
        LinkError::TimedOut { after } => RuntimeError::TimedOut {
            runtime: RUNTIME,
            action,
            subject: subject.to_string(),
            after_ms: milliseconds(after),
        },
        LinkError::Refused(CallError::Fenced) => RuntimeError::Fenced {
            runtime: RUNTIME,
            action,
            subject: subject.to_string(),
        },
        LinkError::Refused(CallError::Full { what }) => RuntimeError::TooMany {
            subject: subject.to_string(),
            what,
            remedy: REMEDY_FOR_FULL,
        },
        LinkError::Refused(failed @ CallError::Host { .. }) => {
            host_failed(action, subject, failed.to_string())
        }
        LinkError::Refused(refusal) => refused(action, subject, refusal.to_string()),
    }
}

/// A start that failed: of a container, or of a command in one.
pub(super) fn start_failed(
    action: &'static str,
    subject: impl ToString,
    error: LinkError,
) -> RuntimeError {
    let error = match error {
        LinkError::Refused(CallError::Launch { error }) => error,
        LinkError::Refused(CallError::NoSuchContainer { .. } | CallError::Ended { .. }) => {
            return refused(action, subject, "it is not running".to_owned());
        }
        other => return call_failed(action, subject, other),
    };
    match unrunnable(&error).zip(error.exit_code()) {
        Some(((command, reason), exit_code)) => RuntimeError::NoSuchCommand {
            command,
            subject: subject.to_string(),
            reason,
            exit_code,
        },
        None if is_the_hosts(&error) => host_failed(action, subject, error.to_string()),
        None if is_of_the_workdir(&error) && action != START => RuntimeError::NoSuchWorkdir {
            subject: subject.to_string(),
            reason: error.to_string(),
        },
        None => refused(action, subject, error.to_string()),
    }
}

fn is_of_the_workdir(error: &LaunchError) -> bool {
    matches!(error, LaunchError::Step { step, .. } if step.starts_with(LaunchError::WORKDIR_STEP))
}

/// Whether any spec would have failed: the host lacks something, or was too slow.
fn is_the_hosts(error: &LaunchError) -> bool {
    match error {
        LaunchError::TimedOut { .. } | LaunchError::LauncherDied => true,
        LaunchError::Step { errno, .. } => [
            Errno::AGAIN,
            Errno::IO,
            Errno::MFILE,
            Errno::NFILE,
            Errno::NOMEM,
            Errno::NOSPC,
            Errno::DQUOT,
            Errno::ROFS,
            Errno::USERS,
        ]
        .iter()
        .map(|lack| lack.raw_os_error())
        .chain([LaunchError::NO_FILTER_MEMORY])
        .any(|lack| lack == *errno),
        LaunchError::Spec { .. }
        | LaunchError::CommandNotFound { .. }
        | LaunchError::NotExecutable { .. }
        | LaunchError::EndedEarly => false,
    }
}

fn host_failed(action: &'static str, subject: impl ToString, reason: String) -> RuntimeError {
    RuntimeError::Host {
        action,
        path: PathBuf::from(subject.to_string()),
        source: io::Error::other(reason),
    }
}

/// The program that cannot be run, and why.
fn unrunnable(error: &LaunchError) -> Option<(String, String)> {
    let (command, reason) = match error {
        LaunchError::CommandNotFound { command } if command.contains('/') => {
            (command, "no such file or directory")
        }
        LaunchError::CommandNotFound { command } => (command, "not found in PATH"),
        LaunchError::NotExecutable { command, reason } => (command, reason.as_str()),
        _ => return None,
    };
    Some((command.clone(), reason.to_owned()))
}

pub(super) fn refused(
    action: &'static str,
    subject: impl ToString,
    reason: String,
) -> RuntimeError {
    RuntimeError::Refused {
        runtime: RUNTIME,
        action,
        subject: subject.to_string(),
        reason,
    }
}

pub(super) fn milliseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_start_that_fails_for_want_of_something_of_the_hosts_is_no_refusal_of_the_spec() {
        let step = |errno: Errno| LaunchError::Step {
            step: "clone".to_owned(),
            errno: errno.raw_os_error(),
            reason: "no".to_owned(),
        };
        let failed = |error| {
            let refused = LinkError::Refused(CallError::Launch { error });
            start_failed("start", "alice", refused)
        };
        let no_filter_memory = Errno::from_raw_os_error(LaunchError::NO_FILTER_MEMORY);
        for error in [
            step(no_filter_memory),
            step(Errno::NOSPC),
            step(Errno::NOMEM),
            LaunchError::LauncherDied,
        ] {
            let error = failed(error);
            assert!(matches!(error, RuntimeError::Host { .. }), "{error}");
            assert!(!error.is_ambiguous());
        }
        // For example a bind onto a file.
        let error = failed(step(Errno::NOTDIR));
        assert!(matches!(error, RuntimeError::Refused { .. }), "{error}");
    }
}
