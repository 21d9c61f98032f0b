//! Whose notice it is, and what a notice or its withdrawal does.
//!
//! ```text
//! Open ──notice──> Preempting ──finished──> Preempted ──readmit──> Open
//!                      └──readmit: noted──────────finished───────────^
//! ```

/// Who ordered a preemption. A withdrawn notice readmits only what that notice preempted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin {
    /// A person, a signal or another program.
    Operator,
    /// One of a notice source's signals.
    Source {
        name: &'static str,
        signal: &'static str,
    },
}

/// What to do with a notice of preemption.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum OnNotice {
    Start,
    /// Wait for the report of the one under way, whose deadline may have to become earlier.
    Join,
    /// The preemption is finished already.
    Answer,
}

/// What to do when sessions may be admitted again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum OnReadmit {
    Reopen,
    /// As soon as the preemption under way is finished.
    Later,
    /// Not preempted, or preempted by another origin.
    Ignore,
}

#[derive(Debug, Default)]
pub(super) enum Notices {
    #[default]
    Open,
    Preempting {
        origin: Origin,
        readmit: bool,
    },
    Preempted {
        origin: Origin,
    },
}

impl Notices {
    pub(super) fn on_notice(&mut self, by: Origin) -> OnNotice {
        match self {
            Self::Open => {
                *self = Self::Preempting {
                    origin: by,
                    readmit: false,
                };
                OnNotice::Start
            }
            Self::Preempting { origin, readmit } => {
                // The machine is about to stop after all; only the latest order of an operator undoes it.
                *readmit = false;
                if by == Origin::Operator {
                    *origin = by;
                }
                OnNotice::Join
            }
            Self::Preempted { origin } => {
                if by == Origin::Operator {
                    *origin = by;
                }
                OnNotice::Answer
            }
        }
    }

    pub(super) fn on_readmit(&mut self, by: Origin) -> OnReadmit {
        match self {
            Self::Open => OnReadmit::Ignore,
            Self::Preempting { origin, .. } | Self::Preempted { origin }
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
    pub(super) fn on_finished(&mut self) -> bool {
        let Self::Preempting { origin, readmit } = *self else {
            return false;
        };
        *self = match readmit {
            true => Self::Open,
            false => Self::Preempted { origin },
        };
        readmit
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GCE_PREEMPTED: Origin = Origin::Source {
        name: "gce",
        signal: "preempted",
    };
    const GCE_MAINTENANCE: Origin = Origin::Source {
        name: "gce",
        signal: "maintenance-event",
    };

    #[test]
    fn a_second_notice_joins_the_first_and_a_third_gets_its_report() {
        let mut notices = Notices::default();
        assert_eq!(notices.on_notice(Origin::Operator), OnNotice::Start);
        assert_eq!(notices.on_notice(GCE_PREEMPTED), OnNotice::Join);
        assert!(!notices.on_finished());
        assert_eq!(notices.on_notice(Origin::Operator), OnNotice::Answer);
    }

    #[test]
    fn a_withdrawn_notice_readmits_only_what_it_preempted() {
        let mut notices = Notices::default();
        notices.on_notice(Origin::Operator);
        notices.on_finished();
        assert_eq!(notices.on_readmit(GCE_PREEMPTED), OnReadmit::Ignore);
        assert_eq!(notices.on_readmit(Origin::Operator), OnReadmit::Reopen);

        notices.on_notice(GCE_PREEMPTED);
        notices.on_finished();
        assert_eq!(notices.on_readmit(GCE_MAINTENANCE), OnReadmit::Ignore);
        assert_eq!(notices.on_readmit(GCE_PREEMPTED), OnReadmit::Reopen);
        assert_eq!(notices.on_readmit(GCE_PREEMPTED), OnReadmit::Ignore);
    }

    #[test]
    fn an_operators_notice_on_top_of_the_clouds_is_not_withdrawn_by_the_cloud() {
        let mut notices = Notices::default();
        notices.on_notice(GCE_PREEMPTED);
        notices.on_notice(Origin::Operator);
        notices.on_finished();
        assert_eq!(notices.on_readmit(GCE_PREEMPTED), OnReadmit::Ignore);
    }

    #[test]
    fn a_withdrawal_in_the_middle_waits_for_the_end_unless_a_new_notice_comes() {
        let mut notices = Notices::default();
        notices.on_notice(GCE_PREEMPTED);
        assert_eq!(notices.on_readmit(GCE_PREEMPTED), OnReadmit::Later);
        assert!(notices.on_finished());
        assert_eq!(notices.on_notice(GCE_PREEMPTED), OnNotice::Start);
        notices.on_readmit(GCE_PREEMPTED);
        assert_eq!(notices.on_notice(GCE_PREEMPTED), OnNotice::Join);
        assert!(!notices.on_finished());
    }
}
