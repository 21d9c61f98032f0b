//! From the claim to readiness.

use conman_proto::Generation;

use super::{Action, Cause, Event, LifeState, Lifecycle, Remains, Stop};

/// Progress of a start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// Waiting for a generation from the registry.
    Claiming,
    /// The runtime creates the container; no process exists.
    Creating { generation: Generation },
    /// The start was sent to the runtime; a process may exist from here on.
    Launching { generation: Generation },
    /// A pidfd of its init is opened and verified.
    Holding { generation: Generation, pid: i32 },
    /// The registry records how to find the process again.
    Recording { generation: Generation, pid: i32 },
    /// Waiting for the program to become ready.
    Probing {
        generation: Generation,
        pid: i32,
        deadline_ms: u64,
    },
}

impl Step {
    pub(super) fn generation(self) -> Option<Generation> {
        match self {
            Self::Claiming => None,
            Self::Creating { generation }
            | Self::Launching { generation }
            | Self::Holding { generation, .. }
            | Self::Recording { generation, .. }
            | Self::Probing { generation, .. } => Some(generation),
        }
    }

    /// What may still appear or be alive.
    fn remains(self) -> Remains {
        match self {
            Self::Claiming => Remains::Claim,
            // A container that is created is never started.
            Self::Creating { generation } => Remains::Nothing { generation },
            Self::Launching { generation } => Remains::Start { generation },
            Self::Holding { generation, pid } => Remains::Unheld { generation, pid },
            Self::Recording { generation, pid }
            | Self::Probing {
                generation, pid, ..
            } => Remains::Process { generation, pid },
        }
    }
}

impl Lifecycle {
    /// Continues a start: the event that its step awaits leads to the next step.
    pub(super) fn starting(
        &mut self,
        now_ms: u64,
        step: Step,
        event: Event,
        actions: &mut Vec<Action>,
    ) -> LifeState {
        let next = match (step, event) {
            (Step::Claiming, Event::Claimed(generation)) => {
                self.create_sent = true;
                actions.push(Action::Create);
                Step::Creating { generation }
            }
            (Step::Creating { generation }, Event::Created) => {
                actions.push(Action::SendStart);
                Step::Launching { generation }
            }
            (Step::Launching { generation }, Event::StartAnswered { pid }) => {
                actions.push(Action::Hold { pid });
                Step::Holding { generation, pid }
            }
            (Step::Holding { generation, pid }, Event::Held) => {
                actions.push(Action::Record);
                Step::Recording { generation, pid }
            }
            (Step::Recording { generation, pid }, Event::Recorded) => {
                actions.push(Action::Probe);
                let deadline_ms = now_ms.saturating_add(self.timing.ready_timeout_ms);
                Step::Probing {
                    generation,
                    pid,
                    deadline_ms,
                }
            }
            (
                Step::Probing {
                    generation, pid, ..
                },
                Event::Ready,
            ) => {
                return LifeState::Running { generation, pid };
            }
            (step, event) => return self.interrupted(now_ms, step, event, actions),
        };
        LifeState::Starting(next)
    }

    /// Ends a start that was stopped, failed or takes too long; any other event changes nothing.
    fn interrupted(
        &self,
        now_ms: u64,
        step: Step,
        event: Event,
        actions: &mut Vec<Action>,
    ) -> LifeState {
        let (cause, remains) = match (step, event) {
            (_, Event::StopAsked(by, why)) => (Cause::Asked(by, why), step.remains()),
            (_, Event::ReleasedElsewhere(by, why)) => {
                return self.ended(step.generation(), Cause::Asked(by, why), actions);
            }
            (Step::Claiming, Event::ClaimFailed(why)) => {
                return self.ended(None, Cause::StartFailed(why), actions);
            }
            (Step::Creating { .. }, Event::CreateFailed(why))
            | (Step::Recording { .. }, Event::RecordFailed(why))
            | (Step::Probing { .. }, Event::ReadyFailed(why)) => {
                (Cause::StartFailed(why), step.remains())
            }
            (Step::Holding { .. }, Event::HoldFailed(why)) => {
                let cause = Cause::StartFailed(why.clone());
                let stop = Stop::begin(now_ms, self.timing, cause, step.remains(), actions);
                return LifeState::Stopping(stop.failed(now_ms, self.timing, why));
            }
            (Step::Launching { generation }, Event::StartFailed(why)) => {
                (Cause::StartFailed(why), Remains::Nothing { generation })
            }
            (Step::Launching { generation }, Event::StartAmbiguous(why)) => {
                let remains = Remains::UnansweredStart { generation };
                (Cause::StartFailed(why), remains)
            }
            (Step::Holding { generation, .. }, Event::NotOurs) => {
                let why = "the reported process is not the container's".to_owned();
                let remains = Remains::UnansweredStart { generation };
                (Cause::StartFailed(why), remains)
            }
            (Step::Holding { generation, .. }, Event::Vanished)
            | (
                Step::Recording { generation, .. } | Step::Probing { generation, .. },
                Event::Exited,
            ) => (Cause::ExitedEarly, Remains::Nothing { generation }),
            (Step::Probing { deadline_ms, .. }, Event::Tick) if now_ms >= deadline_ms => {
                let seconds = self.timing.ready_timeout_ms / 1_000;
                let why = format!("the program was not ready within {seconds} s");
                (Cause::StartFailed(why), step.remains())
            }
            (step, _) => return LifeState::Starting(step),
        };
        self.end(now_ms, cause, remains, actions)
    }
}
