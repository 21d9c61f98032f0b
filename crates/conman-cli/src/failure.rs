//! How a command can end, and its error messages.

use std::fmt;
use std::process::ExitCode;

use conman_proto::Problem;

use crate::client::ClientError;

/// The documented exit codes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Exit {
    Done,
    Failed,
    Usage,
    NotFound,
    Refused,
    Unreachable,
    Stuck,
    /// What an executed command returned.
    Command(u8),
}

impl Exit {
    /// conman could not run the command of `exec`; the code is that of `docker exec` and `env`.
    pub(crate) const NOT_RUN: Self = Self::Command(125);

    /// The exit code that the API reports: nonzero codes stay nonzero.
    pub(crate) fn of_command(code: i32) -> Self {
        match u8::try_from(code) {
            Ok(code) => Self::Command(code),
            Err(_) => Self::Command(u8::MAX),
        }
    }

    pub(crate) const fn code(self) -> u8 {
        match self {
            Self::Done => 0,
            Self::Failed => 1,
            Self::Usage => 2,
            Self::NotFound => 3,
            Self::Refused => 4,
            Self::Unreachable => 5,
            Self::Stuck => 6,
            Self::Command(code) => code,
        }
    }
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit.code())
    }
}

/// Why a command failed.
#[derive(Debug)]
pub(crate) enum Failure {
    /// An error to report: what failed, on what, why, and what to do next.
    Reported {
        exit: Exit,
        problem: Box<Problem>,
        next: Option<String>,
    },
    /// The output has no reader any more (`conman ps | head`): not an error.
    OutputClosed,
    /// Everything was reported already.
    Quiet(Exit),
}

impl Failure {
    /// A failure on this side of the API.
    pub(crate) fn new(
        exit: Exit,
        slug: &str,
        title: &'static str,
        detail: impl Into<String>,
    ) -> Self {
        // RFC 9457 has no status for a problem without a response; 0 stands for that.
        let problem = Box::new(Problem::new(slug, title, 0, detail));
        Self::Reported {
            exit,
            problem,
            next: None,
        }
    }

    /// Wrong usage that only shows once the arguments are combined.
    pub(crate) fn usage(detail: impl Into<String>) -> Self {
        Self::new(
            Exit::Usage,
            "usage",
            "The command line is not valid",
            detail,
        )
    }

    /// Adds what to do next.
    pub(crate) fn next(mut self, advice: impl Into<String>) -> Self {
        if let Self::Reported { next, .. } = &mut self {
            *next = Some(advice.into());
        }
        self
    }

    /// Adds the failure's subject, if the detail does not contain it.
    pub(crate) fn about(mut self, subject: &str) -> Self {
        if let Self::Reported { problem, .. } = &mut self
            && !problem.detail.contains(subject)
        {
            problem.detail = format!("{subject}: {}", problem.detail);
        }
        self
    }

    pub(crate) fn exit(&self) -> Exit {
        match self {
            Self::Reported { exit, .. } | Self::Quiet(exit) => *exit,
            Self::OutputClosed => Exit::Done,
        }
    }

    /// What kind of problem it is.
    pub(crate) fn slug(&self) -> Option<&str> {
        match self {
            Self::Reported { problem, .. } => Some(problem.slug()),
            Self::OutputClosed | Self::Quiet(_) => None,
        }
    }

    /// The error's text; empty if everything was reported.
    pub(crate) fn detail(&self) -> &str {
        match self {
            Self::Reported { problem, .. } => &problem.detail,
            Self::OutputClosed | Self::Quiet(_) => "",
        }
    }

    /// The same failure under another exit code.
    pub(crate) fn with_exit(mut self, code: Exit) -> Self {
        match &mut self {
            Self::Reported { exit, .. } | Self::Quiet(exit) => *exit = code,
            Self::OutputClosed => {}
        }
        self
    }
}

impl From<std::io::Error> for Failure {
    /// An error of writing the output.
    fn from(error: std::io::Error) -> Self {
        if error.kind() == std::io::ErrorKind::BrokenPipe {
            Self::OutputClosed
        } else {
            Self::new(
                Exit::Failed,
                "output",
                "The output cannot be written",
                error.to_string(),
            )
        }
    }
}

impl From<ClientError> for Failure {
    fn from(error: ClientError) -> Self {
        let next = error.advice();
        let detail = WithSources(&error).to_string();
        let failure = match error {
            ClientError::Refused(problem) => {
                return Self::Reported {
                    exit: exit_of(&problem),
                    next,
                    problem,
                };
            }
            ClientError::BadUrl { .. }
            | ClientError::TokenFile { .. }
            | ClientError::BadToken { .. } => Self::usage(detail),
            ClientError::NoSocket { .. }
            | ClientError::StaleSocket { .. }
            | ClientError::NotAllowed { .. }
            | ClientError::Connect { .. }
            | ClientError::ConnectTimedOut { .. } => Self::new(
                Exit::Unreachable,
                "daemon-unreachable",
                "conman cannot be reached",
                detail,
            ),
            ClientError::TimedOut { .. } | ClientError::Broken { .. } => Self::new(
                Exit::Unreachable,
                "no-answer",
                "conman did not answer",
                detail,
            ),
            ClientError::NotUnderstood { .. } | ClientError::TooLarge { .. } => Self::new(
                Exit::Failed,
                "answer-not-understood",
                "The answer is not conman's",
                detail,
            ),
        };
        match next {
            Some(advice) => failure.next(advice),
            None => failure,
        }
    }
}

/// The exit code of a problem of the API.
fn exit_of(problem: &Problem) -> Exit {
    match (problem.status, problem.slug()) {
        (_, "session-stuck") => Exit::Stuck,
        (404, _) => Exit::NotFound,
        (400..=499, _) => Exit::Refused,
        (503, _) => Exit::Unreachable,
        _ => Exit::Failed,
    }
}

/// An error and its sources in one line.
pub(crate) struct WithSources<'a>(pub(crate) &'a dyn std::error::Error);

impl fmt::Display for WithSources<'_> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}", self.0)?;
        let mut source = self.0.source();
        while let Some(error) = source {
            write!(formatter, ": {error}")?;
            source = error.source();
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn exit_for(status: u16, slug: &str) -> Exit {
        Failure::from(ClientError::Refused(Box::new(Problem::new(
            slug, "t", status, "d",
        ))))
        .exit()
    }

    #[test]
    fn every_status_has_its_documented_exit_code() {
        assert_eq!(exit_for(404, "no-such-session"), Exit::NotFound);
        assert_eq!(exit_for(422, "bad-spec"), Exit::Refused);
        assert_eq!(exit_for(401, "unauthenticated"), Exit::Refused);
        assert_eq!(exit_for(409, "session-stuck"), Exit::Stuck);
        assert_eq!(exit_for(503, "node-full"), Exit::Unreachable);
        assert_eq!(exit_for(502, "start-failed"), Exit::Failed);
        assert_eq!(exit_for(500, "internal"), Exit::Failed);
    }

    #[test]
    fn a_failed_command_never_looks_like_a_successful_one() {
        assert_eq!(Exit::of_command(0).code(), 0);
        assert_eq!(Exit::of_command(137).code(), 137);
        for code in [256, 512, -1, i32::MAX, i32::MIN] {
            assert_ne!(Exit::of_command(code).code(), 0, "{code}");
        }
    }
}
