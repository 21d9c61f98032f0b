//! Docker hangs, or is not there at all: what does not need it goes on.
//!
//! The tests of a hung dockerd have all of Docker for themselves, across test binaries.

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use conman_e2e::{
    Api, Conman, docker_exclusive, docker_shared, eventually, eventually_some, slowness,
};
use conman_proto::{Node, PreemptReport, Readiness, Session, SessionState, StopReport};
use http::StatusCode;
use serde_json::{Value, json};

const PATIENCE: Duration = Duration::from_secs(60);
/// The bound on a kill and its release while dockerd hangs.
const AT_ONCE: Duration = Duration::from_secs(10);

/// `GET` through the sessions listener.
async fn fetch(conman: &Conman, id: &str) -> StatusCode {
    let path = format!("/s/{id}/");
    conman.sessions().get(&path).await.status
}

async fn session_when(api: &Api, id: &str, wanted: impl Fn(&Session) -> bool) -> Session {
    eventually_some("the session gets there", PATIENCE * 3, async || {
        let session = api.session(id).await;
        wanted(&session).then_some(session)
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "in acceptance: stops the machine's Docker for others; the preemption stays"]
async fn while_dockerd_hangs_sessions_are_served_killed_and_released_and_new_ones_wait_or_fail() {
    let Some(docker) = docker_exclusive().await else {
        return;
    };
    let conman = Conman::start(&docker).await;
    let api = conman.api();
    for id in ["kept", "ended", "third"] {
        api.ensure(id, &json!({"template": "python"})).await;
    }
    let hung = docker.hang();

    let asked = Instant::now();
    let report: StopReport = api.stop("ended").await;
    let took = asked.elapsed();
    assert!(
        took < AT_ONCE * slowness(),
        "stopped after {took:?}: {report:?}"
    );
    assert_eq!(report.state, SessionState::Stopped);
    assert_eq!(fetch(&conman, "kept").await, StatusCode::OK);
    assert_eq!(fetch(&conman, "third").await, StatusCode::OK);
    assert_eq!(api.get("/readyz").await.status, StatusCode::OK);

    // A new one is not refused for ever, and not begun twice.
    let answer = api
        .put("/v1/sessions/new?wait=false", &json!({"template": "tiny"}))
        .await;
    match answer.status {
        StatusCode::ACCEPTED => {}
        StatusCode::SERVICE_UNAVAILABLE => {
            assert_eq!(answer.problem().slug(), "runtime-unavailable");
        }
        _ => panic!("{}", answer.text()),
    }
    let begun = answer.status == StatusCode::ACCEPTED;
    if begun {
        assert_eq!(api.session("new").await.state, SessionState::Starting);
    }
    // One that is given up while nobody knows whether it runs must not come to run later.
    let path = "/v1/sessions/unwanted";
    let tiny = json!({"template": "tiny"});
    let unwanted = api.put(&format!("{path}?wait=false"), &tiny).await.status == 202;
    if unwanted {
        let answer = api.delete(path).await;
        assert!(answer.status.is_success(), "{}", answer.text());
    }
    assert_eq!(fetch(&conman, "kept").await, StatusCode::OK);
    drop(hung);

    if unwanted {
        let ended = session_when(&api, "unwanted", |session| session.state.is_ended()).await;
        assert_eq!(ended.pid, None);
        let next = api.ensure("unwanted", &tiny).await.session;
        assert!(next.generation > ended.generation);
        assert_eq!(api.stop("unwanted").await.state, SessionState::Stopped);
    }
    if begun {
        let resolved = session_when(&api, "new", |session| {
            matches!(session.state, SessionState::Running | SessionState::Failed)
        })
        .await;
        assert!(resolved.state == SessionState::Running || resolved.reason.is_some());
    }
    let new = eventually_some("new sessions start again", PATIENCE * 2, async || {
        let answer = api
            .put("/v1/sessions/new", &json!({"template": "tiny"}))
            .await;
        let ok = answer.status == StatusCode::OK;
        ok.then(|| answer.expect::<Session>(StatusCode::OK))
    })
    .await;
    assert_eq!(new.state, SessionState::Running);
    // One container of each that lives, and no other.
    let instance = conman.instance();
    eventually("nothing is left over", PATIENCE * 3, async || {
        docker.containers_of(&instance).await.len() == 3
    })
    .await;
}

/// A process of a program of dockerd's name; it ends with this.
struct Namesake(Child);

impl Namesake {
    fn start(directory: &Path) -> Self {
        let program = directory.join("dockerd");
        conman_e2e::copy_program(Path::new("/bin/sh"), &program);
        let mut command = Command::new(program);
        // Until its input ends.
        command.args(["-c", "read -r _"]).stdin(Stdio::piped());
        Self(command.spawn().expect("it runs"))
    }
}

impl Drop for Namesake {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The letter for what a process does, as in ps(1).
fn state(pid: i32) -> char {
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).expect("it lives");
    let (_, after) = text.rsplit_once(") ").expect("a name");
    after.chars().next().expect("a state")
}

#[tokio::test]
#[ignore = "in acceptance: stops the machine's Docker for others"]
async fn only_the_machines_own_dockerd_is_stopped() {
    let Some(docker) = docker_exclusive().await else {
        return;
    };
    let directory = tempfile::tempdir().expect("a directory");
    let mut other = Namesake::start(directory.path());
    let hung = docker.hang();
    let pid = hung.pid();
    eventually("it stands still", PATIENCE, async || state(pid) == 'T').await;
    // Upon which it ends.
    other.0.stdin.take();
    eventually("the other one goes on", PATIENCE, async || {
        matches!(other.0.try_wait(), Ok(Some(_)))
    })
    .await;
    drop(hung);
    eventually("it goes on", PATIENCE, async || state(pid) != 'T').await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_preemption_does_not_wait_for_a_hung_dockerd() {
    const COUNT: usize = 8;
    let Some(docker) = docker_exclusive().await else {
        return;
    };
    let conman = Conman::start(&docker).await;
    let api = conman.api();
    for number in 0..COUNT {
        api.ensure(&format!("s{number}"), &json!({"template": "tiny"}))
            .await;
    }
    let hung = docker.hang();
    let asked = Instant::now();
    let report = api.post("/v1/nodes/self/preempt", &json!({})).await;
    let took = asked.elapsed();
    assert_eq!(conman.processes(), []);
    let report: PreemptReport = report.expect(StatusCode::OK);
    assert_eq!(
        (report.released, report.unreleased.len()),
        (COUNT as u64, 0)
    );
    assert!(took < AT_ONCE * slowness(), "preempted after {took:?}");
    drop(hung);
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "in acceptance: stops the machine's Docker for others; the preemption stays"]
async fn a_daemon_that_starts_while_dockerd_hangs_adopts_what_runs() {
    let Some(docker) = docker_exclusive().await else {
        return;
    };
    let mut conman = Conman::start(&docker).await;
    let before = conman
        .api()
        .ensure("s", &json!({"template": "python"}))
        .await
        .session;
    conman.crash();
    let hung = docker.hang();
    conman.launch().await;
    let api = conman.api();
    let after = api.session("s").await;
    assert_eq!(
        (after.state, after.pid, after.generation),
        (SessionState::Running, before.pid, before.generation)
    );
    assert_eq!(fetch(&conman, "s").await, StatusCode::OK);
    let asked = Instant::now();
    assert_eq!(api.stop("s").await.state, SessionState::Stopped);
    let took = asked.elapsed();
    assert!(took < AT_ONCE * slowness(), "stopped after {took:?}");
    assert_eq!(conman.processes(), []);
    drop(hung);
    let instance = conman.instance();
    eventually(
        "it is cleaned up once dockerd answers",
        PATIENCE * 3,
        async || docker.containers_of(&instance).await.is_empty(),
    )
    .await;
}

#[tokio::test]
async fn without_docker_the_api_says_why_and_what_runs_is_still_served_and_stopped() {
    let Some(docker) = docker_shared().await else {
        return;
    };
    let mut conman = Conman::start(&docker).await;
    let api = conman.api();
    let before = api
        .ensure("s", &json!({"template": "python"}))
        .await
        .session;
    conman.crash();
    // As if Docker had been taken away meanwhile.
    let config = fs::read_to_string(conman.config_path()).expect("the config is there");
    let absent = conman.directory().join("no-docker.sock");
    let line = format!("[docker]\nsocket = \"{}\"", absent.display());
    fs::write(conman.config_path(), config.replace("[docker]", &line)).expect("it is written");
    conman.launch().await;

    let readiness: Readiness = api.get("/readyz").await.expect(StatusCode::OK);
    assert!(!readiness.warnings.is_empty(), "{readiness:?}");
    let problem = api
        .put("/v1/sessions/new", &json!({"template": "tiny"}))
        .await
        .problem();
    assert_eq!(
        (problem.status, problem.slug()),
        (503, "runtime-unavailable"),
        "{problem:?}"
    );
    assert!(problem.retryable);
    let socket = absent.display().to_string();
    assert!(problem.detail.contains(&socket), "{}", problem.detail);
    let node: Node = eventually_some("the node tells", PATIENCE, async || {
        let node: Node = api.get("/v1/nodes/self").await.expect(StatusCode::OK);
        node.runtime_error.is_some().then_some(node)
    })
    .await;
    assert!(node.runtime_error.is_some_and(|why| why.contains(&socket)));

    let after = api.session("s").await;
    assert_eq!(
        (after.state, after.pid),
        (SessionState::Running, before.pid)
    );
    assert_eq!(fetch(&conman, "s").await, StatusCode::OK);
    let exec = api
        .post("/v1/sessions/s/exec", &json!({"command": ["true"]}))
        .await;
    assert_eq!(exec.problem().status, 503);
    assert_eq!(api.stop("s").await.state, SessionState::Stopped);
    assert_eq!(conman.processes(), []);
    // The failed start left nothing that would hold up the next one.
    let again: Value = api
        .put("/v1/sessions/new", &json!({"template": "tiny"}))
        .await
        .json();
    assert_eq!(again["status"], 503, "{again}");
}
