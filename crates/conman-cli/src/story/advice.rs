//! What to do next: a table by the session's state and the typed cause of its end.

use std::time::Duration;

use conman_proto::{EndCause, EventKind, NodeState, OnNodeLoss, SessionState};

use super::fleet;
use super::latest::Latest;
use crate::human::{bytes, duration};
use crate::phases;
use Case::{
    Blocked, EndedBy, FailedIn, InState, NoNode, NoTaker, ProgramEnded, Restarts, Startable,
    Unreachable,
};

/// What advice depends on.
#[derive(Debug, Clone, Copy)]
pub(super) enum Case<'a> {
    /// The node that owns it does not answer for it.
    Unreachable,
    /// No node that can be reached has it.
    NoNode,
    /// It has not ended.
    InState(SessionState),
    /// It ended after it was ready, or was ended before.
    EndedBy(EndCause),
    /// Its start failed in this phase.
    FailedIn(&'a str),
    /// Its program ended before it was ready.
    ProgramEnded,
    /// The fleet starts it again.
    Restarts,
    /// A client can start it again.
    Startable,
    /// Its node, outside a fleet, starts nothing in this state.
    Blocked(NodeState),
    /// No node of the fleet would start it.
    NoTaker,
}

const NODES: &str = "`conman nodes` shows the state of the nodes.";
const LOGS: &str = "`conman logs {id}` shows what it printed, while its log is kept; \
    `conman logs -f {id}` right after its next start shows that in any case.";
const COMMAND: &str = "Check that its command `{command}` exists in the image and can be executed.";

/// Advice for a case. A line with a `{value}` that the session does not have is not shown.
fn advice(case: Case<'_>) -> &'static [&'static str] {
    match case {
        Unreachable => &[
            "Wait: it continues when its node does, or is started again elsewhere.",
            NODES,
        ],
        NoNode => &[NODES],
        InState(state) => in_state(state),
        EndedBy(cause) => ended_by(cause),
        FailedIn("prepare") => &["Check that the sources of its binds exist on the node."],
        FailedIn("create") => {
            &["Check its image `{image}` and its spec: the runtime could not make the container."]
        }
        FailedIn("start" | "verify") => &[COMMAND, LOGS],
        FailedIn(phases::READY) => &[
            "Check that its program listens on port {port} within {ready_timeout}, not on another \
             port; --ready-timeout gives it longer.",
            "It is ready once it answers GET {ready_path} with 2xx or 3xx.",
            LOGS,
        ],
        FailedIn(_) => &[NODES],
        ProgramEnded => &[
            "Check its command and arguments: its program must stay running.",
            LOGS,
        ],
        Restarts => {
            &["The fleet starts it on another node automatically, as soon as one has room."]
        }
        Startable => &[
            "`conman run {id}` starts it again; a connection does, too, where its template allows \
             that.",
            "As it looks now, it would start on {taker}.",
        ],
        Blocked(NodeState::Preempted) => {
            &["Its node starts nothing before `conman readmit`; then it can be started again."]
        }
        Blocked(NodeState::Draining) => {
            &["Its node starts nothing before `conman undrain`; then it can be started again."]
        }
        Blocked(NodeState::Cordoned) => {
            &["Its node starts nothing before `conman uncordon`; then it can be started again."]
        }
        Blocked(NodeState::Live | NodeState::Recovering | NodeState::Stopping) => {
            &["Wait until the daemon is ready; then it can be started again."]
        }
        NoTaker => &["It can be started again once a node takes it.", NODES],
    }
}

fn in_state(state: SessionState) -> &'static [&'static str] {
    match state {
        SessionState::Starting => &[
            "Its start fails if it is not ready within {ready_timeout} of its start.",
            "`conman events --session {id}` shows what happens.",
        ],
        SessionState::Running => &[
            "It is reached at {url}.",
            "`conman exec -it {id} -- sh` opens a shell in it.",
        ],
        SessionState::Frozen => &[
            "Wait: it continues once its node owns it again.",
            "If its node is declared dead first, its `on_node_loss` decides whether the next \
             connection or the fleet starts it on another node.",
            NODES,
        ],
        SessionState::Paused => {
            &["The next connection resumes it, and so does `conman resume {id}`."]
        }
        SessionState::Stopping => {
            &["Wait until it has ended; `conman run {id}` starts it again then."]
        }
        SessionState::Stuck => &[
            "It is not released, so that nothing else runs under its name; conman keeps trying.",
            "As root, `cat /proc/{pid}/stack` and `ps -o pid,stat,wchan:32,cmd -p {pid}` show what \
             it waits for: mostly a disk or a network file system that does not answer.",
            "If that never answers again, only a restart of the machine ends it.",
        ],
        SessionState::Stopped | SessionState::Failed => &[],
    }
}

