//! A session's timeline told in sentences: what happened, how long it took, what took longest,
//! why it ended, and what to do next.
//!
//! Pure: takes what the API knows and the time, returns text.

use conman_proto::{Event, EventKind, Generation, Session, SessionState, Timeline};
use jiff::Timestamp;
use serde::Serialize;

use crate::human::{ago, clock, count, duration, milliseconds, printable, since};
use crate::phases::{self, Whose};

/// Endings of earlier generations that are told; older ones are only counted.
const EARLIER_TOLD: usize = 3;

/// The story of one session.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Story {
    /// Where it stands, in one sentence.
    pub(crate) headline: String,
    /// What happened, oldest first.
    pub(crate) sentences: Vec<String>,
    /// What to do next.
    pub(crate) next: Vec<String>,
}

impl Story {
    /// Tells it. `session` is missing when the node forgot the session and only its journal
    /// still has it.
    pub(crate) fn tell(session: Option<&Session>, timeline: &Timeline, now: Timestamp) -> Self {
        let id = timeline.id.as_str();
        let generation = session.map(|session| session.generation).or_else(|| {
            timeline
                .events
                .iter()
                .filter_map(|event| event.generation)
                .max()
        });
        let events: Vec<&Event> = timeline
            .events
            .iter()
            .filter(|event| event.generation.is_none() || event.generation == generation)
            .collect();
        let chapter = Chapter {
            id,
            session,
            timeline,
            generation,
            events,
            now,
        };
        let ending = chapter.ending();
        let mut sentences = Vec::new();
        if timeline.truncated {
            sentences.push("Its oldest events are no longer in the journal.".to_owned());
        }
        sentences.extend(earlier(timeline, generation));
        sentences.extend(chapter.start());
        sentences.extend(chapter.life());
        sentences.extend(chapter.end(&ending));
        Self {
            headline: chapter.headline(&ending),
            sentences,
            next: chapter.next(&ending),
        }
    }
}

/// How the latest generation ended, as far as it did.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Ending {
    /// It has not begun to end.
    None,
    /// The start failed in this phase.
    NotStarted { phase: Option<String> },
    /// Its program ended by itself.
    Exited { code: Option<i32> },
    /// The node was preempted.
    Preempted,
    /// Nobody used it for longer than its spec allows.
    Idle,
    /// It lived as long as its spec allows.
    Lifetime,
    /// Somebody stopped it.
    Stopped,
    /// It was killed and is not dead.
    Stuck,
}

/// The latest generation of a session.
struct Chapter<'a> {
    id: &'a str,
    session: Option<&'a Session>,
    timeline: &'a Timeline,
    generation: Option<Generation>,
    /// Of this generation, oldest first.
    events: Vec<&'a Event>,
    now: Timestamp,
}

