//! Sources of preemption notices: what announces the end of a machine.
//!
//! A source is one file here that implements [`NoticeSource`], and one line in [`NOTICE_SOURCES`]. It
//! runs on the emergency thread from before the node joins its fleet. Its notices wait until the node is up.

mod aws;
mod azure;
mod command;
mod file;
mod gce;
mod http;
mod logind;

use std::time::Duration;

use conman_core::preemption::Origin;
use conman_proto::PreemptReport;
use futures_util::future::BoxFuture;
use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;

use self::http::Endpoint;
use super::log::Log;
use super::{Command, Notice};
use crate::error::PreemptError;

/// All kinds of sources.
pub const NOTICE_SOURCES: &[NoticeSourceKind] = &[
    aws::KIND,
    azure::KIND,
    command::KIND,
    file::KIND,
    gce::KIND,
    logind::KIND,
];

/// First pause after a failure; it doubles with each further one.
const FIRST_PAUSE: Duration = Duration::from_millis(500);

/// Longest pause: some clouds give notice 30 s before the stop.
const LONGEST_PAUSE: Duration = Duration::from_secs(10);

/// Bound on a probe, which a person waits for.
const PROBE_TIMEOUT: Duration = Duration::from_secs(5);

/// What the configuration says of a source, by its name in `[preempt]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Setting {
    /// `NAME = true` switches the source on; `NAME_endpoint` says where it is, if not here.
    Endpoint(&'static str),
    /// `NAME = "PATH"`
    Path,
    /// `NAME = ["PROGRAM", "ARGUMENT", …]`
    Command,
}

type Open = fn(&[String]) -> Result<Box<dyn NoticeSource>, String>;

/// A kind of source, as the configuration names it.
#[derive(Debug, Clone, Copy)]
pub struct NoticeSourceKind {
    /// Its notices have this name as their source.
    pub name: &'static str,
    pub setting: Setting,
    /// Returns the source at an endpoint (path, command line), or the rule that this violates.
    open: Open,
}

impl NoticeSourceKind {
    /// Returns the rule that a setting violates, if it does.
    pub fn check(&self, setting: &[String]) -> Result<(), String> {
        (self.open)(setting).map(drop)
    }
}

/// A source, and where it is.
#[derive(Debug, Clone)]
pub struct NoticeSourceOptions {
    pub kind: NoticeSourceKind,
    /// Whether it is watched.
    pub is_on: bool,
    /// An endpoint or a path alone, or a command line.
    pub setting: Vec<String>,
}

impl NoticeSourceOptions {
    pub(super) fn open(&self) -> Result<Box<dyn NoticeSource>, String> {
        (self.kind.open)(&self.setting)
    }

    /// Queries the source once, without a node. The error says why it does not answer.
    pub async fn probe(&self) -> Result<String, String> {
        let source = self.open()?;
        let probed = timeout(PROBE_TIMEOUT, source.probe()).await;
        probed.unwrap_or_else(|_| Err(format!("no answer within {} s", PROBE_TIMEOUT.as_secs())))
    }
}

/// Watches for notices.
pub(crate) trait NoticeSource: Send {
    /// Watches until it is dropped. Must never block: it runs on the thread that preempts.
    fn watch(self: Box<Self>, notices: NoticeSender) -> BoxFuture<'static, ()>;

    /// Queries once: returns the present notice, or why the source does not answer.
    fn probe(self: Box<Self>) -> BoxFuture<'static, Result<String, String>>;
}

/// Sends the notices of one source to the emergency thread.
#[derive(Debug, Clone)]
pub(crate) struct NoticeSender {
    pub(super) source: &'static str,
    pub(super) commands: mpsc::Sender<Command>,
    pub(super) log: Log,
}

impl NoticeSender {
    /// Reports that the machine is about to stop, in `budget` if the source says when. `signal` says which of the
    /// source's signals that is: only the same one can be withdrawn. Duplicates are harmless. The report comes
    /// when everything is released and nothing passes through the node any more, or the budget is over: the machine
    /// may stop then.
    fn preempt(
        &self,
        signal: &'static str,
        reason: &str,
        budget: Option<Duration>,
    ) -> Result<oneshot::Receiver<PreemptReport>, PreemptError> {
        let (reply, report) = oneshot::channel();
        let budget_ms = budget.map(|budget| u32::try_from(budget.as_millis()).unwrap_or(u32::MAX));
        let origin = self.origin(signal);
        self.send(Command::Preempt(Notice::now(
            self.source,
            origin,
            reason,
            budget_ms,
            reply,
        )))?;
        Ok(report)
    }

    /// Reports that the machine stays. Readmits only what the same signal preempted.
    fn withdraw(&self, signal: &'static str) -> Result<(), PreemptError> {
        self.send(Command::Readmit(self.origin(signal), None))
    }

    /// Reports that the machine may go soon: no new sessions, until an operator takes it back.
    fn cordon(&self, reason: &str) -> Result<(), PreemptError> {
        let reason = format!("{}: {reason}", self.source);
        self.send(Command::Cordon(reason))
    }

    /// Logs without waiting for the log.
    pub(super) fn warn(&self, text: String) {
        self.log.warn(text);
    }

    /// Logs a failure to pass something on. Returns whether it was passed on.
    fn passed(&self, what: &str, sent: Result<(), PreemptError>) -> bool {
        if let Err(error) = &sent {
            self.warn(format!("cannot pass on {what}: {error}"));
        }
        sent.is_ok()
    }

    fn origin(&self, signal: &'static str) -> Origin {
        Origin::Source {
            name: self.source,
            signal,
        }
    }

    fn send(&self, command: Command) -> Result<(), PreemptError> {
        self.commands.try_send(command).map_err(PreemptError::from)
    }
}

/// Failures of a source that follow each other: logged once until it answers again, with growing pauses.
#[derive(Debug, Default)]
struct FailureBackoff {
    pause: Option<Duration>,
}

impl FailureBackoff {
    fn succeeded(&mut self) {
        self.pause = None;
    }

    /// Notes a failure, and returns the pause before the next attempt.
    fn failed(
        &mut self,
        notices: &NoticeSender,
        what: &str,
        error: &(dyn std::error::Error + 'static),
    ) -> Duration {
        if self.pause.is_none() {
            let reason = conman_core::error_chain(error);
            notices.warn(format!("{what}; retrying: {reason}"));
        }
        let pause = self.pause.unwrap_or(FIRST_PAUSE);
        self.pause = Some((pause * 2).min(LONGEST_PAUSE));
        pause
    }
}

fn endpoint(setting: &[String]) -> Result<Endpoint, String> {
    let [endpoint] = setting else {
        return Err("must be one endpoint".to_owned());
    };
    endpoint.parse()
}

/// What a source said, short enough for a log line.
fn cut(text: &str) -> String {
    text.chars().take(64).collect()
}
