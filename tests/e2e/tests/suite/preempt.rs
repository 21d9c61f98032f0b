//! The machine is going: everything is killed, certified and released, and then told.

use std::time::Duration;

use conman_e2e::{
    Api, BUSYBOX, Conman, MetadataServer, binary, docker_shared, eventually, eventually_some,
};
use conman_proto::{
    Event, EventKind, EventPage, Node, NodeState, PreemptPlan, PreemptReport, SessionList,
    SessionState,
};
use futures_util::StreamExt as _;
use futures_util::stream;
use http::StatusCode;
use serde_json::{Value, json};

const PATIENCE: Duration = Duration::from_secs(60);

async fn ensure_many(api: &Api, count: usize, request: &Value) {
    stream::iter(0..count)
        .for_each_concurrent(8, async |number| {
            api.ensure(&format!("s{number}"), request).await;
        })
        .await;
}

async fn states(api: &Api) -> Vec<SessionState> {
    let list: SessionList = api
        .get("/v1/sessions?limit=1000")
        .await
        .expect(StatusCode::OK);
    list.sessions.iter().map(|session| session.state).collect()
}

async fn events(api: &Api) -> Vec<Event> {
    let path = "/v1/events?follow=false&limit=1000";
    let page: EventPage = api.get(path).await.expect(StatusCode::OK);
    page.events
}

async fn node(api: &Api) -> Node {
    api.get("/v1/nodes/self").await.expect(StatusCode::OK)
}

#[tokio::test]
#[ignore = "in acceptance: sixty containers of Docker take all of a machine; `native_sessions::a_preemption…` and `docker_trouble::a_preemption…` stay"]
async fn sixty_sessions_are_dead_and_released_within_a_second_of_the_notice() {
    const COUNT: usize = 60;
    let Some(docker) = docker_shared().await else {
        return;
    };
    let conman = Conman::start(&docker).await;
    let api = conman.api();
    // Programs with children, some of which ignore what can be ignored.
    let script = "trap '' TERM INT; sleep 1000001 & (trap '' HUP TERM; sleep 1000002) & wait";
    let request = json!({"image": BUSYBOX, "command": ["sh", "-c", script]});
    ensure_many(&api, COUNT, &request).await;

    let plan = api
        .post("/v1/nodes/self/preempt", &json!({"dry_run": true}))
        .await;
    let plan: PreemptPlan = plan.expect(StatusCode::OK);
    assert_eq!(plan.sessions.len(), COUNT);
    assert_eq!(states(&api).await, vec![SessionState::Running; COUNT]);
    assert!(conman.processes().len() >= COUNT);
    assert_eq!(node(&api).await.state, NodeState::Live);

    let notice = json!({"reason": "a test"});
    let report = api.post("/v1/nodes/self/preempt", &notice).await;
    // Seen by the kernel, whatever the report says.
    assert_eq!(conman.processes(), []);
    let report: PreemptReport = report.expect(StatusCode::OK);
    let counts = [
        report.sessions,
        report.killed,
        report.certified,
        report.released,
    ];
    assert_eq!(counts, [COUNT as u64; 4]);
    assert_eq!(report.unreleased, []);
    let times = [
        report.last_kill_ms,
        report.last_certificate_ms,
        report.last_release_ms,
    ];
    let times = times.map(|time| time.expect("there was something to do"));
    // Far below what dockerd takes for so many; other tests of this machine take their part.
    assert!(times.is_sorted() && times[2] < 5_000.0, "{times:?}");
    assert_eq!(states(&api).await, vec![SessionState::Stopped; COUNT]);

    // A second notice is the same one, from wherever it comes.
    let again = conman
        .admin()
        .post("/v1/nodes/self/preempt", &json!({}))
        .await;
    assert_eq!(again.expect::<PreemptReport>(StatusCode::OK), report);
    let refused = api.put("/v1/sessions/late", &request).await.problem();
    assert_eq!((refused.status, refused.slug()), (503, "node-preempted"));
    assert_eq!(
        api.get("/readyz").await.status,
        StatusCode::SERVICE_UNAVAILABLE
    );

    let readmitted = api.post("/v1/nodes/self/readmit", &json!({})).await;
    let readmitted: Node = readmitted.expect(StatusCode::OK);
    assert_eq!(readmitted.state, NodeState::Live);
    assert_eq!(api.get("/readyz").await.status, StatusCode::OK);
    let next = api.ensure("s0", &request).await;
    assert!(next.created);
    // The next notice is a new one.
    let second = api.post("/v1/nodes/self/preempt", &json!({})).await;
    assert_eq!(second.expect::<PreemptReport>(StatusCode::OK).sessions, 1);
    assert_eq!(conman.processes(), []);
}