impl Chapter<'_> {
    fn first(&self, kind: EventKind) -> Option<&Event> {
        self.events.iter().find(|event| event.kind == kind).copied()
    }

    fn last(&self, kind: EventKind) -> Option<&Event> {
        self.events
            .iter()
            .rfind(|event| event.kind == kind)
            .copied()
    }

    fn all(&self, kind: EventKind) -> impl Iterator<Item = &Event> {
        self.events
            .iter()
            .filter(move |event| event.kind == kind)
            .copied()
    }

    fn state(&self) -> Option<SessionState> {
        self.session.map(|session| session.state)
    }

    fn ending(&self) -> Ending {
        let dead = self.first(EventKind::SessionDead).is_some();
        if self.state() == Some(SessionState::Stuck)
            || (self.session.is_none() && self.first(EventKind::SessionStuck).is_some() && !dead)
        {
            return Ending::Stuck;
        }
        if matches!(
            self.state(),
            Some(SessionState::Starting | SessionState::Running | SessionState::Frozen)
        ) {
            return Ending::None;
        }
        if self.first(EventKind::SessionExited).is_some() {
            return Ending::Exited {
                code: self.session.and_then(|session| session.exit_code),
            };
        }
        let reason = self.reason().unwrap_or_default().to_lowercase();
        if reason.contains("preempt") {
            return Ending::Preempted;
        }
        if let Some(failed) = self.first(EventKind::SessionFailed)
            && self.first(EventKind::SessionReady).is_none()
        {
            let phase = failed.phase.clone().or_else(|| self.unfinished_phase());
            return Ending::NotStarted { phase };
        }
        if self.first(EventKind::SessionKilled).is_none() && !dead {
            return match self.state() {
                Some(SessionState::Failed) => Ending::NotStarted {
                    phase: self.unfinished_phase(),
                },
                Some(SessionState::Stopped | SessionState::Stopping) => Ending::Stopped,
                _ => Ending::None,
            };
        }
        if reason.contains("idle") {
            Ending::Idle
        } else if reason.contains("lifetime") {
            Ending::Lifetime
        } else {
            Ending::Stopped
        }
    }

    /// Why it is in its state, by the session itself or the last event that tells.
    fn reason(&self) -> Option<&str> {
        let told = [
            EventKind::SessionStuck,
            EventKind::SessionFailed,
            EventKind::SessionExited,
            EventKind::SessionKilled,
            EventKind::SessionReleased,
        ];
        self.session
            .and_then(|session| session.reason.as_deref())
            .or_else(|| {
                told.into_iter()
                    .find_map(|kind| Some(self.last(kind)?.message.as_str()))
            })
            .filter(|reason| !reason.is_empty())
    }

    /// Durations of the phases that ended, in the order in which they ran.
    fn phases(&self) -> Vec<(&str, f64)> {
        let from_timeline = self
            .timeline
            .phases
            .iter()
            .filter(|phase| {
                self.generation
                    .is_none_or(|generation| phase.generation == generation)
            })
            .map(|phase| (phase.name.as_str(), phase.duration_ms));
        let phases: Vec<_> = from_timeline.collect();
        if !phases.is_empty() {
            return phases;
        }
        let own = self.session.map(|session| &session.phases_ms);
        let mut phases: Vec<_> = own
            .into_iter()
            .flatten()
            .map(|(name, ms)| (name.as_str(), *ms))
            .collect();
        phases.sort_by_key(|(name, _)| phases::order(name));
        phases
    }

    fn unfinished_phase(&self) -> Option<String> {
        let phases = self.phases();
        (!phases.is_empty())
            .then(|| phases::present(phases.iter().map(|(name, _)| *name)).to_owned())
    }

    fn headline(&self, ending: &Ending) -> String {
        let id = self.id;
        let Some(session) = self.session else {
            return format!("{id} is forgotten by its node; the journal still tells of it.");
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
            (SessionState::Stopping, _) => format!("{id} is being stopped."),
            (SessionState::Stuck, _) => {
                format!("{id} is stuck: it was killed and is not dead.")
            }
            (SessionState::Failed, Ending::NotStarted { .. }) => format!("{id} failed to start."),
            (SessionState::Failed, _) => format!("{id} failed."),
            (SessionState::Stopped, Ending::Preempted) => {
                format!("{id} is stopped, because its node was preempted.")
            }
            (SessionState::Stopped, Ending::Idle) => {
                format!("{id} is stopped, because nobody used it.")
            }
            (SessionState::Stopped, Ending::Lifetime) => {
                format!("{id} is stopped, because its lifetime was over.")
            }
            (SessionState::Stopped, _) => format!("{id} is stopped."),
        }
    }

    /// From the request to readiness.
    fn start(&self) -> Vec<String> {
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
        let phases = self.phases();
        if phases.is_empty() {
            return sentences;
        }
        let total: f64 = phases.iter().map(|(_, ms)| ms).sum();
        let list: Vec<_> = phases
            .iter()
            .map(|(name, ms)| format!("{} {}", printable(name), milliseconds(*ms)))
            .collect();
        let finished = self.first(EventKind::SessionReady).is_some()
            || self
                .session
                .is_some_and(|session| session.started_at.is_some());
        let what = if finished {
            "The start took"
        } else {
            "So far the start took"
        };
        sentences.push(format!(
            "{what} {}: {}.",
            milliseconds(total),
            list.join(", ")
        ));
        sentences.extend(longest(&phases, total));
        if self.state() == Some(SessionState::Starting) {
            let phase = phases::present(phases.iter().map(|(name, _)| *name));
            sentences.push(format!(
                "It is now {} (`{phase}`).",
                phases::in_words(phase)
            ));
        }
        sentences
    }

    /// Between readiness and the end.
    fn life(&self) -> Vec<String> {
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
        sentences
    }

    /// How it ended, and what came after.
    fn end(&self, ending: &Ending) -> Vec<String> {
        let mut sentences = Vec::new();
        let reason = || {
            self.reason()
                .map_or_else(|| "no reason is known".into(), printable)
        };
        match ending {
            Ending::None => {}
            Ending::NotStarted { phase: Some(phase) } => sentences.push(format!(
                "It failed while {} (`{}`): {}.",
                phases::in_words(phase),
                printable(phase),
                without_stop(&reason())
            )),
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
            Ending::Preempted
            | Ending::Idle
            | Ending::Lifetime
            | Ending::Stopped
            | Ending::Stuck => {
                sentences.push(format!("It was ended: {}.", without_stop(&reason())));
            }
        }
        sentences.extend(self.death());
        sentences.extend(self.aftermath(ending));
        sentences
    }

    /// Kill, certificate, release.
    fn death(&self) -> Vec<String> {
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
                sentences.push("It is not released yet.".to_owned());
            }
            (None, _) if dead && released => {
                sentences.push("It was certified dead and released.".to_owned());
            }
            (None, _) => {
                if let Some(killed) = killed.filter(|_| !dead) {
                    sentences.push(format!(
                        "SIGKILL was sent at {} ({}); some process still lives.",
                        clock(killed.at),
                        ago(self.now, killed.at)
                    ));
                }
            }
        }
        sentences
    }

    /// Clean-up, which nobody waits for.
    fn aftermath(&self, ending: &Ending) -> Vec<String> {
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
                if *ending != Ending::None && self.first(EventKind::SessionReleased).is_some() =>
            {
                sentences.push("What its container left is still being removed.".to_owned());
            }
            (None, None) => {}
        }
        sentences
    }

    fn next(&self, ending: &Ending) -> Vec<String> {
        let id = self.id;
        let anew = format!("`conman run {id}` starts it anew.");
        let logs = format!("`conman logs {id}` shows what it printed.");
        match ending {
            Ending::None => self.next_while_it_lives(),
            Ending::NotStarted { phase } => {
                let mut next = vec![why_not_started(phase.as_deref(), self.session)];
                if !matches!(
                    phase.as_deref(),
                    Some("admit" | "claim" | "prepare" | "create")
                ) {
                    next.push(logs);
                }
                next.push(anew);
                next
            }
            Ending::Exited { code } => {
                let memory = self.session.and_then(|session| session.spec.memory_bytes);
                let mut next = vec![logs];
                if let (Some(137), Some(memory)) = (code, memory) {
                    next.push(format!(
                        "It may have needed more than its {} of memory: give it more with --memory.",
                        crate::human::bytes(memory)
                    ));
                }
                next.push(anew);
                next
            }
            Ending::Preempted => vec![
                "Nothing was wrong with it: its machine was going away.".to_owned(),
                format!(
                    "`conman run {id}` starts it on another node, or here after `conman readmit` \
                     if this machine stays."
                ),
            ],
            Ending::Idle => vec![
                format!("{anew} A connection does, too, where its template allows that."),
                "--idle-timeout lets it wait longer; 0 lets it wait for ever.".to_owned(),
            ],
            Ending::Lifetime => vec![anew, "--max-lifetime lets it live longer.".to_owned()],
            Ending::Stopped => vec![anew],
            Ending::Stuck => self.next_while_stuck(),
        }
    }

    fn next_while_it_lives(&self) -> Vec<String> {
        let id = self.id;
        let Some(session) = self.session else {
            return vec![format!("`conman run {id}` starts it.")];
        };
        match session.state {
            SessionState::Running => {
                let mut next: Vec<_> = session
                    .url
                    .iter()
                    .map(|url| format!("It is reached at {}.", printable(url)))
                    .collect();
                next.push(format!("`conman exec -it {id} -- sh` opens a shell in it."));
                next
            }
            SessionState::Starting => vec![
                format!(
                    "It fails by itself if it is not ready within {} of its start.",
                    duration(std::time::Duration::from_secs(
                        session.spec.ready_timeout_s.into()
                    ))
                ),
                format!("`conman events --session {id}` shows what happens."),
            ],
            SessionState::Frozen => vec!["It goes on once the registry answers again.".to_owned()],
            SessionState::Stopping
            | SessionState::Stuck
            | SessionState::Stopped
            | SessionState::Failed => Vec::new(),
        }
    }

    fn next_while_stuck(&self) -> Vec<String> {
        let mut next = vec![
            "It is not released, so that nothing else runs under its name; conman goes on trying."
                .to_owned(),
        ];
        if let Some(pid) = self.session.and_then(|session| session.pid) {
            next.push(format!(
                "As root, `cat /proc/{pid}/stack` and `ps -o pid,stat,wchan:32,cmd -p {pid}` tell \
                 what it waits for: mostly a disk or a network file system that does not answer."
            ));
        }
        next.push("If that never answers again, only a restart of the machine ends it.".to_owned());
        next
    }
}

