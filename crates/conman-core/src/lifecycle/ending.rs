//! From the decision to end a life to its release.
//!
//! ```text
//!  Claim ──claimed──────────────────────────────────────────────────────────┐
//!  Start ──answered─────────> Unheld ──held──> Process ──certificate───┐    │
//!    │        ^                 │└──proven dead────────────────────────┤    │
//!    └──lost──┴ UnansweredStart └──not ours──> UnansweredStart ──gone──┴──> Nothing ──released──> Ended
//! ```

use conman_proto::{Generation, SessionState};

use super::{Action, Event, Timing};
use crate::EndCause;

/// Why a life ends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Cause {
    /// It could not start.
    StartFailed(String),
    /// Its program ended before it was ready.
    ExitedEarly,
    /// Its program ended by itself.
    Exited,
    /// A stop was requested: the cause, and the reason in words.
    Asked(EndCause, String),
}

/// The final result of a life.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outcome {
    /// Failed rather than stopped.
    pub failed: bool,
    pub reason: String,
}

impl Outcome {
    pub(super) fn state(&self) -> SessionState {
        if self.failed {
            SessionState::Failed
        } else {
            SessionState::Stopped
        }
    }
}

impl Cause {
    /// The cause for the record and for programs.
    #[must_use]
    pub fn end_cause(&self) -> EndCause {
        match self {
            Self::StartFailed(_) => EndCause::StartFailed,
            Self::ExitedEarly | Self::Exited => EndCause::Exited,
            Self::Asked(cause, _) => *cause,
        }
    }

    /// The result, given the program's exit code if known.
    #[must_use]
    pub fn outcome(&self, exit_code: Option<i32>) -> Outcome {
        let code = match exit_code {
            Some(code) => format!("with exit code {code}"),
            None => "with an unknown exit code".to_owned(),
        };
        match self {
            Self::StartFailed(why) => Outcome {
                failed: true,
                reason: why.clone(),
            },
            Self::ExitedEarly => Outcome {
                failed: true,
                reason: format!("the program ended before it was ready, {code}"),
            },
            Self::Exited => Outcome {
                failed: exit_code != Some(0),
                reason: format!("the program ended by itself, {code}"),
            },
            Self::Asked(cause, why) => Outcome {
                failed: matches!(cause, EndCause::DiskLimit | EndCause::OutOfMemory),
                reason: why.clone(),
            },
        }
    }
}

/// What may still appear or be alive, and must end before the release.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Remains {
    /// The registry may still assign a generation.
    Claim,
    /// The runtime has not yet answered the start.
    Start { generation: Generation },
    /// The answer to the start is lost: a process may exist or may still appear.
    UnansweredStart { generation: Generation },
    /// A process that is not held yet.
    Unheld { generation: Generation, pid: i32 },
    /// A held process that was killed and has not been certified dead.
    Process { generation: Generation, pid: i32 },
    /// Nothing: the release is under way.
    Nothing { generation: Generation },
}

impl Remains {
    /// The fencing token, once there is one.
    #[must_use]
    pub fn generation(self) -> Option<Generation> {
        match self {
            Self::Claim => None,
            Self::Start { generation }
            | Self::UnansweredStart { generation }
            | Self::Unheld { generation, .. }
            | Self::Process { generation, .. }
            | Self::Nothing { generation } => Some(generation),
        }
    }

    /// What has to be done about it, repeated at every attempt.
    fn action(self) -> Option<Action> {
        match self {
            // Their calls are under way and will be answered.
            Self::Claim | Self::Start { .. } => None,
            Self::UnansweredStart { .. } => Some(Action::ResolveStart),
            Self::Unheld { pid, .. } => Some(Action::Hold { pid }),
            Self::Process { .. } => Some(Action::Kill),
            Self::Nothing { .. } => Some(Action::Release),
        }
    }
}

