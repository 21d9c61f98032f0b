//! One session during a preemption.

use std::sync::Arc;

use conman_linux::PidFd;
use conman_proto::{Generation, SessionId};
use conman_runtime::ContainerKey;
use tokio::time::Instant;

use crate::kill_table::KillEntry;

/// How far the preemption of a session is.
#[derive(Debug)]
pub(super) enum Progress {
    /// Its claim was sent, so the registry may have a record of an unknown generation.
    Claiming,
    /// Its start was sent, and no process of it was found yet.
    Sent(Generation),
    /// It was sent its signal and gets SIGKILL at this time.
    Warned(Generation, Arc<PidFd>, Instant),
    /// SIGKILL was sent; its certificate is awaited.
    Killed(Generation, Arc<PidFd>),
    /// Proven dead, or proven never to have run; its release is awaited.
    Dead(Generation),
    Released(Generation),
    /// SIGKILL could not be sent, or the registry refused its release for good.
    Failed(Option<Generation>, String),
    /// Its own task released it.
    Settled,
}

#[derive(Debug)]
pub(super) struct Target {
    pub(super) entry: KillEntry,
    pub(super) progress: Progress,
    /// SIGKILL was sent to a process of it.
    pub(super) kill_sent: bool,
}

impl Target {
    pub(super) fn new(entry: KillEntry) -> Self {
        Self {
            entry,
            progress: Progress::Claiming,
            kill_sent: false,
        }
    }

    /// Whether there is nothing left to do or to wait for.
    pub(super) fn is_settled(&self) -> bool {
        match &self.progress {
            Progress::Released(_) | Progress::Failed(..) | Progress::Settled => true,
            Progress::Claiming
            | Progress::Sent(_)
            | Progress::Warned(..)
            | Progress::Killed(..)
            | Progress::Dead(_) => false,
        }
    }

    /// Whether it must be polled, because no notification announces its next step.
    pub(super) fn is_uncertain(&self) -> bool {
        matches!(self.progress, Progress::Claiming | Progress::Sent(_))
    }

    pub(super) fn generation(&self) -> Option<Generation> {
        match &self.progress {
            Progress::Claiming | Progress::Settled => None,
            Progress::Sent(generation)
            | Progress::Warned(generation, ..)
            | Progress::Killed(generation, _)
            | Progress::Dead(generation)
            | Progress::Released(generation) => Some(*generation),
            Progress::Failed(generation, _) => *generation,
        }
    }

    pub(super) fn key(&self, id: &SessionId, generation: Generation) -> ContainerKey {
        ContainerKey::new(id.clone(), generation)
    }

    /// Returns why it is not released, for people.
    pub(super) fn unreleased_reason(&self) -> String {
        match &self.progress {
            Progress::Claiming => "its claim was still being recorded".to_owned(),
            Progress::Sent(_) => "its start was sent to the runtime and not answered, and no \
                process of it appeared; it may still appear"
                .to_owned(),
            Progress::Warned(..) => "its grace was not over".to_owned(),
            Progress::Killed(_, process) => {
                format!(
                    "killed, and not dead: {}",
                    crate::stuck::describe(process.pid())
                )
            }
            Progress::Dead(_) => "dead, but the registry did not record its release".to_owned(),
            Progress::Failed(_, reason) => reason.clone(),
            Progress::Released(_) | Progress::Settled => String::new(),
        }
    }
}
