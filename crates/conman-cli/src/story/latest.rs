//! The latest generation of a session: its state and why it is in it, and how long its start took.

use conman_proto::{
    EndCause, Event, EventKind, Generation, NodeState, Restarted, Session, SessionState, Timeline,
};
use jiff::Timestamp;

use super::{events, fleet};
use crate::human::{ago, clock, duration, milliseconds, since};
use crate::phases;

/// What exit codes usually mean.
const EXIT_CODES: [(i32, &str); 5] = [
    (126, "its command cannot be executed"),
    (127, "there is no such command"),
    (137, "SIGKILL: mostly the memory limit"),
    (139, "a segmentation fault"),
    (143, "SIGTERM"),
];

pub(super) struct Latest<'a> {
    pub(super) session: Option<&'a Session>,
    pub(super) timeline: &'a Timeline,
    /// Of a node outside a fleet.
    pub(super) node: Option<NodeState>,
    pub(super) generation: Option<Generation>,
    /// Of this generation, and of its node meanwhile; oldest first.
    pub(super) events: Vec<&'a Event>,
    pub(super) now: Timestamp,
}

impl<'a> Latest<'a> {
    pub(super) fn first(&self, kind: EventKind) -> Option<&'a Event> {
        let mut events = self.events.iter().copied();
        events.find(|event| event.kind == kind)
    }

    pub(super) fn state(&self) -> Option<SessionState> {
        self.session.map(|session| session.state)
    }

    /// What ended it.
    pub(super) fn cause(&self) -> Option<EndCause> {
        match self.session {
            Some(session) => session.end.as_ref().map(|end| end.cause),
            None => self.events.iter().rev().find_map(|event| event.cause),
        }
    }

    /// The phase in which its start failed.
    pub(super) fn failed_phase(&self) -> Option<&'a str> {
        match self.session {
            Some(session) => session.end.as_ref()?.phase.as_deref(),
            None => self.first(EventKind::SessionFailed)?.phase.as_deref(),
        }
    }

    pub(super) fn headline(&self) -> String {
        if let Some((_, headline)) = fleet::unreported(self.timeline, self.session) {
            return headline;
        }
        let id = &self.timeline.id;
        let because = self.because();
        let Some(session) = self.session else {
            let because = because.map_or_else(String::new, |it| format!("; it ended because {it}"));
            return format!("{id} was forgotten by its node{because}");
        };
        let (state, since_when) = match session.state {
            SessionState::Failed => ("failed".to_owned(), None),
            SessionState::Starting => ("is starting".to_owned(), Some(session.created_at)),
            SessionState::Running => ("is running".to_owned(), session.started_at),
            state => (format!("is {state}"), None),
        };
        let lasts = since_when.map_or_else(String::new, |at| {
            format!(", for {}", duration(since(self.now, at)))
        });
        let because = because.map_or_else(String::new, |it| format!(": {it}"));
        format!("{id} {state} on {}{lasts}{because}", session.node)
    }

    fn because(&self) -> Option<String> {
        match self.state() {
            Some(SessionState::Running) => None,
            Some(SessionState::Starting) => {
                self.phases().last().map(|(name, _)| phase_in_words(name))
            }
            Some(SessionState::Frozen) => Some(match self.taken_over() {
                Some(later) => format!(
                    "{} has taken it over, and has generation {} since {}; what is frozen here is killed once \
                     its node is back",
                    later.node,
                    later
                        .generation
                        .map_or_else(String::new, |it| it.to_string()),
                    clock(later.at)
                ),
                None => "its node cannot prove at present that it owns it".to_owned(),
            }),
            Some(SessionState::Paused) => Some("its processes do not run".to_owned()),
            Some(SessionState::Stuck) => Some("it was killed and is not dead".to_owned()),
            Some(SessionState::Stopping | SessionState::Stopped | SessionState::Failed) | None => {
                self.end_in_words()
            }
        }
    }

    /// Another node's event of a later generation.
    fn taken_over(&self) -> Option<&'a Event> {
        let session = self.session?;
        let mut events = self.timeline.events.iter().rev();
        events
            .find(|event| event.generation > Some(session.generation) && event.node != session.node)
    }

    fn end_in_words(&self) -> Option<String> {
        let cause = self.cause()?;
        let words = match self.failed_phase() {
            Some(phase) => format!("its start failed while {}", phase_in_words(phase)),
            None => in_words(cause)?.to_owned(),
        };
        let code = self.session.and_then(|session| session.exit_code);
        let Some(code) = code.filter(|_| cause == EndCause::Exited) else {
            return Some(words);
        };
        let meaning = EXIT_CODES.iter().find(|(known, _)| *known == code);
        let meaning = meaning.map_or_else(String::new, |(_, meaning)| format!(" ({meaning})"));
        Some(format!("{words}, with exit code {code}{meaning}"))
    }

    /// What is known besides the events.
    pub(super) fn facts(&self) -> Vec<String> {
        let mut facts = Vec::new();
        if let Some(reason) = self.session.and_then(|session| session.reason.as_ref()) {
            facts.push(format!("Reason: {reason}"));
        }
        if let (Some(generation), Some(at)) = (self.generation, self.requested_at()) {
            let (clock, ago) = (clock(at), ago(self.now, at));
            facts.push(format!(
                "Generation {generation} was requested at {clock} ({ago})"
            ));
        }
        facts.extend(self.restart());
        facts.extend(self.start());
        facts.extend(self.way());
        facts.extend(fleet::facts(self.timeline));
        facts.extend(events::missing(self.timeline).into_iter().map(|node| {
            format!("What happened to it on {node} is missing: its journal cannot be read")
        }));
        if self.timeline.truncated {
            facts.push("Its oldest events are no longer in the journal".to_owned());
        }
        facts
    }

    fn requested_at(&self) -> Option<Timestamp> {
        let claimed = || Some(self.first(EventKind::SessionClaimed)?.at);
        self.session
            .map(|session| session.created_at)
            .or_else(claimed)
    }

    /// Why it was started again, if no client ordered that.
    fn restart(&self) -> Option<String> {
        let restarted = self.session?.spec.restarted.as_ref()?;
        let Restarted { from, because, .. } = restarted;
        let who = match restarted.count {
            0 => "A connection started it again".to_owned(),
            count => format!("The fleet restarted it automatically ({count} in a row)"),
        };
        Some(format!("{who}: {from}, where it was, was {because}"))
    }

    /// How long the start and its phases took, and which phase took longest.
    fn start(&self) -> Vec<String> {
        let phases = self.phases();
        let Some((longest, most)) = phases.iter().max_by(|a, b| a.1.total_cmp(&b.1)) else {
            return Vec::new();
        };
        let total: f64 = phases.iter().map(|(_, ms)| ms).sum();
        let how = match self.state() {
            _ if self.is_started() => "",
            Some(SessionState::Starting) => " so far",
            _ => " until it ended",
        };
        let list = phases.iter();
        let list = list.map(|(name, ms)| format!("{name} {}", milliseconds(*ms)));
        let list = list.collect::<Vec<_>>().join(", ");
        let longest = phase_in_words(longest);
        vec![
            format!("Start: {}{how} ({list})", milliseconds(total)),
            format!("Longest: {longest}, {}", milliseconds(*most)),
        ]
    }

    /// Whether a start with a pool took a container made ahead.
    fn way(&self) -> Option<String> {
        let session = self.session.filter(|session| session.spec.pool > 0)?;
        let way = match session.phases_ms.contains_key(phases::MADE_AHEAD) {
            true => "It took a container made ahead",
            false => "No container made ahead was ready (`pool`): all of it was made at its start",
        };
        self.is_started().then(|| way.to_owned())
    }

    /// The phases of the start in order, with their milliseconds, and the one that it is in or ended
    /// in.
    fn phases(&self) -> Vec<(&'a str, f64)> {
        let journal = self.timeline.phases.iter();
        let mut phases: Vec<(&str, f64)> = journal
            .filter(|phase| Some(phase.generation) == self.generation)
            .map(|phase| (phase.name.as_str(), phase.duration_ms))
            .collect();
        // The journal has none of a start under way, and may have dropped them.
        if let (true, Some(session)) = (phases.is_empty(), self.session) {
            let shown = session.phases_ms.iter();
            let whole = shown.filter(|(name, _)| !phases::is_step(name));
            phases.extend(whole.map(|(name, ms)| (name.as_str(), *ms)));
            phases.sort_by_key(|(name, _)| phases::order(name));
        }
        if let Some(lasted) = self.unfinished_start_ms() {
            let ended: f64 = phases.iter().map(|(_, ms)| ms).sum();
            // An adopted start has a process, and none of its earlier phases.
            let process = self.session.and_then(|session| session.pid);
            let present = match process.filter(|_| phases.is_empty()) {
                Some(_) => phases::READY,
                None => phases::present(phases.iter().map(|(name, _)| *name)),
            };
            let present = self.failed_phase().unwrap_or(present);
            phases.push((present, (lasted - ended).max(0.0)));
        }
        phases
    }

    fn is_started(&self) -> bool {
        self.first(EventKind::SessionReady).is_some()
            || self.session.is_some_and(|it| it.started_at.is_some())
    }

    /// How long a start that did not succeed lasted, or how long it has lasted so far.
    fn unfinished_start_ms(&self) -> Option<f64> {
        if self.is_started() {
            return None;
        }
        let until = match self.state() {
            Some(SessionState::Starting) => self.now,
            _ => {
                // Without the claim, the event of its readiness may be missing too.
                self.first(EventKind::SessionClaimed)?;
                let dead = self.first(EventKind::SessionDead);
                dead.or(self.first(EventKind::SessionFailed))?.at
            }
        };
        Some(since(until, self.requested_at()?).as_secs_f64() * 1e3)
    }
}

fn phase_in_words(name: &str) -> String {
    format!("{} (`{name}`)", phases::in_words(name))
}

/// Why a session ended.
pub(super) fn in_words(cause: EndCause) -> Option<&'static str> {
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
        EndCause::Exited => "its program ended",
        EndCause::OutOfMemory => "its memory ran out",
        EndCause::Killed => "a client's signal ended it",
        EndCause::StartFailed => "its start failed",
        EndCause::Unknown => return None,
    })
}
