//! A command that prints notices: for whatever no other source here knows.
//!
//! It runs as long as the daemon. A line `preempt [SECONDS] [REASON]` says that the machine is about to stop, `stay`
//! that it is not, `cordon [REASON]` that it may be soon. If the command ends, it is started again.

use std::io;
use std::process::Stdio;
use std::time::Duration;

use futures_util::future::{BoxFuture, FutureExt};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, BufReader};
use tokio::process::{Child, ChildStdout, Command};
use tokio::time::{sleep, timeout};

use super::{FailureBackoff, NoticeSender, NoticeSource, NoticeSourceKind, Setting};
use crate::error::PreemptError;

pub(super) const KIND: NoticeSourceKind = NoticeSourceKind {
    name: "command",
    setting: Setting::Command,
    open,
};

/// Longest line.
const MAX_LINE_BYTES: u64 = 1024;

/// Interval between attempts to pass a line on.
const RETRY_INTERVAL: Duration = Duration::from_millis(500);

/// How long a command may continue after the end of its output.
const EXIT_TIMEOUT: Duration = Duration::from_secs(1);

/// A probe waits as long for the command to end or to print something.
const PROBE: Duration = Duration::from_secs(1);

const SIGNAL: &str = "command";

#[derive(Debug)]
struct Program(Vec<String>);

/// What a line says.
#[derive(Debug, PartialEq, Eq)]
enum Line<'a> {
    Preempt {
        budget: Option<Duration>,
        reason: &'a str,
    },
    Stay,
    Cordon {
        reason: &'a str,
    },
}

impl<'a> Line<'a> {
    fn parse(line: &'a str) -> Option<Self> {
        let (word, rest) = line.trim().split_once(' ').unwrap_or((line.trim(), ""));
        let rest = rest.trim();
        match word {
            "preempt" => {
                let (number, reason) = rest.split_once(' ').unwrap_or((rest, ""));
                Some(match number.parse() {
                    Ok(seconds) => Self::Preempt {
                        budget: Some(Duration::from_secs(seconds)),
                        reason: reason.trim(),
                    },
                    Err(_) => Self::Preempt {
                        budget: None,
                        reason: rest,
                    },
                })
            }
            "stay" if rest.is_empty() => Some(Self::Stay),
            "cordon" => Some(Self::Cordon { reason: rest }),
            _ => None,
        }
    }
}

fn open(setting: &[String]) -> Result<Box<dyn NoticeSource>, String> {
    match setting {
        [program, ..] if program.starts_with('/') => Ok(Box::new(Program(setting.to_vec()))),
        _ => Err("must be a list that begins with the absolute path of a program".to_owned()),
    }
}

type Output = BufReader<ChildStdout>;

impl Program {
    /// Starts it on another thread: the disk that it is on may hang.
    async fn start(&self) -> io::Result<(Child, Output)> {
        let words = self.0.clone();
        let started = tokio::task::spawn_blocking(move || spawn(&words)).await;
        started.map_err(io::Error::other)?
    }

    /// Runs it once, to its end. The error says how it ended.
    async fn run(
        &self,
        notices: &NoticeSender,
        passed_on: &mut String,
        backoff: &mut FailureBackoff,
    ) -> io::Error {
        let (mut child, mut output) = match self.start().await {
            Ok(started) => started,
            Err(error) => return error,
        };
        loop {
            match next_line(&mut output).await {
                // A repeated notice is no new one: an operator may have readmitted in between.
                Ok(Some(line)) if line == *passed_on => {}
                Ok(Some(line)) => {
                    while !pass_on(notices, &line) {
                        sleep(RETRY_INTERVAL).await;
                    }
                    *passed_on = line;
                    backoff.succeeded();
                }
                Ok(None) => break,
                Err(error) => return error,
            }
        }
        match timeout(EXIT_TIMEOUT, child.wait()).await {
            Ok(Ok(status)) => io::Error::other(format!("it ended: {status}")),
            Ok(Err(error)) => error,
            // Dropping it kills it.
            Err(_) => io::Error::other("it closed its standard output"),
        }
    }
}

