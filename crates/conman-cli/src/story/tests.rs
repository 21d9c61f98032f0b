//! Whole stories, compared as text.

use std::collections::BTreeMap;

use conman_proto::{
    EndCause, Network, NodeLoss, NodeReason, NodeStanding, OnNodeLoss, ResolvedSpec, Restarted,
    RuntimeKind, SessionEnd, SessionInFleet, SessionOwnership, SessionState, TimelinePhase,
};
use jiff::SignedDuration;

use super::*;

const BEGIN: &str = "2026-03-01T12:00:00Z";

fn at(ms: i64) -> Timestamp {
    let begin: Timestamp = BEGIN.parse().expect("a time");
    begin
        .checked_add(SignedDuration::from_millis(ms))
        .expect("in range")
}

fn generation(number: u64) -> Generation {
    Generation::new(number).expect("not zero")
}

/// Events of `alice`, recorded as they happen.
struct Scene(Timeline);

impl Scene {
    fn new() -> Self {
        let id = "alice".parse().expect("an id");
        Self(Timeline {
            id,
            events: Vec::new(),
            phases: Vec::new(),
            truncated: false,
            fleet: None,
        })
    }

    fn event(mut self, number: u64, ms: i64, kind: EventKind, message: &str) -> Self {
        self.0.events.push(Event {
            seq: self.0.events.len() as u64 + 1,
            at: at(ms),
            kind,
            node: "n1".to_owned(),
            session: Some(self.0.id.clone()),
            generation: Some(generation(number)),
            phase: None,
            cause: None,
            duration_ms: None,
            message: message.to_owned(),
        });
        self
    }

    /// Sets the cause of the last event.
    fn because(mut self, cause: EndCause) -> Self {
        self.0.events.last_mut().expect("an event").cause = Some(cause);
        self
    }

    fn phases(mut self, number: u64, phases: &[(&str, f64)]) -> Self {
        let mut started_at = at(0);
        self.0.phases = phases
            .iter()
            .map(|(name, duration_ms)| {
                let phase = TimelinePhase {
                    name: (*name).to_owned(),
                    generation: generation(number),
                    started_at,
                    duration_ms: *duration_ms,
                };
                let length = SignedDuration::from_secs_f64(duration_ms / 1e3);
                started_at = started_at.checked_add(length).expect("in range");
                phase
            })
            .collect();
        self
    }

    /// The story as `conman why` prints it.
    fn told(&self, session: Option<&Session>, now_ms: i64) -> String {
        let story = Story::tell(session, &self.0, at(now_ms));
        let mut lines = vec![story.headline];
        lines.extend(story.sentences);
        lines.extend(story.next.into_iter().map(|step| format!("-> {step}")));
        lines.join("\n")
    }
}

pub(crate) fn session(number: u64, state: SessionState, reason: Option<&str>) -> Session {
    Session {
        id: "alice".parse().expect("an id"),
        state,
        reason: reason.map(str::to_owned),
        end: None,
        exit_code: None,
        spec: ResolvedSpec {
            template: Some("python".to_owned()),
            runtime: RuntimeKind::Docker,
            image: "python:demo".to_owned(),
            command: vec!["python3".to_owned()],
            args: Vec::new(),
            env: BTreeMap::new(),
            port: Some(8080),
            ports: Vec::new(),
            strip_prefix: true,
            ready_path: None,
            ready_timeout_s: 60,
            network: Network::Loopback,
            egress: Vec::new(),
            memory_bytes: Some(268_435_456),
            disk_bytes: None,
            disk_inodes: None,
            cpus: None,
            pids: 128,
            ptys: 0,
            labels: BTreeMap::new(),
            binds: Vec::new(),
            idle_timeout_s: 600,
            idle_action: conman_proto::IdleAction::Stop,
            max_lifetime_s: 0,
            expires_at: None,
            preempt_signal: None,
            preempt_grace_ms: 0,
            tty: false,
            on_node_loss: conman_proto::OnNodeLoss::Wait,
            restarted: None,
            node_labels: BTreeMap::new(),
        },
        browser_url: None,
        port_url: None,
        url: Some("http://alice.localhost:7701/".to_owned()),
        node: "n1".to_owned(),
        runtime: RuntimeKind::Docker,
        generation: generation(number),
        pid: None,
        port: Some(8080),
        network: Network::Loopback,
        template: Some("python".to_owned()),
        created_at: at(0),
        started_at: None,
        ended_at: None,
        phases_ms: BTreeMap::new(),
        connections: 0,
    }
}