/// An end that is decided and not yet complete.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stop {
    pub cause: Cause,
    pub remains: Remains,
    /// The last error, in words.
    pub trouble: Option<String>,
    /// When it counts as stuck.
    pub late_ms: u64,
    /// When the action is repeated.
    pub next_try_ms: u64,
    /// Whether the current attempt has not been answered; the next one is then postponed, so that
    /// no call is made twice at a time.
    pub(super) awaiting: bool,
}

impl Stop {
    pub(super) fn begin(
        now_ms: u64,
        timing: Timing,
        cause: Cause,
        remains: Remains,
        actions: &mut Vec<Action>,
    ) -> Self {
        let mut stop = Self {
            cause,
            remains,
            trouble: None,
            late_ms: now_ms.saturating_add(timing.stuck_after_ms),
            next_try_ms: u64::MAX,
            awaiting: false,
        };
        // The pidfd is being opened, or that has just failed.
        if matches!(remains, Remains::Unheld { .. }) {
            stop.awaiting = true;
            stop.next_try_ms = now_ms.saturating_add(timing.retry_ms);
        } else {
            stop.enter(now_ms, timing, remains, actions);
        }
        stop
    }

    /// Handles an event; `Err` when nothing remains before the release.
    pub(super) fn on(
        mut self,
        now_ms: u64,
        timing: Timing,
        event: Event,
        actions: &mut Vec<Action>,
    ) -> Result<Self, (Option<Generation>, Cause)> {
        let next = match (self.remains, event) {
            (remains, Event::ReleasedElsewhere(..)) => {
                return Err((remains.generation(), self.cause));
            }
            (Remains::Claim, Event::ClaimFailed(_)) => return Err((None, self.cause)),
            (Remains::Nothing { generation }, Event::Released | Event::Superseded) => {
                return Err((Some(generation), self.cause));
            }
            (Remains::Claim, Event::Claimed(generation)) => Remains::Nothing { generation },
            (Remains::Start { generation }, Event::StartFailed(_))
            | (Remains::UnansweredStart { generation }, Event::StartGone)
            | (Remains::Unheld { generation, .. }, Event::Vanished)
            | (Remains::Process { generation, .. }, Event::Exited) => {
                Remains::Nothing { generation }
            }
            (Remains::Start { generation }, Event::StartAmbiguous(why)) => {
                self.trouble = Some(why);
                Remains::UnansweredStart { generation }
            }
            (Remains::Unheld { generation, .. }, Event::NotOurs) => {
                Remains::UnansweredStart { generation }
            }
            (Remains::Start { generation }, Event::StartAnswered { pid })
            | (Remains::UnansweredStart { generation }, Event::StartFound { pid }) => {
                Remains::Unheld { generation, pid }
            }
            (Remains::Unheld { generation, pid }, Event::Held) => {
                Remains::Process { generation, pid }
            }
            (Remains::UnansweredStart { .. }, Event::StartUnknown(why))
            | (Remains::Unheld { .. }, Event::HoldFailed(why))
            | (Remains::Nothing { .. }, Event::ReleaseFailed(why)) => {
                return Ok(self.failed(now_ms, timing, why));
            }
            (remains, Event::Tick) if now_ms >= self.next_try_ms => {
                if self.awaiting {
                    self.next_try_ms = now_ms.saturating_add(timing.retry_ms);
                } else {
                    self.enter(now_ms, timing, remains, actions);
                }
                return Ok(self);
            }
            (_, _) => return Ok(self),
        };
        self.remains = next;
        self.enter(now_ms, timing, next, actions);
        Ok(self)
    }

    /// The current attempt failed; there will be another.
    pub(super) fn failed(mut self, now_ms: u64, timing: Timing, why: String) -> Self {
        self.trouble = Some(why);
        self.awaiting = false;
        self.next_try_ms = now_ms.saturating_add(timing.retry_ms);
        self
    }

    fn enter(&mut self, now_ms: u64, timing: Timing, remains: Remains, actions: &mut Vec<Action>) {
        actions.extend(remains.action());
        // A kill is answered only by the certificate, and repeated until it arrives.
        self.awaiting = !matches!(remains, Remains::Process { .. });
        self.next_try_ms = now_ms.saturating_add(timing.retry_ms);
    }
}
