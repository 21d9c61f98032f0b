//! Decides what to do with a notice. Pure.
//!
//! ```text
//! Open ──notice──> Preempting ──finished──> Preempted ──readmit──> Open
//!                      └──readmit: noted──────────finished───────────^
//! ```

use std::time::Duration;

use conman_proto::PreemptReport;

/// Who ordered a preemption. A withdrawn notice readmits only what that notice preempted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Origin {
    /// A person, a signal or another program.
    Operator,
    /// One of a notice source's signals.
    Source {
        name: &'static str,
        signal: &'static str,
    },
}

/// What to do with a notice of preemption.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum OnNotice {
    Start,
    /// Wait for the report of the one under way, whose deadline may have to become earlier.
    Join,
    /// The preemption is finished already.
    Answer(Box<PreemptReport>),
}

/// What to do when sessions may be admitted again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum OnReadmit {
    Reopen,
    /// As soon as the preemption under way is finished.
    Later,
    /// Not preempted, or preempted by another origin.
    Ignore,
}

#[derive(Debug, Default)]
pub(crate) enum PreemptionState {
    #[default]
    Open,
    Preempting {
        origin: Origin,
        readmit: bool,
    },
    Preempted {
        origin: Origin,
        report: Box<PreemptReport>,
    },
}

impl PreemptionState {
    pub(crate) fn on_notice(&mut self, origin: Origin) -> OnNotice {
        match self {
            Self::Open => {
                *self = Self::Preempting {
                    origin,
                    readmit: false,
                };
                OnNotice::Start
            }
            Self::Preempting {
                origin: first,
                readmit,
            } => {
                // The machine is about to stop after all; only the latest order of an operator undoes it.
                *readmit = false;
                if origin == Origin::Operator {
                    *first = origin;
                }
                OnNotice::Join
            }
            Self::Preempted {
                origin: first,
                report,
            } => {
                if origin == Origin::Operator {
                    *first = origin;
                }
                OnNotice::Answer(report.clone())
            }
        }
    }

    pub(crate) fn on_readmit(&mut self, by: Origin) -> OnReadmit {
        match self {
            Self::Open => OnReadmit::Ignore,
            Self::Preempting { origin, .. } | Self::Preempted { origin, .. }
                if by != Origin::Operator && by != *origin =>
            {
                OnReadmit::Ignore
            }
            Self::Preempting { readmit, .. } => {
                *readmit = true;
                OnReadmit::Later
            }
            Self::Preempted { .. } => {
                *self = Self::Open;
                OnReadmit::Reopen
            }
        }
    }

    /// The preemption under way is finished. Returns whether to reopen at once.
    pub(crate) fn on_finished(&mut self, report: PreemptReport) -> bool {
        match self {
            Self::Preempting { readmit: true, .. } => {
                *self = Self::Open;
                true
            }
            Self::Preempting {
                origin,
                readmit: false,
            } => {
                *self = Self::Preempted {
                    origin: *origin,
                    report: Box::new(report),
                };
                false
            }
            Self::Open | Self::Preempted { .. } => false,
        }
    }
}

/// How long to wait for certificates and releases when the notice leaves less time: they take
/// milliseconds, and a machine rarely stops exactly on time.
const SHORTEST_RUN: Duration = Duration::from_secs(2);

/// When a preemption gives up, counted from its notice.
pub(crate) fn run_time(budget: Duration) -> Duration {
    budget.max(SHORTEST_RUN)
}

#[cfg(test)]
mod tests {
    use jiff::Timestamp;

    use super::*;

    const GCE_PREEMPTED: Origin = Origin::Source {
        name: "gce",
        signal: "preempted",
    };
    const GCE_MAINTENANCE: Origin = Origin::Source {
        name: "gce",
        signal: "maintenance-event",
    };

    fn report() -> PreemptReport {
        PreemptReport {
            noticed_at: Timestamp::UNIX_EPOCH,
            source: "api".to_owned(),
            sessions: 2,
            killed: 2,
            certified: 2,
            released: 2,
            last_kill_ms: Some(0.5),
            last_certificate_ms: Some(3.0),
            last_release_ms: Some(5.0),
            unreleased: Vec::new(),
            through: 0,
        }
    }

    #[test]
    fn a_second_notice_joins_the_first_and_a_third_gets_its_report() {
        let mut preemption_state = PreemptionState::default();
        assert_eq!(
            preemption_state.on_notice(Origin::Operator),
            OnNotice::Start
        );
        assert_eq!(preemption_state.on_notice(GCE_PREEMPTED), OnNotice::Join);
        assert!(!preemption_state.on_finished(report()));
        assert_eq!(
            preemption_state.on_notice(Origin::Operator),
            OnNotice::Answer(Box::new(report()))
        );
    }

    #[test]
    fn a_withdrawn_notice_readmits_only_what_it_preempted() {
        let mut preemption_state = PreemptionState::default();
        preemption_state.on_notice(Origin::Operator);
        preemption_state.on_finished(report());
        assert_eq!(
            preemption_state.on_readmit(GCE_PREEMPTED),
            OnReadmit::Ignore
        );
        assert_eq!(
            preemption_state.on_readmit(Origin::Operator),
            OnReadmit::Reopen
        );

        preemption_state.on_notice(GCE_PREEMPTED);
        preemption_state.on_finished(report());
        assert_eq!(
            preemption_state.on_readmit(GCE_MAINTENANCE),
            OnReadmit::Ignore
        );
        assert_eq!(
            preemption_state.on_readmit(GCE_PREEMPTED),
            OnReadmit::Reopen
        );
        assert_eq!(
            preemption_state.on_readmit(GCE_PREEMPTED),
            OnReadmit::Ignore
        );
    }

    #[test]
    fn an_operators_notice_on_top_of_the_clouds_is_not_withdrawn_by_the_cloud() {
        let mut preemption_state = PreemptionState::default();
        preemption_state.on_notice(GCE_PREEMPTED);
        preemption_state.on_notice(Origin::Operator);
        preemption_state.on_finished(report());
        assert_eq!(
            preemption_state.on_readmit(GCE_PREEMPTED),
            OnReadmit::Ignore
        );
    }

    #[test]
    fn a_withdrawal_in_the_middle_waits_for_the_end_unless_a_new_notice_comes() {
        let mut preemption_state = PreemptionState::default();
        preemption_state.on_notice(GCE_PREEMPTED);
        assert_eq!(preemption_state.on_readmit(GCE_PREEMPTED), OnReadmit::Later);
        assert!(preemption_state.on_finished(report()));
        assert_eq!(preemption_state.on_notice(GCE_PREEMPTED), OnNotice::Start);
        preemption_state.on_readmit(GCE_PREEMPTED);
        assert_eq!(preemption_state.on_notice(GCE_PREEMPTED), OnNotice::Join);
        assert!(!preemption_state.on_finished(report()));
    }
}
