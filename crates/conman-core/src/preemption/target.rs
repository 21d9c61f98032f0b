//! One session during a preemption.

use std::time::Duration;

use super::Unreleased;

/// How far the preemption of a session is. The numbers are its generation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Progress {
    /// Its claim was sent, so the registry may have a record of an unknown generation.
    Claiming,
    /// Its start was sent, and no process of it was found yet.
    Sent(u64),
    /// It was sent its signal and gets SIGKILL at this time.
    Warned(u64, Duration),
    /// SIGKILL is to be sent.
    ToKill(u64),
    /// SIGKILL was sent; its certificate is awaited.
    Killed(u64),
    /// Proven dead, or proven never to have run; its release is awaited.
    Dead(u64),
    Released,
    /// SIGKILL could not be sent, or the registry refused its release for good.
    Failed(Option<u64>, String),
    /// Its own task released it.
    Settled,
}

#[derive(Debug)]
pub(super) struct Target {
    pub(super) progress: Progress,
    /// SIGKILL was sent to a process of it.
    pub(super) kill_sent: bool,
    /// Whether only an empty PID namespace proves its death; so for what is not known.
    pub(super) shares_files: bool,
}

impl Progress {
    /// Whether something is left to do or to wait for.
    pub(super) fn is_open(&self) -> bool {
        match self {
            Self::Released | Self::Failed(..) | Self::Settled => false,
            Self::Claiming
            | Self::Sent(_)
            | Self::Warned(..)
            | Self::ToKill(_)
            | Self::Killed(_)
            | Self::Dead(_) => true,
        }
    }

    /// Whether the table must be read again, because no notification announces its next step.
    pub(super) fn is_uncertain(&self) -> bool {
        matches!(self, Self::Claiming | Self::Sent(_))
    }

    /// Whether a certificate of this generation is awaited.
    pub(super) fn awaits_death(&self, of: u64) -> bool {
        match self {
            Self::Warned(generation, _) | Self::ToKill(generation) | Self::Killed(generation) => {
                *generation == of
            }
            _ => false,
        }
    }

    /// The generation, if it is known and not released, and why it is not released.
    pub(super) fn unreleased(&self) -> Option<(Option<u64>, Unreleased)> {
        let (generation, why) = match self {
            Self::Claiming => (None, Unreleased::Claiming),
            Self::Sent(generation) => (Some(*generation), Unreleased::StartUnanswered),
            Self::Warned(generation, _) => (Some(*generation), Unreleased::InGrace),
            Self::ToKill(generation) | Self::Killed(generation) => {
                (Some(*generation), Unreleased::NotDead)
            }
            Self::Dead(generation) => (Some(*generation), Unreleased::NotRecorded),
            Self::Failed(generation, why) => (*generation, Unreleased::Failed(why.clone())),
            Self::Released | Self::Settled => return None,
        };
        Some((generation, why))
    }
}

impl Target {
    /// When it gets SIGKILL, while its grace is running.
    pub(super) fn kill_at(&self) -> Option<Duration> {
        match self.progress {
            Progress::Warned(_, at) => Some(at),
            _ => None,
        }
    }
}