/// A session that has ended.
fn ended(state: SessionState, reason: &str, cause: EndCause, phase: Option<&str>) -> Session {
    let phase = phase.map(str::to_owned);
    Session {
        end: Some(SessionEnd { cause, phase }),
        ..session(7, state, Some(reason))
    }
}

const NOT_READY: &str = "ready: port 8080 was not ready within 60 s (connection refused); see that \
    the program listens there, or raise ready_timeout_s";

const WHOLE_START: [(&str, f64); 9] = [
    ("claim", 1.4),
    ("admit", 0.1),
    ("prepare", 0.8),
    ("create", 121.0),
    ("start", 203.0),
    ("verify", 0.6),
    ("ready", 482.0),
    ("record", 1.1),
    ("publish", 0.3),
];

fn started() -> Scene {
    Scene::new()
        .event(
            7,
            0,
            EventKind::SessionClaimed,
            "starting python:demo with docker",
        )
        .phases(7, &WHOLE_START)
        .event(7, 810, EventKind::SessionReady, "ready")
}

#[test]
fn a_session_that_runs() {
    let mut running = session(7, SessionState::Running, None);
    running.started_at = Some(at(810));
    let scene = started().event(
        7,
        60_000,
        EventKind::SessionAdopted,
        "taken over from an earlier daemon",
    );
    assert_told(&scene.told(Some(&running), 200_000),
"\
alice is running on n1, for 3 min 19 s.
Generation 7 was asked for at 2026-03-01 12:00:00.000 UTC (3 min 20 s ago), on n1.
The start took 810 ms: claim 1.4 ms, admit 0.1 ms, prepare 0.8 ms, create 121 ms, start 203 ms, verify 0.6 ms, ready 482 ms, record 1.1 ms, publish 0.3 ms.
What took longest was waiting for the program to be ready (`ready`): 482 ms, 59 % of the whole.
Of it all conman itself took 4.3 ms, the container runtime 324 ms, the program 482 ms.
It was ready at 2026-03-01 12:00:00.810 UTC.
The daemon was restarted once meanwhile and took it over without restarting it.
-> It is reached at http://alice.localhost:7701/.
-> `conman exec -it alice -- sh` opens a shell in it.");
}

#[test]
fn a_session_that_is_starting() {
    let starting = session(7, SessionState::Starting, None);
    let scene = Scene::new()
        .event(
            7,
            0,
            EventKind::SessionClaimed,
            "starting python:demo with docker",
        )
        .phases(7, &WHOLE_START[..6]);
    assert_told(&scene.told(Some(&starting), 5_000),
"\
alice is starting, for 5 s.
Generation 7 was asked for at 2026-03-01 12:00:00.000 UTC (5 s ago), on n1.
It has been starting for 5.00 s: claim 1.4 ms, admit 0.1 ms, prepare 0.8 ms, create 121 ms, start 203 ms, verify 0.6 ms, ready 4.67 s so far.
What took longest was waiting for the program to be ready (`ready`): 4.67 s, 93 % of the whole.
Of it all conman itself took 2.9 ms, the container runtime 324 ms, the program 4.67 s.
It is now waiting for the program to be ready (`ready`).
-> Its start fails if it is not ready within 1 min of its start.
-> `conman events --session alice` shows what happens.");
}

#[test]
fn a_start_that_failed_because_the_program_never_answered() {
    let failed = ended(
        SessionState::Failed,
        NOT_READY,
        EndCause::StartFailed,
        Some("ready"),
    );
    let scene = Scene::new()
        .event(
            7,
            0,
            EventKind::SessionClaimed,
            "starting python:demo with docker",
        )
        .phases(7, &WHOLE_START[..6])
        .event(
            7,
            60_331,
            EventKind::SessionKilled,
            "SIGKILL: the start failed",
        )
        .event(
            7,
            60_343,
            EventKind::SessionDead,
            "its PID namespace is empty",
        )
        .event(7, 60_346, EventKind::SessionFailed, NOT_READY)
        .event(7, 60_346, EventKind::SessionReleased, NOT_READY)
        .event(
            7,
            61_000,
            EventKind::SessionCleaned,
            "removed what its container left",
        );
    assert_told(&scene.told(Some(&failed), 90_000),
"\
alice failed to start.
Generation 7 was asked for at 2026-03-01 12:00:00.000 UTC (1 min 30 s ago), on n1.
The start lasted 1 min: claim 1.4 ms, admit 0.1 ms, prepare 0.8 ms, create 121 ms, start 203 ms, verify 0.6 ms, ready 1 min until it failed.
What took longest was waiting for the program to be ready (`ready`): 1 min, 99 % of the whole.
Of it all conman itself took 2.9 ms, the container runtime 324 ms, the program 1 min.
It failed while waiting for the program to be ready (`ready`): port 8080 was not ready within 60 s (connection refused); see that the program listens there, or raise ready_timeout_s.
12 ms after SIGKILL it was certified dead, 15 ms after SIGKILL it was released.
What its container left is removed.
-> Check that its program listens on port 8080 within 1 min, not on another port; --ready-timeout gives it longer.
-> Its output was removed with its container; `conman logs -f alice` right after its next start shows it.
-> `conman run alice` starts it again.");
}

#[test]
fn a_start_that_failed_before_any_phase_was_told() {
    let reason = "create: image `python:demo` is not on this node; load it first";
    let failed = ended(
        SessionState::Failed,
        reason,
        EndCause::StartFailed,
        Some("create"),
    );
    let scene = Scene::new()
        .event(
            7,
            0,
            EventKind::SessionClaimed,
            "starting python:demo with docker",
        )
        .event(7, 31, EventKind::SessionFailed, reason)
        .event(7, 31, EventKind::SessionReleased, reason);
    assert_told(&scene.told(Some(&failed), 5_000),
"\
alice failed to start.
Generation 7 was asked for at 2026-03-01 12:00:00.000 UTC (5 s ago), on n1.
The start lasted 31 ms until it failed.
It failed while creating the container (`create`): image `python:demo` is not on this node; load it first.
-> Check its image `python:demo` and its spec: the runtime could not make the container.
-> `conman run alice` starts it again.");
}

#[test]
fn a_start_whose_program_ended_at_once() {
    let reason = "the program ended before it was ready, with exit code 3";
    let mut failed = ended(
        SessionState::Failed,
        reason,
        EndCause::Exited,
        Some("ready"),
    );
    failed.exit_code = Some(3);
    let scene = Scene::new()
        .event(
            7,
            0,
            EventKind::SessionClaimed,
            "starting python:demo with docker",
        )
        .event(7, 406, EventKind::SessionDead, "its PID namespace is empty")
        .event(7, 408, EventKind::SessionFailed, reason)
        .event(7, 408, EventKind::SessionReleased, reason)
        .event(
            7,
            700,
            EventKind::SessionCleaned,
            "removed what its container left",
        );
    assert_told(&scene.told(Some(&failed), 5_000),
"\
alice failed to start.
Generation 7 was asked for at 2026-03-01 12:00:00.000 UTC (5 s ago), on n1.
The start lasted 406 ms until it failed.
It failed while waiting for the program to be ready (`ready`): the program ended before it was ready, with exit code 3.
It was certified dead and released.
What its container left is removed.
-> Check its command and arguments: its program must stay running.
-> Its output was removed with its container; `conman logs -f alice` right after its next start shows it.
-> `conman run alice` starts it again.");
}

#[test]
fn a_start_whose_failure_the_journal_does_not_tell_yet() {
    let failed = ended(
        SessionState::Failed,
        NOT_READY,
        EndCause::StartFailed,
        Some("ready"),
    );
    let scene = Scene::new()
        .event(
            7,
            0,
            EventKind::SessionClaimed,
            "starting python:demo with docker",
        )
        .event(
            7,
            60_331,
            EventKind::SessionKilled,
            "SIGKILL: the start failed",
        )
        .event(
            7,
            60_343,
            EventKind::SessionDead,
            "its PID namespace is empty",
        );
    assert_told(&scene.told(Some(&failed), 60_400),
"\
alice failed to start.
Generation 7 was asked for at 2026-03-01 12:00:00.000 UTC (1 min ago), on n1.
The start lasted 1 min until it failed.
It failed while waiting for the program to be ready (`ready`): port 8080 was not ready within 60 s (connection refused); see that the program listens there, or raise ready_timeout_s.
12 ms after SIGKILL it was certified dead.
What its container left is still being removed.
-> Check that its program listens on port 8080 within 1 min, not on another port; --ready-timeout gives it longer.
-> `conman logs alice` shows what it printed.
-> `conman run alice` starts it again.");
}

#[test]
fn a_session_that_is_starting_and_whose_process_is_known() {
    let mut starting = session(7, SessionState::Starting, None);
    starting.pid = Some(4711);
    let claimed = "starting python:demo with docker";
    let scene = Scene::new().event(7, 0, EventKind::SessionClaimed, claimed);
    assert_told(
        &scene.told(Some(&starting), 5_000),
        "\
alice is starting, for 5 s.
Generation 7 was asked for at 2026-03-01 12:00:00.000 UTC (5 s ago), on n1.
It is now waiting for the program to be ready (`ready`).
-> Its start fails if it is not ready within 1 min of its start.
-> `conman events --session alice` shows what happens.",
    );
}

#[test]
fn a_session_whose_node_was_preempted() {
    let reason = "preempted: preemption notice";
    let stopped = ended(SessionState::Stopped, reason, EndCause::Preempted, None);
    let scene = started()
        .event(
            7,
            3_600_000,
            EventKind::SessionKilled,
            "SIGKILL for the preemption",
        )
        .event(
            7,
            3_600_042,
            EventKind::SessionDead,
            "its PID namespace is empty",
        )
        .event(7, 3_600_051, EventKind::SessionReleased, "preempted");
    assert_told(&scene.told(Some(&stopped), 3_660_000),
"\
alice is stopped, because its node was preempted.
Generation 7 was asked for at 2026-03-01 12:00:00.000 UTC (1 h 1 min ago), on n1.
The start took 810 ms: claim 1.4 ms, admit 0.1 ms, prepare 0.8 ms, create 121 ms, start 203 ms, verify 0.6 ms, ready 482 ms, record 1.1 ms, publish 0.3 ms.
What took longest was waiting for the program to be ready (`ready`): 482 ms, 59 % of the whole.
Of it all conman itself took 4.3 ms, the container runtime 324 ms, the program 482 ms.
It was ready at 2026-03-01 12:00:00.810 UTC and ran for 59 min 59 s.
It was ended because its node was preempted: preemption notice.
42 ms after SIGKILL it was certified dead, 51 ms after SIGKILL it was released.
What its container left is still being removed.
-> Nothing was wrong with it: its machine was preempted.
-> `conman run alice` starts it on another node, or here after `conman readmit` if this machine stays.");
}

#[test]
fn a_session_that_the_fleet_restarted_and_one_that_it_will() {
    let mut running = session(7, SessionState::Running, None);
    running.spec.on_node_loss = OnNodeLoss::Restart;
    running.spec.restarted = Some(Restarted {
        from: "n3".to_owned(),
        because: NodeLoss::Lost,
        count: 2,
        since: at(0),
    });
    let told = started().told(Some(&running), 3_660_000);
    let sentence = "The fleet restarted it automatically, because n3, where it was, was lost; that \
         happened twice in a row.";
    assert!(told.lines().any(|line| line == sentence), "{told}");

    if let Some(restarted) = &mut running.spec.restarted {
        restarted.count = 0;
    }
    let told = started().told(Some(&running), 3_660_000);
    let sentence = "A connection asked for it, and n3, where it was, was lost.";
    assert!(told.lines().any(|line| line == sentence), "{told}");

    let reason = "preempted: preemption notice";
    let mut stopped = ended(SessionState::Stopped, reason, EndCause::Preempted, None);
    stopped.spec.on_node_loss = OnNodeLoss::Restart;
    let told = started().told(Some(&stopped), 3_660_000);
    assert!(
        told.contains("-> The fleet starts it on another node automatically"),
        "{told}"
    );
    let why = "not restarted any more: 5 restarts followed each other within 10 minutes; the \
               next one is by hand";
    let scene = started().event(7, 3_600_060, EventKind::RestartGivenUp, why);
    let told = scene.told(Some(&stopped), 3_660_000);
    assert!(
        told.contains("It is not restarted any more: 5 restarts"),
        "{told}"
    );
    assert!(
        told.contains("-> `conman run alice` starts it on another node"),
        "{told}"
    );
}

#[test]
fn a_session_that_is_stuck() {
    let mut stuck = session(
        7,
        SessionState::Stuck,
        Some(
            "stopped through the API; killed, and not dead: process 4711 is in state D (disk sleep)",
        ),
    );
    stuck.pid = Some(4711);
    let scene = started()
        .event(
            7,
            90_000,
            EventKind::SessionKilled,
            "SIGKILL: stopped through the API",
        )
        .event(
            7,
            95_000,
            EventKind::SessionStuck,
            "stopped through the API; killed, and not dead: process 4711 is in state D (disk sleep)",
        );
    assert_told(&scene.told(Some(&stuck), 120_000),
"\
alice is stuck: it was killed and is not dead.
Generation 7 was asked for at 2026-03-01 12:00:00.000 UTC (2 min ago), on n1.
The start took 810 ms: claim 1.4 ms, admit 0.1 ms, prepare 0.8 ms, create 121 ms, start 203 ms, verify 0.6 ms, ready 482 ms, record 1.1 ms, publish 0.3 ms.
What took longest was waiting for the program to be ready (`ready`): 482 ms, 59 % of the whole.
Of it all conman itself took 4.3 ms, the container runtime 324 ms, the program 482 ms.
It was ready at 2026-03-01 12:00:00.810 UTC and ran for 1 min 29 s.
It could not be ended: stopped through the API; killed, and not dead: process 4711 is in state D (disk sleep).
SIGKILL was sent at 2026-03-01 12:01:30.000 UTC (30 s ago).
-> It is not released, so that nothing else runs under its name; conman keeps trying.
-> As root, `cat /proc/4711/stack` and `ps -o pid,stat,wchan:32,cmd -p 4711` show what it waits for: mostly a disk or a network file system that does not answer.
-> If that never answers again, only a restart of the machine ends it.");
}

#[test]
fn a_session_whose_program_was_killed_for_its_memory() {
    let mut failed = session(
        7,
        SessionState::Failed,
        Some("the program ended by itself, with exit code 137"),
    );
    failed.exit_code = Some(137);
    let scene = started()
        .event(
            7,
            20_000,
            EventKind::SessionExited,
            "the program ended by itself, with exit code 137",
        )
        .event(
            7,
            20_001,
            EventKind::SessionDead,
            "its PID namespace is empty",
        )
        .event(7, 20_004, EventKind::SessionReleased, "exited")
        .event(
            7,
            21_000,
            EventKind::CleanupFailed,
            "docker does not answer.",
        )
        .event(
            7,
            23_000,
            EventKind::CleanupFailed,
            "docker does not answer.",
        );
    assert_told(&scene.told(Some(&failed), 30_000),
"\
alice failed.
Generation 7 was asked for at 2026-03-01 12:00:00.000 UTC (30 s ago), on n1.
The start took 810 ms: claim 1.4 ms, admit 0.1 ms, prepare 0.8 ms, create 121 ms, start 203 ms, verify 0.6 ms, ready 482 ms, record 1.1 ms, publish 0.3 ms.
What took longest was waiting for the program to be ready (`ready`): 482 ms, 59 % of the whole.
Of it all conman itself took 4.3 ms, the container runtime 324 ms, the program 482 ms.
It was ready at 2026-03-01 12:00:00.810 UTC and ran for 19 s.
Its program ended by itself with exit code 137 (SIGKILL: mostly the memory limit).
It was certified dead and released.
Removing what its container left failed twice and is tried again: docker does not answer.
-> `conman logs alice` shows what it printed.
-> It may have needed more than its 256 MiB of memory: give it more with --memory.
-> `conman run alice` starts it again.");
}

#[test]
fn earlier_generations_are_told_in_short_and_the_oldest_only_counted() {
    let mut scene = Scene::new();
    for number in 1..=5 {
        let begin = i64::try_from(number).expect("small") * 1_000;
        scene = scene
            .event(number, begin, EventKind::SessionClaimed, "claimed")
            .event(
                number,
                begin + 500,
                EventKind::SessionKilled,
                "SIGKILL: idle for 60 s",
            );
    }
    scene.0.truncated = true;
    let mut running = session(6, SessionState::Running, None);
    running.started_at = Some(at(9_000));
    assert_told(
        &scene.told(Some(&running), 10_000),
        "\
alice is running on n1, for 1 s.
Its oldest events are no longer in the journal.
It was started at least 5 times before this.
Generation 3 ended at 2026-03-01 12:00:03.500 UTC: SIGKILL: idle for 60 s.
Generation 4 ended at 2026-03-01 12:00:04.500 UTC: SIGKILL: idle for 60 s.
Generation 5 ended at 2026-03-01 12:00:05.500 UTC: SIGKILL: idle for 60 s.
Generation 6 was asked for at 2026-03-01 12:00:00.000 UTC (10 s ago), on n1.
It was ready at 2026-03-01 12:00:09.000 UTC.
-> It is reached at http://alice.localhost:7701/.
-> `conman exec -it alice -- sh` opens a shell in it.",
    );
}

#[test]
fn a_session_that_its_node_forgot_is_told_from_the_journal_alone() {
    let scene = started()
        .event(
            7,
            700_000,
            EventKind::SessionKilled,
            "SIGKILL: idle for 600 s",
        )
        .event(
            7,
            700_009,
            EventKind::SessionDead,
            "its PID namespace is empty",
        )
        .event(7, 700_012, EventKind::SessionReleased, "idle for 600 s")
        .because(EndCause::Idle);
    assert_told(&scene.told(None, 900_000),
"\
alice was forgotten by its node; the journal still has its events.
Generation 7 was asked for at 2026-03-01 12:00:00.000 UTC (15 min ago), on n1.
The start took 810 ms: claim 1.4 ms, admit 0.1 ms, prepare 0.8 ms, create 121 ms, start 203 ms, verify 0.6 ms, ready 482 ms, record 1.1 ms, publish 0.3 ms.
What took longest was waiting for the program to be ready (`ready`): 482 ms, 59 % of the whole.
Of it all conman itself took 4.3 ms, the container runtime 324 ms, the program 482 ms.
It was ready at 2026-03-01 12:00:00.810 UTC and ran for 11 min 39 s.
It was ended: idle for 600 s.
9.0 ms after SIGKILL it was certified dead, 12 ms after SIGKILL it was released.
What its container left is still being removed.
-> `conman run alice` starts it again. A connection does, too, where its template allows that.
-> --idle-timeout lets it wait longer; 0 lets it wait for ever.");
}

#[test]
fn what_a_session_wrote_cannot_drive_the_terminal() {
    let hostile = "\u{1b}]0;owned\u{7}";
    let failed = ended(SessionState::Failed, hostile, EndCause::Exited, None);
    let scene = started().event(7, 900, EventKind::SessionFailed, hostile);
    let told = scene.told(Some(&failed), 1_000);
    assert!(
        !told.contains('\u{1b}') && told.contains("\\u{1b}"),
        "{told}"
    );
}

fn assert_told(told: &str, expected: &str) {
    assert_eq!(told, expected);
}

fn fleet(ownership: SessionOwnership, node: &str, standing: NodeStanding) -> SessionInFleet {
    SessionInFleet {
        ownership,
        node: Some(node.to_owned()),
        standing: Some(standing),
        generation: None,
        takers: Vec::new(),
        refused: Vec::new(),
        unasked: Vec::new(),
        registry_error: None,
    }
}

fn reason(node: &str, why: &str) -> NodeReason {
    NodeReason {
        node: node.to_owned(),
        why: why.to_owned(),
    }
}

/// `alice` on n1, and then on n2.
fn moved(end: Option<(EventKind, &str)>) -> Scene {
    let mut scene = Scene::new()
        .event(7, 0, EventKind::SessionClaimed, "starting")
        .event(7, 100, EventKind::SessionReady, "ready");
    if let Some((kind, message)) = end {
        scene = scene.event(7, 5_000, kind, message);
    }
    scene = scene
        .event(9, 20_000, EventKind::SessionClaimed, "starting")
        .event(9, 20_100, EventKind::SessionReady, "ready");
    for event in &mut scene.0.events {
        if event.generation == Some(generation(9)) {
            "n2".clone_into(&mut event.node);
        }
    }
    scene.0.fleet = Some(fleet(SessionOwnership::Owned, "n2", NodeStanding::Live));
    scene
}

fn running_on_n2() -> Session {
    Session {
        node: "n2".to_owned(),
        started_at: Some(at(20_100)),
        created_at: at(20_000),
        ..session(9, SessionState::Running, None)
    }
}

#[test]
fn a_session_that_another_node_has_taken_over_says_from_whom_and_when() {
    let story = moved(None).told(Some(&running_on_n2()), 30_000);
    for part in [
        "alice is running on n2",
        "Generation 7 ran on n1, and no node that can be asked saw it end.",
        "n2 took it over from n1 at 2026-03-01 12:00:20.000 UTC, without a release by n1.",
    ] {
        assert!(story.contains(part), "{part}: {story}");
    }
    let drained = Some((EventKind::SessionReleased, "drained: room for others"));
    let story = moved(drained).told(Some(&running_on_n2()), 30_000);
    for part in [
        "Generation 7 on n1 ended at 2026-03-01 12:00:05.000 UTC: drained: room for others.",
        "n1 gave it up, and n2 started it at 2026-03-01 12:00:20.000 UTC.",
    ] {
        assert!(story.contains(part), "{part}: {story}");
    }
}

#[test]
fn a_session_whose_node_is_lost_says_that_it_runs_nowhere_and_who_would_take_it() {
    let mut scene = started();
    let mut lost = fleet(SessionOwnership::Lost, "n1", NodeStanding::Fenced);
    lost.refused = vec![
        reason("n2", "is draining"),
        reason("n3", "has its 5 sessions"),
    ];
    lost.unasked = vec![reason("n1", "it cannot be connected to")];
    scene.0.fleet = Some(lost);
    let shown = session(7, SessionState::Running, None);
    let story = scene.told(Some(&shown), 60_000);
    for part in [
        "alice is not running: its node n1 was declared dead, and no other has started it since.",
        "No node would start it now: n2 is draining; n3 has its 5 sessions.",
        "n1 could not be asked what it knows: it cannot be connected to.",
        "-> `conman run alice` starts it again once a node has room.",
    ] {
        assert!(story.contains(part), "{part}: {story}");
    }
    if let Some(fleet) = &mut scene.0.fleet {
        fleet.takers.push("n2".to_owned());
    }
    let story = scene.told(Some(&shown), 60_000);
    assert!(!story.contains("No node would"), "{story}");
    assert!(
        story.contains("starts it again, on n2 as it looks now"),
        "{story}"
    );
}

#[test]
fn a_session_whose_node_is_silent_is_not_called_forgotten() {
    let mut scene = Scene::new();
    scene.0.fleet = Some(fleet(SessionOwnership::Owned, "n1", NodeStanding::Silent));
    let story = scene.told(None, 1_000);
    for part in [
        "alice is on n1, which has been silent for a while.",
        "n1 has not renewed its ownership: what runs there is frozen, and when n1",
    ] {
        assert!(story.contains(part), "{part}: {story}");
    }
    let mut scene = Scene::new();
    let mut unknown = fleet(SessionOwnership::Unknown, "n1", NodeStanding::Live);
    unknown.registry_error = Some("etcd did not answer.".to_owned());
    scene.0.fleet = Some(unknown);
    let story = scene.told(None, 1_000);
    assert!(
        story.contains("The registry cannot be asked who owns it: etcd did not answer.\n"),
        "{story}"
    );
}

#[test]
fn a_session_of_a_drained_node_says_so_and_what_to_do() {
    let scene = started().event(7, 9_000, EventKind::SessionKilled, "drained: room");
    let story = scene.told(
        Some(&ended(
            SessionState::Stopped,
            "drained: room",
            EndCause::Drained,
            None,
        )),
        60_000,
    );
    for part in [
        "alice is stopped, because its node was drained.",
        "It was ended because its node was drained: room.",
        "`conman undrain`",
    ] {
        assert!(story.contains(part), "{part}: {story}");
    }
}
