//! One life of a session, from its claim to its release, as a state machine without I/O.
//!
//! ```text
//!  Starting: Claiming → Creating → Launching → Holding → Recording → Probing ──ready──> Running
//!                │          │          │           │          │         │                  │
//!                └──────────┴──────────┴───── stop, failure, exit ──────┴──────────────────┘
//!                                               │
//!                                               v           late
//!              what must end before release: Stopping <───────────────> Stuck
//!                                               │                         │
//!                                               └───────released──────────┴──> Ended
//! ```
//!
//! [`Lifecycle::on`] takes an event and returns the actions to take. The driver executes every
//! [`Action`] and reports its result as an [`Event`]; late, duplicate or unexpected events change
//! nothing. The driver owns pidfds, timers and calls; the state machine owns the order.
//!
//! Invariants, for every order of events:
//! - a start is sent at most once, and never after an end was decided;
//! - ownership is released only when nothing of the session can run: the start was never sent, was
//!   definitely refused, or was found to have failed, or the death certificate exists;
//! - a process that lives when an end is decided is killed before its certificate is awaited;
//! - every state but Running and Ended has a call under way or a deadline.

use conman_proto::{Generation, SessionState};

use crate::EndCause;

mod ending;
mod starting;

pub use ending::{Cause, Outcome, Remains, Stop};
pub use starting::Step;

/// Timeouts, in milliseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timing {
    /// From the container's start to readiness.
    pub ready_timeout_ms: u64,
    /// From the decision to end until the session counts as stuck.
    pub stuck_after_ms: u64,
    /// Interval between attempts.
    pub retry_ms: u64,
}

/// State of a life.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LifeState {
    Starting(Step),
    Running {
        generation: Generation,
        pid: i32,
    },
    /// Its end is decided.
    Stopping(Stop),
    /// Like Stopping, but it takes too long.
    Stuck(Stop),
    /// Nothing of it runs and ownership is given up. `generation` is `None` if it never had one.
    Ended {
        generation: Option<Generation>,
        cause: Cause,
    },
}

/// An event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// Answers to [`Action::Claim`]. A failed claim left no record.
    Claimed(Generation),
    ClaimFailed(String),
    /// Answers to [`Action::Create`].
    Created,
    CreateFailed(String),
    /// Answers to [`Action::SendStart`]: the init's PID; or nothing was or will be started; or the
    /// result is unknown.
    StartAnswered {
        pid: i32,
    },
    StartFailed(String),
    StartAmbiguous(String),
    /// Answers to [`Action::ResolveStart`]: it runs; or it failed and can never run; or the
    /// result is still unknown.
    StartFound {
        pid: i32,
    },
    StartGone,
    StartUnknown(String),
    /// Answers to [`Action::Hold`]: the pidfd is open and the process is the container's; or the
    /// process is proven dead; or it is another process; or the result is unknown.
    Held,
    Vanished,
    NotOurs,
    HoldFailed(String),
    /// Answers to [`Action::Record`].
    Recorded,
    RecordFailed(String),
    /// Answers to [`Action::Probe`]. The state machine limits the time to readiness.
    Ready,
    ReadyFailed(String),
    /// It is to end: the cause, and the reason in words.
    StopAsked(EndCause, String),
    /// The death certificate of the held process.
    Exited,
    /// Answers to [`Action::Release`]. `Superseded`: another generation is current, so there is
    /// nothing to release.
    Released,
    ReleaseFailed(String),
    Superseded,
    /// Another component, the preemption thread, has certified and released it.
    ReleasedElsewhere(EndCause, String),
    /// Time passed; due at [`Lifecycle::deadline_ms`].
    Tick,
}

