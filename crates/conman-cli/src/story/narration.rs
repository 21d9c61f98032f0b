//! What happened in a generation, in sentences.

use conman_proto::{EndCause, EventKind, SessionState};
use jiff::Timestamp;

use super::chapter::{Chapter, Ending, Span};
use super::{times, without_stop};
use crate::human::{ago, clock, duration, milliseconds, printable, since};
use crate::phases::{self, Whose};

impl Chapter<'_> {
    pub(super) fn headline(&self, ending: &Ending) -> String {
        let id = self.id;
        let Some(session) = self.session else {
            return format!("{id} was forgotten by its node; the journal still has its events.");
        };
        let for_so_long = |at: Option<Timestamp>| {
            at.map_or_else(String::new, |at| {
                format!(", for {}", duration(since(self.now, at)))
            })
        };
        match (session.state, ending) {
            (SessionState::Running, _) => {
                format!(
                    "{id} is running on {}{}.",
                    session.node,
                    for_so_long(session.started_at)
                )
            }
            (SessionState::Starting, _) => {
                format!("{id} is starting{}.", for_so_long(Some(session.created_at)))
            }
            (SessionState::Frozen, _) => {
                format!("{id} is frozen: its node cannot prove at present that it owns it.")
            }
            (SessionState::Paused, _) => {
                format!(
                    "{id} is paused on {}: its processes do not run.",
                    session.node
                )
            }
            (SessionState::Stopping, _) => format!("{id} is being stopped."),
            (SessionState::Stuck, _) => {
                format!("{id} is stuck: it was killed and is not dead.")
            }
            (SessionState::Failed, Ending::NotStarted { .. }) => format!("{id} failed to start."),
            (SessionState::Failed, _) => format!("{id} failed."),
            (SessionState::Stopped, Ending::Ended(cause)) => match in_words(*cause) {
                Some(because) => format!("{id} is stopped, because {because}."),
                None => format!("{id} is stopped."),
            },
            (SessionState::Stopped, _) => format!("{id} is stopped."),
        }
    }

    /// From the request to readiness.
    pub(super) fn start(&self) -> Vec<String> {
        let mut sentences = Vec::new();
        let claimed = self.first(EventKind::SessionClaimed).map(|event| event.at);
        let asked = claimed.or(self.session.map(|session| session.created_at));
        let node = self
            .session
            .map(|session| session.node.as_str())
            .or_else(|| self.events.first().map(|event| event.node.as_str()));
        if let (Some(at), Some(generation), Some(node)) = (asked, self.generation, node) {
            sentences.push(format!(
                "Generation {generation} was asked for at {} ({}), on {}.",
                clock(at),
                ago(self.now, at),
                printable(node)
            ));
        }
        if let Some(taken) = self.first(EventKind::SessionTakenOver) {
            sentences.push(format!(
                "It was {} at {}.",
                without_stop(&printable(&taken.message)),
                clock(taken.at)
            ));
        }
        sentences.extend(self.restart());
        sentences.extend(self.start_in_phases());
        sentences
    }

    /// Why it was started again, if no client ordered that.
    fn restart(&self) -> Option<String> {
        let told = self
            .session
            .and_then(|session| session.spec.restarted.as_ref());
        match told {
            Some(asked_for) if asked_for.count == 0 => Some(format!(
                "A connection asked for it, and {}, where it was, was {}.",
                printable(&asked_for.from),
                asked_for.because
            )),
            Some(restarted) => Some(format!(
                "The fleet restarted it automatically, because {}, where it was, was {}{}.",
                printable(&restarted.from),
                restarted.because,
                match restarted.count {
                    1 => String::new(),
                    count => format!("; that happened {} in a row", times(count as usize)),
                }
            )),
            None => self.first(EventKind::SessionRestarted).map(|event| {
                format!(
                    "The fleet started it automatically: {}.",
                    without_stop(&printable(&event.message))
                )
            }),
        }
    }

    /// How long the start and its phases took, as far as the daemon reported.
    fn start_in_phases(&self) -> Vec<String> {
        let spans = self.phases();
        let starting = self.state() == Some(SessionState::Starting);
        let total: f64 = spans.iter().map(|span| span.ms).sum();
        let list: Vec<_> = spans
            .iter()
            .map(|span| format!("{} {}", printable(span.name), milliseconds(span.ms)))
            .collect();
        let (took, list) = (milliseconds(total), list.join(", "));
        let mut sentences = Vec::new();
        match (spans.is_empty(), self.starting_for()) {
            (false, _) if self.is_started() => {
                sentences.push(format!("The start took {took}: {list}."));
            }
            (false, _) if starting => {
                sentences.push(format!("It has been starting for {took}: {list} so far."));
            }
            (false, _) => {
                sentences.push(format!("The start lasted {took}: {list} until it failed."))
            }
            (true, Some(lasted)) if self.is_failed_start() => {
                let lasted = milliseconds(lasted.as_secs_f64() * 1e3);
                sentences.push(format!("The start lasted {lasted} until it failed."));
            }
            (true, _) => {}
        }
        sentences.extend(longest(&spans, total));
        if starting {
            sentences.extend(self.now_in_phase(&spans));
        }
        sentences
    }

    fn now_in_phase(&self, spans: &[Span<'_>]) -> Option<String> {
        // A daemon that reports the phases only at the end has shown a process by then.
        let process = self.session.and_then(|session| session.pid);
        let name = spans
            .last()
            .map(|span| span.name)
            .or(process.and(Some(phases::READY)))?;
        Some(format!(
            "It is now {} (`{}`).",
            phases::in_words(name),
            printable(name)
        ))
    }

    /// Between readiness and the end.
    pub(super) fn life(&self) -> Vec<String> {
        let mut sentences = Vec::new();
        let ready = self
            .first(EventKind::SessionReady)
            .map(|event| event.at)
            .or(self.session.and_then(|session| session.started_at));
        let end = [
            EventKind::SessionExited,
            EventKind::SessionKilled,
            EventKind::SessionFailed,
            EventKind::SessionDead,
        ]
        .into_iter()
        .filter_map(|kind| Some(self.first(kind)?.at))
        .min();
        match (ready, end) {
            (Some(ready), Some(end)) if end >= ready => sentences.push(format!(
                "It was ready at {} and ran for {}.",
                clock(ready),
                duration(since(end, ready))
            )),
            (Some(ready), _) => sentences.push(format!("It was ready at {}.", clock(ready))),
            (None, _) => {}
        }
        let adopted = self.all(EventKind::SessionAdopted).count();
        if adopted > 0 {
            sentences.push(format!(
                "The daemon was restarted {} meanwhile and took it over without restarting it.",
                times(adopted)
            ));
        }
        sentences.extend(self.halts());
        if let Some(refused) = self.last(EventKind::EgressRefused) {
            sentences.push(format!(
                "Last refused or failed connection by its egress proxy: {}.",
                without_stop(&printable(&refused.message))
            ));
        }
        sentences
    }

    /// How it ended, and what came after.
    pub(super) fn end(&self, ending: &Ending) -> Vec<String> {
        let mut sentences = Vec::new();
        let reason = || {
            self.reason()
                .map_or_else(|| "no reason is known".into(), printable)
        };
        match ending {
            Ending::None => {}
            Ending::NotStarted { phase: Some(phase) } => {
                let reason = self.reason().unwrap_or("no reason is known");
                // The phase is named in words.
                let rest = reason.strip_prefix(phase.as_str());
                let reason = rest
                    .and_then(|rest| rest.strip_prefix(": "))
                    .unwrap_or(reason);
                sentences.push(format!(
                    "It failed while {} (`{}`): {}.",
                    phases::in_words(phase),
                    printable(phase),
                    without_stop(&printable(reason))
                ));
            }
            Ending::NotStarted { phase: None } => {
                sentences.push(format!("It failed: {}.", without_stop(&reason())));
            }
            Ending::Exited { code } => sentences.push(match code {
                Some(code) => format!(
                    "Its program ended by itself with exit code {code}{}.",
                    meaning(*code)
                ),
                None => format!("Its program ended by itself: {}.", without_stop(&reason())),
            }),
            Ending::Ended(_) => {
                sentences.push(format!("It was ended: {}.", without_stop(&reason())));
            }
            Ending::Stuck => {
                sentences.push(format!(
                    "It could not be ended: {}.",
                    without_stop(&reason())
                ));
            }
        }
        sentences.extend(self.death());
        if let Some(given_up) = self.last(EventKind::RestartGivenUp) {
            sentences.push(format!(
                "It is {}.",
                without_stop(&printable(&given_up.message))
            ));
        }
        sentences.extend(self.aftermath(ending));
        sentences
    }

    /// Kill, certificate, release.
    pub(super) fn death(&self) -> Vec<String> {
        let killed = self.first(EventKind::SessionKilled);
        let after_kill = |kind| {
            let event = self.first(kind)?;
            let killed = killed.filter(|killed| event.at >= killed.at)?;
            Some(milliseconds(since(event.at, killed.at).as_secs_f64() * 1e3))
        };
        let mut sentences = Vec::new();
        let dead = self.first(EventKind::SessionDead).is_some();
        let released = self.first(EventKind::SessionReleased).is_some();
        match (after_kill(EventKind::SessionDead), after_kill(EventKind::SessionReleased)) {
            (Some(dead), Some(released)) => sentences.push(format!(
                "{dead} after SIGKILL it was certified dead, {released} after SIGKILL it was released."
            )),
            (Some(dead), None) => {
                sentences.push(format!("{dead} after SIGKILL it was certified dead."));
                // The journal may show the release a moment after the session does.
                if !self.state().is_some_and(SessionState::is_ended) {
                    sentences.push("It is not released yet.".to_owned());
                }
            }
            (None, _) if dead && released => {
                sentences.push("It was certified dead and released.".to_owned());
            }
            (None, _) => {
                if let Some(killed) = killed.filter(|_| !dead) {
                    sentences.push(format!(
                        "SIGKILL was sent at {} ({}).",
                        clock(killed.at),
                        ago(self.now, killed.at)
                    ));
                }
            }
        }
        sentences
    }

    /// The clean-up after the end.
    pub(super) fn aftermath(&self, ending: &Ending) -> Vec<String> {
        let mut sentences = Vec::new();
        let cleaned = self.last(EventKind::SessionCleaned);
        let failures = self.all(EventKind::CleanupFailed).count();
        let last_failure = self.last(EventKind::CleanupFailed);
        match (cleaned, last_failure) {
            (Some(_), _) => sentences.push("What its container left is removed.".to_owned()),
            (None, Some(failure)) => sentences.push(format!(
                "Removing what its container left failed {} and is tried again: {}.",
                times(failures),
                without_stop(&printable(&failure.message))
            )),
            (None, None)
                if *ending != Ending::None && self.first(EventKind::SessionDead).is_some() =>
            {
                sentences.push("What its container left is still being removed.".to_owned());
            }
            (None, None) => {}
        }
        sentences
    }
}

