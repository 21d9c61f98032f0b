//! Sessions that are paused, resumed, restarted, signalled and forgotten.

use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use conman_e2e::{Answer, Api, Conman, ROOT, eventually, native};
use conman_linux::Freezer;
use conman_observer::ProcEntry;
use conman_proto::{EnsureResponse, PreemptPlan, PreemptReport, Session, SessionState};
use http::StatusCode;
use serde_json::json;
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::time::timeout;

const PATIENCE: Duration = Duration::from_secs(60);

async fn order(api: &Api, id: &str, what: &str) -> Session {
    let answer = api
        .post(&format!("/v1/sessions/{id}/{what}"), &json!(null))
        .await;
    answer.expect(StatusCode::OK)
}

/// Whether the kernel lets nothing of the session run.
fn is_frozen(session: &Session) -> bool {
    let freezer = Freezer::detect().expect("a freezer");
    let place = freezer
        .place_of(session.pid.expect("it runs"))
        .expect("readable");
    freezer
        .is_frozen(&place.expect("a cgroup"))
        .expect("readable")
}

async fn page(conman: &Conman, id: &str) -> String {
    conman.sessions().get(&format!("/s/{id}/")).await.text()
}

/// A session like `web`, which a connection resumes.
const RESUMED_BY_USE: &str = r#"
[templates.easy]
image = "conman-test/root:1"
command = ["httpd", "-f", "-p", "8080", "-h", "/www"]
port = 8080
resume_on_connect = true
"#;

async fn exec(api: &Api, id: &str) -> Answer {
    let exec = json!({"command": ["echo", "awake"]});
    api.post(&format!("/v1/sessions/{id}/exec"), &exec).await
}

#[tokio::test]
async fn a_session_paused_by_an_order_does_not_run_until_it_is_resumed() {
    let Some(native) = native() else { return };
    let mut conman = Conman::builder().start_native(&native).await;
    let api = conman.api();
    api.ensure("web", &json!({"template": "web"})).await;
    for _ in 0..2 {
        let paused = order(&api, "web", "pause").await;
        assert!(
            paused.state == SessionState::Paused && is_frozen(&paused),
            "{paused:?}"
        );
    }
    // Nothing resumes it: no look at it, no connection, no command, no new daemon.
    for _ in 0..2 {
        let api = conman.api();
        api.get("/v1/sessions/web/logs").await;
        let refused = conman.sessions().get("/s/web/").await.problem();
        assert_eq!((refused.status, refused.slug()), (409, "session-paused"));
        let refused = exec(&api, "web").await.problem();
        assert_eq!(refused.slug(), "not-running");
        assert!(refused.detail.contains("resume it"), "{refused:?}");
        let session = api.session("web").await;
        assert!(
            session.state == SessionState::Paused && is_frozen(&session),
            "{session:?}"
        );
        conman.restart_after_crash().await;
    }
    let api = conman.api();
    let resumed = order(&api, "web", "resume").await;
    assert!(
        resumed.state == SessionState::Running && !is_frozen(&resumed),
        "{resumed:?}"
    );
    assert_eq!(page(&conman, "web").await, "hello\n");
    // One that is paused ends like any other.
    order(&api, "web", "pause").await;
    assert_eq!(api.stop("web").await.state, SessionState::Stopped);
    let ended = api.post("/v1/sessions/web/pause", &json!(null)).await;
    assert_eq!(ended.problem().slug(), "not-running");
}

#[tokio::test]
async fn a_template_lets_what_begins_resume_a_session_that_an_order_has_paused() {
    let Some(native) = native() else { return };
    let builder = Conman::builder().toml(RESUMED_BY_USE);
    let conman = builder.start_native(&native).await;
    let api = conman.api();
    api.ensure("easy", &json!({"template": "easy"})).await;
    order(&api, "easy", "pause").await;
    assert_eq!(page(&conman, "easy").await, "hello\n");
    let session = api.session("easy").await;
    assert!(
        session.state == SessionState::Running && !is_frozen(&session),
        "{session:?}"
    );
    order(&api, "easy", "pause").await;
    let result = exec(&api, "easy").await.text();
    assert!(result.contains("awake"), "{result}");
}