/// The actions to take, in this order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// Request a generation from the registry.
    Claim,
    /// Create the container, without starting it.
    Create,
    /// Start it. Only this action may create a process.
    SendStart,
    /// Open a pidfd of this process, verify that it is the container's, and from then on report its
    /// death.
    Hold { pid: i32 },
    /// Record how the held process can be found again.
    Record,
    /// Probe whether the program is ready, until another action ends this.
    Probe,
    /// Find out the result of a start that was not answered.
    ResolveStart,
    /// SIGKILL the held process.
    Kill,
    /// Release ownership.
    Release,
    /// Let the runtime remove the remains at some later time.
    Cleanup,
    /// The public state has changed.
    Publish,
}

/// The state machine of one life. See the module documentation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lifecycle {
    state: LifeState,
    timing: Timing,
    create_sent: bool,
}

impl Lifecycle {
    /// A new life; its first action is [`Action::Claim`].
    #[must_use]
    pub fn start(timing: Timing) -> (Self, Vec<Action>) {
        let life = Self {
            state: LifeState::Starting(Step::Claiming),
            timing,
            create_sent: false,
        };
        (life, vec![Action::Claim])
    }

    /// A life that an earlier daemon started; its process is already held.
    #[must_use]
    pub fn adopt(timing: Timing, generation: Generation, pid: i32) -> Self {
        Self {
            state: LifeState::Running { generation, pid },
            timing,
            create_sent: true,
        }
    }

    /// A life whose program an earlier daemon started and did not yet see ready; its process is
    /// already held and recorded. It gets the full readiness timeout.
    #[must_use]
    pub fn adopt_unready(
        now_ms: u64,
        timing: Timing,
        generation: Generation,
        pid: i32,
    ) -> (Self, Vec<Action>) {
        let deadline_ms = now_ms.saturating_add(timing.ready_timeout_ms);
        let step = Step::Probing {
            generation,
            pid,
            deadline_ms,
        };
        let life = Self {
            state: LifeState::Starting(step),
            timing,
            create_sent: true,
        };
        (life, vec![Action::Probe])
    }

    /// A life that an earlier daemon left during its start: what was started, if anything, must
    /// end.
    #[must_use]
    pub fn recover(
        now_ms: u64,
        timing: Timing,
        generation: Generation,
        cause: Cause,
    ) -> (Self, Vec<Action>) {
        let mut actions = Vec::new();
        let remains = Remains::UnansweredStart { generation };
        let stop = Stop::begin(now_ms, timing, cause, remains, &mut actions);
        let life = Self {
            state: LifeState::Stopping(stop),
            timing,
            create_sent: true,
        };
        actions.push(Action::Publish);
        (life, actions)
    }

    /// The current state.
    #[must_use]
    pub fn state(&self) -> &LifeState {
        &self.state
    }

    /// Its fencing token, once the registry has assigned one.
    #[must_use]
    pub fn generation(&self) -> Option<Generation> {
        match &self.state {
            LifeState::Starting(step) => step.generation(),
            LifeState::Running { generation, .. } => Some(*generation),
            LifeState::Stopping(stop) | LifeState::Stuck(stop) => stop.remains.generation(),
            LifeState::Ended { generation, .. } => *generation,
        }
    }

    /// The public state. Until an ended session's exit code is known ([`Cause::outcome`]), a
    /// session that ended by itself counts as failed.
    #[must_use]
    pub fn public_state(&self) -> SessionState {
        match &self.state {
            LifeState::Starting(_) => SessionState::Starting,
            LifeState::Running { .. } => SessionState::Running,
            LifeState::Stopping(_) => SessionState::Stopping,
            LifeState::Stuck(_) => SessionState::Stuck,
            LifeState::Ended { cause, .. } => cause.outcome(None).state(),
        }
    }

    /// Sets the cause of an end that looked like the program's.
    pub fn attribute(&mut self, by: EndCause, why: &str) {
        if let LifeState::Stopping(stop) | LifeState::Stuck(stop) = &mut self.state
            && !matches!(stop.cause, Cause::Asked(..))
        {
            stop.cause = Cause::Asked(by, why.to_owned());
        }
    }

