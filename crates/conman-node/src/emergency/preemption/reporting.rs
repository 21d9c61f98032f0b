//! The report of a preemption, for people.

use std::time::Duration;

use conman_core::ownership::SessionName;
use conman_core::preemption::{self, Outcome};
use conman_linux::KeptNamespaces;
use conman_proto::{EventKind, Generation, PreemptReport, Unreleased};
use conman_registry::NewEvent;

use super::Execution;
use crate::kill_table::Fate;

/// What a preemption did, with its events.
#[derive(Debug)]
pub(in crate::emergency) struct Conclusion {
    pub(in crate::emergency) report: PreemptReport,
    pub(in crate::emergency) events: Vec<NewEvent>,
    /// Of the killed sessions: the network namespaces until now, the others until the machine is known to stay.
    pub(in crate::emergency) namespaces: KeptNamespaces,
}

impl Execution {
    pub(in crate::emergency) fn conclude(mut self, outcome: &Outcome) -> Conclusion {
        let mut unreleased = Vec::new();
        for (session, generation, why) in &outcome.unreleased {
            let Some(known) = self.sessions.get(session) else {
                continue;
            };
            known.entry.fate.send_replace(Some(Fate::Unreleased));
            if let Some(generation) = generation.and_then(Generation::new) {
                unreleased.push(Unreleased {
                    id: known.id.clone(),
                    generation,
                    reason: self.reason_of(session, why),
                });
            }
        }
        let ms = |since: Option<Duration>| since.map(|since| since.as_secs_f64() * 1_000.0);
        let report = PreemptReport {
            noticed_at: self.noticed_at,
            source: self.source.clone(),
            sessions: outcome.sessions as u64,
            killed: outcome.killed,
            certified: outcome.certified,
            released: outcome.released,
            last_kill_ms: ms(outcome.last_kill),
            last_certificate_ms: ms(outcome.last_certificate),
            last_release_ms: ms(outcome.last_release),
            unreleased,
            through: self.means.leave.through().in_flight(),
        };
        let started = format!(
            "{} sessions, notice by {}: {}",
            report.sessions, self.source, self.reason
        );
        let started = NewEvent {
            at: self.noticed_at,
            ..NewEvent::of_node(EventKind::PreemptStarted, started)
        };
        self.events.insert(0, started);
        let finished = format!(
            "{} of {} sessions released",
            report.released, report.sessions
        );
        self.events
            .push(NewEvent::of_node(EventKind::PreemptFinished, finished));
        Conclusion {
            report,
            events: self.events,
            namespaces: self.namespaces,
        }
    }

    fn reason_of(&self, session: &SessionName, why: &preemption::Unreleased) -> String {
        use preemption::Unreleased;
        match why {
            Unreleased::Claiming => "its claim was still being recorded".to_owned(),
            Unreleased::StartUnanswered => {
                "its start was sent to the runtime and not answered, and no \
                process of it appeared; it may still appear"
                    .to_owned()
            }
            Unreleased::InGrace => "its grace was not over".to_owned(),
            Unreleased::NotDead => {
                let process = self
                    .sessions
                    .get(session)
                    .and_then(|one| one.process.as_ref());
                let state = process.map(|process| crate::stuck::describe(process.pid()));
                format!("killed, and not dead: {}", state.unwrap_or_default())
            }
            Unreleased::NotRecorded => {
                "dead, but the registry did not record its release".to_owned()
            }
            Unreleased::Failed(why) => why.clone(),
        }
    }
}