/// The phase that took longest, and whose time the start was.
fn longest(phases: &[(&str, f64)], total: f64) -> Vec<String> {
    let Some((name, ms)) = phases.iter().max_by(|a, b| a.1.total_cmp(&b.1)) else {
        return Vec::new();
    };
    if phases.len() < 2 || total <= 0.0 {
        return Vec::new();
    }
    let of = |wanted| {
        let own = phases
            .iter()
            .filter(|(name, _)| phases::whose(name) == Some(wanted));
        milliseconds(own.map(|(_, ms)| ms).sum())
    };
    vec![
        format!(
            "What took longest was {} (`{}`): {}, {:.0} % of the whole.",
            phases::in_words(name),
            printable(name),
            milliseconds(*ms),
            ms / total * 100.0
        ),
        format!(
            "Of it all conman itself took {}, the container runtime {}, the program {}.",
            of(Whose::Conman),
            of(Whose::Runtime),
            of(Whose::Program)
        ),
    ]
}

/// What became of the generations before the latest.
fn earlier(timeline: &Timeline, latest: Option<Generation>) -> Vec<String> {
    let mut generations: Vec<Generation> = timeline
        .events
        .iter()
        .filter_map(|event| event.generation)
        .filter(|generation| Some(*generation) != latest)
        .collect();
    generations.sort_unstable();
    generations.dedup();
    if generations.is_empty() {
        return Vec::new();
    }
    let mut sentences = vec![format!(
        "It was started {} before this.",
        times(generations.len())
    )];
    let told = generations.len().saturating_sub(EARLIER_TOLD);
    for generation in &generations[told..] {
        let ends = [
            EventKind::SessionFailed,
            EventKind::SessionExited,
            EventKind::SessionKilled,
            EventKind::SessionReleased,
        ];
        let own = || {
            timeline
                .events
                .iter()
                .filter(|event| event.generation == Some(*generation))
        };
        let end = ends
            .into_iter()
            .find_map(|kind| own().rfind(|event| event.kind == kind));
        if let Some(end) = end {
            sentences.push(format!(
                "Generation {generation} ended at {}: {}.",
                clock(end.at),
                without_stop(&printable(&end.message))
            ));
        }
    }
    sentences
}

