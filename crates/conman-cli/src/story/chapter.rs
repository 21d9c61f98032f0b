//! The latest generation of a session: how it ended, and why.

use std::time::Duration;

use conman_proto::{EndCause, Event, EventKind, Generation, Session, SessionState, Timeline};
use jiff::{SignedDuration, Timestamp};

use crate::human::since;
use crate::phases;

/// How the latest generation ended, as far as it has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Ending {
    /// It has not begun to end.
    None,
    /// The start failed in this phase.
    NotStarted { phase: Option<String> },
    /// Its program ended without an order.
    Exited { code: Option<i32> },
    /// It was ended on purpose.
    Ended(EndCause),
    /// It was killed and is not dead.
    Stuck,
}

/// The latest generation of a session.
pub(super) struct Chapter<'a> {
    pub(super) id: &'a str,
    pub(super) session: Option<&'a Session>,
    pub(super) timeline: &'a Timeline,
    pub(super) generation: Option<Generation>,
    /// Of this generation, and of its node meanwhile; oldest first.
    pub(super) events: Vec<&'a Event>,
    pub(super) now: Timestamp,
}

impl Chapter<'_> {
    pub(super) fn first(&self, kind: EventKind) -> Option<&Event> {
        self.events.iter().find(|event| event.kind == kind).copied()
    }

    pub(super) fn last(&self, kind: EventKind) -> Option<&Event> {
        self.events
            .iter()
            .rfind(|event| event.kind == kind)
            .copied()
    }

    pub(super) fn all(&self, kind: EventKind) -> impl Iterator<Item = &Event> {
        self.events
            .iter()
            .filter(move |event| event.kind == kind)
            .copied()
    }

    pub(super) fn state(&self) -> Option<SessionState> {
        self.session.map(|session| session.state)
    }

    pub(super) fn ending(&self) -> Ending {
        let dead = self.first(EventKind::SessionDead).is_some();
        if self.state() == Some(SessionState::Stuck)
            || (self.session.is_none() && self.first(EventKind::SessionStuck).is_some() && !dead)
        {
            return Ending::Stuck;
        }
        if matches!(
            self.state(),
            Some(
                SessionState::Starting
                    | SessionState::Running
                    | SessionState::Frozen
                    | SessionState::Paused
            )
        ) {
            return Ending::None;
        }
        let exited = Ending::Exited {
            code: self.exit_code(),
        };
        match (self.cause(), self.state()) {
            (Some(EndCause::StartFailed), _) => self.not_started(),
            (Some(EndCause::Exited) | None, _) if self.is_failed_start() => self.not_started(),
            (Some(EndCause::Exited), _) | (None, Some(SessionState::Failed)) => exited,
            (Some(cause), _) => Ending::Ended(cause),
            // The journal may show the cause a moment later.
            (None, Some(_)) => Ending::Ended(EndCause::Unknown),
            (None, None) if dead || self.first(EventKind::SessionKilled).is_some() => {
                Ending::Ended(EndCause::Unknown)
            }
            (None, None) => Ending::None,
        }
    }

    fn not_started(&self) -> Ending {
        Ending::NotStarted {
            phase: self.failed_phase(),
        }
    }

    /// What ended it, from the session or its latest event that says so.
    fn cause(&self) -> Option<EndCause> {
        let shown = self.session.and_then(|session| session.end.as_ref());
        shown
            .map(|end| end.cause)
            .or_else(|| self.events.iter().rev().find_map(|event| event.cause))
    }

    pub(super) fn exit_code(&self) -> Option<i32> {
        self.session.and_then(|session| session.exit_code)
    }

    /// The reason of its state, from the session or the last event that has one.
    pub(super) fn reason(&self) -> Option<&str> {
        let told = [
            EventKind::SessionStuck,
            EventKind::SessionFailed,
            EventKind::SessionExited,
            EventKind::SessionReleased,
            EventKind::SessionKilled,
        ];
        self.session
            .and_then(|session| session.reason.as_deref())
            .or_else(|| {
                told.into_iter()
                    .find_map(|kind| Some(self.last(kind)?.message.as_str()))
            })
            .filter(|reason| !reason.is_empty())
    }

    /// Whether the start succeeded.
    pub(super) fn is_started(&self) -> bool {
        self.first(EventKind::SessionReady).is_some()
            || self
                .session
                .is_some_and(|session| session.started_at.is_some())
    }

    /// Whether the start failed.
    pub(super) fn is_failed_start(&self) -> bool {
        let failed = self.state() == Some(SessionState::Failed)
            || self.first(EventKind::SessionFailed).is_some();
        failed && !self.is_started()
    }

    /// How long the start took, or has taken so far.
    pub(super) fn starting_for(&self) -> Option<Duration> {
        let claimed = self.first(EventKind::SessionClaimed).map(|event| event.at);
        let began = claimed.or(self.session.map(|session| session.created_at))?;
        Some(since(self.start_until(), began))
    }

    /// When the start failed; the present time while it lasts.
    fn start_until(&self) -> Timestamp {
        let ends = [
            EventKind::SessionKilled,
            EventKind::SessionDead,
            EventKind::SessionFailed,
        ];
        let ends = ends
            .into_iter()
            .filter_map(|kind| Some(self.first(kind)?.at));
        ends.min().unwrap_or(self.now)
    }

    /// The phases of the start in order, including the present or failed one. Empty if the daemon
    /// has reported none yet.
    pub(super) fn phases(&self) -> Vec<Span<'_>> {
        let mut spans = self.ended_phases();
        let unfinished = self.is_failed_start() || self.state() == Some(SessionState::Starting);
        if let (true, Some(began)) = (unfinished, spans.last().and_then(|last| last.ended_at)) {
            let name = phases::present(spans.iter().map(|span| span.name));
            let ms = since(self.start_until(), began).as_secs_f64() * 1e3;
            spans.push(Span {
                name,
                ms,
                ended_at: None,
            });
        }
        spans
    }

    fn ended_phases(&self) -> Vec<Span<'_>> {
        let own = |generation| self.generation.is_none_or(|latest| latest == generation);
        let spans: Vec<_> = self
            .timeline
            .phases
            .iter()
            .filter(|phase| own(phase.generation))
            .map(|phase| {
                let length = SignedDuration::from_secs_f64(phase.duration_ms / 1e3);
                let ended_at = phase
                    .started_at
                    .checked_add(length)
                    .unwrap_or(phase.started_at);
                Span {
                    name: &phase.name,
                    ms: phase.duration_ms,
                    ended_at: Some(ended_at),
                }
            })
            .collect();
        if !spans.is_empty() {
            return spans;
        }
        // The journal may have dropped them; the session keeps only the durations.
        let kept = self
            .session
            .into_iter()
            .flat_map(|session| &session.phases_ms);
        let mut spans: Vec<_> = kept
            .filter(|(name, _)| !phases::is_step(name))
            .map(|(name, ms)| Span {
                name,
                ms: *ms,
                ended_at: None,
            })
            .collect();
        spans.sort_by_key(|span| phases::order(span.name));
        spans
    }

    /// The phase in which the start failed, if it is known.
    fn failed_phase(&self) -> Option<String> {
        let shown = self
            .session
            .and_then(|session| session.end.as_ref()?.phase.clone());
        shown
            .or_else(|| self.first(EventKind::SessionFailed)?.phase.clone())
            .or_else(|| Some(self.phases().last()?.name.to_owned()))
    }
}

/// One phase of a start.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Span<'a> {
    pub(super) name: &'a str,
    pub(super) ms: f64,
    /// `None` while it lasts, and if only its length is known.
    pub(super) ended_at: Option<Timestamp>,
}
