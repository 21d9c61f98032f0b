//! Errors for the shim's refusals.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use conman_proto::RuntimeKind;
use conman_shim::{CallError, LaunchError};
use rustix::io::Errno;

use crate::RuntimeError;
use crate::shim_link::{LinkError, REMEDY_FOR_FULL};

const RUNTIME: RuntimeKind = RuntimeKind::Native;

/// Any failure of a call except a missing program.
pub(super) fn call_failed(
    action: &'static str,
    subject: impl ToString,
    error: LinkError,
) -> RuntimeError {
    match error {
        LinkError::Unreachable { reason } => RuntimeError::Unavailable {
            runtime: RUNTIME,
            action,
            reason,
        },
        lost @ (LinkError::Lost | LinkError::Unexpected) => RuntimeError::Unavailable {
            runtime: RUNTIME,
            action,
            reason: lost.to_string(),
        },
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

/// A start that failed.
pub(super) fn start_failed(subject: impl ToString, error: LinkError) -> RuntimeError {
    match error {
        LinkError::Refused(CallError::Launch { error }) => match unrunnable(&error) {
            Some(unrunnable) => RuntimeError::NoSuchCommand {
                command: unrunnable.command,
                subject: subject.to_string(),
                reason: unrunnable.reason,
                exit_code: unrunnable.exit_code,
            },
            None if is_the_hosts(&error) => host_failed("start", subject, error.to_string()),
            None => refused("start", subject, error.to_string()),
        },
        other => call_failed("start", subject, other),
    }
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
        .any(|lack| lack.raw_os_error() == *errno),
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

/// A program that cannot be run, with the exit code that shells use for it.
#[derive(Debug)]
pub(super) struct Unrunnable {
    pub(super) command: String,
    pub(super) reason: String,
    pub(super) exit_code: i32,
}

pub(super) fn unrunnable(error: &LaunchError) -> Option<Unrunnable> {
    let (command, reason) = match error {
        LaunchError::CommandNotFound { command } if command.contains('/') => {
            (command, "no such file or directory".to_owned())
        }
        LaunchError::CommandNotFound { command } => (command, "not found in PATH".to_owned()),
        LaunchError::NotExecutable { command, reason } => (command, reason.clone()),
        _ => return None,
    };
    Some(Unrunnable {
        command: command.clone(),
        reason,
        exit_code: error.exit_code()?,
    })
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
            start_failed("alice", refused)
        };
        for error in [
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