#[tokio::test]
async fn a_paused_session_with_a_command_ends_with_all_that_conman_put_into_it() {
    let Some(native) = native() else { return };
    let conman = Conman::builder().start_native(&native).await;
    let api = conman.api();
    let cgroups = || {
        let instance = format!("conman-{}", conman.instance());
        let below = Path::new("/sys/fs/cgroup");
        let hierarchies = std::fs::read_dir(below).expect("mounted").flatten();
        let all = hierarchies.map(|one| one.path()).chain([below.to_owned()]);
        let sessions = all.flat_map(|one| std::fs::read_dir(one.join(&instance)));
        let sessions = sessions.flat_map(|entries| entries.flatten());
        sessions.filter(|one| one.path().is_dir()).count()
    };
    for end in ["rm", "restart"] {
        api.ensure("s", &json!({"template": "idle"})).await;
        let mut command = conman.cli_command();
        let script = "echo begun; sleep 100000; true";
        command
            .args(["exec", "s", "sh", "-c", script])
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true);
        let mut child = command.spawn().expect("conman starts");
        let mut lines = BufReader::new(child.stdout.take().expect("piped")).lines();
        let line = timeout(PATIENCE, lines.next_line()).await.expect("begun");
        assert_eq!(line.expect("read").as_deref(), Some("begun"));
        order(&api, "s", "pause").await;
        conman.cli(&[end, "s"]).await.success();
        let output = timeout(PATIENCE, child.wait_with_output()).await;
        let output = output.expect("the client gets an end").expect("waited");
        assert_ne!(output.status.code(), Some(0), "{output:?}");
        // The init and the program of the next life.
        let left = if end == "restart" { 2 } else { 0 };
        eventually("nothing of the former life is left", PATIENCE, async || {
            conman.processes().len() == left && (left > 0 || cgroups() == 0)
        })
        .await;
    }
}

#[tokio::test]
async fn a_session_with_a_command_is_not_idle_and_one_without_is() {
    let Some(native) = native() else { return };
    let conman = Conman::builder().start_native(&native).await;
    let api = conman.api();
    let spec = json!({"template": "idle", "idle_timeout_s": 1});
    for id in ["kept", "collected"] {
        api.ensure(id, &json!({"template": "idle"})).await;
    }
    let kept = conman.cli(&["exec", "--detach", "kept", "sleep", "100000"]);
    let kept = kept.await.success().trim().to_owned();
    let collected = tokio::spawn({
        let api = api.clone();
        async move {
            let request = json!({"command": ["sleep", "100000"], "timeout_ms": 3_600_000});
            api.post("/v1/sessions/collected/exec", &request).await
        }
    });
    eventually("both commands run", PATIENCE, async || {
        let is_one = |one: &ProcEntry| {
            let line = std::fs::read(format!("/proc/{}/cmdline", one.pid));
            line.is_ok_and(|line| line == b"sleep\x00100000\x00")
        };
        conman.processes().into_iter().filter(is_one).count() == 2
    })
    .await;
    for id in ["kept", "collected"] {
        let update = ["update", id, "--idle-timeout", "1s"];
        conman.cli(&update).await.success();
    }
    // Sessions that do nothing end meanwhile, one after the other.
    for id in ["idle-1", "idle-2", "idle-3"] {
        api.ensure(id, &spec).await;
        eventually("it is idle", PATIENCE, async || {
            api.session(id).await.state == SessionState::Stopped
        })
        .await;
    }
    for id in ["kept", "collected"] {
        assert_eq!(api.session(id).await.state, SessionState::Running, "{id}");
    }
    let path = format!("/v1/sessions/kept/execs/{kept}/signal");
    api.post(&path, &json!(null)).await;
    collected.abort();
    for id in ["kept", "collected"] {
        eventually("it is idle", PATIENCE, async || {
            api.session(id).await.state == SessionState::Stopped
        })
        .await;
        let session = api.session(id).await;
        let reason = session.reason.as_deref();
        assert_eq!(reason, Some("idle for 1 s after a command"), "{id}");
        let why = conman.cli(&["why", id]).await.success().to_owned();
        assert!(why.contains("after a command"), "{why}");
    }
}

#[tokio::test]
async fn an_idle_session_is_paused_and_resumed_by_each_connection() {
    let Some(native) = native() else { return };
    let conman = Conman::builder().start_native(&native).await;
    let api = conman.api();
    let spec = json!({"template": "web", "idle_timeout_s": 1, "idle_action": "pause"});
    let generation = api.ensure("web", &spec).await.session.generation;
    for _ in 0..2 {
        eventually("it is paused", PATIENCE, async || {
            api.session("web").await.state == SessionState::Paused
        })
        .await;
        assert_eq!(page(&conman, "web").await, "hello\n");
    }
    assert_eq!(api.session("web").await.generation, generation);
}