#[tokio::test]
async fn a_grace_period_lets_a_program_finish_and_never_outlasts_the_budget() {
    let Some(docker) = docker_shared().await else {
        return;
    };
    let directory = tempfile::tempdir().expect("a temporary directory");
    let root = directory.path().canonicalize().expect("it is there");
    let out = root.join("out");
    std::fs::create_dir(&out).expect("a directory");
    let conman = Conman::builder()
        .set("binds", &format!("allow = [\"{}\"]", root.display()))
        .start(&docker)
        .await;
    let api = conman.api();
    let request = |script: &str, grace_ms: u32| {
        json!({"image": BUSYBOX, "command": ["sh", "-c", script], "preempt_signal": "SIGTERM",
            "preempt_grace_ms": grace_ms, "binds": [format!("{}:/out", out.display())]})
    };
    let polite = "trap 'echo saved > /out/saved; exit 0' TERM; touch /out/polite; \
                  while :; do sleep 0.1; done";
    let rude = "trap '' TERM; touch /out/rude; while :; do sleep 0.1; done";
    api.ensure("polite", &request(polite, 30_000)).await;
    api.ensure("rude", &request(rude, 60_000)).await;
    eventually("both have set their traps", PATIENCE, async || {
        out.join("polite").exists() && out.join("rude").exists()
    })
    .await;

    let dry_run = json!({"dry_run": true, "budget_ms": 10_000});
    let plan = api.post("/v1/nodes/self/preempt", &dry_run).await;
    let plan: PreemptPlan = plan.expect(StatusCode::OK);
    let mut graces = plan.sessions.iter().map(|session| session.grace_ms);
    assert!(graces.all(|grace| grace <= 10_000), "{plan:?}");
    let report = api
        .post("/v1/nodes/self/preempt", &json!({"budget_ms": 10_000}))
        .await;
    let report: PreemptReport = report.expect(StatusCode::OK);
    assert_eq!((report.released, report.unreleased.len()), (2, 0));
    assert_eq!(conman.processes(), []);
    assert!(report.last_release_ms < Some(10_000.0), "{report:?}");
    assert!(out.join("saved").exists());
}

#[tokio::test]
async fn conman_preempt_tells_what_would_be_done_and_then_does_it() {
    let Some(docker) = docker_shared().await else {
        return;
    };
    let conman = Conman::start(&docker).await;
    ensure_many(&conman.api(), 2, &json!({"template": "tiny"})).await;
    let plan = conman.cli(&["preempt", "--dry-run"]).await;
    assert!(
        plan.success().contains("s0") && plan.stdout.contains("s1"),
        "{plan:?}"
    );
    assert_eq!(states(&conman.api()).await, [SessionState::Running; 2]);
    let report = conman
        .cli(&["--json", "preempt", "--yes", "--reason", "by hand"])
        .await;
    let report: PreemptReport = serde_json::from_str(report.success()).expect("a report");
    assert_eq!((report.released, report.source.as_str()), (2, "admin"));
    assert_eq!(conman.processes(), []);
    let told = events(&conman.api()).await;
    let told = told
        .iter()
        .find(|event| event.kind == EventKind::PreemptStarted);
    assert!(
        told.is_some_and(|event| event.message.contains("by hand")),
        "{told:?}"
    );
}

#[tokio::test]
async fn starts_under_way_do_not_survive_a_preemption() {
    let Some(docker) = docker_shared().await else {
        return;
    };
    let conman = Conman::start(&docker).await;
    let api = conman.api();
    for number in 0..20 {
        let path = format!("/v1/sessions/s{number}?wait=false");
        let answer = api.put(&path, &json!({"template": "tiny"})).await;
        assert!(answer.status.is_success(), "{}", answer.text());
    }
    eventually("some of them run", PATIENCE, async || {
        !conman.processes().is_empty()
    })
    .await;
    // dockerd may be slow to say what it has started.
    let notice = json!({"budget_ms": 120_000});
    let report = api.post("/v1/nodes/self/preempt", &notice).await;
    let report: PreemptReport = report.expect(StatusCode::OK);
    assert_eq!(report.unreleased, [], "{report:?}");
    assert_eq!(conman.processes(), []);
    assert!(states(&api).await.iter().all(|state| state.is_ended()));
    // While the machine is going nobody cleans up; when it stays after all, somebody must.
    let readmitted = api.post("/v1/nodes/self/readmit", &json!({})).await;
    assert_eq!(readmitted.status, StatusCode::OK);
    let instance = conman.instance();
    eventually("nothing is left", PATIENCE * 3, async || {
        docker.containers_of(&instance).await.is_empty()
    })
    .await;
    assert_eq!(conman.processes(), []);
}

#[tokio::test]
async fn sigterm_preempts_where_the_configuration_says_so() {
    let Some(docker) = docker_shared().await else {
        return;
    };
    let mut conman = Conman::builder()
        .set("preempt", "on_sigterm = \"preempt\"")
        .start(&docker)
        .await;
    ensure_many(&conman.api(), 5, &json!({"template": "tiny"})).await;
    let before = conman.api().session("s0").await;
    assert!(conman.terminate().await.success());
    assert_eq!(conman.processes(), []);
    conman.launch().await;
    let api = conman.api();
    assert_eq!(states(&api).await, [SessionState::Stopped; 5]);
    let told = events(&api).await;
    let finished = told
        .iter()
        .find(|event| event.kind == EventKind::PreemptFinished);
    assert!(finished.is_some(), "{told:?}");
    // The machine stayed, and so the next daemon admits.
    let next = api.ensure("s0", &json!({"template": "tiny"})).await.session;
    assert!(next.generation > before.generation);
}

