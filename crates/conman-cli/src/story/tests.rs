//! Stories, compared as text.

mod lists;
mod moves;
mod starts;

use std::collections::BTreeMap;

use conman_proto::{
    EndCause, Event, EventKind, Generation, Network, NodeLoss, NodeReason, NodeStanding,
    OnNodeLoss, ResolvedSpec, Restarted, RuntimeKind, SessionEnd, SessionInFleet, SessionOwnership,
    SessionState, TimelinePhase,
};
use conman_testkit::resolved_spec;
use jiff::SignedDuration;

use super::*;
use EventKind::{
    CleanupFailed, EventsLost, NodeFrozen, NodeThawed, RestartGivenUp, SessionAdopted,
    SessionClaimed, SessionCleaned, SessionDead, SessionExited, SessionFailed, SessionKilled,
    SessionPaused, SessionReady, SessionReleased, SessionResumed, SessionStuck,
};

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

    /// Of generation 7, on n1.
    fn at(self, ms: i64, kind: EventKind, message: &str) -> Self {
        self.event(7, ms, kind, message)
    }

    /// Of n1 itself.
    fn of_node(self, ms: i64, kind: EventKind, message: &str) -> Self {
        let mut scene = self.at(ms, kind, message);
        let event = scene.0.events.last_mut().expect("an event");
        (event.session, event.generation) = (None, None);
        scene
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

    /// The story as `conman why` prints it, without the blanks that align it.
    fn text(&self, session: Option<&Session>, now_ms: i64) -> String {
        self.text_with(session, None, now_ms)
    }

    /// The same where the node is outside a fleet.
    fn text_with(&self, session: Option<&Session>, node: Option<NodeState>, now_ms: i64) -> String {
        let story = Story::new(session, &self.0, node, at(now_ms)).to_string();
        let lines = story.lines().map(|line| {
            let words: Vec<&str> = line.split_whitespace().collect();
            words.join(" ")
        });
        lines.collect::<Vec<_>>().join("\n")
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
            command: vec!["python3".to_owned()],
            port: Some(8080),
            memory_bytes: Some(268_435_456),
            idle_timeout_s: 600,
            ..resolved_spec(RuntimeKind::Docker, "python:demo")
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
        oom_kills: 0,
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

const START: &str = "\
Start: 810 ms (claim 1.4 ms, admit 0.1 ms, prepare 0.8 ms, create 121 ms, start 203 ms, verify 0.6 ms, ready 482 ms, record 1.1 ms, publish 0.3 ms)
Longest: waiting for the program to be ready (`ready`), 482 ms";

const AGAIN: &str = "`conman run alice` starts it again; a connection does, too, where its template \
    allows that.";

fn started() -> Scene {
    Scene::new()
        .at(0, SessionClaimed, "starting python:demo with docker")
        .phases(7, &WHOLE_START)
        .at(810, SessionReady, "ready")
}

#[test]
fn a_session_that_runs() {
    let mut running = session(7, SessionState::Running, None);
    running.started_at = Some(at(810));
    let scene = started().at(60_000, SessionAdopted, "taken over from an earlier daemon");
    assert_told(
        &scene.text(Some(&running), 200_000),
        "\
alice is running on n1, for 3 min 19 s
Generation 7 was requested at 2026-03-01 12:00:00.000 UTC (3 min 20 s ago)
<start>

Events:
2026-03-01 12:00:00.000 UTC session_claimed starting python:demo with docker (on n1)
2026-03-01 12:00:00.810 UTC +810 ms session_ready ready
2026-03-01 12:01:00.000 UTC +59.2 s session_adopted taken over from an earlier daemon

Next:
It is reached at http://alice.localhost:7701/.
`conman exec -it alice -- sh` opens a shell in it.",
    );
}

#[test]
fn a_session_whose_node_was_preempted() {
    let reason = "preempted: preemption notice";
    let stopped = ended(SessionState::Stopped, reason, EndCause::Preempted, None);
    let scene = started()
        .at(3_600_000, SessionKilled, "SIGKILL for the preemption")
        .at(3_600_042, SessionDead, "its PID namespace is empty")
        .at(3_600_051, SessionReleased, "preempted");
    assert_told(
        &scene.text(Some(&stopped), 3_660_000),
        "\
alice is stopped on n1: its node was preempted
Reason: preempted: preemption notice
Generation 7 was requested at 2026-03-01 12:00:00.000 UTC (1 h 1 min ago)
<start>

Events:
2026-03-01 12:00:00.000 UTC session_claimed starting python:demo with docker (on n1)
2026-03-01 12:00:00.810 UTC +810 ms session_ready ready
2026-03-01 13:00:00.000 UTC +59 min 59 s session_killed SIGKILL for the preemption
2026-03-01 13:00:00.042 UTC +42 ms session_dead its PID namespace is empty
2026-03-01 13:00:00.051 UTC +9.0 ms session_released preempted

Next:
Nothing was wrong with it: its node was preempted.
<again>",
    );
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
    let told = started().text(Some(&running), 3_660_000);
    let fact = "The fleet restarted it automatically (2 in a row): n3, where it was, was lost";
    assert!(told.lines().any(|line| line == fact), "{told}");

    if let Some(restarted) = &mut running.spec.restarted {
        restarted.count = 0;
    }
    let told = started().text(Some(&running), 3_660_000);
    let fact = "A connection started it again: n3, where it was, was lost";
    assert!(told.lines().any(|line| line == fact), "{told}");

    let reason = "preempted: preemption notice";
    let mut stopped = ended(SessionState::Stopped, reason, EndCause::Preempted, None);
    stopped.spec.on_node_loss = OnNodeLoss::Restart;
    let told = started().text(Some(&stopped), 3_660_000);
    let advice = "\nThe fleet starts it on another node automatically";
    assert!(told.contains(advice), "{told}");
    let why = "no longer restarted: 5 restarts followed each other within 10 minutes; the \
               next one is by hand";
    let scene = started().at(3_600_060, RestartGivenUp, why);
    let told = scene.text(Some(&stopped), 3_660_000);
    assert!(told.contains(&format!("restart_given_up {why}")), "{told}");
    assert!(told.contains(AGAIN) && !told.contains(advice), "{told}");
}

#[test]
fn a_session_that_is_stuck() {
    let reason =
        "stopped through the API; killed, and not dead: process 4711 is in state D (disk sleep)";
    let mut stuck = session(7, SessionState::Stuck, Some(reason));
    stuck.pid = Some(4711);
    let scene = started()
        .at(90_000, SessionKilled, "SIGKILL: stopped through the API")
        .at(95_000, SessionStuck, reason);
    let told = scene.text(Some(&stuck), 120_000);
    let told = told.replace(reason, "<reason>");
    assert_told(
        &told,
        "\
alice is stuck on n1: it was killed and is not dead
Reason: <reason>
Generation 7 was requested at 2026-03-01 12:00:00.000 UTC (2 min ago)
<start>

Events:
2026-03-01 12:00:00.000 UTC session_claimed starting python:demo with docker (on n1)
2026-03-01 12:00:00.810 UTC +810 ms session_ready ready
2026-03-01 12:01:30.000 UTC +1 min 29 s session_killed SIGKILL: stopped through the API
2026-03-01 12:01:35.000 UTC +5.00 s session_stuck <reason>

Next:
It is not released, so that nothing else runs under its name; conman keeps trying.
As root, `cat /proc/4711/stack` and `ps -o pid,stat,wchan:32,cmd -p 4711` show what it waits for: mostly a disk or a network file system that does not answer.
If that never answers again, only a restart of the machine ends it.",
    );
}

#[test]
fn a_session_whose_program_was_killed_for_its_memory() {
    let reason = "the program ended by itself, with exit code 137";
    let mut failed = ended(SessionState::Failed, reason, EndCause::Exited, None);
    failed.exit_code = Some(137);
    let scene = started()
        .at(20_000, SessionExited, reason)
        .at(20_001, SessionDead, "its PID namespace is empty")
        .at(20_004, SessionReleased, "exited")
        .at(21_000, CleanupFailed, "docker does not answer.");
    let memory = "It may have needed more than its 256 MiB of memory";
    let told = scene.text(Some(&failed), 30_000);
    for part in [
        "alice failed on n1: its program ended, with exit code 137 (SIGKILL: mostly the memory \
         limit)\n",
        "cleanup_failed docker does not answer.",
        "`conman logs alice` shows what it printed",
        memory,
        AGAIN,
    ] {
        assert!(told.contains(part), "{part}: {told}");
    }
    failed.exit_code = Some(1);
    let told = scene.text(Some(&failed), 30_000);
    assert!(!told.contains(memory), "{told}");
}

#[test]
fn advice_fits_every_state_and_cause() {
    let advice = |session: &Session| {
        let story = started().text(Some(session), 9_000);
        let (_, advice) = story.split_once("\nNext:\n").expect("advice");
        advice.to_owned()
    };
    let (live, restart) = ("conman run", "automatically");
    for (state, has, lacks) in [
        (SessionState::Starting, "ready within", live),
        (SessionState::Running, "conman exec", live),
        (SessionState::Frozen, "Wait", live),
        (SessionState::Paused, "conman resume", live),
        (
            SessionState::Stopping,
            "Wait until it has ended",
            "conman exec",
        ),
        (SessionState::Stuck, "conman keeps trying", live),
        (SessionState::Stopped, live, restart),
        (SessionState::Failed, live, restart),
    ] {
        let text = advice(&session(7, state, None));
        assert!(
            text.contains(has) && !text.contains(lacks),
            "{state}: {text}"
        );
        assert!(!text.contains(['{', '}']), "{state}: {text}");
    }
    for cause in [EndCause::Preempted, EndCause::Drained, EndCause::NodeLost] {
        let mut lost = ended(SessionState::Stopped, "for its node", cause, None);
        let text = advice(&lost);
        assert!(text.contains(live) && !text.contains(restart), "{text}");
        lost.spec.on_node_loss = OnNodeLoss::Restart;
        let text = advice(&lost);
        assert!(text.contains(restart) && !text.contains(live), "{text}");
    }
    for (cause, option) in [
        (EndCause::Idle, "--idle-timeout"),
        (EndCause::Lifetime, "--max-lifetime"),
        (EndCause::DiskLimit, "--disk"),
    ] {
        let text = advice(&ended(SessionState::Stopped, "a limit", cause, None));
        assert!(text.contains(option) && text.contains(live), "{text}");
    }
}

#[test]
fn a_session_that_its_node_forgot_is_told_from_the_journal_alone() {
    let scene = started()
        .at(700_000, SessionKilled, "SIGKILL: idle for 600 s")
        .at(700_009, SessionDead, "its PID namespace is empty")
        .at(700_012, SessionReleased, "idle for 600 s")
        .because(EndCause::Idle);
    assert_told(
        &scene.text(None, 900_000),
        "\
alice was forgotten by its node; it ended because it had no connections
Generation 7 was requested at 2026-03-01 12:00:00.000 UTC (15 min ago)
<start>

Events:
2026-03-01 12:00:00.000 UTC session_claimed starting python:demo with docker (on n1)
2026-03-01 12:00:00.810 UTC +810 ms session_ready ready
2026-03-01 12:11:40.000 UTC +11 min 39 s session_killed SIGKILL: idle for 600 s
2026-03-01 12:11:40.009 UTC +9.0 ms session_dead its PID namespace is empty
2026-03-01 12:11:40.012 UTC +3.0 ms session_released idle for 600 s

Next:
--idle-timeout lets it wait longer; 0 disables the limit.
<again>",
    );
}

#[test]
fn what_others_wrote_cannot_drive_the_terminal() {
    let hostile = "\u{1b}]0;owned\u{7}";
    let mut failed = ended(
        SessionState::Failed,
        hostile,
        EndCause::StartFailed,
        Some(hostile),
    );
    hostile.clone_into(&mut failed.node);
    let mut scene =
        Scene::new()
            .event(6, 0, SessionFailed, hostile)
            .at(900, SessionFailed, hostile);
    for event in &mut scene.0.events {
        hostile.clone_into(&mut event.node);
    }
    let mut running = session(7, SessionState::Running, None);
    running.url = Some(hostile.to_owned());
    for shown in [failed, running] {
        let story = Story::new(Some(&shown), &scene.0, None, at(1_000));
        let told = story.to_string();
        assert!(!told.contains(['\u{1b}', '\u{7}']), "{told}");
        for part in [
            vec![story.headline],
            story.facts,
            story.events,
            story.earlier,
            story.next,
        ] {
            assert!(!part.concat().contains('\u{1b}'), "{part:?}");
        }
        assert!(told.contains("\\u{1b}]0;owned"), "{told}");
    }
}

/// `<start>` is the text of [`WHOLE_START`].
fn assert_told(told: &str, expected: &str) {
    let expected = expected.replace("<start>", START).replace("<again>", AGAIN);
    assert_eq!(told, expected);
}
