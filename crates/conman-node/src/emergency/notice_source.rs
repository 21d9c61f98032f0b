//! Sources of preemption notices: clouds that announce the end of a machine.
//!
//! A source is one file here that implements [`NoticeSource`], and one line in [`NOTICE_SOURCES`]. It
//! runs on the emergency thread from before the node joins its fleet. Its notices wait until the node is up.

use conman_core::preemption::Origin;
use futures_util::future::BoxFuture;
use tokio::sync::{mpsc, oneshot};

use super::log::Log;
use super::{Command, Notice, gce};
use crate::error::PreemptError;

/// All kinds of sources.
pub const NOTICE_SOURCES: &[NoticeSourceKind] = &[gce::KIND];

/// A kind of source, as the configuration names it.
#[derive(Debug, Clone, Copy)]
pub struct NoticeSourceKind {
    /// `preempt.NAME = true` switches the source on, `preempt.NAME_endpoint` says where it is. Its notices have
    /// this name as their source.
    pub name: &'static str,
    pub default_endpoint: &'static str,
    /// Returns the source at an endpoint, or the rule that the endpoint violates.
    pub(super) open: fn(&str) -> Result<Box<dyn NoticeSource>, String>,
}

impl NoticeSourceKind {
    /// Returns the rule that an endpoint violates, if it does.
    pub fn check(&self, endpoint: &str) -> Result<(), String> {
        (self.open)(endpoint).map(drop)
    }
}

/// A source that is switched on.
#[derive(Debug, Clone)]
pub struct NoticeSourceOptions {
    pub kind: NoticeSourceKind,
    pub endpoint: String,
}

/// Watches for notices.
pub(crate) trait NoticeSource: Send {
    /// Watches until it is dropped. Must never block: it runs on the thread that preempts.
    fn watch(self: Box<Self>, notices: NoticeSender) -> BoxFuture<'static, ()>;
}

/// Sends the notices of one source to the emergency thread.
#[derive(Debug, Clone)]
pub(crate) struct NoticeSender {
    pub(super) source: &'static str,
    pub(super) commands: mpsc::Sender<Command>,
    pub(super) log: Log,
}

impl NoticeSender {
    /// Reports that the machine is about to stop. `signal` says which of the source's signals that is: only
    /// the same one can be withdrawn. Duplicates are harmless.
    pub(super) fn preempt(&self, signal: &'static str, reason: &str) -> Result<(), PreemptError> {
        // The report goes to the journal; no caller waits for it.
        let (reply, _) = oneshot::channel();
        let notice = Notice::now(self.source, self.origin(signal), reason, None, reply);
        self.send(Command::Preempt(notice))
    }

    /// Reports that the machine stays. Readmits only what the same signal preempted.
    pub(super) fn withdraw(&self, signal: &'static str) -> Result<(), PreemptError> {
        self.send(Command::Readmit(self.origin(signal), None))
    }

    /// Logs without waiting for the log.
    pub(super) fn warn(&self, text: String) {
        self.log.warn(text);
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