fn why_not_started(phase: Option<&str>, session: Option<&Session>) -> String {
    match (phase, session) {
        (Some("ready"), Some(session)) => {
            let spec = &session.spec;
            let bound = duration(std::time::Duration::from_secs(spec.ready_timeout_s.into()));
            match (spec.port, &spec.ready_path) {
                (Some(port), Some(path)) => format!(
                    "Check that its program answers GET {} on port {port} with 2xx or 3xx within \
                     {bound}; --ready-timeout gives it longer.",
                    printable(path)
                ),
                (Some(port), None) => format!(
                    "Check that its program listens on port {port} within {bound}, not on another \
                     port; --ready-timeout gives it longer."
                ),
                (None, _) => "Check that its program stays running.".to_owned(),
            }
        }
        (Some("create"), Some(session)) => format!(
            "Check its image `{}` and its spec: the runtime could not make the container.",
            printable(&session.spec.image)
        ),
        (Some("start" | "verify"), Some(session)) if !session.spec.command.is_empty() => format!(
            "Check that its command `{}` exists in the image and can be executed.",
            printable(&session.spec.command[0])
        ),
        (Some("prepare"), _) => "Check that the sources of its binds exist on the node.".to_owned(),
        _ => "`conman nodes` tells whether the node can start sessions at present.".to_owned(),
    }
}

/// What an exit code mostly means.
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

fn times(number: usize) -> String {
    match number {
        1 => "once".to_owned(),
        2 => "twice".to_owned(),
        _ => count(number as u64, "time"),
    }
}

/// Messages end with or without a full stop; a sentence has one.
fn without_stop(text: &str) -> &str {
    text.trim_end().trim_end_matches('.')
}
