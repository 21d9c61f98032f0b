//! One session during a preemption.

use std::sync::Arc;

use conman_linux::PidFd;
use conman_proto::{Generation, SessionId};
use conman_runtime::ContainerKey;
use tokio::time::Instant;

use crate::kill_table::KillEntry;

/// The preemption's progress with a session.
#[derive(Debug)]
pub(super) enum Standing {
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
    pub(super) standing: Standing,
    /// SIGKILL was sent to a process of it.
    pub(super) struck: bool,
}

impl Target {
    pub(super) fn new(entry: KillEntry) -> Self {
        Self {
            entry,
            standing: Standing::Claiming,
            struck: false,
        }
    }

    /// Whether there is nothing left to do or to wait for.
    pub(super) fn is_settled(&self) -> bool {
        match &self.standing {
            Standing::Released(_) | Standing::Failed(..) | Standing::Settled => true,
            Standing::Claiming
            | Standing::Sent(_)
            | Standing::Warned(..)
            | Standing::Killed(..)
            | Standing::Dead(_) => false,
        }
    }

    /// Whether it must be polled, because no notification announces its next step.
    pub(super) fn is_uncertain(&self) -> bool {
        matches!(self.standing, Standing::Claiming | Standing::Sent(_))
    }

    pub(super) fn generation(&self) -> Option<Generation> {
        match &self.standing {
            Standing::Claiming | Standing::Settled => None,
            Standing::Sent(generation)
            | Standing::Warned(generation, ..)
            | Standing::Killed(generation, _)
            | Standing::Dead(generation)
            | Standing::Released(generation) => Some(*generation),
            Standing::Failed(generation, _) => *generation,
        }
    }

    pub(super) fn key(&self, id: &SessionId, generation: Generation) -> ContainerKey {
        ContainerKey {
            session: id.clone(),
            generation,
        }
    }

    /// Returns why it is not released, for people.
    pub(super) fn complaint(&self) -> String {
        match &self.standing {
            Standing::Claiming => "its claim was still being recorded".to_owned(),
            Standing::Sent(_) => "its start was sent to the runtime and not answered, and no \
                process of it appeared; it may still appear"
                .to_owned(),
            Standing::Warned(..) => "its grace was not over".to_owned(),
            Standing::Killed(_, process) => {
                format!(
                    "killed, and not dead: {}",
                    crate::stuck::describe(process.pid())
                )
            }
            Standing::Dead(_) => "dead, but the registry did not record its release".to_owned(),
            Standing::Failed(_, reason) => reason.clone(),
            Standing::Released(_) | Standing::Settled => String::new(),
        }
    }
}
