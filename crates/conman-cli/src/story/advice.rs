//! What to do next.

use conman_proto::{EndCause, EventKind, OnNodeLoss, Session, SessionState};

use super::chapter::{Chapter, Ending};
use crate::human::{bytes, duration, printable};
use crate::phases;

pub(super) const RESTARTS: &str =
    "The fleet starts it on another node automatically, as soon as one has room.";

impl Chapter<'_> {
    pub(super) fn next(&self, ending: &Ending) -> Vec<String> {
        let id = self.id;
        if self.state() == Some(SessionState::Stopping) {
            return vec![format!(
                "Wait until it has ended; `conman run {id}` starts it again then."
            )];
        }
        let again = format!("`conman run {id}` starts it again.");
        let logs = match self.first(EventKind::SessionCleaned) {
            None => format!("`conman logs {id}` shows what it printed."),
            Some(_) => format!(
                "Its output was removed with its container; `conman logs -f {id}` right after its \
                 next start shows it."
            ),
        };
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
                next.push(again);
                next
            }
            Ending::Exited { code } => {
                let memory = self.session.and_then(|session| session.spec.memory_bytes);
                let mut next = vec![logs];
                if let (Some(137), Some(memory)) = (code, memory) {
                    next.push(format!(
                        "It may have needed more than its {} of memory: give it more with --memory.",
                        bytes(memory)
                    ));
                }
                next.push(again);
                next
            }
            Ending::Ended(cause) => self.next_after(*cause, again),
            Ending::Stuck => self.next_while_stuck(),
        }
    }

    /// After an end on purpose.
    fn next_after(&self, cause: EndCause, again: String) -> Vec<String> {
        let id = self.id;
        let lost = match cause {
            EndCause::Preempted => ("preempted", " after `conman readmit`"),
            EndCause::Drained => ("drained", " after `conman undrain`"),
            EndCause::NodeLost => ("lost", ""),
            EndCause::Idle => {
                return vec![
                    format!("{again} A connection does, too, where its template allows that."),
                    "--idle-timeout lets it wait longer; 0 disables the limit.".to_owned(),
                ];
            }
            EndCause::Lifetime => {
                return vec![again, "--max-lifetime lets it live longer.".to_owned()];
            }
            EndCause::DiskLimit => return vec![again, "--disk gives it more.".to_owned()],
            EndCause::Unrecorded
            | EndCause::Deleted
            | EndCause::ShutDown
            | EndCause::Disowned
            | EndCause::Exited
            | EndCause::StartFailed
            | EndCause::Unknown => return vec![again],
        };
        let (what, here) = lost;
        let nothing = format!("Nothing was wrong with it: its node was {what}.");
        let then = match self.restarts() {
            true => RESTARTS.to_owned(),
            false => format!(
                "`conman run {id}` starts it on another node, or on this one{here}; a connection \
                 does, too, where its template allows that."
            ),
        };
        vec![nothing, then]
    }

    pub(super) fn next_while_it_lives(&self) -> Vec<String> {
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
                    "Its start fails if it is not ready within {} of its start.",
                    duration(std::time::Duration::from_secs(
                        session.spec.ready_timeout_s.into()
                    ))
                ),
                format!("`conman events --session {id}` shows what happens."),
            ],
            SessionState::Frozen => {
                let otherwise = match self.restarts() {
                    true => "the fleet starts it on another node automatically",
                    false => "the next connection may start it on another node",
                };
                vec![
                    "Wait: it continues once its node owns it again.".to_owned(),
                    format!(
                        "If its node is declared dead first, {otherwise}; `conman nodes` shows the \
                         nodes."
                    ),
                ]
            }
            SessionState::Paused => vec![format!(
                "The next connection resumes it, and so does `conman resume {id}`."
            )],
            SessionState::Stopping
            | SessionState::Stuck
            | SessionState::Stopped
            | SessionState::Failed => Vec::new(),
        }
    }

    pub(super) fn next_while_stuck(&self) -> Vec<String> {
        let mut next = vec![
            "It is not released, so that nothing else runs under its name; conman keeps trying."
                .to_owned(),
        ];
        if let Some(pid) = self.session.and_then(|session| session.pid) {
            next.push(format!(
                "As root, `cat /proc/{pid}/stack` and `ps -o pid,stat,wchan:32,cmd -p {pid}` show \
                 what it waits for: mostly a disk or a network file system that does not answer."
            ));
        }
        next.push("If that never answers again, only a restart of the machine ends it.".to_owned());
        next
    }
}

impl Chapter<'_> {
    /// Whether the fleet restarts it.
    pub(super) fn restarts(&self) -> bool {
        let wants = |session: &Session| session.spec.on_node_loss == OnNodeLoss::Restart;
        self.session.is_some_and(wants) && self.first(EventKind::RestartGivenUp).is_none()
    }
}

fn why_not_started(phase: Option<&str>, session: Option<&Session>) -> String {
    match (phase, session) {
        (
            Some(phases::READY),
            Some(Session {
                exit_code: Some(_), ..
            }),
        ) => "Check its command and arguments: its program must stay running.".to_owned(),
        (Some(phases::READY), Some(session)) => {
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
        _ => "`conman nodes` shows whether the node can start sessions at present.".to_owned(),
    }
}