/// The phase that took longest, and the share of each component.
fn longest(spans: &[Span<'_>], total: f64) -> Vec<String> {
    let Some(longest) = spans.iter().max_by(|a, b| a.ms.total_cmp(&b.ms)) else {
        return Vec::new();
    };
    if spans.len() < 2 || total <= 0.0 {
        return Vec::new();
    }
    let of = |wanted| {
        let own = spans
            .iter()
            .filter(|span| phases::whose(span.name) == Some(wanted));
        milliseconds(own.fold(0.0, |sum, span| sum + span.ms))
    };
    vec![
        format!(
            "What took longest was {} (`{}`): {}, {:.0} % of the whole.",
            phases::in_words(longest.name),
            printable(longest.name),
            milliseconds(longest.ms),
            longest.ms / total * 100.0
        ),
        format!(
            "Of it all conman itself took {}, the container runtime {}, the program {}.",
            of(Whose::Conman),
            of(Whose::Runtime),
            of(Whose::Program)
        ),
    ]
}

/// Why a session is stopped that was ended on purpose.
fn in_words(cause: EndCause) -> Option<&'static str> {
    Some(match cause {
        EndCause::Preempted => "its node was preempted",
        EndCause::Drained => "its node was drained",
        EndCause::NodeLost => "its node was lost",
        EndCause::Unrecorded => "the registry did not record its start in time",
        EndCause::Deleted => "a client stopped it",
        EndCause::Idle => "it had no connections",
        EndCause::Lifetime => "its lifetime was over",
        EndCause::DiskLimit => "it used more of the disk than it may",
        EndCause::ShutDown => "its daemon stopped with all sessions",
        EndCause::Disowned => "its node no longer owns it",
        EndCause::Exited | EndCause::StartFailed | EndCause::Unknown => return None,
    })
}

/// What an exit code usually means.
fn meaning(code: i32) -> &'static str {
    match code {
        126 => " (its command cannot be executed)",
        127 => " (there is no such command)",
        137 => " (SIGKILL: mostly the memory limit)",
        139 => " (a segmentation fault)",
        143 => " (SIGTERM)",
        _ => "",
    }
}