#[tokio::test]
async fn the_notice_of_the_metadata_server_preempts_once_whatever_else_it_says() {
    let Some(docker) = docker_shared().await else {
        return;
    };
    let metadata = MetadataServer::start().await;
    metadata.fail(true);
    let conman = Conman::builder()
        .set("preempt", "gce = true")
        .set(
            "preempt",
            &format!("gce_endpoint = \"{}\"", metadata.endpoint()),
        )
        .start(&docker)
        .await;
    let api = conman.api();
    ensure_many(&api, 3, &json!({"template": "tiny"})).await;
    // Errors are no notice; neither is a maintenance event that the machine lives through.
    eventually("it goes on asking", PATIENCE, async || metadata.asked() > 4).await;
    metadata.fail(false);
    metadata.set("maintenance-event", "MIGRATE_ON_HOST_MAINTENANCE");
    let asked = metadata.asked();
    eventually("it has read both values", PATIENCE, async || {
        metadata.asked() >= asked + 4
    })
    .await;
    assert_eq!(states(&api).await, [SessionState::Running; 3]);

    metadata.set("preempted", "TRUE");
    eventually("every process is dead", PATIENCE, async || {
        conman.processes().is_empty()
    })
    .await;
    let told = eventually_some("it is over", PATIENCE, async || {
        let told = events(&api).await;
        let over = told
            .iter()
            .any(|event| event.kind == EventKind::PreemptFinished);
        over.then_some(told)
    })
    .await;
    let notice = told
        .iter()
        .find(|event| event.kind == EventKind::PreemptStarted);
    let notice = &notice.expect("the notice is told").message;
    assert!(notice.contains("Compute Engine"), "{notice}");
    assert_eq!(states(&api).await, [SessionState::Stopped; 3]);
    assert_eq!(node(&api).await.state, NodeState::Preempted);

    // The same notice over the other channel, and the same value again after an error.
    metadata.set("maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE");
    metadata.fail(true);
    let asked = metadata.asked();
    eventually("it has seen the error", PATIENCE, async || {
        metadata.asked() > asked + 1
    })
    .await;
    metadata.fail(false);
    let asked = metadata.asked();
    eventually("it has read both values", PATIENCE, async || {
        metadata.asked() >= asked + 2
    })
    .await;
    let finished = events(&api).await;
    let finished = finished
        .iter()
        .filter(|event| event.kind == EventKind::PreemptFinished);
    assert_eq!(finished.count(), 1);

    // Both notices are withdrawn: the machine stays after all.
    metadata.set("preempted", "FALSE");
    metadata.set("maintenance-event", "NONE");
    eventually("the node admits again", PATIENCE, async || {
        node(&api).await.state == NodeState::Live
    })
    .await;
    assert!(api.ensure("s0", &json!({"template": "tiny"})).await.created);
}

#[tokio::test]
async fn sources_of_notices_are_asked_once_and_say_whether_they_answer() {
    let metadata = MetadataServer::start().await;
    let directory = tempfile::tempdir().expect("a directory");
    let file = directory.path().join("conman.toml");
    // Nobody listens on this port (tcpmux).
    let nowhere = "http://127.0.0.1:1";
    let text = format!(
        "[preempt]\ngce_endpoint = \"{}\"\naws = true\naws_endpoint = \"{nowhere}\"\nazure_endpoint = \
         \"{nowhere}\"\nfile = \"/no/such/file\"\nlogind_endpoint = \"unix:path=/no/such/bus\"\n",
        metadata.endpoint()
    );
    std::fs::write(&file, text).expect("written");
    let ask = move || {
        let output = std::process::Command::new(binary())
            .args(["notice", "test", "--config"])
            .arg(&file)
            .output();
        output.expect("conman runs")
    };
    let asked = tokio::task::spawn_blocking(ask).await.expect("no panic");
    let text = String::from_utf8_lossy(&asked.stdout);
    let line = |source: &str| text.lines().find(|line| line.starts_with(source));
    for (source, words) in [
        ("aws", "on   silent"),
        ("azure", "off  silent"),
        ("gce", "off  answers"),
        ("gce", "preempted is FALSE"),
        ("file", "on   answers"),
        ("logind", "off  silent"),
        ("switch it on", "`gce = true`"),
        ("a source that is on", "mend it"),
    ] {
        assert!(
            line(source).is_some_and(|line| line.contains(words)),
            "{source} {words}: {text}"
        );
    }
    assert_eq!(asked.status.code(), Some(1), "aws is on and silent");
}