#[tokio::test]
async fn a_session_is_restarted_signalled_and_forgotten() {
    let Some(native) = native() else { return };
    let conman = Conman::builder().start_native(&native).await;
    let api = conman.api();
    let script = "trap 'echo signalled; exit 7' USR1; echo begun; while :; do sleep 0.1; done";
    let spec = json!({"image": ROOT, "command": ["sh", "-c", script], "labels": {"a": "b"}});
    let first = api.ensure("s", &spec).await.session;
    let answer = api.post("/v1/sessions/s/restart", &json!(null)).await;
    let second: EnsureResponse = answer.expect(StatusCode::OK);
    let second = second.session;
    assert!(second.generation > first.generation, "{second:?}");
    assert_eq!(
        (&second.spec, second.state),
        (&first.spec, SessionState::Running)
    );
    // A node that would refuse the start leaves the session as it is.
    conman.cli(&["cordon", "self"]).await.success();
    let answer = api.post("/v1/sessions/s/restart", &json!(null)).await;
    assert_eq!(answer.problem().slug(), "node-cordoned");
    assert_eq!(api.session("s").await.generation, second.generation);
    conman.cli(&["uncordon", "self"]).await.success();
    eventually("its trap is set", PATIENCE, async || {
        api.get("/v1/sessions/s/logs")
            .await
            .text()
            .contains("begun")
    })
    .await;
    let unknown = api
        .post("/v1/sessions/s/kill?signal=NOPE", &json!(null))
        .await;
    assert_eq!(unknown.problem().slug(), "bad-query");
    conman
        .cli(&["kill", "s", "--signal", "USR1"])
        .await
        .success();
    eventually("it has exited", PATIENCE, async || {
        api.session("s").await.exit_code == Some(7)
    })
    .await;
    // Also one that has ended.
    conman.cli(&["restart", "s"]).await.success();
    conman.cli(&["rm", "s", "--forget"]).await.success();
    let gone = api.get("/v1/sessions/s").await;
    assert_eq!(gone.status, StatusCode::NOT_FOUND, "{}", gone.text());
    let again = api.ensure("s", &spec).await.session;
    assert!(again.generation > second.generation, "{again:?}");
}

#[tokio::test]
async fn a_drained_session_that_was_paused_gets_its_signal_and_its_grace() {
    let Some(native) = native() else { return };
    let conman = Conman::builder().start_native(&native).await;
    let api = conman.api();
    let script = "trap 'echo saved; exit' USR1; echo begun; while :; do sleep 0.1; done";
    let spec = json!({"image": ROOT, "command": ["sh", "-c", script]});
    api.ensure("s", &spec).await;
    eventually("its trap is set", PATIENCE, async || {
        let log = api.get("/v1/sessions/s/logs").await;
        log.text().contains("begun")
    })
    .await;
    order(&api, "s", "pause").await;
    let drain = json!({"signal": "SIGUSR1", "grace_ms": 30_000});
    let answer = api.post("/v1/nodes/self/drain", &drain).await;
    assert!(answer.status.is_success(), "{}", answer.text());
    eventually("it has ended", PATIENCE, async || {
        api.session("s").await.state.is_ended()
    })
    .await;
    let log = api.get("/v1/sessions/s/logs").await.text();
    assert!(log.contains("saved"), "{log}");
}

#[tokio::test]
async fn a_preemption_does_not_wait_for_a_session_that_is_paused() {
    let Some(native) = native() else { return };
    let conman = Conman::builder().start_native(&native).await;
    let api = conman.api();
    let spec = json!({
        "template": "idle", "preempt_signal": "SIGUSR1", "preempt_grace_ms": 60_000
    });
    api.ensure("s", &spec).await;
    let plan = async || -> PreemptPlan {
        let asked = json!({"dry_run": true, "budget_ms": 600_000});
        let answer = api.post("/v1/nodes/self/preempt", &asked).await;
        answer.expect(StatusCode::OK)
    };
    let running = plan().await;
    assert!(running.sessions[0].grace_ms > 0, "{running:?}");
    order(&api, "s", "pause").await;
    let paused = plan().await;
    let session = &paused.sessions[0];
    assert_eq!((session.grace_ms, &session.signal), (0, &None));
    let budget = json!({"budget_ms": 600_000});
    let answer = api.post("/v1/nodes/self/preempt", &budget).await;
    let report: PreemptReport = answer.expect(StatusCode::OK);
    assert_eq!((report.certified, report.unreleased), (1, Vec::new()));
}
