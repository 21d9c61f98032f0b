//! The init of native sessions, next to Docker's own.

use std::time::Duration;

use conman_e2e::{Api, BUSYBOX, Conman, Docker, ROOT, docker_shared, eventually_some, native};
use conman_proto::{ExecResult, Session, SessionStats};
use http::StatusCode;
use serde_json::{Value, json};

const PATIENCE: Duration = Duration::from_secs(60);

/// Each runtime's template and image.
const RUNTIMES: [(&str, &str, &str); 2] = [("native", "idle", ROOT), ("docker", "tiny", BUSYBOX)];

async fn started() -> Option<(Conman, Docker)> {
    let native = native()?;
    let docker = docker_shared().await?;
    Some((Conman::builder().start_both(&native, &docker).await, docker))
}

async fn start(api: &Api, (id, template, image): (&str, &str, &str), more: &Value) -> Session {
    let mut spec = json!({"template": template, "image": image, "pids": 1_024});
    for (field, value) in more.as_object().expect("an object") {
        spec[field] = value.clone();
    }
    api.ensure(id, &spec).await.session
}

async fn sh(api: &Api, id: &str, script: &str) -> ExecResult {
    let request = json!({"command": ["sh", "-c", script], "timeout_ms": 120_000});
    let answer = api.post(&format!("/v1/sessions/{id}/exec"), &request).await;
    answer.expect(StatusCode::OK)
}

async fn exit_code(api: &Api, id: &str) -> Option<i32> {
    let ended = eventually_some("it has ended", PATIENCE, async || {
        let session = api.session(id).await;
        session.state.is_ended().then_some(session)
    });
    ended.await.exit_code
}

#[tokio::test]
async fn short_commands_in_the_background_do_not_use_up_a_sessions_processes() {
    let Some((conman, _docker)) = started().await else {
        return;
    };
    let api = conman.api();
    for runtime in RUNTIMES {
        let (id, ..) = runtime;
        start(&api, runtime, &json!({"command": ["sleep", "1000000"]})).await;
        let script = "i=0; while [ $i -lt 1000 ]; do (true &); i=$((i+1)); done; echo all";
        for _ in 0..3 {
            let result = sh(&api, id, script).await;
            assert_eq!(
                (result.exit_code, result.stdout.trim()),
                (0, "all"),
                "{id}: {result:?}"
            );
        }
        let zombies = "grep -l '^State:.Z' /proc/[0-9]*/status 2>/dev/null | wc -l";
        eventually_some("none is left", PATIENCE, async || {
            (sh(&api, id, zombies).await.stdout.trim() == "0").then_some(())
        })
        .await;
        let init = sh(&api, id, "cat /proc/1/comm").await.stdout;
        assert!(init.contains("init"), "{id}: {init}");
    }
    // What carried the last command's streams may end after it.
    eventually_some("its program alone is left", PATIENCE, async || {
        let stats = api.get("/v1/sessions/native/stats").await;
        let stats: SessionStats = stats.expect(StatusCode::OK);
        assert_eq!(stats.pids_limit, 1_024);
        (stats.pids == Some(1)).then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_program_ends_by_signals_and_codes_as_below_dockers_init() {
    let Some((conman, _docker)) = started().await else {
        return;
    };
    let api = conman.api();
    for (number, script) in ["exit 7", "kill -9 $$", "kill -11 $$", "kill -15 $$"]
        .iter()
        .enumerate()
    {
        let mut codes = Vec::new();
        for (name, template, image) in RUNTIMES {
            let id = format!("{name}-{number}");
            // It ends once it surely runs.
            let script = format!("until [ -e /tmp/end ]; do sleep 0.05; done; {script}");
            let more = json!({"command": ["sh", "-c", script]});
            start(&api, (&id, template, image), &more).await;
            let end = json!({"command": ["touch", "/tmp/end"]});
            // Its end may overtake the answer.
            let _ = api.post(&format!("/v1/sessions/{id}/exec"), &end).await;
            codes.push(exit_code(&api, &id).await);
        }
        assert_eq!(codes[0], codes[1], "{script}");
    }
    // A signal that the program does not handle ends it.
    for runtime in RUNTIMES {
        start(&api, runtime, &json!({"command": ["sleep", "1000000"]})).await;
        conman
            .cli(&["kill", "--signal", "TERM", runtime.0])
            .await
            .success();
        assert_eq!(exit_code(&api, runtime.0).await, Some(143), "{}", runtime.0);
    }
}

#[tokio::test]
async fn the_pid_is_the_programs_and_stays_it_after_a_crash_of_the_daemon() {
    let Some(native) = native() else { return };
    let mut conman = Conman::builder().start_native(&native).await;
    let api = conman.api();
    let session = start(&api, RUNTIMES[0], &json!({"command": ["sleep", "1000000"]})).await;
    let pid = session.pid.expect("it runs");
    let comm = std::fs::read_to_string(format!("/proc/{pid}/comm")).expect("it lives");
    assert_eq!(comm, "sleep\n");
    conman.restart_after_crash().await;
    let api = conman.api();
    assert_eq!(api.session("native").await.pid, Some(pid));
    let result = sh(&api, "native", "echo $PPID; cat /proc/1/comm").await;
    assert_eq!(result.stdout, "0\nconman-init\n");
}

#[tokio::test]
async fn a_program_may_be_the_init_itself_in_native_sessions() {
    let Some((conman, _docker)) = started().await else {
        return;
    };
    let api = conman.api();
    let command = ["sh", "-c", "echo $$; exec sleep 1000000"];
    start(
        &api,
        RUNTIMES[0],
        &json!({"init": false, "command": command}),
    )
    .await;
    eventually_some("it is the first process", PATIENCE, async || {
        let first = sh(&api, "native", "cat /proc/1/comm").await.stdout;
        (first == "sleep\n").then_some(())
    })
    .await;
    let logged = conman.cli(&["logs", "native"]).await;
    assert_eq!(logged.success(), "1\n");
    let shown = api.session("native").await.spec;
    assert!(!shown.init);
    let spec = json!({"template": "tiny", "init": false});
    let refused = api.put("/v1/sessions/docker", &spec).await;
    assert!(
        refused.problem().detail.contains("always have one"),
        "{refused:?}"
    );
}