fn ended_by(cause: EndCause) -> &'static [&'static str] {
    match cause {
        EndCause::Preempted => &["Nothing was wrong with it: its node was preempted."],
        EndCause::Drained => &["Nothing was wrong with it: its node was drained."],
        EndCause::NodeLost => &["Nothing was wrong with it: its node was lost."],
        EndCause::Idle => &["--idle-timeout lets it wait longer; 0 disables the limit."],
        EndCause::Lifetime => &["--max-lifetime lets it live longer."],
        EndCause::DiskLimit => &["--disk gives it more."],
        EndCause::OutOfMemory => &["--memory gives it more."],
        EndCause::Exited => &[
            LOGS,
            "It may have needed more than its {exceeded_memory} of memory: give it more with \
             --memory.",
        ],
        EndCause::Unknown => &[LOGS],
        EndCause::Unrecorded
        | EndCause::Deleted
        | EndCause::Killed
        | EndCause::ShutDown
        | EndCause::Disowned
        | EndCause::StartFailed => &[],
    }
}

impl Latest<'_> {
    pub(super) fn next(&self) -> Vec<String> {
        let lines = self.cases().into_iter().flat_map(advice);
        lines.filter_map(|line| self.filled(line)).collect()
    }

    fn cases(&self) -> Vec<Case<'_>> {
        let again = match self.is_restarted() {
            true => Restarts,
            false => self.startable(),
        };
        match fleet::unreported(self.timeline, self.session) {
            Some((NoNode, _)) if matches!(again, NoTaker) => return vec![NoTaker],
            Some((NoNode, _)) => return vec![NoNode, again],
            Some((case, _)) => return vec![case],
            None => {}
        }
        if let Some(state) = self.state().filter(|state| !state.is_ended()) {
            return vec![InState(state)];
        }
        let cause = self.cause().unwrap_or(EndCause::Unknown);
        match (cause, self.failed_phase()) {
            (EndCause::Preempted | EndCause::Drained | EndCause::NodeLost, _) => {
                vec![EndedBy(cause), again]
            }
            (EndCause::Exited, Some(_)) => vec![ProgramEnded, self.startable()],
            (EndCause::StartFailed, Some(phase)) => vec![FailedIn(phase), self.startable()],
            _ => vec![EndedBy(cause), self.startable()],
        }
    }

    /// Whether a client can start it now.
    fn startable(&self) -> Case<'static> {
        match (self.node, &self.timeline.fleet) {
            (Some(NodeState::Live) | None, None) => Startable,
            (Some(state), None) => Blocked(state),
            (_, Some(fleet)) if fleet.takers.is_empty() && !fleet.refused.is_empty() => NoTaker,
            (_, Some(_)) => Startable,
        }
    }

    /// Whether the fleet restarts it after the loss of its node.
    fn is_restarted(&self) -> bool {
        let session = self.session;
        session.is_some_and(|session| session.spec.on_node_loss == OnNodeLoss::Restart)
            && self.first(EventKind::RestartGivenUp).is_none()
    }

    /// A line with its values; `None` if one of them is absent.
    fn filled(&self, line: &str) -> Option<String> {
        let parts = line.split(['{', '}']).enumerate();
        parts
            .map(|(index, part)| match index % 2 {
                0 => Some(part.to_owned()),
                _ => self.value(part),
            })
            .collect()
    }

    fn value(&self, name: &str) -> Option<String> {
        let session = self.session;
        let spec = session.map(|session| &session.spec);
        match name {
            "id" => Some(self.timeline.id.to_string()),
            "taker" => self.timeline.fleet.as_ref()?.takers.first().cloned(),
            "url" => session.and_then(|it| it.browser_url.clone().or_else(|| it.url.clone())),
            "pid" => session?.pid.map(|pid| pid.to_string()),
            "port" => spec?.port.map(|port| port.to_string()),
            "ready_path" => spec?.ready_path.clone(),
            "ready_timeout" => {
                let timeout = Duration::from_secs(spec?.ready_timeout_s.into());
                Some(duration(timeout))
            }
            "image" => Some(spec?.image.clone()),
            "command" => spec?.command.first().cloned(),
            "exceeded_memory" => {
                let killed = session?.exit_code == Some(137);
                spec?.memory_bytes.filter(|_| killed).map(bytes)
            }
            _ => None,
        }
    }
}