fn spawn(words: &[String]) -> io::Result<(Child, Output)> {
    let (program, arguments) = words.split_first().ok_or(io::ErrorKind::InvalidInput)?;
    let mut child = Command::new(program)
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()?;
    // The priority of the thread that kills is not for it.
    if let Some(pid) = child.id().and_then(|pid| i32::try_from(pid).ok()) {
        // It has ended already, or had no other priority to begin with.
        let pid = rustix::process::Pid::from_raw(pid);
        let _ = rustix::process::setpriority_process(pid, 0);
    }
    let output = child.stdout.take().ok_or(io::ErrorKind::BrokenPipe)?;
    Ok((child, BufReader::new(output)))
}

/// The next line, cut to [`MAX_LINE_BYTES`].
async fn next_line(output: &mut Output) -> io::Result<Option<String>> {
    let mut line = Vec::new();
    if output
        .take(MAX_LINE_BYTES)
        .read_until(b'\n', &mut line)
        .await?
        == 0
    {
        return Ok(None);
    }
    while !line.ends_with(b"\n") {
        let mut rest = Vec::new();
        if output
            .take(MAX_LINE_BYTES)
            .read_until(b'\n', &mut rest)
            .await?
            == 0
            || rest.ends_with(b"\n")
        {
            break;
        }
    }
    Ok(Some(String::from_utf8_lossy(&line).trim().to_owned()))
}

/// Returns whether it was passed on, or cannot be.
fn pass_on(notices: &NoticeSender, line: &str) -> bool {
    let sent: Result<(), PreemptError> = match Line::parse(line) {
        Some(Line::Preempt { budget, reason }) => {
            let reason = match reason {
                "" => "the notice command says so",
                reason => reason,
            };
            notices.preempt(SIGNAL, reason, budget).map(drop)
        }
        Some(Line::Stay) => notices.withdraw(SIGNAL),
        Some(Line::Cordon { reason }) => notices.cordon(reason),
        None => {
            notices.warn(format!(
                "the notice command printed {:?}, which is no `preempt [SECONDS] [REASON]`, `stay` or `cordon \
                 [REASON]`",
                super::cut(line)
            ));
            Ok(())
        }
    };
    notices.passed(line, sent)
}

impl NoticeSource for Program {
    fn watch(self: Box<Self>, notices: NoticeSender) -> BoxFuture<'static, ()> {
        let watch = async move {
            let mut passed_on = String::new();
            let mut backoff = FailureBackoff::default();
            loop {
                let ended = self.run(&notices, &mut passed_on, &mut backoff).await;
                let what = format!("the notice command {} does not run", self.0[0]);
                sleep(backoff.failed(&notices, &what, &ended)).await;
            }
        };
        watch.boxed()
    }

    fn probe(self: Box<Self>) -> BoxFuture<'static, Result<String, String>> {
        let probe = async move {
            let started = self.start().await;
            let (_child, mut output) = started.map_err(|error| error.to_string())?;
            match timeout(PROBE, next_line(&mut output)).await {
                Ok(Ok(Some(line))) if Line::parse(&line).is_some() => {
                    Ok(format!("prints {line:?}"))
                }
                Ok(Ok(Some(line))) => Err(format!(
                    "prints {:?}, which is no notice",
                    super::cut(&line)
                )),
                Ok(Ok(None)) => Err("it ends at once".to_owned()),
                Ok(Err(error)) => Err(error.to_string()),
                Err(_) => Ok("no notice: it runs and has printed nothing".to_owned()),
            }
        };
        probe.boxed()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_say_what_is_to_come_or_nothing() {
        let preempt = |seconds: Option<u64>, reason| {
            let budget = seconds.map(Duration::from_secs);
            Some(Line::Preempt { budget, reason })
        };
        for (line, meaning) in [
            ("preempt", preempt(None, "")),
            ("preempt 30", preempt(Some(30), "")),
            (
                "preempt 30 price too low ",
                preempt(Some(30), "price too low"),
            ),
            ("preempt price too low", preempt(None, "price too low")),
            ("stay", Some(Line::Stay)),
            ("stay here", None),
            ("cordon soon", Some(Line::Cordon { reason: "soon" })),
            ("preempted", None),
            ("", None),
        ] {
            assert_eq!(Line::parse(line), meaning, "{line}");
        }
    }
}