    /// When to send [`Event::Tick`] if no event comes before.
    #[must_use]
    pub fn deadline_ms(&self) -> Option<u64> {
        match &self.state {
            LifeState::Starting(Step::Probing { deadline_ms, .. }) => Some(*deadline_ms),
            LifeState::Starting(_) | LifeState::Running { .. } | LifeState::Ended { .. } => None,
            LifeState::Stopping(stop) => Some(stop.next_try_ms.min(stop.late_ms)),
            LifeState::Stuck(stop) => Some(stop.next_try_ms),
        }
    }

    /// Handles an event at `now_ms` of any monotonic clock.
    #[must_use = "the actions must be carried out"]
    pub fn on(&mut self, now_ms: u64, event: Event) -> Vec<Action> {
        let before = self.public_state();
        let mut actions = Vec::new();
        // A container that was created late is left over; no release waited for it.
        if matches!(self.state, LifeState::Ended { .. })
            && matches!(event, Event::Created | Event::CreateFailed(_))
        {
            return vec![Action::Cleanup];
        }
        match std::mem::replace(&mut self.state, PLACEHOLDER) {
            LifeState::Starting(step) => {
                self.state = self.starting(now_ms, step, event, &mut actions)
            }
            LifeState::Running { generation, pid } => {
                self.state = self.running(now_ms, generation, pid, event, &mut actions);
            }
            LifeState::Stopping(stop) => {
                let stop = stop.on(now_ms, self.timing, event, &mut actions);
                self.state = self.settle(now_ms, stop, &mut actions);
            }
            LifeState::Stuck(stop) => {
                self.state = match stop.on(now_ms, self.timing, event, &mut actions) {
                    Ok(stop) => LifeState::Stuck(stop),
                    ended => self.settle(now_ms, ended, &mut actions),
                };
            }
            ended @ LifeState::Ended { .. } => self.state = ended,
        }
        if self.public_state() != before {
            actions.push(Action::Publish);
        }
        actions
    }

    fn running(
        &mut self,
        now_ms: u64,
        generation: Generation,
        pid: i32,
        event: Event,
        actions: &mut Vec<Action>,
    ) -> LifeState {
        match event {
            Event::StopAsked(by, why) => {
                let remains = Remains::Process { generation, pid };
                self.end(now_ms, Cause::Asked(by, why), remains, actions)
            }
            Event::Exited => self.end(
                now_ms,
                Cause::Exited,
                Remains::Nothing { generation },
                actions,
            ),
            Event::ReleasedElsewhere(by, why) => {
                self.ended(Some(generation), Cause::Asked(by, why), actions)
            }
            _ => LifeState::Running { generation, pid },
        }
    }

    /// The end is decided: starts what remains to be done before the release.
    fn end(
        &self,
        now_ms: u64,
        cause: Cause,
        remains: Remains,
        actions: &mut Vec<Action>,
    ) -> LifeState {
        LifeState::Stopping(Stop::begin(now_ms, self.timing, cause, remains, actions))
    }

    fn settle(
        &self,
        now_ms: u64,
        stop: Result<Stop, (Option<Generation>, Cause)>,
        actions: &mut Vec<Action>,
    ) -> LifeState {
        match stop {
            Ok(stop) if now_ms >= stop.late_ms => LifeState::Stuck(stop),
            Ok(stop) => LifeState::Stopping(stop),
            Err((generation, cause)) => self.ended(generation, cause, actions),
        }
    }

    fn ended(
        &self,
        generation: Option<Generation>,
        cause: Cause,
        actions: &mut Vec<Action>,
    ) -> LifeState {
        if self.create_sent {
            actions.push(Action::Cleanup);
        }
        LifeState::Ended { generation, cause }
    }
}

/// Replaces the state while a transition computes the next one.
const PLACEHOLDER: LifeState = LifeState::Starting(Step::Claiming);

#[cfg(test)]
mod tests;
